"""torchrun --nproc-per-node 2 --max-restarts 3 in small: python tests/elastic.py FOLDER SCRIPT [arguments]

The same agent of torch, with ranks that are forks of this process and keep its imports. A rank writes
its process id to FOLDER/pid.ATTEMPT.RANK."""
import os
import pathlib
import signal
import sys

from torch.distributed.launcher.api import elastic_launch, LaunchConfig

from processes import run_program


def rank(folder, *argv):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)                    # the agent's own handler came with the fork
    name = f"pid.{os.environ['TORCHELASTIC_RESTART_COUNT']}.{os.environ['RANK']}"
    partial = pathlib.Path(folder, f"partial.{name}")
    partial.write_text(str(os.getpid()))
    partial.rename(pathlib.Path(folder, name))
    run_program(list(argv))


if __name__ == "__main__":
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, max_restarts=3, rdzv_backend="c10d",
                          rdzv_endpoint="localhost:0", run_id=str(os.getpid()), start_method="fork",
                          monitor_interval=0.1)
    elastic_launch(config, rank)(*sys.argv[1:])
