"""lib/report.py: tables, curves as numbers in the SVG, a page in which nothing that a dialogue says is markup."""
import math
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from lib.report import aligned, curve_svg, interval, write_report

SVG = "{http://www.w3.org/2000/svg}"


def test_aligned_tables_by_hand():
    assert aligned(["", "n", "95 %"], [["base", "7", "[0, 1]"], ["a long name", "1,200", ""]]) == [
        "                 n    95 %",
        "base             7  [0, 1]",
        "a long name  1,200"]
    assert aligned(["x"], []) == ["x"]


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
    return next(g for g in svg.iter(SVG + "g") if g.get("id") == "axes_1")


def drawn(svg):
    """(points of each curve, error bars of each curve) of an SVG (ElementTree), in units of its axes: (N, value)."""
    ticks = {}
    for axis in "xy":
        groups = [g for g in svg.iter(SVG + "g") if re.fullmatch(axis + r"tick_\d+", g.get("id", ""))]
        pairs = [(float(next(g.iter(SVG + "use")).get(axis)), float(next(g.iter(SVG + "text")).text)) for g in groups]
        ticks[axis] = [(at, math.log2(value) if axis == "x" else value) for at, value in pairs]

    def value(axis, at):
        (a, first), (b, last) = ticks[axis][0], ticks[axis][-1]
        return first + (at - a) / (b - a) * (last - first)

    def units(path):
        return [(2 ** value("x", x), value("y", y)) for x, y in numbers(path)]

    groups = [(g.get("id"), g.findall(SVG + "path")) for g in axes_of(svg).findall(SVG + "g")]
    return ([units(paths[0]) for name, paths in groups if name.startswith("line2d") and paths],
            [[units(path) for path in paths] for name, paths in groups if name.startswith("LineCollection")])


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
        paths = [path for g in groups for path in g.findall(SVG + "path") if g.get("id").startswith("line2d")]
        assert [len(numbers(path)) for path in paths] == [len(sizes)] * 7
        for x, y in (xy for path in paths for xy in numbers(path)):
            assert left < x < right and top < y < bottom
        heights = [float(text.get("y")) for text in svg.iter(SVG + "text") if text.text in names]
        assert len(heights) == 7 and all(below - above > 12 for above, below in zip(heights, heights[1:]))
        assert 0 < heights[0] and heights[-1] < float(svg.get("viewBox").split()[3])


HOSTILE = """<script>alert(1)</script><img src=x onerror='alert(2)'>"&amp;$\\frac$"""


class Reader(HTMLParser):
    """The elements and attributes of a page, and its text."""
    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.text = set(), set(), ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}

    def handle_data(self, data):
        self.text += data


def test_nothing_that_a_dialogue_says_is_markup(tmp_path):
    row = {"task_id": HOSTILE, "task": {"problem_description": HOSTILE, "ground_truth": HOSTILE}, "reward": 0.5,
           "answer": HOSTILE, "dialogue_history": [{"role": "user", "content": HOSTILE},
                                                   {"role": HOSTILE, "content": HOSTILE}]}
    metrics = {HOSTILE: {"turns": {HOSTILE: 0.25}, "turn_tokens": 3.0}}
    curves = {HOSTILE: {"1": point(0.5, 0.4, 0.6)}}
    write_report(tmp_path / "r.html", [HOSTILE], metrics, {HOSTILE: [row]}, curves, "success_rate", tmp_path)
    found = Reader((tmp_path / "r.html").read_text())
    assert not {"script", "img"} & found.tags and not any(name.startswith("on") for name in found.attributes)
    # the table's line; the curve's label; name and kind of the turns; the request; the name, what two turns say and who
    # says the second; id and text of the reference
    assert found.text.count(HOSTILE) == 1 + 1 + 2 + 1 + 4 + 2
