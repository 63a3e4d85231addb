"""Mistakes in files, flags and folders: each ends in one line that names what is wrong, and nothing is lost."""
import copy
import functools
import importlib
import json
import operator
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

import colbench
from compare import set_weights, weights
from conftest import BASE, call, read, refused, ROOT, run, stage, write
from examples import gain
from lib import training
from lib.data import read_tasks, read_trajectories
from lib.runtime import InputError


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def changed(value, path, new):
    """A copy of a value with another one at a path, ("facts", 0, "topic"); new `...`: without it."""
    copied = copy.deepcopy(value)
    *places, last = path
    place = functools.reduce(operator.getitem, places, copied)
    if new is ...:
        del place[last]
    else:
        place[last] = new
    return copied


# --- files

HALF_DIALOGUE = "HALF_DIALOGUE:2: not JSON ("
CRITICS = {                     # {name of a critic's folder: its critic.json, or None}
    "NO_JSON": "", "A_LIST": "[]", "AN_INT": '{"score": 1}', "NO_NOTE": None,
    "NO_FORM": '{"score": "logratio", "normalize": "x"}',
    "SIGHT": '{"visual": true, "score": "value", "normalize": "none", "critic_sees_c": true, "reference": "r"}'}
OTHER = '… two tasks with different solutions have the "task_id"'
NO_SIGHT = "SIGHT: a visual critic cannot score a function: it has no rendered view"
MISTAKES = {                    # {stage and flags: how the line begins … what is further in it}
    "1 --check HALF_TASK": "HALF_TASK:2: not JSON (", "2 --agent script --tasks HALF_TASK": "HALF_TASK:2: not JSON (",
    "3 LEARN HALF_DIALOGUE": HALF_DIALOGUE, "4 --method sft LEARN HALF_DIALOGUE": HALF_DIALOGUE,
    "5 a=HALF_DIALOGUE": HALF_DIALOGUE,
    "2 --agent script --tasks PLAIN": 'PLAIN:1: missing "template"',
    "2 --agent script --tasks DEMOS": "DEMOS:1: a dialogue, not a task; 01_generate_tasks.py makes tasks",
    "3 LEARN TASKS": "TASKS:1: a task, not a dialogue; 02_rollout.py makes dialogues from tasks",
    "2 --agent MODEL --branch 1 --tasks CHAT": 'CHAT:1: missing "facts"',
    "2 --tasks TASKS --agent models/tinny": "models/tinny: no such folder",
    "3 --trajectories DEMOS --model smolm2": "smolm2: no model of this name",
    "2 --tasks TASKS --agent MODEL --simulator rule": "rule: no model of this name",
    "3 --trajectories DEMOS --model DATA/rft": "DATA/rft: no such folder",
    "3 --trajectories DEMOS --model nobody/such": "nobody/such: no model of this name",
    "3 --trajectories DEMOS --model tests": "tests: no model of this name",
    "2 --tasks TASKS --agent ./nowhere": "./nowhere: no such folder",
    "2 --tasks TASKS --agent MODEL --system-prompt NONE": "NONE: no such file or directory",
    "5 a=DATA": "DATA: is a directory", "1 --check NONE": "NONE: no such file or directory",
    # critics
    "4 SWEET untrained --reference-sees-c yes":
        "--critic untrained: every score is 0 if the reference model sees c",
    "4 SWEET MODEL/config.json":
        "MODEL/config.json: is a file, not a folder written by 03_train_critic.py (did you mean MODEL?)",
    "4 SWEET NO_JSON": "NO_JSON/critic.json: not JSON", "4 SWEET A_LIST": "A_LIST/critic.json: a list",
    "4 SWEET AN_INT": "AN_INT/critic.json: missing", "4 SWEET NO_NOTE": "NO_NOTE: has no critic.json",
    "4 SWEET NO_FORM": "NO_FORM/critic.json: ", "4 SWEET SIGHT": NO_SIGHT, "5 a=DEMOS --critic SIGHT": NO_SIGHT,
    "2 --agent MODEL --best-of 2 --tasks TASKS --critic SIGHT": NO_SIGHT,
    # nothing to learn from
    "3 LEARN LOST": "LOST: no trajectory pairs: … (all rewards are 0); roll out more",
    "3 LEARN UNSCORED": "UNSCORED: no trajectory pairs",
    "4 --method mtdpo LEARN LOST": "LOST: … no task has both", "4 --method rft LEARN LOST": "LOST: … no successful",
    "3 LEARN DEMOS --max-length 20": "DEMOS: … no examples to train on: all … are longer than --max-length 20",
    "3 LEARN DEMOS --held-out-frac 1":
        "DEMOS: … no examples to train on: --held-out-frac 1.0 holds out the tasks of all … trajectory pairs",
    # nothing to compare
    "5 old=DEMOS new=OTHER": OTHER, "5 two=DEMOS,OTHER": OTHER,
    "5 a=DEMOS,UNSCORED": "DEMOS, UNSCORED: the runs of a name must have the same",
    "5 a=LOST --costs": "LOST: --costs needs the args.json that 02_rollout.py writes next to it"}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes(data, tmp_path, words):
    """HALF…: a file whose second line was cut. PLAIN: a task that the scripted agent cannot solve. LOST: all failed.
    OTHER: the tasks have other references."""
    files = "HALF_TASK", "HALF_DIALOGUE", "PLAIN", "CHAT", "NONE", "LOST", "UNSCORED", "OTHER"
    places = {name: tmp_path / name for name in (*files, *CRITICS)}
    for name, rows in (("HALF_TASK", "tasks"), ("HALF_DIALOGUE", "demos")):
        lines = (data / f"{rows}.jsonl").read_bytes().splitlines(True)
        places[name].write_bytes(b"".join(lines[:2])[:-40])
    demos = read(data / "demos.jsonl")
    write(places["PLAIN"], [changed(template_task("backend"), ("template",), ...)])
    write(places["CHAT"], [OWN])
    write(places["LOST"], [{**row, "reward": 0.0} for row in demos])
    write(places["OTHER"], [changed(row, ("task", "ground_truth"), "def f(): 0") for row in demos])
    write(places["UNSCORED"], [changed(demos[0], ("reward",), ...)])
    for name, text in CRITICS.items():
        places[name].mkdir()
        if text is not None:
            (places[name] / "critic.json").write_text(text)
    places |= {"DEMOS": data / "demos.jsonl", "TASKS": data / "tasks.jsonl", "DATA": data, "MODEL": BASE,
               "LEARN": f"--model {BASE} --trajectories",
               "SWEET": f"--method sweet --trajectories {data}/demos.jsonl --model {BASE} --critic"}
    before = contents(tmp_path)

    def with_paths(text):
        return re.sub("[A-Z_]{4,}", lambda word: str(places.get(word[0], word[0])), text)
    number, *flags = with_paths(words).split()
    line = refused(int(number), *flags, "--out", tmp_path / "out")
    begin, *parts = with_paths(MISTAKES[words]).split("…")
    assert line.startswith(begin) and all(part in line for part in parts), line
    assert contents(tmp_path) == before


@functools.cache
def template_task(name):
    [task] = colbench.make_tasks(colbench.DOMAINS[name], 1, 0, "all", "none")
    return task


OWN = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "reward": 1}
ROWS = [("tasks", None, text, message) for text, message in (                       # (what, path, its value, the line)
    ("NaN", "a number, not an object"), ("[" * 100_000 + "]" * 100_000, "not JSON"),
    ('{"sample": ' + "9" * 4400 + "}", "not JSON"), ('{"a": 1} {"b": 2}', "not JSON (Extra data")
)] + [("backend", *case) for case in (
    (("problem_description",), 1, '"problem_description" is an integer, not a string'),
    (("ground_truth",), ..., 'missing "ground_truth"'), (("task_id",), 5, '"task_id" is an integer, not a string'),
    (("test_cases",), ["f(1)"], '"test_cases" is a list, not an object'),
    (("test_cases", "test1"), 5, 'test_cases: "test1" is an integer, not a string'),
    (("facts",), [1], "facts: item 0 is an integer, not an object"),
    (("facts", 0, "questions"), [1], "facts: item 0: questions: item 0 is an integer, not a string"),
    (("template",), "{nothing}", '"template" cannot be filled'),
)] + [("sql", *case) for case in (
    (("schema",), 1, '"schema" is an integer, not a string'), (("idle_looks",), ..., 'missing "idle_looks"'),
    (("databases",), {}, '"databases" is an object, not a list'), (("databases",), [{}], "not of 2 or more"),
    (("databases",), [{}, {"a": 1}], '"a" is an integer, not a list'), (("databases", 1), [], "a list, not an object"),
    (("facts", 0, "slot"), ..., 'facts: item 0: missing "slot"'),
    (("facts", 0, "by"), "look", 'facts: item 0: missing "looks"'),
    (("facts", 0, "by"), "guess", "\"by\" is 'guess', not 'ask' or 'look'"),
)] + [("frontend", *case) for case in (
    (("slots",), {}, '"slots" is an object, not a list'), (("slots", 0, "names"), None, '"names" is null'),
    (("template",), 3, '"template" is an integer'),
)] + [("demos", *case) for case in (
    (("task",), [], '"task" is a list, not an object'), (("task", "test_cases"), 1, "task: "),
    (("dialogue_history",), [], 'no turn of role "assistant"'),
    (("dialogue_history", 0), "hi", "dialogue_history: item 0 is a string, not an object"),
    (("dialogue_history", 0, "role"), "system", "not 'user' or 'assistant'"),
    (("dialogue_history", 1, "content"), None, 'dialogue_history: item 1: "content" is null'),
    (("dialogue_history", 1, "output_ids"), [1.5], "not a list of token ids"),
    (("answer",), ..., 'missing "answer"'), (("dialogue_history", 2, "tool"), "x", '"tool" is a string'),
    (("reward",), "1", '"reward" is a string, not a number'), (("reward",), float("nan"), '"reward" is nan'),
    (("sample",), "0", '"sample" is a string, not an integer'), (("max_rounds",), 0, '"max_rounds" is 0'),
    (("sample",), 10 ** 30, '"sample" is '), (("image",), 5, '"image" is an integer'),
    (("dialogue_history", 1, "truncated"), {}, '"truncated" is an object'),
    (("branch",), {"sample": 0, "turn": 1, "candidate": 0, "run": []}, 'branch: "run" is a list, not an integer'),
    (("task", "test_cases"), ..., 'missing "test_cases", or the fields of another domain (backend, frontend, '),
    (None, OWN, "task: a task of another domain"), (None, {**OWN, "c": 1}, '"c" is an integer'),
    (None, {**OWN, "reward": "good"}, '"reward" is a string'),
    (None, {**OWN, "messages": []}, '"messages" must begin with'),
    (None, {**OWN, "messages": OWN["messages"][1:]}, '"messages" must begin with'),
    (None, {**OWN, "messages": [{"role": "tool", "content": "a"}]}, 'messages: item 0: "role"'))]


@pytest.mark.parametrize("what, path, new, message", ROWS, ids=range(len(ROWS)))
def test_a_second_row_that_is_none_is_named(data, tmp_path, what, path, new, message):
    name = "demos" if what == "demos" else "tasks"
    good = template_task(what) if what in colbench.DOMAINS else read(data / f"{name}.jsonl")[0]
    bad = changed({**good, "sample": 9}, path, new) if path else new
    file = write(tmp_path / "t.jsonl", [good, bad])
    with pytest.raises(InputError) as error:
        (read_trajectories if what == "demos" else read_tasks)(file)
    line = str(error.value)
    assert line.startswith(f"{file}:2: ") and message in line and len(line) < 2000


def test_a_task_of_a_program_that_holds_no_json_is_named():
    with pytest.raises(InputError, match='^task: "facts" is a tuple, not a list$'):
        colbench.domain_of({**template_task("backend"), "facts": ()})


def test_too_many_tasks_or_a_dry_run_of_a_fork(tmp_path, monkeypatch):
    monkeypatch.setattr(colbench, "MOST_DRAWS_IN_VAIN", 3)
    line = refused(1, "--num-tasks", 9 ** 6, "--split", "test", "--out", tmp_path / "out")
    assert line.startswith("--num-tasks 531441: there are only ")
    assert refused(gain, *TRAIN.split(), "--dry-run", 2) == "--dry-run works only with 04_train_policy.py"
    assert contents(tmp_path) == {}


# --- flags

TRAIN = "--trajectories t --model m --out o"
REQUIRED = {1: "--out o", 2: "--tasks t --agent script --out o", 3: TRAIN, 4: f"--method rft {TRAIN}",
            5: "a=b --out o", "scripts.critics": "--trajectories t --out o"}
FLAGS = {                       # {program: flags, or (flags, what the line says)}; else the line names the flag
    1: [("--nonsense", "error: unrecognized arguments: --nonsense\n"), "--num-tasks 0", "--out ''",
        "--source llm", "--model smollm2", "--seeds x", "--max-attempts 3",
        ("--trajectories", "needs --source colbench"), ("--source llm --model smollm2 --path x", "--path needs")],
    2: ["--agent ''", "--temperature -1", "--chat-template-args []", "--chat-template-args '{\"person\": {}}'",
        "--samples x", "--system-prompt f", "--branch 4", "--best-of 2",
        ("--agent a --best-of 2", "--critic DIR, judge:MODEL or untrained"),
        ("--agent a --branch 4 --best-of 2 --critic c", "--branch needs"),
        ("--reference-sees-c no", "--reference-sees-c goes with --best-of")],
    3: ["--lr inf", "--lr -1", "--lr x", "--beta nan", "--held-out-frac 1.1", "--seed 1.5", "--batch-size 0",
        "--lora 0", "--model ''", "--reference-sees-c maybe",
        ("--critic-sees-c no --reference-sees-c no", "--reference-sees-c no needs --score logratio"),
        ("--score value --reference-sees-c no", "--reference-sees-c no needs --score logratio"),
        ("--score regression --normalize turn", "--normalize and --nll-coef need --score logratio"),
        ("--score value --nll-coef 0.01", "--normalize and --nll-coef need --score logratio")],
    4: ["--data-frac 2", "--temperature nan", "--num-candidates 100000000", "--temperature 1e-40", "--critic ''",
        ("--reference-sees-c no", "--reference-sees-c goes with --method sweet"),
        ("--method sweet --critic c --sampler models/tiny", "--sampler: must be http")],
    5: ["--baseline ''", "--baseline c", "a/b=c", "a", ("a=x", "a"),
        ("--reference-sees-c no", "--reference-sees-c goes with --critic")],
    "scripts.critics": [("", "one of the arguments --gates --critic is required"), "--gates ''"],
    "examples.distill": ["--divergence both", "--method sft"],
    "examples.grpo": [("--signed", "--signed and --reference-sees-c go with --critic")],
    "examples.answers": [("", "--critic")]}


@pytest.mark.parametrize("program, flag", [(program, flag) for program, flags in FLAGS.items() for flag in flags])
def test_flags(capsys, program, flag):
    words, message = flag if isinstance(flag, tuple) else (flag, flag.split()[0])
    required = REQUIRED.get(program, TRAIN)
    module = stage(program) if isinstance(program, int) else importlib.import_module(program)
    with pytest.raises(SystemExit) as ended:
        module.parse_args(shlex.split(f"{required} {words}"))
    line = capsys.readouterr().err
    assert ended.value.code == 2 and line.count("\n") == 1 and line.startswith("error: ")
    assert message in line and len(line) < 300


@pytest.mark.parametrize("path", sorted(ROOT.glob("0*.py")), ids=lambda path: path.name)
def test_a_python_without_torch_is_told_how_to_set_up(path):
    process = subprocess.run([sys.executable, "-S", path], capture_output=True, text=True)
    assert process.returncode == 2 and process.stdout == ""
    assert re.fullmatch("error: this Python has no torch; .*\n", process.stderr)


FORKS = "examples.answers", "examples.distill", "examples.gain", "examples.grpo"


@pytest.mark.parametrize("words, status", [("--help", 0), ("--nonsense", 2), ("", 2)])
@pytest.mark.parametrize("program", [*(path.name for path in sorted(ROOT.glob("0*.py"))), *FORKS])
def test_help_and_wrong_flags_are_answered_without_torch_which_takes_seconds(program, words, status, tmp_path):
    """Also where the terminal cannot show all characters of the help."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, *(["-m"] if program in FORKS else []), program, *words.split()]
    process = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert process.returncode == status
    assert process.stderr.startswith("error: ") if status else "arguments below" in process.stdout


# --- outputs: what is there already is not lost

KEPT = [                        # stage, its input and output, what the line says
    *((5, f"a={name}", "R", f"{name}: is an input of this command and lies in --out R")
      for name in ("R/mine.jsonl", "./R/../R/mine.jsonl", "link/mine.jsonl")),
    (3, f"--model {BASE} --trajectories R/mine.jsonl", "R", "R/mine.jsonl: is an input of this command and lies in"),
    (2, "--agent script --tasks t.jsonl", "t.jsonl", "t.jsonl: is an input of this command"),
    (5, "a=DEMOS", "folder", "folder: no run made it"), (1, "--num-tasks 1", "file", "file: no run made it"),
    (5, "a=DEMOS", "model", "model: 04_train_policy.py made it"),
    (5, "a=bad.jsonl", "R", 'bad.jsonl:1: missing "task"'),          # before anything is removed
    (1, "--num-tasks 1", "/proc/x/t.jsonl", "/proc/x: "), (1, "--num-tasks 1", "folder", "folder: is a folder; choose"),
    (5, "a=DEMOS", "file/R", "file"), (5, "a=DEMOS", "file", "file: is not a folder; choose"),
    (5, "a=DEMOS", "x" * 300, "xxx")]


def test_overwrite_spares_what_is_no_place_for_an_output_and_removes_what_another_command_made(
        data, tmp_path, monkeypatch):
    """R is of 05, with a file of the user's in it, t.jsonl of 01, a model of 04; the rest is the user's."""
    monkeypatch.chdir(tmp_path)
    demos = data / "demos.jsonl"
    call(5, f"a={demos}", "--out", "R")
    call(1, "--num-tasks", 2, "--out", "t.jsonl")
    shutil.copy(demos, "R/mine.jsonl")
    os.symlink("R", "link")
    for name, content in (("model/args.json", '{"stage": "04_train_policy.py", "args": {}, "inputs": {}}'),
                          ("model/model.safetensors", "weights"), ("folder/thesis.tex", "x"), ("file", "x"),
                          ("bad.jsonl", "{}\n")):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    before = contents(tmp_path)
    for number, words, out, message in KEPT:
        for overwrite in ([], ["--overwrite"]):
            line = refused(number, *words.replace("DEMOS", str(demos)).split(), "--out", out, *overwrite)
            assert line.startswith(message) and contents(tmp_path) == before, line
    removed, unlink = [], pathlib.Path.unlink
    monkeypatch.setattr(pathlib.Path, "unlink",
                        lambda path, **options: removed.append(path.name) or unlink(path, **options))
    call(5, f"b={demos}", "--out", "R", "--overwrite")
    assert removed[0] == "COMPLETED"                                # a kill from then on leaves no whole output
    assert {"R/scored/b.jsonl"} == {name for name in contents(tmp_path) if name.startswith("R/scored")}


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
    assert line.startswith(f"{out}: step 2 of 3: the loss is nan") and "no model was written" in line
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
    assert "no model was written" in line and any(task["task_id"] in line for task in read(data / "tasks.jsonl"))
    assert not list(out.glob("*.safetensors")) and not (out / "COMPLETED").exists()
