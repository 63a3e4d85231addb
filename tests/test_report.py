"""lib/report.py, lib/plots.py, lib/credit.py: tables, curves as numbers in the SVG, a page in which nothing that a
dialogue says is markup, and which stays small; credit by hand."""
import base64
import hashlib
import json
import math
import re
import types
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from colbench import backend
from lib import report
from lib.credit import agreement, credit_of, credit_summary, measure_turns
from lib.plots import curve_svg, report_plots, smoothed
from lib.report import add_images, data_text, page_data, spread, write_report
from lib.tables import aligned, interval

SVG = "{http://www.w3.org/2000/svg}"


def test_aligned_tables_by_hand():
    assert aligned(["", "n", "95 %"], [["base", "7", "[0, 1]"], ["a long name", "1,200", ""]]) == [
        "                 n    95 %",
        "base             7  [0, 1]",
        "a long name  1,200"]
    assert aligned(["x"], []) == ["x"]


def test_training_curves_are_smoothed_by_hand():
    assert smoothed([1, 2, 3]) == [1, 2, 3] and smoothed([]) == []
    assert smoothed([0, 2] * 20) == [0] + [1] * 39                   # the mean of two


def test_intervals_by_hand():
    assert interval([0.1234, 0.5]) == "[0.123, 0.500]" and interval([-0.25, 0.5], "+") == "[-0.250, +0.500]"


def point(rate, low, high):
    return {"success_rate": rate, "ci95": [low, high]}


CURVES = {"sweet": {"1": point(0.25, 0.2, 0.3), "2": point(0.3, 0.25, 0.35), "16": point(0.45, 0.38, 0.5)},
          "no <c>": {"2": point(0.3, 0.25, 0.35)}}


def numbers(path):
    """[(x, y), …] of a path of lines."""
    values = [float(x) for x in re.findall(r"-?[0-9.]+", path.get("d"))]
    return list(zip(values[::2], values[1::2]))


def axes_of(svg):
    return next(g for g in svg.iter(SVG + "g") if g.get("id") == "best-curve-axes_1")


def drawn(svg):
    """(points of each curve, error bars of each curve) of an SVG (ElementTree), in units of its axes: (N, value)."""
    ticks = {}
    for axis in "xy":
        groups = [g for g in svg.iter(SVG + "g") if re.fullmatch(f"best-curve-{axis}" + r"tick_\d+", g.get("id", ""))]
        pairs = [(float(next(g.iter(SVG + "use")).get(axis)), float(next(g.iter(SVG + "text")).text)) for g in groups]
        ticks[axis] = [(at, math.log2(value) if axis == "x" else value) for at, value in pairs]

    def value(axis, at):
        (a, first), (b, last) = ticks[axis][0], ticks[axis][-1]
        return first + (at - a) / (b - a) * (last - first)

    def units(path):
        return [(2 ** value("x", x), value("y", y)) for x, y in numbers(path)]

    groups = [(g.get("id"), g.findall(SVG + "path")) for g in axes_of(svg).findall(SVG + "g")]
    return ([units(paths[0]) for name, paths in groups if name.startswith("best-curve-line2d") and paths],
            [[units(path) for path in paths] for name, paths in groups if name.startswith("best-curve-LineCollection")])


def test_curves_have_labels_points_and_error_bars():
    svg = ElementTree.fromstring(curve_svg(CURVES, "success_rate"))
    texts = [text.text for text in svg.iter(SVG + "text")]
    assert texts[:4] == ["1", "2", "16", "N, candidates a turn"] and texts[-3:] == ["success rate", "sweet", "no <c>"]
    lines, bars = drawn(svg)
    lines = [[(round(n, 2), round(value, 3)) for n, value in line] for line in lines]
    bars = [[[(round(n, 2), round(value, 3)) for n, value in bar] for bar in own] for own in bars]
    assert lines == [[(0.99, 0.25), (1.98, 0.3), (15.84, 0.45)], [(2.02, 0.3)]]           # side by side: 1 % apart
    assert bars == [[[(0.99, 0.2), (0.99, 0.3)], [(1.98, 0.25), (1.98, 0.35)], [(15.84, 0.38), (15.84, 0.5)]],
                    [[(2.02, 0.25), (2.02, 0.35)]]]
    assert curve_svg(CURVES, "success_rate") == curve_svg(CURVES, "success_rate")


@pytest.mark.parametrize("rates", [[0, 0], [1, 1], [0, 1], [0.05, 0.87]])
def test_curves_keep_inside_the_frame_and_labels_apart(rates):
    names = [f"label {i}" for i in range(7)]
    for sizes in (["4"], ["1", "2", "4", "8", "16", "32"]):
        curves = {name: {n: point(*[rates[i % 2]] * 3) for n in sizes} for i, name in enumerate(names)}
        svg = ElementTree.fromstring(curve_svg(curves, "success_rate"))
        groups = axes_of(svg).findall(SVG + "g")
        (left, bottom), _, (right, top), *_ = numbers(groups[0].find(SVG + "path"))
        paths = [path for g in groups for path in g.findall(SVG + "path")
                 if g.get("id").startswith("best-curve-line2d")]
        assert [len(numbers(path)) for path in paths] == [len(sizes)] * 7
        for x, y in (xy for path in paths for xy in numbers(path)):
            assert left < x < right and top < y < bottom
        heights = [float(text.get("y")) for text in svg.iter(SVG + "text") if text.text in names]
        assert len(heights) == 7 and all(below - above > 12 for above, below in zip(heights, heights[1:]))
        assert 0 < heights[0] and heights[-1] < float(svg.get("viewBox").split()[3])


HOSTILE = """</script><script>alert(1)</script><img src=x onerror='alert(2)'>"&amp;$\\frac$\u2028"""


class Reader(HTMLParser):
    """The elements and attributes of a page, its text, and the text of each script."""
    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.text, self.scripts, self.style = [], set(), "", [], ""
        self.inside = None
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attributes}
        self.inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        if self.inside == "script":
            self.scripts[-1] += data
        elif self.inside != "style":
            self.text += data


def hostile_report(folder, **more):
    row = {"task_id": HOSTILE, "task": {"problem_description": HOSTILE, "ground_truth": HOSTILE, "test_cases": {}},
           "sample": 0, "reward": 0.5, "answer": HOSTILE, "failed": [{"call": HOSTILE, "expected": HOSTILE, "got": None,
                                                                      "said": HOSTILE}],
           "dialogue_history": [{"role": "user", "content": HOSTILE}, {"role": HOSTILE, "content": HOSTILE},
                                {"role": "assistant", "content": HOSTILE}], **more}
    files, bar = {HOSTILE: [row]}, {"value": 0.5, "low": 0.25, "high": 0.75}
    metrics = {HOSTILE: {"all_known": 0.5, "success_when_known": 0.25}}
    plots = report_plots(metrics, {HOSTILE: bar}, "success_rate", files,
                         {"best of N": {HOSTILE: {"1": point(0.5, 0.4, 0.6)}}},
                         {HOSTILE: [{"step": 1, "loss": 0.5, "nll": 0.25}]})
    measure_turns([row], backend)
    data = page_data(files, backend, "success_rate", HOSTILE)
    write_report(folder / "r.html", data, title=HOSTILE, table=[{"name": HOSTILE, "cells": [HOSTILE]}], bars=[bar],
                 headings=[HOSTILE], metric_heading=HOSTILE, notes=[HOSTILE], lines=[(HOSTILE, HOSTILE)], plots=plots,
                 credit={"by_kind": [{"label": HOSTILE, "n": 1, "mean": -0.5, "methods": {}}], "by_round": [],
                         "agreement": [HOSTILE]}, hints=[HOSTILE])
    return data, (folder / "r.html").read_text(encoding="utf-8")


def test_nothing_that_a_dialogue_says_is_markup(tmp_path):
    data, page = hostile_report(tmp_path)
    found = Reader(page)
    assert found.tags.count("script") == 2 == len(found.scripts) and "img" not in found.tags
    assert not any(name.startswith("on") for name in found.attributes)
    assert json.loads(found.scripts[0]) == data and not set("<>&\u2028") & set(found.scripts[0])
    assert data["dialogues"][0]["turns"][1]["text"] == data["dialogues"][0]["failed"][0]["said"] == HOSTILE
    assert found.text.count(HOSTILE.partition("$")[0]) >= 12         # names, headings, notes, labels of the plots
    [digest] = re.findall(r"script-src 'sha256-([^']+)'", page)
    assert digest == base64.b64encode(hashlib.sha256(found.scripts[1].encode()).digest()).decode()


def test_plots_take_the_page_s_colour_and_have_ids_of_their_own(tmp_path):
    _, page = hostile_report(tmp_path)
    svgs = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(svgs) == 5 and all(ElementTree.fromstring(svg) is not None for svg in svgs)
    ids = [name for svg in svgs for name in re.findall(r' id="([^"]*)"', svg)]
    assert len(ids) == len(set(ids))
    for svg in svgs:
        assert not re.search("#[0-9a-f]{6}", svg) and "currentColor" in svg
        assert set(re.findall(r'(?:href="|url\()#([\w-]+)', svg)) <= set(ids)


def test_long_texts_and_many_screenshots_keep_the_page_small(tmp_path, monkeypatch):
    pytest.importorskip("PIL.Image").new("RGB", (4, 4)).save(tmp_path / "a.png")
    row = {"task_id": "t", "task": {"problem_description": "?", "ground_truth": "c", "test_cases": {}}, "sample": 0,
           "reward": 0.5, "answer": "a", "image": "a.png", "reference_image": "a.png", "dialogue_history": [
               {"role": "user", "content": "?"}, {"role": "assistant", "content": "x" * 3000}]}
    measure_turns([row], backend)
    data = page_data({"m": [row]}, backend, "success_rate")
    assert json.loads(data_text(data)) == data and data["left_out"] is None
    add_images(data, {"m": [row]}, tmp_path)
    assert list(data["images"]) == ["k0"] and data["dialogues"][0]["image"] == data["tasks"][0]["image"] == "k0"
    assert data["images"]["k0"].startswith("data:image/jpeg;base64,") and data["left_out"] is None
    monkeypatch.setattr(report, "MAX_DATA", len(data_text(data)) - 900)
    cut = json.loads(data_text(data))
    assert cut["dialogues"][0]["turns"][1]["text"] == "x" * 2000 + " … [1,000 more characters]"
    assert cut["left_out"] == "1 texts longer than 2,000 characters are cut; scored/ has them whole"
    assert cut["images"] == data["images"]
    monkeypatch.setattr(report, "MAX_IMAGES", 10)
    data = page_data({"m": [row]}, backend, "success_rate")
    add_images(data, {"m": [row]}, tmp_path)
    assert data["images"] == {} and data["left_out"].startswith("1 of 1 screenshots are left out: ")


def test_states_are_spread_evenly():
    assert spread(list(range(5)), 5) == [0, 1, 2, 3, 4] and spread(list(range(10)), 4) == [0, 2, 5, 7]


def test_credit_by_hand():
    task = {"facts": [{"topic": "the size", "questions": (), "replies": ("It is 2.",), "told": False, "matters": True}],
            "ground_truth": "def f(): return 2"}
    history = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "What is the size?"},
               {"role": "user", "content": "It is 2."}, {"role": "assistant", "content": "Really?"}]
    rows = [{"task": task, "dialogue_history": history, "reward": 1, "advantages": own}
            for own in ([0.5, -0.25], [0.25, 0.0], None)]
    shares = measure_turns(rows, backend)
    assert shares["turns"] == {"needed": 0.5, "vague": 0.5} and shares["all_known"] == 1
    found = credit_of(rows)
    assert found == {"mean": 0.25, "too_long": 1, "by_kind": {"needed": {"n": 2, "mean": 0.375},
                                                              "vague": {"n": 2, "mean": -0.125}},
                     "by_round": {"1": {"n": 2, "mean": 0.375}, "2": {"n": 2, "mean": -0.125}}}
    other = credit_of(rows[:1])
    [needed, vague] = credit_summary({"a": {"credit": found}, "b": {"credit": other}})["by_kind"]
    assert (needed["label"], needed["n"], needed["mean"]) == ("needed", 3, pytest.approx((2 * 0.375 + 0.5) / 3))
    assert vague["methods"]["b"] == {"n": 1, "mean": -0.25}
    assert backend.facts(task, history[:1]) == [("It is 2.", False)] and backend.facts(task, history) == [
        ("It is 2.", True)]


def test_agreement_with_oracles_by_hand():
    domain = types.SimpleNamespace(ORACLES=("oracle",), lacks=lambda task, oracle: None,
                                   oracle_scores=lambda oracle, task, history, texts: [len(text) for text in texts])

    def row(task, texts, advantages, pairs):
        return {"task_id": task, "task": {}, "history": [], "advantages": advantages, "pairs": pairs,
                "candidates": [{"text": text} for text in texts]}
    found = agreement([row("a", ["x", "xx", "xxx"], [1, 2, 3], [(2, 0), (1, 2)]),
                       row("b", ["x", "xx"], [2, 1], [(0, 1)]), row("c", ["x", "y"], [1, 2], [(1, 0)])], domain)
    assert found["oracle"] | {"ci95": None} == {"rank_correlation": pytest.approx(0), "num_states": 2, "num_pairs": 4,
                                                "right": 0.25, "wrong": 0.5, "ci95": None}
    assert found["oracle"]["ci95"] == pytest.approx([-1, 1])
    assert agreement([row("c", ["x", "y"], [1, 2], [(1, 0)])], domain) == {}
