"""Starts stages as forks of one process, which has imported torch and transformers once (4 s each time otherwise).

    python tests/processes.py SOCKET    listens at SOCKET until its standard input ends

One connection starts one process. The request is a line of JSON, {"argv", "cwd", "env", "files"}, with the paths of
input, output and errors. The first line of the answer is the process id. The second one comes when the process has
ended: its exit status, as Python's subprocess gives it. The process stays a zombie until the connection is closed, so
that its id names nothing else."""
import contextlib
import functools
import gc
import importlib
import json
import os
import pathlib
import runpy
import socket
import socketserver
import sys
import threading
import traceback


def start(address, argv, cwd, environment, files):
    """Ask the server at `address` for a process; returns the lines of its answer, as a file."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        request = {"argv": argv, "cwd": cwd, "env": environment, "files": files}
        connection.sendall(json.dumps(request).encode() + b"\n")
        return connection.makefile("r")


@functools.cache
def prepare_what_stages_need():
    """Import everything that a stage imports, at its top or later, and load a model: the first one takes 0.07 s more
    than others. Scorers start one worker, as on a machine with one core: a second one, two programs more, takes 0.2 s
    a stage (test_sandbox.py and test_scorer.py are about several)."""
    root = pathlib.Path(__file__).resolve().parents[1]
    sys.path.insert(0, str(root))
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    from colbench import scorer
    from lib.models import load_model
    for name in ("jinja2", "matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg", "matplotlib.pyplot",
                 "openai", "peft", "PIL.Image", "tokenizers", "tqdm", "torch.distributed.fsdp",
                 "torch.distributed.checkpoint.state_dict", "transformers.models.llama.modeling_llama", "common",
                 *(f"lib.{path.stem}" for path in root.glob("lib/*.py"))):
        importlib.import_module(name)
    load_model(str(root / "models" / "tiny"), "cpu")
    scorer.num_cores = lambda: 1
    gc.freeze()                                                      # so that a collection in a fork copies no pages


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


def become(request):
    """In a fork: a process as if started by `python argv`."""
    for number, path in enumerate(request["files"]):                 # output and errors may be one file
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND if number else os.O_RDONLY), number)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    os._exit(run_script(request["argv"]))


class Connection(socketserver.StreamRequestHandler):
    """What a connection asks for, in a thread of its own."""

    def handle(self):
        request = json.loads(self.rfile.readline())
        if (pid := os.fork()) == 0:
            try:
                become(request)
            finally:                                                 # of what is wrong in `become` itself
                traceback.print_exc(file=sys.__stderr__)
                os._exit(1)
        with contextlib.suppress(ConnectionError):                   # nobody listens any more
            self.wfile.write(f"{pid}\n".encode())
            end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            status = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
            self.wfile.write(f"{status}\n".encode())
            self.rfile.read()                                        # until it is closed
        os.waitpid(pid, 0)


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 64

    def verify_request(self, request, client_address):
        prepare_what_stages_need()
        return True


def end_with_input():
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    address = sys.argv[1]
    server = Server(f"{address}.partial", Connection)
    os.rename(f"{address}.partial", address)
    threading.Thread(target=end_with_input, daemon=True).start()
    server.serve_forever(poll_interval=0.05)
