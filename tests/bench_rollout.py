"""Dialogues per second of rollouts through lib.engine.Engine, on a CPU, too, and what the engine counts.

    python tests/bench_rollout.py --model smollm2 --dialogues 16 --rounds 10 [--repeats 3] [--best-of 1]

A scripted exchange: the agent's turns are sampled, and end with a sentence or after --max-new-tokens; the person's
replies are fixed texts. With --best-of N the first of N candidates is sent."""
import argparse
import asyncio
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import common  # noqa: E402
from colbench.backend import AGENT_SYSTEM  # noqa: E402
from lib.engine import Engine  # noqa: E402
from lib.models import encode, load_model, render_chat, stop_ids  # noqa: E402
from lib.runtime import start  # noqa: E402
from lib.seeds import uniforms  # noqa: E402

REQUEST = ("Can you write a function for me, number {}, that works out the price of a ticket from the age of the "
           "visitor and the day of the week?")
REPLIES = ("Yes, that is what I had in mind, more or less.", "Only for the adults.", "No.", "Ten at most.",
           "It should be rounded to two digits, and never below zero.", "I do not know, do what you think is best.",
           "The first one counts twice, because it is the one that people look at.")


async def play(number, engine, tokenizer, args):
    """One dialogue."""
    history = [{"role": "user", "content": REQUEST.format(number)}]
    for turn in range(args.rounds):
        messages = common.agent_messages(history, args.rounds, AGENT_SYSTEM)
        prompt = encode(tokenizer, render_chat(tokenizer, messages, add_generation_prompt=True))
        randoms = uniforms((args.best_of, args.max_new_tokens), number, len(history))
        outputs = await engine.generate(prompt, randoms, 1.0, key=number)
        text = tokenizer.decode(outputs[0], skip_special_tokens=True).strip()
        reply = REPLIES[(number + turn) % len(REPLIES)]
        history += [{"role": "assistant", "content": text}, {"role": "user", "content": reply}]


async def play_all(engine, tokenizer, args):
    await asyncio.gather(*(play(number, engine, tokenizer, args) for number in range(args.dialogues)))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="folder or hub id, or smollm2")
    parser.add_argument("--dialogues", type=int, default=16, help="dialogues, all in flight")
    parser.add_argument("--rounds", type=int, default=10, help="turns of the agent in a dialogue")
    parser.add_argument("--max-new-tokens", type=int, default=40, help="tokens a turn")
    parser.add_argument("--best-of", type=int, default=1, help="candidates a turn")
    parser.add_argument("--repeats", type=int, default=3, help="measurements")
    args = parser.parse_args()
    model, tokenizer = load_model(args.model, start(0).device)
    model.eval()
    # What ends a turn: the model's stop ids, and what ends a sentence, because a base model seldom ends its turns.
    texts = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    stops = sorted({*stop_ids(model, tokenizer), *(n for n, text in enumerate(texts) if text[-1:] in ".?Ċ")})
    seconds = []
    for _ in range(args.repeats):
        engine = Engine(model, stops, args.dialogues * args.best_of, 8192)
        begin = time.perf_counter()
        asyncio.run(play_all(engine, tokenizer, args))
        seconds.append(time.perf_counter() - begin)
    print(f"dialogues/s: {args.dialogues / statistics.median(seconds):.3f} (median of {args.repeats})")
    print("prefill {prefill_tokens:,} tokens, {reused_tokens:,} reused; decode {decode_tokens:,} in {decode_steps:,} "
          "steps".format(**engine.stats))


if __name__ == "__main__":
    main()
