"""Mistakes in files, flags and folders: each ends in one line that names what is wrong, and nothing is lost."""
import copy
import functools
import importlib
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys

import pytest

import colbench
from colbench import ColBenchError
from compare import set_weights, weights
from conftest import BASE, call, fork, read, refused, ROOT, run, stage, write
from lib import training
from lib.data import read_tasks, read_trajectories
from lib.runtime import InputError


@functools.cache
def template_task(name):
    domain = colbench.DOMAINS[name]
    rng = random.Random(0)
    while True:
        task = domain.make_task(rng, sorted(domain.FAMILIES)[0], "none", lambda task_id: None)
        if isinstance(task, dict):
            return task


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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


# --- files

HALF_TASK, HALF_DIALOGUE = ("HALF_TASK:2: not JSON (", "HALF_DIALOGUE:2: not JSON (")
MISTAKES = {                    # {stage and flags: how the line begins}
    "1 --check HALF_TASK": HALF_TASK, "1 --source colbench --path HALF_TASK": HALF_TASK,
    "1 --source colbench --trajectories --path HALF_DIALOGUE": HALF_DIALOGUE,
    "2 --agent script --tasks HALF_TASK": HALF_TASK,
    "2 --agent MODEL --branch 1 --max-rounds 10 --tasks HALF_DIALOGUE": HALF_DIALOGUE,
    "3 --model MODEL --trajectories HALF_DIALOGUE": HALF_DIALOGUE,
    "4 --method sft --model MODEL --trajectories HALF_DIALOGUE": HALF_DIALOGUE, "5 a=HALF_DIALOGUE": HALF_DIALOGUE,
    "2 --agent script --tasks PLAIN": 'PLAIN:1: missing "template"',
    "2 --agent script --tasks DEMOS": "DEMOS:1: a dialogue, not a task; 01_generate_tasks.py makes tasks",
    "3 --model MODEL --trajectories TASKS": "TASKS:1: a task, not a dialogue; 02_rollout.py makes dialogues of tasks",
    "2 --tasks TASKS --agent models/tinny": "models/tinny: no such folder",
    "3 --trajectories DEMOS --model smolm2": "smolm2: no model of this name",
    "2 --tasks TASKS --agent MODEL --simulator rule": "rule: no model of this name",
    "3 --trajectories DEMOS --model DATA/rft": "DATA/rft: no such folder",
    "3 --trajectories DEMOS --model nobody/such": "nobody/such: no model of this name",
    "3 --trajectories DEMOS --model tests": "tests: no model of this name",
    "2 --tasks TASKS --agent ./nowhere": "./nowhere: no such folder",
    "2 --tasks TASKS --agent MODEL --system-prompt NONE": "NONE: no such file or directory",
    "4 --method sweet --trajectories DEMOS --model MODEL --critic untrained --reference-sees-c yes":
        "--critic untrained: scores every action 0 with a reference that sees c",
    "5 a=DATA": "DATA: is a directory", "1 --check NONE": "NONE: no such file or directory",
    "4 --method sweet --trajectories DEMOS --model MODEL --critic MODEL/config.json":
        "MODEL/config.json: a file; a critic is a folder of 03_train_critic.py, MODEL perhaps"}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes(data, tmp_path, words):
    """HALF…: a file whose second line was cut. PLAIN: a task that the scripted agent cannot solve."""
    for name, rows in (("HALF_TASK", "tasks"), ("HALF_DIALOGUE", "demos")):
        lines = (data / f"{rows}.jsonl").read_bytes().splitlines(True)
        (tmp_path / name).write_bytes(b"".join(lines[:2])[:-40])
    write(tmp_path / "PLAIN", [changed(template_task("backend"), ("template",), ...)])
    before = contents(tmp_path)

    def with_paths(text):
        for name, path in (("DEMOS", data / "demos.jsonl"), ("TASKS", data / "tasks.jsonl"), ("DATA", data),
                           ("NONE", tmp_path / "none"), ("MODEL", BASE), ("HALF_", tmp_path / "HALF_"),
                           ("PLAIN", tmp_path / "PLAIN")):
            text = text.replace(name, str(path))
        return text
    number, *flags = with_paths(words).split()
    assert refused(int(number), *flags, "--out", tmp_path / "out").startswith(with_paths(MISTAKES[words]))
    assert contents(tmp_path) == before


OWN = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "reward": 1}
ROWS = [("tasks", None, text, message) for text, message in (                       # (what, path, its value, the line)
    ("NaN", "a float, not an object"), ("[" * 5000 + "]" * 5000, "not JSON"),
    ('{"sample": ' + "9" * 4400 + "}", "not JSON"), ('{"a": 1} {"b": 2}', "not JSON (Extra data")
)] + [("backend", *case) for case in (
    (("problem_description",), 1, '"problem_description" is a int, not a str'),
    (("ground_truth",), ..., 'missing "ground_truth"'),
    (("test_cases",), ["f(1)"], '"test_cases" is a list, not a dict'),
    (("test_cases", "test1"), 5, 'test_cases: "test1" is a int, not a str'),
    (("task_id",), 5, '"task_id" is a int, not a str'),
    (("facts",), [1], "facts: item 0 is a int, not an object"),
    (("facts", 0, "questions"), [1], "facts: item 0: questions: item 0 is a int, not a str"),
    (("template",), "{nothing}", '"template" cannot be filled'),
)] + [("sql", *case) for case in (
    (("schema",), 1, '"schema" is a int, not a str'),
    (("databases",), {}, '"databases" is a dict, not a list'), (("databases",), [{}], "not of 2 or more"),
    (("databases",), [{}, {"a": 1}], '"a" is a int, not a list'), (("databases", 1), [], "a list, not an object"),
    (("facts", 0, "slot"), ..., 'facts: item 0: missing "slot"'),
    (("facts", 0, "by"), "look", 'facts: item 0: missing "looks"'),
    (("facts", 0, "by"), "guess", "\"by\" is 'guess', not 'ask' or 'look'"),
    (("idle_looks",), ..., 'missing "idle_looks"'),
)] + [("frontend", *case) for case in (
    (("slots",), {}, '"slots" is a dict, not a list'),
    (("slots", 0, "names"), None, '"names" is a NoneType'),
    (("template",), 3, '"template" is a int'),
)] + [("demos", *case) for case in (
    (("task",), [], '"task" is a list, not a dict'), (("task", "test_cases"), 1, "task: "),
    (("dialogue_history",), [], 'no turn of role "assistant"'),
    (("dialogue_history", 0), "hi", "dialogue_history: item 0 is a str, not an object"),
    (("dialogue_history", 0, "role"), "system", "not 'user' or 'assistant'"),
    (("dialogue_history", 1, "content"), None, 'dialogue_history: item 1: "content" is a NoneType'),
    (("dialogue_history", 1, "output_ids"), [1.5], "not a list of token ids"),
    (("answer",), ..., 'missing "answer"'),
    (("reward",), "1", '"reward" is a str, not a number'), (("reward",), float("nan"), '"reward" is nan'),
    (("sample",), "0", '"sample" is a str, not a int'), (("max_rounds",), 0, '"max_rounds" is 0'),
    (("sample",), 10 ** 30, '"sample" is '), (("image",), 5, '"image" is a int'),
    (("dialogue_history", 2, "tool"), "x", '"tool" is a str'),
    (("dialogue_history", 1, "truncated"), {}, '"truncated" is a dict'),
    (("task", "test_cases"), ..., 'missing "test_cases", or what a task of another domain has (backend, frontend, '),
    (None, OWN, "task: a task of another domain"), (None, {**OWN, "c": 1}, '"c" is a int'),
    (None, {**OWN, "reward": "good"}, '"reward" is a str'),
    (None, {**OWN, "messages": []}, '"messages" must begin with'),
    (None, {**OWN, "messages": OWN["messages"][1:]}, '"messages" must begin with'),
    (None, {**OWN, "messages": [{"role": "tool", "content": "a"}]}, 'messages: item 0: "role"'))]


@pytest.mark.parametrize("what, path, new, message", ROWS, ids=range(len(ROWS)))
def test_a_second_row_that_is_none_is_named(data, tmp_path, what, path, new, message):
    name = "demos" if what == "demos" else "tasks"
    good = template_task(what) if what in colbench.DOMAINS else read(data / f"{name}.jsonl")[0]
    bad = changed({**good, "sample": 9}, path, new) if path else new
    file = write(tmp_path / "t.jsonl", [good, bad])
    with pytest.raises((InputError, ColBenchError)) as error:
        (read_trajectories if what == "demos" else read_tasks)(file)
    line = str(error.value)
    assert line.startswith(f"{file}:2: ") and message in line and len(line) < 2000


NO_SIGHT = ('{"visual": true, "head": "value", "normalize": "none", "privileged": true, "reference": "r"}',
            ": a critic that sees cannot rank functions, which have nothing to see")
SWEET = ["--method", "sweet", "--model", BASE, "--trajectories", "DEMOS"]


@pytest.mark.parametrize("number, words, text, message", [
    (4, SWEET, "", "critic.json: not JSON"), (4, SWEET, "[]", "critic.json: a list"),
    (4, SWEET, '{"head": 1}', "critic.json: missing"), (4, SWEET, None, ": no critic.json"),
    (4, SWEET, '{"head": "lm", "normalize": "x"}', "critic.json: "), (4, SWEET, *NO_SIGHT),
    (2, ["--agent", BASE, "--best-of", 2, "--tasks", "TASKS"], *NO_SIGHT), (5, ["a=DEMOS"], *NO_SIGHT)])
def test_critics(data, tmp_path, number, words, text, message):
    if text is not None:
        (tmp_path / "critic.json").write_text(text)
    text_of_words = " ".join(map(str, words)).replace("DEMOS", f"{data}/demos.jsonl")
    words = text_of_words.replace("TASKS", f"{data}/tasks.jsonl").split()
    line = refused(number, *words, "--critic", tmp_path, "--out", tmp_path / "out")
    assert line.startswith(str(tmp_path)) and message in line, line
    assert contents(tmp_path) == ({} if text is None else {"critic.json": text.encode()})


def test_examples_that_cannot_be_learned_from(data, tmp_path):
    rows = read(data / "demos.jsonl")
    lost = write(tmp_path / "lost", [{**row, "reward": 0.0} for row in rows])
    unscored = write(tmp_path / "unscored", [{key: value for key, value in rows[0].items() if key != "reward"}])
    demos, before = data / "demos.jsonl", contents(tmp_path)
    for path, number, words, message in (
            (lost, 3, [], r"no trajectory pairs: .* \(all rewards are 0\); roll out more"),
            (unscored, 3, [], "no trajectory pairs"),
            (lost, 4, ["--method", "mtdpo"], "no task has both"), (lost, 4, ["--method", "rft"], "no successful"),
            (demos, 3, ["--max-length", 20], r"no examples to train on: all \d+ are longer than --max-length 20"),
            (demos, 3, ["--held-out-frac", 1], r"no examples to train on: all \d+ pairs are of tasks that "
             "--held-out-frac 1.0 keeps apart")):
        line = refused(number, *words, "--trajectories", path, "--model", BASE, "--out", tmp_path / "out")
        assert re.match(rf"{re.escape(str(path))}: .*{message}", line), line
    assert contents(tmp_path) == before


def test_too_many_tasks_or_a_dry_run_of_a_fork(tmp_path, monkeypatch):
    monkeypatch.setattr(colbench, "MOST_DRAWS_IN_VAIN", 3)
    line = refused(1, "--num-tasks", 9 ** 6, "--split", "test", "--out", tmp_path / "out")
    assert line.startswith("--num-tasks 531441: there are only ")
    assert refused(fork("gain"), *TRAIN.split(), "--dry-run", 2) == "--dry-run goes with 04_train_policy.py"
    assert contents(tmp_path) == {}


# --- flags

TRAIN = "--trajectories t --model m --out o"
REQUIRED = {1: "--out o", 2: "--tasks t --agent script --out o", 3: TRAIN, 4: f"--method rft {TRAIN}",
            5: "a=b --out o", "critics": "--trajectories t --out o"}
FLAGS = {                       # {program: flags, or (flags, what the line says)}; else the line names the flag
    1: ["--num-tasks 0", "--out ''", "--source llm", "--model smollm2", "--seeds x", "--max-attempts 3",
        ("--trajectories", "needs --source colbench"),
        ("--source llm --model smollm2 --path x", "--path needs")],
    2: ["--agent ''", "--temperature -1", "--chat-template-args []", "--chat-template-args '{\"person\": {}}'",
        "--samples x", "--system-prompt f", "--branch 4", "--best-of 2",
        ("--agent a --best-of 2", "--critic DIR or judge:MODEL"),
        ("--agent a --branch 4 --best-of 2 --critic c", "--branch needs"),
        ("--reference-sees-c no", "--reference-sees-c goes with --best-of")],
    3: ["--lr inf", "--lr -1", "--lr x", "--beta nan", "--held-out-frac 1.1", "--seed 1.5", "--batch-size 0",
        "--lora 0", "--model ''", "--reference-sees-c maybe",
        ("--no-privileged --reference-sees-c no", "--reference-sees-c no goes with --head lm"),
        ("--head value --reference-sees-c no", "--reference-sees-c no goes with --head lm")],
    4: ["--data-frac 2", "--temperature nan", "--num-candidates 100000000", "--temperature 1e-40", "--critic ''"],
    5: ["--baseline ''", "--baseline c", "a/b=c", "a", ("a=x", "a"),
        ("--reference-sees-c no", "--reference-sees-c goes with --critic")],
    "critics": [("", "one of the arguments --gates --critic is required"), "--gates ''"],
    "distill": ["--divergence both", "--method sft"],
    "grpo": [("--signed", "--signed and --reference-sees-c go with --critic")],
    "answers": [("", "--critic")]}


@pytest.mark.parametrize("program, flag", [(program, flag) for program, flags in FLAGS.items() for flag in flags])
def test_flags(capsys, program, flag):
    words, message = flag if isinstance(flag, tuple) else (flag, flag.split()[0])
    if program == "critics":
        module = importlib.import_module("scripts.critics")
    else:
        module = stage(program) if isinstance(program, int) else fork(program)
    with pytest.raises(SystemExit) as ended:
        module.parse_args(shlex.split(f"{REQUIRED.get(program, TRAIN)} {words}"))
    line = capsys.readouterr().err
    assert ended.value.code == 2 and line.count("\n") == 1 and line.startswith("error: ")
    assert message in line and len(line) < 300


@pytest.mark.parametrize("number, words, line", [
    (1, "--nonsense", "unknown flag --nonsense; --help shows all"),
    (3, "--modle=m --foo 2", "unknown flag --modle, --foo; did you mean --model?")])
def test_an_unknown_flag_is_named_where_required_ones_are_missing(capsys, number, words, line):
    with pytest.raises(SystemExit) as ended:
        stage(number).parse_args(words.split())
    assert ended.value.code == 2 and capsys.readouterr().err == f"error: {line}\n"


@pytest.mark.parametrize("path", sorted(ROOT.glob("0*.py")), ids=lambda path: path.name)
def test_a_python_without_torch_is_told_how_to_set_up(path):
    process = subprocess.run([sys.executable, "-S", path], capture_output=True, text=True)
    assert process.returncode == 2 and process.stdout == ""
    assert re.fullmatch("error: this Python has no torch; .*\n", process.stderr)


# --- outputs: what is there already is not lost

@pytest.fixture
def outputs(data, tmp_path, monkeypatch):
    """A folder, the working folder now, with R (of 05, with a file of the user's in it), a link to it, t.jsonl (of 01),
    a model that 04 has made, and a file and a folder of the user's."""
    monkeypatch.chdir(tmp_path)
    call(5, f"a={data / 'demos.jsonl'}", "--out", "R")
    call(1, "--num-tasks", 2, "--out", "t.jsonl")
    shutil.copy(data / "demos.jsonl", "R/mine.jsonl")
    os.symlink("R", "link")
    for name, content in (("model/args.json", '{"stage": "04_train_policy.py", "args": {}, "inputs": {}}'),
                          ("model/model.safetensors", "weights"), ("folder/thesis.tex", "x"), ("file", "x"),
                          ("bad.jsonl", "{}\n")):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    return tmp_path


KEPT = [                        # stage, its input and output, what the line says
    *((5, f"a={name}", "R", f"{name}: is an input of this command and lies in --out R")
      for name in ("R/mine.jsonl", "./R/../R/mine.jsonl", "link/mine.jsonl")),
    (3, f"--model {BASE} --trajectories R/mine.jsonl", "R", "R/mine.jsonl: is an input of this command and lies in"),
    (2, "--agent script --tasks t.jsonl", "t.jsonl", "t.jsonl: is an input of this command"),
    (5, "a=DEMOS", "folder", "folder: no run made it"), (1, "--num-tasks 1", "file", "file: no run made it"),
    (5, "a=DEMOS", "model", "model: 04_train_policy.py made it"),
    (5, "a=bad.jsonl", "R", 'bad.jsonl:1: missing "task"'),          # before anything is removed
    (1, "--num-tasks 1", "/proc/x/t.jsonl", "/proc/x: "), (1, "--num-tasks 1", "folder", "folder: is a folder; choose"),
    (5, "a=DEMOS", "file/R", "file"), (5, "a=DEMOS", "file", "file: is no folder; choose"),
    (5, "a=DEMOS", "x" * 300, "xxx")]


def test_an_output_that_is_no_place_for_it_stays_as_it_is(outputs, data):
    before = contents(outputs)
    for number, words, out, message in KEPT:
        for overwrite in ([], ["--overwrite"]):
            words = words.replace("DEMOS", str(data / "demos.jsonl"))
            line = refused(number, *words.split(), "--out", out, *overwrite)
            assert line.startswith(message) and contents(outputs) == before, line


def test_overwrite_removes_what_another_command_made(outputs, data):
    call(5, f"b={data / 'demos.jsonl'}", "--out", "R", "--overwrite")
    assert {"R/scored/b.jsonl"} == {name for name in contents(outputs) if name.startswith("R/scored")}


def test_another_command_is_refused_unless_nothing_is_there_yet(data, tmp_path):
    first = ["--tasks", data / "tasks.jsonl", "--agent", "script", "--out", tmp_path / "o"]
    call(2, *first)
    line = refused(2, *first, "--seed", 1)
    assert "made with another seed (0, now 1); choose another --out or add --overwrite" in line
    (tmp_path / "o").unlink()
    call(2, *first, "--seed", 1)                                     # nothing was lost
    assert json.loads((tmp_path / "o.args.json").read_text())["args"]["seed"] == 1


# --- losses that are no numbers

def test_a_loss_that_is_not_finite_after_an_update_ends_the_run(data, tmp_path, monkeypatch):
    """The second step finds a NaN in a weight, as after an overflow."""
    monkeypatch.setattr(training, "learning_rate", lambda *_: float("nan"))
    out = tmp_path / "out"
    line = refused(4, "--method", "sft", "--max-steps", 3, "--trajectories", data / "demos.jsonl", "--model", BASE,
                   "--out", out)
    assert line.startswith(f"{out}: step 2 of 3: the loss is nan") and "no model is written" in line
    assert not list(out.glob("*.safetensors")) and not (out / "COMPLETED").exists()


def test_a_loss_that_is_not_finite_ends_all_ranks(data, tmp_path):
    """A model with a NaN in it: a real run, on two ranks."""
    shutil.copytree(BASE, tmp_path / "model")
    tensors, out = weights(tmp_path / "model"), tmp_path / "out"
    tensors["model.norm.weight"][0] = float("nan")
    set_weights(tmp_path / "model", tensors)
    process = run("03_train_critic.py", "--trajectories", data / "demos.jsonl", "--model", tmp_path / "model",
                  "--max-steps", 2, "--out", out, ranks=2)
    line = process.stderr.splitlines()[-1]
    assert process.returncode == 2 and line.startswith(f"error: {out}: step 1 of 2: the loss is nan")
    assert "no model is written" in line and any(task["task_id"] in line for task in read(data / "tasks.jsonl"))
    assert not list(out.glob("*.safetensors")) and not (out / "COMPLETED").exists()
