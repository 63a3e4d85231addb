"""The scorer: golden verdicts, values and their equality, gaps, tests that are comparisons, --compat."""
import datetime
import decimal
import fractions
import json
import random
import time

import pytest

from colbench import sandbox
from colbench.sandbox import Sandbox
from colbench.scorer import reward_of, Scorer
from colbench.values import encode, equal_values, is_encoded, readable
from conftest import call as call_stage
from conftest import read
from lib.data import read_tasks
from lib.runtime import write_jsonl

F = "def f(n):\n    return n * n or None"
TASK = {"problem_description": "?", "ground_truth": "def f(n):\n    return n * n if n else None",
        "test_cases": {f"test{n}": f"f({n})" for n in (3, 2, 0, 1)}}


@pytest.fixture(scope="module")
def scorer():
    with Scorer(time_limit_s=0.5, workers=1) as scorer:
        yield scorer


@pytest.fixture(scope="module")
def compat():
    with Scorer(time_limit_s=0.5, workers=1, compat=True) as scorer:
        yield scorer


def verdicts(scorer, answer, task=TASK):
    return scorer.score([(task, answer)])[0].tests


def task_of(reference, *calls):
    return {"ground_truth": reference, "test_cases": {f"test{i}": call for i, call in enumerate(calls or ["f()"])}}


FAILING_ENDS = ["raise ValueError", "input()", "import sys; sys.exit()", "exit()", "1 / 0",
                "print(f(int(sys.argv[1])))", "raise KeyboardInterrupt", "f(None, None)",
                "if __name__ == '__main__':\n    raise SystemExit"]


@pytest.mark.parametrize("answer, expected", [
    ("def f(n):\n    return n ** 2 if n else None", [1, 1, 1, 1]),
    ("import math\ndef f(n):\n    return round(math.pow(n, 2)) if n else None", [1, 1, 1, 1]),
    ("def g(n): return n * n\ndef f(n): return g(n) or None", [1, 1, 1, 1]),                           # its own helper
    ("def f(n, total=0):\n    return (f(n - 1) + 2 * n - 1 if n > 0 else 0)", [1, 1, 0, 1]),          # recursion
    ("FACTOR = 1\ndef f(n):\n    global FACTOR\n    FACTOR += 1\n    return n * n * (FACTOR - 1) or None",
     [1, 1, 1, 1]),
    ("class Squarer:\n    def of(self, n): return n * n or None\nf = Squarer().of\nf = lambda n, f=f: f(n)",
     [1, 1, 1, 1]),
    ("from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass N:\n    n: int\n"
     "def f(n): return N(n).n ** 2 or None", [1, 1, 1, 1]),
    ("# import os and exit() and sudo\ndef f(n): return n * n or None", [1, 1, 1, 1]),
    ("import threading\ndef f(n):\n    r = []\n    t = threading.Thread(target=lambda: r.append(n * n))\n"
     "    t.start(); t.join()\n    return r[0] or None", [1, 1, 1, 1]),
    ("import tempfile\ndef f(n):\n    with tempfile.TemporaryFile('w+') as file:\n"
     "        file.write(str(n * n)); file.seek(0)\n        return int(file.read()) or None", [1, 1, 1, 1]),
    ("import sys\nn0 = int(sys.argv[1]) if sys.argv[1:] else 0\ndef f(n): return n * n + n0 or None", [1, 1, 1, 1]),
    ("def f(n): return float(n * n) or None", [1, 1, 1, 1]),                                           # 9.0 == 9
    ("def f(n): return (n * n,)", [0, 0, 0, 0]),
    ("def f(n): print(n * n)", [0, 0, 1, 0]),                                                          # None == None
    ("def other(n): return n * n", [0, 0, 0, 0]),
    ("", [0, 0, 0, 0]),
    # a fault at the top level costs its own statement, and what needs it
    *((f"{F}\n{end}", [1, 1, 1, 1]) for end in FAILING_ENDS),
    ("import no_such_package\ndef f(n): return n * n or None", [1, 1, 1, 1]),
    ("import no_such_package\ndef f(n): return no_such_package.square(n) or None", [0, 0, 0, 0]),
    ("calls = []\ndef f(n):\n    calls.append(n)\n    return n * n or None if len(calls) == 1 else 7", [1, 1, 1, 1]),
    # a fault in a call costs its own test (test_sandbox.py has many)
    ("def f(n):\n    while n == 2: pass\n    return n * n or None", [1, 0, 1, 1]),
])
def test_golden_verdicts(scorer, answer, expected):
    assert verdicts(scorer, answer) == [bool(x) for x in expected]


def test_the_fault_of_code_that_does_not_define_its_function_is_the_first(scorer):
    [score], said = scorer.score([(TASK, "x = 1 / 0\ndef g(n): return n")]), "ZeroDivisionError: division by zero"
    assert score[:3] == ([False] * 4, [True] * 4, [said] * 4)
    assert len(score.failed) == 3 and score.failed[0] == {"call": "f(3)", "expected": "9", "got": None, "said": said}


def test_code_that_never_loads_is_tried_once(scorer, monkeypatch):
    processes, original = [], Sandbox.run_process
    monkeypatch.setattr(sandbox, "LOAD_LIMIT_S", 0.1)
    monkeypatch.setattr(Sandbox, "run_process", lambda *arguments: processes.append(1) or original(*arguments))
    assert verdicts(scorer, F) == [True] * 4
    del processes[:]
    assert verdicts(scorer, "while True: pass\ndef f(n): return n") == [False] * 4 and len(processes) == 1


# ---- values

EQUAL = [
    ("1", "True"), ("1", "1.0"), ("0.5", "Decimal('0.5')"), ("0.5", "Fraction(1, 2)"), ("1", "1 + 0j"), ("0.0", "-0.0"),
    ("10 ** 400", "Decimal(10) ** 400"), ("'a'", "'a'"), ("b'ab'", "bytearray(b'ab')"), ("{1, 2}", "frozenset({2, 1})"),
    ("{'a': 1, 'b': (2, [3])}", "{'b': (2, [3]), 'a': True}"), ("{1: 'x'}", "{1.0: 'x'}"),
    ("{'k': 1}", "{'k': 1}.copy()"), ("float('nan')", "float('nan')"), ("[1, float('nan')]", "[1, Decimal('nan')]"),
    ("float('inf')", "Decimal('inf')"), ("datetime(2024, 1, 2, 3)", "datetime(2024, 1, 2, 3)"),
    ("datetime(2024, 1, 2, 3, tzinfo=timezone.utc)", "datetime(2024, 1, 2, 5, tzinfo=timezone(timedelta(hours=2)))"),
    ("date(2024, 1, 2)", "date(2024, 1, 2)"), ("timedelta(1)", "timedelta(hours=24)"), ("clock(1, 2)", "clock(1, 2)"),
    ("Counter('aab')", "Counter(a=2, b=1, c=0)"), ("Counter('aab')", "{'a': 2, 'b': 1}"),
    ("defaultdict(int, a=1)", "{'a': 1}"), ("OrderedDict(a=1, b=2)", "{'b': 2, 'a': 1}"),
    ("deque([1, 2])", "deque([1, 2], 5)"), ("Point(1, 2)", "(1, 2)"), ("Color.RED", "Color.RED"), ("Level.LOW", "1"),
    ("range(0, 5, 2)", "range(0, 6, 2)"), ("range(0)", "range(3, 3)"), ("{1: 2}.keys()", "{1}"), ("np.int64(3)", "3"),
    ("np.float64(0.5)", "0.5"), ("np.bool_(True)", "True"), ("np.str_('a')", "'a'"),
    ("np.array([1, 2])", "np.array([1.0, 2.0])"), ("np.array([1, np.nan])", "np.array([1, np.nan])"),
    ("[np.array([1])]", "[np.array([1])]"), ("0.1 + 0.2", "0.3"), ("2.3 * 1.1 * 3.7", "3.7 * 2.3 * 1.1"),
    ("sum([0.1] * 10)", "1.0"), ("sum([0.1] * 10)", "1"), ("1e16", "1e16 + 2"), ("0.0", "1e-13"),
    ("10.0 / 3", "Fraction(10, 3)"), ("0.1", "Decimal('0.1')"), ("[{'a': (0.1 + 0.2, 'b')}]", "[{'a': (0.3, 'b')}]"),
    ("{0.1 + 0.2: 1, 2: 0}", "{0.3: 1, 2: 0}"), ("{sum([0.1] * 10), 0.5, 3}", "{3, 0.5, 1}"),
    ("(0.1 + 0.2) * 1j", "0.3j"), ("np.array([0.1 + 0.2])", "np.array([0.3])"),
    ("{9.999999999999998, 2}", "{10.0, 2.0}"), ("'\\ud800 \\0 é'", "'\\ud800 \\0 é'"), ("[None, ...] and None", "None")]
UNEQUAL = [
    ("1", "'1'"), ("1", "None"), ("0", "None"), ("[]", "None"), ("[]", "()"), ("[1, 2]", "(1, 2)"),
    ("[1, 2]", "[2, 1]"), ("[1]", "[1, 1]"), ("10 ** 400", "10 ** 400 + 1"),
    ("Fraction(1, 3)", "Fraction(333333333333, 10 ** 12)"), ("1.0", "1.00000001"), ("0.0", "1e-11"),
    ("1e300 * 1e300", "1e300"), ("2 ** 53", "2 ** 53 + 1"), ("float(2 ** 53)", "2 ** 53 + 1"), ("float('nan')", "0"),
    ("[float('nan'), 1]", "[1, float('nan')]"), ("float('inf')", "float('-inf')"), ("'a'", "b'a'"), ("''", "None"),
    ("{1}", "[1]"), ("{}", "set()"), ("{'a': 1}", "{'a': 2}"), ("{'a': 1}", "[('a', 1)]"), ("{1: 'x'}", "{'1': 'x'}"),
    ("datetime(2024, 1, 2)", "date(2024, 1, 2)"), ("datetime(2024, 1, 2)", "datetime(2024, 1, 2, tzinfo=timezone.utc)"),
    ("datetime(2024, 1, 2)", "'2024-01-02T00:00:00'"), ("OrderedDict(a=1, b=2)", "OrderedDict(b=2, a=1)"),
    ("Counter(a=0)", "{}"), ("deque([1])", "[1]"), ("Color.RED", "Color.BLUE"), ("Color.RED", "1"),
    ("Color.RED", "'RED'"), ("range(3)", "[0, 1, 2]"), ("np.array([1, 2])", "[1, 2]"),
    ("np.array([1, 2])", "np.array([[1, 2]])"), ("np.array([1, 2])", "np.array([1, 3])"), ("['list', [1]]", "[1]"),
    ("['nan']", "float('nan')"), ("('number', 1)", "1"), ("1j", "1"), ("'nan'", "float('nan')")]
TYPES = """from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import date, datetime, time as clock, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
import numpy as np
Point = namedtuple("Point", "x y")
class Color(Enum): RED = 1; BLUE = 2
class Level(IntEnum): LOW = 1
"""


@pytest.mark.parametrize("pairs, same", [(EQUAL, True), (UNEQUAL, False)], ids=["equal", "unequal"])
def test_values_are_compared_by_pythons_rules_but_for_the_rounding_of_floats(pairs, same):
    names = {}
    exec(TYPES, names)
    for pair in pairs:
        left, right = [json.loads(json.dumps(encode(eval(text, names)))) for text in pair]
        assert is_encoded(left) and is_encoded(right)
        assert equal_values(left, right) == equal_values(right, left) == same, pair


def test_encoding_by_hand():
    assert encode((1, 2.5, True, None, "a")) == ["tuple", 1, 2.5, 1, None, "a"]
    assert encode({"b": {2, 1}, "a": 2 ** 60}) == [
        "dict", ["tuple", "a", ["int", "0x1000000000000000"]], ["tuple", "b", ["set", 1, 2]]]
    assert encode(decimal.Decimal("-0.75")) == -0.75 and encode(decimal.Decimal("0.1")) == ["ratio", "1/10"]
    assert encode(fractions.Fraction(10 ** 400, 3)) == ["ratio", f"{10 ** 400}/3"]
    assert encode(datetime.timedelta(days=1, seconds=2)) == ["timedelta", 1, 2, 0]
    assert encode(range(2, 9, 3)) == ["range", 3, 2, 5]
    with pytest.raises(TypeError, match="object cannot be compared"):
        encode(object())
    for value in (7, "a", None, [], [1, (2,), {"a": 0.5}], (), {1, 2}, set()):
        assert readable(encode(value)) == repr(value)
    assert readable(encode(range(3))) == "range(3, 0, 1)"


# ---- gaps

@pytest.mark.parametrize("reference, gradeable, reason", [
    ("def f(n):\n    return 6 // (n - 2)", [1, 0, 1, 1], "ZeroDivisionError"),
    ("import random\ndef f(n):\n    return random.random() if n == 2 else n", [1, 0, 1, 1], "not the same value twice"),
    ("import time\ndef f(n):\n    return time.time_ns()", [0, 0, 0, 0], "not the same value twice"),
    ("def f(n):\n    return object() if n == 2 else n", [1, 0, 1, 1], "cannot be compared"),
    ("def f(n):\n    return (x for x in [n])", [0, 0, 0, 0], "cannot be compared"),
    ("def f(n):\n    while n == 2: pass\n    return n", [1, 0, 1, 1], "time limit"),
    ("import no_such_package\ndef f(n): return n", [0, 0, 0, 0], "ModuleNotFoundError"),
    ("def f(n) return", [0, 0, 0, 0], "SyntaxError"),
    ("def f(n): return {'a', 'b', 'c', str(n)}", [1, 1, 1, 1], ""),
    ("def f(n): return list({'a', 'b', 'c', str(n)})", [1, 1, 1, 1], ""),  # the same hash seed on both sides
])
def test_what_a_reference_cannot_settle_is_never_credited(scorer, reference, gradeable, reason):
    task = {**TASK, "ground_truth": reference}
    score = scorer.score([(task, reference)])[0]
    assert score.gradeable == [bool(x) for x in gradeable]
    assert score.tests == score.gradeable  # the reference itself passes what can be graded
    assert all(reason in fault and "not gradeable" in fault for fault in score.faults if fault)


@pytest.mark.parametrize("reference, calls", [
    ("def f(n): print(n)", ["f(1)", "f(2)"]), ("def f(values):\n    values.sort()\n    return", ["f([2, 1])"]),
    ("def f(n): return None", ["f(1) is None", "f(2) == None", "f(3)"]), ("def f(n): return print(n)", ["f(1)"])])
def test_where_all_tests_give_none_an_empty_function_passes_nothing(scorer, reference, calls):
    for answer in (reference, "def f(*_): pass"):
        score = scorer.score([(task_of(reference, *calls), answer)])[0]
        assert score.gradeable == score.tests == [False] * len(calls) and "asks the answer nothing" in score.faults[0]


def test_references_that_return_nothing_are_counted_where_tasks_are_read(tmp_path, capsys):
    silent = ["def f(n): print(n)", "def f(values):\n    values.sort()\n    return", "def f(n): return None"]
    others = ["def f(n): return print(n)", "def f(n): yield n", "f = len", "def f(n)"]
    tasks = [task_of(reference, "f(1)") | {"problem_description": "?"} for reference in silent + others]
    write_jsonl(tmp_path / "tasks.jsonl", tasks)
    assert len(read_tasks(tmp_path / "tasks.jsonl")) == 7
    assert "3 of 7 references return nothing" in capsys.readouterr().out


def test_a_task_that_cannot_be_graded_is_named(scorer, caplog):
    scorer.score([(task_of("def f(n): return 1 / 0  # whatever"), "")])
    assert "no test can be graded of 'def f(n): return 1 / 0  # whatever'" in caplog.text


GCDS = [("import math\nf = math.gcd", "f(12, 18)"), ("from math import gcd as f", "f(12, 18)")]
LENDING = "from datetime import datetime\nimport numpy as np\ndef f(d): return getattr(d, 'year', None) or int(d.sum())"
NAMED_AS_A_BUILTIN = "def sum(values, key=None):\n    total = 0\n    for value in values: total += value\n" \
                     "    return total"
VERDICTS = [                                                        # reference, calls, answer, does it pass all tests?
    ("def f(n): return n or None", ["f(0)", "f(1)"], "def f(n): return n or None", True),           # None is a value
    ("def f(n): return n or None", ["f(0)", "f(1)"], "def f(n): pass", False),
    # each test has fresh arguments and a fresh namespace
    ("SEEN = []\ndef f(items):\n    items.append(0)\n    SEEN.append(items)\n    return len(items) + len(SEEN)",
     ["f([1])"] * 3, "def f(items): return len(items) + 2", True),
    # names in a call mean what the reference imported, but what the answer defines is the answer's
    (LENDING, ["f(datetime(2024, 1, 2))", "f(np.array([1, 2]))"],
     "import datetime\ndef f(d):\n    return d.year if isinstance(d, datetime.datetime) else sum(d.tolist())", True),
    ("from fractions import Fraction\ndef f(x): return x.numerator", ["f(Fraction(3, 4))"],
     "class Fraction:\n    def __init__(self, p, q): self.p = p\ndef f(x): return x.p", True),
    ("from fractions import Fraction\ndef f(x): return x.numerator", ["f(Fraction(3, 4))"],
     "def f(x): return x.numerator", True),
    # the function under test is the answer's, though the reference imports it, or it is named as a builtin
    *((reference, [call], answer, passes) for reference, call in GCDS for answer, passes in (
        ("import math\ndef f(a, b): return math.gcd(a, b)", True), ("def f(a, b): return 7", False),
        ("from math import lcm as f", False), ("import math\nf = math.gcd", True), ("import math as f", False),
        ("class f:\n    def __init__(self, a, b): pass", False), ("def g(a, b): return 6", False), ("", False))),
    *((NAMED_AS_A_BUILTIN, ["sum([1, 2])", "3 == sum([1, 2])"], answer, passes) for answer, passes in (
        (NAMED_AS_A_BUILTIN, True), ("sum = lambda values: values[0] + values[1]", True), ("", False),
        ("def total(values): return 3", False), ("def total(values): return 3\nsum = 6", False), ("sum = 6", False))),
    ("def round(x, digits): return int(x * 10 ** digits) / 10 ** digits\ndef f(x): return x / 3", ["round(f(1), 2)"],
     "def f(x): return x / 3", True),                               # a helper is Python's own
    # what a call passes to the function may compare
    ("def f(key, items): return list(filter(key, items))", ["f(lambda x: x > 1 and x != 3, [1, 2, 3])"],
     "def f(key, items): return [x for x in items if key(x)]", True)]


@pytest.mark.parametrize("reference, calls, answer, passes", VERDICTS)
def test_whose_names_are_meant(scorer, reference, calls, answer, passes):
    score = scorer.score([(task_of(reference, *calls), answer)])[0]
    assert all(score.gradeable) and all(score.tests) == passes, score.faults


# ---- tests that are comparisons

FAKE = "class Yes:\n    __hash__ = None\n" + "".join(
    f"    def __{name}__(self, *other): return True\n" for name in (
        "eq", "ne", "lt", "le", "gt", "ge", "contains", "bool", "init")) + "Decimal = Yes\ndef f(n): return Yes()"
COMPARISONS = [
    "f(3) == 9", "9 == f(3)", "f(3) != 8", "f(3) == [9]", "f(0) is None", "f(0) is not None", "f(3) == f(-3)",
    "f(3) == Decimal(9)", "f(3) < 10", "f(3) >= 9.5", "abs(f(3) - 9) <= 1e-9", "f(2) < float(3)", "Decimal(9) == f(3)",
    "f(3) == float('nan')", "f(3) == '9'  # text", "(f(3),\n 9) == (9, 9)"]
ASKED_SOMEWHERE = [                                                 # -1 for each f(n) is wrong for all of these
    "[4, 9] == list(map(f, [2, 3]))", "9 == max(map(f, [1, 2, 3]))", "4 == (lambda: f)()(2)", "[f(2)] == [4]",
    "9 == sum([f(x) for x in [3]])", "[3, 2] == sorted([2, 3], key=lambda x: -f(x))",
    "{2: 4} == {x: f(x) for x in [2]}", "4 < max(map(f, [3]))", "(n := f(2)) == n * 1", "(n := 2) * 2 == f(n)",
    "[4] * 2 == [f(2), f(-2)]", "max(f(3), f(2)) == Decimal(9)", "list(map(f, [2, 3]))", "[f(x) for x in [2, 3]]",
    "(lambda: f)()(2)", "[Decimal(f(x)) for x in [2, 3]]", "list(map(lambda x: Decimal(f(x)), [2]))"]
NOT_COMPARABLE = [
    "f(3) in (9, 8)", "8 < f(3) < 10", "f(3) == 9 and f(2) == 4", "not f(3) == 9", "[f(3) == 9]",
    "all(f(i) == i * i for i in range(1, 3))", "f(0) < 3", "f(3) is 9", "f(3) < 'a'", "f(3) == object()",
    "len(sorted([f(3)], key=lambda x: x > 1))", "(f(3) == 9) == True"]
ASKED_NOTHING = [
    "[4] * 2 == [4, 4]", "1 == 1", "4 == 2 + 2", "Decimal(4) == 4", "(n := 3) == n", "len([1])", "[f(x) for x in []]",
    "True or f(2)", "3 if True else f(2)", "0 < len([lambda: f])"]


def test_a_comparison_is_of_values_and_no_object_decides_it(scorer):
    """Every side that is no literal is asked of the answer; a test that asks it nothing cannot be graded."""
    calls = COMPARISONS + ASKED_SOMEWHERE + NOT_COMPARABLE + ASKED_NOTHING
    task = task_of("from decimal import Decimal\n" + F, *calls)
    answers = [F, FAKE, "", "x = 1\ndef g(n): return n * n or None", "def f(n): return -1"]
    right, fake, empty, unrelated, wrong = scorer.score([(task, answer) for answer in answers])
    passed = {call for call, test in zip(calls, right.tests) if test}
    assert right.tests == right.gradeable and passed == {*COMPARISONS, *ASKED_SOMEWHERE}
    assert not any(fake.tests + empty.tests + unrelated.tests)
    assert not any(wrong.tests[len(COMPARISONS):])
    assert set(right.faults[-len(ASKED_NOTHING):]) == {"not gradeable: it asks the answer nothing"}


@pytest.mark.parametrize("call, wrong", [
    ("f(3) == 9", "8"), ("9 == f(3)", "None"), ("f(3) == [9]", "[9]"), ("f(3) != 8", "8"), ("f(0) is None", "0"),
    ("f(3) < 10", "10"), ("f(3) < 10", "'9'"), ("f(3) < 10", "10 ** 400"), ("f(3) > 8", "8 + 1e-14"),
    ("f(3) >= 9", "8.99"), ("f(3) == f(-3)", "n"), ("f(3) < 10", "float('inf')"), ("str(f(3)) < 'a'", "'b'")])
def test_a_comparison_with_a_wrong_value_fails(scorer, call, wrong):
    task = task_of(F, call, "f(2)")
    assert verdicts(scorer, F, task) == [True] * 2 and not verdicts(scorer, f"def f(n): return {wrong}", task)[0]


def test_sides_have_the_values_that_the_test_states(scorer):
    """An equality that holds states both; a side that asks the answer nothing has its value on any answer."""
    same, fewer = task_of(F, "f(3) == f(-3)"), task_of("from decimal import Decimal\n" + F, "f(2) < Decimal(9)")
    own = "def Decimal(n): return 10 ** 9\ndef f(n): return 10 ** 8"
    scores = scorer.score([(same, F), (same, "def f(n): return 0"),
                           (fewer, F), (fewer, "def f(n): return 5"), (fewer, own)])
    assert [score.tests for score in scores] == [[True], [False], [True], [True], [False]]
    assert scores[1].faults == scores[4].faults == ["another value on one side of the comparison"]


@pytest.mark.parametrize("result", ["1", "null", '"tuple"', '["tuple"]', '["tuple", 1]', '["tuple", 9, 9]',
                                    '["list", 9, 9]'])
def test_data_of_a_comparison_is_checked(scorer, result):
    """As an answer's, and as a reference's, which settles nothing then."""
    forger = "import os\ndef f(n):\n    for d in range(3, 64):\n        try: os.write(d, b'[\"ok\", {}]\\n')\n" \
             "        except OSError: pass".format(result)
    if result != '["tuple", 1]':
        assert verdicts(scorer, forger, task_of(F, "f(3) == 9")) == [False]
    if result != '["tuple", 9, 9]':
        assert scorer.score([(task_of(forger, "f(3) == 9"), F)])[0].gradeable == [False]


GRADED = """from decimal import Decimal
from math import gcd as h
TABLE = {1: 2, 2: 5}
class Box:
    def __init__(self, n): self.n = n
    def double(self): return 2 * self.n
def g(n): return n + 1
def f(n): return n * n + 1"""
VALUES_OF_ANSWERS = (
    "f(N)", "g(N)", "h(4, 6)", "TABLE[1]", "Box(N).double()", "list(map(f, L))", "max(map(f, L))", "sorted(L, key=f)",
    "[f(x) for x in L]", "[x for x in L if f(x)]", "{x: g(x) for x in L}", "(lambda: f)()(N)", "(lambda x: f(x))(N)",
    "list(filter(f, L))", "f(N).bit_length()", "str(g(N)).upper()", "(y := f(N))", "sum(f(x) for x in L)",
    "min(L, key=lambda x: g(x))", "[*map(g, L)]", "f(n=N)", "{**{N: f(N)}}", "f'{f(N)}'", "len([f])", "[f, g][0](N)",
    "callable(f)", "next(map(f, L), N)", "any(map(f, L))", "isinstance(f(N), int)", "L.count(f(N))", "(y := N) + g(y)")
VALUES_OF_NOBODY = ("N", "L", "'a'", "None", "True", "-N", "(N,)", "{N: L}", "[N] * 2", "Decimal(N)", "len(L)", "[]",
                    "float('nan')", "sum(L)", "(lambda x: x)(N)", "[x for x in L]", "(y := N)")


def random_value(draw, depth):
    if depth == 0 or draw.random() < 0.6:
        text = draw.choice(VALUES_OF_ANSWERS if draw.random() < 0.6 else VALUES_OF_NOBODY)
        return text.replace("N", str(draw.randrange(4))).replace("L", str(draw.sample(range(5), draw.randrange(3))))
    shape = draw.choice(["({} + {})", "({} if {} else {})", "({} or {})", "({} and {})", "[{}]", "({}, {})", "abs({})",
                         "len([{}])", "str({})", "(not {})", "(lambda: {})()", "[{} for z in [1]]", "({})[0]", "f({})"])
    return shape.format(*(random_value(draw, depth - 1) for _ in range(shape.count("{}"))))


def random_test(draw, depth=2):
    left, right = random_value(draw, 2), random_value(draw, 2)
    form = draw.randrange(10)
    if form < 2:
        return left
    if form < 8:
        sign = draw.choice(["==", "==", "==", "!=", "<", "<=", ">", ">=", "is", "is not", "in", "not in"])
        return f"{left} {sign} {right}"
    if form == 8 or depth == 0:
        return f"{left} <= {right} == {random_value(draw, 1)}"
    return draw.choice(["not ({})", "({}) and ({})", "({}) or ({})", "({}) == ({})", "bool({})"]).format(
        *(random_test(draw, depth - 1) for _ in range(2)))


@pytest.mark.parametrize("seed", range(2))
def test_an_empty_answer_passes_no_test_that_can_be_graded(scorer, seed):
    draw = random.Random(seed)
    calls = [random_test(draw) for _ in range(250)]
    task = task_of(GRADED, *calls)
    unrelated = "import os\nfrom collections import deque\ndef total(values): return sum(values)\nx = y = 3"
    answers = [GRADED, "", "I do not know.", unrelated]
    right, empty, nothing, other = scorer.score([(task, answer) for answer in answers])
    assert right.tests == right.gradeable
    assert [call for call, *passed in zip(calls, empty.tests, nothing.tests, other.tests) if any(passed)] == []
    comparisons = [call for test, call in zip(right.tests, calls) if test and ("==" in call or "<" in call)]
    assert 50 < sum(right.gradeable) and 20 < len(comparisons)          # it does not settle by grading nothing


def test_an_answer_does_not_see_what_it_is_compared_with(scorer):
    spy = ("import sys\ndef f(n):\n    frame = sys._getframe()\n"
           "    while 'request' not in frame.f_locals: frame = frame.f_back\n"
           "    calls, reference = [frame.f_locals['request'][key] for key in ('calls', 'reference')]\n"
           "    return [[call.co_consts for call in calls], reference]")
    task = task_of("def f(n): return [[(3, 9)], None]", "f(3) == [[(3,)], None]")
    assert verdicts(scorer, spy, task) == [False]                   # it returned the right side, the reference did not
    assert scorer.score([(task, spy)])[0].faults == ["another value"]


def test_a_reference_is_evaluated_once_a_task(scorer, monkeypatch):
    """In two processes."""
    codes, original = [], Sandbox.run
    monkeypatch.setattr(Sandbox, "run", lambda self, code, *rest, **options: codes.append(code) or original(
        self, code, *rest, **options))
    task = task_of("def f(): return 12345")
    for _ in range(2):
        scorer.score([(task, f"def f(): return {i}") for i in range(5)])
    assert codes.count(task["ground_truth"]) == 2


def test_a_dead_child_is_an_error_not_a_zero():
    with pytest.raises(RuntimeError, match="child"):
        with Scorer(workers=1) as scorer:
            children = scorer.workers.get()
            children[1].child.kill()
            time.sleep(0.1)
            scorer.workers.put(children)
            scorer.score([(TASK, "def f(n): return 1")])


# ---- the published scorer's verdicts

LOOP = "def f(n):\n    total = 1\n    for i in range(2, n + 1):\n        total *= i\n    return total"
TEN = task_of(LOOP, *(f"f({n})" for n in range(10)))
HELPED = task_of("def g(n): return n\ndef f(n): return g(n)", *(f"f({n})" for n in range(10)))


ONE = task_of(LOOP, "f(3)")
NONE = task_of("def f(n): return n or None", "f(0)", "f(1)")
NAN = task_of("def f(n): return float('nan')", "f(1)")
ARRAY = task_of("def f(n, array=__import__('numpy').array): return array([n, n])", "f(1)")


# METHOD.md, section 6, has the rules: W words that give 0 at once, P the text after ```python, B the text between bare
# fences, N nothing else is cut, S globals and locals are apart, E equal and not None, A an alarm of a second.
@pytest.mark.parametrize("answer, task, published, ours", [
    (LOOP, TEN, 1.0, 1.0),                                                      # none of the rules takes anything away
    (f"\n\n{LOOP}\n\n", TEN, 1.0, 1.0),                                         # N: blank lines are Python
    ("import math\ndef f(n): return math.factorial(n)", TEN, 0.0, 1.0),         # S: f sees no global `math`
    ("def f(n):\n    import math\n    return math.factorial(n)", TEN, 1.0, 1.0),                  # S: a local one
    ("def g(n): return n\ndef f(n): return g(n)", HELPED, 0.0, 1.0),            # S: the reference's f fails, too
    ("def f(n): return 1 if n < 2 else n * f(n - 1)", TEN, 0.2, 1.0),           # S: f sees no f; 0! and 1! need none
    ("LIMIT = 1\ndef f(n): return LIMIT", TEN, 0.0, 0.2),                       # S: no global `LIMIT`
    ("from typing import List\ndef f(n: List[int]): return 1", TEN, 0.2, 0.2),  # S: annotations are read outside of f
    *((f"# {words}\n{LOOP}", TEN, 0.0, 1.0) for words in (                      # W, in a comment, also in a longer word
        "no need to import os", "import oscillations", "from os", "import sys", "from sys", "as in a sudoku",
        "exit() is not called", "nor quit()", "argparse", "transformers")),
    (f"I did not import os.\n```python\n{LOOP}\n```", TEN, 0.0, 1.0),           # W comes before P
    (LOOP + "\nos = sys = None  # import  os", TEN, 1.0, 1.0),                  # not W: two blanks
    (f"```python\n{LOOP}\n```", TEN, 1.0, 1.0),                                 # P
    (f"Here it is:\n```python\n{LOOP}\n```", TEN, 1.0, 1.0),                    # P, anywhere
    (f"```python\n{LOOP}\n```\nDone.", TEN, 1.0, 1.0),                          # P: to the next fence
    (f"```python\n{LOOP}", TEN, 1.0, 1.0),                                      # P: no next fence, to the end
    (f"```\n1 / 0\n```\n```python\n{LOOP}\n```", TEN, 1.0, 1.0),                # P comes before B
    (f"```python\n{LOOP}\n```\n```python\n1 / 0\n```", TEN, 1.0, 1.0),          # P: the first one alone
    (f"```python\nx = 1\n```\n```python\n{LOOP}\n```", TEN, 0.0, 1.0),          # P: the first one alone
    (f"```\n{LOOP}\n```", TEN, 1.0, 1.0),                                       # B
    (f"Here it is:\n```\n{LOOP}\n```\nDone.", TEN, 1.0, 1.0),                   # B, after prose
    (f"```py\n{LOOP}\n```", TEN, 0.0, 1.0),                                     # B: its first line is the name `py`
    (f"~~~\n{LOOP}\n~~~", TEN, 0.0, 1.0),                                       # N: a syntax error
    (f"Here it is:\n\n{LOOP}", TEN, 0.0, 1.0),                                  # N: prose is a syntax error
    ("    " + LOOP.replace("\n", "\n    "), TEN, 0.0, 1.0),                     # N: columns stay, an indentation error
    ("class Yes:\n    def __eq__(self, other): return True\ndef f(n, Yes=Yes): return Yes()", TEN, 1.0, 0.0),     # E
    ("def f(n): return n or None", NONE, 0.5, 1.0),                             # E: not None
    ("def f(n): return", TEN, 0.0, 0.0),                                        # E
    ("def f(n): return float('nan')", NAN, 0.0, 1.0),                           # E: NaN is not equal to NaN
    (ARRAY["ground_truth"], ARRAY, 0.0, 1.0),                                   # E: the comparison raises ValueError
    ("def f(n): raise SystemExit", TEN, 0.0, 0.0),                              # it ends the evaluation
    ("import time\ndef f(n, sleep=time.sleep):\n    while True:\n        try:\n            sleep(0.01)\n"
     "        except Exception: pass",
     ONE, 0.0, 0.0),                                                            # A is swallowed: it hangs
    ("def f(n, wait=__import__('time').sleep): wait(3)\n", ONE, 0.0, 0.0),       # A
])
def test_published_verdicts(compat, scorer, monkeypatch, answer, task, published, ours):
    monkeypatch.setattr(sandbox, "CLOCK", 4)                        # 2 s for a call that sleeps
    assert reward_of(verdicts(compat, answer, task)) == published
    if "while True" not in answer:
        assert reward_of(verdicts(scorer, answer, task)) == ours


def test_an_answer_that_ends_the_published_evaluation_is_counted(tmp_path):
    answers = {"a": LOOP, "b": "def f(n): raise SystemExit", "c": "import math\ndef f(n): return math.factorial(n)"}
    write_jsonl(tmp_path / "t.jsonl", [
        {"task": {"problem_description": name, **TEN}, "answer": answer,
         "dialogue_history": [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]}
        for name, answer in answers.items()])
    out = call_stage(5, f"a={tmp_path}/t.jsonl", "--compat", "--out", tmp_path / "out")
    assert "published: success" in out
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())["a"]
    assert metrics["success_rate"] == 2 / 3 and metrics["success_rate_compat"] == 1 / 3
    assert metrics["ends_evaluation"] == 1 and metrics["scorer"] in ("namespaces", "landlock")
    rows = read(tmp_path / "out" / "scored" / "a.jsonl")
    assert [row["tests_compat"] for row in rows] == [[True] * 10, [False] * 10, [False] * 10]


# ---- the data check

def test_data_check(tmp_path):
    references = ["def f(n):\n    return n", "def f(n):\n    return 1 // n",
                  "import no_such_package\ndef f(n):\n    return n",
                  "import random\ndef f(n):\n    return random.random()", "def f(n):\n    return False",
                  "def f(n):\n    return list({str(n), 'a', 'b', 'c', 'd'})", "def f(n):\n    return f",
                  "def f(n):\n    return n"]
    rows = [{"problem_description": "?", **task_of(reference, "f(0)", "f(1)", "f(1)",
                                                   "f(2) == 2" if i == 0 else "f(2)")}
            for i, reference in enumerate(references)]
    write_jsonl(tmp_path / "tasks.jsonl", rows)
    out = call_stage(1, "--check", tmp_path / "tasks.jsonl", "--out", tmp_path / "findings.jsonl")
    findings = [list(row["findings"]) for row in read(tmp_path / "findings.jsonl")]
    assert findings == [[], ["reference fails"], ["missing package"], ["random"], ["vacuous"],
                        ["order of a set"], ["not comparable"], ["repeated"]]
    constants = [row["constant"] for row in read(tmp_path / "findings.jsonl")]
    assert constants == [0.75, 0.5, 0, 0, 1, 0.5, 0, 0.5]                       # f(2) == 2 is True, and so 1
    assert "tasks.jsonl:2: reference fails (test0: ZeroDivisionError" in out
    assert "passes 40.6% of the tests and solves 12.5% of the tasks" in out
