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
import functools
import pathlib
import random
import re
import warnings

import common
from colbench import ColBenchError, domain_of, DOMAINS, in_split, published, SPLITS, task_id, written
from colbench.scorer import check_tasks, Scorer
from lib.costs import Costs
from lib.flags import (
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
from lib.models import work_of
from lib.runtime import (
    barrier,
    begin_output,
    InputError,
    is_done,
    is_main,
    map_blocks,
    read_jsonl,
    read_text,
    run_stage,
    say,
    start,
    whole_file,
    write_jsonl,
)
from lib.servers import ReplyError, strip_thoughts
from lib.speakers import ask, open_speaker, Sampling, SpeakerOptions

# ---------------------------------------------------------------------------------------------------------------------
# template tasks

MOST_DRAWS_IN_VAIN = 300            # of a family, one after the other, until it counts as used up


def make_tasks(domain, num_tasks, seed, split, told):
    """(num_tasks tasks without repeats, the reasons why draws were dropped). The families take turns; one that has no
    more is left out."""
    rng, tasks, dropped = random.Random(seed), {}, []

    def accept(name):
        if not in_split(name, split):
            return "of another split"
        return "repeated" if name in tasks else None

    families = sorted(domain.FAMILIES)
    misses = {family: 0 for family in families}
    while len(tasks) < num_tasks:
        if not families:
            raise InputError(f"--num-tasks {num_tasks}: there are only {len(tasks)} different tasks (--split {split})")
        family = families[len(tasks) % len(families)]
        task = domain.make_task(rng, family, told, accept)
        if isinstance(task, dict):
            tasks[task["task_id"]] = task
            misses[family] = 0
            continue
        dropped.append(task)
        misses[family] += 1
        if misses[family] == MOST_DRAWS_IN_VAIN:
            families.remove(family)
    return list(tasks.values()), dropped


def num_hidden(domain, task):
    """How many facts the agent has to find out."""
    facts = domain.facts(task, []) or []
    return sum(not is_known for _, is_known in facts)


def write_template_tasks(args):
    """--source template: write tasks that need no model."""
    if is_done(vars(args), args.out, []):
        return
    begin_output(vars(args), args.out, [])
    costs, domain = Costs(args.out), DOMAINS[args.domain]
    tasks, dropped = make_tasks(domain, args.num_tasks, args.seed, args.split, args.told)
    families = {task["family"] for task in tasks}
    mean_hidden = sum(num_hidden(domain, task) for task in tasks) / len(tasks)
    say(f"dropped draws: {counted(dropped) or 'none'}")
    say(f"{len(tasks):,} tasks of {len(families)} families, {mean_hidden:.2f} facts to find out in each")
    write_jsonl(args.out, tasks)
    costs.record()


def counted(items):
    """"3 kept, 1 repeated": how often each of some texts (or of a Counter) is there, the most frequent first."""
    counts = collections.Counter(items).most_common()
    return ", ".join(f"{count:,} {item}" for item, count in counts)


# ---------------------------------------------------------------------------------------------------------------------
# tasks written by a language model: text -> prompt -> reply -> task, or the reason why there is none

def read_seed_texts(path):
    """The texts of a JSONL file of {"text"}, or of a plain one: its paragraphs, or its lines where none is empty."""
    if pathlib.Path(path).suffix == ".jsonl":
        texts = [row["text"] for row in read_jsonl(path, {"text": str})]
    else:
        content = read_text(path).strip()
        paragraphs = re.split(r"\n\s*\n", content)
        texts = paragraphs if len(paragraphs) > 1 else content.split("\n")
    texts = [text.strip() for text in texts if text.strip()]
    if not texts:
        raise InputError(f"{path}: no text in it")
    return [text[:written.MAX_SEED_CHARS] for text in texts]


async def ask_all(speaker, prompts, numbers, args):
    """The Reply to each prompt, all in flight together; the number of the attempt is the seed."""
    requests = []
    for prompt, number in zip(prompts, numbers):
        sampling = Sampling((args.seed, number, "task"), args.temperature, args.max_new_tokens)
        requests.append(ask(speaker, [{"role": "user", "content": prompt}], sampling))
    return [reply for _, [reply] in await asyncio.gather(*requests)]


def idea_of(number, texts, seed):
    """(text, kind of function) that an attempt asks for."""
    rng = random.Random(f"{seed} {number}")
    return texts[number % len(texts)], rng.choice(written.KINDS)


def attempt_rows(numbers, speaker, loop, texts, scorers, args):
    """Rows of a block of attempts: the reply, and its task or the reason why there is none; repeats aside."""
    ideas = [idea_of(number, texts, args.seed) for number in numbers]
    prompts = [written.TASK_PROMPT.format(text=text, kind=kind) for text, kind in ideas]
    replies = loop.run(ask_all(speaker, prompts, numbers, args))
    rows, unchecked = [], []
    for number, (text, _), reply in zip(numbers, ideas, replies):
        row = {"attempt": number, "seed_text": text, "reason": None, "task": None, "reply": reply.text,
               "tokens": reply.completion_tokens or 0}
        rows.append(row)
        task = written.written_task(strip_thoughts(reply.text), reply.ended)
        if isinstance(task, dict):
            unchecked.append((row, task))
        else:
            row["reason"] = task

    tasks = [task for _, task in unchecked]
    checks, values = check_tasks(tasks, *scorers), scorers[0].reference_results(tasks)
    for (row, task), check, task_values in zip(unchecked, checks, values):
        row["reason"] = reason_against(task, check, args.split)
        if row["reason"] is None:
            row["task"] = {**task, "attempt": row["attempt"]}
            row["types"] = [type_name(value) for _, value in task_values]
    return rows


def reason_against(task, check, split):
    """Why a task that has been run is not kept; None: it is, unless it repeats another."""
    for what, detail in check["findings"].items():
        if what in written.MEASURES_NOTHING:
            return f"{what}: {detail}"
    return None if in_split(task["task_id"], split) else "of another split"


def type_name(value):
    """The type of an encoded value (colbench/values.py)."""
    return value[0] if isinstance(value, list) else type(value).__name__


MOST_PROMPT_TOKENS = 16384                                              # of a model that writes tasks


def write_model_tasks(args):
    """--source llm: ask the model in rounds of attempts until --num-tasks of its tasks are kept. A round's attempts are
    a partial file, which the same command reads or goes on in; how they are batched does not change what is kept."""
    warnings.simplefilter("ignore", SyntaxWarning)                      # of what the model writes
    runtime, out = start(args.seed), pathlib.Path(args.out)
    inputs = [args.seeds, args.model]
    texts = read_seed_texts(args.seeds) if args.seeds else re.split("; |\n", written.TOPICS)
    random.Random(args.seed).shuffle(texts)
    if is_done(vars(args), out, inputs):
        return
    room = MOST_PROMPT_TOKENS + args.max_new_tokens
    speaker = open_speaker(args.model, SpeakerOptions(runtime.device, args.dtype, args.concurrency, room))
    begin_output(vars(args), out, inputs)
    costs = Costs(out, runtime.device)

    rows, tasks = [], []
    seen = set(), [], {}                                                # of what is kept, for written.repeat_reason
    scorers = [Scorer(args.unsafe_scorer, hash_seed=number) for number in (0, 1)]
    with asyncio.Runner() as loop, scorers[0], scorers[1]:
        while len(tasks) < args.num_tasks and len(rows) < args.max_attempts:
            first = len(rows)
            num_attempts = max(args.num_tasks - len(tasks), args.concurrency)
            numbers = range(first, min(first + num_attempts, args.max_attempts))
            blocks = [numbers[i:i + args.concurrency] for i in range(0, len(numbers), args.concurrency)]
            work = functools.partial(attempt_rows, speaker=speaker, loop=loop, texts=texts, scorers=scorers, args=args)
            for row in map_blocks(f"{out}.{first}.partial", blocks, work, runtime, "attempt"):
                if len(tasks) == args.num_tasks:
                    continue                                     # the rest of the round is not needed
                row["reason"] = row["reason"] or written.repeat_reason(row["task"], seen)
                rows.append(row)
                if row["reason"] is None:
                    tasks.append(row["task"])
    barrier()                                                    # all have read the partial files
    finish_tasks(args, out, rows, tasks, runtime)
    if speaker.model:
        costs.works.append(work_of(speaker.model))
    else:
        num_tokens = sum(row["tokens"] for row in rows) if is_main() else 0
        costs.works.append({"generated_tokens": num_tokens})
    costs.record()


def finish_tasks(args, out, rows, tasks, runtime):
    """Write the rejected replies and the tasks and print what they are like; InputError where tasks are missing."""
    rejected = out.with_name(out.stem + ".rejected.jsonl")
    ends, rejected_rows = collections.Counter(), []
    for row in rows:
        reason, _, detail = (row["reason"] or "kept").partition(": ")
        ends[reason] += 1
        if reason not in ("kept", "of another split"):
            rejected_rows.append({"attempt": row["attempt"], "seed_text": row["seed_text"], "reason": reason,
                                  "detail": detail, "reply": row["reply"]})
    if is_main():
        write_jsonl(rejected, rejected_rows)
    if len(tasks) < args.num_tasks:
        raise InputError(f"--max-attempts {args.max_attempts}: {len(tasks)} of {args.num_tasks} tasks kept "
                         f"({counted(ends)}; see {rejected}); the same command with a higher one goes on from here")
    if is_main():
        write_jsonl(out, tasks)
        for path in out.parent.iterdir():
            if path.name.startswith(f"{out.name}.") and path.name.endswith(".partial"):
                path.unlink()
    num_lines = sum(len(task["ground_truth"].splitlines()) for task in tasks)
    num_words = sum(len(task["problem_description"].split()) for task in tasks)
    num_longer = sum(task["written_tests"] > written.NUM_TESTS for task in tasks)
    types = collections.Counter()
    for row in rows:
        if row["reason"] is None:
            types.update(row["types"])
    say(f"{len(rows):,} attempts: {counted(ends)}\na task has {num_lines / len(tasks):.1f} lines of code and a "
        f"description of {num_words / len(tasks):.1f} words (means); {num_longer:,} had more than {written.NUM_TESTS} "
        f"tests\nvalues of the tests: {counted(types)}")


# ---------------------------------------------------------------------------------------------------------------------
# the published tasks and trajectories

def read_published(path, trajectories):
    """The rows of a published file, as they are but for "task_id", and a trajectory's "sample", where missing."""
    if not trajectories:
        return [{**task, "task_id": task_id(task)} for task in common.read_tasks(path)]
    return common.read_trajectories(path)


def write_system_prompt(path, trajectories):
    """Write the system prompt that the agent of the trajectories had, for 02 --system-prompt."""
    counts = collections.Counter(map(common.system_prompt, trajectories))
    num_unread = counts.pop(None, 0)
    path.unlink(missing_ok=True)
    if not counts:
        say("no logged prompt shows a system prompt other than ours")
        return
    [(text, count)] = counts.most_common(1)
    with whole_file(path) as file:
        file.write(f"{text}\n")
    say(f"writes {path}: the system prompt in the logged prompts of {count:,} of {len(trajectories):,} "
        f"trajectories; {counts.total() - count:,} have another, {num_unread:,} ours or none that can be read")


def first_shuffled(items, args, files):
    """The first --num-tasks of `items` in a seeded order; without the flag all of them, in theirs."""
    if args.num_tasks is None:
        return items
    if args.num_tasks > len(items):
        names = " and ".join(map(str, files))
        raise InputError(f"--num-tasks {args.num_tasks}: there are only {len(items)} tasks in {names}")
    items = list(items)
    random.Random(args.seed).shuffle(items)
    return items[:args.num_tasks]


def check_published(args):
    """InputError where the published data have no such part."""
    if args.domain != "backend" and (args.trajectories or args.split != "all"):
        raise InputError(f"--domain {args.domain} of --source colbench takes a file whole: no --split and no "
                         "--trajectories")
    if args.domain != "backend" and not (args.path and pathlib.Path(args.path).is_file()):
        raise InputError(f"--path {args.path or 'is missing'}: the published tasks of --domain {args.domain} are "
                         f"taken from a JSONL file alone; download it from {published.COLBENCH}, pass --path FILE")
    if args.split == "validation":
        raise InputError("--split validation: the published data have none, only train and test")
    if args.trajectories and args.split == "test":
        raise InputError("--split test: the published trajectories are all of training tasks")


def published_paths(args):
    """The files of what is asked for of the published data."""
    check_published(args)
    if args.trajectories:
        names = [published.COLBENCH_TRAJECTORIES]
    elif args.split == "all":
        names = list(published.COLBENCH_TASKS.values())
    else:
        names = [published.COLBENCH_TASKS[args.split]]
    return published.published_files(names, args.path)


def take_published(args):
    """--source colbench: write published tasks or trajectories to args.out."""
    files, rows = published_paths(args), []
    for file in files:
        rows += read_published(file, args.trajectories)
    if domain_of(rows[0].get("task", rows[0])) is not DOMAINS[args.domain]:
        raise InputError(f"{files[0]}: no tasks of --domain {args.domain}")
    if not args.trajectories:
        tasks = first_shuffled(rows, args, files)
        if not is_done(vars(args), args.out, files):
            begin_output(vars(args), args.out, files)
            num_repeats = len(tasks) - len({task["task_id"] for task in tasks})
            say(f"kept {len(tasks):,} of {len(rows):,} tasks, {num_repeats:,} of them repeat another")
            write_jsonl(args.out, tasks)
        return

    ids = list(dict.fromkeys(row["task_id"] for row in rows))
    chosen_ids = set(first_shuffled(ids, args, files))
    trajectories = [row for row in rows if row["task_id"] in chosen_ids]
    if is_done(vars(args), args.out, files):
        return
    begin_output(vars(args), args.out, files)
    samples = collections.Counter(row["task_id"] for row in trajectories)
    low, high = min(samples.values()), max(samples.values())
    spread = low if low == high else f"{low} to {high}"
    say(f"kept {len(trajectories):,} of {len(rows):,} trajectories, {len(samples):,} of {len(ids):,} tasks, "
        f"{spread} samples a task")
    open_world = common.scoring_world(DOMAINS[args.domain], args.out, common.world_flags(args))
    common.fill_rewards(trajectories, open_world)
    write_system_prompt(pathlib.Path(f"{args.out}.system_prompt.txt"), trajectories)
    write_jsonl(args.out, trajectories)


def take_websight(args):
    """--source websight: write the first --num-tasks of the data set, in its order, that are of --split and new."""
    files = published.websight_files(args.path)
    if is_done(vars(args), args.out, files):
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
    begin_output(vars(args), args.out, files)
    num_unsized = images.pop("", 0)
    say(f"{ends.total():,} rows in the order of the data set: {counted(ends)}\n"
        f"{images.total():,} addresses of images rewritten to {published.PHOTO.format('W', 'H')} "
        f"({counted(images) or 'none'}), {num_unsized:,} of them without a size as {'x'.join(published.PHOTO_SIZE)}")
    write_jsonl(args.out, tasks)


SOURCES = {
    "template": write_template_tasks,
    "llm": write_model_tasks,
    "colbench": take_published,
    "websight": take_websight}


# ---------------------------------------------------------------------------------------------------------------------

def check(args):
    """--check: print, and with --out write, what is wrong with the tasks of a file."""
    tasks = common.read_tasks(args.check)
    domain = domain_of(tasks[0])
    if domain.check_data is None:
        raise InputError(f"{args.check}: --check knows nothing to check about {domain.NOUN}s, which have no tests")
    if args.out and is_done(vars(args), args.out, [args.check]):
        return
    checks = domain.check_data(tasks, args.unsafe_scorer)
    num_findings, num_tests = collections.Counter(), 0
    for number, row in enumerate(checks, 1):
        num_tests += row["num_tests"]
        num_findings.update(row["findings"].keys())
        for what, detail in row["findings"].items():
            say(f"{args.check}:{number}: {what} ({detail})")
    constants = [row["constant"] for row in checks]
    say(f"{len(checks):,} tasks, {num_tests:,} tests: {counted(num_findings) or 'no finding'}\n"
        f"the best constant answer for each task passes {sum(constants) / len(constants):.1%} of the tests and "
        f"solves {constants.count(1) / len(constants):.1%} of the tasks")
    if args.out:
        begin_output(vars(args), args.out, [args.check])
        write_jsonl(args.out, checks)


def parse_args(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument("--source", choices=list(SOURCES), default="template",
                        help="where tasks come from")
    parser.add_argument("--domain", choices=list(DOMAINS), default="backend",
                        help="functions, pages or queries; llm: only functions, websight: only pages")
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
    if args.path and args.source not in ("colbench", "websight"):
        parser.error("--path needs --source colbench or websight")
    if args.trajectories and args.source != "colbench":
        parser.error("--trajectories needs --source colbench")
    if args.source == "websight":
        args.domain = "frontend"
    if args.source == "llm" and args.domain != "backend":
        parser.error("--source llm writes functions only (--domain backend)")
    needs_model = args.source == "llm"
    if needs_model and not args.model:
        parser.error("--source llm needs --model")
    if not needs_model and (args.model or args.seeds or args.max_attempts):
        parser.error("--model, --seeds and --max-attempts need --source llm")
    if args.source != "colbench" and args.num_tasks is None:
        args.num_tasks = 1000
    if args.source == "llm" and args.max_attempts is None:
        share_percent = 100 if args.split == "all" else len(SPLITS[args.split])
        args.max_attempts = 20 * args.num_tasks * 100 // share_percent
    return args


def main(argv=None):
    args = parse_args(argv)
    if args.check:
        check(args)
    else:
        SOURCES[args.source](args)


if __name__ == "__main__":
    run_stage(main, ColBenchError, ReplyError)
