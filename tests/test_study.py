"""scripts/study.py and run.sh with stages that only note their commands: every command's flags are parsed by
its stage, every input is there before it is used, and an output has one command. table.py and plot.py on its tables."""
import csv
import importlib
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from unittest import mock

import pytest

from conftest import read, refused, ROOT, stage, trajectory, write
from lib.data import read_trajectories
from lib.runtime import InputError
from scripts import change_c, plot, study, table

SWEET = {"backend": "sweet", "sql": "sweet-answers", "frontend": "paper"}      # that run.sh compares
INPUTS = "trajectories", "tasks", "critic", "candidates", "agent", "gates", "model"
NO_FILES = None, False, "untrained", "models/tiny", "models/tiny_sql", "models/tiny_pages", "out/real/base/model"


def parse(words):
    """("04", say, its arguments) of a command that runs a stage, a fork or a script."""
    program, *flags = words[1:] if words[0] == "-m" else words
    module = importlib.import_module(program.removesuffix(".py").replace("/", "."))
    return program[:2], vars(module.parse_args(flags))


class Commands(dict):
    """{output: its arguments, "stage" and "ranks"}."""

    def run_step(self, out, words, ranks=1, threads=1):
        name, args = parse([*words, "--out", str(out)])
        files = [args.get(flag) for flag in INPUTS]
        files += [path for _, paths in args.get("files", []) for path in paths]
        missing = [path for path in files if path not in NO_FILES and not os.path.exists(path)]
        command = {"stage": name, "ranks": ranks, **args}
        assert not missing and self.setdefault(str(out), command) == command, (missing, out)
        if out.suffix == ".jsonl":
            out.parent.mkdir(parents=True, exist_ok=True)
            out.touch()
        else:
            (out / "scored").mkdir(parents=True, exist_ok=True)
            (out / "candidates.jsonl").touch()
        if name == "05":
            write_report(out, dict(args["files"]))
        return "the table"


def write_report(folder, files):
    """What 05 leaves of {name: its files}: in the first run two dialogues of a task, in others one."""
    metrics = {"n": 3, "success_rate": 0.5, "mean_rounds": 4.25, "ci95": [0.25, 0.75], "notes": [],
               "costs": {"trained_tokens": 10, "generated_tokens": 20}}
    (folder / "metrics.json").write_text(json.dumps(dict.fromkeys(files, metrics)))
    for name, paths in files.items():
        task = {"family": "f", "problem_description": "", "ground_truth": "", "test_cases": {"test1": "f()"}}
        row = {"task_id": "a", "task": task, "sample": 1, "reward": 1, "known": True, "ending": "answered"}
        rows = [row | {"run": 0, "sample": 0, "reward": 0, "num_rounds": 3}]
        rows += [row | {"run": run, "num_rounds": 3 + run} for run in range(len(paths))]
        write(folder / "scored" / f"{name}.jsonl", rows)


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


@pytest.mark.parametrize("domain, base, num_train, rounds", [
    ("backend", "models/tiny", 80, 8), ("sql", "models/tiny_sql", 80, 8), ("frontend", "models/tiny_pages", 120, 4)])
def test_the_chain_of_each_domain(call, monkeypatch, domain, base, num_train, rounds):
    commands = call("--chain", "3", "--domain", domain)
    sweet = SWEET[domain]
    agents = ["base", "rft", "mtdpo", sweet]
    expected = {"train.jsonl", "test.jsonl", "offline.jsonl", "critic", "report", *agents[1:]}
    expected |= {f"{name}.jsonl" for name in agents} | ({"gates"} if domain != "frontend" else set())
    assert {name.removeprefix("o/") for name in commands} == expected
    train, test, report = commands["o/train.jsonl"], commands["o/test.jsonl"], commands["o/report"]
    assert (train["num_tasks"], train["seed"]) == (num_train, 3)
    assert (test["num_tasks"], test["seed"]) == (50 if domain == "frontend" else 300, 1000)
    assert {name for name, command in commands.items() if command["ranks"] == 2} == {
        "o/offline.jsonl", "o/critic", f"o/{sweet}.jsonl"}
    for name in ("critic", *agents[1:]):
        command = commands[f"o/{name}"]
        assert (command["model"], command["seed"], command["num_trajectories"]) == (base, 3, None)
    played = [command for command in commands.values() if command["stage"] == "02"]
    assert {command["max_rounds"] for command in played} == {rounds}
    assert [command["samples"] for command in played].count(4) == 1 and len(played) == 5
    assert list(dict(report["files"])) == agents
    assert (report["baseline"], report["critic"], report["candidates"]) == ("mtdpo", "o/critic", f"o/{sweet}")
    assert report["reference_sees_c"] == commands[f"o/{sweet}"]["reference_sees_c"]        # scored as candidates were
    assert {command["similarity"] for command in [report, *played]} == {
        "pixels" if domain == "frontend" else "clip"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")                  # one GPU has one rank
    assert {command["ranks"] for command in call("base", sweet, "--chain", "0", "--domain", domain).values()} == {1}


def write_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def test_run_sh_refuses_other_arguments():
    for flags, line in ((["--domain"], "--domain '': must be a domain"),
                        (["--domain", "frontends"], "--domain 'frontends': must be a domain"),
                        (["1", "--domain", "sql"], "1 --domain sql: must be [--domain NAME] and then"),
                        (["--seed"], "seed '--seed': must be a number")):
        process = subprocess.run(["bash", "run.sh", *flags], cwd=ROOT, text=True, capture_output=True)
        assert process.returncode == 2 and process.stderr.startswith(f"error: {line}") and not process.stdout


def test_run_sh_passes_its_variables_on(tmp_path):
    shutil.copy(ROOT / "run.sh", tmp_path)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    with open(tmp_path / "scripts/setup.sh", "a") as setup:
        setup.write("setup_environment() { :; }\n")
    write_program(tmp_path / ".venv/bin/python", 'printf "%q " "$@"')
    for words, variables, printed in (
            ("4", {"OUT": "x y", "TRAIN_TASKS": "8", "TEST_TASKS": "5", "ROUNDS": "6"},
             "--chain 4 --domain sql --out x\\ y/sql/seed4 --set dialogues=32 num_test=5 max_rounds=6 "),
            ("0", {}, "--chain 0 --domain sql --out out/sql ")):
        process = subprocess.run(["bash", "run.sh", "--domain", "sql", words], cwd=tmp_path, text=True,
                                 capture_output=True, env={"PATH": os.environ["PATH"], **variables})
        assert process.stdout == f"scripts/study.py {printed}"


def test_arms_of_a_seed_and_size_share_dialogues_critics_and_candidates(call):
    arms = ["mtdpo", "tenth", "sweet", "paper", "blind", "untrained"]
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
            assert commands[f"{folder}/critic@{size}"]["num_trajectories"] == size
            assert {commands[f"{folder}/{name}.jsonl"]["seed"] for name in ("offline", f"sweet@{size}")} == {seed}
    assert commands["o/seed10/mtdpo@320"]["lr"] == 3e-4 and commands["o/seed10/mtdpo@1600"]["lr"] == 1e-4
    assert commands["o/report"]["baseline"] == "mtdpo@1600" and commands["o/report"]["costs"]
    sweet = dict(commands["o/report"]["files"])["sweet@80"]
    assert sweet == ["o/seed10/sweet@80.jsonl", "o/seed11/sweet@80.jsonl"]


def test_a_search_plays_each_setting_on_validation_tasks(call):
    commands = call("mtdpo", "sweet", "--split", "validation", "--seeds", "9", "--grid", "lr=1e-4,3e-4", "beta=0.1,0.3")
    tasks = {(command["split"], command["seed"]) for command in commands.values() if command["stage"] == "01"}
    assert tasks == {("train", 9), ("validation", 0)}
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
        assert (again["agent"], again["seed"], again["tasks"]) == (
            f"o/seed3/{arm}@1", 1003, f"o/seed3/{arm}@2-train.jsonl")
    critic = commands["o/seed3/sweet@3-critic"]                                # of all dialogues, from the last agent
    assert (critic["model"], critic["trajectories"]) == ("o/seed3/sweet@2", "o/seed3/sweet@3-all.jsonl")
    names = list(dict(commands["o/report"]["files"]))
    assert names == [f"{arm}@{number}" for arm in ("sweet", "mtdpo") for number in (1, 2, 3)] + ["base"]
    assert commands["o/report"]["baseline"] == "mtdpo@3"
    os.utime(critic["trajectories"], (1, 1))
    monkeypatch.setattr(study, "run_step", lambda *_, **__: "")
    study.main([*words, "--out", "o"])
    assert os.stat(critic["trajectories"]).st_mtime == 1                       # no newer file, so no critic again
    words = ["exchanged", "--rounds", "2", "--seeds", "3"]                     # of the same dialogues as sweet's
    commands = call(*words)
    assert commands["o/seed3/exchanged@2-critic-exchanged"]["trajectories"] == "o/seed3/exchanged@2-all.jsonl"
    assert commands["o/seed3/exchanged@2"]["trajectories"] == "o/seed3/exchanged@2-offline-exchanged.jsonl"
    assert commands["o/seed3/exchanged@2"]["candidates"] is None               # those of sweet are of another model
    for name in ("offline", "exchanged@2-offline"):                            # the c that it ranks by
        pathlib.Path(f"o/seed3/{name}-exchanged.jsonl").write_text(f'"sample": 0, {name}\n')
    monkeypatch.setattr(study, "run_step", lambda *_, **__: "")
    study.main([*words, "--out", "o"])
    assert pathlib.Path("o/seed3/exchanged@2-all.jsonl").read_text() == "offline\nexchanged@2-offline\n"


CRITICS = {                     # of the arm of this name (all-no-c has no-c's)
    "no-c": ("critic_sees_c", False), "no-norm": ("normalize", "none"), "regression": ("score", "regression"),
    "value": ("score", "value"), "published": ("normalize", "trajectory"), "blind": ("reference_sees_c", False),
    **{c: ("trajectories", f"o/seed1/offline-{c}.jsonl") for c in ("exchanged", "facts")}}


@pytest.mark.parametrize("domain", ["backend", "sql", "frontend", "real"])
def test_every_arm_of_the_table_plays(call, domain):
    arms = study.arms_of(study.read_domain(domain))[1:]
    commands = call(*arms, "--domain", domain, "--seeds", "1", "--set", "num_test=7", "samples=1", "dialogues=3200")
    assert {f"o/seed1/{arm}" for arm in arms} <= set(commands)
    for arm in arms:
        if (name := arm.removeprefix("all-")) in CRITICS:
            assert commands[f"o/seed1/{arm}"]["critic"] == f"o/seed1/critic-{name}"
            assert commands[f"o/seed1/critic-{name}"].items() >= {CRITICS[name]}
    assert commands[f"o/seed1/{arms[0]}.jsonl"]["samples"] == 1 and commands["o/seed1/test.jsonl"]["num_tasks"] == 7
    assert commands["o/seed1/mtdpo"]["epochs"] == (2 if domain in ("backend", "sql") else 1)         # of many dialogues


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_the_tables(call):
    call("rft", "--seeds", "5", "6", "--sizes", "80")
    assert rows_of("o/table.csv") == [{
        "method": "rft", "dialogues": "80", "round": "1", "n": "3", "success": "0.5", "rounds": "4.25",
        "trained_tokens": "10", "generated_tokens": "20", "low": "0.25", "high": "0.75"}]
    assert [list(row.values()) for row in rows_of("o/tasks.csv")] == [
        ["a", "f", sample, seed, "rft@80", success, rounds, "True", "answered"] for sample, seed, success, rounds in
        (("0", "5", "0.0", "3"), ("1", "5", "1.0", "3"), ("1", "6", "1.0", "4"))]
    call("base", "rft", "--seeds", "5", "6", "--rounds", "2")
    rounds = [(row["method"], row["round"]) for row in rows_of("o/table.csv")]
    assert rounds == [("base", ""), ("rft", "1"), ("rft", "2")]


def test_a_table_of_the_outcomes_of_tasks(tmp_path, capsys):
    rows = [f"t{number},f,{number},{seed},{arm},{float(arm == 'a' or number == 0)},3"
            for arm in "ab" for seed in (5, 6) for number in range(2)]
    (tmp_path / "tasks.csv").write_text("\n".join(["task_id,family,sample,seed,arm,success,rounds", *rows]))
    table.main([str(tmp_path / "tasks.csv"), "b"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["a", "4", "1.000", "[0.158,", "1.000]", "3.00", "+0.500", "[+0.000,", "+1.000]"]
    assert ["b", "-", "0.500", "0.500"] in lines
    with pytest.raises(InputError, match="no arm c, it has a, b"):
        table.main([str(tmp_path / "tasks.csv"), "c"])


def test_a_table_of_each_kind_is_drawn_and_the_same_each_time(tmp_path):
    (tmp_path / "rounds").write_text("dialogues,round,method,success,low,high\n320,1,sweet,.5,.4,.6\n"
                                     "320,2,sweet,.5,.4,.6\n,,base,.5,.4,.6\n")
    (tmp_path / "sizes").write_text("dialogues,method,success,low,high\n3200,sweet,.5,.4,.6\n80,sweet,.5,.4,.6\n"
                                    "80,mtdpo,.5,.4,.6\n,base,.5,.4,.6\n")
    for name, out in (("rounds", "rounds.svg"), ("sizes", "sizes.svg"), ("sizes", "again.svg")):
        plot.main(str(tmp_path / name), str(tmp_path / out))
    rounds, sizes, again = ((tmp_path / f"{name}.svg").read_text() for name in ("rounds", "sizes", "again"))
    for picture, texts in ((rounds, {"1", "2", "round of training", "sweet"}),
                           (sizes, {"80", "3,200", "dialogues of training", "sweet", "mtdpo"})):
        assert texts <= set(re.findall(r"<!-- (.*?) -->", picture))
    assert sizes == again


def test_what_is_unknown_is_refused():
    number = "must be NAME=NUMBER, with a number of [backend]"
    for words, line in (("sweet --domain pages", "--domain pages: must be one of backend, sql, frontend, real"),
                        ("mine", "mine: no such arm in scripts/recipes.toml, which has base, rft, mtdpo, sweet"),
                        ("rft --set dialogs=3", f"--set dialogs=3: {number}"),
                        ("rft --set num_test=few", f"--set num_test=few: {number}"),
                        ("rft --set base=3", f"--set base=3: {number}"),
                        ("rft --set chain=1", f"--set chain=1: {number}")):
        assert refused(study, *words.split()).startswith(line)


OWN = """[mine]
agents = "base new"
base = "models/tiny"
dialogues = 40
[mine.chain]
"train.jsonl" = "01_generate_tasks.py --num-tasks {num_train} --seed {seed}"
"offline.jsonl" = "02_rollout.py --tasks {train.jsonl} --agent {model}"
new = "04_train_policy.py --method rft --trajectories {offline.jsonl} --model {model}"
"test.jsonl" = "01_generate_tasks.py --split test"
"agent.jsonl" = "02_rollout.py --tasks {tasks} --agent {agent}"
report = "05_evaluate.py {files}"
"""


def test_a_table_of_one_s_own_and_what_it_lacks(call, tmp_path, monkeypatch):
    recipes = tmp_path / "recipes"
    monkeypatch.setattr(study, "RECIPES", str(recipes))
    recipes.write_text(OWN)
    commands = call("--domain", "mine", "--chain", "1")
    assert commands["o/train.jsonl"]["num_tasks"] == 10 and commands["o/new.jsonl"]["agent"] == "o/new"
    assert "o/report" in call("new", "--domain", "mine", "--seeds", "1", "2")
    for key in ("agents", "base", "dialogues", '"test.jsonl"', '"offline.jsonl"', '"agent.jsonl"', "report"):
        recipes.write_text("".join(line for line in OWN.splitlines(True) if not line.startswith(f"{key} =")))
        name = key.strip('"')
        assert refused(study, "--domain", "mine", "--chain", "1") == (
            f"{recipes}: [mine] needs {name}, and has no key or output of this name")
    recipes.write_text(OWN)
    assert refused(study, "--domain", "mine", "--split", "validation").startswith(f"{recipes}: [mine] needs validation")
    recipes.write_text(f"{OWN}broken")
    assert refused(study, "--domain", "mine").startswith(f"{recipes}: Expected '='")


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
        assert (f"starts (log: {out}.log)" in printed) == ("    python -c 'import os" in printed)     # to be copied
        return bool(printed)
    assert has_run() and not has_run()
    assert has_run("--more") and not has_run("--more")
    out.unlink()
    assert has_run("--more")
    os.utime(read, (2e9, 2e9))
    assert has_run("--more")


def test_other_arms_are_played_where_one_fails(tmp_path, monkeypatch):
    run_step = mock.Mock(side_effect=lambda out, *_: out.name != "rft" or sys.exit(1))
    monkeypatch.setattr(study, "run_step", run_step)
    with pytest.raises(SystemExit) as error:
        study.main(["rft", "mtdpo", "--seeds", "1", "--out", str(tmp_path)])
    outputs = [call.args[0].name for call in run_step.call_args_list]
    assert error.value.code == 1
    assert "mtdpo.jsonl" in outputs and "rft.jsonl" not in outputs and "report" not in outputs


@pytest.mark.parametrize("kind", ["exchanged", "facts"])
def test_another_c_for_the_critic(tmp_path, kind):
    """Dialogues, rewards and names stay; the reference is another one of the family, or says what there is to ask."""
    stage(1).main(["--num-tasks", "24", "--out", str(tmp_path / "tasks")])
    rows = [trajectory(task["task_id"], "pass", task=task, reward=0.0) for task in read(tmp_path / "tasks")]
    path, out = write(tmp_path / "rows", rows), tmp_path / "out"
    trajectories = read_trajectories(path)
    references = {row["task_id"]: (row["task"]["family"], row["task"]["ground_truth"]) for row in trajectories}
    families = [family for family, _ in references.values()]
    assert 1 < len(set(families)) < len(families)
    change_c.main(["--kind", kind, "--trajectories", str(path), "--out", str(out)])
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
        assert all(line.removeprefix(f"# {fact['topic']}: ") in (fact["code"], fact["replies"][0])
                   for line, fact in zip(added, hidden))
    del rows[0]["task"]["family"], rows[0]["task"]["facts"]
    for rows_in, line in ((path, "rows: is the input"), (write(tmp_path / "out", rows), f"out: --kind {kind} needs")):
        with pytest.raises(InputError, match=line):
            change_c.main(["--kind", kind, "--trajectories", str(rows_in), "--out", str(rows_in)])
