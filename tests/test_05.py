"""05_evaluate.py: numbers by hand, intervals, fresh scores, curves, costs, report."""
import itertools
import json
import re
from unittest import mock

import numpy as np
import pytest

import common
from colbench import backend
from colbench.scorer import Scorer
from conftest import BASE, call, FUNCTION, load_critic, policy_flags, read, refused, ROOT, stage, trajectory, write
from lib import statistics
from lib.data import read_trajectories
from lib.tokens import encode

evaluate = stage(5)
GOOD, HALF, BAD = "def f(n): return n", "def f(n): return 1", "def f(n): return 0"


def written(folder, files):
    """05's arguments NAME=FILE,… for {name: rows, or (rows, …) of several runs}."""
    words = []
    for name, runs in files.items():
        runs = runs if isinstance(runs, tuple) else (runs,)
        paths = [str(write(folder / f"{name}.{number}", rows)) for number, rows in enumerate(runs)]
        words.append(f"{name}={','.join(paths)}")
    return [*words, "--out", folder / "report"]


def report_of(folder):
    """The metrics of an evaluation, its page, and the data in it."""
    page = (folder / "report" / "report.html").read_text(encoding="utf-8")
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1]
    return json.loads((folder / "report" / "metrics.json").read_text()), page, json.loads(data)


def answers(**by_task):
    return [trajectory(task, answer) for task, answer in by_task.items()]


def scored(*rows):
    """Scored dialogues of (task, reward), or (task, reward, run)."""
    return [trajectory(task, "", reward=reward, faults=[], sample=sample, run=run[0] if run else 0)
            for sample, (task, reward, *run) in enumerate(rows)]


def measured(files, baseline=None):
    """The metrics of {name: scored dialogues}."""
    metrics = {name: evaluate.measure(rows, backend) for name, rows in files.items()}
    if baseline:
        evaluate.compare(metrics, files, baseline, backend)
    return metrics


def test_task_means_and_paired_differences_by_hand():
    """Of tasks, and of runs and tasks; no interval over runs alone, or over families that are not there."""
    ours, theirs = scored(("a", 1), ("a", 0.5), ("b", 1)), scored(("a", 0), ("b", 1), ("c", 1))
    assert statistics.values_of_runs(ours, backend.eval_score) == (["a", "b"], [[0.5, 1.0]])
    assert statistics.values_of_runs(ours, lambda t: t["reward"]) == (["a", "b"], [[0.75, 1.0]])
    result = statistics.paired_difference(ours, theirs, backend.eval_score)
    assert (result["difference"], result["n"]) == (0.25, 2)
    ours = scored(("a", 1, 0), ("b", 0, 0), ("a", 1, 1), ("b", 1, 1), ("a", 1, 2), ("b", 1, 2))
    theirs = scored(*((task, float(run == 2), run) for run in (2, 0, 1) for task in "ba"))
    result = statistics.paired_difference(ours, theirs, backend.eval_score)
    assert result["runs"] == [0.5, 1, 0] and result["n"] == 2 and result["difference"] == pytest.approx(0.5)
    assert result.keys() == {"difference", "n", "ci95", "runs"}
    for other in (scored(("z", 1)), theirs[:2]):                     # no task in common; another number of runs
        assert statistics.paired_difference(ours, other, backend.eval_score) is None


def test_rate_interval_and_difference_average_the_same_thing(tmp_path):
    """Nine successes of one task, a failure of each of three others: a quarter of the tasks, not nine twelfths."""
    uneven = scored(*[("w", 1)] * 9, ("x", 0), ("y", 0), ("z", 0))
    metrics = measured({"a": uneven, "b": scored(*((task, 0) for task in "wxyz"))}, "b")
    assert metrics["a"]["success_rate"] == metrics["a"]["against_baseline"]["difference"] == 0.25
    assert metrics["a"]["ci95"][0] <= 0.25 <= metrics["a"]["ci95"][1] <= 0.75
    assert stage(2).summary(str(write(tmp_path / "a.jsonl", uneven))).startswith("success 0.250 | ")
    runs = scored(*[("w", 1, 0)] * 9, ("w", 0, 1))                   # a run counts once, too
    assert statistics.mean_over_tasks(runs, backend.eval_score) == 0.5


def test_what_a_comparison_or_an_interval_leaves_out_has_a_line():
    """Another number of runs, no common task, a quarter of the tasks; one run, and fewer than five."""
    base = [(f"t{n}", float(n < 4)) for n in range(8)]
    files = {"base": scored(*base), "few": scored(("t0", 0), ("t1", 1)), "apart": scored(("t8", 0), ("t9", 0)),
             "same": scored(*base)}
    for name, runs in (("two", 2), ("four", 4), ("five", 5)):
        files[name] = scored(*((*row, run) for run in range(runs) for row in base))
    metrics = measured(files, "base")
    rest = "shared tasks (needs equally many runs); rates above use all tasks"
    assert [line for line in statistics.note_lines(metrics) if "Clopper" not in line] == [
        *(f"{name}: difference to base uses the {n} {rest}" for name, n in (
            ("few", 2), ("apart", 0), ("two", 0), ("four", 0), ("five", 0))),
        "one run of base, few, apart, same: the intervals exclude seed variance",
        "fewer than five runs of two, four: the intervals are too narrow if runs differ much"]
    assert [name for name in metrics if "against_baseline" in metrics[name]] == ["few", "same"]


def test_what_the_bootstrap_draws(monkeypatch):
    monkeypatch.setattr(statistics, "NUM_RESAMPLES", 4_000)
    interval, families, rng = statistics.bootstrap_interval, ["a"] * 50 + ["b"] * 50, np.random.default_rng(0)
    one, many = rng.random(200), rng.random((5, 1)) + np.zeros((5, 200))
    assert interval([one]) == interval(one)
    assert np.ptp(interval(one)) == pytest.approx(2 * 1.96 * np.std(one) / 200 ** 0.5, rel=0.05)        # 95 %
    low, high = interval(many)                                       # tasks agree: only the runs differ
    assert np.min(many) <= low < np.mean(many) < high <= np.max(many)
    assert interval(np.tile(one, (5, 1))) == pytest.approx(interval(one))          # runs agree: only the tasks differ
    assert interval([1.0] * 10) == interval([1.0] * 100, families) == [1, 1]
    apart, within = [0] * 50 + [1] * 50, [0, 1] * 50
    assert interval(apart, families) == [0, 1]                       # only families differ: both of one, or one of each
    low, high = interval(apart)
    assert 0.38 <= low < high <= 0.62
    low, high = interval(within, families)                           # only the tasks differ: 50 to 100 are drawn
    assert 0.38 <= low < 0.43 and 0.57 < high <= 0.62
    runs = np.array([[0.2], [0.4], [0.9]]) + np.zeros((3, 100))      # only the runs differ
    assert interval(runs, families) == pytest.approx(interval(runs), abs=0.04)
    # a family of one task beside one of 99: its task counts as one of 100, or of two where it is drawn twice
    assert interval([1] + [0] * 99, ["a"] + ["b"] * 99) == [0, 1]


def test_intervals_cover_what_they_claim_to(monkeypatch):
    """How often the intervals over five runs and the tasks, and over families as well, hold the true difference of .03
    in simulations of 14 families of 6 tasks. The first are too narrow, because families differ."""
    monkeypatch.setattr(statistics, "NUM_RESAMPLES", 200)
    monkeypatch.setattr(statistics, "CHUNK", 200)
    rng, families, inside = np.random.default_rng(0), np.repeat(np.arange(14), 6), np.zeros(2)
    for _ in range(150):
        values = 0.03 + rng.normal(0, 0.03, (5, 1)) + rng.normal(0, 0.3, 84) + rng.normal(0, 0.3, (5, 84))
        values += rng.normal(0, 0.25, 14)[families]
        for i, drawn in enumerate((None, families)):
            low, high = statistics.bootstrap_interval(values, drawn)
            inside[i] += (low <= 0.03 <= high) / 150
    assert inside[0] <= 0.85 and 0.92 <= inside[1] <= 1


@pytest.mark.parametrize("values, expected", [
    ([[1.0] * 300], [0.025 ** (1 / 300), 1]), ([[0.0] * 3] * 2, [0, 1 - 0.025 ** (1 / 3)]), ([[1.0]], [0.025, 1]),
    ([[0.5, 0.5]], None)])
def test_intervals_of_tasks_with_one_outcome_are_exact_or_none(values, expected):
    tasks = list(range(len(values[0])))
    found = statistics.intervals(values, tasks, [])
    assert found.get("ci95") == (expected and pytest.approx(expected))
    assert found["notes"] == ["all tasks have one mean: " + (
        "the interval is the exact one (Clopper-Pearson)" if expected else "no interval")]
    difference = statistics.intervals(values, tasks, [], is_share=False)
    assert "ci95" not in difference
    assert statistics.difference_cell({"difference": 0, **difference}) == "+0.000 (no interval)"


def test_intervals_over_families_where_every_task_states_one():
    rows = scored(("0", 1), ("1", 1), ("2", 0), ("3", 0))
    for n, row in enumerate(rows):
        row["task"] = {**FUNCTION, "family": n // 2}
    metrics = measured({"a": rows, "b": [{**row, "reward": 0} for row in rows]}, "b")
    assert metrics["a"]["ci95_families"] == metrics["a"]["against_baseline"]["ci95_families"] == [0, 1]
    assert "ci95_families" not in metrics["b"] and "against_baseline" not in metrics["b"]
    assert statistics.detail_lines(metrics, "b") == [
        "             95 %, families drawn  each run",
        "a                  [0.000, 1.000]",
        "a against b        [0.000, 1.000]"]
    for own in ([*rows, *scored(("4", 0))], rows[:2]):               # one states none; all the same
        assert "ci95_families" not in evaluate.measure(own, backend)
    assert statistics.detail_lines({}, "b") == []


def test_what_a_person_says_after_the_answer_changes_nothing(workspace):
    rows = read(workspace / "offline.jsonl")[:12]
    thanked = [{**row, "dialogue_history": [*row["dialogue_history"], {"role": "user", "content": "Thanks."}]}
               for row in rows]
    metrics = measured({"a": rows, "b": thanked})
    for key in ("all_known", "success_when_not_known", "asked_last", "turns"):
        assert metrics["a"][key] == metrics["b"][key]
    num_tokens = [len(turn["output_ids"]) for row in rows for turn in row["dialogue_history"][1::2]]
    assert metrics["a"]["mean_rounds"] == metrics["b"]["mean_rounds"] == len(num_tokens) / 12
    assert metrics["a"]["turn_tokens"] == sum(num_tokens) / len(num_tokens)


def test_curves_are_named_by_label_and_number_and_ranks_correlate():
    names = ["plain", "sweet@8", "sweet@1", "a@b@2", "sweet@0", "sweet@-4", "sweet@4.0", "sweet@04", "sweet@", "@4"]
    assert evaluate.curves_of({name: name for name in names}) == {"sweet": {8: "sweet@8", 1: "sweet@1"},
                                                                  "a@b": {2: "a@b@2"}}
    for a, b, expected in (([1, 2, 3], [10, 20, 30], 1), ([1, 2, 3], [3, 2, 1], -1), ([1, 2, 3, 4], [1, 3, 2, 4], 0.8),
                           ([1, 1, 2], [0, 1, 1], 0.5), ([1, 1, 1], [1, 2, 3], 0)):
        assert statistics.rank_correlation(a, b) == pytest.approx(expected)


def test_an_evaluation_shows_every_answer_and_trusts_no_logged_reward(tmp_path):
    """A right, a half right and a wrong answer with other logged rewards against three wrong ones; two runs, which are
    a point of a curve; a task with a test that cannot be graded."""
    task = {**FUNCTION, "ground_truth": "def f(n): return 1 // (n - 2)"}
    lost = answers(x=BAD, y=BAD, z=BAD)
    files = {"a": [trajectory("x", GOOD, reward=0.0), trajectory("y", HALF, reward=1.0), trajectory("z", BAD)],
             "b": lost, "sweet@8": (answers(x=GOOD, y=GOOD, z=GOOD), lost),
             "u": [{**trajectory("u", task["ground_truth"]), "task": task}]}
    words = [*written(tmp_path, files), "--baseline", "b"]
    printed = call(5, *words)
    metrics, page, data = report_of(tmp_path)
    numbers = metrics["a"]
    assert numbers["n"] == 3 and numbers["success_rate"] == pytest.approx(1 / 3)
    assert numbers["tests_passed"] == 0.5 and numbers["mean_rounds"] == 1.0
    assert numbers["ci95"][0] == 0.0 and 0.6 < numbers["ci95"][1] <= 1.0
    assert [row["reward"] for row in read(tmp_path / "report" / "scored" / "a.jsonl")] == [1.0, 0.5, 0.0]
    assert numbers["against_baseline"]["difference"] == pytest.approx(1 / 3)
    assert "against b" in printed and "+0.333" in printed and "done already" in call(5, *words)
    assert "u: 1 tests of 1 tasks cannot be graded" in printed and metrics["u"]["tests_passed"] == 0.5
    runs = metrics["sweet@8"]
    assert runs["runs"] == [1, 0] and runs["success_rate"] == 0.5 and runs["tasks"] == 3 and runs["n"] == 6
    assert ["sweet@8", "-", "1.000", "0.000"] in [line.split() for line in printed.splitlines()]
    # the page
    dialogues = data["dialogues"]
    assert [dialogue["answer"] for dialogue in dialogues[:6]] == [GOOD, HALF, BAD] + [BAD] * 3
    assert dialogues[0].keys() == {"m", "t", "run", "sample", "reward", "answer", "turns"}
    assert dialogues[1]["failed"] == [{"call": "f(2)", "expected": "2", "got": "1"}]
    assert dialogues[2]["failed"] == [{"call": f"f({n})", "expected": str(n), "got": "0"} for n in (1, 2)]
    assert [dialogue["run"] for dialogue in dialogues if dialogue["m"] == 2] == [0, 0, 0, 1, 1, 1]
    assert data["forms"] == {"advantages": []} and data["states"] == [] and "Turn advantages" not in page
    assert "curve-axes_1" in page and "costs" not in runs
    for line in printed.partition("\n\n")[2].splitlines():          # the tables and notes
        assert line.startswith("writes ") or all(cell in page for cell in line.split())


def test_a_lone_surrogate_stops_nothing_and_metrics_are_written_before_what_is_optional(tmp_path, tiny, monkeypatch):
    half, out = "a\ud800b", tmp_path / "report"
    assert encode(tiny[1], half) == encode(tiny[1], "a?b")
    task = {**FUNCTION, "problem_description": half, "family": half}
    row = {**trajectory(half, f"def f(n): return n  # {half}"), "task": task}
    row["dialogue_history"][0]["content"] = half
    others = answers(b="def f(n): raise SystemExit", c=GOOD, d="import math\ndef f(n): return math.prod([n])")
    words = [*written(tmp_path, {"a": [row, *others]}), "--compat", "--export", "messages"]
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(evaluate, "tables_of", lambda *_: 1 / 0)
        call(5, *words)
    assert json.loads((out / "metrics.json").read_text())["a"]["n"] == 4 and not (out / "COMPLETED").exists()
    scored = read(out / "scored" / "a.jsonl")
    assert scored[0]["dialogue_history"][0]["content"] == half
    assert [row["tests_compat"] for row in scored] == [[verdict] * 2 for verdict in (False, False, True, False)]
    printed = call(5, *words)
    assert f"writes {out}/export/a.jsonl (4 rows)" in printed and "published: success" in printed
    metrics, page, _ = report_of(tmp_path)
    assert [metrics["a"][key] for key in ("success_rate", "success_rate_compat", "ends_evaluation")] == [.5, .25, 1]
    assert metrics["a"]["scorer"] in ("namespaces", "landlock") and "a\\ud800b" in page
    system, message, _ = read(out / "export" / "a.jsonl")[0]["messages"]
    assert system["content"].startswith("You help a person")
    assert message == {"role": "user", "content": "a?b"}             # other programs may read no half emoji


def record(path, costs, **args):
    """Write an args.json, as a stage keeps it."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"stage": "x", "args": args, "inputs": {}, "costs": costs}))


def test_costs_of_an_agent_are_its_own_and_its_critic_s(tmp_path):
    """Not those of the evaluation's rollouts; a shipped model, a script or a server costs nothing."""
    critic, sweet, rft = (str(tmp_path / name) for name in ("critic", "sweet", "rft"))
    record(tmp_path / "critic" / "args.json", {"trained_tokens": 2_000_000, "seconds": 120}, trajectories="t")
    record(tmp_path / "sweet" / "args.json", {"trained_tokens": 250_000, "generated_tokens": 750_000, "seconds": 30.0},
           critic=critic)
    record(tmp_path / "rft" / "args.json", {"trained_tokens": 1_000_000, "seconds": 18}, critic=None)
    agents = {"base": ("models/tiny", None), "rft": (rft, None), "sweet": (sweet, critic),
              "best": ("http://host:80/v1#m", critic), "judged": ("script", "judge:m")}
    costs = {}
    for name, (agent, own_critic) in agents.items():
        record(tmp_path / f"on_{name}.args.json", {"generated_tokens": 99}, agent=agent, critic=own_critic)
        costs[name] = {"costs": evaluate.costs_of(f"{tmp_path}/on_{name}")}
    assert evaluate.cost_lines(costs) == [
        "costs   M trained  M generated  minutes",
        "base        0.000        0.000      0.0",
        "rft         1.000        0.000      0.3",
        "sweet       2.250        0.750      2.5",
        "best        2.000        0.000      2.0",
        "judged      0.000        0.000      0.0"]


@pytest.mark.parametrize("name", ["critic", "regression_critic", "value_critic"])
def test_the_advantage_of_a_turn_is_the_score_of_actions(request, workspace, name, tiny):
    trained = load_critic(request.getfixturevalue(name))
    rows = read_trajectories(workspace / "offline.jsonl")[:4]
    advantages = trained.score_turns(rows)
    assert [len(own) for own in advantages] == [row["num_rounds"] for row in rows]
    for row, own in zip(rows, advantages):
        states = [common.State(turn["input"], row["task"], [], [turn["output_ids"]], [])
                  for turn in row["dialogue_history"][1::2]]
        scores = [score for [score] in trained.score_actions(states)]
        if trained.score == "value":                               # here: how a turn changes the value
            assert own == pytest.approx(np.diff([0, *scores]), abs=1e-5)
            assert sum(own) == pytest.approx(scores[-1], abs=1e-5)
        else:
            assert own == pytest.approx(scores, abs=1e-5)
        [alone] = trained.score_turns([row])
        assert own == pytest.approx(alone, abs=1e-5)                 # in a batch or alone
    assert any(abs(advantage) > 1e-3 for own in advantages for advantage in own)


@pytest.fixture(scope="module")
def credited(workspace, regression_critic, tmp_path_factory):
    """The folder and arguments of 05 with a critic and SWEET's candidates (in candidates/), on dialogues "a" and "b".
    An answer runs once, and a turn is judged once."""
    folder, rows = tmp_path_factory.mktemp("credited"), read(workspace / "offline.jsonl")[:24]
    candidates = folder / "candidates"
    call(4, *policy_flags(workspace, "sweet", candidates, "--critic", regression_critic, "--data-frac", 0.03,
                          "--num-candidates", 4, "--max-new-tokens", 60, "--max-steps", 1))
    words = [*written(folder, {"a": rows[:12], "b": rows[12:]}), "--critic", regression_critic, "--candidates",
             candidates, "--export", "messages"]
    with (mock.patch.object(Scorer, "score_one", autospec=True, side_effect=Scorer.score_one) as run_answer,
          mock.patch.object(backend, "turn_kind", wraps=backend.turn_kind) as turn_kind):
        call(5, *words)
    num_candidates = sum(len(row["candidates"]) for row in read(candidates / "scored.jsonl"))
    assert run_answer.call_count == 24
    assert turn_kind.call_count == sum(row["num_rounds"] for row in rows) + num_candidates
    return folder, words


def test_the_page_has_dialogues_with_advantages_and_candidates_with_pairs(credited, regression_critic):
    folder, words = credited
    metrics, page, data = report_of(folder)
    assert data["methods"] == ["a", "b"] and len(data["dialogues"]) == 24
    line = f"{regression_critic}: scores are the outputs of its regression head"
    critic = json.loads((regression_critic / "critic.json").read_text())
    accuracy = (f"{regression_critic}: accuracy on pairs of held-out tasks: {critic['held_out_pair_accuracy']:.3f} "
                f"({critic['num_held_out_pairs']} pairs)")
    assert data["forms"] == {"advantages": [line, accuracy], "candidates": [line]} and page.count(line) == 3
    agent_turns = [turn for dialogue in data["dialogues"] for turn in dialogue["turns"] if turn["who"] == "agent"]
    kinds = [kind for numbers in metrics.values() for kind in numbers["turn_advantages"]["by_kind"].values()]
    for kind in kinds:
        mean = f"{kind['mean']:+.3f}".replace("-", "\u2212")
        assert f"{mean} <small>({kind['n']:,})</small>" in page
    assert sum("advantage" in turn for turn in agent_turns) == len(agent_turns) == sum(kind["n"] for kind in kinds)
    rows, pairs = (read(folder / "candidates" / name) for name in ("scored.jsonl", "pairs.jsonl"))
    for state, row in zip(data["states"], rows, strict=True):
        assert [c["advantage"] for c in state["candidates"]] == pytest.approx(row["advantages"], abs=1e-5)
        assert [c["text"] for c in state["candidates"]] == [c["text"] for c in row["candidates"]]
    for side in ("chosen", "rejected"):                              # a pair has one of each
        assert sum(candidate[side] for state in data["states"] for candidate in state["candidates"]) == len(pairs)
    write(folder / "candidates" / "pairs.jsonl", pairs[1:])
    assert "made with another" in refused(5, *words)                 # other candidates are another evaluation


def test_other_programs_get_all_advantages_unless_a_flag_says_otherwise():
    words = "a=f --out o --critic c"
    limits = [evaluate.parse_args(f"{words} {more}".split()).advantage_tasks
              for more in ("", "--export messages", "--export messages --advantage-tasks 3")]
    assert limits[0] == 100 and limits[1] > 10 ** 6 and limits[2] == 3


def test_advantages_of_the_first_tasks_of_each_name(workspace, regression_critic, tmp_path):
    rows = read(workspace / "offline.jsonl")[:24]
    rows[0]["advantages"] = [9.0] * rows[0]["num_rounds"]            # by another critic
    words = written(tmp_path, {"a": rows[:12], "b": rows[12:]})
    printed = call(5, *words, "--critic", regression_critic, "--advantage-tasks", 1)
    scored = [row["task_id"] in (rows[0]["task_id"], rows[12]["task_id"]) for row in rows]
    assert 0 < sum(scored) < 24 and f"{sum(scored)} of 24 dialogues scored" in printed
    _, _, data = report_of(tmp_path)
    shown = [{"advantage" in turn and turn["advantage"] is not None for turn in dialogue["turns"]
              if turn["who"] == "agent"} for dialogue in data["dialogues"]]
    assert sum(True in turns for turns in shown) == sum(scored)
    first = next(turn for turn in data["dialogues"][0]["turns"] if turn["who"] == "agent")
    assert first["advantage"] != 9


def test_advantages_of_the_files_are_shown_where_no_critic_gives_others(tmp_path):
    rows = [{**row, "advantages": [0.5]} for row in answers(t=GOOD, u=BAD)]
    words = written(tmp_path, {"own": [*rows, trajectory("v", GOOD)]})
    assert "\n1 dialogues have no turn advantages" in call(5, *words)
    metrics, page, data = report_of(tmp_path)
    assert metrics["own"]["turn_advantages"]["by_round"] == {"1": {"n": 2, "mean": 0.5}}
    assert [turn.get("advantage") for dialogue in data["dialogues"] for turn in dialogue["turns"]
            if turn["who"] == "agent"] == [0.5, 0.5, None] and data["forms"]["advantages"][0] in page
    rows[0]["advantages"].append(1)
    assert "one number for each turn" in refused(5, *written(tmp_path, {"own": rows}), "--overwrite")


def test_the_page_says_where_candidates_and_turn_advantages_do_not_compare(critic, tmp_path):
    def lines(form_of_turns=(), **args):
        record(tmp_path / "sweet" / "args.json", {}, model=str(BASE), **args)
        return evaluate.candidate_form(str(tmp_path / "sweet"), backend, list(form_of_turns))
    blind, informed = ({"critic": str(critic), "reference_sees_c": sees_c} for sees_c in (False, None))
    [blind_line], [informed_line] = lines(**blind), lines(**informed)
    assert blind_line.endswith("log p(a|o, c) - log p_ref(a|o), a mean over the tokens of a")
    assert informed_line.endswith("log p(a|o, c) - log p_ref(a|o, c), a mean over the tokens of a")
    assert lines([blind_line], **blind) == [blind_line]
    assert lines([informed_line], **blind) == [
        blind_line,
        "Turn advantages come from another critic or another form of eq. 3; do not compare the two."]
    assert "p_ref(a|o, c) - log p_ref(a|o)" in lines(critic="untrained", reference_sees_c=None)[0]
    for args in ({}, {**informed, "critic": str(tmp_path / "gone")}):
        assert lines(**args) == [f"{tmp_path}/sweet: not ranked by a critic, or its critic is missing or no longer "
                                 "matches"]


def test_bad_candidates_are_one_line(workspace, credited, tmp_path):
    words = [f"a={workspace}/offline.jsonl", "--candidates", tmp_path, "--out", tmp_path / "out"]
    for name in ("scored.jsonl", "pairs.jsonl"):
        assert f"{tmp_path / name}: no such file" in refused(5, *words)
        rows = read(credited[0] / "candidates" / name)
        write(tmp_path / name, [{**row, "task": {"problem_description": "?", "ground_truth": "<p>"}} for row in rows])
    assert "a task of another domain" in refused(5, *words)
    assert not (tmp_path / "out").exists()


def test_messages_of_another_trainer_get_advantages(workspace, regression_critic, credited, tmp_path, capsys, tiny):
    """Without ids it is what the same dialogues have with them: the docs' lines of Python run, too."""
    rows, exported = read(workspace / "offline.jsonl")[:6], read(credited[0] / "report" / "export" / "a.jsonl")[:6]
    plain = [{"task": row["task"], "answer": row["answer"], "max_rounds": row["max_rounds"],
              "dialogue_history": [{key: turn[key] for key in ("role", "content")} for turn in row["dialogue_history"]]}
             for row in rows]
    plain = read_trajectories(write(tmp_path / "plain.jsonl", plain))
    of_plain = load_critic(regression_critic).score_turns(plain)
    assert f"agent turns: {sum(row['num_rounds'] for row in rows)} rendered again" in capsys.readouterr().out
    for row, example, advantages in zip(rows, exported, of_plain):
        assert len(example["kinds"]) == len(example["advantages"]) == row["num_rounds"]
        assert [message["content"] for message in example["messages"]][1:] == [
            turn["content"] for turn in row["dialogue_history"]]
        assert advantages == pytest.approx(example["advantages"], abs=1e-5)
    assert any(abs(advantage) > 1e-3 for advantage in itertools.chain(*of_plain))

    pages = "".join(path.read_text() for path in ROOT.glob("docs/*.md"))
    [code] = re.findall(r"(?s)```python\n(import common\n.*?)```", pages)
    names, path = {}, write(tmp_path / "ids.jsonl", rows)
    exec(code.replace("out/base.jsonl", str(path)).replace("out/critic", str(regression_critic)), names)
    assert len(names["batch"]) == 6                                  # the template of models/tiny only appends
    for found, row, own in zip(names["batch"], rows, exported):
        ids, mask, advantages = (np.array(found[key]) for key in ("ids", "mask", "advantages"))
        actions = [turn["output_ids"] for turn in row["dialogue_history"][1::2]]
        assert ids[mask > 0].tolist() == sum(actions, []) and not advantages[mask == 0].any()
        of_tokens = np.repeat(own["advantages"], [len(action) for action in actions])
        assert advantages[mask > 0] == pytest.approx(of_tokens, abs=1e-5)
