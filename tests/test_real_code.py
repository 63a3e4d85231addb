"""extract_code on code that nobody here wrote: functions of Python's standard library in the ways that models write.

    pytest tests/test_real_code.py                     300 functions, drawn by a seed, in every wrapping
    python tests/test_real_code.py                     all functions in every wrapping: a table (some minutes)
    python tests/test_real_code.py --show WRAPPING     also the first answers of a wrapping that are lost
"""
import argparse
import ast
import collections
import functools
import html
import json
import pathlib
import random
import sys
import sysconfig
import warnings

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from colbench.extract_code import extract_code  # noqa: E402

SAMPLE = 300

# {code}: the function. {indented}: by four columns. {listed}: by three, as under "1. ". {quoted}: "> " before lines.
# {listed_quoted}: "    > " before lines. {session}: with ">>> " and "... ". {escaped}: as HTML. {json}: as a string of
# JSON. {name}: its name. {first}, {rest}: its first line, and the others.
WRAPPINGS = {
    # no fence
    "plain": "{code}",
    "prose before": "Certainly! Here's the function you asked for:\n\n{code}",
    "prose after": "{code}\n\nThis function handles all of the cases we talked about. Let me know if it doesn't!",
    "prose before and after": "Sure, here it is (see the notes below):\n\n{code}\n\nNotes:\n- It's fast.\n- It has no "
                              "side effects.",
    "prose directly around": "Here's the code:\n{code}\nThat's all.",
    "prose, indented code": "The code is as follows.\n\n    {indented}\n\nI hope that this helps.",
    "prose directly above indented code": "The code:\n    {indented}\nI hope that this helps.",
    "usage after, no fence": "{code}\n\nExample usage:\n\nresult = {name}(1, 2)\nprint(result)",
    "word python before": "python\n{code}",
    "HTML": "<p>Here:</p>\n<pre><code class=\"language-python\">{code}</code></pre>\n<p>Done.</p>",
    "answer tags": "<answer>\n{code}\n</answer>",
    "code tags": "Sure.\n<code>\n{code}\n</code>",
    "end of turn": "{code}<|eot_id|>",
    "quoted": "As you said:\n\n> {quoted}\n\nThat is it.",
    "session": "In a session:\n\n>>> {session}\n>>> {name}()\nNone",
    "answer tags in the lines": "<answer>{code}</answer> That is it.",
    "escaped HTML": "<p>Here:</p>\n<pre><code>{escaped}</code></pre>",
    "label": "Assistant: {code}",
    "label and tags": "Answer: <code>{code}</code>",
    "thoughts": "<think>\nA draft:\n```python\ndef {name}(a, b=3):\n    return None\n```\nI WANT TO ANSWER it so.\n"
                "</think>\n{code}",
    "JSON": "{{\"explanation\": \"it's easy\", \"code\": {json}}}",
    "JSON in a tool call": "<tool_call>\n{{\"name\": \"answer\", \"arguments\": {{\"code\": {json}}}}}\n</tool_call>",
    # fences
    "fence": "```python\n{code}\n```",
    "fence, prose around": "Sure! Here's how it's done:\n\n```python\n{code}\n```\n\nThis `{name}` function doesn't "
                           "need anything else.",
    "fence py": "Here:\n```py\n{code}\n```",
    "fence Python3": "Here:\n```Python3\n{code}\n```\nDone",
    "bare fence": "I'd write:\n```\n{code}\n```\nDone.",
    "tildes": "I'd write:\n~~~python\n{code}\n~~~\nDone.",
    "fence with a blank": "I'd write:\n\n``` python\n{code}\n```",
    "open fence": "Here you are:\n```python\n{code}",
    "closed on the last line": "```python\n{code}```",
    "opened in a line": "Here it is: ```python\n{code}\n``` Tell me if it's right.",
    "one-line fence": "```python {first}\n{rest}\n```",
    "imports in another fence": "First:\n```python\nimport os\nimport sys\n```\nThen:\n```python\n{code}\n```",
    "helper in another fence": "A helper:\n```python\ndef some_helper(values, start=0):\n"
                               "    return sum(values, start)\n"
                               "```\nThe function:\n```python\n{code}\n```",
    "helper after": "```python\n{code}\n```\nIt needs\n```python\nLIMIT = 10\n\ndef some_helper(a, b=3):\n"
                    "    return a + b\n```",
    "usage after": "```python\n{code}\n```\nUse it:\n```python\nresult = {name}(1, 2)\nprint(result)\n```\nOutput:\n"
                   "```\n3\n```",
    "asserts after": "```python\n{code}\n```\nTests:\n```python\nassert {name}(1) == 2\nassert {name}(2) is None\n```",
    "tests in the fence": "```python\n{code}\n\n# Tests\nassert {name}(1) == 2\nprint({name}(2))\n```",
    "main guard": "```python\n{code}\n\n\nif __name__ == \"__main__\":\n    print({name}(int(input())))\n```",
    "numbered steps": "1. **Understand** the request: it's simple.\n2. **Write** the function:\n\n   ```python\n"
                      "   {listed}\n   ```\n\n3. **Use** it.",
    "bold headings": "**Solution**\n\n```python\n{code}\n```\n\n**Explanation**\n\n* `{name}` is called.\n* That's it.",
    "headings": "# Solution\n\n## Code\n\n```python\n{code}\n```\n\n## How it works\n\nIt's easy: see the code.",
    "nested fences": "````markdown\nHere:\n```python\n{code}\n```\n````",
    "a quoted fence in a list": "1. As you said:\n\n    > ```python\n    > {listed_quoted}\n    > ```\n2. That's it.",
    "a signature in a fence before": "Its signature:\n```python\ndef {name}(a, b=3): ...\n```\nThe code:\n\n{code}",
    "a draft before": "```python\ndef draft(n):\n    return (n\n```\nNo, that isn't it:\n```python\n{code}\n```",
    # markers
    "marker": "I WANT TO ANSWER:\n{code}",
    "marker and fence": "I know enough.\n\nI WANT TO ANSWER:\n\n```python\n{code}\n```",
    "bold marker": "**I WANT TO ANSWER:**\n\n```python\n{code}\n```\n\nIt's done.",
    "marker repeated": "I WANT TO ANSWER:\nI WANT TO ANSWER:\n{code}",
    "marker's own line": "I WANT TO ANSWER: {code}",
    "marker's own line, cut": " {code}",
    "marker's own line, prose after": "I WANT TO ANSWER: {code}\n\nThat's how it's done.",
    "marker as a heading": "## I WANT TO ANSWER\n\n{code}\n\nDone.",
    "marker in a fence": "```python\n# I WANT TO ANSWER:\n{code}\n```",
}
LINE_ENDS = {"CRLF, fence": ("fence, prose around", "\r\n"), "CRLF, no fence": ("prose before and after", "\r\n")}
NAMES = [*WRAPPINGS, *LINE_ENDS]


def library_files():
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    return [path for path in sorted(folder.rglob("*.py")) if "site-packages" not in path.parts]


def functions_of_file(path):
    """[(source, name), …] of the top-level functions of a file, with their decorators; [] where it cannot be read."""
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError):                               # another encoding, or broken on purpose
        return []
    if "\f" in source:                                              # counts as the end of a line for some
        return []
    lines, functions = source.split("\n"), []
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            functions.append(("\n".join(lines[first - 1:node.end_lineno]), node.name))
    return functions


@functools.cache
def library_functions():
    """All different functions of the standard library, in a fixed order."""
    return list(dict.fromkeys(function for path in library_files() for function in functions_of_file(path)))


@functools.cache
def sample_of_functions():
    """300 functions, at most three of a file."""
    rng, functions = random.Random(0), {}
    files = library_files()
    rng.shuffle(files)
    for path in files:
        in_file = functions_of_file(path)
        functions.update(dict.fromkeys(rng.sample(in_file, min(3, len(in_file)))))
        if len(functions) >= SAMPLE:
            break
    return list(functions)[:SAMPLE]


def wrapped(code, name, wrapping):
    """The answer that has the function `code` in a wrapping."""
    wrapping, line_end = LINE_ENDS.get(wrapping, (wrapping, "\n"))
    lines = code.split("\n")
    answer = WRAPPINGS[wrapping].format(
        code=code, name=name, first=lines[0], rest="\n".join(lines[1:]), indented="\n    ".join(lines),
        listed="\n   ".join(lines), quoted="\n> ".join(lines), session="\n... ".join(lines),
        listed_quoted="\n    > ".join(lines), escaped=html.escape(code, quote=False), json=json.dumps(code))
    return answer.replace("\n", line_end)


@functools.cache
def function_of(source, name):
    """The syntax tree, as text, of the last function of this name that a source defines at its top level, or None."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    dumps = [ast.dump(node) for node in tree.body
             if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name]
    return dumps[-1] if dumps else None


def is_lost(code, name, wrapping):
    """Does extract_code not give back the function that the answer has?"""
    try:
        source = "\n".join(extract_code(wrapped(code, name, wrapping), [f"{name}()"]))
        return source.strip() != code.strip() and function_of(source, name) != function_of(code, name)
    except SyntaxError:
        return True


@pytest.mark.parametrize("wrapping", NAMES)
def test_functions_of_the_standard_library(wrapping):
    """Of 300 functions at most one is lost: 99.5 % of a wrapping."""
    lost = [name for code, name in sample_of_functions() if is_lost(code, name, wrapping)]
    assert len(lost) <= 0.005 * SAMPLE, lost


def test_there_are_enough_wrappings_and_functions():
    assert len(NAMES) >= 35
    assert len(sample_of_functions()) == SAMPLE


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", choices=NAMES, help="a wrapping whose lost answers are printed")
    parser.add_argument("--num-shown", type=int, default=3)
    parser.add_argument("--every", type=int, default=1, help="take every so many functions")
    args = parser.parse_args()
    functions = library_functions()[::args.every]
    lost = collections.Counter()
    for wrapping in [args.show] if args.show else NAMES:
        for code, name in functions:
            if is_lost(code, name, wrapping):
                lost[wrapping] += 1
                if args.show and lost[wrapping] <= args.num_shown:
                    print("-" * 100, wrapped(code, name, wrapping), sep="\n")
        print(f"{wrapping:36} {lost[wrapping]:6,} of {len(functions):,}   {lost[wrapping] / len(functions):.4f}",
              flush=True)
    if not args.show:
        print(f"{'all':36} {lost.total():6,} of {len(functions) * len(NAMES):,}   "
              f"{lost.total() / len(functions) / len(NAMES):.4f}")


if __name__ == "__main__":
    main()
