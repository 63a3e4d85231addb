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

    A Score has lists of one item a test, and `failed`.
    tests: the verdicts. docs/scorer.md says when a test passes.
    gradeable: whether the test can be graded at all.
    faults: why it is not passed; None where it is.
    failed: the first MAX_FAILED tests that are not passed, as short texts: [{"call", "expected", "got" (None: it gave
    no value), "said": what the scorer says (None: another value)}, …].
    A reference is evaluated once a task (in two processes).

    compat=True gives the published scorer's verdicts instead (sandbox_worker.run_compat), behind the same walls.

    ColBenchError if the machine allows no isolation (layer None: the strongest that works). RuntimeError if a child
    cannot be used: that is neither pass nor fail."""

    def __init__(self, unsafe=False, time_limit_s=1.0, compat=False, layer=None, hash_seed=0, workers=None):
        self.time_limit_s, self.compat, self.hash_seed = time_limit_s, compat, hash_seed
        self.layers = ["rlimits"] if unsafe else ["namespaces", "landlock"]
        if layer:
            self.layers = [layer]
        self.num_workers = workers or min(4, num_cores())
        self.references, self.workers = {}, queue.SimpleQueue()

    def __enter__(self):
        self.stack = contextlib.ExitStack()
        reasons = []
        for layer in self.layers:
            try:
                self.start_children(layer)
            except LayerError as error:
                reasons.append(f"{layer}: {error}")
            else:
                self.layer = layer
                log.info(f"scorer: {LAYERS[layer]}")
                return self
        raise ColBenchError("no isolation for untrusted code on this machine (" + "; ".join(reasons) + "); add "
                            "--unsafe-scorer to run it under resource limits alone")

    def start_children(self, layer):
        """Start the child programs and the threads that use them; LayerError, and none of them, if a layer fails."""
        with contextlib.ExitStack() as stack:
            pairs = []
            for _ in range(self.num_workers):
                # References and answers run in children of their own: no answer inherits memory of a reference.
                pairs.append([stack.enter_context(Sandbox(layer, self.hash_seed)),
                              stack.enter_context(Sandbox(layer, self.hash_seed))])
            for pair in pairs:
                for child in pair:
                    child.greet()
            self.pool = stack.enter_context(started_threads(self.num_workers))
            for pair in pairs:
                self.workers.put(pair)
            self.stack = stack.pop_all()

    def __exit__(self, *exception):
        self.stack.close()

    def score(self, pairs):
        """Scores of (task, answer) pairs, in their order; tasks in parallel."""
        groups = {}                                                 # {key of a task: indices of its pairs}
        for index, (task, _) in enumerate(pairs):
            groups.setdefault(key_of(task), []).append(index)
        score_one = self.score_published if self.compat else self.score_one
        scores = [None] * len(pairs)

        def score_task(children, key):
            for index in groups[key]:
                _, answer = pairs[index]
                scores[index] = score_one(children, key, answer)

        self.for_each(score_task, groups)
        return scores

    def reference_results(self, tasks):
        """For each task what its tests give on the reference: ["ok", value], or ["error", why it cannot be graded]."""
        keys = list(map(key_of, tasks))
        self.for_each(lambda children, key: self.expected(children[0], key), dict.fromkeys(keys))
        return [self.references[key].values for key in keys]

    def for_each(self, work, keys):
        """work([child for references, child for answers], key) for all keys, in parallel."""
        def work_on(key):
            children = self.workers.get()
            try:
                work(children, key)
            finally:
                self.workers.put(children)

        list(self.pool.map(work_on, keys))

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
        """The Results of a reference, which runs twice."""
        questions = list(map(question_of, calls))
        texts = [question.of_reference for question in questions]
        first, names = self.run(child, reference, texts)
        second, _ = self.run(child, reference, texts)
        results = [same_twice(*twice) for twice in zip(first, second)]
        imports = imports_for_answers(calls, names or [])
        names = names_of(imports)
        tests = []
        for question, result in zip(questions, results):
            tests.append(Test(question, result[1], question.value(result, names)))
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
        if not expressions:
            return {}
        results, _ = self.run(child, "", expressions, imports)
        return dict(zip(expressions, results))

    def results(self, children, key, answer):
        """For each test (what the reference gives, what the answer gives, why it is not passed or None), the first two
        as ["ok", value] or ["error", why]."""
        expected, imports, tests = self.expected(children[0], key)
        texts = [test.question.of_answers for test in tests]
        values, _ = self.run(children[1], answer, texts, imports)
        results = []
        for wanted, got, test in zip(expected, values, tests):
            if wanted[0] == "ok":
                got = test.question.graded(test.on_reference, got, test.fixed_sides)
            results.append((wanted, got, fault_of(wanted, got)))
        return results

    def score_one(self, children, key, answer):
        _, *calls = key
        results = self.results(children, key, answer)
        faults, gradeable, failed = [], [], []
        for call, (wanted, got, fault) in zip(calls, results):
            faults.append(fault)
            gradeable.append(wanted[0] == "ok")
            if fault and len(failed) < MAX_FAILED:
                failed.append({"call": shortened(call), "expected": text_of(wanted) or "no value", "got": text_of(got),
                               "said": None if fault == OTHER_VALUE else fault})
        return Score([fault is None for fault in faults], gradeable, faults, failed)

    def score_published(self, children, key, answer):
        reference, *calls = key
        time_limit_s = self.time_limit_s + 1                        # it has its own alarm
        values, _ = children[1].run(answer, calls, time_limit_s, reference=reference)
        faults = list(map(published_fault, values))
        return Score([fault is None for fault in faults], [True] * len(calls), faults, [])


def num_cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2


def key_of(task):
    """What the verdicts on an answer depend on: (reference, call, call …)."""
    return (task["ground_truth"], *task["test_cases"].values())


def same_twice(first, second):
    """A result of a reference that it gives twice."""
    return first if first == second else ["error", "not the same value twice"]


def published_fault(result):
    """Why the published scorer does not pass a test: its verdict is a result, 1 for a pass."""
    status, value = result
    if status != "ok":
        return fault_text(value)
    return None if value == 1 else OTHER_VALUE


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
    num_more = len(text) - MAX_CHARS
    return f"{text[:MAX_CHARS]} … [{num_more:,} more characters]" if num_more > 0 else text


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
    """The Names of what imports_for_answers gives."""
    lent = {name for name, module, _ in imports if module}
    to_define = {name for name, module, _ in imports if not module}
    return Names(lent, to_define)


def imports_for_answers(calls, names):
    """What the calls of answers are told of the names that the reference sent (sandbox_worker.imported_names): its imports, and
    without a module what is tested, which is the answer's to define."""
    imported, defined = names_of(names)
    tested = tested_names(calls, imported, defined)
    lent = [item for item in names if item[0] in imported - tested]
    to_define = [[name, None, None] for name, _, _ in names if name in tested]
    return lent + to_define


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
    all_values, all_other_values = scorer.reference_results(tasks), other_hashes.reference_results(tasks)
    checks, first_with = [], {}                                     # first_with: {reference: number of its first task}
    for number, (task, values, other_values) in enumerate(zip(tasks, all_values, all_other_values), 1):
        findings = test_findings(task, values)
        if not findings and values != other_values:
            findings["order of a set"] = "other results with another hash seed"
        counts = Counter(json.dumps(value) for status, value in values if status == "ok")
        constant = max(counts.values(), default=0) / max(1, len(values))
        if not values:
            findings["no tests"] = "nothing to pass"
        elif constant == 1:
            findings["vacuous"] = f"every test gives {next(iter(counts))[:60]}"
        for name, call in task["test_cases"].items():
            if re.search(r"\)\s*[=!<>]=?\s*\S+$", call):
                findings.setdefault("test is a comparison", f"{name}: {call}")
        first = first_with.setdefault(task["ground_truth"], number)
        if first != number:
            findings["repeated"] = f"the reference of task {first}"
        checks.append({"task_id": task_id(task), "findings": findings, "num_tests": len(values), "constant": constant})
    return checks


def test_findings(task, values):
    """{what: the first test} of the tests of a task that cannot be graded."""
    findings = {}
    for name, (status, value) in zip(task["test_cases"], values):
        if status == "error":
            findings.setdefault(kind_of_fault(value), f"{name}: {value}")
    return findings


def kind_of_fault(reason):
    """The finding of a test that cannot be graded for a reason."""
    if reason.startswith("no module"):
        return "missing package"
    if reason == "not the same value twice":
        return "random"
    if "cannot be compared" in reason:
        return "not comparable"
    return "asks nothing" if reason == ASKS_NOTHING else "reference fails"
