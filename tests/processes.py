"""Starts stages as forks of one process, which has imported torch and transformers once (4 s each time otherwise).

    python tests/processes.py SOCKET    listens at SOCKET until its standard input ends

One connection starts one process. The request is a line of JSON, {"argv", "cwd", "env"}. It comes with three file
descriptors: input, output and errors of the new process. The first line of the answer is the process id. The second
line comes when the process has ended: its exit status, as Python's subprocess gives it. The process stays a zombie
until the connection is closed, so that its id names nothing else."""
import gc
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


def import_what_stages_need():
    """Everything that a stage imports, at its top or later."""
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
    import httpx  # noqa: F401
    import jinja2  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import peft  # noqa: F401
    import PIL.Image  # noqa: F401
    import scipy.stats  # noqa: F401
    import tokenizers  # noqa: F401
    import tqdm  # noqa: F401
    from torch.distributed import checkpoint, fsdp  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401

    import common  # noqa: F401
    from lib import costs, memory, speakers, training, vision  # noqa: F401


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
    os.chdir(request["cwd"])
    os._exit(run_script(request["argv"]))


def answer(connection):
    """Start the process that a connection asks for, and say when it has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 3)
    while not request.endswith(b"\n"):
        request += connection.recv(1 << 16)
    pid = os.fork()
    if pid == 0:
        connection.close()
        become(json.loads(request), descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    connection.sendall(f"{pid}\n".encode())
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    connection.sendall(f"{status}\n".encode())
    connection.recv(1)                                               # until it is closed
    os.waitpid(pid, 0)


def main():
    address = sys.argv[1]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)                    # nobody waits for the forks that answer
    has_imported = False
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{address}.partial")
        listener.listen(64)
        os.rename(f"{address}.partial", address)
        while True:
            ready, _, _ = select.select([sys.stdin, listener], [], [])
            if sys.stdin in ready:
                os._exit(0)                                          # without the exit handlers of what was imported
            connection, _ = listener.accept()
            if not has_imported:
                import_what_stages_need()
                gc.freeze()                                          # so that a collection in a fork copies no pages
                has_imported = True
            with connection:
                if os.fork() == 0:
                    listener.close()
                    try:
                        answer(connection)
                    except BaseException:
                        traceback.print_exc(file=sys.__stderr__)
                        os._exit(1)
                    os._exit(0)


if __name__ == "__main__":
    main()
