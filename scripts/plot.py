"""Draws success over dialogues or rounds, a line a method: python scripts/plot.py out/study/table.csv curve.svg

Reads a table of scripts/study.py, or one of docs/: the columns method, success, low, high (the 95 % interval), and
dialogues or round, whichever has several values."""
import csv
import sys

from matplotlib import rc_context
from matplotlib.figure import Figure

DASHES = "-", "--", ":", "-."
MARKERS = "o", "s", "D", "^", "v", "P"
LINE = {"color": "black", "linewidth": 1, "markersize": 4, "capsize": 2}


def points_of(rows, column):
    """{method: [(number, success, low, high)], sorted}."""
    methods = {}
    for row in rows:
        point = [float(row[key]) for key in (column, "success", "low", "high")]
        methods.setdefault(row["method"], []).append(point)
    return {method: sorted(points) for method, points in methods.items()}


def draw(axes, methods):
    for number, (method, points) in enumerate(methods.items()):
        places, success, low, high = zip(*points)
        places = [place * 1.02 ** number for place in places]        # side by side
        below = [value - bound for value, bound in zip(success, low)]
        above = [bound - value for value, bound in zip(success, high)]
        axes.errorbar(places, success, [below, above], marker=MARKERS[number % 6], linestyle=DASHES[number % 4],
                      label=method, **LINE)


def main(table, out):
    with open(table, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    columns = [name for name in ("dialogues", "round") if len({row.get(name) for row in rows}) > 1]
    if not columns:
        sys.exit(f"error: {table}: no column dialogues or round with several values")
    column = columns[0]
    rows = [row for row in rows if row[column]]                      # of the base model a table may have none
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    draw(axes, points_of(rows, column))
    ticks = sorted({int(row[column]) for row in rows})
    if column == "dialogues":
        axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set(xlabel=f"{column} of training", ylabel="success")
    axes.grid(axis="y", color="0.9")
    figure.legend(loc="outside right upper", fontsize=8)
    metadata = {"Date": None} if out.endswith(".svg") else None
    with rc_context({"svg.hashsalt": "plot"}):                       # the same input gives the same file
        figure.savefig(out, metadata=metadata, facecolor="white", dpi=150)
    print(f"writes {out}")


if __name__ == "__main__":
    main(*sys.argv[1:])
