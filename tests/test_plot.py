"""scripts/plot_results.py: a picture of each kind of table."""
import importlib
import re
import subprocess
import sys

import pytest
from matplotlib.figure import Figure

from conftest import ROOT

plot_results = importlib.import_module("scripts.plot_results")

DIALOGUES = """method,dialogues,success,low,high
sweet,320,.6,.5,.7
sweet,80,.4,.3,.45
mtdpo,80,.5,.4,.6
"""
SEEDS = """method,seed,success,low,high
mtdpo,0,.8,,
mtdpo,1,.9,,
mtdpo,all,.85,.7,.95
"""
ROUNDS = """method,round,success,low,high
sweet,1,.5,.4,.6
sweet,2,.6,.5,.7
"""


def drawn_texts(tmp_path, table):
    """The texts of the picture of a table, in their order."""
    (tmp_path / "table.csv").write_text(table)
    plot_results.main(str(tmp_path / "table.csv"), str(tmp_path / "picture.svg"))
    svg = (tmp_path / "picture.svg").read_text()
    plot_results.main(str(tmp_path / "table.csv"), str(tmp_path / "again.svg"))
    assert (tmp_path / "again.svg").read_text() == svg               # the same input gives the same file
    return re.findall(r"<!-- (.*?) -->", svg)


@pytest.mark.parametrize("table, texts", [
    (SEEDS, ["success on 500 held-out tasks (all 10 hidden tests pass)", "mtdpo", ".850", "one seed"]),
    (ROUNDS, ["1", "2", "round of training", "sweet"]),
    (DIALOGUES, ["80", "320", "dialogues trained on", "sweet", "mtdpo"])])
def test_a_table_of_each_kind_is_drawn(tmp_path, table, texts):
    assert set(texts) <= set(drawn_texts(tmp_path, table))


def test_success_against_dialogues_by_hand():
    """A line a method, in the order of the dialogues; an interval at each point; a log axis."""
    rows = [dict(zip(["method", "dialogues", "success", "low", "high"], line.split(",")))
            for line in DIALOGUES.splitlines()[1:]]
    axes = Figure().subplots()
    plot_results.draw_dialogues(axes, rows)
    lines = {container.get_label(): container for container in axes.containers}
    sweet, _, [bars] = lines["sweet"].lines
    assert sweet.get_xydata().tolist() == [[80, 0.4], [320, 0.6]]
    assert bars.get_segments()[0].tolist() == [[80, pytest.approx(0.3)], [80, pytest.approx(0.45)]]
    assert bars.get_segments()[1].tolist() == [[320, pytest.approx(0.5)], [320, pytest.approx(0.7)]]
    mtdpo = lines["mtdpo"].lines[0]
    assert mtdpo.get_xydata().tolist() == [[pytest.approx(82.4), 0.5]]           # 3 % aside: the intervals do not cover
    assert axes.get_xscale() == "log" and [text.get_text() for text in axes.get_xticklabels()] == ["80", "320"]


def test_another_table_is_one_line(tmp_path):
    (tmp_path / "table.csv").write_text("method,success\na,1\n")
    process = subprocess.run([sys.executable, ROOT / "scripts" / "plot_results.py", tmp_path / "table.csv"],
                             capture_output=True, text=True)
    assert process.returncode == 1 and process.stderr == (
        f"error: {tmp_path / 'table.csv'}: no rows with one of the columns seed, round, dialogues\n")
