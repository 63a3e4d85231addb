"""The scorer's child program: runs untrusted code behind walls and says what its calls return. Standard library alone.

    with Sandbox("namespaces", hash_seed=0) as sandbox:                                   (common.Scorer does this)
        sandbox.greet()
        values, _ = sandbox.run("def f(n): return n / 2", ["f(4)", "f(None)"], 1.0, imports=[])
        # [["ok", 2], ["error", "TypeError: unsupported operand …"]]

Sandbox is the caller's side. It starts `python sandbox.py LAYER REQUESTS_FD RESULTS_FD WORK_DIR SITE_PACKAGES …`, the
server. One request is one process: the server reads the length of a request from stdin and forks; the fork is confined,
reads the request from REQUESTS_FD, runs the code and writes its results to RESULTS_FD, a JSON line each. So the memory
of the server, which every fork inherits, never holds an answer, a reference or a result. A header of length 0 kills the
fork. When it is gone, the server removes what it left (processes, files) and says so on stdout.

Layers
  namespaces   own user, mount, process, network and IPC namespaces: an empty file system that holds the interpreter's
               libraries and packages, read-only, and an empty working directory in memory (16 MiB, the only place that
               can be written); no network; a process tree that dies as one. Inside it, as in the next layer:
  landlock     no capabilities, no_new_privs, a list of allowed system calls (no other processes, sockets, signals to
               others, new programs, file modes or owners), Landlock: the same files to read, one directory to write.
  rlimits      resource limits alone. Stops faults, not attacks.
In every layer: 1 GiB of address space, files of at most 16 MiB, 64 descriptors, a limit on processor time, an empty
environment, no standard streams, a fixed hash seed. The wall-clock limit is the caller's, by a SIGKILL.

What this does not cover: faults of the kernel or the processor (side channels, Spectre); processor time and memory
within the limits; in the layer landlock the number of files written before the time limit, and names, sizes and dates
of files outside (not their content); the results of an answer to itself (code may write its results' lines, too: then
they are wrong values, at most those that it could have returned). Answers that need threads work, answers that start
processes or open sockets fail.
"""
import collections
import contextlib
import ctypes
import gc
import importlib
import json
import os
import re
import resource
import select
import shutil
import signal
import struct
import symtable
import sys
import textwrap
import time
import types

MEMORY_LIMIT = 1 << 30          # bytes of address space
FILE_LIMIT = 16 << 20           # bytes of a file, and of all files in the layer namespaces
RESULT_LIMIT = 1 << 20          # bytes of one encoded result
MAX_DEPTH = 100                 # of nested values
HEADER = struct.Struct("<II")   # bytes of the request (0: kill the running one), seconds of processor time
PRELOADED = ("bisect calendar collections collections.abc copy dataclasses datetime decimal enum fractions functools "
             "heapq itertools math operator random re statistics string time typing")           # each slows every fork
BLACKLIST = ("import os", "exit(", "quit(", "argparse", "sudo", "transformers")             # of the published scorer


# ---------------------------------------------------------------------------------------------------------------------
# the caller's side

PROGRAM = os.path.abspath(__file__)
START_LIMIT_S, LOAD_LIMIT_S = 60, 4
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
        self.work = "/sandbox" if self.layer == "namespaces" else tempfile.mkdtemp(prefix="sandbox-")
        theirs, self.requests = os.pipe()
        self.results, theirs_too = os.pipe()
        site_packages = [path for path in sys.path if os.path.isdir(path) and
                         os.path.basename(path) in ("site-packages", "dist-packages")]
        one_thread = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
        environment = {"PYTHONHASHSEED": str(self.hash_seed), "TZ": "UTC", "LANG": "C.UTF-8", "HOME": self.work,
                       "TMPDIR": self.work, **one_thread}
        self.child = subprocess.Popen(
            [sys.executable, "-s", "-S", "-P", "-B", PROGRAM, self.layer, str(theirs), str(theirs_too), self.work,
             *site_packages], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(theirs, theirs_too),
            env=environment, cwd="/", start_new_session=True, bufsize=0)
        os.close(theirs)
        os.close(theirs_too)
        os.set_blocking(self.results, False)
        os.set_blocking(self.requests, False)
        return self

    def __exit__(self, *exception):
        from subprocess import TimeoutExpired
        self.child.stdin.close()
        try:
            self.child.wait(10)
        except TimeoutExpired:
            self.child.kill()
            self.child.wait()
        self.child.stdout.close()
        os.close(self.requests)
        os.close(self.results)
        if self.layer != "namespaces":
            shutil.rmtree(self.work, ignore_errors=True)

    def greet(self):
        """Wait until the child serves, and see with harmless attacks that the walls stand; LayerError if not."""
        hello = json.loads(self.child.stdout.readline() or '{"error": "the child program did not start"}')
        if "error" in hello:
            raise LayerError(hello["error"])
        if self.layer != "rlimits":
            try:
                (value,), _ = self.run(PROBE.format(path=PROGRAM), ["probe()"], 10)
            except RuntimeError as error:
                raise LayerError(str(error)) from None
            if value != ["ok", 0]:
                raise LayerError(f"its walls do not stand ({value[1]})")

    def run(self, code, calls, time_limit_s, imports=None, reference=None):
        """Results of the calls, ["ok", value] or ["error", reason] each, and what a reference (imports=None) imported.
        A call that takes too long or ends its process costs its own result: a new process goes on with the next."""
        values, imported = [], None
        while len(values) < len(calls):
            request = {"code": code, "calls": calls[len(values):], "imports": imports, "compat": reference is not None,
                       "reference": reference}
            more, found, loaded, reason = self.run_process(request, time_limit_s)
            values += more
            imported = imported or found
            if len(values) < len(calls) and reason != "restart":
                # Code that does not even load would not load again; the published evaluation does not go on at all.
                goes_on = loaded and reference is None
                values += [["error", reason]] * (1 if goes_on else len(calls) - len(values))
        return values, imported

    def run_process(self, request, time_limit_s):
        """One process: (results so far, imports, whether the code had loaded, why it ended)."""
        data = json.dumps(request).encode()
        num_calls = len(request["calls"])
        try:
            self.child.stdin.write(HEADER.pack(len(data), int(num_calls * time_limit_s) + LOAD_LIMIT_S + 2))
            while data:
                if not select.select([], [self.requests], [], START_LIMIT_S)[1]:
                    raise OSError("it reads no request")
                data = data[os.write(self.requests, data):]
        except OSError as error:
            raise RuntimeError(f"the scorer's child program is gone: {error}") from None
        values, imports, ready, loaded, reason, buffer = [], None, False, False, "", bytearray()
        deadline, ended = time.monotonic() + START_LIMIT_S, False
        while not reason and len(values) < num_calls:
            channels = [self.results] if ended else [self.results, self.child.stdout]
            readable, _, _ = select.select(channels, [], [], 0 if ended else max(0, deadline - time.monotonic()))
            if self.results in readable:
                buffer += os.read(self.results, 1 << 16)
            elif readable:
                self.await_end()
                ended = True                                        # what it wrote before its end is still to be read
            else:
                reason = "process ended" if ended else "time limit"
            *lines, rest = buffer.split(b"\n")
            buffer = rest
            if len(buffer) > RESULT_LIMIT:
                reason = "a result that is too large"
            for line in lines:
                try:
                    message = json.loads(line)
                except (ValueError, RecursionError):
                    message = None
                if message == "ready" and not ready:
                    ready = True
                    deadline = time.monotonic() + time_limit_s + LOAD_LIMIT_S
                elif message == "loaded" and ready and not loaded:
                    loaded = True
                    deadline = time.monotonic() + time_limit_s
                elif loaded and not values and imports is None and request["imports"] is None and is_imports(message):
                    imports = message
                elif message == "restart" and values:
                    reason = "restart"
                elif ready and isinstance(message, list) and len(message) == 2 and message[0] in ("ok", "error"):
                    values.append(message)
                    deadline = time.monotonic() + time_limit_s
                else:
                    reason = "a broken result"
                if reason or len(values) == num_calls:
                    break
        if not ready:
            raise RuntimeError("the scorer's child program could not run anything (" + (reason or "no answer") + ")")
        if not ended:
            with contextlib.suppress(OSError):
                self.child.stdin.write(HEADER.pack(0, 0))
            self.await_end()
        with contextlib.suppress(BlockingIOError):
            while os.read(self.results, 1 << 16):                   # what came too late
                pass
        return values, imports, loaded, reason

    def await_end(self):
        if not self.child.stdout.readline():
            raise RuntimeError(f"the scorer's child program ended with status {self.child.wait()}")


def is_imports(message):
    return isinstance(message, list) and all(isinstance(item, list) and len(item) == 3 for item in message)


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
    """Execute the code afresh for each call and send ["ok", value] or ["error", reason]; "loaded" when the code has run
    for the first time, "restart" before an early end (threads left running would disturb the next call). A reference
    also sends which imported names its calls use, for the calls of the answers."""
    sources = extract_code(request["code"])
    imports, codes = request["imports"], None
    for index, call in enumerate(request["calls"]):
        try:
            codes = codes or [compiled(source) for source in sources]
            module = sys.modules["answer"] = types.ModuleType("answer")
            for code in codes:
                exec(code, module.__dict__)
            if index == 0:
                send("loaded")
                if imports is None:
                    send(imported_names(request["calls"], module.__dict__))
            # what the reference imported under a name is what the call means by it, however the answer imported
            names = {name: getattr(importlib.import_module(where), what) if what else importlib.import_module(where)
                     for name, where, what in imports or ()}
            result = ["ok", encode(eval(call.strip(), {**module.__dict__, **names} if names else module.__dict__))]
        except ModuleNotFoundError as error:
            result = ["error", f"no module named {str(error.name)[:100]}"]
        except BaseException as error:
            result = ["error", f"{type(error).__name__}: {describe(error)}"]
        send(result)
        if len(sys._current_frames()) > 1 and index + 1 < len(request["calls"]):
            send("restart")
            return


def describe(error):
    try:
        return str(error)[:200]
    except BaseException:
        return ""


def imported_names(calls, namespace):
    """[[name, module, attribute or None], …]: names in the calls that the code imported."""
    found = {}
    for call in calls:
        for name in compile(call.strip(), "<call>", "eval").co_names:
            value = namespace.get(name)
            where, what = getattr(value, "__module__", None), getattr(value, "__name__", None)
            if isinstance(value, types.ModuleType):
                found[name] = [name, what, None]
            elif where in sys.modules and where != "answer" and getattr(sys.modules[where], str(what), None) is value:
                found[name] = [name, where, what]
    return list(found.values())


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
    send("loaded")
    for call in request["calls"]:
        try:
            signal.alarm(1)
            if any(word in answer for word in BLACKLIST):
                raise ValueError("blacklist")
            scopes = scopes or [local_scope(source) for source in (request["reference"], answer)]
            expected, value = (eval(call.strip(), *scope) for scope in scopes)
            result = ["ok", bool(expected is not None and expected == value)]
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
# Allowed, or not, by their arguments: name, numbers, allowed when all equal?, (argument, mask, value) …
CONDITIONAL = (("clone", 56, 220, True, (0, 0x10000, 0x10000)),         # threads alone
               ("ioctl", 16, 29, True, (1, 0xFFFFFF00, 0x5400)),        # terminal and descriptor flags
               ("fcntl", 72, 25, False, (1, 0xFFFFFFF8, 8)),            # no signals by descriptors
               ("prctl", 157, 167, True, (0, 0xFFFFFFFF, 15)),          # a thread's name
               ("prlimit64", 302, 261, True, (0, 0xFFFFFFFF, 0)),       # of this process
               ("socketpair", 53, 199, True, (0, 0xFFFFFFFF, 1), (1, 0xF, 1)),      # for event loops; streams reach
               ("openat", 257, 56, False, (2, 0x203, 0x200)),           # nobody else. Early Landlock lets
               ("open", 2, None, False, (1, 0x203, 0x200)))             # O_RDONLY | O_TRUNC pass
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
    for _, x86, arm, when_equal, *tests in CONDITIONAL:
        if (number := (x86, arm)[column]) is not None:
            program.append((jump, 0, 3 * len(tests) + 2, number))
            for left, (argument, mask, value) in zip(range(len(tests) - 1, -1, -1), tests):
                program += [(load, 0, 0, 16 + 8 * argument), (and_, 0, 0, mask), (jump, 0, 3 * left + 1, value)]
            program += [(give, 0, 0, allow if when_equal else deny), (give, 0, 0, deny if when_equal else allow)]
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


def landlock_rules(paths, work):
    """A descriptor of Landlock rules: `paths` to read, `work` to write. OSError where the kernel has no Landlock."""
    version = check(libc.syscall(444, None, 0, 1), "Landlock")
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
    data = b""
    while len(data) < size and (more := os.read(descriptor, size - len(data))):
        data += more
    return data


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
    """Kill what the request left running, forget its files."""
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
    if os.listdir(work):
        if layer == "namespaces":
            os.chdir("/")
            check(libc.umount2(work.encode(), 2), "umount")
            fresh_work_dir(work)
        else:
            for folder, folders, _ in os.walk(work):
                for name in folders:
                    if not os.path.islink(os.path.join(folder, name)):
                        os.chmod(os.path.join(folder, name), 0o700)
            for entry in os.scandir(work):
                shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)


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
    layer, requests, results, work, *site_packages = sys.argv[1:]
    low = [os.dup(int(descriptor)) for descriptor in (requests, results)]       # below 64, whatever the caller has open
    os.close(int(requests))
    os.close(int(results))
    requests, results = low
    rules = program = None
    try:
        if layer != "rlimits":
            libc.prctl(1, signal.SIGKILL, 0, 0, 0)
            paths = readable_paths(site_packages)
            program = system_call_filter()
            if layer == "namespaces":
                enter_namespaces(paths, work)
            else:
                rules = landlock_rules(paths, work)
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
    while header := read_exactly(0, HEADER.size):
        if HEADER.unpack(header)[0] == 0:
            continue                                            # an order to kill what had ended by itself
        child = os.fork()
        if child == 0:
            serve_one(layer, header, requests, results, rules, program)
        ended = False
        while not ended:
            ready = select.select([0, bell], [], [])[0]
            if bell in ready:
                os.read(bell, 4096)
                ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            else:
                ended = True                                    # an order to kill, or the caller has gone
                read_exactly(0, HEADER.size)
        remove_leftovers(layer, child, work)
        os.write(1, b'{"ended": true}\n')


if __name__ == "__main__":
    main()
