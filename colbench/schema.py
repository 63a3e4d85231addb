"""Kinds of JSON values, to check input files.

A kind is one of Python's types str, bool, int, float, list, dict, or a function that takes a value and returns
its fault (None: no fault). The functions below make such functions from other kinds:

    TURN = record({"role": one_of("user", "assistant"), "content": str}, {"output_ids": list_of(whole(0))})
    TURN({"role": "user", "content": 1})        '"content" is an integer, not a string'

`int` is a whole number of 64 bits, `float` a finite number, whole or not; true and false are neither.
lib/ also uses them."""
import contextlib
import gzip
import json
import pathlib
import zlib

MAX_WORD = 2 ** 63
NAMES = {type(None): "null", bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list",
         dict: "an object"}


class InputError(Exception):
    """Bad input, or something missing on this machine. One line says where, what, and how to fix it."""


# ---------------------------------------------------------------------------------------------------------------------
# reading

@contextlib.contextmanager
def open_lines(path):
    """Open a file of lines (JSONL) as bytes; gzipped files, whatever their name, are unpacked. Raises OSError, which
    names the file, if a gzipped file is damaged."""
    with open(path, "rb") as file:
        is_packed = file.peek(2).startswith(b"\x1f\x8b")
        try:
            yield gzip.open(file) if is_packed else file
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise gzip.BadGzipFile(f"{path}: damaged gzip file ({error})") from None


def one_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def parse_json(text, kind, where):
    """The value of a JSON text. Raises InputError, which starts with `where`, if it is not of this kind."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:                   # also no UTF-8, very long numbers, very deep
        raise InputError(f"{where}: not JSON ({getattr(error, 'msg', one_line(error))})") from None
    check_kind(value, kind, where)
    return value


def read_json(path, kind):
    """The value of a JSON file. Raises InputError, which names the file, if it is not of this kind."""
    return parse_json(pathlib.Path(path).read_bytes(), kind, path)


def read_jsonl(path, keys, check=None):
    """The objects of a JSONL file, gzipped or not, as dicts. Raises InputError that names the line.

    keys: {name: kind} that each row must have, or the kind of a row.
    check(row, where, first row): a further check of a row."""
    kind = keys if callable(keys) else record(keys)
    rows = []
    with open_lines(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}:{number}"
                rows.append(parse_json(line, kind, where))
                if check:
                    check(rows[-1], where, rows[0])
    if not rows:
        raise InputError(f"{path}: no rows in it")
    return rows


def check_kind(value, kind, where):
    """Raises InputError, which starts with `where`, unless `value` is of this kind."""
    fault = kind(value)
    if fault:
        raise InputError(f"{where}: {fault.removeprefix('is ')}")


def check_keys(row, keys, where):
    """Raises InputError, which starts with `where`, unless `row` is a dict with all `keys`, {name: kind}."""
    check_kind(row, record(keys), where)


# ---------------------------------------------------------------------------------------------------------------------
# kinds

def type_fault(value, wanted):
    """The fault of a value that should be of the type `wanted`."""
    name = NAMES.get(type(value), f"a {type(value).__name__}")      # a program's own task may hold what is not JSON
    return f"is {name}, not {NAMES[wanted]}"


def checker(kind):
    """The function of a kind."""
    if kind is int:
        return whole(-MAX_WORD)
    if kind is float:
        return number(-1e300, 1e300)
    if isinstance(kind, type):
        return lambda value: None if type(value) is kind else type_fault(value, kind)
    return kind


def whole(low):
    """A whole number of 64 bits, `low` or more."""
    return number(low, MAX_WORD - 1, int)


def number(low, high, kind=float):
    """A number from `low` to `high`, a whole one with `kind` int; never NaN or infinite."""
    def check(value):
        if type(value) not in (int, kind):
            return type_fault(value, kind)
        return None if low <= value <= high else f"is {shown(value)}, not {NAMES[kind]} from {low} to {high}"
    return check


def label(value):
    """A text that is not empty."""
    if type(value) is not str:
        return type_fault(value, str)
    return None if value else "is an empty text"


def one_of(*values):
    """One of some texts."""
    def check(value):
        if type(value) is not str or value not in values:
            return f"is {shown(value)}, not {' or '.join(map(repr, values))}"
    return check


def nullable(kind):
    """null, or a value of this kind."""
    check = checker(kind)
    return lambda value: None if value is None else check(value)


def list_of(kind, least=0):
    """A list of values of this kind, with a minimum length."""
    check = checker(kind)

    def check_list(value):
        if type(value) is not list:
            return type_fault(value, list)
        if len(value) < least:
            return f"is a list of {len(value)}, not of {least} or more"
        for index, item in enumerate(value):
            if fault := check(item):
                return located(f"item {index}", fault)
    return check_list


def token_ids(value):
    """A list of one or more token ids. Whether a tokenizer has them is not checked."""
    if type(value) is list and set(map(type, value)) == {int} and min(value) >= 0 and max(value) < 2 ** 31:
        return None
    return f"is {shown(value)}, not a list of token ids: whole numbers from 0 up, one at least"


def table_of(kind):
    """An object with any names, whose values are all of this kind."""
    return record({}, others=kind)


def record(needed, optional=None, others=lambda value: None):
    """An object with the names in `needed` and optionally those in `optional`, {name: kind}; other names have values of
    the kind `others`. The check removes optional names whose value is null but must not be."""
    optional = optional or {}
    checks = {name: checker(kind) for name, kind in {**optional, **needed}.items()}
    check_other = checker(others)

    def check_record(value):
        if type(value) is not dict:
            return type_fault(value, dict)
        for key in needed:
            if key not in value:
                return f'missing "{key}"'
        for key in optional:
            if key in value and value[key] is None and checks[key](None):           # as Dataset.to_json writes it
                del value[key]
        for key, item in value.items():
            if fault := checks.get(key, check_other)(item):
                return located(f'"{key[:80]}"' if fault.startswith("is ") else key[:80], fault)
    return check_record


def located(place, fault):
    """A fault with its place: `"sample" is …`, or, further inside, `test_cases: "test1" is …`."""
    return f"{place} {fault}" if fault.startswith("is ") else f"{place}: {fault}"


def shown(value):
    """A value as a short text."""
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + " …"
