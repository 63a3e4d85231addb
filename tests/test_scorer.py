"""The scorer: golden verdicts, values and their equality, gaps, tests that are comparisons, --compat."""
import datetime
import decimal
import fractions
import itertools
import json
import math
import pathlib
import random
import re
import threading
from collections import Counter, deque, OrderedDict

import numpy
import pytest

from colbench import questions, sandbox
from colbench.questions import Names
from colbench.sandbox import Sandbox
from colbench.scorer import reward_of, Scorer
from colbench.values import decode, encode, equal_values, is_encoded, readable
from conftest import call as call_stage
from conftest import read, write

F = "def f(n):\n    return n * n or None"
TASK = {"problem_description": "?", "ground_truth": "def f(n):\n    return n * n if n else None",
        "test_cases": {f"test{n}": f"f({n})" for n in (3, 2, 0, 1)}}


@pytest.fixture(scope="module")
def scorer():
    with Scorer(time_limit_s=0.5, workers=2) as scorer:
        yield scorer


def verdicts(scorer, answer, task=TASK):
    return scorer.score([(task, answer)])[0].tests


def task_of(reference, *calls):
    tests = {f"test{i}": call for i, call in enumerate(calls or ["f()"])}
    return {"problem_description": "?", "ground_truth": reference, "test_cases": tests}


def read_answers():
    """[(name, test calls, references, [(verdicts, why, answer), …]), …] of answers.txt."""
    sections = []
    for section in pathlib.Path(__file__).with_name("answers.txt").read_text().split("\n=== ")[1:]:
        title, _, text = section.rstrip("\n").partition("\n")
        name, _, calls = title.partition(": ")
        first, *others = f"\n{text}".split("\n--- ")
        references, answers = [first.strip()], []
        for kind, code in [other.partition("\n")[::2] for other in others]:
            verdicts, _, why = kind.partition(" (")
            if kind == "reference":
                references.append(code)
            else:
                verdicts = list(map(float, verdicts.split()))
                answers.append((verdicts, why[:-1], code.replace("{reference}", references[0])))
        sections.append((name, calls.split("; "), references, answers))
    return sections


SECTIONS = read_answers()
UNSETTLED, = [section for section in SECTIONS if section[0] == "what a reference cannot settle"]
PUBLISHED = [section for section in SECTIONS if section[0] == "published"]
GOLDEN = [section for section in SECTIONS if section[3] and section[0] not in (UNSETTLED[0], "published")]
CALLS = [re.split(r"\n(?! )", section[2][0]) for section in SECTIONS if not section[3]]


@pytest.mark.parametrize("name, calls, references, answers", GOLDEN, ids=lambda value: str(value)[:40])
def test_golden_verdicts(scorer, name, calls, references, answers):
    for reference in references:
        task = task_of(reference, *calls)
        for (expected, why, answer), score in zip(answers, scorer.score([(task, row[-1]) for row in answers])):
            assert all(score.gradeable) and score.tests == expected, (answer, score.faults)
            assert not why.startswith("said: ") or {why} == {f"said: {fault}" for fault in score.faults}


def test_the_fault_of_code_that_does_not_define_its_function_is_the_first(scorer):
    [score], said = scorer.score([(TASK, "x = 1 / 0\ndef g(n): return n")]), "ZeroDivisionError: division by zero"
    assert score[:3] == ([False] * 4, [True] * 4, [said] * 4)
    assert len(score.failed) == 3 and score.failed[0] == {"call": "f(3)", "expected": "9", "got": None, "said": said}


def test_code_that_never_loads_is_tried_once(scorer, monkeypatch):
    assert verdicts(scorer, F) == [True] * 4                        # the reference has run
    processes, original = [], Sandbox.run_process
    monkeypatch.setattr(scorer, "time_limit_s", 0.1)
    monkeypatch.setattr(sandbox, "LOAD_LIMIT_S", 0.1)
    monkeypatch.setattr(Sandbox, "run_process", lambda *arguments: processes.append(1) or original(*arguments))
    assert verdicts(scorer, "while True: pass\ndef f(n): return n") == [False] * 4 and len(processes) == 1


def test_values_are_compared_by_pythons_rules_but_for_the_rounding_of_floats():
    _, types, *sections = pathlib.Path(__file__).with_name("values.txt").read_text().split("\n=== ")
    names = {}
    exec(types.removeprefix("names"), names)
    for title, *pairs in map(str.splitlines, sections):
        for pair in filter(None, pairs):
            left, right = [json.loads(json.dumps(encode(eval(text, names)))) for text in pair.split(" ~ ")]
            assert is_encoded(left) and is_encoded(right)
            assert equal_values(left, right) == equal_values(right, left) == (title == "equal"), pair


def test_encoding_by_hand():
    assert encode((1, 2.5, True, None, "a")) == ["tuple", 1, 2.5, 1, None, "a"]
    assert encode({"b": {2, 1}, "a": 2 ** 60}) == [
        "dict", ["tuple", "b", ["set", 1, 2]], ["tuple", "a", ["int", "0x1000000000000000"]]]
    assert encode(decimal.Decimal("-0.75")) == ["ratio", "-3/4"] and encode(decimal.Decimal("0.1")) == ["ratio", "1/10"]
    assert encode(fractions.Fraction(10 ** 400, 3)) == ["ratio", f"{10 ** 400}/3"]
    assert encode(datetime.timedelta(days=1, seconds=2)) == ["timedelta", 1, 2, 0]
    assert encode(range(2, 9, 3)) == ["range", 3, 2, 5]
    assert encode(Counter) == ["type", "collections.Counter"] and encode(type(None)) == ["type", "builtins.NoneType"]
    own = type("int", (), {"__module__": "builtins"})               # others could define another of this name
    for value, name in ((object(), "object"), (own, "type"), (own(), "int")):
        with pytest.raises(TypeError, match=f"type {name} cannot be compared"):
            encode(value)
    assert not is_encoded(["complex"]) and not is_encoded(["complex", 1, 2, 3])
    for value in (7, "a", None, [], [1, (2,), {"a": 0.5}], (), {1, 2}, set(), "\ud83d\ude00", {"\ud800": 1}):
        assert readable(encode(value)) == repr(value)
    assert readable(encode(range(3))) == "range(3, 0, 1)"


def test_types_complex_numbers_and_surrogates_are_graded(scorer):
    task = task_of("def f(x): return type(x)\ndef g(x): return x ** 0.5\ndef h(x): return list(x)", "f(2)", "g(-4)",
                   "h('\\ud83d\\ude00')", "f(type('A', (), {})())")
    right = "class A: pass\nf = type\ndef g(x): return 2j\ndef h(x): return ['\\ud83d', '\\ude00']"
    wrong = "def f(x): return float\ndef g(x): return 2.1j\ndef h(x): return ['\\ud83d\\ude00']"
    right, wrong = scorer.score([(task, right), (task, wrong)])
    assert right.tests == right.gradeable == [True] * 3 + [False] and wrong.tests == [False] * 4
    pair = task_of("def f(): return '\\ud83d\\ude00'")
    assert [verdicts(scorer, f"def f(): return {text}", pair) for text in (
        "'\\ud83d\\ude00'", "'\\U0001f600'")] == [[True], [False]]


def test_decoding_gives_what_was_encoded():
    """So what is left of a test is evaluated with the values that an answer gave."""
    utc = datetime.timezone.utc
    for value in (None, 7, 2 ** 60, 0.5, 2j, "a", [1, [2]], (1,), {1, 2}, {"a": [1], "b": None}, b"ab", range(2, 9, 3),
                  range(4, 0, -2), range(0), Counter("aab"), OrderedDict(b=1, a=2), deque([1]),
                  fractions.Fraction(1, 3), datetime.date(2024, 1, 2), datetime.datetime(2024, 1, 2, 3),
                  datetime.datetime(2024, 1, 2, tzinfo=utc), datetime.time(1, 2), datetime.time(1, 2, tzinfo=utc),
                  datetime.timedelta(1, 2, 3), utc):
        decoded = decode(json.loads(json.dumps(encode(value))))
        assert decoded == value and type(decoded) is type(value)
    assert decode(encode(decimal.Decimal("0.1"))) == fractions.Fraction(1, 10)
    assert math.isnan(decode(encode(math.nan)))
    assert decode(encode(numpy.arange(6).reshape(2, 3))).tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(TypeError, match="no value can be made"):
        decode(["enum", "Color", "RED"])


@pytest.mark.parametrize("call, asked, rest", [
    ("f(2)", "f(2)", None),
    ("f(2) == [4]", "f(2)", None),
    ("abs(f(2) - 6.14) < .001", "f(2)", "abs(value_0 - 6.14)"),
    ("g(f(2), 1) == f(g(3))", "((g(f(2), 1)), (f(g(3))))", None),
    ("round(f(2), 2)", "f(2)", "round(value_0, 2)"),
    ("list(f(3)) == [0, 1]", "list(f(3))", None),
    ("abs(Box(1).n - 1) < 1e-9", "Box(1).n", "abs(value_0 - 1)"),
    ("max(f(2), 6.14) == 6.14", "f(2)", "max(value_0, 6.14)"),
    ("f(2).upper().split() == L", "f(2).upper().split()", None),
    ("sum(abs(a - b) for a, b in zip(f(2), [3.0])) < 1", "f(2)", "sum((abs(a - b) for a, b in zip(value_0, [3.0])))"),
    ("(n := f(2)) == n * 2", "f(2)", "(((n := value_0)), (n * 2))"),
    ("(n := 2) * 2 == f(n)", "(((n := 2) * 2), (f(n)))", None),
    ("[f(x) for x in L] == L", "[f(x) for x in L]", None),
    ("(f(3) or f(-1)) + 1", "f(3) or f(-1)", "value_0 + 1"),
    ("(seed(1), f(2))[1]", "(seed(1), f(2))", "value_0[1]"),
    ("sorted([2, 1], key=f)", "f", "sorted([2, 1], key=value_0)")])
def test_an_answer_gets_the_calls_of_the_tested_functions(call, asked, rest):
    """And what around them tells nothing of the value that is wanted. The last, f, is no data: then more is asked."""
    test = questions.Test(call)
    test.learn_solution(["ok", ["tuple", 1, 1] if test.operator else 1], Names(set(), {"f", "g", "Box"}))
    assert (test.asked, test.rest, test.is_settled) == (asked, rest, rest is None)
    if asked == "f":
        test.settle(["error", "TypeError: a value of type function cannot be compared"], None)
        assert (test.asked, test.rest) == (call, None)
        test.settle(["ok", 1], None)
        assert test.is_settled and test.asked_on_solution == [1]


def test_no_answer_says_that_a_test_cannot_be_graded(scorer):
    answer = "def total(values): raise type('not gradeable', (Exception,), {})('x')"
    [score] = scorer.score([({"ground_truth": "total = sum", "test_cases": {"a": "total([1])"}}, answer)])
    assert score.gradeable == [True] and score.faults == ["no value: x"]


@pytest.mark.parametrize("gradeable, reason, reference", UNSETTLED[-1])
def test_what_a_reference_cannot_settle_is_never_credited(scorer, monkeypatch, caplog, gradeable, reason, reference):
    monkeypatch.setattr(scorer, "time_limit_s", 0.1)
    score = scorer.score([({**TASK, "ground_truth": reference}, reference)])[0]
    assert score.tests == score.gradeable == gradeable              # the reference itself passes what can be graded
    assert all(reason in fault and "not gradeable" in fault for fault in score.faults if fault)
    assert (f"no test can be graded of {reference!r}" in caplog.text) == (not any(gradeable))


def test_an_empty_function_passes_none_of_a_reference_that_returns_nothing(scorer):
    tasks = [task_of("def f(n): print(n)", "f(1)", "f(2)"), task_of("def f(n): return print(n)", "f(1)"),
             task_of("def f(n): return None", "f(1) is None", "f(2) == None", "f(3)"),
             task_of("def f(values):\n    values.sort()\n    return", "f([2, 1])")]
    for task in tasks:
        for answer in (task["ground_truth"], "def f(*_): pass"):
            [score] = scorer.score([(task, answer)])
            assert score.gradeable == score.tests == [False] * len(task["test_cases"])
            assert "asks the answer nothing" in score.faults[0]


FAKE = "class Yes:\n    __hash__ = None\n" + "".join(
    f"    def __{name}__(self, *other): return True\n" for name in (
        "eq", "ne", "lt", "le", "gt", "ge", "contains", "bool", "init")) + "Decimal = Yes\ndef f(n): return Yes()"


def test_a_comparison_is_of_values_and_no_object_decides_it(scorer):
    """Every side that is no literal is asked of the answer; a test that asks it nothing cannot be graded."""
    comparisons, asked_somewhere, not_comparable, asked_nothing = CALLS
    calls = comparisons + asked_somewhere + not_comparable + asked_nothing
    task = task_of("from decimal import Decimal\n" + F, *calls)
    answers = [F, FAKE, "", "x = 1\ndef g(n): return n * n or None", "def f(n): return -1"]
    right, fake, empty, unrelated, wrong = scorer.score([(task, answer) for answer in answers])
    passed = {call for call, test in zip(calls, right.tests) if test}
    assert right.tests == right.gradeable and passed == {*comparisons, *asked_somewhere}
    assert not any(fake.tests + empty.tests + unrelated.tests)
    assert not any(wrong.tests[len(comparisons):])
    assert set(right.faults[-len(asked_nothing):]) == {"not gradeable: it asks the answer nothing"}


@pytest.mark.parametrize("call, wrong", [
    ("f(3) == 9", "8"), ("9 == f(3)", "None"), ("f(3) == [9]", "[9]"), ("f(3) != 8", "8"), ("f(0) is None", "0"),
    ("f(3) < 10", "10"), ("f(3) < 10", "'9'"), ("f(3) < 10", "10 ** 400"), ("f(3) > 8", "8"),
    ("f(3) >= 9", "8.99"), ("f(3) == f(-3)", "n"), ("f(3) < 10", "float('inf')"), ("str(f(3)) < 'a'", "'b'")])
def test_a_comparison_with_a_wrong_value_fails(scorer, call, wrong):
    task = task_of(F, call, "f(2)")
    assert verdicts(scorer, F, task) == [True] * 2 and not verdicts(scorer, f"def f(n): return {wrong}", task)[0]


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
GRAMMAR = {                                                         # a word stands for one of these texts
    "TEST": ["VALUE"] * 10 + ["VALUE SIGN VALUE"] * 30 + ["VALUE <= VALUE == VALUE"] * 5 + [
        "not (TEST)", "(TEST) and (TEST)", "(TEST) or (TEST)", "(TEST) == (TEST)", "bool(TEST)"],
    "SIGN": ["==", "==", "==", "!=", "<", "<=", ">", ">=", "is", "is not", "in", "not in"],
    "VALUE": ["ANSWERS"] * 12 + ["NOBODYS"] * 8 + [
        "(VALUE + VALUE)", "(VALUE if VALUE else VALUE)", "(VALUE or VALUE)", "(VALUE and VALUE)", "[VALUE]",
        "(VALUE, VALUE)", "abs(VALUE)", "len([VALUE])", "str(VALUE)", "(not VALUE)", "(lambda: VALUE)()",
        "[VALUE for z in [1]]", "(VALUE)[0]", "f(VALUE)"],
    "ANSWERS": [
        "f(N)", "g(N)", "h(4, 6)", "TABLE[1]", "Box(N).double()", "list(map(f, L))", "max(map(f, L))",
        "sorted(L, key=f)", "[f(x) for x in L]", "[x for x in L if f(x)]", "{x: g(x) for x in L}", "(lambda: f)()(N)",
        "(lambda x: f(x))(N)", "list(filter(f, L))", "f(N).bit_length()", "str(g(N)).upper()", "(y := f(N))",
        "sum(f(x) for x in L)", "min(L, key=lambda x: g(x))", "[*map(g, L)]", "f(n=N)", "{**{N: f(N)}}", "f'{f(N)}'",
        "len([f])", "[f, g][0](N)", "callable(f)", "next(map(f, L), N)", "any(map(f, L))", "isinstance(f(N), int)",
        "L.count(f(N))", "(y := N) + g(y)"],
    "NOBODYS": ["N", "L", "'a'", "None", "True", "-N", "(N,)", "{N: L}", "[N] * 2", "Decimal(N)", "len(L)", "[]",
                "float('nan')", "sum(L)", "(lambda x: x)(N)", "[x for x in L]", "(y := N)"],
    "N": ["0", "1", "2", "3"],
    "L": ["[]", "[0]", "[1]", "[3]", "[4]", "[0, 2]", "[1, 3]", "[2, 1]", "[4, 0]"]}
WORDS = re.compile(rf"\b(?:{'|'.join(GRAMMAR)})\b")


def drawn(draw, word):
    """A text for a word of the grammar."""
    return WORDS.sub(lambda match: drawn(draw, match[0]), draw.choice(GRAMMAR[word]))


@pytest.mark.parametrize("seed", range(2))
def test_an_empty_answer_passes_no_test_that_can_be_graded(scorer, seed):
    draw = random.Random(seed)
    calls = [drawn(draw, "TEST") for _ in range(250)]
    task = task_of(GRADED, *calls)
    unrelated = "import os\nfrom collections import deque\ndef total(values): return sum(values)\nx = y = 3"
    answers = [GRADED, "", "I do not know.", unrelated]
    right, empty, nothing, other = scorer.score([(task, answer) for answer in answers])
    assert right.tests == right.gradeable
    assert [call for call, *passed in zip(calls, empty.tests, nothing.tests, other.tests) if any(passed)] == []
    comparisons = [call for test, call in zip(right.tests, calls) if test and ("==" in call or "<" in call)]
    assert 50 < sum(right.gradeable) and 20 < len(comparisons)          # it does not settle by grading nothing


def test_references_run_once_a_task_and_scores_keep_the_order_of_answers(scorer, monkeypatch):
    """Once is in two processes, of one request. The time limit of one answer stops no other."""
    codes, original = [], Sandbox.run
    monkeypatch.setattr(scorer, "time_limit_s", 0.1)
    monkeypatch.setattr(Sandbox, "run", lambda self, code, *rest, **options: codes.append(code) or original(
        self, code, *rest, **options))
    references = [f"def f(): return {12345 + i}" for i in range(3)]
    pairs = []
    for i in range(6):
        answer = f"def f():\n    if {i} % 4 == 0:\n        while True: pass\n    return {12345 + i % 3}"
        pairs.append((task_of(references[i % 3]), answer))
    for _ in range(2):
        assert [score.tests for score in scorer.score(pairs)] == [[i % 4 != 0] for i in range(6)]
    assert list(map(codes.count, references)) == [1, 1, 1]
    assert threading.active_count() < 20


def test_a_dead_child_is_an_error_not_a_zero():
    with pytest.raises(RuntimeError, match="child"), Scorer(workers=1) as scorer:
        children = scorer.workers.get()
        children[1].child.kill()
        children[1].child.wait()
        scorer.workers.put(children)
        scorer.score([(TASK, "def f(n): return 1")])


def test_published_verdicts(scorer, monkeypatch):
    monkeypatch.setattr(sandbox, "CLOCK", 4)                        # 2 s for a call that sleeps
    with Scorer(time_limit_s=0.5, workers=1, compat=True) as compat:
        for (_, calls, references, answers), number in itertools.product(PUBLISHED, (0, 1)):
            task, graded_by = task_of(*references, *calls), (compat, scorer)[number]
            rows = [row for row in answers if number < len(row[0])]
            scores = graded_by.score([(task, row[-1]) for row in rows])
            for (rewards, why, answer), score in zip(rows, scores, strict=True):
                assert reward_of(score.tests) == rewards[number], (why, answer)


def test_data_check(tmp_path):
    checked = [                                                     # body of f(n), findings, the best constant answer
        ("return n", [], 0.5), ("return 1 // n", ["reference fails"], 0.5),     # f(2) == 2 asks for 2
        ("import no_such_package", ["missing package"], 0), ("import random; return random.random()", ["random"], 0),
        ("return False", ["vacuous"], 1), ("return list({str(n), 'a', 'b', 'c', 'd'})", ["order of a set"], 0.5),
        ("return f", ["not comparable"], 0), ("return n", ["repeated"], 0.5)]
    tasks = [task_of(f"def f(n): {body}", "f(0)", "f(1)", "f(1)", "f(2)") for body, _, _ in checked]
    tasks[0]["test_cases"]["test3"] = "f(2) == 2"
    out = call_stage(1, "--check", write(tmp_path / "tasks.jsonl", tasks), "--out", tmp_path / "findings.jsonl")
    rows = read(tmp_path / "findings.jsonl")
    assert [(list(row["findings"]), row["constant"]) for row in rows] == [row[1:] for row in checked]
    assert "tasks.jsonl:2: reference fails (test0: ZeroDivisionError" in out
    assert "passes 37.5% of the tests and solves 12.5% of the tasks" in out
