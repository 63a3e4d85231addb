"""What a test asks of an answer, and what the reply is worth: data is compared here, so no object of an answer decides.

    test = Test("f(2) <= 7.5")                      # operator "LtE"; side 0 is asked of answers, side 1 is a literal
    test.of_reference                               # "((f(2)), (7.5), )"
    test.of_answers                                 # "((f(2)), )"

docs/scorer.md has the rules of tests that are comparisons."""
import ast
import builtins
import functools
import json
import operator
from collections import namedtuple

from colbench.extract_code import NO_PYTHON, parse

ASKS_NOTHING = "it asks the answer nothing"
BROKEN = ["error", "a broken result"]                               # code wrote it itself
TOO_DEEP = RecursionError, MemoryError
ORDER = {"Lt": operator.lt, "LtE": operator.le, "Gt": operator.gt, "GtE": operator.ge}
LAZY = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.BoolOp, ast.IfExp, ast.Compare)


class Test:
    """A test, as it is put to code, and what the reference says to it.

    call: its expression
    operator: the name of a comparison of two sides in ast, else None
    nodes: the syntax trees of the two sides, or of the call; none where the call cannot be read
    sides: the expressions of the two sides, or the call
    asked: the numbers of the sides that are asked of answers: those that are not literals
    value: what an answer must give: ["ok", value], or ["error", why the test cannot be graded]
    on_reference: of a comparison the values of both sides
    fixed: the sides that must have the reference's value"""

    def __init__(self, call):
        self.call, self.operator, self.nodes = call.strip(), None, ()
        self.sides, self.asked, self.fixed, self.on_reference = (self.call,), (0,), (), ()
        try:
            tree = parse_call(self.call).body
            if isinstance(tree, ast.Compare) and len(tree.ops) == 1:
                nodes = tree.left, tree.comparators[0]
                self.sides = tuple(map(ast.unparse, nodes))
                self.asked = tuple(index for index, node in enumerate(nodes) if not is_literal(node))
                self.operator, self.nodes = type(tree.ops[0]).__name__, nodes
            else:
                self.nodes = (tree,)
        except NO_PYTHON:
            pass                                                    # its result says so

    @property
    def of_reference(self):
        return tuple_of(self.sides) if self.operator else self.call

    @property
    def of_answers(self):
        return tuple_of([self.sides[i] for i in self.asked]) if self.operator else self.call

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
        except TOO_DEEP:
            self.value = ["error", "an expression that is nested too deep"]
        if self.operator and self.value[0] == "ok":
            is_whole = is_tuple(result[1], len(self.sides))
            self.on_reference = result[1][1] if is_whole else ()
            self.value = compared(self.operator, self.on_reference) if is_whole else BROKEN

    def doubtful(self, names):
        """What does not certainly ask an answer something: the whole of what it is asked, and each side that could have
        any value as far as the reference's result says."""
        sides = [i for i in self.asked if not self.asks_for_sure(i, names)]
        texts = []
        if len(sides) == len(self.asked):
            texts.append(self.of_answers)
        if self.operator and not self.states_the_values():
            texts += [self.sides[i] for i in sides]
        return texts

    def asks_for_sure(self, index, names):
        """Does this side certainly read a name that an empty answer lacks? (False: perhaps it does.)"""
        try:
            return reads_for_sure(self.nodes[index], names, bound_names(*self.nodes))
        except TOO_DEEP:
            return False

    def states_the_values(self):
        """Is it an equality that holds on the reference? Then it says what value its sides have."""
        return self.operator in ("Eq", "Is") and equal_values(*self.on_reference)

    def learn_nothing(self, of_nobody):
        """Take what an empty answer gives, {expression: result}: a test that it passes asks the answer nothing, and the
        sides of a comparison that have the reference's value without an answer must have it on any."""
        if self.operator:
            self.fixed = [i for i in self.asked if self.states_the_values() or
                          of_nobody.get(self.sides[i]) == ["ok", self.on_reference[i]]]
        if self.of_answers in of_nobody and self.result(of_nobody[self.of_answers]) == self.value:
            self.value = ["error", ASKS_NOTHING]

    def result(self, result):
        """What the test gives, where an answer gives `result` to what it is asked: ["ok", value] or ["error", why not].
        """
        if result[0] == "error" or not self.operator:
            return result
        if not is_tuple(result[1], len(self.asked)):
            return BROKEN
        sides = list(self.on_reference)
        for index, value in zip(self.asked, result[1][1]):
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


@functools.lru_cache(64)
def parse_call(call):
    """The syntax tree of a call. It is asked for more than once; nobody changes it."""
    return parse(call, "eval")


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
    return type(value) is list and value[0] == "tuple" and len(value[1]) == length


def compares(node, names):
    """Is there a comparison in an expression, outside of what it passes to functions of the answer?"""
    if calls_by_name(node) and not names.are_known(node.func.id):
        return False
    if isinstance(node, ast.Compare):
        return True
    return any(compares(child, names) for child in ast.iter_child_nodes(node))


def calls_by_name(node):
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


def bound_names(*nodes):
    """The names that expressions bind themselves: in comprehensions, by lambdas and by :=."""
    names = set()
    for node in nodes:
        for child in ast.walk(node):
            if isinstance(child, ast.arg):
                names.add(child.arg)
            elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                names.add(child.id)
    return names


def reads_for_sure(node, names, bound):
    """Does every evaluation of an expression read a name that an empty answer lacks? (A name that it also binds
    somewhere does not count, and neither does what stands in an expression of which a part may be left out.)"""
    if isinstance(node, ast.Name):
        return not names.are_known(node.id) and node.id not in bound
    if isinstance(node, LAZY):
        return False
    return any(reads_for_sure(part, names, bound) for part in ast.iter_child_nodes(node))


def functions_under_test(call, imported, defined=()):
    """The names that a call tests.

    They are those that it reads, but for built-in and imported ones. If there are none: those of builtins that the
    reference `defined` anew. If there are none: the outermost imported one that is called, or read."""
    try:
        tree = parse_call(call.strip())
        bound = bound_names(tree)
        nodes = list(ast.walk(tree))
    except NO_PYTHON:
        return set()
    called = [node.func.id for node in nodes if calls_by_name(node)]
    read = [node.id for node in nodes if isinstance(node, ast.Name) and node.id not in bound]
    new_names = {name for name in read if name not in imported and not hasattr(builtins, name)}
    if new_names:
        return new_names
    redefined = {name for name in read if name in defined}
    if redefined:
        return redefined
    outermost = [name for name in called + read if name in imported and name not in bound]
    return set(outermost[:1])


# ---------------------------------------------------------------------------------------------------------------------
# values, as values.encode() gives them

def compared(operator_name, sides):
    """["ok", 1 or 0]: does a comparison of two encoded values hold? ["error", why] where values do not say so."""
    try:
        return ["ok", int(holds(operator_name, *sides))]
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
    if type(value) is int:
        return value, 1
    kind, text = value if type(value) is list and len(value) == 2 else ("", value)
    if kind not in ("int", "ratio"):
        raise TypeError("a comparison of what is not a finite number")
    numerator, _, denominator = text.partition("/")
    return int(numerator, 16), int(denominator or "1", 16)


DICTS = ("dict", "odict", "counter")
SEQUENCES = ("list", "tuple", "deque")


def equal_values(a, b):
    """Are two values, as values.encode() gives them, equal by Python's rules?"""
    if a == b:
        return True
    if not (type(a) is type(b) is list and len(a) == len(b) == 2):
        return False
    if a[0] in DICTS and b[0] in DICTS:
        return equal_dicts(a, b)
    (kind, items), (other_kind, other_items) = a, b
    if kind != other_kind or kind not in SEQUENCES or len(items) != len(other_items):
        return False
    return all(map(equal_values, items, other_items))


def equal_dicts(a, b):
    (kind, pairs), (other_kind, other_pairs) = a, b
    if kind == other_kind == "counter":
        pairs, other_pairs = without_zeros(pairs), without_zeros(other_pairs)
    if kind != other_kind and "odict" in (kind, other_kind):                    # the order counts among OrderedDicts
        pairs, other_pairs = sorted(pairs, key=json.dumps), sorted(other_pairs, key=json.dumps)
    if len(pairs) != len(other_pairs):
        return False
    for (key, value), (other_key, other_value) in zip(pairs, other_pairs):
        if key != other_key or not equal_values(value, other_value):
            return False
    return True


def without_zeros(counts):
    """The pairs of a Counter, in which a missing count is 0."""
    return [pair for pair in counts if pair[1] != 0]
