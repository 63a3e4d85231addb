"""The forks of 04 in examples/: policy gradient with group baselines (grpo), self-distillation (distill), turns ranked
by what their reply tells (gain), SWEET with logged right answers (answers)."""
import argparse
import functools
import inspect
import json
import math
import random
import re

import pytest
import torch

import common
from colbench import backend
from compare import greatest_difference, logps_after, token_logps_after
from conftest import BASE, call, dies, FUNCTION, load_critic, read, refused, stage, succeed, turns, write
from examples import answers, distill, gain, grpo
from lib import data, training
from lib.data import read_trajectories
from lib.load import Projection
from lib.logps import Sequence
from lib.tokens import encode, prompt_text

SMALL = ["--data-frac", 0.25, "--num-candidates", 6, "--max-new-tokens", 60, "--nll-coef", 0]


@pytest.fixture(scope="module")
def few(workspace, tmp_path_factory):
    """A file of 18 dialogues of six tasks, where one task's are equally good."""
    return write(tmp_path_factory.mktemp("few") / "few.jsonl", read(workspace / "offline.jsonl")[12:30])


def flags(few, out, *more):
    """Two steps of a fork from the shipped base model; the last of a flag given twice counts."""
    return ["--out", out, "--trajectories", few, "--model", BASE, "--lr", 1e-3, "--batch-size", 6, "--max-steps", 2,
            *more]


@pytest.fixture(scope="module")
def runs(few, critic, tmp_path_factory):
    """{name: (module, flags, the finished folder)} of a run of each fork; `plain` is without the flags of answers."""
    folder = tmp_path_factory.mktemp("runs")
    plain = [*SMALL, "--critic", critic, "--max-steps", 1]
    candidates = ["--candidates", folder / "plain" / "candidates.jsonl"]
    forks = {"grpo": (grpo, []), "signed": (grpo, ["--critic", critic, "--signed"]), "distill": (distill, []),
             "gain": (gain, [*SMALL, "--data-frac", 0.1, "--pairs-together"]), "plain": (answers, plain),
             "answers": (answers, [*plain, *candidates, "--answer-coef", 0.5, "--pairs-by-kind"])}
    finished = {}
    for name, (module, words) in forks.items():
        words = flags(few, folder / name, *words)
        call(module, *words)
        finished[name] = module, words, folder / name
    return finished


@pytest.mark.parametrize("module", [grpo, distill, gain, answers])
def test_a_fork_holds_nothing_that_it_does_not_use_and_says_how_it_is_started(module):
    code = inspect.getsource(module).replace(module.__doc__, "")
    functions = re.findall(r"^(?:def|class) (\w+)", code, re.MULTILINE)
    assert len(functions) > 3 and [name for name in functions if len(re.findall(rf"\b{name}\b", code)) < 2] == []
    for command in ("python", "torchrun --nproc-per-node 8"):
        assert f"    {command} -m {module.__name__} " in module.__doc__


def test_a_run_notes_what_it_was_trained_on(runs):
    for name, kind in (("signed", "dialogues"), ("gain", "pairs of turns"), ("answers", "pairs of turns")):
        number, noted = json.loads((runs[name][2] / "args.json").read_text())["trained_on"].split(" ", 1)
        assert int(number) > 0 and noted == kind


@pytest.mark.parametrize("name", ["signed", "gain"])
def test_a_stopped_run_goes_on_to_the_same_weights(runs, name, tmp_path, monkeypatch):
    """It stops in the second step. Advantages, candidates and scores are not made again."""
    module, words, whole = runs[name]
    words = [*words, "--save-every", "1", "--out", tmp_path / "out"]
    with dies(training.Loop, "update", calls=1):
        call(module, *words)
    for owner, made_before in ((common.LogRatioCritic, "load"), (stage(4), "open_sampler")):
        monkeypatch.delattr(owner, made_before)
    assert "continues at step 1" in call(module, *words) and greatest_difference(tmp_path / "out", whole) == 0
    kept = {"signed": "advantages.jsonl", "gain": "pairs.jsonl"}[name]
    assert read(tmp_path / "out" / kept) == read(whole / kept)


@pytest.mark.parametrize("name", ["grpo", "distill"])
def test_two_ranks_train_the_same_weights(runs, name, tmp_path):
    _, words, whole = runs[name]
    succeed(f"examples.{name}", *words, "--out", tmp_path / "two", ranks=2)
    assert greatest_difference(tmp_path / "two", whole) < 1e-4


def test_bad_input_is_one_line(few, critic, value_critic, tmp_path):
    rows = read(few)[:6]
    equal = ["--trajectories", write(tmp_path / "equal", [{**row, "reward": 0.0} for row in rows])]
    free = write(tmp_path / "free", [{**row, "task": {**row["task"], "facts": []}} for row in rows])
    for module, words, message in (
            (grpo, equal, f"{tmp_path / 'equal'}: no examples to train on: 6 of 6 trajectories dropped"),
            (grpo, ["--critic", value_critic], "grpo needs a critic that outputs advantages"),
            (distill, ["--max-length", 9], "no examples to train on: all 18 are longer than --max-length 9"),
            (gain, ["--trajectories", free], "gain needs template tasks"),
            (answers, ["--critic", critic, "--answer-coef", 1, *equal], "--answer-coef: no successful dialogue")):
        assert message in refused(module, *flags(few, tmp_path / "y", "--overwrite", *words))


def test_the_clipped_loss_by_hand_in_float64():
    """Ratio 1: the advantage. Ratio 2: clipped to 1.2 where that is less, as it is where A > 0. Ratio 1/2: a good
    token's is taken as it is (.5 A), a bad one's is clipped to .8. KL estimate of ratio 2: 2 log 2 - 2 + 1. A token
    that has become impossible gives no NaN."""
    value = lambda *numbers: torch.tensor([[number] for number in numbers], dtype=torch.float64)
    log_ratios, advantages, ones = value(1, 2, 2, .5, .5).log(), value(3, 3, -3, 3, -3), value(1, 1, 1, 1, 1)
    log_ratios.requires_grad_()
    losses, numbers = grpo.clipped_losses(log_ratios, advantages, ones, 0.2, 0.0)
    assert losses.tolist() == pytest.approx([-3, -3.6, 6, -1.5, 2.4], abs=1e-12)
    [gradient] = torch.autograd.grad(losses.sum(), log_ratios)       # of what is clipped 0
    assert gradient[:, 0].tolist() == pytest.approx([-3, 0, 6, -1.5, 0], abs=1e-12)
    assert numbers["ratio"].tolist() == pytest.approx([1, 2, 2, .5, .5])
    assert numbers["clipped"].tolist() == [0, 1, 1, 1, 1]
    with_kl, _ = grpo.clipped_losses(log_ratios, advantages, ones, 0.2, 0.1)
    kls = [0, 2 * math.log(2) - 1, 2 * math.log(2) - 1, .5 - .5 * math.log(2), .5 - .5 * math.log(2)]
    assert with_kl.tolist() == pytest.approx([loss + .1 * kl for loss, kl in zip((-3, -3.6, 6, -1.5, 2.4), kls)])
    two, numbers = grpo.clipped_losses(torch.tensor([[-200.0, 0.0]]), torch.tensor([[1.0, 0]]), torch.eye(2)[:1], .2, 0)
    assert two.item() == 0 and numbers["clipped"].item() == 1        # the second is no token
    # on average over what the start model samples the estimate is exactly KL(policy || start)
    start, policy = torch.randn(2, 6, 1, dtype=torch.float64).log_softmax(1)
    losses, _ = grpo.clipped_losses(policy - start, torch.zeros(6, 1), torch.ones(6, 1), 0.2, 1.0)
    assert (start.exp()[:, 0] * losses).sum().item() == pytest.approx((policy.exp() * (policy - start)).sum().item())


ROOT_2, ROOT_1_5 = 2 ** .5, 1.5 ** .5


@pytest.mark.parametrize("returns, turn_scores, tasks, is_signed, expected", [
    ([1, 0, 1, .5, 0, .5], None, "aabcac", False, [[ROOT_2], [-ROOT_2 / 2], None, None, [-ROOT_2 / 2], None]),
    ([.9 - .05 * 4, .8 - .05 * 2], None, "aa", False, [None, None]),                            # equal but for rounding
    ([1, 0, 0, 1], [[1., 2.], [3.], [], [4.]], "aaab", False, [[-ROOT_1_5, 0], [ROOT_1_5], [], None]),
    # scores -1 and 3 has the sizes 1 and 3, whose mean is 2; a trajectory too long for the critic has none
    ([1, 0, 1, 0, 1], [[-1., 3.], [-1., 3.], [], [0., 0.], [5.]], "aaaab", True,
     [[.5, 1.5], [-.5, -1.5], [], [-1, -1], None])])
def test_advantages_by_hand(returns, turn_scores, tasks, is_signed, expected):
    advantages = grpo.turn_advantages([float(number) for number in returns], turn_scores, list(tasks), is_signed)
    assert advantages == [numbers and pytest.approx(numbers) for numbers in expected]


def test_each_token_has_the_advantage_of_its_turn_and_is_an_action():
    example = common.Example([[Sequence([5, 6, 7, 8, 9], [-1, 0, 0, -1, 1])]], [], "a")
    one, two = grpo.token_examples([example] * 4, [[2.0], [1.0, -1.0], None, []])
    assert one.advantages.tolist() == [2, 2, 2] and two.advantages.tolist() == [1, 1, -1]
    assert one.items == two.items == [[Sequence([5, 6, 7, 8, 9], [-1, 0, 1, -1, 2])]]


def test_the_first_step_has_ratio_1_and_the_mean_advantage_as_loss(few, tmp_path, tiny):
    """Of the dialogues that fit. Those of another agent, at another temperature or by --best-of are counted."""
    rows = read(few)
    lasts = [row["dialogue_history"][-1] for row in rows]
    lengths = [len(encode(tiny[1], last["input"]) + last["output_ids"]) for last in lasts]
    longest = sorted(lengths)[12]
    changed = [rows[0] | {"agent": "theirs"}, rows[1] | {"temperature": 0.5}, rows[2] | {"best_of": 2}, *rows[3:]]
    printed = call(grpo, *flags(write(tmp_path / "rows", changed), tmp_path / "g", "--batch-size", 18,
                               "--max-length", longest))
    rows = [row for row, length in zip(rows, lengths) if length <= longest]
    first = read(tmp_path / "g" / "metrics.jsonl")[0]
    advantages = grpo.turn_advantages([float(row["reward"] == 1) for row in rows], None,
                                      [row["task_id"] for row in rows], False)
    total = tokens = 0
    for row, numbers in zip(rows, advantages):
        if numbers:
            count = sum(len(turn["output_ids"]) for turn in row["dialogue_history"][1::2])
            total, tokens = total + count * numbers[0], tokens + count
    assert first["ratio"] == pytest.approx(1, abs=1e-5) and first["clipped"] == 0
    assert first["loss"] == pytest.approx(-total / tokens, abs=1e-4)
    num_left_out = advantages.count(None)
    assert num_left_out and f"{num_left_out} of {len(rows)} trajectories dropped" in printed
    assert (f"of 18 trajectories 1 are of another agent than --model {BASE}, and 2 not sampled at temperature 1 "
            "without --best-of") in printed


def test_scores_are_the_critics_advantage_of_each_turn(few, critic, runs, tiny):
    rows, scored = read(few), read(runs["signed"][2] / "advantages.jsonl")
    assert [(row["task_id"], row["sample"]) for row in scored] == [(row["task_id"], row["sample"]) for row in rows]
    for row, advantages in zip(scored, load_critic(critic).score_turns(rows[:4])):
        assert row["advantages"] == pytest.approx(advantages, abs=1e-5)


def test_divergences_against_float64():
    torch.manual_seed(0)
    head, hidden, teacher_hidden = torch.nn.Linear(8, 50), torch.randn(6, 8), torch.randn(6, 8)
    policy, teacher = (torch.log_softmax(head(x).double(), -1) for x in (hidden, teacher_hidden))
    head = Projection(head.weight, head.bias)
    for direction, of, against in (("forward", teacher, policy), ("reverse", policy, teacher)):
        kls = distill.token_kls(head, hidden, head, teacher_hidden, direction)
        torch.testing.assert_close(kls.double(), (of.exp() * (of - against)).sum(-1), atol=1e-5, rtol=1e-5)
    two = Projection(torch.tensor([[2.1972246], [0.0]]), None)       # p = (.5, .5), q = (.9, .1): .5 log(.5 / .9) + …
    for direction, expected in (("reverse", .5108256), ("forward", .3680642)):
        kl = distill.token_kls(two, torch.tensor([[0.0]]), two, torch.tensor([[1.0]]), direction)
        assert kl.item() == pytest.approx(expected, abs=1e-6)


def test_distill_s_loss_of_one_dialogue_by_hand(few, tmp_path, tiny):
    row = read(few)[0]
    call(distill, *flags(write(tmp_path / "one", [row]), tmp_path / "out", "--epochs", 3, "--max-steps", 3))
    total = count = 0
    for turn in row["dialogue_history"][1::2]:
        informed = common.critic_prompt(tiny[1], turn["input"], row["task"])
        policy, teacher = (logps_after(tiny, prompt, turn["output_ids"]) for prompt in (turn["input"], informed))
        total += (policy.exp() * (policy - teacher)).sum().item()
        count += len(turn["output_ids"])
    losses = [step["loss"] for step in read(tmp_path / "out" / "metrics.jsonl")]
    assert losses[0] == pytest.approx(total / count, abs=1e-4) and losses[2] < 0.95 * losses[0]


@pytest.mark.parametrize("max_rounds", [8, 2])                       # 2: the next prompt ends with "(last round)"
def test_a_question_is_worth_what_its_reply_tells_of_the_reference(tiny, max_rounds):
    """By hand: two passes of the model with the reference behind the marker, after the prompt and after the reply."""
    [task] = stage(1).make_tasks(backend, 1, 0, "train", "none")
    answer = encode(tiny[1], task["ground_truth"]) + [tiny[1].eos_token_id]
    needed = next(fact for fact in task["facts"] if fact["matters"])
    texts = [needed["questions"][0], "What is the weather?", backend.answer_message(task)]
    history = turns(task["problem_description"])
    row = {"task": task, "history": history, "max_rounds": max_rounds, "dialogue_history": [{"role": "assistant"}]}
    row["candidates"] = [{"text": text, "ids": [*encode(tiny[1], text), tiny[1].eos_token_id]} for text in texts]
    prompt_of = functools.partial(prompt_text, tiny[1], row)
    row["prompt"] = prompt_of(history)
    critic = load_critic()

    def logp_of_answer(history):
        return token_logps_after(tiny, f"{prompt_of(history)}{backend.MARKER}\n", answer).sum().item()
    with backend.Environment() as world:
        other = {**row, "prompt": prompt_of(turns("?"))}
        _, worths = gain.candidate_scores(world, [other, row], critic)
        for text, worth in zip(texts[:2], worths):
            asked = turns(task["problem_description"], text)
            asked.append(gain.reply_to(task, asked, world))
            assert worth == pytest.approx(max(0, logp_of_answer(asked) - logp_of_answer(history)), abs=1e-3)
    [scores] = critic.score_actions([stage(4).as_state(row)])
    assert worths[0] > 2 and worths[1] < .5                          # with the marker 3.1 in the last round but one
    assert worths[2] == pytest.approx(scores[2], abs=1e-6)           # an answer


def test_questions_of_gain_are_worth_at_least_0(runs):
    worths = [(worth, backend.MARKER in candidate["text"]) for row in read(runs["gain"][2] / "scored.jsonl")
              for candidate, worth in zip(row["candidates"], row["advantages"])]
    questions = [worth for worth, is_answer in worths if not is_answer]
    assert min(questions) >= 0 and max(questions) > 0.5
    assert any(worth for worth, is_answer in worths if is_answer)    # the reference does not see c


def test_right_answers_are_a_further_term(runs, monkeypatch):
    logps = torch.tensor([[-3.0, -5.0], [-8.0, 0.0], [-4.0, -1.0], [-1.0, 0.0]])
    lengths = torch.tensor([[3, 1], [4, 0], [2, 5], [2, 0]])
    monkeypatch.setattr(stage(4), "preference_losses", lambda *_: {"loss": torch.tensor([7.0, 8.0])})
    examples = [argparse.Namespace(action_pairs=[0] * num_pairs) for num_pairs in (4, 1)]           # once for each pair
    batch = argparse.Namespace(lengths=lengths)
    losses = answers.answers_losses(lambda _: logps, batch, examples, None, None, answer_coef=0.5)
    assert losses["loss"].tolist() == [7 + 0.5 * 4 * 2, 8 + 0.5 * 0.5]
    first = read(runs["answers"][2] / "metrics.jsonl")[0]
    assert first["answer_nll"] > 0.001
    assert first["loss"] == pytest.approx(math.log(2) + 0.5 * first["answer_nll"], abs=1e-5)


def test_the_tokens_of_an_answer_are_those_behind_the_marker(workspace, tiny, capsys):
    """Answers that the last turn does not state, or that are too long, are left out."""
    tokenizer = tiny[1]
    wins = [row for row in read_trajectories(workspace / "offline.jsonl") if row["reward"] == 1]
    job = argparse.Namespace(path="t", max_length=10 ** 6)
    items = answers.read_right_answers(wins, tokenizer, job)
    assert len(items) == len(wins) > 10
    for trajectory, [row] in zip(wins, items):
        stated = [token for token, number in zip(row.ids, row.action_ids) if number == 0]
        assert tokenizer.decode(stated, skip_special_tokens=True).strip() == trajectory["answer"].strip()
        assert stated[-1] == tokenizer.eos_token_id                  # and that the answer ends
        assert backend.MARKER in tokenizer.decode(row.ids[:-len(stated)])
    wins[0]["answer"] = "not what the last turn says"
    job.max_length = min(len(row.ids) for [row] in items[1:])
    fitting = answers.read_right_answers(wins, tokenizer, job)
    assert fitting == [item for item in items[1:] if len(item[0].ids) == job.max_length]
    assert f"{len(wins) - len(fitting)} more are not in the last turn, or exceed" in capsys.readouterr().out


KIND_ROW = {"task": FUNCTION, "task_id": "t", "sample": 0, "turn": 0, "prompt": "p", "max_rounds": 4,
            "history": turns("?"), "advantages": [0.0, 1.0, 2.0, 3.0], "candidates": [
                {"text": text, "ids": [number], "ended": True} for number, text in enumerate(
                    (f"{backend.MARKER}\nx", f"{backend.MARKER}\ny", "Which one?", "Why?"))]}


@pytest.mark.parametrize("winner, max_rounds, pairs", [
    (None, 4, {(1, 0), (3, 2)}),                                     # answers 0 and 1, questions 2 and 3
    ("answer", 4, {(1, 2), (1, 3), (0, 2), (0, 3)}),
    ("question", 4, {(2, 0), (2, 1), (3, 0), (3, 1)}),
    (None, 1, {(1, 2), (1, 3), (0, 2), (0, 3)})])                    # the last round
def test_pairs_by_kind_compare_like_with_like_or_as_the_log_decides(winner, max_rounds, pairs):
    winners = {data.name_of(KIND_ROW): winner} if winner else {}
    drawn = answers.pairs_by_kind(winners, {**KIND_ROW, "max_rounds": max_rounds}, 400, random.Random(0))
    assert set(drawn) == pairs and len(drawn) == 400
    assert min(drawn.count(pair) for pair in pairs) > 50
    assert set(stage(4).candidate_pairs(KIND_ROW, 400, random.Random(0))) == {(3, 0), (3, 1), (2, 0), (2, 1)}


def test_what_the_log_decides(few):
    rows = read(few)
    winners = answers.winners_of(rows, backend)
    for row in rows:
        decided = winners.pop((row["task_id"], row["sample"], row["num_rounds"] - 1), None)
        known = backend.all_known(row["task"], row["dialogue_history"][:-1])
        assert decided == ("answer" if row["reward"] == 1 else None if known else "question")
    assert winners == {}


def test_pairs_by_kind_in_a_run(runs, few):
    """In undecided states no pair has both kinds, as pairs of 04 do."""
    decided = answers.winners_of(read(few), backend)

    def mixed(name):
        of_turns = [(pair, [backend.MARKER in pair[side]["text"] for side in ("chosen", "rejected")])
                    for pair in read(runs[name][2] / "pairs.jsonl")]
        return [pair for pair, (chosen, rejected) in of_turns if chosen != rejected]
    mixed_by_kind = {data.name_of(pair) for pair in mixed("answers")}
    last = {data.name_of({**row, "turn": 7}) for row in read(few)}   # the eighth round
    assert {data.name_of(pair) for pair in mixed("plain")} - decided.keys() - last
    assert mixed_by_kind and mixed_by_kind <= decided.keys() | last


def test_no_reply_follows_the_last_round():
    assert gain.prompt_after({**KIND_ROW, "max_rounds": 1}, "Which one?", None, None) is None
