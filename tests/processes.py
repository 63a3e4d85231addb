"""Starts stages as forks of one process, which has imported torch and transformers once (4 s each time otherwise).

    python tests/processes.py SOCKET    listens at SOCKET until its standard input ends

One connection starts one process. The request is a line of JSON, {"argv", "cwd", "env"}. It comes with three file
descriptors: input, output and errors of the new process. The first line of the answer is the process id. The second
line comes when the process has ended: its exit status, as Python's subprocess gives it. The process stays a zombie
until the connection is closed, so that its id names nothing else.

A fork of this process takes 0.04 s of processor time, so a start is one fork, and what every stage does at its begin
is done here once."""
import contextlib
import gc
import importlib
import json
import os
import pathlib
import runpy
import select
import signal
import socket
import sys
import traceback


def start(address, argv, cwd, environment, descriptors):
    """Ask the server at `address` for a process; returns the lines of its answer, as a file."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        request = json.dumps({"argv": argv, "cwd": cwd, "env": environment}).encode() + b"\n"
        sent = socket.send_fds(connection, [request], descriptors)
        connection.sendall(request[sent:])
        return connection.makefile("r")


def prepare_what_stages_need():
    """Import everything that a stage imports, at its top or later, and load a model: the first one takes 0.07 s more
    than others. Scorers start one worker, as on a machine with one core: a second one, two programs more, takes 0.2 s
    a stage (test_sandbox.py and test_scorer.py are about several)."""
    root = pathlib.Path(__file__).resolve().parents[1]
    sys.path.insert(0, str(root))
    import jinja2  # noqa: F401
    import matplotlib.backends.backend_agg  # noqa: F401
    import matplotlib.backends.backend_svg  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import openai  # noqa: F401
    import peft  # noqa: F401
    import PIL.Image  # noqa: F401
    import scipy.stats  # noqa: F401
    import tokenizers  # noqa: F401
    import torch.distributed.checkpoint.state_dict  # noqa: F401
    import tqdm  # noqa: F401
    from torch.distributed import checkpoint, fsdp  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401

    import common  # noqa: F401
    from colbench import scorer
    from lib.models import load_model
    for path in root.glob("lib/*.py"):
        importlib.import_module(f"lib.{path.stem}")
    load_model(str(root / "models" / "tiny"), "cpu")
    scorer.num_cores = lambda: 1


def run_script(argv):
    """Run a script, or a module (-m NAME), as `python argv` does; returns its exit status."""
    status = 0
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = argv
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def become(request, descriptors):
    """In a fork: a process as if started by `python argv`."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.environ.clear()
    os.environ.update(request["env"])
    if request["argv"][0] == "scripts/study.py":                     # its stages are forks, too
        sys.executable = os.environ["PYTHON_EXEC"]
    os.chdir(request["cwd"])
    os._exit(run_script(request["argv"]))


def begin(connection, files_of_server):
    """Start the process that a connection asks for; returns its id, None where nothing is asked for."""
    request, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 3)
    while request and not request.endswith(b"\n"):
        more = connection.recv(1 << 16)
        request = request + more if more else b""
    pid = os.fork() if request else None
    if pid == 0:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for file in files_of_server:
                file.close()
            become(json.loads(request), descriptors)
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
            os._exit(1)
    for descriptor in descriptors:
        os.close(descriptor)
    return pid


def tell(connection, number):
    """Send a line, or nothing where nobody listens any more."""
    with contextlib.suppress(ConnectionError):
        connection.sendall(f"{number}\n".encode())


def main():
    address = sys.argv[1]
    running, ended = {}, {}                                          # {connection: process id}
    is_prepared = False
    bell, ring = socket.socketpair()                                 # it rings when a process has ended
    ring.setblocking(False)
    signal.set_wakeup_fd(ring.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.partial")
    listener.listen(64)
    os.rename(f"{address}.partial", address)
    while True:
        ready, _, _ = select.select([sys.stdin, listener, bell, *ended], [], [])
        if sys.stdin in ready:
            os._exit(0)                                              # without the exit handlers of what was imported
        if listener in ready:
            if not is_prepared:
                gc.disable()
                prepare_what_stages_need()
                gc.freeze()                                          # so that a collection in a fork copies no pages
                gc.enable()
                is_prepared = True
            connection, _ = listener.accept()
            pid = begin(connection, [bell, ring, listener, connection, *running, *ended])
            if pid is None:
                connection.close()
            else:
                tell(connection, pid)
                running[connection] = pid
        if bell in ready:
            bell.recv(1 << 16)
            for connection, pid in list(running.items()):
                end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
                if end is not None:
                    tell(connection, end.si_status if end.si_code == os.CLD_EXITED else -end.si_status)
                    ended[connection] = running.pop(connection)
        for connection in ready:
            if connection in ended:                                  # it is closed: nothing else can be read from it
                os.waitpid(ended.pop(connection), 0)
                connection.close()


if __name__ == "__main__":
    main()
