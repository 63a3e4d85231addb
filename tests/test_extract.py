"""extract_code: the answers that models write give their code, whatever stands around it, in bounded time."""
import ast
import contextlib
import functools
import importlib
import inspect
import io
import json
import re
import time
import types
import warnings

import pytest

from colbench import backend, make_tasks
from colbench.extract_code import names_of_calls, pieces_of, statements_of
from colbench.sandbox_worker import execute
from conftest import ROOT

F = "def f(n):\n    return n * n or None"
CALLS = ("f(3)", "f(2)", "f(0)", "f(1)")
WANTED = [9, 4, None, 1]


def results(answer, calls=CALLS):
    """What the calls return after the pieces have run as in the scorer (without its walls); or the first fault."""
    pieces = [statements_of(piece.nodes) for piece in pieces_of(answer, names_of_calls(calls))]
    module = types.ModuleType("answer")
    with contextlib.redirect_stdout(io.StringIO()):
        execute(pieces, module)
        try:
            return [eval(call, vars(module)) for call in calls]
        except Exception as error:
            return [f"{type(error).__name__}: {error}"]


T = "def total(values):\n    return sum(values)"
FUNCTIONS = {"f": (F, CALLS, WANTED), "total": (T, ["total([1, 2])", "total([3, 4])"], [3, 7])}
MESSAGES = {}
for block in (ROOT / "tests" / "messages.txt").read_text().split("\n=== ")[1:]:
    title, _, text = block.partition("\n")
    kind, _, name = title.rpartition(": ")
    MESSAGES.setdefault(kind, {})[name] = text.strip("\n")
LINE_ENDS = {"CRLF": "\r\n", "old Mac": "\r"}                       # of messages with this in their names


def message_of(kind, name, code, function):
    """A message of messages.txt with the code of a function in it."""
    lines = code.split("\n")
    parts = {"code": code, "name": function, "json": json.dumps(code), "first": lines[0], "rest": "\n".join(lines[1:]),
             "indented": "\n    ".join(lines), "listed": "\n   ".join(lines)}
    text = re.sub(r"\{(\w+)\}", lambda match: parts.get(match[1], match[0]), MESSAGES[kind][name])
    for words, line_end in LINE_ENDS.items():
        text = text.replace("\n", line_end) if words in name else text
    return text


@pytest.mark.parametrize("kind, name", [
    (kind, name) for kind in MESSAGES if kind != "any" for name in MESSAGES[kind]])
def test_code_is_found_where_models_put_it(kind, name):
    function, _, other_value = kind.partition(" is ")
    code, calls, values = FUNCTIONS[function]
    values_found = results(message_of(kind, name, code, function), calls)
    assert str(values_found[0]) == other_value if other_value else values_found == values


@pytest.mark.parametrize("answer", ["I do not know.", "Use `f(n)`.", "```python\ndef f(n):\n    return n *\n```",
                                    "def f(n) return n * n", "I WANT TO ANSWER:", "```\nI WANT TO ANSWER\n```",
                                    "f = ", "x = (", "'''", "\0", "\ud800", "\ufeff"])
def test_no_code(answer):
    assert "Error" in str(results(answer)[0])


MODULES = ("argparse", "ast", "base64", "bisect", "calendar", "configparser", "contextlib", "copy", "dataclasses",
           "difflib", "dis", "fractions", "functools", "gettext", "heapq", "inspect", "locale", "mimetypes", "pprint",
           "shlex", "shutil", "statistics", "textwrap", "threading", "tokenize", "traceback", "types", "warnings")


@functools.cache
def sample_of_functions():
    """[(source, name), …] of the references of all families, and of about 100 top-level functions of Python's standard
    library with their decorators."""
    functions = []
    for module in map(importlib.import_module, MODULES):
        source = inspect.getsource(module)
        for node in [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)][:4]:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            functions.append(("\n".join(source.split("\n")[first - 1:node.end_lineno]), node.name))
    for task in make_tasks(backend, 14, 5, "train", "some"):
        functions.append((task["ground_truth"], task["test_cases"]["test1"].partition("(")[0]))
    return functions


@functools.cache
def function_of(source, name):
    """The syntax tree, as text, of the last function of this name that a source defines, or None."""
    dumps = [None]
    with warnings.catch_warnings(action="ignore"), contextlib.suppress(SyntaxError, ValueError):
        dumps += [ast.dump(node) for node in ast.parse(source).body if getattr(node, "name", None) == name]
    return dumps[-1]


def is_lost(code, name, wrapping):
    """Does the answer's code lack the function that it has?"""
    pieces = pieces_of(message_of("any", wrapping, code, name), {name})
    source = "\n".join(piece.source for piece in pieces)
    return source.strip() != code.strip() and function_of(source, name) != function_of(code, name)


@pytest.mark.parametrize("wrapping", MESSAGES["any"])
def test_functions_of_the_standard_library_and_references(wrapping):
    assert [name for code, name in sample_of_functions() if is_lost(code, name, wrapping)] == []


REPEATED = ("This is prose.\nx = 1\n", "def f(x: return\n", "```python\n", "`x = 1` ", "x = '''\n\"\"\"\n",
            'def f():\n """a\n ```\n f()\n ```\n """\n', "def f():\n x=1\n It is so.\n", "a: def ", '"def f(): 0" ')
LONG = [part * (8_000 // len(part)) + "It is so." for part in REPEATED] + [
    "x = " + "(" * 8_000,
    "".join(" " * depth + "if 1:\n" for depth in range(126)),
    "".join(f"def f():\n    x = {version}\nIt is.\n" for version in range(266))]


@pytest.mark.parametrize("text", LONG, ids=lambda text: text[:20])
def test_long_texts_take_bounded_time(text):
    """8 KB are twice what 1,024 tokens hold. A load has 5 s of processor time; these texts need half a second."""
    began = time.process_time()
    pieces_of(text, set())
    assert time.process_time() - began < 5


@pytest.mark.parametrize("noise", ["x = 1\n" * 300 + "x = (\n", "total = 3 + 5\n" * 200,
                                   "This is prose.\nx = 1\n" * 500])
def test_the_function_is_found_after_much_else(noise):
    assert results(noise + "It is:\n" + F) == WANTED
