"""04's methods beyond the paper: policy gradient with group baselines (grpo), also by a critic's advantages, and
privileged self-distillation (distill); --like-pairs."""
import argparse
import copy
import json
import os
import signal
import time

import pytest
import torch

import common
from colbench import backend
from conftest import begin, policy_flags, read, refused, ROOT, stage, succeed, wait
from lib.credit import agreement
from lib.models import encode, token_kls
from lib.report import state_data
from lib.training import kind_lines

policy_stage = stage(4)
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


# --- grpo

def test_the_clipped_objective_by_hand_in_float64():
    """Ratio 1: the advantage. Ratio 2: clipped to 1.2 where that is less, as it is where A > 0. Ratio 1/2: a good
    token's is taken as it is (.5 A), a bad one's is clipped to .8. KL estimate of ratio 2: 2 log 2 - 2 + 1. A token
    that has become impossible gives no NaN."""
    value = lambda *numbers: torch.tensor([numbers], dtype=torch.float64)
    log = value(1.0, 2.0, 2.0, 0.5, 0.5).log()
    advantages = value(3.0, 3.0, -3.0, 3.0, -3.0)
    objective, ratios = policy_stage.clipped_objective(log - 7, torch.full_like(log, -7), advantages, 0.2, 0.0)
    assert ratios[0].tolist() == pytest.approx([1, 2, 2, .5, .5], abs=1e-12)
    assert objective[0].tolist() == pytest.approx([3, 3.6, -6, 1.5, -2.4], abs=1e-12)
    with_kl, _ = policy_stage.clipped_objective(log, torch.zeros_like(log), advantages, 0.2, 0.1)
    log_2 = .6931471805599453
    kls = [0, 2 * log_2 - 1, 2 * log_2 - 1, .5 - .5 * log_2, .5 - .5 * log_2]
    lost, _ = policy_stage.clipped_objective(value(-200.0).float(), value(0.0).float(), value(1.0).float(), 0.2, 0.0)
    assert lost.item() == 0
    assert with_kl[0].tolist() == pytest.approx([a - .1 * kl for a, kl in zip((3, 3.6, -6, 1.5, -2.4), kls)])


def test_advantages_are_standardised_over_the_trajectories_of_a_task():
    found = policy_stage.group_advantages([[1.0], [0.0], [1.0], [0.5], [0.0], [0.5]], ["a", "a", "b", "c", "a", "c"])
    root = 2 ** .5                                                  # a: mean 1/3, deviation sqrt(2)/3
    assert [own and own[0] for own in found] == [pytest.approx(root), pytest.approx(-root / 2), None, None,
                                                 pytest.approx(-root / 2), None]
    turns = policy_stage.group_advantages([[1.0, 2.0], [3.0]], ["a", "a"])
    assert turns == [[pytest.approx(-1.5 ** .5), 0], [pytest.approx(1.5 ** .5)]]
    assert policy_stage.group_advantages([[1.0], [], [0.0], []], ["a", "a", "a", "b"]) == [[1], [], [-1], None]
    assert policy_stage.group_advantages([[.9 - .05 * 4], [.8 - .05 * 2]], ["a", "a"]) == [None, None]     # rounding


def test_the_estimate_of_the_divergence_is_right_on_average():
    """Over what the start model samples: exactly KL(policy || start)."""
    start, policy = (torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)
                     for seed in (0, 1))
    objective, _ = policy_stage.clipped_objective(policy[None], start[None], torch.zeros(1, 6), 0.2, 1.0)
    assert -(start.exp() * objective[0]).sum().item() == pytest.approx((policy.exp() * (policy - start)).sum().item())


def test_returns_as_advantages_by_hand(capsys):
    """A mixed task, one of successes alone, one of failures alone; of each agent turn the same number."""
    rows = [trajectory("a", 1, 2), trajectory("a", 0, 1), trajectory("b", 1, 1), trajectory("b", 1, 2),
            trajectory("c", 0, 1), trajectory("c", 0, 3)]
    args = argparse.Namespace(trajectories="x", max_tokens=100)
    assert policy_stage.grpo_advantages(rows, None, None, args, None, []) == [[1, 1], [-1], None, None, None, None]
    assert "4 of 6 trajectories are left out: all those of their task are equally good" in capsys.readouterr().out


def trajectory(name, reward, turns):
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}] * turns
    return {"task_id": name, "task": TASK, "reward": reward, "dialogue_history": said}


def test_each_token_has_its_own_log_probability_and_the_gradient_is_a_finite_difference(tiny):
    model, tokenizer = copy.deepcopy(tiny[0]), tiny[1]
    item = an_item(tokenizer)
    [row], [tokens] = item, policy_stage.token_item(item)
    count = sum(turn >= 0 for turn in row.turns)
    assert [turn for turn in tokens.turns if turn >= 0] == list(range(count)) and tokens.ids == row.ids
    batch = common.collate([[tokens]])
    logps = common.turn_logps(model, batch)
    with torch.no_grad():
        plain = torch.log_softmax(model(torch.tensor([row.ids])).logits[0].double(), -1)
    acting = [place for place, turn in enumerate(row.turns) if turn >= 0]
    torch.testing.assert_close(logps[0].double(), plain[[p - 1 for p in acting], [row.ids[p] for p in acting]],
                               atol=1e-5, rtol=0)
    assert common.turn_logps(model, common.collate([item])).sum().item() == pytest.approx(logps.sum().item(), abs=1e-4)

    generator = torch.Generator().manual_seed(0)
    advantages = torch.randn(1, count, generator=generator)
    before = logps.detach() + 0.3 * torch.randn(1, count, generator=generator)       # some tokens are clipped
    def objective():
        return policy_stage.clipped_objective(common.turn_logps(model, batch), before, advantages, 0.2, 0.1)[0].sum()
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
    printed = succeed("04_train_policy.py", *flags(workspace, "grpo", tmp_path / "g", "--batch-size", 200))
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


def test_dialogues_sampled_at_another_temperature_or_by_best_of_are_named(workspace, critic, tmp_path):
    few = tmp_path / "tasks.jsonl"
    few.write_text("".join(json.dumps(task) + "\n" for task in read(workspace / "tasks.jsonl")[:2]))
    play = ["--tasks", few, "--agent", BASE, "--max-rounds", 2, "--max-new-tokens", 20]
    more = {"plain": [], "cold": ["--temperature", 0.5], "best": ["--best-of", 2, "--critic", critic]}
    for name, flags_of_02 in more.items():
        succeed("02_rollout.py", *play, *flags_of_02, "--out", tmp_path / name)
    assert ["temperature" in row for row in read(tmp_path / "plain")] == [False, False]
    assert [row["temperature"] for row in read(tmp_path / "cold")] == [0.5, 0.5]
    rows = [*read(workspace / "offline.jsonl"), *read(tmp_path / "cold"), *read(tmp_path / "best")]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = (f"4 of {len(rows)} trajectories were sampled at another temperature than 1 or by --best-of (02), so their "
            "tokens are no samples of a model's own probabilities")
    for path, there in ((tmp_path / "all.jsonl", True), (workspace / "offline.jsonl", False)):
        printed = succeed("04_train_policy.py", *flags(workspace, "grpo", tmp_path / f"grpo-{there}", "--trajectories",
                                                       path, "--max-steps", 1))
        assert (line in printed) == there and ("another temperature" in printed) == there


def test_a_critics_advantages_take_the_place_of_the_return(workspace, critic, tmp_path, tiny):
    succeed("04_train_policy.py", *flags(workspace, "grpo", tmp_path / "g", "--critic", critic))
    rows, credit = read(workspace / "offline.jsonl"), read(tmp_path / "g" / "credit.jsonl")
    assert [(row["task_id"], row["sample"]) for row in credit] == [(row["task_id"], row["sample"]) for row in rows]
    loaded = common.load_critic(common.read_critic(critic, None, backend), common.load_whole("cpu"))
    expected = common.score_turns(loaded, tiny[1], rows[:4], 16384, "cpu")
    for row, own in zip(credit, expected):
        assert row["advantages"] == pytest.approx(own, abs=1e-5)
    assert len({round(value, 6) for row in credit for value in row["advantages"]}) > len(credit)
    assert read(tmp_path / "g" / "metrics.jsonl")[0]["ratio"] == pytest.approx(1, abs=1e-5)


# --- distill

def test_divergences_against_float64():
    torch.manual_seed(0)
    head, hidden, teacher_hidden = torch.nn.Linear(8, 50), torch.randn(6, 8), torch.randn(6, 8)
    own, teacher = (torch.log_softmax(head(x).double(), -1) for x in (hidden, teacher_hidden))
    for direction, of, against in (("forward", teacher, own), ("reverse", own, teacher)):
        found = token_kls(head, hidden, head, teacher_hidden, direction)
        torch.testing.assert_close(found.double(), (of.exp() * (of - against)).sum(-1), atol=1e-5, rtol=1e-5)
        assert token_kls(head, hidden, head, hidden, direction).abs().max() < 1e-6
    two = torch.nn.Linear(1, 2, bias=False)                         # p = (.5, .5), q = (.9, .1): .5 log(.5 / .9) + …
    two.weight.data = torch.tensor([[2.1972246], [0.0]])
    states = torch.tensor([[0.0]]), torch.tensor([[1.0]])
    assert token_kls(two, states[0], two, states[1], "reverse").item() == pytest.approx(.5108256, abs=1e-6)
    assert token_kls(two, states[0], two, states[1], "forward").item() == pytest.approx(.3680642, abs=1e-6)


def test_distill_learns_from_the_same_model_that_reads_c(workspace, tmp_path, tiny):
    for direction in ("forward", "reverse"):
        out = tmp_path / direction
        succeed("04_train_policy.py", *flags(workspace, "distill", out, "--divergence", direction, "--max-steps", 4,
                                             "--epochs", 4, "--batch-size", 200))
        losses = [row["loss"] for row in read(out / "metrics.jsonl")]
        assert losses[0] > 0.01 and losses[-1] < 0.95 * losses[0], losses
    model, tokenizer = tiny
    one = tmp_path / "one.jsonl"
    row = read(workspace / "offline.jsonl")[0]
    one.write_text(json.dumps(row) + "\n")
    policy_stage.main([str(x) for x in ("--method", "distill", "--trajectories", one, "--model", BASE, "--log-every", 1,
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
            own, teacher = logps
            total, count = total + (own.exp() * (own - teacher)).sum().item(), count + len(turn["output_ids"])
    assert read(tmp_path / "one" / "metrics.jsonl")[0]["loss"] == pytest.approx(total / count, abs=1e-4)


def test_two_ranks_train_the_same_weights_and_killed_runs_go_on(workspace, tmp_path):
    from safetensors.torch import load_file
    for method in ("grpo", "distill"):
        outs = [tmp_path / f"{method}{name}" for name in ("", "-two", "-resumed")]
        succeed("04_train_policy.py", *flags(workspace, method, outs[0], "--batch-size", 8))
        succeed("04_train_policy.py", *flags(workspace, method, outs[1], "--batch-size", 8), ranks=2)
        stopped = flags(workspace, method, outs[2], "--batch-size", 8, "--save-every", 1)
        pid, metrics = begin("04_train_policy.py", *stopped, folder=tmp_path), outs[2] / "metrics.jsonl"
        began = time.monotonic()
        while time.monotonic() - began < 60 and not (metrics.exists() and metrics.read_bytes().count(b"\n")):
            time.sleep(0.005)
        os.kill(pid, signal.SIGKILL)
        assert wait(pid) == -signal.SIGKILL, "it had ended before"
        succeed("04_train_policy.py", *stopped)
        whole, two, resumed = (load_file(out / "model.safetensors") for out in outs)
        assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())
        assert max((two[name] - tensor).abs().max().item() for name, tensor in whole.items()) < 1e-4


# --- pairs of SWEET

def test_pairs_of_an_answer_and_a_question_are_none(workspace, critic, tmp_path):
    third = tmp_path / "third.jsonl"                                 # as if the third turn (2) had been the last one
    third.write_text("".join(json.dumps({**row, "max_rounds": 3}) + "\n" for row in read(workspace / "offline.jsonl")))
    arguments = flags(workspace, "sweet", tmp_path / "all", "--critic", critic, "--data-frac", 0.3,
                      "--num-candidates", 8, "--max-new-tokens", 60, "--trajectories", third)
    succeed("04_train_policy.py", *arguments)
    like = [*arguments[:arguments.index("--out") + 1], tmp_path / "like", *arguments[arguments.index("--out") + 2:],
            "--candidates", tmp_path / "all" / "candidates.jsonl", "--like-pairs"]
    printed = succeed("04_train_policy.py", *like)
    found, kept = (read(tmp_path / name / "pairs.jsonl") for name in ("all", "like"))
    mixed = [len({backend.MARKER in pair[side]["text"] for side in ("chosen", "rejected")}) == 2 for pair in found]
    last = [pair["turn"] == 2 for pair in found]                     # no turn goes on, each of them is an answer
    assert kept == [pair for pair, differ, is_last in zip(found, mixed, last) if is_last or not differ]
    assert 0 < len(kept) < len(found) and any(map(all, zip(mixed, last)))
    assert f"the same text, {len(found) - len(kept)} are none by --like-pairs" in printed


def test_thoughts_are_no_speech_in_04():
    """A question whose thoughts hold the marker is no answer; one that the prompt's <think> began, neither."""
    thoughts, ask = f"<think>Soon: {backend.MARKER} x</think>", "What is the factor?"
    for text, prompt, answers in ((thoughts + ask, "x", False), (f"{backend.MARKER} a</think>{ask}", "<think>", False),
                                  (f"{thoughts}{backend.MARKER} y", "x", True)):
        pair = {"task": TASK, "prompt": prompt, "history": [], "chosen": {"text": text}, "rejected": {"text": ask}}
        assert policy_stage.is_alike(pair, False) != answers and policy_stage.is_alike(pair, True)
    task = {"problem_description": "f", "test_cases": {"1": "f(1)"}, "ground_truth": "def f(n):\n    return n * 3",
            "facts": [{"topic": "the factor", "questions": [], "matters": True, "told": False}]}
    candidates = [{"text": text, "ids": [n]} for n, text in enumerate((thoughts + ask, "What is the colour?"))]
    row = {"task": task, "prompt": "x", "history": [], "candidates": candidates}
    [scored] = policy_stage.score_candidates([row], "oracle", None, argparse.Namespace(max_tokens=9, no_tree=False),
                                             "cpu")
    assert scored["advantages"] == [2, 1]                            # needed, vague
    kinds = [line.split()[3] for line in kind_lines(backend, [scored], [])[1:]]
    assert kinds == ["needed", "vague"]
    scored |= {"task_id": "a", "turn": 0, "pairs": [(0, 1)], "candidates": [
        {**candidate, "ended": True, "chosen": 1, "rejected": 0} for candidate in candidates]}
    assert agreement([scored], backend)["oracle"]["right"] == 1
    assert [candidate["kind"] for candidate in state_data(scored, "a", backend)["candidates"]] == ["needed", "vague"]


# --- bad input

def test_bad_input_is_one_line(workspace, critic, tmp_path, capsys):
    equal = tmp_path / "equal.jsonl"
    equal.write_text("".join(json.dumps({**row, "reward": 0.0}) + "\n" for row in read(workspace / "offline.jsonl")))
    line = refused(4, "--method", "grpo", "--trajectories", equal, "--model", BASE, "--out", tmp_path / "x")
    assert str(equal) in line and "equally good" in line
    offline = ["--trajectories", workspace / "offline.jsonl", "--model", BASE, "--out", tmp_path / "y"]
    assert "no critic.json" in refused(4, "--method", "grpo", "--critic", BASE, *offline)
    assert "--critic oracle: grpo takes a critic folder" in refused(4, "--method", "grpo", "--critic", "oracle",
                                                                     *offline)
    for wrong, message in ((["distill", "--critic", critic], "--critic DIR goes with"),
                           (["mtdpo", "--like-pairs"], "go with --method sweet")):
        with pytest.raises(SystemExit) as stopped:
            policy_stage.main([str(x) for x in ("--method", *wrong, *offline)])
        assert stopped.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "y").exists()
