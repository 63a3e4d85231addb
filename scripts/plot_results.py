"""Draws success over seeds, or over rounds: python scripts/plot_results.py [docs/seeds.csv [docs/results.svg]]

Reads a table with the columns method, seed, success, low, high. A row with a number as its seed is one run. A row with
the seed "all" is the mean over the runs, with its 95 % interval. Or a table with a column round (scripts/rounds.sh)."""
import csv
import sys

from matplotlib import rc_context
from matplotlib.figure import Figure


def main(table="docs/seeds.csv", out="docs/results.svg"):
    with open(table, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    figure = Figure(figsize=(7, 2.6) if "seed" in rows[0] else (7, 4), layout="constrained")
    (draw_seeds if "seed" in rows[0] else draw_rounds)(figure.subplots(), rows)
    with rc_context({"svg.hashsalt": "seeds"}):                          # the same input gives the same file
        figure.savefig(out, metadata={"Date": None} if out.endswith(".svg") else None, facecolor="white", dpi=150)
    print(f"writes {out}")


def draw_seeds(axes, rows):
    methods = list(dict.fromkeys(row["method"] for row in rows))
    for place, method in enumerate(methods):
        own = [row for row in rows if row["method"] == method]
        runs = [float(row["success"]) for row in own if row["seed"] != "all"]
        [whole] = [row for row in own if row["seed"] == "all"]
        mean, low, high = (float(whole[key]) for key in ("success", "low", "high"))
        axes.plot(runs, [place + 0.13] * len(runs), "o", color="white", markeredgecolor="0.35", markersize=5,
                  label="one seed" if place == 0 else None)
        axes.errorbar(mean, place - 0.16, xerr=[[mean - low], [high - mean]], fmt="s", color="black", capsize=3,
                      markersize=4, label="mean, 95 % interval (seeds, tasks)" if place == 0 else None)
        axes.annotate(f"{mean:.3f}".lstrip("0"), (high, place - 0.16), (6, -3), textcoords="offset points", fontsize=9)
    axes.set_yticks(range(len(methods)), methods)
    axes.set(xlim=(0.3, 1), ylim=(-0.5, len(methods) - 0.5))
    axes.set_xlabel("success on 500 held-out tasks (all 10 hidden tests pass)")
    axes.grid(axis="x", color="0.9")
    axes.legend(loc="lower right", fontsize=8)


def draw_rounds(axes, rows):
    for number, method in enumerate(dict.fromkeys(row["method"] for row in rows)):
        own = [row for row in rows if row["method"] == method]
        rounds, success, low, high = ([float(row[key]) for row in own] for key in ("round", "success", "low", "high"))
        places = [n + 0.03 * number for n in rounds]                     # the intervals side by side
        errors = [[s - at for s, at in zip(success, low)], [at - s for s, at in zip(success, high)]]
        axes.errorbar(places, success, errors, color="black", fmt="osD^vP"[number % 6], markersize=4, capsize=2,
                      linestyle=("-", "--", ":", "-.")[number % 4], linewidth=1, label=method)
    axes.set_xticks(sorted({int(row["round"]) for row in rows}))
    axes.set(xlabel="round of training", ylabel="success (all 10 hidden tests pass)")
    axes.grid(axis="y", color="0.9")
    axes.figure.legend(loc="outside right upper", fontsize=8)


if __name__ == "__main__":
    main(*sys.argv[1:])
