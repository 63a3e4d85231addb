"""scripts/gpu.py with the CPU in the place of the card, in small shapes; the script itself where a card is there."""
import importlib.util
import json
import math
import os
import pathlib
import signal
import subprocess
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

import common
from conftest import ROOT

SPEC = importlib.util.spec_from_file_location("gpu", ROOT / "scripts" / "gpu.py")
gpu = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(gpu)


@pytest.fixture
def settings(tmp_path):
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()                    # a fork could not use it
    (tmp_path / "work").mkdir()
    return gpu.Settings("cpu", gpu.SMALL, None, False, tmp_path)


def part(function, limit_s=60, **options):
    return gpu.Part("right", function.__name__, function, options, limit_s)


def right(settings):
    return {"verdict": "right", "detail": "as it should be"}


def hangs(settings):
    time.sleep(600)


def dies(settings):
    os.kill(os.getpid(), signal.SIGKILL)


def hangs_with_a_child(settings):
    pid = gpu.start_process(lambda: time.sleep(600), settings.out / "work" / "log")
    (settings.out / "pid").write_text(str(pid))
    time.sleep(600)


def raises(settings):
    raise ValueError("no such kernel\nand more")


def test_a_part_that_hangs_dies_or_raises_costs_its_own_row_alone(settings, capsys):
    begin = time.perf_counter()
    parts = [part(hangs, 1), part(dies), part(raises), part(right)]
    rows = gpu.run_parts(parts, settings, 300)
    assert [row["verdict"] for row in rows] == ["failed", "failed", "failed", "right"]
    assert [row["detail"] for row in rows] == ["took more than 1 s", "its process died with status -9",
                                               "ValueError: no such kernel", "as it should be"]
    assert time.perf_counter() - begin < 60
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows


def test_what_a_part_has_started_ends_with_it(settings):
    [row] = gpu.run_parts([part(hangs_with_a_child, 2)], settings, 300)
    assert row["verdict"] == "failed"
    pid = int((settings.out / "pid").read_text())
    for _ in range(1000):
        if not is_running(pid):
            break
        time.sleep(0.01)
    assert not is_running(pid)


def is_running(pid):
    status = pathlib.Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def test_parts_for_which_the_time_is_over_are_left_out(settings):
    rows = gpu.run_parts([part(hangs, 60), part(right)], settings, 1.5)
    assert [row["verdict"] for row in rows] == ["failed", "left out"]


@pytest.mark.parametrize("name, teraflops", [
    ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H200", 989),
    ("NVIDIA H20", 148), ("NVIDIA L40S", 362), ("NVIDIA L4", 121), ("NVIDIA A10", 125), ("NVIDIA A10G", 70),
    ("NVIDIA GeForce RTX 4090", 165), ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None), ("Some Card 9000", None),
    ("NVIDIA RTX A1000", None), ("NVIDIA RTX A4000", None), ("NVIDIA RTX A3000 12GB", None)])
def test_the_peak_is_that_of_the_card_and_not_of_one_with_a_similar_name(name, teraflops):
    assert gpu.data_sheet_teraflops(name) == teraflops


def test_the_peak_of_an_unknown_card_is_measured(settings):
    flops, source = gpu.peak_flops(settings)
    assert flops > 0 and source.startswith("measured")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("function", [gpu.logps, gpu.tree, gpu.generation])
def test_log_probabilities_trees_and_replies_are_right(settings, function, dtype):
    row = function(settings, dtype)
    assert row["verdict"] == "right"
    if dtype == "bfloat16" and function is not gpu.generation:
        assert 0 < row["differences"]["logp"] < gpu.TOLERANCES[dtype]["logp"]


def test_a_tree_whose_actions_see_each_other_is_reported_as_wrong(settings, monkeypatch):
    def all_before(rows, action_numbers):
        width = action_numbers.shape[1]
        return torch.ones(len(rows), 1, width, width, dtype=torch.bool).tril()
    monkeypatch.setattr(common, "tree_mask", all_before)
    assert gpu.tree(settings, "float32")["verdict"] == "WRONG: logp"
    assert gpu.tree(settings, "bfloat16")["verdict"] == "WRONG: logp"


@pytest.mark.parametrize("factor", [1.05, math.nan])
def test_a_device_that_computes_otherwise_is_reported_as_wrong(settings, monkeypatch, factor):
    """The CPU's scorer is made first, the device's second: its projection is wrong."""
    make_scorer, scorers = gpu.small_scorer, []

    def make_and_spoil(dtype, device):
        scorer = make_scorer(dtype, device)
        scorers.append(scorer)
        if len(scorers) == 2:
            scorer.model.get_output_embeddings().weight.data *= factor
        return scorer
    monkeypatch.setattr(gpu, "small_scorer", make_and_spoil)
    assert gpu.logps(settings, "float32")["verdict"] == "WRONG: logp"


def test_replies_that_differ_are_reported_as_wrong(settings, monkeypatch):
    greedy, calls = gpu.greedy_replies, []

    def late(*arguments):
        replies = greedy(*arguments)
        calls.append(replies)
        return replies if len(calls) == 1 else [reply[:-2] for reply in replies]
    monkeypatch.setattr(gpu, "greedy_replies", late)
    assert gpu.generation(settings, "float32")["verdict"] == "WRONG: replies"


def test_training_is_compared_and_one_that_went_another_way_is_reported_as_wrong(settings):
    parts = []
    for part in gpu.right_parts(False):
        if part.name in ("data", "steps of critic, float32", "resume"):
            parts.append(part._replace(limit_s=600))                 # other tests share the processor
    rows = gpu.run_parts(parts, settings, 1800)
    assert [row["verdict"] for row in rows] == ["made", "right", "right"], rows
    assert rows[1]["differences"] == {"loss": 0, "gnorm": 0, "update": 0}       # the same processor did it twice
    assert "killed after step " in rows[2]["detail"] and " of 12: " in rows[2]["detail"]
    folder = settings.out / "work" / "critic-float32"
    weights = load_file(folder / "model.safetensors")
    initial = load_file(ROOT / "models" / "tiny" / "model.safetensors")
    for name in weights:
        weights[name] = initial[name] + 1.2 * (weights[name] - initial[name])
    save_file(weights, folder / "model.safetensors")
    differences = gpu.training_differences(folder, settings.out / "work" / "critic-cpu")
    assert differences["update"] == pytest.approx(0.2, abs=1e-3)
    assert gpu.compared(differences, "float32")["verdict"] == "WRONG: update"


@pytest.mark.parametrize("options", [{"kind": "critic"}, {"kind": "dpo"}, {"kind": "dpo", "with_lora": True}])
def test_training_speed_counts_useful_tokens(settings, options):
    [row] = gpu.run_parts([gpu.Part("fast", "small", gpu.train, {"name": "small", **options}, 300)], settings, 300)
    assert row["verdict"] == "measured", row
    tokens_an_example = {"critic": 2 * 64, "dpo": 24 + 8 * 8}[options["kind"]]
    assert row["tokens_per_s"] * row["seconds"] == pytest.approx(gpu.SMALL.examples * tokens_an_example)
    assert row["mfu"] > 0 and row["plan_gb"] > 0


def test_scoring_and_decoding_are_measured(settings):
    row = gpu.score(settings, "small")
    assert row["verdict"] == "measured"
    assert row["tokens_per_s"] * row["seconds"] == pytest.approx(gpu.SMALL.examples * (24 + 16 * 8))
    row = gpu.decode(settings, "small", 4)
    assert row["verdict"] == "measured" and row["rows"] == 4
    assert row["times"] == pytest.approx(row["engine_tokens_per_s"] / row["generate_tokens_per_s"])


def test_mfu_is_6_n_d_over_the_peak(settings, monkeypatch):
    monkeypatch.setattr(gpu, "peak_flops", lambda settings: (1e9, "given"))
    model = gpu.small_scorer("float32", "cpu").model
    layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 128 + 2 * 64        # projections of attention, of the MLP, norms
    num_parameters = 2 * layer + 64 + 64 * 512                       # the final norm and the output projection
    row = gpu.speed_row(settings, model, 1000, 0.5, 6)
    assert row["mfu"] == pytest.approx(6 * num_parameters * 1000 / 0.5 / 1e9)
    assert row["tokens_per_s"] == 2000


def test_a_model_that_is_too_large_for_the_card_is_said_to_be(settings, monkeypatch):
    monkeypatch.setattr(gpu, "card_bytes", lambda device: 1000)
    for row in (gpu.train(settings, "small", "critic"), gpu.score(settings, "small"), gpu.decode(settings, "small", 4)):
        assert row["verdict"] == "too large" and "the card has 0 GB" in row["detail"] and row["plan_gb"] > 0
        assert not gpu.is_bad(row)


def test_quick_stops_after_the_largest_model_that_was_trained(settings):
    rows = [{"part": "8B, dpo", "verdict": "too large"}]
    next_part = gpu.Part("fast", "1B, dpo", gpu.train, {"name": "1B", "kind": "dpo"}, 60)
    assert not gpu.is_enough(next_part, rows)
    rows[0]["verdict"] = "measured"
    assert gpu.is_enough(next_part, rows)
    same_model = gpu.Part("decode", "8B, 64 rows", gpu.decode, {"name": "8B", "num_rows": 64}, 60)
    assert not gpu.is_enough(same_model, rows)


ABOUT = {"device": "NVIDIA H100 80GB HBM3", "num_devices": 2, "driver": "580.1", "torch": "2.15", "memory_gb": 85.0,
         "transformers": "5.23", "commit": "abc1234", "peak_flops": 989e12, "peak_source": "data sheet"}
ROWS = [{"group": "right", "part": "tree, float32", "verdict": "right", "detail": "logp 1.0e-06 (at most 0.001)"},
        {"group": "right", "part": "resume", "verdict": "WRONG: update", "detail": "update 0.9"},
        {"group": "fast", "part": "8B, dpo", "verdict": "measured", "detail": "8 examples", "tokens_per_s": 5432.1,
         "mfu": 0.4567, "peak_gb": 70.04, "plan_gb": 71.06},
        {"group": "fast", "part": "8B, critic", "verdict": "failed", "detail": "took more than 90 s"},
        {"group": "decode", "part": "8B, 64 rows", "verdict": "measured", "detail": "128 prompts",
         "engine_tokens_per_s": 2000.0, "generate_tokens_per_s": 500.0, "times": 4.0}]


def test_the_report_is_tables_and_a_block_to_paste():
    text = gpu.report(ABOUT, ROWS)
    assert ("NVIDIA H100 80GB HBM3, 2 of them, 85 GB, driver 580.1, torch 2.15, transformers 5.23, commit abc1234. "
            "Dense bfloat16 peak: 989.0 TFLOP/s (data sheet).") in text
    assert "**1 checks right, 2 parts wrong or failed: resume; 8B, critic.**" in text
    assert "| tree, float32 | right | logp 1.0e-06 (at most 0.001) |" in text
    assert "| 8B, dpo | 5,432 | 45.7% | 70.0 | 71.1 | measured: 8 examples |" in text
    assert "| 8B, critic |  |  |  |  | failed: took more than 90 s |" in text
    assert "| 8B, 64 rows | 2,000 | 500 | 4.00 | measured: 128 prompts |" in text
    block = text.partition("````markdown\n")[2].partition("````")[0]
    assert block.startswith("Measured by `bash scripts/gpu.sh`: NVIDIA H100") and "| 8B, dpo |" in block


def test_the_status_says_whether_a_row_is_bad(tmp_path, capsys, monkeypatch):
    flags = ["--device", "cpu", "--shapes", "small", "--parts", "tree, float32", "--out", str(tmp_path)]
    assert gpu.main(flags) == 0
    assert (tmp_path / "report.md").read_text() in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["part"] for row in rows] == ["machine", "tree, float32"] and rows[0]["device"] == "CPU"
    monkeypatch.setitem(gpu.TOLERANCES["float32"], "logp", -1.0)
    assert gpu.main(flags) == 1
    with pytest.raises(SystemExit) as error:
        gpu.main([*flags, "--model", str(tmp_path)])
    assert str(error.value).startswith(f"error: --model {tmp_path}: no config.json")


def test_a_machine_without_a_card_is_told_in_one_line(tmp_path, capsys):
    assert gpu.main(["--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: cuda: ") and not (tmp_path / "report.md").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not list(pathlib.Path("/dev").glob("nvidia[0-9]*")), reason="no GPU")
def test_on_a_card_everything_is_right(tmp_path):
    environment = {**os.environ}
    environment.pop("CUDA_VISIBLE_DEVICES")                          # conftest hides the cards from all other tests
    done = subprocess.run(["bash", str(ROOT / "scripts" / "gpu.sh"), "--quick", "--out", str(tmp_path)], text=True,
                          capture_output=True, env=environment)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
