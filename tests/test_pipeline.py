"""All stages together: the chain of run.sh in small (test_study.py runs run.sh itself), exit statuses."""
import argparse
import contextlib
import importlib
import io
import json
import re
import subprocess

import pytest

from conftest import ROOT, run, stage

study = importlib.import_module("scripts.study")


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """The chain in small, twice: its folder, what each call printed, and the times of the weights between the two."""
    out = tmp_path_factory.mktemp("chain")
    words = ["base", "rft", "mtdpo", "sweet", "--chain", "2", "--out", str(out), "--set", "dialogues=4", "num_test=2",
             "max_rounds=6"]

    def run_command(command, stdin, stdout, stderr, env):
        ranks, first = 1, 1
        if command[1] == "-m":                                       # torchrun
            ranks, first = int(command[5]), 6
        process = run(*command[first:], ranks=ranks)
        stdout.write(process.stdout + process.stderr)
        return process.returncode

    def call():
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            study.main(words)
        return printed.getvalue()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "call", run_command)
        patch.chdir(ROOT)
        first = call()
        times = {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
        return out, first, call(), times


def test_the_chain_evaluates_every_method_and_names_the_page(chain):
    out, printed, _, _ = chain
    metrics = json.loads((out / "report" / "metrics.json").read_text())
    assert list(metrics) == ["base", "rft", "mtdpo", "sweet"]
    assert all(m["n"] == 4 and 0 <= m["success_rate"] <= 1 and len(m["ci95"]) == 2 for m in metrics.values())
    assert "report.html" in printed


def test_a_second_call_of_the_chain_runs_nothing_again(chain):
    _, _, printed, times = chain
    assert len(times) == 4
    assert " begins (log" not in printed and "against mtdpo" in printed
    assert times == {path: path.stat().st_mtime_ns for path in times}


@pytest.mark.parametrize("script, arguments, line", [
    ("02_rollout.py", "--tasks T --agent script --out O", r'\S+t\.jsonl:1: missing "\w+"'),
    ("05_evaluate.py", "a=T --out O", r'\S+t\.jsonl:1: missing "\w+"'),
    ("scripts/critics.py", "--trajectories none --gates models/tiny --out O", "none: no such file or directory"),
    ("01_generate_tasks.py", "--num-tasks 1 --out /proc/x/t.jsonl", "/proc/x: .*")])
def test_bad_input_ends_with_status_2_and_no_traceback(tmp_path, script, arguments, line):
    (tmp_path / "t.jsonl").write_text("{}\n")
    paths = {"T": tmp_path / "t.jsonl", "a=T": f"a={tmp_path / 't.jsonl'}", "O": tmp_path / "out"}
    process = run(script, *(paths.get(word, word) for word in arguments.split()))
    assert process.returncode == 2 and re.fullmatch(f"error: {line}\n", process.stderr)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", range(1, 6))
def test_help_shows_every_default(number, monkeypatch, capsys):
    parsers, print_help = [], argparse.ArgumentParser.print_help

    def note_and_print(parser):
        parsers.append(parser)
        print_help(parser)
    monkeypatch.setattr(argparse.ArgumentParser, "print_help", note_and_print)
    with pytest.raises(SystemExit) as error:
        stage(number).parse_args(["--help"])
    assert error.value.code == 0
    [parser] = parsers
    flags = capsys.readouterr().out.partition("show program's version number and exit\n")[2]
    entries = re.findall(r"^  --([\w-]+)(.*?)(?=^  --|^\S|\Z)", flags, re.DOTALL | re.MULTILINE)
    assert len(entries) > 8
    for name, entry in entries:
        default = parser.get_default(name.replace("-", "_"))
        text = " ".join(entry.split())
        says_nothing = default is None or default is False
        default = "yes" if default is True else default
        assert "(default:" not in text if says_nothing else text.endswith(f"(default: {default})"), name


def test_only_the_contracts_files_stand_at_the_top():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, capture_output=True).stdout.split("\n")
    if not any(tracked):
        pytest.skip("no git checkout")
    assert {name.split("/")[0] for name in tracked if name} == {
        "01_generate_tasks.py", "02_rollout.py", "03_train_critic.py", "04_train_policy.py", "05_evaluate.py",
        "common.py", "colbench", "lib", "models", "scripts", "docs", "examples", "tests", "requirements.txt",
        "README.md", "LICENSE", "CITATION.cff", "run.sh", ".gitignore", ".ci"}
