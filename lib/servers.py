"""Models behind http:// (OpenAI's protocol): balanced over addresses, retried, tokens counted."""
import asyncio
import collections
import math
import os
import random
import re
import time
import types
from collections import namedtuple

from lib.engine import uniforms
from lib.models import is_server
from lib.runtime import InputError, one_line, say


def server_seed(*key):
    """The seed below 2^31 that a server samples with: of `key` alone, like uniforms."""
    return int(uniforms(1, *key).item() * 2 ** 31)


Reply = namedtuple("Reply", "text ended ids prompt_tokens completion_tokens")
MAX_PAUSE_S, MAX_WAIT_S = 30, 600               # between two tries: of our own accord, and because a server asks for it
RESEEDED = "empty reply", "unreadable reply", "wrong ids"                 # the same seed could give the same again


class Server(types.SimpleNamespace):
    """A model behind one address or more, as open_server() gives it; `counts` counts its requests, tokens, and what was
    tried again, by the reason."""


class ReplyError(Exception):
    """A server gave no reply after all retries. Only this dialogue fails."""


def strip_thoughts(text, prompt=None):
    """What the other side sees of what a model said after a prompt: all but its <think> blocks, of which the last may
    have no end and, where the prompt or a server opened it, the first no beginning.
    "<think>a</think> b" -> "b", "a</think>b" -> "b", "a<think>b" -> "a"."""
    text = ("<think>" if prompt and prompt.rstrip().endswith("<think>") else "") + text
    return re.sub(r"<think>.*?(</think>|\Z)", "", text, flags=re.DOTALL).rpartition("</think>")[2].strip()


def said(domain, text, prompt=None):
    """What an agent's turn says, whoever asks: what the other side sees of the sampled `text` (strip_thoughts), as the
    domain shows it."""
    return domain.shown(strip_thoughts(text, prompt))


def open_server(name, timeout_s=600, retries=8):
    """The Server of the model NAME behind http://HOST:PORT/v1#NAME, or behind several addresses (commas between them,
    all before the #); key from OPENAI_API_KEY. A request may take `timeout_s` and is tried again `retries` times.
    Nothing is sent yet."""
    urls, _, model = name.partition("#")
    if not model:
        raise InputError(f"{name}: a server's model goes after #: {urls}#NAME")
    if not all(map(is_server, urls.split(","))):
        raise InputError(f"{name}: several addresses of one model are written http://A/v1,http://B/v1#{model}")
    try:
        import openai
    except ImportError:
        raise InputError(f"{name}: servers need the package openai: pip install openai") from None
    options = {"api_key": os.environ.get("OPENAI_API_KEY") or "none", "max_retries": 0,
               "timeout": openai.Timeout(None, connect=10)}
    addresses = [types.SimpleNamespace(url=url, client=openai.AsyncOpenAI(base_url=url, **options), in_flight=0,
                                       rests_until=0.0, answered=False) for url in urls.split(",")]
    # What the protocol does not name, vLLM, SGLang and llama.cpp take from the model's own defaults, if it is not set.
    return Server(name=name, model=model, addresses=addresses, timeout_s=timeout_s, retries=retries,
                  sampling={"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}, takes_sampling=False,
                  last_reply=-math.inf, counts=collections.Counter())


def server_request(server, said, temperature, max_new_tokens, seed, extra):
    """The arguments of one request after a chat (messages) or a prompt (ids), with every sampling parameter set.
    OpenAI's reasoning models have none but seed and length, and o1-mini, a row of the paper's table 2, no system
    prompt."""
    kind = "prompt" if isinstance(said[0], int) else "messages"
    request = {"model": server.model, kind: said, "seed": seed}
    if kind == "messages" and re.match(r"(openai/)?(o[134]\b|gpt-5)", server.model):
        if re.match(r"(openai/)?o1-(mini|preview)", server.model):
            request["messages"] = [{**m, "role": "user" if m["role"] == "system" else m["role"]} for m in said]
        return request | {"max_completion_tokens": max_new_tokens, "extra_body": extra}
    return request | {"max_tokens": max_new_tokens, "temperature": temperature, "top_p": 1.0, "frequency_penalty": 0.0,
                      "presence_penalty": 0.0, "extra_body": server.sampling | extra}


def read_reply(answer):
    """The Reply in a server's answer: text (thoughts that the server gives apart in a <think> block before it), whether
    it ended before the limit of its length, token ids (None where the server gives none), numbers of tokens read and
    written."""
    choice, usage = answer.choices[0], answer.usage
    message = getattr(choice, "message", None)                      # of a chat, none after a prompt
    thoughts = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None)
    text = (f"<think>{thoughts}</think>" if thoughts else "") + ((message.content if message else choice.text) or "")
    return Reply(text, choice.finish_reason != "length", getattr(choice, "token_ids", None),
                 usage.prompt_tokens if usage else 0, usage.completion_tokens if usage else 0)


def empty_fault(reply):
    """One line where nothing is said in a Reply but thoughts; else None."""
    if not strip_thoughts(reply.text):
        return "empty reply" + ("" if reply.ended else " (ended by the limit of new tokens: raise it)")


async def ask_once(server, address, request, fault_of):
    """Returns (reply, error, retry_after_s): (Reply, None, None), or (None, one line, seconds or None for growing
    pauses). InputError, or ReplyError, where no retry can help."""
    import httpx
    import openai
    where, client = f"{address.url}#{server.model}", address.client
    create = client.completions.create if "prompt" in request else client.chat.completions.create
    try:
        async with asyncio.timeout(server.timeout_s):
            reply = read_reply(await create(**request))
    except openai.APIStatusError as error:
        status, wait_s = error.status_code, error.response.headers.get("retry-after", "")
        told = error.body.get("message") if isinstance(error.body, dict) else None
        fault = f"status {status}: {one_line(told or error)}"
        if status in (401, 403) or error.code == "insufficient_quota":
            raise InputError(f"{where}: the key in OPENAI_API_KEY is missing or refused ({fault})") from None
        if status == 404:
            or_no = ", or nothing that continues a prompt (/completions)" if "prompt" in request else ""
            raise InputError(f"{where}: no model of this name there{or_no} ({fault})") from None
        if status in (408, 409, 429) or status >= 500:
            return None, fault, float(wait_s) if re.fullmatch(r"\d+(\.\d+)?", wait_s) else None
        if "top_k" in request["extra_body"] and not server.takes_sampling:
            if server.sampling:
                say(f"{where}: asked again without {', '.join(server.sampling)} ({fault})")
            server.sampling = {}
            return None, fault, 0
        raise (ReplyError if address.answered else InputError)(f"{where}: refuses the request ({fault})") from None
    except openai.APIConnectionError as error:
        fault = f"no connection ({one_line(error.__cause__ or error)})"
        if not address.answered and not isinstance(error.__cause__, (httpx.ReadError, httpx.RemoteProtocolError)):
            raise InputError(f"{where}: {fault}; start the server first, or mend the address") from None
        return None, fault, None
    except TimeoutError:
        return None, f"no reply within {server.timeout_s:g} s", None
    except (ValueError, AttributeError, IndexError, TypeError) as error:
        return None, f"unreadable reply ({one_line(error)})", 0
    server.counts["server_prompt_tokens"] += reply.prompt_tokens
    server.counts["server_completion_tokens"] += reply.completion_tokens
    server.takes_sampling |= "top_k" in request["extra_body"]
    server.last_reply, address.answered = time.monotonic(), True
    fault = fault_of(reply)
    return (None, fault, 0) if fault else (reply, None, None)


async def next_address(server):
    """The address with the fewest requests in flight of those that do not rest."""
    while True:
        now = time.monotonic()
        address = min(server.addresses, key=lambda a: (max(a.rests_until, now), a.in_flight))
        if address.rests_until <= now:
            return address
        await asyncio.sleep((address.rests_until - now) * random.uniform(1, 1.1))


async def server_reply(server, said, temperature, max_new_tokens, seed, fault_of=empty_fault, **extra):
    """The Reply of a server's model to a chat (messages) or a prompt (ids); fault_of(Reply): one line that begins with
    a name of RESEEDED where it cannot be taken; `extra`: more fields of the request, which not every server takes.

    A lost connection, the time limit, and statuses 408, 409, 429 and 5xx are tried again after growing pauses, or the
    time that the server asks for; what cannot be read or taken at once, with another seed. InputError where no further
    request can succeed: no server at the first one, key or model refused, no connection or no turn for any request in
    all of that time. ReplyError where it is this one."""
    begin, attempt = time.monotonic(), 0
    while True:
        address, sent = await next_address(server), time.monotonic()
        request = server_request(server, said, temperature, max_new_tokens, seed, extra)
        server.counts["requests"] += 1
        address.in_flight += 1
        try:
            reply, fault, wait_s = await ask_once(server, address, request, fault_of)
        finally:
            address.in_flight -= 1
        if reply:
            return reply
        kind, where, now = re.split(r" \(|:", fault)[0], f"{address.url}#{server.model}", time.monotonic()
        server.counts[f"retried: {kind}"] += 1
        if wait_s and wait_s > MAX_WAIT_S:
            raise InputError(f"{where}: asks to wait {wait_s:g} s ({fault}); run the same command again then")
        attempt += kind != "status 429" or server.last_reply < sent       # while others are served, our turn will come
        if attempt > server.retries:
            if kind in ("no connection", "status 429") and server.last_reply < begin:
                raise InputError(f"{where}: {fault}, and no reply to any request for {now - begin:.0f} s; run the same "
                                 "command again to go on")
            raise ReplyError(f"{where}: {fault}")
        seed += kind in RESEEDED
        pause_s = min(MAX_PAUSE_S, 2 ** (attempt - 1)) * random.uniform(0.5, 1) if wait_s is None else wait_s
        if wait_s or kind == "no connection":                             # then all requests leave the address alone
            address.rests_until = max(address.rests_until, now + pause_s)
        else:
            await asyncio.sleep(pause_s)
