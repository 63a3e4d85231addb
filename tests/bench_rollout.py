"""Dialogues per second of rollouts through lib.engine.Engine, and the plain way.

    python tests/bench_rollout.py --model smollm2 --dialogues 16 --rounds 10 [--repeats 3] [--best-of 1]

The plain way is transformers' generate(): all dialogues in lock step, the whole prompts in every round. Same model,
prompts, random numbers and stop ids, alternating. A scripted exchange: the agent's turns are sampled, and end with a
sentence or after --max-new-tokens; the person's replies are fixed texts. With --best-of N the first of N candidates is
sent."""
import argparse
import asyncio
import pathlib
import statistics
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from colbench import backend  # noqa: E402
from lib.engine import Engine, next_tokens  # noqa: E402
from lib.load import load_model  # noqa: E402
from lib.runtime import start  # noqa: E402
from lib.seeds import uniforms  # noqa: E402
from lib.tokens import agent_messages, encode, render_chat, stop_ids  # noqa: E402

REQUEST = ("Can you write a function for me, number {}, that works out the price of a ticket from the age of the "
           "visitor and the day of the week?")
REPLIES = (
    "Yes, that is what I had in mind, more or less.", "Only for the adults.", "The fee is added after the discount.",
    "It should be rounded to two digits, and never below zero.", "If the list is empty, give back None.", "No.",
    "They are sorted by name, and then by age where the names are the same.")


def generate(model, prompts, randoms, temperature, stops):
    """What an Engine samples, by transformers' generate(): all prompts padded into one batch, until the last row ends.
    randoms: of each prompt (samples, tokens)."""
    rows = [prompt for prompt, numbers in zip(prompts, randoms) for _ in numbers]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=model.device)         # (N, T)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
    randoms = torch.cat(randoms).to(model.device, torch.float32)                                      # (N, tokens)
    temperatures = torch.full_like(randoms[:, 0], temperature)

    def sampled_alone(read, logits):
        tokens = next_tokens(logits, randoms[:, read.shape[1] - width], temperatures)
        return torch.nn.functional.one_hot(tokens, logits.shape[1]).float()
    new = model.generate(ids, attention_mask=mask, max_new_tokens=randoms.shape[1], do_sample=False, pad_token_id=0,
                         eos_token_id=stops, logits_processor=[sampled_alone])[:, width:]
    outputs = []
    for row in new.tolist():
        end = next((place for place, token in enumerate(row, 1) if token in stops), len(row))
        outputs.append(row[:end])
    return outputs


class LockStep:
    """In the place of an Engine: generate() for all dialogues at once, when all have asked."""

    def __init__(self, model, stops, num_dialogues):
        self.model, self.stops, self.num_dialogues, self.waiting = model, stops, num_dialogues, []

    async def generate(self, prompt, randoms, temperature, key):
        future = asyncio.Future()
        self.waiting.append((prompt, randoms, future))
        if len(self.waiting) == self.num_dialogues:
            prompts, numbers, futures = zip(*self.waiting)
            self.waiting = []
            outputs = generate(self.model, prompts, numbers, temperature, self.stops)
            for number, other in enumerate(futures):
                other.set_result(outputs[number * len(randoms):(number + 1) * len(randoms)])
        return await future


async def play(number, engine, tokenizer, args):
    """The outputs of each turn of a dialogue."""
    history, sampled = [{"role": "user", "content": REQUEST.format(number)}], []
    for turn in range(args.rounds):
        messages = agent_messages(history, args.rounds, backend.agent_system(args.rounds))
        prompt = encode(tokenizer, render_chat(tokenizer, messages, add_generation_prompt=True))
        randoms = uniforms((args.best_of, args.max_new_tokens), number, turn)
        sampled.append(await engine.generate(prompt, randoms, 1.0, key=number))
        text = tokenizer.decode(sampled[-1][0], skip_special_tokens=True).strip()
        reply = REPLIES[(number + turn) % len(REPLIES)]
        history += [{"role": "assistant", "content": text}, {"role": "user", "content": reply}]
    return sampled


async def play_all(engine, tokenizer, args):
    return await asyncio.gather(*(play(number, engine, tokenizer, args) for number in range(args.dialogues)))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="folder or hub id, or smollm2")
    parser.add_argument("--dialogues", type=int, default=16, help="dialogues, all in flight")
    parser.add_argument("--rounds", type=int, default=10, help="turns of the agent in a dialogue")
    parser.add_argument("--max-new-tokens", type=int, default=40, help="tokens a turn")
    parser.add_argument("--best-of", type=int, default=1, help="candidates a turn")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each way")
    args = parser.parse_args()
    model, tokenizer = load_model(args.model, start(0).device)
    model.eval()
    # What ends a turn: the model's stop ids, and what ends a sentence, because a base model seldom ends its turns.
    texts = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    stops = sorted({*stop_ids(model, tokenizer), *(n for n, text in enumerate(texts) if text[-1:] in ".?Ċ")})
    seconds, sampled = {"plain": [], "engine": []}, {}
    for _ in range(args.repeats):
        engine = Engine(model, stops, args.dialogues * args.best_of, 8192)
        for way, sampler in (("plain", LockStep(model, stops, args.dialogues)), ("engine", engine)):
            begin = time.perf_counter()
            sampled[way] = sum(asyncio.run(play_all(sampler, tokenizer, args)), [])
            seconds[way].append(time.perf_counter() - begin)
    plain, fast = (args.dialogues / statistics.median(seconds[way]) for way in ("plain", "engine"))
    print(f"dialogues/s: plain {plain:.3f}, engine {fast:.3f}, ratio {fast / plain:.2f} (medians of {args.repeats})")
    same = sum(a == b for a, b in zip(*sampled.values()))
    print(f"the same ids in {same} of {len(sampled['plain'])} turns")
    print("engine: prefill {prefill_tokens:,} tokens, {reused_tokens:,} reused; decode {decode_tokens:,} in "
          "{decode_steps:,} steps".format(**engine.stats))


if __name__ == "__main__":
    main()
