"""lib/runtime.py: files by line, one process at a time, fingerprints. --track."""
import gc
import gzip
import importlib.machinery
import json
import platform
import shutil
import sys
import time
import types

import pytest

from colbench.__main__ import main as colbench_main
from compare import set_weights, weights
from conftest import BASE, begin, call, dies, killed, read, refused, stage, write
from lib import runtime, training
from lib.data import read_trajectories
from lib.load import weights_fingerprint
from lib.runtime import fingerprint, InputError, Output, read_jsonl, RowFile


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
    lines = write(tmp_path / "rows.jsonl", packed).read_bytes()
    assert read_trajectories(tmp_path / "rows.jsonl") == rows
    path = tmp_path / "packed"                                      # the content decides
    path.write_bytes(gzip.compress(lines))
    assert read_trajectories(path) == rows


def test_packed_lines_are_read_everywhere(data, tmp_path, capsys):
    """Damaged ones are one line. An output's name does not pack it."""
    tasks, seeds, out = tmp_path / "tasks.jsonl.gz", tmp_path / "seeds.jsonl.gz", tmp_path / "out.jsonl.gz"
    plain = (data / "tasks.jsonl").read_bytes()
    tasks.write_bytes(gzip.compress(plain))
    seeds.write_bytes(gzip.compress(b'{"text": "An idea"}'))
    assert stage(1).read_seed_texts(seeds) == ["An idea"]
    assert "12 tasks" in call(1, "--check", tasks)
    call(2, "--tasks", tasks, "--agent", "script", "--out", out)
    rows = read(out)
    answers, packed = tmp_path / "answers", gzip.compress(json.dumps(rows[0]).encode())
    answers.write_bytes(packed)
    colbench_main(["score", str(answers)])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["task_id"] == rows[0]["task_id"]
    answers.write_bytes(packed[:-9])
    with pytest.raises(SystemExit, match="2"):
        colbench_main(["score", str(answers)])
    line = capsys.readouterr().err
    assert line.startswith(f"error: {answers}: damaged gzip file (") and line.count("\n") == 1
    packed = gzip.compress(plain)
    wrong_sum, no_code = packed[:-8] + b"12345678", packed[:300] + b"?" * 40 + packed[340:]
    for damaged in (packed[:-100], wrong_sum, no_code, packed + b"more"):
        tasks.write_bytes(damaged)
        assert refused(2, "--tasks", tasks, "--agent", "script", "--out", out).startswith(f"{tasks}: damaged gzip file")


def hold(argv):
    """A process that makes an output, and does not end."""
    output = Output(argv[-1], {"overwrite": False}, [])
    output.begin()
    output.add_costs(generated_tokens=1)                            # replaces args.json
    print("holds", flush=True)
    time.sleep(600)


def test_an_output_is_made_by_one_process_at_a_time(data, tmp_path):
    out = tmp_path / "rows.jsonl"
    words = [2, "--tasks", data / "tasks.jsonl", "--agent", "script", "--out", out]
    holder = begin("hold", out, folder=tmp_path, run=hold)
    while not (tmp_path / "0.out").exists() or "holds" not in (tmp_path / "0.out").read_text():
        time.sleep(0.01)
    try:
        for more in ([], ["--overwrite"]):
            line = refused(*words, *more)
            assert line == (f"{out}.args.json: process {holder.pid} on {platform.node()} is making this output; wait "
                            "for it, or choose another --out")
            assert not out.exists()
    finally:
        killed(holder)                                              # or pytest would wait for its end
    assert "writes" in call(*words) and len(read(out)) == 12
    with pytest.raises(InputError, match="has just been made by the same command"):
        Output(out, {"overwrite": False}, []).begin()


def test_a_lock_holds_where_its_file_is_replaced_meanwhile(tmp_path, monkeypatch):
    """The other process notes its costs after this one has opened the file, and before it asks for the lock."""
    output = Output(tmp_path / "out", {"overwrite": False}, [])
    output.begin()
    flock = runtime.fcntl.flock

    def costs_first(file, how):
        monkeypatch.setattr(runtime.fcntl, "flock", flock)
        output.add_costs()
        flock(file, how)
    monkeypatch.setattr(runtime.fcntl, "flock", costs_first)
    with pytest.raises(InputError, match="is making this output"):
        runtime.locked(tmp_path / "out.args.json")
    Output.lock = None


def test_without_locks_a_stage_goes_on(tmp_path, monkeypatch, capsys):
    def refuse(file, how):
        raise OSError(38, "Function not implemented")
    monkeypatch.setattr(runtime.fcntl, "flock", refuse)
    Output(tmp_path / "out", {"overwrite": False}, []).begin()
    assert "cannot be locked ([Errno 38] Function not implemented)" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.args.json").read_text())["inputs"] == {}


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


@pytest.fixture
def runs(monkeypatch):
    """[(name, its config, its rows)] of the runs of a stand-in for trackio."""
    started = []

    def init(project, name, config):
        assert project == "colbench"
        started.append((name, dict(config), rows := []))
        return types.SimpleNamespace(log=lambda numbers, step: rows.append({"step": step, **numbers}))
    stand_in = types.SimpleNamespace(init=init, __spec__=importlib.machinery.ModuleSpec("trackio", None))
    monkeypatch.setitem(sys.modules, "trackio", stand_in)
    return started


def test_each_start_of_a_stage_is_a_run_of_its_own(data, tmp_path, runs):
    """03 is killed at step 4, one step after the last state; 02 after five of twelve dialogues."""
    train = ["--trajectories", data / "demos.jsonl", "--model", BASE, "--num-trajectories", 12, "--batch-size", 2,
             "--epochs", 9, "--held-out-frac", 0, "--max-steps", 5, "--save-every", 2]
    play = ["--tasks", data / "tasks.jsonl", "--agent", "script", "--max-rounds", 8, "--concurrency", 1]
    for number, owner, method, arguments in ((3, training.Loop, "update", train), (2, RowFile, "add", play)):
        arguments += ["--out", tmp_path / str(number), "--track", "colbench"]
        with dies(owner, method, calls=3 if number == 3 else 5):
            call(number, *arguments)
        gc.collect()                                                # asyncio reports the task that died, by ast.parse
        for _ in range(2):                                          # the second time it is done already
            call(number, *arguments)
    names, configs, curves = zip(*runs)
    assert [name.startswith(str(tmp_path / folder)) for name, folder in zip(names, "3322")] == [True] * 4
    assert configs[0]["max_steps"] == 5 and [row["step"] for row in curves[0]] == [1, 2, 3]
    assert curves[0][:2] + curves[1] == read(tmp_path / "3" / "metrics.jsonl") and len(curves[1]) == 3
    successes = sum(row["reward"] == 1 for row in read(tmp_path / "2"))
    assert 0 < successes < 12 and curves[3][-1] == {"step": 12, "mean_return": pytest.approx(successes / 12)}


def test_without_trackio_it_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "trackio", None)
    for number in (2, 3):
        with pytest.raises(SystemExit):
            call(number, "--track", "colbench")
        assert capsys.readouterr().err == "error: argument --track: needs trackio: pip install trackio\n"
