"""The scorer: (task, answers) -> verdicts, with golden verdicts, faults and ungradeable tests."""
import time

import pytest

import common

TASK = {"problem_description": "?", "ground_truth": "def f(n):\n    return n * n if n else None",
        "test_cases": {f"test{n}": f"f({n})" for n in (3, 2, 0, 1)}}


@pytest.fixture(scope="module")
def scorer():
    with common.Scorer(time_limit_s=0.5) as scorer:
        yield scorer


def verdicts(scorer, answer, task=TASK):
    return scorer.score(task, [answer])[0][0]


@pytest.mark.parametrize("answer, expected", [
    ("def f(n):\n    return n ** 2 if n else None", [1, 1, 1, 1]),
    ("import math\ndef f(n):\n    return round(math.pow(n, 2)) if n else None", [1, 1, 1, 1]),
    ("def g(n): return n * n\ndef f(n): return g(n) or None", [1, 1, 1, 1]),                           # its own helper
    ("def f(n, total=0):\n    return (f(n - 1) + 2 * n - 1 if n > 0 else 0)", [1, 1, 0, 1]),          # recursion
    ("Here it is:\n```python\ndef f(n):\n    return n * n or None\n```\nI hope it helps.", [1, 1, 1, 1]),
    ("```\ndef f(n):\r\n    return n * n or None", [1, 1, 1, 1]),                                      # not closed, CRLF
    ("def f(n): return float(n * n) or None", [1, 1, 1, 1]),                                           # 9.0 == 9
    ("def f(n): return (n * n,)", [0, 0, 0, 0]),
    ("def f(n): return str(n * n)", [0, 0, 0, 0]),
    ("this is not python", [0, 0, 0, 0]),
    ("", [0, 0, 0, 0]),
    ("class Yes:\n    def __eq__(self, other): return True\ndef f(n): return Yes()", [0, 0, 0, 0]),
    ("calls = []\ndef f(n):\n    calls.append(n)\n    return n * n or None if len(calls) == 1 else 7", [1, 1, 1, 1]),
    # faults cost their own test alone
    ("def f(n):\n    while n == 2: pass\n    return n * n or None", [1, 0, 1, 1]),
    ("def f(n):\n    while n == 2:\n        try:\n            while True: pass\n        except BaseException: pass\n"
     "    return n * n or None", [1, 0, 1, 1]),
    ("def f(n):\n    if n == 2: raise SystemExit\n    return n * n or None", [1, 0, 1, 1]),
    ("import os\ndef f(n):\n    if n == 2: os._exit(0)\n    return n * n or None", [1, 0, 1, 1]),
    ("import os\ndef f(n):\n    if n == 2: os.kill(os.getpid(), 9)\n    return n * n or None", [1, 0, 1, 1]),
    ("def f(n):\n    return 'x' * 10 ** 10 if n == 2 else n * n or None", [1, 0, 1, 1]),
    ("def f(n):\n    return 'x' * 10 ** 7 if n == 2 else n * n or None", [1, 0, 1, 1]),
    ("def f(n):\n    return f(n) if n == 2 else n * n or None", [1, 0, 1, 1]),
    ("def f(n):\n    print('x' * 1000, flush=True)\n    return n * n or None", [1, 1, 1, 1]),
])
def test_golden_verdicts(scorer, answer, expected):
    assert verdicts(scorer, answer) == [bool(x) for x in expected]


def test_a_reference_that_raises_is_no_credit_for_anybody(scorer):
    task = {**TASK, "ground_truth": "def f(n):\n    return 6 // (n - 2)"}
    verdicts, gradeable = scorer.score(task, [task["ground_truth"]])
    assert gradeable == [True, False, True, True]
    assert verdicts == [[True, False, True, True]]


def test_values_are_compared_with_their_structure(scorer):
    task = {**TASK, "ground_truth": "def f(n):\n    return {'a': [1, (2, 3)], 'b': {4, 5}, 'c': None, 'd': True}"}
    same = "def f(n):\n    return {'d': 1, 'c': None, 'b': {5, 4}, 'a': [True, (2.0, 3)]}"
    other = "def f(n):\n    return {'a': [1, [2, 3]], 'b': {4, 5}, 'c': None, 'd': True}"
    assert scorer.score(task, [same, other])[0] == [[True] * 4, [False] * 4]


def test_a_dead_child_is_an_error_not_a_zero():
    with pytest.raises(RuntimeError, match="child"):
        with common.Scorer() as scorer:
            scorer.child.kill()
            time.sleep(0.1)
            scorer.score(TASK, ["def f(n): return 1"])


def test_reward_by_hand():
    assert common.reward_of([True, True, False, True]) == 0.75
