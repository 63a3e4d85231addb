"""What a server may send in place of a reply, against a real HTTP server on this machine: every case is a reply, or a
failed attempt that is tried again, or one line; none ends a run in another way, none sends the chat elsewhere, none
shows the key."""
import asyncio
import base64
import contextlib
import copy
import gzip
import itertools
import json
import re
import socketserver
import threading
import time
import tracemalloc
import zlib

import pytest

from conftest import read, refused, run, stage
from lib.runtime import InputError
from lib.servers import (
    key_parts,
    MAX_REPLY_BYTES,
    open_server,
    read_reply,
    Reply,
    ReplyError,
    server_reply,
    UnreadableReply,
    without_key,
)

KEY = "sk-proj/Ab1_Cd2-Ef3.Gh4+Ij5"
CHAT = [{"role": "user", "content": "What is the secret?"}]


def http_reply(body, status="200 OK", **headers):
    """The bytes of a whole HTTP response."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"Content-Type": "application/json", "Content-Length": len(body), "Connection": "close"}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in fields.items() if value is not None)]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def chat_reply(**changes):
    """A good reply, with changed fields of its only choice (…) or of the whole (usage, choices)."""
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "What is it?"}}
    usage = {"prompt_tokens": 10, "completion_tokens": 5}
    whole = {name: changes.pop(name) for name in ("usage", "choices") if name in changes}
    return {"choices": [choice | changes], "usage": usage} | whole


GOOD = http_reply(chat_reply())


class OneReply(socketserver.BaseRequestHandler):
    """Reads a request and sends the server's next reply: bytes or, of a list, pieces with 50 ms between them."""

    def handle(self):
        data = b""
        while b"\r\n\r\n" not in data:
            data += self.request.recv(65536)
        head, _, body = data.partition(b"\r\n\r\n")
        length = int(re.search(rb"content-length: (\d+)", head, re.IGNORECASE)[1])
        while len(body) < length:
            body += self.request.recv(65536)
        with self.server.lock:
            self.server.requests.append((head.decode(), body.decode()))
            reply = self.server.replies.pop(0) if len(self.server.replies) > 1 else self.server.replies[0]
        with contextlib.suppress(OSError):                          # the client may have gone
            for piece in reply if isinstance(reply, list) else [reply]:
                self.request.sendall(piece)
                if isinstance(reply, list):
                    time.sleep(0.05)


class Listener(socketserver.ThreadingTCPServer):
    allow_reuse_address, daemon_threads = True, True


@pytest.fixture
def answer():
    """answer(reply, …) starts a server that sends these replies in turn, the last one for ever. It has a `url` and the
    `requests`, (head, body) each."""
    listeners = []

    def start(*replies):
        listener = Listener(("127.0.0.1", 0), OneReply)
        listener.replies, listener.requests, listener.lock = list(replies), [], threading.Lock()
        listener.url = f"http://127.0.0.1:{listener.server_address[1]}/v1#asker"
        threading.Thread(target=listener.serve_forever, args=(0.01,), daemon=True).start()
        listeners.append(listener)
        return listener
    yield start
    for listener in listeners:
        listener.shutdown()
        listener.server_close()


async def ask(server, said=CHAT):
    return await server_reply(server, said, 1.0, 8, 0)


def nested(depth, opening="[", closing="]"):
    return (opening * depth + closing * depth).encode()


def with_content(raw):
    """A reply whose content is this JSON text (bytes)."""
    return b'{"choices": [{"message": {"content": ' + raw + b'}}]}'


def bomb(size):
    packer = zlib.compressobj(9, wbits=31)
    piece, whole = b" " * 2 ** 20, b""
    for _ in range(size >> 20):
        whole += packer.compress(piece)
    return whole + packer.flush()


# --- what is a reply

REPLIES = {
    "plain": (chat_reply(), ("What is it?", True, None, 10, 5)),
    "usage null": (chat_reply(usage=None), ("What is it?", True, None, 0, 0)),
    "usage without counts": (chat_reply(usage={}), ("What is it?", True, None, 0, 0)),
    "usage of nulls": (chat_reply(usage={"prompt_tokens": None}), ("What is it?", True, None, 0, 0)),
    "usage with more": (chat_reply(usage={"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": "x"}),
                        ("What is it?", True, None, 1, 2)),
    "NaN where nothing is read": (b'{"created": NaN, ' + json.dumps(chat_reply()).encode()[1:],
                                  ("What is it?", True, None, 10, 5)),
    "cut": (chat_reply(finish_reason="length"), ("What is it?", False, None, 10, 5)),
    "no reason": (chat_reply(finish_reason=None), ("What is it?", True, None, 10, 5)),
    "ids": (chat_reply(token_ids=[1, 0, 2 ** 31 - 1]), ("What is it?", True, [1, 0, 2 ** 31 - 1], 10, 5)),
    "thoughts": (chat_reply(message={"content": "a", "reasoning": "b"}), ("<think>b</think>a", True, None, 10, 5)),
    "a lone surrogate": (with_content(rb'"\ud800?"'), ("\ud800?", True, None, 0, 0)),
    "a text": ({"choices": [{"text": "a"}]}, ("a", True, None, 0, 0)),
    "a byte order mark": (b"\xef\xbb\xbf" + json.dumps(chat_reply()).encode(), ("What is it?", True, None, 10, 5)),
}


@pytest.mark.parametrize("name", REPLIES)
def test_what_is_a_reply(answer, name):
    body, wanted = REPLIES[name]
    listener = answer(http_reply(body if isinstance(body, bytes) else json.dumps(body).encode()))
    assert asyncio.run(ask(open_server(listener.url, retries=0))) == Reply(*wanted)


@pytest.mark.parametrize("encoding, pack", [("gzip", gzip.compress), ("deflate", zlib.compress), ("identity", bytes)])
def test_a_reply_may_be_compressed(answer, encoding, pack):
    listener = answer(http_reply(pack(json.dumps(chat_reply()).encode()), Content_Encoding=encoding))
    assert asyncio.run(ask(open_server(listener.url, retries=0))).text == "What is it?"
    assert "accept-encoding: identity" in listener.requests[0][0].lower()


# --- what is none: a failed attempt that is tried again

UNREADABLE = {
    "usage a string": chat_reply(usage="10"),
    "usage a list": chat_reply(usage=[10, 5]),
    "a count that is a string": chat_reply(usage={"prompt_tokens": "10", "completion_tokens": 5}),
    "a count that is NaN": chat_reply(usage={"prompt_tokens": float("nan")}),
    "a count that is infinite": b'{"choices": [{"text": "a"}], "usage": {"prompt_tokens": 1e999}}',
    "a count that is a fraction": chat_reply(usage={"completion_tokens": 1.5}),
    "a count that is true": chat_reply(usage={"completion_tokens": True}),
    "a count below zero": chat_reply(usage={"prompt_tokens": -1}),
    "a huge count": chat_reply(usage={"prompt_tokens": 10 ** 30}),
    "a count that is an object": chat_reply(usage={"prompt_tokens": {"n": 1}}),
    "choices an object": chat_reply(choices={"0": {"text": "a"}}),
    "choices a string": chat_reply(choices="What is it?"),
    "no choices": {"usage": {"prompt_tokens": 1}},
    "empty choices": chat_reply(choices=[]),
    "choices null": chat_reply(choices=None),
    "choices of nulls": chat_reply(choices=[None, None]),
    "choices of texts": chat_reply(choices=["What is it?"]),
    "choices of lists": chat_reply(choices=[[]]),
    "an empty choice": chat_reply(choices=[{}]),
    "message null": chat_reply(message=None),
    "message a string": chat_reply(message="What is it?"),
    "message a list": chat_reply(message=[{"content": "What is it?"}]),
    "content a list": chat_reply(message={"content": [{"type": "text", "text": "a"}]}),
    "content an object": chat_reply(message={"content": {"text": "a"}}),
    "content a number": chat_reply(message={"content": 7}),
    "content false": chat_reply(message={"content": False}),
    "text a number": {"choices": [{"text": 7}]},
    "thoughts an object": chat_reply(message={"content": "a", "reasoning_content": {"a": 1}}),
    "thoughts a number": chat_reply(message={"content": "a", "reasoning": 1}),
    "a reason that is a number": chat_reply(finish_reason=1),
    "a reason that is a list": chat_reply(finish_reason=["length"]),
    "ids a string": chat_reply(token_ids="1 2"),
    "ids an object": chat_reply(token_ids={"0": 1}),
    "ids of strings": chat_reply(token_ids=["1"]),
    "ids of nulls": chat_reply(token_ids=[None]),
    "ids of fractions": chat_reply(token_ids=[1.0]),
    "ids of booleans": chat_reply(token_ids=[True]),
    "ids below zero": chat_reply(token_ids=[-1]),
    "huge ids": chat_reply(token_ids=[2 ** 31]),
    "ids in lists": chat_reply(token_ids=[[1, 2]]),
    "a list": [chat_reply()],
    "a string": "What is it?",
    "null": b"null",
    "a number": b"7",
    "an empty body": b"",
    "spaces": b"   ",
    "half an object": b'{"choices": [',
    "two objects": b'{"choices": []} {"choices": []}',
    "HTML": b"<!doctype html><html><body>Please log in</body></html>",
    "an event stream": b'data: {"choices": [{"delta": {"content": "a"}}]}\n\ndata: [DONE]\n\n',
    "lists 5,000 deep": with_content(nested(5_000)),
    "lists 100,000 deep": with_content(nested(100_000)),
    "objects 20,000 deep": with_content(nested(20_000, '{"a":', "}")[:100_000] + b"1" + b"}" * 20_000),
    "a body 100,000 deep": nested(100_000),
    "a body 1,000,000 deep without an end": b"[" * 1_000_000,
    "an integer of 4,301 digits": with_content(b"7" * 4_301),
    "a count of 100,000 digits": b'{"choices": [{"text": "a"}], "usage": {"prompt_tokens": ' + b"9" * 100_000 + b"}}",
    "invalid UTF-8": with_content(b'"\xff\xfe"'),
    "Latin-1": with_content('"Grüße"'.encode("latin-1")),
    "UTF-16": json.dumps(chat_reply()).encode("utf-16"),
    "zero bytes": b"\0" * 1000,
    "an error with status 200": {"error": {"message": "Provider returned error", "code": 429}},
    "a key that is there twice, the last null": b'{"choices": [{"text": "a"}], "choices": null}',
    "more bytes than the limit": with_content(b'"' + b"a" * MAX_REPLY_BYTES + b'"'),
}
COMPRESSED = {
    "no gzip": ("gzip", b"What is it?"),
    "truncated gzip": ("gzip", gzip.compress(json.dumps(chat_reply()).encode())[:-9]),
    "damaged gzip": ("gzip", gzip.compress(b"a" * 1000)[:20] + b"\xff" * 20),
    "an empty gzip": ("gzip", b""),
    "a bomb of 600 KB": ("gzip", bomb(600 * 2 ** 20)),
    "a bomb in a bomb": ("gzip, gzip", gzip.compress(bomb(100 * 2 ** 20))),
    "bytes after the end": ("gzip", gzip.compress(b"{}") + b"a" * (MAX_REPLY_BYTES + 1)),
    "brotli": ("br", b"\x0b\x02\x80{}\x03"),
    "zstd": ("zstd", b"\x28\xb5\x2f\xfd\x04\x00"),
    "an unknown one": ("\x1b[31m", b"{}"),
}
BAD_BODIES = {name: http_reply(body) for name, body in UNREADABLE.items()} | {
    name: http_reply(body, Content_Encoding=encoding) for name, (encoding, body) in COMPRESSED.items()} | {
    "status 204": http_reply(b"", "204 No Content"),
    "a status with no reason": http_reply(b"", "200"),
    "fewer bytes than are there": http_reply(json.dumps(chat_reply()).encode(), Content_Length=40),
}
LOST = {
    "more bytes than are there": http_reply(json.dumps(chat_reply()).encode(), Content_Length=4000),
    "a length that is no number": http_reply(b"{}", Content_Length="many"),
    "a length below zero": http_reply(b"{}", Content_Length=-1),
    "two lengths": http_reply(b"{}").replace(b"Connection: close", b"Content-Length: 9"),
    "no HTTP": b"What is it?\r\n\r\n",
    "no status": b"HTTP/1.1\r\n\r\n",
    "nothing": b"",
    "half a header": b"HTTP/1.1 200 OK\r\nContent-Le",
    "a header without an end": b"HTTP/1.1 200 OK\r\nX: " + b"a" * 500_000,
    "broken chunks": http_reply(b"zz\r\n{}\r\n", Content_Length=None, Transfer_Encoding="chunked"),
    "chunks without an end": http_reply(b"2\r\n{}\r\n", Content_Length=None, Transfer_Encoding="chunked"),
}


def check_failed_attempts(listener, kind):
    """Of a good reply, two bad ones and a good one, the bad ones end a dialogue (--retries 1) with one line."""
    opened = open_server(listener.url, retries=1, timeout_s=20)

    async def three():
        assert (await ask(opened)).text == "What is it?"
        with pytest.raises(ReplyError, match=kind) as error:
            await ask(opened)
        assert (await ask(opened)).text == "What is it?"
        return str(error.value)
    line = asyncio.run(three())
    assert len(listener.requests) == 4 and len(line) < 400 and "\n" not in line
    assert opened.counts[f"retried: {kind}"] == 2
    assert (opened.counts["server_prompt_tokens"], opened.counts["server_completion_tokens"]) == (20, 10)


@pytest.mark.parametrize("name", BAD_BODIES)
def test_what_is_no_reply_is_a_failed_attempt(answer, name):
    tracemalloc.start()
    try:
        check_failed_attempts(answer(GOOD, BAD_BODIES[name], BAD_BODIES[name], GOOD), "unreadable reply")
        assert tracemalloc.get_traced_memory()[1] < 100 * 2 ** 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", LOST)
def test_what_is_no_http_is_a_lost_connection(answer, name, monkeypatch):
    monkeypatch.setattr("lib.servers.MAX_PAUSE_S", 0.01)
    opened = open_server(answer(LOST[name], GOOD).url, retries=1, timeout_s=20)
    assert asyncio.run(ask(opened)).text == "What is it?"
    assert opened.counts["retried: no connection"] == 1


@pytest.mark.parametrize("name", LOST)
def test_a_server_that_never_speaks_http_ends_the_run(answer, name):
    with pytest.raises(InputError, match="no connection.*and no reply to any request"):
        asyncio.run(ask(open_server(answer(LOST[name]).url, retries=0)))


def test_a_reply_that_drips_ends_with_the_time_limit(answer, monkeypatch):
    monkeypatch.setattr("lib.servers.MAX_PAUSE_S", 0.01)
    drip = [http_reply(b"", Content_Length=10_000), *[b" "] * 100]
    opened, begin = open_server(answer(drip, GOOD).url, retries=1, timeout_s=0.5), time.monotonic()
    assert asyncio.run(ask(opened)).text == "What is it?" and time.monotonic() - begin < 3
    assert opened.counts["retried: no reply within 0.5 s"] == 1


# --- redirects

@pytest.mark.parametrize("status", [300, 301, 302, 303, 304, 305, 307, 308])
@pytest.mark.parametrize("first", [True, False])
def test_no_redirect_is_followed(answer, status, first):
    """The chat goes to no other port: at first the run ends with one line, later the dialogue does."""
    other = answer(GOOD)
    moved = http_reply(b"", f"{status} Moved", Location=other.url.replace("#asker", "/chat/completions"))
    listener = answer(moved) if first else answer(GOOD, moved)
    opened = open_server(listener.url, retries=2)

    async def play():
        if not first:
            await ask(opened)
        await ask(opened)
    with pytest.raises(InputError if first else ReplyError, match=f"status {status}: sends to http.*not followed"):
        asyncio.run(play())
    assert other.requests == [] and len(listener.requests) == 2 - first


@pytest.mark.parametrize("location", ["", "/v1/elsewhere", "http://[::1", "http://\x1b[31m", "file:///etc/passwd"])
def test_redirects_to_odd_places_are_one_line(answer, location, monkeypatch):
    monkeypatch.setattr("lib.servers.MAX_PAUSE_S", 0.01)
    listener = answer(http_reply(b"", "307 Moved", Location=location))
    with pytest.raises((InputError, ReplyError)) as error:
        asyncio.run(ask(open_server(listener.url, retries=1)))
    assert "\n" not in str(error.value) and len(listener.requests) <= 2
    assert "/chat/completions" in listener.requests[-1][0]


# --- the key

ECHOES = {
    "as it is": lambda: {"error": {"message": f"Incorrect API key provided: {KEY}."}},
    "twice": lambda: {"error": {"message": f"{KEY} is not {KEY}{KEY}"}},
    "its beginning": lambda: {"error": {"message": f"Incorrect API key provided: {KEY[:12]}****."}},
    "its end": lambda: {"error": {"message": f"Incorrect API key provided: ****{KEY[-12:]}"}},
    "in capitals": lambda: {"error": {"message": KEY.upper()}},
    "a message alone": lambda: {"error": f"wrong key {KEY}"},
    "as code": lambda: {"error": {"message": "wrong", "code": KEY}},
    "in a place that is not known": lambda: {"detail": [{"headers": {"authorization": f"Bearer {KEY}"}}]},
    "as plain text": lambda: f"wrong key {KEY}".encode(),
    "as escaped JSON": lambda: json.dumps({"detail": KEY}).replace("/", r"\/").encode(),
    "as JSON in all letters": lambda: ('"' + "".join(rf"\u{ord(c):04x}" for c in KEY) + '"').encode(),
    "as JSON in a message": lambda: {"error": {"message": json.dumps({"key": KEY})}},
    "as a URL": lambda: f"see http://a/?key={KEY.replace('/', '%2F').replace('+', '%2B')}".encode(),
    "as HTML": lambda: f"<p>{KEY.replace('/', '&#47;')}</p>".encode(),
    "where a line is cut": lambda: {"error": {"message": "x" * (200 - 20) + KEY}},
}


def assert_no_key(text):
    parts = [KEY[i:i + 8].lower() for i in range(len(KEY) - 7)]
    assert not any(part in text.lower() for part in parts), text


@pytest.mark.parametrize("status", ["400 Bad Request", "401 Unauthorized", "404 Not Found", "503 Busy"])
@pytest.mark.parametrize("name", ECHOES)
def test_no_error_shows_the_key(answer, monkeypatch, name, status):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    listener = answer(http_reply(ECHOES[name](), status))
    with pytest.raises((InputError, ReplyError)) as error:
        asyncio.run(ask(open_server(listener.url, retries=0)))
    assert f"authorization: bearer {KEY}".lower() in listener.requests[0][0].lower()
    assert_no_key(str(error.value))
    assert f"status {status[:3]}" in str(error.value)


@pytest.mark.parametrize("reply", [
    http_reply(b"", f"503 {KEY}"), http_reply(b"", "307 Moved", Location=f"http://a/?key={KEY}"),
    http_reply({"error": {"message": KEY}}), http_reply(b"{}", Content_Encoding=KEY)])
def test_no_error_shows_the_key_of_other_parts(answer, monkeypatch, reply):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with pytest.raises((InputError, ReplyError)) as error:
        asyncio.run(ask(open_server(answer(reply).url, retries=0)))
    assert_no_key(str(error.value))


def test_the_key_is_in_no_file_of_failed_dialogues(answer, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    stage(1).main(["--num-tasks", "3", "--out", str(tmp_path / "tasks")])
    listener = answer(http_reply({"error": {"message": f"No {KEY} here"}}, "500 Wrong"))
    line = refused(2, "--tasks", tmp_path / "tasks", "--agent", listener.url, "--simulator", "rules", "--retries", 0,
                   "--out", tmp_path / "out")
    failed = read(tmp_path / "out.failed.jsonl")
    assert len(failed) == 3 and all("No [key] here" in row["failed"] for row in failed) and "No [key] here" in line
    assert_no_key((tmp_path / "out.failed.jsonl").read_text() + capsys.readouterr().out + line)


@pytest.mark.parametrize("role", ["agent", "simulator", "judge", "01"])
def test_every_role_reads_replies_alike(answer, tmp_path, monkeypatch, capfd, role):
    """A server whose every reply is unreadable, and holds the key, ends each kind of run with one line."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    stage(1).main(["--num-tasks", "2", "--out", str(tmp_path / "tasks")])
    good = answer(*(http_reply(chat_reply(message={"content": f"What is {n}?"})) for n in range(30))).url
    bad = answer(http_reply(chat_reply(usage={"prompt_tokens": KEY}, choices={KEY: KEY}))).url
    flags = {"agent": ["--agent", bad, "--simulator", "rules"], "simulator": ["--agent", good, "--simulator", bad],
             "judge": ["--agent", good, "--simulator", "rules", "--best-of", 2, "--critic", f"judge:{bad}"]}
    if role == "01":                                                # a process: this error has a class of its own
        process = run("01_generate_tasks.py", "--source", "llm", "--model", bad, "--num-tasks", 1, "--max-attempts", 1,
                      "--concurrency", 1, "--out", tmp_path / "out")
        assert process.returncode == 2 and "Traceback" not in process.stderr
        line, printed = process.stderr, process.stdout
    else:
        line = refused(2, "--tasks", tmp_path / "tasks", *flags[role], "--retries", 1, "--max-rounds", 2, "--out",
                       tmp_path / "out")
        printed = "".join(capfd.readouterr())
    assert 'unreadable reply ("choices" is a dict, not a list)' in line
    files = [path.read_text() for path in tmp_path.iterdir() if path.is_file()]
    assert_no_key(line + printed + "".join(files))


@pytest.mark.parametrize("key, text, wanted", [
    ("secret", "a secret b", "a [key] b"), ("secret", "a secre b", "a secre b"), ("none", "no, none", "no, [key]"),
    ("abc", "abc", "abc"), ("0123456789", "12345678 and 1234567", "[key] and 1234567"),
    ("0123456789", "İ0123456789İ", "İ[key]İ"), ("01234567", "0123456701234567", "[key]"),
    ("a\"b\\c&d<e", json.dumps("a\"b\\c&d<e"), '"[key]"')])
def test_the_key_is_replaced(key, text, wanted):
    assert without_key(text, key_parts(key)) == wanted


@pytest.mark.parametrize("key", ["sk-1\n", "sk-1\r\nX: y", "schlüssel", "\x1b[31m", "\0"])
def test_a_key_that_no_header_can_have_is_one_line(monkeypatch, key):
    if "\0" in key:
        key = "\x01"                                                # the environment has no zero bytes
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(InputError, match="^OPENAI_API_KEY: has characters that no header can have") as error:
        open_server("http://127.0.0.1:1/v1#m")
    assert "sk-1" not in str(error.value)


@pytest.mark.parametrize("url", ["http://[::1/v1#m", "http://a:port/v1#m", "http://a:99999999/v1#m", "http://\x1b/v1#m"])
def test_an_address_that_is_none_is_one_line(url):
    with pytest.raises(InputError, match="no address of a server"):
        open_server(url)


# --- other

def test_lone_surrogates_are_sent_as_question_marks(answer):
    listener = answer(GOOD)
    asyncio.run(ask(open_server(listener.url), [{"role": "user", "content": "a \ud800 b ü"}]))
    assert json.loads(listener.requests[0][1])["messages"][0]["content"] == "a ? b ü"


def test_cookies_are_not_sent_back(answer):
    listener, opened = answer(http_reply(chat_reply(), Set_Cookie="a=b; Path=/")), None

    async def twice():
        await ask(opened)
        await ask(opened)
    opened = open_server(listener.url)
    asyncio.run(twice())
    assert len(listener.requests) == 2 and not any("cookie" in head.lower() for head, _ in listener.requests)


def change(whole, path, value):
    """Put a value into a place of a reply, where that place is still there."""
    owner = whole
    for step in path[:-1]:
        if not isinstance(owner, dict if isinstance(step, str) else list) or not owner:
            return
        owner = owner.get(step) if isinstance(step, str) else owner[step]
    if isinstance(owner, dict if isinstance(path[-1], str) else list) and owner:
        owner[path[-1]] = copy.deepcopy(value)


def test_changed_replies_are_read_or_unreadable():
    """Of every two places of a reply, each with the same other value: read_reply raises nothing else."""
    values = [None, True, -1, 0, 2 ** 70, 0.5, float("nan"), "", "a", [], [[]], [None], {}, {"a": 1}]
    paths = [("choices",), ("usage",), ("choices", 0), ("usage", "prompt_tokens"), ("usage", "completion_tokens")]
    paths += [("choices", 0, name) for name in ("message", "text", "token_ids", "finish_reason")]
    paths += [("choices", 0, "message", name) for name in ("content", "reasoning", "reasoning_content")]
    ends = {"read": 0, "unreadable": 0}
    for first, second, value in itertools.product(paths, paths, values):
        whole = chat_reply(token_ids=[1])
        change(whole, first, value)
        change(whole, second, value)
        try:
            reply = read_reply(json.dumps(whole).encode())
        except UnreadableReply as error:
            ends["unreadable"] += 1
            assert str(error)
            continue
        ends["read"] += 1
        assert type(reply.text) is str and type(reply.ended) is bool
        assert type(reply.prompt_tokens) is int and type(reply.completion_tokens) is int
    assert min(ends.values()) > 100 and sum(ends.values()) > 1500


def test_a_key_in_base64_is_not_found():
    """What is not protected, as docs/scorer.md says."""
    assert "[key]" not in without_key(base64.b64encode(KEY.encode()).decode(), key_parts(KEY))
