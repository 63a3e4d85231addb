"""Hostile answers, in every layer that isolates: each tries to do harm in its second test and returns "loot" if it did.

Nothing of theirs may be left (files, processes, connections, a changed or read input), and their first and third test,
which behave, must be graded as usual. A layer that this machine does not allow is skipped, not weakened."""
import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest

import common
import sandbox

SECRET = "the-secret-" + "of-the-parent"                           # in the parent's memory, environment and a file
LIMIT_S = 0.4
HARMLESS = object()                                                 # the attack's own test may give anything but loot


def blocked(*bodies):
    return [(body, "error") for body in bodies]


READ = blocked(
    "return loot(open(WORLD + '/secret').read())",
    "return loot(os.read(os.open(WORLD + '/secret', os.O_RDONLY), 99))",
    "os.symlink(WORLD + '/secret', 'link'); return loot(open('link').read())",
    "os.link(WORLD + '/secret', 'link'); return loot(open('link').read())",
    "return loot(open('/proc/self/root' + WORLD + '/secret').read())",
    "return loot(open(f'/proc/{PARENT}/environ').read())",
    "return loot(open(f'/proc/{PARENT}/root' + WORLD + '/secret').read())",
    "return loot(open('/proc/1/environ').read())",
    "return loot(os.environ['CANARY'])",
    "return loot(os.listdir(WORLD))",
    "return loot(os.listdir(os.path.expanduser('~root')))",
    "return loot(open('/etc/passwd').read())",
    "return loot(open('/etc/shadow').read())",
    "return loot(open(SANDBOX).read())",
    "os.chdir(WORLD); return loot(open('secret').read())",
    "import sqlite3; return loot(sqlite3.connect(WORLD + '/secret').execute('select * from sqlite_master').fetchall())",
    "import importlib.util as u; s = u.spec_from_file_location('m', WORLD + '/secret.py'); m = u.module_from_spec(s); "
    "s.loader.exec_module(m); return loot(m.value)",
    "libc.open.restype = ctypes.c_int; return loot(os.read(libc.open((WORLD + '/secret').encode(), 0), 99))",
    "return loot([os.read(d, 1) for d in range(64) if d != RESULTS])",
    "os.mkdir('d'); os.chroot('d'); return loot(1)",
    "a = [0] * 99; b = [os.scandir(p) for p in ('/home', '/root', '/var', '/work')]; return loot(b)",
)
WRITE = blocked(
    "open(WORLD + '/input', 'w').write('x'); return loot(1)",
    "open(WORLD + '/input', 'a').write('x'); return loot(1)",
    "os.open(WORLD + '/input', os.O_RDONLY | os.O_TRUNC); return loot(1)",
    "os.truncate(WORLD + '/input', 0); return loot(1)",
    "os.unlink(WORLD + '/input'); return loot(1)",
    "os.rename(WORLD + '/input', WORLD + '/other'); return loot(1)",
    "os.chmod(WORLD + '/input', 0o777); return loot(1)",
    "os.chown(WORLD + '/input', 1, 1); return loot(1)",
    "os.utime(WORLD + '/input', (1, 1)); return loot(1)",
    "os.setxattr(WORLD + '/input', 'user.a', b'b'); return loot(1)",
    "os.mkdir(WORLD + '/new'); return loot(1)",
    "open('/tmp/canary-of-a-test', 'w').write('x'); return loot(1)",
    "open('/dev/shm/canary-of-a-test', 'w').write('x'); return loot(1)",
    "open(os.path.dirname(os.__file__) + '/canary.py', 'w').write('x'); return loot(1)",
    "import shutil; shutil.rmtree(WORLD); return loot(1)",
    "os.mkfifo(WORLD + '/fifo'); return loot(1)",
    "os.mknod('null', 0o20666, os.makedev(1, 3)); return loot(open('null').read())",
    "os.setxattr('.', 'user.a', b'b'); return loot(1)",
)
NETWORK = blocked(
    "socket.create_connection(('127.0.0.1', PORT)).send(b'x'); return loot(1)",
    "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT)); return loot(1)",
    "import urllib.request; return loot(urllib.request.urlopen(f'http://127.0.0.1:{PORT}').read())",
    "s = socket.socket(socket.AF_UNIX); s.connect(WORLD + '/unix'); return loot(1)",
    "s = socket.socket(socket.AF_UNIX); s.connect('\\0canary-of-a-test'); return loot(1)",
    "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); return loot(1)",
    "return loot(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))",
    "return loot(socket.getaddrinfo('example.org', 80))",
    "d = libc.socket(2, 1, 0); assert d >= 0; return loot(d)",
    "a, b = socket.socketpair(socket.AF_UNIX); a.connect(WORLD + '/unix'); return loot(1)",
    "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); a.sendto(b'x', WORLD + '/datagram'); return loot(1)",
    "a, b = socket.socketpair(socket.AF_UNIX); a.sendto(b'x', WORLD + '/datagram'); return loot(1)",
    "return loot(libc.syscall(425, 8, bytearray(120)) >= 0 or no())",                                        # io_uring
)
PROCESSES = blocked(
    "return loot(os.fork())",
    "pid = os.fork()\nif pid == 0:\n    os.setsid(); os.fork(); time.sleep(60); os._exit(0)\nreturn loot(pid)",
    "while True: os.fork()",
    "return loot(subprocess.run(['sleep', '987'], start_new_session=True))",
    "return loot(os.system('sleep 987 &') == 0 or no())",
    "return loot(os.posix_spawn('/bin/sleep', ['sleep', '987'], {}))",
    "os.execv('/bin/sleep', ['sleep', '987'])",
    "os.execv(sys.executable, [sys.executable, '-c', 'print(1)'])",
    "import multiprocessing as m; p = m.get_context('fork').Process(target=time.sleep, args=(60,)); p.start(); return loot(1)",
    "os.kill(VICTIM, 9); return loot(1)",
    "os.kill(PARENT, 9); return loot(1)",
    "os.kill(os.getppid(), 9); return loot(1)",
    "os.kill(-1, 9); return loot(1)",
    "os.killpg(0, 9); return loot(1)",
    "signal.pidfd_send_signal(os.pidfd_open(VICTIM), 9); return loot(1)",
    "r, w = os.pipe(); fcntl.fcntl(r, fcntl.F_SETOWN, VICTIM); fcntl.fcntl(r, 10, 9); return loot(1)",
    "return loot(libc.ptrace(16, VICTIM, 0, 0) == 0 or no())",
    "os.setpriority(os.PRIO_PROCESS, VICTIM, 19); return loot(1)",
    "resource.prlimit(VICTIM, resource.RLIMIT_CPU, (1, 1)); return loot(1)",
    "b = ctypes.create_string_buffer(64); v = (ctypes.c_size_t * 2)(ctypes.addressof(b), 64); "
    "assert libc.process_vm_readv(PARENT, v, 1, v, 1, 0) > 0; return loot(b.raw)",
    "return loot(libc.unshare(0x10000000) == 0 or no())",
    "return loot(libc.mount(b'tmpfs', b'.', b'tmpfs', 0, 0) == 0 or no())",
    "return loot(libc.umount2(b'.', 2) == 0 or no())",
    "os.setuid(0); os.setgid(0); return loot(1)",
    "return loot(libc.capset(b'\\x22\\x05\\x08\\x20\\0\\0\\0\\0', b'\\xff' * 24) == 0 or no())",
    "return loot(libc.syscall(250, 0, -3) >= 0 or no())",                                                      # keyctl
    "resource.setrlimit(resource.RLIMIT_AS, (-1, -1)); return loot(1)",
    "return loot(libc.shmget(1, 4096, 0o1666) >= 0 or no())",
    "os.sched_setaffinity(0, {0}); return loot(1)",
)
FAULTS = blocked(
    "while True: pass",
    "while True:\n    try:\n        while True: time.sleep(0.01)\n    except BaseException: pass",
    "for s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: pass",
    "time.sleep(60)",
    "return 'x' * 10 ** 10",
    "data = []\nwhile True: data.append(bytearray(10 ** 6))",
    "data = []\nwhile True:\n    try: data.append(bytearray(10 ** 6))\n    except MemoryError: pass",
    "return 'x' * 10 ** 7",
    "return list(range(10 ** 6))",
    "a = []\nfor _ in range(10 ** 5): a = [a]\nreturn a",
    "a = []\na.append(a)\nreturn a",
    "a = []\nfor _ in range(60): a = [a, a]\nreturn a",
    "return g(0)",
    "sys.setrecursionlimit(10 ** 9); return g(0)",
    "return ctypes.string_at(0)",
    "os.abort()",
    "os._exit(0)",
    "sys.exit(0)",
    "raise SystemExit",
    "raise KeyboardInterrupt",
    "raise BaseExceptionGroup('a', [GeneratorExit()])" if sys.version_info >= (3, 11) else "raise GeneratorExit",
    "return exit()",
    "import re; return loot(re.match('(a+)+$', 'a' * 50 + 'b'))",
    "return int('9' * 10 ** 6)",
    "class E(Exception):\n    def __str__(self): raise SystemExit\nraise E",
    "[threading.Thread(target=time.sleep, args=(60,)).start() for _ in range(10 ** 4)]; return loot(1)",
    "with open('big', 'wb') as f:\n    while True: f.write(bytes(10 ** 6))",
    "os.write(RESULTS, b'x' * (1 << 22)); return loot(1)",
    "while True: os.write(RESULTS, b'[\"ok\", 42')",
    "os.write(RESULTS, b'[' * 10 ** 5 + b'\\n'); time.sleep(60)",
    "os.write(RESULTS, b'nonsense\\n'); time.sleep(60)",
    "while True: os.write(RESULTS, b'\"loaded\"\\n')",
    "os.closerange(0, 64); return loot(1)",
    "return input()",
) + [
    ("threading.Thread(target=spin, daemon=True).start(); return 'harmless'", ["ok", "harmless"]),
    ("[threading.Thread(target=spin).start() for _ in range(8)]; return 'harmless'", HARMLESS),
    ("for _ in range(10 ** 4): print('x' * 1000); sys.stderr.write('x' * 1000)\nreturn 'harmless'", ["ok", "harmless"]),
    ("for i in range(500): open(str(i), 'w').write('x')\nreturn 'harmless'", ["ok", "harmless"]),
    ("os.makedirs('/'.join('d' * 50), 0o700); return 'harmless'", ["ok", "harmless"]),
    ("os.mkdir('locked', 0); return 'harmless'", ["ok", "harmless"]),
    ("return os.listdir('.')", ["ok", ["list", []]]),
    ("import atexit; atexit.register(time.sleep, 60); return 'harmless'", ["ok", "harmless"]),
]
# What the answer's process holds of the harness; none of it helps to know an expected value.
CHEATS = [
    ("class Yes:\n    def __eq__(self, other): return True\n    __hash__ = None\nreturn Yes()", "error"),
    ("class Yes(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\nreturn Yes(7)", ["ok", 7]),
    ("class Yes:\n    __class__ = int\n    def __eq__(self, other): return True\nreturn Yes()", "error"),
    ("class Loot:\n    def __reduce__(self): return os.system, ('sleep 987',)\nreturn Loot()", "error"),
    ("sys.modules['__main__'].encode = lambda *a: 'patched'; return 7", ["ok", 7]),
    ("import json; json.dumps = lambda *a, **k: '[\"ok\", \"patched\"]'; return 7", HARMLESS),
    ("import builtins; builtins.len = lambda x: 42; return 7", HARMLESS),
    ("import gc; return [o for o in gc.get_objects() if isinstance(o, dict) and 'reference' in o and o['reference']]",
     ["ok", ["list", []]]),
    ("return {f.f_locals['request']['reference'] for f in frames() if 'request' in f.f_locals}",
     ["ok", ["set", [None]]]),
    ("return __name__", ["ok", "answer"]),
]
ATTACKS = READ + WRITE + NETWORK + PROCESSES + FAULTS + CHEATS


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A parent with something to lose: files, a secret, open ports, a neighbour process."""
    folder = tmp_path_factory.mktemp("world")
    folder.chmod(0o777)
    (folder / "secret").write_text(SECRET)
    (folder / "secret.py").write_text(f"value = {SECRET!r}")
    (folder / "input").write_text("precious")
    (folder / "input").chmod(0o666)
    os.environ["CANARY"] = SECRET
    listeners = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
    listeners[1].bind(str(folder / "unix"))
    listeners[2].bind("\0canary-of-a-test")
    port = listeners[0].getsockname()[1]
    listeners += [socket.socket(socket.AF_INET, socket.SOCK_DGRAM), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)]
    listeners[3].bind(("127.0.0.1", port))
    listeners[4].bind(str(folder / "datagram"))
    for listener in listeners:
        listener.setblocking(False)
    for listener in listeners[1:3]:
        listener.listen()
    victim = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    yield {"WORLD": str(folder), "PORT": port, "PARENT": os.getpid(), "VICTIM": victim.pid, "listeners": listeners,
           "SANDBOX": str(pathlib.Path(common.__file__).with_name("sandbox.py"))}
    assert victim.poll() is None
    victim.kill()
    victim.wait()
    for listener in listeners:
        listener.close()
    del os.environ["CANARY"]


@pytest.fixture(scope="module", params=["namespaces", "landlock"])
def child(request, world):
    with sandbox.Sandbox(request.param, 0) as child:
        try:
            child.greet()
        except sandbox.LayerError as error:
            pytest.skip(f"{request.param}: {error}")
        yield child


def hostile(body, world):
    """An answer that attacks in f(2)."""
    names = {key: value for key, value in world.items() if key.isupper()}
    return "\n".join([
        "import ctypes, fcntl, os, resource, signal, socket, subprocess, sys, threading, time",
        "libc = ctypes.CDLL(None, use_errno=True)", *(f"{key} = {value!r}" for key, value in names.items()),
        "def fstat(d):\n    try: return os.fstat(d)\n    except OSError: return None",
        "RESULTS = [d for d in range(3, 64) if fstat(d)][0]",
        "def loot(value):\n    return 'loot ' + str(value)",
        "def no():\n    raise OSError('refused')",
        "def g(n):\n    return g(n + 1)",
        "def spin():\n    while True: pass",
        "def frames():\n    f = sys._getframe()\n    while f:\n        yield f\n        f = f.f_back",
        "def f(n):", "    if n == 2:", textwrap.indent(body, "        "), "    return n + 40"])


def processes(root):
    """Process ids of all that descend from `root`."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                stat = pathlib.Path(f"/proc/{entry}/stat").read_text()
                parents[int(entry)] = int(stat.rpartition(")")[2].split()[1])
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


@pytest.mark.parametrize("body, expected", ATTACKS, ids=[f"{i}-{body[:40]}" for i, (body, _) in enumerate(ATTACKS)])
def test_attack(child, world, body, expected):
    before = processes(child.child.pid)
    first, second, third = child.run(hostile(body, world), ["f(1)", "f(2)", "f(3)"], LIMIT_S, imports=[])[0]
    assert "loot " not in str(second) and SECRET not in str(second)
    if expected == "error":
        assert second[0] == "error", second
    elif expected is not HARMLESS:
        assert second == expected
    if ".encode =" not in body and "json.dumps" not in body:                    # these spoil their own later results
        assert (first, third) == (["ok", 41], ["ok", 43]), (first, second, third)
    folder = pathlib.Path(world["WORLD"])
    assert sorted(path.name for path in folder.iterdir()) == ["datagram", "input", "secret", "secret.py", "unix"]
    assert (folder / "input").read_text() == "precious"
    assert (folder / "input").stat().st_mode & 0o777 == 0o666 and (folder / "input").stat().st_mtime > 1
    assert not pathlib.Path("/tmp/canary-of-a-test").exists() and not pathlib.Path("/dev/shm/canary-of-a-test").exists()
    for listener in world["listeners"]:
        with pytest.raises(BlockingIOError):
            listener.recv(1) if listener.type == socket.SOCK_DGRAM else listener.accept()
    assert os.getpriority(os.PRIO_PROCESS, world["VICTIM"]) == os.getpriority(os.PRIO_PROCESS, 0)
    assert processes(child.child.pid) == before, "a process was left behind"
    if child.layer == "landlock":
        assert os.listdir(child.work) == []
    # the next answer finds nothing
    assert child.run("import os\ndef f(n): return os.listdir('.')", ["f(1)"], 1, imports=[])[0] == [["ok", ["list", []]]]


def test_the_suite_is_as_large_as_it_says():
    assert len(ATTACKS) >= 60


def test_no_answer_sees_memory_of_references_or_other_answers(child):
    """Search the Python objects of a fresh answer's process for what an earlier one left (and its own, as a control)."""
    marks = ["marker-" + "of-an-earlier-answer", "marker-" + "of-this-answer"]
    assert child.run(f"def f(): return {marks[0]!r} * 100", ["f()"], 1, imports=[])[0][0][0] == "ok"
    search = f"""
import ctypes, gc
own = {marks[1]!r}
def f():
    halves = ("marker-", "of-an-earlier-answer"), ("marker-", "of-this-answer")
    strings = [o for o in gc.get_objects() if isinstance(o, dict)]
    text = " ".join(str(v)[:10000] for d in strings for v in list(d.values()) if isinstance(v, (str, list, bytes)))
    return [("".join(half)) in text for half in halves]"""
    assert child.run(search, ["f()"], 5, imports=[])[0] == [["ok", ["list", [0, 1]]]]


def test_a_killed_caller_leaves_no_process(world):
    code = ("import sys; sys.path.insert(0, sys.argv[1]); import common\n"
            "with common.Scorer(workers=1) as scorer:\n    print('ready', flush=True)\n"
            "    scorer.score([({'ground_truth': 'def f(): return 1', 'test_cases': {'a': 'f()'}},"
            " 'def f():\\n    while True: pass')] * 99)")
    process = subprocess.Popen([sys.executable, "-c", code, str(pathlib.Path(common.__file__).parent)],
                               stdout=subprocess.PIPE, text=True)
    while "ready" not in process.stdout.readline():
        assert process.poll() is None
    time.sleep(0.5)
    pids = processes(process.pid) - {process.pid}
    assert len(pids) >= 3
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 5
    while (alive := [pid for pid in pids if pathlib.Path(f"/proc/{pid}").exists() and state(pid) != "Z"]):
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


def state(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_layers_are_named_and_never_weakened(monkeypatch, capsys):
    task = {"ground_truth": "def f(): return 1", "test_cases": {"a": "f()"}}
    with common.Scorer(unsafe=True, workers=1) as scorer:
        assert scorer.layer == "rlimits" and scorer.score([(task, "def f(): return True")])[0].tests == [True]
    assert "resource limits alone" in capsys.readouterr().out

    def no_walls(self):
        if self.layer != "rlimits":
            raise sandbox.LayerError("not allowed")
    monkeypatch.setattr(sandbox.Sandbox, "greet", no_walls)
    with pytest.raises(common.InputError, match="--unsafe-scorer"):
        common.Scorer().__enter__()


def test_walls_that_do_not_stand_are_found(child, monkeypatch):
    monkeypatch.setattr(sandbox, "PROBE", "def probe(): return {path!r} != ''")
    with sandbox.Sandbox(child.layer, 0) as other, pytest.raises(sandbox.LayerError, match="do not stand"):
        other.greet()


def test_parallel_scoring_keeps_order_and_graders_apart():
    tasks = [{"ground_truth": f"def f(): return {i}", "test_cases": {"a": "f()"}} for i in range(12)]
    with common.Scorer(workers=3, time_limit_s=LIMIT_S) as scorer:
        began = time.monotonic()
        answers = [f"def f():\n    if {i} % 3 == 0:\n        while True: pass\n    return {i}" for i in range(12)]
        scores = scorer.score(list(zip(tasks, answers)))
        assert [score.tests for score in scores] == [[i % 3 != 0] for i in range(12)]
        assert time.monotonic() - began < 4 * LIMIT_S + 2                                 # 4 loops, side by side
        assert threading.active_count() < 20
