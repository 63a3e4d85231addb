"""Stage 1: make collaborative tasks in ColBench's format, or take ColBench's own: Python functions (--domain backend),
web pages (--domain frontend) or queries to a database (--domain sql, from templates alone).

Reads   nothing (--source template), a model and texts (llm), the published files (colbench), the data set WebSight
        (websight), or a tasks file (--check).
Writes  tasks.jsonl, one task a line: {"task_id", "problem_description", "ground_truth", "test_cases"} (pages: without
        "test_cases"; queries: "schema" and "databases" in its place); of template tasks also {"family", "template",
        "facts" (pages: "slots")}, for a human by rule;
        with --source llm also tasks.rejected.jsonl: {"attempt", "seed_text", "reason", "detail", "reply"};
        with --trajectories: the published trajectories, and beside them FILE.system_prompt.txt for 02 --system-prompt.

--source template   vague requests; a test fails for each fact that they leave out and the answer gets wrong
--source llm        a model (--model) writes tasks; those that measure something and repeat no other are kept
--source colbench   the published tasks, or with --trajectories the dialogues, from the hub or --path
--source websight   ideas and pages of WebSight v0.2, from the hub or --path
--check FILE        what is wrong with the tasks of a file, and how far an answer comes that is always the same value

Splits are disjoint by content: the hash of the reference puts a task into train (80 %), validation (10 %) or test
(10 %), whatever the seed. docs/reproduce.md says more of each source.

Differs from the paper: ColBench's tasks were written by Llama-3.1-70B-Instruct. Template tasks need no model, and a
human that answers by rule can play them; for tasks of a model the prompt and the checks are ours.

    python 01_generate_tasks.py --split train --num-tasks 1000 --out out/train.jsonl
    python 01_generate_tasks.py --source llm --model http://localhost:8000/v1#NAME --split train --out llm/train.jsonl
"""
import asyncio
import collections
import pathlib
import random
import re
import warnings

import common
from colbench import ColBenchError, domain_of, DOMAINS, in_split, published, SPLITS, task_id, written
from colbench.scorer import check_tasks, Scorer
from lib.arguments import (
    add_overwrite,
    add_world,
    argument_parser,
    num_samples_flag,
    num_tokens_flag,
    positive_int,
    seed_flag,
    temperature_flag,
    text_flag,
)
from lib.costs import Costs
from lib.models import work_of
from lib.runtime import (
    barrier,
    begin_output,
    InputError,
    is_done,
    is_main,
    map_blocks,
    new_file,
    read_jsonl,
    read_text,
    run_stage,
    say,
    start,
    write_jsonl,
)
from lib.servers import ReplyError, strip_thoughts
from lib.speakers import ask, open_speaker, Sampling, SpeakerOptions


def make_tasks(domain, num_tasks, seed, split, told):
    """`num_tasks` tasks without repeats, the families in turn until one has no more; why draws were dropped."""
    rng, tasks, dropped = random.Random(seed), {}, []

    def accept(name):
        return "of another split" if not in_split(name, split) else "repeated" if name in tasks else None

    families = sorted(domain.FAMILIES)
    misses = {name: 0 for name in families}
    while len(tasks) < num_tasks:
        if not families:
            raise InputError(f"--num-tasks {num_tasks}: there are only {len(tasks)} different tasks (--split {split})")
        name = families[len(tasks) % len(families)]
        task = domain.make_task(rng, name, told, accept)
        if isinstance(task, dict):
            tasks[task["task_id"]] = task
            misses[name] = 0
            continue
        dropped.append(task)
        misses[name] += 1
        if misses[name] == 300:
            families.remove(name)
    return list(tasks.values()), dropped


def num_hidden(domain, task):
    """How many facts the agent has to find out."""
    facts = domain.facts(task, []) or []
    return sum(not is_known for _, is_known in facts)


def counted(items):
    """"3 kept, 1 repeated": how often each of some texts (or of a Counter) is there, the most frequent first."""
    return ", ".join(f"{count:,} {item}" for item, count in collections.Counter(items).most_common())


# ---------------------------------------------------------------------------------------------------------------------
# tasks written by a language model: text -> prompt -> reply -> task, or the reason why there is none

def read_seed_texts(path):
    """The texts of a JSONL file of {"text"}, or of a plain one: its paragraphs, or its lines where none is empty."""
    if pathlib.Path(path).suffix == ".jsonl":
        texts = [row["text"] for row in read_jsonl(path, {"text": str})]
    else:
        content = read_text(path).strip()
        texts = re.split(r"\n\s*\n" if re.search(r"\n\s*\n", content) else r"\n", content)
    if not any(text.strip() for text in texts):
        raise InputError(f"{path}: no text in it")
    return [text.strip()[:written.MAX_SEED_CHARS] for text in texts if text.strip()]


async def ask_all(speaker, prompts, numbers, args):
    """The Reply to each prompt, all in flight together; the number of the attempt is the seed."""
    requests = []
    for prompt, number in zip(prompts, numbers):
        sampling = Sampling((args.seed, number, "task"), args.temperature, args.max_new_tokens)
        requests.append(ask(speaker, [{"role": "user", "content": prompt}], sampling))
    return [reply for _, [reply] in await asyncio.gather(*requests)]


def attempt_rows(numbers, speaker, loop, texts, scorers, args):
    """Rows of a block of attempts: the reply, and its task or the reason why there is none; repeats aside."""
    ideas = [(texts[number % len(texts)], random.Random(f"{args.seed} {number}").choice(written.KINDS))
             for number in numbers]
    prompts = [written.TASK_PROMPT.format(text=text, kind=kind) for text, kind in ideas]
    replies = loop.run(ask_all(speaker, prompts, numbers, args))
    rows = [{"attempt": number, "seed_text": text, "reason": None, "task": None, "reply": reply.text,
             "tokens": reply.completion_tokens or 0} for number, (text, _), reply in zip(numbers, ideas, replies)]
    found_in = [written.written_task(strip_thoughts(reply.text), reply.ended) for reply in replies]
    tasks = [task for task in found_in if isinstance(task, dict)]
    checks = iter(zip(check_tasks(tasks, *scorers), scorers[0].reference_results(tasks)))
    for row, task in zip(rows, found_in):
        if isinstance(task, str):
            row["reason"] = task
            continue
        check, values = next(checks)
        found = [f"{what}: {detail}" for what, detail in check["findings"].items() if what in written.MEASURES_NOTHING]
        if found or not in_split(task["task_id"], args.split):
            row["reason"] = (found or ["of another split"])[0]
        else:
            row["task"] = {**task, "attempt": row["attempt"]}
            row["types"] = [value[0] if isinstance(value, list) else type(value).__name__ for _, value in values]
    return rows


def write_tasks(args):
    """--source llm: ask the model in rounds of attempts until --num-tasks of its tasks are kept. A round's attempts are
    a partial file, which the same command reads or goes on in; how they are batched does not change what is kept."""
    warnings.simplefilter("ignore", SyntaxWarning)                      # of what the model writes
    runtime, out = start(args.seed), pathlib.Path(args.out)
    inputs = [args.seeds, args.model]
    texts = read_seed_texts(args.seeds) if args.seeds else re.split("; |\n", written.TOPICS)
    random.Random(args.seed).shuffle(texts)
    if is_done(args, out, inputs):
        return
    rows, kept, seen = [], [], (set(), [], {})
    room = 16384 + args.max_new_tokens                                  # a prompt and its reply
    speaker = open_speaker(args.model, SpeakerOptions(runtime.device, args.dtype, args.concurrency, room))
    runtime = runtime._replace(run=begin_output(args, out, inputs))
    costs = Costs(out, runtime.device)
    scorers = [Scorer(args.unsafe_scorer, hash_seed=number) for number in (0, 1)]
    with asyncio.Runner() as loop, scorers[0], scorers[1]:
        while len(kept) < args.num_tasks and len(rows) < args.max_attempts:
            first, missing = len(rows), max(args.num_tasks - len(kept), args.concurrency)
            numbers = range(first, min(first + missing, args.max_attempts))
            blocks = [numbers[i:i + args.concurrency] for i in range(0, len(numbers), args.concurrency)]
            for row in map_blocks(f"{out}.{runtime.run}.{first}.partial", blocks, lambda block: attempt_rows(
                    block, speaker, loop, texts, scorers, args), runtime, "attempt"):
                if len(kept) < args.num_tasks:
                    row["reason"] = row["reason"] or written.repeat_reason(row["task"], seen)
                    rows.append(row)
                    kept += [] if row["reason"] else [row]
    barrier()                                                    # all have read the partial files
    finish_tasks(args, out, rows, kept, runtime)
    generated = {"generated_tokens": sum(row["tokens"] for row in rows) if is_main() else 0}
    costs.record([work_of(speaker.model) if speaker.model else generated])


def finish_tasks(args, out, rows, kept, runtime):
    """Write the rejected replies and the tasks and print what they are like; InputError where tasks are missing."""
    ends = counted((row["reason"] or "kept").partition(": ")[0] for row in rows)
    rejected, tasks = out.with_name(out.stem + ".rejected.jsonl"), [row["task"] for row in kept]
    if is_main():
        write_jsonl(rejected, [
            {"attempt": row["attempt"], "seed_text": row["seed_text"], "reason": row["reason"].partition(": ")[0],
             "detail": row["reason"].partition(": ")[2], "reply": row["reply"]}
            for row in rows if row["reason"] not in (None, "of another split")])
    if len(tasks) < args.num_tasks:
        raise InputError(f"--max-attempts {args.max_attempts}: {len(tasks)} of {args.num_tasks} tasks kept "
                         f"({ends}; see {rejected}); the same command with a higher one goes on from here")
    if is_main():
        write_jsonl(out, tasks)
        for path in out.parent.iterdir():
            if path.name.startswith(f"{out.name}.{runtime.run}.") and path.name.endswith(".partial"):
                path.unlink()
    lines = sum(len(task["ground_truth"].splitlines()) for task in tasks) / len(tasks)
    words = sum(len(task["problem_description"].split()) for task in tasks) / len(tasks)
    more = sum(task["written_tests"] > written.NUM_TESTS for task in tasks)
    say(f"{len(rows):,} attempts: {ends}\na task has {lines:.1f} lines of code and a description of {words:.1f} "
        f"words (means); {more:,} had more than {written.NUM_TESTS} tests\n"
        f"values of the tests: {counted(kind for row in kept for kind in row['types'])}")


# ---------------------------------------------------------------------------------------------------------------------
# the published tasks and trajectories

def read_published(path, trajectories):
    """The rows of a published file, as they are but for "task_id", and a trajectory's "sample", where missing."""
    if not trajectories:
        return [{**task, "task_id": task_id(task)} for task in common.read_tasks(path)]
    rows = common.read_trajectories(path)
    for number, row in enumerate(rows, 1):
        if not isinstance(row.get("reward"), (int, float, type(None))):
            raise InputError(f'{path}:{number}: "reward" is a {type(row["reward"]).__name__}, not a number')
    return rows


def write_system_prompt(path, trajectories):
    """Write the system prompt that the agent of the trajectories had, for 02 --system-prompt."""
    counts = collections.Counter(map(common.system_prompt, trajectories))
    unread = counts.pop(None, 0)
    path.unlink(missing_ok=True)
    if counts:
        [(text, count)] = counts.most_common(1)
        partial = path.with_name(path.name + ".partial")
        with new_file(partial) as file:
            file.write(f"{text}\n".encode(errors="backslashreplace"))
        partial.rename(path)
        say(f"writes {path}: the system prompt in the logged prompts of {count:,} of {len(trajectories):,} "
            f"trajectories; {counts.total() - count:,} have another, {unread:,} ours or none that can be read")
    else:
        say("no logged prompt shows a system prompt other than ours")


def first_shuffled(items, args, files):
    """The first --num-tasks of `items` in a seeded order; all of them, in their own, where it is not given."""
    if args.num_tasks is None:
        return items
    if args.num_tasks > len(items):
        raise InputError(f"--num-tasks {args.num_tasks}: there are only {len(items)} tasks in "
                         f"{' and '.join(map(str, files))}")
    items = list(items)
    random.Random(args.seed).shuffle(items)
    return items[:args.num_tasks]


def published_paths(args):
    """The files of what is asked for of the published data."""
    if args.domain != "backend":
        if args.trajectories or args.split != "all":
            raise InputError(f"--domain {args.domain} of --source colbench takes a file whole: no --split and no "
                             "--trajectories")
        if not args.path or not pathlib.Path(args.path).is_file():
            raise InputError(f"--path {args.path or 'is missing'}: the published tasks of --domain {args.domain} are "
                             f"taken from a JSONL file alone; download it from {published.COLBENCH}, pass --path FILE")
    if args.split == "validation":
        raise InputError("--split validation: the published data have none, only train and test")
    if args.trajectories and args.split == "test":
        raise InputError("--split test: the published trajectories are all of training tasks")
    names = ([published.COLBENCH_TRAJECTORIES] if args.trajectories else
             list(published.COLBENCH_TASKS.values()) if args.split == "all" else [published.COLBENCH_TASKS[args.split]])
    return published.published_files(names, args.path)


def take_published(args):
    """--source colbench: write published tasks or trajectories to args.out."""
    files = published_paths(args)
    rows = [row for file in files for row in read_published(file, args.trajectories)]
    if domain_of(rows[0].get("task", rows[0])) is not DOMAINS[args.domain]:
        raise InputError(f"{files[0]}: no tasks of --domain {args.domain}")
    if args.trajectories:
        ids = list(dict.fromkeys(row["task_id"] for row in rows))
        chosen = set(first_shuffled(ids, args, files))
        kept = [row for row in rows if row["task_id"] in chosen]
    else:
        kept = first_shuffled(rows, args, files)
    if is_done(args, args.out, files):
        return
    begin_output(args, args.out, files)
    samples = collections.Counter(row["task_id"] for row in kept)
    if args.trajectories:
        low, high = min(samples.values()), max(samples.values())
        say(f"kept {len(kept):,} of {len(rows):,} trajectories, {len(samples):,} of {len(ids):,} tasks, "
            f"{low if low == high else f'{low} to {high}'} samples a task")
        common.fill_rewards(kept, DOMAINS[args.domain], args)
        write_system_prompt(pathlib.Path(f"{args.out}.system_prompt.txt"), kept)
    else:
        say(f"kept {len(kept):,} of {len(rows):,} tasks, {len(kept) - len(samples):,} of them repeat another")
    write_jsonl(args.out, kept)


def take_websight(args):
    """--source websight: write the first --num-tasks of the data set, in its order, that are of --split and new."""
    files = published.websight_files(args.path)
    if is_done(args, args.out, files):
        return
    tasks, ends, images = [], collections.Counter(), collections.Counter()
    for end, task, addresses in published.websight_tasks(args.path, args.split):
        ends[end] += 1
        if end == "kept":
            tasks.append(task)
            images += addresses
        if len(tasks) == args.num_tasks:
            break
    if len(tasks) < args.num_tasks:
        raise InputError(f"--num-tasks {args.num_tasks}: there are only {len(tasks)} tasks in "
                         f"{args.path or published.WEBSIGHT} (rows: {counted(ends)})")
    begin_output(args, args.out, files)
    unsized = images.pop("", 0)
    say(f"{ends.total():,} rows in the order of the data set: {counted(ends)}\n"
        f"{images.total():,} addresses of images rewritten to {published.PHOTO.format('W', 'H')} "
        f"({counted(images) or 'none'}), {unsized:,} of them without a size as {'x'.join(published.PHOTO_SIZE)}")
    write_jsonl(args.out, tasks)


# ---------------------------------------------------------------------------------------------------------------------

def parse_args(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument("--source", choices=["template", "llm", "colbench", "websight"], default="template",
                        help="where tasks come from")
    parser.add_argument("--domain", choices=list(DOMAINS), default="backend",
                        help="functions or pages; llm: only functions, websight: only pages")
    # a model that writes tasks
    parser.add_argument("--model", type=text_flag,
                        help="llm: who writes the tasks: a folder, a hub id, smollm2, or a server "
                        "http://HOST:PORT/v1#NAME")
    parser.add_argument("--seeds", type=text_flag, metavar="FILE",
                        help="llm: texts that give the ideas: JSONL with \"text\", or plain "
                        "paragraphs or lines; without it our own topics")
    parser.add_argument("--max-attempts", type=positive_int, help="llm: replies after which it gives up (where "
                        "not given: 20 a task, divided by the share of --split)")
    parser.add_argument("--temperature", type=temperature_flag, default=1.0, help="llm: of the model")
    parser.add_argument("--max-new-tokens", type=num_tokens_flag, default=2048, help="llm: tokens of a reply")
    parser.add_argument("--concurrency", type=num_samples_flag, default=64, help="llm: attempts in flight")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32",
                        help="llm: arithmetic of a local model")
    # the published data
    parser.add_argument("--path", type=text_flag, metavar="LOCAL_COPY",
                        help="colbench: a folder with the published files, or one "
                        "JSONL file, which is taken whole; websight: a parquet or JSONL file, or a folder of parquet "
                        "files; without it they are downloaded from the hub")
    parser.add_argument("--trajectories", action="store_true", help="colbench: take the offline trajectories instead")
    # the tasks
    parser.add_argument("--num-tasks", type=positive_int,
                        help="tasks to write, in an order by --seed (where not given: all of colbench, else 1000); "
                        "websight: in its own order")
    parser.add_argument("--split", choices=["all", *SPLITS], default="all",
                        help="which part: disjoint by content; colbench: a published file (no validation)")
    parser.add_argument("--told", choices=["none", "some", "all"], default="some",
                        help="facts that the request states: none, one (of a page one or two) in 30 %% of the tasks, "
                        "or all (clear requests)")
    parser.add_argument("--seed", type=seed_flag, default=0, help="seed of the tasks")
    parser.add_argument("--check", type=text_flag, metavar="FILE",
                        help="check the tasks of this file instead of making tasks")
    parser.add_argument("--out", type=text_flag,
                        help="tasks file to write (JSONL); with --check its findings, a row a task (optional)")
    add_world(parser)
    add_overwrite(parser)
    args = parser.parse_args(argv)
    if not args.out and not args.check:
        parser.error("the following arguments are required: --out")
    if args.source not in ("colbench", "websight") and args.path or args.source != "colbench" and args.trajectories:
        parser.error("--path and --trajectories need --source colbench (--path also websight)")
    if args.source == "websight":
        args.domain = "frontend"
    if args.source == "llm" and args.domain != "backend":
        parser.error("--source llm writes functions only (--domain backend)")
    if (args.source == "llm") != bool(args.model) or args.source != "llm" and (args.seeds or args.max_attempts):
        parser.error("--source llm needs --model; --model, --seeds and --max-attempts need --source llm")
    if args.source != "colbench" and args.num_tasks is None:
        args.num_tasks = 1000
    if args.source == "llm" and args.max_attempts is None:
        args.max_attempts = 20 * args.num_tasks * 100 // (100 if args.split == "all" else len(SPLITS[args.split]))
    return args


def check(args):
    """--check: print, and with --out write, what is wrong with the tasks of a file."""
    tasks = common.read_tasks(args.check)
    domain = domain_of(tasks[0])
    if domain.check_data is None:
        raise InputError(f"{args.check}: --check knows nothing to check about {domain.NOUN}s, which have no tests")
    if args.out and is_done(args, args.out, [args.check]):
        return
    checks = domain.check_data(tasks, args.unsafe_scorer)
    for number, row in enumerate(checks, 1):
        for what, detail in row["findings"].items():
            say(f"{args.check}:{number}: {what} ({detail})")
    constants = [row["constant"] for row in checks]
    say(f"{len(checks):,} tasks, {sum(row['num_tests'] for row in checks):,} tests: "
        f"{counted(what for row in checks for what in row['findings']) or 'no finding'}\n"
        f"the best constant answer for each task passes {sum(constants) / len(constants):.1%} of the tests and "
        f"solves {constants.count(1) / len(constants):.1%} of the tasks")
    if args.out:
        begin_output(args, args.out, [args.check])
        write_jsonl(args.out, checks)


def main(argv=None):
    args = parse_args(argv)
    if args.check:
        return check(args)
    if take := {"colbench": take_published, "llm": write_tasks, "websight": take_websight}.get(args.source):
        return take(args)
    if is_done(args, args.out, []):
        return
    begin_output(args, args.out, [])
    costs, domain = Costs(args.out), DOMAINS[args.domain]
    tasks, dropped = make_tasks(domain, args.num_tasks, args.seed, args.split, args.told)
    say(f"dropped draws: {counted(dropped) or 'none'}")
    say(f"{len(tasks):,} tasks of {len({task['family'] for task in tasks})} families, "
        f"{sum(num_hidden(domain, task) for task in tasks) / len(tasks):.2f} facts to find out in each")
    write_jsonl(args.out, tasks)
    costs.record()


if __name__ == "__main__":
    run_stage(main, ColBenchError, ReplyError)
