"""torchrun --max-restarts: a run whose ranks are killed (kill -9) goes on by itself and ends with the same files."""
import functools
import os
import pathlib
import signal
import time

import pytest
from torch.distributed.launcher.api import elastic_launch, LaunchConfig

from compare import assert_same_steps, greatest_difference
from conftest import BASE, begin, call, ended, Partial, policy_flags, read, run_program, succeed

TIMES = "tokens_per_s", "peak_memory_mb", "seconds"                 # of metrics.jsonl


def files(out):
    """Names and contents of what a stage wrote, without times."""
    found = {}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if name == "metrics.jsonl":
            found[name] = [{key: row[key] for key in row if key not in TIMES} for row in read(path)]
        else:
            found[name] = None if name == "args.json" or path.is_dir() else path.read_bytes()
    return found


def rank(folder, *argv):
    """A rank, which writes its process id to FOLDER/pid.ATTEMPT.RANK."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)                    # the agent's own handler came with the fork
    name = f"pid.{os.environ['TORCHELASTIC_RESTART_COUNT']}.{os.environ['RANK']}"
    partial = pathlib.Path(folder, f"partial.{name}")
    partial.write_text(str(os.getpid()))
    partial.rename(pathlib.Path(folder, name))
    run_program(list(argv))


def torchrun(folder, argv):
    """torchrun --nproc-per-node 2 --max-restarts 3: the same agent of torch, with ranks that are its forks."""
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"           # docs/scale.md
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, max_restarts=3, rdzv_backend="c10d",
                          rdzv_endpoint="localhost:0", run_id=str(os.getpid()), start_method="fork",
                          monitor_interval=0.1)
    elastic_launch(config, rank)(folder, *argv)


def num_lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def run_with_kills(script, arguments, folder, *kills):
    """Run a stage on two ranks. kills: (rank, moment) of each start; the rank is killed once moment() is true."""
    agent = begin(script, *arguments, folder=folder, run=functools.partial(torchrun, str(folder)))
    for attempt, (rank, moment) in enumerate(kills):
        pid, began = folder / f"pid.{attempt}.{rank}", time.monotonic()
        while not (pid.exists() and moment()):
            assert time.monotonic() - began < 120, (folder / "0.err").read_text()
            time.sleep(0.001)
        os.kill(int(pid.read_text()), signal.SIGKILL)
        assert moment(), "it had gone on before the kill"
    assert ended(agent) == 0, (folder / "0.err").read_text()
    assert (folder / f"pid.{len(kills)}.0").exists() and not (folder / f"pid.{len(kills) + 1}.0").exists()
    return (folder / "0.out").read_text()


def test_a_rollout_whose_rank_is_killed(workspace, tmp_path):
    """Of the scripted agent, whose messages do not depend on batches: the file is the one of a single rank."""
    out = tmp_path / "rows.jsonl"
    arguments = ["--tasks", workspace / "tasks.jsonl", "--agent", "script", "--max-rounds", 8, "--out", out]
    run_with_kills("02_rollout.py", arguments, tmp_path, (1, lambda: num_lines(Partial(out, 1, 2)) in range(1, 12)))
    assert out.read_bytes() == (workspace / "demos.jsonl").read_bytes()


def test_a_critic_whose_rank_is_killed(workspace, tmp_path):
    """In the middle of a state that is saved, when there is another one."""
    arguments = ["--trajectories", workspace / "offline.jsonl", "--model", BASE, "--num-trajectories", 30, "--lr", 1e-4,
                 "--batch-size", 2, "--max-steps", 4, "--save-every", 1, "--out"]
    succeed("03_train_critic.py", *arguments, tmp_path / "whole", ranks=2)
    out = tmp_path / "out"
    printed = run_with_kills("03_train_critic.py", [*arguments, out], tmp_path,
                             (1, lambda: (out / "states" / "2").exists() and num_lines(out / "metrics.jsonl") < 4))
    assert "continues at step" in printed and files(out) == files(tmp_path / "whole")


def test_a_policy_whose_ranks_are_killed(workspace, critic, tmp_path):
    """When the local engine samples candidates, and when it trains. Two ranks sample, score (with a blind reference;
    with adapters: test_lora.py) and train as one does."""
    one, whole, out = (tmp_path / name for name in ("one", "whole", "out"))
    arguments = policy_flags(workspace, "sweet", one, "--critic", critic, "--reference-sees-c", "no", "--data-frac",
                             0.03, "--num-candidates", 3, "--max-new-tokens", 40, "--concurrency", 2, "--batch-size", 4,
                             "--pairs-per-turn", 1, "--max-steps", 4, "--save-every", 1)
    call(4, *arguments)
    succeed("04_train_policy.py", *arguments, "--out", whole, ranks=2)
    for row, other in zip(read(one / "scored.jsonl"), read(whole / "scored.jsonl"), strict=True):
        assert row["candidates"] == other["candidates"]
        assert row["advantages"] == pytest.approx(other["advantages"], abs=1e-5)
    assert_same_steps(one, whole)
    assert greatest_difference(one, whole) < 1e-4
    candidates = out / "candidates.jsonl"
    printed = run_with_kills("04_train_policy.py", [*arguments, "--out", out], tmp_path,
                             (1, lambda: num_lines(Partial(candidates, 1, 2)) and not candidates.exists()),
                             (0, lambda: 2 <= num_lines(out / "metrics.jsonl") < 4))
    assert "continues at step" in printed and files(out) == files(whole)
