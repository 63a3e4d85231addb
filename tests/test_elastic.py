"""torchrun --max-restarts: a run whose ranks are killed (kill -9) goes on by itself and ends with the same files."""
import concurrent.futures
import os
import signal
import time

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

from conftest import BASE, begin, read, ROOT, succeed, wait
from lib.runtime import new_store

TIMES = "tokens_per_s", "peak_memory_mb", "seconds"                 # of metrics.jsonl


def files(out):
    """Names and contents of what a stage wrote, without times."""
    found = {}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if path.suffix == ".safetensors":
            found[name] = {key: tensor.tolist() for key, tensor in load_file(path).items()}
        elif name == "metrics.jsonl":
            found[name] = [{key: row[key] for key in row if key not in TIMES} for row in read(path)]
        else:
            found[name] = None if name == "args.json" or path.is_dir() else path.read_bytes()
    return found


def num_lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_a_critic_whose_rank_is_killed(workspace, tmp_path):
    """In the middle of a state that is saved, when there is another one. (04: test_training.py, test_sampler.py.)"""
    arguments = ["--trajectories", workspace / "offline.jsonl", "--model", BASE, "--num-trajectories", 30, "--lr", 1e-4,
                 "--batch-size", 2, "--max-steps", 4, "--save-every", 1, "--out"]
    succeed("03_train_critic.py", *arguments, tmp_path / "whole", ranks=2)
    out, pid = tmp_path / "out", tmp_path / "pid.0.1"               # of the first start's second rank

    def is_in_the_middle():
        return (out / "states" / "2").exists() and num_lines(out / "metrics.jsonl") < 4
    agent = begin("tests/elastic.py", tmp_path, ROOT / "03_train_critic.py", *arguments, out, folder=tmp_path)
    began = time.monotonic()
    while not (pid.exists() and is_in_the_middle()):
        assert time.monotonic() - began < 120, (tmp_path / "0.err").read_text()
        time.sleep(0.001)
    os.kill(int(pid.read_text()), signal.SIGKILL)
    assert is_in_the_middle(), "it had gone on before the kill"
    assert wait(agent) == 0, (tmp_path / "0.err").read_text()
    assert (tmp_path / "pid.1.0").exists() and not (tmp_path / "pid.2.0").exists()
    assert "continues at step" in (tmp_path / "0.out").read_text()
    assert files(out) == files(tmp_path / "whole")


@pytest.mark.parametrize("late", [0, 2])
def test_ranks_that_start_again_find_nothing_of_earlier_ones(late):
    """Three starts in one store. One rank comes late, another has left a hello that nobody waits for."""
    store = dist.HashStore()
    store.set("hello 1", "the word of a rank that was killed before it was answered")

    def join(rank):
        time.sleep(0.2 * (rank == late))
        own = new_store(store, rank, 3)
        assert not own.check([f"address {rank}"])
        own.set(f"address {rank}", f"of start {start}")
        return [own.get(f"address {other}").decode() for other in range(3)]

    for start in range(3):
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            assert list(pool.map(join, range(3))) == [[f"of start {start}"] * 3] * 3
