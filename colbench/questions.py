"""What a test asks of an answer, and what the reply is worth: data is compared here, so no object of an answer decides.

    test = Test("f(2) <= 7.5")                      # operator "LtE"; side 0 is asked of answers, side 1 is a literal
    test.of_reference                               # "((f(2)), (7.5), )"
    test.of_answers                                 # "((f(2)), )"

docs/scorer.md has the rules of tests that are comparisons."""
import ast
import builtins
import contextlib
import operator
from collections import namedtuple

from colbench.extract_code import NO_PYTHON, parse
from colbench.values import equal_values, real

ASKS_NOTHING = "it asks the answer nothing"
NONE_ALONE = f"{ASKS_NOTHING} (all its tests give None, as an empty function does)"
BROKEN = ["error", "a broken result"]                               # code wrote it itself
ORDER = {"Lt": operator.lt, "LtE": operator.le, "Gt": operator.gt, "GtE": operator.ge}


class Test:
    """A test, as it is put to code, and what the reference says to it.

    call: its expression
    of_reference, of_answers: the expressions that are put to the reference, and to answers
    operator: the name of a comparison of two sides in ast, else None
    nodes: the syntax trees of the two sides, or of the call; none where the call cannot be read
    sides: the expressions of the two sides, or the call
    asked: the numbers of the sides that are asked of answers: all but literals and those with a known value
    value: what an answer must give: ["ok", value], or ["error", why the test cannot be graded]
    on_reference: of a comparison the values of both sides
    fixed: the sides that must have the reference's value"""

    def __init__(self, call):
        self.call = call.strip()
        self.operator, self.nodes = None, ()
        self.sides, self.asked, self.fixed, self.on_reference = (self.call,), (0,), (), ()
        self.of_reference = self.of_answers = self.call
        with contextlib.suppress(*NO_PYTHON):                       # its result says so
            tree = parse(self.call, "eval").body
            nodes = (tree,)
            if isinstance(tree, ast.Compare) and len(tree.ops) == 1:
                nodes = tree.left, tree.comparators[0]
                self.sides = tuple(map(ast.unparse, nodes))
                self.operator = type(tree.ops[0]).__name__
                self.of_reference = tuple_of(self.sides)
                self.ask([index for index, node in enumerate(nodes) if not is_literal(node)])
            self.nodes = nodes

    def ask(self, sides):
        """Put these sides (numbers) of a comparison to answers."""
        self.asked = sides
        self.of_answers = tuple_of([self.sides[index] for index in sides])

    @property
    def is_gradeable(self):
        return self.value[0] == "ok"

    def learn_reference(self, result, names):
        """Take what the reference gives: ["ok", value] or ["error", reason]."""
        self.value = result
        if result[0] == "error":
            return
        try:
            if not self.nodes:
                raise RecursionError
            if any(compares(node, names) for node in self.nodes):
                self.value = ["error", "a comparison inside an expression"]
        except (RecursionError, MemoryError):
            self.value = ["error", "an expression that is nested too deep"]
        if self.operator and self.is_gradeable:
            is_whole = is_tuple(result[1], len(self.sides))
            self.on_reference = result[1][1:] if is_whole else ()
            self.value = compared(self.operator, self.on_reference) if is_whole else BROKEN

    def doubtful(self, names):
        """What does not certainly ask an answer something: the whole of what it is asked, and sides that may have any
        value. (What is certain: the call of a function that is the answer's to define.)"""
        sides = []
        for index in self.asked:
            if ":=" in self.call or not calls_unknown(self.nodes[index], names):
                sides.append(self.sides[index])
        return [self.of_answers, *sides] if sides or not self.asked else []

    def asks_for_none(self):
        """Does the reference give None to all that is asked? Then an empty function gives the same."""
        values = [self.value[1]]
        if self.operator:
            values = [self.on_reference[i] for i in self.asked]
        return values.count(None) == len(values)

    def learn_nothing(self, of_nobody):
        """Take what an empty answer gives, {expression: result}: a test that it passes asks the answer nothing, and the
        sides of a comparison that have the reference's value without an answer must have it on any. So must those of an
        equality that holds on the reference: it says what value they have."""
        known = []
        if self.operator:
            known = [i for i in self.asked if of_nobody.get(self.sides[i]) == ["ok", self.on_reference[i]]]
            states_values = self.operator in ("Eq", "Is") and equal_values(*self.on_reference)
            self.fixed = self.asked if states_values else known
        if self.of_answers in of_nobody and self.result(of_nobody[self.of_answers]) == self.value:
            self.value = ["error", ASKS_NOTHING]
        if 0 < len(known) < len(self.asked) and ":=" not in self.call:        # an answer could read what it must give
            self.ask([i for i in self.asked if i not in known])

    def result(self, result):
        """What the test gives, where an answer gives `result` to what it is asked: ["ok", value] or ["error", why not].
        """
        if result[0] == "error" or not self.operator or not self.is_gradeable:
            return result
        if not is_tuple(result[1], len(self.asked)):
            return BROKEN
        sides = list(self.on_reference)
        for index, value in zip(self.asked, result[1][1:]):
            sides[index] = value
        value = compared(self.operator, sides)
        if value == self.value and not all(equal_values(self.on_reference[i], sides[i]) for i in self.fixed):
            return ["error", "another value on one side of the comparison"]
        return value


class Names(namedtuple("Names", "lent to_define")):
    """The names in the calls of a task: those that the reference lends to answers (its imports), and those that are
    tested, which answers must define."""

    def are_known(self, name):
        """Has an empty answer something of this name?"""
        if name in self.to_define:
            return False
        return name in self.lent or hasattr(builtins, name) or name.startswith("__")


def names_of(sent):
    """The Names, from what the reference sent (sandbox_worker.imported_names).

    Tested is what it defines itself, but for builtins (helpers, as a rule). If there is nothing: those builtins. If
    there are none: the first name that a call reads, though it is imported."""
    imported = {name for name, module, _ in sent if module}
    defined = {name for name, module, _ in sent if not module}
    tested = {name for name in defined if not hasattr(builtins, name)} or defined
    if sent and not tested:
        tested = {sent[0][0]}
    return Names(imported - tested, tested)


def is_literal(node):
    try:
        ast.literal_eval(node)
        return True
    except (SyntaxError, TypeError, ValueError):
        return False


def tuple_of(expressions):
    """The text of a tuple of expressions."""
    items = [f"({expression}), " for expression in expressions]
    return f"({''.join(items)})"


def is_tuple(value, length):
    """Is this an encoded tuple of so many values?"""
    return type(value) is list and value[0] == "tuple" and len(value) == 1 + length


def compares(node, names):
    """Is there a comparison in an expression, outside of what it passes to functions of the answer?"""
    if calls_unknown(node, names):
        return False
    if isinstance(node, ast.Compare):
        return True
    return any(compares(child, names) for child in ast.iter_child_nodes(node))


def calls_unknown(node, names):
    """Does an expression call, by its name, a function that is the answer's to define?"""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not names.are_known(node.func.id)


# ---------------------------------------------------------------------------------------------------------------------
# comparisons of values, as values.encode() gives them

def compared(operator_name, sides):
    """["ok", 1 or 0]: does a comparison of two encoded values hold? ["error", why] where values do not say so."""
    try:
        return ["ok", int(holds(operator_name, *sides))]
    except TypeError as error:
        return ["error", str(error)]


def holds(kind, a, b):
    """Does a comparison of two encoded values hold? TypeError where values do not say so."""
    if "array" in [side[0] for side in (a, b) if type(side) is list]:
        raise TypeError("a comparison with an array")
    if kind in ("Eq", "NotEq") or kind in ("Is", "IsNot") and b in (None, 0, 1):
        return equal_values(a, b) == (kind in ("Eq", "Is"))
    if kind not in ORDER:
        raise TypeError(f"a comparison by {kind.lower()}")
    if type(a) is type(b) is str:
        return ORDER[kind](a, b)
    if equal_values(a, b):
        return kind in ("LtE", "GtE")
    return ORDER[kind](real(a), real(b))
