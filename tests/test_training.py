"""Training on many ranks: shards, files, states, killed runs, chunks of logits, equal batches, pairs that share a
prompt; the schedule."""
import json
import math
import random
import signal
import time

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import common
from compare import assert_same_steps, furthest, greatest_difference, set_weights, weights
from conftest import BASE, begin_ranks, call, ended, read, succeed
from lib.models import load_model, Projection, save_model, Sharding, use_grouped_attention
from lib.runtime import InputError, Runtime, start
from lib.training import epoch_batches, learning_rate, rank_batches

WHOLE, HALF = Sharding(), Sharding(dtype="bfloat16")


@pytest.fixture(scope="module")
def runtime():
    return start(0)


def load(folder, runtime, sharding=WHOLE):
    return common.load_scorer(str(folder), runtime, sharding)


def flags(workspace, out, *more):
    return ["--method", "mtdpo", "--trajectories", workspace / "offline.jsonl", "--num-trajectories", 36,
            "--model", BASE, "--lr", 1e-4, "--batch-size", 4, "--max-steps", 8, "--save-every", 1, "--out", out, *more]


def a_batch(tokenizer):
    rng = random.Random(0)
    prompts = ["<|user|>Can you help?<|assistant|>", "<|user|>Please write a function.<|assistant|>"]
    return common.collate([common.actions_item(tokenizer, prompt,
                                                 [[rng.randrange(4, 700) for _ in range(n)] for n in (3, 7, 5)])
                           for prompt in prompts])


# --- shards and files

def test_a_loaded_scorer_is_the_model(runtime, tiny):
    model, tokenizer = tiny
    whole, batch = common.Scorer(model), a_batch(tokenizer)
    scorer = load(BASE, runtime)
    values = scorer(batch)
    assert torch.equal(values, whole(batch))
    values.sum().backward()
    model.zero_grad()
    whole(batch).sum().backward()
    for (name, ours), theirs in zip(scorer.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name
    model.zero_grad()


def test_half_precision_files_are_read_into_float32(runtime, tiny, tmp_path):
    half, tokenizer = load_model(str(BASE), "cpu", "bfloat16")[0], tiny[1]
    save_model(tmp_path / "half", half, tokenizer)
    loaded = load(tmp_path / "half", runtime)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    save_model(tmp_path / "saved", loaded.model, tokenizer)
    for name, tensor in weights(tmp_path / "saved").items():
        assert torch.equal(tensor, half.state_dict()[name].float())


def test_weights_of_other_names_are_read(runtime, tiny, tmp_path):
    model, tokenizer = tiny
    save_model(tmp_path, model, tokenizer)
    set_weights(tmp_path, {name.removeprefix("model."): tensor for name, tensor in weights(tmp_path).items()})
    loaded = load(tmp_path, runtime)
    assert torch.equal(loaded(a_batch(tokenizer)), common.Scorer(model)(a_batch(tokenizer)))


@pytest.mark.parametrize("sharding", [WHOLE, HALF], ids=["whole", "split"])
def test_a_head_of_its_own_stays_although_the_config_ties_it(runtime, tiny, tmp_path, sharding):
    """Every way to load the folder has its logits, and so has what is saved."""
    model, tokenizer = tiny
    save_model(tmp_path / "model", model, tokenizer)
    tensors = weights(tmp_path / "model")
    torch.manual_seed(0)
    tensors["lm_head.weight"] = torch.randn(tensors["model.embed_tokens.weight"].shape) / 10
    set_weights(tmp_path / "model", tensors)
    whole, loaded = load_model(str(tmp_path / "model"), "cpu")[0], load(tmp_path / "model", runtime, sharding)
    save_model(tmp_path / "saved", loaded.model, tokenizer)
    assert torch.equal(weights(tmp_path / "saved")["lm_head.weight"], tensors["lm_head.weight"])
    saved, batch = load_model(str(tmp_path / "saved"), "cpu")[0], a_batch(tokenizer)
    assert torch.equal(common.Scorer(saved)(batch), common.Scorer(whole)(batch))
    assert (common.Scorer(saved)(batch) - common.Scorer(model)(batch)).abs().max() > 1
    torch.testing.assert_close(loaded(batch), common.Scorer(whole)(batch), atol=0.5 if sharding is HALF else 0, rtol=0)


def test_a_tensor_that_the_files_lack_is_one_line(runtime, tiny, tmp_path):
    """It would be random: the head of a model whose config does not tie it to the embeddings."""
    save_model(tmp_path, *tiny)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    for read_folder in (lambda: load(tmp_path, runtime), lambda: load_model(str(tmp_path), "cpu")):
        with pytest.raises(InputError, match="its files lack lm_head.weight"):
            read_folder()


# --- the logits

def test_logits_in_chunks_are_the_logits_whole(tiny, monkeypatch):
    """Against float64 and the plain way, values and gradients; no tensor of all logits is made."""
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(16, 300, bias=False), torch.randn(50, 16, requires_grad=True)
    ids = torch.randint(0, 300, (50,))
    expected = torch.log_softmax(hidden.double() @ head.weight.double().T, -1)[range(50), ids]
    expected_gradient, = torch.autograd.grad(expected.sum(), hidden)
    sizes, linear = [], torch.nn.functional.linear
    monkeypatch.setattr(common.F, "linear", lambda hidden, *rest: sizes.append(len(hidden)) or linear(hidden, *rest))
    for limit, largest in ((2 ** 26, 50), (300 * 7, 7)):
        monkeypatch.setattr(common, "MAX_LOGITS", limit)
        sizes.clear()
        logps = common.token_logps(Projection(head.weight), hidden, ids)
        gradient, = torch.autograd.grad(logps.sum(), hidden)
        torch.testing.assert_close(logps.double(), expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(gradient.double(), expected_gradient.double(), atol=1e-5, rtol=0)
        assert max(sizes) == largest
    assert sum(sizes) == 100                                        # forward, and again in the backward pass


def test_slopes_that_are_kept_on_a_gpu_are_the_gradients(monkeypatch):
    """models.RowValues, with a CPU in the place of the GPU: weights, bias, scale and cap, in parts."""
    torch.manual_seed(0)
    ids, factors = torch.randint(0, 300, (50,)), torch.randn(50)
    values = [torch.randn(50, 16).double(), torch.randn(300, 16).double(), torch.randn(300).double()]

    def logps_and_gradients(is_fast):
        monkeypatch.setattr(common.models, "has_fast_bfloat16", lambda *tensors: is_fast)
        hidden, weight, bias = [value.clone().requires_grad_() for value in values]
        logps = common.token_logps(Projection(weight, bias, 1.3, 20.0), hidden, ids)
        (logps * factors).sum().backward()
        return logps, hidden.grad, weight.grad, bias.grad
    monkeypatch.setattr(common.models, "float_sums", torch.nn.functional.linear)
    monkeypatch.setattr(common, "MAX_LOGITS", 300 * 7)
    for found, expected in zip(logps_and_gradients(True), logps_and_gradients(False)):
        torch.testing.assert_close(found, expected)


def test_grouped_queries_see_the_same_without_copies(tiny):
    model = LlamaForCausalLM(LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2, vocab_size=781,
                                         num_attention_heads=4, num_key_value_heads=2)).eval()
    expected = common.Scorer(model)(a_batch(tiny[1]))
    use_grouped_attention(model)
    torch.testing.assert_close(common.Scorer(model)(a_batch(tiny[1])), expected)
    assert model.config._attn_implementation == "grouped"


def test_logits_are_not_rounded_to_bfloat16():
    """bfloat16 states and weights, projected in float32: near float64, where rounded logits are far from it; in float32
    nothing changes, bit for bit."""
    torch.manual_seed(0)
    head, hidden, ids = torch.nn.Linear(64, 300, bias=False), 8 * torch.randn(50, 64), torch.randint(0, 300, (50,))
    assert torch.equal(common.token_logps(Projection(head.weight), hidden, ids),
                       -torch.nn.functional.cross_entropy(head(hidden), ids, reduction="none"))
    head, hidden = head.bfloat16(), hidden.bfloat16().requires_grad_()
    expected = torch.log_softmax(hidden.double() @ head.weight.double().T, -1)[range(50), ids]
    rounded = -torch.nn.functional.cross_entropy(head(hidden).float(), ids, reduction="none")
    logps = common.token_logps(Projection(head.weight), hidden, ids)
    assert logps.dtype == torch.float32
    assert (logps - expected).abs().max() < 1e-5 < 1e-2 < (rounded - expected).abs().max()
    logps.sum().backward()
    assert head.weight.grad.dtype == hidden.grad.dtype == torch.bfloat16 and head.weight.grad.abs().sum() > 0


def test_a_sharded_bfloat16_model_projects_in_float32(runtime, tiny):
    """The same values as the whole model's, and as float32 arithmetic on its last hidden states."""
    scorer = load(BASE, runtime, HALF)
    whole, batch = load_model(str(BASE), "cpu", "bfloat16")[0], a_batch(tiny[1])
    values, whole_values = scorer(batch), common.Scorer(whole)(batch)
    torch.testing.assert_close(values, whole_values, atol=0.05, rtol=0)
    projection = Projection(whole.get_output_embeddings().weight.float())
    expected = common.action_logps(projection, common.hidden_states(whole, batch).float(), batch)
    torch.testing.assert_close(whole_values, expected, atol=1e-3, rtol=0)
    values.sum().backward()
    assert hasattr(scorer, "reshard") and all(p.grad.dtype == torch.float32 for p in scorer.parameters())


# --- memory

@pytest.mark.parametrize("case", ["8 bfloat16 1 2 80 2 0", "1 float32 0 2 500 1 1", "8 bfloat16 1 2 80 2 0 8"])
def test_the_memory_plan_is_what_a_step_takes(case):
    """Arguments of memory.py: 8 ranks, checkpointing, two micro-batches; one rank, trees; LoRA."""
    found = json.loads(succeed("tests/memory.py", *case.split()))
    assert 0.98 < found["plan"] / found["measured"] < 1.15


def test_a_dry_run_needs_nothing_but_a_configuration(tmp_path):
    (tmp_path / "config.json").write_text((BASE / "config.json").read_text())
    sweet = ["--method", "sweet", "--critic", "x"]
    # together 24 pairs are 6 turns
    for number, more, num_rows in ((3, [], 6), (4, sweet, 3), (4, [*sweet, "--pairs-together"], 1)):
        printed = call(number, "--trajectories", "none", "--model", tmp_path, "--out", tmp_path / "x",
                       "--max-length", 64, "--dry-run", 8, "--batch-size", 24, *more)
        assert "on 8 ranks" in printed and "parameters          0.000 GB" in printed and "total" in printed
        assert f"{num_rows} rows of 64" in printed and "fits a card of 80 GB" in printed
        # 4 bytes of each parameter, and of 3 layers x keys and values x 4 heads x 32
        assert ("sampling: 0.003 GB of weights" in printed and "0.003 MB for each token" in printed) == (number == 4)
    assert not (tmp_path / "x").exists()


def test_a_tokenizer_may_be_smaller_than_the_embedding_but_not_larger(runtime, tmp_path):
    """A special token that no chat has, as Gemma 3's for images, may have no place."""
    model, tokenizer = load_model(str(BASE), "cpu")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    save_model(tmp_path, model, tokenizer)
    assert load_model(str(tmp_path), "cpu") and load(tmp_path, runtime)
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(tmp_path)
    for read_folder in (lambda: load(tmp_path, runtime), lambda: load_model(str(tmp_path), "cpu")):
        with pytest.raises(InputError, match="its tokenizer has 783 tokens, and its embeddings 781"):
            read_folder()
    model.resize_token_embeddings(800)
    save_model(tmp_path, model, tokenizer)
    assert load_model(str(tmp_path), "cpu") and load(tmp_path, runtime)


# --- batches, schedule

def test_epoch_batches_cover_every_item_once_an_epoch():
    batches = epoch_batches(10, 4, 2, seed=1)
    assert [len(b) for b in batches] == [4, 4, 2, 4, 4, 2]
    assert sorted(sum(batches[:3], [])) == sorted(sum(batches[3:], [])) == list(range(10))
    assert batches == epoch_batches(10, 4, 2, seed=1) != epoch_batches(10, 4, 2, seed=2)


def test_learning_rate_by_hand():
    rates = [learning_rate(step, 100, 1.0) for step in range(100)]
    assert rates[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert rates[3] == pytest.approx(1.0)
    assert rates[51] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 48 / 97)))
    assert 0.1 < rates[-1] < 0.11


def test_every_rank_makes_as_many_passes_over_the_same_batch():
    batch = [7, 3, 9, 1, 4]
    tokens = {7: [5], 3: [2, 30], 9: [6, 6], 1: [20], 4: [8]}         # by the longest row: 7, 9, 4, 1, 3
    examples = {}
    for i, lengths in tokens.items():
        examples[i] = common.Example([[common.Row([0] * length, [0] * length) for length in lengths]], [], "a")
    for world_size, expected in ((1, [[[7, 9], [4, 1], [3]]]), (2, [[[7, 4], [3]], [[9, 1], [7]]]),
                                 (8, [[[7]], [[9]], [[4]], [[1]], [[3]], [[7]], [[7]], [[7]]])):
        ranks = [list(rank_batches(batch, examples, 2, Runtime(rank, world_size, "cpu"))) for rank in range(world_size)]
        assert [[examples for examples, _ in own] for own in ranks] == expected
        counted = [i for own in ranks for examples, weights in own for i, weight in zip(examples, weights.tolist())
                   if weight]
        assert sorted(counted) == sorted(batch)


def test_pairs_of_a_turn_in_one_tree_train_like_pairs_apart(workspace, tmp_path):
    """The same pairs in one batch: the same loss and gradient, with fewer tokens."""
    apart, together, candidates = tmp_path / "apart", tmp_path / "together", tmp_path / "apart" / "candidates.jsonl"
    for out, more in ((apart, []), (together, ["--pairs-together", "--candidates", candidates])):
        call(4, "--method", "sweet", "--critic", "untrained", "--trajectories", workspace / "offline.jsonl", "--model",
             BASE, "--data-frac", 0.02, "--num-candidates", 8, "--max-new-tokens", 80, "--max-steps", 1,
             "--batch-size", 400, *more, "--out", out)
    step_apart, step_together = (read(out / "metrics.jsonl")[0] for out in (apart, together))
    for key in ("loss", "nll", "margin"):
        assert step_together[key] == pytest.approx(step_apart[key], abs=1e-5)
    assert step_together["gnorm"] == pytest.approx(step_apart["gnorm"], rel=1e-3)
    tokens = [json.loads((out / "args.json").read_text())["costs"]["trained_tokens"] for out in (apart, together)]
    assert tokens[1] < 0.7 * tokens[0]
    assert (apart / "pairs.jsonl").read_bytes() == (together / "pairs.jsonl").read_bytes()


# --- many ranks, and runs that were killed

@pytest.fixture(scope="module")
def two_steps(workspace, tmp_path_factory):
    """The folder of two steps on one rank in float32, without the likelihood of the chosen side."""
    out = tmp_path_factory.mktemp("two_steps") / "policy"
    call(4, *flags(workspace, out, "--max-steps", 2, "--nll-coef", 0))
    return out


@pytest.fixture(scope="module")
def whole(workspace, tmp_path_factory):
    """The folder of eight steps on one rank that were not interrupted."""
    out = tmp_path_factory.mktemp("whole") / "policy"
    call(4, *flags(workspace, out))
    return out


def test_the_world_size_changes_nothing_but_the_last_digits(workspace, two_steps, tmp_path):
    two = ["--max-steps", 2, "--nll-coef", 0]
    succeed("04_train_policy.py", *flags(workspace, tmp_path / "ranks", *two), ranks=2)
    call(4, *flags(workspace, tmp_path / "checkpointing", *two, "--activation-checkpointing"))
    for name in ("ranks", "checkpointing"):
        assert_same_steps(tmp_path / name, two_steps)
        assert greatest_difference(tmp_path / name, two_steps) < 1e-4


def test_bfloat16_learns_like_float32(workspace, two_steps, tmp_path):
    call(4, *flags(workspace, tmp_path / "bfloat16", "--dtype", "bfloat16", "--nll-coef", 0, "--max-steps", 2))
    half, full = (read(folder / "metrics.jsonl") for folder in (tmp_path / "bfloat16", two_steps))
    # The reference's values come from another batch, and bfloat16 rounds differently there on some processors.
    assert full[0]["loss"] == pytest.approx(0.693147, abs=1e-5) and half[0]["loss"] == pytest.approx(0.6931, abs=5e-3)
    assert half[0]["acc"] == full[0]["acc"] == 0.5 and abs(half[-1]["loss"] - full[-1]["loss"]) < 0.1
    assert half[-1]["gnorm"] == pytest.approx(full[-1]["gnorm"], rel=0.2)
    trained = weights(tmp_path / "bfloat16")
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in trained.values())
    assert furthest(trained, weights(BASE)) > 1e-5


def kill_after_a_state(workspace, out, folder, steps=1, ranks=1, pause_s=0.0):
    """Starts 04 in `out`, and kills it a moment after its states have gone on by so many steps."""
    def last_state():
        return max((int(path.parent.name) for path in out.glob("states/*/.metadata")), default=0)
    wanted, began = last_state() + steps, time.monotonic()
    processes = begin_ranks(ranks, "04_train_policy.py", *flags(workspace, out), folder=folder)
    while time.monotonic() - began < 90 and last_state() < wanted:
        time.sleep(0.005)
    time.sleep(pause_s)
    for process in processes:
        process.kill()
    assert [ended(process) for process in processes] == [-signal.SIGKILL] * ranks, "it had ended before"


def test_kill_9_at_random_moments(workspace, whole, tmp_path):
    """A run killed at random moments ends with the weights of one that was not, bit for bit on one rank."""
    rng, out = random.Random(0), tmp_path / "killed"
    for _ in range(2):
        kill_after_a_state(workspace, out, tmp_path, pause_s=rng.random() * 0.05)
    assert "continues at step" in succeed("04_train_policy.py", *flags(workspace, out))
    assert greatest_difference(out, whole) == 0
    assert [row["step"] for row in read(out / "metrics.jsonl")] == list(range(1, 9))
    assert not (out / "states").exists() and (out / "COMPLETED").exists()


def test_a_state_of_two_ranks_goes_on_with_one(workspace, whole, tmp_path):
    out = tmp_path / "moved"
    kill_after_a_state(workspace, out, tmp_path, steps=3, ranks=2)
    kept = sorted(int(path.parent.name) for path in (out / "states").glob("*/.metadata"))
    assert 2 <= len(kept) <= 3                                      # the last two, and one that was about to be removed
    assert "continues at step" in succeed("04_train_policy.py", *flags(workspace, out))
    assert greatest_difference(out, whole) < 1e-4
