"""04_train_policy.py: golden losses, what is chosen, step-0 invariants, phases, lengths, bad input."""
import collections
import json
import math
import random
import re
import types
from unittest import mock

import pytest
import torch

import common
from colbench import backend
from compare import token_logps_after
from conftest import BASE, call, dies, FUNCTION, job_of, Partial, policy_flags, read, refused, stage, write
from lib import data, training
from lib.data import read_trajectories
from lib.logps import collate, items_of, Sequence, without_trees
from lib.runtime import InputError
from lib.seeds import uniforms
from lib.tokens import encode
from lib.training import preference_metrics

policy_stage = stage(4)


def flags(workspace, method, out, *more):
    return policy_flags(workspace, method, out, "--num-trajectories", 24, *more)


@pytest.fixture(scope="module")
def sweet(workspace, critic, tmp_path_factory):
    """(The folder, what was printed, the flags)"""
    out = tmp_path_factory.mktemp("sweet") / "sweet"
    words = flags(workspace, "sweet", out, "--critic", critic, "--data-frac", 0.1, "--num-candidates", 8,
                  "--max-new-tokens", 80, "--nll-coef", 0, "--reference-sees-c", "no")
    return out, call(4, *words), words


def test_the_items_of_several_examples_are_numbered_through():
    one, two = [Sequence([5], [0])], [Sequence([6], [0])]
    examples = [common.Example([one], [((0, 0), (0, 1))], "a"),
                common.Example([one], [((0, 1), (0, 0)), ((0, 1), (0, 0))], "b"), common.Example([one], [], "c"),
                common.Example([one, two], [((0, 0), (1, 1))], "d")]
    assert policy_stage.batch_pairs(examples).tolist() == [
        [[0, 0], [0, 1]], [[1, 1], [1, 0]], [[1, 1], [1, 0]], [[3, 0], [4, 1]]]


def test_a_trajectory_of_multi_turn_dpo_is_one_action():
    item = [Sequence([5, 6, 7, 8], [-1, 0, -1, 1]), Sequence([9, 5], [-1, 2])]
    example = policy_stage.pair_of_dialogues(common.Example([item, item], [], "a"))
    for found in example.items:
        assert [row.action_ids for row in found] == [[-1, 0, -1, 0], [-1, 0]]
    assert collate(example.items).lengths.tolist() == [[3], [3]] and example.action_pairs == [((0, 0), (1, 0))]


def test_dpo_losses_by_hand_in_float64():
    value = lambda rows: torch.tensor(rows, dtype=torch.float64)
    logps = value([[-3.0, -5.0], [-2.0, -5.0], [-1.0, -4.0], [-1.0, -1.0]])
    ref_logps = value([[-4.0, -4.0], [-2.0, -4.0], [-3.0, -2.0], [-2.0, -2.0]])
    lengths = value([[3, 1], [2, 1], [5, 2], [1, 9]])
    losses, numbers = policy_stage.dpo_losses(logps, ref_logps, lengths, beta=0.1, nll_coef=0.01)
    dpo = [math.log1p(math.exp(-0.1 * gap)) for gap in (2, 1, 4, 0)]
    nll = [3 / 3, 2 / 2, 1 / 5, 1]
    assert losses.tolist() == pytest.approx([a + 0.01 * b for a, b in zip(dpo, nll)], abs=1e-12)
    assert numbers["nll"].tolist() == pytest.approx(nll)
    assert numbers["chosen"].tolist() == pytest.approx([0.1, 0, 0.2, 0.1])
    assert numbers["rejected"].tolist() == pytest.approx([-0.1, -0.1, -0.2, 0.1])


def test_pairs_are_better_half_against_worse_half():
    candidates = [{"ids": [n], "ended": n != 9} for n in range(10)]
    row = {"candidates": candidates, "advantages": [0.0, 0.9, 0.1, 0.8, 0.2, 0.7, 0.3, 0.6, 0.4, 5.0]}
    pairs = policy_stage.candidate_pairs(row, 200, random.Random(0))
    assert len(pairs) == 200
    assert {a for a, _ in pairs} == {1, 3, 5, 7} and {b for _, b in pairs} == {0, 2, 4, 6}  # 8 is the middle, 9 was cut
    row = {"candidates": candidates[:6], "advantages": [6, 5, 4, 3, 2, 1]}
    pairs = policy_stage.candidate_pairs(row, 200, random.Random(0), among=[0, 2, 3, 5])     # of one kind (answers.py)
    assert {a for a, _ in pairs} == {0, 2} and {b for _, b in pairs} == {3, 5}
    assert policy_stage.candidate_pairs(row, 200, random.Random(0), among=[0]) == []


def test_equal_advantages_make_no_pair_and_change_no_other(tiny, tmp_path, capsys):
    """Equal actions have them, and candidates whose scores are all 0, as without c. Candidate 9 was cut."""
    candidates = [{"ids": [n], "ended": n != 9} for n in range(10)]
    row = {"candidates": candidates, "advantages": [3, 2, 1, 1, 1, 1, 1, 0, -1, 5]}
    pairs = policy_stage.candidate_pairs(row, 400, random.Random(0))
    advantages = {(row["advantages"][better], row["advantages"][worse]) for better, worse in pairs}
    assert advantages == {(3, 1), (3, 0), (3, -1), (2, 1), (2, 0), (2, -1), (1, 0), (1, -1)} and 300 < len(pairs) < 400
    apart = {**row, "advantages": [3, 2, 1.4, 1.3, 1.2, 1.1, 1, 0, -1, 5]}                       # the same draws
    assert policy_stage.candidate_pairs(apart, 4, random.Random(0)) == [(3, 7), (1, 6), (2, 6), (0, 7)]
    rows = []
    for ground_truth, numbers in (("x", row["advantages"]), ("", [0.0] * 10)):
        task = {**FUNCTION, "ground_truth": ground_truth}
        rows.append({**row, "task_id": "a", "sample": 0, "turn": 0, "prompt": "?", "task": task, "advantages": numbers})
    pairs = policy_stage.pairs_of(rows, tiny[1], 50, job_of(tmp_path, seed=3, max_length=9))
    assert {pair["chosen"]["advantage"] for pair in pairs} == {3, 2, 1}
    said = capsys.readouterr().out
    assert "2 candidates stopped by --max-new-tokens were dropped\n" in said
    assert ("1 of 2 turns give no pair: all of their 9 candidates have equal advantages\n"
            "1 of 2 turns have no c\n") in said


def test_pairs_are_drawn_from_one_stream_and_the_longer_action_counts(tiny, tmp_path):
    candidates, drawn = [{"ids": [5] * length, "ended": True} for length in (1, 2, 3)], []
    row = {"task_id": "a", "sample": 0, "turn": 0, "prompt": "?", "task": FUNCTION, "candidates": candidates,
           "advantages": [2, 1, 0]}
    job = job_of(tmp_path, seed=3, max_length=len(encode(tiny[1], "?")) + 2)
    wanted = iter([[(0, 1)], [(0, 2), (1, 0)], [(2, 0)]])

    def choose(row, number, rng):
        drawn.append(rng.random())
        return next(wanted)
    pairs = policy_stage.pairs_of([row] * 3, tiny[1], 1, job, choose)
    rng = random.Random(3)
    assert drawn == [rng.random() for _ in range(3)]
    assert [(len(pair["chosen"]["ids"]), len(pair["rejected"]["ids"])) for pair in pairs] == [(1, 2), (2, 1)]
    [example] = policy_stage.pair_examples(pairs, tiny[1], together=True)
    assert example == ([common.actions_item(tiny[1], "?", [[5], [5, 5]])], [((0, 0), (0, 1)), ((0, 1), (0, 0))], "a")


def test_states_are_a_seeded_share_of_whole_trajectories(workspace, tiny):
    trajectories = read_trajectories(workspace / "offline.jsonl")
    states = policy_stage.read_states(trajectories, tiny[1], data_frac=0.1, seed=0)
    chosen = {(state["task_id"], state["sample"]) for state in states}
    assert len(chosen) == 7
    assert chosen != {(t["task_id"], t["sample"]) for t in trajectories[:7]}              # not the head of the file
    expected = [(t["task_id"], number, turn["input"]) for t in trajectories if (t["task_id"], t["sample"]) in chosen
                for number, turn in enumerate(t["dialogue_history"][1::2])]
    assert [(state["task_id"], state["turn"], state["prompt"]) for state in states] == expected
    assert [len(state["history"]) for state in states] == [1 + 2 * state["turn"] for state in states]
    runs = [{**trajectories[0], "run": run} for run in (0, 1)]       # as 05 joins them
    names = [data.name_of(state) for state in policy_stage.read_states(runs, tiny[1], 1, 0)]
    assert len(set(names)) == len(names) == 2 * trajectories[0]["num_rounds"]


def test_phases_can_be_inspected(sweet):
    out, printed, _ = sweet
    first = read(out / "metrics.jsonl")[0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5) and first["acc"] == 0.5    # mtdpo's: test_training.py
    ours = backend.agent_system(8)
    assert json.loads((out / "agent.json").read_text()) == {"system_prompt": ours, "chat_template_args": {}}
    scored, pairs = read(out / "scored.jsonl"), read(out / "pairs.jsonl")
    for row in scored:                           # c never reaches a prompt, but its signature, which is in the request
        secret = [line.strip() for line in row["task"]["ground_truth"].split("\n")[1:]]
        assert secret and not any(line in row["prompt"] for line in [*secret, "The function that this person needs"])
        assert len(row["candidates"]) == 8
    scores = {(row["prompt"], tuple(candidate["ids"])): advantage for row in scored
              for candidate, advantage in zip(row["candidates"], row["advantages"])}
    for pair in pairs:                           # which candidates: test_pairs_are_better_half_against_worse_half
        assert pair["chosen"]["advantage"] >= pair["rejected"]["advantage"]
        for side in (pair["chosen"], pair["rejected"]):
            assert side["advantage"] == scores[pair["prompt"], tuple(side["ids"])]
    assert f"{len(pairs)} of {4 * len(scored)} requested pairs" in printed and (out / "COMPLETED").exists()
    assert "critic: scores are log p(a|o, c) - log p_ref(a|o), a mean over the tokens of a\n" in printed


def test_an_equal_pair_is_half_right():
    chosen, rejected = torch.tensor([0.3, 0.3 + 3e-7, 0.3 - 3e-7, 0.4, 0.2]), torch.full((5,), 0.3)
    numbers = preference_metrics(chosen, rejected, torch.zeros(5), "float32")
    assert numbers["acc"].tolist() == [0.5, 0.5, 0.5, 1, 0]
    assert numbers["margin"].mean().item() == pytest.approx(0, abs=1e-6)


def test_candidates_of_another_run_answer_to_the_tasks_of_this_one(sweet, tmp_path):
    """A reference that was corrected since they were sampled is what they are scored by."""
    path, rows = sweet[0] / "candidates.jsonl", read(sweet[0] / "candidates.jsonl")
    corrected = {"ground_truth": "def corrected(): return 1"}
    states = [{**row, "task": {**row["task"], **corrected}, "candidates": None} for row in rows]
    sampling = policy_stage.Sampling(1, path, None, 8, 1.0, 80, 0, 256)
    found = policy_stage.find_candidates(states, sampling, None)
    assert [row["task"] for row in found] == [state["task"] for state in states]
    assert [row["candidates"] for row in found] == [row["candidates"] for row in rows]
    for others, number in ((states[1:], 8), (states, 7), ([{**states[0], "prompt": "x"}, *states[1:]], 8)):
        with pytest.raises(InputError, match="candidates.jsonl: made from other turns or prompts"):
            policy_stage.find_candidates(others, sampling._replace(num_candidates=number), None)
    path = write(tmp_path / "candidates.jsonl", [{**row, "sample": None} for row in rows])
    line = refused(4, *sweet[2], "--candidates", path, "--overwrite")
    assert line.startswith(f'{path}:1: "sample" is') and (sweet[0] / "COMPLETED").exists()      # nothing is replaced


def test_candidates_are_scored_without_their_thoughts():
    texts = ["{} a</think>What?", "<think>{} b</think>What?", "c</think>{} d"]
    row = {"task": FUNCTION, "prompt": "<think>", "history": [],
           "candidates": [{"text": text.format(backend.MARKER), "ids": [1]} for text in texts]}
    assert policy_stage.as_state(row).texts == ["What?", "What?", f"{backend.MARKER} d"]


def test_scoring_that_was_killed_resumes_to_the_same_file(tmp_path, monkeypatch):
    """In blocks of 2 rows: the second one has been written but for the end of its last line."""
    monkeypatch.setattr(policy_stage, "SCORED_TOGETHER", 2)
    job, rows, done = job_of(tmp_path), [{"x": x} for x in (1, 2, 3, 4, 5)], []
    monkeypatch.setattr(job.output, "add_costs", lambda: None)
    critic = types.SimpleNamespace(load=lambda *_: None)

    def score(block, *_):
        done.append([row["x"] for row in block])
        return [[10 * row["x"]] for row in block]
    worker = types.SimpleNamespace(score=score)
    out, partial = tmp_path / "scored.jsonl", Partial(tmp_path / "scored.jsonl")
    with dies(worker, "score", calls=2):
        policy_stage.score_candidates(rows, critic, job, worker.score)
    partial.write_bytes(partial.read_bytes()[:-3])                          # the last line was cut by the kill
    Partial(tmp_path / "scored.jsonl.x").write_text("0 {}\n")               # another output's
    assert not out.exists()
    scored = policy_stage.score_candidates(rows, critic, job, worker.score)
    assert scored == read(out) == [{"x": x, "advantages": [10 * x]} for x in (1, 2, 3, 4, 5)]
    assert done == [[1, 2], [3, 4], [3, 4], [5]] and len(list(tmp_path.iterdir())) == 2


def test_costs_count_the_candidates_that_a_killed_run_has_sampled(workspace, tmp_path):
    arguments = untrained(workspace / "offline.jsonl", tmp_path / "out", "--num-trajectories", 4)
    with dies(policy_stage.RowFile, "add", calls=3):
        call(4, *arguments)
    call(4, *arguments)
    candidates = [candidate for row in read(tmp_path / "out" / "candidates.jsonl") for candidate in row["candidates"]]
    costs = json.loads((tmp_path / "out" / "args.json").read_text())["costs"]
    assert costs["generated_tokens"] == sum(len(candidate["ids"]) for candidate in candidates)


def test_the_last_step_is_saved_where_max_steps_ends_within_an_epoch(workspace, tmp_path):
    arguments = flags(workspace, "mtdpo", tmp_path / "m", "--max-steps", 1)
    with dies(training, "save_model"):                            # after training, before anything is written
        call(4, *arguments)
    assert "continues at step 1\n" in call(4, *arguments)
    assert [row["step"] for row in read(tmp_path / "m" / "metrics.jsonl")] == [1]


def untrained(path, out, *more):
    return ["--method", "sweet", "--critic", "untrained", "--trajectories", path, "--model", BASE, "--data-frac", 1,
            "--num-candidates", 4, "--max-new-tokens", 60, "--max-steps", 1, "--out", out, *more]


def test_candidates_continue_logged_prompts_and_train_after_their_own(workspace, tmp_path, tiny):
    """Two tasks, three dialogues of each as a published file has them: no ids, no numbers of samples, a system prompt
    of their own in what is logged (this template shows none, so it stands as a turn). What is trained together
    continues its own prompt."""
    rows = read(workspace / "offline.jsonl")[:6]
    for row in rows:
        for key in ("tokenizer", "sample", "max_rounds"):
            del row[key]
        for turn in row["dialogue_history"][1::2]:
            del turn["output_ids"]
            turn["input"] = "<|user|>Ask {short} questions.<|end|>" + turn["input"]
    path, out = write(tmp_path / "p.jsonl", rows), tmp_path / "out"
    with mock.patch("lib.sampling.uniforms", side_effect=uniforms) as drawn:
        printed = call(4, *untrained(path, out, "--pairs-together", "--seed", 3))
    candidates, pairs = read(out / "candidates.jsonl"), read(out / "pairs.jsonl")
    assert [row["prompt"] for row in candidates] == [turn["input"] for row in rows
                                                     for turn in row["dialogue_history"][1::2]]
    assert f"their prompts: {len(candidates)} as logged\n" in printed
    assert {key.args[1:] for key in drawn.call_args_list} == {
        (3, "candidates", *data.name_of(row)) for row in candidates}
    firsts = [row for row in candidates if row["turn"] == 0]
    assert [row["sample"] for row in firsts] == [0, 1, 2] * 2
    assert len({json.dumps(row["candidates"]) for row in firsts}) == 6                          # other random numbers
    sampled = collections.defaultdict(list)
    for row in candidates:
        sampled[tuple(encode(tiny[1], row["prompt"]))] += [candidate["ids"] for candidate in row["candidates"]]
    examples = policy_stage.pair_examples(pairs, tiny[1], together=True)
    assert len(examples) == len({(pair["task_id"], pair["sample"], pair["turn"]) for pair in pairs}) > 6
    for example in examples:
        for row in without_trees(example.items[0]):
            first = row.action_ids.count(-1)
            assert row.ids[first:] in sampled[tuple(row.ids[:first])]
    assert f"\n{len(examples)} examples, " in printed


def test_pairs_of_a_turn_in_one_tree_train_like_pairs_apart(workspace, tmp_path, tiny):
    """The same pairs in one batch: the same loss and gradient, with fewer tokens. What --max-length limits is a prompt
    with one action, not the tree."""
    path, apart, together = tmp_path / "p.jsonl", tmp_path / "apart", tmp_path / "together"
    write(path, read(workspace / "offline.jsonl")[:1])
    call(4, *untrained(path, apart, "--batch-size", 400))
    longest = max(len(encode(tiny[1], pair["prompt"])) + len(pair[side]["ids"]) for pair in read(apart / "pairs.jsonl")
                  for side in ("chosen", "rejected"))
    call(4, *untrained(path, together, "--batch-size", 400, "--pairs-together", "--candidates",
                       apart / "candidates.jsonl", "--max-length", longest))
    assert (apart / "pairs.jsonl").read_bytes() == (together / "pairs.jsonl").read_bytes()
    step_apart, step_together = (read(out / "metrics.jsonl")[0] for out in (apart, together))
    assert step_apart["loss"] == pytest.approx(math.log(2) + 0.01 * step_apart["nll"], abs=1e-5)
    for key in ("loss", "nll", "margin"):
        assert step_together[key] == pytest.approx(step_apart[key], abs=1e-5)
    assert step_together["gnorm"] == pytest.approx(step_apart["gnorm"], rel=1e-3)
    assert step_together["tokens"] < 0.7 * step_apart["tokens"]


@pytest.mark.parametrize("flag, number, message", [
    ("--max-length", 5, r"p.jsonl: no examples to train on: .* [1-9]\d* pairs are longer than --max-length 5"),
    ("--max-new-tokens", 1, r"0 of (\d+) requested pairs .*, \1 candidates stopped by "),    # four of each in a turn
    ("--max-new-tokens", 2040, "no turns to train on: their prompts leave no room for --max-new-tokens 2040")])
def test_what_does_not_fit_is_one_line(workspace, tmp_path, flag, number, message):
    path = write(tmp_path / "p.jsonl", read(workspace / "offline.jsonl")[:1])
    assert re.search(message, refused(4, *untrained(path, tmp_path / "out", flag, number)))


def test_the_policy_reads_c_where_the_agent_that_it_imitates_did(workspace, data, tiny, tmp_path, monkeypatch):
    for path, informed in ((workspace / "offline.jsonl", False), (data / "demos.jsonl", True)):       # as 02 has it
        assert {row["informed"] for row in read(path)} == {informed}
    path = write(tmp_path / "rows", [row | {"informed": number % 2 == 1} for number, row in
                                     enumerate(read_trajectories(workspace / "offline.jsonl", 24))])
    seen = {}
    monkeypatch.setattr(policy_stage, "train_policy", lambda load, tokenizer, examples, *_, **__: seen.update(
        examples=examples))
    for method in ("mtdpo", "rft", "sft"):
        printed = call(4, "--method", method, "--trajectories", path, "--model", BASE, "--out", tmp_path / method)
        examples, rows = seen["examples"], read(path)
        items = items_of(examples)
        has_c = ["The function that this person needs" in tiny[1].decode(item[0].ids) for item in items]
        imitated = [row["informed"] for row in rows if method == "sft" or row["reward"] == 1]
        assert has_c == (imitated if method != "mtdpo" else [False] * len(items))
        assert (f"{len(imitated)} successful (or best) trajectories" in printed) == (method == "rft")
        pairs = [((0, 0), (1, 0))] * (method == "mtdpo")
        assert [example.action_pairs for example in examples] == [pairs] * len(examples)


def test_sft_loss_is_the_mean_nll_of_the_agents_tokens(workspace, tmp_path, tiny):
    row = read(workspace / "offline.jsonl")[0]
    call(4, "--method", "sft", "--trajectories", write(tmp_path / "one.jsonl", [row]), "--model", BASE, "--out",
         tmp_path / "s")
    logps = [token_logps_after(tiny, turn["input"], turn["output_ids"]) for turn in row["dialogue_history"][1::2]]
    assert read(tmp_path / "s" / "metrics.jsonl")[0]["loss"] == pytest.approx(-torch.cat(logps).mean().item(), abs=1e-4)


def test_a_critic_of_another_tokenizer_is_refused(workspace, critic, tmp_path):
    line = refused(4, *flags(workspace, "sweet", tmp_path / "out", "--model", workspace / "model", "--critic", critic))
    assert "tokenizer is not the policy's" in line and not (tmp_path / "out").exists()
