"""Fixtures: a small untrained model, template tasks, trajectories made by the stages themselves."""
import importlib
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
sys.path.insert(0, str(ROOT))


def stage(number):
    """Import a numbered script as a module."""
    return importlib.import_module(next(ROOT.glob(f"{number:02d}_*.py")).stem)


def run(script, *arguments, cwd=ROOT, ranks=1, timeout=300, **options):
    """Run a stage as a user would; returns the finished process."""
    launcher = [sys.executable] if ranks == 1 else [sys.executable, "-m", "torch.distributed.run", "--standalone",
                                                    "--nproc-per-node", str(ranks)]
    return subprocess.run([*launcher, str(ROOT / script), *map(str, arguments)], cwd=cwd, text=True, timeout=timeout,
                          capture_output=True, **options)


def succeed(script, *arguments, **options):
    process = run(script, *arguments, **options)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def refused(number, *arguments):
    """Call a stage in this process with bad input; returns its one line (test_pipeline checks the exit status)."""
    import common
    with pytest.raises(common.InputError) as error:
        stage(number).main([str(argument) for argument in arguments])
    assert "\n" not in str(error.value)
    return str(error.value)


def read(path):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.fixture(scope="session")
def workspace(tmp_path_factory):
    """A folder with tasks.jsonl, demos.jsonl (scripted), model/ (tiny, a few steps) and offline.jsonl (sampled from the
    shipped base model, so that both successes and failures are in it)."""
    folder = tmp_path_factory.mktemp("workspace")
    succeed("01_generate_tasks.py", "--num-tasks", 40, "--split", "train", "--out", folder / "tasks.jsonl")
    succeed("02_rollout.py", "--tasks", folder / "tasks.jsonl", "--agent", "script", "--max-rounds", 8, "--out",
            folder / "demos.jsonl")
    succeed("04_train_policy.py", "--method", "sft", "--model", "tiny", "--trajectories", folder / "demos.jsonl", "--lr",
            3e-3, "--max-steps", 4, "--out", folder / "model")
    succeed("02_rollout.py", "--tasks", folder / "tasks.jsonl", "--agent", "tests/tiny", "--max-rounds", 8, "--samples", 3,
            "--max-new-tokens", 120, "--out", folder / "offline.jsonl")
    return folder


@pytest.fixture(scope="session")
def tiny(workspace):
    import common
    model, tokenizer = common.load_model(str(ROOT / "tests" / "tiny"), "cpu")
    return model.eval(), tokenizer
