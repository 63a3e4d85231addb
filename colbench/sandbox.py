"""The caller's side of the scorer's child program: runs untrusted code in isolation and returns results of calls.

    with Sandbox("namespaces", hash_seed=0) as sandbox:                                   (scorer.py does this)
        sandbox.greet()
        values, _ = sandbox.run("def f(n): return n / 2", ["f(4)", "f(None)"], 1.0, imports=[])
        # [["ok", 2], ["error", "TypeError: unsupported operand …"]]

It starts `python sandbox_worker.py LAYER WORK_DIR SITE_PACKAGES …`, the server, with a socket as its stdin and stdout.
For each request the server receives a HEADER and the ends of two new pipes, and forks. The fork is confined, reads the
request and writes a JSON line for each result. A HEADER without pipes kills the fork. Each line has a deadline and a
limit of bytes, and is refused unless it has the form that comes next. docs/scorer.md says what the layers "namespaces",
"landlock" and "rlimits" keep out, and what they do not.
"""
import contextlib
import functools
import json
import marshal
import math
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections import namedtuple

from colbench import sandbox_worker
from colbench.extract_code import names_of_calls, NO_PYTHON
from colbench.sandbox_worker import empty, HEADER, LOAD_LIMIT_S, LOADS_LIMIT_S, RESULT_LIMIT, START_LIMIT_S
from colbench.values import is_encoded

REQUEST_LIMIT = 1 << 20         # characters of an answer's code and calls
END_LIMIT_S = 10                # to remove the files that answers left
LOOK_S = .01                    # seconds between two looks at the output of a running answer
PROGRAM = os.path.abspath(sandbox_worker.__file__)
# A file that no answer can read. An installed colbench is readable, like all packages.
HIDDEN = "/etc/passwd" if "-packages/colbench/" in PROGRAM else PROGRAM
TIME_LIMIT, ANSWER_TIME_LIMIT = "time limit", "time limit of the whole answer"
CLOCK = 10                      # seconds of the clock that an answer may take for each second of processor time
TIME_SIGNALS = signal.SIGPROF, signal.SIGXCPU
Run = namedtuple("Run", "values imports has_loaded reason seconds")
PROBE = """import errno, mmap, os, socket, wave
def refusal(attack, *arguments):
    try:
        attack(*arguments)
    except (MemoryError, OSError) as error:
        return getattr(error, "errno", errno.ENOMEM)
def change_mode():
    os.chmod("locked", 0o700)
    if os.stat("locked").st_mode & 0o777 == 0:
        raise OSError(errno.ENOSYS, "no effect")
def probe():
    os.mkdir("locked", 0)
    attacks = [("files", open, {hidden!r}), ("files", open, "/etc/passwd"), ("files", open, {path!r}, "a"),
               ("capabilities", os.listdir, "locked"), ("memory", mmap.mmap, -1, 2 << 30)]
    calls = [("sockets", socket.socket), ("chmod", change_mode), ("kill", os.kill, 1, 0),
             ("execve", os.execv, "/nowhere", ["nowhere"]), ("clone", lambda: os.fork() or os._exit(0))]
    open_to = [what for what, *attack in attacks if refusal(*attack) is None]
    return ", ".join(open_to + [what for what, *call in calls if refusal(*call) != errno.ENOSYS])"""
IMPORT_TYPES = [str, str, str], [str, str, type(None)], [str, type(None), type(None)]


# Python's compiler would print warnings about calls such as `f(1) is 1`
warnings.filterwarnings("ignore", category=SyntaxWarning, module="<call>")


class LayerError(Exception):
    """A layer of isolation does not work on this machine."""


class Sandbox:
    """One child program (sandbox_worker.py); a context manager. `run` evaluates calls on some code."""

    def __init__(self, layer, hash_seed):
        self.layer, self.hash_seed = layer, hash_seed

    def __enter__(self):
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
        self.control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(10)
        self.child.kill()                           # does nothing if it has ended
        self.child.wait()
        if self.folder and empty(self.folder, END_LIMIT_S):
            os.rmdir(self.folder)
        elif self.folder:
            print(f"scorer: files of answers cannot be removed: {self.folder}", file=sys.stderr)

    def greet(self):
        """Wait until the child serves, and test its isolation with harmless attacks. Raises LayerError if it fails."""
        try:
            hello = json.loads(self.reply())
            if "error" in hello:
                raise LayerError(hello["error"])
            if self.layer != "rlimits":
                values, _ = self.run(PROBE.format(path=PROGRAM, hidden=HIDDEN), ["probe()"] * 2, 10, renewed=1)
                for value in values:
                    if value != ["ok", ""]:
                        raise LayerError(f"its walls do not stand ({value[1]})")
        except RuntimeError as error:
            raise LayerError(str(error)) from None

    def run(self, code, calls, time_limit_s, imports=None, **more):
        """Returns (results, imported names). Each result is ["ok", value] or ["error", reason]. The names are those of
        sandbox_worker.imported_names if the code is a solution (imports=None), otherwise None.
        If a call takes too long or ends its process, only its own result is lost: a new process goes on with the next.

        renewed: number of calls that run in a first process; the others run in a second one.
        given: for each call {name: encoded value}, further names that it may read.
        reference: the solution, for sandbox_worker.run_compat."""
        reference, given, renewed = more.get("reference"), more.get("given"), more.get("renewed", 0)
        if sum(map(len, (code, reference or "", *calls[renewed:]))) > REQUEST_LIMIT:
            return [["error", f"larger than {REQUEST_LIMIT:,} characters"]] * len(calls), None
        values, imported, left_s = [], None, LOADS_LIMIT_S + len(calls) * time_limit_s
        while len(values) < len(calls):
            if left_s <= 0:
                return values + [["error", ANSWER_TIME_LIMIT]] * (len(calls) - len(values)), imported
            request = {"code": code, "calls": calls[len(values):], "imports": imports, "reference": reference,
                       "given": given and given[len(values):],
                       "renewed": max(0, renewed - len(values)),
                       "limits": (time_limit_s + LOAD_LIMIT_S, time_limit_s)}
            if reference is None:
                names, codes = zip(*map(prepared, request["calls"]))
                request["calls"] = list(codes)
                request["tested"] = sorted(set().union(*names))
            run = self.run_process(request, left_s)
            left_s -= run.seconds
            values += run.values
            imported = imported or run.imports
            if len(values) < len(calls) and run.reason != "restart":
                # Code that does not load would not load again; the published evaluation never goes on.
                goes_on = run.has_loaded and reference is None
                values += [["error", run.reason]] * (1 if goes_on else len(calls) - len(values))
        return values, imported

    def run_process(self, request, left_s):
        """The Run of one process: its results, what it imported, whether the code had loaded, why it ended, and how
        many of the left_s seconds it took. Raises RuntimeError if the server cannot be used; the code cannot cause
        that."""
        data = marshal.dumps(request)
        try:
            with pipe() as (their_requests, requests), pipe() as (results, their_results):
                socket.send_fds(self.control, [HEADER.pack(len(data), math.ceil(left_s))],
                                [their_requests.fileno(), their_results.fileno()])
                their_requests.close()
                their_results.close()
                requests.write(data)
                requests.flush()
                lines = Lines(results.fileno(), self.control.fileno())
                lines.expect(is_word("ready"), time.monotonic() + START_LIMIT_S)
                began = time.monotonic()
                run = read_results(lines, request, began + CLOCK * left_s)
            if not lines.has_ended:
                self.control.send(HEADER.pack(0, 0))                            # kill it
        except (OSError, Stop) as error:
            raise RuntimeError(f"the scorer's child program cannot run anything: {error}") from None
        last_signal, processor_s = json.loads(self.reply())["end"]
        if run.reason == TIME_LIMIT:                                # by the clock: it slept, which counts
            return run._replace(seconds=time.monotonic() - began)
        is_late = run.reason == "process ended" and last_signal in TIME_SIGNALS
        return run._replace(reason=TIME_LIMIT if is_late else run.reason,
                            seconds=max(processor_s, (time.monotonic() - began) / CLOCK))

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


@contextlib.contextmanager
def pipe():
    """The two ends of a pipe, as files that are closed after the block."""
    reading, writing = os.pipe()
    with open(reading, "rb") as reading_file, open(writing, "wb") as writing_file:
        yield reading_file, writing_file


def read_results(lines, request, ends):
    """The Run of a process that is ready, until the time `ends`."""
    values, imports, has_loaded, reason = [], None, False, ""
    load_s, call_s = request["limits"]
    try:
        while len(values) < len(request["calls"]):
            load_ends = min(ends, time.monotonic() + CLOCK * load_s)
            if lines.expect(is_word("loaded", "restart") if values else is_word("loaded"), load_ends) == "restart":
                raise Stop("restart")
            deadline, has_loaded = min(ends, time.monotonic() + CLOCK * call_s), True
            if not values and request["imports"] is None and request["reference"] is None:
                imports = lines.expect(are_imports, deadline)
            values.append(lines.expect(is_result, deadline))
    except Stop as stop:
        reason = str(stop)
    return Run(values, imports, has_loaded, reason, 0)


class Stop(Exception):
    """The reason why the results of a process end early."""


class Lines:
    """Messages, one JSON line each, from a descriptor that untrusted code may write to.

    They are read every LOOK_S, and when the server says on the descriptor `server` that the process has ended: an
    answer that writes 20 lines in 2 ms wakes the caller once. Once a line has begun, its rest is read as it comes."""

    def __init__(self, descriptor, server):
        self.descriptor, self.server, self.buffer = descriptor, server, bytearray()
        self.has_ended = False                      # whether the server has said so
        os.set_blocking(descriptor, False)

    def expect(self, valid, deadline):
        """The next message. Raises Stop if it is not valid(message), too long, or later than the deadline, which parts
        of a line do not extend."""
        while b"\n" not in self.buffer:
            if len(self.buffer) > RESULT_LIMIT:
                raise Stop("a result that is too large")
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise Stop(TIME_LIMIT)
            try:
                more = os.read(self.descriptor, 1 << 16)
            except BlockingIOError:                                 # nothing has been written
                if self.has_ended:
                    raise Stop("process ended") from None
                self.wait(left_s)
                continue
            if not more:
                raise Stop("process ended")
            self.buffer += more
        line, _, self.buffer = self.buffer.partition(b"\n")
        with contextlib.suppress(ValueError, RecursionError):
            message = json.loads(line.decode())
            if valid(message):
                return message
        raise Stop("a broken result")

    def wait(self, left_s):
        """Wait until the process has ended, the time LOOK_S is over, or more of a begun line has come."""
        waited = select.poll()
        waited.register(self.server, select.POLLIN)
        if self.buffer:
            waited.register(self.descriptor, select.POLLIN)
        else:
            left_s = min(left_s, LOOK_S)
        self.has_ended = self.server in [descriptor for descriptor, _ in waited.poll(math.ceil(left_s * 1000))]


@functools.lru_cache(1 << 14)
def prepared(call):
    """(The names that a call uses, the call as a code object). It is compiled here once, not in every process. A call
    that is not Python stays a text, and fails there."""
    code = call.strip()
    with contextlib.suppress(*NO_PYTHON):
        code = compile(code, "<call>", "eval", dont_inherit=True)
    return names_of_calls([call]), code


# The messages of a process, in this order: "ready"; for each call "loaded" (after the first one also "restart") and a
# result; between the first two of these, what a solution imported.

def is_word(*words):
    return lambda message: message in words


def are_imports(message):
    return type(message) is list and all(
        type(item) is list and [type(part) for part in item] in IMPORT_TYPES for item in message)


def is_result(message):
    return type(message) is list and len(message) == 2 and (
        message[0] == "ok" and is_encoded(message[1]) or message[0] == "error" and type(message[1]) is str)
