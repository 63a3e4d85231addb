"""Values of Python as JSON data, and whether some JSON is such data. Standard library alone.

Two values are equal by Python's rules if and only if their JSON is (but for ordered dicts and counters:
questions.equal_values)."""
import json
import re
import sys

MAX_DEPTH = 100                 # of nested values


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
        return [kind.__name__, [encode(item, depth + 1) for item in value]]
    return encode_rare(value, depth)


def encode_rare(value, depth):
    """encode() of all but the few types that most results have."""
    import collections
    import datetime
    import decimal
    import enum
    import fractions
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
    if isinstance(value, list):
        return ["list", encode_all(value, depth)]
    if isinstance(value, tuple):
        return ["tuple", encode_all(value, depth)]
    if isinstance(value, collections.OrderedDict):
        return ["odict", encode_pairs(value, depth)]
    if isinstance(value, collections.Counter):
        return ["counter", sorted(encode_pairs(value, depth), key=json.dumps)]
    if isinstance(value, dict):
        return ["dict", sorted(encode_pairs(value, depth), key=json.dumps)]
    if isinstance(value, (set, frozenset, type({}.keys()))):
        return ["set", sorted(encode_all(value, depth), key=json.dumps)]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, range):
        return ["range", len(value), *map(encode_number, value[:2])]
    if isinstance(value, collections.deque):
        return ["deque", encode_all(value, depth)]
    if isinstance(value, (datetime.date, datetime.time, datetime.timedelta, datetime.timezone)):
        return encode_time(value)
    if numpy and isinstance(value, numpy.ndarray):
        return ["array", list(value.shape), encode_all(value.ravel().tolist(), depth)]
    if numpy and isinstance(value, numpy.generic):
        return encode(value.item(), depth + 1)
    raise TypeError(f"a value of type {type(value).__name__} cannot be compared")


def encode_all(values, depth):
    return [encode(value, depth + 1) for value in values]


def encode_pairs(table, depth):
    return [encode_all(pair, depth) for pair in table.items()]


def encode_time(value):
    """encode() of a date, a time, a difference or a time zone; what knows its time zone is put into UTC."""
    import datetime
    if isinstance(value, datetime.datetime):                        # it is a date, too
        offset, naive = value.utcoffset(), value.replace(tzinfo=None)
        if offset is None:
            return ["datetime", naive.isoformat()]
        return ["datetime utc", (naive - offset).isoformat()]
    if isinstance(value, datetime.date):
        return ["date", value.isoformat()]
    if isinstance(value, datetime.time):
        offset, naive = value.utcoffset(), value.replace(tzinfo=None)
        since_midnight = datetime.timedelta(hours=naive.hour, minutes=naive.minute, seconds=naive.second,
                                            microseconds=naive.microsecond)
        if offset is None:
            return ["time", str(since_midnight)]
        return ["time utc", str(since_midnight - offset)]
    if isinstance(value, datetime.timedelta):
        return ["timedelta", value.days, value.seconds, value.microseconds]
    return ["timezone", encode(value.utcoffset(None))]


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
        return readable_items(kind, list(map(readable, parts[0])))
    if kind in ("dict", "odict", "counter"):
        pairs = [f"{readable(key)}: {readable(item)}" for key, item in parts[0]]
        return f"{{{', '.join(pairs)}}}"
    return f"{kind}({', '.join(map(str, parts))})" if parts else kind


def readable_items(kind, items):
    text = ", ".join(items)
    if kind == "list":
        return f"[{text}]"
    if kind == "tuple":
        return f"({text},)" if len(items) == 1 else f"({text})"
    if kind == "set":
        return f"{{{text}}}" if items else "set()"
    return f"{kind}([{text}])"


# ---------------------------------------------------------------------------------------------------------------------
# whether some JSON is what encode can give. A check takes (part, depth) of what follows the kind.

def text(pattern):
    pattern = re.compile(pattern, re.ASCII | re.DOTALL)
    return lambda part, depth: type(part) is str and pattern.fullmatch(part) is not None


def is_bool(part, depth):
    return type(part) is bool


def is_name(part, depth):
    return part is None or type(part) is str


def is_int(part, depth):
    return type(part) is int and -2 ** 53 < part < 2 ** 53


def is_number(part, depth):
    if type(part) is list:
        return part[:1] in NUMBERS and is_encoded(part)
    return is_int(part, depth)


def is_difference(part, depth):
    return type(part) is list and part[:1] == ["timedelta"] and is_encoded(part)


def are_values(parts, depth):
    return type(parts) is list and all(is_encoded(part, depth) for part in parts)


def is_pair(part, depth):
    return type(part) is list and len(part) == 2 and are_values(part, depth)


def are_pairs(parts, depth):
    return type(parts) is list and all(is_pair(part, depth) for part in parts)


def is_shape(part, depth):
    return type(part) is list and all(is_int(size, depth) and size >= 0 for size in part)


NUMBERS = ["nan"], ["infinite"], ["int"], ["ratio"]
DAY = r"\d{4}-\d\d-\d\d"
CLOCK = r"\d\d?:\d\d:\d\d(\.\d{6})?"
DATE_TIME = text(f"{DAY}T{CLOCK}")
TIME = text(rf"(-?\d+ days?, )?{CLOCK}")
SCHEMA = {                                              # kind: a check for each part after the kind
    "nan": (),
    "infinite": (is_bool,),
    "int": (text("-?0x[0-9a-f]+"),),
    "ratio": (text("-?[0-9a-f]+/[1-9a-f][0-9a-f]*"),),
    "complex": (is_number, is_number),
    "list": (are_values,),
    "tuple": (are_values,),
    "deque": (are_values,),
    "set": (are_values,),
    "dict": (are_pairs,),
    "odict": (are_pairs,),
    "counter": (are_pairs,),
    "enum": (text(".*"), is_name),
    "bytes": (text("([0-9a-f]{2})*"),),
    "array": (is_shape, are_values),
    "datetime": (DATE_TIME,),
    "datetime utc": (DATE_TIME,),
    "date": (text(DAY),),
    "time": (TIME,),
    "time utc": (TIME,),
    "timedelta": (is_int, is_int, is_int),
    "timezone": (is_difference,)}


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
        return is_range(parts, depth)
    checks = SCHEMA.get(kind)
    if checks is None or len(parts) != len(checks):
        return False
    return all(check(part, depth + 1) for check, part in zip(checks, parts))


def is_range(parts, depth):
    """["range", its length, its first two numbers as far as there are any]"""
    if not parts or type(parts[0]) is not int or parts[0] < 0:
        return False
    return len(parts) == 1 + min(parts[0], 2) and all(is_number(part, depth) for part in parts)
