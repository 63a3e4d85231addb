"""What a test asks of an answer, and what the reply is worth: data is compared here, so no object of an answer decides.

    question = question_of("f(2) <= 7.5")           # operator "LtE"; side 0 is asked of answers, side 1 is a literal
    question.of_reference                           # "((f(2)), (7.5), )"
    question.of_answers                             # "((f(2)), )"

docs/scorer.md has the rules of tests that are comparisons."""
import ast
import builtins
import functools
import json
import operator
from collections import namedtuple

from colbench.extract_code import parse

TOO_DEEP = RecursionError, MemoryError
ORDER = {"Lt": operator.lt, "LtE": operator.le, "Gt": operator.gt, "GtE": operator.ge}
COMPREHENSIONS = ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp


class Question(namedtuple("Question", "call operator nodes sides asked")):
    """A test, as it is put to code.

    call: its expression
    operator: the name of a comparison of two sides in ast, else None
    nodes: the syntax trees of the two sides, or of the call; none where the call cannot be read
    sides: the expressions of the two sides, or the call
    asked: the numbers of the sides that are asked of answers: those that are not literals"""

    @property
    def of_reference(self):
        return tuple_of(self.sides) if self.operator else self.call

    @property
    def of_answers(self):
        if not self.operator:
            return self.call
        return tuple_of([self.sides[i] for i in self.asked])

    def value(self, reference, names):
        """What the test gives on the reference: ["ok", value], or ["error", why it cannot be graded]."""
        if reference[0] == "error":
            return reference
        try:
            if not self.nodes:
                raise RecursionError
            if any(compares(node, names) for node in self.nodes):
                return ["error", "a comparison inside an expression"]
        except TOO_DEEP:
            return ["error", "an expression that is nested too deep"]
        if self.operator and not is_tuple(reference[1], len(self.sides)):
            return ["error", "a broken result"]                         # code wrote it itself
        return self.graded(reference[1], reference, (), range(len(self.sides)))

    def graded(self, reference_value, result, fixed, asked=None):
        """The value of the test on an answer, ["ok", value] or ["error", why not].

        Of a comparison, the `result` has the sides that were asked, and the reference's value has the others. The sides
        in `fixed` must have the reference's value."""
        if result[0] == "error" or not self.operator:
            return result
        if asked is None:
            asked = self.asked
        if not is_tuple(result[1], len(asked)):
            return ["error", "a broken result"]                         # code wrote it itself
        reference_sides = reference_value[1]
        sides = dict(enumerate(reference_sides)) | dict(zip(asked, result[1][1]))
        try:
            is_true = holds(self.operator, sides[0], sides[1])
            as_on_reference = is_true == holds(self.operator, *reference_sides)
        except TypeError as error:
            return ["error", str(error)]
        fixed_are_equal = all(equal_values(reference_sides[i], sides[i]) for i in fixed)
        if as_on_reference and not fixed_are_equal:
            return ["error", "another value on one side of the comparison"]
        return ["ok", int(is_true)]

    def doubtful(self, reference_value, names):
        """What does not certainly ask an answer something: the whole of what it is asked, and each side that could have
        any value as far as the reference's result says."""
        doubtful_sides = [i for i in self.asked if not self.asks_for_sure(i, names)]
        texts = []
        if len(doubtful_sides) == len(self.asked):
            texts.append(self.of_answers)
        if self.operator and not self.states_the_values(reference_value[1]):
            texts += [self.sides[i] for i in doubtful_sides]
        return texts

    def fixed_sides(self, reference_value, of_nobody):
        """The sides of a comparison that must have the reference's value on an answer: all sides of an equality that
        holds, else those that have it without an answer. of_nobody: {expression: result of an empty answer}"""
        if self.states_the_values(reference_value[1]):
            return self.asked
        return [i for i in self.asked if of_nobody.get(self.sides[i]) == ["ok", reference_value[1][i]]]

    def states_the_values(self, reference_sides):
        """Is it an equality that holds on the reference? Then it says what value its sides have."""
        return self.operator in ("Eq", "Is") and equal_values(*reference_sides)

    def asks_for_sure(self, index, names):
        """Does this side certainly read a name that an empty answer lacks? (False: perhaps it does.)"""
        try:
            return reads_for_sure(self.nodes[index], names, bound_names(*self.nodes))
        except TOO_DEEP:
            return False


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


def question_of(call):
    """The Question of a test's text."""
    call = call.strip()
    try:
        tree = parse_call(call).body
        if not isinstance(tree, ast.Compare) or len(tree.ops) > 1:
            return Question(call, None, (tree,), (call,), (0,))
        kind = type(tree.ops[0]).__name__
        nodes = tree.left, tree.comparators[0]
        sides = tuple(map(ast.unparse, nodes))
        return Question(call, kind, nodes, sides, sides_to_ask(nodes))
    except (SyntaxError, ValueError, *TOO_DEEP):
        return Question(call, None, (), (call,), ())                    # if it is no Python, its result says so


def sides_to_ask(nodes):
    return tuple(index for index, node in enumerate(nodes) if not is_literal(node))


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
    somewhere does not count.)"""
    if isinstance(node, ast.Name):
        return not names.are_known(node.id) and node.id not in bound
    parts = ast.iter_child_nodes(node)
    if isinstance(node, ast.Lambda):
        parts = ()
    elif isinstance(node, COMPREHENSIONS):
        parts = [node.generators[0].iter]
    elif isinstance(node, ast.BoolOp):
        parts = node.values[:1]
    elif isinstance(node, ast.IfExp):
        parts = [node.test]
    elif isinstance(node, ast.Compare):
        parts = [node.left, node.comparators[0]]
    return any(reads_for_sure(part, names, bound) for part in parts)


def functions_under_test(call, imported, defined=()):
    """The names that a call tests.

    They are those that it reads, but for built-in and imported ones. If there are none: those of builtins that the
    reference `defined` anew. If there are none: the outermost imported one that is called, or read."""
    try:
        tree = parse_call(call.strip())
        bound = bound_names(tree)
        nodes = list(ast.walk(tree))
    except (SyntaxError, ValueError, *TOO_DEEP):
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
