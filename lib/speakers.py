"""What says something in a dialogue: a model on this machine (lib/engine.py, lib/vision.py) or a server."""
import asyncio
import base64
import collections
import functools
import pathlib

from lib.engine import Engine, uniforms
from lib.models import encode, is_server, load_model, stop_ids
from lib.runtime import InputError
from lib.servers import open_server, Reply, server_reply, server_seed
from lib.vision import load_vision, vision_reply

# engine: of a local model; server: of one behind http://; sees: a lock of a local model that is shown images, whose
# processor is in the place of the tokenizer; template_args: of the chat template; stop: texts that end a turn
Speaker = collections.namedtuple("Speaker", "model tokenizer engine server sees template_args stop",
                                 defaults=(None, None, None, None, None, {}, ()))


def open_speakers(names, device, sees, args):
    """The Speaker of each role in names, {"agent": model name or None, "simulator", "judge"}, by the arguments of 02; a
    model is opened once for all of its roles. sees: the simulator is shown images."""
    opened, speakers = {}, []
    slots = args.concurrency * args.best_of * (1 + (names["agent"] == names["simulator"]))     # each side has its cache
    for role, name in names.items():
        shown = sees and role == "simulator"
        if name and name not in opened:
            opened[name] = open_speaker(name, device, args.dtype, slots, args.max_tokens, args.timeout, args.retries,
                                        args.stop, shown)
        if name and shown and not (opened[name].sees or opened[name].server):
            raise InputError(f"{name}: cannot be the agent and a simulator that sees; put it behind a server")
        speakers.append(name and opened[name]._replace(template_args=args.chat_template_args.get(role, {})))
    return speakers


def open_speaker(name, device, dtype, slots, max_tokens, timeout, retries, stop=(), sees=False):
    """The Speaker of a model name. sees: it will be shown images, and a local one then takes one request at a time."""
    if is_server(name):
        return Speaker(server=open_server(name, timeout, retries), stop=stop)
    if sees:
        return Speaker(*load_vision(name, device, dtype), sees=asyncio.Lock())
    model, tokenizer = load_model(name, device, dtype)
    engine = Engine(model.eval(), stop_ids(model, tokenizer), slots, max_tokens,
                    functools.partial(has_stop, tokenizer=tokenizer, stop=stop) if stop else None)
    return Speaker(model, tokenizer, engine, stop=stop)


def has_stop(ids, tokenizer, stop):
    """Whether the last of some sampled ids has brought a text of `stop` to its end."""
    tail = tokenizer.decode(ids[-40:], skip_special_tokens=False)
    return any(text in tail for text in stop)


async def ask(speaker, chat, key, temperature, max_new_tokens, count=1, cache=None, **fields):
    """(prompt text, [Reply, …]): `count` continuations of a chat (messages), drawn with the random numbers of `key`.
    `cache` lets the engine find what it has computed for this dialogue; a server gets more `fields`, and its prompt is
    only known with its tokenizer (None otherwise)."""
    tokenizer, more = speaker.tokenizer, speaker.template_args
    if speaker.sees:
        async with speaker.sees:
            return None, [await asyncio.to_thread(vision_reply, speaker.model, tokenizer, chat, max_new_tokens)]
    prompt = tokenizer and tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **more)
    if speaker.server:
        fields |= ({"chat_template_kwargs": more} if more else {}) | ({"stop": speaker.stop} if speaker.stop else {})
        chat = [{**message, "content": sent(message["content"])} for message in chat]
        return prompt, [await server_reply(speaker.server, chat, temperature, max_new_tokens, server_seed(*key),
                                           **fields)]
    ids, stops = encode(tokenizer, prompt), stop_ids(speaker.model, tokenizer)
    outputs = await speaker.engine.generate(ids, uniforms((count, max_new_tokens), *key), temperature, cache)
    replies = []
    for new in outputs:
        text = tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for stop in speaker.stop:                                    # servers leave it out, too
            text = text.split(stop, 1)[0]
        ended = new[-1] in stops or bool(speaker.stop) and has_stop(new, tokenizer, speaker.stop)
        replies.append(Reply(text, ended, new, len(ids), len(new)))
    return prompt, replies


def sent(content):
    """A message's content as a server takes it: image files as data URLs."""
    if isinstance(content, str):
        return content
    parts = []
    for part in content:
        if part["type"] == "image":
            data = base64.b64encode(pathlib.Path(part["path"]).read_bytes()).decode()
            part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        parts.append(part)
    return parts


async def run_concurrently(work, items, concurrency):
    """work(item) for all items, `concurrency` of them in flight: one that has ended makes place for the next at once.
    If `work` returns a coroutine (scoring), it runs in the background, so that it cannot change which requests share a
    batch; no more than `concurrency` of these wait at a time, so that a kill costs no more than that."""
    waiting, background = iter(items), set()

    async def worker():
        for item in waiting:
            if (rest := await work(item)) is not None:
                background.add(asyncio.create_task(rest))
            ended = {task for task in background if task.done()}
            if len(background) - len(ended) > concurrency:
                ended |= (await asyncio.wait(background - ended, return_when=asyncio.FIRST_COMPLETED))[0]
            for task in ended & background:
                background.remove(task)
                task.result()                                        # raises what it raised
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    await asyncio.gather(*background)


def rollout_lines(ranks, wall_s):
    """How fast dialogues went, and what each model did, as text. ranks: of each rank its "tally" of dialogues and
    seconds, "stats" {model name: counts} and "verdicts" of a judge, which are added up."""
    def total(counts):
        summed = collections.Counter()
        for own in counts:
            summed.update(own)
        return summed

    tally, verdicts = (total(rank[kind] for rank in ranks) for kind in ("tally", "verdicts"))
    lines = [f"{tally['played']:,} dialogues in {wall_s:,.0f} s, {60 * tally['played'] / wall_s:,.1f} a minute; they "
             f"waited {tally['waited_s']:,.1f} s of {tally['played_s']:,.1f} s for the human"]
    for name in ranks[0]["stats"]:
        own = total(rank["stats"][name] for rank in ranks)
        if is_server(name):
            retried = [f"{count:,} {key[9:]}" for key, count in own.items() if key.startswith("retried: ")]
            lines.append(f"{name}: {own['requests']:,} requests, {own['prompt_tokens']:,} prompt and "
                         f"{own['completion_tokens']:,} completion tokens; retried: {', '.join(retried) or 'none'}")
        else:
            speeds = [f"{what} {own[what + '_tokens']:,} tokens, "
                      f"{len(ranks) * own[what + '_tokens'] / max(1e-9, own[what + '_s']):,.0f} a second"
                      for what in ("prefill", "decode")]
            lines.append(f"{name}: {'; '.join(speeds)}; {own['reused_tokens']:,} tokens reused; occupancy "
                         f"{own['occupancy'] / len(ranks):.0%}")
    if any(verdicts.values()):
        lines.append("judge's comparisons: " + ", ".join(f"{count:,} {kind}" for kind, count in verdicts.items()))
    return lines
