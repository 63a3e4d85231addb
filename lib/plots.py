"""Plots of the report: SVG elements in one colour, the page's own (currentColor); lines differ by dashes, markers."""
import collections
import contextlib
import io
import itertools
import re
import warnings

from lib.runtime import InputError
from lib.tables import finite, heading_of

LINES = [(("-", "--", ":")[i % 3], "osD^v"[i % 5]) for i in range(15)]
PANELS = {"loss": "loss", "acc": "pair accuracy", "margin": "margin", "nll": "log-probability of a chosen token",
          "gnorm": "gradient norm"}


MAX_LABEL = 60                       # characters of a label; a longer one would leave no room for the axes
MAX_POINTS = 1_000                   # of a training curve
MAX_ROUNDS = 50                      # a plot counts dialogues of more rounds as dialogues of so many


def plain(text):
    """A label as text, no formula, in one line; a lone surrogate, which no font has, as its escape."""
    text = re.sub(r"[\x00-\x1f\x7f-\x9f]", " ", str(text))
    text = text if len(text) <= MAX_LABEL else text[:MAX_LABEL - 1] + "…"
    hidden = "\u200b" if text.startswith("_") else ""               # matplotlib leaves out labels that begin with _
    return hidden + text.replace("$", r"\$").encode("utf-8", "backslashreplace").decode()


def line(number):
    """How the line of a number is drawn."""
    style, marker = LINES[number % len(LINES)]
    return {"linestyle": style, "marker": marker, "color": "black", "markersize": 5}


@contextlib.contextmanager
def canvas(name, size=(7, 4), rows=1, columns=1):
    """(figure, its rows x columns axes, a list that has the SVG element when the block ends); ids in it begin with
    `name`."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("the report needs the package matplotlib: pip install matplotlib") from None
    settings = {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 10, "legend.frameon": False,
                "axes.spines.top": False, "axes.spines.right": False, "grid.alpha": 0.3, "grid.color": "black"}
    with rc_context(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")                             # a font that lacks a sign of a name
        figure, found = Figure(figsize=size, layout="constrained"), []
        yield figure, list(figure.subplots(rows, columns, squeeze=False).flat), found
        figure.savefig(svg := io.StringIO(), format="svg", transparent=True,
                       metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = svg.getvalue()[svg.getvalue().index("<svg"):].replace("<svg", '<svg fill="currentColor"', 1)
    found.append(re.sub("<[^>]*>", lambda tag: re.sub(r'( id="|:href="#|url\(#)', rf"\g<1>{name}-", tag[0]).replace(
        "#000000", "currentColor"), text))


def interval_svg(bars, heading):
    """bars: {name: {"value", "low", "high"}}, each a point with its 95 % interval."""
    with canvas("success", (7, 1 + 0.45 * len(bars))) as (_, [axes], svg):
        for row, bar in enumerate(bars.values()):
            sides = [[abs(bar["value"] - bar[side])] for side in ("low", "high")]
            axes.errorbar([bar["value"]], [-row], xerr=sides, marker="o", color="black", capsize=4)
            axes.annotate(f"{bar['value']:.3f}", (bar["value"], -row), (0, 6), textcoords="offset points", ha="center",
                          fontsize=8)
        axes.set_yticks([-row for row in range(len(bars))], [plain(name) for name in bars])
        axes.set_ylim(0.6 - len(bars), 0.6)
        axes.set_xlabel(f"{heading}, 95 % interval")
        axes.grid(axis="x")
    return svg[0]


def known_svg(points):
    """points: {name: (share of dialogues with all known, success among these)}."""
    with canvas("known") as (figure, [axes], svg):
        for number, (name, point) in enumerate(points.items()):
            look = line(number) | {"linestyle": "", "markersize": 8, "fillstyle": "none"}      # points may lie together
            axes.plot(*([value] for value in point), **look, label=plain(name))
        axes.set_xlim(0, 1.05)
        axes.set_ylim(0, 1.05)
        axes.set_xlabel("share of the dialogues in which all was known before the last turn")
        axes.set_ylabel("success among these")
        axes.grid()
        figure.legend(loc="outside right upper")
    return svg[0]


def rounds_svg(rounds):
    """rounds: {name: [number of rounds of each dialogue]}."""
    most = max(map(max, rounds.values()))
    lengths = range(1, 1 + min(most, MAX_ROUNDS))
    with canvas("rounds") as (figure, [axes], svg):
        for number, (name, own) in enumerate(rounds.items()):
            counts = collections.Counter(min(length, MAX_ROUNDS) for length in own)
            axes.plot(lengths, [counts[n] / len(own) for n in lengths], **line(number), label=plain(name))
        axes.set_xlabel("rounds" if most <= MAX_ROUNDS else f"rounds ({MAX_ROUNDS}: {MAX_ROUNDS} and more)")
        axes.set_ylabel("share of the dialogues")
        axes.set_ylim(bottom=0)
        axes.grid(axis="y")
        figure.legend(loc="outside right upper")
    return svg[0]


CURVES = {                                                           # title, what N counts, caption
    "best of N": ("Best of N", "N, candidates a turn", "The critic picks one of N candidates at each turn."),
    "trajectories": ("Data", "trajectories trained on", "The same method on more trajectories."),
    "rounds": ("Rounds of training", "round", "Each round trains the agent of the one before on fresh dialogues."),
}


def curve_svg(curves, metric, kind="best of N"):
    """`metric` against N, which counts what `kind` (of CURVES) says, with 95 % error bars. curves: {label: {"N":
    {metric, "ci95"}}}."""
    with canvas(f"{kind.split()[0]}-curve") as (figure, [axes], svg):
        for number, (label, points) in enumerate(curves.items()):
            sizes = sorted(points, key=int)
            means = [points[n][metric] for n in sizes]
            errors = [[abs(points[n]["ci95"][side] - mean) for n, mean in zip(sizes, means)] for side in (0, 1)]
            shift = 1 + 0.02 * (number - (len(curves) - 1) / 2)                        # points of one N side by side
            axes.errorbar([int(n) * shift for n in sizes], means, errors, **line(number), capsize=3, label=plain(label))
        sizes = sorted({int(n) for points in curves.values() for n in points})
        if kind != "rounds":
            axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, labels=map(str, sizes), minor=False)
        axes.set_xlabel(CURVES[kind][1])
        axes.set_ylabel(metric.replace("_", " "))
        axes.grid(axis="y")
        figure.legend(loc="outside right upper")
    return svg[0]


def spent_svg(curves, metric):
    """`metric` against the tokens trained on and generated, in millions; None where no point has them (--costs)."""
    if not all("trained_tokens" in point for points in curves.values() for point in points.values()):
        return None
    with canvas("spent", (9, 4), columns=2) as (figure, panels, svg):
        for axes, key in zip(panels, ("trained_tokens", "generated_tokens")):
            for number, (label, points) in enumerate(curves.items()):
                sizes = sorted(points, key=int)
                axes.plot([points[n][key] / 1e6 for n in sizes], [points[n][metric] for n in sizes], **line(number),
                          label=plain(label))
            axes.set_xlabel(f"million {key.replace('_', ' ')}")
            axes.set_ylabel(metric.replace("_", " "))
            axes.grid(axis="y")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
    return svg[0]


def smoothed(values):
    """The mean of each value and those before it, a twentieth of all."""
    width = max(1, len(values) // 20)
    sums = [0, *itertools.accumulate(values)]
    return [(sums[i + 1] - sums[max(0, i + 1 - width)]) / min(width, i + 1) for i in range(len(values))]


def history_points(rows, key):
    """(steps, smoothed values) of a key of metrics.jsonl, at most MAX_POINTS at equal distances; values that are no
    finite numbers are left out."""
    points = [(row["step"], -row[key] if key == "nll" else row[key]) for row in rows
              if finite(row["step"]) is not None and finite(row.get(key)) is not None]
    curve = list(zip([step for step, _ in points], smoothed([value for _, value in points])))
    if len(curve) > MAX_POINTS:
        curve = [curve[i * len(curve) // MAX_POINTS] for i in range(MAX_POINTS)]
    return [step for step, _ in curve], [value for _, value in curve]


def training_svg(histories):
    """histories: {name: rows of a metrics.jsonl}; a panel for each of PANELS that one of them has, smoothed."""
    panel_keys = [key for key in PANELS if any(key in row for rows in histories.values() for row in rows)]
    with canvas("training", (9, 5), rows=2, columns=3) as (figure, panels, svg):
        for axes, key in zip(panels, panel_keys):
            for number, (name, rows) in enumerate(histories.items()):
                steps, values = history_points(rows, key)
                if steps:
                    look = line(number) | {"markersize": 3, "linewidth": 1, "markevery": max(1, len(steps) // 6)}
                    axes.plot(steps, values, **look, label=plain(name))
            axes.set_title(PANELS[key], fontsize=10)
            axes.set_xlabel("step")
        for axes in panels[len(panel_keys):]:
            axes.set_axis_off()
        found = {text: handle for axes in panels for handle, text in zip(*axes.get_legend_handles_labels())}
        figure.legend(found.values(), found, loc="outside right upper")
    return svg[0]


def report_plots(metrics, bars, metric, files, curves, histories):
    """[{"title", "svg", "caption"}] of the report: what there is to see of the methods. bars: as interval_svg's;
    curves: {"best of N", "trajectories", "rounds": as curve_svg's}; histories: as training_svg's."""
    heading = heading_of(metric)
    known = {name: (m["all_known"], m["success_when_known"]) for name, m in metrics.items()
             if "success_when_known" in m}
    rounds = {name: [sum(turn["role"] == "assistant" for turn in t["dialogue_history"]) for t in own]
              for name, own in files.items()}
    plots = [(heading.capitalize(), interval_svg(bars, heading), "The mean of each method and its 95 % interval.")]
    if known:
        plots.append(("What was known, what was made of it", known_svg(known), "To the right: the agent asked for what "
                      "matters. Up: it made the right answer of what it knew."))
    plots.append(("Rounds", rounds_svg(rounds), "Turns of the agent in a dialogue, as shares of the dialogues."))
    for kind, (title, _, caption) in CURVES.items():
        if kind in curves:
            plots.append((title, curve_svg(curves[kind], metric, kind), caption))
    if "rounds" in curves and (spent := spent_svg(curves["rounds"], metric)):
        plots.append(("Rounds against tokens", spent, "The same points; tokens of all models that a method took (its "
                      "first run), critics and earlier rounds included."))
    if histories:
        plots.append(("Training", training_svg(histories), "metrics.jsonl of each model, as means over a twentieth of "
                      "the points; the gradient norm is that before clipping."))
    return [dict(zip(("title", "svg", "caption"), plot)) for plot in plots]
