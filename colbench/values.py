"""Values of Python as JSON data, which are equal by Python's rules if and only if their JSON is (but for ordered dicts
and counters: scorer.equal_values), and whether some JSON is such data. Standard library alone."""
import json
import re
import sys

MAX_DEPTH = 100                 # of nested values


def encode(value, depth=0):
    """A value as JSON data with its type: encode((1, 2.5)) = ["tuple", [1, ["ratio", "5/2"]]]. 1, True, 1.0 and
    Decimal(1) are one number, all NaN are one. TypeError for a type that cannot be compared, subclasses count as
    their base; Enum members are their class's and their own name."""
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    kind = type(value)
    if value is None or kind is str:
        return value
    if kind is int or kind is bool:
        return encode_number(value)
    if kind is list or kind is tuple:
        return [kind.__name__, [encode(item, depth + 1) for item in value]]
    return encode_rare(value, depth)


def encode_rare(value, depth):
    import collections
    import datetime
    import decimal
    import enum
    import fractions

    def items(values):
        return [encode(item, depth + 1) for item in values]

    def ordered(encoded):
        return sorted(encoded, key=json.dumps)

    numpy = sys.modules.get("numpy")
    if isinstance(value, enum.Enum) and not isinstance(value, (int, str)):
        return ["enum", type(value).__name__, value.name]
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (int, float, decimal.Decimal, fractions.Fraction)):
        return encode_number(value)
    if isinstance(value, complex):
        parts = [encode_number(value.real), encode_number(value.imag)]
        return parts[0] if value.imag == 0 else ["complex", *parts]
    if isinstance(value, (list, tuple)):
        return ["list" if isinstance(value, list) else "tuple", items(value)]
    if isinstance(value, dict):
        kind = ("odict" if isinstance(value, collections.OrderedDict) else
                "counter" if isinstance(value, collections.Counter) else "dict")
        pairs = [items(pair) for pair in value.items()]
        return [kind, pairs if kind == "odict" else ordered(pairs)]
    if isinstance(value, (set, frozenset, type({}.keys()))):
        return ["set", ordered(items(value))]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, range):
        return ["range", len(value), *map(encode_number, value[:2])]
    if isinstance(value, collections.deque):
        return ["deque", items(value)]
    if isinstance(value, datetime.datetime):
        offset = value.utcoffset()
        naive = value.replace(tzinfo=None)
        return ["datetime", naive.isoformat()] if offset is None else ["datetime utc", (naive - offset).isoformat()]
    if isinstance(value, datetime.date):
        return ["date", value.isoformat()]
    if isinstance(value, datetime.time):
        offset, naive = value.utcoffset(), value.replace(tzinfo=None)
        since = datetime.timedelta(hours=naive.hour, minutes=naive.minute, seconds=naive.second,
                                   microseconds=naive.microsecond)
        return ["time", str(since)] if offset is None else ["time utc", str(since - offset)]
    if isinstance(value, datetime.timedelta):
        return ["timedelta", value.days, value.seconds, value.microseconds]
    if isinstance(value, datetime.timezone):
        return ["timezone", encode(value.utcoffset(None))]
    if numpy and isinstance(value, numpy.ndarray):
        return ["array", list(value.shape), items(value.ravel().tolist())]
    if numpy and isinstance(value, numpy.generic):
        return encode(value.item(), depth + 1)
    raise TypeError(f"a value of type {type(value).__name__} cannot be compared")


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
    if kind in ("list", "tuple", "set", "deque"):
        items = ", ".join(map(readable, parts[0]))
        return {"list": f"[{items}]", "tuple": f"({items}{',' * (len(parts[0]) == 1)})",
                "set": f"{{{items}}}" if items else "set()"}.get(kind, f"{kind}([{items}])")
    if kind in ("dict", "odict", "counter"):
        return "{" + ", ".join(": ".join(map(readable, pair)) for pair in parts[0]) + "}"
    return kind + (f"({', '.join(map(str, parts))})" if parts else "")


def text(pattern):
    pattern = re.compile(pattern, re.ASCII | re.DOTALL)
    return lambda part, depth: type(part) is str and pattern.fullmatch(part) is not None


def is_int(part, depth):
    return type(part) is int and -2 ** 53 < part < 2 ** 53


def is_number(part, depth):
    return is_int(part, depth) or type(part) is list and part[:1] in NUMBERS and is_encoded(part)


def are_values(parts, depth):
    return type(parts) is list and all(is_encoded(part, depth) for part in parts)


def are_pairs(parts, depth):
    return type(parts) is list and all(type(pair) is list and len(pair) == 2 and are_values(pair, depth)
                                       for pair in parts)


def is_shape(part, depth):
    return type(part) is list and all(is_int(size, depth) and size >= 0 for size in part)


# The kinds of what encode returns as a list, and a check for each part after the kind.
NUMBERS = ["nan"], ["infinite"], ["int"], ["ratio"]
DAY, CLOCK = r"\d{4}-\d\d-\d\d", r"\d\d?:\d\d:\d\d(\.\d{6})?"
SCHEMA = {
    "nan": (), "infinite": (lambda part, depth: type(part) is bool,), "int": (text("-?0x[0-9a-f]+"),),
    "ratio": (text("-?[0-9a-f]+/[1-9a-f][0-9a-f]*"),), "complex": (is_number, is_number),
    **dict.fromkeys(("list", "tuple", "deque", "set"), (are_values,)),
    **dict.fromkeys(("dict", "odict", "counter"), (are_pairs,)),
    "enum": (text(".*"), lambda part, depth: part is None or type(part) is str),
    "bytes": (text("([0-9a-f]{2})*"),), "array": (is_shape, are_values),
    **dict.fromkeys(("datetime", "datetime utc"), (text(f"{DAY}T{CLOCK}"),)), "date": (text(DAY),),
    **dict.fromkeys(("time", "time utc"), (text(rf"(-?\d+ days?, )?{CLOCK}"),)),
    "timedelta": (is_int, is_int, is_int),
    "timezone": (lambda part, depth: type(part) is list and part[:1] == ["timedelta"] and is_encoded(part),)}


def is_encoded(value, depth=0):
    """Is this what encode can give? (But for the order of dicts and sets.) All else from a process is a wrong value."""
    if depth > MAX_DEPTH:
        return False
    if value is None or type(value) is str or is_int(value, depth):
        return True
    if type(value) is not list or not value or type(value[0]) is not str:
        return False
    kind, *parts = value
    if kind == "range":
        return (all(is_number(part, depth) for part in parts) and type(parts[:1] and parts[0]) is int and
                parts[0] >= 0 and len(parts) == 1 + min(parts[0], 2))
    checks = SCHEMA.get(kind)
    return checks is not None and len(parts) == len(checks) and all(
        check(part, depth + 1) for check, part in zip(checks, parts))
