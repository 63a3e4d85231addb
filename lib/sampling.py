"""One way to sample: replies of a model on this machine (lib/engine.py, lib/vision.py) or behind servers
(lib/servers.py), and many rows of them at once."""
import asyncio
import base64
import dataclasses
import functools
import pathlib
import sys

from tqdm import tqdm

from lib.engine import Engine
from lib.folders import render_chat
from lib.models import encode, load_model, stop_ids
from lib.runtime import barrier, gather, InputError
from lib.seeds import server_seed, uniforms
from lib.servers import is_server, NoRoom, Reply, ReplyError, Server, strip_thoughts
from lib.vision import load_vision, vision_reply


@dataclasses.dataclass
class Sampler:
    """A model that continues prompts, as open_sampler() gives it."""

    name: str
    model: object = None                        # of a server None
    tokenizer: object = None                    # of a model that is shown images its processor; of a server often None
    engine: Engine | None = None                # of a model on this machine that reads texts
    server: Server | None = None
    gate: asyncio.Semaphore | None = None       # requests in flight, of a server and of a model that is shown images
    template_args: dict = dataclasses.field(default_factory=dict)   # of the chat template
    generated_tokens: int = 0                   # sampled so far

    async def sample(self, prompt, n, temperature, max_new_tokens, key):
        """n Replies to a prompt: a chat (messages) or a rendered text.

        key: what their random numbers depend on; the first reply is the same for any n. All but its last two parts
        name the dialogue, whose earlier prompts the engine finds in its cache.
        NoRoom where the prompt is too long; ReplyError where a server gives no reply; InputError where it never will.
        """
        if self.server:
            replies = await self.ask(prompt, n, temperature, max_new_tokens, key)
        elif self.engine:
            replies = await self.generate(prompt, n, temperature, max_new_tokens, key)
        else:
            async with self.gate:
                look = functools.partial(vision_reply, self.model, self.tokenizer, prompt, max_new_tokens)
                replies = [await asyncio.to_thread(look)]
        self.generated_tokens += sum(reply.completion_tokens for reply in replies)
        return replies

    def visible(self, reply):
        """What the other side sees of a reply: all but its thoughts, which a server may have put apart although the
        prompt opens them."""
        return strip_thoughts(reply.text, None if self.server else reply.prompt)

    def render(self, prompt):
        """The text of a prompt."""
        if isinstance(prompt, str):
            return prompt
        return render_chat(self.tokenizer, prompt, add_generation_prompt=True, **self.template_args)

    def decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    async def generate(self, prompt, n, temperature, max_new_tokens, key):
        """sample() by the engine."""
        text = self.render(prompt)
        prompt_ids = encode(self.tokenizer, text)
        fault = self.engine.lack_of_room(len(prompt_ids), max_new_tokens)
        if fault:
            raise NoRoom(f"{fault}: lower --max-new-tokens, or leave the task out")
        dialogue = id(self), *key[:-2]
        randoms = uniforms((n, max_new_tokens), *key)
        replies = []
        for ids in await self.engine.generate(prompt_ids, randoms, temperature, dialogue):
            ended = ids[-1] in self.engine.stops
            replies.append(Reply(self.decode(ids), ended, ids, len(prompt_ids), len(ids), text))
        return replies

    async def ask(self, prompt, n, temperature, max_new_tokens, key):
        """sample() by a server. With its tokenizer it must give the ids that it samples (ids_fault)."""
        text, extra = None, {}
        if self.tokenizer:
            text = self.render(prompt)
            extra["return_token_ids"] = True
        if self.template_args:
            extra["chat_template_kwargs"] = self.template_args
        if isinstance(prompt, str):
            sent = encode(self.tokenizer, text)
        else:
            sent = [{**message, "content": sent_content(message["content"])} for message in prompt]
        request = self.server.request(sent, temperature, max_new_tokens, extra)
        fault_of = functools.partial(self.fault_of, is_chat=not isinstance(prompt, str), text=text)
        replies = []
        for number in range(n):
            seed = server_seed(*key, number) if number else server_seed(*key)
            replies.append(self.ask_once(request, seed, fault_of))
        replies = await asyncio.gather(*replies)
        if isinstance(prompt, str):
            replies = [reply._replace(text=self.decode(reply.ids)) for reply in replies]
        return [reply._replace(prompt=text) for reply in replies]

    async def ask_once(self, request, seed, fault_of):
        async with self.gate:
            return await self.server.reply(request, seed, fault_of)

    def fault_of(self, reply, is_chat, text):
        """One line where a server's Reply to the prompt `text` cannot be used; else None."""
        if is_chat and not strip_thoughts(reply.text):
            if reply.ended:
                return "empty reply"
            return ("empty reply (cut by the limit of new tokens: raise it, or turn the model's thoughts off by "
                    "--chat-template-args)")
        if self.tokenizer is None:
            return None
        num_tokens = len(encode(self.tokenizer, text))
        if not reply.ids:
            raise InputError(f"{self.name}: gives no token ids; --agent-tokenizer and --sampler need a server that "
                             "gives those that it samples, as vLLM does (return_token_ids)")
        if reply.prompt_tokens != num_tokens:
            raise InputError(f"{self.name}: says that it has read {reply.prompt_tokens:,} tokens, where this tokenizer "
                             f"and template make {num_tokens:,}; the server's must be the same")
        return ids_fault(reply, self.decode)


def ids_fault(reply, decode):
    """One line where the ids of a Reply say something else than its text, or do not end the turn; else None.

    decode(ids): text. Thoughts may be written otherwise, and some show what a limit has cut of the last character."""
    text, text_of_ids = (part.rstrip("\ufffd").strip() for part in (reply.text, decode(reply.ids)))
    answer = strip_thoughts(text)
    if text_of_ids != text and not (answer and text_of_ids.endswith(answer)):
        return f"wrong ids (they say {text_of_ids[-40:]!r} and the text says {text[-40:]!r})"
    if reply.ended and decode(reply.ids[-1:]):
        return "wrong ids (no end of the turn among them)"
    return None


def sent_content(content):
    """A message's content as a server takes it: image files as data URLs, a lone surrogate as "?"."""
    if isinstance(content, str):
        return content.encode(errors="replace").decode()
    parts = []
    for part in content:
        if part["type"] == "image":
            data = base64.b64encode(pathlib.Path(part["path"]).read_bytes()).decode()
            part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        parts.append(part)
    return parts


def open_sampler(name, device, dtype, slots, max_length, tokenizer=None):
    """The Sampler of a model name: a folder, hub id or smollm2, which is loaded, or a server.

    slots: replies that are sampled at a time.
    max_length: of a local model: tokens of a prompt with its reply, and of a prefill pass of the engine.
    tokenizer: of a server, which must then give the ids that it samples."""
    if is_server(name):
        return Sampler(name, tokenizer=tokenizer, server=Server(name), gate=asyncio.Semaphore(slots))
    model, tokenizer = load_model(name, device, dtype)
    engine = Engine(model.eval(), stop_ids(model, tokenizer), slots, max_length)
    return Sampler(name, model, tokenizer, engine)


def open_vision_sampler(name, device, dtype):
    """The Sampler of a model on this machine that is shown images: one greedy reply at a time."""
    model, processor = load_vision(name, device, dtype)
    return Sampler(name, model, processor, gate=asyncio.Semaphore(1))


# ---------------------------------------------------------------------------------------------------------------------
# many rows at once

@dataclasses.dataclass
class RowMaker:
    """Adds rows to a file (Rows), many at once."""

    rows: object
    make_row: object                            # as add_rows takes it
    most_failures: int                          # after so many in a row no further one is begun
    progress: object                            # tqdm's bar
    failures: list = dataclasses.field(default_factory=list)        # why rows are missing, a line each
    num_in_a_row: int = 0

    async def make(self, numbered_item):
        """Make and add one row, or give a function that does it in the background (run_concurrently)."""
        number, item = numbered_item
        if self.num_in_a_row >= self.most_failures:
            return None
        try:
            row = await self.make_row(item)
        except ReplyError as error:
            self.failures.append(str(error))
            self.num_in_a_row += 1
            self.progress.set_postfix_str(f"{len(self.failures):,} failed")
            return None
        self.num_in_a_row = 0
        if callable(row):
            return functools.partial(self.finish, number, row)
        self.add(number, row)

    async def finish(self, number, score):
        self.add(number, await score())

    def add(self, number, row):
        self.rows.add(number, row)
        self.progress.update()


def add_rows(rows, items, make_row, concurrency, runtime, group=1):
    """Make those rows of a file (Rows) that it lacks, `concurrency` at a time on each rank. Returns why rows of any
    rank have failed, a line each, for finish_rows.

    items: what each row is made from.
    make_row(item): a coroutine that gives the row, or an async function that gives it and may take long (scoring).
    group: so many rows, one after the other, are made by one rank.

    A row that has no reply (ReplyError) is left out. After many of them in a row a rank begins no further one."""
    mine = []
    for number, item in enumerate(items):
        is_mine = number // group % runtime.world_size == runtime.rank
        if is_mine and number not in rows.done:
            mine.append((number, item))
    with tqdm(total=len(mine), unit="row", desc=rows.out.name, mininterval=5, disable=runtime.rank > 0) as progress:
        maker = RowMaker(rows, make_row, max(20, concurrency), progress)
        asyncio.run(run_concurrently(maker.make, mine, concurrency))
    return sum(gather(maker.failures), [])


def finish_rows(rows, num_rows, failures, runtime):
    """Finish a file of rows. Where any have failed, all ranks end with status 2; the same command makes what is missing
    then."""
    if runtime.rank == 0 and not failures:
        rows.finish(num_rows)
    barrier()                                                        # a rank that leaves early would end the others
    if failures and runtime.rank > 0:
        sys.exit(2)
    if failures:
        raise InputError(f"{rows.out}: {num_rows - len(rows.find()):,} of {num_rows:,} rows are missing, the first "
                         f"failed with {failures[0]}; run the same command again to go on")


async def run_concurrently(work, items, concurrency):
    """await work(item) for all items, `concurrency` of them at a time: one that has ended makes place for the next.

    If `work` gives an async function (scoring), this runs in the background, so that it cannot change which requests
    share a batch. At most twice `concurrency` of these wait at a time (each worker may hold one), so that a kill costs
    no more than that."""
    waiting, places = iter(items), asyncio.Semaphore(concurrency)
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work_off(work, waiting, places, group))
    except BaseExceptionGroup as errors:                             # the first has ended the others
        raise errors.exceptions[0] from None


async def work_off(work, waiting, places, group):
    """Work on what is left of `waiting`. What is done in the background needs one of the `places`."""
    for item in waiting:
        score = await work(item)
        if score is not None:
            await places.acquire()
            task = group.create_task(score())
            task.add_done_callback(lambda _: places.release())
