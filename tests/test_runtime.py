"""lib/runtime.py: files by line, blocks that a killed run goes on with, fingerprints. --track."""
import functools
import gc
import importlib.machinery
import shutil
import sys
import types

import pytest

from compare import set_weights, weights
from conftest import BASE, call, dies, Partial, read, refused, write
from lib import runtime, training
from lib.data import read_trajectories
from lib.models import weights_fingerprint
from lib.runtime import fingerprint, InputError, map_blocks, read_jsonl, Rows, start


def test_lines_of_a_file(tmp_path):
    """Some editors write a mark in front of UTF-8, and end lines with two characters."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n{"a": 2}\r\n')
    assert read_jsonl(path, {"a": int}) == [{"a": 1}, {"a": 2}]
    for content, message in ((b"", "no rows in it"), (b'{"b": 1}\n', '1: missing "a"'), (b"\xff{}", "1: not JSON")):
        path.write_bytes(content)
        with pytest.raises(InputError, match=f"rows.jsonl:.*{message}"):
            read_jsonl(path, {"a": int})
    path.write_bytes(b"\xef\xbb\xbfYou help.\r\n")
    assert runtime.read_text(path) == "You help."


def with_nulls(dicts):
    """Dicts in which null stands for what the others have, as Dataset.to_json of datasets writes them."""
    keys = {key: None for values in dicts for key in values}
    return [{**keys, **values} for values in dicts]


def test_trajectories_that_went_through_datasets_are_the_same(data, tmp_path):
    rows = read_trajectories(data / "demos.jsonl")
    rows[0] |= {"system_prompt": "You help.", "branch": {"sample": 0, "turn": 0, "candidate": 1}}
    rows[0]["dialogue_history"][1] |= {"output": "?", "output_ids": [1]}
    packed = [{**row, "dialogue_history": with_nulls(row["dialogue_history"])} for row in with_nulls(rows)]
    assert read_trajectories(write(tmp_path / "rows.jsonl", packed)) == rows


def test_map_blocks_resumes_to_the_same_file(tmp_path):
    one_rank, blocks, done = start(0), [[1, 2], [3, 4], [5]], []
    worker = types.SimpleNamespace(work=lambda block: done.append(block) or [{"x": x} for x in block])
    out, partial = tmp_path / "rows.jsonl", Partial(tmp_path / "rows.jsonl")
    with dies(worker, "work", calls=2):
        map_blocks(out, blocks, worker.work, one_rank)
    partial.write_bytes(partial.read_bytes()[:-3])                          # the last line was cut by the kill
    Partial(tmp_path / "rows.jsonl.x").write_text("0 {}\n")                 # another output's
    assert not out.exists()
    assert map_blocks(out, blocks, worker.work, one_rank) == read(out) == [{"x": x} for x in (1, 2, 3, 4, 5)]
    assert done == [[1, 2], [3, 4], [3, 4], [5]] and len(list(tmp_path.iterdir())) == 2


# --- fingerprints

def test_a_fingerprint_is_of_what_a_model_says(tmp_path):
    folder = tmp_path / "tiny"

    def both(folder=folder):
        fingerprint.cache_clear()
        return fingerprint(folder), weights_fingerprint(str(folder))
    first = both(BASE)
    shutil.copytree(BASE, folder)
    for name in ("args.json", "metrics.jsonl", "r.jsonl.args.json"):
        (folder / name).write_text("{}")
    assert both() == first                                          # whatever the path, and what a stage notes
    (folder / "generation_config.json").write_text("{}")
    assert both()[0] != first[0] and both()[1] == first[1]
    tensors, size = weights(folder), (folder / "model.safetensors").stat().st_size
    tensors["model.norm.weight"][-1] += 1e-3                                            # one number, the same size
    set_weights(folder, tensors)
    assert (folder / "model.safetensors").stat().st_size == size and both()[1] != first[1]
    assert weights_fingerprint("nobody/model") is None


# --- --track: curves of new, continued and missing runs

class Trackio:
    """Stands for the module trackio: keeps {name: {"config", "rows": [[step, numbers], …]}} of one project."""

    __spec__ = importlib.machinery.ModuleSpec("trackio", None)      # which transformers looks for

    def __init__(self):
        self.kept = {}

    def Api(self):
        return self

    def runs(self, project):
        if not self.kept:
            raise ValueError(project)
        return [types.SimpleNamespace(name=name, delete=functools.partial(self.kept.pop, name)) for name in self.kept]

    def init(self, project, name, config, resume):
        assert (project, resume) == ("colbench", "allow")
        rows = self.kept.setdefault(name, {"config": dict(config), "rows": []})["rows"]
        return types.SimpleNamespace(log=lambda metrics, step: rows.append([step, metrics]))


@pytest.fixture
def runs(monkeypatch):
    """{name: run} of the stand-in."""
    monkeypatch.setitem(sys.modules, "trackio", stand_in := Trackio())
    return stand_in.kept


def test_a_training_that_was_killed_continues_its_curve(data, tmp_path, runs):
    """Killed at step 4, one step after the last state: step 3 is computed again and stands there once."""
    arguments = ["--trajectories", data / "demos.jsonl", "--model", BASE, "--num-trajectories", 12,
                 "--batch-size", 2, "--epochs", 9, "--held-out-frac", 0, "--max-steps", 5, "--save-every", 2,
                 "--out", tmp_path / "out", "--track", "colbench"]
    with dies(training.Loop, "update", calls=3):
        call(3, *arguments)
    [[name, before]] = runs.items()
    assert name == str(tmp_path / "out") and [step for step, _ in before["rows"]] == [1, 2, 3]
    call(3, *arguments)
    [[same_name, run]] = runs.items()
    assert same_name == name and run["config"]["max_steps"] == 5
    assert [{"step": step, **numbers} for step, numbers in run["rows"]] == read(tmp_path / "out" / "metrics.jsonl")
    assert [step for step, _ in run["rows"]] == [1, 2, 3, 4, 5] and run["rows"][:2] == before["rows"][:2]
    call(3, *arguments)                                              # done already
    assert list(runs) == [name] and runs[name] is run and len(run["rows"]) == 5
    call(3, *arguments, "--overwrite", "--max-steps", 1)             # another run takes the place of the curve
    assert [step for step, _ in runs[name]["rows"]] == [1]


def test_a_rollout_that_was_killed_continues_its_curve(data, tmp_path, runs):
    arguments = ["--tasks", data / "tasks.jsonl", "--agent", "script", "--max-rounds", 8, "--concurrency", 1,
                 "--out", tmp_path / "out", "--track", "colbench"]
    with dies(Rows, "add", calls=5):
        call(2, *arguments)
    gc.collect()                                                    # asyncio reports the task that died, by ast.parse
    call(2, *arguments)
    [run] = runs.values()
    rows, steps = read(tmp_path / "out"), [step for step, _ in run["rows"]]
    assert sorted(set(steps)) == list(range(1, 13)) and steps == sorted(steps)
    successes = sum(row["reward"] == 1 for row in rows)
    assert 0 < successes < 12 and run["rows"][-1][1]["mean_return"] == pytest.approx(successes / 12)


def test_without_trackio_it_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    for number in (2, 3):
        assert refused(number, "--track", "colbench") == "--track: needs trackio: pip install trackio"
