"""The scorer: (task, answer) -> verdicts. The code runs in sandbox.py, the values are compared here."""
import concurrent.futures
import contextlib
import json
import logging
import os
import queue
import re
import threading
from collections import Counter, namedtuple

from colbench import ColBenchError, task_id
from colbench.questions import equal_values, functions_under_test, holds, Names, question_of  # noqa: F401
from colbench.sandbox import ANSWER_TIME_LIMIT, LayerError, Sandbox
from colbench.values import readable

log = logging.getLogger(__name__)

OTHER_VALUE = "another value"
ASKS_NOTHING = "it asks the answer nothing"
MAX_FAILED, MAX_CHARS = 3, 300          # failed tests of an answer that a score shows, and characters of a text there

Score = namedtuple("Score", "tests gradeable faults failed")
Results = namedtuple("Results", "values imports tests")
LAYERS = {"namespaces": "namespaces, system call list (no files, network or processes of yours in reach)",
          "landlock": "Landlock, system call list (no files, network or processes of yours in reach)",
          "rlimits": "resource limits alone, as --unsafe-scorer asks: untrusted code can read and write your files"}


class Scorer:
    """Grades answers; a context manager that starts the child programs and names the layer of isolation.

        with Scorer() as scorer:
            scores = scorer.score([(task, answer), …])      # [Score, …] in the same order

    A Score has tests: a verdict a test, gradeable: whether the test can be graded at all, faults: why a test is not
    passed (None where it is), failed: the first MAX_FAILED tests that it does not pass, as short texts: [{"call",
    "expected", "got" (None: it gave no value), "said": what the scorer says (None: another value)}, …].
    docs/scorer.md says when a test passes. A reference is evaluated once a task (in two processes).

    compat=True gives the published scorer's verdicts instead (child.run_compat), behind the same walls.

    ColBenchError if the machine allows no isolation (layer None: the strongest that works). RuntimeError if a child
    cannot be used: that is neither pass nor fail."""

    def __init__(self, unsafe=False, time_limit_s=1.0, compat=False, layer=None, hash_seed=0, workers=None):
        self.time_limit_s, self.compat, self.hash_seed = time_limit_s, compat, hash_seed
        self.layers = [layer] if layer else ["rlimits"] if unsafe else ["namespaces", "landlock"]
        self.num_workers = workers or min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2)
        self.references, self.workers = {}, queue.SimpleQueue()

    def __enter__(self):
        self.stack = contextlib.ExitStack()
        reasons = []
        for layer in self.layers:
            try:
                with contextlib.ExitStack() as stack:
                    # References and answers run in children of their own: no answer inherits memory of a reference.
                    pairs = [[stack.enter_context(Sandbox(layer, self.hash_seed)) for _ in range(2)]
                             for _ in range(self.num_workers)]
                    for pair in pairs:
                        for child in pair:
                            child.greet()
                        self.workers.put(pair)
                    self.pool = stack.enter_context(started_threads(self.num_workers))
                    self.stack = stack.pop_all()
                self.layer = layer
                log.info(f"scorer: {LAYERS[layer]}")
                return self
            except LayerError as error:
                reasons.append(f"{layer}: {error}")
        raise ColBenchError("no isolation for untrusted code on this machine (" + "; ".join(reasons) + "); add "
                            "--unsafe-scorer to run it under resource limits alone")

    def __exit__(self, *exception):
        self.stack.close()

    def score(self, pairs):
        """Scores of (task, answer) pairs, in their order; tasks in parallel."""
        score_one, groups = self.score_published if self.compat else self.score_one, {}
        for index, (task, _) in enumerate(pairs):
            groups.setdefault((task["ground_truth"], *task["test_cases"].values()), []).append(index)
        found = [None] * len(pairs)

        def grade(children, key):
            for index in groups[key]:
                found[index] = score_one(children, key, pairs[index][1])

        self.for_each(grade, groups)
        return found

    def reference_results(self, tasks):
        """For each task what its tests give on the reference: ["ok", value], or ["error", why it cannot be graded]."""
        keys = [(task["ground_truth"], *task["test_cases"].values()) for task in tasks]
        self.for_each(lambda children, key: self.expected(children[0], key), dict.fromkeys(keys))
        return [self.references[key].values for key in keys]

    def for_each(self, work, keys):
        """work([child for references, child for answers], key) for all keys, in parallel."""
        def one(key):
            children = self.workers.get()
            try:
                work(children, key)
            finally:
                self.workers.put(children)

        list(self.pool.map(one, keys))

    def run(self, child, code, calls, imports=None):
        results = child.run(code, calls, self.time_limit_s, imports=imports)
        # It is wall time, and the machine may have been busy; but the limit of a whole answer is not met by a pause.
        if ["error", "time limit"] in results[0] and ["error", ANSWER_TIME_LIMIT] not in results[0]:
            results = child.run(code, calls, self.time_limit_s, imports=imports)
        return results

    def expected(self, child, key):
        if key not in self.references:
            reference, *calls = key
            self.references[key] = self.reference_of(child, reference, calls)
        return self.references[key]

    def reference_of(self, child, reference, calls):
        questions = [question_of(call) for call in calls]
        texts = [question.of_reference for question in questions]
        (first, names), (second, _) = (self.run(child, reference, texts) for _ in range(2))
        results = [a if a == b else ["error", "not the same value twice"] for a, b in zip(first, second)]
        imports = imports_for_answers(calls, names or [])
        names = names_of(imports)
        values = [question.value(result, names) for question, result in zip(questions, results)]
        tests = [Test(question, result[1], value) for question, result, value in zip(questions, results, values)]
        of_nobody = self.values_of_nobody(child, tests, imports)
        tests = [test.seen_with(of_nobody) for test in tests]
        return Results([test.value for test in tests], imports, tests)

    def values_of_nobody(self, child, tests, imports):
        """{expression: result of an empty answer} for all that does not certainly ask an answer something: tests, and
        sides of comparisons."""
        names, expressions = names_of(imports), []
        for test in tests:
            if test.value[0] == "ok":
                expressions += test.question.doubtful(test.on_reference, names)
        results = self.run(child, "", expressions, imports)[0] if expressions else []
        return dict(zip(expressions, results))

    def results(self, children, key, answer):
        """For each test (what the reference gives, what the answer gives, why it is not passed or None), the first two
        as ["ok", value] or ["error", why]."""
        expected, imports, tests = self.expected(children[0], key)
        values, _ = self.run(children[1], answer, [test.question.of_answers for test in tests], imports)
        results = []
        for wanted, got, test in zip(expected, values, tests):
            if wanted[0] == "ok":
                got = test.question.graded(test.on_reference, got, test.fixed_sides)
            results.append((wanted, got, fault_of(wanted, got)))
        return results

    def score_one(self, children, key, answer):
        results = self.results(children, key, answer)
        faults = [fault for _, _, fault in results]
        failed = [(call, *result) for call, result in zip(key[1:], results) if result[2]]
        return Score([fault is None for fault in faults], [wanted[0] == "ok" for wanted, _, _ in results], faults, [
            {"call": shortened(call), "expected": text_of(wanted) or "no value", "got": text_of(got),
             "said": None if fault == OTHER_VALUE else fault} for call, wanted, got, fault in failed[:MAX_FAILED]])

    def score_published(self, children, key, answer):
        reference, *calls = key
        values, _ = children[1].run(answer, calls, self.time_limit_s + 1, reference=reference)   # it has its own alarm
        faults = [fault_text(value) if got != "ok" else None if value == 1 else OTHER_VALUE
                  for got, value in values]
        return Score([fault is None for fault in faults], [True] * len(calls), faults, [])


def started_threads(number):
    """A pool whose threads run already: while answers run, the system may have none left to give."""
    pool, barrier = concurrent.futures.ThreadPoolExecutor(number), threading.Barrier(number)
    list(pool.map(lambda _: barrier.wait(), range(number)))
    return pool


def fault_of(wanted, got):
    """Why a test is not passed; None if it is."""
    if wanted[0] != "ok":
        return f"not gradeable: {wanted[1]}"
    if got[0] != "ok":
        return fault_text(got[1])
    return None if equal_values(wanted[1], got[1]) else OTHER_VALUE


def text_of(result):
    """The value of ["ok", value] as a short text for a reader; None of ["error", …]."""
    return shortened(readable(result[1])) if result[0] == "ok" else None


def shortened(text):
    """A text for a reader: what is behind MAX_CHARS characters is left out, and their number stands instead."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]} … [{len(text) - MAX_CHARS:,} more characters]"


def fault_text(value):
    """What an answer's process said of an error, as text that can be written to a file."""
    return str(value)[:200].encode("utf-8", "replace").decode()


def reward_of(verdicts):
    """The fraction of tests passed; success is a reward of 1."""
    return sum(verdicts) / len(verdicts) if verdicts else 0.0


class Test(namedtuple("Test", "question on_reference value fixed_sides", defaults=((),))):
    """A test of a task: the question, what the reference says to it (of a comparison: both sides), the value that an
    answer must have, as ["ok", value] or ["error", why it cannot be graded], and the sides of a comparison that must
    have the reference's value."""

    def seen_with(self, of_nobody):
        """The same test, when it is known what an empty answer says: {expression: result}."""
        question = self.question
        if self.value[0] != "ok":
            return self
        fixed_sides = question.fixed_sides(self.on_reference, of_nobody) if question.operator else ()
        if question.of_answers in of_nobody:
            nothing = question.graded(self.on_reference, of_nobody[question.of_answers], fixed_sides)
            if nothing == self.value:
                return self._replace(value=["error", ASKS_NOTHING])
        return self._replace(fixed_sides=fixed_sides)


def names_of(imports):
    return Names({name for name, module, _ in imports if module}, {name for name, module, _ in imports if not module})


def imports_for_answers(calls, names):
    """What the calls of answers are told of the names that the reference sent (child.imported_names): its imports, and
    without a module what is tested, which is the answer's to define."""
    imported = {name for name, module, _ in names if module}
    defined = {name for name, module, _ in names if not module}
    tested = tested_names(calls, imported, defined)
    lent = [item for item in names if item[0] in imported - tested]
    return lent + [[name, None, None] for name, _, _ in names if name in tested]


def tested_names(calls, imported, defined):
    """The names that are tested: of the reference, or imported ones where no call reads a name of the reference."""
    functions = [functions_under_test(call, imported, defined) for call in calls]
    names = set().union(*functions)
    return names - imported or names


# ---------------------------------------------------------------------------------------------------------------------
# the data check

def check_tasks(tasks, scorer, other_hashes):
    """For each task {"findings": {what: detail}, "num_tests", "constant": share that the best constant answer passes}.
    A finding is a reason why the task, or one of its tests, measures nothing. Two scorers, of different hash seeds."""
    results, others = scorer.reference_results(tasks), other_hashes.reference_results(tasks)
    checks, seen = [], {}
    for index, (task, values, other_values) in enumerate(zip(tasks, results, others)):
        findings = {}
        for name, (status, value) in zip(task["test_cases"], values):
            if status == "error":
                kind = ("missing package" if value.startswith("no module") else
                        "random" if value == "not the same value twice" else
                        "not comparable" if "cannot be compared" in value else
                        "asks nothing" if value == ASKS_NOTHING else "reference fails")
                findings.setdefault(kind, f"{name}: {value}")
        if not findings and values != other_values:
            findings["order of a set"] = "other results with another hash seed"
        counts = Counter(json.dumps(value) for status, value in values if status == "ok")
        constant = max(counts.values(), default=0) / max(1, len(values))
        if not values:
            findings["no tests"] = "nothing to pass"
        elif constant == 1:
            findings["vacuous"] = f"every test gives {next(iter(counts))[:60]}"
        comparisons = [name for name, call in task["test_cases"].items() if re.search(r"\)\s*[=!<>]=?\s*\S+$", call)]
        if comparisons:
            findings["test is a comparison"] = f"{comparisons[0]}: {task['test_cases'][comparisons[0]]}"
        first = seen.setdefault(task["ground_truth"], index)
        if first != index:
            findings["repeated"] = f"the reference of task {first + 1}"
        checks.append({"task_id": task_id(task), "findings": findings, "num_tests": len(values),
                       "constant": constant})
    return checks
