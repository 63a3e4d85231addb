"""The scorer: (task, answer) -> verdicts. The code runs in sandbox.py, the values are compared here."""
import concurrent.futures
import contextlib
import json
import logging
import os
import queue
import threading
from collections import Counter, namedtuple

from colbench import ColBenchError, task_id
from colbench.questions import ASKS_NOTHING, names_of, NONE_ALONE, Test
from colbench.sandbox import LayerError, Sandbox
from colbench.values import equal_values, readable

log = logging.getLogger(__name__)

OTHER_VALUE, NOT_TWICE = "another value", "not the same value twice"
MAX_FAILED, MAX_CHARS = 3, 300          # failed tests of an answer that a score shows, and characters of a text there

Score = namedtuple("Score", "tests gradeable faults failed")
Reference = namedtuple("Reference", "imports tests")                # what it lends to answers, and the Tests
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
        reasons = []
        for layer in self.layers:
            try:
                self.start_children(layer)
                log.info(f"scorer: {LAYERS[layer]}")
                return self
            except LayerError as error:
                reasons.append(f"{layer}: {error}")
        raise ColBenchError("no isolation for untrusted code on this machine (" + "; ".join(reasons) + "); add "
                            "--unsafe-scorer to run it under resource limits alone")

    def start_children(self, layer):
        """Start the child programs and the threads that use them; LayerError, and none of them, if a layer fails."""
        with contextlib.ExitStack() as stack:
            sandboxes = [Sandbox(layer, self.hash_seed) for _ in range(2 * self.num_workers)]
            children = list(map(stack.enter_context, sandboxes))
            for child in children:
                child.greet()
            self.pool = stack.enter_context(started_threads(self.num_workers))
            # References and answers run in children of their own: no answer inherits memory of a reference.
            for pair in zip(children[::2], children[1::2]):
                self.workers.put(pair)
            self.layer, self.stack = layer, stack.pop_all()

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
        self.for_each(lambda children, key: self.reference(children[0], key), dict.fromkeys(keys))
        return [[test.value for test in self.references[key].tests] for key in keys]

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
        return child.run(code, calls, self.time_limit_s, imports=imports)

    def reference(self, child, key):
        """The Reference of a task, which runs twice; what does not certainly ask an answer something is also put to an
        empty answer."""
        if key in self.references:
            return self.references[key]
        code, *calls = key
        tests = list(map(Test, calls))
        texts = [test.of_reference for test in tests]
        first, sent = self.run(child, code, texts)
        second, _ = self.run(child, code, texts)
        names = names_of(sent or [])
        imports = [item for item in sent or [] if item[0] in names.lent]
        imports += [[name, None, None] for name in names.to_define]
        doubtful = []
        for test, result, result_again in zip(tests, first, second):
            test.learn_reference(result if result == result_again else ["error", NOT_TWICE], names)
            if test.value[0] == "ok":
                doubtful += test.doubtful(names)
        of_nobody = {}
        if doubtful:
            results, _ = self.run(child, "", doubtful, imports)
            of_nobody = dict(zip(doubtful, results))
        for test in tests:
            if test.value[0] == "ok":
                test.learn_nothing(of_nobody)
        gradeable = [test for test in tests if test.value[0] == "ok"]
        if all(test.asks_for_none() for test in gradeable):
            for test in gradeable:
                test.value = ["error", NONE_ALONE]
        self.references[key] = Reference(imports, tests)
        return self.references[key]

    def score_one(self, children, key, answer):
        is_new = key not in self.references
        imports, tests = self.reference(children[0], key)
        if is_new and not any(test.value[0] == "ok" for test in tests):
            log.warning(f"scorer: no test can be graded of {shortened(key[0])!r}")
        results, _ = self.run(children[1], answer, [test.of_answers for test in tests], imports)
        faults, gradeable, failed = [], [], []
        for test, result in zip(tests, results):
            gradeable.append(test.value[0] == "ok")
            result = test.result(result) if gradeable[-1] else result
            faults.append(fault_of(test.value, result))
            if faults[-1] and len(failed) < MAX_FAILED:
                failed.append({"call": shortened(test.call), "expected": text_of(test.value) or "no value",
                               "got": text_of(result), "said": None if faults[-1] == OTHER_VALUE else faults[-1]})
        return Score([fault is None for fault in faults], gradeable, faults, failed)

    def score_published(self, children, key, answer):
        reference, *calls = key
        values, _ = children[1].run(answer, calls, self.time_limit_s, reference=reference)
        faults = list(map(published_fault, values))
        return Score([fault is None for fault in faults], [True] * len(calls), faults, [])


def num_cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2


def key_of(task):
    """What the verdicts on an answer depend on: (reference, call, call …)."""
    return (task["ground_truth"], *task["test_cases"].values())


def published_fault(result):
    """Why the published scorer does not pass a test: its verdict is a result, 1 for a pass."""
    status, value = result
    if status != "ok":
        return shortened(value)
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
        return shortened(got[1])
    return None if equal_values(wanted[1], got[1]) else OTHER_VALUE


def text_of(result):
    """The value of ["ok", value] as a short text for a reader; None of ["error", …]."""
    return shortened(readable(result[1])) if result[0] == "ok" else None


def shortened(text):
    """A text for a reader: what is behind MAX_CHARS characters is left out, and their number stands instead."""
    text = text.encode("utf-8", "backslashreplace").decode()
    num_more = len(text) - MAX_CHARS
    return f"{text[:MAX_CHARS]} … [{num_more:,} more characters]" if num_more > 0 else text


def reward_of(verdicts):
    """The fraction of tests passed; success is a reward of 1."""
    return sum(verdicts) / len(verdicts) if verdicts else 0.0


# ---------------------------------------------------------------------------------------------------------------------
# the data check

def check_tasks(tasks, scorer, other_hashes):
    """For each task {"findings": {what: detail}, "num_tests", "constant": share that the best constant answer passes}.
    A finding is a reason why the task, or one of its tests, measures nothing. Two scorers, of different hash seeds."""
    all_values, all_other_values = scorer.reference_results(tasks), other_hashes.reference_results(tasks)
    checks, first_with = [], {}                                     # first_with: {reference: number of its first task}
    for number, (task, values, other_values) in enumerate(zip(tasks, all_values, all_other_values), 1):
        findings = {}
        for name, (status, value) in zip(task["test_cases"], values):
            if status == "error":
                findings.setdefault(kind_of_fault(value), f"{name}: {value}")
        if not findings and values != other_values:
            findings["order of a set"] = "other results with another hash seed"
        counts = Counter(json.dumps(value) for status, value in values if status == "ok")
        constant = max(counts.values(), default=0) / max(1, len(values))
        if not values:
            findings["no tests"] = "nothing to pass"
        elif constant == 1:
            findings["vacuous"] = f"every test gives {next(iter(counts))[:60]}"
        first = first_with.setdefault(task["ground_truth"], number)
        if first != number:
            findings["repeated"] = f"the reference of task {first}"
        checks.append({"task_id": task_id(task), "findings": findings, "num_tests": len(values), "constant": constant})
    return checks


def kind_of_fault(reason):
    """The finding of a test that cannot be graded for a reason."""
    kinds = {"ModuleNotFoundError": "missing package", NOT_TWICE: "random", "cannot be compared": "not comparable",
             ASKS_NOTHING: "asks nothing"}
    return next((kind for part, kind in kinds.items() if part in reason), "reference fails")
