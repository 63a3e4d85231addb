"""A domain of ColBench is a kind of tasks, such as Python functions: a subclass of Domain, with a subclass of
Environment for what it runs. tests/toy_domain.py is a small one. colbench/__init__.py lists them all.

In the comments and docstrings:

task        a dict with "problem_description" (the vague request), "ground_truth" (the solution c) and the domain's own
            fields
history     a list of turns {"role": "user" | "assistant", "content": str}; the first turn is the request
trajectory  {"task", "dialogue_history", "answer", "reward", …}
simulator   the user simulator: rules or a model
"""
import functools
import hashlib
import pathlib

from colbench.schema import check_keys, InputError, label, nullable, number, record


class Environment:
    """The programs of a domain (a scorer, a browser), as a context manager."""

    # Names of the constructor's arguments, each with a default. Flags of the stages: unsafe_scorer, compat (verdicts of
    # the published scorer), browser, similarity, clip_model; a stage refuses a flag that is not in TAKES. Set by the
    # stages: images (a folder for screenshots), rows_in (the folder to which paths in rows are relative), device
    TAKES = ()
    about = {}                      # {name: value} for metrics.json: which scorer, which similarity

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    async def rule_reply(self, task, history, rng):
        """The rule-based simulator's reply."""
        raise InputError(f"{type(self).__name__} has no rule-based user simulator (rule_reply)")

    async def simulator_chat(self, task, history):
        """The messages for a simulator model."""
        raise InputError(f"{type(self).__name__} has no chat for a simulator model (simulator_chat)")

    async def tool_reply(self, task, history):
        """The environment's own answer; None: it is the simulator's turn."""
        return None

    async def verdicts(self, pairs, explain):
        """For each (task, answer) {"reward": in [-1, 1], …}, which 02 and 05 write into rows.

        explain (05): also "failed", the first failed tests as short texts: [{"call", "expected", "got" (None: no
        value), "said" (None: nothing)}, …]. With `compat` the published scorer's keys, and no reward."""
        raise InputError(f"{type(self).__name__} scores no answers (verdicts)")

    async def score(self, pairs, explain=False):
        """verdicts(), with the rewards checked. The stages call this method."""
        verdicts = await self.verdicts(pairs, explain)
        for verdict in verdicts:
            if "reward" in verdict:
                check_keys(verdict, {"reward": REWARD}, f"{type(self).__name__}.verdicts")
        return verdicts

    async def show(self, documents):
        """{document: image file, or None if there is none}; needed only with Domain.views."""
        raise InputError(f"{type(self).__name__} shows nothing (show)")


class Domain:
    """A kind of tasks. A subclass must define the names in REQUIRED; all others have defaults."""

    NOUN = None                     # what the user needs, in prompts and errors ("function")
    FAMILIES = None                 # names of the template families
    AGENT_SYSTEM = None             # the agent's system prompt; "{max_rounds}" stands for the number of rounds
    # What stands before a dialogue that a critic reads, with NOUN and the solution filled in
    SOLUTION_TEXT = "The {noun} that this person needs is the following.\n{c}\nThe dialogue with the person:\n"
    Environment = None              # a subclass of Environment, above

    def owns(self, task):
        """True if a task is of this domain, by its fields. No task may be of two domains."""

    def check_task(self, task, where):
        """Raises InputError, which starts with `where`, if a field is missing or has the wrong type (schema.py)."""

    def make_task(self, rng, family, told, accept):
        """A task with "task_id" (hexadecimal, as from the function task_id) and "family", or a str, the reason the draw
        was rejected.

        told: the facts that the request states, "none", "some" or "all".
        accept(task_id) returns None, or the reason to reject the task."""

    def answer_of(self, history, is_last):
        """The answer in the agent's turn that ends `history`; None: the dialogue continues. In the last round (is_last)
        it is a str."""

    # Whether an agent can answer before the last round; not with pages, because every page is a possible answer
    ANSWERS_EARLY = True

    # --- scores of dialogues

    # Two trajectories make a pair if their returns differ by at least this much. With a number, returns are graded: 05
    # shows wins and ties, 04 --method rft takes the best of each task. None: a success and a failure make a pair
    MIN_RETURN_GAP = None
    SCORE_KEYS = ("reward",)        # the keys that Environment.score writes into rows; 05 removes old ones
    # Further columns of 05's table: (key of `measure`, heading, format). The keys "all_known", "success_when_known" and
    # "success_when_not_known" are computed from all_known
    COLUMNS = ()
    MEANINGS = {}                   # what these columns mean, for 05's report: {heading: text}

    def eval_score(self, trajectory):
        """The value that is averaged."""
        return trajectory["reward"] == 1

    def metric(self, trajectories):
        """The name of that mean in metrics.json."""
        return "success_rate"

    def measure(self, trajectories):
        """A dict of further metrics; "notes" in it is a list of lines that 05 prints."""
        return {}

    # --- the dialogue

    REPLY_CHARS = 400               # most characters in a simulator's reply
    REPLY_TOKENS = 128              # most tokens that a simulator model may generate for a reply
    SIMULATOR_SEES = False          # whether a simulator model is shown images
    # Scripted agents for 02 --agent: {name: turn}. turn(task, history, max_rounds, rng) returns the agent's next
    # message. Names begin with "script"
    PLAYERS = {}
    # The prompt for a model that compares two turns, with {ground_truth}, {dialogue}, {a} and {b}. None: no model can
    JUDGE = None
    # leak_of(task, reply): how a reply of the simulator shows the solution ("code", …), None if it does not. None:
    # leaks cannot be detected
    leak_of = None
    # views(task, history, sees_c): what a visual critic sees after the agent's turn that ends `history`, a list of
    # (caption, document, or None for a black image). None: tasks have no rendered view
    views = None

    def agent_system(self, max_rounds):
        """The agent's system prompt for dialogues of max_rounds rounds. Other braces in it are kept."""
        return self.AGENT_SYSTEM.replace("{max_rounds}", str(max_rounds))

    def shown(self, message):
        """The part of an agent's message that is kept in the dialogue."""
        return message

    def answer_message(self, task):
        """The agent's turn that gives the solution as its answer."""
        return task["ground_truth"]

    def lacks(self, task, player):
        """The field that a task lacks for "rules" (the simulator) or "script" (a scripted agent), or None."""
        return None

    # --- the data check of 01

    # check_data(tasks, unsafe_scorer), for 01 --check: for each task {"findings": {what: detail}, "num_tests",
    # "constant": the share of tests that the best constant answer passes}. None: there is nothing to check
    check_data = None

    def doubt_of(self, task):
        """Reason why right answers to a task may be graded wrong, or None."""
        return None

    # --- the facts that the agent has to find out (None: the task does not say)

    def facts(self, task, history):
        """[(text, whether it is known after `history`)], in an order that does not depend on `history`."""
        return None

    def turn_kind(self, task, history, message):
        """The kind of an agent's turn after `history` ("needed", "idle", …)."""
        return None

    def all_known(self, task, history):
        """Whether all facts are known. Called only if turn_kind is not None."""
        facts = self.facts(task, history)
        return None if facts is None else all(is_known for _, is_known in facts)


REQUIRED = "NOUN", "FAMILIES", "AGENT_SYSTEM", "Environment", "owns", "check_task", "make_task", "answer_of"
REWARD = number(-1.001, 1.001)                                      # a cosine is rounded


@functools.cache
def check_domain(domain):
    """Raises InputError that lists names which a domain must define and does not."""
    missing = [name for name in REQUIRED if getattr(type(domain), name) is getattr(Domain, name)]
    if missing:
        raise InputError(f"the domain {type(domain).__name__} must define {', '.join(missing)} (colbench/domain.py)")


# ---------------------------------------------------------------------------------------------------------------------
# for the modules of domains

def beside(name):
    """The text of a file of this folder, without its last newline."""
    path = pathlib.Path(__file__).parent / name
    return path.read_text("utf-8").removesuffix("\n")


def task_id(task):
    """The task's "task_id", or a hash of its content."""
    if task.get("task_id"):
        return task["task_id"]
    content = task["problem_description"] + "\n" + task["ground_truth"]
    return hashlib.sha256(content.encode(errors="backslashreplace")).hexdigest()[:16]


def check_template(task, slots, where):
    """Raises InputError if a task has a "template" that fields with the names of `slots` do not fill."""
    try:
        task.get("template", "").format(**dict.fromkeys(slots, ""))
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise InputError(f'{where}: "template" cannot be filled ({error!r})') from None


def task_kind(needed, optional):
    """The kind (schema.py) of a domain's tasks: the common fields of all tasks and these fields, {name: kind}."""
    return record({"problem_description": str, "ground_truth": str, **needed},
                  {"task_id": nullable(label), **optional})
