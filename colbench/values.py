"""Values of Python as JSON data, and whether some JSON is such data. Standard library alone.

Two values are equal by Python's rules if and only if their JSON is (but for ordered dicts and counters:
questions.equal_values)."""
import collections
import datetime
import decimal
import enum
import fractions
import json
import re
import sys

MAX_DEPTH = 100                 # of nested values
SEQUENCES = (list, "list"), (tuple, "tuple"), (collections.deque, "deque")
BRACKETS = {"list": "[{}]", "tuple": "({})", "set": "{{{}}}", "deque": "deque([{}])"}
DICTS = (collections.OrderedDict, "odict"), (collections.Counter, "counter"), (dict, "dict")


def encode(value, depth=0):
    """A value as JSON data with its type: encode((1, 2.5)) = ["tuple", [1, ["ratio", "5/2"]]].

    1, True, 1.0 and Decimal(1) are one number, all NaN are one. Subclasses count as their base. Enum members are their
    class's and their own name. TypeError for a type that cannot be compared."""
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    kind = type(value)
    if value is None or kind is str:
        return value
    if kind is int or kind is bool:
        return encode_number(value)
    if kind is list or kind is tuple:
        return [kind.__name__, encode_all(value, depth)]
    return encode_rare(value, depth)


def encode_rare(value, depth):
    """encode() of all but the few types that most results have."""
    numpy = sys.modules.get("numpy")
    if isinstance(value, enum.Enum) and not isinstance(value, (int, str)):
        return ["enum", type(value).__name__, value.name]
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (int, float, decimal.Decimal, fractions.Fraction)):
        return encode_number(value)
    if isinstance(value, complex):
        real, imaginary = encode_number(value.real), encode_number(value.imag)
        return real if value.imag == 0 else ["complex", real, imaginary]
    for kind, name in SEQUENCES:
        if isinstance(value, kind):
            return [name, encode_all(value, depth)]
    for kind, name in DICTS:
        if isinstance(value, kind):
            pairs = [encode_all(pair, depth) for pair in value.items()]
            return [name, pairs if name == "odict" else sorted(pairs, key=json.dumps)]
    if isinstance(value, (set, frozenset, type({}.keys()))):
        return ["set", sorted(encode_all(value, depth), key=json.dumps)]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, range):
        return ["range", len(value), *map(encode_number, value[:2])]
    if isinstance(value, (datetime.date, datetime.time, datetime.timedelta, datetime.timezone)):
        return encode_time(value)
    if numpy and isinstance(value, numpy.ndarray):
        return ["array", list(value.shape), encode_all(value.ravel().tolist(), depth)]
    if numpy and isinstance(value, numpy.generic):
        return encode(value.item(), depth + 1)
    raise TypeError(f"a value of type {type(value).__name__} cannot be compared")


def encode_all(values, depth):
    return [encode(value, depth + 1) for value in values]


def encode_time(value):
    """encode() of a date, a time, a difference or a time zone; what knows its time zone is put into UTC."""
    if isinstance(value, datetime.timedelta):
        return ["timedelta", value.days, value.seconds, value.microseconds]
    if isinstance(value, datetime.timezone):
        return ["timezone", encode_time(value.utcoffset(None))]
    if isinstance(value, datetime.date) and not isinstance(value, datetime.datetime):
        return ["date", value.isoformat()]
    kind, offset, naive = "datetime", value.utcoffset(), value.replace(tzinfo=None)
    if isinstance(value, datetime.time):
        kind, naive = "time", datetime.datetime.combine(datetime.date(2000, 1, 1), naive)
    if offset is not None:
        kind, naive = f"{kind} utc", naive - offset
    return [kind, naive.isoformat()]


def encode_number(value):
    """A real number by its exact value: a JSON integer where it is small, else ["int", hex], ["ratio", p/q], …"""
    if value != value:
        return ["nan"]
    try:
        p, q = value.as_integer_ratio()
    except OverflowError:
        return ["infinite", value > 0]
    if q == 1:
        return int(p) if -2 ** 53 < p < 2 ** 53 else ["int", hex(p)]
    return ["ratio", f"{p:x}/{q:x}"]


def readable(value):
    """An encoded value as text: Python's literal where there is one (booleans are numbers)."""
    if type(value) is not list:
        return repr(value)
    kind, *parts = value
    if kind == "ratio":
        p, q = (int(part, 16) for part in parts[0].split("/"))
        try:
            return repr(p / q)
        except OverflowError:
            return parts[0]
    if kind in ("dict", "odict", "counter"):
        pairs = [f"{readable(key)}: {readable(item)}" for key, item in parts[0]]
        return f"{{{', '.join(pairs)}}}"
    if kind in BRACKETS:
        items = ", ".join(map(readable, parts[0]))
        if kind == "tuple" and len(parts[0]) == 1:
            items += ","
        return "set()" if value == ["set", []] else BRACKETS[kind].format(items)
    return f"{kind}({', '.join(map(str, parts))})" if parts else kind


# ---------------------------------------------------------------------------------------------------------------------
# whether some JSON is what encode can give

INT = r"-?\d{1,16}"
TEXT = r'"(?:[^"\\]|\\.)*"'
NUMBER = (rf'(?:{INT}|\["nan"\]|\["infinite", (?:true|false)\]|\["int", "-?0x[0-9a-f]+"\]|'
          r'\["ratio", "-?[0-9a-f]+/[1-9a-f][0-9a-f]*"\])')
DAY, CLOCK = r"\d{4}-\d\d-\d\d", r"\d\d:\d\d:\d\d(?:\.\d{6})?"
TIMEDELTA = rf'\["timedelta", {INT}, {INT}, {INT}\]'
LEAVES = re.compile("|".join((
    NUMBER, TIMEDELTA, rf'\["timezone", {TIMEDELTA}\]', rf'\["complex", {NUMBER}, {NUMBER}\]',
    rf'\["enum", {TEXT}, (?:null|{TEXT})\]', r'\["bytes", "(?:[0-9a-f]{2})*"\]',
    rf'\["range", (?:0|1, {NUMBER}|(?:[2-9]|[1-9]\d+), {NUMBER}, {NUMBER})\]',
    rf'\["date", "{DAY}"\]', rf'\["(?:datetime|time)(?: utc)?", "{DAY}T{CLOCK}"\]')))


def is_encoded(value, depth=0):
    """Is this what encode can give? (But for the order of dicts and sets.) All else from a process is a wrong value.
    RecursionError, too, says that it is not."""
    if depth > MAX_DEPTH:
        return False
    if value is None or type(value) is str:
        return True
    if type(value) is int:
        return -2 ** 53 < value < 2 ** 53
    if type(value) is not list or not value:
        return False
    kind, *parts = value
    if kind in ("list", "tuple", "deque", "set"):
        return len(parts) == 1 and are_encoded(parts[0], depth)
    if kind in ("dict", "odict", "counter"):
        return len(parts) == 1 and type(parts[0]) is list and all(
            are_encoded(pair, depth) and len(pair) == 2 for pair in parts[0])
    if kind == "array":
        return len(parts) == 2 and are_encoded(parts[1], depth) and type(parts[0]) is list and all(
            type(size) is int and size >= 0 for size in parts[0])
    return LEAVES.fullmatch(json.dumps(value)) is not None


def are_encoded(values, depth):
    return type(values) is list and all(is_encoded(value, depth + 1) for value in values)
