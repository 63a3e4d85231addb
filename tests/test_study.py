"""scripts/study.py and run.sh with stages that only note their commands: every command's flags are parsed by its stage,
every input is there before it is used, and an output has one command. scripts/table.py and plot.py on its tables."""
import csv
import importlib
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from conftest import ROOT
from lib.data import read_trajectories
from lib.runtime import InputError

change_c, plot, study, table = (importlib.import_module(f"scripts.{name}")
                                for name in ("change_c", "plot", "study", "table"))
CHAIN = ["base", "rft", "mtdpo", "sweet"]
INPUTS = "trajectories", "tasks", "critic", "candidates", "agent", "gates", "model"
NO_FILES = None, "untrained", "models/tiny", "models/tiny_sql", "models/tiny_pages", "out/real/base/model"


def parse(words):
    """(the stage or fork, its arguments) of a command."""
    if words[0] == "-m":
        return words[1], vars(importlib.import_module(words[1]).parse_args(words[2:]))
    module = importlib.import_module(words[0].removesuffix(".py").replace("/", "."))
    return words[0][:2], vars(module.parse_args(words[1:]))


class Commands(dict):
    """{output: its arguments, "stage" and "ranks"}."""

    def run_step(self, out, words, ranks=1, threads=1):
        name, args = parse([*words, "--out", str(out)])
        files = [args.get(flag) for flag in INPUTS]
        files += [path for named in args.get("files", []) for path in named.split("=")[1].split(",")]
        missing = [path for path in files if path not in NO_FILES and not os.path.exists(path)]
        out = pathlib.Path(out)
        command = {"stage": name, "ranks": ranks, **args}
        assert not missing and self.setdefault(str(out), command) == command, (missing, out)
        if out.suffix == ".jsonl":
            out.parent.mkdir(parents=True, exist_ok=True)
            out.touch()
        else:
            (out / "scored").mkdir(parents=True, exist_ok=True)
            (out / "candidates.jsonl").touch()
        if name == "05":
            write_report(out, dict(named.split("=") for named in args["files"]))
        return "the table"


def write_report(folder, files):
    """What 05 leaves of {name: its files}: in the first run two dialogues of a task, in others one."""
    metrics = {"n": 3, "success_rate": 0.5, "mean_rounds": 4.25, "ci95": [0.25, 0.75], "notes": [],
               "costs": {"trained_tokens": 10, "generated_tokens": 20}}
    (folder / "metrics.json").write_text(json.dumps(dict.fromkeys(files, metrics)))
    for name, paths in files.items():
        row = {"task_id": "a", "task": {"family": "f"}, "sample": 1, "reward": 1}
        rows = [row | {"run": 0, "sample": 0, "reward": 0, "num_rounds": 3}]
        rows += [row | {"run": run, "num_rounds": 3 + run} for run in range(len(paths.split(",")))]
        (folder / "scored" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def call(tmp_path, monkeypatch):
    """call(*arguments): calls study.main in an empty folder; returns its Commands."""
    def call(*arguments):
        commands = Commands()
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        monkeypatch.chdir(folder)
        monkeypatch.setattr(study, "run_step", commands.run_step)
        study.main([*arguments, "--out", "o"])
        return commands
    return call


# ---------------------------------------------------------------------------------------------------------------------
# the chain of run.sh

@pytest.mark.parametrize("domain, base, num_train, rounds", [
    ("backend", "models/tiny", 80, 8), ("sql", "models/tiny_sql", 80, 8), ("frontend", "models/tiny_pages", 120, 4)])
def test_the_chain_of_each_domain(call, domain, base, num_train, rounds):
    commands = call(*CHAIN, "--chain", "3", "--domain", domain)
    expected = {"train.jsonl", "test.jsonl", "offline.jsonl", "critic", "sweet", "rft", "mtdpo", "base.jsonl",
                "rft.jsonl", "mtdpo.jsonl", "sweet.jsonl", "report"} | ({"gates"} if domain != "frontend" else set())
    assert {name.removeprefix("o/") for name in commands} == expected
    train, test, report = commands["o/train.jsonl"], commands["o/test.jsonl"], commands["o/report"]
    assert (train["num_tasks"], train["seed"]) == (num_train, 3)
    assert (test["num_tasks"], test["seed"]) == (50 if domain == "frontend" else 300, 1000)
    assert {name for name, command in commands.items() if command["ranks"] == 2} == {
        "o/offline.jsonl", "o/critic", "o/sweet.jsonl"}
    for name in ("critic", "rft", "mtdpo", "sweet"):
        command = commands[f"o/{name}"]
        assert (command["model"], command["seed"], command["num_trajectories"]) == (base, 3, None)
    played = [command for command in commands.values() if command["stage"] == "02"]
    assert {command["max_rounds"] for command in played} == {rounds}
    assert [command["samples"] for command in played].count(4) == 1 and len(played) == 5
    assert [name.split("=")[0] for name in report["files"]] == CHAIN
    assert (report["baseline"], report["critic"], report["candidates"]) == ("mtdpo", "o/critic", "o/sweet")
    assert report["reference_sees_c"] == commands["o/sweet"]["reference_sees_c"]           # scored as candidates were
    assert {command["similarity"] for command in [report, *played]} == {
        "pixels" if domain == "frontend" else "clip"}


def test_one_gpu_has_one_rank(call, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert {command["ranks"] for command in call("base", "sweet", "--chain", "0").values()} == {1}


@pytest.mark.parametrize("flags, line", [
    (["--domain"], "--domain '': must be a domain"),
    (["--domain", "frontends"], "--domain 'frontends': must be a domain"),
    (["--seed"], "seed '--seed': must be a number")])
def test_run_sh_refuses_other_arguments(flags, line):
    process = subprocess.run(["bash", "run.sh", *flags], cwd=ROOT, text=True, capture_output=True)
    assert process.returncode == 2 and process.stderr.startswith(f"error: {line}") and not process.stdout


def test_run_sh_passes_its_variables_on(tmp_path):
    """In a folder whose python prints its words."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / "run.sh").write_text((ROOT / "run.sh").read_text())
    (tmp_path / "scripts/arms.toml").write_text("[sql]\n")
    setup = (ROOT / "scripts/setup.sh").read_text()
    (tmp_path / "scripts/setup.sh").write_text(f"{setup}\nsetup_environment() {{ :; }}\n")
    python = tmp_path / ".venv/bin/python"
    python.write_text('#!/bin/bash\nprintf "%q " "$@"\n')
    python.chmod(0o755)
    for words, variables, printed in (
            ("4", {"OUT": "x y", "TRAIN_TASKS": "8", "TEST_TASKS": "5", "ROUNDS": "6"},
             "--chain 4 --domain sql --out x\\ y/sql/seed4 --set dialogues=32 num_test=5 max_rounds=6 "),
            ("0", {}, "--chain 0 --domain sql --out out/sql ")):
        process = subprocess.run(["bash", "run.sh", "--domain", "sql", words], cwd=tmp_path, text=True,
                                 capture_output=True, env={"PATH": os.environ["PATH"], **variables})
        assert process.stdout == f"scripts/study.py base rft mtdpo sweet {printed}"


# ---------------------------------------------------------------------------------------------------------------------
# studies

def test_arms_of_a_seed_and_size_share_dialogues_critics_and_candidates(call):
    arms = ["mtdpo", "tenth", "sweet", "printed", "blind", "untrained"]
    commands = call(*arms, "mtdpo@1600", "--sizes", "80", "320", "--seeds", "10", "11")
    for seed in (10, 11):
        folder = f"o/seed{seed}"
        assert commands[f"{folder}/train.jsonl"]["num_tasks"] == 400
        for size in (80, 320):
            arm = {name: commands[f"{folder}/{name}@{size}"] for name in arms}
            assert {(args["num_trajectories"], args["seed"], args["trajectories"]) for args in arm.values()} == {
                (size, seed, f"{folder}/offline.jsonl")}
            assert [args["critic"] for args in arm.values()] == [
                None, *[f"{folder}/critic@{size}"] * 3, f"{folder}/critic-blind@{size}", "untrained"]
            assert [args["candidates"] for args in arm.values()] == [
                None, None, None, *[f"{folder}/sweet@{size}/candidates.jsonl"] * 3]
            assert [args["data_frac"] for args in arm.values()] == [0.1, 0.1, 1, 1, 1, 1]
            assert commands[f"{folder}/critic-blind@{size}"]["reference_sees_c"] is False
    assert commands["o/seed10/mtdpo@320"]["lr"] == 3e-4 and commands["o/seed10/mtdpo@1600"]["lr"] == 1e-4
    assert commands["o/report"]["baseline"] == "mtdpo@1600" and commands["o/report"]["costs"]
    assert "sweet@80=o/seed10/sweet@80.jsonl,o/seed11/sweet@80.jsonl" in commands["o/report"]["files"]


def test_a_search_plays_each_setting_on_validation_tasks(call):
    commands = call("mtdpo", "sweet", "--split", "validation", "--seeds", "9", "--grid", "lr=1e-4,3e-4", "beta=0.1,0.3")
    assert {command["split"] for command in commands.values() if command["stage"] == "01"} == {"train", "validation"}
    policies = {name: command for name, command in commands.items() if command["stage"] == "04"}
    assert {name: (command["lr"], command["beta"]) for name, command in policies.items()} == {
        f"o/seed9/{arm}_lr{lr}_beta{beta}": (float(lr), float(beta)) for arm, lr, beta in itertools.product(
            ("mtdpo", "sweet"), ("1e-4", "3e-4"), ("0.1", "0.3"))}
    assert [(row["method"], row["lr"], row["beta"]) for row in rows_of("o/table.csv")[:2]] == [
        ("mtdpo", "1e-4", "0.1"), ("mtdpo", "1e-4", "0.3")]


def test_each_round_goes_on_with_the_agent_of_the_one_before(call, monkeypatch):
    words = ["sweet", "mtdpo", "base", "--rounds", "3", "--seeds", "3"]
    commands = call(*words)
    for arm in ("sweet", "mtdpo"):
        policies = [commands[f"o/seed3/{arm}@{number}"] for number in (1, 2, 3)]
        assert [(policy["model"], policy["seed"], policy["trajectories"]) for policy in policies] == [
            ("models/tiny", 3, "o/seed3/offline.jsonl"),
            (f"o/seed3/{arm}@1", 1003, f"o/seed3/{arm}@2-offline.jsonl"),
            (f"o/seed3/{arm}@2", 2003, f"o/seed3/{arm}@3-offline.jsonl")]
        assert [policy["lr"] for policy in policies] == ([3e-5, 1e-5, 1e-5] if arm == "sweet" else [3e-4, 1e-4, 1e-4])
        again = commands[f"o/seed3/{arm}@2-offline.jsonl"]
        assert (again["agent"], again["seed"], again["tasks"]) == (f"o/seed3/{arm}@1", 1003, "o/seed3/train@2.jsonl")
    critic = commands["o/seed3/sweet@3-critic"]                                # of all dialogues, from the last agent
    assert (critic["model"], critic["trajectories"]) == ("o/seed3/sweet@2", "o/seed3/sweet@3-all.jsonl")
    names = [name.split("=")[0] for name in commands["o/report"]["files"]]
    assert names == [f"{arm}@{number}" for arm in ("sweet", "mtdpo") for number in (1, 2, 3)] + ["base"]
    assert commands["o/report"]["baseline"] == "mtdpo@3"
    os.utime(critic["trajectories"], (1, 1))
    monkeypatch.setattr(study, "run_step", lambda *_, **__: "")
    study.main([*words, "--out", "o"])
    assert os.stat(critic["trajectories"]).st_mtime == 1                       # no newer file, so no critic again
    critic = call("exchanged", "--rounds", "2", "--seeds", "3")["o/seed3/exchanged@2-critic"]
    assert critic["trajectories"] == "o/seed3/exchanged@2-all-exchanged.jsonl"


@pytest.mark.parametrize("domain", ["backend", "sql", "frontend", "real"])
def test_every_arm_of_the_table_plays(call, domain):
    arms = [arm for arm in study.read_domain(domain)["arms"] if arm != "base"]
    commands = call(*arms, "--domain", domain, "--seeds", "1", "--set", "num_test=7", "samples=1")
    assert {f"o/seed1/{arm}" for arm in arms} <= set(commands)
    tested = commands[f"o/seed1/{arms[0]}.jsonl"]
    assert tested["samples"] == 1 and commands["o/seed1/test.jsonl"]["num_tasks"] == 7


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_the_tables(call):
    call("rft", "--seeds", "5", "6", "--sizes", "80")
    assert rows_of("o/table.csv") == [{
        "method": "rft", "dialogues": "80", "round": "1", "n": "3", "success": "0.5", "rounds": "4.25",
        "trained_tokens": "10", "generated_tokens": "20", "low": "0.25", "high": "0.75"}]
    assert [list(row.values()) for row in rows_of("o/tasks.csv")] == [
        ["a", "f", "0", "5", "rft@80", "0.0", "3"], ["a", "f", "1", "5", "rft@80", "1.0", "3"],
        ["a", "f", "1", "6", "rft@80", "1.0", "4"]]


def test_a_table_of_the_outcomes_of_tasks(tmp_path, capsys):
    rows = [f"t{number},f,{number},{seed},{arm},{float(arm == 'a' or number == 0)},3"
            for arm in "ab" for seed in (5, 6) for number in range(2)]
    (tmp_path / "tasks.csv").write_text("\n".join(["task_id,family,sample,seed,arm,success,rounds", *rows]))
    table.main(str(tmp_path / "tasks.csv"), "b")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["a", "4", "1.000", "[0.158,", "1.000]", "3.00", "+0.500", "[+0.000,", "+1.000]"]
    assert ["b", "-", "0.500", "0.500"] in lines


@pytest.mark.parametrize("rows, texts", [
    ("round,method\n1,sweet\n2,sweet", {"1", "2", "round of training", "sweet"}),
    ("dialogues,method\n3200,sweet\n80,sweet\n80,mtdpo\n,base", {"80", "3,200", "dialogues of training", "sweet",
                                                                 "mtdpo"})])
def test_a_table_of_each_kind_is_drawn_and_the_same_each_time(tmp_path, rows, texts):
    heading, *points = rows.split("\n")
    lines = [f"{heading},success,low,high", *(f"{point},.5,.4,.6" for point in points)]
    (tmp_path / "table.csv").write_text("\n".join(lines))
    for name in ("picture.svg", "again.svg"):
        plot.main(str(tmp_path / "table.csv"), str(tmp_path / name))
    svg = (tmp_path / "picture.svg").read_text()
    assert texts <= set(re.findall(r"<!-- (.*?) -->", svg)) and (tmp_path / "again.svg").read_text() == svg


# ---------------------------------------------------------------------------------------------------------------------
# what goes wrong

@pytest.mark.parametrize("arguments, line", [
    (["sweet", "--domain", "pages"], "--domain pages: must be one of backend, sql, frontend, real"),
    (["mine"], "mine: no such arm in scripts/arms.toml, which has rft, mtdpo, sweet"),
    *((["rft", "--set", change], f"--set {change}: must be NAME=NUMBER, with a number of [backend]")
      for change in ("dialogs=3", "num_test=few", "base=3", "gates=1"))])
def test_what_is_unknown_is_refused(call, arguments, line):
    with pytest.raises(InputError) as error:
        call(*arguments)
    assert str(error.value).startswith(line)


def test_an_arm_without_a_rate_is_refused():
    with pytest.raises(InputError, match="mine: no --lr among its flags"):
        study.check_arm("mine", {"arms": {"mine": {"method": "rft", "flags": "--epochs 2"}}})


def test_a_failed_step_shows_its_last_lines_and_is_no_output(tmp_path, capfd):
    program = "import sys; print(*range(30), sep='\\n'); sys.exit('the reason')"
    with pytest.raises(SystemExit) as end:
        study.run_step(tmp_path / "critic", ["-c", program])
    lines = capfd.readouterr().err.splitlines()
    assert end.value.code == 1 and lines[:2] == ["11", "12"] and lines[-2:] == [
        "the reason", f"failed: {tmp_path / 'critic'} (whole log: {tmp_path / 'critic'}.log)"]


def test_a_finished_step_is_not_run_again_but_with_other_words_or_newer_files(tmp_path, capfd):
    out, read = tmp_path / "a.jsonl", tmp_path / "read"
    read.touch()
    command = ["-c", "import os, sys; open(sys.argv[-1], 'w'); print(1, os.environ['OMP_NUM_THREADS'], sep='\\n')",
               f"x={read},y"]

    def has_run(*more):
        assert study.run_step(out, [*command, *more], threads=2) == "1\n2\n"           # of the last run alone
        printed = capfd.readouterr().out
        assert not printed or printed.endswith(" s  2\n")            # its last line
        return f"begins (log: {out}.log)" in printed
    assert has_run() and not has_run()
    assert has_run("--more") and not has_run("--more")
    out.unlink()
    assert has_run("--more")
    os.utime(read, (2e9, 2e9))
    assert has_run("--more")


def test_other_arms_are_played_where_one_fails(tmp_path, monkeypatch):
    outputs = []

    def run_step(out, words, ranks=1, threads=1):
        outputs.append(out.name)
        if out.name == "rft":
            sys.exit(1)
    monkeypatch.setattr(study, "run_step", run_step)
    with pytest.raises(SystemExit) as error:
        study.main(["rft", "mtdpo", "--seeds", "1", "--out", str(tmp_path)])
    assert error.value.code == 1
    assert "mtdpo.jsonl" in outputs and "rft.jsonl" not in outputs and "report" not in outputs


@pytest.mark.parametrize("kind", ["exchanged", "facts"])
def test_another_c_for_the_critic(workspace, tmp_path, kind):
    """Dialogues, rewards and names stay; the reference is another one of the family, or says what there is to ask."""
    trajectories, out = read_trajectories(workspace / "offline.jsonl"), tmp_path / "out.jsonl"
    references = {row["task_id"]: (row["task"]["family"], row["task"]["ground_truth"]) for row in trajectories}
    families = [family for family, _ in references.values()]
    change_c.main(["--kind", kind, "--trajectories", str(workspace / "offline.jsonl"), "--out", str(out)])
    for before, after in zip(trajectories, read_trajectories(out), strict=True):
        task, reference = after["task"], before["task"]["ground_truth"]
        assert {**after, "task": None} == {**before, "task": None}
        if kind == "exchanged":
            assert (task["family"], task["ground_truth"]) in references.values()
            assert (task["ground_truth"] == reference) == (families.count(task["family"]) == 1)
            continue
        hidden = [fact for fact in task["facts"] if fact["matters"] and not fact["told"]]
        added = task["ground_truth"].removeprefix(reference).splitlines()[1:]
        assert len(added) == len(hidden) > 0 and compile(task["ground_truth"], "c", "exec")
        assert all(line.startswith(f"# {fact['topic']}: ") for line, fact in zip(added, hidden))
