"""A small server of OpenAI's protocol, for tests: python tests/server.py [flags]; prints its port when it listens.

Serves a model folder under the name `model` through lib.engine.generate, to chats and to prompts of ids, and under
other names programs for chats: `asker` asks
twice and answers then, `counter` says how many messages it sees, `leaky` quotes the reference where temperature is 0,
`thinker` thinks before it asks, `viewer` counts the images that it sees. Every request is appended to --log before it
is answered, a JSON object a line, with its number, key, time (s), and the status that it got. The failures are those
that servers have."""
import argparse
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
from lib.engine import generate  # noqa: E402
from lib.models import encode, load_model, stop_ids  # noqa: E402
from lib.seeds import uniforms  # noqa: E402


def asker(messages, _):
    num_turns = sum(message["role"] == "assistant" for message in messages)
    return "What is it?" if num_turns < 2 else f"{backend.MARKER}\ndef f(): return 1"


def leaky(messages, temperature):
    code = messages[0]["content"].partition("Never write or quote code.")[2]
    return f"It is this: {code.strip()[:200]}" if temperature == 0 else "It is what you think."


def viewer(messages, _):
    """Says how many PNG pictures it was sent."""
    parts = [part for part in messages[-1]["content"] if part["type"] == "image_url"]
    pictures = [base64.b64decode(part["image_url"]["url"].removeprefix("data:image/png;base64,")) for part in parts]
    return f"I see {sum(picture.startswith(bytes([0x89]) + b'PNG') for picture in pictures)} pictures."


PROGRAMS = {"asker": asker, "leaky": leaky, "viewer": viewer,
            "counter": lambda messages, _: f"I see {len(messages)} messages.",
            "thinker": lambda *_: "<think>The plan is secret.</think>\nWhat should the lowest heat be?"}


def sample(model, tokenizer, request, lock):
    """A choice, and the numbers of tokens read and written."""
    ids, stops = request.get("prompt"), stop_ids(model, tokenizer)
    if ids is None:
        ids = encode(tokenizer, tokenizer.apply_chat_template(request["messages"], tokenize=False,
                                                              add_generation_prompt=True,
                                                              **request.get("chat_template_kwargs", {})))
    randoms = uniforms((1, request["max_tokens"]), request["seed"])
    with lock:
        [new] = generate(model, [ids], randoms, request["temperature"], stops)
    text = tokenizer.decode(new, skip_special_tokens=True)
    choice = {"index": 0, "finish_reason": "stop" if new[-1] in stops else "length",
              **({"text": text} if "prompt" in request else {"message": {"role": "assistant", "content": text}})}
    if request.get("return_token_ids"):
        choice["token_ids"] = new
    return choice, len(ids), len(new)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    lock, model, args, num_requests = threading.Lock(), None, None, 0

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            Handler.num_requests = number = self.num_requests + 1
        args = self.args
        status, headers, body = 200, {}, None
        if args.key and self.headers["Authorization"] != f"Bearer {args.key}":
            status, body = 401, "Incorrect API key provided"
        elif request["model"] not in PROGRAMS and not (self.model and request["model"] == "model"):
            status, body = 404, f"The model `{request['model']}` does not exist."
        elif args.strict and "top_k" in request:
            status, body = 400, "Unrecognized request argument supplied: top_k"
        elif args.limit and number % args.limit == 0:
            status, headers, body = 429, {"Retry-After": "0.2"}, "Rate limit reached"
        elif args.busy and number % args.busy == 0:
            status, body = 503, "Loading model"
        elif args.refuse and args.refuse in (self.model[1].decode(request["prompt"]) if "prompt" in request else
                                             json.dumps(request["messages"])):
            status, body = 400, "This model's maximum context length is 8 tokens"
        with self.lock, open(args.log or os.devnull, "a") as log:
            log.write(json.dumps({**request, "number": number, "key": self.headers["Authorization"], "status": status,
                                  "time": time.monotonic()}) + "\n")
        if number == args.die_at:
            os._exit(1)
        time.sleep(args.hang_s if number == args.hang_at else args.delay_s)
        if body is not None:
            return self.send(status, json.dumps({"error": {"message": body}}), headers)
        if request["model"] == "model":
            choice, read, written = sample(*self.model, request, self.lock)
        else:
            content = PROGRAMS[request["model"]](request["messages"], request.get("temperature"))
            choice, read, written = {"index": 0, "finish_reason": "stop", "message": {
                "role": "assistant", "content": content}}, 10, 5
        if args.empty and number % args.empty == 0:
            choice |= {"text": ""} if "prompt" in request else {"message": {"role": "assistant", "content": ""}}
        if args.wrong_ids and number % args.wrong_ids == 0:
            choice["token_ids"] = [7 for _ in choice["token_ids"]]
        self.send(200, '{"choices": [' if args.broken and number % args.broken == 0 else json.dumps({
            "id": "1", "object": "chat.completion", "created": 0, "model": request["model"], "choices": [choice],
            "usage": {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}}),
                  cut=bool(args.cut) and number % args.cut == 0)

    def send(self, status, text, headers=None, cut=False):
        data = text.encode()
        self.send_response(status)
        headers = {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}
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
    parser.add_argument("--hang-at", type=int, help="the request whose reply comes --hang-s later")
    parser.add_argument("--hang-s", type=float, default=60.0)
    parser.add_argument("--strict", action="store_true", help="status 400 for fields that OpenAI does not have")
    parser.add_argument("--refuse", metavar="TEXT", help="status 400 for chats with this text in them")
    for name, what in (("limit", "gets status 429 and Retry-After"), ("busy", "gets status 503"),
                       ("empty", "gets an empty reply"), ("broken", "gets half a JSON object"),
                       ("cut", "gets half of the bytes, then the connection ends"),
                       ("wrong-ids", "gets other token ids than its text")):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"every N-th request {what}")
    Handler.args = parser.parse_args()
    if Handler.args.model:
        Handler.model = load_model(Handler.args.model, "cpu")
    listener = Listener(("127.0.0.1", Handler.args.port), Handler)
    print(listener.server_port, flush=True)
    listener.serve_forever()


if __name__ == "__main__":
    main()
