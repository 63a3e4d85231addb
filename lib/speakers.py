"""What says something in a dialogue: a model on this machine (lib/engine.py, lib/vision.py) or a server."""
import asyncio
import base64
import collections
import dataclasses
import functools
import pathlib
import sys
from typing import NamedTuple

import torch

from lib.engine import Engine
from lib.folders import render_chat
from lib.models import encode, load_model, stop_ids
from lib.runtime import barrier, gather, InputError, write_jsonl
from lib.seeds import server_seed, uniforms
from lib.servers import (
    empty_fault,
    is_server,
    open_server,
    Reply,
    ReplyError,
    Server,
    server_reply,
    strip_thoughts,
)
from lib.vision import load_vision, vision_reply

STOP_TOKENS = 40                                # of the end of a reply: a text that ends a turn is looked for in these


class Speaker(NamedTuple):
    """A model, as open_speaker() gives it."""

    model: torch.nn.Module | None = None        # of a server None
    tokenizer: object = None                    # of a model that is shown images its processor; of a server often None
    engine: Engine | None = None                # of a model on this machine that reads texts
    server: Server | None = None
    vision_lock: asyncio.Lock | None = None     # of a model on this machine that is shown images, one request at a time
    template_args: dict = {}                    # arguments of the chat template
    stop: tuple = ()                            # texts that end a turn


class NoRoom(ReplyError):
    """A prompt is so long that a model on this machine has no room for the reply."""


@dataclasses.dataclass(frozen=True)
class SpeakerOptions:
    """How models are opened: the first four of a model on this machine, the next two of a server."""

    device: torch.device
    dtype: str                                  # of the arithmetic
    slots: int                                  # replies that are sampled at a time
    max_tokens: int                             # of a prompt with its reply
    timeout_s: float = 600                      # of a request
    retries: int = 8
    stop: tuple = ()                            # texts that end a turn


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How replies to a chat are sampled."""

    key: tuple                                  # what their random numbers depend on
    temperature: float
    max_new_tokens: int
    count: int = 1                              # replies; the first one is the same for any number of them
    cache: tuple | None = None                  # the side of a dialogue, by which the engine finds earlier turns


def open_speakers(names, options, template_args, sees):
    """The Speaker of each role in names, {role: model name or None}; a model is opened once for all of its roles.

    options: SpeakerOptions.
    template_args: {role: arguments of the chat template}.
    sees: the role "simulator" is shown images."""
    opened, speakers = {}, []
    for role, name in names.items():
        if not name:
            speakers.append(None)
            continue
        is_shown_images = sees and role == "simulator"
        if name not in opened:
            opened[name] = open_speaker(name, options, is_shown_images)
        speaker = opened[name]
        if is_shown_images and not (speaker.vision_lock or speaker.server):
            raise InputError(f"{name}: cannot be the agent and a simulator that sees; put it behind a server")
        speakers.append(speaker._replace(template_args=template_args.get(role, {})))
    return speakers


def open_speaker(name, options, sees=False):
    """The Speaker of a model name. sees: it will be shown images, and a local one then takes one request at a time."""
    if is_server(name):
        return Speaker(server=open_server(name, options.timeout_s, options.retries), stop=options.stop)
    if sees:
        model, processor = load_vision(name, options.device, options.dtype)
        return Speaker(model, processor, vision_lock=asyncio.Lock())
    model, tokenizer = load_model(name, options.device, options.dtype)
    ended = None
    if options.stop:
        ended = functools.partial(has_stop, tokenizer=tokenizer, stop=options.stop)
    engine = Engine(model.eval(), stop_ids(model, tokenizer), options.slots, options.max_tokens, ended)
    return Speaker(model, tokenizer, engine, stop=options.stop)


def has_stop(ids, tokenizer, stop):
    """Whether the last of some sampled ids has brought a text of `stop` to its end."""
    tail = tokenizer.decode(ids[-STOP_TOKENS:], skip_special_tokens=False)
    return any(text in tail for text in stop)


def before_stop(text, stop):
    """A reply without the text that ended it, as servers give it."""
    for ending in stop:
        text = text.split(ending, 1)[0]
    return text


# ---------------------------------------------------------------------------------------------------------------------
# replies to a chat (messages)

async def ask(speaker, chat, sampling):
    """(prompt text, [Reply, …]): continuations of a chat (messages), one for each of sampling.count.

    The prompt is None where only the speaker knows it: a model that sees, or a server without its tokenizer."""
    tokenizer = speaker.tokenizer
    if speaker.vision_lock:
        async with speaker.vision_lock:
            reply = await asyncio.to_thread(vision_reply, speaker.model, tokenizer, chat, sampling.max_new_tokens)
        return None, [reply]
    prompt = None
    if tokenizer:
        prompt = render_chat(tokenizer, chat, add_generation_prompt=True, **speaker.template_args)
    if speaker.server:
        return prompt, await ask_server(speaker, chat, prompt, sampling)
    return prompt, await ask_engine(speaker, prompt, sampling)


async def ask_server(speaker, chat, prompt, sampling):
    """The Replies of a server. With its tokenizer it must give the ids that it samples (ids_fault)."""
    fields = {}
    if speaker.template_args:
        fields["chat_template_kwargs"] = speaker.template_args
    if speaker.stop:
        fields["stop"] = speaker.stop
    fault_of = empty_fault
    if speaker.tokenizer:
        fields["return_token_ids"] = True
        num_tokens = len(encode(speaker.tokenizer, prompt))

        def fault_of(reply):
            return empty_fault(reply) or ids_fault(reply, speaker, num_tokens)
    messages = [{**message, "content": sent(message["content"])} for message in chat]
    requests = []
    for number in range(sampling.count):
        key = sampling.key
        if number > 0:                                               # the first as where it is the only one
            key = (*key, number)
        requests.append(server_reply(speaker.server, messages, sampling.temperature, sampling.max_new_tokens,
                                     server_seed(*key), fault_of, **fields))
    return await asyncio.gather(*requests)


async def ask_engine(speaker, prompt, sampling):
    """The Replies of a model on this machine to a prompt (text); NoRoom where it is too long."""
    tokenizer = speaker.tokenizer
    prompt_ids = encode(tokenizer, prompt)
    fault = speaker.engine.lack_of_room(len(prompt_ids), sampling.max_new_tokens)
    if fault:
        raise NoRoom(f"{fault}: lower --max-new-tokens, or leave the task out")
    end_ids = stop_ids(speaker.model, tokenizer)
    randoms = uniforms((sampling.count, sampling.max_new_tokens), *sampling.key)
    outputs = await speaker.engine.generate(prompt_ids, randoms, sampling.temperature, sampling.cache)
    replies = []
    for ids in outputs:
        text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        ended = ids[-1] in end_ids or has_stop(ids, tokenizer, speaker.stop)
        replies.append(Reply(before_stop(text, speaker.stop), ended, ids, len(prompt_ids), len(ids)))
    return replies


def ids_fault(reply, speaker, prompt_tokens):
    """One line where the ids of a server's Reply to a prompt of so many tokens cannot be what it sampled; else None.

    They are wrong if they say something else than its text, by the speaker's tokenizer, or do not end the turn.
    InputError where the server gives no ids, or has read another number of tokens."""
    name, tokenizer = speaker.server.name, speaker.tokenizer
    if not reply.ids:
        raise InputError(f"{name}: gives no token ids; --agent-tokenizer and --sampler need a server that gives those "
                         "that it samples, as vLLM does (return_token_ids)")
    if reply.prompt_tokens != prompt_tokens:
        raise InputError(f"{name}: says that it has read {reply.prompt_tokens:,} tokens, where this tokenizer and "
                         f"template make {prompt_tokens:,}; the server's must be the same")
    vocabulary = range(len(tokenizer))
    for token in reply.ids:
        if not isinstance(token, int) or token not in vocabulary:
            return "wrong ids (not of this vocabulary)"
    decoded = tokenizer.decode(reply.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    text_of_ids = comparable(before_stop(decoded, speaker.stop))
    text = comparable(reply.text)
    answer = comparable(strip_thoughts(reply.text))          # a server may write the thoughts before it otherwise
    ends_with_answer = answer != "" and text_of_ids.endswith(answer)
    if text_of_ids != text and not ends_with_answer:
        return f"wrong ids (they say {text_of_ids[-40:]!r} and the text says {text[-40:]!r})"
    if reply.ended and not speaker.stop and tokenizer.decode(reply.ids[-1:], skip_special_tokens=True):
        return "wrong ids (no end of the turn among them)"
    return None


def comparable(text):
    """A text without what a limit has cut of its last character, which some show and others do not."""
    return text.rstrip("\ufffd").strip()


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


# ---------------------------------------------------------------------------------------------------------------------
# many dialogues at once

async def run_concurrently(work, items, concurrency):
    """work(item) for all items, `concurrency` of them in flight: one that has ended makes place for the next at once.

    If `work` returns a coroutine (scoring), it runs in the background, so that it cannot change which requests share a
    batch. At most twice `concurrency` of these wait at a time (each worker may add one to as many), so that a kill
    costs no more than that."""
    waiting, background = iter(items), set()

    async def worker():
        for item in waiting:
            scoring = await work(item)
            if scoring is not None:
                background.add(asyncio.create_task(scoring))
            ended = {task for task in background if task.done()}
            while len(background - ended) > concurrency:             # others add and remove some meanwhile
                newly_ended, _ = await asyncio.wait(background - ended, return_when=asyncio.FIRST_COMPLETED)
                ended |= newly_ended
            for task in ended & background:                          # another worker may have removed it meanwhile
                background.remove(task)
                task.result()                                        # raises what it raised

    workers = [asyncio.create_task(worker()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
        await asyncio.gather(*background)
    except BaseException:
        for task in (*workers, *background):
            task.cancel()
        await asyncio.gather(*workers, *background, return_exceptions=True)  # or asyncio prints what each has raised
        raise


class Failures(list):
    """Rows of what could not go on (ReplyError), {"number", …, "failed"}, of this rank; many in a row end the run."""

    def __init__(self, out, unit, concurrency):
        self.out, self.unit = out, unit
        self.most = max(20, concurrency)
        self.in_a_row = 0

    def add(self, error, **row):
        self.append({**row, "failed": str(error)})
        self.in_a_row += 1
        if self.in_a_row >= self.most:
            raise InputError(f"{self.out}: {self.in_a_row} {self.unit}s in a row failed, the last with {error}; run "
                             "the same command again to go on") from None

    def finish(self, rows, num_rows, runtime):
        """Finish the Rows of all ranks, each of which calls this; where any failed, the stage ends with status 2."""
        failed = []
        for rows_of_rank in gather(list(self)):
            failed += rows_of_rank
        failed.sort(key=lambda row: row["number"])
        if runtime.rank == 0:
            if failed:
                write_jsonl(f"{self.out}.failed.jsonl", failed)
            else:
                rows.finish(num_rows)
        barrier()                                                    # a rank that leaves early would end the others
        if failed and runtime.rank == 0:
            raise InputError(f"{self.out}: {len(failed):,} of {num_rows:,} {self.unit}s failed, the first with "
                             f"{failed[0]['failed']}; run the same command again for these")
        if failed:
            sys.exit(2)


# ---------------------------------------------------------------------------------------------------------------------
# what servers and models did, as lines of text

def server_line(name, counts):
    """What a server did, by the counts of all ranks."""
    retried = []
    for key, count in counts.items():
        if key.startswith("retried: "):
            retried.append(f"{count:,} {key.removeprefix('retried: ')}")
    return (f"{name}: {counts['requests']:,} requests, {counts['server_prompt_tokens']:,} prompt and "
            f"{counts['server_completion_tokens']:,} completion tokens; retried: {', '.join(retried) or 'none'}")


def engine_line(name, counts, num_ranks):
    """What an engine did, by the sums of its stats over all ranks."""
    speeds = []
    for what in ("prefill", "decode"):
        tokens = counts[f"{what}_tokens"]
        tokens_per_s = num_ranks * tokens / max(1e-9, counts[f"{what}_s"])
        speeds.append(f"{what} {tokens:,} tokens, {tokens_per_s:,.0f} a second")
    return (f"{name}: {'; '.join(speeds)}; {counts['reused_tokens']:,} tokens reused; occupancy "
            f"{counts['occupancy'] / num_ranks:.0%}")


def rollout_lines(ranks, wall_s):
    """How fast dialogues went, and what each model did, as text.

    ranks: of each rank its "tally" of dialogues and seconds, "stats" {model name: counts} and "verdicts" of a judge,
    which are added up."""
    tally = summed(rank["tally"] for rank in ranks)
    lines = [f"{tally['played']:,} dialogues in {wall_s:,.0f} s, {60 * tally['played'] / wall_s:,.1f} a minute; they "
             f"waited {tally['waited_s']:,.1f} s of {tally['played_s']:,.1f} s for the human"]
    for name in ranks[0]["stats"]:
        counts = summed(rank["stats"][name] for rank in ranks)
        if is_server(name):
            lines.append(server_line(name, counts))
        else:
            lines.append(engine_line(name, counts, len(ranks)))
    verdicts = summed(rank["verdicts"] for rank in ranks)
    if any(verdicts.values()):
        comparisons = ", ".join(f"{count:,} {verdict}" for verdict, count in verdicts.items())
        lines.append(f"judge's comparisons: {comparisons}")
    return lines


def summed(counts_of_ranks):
    total = collections.Counter()
    for counts in counts_of_ranks:
        total.update(counts)
    return total
