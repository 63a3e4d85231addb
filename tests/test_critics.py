"""scripts/critics.py: gates of a base model, and how a critic's scores correlate with the returns of the dialogues that
02 --branch plays on."""
import json
import shutil
import types

import pytest
import torch

import common
from colbench import backend
from conftest import BASE, call, FUNCTION, load_critic, Partial, read, refused, stage, trajectory, turns, write
from lib.logps import Sequence
from scripts import critics


def test_gates_and_success_of_the_shipped_base_model(workspace, tmp_path):
    rows = read(workspace / "offline.jsonl")[::4]
    del rows[0]["task"]["family"]                                    # which a task may lack
    flags = ["--trajectories", write(tmp_path / "few", rows), "--gates", BASE, "--out", tmp_path / "gates"]
    printed = call(critics, *flags)
    gates = json.loads((tmp_path / "gates" / "gates.json").read_text())
    right, wrong = (gates[f"{kind} answer at once"] for kind in ("right", "wrong"))
    assert right["with_c"] > right["without_c"] + 3 and right["with_c"] > wrong["with_c"] + 3
    assert gates["idle"]["with_c"] < gates["idle"]["without_c"]
    for kind, gate in gates.items():
        cells = [str(gate["n"]), f"{gate['without_c']:.2f}", f"{gate['with_c']:.2f}"]
        assert [*kind.split(), *cells] in [line.split() for line in printed.splitlines()]
    [line] = critics.gate_lines({kind: gate for kind, gate in gates.items() if kind[:5] != "wrong"}, BASE)[-1:]
    assert line == "no wrong answer at once: no family of these tasks has two different solutions"
    assert line not in printed
    metrics = stage(5).measure(read(workspace / "offline.jsonl"), backend)
    assert 0.15 <= metrics["success_rate"] <= 0.5 and metrics["success_when_known"] > 0.7


def test_probes_by_hand():
    history, other = turns("?", "a", "b", "c", "d", "right answer"), {**FUNCTION, "ground_truth": "g"}
    domain = types.SimpleNamespace(turn_kind=lambda *turn: turn[2], answer_message=lambda task: task["ground_truth"])
    found = critics.probes_of({"task": FUNCTION, "dialogue_history": history}, other, domain)
    assert list(found) == [("a", history[:1], "a"), ("c", history[:3], "c"),
                           ("right answer at once", history[:1], FUNCTION["ground_truth"]),
                           ("wrong answer at once", history[:1], "g")]


@pytest.fixture(scope="module")
def branches(workspace, tmp_path_factory):
    """A file of dialogues that 02 --branch played on from the workspace's, and its flags."""
    out = tmp_path_factory.mktemp("branches") / "branches.jsonl"
    flags = ["--tasks", workspace / "offline.jsonl", "--agent", "models/tiny", "--max-rounds", 8, "--max-new-tokens",
             120, "--branch", 8, "--branch-candidates", 3, "--samples", 2]
    call(2, *flags, "--out", out)
    return out, flags


def state_of(row):
    """(Name of the logged dialogue, number of its turn) from which a row of 02 --branch goes on."""
    return (row["task_id"], row["branch"]["sample"]), row["branch"]["turn"]


def test_branches_play_on_from_logged_turns(workspace, branches):
    rows, num_answers, ways = read(branches[0]), 0, {}
    logged = {(row["task_id"], row["sample"]): row["dialogue_history"] for row in read(workspace / "offline.jsonl")}
    assert [row["sample"] for row in rows] == list(range(8 * 3 * 2))
    for row in rows:
        (name, place), history = state_of(row), row["dialogue_history"]
        assert [turn["content"] for turn in history[:place]] == [turn["content"] for turn in logged[name][:place]]
        assert logged[name][place]["role"] == history[place]["role"] == "assistant"
        assert row["num_rounds"] <= row["max_rounds"] == 8
        is_answer = backend.MARKER in history[place]["content"]
        assert not is_answer or len(history) == place + 1
        num_answers += is_answer
        way = history[place]["output_ids"], is_answer and row["reward"]     # an answer's return is always the same
        ways.setdefault((name, place, row["branch"]["candidate"]), []).append(way)
    assert len(ways) == 24 and len({way[:2] for way in ways}) == 8 and num_answers
    assert all(first == second for first, second in ways.values())   # two ways to go on from one candidate


def test_branches_go_on_where_they_were_interrupted(branches, tmp_path):
    whole, flags = branches
    lines = whole.read_text().splitlines(True)
    there = [1, 0, *range(3, 43), 47]                                # of three candidates a half, of one nothing
    shutil.copy(f"{whole}.args.json", tmp_path / "b.jsonl.args.json")
    Partial(tmp_path / "b.jsonl").write_text("".join(f"{n} {lines[n]}" for n in there) + '45 {"cut')
    assert "43 of 48 dialogues are there already" in call(2, *flags, "--out", tmp_path / "b.jsonl")
    again = (tmp_path / "b.jsonl").read_text().splitlines(True)
    assert all(again[n] == lines[n] for n in there) and len(again) == 48
    assert sum(a == b for a, b in zip(again, lines)) >= 46       # batches differ: see test_02


def test_branches_are_refused_where_dialogues_had_other_rounds(workspace, tmp_path):
    line = refused(2, "--tasks", workspace / "offline.jsonl", "--branch", 400, "--agent", BASE, "--max-rounds", 4,
                   "--out", tmp_path / "b.jsonl")
    assert "was rolled out with --max-rounds 8; --branch needs the same" in line and not any(tmp_path.iterdir())


ADVANTAGES = [                                      # of the turns of a chosen and a rejected dialogue
    ([2.0, -1.0], [0.5]),                           # sums: right; last turns: wrong
    ([-1.0, 2.0], [3.0]),                           # wrong; wrong
    ([1.0, 1.0], [2.0]),                            # a tie; wrong
    ([0.0, 4.0], [1.0, 2.0]),                       # right; right
    ([0.0, 3.0], [3.0])]                            # a tie; a tie


@pytest.mark.parametrize("score, accuracy", [("logratio", 3 / 5), ("regression", 3 / 5), ("value", 1.5 / 5)])
def test_pair_accuracy_by_hand(monkeypatch, score, accuracy):
    """By sums over turns, and of a value head by the last turns: a tie is half right. The reference says 7 of every
    turn; all turns have one token."""
    reference = 7 if score == "logratio" else 0
    examples, outputs, ref_values = [], [], []
    for pair in ADVANTAGES:
        items = [[Sequence([5] * len(values), list(range(len(values))))] for values in pair]
        examples.append(common.Example(items, [], "a"))
        outputs += [torch.tensor(values) + reference for values in pair]
        ref_values.append([torch.full((len(values),), 7.0) for values in pair])
    monkeypatch.setattr(stage(3), "action_outputs", lambda action_model, *_: outputs)
    critic = types.SimpleNamespace(score=score, normalize="turn")
    assert stage(3).pair_accuracy(None, examples, ref_values, critic, 4096) == pytest.approx(accuracy)


def test_the_correlation_with_returns_by_hand():
    """1 where the better action has the higher score, -1 where it has the lower one; task "a" has a state of each, so
    that the mean over tasks is (0 + 1 + .5) / 3."""
    states = [("a", [0.1, 0.2, 0.3], [0.0, 0.5, 1.0]), ("a", [9.0, 8.0, 7.0], [0.0, 0.5, 1.0]),
              ("b", [-5.0, 5.0], [0.0, 1.0]), ("c", [1.0, 2.0, 3.0], [0.0, 1.0, 0.5])]
    tasks, scores, returns = zip(*states)
    points = [common.State("", {**FUNCTION, "task_id": task}, [], [], []) for task in tasks]
    measured = critics.return_correlation(points, returns, scores)
    assert measured["rank_correlation"] == pytest.approx(0.5) and measured["num_states"] == 4
    assert measured["ci95"] == pytest.approx([0, 1])
    of_one_task = critics.return_correlation(points[2:3], returns[2:3], scores[2:3])
    assert of_one_task == {"rank_correlation": pytest.approx(1), "num_states": 1}          # and no interval


def test_a_critic_is_measured_by_monte_carlo_returns(branches, critic, regression_critic, tmp_path):
    rows, returns_of = read(branches[0]), {}
    words = ["--trajectories", branches[0], "--critic", regression_critic, "--out", tmp_path / "out"]
    blind = [*words[:2], "--critic", critic, "--reference-sees-c", "no", "--out", tmp_path / "blind"]
    assert "log p(a|o, c) - log p_ref(a|o), a mean over" in call(critics, *blind)
    printed = call(critics, *words)
    ranks = json.loads((tmp_path / "out" / "ranks.json").read_text())
    assert f"{regression_critic}: rank correlation {ranks['rank_correlation']:.3f} [" in printed
    for row in rows:
        state = state_of(row)
        ids = tuple(row["dialogue_history"][state[1]]["output_ids"])             # equal candidates are one
        returns_of.setdefault(state, {}).setdefault(ids, []).append(row["reward"] == 1)
    means = [[sum(wins) / len(wins) for wins in own.values()] for own in returns_of.values()]
    points, returns = critics.branched_states(branches[0], rows, backend)
    assert returns == [own for own in means if len(set(own)) > 1] and 0 < ranks["num_states"] == len(points)
    critic = load_critic(regression_critic)
    again = critics.return_correlation(points, returns, critic.score_actions(points))
    assert ranks["rank_correlation"] == pytest.approx(again["rank_correlation"])


def test_bad_files_are_one_line(workspace, branches, regression_critic, tmp_path):
    logged, rows, critic = workspace / "offline.jsonl", read(branches[0]), ["--critic", regression_critic]
    needs_facts = "--gates needs tasks whose domain knows kinds of turns (turn_kind), as those of 01"
    page = {"problem_description": "?", "ground_truth": "<p>"}
    (tmp_path / "sees").mkdir()
    note = {"visual": True, "score": "value", "normalize": "none", "critic_sees_c": True, "reference": "models/tiny"}
    write(tmp_path / "sees" / "critic.json", [note])
    sees = ["--critic", tmp_path / "sees"]
    sees_line = f"{sees[1]}: --critic needs a critic that reads text; this one sees images"
    for name, content, flags, line in (
            ("bare", [trajectory("x", "1")], ["--gates", BASE], needs_facts),
            ("no facts", [trajectory("x", "1", task={**FUNCTION, "facts": []})], ["--gates", BASE], needs_facts),
            ("logged", read(logged), critic, "not made by 02_rollout.py --branch"),
            ("same", [{**row, "reward": 0.5} for row in rows], critic,
             "no state whose candidates differ in return; raise --branch or --samples of 02"),
            ("other", [{**row, "tokenizer": "other"} for row in rows], critic,
             f"the agent's tokenizer is not the one of {regression_critic}"),
            ("pages", [trajectory("p", "<p>", task=page)], sees, None)):
        path = write(tmp_path / name, content)
        words = ["--trajectories", path, *flags, "--out", tmp_path / "out"]
        assert refused(critics, *words) == (f"{path}: {line}" if line else sees_line)
    assert refused(5, f"a={tmp_path / 'pages'}", *sees, "--out", tmp_path / "out") == sees_line
    assert not (tmp_path / "out").exists()
