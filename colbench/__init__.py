"""ColBench: tasks that an agent can only solve together with a user. This folder imports nothing else of the
repository, so that it can be copied alone, and needs no package, except for pages.

In ten lines: a task, a question to the rule-based user simulator, and two answers scored by the confined scorer:

    import asyncio, random
    from colbench import backend as domain
    rng = random.Random(0)
    task = domain.make_task(rng, "grade", "none", lambda task_id: None)     # a str: why this draw gave none
    history = [{"role": "user", "content": task["problem_description"]}]
    with domain.Environment() as environment:
        history.append({"role": "assistant", "content": "What should the pass mark be?"})
        print(asyncio.run(environment.rule_reply(task, history, rng)))
        for code in (task["ground_truth"], "def grade(score): return 'good'"):
            print(asyncio.run(environment.score([(task, code)]))[0]["reward"])

To add a domain, write one module and name it twice at the end of this file: in the import and in DOMAINS. The module
begins with `from colbench.defaults import *`, which has the defaults below, and defines what differs. A small one is
tests/toy_domain.py. A domain works with:

task        a dict with "problem_description" (the vague request), "ground_truth" (the reference solution c) and the
            domain's own fields
history     a list of turns {"role": "user" | "assistant", "content": str}; the first turn is the request
trajectory  {"task", "dialogue_history", "answer", "reward", …}
simulator   the user simulator: rules or a model

Names that every domain defines
-------------------------------
NOUN                what the user needs, as prompts and errors call it ("function")
FAMILIES            names of the template families
AGENT_SYSTEM        the agent's system prompt; "{max_rounds}" stands for the number of rounds
owns(task)          whether a task is of this domain, by its fields. No task may be of two domains
check_task(task, where)     raises ColBenchError, which begins with `where`, if a field is missing or of another type
                    (schema.py)
make_task(rng, family, told, accept)    a task with "task_id" (a hexadecimal hash) and "family"; or a str: why this
                    draw gave none. accept(task_id) returns None, or why the task is not wanted. told: the facts that
                    the request states, "none", "some" or "all"
answer_of(history, is_last)     the answer in the agent's turn that ends `history`; None: the dialogue goes on. In the
                    last round (is_last) it is a str
Environment         a context manager that holds what the domain runs (a scorer, a browser); see below

Names with a default: what a dialogue is worth
----------------------------------------------
eval_score(trajectory)  the value that is averaged (default: whether the reward is 1)
metric(trajectories)    the name of that mean in metrics.json (default: "success_rate")
measure(trajectories)   a dict of further metrics; "notes" in it is a list of lines that 05 prints (default: {})
COLUMNS             further columns of 05's table: (key of `measure`, heading, format). The keys "all_known",
                    "success_when_known" and "success_when_not_known" come from all_known (default: ())
MIN_RETURN_GAP      two trajectories make a pair if their returns differ by at least this much. With a number
                    returns are graded: 05 shows wins and ties, 04 --method rft takes the best of each task. None (the
                    default): a success and a failure make a pair
SCORE_KEYS          the keys that Environment.score writes into rows; 05 removes old ones (default: ("reward",))

Names with a default: the dialogue
----------------------------------
shown(message)      the part of an agent's message that stands in the dialogue (default: all of it)
answer_message(task)    the agent's turn that gives the reference as its answer (default: the reference)
REPLY_CHARS, REPLY_TOKENS   the most characters of a simulator's reply; the most tokens that a model may write for one
                    (default: 400, 128)
SIMULATOR_SEES      whether a simulating model is shown images (default: False)
PLAYERS             scripted agents for 02 --agent: {name: turn}. turn(task, history, max_rounds, rng) returns the
                    agent's next message. Names begin with "script" (default: {})
lacks(task, player)     the field that a task lacks for "rules" (the simulator) or "script" (a scripted agent); None
                    (the default): none
leak_of(task, reply)    how a reply of the simulator shows the reference ("code", …); None (the default): not at all
JUDGE               the prompt for a model that compares two turns, with {ground_truth}, {dialogue}, {a} and {b}; None
                    (the default): no model can
views(task, history, privileged)    what a visual critic sees after the agent's turn that ends `history`: a list of
                    (caption, document, or None for a black image). None in its place (the default): nothing to see
doubt_of(task)      why right answers to a task may be graded wrong, for 01; None (the default): nothing is known
check_data(tasks, unsafe_scorer)    for 01 --check: for each task {"findings": {what: detail}, "num_tests", "constant":
                    the share of tests that the best constant answer passes}. None in its place (the default): nothing
                    to check

Names with a default: what the agent has to find out (default: the task does not say)
-------------------------------------------------------------------------------------
facts(task, history)    [(text, whether it is known after `history`)], in an order that does not depend on `history`
turn_kind(task, history, message)   the kind of an agent's turn after `history` ("needed", "idle", …), or None
all_known(task, history)    whether everything that matters is known; called only where turn_kind is not None

Environment (defaults.Environment is its base class)
----------------------------------------
TAKES               names of the constructor's arguments, each with a default (default: ()). Flags of the stages:
                    unsafe_scorer, compat (verdicts of the published scorer), browser, similarity, clip_model; a stage
                    refuses a flag that is not in TAKES. Set by the stages: images (a folder for screenshots), rows_in
                    (the folder to which paths in rows are relative), device
about               {name: value} for metrics.json: which scorer, which similarity (default: {})
async rule_reply(task, history, rng)    what the rule-based simulator says
async simulator_chat(task, history)     the messages for a simulating model
async tool_reply(task, history)         what the environment itself answers; None (the default): the simulator's turn
async score(pairs, explain=False)       for each (task, answer) {"reward": in [0, 1], …}, which 02 and 05 write into
                    rows. explain (05): also "failed", the first failed tests as short texts: [{"call", "expected",
                    "got" (None: no value), "said" (None: nothing)}, …]. With `compat` the published scorer's keys, and
                    no reward
async show(documents)   {document: image file, or None if there is none}; needed only with `views`
"""
import hashlib
import pathlib
import random

from colbench.schema import label, nullable, record


class ColBenchError(Exception):
    """Bad input, or something missing on this machine: one line that says where, what and how to fix it."""


def beside(name):
    """The text of a file of this folder, without its last newline."""
    path = pathlib.Path(__file__).parent / name
    return path.read_text("utf-8").removesuffix("\n")


SPLITS = {"train": range(0, 80), "validation": range(80, 90), "test": range(90, 100)}


def in_split(task_id, split):
    """Whether a task belongs to a split, by its id (a hash of its content); "all": every task does."""
    return split == "all" or int(task_id, 16) % 100 in SPLITS[split]


def task_id(task):
    """The task's "task_id", or a hash of its content."""
    if task.get("task_id"):
        return task["task_id"]
    content = task["problem_description"] + "\n" + task["ground_truth"]
    return hashlib.sha256(content.encode(errors="backslashreplace")).hexdigest()[:16]


def check_keys(row, keys, where):
    """ColBenchError, which begins with `where`, unless `row` is a dict with all `keys`, {name: kind} (schema.py)."""
    check_kind(row, record(keys), where)


def check_kind(value, kind, where):
    """ColBenchError, which begins with `where`, unless `value` is of this kind (a function of schema.py)."""
    fault = kind(value)
    if fault:
        raise ColBenchError(f"{where}: {fault.removeprefix('is ')}")


def check_template(task, slots, where):
    """ColBenchError unless the "template" of a task, if it has one, is filled by fields with the names of `slots`."""
    try:
        task.get("template", "").format(**dict.fromkeys(slots, ""))
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ColBenchError(f'{where}: "template" cannot be filled ({error!r})') from None


def task_kind(needed, optional):
    """The kind (schema.py) of a domain's tasks: with what every task has, and these fields, {name: kind}."""
    return record({"problem_description": str, "ground_truth": str, **needed},
                  {"task_id": nullable(label), **optional})


ANY_TASK = task_kind({}, {"test_cases": dict, "databases": list, "facts": list, "slots": list})


def domain_of(task, where="task"):
    """The module of a task's domain; ColBenchError where no domain owns it, or several do."""
    check_kind(task, ANY_TASK, where)
    if own.owns(task):
        return own
    owners = [name for name, domain in DOMAINS.items() if domain.owns(task)]
    if not owners:
        names = ", ".join(DOMAINS)
        raise ColBenchError(f'{where}: missing "test_cases", or what a task of another domain has ({names})')
    if len(owners) > 1:
        raise ColBenchError(f"{where}: has what tasks of several domains have ({', '.join(owners)})")
    return DOMAINS[owners[0]]


MOST_DRAWS_IN_VAIN = 300            # of a family, one after the other, until it counts as used up


def make_tasks(domain, num_tasks, seed, split, told):
    """num_tasks template tasks without repeats. The families take turns; one that has no more is left out."""
    rng, tasks = random.Random(seed), {}

    def accept(name):
        if not in_split(name, split):
            return "of another split"
        return "repeated" if name in tasks else None

    families = sorted(domain.FAMILIES)
    misses = dict.fromkeys(families, 0)
    while len(tasks) < num_tasks:
        if not families:
            raise ColBenchError(f"--num-tasks {num_tasks}: there are only {len(tasks)} different tasks "
                                f"(--split {split})")
        family = families[len(tasks) % len(families)]
        task = domain.make_task(rng, family, told, accept)
        if isinstance(task, dict):
            tasks[task["task_id"]] = task
            misses[family] = 0
            continue
        misses[family] += 1
        if misses[family] == MOST_DRAWS_IN_VAIN:
            families.remove(family)
    return list(tasks.values())


from colbench import backend, frontend, own, sql  # noqa: E402  they need the names above

DOMAINS = {"backend": backend, "frontend": frontend, "sql": sql}
