"""lib/fast.py taken out: nothing changes but time and the last digits."""
import subprocess
import sys

from conftest import BASE, read, ROOT, write

PLAIN = '''
import sys
import types

import torch.nn.functional as F


def unused(*_):
    raise RuntimeError("for a GPU alone")


plain = types.ModuleType("lib.fast")
plain.has_fast_bfloat16 = lambda *tensors: False
plain.float_sums = lambda hidden, weight: F.linear(hidden.float(), weight.float())
plain.takes_grouped_queries = lambda: False
plain.width_padding = lambda width, device: 0
plain.few_sizes = lambda number: number
plain.WIDTH_STEP, plain.MAX_GROUPED = {}, 0
plain.RowValues = plain.Graph = plain.use_grouped_attention = plain.grouped_attention = unused
plain.compile_layers = lambda model, layers: None
sys.modules["lib.fast"] = plain
'''
RUN = "import importlib, sys; sys.argv = sys.argv[1:]; importlib.import_module(sys.argv[0].removesuffix('.py')).main()"


def numbers(data, out, program):
    """Losses and rewards of a few steps on sampled and scored candidates, by a program that starts 04."""
    command = [sys.executable, "-c", program, "04_train_policy.py", "--method", "sweet", "--model", BASE,
               "--critic", "untrained", "--reference-sees-c", "no", "--data-frac", "1", "--num-candidates", "4",
               "--max-new-tokens", "30", "--trajectories", data, "--max-steps", "3", "--lr", "1e-3", "--out", out]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return [(row["loss"], row["chosen"], row["nll"], row["gnorm"]) for row in read(out / "metrics.jsonl")]


def test_without_what_is_fast_the_numbers_are_the_same(data, tmp_path):
    rows = write(tmp_path / "rows.jsonl", read(data / "demos.jsonl")[:3])
    assert numbers(rows, tmp_path / "plain", PLAIN + RUN) == numbers(rows, tmp_path / "fast", RUN)
