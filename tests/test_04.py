"""04_train_policy.py: golden losses, what is chosen, step-0 invariants, phases, resume, bad input."""
import argparse
import json
import math
import random
import re

import pytest
import torch

import common
from colbench import backend
from conftest import call, read, refused, ROOT, rows_of_actions, stage, succeed
from conftest import policy_flags as flags
from lib import training
from lib.models import encode
from lib.report.credit import agreement
from lib.runtime import start
from lib.training import preference_numbers

policy_stage = stage(4)
BASE = ROOT / "models" / "tiny"


def sweet_flags(workspace, critic, out, *more):
    return flags(workspace, "sweet", out, "--critic", critic, "--data-frac", 0.17, "--num-candidates", 8,
                 "--max-new-tokens", 80, "--nll-coef", 0, *more)


@pytest.fixture(scope="module")
def sweet(workspace, critic, tmp_path_factory):
    out = tmp_path_factory.mktemp("sweet") / "sweet"
    return out, succeed("04_train_policy.py", *sweet_flags(workspace, critic, out))


@pytest.fixture(scope="module")
def with_answers(sweet, workspace, critic, tmp_path_factory):
    """On the candidates of `sweet`, with both flags about right answers: the folder and what was printed."""
    out = tmp_path_factory.mktemp("with_answers") / "sweet"
    return out, succeed("04_train_policy.py", *sweet_flags(
        workspace, critic, out, "--answer-coef", 0.5, "--answers-by-outcome", "--candidates",
        sweet[0] / "candidates.jsonl"))


# --- losses by hand

def test_dpo_loss_by_hand_in_float64():
    value = lambda *numbers: torch.tensor(numbers, dtype=torch.float64)
    losses, chosen, rejected = policy_stage.dpo_loss(value(-3.0, -1.0), value(-5.0, -1.0), value(-4.0, -2.0),
                                                     value(-4.0, -2.0), beta=0.1)
    assert losses.tolist() == pytest.approx([math.log(1 + math.exp(-0.2)), math.log(2)], abs=1e-12)
    assert chosen.tolist() == pytest.approx([0.1, 0.1]) and rejected.tolist() == pytest.approx([-0.1, 0.1])


def test_the_items_of_several_examples_are_numbered_through():
    one, two = [common.Row([5], [0])], [common.Row([6], [0])]
    examples = [common.Example([one], [((0, 0), (0, 1))], "a"),
                common.Example([one], [((0, 1), (0, 0)), ((0, 1), (0, 0))], "b"), common.Example([one], [], "c"),
                common.Example([one, two], [((0, 0), (1, 1))], "d")]
    pairs = common.batch_pairs(examples)
    assert pairs.tolist() == [[[0, 0], [0, 1]], [[1, 1], [1, 0]], [[1, 1], [1, 0]], [[3, 0], [4, 1]]]
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0], [9.0, 10.0]])
    chosen, rejected = common.chosen_and_rejected(values, pairs)
    assert chosen.tolist() == [1.0, 4.0, 4.0, 7.0] and rejected.tolist() == [2.0, 3.0, 3.0, 10.0]


def test_a_trajectory_of_multi_turn_dpo_is_one_action():
    item = [common.Row([5, 6, 7, 8], [-1, 0, -1, 1]), common.Row([9, 5], [-1, 2])]
    assert [row.action_numbers for row in common.as_one_action(item)] == [[-1, 0, -1, 0], [-1, 0]]
    assert common.collate([common.as_one_action(item)]).lengths.tolist() == [[3]]


def test_the_loss_of_a_batch_by_hand_in_float64():
    """Two examples, of two pairs and of one; each has a further item, a right answer of four and of two tokens."""
    value = lambda rows: torch.tensor(rows, dtype=torch.float64)
    row = [common.Row([5], [0])]
    examples = [common.Example([row, row], [((0, 0), (0, 1)), ((0, 2), (0, 1))], "a"),
                common.Example([row, row], [((0, 1), (0, 0))], "b")]
    logps = value([[-3.0, -5.0, -2.0], [-8.0, 0.0, 0.0], [-4.0, -1.0, 0.0], [-1.0, 0.0, 0.0]])
    ref_logps = value([[-4.0, -4.0, -2.0], [-9.0, 0.0, 0.0], [-2.0, -3.0, 0.0], [-7.0, 0.0, 0.0]])
    lengths = value([[3, 1, 2], [4, 0, 0], [2, 5, 0], [2, 0, 0]])
    args = argparse.Namespace(beta=0.1, nll_coef=0.01, answer_coef=0.5, dtype="float32")
    shares = value([1 / 3, 1 / 3])                                   # three pairs in the step
    loss, numbers = policy_stage.batch_loss(logps, ref_logps, lengths, examples, shares, args)
    log_sigmoid = lambda x: -math.log1p(math.exp(-x))
    dpo = [-log_sigmoid(0.1 * 2), -log_sigmoid(0.1 * 1), -log_sigmoid(0.1 * 4)]
    nll = [3 / 3, 2 / 2, 1 / 5]
    answers = [8 / 4, 8 / 4, 1 / 2]                                  # as often as the example has pairs
    by_hand = sum(dpo) / 3 + 0.01 * sum(nll) / 3 + 0.5 * sum(answers) / 3
    assert loss.item() == pytest.approx(by_hand, abs=1e-12)
    assert numbers["answer_nll"] == pytest.approx(1.5) and numbers["nll"] == pytest.approx(sum(nll) / 3)
    args.answer_coef = 0.0
    without, _ = policy_stage.batch_loss(logps, ref_logps, lengths, examples, shares, args)
    assert without.item() == pytest.approx(by_hand - 0.75, abs=1e-12)
    imitated = [common.Example([row], [], "a"), common.Example([row], [], "b")]
    loss, numbers = policy_stage.batch_loss(logps[:2], None, lengths[:2], imitated, value([0.1, 0.2]), args)
    assert loss.item() == pytest.approx(0.1 * 10 + 0.2 * 8, abs=1e-12) and numbers == {}


def test_the_tokens_of_an_answer_are_those_behind_the_marker(workspace, tiny):
    tokenizer = tiny[1]
    trajectories = [t for t in common.read_trajectories(workspace / "offline.jsonl") if t["reward"] == 1]
    items = policy_stage.right_answer_items(trajectories, tokenizer)
    assert len(items) == len(trajectories) > 10
    for trajectory, [row] in zip(trajectories, items):
        stated = [token for token, turn in zip(row.ids, row.action_numbers) if turn == 0]
        assert tokenizer.decode(stated, skip_special_tokens=True).strip() == trajectory["answer"].strip()
        assert stated[-1] == tokenizer.eos_token_id                  # and that the answer ends
        assert backend.MARKER in tokenizer.decode([t for t, turn in zip(row.ids, row.action_numbers) if turn < 0])
    assert policy_stage.first_answer_token(tokenizer, [7, 8], "def f") is None


def test_right_answers_that_are_left_out_are_counted(workspace, tiny, capsys):
    lengths = {}
    for trajectory in common.read_trajectories(workspace / "offline.jsonl"):
        if trajectory["reward"] == 1:
            [[row]] = policy_stage.right_answer_items([trajectory], tiny[1])
            lengths[len(row.ids)] = trajectory
    short, middle, long = sorted(lengths)[:3]
    lengths[long]["answer"] = "not what the last turn says"
    trajectories = [lengths[length] for length in (short, middle, long)]
    args = argparse.Namespace(trajectories="t", max_length=short)
    assert len(policy_stage.read_right_answers(trajectories, tiny[1], args)) == 1
    assert "2 more right answers: 1 do not stand in the last turn, 1 are longer" in capsys.readouterr().out


def test_sampled_candidates_are_paid_for_before_they_are_scored(monkeypatch):
    done = []
    monkeypatch.setattr(policy_stage, "candidates_phase", lambda *_: done.append("sampled"))
    monkeypatch.setattr(policy_stage, "scores_phase", lambda *_: done.append("scored"))
    costs = argparse.Namespace(record=lambda: done.append("recorded"))
    policy_stage.scored_candidates([], None, None, argparse.Namespace(candidates=None), None, costs)
    assert done == ["sampled", "recorded", "scored"]


def test_right_answers_are_a_further_term(with_answers, workspace):
    out, printed = with_answers
    wins = sum(row["reward"] == 1 for row in read(workspace / "offline.jsonl"))
    assert f"{wins} right answers of 72 trajectories (--answer-coef)" in printed
    first = read(out / "metrics.jsonl")[0]
    assert first["answer_nll"] > 0
    assert first["loss"] == pytest.approx(math.log(2) + 0.5 * first["answer_nll"], abs=1e-5)
    with pytest.raises(SystemExit) as stopped:
        policy_stage.parse_args(["--method", "mtdpo", "--trajectories", "t", "--model", "m", "--out", "o",
                                 "--answer-coef", "1"])
    assert stopped.value.code == 2


def test_pairs_are_better_half_against_worse_half():
    candidates = [{"ids": [n], "ended": n != 9} for n in range(10)]
    row = {"candidates": candidates, "advantages": [0.0, 0.9, 0.1, 0.8, 0.2, 0.7, 0.3, 0.6, 0.4, 5.0]}
    pairs = policy_stage.candidate_pairs(row, 200, random.Random(0))
    assert len(pairs) == 200
    assert {a for a, _ in pairs} == {1, 3, 5, 7} and {b for _, b in pairs} == {0, 2, 4, 6}  # 8 is the middle, 9 was cut
    same = {"candidates": [{"ids": [1], "ended": True}] * 4, "advantages": [0.0] * 4}
    assert policy_stage.candidate_pairs(same, 4, random.Random(0)) == []


def test_barred_candidates_are_never_chosen_and_may_be_rejected():
    row = {"candidates": [{"ids": [n], "ended": True} for n in range(6)], "advantages": [6, 5, 4, 3, 2, 1]}
    pairs = policy_stage.candidate_pairs(row, 200, random.Random(0), barred=[0, 2, 4])
    assert {a for a, _ in pairs} == {1} and {b for _, b in pairs} == {3, 4, 5}
    assert policy_stage.candidate_pairs(row, 200, random.Random(0), barred=[0, 1, 2]) == []


def test_by_outcome_answers_are_chosen_where_the_logged_answer_was_right(sweet, with_answers, workspace):
    out, printed = with_answers
    right = set()
    for trajectory in read(workspace / "offline.jsonl"):
        if trajectory["reward"] == 1:
            right.add((trajectory["task_id"], trajectory["sample"], trajectory["num_rounds"] - 1))

    def wrongly_chosen(pairs):
        return [pair for pair in pairs if backend.MARKER in pair["chosen"]["text"]
                and (pair["task_id"], pair["sample"], pair["turn"]) not in right]
    pairs = read(out / "pairs.jsonl")
    assert wrongly_chosen(read(sweet[0] / "pairs.jsonl")) and not wrongly_chosen(pairs)
    assert any(backend.MARKER in pair["chosen"]["text"] for pair in pairs)
    assert any(backend.MARKER in pair["rejected"]["text"] for pair in pairs)
    assert "had only answers to choose (--answers-by-outcome)" in printed
    with pytest.raises(SystemExit) as stopped:
        policy_stage.parse_args(["--method", "mtdpo", "--trajectories", "t", "--model", "m", "--out", "o",
                                 "--answers-by-outcome"])
    assert stopped.value.code == 2


def test_in_the_last_round_every_candidate_is_an_answer(workspace):
    task = read(workspace / "offline.jsonl")[0]["task"]
    candidates = [{"text": text, "ids": [1], "ended": True} for text in ("Which one?", backend.MARKER + "\nx")]
    row = {"task": task, "prompt": "p", "history": [{"role": "user", "content": "?"}], "candidates": candidates}
    assert policy_stage.answering_candidates({**row, "max_rounds": 2}) == [1]
    assert policy_stage.answering_candidates({**row, "max_rounds": 1}) == [0, 1]                     # as 02 takes it


def test_states_are_a_seeded_share_of_whole_trajectories(workspace):
    trajectories = read(workspace / "offline.jsonl")
    sampled = policy_stage.sample_trajectories(trajectories, 0.1, 0)
    chosen = {(t["task_id"], t["sample"]) for t in sampled}
    assert len(chosen) == len(sampled) == 7
    assert chosen != {(t["task_id"], t["sample"]) for t in trajectories[:7]}              # not the head of the file
    for trajectory in sampled:
        history = trajectory["dialogue_history"]
        states = policy_stage.states_of(trajectory, [(f"prompt {n}", [9]) for n in range(trajectory["num_rounds"])])
        assert [state["turn"] for state in states] == list(range(trajectory["num_rounds"]))
        assert [state["prompt"] for state in states] == [f"prompt {n}" for n in range(trajectory["num_rounds"])]
        places = [len(state["history"]) for state in states]
        assert all(history[place]["role"] == "assistant" for place in places) and len(set(places)) == len(places)


def test_states_that_leave_no_room_for_a_candidate_are_left_out_and_counted(tiny, capsys):
    states = [{"prompt": "the " * number} for number in (4, 6, 5)]
    assert policy_stage.states_with_room(states, tiny[1], 46, 40) == [states[0], states[2]]
    assert ("left out 1 turns, whose prompts are longer than 6 tokens, so that the model has no room for "
            "--max-new-tokens 40: 2 turns are left") in capsys.readouterr().out


# --- sweet

def test_phases_can_be_inspected(workspace, sweet, tiny):
    out, printed = sweet
    scored, pairs = read(out / "scored.jsonl"), read(out / "pairs.jsonl")
    assert [len(row["candidates"]) for row in scored] == [8] * len(scored)
    by_state = {(row["task_id"], row["sample"], row["turn"]): row for row in scored}
    for pair in pairs:
        row = by_state[pair["task_id"], pair["sample"], pair["turn"]]
        assert pair["chosen"]["advantage"] >= pair["rejected"]["advantage"]
        assert pair["chosen"]["ids"] != pair["rejected"]["ids"]
        order = sorted(row["advantages"], reverse=True)
        assert order.index(pair["chosen"]["advantage"]) < 4
    assert "what the pairs say" in printed and (out / "COMPLETED").exists()


def test_c_never_reaches_the_policy(sweet):
    """Not a line of the reference but its signature, which is in the request."""
    for row in read(sweet[0] / "scored.jsonl"):
        lines = [line.strip() for line in row["task"]["ground_truth"].split("\n")[1:]]
        assert lines and not any(line in row["prompt"] for line in lines)
        assert "The function that this person needs" not in row["prompt"]


def test_the_first_loss_is_log_2(sweet):
    """That of mtdpo: test_house.py, test_training.py."""
    assert read(sweet[0] / "metrics.jsonl")[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)


def test_an_equal_pair_is_half_right(sweet, workspace, tmp_path):
    rewards = torch.tensor([0.3, 0.3 + 3e-7, 0.3 - 3e-7, 0.4, 0.2]), torch.full((5,), 0.3)
    numbers = preference_numbers(*rewards, torch.zeros(5), torch.full((5,), 0.2), "float32")
    assert numbers["acc"] == pytest.approx(0.5) and numbers["margin"] == pytest.approx(0, abs=1e-6)
    one = preference_numbers(rewards[0][3:4], rewards[1][:1], torch.zeros(1), torch.ones(1), "bfloat16")
    assert one["acc"] == 1 and read(sweet[0] / "metrics.jsonl")[0]["acc"] == 0.5
    succeed("04_train_policy.py", *flags(workspace, "mtdpo", tmp_path / "m", "--dtype", "bfloat16", "--max-steps", 1))
    assert read(tmp_path / "m" / "metrics.jsonl")[0]["acc"] == 0.5


def test_a_tree_trains_like_rows_of_their_own(sweet, workspace, critic, tmp_path, monkeypatch):
    monkeypatch.setattr(common, "actions_item", rows_of_actions)
    call(4, *sweet_flags(workspace, critic, tmp_path / "s", "--candidates", sweet[0] / "candidates.jsonl"))
    for ours, theirs in zip(read(tmp_path / "s" / "pairs.jsonl"), read(sweet[0] / "pairs.jsonl"), strict=True):
        assert ours["chosen"]["advantage"] == pytest.approx(theirs["chosen"]["advantage"], abs=1e-4)
    for ours, theirs in zip(read(tmp_path / "s" / "metrics.jsonl"), read(sweet[0] / "metrics.jsonl"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-4)
        assert ours["gnorm"] == pytest.approx(theirs["gnorm"], rel=1e-2)


def test_the_oracle_ranks_what_a_task_needs_on_candidates_of_another_run(sweet, workspace, tmp_path):
    oracle = ["--critic", "oracle", "--data-frac", 0.17, "--num-candidates", 8,
              "--candidates", sweet[0] / "candidates.jsonl"]
    printed = succeed("04_train_policy.py", *flags(workspace, "sweet", tmp_path / "s", *oracle))
    assert not (tmp_path / "s" / "candidates.jsonl").exists() and "what the pairs say" in printed
    kinds = {kind for row in read(tmp_path / "s" / "scored.jsonl")
             for kind in zip(row["advantages"], (backend.turn_kind(row["task"], row["history"], candidate["text"])
                                                 for candidate in row["candidates"]))}
    assert {kind for score, kind in kinds if score == 2} == {"needed"} and (0, "early answer") in kinds
    line = refused(4, *flags(workspace, "sweet", tmp_path / "t", *oracle, "--seed", 1))
    assert "candidates.jsonl: made from other turns" in line
    rows = read(workspace / "offline.jsonl")[:2]
    del rows[1]["task"]["facts"]
    (tmp_path / "plain.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = refused(4, "--method", "sweet", "--trajectories", tmp_path / "plain.jsonl", "--model", BASE,
                   "--critic", "oracle", "--out", tmp_path / "u")
    assert "plain.jsonl: --critic oracle needs template tasks" in line


def test_the_table_of_kinds_by_hand():
    task = {"problem_description": "f", "test_cases": {"1": "f(1)"}, "ground_truth": "def f(n):\n    return n * 3",
            "facts": [
        {"topic": "the factor", "questions": [], "matters": True, "told": False},
        {"topic": "the colour", "questions": [], "matters": False, "told": False}]}
    texts = ["What is the factor?", "What is the colour?", "What is the colour?"]
    rows = [{"task_id": "a", "sample": 0, "turn": 0, "prompt": "", "task": task, "history": [],
             "candidates": [{"text": text} for text in texts], "advantages": [2.0, 1.0, 1.0]},
            {"task_id": "a", "sample": 0, "turn": 1, "prompt": "", "task": task,
             "history": [{"role": "assistant", "content": texts[0]}],
             "candidates": [{"text": texts[0]}, {"text": texts[1]}], "advantages": [0.0, 1.0]}]
    pairs = [{"task_id": "a", "sample": 0, "turn": 0, "chosen": {"text": texts[0]}, "rejected": {"text": texts[1]}}] * 4
    cells = [line.split() for line in policy_stage.kind_lines(rows, pairs)[1:]]
    assert cells == [["not", "all", "known", "idle", "2", "0.25", "0", "4"],
                     ["not", "all", "known", "needed", "1", "1.00", "4", "0"],
                     ["all", "known", "idle", "1", "1.00", "0", "0"], ["all", "known", "repeat", "1", "0.00", "0", "0"]]
    del task["facts"]
    assert policy_stage.kind_lines(rows, []) == []


def test_thoughts_are_no_speech():
    """A question whose thoughts hold the marker is no answer."""
    thoughts, ask = f"<think>Soon: {backend.MARKER} x</think>", "What is the factor?"
    task = {"problem_description": "f", "test_cases": {"1": "f(1)"}, "ground_truth": "def f(n):\n    return n * 3",
            "facts": [{"topic": "the factor", "questions": [], "matters": True, "told": False}]}
    candidates = [{"text": text, "ids": [n]} for n, text in enumerate((thoughts + ask, "What is the colour?"))]
    row = {"task": task, "prompt": "x", "history": [], "candidates": candidates}
    args = argparse.Namespace(max_tokens=9)
    [scored] = policy_stage.score_candidates([row], "oracle", None, args, "cpu")
    assert scored["advantages"] == [2, 1]                            # needed, vague
    scored |= {"task_id": "a", "sample": 0, "turn": 0}
    assert [line.split()[3] for line in policy_stage.kind_lines([scored], [])[1:]] == ["needed", "vague"]
    scored |= {"pairs": [(0, 1)], "candidates": [
        {**candidate, "ended": True, "chosen": 1, "rejected": 0} for candidate in candidates]}
    assert agreement([scored], backend)["oracle"]["right"] == 1


def test_what_a_candidate_says_is_without_the_thoughts_that_its_prompt_began():
    thoughts, ask = f"<think>Soon: {backend.MARKER} x</think>", "What is the factor?"
    for text, prompt, is_answer in ((thoughts + ask, "x", False),
                                    (f"{backend.MARKER} a</think>{ask}", "<think>", False),
                                    (f"{thoughts}{backend.MARKER} y", "x", True)):
        row = {"task": {"problem_description": "x", "ground_truth": "y", "test_cases": {}}, "prompt": prompt}
        assert (backend.MARKER in policy_stage.candidate_says(row, {"text": text})) == is_answer


def test_phases_resume_where_they_stopped(sweet, workspace, critic, tmp_path, monkeypatch):
    arguments = [str(x) for x in flags(workspace, "sweet", tmp_path / "s", "--critic", critic, "--data-frac", 0.17,
                                       "--num-candidates", 8, "--max-new-tokens", 80, "--nll-coef", 0)]
    score = policy_stage.score_candidates

    def die(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(policy_stage, "score_candidates", die)
    with pytest.raises(KeyboardInterrupt):
        policy_stage.main(arguments)
    written = (tmp_path / "s" / "candidates.jsonl").stat().st_mtime_ns
    monkeypatch.setattr(policy_stage, "score_candidates", score)
    policy_stage.main(arguments)
    assert (tmp_path / "s" / "candidates.jsonl").stat().st_mtime_ns == written
    assert (tmp_path / "s" / "pairs.jsonl").read_bytes() == (sweet[0] / "pairs.jsonl").read_bytes()


def test_the_last_step_is_saved_where_max_steps_ends_within_an_epoch(workspace, tmp_path, monkeypatch, capsys):
    arguments = [str(x) for x in flags(workspace, "mtdpo", tmp_path / "m", "--max-steps", 1)]

    def die(*_):
        raise KeyboardInterrupt
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(training, "check_weights", die)                # after training, before anything is written
        policy_stage.main(arguments)
    assert "continues at step" not in capsys.readouterr().out
    policy_stage.main(arguments)
    assert "continues at step 1\n" in capsys.readouterr().out
    assert [row["step"] for row in read(tmp_path / "m" / "metrics.jsonl")] == [1]


def test_flags_of_sampling_do_nothing_to_candidates_of_another_run(sweet, tiny, capsys):
    path = sweet[0] / "candidates.jsonl"
    states = [{key: row[key] for key in ("task_id", "sample", "turn", "prompt", "task")} for row in read(path)]
    said = {"model": f"{path}: sampled by {BASE}, which is another model than --model {sweet[0]}\n",
            "temperature": f"{path}: made with --temperature 1.0, so 0.5 does nothing here\n",
            "max_new_tokens": f"{path}: made with --max-new-tokens 80, so 20 does nothing here\n"}
    for changes, line in (({}, ""), ({"model": str(sweet[0])}, said["model"]),
                          ({"temperature": 0.5}, said["temperature"]),
                          ({"max_new_tokens": 20}, said["max_new_tokens"])):
        args = argparse.Namespace(**{"num_candidates": 8, "temperature": 1.0, "max_new_tokens": 80, "model": str(BASE),
                                     **changes})
        capsys.readouterr()
        policy_stage.read_candidates(path, states, tiny[1], args)
        assert capsys.readouterr().out == f"reads {path} ({len(states)} rows)\n" + line


def test_candidates_of_another_run_answer_to_the_tasks_of_this_one(sweet, tiny):
    """A reference that was corrected since they were sampled is what they are scored by."""
    path = sweet[0] / "candidates.jsonl"
    states = [{key: row[key] for key in ("task_id", "sample", "turn", "prompt", "task")} for row in read(path)]
    for state in states:
        state["task"] = {**state["task"], "ground_truth": "def corrected(): return 1"}
    args = argparse.Namespace(num_candidates=8, temperature=1.0, max_new_tokens=80, model=str(BASE))
    rows = policy_stage.read_candidates(path, states, tiny[1], args)
    assert [row["task"] for row in rows] == [state["task"] for state in states]
    assert [row["candidates"] for row in rows] == [row["candidates"] for row in read(path)]


def test_the_policy_loads_and_continues_to_talk(sweet, workspace, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    model, tokenizer = AutoModelForCausalLM.from_pretrained(sweet[0]), AutoTokenizer.from_pretrained(sweet[0])
    assert tokenizer.chat_template and tokenizer.eos_token == "<|end|>"
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Can you write a function?"}], return_tensors="pt",
                                        add_generation_prompt=True, return_dict=True)
    assert model.generate(**ids, max_new_tokens=4, do_sample=False).shape[1] > ids["input_ids"].shape[1]


# --- prompts

def published(workspace, path, num=6, **changes):
    """The first dialogues as a published file has them: no ids, no numbers of samples, a system prompt of their own in
    what is logged (this template shows none, so it stands as a turn)."""
    rows = []
    for row in read(workspace / "offline.jsonl")[:num]:
        row = {key: value for key, value in {**row, **changes}.items()
               if key not in ("tokenizer", "sample", "max_rounds") or key in changes}
        for turn in row["dialogue_history"]:
            turn.pop("output_ids", None)
            if "input" in turn:
                turn["input"] = "<|user|>Ask {short} questions.<|end|>" + turn["input"]
        rows.append(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def oracle(path, out, *more):
    return [str(x) for x in ("--method", "sweet", "--critic", "oracle", "--trajectories", path, "--model", BASE,
                             "--data-frac", 1, "--num-candidates", 6, "--max-new-tokens", 60, "--max-steps", 1,
                             "--out", out, *more)]


def test_candidates_continue_logged_prompts_and_train_after_their_own(workspace, tmp_path, monkeypatch, capsys):
    """Two tasks, three dialogues of each without "sample": what is trained together continues its own prompt."""
    rows, trained, make = published(workspace, tmp_path / "p.jsonl"), [], common.actions_item

    def actions_item(tokenizer, prompt, actions):
        trained.append((prompt, actions))
        return make(tokenizer, prompt, actions)
    monkeypatch.setattr(common, "actions_item", actions_item)
    policy_stage.main(oracle(tmp_path / "p.jsonl", tmp_path / "out", "--pairs-together"))
    candidates, pairs = (read(tmp_path / "out" / name) for name in ("candidates.jsonl", "pairs.jsonl"))
    assert [row["prompt"] for row in candidates] == [turn["input"] for row in rows
                                                     for turn in row["dialogue_history"][1::2]]
    assert [row["sample"] for row in candidates if row["turn"] == 0] == [0, 1, 2] * 2
    assert len({json.dumps(row["candidates"]) for row in candidates if row["turn"] == 0}) == 6  # other random numbers
    sampled = {}
    for row in candidates:
        sampled.setdefault(row["prompt"], set()).update(tuple(candidate["ids"]) for candidate in row["candidates"])
    assert len({prompt for prompt, _ in trained}) > 6
    assert all(set(map(tuple, actions)) <= sampled[prompt] for prompt, actions in trained)
    assert len(trained) == len({(pair["task_id"], pair["sample"], pair["turn"]) for pair in pairs})
    assert f"their prompts: {len(candidates)} as logged\n" in capsys.readouterr().out


def test_two_prompts_of_one_name_are_refused(workspace, tmp_path):
    rows = published(workspace, tmp_path / "p.jsonl", sample=0)
    line = refused(4, *oracle(tmp_path / "p.jsonl", tmp_path / "out"))
    assert line.startswith(f'{tmp_path / "p.jsonl"}: two dialogues of task {rows[0]["task_id"]} have "sample" 0; ')
    published(workspace, tmp_path / "p.jsonl", num=1)
    policy_stage.main(oracle(tmp_path / "p.jsonl", tmp_path / "a"))
    candidates = tmp_path / "a" / "candidates.jsonl"
    policy_stage.main(oracle(tmp_path / "p.jsonl", tmp_path / "b", "--candidates", candidates))
    candidates.write_text(candidates.read_text().replace("Ask {short} questions", "Ask"))
    line = refused(4, *oracle(tmp_path / "p.jsonl", tmp_path / "c", "--candidates", candidates))
    assert line.startswith(f"{candidates}: task {rows[0]['task_id']}, sample 0, turn 0: its candidates continue "
                           "another prompt")
    refused(4, *oracle(tmp_path / "p.jsonl", tmp_path / "b", "--candidates", candidates, "--overwrite"))
    assert (tmp_path / "b" / "COMPLETED").exists()                   # a bad file replaces nothing
    candidates.write_text("".join(json.dumps({k: v for k, v in row.items() if k != "sample"}) + "\n"
                                  for row in read(candidates)))
    assert refused(4, *oracle(tmp_path / "p.jsonl", tmp_path / "d",
                              "--candidates", candidates)) == f'{candidates}:1: missing "sample"'


def test_the_agent_folder_keeps_its_system_prompt(sweet, workspace, tmp_path, capsys):
    ours = backend.AGENT_SYSTEM.format(max_rounds=8)
    assert json.loads((sweet[0] / "agent.json").read_text()) == {"system_prompt": ours}
    start(0)
    rows = published(workspace, tmp_path / "p.jsonl", system_prompt="Mine {x}")
    common.note_system_prompt(tmp_path, [{**rows[0], "system_prompt": "Other"}, *rows])
    assert json.loads((tmp_path / "agent.json").read_text()) == {"system_prompt": "Mine {x}"}
    assert "1 of 7 trajectories have another system prompt than most" in capsys.readouterr().out


# --- lengths

def test_each_action_of_a_tree_has_its_own_length(tiny, capsys):
    """A tree of 20 tokens within --max-length 10, as each action has 8 with the prompt; one that is too long leaves
    alone."""
    prompt, tokenizer = "<|user|>a b<|end|><|assistant|>", tiny[1]
    read_tokens = len(encode(tokenizer, prompt))
    pair = lambda *lengths: {"prompt": prompt, **{side: {"ids": [9] * n}
                                                  for side, n in zip(("chosen", "rejected"), lengths)}}
    pairs = [pair(5, 4), pair(5, 6), pair(3, 5), pair(8, 2)]
    assert policy_stage.drop_long_pairs(pairs, tokenizer, read_tokens + 5) == [pairs[0], pairs[2]]
    said = f"dropped 2 of 4 pairs: prompt and action are longer than --max-length {read_tokens + 5}"
    assert said in capsys.readouterr().out
    assert policy_stage.drop_long_pairs(pairs, tokenizer, read_tokens + 8) == pairs
    assert capsys.readouterr().out == ""


def test_trees_longer_than_their_paths_are_trained(workspace, tmp_path, tiny):
    published(workspace, tmp_path / "p.jsonl", num=1)
    policy_stage.main(oracle(tmp_path / "p.jsonl", tmp_path / "a", "--pairs-together"))
    pairs = read(tmp_path / "a" / "pairs.jsonl")
    paths = [len(encode(tiny[1], pair["prompt"])) + len(pair[side]["ids"]) for pair in pairs
             for side in ("chosen", "rejected")]
    policy_stage.main(oracle(tmp_path / "p.jsonl", tmp_path / "b", "--pairs-together", "--max-length", max(paths)))
    same = [read(tmp_path / name / "metrics.jsonl")[0]["loss"] for name in "ab"]
    assert same[0] == same[1]
    reason = (r"p.jsonl: no examples to train on: of \d+ pairs asked for \d+ are two equal actions, .* not stop, "
              rf"{len(pairs)} are longer than --max-length 5$")
    assert re.search(reason, refused(4, *oracle(tmp_path / "p.jsonl", tmp_path / "c", "--max-length", 5)))
    turns = len(read(tmp_path / "a" / "candidates.jsonl"))
    line = refused(4, *oracle(tmp_path / "p.jsonl", tmp_path / "d", "--max-new-tokens", 1))
    assert line.endswith(f"of {4 * turns} pairs asked for 0 are two equal actions, {4 * turns} are of turns with "
                         "fewer than two candidates that --max-new-tokens 1 did not stop, 0 are longer than "
                         "--max-length 16384")


# --- likelihoods

def test_rft_trains_on_successes_alone(workspace, tmp_path):
    wins = sum(row["reward"] == 1 for row in read(workspace / "offline.jsonl"))
    assert f"{wins} successful trajectories" in succeed("04_train_policy.py", *flags(workspace, "rft", tmp_path / "r"))


def test_sft_loss_is_the_mean_nll_of_the_agents_tokens(workspace, tmp_path, tiny):
    model, tokenizer = tiny
    row = read(workspace / "offline.jsonl")[0]
    (tmp_path / "one.jsonl").write_text(json.dumps(row) + "\n")
    policy_stage.main([str(x) for x in ("--method", "sft", "--trajectories", tmp_path / "one.jsonl", "--model", BASE,
                                        "--log-every", 1, "--out", tmp_path / "s")])
    nll, count = 0.0, 0
    for turn in row["dialogue_history"]:
        if turn["role"] == "assistant":
            ids = encode(tokenizer, turn["input"])
            with torch.no_grad():
                logits = model(torch.tensor([ids + turn["output_ids"]])).logits[0].double()
            for n, token in enumerate(turn["output_ids"]):
                nll -= torch.log_softmax(logits[len(ids) + n - 1], -1)[token].item()
                count += 1
    assert read(tmp_path / "s" / "metrics.jsonl")[0]["loss"] == pytest.approx(nll / count, abs=1e-4)


# --- bad input

def test_bad_input_is_one_line(workspace, critic, tmp_path):
    offline, rows = workspace / "offline.jsonl", read(workspace / "offline.jsonl")
    (tmp_path / "losses").write_text("".join(json.dumps({**row, "reward": 0.0}) + "\n" for row in rows))
    (tmp_path / "empty").write_text("")
    (tmp_path / "broken").write_text("{")
    (tmp_path / "keyless").write_text(json.dumps({**rows[0], "task": {}}) + "\n")
    common_flags = ["--model", BASE, "--out", tmp_path / "out"]
    for method, name, message in (("mtdpo", "losses", "no task has both"), ("rft", "losses", "no successful"),
                                  ("sft", "missing", "no such file"), ("sft", "empty", "no rows"),
                                  ("sft", "broken", "broken:1: not JSON"),
                                  ("sft", "keyless", 'keyless:1: task: missing "problem_description"')):
        line = refused(4, "--method", method, "--trajectories", tmp_path / name, *common_flags)
        assert message in line and str(tmp_path / name) in line
        assert not (tmp_path / "out").exists()
    sweet = ["--method", "sweet", "--trajectories", offline]
    assert "no critic.json" in refused(4, *sweet, *common_flags, "--critic", BASE)
    assert "nobody/model" in refused(4, *sweet, "--model", "nobody/model", "--critic", critic,
                                     "--out", tmp_path / "out")
    # a critic of another architecture and vocabulary
    assert "tokenizer is not the policy's" in refused(4, *sweet, "--model", workspace / "model", "--critic", critic,
                                                      "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
