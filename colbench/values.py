"""Python values as JSON data, and the equality of such data. Standard library only.

Data are null, a text, a number, or a list of a kind and its parts: [1, (2.5,)] is ["list", 1, ["tuple", 2.5]].
"""
import ast
import collections
import datetime
import decimal
import enum
import fractions
import importlib
import math
import re
import sys

MAX_DEPTH = 100                 # of nested values
CONTAINERS = {                                  # a subclass stands before its base
    "list": list,
    "tuple": tuple,
    "deque": collections.deque,
    "odict": collections.OrderedDict,
    "counter": collections.Counter,
    "dict": dict,
    "set": (set, frozenset, type({}.keys()))}
DICTS = "dict", "odict", "counter"              # their parts are tuples of two
UNORDERED = "dict", "counter", "set"
BRACKETS = {"list": "[{}]", "tuple": "({})", "set": "{{{}}}"}
SURROGATE = re.compile("[\ud800-\udfff]")        # JSON makes one character of two neighbours
HEAP_TYPE = 1 << 9                              # the flag of a type that was made at run time
WRITTEN_NUMBERS = {"int": re.compile("-?0x[0-9a-f]+"), "ratio": re.compile("-?[0-9]{1,4000}/[1-9][0-9]{0,4000}")}


def encode(value, depth=0):
    """A value as JSON data with its type: encode((1, 2.5)) = ["tuple", 1, 2.5].

    1 equals True, and all NaN are equal. Subclasses count as their base. An enum member is its class's name and its
    own, a type its module's name and its own. Raises TypeError for a value that cannot be compared."""
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    if value is None:
        return None
    if isinstance(value, enum.Enum) and not isinstance(value, (int, str)):
        return ["enum", type(value).__name__, value.name]
    if isinstance(value, str):
        text = str.__str__(value)
        return ["text", ascii(text)] if SURROGATE.search(text) else text
    if isinstance(value, (int, float, decimal.Decimal, fractions.Fraction)):
        return encode_number(value)
    if isinstance(value, complex):
        real, imaginary = encode_number(value.real), encode_number(value.imag)
        return real if value.imag == 0 else ["complex", real, imaginary]
    for name, types in CONTAINERS.items():
        if isinstance(value, types):
            parts = encode_all(value.items() if name in DICTS else value, depth)
            if name == "set":                                       # which has no order
                parts.sort(key=order)
            return [name, *parts]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, range):
        return ["range", len(value), *encode_all(value[:2], depth)]
    if isinstance(value, (datetime.date, datetime.time, datetime.timedelta, datetime.timezone)):
        return encode_time(value)
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(value, numpy.ndarray):
        return ["array", encode(value.shape), *encode_all(value.ravel().tolist(), depth)]
    if numpy and isinstance(value, numpy.generic):
        return encode(value.item(), depth + 1)
    if isinstance(value, type) and is_of_a_module(value):
        return ["type", f"{value.__module__}.{value.__qualname__}"]
    raise TypeError(f"a value of type {type(value).__name__} cannot be compared")


def is_of_a_module(value):
    """True if a type is a name in an imported module (int, collections.Counter), or built in without a name (the type
    of a generator). Not a type that an answer defines, because others may define it differently."""
    is_built_in = not value.__flags__ & HEAP_TYPE
    module = sys.modules.get(value.__module__)
    if is_built_in or getattr(module, "__spec__", None) is None:
        return is_built_in
    found = module
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def encode_all(values, depth):
    return [encode(value, depth + 1) for value in values]


def encode_time(value):
    """encode() of a date, a time, a difference or a time zone. Times with a time zone are converted to UTC."""
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
    """A real number: JSON's if that is exact, else ["int", hex], ["ratio", "p/q"] or ["nan"]."""
    if value != value:
        return ["nan"]
    if isinstance(value, float):
        return float(value)
    try:
        p, q = value.as_integer_ratio()
    except OverflowError:
        return float(value)                                     # infinite
    if q != 1:
        return ["ratio", f"{p}/{q}"]
    return int(p) if -2 ** 53 < p < 2 ** 53 else ["int", hex(p)]


def order(data):
    """Sort key of data without a meaningful order: numbers by their size."""
    if data is None:
        return [0]
    if type(data) is str:
        return [2, data]
    try:
        return [1, *map(real, as_complex(data))]
    except TypeError:                                           # no number
        return [3, *map(order, data)]


def is_encoded(data, depth=0):
    """Whether a JSON value has the form of encoded data; a RecursionError also means that it has not. Any other message
    of a process is a wrong value."""
    if type(data) is not list:
        return data is None or type(data) in (str, int, float)
    if depth > MAX_DEPTH + 1 or not data or type(data[0]) is not str:
        return False
    kind, *parts = data
    if kind in WRITTEN_NUMBERS:
        return len(parts) == 1 and type(parts[0]) is str and WRITTEN_NUMBERS[kind].fullmatch(parts[0]) is not None
    if kind == "complex" and len(parts) != 2:
        return False
    if kind in DICTS and not all(type(part) is list and len(part) == 3 for part in parts):
        return False
    return all(is_encoded(part, depth + 1) for part in parts)


def readable(data):
    """An encoded value as text, as a Python literal if there is one (booleans are numbers)."""
    if type(data) is not list:
        return repr(data)
    kind, *parts = data
    if kind in DICTS:
        pairs = [f"{readable(key)}: {readable(item)}" for _, key, item in parts]
        return f"{{{', '.join(pairs)}}}"
    if kind in BRACKETS and data != ["set"]:
        items = ", ".join(map(readable, parts))
        if kind == "tuple" and len(parts) == 1:
            items += ","
        return BRACKETS[kind].format(items)
    if kind in ("ratio", "text"):
        return str(parts[0]) if parts else ""
    return "nan" if kind == "nan" else f"{kind}({', '.join(map(str, parts))})"


def decode(data):
    """The value of encoded data: encode's argument, except that subclasses are their base and Decimals are Fractions.
    Raises TypeError if the data only has its name."""
    if type(data) is not list:
        return data
    kind, *parts = data
    if kind in DICTS:
        return CONTAINERS[kind]({decode(key): decode(item) for _, key, item in parts})
    if kind == "set":
        return set(map(decode, parts))
    if kind in CONTAINERS:
        return CONTAINERS[kind](map(decode, parts))
    if kind in WRITTEN_NUMBERS:
        return real(data)
    if kind == "text":
        return ast.literal_eval(parts[0])
    if kind in WRITTEN:
        return WRITTEN[kind](*parts)
    if kind == "array":
        shape, *numbers = map(decode, parts)
        return importlib.import_module("numpy").array(numbers).reshape(shape)
    raise TypeError(f"no value can be made of its {kind}")


def range_of(length, first=0, second=1):
    """The range of `length` numbers that begins with these two."""
    step = second - first if length > 1 else 1
    return range(first, first + length * step, step)


def datetime_in_utc(text):
    return datetime.datetime.fromisoformat(text).replace(tzinfo=datetime.timezone.utc)


WRITTEN = {                                     # functions that make a value from the parts of a kind
    "nan": lambda: math.nan,
    "complex": lambda real_part, imaginary: complex(decode(real_part), decode(imaginary)),
    "bytes": bytes.fromhex,
    "range": range_of,
    "date": datetime.date.fromisoformat,
    "datetime": datetime.datetime.fromisoformat,
    "datetime utc": datetime_in_utc,
    "time": lambda text: datetime.datetime.fromisoformat(text).time(),
    "time utc": lambda text: datetime_in_utc(text).timetz(),
    "timedelta": datetime.timedelta,
    "timezone": lambda offset: datetime.timezone(decode(offset))}


# ---------------------------------------------------------------------------------------------------------------------
# equality of encoded values

EXACT = 0.0, 0.0                                # a tolerance: how much floats may differ, relative and absolute
# Rounding, relative to the number itself, and to the largest number of a task. The second is limited, because one
# number may be far larger than the others
RELATIVE, ROUNDING, MAX_ROUNDING = 1e-12, 2.0 ** -48, 1e-12


def numbers_in(data):
    """The sizes of the finite floats among encoded values."""
    if type(data) is list:
        return [number for part in data for number in numbers_in(part)]
    return [abs(data)] if type(data) is float and math.isfinite(data) else []


def tolerance_of(numbers, rounding=None):
    """How much floats may differ by rounding in a task with these numbers. If numbers cancel, the result is off by the
    rounding of the largest. rounding: this rounding, if other numbers cancel."""
    if rounding is None:
        rounding = min(MAX_ROUNDING, ROUNDING * max(numbers, default=0.0))
    return RELATIVE, rounding


def real(data):
    """An encoded real number as a Python number. Raises TypeError for other values."""
    if type(data) in (int, float):
        return data
    kind, *parts = data if type(data) is list else [None]
    if kind == "int":
        return int(parts[0], 16)
    if kind == "ratio":
        return fractions.Fraction(parts[0])
    raise TypeError("a comparison of what is no number")


def as_complex(data):
    """[real part, imaginary part] of an encoded complex number; [data, 0] of other data."""
    return data[1:] if is_complex(data) else [data, 0]


def is_complex(data):
    return type(data) is list and data[0] == "complex"


def equal_values(a, b, tolerance=None):
    """Whether two values are equal by Python's rules, but for the rounding of floats.
    tolerance: that of a task (tolerance_of). None: as if these two values were all its numbers."""
    if tolerance is None:
        tolerance = tolerance_of(numbers_in([a, b]))
    if a == b:
        return True
    if is_complex(a) or is_complex(b):
        pairs = zip(as_complex(a), as_complex(b))
        return all(equal_values(part, other, tolerance) for part, other in pairs)
    if not type(a) is type(b) is list:
        return float in (type(a), type(b)) and equal_numbers(a, b, tolerance)
    (kind, *parts), (other_kind, *other_parts) = a, b
    if kind in DICTS and other_kind in DICTS:
        if kind == other_kind == "counter":                     # in which a missing count is 0
            parts = [part for part in parts if part[2] != 0]
            other_parts = [part for part in other_parts if part[2] != 0]
        if not kind == other_kind == "odict":                   # the order counts among OrderedDicts
            kind = other_kind = "dict"
    if kind in UNORDERED:
        parts.sort(key=order)
        other_parts.sort(key=order)
    if kind != other_kind or len(parts) != len(other_parts):
        return False
    return all(equal_values(part, other, tolerance) for part, other in zip(parts, other_parts))


def equal_numbers(a, b, tolerance):
    """equal_values of a float and something else. Two floats, or numbers of which one has a fraction, may differ by
    rounding."""
    try:
        a, b = real(a), real(b)
        is_rounded = type(a) is type(b) is float or a % 1 != 0 or b % 1 != 0
        return a == b or is_rounded and math.isclose(a, b, rel_tol=tolerance[0], abs_tol=tolerance[1])
    except (OverflowError, TypeError):                          # too large for a float; not a number
        return False
