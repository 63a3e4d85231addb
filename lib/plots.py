"""Plots of the report: SVG elements in one colour, the page's own (currentColor); lines differ by dashes, markers."""
import collections
import contextlib
import io
import re
import warnings

import numpy as np

from lib.runtime import InputError
from lib.tables import finite, heading_of, spread

DASHES = "-", "--", ":"
MARKERS = "o", "s", "D", "^", "v"
PANELS = {"loss": "loss", "acc": "pair accuracy", "margin": "margin", "nll": "log-probability of a chosen token",
          "gnorm": "gradient norm"}

MAX_LABEL = 60                       # characters of a label; a longer one would leave no room for the axes
MAX_POINTS = 1_000                   # of a training curve
MAX_ROUNDS = 50                      # a plot counts dialogues of more rounds as dialogues of so many

SMALL_TEXT_ABOVE = {"textcoords": "offset points", "ha": "center", "fontsize": 8}
STYLE = {
    "svg.fonttype": "none",                                          # texts, in the page's font
    "font.size": 10,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.3,
    "grid.color": "black",
}


# ---------------------------------------------------------------------------------------------------------------------
# what all plots share

def plain(text):
    """A label as text, no formula, in one line; a lone surrogate, which no font has, as its escape."""
    text = re.sub(r"[\x00-\x1f\x7f-\x9f]", " ", str(text))
    if len(text) > MAX_LABEL:
        text = text[:MAX_LABEL - 1] + "…"
    if text.startswith("_"):
        text = "\u200b" + text                                       # matplotlib leaves out labels that begin with _
    return text.replace("$", r"\$").encode("utf-8", "backslashreplace").decode()


def line(number):
    """How the line of a number is drawn."""
    return {
        "linestyle": DASHES[number % 3],
        "marker": MARKERS[number % 5],
        "color": "black",
        "markersize": 5,
    }


class Drawing:
    """A figure, its axes (a list), and when the block of `drawing` ends its SVG element."""

    def __init__(self, figure, axes):
        self.figure = figure
        self.axes = axes
        self.svg = ""


@contextlib.contextmanager
def drawing(name, size=(7, 4), rows=1, columns=1):
    """A Drawing of rows x columns axes; ids in it begin with `name`."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("the report needs the package matplotlib: pip install matplotlib") from None
    with rc_context({**STYLE, "svg.hashsalt": name}), warnings.catch_warnings():
        warnings.simplefilter("ignore")                             # a font that lacks a sign of a name
        figure = Figure(figsize=size, layout="constrained")
        picture = Drawing(figure, list(figure.subplots(rows, columns, squeeze=False).flat))
        yield picture
        file = io.StringIO()
        no_metadata = dict.fromkeys(["Date", "Creator", "Format", "Type"])
        figure.savefig(file, format="svg", transparent=True, metadata=no_metadata)
    picture.svg = for_page(file.getvalue(), name)


def for_page(svg, name):
    """An SVG file as an element of a page that has several: ids begin with `name`, black is the page's own colour."""
    element = svg[svg.index("<svg"):].replace("<svg", '<svg fill="currentColor"', 1)

    def change(tag):
        tag = re.sub(r'( id="|:href="#|url\(#)', rf"\g<1>{name}-", tag[0])
        return tag.replace("#000000", "currentColor")
    return re.sub("<[^>]*>", change, element)


def legend(picture):
    picture.figure.legend(loc="outside right upper")


# ---------------------------------------------------------------------------------------------------------------------
# the plots

def interval_svg(bars, heading):
    """bars: {name: {"value", "low", "high"}}, each a point with its 95 % interval."""
    with drawing("success", (7, 1 + 0.45 * len(bars))) as picture:
        [axes] = picture.axes
        rows = range(0, -len(bars), -1)                              # the first one on top
        for row, bar in zip(rows, bars.values()):
            value = bar["value"]
            below, above = abs(value - bar["low"]), abs(value - bar["high"])
            axes.errorbar(value, row, xerr=[[below], [above]], marker="o", color="black", capsize=4)
            axes.annotate(f"{value:.3f}", (value, row), (0, 6), **SMALL_TEXT_ABOVE)
        axes.set_yticks(rows, [plain(name) for name in bars])
        axes.set_ylim(0.6 - len(bars), 0.6)
        axes.set_xlabel(f"{heading}, 95 % interval")
        axes.grid(axis="x")
    return picture.svg


def known_svg(points):
    """points: {name: (share of dialogues with all known, success among these)}."""
    with drawing("known") as picture:
        [axes] = picture.axes
        for number, (name, (known, success)) in enumerate(points.items()):
            look = line(number) | {"linestyle": "", "markersize": 8, "fillstyle": "none"}      # points may lie together
            axes.plot(known, success, **look, label=plain(name))
        axes.set_xlim(0, 1.05)
        axes.set_ylim(0, 1.05)
        axes.set_xlabel("share of the dialogues in which all was known before the last turn")
        axes.set_ylabel("success among these")
        axes.grid()
        legend(picture)
    return picture.svg


def rounds_svg(rounds):
    """rounds: {name: [number of rounds of each dialogue]}."""
    most = max(map(max, rounds.values()))
    lengths = range(1, 1 + min(most, MAX_ROUNDS))
    label = "rounds"
    if most > MAX_ROUNDS:
        label = f"rounds ({MAX_ROUNDS}: {MAX_ROUNDS} and more)"
    with drawing("rounds") as picture:
        [axes] = picture.axes
        for number, (name, lengths_of_name) in enumerate(rounds.items()):
            counts = collections.Counter(min(length, MAX_ROUNDS) for length in lengths_of_name)
            shares = [counts[length] / len(lengths_of_name) for length in lengths]
            axes.plot(lengths, shares, **line(number), label=plain(name))
        axes.set_xlabel(label)
        axes.set_ylabel("share of the dialogues")
        axes.set_ylim(bottom=0)
        axes.grid(axis="y")
        legend(picture)
    return picture.svg


CURVES = {                                                           # title, what N counts, caption
    "best of N": ("Best of N", "N, candidates a turn", "The critic picks one of N candidates at each turn."),
    "trajectories": ("Data", "trajectories trained on", "The same method on more trajectories."),
    "rounds": ("Rounds of training", "round", "Each round trains the agent of the one before on fresh dialogues."),
}


def curve_svg(curves, metric, kind="best of N"):
    """`metric` against N, which counts what `kind` (of CURVES) says, with 95 % error bars.

    curves: {label: {"N": {metric, "ci95"}}}."""
    _, x_label, _ = CURVES[kind]
    ticks = set()
    with drawing(f"{kind.split()[0]}-curve") as picture:
        [axes] = picture.axes
        for number, (label, points) in enumerate(curves.items()):
            sizes = sorted(map(int, points))
            ticks.update(sizes)
            shift = 1 + 0.02 * (number - (len(curves) - 1) / 2)      # points of one N side by side
            places = np.multiply(sizes, shift)
            means = np.array([points[str(size)][metric] for size in sizes])
            bounds = np.array([points[str(size)]["ci95"] for size in sizes])               # (sizes, 2)
            errors = abs(bounds.T - means)                                                 # (2, sizes)
            axes.errorbar(places, means, errors, **line(number), capsize=3, label=plain(label))
        ticks = sorted(ticks)
        if kind != "rounds":
            axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, labels=map(str, ticks), minor=False)
        axes.set_xlabel(x_label)
        axes.set_ylabel(metric.replace("_", " "))
        axes.grid(axis="y")
        legend(picture)
    return picture.svg


def smoothed(values):
    """The mean of each value and those before it, a twentieth of all."""
    width = max(1, len(values) // 20)
    sums = np.cumsum([0.0, *values])                                 # (values + 1,)
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - width)
    return ((sums[ends] - sums[starts]) / (ends - starts)).tolist()


def history_points(rows, key):
    """(steps, smoothed values) of a key of metrics.jsonl, at most MAX_POINTS at equal distances; values that are no
    finite numbers are left out."""
    sign = -1 if key == "nll" else 1
    steps, values = [], []
    for row in rows:
        step, value = finite(row["step"]), finite(row.get(key))
        if step is not None and value is not None:
            steps.append(step)
            values.append(sign * value)
    values = smoothed(values)
    return spread(steps, MAX_POINTS), spread(values, MAX_POINTS)


def training_svg(histories):
    """histories: {name: rows of a metrics.jsonl}; a panel for each of PANELS that one of them has, smoothed."""
    logged_keys = set()
    for rows in histories.values():
        logged_keys.update(*rows)
    panel_keys = [key for key in PANELS if key in logged_keys]
    handles = {}                                                     # {name: its line in the last panel that has it}
    with drawing("training", (9, 5), rows=2, columns=3) as picture:
        for axes, key in zip(picture.axes, panel_keys):
            for number, (name, rows) in enumerate(histories.items()):
                steps, values = history_points(rows, key)
                if not steps:
                    continue
                look = line(number) | {"markersize": 3, "linewidth": 1, "markevery": max(1, len(steps) // 6)}
                [handles[plain(name)]] = axes.plot(steps, values, **look)
            axes.set_title(PANELS[key], fontsize=10)
            axes.set_xlabel("step")
        for axes in picture.axes[len(panel_keys):]:
            axes.set_axis_off()
        picture.figure.legend(handles.values(), handles, loc="outside right upper")
    return picture.svg


# ---------------------------------------------------------------------------------------------------------------------

def report_plots(metrics, bars, metric, files, curves, histories):
    """[{"title", "svg", "caption"}] of the report: what there is to see of the methods. bars: as interval_svg's;
    curves: {"best of N", "trajectories", "rounds": as curve_svg's}; histories: as training_svg's."""
    plots = []

    def add(title, svg, caption):
        plots.append({"title": title, "svg": svg, "caption": caption})

    heading = heading_of(metric)
    add(heading.capitalize(), interval_svg(bars, heading), "The mean of each method and its 95 % interval.")
    known = {}
    for name, method in metrics.items():
        if "success_when_known" in method:
            known[name] = (method["all_known"], method["success_when_known"])
    if known:
        add("What was known, what was made of it", known_svg(known), "To the right: the agent asked for what matters. "
            "Up: it made the right answer of what it knew.")
    rounds = {name: list(map(num_rounds, trajectories)) for name, trajectories in files.items()}
    add("Rounds", rounds_svg(rounds), "Turns of the agent in a dialogue, as shares of the dialogues.")
    for kind, (title, _, caption) in CURVES.items():
        if kind in curves:
            add(title, curve_svg(curves[kind], metric, kind), caption)
    if histories:
        add("Training", training_svg(histories), "metrics.jsonl of each model, as means over a twentieth of the "
            "points; the gradient norm is that before clipping.")
    return plots


def num_rounds(trajectory):
    return sum(turn["role"] == "assistant" for turn in trajectory["dialogue_history"])
