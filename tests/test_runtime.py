"""lib/runtime.py: JSONL files by line, blocks that a killed run goes on with, fingerprints."""

import pytest
import torch

from conftest import read, ROOT
from lib import runtime
from lib.models import weights_fingerprint
from lib.runtime import fingerprint, InputError, map_blocks, read_jsonl, Runtime, start


@pytest.mark.parametrize("content, message", [
    ("", "no rows in it"), ('{"a": 1}\n{"a"', "2: not JSON"), ('{"b": 1}\n', '1: missing "a"'), ("[1]\n", "1: a list"),
    ('{"a": "x"}\n', '1: "a" is a str, not a int'), (b"\xff\xfe", "not UTF-8")])
def test_broken_jsonl_is_named_by_line(tmp_path, content, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match="rows.jsonl") as error:
        read_jsonl(path, {"a": int})
    assert message in str(error.value)


def test_a_mark_at_the_begin_of_a_file_is_no_part_of_it(tmp_path):
    """Some editors write it in front of UTF-8, and end lines with two characters."""
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n{"a": 2}\r\n')
    assert read_jsonl(tmp_path / "rows.jsonl", {"a": int}) == [{"a": 1}, {"a": 2}]
    (tmp_path / "text").write_bytes(b"\xef\xbb\xbfYou help.\r\n")
    assert runtime.read_text(tmp_path / "text") == "You help."


def test_what_stages_write_into_a_model_folder_does_not_change_the_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = fingerprint(tmp_path)
    for name in ("args.json", "r.jsonl", "r.jsonl.args.json"):
        (tmp_path / name).write_text("{}")
    fingerprint.cache_clear()
    assert fingerprint(tmp_path) == before
    (tmp_path / "config.json").write_text('{"a": 1}')
    fingerprint.cache_clear()
    assert fingerprint(tmp_path) != before


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
        map_blocks(out, blocks, work, one_rank, "row")
    partial = tmp_path / "rows.jsonl.0of1.partial"
    partial.write_bytes(partial.read_bytes()[:-3])                          # the last line was cut by the kill
    assert not out.exists()
    assert map_blocks(out, blocks, work, one_rank, "row") == [{"x": x} for x in (1, 2, 3, 4, 5)]
    assert calls == [[1, 2], [3, 4], [5], [3, 4], [5]]
    assert read(out) == [{"x": x} for x in (1, 2, 3, 4, 5)] and not partial.exists()


# --- fingerprints

def test_a_fingerprint_is_of_what_a_model_says(tmp_path):
    import shutil

    from safetensors.torch import load_file, save_file
    def both(folder=tmp_path / "tiny"):
        fingerprint.cache_clear()
        return fingerprint(folder), weights_fingerprint(str(folder))
    first, folder = both(ROOT / "models" / "tiny"), tmp_path / "tiny"
    shutil.copytree(ROOT / "models" / "tiny", folder)
    (folder / "args.json").write_text("{}")
    (folder / "metrics.jsonl").write_text("{}")
    assert both() == first                                          # whatever the path, and what a training notes
    (folder / "generation_config.json").write_text("{}")
    assert both()[0] != first[0] and both()[1] == first[1]
    weights = folder / "model.safetensors"
    tensors, size = load_file(weights), weights.stat().st_size
    name = sorted(tensors)[0]
    tensors[name][-1, -1] += 1e-3                                                       # one number, the same size
    save_file(tensors, weights, metadata={"format": "pt"})
    assert weights.stat().st_size == size and both()[1] != first[1]
    assert weights_fingerprint("nobody/model") is None and weights_fingerprint("no/such/folder") is None
