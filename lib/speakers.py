"""What says something in a dialogue: a model on this machine (lib/engine.py, lib/vision.py) or a server."""
import asyncio
import base64
import collections
import functools
import itertools
import math
import pathlib
import sys

from lib.engine import Engine
from lib.folders import render_chat
from lib.models import encode, load_model, stop_ids
from lib.runtime import barrier, gather, InputError, read_rows, Rows, say
from lib.seeds import server_seed, uniforms
from lib.servers import empty_fault, is_server, open_server, Reply, ReplyError, server_reply, strip_thoughts
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


async def ask(speaker, chat, key, temperature, max_new_tokens, count=1, cache=None):
    """(prompt text, [Reply, …]): `count` continuations of a chat (messages), drawn with the random numbers of `key`.
    `cache` lets the engine find what it has computed for this dialogue. A server's prompt is only known with its
    tokenizer (None otherwise), and it must then give the ids that it samples (ids_fault)."""
    tokenizer, more = speaker.tokenizer, speaker.template_args
    if speaker.sees:
        async with speaker.sees:
            return None, [await asyncio.to_thread(vision_reply, speaker.model, tokenizer, chat, max_new_tokens)]
    prompt = tokenizer and render_chat(tokenizer, chat, add_generation_prompt=True, **more)
    if speaker.server:
        fields = ({"chat_template_kwargs": more} if more else {}) | ({"stop": speaker.stop} if speaker.stop else {})
        chat = [{**message, "content": sent(message["content"])} for message in chat]
        if tokenizer:
            length = len(encode(tokenizer, prompt))
            fields |= {"return_token_ids": True,
                       "fault_of": lambda reply: empty_fault(reply) or ids_fault(reply, speaker, length)}
        seeds = [server_seed(*key, *([n] if n else [])) for n in range(count)]           # the first as with count = 1
        return prompt, await asyncio.gather(*(server_reply(speaker.server, chat, temperature, max_new_tokens, seed,
                                                           **fields) for seed in seeds))
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


def ids_fault(reply, speaker, prompt_tokens):
    """One line where a server's Reply to a prompt of so many tokens has other ids than its text by the speaker's
    tokenizer, or no end of the turn among them; else None. InputError where the server gives no ids, or has read
    another number of tokens."""
    name, tokenizer = speaker.server.name, speaker.tokenizer
    if not reply.ids:
        raise InputError(f"{name}: gives no token ids; --agent-tokenizer and --sampler need a server that gives those "
                         "that it samples, as vLLM does (return_token_ids)")
    if reply.prompt_tokens != prompt_tokens:
        raise InputError(f"{name}: says that it has read {reply.prompt_tokens:,} tokens, where this tokenizer and "
                         f"template make {prompt_tokens:,}; the server's must be the same")
    vocabulary = range(len(tokenizer))
    if not all(isinstance(token, int) and token in vocabulary for token in reply.ids):
        return "wrong ids (not of this vocabulary)"
    said = tokenizer.decode(reply.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    for stop in speaker.stop:
        said = said.split(stop, 1)[0]
    # A limit may cut a character, which is shown or not, and a server may put thoughts apart or write them otherwise.
    said, text, visible = (own.rstrip("\ufffd").strip() for own in (said, reply.text, strip_thoughts(reply.text)))
    if said != text and not (visible and said.endswith(visible)):
        return f"wrong ids (they say {said[-40:]!r} and the text says {text[-40:]!r})"
    if reply.ended and not speaker.stop and tokenizer.decode(reply.ids[-1:], skip_special_tokens=True):
        return "wrong ids (no end of the turn among them)"


class Failures(list):
    """Rows of what no server answered, {"number", …, "failed"}, of this rank; many in a row end the run."""

    def __init__(self, out, unit, concurrency):
        self.out, self.unit, self.most, self.in_a_row = out, unit, max(20, concurrency), 0

    def add(self, error, **row):
        self.append({**row, "failed": str(error)})
        self.in_a_row += 1
        if self.in_a_row >= self.most:
            raise InputError(f"{self.out}: {self.in_a_row} {self.unit}s in a row failed, the last with {error}; run "
                             "the same command again to go on") from None

    def finish(self, rows, num_rows, runtime):
        """Finish the Rows of all ranks, each of which calls this; where any failed, the stage ends with status 2."""
        failed = sorted(itertools.chain(*gather(list(self))), key=lambda row: row["number"])
        if runtime.rank == 0:
            rows.finish(num_rows, failed)
        barrier()                                                    # a rank that leaves early would end the others
        if failed and runtime.rank == 0:
            raise InputError(f"{self.out}: {len(failed):,} of {num_rows:,} {self.unit}s failed, the first with "
                             f"{failed[0]['failed']}; run the same command again for these")
        if failed:
            sys.exit(2)


def served_candidates(out, rows, tokenizer, args, runtime, works):
    """Write `rows`, {"prompt" (text), "task_id", "sample", "turn", …} each, with the "candidates" that the servers
    args.sampler sample after each prompt, to the JSONL file `out` (pathlib.Path), in order. As with runtime.map_blocks
    ranks share the rows, and a run that was killed goes on with those that are missing. What no server answers is a
    Failures' row. `works` gets the servers' counts. Returns all rows, on every rank."""
    from tqdm import tqdm
    if not out.exists():
        speaker = Speaker(tokenizer=tokenizer, server=open_server(args.sampler))
        works.append(speaker.server.counts)
        gate = asyncio.Semaphore(args.concurrency)
        in_flight = 2 * math.ceil(args.concurrency / args.num_candidates)   # a slow candidate leaves no gap at the gate
        failed = Failures(out, "state", in_flight)
        with Rows(out, runtime) as lines:
            missing = [(number, row) for number, row in enumerate(rows) if number not in lines.done]
            mine = missing[runtime.rank::runtime.world_size]
            with tqdm(total=len(mine), unit="state", desc=out.name, mininterval=5,
                      disable=runtime.rank > 0) as progress:
                asyncio.run(run_concurrently(functools.partial(
                    sample_served, speaker=speaker, gate=gate, lines=lines, failed=failed, progress=progress,
                    args=args), mine, in_flight))
        say(server_line(args.sampler, sum(gather(speaker.server.counts), collections.Counter())))
        failed.finish(lines, len(rows), runtime)
    return read_rows(out)


async def sample_served(numbered, speaker, gate, lines, failed, progress, args):
    """Add a (number, row) with its candidates to `lines` (Rows). The server is sent the prompt's ids and gives those
    that it samples; `gate` (asyncio.Semaphore) limits the requests in flight."""
    number, row = numbered
    ids = encode(speaker.tokenizer, row["prompt"])
    fault_of = functools.partial(ids_fault, speaker=speaker, prompt_tokens=len(ids))

    async def one(candidate):
        seed = server_seed(args.seed, "candidates", row["task_id"], row["sample"], row["turn"], candidate)
        async with gate:
            return await server_reply(speaker.server, ids, args.temperature, args.max_new_tokens, seed, fault_of,
                                      return_token_ids=True)
    try:
        replies = await asyncio.gather(*map(one, range(args.num_candidates)))
    except ReplyError as error:
        return failed.add(error, number=number, **{key: row[key] for key in ("task_id", "sample", "turn")})
    lines.add(number, {**row, "candidates": [
        {"text": speaker.tokenizer.decode(reply.ids, skip_special_tokens=True), "ids": reply.ids, "ended": reply.ended}
        for reply in replies]})
    failed.in_a_row = 0
    progress.update()


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
    workers = [asyncio.create_task(worker()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
        await asyncio.gather(*background)
    except BaseException:
        for task in (*workers, *background):
            task.cancel()
        await asyncio.gather(*workers, *background, return_exceptions=True)  # or asyncio prints what each has raised
        raise


def server_line(name, counts):
    retried = [f"{count:,} {key[9:]}" for key, count in counts.items() if key.startswith("retried: ")]
    return (f"{name}: {counts['requests']:,} requests, {counts['server_prompt_tokens']:,} prompt and "
            f"{counts['server_completion_tokens']:,} completion tokens; retried: {', '.join(retried) or 'none'}")


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
            lines.append(server_line(name, own))
        else:
            speeds = [f"{what} {own[what + '_tokens']:,} tokens, "
                      f"{len(ranks) * own[what + '_tokens'] / max(1e-9, own[what + '_s']):,.0f} a second"
                      for what in ("prefill", "decode")]
            lines.append(f"{name}: {'; '.join(speeds)}; {own['reused_tokens']:,} tokens reused; occupancy "
                         f"{own['occupancy'] / len(ranks):.0%}")
    if any(verdicts.values()):
        lines.append("judge's comparisons: " + ", ".join(f"{count:,} {kind}" for kind, count in verdicts.items()))
    return lines
