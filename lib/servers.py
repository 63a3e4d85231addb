"""Models behind http:// (OpenAI's protocol), asked by the openai client."""
import asyncio
import itertools
import os
import re
from typing import NamedTuple

from lib.flags import is_server
from lib.runtime import InputError, one_line, optional, say
from lib.tokens import strip_thoughts

TIMEOUT_S = 600                 # of a request
RETRIES = 8                     # of a request that is lost, late or temporarily refused, after growing pauses
TRIES = 4                       # requests for one reply, if the first cannot be used
PLAIN = {"top_p": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
# Not in the protocol. If they are not set, vLLM, SGLang and llama.cpp use the model's own defaults.
SAMPLING = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
ENDED = "stop", "eos", "eos_token", "end_turn", "stop_sequence"           # finish reasons of a complete turn
CUT = "length", "max_tokens"                                              # and of a turn cut by a limit
TOO_LONG = re.compile(r"context.?(length|size|window)|maximum model length|too long|too many tokens|max_new_tokens`")
REASONING_MODEL = re.compile(r"(openai/)?(o[134]\b|gpt-5)")               # OpenAI's


class Reply(NamedTuple):
    """A model's reply, from a server or a local model."""

    text: str
    ended: bool                     # before the length limit
    ids: list | None                # sampled token ids, including the end of turn; None if a server returns none
    prompt_tokens: int              # 0 if a server does not report it
    completion_tokens: int
    prompt: str | None = None       # the rendered prompt, if known


class ReplyError(Exception):
    """There is no reply to this prompt. Only this dialogue fails."""


class NoRoom(ReplyError):
    """The prompt leaves no room for the reply."""


def visible_text(domain, text, prompt=None):
    """The part of an agent's sampled `text` that the other side sees: without thoughts, as the domain shows it."""
    return domain.shown(strip_thoughts(text, prompt))


class Server:
    """A model behind one or several addresses, http://A/v1,http://B/v1#NAME, used in turn. Its key is OPENAI_API_KEY.
    All replies are awaited in one event loop.

    slots: requests in flight."""

    def __init__(self, name, slots):
        urls, _, self.model = name.partition("#")
        urls = urls.split(",")
        if not self.model or not all(map(is_server, urls)):
            raise InputError(f"{name}: write a server as http://A/v1#NAME, several of one model as "
                             "http://A/v1,http://B/v1#NAME")
        self.name = name
        self.openai = optional("openai", f"{name}: servers need")
        self.clients = [self.open_client(url, RETRIES if len(urls) == 1 else 1) for url in urls]
        self.turns = itertools.count()
        self.gate = asyncio.Semaphore(slots)
        self.is_reasoning_model = bool(REASONING_MODEL.match(self.model))
        self.sampling = {} if self.is_reasoning_model else SAMPLING

    def open_client(self, url, retries):
        key = os.environ.get("OPENAI_API_KEY", "").strip() or "none"
        try:
            return self.openai.AsyncOpenAI(base_url=url, api_key=key, timeout=TIMEOUT_S, max_retries=retries)
        except Exception as error:                                   # httpx's InvalidURL has no other base class
            raise InputError(f"{url}: not a server address ({one_line(error)})") from None

    def check_addresses(self):
        """Raises InputError if an address does not answer."""
        for client in self.clients:
            asked = self.openai.OpenAI(base_url=client.base_url, api_key=client.api_key, timeout=20, max_retries=0)
            try:
                asked.models.with_raw_response.list()
            except (self.openai.APITimeoutError, self.openai.APIStatusError):
                pass                                                 # it answers, or will later
            except self.openai.APIConnectionError as error:
                raise InputError(f"{client.base_url}: does not answer ({one_line(error.__cause__)}); start the server "
                                 "first, or correct the address") from None

    def request(self, prompt, temperature, max_new_tokens, extra):
        """The fields of a request for a chat (messages) or a prompt (ids), with every sampling parameter set.

        extra: fields that the protocol does not name."""
        kind = "prompt" if isinstance(prompt[0], int) else "messages"
        request = {"model": self.model, kind: prompt, "extra_body": extra}
        if self.is_reasoning_model:                                  # takes no parameters except seed and length
            return {**request, "max_completion_tokens": max_new_tokens}
        return {**request, **PLAIN, "max_tokens": max_new_tokens, "temperature": temperature}

    async def reply(self, request, seed, fault_of):
        """The Reply to a request. fault_of(Reply): one line that says why it cannot be used, or None.

        The client repeats requests that are lost, late (TIMEOUT_S) or refused for a while. If a reply cannot be used,
        another one is requested with another seed.
        Raises InputError if no request can succeed (the key or the model is refused), NoRoom if the prompt is too long,
        ReplyError if this request has no reply."""
        first = next(self.turns)
        for number in range(first, first + TRIES):
            client = self.clients[number % len(self.clients)]
            try:
                async with self.gate:
                    reply = read_reply(await self.send(client, {**request, "seed": seed}))
            except self.openai.APIError as error:
                fault = self.fault_of_error(client, error)
                if len(self.clients) == 1:
                    break
                continue
            except (ValueError, AttributeError, IndexError, TypeError) as error:
                fault = f"unreadable reply ({one_line(error)})"
            else:
                fault = fault_of(reply)
                if fault is None:
                    return reply
            seed += 1
        raise ReplyError(f"{self.name}: {fault}")

    async def send(self, client, request):
        """The server's answer. If it refuses the fields of SAMPLING, they are omitted from now on."""
        endpoint = client.completions if "prompt" in request else client.chat.completions
        sampling = self.sampling
        try:
            return await endpoint.create(**{**request, "extra_body": {**sampling, **request["extra_body"]}})
        except (self.openai.BadRequestError, self.openai.UnprocessableEntityError) as error:
            if not sampling or is_too_long(error):
                raise
            refusal = said_by(error)
        answer = await endpoint.create(**request)
        if self.sampling:
            say(f"{self.name}: requests omit {', '.join(self.sampling)} ({refusal})")
            self.sampling = {}
        return answer

    def fault_of_error(self, client, error):
        """An error in one line, if another address may succeed; raises if none can."""
        status = getattr(error, "status_code", None)                 # None: no connection, or no reply in time
        kind = "no reply" if status is None else f"status {status}"
        fault = f"{client.base_url}#{self.model}: {kind}: {said_by(error)}"
        if status in (401, 403) or error.code == "insufficient_quota":
            raise InputError(f"{fault}: the key in OPENAI_API_KEY is missing or refused")
        if status == 404:
            raise InputError(f"{fault}: the server has no model of this name, or cannot continue a prompt")
        if is_too_long(error):
            raise NoRoom(fault)
        return fault


def said_by(error):
    """An error in one line: the server's message, or the client's if the connection was lost."""
    return one_line(error.body or error)


def is_too_long(error):
    """True if a server refuses a prompt because it leaves no room for the reply."""
    return getattr(error, "status_code", None) in (400, 413, 422) and bool(TOO_LONG.search(str(error.body).lower()))


def read_reply(answer):
    """The Reply in an answer of the openai client. Thoughts that the server returns separately become a <think> block
    before the text. Raises ValueError unless the server says that the turn ended or was cut."""
    choice, usage = answer.choices[0], answer.usage
    if choice.finish_reason not in ENDED + CUT:
        raise ValueError(f"finish_reason {choice.finish_reason}")
    if hasattr(choice, "message"):
        text = choice.message.content or ""
        thoughts = getattr(choice.message, "reasoning_content", None) or getattr(choice.message, "reasoning", None)
        if thoughts:
            text = f"<think>{thoughts}</think>{text}"
    else:
        text = choice.text
    num_tokens = (usage.prompt_tokens or 0, usage.completion_tokens or 0) if usage else (0, 0)
    return Reply(text, choice.finish_reason in ENDED, getattr(choice, "token_ids", None), *num_tokens)
