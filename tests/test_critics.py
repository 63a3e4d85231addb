"""scripts/critics.py: gates of a base model, pair accuracy of critics, and their correlation with the returns of the
dialogues that 02 --branch plays on."""
import importlib
import json
import re

import pytest
import torch

import common
from colbench import backend
from conftest import BASE, call, critic_note, FUNCTION, Partial, read, refused, run, trajectory, write
from lib.data import read_trajectories
from lib.models import load_tokenizer

critics = importlib.import_module("scripts.critics")


def measured(*arguments):
    """Call the program in this process; returns what it printed."""
    return call(critics, *arguments)


def test_bad_files_are_one_line_and_status_2(tmp_path):
    flags = ["--trajectories", tmp_path / "none", "--gates", "models/tiny", "--out", tmp_path / "out"]
    process = run("scripts/critics.py", *flags)
    assert process.returncode == 2 and process.stderr == f"error: {tmp_path / 'none'}: no such file or directory\n"
    assert not (tmp_path / "out").exists()


# --- gates

def test_gates_of_the_shipped_base_model(workspace, tmp_path):
    few = write(tmp_path / "few", read(workspace / "offline.jsonl")[::2])
    flags = ["--trajectories", few, "--gates", BASE, "--out", tmp_path / "gates"]
    printed = measured(*flags)
    lines = [line.rsplit(None, 3) for line in printed.splitlines()
             if line.startswith(("needed", "idle", "right answer", "wrong answer"))]
    table = {kind: [float(x) for x in numbers] for kind, *numbers in lines}
    assert table["right answer at once"][2] > table["right answer at once"][1] + 3            # c makes it likelier …
    assert table["wrong answer at once"][2] < table["right answer at once"][2] - 3            # … than another one
    assert table["idle"][2] < table["idle"][1]
    gates = json.loads((tmp_path / "gates" / "gates.json").read_text())
    assert gates.keys() >= table.keys()
    for kind, (n, without_c, with_c) in table.items():
        assert gates[kind] == {"n": n, "without_c": pytest.approx(without_c, abs=0.006),
                               "with_c": pytest.approx(with_c, abs=0.006)}
    assert "done already by the same command" in measured(*flags)


def test_success_of_the_shipped_base_model_passes_its_gates(workspace, tmp_path):
    call(5, f"base={workspace / 'offline.jsonl'}", "--out", tmp_path / "report")
    metrics = json.loads((tmp_path / "report" / "metrics.json").read_text())["base"]
    assert 0.15 <= metrics["success_rate"] <= 0.5 and metrics["success_when_known"] > 0.7


@pytest.mark.parametrize("facts", [{}, {"facts": []}])
def test_gates_need_facts_and_say_so_before_anything_is_measured(tmp_path, facts):
    path = write(tmp_path / "a.jsonl", [{**trajectory("x", "1"), "task": {**FUNCTION, **facts}}])
    flags = ["--trajectories", path, "--gates", "models/tiny", "--out", tmp_path / "out"]
    assert refused(critics, *flags) == f"{path}: --gates needs template tasks (01), which say what a turn is worth"
    assert not (tmp_path / "out").exists()
    call(5, f"a={path}", "--out", tmp_path / "out")


def test_gates_take_each_dialogue_s_own_rounds(workspace, monkeypatch):
    """And do without families."""
    rows = [row for row in read(workspace / "offline.jsonl") if len(row["dialogue_history"]) == 4][:3]
    for number, row in enumerate(rows):
        row |= {"task_id": str(number), "max_rounds": 4 + number}
        del row["task"]["family"]
    asked, prompt_text = [], common.prompt_text

    def noted(tokenizer, row, history):
        asked.append((history[0]["content"], row["max_rounds"]))
        return prompt_text(tokenizer, row, history)
    monkeypatch.setattr(common, "prompt_text", noted)
    critics.measure_gates(rows, backend, str(BASE), "cpu")
    assert set(asked) == {(row["task"]["problem_description"], row["max_rounds"]) for row in rows}


# --- the dialogues that 02 --branch plays on

@pytest.fixture(scope="module")
def branches(workspace, tmp_path_factory):
    """A file of dialogues that 02 --branch played on from the workspace's, and its flags."""
    out = tmp_path_factory.mktemp("branches") / "branches.jsonl"
    flags = ["--tasks", workspace / "offline.jsonl", "--agent", "models/tiny", "--max-rounds", 8, "--max-new-tokens",
             120, "--branch", 12, "--branch-candidates", 3, "--samples", 2]
    call(2, *flags, "--out", out)
    return out, flags


def test_branches_play_on_from_logged_turns(workspace, branches):
    rows = read(branches[0])
    logged = {(row["task_id"], row["sample"]): row["dialogue_history"] for row in read(workspace / "offline.jsonl")}
    assert [row["sample"] for row in rows] == list(range(12 * 3 * 2))
    candidates = {}
    for row in rows:
        branch, history = row["branch"], row["dialogue_history"]
        state, i = (row["task_id"], branch["sample"]), branch["turn"]
        assert [turn["content"] for turn in history[:i]] == [turn["content"] for turn in logged[state][:i]]
        assert logged[state][i]["role"] == history[i]["role"] == "assistant"
        assert row["num_rounds"] <= row["max_rounds"] == 8
        candidates.setdefault((*state, i, branch["candidate"]), []).append((history[i]["output_ids"], row["reward"]))
    assert len(candidates) == 36 and len({state[:3] for state in candidates}) == 12
    for first, second in candidates.values():
        assert first[0] == second[0]                                   # two ways to go on from one candidate
    answers = [row for row in rows if backend.MARKER in row["dialogue_history"][row["branch"]["turn"]]["content"]]
    for row in answers:  # an answer's return is the same however often it is drawn
        own = candidates[row["task_id"], row["branch"]["sample"], row["branch"]["turn"], row["branch"]["candidate"]]
        assert len(row["dialogue_history"]) == row["branch"]["turn"] + 1 and own[0][1] == own[1][1]
    assert answers


def test_branches_go_on_where_they_were_interrupted(branches, tmp_path):
    whole, flags = branches
    lines = whole.read_text().splitlines(True)
    there = [1, 0, *range(3, 67), 71]                                # of three candidates a half, of one nothing
    note = json.loads(whole.with_name("branches.jsonl.args.json").read_text())
    (tmp_path / "b.jsonl.args.json").write_text(json.dumps(note))
    Partial(tmp_path / "b.jsonl").write_text("".join(f"{n} {lines[n]}" for n in there) + '69 {"cut')
    assert "67 of 72 dialogues are there already" in call(2, *flags, "--out", tmp_path / "b.jsonl")
    again = (tmp_path / "b.jsonl").read_text().splitlines(True)
    assert all(again[n] == lines[n] for n in there) and len(again) == 72
    assert sum(a == b for a, b in zip(again, lines)) >= 70       # batches differ: see test_02's assert_same


def test_branches_are_refused_in_one_line(workspace, tmp_path):
    offline, rows = workspace / "offline.jsonl", read(workspace / "offline.jsonl")
    twin = write(tmp_path / "twin.jsonl", [*rows, rows[0]])
    for path, max_rounds, line in ((offline, 4, "was rolled out with --max-rounds 8; --branch needs the same"),
                                   (twin, 8, f'two dialogues of task {rows[0]["task_id"]} have "sample" 0')):
        words = ["--tasks", path, "--branch", 400, "--agent", BASE, "--max-rounds", max_rounds]
        assert line in refused(2, *words, "--out", tmp_path / "b.jsonl")
    assert not (tmp_path / "b.jsonl").exists()


# --- critics

ADVANTAGES = [                                      # of the turns of a chosen and a rejected dialogue
    ([2.0, -1.0], [0.5]),                           # sums: right; last turns: wrong
    ([-1.0, 2.0], [3.0]),                           # wrong; wrong
    ([1.0, 1.0], [2.0]),                            # a tie; wrong
    ([0.0, 4.0], [1.0, 2.0]),                       # right; right
    ([0.0, 3.0], [3.0])]                            # a tie; a tie


@pytest.mark.parametrize("head, accuracy", [("lm", 3 / 5), ("value", 1.5 / 5)])
def test_pair_accuracy_by_hand(monkeypatch, head, accuracy):
    """By sums over turns, and of a value head by the last turns: a tie is half right. The reference says 7 of every
    turn; all turns have one token."""
    def item_of(values):
        return [common.Row([5] * len(values), list(range(len(values))))]
    examples, outputs = [], []
    for chosen, rejected in ADVANTAGES:
        examples.append(common.Example([item_of(chosen), item_of(rejected)], [], "a"))
        outputs.append([torch.tensor(chosen) + 7, torch.tensor(rejected) + 7])
    monkeypatch.setattr(common, "example_outputs", lambda scorer, *_: outputs)
    ref_values = [[torch.full_like(values, 7.0) for values in pair] for pair in outputs]
    form = common.Critic("x", "x", head)
    assert common.pair_accuracy(None, examples, ref_values, form, 4096, "cpu") == pytest.approx(accuracy)


def test_the_correlation_with_returns_by_hand():
    """1 where the better action has the higher score, -1 where it has the lower one; task "a" has a state of each, so
    that the mean over tasks is (0 + 1 + .5) / 3."""
    states = [("a", [0.1, 0.2, 0.3], [0.0, 0.5, 1.0]), ("a", [9.0, 8.0, 7.0], [0.0, 0.5, 1.0]),
              ("b", [-5.0, 5.0], [0.0, 1.0]), ("c", [1.0, 2.0, 3.0], [0.0, 1.0, 0.5])]
    tasks, scores, returns = zip(*states)
    points = [common.DecisionPoint("", {**FUNCTION, "task_id": task}, [], [], []) for task in tasks]
    measured = critics.return_correlation(points, returns, scores)
    assert measured["rank_correlation"] == pytest.approx(0.5) and measured["num_states"] == 4
    assert measured["ci95"] == pytest.approx([0, 1])


def test_critics_are_compared_on_pairs_and_monte_carlo_returns(workspace, branches, regression_critic, tmp_path):
    flags = ["--trajectories", workspace / "offline.jsonl", "--critics", f"regression={regression_critic}"]
    out = measured(*flags, "--returns", branches[0], "--out", tmp_path / "out")
    heading = next(line for line in out.splitlines() if line.startswith("critic"))
    assert re.split("  +", heading) == ["critic", "pair accuracy", "pairs", "rank correlation", "95 %", "states"]
    found = json.loads((tmp_path / "out" / "critics.json").read_text())["regression"]
    assert found["pair_accuracy"] == pytest.approx(pair_accuracy_by_score_turns(regression_critic, workspace))
    assert f"{found['rank_correlation']:.3f}" in out and str(found["num_pairs"]) in out
    means = {}
    for row in read(branches[0]):
        state = row["task_id"], row["branch"]["sample"], row["branch"]["turn"]
        ids = tuple(row["dialogue_history"][state[2]]["output_ids"])             # equal candidates are one
        means.setdefault(state, {}).setdefault(ids, []).append(row["reward"] == 1)
    means = [[sum(wins) / len(wins) for wins in own.values()] for own in means.values()]
    points, returns = critics.read_branches(branches[0], backend, read(branches[0])[0]["tokenizer"])
    assert returns == [own for own in means if len(set(own)) > 1]
    assert 0 < found["num_states"] == sum(len(set(own)) > 1 for own in means)
    alone = measured(*flags, "--out", tmp_path / "alone")
    assert "pair accuracy" in alone and "rank correlation" not in alone
    assert json.loads((tmp_path / "alone" / "critics.json").read_text())["regression"] == {
        key: found[key] for key in ("pair_accuracy", "num_pairs")}


def pair_accuracy_by_score_turns(folder, workspace):
    """The share of right pairs by the sum of its turn advantages."""
    tokenizer = load_tokenizer(str(folder))
    critic = common.load_critic(common.read_critic(folder, tokenizer, backend), common.load_whole("cpu"))
    trajectories = read_trajectories(workspace / "offline.jsonl")
    scores = [sum(advantages) for advantages in common.score_turns(critic, tokenizer, trajectories, 4096, "cpu")]
    pairs = common.trajectory_pairs(trajectories, "offline.jsonl")
    return sum(scores[chosen] > scores[rejected] for chosen, rejected in pairs) / len(pairs)


def test_bad_files_and_critics_are_one_line(workspace, branches, regression_critic, tmp_path):
    trajectories = workspace / "offline.jsonl"
    same = write(tmp_path / "same", [{**row, "reward": 0.5} for row in read(branches[0])])
    seeing = tmp_path / "seeing"
    seeing.mkdir()
    write(seeing / "critic.json", [{"visual": True, **critic_note("value")}])
    good = f"c={regression_critic}"
    for words, line in (
            ([trajectories, "--critics", good, "--returns", tmp_path / "none"],
             f"{tmp_path / 'none'}: no such file or directory"),
            ([trajectories, "--critics", good, "--returns", trajectories],
             f"{trajectories}: no dialogues of 02_rollout.py --branch"),
            ([trajectories, "--critics", good, "--returns", same],
             f"{same}: no state whose candidates differ in return; raise --branch or --samples of 02"),
            ([trajectories, "--critics", f"c={seeing}"],
             f"{seeing}: a critic that sees cannot rank functions, which have nothing to see")):
        assert refused(critics, "--trajectories", *words, "--out", tmp_path / "out") == line
    assert not (tmp_path / "out").exists()
