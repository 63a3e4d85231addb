"""lib/report/: numbers of curves, tables and turn advantages by hand; the data of the page, which stays small; rows of
05 --export messages. test_report_page.py opens pages."""
import collections
import json
import math
import re
import time
import types
import xml.etree.ElementTree as ElementTree

import pytest
from matplotlib import rc_context

from colbench import backend
from conftest import stage, write
from lib.report import page as report
from lib.report import plots
from lib.report.export import as_messages
from lib.report.page import page_data, write_report
from lib.report.turn_advantages import advantage_summary, kind_lines, read_states
from lib.statistics import aligned, interval, measure_turns

SVG = "{http://www.w3.org/2000/svg}"


def test_tables_by_hand():
    assert aligned(["", "n", "95 %"], [["base", "7", "[0, 1]"], ["a long name", "1,200", ""]]) == [
        "                 n    95 %",
        "base             7  [0, 1]",
        "a long name  1,200"]
    assert aligned(["x"], []) == ["x"]
    assert interval([0.1234, 0.5]) == "[0.123, 0.500]" and interval([-0.25, 0.5], "+") == "[-0.250, +0.500]"


def test_training_curves_are_smoothed_by_hand():
    def points(values):
        rows = [{"step": step, "loss": value} for step, value in enumerate(values)] + [{"step": 99}]
        shares, means = plots.history_points(rows, "loss")
        return [[round(99 * share) for share in shares], list(means)]
    assert points([1, 2, 3]) == [[0, 1, 2], [1, 2, 3]] and points([]) == [[], []]
    assert points([0, 2] * 20) == [list(range(1, 40)), [1] * 39]     # the mean of two


def point(rate, low, high):
    return {"success_rate": rate, "ci95": [low, high]}


CURVES = {"sweet": {1: point(0.25, 0.2, 0.3), 2: point(0.3, 0.25, 0.35), 16: point(0.45, 0.38, 0.5)},
          "no <c>": {2: point(0.3, 0.25, 0.35)}}


def test_curves_have_labels_points_and_error_bars_in_colours_that_colour_blind_people_can_tell_apart():
    with rc_context(plots.STYLE):
        curve = plots.curve_figure(CURVES, "success_rate", "N")
        svg = plots.as_svg(curve, "curve")
    texts = [text.text for text in ElementTree.fromstring(svg).iter(SVG + "text")]
    assert texts[:4] == ["1", "2", "16", "N"] and texts[-3:] == ["success rate", "sweet", "no <c>"]
    [axes] = curve.axes
    points = [line.get_xydata().round(4).tolist() for line, _, _ in axes.containers]
    assert points == [[[0.99, 0.25], [1.98, 0.3], [15.84, 0.45]], [[2.02, 0.3]]]           # side by side: 1 % apart
    bars = [[bar[:, 1].round(4).tolist() for bar in bars.get_segments()] for _, _, [bars] in axes.containers]
    assert bars == [[[0.2, 0.3], [0.25, 0.35], [0.38, 0.5]], [[0.25, 0.35]]]
    assert [line.get_color() for line, _, _ in axes.containers] == ["#0072B2", "#D55E00"]
    assert len(set(plots.COLOURS)) == 6


HOSTILE = """</script><script>alert(1)</script><img src=x onerror='alert(2)'>"&amp;$\\frac$\u2028"""


def write_page(folder, data, **variables):
    """write_report with little but the data; returns the data of the page."""
    values = {"metrics": {}, "metric": "success_rate", "metric_heading": "m", "headings": [], "rows": [], "notes": [],
              "tables": {}, "plots": [], "advantages": None, "forms": {}} | variables
    write_report(folder / "r.html", data, folder / "images", **values)
    return data_of(folder / "r.html")


def data_of(path):
    """The data of a page, in which no text is markup and no number is NaN or infinite."""
    page = path.read_text(encoding="utf-8")
    assert page.count("<script") == page.count("</script") == 2 and "<img" not in page
    return json.loads(re.search('id="data">([^<>&\u2028]*)</script>', page)[1], parse_constant=pytest.fail)


def test_plots_take_the_page_s_colour_and_have_ids_of_their_own():
    plot = plots.report_plots("success_rate", CURVES, {HOSTILE: [{"step": 1, "loss": 0.5, "nll": 0.25}]})
    both = "".join(svg for _, svg, _ in plot)
    assert len(plot) == 2 and ElementTree.fromstring(f"<p>{both}</p>") is not None
    ids = re.findall(r' id="([^"]*)"', both)
    assert len(ids) == len(set(ids)) and set(re.findall(r'(?:href="|url\()#([\w-]+)', both)) <= set(ids)
    assert set(re.findall("#[0-9a-f]{6}", both)) <= {colour.lower() for colour in plots.COLOURS}
    assert both.count("currentColor") > 2


def test_screenshots_of_this_run_are_in_the_page(tmp_path, monkeypatch):
    (tmp_path / "images").mkdir()
    pytest.importorskip("PIL.Image").new("RGB", (400, 4000), "red").save(tmp_path / "images" / "a.png")
    row = made_row("t") | {"image": "../images/a.png", "reference_image": "../images/a.png", "render_fault": "slow"}
    row["dialogue_history"][1]["render_fault"] = HOSTILE
    assert write_page(tmp_path, page_data({"m": [row]}, backend, {}))["images"] == {}        # a file's own keys
    monkeypatch.setattr(backend, "SCORE_KEYS", (*backend.SCORE_KEYS, "image"))               # as of a domain that draws
    data = write_page(tmp_path, page_data({"m": [row]}, backend, {}))
    [name] = data["images"]
    assert name == data["tasks"][0]["image"] == data["dialogues"][0]["image"]
    url = data["images"][name]
    assert url.startswith("data:image/jpeg;base64,") and len(url) < report.IMAGE_BYTES
    assert data["dialogues"][0]["fault"] == "slow" and data["dialogues"][0]["turns"][1]["fault"] == HOSTILE


def test_turn_advantages_by_hand():
    task = {"facts": [{"topic": "the size", "questions": (), "replies": ("It is 2.",), "told": False, "matters": True}],
            "ground_truth": "def f(): return 2"}
    history = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "What is the size?"},
               {"role": "user", "content": "It is 2."}, {"role": "assistant", "content": "Really?"}]
    assert backend.facts(task, history[:1]) == [("It is 2.", False)]
    assert backend.facts(task, history) == [("It is 2.", True)]
    rows = [{"task": task, "dialogue_history": history, "reward": 1, "advantages": own}
            for own in ([0.5, -0.25], [0.25, 0.0], None)]
    shares = measure_turns(rows, backend)
    assert shares["turns"] == {"needed": 0.5, "vague": 0.5} and shares["all_known"] == 1
    found = advantage_summary(rows)
    first, second = {"n": 2, "mean": 0.375}, {"n": 2, "mean": -0.125}
    assert found == {"mean": 0.25, "too_long": 1, "by_kind": {"needed": first, "vague": second},
                     "by_round": {"1": first, "2": second}}
    many = advantage_summary([{"kinds": [None] * 12, "advantages": [0.5] * 12}])
    assert list(many["by_round"]) == list(map(str, range(1, 13))) and many["by_kind"] == {}


def test_kinds_of_candidates_by_hand():
    domain = types.SimpleNamespace(turn_kind=lambda task, history, text: text[0], shown=lambda message: message,
                                   all_known=lambda task, history: bool(history))
    candidates = [{"text": text, "chosen": chosen, "rejected": rejected} for text, chosen, rejected in (
        ("a1", 2, 0), ("<think>b</think>a2", 0, 1), ("b", 0, 1))]
    states = [{"task": {}, "history": [], "candidates": candidates, "advantages": [3, 2, 2]},
              {"task": {}, "history": ["x"], "candidates": [{**candidates[2], "rejected": 0}], "advantages": [0.5]}]
    assert kind_lines(states, domain) == [
        "what the pairs say     candidates  rank  chosen  rejected",
        "not all known       a           2  0.62       2         1",
        "not all known       b           1  0.25       0         1",
        "all known           b           1  0.00       0         0"]
    assert [candidate["kind"] for candidate in candidates] == ["a", "a", "b"]
    domain.turn_kind = lambda task, history, text: None
    assert kind_lines(states, domain) == []


# ---------------------------------------------------------------------------------------------------------------------
# 05 on hostile files

TASK = {"problem_description": "?", "ground_truth": "def f(n):\n    return n", "test_cases": {"a": "f(1)"}}


def made_row(task_id, length=3):
    """A scored row, whose first agent turn has so many characters."""
    row = {"task_id": task_id, "sample": 0, "task": dict(TASK), "answer": "", "reward": 0.0, "dialogue_history": [
        {"role": "user", "content": "?"}, {"role": "assistant", "content": "z" * length},
        {"role": "user", "content": "!"}, {"role": "assistant", "content": "So."}]}
    measure_turns([row], backend)
    return row


def hostile_rows():
    """Rows whose keys are not 05's own, and with texts and names that are markup, very long or no text."""
    rows = [made_row(task_id) for task_id in ("x", HOSTILE, "\ud800", "a\0b\x1b[31m", "y", "z")]
    rows[0] |= {"failed": [{"call": HOSTILE}], "kinds": [HOSTILE], "known": HOSTILE, "sample": -1,
                "answer": HOSTILE}
    for row, family in zip(rows, (HOSTILE, "f" * 10 ** 6, "__proto__", 7)):
        row["task"]["family"] = family
    for row, request, said in ((rows[4], "long " * 10 ** 5, "\0\x1b\u202e\ud800"),
                               (rows[5], "</script><!--<script>", "y" * 10 ** 6)):
        row["task"]["problem_description"] = request
        row["dialogue_history"][1] |= {"content": said, "render_fault": HOSTILE}
    return rows


def test_05_makes_a_page_of_hostile_fields_and_makes_it_anew_as_it_was(tmp_path, monkeypatch):
    async def score(self, pairs, explain=False):
        return [{"reward": 0.0, "tests": [False], "faults": ["wrong value"], "failed": [
            {"call": answer, "expected": answer, "got": None, "said": answer}]} for _, answer in pairs]
    monkeypatch.setattr(backend.Environment, "score", score)
    write(tmp_path / "a.jsonl", hostile_rows())
    path, flags = tmp_path / "out" / "report.html", [f"a={tmp_path / 'a.jsonl'}", "--out", str(tmp_path / "out")]
    stage(5).main(flags)
    page, data = path.read_text(encoding="utf-8"), data_of(path)
    assert len(page.encode()) <= 1_000_000
    assert len(data["dialogues"]) == len(data["tasks"]) == 6 and data["images"] == {}
    assert all(len(dialogue["turns"]) == 4 for dialogue in data["dialogues"])
    assert "05_evaluate.py a=" in page and time.strftime("%Y-%m-%d)") in page
    (tmp_path / "out" / "COMPLETED").unlink()                       # as a run that was killed
    path.unlink()
    stage(5).main(flags)
    assert path.read_text(encoding="utf-8") == page


def test_an_advantage_that_no_browser_reads_is_left_out(tmp_path):
    row = made_row("x") | {"advantages": [math.nan, 0.5]}
    [dialogue] = write_page(tmp_path, page_data({"a": [row]}, backend, {}))["dialogues"]
    assert [turn.get("advantage") for turn in dialogue["turns"]] == [None, None, None, 0.5]


STATE = {"task_id": "x", "sample": 0, "turn": 0, "task": TASK, "history": [{"role": "user", "content": "?"}],
         "candidates": [{"text": "a", "ids": [1], "ended": True}], "advantages": [0.5]}


def test_states_get_their_pairs(tmp_path):
    """By the ids of the candidates, of equal ones the first."""
    candidates = [{"text": "a", "ids": [number], "ended": True} for number in (1, 2, 2)]
    write(tmp_path / "scored.jsonl", [STATE | {"candidates": candidates}])
    write(tmp_path / "pairs.jsonl", 2 * [STATE | {"chosen": {"ids": [2]}, "rejected": {"ids": [1]}}])
    [state] = read_states(tmp_path)
    assert [(one["chosen"], one["rejected"]) for one in state["candidates"]] == [(0, 2), (2, 0), (0, 0)]


# ---------------------------------------------------------------------------------------------------------------------
# a page that would be too large

MANY, FEW = [f"t{i}" for i in range(60)], [f"few{i}" for i in range(5)]


def shown_of(files):
    """The page's data of {name: ids of tasks}, and how many dialogues of each method and task are in them."""
    rows = {name: [made_row(task_id, length=300) for task_id in task_ids] for name, task_ids in files.items()}
    data = page_data(rows, backend, {})
    shown = [(data["methods"][one["m"]], data["tasks"][one["t"]]["id"]) for one in data["dialogues"]]
    return data, collections.Counter(shown)


@pytest.mark.parametrize("files", [
    {"a": MANY, "b": MANY[::-1], "c": MANY}, {"a": MANY, "b": FEW}, {"a": MANY[:20] * 4, "b": MANY[:20] * 4}])
def test_what_does_not_fit_is_left_out_by_whole_tasks(monkeypatch, files):
    monkeypatch.setattr(report, "MAX_BYTES", 40_000)
    data, shown = shown_of(files)
    tasks = {task for _, task in shown}
    assert 15_000 < len(json.dumps(data["dialogues"])) + len(json.dumps(data["tasks"])) <= 40_000
    assert 30 < shown.total() < sum(map(len, files.values()))
    assert shown == {(name, task): own.count(task) for name, own in files.items() for task in tasks if task in own}
    num_tasks = len(set().union(*files.values()))
    assert data["left_out"] == (f"shown are the dialogues of {len(tasks)} of {num_tasks} tasks, as the page holds "
                                "about 0.04 MB of them; scored/ has all")
    assert shown_of({name: task_ids[::-1] for name, task_ids in files.items()})[1] == shown


def test_long_texts_are_cut_and_many_states_thinned_out(monkeypatch):
    row = made_row("t", length=report.MAX_TEXT + 1_000)
    candidate = {"text": "x", "ids": [1], "ended": True, "kind": None, "chosen": 0, "rejected": 0}
    states = [{**STATE, "task_id": f"t{number}", "candidates": [candidate]} for number in range(250)]
    data = page_data({"m": [row]}, backend, {}, states)
    assert data["dialogues"][0]["turns"][1]["text"] == "z" * report.MAX_TEXT + " … [1,000 more characters]"
    shown = [data["tasks"][state["t"]]["id"] for state in data["states"]]
    assert shown == [f"t{number}" for number in range(0, 250, 3)] and data["left_out"] is None


# ---------------------------------------------------------------------------------------------------------------------
# 05 --export messages

def test_advantages_go_with_the_turns():
    trajectory = {"task_id": "x", "run": 2, "sample": 1, "reward": 1, "kinds": ["needed"], "advantages": [0.5],
                  "dialogue_history": [{"role": "user", "content": "?"},
                                       {"role": "assistant", "content": "a", "truncated": True},
                                       {"role": "user", "content": "b"}]}
    row = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "?"},
                        {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}],
           "method": "n", "task_id": "x", "run": 2, "sample": 1, "reward": 1.0, "advantage": 0.5, "advantages": [0.5],
           "kinds": ["needed"]}
    assert as_messages("n", trajectory, "s") == row
    assert as_messages("n", trajectory | {"advantages": None}, "s") == row | {"advantage": None, "advantages": [None]}
