"""Programs as forks of a server that has imported torch and transformers once (4 s each time otherwise)."""
import functools
import gc
import multiprocessing.forkserver
import os
import pathlib
import runpy
import sys
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[1]
IMPORTED = [                                                         # what a stage imports, at its top or later
    "jinja2", "matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg", "matplotlib.pyplot", "openai",
    "peft", "PIL.Image", "tokenizers", "tqdm", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict",
    "transformers.models.llama.modeling_llama", "common", "processes",
    *(f"lib.{path.stem}" for path in ROOT.glob("lib/*.py"))]


@functools.cache
def context():
    """That of multiprocessing whose server of forks runs."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(IMPORTED)
    with mock.patch.dict(os.environ, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}"):
        multiprocessing.forkserver.ensure_running()
    return found


def start(run, argv, environment, output, errors):
    """Start run(argv) in a process, with what it prints in two files; returns a multiprocessing.Process."""
    process = context().Process(target=become, args=(run, argv, environment, output, errors))
    process.start()
    return process


def become(run, argv, environment, output, errors):
    """In a fork: run(argv) as in a process of its own. Its scorers start one worker, as on a machine with one core:
    a second one takes 0.2 s (test_sandbox.py and test_scorer.py are about several)."""
    for number, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    gc.freeze()                                                      # a collection copies no pages of the server
    from colbench import scorer
    scorer.num_cores = lambda: 1
    run(argv)


def run_program(argv):
    """Run a script, or a module (-m NAME), as `python argv` does."""
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")
