"""Plots of the report: SVG elements whose texts and axes have the page's own colour (currentColor). Lines differ by
colours that colour-blind people can tell apart, by dashes and by markers."""
import io
import math
import re
import textwrap

import numpy as np
from matplotlib import cycler, rc_context
from matplotlib.figure import Figure

COLOURS = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"       # of Okabe and Ito
LOOKS = cycler(color=COLOURS * 5, linestyle=("-", "--", ":") * 10, marker=("o", "s", "D", "^", "v") * 6)     # of lines
PANELS = {"acc": "pair accuracy", "margin": "margin", "nll": "nll of a chosen token", "gnorm": "gradient norm"}
ALIKE = 3                        # losses share a panel if their largest values differ by at most this factor

STYLE = {
    "svg.fonttype": "none",                                          # texts, in the page's font
    "svg.hashsalt": "report",                                        # the same ids each time
    "text.parse_math": False,                                        # a name may have a $
    "font.size": 10,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.3,
    "grid.color": "black",
}


def as_svg(figure, name):
    """A figure as an SVG element of a page that has several: ids begin with `name`, black is the page's own colour."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(["Date", "Creator", "Format", "Type"]))
    svg = file.getvalue()
    element = svg[svg.index("<svg"):].replace("<svg", '<svg fill="currentColor"', 1)
    element = re.sub(r'( id="|:href="#|url\(#)', rf"\g<1>{name}-", element)
    return element.replace("#000000", "currentColor")


# ---------------------------------------------------------------------------------------------------------------------
# the plots

def curve_figure(curves, metric, x_label, is_log=True):
    """`metric` against N, with 95 % error bars. curves: {label: {N: metrics of the method}}."""
    figure = Figure((7, 4), layout="constrained")
    axes = figure.subplots()
    axes.set_prop_cycle(LOOKS)
    ticks = sorted(set().union(*curves.values()))
    for number, (label, points) in enumerate(curves.items()):
        sizes = sorted(points)
        shift = 1 + 0.02 * (number - (len(curves) - 1) / 2)          # points of one N side by side
        means = np.array([points[size][metric] for size in sizes])
        bounds = np.array([points[size].get("ci95", 2 * [points[size][metric]]) for size in sizes])      # (sizes, 2)
        errors = abs(bounds.T - means)                                                     # (2, sizes)
        axes.errorbar(np.multiply(sizes, shift), means, errors, markersize=5, capsize=3, label=label)
    if is_log:
        axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, labels=[f"{tick:,}" for tick in ticks])
    axes.set_xlabel(x_label)
    axes.set_ylabel(metric.replace("_", " "))
    axes.grid(axis="y")
    figure.legend(loc="outside right upper")
    return figure


def history_points(rows, key):
    """(shares of the steps so far, values) of a key of metrics.jsonl, as means over a twentieth of the points."""
    logged = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    if not logged:
        return [], []
    steps, values = np.array(logged).T
    width = math.ceil(len(values) / 20)
    return steps[width - 1:] / rows[-1]["step"], np.convolve(values, np.ones(width) / width, "valid")


def loss_groups(histories):
    """Lists of names whose losses have about the same size (ALIKE). In one panel the loss of a likelihood would flatten
    those of preferences."""
    sizes = {}
    for name, rows in histories.items():
        _, losses = history_points(rows, "loss")
        sizes[name] = max(map(abs, losses), default=0)
    groups = []
    for name in sorted(sizes, key=sizes.get):
        if not groups or sizes[name] > ALIKE * sizes[groups[-1][0]]:
            groups.append([])
        groups[-1].append(name)
    return groups


def new_panel(title, x_label, height):
    figure = Figure((5, height), layout="constrained")
    axes = figure.subplots()
    axes.set_title(textwrap.fill(title, 60), fontsize=11)
    axes.set_xlabel(x_label)
    axes.set_axisbelow(True)
    axes.grid(axis="y")
    return figure, axes


def training_panels(histories):
    """An SVG for each group of losses and each of PANELS, smoothed, and one of the legend.
    histories: {name: rows of a metrics.jsonl}."""
    groups = loss_groups(histories)
    panels = []
    for names in groups:
        title = f"loss ({', '.join(names)})" if len(groups) > 1 else "loss"
        panels.append(("loss", title, names))
    for key, title in PANELS.items():
        panels.append((key, title, list(histories)))
    looks = dict(zip(histories, LOOKS))
    svgs, handles = [], {}                                           # handles: of the legend
    for number, (key, title, names) in enumerate(panels):
        figure, axes = new_panel(title, "share of its steps", 3.2)
        for name in names:
            shares, values = history_points(histories[name], key)
            [line] = axes.plot(shares, values, markersize=4, linewidth=1.5, markevery=0.2, label=name, **looks[name])
            if key == "loss":
                handles[name] = line
                if len(values):
                    line.set_label(f"{name} (loss {values[0]:.3g} to {values[-1]:.3g})")
        svgs.append(as_svg(figure, f"training-{number}"))
    legend = Figure((5, 3.2))
    legend.legend(handles=[handles[name] for name in histories], loc="center", fontsize=11)
    return [*svgs, as_svg(legend, "training-legend")]


def reward_panels(rewards):
    """An SVG for each method: the share of its dialogues in each tenth of the range of rewards.
    rewards: {name: [a reward, …]}."""
    lowest = min(map(min, rewards.values()))
    edges = np.linspace(-1 if lowest < 0 else 0, 1, 11)
    shares = {}
    for name, values in rewards.items():
        counts, _ = np.histogram(np.clip(values, edges[0], 1), edges)
        shares[name] = counts / len(values)
    highest = max(map(max, shares.values()))
    svgs = []
    for number, name in enumerate(rewards):
        figure, axes = new_panel(name, "reward", 2)
        axes.stairs(shares[name], edges, fill=True, color=COLOURS[0])
        axes.set_ylim(0, 1.05 * highest)                             # the same for all
        svgs.append(as_svg(figure, f"rewards-{number}"))
    return svgs


# ---------------------------------------------------------------------------------------------------------------------

def as_grid(svgs):
    return f'<div class="panels">{"".join(svgs)}</div>'


@rc_context(STYLE)
def report_plots(metric, curves, histories, rewards):
    """[(title, SVG, caption)] of the report. curves: as curve_figure's; histories: as training_panels'; rewards: as
    reward_panels', empty if rewards are not graded."""
    plots = []
    if curves:
        svg = as_svg(curve_figure(curves, metric, "N"), "curve")
        plots.append(("Curves", svg, "The methods that are named LABEL@N."))
    if rewards:
        plots.append(("Rewards", as_grid(reward_panels(rewards)), "Share of the dialogues by their reward."))
    if histories:
        plots.append(("Training", as_grid(training_panels(histories)), "metrics.jsonl of each model, smoothed; steps "
                      "of different methods differ in number and size. The gradient norm is that before clipping."))
    return plots
