"""Many dialogues in flight: bench_load.py in small, and how run_concurrently bounds what waits."""
import argparse
import asyncio
import gc

import bench_load
import pytest

from conftest import Fork
from lib.speakers import run_concurrently


def test_nothing_is_lost_or_doubled_after_two_kills(tmp_path):
    tasks, args = tmp_path / "tasks.jsonl", argparse.Namespace(dialogues=200, tasks=20, concurrency=32, kills=2)
    bench_load.make_tasks(tasks, args.tasks)
    server, url = bench_load.start_server(tasks, 0.05)
    try:
        starts, _, _ = bench_load.play(tmp_path, tasks, url, args, Fork)
        served = bench_load.stats(url)
    finally:
        server.kill()
        server.wait()
    rows = bench_load.check(tmp_path / "out.jsonl", tasks, 10)
    assert len(rows) == 200 and len(starts) == 3 and not list(tmp_path.glob("*.partial"))
    # A kill costs the dialogues in flight and those that wait to be scored, no others.
    assert 3 * 200 <= served["requests"] <= 3 * (200 + 2 * 2 * 32 + 2 * 32)
    assert served["most in flight"] <= 32
    assert max(files for seen in starts for _, _, files, _ in seen) < 32 + 60


@pytest.mark.parametrize("durations", [(0.01,), (0.002, 0.05, 0.05, 0.05, 0.05, 0.05)])
def test_at_most_twice_as_many_wait_to_be_scored_as_are_in_flight(durations):
    waiting, most = 0, 0

    async def score(duration):
        nonlocal waiting
        await asyncio.sleep(duration)
        waiting -= 1

    async def work(item):
        nonlocal waiting, most
        await asyncio.sleep(0)
        waiting += 1
        most = max(most, waiting)
        return score(durations[item % len(durations)])

    asyncio.run(run_concurrently(work, range(100), 4))
    assert waiting == 0 and 4 <= most <= 8


def test_an_error_of_the_scorer_ends_the_run_at_once(caplog):
    started = []

    async def score():
        raise ValueError("no sandbox")

    async def work(item):
        started.append(item)
        await asyncio.sleep(0.001)
        return score()

    with pytest.raises(ValueError, match="no sandbox"):
        asyncio.run(run_concurrently(work, range(1000), 2))
    assert len(started) < 20
    gc.collect()
    assert not caplog.records                                       # the error is raised once, and not also printed
