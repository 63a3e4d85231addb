"""ColBench without the stages: prints template tasks, or verdicts on answers, as JSONL.

    python -m colbench tasks --domain backend --num-tasks 100 > tasks.jsonl
    python -m colbench score answers.jsonl > verdicts.jsonl

A line of answers.jsonl has the keys "task" (a line of tasks.jsonl) and "answer" (code, a query, or a page). Its verdict
has "task_id", "reward" and the other results of the domain's scorer (colbench/domain.py). All tasks must be of one
domain. The file may be gzipped.
"""
import argparse
import asyncio
import json
import sys
import tempfile

from colbench import domain_of, DOMAINS, make_tasks, SPLITS, task_id
from colbench.schema import InputError, read_jsonl


def parse_args(argv=None):
    parser = argparse.ArgumentParser(prog="python -m colbench", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    tasks = commands.add_parser("tasks", help="make tasks")
    tasks.add_argument("--domain", choices=list(DOMAINS), default="backend")
    tasks.add_argument("--num-tasks", type=int, default=100)
    tasks.add_argument("--split", choices=["all", *SPLITS], default="test")
    tasks.add_argument("--seed", type=int, default=0)
    score = commands.add_parser("score", help="score answers")
    score.add_argument("file", help="JSONL of tasks and answers")
    score.add_argument("--unsafe-scorer", action="store_true", help="only resource limits, if isolation fails")
    return parser.parse_args(argv)


def check_row(row, where, first):
    """Raises InputError if a row's domain rejects its task, or if the domain differs from the first row's."""
    domain = domain_of(row["task"], where)
    domain.check_task(row["task"], where)
    if domain is not domain_of(first["task"]):
        raise InputError(f"{where}: a task of another domain than the first")


def score_rows(rows, unsafe_scorer):
    """The verdict on each row."""
    environment_class, pairs = domain_of(rows[0]["task"]).Environment, [(row["task"], row["answer"]) for row in rows]
    with tempfile.TemporaryDirectory() as images:
        options = {"unsafe_scorer": unsafe_scorer, "images": images, "rows_in": images, "similarity": "pixels"}
        options = {name: value for name, value in options.items() if name in environment_class.TAKES}
        with environment_class(**options) as environment:
            verdicts = asyncio.run(environment.score(pairs))
    for verdict in verdicts:
        for key in ("image", "reference_image"):                    # of pages; the files are gone
            verdict.pop(key, None)
    return verdicts


def main(argv=None):
    args = parse_args(argv)
    try:
        if args.command == "tasks":
            lines = make_tasks(DOMAINS[args.domain], args.num_tasks, args.seed, args.split, "none")
        else:
            rows = read_jsonl(args.file, {"task": dict, "answer": str}, check_row)
            verdicts = score_rows(rows, args.unsafe_scorer)
            lines = [{"task_id": task_id(row["task"]), **verdict} for row, verdict in zip(rows, verdicts)]
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    for line in lines:
        print(json.dumps(line))


if __name__ == "__main__":
    main()
