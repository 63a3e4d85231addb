"""Plots how far SWEET leads multi-turn DPO in each setting that was played: python scripts/forest.py docs/forest.svg

Reads docs/data/. A line is the difference in success and its 95 % interval by bootstrap over tasks and seeds, as
scripts/table.py prints it."""
import operator
import pathlib
import sys

from matplotlib import rc_context
from matplotlib.figure import Figure

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from lib.report.plots import COLOURS, STYLE  # noqa: E402
from lib.statistics import paired_difference  # noqa: E402
from scripts.table import read_arms, read_csv  # noqa: E402

DATA = pathlib.Path(__file__).resolve().parents[1] / "docs" / "data"
RUN_SH, PAPER, TERM = "run.sh's form", "the paper's form", "run.sh's form with a further loss term"
MARKERS = dict(zip((RUN_SH, PAPER, TERM), "osD"))
# (setting, form, file, arm, baseline), from the top
LINES = [
    ("functions, base A, 320 dialogues", RUN_SH, "worth.csv.gz", "sweet", "mtdpo"),
    ("", PAPER, "worth.csv.gz", "paper", "mtdpo"),
    ("functions, base B", RUN_SH, "base_b.csv.gz", "sweet", "mtdpo"),
    ("SQL queries", RUN_SH, "worth_sql.csv.gz", "sweet", "mtdpo"),
    ("", TERM, "worth_sql.csv.gz", "sweet-answers", "mtdpo"),
    ("base C, never saw c", RUN_SH, "base_c_again.csv.gz", "sweet", "mtdpo"),
    ("", PAPER, "base_c_again.csv.gz", "paper", "mtdpo"),
    ("base D, never saw c", RUN_SH, "base_d.csv.gz", "sweet", "mtdpo"),
    ("", PAPER, "base_d.csv.gz", "paper", "mtdpo"),
    ("SmolLM2-135M, four seeds", TERM, "real.csv.gz", "sweet-answers", "mtdpo"),
    ("the same, each seed", PAPER, "real.csv.gz", "paper", "mtdpo"),
    ("base A, 3,200 dialogues", PAPER, "worth.csv.gz", "tenth@3200", "mtdpo@3200"),
    ("base A, after four rounds", RUN_SH, "rounds_320_difference.csv", None, None),
]


def difference_of(file, arm, baseline):
    """{"difference", "ci95", "runs": of each seed} of an arm against the baseline."""
    if arm is None:
        [row] = read_csv(DATA / file)
        return {"difference": float(row["difference"]), "ci95": [float(row["low"]), float(row["high"])]}
    arms = read_arms(DATA / file)
    return paired_difference(arms[arm], arms[baseline], operator.itemgetter("success"))


def main(out):
    with rc_context({**STYLE, "svg.hashsalt": "forest"}):
        figure = Figure((8, 4.6), layout="constrained")
        axes = figure.subplots()
        axes.axvline(0, color="black", linewidth=1)
        colours = dict(zip(MARKERS, COLOURS))
        labelled = set()
        for place, (setting, form, *arms) in enumerate(LINES):
            result = difference_of(*arms)
            points, bounds = [result["difference"]], result["ci95"]
            if "each seed" in setting:                               # one collapsed: an interval would say little
                points, bounds = result["runs"], []
            numbers = " ".join(f"{number:+.3f}" for number in [*points, *bounds])
            print(f"{setting or '  the same':34} {form:40} {numbers}")
            axes.plot(bounds, [-place] * len(bounds), color=colours[form], linewidth=2)
            axes.plot(points, [-place] * len(points), MARKERS[form], color=colours[form],
                      label=None if form in labelled else form)
            labelled.add(form)
        axes.set_yticks([-place for place in range(len(LINES))], labels=[line[0] for line in LINES])
        axes.set_xlabel("success of SWEET minus that of multi-turn DPO, with 95 % interval")
        axes.grid(axis="x")
        axes.legend(loc="upper left")
        figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
