"""extract_code: the answers that models write give their code, whatever stands around it, in bounded time."""
import contextlib
import functools
import io
import json
import time
import types

import pytest

from colbench import backend
from colbench.extract_code import compiled_statements, extract_code, names_of_calls, pieces_of
from colbench.sandbox_worker import execute
from conftest import ROOT, stage

F = "def f(n):\n    return n * n or None"
CALLS = ("f(3)", "f(2)", "f(0)", "f(1)")
WANTED = [9, 4, None, 1]


def results(answer, calls=CALLS):
    """What the calls return after the sources have run as in the scorer (without its walls); faults as strings."""
    pieces = [compiled_statements(piece.nodes) for piece in pieces_of(answer, names_of_calls(calls))]
    return returned(lambda module: execute(pieces, module), calls)


def results_of_python(code, calls):
    """What the calls return after the code has run as it stands; faults as strings."""
    return returned(lambda module: exec(code, vars(module)), calls)


def returned(run_code, calls):
    """What the calls return, each in a module of its own after run_code(module); faults as strings."""
    found = []
    for call in calls:
        module = types.ModuleType("answer")
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                run_code(module)
                found.append(eval(call.strip(), vars(module)))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


# ---- the forms of the issue

DOCSTRING = 'def f(n):\n    """Squares.\n\n    ```python\n    f(3)  # 9\n    ```\n    """\n    return n * n or None'
FORMS = {
    "marker's line, import after": "I WANT TO ANSWER: def f(n): return math.prod([n, n]) or None\nimport math",
    "marker's line, import before": "I WANT TO ANSWER: import math\ndef f(n):\n    return math.prod([n, n]) or None",
    "marker's line, helper after": "I WANT TO ANSWER: def f(n): return g(n)\ndef g(n):\n    return n * n or None",
    "marker's line, usage after": f"I WANT TO ANSWER: {F}\nprint(f(3))",
    "marker's line, helper in a fence": "I WANT TO ANSWER: def f(n): return g(n)\n```\ndef g(n): return n * n or None\n"
                                        "```",
    "after the marker was cut off": " def f(n): return math.prod([n, n]) or None\nimport math",
    "marker in a list": "  - I WANT TO ANSWER: import math\n    def f(n):\n        return math.prod([n, n]) or None",
    "imports in a fence": "```python\nimport math\n```\nThen:\n```python\ndef f(n):\n"
                          "    return math.prod([n, n]) or None\n```",
    "constants in a fence": "```\nTWO = 2\nNAMES: list = [\n    1,\n]\n```\nand\n```\ndef f(n):\n"
                            "    return n ** TWO or None\n```",
    "constants in a last fence": "```\ndef f(n):\n    return n ** TWO or None\n```\nThe constant is\n```\nTWO = 2\n```",
    "docstring, indented fence": f"```python\n{DOCSTRING}\n```\nDone.",
    "docstring, fence at the margin": '```python\ndef f(n):\n    """Squares.\n```python\nf(3)\n```\n    """\n'
                                      '    return n * n or None\n```',
    "docstring, two fences": "```\n" + DOCSTRING.replace('    """\n    r',
                                                         '    ~~~\n    f\n    ~~~\n    """\n    r') + "\n```\n",
    "docstring, no closing fence": f"Here:\n\n```python\n{DOCSTRING}",
    "on the fence's line": "```python def f(n):\n    return n * n or None\n```",
    "on the fence's line, no language": "```def f(n):\n    return n * n or None\n```\nDone.",
    "on the fence's line, import": "``` python import math\ndef f(n):\n    return math.prod([n, n]) or None```",
    "on the fence's line, in a list": "1. ```python import math\n   def f(n):\n"
                                      "       return math.prod([n, n]) or None\n   ```",
    "bare word python": f"python\n{F}",
    "bare word Code": f"Code\n\n{F}\n\nExplanation\n",
    "bare words": f"Code:\n{F}\n\nExplanation:\nsquares it",
    "bare word in a fence": f"```\npython\n{F}\n```",
    "bare words that parse": f"so it is\n{F}\nNote: this\nn\n",
    "prose after imports": "First we import:\n\nimport math\n\nThen the function:\n\ndef f(n):\n"
                           "    return math.prod([n, n]) or None\n",
    "prose after constants": "We need a constant.\nTWO = 2\nand then\ndef f(n):\n    return n ** TWO or None\n"
                             "That is it!",
    "prose after helpers": "def g(n):\n    return n * n\n\nNow the main function:\n\ndef f(n):\n"
                           "    return g(n) or None",
    "prose between, indented": "Import:\n\n    import math\n\nFunction:\n\n    def f(n):\n"
                               "        return math.prod([n, n]) or None\n",
    "marker as a comment": "Here:\n```\ndef f(n):\n    # I WANT TO ANSWER: squares\n    return g(n)\ndef g(n):\n"
                           "    return n * n or None\n```",
    "marker as a comment, no fence": "So:\n\ndef f(n):\n    # I WANT TO ANSWER\n    return g(n)\n\ndef g(n):\n"
                                     "    return n * n or None",
    "marker as a comment in a fence": "```\nimport math\n# I WANT TO ANSWER:\ndef f(n):\n"
                                      "    return math.prod([n, n]) or None\n```",
    "marker after the code": f"```python\n{F}\n```\nI WANT TO ANSWER",
    "marker after the code, prose": f"{F}\n\nI WANT TO ANSWER: the function above.",
    "marker in the fence": f"```python\nI WANT TO ANSWER:\n{F}\n```",
    "marker cut off in the fence": f"\n{F}\n```\nDone.",
    "BOM in a fence": f"```python\n\ufeff{F}\n```",
    "BOM before a fence": f"\ufeff```python\n{F}\n```",
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name):
    assert results(FORMS[name]) == WANTED, extract_code(FORMS[name])


@pytest.mark.parametrize("answer", [
    "```python\ndef helper(): pass\n```\nand\n```python\nfrom math import gcd as f\n```",
    "```bash\npip install x\n```\n```python\nfrom math import gcd as f\n```",
    "It is\n```\nfrom math import gcd as f\n```"])
def test_a_function_that_is_imported(answer):
    assert results(answer, ["f(12, 18)"]) == [6]


# ---- as chat models write

G = "def g(n):\n    return n * n"
CHAT = {
    "headings and bullets": f"# Solution\n\n## Code\n\n```python\n{F}\n```\n\n## How it works\n\n- `n`: the number\n"
                            f"- `f(n)`: its square\n"
                            "- `import` is not needed\n\n**Note:** gives `None` for `0`.",
    "backticks in strings": "Sure:\n\ndef f(n):\n    fence = '```python'\n    tick = \"`\"\n    return n * n or None\n"
                            "\nThat is all.",
    "fence in a string, fenced": "```python\ndef f(n):\n    fence = '''\n    ```\n    x\n    ```\n    '''\n"
                                 "    return n * n or None\n```",
    "nested fences": f"````markdown\nHere:\n```python\n{F}\n```\n````",
    "doctest in the docstring": f'```python\n{F.replace(":", """:""", 1)}\n```'.replace(
        "    return", '    """\n    >>> f(3)\n    9\n    """\n    return'),
    "doctest session after": f"{F}\n\n>>> f(3)\n9\n>>> f(0)\n",
    "tildes with a word": f"~~~ python\n{F}\n~~~\nand\n~~~ text\nf = 9 lives\n~~~",
    "html": f"<pre><code>{F}\n</code></pre>",
    "html with a class": f"<p>Here:</p>\n<pre><code class=\"language-python\">{F}</code></pre>\n<p>Done.</p>",
    "html lines": f"<code>\n{F}\n</code>",
    "indented by four": "Here is the code:\n\n    " + F.replace("\n", "\n    ") + "\n\nHope it helps!",
    "indented by a tab": "Here is the code:\n\n\t" + F.replace("\n", "\n\t").replace("    ", "\t") + "\nHope it helps!",
    "tabs": "```\n" + F.replace("    ", "\t") + "\n```",
    "numbered list": "1. Import math:\n   ```python\n   import math\n   ```\n2. Define:\n   ```python\n   def f(n):\n"
                     "       return math.prod([n, n]) or None\n   ```\n3. Use it.",
    "explanation after": f"{F}\n\nExplanation:\n1. It takes n.\n2. It returns n * n.\n   - or None (for 0)\n",
    "indented explanation": f"Code:\n{F}\n\n    This squares n; don't worry (really.\n",
    "assert usage": f"```python\n{F}\n\nassert f(3) == 9\nprint(f(3))\n```",
    "print usage, another fence": f"```python\n{F}\n```\nExample:\n```python\nprint(f(int(input('n? '))))\n```\n"
                                  f"Output:\n```\n9\n```",
    "assigned usage, another fence": f"```python\n{F}\n```\nExample:\n```python\nresult = f('a string')\n```",
    "input, another fence": f"Read it:\n```python\nn = int(input())\n```\n```python\n{F}\n```",
    "class-based": "```python\nclass Solution:\n    def square(self, n):\n        return n * n or None\n\n\n"
                   "solution = Solution()\n"
                   "f = solution.square\n```",
    "class in its own fence": "```python\nclass Solution:\n    def square(self, n):\n        return n * n or None\n"
                              "```\nthen\n"
                              "```python\nf = Solution().square\n```",
    "decorators": "```python\nimport functools\n```\n```python\n@functools.lru_cache(\n    maxsize=None,\n"
                  ")\n" + F + "\n```",
    "decorator without a fence": f"We cache it:\nimport functools\n\n@functools.cache\n{F}\nIt is fast.",
    "type hints": "Here:\nfrom typing import (\n    Optional,\n)\n\ndef f(\n    n: int,\n) -> Optional[int]:\n"
                  "    return n * n or None\n\nDone (well",
    "async": "```python\nimport asyncio\n\nasync def g(n: int) -> int:\n    return n * n\n\ndef f(n):\n"
             "    return asyncio.run(g(n)) or None\n```",
    "lambda": "The function is\n\nf = lambda n: n * n or None\n\nIt's short.",
    "lambda in a sentence": "Use `n` so: `f = lambda n: n * n or None`.",
    "unicode quotes": f"Here’s the “code” — don’t panic:\n\n{F}\n\nIt’s “done”…",
    "end of turn": f"```python\n{F}\n```<|eot_id|>",
    "end of turn in the code": f"Sure.\n{F}<|eot_id|>",
    "end of instruction": f"{F} [/INST]",
    "end of text": f"{F}\n</s>",
    "later version wins": f"{F.replace('n * n', 'n + n')}\n\nWait, that adds. Better:\n\n{F}\n\nGood.",
    "later version wins, fenced": f"```python\n{F.replace('n * n', 'n + n')}\n```\nBetter:\n```python\n{F}\n```",
    "cut after a complete function": f"{G}\n\n{F}\n\ndef main():\n    data = [\n        (1, 2",
    "cut in a second version": f"Here:\n{F}\n\nA faster one:\n\ndef f(n):\n    total = 0\n    for i in range(n",
    "cut in a second fence": f"```python\n{F}\n```\nA faster one:\n```python\ndef f(n):\n    total = 0\n"
                             f"    for i in range(n",
    "cut in a docstring": f"```python\n{F}\n```\nAgain:\n```python\ndef h(n):\n    \"\"\"Squares",
    "docstring cut, then again": "```python\ndef f(n):\n    \"\"\"Squares\n```\nSorry:\n```python\n"
                                 + F.replace(":", ":\n    " + '"""Squares."""', 1) + "\n```",
    "draft before the marker": f"I could write\n```python\nraise SystemExit\ndef f(n): return 0\n```\n"
                               f"I WANT TO ANSWER:\n```python\n{F}\n```",
    "calls between definitions, then cut": "import sys\nTABLE = {}\nTABLE.update(two=2)\n\ndef f(n):\n"
                                           "    return n ** TABLE['two'] or None\n\n"
                                           "def main():\n    print(f(",
    "a session before": f">>> f(3)\n9\nassert f(3) == 9\n{F}\nThat is all.",
    "a main guard": f"Sure!\n\n{F}\n\nif __name__ == '__main__':\n    n = int(input())\n    print(f(n))\n\nRun it.",
    "try import": "Well:\ntry:\n    import nothing_of_the_kind as np\nexcept ImportError:\n    np = None\n\n"
                  + F + "\nDone.",
    "unindented docstring": 'Here.\ndef f(n):\n    """\nSquares (a number.\nIt\'s easy:\n\n    x = (\n"""\n'
                            '    return n * n or None\nDone.',
    "comments at the margin": "Here.\ndef f(n):\n# squares\n    x = n * n\n\n# and gives\n    return x or None\nDone.",
    "shell and JSON": f"```bash\npip install numpy\npython f.py = 3\n```\n```json\n{{\"n\": 3}}\n```\n```python\n{F}\n"
                      f"```",
    "no-break spaces": "Here.\n" + F.replace("    ", "\u00a0" * 4),
    "old Mac line ends": f"Here:\r```\r{F}\r```\r".replace("\n", "\r"),
    "doubled marker": f"I WANT TO ANSWER: I WANT TO ANSWER:\n{F}",
    "brackets in prose": f"The cases (see below :( are easy = ( trivial:\n\n{F}\n",
    "table of constants": "Here.\n\nTABLE = {\n'a': 1,\n'b': [2,\n3],\n}\n\nand\n\ndef f(n):\n"
                          "    return n ** TABLE['b'][0] or None",
    "helper after the function": f"The function:\ndef f(n):\n    return g(n) or None\nThe helper:\n{G}\n",
    "backslash": "So\ndef f(n): \\\n    return n * n \\\n    or None\nDone.",
}


@pytest.mark.parametrize("name", CHAT)
def test_chat_answers(name):
    assert results(CHAT[name]) == WANTED, extract_code(CHAT[name])


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
    "a: input is shown": f"Input: values = [1, 2, 3]\n{T}",
    "a: the call is shown": f"Function: total(values)\n{T}",
    "a: a formula": f"total = sum(values) * factor\n{T}",
    "a: input is read": f"values = input()\n{T}",
    "a: a formula in the fence": f"```python\ntotal = sum(values) * factor\n\n{T}\n```",
    "a: a session before": f"assert total([1]) == 1\nprint(total(values))\n{T}",
    "a: an import that fails": f"import nothing_of_the_kind\nfrom nothing import *\n{T}",
    "a: the program ends": f"raise SystemExit\n{T}\nexit()",
    # an example after it names something as it, or as a builtin
    "b: output is shown": f"{T}\n\nExample:\nOutput: total = 12",
    "b: the result has its name": f"{T}\n\nExample:\ntotal = total([5, 7])",
    "b: the result has its name, fences": f"{FENCED_T}\nExample:\n```python\ntotal = total([5, 7])\n```",
    "b: a formula with its name": f"{FENCED_T}\nThat is\n```\ntotal = 5 + 7\n```",
    "b: sum": f"{T}\nwhich gives\nsum = 6",
    "b: sum in a fence": f"{FENCED_T}\nResult:\n```\nsum = 6\n```",
    "b: sum before": f"With\n```\nsum = 6\n```\nwe write\n{FENCED_T}",
    "b: list": "def total(values):\n    return sum(list(values))\n\nFor example:\n\nlist = [1, 2, 3]\n"
               "total(list)",
    "b: a loop over it": f"{FENCED_T}\n```\nfor sum in range(3):\n    print(total([sum]))\n```",
    # set-up apart from the function
    "c: a table is filled": fences("TABLE = {}\nfor n in range(5):\n    TABLE[n] = n", READS_TABLE),
    "c: a table is filled in the open": "TABLE = {}\n\nNow fill it:\n\nfor n in range(5):\n    TABLE[n] = n\n\nThen\n\n"
                                        f"{READS_TABLE}\nDone!",
    "c: import or else": fences("try:\n    import nothing_of_the_kind as np\nexcept ImportError:\n    np = None",
                                "def total(values):\n    return sum(values) if np is None else np.sum(values)"),
    "c: a seed": fences("import random", "random.seed(0)", "def total(values):\n    random.seed(0)\n"
                        "    return sum(random.sample(values, len(values)))"),
    "c: a table is built": fences("def build(n):\n    return list(range(n))", "TABLE = build(5)", READS_TABLE),
    "c: it is made": fences("def make(start):\n    def add(values):\n        return sum(values, start)\n    return add",
                            "total = make(0)"),
    "c: it is made in the open": "def make(start):\n    return lambda values: sum(values, start)\n\nso:\n\n"
                                 "total = make(0)\n\nDone!",
    "c: a call fills it": fences("TABLE = {}", "TABLE.update({1: 1, 2: 2, 3: 3, 4: 4})", READS_TABLE),
    "c: import before the marker": "```python\nimport math\n```\nI WANT TO ANSWER:\n```python\ndef total(values):\n"
                                   "    return int(math.fsum(values))\n```",
    "c: helper in the open": "def add(a, b):\n    return a + b\n\nand so:\n\n" + fences(
        "import functools\n\ndef total(values):\n    return functools.reduce(add, values)"),
    "c: a global that changes": fences("COUNT = 0", "def total(values):\n    global COUNT\n    COUNT += 1\n"
                                       "    return sum(values)"),
    # the function in the open, its tests in a fence
    "d: tests in a fence": f"{T}\n\nTests:\n```python\ndef test_total():\n    assert total([1, 2]) == 3\n\n"
                           f"test_total()\n```",
    "d: a test class in a fence": f"{T}\n\nTests:\n```python\nimport unittest\n\nclass TestTotal(unittest.TestCase):\n"
                                  "    def test_it(self):\n        self.assertEqual(total([1]), 1)\n```",
    "d: the result in a fence": f"{T}\n\nUse:\n```python\ntotal = total([1, 2])\n```",
    # prose that looks like the head of a block, or like a decorator
    "e: a call and words": f"total(values) adds up the numbers:\n{INDENTED_T}",
    "e: words": f"The function:\n{INDENTED_T}",
    "e: words that begin with a keyword": f"with this function you can add:\n{INDENTED_T}",
    "e: for": f"For lists and tuples:\n{INDENTED_T}\nDone.",
    "e: a decorator-like line": f"@param values: the numbers\n@return the sum\n{T}",
    "e: an assignment and words": f"x = the sum:\n{INDENTED_T}",
    # signs
    "f: a string of several lines": "I WANT TO ANSWER: def total(values):\n    return sum(values) + len(\"\"\"\n"
                                    "  a\n\"\"\") - 5",
    "f: the same, cut": " def total(values):\n    return sum(values) + len(\"\"\"\n  a\n\"\"\") - 5",
    "f: a no-break blank in a string": "So:\ndef total(values):\n    return sum(values) + ord('\u00a0') - 160",
    "f: no-break blanks around it": "So:\ndef total(values):\n\u00a0\u00a0\u00a0\u00a0return\u00a0sum(values)",
    "f: a key that is a sign": "So:\nT = {}\nT['#'] = 2\n\ndef total(values):\n"
                               "    return sum(values) + T['#'] - 2\nDone!",
    "f: a session": ">>> def total(values):\n...     return sum(values)\n...\n>>> total([1, 2])\n3",
    "f: a session in a fence": "```pycon\n>>> def total(values):\n...     return sum(values)\n"
                               ">>> total([1, 2])\n3\n```",
    "f: quoted": "You said:\n> def total(values):\n>     return sum(values)\nso be it.",
    "f: a quoted fence": "> ```python\n> def total(values):\n>     return sum(values)\n> ```",
    "f: answer tags": f"<answer>\n{T}\n</answer>",
    "f: answer tags around a fence": f"<answer>{FENCED_T}\n</answer>",
    "f: answer tags on the line": f"<answer>{T}</answer>",
    # thoughts, and other versions than the last
    "g: a draft in thoughts": f"<think>\nMaybe\n{FENCED_WRONG_T}\nNo.\n</think>\n{T}",
    "g: the marker in thoughts": f"<think>\nI WANT TO ANSWER:\n{WRONG_T}\nNo.\n</think>\nI WANT TO ANSWER:\n{T}",
    "g: thoughts without a beginning": f"It is\n{FENCED_WRONG_T}\nor not.\n</think>\n\n{T}\n",
    "g: the end of thoughts in a string": "So:\n\ndef total(values):\n    return sum(values) + len('</think>') - 8\n"
                                          "Done!",
    "g: a fence, then the open": f"{FENCED_WRONG_T}\nThat is wrong. Better:\n\n{T}\n\nDone!",
    "g: a signature after": f"{FENCED_T}\nIts signature:\n```python\ndef total(values: list) -> int: ...\n```",
    "g: a signature with a docstring after": f"{T}\n\nIts signature:\n\ndef total(values):\n    \"\"\"Sums.\"\"\"\n",
    "g: a first part after": "```python\ndef total(values):\n    result = 0\n    for value in values:\n"
                             "        result += value\n    return result\n```\nLine by line:\n```python\n"
                             "def total(values):\n    result = 0\n```\nThis begins with 0.",
    # examples behind the function, in its own fence
    "h: the result has its name": f"```python\n{T}\n\ntotal = total([5, 7])\nprint(total)\n```",
    "h: a loop has its name": f"{T}\n\nfor total in [1, 2]:\n    print(total)",
    "h: sum": f"```python\n{T}\n\nsum = total([5, 7])\nprint(sum)\n```",
    # set-up by a call
    "i: a function fills a table": fences("TABLE = {}\n\ndef fill(table):\n    table.update({n: n for n in range(5)})",
                                          "fill(TABLE)", READS_TABLE),
    # signs around it
    "j: a label": f"Answer: {T}",
    "j: a label and an import": "Python: import math\ndef total(values):\n    return int(math.fsum(values))",
    "j: a label and tags": f"**Answer:** <code>{T}</code>",
    "j: words behind the tag": f"<answer>{T}</answer> Done.",
    "j: a special token": f"<|python_tag|>{T}<|eom_id|>",
    "j: a backtick": f"`{T}`",
    "j: two backticks": f"So: ``{T}`` is it.",
    "j: HTML that is Python as it stands": "<code>def total(values):\n"
                                           "    return sum(v for v in values if 9 &gt; v)</code>",
    "j: entities in code": "<pre>def total(values):\n    return sum(values) if len('&lt;') > 1 else 0</pre>",
    "j: HTML": "<pre>def total(values):\n    return sum(v for v in values if v &lt; 9 and v &gt; 0)</pre>",
    "j: a dash behind the marker": f"I WANT TO ANSWER - {T}",
    "j: the marker in a line": f"I see. I WANT TO ANSWER: {T}",
    "j: wide blanks": "好的：\ndef total(values):\n\u3000\u3000return\u2009sum(values)",
    "j: a quoted fence in a list": "1. So:\n\n    > ```python\n    > def total(values):\n    >     return sum(values)\n"
                                   "    > ```",
    # in a string
    "k: JSON": json.dumps({"explanation": "It's easy.", "code": T}),
    "k: JSON with lines": '{"code": "' + T + '"}',
    "k: JSON in a fence": f"Here:\n```json\n{json.dumps({'code': FENCED_T, 'done': True}, indent=1)}\n```",
    "k: a tool call": f"<tool_call>{json.dumps({'arguments': {'code': T}})}</tool_call>",
    "k: three quotes": f"'''python\n{T}\n'''\nThat is all.",
    "k: a string": f'code = """\n{T}\n"""\nprint(code)',
    "k: escaped lines": T.replace("\n", "\\n"),
    # others
    "future": "Sure!\n\nfrom __future__ import annotations\n\ndef total(values: List[Unknown]) -> int:\n"
              "    return sum(values)\n\nDone!",
    "annotations without their import": "```python\ndef total(values: List[float], rate: Optional[float] = None):\n"
                                        "    return sum(values)\n```",
    "annotations of methods": "class Sum:\n    def of(self, values: List[int]) -> Unknown:\n"
                              "        return sum(values)\n\ndef total(values):\n    return Sum().of(values)",
    "several fences, one bad": f"```python\ndef total(values:\n```\nSorry.\n{FENCED_T}",
    "a text after the fence that is Python": f"{FENCED_T}\n\nvalues = [1, 2]\n\nsum = 3",
    "json": f"{FENCED_T}\n```json\n{{\"total\": 3}}\n```",
    "a table of results": f"{FENCED_T}\n\n| values | total |\n| --- | --- |\n| [1, 2] | 3 |",
}


@pytest.mark.parametrize("name", TOTALS)
def test_right_answers_in_ordinary_shapes(name):
    calls = ["total([1, 2])", "total([3, 4])"]
    assert results(TOTALS[name], calls) == [3, 7], extract_code(TOTALS[name], calls)


def test_an_assignment_in_the_piece_of_the_definition_counts():
    """What the answer's own code does to a builtin is not undone: Python would not, either."""
    assert results("```python\nlen = 3\n\ndef total(values):\n    return len\n```", ["total([1])"]) == [3]


@pytest.mark.parametrize("answer, value", [
    (f"<think>\n{FENCED_T}\n</think>\nI do not know.",                 # what is thought is not said
     "NameError: name 'total' is not defined"),
    (f"{FENCED_T}\nNo, this:\n{FENCED_WRONG_T}", 4),                   # the last version counts
    (f"{FENCED_T}\nNo, this:\n{WRONG_T}\nDone!", 4),
    (f"```python\n{WRONG_T}\n```\n" + json.dumps({"code": T}), 4),     # strings count where nothing else does
    (f"```python\n{T}\n\ntotal = max\n```", 2),                       # something callable is a new version
    ("```python\nsum = 6\n\n" + T + "\n```", "TypeError: 'int' object is not callable")])
def test_wrong_answers(answer, value):
    assert results(answer, ["total([1, 2])"]) == [value]


def test_a_callable_may_take_the_name_of_a_builtin():
    answer = f"```python\n{T}\n```\n```python\nimport functools\nsum = functools.partial(max)\n```"
    assert results(answer, ["total([1, 2])"]) == [2]


# ---- every reference in every wrapping

WRAPPINGS = {
    "plain": "{code}",
    "fence": "```python\n{code}\n```",
    "bare fence": "```\n{code}\n```",
    "Py fence": "```Py3\n{code}\n```",
    "tildes": "~~~python\n{code}\n~~~",
    "open fence": "Here you are:\n```python\n{code}",
    "closed on the last line": "```python\n{code}```",
    "opened in a line": "Here it is: ```python\n{code}\n``` Tell me if it's right.",
    "listed fence": "1. The code:\n\n   ```python\n{indented}\n   ```\n2. That's all.",
    "prose around a fence": "Sure, it's easy (see below):\n\n```python\n{code}\n```\n\nExplanation:\n"
                            "- It's `one` function.",
    "prose around": "Sure, it's easy (see below):\n\n{code}\n\nExplanation:\n- It's one function.",
    "prose before": "Certainly!\n{code}",
    "prose after": "{code}\nI hope it helps!",
    "prose, indented code": "Sure, it's this:\n\n{indented}\n\nIt doesn't print.",
    "all indented": "{indented}",
    "marker": "I WANT TO ANSWER:\n{code}",
    "marker and fence": "I know enough.\n\n**I WANT TO ANSWER:**\n\n```python\n{code}\n```\nDone.",
    "marker's line": "I WANT TO ANSWER: {code}",
    "marker as a heading": "# I WANT TO ANSWER:\n{code}\nDone, I'd say.",
    "marker in a fence": "```python\n# I WANT TO ANSWER:\n{code}\n```",
    "marker after": "{code}\n\nI WANT TO ANSWER",
    "bare words": "python\n\n{code}\n\nExplanation",
    "byte order mark": "\ufeff{code}",
    "byte order mark in a fence": "```python\n\ufeff{code}\n```",
    "usage": "```python\n{code}\n```\nUse it:\n```python\nprint(int(input()))\n```\n",
    "import apart": "First:\n```python\nimport math\n```\nThen:\n```python\n{code}\n```",
    "import apart, no fence": "First we do this:\nimport math\nThen it's this:\n{code}\nDone.",
    "a draft before": "```python\ndef draft(n):\n    return (n\n```\nNo, it's this:\n```python\n{code}\n```",
    "cut after it": "{code}\n\ndef helper(values):\n    for value in values:\n        print(value, [",
    "tags": "<pre><code>{code}</code></pre>",
    "end of turn": "{code}<|eot_id|>",
}


@functools.cache
def references():
    """(Reference, calls, what the calls return) of the published format's files and of two tasks of each family."""
    tasks = [json.loads(line) for path in sorted((ROOT / "tests" / "colbench").rglob("*.jsonl"))
             for line in path.read_text().splitlines()]
    tasks = [task.get("task", task) for task in tasks] + stage(1).make_tasks(backend, 28, 5, "train", "some")[0]
    found = {task["ground_truth"]: tuple(task["test_cases"].values())[:3] for task in tasks}
    return [(code, calls, [repr(value) for value in results_of_python(code, calls)]) for code, calls in found.items()]


@pytest.mark.parametrize("newline", ["\n", "\r\n"], ids=["LF", "CRLF"])
@pytest.mark.parametrize("name", WRAPPINGS)
def test_every_reference_in_every_wrapping(name, newline):
    assert len(references()) >= 30
    for code, calls, expected in references():
        assert not all("Error" in value for value in expected)
        answer = WRAPPINGS[name].format(code=code, indented="   " + code.replace("\n", "\n   ")).replace("\n", newline)
        assert [repr(value) for value in results(answer, calls)] == expected, (answer, extract_code(answer))


# ---- time

LONG = {
    "assignments, then a bracket": lambda size: "x = 1\n" * (size // 6) + "x = (",
    "assignments, then a function": lambda size: "total = 3 + 5\n" * (size // 14) + "It is:\n" + F,
    "prose and code by turns": lambda size: "This is prose.\nx = 1\n" * (size // 21),
    "short prose and code by turns": lambda size: "ab cd\nx=1\n" * (size // 10),
    "functions that do not parse": lambda size: "def f(x: return\n" * (size // 16),
    "functions without end": lambda size: "def f(\n" * (size // 7),
    "equal functions": lambda size: "def f():0\n" * (size // 10),
    "equal classes and prose": lambda size: "class A:0\n" * (size // 10) + "It is so.",
    "a bracket": lambda size: "(" * size,
    "an assigned bracket": lambda size: "x = " + "(" * size,
    "operators": lambda size: "x = " + "-" * size + "1\nIt is so.",
    "a sum": lambda size: "x = 1" + "+1" * (size // 2) + "\nIt is so.",
    "nested blocks": lambda size: "".join(" " * i + "if 1:\n" for i in range(int((2 * size) ** 0.5))),
    "blocks down": lambda size: "".join(" " * i + "x=1\n" for i in range(int((2 * size) ** 0.5), 0, -1)),
    "fences": lambda size: "```python\n" * (size // 10),
    "fenced strings": lambda size: "```\nx = ''' \"\"\"\n" * (size // 16),
    "shorter and shorter fences": lambda size: "\n".join("`" * i for i in range(int((2 * size) ** 0.5), 2, -1)),
    "backticks": lambda size: "`" * size,
    "inline code": lambda size: "`x = 1` " * (size // 8),
    "a fence and blanks": lambda size: "```" + " " * size + "`",
    "markers": lambda size: "I WANT TO ANSWER:\n" * (size // 18),
    "markers with code": lambda size: "I WANT TO ANSWER: def f(n): return n\n" * (size // 38),
    "marker's stars": lambda size: "*" * size + "I WANT",
    "quotes": lambda size: '"' * size,
    "escaped quotes": lambda size: 'x = "' + '\\"' * (size // 2) + "\nIt is so.",
    "open strings": lambda size: "x = '''\n\"\"\"\n" * (size // 12),
    "docstrings with fences": lambda size: 'def f():\n """a\n ```\n f()\n ```\n """\n' * (size // 37) + "It is so.",
    "decorators": lambda size: "@a\n" * (size // 3),
    "bare words": lambda size: "so it is\n" * (size // 9),
    "tags": lambda size: "</s>" * (size // 4) + "x",
    "backslashes": lambda size: "x = \\\n" * (size // 6),
    "comprehensions": lambda size: "[a for a in b]\n" * (size // 15) + "It is so.",
    "cut functions": lambda size: "def f():\n x=1\n It is so.\n" * (size // 27),
    "docstrings and braces": lambda size: '  """{\n' * (size // 7),
    "open brackets": lambda size: "x = [\n" * (size // 6),
    "heads without bodies": lambda size: "if x:\n" * (size // 6),
    "calls and words": lambda size: "".join(f"f{i}(values) adds up:\n" for i in range(size // 20)),
    "open tags": lambda size: "<a " * (size // 3),
    "fences with prose": lambda size: "".join(f"```python\nx = {i}\nit is\n```\n" for i in range(size // 28)),
    "quotations": lambda size: "> " * (size // 2),
    "quoted brackets": lambda size: "> x = (\n" * (size // 8),
    "ticks of all lengths": lambda size: "".join("`" * (i % 40 + 1) + "a " for i in range(size // 22)),
    "names that need each other": lambda size: "".join(f"x{i} = x{i + 1}()\nThat is.\n"
                                                       for i in range(size // 24)) + "def f():\n    return x0",
    "tildes in a line": lambda size: "~~~ " * (size // 4),
    "fences of two kinds in a line": lambda size: "``` ~~~ " * (size // 8),
    "labels": lambda size: "a: def " * (size // 7),
    "escaped quotes without end": lambda size: '"\\' * (size // 2),
    "strings": lambda size: '"def f(): 0" ' * (size // 13),
    "quotes of two kinds": lambda size: "'''\"\"\"" * (size // 6),
    "escaped HTML": lambda size: "<b>f(1)\n&lt;x\n" * (size // 14),
    "thoughts": lambda size: "<think>x = (\n</think>" * (size // 21),
    "versions": lambda size: "".join(f"def f():\n    x = {i}\nIt is.\n" for i in range(size // 30)),
    "statements between comments": lambda size: "return x\n>>> \u2028#~~~" * (size // 20),
    "clauses": lambda size: "except:\n" * (size // 8),
    "null bytes": lambda size: "x = \0\n" * (size // 6),
}


@pytest.mark.parametrize("name", LONG)
def test_long_texts_take_linear_time(name):
    """0.2 s for 100 KB on a free processor: three times that are allowed here."""
    took = []
    for _ in range(3):                                              # the least of three: other processes disturb it
        began = time.process_time()
        extract_code(LONG[name](100_000))
        took.append(time.process_time() - began)
        if took[-1] < 0.2:
            break
    assert min(took) < 0.6


@pytest.mark.parametrize("name", ["assignments, then a bracket", "functions that do not parse", "fences",
                                  "docstrings and braces", "names that need each other"])
def test_a_megabyte_takes_seconds(name):
    began = time.process_time()
    extract_code(LONG[name](1_000_000))
    assert time.process_time() - began < 6


@pytest.mark.parametrize("noise", ["x = 1\n" * 300 + "x = (\n", "total = 3 + 5\n" * 200,
                                   "This is prose.\nx = 1\n" * 5000])
def test_the_function_is_found_after_much_else(noise):
    assert results(noise + "It is:\n" + F) == WANTED
