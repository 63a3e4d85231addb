"""Sampling: replies of a local model (lib/engine.py, lib/vision.py) or of servers (lib/servers.py), and the rows of a
file made from them, many at once."""
import asyncio
import base64
import dataclasses
import functools
import pathlib

from tqdm import tqdm

from lib.engine import Engine
from lib.load import load_model
from lib.runtime import barrier, gather, InputError
from lib.seeds import server_seed, uniforms
from lib.servers import is_server, NoRoom, Reply, ReplyError, Server
from lib.tokens import decode, encode, plain_chat, render_chat, stop_ids, strip_thoughts
from lib.vision import vision_reply


@dataclasses.dataclass
class Sampler:
    """A model that continues prompts (open_sampler)."""

    model: object = None                        # None for a server
    tokenizer: object = None                    # a vision-language model's processor; for a server often None
    engine: Engine | None = None                # for a local text model
    server: Server | None = None
    vision_lock: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)     # it is shown one chat at a time
    template_args: dict = dataclasses.field(default_factory=dict)   # of the chat template
    generated_tokens: int = 0                   # sampled so far

    async def sample(self, prompt, n, temperature, max_new_tokens, key):
        """n Replies to a prompt: a chat (messages) or a rendered text.

        key: RNG key; the first reply is the same for any n. The key without its last two parts names a dialogue, or a
        task: the engine may have cached tokens of its earlier prompts.
        Raises NoRoom if the prompt is too long, ReplyError if a server gives no reply, InputError if it never will."""
        if self.server:
            replies = await self.ask(prompt, n, temperature, max_new_tokens, key)
        elif self.engine:
            replies = await self.generate(prompt, n, temperature, max_new_tokens, key)
        else:
            async with self.vision_lock:
                look = asyncio.to_thread(vision_reply, self.model, self.tokenizer, prompt, max_new_tokens)
                replies = [await look]
        self.generated_tokens += sum(reply.completion_tokens for reply in replies)
        return replies

    def visible(self, reply):
        """A reply without its thoughts, as the other side sees it. If the prompt opens the thoughts, a server may have
        split them off or not; the ids show which."""
        if not self.server:
            return strip_thoughts(reply.text, reply.prompt)
        if self.tokenizer and reply.ids:
            return strip_thoughts(decode(self.tokenizer, reply.ids), reply.prompt)
        return strip_thoughts(reply.text)

    def render(self, prompt):
        """The text of a prompt."""
        if isinstance(prompt, str):
            return prompt
        return render_chat(self.tokenizer, prompt, add_generation_prompt=True, **self.template_args)

    async def generate(self, prompt, n, temperature, max_new_tokens, key):
        """sample() with the engine."""
        text = self.render(prompt)
        prompt_ids = encode(self.tokenizer, text)
        if len(prompt_ids) + max_new_tokens > self.engine.max_tokens:
            raise NoRoom(f"a prompt of {len(prompt_ids):,} tokens and {max_new_tokens:,} new ones are more than the "
                         f"{self.engine.max_tokens:,} of the model or --max-length: lower "
                         "--max-new-tokens, or leave the task out")
        numbers, dialogue = uniforms((n, max_new_tokens), *key), (id(self), *key[:-2])
        replies = []
        for ids in await self.engine.generate(prompt_ids, numbers, temperature, dialogue):
            ended = ids[-1] in self.engine.stops
            replies.append(Reply(decode(self.tokenizer, ids), ended, ids, len(prompt_ids), len(ids), text))
        return replies

    async def ask(self, prompt, n, temperature, max_new_tokens, key):
        """sample() with a server: a chat is sent as messages, a text as ids."""
        text, extra, is_text = None, {}, isinstance(prompt, str)
        if self.template_args:
            extra["chat_template_kwargs"] = self.template_args
        if self.tokenizer:
            text = self.render(prompt)
            extra["return_token_ids"] = True
            if not is_text:
                prompt = plain_chat(self.tokenizer, prompt)
        sent = encode(self.tokenizer, text) if is_text else list(map(sent_message, prompt))
        request = self.server.request(sent, temperature, max_new_tokens, extra)
        fault_of = functools.partial(self.fault_of, text=text, may_be_empty=is_text)
        seeds = [server_seed(*key)] + [server_seed(*key, number) for number in range(1, n)]
        requests = [self.server.reply(request, seed, fault_of) for seed in seeds]
        replies = [reply._replace(prompt=text) for reply in await asyncio.gather(*requests)]
        if is_text:
            replies = [reply._replace(text=decode(self.tokenizer, reply.ids)) for reply in replies]
        return replies

    def fault_of(self, reply, text, may_be_empty):
        """One line that says why a server's Reply to the prompt `text` cannot be used, or None.

        If the server's tokenizer is known, the reply needs the sampled ids, including the end of the turn."""
        if not (may_be_empty or self.visible(reply._replace(prompt=text)).rstrip("\ufffd")):
            return "empty reply" if reply.ended else "empty reply (only thoughts: raise the limit of new tokens)"
        if self.tokenizer is None:
            return None
        num_tokens = len(encode(self.tokenizer, text))
        if not reply.ids:
            raise InputError(f"{self.server.name}: returns no token ids; --agent-tokenizer and --sampler need a server "
                             "that returns the sampled ids, as vLLM does (return_token_ids)")
        if reply.prompt_tokens != num_tokens:
            raise InputError(f"{self.server.name}: read {reply.prompt_tokens:,} prompt tokens, but this tokenizer and "
                             f"template give {num_tokens:,}; the server's must be the same")
        said, sampled = (whole.rstrip("\ufffd") for whole in (reply.text, decode(self.tokenizer, reply.ids)))
        unmarked = self.tokenizer.decode(reply.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        visible = strip_thoughts(sampled, text)
        # The server may split thoughts off, leave them in the text, or drop their marks.
        is_same = visible == strip_thoughts(said, prompt="")
        if not is_same and said.strip() not in (sampled.strip(), unmarked.rstrip("\ufffd").strip()):
            return f"token ids of another text ({visible[-40:]!r}, not {said[-40:]!r})"
        if reply.ended and decode(self.tokenizer, reply.ids[-1:]):
            return "token ids without the end of the turn"
        return None


def sent_message(message):
    """A message in the server's format: image files as data URLs, a lone surrogate as "?"."""
    if isinstance(message["content"], str):
        return {**message, "content": message["content"].encode(errors="replace").decode()}
    parts = []
    for part in message["content"]:
        if part["type"] == "image":
            data = base64.b64encode(pathlib.Path(part["path"]).read_bytes()).decode()
            part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        parts.append(part)
    return {**message, "content": parts}


def open_sampler(name, device, dtype, slots, max_length, tokenizer=None):
    """The Sampler for a model name: a folder, hub id or smollm2, which is loaded, or a server.

    slots: replies sampled at a time.
    max_length: for a local model, tokens of a prompt with its reply, and of a prefill pass of the engine.
    tokenizer: of a server, which must then return the sampled ids."""
    if is_server(name):
        server = Server(name, slots)
        server.check_addresses()
        return Sampler(tokenizer=tokenizer, server=server)
    model, tokenizer = load_model(name, device, dtype)
    num_ids = 1 + max(tokenizer.get_vocab().values())
    engine = Engine(model.eval(), stop_ids(model, tokenizer), slots, max_length, num_ids)
    return Sampler(model, tokenizer, engine)


# ---------------------------------------------------------------------------------------------------------------------
# many rows at once

async def make_rows(rows, make_row, waiting, concurrency, progress):
    """Make the rows of `waiting`, an iterator of (number, item), for add_rows. Returns why rows are missing."""
    failures, num_in_a_row = [], 0                                  # num_in_a_row: failures since the last success
    scoring = asyncio.Semaphore(concurrency)                        # for work in the background

    async def add(number, row):
        """row: the row, or an async function that returns it."""
        if callable(row):
            row = await row()
            scoring.release()
        rows.add(number, row)
        progress.update()

    async def work():
        """Make one row after another."""
        nonlocal num_in_a_row
        for number, item in waiting:
            if num_in_a_row >= max(20, concurrency):
                break
            try:
                row = await make_row(item)
            except ReplyError as error:
                failures.append(str(error))
                num_in_a_row += 1
                continue
            num_in_a_row = 0
            if callable(row):
                await scoring.acquire()
                group.create_task(add(number, row))
            else:
                await add(number, row)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
    except BaseExceptionGroup as errors:                             # the first one ended the others
        raise errors.exceptions[0] from None
    return failures


def add_rows(rows, items, make_row, concurrency, group=1, execute=asyncio.run):
    """Make the rows that a RowFile lacks, `concurrency` at a time on each rank: when one is done, the next starts.
    Returns why rows of any rank failed, one line each, for finish_rows.

    items: one for each row.
    make_row(item): a coroutine that returns the row, or an async function that returns it (scoring). This function runs
    in the background, so that it cannot change which requests share a batch; at most twice `concurrency` of them wait,
    so a kill loses no more than that.
    group: one rank makes this many consecutive rows. Groups with missing rows are distributed evenly.
    execute: runs a coroutine. Repeated calls need the one of an asyncio.Runner, for the server's client.

    A row without a reply (ReplyError) is skipped. After many of them in a row a rank starts no more rows."""
    run = rows.runtime
    missing = [(number, item) for number, item in enumerate(items) if number not in rows.done]
    groups = set(sorted({number // group for number, _ in missing})[run.rank::run.world_size])
    mine = [(number, item) for number, item in missing if number // group in groups]
    with tqdm(total=len(mine), unit="row", desc=rows.out.name, mininterval=5, disable=run.rank > 0) as progress:
        failures = execute(make_rows(rows, make_row, iter(mine), concurrency, progress))
    return sum(gather(failures), [])


def finish_rows(rows, num_rows, failures):
    """Finish a file of rows. If any failed, all ranks exit with status 2; the same command then makes the missing ones.
    """
    if rows.runtime.rank == 0 and not failures:
        rows.finish(num_rows)
    barrier()                                                        # a rank that leaves early would end the others
    if failures:
        raise InputError(f"{rows.out}: {num_rows - len(rows.find()):,} of {num_rows:,} rows are missing, the first "
                         f"failed with {failures[0]}; run the same command again to continue")
