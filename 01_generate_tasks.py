"""Stage 1: make collaborative tasks in ColBench's format, by rule or by a model, or take ColBench's own: Python
functions (--domain backend) or web pages (--domain frontend).

Reads   nothing (--source template), a model and texts (--source llm), the published files (--source colbench), the
        data set WebSight (--source websight), or a tasks file (--check).
Writes  tasks.jsonl, one task a line: {"problem_description", "ground_truth", "test_cases"} as published, "task_id", and
        of template tasks {"family", "template", "facts"}, which the rule-based human and the scripted agent of 02 read;
        with --source llm also tasks.rejected.jsonl: {"attempt", "seed_text", "reason", "detail", "reply"};
        with --trajectories: trajectories.jsonl, as published, with "task_id", "sample" and "reward", and beside it
        FILE.system_prompt.txt: the agent's system prompt, from the logged prompts, for 02 --system-prompt.
        Tasks of pages have no "test_cases", and template ones "slots" in place of "facts".

A template task is a vague request with a signature, a reference function and 10 test calls. What the request leaves
out stands in `facts`: those that matter (thresholds, prices, orders, words: each is a value in the reference) and
plausible ones that do not (`matters: false`: the delivery time of a parcel whose price depends on its weight alone).
A task is kept only if its reference runs on all its tests, and if every fact that matters does so provably: with any
other value of that fact at least one test gives another result.

Splits are disjoint by content: the hash of the reference puts a task into train (80 %), validation (10 %) or test
(10 %), whatever the seed. No two tasks of a file have the same reference.

--source llm lets a model (--model) write the tasks: a text, an excerpt of --seeds or one of our topics, gives it the
idea, and it replies with one JSON object: a vague request, a function, 10 calls. A task is kept if the request names
the signature and quotes no other code, the function has at most 50 lines and gives the same values twice and with
other hash seeds, not all of them equal, and no kept task is like it. It goes on until --num-tasks are kept; what is
rejected is kept apart, with the reason and the reply. What the person knows stands in no list of facts, so the human
must be a model, too. SmolLM2-135M is too small to write one (none in 6 replies).

--source colbench takes the published tasks as they are, from the Hugging Face hub or from --path: a folder with
backend_tasks/train.jsonl and backend_tasks/test.jsonl, or one JSONL file, which is taken whole. --trajectories takes
the published offline trajectories instead, every row and key as it is: a row gets "task_id" and "sample" (0, 1, 2 ...
by order of appearance of its task: the file holds its samples of the tasks as blocks one after the other), and a row
without "reward" gets "reward", "tests" and "faults" from our scorer.

--domain frontend: a task is an idea of a page in one line and its HTML. Template pages are short, as a small model
writes one whole in every turn. Each slot of such a page (colours, layout, font, title) shows: with any other value the
page looks different, which tests/test_pages.py proves in a browser. --source websight takes ideas and pages of
WebSight v0.2, from the hub or from --path (parquet, or JSONL with its keys), as ColBench does: in the data set's order,
without repeats, and every picture is the same photo in the size that its address asks for. --source colbench takes a
file of published tasks of pages as it is.

--check FILE writes no tasks but says what is wrong with those of a file: references that raise, lack a package, are
random or return what cannot be compared; tests that say nothing; and how far an answer comes that always returns the
same value (the best one for each task), the floor under every "tests passed".

Differs from the paper: ColBench's tasks were written by Llama-3.1-70B-Instruct. Template tasks need no model, and a
human that answers by rule can play them; for tasks of a model the prompt and the checks are ours.

    python 01_generate_tasks.py --split train --num-tasks 1000 --seed 0 --out out/train.jsonl
    python 01_generate_tasks.py --split test --num-tasks 300 --seed 1 --out out/test.jsonl
    python 01_generate_tasks.py --check out/test.jsonl
    python 01_generate_tasks.py --source llm --model http://localhost:8000/v1#NAME --num-tasks 1000 --split train \\
        --out llm/train.jsonl
    python 01_generate_tasks.py --source colbench --split test --out colbench/test.jsonl
    python 01_generate_tasks.py --source colbench --trajectories --path LOCAL_COPY --out colbench/offline.jsonl
    python 01_generate_tasks.py --domain frontend --split train --num-tasks 1000 --out pages/train.jsonl
    python 01_generate_tasks.py --source websight --path LOCAL_COPY --split train --num-tasks 10000 --out pages.jsonl
"""
import asyncio
import collections
import contextlib
import functools
import hashlib
import pathlib
import random
import re
import warnings

import torch

import common
from colbench import ColBenchError, domain_of, DOMAINS, in_split, published, SPLITS, task_id, written
from colbench.scorer import check_tasks, Scorer
from lib.arguments import add_overwrite, add_world, argument_parser, positive_int
from lib.costs import Costs
from lib.engine import generate, uniforms
from lib.models import encode, is_server, load_model, stop_ids, work_of
from lib.runtime import (
    barrier,
    begin_output,
    check_row,
    InputError,
    is_done,
    is_main,
    map_blocks,
    read_jsonl,
    run_stage,
    say,
    start,
    write_jsonl,
)
from lib.servers import open_server, ReplyError, server_reply, server_seed, strip_thoughts


def make_tasks(domain, num_tasks, seed, split, told):
    """`num_tasks` tasks without repeats, the families in turn until one has no more; the dropped draws by reason."""
    rng, tasks, dropped = random.Random(seed), {}, {}

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
        dropped[task] = dropped.get(task, 0) + 1
        misses[name] += 1
        if misses[name] == 300:
            families.remove(name)
    return list(tasks.values()), dropped


# ---------------------------------------------------------------------------------------------------------------------
# tasks written by a language model: text -> prompt -> reply -> task, or the reason why there is none

def read_seed_texts(path):
    """The texts of a JSONL file of {"text"}, or of a plain one: its paragraphs, or its lines where none is empty."""
    path = pathlib.Path(path)
    if path.suffix == ".jsonl":
        texts = [row["text"] for row in read_jsonl(path, {"text": str})]
    else:
        try:
            content = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: no file of UTF-8 text ({type(error).__name__})") from None
        texts = re.split(r"\n\s*\n" if re.search(r"\n\s*\n", content) else r"\n", content)
    if not any(text.strip() for text in texts):
        raise InputError(f"{path}: no text in it")
    return [text.strip()[:written.MAX_SEED_CHARS] for text in texts if text.strip()]


def attempt_rows(numbers, ask, texts, scorers, args):
    """Rows of a block of attempts: the reply, and its task or the reason why there is none; repeats aside."""
    ideas = [(texts[number % len(texts)], random.Random(f"{args.seed} {number}").choice(written.KINDS))
             for number in numbers]
    chats = [[{"role": "user", "content": written.TASK_PROMPT.format(text=text, kind=kind)}] for text, kind in ideas]
    rows = [{"attempt": number, "seed_text": text, "reason": None, "task": None, **reply}
            for number, (text, _), reply in zip(numbers, ideas, ask(chats, numbers))]
    found_in = [written.written_task(strip_thoughts(row["reply"]), row.pop("ended")) for row in rows]
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


def ask_model(chats, numbers, model, tokenizer, args):
    """A local model's replies to chats, {"reply", "ended", "tokens"}; the number of the attempt is the seed."""
    prompts = [encode(tokenizer, tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
               for chat in chats]
    randoms = torch.cat([uniforms((1, args.max_new_tokens), args.seed, number, "task") for number in numbers])
    stops = stop_ids(model, tokenizer)
    return [{"reply": tokenizer.decode(ids, skip_special_tokens=True), "ended": ids[-1] in stops, "tokens": len(ids)}
            for ids in generate(model, prompts, randoms, args.temperature, stops, args.concurrency)]


def ask_server(chats, numbers, server, loop, args):
    """The same of a server, all chats in flight together."""
    seeds = [server_seed(args.seed, number, "task") for number in numbers]

    async def all_replies():
        return await asyncio.gather(*(server_reply(server, chat, args.temperature, args.max_new_tokens, seed)
                                      for chat, seed in zip(chats, seeds)))

    return [{"reply": reply.text, "ended": reply.ended, "tokens": reply.completion_tokens or 0}
            for reply in loop.run(all_replies())]


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
    rows, kept, seen, model = [], [], (set(), [], {}), None
    with contextlib.ExitStack() as stack:
        if is_server(args.model):
            server, loop = open_server(args.model), stack.enter_context(asyncio.Runner())
            ask = functools.partial(ask_server, server=server, loop=loop, args=args)
        else:
            model, tokenizer = load_model(args.model, runtime.device, args.dtype)
            ask = functools.partial(ask_model, model=model.eval(), tokenizer=tokenizer, args=args)
        begin_output(args, out, inputs)
        costs = Costs(out, runtime.device)
        scorers = [stack.enter_context(Scorer(args.unsafe_scorer, hash_seed=number)) for number in (0, 1)]
        while len(kept) < args.num_tasks and len(rows) < args.max_attempts:
            first, missing = len(rows), max(args.num_tasks - len(kept), args.concurrency)
            numbers = range(first, min(first + missing, args.max_attempts))
            blocks = [numbers[i:i + args.concurrency] for i in range(0, len(numbers), args.concurrency)]
            for row in map_blocks(f"{out}.{first}.partial", blocks, lambda block: attempt_rows(
                    block, ask, texts, scorers, args), runtime, "attempt"):
                if len(kept) < args.num_tasks:
                    row["reason"] = row["reason"] or written.repeat_reason(row["task"], seen)
                    rows.append(row)
                    kept += [] if row["reason"] else [row]
    barrier()                                                    # all have read the partial files
    finish_tasks(args, out, rows, kept)
    generated = {"generated_tokens": sum(row["tokens"] for row in rows) if is_main() else 0, "flops": 0}
    costs.record([work_of(model) if model else generated])


def counted(items):
    return ", ".join(f"{count:,} {item}" for item, count in collections.Counter(items).most_common())


def finish_tasks(args, out, rows, kept):
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
        for path in out.parent.glob(f"{out.name}.*.partial"):
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
        partial.write_bytes(f"{text}\n".encode(errors="backslashreplace"))
        partial.rename(path)
        print(f"writes {path}: the system prompt in the logged prompts of {count:,} of {len(trajectories):,} "
              f"trajectories; {counts.total() - count:,} have another, {unread:,} ours or none that can be read")
    else:
        print("no logged prompt shows a system prompt other than ours")


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
        print(f"kept {len(kept):,} of {len(rows):,} trajectories, {len(samples):,} of {len(ids):,} tasks, "
              f"{low if low == high else f'{low} to {high}'} samples a task")
        common.fill_rewards(kept, DOMAINS[args.domain], args)
        write_system_prompt(pathlib.Path(f"{args.out}.system_prompt.txt"), kept)
    else:
        print(f"kept {len(kept):,} of {len(rows):,} tasks, {len(kept) - len(samples):,} of them repeat another")
    write_jsonl(args.out, kept)


def take_websight(args):
    """--source websight: write the first --num-tasks of the data set, in its order, that are of --split and new."""
    files = published.websight_files(args.path)
    if is_done(args, args.out, files):
        return
    tasks, ends, pictures = {}, collections.Counter(), collections.Counter()
    for where, row in published.websight_rows(args.path):
        check_row(row, {}, {}, where)
        check_row({key: value or "" for key, value in row.items()}, published.WEBSIGHT_KEYS, {}, where)
        html, idea = ((row[key] or "").strip() for key in published.WEBSIGHT_KEYS)
        counts = collections.Counter()
        html = published.one_photo(html, counts)
        name = hashlib.sha256(html.encode(errors="replace")).hexdigest()[:16]
        task = {"task_id": name, "problem_description": idea, "ground_truth": html}
        end = ("empty" if not html or not idea else "no page" if not DOMAINS[args.domain].owns(task) else
               "of another split" if not in_split(name, args.split) else "repeated" if name in tasks else "kept")
        ends[end] += 1
        if end == "kept":
            tasks[name] = task
            pictures += counts
        if len(tasks) == args.num_tasks:
            break
    if len(tasks) < args.num_tasks:
        raise InputError(f"--num-tasks {args.num_tasks}: there are only {len(tasks)} tasks in "
                         f"{args.path or published.WEBSIGHT} (rows: {counted(ends)})")
    begin_output(args, args.out, files)
    unsized = pictures.pop("", 0)
    print(f"{ends.total():,} rows in the order of the data set: {counted(ends)}\n"
          f"{pictures.total():,} addresses of pictures rewritten to {published.PHOTO.format('W', 'H')} "
          f"({counted(pictures) or 'none'}), {unsized:,} of them without a size as {'x'.join(published.PHOTO_SIZE)}")
    write_jsonl(args.out, tasks.values())


# ---------------------------------------------------------------------------------------------------------------------
# the data check

def print_check(path, checks):
    for number, check in enumerate(checks, 1):
        for what, detail in check["findings"].items():
            print(f"{path}:{number}: {what} ({detail})")
    counts = {}
    for what in (what for check in checks for what in check["findings"]):
        counts[what] = counts.get(what, 0) + 1
    num_tests = sum(check["num_tests"] for check in checks)
    print(f"{len(checks):,} tasks, {num_tests:,} tests: " +
          (", ".join(f"{count:,} {what}" for what, count in sorted(counts.items())) or "no finding"))
    constants = [check["constant"] for check in checks]
    print(f"the best constant answer for each task passes {sum(constants) / len(constants):.1%} of the tests and "
          f"solves {sum(c == 1 for c in constants) / len(constants):.1%} of the tasks")


# ---------------------------------------------------------------------------------------------------------------------

def parse_args(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument("--source", choices=["template", "llm", "colbench", "websight"], default="template",
                        help="where tasks come from")
    parser.add_argument("--domain", choices=list(DOMAINS), default="backend",
                        help="functions or pages; llm: only functions, websight: only pages")
    # a model that writes tasks
    parser.add_argument("--model", help="llm: who writes the tasks: a folder, a hub id, smollm2, or a server "
                        "http://HOST:PORT/v1#NAME")
    parser.add_argument("--seeds", metavar="FILE", help="llm: texts that give the ideas: JSONL with \"text\", or plain "
                        "paragraphs or lines; without it our own topics")
    parser.add_argument("--max-attempts", type=positive_int, help="llm: replies after which it gives up (where "
                        "not given: 20 a task, divided by the share of --split)")
    parser.add_argument("--temperature", type=float, default=1.0, help="llm: of the model")
    parser.add_argument("--max-new-tokens", type=positive_int, default=2048, help="llm: tokens of a reply")
    parser.add_argument("--concurrency", type=positive_int, default=64, help="llm: attempts in flight")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32",
                        help="llm: arithmetic of a local model")
    # the published data
    parser.add_argument("--path", metavar="LOCAL_COPY", help="colbench: a folder with the published files, or one "
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
    parser.add_argument("--seed", type=int, default=0, help="seed of the tasks")
    parser.add_argument("--check", metavar="FILE", help="check the tasks of this file instead of making tasks")
    parser.add_argument("--out", help="tasks file to write (JSONL); with --check its findings, a row a task (optional)")
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
    print_check(args.check, checks)
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
    print("dropped draws: " + (", ".join(f"{count:,} {reason}" for reason, count in dropped.items()) or "none"))
    print(f"{len(tasks):,} tasks of {len({task['family'] for task in tasks})} families, "
          f"{sum(map(domain.num_hidden, tasks)) / len(tasks):.2f} facts to find out in each")
    write_jsonl(args.out, tasks)
    costs.record()


if __name__ == "__main__":
    run_stage(main, ColBenchError, ReplyError)
