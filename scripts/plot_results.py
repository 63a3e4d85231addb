"""Draws success over seeds, rounds or dialogues: python scripts/plot_results.py [docs/seeds.csv [docs/results.svg]]

Reads a table with the columns method, success, low, high (the 95 % interval), and one that says what it is over:
seed       a number: one run; "all": the mean over the runs, which alone has an interval
round      a round of training (scripts/rounds.sh)
dialogues  the number of dialogues that a method was trained on (scripts/efficiency.sh)
"""
import csv
import sys

from matplotlib import rc_context
from matplotlib.figure import Figure

DASHES = "-", "--", ":", "-."
MARKERS = "o", "s", "D", "^", "v", "P"
LINE = {"color": "black", "linewidth": 1, "markersize": 4, "capsize": 2}
DOTS = {"linestyle": "", "marker": "o", "color": "white", "markeredgecolor": "0.35", "markersize": 5}     # of the runs
BAR = {"linestyle": "", "marker": "s", "color": "black", "markersize": 4, "capsize": 3}                  # of their mean


def rows_of_methods(rows):
    """{method: its rows}, in the order of the table."""
    methods = {}
    for row in rows:
        methods.setdefault(row["method"], []).append(row)
    return methods


def numbers(rows, column):
    return [float(row[column]) for row in rows]


def distances(rows):
    """How far the ends of the intervals are below and above the success, as errorbar takes them."""
    below = [float(row["success"]) - float(row["low"]) for row in rows]
    above = [float(row["high"]) - float(row["success"]) for row in rows]
    return [below, above]


def draw_seeds(axes, rows):
    """A row a method: its runs, and below them their mean with its interval."""
    methods = rows_of_methods(rows)
    for place, method_rows in enumerate(methods.values()):
        runs = numbers([row for row in method_rows if row["seed"] != "all"], "success")
        means = [row for row in method_rows if row["seed"] == "all"]
        [mean], [high] = numbers(means, "success"), numbers(means, "high")
        heights = [place + 0.13] * len(runs)
        [dots] = axes.plot(runs, heights, **DOTS)
        bar = axes.errorbar(mean, place - 0.16, xerr=distances(means), **BAR)
        axes.annotate(f"{mean:.3f}".lstrip("0"), (high, place - 0.16), (6, -3), textcoords="offset points", fontsize=9)
    axes.set_yticks(range(len(methods)), methods)
    axes.set(xlim=(0.3, 1), ylim=(-0.5, len(methods) - 0.5))
    axes.set_xlabel("success on 500 held-out tasks (all 10 hidden tests pass)")
    axes.grid(axis="x", color="0.9")
    axes.legend([dots, bar], ["one seed", "mean, 95 % interval (seeds, tasks)"], loc="lower right", fontsize=8)


def draw_line(axes, number, method, places, rows):
    """The line of one method with its intervals; number: of the method, which gives it a look."""
    marker, dashes = MARKERS[number % 6], DASHES[number % 4]
    success = numbers(rows, "success")
    axes.errorbar(places, success, distances(rows), marker=marker, linestyle=dashes, label=method, **LINE)


def draw_rounds(axes, rows):
    """A line a method over rounds of training."""
    for number, (method, method_rows) in enumerate(rows_of_methods(rows).items()):
        places = [place + 0.03 * number for place in numbers(method_rows, "round")]          # side by side
        draw_line(axes, number, method, places, method_rows)
    axes.set_xticks(sorted({int(row["round"]) for row in rows}))
    axes.set(xlabel="round of training", ylabel="success (all 10 hidden tests pass)")
    axes.grid(axis="y", color="0.9")
    axes.figure.legend(loc="outside right upper", fontsize=8)


def draw_dialogues(axes, rows):
    """A line a method over the number of dialogues, on a log axis."""
    for number, (method, method_rows) in enumerate(rows_of_methods(rows).items()):
        method_rows.sort(key=lambda row: int(row["dialogues"]))
        places = [place * 1.03 ** number for place in numbers(method_rows, "dialogues")]     # side by side
        draw_line(axes, number, method, places, method_rows)
    ticks = sorted({int(row["dialogues"]) for row in rows})
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set(xlabel="dialogues trained on", ylabel="success (all 10 hidden tests pass)")
    axes.grid(axis="y", color="0.9")
    axes.figure.legend(loc="outside right upper", fontsize=8)


KINDS = {                                                            # the column of a table: (how to draw it, size)
    "seed": (draw_seeds, (7, 2.6)),
    "round": (draw_rounds, (7, 4)),
    "dialogues": (draw_dialogues, (7, 4)),
}


def main(table="docs/seeds.csv", out="docs/results.svg"):
    with open(table, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    columns = [column for column in KINDS if rows and column in rows[0]]
    if not columns:
        sys.exit(f"error: {table}: no rows with one of the columns {', '.join(KINDS)}")
    draw, size = KINDS[columns[0]]
    figure = Figure(figsize=size, layout="constrained")
    draw(figure.subplots(), rows)
    metadata = {"Date": None} if out.endswith(".svg") else None
    with rc_context({"svg.hashsalt": "seeds"}):                      # the same input gives the same file
        figure.savefig(out, metadata=metadata, facecolor="white", dpi=150)
    print(f"writes {out}")


if __name__ == "__main__":
    main(*sys.argv[1:])
