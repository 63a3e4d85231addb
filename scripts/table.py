"""The table of a study from its outcomes: python scripts/table.py docs/data/TASKS.csv.gz [BASELINE]

Reads tasks.csv of scripts/study.py, gzipped or not: arm, seed, task_id, family, success and rounds of each dialogue.
Prints them as 05's table: [..] are 95 % intervals by bootstrap over tasks and seeds; "families drawn": over families
first."""
import csv
import operator
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from colbench.schema import open_lines  # noqa: E402
from lib import statistics  # noqa: E402
from lib.flags import argument_parser  # noqa: E402
from lib.runtime import InputError, run_stage  # noqa: E402


def read_csv(path):
    """The rows of a CSV file, gzipped or not, as dicts."""
    with open_lines(path) as file:
        return list(csv.DictReader(line.decode() for line in file))


def read_arms(path):
    """{arm: its dialogues}, as trajectories for lib.statistics."""
    arms = {}
    for row in read_csv(path):
        row |= {"run": int(row["seed"]), "success": float(row["success"]), "task": {"family": row["family"]}}
        arms.setdefault(row["arm"], []).append(row)
    return arms


def main(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument("path", metavar="TASKS.csv")
    parser.add_argument("baseline", metavar="BASELINE", nargs="?", help="arm to which the others are compared")
    args = parser.parse_args(argv)
    arms, baseline, success, metrics = read_arms(args.path), args.baseline, operator.itemgetter("success"), {}
    if baseline not in [None, *arms]:
        raise InputError(f"{args.path}: no arm {baseline}, it has {', '.join(arms)}")
    for arm, dialogues in arms.items():
        tasks, values = statistics.values_of_runs(dialogues, success)
        metrics[arm] = {
            "n": len(dialogues),
            "success": statistics.mean_over_tasks(dialogues, success),
            "mean_rounds": statistics.mean([int(dialogue["rounds"]) for dialogue in dialogues]),
            **statistics.intervals(values, tasks, dialogues),
        }
        if baseline and arm != baseline:
            metrics[arm]["against_baseline"] = statistics.paired_difference(dialogues, arms[baseline], success)
    headings, rows = statistics.result_table(metrics, "success", (), baseline)
    print(*statistics.aligned(headings, rows), "", *statistics.detail_lines(metrics, baseline), sep="\n")


if __name__ == "__main__":
    run_stage(main)
