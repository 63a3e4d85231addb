"""The scorer: (task, answer) -> verdicts. The code runs in sandbox.py, the values are compared here."""
import ast
import builtins
import concurrent.futures
import contextlib
import json
import logging
import operator
import os
import queue
import re
from collections import Counter, namedtuple

from colbench import ColBenchError, task_id
from colbench.sandbox import ANSWER_TIME_LIMIT, LayerError, Sandbox
from colbench.values import readable

log = logging.getLogger(__name__)

OTHER_VALUE = "another value"
MAX_FAILED, MAX_CHARS = 3, 300          # failed tests of an answer that a score shows, and characters of a text there

Score = namedtuple("Score", "tests gradeable faults failed")
Results = namedtuple("Results", "values imports calls comparisons")
Comparison = namedtuple("Comparison", "operator sides")
ORDER = {"Lt": operator.lt, "LtE": operator.le, "Gt": operator.gt, "GtE": operator.ge}
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

        with concurrent.futures.ThreadPoolExecutor(self.num_workers) as pool:
            list(pool.map(one, keys))

    def run(self, child, code, calls, imports=None):
        results = child.run(code, calls, self.time_limit_s, imports=imports)
        # It is wall time, and the machine may have been busy; but the limit of a whole answer is not met by a pause.
        if ["error", "time limit"] in results[0] and ["error", ANSWER_TIME_LIMIT] not in results[0]:
            results = child.run(code, calls, self.time_limit_s, imports=imports)
        return results

    def expected(self, child, key):
        if key not in self.references:
            reference, *calls = key
            tests = [split_comparison(call) for call in calls]
            whole = [tuple_of(test.sides) if test else call for call, test in zip(calls, tests)]
            (first, imports), (second, _) = (self.run(child, reference, whole) for _ in range(2))
            both = [a if a == b else ["error", "not the same value twice"] for a, b in zip(first, second)]
            names = [name for name, _, _ in imports or ()]
            tested = set().union(*(functions_under_test(call, names) for call in calls)) if names else ()
            # What is tested is the answer's to define. Of a comparison, it is asked for the sides that call that.
            imports = [item for item in imports or () if item[0] not in tested]
            asked = [[i for i, side in enumerate(test.sides) if functions_under_test(side, names) &
                      functions_under_test(call, names)] or [0] if test else None
                     for call, test in zip(calls, tests)]
            calls = [tuple_of(test.sides[i] for i in sides) if test else call
                     for call, test, sides in zip(calls, tests, asked)]
            values = [compared(test, both[i], both[i], range(2)) if test else both[i] for i, test in enumerate(tests)]
            self.references[key] = Results(values, imports, calls, list(zip(tests, asked, both)))
        return self.references[key]

    def results(self, children, key, answer):
        """For each test (what the reference gives, what the answer gives, why it is not passed or None), the first two
        as ["ok", value] or ["error", why]."""
        expected, imports, calls, comparisons = self.expected(children[0], key)
        values, _ = self.run(children[1], answer, calls, imports)
        results = []
        for wanted, got, (test, asked, both) in zip(expected, values, comparisons):
            if test and wanted[0] == "ok":
                got = compared(test, both, got, asked)
            fault = (f"not gradeable: {wanted[1]}" if wanted[0] != "ok" else fault_text(got[1]) if got[0] != "ok" else
                     None if equal_values(wanted[1], got[1]) else OTHER_VALUE)
            results.append((wanted, got, fault))
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


def compared(test, both, result, asked):
    """["ok", 1 or 0] of a test that is a comparison, or ["error", why not]. `result` has the sides that were `asked`
    for, `both` has the reference's, for the others."""
    for kind, reason in (both, result):
        if kind == "error":
            return [kind, reason]
    sides, values = both[1][1], result[1]
    if len(sides) != 2:
        return ["error", "a comparison inside an expression"]
    if type(values) is not list or values[0] != "tuple" or len(values[1]) != len(asked):
        return ["error", "a broken result"]                         # code wrote it itself
    pair = (dict(enumerate(sides)) | dict(zip(asked, values[1]))).values()
    try:
        return ["ok", int(holds(test.operator, *pair))]
    except TypeError as error:
        return ["error", str(error)]


def holds(kind, a, b):
    """Does a comparison of two values, as values.encode() gives them, hold? TypeError where values do not say so."""
    if type(a) is list and a[0] == "array" or type(b) is list and b[0] == "array":
        raise TypeError("a comparison with an array")
    if kind in ("Eq", "NotEq") or kind in ("Is", "IsNot") and b in (None, 0, 1):
        return equal_values(a, b) == (kind in ("Eq", "Is"))
    if kind not in ORDER:
        raise TypeError(f"a comparison by {kind.lower()}")
    if type(a) is type(b) is str:
        return ORDER[kind](a, b)
    (p, q), (r, s) = real(a), real(b)
    return ORDER[kind](p * s, r * q)


def real(value):
    """The numerator and denominator of an encoded number."""
    kind, text = value if type(value) is list and len(value) == 2 else ("", value)
    if type(text) is int and not kind:
        return text, 1
    if kind not in ("int", "ratio"):
        raise TypeError("a comparison of what is not a finite number")
    p, _, q = text.partition("/")
    return int(p, 16), int(q or "1", 16)


def equal_values(a, b):
    """Are two values, as values.encode() gives them, equal by Python's rules?"""
    if a == b:
        return True
    if not (type(a) is type(b) is list and len(a) == len(b) == 2):
        return False
    (kind, items), (other_kind, other_items) = a, b
    dicts = ("dict", "odict", "counter")
    if kind in dicts and other_kind in dicts:
        if {kind, other_kind} == {"counter"}:                                   # a missing count is 0
            items, other_items = ([pair for pair in pairs if pair[1] != 0] for pairs in (items, other_items))
        if kind != other_kind and "odict" in (kind, other_kind):                # the order counts among OrderedDicts
            items, other_items = (sorted(pairs, key=json.dumps) for pairs in (items, other_items))
        return len(items) == len(other_items) and all(
            key == other_key and equal_values(value, other_value)
            for (key, value), (other_key, other_value) in zip(items, other_items))
    return (kind == other_kind and kind in ("list", "tuple", "deque") and len(items) == len(other_items) and
            all(map(equal_values, items, other_items)))


def reward_of(verdicts):
    """The fraction of tests passed; success is a reward of 1."""
    return sum(verdicts) / len(verdicts) if verdicts else 0.0


def split_comparison(call):
    """A test that is a comparison, in parts, so that data is compared by the caller and no object of an answer has a
    say: "f(2) == [1]" gives Comparison("Eq", ("f(2)", "[1]")). None for another test. A comparison inside another
    expression gets an operator that the caller knows no meaning of."""
    if not re.search(r"[=!<>]|\b(in|is)\b", call):
        return None
    nested = Comparison("nested", (call.strip(),))
    try:
        test = ast.parse(call.strip(), mode="eval").body
        if not isinstance(test, ast.Compare):
            return nested if compares(test) else None
        sides = (test.left, *test.comparators)
        if len(sides) > 2 or any(map(compares, sides)):
            return nested
        return Comparison(type(test.ops[0]).__name__, tuple(map(ast.unparse, sides)))
    except (SyntaxError, ValueError):
        return None                                                 # its result says so
    except (RecursionError, MemoryError):
        return nested


def tuple_of(expressions):
    return "(" + "".join(f"({expression}), " for expression in expressions) + ")"


def compares(node):
    """Is there a comparison in an expression, outside of what it passes to functions?"""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not hasattr(builtins, node.func.id):
        return False
    return isinstance(node, ast.Compare) or any(map(compares, ast.iter_child_nodes(node)))


def functions_under_test(call, imported):
    """The names that a call calls, but for built-in and imported ones; if all are imported: the outermost."""
    try:
        calls = [node.func.id for node in ast.walk(ast.parse(call.strip(), mode="eval")) if isinstance(node, ast.Call)
                 and isinstance(node.func, ast.Name) and not hasattr(builtins, node.func.id)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    return set(calls) - set(imported) or set(calls[:1])


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
                        "not comparable" if "cannot be compared" in value else "reference fails")
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
