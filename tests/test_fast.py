"""lib/fast.py taken out: nothing changes but time and the last digits."""
import subprocess
import sys

from conftest import BASE, call, read, ROOT, write

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
__import__("04_train_policy").main()
'''


def test_without_what_is_fast_the_numbers_are_the_same(data, tmp_path):
    """Losses and rewards of a few steps on sampled and scored candidates."""
    rows = write(tmp_path / "rows.jsonl", read(data / "demos.jsonl")[:3])
    words = ["--method", "sweet", "--model", BASE, "--critic", "untrained", "--reference-sees-c", "no", "--data-frac",
             "1", "--num-candidates", "4", "--max-new-tokens", "30", "--trajectories", rows, "--max-steps", "3",
             "--lr", "1e-3", "--out"]
    call(4, *words, tmp_path / "fast")
    subprocess.run([sys.executable, "-c", PLAIN, *words, tmp_path / "plain"], cwd=ROOT, check=True)
    fast, plain = ([(row["loss"], row["chosen"], row["nll"], row["gnorm"]) for row in read(out / "metrics.jsonl")]
                   for out in (tmp_path / "fast", tmp_path / "plain"))
    assert fast == plain
