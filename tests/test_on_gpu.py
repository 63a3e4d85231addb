"""On a GPU: the same numbers as on the CPU. Run by `pytest -m gpu`; skipped where there is none.

GPU_TESTS_ON_CPU=1 runs them with the CPU in the place of the GPU, to try the tests themselves."""
import concurrent.futures
import gc
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from test_engine import PlainGraph, prompts_of, together
from test_families import ACTIONS, PROMPT
from transformers import LlamaConfig, LlamaForCausalLM

import common
from compare import weights
from conftest import BASE, call, read, ROOT, succeed
from lib import engine as engine_module
from lib.engine import Engine
from lib.fast import takes_grouped_queries, use_grouped_attention
from lib.load import load_tokenizer, Projection
from lib.logps import action_outputs, ActionModel, token_logps, without_trees
from lib.seeds import uniforms

DEVICE = "cpu" if os.environ.get("GPU_TESTS_ON_CPU") else "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="no GPU")]
# What may differ from the CPU in float32: nats a token; loss and norm of the gradient of a step; what training has
# changed in the weights, relative to the CPU's change
TOLERANCES = {"float32": {"logp": 1e-4, "loss": 1e-3, "gnorm": 1e-2, "update": .05},
              "bfloat16": {"logp": .1, "loss": .02, "gnorm": .05, "update": .3}}


def small_model(device="cpu", dtype="float32"):
    """A Llama with grouped queries and random weights, the same on each device."""
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=781, max_position_embeddings=1024, initializer_range=.1,
                         tie_word_embeddings=False)
    return LlamaForCausalLM(config).to(device, getattr(torch, dtype)).eval()


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_log_probabilities_of_rows_and_of_a_tree(dtype):
    tokenizer = load_tokenizer(str(BASE))
    tree = common.actions_item(tokenizer, PROMPT, ACTIONS)
    items = [tree, without_trees(tree)]
    lengths = torch.tensor([len(action) for action in ACTIONS * 2])

    def logps(device, dtype):
        action_model = ActionModel(small_model(device, dtype)).eval()
        if dtype == "bfloat16" and device == "cuda" and takes_grouped_queries():
            use_grouped_attention(action_model.model)
        return torch.cat(action_outputs(action_model, items, 4096)) / lengths                         # (6,) a token
    tolerance = TOLERANCES[dtype]["logp"]
    found = logps(DEVICE, dtype)
    torch.testing.assert_close(found, logps("cpu", "float32"), atol=tolerance, rtol=0)
    torch.testing.assert_close(found[:3], found[3:], atol=tolerance, rtol=0)


@pytest.mark.skipif(DEVICE == "cpu", reason="a product of a GPU")
def test_the_product_with_the_vocabulary_sums_in_float32():
    torch.manual_seed(0)
    hidden = torch.randn(64, 512, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(4096, 512, device=DEVICE) / 20).bfloat16().requires_grad_()
    ids = torch.arange(64, device=DEVICE)
    logps = token_logps(Projection(weight), hidden, ids)
    logps.sum().backward()
    exact_hidden, exact_weight = hidden.detach().double(), weight.detach().double()
    exact_hidden.requires_grad_(), exact_weight.requires_grad_()
    exact = torch.log_softmax(exact_hidden @ exact_weight.t(), -1)[ids, ids]
    exact.sum().backward()
    assert logps.dtype == torch.float32
    torch.testing.assert_close(logps.double(), exact, atol=2e-4, rtol=0)
    for tensor, exact_tensor in ((hidden, exact_hidden), (weight, exact_weight)):
        distance = (tensor.grad - exact_tensor.grad).norm() / exact_tensor.grad.norm()
        assert tensor.grad.dtype == torch.bfloat16 and distance < .01
    hidden.grad, gradient = None, hidden.grad
    token_logps(Projection(weight.detach()), hidden, ids).sum().backward()               # frozen weights
    assert torch.equal(hidden.grad, gradient)


# --- sampling

def sampled(model, temperature, has_few_shapes):
    """(engine, replies) to prompts of several lengths, each of two samples."""
    engine = Engine(model, [7], 5, 600)
    engine.has_few_shapes = has_few_shapes
    requests = []
    for number, prompt in enumerate(prompts_of(5, 90, 17, 250, 1, 33, 34, 60, 8, 120)):
        requests.append(engine.generate(prompt, uniforms((2, 30 + number), number), temperature, key=number))
    return engine, sum(together(*requests), [])


def num_equal(replies, others):
    return sum(reply == other for reply, other in zip(replies, others, strict=True))


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_samples_by_graphs_are_those_without_and_those_of_the_cpu(temperature, monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(engine_module, "Graph", PlainGraph)
    _, expected = sampled(small_model(), temperature, False)
    model = small_model(DEVICE)
    _, without = sampled(model, temperature, False)
    engine, replies = sampled(model, temperature, True)
    assert engine.has_few_shapes and sum(graph is not None for graph in engine.graphs.values()) > 3
    assert num_equal(without, expected) >= 19 and num_equal(replies, expected) >= 19         # of 20: rounding
    engine, replies = sampled(model.bfloat16(), temperature, True)
    assert engine.has_few_shapes and all(0 < len(ids) <= 39 for ids in replies)


@pytest.mark.skipif(DEVICE == "cpu", reason="about CUDA graphs")
def test_graphs_are_captured_while_those_of_another_engine_become_garbage(monkeypatch):
    model = small_model(DEVICE)
    engines, forward = [sampled(model, 1.0, True)[0]], model.model.norm.forward
    engines[0].itself = engines[0]

    def collects(hidden):
        if torch.cuda.is_current_stream_capturing():
            engines.clear()
            if gc.isenabled():                                       # as Python does at any time
                gc.collect()
        return forward(hidden)
    monkeypatch.setattr(model.model.norm, "forward", collects)
    engine, _ = sampled(model, 1.0, True)
    assert engine.has_few_shapes and not engines


@pytest.mark.skipif(DEVICE == "cpu", reason="about CUDA graphs")
def test_graphs_are_captured_while_a_thread_takes_memory():
    """As CLIP's does, which scores pages."""
    def take_memory():
        for _ in range(3000):
            torch.empty(2 ** 25, device=DEVICE)                      # each capture begins with an empty cache
            time.sleep(.001)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        taken = threads.submit(take_memory)
        engine, _ = sampled(small_model(DEVICE), 1.0, True)
        taken.result()
    assert engine.has_few_shapes


# --- training

@pytest.fixture(scope="module")
def folder(data, tmp_path_factory):
    return shutil.copytree(data, tmp_path_factory.mktemp("gpu"), dirs_exist_ok=True)


def run_on(device, number, *flags):
    """Run a stage in this process, on the GPU or with the GPU hidden."""
    if dist.is_initialized():
        dist.destroy_process_group()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(next(ROOT.glob(f"{number:02d}_*.py")))])         # args.json has this name
        if device == "cpu":
            patch.setattr(torch.cuda, "is_available", lambda: False)
        call(number, *flags)


def flags_of(folder, kind):
    flags = ["--trajectories", folder / "demos.jsonl", "--model", BASE, "--lr", 1e-3, "--max-steps", 3]
    if kind == "critic":
        return [3, *flags]
    flags = [4, *flags, "--method", kind]
    if kind == "sweet":
        flags += ["--critic", "untrained", "--num-candidates", 4, "--max-new-tokens", 20, "--pairs-together"]
    return flags


def assert_close(folder, other, dtype="float32"):
    """A training run is as near to another one as TOLERANCES say."""
    row, other_row = read(folder / "metrics.jsonl")[-1], read(other / "metrics.jsonl")[-1]
    initial, trained, expected = weights(BASE), weights(folder), weights(other)
    change = sum((expected[name] - initial[name]).square().sum().item() for name in expected)
    distance = sum((expected[name] - trained[name]).square().sum().item() for name in expected)
    assert row["loss"] == pytest.approx(other_row["loss"], abs=TOLERANCES[dtype]["loss"])
    assert row["gnorm"] == pytest.approx(other_row["gnorm"], rel=TOLERANCES[dtype]["gnorm"])
    assert (distance / change) ** .5 <= TOLERANCES[dtype]["update"]


LORA = ["--lora", 4, "--merge"]


@pytest.mark.parametrize("kind, options", [
    ("critic", []), ("critic", ["--dtype", "bfloat16", "--compile"]), ("sweet", []), ("mtdpo", LORA),
    ("mtdpo", ["--dtype", "bfloat16", "--activation-checkpointing"]),
    ("sweet", [*LORA, "--dtype", "bfloat16", "--compile"])])
def test_training(folder, kind, options):
    adapter = LORA if LORA[0] in options else []
    cpu_folder = folder / f"{kind} {len(adapter)} cpu"
    flags = [*flags_of(folder, kind), *adapter]
    if kind == "sweet":                                              # the GPU trains on the candidates of the CPU
        run_on("cpu", *flags_of(folder, kind), "--out", folder / "sweet 0 cpu")      # nothing where it is there
        flags += ["--candidates", folder / "sweet 0 cpu" / "candidates.jsonl"]
    if kind != "sweet" or adapter:
        run_on("cpu", *flags, "--out", cpu_folder)
    gpu_folder = folder / " ".join(map(str, [kind, *options, "gpu"]))
    run_on(DEVICE, *flags, *options, "--out", gpu_folder)
    assert_close(gpu_folder, cpu_folder, "bfloat16" if "bfloat16" in options else "float32")


def test_a_run_that_is_killed_goes_on(folder):
    flags = [*flags_of(folder, "critic"), "--max-steps", 20, "--save-every", 2]
    run_on(DEVICE, *flags, "--out", folder / "whole")
    killed = folder / "killed"
    command = [sys.executable, ROOT / "03_train_critic.py", *flags[1:], "--out", killed]
    process = subprocess.Popen(list(map(str, command)), cwd=ROOT)
    while process.poll() is None and not list(killed.glob("states/*/.metadata")):
        time.sleep(.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    first_line = (killed / "metrics.jsonl").read_text().splitlines()[0]
    run_on(DEVICE, *flags, "--out", killed)
    assert (killed / "metrics.jsonl").read_text().startswith(first_line + "\n")     # with its times: it went on
    assert_close(killed, folder / "whole")


@pytest.mark.skipif(DEVICE == "cuda" and torch.cuda.device_count() < 2, reason="one GPU")
def test_two_devices_train_as_one(folder):
    number, *flags = flags_of(folder, "critic")
    run_on(DEVICE, number, *flags, "--out", folder / "one")
    succeed("03_train_critic.py", *flags, "--out", folder / "two", ranks=2)
    assert_close(folder / "two", folder / "one")


# --- last, because a capture fails in it

@pytest.mark.skipif(DEVICE == "cpu", reason="about CUDA graphs")
def test_a_model_that_waits_for_the_gpu_is_decoded_without_graphs(monkeypatch, capsys):
    model = small_model(DEVICE)
    _, expected = sampled(model, 1.0, True)
    forward = model.model.norm.forward

    def waits(hidden):
        assert hidden.sum().item() < torch.inf
        return forward(hidden)
    monkeypatch.setattr(model.model.norm, "forward", waits)
    engine, replies = sampled(model, 1.0, True)
    assert not engine.has_few_shapes and num_equal(replies, expected) >= 19
    assert "cannot be captured as a CUDA graph" in capsys.readouterr().out
