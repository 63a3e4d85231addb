"""Trajectories whose critic reads another c than the reference solution of their task.

Reads   trajectories.jsonl (02), with rewards.
Writes  trajectories.jsonl with other references; dialogues and rewards stay.

--kind exchanged   the reference of another task of the same family: what inaccurate information costs
--kind facts       the reference, followed by a comment for each fact that the agent has to ask for, with its value

    python scripts/change_c.py --kind facts --trajectories out/offline.jsonl --out out/offline-facts.jsonl
"""
import collections
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from colbench import ColBenchError, domain_of  # noqa: E402
from lib.data import read_trajectories  # noqa: E402
from lib.flags import argument_parser  # noqa: E402
from lib.runtime import run_stage, say, write_jsonl  # noqa: E402

COMMENT = {"function": "#", "query": "--"}


def exchanged_references(trajectories):
    """{task_id: the reference of the next task of its family}; its own where the family has no other."""
    families = collections.defaultdict(dict)                         # {family: {task_id: reference}}
    for trajectory in trajectories:
        task = trajectory["task"]
        families[task["family"]][trajectory["task_id"]] = task["ground_truth"]
    references, num_alone = {}, 0
    for family in families.values():
        names = sorted(family)
        for i, name in enumerate(names):
            following = [family[other] for other in names[i + 1:] + names[:i]]
            others = [reference for reference in following if reference != family[name]]
            num_alone += not others
            references[name] = others[0] if others else family[name]
    say(f"{num_alone:,} of {len(references):,} tasks are the only ones of their family and keep their reference")
    return references


def with_facts(task):
    """The reference of a task, and below it the facts that the agent has to ask for."""
    comment = COMMENT[domain_of(task).NOUN]
    lines = [task["ground_truth"]]
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
    if args.kind == "exchanged":
        references = exchanged_references(trajectories)
    else:
        references = {trajectory["task_id"]: with_facts(trajectory["task"]) for trajectory in trajectories}
    for trajectory in trajectories:
        trajectory["task"] = {**trajectory["task"], "ground_truth": references[trajectory["task_id"]]}
    write_jsonl(pathlib.Path(args.out), trajectories)


if __name__ == "__main__":
    run_stage(main, ColBenchError)
