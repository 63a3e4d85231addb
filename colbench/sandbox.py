"""The scorer's child program, seen from the caller: untrusted code behind walls, and what its calls return.

    with Sandbox("namespaces", hash_seed=0) as sandbox:                                   (scorer.py does this)
        sandbox.greet()
        values, _ = sandbox.run("def f(n): return n / 2", ["f(4)", "f(None)"], 1.0, imports=[])
        # [["ok", 2], ["error", "TypeError: unsupported operand …"]]

It starts `python child.py LAYER WORK_DIR SITE_PACKAGES …`, the server, with a socket as its stdin and stdout. For each
request the server receives a HEADER and the ends of two fresh pipes, and forks; the fork is confined, reads the request
and writes a JSON line for each result. A HEADER without pipes kills the fork. Each line is read under one deadline and
one limit of bytes, and taken only if it has the form that is expected next. docs/scorer.md says what the layers
"namespaces", "landlock" and "rlimits" keep out, and what they do not.
"""
import contextlib
import json
import math
import os
import select
import socket
import sys
import time

from colbench import child
from colbench.child import CLEAN_LIMIT_S, empty, HEADER, LOAD_LIMIT_S, LOADS_LIMIT_S, RESULT_LIMIT, START_LIMIT_S
from colbench.values import is_encoded

REQUEST_LIMIT = 1 << 20         # characters of an answer's code and calls
PROGRAM = os.path.abspath(child.__file__)
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
    """One child program (child.py); a context manager. `run` evaluates calls on some code."""

    def __init__(self, layer, hash_seed):
        self.layer, self.hash_seed = layer, hash_seed

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
        imported and defined of the names in the calls (child.imported_names).
        A call that takes too long or ends its process costs its own result: a new process goes on with the next."""
        if sum(map(len, (code, reference or "", *calls))) > REQUEST_LIMIT:
            return [["error", f"larger than {REQUEST_LIMIT:,} characters"]] * len(calls), None
        values, imported, left_s = [], None, LOADS_LIMIT_S + len(calls) * time_limit_s
        clean_s = CLEAN_LIMIT_S                     # of the answer's time, to remove what its processes leave
        while len(values) < len(calls):
            request = {"code": code, "calls": calls[len(values):], "imports": imports, "compat": reference is not None,
                       "reference": reference}
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
        data, num_calls = json.dumps(request).encode(), len(request["calls"])
        values, imports, loaded, reason, began, ends = [], None, False, "", None, None
        try:
            with contextlib.ExitStack() as stack:
                pipes = [(end, mode) for pipe in (os.pipe(), os.pipe()) for end, mode in zip(pipe, ("rb", "wb"))]
                theirs, requests, results, theirs_too = (stack.enter_context(open(end, mode, buffering=0))
                                                         for end, mode in pipes)
                header = HEADER.pack(len(data), int(max(0, left_s)) + 2, int(1000 * max(0, clean_s)))
                socket.send_fds(self.control, [header], [theirs.fileno(), theirs_too.fileno()])
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
            ended = time.monotonic()
            self.control.send(HEADER.pack(0, 0, 0))                 # kill it, unless it has ended
        except OSError as error:
            raise RuntimeError(f"the scorer's child program is gone: {error}") from None
        self.reply()
        return values, imports, loaded, reason, ended - began, time.monotonic() - ended

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


# What a process may say, in this order: "ready", and for each call "loaded" (or "restart", after the first), once what
# a reference imported, and a result.

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
