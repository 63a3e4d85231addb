"""--track, with a stand-in for trackio that keeps runs in a file: curves of new, continued and missing runs."""
import json
import sys

import pytest

from conftest import read, ROOT, stage
from lib import training
from lib.runtime import InputError, Rows, run_stage

# Keeps {name: {"config", "rows": [[step, numbers], …]}} of each project in the file $TRACKIO.
TRACKIO = '''
import json, os, pathlib
PATH = pathlib.Path(os.environ["TRACKIO"])
def load(): return json.loads(PATH.read_text()) if PATH.exists() else {}
def save(kept): PATH.write_text(json.dumps(kept))
class Run:
    def __init__(self, project, name): self.project, self.name = project, name
    def log(self, metrics, step):
        kept = load()
        kept[self.project][self.name]["rows"].append([step, metrics])
        save(kept)
    def delete(self):
        kept = load()
        del kept[self.project][self.name]
        save(kept)
class Api:
    def runs(self, project):
        if project not in load():
            raise ValueError(project)
        return [Run(project, name) for name in load()[project]]
def init(project, name, config, resume):
    assert resume == "allow"
    kept = load()
    kept.setdefault(project, {}).setdefault(name, {"config": config, "rows": []})
    save(kept)
    return Run(project, name)
'''


@pytest.fixture
def trackio(tmp_path, monkeypatch):
    """runs() of the stand-in, {name: …}, of the project "colbench"."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "trackio.py").write_text(TRACKIO)
    monkeypatch.setenv("TRACKIO", str(tmp_path / "kept.json"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))

    def runs():
        return json.loads((tmp_path / "kept.json").read_text())["colbench"]
    yield runs
    sys.modules.pop("trackio", None)


def test_a_training_that_was_killed_continues_its_curve(workspace, tmp_path, trackio, monkeypatch):
    """Killed at step 4, one step after the last state: step 3 is computed again and stands there once."""
    arguments = list(map(str, [
        "--trajectories", workspace / "offline.jsonl", "--model", ROOT / "models" / "tiny", "--max-steps", 5,
        "--save-every", 2, "--out", tmp_path / "out", "--track", "colbench"]))
    original = training.optimizer_step

    def die(scorer, optimizer, sums, lr, where, task_ids):
        if where.endswith("step 4 of 5"):
            raise KeyboardInterrupt
        return original(scorer, optimizer, sums, lr, where, task_ids)
    monkeypatch.setattr(training, "optimizer_step", die)
    with pytest.raises(KeyboardInterrupt):
        stage(3).main(arguments)
    [[name, before]] = trackio().items()
    assert name == str(tmp_path / "out") and [step for step, _ in before["rows"]] == [1, 2, 3]
    monkeypatch.setattr(training, "optimizer_step", original)
    stage(3).main(arguments)
    [[same_name, run]] = trackio().items()
    assert same_name == name and run["config"]["max_steps"] == 5
    assert [{"step": step, **numbers} for step, numbers in run["rows"]] == read(tmp_path / "out" / "metrics.jsonl")
    assert [step for step, _ in run["rows"]] == [1, 2, 3, 4, 5] and run["rows"][:2] == before["rows"][:2]
    stage(3).main(arguments)                                         # done already
    assert trackio() == {name: run}
    stage(3).main([*arguments, "--overwrite", "--max-steps", "1"])   # another run takes the place of the curve
    assert [step for step, _ in trackio()[name]["rows"]] == [1]


def test_a_rollout_that_was_killed_continues_its_curve(workspace, tmp_path, trackio, monkeypatch):
    arguments = ["--tasks", str(workspace / "tasks.jsonl"), "--agent", "script", "--max-rounds", "8", "--concurrency",
                 "1", "--out", str(tmp_path / "out"), "--track", "colbench"]
    add, added = Rows.add, []

    def add_or_die(rows, number, row):
        if len(added) == 10:
            raise InputError("killed")
        added.append(number)
        add(rows, number, row)
    monkeypatch.setattr(Rows, "add", add_or_die)
    with pytest.raises(InputError, match="killed"):
        stage(2).main(arguments)
    monkeypatch.setattr(Rows, "add", add)
    stage(2).main(arguments)
    [run] = trackio().values()
    rows, steps = read(tmp_path / "out"), [step for step, _ in run["rows"]]
    assert sorted(set(steps)) == list(range(1, 25)) and steps == sorted(steps)
    successes = sum(row["reward"] == 1 for row in rows)
    assert 0 < successes < 24 and run["rows"][-1][1]["mean_return"] == pytest.approx(successes / 24)


@pytest.mark.parametrize("number", [2, 3, 4])
def test_without_trackio_it_is_one_line(number, workspace, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "trackio", None)
    arguments = {2: ["--tasks", workspace / "tasks.jsonl", "--agent", "script"],
                 3: ["--trajectories", workspace / "offline.jsonl", "--model", ROOT / "models" / "tiny"],
                 4: ["--trajectories", workspace / "offline.jsonl", "--model", ROOT / "models" / "tiny", "--method",
                     "rft"]}[number]
    arguments = [*map(str, arguments), "--out", str(tmp_path / "out"), "--track", "colbench"]
    with pytest.raises(SystemExit) as end:
        run_stage(lambda: stage(number).main(arguments))
    assert end.value.code == 2 and not (tmp_path / "out").exists()
    assert capsys.readouterr().err == "error: --track: needs trackio: pip install trackio\n"
