"""Fixtures: a small untrained model, template tasks, trajectories made by the stages themselves."""
import contextlib
import fcntl
import functools
import gc
import importlib
import io
import itertools
import json
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pathlib
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import time
from unittest import mock

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
BASE = ROOT / "models" / "tiny"
os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
sys.path.insert(0, str(ROOT))


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a GPU; skipped where there is none")
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""                      # the same on every machine
    gc.disable()                                                     # until all is imported, which is kept anyway


def pytest_collection_modifyitems(items):
    """The longest files come first, so that no worker is left alone with one at the end."""
    longest = [f"test_{name}.py" for name in (
        "real_weights", "pipeline", "elastic", "sandbox", "readme", "lora", "training", "sql", "forks", "servers", "05",
        "03", "04", "02", "report", "report_page", "study", "pages", "bad_input")]
    items.sort(key=lambda item: longest.index(item.path.name) if item.path.name in longest else len(longest))


def pytest_collection_finish():
    from colbench import scorer
    scorer.num_cores = lambda: 1                                     # as in become(): a second worker takes 0.3 s
    gc.freeze()                                                      # no collection looks at what is imported by now
    gc.enable()


def pytest_unconfigure():
    gc.unfreeze()                                                    # or libraries report at the exit what they leak


def stage(number):
    """Import a numbered script as a module."""
    return importlib.import_module(next(ROOT.glob(f"{number:02d}_*.py")).stem)


IMPORTED = [                                                         # what a stage imports, at its top or later
    "jinja2", "matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg", "matplotlib.pyplot", "openai",
    "peft", "PIL.Image", "tokenizers", "tqdm", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict",
    "transformers.models.llama.modeling_llama", "common", "conftest",
    *(f"lib.{path.stem}" for path in ROOT.glob("lib/*.py"))]


# A process's status can be read once: in ended(), or where another thread starts a process, which looks at all of them
STATUSES = threading.Lock()


@functools.cache
def forks():
    """multiprocessing with a running server of forks, which has imported torch and transformers once (4 s each time
    otherwise)."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(IMPORTED)
    with mock.patch.dict(os.environ, PYTHONPATH=":".join(sys.path)):
        multiprocessing.forkserver.ensure_running()
    return found


def become(run, argv, environment, output):
    """In a fork: run(argv) as in a process of its own. Its scorers start one worker, as on a machine with one core:
    a second one takes 0.2 s (test_sandbox.py and test_scorer.py are about several)."""
    for number, ending in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{output}.{ending}", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC), number)
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


def begin(script, *arguments, folder, rank=0, environment=None, run=run_program):
    """Start a stage, or a module ("examples.grpo"), in a process of its own, its output in files of `folder`.
    Returns the multiprocessing.Process. run: what is called with the words of the command."""
    program = [str(ROOT / script)] if script.endswith(".py") else ["-m", script]
    argv, environment = [*program, *map(str, arguments)], {**os.environ, **(environment or {})}
    with STATUSES:
        process = forks().Process(target=become, args=(run, argv, environment, f"{folder}/{rank}"))
        process.start()
    return process


def ended(process):
    """The exit status of a process once it has ended, as Python's subprocess gives it."""
    multiprocessing.connection.wait([process.sentinel])
    with STATUSES:
        process.join()
        return process.exitcode


def killed(process):
    """The exit status of a process after kill -9."""
    process.kill()
    return ended(process)


def begin_ranks(ranks, script, *arguments, folder):
    """Start a stage on `ranks` processes as torchrun does; returns them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    begun = []
    for rank in range(ranks):
        environment = {**group, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
        begun.append(begin(script, *arguments, folder=folder, rank=rank, environment=environment))
    return begun


def run(script, *arguments, ranks=1):
    """Run a stage as a user would, on `ranks` processes; returns the finished (first) one."""
    with tempfile.TemporaryDirectory() as folder:
        statuses = [ended(process) for process in begin_ranks(ranks, script, *arguments, folder=folder)]
        texts = [pathlib.Path(folder, f"0.{name}").read_text() for name in ("out", "err")]
        return subprocess.CompletedProcess([script, *arguments], max(statuses, key=abs), *texts)


def succeed(script, *arguments, **options):
    process = run(script, *arguments, **options)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def call(program, *arguments):
    """Call a stage (its number), or a fork or script (its module), in this process; returns what it printed."""
    from lib import runtime
    module = stage(program) if isinstance(program, int) else program
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            module.main([str(argument) for argument in arguments])
    finally:
        runtime.Output.lock = None                                   # as its end does: the output is locked no more
    return printed.getvalue()


def refused(program, *arguments):
    """Call a program as `call` does with bad input; returns its one line (test_pipeline checks the exit status)."""
    from lib.runtime import error_text, InputError
    with pytest.raises((InputError, OSError)) as error:
        call(program, *arguments)
    line = error_text(error.value)
    assert line and "\n" not in line and len(line) < 2000
    return line


def Partial(out, rank=0, ranks=1):
    """The path of a rank's partial file of an output (runtime.RowFile)."""
    return pathlib.Path(f"{out}.partial.{rank}of{ranks}")


def read(path):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write(path, rows):
    """Write rows as JSON lines, which may be given as texts; returns the path."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@contextlib.contextmanager
def dies(owner, name, calls=0):
    """Inside, what is called `name` of `owner` works so many times; then it ends the program, as a kill would."""
    work, numbers = getattr(owner, name), itertools.count()

    def work_or_die(*arguments, **options):
        if next(numbers) >= calls:
            raise KeyboardInterrupt
        return work(*arguments, **options)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, work_or_die)
        yield


def turns(*texts):
    """What is said in a dialogue, which begins with the user."""
    return [{"role": role, "content": text} for role, text in zip(itertools.cycle(("user", "assistant")), texts)]


FUNCTION = {"problem_description": "?", "ground_truth": "def f(n):\n    return n",
            "test_cases": {"a": "f(1)", "b": "f(2)"}}


def trajectory(task_id, answer, **more):
    """A dialogue of one turn about FUNCTION."""
    from colbench import backend
    history = turns("?", f"{backend.MARKER}\n{answer}")
    return {"task_id": task_id, "task": FUNCTION, "answer": answer, "dialogue_history": history, **more}


def made_once(tmp_path_factory, name, make):
    """A folder that all workers of pytest read. The first one that asks fills it by make(folder), the others wait."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder, whole = base / name, base / f"{name}.whole"
    with open(base / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not whole.exists():
            folder.mkdir(exist_ok=True)
            make(folder)
            whole.touch()
    return folder


@pytest.fixture(scope="session")
def workspace(tmp_path_factory):
    """A folder with tasks.jsonl, demos.jsonl (scripted), model/ (tiny, a few steps) and offline.jsonl (sampled from the
    shipped base model, so that both successes and failures are in it). Tests do not write into it."""
    def make(folder):
        tasks, demos = folder / "tasks.jsonl", folder / "demos.jsonl"
        call(1, "--num-tasks", 24, "--split", "train", "--out", tasks)
        call(2, "--tasks", tasks, "--agent", "script", "--max-rounds", 8, "--out", demos)
        call(4, "--method", "sft", "--model", "tiny", "--trajectories", demos, "--lr", 3e-3, "--max-steps", 4, "--out",
             folder / "model")
        call(2, "--tasks", tasks, "--agent", "models/tiny", "--max-rounds", 8, "--samples", 3, "--max-new-tokens", 120,
             "--out", folder / "offline.jsonl")
    return made_once(tmp_path_factory, "workspace", make)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder with tasks.jsonl and demos.jsonl, of the scripted agent; a task's first dialogue is a success."""
    def make(folder):
        tasks, demos = folder / "tasks.jsonl", folder / "demos.jsonl"
        call(1, "--num-tasks", 12, "--out", tasks)
        call(2, "--tasks", tasks, "--agent", "script-informed", "--samples", 3, "--out", demos)
        write(demos, [{**row, "reward": float(row["sample"] == 0)} for row in read(demos)])
    return made_once(tmp_path_factory, "data", make)


def policy_flags(workspace, method, out, *more):
    """Flags of 04 for two steps from the shipped base model; the last of a flag given twice counts."""
    return ["--method", method, "--trajectories", workspace / "offline.jsonl", "--model", BASE,
            "--lr", 1e-4, "--max-steps", 2, "--out", out, *more]


def job_of(out, run=None, **flags):
    """The training.Job of 03 with an output and flags by name, trajectories "FILE" and --model models/tiny.
    run: a Runtime in place of its own."""
    from lib.training import Job
    words = ["--trajectories", "FILE", "--model", str(BASE), "--out", str(out)]
    job = Job({**vars(stage(3).parse_args(words)), **flags}, [])
    job.run = run or job.run
    return job


def critic_note(score):
    """The critic.json of a critic with a head."""
    return {"score": score, "normalize": "none", "critic_sees_c": True, "reference": "models/tiny"}


def load_critic(folder="untrained", domain="backend", reference_sees_c=None, model=BASE, load=None):
    """The critic of a folder, or the untrained one of a model, loaded, for tasks of a domain (its name)."""
    import common
    from colbench import DOMAINS
    from lib.logps import load_whole
    critic = common.open_critic(str(folder), str(model), DOMAINS[domain], reference_sees_c)
    critic.load(load or load_whole("cpu"), 4096)
    return critic


def trained_critic(workspace, tmp_path_factory, num_steps, *options):
    def make(folder):
        call(3, "--trajectories", workspace / "offline.jsonl", "--model", BASE, "--lr", 1e-3, "--max-steps", num_steps,
             *options, "--out", folder / "critic")
    return made_once(tmp_path_factory, "_".join(["critic", str(num_steps), *options]), make) / "critic"


@pytest.fixture(scope="session")
def critic(workspace, tmp_path_factory):
    """The folder of a critic after five steps. Tests do not write into it."""
    return trained_critic(workspace, tmp_path_factory, 5)


@pytest.fixture(scope="session")
def regression_critic(workspace, tmp_path_factory):
    return trained_critic(workspace, tmp_path_factory, 2, "--score", "regression")


@pytest.fixture(scope="session")
def value_critic(workspace, tmp_path_factory):
    return trained_critic(workspace, tmp_path_factory, 2, "--score", "value", "--held-out-frac", "0")


@pytest.fixture(scope="session")
def tiny():
    from lib.load import load_model
    model, tokenizer = load_model(str(BASE), "cpu")
    return model.eval(), tokenizer


@pytest.fixture
def serve(tmp_path_factory):
    """serve(*flags, port=0) starts a server; returns {"url", "port", "log", "process"}. All end with the test."""
    running = []

    def serve(*flags, port=0):
        folder = tmp_path_factory.mktemp("server")
        process = begin("tests/server.py", "--log", folder / "log", "--port", port, *flags, folder=folder)
        running.append(process)
        while not (folder / "0.out").exists() or not (text := (folder / "0.out").read_text()).endswith("\n"):
            assert process.is_alive(), (folder / "0.err").read_text()
            time.sleep(0.02)
        return {"url": f"http://127.0.0.1:{int(text)}/v1", "port": int(text), "log": folder / "log", "process": process}
    yield serve
    for process in running:
        killed(process)
