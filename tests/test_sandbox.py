"""Hostile answers, in every layer that isolates: each tries to do harm in its second test and returns "loot" if it did.

Nothing of theirs may be left (files, processes, connections, a changed or read input), and their first and third test,
which behave, must be graded as usual. A layer that this machine does not allow is skipped, not weakened."""
import contextlib
import ctypes
import decimal
import errno
import functools
import json
import logging
import os
import pathlib
import random
import re
import select
import shutil
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import tempfile
import termios
import textwrap
import threading
import time
import types
from collections import Counter, OrderedDict
from unittest import mock

import pytest

from colbench import InputError, sandbox, sandbox_worker
from colbench.questions import holds
from colbench.sandbox import ANSWER_TIME_LIMIT, is_result, is_word, LayerError, Lines, Sandbox, Stop
from colbench.sandbox_worker import CONDITIONAL, empty, end_all, MACHINES, RESULT_LIMIT, THREAD_LIMIT
from colbench.scorer import fault_of, Scorer
from colbench.values import encode, equal_values, is_encoded, readable

SECRET = "the-secret-" + "of-the-parent"                           # in the parent's memory, environment and a file
LAYERS = "namespaces", "landlock"
REFUSED_AT_ONCE = "reads", "writes", "opens", "network", "processes"      # groups of attacks that stand in one answer
HARMLESS = object()                                                 # the attack's own test may give anything but loot
MADE = object()                                                     # and with Landlock, which lets it, "harmless"


def listed(text):
    """What stands behind each "- " in a section of attacks.txt."""
    return [item.replace("\n  ", "\n") for item in f"\n{text}".split("\n- ")[1:]]


TEXTS = pathlib.Path(__file__).with_name("attacks.txt").read_text().split("\n=== ")[1:]
SECTIONS = dict(text.strip().partition("\n")[::2] for text in TEXTS)                              # {title: text}
HOSTILE, DAMAGING = SECTIONS.pop("the answer"), SECTIONS.pop("the answer that does damage")
DAMAGE = [item.split("\n", 1) for item in listed(SECTIONS.pop("damage, behind where it would show"))]
ATTACKS, BATCHES = [], {}                       # (body, what its own test must give); {name: those of one answer}
for title, text in SECTIONS.items():
    group, _, expected = title.partition(": ")
    for body in listed(text):
        name = group if group in REFUSED_AT_ONCE else f"{group}-{len(ATTACKS)}-{body[:40]}"
        ATTACKS.append((body, eval(expected)))
        BATCHES.setdefault(name, []).append(ATTACKS[-1])
assert len(ATTACKS) == 154


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A parent with something to lose: files, a secret, open ports, a neighbour process."""
    folder = tmp_path_factory.mktemp("world")
    folder.chmod(0o777)
    (folder / "secret").write_text(SECRET)
    with contextlib.closing(sqlite3.connect(folder / "secret.db")) as database:
        database.execute(f"create table secrets as select '{SECRET}'")
    (folder / "input").write_text("precious")
    (folder / "input").chmod(0o666)
    os.environ["CANARY"] = SECRET
    in_memory = ctypes.create_string_buffer(SECRET.encode())
    listeners = [socket.create_server(("127.0.0.1", 0))]
    port = listeners[0].getsockname()[1]
    for family, kind, address in (
            (socket.AF_UNIX, socket.SOCK_STREAM, f"{folder}/unix"),
            (socket.AF_UNIX, socket.SOCK_STREAM, f"\0canary-{os.getpid()}"),
            (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", port)),
            (socket.AF_UNIX, socket.SOCK_DGRAM, f"{folder}/datagram")):
        listeners.append(socket.socket(family, kind))
        listeners[-1].bind(address)
        if kind == socket.SOCK_STREAM:
            listeners[-1].listen()
    _, slave = os.openpty()
    attributes = termios.tcgetattr(slave)
    victim = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    yield {"TERMINAL": os.ttyname(slave), "WORLD": str(folder), "SECRET_FILE": f"{folder}/secret",
           "INPUT": f"{folder}/input", "PORT": port, "PARENT": os.getpid(), "VICTIM": victim.pid,
           "ADDRESS": ctypes.addressof(in_memory), "listeners": listeners,
           "SANDBOX": str(pathlib.Path(sandbox.__file__).with_name("sandbox_worker.py"))}
    assert termios.tcgetattr(slave) == attributes and victim.poll() is None
    victim.kill()
    victim.wait()
    del os.environ["CANARY"]


def received(world):
    """How many connections and messages have come to the open ports."""
    ready, _, _ = select.select(world["listeners"], [], [], 0)
    for listener in ready:
        listener.recv(1) if listener.type == socket.SOCK_DGRAM else listener.accept()[0].close()
    return len(ready)


@contextlib.contextmanager
def started(layer, *replaced):
    """A sandbox of a layer, with a copy of the worker in which each text is replaced by the one behind it. It has ten
    minutes to remove files: beside other work a few seconds may be too short."""
    source = pathlib.Path(sandbox_worker.__file__).read_text()
    replaced = ["CLEAN_LIMIT_S = 5 ", "CLEAN_LIMIT_S = 600 ", *replaced]
    for old, new in zip(replaced[::2], replaced[1::2]):
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        shutil.copytree(pathlib.Path(sandbox.__file__).parent, folder, dirs_exist_ok=True)     # as it is compiled, too
        pathlib.Path(folder, "sandbox_worker.py").write_text(source)
        patch.setattr(sandbox, "PROGRAM", f"{folder}/sandbox_worker.py")
        with Sandbox(layer, 0) as child:
            patch.undo()
            yield child


def greeted(child):
    """The sandbox, whose walls stand; the test is skipped where the machine does not allow it."""
    try:
        child.greet()
    except LayerError as error:
        pytest.skip(f"{child.layer}: {error}")
    child.processes = processes(child.child.pid)
    return child


def sandboxes(*layers):
    """A fixture: a sandbox of each of these layers, (name, what is replaced in the worker …)."""
    @pytest.fixture(scope="module", params=layers, ids=lambda layer: layer[0])
    def sandbox_of_a_layer(request, world):
        with started(*request.param) as child:
            yield greeted(child)
    return sandbox_of_a_layer


child = sandboxes(*([layer] for layer in LAYERS))
# The layer that has limits of resources alone: there an attack that means something succeeds.
without_walls = sandboxes(["rlimits"])
# The layer landlock as on kernels whose Landlock has an earlier version.
VERSION = 'version = check(libc.syscall(444, None, 0, 1), "Landlock")'
old_child = sandboxes(*(["landlock", VERSION, f"version = {version}"] for version in (2, 4)))


def values_of(child, code, *calls, limit_s=1, **more):
    """What the calls give on an answer. No descriptor of the caller stays open."""
    before = set(os.listdir("/proc/self/fd"))
    values, _ = child.run(code, list(calls), limit_s, imports=[], **more)
    assert set(os.listdir("/proc/self/fd")) <= before
    return values


def hostile(world, *bodies):
    """An answer that attacks in f(2), f(3) …"""
    names = "\n".join(f"{key} = {value!r}" for key, value in world.items() if key.isupper())
    attacks = [f"    if n == {number}:\n{textwrap.indent(body, ' ' * 8)}" for number, body in enumerate(bodies, 2)]
    return HOSTILE.format(names=names, attacks="\n".join(attacks))


def processes(root):
    """Process ids of `root` and of all that descend from it."""
    found = {root}
    with contextlib.suppress(OSError):                              # it has ended
        for children in pathlib.Path(f"/proc/{root}/task").glob("*/children"):
            for pid in children.read_text().split():
                found |= processes(int(pid))
    return found


def has_ended(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def assert_nothing_is_lost(world):
    folder = pathlib.Path(world["WORLD"])
    assert sorted(path.name for path in folder.iterdir()) == ["datagram", "input", "secret", "secret.db", "unix"]
    assert (folder / "input").read_text() == "precious"
    assert (folder / "input").stat().st_mode & 0o777 == 0o666 and (folder / "input").stat().st_mtime > 1
    assert not any(os.path.exists(f"{place}/canary-of-a-test") for place in ("/tmp", "/dev/shm"))
    assert received(world) == 0
    assert os.getpriority(os.PRIO_PROCESS, world["VICTIM"]) == os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.parametrize("name", BATCHES)
def test_attack(child, world, monkeypatch, name):
    monkeypatch.setattr(sandbox, "CLOCK", 20)
    bodies, wanted = zip(*BATCHES[name])
    limit_s = 10 if name in REFUSED_AT_ONCE or wanted != ("error",) else 0.05             # 1 s of the clock
    calls = [f"f({number})" for number in range(1, len(bodies) + 3)]
    # those that are refused at once in the process that is forked for the first order of calls
    renewed = len(calls) - 1 if name in REFUSED_AT_ONCE else 0
    first, *results, last = values_of(child, hostile(world, *bodies), *calls, limit_s=limit_s, renewed=renewed)
    for result, expected in zip(results, wanted, strict=True):
        assert "loot " not in str(result) and SECRET not in str(result)
        if expected == "error":
            assert result[0] == "error", result
        elif expected is MADE and child.layer == "landlock":
            assert result == ["ok", "harmless"]
        elif expected not in (HARMLESS, MADE):
            assert result == expected
    if not any(part in bodies[0] for part in (".encode =", "json.dumps", "O_NONBLOCK")):    # they spoil later results
        assert (first, last) == (["ok", 41], ["ok", 42 + len(bodies)]), (first, results, last)
    assert_nothing_is_lost(world)
    assert processes(child.child.pid) == child.processes, "a process was left behind"
    assert child.layer == "namespaces" or os.listdir(child.work) == []
    # the next answer finds nothing, and its results are whole
    code = "import os\ndef f(n): return [os.listdir('.'), 'x' * 100000]"
    assert values_of(child, code, "f(1)") == [["ok", ["list", ["list"], "x" * 100000]]]


@pytest.mark.parametrize("group", ["reads", "writes", "opens"])
def test_attack_on_an_old_landlock(old_child, world, monkeypatch, group):
    test_attack(old_child, world, monkeypatch, group)


@pytest.mark.parametrize("part, loot, num_received", [
    ("sqlite3.connect", SECRET, 0), ("a.connect(", "1", 1), ("a.sendto(", "1", 1),
    ("DGRAM).sendto(b'x', WORLD", "1", 1), ("425", "True", 0), ("process_vm_readv", SECRET[:16], 0)])
def test_without_walls_an_attack_succeeds(without_walls, world, part, loot, num_received):
    [body] = [body for body, _ in ATTACKS if part in body]
    [result] = values_of(without_walls, hostile(world, body), "f(2)")
    if part in ("425", "process_vm_readv") and result == ["error", "OSError: refused"]:
        pytest.skip("this machine refuses it without walls, too")
    assert result[0] == "ok" and result[1].startswith("loot ") and loot in result[1]
    assert received(world) == num_received


@pytest.mark.parametrize("trace, damage", DAMAGE)
def test_what_an_answer_does_to_its_process_reaches_no_other(child, trace, damage):
    code, undamaged = [DAMAGING.format(trace=trace, damage=textwrap.indent(text, " " * 8)) for text in (damage, "pass")]
    clean, _, damaged = values_of(child, code, "f(1)", "f(2)", "f(3)", limit_s=2)
    assert clean[0] == "ok"
    assert (damaged != clean) == ("Thread" not in damage)           # it shows; with a thread, a new process goes on
    assert values_of(child, code, "f(1)", limit_s=2) == [clean]                               # the same text again
    assert values_of(child, undamaged, "f(1)", "f(2)", limit_s=2) == [clean] * 2


def test_no_answer_sees_memory_of_references_or_other_answers(child):
    """Search the Python objects of a fresh answer's process for what another left (and its own, as a control)."""
    assert values_of(child, "def f(): return 'marker-of-an-earlier-answer' * 100", "f()")[0][0] == "ok"
    search = """
import gc
own = "marker-of-this-answer"
def f():
    halves = ("marker-", "of-an-earlier-answer"), ("marker-", "of-this-answer")
    dicts = [o for o in gc.get_objects() if isinstance(o, dict)]
    text = " ".join(str(v)[:10000] for d in dicts for v in list(d.values()) if isinstance(v, (str, list, bytes)))
    return ["".join(half) in text for half in halves]"""
    assert values_of(child, search, "f()", limit_s=5) == [["ok", ["list", 0, 1]]]


COPIES = """import os, pathlib, shelve, shutil, tarfile, tempfile, zipfile
def f(n):
    os.mkdir("a")
    pathlib.Path("a/b").touch()
    pathlib.Path("a/b").write_text("text")
    shutil.copy("a/b", "copy"), shutil.copy2("a/b", "copy2"), shutil.copytree("a", "tree")
    shutil.copymode("a/b", "copy"), shutil.move("copy", "moved")
    os.chmod("a/b", 0o600), os.chown("a/b", os.getuid(), os.getgid()), os.utime("a/b", (1, 1))
    for kind in ("zip", "gztar"):
        shutil.make_archive("packed", kind, "a")
    shutil.unpack_archive("packed.zip", "unzipped")
    shutil.unpack_archive("packed.tar.gz", "untarred")
    with shelve.open("shelf") as shelf:
        shelf["key"] = [n]
    with shelve.open("shelf") as shelf, tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile() as file:
        kept = shelf["key"]
    texts = [pathlib.Path(name).read_text() for name in ("copy2", "moved", "tree/b", "unzipped/b", "untarred/b")]
    return [kept, texts, os.listxattr("a"), os.path.exists(folder)]"""


def test_files_are_copied_and_kept_as_outside(child):
    """What sets modes, owners and dates succeeds without effect: what only copies them along does not fail of it."""
    expected = [[1], ["text"] * 5, [], False]
    assert values_of(child, COPIES, "f(1)", limit_s=5) == [["ok", encode(expected)]]


VALUES = [None, True, 2 ** 60, 0.5, float("nan"), 1j, "", "\ud800", b"ab", [1, [2]], (1,), {1, 2}, range(0, 9, 2),
          {"a": [1], "b": None}, OrderedDict(a=1), Counter("aab"), decimal.Decimal("0.1")]
VIOLATIONS = [
    True, {}, {"a": 1}, [], [[]], [None], [1], ["list", True], ["list", {}], ["list", [["x"]]], ["set", [{}]],
    ["dict", 1], ["dict", ["a"]], ["counter", ["tuple", "a"]], ["odict", "abc"], ["int", 5], ["int", "5"],
    ["int", "0x"], ["int", "0xg"], ["int", "0x1\n"], ["int", "0x1", 2], ["ratio", "1"], ["ratio", "1/0"],
    ["ratio", "1/-2"], ["ratio", "1/2/3"], ["ratio", 1, 2], ["ratio", "1/" + "1" * 5000], ["complex", [], 1]]
REFUSED = [json.dumps(["ok", value]) for value in VIOLATIONS] + [
    '["ok", ["list", ' + "[" * 500 + "]" * 500 + "]]", '["error", {"a": [1]}]', '["ok"]', '{"ok": 1}', '"ready"',
    '"restart"', "9" * 5000, '["ok", ' + "9" * 5000 + "]"]


def result_of(line):
    """What the caller takes from a line that an answer has written."""
    with sandbox.pipe() as (reading, writing):
        os.write(writing.fileno(), line.encode() + b"\n")
        return Lines(reading.fileno(), None).expect(is_result, time.monotonic() + 60)


def test_a_forged_result_is_refused_or_a_wrong_value():
    for line in REFUSED:
        with pytest.raises(Stop, match="a broken result"):
            result_of(line)
    for line in ('["ok", NaN]', '["ok", 1e999]', '["error", "\\ud800"]'):
        for value in ({"a": 1}, Counter(a=1), OrderedDict(a=1), [1]):
            assert fault_of(["ok", encode(value)], result_of(line)).encode()    # it is a text that can be written
    deepest = functools.reduce(lambda value, _: [value], range(100), 1)
    assert is_encoded(encode(deepest)) and not is_encoded(["list", ["list", ["list", encode(deepest)]]])


def mutated(encoded, draw):
    """A copy with one change somewhere: another value, one part more, less, or twice."""
    if type(encoded) is not list or not encoded or draw.random() < 0.2:
        return draw.choice([None, True, 1.5, -1, 2 ** 60, "", "x", {}, [], {"1": 2}, ["list"], ["nan"],
                            ["dict", ["tuple", "a", 1]], ["ratio", "0x1f"], ["int", "1/2"], ["ratio", "1/2"]])
    parts, index = list(encoded), draw.randrange(len(encoded))
    change = draw.randrange(6)
    if change == 0:
        del parts[index]
    elif change == 1:
        parts.insert(index, draw.choice(parts))
    else:
        parts[index] = mutated(parts[index], draw)
    return parts


def test_no_mutated_value_breaks_the_comparison():
    draw, encoded, num_taken = random.Random(0), [json.loads(json.dumps(encode(value))) for value in VALUES], 0
    for _ in range(5000):
        left, right = draw.choice(encoded), mutated(draw.choice(encoded), draw)
        if is_encoded(right):
            num_taken += 1
            assert equal_values(left, right) in (True, False) and type(readable(right)) is str
            for operator in ("Eq", "Lt", "Is", "In"):
                with contextlib.suppress(TypeError):
                    holds(operator, left, right)
    assert 500 < num_taken < 4500


@pytest.mark.parametrize("seed", range(4))
def test_fuzzed_results_cost_their_own_test(child, world, seed):
    """Mutated results (even seeds) and random bytes (odd ones), as the result of one call and while the code loads."""
    draw = random.Random(seed)
    results = [mutated(["ok", encode(draw.choice(VALUES))], draw) for _ in range(9)]
    lines = [draw.randbytes(draw.randrange(99)) if seed % 2 else json.dumps(result).encode()
             for result in results if not is_result(json.loads(json.dumps(result)))]
    forged = b"\n".join(lines) + draw.choice([b"", b"\n"])
    code = hostile(world, f"os.write(RESULTS, {forged!r}); return 42")
    first, second, third = values_of(child, code, "f(1)", "f(2)", "f(3)")
    assert (first, third) == (["ok", 41], ["ok", 43]) and is_result(second)
    loading = hostile(world, "return 42") + f"\nos.write(RESULTS, {forged!r})"
    assert all(map(is_result, values_of(child, loading, "f(1)", "f(2)")))
    assert values_of(child, "def f(n): return n", "f(1)") == [["ok", 1]]


def test_data_that_wait_move_no_deadline_and_an_open_pipe_is_not_waited_for(monkeypatch):
    """As when untrusted code writes single blanks faster than they are read, or leaves the pipe to what it started."""
    is_ready = is_word("ready")
    monkeypatch.setattr(sandbox, "LOOK_S", 600)
    server, ours = socket.socketpair()
    with server, ours, sandbox.pipe() as (reading, writing):
        lines = Lines(reading.fileno(), ours.fileno())
        os.write(writing.fileno(), b" " * 60000 + b'"ready"\n"re')
        with pytest.raises(Stop, match="time limit"):
            lines.expect(is_ready, time.monotonic() - 0.001)
        assert not lines.buffer and lines.expect(is_ready, time.monotonic() + 60) == "ready"
        threading.Timer(0.05, os.write, (writing.fileno(), b'ady"\n')).start()   # the rest of a line is read at once
        assert lines.expect(is_ready, time.monotonic() + 60) == "ready"
        server.send(b"ended")
        with pytest.raises(Stop, match="process ended"):
            lines.expect(is_ready, time.monotonic() + 60)
        writing.close()
        with pytest.raises(Stop, match="process ended"):
            lines.expect(is_ready, time.monotonic() + 60)


@pytest.mark.parametrize("letter, num_letters, size, reason", [
    ("x", 0, RESULT_LIMIT - 20, None), ("x", 0, RESULT_LIMIT, "a result that is too large"),
    ("x", 0, 9 * 10 ** 6, "a result that is too large"), ("\U0001f600", 10 ** 5, 1, None),
    ("x", (1 << 20) - 50, 1, None), ("x", 1 << 20, 1, "larger than 1,048,576 characters"),
    ("x", 40 << 20, 1, "larger than 1,048,576 characters")])
def test_an_answer_and_a_result_are_whole_or_too_large(without_walls, letter, num_letters, size, reason):
    code = f"# {letter * num_letters}\ndef f(n): return 'x' * n"
    [result] = values_of(without_walls, code, f"f({size})", limit_s=5)
    assert result == (["error", reason] if reason else ["ok", "x" * size])


USE = """import time
def f(n):
    until = time.process_time() + n
    while time.process_time() < until: pass
    return n
"""


def test_processor_time_decides(without_walls, monkeypatch):
    """Not the clock: beside other work a call may take many times as long. Each load has time of its own."""
    def results(code, *calls, limit_s=.1):
        return values_of(without_walls, code, *calls, limit_s=limit_s)

    monkeypatch.setattr(sandbox, "CLOCK", 600)
    assert results(USE + "f(.15)", "f(.02)", "f(9)", "f(0)") == [["ok", .02], ["error", "time limit"], ["ok", 0]]
    sleeper = "import time\ndef f(n):\n    time.sleep(n)\n    return n"
    assert results(sleeper, "f(.2)", limit_s=.05) == [["ok", .2]]
    monkeypatch.setattr(sandbox, "CLOCK", 5)
    assert results(sleeper, "f(99)", "f(0)", limit_s=.2) == [["error", "time limit"], ["ok", 0]]
    monkeypatch.setattr(sandbox, "CLOCK", 600)
    monkeypatch.setattr(sandbox, "LOADS_LIMIT_S", 0)                 # an answer as a whole has a limit, too
    values = results(USE + "f(.1)", "f(0)", *["f(9)"] * 4)           # .5 s; .2 s for each f(9)
    assert values[:2] == [["ok", 0], ["error", "time limit"]] and values[-1] == ["error", ANSWER_TIME_LIMIT]
    assert results("def f(n): return n", "f(1)") == [["ok", 1]]


def test_a_folder_that_cannot_be_emptied_is_replaced(capfd, monkeypatch):
    """As where an answer makes files for as long as it may: the next one works in another folder. One that outlives the
    sandbox is named."""
    with started("landlock", "EMPTY = 'cd", "EMPTY = 'exit 1; cd") as child:
        greeted(child)
        code = "import os\ndef f(n):\n    open('file', 'w').close()\n" \
               "    return [os.path.basename(os.getcwd()), os.listdir('.')]"
        for folder in ("000", "0000", "00000"):               # the self-test took two
            assert values_of(child, code, "f(1)") == [["ok", ["list", folder, ["list", "file"]]]]
        monkeypatch.setattr(sandbox, "END_LIMIT_S", "soon")
    assert f"cannot be removed: {child.folder}" in capfd.readouterr().err
    assert empty(child.folder, 600)
    os.rmdir(child.folder)


def verdict_of(program, number, arguments, architecture):
    """What a seccomp program returns for a system call (a few instructions of classic BPF, interpreted)."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, *arguments)
    loaded, at = 0, 0
    while True:
        code, if_true, if_false, value = program[at]
        at += 1
        if code == sandbox_worker.LOAD:
            loaded, = struct.unpack_from("<I", data, value)
        elif code == sandbox_worker.AND:
            loaded &= value
        elif code == sandbox_worker.GIVE:
            return value
        else:
            is_true = loaded == value if code == sandbox_worker.JUMP_IF_EQUAL else loaded >= value
            at += if_true if is_true else if_false


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_allows_what_the_tables_say_and_nothing_else(machine, monkeypatch):
    column, architecture = MACHINES[machine]
    monkeypatch.setattr(os, "uname", lambda: types.SimpleNamespace(machine=machine))
    _, memory = sandbox_worker.system_call_filter()
    program = list(struct.iter_unpack("<HBBI", memory.raw[:-1]))
    lines = pathlib.Path(sandbox.__file__).with_name("system_calls.txt").read_text().splitlines()[1:]
    calls = [line.split()[1:] for line in lines]
    listed = {int(call[column]): call[2:] for call in calls if call[column] != "-"}
    allowed, denied, ignored = answers = sandbox_worker.ALLOWED, sandbox_worker.DENIED, sandbox_worker.IGNORED
    assert [answer[0][-1] for answer in answers] == [0x7FFF0000, 0x50000 | errno.ENOSYS, 0x50000]
    conditional = {row[1 + column]: row[3:] for row in CONDITIONAL}
    draw, num_allowed = random.Random(0), 0
    values = [0, 1, 2, 3, 8, 9, 15, 0x203, 0x200, 0x10000, 0x1200011, 0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451]
    for number in [*range(600), 1 << 30, (1 << 30) + 1, (1 << 32) - 1]:
        for _ in range(100 if number in conditional else 1):
            arguments = [draw.choice(values) if draw.random() < 0.8 else draw.getrandbits(31) for _ in range(6)]
            expected = denied
            if number in listed:
                expected = ignored if listed[number] == ["ignored"] else allowed
            if number in conditional:
                (when_any, when_none), *alternatives = conditional[number]
                holds_any = any(all(arguments[argument] & mask == value for argument, mask, value in tests)
                                for tests in alternatives)
                expected = when_any if holds_any else when_none
            assert verdict_of(program, number, arguments, architecture) == expected[0][-1], (number, arguments)
            assert verdict_of(program, number, arguments, 0x40000003) == 0x80000000
            num_allowed += expected != denied
    assert 200 < num_allowed < 900


def test_layers_are_named_and_never_weakened(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "colbench")
    task = {"ground_truth": "def f(): return 1", "test_cases": {"a": "f()"}}
    with Scorer(unsafe=True, workers=1) as scorer:
        assert scorer.layer == "rlimits" and scorer.score([(task, "def f(): return True")])[0].tests == [True]
    assert "resource limits alone" in caplog.text
    monkeypatch.setattr(Sandbox, "__enter__", mock.Mock(side_effect=LayerError("not allowed")))
    with pytest.raises(InputError, match="namespaces: not allowed; landlock: not allowed.*--unsafe-scorer"):
        Scorer(workers=1).__enter__()


NUMBERS = {"sockets": (41, 198), "chmod": (90, 53), "kill": (62, 129), "execve": (59, 221), "clone": (56, 220)}


def allowing(*calls):
    """The change by which the filter allows system calls."""
    numbers = [NUMBERS[call][MACHINES[os.uname().machine][0]] for call in calls]
    denied = "    ranges = [(0, DENIED)]\n"
    return [denied, f"    verdicts.update(dict.fromkeys({numbers}, ALLOWED))\n{denied}"]


WEAKENED = [                                                        # layers, which text becomes which, what is said
    (LAYERS, ["        self.last_steps.append((libc.prctl, (22, 2, self.program[0], 0, 0))) ", ""],
     "walls do not stand (sockets, chmod, kill, execve, clone)"),
    (LAYERS, allowing("sockets", "kill", "clone"), "walls do not stand (sockets, kill, clone)"),
    (LAYERS, ["(resource.RLIMIT_AS, MEMORY_LIMIT), ", "", *allowing("chmod", "execve")],
     "walls do not stand (memory, chmod, execve)"),
    (["landlock"], ["        steps.append((libc.syscall, (446, walls.rules, 0)))\n", ""],
     "walls do not stand (files, files, files)"),
    (["landlock"], ["    steps.append((libc.capset, ", "    str(("], "walls do not stand (capabilities)"),
    (["namespaces"], ["new_user | 0x20000 | 0x20000000 | 0x40000000", "new_user | 0x20000 | 0x20000000"],
     "a namespace is not its own"),
    (["namespaces"], ["new_user | 0x20000 | 0x20000000", "new_user | 0x20000"], "a namespace is not its own"),
    (["namespaces"], ["os.path.exists, paths", "os.path.exists, ['/etc', *paths]"], "walls do not stand (files)")]


@pytest.mark.parametrize("child, replaced, said", [
    pytest.param([layer], replaced, said, id=f"{layer}-{said}") for layers, replaced, said in WEAKENED
    for layer in layers], indirect=["child"])
def test_walls_that_do_not_stand_are_found(child, replaced, said):
    """Each wall in turn is left out of a layer whose walls stand here; the start-up check says which."""
    replaced = [*replaced, "in PRELOADED.split()", "in []"]                                   # it starts faster
    with started(child.layer, *replaced) as other:
        with pytest.raises(LayerError, match=re.escape(said)):
            other.greet()


@pytest.mark.parametrize("layer, pid, killed", [
    ("landlock", 1, [-7, 7]), ("namespaces", 2, [-7, 7]), ("namespaces", 1, [-1])])
def test_without_a_namespace_of_its_own_only_the_group_is_killed(layer, pid, killed, monkeypatch):
    """Though the server be process 1, as in a container; kill(-1) would end all others."""
    walls, kills = types.SimpleNamespace(layer=layer), []
    monkeypatch.setattr(os, "getpid", lambda: pid)
    monkeypatch.setattr(os, "kill", lambda pid, number: kills.append(pid))
    monkeypatch.setattr(os, "wait4", lambda *_: (7, signal.SIGPROF, types.SimpleNamespace(ru_utime=1, ru_stime=2)))
    monkeypatch.setattr(os, "waitpid", mock.Mock(side_effect=ChildProcessError))
    assert end_all(walls, 7) == [signal.SIGPROF, 3] and kills == killed


PACKAGE = str(pathlib.Path(sandbox.__file__).parents[1])
STARTER = """import threading
threading.stack_size(65536)
def f(n):
    stop, number = threading.Event(), 0
    while n == 2:
        try:
            threading.Thread(target=stop.wait, daemon=True).start()
            number += 1
        except RuntimeError:
            if {gives_up}: return number
    return n + 40"""
SCORING = """
import sys
sys.path.insert(0, sys.argv[1])
from colbench import InputError
from colbench.scorer import Scorer
pairs, right, calls = [], "def f(n): return n + 40  # ", {str(n): f"f({n})" for n in (1, 2, 3)}
for number, answer in enumerate([sys.argv[3], right] * 2):
    pairs.append(({"ground_truth": f"{right}{number}", "test_cases": calls}, answer))
try:
    scorer = Scorer(workers=2, time_limit_s=0.2)
    scorer.layers = sys.argv[2].split()
    with scorer:
        print("ready", flush=True)
        for score in scorer.score(pairs):
            print(*map(int, score.tests), sep="", end=" ")
except InputError as error:
    print("no layer:", error)
"""


def test_a_killed_caller_leaves_no_process():
    sleeper = "def f(n): __import__('time').sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", SCORING, PACKAGE, " ".join(LAYERS), sleeper], text=True,
                               stdout=subprocess.PIPE)
    with process.stdout:
        assert process.stdout.readline() == "ready\n"
    idle, pids = processes(process.pid), set()
    while not pids - idle:                                          # until code runs in a process of its own
        time.sleep(0.1)
        pids = processes(process.pid)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    while not all(map(has_ended, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


OTHER_USER = 54321
PYTHON_FOR_ALL = shutil.which(f"python3.{sys.version_info.minor}", path="/usr/local/bin:/usr/bin")


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start it as a user that has no other processes")
@pytest.mark.skipif(PYTHON_FOR_ALL is None, reason="no interpreter of this version that another user may start")
def test_threads_until_a_user_has_no_process_left_end_no_other_answer(layer):
    """As a user who is not root, with a limit of processes (root has none), as in a container."""
    process = subprocess.run(["prlimit", "--nproc=60", PYTHON_FOR_ALL, "-c", SCORING, PACKAGE, layer,
                              STARTER.format(gives_up=False)], capture_output=True, text=True, timeout=300,
                             user=OTHER_USER, group=OTHER_USER, extra_groups=[], cwd="/")
    if "no layer" in process.stdout:
        pytest.skip(process.stdout)
    assert process.returncode == 0, process.stderr
    assert process.stdout.split() == ["ready", *["101", "111"] * 2]


def test_an_answer_has_a_limit_of_threads(child):
    """The system counts them where it can; else the server ends the answer (see sandbox_worker.thread_limit)."""
    for _ in range(2):                                              # what one answer starts does not count for the next
        first, second, third = values_of(child, STARTER.format(gives_up=True), "f(1)", "f(2)", "f(3)", limit_s=2)
        assert (first, third) == (["ok", 41], ["ok", 43])
        assert second in (["ok", THREAD_LIMIT], ["error", "process ended"])
    threads = "import threading\ndef f(n):\n    for _ in range(n):\n        thread = threading.Thread(target=int)\n" \
              "        thread.start()\n        thread.join()\n    return n"
    assert values_of(child, threads, "f(200)", limit_s=5) == [["ok", 200]]      # one after the other
