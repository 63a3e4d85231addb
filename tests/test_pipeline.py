"""All stages together: the chain of run.sh in small (test_study.py runs run.sh itself), exit statuses."""
import argparse
import json
import re
import subprocess

import pytest

from conftest import ROOT, run, stage
from scripts import study


def test_the_chain_evaluates_every_method_and_a_second_call_runs_nothing_again(tmp_path, monkeypatch, capsys):
    def run_command(command, stdin, stdout, stderr, env):
        ranks, first = 1, 1
        if command[1] == "-m":                                       # torchrun
            ranks, first = int(command[5]), 6
        process = run(*command[first:], ranks=ranks)
        stdout.write(process.stdout + process.stderr)
        return process.returncode
    monkeypatch.setattr(subprocess, "call", run_command)
    monkeypatch.chdir(ROOT)
    printed, times = [], []
    for _ in range(2):
        study.main(["--chain", "2", "--out", str(tmp_path), "--set", "dialogues=4", "num_test=2", "max_rounds=6"])
        printed.append(capsys.readouterr().out)
        times.append({path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")})
    metrics = json.loads((tmp_path / "report" / "metrics.json").read_text())
    assert list(metrics) == ["base", "rft", "mtdpo", "sweet"]
    assert all(m["n"] == 4 and 0 <= m["success_rate"] <= 1 and len(m["ci95"]) == 2 for m in metrics.values())
    assert "report.html" in printed[0] and len(times[0]) == 4 and times[0] == times[1]
    assert " begins (log" not in printed[1] and "against mtdpo" in printed[1]


@pytest.mark.parametrize("script, arguments, line", [
    ("05_evaluate.py", "a={0}/t.jsonl --out {0}/out", r'\S+t\.jsonl:1: missing "\w+"'),
    ("scripts/critics.py", "--trajectories none --gates models/tiny --out {0}/out", "none: no such file or directory")])
def test_bad_input_ends_with_status_2_and_no_traceback(tmp_path, script, arguments, line):
    (tmp_path / "t.jsonl").write_text("{}\n")
    process = run(script, *arguments.format(tmp_path).split())
    assert process.returncode == 2 and re.fullmatch(f"error: {line}\n", process.stderr)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", range(1, 6))
def test_help_shows_every_default(number, monkeypatch):
    parsers = []
    monkeypatch.setattr(argparse.ArgumentParser, "print_help", lambda parser: parsers.append(parser))
    with pytest.raises(SystemExit) as error:
        stage(number).parse_args(["--help"])
    [parser] = parsers
    flags = [action for action in parser._actions if action.option_strings and action.dest not in ("help", "version")]
    assert error.value.code == 0 and len(flags) > 8
    for flag in flags:
        text = parser._get_formatter()._expand_help(flag)
        default = "yes" if flag.default is True else flag.default
        says_nothing = default is None or default is False
        assert "(default:" not in text if says_nothing else text.endswith(f"(default: {default})"), flag.dest


def test_only_the_contracts_files_stand_at_the_top():
    tracked = subprocess.run(["git", "ls-tree", "--name-only", "HEAD"], cwd=ROOT, text=True, capture_output=True).stdout
    assert not tracked or set(tracked.split()) == {
        "01_generate_tasks.py", "02_rollout.py", "03_train_critic.py", "04_train_policy.py", "05_evaluate.py",
        "common.py", "colbench", "lib", "models", "scripts", "docs", "examples", "tests", "requirements.txt",
        "README.md", "LICENSE", "CITATION.cff", "run.sh", ".gitignore", ".ci"}
