"""The scorer's child program: runs untrusted code and says what its calls return. Standard library alone.

Reads requests {"code", "calls", "time_limit_s"} from stdin, one JSON object a line, and answers each with one line: a
list with ["ok", value] or ["error", reason] for each call. A value is encoded with its type: builtin values, nested.

Every request runs in a forked process of its own, with limits on memory, processor time, files and processes, and the
code is executed afresh for each call. A call that outlasts the time limit, or ends the process, costs its own test
alone: a new process goes on with the next call. The candidate's process never sees the reference or its results.

This is not yet a fortress: it stops faults and accidents, not an attacker who means to read the user's files.
"""
import json
import os
import resource
import select
import signal
import sys
import time

MEMORY_LIMIT = 1 << 30          # bytes of address space
OUTPUT_LIMIT = 1 << 20          # bytes of one encoded result
MAX_DEPTH = 50


def encode(value, depth=0):
    """JSON data that is equal for equal values of equal type structure; TypeError for other types."""
    kind = type(value)
    if depth > MAX_DEPTH:
        raise TypeError("nested too deep")
    if value is None or kind in (str,):
        return value
    if kind in (bool, int):
        return ["number", str(int(value))]                                  # 1 == True, as in Python
    if kind is float:
        return ["number", str(int(value)) if value == value and abs(value) != float("inf") and value == int(value)
                else repr(value)]                                           # 1.0 == 1
    if kind in (list, tuple):
        return [kind.__name__, [encode(item, depth + 1) for item in value]]
    if kind in (set, frozenset):
        return ["set", sorted((encode(item, depth + 1) for item in value), key=json.dumps)]
    if kind is dict:
        pairs = ([encode(k, depth + 1), encode(v, depth + 1)] for k, v in value.items())
        return ["dict", sorted(pairs, key=json.dumps)]
    if kind is bytes:
        return ["bytes", value.hex()]
    if kind is complex:
        return ["complex", repr(value)]
    raise TypeError(f"a value of type {kind.__name__} cannot be compared")


def limit_resources(num_calls, time_limit_s):
    seconds = int(num_calls * time_limit_s) + 2
    for what, limit in ((resource.RLIMIT_AS, MEMORY_LIMIT), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_CORE, 0),
                        (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NOFILE, 16)):
        resource.setrlimit(what, (limit, limit))


def run_calls(code, calls, out):
    """In the forked process: execute the code and one call at a time, and write each result to the pipe."""
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    for call in calls:
        try:
            namespace = {"__name__": "answer"}
            exec(compile(code, "<answer>", "exec"), namespace)
            result = ["ok", encode(eval(call, namespace))]
        except BaseException as error:
            result = ["error", type(error).__name__]
        line = json.dumps(result).encode() + b"\n"
        os.write(out, line if len(line) <= OUTPUT_LIMIT else b'["error", "output too large"]\n')


def run_request(code, calls, time_limit_s):
    """The results of all calls; a process that dies or stalls is replaced, and its call is an error."""
    results = []
    while len(results) < len(calls):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                os.close(reader)
                limit_resources(len(calls), time_limit_s)
                run_calls(code, calls[len(results):], writer)
            finally:
                os._exit(0)
        os.close(writer)
        reason = follow(reader, results, len(calls), time_limit_s)
        try:
            os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)
        if len(results) < len(calls):
            results.append(["error", reason])
    return results


def follow(reader, results, num_calls, time_limit_s):
    """Read results as they come, until all are there, the process is gone, or one call takes too long."""
    buffer = b""
    deadline = time.monotonic() + time_limit_s
    while len(results) < num_calls:
        ready, _, _ = select.select([reader], [], [], max(0, deadline - time.monotonic()))
        if not ready:
            return "time limit"
        data = os.read(reader, 1 << 16)
        if not data:
            return "process ended"
        buffer += data
        while b"\n" in buffer:
            line, buffer = buffer.split(b"\n", 1)
            try:
                result = json.loads(line)
            except ValueError:
                return "broken result"
            results.append(result)
            deadline = time.monotonic() + time_limit_s
    return ""


def main():
    for line in sys.stdin:
        request = json.loads(line)
        results = run_request(request["code"], request["calls"], request["time_limit_s"])
        sys.stdout.write(json.dumps(results[:len(request["calls"])]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
