"""Mistakes in files, flags and folders: each ends in one line that names what is wrong, and nothing is lost."""
import copy
import functools
import json
import os
import random
import shutil

import pytest

import colbench
import common
from colbench import backend, ColBenchError, sql
from conftest import fork, Partial, read, ROOT, run, stage
from lib import runtime, training
from lib.runtime import InputError

MODEL = str(ROOT / "models" / "tiny")
DEEP = "[" * 5000 + "]" * 5000


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with tasks.jsonl and demos.jsonl, of the scripted agent; a task's first dialogue is a success."""
    folder = tmp_path_factory.mktemp("data")
    stage(1).main(["--num-tasks", "12", "--out", str(folder / "tasks.jsonl")])
    stage(2).main(["--tasks", str(folder / "tasks.jsonl"), "--agent", "script-informed", "--samples", "3", "--out",
                   str(folder / "demos.jsonl")])
    written(folder / "demos.jsonl", *({**row, "reward": float(row["sample"] == 0)}
                                      for row in read(folder / "demos.jsonl")))
    return folder


@functools.cache
def template_task(name):
    domain = colbench.DOMAINS[name]
    rng = random.Random(0)
    while True:
        task = domain.make_task(rng, sorted(domain.FAMILIES)[0], "none", lambda task_id: None)
        if isinstance(task, dict):
            return task


def line_of(work, *arguments):
    """The one line with which work(*arguments) ends, as run_stage prints it."""
    with pytest.raises((InputError, OSError, ColBenchError)) as caught:
        work(*arguments)
    line = runtime.error_text(caught.value)
    assert line and "\n" not in line and len(line) < 2000
    return line


def stage_line(number, *arguments):
    return line_of(stage(number).main, [str(argument) for argument in arguments])


def changed(value, path, new):
    """A copy of a value with another one at a path, ("facts", 0, "topic"); new `...`: without it."""
    value = copy.deepcopy(value)
    place = value
    for key in path[:-1]:
        place = place[key]
    if new is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = new
    return value


def written(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


# ---------------------------------------------------------------------------------------------------------------------
# files

@pytest.mark.parametrize("text, message", [
    ("", "no rows in it"), ("[]", "a list, not an object"), ("{", "not JSON"), (DEEP, "a"),
    ('{"sample": ' + "9" * 4400 + "}", "not JSON that can be read"), ("NaN", "a float, not an object"),
    ('{"a": 1} {"b": 2}', "not JSON (Extra data")])
def test_json(tmp_path, text, message):
    path = written(tmp_path / "rows.jsonl", text)
    for reader in (common.read_tasks, common.read_trajectories):
        line = line_of(reader, path)
        assert line.startswith(f"{path}:1: " if text else f"{path}: ") and message in line, line


TASKS = [("backend", *case) for case in [
    (("problem_description",), 1, '"problem_description" is a int, not a str'),
    (("ground_truth",), ..., 'missing "ground_truth"'),
    (("test_cases",), ["f(1)"], '"test_cases" is a list, not a dict'),
    (("test_cases", "test1"), 5, 'test_cases: "test1" is a int, not a str'),
    (("task_id",), 5, '"task_id" is a int, not a str'),
    (("facts",), [1], "facts: item 0 is a int, not an object"),
    (("facts", 0, "questions"), [1], "facts: item 0: questions: item 0 is a int, not a str"),
    (("template",), "{nothing}", '"template" cannot be filled'),
]] + [("sql", *case) for case in [
    (("databases",), {}, '"databases" is a dict, not a list'),
    (("facts", 0, "by"), "guess", "\"by\" is 'guess', not 'ask' or 'look'"),
    (("idle_looks",), ..., 'missing "idle_looks"'),
]] + [("frontend", *case) for case in [
    (("slots",), {}, '"slots" is a dict, not a list'),
    (("slots", 0, "names"), None, '"names" is a NoneType'),
    (("template",), 3, '"template" is a int'),
]]


@pytest.mark.parametrize("name, path, new, message", TASKS, ids=range(len(TASKS)))
def test_tasks(tmp_path, name, path, new, message):
    good = template_task(name)
    file = written(tmp_path / "t.jsonl", good, changed(good, path, new))
    line = line_of(common.read_tasks, file)
    assert line.startswith(f"{file}:2: ") and message in line, line


def test_what_the_scripted_agent_lacks(tmp_path):
    file = written(tmp_path / "t.jsonl", changed(template_task("backend"), ("template",), ...))
    line = stage_line(2, "--tasks", file, "--agent", "script", "--out", tmp_path / "o")
    assert line.startswith(f'{file}:1: missing "template"')


TRAJECTORIES = [
    (("task",), [], '"task" is a list, not a dict'), (("task", "test_cases"), 1, "task: "),
    (("dialogue_history",), [], 'no turn of role "assistant"'),
    (("dialogue_history", 0), "hi", "dialogue_history: item 0 is a str, not an object"),
    (("dialogue_history", 0, "role"), "system", "not 'user' or 'assistant'"),
    (("dialogue_history", 1, "content"), None, 'dialogue_history: item 1: "content" is a NoneType'),
    (("dialogue_history", 1, "output_ids"), [1.5], "not a list of token ids"),
    (("answer",), ..., 'missing "answer"'),
    (("reward",), "1", '"reward" is a str, not a number'), (("reward",), float("nan"), '"reward" is nan'),
    (("sample",), "0", '"sample" is a str, not a int'), (("max_rounds",), 0, '"max_rounds" is 0')]


@pytest.mark.parametrize("path, new, message", TRAJECTORIES, ids=range(len(TRAJECTORIES)))
def test_trajectories(data, tmp_path, path, new, message):
    good = read(data / "demos.jsonl")[0]
    file = written(tmp_path / "t.jsonl", good, changed({**good, "sample": 9}, path, new))
    line = line_of(common.read_trajectories, file)
    assert line.startswith(f"{file}:2: ") and message in line, line


@pytest.mark.parametrize("text", ["", "[]", '{"head": 1}', '{"head": "lm", "normalize": "x"}'])
def test_critic_json(tmp_path, text):
    (tmp_path / "critic.json").write_text(text)
    assert line_of(common.read_critic, tmp_path, None, backend).startswith(f"{tmp_path / 'critic.json'}: ")


# ---------------------------------------------------------------------------------------------------------------------
# flags

TRAIN = ["--trajectories", "t", "--model", "m", "--out", "o"]
FLAGS = [
    *((3, TRAIN, *flag) for flag in [
        ("--lr", "inf"), ("--lr", "-1"), ("--lr", "x"), ("--beta", "nan"), ("--held-out-frac", "1.1"),
        ("--seed", "1.5"), ("--batch-size", "0"), ("--lora", "0"), ("--model", ""), ("--reference-sees-c", "maybe")]),
    *((4, ["--method", "rft", *TRAIN], *flag) for flag in [
        ("--data-frac", "2"), ("--temperature", "nan"), ("--num-candidates", "100000000"), ("--critic", "")]),
    ("distill", TRAIN, "--divergence", "both"),
    *((2, ["--tasks", "t", "--agent", "script", "--out", "o"], *flag) for flag in [
        ("--agent", ""), ("--temperature", "-1"), ("--chat-template-args", "[]"), ("--samples", "x")]),
    *((1, ["--out", "o"], *flag) for flag in [("--num-tasks", "0"), ("--out", "")]),
    (5, ["a=b", "--out", "o"], "--baseline", ""), (5, ["--out", "o"], "a/b=c"), (5, ["--out", "o"], "a")]


@pytest.mark.parametrize("program, others, flag", [(program, others, flag) for program, others, *flag in FLAGS],
                         ids=range(len(FLAGS)))
def test_flags(capsys, program, others, flag):
    module = stage(program) if isinstance(program, int) else fork(program)
    with pytest.raises(SystemExit) as ended:
        module.parse_args([*others, *flag])
    line = capsys.readouterr().err
    assert ended.value.code == 2 and line.count("\n") == 1 and line.startswith("error: ")
    assert flag[0] in line and len(line) < 300


# ---------------------------------------------------------------------------------------------------------------------
# outputs: what is there already is not lost

@pytest.fixture(scope="module")
def report(data, tmp_path_factory):
    """A folder of 05 with a file of the user's in it."""
    out = tmp_path_factory.mktemp("report") / "R"
    stage(5).main([f"a={data / 'demos.jsonl'}", "--out", str(out)])
    shutil.copy(data / "demos.jsonl", out / "mine.jsonl")
    return out


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
@pytest.mark.parametrize("name", ["R/mine.jsonl", "./R/../R/mine.jsonl", "link/mine.jsonl"])
def test_an_input_below_the_output_is_refused(report, tmp_path, monkeypatch, name, overwrite):
    shutil.copytree(report, tmp_path / "R")
    monkeypatch.chdir(tmp_path)
    os.symlink("R", "link")
    before = contents(tmp_path)
    for number, arguments in ((5, [f"a={name}"]), (3, ["--trajectories", name, "--model", MODEL])):
        line = stage_line(number, *arguments, "--out", "R", *overwrite)
        assert name in line and "lies in --out R" in line and contents(tmp_path) == before


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
def test_an_input_that_is_the_output_is_refused(data, tmp_path, overwrite):
    tasks = tmp_path / "t.jsonl"
    tasks.write_bytes((data / "tasks.jsonl").read_bytes())
    line = stage_line(2, "--tasks", tasks, "--agent", "script", "--out", tasks, *overwrite)
    assert "is an input of this command" in line and tasks.read_bytes() == (data / "tasks.jsonl").read_bytes()


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
@pytest.mark.parametrize("number, kind", [(5, "folder"), (1, "file")])
def test_what_no_run_made_is_not_replaced(data, tmp_path, number, kind, overwrite):
    mine = tmp_path / "mine"
    if kind == "folder":
        mine.mkdir()
        (mine / "thesis.tex").write_text("x")
    else:
        mine.write_text("x")
    before = contents(tmp_path)
    arguments = [f"a={data / 'demos.jsonl'}"] if number == 5 else ["--num-tasks", 1]
    assert "no run made it" in stage_line(number, *arguments, "--out", mine, *overwrite)
    assert contents(tmp_path) == before


def test_overwrite_does_not_replace_the_output_of_another_stage(data, tmp_path):
    """05 --out at a trained model's folder, by mistake: the model stays."""
    (tmp_path / "args.json").write_text(json.dumps({"stage": "04_train_policy.py", "args": {}, "inputs": {}}))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    line = stage_line(5, f"a={data / 'demos.jsonl'}", "--out", tmp_path, "--overwrite")
    assert "04_train_policy.py made it" in line and (tmp_path / "model.safetensors").read_bytes() == b"weights"


def test_an_output_is_removed_only_after_the_inputs_are_read(report, data, tmp_path):
    shutil.copytree(report, tmp_path / "R")
    bad = written(tmp_path / "bad.jsonl", "{}")
    stage_line(5, f"a={bad}", "--out", tmp_path / "R", "--overwrite")
    assert contents(tmp_path / "R") == contents(report)
    stage(5).main([f"b={data / 'demos.jsonl'}", "--out", str(tmp_path / "R"), "--overwrite"])
    assert {"scored/b.jsonl"} == {name for name in contents(tmp_path / "R") if name.startswith("scored")}


def test_another_command_is_refused_unless_nothing_is_there_yet(data, tmp_path):
    first = ["--tasks", data / "tasks.jsonl", "--agent", "script", "--out", tmp_path / "o"]
    stage(2).main([str(argument) for argument in first])
    line = stage_line(2, *first, "--seed", 1)
    assert "made with --seed 0, now 1; choose another --out or add --overwrite" in line
    (tmp_path / "o").unlink()
    stage(2).main([str(argument) for argument in (*first, "--seed", 1)])        # nothing was lost
    assert json.loads((tmp_path / "o.args.json").read_text())["args"]["seed"] == 1


@pytest.mark.parametrize("number, out", [(1, "/proc/x/t.jsonl"), (5, "file/R"), (5, "file"), (1, "folder"),
                                         (5, "x" * 300)])
def test_places_where_nothing_can_be_written(data, tmp_path, monkeypatch, number, out):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    arguments = [f"a={data / 'demos.jsonl'}"] if number == 5 else ["--num-tasks", 1]
    stage_line(number, *arguments, "--out", out)
    assert contents(tmp_path) == {"file": b"mine"}


def test_the_exit_status_of_what_the_system_refuses():
    process = run("01_generate_tasks.py", "--num-tasks", 1, "--out", "/proc/x/t.jsonl")
    assert process.returncode == 2 and process.stderr.startswith("error: /proc/x")
    assert process.stderr.count("\n") == 1


def test_a_run_goes_on_with_its_own_partial_file(data, tmp_path):
    arguments = ["--tasks", str(data / "tasks.jsonl"), "--agent", "script", "--out", str(tmp_path / "o")]
    stage(2).main(arguments)
    lines = (tmp_path / "o").read_text().splitlines(True)
    Partial(tmp_path / "o").write_text(f"3 {lines[5]}")
    (tmp_path / "o").unlink()
    stage(2).main(arguments)
    assert (tmp_path / "o").read_text().splitlines(True) == [*lines[:3], lines[5], *lines[4:]]


# ---------------------------------------------------------------------------------------------------------------------
# losses that are no numbers

BREAKING = [
    (3, ["--lr", 1000, "--max-steps", 6]), (3, ["--lr", 1000, "--max-steps", 6, "--head", "value"]),
    (4, ["--method", "mtdpo", "--lr", 1000, "--max-steps", 6]),
    (4, ["--method", "sft", "--lr", 1000, "--max-steps", 6])]


@pytest.fixture
def broken(monkeypatch):
    """Training whose second step finds a NaN in a weight, as after an overflow."""
    original = training.learning_rate

    def learning_rate(step, *rest):
        return float("nan") if step == 0 else original(step, *rest)
    monkeypatch.setattr(training, "learning_rate", learning_rate)


@pytest.mark.parametrize("number, flags", BREAKING)
def test_a_loss_that_is_not_finite_ends_the_run(data, tmp_path, broken, number, flags):
    out = tmp_path / "out"
    line = stage_line(number, "--trajectories", data / "demos.jsonl", "--model", MODEL, *flags, "--out", out)
    assert f"{out}: step 2 of 6: the loss is nan" in line and "no model is written" in line
    assert any(task["task_id"] in line for task in read(data / "tasks.jsonl"))
    assert not list(out.glob("*.safetensors")) and not (out / "COMPLETED").exists()


def test_all_ranks_end(data, tmp_path):
    """A model with a NaN in it: a real run, on two ranks."""
    from safetensors.torch import load_file, save_file
    shutil.copytree(MODEL, tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    process = run("03_train_critic.py", "--trajectories", data / "demos.jsonl", "--model", tmp_path / "model",
                  "--max-steps", 2, "--out", tmp_path / "out", ranks=2)
    assert process.returncode == 2 and process.stderr.splitlines()[-1].startswith("error: ")
    assert "step 1 of 2: the loss is nan" in process.stderr
    assert not list((tmp_path / "out").glob("*.safetensors"))


# ---------------------------------------------------------------------------------------------------------------------
# what is asked of all turns at once

def long_history(task, num_turns, seed=0):
    rng = random.Random(seed)
    history = [{"role": "user", "content": task["problem_description"]}]
    for number in range(num_turns):
        fact = rng.choice(task["facts"])
        look = f"{sql.LOOK} {rng.choice(fact['looks'])}" if fact.get("looks") and number % 2 else None
        history += [{"role": "assistant", "content": look or rng.choice([*fact["questions"], "Hm?"])},
                    {"role": "user", "content": "a | b\n1 | 2" if look else rng.choice(fact["replies"])}]
    history.append({"role": "assistant", "content": f"{backend.MARKER}\n{task['ground_truth']}"})
    return history


@pytest.mark.parametrize("name", ["backend", "sql"])
@pytest.mark.parametrize("seed", range(3))
def test_all_turns_at_once_are_as_one_after_the_other(name, seed):
    task, domain = template_task(name), colbench.DOMAINS[name]
    history = long_history(task, 12, seed)
    agent = [i for i, turn in enumerate(history) if turn["role"] == "assistant"]
    assert domain.turn_kinds(task, history) == [domain.turn_kind(task, history[:i], history[i]["content"])
                                                for i in agent]
    assert domain.facts_by_turn(task, history) == [
        {n for n, (_, is_known) in enumerate(domain.facts(task, history[:i])) if is_known}
        for i in range(len(history) + 1)]
