"""Many dialogues in flight: 02 against a fast server, killed and started again, and how add_rows bounds what waits."""
import asyncio
import collections
import gc
import json
import os
import random
import signal
import threading
import time

import pytest

import common
from colbench import backend
from conftest import Fork, Partial, read, ROOT, stage
from lib.runtime import Rows, start, write_jsonl
from lib.sampling import add_rows

ROUNDS = 3                                                          # requests of a dialogue
NUM_TASKS, NUM_SAMPLES, CONCURRENCY = 20, 10, 32


class Asker:
    """A server of OpenAI's protocol, in a thread: asks twice and then answers with the reference."""

    def __init__(self, tasks):
        self.answers = {task["problem_description"]: backend.answer_message(task) for task in tasks}
        self.counts, self.ports = collections.Counter(), []
        threading.Thread(target=asyncio.run, args=[self.listen()], daemon=True).start()
        while not self.ports:
            time.sleep(0.01)

    async def listen(self):
        listener = await asyncio.start_server(self.serve, "127.0.0.1", 0, backlog=4096)
        self.ports.append(listener.sockets[0].getsockname()[1])
        await listener.serve_forever()

    def reply(self, request):
        opening, *rest = [m["content"] for m in request["messages"] if m["role"] != "system"]
        text = "What is it?" if len(rest) // 2 < ROUNDS - 1 else self.answers[opening]
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        return {"id": "1", "object": "chat.completion", "created": 0, "model": request["model"], "choices": [choice],
                "usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}}

    async def serve(self, reader, writer):
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                body = {"object": "list", "data": []}               # a GET: which models are there
                if head.startswith(b"POST"):
                    length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                    body = self.reply(json.loads(await reader.readexactly(length)))
                    self.counts["requests"] += 1
                    self.counts["in flight"] += 1
                    self.counts["most in flight"] = max(self.counts["most in flight"], self.counts["in flight"])
                    await asyncio.sleep(random.uniform(0.025, 0.075))
                    self.counts["in flight"] -= 1
                data = json.dumps(body).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
                    len(data), data))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()                                          # a client that was killed, or has enough


def most_open_files(process, partial, kill_at):
    """Follow a run until it ends, or kill it once `partial` has `kill_at` lines."""
    most = 0
    while process.poll() is None:
        if partial.exists():
            try:
                most = max(most, len(os.listdir(f"/proc/{process.pid}/fd")))
            except (FileNotFoundError, ProcessLookupError):
                break
            if partial.read_bytes().count(b"\n") >= kill_at:
                process.send_signal(signal.SIGKILL)
        time.sleep(0.02)
    return most


def test_nothing_is_lost_or_doubled_after_two_kills(tmp_path):
    tasks = stage(1).make_tasks(backend, NUM_TASKS, 0, "train", "none")
    for number, task in enumerate(tasks):                           # the server knows a task by its opening
        task["problem_description"] += f"\n(Request {number}.)"
    write_jsonl(tmp_path / "tasks.jsonl", tasks)
    server, out = Asker(tasks), tmp_path / "out.jsonl"
    flags = ["--tasks", tmp_path / "tasks.jsonl", "--agent", f"http://127.0.0.1:{server.ports[0]}/v1#asker",
             "--max-rounds", 8, "--samples", NUM_SAMPLES, "--concurrency", CONCURRENCY, "--out", out]
    for kill_at in (70, 140, 10_000):
        with open(tmp_path / "log", "w") as log:
            process = Fork(list(map(str, [ROOT / "02_rollout.py", *flags])), log)
            assert most_open_files(process, Partial(out), kill_at) < CONCURRENCY + 60
            process.wait()
        assert (process.returncode == 0) == (kill_at == 10_000), (tmp_path / "log").read_text()
    rows = read(out)
    names = [(task["task_id"], sample) for task in common.read_tasks(tmp_path / "tasks.jsonl")
             for sample in range(NUM_SAMPLES)]
    assert [(row["task_id"], row["sample"]) for row in rows] == names and not list(tmp_path.glob("*.partial"))
    assert all(row["reward"] == 1 and row["num_rounds"] == ROUNDS for row in rows)
    # A kill costs the dialogues in flight and those that wait to be scored, no others.
    most = len(rows) + 2 * 2 * CONCURRENCY + 2 * CONCURRENCY
    assert ROUNDS * len(rows) <= server.counts["requests"] <= ROUNDS * most
    assert server.counts["most in flight"] <= CONCURRENCY


def add(tmp_path, make_row, num_rows, concurrency):
    runtime = start(0)
    with Rows(tmp_path / "rows.jsonl", runtime) as rows:
        return add_rows(rows, range(num_rows), make_row, concurrency, runtime)


@pytest.mark.parametrize("durations", [(0.01,), (0.002, 0.05, 0.05, 0.05, 0.05, 0.05)])
def test_at_most_twice_as_many_wait_to_be_scored_as_are_in_flight(tmp_path, durations):
    waiting, most = 0, 0

    async def make_row(item):
        nonlocal waiting, most
        await asyncio.sleep(0)
        waiting += 1
        most = max(most, waiting)

        async def score():
            nonlocal waiting
            await asyncio.sleep(durations[item % len(durations)])
            waiting -= 1
            return {"item": item}
        return score

    assert add(tmp_path, make_row, 100, 4) == [] and waiting == 0 and 4 <= most <= 8


def test_an_error_of_the_scorer_ends_the_run_at_once(tmp_path, caplog):
    started = []

    async def score():
        raise ValueError("no sandbox")

    async def make_row(item):
        started.append(item)
        await asyncio.sleep(0.001)
        return score

    with pytest.raises(ValueError, match="no sandbox"):
        add(tmp_path, make_row, 1000, 2)
    assert len(started) < 20
    gc.collect()
    assert not caplog.records                                       # the error is raised once, and not also printed
