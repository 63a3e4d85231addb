"""scripts/plot.py: a line a method over dialogues or rounds."""
import importlib
import re

import pytest

plot = importlib.import_module("scripts.plot")

DIALOGUES = """method,dialogues,round,success,low,high
sweet,3200,1,.6,.5,.7
sweet,80,1,.4,.3,.45
mtdpo,80,1,.5,.4,.6
base,,1,.3,.2,.4
"""
ROUNDS = "method,round,success,low,high\nsweet,1,.5,.4,.6\nsweet,2,.6,.5,.7\n"


@pytest.mark.parametrize("table, texts", [
    (ROUNDS, {"1", "2", "round of training", "sweet"}),
    (DIALOGUES, {"80", "3,200", "dialogues of training", "sweet", "mtdpo"})])
def test_a_table_of_each_kind_is_drawn_and_the_same_each_time(tmp_path, table, texts):
    (tmp_path / "table.csv").write_text(table)
    for name in ("picture.svg", "again.svg"):
        plot.main(str(tmp_path / "table.csv"), str(tmp_path / name))
    svg = (tmp_path / "picture.svg").read_text()
    assert texts <= set(re.findall(r"<!-- (.*?) -->", svg)) and (tmp_path / "again.svg").read_text() == svg
