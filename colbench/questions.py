"""What a test asks of an answer, and what the reply is worth: no object of an answer takes part in a comparison.

    test = Test("abs(f(2) - 6.14) < .001")          # a comparison, operator "Lt", of two sides
    test.whole                                      # "((abs(f(2) - 6.14)), (0.001))", put to the reference
    test.asked                                      # "f(2)", put to answers
    test.rest                                       # "abs(value_0 - 6.14)", evaluated elsewhere with their values

docs/scorer.md has the rules."""
import ast
import builtins
import contextlib
import copy
import operator
from collections import namedtuple

from colbench.extract_code import NO_PYTHON, parse
from colbench.values import equal_values, EXACT, numbers_in, real

ASKS_NOTHING = "it asks the answer nothing"
NONE_ALONE = f"{ASKS_NOTHING} (all its tests give None, as an empty function does)"
BROKEN = ["error", "a broken result"]                               # code wrote it itself
ORDER = {"Lt": operator.lt, "LtE": operator.le, "Gt": operator.gt, "GtE": operator.ge}
SCOPES = ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp      # have variables of their own
DEPENDENT = ast.Starred, ast.Slice, ast.FormattedValue              # expressions that cannot stand alone


class Test:
    """A test, as it is put to code, and what the reference says to it.

    call: its expression
    operator: the name of a comparison of two sides in ast, else None
    nodes: the syntax trees of the two sides, or of the call; none where the call cannot be read
    whole: the expression that is put to the reference
    asks: the syntax trees of what answers evaluate, all else is evaluated with their values
    asked: the expression that is put to answers, a tuple where they have several asks
    rest: the expression of what is left of the sides without the asks; None where nothing is
    is_settled: do the reference's own values, put together by the rest, give what the whole gives?
    value: what an answer must give: ["ok", value], or ["error", why the test cannot be graded]
    on_reference: the values of the sides
    asked_on_reference: the values of the asks"""

    def __init__(self, call):
        self.call = self.whole = self.asked = call.strip()
        self.operator, self.nodes, self.asks, self.rest = None, (), [], None
        self.is_settled, self.on_reference, self.asked_on_reference = False, [], []
        with contextlib.suppress(*NO_PYTHON):                       # its result says so
            tree = parse(self.call, "eval").body
            nodes = [tree]
            if isinstance(tree, ast.Compare) and len(tree.ops) == 1:
                nodes = [tree.left, tree.comparators[0]]
                self.operator = type(tree.ops[0]).__name__
                self.whole = together(map(ast.unparse, nodes))
            inline = Inline()
            self.nodes = [inline.visit(node) for node in nodes]
            self.parents = {child: node for side in self.nodes for node in ast.walk(side)
                            for child in ast.iter_child_nodes(node)}

    @property
    def is_gradeable(self):
        return self.value[0] == "ok"

    # ----------------------------------------------------------------------------------------------------------------
    # what the reference says

    def learn_reference(self, result, names):
        """Take what the reference gives for the whole: ["ok", value] or ["error", reason]."""
        self.value = result
        if result[0] == "error":
            return
        self.on_reference = values_of(result, len(self.nodes)) if self.operator else [result[1]]
        if self.on_reference is None:
            self.value = BROKEN
            return
        try:
            if not self.nodes:
                raise RecursionError
            if any(compares(node, names) for node in self.nodes):
                self.value = ["error", "a comparison inside an expression"]
                return
            asks = [ask for node in self.nodes for ask in asks_in(node, names)]
            if not asks:
                self.value = ["error", ASKS_NOTHING]
                return
            self.ask(asks)
        except (RecursionError, MemoryError):
            self.value = ["error", "an expression that is nested too deep"]
            return
        if self.rest is None and ":=" not in self.call:
            self.asked_on_reference = [self.on_reference[self.nodes.index(ask)] for ask in self.asks]
            self.is_settled = True

    def ask(self, asks):
        """Put these parts of the sides (syntax trees) to answers."""
        self.asks = asks
        self.asked = together(map(ast.unparse, asks))
        parts = [with_placeholders(node, asks) for node in self.nodes if is_partly_asked(node, asks)]
        self.rest = together(parts) if parts else None

    def settle(self, result, rest_result):
        """Take what the reference gives for `asked`, and the rest with it. Where it is no data, as an iterator is not,
        or does not give the sides again, larger parts of them are asked."""
        values = values_of(result, len(self.asks))
        if values is not None and self.sides(values, rest_result) == self.on_reference:
            self.asked_on_reference, self.is_settled = values, True
            return
        asks = []
        for ask in map(self.larger, self.asks):
            asks = [other for other in asks if other not in ast.walk(ask)]
            if not any(ask in ast.walk(other) for other in asks):
                asks.append(ask)
        if asks == self.asks:
            self.value = ["error", result[1] if result[0] == "error" else "it gives another value in parts"]
        self.ask(asks)

    def larger(self, ask):
        """The next larger part around an ask; the ask itself where it is a whole side."""
        node = ask
        while node not in self.nodes:
            node = self.parents[node]
            if isinstance(node, ast.expr) and not isinstance(node, DEPENDENT):
                return node
        return ask

    def numbers(self):
        """The floats among what the reference gives."""
        return numbers_in([*self.on_reference, *self.asked_on_reference])

    def judge(self, tolerance):
        """See what the sides of a comparison say, when it is known what numbers the task has."""
        self.tolerance = tolerance
        if self.operator and self.is_gradeable:
            self.value = compared(self.operator, self.on_reference, tolerance)

    def is_doubtful(self, names):
        """Might an answer that defines nothing give a value? (Not where a side is the call of a tested function.)"""
        return not any(calls_tested(node, names) for node in self.nodes)

    def learn_nothing(self, result):
        """Take what an empty answer gives for the whole: a test that it passes asks the answer nothing."""
        sides = values_of(result, len(self.nodes)) if self.operator else [result[1]]
        if result[0] == "ok" and sides and self.result_of(sides) == self.value:
            self.value = ["error", ASKS_NOTHING]

    def asks_for_none(self):
        """Does the reference give None to all that is asked? Then an empty function gives the same."""
        return self.asked_on_reference.count(None) == len(self.asked_on_reference)

    # ----------------------------------------------------------------------------------------------------------------
    # what an answer says

    def as_asked(self, values):
        """The value of `asked`, where the asks have these values."""
        return values[0] if len(values) == 1 else ["tuple", *values]

    def values(self, result):
        """What an answer gives for the asks, by the result of `asked`; None where it gives no values."""
        return values_of(result, len(self.asks))

    def result(self, result, rest_result):
        """What the test gives, ["ok", value] or ["error", why not], where an answer gives `result` for `asked` and the
        rest, with these values, gives `rest_result`."""
        if result[0] == "error" or not self.is_gradeable:
            return result
        if self.rest is not None and rest_result[0] == "error":
            return rest_result
        values = self.values(result)
        sides = None if values is None else self.sides(values, rest_result)
        return BROKEN if sides is None else self.result_of(sides)

    def sides(self, values, rest_result):
        """The values of the sides, where the asks have these values; None where the rest has none."""
        parts = []
        if self.rest is not None:
            num_parts = sum(is_partly_asked(node, self.asks) for node in self.nodes)
            parts = values_of(rest_result, num_parts)
        if parts is None:
            return None
        sides = []
        for node, on_reference in zip(self.nodes, self.on_reference):
            if node in self.asks:
                sides.append(values[self.asks.index(node)])
            elif is_partly_asked(node, self.asks):
                sides.append(parts.pop(0))
            else:
                sides.append(on_reference)
        return sides

    def result_of(self, sides):
        """What the test gives where its sides have these values. Where an equality holds on the reference, each side
        must have the reference's value."""
        if not self.operator:
            return ["ok", sides[0]]
        value = compared(self.operator, sides, self.tolerance)
        if value != self.value or self.operator not in ("Eq", "Is") or value != ["ok", 1]:
            return value
        if all(equal_values(*pair, self.tolerance) for pair in zip(sides, self.on_reference)):
            return value
        return ["error", "another value on one side of the comparison"]


class Names(namedtuple("Names", "lent tested")):
    """The names in the calls of a task: those that the reference lends to answers (its imports), and those that are
    tested, which answers must define."""


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


# ---------------------------------------------------------------------------------------------------------------------
# expressions

class Inline(ast.NodeTransformer):
    """Puts what `:=` names in the place of the name, so that no part of a test needs another."""

    def __init__(self):
        self.values = {}

    def visit_NamedExpr(self, node):
        self.values[node.target.id] = value = self.visit(node.value)
        return value

    def visit_Name(self, node):
        return copy.deepcopy(self.values.get(node.id, node))


class Placeholders(ast.NodeTransformer):
    """Puts names in the place of the parts that have a number."""

    def visit(self, node):
        return ast.Name(placeholder(node.number)) if hasattr(node, "number") else self.generic_visit(node)


def placeholder(number):
    """The name of an ask's value in the rest."""
    return f"value_{number}"


def with_placeholders(node, asks):
    """The text of an expression with a placeholder for each of the asks in it."""
    for number, ask in enumerate(asks):
        ask.number = number
    text = ast.unparse(Placeholders().visit(copy.deepcopy(node)))
    for ask in asks:
        del ask.number
    return text


def asks_in(node, names):
    """The smallest parts of an expression that need the answer: calls of what is tested, its name elsewhere, and
    lambdas and comprehensions that have its name in them."""
    is_name = is_tested(node, names)
    has_name = isinstance(node, SCOPES) and any(is_tested(inner, names) for inner in ast.walk(node))
    if is_name or has_name or calls_tested(node, names):
        return [node]
    return [ask for child in ast.iter_child_nodes(node) for ask in asks_in(child, names)]


def is_tested(node, names):
    return isinstance(node, ast.Name) and node.id in names.tested


def calls_tested(node, names):
    """Does an expression call, by its name, what is tested?"""
    return isinstance(node, ast.Call) and is_tested(node.func, names)


def compares(node, names):
    """Is there a comparison in an expression, outside of what it passes to what is tested?"""
    if calls_tested(node, names):
        return False
    if isinstance(node, ast.Compare):
        return True
    return any(compares(child, names) for child in ast.iter_child_nodes(node))


def is_partly_asked(node, asks):
    """Is some part of a side asked, but not the whole side?"""
    return node not in asks and any(ask in ast.walk(node) for ask in asks)


def together(expressions):
    """The text of one expression alone, or of a tuple of several."""
    first, *others = expressions
    return f"(({'), ('.join([first, *others])}))" if others else first


# ---------------------------------------------------------------------------------------------------------------------
# values, as values.encode() gives them

def values_of(result, number):
    """The values in the result of a tuple of so many, or of one expression alone; None where they are not there."""
    if result is None or result[0] == "error":
        return None
    value = result[1]
    if number == 1:
        return [value]
    is_tuple = type(value) is list and value[0] == "tuple" and len(value) == 1 + number
    return value[1:] if is_tuple else None


def compared(operator_name, sides, tolerance):
    """["ok", 1 or 0]: does a comparison of two encoded values hold? ["error", why] where values do not say so."""
    try:
        return ["ok", int(holds(operator_name, *sides, tolerance))]
    except TypeError as error:
        return ["error", str(error)]


def holds(kind, a, b, tolerance=None):
    """Does a comparison of two encoded values hold? TypeError where values do not say so.
    Equal values may differ by the rounding of floats (`tolerance`); all other comparisons are exact."""
    if "array" in [side[0] for side in (a, b) if type(side) is list]:
        raise TypeError("a comparison with an array")
    is_identity = kind in ("Is", "IsNot") and b in (None, 0, 1)
    if kind == "Eq" or kind == "Is" and is_identity:
        return equal_values(a, b, tolerance)
    if kind == "NotEq" or kind == "IsNot" and is_identity:
        return not equal_values(a, b, EXACT)
    if kind not in ORDER:
        raise TypeError(f"a comparison by {kind.lower()}")
    if type(a) is type(b) is str:
        return ORDER[kind](a, b)
    return ORDER[kind](real(a), real(b))
