"""Many dialogues at once through 02 against a fast server of ours: what is lost, held and spent.

    python tests/bench_load.py [--dialogues 10000] [--concurrency 512] [--kills 2] [--workers 1 2 4 8 16]

A scripted agent behind OpenAI's protocol asks twice and then answers with the reference; the human is the rules. The
run is killed (kill -9) `--kills` times and goes on. Prints whether each dialogue is there once, the requests that were
made twice, memory and open files while it runs, CPU time a dialogue of 02 and of its parts alone (client, scorer,
writer), and of the scorer with more workers. All CPU times hold the child processes'."""
import argparse
import asyncio
import collections
import json
import os
import pathlib
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import common  # noqa: E402
from colbench import backend  # noqa: E402
from colbench.scorer import Scorer  # noqa: E402
from conftest import Partial, stage  # noqa: E402
from lib.runtime import Rows, Runtime, write_jsonl  # noqa: E402
from lib.servers import open_server, server_reply  # noqa: E402
from lib.speakers import run_concurrently  # noqa: E402

ROUNDS = 3                                                          # requests of a dialogue
PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 2 ** 20


# ---------------------------------------------------------------------------------------------------------------------
# the server, a process of its own: one thread, so that it can answer thousands of requests a second

class Served:
    def __init__(self, tasks, delay_s):
        self.answers = {task["problem_description"]: backend.answer_message(task) for task in common.read_tasks(tasks)}
        self.delay_s, self.counts = delay_s, collections.Counter()

    def reply(self, request):
        opening, *rest = [m["content"] for m in request["messages"] if m["role"] != "system"]
        self.counts["requests"] += 1
        self.counts["last requests"] += len(rest) // 2 == ROUNDS - 1
        text = "What is it?" if len(rest) // 2 < ROUNDS - 1 else self.answers[opening]
        return {"id": "1", "object": "chat.completion", "created": 0, "model": request["model"], "choices": [{
            "index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}],
            "usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}}

    async def serve(self, reader, writer):
        self.counts["connections"] += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if head.startswith(b"GET"):
                    body = self.counts
                else:
                    length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                    body = self.reply(json.loads(await reader.readexactly(length)))
                    self.counts["in flight"] += 1
                    self.counts["most in flight"] = max(self.counts["most in flight"], self.counts["in flight"])
                    await asyncio.sleep(self.delay_s * random.uniform(0.5, 1.5))
                    self.counts["in flight"] -= 1
                data = json.dumps(body).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
                    len(data), data))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()                                          # a client that was killed, or has enough


async def serve(tasks, delay_s):
    listener = await asyncio.start_server(Served(tasks, delay_s).serve, "127.0.0.1", 0, backlog=4096)
    print(listener.sockets[0].getsockname()[1], flush=True)
    await listener.serve_forever()


def make_tasks(path, number):
    """Tasks whose openings differ, because the server knows a task by its opening."""
    tasks, _ = stage(1).make_tasks(backend, number, 0, "train", "none")
    write_jsonl(path, [{**task, "problem_description": f"{task['problem_description']}\n(Request {n}.)"}
                       for n, task in enumerate(tasks)])


def start_server(tasks, delay_s):
    """(process, address) of the server."""
    process = subprocess.Popen([sys.executable, __file__, "--serve", tasks, "--delay-s", str(delay_s)], text=True,
                               stdout=subprocess.PIPE)
    process.stdout.readline()                                       # "reads …"
    return process, f"http://127.0.0.1:{int(process.stdout.readline())}/v1"


def stats(url):
    import urllib.request
    with urllib.request.urlopen(url) as answer:
        return collections.Counter(json.load(answer))


# ---------------------------------------------------------------------------------------------------------------------
# the run

def cpu_s():
    """Seconds of the processor of this process and of its children that have ended."""
    return sum(own.ru_utime + own.ru_stime for own in map(resource.getrusage, (resource.RUSAGE_SELF,
                                                                               resource.RUSAGE_CHILDREN)))


def watch(process, partial, kill_at):
    """Follow a run until it ends, or kill it once `partial` has `kill_at` lines. Returns [(dialogues of this start,
    MB of memory, open files, CPU seconds of its own process), …]."""
    seen, position, lines, before = [], 0, 0, None
    while process.poll() is None:
        if partial.exists():
            with open(partial, "rb") as file:
                file.seek(position)
                new = file.read()
                position, lines = position + len(new), lines + new.count(b"\n")
            before = lines if before is None else before
            try:
                pages = int(pathlib.Path(f"/proc/{process.pid}/statm").read_text().split()[1])
                ticks = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
                seen.append((lines - before, pages * PAGE_MB, len(os.listdir(f"/proc/{process.pid}/fd")),
                             sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")))
            except (FileNotFoundError, ProcessLookupError, IndexError):
                break
            if lines >= kill_at:
                process.send_signal(signal.SIGKILL)
                break
        time.sleep(0.05)
    return seen


def start_python(arguments, log):
    return subprocess.Popen([sys.executable, *arguments], stdout=log, stderr=subprocess.STDOUT)


def play(folder, tasks, url, args, start=start_python):
    """02, killed and started again; returns what watch() saw of each start, CPU seconds and seconds of all of them."""
    out = folder / "out.jsonl"
    command = [ROOT / "02_rollout.py", "--tasks", tasks, "--agent", f"{url}#asker", "--max-rounds", "8",
               "--samples", args.dialogues // args.tasks, "--concurrency", args.concurrency, "--out", out]
    starts, begin, begin_cpu_s = [], time.perf_counter(), cpu_s()
    for kill in range(args.kills + 1):
        kill_at = args.dialogues * (kill + 1) // (args.kills + 1) if kill < args.kills else float("inf")
        with open(folder / "log", "w") as log:
            process = start(list(map(str, command)), log)
            starts.append(watch(process, Partial(out), kill_at))
            process.wait()
    assert process.returncode == 0, (folder / "log").read_text()
    return starts, cpu_s() - begin_cpu_s, time.perf_counter() - begin


def check(out, tasks, samples):
    """Every dialogue once, in order, whole; returns the rows."""
    with open(out, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    expected = [(task["task_id"], sample) for task in common.read_tasks(tasks) for sample in range(samples)]
    assert [(row["task_id"], row["sample"]) for row in rows] == expected, "lost or doubled"
    assert all(row["reward"] == 1 and row["num_rounds"] == ROUNDS for row in rows), "not as the server plays"
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# the parts alone, CPU milliseconds a dialogue

def client_ms(url, num_dialogues, concurrency):
    server = open_server(f"{url}#asker")
    task = next(iter(common.read_tasks(url.tasks)))
    chat = [{"role": "user", "content": task["problem_description"]}]

    async def ask(number):
        for _ in range(ROUNDS):
            await server_reply(server, chat, 1.0, 100, number)

    begin = cpu_s()
    asyncio.run(run_concurrently(ask, range(num_dialogues), concurrency))
    return 1000 * (cpu_s() - begin) / num_dialogues


def scorer_ms(pairs, workers=None):
    """(CPU milliseconds, milliseconds) an answer."""
    begin_cpu_s = cpu_s()
    with Scorer(workers=workers) as scorer:
        begin = time.perf_counter()
        scores = scorer.score(pairs)
        wall_s = time.perf_counter() - begin
    assert all(all(score.tests) for score in scores)
    return 1000 * (cpu_s() - begin_cpu_s) / len(pairs), 1000 * wall_s / len(pairs)


def writer_ms(rows, folder):
    begin = cpu_s()
    with Rows(folder / "again.jsonl", Runtime(0, 1, "cpu")) as lines:
        for number, row in enumerate(rows):
            lines.add(number, row)
    lines.finish(len(rows))
    return 1000 * (cpu_s() - begin) / len(rows)


class Address(str):
    """The server's address, with the tasks that it knows."""
    tasks = None


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dialogues", type=int, default=10000)
    parser.add_argument("--tasks", type=int, default=100, help="they share the dialogues")
    parser.add_argument("--concurrency", type=int, default=512, help="dialogues in flight")
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--delay-s", type=float, default=0.1, help="mean time of a reply")
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 4, 8, 16], help="of the scorer alone")
    parser.add_argument("--serve", metavar="TASKS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return asyncio.run(serve(args.serve, args.delay_s))
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        tasks = folder / "tasks.jsonl"
        make_tasks(tasks, args.tasks)
        server, url = start_server(tasks, args.delay_s)
        try:
            url = Address(url)
            url.tasks = tasks
            starts, run_cpu_s, wall_s = play(folder, tasks, url, args)
            served = stats(url)
            rows = check(folder / "out.jsonl", tasks, args.dialogues // args.tasks)
            print(f"{len(rows):,} dialogues, each there once, after {args.kills} kill -9: {wall_s:,.0f} s, "
                  f"{1000 * run_cpu_s / len(rows):.1f} ms of the processor a dialogue")
            again = served["requests"] - ROUNDS * len(rows)
            print(f"{served['requests']:,} requests over {served['connections']:,} connections, at most "
                  f"{served['most in flight']:,} in flight; {again:,} of dialogues that a kill had cut")
            for number, seen in enumerate(starts):
                tenth = next(one for one in seen if one[0] >= seen[-1][0] / 10)
                print(f"start {number}: {seen[-1][0]:,} dialogues, {tenth[1]:,.0f} MB after {tenth[0]:,}, "
                      f"{seen[-1][1]:,.0f} MB at the end, at most {max(one[2] for one in seen):,} open files, "
                      f"{1000 * (seen[-1][3] - tenth[3]) / max(1, seen[-1][0] - tenth[0]):.1f} ms of the processor a "
                      "dialogue in its own process")
            few = rows[:2000]
            print(f"client alone: {client_ms(url, len(few), args.concurrency):.2f} ms of the processor a dialogue")
            pairs = [(row["task"], row["answer"]) for row in few]
            for workers in (None, *args.workers):
                used_ms, wall_ms = scorer_ms(pairs, workers)
                print(f"scorer alone, {workers or 'as in 02'} workers: {used_ms:.2f} ms of the processor an answer, "
                      f"{wall_ms:.2f} ms by the clock")
            print(f"writer alone: {writer_ms(few, folder):.2f} ms of the processor a dialogue")
        finally:
            server.kill()
            server.wait()


if __name__ == "__main__":
    main()
