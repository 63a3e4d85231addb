"""Plots success over dialogues or rounds, one line per method: python scripts/plot.py out/study/table.csv curve.svg

Reads a table of scripts/study.py, or one of docs/data/: the columns method, success, low, high (the 95 % interval), and
dialogues or round, whichever has several values."""
import pathlib
import sys

from matplotlib import rc_context

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from lib.report.plots import curve_figure  # noqa: E402
from scripts.table import read_csv  # noqa: E402


def main(table, out):
    rows = read_csv(table)
    column = "round"
    if len({row.get("dialogues") for row in rows} - {""}) > 1:       # the base model may have none
        column = "dialogues"
    curves = {}
    for row in rows:
        if row[column]:
            point = {"success": float(row["success"]), "ci95": [float(row["low"]), float(row["high"])]}
            curves.setdefault(row["method"], {})[int(row[column])] = point
    figure = curve_figure(curves, "success", f"{column} of training", is_log=column == "dialogues")
    with rc_context({"svg.hashsalt": "plot"}):                       # the same input gives the same file
        figure.savefig(out, metadata={"Date": None})
    print(f"writes {out}")


if __name__ == "__main__":
    main(*sys.argv[1:])
