"""Starts stages as forks of this process, which has imported torch and transformers once (4 s each time otherwise).

Reads {"argv", "cwd", "env", "stdout", "stderr"} from stdin, a JSON object a line, starts a process, and writes its id;
"wait PID" is answered with its exit status as Python's subprocess gives it."""
import json
import os
import pathlib
import runpy
import sys
import traceback

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import httpx  # noqa: E402, F401
import tokenizers  # noqa: E402, F401
import tqdm  # noqa: E402, F401
from torch.distributed import checkpoint, fsdp  # noqa: E402, F401
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402, F401
from transformers.models.llama import modeling_llama  # noqa: E402, F401

import common  # noqa: E402, F401
from lib import costs, memory, speakers, training, vision  # noqa: E402, F401


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
    """In the fork: a process as if started by `python argv`."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    os._exit(run_script(request["argv"]))


def main():
    for line in sys.stdin:
        if line.startswith("wait "):
            print(os.waitstatus_to_exitcode(os.waitpid(int(line.split()[1]), 0)[1]), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            become(json.loads(line))
        print(pid, flush=True)


if __name__ == "__main__":
    main()
