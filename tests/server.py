"""A small server of OpenAI's protocol, for tests: python tests/server.py [flags]; prints its port when it listens.

Serves a model folder (--model) under the name `model` to chats and to prompts of ids, and under other names programs
for chats: `asker` asks twice and answers then, `counter` says how many messages it sees, `thinker` thinks before it
asks, `viewer` counts the images that it sees. Every request is appended to the file --log before it is answered, a JSON
object a line, with its key and the status that it got. The failures are those that servers have:

--key KEY, --strict           status 401 for other keys, 400 for fields that OpenAI does not have
--refuse TEXT, --full TEXT    status 400 for prompts with this text in them; the same: too long
--die-at N, --hang-at N       at this request the process ends without a reply; its reply comes a minute later
--limit N, --busy N           every N-th request gets status 429 and Retry-After, or 503;
--empty N, --abort N          an empty reply, or one that was aborted;
--broken N, --cut N           half a JSON object, or half of the bytes before the connection ends;
--no-end N                    ids without the end of its turn
--delay-s SECONDS             before every reply"""
import argparse
import asyncio
import base64
import http.server
import itertools
import json
import os
import pathlib
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from colbench import backend  # noqa: E402
from lib.engine import Engine  # noqa: E402
from lib.load import load_model  # noqa: E402
from lib.seeds import uniforms  # noqa: E402
from lib.tokens import encode, stop_ids  # noqa: E402


def asker(messages):
    num_turns = sum(message["role"] == "assistant" for message in messages)
    return "What is it?" if num_turns < 2 else f"{backend.MARKER}\ndef f(): return 1"


def viewer(messages):
    urls = [part["image_url"]["url"] for part in messages[-1]["content"] if part["type"] == "image_url"]
    pictures = [base64.b64decode(url.removeprefix("data:image/png;base64,")) for url in urls]
    return f"I see {sum(picture.startswith(bytes([0x89]) + b'PNG') for picture in pictures)} pictures."


def generate(model, prompts, randoms, temperature, stops, slots=256):
    """Continuations of P prompts (lists of ids) by an Engine: N lists of new ids, N / P of each prompt one after the
    other. randoms: (N, max_new_tokens)."""
    num_samples = len(randoms) // len(prompts)
    engine = Engine(model, stops, max(num_samples, min(slots, len(randoms))), 16384)

    async def sample_all():
        requests = map(engine.generate, prompts, randoms.split(num_samples), [temperature] * len(prompts))
        return await asyncio.gather(*requests)
    return sum(asyncio.run(sample_all()), [])


PROGRAMS = {"asker": asker, "viewer": viewer,
            "counter": lambda messages: f"I see {len(messages)} messages.",
            "thinker": lambda messages: "<think>The plan is secret.</think>\nWhat should the lowest heat be?"}


def sample(model, tokenizer, request, lock):
    """(text, ids, whether the turn has ended, number of tokens read)."""
    ids, stops = request.get("prompt"), stop_ids(model, tokenizer)
    if ids is None:
        text = tokenizer.apply_chat_template(request["messages"], tokenize=False, add_generation_prompt=True,
                                             **request.get("chat_template_kwargs", {}))
        ids = encode(tokenizer, text)
    randoms = uniforms((1, request["max_tokens"]), request["seed"])
    with lock:
        [new] = generate(model, [ids], randoms, request["temperature"], stops)
    return tokenizer.decode(new, skip_special_tokens=True), new, new[-1] in stops, len(ids)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    lock, model, args, numbers = threading.Lock(), None, None, itertools.count(1)

    def do_GET(self):
        self.send(200, '{"object": "list", "data": []}')

    def is_every(self, name, number):
        every = getattr(self.args, name)
        return every and number % every == 0

    def refusal(self, request, number):
        """(status, what is said)."""
        args, served = self.args, [*PROGRAMS, "model"] if self.model else PROGRAMS
        prompt = self.model[1].decode(request["prompt"]) if "prompt" in request else json.dumps(request["messages"])
        for is_refused, status, text in (
                (args.key and self.headers["Authorization"] != f"Bearer {args.key}", 401, "Incorrect API key provided"),
                (request["model"] not in served, 404, f"The model `{request['model']}` does not exist."),
                (args.strict and "top_k" in request, 400, "Unrecognized request argument supplied: top_k"),
                (self.is_every("limit", number), 429, "Rate limit reached"),
                (self.is_every("busy", number), 503, "Loading model"),
                (args.refuse and args.refuse in prompt, 400, "This text is not allowed"),
                (args.full and args.full in prompt, 400, "This model's maximum context length is 8 tokens")):
            if is_refused:
                return status, text
        return 200, None

    def do_POST(self):
        request, args = json.loads(self.rfile.read(int(self.headers["Content-Length"]))), self.args
        number = next(self.numbers)
        status, refusal = self.refusal(request, number)
        with self.lock, open(args.log or os.devnull, "a") as log:
            log.write(json.dumps({**request, "key": self.headers["Authorization"], "status": status}) + "\n")
        if number == args.die_at:
            os._exit(1)
        time.sleep(60 if number == args.hang_at else args.delay_s)
        if refusal:
            return self.send(status, json.dumps({"error": {"message": refusal}}))
        if request["model"] == "model":
            text, ids, ended, read = sample(*self.model, request, self.lock)
        else:
            text, ids, ended, read = PROGRAMS[request["model"]](request["messages"]), [0] * 5, True, 10
        if self.is_every("empty", number):
            text = ""
        end = "abort" if self.is_every("abort", number) else "stop" if ended else "length"
        said = {"text": text} if "prompt" in request else {"message": {"role": "assistant", "content": text}}
        choice = {"index": 0, "finish_reason": end, **said}
        if request.get("return_token_ids") and request["model"] == "model":
            choice["token_ids"] = ids[:-1] if ended and self.is_every("no_end", number) else ids
        body = json.dumps({
            "id": "1", "object": "chat.completion", "created": 0, "model": request["model"], "choices": [choice],
            "usage": {"prompt_tokens": read, "completion_tokens": len(ids), "total_tokens": read + len(ids)}})
        self.send(200, body[:30] if self.is_every("broken", number) else body, cut=self.is_every("cut", number))

    def send(self, status, text, cut=False):
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", len(data))
        self.send_header("Retry-After", "0.1")
        self.end_headers()
        self.wfile.write(data[:len(data) // 2] if cut else data)
        self.close_connection |= cut


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strict", action="store_true")
    for name in ("model", "key", "log", "refuse", "full"):
        parser.add_argument(f"--{name}")
    for name in ("port", "delay-s", "die-at", "hang-at", "limit", "busy", "empty", "abort", "broken", "cut", "no-end"):
        parser.add_argument(f"--{name}", type=json.loads, default=0)
    Handler.args = parser.parse_args()
    if Handler.args.model:
        Handler.model = load_model(Handler.args.model, "cpu")
    http.server.ThreadingHTTPServer.request_queue_size = 512
    listener = http.server.ThreadingHTTPServer(("127.0.0.1", Handler.args.port), Handler)
    print(listener.server_port, flush=True)
    listener.serve_forever()


if __name__ == "__main__":
    main()
