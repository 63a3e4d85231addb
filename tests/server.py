"""A small server of OpenAI's protocol, for tests: python tests/server.py [flags]; prints its port when it listens.

Serves a model folder under the name `model` through lib.engine.generate, to chats and to prompts of ids, and under
other names programs for chats: `asker` asks twice and answers then, `counter` says how many messages it sees, `thinker`
thinks before it asks, `viewer` counts the images that it sees. Every request is appended to --log before it is
answered, a JSON object a line, with its key and the status that it got. The failures are those that servers have."""
import argparse
import asyncio
import base64
import http.server
import json
import os
import pathlib
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from colbench import backend  # noqa: E402
from lib.engine import Engine  # noqa: E402
from lib.models import encode, load_model, stop_ids  # noqa: E402
from lib.seeds import uniforms  # noqa: E402


def asker(messages):
    num_turns = sum(message["role"] == "assistant" for message in messages)
    return "What is it?" if num_turns < 2 else f"{backend.MARKER}\ndef f(): return 1"


def viewer(messages):
    """Says how many PNG pictures it was sent."""
    parts = [part for part in messages[-1]["content"] if part["type"] == "image_url"]
    pictures = [base64.b64decode(part["image_url"]["url"].removeprefix("data:image/png;base64,")) for part in parts]
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
    lock, model, args, num_requests = threading.Lock(), None, None, 0

    def do_GET(self):
        self.send(200, '{"object": "list", "data": []}')

    def is_every(self, name, number):
        """Whether this request is one of those that a flag (every N-th one) is about."""
        every = getattr(self.args, name)
        return bool(every) and number % every == 0

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
        with self.lock:
            Handler.num_requests = number = self.num_requests + 1
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
        choice = {"index": 0, "finish_reason": "stop" if ended else "length",
                  **({"text": text} if "prompt" in request else {"message": {"role": "assistant", "content": text}})}
        if self.is_every("abort", number):
            choice["finish_reason"] = "abort"
        if request.get("return_token_ids") and request["model"] == "model":
            choice["token_ids"] = ids[:-1] if ended and self.is_every("no_end", number) else ids
        body = json.dumps({
            "id": "1", "object": "chat.completion", "created": 0, "model": request["model"], "choices": [choice],
            "usage": {"prompt_tokens": read, "completion_tokens": len(ids), "total_tokens": read + len(ids)}})
        self.send(200, body[:30] if self.is_every("broken", number) else body, cut=self.is_every("cut", number))

    def send(self, status, text, cut=False):
        data = text.encode()
        self.send_response(status)
        headers = {"Content-Type": "application/json", "Content-Length": len(data), "Retry-After": "0.1"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data[:len(data) // 2] if cut else data)
        self.close_connection |= cut

    def log_message(self, *_):
        pass


class Listener(http.server.ThreadingHTTPServer):
    request_queue_size, daemon_threads = 512, True


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder of a model, or smollm2, served as `model`")
    parser.add_argument("--port", type=int, default=0, help="0: any that is free")
    parser.add_argument("--key", help="the only key that is taken")
    parser.add_argument("--log", help="file of all requests (JSONL)")
    parser.add_argument("--delay-s", type=float, default=0.0, help="before every reply")
    parser.add_argument("--die-at", type=int, help="the request at which the process ends without a reply")
    parser.add_argument("--hang-at", type=int, help="the request whose reply comes a minute later")
    parser.add_argument("--strict", action="store_true", help="status 400 for fields that OpenAI does not have")
    parser.add_argument("--refuse", metavar="TEXT", help="status 400 for prompts with this text in them")
    parser.add_argument("--full", metavar="TEXT", help="the same: too long")
    for name, what in (("limit", "gets status 429 and Retry-After"), ("busy", "gets status 503"),
                       ("empty", "gets an empty reply"), ("broken", "gets half a JSON object"),
                       ("cut", "gets half of the bytes, then the connection ends"),
                       ("abort", "gets a reply that was aborted"), ("no-end", "gets ids without the end of its turn")):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"every N-th request {what}")
    Handler.args = parser.parse_args()
    if Handler.args.model:
        Handler.model = load_model(Handler.args.model, "cpu")
    listener = Listener(("127.0.0.1", Handler.args.port), Handler)
    print(listener.server_port, flush=True)
    listener.serve_forever()


if __name__ == "__main__":
    main()
