"""Training on many ranks: shards, files, states, killed runs, chunks of logits, equal batches; the schedule; memory."""
import functools
import itertools
import json
import math
import random
import signal
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.profiler import profile, ProfilerActivity
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig

import common
import lib.fast
import lib.load
import lib.logps
import lib.memory
from compare import assert_refused, assert_same_steps, furthest, greatest_difference, load_split, set_weights, weights
from conftest import BASE, begin, begin_ranks, call, ended, job_of, policy_flags, read, succeed
from lib.fast import use_grouped_attention
from lib.load import add_adapter, import_peft, load_model, Projection, save_model, Sharding
from lib.logps import action_sums, ActionModel, collate, Sequence, token_logps, without_trees
from lib.memory import memory_plan, planned_model, PlannedStep
from lib.runtime import Runtime, start
from lib.training import adamw, Checkpoints, epoch_batches, learning_rate, Loop, rank_batches

WHOLE, HALF = Sharding(), Sharding(dtype="bfloat16")


def load_whole(folder):
    return ActionModel(load_model(str(folder), "cpu")[0])


def flags(workspace, out, *more):
    return policy_flags(workspace, "mtdpo", out, "--num-trajectories", 36, "--nll-coef", 0, "--batch-size", 4,
                        "--max-steps", 8, "--save-every", 1, *more)


def items_of_trees(tokenizer):
    rng, items = random.Random(0), []
    for prompt in ("<|user|>Can you help?<|assistant|>", "<|user|>Please write a function.<|assistant|>"):
        actions = [[rng.randrange(4, 700) for _ in range(length)] for length in (3, 7, 5)]
        items.append(common.actions_item(tokenizer, prompt, actions))
    return items


def a_batch(tokenizer):
    return collate(items_of_trees(tokenizer))


@pytest.mark.parametrize("prefix, dtype", [("model.", "float32"), ("", "float32"), ("model.", "bfloat16")])
def test_a_loaded_action_model_is_the_model_in_float32(tmp_path, prefix, dtype):
    """Values and gradients, also of files that name the tensors of the decoder alone, and of half precision."""
    model, tokenizer = load_model(str(BASE), "cpu", dtype)
    save_model(tmp_path, model, tokenizer)
    tensors = {name.replace("model.", prefix, 1): tensor for name, tensor in weights(tmp_path).items()}
    set_weights(tmp_path, {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()})
    results = []
    for action_model in (load_split(tmp_path), ActionModel(model.float())):
        values = action_model(a_batch(tokenizer))
        results.append([values, *torch.autograd.grad(values.sum(), list(action_model.parameters()))])
    assert len(results[0]) == len(results[1]) and all(map(torch.equal, *results))
    assert {gradient.dtype for gradient in results[0]} == {torch.float32}


@pytest.mark.parametrize("sharding", [WHOLE, HALF], ids=["whole", "split"])
def test_a_head_of_its_own_stays_although_the_config_ties_it(tiny, tmp_path, sharding):
    """Every way to load the folder has its logits, and so has what is saved."""
    save_model(tmp_path / "model", *tiny)
    tensors, batch = weights(tmp_path / "model"), a_batch(tiny[1])
    torch.manual_seed(0)
    tensors["lm_head.weight"] = torch.randn(tensors["model.embed_tokens.weight"].shape) / 10
    set_weights(tmp_path / "model", tensors)
    loaded, expected = load_split(tmp_path / "model", sharding), load_whole(tmp_path / "model")(batch)
    save_model(tmp_path / "saved", loaded.model, tiny[1])
    assert torch.equal(weights(tmp_path / "saved")["lm_head.weight"], tensors["lm_head.weight"])
    assert torch.equal(load_whole(tmp_path / "saved")(batch), expected)
    assert (expected - ActionModel(tiny[0])(batch)).abs().max() > 1
    torch.testing.assert_close(loaded(batch), expected, atol=0.5 if sharding is HALF else 0, rtol=0)


def test_a_tensor_that_the_files_lack_is_one_line(tiny, tmp_path):
    """It would be random: the head of a model whose config does not tie it to the embeddings."""
    save_model(tmp_path, *tiny)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert_refused(tmp_path, "its files lack lm_head.weight")


def test_a_tokenizer_may_be_smaller_than_the_embedding_but_not_larger(tmp_path):
    """A special token that no chat has, as Gemma 3's for images, may have no place."""
    model, tokenizer = load_model(str(BASE), "cpu")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    save_model(tmp_path, model, tokenizer)
    assert load_whole(tmp_path) and load_split(tmp_path)
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(tmp_path)
    assert_refused(tmp_path, "its tokenizer has 783 tokens, but its embeddings 781")
    model.resize_token_embeddings(800)
    save_model(tmp_path, model, tokenizer)
    assert load_whole(tmp_path) and load_split(tmp_path)


def test_log_probabilities_in_parts_are_those_of_all_logits(monkeypatch):
    """With bias, scale and cap, values and gradients. No tensor of all logits is made: their chunks are made again in
    the backward pass or, on a GPU, their slopes are kept (RowValues, here on a CPU)."""
    torch.manual_seed(0)
    ids, factors = torch.randint(0, 300, (50,)), torch.randn(50)
    values = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((50, 16), (300, 16), (300,))]
    hidden, weight, bias = values
    logits = 20 * torch.tanh((hidden @ weight.T + bias) * 1.3 / 20)
    expected = torch.log_softmax(logits, -1)[range(50), ids]
    expected_gradients = torch.autograd.grad((expected * factors).sum(), values)
    sizes, linear = [], F.linear
    for module in (lib.fast, lib.load):
        monkeypatch.setattr(module, "float_sums", lambda hidden, *rest: sizes.append(len(hidden)) or linear(
            hidden, *rest))
    for is_fast, limit, largest, num_rows in (
            (False, 2 ** 26, 50, 50), (False, 300 * 7, 7, 100), (True, 300 * 7, 7, 50)):
        monkeypatch.setattr(lib.logps, "has_fast_bfloat16", lambda *tensors, is_fast=is_fast: is_fast)
        monkeypatch.setattr(lib.logps, "MAX_LOGITS", limit)
        sizes.clear()
        logps = token_logps(Projection(weight, bias, 1.3, 20.0), hidden, ids)
        torch.testing.assert_close(logps, expected)
        for found in zip(torch.autograd.grad((logps * factors).sum(), values), expected_gradients):
            torch.testing.assert_close(*found)
        assert max(sizes) == largest and sum(sizes) == num_rows


@pytest.mark.parametrize("kind, options, is_tree, is_taken", [
    (LlamaConfig, {}, True, True),
    (LlamaConfig, {"head_dim": 12}, True, False),                    # no multiple of 8
    (LlamaConfig, {"attention_dropout": .1}, True, False),           # cuDNN rounds it to sixteenths
    (MistralConfig, {"sliding_window": 4}, True, True),
    (MistralConfig, {"sliding_window": 4}, False, False)])           # transformers' own mask, of bools
def test_grouped_queries_see_the_same_without_copies(tiny, monkeypatch, kind, options, is_tree, is_taken):
    calls = []

    def attend(query, key, value, mask, _, dropout, is_causal, scale):
        calls.append(mask)
        later = torch.ones(mask.shape[-2:], dtype=bool).triu(1) & torch.tensor(is_causal)
        hidden = mask.masked_fill(later, -torch.inf)                 # no more than the mask hides
        return [F.scaled_dot_product_attention(query, key, value, hidden, dropout, scale=scale, enable_gqa=True)]
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", attend)       # a GPU's
    model = AutoModelForCausalLM.from_config(kind(hidden_size=64, intermediate_size=64, num_hidden_layers=2,
                                                  vocab_size=781, num_attention_heads=4, num_key_value_heads=2,
                                                  **options))
    items = items_of_trees(tiny[1])
    batch = collate(items if is_tree else list(map(without_trees, items)))

    def values():
        torch.manual_seed(0)                                         # of dropout
        return ActionModel(model)(batch)
    expected = values()
    use_grouped_attention(model)
    torch.testing.assert_close(values(), expected)
    assert model.config._attn_implementation == "grouped" and bool(calls) == is_taken


def test_logits_are_not_rounded_to_bfloat16():
    """bfloat16 states and weights, projected in float32: near float64, where rounded logits are far from it; in float32
    nothing changes, bit for bit."""
    torch.manual_seed(0)
    head, hidden, ids = torch.nn.Linear(64, 300, bias=False), 8 * torch.randn(50, 64), torch.randint(0, 300, (50,))
    assert torch.equal(token_logps(Projection(head.weight), hidden, ids),
                       -F.cross_entropy(head(hidden), ids, reduction="none"))
    head, hidden = head.bfloat16(), hidden.bfloat16().requires_grad_()
    expected = torch.log_softmax(hidden.double() @ head.weight.double().T, -1)[range(50), ids]
    rounded = -F.cross_entropy(head(hidden).float(), ids, reduction="none")
    logps = token_logps(Projection(head.weight), hidden, ids)
    assert logps.dtype == torch.float32
    assert (logps - expected).abs().max() < 1e-5 < 1e-2 < (rounded - expected).abs().max()
    logps.sum().backward()
    assert head.weight.grad.dtype == hidden.grad.dtype == torch.bfloat16 and head.weight.grad.abs().sum() > 0


def test_a_sharded_bfloat16_model_projects_in_float32(tiny):
    action_model = load_split(BASE, HALF)
    whole, batch = load_model(str(BASE), "cpu", "bfloat16")[0], a_batch(tiny[1])
    values = action_model(batch)
    projection = Projection(whole.get_output_embeddings().weight.float())
    r, t = batch.action_tokens
    before = ActionModel(whole).hidden_states(batch)[r, batch.previous[r, t]].float()
    expected = action_sums(batch, token_logps(projection, before, batch.ids[r, t]))
    torch.testing.assert_close(ActionModel(whole)(batch), expected, atol=1e-3, rtol=0)
    torch.testing.assert_close(values, expected, atol=0.05, rtol=0)
    values.sum().backward()
    assert hasattr(action_model, "reshard") and all(p.grad.dtype == torch.float32 for p in action_model.parameters())


def print_memory(planned, rank, _):
    """Print the bytes that memory_plan says of a step (PlannedStep; rank: of an adapter), and those that torch's CPU
    allocator held at most in a real one by FSDP2: for one rank of a group whose other ranks are not there (their
    collectives do nothing)."""
    for module in (lib.fast, lib.memory, lib.logps):                 # what is measured is on the CPU
        module.has_fast_bfloat16 = lambda *tensors: False
    config = LlamaConfig(hidden_size=256, intermediate_size=704, num_hidden_layers=3, num_attention_heads=8,
                         num_key_value_heads=4, vocab_size=8192, max_position_embeddings=2048)
    if rank:
        planned = planned._replace(lora=import_peft().LoraConfig(r=rank, target_modules="all-linear"))
    plan = memory_plan(planned_model(config, planned), planned)["total"]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=planned.world_size)

    def step(width):
        half = width // 2
        row = Sequence(list(range(width)), [-1] * half + [0] * (width - half), half if planned.tree else None)
        for _ in range(1 + planned.accumulates):
            action_model(collate([[row]] * planned.num_rows)).sum().backward()
        torch.nn.utils.clip_grad_norm_(action_model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = LlamaForCausalLM(config)
        if rank:
            add_adapter(model.to(getattr(torch, planned.sharding.dtype)), planned.lora)
        run = Runtime(0, planned.world_size, torch.device("cpu"))
        action_model = lib.load.shard(ActionModel(model), run, planned.sharding)
        optimizer = adamw(action_model.train(), 1e-4)
        step(8)                                                     # makes the optimiser's state
        step(planned.row_tokens)
    events = sorted((event.start_ns(), event.nbytes()) for event in profiler.profiler.kineto_results.events()
                    if event.name() == "[memory]")
    print(json.dumps([plan, max(itertools.accumulate(size for _, size in events))]))


@pytest.mark.parametrize("planned, rank", [
    (PlannedStep(8, Sharding("bfloat16", True), 2, 80, True, False, None), 0),
    (PlannedStep(1, Sharding(), 2, 500, False, True, None), 0),
    (PlannedStep(1, Sharding("bfloat16", True), 2, 80, True, False, None), 0),
    (PlannedStep(8, Sharding("bfloat16", True), 2, 80, True, False, None), 8)],
    ids=["split", "trees", "whole", "adapter"])
def test_the_memory_plan_is_what_a_step_takes(planned, rank, tmp_path):
    process = begin("step", folder=tmp_path, run=functools.partial(print_memory, planned, rank))
    assert ended(process) == 0, (tmp_path / "0.err").read_text()
    plan, measured = json.loads((tmp_path / "0.out").read_text())
    assert 0.98 < plan / measured < 1.15


def test_a_dry_run_needs_nothing_but_a_configuration(tmp_path):
    (tmp_path / "config.json").write_text((BASE / "config.json").read_text())
    sweet = ["--method", "sweet", "--critic", "x"]
    # together 24 pairs are 6 turns
    for number, more, num_rows in ((3, [], 6), (4, sweet, 3), (4, [*sweet, "--pairs-together"], 1)):
        printed = call(number, "--trajectories", "none", "--model", tmp_path, "--out", tmp_path / "x",
                       "--max-length", 64, "--dry-run", 8, "--batch-size", 24, *more)
        assert "on 8 ranks" in printed and "parameters          0.000 GB" in printed and "total" in printed
        assert f"{num_rows} rows of 64" in printed and "fits on a card of 80 GB" in printed
    assert not (tmp_path / "x").exists()


def test_epoch_batches_cover_every_item_once_an_epoch():
    batches = epoch_batches(10, 4, 2, seed=1)
    assert [len(b) for b in batches] == [4, 4, 2, 4, 4, 2]
    assert sorted(sum(batches[:3], [])) == sorted(sum(batches[3:], [])) == list(range(10))
    assert batches[:3] != batches[3:]
    assert batches == epoch_batches(10, 4, 2, seed=1) != epoch_batches(10, 4, 2, seed=2)


def test_learning_rate_by_hand():
    rates = [learning_rate(step, 100, 1.0) for step in range(100)]
    assert rates[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert rates[3] == pytest.approx(1.0)
    assert rates[51] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 48 / 97)))
    assert 0.1 < rates[-1] < 0.11
    assert learning_rate(7, 8, 1.0) == pytest.approx(0.145, abs=1e-3)


def test_steps_by_hand(tmp_path, monkeypatch):
    """AdamW without decay of weights; the first gradient is cut to norm 1; rates by the schedule, from the first."""
    action_model = torch.nn.Linear(2, 1, bias=False).double().eval()
    weight = torch.nn.init.constant_(action_model.weight, 1.0).detach().clone()
    example = common.Example([[Sequence([5], [0])]], [], "a")
    job = job_of(tmp_path, epochs=4, lr=0.1, save_every=9, batch_size=1)
    monkeypatch.setattr(job.output, "add_costs", lambda **_: None)
    mean, square = torch.zeros(2, 1, 2, dtype=torch.float64)
    loop, rates = Loop(action_model, [example], job), [0.1, 0.1, 0.0775, 0.0325]
    for step, _ in loop.steps():
        x = torch.tensor([3.0, 4.0] if step == 0 else [0.1, -0.2 * step], dtype=torch.float64)
        loop.backward({"loss": action_model(x)}, torch.ones(1))
        loop.update(step)
        gradient = x / 5 if step == 0 else x
        mean, square = 0.9 * mean + 0.1 * gradient, 0.95 * square + 0.05 * gradient ** 2
        number = step + 1
        weight -= rates[step] * mean / (1 - 0.9 ** number) / ((square / (1 - 0.95 ** number)).sqrt() + 1e-8)
        torch.testing.assert_close(action_model.weight.detach(), weight, atol=1e-6, rtol=0)
        assert action_model.training


def test_ranks_draw_different_numbers_for_dropout_and_a_resumed_run_the_same(tmp_path):
    example = common.Example([[Sequence([5], [0])]], [], "a")

    def numbers_of(rank):
        job = job_of(tmp_path, Runtime(rank, 2, "cpu"), epochs=3, batch_size=1)
        loop = Loop(torch.nn.Linear(2, 1), [example], job)
        return [torch.rand(1).item() for _ in loop.steps()]
    numbers = numbers_of(0) + numbers_of(1)
    assert len(set(numbers)) == 6 and numbers == numbers_of(0) + numbers_of(1)


def test_a_part_that_gets_no_gradient_has_no_state(tmp_path):
    start(0)
    models = [torch.nn.ModuleDict({"used": torch.nn.Linear(2, 1), "vision_tower": torch.nn.Linear(2, 1)})
              for _ in range(2)]
    optimizers = [adamw(model, 1e-2) for model in models]
    models[0]["used"](torch.ones(2)).backward()
    optimizers[0].step()
    Checkpoints(tmp_path, models[0], optimizers[0]).save(1)
    assert Checkpoints(tmp_path, models[1], optimizers[1]).load() == 1
    for whole, resumed in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(whole, resumed)
    kept = [optimizer.state[model["used"].weight] for model, optimizer in zip(models, optimizers)]
    assert torch.equal(kept[0]["exp_avg"], kept[1]["exp_avg"]) and kept[0]["exp_avg"].any()


def test_every_rank_makes_as_many_passes_over_the_same_batch():
    batch = [7, 3, 9, 1, 4]
    tokens = {7: [5], 3: [2, 30], 9: [6, 6], 1: [20], 4: [8]}         # by the longest row: 7, 9, 4, 1, 3
    examples = {}
    for i, lengths in tokens.items():
        examples[i] = common.Example([[Sequence([0] * length, [0] * length) for length in lengths]], [], "a")
    for world_size, expected in ((1, [[[7, 9], [4, 1], [3]]]), (2, [[[7, 4], [3]], [[9, 1], [7]]]),
                                 (8, [[[7]], [[9]], [[4]], [[1]], [[3]], [[7]], [[7]], [[7]]])):
        jobs = [job_of("o", Runtime(rank, world_size, "cpu"), micro_batch_size=2) for rank in range(world_size)]
        ranks = [list(rank_batches(batch, examples, job)) for job in jobs]
        assert [[examples for examples, _ in own] for own in ranks] == expected
        counted = [i for own in ranks for examples, weights in own for i, weight in zip(examples, weights.tolist())
                   if weight]
        assert sorted(counted) == sorted(batch)


@pytest.fixture(scope="module")
def whole(workspace, tmp_path_factory):
    """The folder of eight steps on one rank that were not interrupted."""
    out = tmp_path_factory.mktemp("whole") / "policy"
    call(4, *flags(workspace, out))
    return out


def test_bfloat16_learns_like_float32(workspace, whole, tmp_path):
    """In two steps, whose rates are those of the first two of eight."""
    call(4, *flags(workspace, tmp_path / "bfloat16", "--dtype", "bfloat16", "--max-steps", 2))
    half, full = (read(folder / "metrics.jsonl")[:2] for folder in (tmp_path / "bfloat16", whole))
    # The reference's values come from another batch, and bfloat16 rounds differently there on some processors.
    assert full[0]["loss"] == pytest.approx(0.693147, abs=1e-5) and half[0]["loss"] == pytest.approx(0.6931, abs=5e-3)
    assert half[0]["acc"] == full[0]["acc"] == 0.5 and abs(half[1]["loss"] - full[1]["loss"]) < 0.1
    assert half[1]["gnorm"] == pytest.approx(full[1]["gnorm"], rel=0.2)
    trained = weights(tmp_path / "bfloat16")
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in trained.values())
    assert furthest(trained, weights(BASE)) > 1e-5


@pytest.mark.parametrize("ranks, steps, more", [(1, 1, []), (2, 3, ["--activation-checkpointing"])])
def test_kill_9_at_a_random_moment(workspace, whole, tmp_path, ranks, steps, more):
    """After some steps; then one rank goes on. On one rank it ends with the weights of a run that was not killed, bit
    for bit. Nor does checkpointing change more than the last digits."""
    out, began = tmp_path / "killed", time.monotonic()

    def states():
        return sorted(int(path.parent.name) for path in out.glob("states/*/.metadata"))
    processes = begin_ranks(ranks, "04_train_policy.py", *flags(workspace, out, *more), folder=tmp_path)
    while time.monotonic() - began < 90 and max(states(), default=0) < steps:
        time.sleep(0.005)
    time.sleep(random.random() * 0.05)
    for process in processes:
        process.kill()
    assert [ended(process) for process in processes] == [-signal.SIGKILL] * ranks, "it had ended before"
    assert min(steps, 2) <= len(states()) <= 3                      # the last two, and one that was about to be removed
    assert "continues at step" in succeed("04_train_policy.py", *flags(workspace, out, *more))
    assert greatest_difference(out, whole) <= (0 if ranks == 1 else 1e-4)
    assert_same_steps(out, whole)
    rows = read(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert all(one["seconds"] < two["seconds"] for one, two in zip(rows, rows[1:]))
    assert not (out / "states").exists() and (out / "COMPLETED").exists()
