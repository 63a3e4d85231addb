"""--track, with a stand-in for trackio: curves of new, continued and missing runs."""
import copy
import functools
import importlib.machinery
import sys
import types

import pytest

from conftest import BASE, call, dies, read, refused
from lib import training
from lib.runtime import Rows


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
def trackio(monkeypatch):
    """runs() of the stand-in, {name: …}."""
    stand_in = Trackio()
    monkeypatch.setitem(sys.modules, "trackio", stand_in)
    return lambda: copy.deepcopy(stand_in.kept)


def test_a_training_that_was_killed_continues_its_curve(workspace, tmp_path, trackio):
    """Killed at step 4, one step after the last state: step 3 is computed again and stands there once."""
    arguments = ["--trajectories", workspace / "offline.jsonl", "--model", BASE, "--num-trajectories", 12,
                 "--batch-size", 2, "--epochs", 9, "--held-out-frac", 0, "--max-steps", 5, "--save-every", 2,
                 "--out", tmp_path / "out", "--track", "colbench"]
    with dies(training.Loop, "update", calls=3):
        call(3, *arguments)
    [[name, before]] = trackio().items()
    assert name == str(tmp_path / "out") and [step for step, _ in before["rows"]] == [1, 2, 3]
    call(3, *arguments)
    [[same_name, run]] = trackio().items()
    assert same_name == name and run["config"]["max_steps"] == 5
    assert [{"step": step, **numbers} for step, numbers in run["rows"]] == read(tmp_path / "out" / "metrics.jsonl")
    assert [step for step, _ in run["rows"]] == [1, 2, 3, 4, 5] and run["rows"][:2] == before["rows"][:2]
    call(3, *arguments)                                              # done already
    assert trackio() == {name: run}
    call(3, *arguments, "--overwrite", "--max-steps", 1)             # another run takes the place of the curve
    assert [step for step, _ in trackio()[name]["rows"]] == [1]


def test_a_rollout_that_was_killed_continues_its_curve(workspace, tmp_path, trackio):
    arguments = ["--tasks", workspace / "tasks.jsonl", "--agent", "script", "--max-rounds", 8, "--concurrency", 1,
                 "--out", tmp_path / "out", "--track", "colbench"]
    with dies(Rows, "add", calls=10):
        call(2, *arguments)
    call(2, *arguments)
    [run] = trackio().values()
    rows, steps = read(tmp_path / "out"), [step for step, _ in run["rows"]]
    assert sorted(set(steps)) == list(range(1, 25)) and steps == sorted(steps)
    successes = sum(row["reward"] == 1 for row in rows)
    assert 0 < successes < 24 and run["rows"][-1][1]["mean_return"] == pytest.approx(successes / 24)


@pytest.mark.parametrize("number", [2, 3])
def test_without_trackio_it_is_one_line(number, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    assert refused(number, "--track", "colbench") == "--track: needs trackio: pip install trackio"
