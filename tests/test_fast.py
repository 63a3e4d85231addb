"""lib/fast.py taken out: nothing changes but time and the last digits."""
import sys
import types

import torch.nn.functional as F

from conftest import BASE, begin, call, ended, read, run_program, write


def unused(*_):
    raise RuntimeError("for a GPU alone")


def run_without(argv):
    """Run a stage that imports plain stand-ins in place of lib/fast.py."""
    plain = types.ModuleType("lib.fast")
    plain.has_fast_bfloat16 = lambda *tensors: False
    plain.float_sums = lambda hidden, weight: F.linear(hidden.float(), weight.float())
    plain.takes_grouped_queries = lambda: False
    plain.width_padding = lambda width, device: 0
    plain.few_sizes = lambda number: number
    plain.WIDTH_STEP, plain.MAX_GROUPED = {}, 0
    plain.RowValues = plain.Graph = plain.use_grouped_attention = plain.grouped_attention = unused
    plain.compile_layers = lambda model, layers: None
    for name in [name for name in sys.modules if name.partition(".")[0] in ("common", "lib")]:
        del sys.modules[name]
    sys.modules["lib.fast"] = plain
    run_program(argv)


def test_without_what_is_fast_the_numbers_are_the_same(data, tmp_path):
    """Losses and rewards of a few steps on sampled and scored candidates."""
    rows = write(tmp_path / "rows.jsonl", read(data / "demos.jsonl")[:3])
    words = ["--method", "sweet", "--model", BASE, "--critic", "untrained", "--reference-sees-c", "no",
             "--trajectories", rows, "--data-frac", 1, "--num-candidates", 4, "--max-new-tokens", 30, "--max-steps", 3,
             "--lr", 1e-3, "--out"]
    process = begin("04_train_policy.py", *words, tmp_path / "plain", folder=tmp_path, run=run_without)
    assert ended(process) == 0, (tmp_path / "0.err").read_text()
    call(4, *words, tmp_path / "fast")
    plain, fast = (read(tmp_path / name / "metrics.jsonl") for name in ("plain", "fast"))
    for key in ("loss", "chosen", "nll", "gnorm"):
        assert [row[key] for row in plain] == [row[key] for row in fast], key
