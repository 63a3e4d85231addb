"""05_evaluate.py: numbers by hand, intervals, fresh scores, curves, costs, report."""
import json
import re
import shutil

import numpy as np
import pytest

import common
from colbench import backend
from colbench.scorer import Scorer
from conftest import call, FUNCTION, policy_flags, read, refused, ROOT, stage, trajectory, write
from lib import statistics
from lib.data import read_trajectories
from lib.models import encode

evaluate = stage(5)
GOOD, HALF, BAD = "def f(n): return n", "def f(n): return 1", "def f(n): return 0"


def metrics_of(folder):
    return json.loads((folder / "report" / "metrics.json").read_text())


def page_of(folder):
    return (folder / "report" / "report.html").read_text(encoding="utf-8")


def data_of(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def written(folder, files):
    """05's arguments NAME=FILE,… for {name: rows, or (rows, …) of several runs}."""
    words = []
    for name, runs in files.items():
        runs = runs if isinstance(runs, tuple) else (runs,)
        paths = [str(write(folder / f"{name}.{number}", rows)) for number, rows in enumerate(runs)]
        words.append(f"{name}={','.join(paths)}")
    return [*words, "--out", folder / "report"]


def evaluated(folder, files, *flags):
    """What 05 prints of files, its metrics and its page."""
    printed = call(5, *written(folder, files), *flags)
    return printed, metrics_of(folder), page_of(folder)


def answers(**by_task):
    return [trajectory(task, answer) for task, answer in by_task.items()]


def test_task_means_and_paired_differences_by_hand():
    """Of tasks, and of runs and tasks; without an interval over the runs alone, or over families that are not
    there."""
    def rows(*numbers):
        return [dict(zip(("task_id", "reward", "run"), row)) for row in numbers]
    ours, theirs = rows(("a", 1), ("a", 0.5), ("b", 1)), rows(("a", 0), ("b", 1), ("c", 1))
    assert statistics.values_of_runs(ours, backend.eval_score) == (["a", "b"], [[0.5, 1.0]])
    assert statistics.values_of_runs(ours, lambda t: t["reward"]) == (["a", "b"], [[0.75, 1.0]])
    result = statistics.paired_difference(ours, theirs, backend.eval_score)
    assert (result["difference"], result["n"]) == (0.25, 2)
    assert statistics.paired_difference(ours, rows(("z", 1)), backend.eval_score) is None
    ours = rows(("a", 1, 0), ("b", 0, 0), ("a", 1, 1), ("b", 1, 1), ("a", 1, 2), ("b", 1, 2))
    theirs = [{"task_id": task, "reward": 0, "run": run} for run in (2, 0, 1) for task in "ba"]
    result = statistics.paired_difference(ours, theirs, backend.eval_score)
    assert result["runs"] == [0.5, 1, 1] and result["n"] == 2 and result["difference"] == pytest.approx(5 / 6)
    assert result.keys() == {"difference", "n", "ci95", "runs"}
    assert statistics.paired_difference(ours[:2], theirs, backend.eval_score) is None


def test_rate_interval_and_difference_average_the_same_thing(tmp_path):
    """Nine successes of one task, a failure of each of three others: a quarter of the tasks, not nine twelfths."""
    uneven = [*(trajectory("w", GOOD, sample=n) for n in range(9)), *answers(x=BAD, y=BAD, z=BAD)]
    _, metrics, _ = evaluated(tmp_path, {"a": uneven, "b": answers(w=BAD, x=BAD, y=BAD, z=BAD)}, "--baseline", "b")
    assert metrics["a"]["success_rate"] == metrics["a"]["against_baseline"]["difference"] == 0.25
    assert metrics["a"]["ci95"][0] <= 0.25 <= metrics["a"]["ci95"][1] <= 0.75
    assert stage(2).summary(str(tmp_path / "report" / "scored" / "a.jsonl")).startswith("success 0.250 | ")
    # a run counts once, too: 1 and 0, of nine dialogues and of one
    runs = [{**row, "run": 0, "reward": 1.0} for row in uneven[:9]] + [{**uneven[0], "run": 1, "reward": 0.0}]
    assert statistics.mean_over_tasks(runs, backend.eval_score) == 0.5


def test_what_a_comparison_or_an_interval_leaves_out_has_a_line(tmp_path):
    """Another number of runs, no common task, a quarter of the tasks; one run, and fewer than five."""
    base = answers(**{f"t{n}": GOOD if n < 4 else BAD for n in range(8)})
    files = {"base": base, "few": answers(t0=BAD, t1=GOOD), "apart": answers(t8=BAD, t9=BAD), "same": base,
             "two": (base,) * 2, "four": (base,) * 4, "five": (base,) * 5}
    printed, metrics, page = evaluated(tmp_path, files, "--baseline", "base")
    unpaired = "against base not compared: another number of runs, which cannot be paired; give both as many files"
    for line in ("few: against base compared on the 2 tasks that both have (of 2 and 8); the rates above are those of "
                 "all", "apart: against base not compared: no task that both have", f"two: {unpaired}",
                 "one run of base, few, apart, same: the intervals leave other seeds out",
                 "fewer than five runs of two, four: where runs differ much the intervals are too narrow"):
        assert line in printed.splitlines() and line in page
    assert [name for name in metrics if "against_baseline" in metrics[name]] == ["few", "same"]


def test_what_the_bootstrap_draws():
    """Runs and tasks; with families: families, then their tasks."""
    interval, families, rng = statistics.bootstrap_interval, ["a"] * 50 + ["b"] * 50, np.random.default_rng(0)
    one, many = rng.random(200), rng.random((5, 1)) + np.zeros((5, 200))
    assert interval([one]) == interval(one)
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
    mean, (low, high) = statistics.mean_of_groups({"a": [1.0] * 30, "b": [0.0], "c": [0.25, -0.25]})
    assert mean == pytest.approx(1 / 3) and low == 0 and high == 1


@pytest.mark.parametrize("runs, run_sd, family_sd, plain, with_families", [
    (5, 0.03, 0, (0.9, 0.99), (0.94, 1)),
    (5, 0.03, 0.25, (0, 0.85), (0.92, 1)),                           # tasks stand for their families: too narrow
    (1, 0.08, 0, (0.47, 0.82), (0, 1)),                              # one run: other seeds are left out
    (2, 0.08, 0, (0, 0.9), (0, 1)), (10, 0.08, 0, (0.93, 1), (0, 1))])  # two runs do not show how far runs differ
def test_intervals_cover_what_they_claim_to(monkeypatch, runs, run_sd, family_sd, plain, with_families):
    """How often the intervals over runs and tasks, and over families as well, hold the true difference, .03, of
    simulated differences of 14 families of 6 tasks."""
    monkeypatch.setattr(statistics, "NUM_RESAMPLES", 400)
    rng, families, inside = np.random.default_rng(0), np.repeat(np.arange(14), 6), np.zeros(2)
    for _ in range(200):
        values = (0.03 + rng.normal(0, run_sd, (runs, 1)) + rng.normal(0, family_sd, 14)[families]
                  + rng.normal(0, 0.3, 84) + rng.normal(0, 0.3, (runs, 84)))
        for i, drawn in enumerate((None, families)):
            low, high = statistics.bootstrap_interval(values, drawn)
            inside[i] += (low <= 0.03 <= high) / 200
    assert plain[0] <= inside[0] <= plain[1] and with_families[0] <= inside[1] <= with_families[1]


@pytest.mark.parametrize("values, expected", [
    ([[1.0] * 300], [0.025 ** (1 / 300), 1]), ([[0.0] * 3] * 2, [0, 1 - 0.025 ** (1 / 3)]), ([[1.0]], [0.025, 1]),
    ([[0.5, 0.5]], None)])
def test_intervals_of_tasks_with_one_outcome_are_exact_or_none(values, expected):
    tasks = list(range(len(values[0])))
    found = statistics.intervals(values, tasks, [])
    assert found.get("ci95") == (expected and pytest.approx(expected))
    assert found["notes"] == ["all tasks have one outcome: " + (
        "the interval is the exact one (Clopper-Pearson)" if expected else "no interval")]
    difference = statistics.intervals(values, tasks, [], is_share=False)
    assert "ci95" not in difference and statistics.difference_cell(
        {"against_baseline": {"difference": 0, **difference}}) == "+0.000 (no interval)"


def test_intervals_over_families_where_every_task_states_one(tmp_path):
    rows = answers(**{"0": GOOD, "1": GOOD, "2": BAD, "3": BAD})
    for n, row in enumerate(rows):
        row["task"] = {**FUNCTION, "problem_description": str(n), "family": n // 2}
    files = {"a": rows, "b": [{**row, "answer": BAD} for row in rows]}
    printed, metrics, page = evaluated(tmp_path, files, "--baseline", "b")
    assert metrics["a"]["ci95_families"] == metrics["a"]["against_baseline"]["ci95_families"] == [0, 1]
    assert "ci95_families" not in metrics["b"] and "against_baseline" not in metrics["b"]
    table = "\n".join(["             95 %, families drawn  each run",
                       "a                  [0.000, 1.000]",
                       "a against b        [0.000, 1.000]"])
    assert table in printed and table in page
    for own in ([*rows, trajectory("4", BAD)], rows[:2]):            # one states none; all the same
        printed, metrics, _ = evaluated(tmp_path, {"a": own}, "--overwrite")
        assert "families drawn" not in printed and "ci95_families" not in metrics["a"]


def test_several_files_of_a_name_are_runs(tmp_path):
    lost = answers(x="0", y=GOOD)
    files = {"a": (answers(x=GOOD, y=GOOD), lost), "b": (lost, lost)}
    printed, metrics, _ = evaluated(tmp_path, files, "--baseline", "b")
    assert metrics["a"]["runs"] == [1, 0.5] and metrics["a"]["success_rate"] == 0.75 and metrics["a"]["tasks"] == 2
    against = metrics["a"]["against_baseline"]
    assert against["runs"] == [0.5, 0]
    assert against.keys() == {"name", "difference", "n", "ci95", "runs"}           # no interval over the runs alone
    assert "a                               -  1.000 0.500" in printed.splitlines()
    assert "a against b                     -  0.500 0.000" in printed.splitlines()
    line = refused(5, *written(tmp_path, {"a": (lost, answers(z="0"))}), "--overwrite")
    assert line.endswith("a.1: the runs of a name must have the same tasks")


def test_logged_rewards_are_not_trusted_and_the_page_has_every_answer_with_its_failed_tests(tmp_path):
    """A right, a half right and a wrong answer with other logged rewards, against three wrong ones."""
    files = {"a": [trajectory("x", GOOD, reward=0.0), trajectory("y", HALF, reward=1.0), trajectory("z", BAD)],
             "b": answers(x=BAD, y=BAD, z=BAD)}
    printed, metrics, page = evaluated(tmp_path, files, "--baseline", "b")
    metrics, data = metrics["a"], data_of(page)
    assert metrics["n"] == 3 and metrics["success_rate"] == pytest.approx(1 / 3)
    assert metrics["tests_passed"] == 0.5 and metrics["mean_rounds"] == 1.0
    assert metrics["ci95"][0] == 0.0 and 0.6 < metrics["ci95"][1] <= 1.0
    assert [row["reward"] for row in read(tmp_path / "report" / "scored" / "a.jsonl")] == [1.0, 0.5, 0.0]
    assert metrics["against_baseline"]["difference"] == pytest.approx(1 / 3)
    assert "against b" in printed and "+0.333" in printed
    assert "done already" in evaluated(tmp_path, files, "--baseline", "b")[0]
    assert [dialogue["answer"] for dialogue in data["dialogues"]] == [GOOD, HALF, BAD] + [BAD] * 3
    assert data["dialogues"][0].keys() == {"m", "t", "run", "sample", "reward", "rounds", "answer", "turns"}
    assert data["dialogues"][1]["failed"] == [{"call": "f(2)", "expected": "2", "got": "1"}]
    assert data["dialogues"][2]["failed"] == [{"call": f"f({n})", "expected": str(n), "got": "0"} for n in (1, 2)]


def test_an_answer_runs_once_and_a_turn_is_judged_once(tmp_path, monkeypatch, regression_critic):
    asked, run_all, kind_of = [], Scorer.score_one, backend.turn_kind

    def score_one(scorer, children, key, answer):
        asked.append(answer)
        return run_all(scorer, children, key, answer)

    def turn_kind(task, history, message):
        asked.append(message)
        return kind_of(task, history, message)
    monkeypatch.setattr(Scorer, "score_one", score_one)
    monkeypatch.setattr(backend, "turn_kind", turn_kind)
    evaluated(tmp_path, {"a": answers(x=GOOD, y=BAD)}, "--critic", regression_critic)
    assert sorted(asked) == sorted([GOOD, BAD, *(f"{backend.MARKER}\n{answer}" for answer in (GOOD, BAD))])


def test_tasks_of_one_name_must_be_one_task_in_all_files(tmp_path):
    ours = answers(t="x")
    other = [{**ours[0], "task": {**FUNCTION, "ground_truth": "def f(n): return 2 * n"}}]
    for files in ({"old": ours, "new": other}, {"two": (ours, other)}):
        line = refused(5, *written(tmp_path, files))
        assert ': two tasks with different references have the "task_id" t' in line


def test_what_a_person_says_after_the_answer_changes_nothing(workspace, tmp_path):
    rows = read(workspace / "offline.jsonl")[:12]
    thanked = [{**row, "dialogue_history": [*row["dialogue_history"], {"role": "user", "content": "Thanks."}]}
               for row in rows]
    _, metrics, _ = evaluated(tmp_path, {"a": rows, "b": thanked})
    for key in ("all_known", "success_when_known", "forced_answers", "turns"):
        assert metrics["a"][key] == metrics["b"][key]


def test_ungradeable_tests_are_reported(tmp_path):
    task = {**FUNCTION, "ground_truth": "def f(n): return 1 // (n - 2)"}
    printed, metrics, _ = evaluated(tmp_path, {"a": [{**trajectory("x", task["ground_truth"]), "task": task}]})
    assert "a: 1 tests of 1 tasks cannot be graded" in printed and metrics["a"]["tests_passed"] == 0.5


def test_a_lone_surrogate_stops_nothing(tmp_path, tiny):
    half = "a\ud800b"
    assert encode(tiny[1], half) == encode(tiny[1], "a?b")
    row = {**trajectory("x", f"def f(n): return n  # {half}"), "task_id": half,
           "task": {**FUNCTION, "problem_description": half, "family": half}}
    row["dialogue_history"][0]["content"] = half
    rows = [row, {key: value for key, value in row.items() if key != "task_id"}]
    _, metrics, page = evaluated(tmp_path, {"a": rows}, "--compat", "--export", "messages")
    assert metrics["a"]["n"] == 2 and "a\\ud800b" in page
    scored = read(tmp_path / "report" / "scored" / "a.jsonl")
    assert [row["dialogue_history"][0]["content"] for row in scored] == [half, half]


@pytest.mark.parametrize("where, broken", [(evaluate, "write_report"), (evaluate, "report_plots"),
                                           (evaluate, "page_data"), (evaluate, "further_tables")])
def test_metrics_are_written_before_everything_optional(tmp_path, monkeypatch, where, broken):
    def fail(*_, **__):
        raise RuntimeError("broken")
    monkeypatch.setattr(where, broken, fail)
    task = {**FUNCTION, "facts": [{"topic": "t", "questions": ["t?"], "told": True, "matters": False}]}
    with pytest.raises(RuntimeError):
        evaluated(tmp_path, {"a@1": [{**trajectory("x", GOOD), "task": task}]})
    assert metrics_of(tmp_path)["a@1"]["success_rate"] == 1
    assert read(tmp_path / "report" / "scored" / "a@1.jsonl")[0]["reward"] == 1
    assert not (tmp_path / "report" / "COMPLETED").exists()


def test_curve_files_from_rows_to_report(tmp_path):
    files = {"plain": answers(x=GOOD, y=GOOD), "sweet@1": answers(x=BAD, y=BAD), "sweet@8": answers(x=GOOD, y=BAD),
             "judge@8": answers(x=BAD, y=BAD)}
    files["sweet@8"] = [{**row, "best_of": 8} for row in files["sweet@8"]]
    _, metrics, page = evaluated(tmp_path, files)
    none = pytest.approx([0, 1 - 0.025 ** 0.5])                      # exact, of two tasks
    assert list(metrics) == list(files) and "costs" not in metrics["sweet@8"]
    assert {name: (metrics[name]["success_rate"], metrics[name]["ci95"]) for name in files if "@" in name} == {
        "sweet@1": (0, none), "sweet@8": (0.5, [0, 1]), "judge@8": (0, none)}
    assert "curve-axes_1" in page


def test_curve_files_that_do_not_fit_their_names(tmp_path):
    rows = [trajectory("x", "1", best_of=4)]
    line = refused(5, *written(tmp_path, {"sweet@8": rows}))
    assert line == 'sweet@8: N = 8, but "best_of" in its file is 4'
    for name in ("sweet@0", "sweet@-4", "sweet@4.0", "sweet@04", "sweet@", "@4"):
        assert refused(5, *written(tmp_path, {name: rows})).startswith(f"{name}: a name with @ must be")
    assert not (tmp_path / "report").exists()


# --- costs

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
    for name, (agent, own_critic) in agents.items():
        record(tmp_path / f"{name}.0.args.json", {"generated_tokens": 99, "seconds": 5}, agent=agent, critic=own_critic)
    printed, metrics, page = evaluated(tmp_path, {name: answers(x=GOOD) for name in agents}, "--costs")
    table = "\n".join(["costs   M trained  M generated  minutes",
                       "base        0.000        0.000      0.0",
                       "rft         1.000        0.000      0.3",
                       "sweet       2.250        0.750      2.5",
                       "best        2.000        0.000      2.0",
                       "judged      0.000        0.000      0.0"])
    assert table in printed and table in page
    assert metrics["sweet"]["costs"] == {"trained_tokens": 2_250_000, "generated_tokens": 750_000, "seconds": 150}


def test_costs_without_records_are_bad_input(tmp_path):
    words, path = [*written(tmp_path, {"a": answers(x="1")}), "--costs"], tmp_path / "a.0"
    assert refused(5, *words) == (f"{path}: no args.json of a rollout beside it; --costs needs what 02_rollout.py "
                                  "keeps there")
    (tmp_path / "a.0.args.json").write_text("{")
    assert f"{path}.args.json: not JSON" in refused(5, *words) and not (tmp_path / "report").exists()


# --- ranks

def test_ranks_and_their_correlation_by_hand():
    assert statistics.average_ranks([3, 1, 3, 0]) == [2.5, 1, 2.5, 0]
    assert statistics.rank_correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert statistics.rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert statistics.rank_correlation([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    assert statistics.rank_correlation([1, 1, 2], [0, 1, 1]) == pytest.approx(0.5)
    assert statistics.rank_correlation([1, 1, 1], [1, 2, 3]) == 0


# --- turn advantages, and SWEET's candidates

@pytest.fixture(scope="module", params=["critic", "regression_critic", "value_critic"])
def trained(request, tiny):
    """A critic of each kind after a few steps, loaded."""
    folder = request.getfixturevalue(request.param)
    return common.load_critic(common.read_critic(folder, tiny[1], backend), common.load_whole("cpu"))


def test_the_advantage_of_a_turn_is_the_score_of_actions(workspace, trained, tiny):
    rows = read_trajectories(workspace / "offline.jsonl")[:6]
    advantages = common.score_turns(trained, tiny[1], rows, 4096, "cpu")
    assert [len(own) for own in advantages] == [row["num_rounds"] for row in rows]
    for row, own in zip(rows, advantages):
        history = row["dialogue_history"]
        points = [common.DecisionPoint(turn["input"], row["task"], history[:i], [turn["output_ids"]], [turn["output"]])
                  for i, turn in enumerate(history) if turn["role"] == "assistant"]
        scores = [score for [score] in common.score_actions(trained, tiny[1], points, 4096, "cpu")]
        if trained.head == "value":                               # here: how a turn changes the value
            assert own == pytest.approx(np.diff([0, *scores]), abs=1e-5)
            assert sum(own) == pytest.approx(scores[-1], abs=1e-5)
        else:
            assert own == pytest.approx(scores, abs=1e-5)
        [alone] = common.score_turns(trained, tiny[1], [row], 4096, "cpu")
        assert own == pytest.approx(alone, abs=1e-5)                 # in a batch or alone
    assert any(abs(advantage) > 1e-3 for own in advantages for advantage in own)


def test_an_untrained_critic_gives_no_advantage_and_long_dialogues_have_none(workspace, tiny):
    critic = common.Critic("-", "-", scorer=common.Scorer(tiny[0]), ref_scorer=common.Scorer(tiny[0]))
    rows = read_trajectories(workspace / "offline.jsonl")[:8]
    assert common.score_turns(critic, tiny[1], rows, 4096, "cpu") == [[0.0] * row["num_rounds"] for row in rows]
    examples = common.trajectory_examples(rows, [(i,) for i in range(8)], tiny[1], True)
    lengths = [max(len(row.ids) for row in example.items[0]) for example in examples]
    limit = sorted(lengths)[3]
    found = common.score_turns(critic, tiny[1], rows, limit, "cpu")
    assert [own is None for own in found] == [length > limit for length in lengths] and None in found


@pytest.fixture(scope="module")
def swept(workspace, regression_critic, tmp_path_factory):
    """04's folder with scored candidates."""
    folder = tmp_path_factory.mktemp("sweet") / "sweet"
    call(4, *policy_flags(workspace, "sweet", folder, "--critic", regression_critic, "--data-frac", 0.1,
                          "--num-candidates", 4, "--max-new-tokens", 100, "--max-steps", 1))
    return folder


@pytest.fixture(scope="module")
def page_with_advantages(workspace, regression_critic, swept, tmp_path_factory):
    """05 with a critic and candidates, on the two halves "a" and "b" of the dialogues: (its folder, its metrics, the
    data of its page, the page)."""
    folder, rows = tmp_path_factory.mktemp("advantages"), read(workspace / "offline.jsonl")
    _, metrics, page = evaluated(folder, {"a": rows[:36], "b": rows[36:]}, "--critic", regression_critic,
                                 "--candidates", swept)
    return folder / "report", metrics, data_of(page), page


def test_the_page_has_all_dialogues_with_the_advantages_of_their_turns(page_with_advantages, regression_critic):
    """And the numbers of the metrics."""
    _, metrics, data, page = page_with_advantages
    assert data["methods"] == ["a", "b"] and data["critic"] == str(regression_critic) and len(data["dialogues"]) == 72
    for dialogue in data["dialogues"]:
        agent = [turn for turn in dialogue["turns"] if turn["who"] == "agent"]
        assert dialogue["advantage"] == pytest.approx(sum(turn["advantage"] for turn in agent), abs=1e-5)
        assert dialogue["rounds"] == len(agent)
    for numbers in metrics.values():
        assert f"{numbers['success_rate']:.3f}" in page
        for kind in numbers["turn_advantages"]["by_kind"].values():
            mean = f"{kind['mean']:+.3f}".replace("-", "\u2212")
            assert f"{mean} <small>({kind['n']:,})</small>" in page


def test_the_page_has_the_candidates(page_with_advantages, swept):
    _, _, data, _ = page_with_advantages
    scored, pairs = read(swept / "scored.jsonl"), read(swept / "pairs.jsonl")
    assert len(data["states"]) == len(scored)
    for state, row in zip(data["states"], scored):
        assert [c["advantage"] for c in state["candidates"]] == pytest.approx(row["advantages"], abs=1e-5)
        assert [c["text"] for c in state["candidates"]] == [c["text"] for c in row["candidates"]]
    for side in ("chosen", "rejected"):
        assert sum(candidate[side] for state in data["states"] for candidate in state["candidates"]) == len(pairs)


def test_the_kinds_of_candidates_are_counted(page_with_advantages, swept):
    """Every candidate once; the ranks of all have the mean 1/2; a pair has one chosen and one rejected."""
    table = re.search(r"what the pairs say.*?</pre>", page_with_advantages[3], re.DOTALL)[0]
    numbers = [[float(cell) for cell in line.split()[-4:]] for line in table.removesuffix("</pre>").splitlines()[1:]]
    number, ranks, chosen, rejected = np.array(numbers).T
    assert sum(number) == sum(len(row["candidates"]) for row in read(swept / "scored.jsonl"))
    assert sum(number * ranks) / sum(number) == pytest.approx(0.5, abs=0.01)
    assert sum(chosen) == sum(rejected) == len(read(swept / "pairs.jsonl"))


def test_a_page_without_critic_and_candidates(workspace, tmp_path):
    rows = [{**row, "agent": None} for row in read(workspace / "offline.jsonl")[:6]]       # no folder, no metrics.jsonl
    data = data_of(evaluated(tmp_path, {"a": rows})[2])
    assert data["critic"] is None and data["states"] == []
    assert not any("advantage" in turn for dialogue in data["dialogues"] for turn in dialogue["turns"])


def test_other_candidates_are_another_evaluation(workspace, swept, tmp_path):
    candidates = shutil.copytree(swept, tmp_path / "candidates")
    words = [f"a={workspace / 'offline.jsonl'}", "--candidates", candidates, "--out", tmp_path / "report"]
    call(5, *words)
    assert "done already" in call(5, *words)
    write(candidates / "pairs.jsonl", read(swept / "pairs.jsonl")[1:])
    assert "made with another" in refused(5, *words)


def test_bad_candidates_are_one_line(workspace, swept, tmp_path):
    rows, pairs = read(swept / "scored.jsonl"), read(swept / "pairs.jsonl")
    scored, made = tmp_path / "scored.jsonl", tmp_path / "pairs.jsonl"
    page = {"problem_description": "?", "ground_truth": "<p>"}
    for some_rows, some_pairs, line in (
            (None, None, f"{scored}: no such file"),
            (rows, None, f"{made}: no such file"),
            ([{**row, "task": page} for row in rows], pairs, "a task of another domain")):
        for path, content in ((scored, some_rows), (made, some_pairs)):
            if content:
                write(path, content)
        assert line in refused(5, f"a={workspace}/offline.jsonl", "--candidates", tmp_path, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_messages_of_another_trainer_get_advantages(workspace, regression_critic, tmp_path):
    """Without ids it is what the same dialogues have with them: the docs' lines of Python run, too."""
    rows = read(workspace / "offline.jsonl")[:6]
    plain = [{**{key: row[key] for key in ("task", "answer", "max_rounds")}, "dialogue_history": [
        {key: turn[key] for key in ("role", "content")} for turn in row["dialogue_history"]]} for row in rows]
    exported = {}
    for name, some in (("ids", rows), ("plain", plain)):
        (tmp_path / name).mkdir()
        printed, _, _ = evaluated(tmp_path / name, {"a": some}, "--critic", regression_critic, "--export", "messages")
        exported[name] = [row["advantages"] for row in read(tmp_path / name / "report" / "export" / "a.jsonl")]
    assert f"agent turns: {sum(row['num_rounds'] for row in rows)} rendered again" in printed
    assert [len(own) for own in exported["ids"]] == [row["num_rounds"] for row in rows]
    ours, theirs = sum(exported["ids"], []), sum(exported["plain"], [])
    assert any(abs(advantage) > 1e-3 for advantage in ours) and theirs == pytest.approx(ours, abs=1e-5)

    pages = "".join(path.read_text() for path in ROOT.glob("docs/*.md"))
    [code] = re.findall(r"(?s)```python\n(import common\n.*?)```", pages)
    names = {}
    code = code.replace("out/base.jsonl", str(tmp_path / "ids" / "a.0")).replace("out/critic", str(regression_critic))
    exec(code, names)
    assert len(names["batch"]) == 6                                  # the template of models/tiny only appends
    for found, row, own in zip(names["batch"], rows, exported["ids"]):
        agent = [turn for turn in row["dialogue_history"] if turn["role"] == "assistant"]
        assert [token for token, mask in zip(found["ids"], found["mask"]) if mask] == sum(
            (turn["output_ids"] for turn in agent), [])
        assert [advantage for advantage, mask in zip(found["advantages"], found["mask"]) if mask] == pytest.approx(
            [advantage for turn, advantage in zip(agent, own) for _ in turn["output_ids"]], abs=1e-5)
        assert not any(advantage for advantage, mask in zip(found["advantages"], found["mask"]) if not mask)
