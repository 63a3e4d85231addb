"""Changes c in trajectories, so that a critic reads another text than the solution of the task.

Reads   trajectories.jsonl (02), with rewards.
Writes  trajectories.jsonl with other solutions; dialogues and rewards stay.

--kind exchanged   the solution of another task of the same family, to measure the cost of inaccurate information
--kind facts       the solution, followed by a comment for each fact that the agent has to ask for, with its value

    python scripts/change_c.py --kind facts --trajectories out/offline.jsonl --out out/offline-facts.jsonl
"""
import collections
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from colbench import domain_of  # noqa: E402
from lib.data import read_trajectories  # noqa: E402
from lib.flags import argument_parser  # noqa: E402
from lib.runtime import InputError, run_stage, say, write_jsonl  # noqa: E402

COMMENT = {"function": "#", "query": "--"}


def exchanged_solutions(tasks):
    """{task_id: the solution of the next task of its family}; its own if the family has no other task."""
    families = collections.defaultdict(list)                         # {family: names of its tasks}
    for name in sorted(tasks):
        families[tasks[name]["family"]].append(name)
    solutions, num_alone = {}, 0
    for names in families.values():
        num_alone += len(names) == 1
        for name, next_name in zip(names, names[1:] + names[:1]):
            solutions[name] = tasks[next_name]["ground_truth"]
    say(f"{num_alone:,} of {len(tasks):,} tasks are the only ones of their family and keep their solution")
    return solutions


def with_facts(task):
    """The solution of a task, followed by the facts that the agent has to ask for."""
    comment, lines = COMMENT[domain_of(task).NOUN], [task["ground_truth"]]
    for fact in task["facts"]:
        if fact["matters"] and not fact["told"]:
            is_value = fact["code"].strip() and "\n" not in fact["code"]   # else lines of code, or none
            lines.append(f"{comment} {fact['topic']}: {fact['code'] if is_value else fact['replies'][0]}")
    return "\n".join(lines)


def parse_args(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument("--kind", choices=["exchanged", "facts"], required=True)
    parser.add_argument("--trajectories", required=True, help="JSONL of 02")
    parser.add_argument("--out", required=True, help="JSONL to write")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    trajectories = read_trajectories(args.trajectories)
    tasks = {trajectory["task_id"]: trajectory["task"] for trajectory in trajectories}
    needed = {"exchanged": "family", "facts": "facts"}[args.kind]
    if any(needed not in task or domain_of(task).NOUN not in COMMENT for task in tasks.values()):
        raise InputError(f"{args.trajectories}: --kind {args.kind} needs tasks of functions or queries with {needed!r}")
    if pathlib.Path(args.out).resolve() == pathlib.Path(args.trajectories).resolve():
        raise InputError(f"{args.out}: is the input")
    if args.kind == "exchanged":
        solutions = exchanged_solutions(tasks)
    else:
        solutions = {name: with_facts(task) for name, task in tasks.items()}
    for trajectory in trajectories:
        trajectory["task"] = {**trajectory["task"], "ground_truth": solutions[trajectory["task_id"]]}
    write_jsonl(args.out, trajectories)


if __name__ == "__main__":
    run_stage(main)
