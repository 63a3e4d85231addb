"""The questions that a test asks an answer, and verdicts on the replies. An answer's objects are never compared.

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
    """A test, as it is put to code, and what the solution says to it.

    call: its expression
    operator: the name of a comparison of two sides in ast, else None
    sides: the syntax trees of the two sides, or of the call; none where the call cannot be read
    whole: the expression that is put to the solution
    asks: the syntax trees of what answers evaluate; all else is evaluated with their values
    asked: the expression that is put to answers, a tuple where they have several asks
    parts: the sides of which something is asked, but not the whole
    rest: the expression of the parts without the asks; None where there are none
    is_settled: do the solution's own values, put together by the rest, give what the whole gives?
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
    # what is asked of answers

    def find_asks(self, names):
        """Ask the smallest parts of the sides that only an answer can evaluate, with what tells nothing around them.
        RecursionError where an expression is nested too deep."""
        names_here = {node.target.id for side in self.sides for node in ast.walk(side)
                      if isinstance(node, ast.NamedExpr)}
        asks = [ask for side in self.sides for ask in asks_in(side, names)]
        if any(reads(ask, names_here) for ask in asks):             # what `:=` names elsewhere
            self.ask([side for side in self.sides if not is_literal(side)])
            return
        self.ask(asks)
        while (grown := self.without_inner(map(self.grown, self.asks))) != self.asks:
            self.ask(grown)

    def ask(self, asks):
        """Put these parts of the sides (syntax trees) to answers."""
        self.asks = asks
        self.asked = together(map(ast.unparse, asks)) if asks else ""
        asked_of = {self.ancestors(ask)[-1] for ask in asks}
        has_names = ":=" in self.call and asks                      # then one side may need what another names
        self.parts = [side for side in self.sides if side not in asks and (side in asked_of or has_names)]
        texts = [with_placeholders(side, asks) for side in self.parts]
        self.rest = together(texts) if texts else None

    def ancestors(self, node):
        """A part of a side, what stands around it, and so on, to the side."""
        nodes = [node]
        while nodes[-1] not in self.sides:
            nodes.append(self.parents[nodes[-1]])
        return nodes

    def without_inner(self, asks):
        """The asks that lie in no other, each once."""
        asks = list(dict.fromkeys(asks))
        return [ask for ask in asks if not any(node in asks for node in self.ancestors(ask)[1:])]

    def grown(self, ask):
        """An ask with what stands around it and tells nothing of the value that is wanted, so that an answer may return
        what the test then makes data of (`list(f(3))`): an attribute, or a call with nothing but asks and builtins."""
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
        """The next larger part around an ask; the ask itself where it is a whole side."""
        for node in self.ancestors(ask)[1:]:
            if isinstance(node, ast.expr) and not isinstance(node, DEPENDENT):
                return node
        return ask

    # ----------------------------------------------------------------------------------------------------------------
    # what the solution says

    def learn_solution(self, result, names):
        """Take what the solution gives for the whole: ["ok", value] or ["error", reason]."""
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
        """Take what the solution gives for `asked`, and the rest with it. Where it is no data, as an iterator is not,
        or does not give the sides again, larger parts of them are asked."""
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
        """The floats among what the solution gives."""
        return numbers_in([*self.on_solution, *self.asked_on_solution])

    def judge(self, tolerance):
        """See what the sides of a comparison say, when it is known what numbers the task has."""
        self.tolerance = tolerance
        if self.operator and self.is_gradeable:
            self.value = compared(self.operator, self.on_solution, tolerance)

    def is_doubtful(self, names):
        """Might an answer that defines nothing give a value? (Not where a side is the call of a tested function.)"""
        return not any(calls_tested(side, names) for side in self.sides)

    def learn_nothing(self, result):
        """Take what an empty answer gives for the whole: a test that it passes asks the answer nothing."""
        sides = values_of(result, len(self.sides)) if self.operator else [result[1]]
        if result[0] == "ok" and sides and self.result_of(sides) == self.value:
            self.value = ["error", ASKS_NOTHING]

    # ----------------------------------------------------------------------------------------------------------------
    # what an answer says

    def as_asked(self, values):
        """The value of `asked`, where the asks have these values."""
        return values[0] if len(values) == 1 else ["tuple", *values]

    def values(self, result):
        """An answer's values of the asks, from its result of `asked`; None if it has no values."""
        return values_of(result, len(self.asks))

    def result(self, result, rest_result):
        """The test's result, ["ok", value] or ["error", why not], if an answer gives `result` for `asked` and the rest,
        with these values, gives `rest_result`."""
        if result[0] == "error" or not self.is_gradeable:
            return result
        values = self.values(result)
        if values is not None and self.rest is not None and rest_result[0] == "error":
            return rest_result
        sides = self.values_of_sides(values, rest_result)
        return BROKEN if sides is None else self.result_of(sides)

    def values_of_sides(self, values, rest_result):
        """The values of the sides, where the asks have these values; None where these or the rest have none."""
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


# The names in the calls of a task: those that the solution lends to answers (its imports), and those that are tested,
# which answers must define
Names = namedtuple("Names", "lent tested")


def names_of(sent):
    """The Names, from what the solution sent (sandbox_worker.imported_names).

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

class Placeholders(ast.NodeTransformer):
    """Puts names in the place of the parts of an expression that are `asks`."""

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
    """The smallest parts of an expression that need the answer: calls of what is tested, its name elsewhere, and
    around these what has variables of its own, or may not come to evaluate them, or sets something up before."""
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
    """Does an expression read one of these names that it does not name itself?"""
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
    """Does an expression call, by its name, what is tested?"""
    return isinstance(node, ast.Call) and is_tested(node.func, names)


def compares(node, names):
    """Is there a comparison in an expression, outside of what it passes to what is tested?"""
    if calls_tested(node, names):
        return False
    if isinstance(node, ast.Compare):
        return True
    return any(compares(child, names) for child in ast.iter_child_nodes(node))


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
