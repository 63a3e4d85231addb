"""Faults of devices that show without a GPU: FakeTensorMode with cuda tensors, which refuses tensors of two devices."""
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from transformers import LlamaConfig, LlamaForCausalLM

import common
from conftest import BASE
from lib.engine import Engine

ROWS = [[common.Row([5, 6, 7, 8, 9], [-1, 0, 0, -1, 1])], [common.Row([5, 6, 7], [-1, -1, 0])]]
TREES = [[common.Row([5, 6, 7, 8, 9], [-1, -1, 0, 0, 1], 2)], [common.Row([5, 6, 7], [-1, 0, 1], 1)]]


def fake_model():
    return LlamaForCausalLM(LlamaConfig.from_pretrained(BASE)).eval()


def fake_batch(mode, items, monkeypatch):
    """A Batch on fake cuda. Its action tokens are given: where they are depends on values, which fake tensors lack."""
    with torch.device("cpu"), torch.utils._python_dispatch._disable_current_modes():
        batch = common.collate(items)
        places = common.action_tokens(batch)
    places = [mode.from_tensor(place).to("cuda") for place in places]
    monkeypatch.setattr(common, "action_tokens", lambda batch: tuple(places))
    tensors = {}
    for name, value in batch._asdict().items():
        if isinstance(value, torch.Tensor):
            tensors[name] = mode.from_tensor(value).to("cuda")
    return batch._replace(**tensors)


@pytest.mark.parametrize("items", [ROWS, TREES], ids=["rows", "trees"])
@pytest.mark.parametrize("has_head", [False, True], ids=["lm", "head"])
def test_a_scorer_on_fake_cuda_mixes_no_devices(monkeypatch, items, has_head):
    with FakeTensorMode(shape_env=ShapeEnv()) as mode, torch.device("cuda"), torch.no_grad():
        scorer = common.Scorer(fake_model(), has_head)
        values = scorer(fake_batch(mode, items, monkeypatch))
    assert values.device.type == "cuda" and values.shape == (2, 2)


def test_a_decoding_step_on_fake_cuda_mixes_no_devices():
    """It waits for no values either, which fake tensors lack: CUDA graphs need this."""
    with FakeTensorMode(), torch.no_grad():
        with torch.device("cuda"):
            model = fake_model()
        engine = Engine(model, [], slots=4, max_tokens=60)
        assert engine.has_few_shapes
        for _ in range(2):                                          # the second finds its cache
            tokens = engine.sample(engine.inputs[:3], 40)
            assert tokens.device.type == "cuda" and tokens.shape == (3,)
