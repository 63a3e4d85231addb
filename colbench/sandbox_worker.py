"""The scorer's child program (see sandbox.py): it confines itself and runs an answer. Standard library only."""
import _signal
import builtins
import contextlib
import ctypes
import gc
import importlib
import json
import marshal
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
import types

if not __package__:                                                 # a program: no package around it, no path to it
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from extract_code import imports_in, NO_PYTHON, parse, pieces_of, Statement, statements_of
    from values import decode, encode
    del sys.path[0], sys.modules["extract_code"], sys.modules["values"]
else:
    from colbench.extract_code import imports_in, NO_PYTHON, parse, pieces_of, Statement, statements_of
    from colbench.values import decode, encode

MEMORY_LIMIT = 1 << 30          # bytes of address space
FILE_LIMIT = 16 << 20           # bytes of a file, and of all files in the layer namespaces
RESULT_LIMIT = 1 << 20          # bytes of one encoded result
HEADER = struct.Struct("<II")   # bytes of the request (0: kill the running one), seconds of processor time
# Each module slows every fork. Not random, nor statistics, which imports it: it would draw a seed in each fork
PRELOADED = ("bisect calendar collections collections.abc copy dataclasses datetime decimal enum fractions functools "
             "heapq itertools math operator re sqlite3 string time typing")
# Words of the published scorer, which also finds them in comments and inside longer words
BLACKLIST = "import os", "from os", "import sys", "from sys", "sudo", "transformers", "exit(", "quit(", "argparse"
BUILTINS = dict(vars(builtins))
COMPREHENSIONS = "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"                      # names of their code objects
START_LIMIT_S, LOAD_LIMIT_S, LOADS_LIMIT_S = 60, 4, 20
CLEAN_LIMIT_S = 5               # to remove the files that a process leaves
EMPTY = 'cd "$0" && timeout "$1" sh -c "chmod -R u+rwx . && find . -mindepth 1 -delete"'
THREAD_LIMIT = 64               # threads of an answer
FINISHED = 64                   # exit code of a process that has made its calls
KILLED = 128                    # plus a signal: exit code of a process whose own process the signal has ended
LIMITS = ((resource.RLIMIT_AS, MEMORY_LIMIT), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, FILE_LIMIT),
          (resource.RLIMIT_NOFILE, 64))
WATCH_S = .01                   # seconds between two counts of threads, where the system does not count


def empty(folder, limit_s):
    """Remove the content of a folder, however deep it is. False if that takes longer than limit_s."""
    try:
        if not os.listdir(folder):
            return True
        shell = os.posix_spawn("/bin/sh", ["sh", "-c", EMPTY, folder, str(limit_s)], {})
        return os.waitpid(shell, 0)[1] == 0
    except OSError:
        return False


def run_calls(request, send, close):
    """Run the calls of a request: the first `renewed` of them in a process that is forked when the code has been
    compiled, the others in this one, or, if the first process left files, in a new one ("restart").
    close() puts up the last wall."""
    signal.setitimer(signal.ITIMER_PROF, request["limits"][0])      # of processor time; its signal ends the process
    try:
        pieces, broken = compiled_pieces(request), None
    except BaseException as error:
        pieces, broken = [], reason_of(error)
    numbers = range(len(request["calls"]))
    renewed = request["renewed"]
    if renewed:
        process = fork()
        if process == 0:
            close()
            run_each(numbers[:renewed], pieces, broken, request, send)
            os._exit(FINISHED)
        exit_code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if exit_code != FINISHED:
            os._exit(0 if exit_code >= 0 else KILLED - exit_code)
        if os.listdir():
            send("restart")
            return
    close()
    run_each(numbers[renewed:], pieces, broken, request, send)


def run_each(numbers, pieces, broken, request, send):
    """For each call execute the code, send "loaded", and send ["ok", value] or ["error", reason]. If the top level of
    the code fails, the call runs with what it had defined. A solution also sends imported_names(). Threads that still
    run would disturb the next call: then send "restart" and end."""
    imports, calls, (load_s, call_s) = request["imports"], request["calls"], request["limits"]
    signal.setitimer(signal.ITIMER_PROF, load_s)
    for number in numbers:
        module = sys.modules["answer"] = types.ModuleType("answer")
        fault = execute(pieces, module) or broken
        signal.setitimer(signal.ITIMER_PROF, call_s)
        send("loaded")
        if number == 0 and imports is None:
            send(imported_names(calls, module.__dict__, pieces))
        try:
            scope = scope_of_a_call(module, imports, calls[number])
            if request["given"]:
                values = {name: decode(data) for name, data in request["given"][number].items()}
                scope = {**scope, **values}
            result = ["ok", encode(eval(calls[number], scope))]
        except BaseException as error:
            # An example in the answer may have failed, too. That is the reason only if the call lacks a name.
            result = ["error", fault if fault and isinstance(error, NameError) else reason_of(error)]
        signal.setitimer(signal.ITIMER_PROF, load_s)
        send(result)
        if len(sys._current_frames()) > 1 and number + 1 < len(calls):
            send("restart")
            os._exit(0)


def compiled_pieces(request):
    """The code of an answer: a list of Statements for each piece. A solution that is Python is a single Statement: it
    stops at its first fault, as a program does."""
    code = request["code"]
    if request["imports"] is None:
        with contextlib.suppress(*NO_PYTHON):
            return [[Statement(parse(code))]]
    pieces = [statements_of(piece.nodes) for piece in pieces_of(code, set(request["tested"]))]
    return pieces or [[Statement(parse(code))]]


def scope_of_a_call(module, imports, call):
    """The globals in which a call is evaluated.

    A name that the solution imported means the same in the call, however the answer imported it, unless the answer
    defines it itself. Names without a module are tested: only the answer can define them, even if they are builtins.
    All other builtins are Python's own: no answer's `abs` takes part in a test."""
    imported, to_define = {}, set()
    for name, where, what in imports or ():
        if where is None:
            to_define.add(name)
        elif name not in module.__dict__ or origin(module.__dict__[name]):
            source = importlib.import_module(where)
            imported[name] = getattr(source, what) if what else source
    if imports is not None and isinstance(call, types.CodeType):
        imported |= {name: BUILTINS[name] for name in names_in(call) if name in BUILTINS and name not in to_define}
    scope = {**module.__dict__, **imported} if imported else module.__dict__
    hidden = {name for name in to_define if hasattr(builtins, name)}
    if not hidden:
        return scope
    others = {name: value for name, value in vars(builtins).items() if name not in hidden}
    return {**scope, "__builtins__": others}


def execute(pieces, module):
    """Execute pieces of code (lists of Statements) in a module. Returns why the first statement failed, or None. The
    other statements run in spite of it.

    Statements after the last definition of a piece are examples or a set-up. If they overwrite a function or a builtin
    with something that cannot be called (`sum = 6`, `total = total([1, 2])`), it is restored."""
    namespace, faults = module.__dict__, []
    for statements in pieces:
        end = max([number for number, statement in enumerate(statements, 1) if defines(statement)], default=0)
        faults += execute_each(statements[:end], namespace)
        before = dict(namespace)
        faults += execute_each(statements[end:], namespace)
        for name, value in list(namespace.items()):
            if callable(before.get(name)) and not callable(value):
                namespace[name] = before[name]
            elif name not in before and callable(getattr(builtins, name, None)) and not callable(value):
                del namespace[name]
    return faults[0] if faults else None


def execute_each(statements, namespace):
    """Execute statements one by one. Returns the reasons of those that failed."""
    faults = []
    for statement in statements:
        try:
            statement.execute(namespace)
        except BaseException as error:
            faults.append(reason_of(error))
    return faults


def defines(statement):
    """Whether a statement defines a function or class, or uses a lambda."""
    constants = getattr(statement.code, "co_consts", ())
    return any(isinstance(constant, types.CodeType) and constant.co_name not in COMPREHENSIONS
               for constant in constants)


def reason_of(error):
    try:
        text = str(error)[:200]
    except BaseException:
        text = ""
    return f"{type(error).__name__}: {text}"


def imported_names(calls, namespace, pieces):
    """[[name, module or None, attribute or None], …] of the names in the calls that the code imported or defined, in
    the order in which they are read. A name that it defines has no module. calls: code objects, or the texts of calls
    that are not Python."""
    names = dict.fromkeys(name for call in calls if isinstance(call, types.CodeType) for name in names_in(call))
    imports = imports_in([statement.module for piece in pieces for statement in piece])
    sent = []
    for name in names:
        if name in namespace and not name.startswith("__"):
            sent.append([name, *(source_of(name, namespace[name], imports) or (None, None))])
    return sent


def source_of(name, value, imports):
    """(module, attribute or None) that a name's value was imported from, according to the imports in the code
    (imports_in) or to the value itself. None if the code defines it."""
    for bound, where, what in imports:
        module = sys.modules.get(where)
        if bound == name and what is None and module is value:
            return where, None
        what = name if what == "*" else what
        if module and what and bound in (name, "*") and getattr(module, what, None) is value:
            return where, what
    return origin(value)


def names_in(code):
    """The names that a code object reads, including those in its lambdas and comprehensions."""
    names = list(code.co_names)
    for constant in code.co_consts:
        names += names_in(constant) if isinstance(constant, types.CodeType) else []
    return names


def origin(value):
    """(module, attribute or None) that a value says it was imported from. None if the code defines it."""
    where, what = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if isinstance(value, types.ModuleType):
        return what, None
    if (type(where) is type(what) is str and where in sys.modules and where != "answer" and
            getattr(sys.modules[where], what, None) is value):
        return where, what
    return None


def run_compat(request, send):
    """The published scorer's verdicts. Solution and answer are executed as if inside a function, so that their
    functions see neither imports nor helpers. A call has one second. Values are compared here, with ==."""
    def alarm(*_):
        raise TimeoutError

    def local_scope(source):
        scope = ({"__name__": "scorer"}, {})
        exec(source, *scope)
        return scope

    signal.signal(signal.SIGALRM, alarm)
    scopes = None
    for call in request["calls"]:
        send("loaded")
        try:
            signal.alarm(1)
            answer = published_code(request["code"])
            scopes = scopes or [local_scope(request["reference"]), local_scope(answer)]
            expected, value = (eval(call.strip(), *scope) for scope in scopes)
            result = ["ok", int(bool(expected is not None and expected == value))]
        except Exception as error:
            result = ["error", reason_of(error)]
        finally:
            signal.alarm(0)
        send(result)


def published_code(answer):
    """The text of an answer that the published scorer executes. Raises ValueError if it gives 0 at once.

    If ```python occurs anywhere, it is the text from the first one to the next ```. If ``` still occurs, it is the text
    between the first two. Nothing else is cut: prose without a fence is a syntax error."""
    if any(word in answer for word in BLACKLIST):
        raise ValueError("blacklist")
    if "```python" in answer:
        answer = answer.split("```python")[1].split("```")[0]
    if "```" in answer:
        answer = answer.split("```")[1]
    return answer


libc = ctypes.CDLL(None, use_errno=True)
KILL = 0x80000000
LOAD, JUMP_IF_EQUAL, JUMP_IF_AT_LEAST, AND, GIVE = 0x20, 0x15, 0x35, 0x54, 0x06
ALLOWED, DENIED = [(GIVE, 0, 0, 0x7FFF0000)], [(GIVE, 0, 0, 0x00050000 | 38)]             # 38: ENOSYS
IGNORED = [(GIVE, 0, 0, 0x00050000)]            # success, without effect
# Calls that are not in system_calls.txt, because the answer depends on their arguments: name, two numbers, (answer if
# one of the following alternatives holds, answer if none does), alternatives of ((argument, mask, value) …)
ONLY_IF, NOT_IF = (ALLOWED, DENIED), (DENIED, ALLOWED)
CONDITIONAL = (("clone", 56, 220, ONLY_IF, ((0, 0x10000, 0x10000),)),   # threads alone
               ("ioctl", 16, 29, ONLY_IF, *(((1, 0xFFFFFFFF, request),) for request in (
                   0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451))),   # is it a terminal, its size; descriptor flags
               ("fcntl", 72, 25, NOT_IF, ((1, 0xFFFFFFF8, 8),)),        # no signals by descriptors
               ("prctl", 157, 167, ONLY_IF, ((0, 0xFFFFFFFF, 15),)),    # a thread's name
               ("prlimit64", 302, 261, ONLY_IF, ((0, 0xFFFFFFFF, 0),)), # of this process
               ("socketpair", 53, 199, ONLY_IF, ((0, 0xFFFFFFFF, 1), (1, 0xF, 1))),     # for event loops; streams reach
               # nobody else. Early Landlock lets O_RDONLY | O_TRUNC pass, and any file with access mode 3
               ("openat", 257, 56, NOT_IF, ((2, 0x203, 0x200),), ((2, 0x3, 0x3),)),
               ("open", 2, None, NOT_IF, ((1, 0x203, 0x200),), ((1, 0x3, 0x3),)),
               # without times it would have to make the file's date today's: Path.touch makes the file where this fails
               ("utimensat", 280, 88, (DENIED, IGNORED), ((2, 0xFFFFFFFF, 0),)))
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def system_call_filter():
    """The seccomp program (classic BPF) for this machine's processor, and the memory it is in. Raises OSError for an
    unknown processor. All calls but those of system_calls.txt and CONDITIONAL are answered with "no such call".

    Calls that set modes, owners and dates of files succeed without effect, because shutil.copy and shelve need them:
    Landlock does not restrict them, and the filter does not see whose file it is."""
    machine = os.uname().machine
    if machine not in MACHINES:
        raise OSError(f"no list of system calls for {machine}")
    column, audit_arch = MACHINES[machine]
    program = [(LOAD, 0, 0, 4), (JUMP_IF_EQUAL, 1, 0, audit_arch), (GIVE, 0, 0, KILL), (LOAD, 0, 0, 0)]
    program += search(verdict_ranges(column))
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *instruction) for instruction in program))
    return struct.pack("<HxxxxxxQ", len(program), ctypes.addressof(instructions)), instructions


def verdict_ranges(column):
    """[(first number of a range of system calls, the instructions that answer them), …] in ascending order, from 0."""
    verdicts = {}
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "system_calls.txt")) as file:
        for _, *numbers in map(str.split, file.readlines()[1:]):
            if numbers[column] != "-":
                verdicts[int(numbers[column])] = IGNORED if numbers[2:] else ALLOWED
    for _, x86, arm, answers, *alternatives in CONDITIONAL:
        if (number := (x86, arm)[column]) is not None:
            verdicts[number] = by_arguments(*answers, alternatives)
    ranges = [(0, DENIED)]
    for number in range(max(verdicts) + 2):
        verdict = verdicts.get(number, DENIED)
        if verdict != ranges[-1][1]:
            ranges.append((number, verdict))
    return ranges


def by_arguments(when_any, when_none, alternatives):
    """The instructions that answer a call by its arguments (see CONDITIONAL)."""
    block = []
    for tests in alternatives:
        for left, (argument, mask, value) in zip(range(len(tests) - 1, -1, -1), tests):
            block += [(LOAD, 0, 0, 16 + 8 * argument), (AND, 0, 0, mask), (JUMP_IF_EQUAL, 0, 3 * left + 1, value)]
        block += when_any
    return block + when_none


def search(ranges):
    """Instructions that find the range of the loaded number by bisection. The kernel tries each number when a process
    is confined, and a linear search would take four times as long."""
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    below, above = search(ranges[:middle]), search(ranges[middle:])
    return [(JUMP_IF_AT_LEAST, len(below), 0, ranges[middle][0]), *below, *above]


def check(result, what):
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def readable_paths(site_packages):
    """Paths that untrusted code may read: libraries of the interpreter and the system, packages, a few devices."""
    prefixes = {sys.base_prefix, sys.base_exec_prefix, "/usr", "/usr/local", "/"}
    paths = {os.path.join(prefix, lib) for prefix in prefixes for lib in ("lib", "lib64")} | set(site_packages)
    paths |= {"/nix/store", "/etc/ld.so.cache", "/usr/share/zoneinfo", "/dev/null", "/dev/zero", "/dev/urandom",
              "/dev/random"}
    paths = sorted(filter(os.path.exists, paths))
    return [path for path in paths if not any(path.startswith(parent + "/") for parent in paths)]


def mount(source, target, kind, flags, data=None):
    check(libc.mount(*(text and text.encode() for text in (source, target, kind)), ctypes.c_ulong(flags),
                     data and data.encode()), f"mount {target}")


def own_namespaces():
    return {os.readlink(f"/proc/self/ns/{name}") for name in ("ipc", "mnt", "net", "pid")}


def enter_namespaces(paths, work):
    """Move into new namespaces, and a file system of `paths`, read-only, and `work`. It forks: the caller returns as
    process 1 of its own tree. Raises OSError if the system does not allow it."""
    user, group, before = os.geteuid(), os.getegid(), own_namespaces()
    new_user = 0 if user == 0 else 0x10000000
    check(libc.unshare(new_user | 0x20000 | 0x20000000 | 0x40000000 | 0x8000000 | 0x4000000), "unshare")
    if new_user:
        for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
    child = fork()
    if child:                                                   # stands between the caller and process 1, and waits
        os.closerange(0, 64)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)                      # PR_SET_PDEATHSIG
    if not before.isdisjoint(own_namespaces()):
        raise OSError("a namespace is not its own")

    sources = {path: os.path.realpath(path) for path in paths}
    mount(None, "/", None, 0x44000)                             # private, recursive
    mount("tmpfs", "/tmp", "tmpfs", 0x6, "size=1m,mode=755")
    os.mkdir("/tmp/old")
    check(libc.syscall(155 if os.uname().machine == "x86_64" else 41, b"/tmp", b"/tmp/old"), "pivot_root")
    os.chdir("/")
    for path in paths:
        source = "/old" + sources[path]
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.mkdir(path) if os.path.isdir(source) else os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
        mount(source, path, None, 0x5000)                       # bind, recursive
        read_only = struct.pack("<QQQQ", 0x3 | (0 if path.startswith("/dev/") else 0x4), 0, 0, 0)
        if libc.syscall(442, -100, path.encode(), 0x8000, read_only, len(read_only)) < 0:       # mount_setattr
            kept = os.statvfs(path).f_flag & 0xC0F              # before Linux 5.12
            mount(None, path, None, 0x1023 | kept)
    check(libc.umount2(b"/old", 2), "umount")
    os.rmdir("/old")
    os.mkdir(work)
    mount(None, "/", None, 0x27)                                # read-only
    fresh_work_dir(work)


def fresh_work_dir(work):
    mount("tmpfs", work, "tmpfs", 0x6, f"size={FILE_LIMIT},nr_inodes=1000,mode=1777")
    os.chdir(work)


def landlock_rules(paths, work):
    """A descriptor of Landlock rules: `paths` to read, `work` to write. Raises OSError without Landlock."""
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


def fork():
    """os.fork(). If a container has no process left, another answer has started threads, and will soon end."""
    until = time.monotonic() + START_LIMIT_S / 2
    while True:
        try:
            return os.fork()
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(.02)


def free_user():
    """The number of a user without processes, so that the system counts only an answer's threads. None if the caller
    is not allowed to take it (root is)."""
    with contextlib.suppress(OSError):
        with open("/proc/self/uid_map") as file:
            lines = [list(map(int, line.split())) for line in file]
        end = min(1 << 31, max(first + size for first, _, size in lines))
        user = end - 2 - int.from_bytes(os.urandom(4), "little") % max(1, min(end // 16, 1 << 20))
        if os.geteuid() == 0 and user > 0:
            os.setresuid(user, -1, -1)
            os.setresuid(0, -1, -1)
            return user
    return None


class Walls:
    """The isolation of a layer, shared by all requests. Raises OSError or AttributeError (not Linux) if the system does
    not allow it.

    layer: its name
    program: the filter of system calls, and the memory it is in
    last_steps: the calls, as in confinement, that are made just before the code of an answer runs
    user: the real user that answers run as, see free_user
    rules: a descriptor of Landlock rules, in that layer
    null: a descriptor of /dev/null
    steps: see confinement"""

    def __init__(self, layer, paths, work):
        self.layer, self.last_steps = layer, []
        if layer == "rlimits":
            return
        libc.prctl(1, signal.SIGKILL, 0, 0, 0)
        self.program = system_call_filter()
        self.last_steps.append((libc.prctl, (1, signal.SIGKILL.value, 0, 0, 0)))        # PR_SET_PDEATHSIG
        self.last_steps.append((libc.prctl, (22, 2, self.program[0], 0, 0)))            # PR_SET_SECCOMP
        self.user = free_user()
        if layer == "landlock":
            libc.prctl(36, 1, 0, 0, 0)                          # PR_SET_CHILD_SUBREAPER: end_all waits for all
            self.rules = landlock_rules(paths, work)
        else:
            enter_namespaces(paths, work)


def confinement(walls):
    """The calls, (function, arguments), by which a forked process gives up all that it does not need. The server
    prepares them: a fork that only makes them writes to fewer pages of memory."""
    steps = [(resource.setrlimit, (what, (limit, limit))) for what, limit in LIMITS]
    if walls.layer == "rlimits":
        return steps
    steps.append((libc.prctl, (1, signal.SIGKILL.value, 0, 0, 0)))          # PR_SET_PDEATHSIG: end with the server
    steps += thread_limit(walls)
    if walls.layer == "namespaces" and walls.user is not None:
        steps.append((os.setgroups, ([],)))
        steps.append((os.setresgid, (65534, 65534, 65534)))
        steps.append((os.setresuid, (-1, 65534, 65534)))
    steps.append((libc.capset, (struct.pack("<Ii", 0x20080522, 0), bytes(24))))
    steps.append((libc.prctl, (38, 1, 0, 0, 0)))                            # PR_SET_NO_NEW_PRIVS
    if walls.layer == "landlock":
        steps.append((libc.syscall, (446, walls.rules, 0)))
        steps.append((os.close, (walls.rules,)))
    return steps


def thread_limit(walls):
    """The calls after which the system refuses more than THREAD_LIMIT threads; [] if it would also count other
    processes. It counts by the real user, and since Linux 5.14 for each user namespace. It never limits root, so the
    real user becomes a number of its own."""
    release = tuple(map(int, os.uname().release.split("-")[0].split(".")[:2]))
    if walls.user is None and (walls.layer == "landlock" or release < (5, 14)):
        return []
    limit = THREAD_LIMIT + (3 if walls.user is None else 1)     # with the server and the process that waits for it
    steps = [] if walls.user is None else [(os.setresuid, (walls.user, -1, -1))]
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    return [*steps, (resource.setrlimit, (resource.RLIMIT_NPROC, (limit, limit)))]


def take(steps):
    """Make the calls of confinement."""
    for function, arguments in steps:
        if function(*arguments):                                # Python's functions return None, the system's 0
            raise OSError(f"a wall does not stand: {function}{arguments}")


def serve_one(walls, length, seconds, requests, results):
    """Called in the fork, which it ends: confine it, read the request, and answer it."""
    as_json = json.JSONEncoder().encode                         # an answer may replace json.dumps
    try:
        signal.set_wakeup_fd(-1)
        _signal.signal(signal.SIGCHLD, _signal.SIG_DFL)         # signal.signal writes to 50 more pages of memory
        os.setsid()
        for descriptor in (0, 1, 2):
            os.dup2(walls.null, descriptor)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        take(walls.steps)
        with open(requests, "rb") as file:
            request = marshal.loads(file.read(length))
        os.closerange(3, results)
        os.closerange(results + 1, 64)

        def send(message):
            data = as_json(message).encode() + b"\n"
            if len(data) > RESULT_LIMIT:
                data = b'["error", "a result that is too large"]\n'
            while data:
                data = data[os.write(results, data):]

        send("ready")
        if request["reference"] is None:
            run_calls(request, send, close=lambda: take(walls.last_steps))
        else:
            take(walls.last_steps)
            run_compat(request, send)
    finally:
        os._exit(0)


def end_all(walls, child):
    """Kill all that a request left running. Returns [the signal that ended its process or 0, seconds of processor time
    of the process]."""
    if walls.layer == "namespaces" and os.getpid() == 1:
        kill(-1)                                                # all others of its own namespace of processes
    else:
        kill(-child)
        kill(child)
    _, status, usage = os.wait4(child, 0)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    exit_code = os.waitstatus_to_exitcode(status)
    last_signal = -exit_code if exit_code < 0 else max(0, exit_code - KILLED)
    return [last_signal, usage.ru_utime + usage.ru_stime]


def kill(pid):
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def forget_files(walls, work):
    """Remove the files that a request left in its folder. False if that takes too long."""
    if walls.layer != "namespaces":
        return empty(work, CLEAN_LIMIT_S)
    if os.listdir(work):
        os.chdir("/")
        check(libc.umount2(work.encode(), 2), "umount")
        fresh_work_dir(work)
    return True


def wait_for_end(walls, child, bell):
    """Wait until the request's process ends, has too many threads, or is to be killed."""
    watch_s = WATCH_S if walls.layer == "landlock" and walls.user is None else None
    while True:
        ready = select.select([0, bell], [], [], watch_s)[0]
        if bell in ready:
            os.read(bell, 4096)
            if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return
        elif ready:                                             # an order to kill, or the caller has gone
            os.read(0, HEADER.size)
            return
        elif num_threads(child) > 2 + THREAD_LIMIT:             # each of two processes has a main thread
            return


def num_threads(child):
    """The number of threads of a process and of the processes that it has forked."""
    number = len(os.listdir(f"/proc/{child}/task"))
    with contextlib.suppress(OSError):                              # it has ended
        with open(f"/proc/{child}/task/{child}/children") as file:
            number += sum(len(os.listdir(f"/proc/{process}/task")) for process in file.read().split())
    return number


def main():
    layer, work, *site_packages = sys.argv[1:]
    sys.argv, sys.orig_argv = ["answer.py"], ["python", "answer.py"]            # what an answer sees
    control, paths = socket.socket(fileno=0), readable_paths(site_packages)
    try:
        walls = Walls(layer, paths, work)
    except (OSError, AttributeError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        sys.exit(1)
    os.chdir(work)
    sys.path += site_packages
    for name in PRELOADED.split():
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    walls.null = os.open(os.devnull, os.O_RDWR)
    walls.steps = confinement(walls)
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
        length, seconds = HEADER.unpack(header)
        child = fork()
        if child == 0:
            serve_one(walls, length, seconds, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        wait_for_end(walls, child, bell)
        end = end_all(walls, child)
        if not forget_files(walls, work):                       # Sandbox tries again at its end
            work = os.environ["HOME"] = os.environ["TMPDIR"] = work + "0"
            os.mkdir(work)
            os.chdir(work)
            if layer == "landlock":
                os.close(walls.rules)
                walls.rules = landlock_rules(paths, work)
                walls.steps = confinement(walls)
        os.write(1, json.dumps({"end": end}).encode() + b"\n")


if __name__ == "__main__":
    main()
