"""Models behind http:// (OpenAI's protocol): balanced over addresses, retried, tokens counted."""
import asyncio
import collections
import dataclasses
import functools
import html
import http.cookiejar
import itertools
import json
import math
import os
import random
import re
import time
import urllib.parse
import zlib
from typing import NamedTuple

from lib.runtime import InputError, one_line, say

MAX_PAUSE_S, MAX_WAIT_S = 30, 600               # between two tries: of our own accord, and because a server asks for it
MAX_REPLY_BYTES = 2 ** 23                       # after decompression; 100,000 tokens, as text and as ids, are 2 MB
MAX_COUNT = 2 ** 31                             # above all token ids, and all numbers of tokens of a request
MAX_TOLD_CHARS = 2_000                          # of a server's message, before it becomes one line
KEY_PART_CHARS = 8                              # of the key: so many in a row are replaced in messages
# What the protocol does not name, vLLM, SGLang and llama.cpp take from the model's own defaults, if it is not set.
SAMPLING = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
RESEEDED = "empty reply", "unreadable reply", "wrong ids"                 # the same seed could give the same again


class Reply(NamedTuple):
    """What a model has said, wherever it is."""

    text: str
    ended: bool                     # before the limit of its length
    ids: list | None                # sampled token ids; None where a server gives none
    prompt_tokens: int              # read; 0 where a server does not say it
    completion_tokens: int          # written


@dataclasses.dataclass(eq=False)
class Address:
    """Where a server can be asked."""

    url: str
    client: object                  # httpx.AsyncClient
    in_flight: int = 0              # requests
    rests_until: float = 0.0        # no request is sent before, by time.monotonic()
    answered: bool = False          # at least once


@dataclasses.dataclass(eq=False)
class Server:
    """A model behind one address or more, as open_server() gives it."""

    name: str                       # as the user has written it
    model: str
    addresses: list
    timeout_s: float                # of a request
    retries: int
    key_parts: set                  # what messages must not show
    sampling: dict = dataclasses.field(default_factory=lambda: dict(SAMPLING))       # empty where it is refused
    takes_sampling: bool = False    # has answered a request with these
    last_reply: float = -math.inf   # by time.monotonic()
    counts: collections.Counter = dataclasses.field(default_factory=collections.Counter)


class ReplyError(Exception):
    """A dialogue cannot go on: a server gave no reply or refused the request, or a prompt is too long
    (lib.speakers.NoRoom). Only this dialogue fails."""


class RefusedWithSampling(Exception):
    """A server refuses a request that has SAMPLING, and has taken none that has; it may take one without them."""


class UnreadableReply(Exception):
    """What a server sent is no reply; says why."""


def strip_thoughts(text, prompt=None):
    """What the other side sees of what a model said after a prompt: all but its blocks of thoughts (<think>, <thinking>
    or [THINK]), of which the last may have no end and, where the prompt or a server opened it, the first no beginning.
    "<think>a</think> b" -> "b", "a</think>b" -> "b", "a<think>b" -> "a"."""
    for begin, end in (("<think>", "</think>"), ("<thinking>", "</thinking>"), ("[THINK]", "[/THINK]")):
        if prompt and prompt.rstrip().endswith(begin):
            text = begin + text
        text = re.sub(rf"{re.escape(begin)}.*?({re.escape(end)}|\Z)", "", text, flags=re.DOTALL)
        _, _, text = text.rpartition(end)
    return text.strip()


def said(domain, text, prompt=None):
    """What an agent's turn says, whoever asks: what the other side sees of the sampled `text` (strip_thoughts), as the
    domain shows it."""
    return domain.shown(strip_thoughts(text, prompt))


def is_server(name):
    return name.startswith(("http://", "https://"))


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
        import httpx  # noqa: F401
    except ImportError:
        raise InputError(f"{name}: servers need the package httpx: pip install httpx") from None
    key = os.environ.get("OPENAI_API_KEY") or "none"
    if not (key.isascii() and key.isprintable()):
        raise InputError("OPENAI_API_KEY: has characters that no header can have; set it again")
    addresses = [open_address(url, key) for url in urls.split(",")]
    return Server(name, model, addresses, timeout_s, retries, key_parts(key))


def open_address(url, key):
    """The Address of a URL; InputError where it is none."""
    import httpx
    try:
        client = new_client(url, key)
    except (httpx.InvalidURL, ValueError) as error:
        raise InputError(f"{url}: no address of a server ({one_line(error)})") from None
    if not client.base_url.host or (client.base_url.port or 0) > 65535:
        raise InputError(f"{url}: no address of a server (host or port)")
    return Address(url, client)


@functools.cache
def certificates():
    """What https:// is checked by, read once for all clients: it takes 70 ms."""
    import httpx
    return httpx.create_ssl_context()


def new_client(url, key):
    """The HTTP client of one address. It follows no redirect, since a chat may hold the reference, which another server
    must not get; it keeps no cookies, which would bind all requests to one machine behind a balancer."""
    import httpx
    no_cookies = http.cookiejar.CookieJar(policy=http.cookiejar.DefaultCookiePolicy(allowed_domains=[]))
    return httpx.AsyncClient(
        base_url=url,
        headers={"Authorization": f"Bearer {key}", "Accept-Encoding": "identity"},
        cookies=no_cookies,
        verify=certificates(),
        follow_redirects=False,
        timeout=httpx.Timeout(None, connect=10),
        limits=httpx.Limits(max_connections=1000, max_keepalive_connections=100))


def server_request(server, chat_or_ids, temperature, max_new_tokens, seed, extra):
    """The arguments of one request after a chat (messages) or a prompt (ids), with every sampling parameter set.

    extra: further fields, SAMPLING among them.
    OpenAI's reasoning models have none but seed and length, and o1-mini, a row of the paper's table 2, no system
    prompt."""
    if isinstance(chat_or_ids[0], int):
        request = {"model": server.model, "prompt": chat_or_ids, "seed": seed}
    else:
        request = {"model": server.model, "messages": chat_or_ids, "seed": seed}
        if re.match(r"(openai/)?(o[134]\b|gpt-5)", server.model):
            if re.match(r"(openai/)?o1-(mini|preview)", server.model):
                request["messages"] = without_system(chat_or_ids)
            request["max_completion_tokens"] = max_new_tokens
            request["extra_body"] = {name: value for name, value in extra.items() if name not in SAMPLING}
            return request
    request["max_tokens"] = max_new_tokens
    request["temperature"] = temperature
    request["top_p"] = 1.0
    request["frequency_penalty"] = 0.0
    request["presence_penalty"] = 0.0
    request["extra_body"] = extra
    return request


def without_system(chat):
    """Messages whose system prompt is said by the user."""
    messages = []
    for message in chat:
        if message["role"] == "system":
            message = {**message, "role": "user"}
        messages.append(message)
    return messages


# ---------------------------------------------------------------------------------------------------------------------
# what a server sends is read here, and nowhere else

async def read_body(response):
    """The body (bytes) of a response. UnreadableReply where it has more than MAX_REPLY_BYTES, as it is sent or after
    decompression."""
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity", "gzip", "deflate"):
        raise UnreadableReply("compressed in a way that was not asked for")
    unzip = None
    if encoding in ("gzip", "deflate"):
        unzip = zlib.decompressobj(wbits=47)                        # of both: the header says which it is
    body, num_sent = bytearray(), 0
    async for chunk in response.aiter_raw():
        num_sent += len(chunk)
        if unzip:
            chunk = unzipped(unzip, chunk, MAX_REPLY_BYTES + 1 - len(body))
        body += chunk
        if max(num_sent, len(body)) > MAX_REPLY_BYTES:
            raise UnreadableReply(f"more than {MAX_REPLY_BYTES:,} bytes")
    if unzip and not unzip.eof:
        raise UnreadableReply("compressed data without an end")
    return bytes(body)


def unzipped(unzip, chunk, max_bytes):
    try:
        return unzip.decompress(chunk, max_bytes)
    except zlib.error:
        raise UnreadableReply("damaged compressed data") from None


def read_object(body):
    """The JSON object in a body (bytes)."""
    try:
        answer = json.loads(body.decode("utf-8-sig"))
    except RecursionError:
        raise UnreadableReply("nested too deeply") from None
    except ValueError as error:                 # no UTF-8, no JSON, or an integer of more digits than Python reads
        raise UnreadableReply(one_line(error)) from None
    if type(answer) is not dict:
        raise UnreadableReply(f"a {type(answer).__name__}, not an object")
    return answer


def field(owner, name, kind):
    """owner[name] of an object in a reply, which is of the type `kind`; None where it is missing or null."""
    value = owner.get(name)
    if value is not None and type(value) is not kind:               # bool is no int here
        raise UnreadableReply(f'"{name}" is a {type(value).__name__}, not a {kind.__name__}')
    return value


def check_count(name, value):
    """UnreadableReply unless `value` is a token id or a number of tokens."""
    if type(value) is not int or not 0 <= value < MAX_COUNT:
        raise UnreadableReply(f'"{name}": not an integer from 0 to {MAX_COUNT - 1:,}')


def read_reply(body):
    """The Reply in a body (bytes). Thoughts that the server gives apart stand in a <think> block before its text.

    UnreadableReply where a part of it is missing or of another type."""
    answer = read_object(body)
    choices = field(answer, "choices", list)
    if not choices:
        told, _ = refusal(body)
        raise UnreadableReply(f'no "choices": {told}')
    choice = choices[0]
    if type(choice) is not dict:
        raise UnreadableReply(f"a choice is a {type(choice).__name__}, not an object")
    text = choice_text(choice)
    ids = field(choice, "token_ids", list)
    for token_id in ids or []:
        check_count("token_ids", token_id)
    usage = field(answer, "usage", dict) or {}
    prompt_tokens = field(usage, "prompt_tokens", int) or 0
    completion_tokens = field(usage, "completion_tokens", int) or 0
    check_count("usage", prompt_tokens)
    check_count("usage", completion_tokens)
    ended = field(choice, "finish_reason", str) != "length"
    return Reply(text, ended, ids, prompt_tokens, completion_tokens)


def choice_text(choice):
    """The text of a choice, the continuation of a chat or of a prompt."""
    message = field(choice, "message", dict)
    text = field(choice, "text", str)
    if message is None:
        if text is None:
            raise UnreadableReply('neither "message" nor "text"')
        return text
    text = field(message, "content", str) or ""
    thoughts = field(message, "reasoning_content", str) or field(message, "reasoning", str)
    if thoughts:
        text = f"<think>{thoughts}</think>{text}"
    return text


def refusal(body):
    """(message, code or None) of a body (bytes) that says why there is no reply: {"error": {"message", "code"}},
    {"error": "message"}, {"message"}, or any text."""
    text = body[:MAX_TOLD_CHARS].decode(errors="replace")
    try:
        answer = read_object(body)
    except UnreadableReply:
        return text, None
    error = answer.get("error", answer)
    if type(error) is str:
        return error, None
    if type(error) is not dict or type(error.get("message")) is not str:
        return text, None
    return error["message"], error.get("code")


def key_parts(key):
    """All that stands for KEY_PART_CHARS characters of the key in a row, in small letters: as they are, and as they can
    stand in JSON, HTML, a URL or Python. Empty for a key of less than four characters, which hides nothing."""
    spellings = (
        str,
        lambda c: json.dumps(c)[1:-1],
        lambda c: c.replace("/", r"\/"),
        lambda c: rf"\u{ord(c):04x}",
        lambda c: rf"\x{ord(c):02x}",
        lambda c: urllib.parse.quote(c, safe=""),
        lambda c: f"%{ord(c):02x}",
        html.escape,
        lambda c: f"&#{ord(c)};",
        lambda c: f"&#x{ord(c):x};")
    length, parts = min(KEY_PART_CHARS, len(key)), set()
    if length < 4:
        return parts
    for spelling in spellings:
        spelled = [spelling(c).lower() for c in key]
        for i in range(len(key) - length + 1):
            parts.add("".join(spelled[i:i + length]))
    return parts


def without_key(text, parts):
    """A text with "[key]" for all that holds a part of the key (key_parts)."""
    lowered = "".join(c.lower() if c.isascii() else c for c in text)        # other letters may become two
    is_key = [False] * len(text)
    for part in parts:
        start = lowered.find(part)
        while start >= 0:
            is_key[start:start + len(part)] = [True] * len(part)
            start = lowered.find(part, start + 1)                           # parts overlap
    pieces = []
    for hidden, positions in itertools.groupby(range(len(text)), is_key.__getitem__):
        if hidden:
            pieces.append("[key]")
        else:
            pieces += [text[i] for i in positions]
    return "".join(pieces)


def quoted(told, server):
    """One line of what a server, or an error that may name what it sent, says; without the key."""
    text = str(told)[:MAX_TOLD_CHARS] or type(told).__name__
    return one_line(without_key(text, server.key_parts))


# ---------------------------------------------------------------------------------------------------------------------

def empty_fault(reply):
    """One line where nothing is said in a Reply but thoughts; else None."""
    if strip_thoughts(reply.text):
        return None
    if reply.ended:
        return "empty reply"
    return ("empty reply (ended by the limit of new tokens: raise it, or turn the model's thoughts off, as "
            "--chat-template-args can)")


async def send(address, request):
    """(httpx.Response, its body) to a request (server_request)."""
    path = "/completions" if "prompt" in request else "/chat/completions"
    fields = dict(request)
    fields.update(fields.pop("extra_body"))
    content = json.dumps(fields, ensure_ascii=False).encode(errors="replace")      # a lone surrogate is sent as "?"
    headers = {"Content-Type": "application/json"}
    async with address.client.stream("POST", path, content=content, headers=headers) as response:
        try:
            return response, await read_body(response)
        except UnreadableReply:
            if response.is_success:
                raise
            return response, b""                                    # the status says enough


async def ask_once(server, address, request, fault_of):
    """Returns (reply, error, retry_after_s): (Reply, None, None), or (None, one line, seconds or None for growing
    pauses). InputError, or ReplyError, where no retry can help; RefusedWithSampling where one without SAMPLING may."""
    import httpx
    try:
        async with asyncio.timeout(server.timeout_s):
            response, body = await send(address, request)
        if not response.is_success:
            return refused(server, address, request, response, body)
        reply = read_reply(body)
    except TimeoutError:                                             # an OSError, too
        return None, f"no reply within {server.timeout_s:g} s", None
    except (httpx.HTTPError, httpx.InvalidURL, OSError, RuntimeError) as error:       # the last: of an ended event loop
        fault = f"no connection ({quoted(error, server)})"
        if not address.answered and not isinstance(error, (httpx.ReadError, httpx.RemoteProtocolError)):
            raise InputError(f"{address.url}#{server.model}: {fault}; start the server first, or mend the address"
                             ) from None
        return None, fault, None
    except UnreadableReply as error:
        return None, f"unreadable reply ({quoted(error, server)})", 0
    server.counts["server_prompt_tokens"] += reply.prompt_tokens
    server.counts["server_completion_tokens"] += reply.completion_tokens
    server.takes_sampling |= "top_k" in request["extra_body"]
    server.last_reply = time.monotonic()
    address.answered = True
    fault = fault_of(reply)
    if fault:
        return None, quoted(fault, server), 0
    return reply, None, None


def refused(server, address, request, response, body):
    """What ask_once returns, or raises, of a response whose status is none of success."""
    where, status = f"{address.url}#{server.model}", response.status_code
    told, code = refusal(body)
    fault = f"status {status}: {quoted(told.strip() or response.reason_phrase or 'says no more', server)}"
    if 300 <= status < 400:
        target = quoted(response.headers.get("location") or "nowhere", server)
        fault = f"status {status}: sends to {target}, which is not followed"
    elif status in (401, 403) or code == "insufficient_quota":
        raise InputError(f"{where}: the key in OPENAI_API_KEY is missing or refused ({fault})")
    elif status == 404:
        missing = "no model of this name there"
        if "prompt" in request:
            missing += ", or nothing that continues a prompt (/completions)"
        raise InputError(f"{where}: {missing} ({fault})")
    elif status in (408, 409, 429) or status >= 500:
        return None, fault, seconds(response.headers.get("retry-after", "")) or None
    elif "top_k" in request["extra_body"] and not server.takes_sampling:
        raise RefusedWithSampling(fault)
    if address.answered:
        raise ReplyError(f"{where}: refuses the request ({fault})")
    raise InputError(f"{where}: refuses the request ({fault})")


def seconds(text):
    """The number in a header, or None."""
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    return None


async def next_address(server):
    """The address with the fewest requests in flight of those that do not rest."""
    while True:
        now = time.monotonic()
        address = min(server.addresses, key=lambda a: (max(a.rests_until, now), a.in_flight))
        if address.rests_until <= now:
            return address
        await asyncio.sleep((address.rests_until - now) * random.uniform(1, 1.1))


async def server_reply(server, chat_or_ids, temperature, max_new_tokens, seed, fault_of=empty_fault, **extra):
    """The Reply of a server's model to a chat (messages) or a prompt (ids).

    fault_of(Reply): one line that begins with a name of RESEEDED where it cannot be taken.
    extra: more fields of the request, which not every server takes.

    Tried again after growing pauses, or after the time that the server asks for: a lost connection, the time limit,
    statuses 408, 409, 429 and 5xx. Tried again at once with another seed: a reply that cannot be read or taken. Tried
    again without SAMPLING: a request that is refused with it.
    InputError where no further request can succeed: nobody answers at an address that never has, key or model are
    refused, or no request has had a reply in all of that time. ReplyError where it is this one."""
    begin, attempt = time.monotonic(), 0
    sampling, refusal_of_sampling = server.sampling, None
    while True:
        address = await next_address(server)
        sent_at = time.monotonic()
        request = server_request(server, chat_or_ids, temperature, max_new_tokens, seed, {**sampling, **extra})
        server.counts["requests"] += 1
        address.in_flight += 1
        try:
            reply, fault, wait_s = await ask_once(server, address, request, fault_of)
        except RefusedWithSampling as error:                              # this request alone is sent without them
            sampling, refusal_of_sampling = {}, str(error)
            server.counts["retried: refused with " + ", ".join(SAMPLING)] += 1
            continue
        finally:
            address.in_flight -= 1
        where = f"{address.url}#{server.model}"
        if reply:
            if refusal_of_sampling and server.sampling:                   # so they were the reason: for all from now on
                say(f"{where}: asked without {', '.join(server.sampling)} ({refusal_of_sampling})")
                server.sampling = {}
            return reply
        now = time.monotonic()
        kind = re.split(r" \(|:", fault)[0]
        server.counts[f"retried: {kind}"] += 1
        if wait_s and wait_s > MAX_WAIT_S:
            raise InputError(f"{where}: asks to wait {wait_s:g} s ({fault}); run the same command again then")
        if kind != "status 429" or server.last_reply < sent_at:           # while others are served, our turn will come
            attempt += 1
        if attempt > server.retries:
            if kind in ("no connection", "status 429") and server.last_reply < begin:
                raise InputError(f"{where}: {fault}, and no reply to any request for {now - begin:.0f} s; run the same "
                                 "command again to go on")
            raise ReplyError(f"{where}: {fault}")
        if kind in RESEEDED:
            seed += 1
        pause_s = wait_s
        if pause_s is None:
            pause_s = min(MAX_PAUSE_S, 2 ** (attempt - 1)) * random.uniform(0.5, 1)
        if wait_s or kind == "no connection":                             # then all requests leave the address alone
            address.rests_until = max(address.rests_until, now + pause_s)
        else:
            await asyncio.sleep(pause_s)