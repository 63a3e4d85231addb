"""Tasks (functions) written by a language model: the prompt, parsing a reply, reasons to reject a task."""
import ast
import contextlib
import hashlib
import itertools
import json
import re

from colbench.backend import NUM_TESTS
from colbench.domain import beside

MAX_LINES = 50                  # of a solution
MAX_SEED_CHARS = 2000           # of a text that gives the idea
NEAR_DUPLICATE = 0.6            # the share of word triples, of two tasks' together, that makes one a repeat
TASK_PROMPT = beside("task_prompt.txt")         # of {text} and one of KINDS
NO_PYTHON = (SyntaxError, ValueError, MemoryError, RecursionError)      # what ast.parse raises on a model's text
MEASURES_NOTHING = ("missing package", "random", "not comparable", "asks nothing", "reference fails", "order of a set",
                    "vacuous")
WRITTEN_KEYS = {"description": "problem_description", "code": "ground_truth", "tests": "test_cases"}
KINDS = ("a price or an amount with exceptions", "checking whether something is allowed", "grouping and counting",
         "turning one text into another", "picking the best of several things", "sorting and ranking records",
         "dates, times or a schedule", "cleaning up a list of entries", "a short summary as text")
TOPICS = beside("task_topics.txt")


def read_json(text):
    """The JSON object that a text begins with; line breaks may stand in strings."""
    return json.JSONDecoder(strict=False).raw_decode(text)[0]


def read_literal(text):
    """The Python literal that a text begins with, up to the last brace: JSON with commas too many is one, too."""
    return ast.literal_eval(text[:text.rfind("}") + 1])


def parse_reply(text):
    """The first object in a reply with one of the keys that the prompt asks for, or None. It may stand in a fence and
    between prose."""
    keys = {*WRITTEN_KEYS, *WRITTEN_KEYS.values()}
    for read in (read_json, read_literal):
        for match in itertools.islice(re.finditer(r"""\{\s*["']""", text), 20):
            with contextlib.suppress(*NO_PYTHON, TypeError):
                value = read(text[match.start():])
                if isinstance(value, dict) and keys & value.keys():
                    return value
    return None


def bare_code(code):
    """(tree, text) of Python code without docstrings and comments; raises one of NO_PYTHON."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree, ast.unparse(tree)


def squeeze(code):
    """Code without blanks and with one kind of quotes, so that two ways to write it are equal."""
    return re.sub(r"\s", "", code).replace('"', "'").rstrip(":")


def names_signature(text, function):
    """Whether a text names a function (an ast node) with its arguments; their types and defaults do not matter."""
    said = re.findall(rf"\b{function.name}\s*\(((?:[^()]|\([^()]*\))*)\)", text)
    names = []
    for arguments in [ast.unparse(function.args), *said]:
        with contextlib.suppress(*NO_PYTHON):
            nodes = ast.walk(ast.parse(f"def f({arguments}): 0"))
            names.append([node.arg for node in nodes if isinstance(node, ast.arg)])
    return names[0] in names[1:]


def call_of(text, name):
    """A call of the function `name` as ast writes it, or None if `text` is no such call."""
    with contextlib.suppress(*NO_PYTHON):
        call = ast.parse(text.strip(), mode="eval").body
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == name:
            return ast.unparse(call)


def code_in(description, code):
    """A telling line of code (from bare_code) that is also in the description, or None."""
    description = squeeze(description)
    for line in map(squeeze, code.splitlines()):
        is_telling = len(line) >= 8 and re.search(r"[-+*/%=<>([{]", line) and not line.startswith("def")
        if is_telling and line in description:
            return line
    return None


def written_task(reply, ended):
    """The task in a reply, whose tests have not run yet, or "reason: detail"."""
    written = parse_reply(reply)
    if written is None:
        return "no JSON object" if ended else "cut by --max-new-tokens"
    description, code, tests = (written.get(key, written.get(name)) for key, name in WRITTEN_KEYS.items())
    for key, text in (("description", description), ("code", code)):
        if not isinstance(text, str) or not text.strip():
            return f"no {key}"
    code = re.sub(r"^```\w*\n|\n```$", "", code.strip())
    try:
        tree, bare = bare_code(code)
    except NO_PYTHON as error:
        return f"code is no Python: {error}"
    num_lines = len(code.splitlines())
    if num_lines > MAX_LINES:
        return f"too many lines: {num_lines}"
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    names = [function.name for function in functions if names_signature(description, function)]
    if not names:
        return "no signature in the description"
    if line := code_in(description, bare):
        return f"code in the description: {line}"
    if isinstance(tests, dict):
        tests = list(tests.values())
    tests = tests if isinstance(tests, list) else []
    calls = {call_of(str(test), names[-1]): test for test in tests}
    if None in calls:
        return f"a test is no call of the function: {str(calls[None])[:100]}"
    if len(calls) < NUM_TESTS:
        return f"too few tests: {len(calls)}"
    task_id = hashlib.sha256(code.encode(errors="replace")).hexdigest()[:16]
    test_names = [f"test{number}" for number in range(1, NUM_TESTS + 1)]
    return {"task_id": task_id, "problem_description": description.strip(), "ground_truth": code,
            "test_cases": dict(zip(test_names, calls)),
            "written_tests": len(calls)}


def repeat_reason(task, seen):
    """Why a task repeats one of `seen` = (bodies, sets of word triples), or None. Then it is added to them."""
    bodies, kept_triples = seen
    name = task["test_cases"]["test1"].split("(")[0]
    _, code = bare_code(task["ground_truth"])
    body = re.sub(rf"(?m)^def {name}\(.*|\b{name}\b", "", code)
    if body in bodies:
        return "the body of a kept task"
    words = re.findall(r"\w+", f"{task['problem_description']} {task['ground_truth']}".lower())
    triples = set(zip(words, words[1:], words[2:]))
    nearest = max((len(triples & other) / len(triples | other) for other in kept_triples), default=0)
    if nearest >= NEAR_DUPLICATE:
        return f"near duplicate: {nearest:.2f} of the word triples of a kept task and its own"
    bodies.add(body)
    kept_triples.append(triples)
    return None
