"""lib/report.py, lib/plots.py, lib/credit.py: tables, curves as numbers in the SVG, a page in which nothing that a
dialogue says is markup, which shows no file but this run's screenshots, and which stays small; credit by hand."""
import base64
import collections
import hashlib
import json
import math
import os
import re
import socket
import struct
import types
import xml.etree.ElementTree as ElementTree
import zlib
from html.parser import HTMLParser

import pytest

from colbench import backend
from conftest import read, refused, stage
from lib import plots, report
from lib.credit import agreement, credit_of, credit_summary, measure_turns, read_states
from lib.plots import curve_svg, report_plots, smoothed, training_svg
from lib.report import as_json, fitting, page_data, write_report
from lib.runtime import InputError
from lib.tables import aligned, interval, spread

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
    table = [{"name": HOSTILE, "cells": [HOSTILE]}]
    write_report(folder / "r.html", data, folder / "images", title=HOSTILE, table=table, bars=[bar],
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
    images = tmp_path / "images"
    images.mkdir()
    pytest.importorskip("PIL.Image").new("RGB", (4, 4)).save(images / "a.png")
    row = {"task_id": "t", "task": {"problem_description": "?", "ground_truth": "c", "test_cases": {}}, "sample": 0,
           "reward": 0.5, "answer": "a", "image": "../images/a.png", "reference_image": "../images/a.png",
           "dialogue_history": [
               {"role": "user", "content": "?"}, {"role": "assistant", "content": "x" * 3000}]}
    measure_turns([row], backend)
    monkeypatch.setattr(backend, "SCORE_KEYS", ("reward", "image", "reference_image"))
    whole = page_data({"m": [row]}, backend, "success_rate")
    data = fitting(whole, images, report.MAX_PAGE)
    assert json.loads(as_json(data)) == data and data["left_out"] is None
    assert list(data["images"]) == ["k0"] and data["dialogues"][0]["image"] == data["tasks"][0]["image"] == "k0"
    assert data["images"]["k0"].startswith("data:image/jpeg;base64,") and data["left_out"] is None
    monkeypatch.setattr(report, "IMAGE_BYTES", 3_000)
    cut = fitting(whole, images, 8_000)
    assert cut["dialogues"][0]["turns"][1]["text"] == "x" * 2000 + " … [1,000 more characters]"
    assert cut["left_out"] == "1 texts longer than 2,000 characters are cut; scored/ has them whole"
    assert cut["images"] == data["images"] and len(as_json(cut)) < 8_000
    monkeypatch.setattr(report, "MAX_IMAGES", 10)
    data = fitting(whole, images, report.MAX_PAGE)
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
    domain = types.SimpleNamespace(ORACLES=("oracle",), lacks=lambda task, oracle: None, shown=lambda message: message,
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


# ---------------------------------------------------------------------------------------------------------------------
# screenshots: only this run's, whatever a row names and whatever stands in the folder

def picture(path, size=(4, 4), form="PNG"):
    from PIL import Image
    Image.new("RGB", size, "red").save(path, form)
    return path


def bomb(path):
    """A PNG whose head promises 30,000 x 30,000 pixels."""
    content = picture(path).read_bytes()
    head = b"IHDR" + struct.pack(">II", 30_000, 30_000) + content[24:29]
    path.write_bytes(content[:12] + head + struct.pack(">I", zlib.crc32(head)) + content[33:])


def large(path):
    picture(path)
    os.truncate(path, report.MAX_FILE + 1)


def listening(path):
    short = os.path.relpath(path)                                   # a socket's name has 107 bytes at most
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(short)


def device(path):
    try:
        os.mknod(path, 0o020600, os.makedev(1, 5))                  # as /dev/zero
    except OSError:
        pytest.skip("no right to make a device")


THINGS = {                                                          # what stands at images/a.png
    "a link to another file": lambda path: path.symlink_to(picture(path.parents[1] / "secret.png")),
    "a link to a screenshot": lambda path: path.symlink_to(picture(path.parent / "b.png")),
    "a link to itself": lambda path: path.symlink_to(path),
    "a FIFO": os.mkfifo, "a folder": os.mkdir, "a socket": listening, "a device": device, "nothing": lambda path: None,
    "a file that is too large": large, "a head that promises too much": bomb,
    "a picture that is too wide": lambda path: picture(path, (report.MAX_SIZE[0] + 1, 1)),
    "a picture that is too high": lambda path: picture(path, (1, report.MAX_SIZE[1] + 1)),
    "an empty file": lambda path: path.touch(), "a text": lambda path: path.write_text("root:x:0:0"),
    "half a picture": lambda path: path.write_bytes(picture(path, (300, 300)).read_bytes()[:300]),
    "a JPEG": lambda path: picture(path, form="JPEG"), "a GIF": lambda path: picture(path, form="GIF"),
    "an SVG": lambda path: path.write_text('<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"/>')}
PATHS = ["/etc/passwd", "SECRET", "../secret.png", "../../secret.png", "../images/../secret.png", "../images/./a.png",
         "../images", "../images/", "../images/.", "../images/..", "../images/deep/a.png", "../images//a.png", "a.png",
         "images/a.png", "../scored/../images/a.png", "../images/a.png\0", "../images/a\ud800.png", "../images/a.png\n",
         "../images/" + 5_000 * "a", "file:///etc/passwd", "data:image/png;base64,AAAA", 7, ["../images/a.png"],
         {"path": "../images/a.png"}, True, 0.5]


def with_image(path):
    return {"tasks": [{"id": "t", "image": path}], "dialogues": [{"t": 0, "image": path}], "images": {}}


@pytest.mark.parametrize("thing", THINGS)
def test_a_screenshot_is_a_png_file_of_this_run(tmp_path, thing):
    images = tmp_path / "images"
    images.mkdir()
    THINGS[thing](images / "a.png")
    data = with_image("../images/a.png")
    lines = report.add_images(data, images)
    assert lines == ["1 of 1 screenshots are left out: they are no PNG files in images/ of at most 64 MB and "
                     "2,560 x 8,192 pixels"]
    assert data == with_image("left out")


@pytest.mark.parametrize("path", PATHS, ids=lambda path: repr(path)[:40])
def test_a_screenshot_is_named_by_this_run(tmp_path, path):
    (tmp_path / "images" / "deep").mkdir(parents=True)
    for place in ("images/a.png", "images/deep/a.png", "secret.png", "scored.png", "a.png"):
        picture(tmp_path / place)
    with pytest.raises(report.UnfitImage):
        report.embedded(tmp_path / "images", str(tmp_path / "secret.png") if path == "SECRET" else path)
    assert report.embedded(tmp_path / "images", "../images/a.png").startswith("data:image/jpeg;base64,")


def test_a_folder_of_screenshots_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    picture(tmp_path / "elsewhere" / "a.png")
    (tmp_path / "images").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(report.UnfitImage):
        report.embedded(tmp_path / "images", "../images/a.png")
    with pytest.raises(report.UnfitImage):
        report.embedded(tmp_path / "nothing", "../nothing/a.png")


# ---------------------------------------------------------------------------------------------------------------------
# 05 on hostile files

TASK = {"problem_description": "?", "ground_truth": "def f(n):\n    return n", "test_cases": {"a": "f(1)"}}


def hostile_row(where, value):
    """A row whose field `where` ("task.family", say) has this value."""
    row = {"task_id": "x", "task": dict(TASK), "answer": "", "dialogue_history": [
        {"role": "user", "content": "?"}, {"role": "assistant", "content": "What?"}, {"role": "user", "content": "!"},
        {"role": "assistant", "content": "So."}]}
    *folders, key = where.split(".")
    place = row
    for folder in folders:
        place = place[int(folder) if folder.isdigit() else folder]
    place[key] = value
    return row


def nested(depth):
    value = "x"
    for _ in range(depth):
        value = [value]
    return value


def strict(text):
    """JSON as a browser reads it: without NaN and Infinity."""
    def refuse(name):
        raise ValueError(name)
    return json.loads(text, parse_constant=refuse)


SECRET = "the secret file"                                          # stands for a path in the table
FIELDS = [
    ("image", SECRET), ("reference_image", SECRET), ("similarity", SECRET), ("image", "/dev/zero"), ("image", 5),
    ("image", [SECRET]), ("reference_image", None), ("render_fault", HOSTILE), ("render_fault", nested(200)),
    ("similarity", HOSTILE), ("failed", [{"call": HOSTILE}]), ("advantages", ["x"]), ("views", [SECRET]),
    ("win_rate", {"image": SECRET}), ("kinds", [HOSTILE]), ("known", HOSTILE), ("task_id", HOSTILE),
    ("task_id", "\ud800"), ("task_id", "x" * 10 ** 6), ("task_id", "a\0b\x1b[31m"), ("sample", 10 ** 30),
    ("sample", -1), ("task.family", HOSTILE), ("task.family", "f" * 10 ** 6), ("task.family", "__proto__"),
    ("task.image", SECRET), ("task.problem_description", "long " * 2 * 10 ** 6),
    ("task.problem_description", "</script><!--<script>"), ("dialogue_history.1.content", "\0\x1b\u202e\ud800"),
    ("dialogue_history.1.content", "y" * 10 ** 7), ("dialogue_history.2.tool", HOSTILE),
    ("dialogue_history.2.tool", {"a": [1]}), ("dialogue_history.2.tool", nested(200)),
    ("dialogue_history.2.render_fault", HOSTILE), ("dialogue_history.2.render_fault", 10 ** 400),
    ("dialogue_history.1.truncated", {"a": "b"}), ("dialogue_history.2.image", SECRET),
    ("dialogue_history.2.role", HOSTILE), ("answer", "def f(n): return f([[[[" + "[" * 5_000),
    ("extra", {"image": SECRET})]


# Of another type than the field has in a file of trajectories, or no name: no page is made of these.
REFUSED = {
    ("image", "5"), ("image", str([SECRET])), ("render_fault", str(nested(200))), ("task_id", "x" * 10 ** 6),
    ("sample", str(10 ** 30)),
    *(("dialogue_history.2.tool", str(value)) for value in (HOSTILE, {"a": [1]}, nested(200))),
    ("dialogue_history.2.render_fault", str(10 ** 400)), ("dialogue_history.1.truncated", str({"a": "b"})),
    ("dialogue_history.2.role", HOSTILE)}


@pytest.mark.parametrize("where, value", FIELDS, ids=[f"{where}-{number}" for number, (where, _) in enumerate(FIELDS)])
def test_05_makes_a_page_of_hostile_fields(tmp_path, monkeypatch, where, value):
    async def score(self, pairs, explain=False):
        return [{"reward": 0.0, "tests": [False], "faults": ["wrong value"], "failed": [
            {"call": answer, "expected": answer, "got": None, "said": answer}]} for _, answer in pairs]
    monkeypatch.setattr(backend.World, "score", score)
    secret = str(picture(tmp_path / "secret.png"))
    text = json.dumps(hostile_row(where, value)).replace(SECRET, secret)
    (tmp_path / "a.jsonl").write_text(text + "\n" + text + "\n")
    if (where, str(value)) in REFUSED:                               # where files are read (common.TRAJECTORY)
        line = refused(5, f"a={tmp_path / 'a.jsonl'}", "--out", tmp_path / "out")
        assert line.startswith(f"{tmp_path / 'a.jsonl'}:1: ") and where.rpartition(".")[2] in line
        assert not (tmp_path / "out").exists()
        return
    stage(5).main([f"a={tmp_path / 'a.jsonl'}", "--out", str(tmp_path / "out")])
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    found = Reader(page)
    assert found.tags.count("script") == 2 and "img" not in found.tags and "data:image/jpeg" not in page
    assert not any(name.startswith("on") for name in found.attributes)
    data = strict(found.scripts[0])
    assert len(data["dialogues"]) == 2 and len(data["dialogues"][0]["turns"]) == 4 and data["images"] == {}
    assert "image" not in data["tasks"][0] and "image" not in data["dialogues"][0]
    assert "similarity" not in data["dialogues"][0] and len(page.encode("utf-8")) <= report.MAX_PAGE
    assert {len(str(data["tasks"][0].get(key, ""))) <= 250 for key in ("id", "family")} == {True}


def test_a_page_is_made_twice_and_anew_and_follows_no_link(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(json.dumps(hostile_row("answer", "")) + "\n")
    flags = [f"a={tmp_path / 'a.jsonl'}", "--out", str(tmp_path / "out")]
    stage(5).main(flags)
    page = (tmp_path / "out" / "report.html").read_bytes()
    stage(5).main(flags)
    assert "done already" in capsys.readouterr().out and (tmp_path / "out" / "report.html").read_bytes() == page
    stage(5).main([*flags, "--overwrite"])
    assert (tmp_path / "out" / "report.html").read_bytes() == page
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "out" / "COMPLETED").unlink()                       # as a run that was killed
    for name in ("report.html", "report.html.partial"):
        (tmp_path / "out" / name).unlink(missing_ok=True)
        (tmp_path / "out" / name).symlink_to(precious)
    stage(5).main(flags)
    assert precious.read_text() == "mine" and not (tmp_path / "out" / "report.html").is_symlink()
    assert (tmp_path / "out" / "report.html").read_bytes() == page


NUMBERS = [float("nan"), float("inf"), -float("inf"), 1e300, 10 ** 400, 10 ** 5_000, -1e16]


@pytest.mark.parametrize("value", NUMBERS, ids=lambda value: "huge" if isinstance(value, int) else str(value))
def test_numbers_that_no_browser_reads_are_left_out(tmp_path, value):
    row = hostile_row("answer", "") | {"reward": value, "sample": value, "run": value}
    measure_turns([row], backend)
    if isinstance(value, float):
        row["advantages"] = [value, 0.5]
    data = page_data({"a": [row]}, backend, "success_rate", "critic")
    data = strict(as_json(fitting(data, tmp_path, report.MAX_PAGE)))
    [dialogue] = data["dialogues"]
    assert not {"reward", "sample", "credit"} & set(dialogue) and dialogue["run"] == 0
    assert "credit" not in dialogue["turns"][1]
    rows = [{"step": 1, "loss": value, "acc": 0.5}, {"step": value, "loss": 1, "acc": 0.25},
            {"step": 3, "loss": "x", "acc": None, "nll": [1], "gnorm": {}}, {"step": 4, "loss": 2}]
    assert plots.history_points(rows, "loss") == ([4], [2]) and plots.history_points(rows, "acc") == ([1], [0.5])
    assert plots.history_points(rows, "nll") == ([], []) and "<svg" in training_svg({"a": rows})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
def test_a_page_of_means_that_are_no_numbers_is_written(tmp_path, value):
    row = hostile_row("answer", "") | {"reward": 0.0, "sample": 0}
    measure_turns([row], backend)
    bars = {"a": {"value": value, "low": value, "high": value}}
    made = report_plots({"a": {"all_known": value, "success_when_known": value}}, bars, "success_rate", {"a": [row]},
                        {"best of N": {"a": {"1": point(value, value, value)}}}, {"a": [{"step": 1, "loss": value}]})
    own = {"by_kind": {"idle": {"n": 1, "mean": value}}, "by_round": {"1": {"n": 1, "mean": value}}}
    credit = {**credit_summary({"a": {"credit": own}}), "agreement": []}
    data = page_data({"a": [row]}, backend, "success_rate")
    assert write_page(tmp_path, data, plots=made, bars=list(bars.values()), credit=credit,
                      table=[{"name": "a", "cells": []}]) is None
    assert dialogues_in(tmp_path)[0] == {"a": ["x"]}


def test_many_steps_rounds_and_long_names_keep_plots_small():
    rows = [{"step": step, "loss": float(step % 7)} for step in range(50_000)]
    steps, values = plots.history_points(rows, "loss")
    assert len(steps) == len(values) == plots.MAX_POINTS and values[-1] == pytest.approx(3, abs=0.01)
    names = ["_hidden", "x" * 100_000, "two\nlines\x1b", HOSTILE]
    svg = plots.rounds_svg({name: list(range(1, 10_001)) for name in names})
    assert len(svg) < 60_000 and "50 and more" in svg and "_hidden" in svg and "two lines" in svg
    assert "x" * 61 not in svg
    svgs = [{"title": f"plot {i}", "svg": "x" * 3_000_000, "caption": ""} for i in range(2)]
    assert report.fitting_plots(svgs) == (svgs[:1], ['the plot "plot 1" is left out: it has 3,000,000 bytes'])


def test_credit_by_round_says_what_it_leaves_out(tmp_path):
    own = {"by_kind": {}, "by_round": {str(n): {"n": 1, "mean": 0.5} for n in range(1, 121)}}
    summary = credit_summary({"a": {"credit": own}})
    assert [row["label"] for row in summary["by_round"]] == [str(n) for n in range(1, 51)]
    write_page(tmp_path, page_data({}, backend, "success_rate"), credit={**summary, "agreement": []})
    assert "The table has the first 50 of 120 rounds; metrics.json has all." in (tmp_path / "r.html").read_text()


STATE = {"task_id": "x", "sample": 0, "turn": 0, "task": TASK, "history": [{"role": "user", "content": "?"}],
         "candidates": [{"text": "a", "ids": [1], "ended": True}], "advantages": [0.5]}


@pytest.mark.parametrize("key, value, line", [
    ("advantages", [float("nan")], "advantages: item 0 is nan, not a finite number"),
    ("advantages", ["x"], "advantages: item 0 is a str, not a number"),
    ("advantages", [None], "advantages: item 0 is a NoneType, not a number"),
    ("advantages", [10 ** 400], "advantages: item 0 is "),
    ("history", ["x"], "history: item 0 is a str, not an object"), ("history", [{"role": "user"}], 'missing "content"'),
    ("history", [{"role": "user", "content": 5}], '"content" is a int, not a str'),
    ("candidates", [5], "candidates: item 0 is a int, not an object"),
    ("candidates", [{"text": "a", "ids": [[1]], "ended": True}], "not a list of token ids"),
    ("candidates", [{"text": "a", "ids": [{}], "ended": True}], "not a list of token ids"),
    ("candidates", [{"text": 1, "ids": [1], "ended": True}], '"text" is a int, not a str')])
def test_states_of_wrong_types_are_one_line(tmp_path, key, value, line):
    (tmp_path / "pairs.jsonl").write_text(json.dumps(STATE | {"chosen": {"ids": [1]}, "rejected": {"ids": [1]}}) + "\n")
    (tmp_path / "scored.jsonl").write_text(json.dumps(STATE) + "\n")
    assert read_states(tmp_path)[0]["pairs"] == [(0, 0)]
    (tmp_path / "scored.jsonl").write_text(json.dumps(STATE | {key: value}) + "\n")
    with pytest.raises(InputError, match=re.escape(line)):
        read_states(tmp_path)
    (tmp_path / "scored.jsonl").write_text(json.dumps(STATE) + "\n")
    (tmp_path / "pairs.jsonl").write_text(json.dumps(STATE | {"chosen": {"ids": [{}]}, "rejected": {}}) + "\n")
    with pytest.raises(InputError, match="not a list of token ids"):
        read_states(tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# a page that would be too large

def write_page(folder, data, **variables):
    """write_report with little but the data; returns the line of what is left out."""
    values = {"title": "x", "table": [], "bars": [], "headings": [], "metric_heading": "m", "notes": [], "lines": [],
              "plots": [], "credit": None, "hints": []} | variables
    return write_report(folder / "r.html", data, folder / "images", **values)


def made_data(files, length=300):
    """page_data of {name: task_ids}, a dialogue of `length` characters each."""
    rows = {}
    for name, task_ids in files.items():
        counts = collections.Counter()
        rows[name] = []
        for task in task_ids:
            row = hostile_row("task_id", task) | {"sample": counts[task], "reward": 0.0}
            row["dialogue_history"][1]["content"] = "z" * length
            counts[task] += 1
            rows[name].append(row)
        measure_turns(rows[name], backend)
    return page_data(rows, backend, "success_rate")


def dialogues_in(folder):
    """{name: [task_id of each dialogue that is in the page]}, and the data of the page."""
    data = strict(Reader((folder / "r.html").read_text(encoding="utf-8")).scripts[0])
    shown = {name: [] for name in data["methods"]}
    for dialogue in data["dialogues"]:
        shown[data["methods"][dialogue["m"]]].append(data["tasks"][dialogue["t"]]["id"])
    return shown, data


MANY, FEW = [f"t{i}" for i in range(400)], [f"few{i}" for i in range(5)]


@pytest.mark.parametrize("case, files", [
    ("the same tasks", {"a": MANY, "b": MANY, "c": MANY}), ("another order", {"a": MANY, "b": MANY[::-1]}),
    ("a part", {"a": MANY, "b": MANY[:200]}), ("other tasks", {"a": MANY, "b": FEW}),
    ("several dialogues a task", {"a": MANY[:40] * 10, "b": MANY[:40] * 10}),
    ("one task alone", {"a": ["t"] * 400, "b": ["t"] * 400}), ("one name", {"a": MANY})])
def test_what_does_not_fit_is_left_out_by_a_fair_rule(tmp_path, monkeypatch, case, files):
    monkeypatch.setattr(report, "MAX_PAGE", 160_000)
    data = made_data(files)
    line = write_page(tmp_path, data)
    shown, page = dialogues_in(tmp_path)
    every, number = len(data["dialogues"]), len(page["dialogues"])
    assert (tmp_path / "r.html").stat().st_size <= 160_000 and 0.2 * every < number + 60 and number > 60
    assert page["left_out"] == line and line.startswith(
        f"{every - number:,} of {every:,} dialogues are left out, as the page holds at most 0.16 MB; shown are ")
    for name, task_ids in files.items():
        assert f"{len(shown[name]):,} of {len(task_ids):,} of {name}" in line
        assert set(shown[name]) <= set(task_ids)
    if case in ("the same tasks", "another order", "several dialogues a task", "one task alone"):
        assert len({json.dumps(sorted(own)) for own in shown.values()}) == 1
    if case == "a part":
        assert set(shown["b"]) <= set(shown["a"]) and abs(len(shown["a"]) - 2 * len(shown["b"])) <= 1
    if case == "other tasks":
        assert sorted(shown["b"]) == FEW and len(shown["a"]) > 60
    if case == "several dialogues a task":                          # of all tasks as many as of each other
        assert set(collections.Counter(shown["a"]).values()) <= {len(shown["a"]) // 40, len(shown["a"]) // 40 + 1}
    reordered = made_data({name: own[::-1] for name, own in files.items()})
    write_page(tmp_path, reordered)
    again, _ = dialogues_in(tmp_path)
    assert {name: sorted(own) for name, own in again.items()} == {name: sorted(own) for name, own in shown.items()}


def test_long_dialogues_do_not_take_the_place_of_others(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "MAX_PAGE", 160_000)
    data = made_data({"a": MANY, "b": MANY})
    for dialogue in data["dialogues"]:
        if dialogue["t"] % 10 == 0:                                 # 40 of 400 tasks, each beyond the page alone
            dialogue["turns"] *= 300
    write_page(tmp_path, data)
    shown, page = dialogues_in(tmp_path)
    assert len(shown["a"]) == len(shown["b"]) > 60 and max(len(one["turns"]) for one in page["dialogues"]) == 4
    assert (tmp_path / "r.html").stat().st_size <= 160_000


def test_states_keep_their_history_where_their_dialogue_is_left_out(tmp_path, monkeypatch):
    data = made_data({"a": MANY})
    for number in range(0, 400, 20):
        dialogue = data["dialogues"][number]
        dialogue["turns"][1]["state"] = len(data["states"])
        data["states"].append({"d": number, "t": dialogue["t"], "turn": 0, "history": dialogue["turns"][:1],
                               "candidates": [{"text": f"of {number}", "advantage": 0.5}]})
    write_page(tmp_path, data)
    _, page = dialogues_in(tmp_path)
    assert len(page["dialogues"]) == 400 and page["left_out"] is None
    assert not any("history" in state for state in page["states"])
    monkeypatch.setattr(report, "MAX_PAGE", 160_000)
    write_page(tmp_path, data)
    _, page = dialogues_in(tmp_path)
    assert len(page["states"]) == 20 and 60 < len(page["dialogues"]) < 400
    linked = [state for state in page["states"] if state["d"] is not None]
    assert 0 < len(linked) < 20
    for number, state in enumerate(page["states"]):
        assert page["tasks"][state["t"]]["id"] == f"t{state['candidates'][0]['text'].removeprefix('of ')}"
        if state["d"] is None:
            assert [turn["text"] for turn in state["history"]] == ["?"]
        else:
            assert "history" not in state and page["dialogues"][state["d"]]["turns"][1]["state"] == number
            assert page["dialogues"][state["d"]]["t"] == state["t"]
    monkeypatch.setattr(report, "MAX_STATE_BYTES", 1_000)
    assert "states are left out, at equal distances" in write_page(tmp_path, data)
    _, page = dialogues_in(tmp_path)
    assert 0 < len(page["states"]) < 20
    assert {turn.get("state", 0) for one in page["dialogues"] for turn in one["turns"]} <= set(range(20))


def test_05_prints_what_the_page_leaves_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "MAX_PAGE", 130_000)
    for name in "ab":
        rows = [json.dumps(hostile_row("task_id", task)) for task in MANY]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    stage(5).main([*(f"{name}={tmp_path / name}.jsonl" for name in "ab"), "--export", "messages", "--out",
                   str(tmp_path / "out")])
    page = (tmp_path / "out" / "report.html").read_text()
    data = strict(Reader(page).scripts[0])
    assert f"report.html: {data['left_out']}\n" in capsys.readouterr().out
    assert "of 800 dialogues are left out" in data["left_out"] and len(page.encode()) <= 130_000
    assert len(read(tmp_path / "out" / "export" / "a.jsonl")) == 400                     # the export has all
