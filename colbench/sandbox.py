"""The scorer's child program, seen from the caller: untrusted code behind walls, and what its calls return.

    with Sandbox("namespaces", hash_seed=0) as sandbox:                                   (scorer.py does this)
        sandbox.greet()
        values, _ = sandbox.run("def f(n): return n / 2", ["f(4)", "f(None)"], 1.0, imports=[])
        # [["ok", 2], ["error", "TypeError: unsupported operand …"]]

It starts `python sandbox_worker.py LAYER WORK_DIR SITE_PACKAGES …`, the server, with a socket as its stdin and stdout. For each
request the server receives a HEADER and the ends of two fresh pipes, and forks; the fork is confined, reads the request
and writes a JSON line for each result. A HEADER without pipes kills the fork. Each line is read under one deadline and
one limit of bytes, and taken only if it has the form that is expected next. docs/scorer.md says what the layers
"namespaces", "landlock" and "rlimits" keep out, and what they do not.
"""
import ast
import functools
import json
import marshal
import math
import os
import re
import select
import socket
import sys
import time

from colbench import sandbox_worker
from colbench.extract_code import names_of_calls, parse
from colbench.sandbox_worker import CLEAN_LIMIT_S, empty, HEADER, LOAD_LIMIT_S, LOADS_LIMIT_S, RESULT_LIMIT, START_LIMIT_S
from colbench.values import is_encoded

REQUEST_LIMIT = 1 << 20         # characters of an answer's code and calls
LOOK_S = .01                    # how often the caller looks at what a running answer has written
NUM_PIECES = 64                 # answers whose code is kept, so that equal ones are not read again
PROGRAM = os.path.abspath(sandbox_worker.__file__)
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


NAMED = ast.Name, ast.Attribute, ast.Call, ast.Subscript
HEXADECIMAL = re.compile("([0-9a-f]{2})*")


class LayerError(Exception):
    """A layer of isolation does not work on this machine."""


class Sandbox:
    """One child program (sandbox_worker.py); a context manager. `run` evaluates calls on some code."""

    def __init__(self, layer, hash_seed):
        self.layer, self.hash_seed = layer, hash_seed
        self.pieces = {}                            # {key_of_pieces: compiled code of an answer}

    def __enter__(self):
        import subprocess  # here, so that the server's forks do not carry them
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
            if empty(self.folder, CLEAN_LIMIT_S):
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
        """Results of the calls, ["ok", value] or ["error", reason] each, and of a reference (imports=None) what it
        imported and defined of the names in the calls (sandbox_worker.imported_names).
        A call that takes too long or ends its process costs its own result: a new process goes on with the next."""
        if sum(map(len, (code, reference or "", *calls))) > REQUEST_LIMIT:
            return [["error", f"larger than {REQUEST_LIMIT:,} characters"]] * len(calls), None
        values, imported, left_s = [], None, LOADS_LIMIT_S + len(calls) * time_limit_s
        clean_s = CLEAN_LIMIT_S                     # of the answer's time, to remove what its processes leave
        while len(values) < len(calls):
            more_calls = calls[len(values):]
            request = {"code": code, "calls": more_calls, "imports": imports, "compat": reference is not None,
                       "reference": reference}
            if reference is None:
                request["tested"], request["codes"] = prepared(tuple(more_calls))
                request["pieces"] = self.pieces.get(key_of_pieces(request))
            more, found, loaded, reason, ran_s, cleaned_s = self.run_process(request, time_limit_s, left_s, clean_s)
            left_s -= ran_s + cleaned_s
            clean_s -= cleaned_s
            values += more
            imported = imported or found
            if len(values) < len(calls) and reason != "restart":
                # Code that does not even load would not load again; the published evaluation does not go on at all.
                goes_on = loaded and reference is None and reason != ANSWER_TIME_LIMIT
                values += [["error", reason]] * (1 if goes_on else len(calls) - len(values))
        return values, imported

    def run_process(self, request, time_limit_s, left_s, clean_s):
        """One process: (results so far, imports, whether the code had loaded, why it ended, seconds it took of the
        left_s, seconds that removing its files took of the clean_s). RuntimeError if the server cannot be used; nothing
        that the code does is one."""
        data, num_calls = marshal.dumps(request), len(request["calls"])
        values, imports, loaded, reason, began, ends = [], None, False, "", None, None
        try:
            header = HEADER.pack(len(data), int(max(0, left_s)) + 2, int(1000 * max(0, clean_s)))
            with Pipes() as pipes:
                socket.send_fds(self.control, [header], pipes.theirs)
                pipes.close_theirs()
                write_request(pipes.requests, data, time.monotonic() + START_LIMIT_S)
                lines = Lines(pipes.results, self.control.fileno())
                try:
                    lines.expect(is_ready, time.monotonic() + START_LIMIT_S)
                    began = time.monotonic()
                    ends = began + left_s
                    load_ends = min(ends, began + time_limit_s + LOAD_LIMIT_S)
                    if not request["compat"] and request["pieces"] is None:
                        self.remember(request, lines.expect(is_pieces, load_ends))
                    while len(values) < num_calls:
                        message = lines.expect(is_restart if values else is_loaded, load_ends)
                        if message == "restart":
                            raise Stop("restart")
                        deadline, loaded = min(ends, time.monotonic() + time_limit_s), True
                        if request["imports"] is None and not values and not request["compat"]:
                            imports = lines.expect(is_imports, deadline)
                        values.append(lines.expect(is_result, deadline))
                        load_ends = min(ends, time.monotonic() + time_limit_s + LOAD_LIMIT_S)
                except Stop as stop:
                    over = str(stop) == "time limit" and ends and time.monotonic() >= ends
                    reason = ANSWER_TIME_LIMIT if over else str(stop)
            if not began:
                raise RuntimeError(f"the scorer's child program could not run anything ({reason})")
            ended = time.monotonic()
            if not lines.has_ended:
                self.control.send(HEADER.pack(0, 0, 0))             # kill it
        except OSError as error:
            raise RuntimeError(f"the scorer's child program is gone: {error}") from None
        self.reply()
        return values, imports, loaded, reason, ended - began, time.monotonic() - ended

    def remember(self, request, pieces):
        """Keep the compiled code of an answer, for the next process with the same text; None: it cannot be kept. It was
        sent before any of it ran, and it is not read here."""
        if len(self.pieces) == NUM_PIECES:
            self.pieces.clear()
        if pieces is not None:
            self.pieces[key_of_pieces(request)] = bytes.fromhex(pieces)

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


class Pipes:
    """A pipe for a request and one for results; a context manager that closes them."""

    def __enter__(self):
        request, self.requests = os.pipe()
        try:
            self.results, result = os.pipe()
        except OSError:
            os.close(request)
            os.close(self.requests)
            raise
        self.theirs = [request, result]
        return self

    def close_theirs(self):
        while self.theirs:
            os.close(self.theirs.pop())

    def __exit__(self, *exception):
        self.close_theirs()
        os.close(self.requests)
        os.close(self.results)


class Stop(Exception):
    """Why the results of a process end early."""


class Lines:
    """Messages, a JSON line each, from a descriptor that untrusted code may write to.

    They are read when the server says, on the descriptor `server`, that the process has ended, and every LOOK_S until
    then: so an answer that writes 20 lines in 2 ms wakes the caller once. The rest of a line is read as it comes."""

    def __init__(self, descriptor, server):
        self.descriptor, self.buffer = descriptor, bytearray()
        self.has_ended = False                      # does the server say so?
        self.end, self.end_or_more = select.poll(), select.poll()
        self.end.register(server, select.POLLIN)
        self.end_or_more.register(server, select.POLLIN)
        self.end_or_more.register(descriptor, select.POLLIN)
        os.set_blocking(descriptor, False)

    def expect(self, valid, deadline):
        """The next message; Stop if it is not valid(message), is too long, or comes after the deadline. What is read in
        between, a byte at a time perhaps, moves neither the deadline nor the limit."""
        searched = 0
        while (end := self.buffer.find(b"\n", searched)) < 0:
            searched = len(self.buffer)
            if searched > RESULT_LIMIT:
                raise Stop("a result that is too large")
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise Stop("time limit")
            if not self.read():
                self.wait(left_s)
        line = self.buffer[:end]
        del self.buffer[:end + 1]
        try:
            message = json.loads(line.decode())
        except (ValueError, RecursionError):
            raise Stop("a broken result") from None
        if not valid(message):
            raise Stop("a broken result")
        return message

    def read(self):
        """Read what has been written, if anything; Stop where nothing more can come."""
        try:
            more = os.read(self.descriptor, 1 << 16)
        except BlockingIOError:
            if self.has_ended:
                raise Stop("process ended") from None
            return False
        if not more:
            raise Stop("process ended")
        self.buffer += more
        return True

    def wait(self, left_s):
        """Wait until the process has ended, or it is time to look, or more of a line has come whose beginning is here.
        """
        if self.buffer:
            ready = self.end_or_more.poll(math.ceil(left_s * 1000))
            self.has_ended = any(descriptor != self.descriptor for descriptor, _ in ready)
        else:
            self.has_ended = bool(self.end.poll(math.ceil(min(left_s, LOOK_S) * 1000)))


def write_request(descriptor, data, deadline):
    os.set_blocking(descriptor, False)
    poll, data = select.poll(), memoryview(data)
    poll.register(descriptor, select.POLLOUT)
    while data:
        if not poll.poll(max(0, int(1000 * (deadline - time.monotonic())))):
            raise OSError("it reads no request")
        data = data[os.write(descriptor, data):]


@functools.lru_cache(64)
def prepared(calls):
    """(The names that calls use, the calls as code objects): they are compiled once, and not in every process. A call
    that is not Python stays a text, and fails there; so does one of which Python could warn, here and on the terminal.
    """
    codes = []
    for call in calls:
        code = call.strip()
        try:
            if not any(map(is_unusual, ast.walk(parse(code, "eval")))):
                code = compile(code, "<string>", "eval", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            pass
        codes.append(code)
    return tuple(sorted(names_of_calls(calls))), codes


def is_unusual(node):
    """Could Python's compiler warn of a part of an expression: of `f(1) is 1`, `"a"(1)`, `[1]["a"]`?"""
    if isinstance(node, ast.Call):
        return not isinstance(node.func, NAMED)
    if isinstance(node, ast.Subscript):
        return not isinstance(node.value, NAMED)
    return isinstance(node, (ast.Is, ast.IsNot))


def key_of_pieces(request):
    """What the compiled code of an answer depends on."""
    return request["code"], request["tested"], request["imports"] is None


# What a process may say, in this order: "ready", the code of the answer if it was not told, and for each call "loaded"
# (or "restart", after the first), once what a reference imported, and a result.

def is_pieces(message):
    return message is None or type(message) is str and HEXADECIMAL.fullmatch(message) is not None


def is_ready(message):
    return message == "ready"


def is_loaded(message):
    return message == "loaded"


def is_restart(message):
    return message in ("loaded", "restart")


def is_imports(message):
    return type(message) is list and all(map(is_import, message))


def is_import(item):
    return (type(item) is list and len(item) == 3 and type(item[0]) is str and
            type(item[1]) in (str, type(None)) and type(item[2]) in (str, type(None)))


def is_result(message):
    return type(message) is list and len(message) == 2 and (
        message[0] == "ok" and is_encoded(message[1]) or message[0] == "error" and type(message[1]) is str)
