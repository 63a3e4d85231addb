"""lib/engine.py: the same samples as the plain way, whatever else is in the batch, and what it does not compute."""
import asyncio
import copy
import random
from unittest import mock

import pytest
import torch

import bench_rollout
from lib import engine as engine_module
from lib.engine import Engine, next_tokens
from lib.fast import few_sizes, WIDTH_STEP
from lib.load import projection_of
from lib.seeds import uniforms
from server import generate

STOPS = [780, 17]                                                             # the end of a turn, and a common word


def prompts_of(*lengths):
    """Prompts of random ids that begin alike."""
    rng = random.Random(0)
    return [[1, 2, 3] + [rng.randrange(20, 700) for _ in range(length)] for length in lengths]


def randoms_of(*key, samples=1, max_new_tokens=24):
    return uniforms((samples, max_new_tokens), *key)


def plain(model, prompt, randoms, temperature=1.0):
    return bench_rollout.generate(model, [prompt], [randoms], temperature, STOPS)


def together(*coroutines):
    """The results of coroutines in one event loop, errors among them."""
    async def gather():
        return await asyncio.wait_for(asyncio.gather(*coroutines, return_exceptions=True), 60)
    return asyncio.run(gather())


def ask(engine, prompt, randoms, temperature=1.0, key=None):
    return together(engine.generate(prompt, randoms, temperature, key))[0]


class PlainGraph:
    """A Graph that computes what a captured one would launch."""

    def __init__(self, work, others):
        self.replay = work


def test_samples_do_not_depend_on_the_batch(tiny, monkeypatch):
    """In turn, with a few others, or all at once as on a GPU (has_few_shapes)."""
    model, _ = tiny
    monkeypatch.setattr(engine_module, "Graph", PlainGraph)
    prompts = prompts_of(*[5, 90, 17, 250, 1, 33, 34, 60, 8, 120, 40, 2])
    temperatures = [1.0, 0.0, 0.6] * 4
    randoms = [randoms_of(n, max_new_tokens=4 + 3 * n) for n in range(len(prompts))]
    expected = [plain(model, *request) for request in zip(prompts, randoms, temperatures)]
    lengths = [len(ids) for [ids] in expected]
    assert len(set(lengths)) > 3 and any(ids[-1] in STOPS for [ids] in expected)
    for slots, has_few_shapes in ((1, False), (3, False), (32, True)):
        engine = Engine(model, STOPS, slots, 400)
        engine.has_few_shapes = has_few_shapes
        monkeypatch.setitem(WIDTH_STEP, "cpu", 32 if has_few_shapes else 1)
        assert together(*map(engine.generate, prompts, randoms, temperatures)) == expected
        stats = engine.stats
        # a prompt's last token is read by the step that samples the first new one
        assert stats["prefill_tokens"] + stats["reused_tokens"] == sum(map(len, prompts)) - len(prompts)
        assert stats["decode_tokens"] == sum(lengths)
        assert stats["decode_steps"] == stats["decode_tokens"] or slots > 1
    assert all(rows in (1, 2, 4, 8, 16, 32) and width % 64 == 0 for rows, width in engine.graphs)
    assert any(engine.graphs.values()) and len(engine.graphs) < stats["decode_steps"] / 4


def counted(engine, prompt, randoms, key):
    """(The replies, which are those of the plain way; how many tokens of the prompt were reused, and computed.)"""
    before = engine.stats.copy()
    replies = ask(engine, prompt, randoms, key=key)
    assert replies == plain(engine.model, prompt, randoms)
    return replies, *(engine.stats[name] - before[name] for name in ("reused_tokens", "prefill_tokens"))


@pytest.mark.parametrize("samples", [1, 8])
def test_a_dialogue_computes_only_what_is_new(tiny, samples):
    """Of many samples the prompt once, and next turn those that were not sent are not read."""
    engine = Engine(tiny[0], STOPS, samples + 1, 400)
    [prompt], cached, said = prompts_of(50), 0, set()
    for turn, reply in enumerate([*prompts_of(7, 20, 1), []]):
        randoms = randoms_of(turn, samples=samples)
        new, reused, computed = counted(engine, prompt, randoms, "a")
        assert (reused, computed) == (cached, len(prompt) - cached - 1)
        said |= set(map(tuple, new))
        sent = max(new, key=len)
        cached = len(prompt) + len(sent) - 1                         # no step has read the last token
        prompt = prompt + sent + reply
    assert len(said) > samples / 2
    changed = prompt[:30] + [5] + prompt[31:]                        # the template rewrites earlier text
    for again, key, reused in ((changed, "a", 30), (changed, "a", len(changed) - 1), (changed[:40], "a", 39),
                               (changed, "b", 0)):                   # another dialogue's cache is not read
        assert counted(engine, again, randoms, key)[1:] == (reused, len(again) - reused - 1)


def test_dialogues_in_flight(tiny):
    """Dialogues of several turns and samples, whose people answer at once or later; slots move, and are taken away."""
    async def play(engine, number, prompt):
        rng = random.Random(number)
        for turn in range(4):
            randoms = randoms_of(number, turn, samples=1 + number % 3, max_new_tokens=rng.randrange(3, 20))
            new = await engine.generate(prompt, randoms, 1.0, key=number)
            assert new == plain(tiny[0], prompt, randoms)
            prompt = prompt + rng.choice(new) + [rng.randrange(20, 700) for _ in range(rng.randrange(1, 12))]
            for _ in range(rng.choice([0, 0, 5, 30])):
                await asyncio.sleep(0)
    for slots in (6, 3):
        engine = Engine(tiny[0], STOPS, slots, 600)
        dialogues = [play(engine, number, prompt) for number, prompt in enumerate(prompts_of(*[80, 5, 40, 20, 60, 3]))]
        assert together(*dialogues) == [None] * 6
        assert engine.stats["reused_tokens"] > 0


def test_the_least_recently_used_dialogue_gives_way(tiny):
    engine, randoms = Engine(tiny[0], STOPS, 2, 400), randoms_of(0, max_new_tokens=5)
    prompts = dict(zip("abc", prompts_of(30, 40, 50)))
    reused = [counted(engine, prompts[key], randoms, key)[1] for key in "ababcab"]
    assert [count > 0 for count in reused] == [False, False, True, True, False, False, False]


def test_few_sizes():
    """Those of widths: at most a quarter above, but multiples of 64."""
    sizes = {few_sizes(number) for number in range(1, 2049)}
    assert sorted(sizes) == [*range(64, 513, 64), 640, 768, 896, 1024, 1280, 1536, 1792, 2048]
    assert all(number <= few_sizes(number) <= max(number + 63, 1.25 * number) for number in range(1, 2049))


def test_an_error_of_the_model_reaches_all_who_wait(tiny, monkeypatch):
    engine = Engine(tiny[0], STOPS, 2, 100)
    monkeypatch.setattr(tiny[0].get_decoder(), "forward", mock.Mock(side_effect=RuntimeError("out of memory")))
    prompts = enumerate(prompts_of(20, 30) * 3)
    results = together(*(engine.generate(prompt, randoms_of(0), 1.0, key) for key, prompt in prompts))
    assert [str(error) for error in results] == ["out of memory"] * 6


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_beyond_the_tokenizer_are_not_sampled(tiny, temperature):
    """As Qwen's, whose embedding is padded: their share goes to the others."""
    model, _ = tiny
    [prompt], randoms = prompts_of(12), randoms_of(1, samples=8)
    assert any(max(ids) >= 100 for ids in ask(Engine(model, [], 8, 400), prompt, randoms, temperature))
    engine = Engine(model, [], 8, 400, num_ids=100)
    found = ask(engine, prompt, randoms, temperature)
    assert max(max(ids) for ids in found) < 100 and all(len(ids) == 24 for ids in found)
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1:, :100].float()
    firsts = next_tokens(logits.expand(8, -1), randoms[:, 0], torch.full((8,), temperature))
    assert [ids[0] for ids in found] == firsts.tolist()


def test_bfloat16(tiny):
    """It rounds differently in another batch, but stays in range."""
    model = copy.deepcopy(tiny[0]).bfloat16()
    engine = Engine(model, [], 2, 400)
    for [ids] in together(*(engine.generate(prompt, randoms_of(0), 1.0) for prompt in prompts_of(3, 40))):
        assert len(ids) == 24 and max(ids) < 781


def test_logits_are_float32_sums_as_in_scores(tiny, monkeypatch):
    """In bfloat16, too: the product of ActionModel and engine is one."""
    model, sampled, forward = copy.deepcopy(tiny[0]).bfloat16(), [], Engine.forward
    projection, expected = projection_of(model), []

    def states_of(*args):
        states = forward(*args)
        expected.append(states[:, 0].float() @ projection.weight.float().t())
        return states

    def spied(logits, *args):
        sampled.append(logits)
        return next_tokens(logits, *args)
    monkeypatch.setattr(Engine, "forward", states_of)
    monkeypatch.setattr(engine_module, "next_tokens", spied)
    ask(Engine(model, [], 1, 400), prompts_of(0)[0][:1], randoms_of(0, max_new_tokens=5))
    assert len(sampled) == 5 and all(map(torch.equal, sampled, expected))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_sampling_follows_the_softmax(tiny, temperature):
    model, [prompt] = tiny[0], prompts_of(20)
    with torch.no_grad():
        probabilities = torch.softmax(model(torch.tensor([prompt])).logits[0, -1].float() / temperature, -1)
    grid = torch.linspace(0, 1, 1001)[:-1, None] + 0.5 / 1000                # evenly spaced points: no sampling noise
    first = torch.tensor([ids[0] for ids in generate(model, [prompt], grid, temperature, [])])
    shares = torch.bincount(first, minlength=len(probabilities)) / 1000
    torch.testing.assert_close(shares, probabilities, atol=2e-3, rtol=0)
    likeliest = generate(model, [prompt], grid[:1], 0.0, [])
    assert likeliest == [[probabilities.argmax().item()]]
