"""Weights of model folders, steps of trainings, and log-probabilities, as tests compare them; ways to load a folder."""
import pathlib

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import read
from lib.load import load_model, Sharding
from lib.logps import load_sharded
from lib.runtime import InputError, start
from lib.tokens import encode


def weights(folder):
    """{name: tensor} of a model folder."""
    return load_file(pathlib.Path(folder, "model.safetensors"))


def load_split(folder, sharding=None, **options):
    """The action model of a folder as 03 and 04 load it."""
    return load_sharded(str(folder), start(0), sharding or Sharding(), **options)


def assert_refused(folder, message):
    """No way to load a folder takes it."""
    for load in (load_split, lambda folder: load_model(str(folder), "cpu")):
        with pytest.raises(InputError, match=message):
            load(folder)


def set_weights(folder, tensors):
    """Write the weights of a model folder."""
    save_file(tensors, pathlib.Path(folder, "model.safetensors"), metadata={"format": "pt"})


def logps_after(tiny, prompt, ids):
    """Log-probabilities (tokens, V) of what follows a prompt (text) at each of the ids, in float64: no batch, no mask,
    no tree."""
    model, tokenizer = tiny
    prompt_ids = encode(tokenizer, prompt)
    with torch.no_grad():
        logits = model(torch.tensor([prompt_ids + ids])).logits[0].double()
    return torch.log_softmax(logits[len(prompt_ids) - 1:-1], -1)


def token_logps_after(tiny, prompt, ids):
    """Log-probabilities (tokens,) of the ids themselves."""
    return logps_after(tiny, prompt, ids)[range(len(ids)), ids]


def furthest(ours, theirs):
    """How far two dicts of tensors are apart."""
    return max((ours[key] - theirs[key]).abs().max().item() for key in theirs)


def greatest_difference(folder, other):
    """Between the weights of two model folders."""
    return furthest(weights(folder), weights(other))


def assert_same_steps(folder, other):
    """Two trainings have logged the same numbers, but for their last digits."""
    for ours, theirs in zip(read(folder / "metrics.jsonl"), read(other / "metrics.jsonl"), strict=True):
        for key in ("loss", "margin", "gnorm"):
            assert ours[key] == pytest.approx(theirs[key], rel=2e-3, abs=1e-4), key
