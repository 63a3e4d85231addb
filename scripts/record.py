"""The rules and the entry of scripts/record.sh, which says what a record is (docs/records.md).

    python scripts/record.py check --domain backend --tasks FILE --dialogues FILE --base FOLDER
    python scripts/record.py entry --domain backend --name NAME --folder FOLDER --seeds 20 21 22 23 24"""
import argparse
import hashlib
import json
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from colbench import ColBenchError, DOMAINS  # noqa: E402
from lib import statistics  # noqa: E402
from lib.models import weights_fingerprint  # noqa: E402
from lib.runtime import InputError, read_jsonl, run_stage  # noqa: E402

MARKS = {"backend": 0.85, "sql": 0.50}                              # success that a record must be above
MOST_CHANCE = 0.01                                                  # that it is not
NUM_TESTS, NUM_SEEDS = 300, 5

# What is fixed, as hashes: the test tasks; what a scripted agent and the rule-based human say on 40, with rewards;
# the base model's weights
FIXED = {
    "backend": {"tasks": "28e44f15077f3703", "dialogues": "7203760aeacfb1df", "base": "b86afb8d53cb6475"},
    "sql": {"tasks": "f67e26a3cf2849cf", "dialogues": "f5b545b04ba91da4", "base": "4a9af5d29bf71a2c"},
}


def digest(rows):
    text = json.dumps(rows, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def fixed_parts(args):
    """{part: its hash} of what stands here."""
    tasks = read_jsonl(args.tasks, {})
    dialogues = []
    for row in read_jsonl(args.dialogues, {}):
        messages = [turn["content"] for turn in row["dialogue_history"]]
        dialogues.append([row["task_id"], messages, row["max_rounds"], row["reward"]])
    return {"tasks": digest(tasks), "dialogues": digest(dialogues), "base": weights_fingerprint(args.base)}


def check(args):
    """InputError where something is not as in the rules."""
    for part, value in fixed_parts(args).items():
        if value != FIXED[args.domain][part]:
            raise InputError(f"{part}: {value}, and the rules have {FIXED[args.domain][part]}: test tasks, the human, "
                             "the rounds and the base model of a record are fixed")
    print(f"fixed: {', '.join(FIXED[args.domain])} are as in the rules")


def num_dialogues(folder):
    """How many dialogues with the human stand in a folder: the rows of all files that 02 made there."""
    number = 0
    for note in sorted(folder.rglob("*.args.json")):
        if json.loads(note.read_text())["stage"] == "02_rollout.py":
            path = note.with_name(note.name.removesuffix(".args.json"))
            number += len(read_jsonl(path, {}))
    return number


def entry(args):
    """Print the entry, a line of the table in docs/records.md."""
    folder = pathlib.Path(args.folder)
    dialogues, minutes = [], []
    for seed in args.seeds:
        seed_folder = folder / f"seed{seed}"
        dialogues.append(num_dialogues(seed_folder / "agent-of"))
        minutes.append(int((seed_folder / "seconds").read_text()) / 60)
    trajectories = read_jsonl(folder / "report" / "scored" / f"{args.name}.jsonl", {})       # scored again by 05
    outcome = DOMAINS[args.domain].outcome
    _, values = statistics.values_of_runs(trajectories, outcome)
    success = statistics.mean_over_tasks(trajectories, outcome)
    low, high = statistics.bootstrap_interval(values)
    chance = statistics.chance_at_most(values, MARKS[args.domain])
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    print("| method | dialogues a seed | minutes a seed | success | p | commit |")
    print("| --- | --- | --- | --- | --- | --- |")
    print(f"| {args.name} | {statistics.mean(dialogues):,.0f} | {statistics.mean(minutes):.1f} | "
          f"{success:.3f} [{low:.3f}, {high:.3f}] | {chance:.3f} | {commit} |")
    if len(values) != NUM_SEEDS or len(values[0]) != NUM_TESTS:
        print(f"not an entry: {len(values)} seeds and {len(values[0])} test tasks; an entry has {NUM_SEEDS} and "
              f"{NUM_TESTS}")
    elif chance < MOST_CHANCE:
        print(f"above the mark of {MARKS[args.domain]}")
    else:
        print(f"not shown to be above the mark of {MARKS[args.domain]}: p must be below {MOST_CHANCE}")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(required=True)
    checks = actions.add_parser("check")
    checks.set_defaults(action=check)
    for flag in ("tasks", "dialogues", "base"):
        checks.add_argument(f"--{flag}", required=True)
    entries = actions.add_parser("entry")
    entries.set_defaults(action=entry)
    for flag in ("name", "folder"):
        entries.add_argument(f"--{flag}", required=True)
    entries.add_argument("--seeds", type=int, nargs="+", required=True)
    for subparser in (checks, entries):
        subparser.add_argument("--domain", choices=MARKS, required=True)
    args = parser.parse_args(argv)
    args.action(args)


if __name__ == "__main__":
    run_stage(main, ColBenchError)
