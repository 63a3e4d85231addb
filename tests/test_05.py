"""05_evaluate.py: numbers by hand, intervals, fresh scores, report, bad input."""
import json

import numpy as np
import pytest

import common
from conftest import ROOT, read, refused, stage, succeed

evaluate = stage(5)
TASK = {"problem_description": "?", "ground_truth": "def f(n):\n    return n", "test_cases": {"a": "f(1)", "b": "f(2)"}}


def trajectory(task, answer, **more):
    return {"task_id": task, "task": TASK, "answer": answer, "dialogue_history": [
        {"role": "user", "content": "?"}, {"role": "assistant", "content": f"{common.MARKER}\n{answer}"}], **more}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_task_means_and_paired_difference_by_hand():
    ours = [{"task_id": "a", "reward": 1}, {"task_id": "a", "reward": 0.5}, {"task_id": "b", "reward": 1}]
    theirs = [{"task_id": "a", "reward": 0}, {"task_id": "b", "reward": 1}, {"task_id": "c", "reward": 1}]
    assert evaluate.task_means(ours, evaluate.success) == {"a": 0.5, "b": 1.0}
    assert evaluate.task_means(ours, lambda t: t["reward"]) == {"a": 0.75, "b": 1.0}
    result = evaluate.paired_difference(ours, theirs)
    assert (result["difference"], result["n"]) == (0.25, 2)
    assert evaluate.paired_difference(ours, [{"task_id": "z", "reward": 1}]) is None


def test_bootstrap_interval_covers_as_promised():
    rng = np.random.default_rng(0)
    samples = rng.binomial(1, 0.3, size=(200, 150))
    inside = 0
    for sample in samples:
        low, high = evaluate.bootstrap_interval(sample)
        inside += low <= 0.3 <= high
    assert 0.90 <= inside / 200 <= 0.99
    assert evaluate.bootstrap_interval([1.0] * 10) == [1.0, 1.0]


def test_logged_rewards_are_not_trusted(tmp_path):
    good, half, bad = "def f(n): return n", "def f(n): return 1", "def f(n): return 0"
    a = write(tmp_path / "a.jsonl", [trajectory("x", good, reward=0.0), trajectory("y", half, reward=1.0), trajectory("z", bad)])
    b = write(tmp_path / "b.jsonl", [trajectory("x", bad), trajectory("y", bad), trajectory("z", bad)])
    printed = succeed("05_evaluate.py", f"a={a}", f"b={b}", "--baseline", "b", "--out", tmp_path / "report")
    metrics = json.loads((tmp_path / "report" / "metrics.json").read_text())
    assert metrics["a"]["n"] == 3 and metrics["a"]["success_rate"] == pytest.approx(1 / 3)
    assert metrics["a"]["tests_passed"] == 0.5 and metrics["a"]["mean_rounds"] == 1.0
    low, high = metrics["a"]["ci95"]
    assert low == 0.0 and 0.6 < high <= 1.0
    assert metrics["a"]["against_baseline"]["difference"] == pytest.approx(1 / 3)
    assert [row["reward"] for row in read(tmp_path / "report" / "scored" / "a.jsonl")] == [1.0, 0.5, 0.0]
    assert "against b" in printed and "+0.333" in printed
    page = (tmp_path / "report" / "report.html").read_text()
    assert "def f(n): return 1" in page and "<script" not in page
    assert "done already" in succeed("05_evaluate.py", f"a={a}", f"b={b}", "--baseline", "b", "--out", tmp_path / "report")


def test_ungradeable_tests_are_reported(tmp_path):
    task = {**TASK, "ground_truth": "def f(n): return 1 // (n - 2)"}
    path = write(tmp_path / "a.jsonl", [{**trajectory("x", task["ground_truth"]), "task": task}])
    assert "1 tests of 1 tasks cannot be graded" in succeed("05_evaluate.py", f"a={path}", "--out", tmp_path / "report")
    assert json.loads((tmp_path / "report" / "metrics.json").read_text())["a"]["tests_passed"] == 0.5


def test_answers_cannot_write_into_the_report(tmp_path):
    path = write(tmp_path / "a.jsonl", [trajectory("x", "<script>alert(1)</script>")])
    succeed("05_evaluate.py", f"a={path}", "--out", tmp_path / "report")
    assert "<script" not in (tmp_path / "report" / "report.html").read_text()


def test_gates_of_the_shipped_base_model(workspace, tmp_path):
    printed = succeed("05_evaluate.py", f"base={workspace / 'offline.jsonl'}", "--gates", ROOT / "tests" / "tiny", "--out",
                      tmp_path / "report")
    table = {line[:22].strip(): [float(x) for x in line[22:].split()] for line in printed.splitlines()
             if line.startswith(("needed", "idle", "right answer", "wrong answer"))}
    assert table["right answer at once"][2] > table["right answer at once"][1] + 3            # c makes it likelier …
    assert table["wrong answer at once"][2] < table["right answer at once"][2] - 3            # … than another one
    assert table["idle"][2] < table["idle"][1]
    metrics = json.loads((tmp_path / "report" / "metrics.json").read_text())["base"]
    assert 0.15 <= metrics["success_rate"] <= 0.5 and metrics["success_when_known"] > 0.7


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
