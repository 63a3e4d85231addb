"""The table of a study from its outcomes: python scripts/table.py docs/TASKS.csv [BASELINE]

Reads tasks.csv of scripts/study.py: arm, seed, task_id, family, success and rounds of each dialogue. [..] are 95 %
intervals by bootstrap over tasks and seeds; "families" draws families of tasks first."""
import csv
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from lib import statistics  # noqa: E402


def read_arms(path):
    """{arm: its dialogues} as lib.statistics takes trajectories."""
    arms = {}
    with open(path, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            dialogue = {"task_id": row["task_id"], "run": int(row["seed"]), "task": {"family": row["family"]},
                        "success": float(row["success"]), "rounds": int(row["rounds"])}
            arms.setdefault(row["arm"], []).append(dialogue)
    return arms


def success(dialogue):
    return dialogue["success"]


def interval_text(interval):
    return "[{:+.3f}, {:+.3f}]".format(*interval) if interval else ""


def main(path, baseline=None):
    arms, rows = read_arms(path), []
    for arm, dialogues in arms.items():
        tasks, values = statistics.values_of_runs(dialogues, success)
        of_arm = statistics.intervals(values, tasks, dialogues)
        row = [arm, f"{statistics.mean_over_tasks(dialogues, success):.3f}", interval_text(of_arm.get("ci95")),
               f"{statistics.mean([dialogue['rounds'] for dialogue in dialogues]):.2f}"]
        if baseline:
            against = statistics.paired_difference(dialogues, arms[baseline], success)
            row += [f"{against['difference']:+.3f}", interval_text(against.get("ci95")),
                    interval_text(against.get("ci95_families"))]
        rows.append(row)
    headings = ["arm", "success", "95 %", "rounds"]
    if baseline:
        headings += [f"against {baseline}", "95 %", "families"]
    print("\n".join(statistics.aligned(headings, rows)))


if __name__ == "__main__":
    main(*sys.argv[1:])
