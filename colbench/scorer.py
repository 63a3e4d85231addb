"""The scorer: (task, answer) -> verdicts. The code runs in sandbox.py, the values are compared here."""
import concurrent.futures
import contextlib
import json
import logging
import os
import queue
import threading
from collections import namedtuple

from colbench.domain import task_id
from colbench.questions import ASKS_NOTHING, names_of, NONE_ALONE, placeholder, Test
from colbench.sandbox import ANSWER_TIME_LIMIT, LayerError, Sandbox, TIME_LIMIT
from colbench.schema import InputError
from colbench.values import equal_values, EXACT, readable, tolerance_of

log = logging.getLogger(__name__)

TIME_LIMITS = ["error", TIME_LIMIT], ["error", ANSWER_TIME_LIMIT]
OTHER_VALUE, NOT_TWICE, NOT_GRADEABLE = "another value", "not the same value twice", "not gradeable"
MAX_FAILED, MAX_CHARS = 3, 300          # failed tests of an answer that a score shows, and characters of a text there

Score = namedtuple("Score", "tests gradeable faults failed")
# The names that answers may use and must define, the Tests, those that can be graded, and the tolerance of floats
Solution = namedtuple("Solution", "imports tests gradeable tolerance")
# All that the verdicts on an answer depend on: the solution, the calls of the tests, and a task's "rounding", how much
# floats may differ (None: computed from the results)
Key = namedtuple("Key", "code calls rounding")
LAYERS = {"namespaces": "namespaces, system call list (no files, network or processes of yours in reach)",
          "landlock": "Landlock, system call list (no files, network or processes of yours in reach)",
          "rlimits": "resource limits alone, as --unsafe-scorer asks: untrusted code can read and write your files"}


class Scorer:
    """Grades answers; a context manager that starts the child programs and names the layer of isolation.

        with Scorer() as scorer:
            scores = scorer.score([(task, answer), …])      # [Score, …] in the same order

    A Score has lists with one item per test, and `failed`.
    tests: the verdicts. docs/scorer.md says when a test passes.
    gradeable: whether the test can be graded.
    faults: why it failed; None if it passed.
    failed: the first MAX_FAILED failed tests, as short texts: [{"call", "expected", "got" (None: no value), "said": the
    scorer's comment (None: another value)}, …].
    A solution is evaluated once per task (in two processes).

    compat=True returns the published scorer's verdicts instead (sandbox_worker.run_compat), with the same isolation.

    Uses the strongest of `layers` that works. Raises InputError if the machine allows none, and RuntimeError if a child
    cannot be used, which is neither pass nor fail."""

    def __init__(self, unsafe=False, time_limit_s=1.0, compat=False, hash_seed=0, workers=None):
        self.time_limit_s, self.compat, self.hash_seed = time_limit_s, compat, hash_seed
        self.layers = ["rlimits"] if unsafe else ["namespaces", "landlock"]
        self.num_workers = workers or min(4, num_cores())
        self.solutions, self.workers = {}, queue.SimpleQueue()

    def __enter__(self):
        reasons = []
        for layer in self.layers:
            try:
                self.start_children(layer)
                log.info(f"scorer: {LAYERS[layer]}")
                return self
            except LayerError as error:
                reasons.append(f"{layer}: {error}")
        raise InputError("no isolation for untrusted code on this machine (" + "; ".join(reasons) + "); add "
                            "--unsafe-scorer to run it with resource limits only")

    def start_children(self, layer):
        """Start the child programs and the threads that use them. If a layer fails, start none and raise LayerError."""
        with contextlib.ExitStack() as stack:
            sandboxes = [Sandbox(layer, self.hash_seed) for _ in range(2 * self.num_workers)]
            children = list(map(stack.enter_context, sandboxes))
            for child in children:
                child.greet()
            self.pool = stack.enter_context(started_threads(self.num_workers))
            # Solutions and answers run in children of their own: no answer inherits memory of a solution.
            for pair in zip(children[::2], children[1::2]):
                self.workers.put(pair)
            self.layer, self.stack = layer, stack.pop_all()

    def __exit__(self, *exception):
        self.stack.close()

    def score(self, pairs):
        """Scores of (task, answer) pairs, in their order."""
        pairs = [(key_of(task), answer) for task, answer in pairs]
        if self.compat:
            return self.for_each(self.score_published, pairs)
        for key in self.learn_solutions(key for key, _ in pairs):
            if not self.solutions[key].gradeable:
                log.warning(f"scorer: no test can be graded of {shortened(key.code)!r}")
        return self.for_each(self.score_one, pairs)

    def solution_results(self, tasks):
        """For each task the values of its tests on the solution: ["ok", value], or ["error", why not gradeable]."""
        keys = list(map(key_of, tasks))
        self.learn_solutions(keys)
        return [[test.value for test in self.solutions[key].tests] for key in keys]

    def learn_solutions(self, keys):
        """Evaluate the solutions of new tasks. Returns the keys of these."""
        new_keys = [key for key in dict.fromkeys(keys) if key not in self.solutions]
        self.solutions.update(zip(new_keys, self.for_each(self.solution, [(key,) for key in new_keys])))
        return new_keys

    def for_each(self, work, rows):
        """[work((child for solutions, child for answers), *row), …], in parallel."""
        def work_on(row):
            children = self.workers.get()
            try:
                return work(children, *row)
            finally:
                self.workers.put(children)

        return list(self.pool.map(work_on, rows))

    def solution(self, children, key):
        """The Solution of a task. Tests that may ask an answer nothing are also tried on an empty answer."""
        child, code = children[0], key.code
        tests = list(map(Test, key.calls))
        results, sent = self.solution_results_of(child, code, [test.whole for test in tests])
        names = names_of(sent or [])
        imports = [item for item in sent or [] if item[0] in names.lent]
        imports += [[name, None, None] for name in names.tested]
        for test, result in zip(tests, results):
            test.learn_solution(result, names)
        while unsettled := [test for test in tests if test.is_gradeable and not test.is_settled]:
            results, _ = child.run(code, [test.asked for test in unsettled], self.time_limit_s)
            rest_results = self.rest_results(child, unsettled, results, imports)
            for test, result, rest_result in zip(unsettled, results, rest_results):
                test.settle(result, rest_result)

        numbers = []
        gradeable = [test for test in tests if test.is_gradeable]
        for test in gradeable:
            numbers += test.numbers()
        tolerance = tolerance_of(numbers, key.rounding)
        for test in gradeable:
            test.judge(tolerance)
        doubtful = [test for test in tests if test.is_gradeable and test.is_doubtful(names)]
        results, _ = child.run("", [test.whole for test in doubtful], self.time_limit_s, imports)
        for test, result in zip(doubtful, results):
            test.learn_nothing(result)
        gradeable = [test for test in tests if test.is_gradeable]
        if not any(value is not None for test in gradeable for value in test.asked_on_solution):
            for test in gradeable:                                  # an empty function gives None, too
                test.value = ["error", NONE_ALONE]
            gradeable = []
        return Solution(imports, tests, gradeable, tolerance)

    def solution_results_of(self, child, code, calls):
        """Like clean_results, but for a solution, which runs at least twice. Also returns its imported names."""
        results, sent = child.run(code, calls + calls[::-1], self.time_limit_s, renewed=len(calls))
        if results == results[::-1]:
            return results[:len(calls)], sent
        results = []
        for call in calls:
            (result,), _ = child.run(code, [call], self.time_limit_s)
            (again,), _ = child.run(code, [call], self.time_limit_s)
            results.append(result if result == again else ["error", NOT_TWICE])
        return results, sent

    def clean_results(self, child, code, calls, imports):
        """Results of calls on an answer, each as if it were the first call.

        They run in order and, in a new process, in reverse order. If the results differ, because a call changed
        something for the next one, each call runs in its own process, which takes several times as long. A timeout is
        not a difference, and such a call does not run again."""
        if len(calls) < 2:
            return child.run(code, calls, self.time_limit_s, imports)[0]
        both_orders, _ = child.run(code, calls + calls[::-1], self.time_limit_s, imports, renewed=len(calls))
        results, reversed_results = both_orders[:len(calls)], both_orders[len(calls):][::-1]
        in_time = []
        for number, pair in enumerate(zip(results, reversed_results)):
            if not any(limit in pair for limit in TIME_LIMITS):
                in_time.append(number)
        if any(results[number] != reversed_results[number] for number in in_time):
            for number in in_time:
                (results[number],), _ = child.run(code, [calls[number]], self.time_limit_s, imports)
        return results

    def rest_results(self, child, tests, results, imports):
        """Results of the rest of each test, with the values of its asks (`results`): ["ok", value] or ["error",
        reason]; None if there is no rest. The rest runs without the answer."""
        rests, given = {}, []
        for test, result in zip(tests, results):
            values = test.values(result)
            if test.rest is not None and values is not None:
                rests[test] = test.rest
                given.append({placeholder(number): value for number, value in enumerate(values)})
        rest_results, _ = child.run("", list(rests.values()), self.time_limit_s, imports, given=given)
        result_of = dict(zip(rests, rest_results))
        return [result_of.get(test) for test in tests]

    def score_one(self, children, key, answer):
        imports, tests, gradeable, tolerance = self.solutions[key]
        asked = self.clean_results(children[1], answer, [test.asked for test in gradeable], imports)
        result_of = dict(zip(gradeable, self.results_of(children[0], gradeable, asked, imports)))
        results = [result_of.get(test, test.value) for test in tests]
        score = score_of(results, [test.value for test in tests], tolerance)
        asked_of = dict(zip(gradeable, asked))
        for test, fault in zip(tests, score.faults):
            if fault and len(score.failed) < MAX_FAILED:
                score.failed.append(failed_test(test, asked_of.get(test), fault))
        return score

    def results_of(self, child, tests, asked, imports):
        """Results of tests, ["ok", value] or ["error", reason] each, if an answer gave `asked` for their asks."""
        rest_results = self.rest_results(child, tests, asked, imports)
        return [test.result(result, rest_result) for test, result, rest_result in zip(tests, asked, rest_results)]

    def best_constants(self, tasks):
        """For each task (the constant that passes most tests if every call returns it; the number of these tests)."""
        keys = list(map(key_of, tasks))
        self.learn_solutions(keys)
        return self.for_each(self.best_constant, [(key,) for key in keys])

    def best_constant(self, children, key):
        imports, tests, gradeable, tolerance = self.solutions[key]
        values = {}
        for test in gradeable:
            values |= {json.dumps(value): value for value in test.asked_on_solution}
        best = None, 0
        for value in values.values():
            asked = [["ok", test.as_asked([value] * len(test.asks))] for test in gradeable]
            results = self.results_of(children[0], gradeable, asked, imports)
            num_passed = sum(score_of(results, [test.value for test in gradeable], tolerance).tests)
            if num_passed > best[1]:
                best = value, num_passed
        return best

    def score_published(self, children, key, answer):
        results, _ = children[1].run(answer, list(key.calls), self.time_limit_s, reference=key.code)
        return score_of(results, [["ok", 1]] * len(results), EXACT)  # its verdict is a result, 1 for a pass


def num_cores():
    return len(os.sched_getaffinity(0))


def key_of(task):
    """The Key of a task."""
    return Key(task["ground_truth"], tuple(task["test_cases"].values()), task.get("rounding"))


def started_threads(number):
    """A pool whose threads have started: while answers run, the system may have no threads left."""
    pool, barrier = concurrent.futures.ThreadPoolExecutor(number), threading.Barrier(number)
    list(pool.map(lambda _: barrier.wait(), range(number)))
    return pool


def score_of(results, wanted, tolerance):
    """A Score, but for `failed`, from the results of the tests and the wanted results."""
    faults = [fault_of(value, result, tolerance) for value, result in zip(wanted, results)]
    tests = [fault is None for fault in faults]
    gradeable = [status == "ok" for status, _ in wanted]
    return Score(tests, gradeable, faults, [])


def failed_test(test, result, fault):
    """A failed test as short texts. result: the answer's for test.asked, which in a comparison is the side, or the part
    of a side, that the answer computes."""
    expected = ["ok", test.as_asked(test.asked_on_solution)] if test.is_gradeable else test.value
    return {"call": shortened(test.call),
            "expected": text_of(expected) or "no value",
            "got": result and text_of(result),
            "said": None if fault == OTHER_VALUE else fault}


def fault_of(wanted, got, tolerance=None):
    """Why a test failed, or None if it passed. tolerance: how much floats may differ (values.tolerance_of)."""
    if wanted[0] != "ok":
        return f"{NOT_GRADEABLE}: {wanted[1]}"
    if got[0] != "ok":
        return shortened(got[1]).replace(NOT_GRADEABLE, "no value")     # an answer can name its exceptions as it likes
    return None if equal_values(wanted[1], got[1], tolerance) else OTHER_VALUE


def text_of(result):
    """The value of a result as a short text for a reader, or None if it is an error."""
    return shortened(readable(result[1])) if result[0] == "ok" else None


def shortened(text):
    """The first MAX_CHARS characters of a text, and the number of the others."""
    text = text.encode("utf-8", "backslashreplace").decode()
    num_more = len(text) - MAX_CHARS
    return f"{text[:MAX_CHARS]} … [{num_more:,} more characters]" if num_more > 0 else text


def reward_of(verdicts):
    """The share of tests passed; success is a reward of 1."""
    return sum(verdicts) / len(verdicts) if verdicts else 0.0


# ---------------------------------------------------------------------------------------------------------------------
# the data check

KINDS_OF_FAULTS = {"ModuleNotFoundError": "missing package", NOT_TWICE: "random", ASKS_NOTHING: "asks nothing",
                   "cannot be compared": "not comparable"}


def check_tasks(tasks, scorer, other_hashes):
    """For each task {"findings": {what: detail}, "num_tests", "constant": share that the best constant answer passes}.
    A finding is a reason why the task, or one of its tests, measures nothing. Two scorers, of different hash seeds."""
    checks, first_with = [], {}                                     # first_with: {solution: number of its first task}
    all_values, all_other_values = scorer.solution_results(tasks), other_hashes.solution_results(tasks)
    rows = zip(tasks, all_values, all_other_values, scorer.best_constants(tasks))
    for number, (task, values, other_values, (best_value, num_passed)) in enumerate(rows, 1):
        constant = num_passed / max(1, len(values))
        findings = {}
        for name, (status, value) in zip(task["test_cases"], values):
            if status == "error":
                kinds = (kind for part, kind in KINDS_OF_FAULTS.items() if part in value)
                findings.setdefault(next(kinds, "reference fails"), f"{name}: {value}")
        is_same = all(fault_of(value, other) is None for value, other in zip(values, other_values))
        if not findings and not is_same:
            findings["order of a set"] = "other results with another hash seed"
        if not values:
            findings["no tests"] = "nothing to pass"
        if constant == 1:
            findings["vacuous"] = f"every test gives {readable(best_value)[:60]}"
        first = first_with.setdefault(task["ground_truth"], number)
        if first != number:
            findings["repeated"] = f"the solution of task {first}"
        checks.append({"task_id": task_id(task), "findings": findings, "num_tests": len(values), "constant": constant})
    return checks


def check_with_two_scorers(tasks, unsafe_scorer):
    """check_tasks, with its own scorers."""
    with Scorer(unsafe_scorer) as scorer, Scorer(unsafe_scorer, hash_seed=1) as other_hashes:
        return check_tasks(tasks, scorer, other_hashes)
