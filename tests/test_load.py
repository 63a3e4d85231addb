"""Many dialogues in flight: 02 against a server, killed and started again, and how add_rows bounds what waits."""
import asyncio
import gc
import os
import signal
import time

import pytest

from conftest import begin, Partial, read, wait
from lib.data import read_tasks
from lib.runtime import Rows, start
from lib.sampling import add_rows

ROUNDS, NUM_SAMPLES, CONCURRENCY = 3, 6, 16                         # requests of a dialogue; dialogues of a task


def test_nothing_is_lost_or_doubled_after_a_kill(data, tmp_path, serve):
    server, out = serve("--delay-s", 0.05), tmp_path / "out.jsonl"
    flags = ["--tasks", data / "tasks.jsonl", "--agent", f"{server['url']}#asker", "--max-rounds", 8, "--samples",
             NUM_SAMPLES, "--concurrency", CONCURRENCY, "--out", out]
    for kill_at in (20, None):                                      # rows
        pid, partial = begin("02_rollout.py", *flags, folder=tmp_path), Partial(out)
        while kill_at and (not partial.exists() or partial.read_bytes().count(b"\n") < kill_at):
            time.sleep(0.02)
        if kill_at:
            assert len(os.listdir(f"/proc/{pid}/fd")) < CONCURRENCY + 60
            os.kill(pid, signal.SIGKILL)
        assert wait(pid) == (-signal.SIGKILL if kill_at else 0), (tmp_path / "0.err").read_text()
    rows = read(out)
    names = [(task["task_id"], sample) for task in read_tasks(data / "tasks.jsonl")
             for sample in range(NUM_SAMPLES)]
    assert [(row["task_id"], row["sample"]) for row in rows] == names and not list(tmp_path.glob("*.partial*"))
    assert all(row["num_rounds"] == ROUNDS for row in rows)
    # A kill costs the dialogues in flight and those that wait to be scored, no others.
    assert ROUNDS * len(rows) <= len(read(server["log"])) <= ROUNDS * (len(rows) + 3 * CONCURRENCY)


def add(tmp_path, make_row, num_rows, concurrency):
    runtime = start(0)
    return add_rows(Rows(tmp_path / "rows.jsonl", runtime), range(num_rows), make_row, concurrency, runtime)


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
