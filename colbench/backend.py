"""Python functions (ColBench's backend): template tasks, the rule-based user simulator, kinds of turns, scores.

A template task is a vague request with a signature, a function that solves it and 10 test calls. "facts" has
what the request leaves out: facts that matter (each is a value in the solution) and plausible ones that do not. The
user opens with the request and answers questions in at most 400 characters; the text after "I WANT TO ANSWER:" is the
answer. dialogue.py has the code shared by functions and queries.
"""
import hashlib
import json
import re
import string

from colbench import dialogue
from colbench.dialogue import answer_kind, asking_kind, FactDomain, mean, needed_facts, OPENERS, put, topics_asked
from colbench.domain import beside, task_id, task_kind
from colbench.schema import list_of, table_of
from colbench.scorer import check_with_two_scorers, NOT_GRADEABLE, reward_of

# ---------------------------------------------------------------------------------------------------------------------
# template tasks: what a request can leave out (functions.json)

FUNCTIONS = json.loads(beside("functions.json"))
FAMILIES = FUNCTIONS["families"]
NUM_TESTS = 10


def fact_of(kind, noun, values=()):
    """A fact of a family: {"topic", "questions", "options": [(how it stands in the code, what the user says, …)]}.

    values: of $value in the options, or names of ranges in functions.json."""
    if isinstance(values, str):
        values = [value for name in values.split() for value in FUNCTIONS["ranges"][name]]
    words = {"noun": noun, "Noun": noun.capitalize(), "last": noun.split()[-1]}
    fact = FUNCTIONS["kinds"][kind]
    options = []
    for option in fact["options"]:
        for value in values if "$value" in option[0] else [None]:
            options.append(put(option, {**words, "value": value}))
    return {"topic": put(fact["topic"], words), "questions": put(fact["questions"], words), "options": options}


# ---------------------------------------------------------------------------------------------------------------------
# template tasks: arguments of test calls, as source text; values: the numbers of the task

def integer(rng, values, low, high):
    """An integer, sometimes at or beside a value of the task."""
    near = [value + step for value in values if low <= value <= high for step in (-1, 0, 1)]
    if near and rng.random() < 0.5:
        return str(rng.choice(near))
    return str(rng.randint(low, high))


def number_list(rng, values, low, high):
    numbers = [integer(rng, values, low, high) for _ in range(rng.randint(3, 7))]
    return f"[{', '.join(numbers)}]"


def price_and_count(rng, values):
    if rng.random() < 0.4:
        return f"{rng.choice(values)}, {rng.choice((1, 1, 1, 2, 3))}"
    return f"{integer(rng, values, 5, 100)}, {rng.randint(1, 9)}"


def points_and_lives(rng, values):
    return f"{rng.randint(0, 99)}, {rng.choice((0, 1, 2, 3))}"


def random_words(rng, num_words, low, high):
    """Words of `low` to `high` letters."""
    words = []
    for _ in range(num_words):
        words.append("".join(rng.choice(string.ascii_letters) for _ in range(rng.randint(low, high))))
    return words


def word_list(rng, values):
    return repr(random_words(rng, rng.randint(3, 9), 2, 9))


def two_words(rng, values):
    return ", ".join(map(repr, random_words(rng, 2, 3, 14)))


def sentence(rng, values):
    words = random_words(rng, rng.randint(3, 14), 1, 10)
    repeated = words[:rng.randint(0, 2)]
    return repr(" ".join(words + repeated))


ARGUMENTS = {"integers": integer, "number list": number_list, "price and count": price_and_count,
             "points and lives": points_and_lives, "word list": word_list, "two words": two_words,
             "sentence": sentence}


# ---------------------------------------------------------------------------------------------------------------------
# template tasks: how a task is drawn

def run_solution(code, calls):
    """The results of compiled calls as text. Only for solutions that this file made: it runs them in this process."""
    namespace = {}
    exec(code, namespace)
    return [repr(eval(call, namespace)) for call in calls]


def draw_calls(rng, name, values):
    """NUM_TESTS different calls of a family's function."""
    kind, *bounds = FAMILIES[name]["arguments"]
    calls = []
    while len(calls) < NUM_TESTS:
        call = f"{name}({ARGUMENTS[kind](rng, values, *bounds)})"
        if call not in calls:
            calls.append(call)
    return calls


def needed_fact(slot, fact, code, replies):
    """A fact of a task: that of a family, with the value that was drawn for it."""
    codes = {other for other, *_ in fact["options"]}
    guesses = [code, *sorted(codes - {code})]
    return {"topic": fact["topic"], "matters": True, "told": False, "slot": slot, "code": code, "guesses": guesses,
            "questions": fact["questions"], "replies": replies}


def has_proof(fact, template, codes, calls):
    """Whether every other value of a fact changes the result of some call."""
    results = run_solution(template.format(**codes), calls)
    for guess in fact["guesses"][1:]:
        changed = codes | {fact["slot"]: guess}
        if run_solution(template.format(**changed), calls) == results:
            return False
    return True


# ---------------------------------------------------------------------------------------------------------------------
# the scripted agent

class Script(dialogue.ScriptedAgent):
    VAGUE = ("Can you tell me more?", "What else should I know?", "Could you describe the function?")
    RATES, INFORMED_RATES = (0.03, 0.06, 0.14, 0.37), (0.01, 0.03, 0.04, 0.10)

    def ask(self, fact, history, rng, is_new):
        opener = rng.choice(OPENERS) if len(history) > 1 else ""
        return opener + rng.choice(fact["questions"])

    def useless(self, task, known, history, rng):
        facts = task["facts"]
        idle = [index for index, fact in enumerate(facts) if index not in known and not fact["matters"]]
        index = rng.choice(idle or sorted(known) or needed_facts(task))
        return self.ask(facts[index], history, rng, is_new=False)


# ---------------------------------------------------------------------------------------------------------------------
# the domain

class FunctionEnvironment(dialogue.FactEnvironment):
    VERDICTS = "tests"
    SIMULATOR_SYSTEM = beside("prompts/backend_simulator.txt")



class Backend(FactDomain):
    """Tasks with tests."""

    NOUN = "function"
    COLUMNS = (("tests_passed", "tests", ".3f"), ("all_known", "all known", ".3f"),
               ("success_when_known", "when known", ".3f"), ("success_rate_compat", "published: success", ".3f"),
               ("tests_passed_compat", "published: tests", ".3f"))
    MEANINGS = {"tests": "mean share of the tests passed", **FactDomain.MEANINGS,
                "published: success": "success by the published scorer's rules",
                "published: tests": "mean share of the tests passed by the published scorer's rules"}
    SCORE_KEYS = "reward", "tests", "faults", "tests_compat", "ends_evaluation"
    AGENT_SYSTEM = beside("prompts/backend_agent.txt")
    JUDGE = beside("prompts/backend_judge.txt")
    FAMILIES = list(FAMILIES)
    TASK = staticmethod(
        task_kind({"test_cases": table_of(str)}, {"template": str, "facts": list_of(dialogue.fact_kind)}))
    SCRIPT = Script
    Environment = FunctionEnvironment

    def owns(self, task):
        """A task with tests. A page (frontend.py) may have the field, but no test in it."""
        if "test_cases" not in task:
            return False
        return len(task["test_cases"]) > 0 or not task["ground_truth"].lstrip().startswith("<")

    def check_data(self, tasks, unsafe_scorer):
        return check_with_two_scorers(tasks, unsafe_scorer)

    def make_task(self, rng, name, told, accept):
        """Rejects a draw if accept() gives a reason, or if the tests do not prove every fact."""
        family = FAMILIES[name]
        slots = {slot: fact_of(*given) for slot, given in family["facts"].items()}
        drawn = {slot: rng.choice(fact["options"]) for slot, fact in slots.items()}
        codes = {slot: code for slot, (code, *_) in drawn.items()}
        solution = family["code"].format(**codes)
        task_id = hashlib.sha256(solution.encode()).hexdigest()[:16]
        if reason := accept(task_id):
            return reason

        values = [int(code) for code in codes.values() if code.isdigit()]
        calls = draw_calls(rng, name, values or [1])
        compiled = [compile(call, "<call>", "eval") for call in calls]
        facts = [needed_fact(slot, slots[slot], code, replies) for slot, (code, *replies) in drawn.items()]
        for fact in facts:
            if not has_proof(fact, family["code"], codes, compiled):
                return "a fact without proof"
        for noun in family["idle"] + FUNCTIONS["idle"]:
            facts.append(put(FUNCTIONS["idle fact"], {"noun": noun}))
        rng.shuffle(facts)

        states_one = rng.random() < 0.3                             # drawn even if `told` does not need it
        to_tell = [fact for fact in facts if fact["matters"]]
        one_or_none = to_tell[:1] if states_one else []
        told_facts = {"none": [], "some": one_or_none, "all": to_tell}[told]
        opening = rng.choice(FUNCTIONS["openings"])
        hints = []
        for fact in told_facts:
            fact["told"] = True
            hints.append(" " + rng.choice(fact["replies"]))
        request = opening.format(rng.choice(family["requests"]))
        signature = solution.splitlines()[0]
        return {
            "task_id": task_id,
            "problem_description": "".join([request, *hints, "\n", signature]),
            "ground_truth": solution,
            "test_cases": {f"test{number}": call for number, call in enumerate(calls, 1)},
            "family": name,
            "template": family["code"],
            "facts": facts,
        }

    def answer_of(self, history, is_last):
        """The text after the marker.

        The whole turn is the answer if nothing follows the marker, if code precedes it and a remark follows ("the
        function above"), if the marker is in a comment of the code, and in the last round without a marker."""
        content = history[-1]["content"]
        before, marker, after = content.partition(self.MARKER)
        if not marker:
            return content if is_last else None
        is_in_comment = "#" in re.split(r"[\w\n]", before)[-1]
        is_before = "def " in before and not re.search(r"\b(?:def|lambda|import)\b|=", after)
        if is_in_comment or is_before or not after.strip():
            return content
        return after.strip("\n")

    def learned(self, task, message, reply):
        """The agent learns what it asks about and the user answers."""
        return dialogue.facts_answered(task["facts"], message, reply)

    def kind_of(self, task, known, history, message):
        """Kinds: "needed" (asks for a fact that matters and is not known), "repeat" (known already), "idle" (does not
        matter), "vague" (no topic), "right answer" (the solution's text), "wrong answer" (another text, which may pass
        all tests; all that matters was known), "early answer" (another text; it was not all known)."""
        answer = self.answer_of([{"content": message}], False)
        if answer is not None:
            return answer_kind(task, known, answer.strip() == task["ground_truth"].strip())
        return asking_kind(task, known, topics_asked(task["facts"], message))

    def text_of(self, fact):
        """The user's first reply about it."""
        return (fact.get("replies") or [fact["topic"]])[0]

    def measure(self, trajectories):
        """The docstring of 05_evaluate.py explains the columns."""
        not_gradeable = set()                                       # (task, number of a test)
        for trajectory in trajectories:
            for number, fault in enumerate(trajectory["faults"]):
                if (fault or "").startswith(NOT_GRADEABLE):
                    not_gradeable.add((task_id(trajectory["task"]), number))
        metrics = {"tests_passed": mean([trajectory["reward"] for trajectory in trajectories]),
                   **super().measure(trajectories)}
        if not_gradeable:
            num_tasks = len(dict(not_gradeable))
            metrics["notes"] = [f"{len(not_gradeable)} tests of {num_tasks} tasks cannot be graded (the solution "
                                "raises, is random, or returns what cannot be compared, or the test asks the answer "
                                "nothing); no answer passes them"]
        if all("tests_compat" in trajectory for trajectory in trajectories):
            rewards = [reward_of(trajectory["tests_compat"]) for trajectory in trajectories]
            metrics["success_rate_compat"] = mean([reward == 1 for reward in rewards])
            metrics["tests_passed_compat"] = mean(rewards)
            metrics["ends_evaluation"] = sum(trajectory["ends_evaluation"] for trajectory in trajectories)
        return metrics
