"""The forks of 04: policy gradient with group baselines (examples/grpo.py), also by a critic's advantages or with turns
weighted by a critic (examples/signed.py), privileged self-distillation (examples/distill.py), and turns ranked by what
their replies tell (examples/gain.py). They are started as modules, as users start them."""
import argparse
import copy
import json
import os
import shutil
import signal
import subprocess
import time

import pytest
import torch

import common
from colbench import backend
from conftest import begin, fork, policy_flags, read, refused, ROOT, stage, succeed, wait
from lib.models import encode, Projection

grpo, distill, gain, signed = fork("grpo"), fork("distill"), fork("gain"), fork("signed")
BASE = ROOT / "models" / "tiny"
TASK = {"problem_description": "x", "ground_truth": "y", "test_cases": {}}


def flags(workspace, method, out, *more):
    return policy_flags(workspace, method, out, "--lr", 1e-3, "--max-steps", 3, *more)


def an_item(tokenizer):
    """Two turns in one row, as rows_of_trajectory makes them."""
    first, second = encode(tokenizer, "Which value?"), encode(tokenizer, "Do not worry.")
    end = tokenizer.eos_token_id
    read = [encode(tokenizer, text) for text in ("<|user|>Can you help?<|assistant|>", "<|user|>The pass mark is 75."
                                                 "<|end|><|assistant|>")]
    ids = read[0] + first + [end] + read[1] + second + [end]
    return [common.Row(ids, [-1] * len(read[0]) + [0] * (len(first) + 1) + [-1] * len(read[1]) +
                       [1] * (len(second) + 1))]


# --- the diff is the lesson

@pytest.mark.parametrize("name, origin, most", [
    ("grpo", "04_train_policy.py", 150), ("distill", "04_train_policy.py", 80), ("gain", "04_train_policy.py", 150),
    ("signed", "examples/grpo.py", 80)])
def test_a_fork_differs_from_its_origin_by_its_method_alone(name, origin, most):
    paths = ROOT / origin, ROOT / "examples" / f"{name}.py"
    lines = subprocess.run(["diff", *paths], capture_output=True, text=True).stdout.splitlines()
    changed = [line for line in lines if line.startswith(("<", ">"))]
    assert 30 < len(changed) <= most
    assert not any("def dpo_loss" in line or "def sweet_examples" in line for line in changed)


@pytest.mark.parametrize("module", [grpo, distill, gain, signed])
def test_a_fork_says_how_it_is_started_and_what_changed(module):
    name = module.__name__.rpartition(".")[2]
    origin = "examples/grpo.py" if module is signed else "04_train_policy.py"
    assert f"diff {origin} examples/{name}.py" in module.__doc__ and "What changed" in module.__doc__
    assert f"    python -m examples.{name} --method {name} " in module.__doc__
    assert f" -m examples.{name} --method {name} " in module.__doc__.partition("torchrun --nproc-per-node 8")[2]


# --- grpo

def test_the_clipped_objective_by_hand_in_float64():
    """Ratio 1: the advantage. Ratio 2: clipped to 1.2 where that is less, as it is where A > 0. Ratio 1/2: a good
    token's is taken as it is (.5 A), a bad one's is clipped to .8. KL estimate of ratio 2: 2 log 2 - 2 + 1. A token
    that has become impossible gives no NaN."""
    value = lambda *numbers: torch.tensor([numbers], dtype=torch.float64)
    log = value(1.0, 2.0, 2.0, 0.5, 0.5).log()
    advantages = value(3.0, 3.0, -3.0, 3.0, -3.0)
    objective, ratios = grpo.clipped_objective(log - 7, torch.full_like(log, -7), advantages, 0.2, 0.0)
    assert ratios[0].tolist() == pytest.approx([1, 2, 2, .5, .5], abs=1e-12)
    assert objective[0].tolist() == pytest.approx([3, 3.6, -6, 1.5, -2.4], abs=1e-12)
    with_kl, _ = grpo.clipped_objective(log, torch.zeros_like(log), advantages, 0.2, 0.1)
    log_2 = .6931471805599453
    kls = [0, 2 * log_2 - 1, 2 * log_2 - 1, .5 - .5 * log_2, .5 - .5 * log_2]
    lost, _ = grpo.clipped_objective(value(-200.0).float(), value(0.0).float(), value(1.0).float(), 0.2, 0.0)
    assert lost.item() == 0
    assert with_kl[0].tolist() == pytest.approx([a - .1 * kl for a, kl in zip((3, 3.6, -6, 1.5, -2.4), kls)])


def test_advantages_are_standardised_over_the_trajectories_of_a_task():
    advantages = grpo.group_advantages([[1.0], [0.0], [1.0], [0.5], [0.0], [0.5]], ["a", "a", "b", "c", "a", "c"])
    root = 2 ** .5                                                  # a: mean 1/3, deviation sqrt(2)/3
    assert advantages == [[pytest.approx(root)], [pytest.approx(-root / 2)], None, None, [pytest.approx(-root / 2)],
                          None]
    turns = grpo.group_advantages([[1.0, 2.0], [3.0]], ["a", "a"])
    assert turns == [[pytest.approx(-1.5 ** .5), 0], [pytest.approx(1.5 ** .5)]]
    assert grpo.group_advantages([[1.0], [], [0.0], []], ["a", "a", "a", "b"]) == [[1], [], [-1], None]
    assert grpo.group_advantages([[.9 - .05 * 4], [.8 - .05 * 2]], ["a", "a"]) == [None, None]     # rounding


def test_the_estimate_of_the_divergence_is_right_on_average():
    """Over what the start model samples: exactly KL(policy || start)."""
    start, policy = (torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)
                     for seed in (0, 1))
    objective, _ = grpo.clipped_objective(policy[None], start[None], torch.zeros(1, 6), 0.2, 1.0)
    assert -(start.exp() * objective[0]).sum().item() == pytest.approx((policy.exp() * (policy - start)).sum().item())


def test_returns_as_advantages_by_hand(capsys):
    """A mixed task, one of successes alone, one of failures alone; each agent token has its trajectory's number,
    however many turns the trajectory has."""
    rows = [trajectory("a", 1, 2), trajectory("a", 0, 1), trajectory("b", 1, 1), trajectory("b", 1, 2),
            trajectory("c", 0, 1), trajectory("c", 0, 3)]
    item = [common.Row([5, 6, 7, 8, 9], [-1, 0, 0, -1, 1])]
    examples = [grpo.GroupExample([item], [], row["task_id"], row) for row in rows]
    args = argparse.Namespace(trajectories="x", max_tokens=100)
    ready = grpo.with_advantages(examples, None, None, args, None, [])
    assert [(example.task_id, example.advantages.tolist()) for example in ready] == [("a", [1, 1, 1]),
                                                                                     ("a", [-1, -1, -1])]
    assert [example.items for example in ready] == [[[common.Row([5, 6, 7, 8, 9], [-1, 0, 1, -1, 2])]]] * 2
    assert "4 of 6 trajectories are left out: all those of their task are equally good" in capsys.readouterr().out


def test_credit_as_advantages_by_hand(monkeypatch, capsys):
    """Each turn has its own number, standardised over all turns of the task; a trajectory too long for the critic has
    none, and counts as such."""
    rows = [trajectory("a", 1, 2), trajectory("a", 0, 1), trajectory("a", 0, 1), trajectory("b", 1, 1)]
    items = [[common.Row([5, 6, 7, 8, 9], [-1, 0, 0, -1, 1])], [common.Row([5, 6], [-1, 0])], [common.Row([5], [0])],
             [common.Row([5], [0])]]
    examples = [grpo.GroupExample([item], [], row["task_id"], row) for item, row in zip(items, rows)]
    monkeypatch.setattr(grpo, "critic_credit", lambda *_: [[1.0, 2.0], [3.0], [], [4.0]])
    args = argparse.Namespace(trajectories="x", max_tokens=100)
    ready = grpo.with_advantages(examples, {"head": "lm"}, None, args, None, [])
    root = 1.5 ** .5
    assert [example.advantages.tolist() for example in ready] == [
        [pytest.approx(-root), pytest.approx(-root), 0], [pytest.approx(root)]]
    assert ("1 of 4 trajectories are left out: all those of their task are equally good; 1 more are too long for the "
            "critic (--max-tokens 100)") in capsys.readouterr().out


def trajectory(name, reward, turns):
    history = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}] * turns
    return {"task_id": name, "task": TASK, "reward": reward, "dialogue_history": history}


def test_each_token_has_its_own_log_probability_and_the_gradient_is_a_finite_difference(tiny):
    model, tokenizer = copy.deepcopy(tiny[0]), tiny[1]
    scorer = common.Scorer(model)
    item = an_item(tokenizer)
    [row], [tokens] = item, grpo.token_item(item)
    count = sum(turn >= 0 for turn in row.action_numbers)
    assert [turn for turn in tokens.action_numbers if turn >= 0] == list(range(count)) and tokens.ids == row.ids
    batch = common.collate([[tokens]])
    logps = scorer(batch)
    with torch.no_grad():
        plain = torch.log_softmax(model(torch.tensor([row.ids])).logits[0].double(), -1)
    acting = [place for place, turn in enumerate(row.action_numbers) if turn >= 0]
    torch.testing.assert_close(logps[0].double(), plain[[p - 1 for p in acting], [row.ids[p] for p in acting]],
                               atol=1e-5, rtol=0)
    assert scorer(common.collate([item])).sum().item() == pytest.approx(logps.sum().item(), abs=1e-4)

    generator = torch.Generator().manual_seed(0)
    advantages = torch.randn(1, count, generator=generator)
    before = logps.detach() + 0.3 * torch.randn(1, count, generator=generator)       # some tokens are clipped
    def objective():
        return grpo.clipped_objective(scorer(batch), before, advantages, 0.2, 0.1)[0].sum()
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(objective(), parameters)
    direction = [gradient / torch.cat([g.flatten() for g in gradients]).norm() for gradient in gradients]
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            for parameter, part in zip(parameters, direction):
                parameter += sign * 1e-3 * part
            ends.append(objective().item())
            for parameter, part in zip(parameters, direction):
                parameter -= sign * 1e-3 * part
    slope = sum((g * d).sum().item() for g, d in zip(gradients, direction))
    assert (ends[0] - ends[1]) / 2e-3 == pytest.approx(slope, rel=0.02) and slope > 0.1


def test_the_first_step_has_ratio_1_and_the_mean_advantage_as_loss(workspace, tmp_path):
    printed = succeed("examples.grpo", *flags(workspace, "grpo", tmp_path / "g", "--batch-size", 200))
    first, second = read(tmp_path / "g" / "metrics.jsonl")[0], read(workspace / "offline.jsonl")
    assert first["ratio"] == pytest.approx(1, abs=1e-5) and first["clipped"] == 0
    by_task, total, tokens, left_out = {}, 0.0, 0, 0
    for row in second:
        by_task.setdefault(row["task_id"], []).append(row)
    for rows in by_task.values():
        wins = [float(row["reward"] == 1) for row in rows]
        mean = sum(wins) / len(wins)
        deviation = (sum((win - mean) ** 2 for win in wins) / len(wins)) ** .5
        left_out += len(rows) if deviation == 0 else 0
        for row, win in zip(rows, wins):
            count = sum(len(turn["output_ids"]) for turn in row["dialogue_history"] if turn["role"] == "assistant")
            if deviation:
                total, tokens = total + count * (win - mean) / deviation, tokens + count
    assert first["loss"] == pytest.approx(-total / tokens, abs=1e-4)
    assert f"{left_out} of {len(second)} trajectories are left out" in printed
    assert samples_line(72, 0, 0) in printed


def samples_line(num_trajectories, num_of_others, num_sampled_otherwise):
    """What grpo says of dialogues that are no samples of its model."""
    return (f"of {num_trajectories} trajectories {num_of_others} are of another agent than --model {BASE}, and "
            f"{num_sampled_otherwise} not sampled at temperature 1 without --best-of: no samples of this model's own "
            "probabilities")


def test_dialogues_of_another_agent_at_another_temperature_or_by_best_of_are_counted(workspace, critic, tmp_path):
    few = tmp_path / "tasks.jsonl"
    few.write_text("".join(json.dumps(task) + "\n" for task in read(workspace / "tasks.jsonl")[:2]))
    play = ["--tasks", few, "--agent", BASE, "--max-rounds", 2, "--max-new-tokens", 20]
    more = {"plain": [], "cold": ["--temperature", 0.5], "best": ["--best-of", 2, "--critic", critic]}
    for name, flags_of_02 in more.items():
        succeed("02_rollout.py", *play, *flags_of_02, "--out", tmp_path / name)
    assert ["temperature" in row for row in read(tmp_path / "plain")] == [False, False]
    assert [row["temperature"] for row in read(tmp_path / "cold")] == [0.5, 0.5]
    rows = read(workspace / "offline.jsonl")
    for row in rows:
        if row["sample"] == 0:
            row["agent"] = "theirs"
    rows += [*read(tmp_path / "cold"), *read(tmp_path / "best")]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    printed = succeed("examples.grpo", *flags(workspace, "grpo", tmp_path / "grpo", "--trajectories",
                                              tmp_path / "all.jsonl", "--max-steps", 1))
    assert samples_line(72 + 4, 24, 4) in printed


def test_a_critics_advantages_take_the_place_of_the_return(workspace, critic, tmp_path, tiny):
    succeed("examples.grpo", *flags(workspace, "grpo", tmp_path / "g", "--critic", critic, "--max-steps", 1))
    rows, credit = read(workspace / "offline.jsonl"), read(tmp_path / "g" / "credit.jsonl")
    assert [(row["task_id"], row["sample"]) for row in credit] == [(row["task_id"], row["sample"]) for row in rows]
    loaded = common.load_critic(common.read_critic(critic, None, backend), common.load_whole("cpu"))
    expected = common.score_turns(loaded, tiny[1], rows[:4], 16384, "cpu")
    for row, advantages in zip(credit, expected):
        assert row["advantages"] == pytest.approx(advantages, abs=1e-5)
    assert len({round(value, 6) for row in credit for value in row["advantages"]}) > len(credit)
    assert read(tmp_path / "g" / "metrics.jsonl")[0]["ratio"] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("name", ["grpo", "signed"])
def test_a_resumed_run_does_not_score_its_credit_again(name, workspace, critic, tmp_path, monkeypatch):
    module = fork(name)
    arguments = [str(flag) for flag in flags(workspace, name, tmp_path / "out", "--critic", critic, "--max-steps", 1)]

    def stop(*_):
        raise RuntimeError("stopped")
    with monkeypatch.context() as patch:
        patch.setattr(module, "train", stop)
        with pytest.raises(RuntimeError, match="stopped"):
            module.main(arguments)
    rows = (tmp_path / "out" / "credit.jsonl").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(common, "score_turns", stop)
        module.main(arguments)
    assert (tmp_path / "out" / "credit.jsonl").read_bytes() == rows
    whole = tmp_path / "whole"
    module.main([*arguments, "--out", str(whole)])
    weights = [(folder / "model.safetensors").read_bytes() for folder in (tmp_path / "out", whole)]
    assert weights[0] == weights[1]


# --- distill

def test_divergences_against_float64():
    torch.manual_seed(0)
    head, hidden, teacher_hidden = torch.nn.Linear(8, 50), torch.randn(6, 8), torch.randn(6, 8)
    policy, teacher = (torch.log_softmax(head(x).double(), -1) for x in (hidden, teacher_hidden))
    head = Projection(head.weight, head.bias)
    for direction, of, against in (("forward", teacher, policy), ("reverse", policy, teacher)):
        kls = distill.token_kls(head, hidden, head, teacher_hidden, direction)
        torch.testing.assert_close(kls.double(), (of.exp() * (of - against)).sum(-1), atol=1e-5, rtol=1e-5)
        assert distill.token_kls(head, hidden, head, hidden, direction).abs().max() < 1e-6
    two = torch.nn.Linear(1, 2, bias=False)                         # p = (.5, .5), q = (.9, .1): .5 log(.5 / .9) + …
    two.weight.data = torch.tensor([[2.1972246], [0.0]])
    two, states = Projection(two.weight), (torch.tensor([[0.0]]), torch.tensor([[1.0]]))
    assert distill.token_kls(two, states[0], two, states[1], "reverse").item() == pytest.approx(.5108256, abs=1e-6)
    assert distill.token_kls(two, states[0], two, states[1], "forward").item() == pytest.approx(.3680642, abs=1e-6)


def test_distill_learns_from_the_same_model_that_reads_c(workspace, tmp_path, tiny):
    for direction in ("forward", "reverse"):
        out = tmp_path / direction
        succeed("examples.distill", *flags(workspace, "distill", out, "--divergence", direction, "--max-steps", 4,
                                           "--epochs", 4, "--num-trajectories", 15, "--batch-size", 200))
        losses = [row["loss"] for row in read(out / "metrics.jsonl")]
        assert losses[0] > 0.01 and losses[-1] < 0.95 * losses[0], losses
    model, tokenizer = tiny
    one = tmp_path / "one.jsonl"
    row = read(workspace / "offline.jsonl")[0]
    one.write_text(json.dumps(row) + "\n")
    distill.main([str(x) for x in ("--method", "distill", "--trajectories", one, "--model", BASE, "--log-every", 1,
                                   "--out", tmp_path / "one")])
    total, count = 0.0, 0
    for turn in row["dialogue_history"]:
        if turn["role"] == "assistant":
            logps = []
            for prompt in (turn["input"], common.with_hidden_info(tokenizer, turn["input"],
                                                                  common.hidden_info(row["task"]))):
                ids = encode(tokenizer, prompt)
                with torch.no_grad():
                    logits = model(torch.tensor([ids + turn["output_ids"]])).logits[0].double()
                logps.append(torch.log_softmax(logits[len(ids) - 1:-1], -1))
            policy, teacher = logps
            total += (policy.exp() * (policy - teacher)).sum().item()
            count += len(turn["output_ids"])
    assert read(tmp_path / "one" / "metrics.jsonl")[0]["loss"] == pytest.approx(total / count, abs=1e-4)


def test_two_ranks_train_the_same_weights_and_killed_runs_go_on(workspace, tmp_path):
    from safetensors.torch import load_file
    for method in ("grpo", "distill"):
        outs, program = [tmp_path / f"{method}{name}" for name in ("", "-two", "-resumed")], f"examples.{method}"
        succeed(program, *flags(workspace, method, outs[0], "--batch-size", 8))
        succeed(program, *flags(workspace, method, outs[1], "--batch-size", 8), ranks=2)
        stopped = flags(workspace, method, outs[2], "--batch-size", 8, "--save-every", 1)
        pid, began = begin(program, *stopped, folder=tmp_path), time.monotonic()
        while time.monotonic() - began < 60 and not list(outs[2].glob("states/*/.metadata")):
            time.sleep(0.005)
        os.kill(pid, signal.SIGKILL)
        assert wait(pid) == -signal.SIGKILL, "it had ended before"
        assert "continues at step" in succeed(program, *stopped)
        whole, two, resumed = (load_file(out / "model.safetensors") for out in outs)
        assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())
        assert max((two[name] - tensor).abs().max().item() for name, tensor in whole.items()) < 1e-4


# --- bad input

def test_bad_input_is_one_line(workspace, critic, tmp_path, capsys):
    equal = tmp_path / "equal.jsonl"
    equal.write_text("".join(json.dumps({**row, "reward": 0.0}) + "\n" for row in read(workspace / "offline.jsonl")))
    line = refused(grpo, "--method", "grpo", "--trajectories", equal, "--model", BASE, "--out", tmp_path / "x")
    assert str(equal) in line and "equally good" in line
    offline = ["--trajectories", workspace / "offline.jsonl", "--model", BASE, "--out", tmp_path / "y"]
    assert "no critic.json" in refused(grpo, "--method", "grpo", "--critic", BASE, *offline)
    assert "--critic oracle: grpo takes a critic folder" in refused(grpo, "--method", "grpo", "--critic", "oracle",
                                                                    *offline)
    value = tmp_path / "value"
    shutil.copytree(critic, value)
    note = json.loads((value / "critic.json").read_text())
    (value / "critic.json").write_text(json.dumps({**note, "head": "value"}))
    assert "grpo takes a critic that reads text and has advantages" in refused(grpo, "--method", "grpo", "--critic",
                                                                               value, *offline)
    for module, wrong, message in (
            (distill, ["distill", "--critic", critic], "--critic goes with --method sweet"),
            (grpo, ["mtdpo", "--critic", critic], "--critic goes with --method sweet and grpo"),
            (grpo, ["grpo", "--pairs-together"], "--pairs-together goes with --method sweet")):
        with pytest.raises(SystemExit) as stopped:
            module.main([str(x) for x in ("--method", *wrong, *offline)])
        assert stopped.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "y").exists()


# --- signed

def test_the_outcome_gives_the_sign_of_a_turn_and_the_critic_its_size(monkeypatch, capsys):
    """Returns 1 and 0 of one task have the advantages 1 and -1; credit -1 and 3 has the sizes 1 and 3, with mean 2."""
    rows = [trajectory("a", 1, 2), trajectory("a", 0, 2), trajectory("a", 1, 1), trajectory("a", 0, 1)]
    item = [common.Row([5, 6, 7, 8, 9], [-1, 0, 0, -1, 1])]
    examples = [signed.GroupExample([item], [], row["task_id"], row) for row in rows]
    monkeypatch.setattr(signed, "critic_credit", lambda *_: [[-1.0, 3.0], [-1.0, 3.0], [], [0.0, 0.0]])
    args = argparse.Namespace(trajectories="x", max_tokens=100)
    ready = signed.with_advantages(examples, {"head": "lm"}, None, args, None, [])
    assert [example.advantages.tolist() for example in ready] == [[.5, .5, 1.5], [-.5, -.5, -1.5], [-1, -1, -1]]
    assert "0 of 4 trajectories are left out" in (printed := capsys.readouterr().out)
    assert "1 more are too long for the critic" in printed


def test_without_a_critic_signed_is_grpo(capsys):
    rows = [trajectory("a", 1, 2), trajectory("a", 0, 1), trajectory("a", 0, 1)]
    item = [common.Row([5, 6, 7, 8, 9], [-1, 0, 0, -1, 1])]
    args = argparse.Namespace(trajectories="x", max_tokens=100)
    results = []
    for module in (grpo, signed):
        examples = [module.GroupExample([item], [], row["task_id"], row) for row in rows]
        ready = module.with_advantages(examples, None, None, args, None, [])
        results.append([(example.items, example.advantages.tolist()) for example in ready])
    assert results[0][0][1] != results[0][1][1] and [advantages for _, advantages in results[0]] == [
        advantages for _, advantages in results[1]]


def test_signed_trains_on_the_credit_of_a_critic(workspace, critic, tmp_path):
    succeed("examples.signed", *flags(workspace, "signed", tmp_path / "s", "--critic", critic, "--batch-size", 200,
                                      "--max-steps", 1))
    credit, first = read(tmp_path / "s" / "credit.jsonl"), read(tmp_path / "s" / "metrics.jsonl")[0]
    assert len(credit) == len(read(workspace / "offline.jsonl"))
    assert first["ratio"] == pytest.approx(1, abs=1e-5) and abs(first["loss"]) > 1e-3


# --- gain

def test_a_question_is_worth_what_its_reply_tells_of_the_reference(tiny):
    """By hand: two passes of the model with the reference as the answer, after the prompt and after the reply."""
    model, tokenizer = tiny
    task = stage_1_task()
    prompt = common.prompt_text(tokenizer, (history := [{"role": "user", "content": task["problem_description"]}]), 8,
                                backend.AGENT_SYSTEM)
    [needed] = [fact for fact in task["facts"] if fact["matters"]][:1]
    texts = [needed["questions"][0], "What is the weather?", backend.answer_message(task)]
    candidates = [{"text": text, "ids": encode(tokenizer, text) + [tokenizer.eos_token_id]} for text in texts]
    row = {"task": task, "prompt": prompt, "history": history, "max_rounds": 8, "system": None,
           "candidates": candidates}
    with backend.World() as world:
        gain_of = gain.gains([row], common.Scorer(model).eval(), tokenizer, world, 4096)
        assert set(gain_of) == {(0, texts[0]), (0, texts[1])}        # the answer has none
        for (_, text), value in gain_of.items():
            turns = [*history, {"role": "assistant", "content": text}]
            turns.append(gain.reply_to(task, turns, world))
            after = common.prompt_text(tokenizer, turns, 8, backend.AGENT_SYSTEM)
            expected = logp_of_answer(model, tokenizer, after, task) - logp_of_answer(model, tokenizer, prompt, task)
            assert value == pytest.approx(max(0, expected), abs=1e-3)
    assert gain_of[0, texts[0]] > gain_of[0, texts[1]]


def logp_of_answer(model, tokenizer, prompt, task):
    read = encode(tokenizer, prompt)
    ids = read + encode(tokenizer, backend.answer_message(task)) + [tokenizer.eos_token_id]
    with torch.no_grad():
        logps = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
    return sum(logps[place - 1, ids[place]].item() for place in range(len(read), len(ids)))


def stage_1_task():
    [task], _ = stage(1).make_tasks(backend, 1, 0, "train", "none")
    return task


def test_gain_trains_without_a_critic(workspace, tmp_path, capsys):
    printed = succeed("examples.gain", *flags(workspace, "gain", tmp_path / "g", "--data-frac", 0.1, "--num-candidates",
                                              6, "--max-new-tokens", 60))
    rows = read(tmp_path / "g" / "scored.jsonl")
    assert "what the pairs say" in printed and read(tmp_path / "g" / "metrics.jsonl")[0]["loss"] > 0.6
    repeated = [score for row in rows for candidate, score in zip(row["candidates"], row["advantages"])
                if backend.turn_kind(row["task"], row["history"], candidate["text"]) in ("needed", "repeat")]
    assert min(repeated) >= 0 and max(repeated) > 0.5
    with pytest.raises(SystemExit):
        gain.main([str(flag) for flag in flags(workspace, "rft", tmp_path / "r", "--candidates", "x")])
    assert "--candidates goes with --method gain" in capsys.readouterr().err
