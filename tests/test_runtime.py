"""lib/runtime.py: JSONL files by line, blocks that a killed run goes on with, one run at a time, fingerprints."""
import gzip
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import Partial, read, ROOT, write
from lib import runtime
from lib.data import read_trajectories
from lib.models import weights_fingerprint
from lib.runtime import fingerprint, InputError, map_blocks, read_jsonl, Runtime, start, write_jsonl


@pytest.mark.parametrize("content, message", [
    (b"", "no rows in it"), (b'{"b": 1}\n', '1: missing "a"'), (b"\xff{}", "1: not JSON")])
def test_broken_jsonl_is_named_by_line(tmp_path, content, message):
    """test_bad_input.py has what rows may lack."""
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=f"rows.jsonl:.*{message}"):
        read_jsonl(tmp_path / "rows.jsonl", {"a": int})


def test_a_mark_at_the_begin_of_a_file_is_no_part_of_it(tmp_path):
    """Some editors write it in front of UTF-8, and end lines with two characters."""
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n{"a": 2}\r\n')
    assert read_jsonl(tmp_path / "rows.jsonl", {"a": int}) == [{"a": 1}, {"a": 2}]
    (tmp_path / "text").write_bytes(b"\xef\xbb\xbfYou help.\r\n")
    assert runtime.read_text(tmp_path / "text") == "You help."


def with_nulls(dicts):
    """Dicts in which null stands for what the others have, as Dataset.to_json of datasets writes them."""
    keys = {key: None for values in dicts for key in values}
    return [{**keys, **values} for values in dicts]


def test_trajectories_that_went_through_datasets_and_gzip_are_the_same(data, tmp_path):
    rows = read_trajectories(data / "demos.jsonl")
    rows[0] |= {"system_prompt": "You help.", "branch": {"sample": 0, "turn": 0, "candidate": 1}}
    rows[0]["dialogue_history"][1] |= {"output": "?", "output_ids": [1]}
    packed = [{**row, "dialogue_history": with_nulls(row["dialogue_history"])} for row in with_nulls(rows)]
    path, lines = tmp_path / "rows.jsonl.gz", write(tmp_path / "rows.jsonl", packed).read_bytes()
    write_jsonl(path, packed)
    assert list(map(json.loads, gzip.decompress(path.read_bytes()).splitlines())) == packed
    assert read_trajectories(path) == rows
    for content, fault in ((gzip.compress(lines)[:-100], "Compressed file ended"), (lines, "Not a gzipped file")):
        path.write_bytes(content)
        with pytest.raises(InputError, match=f"rows.jsonl.gz: {fault}"):
            read_trajectories(path)


def test_map_blocks_resumes_to_the_same_file(tmp_path):
    start(0)
    one_rank = Runtime(0, 1, torch.device("cpu"))
    blocks = [[1, 2], [3, 4], [5]]
    calls = []

    def work(block):
        calls.append(block)
        if block == [5] and len(calls) == 3:
            raise KeyboardInterrupt
        return [{"x": x} for x in block]
    out = tmp_path / "rows.jsonl"
    with pytest.raises(KeyboardInterrupt):
        map_blocks(out, blocks, work, one_rank)
    partial = Partial(out)
    partial.write_bytes(partial.read_bytes()[:-3])                          # the last line was cut by the kill
    Partial(tmp_path / "rows.jsonl.x").write_text("0 {}\n")                 # another output's
    assert not out.exists()
    assert map_blocks(out, blocks, work, one_rank) == [{"x": x} for x in (1, 2, 3, 4, 5)]
    assert calls == [[1, 2], [3, 4], [5], [3, 4], [5]]
    assert read(out) == [{"x": x} for x in (1, 2, 3, 4, 5)] and len(list(tmp_path.iterdir())) == 2


# --- one run at a time

def test_a_command_that_runs_is_not_started_twice(tmp_path):
    """Its output is locked, also after its costs are noted."""
    start(0)
    out = tmp_path / "rows.jsonl"
    for _ in range(2):                                              # this process may begin it again
        runtime.begin_output({"overwrite": False}, out, [])
        runtime.add_costs(generated_tokens=1)
        with pytest.raises(InputError, match="the same command is running already"):
            runtime.locked(f"{out}.args.json")
    out.write_text("{}\n")
    with pytest.raises(InputError, match="the same command has just made it"):
        runtime.begin_output({"overwrite": False}, out, [])


@pytest.mark.parametrize("error", [None, RuntimeError("I/O error: No space left on device (os error 28)")])
def test_a_full_disk_is_one_line_that_names_the_output(tmp_path, monkeypatch, capsys, error):
    """Another error stays what it is, also where the output's folder is gone."""
    monkeypatch.setattr(runtime, "OUTPUT", {})

    def main():
        runtime.begin_output({"overwrite": False}, tmp_path / "out", [], folder=True)
        if error:                                                   # as safetensors says it
            raise error
        with open("/dev/full", "w") as file:
            file.write("x")
    with pytest.raises(SystemExit) as end:
        runtime.run_stage(main)
    line = f"error: {tmp_path / 'out' / 'args.json'}: No space left on device\n"
    assert end.value.code == 2 and capsys.readouterr().err == line
    shutil.rmtree(tmp_path / "out")
    assert not runtime.is_of_full_disk(ValueError("another"))


# --- fingerprints

def test_a_fingerprint_is_of_what_a_model_says(tmp_path):
    folder = tmp_path / "tiny"

    def both(folder=folder):
        fingerprint.cache_clear()
        return fingerprint(folder), weights_fingerprint(str(folder))
    first = both(ROOT / "models" / "tiny")
    shutil.copytree(ROOT / "models" / "tiny", folder)
    for name in ("args.json", "metrics.jsonl", "r.jsonl.args.json"):
        (folder / name).write_text("{}")
    assert both() == first                                          # whatever the path, and what a stage notes
    (folder / "generation_config.json").write_text("{}")
    assert both()[0] != first[0] and both()[1] == first[1]
    weights = folder / "model.safetensors"
    tensors, size = load_file(weights), weights.stat().st_size
    name = sorted(tensors)[0]
    tensors[name][-1, -1] += 1e-3                                                       # one number, the same size
    save_file(tensors, weights, metadata={"format": "pt"})
    assert weights.stat().st_size == size and both()[1] != first[1]
    assert weights_fingerprint("nobody/model") is None
