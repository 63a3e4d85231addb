"""Splits a test into what the answer computes and what is computed elsewhere, and judges the values. An answer's
objects are never compared.

    test = Test("abs(f(2) - 6.14) < .001")          # a comparison, operator "Lt", of two sides
    test.whole                                      # "((abs(f(2) - 6.14)), (0.001))", put to the solution
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
    """A test, and its values on the solution.

    call: its expression
    operator: if it is a comparison of two sides, the operator's name in ast, else None
    sides: the syntax trees of the two sides, or of the call; empty if the call cannot be parsed
    whole: the expression that the solution evaluates
    asks: the syntax trees of what answers evaluate; all else is evaluated with their values
    asked: the expression that answers evaluate, a tuple if there are several asks
    parts: the sides that contain an ask, but are none
    rest: the expression of the parts, with names in place of the asks; None if there are no parts
    is_settled: whether the rest gives the same as the whole if the asks have the solution's values
    value: what an answer must give: ["ok", value], or ["error", why the test cannot be graded]
    on_solution: the values of the sides
    asked_on_solution: the values of the asks"""

    def __init__(self, call):
        self.call = self.whole = self.asked = call.strip()
        self.operator, self.sides, self.asks, self.parts, self.rest = None, [], [], [], None
        self.is_settled, self.on_solution, self.asked_on_solution = False, [], []
        with contextlib.suppress(*NO_PYTHON):                       # its result says so
            tree = parse(self.call, "eval").body
            self.parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
            if isinstance(tree, ast.Compare) and len(tree.ops) == 1:
                sides = [tree.left, tree.comparators[0]]
                self.whole = together(map(ast.unparse, sides))
                self.operator = type(tree.ops[0]).__name__
                self.sides = sides
            else:
                self.sides = [tree]

    @property
    def is_gradeable(self):
        return self.value[0] == "ok"

    # ----------------------------------------------------------------------------------------------------------------
    # what answers evaluate

    def find_asks(self, names):
        """Set the asks: the parts of the sides that the answer evaluates. They begin as the calls of its functions, as
        `f(2)` in `abs(f(2) - 6.14) < .001`, and grow while they contain nothing of the expected value.
        Raises RecursionError if an expression is nested too deep."""
        names_here = {node.target.id for side in self.sides for node in ast.walk(side)
                      if isinstance(node, ast.NamedExpr)}
        asks = [ask for side in self.sides for ask in asks_in(side, names)]
        if any(reads(ask, names_here) for ask in asks):             # a name that `:=` sets elsewhere
            self.ask([side for side in self.sides if not is_literal(side)])
            return
        self.ask(asks)
        while (grown := self.without_inner(map(self.grown, self.asks))) != self.asks:
            self.ask(grown)

    def ask(self, asks):
        """Make these parts of the sides (syntax trees) the asks."""
        self.asks = asks
        self.asked = together(map(ast.unparse, asks)) if asks else ""
        asked_of = {self.ancestors(ask)[-1] for ask in asks}
        has_names = ":=" in self.call and asks                      # one side may need a name that another sets
        self.parts = [side for side in self.sides if side not in asks and (side in asked_of or has_names)]
        texts = [with_placeholders(side, asks) for side in self.parts]
        self.rest = together(texts) if texts else None

    def ancestors(self, node):
        """A part of a side, the expressions around it, and the side itself, from the inner to the outer."""
        nodes = [node]
        while nodes[-1] not in self.sides:
            nodes.append(self.parents[nodes[-1]])
        return nodes

    def without_inner(self, asks):
        """The asks without repeats, and without those inside another ask."""
        asks = list(dict.fromkeys(asks))
        return [ask for ask in asks if not any(node in asks for node in self.ancestors(ask)[1:])]

    def grown(self, ask):
        """The expression around an ask, if it tells nothing about the wanted value: an attribute, or a call with only
        asks and builtins. Otherwise the ask. So an answer may return an iterator if the test is `list(f(3))`."""
        if ask in self.sides:
            return ask
        parent = self.parents[ask]
        if isinstance(parent, ast.Attribute) and isinstance(self.parents.get(parent), ast.Call):
            parent = self.parents[parent]                           # a method
        if isinstance(parent, ast.Call):
            arguments = [*parent.args, *(keyword.value for keyword in parent.keywords)]
            others = [node for node in arguments if node not in self.asks]
            tells_nothing = all(isinstance(node, ast.Name) and hasattr(builtins, node.id) for node in others)
            is_method = isinstance(parent.func, ast.Attribute) and parent.func.value == ask
            is_own = is_method or parent.func == ask                # the ask's method, or itself
            return parent if tells_nothing and (is_own or isinstance(parent.func, ast.Name)) else ask
        return parent if isinstance(parent, ast.Attribute) else ask

    def larger(self, ask):
        """The next larger part around an ask, or the ask itself if it is a whole side."""
        for node in self.ancestors(ask)[1:]:
            if isinstance(node, ast.expr) and not isinstance(node, DEPENDENT):
                return node
        return ask

    # ----------------------------------------------------------------------------------------------------------------
    # the solution's values

    def learn_solution(self, result, names):
        """Take the solution's result for the whole: ["ok", value] or ["error", reason]."""
        self.value = result
        if result[0] == "error":
            return
        self.on_solution = values_of(result, len(self.sides)) if self.operator else [result[1]]
        if self.on_solution is None:
            self.value = BROKEN
            return
        try:
            if not self.sides:
                raise RecursionError
            if any(compares(side, names) for side in self.sides):
                self.value = ["error", "a comparison inside an expression"]
                return
            self.find_asks(names)
        except (RecursionError, MemoryError):
            self.value = ["error", "an expression that is nested too deep"]
            return
        if not self.asks:
            self.value = ["error", ASKS_NOTHING]
        if self.rest is None:
            self.asked_on_solution = [self.on_solution[self.sides.index(ask)] for ask in self.asks]
            self.is_settled = True

    def settle(self, result, rest_result):
        """Take the solution's result for `asked`, and the rest's result with it. If the former is no data (an
        iterator), or if they do not give the sides' values, make larger parts of the sides the asks."""
        values = self.values(result)
        sides = self.values_of_sides(values, rest_result)
        if sides and all(map(equal_values, sides, self.on_solution)):
            self.asked_on_solution, self.is_settled = values, True
            return
        larger = self.without_inner(map(self.larger, self.asks))
        if larger == self.asks:
            self.value = ["error", result[1] if result[0] == "error" else "it gives another value in parts"]
        self.ask(larger)

    def numbers(self):
        """The floats among the solution's values."""
        return numbers_in([*self.on_solution, *self.asked_on_solution])

    def judge(self, tolerance):
        """Evaluate the comparison on the solution's values, now that the numbers of the whole task are known."""
        self.tolerance = tolerance
        if self.operator and self.is_gradeable:
            self.value = compared(self.operator, self.on_solution, tolerance)

    def is_doubtful(self, names):
        """Whether an empty answer might give a value: unless a side is the call of a tested function."""
        return not any(calls_tested(side, names) for side in self.sides)

    def learn_nothing(self, result):
        """Take an empty answer's result for the whole: a test that it passes asks the answer nothing."""
        sides = values_of(result, len(self.sides)) if self.operator else [result[1]]
        if result[0] == "ok" and sides and self.result_of(sides) == self.value:
            self.value = ["error", ASKS_NOTHING]

    # ----------------------------------------------------------------------------------------------------------------
    # an answer's values

    def as_asked(self, values):
        """The value of `asked` if the asks have these values."""
        return values[0] if len(values) == 1 else ["tuple", *values]

    def values(self, result):
        """An answer's values of the asks, from its result of `asked`; None if it has no values."""
        return values_of(result, len(self.asks))

    def result(self, result, rest_result):
        """The test's result, ["ok", value] or ["error", why not], if an answer gives `result` for `asked` and the rest,
        with these values, gives `rest_result`."""
        if result[0] == "error":
            return result
        values = self.values(result)
        if values is not None and self.rest is not None and rest_result[0] == "error":
            return rest_result
        sides = self.values_of_sides(values, rest_result)
        return BROKEN if sides is None else self.result_of(sides)

    def values_of_sides(self, values, rest_result):
        """The values of the sides if the asks have these values. None if these or the rest have no values."""
        rest_values = values_of(rest_result, len(self.parts)) if self.parts else []
        if values is None or rest_values is None:
            return None
        known = dict(zip(self.sides, self.on_solution))
        known |= zip(self.parts, rest_values)
        known |= zip(self.asks, values)
        return [known[side] for side in self.sides]

    def result_of(self, sides):
        """The test's result if its sides have these values. If an equality holds on the solution, each side must have
        the solution's value."""
        if not self.operator:
            return ["ok", sides[0]]
        value = compared(self.operator, sides, self.tolerance)
        if value != self.value or self.operator not in ("Eq", "Is") or value != ["ok", 1]:
            return value
        if all(equal_values(*pair, self.tolerance) for pair in zip(sides, self.on_solution)):
            return value
        return ["error", "another value on one side of the comparison"]


# The names in the calls of a task. lent: the solution's imports, which answers may use. tested: answers must define
# them
Names = namedtuple("Names", "lent tested")


def names_of(sent):
    """The Names, from the names that the solution sent (sandbox_worker.imported_names).

    The names that it defines are tested, except builtins (mostly helpers). If there are none: the builtins that it
    defines. If there are none, either: the first name that a call reads, although it is imported."""
    imported = {name for name, module, _ in sent if module}
    defined = {name for name, module, _ in sent if not module}
    tested = {name for name in defined if not hasattr(builtins, name)} or defined
    if sent and not tested:
        tested = {sent[0][0]}
    return Names(imported - tested, tested)


# ---------------------------------------------------------------------------------------------------------------------
# expressions

class Placeholders(ast.NodeTransformer):
    """Replaces the asks in an expression by names."""

    def __init__(self, asks):
        self.asks = asks

    def visit(self, node):
        return ast.Name(placeholder(self.asks.index(node))) if node in self.asks else self.generic_visit(node)


def placeholder(number):
    """The name of an ask's value in the rest."""
    return f"value_{number}"


def with_placeholders(node, asks):
    """The text of an expression with a placeholder for each of the asks in it."""
    copies = {}                                                     # {id of a node: its copy}, as deepcopy keeps them
    copied = copy.deepcopy(node, copies)
    return ast.unparse(Placeholders([copies.get(id(ask)) for ask in asks]).visit(copied))


def asks_in(node, names):
    """The smallest parts of an expression that need the answer: tested names, and their calls. Each grows to an
    expression around it that has variables of its own, may not evaluate it, or evaluates a set-up before it."""
    if is_tested(node, names) or calls_tested(node, names):
        return [node]
    children = list(ast.iter_child_nodes(node))
    asks_of = [asks_in(child, names) for child in children]
    asks = [ask for asks_of_child in asks_of for ask in asks_of_child]
    if isinstance(node, SCOPES):
        first = [] if isinstance(node, ast.Lambda) else asks_in(node.generators[0].iter, names)
        return asks if asks == first else [node]                    # the first iterator is evaluated outside
    if isinstance(node, (ast.BoolOp, ast.IfExp)):
        always = asks_in(node.test if isinstance(node, ast.IfExp) else node.values[0], names)
        return asks if asks == always else [node]
    if isinstance(node, (ast.Tuple, ast.List)):
        before = children[:next((number for number, found in enumerate(asks_of) if found), 0)]
        if any(isinstance(inner, ast.Call) for child in before for inner in ast.walk(child)):
            return [node]
    return asks


def reads(node, names_here):
    """Whether an expression reads one of these names without setting it."""
    inside = {inner.target.id for inner in ast.walk(node) if isinstance(inner, ast.NamedExpr)}
    return any(isinstance(inner, ast.Name) and inner.id in names_here - inside for inner in ast.walk(node))


def is_literal(node):
    try:
        ast.literal_eval(node)
        return True
    except (SyntaxError, TypeError, ValueError):
        return False


def is_tested(node, names):
    return isinstance(node, ast.Name) and node.id in names.tested


def calls_tested(node, names):
    """Whether an expression is the call of a tested name."""
    return isinstance(node, ast.Call) and is_tested(node.func, names)


def compares(node, names):
    """Whether an expression has a comparison outside the calls of tested names."""
    if calls_tested(node, names):
        return False
    if isinstance(node, ast.Compare):
        return True
    return any(compares(child, names) for child in ast.iter_child_nodes(node))


def together(expressions):
    """The text of an expression, or of a tuple of several."""
    first, *others = expressions
    return f"(({'), ('.join([first, *others])}))" if others else first


# ---------------------------------------------------------------------------------------------------------------------
# values, as values.encode() gives them

def values_of(result, number):
    """The values in the result of one expression, or of a tuple of `number` expressions. None if there are none."""
    if result is None or result[0] == "error":
        return None
    value = result[1]
    if number == 1:
        return [value]
    is_tuple = type(value) is list and value[0] == "tuple" and len(value) == 1 + number
    return value[1:] if is_tuple else None


def compared(operator_name, sides, tolerance):
    """["ok", 1 or 0]: whether a comparison of two encoded values holds. ["error", why] if that is not defined."""
    try:
        return ["ok", int(holds(operator_name, *sides, tolerance))]
    except TypeError as error:
        return ["error", str(error)]


def holds(kind, a, b, tolerance=None):
    """Whether a comparison of two encoded values holds. Raises TypeError if that is not defined for them.
    Equal values may differ by the rounding of floats (`tolerance`); all other comparisons are exact."""
    if "array" in [side[0] for side in (a, b) if type(side) is list]:
        raise TypeError("a comparison with an array")
    are_types = all(type(side) is list and side[0] == "type" for side in (a, b))
    is_identity = kind in ("Is", "IsNot") and (b in (None, 0, 1) or are_types)
    if kind == "Eq" or kind == "Is" and is_identity:
        return equal_values(a, b, tolerance)
    if kind == "NotEq" or kind == "IsNot" and is_identity:
        return not equal_values(a, b, EXACT)
    if kind not in ORDER:
        raise TypeError(f"a comparison by {kind.lower()}")
    if type(a) is type(b) is str:
        return ORDER[kind](a, b)
    return ORDER[kind](real(a), real(b))
