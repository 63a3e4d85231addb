"""extract_code: the answers that models write give their code, whatever stands around it, in bounded time."""
import ast
import contextlib
import functools
import io
import json
import pathlib
import random
import sysconfig
import time
import types
import warnings

import pytest

from colbench import backend, make_tasks
from colbench.extract_code import compiled_statements, names_of_calls, pieces_of
from colbench.sandbox_worker import execute

F = "def f(n):\n    return n * n or None"
CALLS = ("f(3)", "f(2)", "f(0)", "f(1)")
WANTED = [9, 4, None, 1]


def results(answer, calls=CALLS):
    """What the calls return after the pieces have run as in the scorer (without its walls); faults as strings."""
    pieces = [compiled_statements(piece.nodes) for piece in pieces_of(answer, names_of_calls(calls))]
    values = []
    for call in calls:
        module = types.ModuleType("answer")
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                execute(pieces, module)
                values.append(eval(call, vars(module)))
        except Exception as error:
            values.append(f"{type(error).__name__}: {error}")
    return values


# ---- where the code is in a message

SQUARES = {
    "marker's line, import before": "I WANT TO ANSWER: import math\ndef f(n):\n    return math.prod([n, n]) or None",
    "marker's line, helper after": "I WANT TO ANSWER: def f(n): return g(n)\ndef g(n):\n    return n * n or None",
    "after the marker was cut off": " def f(n): return math.prod([n, n]) or None\nimport math",
    "docstring, fence at the margin": '```python\ndef f(n):\n    """Squares.\n```python\nf(3)\n```\n    """\n'
                                      '    return n * n or None\n```',
    "on the fence's line, no language": "```def f(n):\n    return n * n or None\n```\nDone.",
    "bare words that parse": f"so it is\n{F}\nNote: this\nn\n",
    "prose after helpers": "def g(n):\n    return n * n\n\nNow the main function:\n\ndef f(n):\n"
                           "    return g(n) or None",
    "backticks in strings": "Sure:\n\ndef f(n):\n    fence = '```python'\n    tick = \"`\"\n    return n * n or None\n"
                            "\nThat is all.",
    "indented explanation": f"Code:\n{F}\n\n    This squares n; don't worry (really.\n",
    "assigned usage, another fence": f"```python\n{F}\n```\nExample:\n```python\nresult = f('a string')\n```",
    "input, another fence": f"Read it:\n```python\nn = int(input())\n```\n```python\n{F}\n```",
    "class in its own fence": "```python\nclass Solution:\n    def square(self, n):\n        return n * n or None\n"
                              "```\nthen\n"
                              "```python\nf = Solution().square\n```",
    "lambda in a sentence": "Use `n` so: `f = lambda n: n * n or None`.",
    "end of text": f"{F}\n</s>",
    "cut in a second version": f"Here:\n{F}\n\nA faster one:\n\ndef f(n):\n    total = 0\n    for i in range(n",
    "draft before the marker": f"I could write\n```python\nraise SystemExit\ndef f(n): return 0\n```\n"
                               f"I WANT TO ANSWER:\n```python\n{F}\n```",
    "calls between definitions, then cut": "import sys\nTABLE = {}\nTABLE.update(two=2)\n\ndef f(n):\n"
                                           "    return n ** TABLE['two'] or None\n\n"
                                           "def main():\n    print(f(",
    "a session before": f">>> f(3)\n9\nassert f(3) == 9\n{F}\nThat is all.",
    "try import": "Well:\ntry:\n    import nothing_of_the_kind as np\nexcept ImportError:\n    np = None\n\n"
                  + F + "\nDone.",
    "unindented docstring": 'Here.\ndef f(n):\n    """\nSquares (a number.\nIt\'s easy:\n\n    x = (\n"""\n'
                            '    return n * n or None\nDone.',
    "old Mac line ends": f"Here:\r```\r{F}\r```\r".replace("\n", "\r"),
    "backslash": "So\ndef f(n): \\\n    return n * n \\\n    or None\nDone.",
}


@pytest.mark.parametrize("name", SQUARES)
def test_code_is_found_where_models_put_it(name):
    assert results(SQUARES[name]) == WANTED


@pytest.mark.parametrize("answer", ["I do not know.", "Use `f(n)`.", "```python\ndef f(n):\n    return n *\n```",
                                    "def f(n) return n * n",
                                    "I WANT TO ANSWER:", "```\nI WANT TO ANSWER\n```", "f = ", "x = (", "'''", "\0",
                                    "\ud800", "\ufeff"])
def test_no_code(answer):
    assert all("Error" in result for result in map(str, results(answer)))


# ---- right answers whose surroundings were taken for code, or whose code for surroundings

T = "def total(values):\n    return sum(values)"
READS_TABLE = "def total(values):\n    return sum(TABLE[value] for value in values)"


def fences(*codes):
    return "\nThen:\n".join(f"```python\n{code}\n```" for code in codes)


FENCED_T = f"```python\n{T}\n```"
WRONG_T = f"{T} + 1"
FENCED_WRONG_T = f"```python\n{WRONG_T}\n```"
INDENTED_T = "    def total(values):\n        return sum(values)"
TOTALS = {
    # a line before it is Python, and fails
    "a: the call is shown": f"Function: total(values)\n{T}",
    "a: a formula in the fence": f"```python\ntotal = sum(values) * factor\n\n{T}\n```",
    "a: an import that fails": f"import nothing_of_the_kind\nfrom nothing import *\n{T}",
    # an example after it names something as it, or as a builtin
    "b: the result has its name": f"{T}\n\nExample:\ntotal = total([5, 7])",
    "b: sum": f"{T}\nwhich gives\nsum = 6",
    "b: sum before": f"With\n```\nsum = 6\n```\nwe write\n{FENCED_T}",
    # set-up apart from the function
    "c: a table is filled": fences("TABLE = {}\nfor n in range(5):\n    TABLE[n] = n", READS_TABLE),
    "c: it is made": fences("def make(start):\n    def add(values):\n        return sum(values, start)\n    return add",
                            "total = make(0)"),
    "c: a call fills it": fences("TABLE = {}", "TABLE.update({1: 1, 2: 2, 3: 3, 4: 4})", READS_TABLE),
    "c: a global that changes": fences("COUNT = 0", "def total(values):\n    global COUNT\n    COUNT += 1\n"
                                       "    return sum(values)"),
    # the function in the open, its tests in a fence
    "d: tests in a fence": f"{T}\n\nTests:\n```python\ndef test_total():\n    assert total([1, 2]) == 3\n\n"
                           f"test_total()\n```",
    # prose that looks like the head of a block, or like a decorator
    "e: a call and words": f"total(values) adds up the numbers:\n{INDENTED_T}",
    "e: an assignment and words": f"x = the sum:\n{INDENTED_T}",
    # signs
    "f: a string of several lines": "I WANT TO ANSWER: def total(values):\n    return sum(values) + len(\"\"\"\n"
                                    "  a\n\"\"\") - 5",
    # thoughts, and other versions than the last
    "g: the marker in thoughts": f"<think>\nI WANT TO ANSWER:\n{WRONG_T}\nNo.\n</think>\nI WANT TO ANSWER:\n{T}",
    "g: the end of thoughts in a string": "So:\n\ndef total(values):\n    return sum(values) + len('</think>') - 8\n"
                                          "Done!",
    "g: a fence, then the open": f"{FENCED_WRONG_T}\nThat is wrong. Better:\n\n{T}\n\nDone!",
    "g: a signature after": f"{FENCED_T}\nIts signature:\n```python\ndef total(values: list) -> int: ...\n```",
    "g: a first part after": "```python\ndef total(values):\n    result = 0\n    for value in values:\n"
                             "        result += value\n    return result\n```\nLine by line:\n```python\n"
                             "def total(values):\n    result = 0\n```\nThis begins with 0.",
    # examples behind the function, in its own fence
    "h: the result has its name": f"```python\n{T}\n\ntotal = total([5, 7])\nprint(total)\n```",
    # signs around it
    "j: a backtick": f"`{T}`",
    # in a string
    "k: three quotes": f"'''python\n{T}\n'''\nThat is all.",
    "k: escaped lines": T.replace("\n", "\\n"),
    # others
    "future": "Sure!\n\nfrom __future__ import annotations\n\ndef total(values: List[Unknown]) -> int:\n"
              "    return sum(values)\n\nDone!",
    "annotations without their import": "```python\ndef total(values: List[float], rate: Optional[float] = None):\n"
                                        "    return sum(values)\n```",
}


@pytest.mark.parametrize("name", TOTALS)
def test_right_answers_in_ordinary_shapes(name):
    assert results(TOTALS[name], ["total([1, 2])", "total([3, 4])"]) == [3, 7]


@pytest.mark.parametrize("answer, value", [
    # a function that is imported
    ("```python\ndef helper(): pass\n```\nand\n```python\nfrom math import fsum as total\n```", 3),
    ("```bash\npip install x\n```\n```python\nfrom math import fsum as total\n```", 3),
    ("It is\n```\nfrom math import fsum as total\n```", 3),
    # what is thought is not said
    (f"<think>\n{FENCED_T}\n</think>\nI do not know.", "NameError: name 'total' is not defined"),
    # the last version counts, also if it is only something callable
    (f"{FENCED_T}\nNo, this:\n{FENCED_WRONG_T}", 4), (f"{FENCED_T}\nNo, this:\n{WRONG_T}\nDone!", 4),
    (f"```python\n{T}\n\ntotal = max\n```", 2),
    # strings count where nothing else does
    (f"```python\n{WRONG_T}\n```\n" + json.dumps({"code": T}), 4),
    # what the answer's own code does to a builtin is not undone, nor is something callable: Python would not, either
    ("```python\nlen = 3\n\ndef total(values):\n    return len\n```", 3),
    ("```python\nsum = 6\n\n" + T + "\n```", "TypeError: 'int' object is not callable"),
    (f"```python\n{T}\n```\n```python\nimport functools\nsum = functools.partial(max)\n```", 2)])
def test_what_counts_where_there_is_more_than_one(answer, value):
    assert results(answer, ["total([1, 2])"]) == [value]


# ---- code that nobody here wrote, and references of tasks, in the ways that models write

SAMPLE = 100

# {code}: the function. {indented}: by four columns. {listed}: by three, as under "1. ". {json}: as a string of JSON.
# {name}: its name. {first}, {rest}: its first line, and the others.
WRAPPINGS = {
    # no fence
    "plain": "{code}",
    "prose before and after": "Sure, here it is (see the notes below):\n\n{code}\n\nNotes:\n- It's fast.\n- It has no "
                              "side effects.",
    "prose, indented code": "The code is as follows.\n\n    {indented}\n\nI hope that this helps.",
    "usage after, no fence": "{code}\n\nExample usage:\n\nresult = {name}(1, 2)\nprint(result)",
    "HTML": "<p>Here:</p>\n<pre><code class=\"language-python\">{code}</code></pre>\n<p>Done.</p>",
    "answer tags in the lines": "<answer>{code}</answer> That is it.",
    "label and tags": "Answer: <code>{code}</code>",
    "thoughts": "<think>\nA draft:\n```python\ndef {name}(a, b=3):\n    return None\n```\nI WANT TO ANSWER it so.\n"
                "</think>\n{code}",
    "JSON in a tool call": "<tool_call>\n{{\"name\": \"answer\", \"arguments\": {{\"code\": {json}}}}}\n</tool_call>",
    # fences
    "fence, prose around": "Sure! Here's how it's done:\n\n```python\n{code}\n```\n\nThis `{name}` function doesn't "
                           "need anything else.",
    "tildes": "I'd write:\n~~~python\n{code}\n~~~\nDone.",
    "open fence": "Here you are:\n```python\n{code}",
    "one-line fence": "```python {first}\n{rest}\n```",
    "imports in another fence": "First:\n```python\nimport os\nimport sys\n```\nThen:\n```python\n{code}\n```",
    "helper in another fence": "A helper:\n```python\ndef some_helper(values, start=0):\n"
                               "    return sum(values, start)\n"
                               "```\nThe function:\n```python\n{code}\n```",
    "usage after": "```python\n{code}\n```\nUse it:\n```python\nresult = {name}(1, 2)\nprint(result)\n```\nOutput:\n"
                   "```\n3\n```",
    "tests in the fence": "```python\n{code}\n\n# Tests\nassert {name}(1) == 2\nprint({name}(2))\n```",
    "main guard": "```python\n{code}\n\n\nif __name__ == \"__main__\":\n    print({name}(int(input())))\n```",
    "numbered steps": "1. **Understand** the request: it's simple.\n2. **Write** the function:\n\n   ```python\n"
                      "   {listed}\n   ```\n\n3. **Use** it.",
    "a signature in a fence before": "Its signature:\n```python\ndef {name}(a, b=3): ...\n```\nThe code:\n\n{code}",
    "import apart, no fence": "First we do this:\nimport math\nThen it's this:\n{code}\nDone.",
    "cut after it": "{code}\n\ndef helper(values):\n    for value in values:\n        print(value, [",
    "marker after": "{code}\n\nI WANT TO ANSWER",
    # markers
    "marker and fence": "I know enough.\n\nI WANT TO ANSWER:\n\n```python\n{code}\n```",
    "marker's own line, cut": " {code}",
    "marker's own line, prose after": "I WANT TO ANSWER: {code}\n\nThat's how it's done.",
    "marker in a fence": "```python\n# I WANT TO ANSWER:\n{code}\n```",
    "CRLF, fence": "So:\n\n```python\n{code}\n```\n\nDone.",
    "CRLF, no fence": "Sure, here it is:\n\n{code}\n\nNotes:\n- It's fast.",
}


@functools.cache
def sample_of_functions():
    """[(source, name), …] of the references of all families, and of 100 top-level functions of Python's standard
    library with their decorators, at most three of a file."""
    rng, functions = random.Random(0), {}
    files = [path for path in sorted(pathlib.Path(sysconfig.get_path("stdlib")).rglob("*.py"))
             if "site-packages" not in path.parts]
    rng.shuffle(files)
    while len(functions) < SAMPLE:
        source, in_file = files.pop().read_text("utf-8", "replace"), []
        if "\f" in source or "\ufffd" in source:                    # the end of a line for some; another encoding
            continue
        for node in functions_of(source):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            in_file.append(("\n".join(source.split("\n")[first - 1:node.end_lineno]), node.name))
        functions.update(dict.fromkeys(rng.sample(in_file, min(3, len(in_file)))))
    for task in make_tasks(backend, 14, 5, "train", "some"):
        functions[task["ground_truth"], task["test_cases"]["test1"].partition("(")[0]] = None
    return list(functions)


def functions_of(source):
    """The syntax trees of the functions at the top level of a source, none where it is broken on purpose."""
    with warnings.catch_warnings(), contextlib.suppress(SyntaxError, ValueError):
        warnings.simplefilter("ignore")
        return [node for node in ast.parse(source).body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return []


def wrapped(code, name, wrapping):
    """The answer that has the function `code` in a wrapping."""
    lines = code.split("\n")
    answer = WRAPPINGS[wrapping].format(
        code=code, name=name, first=lines[0], rest="\n".join(lines[1:]), indented="\n    ".join(lines),
        listed="\n   ".join(lines), json=json.dumps(code))
    return answer.replace("\n", "\r\n") if "CRLF" in wrapping else answer


@functools.cache
def function_of(source, name):
    """The syntax tree, as text, of the last function of this name that a source defines, or None."""
    dumps = [ast.dump(node) for node in functions_of(source) if node.name == name]
    return dumps[-1] if dumps else None


def is_lost(code, name, wrapping):
    """Does the answer's code lack the function that it has?"""
    source = "\n".join(piece.source for piece in pieces_of(wrapped(code, name, wrapping), {name}))
    return source.strip() != code.strip() and function_of(source, name) != function_of(code, name)


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_functions_of_the_standard_library_and_references(wrapping):
    assert [name for code, name in sample_of_functions() if is_lost(code, name, wrapping)] == []


# ---- time

LONG = {
    "prose and code by turns": lambda size: "This is prose.\nx = 1\n" * (size // 21),
    "functions that do not parse": lambda size: "def f(x: return\n" * (size // 16),
    "an assigned bracket": lambda size: "x = " + "(" * size,
    "nested blocks": lambda size: "".join(" " * i + "if 1:\n" for i in range(int((2 * size) ** 0.5))),
    "fences": lambda size: "```python\n" * (size // 10),
    "inline code": lambda size: "`x = 1` " * (size // 8),
    "open strings": lambda size: "x = '''\n\"\"\"\n" * (size // 12),
    "docstrings with fences": lambda size: 'def f():\n """a\n ```\n f()\n ```\n """\n' * (size // 37) + "It is so.",
    "cut functions": lambda size: "def f():\n x=1\n It is so.\n" * (size // 27),
    "labels": lambda size: "a: def " * (size // 7),
    "strings": lambda size: '"def f(): 0" ' * (size // 13),
    "versions": lambda size: "".join(f"def f():\n    x = {i}\nIt is.\n" for i in range(size // 30)),
}


@pytest.mark.parametrize("name", LONG)
def test_long_texts_take_bounded_time(name):
    """8 KB are twice what 1,024 tokens hold. A load has 5 s of processor time; these texts need half a second."""
    began = time.process_time()
    pieces_of(LONG[name](8_000), set())
    assert time.process_time() - began < 5


@pytest.mark.parametrize("noise", ["x = 1\n" * 300 + "x = (\n", "total = 3 + 5\n" * 200,
                                   "This is prose.\nx = 1\n" * 500])
def test_the_function_is_found_after_much_else(noise):
    assert results(noise + "It is:\n" + F) == WANTED
