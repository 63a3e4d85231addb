"""scripts/plot.py: a line a method over dialogues or rounds. scripts/table.py: a row an arm."""
import importlib
import re

import pytest

plot = importlib.import_module("scripts.plot")
table = importlib.import_module("scripts.table")

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


def test_a_table_of_the_outcomes_of_tasks(tmp_path, capsys):
    rows = [f"{arm},{seed},t{number},f,{float(arm == 'a' or number == 0)},{number},3" for arm in "ab" for seed in (5, 6)
            for number in range(2)]
    (tmp_path / "tasks.csv").write_text("\n".join(["arm,seed,task_id,family,success,sample,rounds", *rows]))
    table.main(str(tmp_path / "tasks.csv"), "b")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["a", "4", "1.000", "[0.158,", "1.000]", "3.00", "+0.500", "[+0.000,", "+1.000]"]
    assert ["b", "-", "0.500", "0.500"] in lines
