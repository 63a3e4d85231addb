"""Dialogues per second of rollouts through lib.engine.Engine, and the plain way.

    python tests/bench_rollout.py --model smollm2 --dialogues 16 --rounds 10 [--repeats 3] [--best-of 1]

The plain way: all dialogues in lock step, the whole prompts in every round. Same model, prompts,
random numbers and stop ids, alternating. A scripted exchange: the agent's turns are sampled, and end with a sentence or
after --max-new-tokens; the person's replies are fixed texts. With --best-of N the first of N candidates is sent."""
import argparse
import asyncio
import pathlib
import statistics
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import common  # noqa: E402
from colbench.backend import AGENT_SYSTEM  # noqa: E402
from lib.engine import Engine, next_tokens  # noqa: E402
from lib.models import encode, load_model, render_chat, stop_ids  # noqa: E402
from lib.runtime import start  # noqa: E402
from lib.seeds import uniforms  # noqa: E402

REPLIES = (
    "Yes, that is what I had in mind, more or less.", "Only for the adults.", "The fee is added after the discount.",
    "I do not know, do what you think is best.", "It should be rounded to two digits, and never below zero.",
    "If the list is empty, give back None.", "They are sorted by name, and then by age where the names are the same.",
    "No.", "The first one counts twice, because it is the one that people look at.", "Ten at most.")


class Dialogue:
    def __init__(self, number, tokenizer, args):
        self.number, self.tokenizer, self.args, self.sampled = number, tokenizer, args, []
        self.history = [{"role": "user", "content": f"Can you write a function for me, number {number}, that works out "
                         "the price of a ticket from the age of the visitor and the day of the week?"}]

    def prompt(self):
        """Ids of the prompt, and the random numbers of the turn (--best-of, --max-new-tokens)."""
        randoms = uniforms((self.args.best_of, self.args.max_new_tokens), self.number, len(self.history))
        text = render_chat(self.tokenizer, common.agent_messages(self.history, self.args.rounds, AGENT_SYSTEM),
                           add_generation_prompt=True)
        return encode(self.tokenizer, text), randoms

    def go_on(self, outputs):
        self.sampled.append(outputs)
        text = self.tokenizer.decode(outputs[0], skip_special_tokens=True).strip()
        reply = REPLIES[(self.number + len(self.history)) % len(REPLIES)]
        self.history += [{"role": "assistant", "content": text}, {"role": "user", "content": reply}]


@torch.no_grad()
def generate(model, prompts, randoms, temperature, stops):
    """What an Engine samples, without one: all prompts padded into one batch, which rows leave as they end."""
    from transformers import DynamicCache
    device = next(model.parameters()).device
    max_new_tokens = randoms.shape[1]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)            # (P, T)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)      # (P, T)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    randoms = randoms.to(device, torch.float32)
    stops = torch.tensor(stops, device=device)
    alive = torch.arange(len(randoms), device=device)
    new = [[] for _ in randoms]
    samples = len(randoms) // len(prompts)
    cache = DynamicCache(config=model.config)
    for step in range(max_new_tokens):
        hidden = model.get_decoder()(input_ids=ids, attention_mask=mask, position_ids=positions,
                                     use_cache=True, cache=cache).last_hidden_state
        logits = model.get_output_embeddings()(hidden[:, -1]).float()                                 # (n, V)
        if step == 0 and samples > 1:
            cache.batch_repeat_interleave(samples)
            logits, mask, positions = (x.repeat_interleave(samples, 0) for x in (logits, mask, positions))
        token = next_tokens(logits, randoms[alive, step], torch.full((len(alive),), temperature, device=device))
        for row, value in zip(alive.tolist(), token.tolist()):
            new[row].append(value)
        going = ~torch.isin(token, stops)
        if not going.any():
            break
        ids = token[:, None]
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        positions = positions[:, -1:] + 1
        if not going.all():                                     # rows that have ended leave the batch
            cache.batch_select_indices(going.nonzero().squeeze(1))
            ids, mask, positions, alive = ids[going], mask[going], positions[going], alive[going]
    return new


def plain(dialogues, model, stops, args):
    for _ in range(args.rounds):
        prompts, randoms = zip(*[dialogue.prompt() for dialogue in dialogues])
        outputs = generate(model, prompts, torch.cat(randoms), 1.0, stops)
        for number, dialogue in enumerate(dialogues):
            dialogue.go_on(outputs[number * args.best_of:(number + 1) * args.best_of])


def through_engine(dialogues, model, stops, args):
    engine = Engine(model, stops, len(dialogues) * args.best_of, 8192)

    async def play(dialogue):
        for _ in range(args.rounds):
            prompt, randoms = dialogue.prompt()
            dialogue.go_on(await engine.generate(prompt, randoms, 1.0, key=dialogue.number))

    async def play_all():
        await asyncio.gather(*map(play, dialogues))

    asyncio.run(play_all())
    return engine.stats


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
    ways = {"plain": plain, "engine": through_engine}
    seconds, sampled = {way: [] for way in ways}, {}
    for _ in range(args.repeats):
        for way, work in ways.items():
            dialogues = [Dialogue(number, tokenizer, args) for number in range(args.dialogues)]
            begin = time.perf_counter()
            stats = work(dialogues, model, stops, args)
            seconds[way].append(time.perf_counter() - begin)
            sampled[way] = [turn for dialogue in dialogues for turn in dialogue.sampled]
    rates = {way: args.dialogues / statistics.median(values) for way, values in seconds.items()}
    print(f"dialogues/s: plain {rates['plain']:.3f}, engine {rates['engine']:.3f}, ratio "
          f"{rates['engine'] / rates['plain']:.2f} (medians of {args.repeats})")
    same = sum(a == b for a, b in zip(*sampled.values()))
    print(f"the same ids in {same} of {len(sampled['plain'])} turns")
    print(f"engine: prefill {stats['prefill_tokens']:,} tokens, {stats['reused_tokens']:,} reused; decode "
          f"{stats['decode_tokens']:,} in {stats['decode_steps']:,} steps")


if __name__ == "__main__":
    main()
