"""05_evaluate.py: numbers by hand, intervals, fresh scores, curves, costs, report, bad input."""
import json
import re
import shutil

import numpy as np
import pytest
from test_critics import make_regression_critic
from test_report import CURVES

import common
from colbench import backend
from colbench.scorer import Scorer
from conftest import call, critic_note, read, refused, ROOT, stage, succeed
from lib import statistics
from lib.models import encode

evaluate = stage(5)
GOOD, HALF, BAD = "def f(n): return n", "def f(n): return 1", "def f(n): return 0"
TASK = {"problem_description": "?", "ground_truth": "def f(n):\n    return n", "test_cases": {"a": "f(1)", "b": "f(2)"}}


def trajectory(task, answer, **more):
    return {"task_id": task, "task": TASK, "answer": answer, "dialogue_history": [
        {"role": "user", "content": "?"}, {"role": "assistant", "content": f"{backend.MARKER}\n{answer}"}], **more}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def metrics_of(folder):
    return json.loads((folder / "metrics.json").read_text())


def page_of(folder):
    """The data of a report's page."""
    page = (folder / "report.html").read_text(encoding="utf-8")
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_task_means_and_paired_difference_by_hand():
    ours = [{"task_id": "a", "reward": 1}, {"task_id": "a", "reward": 0.5}, {"task_id": "b", "reward": 1}]
    theirs = [{"task_id": "a", "reward": 0}, {"task_id": "b", "reward": 1}, {"task_id": "c", "reward": 1}]
    assert statistics.task_means(ours, backend.eval_score) == {"a": 0.5, "b": 1.0}
    assert statistics.task_means(ours, lambda t: t["reward"]) == {"a": 0.75, "b": 1.0}
    result = statistics.paired_difference(ours, theirs, backend.eval_score)
    assert (result["difference"], result["n"]) == (0.25, 2)
    assert statistics.paired_difference(ours, [{"task_id": "z", "reward": 1}], backend.eval_score) is None


def test_rate_interval_and_difference_average_the_same_thing(tmp_path):
    """Nine successes of one task, a failure of each of three others: a quarter of the tasks, not nine twelfths."""
    uneven = [trajectory("w", GOOD, sample=n) for n in range(9)] + [trajectory(task, BAD) for task in "xyz"]
    a = write(tmp_path / "a.jsonl", uneven)
    b = write(tmp_path / "b.jsonl", [trajectory(task, BAD) for task in "wxyz"])
    call(5, f"a={a}", f"b={b}", "--baseline", "b", "--out", tmp_path / "report")
    metrics = metrics_of(tmp_path / "report")
    assert metrics["a"]["success_rate"] == metrics["a"]["against_baseline"]["difference"] == 0.25
    assert metrics["a"]["ci95"][0] <= 0.25 <= metrics["a"]["ci95"][1] <= 0.75
    assert metrics["a"]["dialogues_a_task"] == [1, 9] and metrics["b"]["dialogues_a_task"] == [1, 1]
    assert stage(2).summary(str(tmp_path / "report" / "scored" / "a.jsonl")).startswith("success 0.250 | ")
    # a run counts once, too: 1 and 0, of nine dialogues and of one
    runs = [{**row, "run": 0, "reward": 1.0} for row in uneven[:9]] + [{**uneven[0], "run": 1, "reward": 0.0}]
    assert statistics.mean_over_tasks(runs, backend.eval_score) == 0.5


def test_a_comparison_that_says_little_or_nothing_has_a_line(tmp_path):
    """Another number of runs, no common task, and a quarter of the tasks: .45 less .4 is no "-0.400" without a word."""
    rows = lambda tasks, wins: [trajectory(f"t{n}", GOOD if n in wins else BAD) for n in tasks]
    base = write(tmp_path / "base", rows(range(8), range(4)))
    few = write(tmp_path / "few", rows(range(2), [1]))
    apart = write(tmp_path / "apart", rows(range(8, 10), []))
    files = [f"base={base}", f"few={few}", f"apart={apart}", f"twice={base},{base}", f"same={base}"]
    printed = call(5, *files, "--baseline", "base", "--out", tmp_path / "report")
    lines = [line for line in printed.splitlines() if "against base " in line and ": " in line]
    assert lines == [
        "few: against base compared on the 2 tasks that both have (of 2 and 8); the rates above are those of all",
        "apart: against base not compared: no task that both have",
        "twice: against base not compared: another number of runs, which cannot be paired; give both as many files"]
    page = (tmp_path / "report" / "report.html").read_text()
    assert all(line in page for line in lines)
    metrics = metrics_of(tmp_path / "report")
    assert [name for name in metrics if "against_baseline" in metrics[name]] == ["few", "same"]


def test_intervals_say_what_they_leave_out(tmp_path):
    path = write(tmp_path / "a.jsonl", [trajectory("x", "0"), trajectory("y", "0")])
    runs = {name: ",".join([str(path)] * number) for name, number in (("one", 1), ("two", 2), ("four", 4), ("five", 5))}
    printed = call(5, *map("=".join, runs.items()), "--out", tmp_path / "report").splitlines()
    page = (tmp_path / "report" / "report.html").read_text()
    for line in ("one run of one: the intervals leave other seeds out",
                 "fewer than five runs of two, four: where runs differ much the intervals are too narrow"):
        assert line in printed and line in page


def test_a_mean_of_groups_lies_in_its_interval():
    mean, (low, high) = statistics.mean_of_groups({"a": [1.0] * 30, "b": [0.0], "c": [0.25, -0.25]})
    assert mean == pytest.approx(1 / 3) and low == 0 and high == 1


def test_runs_are_paired_by_run_and_task_by_hand():
    ours = [{"task_id": t, "reward": r, "run": run} for run, t, r in
            ((0, "a", 1), (0, "b", 0), (1, "a", 1), (1, "b", 1), (2, "a", 1), (2, "b", 1))]
    theirs = [{"task_id": t, "reward": 0, "run": run} for run in (2, 0, 1) for t in "ba"]
    result = statistics.paired_difference(ours, theirs, backend.eval_score)
    assert result["runs"] == [0.5, 1, 1] and result["n"] == 2 and result["difference"] == pytest.approx(5 / 6)
    assert result.keys() == {"difference", "n", "ci95", "runs"}  # no interval over the runs alone, none over families
    assert statistics.paired_difference(ours[:2], theirs, backend.eval_score) is None


def test_bootstrap_of_runs_draws_both():
    rng = np.random.default_rng(0)
    one, many = rng.random(200), rng.random((5, 1)) + np.zeros((5, 200))
    assert statistics.bootstrap_interval([one]) == statistics.bootstrap_interval(one)
    low, high = statistics.bootstrap_interval(many)                    # tasks agree: only the runs differ
    assert np.min(many) <= low < np.mean(many) < high <= np.max(many)
    same = np.tile(one, (5, 1))                                      # runs agree: only the tasks differ
    assert statistics.bootstrap_interval(same) == pytest.approx(statistics.bootstrap_interval(one))


def test_bootstrap_of_families_draws_families_then_their_tasks():
    families = ["a"] * 50 + ["b"] * 50
    apart = [0] * 50 + [1] * 50  # only the families differ: both of one, or one of each
    assert statistics.bootstrap_interval(apart, families) == [0, 1]
    low, high = statistics.bootstrap_interval(apart)
    assert 0.38 <= low < high <= 0.62
    assert statistics.bootstrap_interval([1.0] * 100, families) == [1, 1]
    within = [0, 1] * 50                                             # only the tasks differ: 50 to 100 are drawn
    low, high = statistics.bootstrap_interval(within, families)
    assert 0.38 <= low < 0.43 and 0.57 < high <= 0.62
    runs = np.array([[0.2], [0.4], [0.9]]) + np.zeros((3, 100))      # only the runs differ
    assert statistics.bootstrap_interval(runs, families) == pytest.approx(statistics.bootstrap_interval(runs), abs=0.04)
    # a family of one task beside one of 99: its task counts as one of 100, or of two where it is drawn twice
    low, high = statistics.bootstrap_interval([1] + [0] * 99, ["a"] + ["b"] * 99)
    assert low == 0 and high == 1


def coverage(monkeypatch, runs, run_sd, family_sd, sets=200):
    """How often the two intervals hold the true difference, .03: (over runs and tasks, over families as well), of
    simulated differences of 14 families of 6 tasks."""
    monkeypatch.setattr(statistics, "NUM_RESAMPLES", 400)
    rng, families, inside = np.random.default_rng(0), np.repeat(np.arange(14), 6), np.zeros(2)
    for _ in range(sets):
        values = (0.03 + rng.normal(0, run_sd, (runs, 1)) + rng.normal(0, family_sd, 14)[families]
                  + rng.normal(0, 0.3, 84) + rng.normal(0, 0.3, (runs, 84)))
        for i, own in enumerate((None, families)):
            low, high = statistics.bootstrap_interval(values, own)
            inside[i] += low <= 0.03 <= high
    return inside / sets


def test_intervals_cover_what_they_claim_to(monkeypatch):
    assert statistics.bootstrap_interval([1.0] * 10) == [1.0, 1.0]
    plain, with_families = coverage(monkeypatch, runs=5, run_sd=0.03, family_sd=0)
    assert 0.9 <= plain <= 0.99 and 0.94 <= with_families
    plain, with_families = coverage(monkeypatch, runs=5, run_sd=0.03, family_sd=0.25)
    assert plain <= 0.85 and 0.92 <= with_families                   # tasks stand for their families: too narrow
    plain, _ = coverage(monkeypatch, runs=1, run_sd=0.08, family_sd=0)
    assert 0.47 <= plain <= 0.82                                     # one run: other seeds are left out
    few, many = (coverage(monkeypatch, runs=runs, run_sd=0.08, family_sd=0)[0] for runs in (2, 10))
    assert few <= 0.9 and many >= 0.93                               # two runs do not show how far runs differ


def test_intervals_over_families_where_every_task_states_one(tmp_path):
    tasks = [{**TASK, "problem_description": str(n), **({"family": n // 2} if n < 4 else {})} for n in range(5)]
    rows = [{**trajectory(str(n), GOOD if n < 2 else "0"), "task": task} for n,
            task in enumerate(tasks)]
    path, bad = write(tmp_path / "a", rows[:4]), write(tmp_path / "b", [{**row, "answer": "0"} for row in rows[:4]])
    printed = call(5, f"a={path}", f"b={bad}", "--baseline", "b", "--out", tmp_path / "report")
    metrics = metrics_of(tmp_path / "report")
    assert metrics["a"]["ci95_families"] == metrics["a"]["against_baseline"]["ci95_families"] == [0, 1]
    assert metrics["b"]["ci95_families"] == [0, 0] and "against_baseline" not in metrics["b"]
    table = ["             95 %, families drawn  each run",
             "a                  [0.000, 1.000]",
             "a against b        [0.000, 1.000]",
             "b                  [0.000, 0.000]"]
    assert "\n".join(table) in printed and "\n".join(table) in (tmp_path / "report" / "report.html").read_text()
    for name, own in (("one states none", rows), ("all the same", rows[:2])):
        printed = call(5, f"a={write(tmp_path / 'c', own)}", "--out", tmp_path / name)
        assert "families drawn" not in printed and "ci95_families" not in metrics_of(tmp_path / name)["a"]


def test_several_files_of_a_name_are_runs(tmp_path):
    rows = [[trajectory("x", answer), trajectory("y", GOOD)] for answer in (GOOD, "0", "0", "0")]
    paths = [write(tmp_path / f"{i}.jsonl", own) for i, own in enumerate(rows)]
    printed = call(5, f"a={paths[0]},{paths[1]}", f"b={paths[2]},{paths[3]}", "--baseline", "b",
                        "--out", tmp_path / "report")
    metrics = metrics_of(tmp_path / "report")
    assert metrics["a"]["runs"] == [1, 0.5] and metrics["a"]["success_rate"] == 0.75 and metrics["a"]["tasks"] == 2
    against = metrics["a"]["against_baseline"]
    assert against["runs"] == [0.5, 0]
    assert against.keys() == {"name", "difference", "n", "ci95", "runs"}           # no interval over the runs alone
    assert "a                               -  1.000 0.500" in printed.splitlines()
    assert "a against b                     -  0.500 0.000" in printed.splitlines()
    write(tmp_path / "other.jsonl", [trajectory("z", "0")])
    line = refused(5, f"a={paths[0]},{tmp_path / 'other.jsonl'}", "--out", tmp_path / "bad")
    assert line.endswith("other.jsonl: the runs of a name must have the same tasks")


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """05 on a right, a half right and a wrong answer with other logged rewards, against three wrong ones, as a user
    runs it: (its arguments, what it printed, its folder)."""
    folder = tmp_path_factory.mktemp("graded")
    a = write(folder / "a.jsonl", [trajectory("x", GOOD, reward=0.0), trajectory("y", HALF, reward=1.0),
                                   trajectory("z", BAD)])
    b = write(folder / "b.jsonl", [trajectory("x", BAD), trajectory("y", BAD), trajectory("z", BAD)])
    arguments = [f"a={a}", f"b={b}", "--baseline", "b", "--out", folder / "report"]
    return arguments, succeed("05_evaluate.py", *arguments), folder / "report"


def test_logged_rewards_are_not_trusted(graded):
    arguments, printed, out = graded
    metrics = metrics_of(out)["a"]
    assert metrics["n"] == 3 and metrics["success_rate"] == pytest.approx(1 / 3)
    assert metrics["tests_passed"] == 0.5 and metrics["mean_rounds"] == 1.0
    low, high = metrics["ci95"]
    assert low == 0.0 and 0.6 < high <= 1.0
    assert [row["reward"] for row in read(out / "scored" / "a.jsonl")] == [1.0, 0.5, 0.0]
    assert metrics["against_baseline"]["difference"] == pytest.approx(1 / 3)
    assert "against b" in printed and "+0.333" in printed
    assert "done already" in succeed("05_evaluate.py", *arguments)


def test_the_page_has_every_answer_with_its_failed_tests(graded):
    data = page_of(graded[2])
    assert [dialogue["answer"] for dialogue in data["dialogues"]] == [GOOD, HALF, BAD] + [BAD] * 3
    assert data["dialogues"][0].keys() == {"m", "t", "run", "sample", "reward", "rounds", "answer", "turns"}
    assert data["dialogues"][1]["failed"] == [{"call": "f(2)", "expected": "2", "got": "1"}]
    assert data["dialogues"][2]["failed"] == [{"call": f"f({n})", "expected": str(n), "got": "0"} for n in (1, 2)]


def test_an_answer_runs_once_and_a_turn_is_judged_once(tmp_path, monkeypatch, regression_critic):
    asked, run_all, kinds_of = [], Scorer.score_one, backend.turn_kinds
    monkeypatch.setattr(Scorer, "score_one", lambda scorer, children, key, answer: (
        asked.append(answer), run_all(scorer, children, key, answer))[1])
    monkeypatch.setattr(backend, "turn_kinds", lambda task, history: (
        asked.extend(turn["content"] for turn in history if turn["role"] == "assistant"), kinds_of(task, history))[1])
    answers = [GOOD, BAD]
    path = write(tmp_path / "a.jsonl", [trajectory(answer, answer) for answer in answers])
    call(5, f"a={path}", "--critic", regression_critic, "--out", tmp_path / "report")
    assert sorted(asked) == sorted([*answers, *(f"{backend.MARKER}\n{answer}" for answer in answers)])


def test_tasks_of_one_name_must_be_one_task_in_all_files(tmp_path):
    other = {**TASK, "ground_truth": "def f(n): return 2 * n"}
    rows = trajectory("1", "x"), trajectory("1", "x") | {"task": other}
    files = [write(tmp_path / name, [row]) for name, row in zip("ab", rows)]
    for flags in ([f"old={files[0]}", f"new={files[1]}"], [f"two={files[0]},{files[1]}"]):
        assert ': two tasks with different references have the "task_id" 1' in refused(
            5, *flags, "--out", tmp_path / "report")


def test_what_a_person_says_after_the_answer_changes_nothing(workspace, tmp_path):
    rows = read(workspace / "offline.jsonl")[:12]
    thanked = [{**row, "dialogue_history": [*row["dialogue_history"], {"role": "user", "content": "Thanks."}]}
               for row in rows]
    files = [write(tmp_path / name, some) for name, some in (("a.jsonl", rows), ("b.jsonl", thanked))]
    call(5, f"a={files[0]}", f"b={files[1]}", "--out", tmp_path / "report")
    metrics = metrics_of(tmp_path / "report")
    for key in ("all_known", "success_when_known", "forced_answers", "turns"):
        assert metrics["a"][key] == metrics["b"][key]


def test_other_candidates_are_another_evaluation(workspace, swept, tmp_path):
    candidates = shutil.copytree(swept, tmp_path / "candidates")
    flags = [f"a={workspace / 'offline.jsonl'}", "--candidates", candidates, "--out", tmp_path / "report"]
    call(5, *flags)
    assert "done already" in call(5, *flags)
    write(candidates / "pairs.jsonl", read(swept / "pairs.jsonl")[1:])
    assert "made with another" in refused(5, *flags)


def test_ungradeable_tests_are_reported(tmp_path):
    task = {**TASK, "ground_truth": "def f(n): return 1 // (n - 2)"}
    path = write(tmp_path / "a.jsonl", [{**trajectory("x", task["ground_truth"]), "task": task}])
    assert "a: 1 tests of 1 tasks cannot be graded" in call(5, f"a={path}", "--out", tmp_path / "report")
    assert metrics_of(tmp_path / "report")["a"]["tests_passed"] == 0.5


def test_a_lone_surrogate_stops_nothing(tmp_path):
    half = "a\ud800b"
    row = {**trajectory("x", f"def f(n): return n  # {half}"), "task_id": half,
           "task": {**TASK, "problem_description": half, "family": half}}
    row["dialogue_history"][0]["content"] = half
    path = write(tmp_path / "a.jsonl", [row, {key: value for key, value in row.items() if key != "task_id"}])
    call(5, f"a={path}", "--compat", "--export", "messages", "--out", tmp_path / "report")
    assert metrics_of(tmp_path / "report")["a"]["n"] == 2
    assert "a\\ud800b" in (tmp_path / "report" / "report.html").read_text()
    scored = read(tmp_path / "report" / "scored" / "a.jsonl")
    assert [own["dialogue_history"][0]["content"] for own in scored] == [half, half]


def test_a_tokenizer_reads_lone_surrogates(tiny):
    assert encode(tiny[1], "price\ud800?") == encode(tiny[1], "price??")


@pytest.mark.parametrize("where, broken", [(evaluate, "write_report"), (evaluate, "report_plots"),
                                           (evaluate, "page_data"), (statistics, "curve_lines")])
def test_metrics_are_written_before_everything_optional(tmp_path, monkeypatch, where, broken):
    def fail(*_, **__):
        raise RuntimeError("broken")
    monkeypatch.setattr(where, broken, fail)
    task = {**TASK, "facts": [{"topic": "t", "questions": [], "told": True, "matters": True}]}
    path = write(tmp_path / "a.jsonl", [{**trajectory("x", GOOD), "task": task}])
    with pytest.raises(RuntimeError):
        call(5, f"a@1={path}", "--out", tmp_path / "report")
    assert metrics_of(tmp_path / "report")["a@1"]["success_rate"] == 1
    assert read(tmp_path / "report" / "scored" / "a@1.jsonl")[0]["reward"] == 1
    assert not (tmp_path / "report" / "COMPLETED").exists()


def test_curve_table_by_hand():
    assert statistics.curve_lines(CURVES, "success_rate") == ["N           1      2     16",
                                                              "sweet   0.250  0.300  0.450",
                                                              "no <c>      -  0.300      -"]


def test_curve_files_from_rows_to_report(tmp_path):
    files = {"plain": [GOOD, GOOD], "sweet@1": [BAD, BAD], "sweet@8": [GOOD, BAD], "judge@8": [BAD, BAD]}
    for name, answers in files.items():
        more = {"best_of": 8} if name == "sweet@8" else {}
        write(tmp_path / name, [trajectory(str(i), answer, **more) for i, answer in enumerate(answers)])
    printed = call(5, *(f"{name}={tmp_path / name}" for name in files), "--out", tmp_path / "report")
    assert "N          1      8\nsweet  0.000  0.500\njudge      -  0.000\n" in printed
    metrics = metrics_of(tmp_path / "report")
    assert list(metrics) == list(files) and "costs" not in metrics["sweet@8"]
    assert {name: (metrics[name]["success_rate"], metrics[name]["ci95"]) for name in files if "@" in name} == {
        "sweet@1": (0, [0, 0]), "sweet@8": (0.5, [0, 1]), "judge@8": (0, [0, 0])}
    assert "curve-axes_1" in (tmp_path / "report" / "report.html").read_text()


def test_curve_files_that_do_not_fit_their_names(tmp_path):
    path = write(tmp_path / "a.jsonl", [trajectory("x", "1", best_of=4), trajectory("y", "1", best_of=4)])
    assert refused(5, f"sweet@8={path}", "--out", tmp_path / "out") == (
        'sweet@8: N = 8, but "best_of" in its file is 4')
    for name in ("sweet@0", "sweet@-4", "sweet@4.0", "sweet@04", "sweet@", "@4"):
        assert refused(5, f"{name}={path}", "--out", tmp_path / "out").startswith(f"{name}: a name with @ must be")
    assert not (tmp_path / "out").exists()


# --- costs

def record(path, costs, **args):
    """Write an args.json, as a stage keeps it."""
    path.parent.mkdir(exist_ok=True)
    content = {"stage": "x", "args": args, "inputs": {}}
    path.write_text(json.dumps({**content, **({"costs": costs} if costs else {})}))


def test_costs_of_an_agent_are_its_own_and_its_critic_s(tmp_path):
    """Not those of the evaluation's rollouts; a shipped model, a script or a server costs nothing."""
    record(tmp_path / "critic" / "args.json", {"trained_tokens": 2_000_000, "seconds": 120}, trajectories="t")
    record(tmp_path / "sweet" / "args.json", {"trained_tokens": 250_000, "generated_tokens": 750_000, "seconds": 30.0},
           critic=str(tmp_path / "critic"))
    record(tmp_path / "rft" / "args.json", {"trained_tokens": 1_000_000, "seconds": 18}, critic=None)
    files = {}
    for name, agent, critic in (("base", "models/tiny", None), ("rft", tmp_path / "rft", None),
                                ("sweet", tmp_path / "sweet", tmp_path / "critic"),
                                ("best", "http://host:80/v1#m", tmp_path / "critic"), ("judged", "script", "judge:m")):
        files[name] = write(tmp_path / f"{name}.jsonl", [trajectory("x", GOOD)])
        record(tmp_path / f"{name}.jsonl.args.json", {"generated_tokens": 99, "seconds": 5}, agent=str(agent),
               critic=critic and str(critic))
    printed = call(5, *(f"{name}={path}" for name, path in files.items()), "--costs", "--out", tmp_path / "report")
    table = "\n".join(["costs   M trained  M generated  minutes",
                       "base        0.000        0.000      0.0",
                       "rft         1.000        0.000      0.3",
                       "sweet       2.250        0.750      2.5",
                       "best        2.000        0.000      2.0",
                       "judged      0.000        0.000      0.0"])
    assert table in printed and table in (tmp_path / "report" / "report.html").read_text()
    assert metrics_of(tmp_path / "report")["sweet"]["costs"] == {
        "trained_tokens": 2_250_000, "generated_tokens": 750_000, "seconds": 150}


def test_costs_without_records_are_bad_input(tmp_path):
    path = write(tmp_path / "a.jsonl", [trajectory("x", "1")])
    flags = [f"a={path}", "--costs", "--out", tmp_path / "out"]
    assert refused(5, *flags) == (f"{path}: no args.json of a rollout beside it; --costs needs what 02_rollout.py "
                                  "keeps there")
    (tmp_path / "a.jsonl.args.json").write_text("{")
    assert f"{path}.args.json: not JSON" in refused(5, *flags) and not (tmp_path / "out").exists()


def test_bad_input_is_one_line(tmp_path):
    (tmp_path / "empty").write_text("")
    (tmp_path / "broken").write_text("{}\n")
    for name, message in (("missing", "no such file"), ("empty", "no rows"), ("broken", 'broken:1: missing "task"')):
        line = refused(5, f"a={tmp_path / name}", "--out", tmp_path / "out")
        assert message in line and str(tmp_path / name) in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [["a"], ["=b"], ["a=x", "a=y"], ["a=x", "--baseline", "b"], ["a/b=x"]])
def test_bad_arguments_end_with_status_2(tmp_path, arguments):
    with pytest.raises(SystemExit) as error:
        evaluate.main([*arguments, "--out", str(tmp_path / "out")])
    assert error.value.code == 2


# --- ranks

def test_ranks_and_their_correlation_by_hand():
    assert statistics.average_ranks([3, 1, 3, 0]) == [2.5, 1, 2.5, 0]
    assert statistics.rank_correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert statistics.rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert statistics.rank_correlation([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    assert statistics.rank_correlation([1, 1, 2], [0, 1, 1]) == pytest.approx(0.5)
    assert statistics.rank_correlation([1, 1, 1], [1, 2, 3]) == 0


@pytest.fixture(scope="module")
def regression_critic(workspace, tmp_path_factory):
    return make_regression_critic(workspace, tmp_path_factory)


# --- turn advantages, and SWEET's candidates

def load(folder, tokenizer):
    return common.load_critic(common.read_critic(folder, tokenizer, backend), common.load_whole("cpu"))


@pytest.fixture(scope="module")
def value_critic(workspace, tmp_path_factory):
    folder = tmp_path_factory.mktemp("value") / "critic"
    succeed("03_train_critic.py", "--trajectories", workspace / "offline.jsonl", "--model", "models/tiny", "--lr", 1e-3,
            "--max-steps", 2, "--head", "value", "--held-out-frac", 0, "--out", folder)
    return folder


@pytest.fixture(scope="module", params=["critic", "regression_critic", "value_critic"])
def trained(request, tiny):
    """A critic of each kind after a few steps, loaded."""
    return load(request.getfixturevalue(request.param), tiny[1])


def test_the_advantage_of_a_turn_is_the_score_of_actions(workspace, trained, tiny):
    rows = common.read_trajectories(workspace / "offline.jsonl")[:6]
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
    rows = common.read_trajectories(workspace / "offline.jsonl")[:8]
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
    succeed("04_train_policy.py", "--method", "sweet", "--trajectories", workspace / "offline.jsonl", "--model",
            "models/tiny", "--critic", regression_critic, "--data-frac", 0.1, "--num-candidates", 4,
            "--max-new-tokens", 100, "--max-steps", 1, "--lr", 1e-4, "--out", folder)
    return folder


@pytest.fixture(scope="module")
def page_with_advantages(workspace, regression_critic, swept, tmp_path_factory):
    """05 with a critic and candidates, on the two halves "a" and "b" of the dialogues: (its folder, its metrics, the
    data of its page)."""
    folder, rows = tmp_path_factory.mktemp("advantages"), read(workspace / "offline.jsonl")
    halves = [f"{name}={write(folder / name, half)}" for name, half in (("a", rows[:36]), ("b", rows[36:]))]
    out = folder / "report"
    call(5, *halves, "--critic", regression_critic, "--candidates", swept, "--out", out)
    return out, metrics_of(out), page_of(out)


def test_the_page_has_all_dialogues_with_the_advantages_of_their_turns(page_with_advantages, regression_critic):
    _, _, data = page_with_advantages
    assert data["methods"] == ["a", "b"] and data["critic"] == str(regression_critic) and len(data["dialogues"]) == 72
    for dialogue in data["dialogues"]:
        agent = [turn for turn in dialogue["turns"] if turn["who"] == "agent"]
        assert dialogue["advantage"] == pytest.approx(sum(turn["advantage"] for turn in agent), abs=1e-5)
        assert dialogue["rounds"] == len(agent)


def test_the_page_has_the_candidates_at_the_turns_that_they_are_of(page_with_advantages, swept):
    _, _, data = page_with_advantages
    scored, pairs = read(swept / "scored.jsonl"), read(swept / "pairs.jsonl")
    assert len(data["states"]) == len(scored)
    for state, row in zip(data["states"], scored):
        assert [c["advantage"] for c in state["candidates"]] == pytest.approx(row["advantages"], abs=1e-5)
        assert [c["text"] for c in state["candidates"]] == [c["text"] for c in row["candidates"]]
        turn = data["dialogues"][state["d"]]["turns"][2 * row["turn"] + 1]       # of the very dialogues that are shown
        assert data["states"][turn["state"]] == state and turn["who"] == "agent"
    assert sum(c["chosen"] for s in data["states"] for c in s["candidates"]) == len(pairs)
    assert sum(c["rejected"] for s in data["states"] for c in s["candidates"]) == len(pairs)


def test_the_kinds_of_candidates_are_counted(page_with_advantages, swept):
    """Every candidate once; the ranks of all have the mean 1/2; a pair has one chosen and one rejected."""
    page, rows = (page_with_advantages[0] / "report.html").read_text(), read(swept / "scored.jsonl")
    table = re.search(r"what the pairs say.*?</pre>", page, re.DOTALL)[0]
    numbers = [[float(cell) for cell in line.split()[-4:]] for line in table.removesuffix("</pre>").splitlines()[1:]]
    number, ranks, chosen, rejected = np.array(numbers).T
    assert sum(number) == sum(len(row["candidates"]) for row in rows)
    assert sum(number * ranks) / sum(number) == pytest.approx(0.5, abs=0.01)
    assert sum(chosen) == sum(rejected) == len(read(swept / "pairs.jsonl"))


def test_the_page_says_how_far_the_critic_agrees_with_the_oracles(page_with_advantages, swept):
    out, _, _ = page_with_advantages
    agreement, pairs = json.loads((out / "agreement.json").read_text()), read(swept / "pairs.jsonl")
    assert agreement.keys() == {"oracle", "oracle-patient"} and agreement["oracle"]["num_pairs"] == len(pairs)
    page = (out / "report.html").read_text()
    assert f"{agreement['oracle']['rank_correlation']:+.3f}" in page


@pytest.mark.parametrize("name", ["a", "b"])
def test_the_page_shows_the_numbers_of_the_metrics(page_with_advantages, name):
    out, metrics, _ = page_with_advantages
    page = (out / "report.html").read_text()
    assert f"{metrics[name]['success_rate']:.3f}" in page
    for kind in metrics[name]["turn_advantages"]["by_kind"].values():
        mean = f"{kind['mean']:+.3f}".replace("-", "\u2212")
        assert f"{mean} <small>({kind['n']:,})</small>" in page


def test_a_page_without_critic_and_candidates(workspace, tmp_path):
    rows = read(workspace / "offline.jsonl")[:6]
    for row in rows:
        del row["agent"]                                             # no folder, no metrics.jsonl
    call(5, f"a={write(tmp_path / 'a.jsonl', rows)}", "--out", tmp_path / "report")
    data = page_of(tmp_path / "report")
    assert data["critic"] is None and data["states"] == [] and "agreement.json" not in str(list(tmp_path.rglob("*")))
    assert not any("advantage" in turn for dialogue in data["dialogues"] for turn in dialogue["turns"])


def test_a_bad_critic_or_candidates_are_one_line(workspace, swept, tmp_path):
    flags = [f"a={workspace}/offline.jsonl", "--out", tmp_path / "out"]
    assert "no critic.json" in refused(5, *flags, "--critic", workspace)
    (tmp_path / "seeing").mkdir()
    (tmp_path / "seeing" / "critic.json").write_text(json.dumps({"visual": True, **critic_note("value")}))
    assert refused(5, *flags, "--critic", tmp_path / "seeing") == (
        f"{tmp_path / 'seeing'}: a critic that sees cannot rank functions, which have nothing to see")
    assert refused(5, *flags, "--candidates", workspace) == f"{workspace / 'scored.jsonl'}: no such file"
    alone = tmp_path / "alone"
    alone.mkdir()
    rows, pairs = read(swept / "scored.jsonl"), read(swept / "pairs.jsonl")
    path = write(alone / "scored.jsonl", rows)
    assert refused(5, *flags, "--candidates", alone) == f"{alone / 'pairs.jsonl'}: no such file"
    write(alone / "pairs.jsonl", [{**pairs[0], "turn": 99}])
    assert refused(5, *flags, "--candidates", alone) == (
        f"{alone / 'pairs.jsonl'}: a pair of task {pairs[0]['task_id']}, turn 99, is of no candidates in {path}")
    write(path, [{**rows[0], "advantages": [0.0]}])
    assert '"candidates" and "advantages" differ in number' in refused(5, *flags, "--candidates", alone)
    write(path, [{**row, "task": {"problem_description": "?", "ground_truth": "<p>"}} for row in rows])
    write(alone / "pairs.jsonl", pairs)
    assert "a task of another domain" in refused(5, *flags, "--candidates", alone)
    assert not (tmp_path / "out").exists()


def test_messages_of_another_trainer_get_advantages(workspace, regression_critic, tmp_path):
    """Without ids it is what the same dialogues have with them: docs/fork.md, whose lines of Python run, too."""
    rows = read(workspace / "offline.jsonl")[:6]
    plain = [{**{key: row[key] for key in ("task", "answer", "max_rounds")}, "dialogue_history": [
        {key: turn[key] for key in ("role", "content")} for turn in row["dialogue_history"]]} for row in rows]
    exported = {}
    for name, own in (("ids", rows), ("plain", plain)):
        path = write(tmp_path / f"{name}.jsonl", own)
        printed = call(5, f"a={path}", "--critic", regression_critic, "--export", "messages", "--out",
                            tmp_path / name)
        exported[name] = [row["advantages"] for row in read(tmp_path / name / "export" / "a.jsonl")]
    assert f"agent turns: {sum(row['num_rounds'] for row in rows)} rendered again" in printed
    assert [len(own) for own in exported["ids"]] == [row["num_rounds"] for row in rows]
    ours, theirs = sum(exported["ids"], []), sum(exported["plain"], [])
    assert any(abs(advantage) > 1e-3 for advantage in ours) and theirs == pytest.approx(ours, abs=1e-5)

    code = re.search(r"(?s)```python\n(import common\n.*?)```", (ROOT / "docs" / "fork.md").read_text())[1]
    names = {}
    code = code.replace("out/base.jsonl", str(tmp_path / "ids.jsonl")).replace("out/critic", str(regression_critic))
    exec(code, names)
    assert len(names["batch"]) == 6                                  # the template of models/tiny only appends
    for found, row, own in zip(names["batch"], rows, exported["ids"]):
        agent = [turn for turn in row["dialogue_history"] if turn["role"] == "assistant"]
        assert [token for token, mask in zip(found["ids"], found["mask"]) if mask] == sum(
            (turn["output_ids"] for turn in agent), [])
        assert [advantage for advantage, mask in zip(found["advantages"], found["mask"]) if mask] == pytest.approx(
            [advantage for turn, advantage in zip(agent, own) for _ in turn["output_ids"]], abs=1e-5)
        assert not any(advantage for advantage, mask in zip(found["advantages"], found["mask"]) if not mask)
