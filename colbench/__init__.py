"""ColBench: tasks that an agent can only solve together with a human. This folder imports nothing of the repository
but itself, so that it can be copied alone. It needs no package, unless pages are drawn and compared.

In ten lines: a task, a question to the rule-based human, and two answers scored by the confined scorer:

    import asyncio, random
    from colbench import backend as domain
    rng = random.Random(0)
    task = domain.make_task(rng, "grade", "none", lambda task_id: None)     # a str: why this draw gave none
    history = [{"role": "user", "content": task["problem_description"]}]
    with domain.World() as world:
        history.append({"role": "assistant", "content": "What should the pass mark be?"})
        print(asyncio.run(world.rule_reply(task, history, rng)))
        for code in (task["ground_truth"], "def grade(score): return 'good'"):
            print(asyncio.run(world.score([(task, code)]))[0]["reward"])

A new domain is one file, its name in the import and its line in DOMAINS, both at the end of this file. The file begins
with `from colbench.defaults import *`, which says of most names below that the domain has no such thing; it defines
those that it needs.

A task is a dict with "problem_description" (the vague request), "ground_truth" (the reference solution c) and what the
domain adds. A history is a list of turns {"role": "user" | "assistant", "content": str} that begins with the request. A
trajectory is {"task", "dialogue_history", "answer", "reward", …}. The human is "simulator" in flags and rows (the
paper's word), and "person" in prompts and in some names below.

Names that every domain defines
-------------------------------
NOUN                what the human needs, as prompts and errors call it ("function")
FAMILIES            names of the template families
AGENT_SYSTEM        the agent's system prompt; "{max_rounds}" stands for the number of rounds
owns(task)          whether a task is of this domain, told by its fields; no task is of two domains
check_task(task, where)     ColBenchError, which begins with `where`, for a task that lacks a field, or has one that
                    this domain reads and that is of another type (schema.py)
make_task(rng, family, told, accept)    a task with "task_id" (a hexadecimal hash) and "family"; or the reason (str)
                    why this draw gave none. accept(task_id) is None, or such a reason. told: "none", "some", "all"
answer_of(history, is_last)     the answer in the agent's turn that ends `history`; None: the dialogue goes on. In the
                    last round (is_last) it is a text
World               a context manager that holds what the domain needs to run (a scorer, a browser …): see below
  async rule_reply(task, history, rng)      what the rule-based human says
  async person_chat(task, history)          the messages for a model that plays the human
  async score(pairs, explain=False)         for each (task, answer) {"reward": in [0, 1], …}, which 02 and 05 write.
                    explain (05): also "failed", where a test is: the first failed tests as short texts, [{"call",
                    "expected", "got" (None: no value), "said" (None: nothing)}, …]. A World that is `compat` gives
                    the published scorer's keys, and no reward

Names with a default: what a dialogue is worth
----------------------------------------------
outcome(trajectory)     what is averaged (default: whether the reward is 1)
metric(trajectories)    the name of that mean in metrics.json ("success_rate")
measure(trajectories)   further metrics, a dict; "notes": a list of what a reader must know, which 05 prints ({})
COLUMNS             (key of `measure`, heading, format) of each further column of 05's table. "all_known",
                    "success_when_known" and "success_when_not_known" follow from all_known, not from `measure` (())
MIN_GAP             two trajectories whose returns differ by so much make a pair. Returns are then graded: 05 shows wins
                    and ties, 04 --method rft takes the best of each task. None: success against the rest (None)
SCORE_KEYS          what World.score writes into rows: 05 removes what an earlier evaluation wrote (("reward",))

Names with a default: how it is played
--------------------------------------
shown(message)      what stands in the dialogue of an agent's message, whose thoughts are gone already (the message)
answer_message(task)    the agent's turn that gives the reference as its answer (the reference)
REPLY_CHARS, REPLY_TOKENS   where a reply of the human is cut; what a model that plays the human may write (400, 128)
PERSON_SEES         whether a model that plays the human is shown images (False)
PLAYERS             scripted agents for 02 --agent: {name: turn}. turn(task, history, max_rounds, rng) is what the
                    agent says next. Their names begin with "script" ({})
lacks(task, player)     the field that the task lacks for a player: "rules" (the rule-based human), "script" (a scripted
                    agent) or an oracle; None: it can be played (None)
leak_of(task, reply)    how a reply of the human shows the reference ("code", …); None: it does not (None)
JUDGE               prompt for a model that compares two turns ({ground_truth}, {dialogue}, {a}, {b}); None: no judge
views(task, history, privileged)    what a critic that sees is shown of the agent's turn that ends `history`:
                    [(caption, document or None for a black image), …]. None in place of the function: nothing to see
check_data(tasks, unsafe_scorer)    for 01 --check: for each task {"findings": {what: detail}, "num_tests", "constant":
                    share of the tests that the best constant answer passes}. None in its place: nothing to check

Names with a default: what the agent has to find out. By default the task does not say, and each is None
--------------------------------------------------------------------------------------------------------
facts(task, history)    [(text, whether it is known after `history`)]: the texts in one order, whatever the history
turn_kind(task, history, message)   what an agent's turn is worth after `history` ("needed", "idle", …)
all_known(task, history)    whether everything that matters is known; asked only where turn_kind answers
facts_by_turn(task, history)    the numbers in `facts` of those that are known after 0, 1, … all turns
turn_kinds(task, history)   turn_kind of each agent turn of a history. These two answer in one pass what the functions
                    above say of one turn after the other; None in their place: those are asked
ORACLES             names of critics that know the task. An answer is right for them if it is the reference's text (())
oracle_scores(oracle, task, history, messages)      a score for each of several messages. Only with ORACLES; no default

World, with defaults in defaults.World
--------------------------------------
TAKES               the arguments that it takes, by name, each with a default (()):
                    unsafe_scorer, compat (verdicts of the published scorer), browser, similarity, clip_model: flags of
                    the stages; a stage refuses a flag that this World does not take.
                    images (a folder for screenshots), rows_in (the folder that paths in rows are relative to), device
about               {name: value} for metrics.json: which scorer, which similarity ({})
async tool_reply(task, history)     what the environment itself answers; None: it is the human's turn (None)
async show(documents)   {document: image file, or None where there is none}. Only with `views`; no default
"""
import hashlib
import pathlib

from colbench.schema import label, nullable, record, scalar


class ColBenchError(Exception):
    """Bad input, or something missing on this machine: one line that says where, what and how to mend it."""


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


# What every task has, and what several domains read of it
TASK_KEYS = {"problem_description": str, "ground_truth": str}
MORE_KEYS = {"task_id": nullable(label), "family": scalar, "seen": bool}
ANY_TASK = record(TASK_KEYS, {"test_cases": dict, "databases": list, "facts": list, "slots": list})


def domain_of(task, where="task"):
    """The module of a task's domain; ColBenchError where no domain owns it, or several do."""
    check_kind(task, ANY_TASK, where)
    owners = [name for name, domain in DOMAINS.items() if domain.owns(task)]
    if not owners:
        names = ", ".join(DOMAINS)
        raise ColBenchError(f'{where}: missing "test_cases", or what a task of another domain has ({names})')
    if len(owners) > 1:
        raise ColBenchError(f"{where}: has what tasks of several domains have ({', '.join(owners)})")
    return DOMAINS[owners[0]]


from colbench import backend, frontend, sql  # noqa: E402  they need the names above

DOMAINS = {"backend": backend, "frontend": frontend, "sql": sql}
