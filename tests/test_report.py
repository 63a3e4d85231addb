"""lib/report/: numbers of curves and turn advantages by hand; the data of the page, which stays small; rows of
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
from test_report_page import write as write_page

from colbench import backend
from conftest import FUNCTION, stage, turns, write
from lib.report import page as report
from lib.report import plots
from lib.report.export import as_messages
from lib.report.page import page_data
from lib.report.turn_advantages import advantage_summary, kind_lines, read_states
from lib.statistics import measure_turns


def test_training_curves_are_smoothed_by_hand():
    def points(values):
        rows = [{"step": step, "loss": value} for step, value in enumerate(values)] + [{"step": 99}]
        shares, means = plots.history_points(rows, "loss")
        return [[round(99 * share) for share in shares], list(means)]
    assert points([1, 2, 3]) == [[0, 1, 2], [1, 2, 3]] and points([]) == [[], []]
    assert points([0, 2] * 20) == [list(range(1, 40)), [1] * 39]     # the mean of two


def texts_of(svg):
    return [text.text for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_training_has_a_panel_a_number_and_unlike_losses_have_panels_of_their_own():
    """So that those of a likelihood do not flatten those of preferences; every axis has the losses themselves."""
    histories = {"rft": [{"step": 1, "loss": 20.0, "nll": 2}, {"step": 2, "loss": 10.0, "nll": 1}],
                 "sweet": [{"step": step, "loss": loss, "acc": 0.5} for step, loss in ((1, 0.7), (2, 0.63))],
                 "mtdpo": [{"step": 1, "loss": 1.9}, {"step": 2, "loss": -0.1}], "empty": []}
    with rc_context(plots.STYLE):
        *panels, legend = map(texts_of, plots.training_panels(histories))
    assert [texts[-1] for texts in panels] == ["loss (empty)", "loss (sweet, mtdpo)", "loss (rft)",
                                               *plots.PANELS.values()]
    assert "20" in panels[2] and "1.5" in panels[1] and "20" not in panels[1]
    assert legend == ["rft (loss 20 to 10)", "sweet (loss 0.7 to 0.63)", "mtdpo (loss 1.9 to -0.1)", "empty"]


def test_rewards_are_shares_of_the_dialogues_on_one_scale():
    with rc_context(plots.STYLE):
        panels = plots.reward_panels({"few": [0.0, 0.05, 0.5, 1.0], "all": [1.0]})
    texts = list(map(texts_of, panels))
    assert [text[-1] for text in texts] == ["few", "all"]
    assert texts[0][:-1] == texts[1][:-1] and {"0.0", "1.0", "reward"} <= set(texts[0])


HOSTILE = """</script><script>alert(1)</script><img src=x onerror='alert(2)'>"&amp;$\\frac$\u2028"""


def test_plots_have_labels_points_and_error_bars_in_colours_that_colour_blind_people_can_tell_apart():
    """In a page they take its colour and have ids of their own."""
    def point(rate, low, high):
        return {"success_rate": rate, "ci95": [low, high]}
    curves = {"sweet": {1: point(0.25, 0.2, 0.3), 2: point(0.3, 0.25, 0.35), 16: point(0.45, 0.38, 0.5)},
              "no <c>": {2: point(0.3, 0.25, 0.35)}}
    with rc_context(plots.STYLE):
        curve = plots.curve_figure(curves, "success_rate", "N")
        svg = plots.as_svg(curve, "curve")
    texts = [text.text for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert texts[:4] == ["1", "2", "16", "N"] and texts[-3:] == ["success rate", "sweet", "no <c>"]
    [axes] = curve.axes
    points = [line.get_xydata().round(4).tolist() for line, _, _ in axes.containers]
    assert points == [[[0.99, 0.25], [1.98, 0.3], [15.84, 0.45]], [[2.02, 0.3]]]           # side by side: 1 % apart
    bars = [[bar[:, 1].round(4).tolist() for bar in bars.get_segments()] for _, _, [bars] in axes.containers]
    assert bars == [[[0.2, 0.3], [0.25, 0.35], [0.38, 0.5]], [[0.25, 0.35]]]
    assert [line.get_color() for line, _, _ in axes.containers] == ["#0072B2", "#D55E00"]
    assert len(set(plots.COLOURS)) == 6

    plot = plots.report_plots("success_rate", curves, {HOSTILE: [{"step": 1, "loss": 0.5, "nll": 0.25}]},
                              {HOSTILE: [0.5, 1.0]})
    both = "".join(svg for _, svg, _ in plot)
    assert len(plot) == 3 and ElementTree.fromstring(f"<p>{both}</p>") is not None
    ids = re.findall(r' id="([^"]*)"', both)
    assert len(ids) == len(set(ids)) and set(re.findall(r'(?:href="|url\()#([\w-]+)', both)) <= set(ids)
    assert set(re.findall("#[0-9a-f]{6}", both)) <= {colour.lower() for colour in plots.COLOURS}
    assert both.count("currentColor") > 2


def data_of(path):
    """The data of a page, in which no text is markup and no number is NaN or infinite."""
    page = path.read_text(encoding="utf-8")
    assert page.count("<script") == page.count("</script") == 2 and "<img" not in page
    return json.loads(re.search('id="data">([^<>&\u2028]*)</script>', page)[1], parse_constant=pytest.fail)


def test_screenshots_of_this_run_are_in_the_page(tmp_path, monkeypatch):
    pytest.importorskip("PIL.Image").new("RGB", (400, 4000), "red").save(tmp_path / "a.png")
    row = made_row("t") | {"image": "../images/a.png", "reference_image": "../images/a.png", "render_fault": "slow"}
    row["dialogue_history"][1]["render_fault"] = HOSTILE
    assert data_of(write_page(tmp_path / "r.html", page_data({"m": [row]}, backend, {})))["images"] == {}
    monkeypatch.setattr(backend, "SCORE_KEYS", (*backend.SCORE_KEYS, "image"))               # as of a domain that draws
    data = data_of(write_page(tmp_path / "r.html", page_data({"m": [row]}, backend, {})))
    [[name, url]], [task], [dialogue] = data["images"].items(), data["tasks"], data["dialogues"]
    assert name == task["image"] == dialogue["image"]
    assert url.startswith("data:image/jpeg;base64,") and len(url) < report.IMAGE_BYTES
    assert dialogue["fault"] == "slow" and dialogue["turns"][1]["fault"] == HOSTILE


def test_turn_advantages_by_hand():
    task = {"facts": [{"topic": "the size", "questions": (), "replies": ("It is 2.",), "told": False, "matters": True}],
            "ground_truth": "def f(): return 2"}
    history = turns("?", "What is the size?", "It is 2.", "Really?")
    assert backend.facts(task, history[:1]) == [("It is 2.", False)]
    assert backend.facts(task, history) == [("It is 2.", True)]
    rows = [{"task": task, "dialogue_history": history, "reward": 1, "advantages": own}
            for own in ([0.5, -0.25], [0.25, 0.0], None)]
    shares = measure_turns(rows, backend)
    assert shares["turns"] == {"needed": 0.5, "vague": 0.5} and shares["all_known"] == 1
    assert measure_turns([{**rows[0], "dialogue_history": history[:2]}], backend)["all_known"] == 0      # asked last
    found = advantage_summary(rows)
    first, second = {"n": 2, "mean": 0.375}, {"n": 2, "mean": -0.125}
    assert found == {"mean": 0.25, "unscored": 1, "by_kind": {"needed": first, "vague": second},
                     "by_round": {"1": first, "2": second}}
    many = advantage_summary([{"kinds": [None] * 12, "advantages": [0.5] * 12}])
    assert list(many["by_round"]) == list(map(str, range(1, 13))) and many["by_kind"] == {}


def test_candidates_get_their_pairs_and_kinds_by_hand(tmp_path):
    """Pairs by the ids of the candidates, of equal ones the first."""
    domain = types.SimpleNamespace(turn_kind=lambda task, history, text: text[0], shown=lambda message: message,
                                   all_known=lambda task, history: bool(history))
    candidates = [{"text": "a1", "ids": [1]}, {"text": "<think>b</think>a2", "ids": [2]}, {"text": "b", "ids": [2]}]
    first = {"task_id": "x", "sample": 0, "turn": 0, "task": {}, "history": [], "candidates": candidates,
             "advantages": [3, 2, 2]}
    second = first | {"run": 1, "history": ["x"], "candidates": candidates[2:], "advantages": [0.5]}
    write(tmp_path / "scored.jsonl", [first, second])
    write(tmp_path / "pairs.jsonl", 2 * [first | {"chosen": {"ids": [2]}, "rejected": {"ids": [1]}}])
    states = read_states(tmp_path)
    assert [(one["chosen"], one["rejected"]) for one in states[0]["candidates"]] == [(0, 2), (2, 0), (0, 0)]
    states[0]["candidates"][2]["rejected"] = 1
    assert kind_lines(states, domain) == [
        "what the pairs say     candidates  rank  chosen  rejected",
        "not all known       a           2  0.62       2         2",
        "not all known       b           1  0.25       0         1",
        "all known           b           1  0.00       0         0"]
    assert [candidate["kind"] for candidate in states[0]["candidates"]] == ["a", "a", "b"]
    domain.turn_kind = lambda task, history, text: None
    assert kind_lines(states, domain) == []


def made_row(task_id, length=3):
    """A scored row, whose first agent turn has so many characters."""
    row = {"task_id": task_id, "sample": 0, "task": dict(FUNCTION), "answer": "", "reward": 0.0,
           "dialogue_history": turns("?", "z" * length, "!", "So.")}
    measure_turns([row], backend)
    return row


def test_05_makes_a_page_of_hostile_fields_and_makes_it_anew_as_it_was(tmp_path, monkeypatch):
    """Keys that are not 05's own; texts and names that are markup, very long or no text."""
    async def score(self, pairs, explain=False):
        return [{"reward": 0.0, "tests": [False], "faults": ["wrong value"], "failed": [
            {"call": answer, "expected": answer, "got": None, "said": answer}]} for _, answer in pairs]
    monkeypatch.setattr(backend.Environment, "score", score)
    rows = []
    for task_id, family, request, said in (
            ("x", HOSTILE, "?", "z"), (HOSTILE, "f" * 10 ** 6, "?", "z"), ("\ud800", "__proto__", "?", "z"),
            ("a\0b\x1b[31m", 7, "?", "z"), ("y", "", "long " * 10 ** 5, "\0\x1b\u202e\ud800"),
            ("z", "", "</script><!--<script>", "y" * 10 ** 6)):
        row = made_row(task_id)
        row["task"] |= {"family": family, "problem_description": request}
        row["dialogue_history"][1] |= {"content": said, "render_fault": HOSTILE}
        rows.append(row)
    rows[0] |= {"failed": [{"call": HOSTILE}], "kinds": [HOSTILE], "known": HOSTILE, "sample": -1, "answer": HOSTILE}
    write(tmp_path / "a.jsonl", rows)
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


MANY, FEW = [f"t{i}" for i in range(60)], [f"few{i}" for i in range(5)]


@pytest.mark.parametrize("files", [
    {"a": MANY, "b": MANY[::-1], "c": MANY}, {"a": MANY, "b": FEW}, {"a": MANY[:20] * 4, "b": MANY[:20] * 4}])
def test_what_does_not_fit_is_left_out_by_whole_tasks(monkeypatch, files):
    def shown_of(files):
        """The page's data of {name: ids of tasks}, and how many dialogues of each method and task are in them."""
        rows = {name: [made_row(task_id, length=300) for task_id in task_ids] for name, task_ids in files.items()}
        data = page_data(rows, backend, {})
        shown = [(data["methods"][one["m"]], data["tasks"][one["t"]]["id"]) for one in data["dialogues"]]
        return data, collections.Counter(shown)
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


def test_long_texts_are_cut_many_states_thinned_out_and_numbers_left_out_that_no_browser_reads():
    row = made_row("t", length=report.MAX_TEXT + 1_000) | {"advantages": [math.nan, 0.5]}
    candidate = {"text": "x", "ids": [1], "ended": True, "kind": None, "chosen": 0, "rejected": 0}
    states = [{"task_id": f"t{number}", "sample": 0, "task": FUNCTION, "history": turns("?"), "advantages": [0.5],
               "candidates": [candidate]} for number in range(250)]
    data = page_data({"m": [row]}, backend, {}, states)
    shown_turns = data["dialogues"][0]["turns"]
    assert shown_turns[1]["text"] == "z" * report.MAX_TEXT + " … [1,000 more characters]"
    assert [turn.get("advantage") for turn in shown_turns] == [None, None, None, 0.5]
    shown = [data["tasks"][state["t"]]["id"] for state in data["states"]]
    assert shown == [f"t{number}" for number in range(0, 250, 3)] and data["left_out"] is None


def test_advantages_go_with_the_turns():
    trajectory = {"task_id": "x", "run": 2, "sample": 1, "reward": 1, "kinds": ["needed"], "advantages": [0.5],
                  "task": {"ground_truth": "c"}, "dialogue_history": turns("?", "a", "b")}
    trajectory["dialogue_history"][1]["truncated"] = True
    row = {"messages": [{"role": "system", "content": "s"}, *turns("?", "a", "b")], "c": "c",
           "method": "n", "task_id": "x", "run": 2, "sample": 1, "reward": 1.0, "advantage": 0.5, "advantages": [0.5],
           "kinds": ["needed"]}
    assert as_messages("n", trajectory, "s") == row
    assert as_messages("n", trajectory | {"advantages": None}, "s") == row | {"advantage": None, "advantages": [None]}
