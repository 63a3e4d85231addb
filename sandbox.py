"""The scorer's child program: runs untrusted code behind walls and says what its calls return. Standard library alone.

    with Sandbox("namespaces", hash_seed=0) as sandbox:                                   (common.Scorer does this)
        sandbox.greet()
        values, _ = sandbox.run("def f(n): return n / 2", ["f(4)", "f(None)"], 1.0, imports=[])
        # [["ok", 2], ["error", "TypeError: unsupported operand …"]]

Sandbox is the caller's side. It starts `python sandbox.py LAYER WORK_DIR SITE_PACKAGES …`, the server, with a socket as
its stdin and stdout. One request is one process and one fresh pair of pipes: the server receives the length of a request
and the two descriptors and forks; the fork is confined, reads the request, runs the code and writes its results, a JSON
line each. So the memory of the server, which every fork inherits, never holds an answer, a reference or a result, and
nothing that an answer does to its descriptors outlives them. A header without descriptors kills the fork. When it is
gone, the server removes what it left (processes, files) and says so. The caller reads each line under one deadline and
one limit of bytes, and takes it only if it has the form that is expected next (is_encoded for values).

Layers
  namespaces   own user, mount, process, network and IPC namespaces: an empty file system that holds the interpreter's
               libraries and packages, read-only, and an empty working directory in memory (16 MiB, the only place that
               can be written); no network; a process tree that dies as one. Inside it, as in the next layer:
  landlock     no capabilities, no_new_privs, a list of allowed system calls (no other processes, sockets, signals to
               others, new programs, file modes or owners), Landlock: the same files to read, one directory to write.
  rlimits      resource limits alone. Stops faults, not attacks.
In every layer: 1 GiB of address space, files of at most 16 MiB, 64 descriptors, a limit on processor time, an empty
environment, no standard streams, a fixed hash seed. The limits on wall time are the caller's, by a SIGKILL: time_limit_s
a call, LOAD_LIMIT_S more for each load of the code (it is loaded for each call), and for an answer as a whole
time_limit_s a call and LOADS_LIMIT_S for all loads. Code and calls have REQUEST_LIMIT characters together at most.

What this does not cover: faults of the kernel or the processor (side channels, Spectre); processor time and memory
within the limits; in the layer landlock the number of files written before the time limit, and names, sizes and dates
of files outside (not their content); the results of an answer to itself (code may write its results' lines, too: then
they are wrong values, at most those that it could have returned). Answers that need threads work, answers that start
processes or open sockets fail.
"""
import builtins
import collections
import contextlib
import ctypes
import gc
import importlib
import itertools
import json
import math
import os
import re
import resource
import select
import signal
import socket
import struct
import symtable
import sys
import textwrap
import time
import types

MEMORY_LIMIT = 1 << 30          # bytes of address space
FILE_LIMIT = 16 << 20           # bytes of a file, and of all files in the layer namespaces
RESULT_LIMIT = 1 << 20          # bytes of one encoded result
REQUEST_LIMIT = 1 << 20         # characters of an answer's code and calls
MAX_DEPTH = 100                 # of nested values
HEADER = struct.Struct("<II")   # bytes of the request (0: kill the running one), seconds of processor time
PRELOADED = ("bisect calendar collections collections.abc copy dataclasses datetime decimal enum fractions functools "
             "heapq itertools math operator random re statistics string time typing")           # each slows every fork
BLACKLIST = ("import os", "exit(", "quit(", "argparse", "sudo", "transformers")             # of the published scorer


# ---------------------------------------------------------------------------------------------------------------------
# the caller's side

PROGRAM = os.path.abspath(__file__)
START_LIMIT_S, LOAD_LIMIT_S, LOADS_LIMIT_S, CLEAN_LIMIT_S = 60, 4, 20, 5
ANSWER_TIME_LIMIT = "time limit of the whole answer"
PROBE = """def probe():
    import os, socket, wave
    open("a", "w").close()
    found = os.listdir(".") != ["a"]
    for attack in (lambda: open({path!r}), lambda: open("/etc/passwd"), lambda: open({path!r}, "a"), socket.socket,
                   lambda: os.chmod(".", 0o777), lambda: os.kill(1, 0)):
        try:
            attack()
            found = True
        except OSError:
            pass
    return found"""


class LayerError(Exception):
    """A layer of isolation does not work on this machine."""


class Sandbox:
    """One child program (sandbox.py); a context manager. `run` evaluates calls on some code."""

    def __init__(self, layer, hash_seed):
        self.layer, self.hash_seed = layer, hash_seed

    def __enter__(self):
        import subprocess                                           # here, so that the server's forks do not carry them
        import tempfile
        self.folder = None if self.layer == "namespaces" else tempfile.mkdtemp(prefix="sandbox-")
        self.work = os.path.join(self.folder, "0") if self.folder else "/sandbox"
        if self.folder:
            os.mkdir(self.work)
        self.control, theirs = socket.socketpair()
        self.control.settimeout(START_LIMIT_S)
        site_packages = [path for path in sys.path if os.path.isdir(path) and
                         os.path.basename(path) in ("site-packages", "dist-packages")]
        one_thread = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
        environment = {"PYTHONHASHSEED": str(self.hash_seed), "TZ": "UTC", "LANG": "C.UTF-8", "HOME": self.work,
                       "TMPDIR": self.work, **one_thread}
        with theirs:
            self.child = subprocess.Popen(
                [sys.executable, "-s", "-S", "-P", "-B", PROGRAM, self.layer, self.work, *site_packages], stdin=theirs,
                stdout=theirs, env=environment, cwd="/", start_new_session=True)
        return self

    def __exit__(self, *exception):
        from subprocess import TimeoutExpired
        self.control.close()
        try:
            self.child.wait(10)
        except TimeoutExpired:
            self.child.kill()
            self.child.wait()
        if self.folder:
            if empty(self.folder, 2 * CLEAN_LIMIT_S):
                os.rmdir(self.folder)
            else:
                print(f"scorer: files of answers cannot be removed: {self.folder}", file=sys.stderr)

    def greet(self):
        """Wait until the child serves, and see with harmless attacks that the walls stand; LayerError if not."""
        try:
            hello = json.loads(self.reply())
            if "error" in hello:
                raise LayerError(hello["error"])
            if self.layer != "rlimits":
                (value,), _ = self.run(PROBE.format(path=PROGRAM), ["probe()"], 10)
                if value != ["ok", 0]:
                    raise LayerError(f"its walls do not stand ({value[1]})")
        except RuntimeError as error:
            raise LayerError(str(error)) from None

    def run(self, code, calls, time_limit_s, imports=None, reference=None):
        """Results of the calls, ["ok", value] or ["error", reason] each, and what a reference (imports=None) imported.
        A call that takes too long or ends its process costs its own result: a new process goes on with the next."""
        if sum(map(len, (code, reference or "", *calls))) > REQUEST_LIMIT:
            return [["error", f"larger than {REQUEST_LIMIT:,} characters"]] * len(calls), None
        values, imported, left_s = [], None, LOADS_LIMIT_S + len(calls) * time_limit_s
        while len(values) < len(calls):
            request = {"code": code, "calls": calls[len(values):], "imports": imports, "compat": reference is not None,
                       "reference": reference}
            more, found, loaded, reason, seconds = self.run_process(request, time_limit_s, left_s)
            left_s -= seconds
            values += more
            imported = imported or found
            if len(values) < len(calls) and reason != "restart":
                # Code that does not even load would not load again; the published evaluation does not go on at all.
                goes_on = loaded and reference is None and reason != ANSWER_TIME_LIMIT
                values += [["error", reason]] * (1 if goes_on else len(calls) - len(values))
        return values, imported

    def run_process(self, request, time_limit_s, left_s):
        """One process: (results so far, imports, whether the code had loaded, why it ended, seconds it took of the
        left_s). RuntimeError if the server cannot be used; nothing that the code does is one."""
        data, num_calls = json.dumps(request).encode(), len(request["calls"])
        values, imports, loaded, reason, began, ends = [], None, False, "", None, None
        try:
            with contextlib.ExitStack() as stack:
                theirs, requests, results, theirs_too = (stack.enter_context(open(end, mode, buffering=0)) for pipe in
                                                         (os.pipe(), os.pipe()) for end, mode in zip(pipe, ("rb", "wb")))
                socket.send_fds(self.control, [HEADER.pack(len(data), int(max(0, left_s)) + 2)],
                                [theirs.fileno(), theirs_too.fileno()])
                theirs.close()
                theirs_too.close()
                write_request(requests.fileno(), data, time.monotonic() + START_LIMIT_S)
                lines = Lines(results.fileno())
                try:
                    lines.expect(is_ready, time.monotonic() + START_LIMIT_S)
                    began = time.monotonic()
                    ends = began + left_s
                    while len(values) < num_calls:
                        message = lines.expect(is_restart if values else is_loaded,
                                               min(ends, time.monotonic() + time_limit_s + LOAD_LIMIT_S))
                        if message == "restart":
                            raise Stop("restart")
                        deadline, loaded = min(ends, time.monotonic() + time_limit_s), True
                        if request["imports"] is None and not values and not request["compat"]:
                            imports = lines.expect(is_imports, deadline)
                        values.append(lines.expect(is_result, deadline))
                except Stop as stop:
                    over = str(stop) == "time limit" and ends and time.monotonic() >= ends
                    reason = ANSWER_TIME_LIMIT if over else str(stop)
            if not began:
                raise RuntimeError(f"the scorer's child program could not run anything ({reason})")
            seconds = time.monotonic() - began
            self.control.send(HEADER.pack(0, 0))                    # kill it, unless it has ended
        except OSError as error:
            raise RuntimeError(f"the scorer's child program is gone: {error}") from None
        self.reply()
        return values, imports, loaded, reason, seconds

    def reply(self):
        """The next line of the server."""
        line = b""
        try:
            while not line.endswith(b"\n"):
                if not (more := self.control.recv(4096)):
                    raise OSError("it has ended")
                line += more
        except OSError as error:
            raise RuntimeError(f"the scorer's child program does not answer: {error}") from None
        return line


class Stop(Exception):
    """Why the results of a process end early."""


class Lines:
    """Messages, a JSON line each, from a descriptor that untrusted code may write to."""

    def __init__(self, descriptor):
        self.descriptor, self.buffer, self.poll = descriptor, bytearray(), select.poll()
        self.poll.register(descriptor, select.POLLIN)

    def expect(self, valid, deadline):
        """The next message; Stop if it is not valid(message), is too long, or comes after the deadline. What is read in
        between, a byte at a time perhaps, moves neither the deadline nor the limit."""
        searched = 0
        while (end := self.buffer.find(b"\n", searched)) < 0:
            searched = len(self.buffer)
            if searched > RESULT_LIMIT:
                raise Stop("a result that is too large")
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not self.poll.poll(math.ceil(left_s * 1000)):
                raise Stop("time limit")
            if not (more := os.read(self.descriptor, 1 << 16)):
                raise Stop("process ended")
            self.buffer += more
        line = bytes(self.buffer[:end])
        del self.buffer[:end + 1]
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            raise Stop("a broken result") from None
        if not valid(message):
            raise Stop("a broken result")
        return message


def write_request(descriptor, data, deadline):
    os.set_blocking(descriptor, False)
    poll, data = select.poll(), memoryview(data)
    poll.register(descriptor, select.POLLOUT)
    while data:
        if not poll.poll(max(0, int(1000 * (deadline - time.monotonic())))):
            raise OSError("it reads no request")
        data = data[os.write(descriptor, data):]


# What a process may say, in this order: "ready", and for each call "loaded" (or "restart", after the first), once what a
# reference imported, and a result.

def is_ready(message):
    return message == "ready"


def is_loaded(message):
    return message == "loaded"


def is_restart(message):
    return message in ("loaded", "restart")


def is_imports(message):
    return type(message) is list and all(type(item) is list and len(item) == 3 and type(item[0]) is type(item[1]) is str
                                         and type(item[2]) in (str, type(None)) for item in message)


def is_result(message):
    return type(message) is list and len(message) == 2 and (
        message[0] == "ok" and is_encoded(message[1]) or message[0] == "error" and type(message[1]) is str)


def empty(folder, limit_s):
    """Remove what is in a folder; False if that is not done in the time. It never raises: a folder inside a folder is
    first moved up, so that neither the depth nor the length of a path matters."""
    until, prefix, numbers, waiting = time.monotonic() + limit_s, os.urandom(8).hex(), itertools.count(), []

    def clear(descriptor):
        with os.scandir(descriptor) as entries:
            for entry in entries:
                name = entry.name
                if time.monotonic() > until:
                    raise TimeoutError
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(name, dir_fd=descriptor)
                    continue
                os.chmod(name, 0o700, dir_fd=descriptor)
                if descriptor != top:
                    moved = f"{prefix}-{next(numbers)}"
                    os.rename(name, moved, src_dir_fd=descriptor, dst_dir_fd=top)
                    name = moved
                waiting.append(name)

    try:
        top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            clear(top)
            while waiting:
                name = waiting.pop()
                descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
                try:
                    clear(descriptor)
                finally:
                    os.close(descriptor)
                os.rmdir(name, dir_fd=top)
        finally:
            os.close(top)
    except OSError:
        return False
    return True


Comparison = collections.namedtuple("Comparison", "operator sides")


def split_comparison(call):
    """A test that is a comparison, in parts, so that data is compared by the caller and no object of an answer has a
    say: "f(2) == [1]" gives Comparison("Eq", ("f(2)", "[1]")). None for another test. A comparison inside another
    expression gets an operator that the caller knows no meaning of."""
    import ast                                                      # here, so that the server's forks do not carry it
    if not re.search(r"[=!<>]|\b(in|is)\b", call):
        return None
    nested = Comparison("nested", (call.strip(),))
    try:
        test = ast.parse(call.strip(), mode="eval").body
        if not isinstance(test, ast.Compare):
            return nested if compares(test) else None
        sides = (test.left, *test.comparators)
        if len(sides) > 2 or any(map(compares, sides)):
            return nested
        return Comparison(type(test.ops[0]).__name__, tuple(map(ast.unparse, sides)))
    except (SyntaxError, ValueError):
        return None                                                 # its result says so
    except (RecursionError, MemoryError):
        return nested


def tuple_of(expressions):
    return "(" + "".join(f"({expression}), " for expression in expressions) + ")"


def compares(node):
    """Is there a comparison in an expression, outside of what it passes to functions?"""
    import ast
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not hasattr(builtins, node.func.id):
        return False
    return isinstance(node, ast.Compare) or any(map(compares, ast.iter_child_nodes(node)))


def functions_under_test(call, imported):
    """The names that a call calls, but for built-in and imported ones; if all are imported: the outermost."""
    import ast
    try:
        calls = [node.func.id for node in ast.walk(ast.parse(call.strip(), mode="eval")) if isinstance(node, ast.Call)
                 and isinstance(node.func, ast.Name) and not hasattr(builtins, node.func.id)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    return set(calls) - set(imported) or set(calls[:1])


# ---------------------------------------------------------------------------------------------------------------------
# values: Python -> JSON. Values of the types below are equal by Python's rules if and only if their JSON is, but for
# ordered dicts and counters (common.equal_values).

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
        return number(value)
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
        return number(value)
    if isinstance(value, complex):
        return number(value.real) if value.imag == 0 else ["complex", number(value.real), number(value.imag)]
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
        return ["range", len(value), *map(number, value[:2])]
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


def number(value):
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


# ---------------------------------------------------------------------------------------------------------------------
# answers: text -> code

IMPORT = r"(?:import|from)[ \t]+\w"
DEFINITION = r"(?:async[ \t]+def|def|class)[ \t]+\w|@\w"
NAMING = re.compile(rf"""[ \t]*(?:{IMPORT}|"{{3}}|'{{3}}|[A-Za-z_(*][^=#`\n]*(?<![<>!=])=(?!=))""")
CODE = re.compile(rf"{NAMING.pattern}|[ \t]*(?:{DEFINITION}|try:|[A-Za-z_][\w.]*\(|\[.*[ \t]for[ \t]|"
                  r"(?:assert|async|del|for|global|if|match|pass|raise|while|with)\b)")
BEGINNING = re.compile(rf"(?i:[ \t]*+py[\w.]*+[ \t]++)?+(?=[ \t]*(?:{IMPORT}|{DEFINITION}|\w+ = ))")  # a language, code
USE = re.compile(r"assert\b|[A-Za-z_][\w.]*\(")
DECORATED = re.compile(rf"[ \t]*(?:{DEFINITION})")
CLAUSE = re.compile(r"[ \t]*(?:else|elif|except|finally)\b")
NOT_IN_BRACKETS = re.compile(rf"[ \t]*(?:{IMPORT}|{DEFINITION}|\w+ = |```|~~~)")          # as deep as the statement
MARKER = re.compile(r"[^\w\n]*I[ _]WANT[ _]TO[ _]ANSWER\b[ \t]*[:*_.]*", re.IGNORECASE)
TICKS = re.compile(r"`+|~{3,}")
TAGS = re.compile(r"^[ \t]*(?:<(?:pre|code)\b[^<>\n]*>){1,2}|(?:</(?:pre|code|s)>|<\|\w+\|>|\[/INST\]){1,4}[ \t]*$",
                  re.MULTILINE)
WORDS = re.compile(r"^(?!(?:assert|async|case|class|def|del|elif|else|except|finally|for|from|global|if|import|match|"
                   r"pass|raise|return|try|while|with)\b)[A-Za-z][\w ,:-]*$", re.MULTILINE)     # no effect
LEXEME = re.compile(r"""\"{3}|'{3}|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|#.*|`|\\(?:.|$)|[()\[\]{}]""")
Source = collections.namedtuple("Source", "marked sort statements names is_cut")
STRING_END = {quote: re.compile(rf"(?:\\.|(?!{quote}).)*+{quote}") for quote in ('"""', "'''")}
CUT_LENGTH = 10_000             # a longer statement is not cut before its fault
GROUP = 50                      # statements that are parsed together where not all of a text's do
COMPILED_LENGTH = 6000          # longer ones are only parsed: compile() takes quadratic time for many equal functions


def extract_code(answer):
    """The code of an answer, as a list of sources that are executed one after the other in one namespace.

    1. A text that is Python as a whole is the code, without lines of bare words ("python", "Explanation").
    2. Else a statement is a line that looks like one, at any indentation, with what its brackets, strings, clauses and
       deeper lines add; all else, and what does not parse, is prose. Statements with no prose between are one source.
    3. If sources after the first marker ("I WANT TO ANSWER") define a function, lambda or class, only they count.
    4. Fenced sources (``` or ~~~) go before others, others before code in backticks: what counts is the first sort that
       defines, and those before it. Code that a text or a marker begins with is as good as fenced.
    5. Of these, sources that define, and those that only import and assign without calling a function of the answer,
       are the code, in order: later definitions win.
    6. If there is none: the first source, else the text as it is."""
    text = textwrap.dedent(answer.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")).strip("\n")
    if definitions(text)[0] is not None and not WORDS.search(text):
        return [text]
    text = text.translate({0xFEFF: None, 0x200B: None, 0xA0: " "})
    sources, run = [], []
    for marked, sort, statement in [*statements(text), (False, 0, None)]:
        if statement is None:
            sources += [Source(*place, *source) for source in parsed(run, place[1])] if run else []
            run = []
        elif run or not USE.match(statement):                           # a use before all definitions is an example
            run.append(statement)
            place = marked, sort
    whole = {name for source in sources if not source.is_cut for name in source.names}
    sources = [source for source in sources if not (source.is_cut and whole & source.names.keys())]
    marked = [source for source in sources if source.marked]
    group = marked if any(source.names for source in marked) else sources
    sort = max((source.sort for source in group if source.names), default=0)
    own = {"input"}.union(name for source in group for name, kind in source.names.items() if kind == "function")
    chosen = [source for source in group
              if source.sort >= sort and (source.names or only_names(source.statements, own))]
    return ["\n".join(source.statements) for source in chosen or sources[:1]] or [text]


def statements(text):
    """What looks like statements in a text, by its lines: yield (follows a marker?, sort, statement) in order, with
    statement None for prose; sort is 2 in a fence, 0 in single backticks, else 1. A line is read at most thrice."""
    lines = text.split("\n")
    last = {quote: text.count("\n", 0, text.rfind(quote)) if quote in text else -1 for quote in STRING_END}
    marked, fenced, begins, fence_sort, index = False, False, True, 2, 0
    while index < len(lines):
        line = lines[index]
        indent = line[:len(line) - len(line.lstrip())]
        is_comment = line.startswith("#", len(indent))
        if (marker := MARKER.match(line)) and not (is_comment and (fenced or indent)):
            yield marked, 0, None
            marked = begins = True
            line = indent + line[marker.end():].lstrip()
        if not line.strip() or is_comment and not marker:
            index += 1
            continue
        if line.startswith("<", len(indent)):
            line = indent + TAGS.sub("", line)
        if begins:
            fence_sort, begins = 1 if BEGINNING.match(line) else 2, False
        sort = fence_sort if fenced else 1
        is_code = CODE.match(line)
        for tick in () if is_code else TICKS.finditer(line):
            if code := BEGINNING.match(line, tick.end()):
                yield marked, 0, None
                fenced, is_code, sort = fenced or len(tick[0]) > 2, True, fence_sort if len(tick[0]) > 2 else 0
                line = indent + line[code.end():].lstrip()
                break
        if not is_code:
            yield marked, 0, None
            fenced = is_fenced_after(line, fenced)
            index += 1
            continue
        lines[index] = line
        end, column = statement_end(lines, index, len(indent), last)
        statement = lines[index:end] + ([lines[end][:column]] if column else [])
        fences = (i for i in range(1, len(statement)) if statement[i].lstrip().startswith(("```", "~~~")))
        shorter = 1 if line.lstrip().startswith(("'''", '"""')) else next(fences, None)
        if shorter and definitions(dedented(statement, len(indent)))[0] is None:        # quotes that are no string's
            statement, end, column = statement[:shorter], index + shorter, 0
        yield marked, sort, dedented(statement, len(indent))
        if column:
            yield marked, 0, None
            fenced = is_fenced_after(lines[end][column:], fenced)
        index = end + bool(column)


def dedented(lines, indent):
    """The lines as a text, with `indent` columns less, of blanks alone: a string may have less of them."""
    return "\n".join(line[:indent].lstrip() + line[indent:] for line in lines)


def is_fenced_after(prose, fenced):
    """Is what follows a line of prose in a fence? A word after ``` opens another one."""
    fences = [tick for tick in TICKS.finditer(prose) if len(tick[0]) > 2]
    return fenced if len(fences) % 2 == 0 else not fenced or bool(prose[fences[-1].end():].strip())


def statement_end(lines, first, indent, last):
    """Where the statement that begins at line `first` ends: (end, 0), or (line, column of the backtick that ends it).
    last: {triple quote: the last line that has one}."""
    depth, quote, is_joined, index = 0, None, False, first
    may_be_head = not NAMING.match(lines[first])                       # imports and assignments have no deeper lines
    while True:
        line, position = lines[index], 0
        if not (depth or quote or is_joined):
            is_decorator = line.startswith("@", indent)
        is_joined = False
        while True:
            if quote:
                if not (closing := STRING_END[quote].match(line, position)):
                    break
                quote, position = None, closing.end()
            if not (lexeme := LEXEME.search(line, position)):
                break
            position, token = lexeme.end(), lexeme[0]
            if token == "`":
                return index, lexeme.start()
            if token in last:
                quote = token if index < last[token] or token in line[position:] else None
            depth = max(0, depth + (token in "([{") - (token in ")]}"))
            is_joined = token == "\\"
        index += 1
        if index == len(lines):
            return index, 0
        after = index
        if not (depth or is_joined or quote):
            while after < len(lines) and (not lines[after].strip() or lines[after].lstrip()[0] == "#"):
                after += 1
            if after == len(lines):
                return index, 0
        its_indent = len(lines[after]) - len(lines[after].lstrip())
        if depth or is_joined or quote:
            if not quote and its_indent <= indent and NOT_IN_BRACKETS.match(lines[index]):
                return index, 0
        elif not (its_indent > indent and may_be_head or is_decorator and DECORATED.match(lines[after]) or
                  its_indent == indent and CLAUSE.match(lines[after])):
            return index, 0
        index = after


def parsed(run, sort):
    """A run of statements as sources, [([statement, …], names that it defines, is it cut?), …]: one if all of them
    parse, else one for each GROUP that does, else the neighbours that do. An unfenced statement is cut before its
    fault: indented prose may follow it."""
    names, fault = definitions("\n".join(run))
    if names is not None:
        return [(run, names, False)]
    if len(run) > GROUP:
        return [source for i in range(0, len(run), GROUP) for source in parsed(run[i:i + GROUP], sort)]
    if len(run) > 1:
        sources, follows = [], False
        for found in (parsed([statement], sort) for statement in run):
            joins = bool(found) and not found[0][2]
            if follows and joins:
                sources[-1] = sources[-1][0] + found[0][0], {**sources[-1][1], **found[0][1]}, False
            else:
                sources += found
            follows = joins
        return sources
    statement = TAGS.sub("", run[0])
    if statement != run[0]:
        return parsed([statement], sort)
    if sort == 2 or fault <= 1 or len(statement) > CUT_LENGTH:
        return []
    statement = "\n".join(statement.split("\n")[:fault - 1])
    names, _ = definitions(statement)
    return [] if names is None else [([statement], names, True)]


def definitions(source):
    """({name: "function" or "class"} for all that a source defines, lambdas too, 0), or (None, line of its fault) where
    it is not Python."""
    try:
        table = symtable.symtable(source, "<answer>", "exec")
        if len(source) <= COMPILED_LENGTH:
            compiled(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return None, getattr(error, "lineno", 0) or 0
    return {child.get_name(): child.get_type() for child in table.get_children()
            if child.get_name() not in ("listcomp", "setcomp", "dictcomp", "genexpr")}, 0


def only_names(run, own):
    """Does it only import and assign, with no call of the functions `own`?"""
    return all(map(NAMING.match, run)) and own.isdisjoint(re.findall(r"\b(\w+)\(", "\n".join(run)))


def compiled(source):
    return compile(source, "<answer>", "exec", dont_inherit=True)


# ---------------------------------------------------------------------------------------------------------------------
# running, in the confined process

def run_calls(request, send):
    """Execute the code afresh for each call, send "loaded", and ["ok", value] or ["error", reason]; "restart" before an
    early end (threads left running would disturb the next call). Code whose top level fails is judged by what it had
    defined. A reference also sends which imported names its calls use, for the calls of the answers."""
    imports = request["imports"]
    try:
        codes, broken = [compiled(source) for source in extract_code(request["code"])], None
    except BaseException as error:
        codes, broken = [], reason_of(error)
    for index, call in enumerate(request["calls"]):
        module = sys.modules["answer"] = types.ModuleType("answer")
        fault = execute(codes, module) or broken
        send("loaded")
        if index == 0 and imports is None:
            send(imported_names(request["calls"], module.__dict__))
        try:
            # What the reference imported under a name is what the call means by it, however the answer imported it; a
            # name that the answer defines itself is the answer's.
            names = {name: getattr(importlib.import_module(where), what) if what else importlib.import_module(where)
                     for name, where, what in imports or ()
                     if name not in module.__dict__ or origin(module.__dict__[name])}
            result = ["ok", encode(eval(call.strip(), {**module.__dict__, **names} if names else module.__dict__))]
        except BaseException as error:
            result = ["error", fault or reason_of(error)]
        send(result)
        if len(sys._current_frames()) > 1 and index + 1 < len(request["calls"]):
            send("restart")
            return


def execute(codes, module):
    """Execute code objects in a module; why the first failed, None where none did."""
    fault = None
    for code in codes:
        try:
            exec(code, module.__dict__)
        except BaseException as error:
            fault = fault or reason_of(error)
    return fault


def reason_of(error):
    if isinstance(error, ModuleNotFoundError):
        return f"no module named {str(error.name)[:100]}"
    return f"{type(error).__name__}: {describe(error)}"


def describe(error):
    try:
        return str(error)[:200]
    except BaseException:
        return ""


def imported_names(calls, namespace):
    """[[name, module, attribute or None], …]: names in the calls that the code imported."""
    found = {}
    for call in calls:
        with contextlib.suppress(Exception):                        # a call that is not Python: its result says so
            for name in compile(call.strip(), "<call>", "eval").co_names:
                if where := origin(namespace.get(name)):
                    found[name] = [name, *where]
    return list(found.values())


def origin(value):
    """(module, attribute or None) that a value was imported from; None for what the code defines itself."""
    where, what = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if isinstance(value, types.ModuleType):
        return what, None
    if (type(where) is type(what) is str and where in sys.modules and where != "answer" and
            getattr(sys.modules[where], what, None) is value):
        return where, what
    return None


def run_compat(request, send):
    """The published scorer's verdicts: reference and answer are executed inside a function, so that their functions see
    neither imports nor helpers; calls have an alarm of a second, values are compared here with ==."""
    def alarm(*_):
        raise TimeoutError

    def local_scope(source):
        scope = ({"__name__": "scorer"}, {})
        exec(compiled(source), *scope)
        return scope

    answer = request["code"].strip()
    if answer.startswith("```python"):
        answer = answer[len("```python"):].split("```")[0]
    signal.signal(signal.SIGALRM, alarm)
    scopes = None
    for call in request["calls"]:
        send("loaded")
        try:
            signal.alarm(1)
            if any(word in answer for word in BLACKLIST):
                raise ValueError("blacklist")
            scopes = scopes or [local_scope(source) for source in (request["reference"], answer)]
            expected, value = (eval(call.strip(), *scope) for scope in scopes)
            result = ["ok", int(bool(expected is not None and expected == value))]
        except Exception as error:
            result = ["error", f"{type(error).__name__}: {describe(error)}"]
        finally:
            signal.alarm(0)
        send(result)


# ---------------------------------------------------------------------------------------------------------------------
# walls

libc = ctypes.CDLL(None, use_errno=True)

# Allowed system calls: name, number on x86-64, number on ARM64. All others are answered with "no such call".
ALLOWED = """
read 0 63  write 1 64  close 3 57  fstat 5 80  newfstatat 262 79  statx 332 291  lseek 8 62  mmap 9 222  mprotect 10 226
munmap 11 215  mremap 25 216  madvise 28 233  brk 12 214  rt_sigaction 13 134  rt_sigprocmask 14 135
rt_sigreturn 15 139  sigaltstack 131 132  pread64 17 67  pwrite64 18 68  readv 19 65  writev 20 66  faccessat 269 48
faccessat2 439 439  pipe2 293 59  dup 32 23  dup3 292 24  sched_yield 24 124  nanosleep 35 101  clock_nanosleep 230 115
clock_gettime 228 113  clock_getres 229 114  gettimeofday 96 169  getitimer 36 102  setitimer 38 103  getpid 39 172
gettid 186 178  getppid 110 173  getuid 102 174  geteuid 107 175  getgid 104 176  getegid 108 177  getgroups 115 158
getcwd 79 17  chdir 80 49  fchdir 81 50  mkdirat 258 34  unlinkat 263 35  renameat 264 38  renameat2 316 276
symlinkat 266 36  readlinkat 267 78  ftruncate 77 46  fsync 74 82  fdatasync 75 83  flock 73 32  getdents64 217 61
statfs 137 43  fstatfs 138 44  umask 95 166  uname 63 160  sysinfo 99 179  times 100 153  getrusage 98 165
getpriority 140 141  sched_getaffinity 204 123  sched_getparam 143 121  sched_getscheduler 145 120  getcpu 309 168
getrandom 318 278  exit 60 93  exit_group 231 94  futex 202 98  set_robust_list 273 99  get_robust_list 274 100
set_tid_address 218 96  rseq 334 293  restart_syscall 219 128  membarrier 324 283  epoll_create1 291 20
epoll_ctl 233 21  epoll_pwait 281 22  eventfd2 290 19  ppoll 271 73  pselect6 270 72  sendto 44 206  recvfrom 45 207
shutdown 48 210  getsockopt 55 209  setsockopt 54 208  stat 4 -  lstat 6 -  access 21 -  pipe 22 -  dup2 33 -  poll 7 -
select 23 -  mkdir 83 -  rmdir 84 -  rename 82 -  unlink 87 -  symlink 88 -  readlink 89 -  getrlimit 97 163
time 201 -  alarm 37 -  pause 34 -  epoll_wait 232 -  getdents 78 -  arch_prctl 158 -  epoll_create 213 -"""
# Allowed, or not, by their arguments: name, numbers, allowed when any of these holds?, ((argument, mask, value) …) …
CONDITIONAL = (("clone", 56, 220, True, ((0, 0x10000, 0x10000),)),      # threads alone
               ("ioctl", 16, 29, True, *(((1, 0xFFFFFFFF, request),) for request in (
                   0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451))),   # is it a terminal, its size; descriptor flags
               ("fcntl", 72, 25, False, ((1, 0xFFFFFFF8, 8),)),         # no signals by descriptors
               ("prctl", 157, 167, True, ((0, 0xFFFFFFFF, 15),)),       # a thread's name
               ("prlimit64", 302, 261, True, ((0, 0xFFFFFFFF, 0),)),    # of this process
               ("socketpair", 53, 199, True, ((0, 0xFFFFFFFF, 1), (1, 0xF, 1))),    # for event loops; streams reach
               # nobody else. Early Landlock lets O_RDONLY | O_TRUNC pass, and any file with access mode 3
               ("openat", 257, 56, False, ((2, 0x203, 0x200),), ((2, 0x3, 0x3),)),
               ("open", 2, None, False, ((1, 0x203, 0x200),), ((1, 0x3, 0x3),)))
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def system_call_filter():
    """The seccomp program (classic BPF) for this machine's processor, and the memory it is in; OSError for others."""
    machine = os.uname().machine
    if machine not in MACHINES:
        raise OSError(f"no list of system calls for {machine}")
    column, audit_arch = MACHINES[machine]
    allow, deny, kill = 0x7FFF0000, 0x00050000 | 38, 0x80000000                               # 38: ENOSYS
    load, jump, and_, give = 0x20, 0x15, 0x54, 0x06
    program = [(load, 0, 0, 4), (jump, 1, 0, audit_arch), (give, 0, 0, kill), (load, 0, 0, 0)]
    words = ALLOWED.split()
    for numbers in zip(words[1::3], words[2::3]):
        if numbers[column] != "-":
            program += [(jump, 0, 1, int(numbers[column])), (give, 0, 0, allow)]
    for _, x86, arm, when_equal, *alternatives in CONDITIONAL:
        if (number := (x86, arm)[column]) is not None:
            block = []
            for tests in alternatives:
                for left, (argument, mask, value) in zip(range(len(tests) - 1, -1, -1), tests):
                    block += [(load, 0, 0, 16 + 8 * argument), (and_, 0, 0, mask), (jump, 0, 3 * left + 1, value)]
                block.append((give, 0, 0, allow if when_equal else deny))
            block.append((give, 0, 0, deny if when_equal else allow))
            program += [(jump, 0, len(block), number), *block]
    program.append((give, 0, 0, deny))
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *instruction) for instruction in program))
    return struct.pack("<HxxxxxxQ", len(program), ctypes.addressof(instructions)), instructions


def check(result, what):
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def readable_paths(site_packages):
    """What untrusted code may read: libraries, the interpreter's and the system's, packages, a few devices."""
    prefixes = {sys.base_prefix, sys.base_exec_prefix, "/usr", "/usr/local", "/"}
    paths = {os.path.join(prefix, lib) for prefix in prefixes for lib in ("lib", "lib64")} | set(site_packages)
    paths |= {"/nix/store", "/etc/ld.so.cache", "/usr/share/zoneinfo", "/dev/null", "/dev/zero", "/dev/urandom",
              "/dev/random"}
    return sorted(path for path in paths if os.path.exists(path))


def enter_namespaces(paths, work):
    """Move into new namespaces (a fork: the caller returns as process 1 of its own tree) and a file system of `paths`,
    read-only, and `work`. OSError where the system does not allow it."""
    user, group = os.geteuid(), os.getegid()
    new_user = 0 if user == 0 else 0x10000000
    check(libc.unshare(new_user | 0x20000 | 0x20000000 | 0x40000000 | 0x8000000 | 0x4000000), "unshare")
    if new_user:
        for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
    child = os.fork()
    if child:                                                   # stands between the caller and process 1, and waits
        os.closerange(0, 64)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)                      # PR_SET_PDEATHSIG

    def mount(source, target, kind, flags, data=None):
        check(libc.mount(*(text and text.encode() for text in (source, target, kind)), ctypes.c_ulong(flags),
                         data and data.encode()), f"mount {target}")

    sources = {path: os.path.realpath(path) for path in paths}
    links = {path: os.readlink(path) for path in paths if os.path.islink(path) and path.count("/") == 1}
    mount(None, "/", None, 0x44000)                             # private, recursive
    mount("tmpfs", "/tmp", "tmpfs", 0x6, "size=1m,mode=755")
    os.mkdir("/tmp/old")
    check(libc.syscall(155 if os.uname().machine == "x86_64" else 41, b"/tmp", b"/tmp/old"), "pivot_root")
    os.chdir("/")
    done = []
    for path in paths:
        if path in links:
            os.symlink(links[path], path)
        elif not any(path.startswith(parent + "/") for parent in done):
            source = "/old" + sources[path]
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.mkdir(path) if os.path.isdir(source) else os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
            mount(source, path, None, 0x5000)                   # bind, recursive
            read_only = struct.pack("<QQQQ", 0x3 | (0 if path.startswith("/dev/") else 0x4), 0, 0, 0)
            if libc.syscall(442, -100, path.encode(), 0x8000, read_only, len(read_only)) < 0:   # mount_setattr
                kept = os.statvfs(path).f_flag & 0xC0F          # before Linux 5.12
                mount(None, path, None, 0x1023 | kept)
            done.append(path)
    check(libc.umount2(b"/old", 2), "umount")
    os.rmdir("/old")
    os.mkdir(work)
    mount(None, "/", None, 0x27)                                # read-only
    fresh_work_dir(work)


def fresh_work_dir(work):
    check(libc.mount(b"tmpfs", work.encode(), b"tmpfs", ctypes.c_ulong(0x6),
                     f"size={FILE_LIMIT},nr_inodes=1000,mode=1777".encode()), "mount the working directory")
    os.chdir(work)


def landlock_rules(paths, work, latest):
    """A descriptor of Landlock rules: `paths` to read, `work` to write. OSError where the kernel has no Landlock.
    `latest` is the latest version to use, for tests of earlier ones."""
    version = min(check(libc.syscall(444, None, 0, 1), "Landlock"), latest)
    everything = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    attributes = struct.pack("<QQQ", everything, 0x3, 0x3)[:8 if version < 4 else 16 if version < 6 else 24]
    rules = check(libc.syscall(444, attributes, len(attributes), 0), "Landlock")
    read_file, read_dir = 0x4, 0x8
    write = (0x2 | 0x4 | 0x8 | 0x10 | 0x20 | 0x80 | 0x100 | 0x1000 | 0x4000) & everything   # and files, folders, links
    for path in (*paths, work):
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rights = write if path == work else read_file | (read_dir if os.path.isdir(path) else 0)
        rights |= 0x2 if path == "/dev/null" else 0
        check(libc.syscall(445, rules, 1, struct.pack("<Qi", rights, descriptor), 0), f"Landlock, {path}")
        os.close(descriptor)
    return rules


def confine(layer, seconds, rules, program):
    """In the forked process, before it reads its request: give up whatever it does not need."""
    for what, limit in ((resource.RLIMIT_AS, MEMORY_LIMIT), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_CORE, 0),
                        (resource.RLIMIT_FSIZE, FILE_LIMIT), (resource.RLIMIT_NOFILE, 64)):
        resource.setrlimit(what, (limit, limit))
    if layer == "rlimits":
        return
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)
    if layer == "namespaces" and os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
    check(libc.capset(struct.pack("<Ii", 0x20080522, 0), bytes(24)), "capset")
    check(libc.prctl(38, 1, 0, 0, 0), "no_new_privs")
    if layer == "landlock":
        check(libc.syscall(446, rules, 0), "Landlock")
        os.close(rules)
    check(libc.prctl(22, 2, program[0], 0, 0), "seccomp")


# ---------------------------------------------------------------------------------------------------------------------
# the server

def read_exactly(descriptor, size):
    pieces = []
    while size and (more := os.read(descriptor, min(size, 1 << 16))):
        pieces.append(more)
        size -= len(more)
    return b"".join(pieces)


def serve_one(layer, header, requests, results, rules, program):
    """In the fork: be confined, read the request, answer it, end."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        length, seconds = HEADER.unpack(header)
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        confine(layer, seconds, rules, program)
        request = json.loads(read_exactly(requests, length))
        os.closerange(3, results)
        os.closerange(results + 1, 64)

        def send(message):
            data = json.dumps(message).encode() + b"\n"
            if len(data) > RESULT_LIMIT:
                data = b'["error", "a result that is too large"]\n'
            while data:
                data = data[os.write(results, data):]

        send("ready")
        (run_compat if request["compat"] else run_calls)(request, send)
    finally:
        os._exit(0)


def remove_leftovers(layer, child, work):
    """Kill what the request left running, forget its files; False if they cannot be removed in time."""
    if layer == "namespaces":
        kill(-1)                                                # this is process 1: all others of the namespace
    else:
        kill(-child)
        kill(child)
    if layer == "rlimits":
        for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
            if name.isdigit() and parent_of(name) == os.getpid():               # orphans come to the subreaper
                kill(int(name))
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            break
    if layer != "namespaces":
        return empty(work, CLEAN_LIMIT_S)
    if os.listdir(work):
        os.chdir("/")
        check(libc.umount2(work.encode(), 2), "umount")
        fresh_work_dir(work)
    return True


def kill(pid):
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def parent_of(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def main():
    layer, work, *site_packages = sys.argv[1:]
    layer, _, latest = layer.partition("-")                     # "landlock-2": as where Landlock has version 2
    latest = int(latest or 99)
    sys.argv, sys.orig_argv = ["answer.py"], ["python", "answer.py"]            # what an answer sees
    control, paths, rules, program = socket.socket(fileno=0), [], None, None
    try:
        if layer != "rlimits":
            libc.prctl(1, signal.SIGKILL, 0, 0, 0)
            paths = readable_paths(site_packages)
            program = system_call_filter()
            if layer == "namespaces":
                enter_namespaces(paths, work)
            else:
                rules = landlock_rules(paths, work, latest)
        elif hasattr(libc, "prctl"):
            libc.prctl(36, 1, 0, 0, 0)                          # PR_SET_CHILD_SUBREAPER
    except (OSError, AttributeError) as error:                  # AttributeError: not Linux
        print(json.dumps({"error": str(error)}), flush=True)
        sys.exit(1)
    os.chdir(work)
    sys.path += site_packages
    for name in PRELOADED.split():
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    bell, ring = os.pipe()
    os.set_blocking(ring, False)
    signal.set_wakeup_fd(ring, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    os.write(1, b'{"serving": true}\n')
    while True:
        try:
            header, descriptors, _, _ = socket.recv_fds(control, HEADER.size, 2)
        except ConnectionError:
            break
        if not header:
            break
        if not descriptors:
            continue                                            # an order to kill what had ended by itself
        child = os.fork()
        if child == 0:
            serve_one(layer, header, *descriptors, rules, program)
        for descriptor in descriptors:
            os.close(descriptor)
        ended = False
        while not ended:
            ready = select.select([0, bell], [], [])[0]
            if bell in ready:
                os.read(bell, 4096)
                ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            else:
                ended = True                                    # an order to kill, or the caller has gone
                read_exactly(0, HEADER.size)
        if not remove_leftovers(layer, child, work):
            print(f"scorer: files of an answer cannot be removed now, another folder is used: {work}", file=sys.stderr)
            folder, number = os.path.split(work)
            work = os.environ["HOME"] = os.environ["TMPDIR"] = os.path.join(folder, str(int(number) + 1))
            os.makedirs(work)
            os.chdir(work)
            if layer == "landlock":
                os.close(rules)
                rules = landlock_rules(paths, work, latest)
        os.write(1, b'{"ended": true}\n')


if __name__ == "__main__":
    main()
