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

A domain is a plain module, listed in DOMAINS. A task is a dict with "problem_description" (the vague request),
"ground_truth" (the reference solution c) and what the domain adds. A history is a list of turns {"role": "user" |
"assistant", "content": str} that begins with the request. A trajectory is {"task", "dialogue_history", "answer",
"reward", …}. A new domain is one file with these names, and one line in DOMAINS:

NOUN                  what the human needs, as prompts and errors call it ("function")
AGENT_SYSTEM          the agent's system prompt; "{max_rounds}" stands for the number of rounds
JUDGE                 prompt for a model that compares two turns ({ground_truth}, {dialogue}, {a}, {b}); None: no judge
REPLY_CHARS           a reply of the human is cut here
REPLY_TOKENS          what a model that plays the human may write
PERSON_SEES           whether a model that plays the human is shown images
MIN_GAP               two trajectories whose returns differ by so much make a pair; None: success against the rest
FAMILIES              names of the template families
ORACLES               names of the critics without errors, for `oracle_scores`; may be empty
PLAYERS               may be left out: {name: turn} of further scripted agents for 02 --agent, called as scripted_turn
COLUMNS               [(key of `measure`, heading, format), …] of the table of 05
SCORE_KEYS            what World.score writes into rows: 05 removes what an earlier evaluation wrote

owns(task)            whether a task is of this domain (published files name none: told by the fields)
check_task(task, where)                 ColBenchError, which begins with `where`, for a task that lacks a field, or
                      has one that this domain reads and that is of another type (schema.py)
make_task(rng, family, told, accept)    a task with "task_id" (a hexadecimal hash) and "family", or the reason (str) why
                      this draw gave none; accept(task_id) -> such a reason, or None
check_data(tasks, unsafe_scorer)        for 01 --check: for each task {"findings": {what: detail}, "num_tests",
                      "constant": share of the tests that the best constant answer passes}; None: nothing to check
num_hidden(task)      how many facts the agent has to find out, of a template task
lacks(task, player)   the field that "rules", "script" or an oracle needs and the task has not; None: it can be played
answer_of(history, is_last)             the answer after the agent's turn that ends `history`; None: it goes on
answer_message(task)  the agent's turn that gives the reference as its answer
shown(message)        what stands in the dialogue of an agent's message (its thoughts are gone already)
scripted_turn(task, history, max_rounds, informed, rng)     what the noisy scripted agent says next
leak_of(task, reply)  how a reply of the human shows the reference ("code", …); None: it does not
turn_kind(task, history, message)       what an agent's turn is worth ("needed", "idle", …); None: the task does not say
all_known(task, history)                whether everything that matters is known; asked only where turn_kind answers
facts(task, history)  what the agent has to find out: [(text, whether it is known after `history`)], the texts in the
                      same order whatever the history; None: the task does not say
turn_kinds(task, history), facts_by_turn(task, history)     may be left out: turn_kind of each agent turn of a history,
                      and the numbers in `facts` of those known after 0, 1, … all turns, where facts are stated; both
                      in a time that is linear in the turns
oracle_scores(oracle, task, history, messages)              a score for each of several messages
views(task, history, privileged)        what a critic that sees is shown of the agent's turn that ends `history`:
                                        [(caption, document or None for a black image), …]; None in place of the
                                        function: such a critic has nothing to see
metric(trajectories)  name of the mean return in metrics.json
outcome(trajectory)   what is averaged under that name
measure(trajectories) further columns, a dict: the keys of COLUMNS and what belongs into metrics.json; "notes": a list
                      of what a reader must know (05 prints it below the table). Not in it, but keys for COLUMNS:
                      "all_known", "success_when_known" and "success_when_not_known", which follow from all_known

class World(images, rows_in, unsafe_scorer=False, compat=False, browser=None, similarity=None, clip_model=None,
            device="cpu")
    A context manager that holds what the domain needs to run: scorer, browser, … `images`: folder for screenshots,
    `rows_in`: folder that paths in rows are relative to. compat: verdicts of the published scorer. It names what it
    needs of these and takes the rest as **unused; a flag of a stage for an argument that is not named is an error.
    about                                   {name: value} for metrics.json: which scorer, which similarity
    async tool_reply(task, history)         what the environment itself answers; None: it is the human's turn
    async rule_reply(task, history, rng)    what the rule-based human says
    async person_chat(task, history)        the messages for a model that plays the human
    async score(pairs, explain=False)       for each (task, answer) {"reward": in [0, 1], …}, which 02 and 05 write;
                                            `explain` (05): also "failed", if any test is: the first ones as short
                                            texts [{"call", "expected", "got" (None: no value), "said" (None:
                                            nothing)}, …]
    async show(documents)                   {document: image file, or None where there is none} for `views`
"""
import hashlib
import pathlib
import string

from colbench.schema import label, nullable, record, scalar


class ColBenchError(Exception):
    """Bad input, or something missing on this machine: one line that says where, what and how to mend it."""


def beside(name):
    """The text of a file of this folder, without its last newline."""
    return (pathlib.Path(__file__).parent / name).read_text("utf-8").removesuffix("\n")


SPLITS = {"train": range(0, 80), "validation": range(80, 90), "test": range(90, 100)}


def in_split(task_id, split):
    """Whether a task belongs to a split, by its id (a hash of its content); "all": every task does."""
    return split == "all" or int(task_id, 16) % 100 in SPLITS[split]


def task_id(task):
    """The task's "task_id", or a hash of its content."""
    content = task["problem_description"] + "\n" + task["ground_truth"]
    return task.get("task_id") or hashlib.sha256(content.encode(errors="backslashreplace")).hexdigest()[:16]


def check_keys(row, keys, where):
    """ColBenchError, which begins with `where`, unless `row` is a dict with all `keys`, {name: kind} (schema.py)."""
    check_kind(row, record(keys), where)


def check_kind(value, kind, where):
    """ColBenchError, which begins with `where`, unless `value` is of this kind (a function of schema.py)."""
    if fault := kind(value):
        raise ColBenchError(f"{where}: {fault.removeprefix('is ')}")


def check_template(task, slots, where):
    """ColBenchError unless the fields of a task's "template" are names of `slots`: str.format would fail, or do what a
    format can do beyond that ("{a:999999999}", "{a.__class__}")."""
    try:
        fields = list(string.Formatter().parse(task["template"]))
    except ValueError as error:
        raise ColBenchError(f'{where}: "template" cannot be filled ({error})') from None
    for _, field, form, conversion in fields:
        if field is not None and (field not in slots or form or conversion):
            raise ColBenchError(f'{where}: "template" has the field {field[:80]!r}, which no fact fills as it is')


# What every task has, and what several domains read of it
TASK_KEYS = {"problem_description": str, "ground_truth": str}
MORE_KEYS = {"task_id": nullable(label), "family": scalar, "seen": bool}
ANY_TASK = record(TASK_KEYS, {"test_cases": dict, "databases": list, "facts": list, "slots": list})


def domain_of(task, where="task"):
    """The module of a task's domain; ColBenchError where no domain owns it."""
    check_kind(task, ANY_TASK, where)
    for domain in reversed(DOMAINS.values()):
        if domain.owns(task):
            return domain
    raise ColBenchError(f'{where}: missing "test_cases", or what a task of another domain has ({", ".join(DOMAINS)})')


from colbench import backend, frontend, sql  # noqa: E402  they need the names above

DOMAINS = {"backend": backend, "frontend": frontend, "sql": sql}
