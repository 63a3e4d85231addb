"""Stage 1: make collaborative tasks in ColBench's format, or take ColBench's own: Python functions (--domain backend),
web pages (--domain frontend) or queries to a database (--domain sql, only from templates).

Reads   nothing (--source template), a model and texts (llm), the published files (colbench), the data set WebSight
        (websight), or a tasks file (--check).
Writes  tasks.jsonl, one task per line: {"task_id", "problem_description", "ground_truth", "test_cases"} (pages: without
        "test_cases"; queries: "schema" and "databases" in its place); template tasks also have {"family", "template",
        "facts" (pages: "slots")}, for the rule-based simulator;
        with --source llm also tasks.rejected.jsonl: {"attempt", "seed_text", "reason", "reply"};
        with --trajectories: the published trajectories, and FILE.system_prompt.txt for 02 --system-prompt.

--source template   vague requests; a test fails for each missing fact that the answer gets wrong
--source llm        a model (--model) writes tasks; those with informative tests that repeat no other are kept
--source colbench   the published tasks, or with --trajectories the dialogues, from the hub or --path
--source websight   ideas and pages of WebSight v0.2, from the hub or --path
--check FILE        report faults of the tasks in a file, and how many tests the best constant answer passes

Splits are disjoint by content: a hash of the solution assigns a task to train (80 %), validation (10 %) or test (10 %),
whatever the seed. docs/reproduce.md describes each source.

Differs from the paper: ColBench's tasks were written by Llama-3.1-70B-Instruct. Template tasks need no model, not even
as user simulator; for tasks written by a model, the prompt and the checks are ours.

    python 01_generate_tasks.py --split train --num-tasks 1000 --out out/train.jsonl
    python 01_generate_tasks.py --source llm --model http://localhost:8000/v1#NAME --split train --out llm/train.jsonl
"""
from colbench import DOMAINS, SPLITS
from lib import flags

# ---------------------------------------------------------------------------------------------------------------------
# arguments

SOURCES = "template", "llm", "colbench", "websight"
FLAG_SOURCES = {"path": ["colbench", "websight"], "trajectories": ["colbench"], "model": ["llm"], "seeds": ["llm"],
                "max_attempts": ["llm"]}                                # flags of only some sources


def parse_args(argv=None):
    parser = flags.argument_parser(__doc__)
    parser.add_argument("--source", choices=SOURCES, default="template", help="where tasks come from")
    parser.add_argument("--domain", choices=list(DOMAINS), default="backend", help="kind of tasks")
    parser.add_argument("--num-tasks", type=flags.positive_int, help="tasks to write (None: 1000; colbench: all)")
    parser.add_argument("--split", choices=["all", *SPLITS], default="all", help="the split (colbench: its own)")
    parser.add_argument("--told", choices=["none", "some", "all"], default="some", help="facts in the request: "
                        "none, one (for pages one or two) in 30 %% of the tasks, or all (clear requests)")
    parser.add_argument("--seed", type=flags.seed_flag, default=0, help="seed of the tasks, or of their order")
    parser.add_argument("--out", help="tasks file to write (JSONL); with --check its findings (optional)")
    parser.add_argument("--check", metavar="FILE", help="check the tasks of this file instead of making any")
    # the published data
    parser.add_argument("--path", metavar="LOCAL_COPY", help="colbench: a folder with the published files, or one "
                        "JSONL file, which is used whole; websight: a parquet or JSONL file, or a folder of parquet "
                        "files (None: from the hub)")
    parser.add_argument("--trajectories", action="store_true", help="colbench: take the offline trajectories instead")
    # a model that writes tasks
    parser.add_argument("--model", help="llm: a folder, a hub id, smollm2, or a server http://HOST:PORT/v1#NAME")
    parser.add_argument("--seeds", metavar="FILE", help='llm: idea texts, JSONL with "text" or paragraphs (None: ours)')
    parser.add_argument("--max-attempts", type=flags.positive_int,
                        help="llm: most replies (None: 20 per task, divided by the share of --split)")
    parser.add_argument("--temperature", type=flags.temperature_flag, default=1.0, help="llm: of the model")
    parser.add_argument("--max-new-tokens", type=flags.num_tokens_flag, default=2048, help="llm: tokens per reply")
    parser.add_argument("--concurrency", type=flags.num_samples_flag, default=64, help="llm: attempts in flight")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="llm: of a local model")
    flags.add_world(parser)
    args = parser.parse_args(argv)
    if not args.out and not args.check:
        parser.error("the following arguments are required: --out")
    for name, sources in FLAG_SOURCES.items():
        if getattr(args, name) and args.source not in sources:
            parser.error(f"--{name.replace('_', '-')} needs --source {' or '.join(sources)}")
    if args.source == "websight":
        args.domain = "frontend"
    if args.source != "colbench" and args.num_tasks is None:
        args.num_tasks = 1000
    if args.source == "llm":
        if not args.model or args.domain != "backend":
            parser.error("--source llm needs --model, and writes only functions (--domain backend)")
        share_percent = 100 if args.split == "all" else len(SPLITS[args.split])
        args.max_attempts = args.max_attempts or 20 * args.num_tasks * 100 // share_percent
    return args


if __name__ == "__main__":
    parse_args()                    # answers --help and wrong flags before the imports below, which take seconds

import asyncio
import collections
import functools
import json
import pathlib
import random
import re
import warnings
from typing import NamedTuple

from colbench import domain_of, in_split, make_tasks, published, task_id, written
from colbench.schema import open_lines
from colbench.scorer import check_tasks, Scorer
from lib import data, runtime
from lib.runtime import InputError, Output, read_jsonl, RowFile, run_stage, say, start, write_jsonl
from lib.sampling import add_rows, finish_rows, open_sampler
from lib.tokens import strip_thoughts, system_prompt


def counted(items):
    """Counts of texts (or a Counter) as "3 kept, 1 repeated", the most frequent first."""
    counts = collections.Counter(items).most_common()
    return ", ".join(f"{count:,} {item}" for item, count in counts)


# ---------------------------------------------------------------------------------------------------------------------
# tasks written by a language model: text -> prompt -> reply -> task, or the reason why there is none

def read_seed_texts(path):
    """The texts of a JSONL file of {"text"}, or the paragraphs of a plain text file."""
    with open_lines(path) as file:
        is_jsonl = file.readline().lstrip().startswith(b"{")
    if is_jsonl:
        texts = [row["text"] for row in read_jsonl(path, {"text": str})]
    else:
        texts = re.split(r"\n\s*\n", runtime.read_text(path))
    texts = [text.strip()[:written.MAX_SEED_CHARS] for text in texts if text.strip()]
    if not texts:
        raise InputError(f"{path}: contains no text")
    return texts


class Writing(NamedTuple):
    """Flags of --source llm."""

    num_tasks: int
    max_attempts: int
    split: str
    temperature: float
    max_new_tokens: int
    concurrency: int
    seed: int


async def attempt_row(number, sampler, texts, scorers, writing):
    """The row of an attempt: the model's reply, and its task or why it has none. kept_tasks rejects repeats."""
    text = texts[number % len(texts)]
    kind = random.Random(f"{writing.seed} {number}").choice(written.KINDS)
    chat = [{"role": "user", "content": written.TASK_PROMPT.format(text=text, kind=kind)}]
    key = writing.seed, number, "task"
    [reply] = await sampler.sample(chat, 1, writing.temperature, writing.max_new_tokens, key)
    row = {"attempt": number, "seed_text": text, "reason": None, "task": None, "reply": reply.text,
           "tokens": reply.completion_tokens}
    task = written.written_task(strip_thoughts(reply.text, reply.prompt), reply.ended)
    if isinstance(task, dict):
        [check] = check_tasks([task], *scorers)
        row["reason"] = reason_against(task, check, writing.split)
        row["task"] = {**task, "attempt": number}
    else:
        row["reason"] = task
    return row


def reason_against(task, check, split):
    """Reason to reject a task whose tests were run; None: keep it, unless it repeats another."""
    for what, detail in check["findings"].items():
        if what in written.MEASURES_NOTHING:
            return f"{what}: {detail}"
    return None if in_split(task["task_id"], split) else "of another split"


MOST_PROMPT_TOKENS = 16384                                              # for a model that writes tasks


def write_model_tasks(sampler, texts, scorers, writing, run, output):
    """--source llm: ask the model until --num-tasks of its tasks are kept. Until then a file next to the output has the
    attempts, and the same command continues it. --concurrency does not change which tasks are kept."""
    warnings.simplefilter("ignore", SyntaxWarning)                      # from the model's code
    attempts, tasks = [], []
    num_attempts = 0
    make_row = functools.partial(attempt_row, sampler=sampler, texts=texts, scorers=scorers, writing=writing)
    with scorers[0], scorers[1], asyncio.Runner() as runner:
        while len(tasks) < writing.num_tasks and num_attempts < writing.max_attempts:
            num_more = max(writing.num_tasks - len(tasks), writing.concurrency)
            num_attempts = min(num_attempts + num_more, writing.max_attempts)
            rows = RowFile(output.path, run)                            # includes existing rows
            failures = add_rows(rows, range(num_attempts), make_row, writing.concurrency, execute=runner.run)
            if failures:
                finish_rows(rows, num_attempts, failures)
            attempts, tasks = kept_tasks(rows, num_attempts, writing.num_tasks)
    runtime.barrier()                                                   # until all ranks have read the attempts
    finish_tasks(output.path, attempts, tasks, writing)
    output.add_costs(generated_tokens=sum(row["tokens"] for row in attempts))


def kept_tasks(rows, num_attempts, num_tasks):
    """(attempts, tasks): the attempts in their order until `num_tasks` are kept, with the reason of each rejection."""
    attempts, tasks = [], []
    seen = set(), []                                                    # of the kept tasks, for written.repeat_reason
    by_number = rows.find()
    for number in range(num_attempts):
        row = json.loads(by_number[number])
        row["reason"] = row["reason"] or written.repeat_reason(row["task"], seen)
        attempts.append(row)
        if row["reason"] is None:
            tasks.append(row["task"])
        if len(tasks) == num_tasks:
            break
    return attempts, tasks


@runtime.on_main
def finish_tasks(out, rows, tasks, writing):
    """Write the rejected replies and the tasks. Raises InputError if there are too few tasks."""
    rejected = out.with_name(out.stem + ".rejected.jsonl")
    ends = counted((row["reason"] or "kept").partition(": ")[0] for row in rows)
    rejected_rows = []
    for row in rows:
        if row["reason"] not in (None, "of another split"):
            rejected_rows.append({key: row[key] for key in ("attempt", "seed_text", "reason", "reply")})
    write_jsonl(rejected, rejected_rows)
    if len(tasks) < writing.num_tasks:
        raise InputError(f"--max-attempts {writing.max_attempts}: {len(tasks)} of {writing.num_tasks} tasks kept "
                         f"({ends}; see {rejected}); the same command with a higher value continues from here")
    say(f"{len(rows):,} attempts: {ends}")
    write_jsonl(out, tasks)
    for path in runtime.partial_files(out):
        path.unlink()


# ---------------------------------------------------------------------------------------------------------------------
# the published tasks and trajectories

def published_paths(wants_trajectories, split, path):
    """The requested files of the published data. Raises InputError if there is no such split.
    path: a local copy, or None."""
    parts = published.COLBENCH_TASKS
    if wants_trajectories:
        parts = {"train": published.COLBENCH_TRAJECTORIES}
    if split not in ("all", *parts):
        raise InputError(f"--split {split}: the published data have only {' and '.join(parts)} of this kind")
    names = list(parts.values()) if split == "all" else [parts[split]]
    return published.published_files(names, path)


def published_rows(files, wants_trajectories, domain_name, num_tasks, seed):
    """Published tasks or trajectories, unchanged except for missing "task_id"s and "sample"s, which are added."""
    read = data.read_trajectories if wants_trajectories else data.read_tasks
    rows = [row for file in files for row in read(file)]
    domain = DOMAINS[domain_name]
    if domain_of(rows[0].get("task", rows[0])) is not domain:
        raise InputError(f"{files[0]}: has no tasks of --domain {domain_name}; pass --path FILE with such tasks")
    if wants_trajectories:
        ids = list(dict.fromkeys(row["task_id"] for row in rows))
        chosen_ids = set(first_shuffled(ids, num_tasks, seed))
        chosen = [row for row in rows if row["task_id"] in chosen_ids]
    else:
        chosen = first_shuffled(rows, num_tasks, seed)
        chosen = [{**task, "task_id": task_id(task)} for task in chosen]
    for row in chosen:
        if doubt := domain.doubt_of(row.get("task", row)):
            say(f"task {row['task_id']}: right answers may be graded wrong: {doubt}")
    say(f"kept {len(chosen):,} of {len(rows):,} {'trajectories' if wants_trajectories else 'tasks'}")
    return chosen


def first_shuffled(items, num_items, seed):
    """The first `num_items` in a seeded order; None: all of them, in their own order."""
    if num_items is None:
        return items
    if num_items > len(items):
        raise InputError(f"--num-tasks {num_items}: there are only {len(items)} tasks")
    items = list(items)
    random.Random(seed).shuffle(items)
    return items[:num_items]


def write_system_prompt(path, trajectories):
    """Write the agent's most frequent system prompt, for 02 --system-prompt."""
    counts = collections.Counter(map(system_prompt, trajectories))
    del counts[None]                                                # our own prompt, or none that can be read
    path.unlink(missing_ok=True)
    if counts:
        [(text, count)] = counts.most_common(1)
        path.write_text(f"{text}\n", "utf-8", "backslashreplace")
        say(f"writes {path}: the system prompt in the logged prompts of {count:,} of {len(trajectories):,} "
            "trajectories")


def websight_tasks(path, split, num_tasks):
    """The first tasks of the data set, in its order, that are new and in the split. path: a local copy, or None."""
    tasks, ends = [], collections.Counter()
    for end, task in published.websight_tasks(path, split):
        ends[end] += 1
        if end == "kept":
            tasks.append(task)
        if len(tasks) == num_tasks:
            break
    if len(tasks) < num_tasks:
        raise InputError(f"--num-tasks {num_tasks}: there are only {len(tasks)} tasks in "
                         f"{path or published.WEBSIGHT} (rows: {counted(ends)})")
    say(f"{ends.total():,} rows in the order of the data set: {counted(ends)}")
    return tasks


# ---------------------------------------------------------------------------------------------------------------------

def checked(tasks, path, unsafe_scorer):
    """--check: report the faults of the tasks in a file; returns a row for each task."""
    domain = domain_of(tasks[0])
    if domain.check_data is None:
        raise InputError(f"{path}: --check has nothing to check: a {domain.NOUN} has no tests")
    checks, findings = domain.check_data(tasks, unsafe_scorer), []
    for number, row in enumerate(checks, 1):
        findings += row["findings"]
        for what, detail in row["findings"].items():
            say(f"{path}:{number}: {what} ({detail})")
    constants = [row["constant"] for row in checks]
    num_tests = sum(row["num_tests"] for row in checks)
    say(f"{len(checks):,} tasks, {num_tests:,} tests: {counted(findings) or 'no finding'}",
        f"the best constant answer for each task passes {sum(constants) / len(constants):.1%} of the tests and "
        f"solves {constants.count(1) / len(constants):.1%} of the tasks")
    return checks


def main(argv=None):
    args = parse_args(argv)
    inputs = [args.check, args.seeds, args.model]
    if args.source == "colbench":
        inputs = published_paths(args.trajectories, args.split, args.path)
    elif args.source == "websight":
        inputs = published.websight_files(args.path)
    if args.check:
        tasks = data.read_tasks(args.check)
    output = None                                                       # --check needs none
    if args.out:
        output = Output(args.out, vars(args), inputs)
        if output.is_done():
            return

    if args.check:
        rows = checked(tasks, args.check, args.unsafe_scorer)
    elif args.source == "template":
        rows = make_tasks(DOMAINS[args.domain], args.num_tasks, args.seed, args.split, args.told)
    elif args.source == "colbench":
        rows = published_rows(inputs, args.trajectories, args.domain, args.num_tasks, args.seed)
    elif args.source == "websight":
        rows = websight_tasks(args.path, args.split, args.num_tasks)
    else:
        run = start(args.seed)
        texts = read_seed_texts(args.seeds) if args.seeds else re.split("; |\n", written.TOPICS)
        random.Random(args.seed).shuffle(texts)
        room = MOST_PROMPT_TOKENS + args.max_new_tokens
        sampler = open_sampler(args.model, run.device, args.dtype, args.concurrency, room)
        output.begin()
        scorers = [Scorer(args.unsafe_scorer, hash_seed=number) for number in (0, 1)]
        writing = flags.pick(Writing, vars(args))
        return write_model_tasks(sampler, texts, scorers, writing, run, output)
    if output:
        output.begin()
        if args.trajectories:
            data.fill_rewards(rows, output)
            write_system_prompt(pathlib.Path(f"{args.out}.system_prompt.txt"), rows)
        write_jsonl(args.out, rows)


if __name__ == "__main__":
    run_stage(main)
