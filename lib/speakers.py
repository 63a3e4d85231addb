"""A model that says something in a dialogue: on this machine (lib/engine.py, lib/vision.py) or a server."""
import asyncio
import base64
import functools
import pathlib
from collections import namedtuple

from lib.engine import Engine, uniforms
from lib.models import encode, is_server, load_model, stop_ids
from lib.servers import open_server, Reply, server_reply, server_seed
from lib.vision import load_vision, vision_reply

# engine: of a local model; server: of one behind http://; sees: a lock of a local model that is shown images, whose
# processor is in the place of the tokenizer; template_args: of the chat template; stop: texts that end a turn
Speaker = namedtuple("Speaker", "model tokenizer engine server sees template_args stop",
                     defaults=(None, None, None, None, None, {}, ()))


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


def speed_lines(speakers, stats, num_ranks):
    """What each of `speakers` ({name: Speaker}) has done, as text; stats: {name: counts of all ranks}."""
    lines = []
    for name, own in stats.items():
        if speakers[name].server:
            retried = [f"{count:,} {key[9:]}" for key, count in own.items() if key.startswith("retried: ")]
            lines.append(f"{name}: {own.get('requests', 0):,} requests, {own.get('prompt_tokens', 0):,} prompt and "
                         f"{own.get('completion_tokens', 0):,} completion tokens; retried: "
                         f"{', '.join(retried) or 'none'}")
        else:
            speeds = [f"{what} {own[what + '_tokens']:,} tokens, "
                      f"{num_ranks * own[what + '_tokens'] / max(1e-9, own[what + '_s']):,.0f} a second"
                      for what in ("prefill", "decode")]
            lines.append(f"{name}: {'; '.join(speeds)}; {own['reused_tokens']:,} tokens reused; occupancy "
                         f"{own['occupancy'] / num_ranks:.0%}")
    return lines
