"""Bad files, flags and folders, a table a class: each ends in one line that names what is wrong, nothing is lost, and
nothing that stands in a file is run."""
import argparse
import copy
import functools
import json
import os
import pickle
import random
import shutil
import sys

import pytest
import torch

import colbench
import common
from colbench import backend, ColBenchError, frontend, questions, sql
from conftest import fork, Partial, read, ROOT, run, stage, succeed
from lib import costs, credit, runtime, states, training
from lib.runtime import InputError, Rows, Runtime, start

MODEL = str(ROOT / "models" / "tiny")
DEEP = "[" * 5000 + "]" * 5000
# json of Python 3.14 reads so many levels; its list is then refused as such
DEEP_LINE = "nested deeper than 100" if sys.version_info < (3, 14) else "a list, not an object"
LONG = "9" * 4400
SURROGATE = "\ud800"


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
    with pytest.raises((InputError, OSError, RecursionError, ColBenchError)) as caught:
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
# class 4: files

JSON_TEXTS = [
    ("", "no rows in it"), ("[]", "a list, not an object"), ("null", "a NoneType, not an object"),
    ("3", "a int, not an object"), ("{", "not JSON"), (DEEP, DEEP_LINE),
    ('{"sample": ' + LONG + "}", "not JSON that can be read"), ("NaN", "a float, not an object"),
    ('{"a": 1} {"b": 2}', "not JSON (Extra data")]


@pytest.mark.parametrize("text, message", JSON_TEXTS, ids=range(len(JSON_TEXTS)))
def test_json(tmp_path, text, message):
    path = written(tmp_path / "rows.jsonl", text)
    for reader in (common.read_tasks, common.read_trajectories):
        line = line_of(reader, path)
        assert line.startswith(f"{path}:1: " if text else f"{path}: "), line
        assert message in line


TASKS = [("backend", *case) for case in [
    (("problem_description",), 1, '"problem_description" is a int, not a str'),
    (("ground_truth",), None, '"ground_truth" is a NoneType, not a str'),
    (("ground_truth",), ..., 'missing "ground_truth"'),
    (("test_cases",), ["f(1)"], '"test_cases" is a list, not a dict'),
    (("test_cases", "test1"), 5, 'test_cases: "test1" is a int, not a str'),
    (("task_id",), 5, '"task_id" is a int, not a str'),
    (("task_id",), [], '"task_id" is a list'),
    (("task_id",), "", '"task_id" is a text of 0 characters'),
    (("task_id",), "x" * 2000, '"task_id" is a text of 2,000 characters'),
    (("family",), [1], '"family" is a list, not a str'),
    (("facts",), "x", '"facts" is a str, not a list'),
    (("facts",), [1], "facts: item 0 is a int, not an object"),
    (("facts", 0, "topic"), None, 'facts: item 0: "topic" is a NoneType'),
    (("facts", 0, "questions"), {}, 'facts: item 0: "questions" is a dict, not a list'),
    (("facts", 0, "questions"), [1], "facts: item 0: questions: item 0 is a int, not a str"),
    (("facts", 0, "replies"), [], 'facts: item 0: "replies" is a list of 0'),
    (("facts", 0, "told"), "no", 'facts: item 0: "told" is a str, not a bool'),
    (("facts", 0, "matters"), 1, 'facts: item 0: "matters" is a int, not a bool'),
    (("template",), "{", '"template" cannot be filled'),
    (("template",), "{nothing}", "\"template\" has the field 'nothing'"),
    (("template",), "{0}", "\"template\" has the field '0'"),
    (("template",), "{base.__class__}", "\"template\" has the field 'base.__class__'"),
]] + [("sql", *case) for case in [
    (("schema",), 1, '"schema" is a int, not a str'),
    (("databases",), {}, '"databases" is a dict, not a list'),
    (("databases", 1), [], "databases: item 1: a list, not an object"),
    (("databases", 1), {"a": 1}, 'databases: item 1: "a" is a int, not a list'),
    (("databases", 1), {"a": [1]}, "item 0: not a list of as many cells"),
    (("databases", 1), {"a": [[1], [1, 2]]}, "item 1: not a list of as many cells"),
    (("databases", 1), {"a": [[{}]]}, "item 0: a cell is a dict"),
    (("databases", 1), {"a": [[True]]}, "item 0: a cell is a bool"),
    (("databases", 1), {"a": [[2 ** 70]]}, "a number that is not finite or not of 64 bits"),
    (("databases", 1), {"a": [[float("nan")]]}, "a number that is not finite or not of 64 bits"),
    (("facts", 0, "by"), "guess", "\"by\" is 'guess', not 'ask' or 'look'"),
    (("idle_looks",), [], '"idle_looks" is a list of 0'),
    (("idle_looks",), ..., 'missing "idle_looks"'), (("template",), ..., 'missing "template"'),
    (("facts", 0, "slot"), ..., 'missing "slot"'),
    (("seen",), "yes", '"seen" is a str, not a bool'),
]] + [("frontend", *case) for case in [
    (("slots",), {}, '"slots" is a dict, not a list'),
    (("slots", 0, "slot"), "a b", "not a name of letters and digits"),
    (("slots", 0, "guesses"), [1], "slots: item 0: guesses: item 0 is a int"),
    (("slots", 0, "names"), None, '"names" is a NoneType'),
    (("template",), 3, '"template" is a int'),
    (("template",), "{background}{background}", '"template" has a field twice'),
    (("template",), "{a!r}", '"template" has the field'),
]]


@pytest.mark.parametrize("name, path, new, message", TASKS, ids=[f"{t[0]}-{'.'.join(map(str, t[1]))}-{n}"
                                                                 for n, t in enumerate(TASKS)])
def test_tasks(tmp_path, name, path, new, message):
    good = template_task(name)
    if name == "frontend" and new == "{background}{background}":
        new = new.replace("background", good["slots"][0]["slot"])
    file = written(tmp_path / "t.jsonl", good, changed(good, path, new))
    line = line_of(common.read_tasks, file)
    assert line.startswith(f"{file}:2: ") and message.replace("item 1: a list", "item 1 is a list") in line, line


@pytest.mark.parametrize("key, new", [("looks", []), ("looks", ...), ("columns", "id"), ("cell", "("), ("cell", 1)])
def test_what_a_look_shows(tmp_path, key, new):
    rng, task = random.Random(1), {"facts": ()}
    while not any(fact["by"] == "look" for fact in task["facts"]):
        drawn = sql.make_task(rng, rng.choice(sql.FAMILIES), "none", lambda task_id: None)
        task = drawn if isinstance(drawn, dict) else task
    index = [fact["by"] for fact in task["facts"]].index("look")
    common.read_tasks(written(tmp_path / "good.jsonl", task))
    line = line_of(common.read_tasks, written(tmp_path / "t.jsonl", changed(task, ("facts", index, key), new)))
    assert f"facts: item {index}: " in line and f'"{key}"' in line


@pytest.mark.parametrize("path, new, lacking", [
    (("template",), ..., "template"), (("facts",), [], "facts"), (("facts", 0, "questions"), [], "questions")])
def test_what_the_scripted_agent_lacks(tmp_path, path, new, lacking):
    file = written(tmp_path / "t.jsonl", changed(template_task("backend"), path, new))
    line = stage_line(2, "--tasks", file, "--agent", "script", "--out", tmp_path / "o")
    assert line.startswith(f'{file}:1: missing "{lacking}"')


def test_facts_that_nothing_can_be_asked_about():
    """A topic of stop words alone, and no idle fact: both ended the scripted agent and the rules with a traceback."""
    task = copy.deepcopy(template_task("backend"))
    task["facts"] = [{**fact, "topic": "the", "questions": ["what is the"]} for fact in task["facts"]
                     if fact["matters"]]
    backend.check_task(task, "t")
    history = [{"role": "user", "content": task["problem_description"]}]
    for seed in range(40):
        text = backend.scripted_turn(task, history, 9, random.Random(seed))
        backend.known_reply(task, [*history, {"role": "assistant", "content": text}], random.Random(seed))


TRAJECTORIES = [
    (("task",), [], '"task" is a list, not a dict'), (("task", "test_cases"), 1, "task: "),
    (("dialogue_history",), {}, '"dialogue_history" is a dict'),
    (("dialogue_history",), [], 'no turn of role "assistant"'),
    (("dialogue_history", 0), "hi", "dialogue_history: item 0 is a str, not an object"),
    (("dialogue_history", 0, "role"), "system", "not 'user' or 'assistant'"),
    (("dialogue_history", 0, "role"), ["user"], "not 'user' or 'assistant'"),
    (("dialogue_history", 1, "content"), None, 'dialogue_history: item 1: "content" is a NoneType'),
    (("dialogue_history", 1, "input"), 7, '"input" is a int, not a str'),
    (("dialogue_history", 1, "output"), None, '"output" is a NoneType'),
    (("dialogue_history", 1, "output_ids"), [], "not a list of token ids"),
    (("dialogue_history", 1, "output_ids"), [-1], "not a list of token ids"),
    (("dialogue_history", 1, "output_ids"), [1.5], "not a list of token ids"),
    (("dialogue_history", 1, "output_ids"), [True], "not a list of token ids"),
    (("dialogue_history", 1, "output_ids"), "12", "not a list of token ids"),
    (("dialogue_history", 1, "output_ids"), [10 ** 20], "not a list of token ids"),
    (("answer",), 5, '"answer" is a int'), (("answer",), ..., 'missing "answer"'),
    (("reward",), "1", '"reward" is a str, not a number'), (("reward",), 100, '"reward" is 100, not a '),
    (("reward",), float("nan"), '"reward" is nan'),
    (("reward",), float("inf"), '"reward" is inf'), (("reward",), 10 ** 4000, '"reward" is 1000'),
    (("task_id",), 17, '"task_id" is a int'), (("task_id",), "", '"task_id" is a text of 0'),
    (("sample",), "0", '"sample" is a str, not a int'), (("sample",), 2 ** 70, '"sample" is 1180591620717411303424'),
    (("sample",), True, '"sample" is a bool, not a int'),
    (("agent",), 3, '"agent" is a int'), (("agent",), SURROGATE, '"agent" is no UTF-8'),
    (("agent",), "\0", "a null character"),
    (("run",), "x", '"run" is a str'), (("run",), -1, '"run" is -1, not from 0'),
    (("image",), 5, '"image" is a int'), (("reference_image",), [], '"reference_image" is a list'),
    (("max_rounds",), 0, '"max_rounds" is 0'), (("best_of",), "8", '"best_of" is a str'),
    (("system_prompt",), 1, '"system_prompt" is a int'), (("tokenizer",), {}, '"tokenizer" is a dict'),
    (("branch",), 1, '"branch" is a int'), (("branch",), {"turn": -1, "sample": 0, "candidate": 0}, '"turn" is -1')]


@pytest.mark.parametrize("path, new, message", TRAJECTORIES, ids=[f"{'.'.join(map(str, path))}-{n}" for n, (path, *_)
                                                                  in enumerate(TRAJECTORIES)])
def test_trajectories(data, tmp_path, path, new, message):
    good = read(data / "demos.jsonl")[0]
    file = written(tmp_path / "t.jsonl", good, changed(good, path, new))
    line = line_of(common.read_trajectories, file)
    assert line.startswith(f"{file}:2: ") and message in line, line


@pytest.mark.parametrize("key, new, message", [
    ("input", ..., 'missing "input"'), ("output_ids", ..., 'missing "output_ids"'),
    ("output_ids", [10 ** 6], 'has 1000000, and this tokenizer has only')])
def test_turns_that_are_said_to_be_of_this_tokenizer(data, tmp_path, tiny_tokenizer, key, new, message):
    row = read(data / "demos.jsonl")[0]
    row["tokenizer"] = common.tokenizer_name(tiny_tokenizer)
    for turn in row["dialogue_history"]:
        if turn["role"] == "assistant":
            turn.update(input="<|user|>hi<|assistant|>", output="ok", output_ids=[5, 6])
    assert len(common.agent_turns(tiny_tokenizer, row)) == sum(
        turn["role"] == "assistant" for turn in row["dialogue_history"])
    file = written(tmp_path / "t.jsonl", changed(row, ("dialogue_history", 1, key), new))
    line = stage_line(4, "--method", "sft", "--model", MODEL, "--trajectories", file, "--out", tmp_path / "out")
    assert message in line and row["task_id"] in line and not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def tiny_tokenizer():
    return common.load_tokenizer(MODEL)


CANDIDATE = {"text": "a", "ids": [1], "ended": True}
STATE = {"task_id": "t", "sample": 0, "turn": 0, "prompt": "p", "task": None, "candidates": [CANDIDATE],
         "history": [{"role": "user", "content": "hi"}], "advantages": [0.5]}
STATES = [                                      # what is changed, and what is said of it
    (("task_id",), 1, '"task_id" is a int'),
    (("sample",), None, '"sample" is a NoneType'),
    (("turn",), -1, '"turn" is -1'),
    (("history",), [{"role": "user"}], 'history: item 0: missing "content"'),
    (("history",), [1], "history: item 0 is a int, not an object"),
    (("candidates",), [1], "candidates: item 0 is a int, not an object"),
    (("candidates", 0, "ids"), [], 'candidates: item 0: "ids" is []'),
    (("candidates", 0, "ids"), ["1"], 'candidates: item 0: "ids" is [\'1\']'),
    (("candidates", 0, "text"), 1, 'candidates: item 0: "text" is a int'),
    (("candidates", 0, "ended"), "yes", 'candidates: item 0: "ended" is a str')]


@pytest.mark.parametrize("path, new, message", [
    *STATES, (("advantages",), [float("nan")], "advantages: item 0 is nan, not a finite number"),
    (("advantages",), ["1"], "advantages: item 0 is a str, not a number")])
def test_states_of_scored_jsonl(tmp_path, path, new, message):
    good = {**STATE, "task": template_task("backend")}
    written(tmp_path / "pairs.jsonl", {"task_id": "t", "sample": 0, "turn": 0, "chosen": CANDIDATE,
                                       "rejected": CANDIDATE})
    assert len(credit.read_states(written(tmp_path / "scored.jsonl", good))) == 1
    assert message in line_of(credit.read_states, written(tmp_path / "scored.jsonl", changed(good, path, new)))


@pytest.mark.parametrize("path, new, message", STATES)
def test_states_of_candidates_jsonl(tmp_path, tiny_tokenizer, path, new, message):
    good = {**STATE, "task": template_task("backend")}
    states = [{"task_id": "t", "sample": 0, "turn": 0, "prompt": "p"}]

    def read_candidates(row):
        args = argparse.Namespace(num_candidates=1, model="m")
        return stage(4).read_candidates(written(tmp_path / "c.jsonl", row), states, tiny_tokenizer, args)
    assert len(read_candidates(good)) == 1
    assert message in line_of(read_candidates, changed(good, path, new))
    assert "this tokenizer has only" in line_of(read_candidates, changed(good, ("candidates", 0, "ids"), [10 ** 6]))


@pytest.mark.parametrize("pair, message", [
    ({"chosen": 1, "rejected": {}}, '"chosen" is a int'), ({"chosen": {}}, 'missing "rejected"'),
    ({"chosen": {"ids": "12"}, "rejected": {}}, 'chosen: "ids" is \'12\', not a list of token ids'),
    ({"chosen": {}, "rejected": {}}, 'chosen: missing "ids"')])
def test_pairs(tmp_path, pair, message):
    written(tmp_path / "scored.jsonl", {**STATE, "task": template_task("backend")})
    written(tmp_path / "pairs.jsonl", {"task_id": "t", "sample": 0, "turn": 0, **pair})
    assert message in line_of(credit.read_states, tmp_path)


CRITIC = {"head": "lm", "normalize": "turn", "privileged": True, "reference": "models/tiny"}


@pytest.mark.parametrize("text", [
    "", "[]", DEEP, f'{{"beta": {LONG}}}', json.dumps({**CRITIC, "head": 1}), json.dumps({**CRITIC, "head": ["lm"]}),
    json.dumps({**CRITIC, "normalize": "x"}), json.dumps({**CRITIC, "reference": 3}),
    json.dumps({**CRITIC, "privileged": 1}), "\udcff"])
def test_critic_json(tmp_path, text):
    (tmp_path / "critic.json").write_bytes(text.encode(errors="surrogateescape"))
    assert line_of(common.read_critic, tmp_path, None, backend).startswith(f"{tmp_path / 'critic.json'}: ")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"system_prompt": 3}', DEEP])
def test_agent_json(tmp_path, tiny_tokenizer, text):
    (tmp_path / "agent.json").write_text(text)
    assert str(tmp_path / "agent.json") in line_of(common.check_system_prompt, tmp_path, tiny_tokenizer, backend, None,
                                                   10)


@pytest.mark.parametrize("kind, text", [
    ("args", ""), ("args", "[]"), ("args", '{"args": []}'), ("args", '{"inputs": 3}'), ("args", DEEP), ("costs", "{}"),
    ("costs", json.dumps({key: "1" for key in costs.COST_KEYS})), ("costs", '{"wall_s": NaN}')])
def test_records(tmp_path, kind, text):
    (tmp_path / f"{kind}.json").write_text(text)
    assert line_of(costs.read_record, tmp_path, kind).startswith(f"{tmp_path / kind}.json: ")


def test_a_record_that_names_itself_as_its_model(tmp_path):
    (tmp_path / "args.json").write_text(json.dumps({"args": {"method": "rft", "model": str(tmp_path)}}))
    assert stage(5).rounds_of(str(tmp_path)) == 1


# ---------------------------------------------------------------------------------------------------------------------
# classes 3 and 4: flags

TRAIN = ["--trajectories", "t", "--model", "m", "--out", "o"]
FLAGS = [
    *((3, TRAIN, *flag) for flag in [
        ("--lr", "inf"), ("--lr", "nan"), ("--lr", "-1"), ("--lr", "x"), ("--lr", "1e400"), ("--beta", "nan"),
        ("--beta", "-1"), ("--nll-coef", "inf"),
        ("--held-out-frac", "nan"), ("--held-out-frac", "1.1"),
        ("--seed", "1" + "0" * 40), ("--seed", LONG), ("--seed", "1.5"), ("--batch-size", "0"), ("--epochs", "-1"),
        ("--max-steps", "1" + "0" * 20),
        ("--lora", "0"), ("--lora-targets", ""), ("--model", ""), ("--out", ""), ("--trajectories", ""),
        ("--track", "")]),
    *((4, ["--method", "rft", *TRAIN], *flag) for flag in [
        ("--data-frac", "nan"), ("--data-frac", "2"), ("--temperature", "nan"),
        ("--temperature", "1e-30"), ("--num-candidates", "100000000"), ("--max-new-tokens", "1000000000"),
        ("--critic", ""), ("--candidates", ""), ("--sampler", "")]),
    *(("grpo", ["--method", "grpo", *TRAIN], *flag) for flag in [("--clip", "nan"), ("--kl-coef", "-1")]),
    ("distill", ["--method", "distill", *TRAIN], "--divergence", "both"),
    *((2, ["--tasks", "t", "--agent", "script", "--out", "o"], *flag) for flag in [
        ("--agent", ""), ("--simulator", ""), ("--tasks", ""), ("--out", ""), ("--temperature", "-1"),
        ("--temperature", "inf"), ("--timeout", "nan"), ("--timeout", "0"), ("--timeout", "inf"),
        ("--concurrency", "100000000"), ("--seed", "-" + "9" * 30), ("--stop", ""), ("--chat-template-args", DEEP),
        ("--chat-template-args", LONG), ("--chat-template-args", "[]"), ("--samples", "x"), ("--best-of", "0")]),
    *((1, ["--out", "o"], *flag) for flag in [
        ("--num-tasks", "0"), ("--num-tasks", "1" + "0" * 30), ("--seed", "1" + "0" * 40), ("--out", ""),
        ("--temperature", "nan"), ("--check", "")]),
    *((5, ["a=b", "--out", "o"], *flag) for flag in [
        ("--out", ""), ("--critic", ""), ("--candidates", ""), ("--baseline", "")])]


@pytest.mark.parametrize("program, others, flag", [(program, others, flag) for program, others, *flag in FLAGS],
                         ids=[f"{program}{flag[0]}={'_'.join(flag[1:])[:12]}" for program, _, *flag in FLAGS])
def test_flags(capsys, program, others, flag):
    module = stage(program) if isinstance(program, int) else fork(program)
    with pytest.raises(SystemExit) as ended:
        module.parse_args([*others, *flag])
    line = capsys.readouterr().err
    assert ended.value.code == 2 and line.count("\n") == 1 and line.startswith("error: ")
    assert flag[0] in line and len(line) < 300


@pytest.mark.parametrize("name", [".", "..", "a/b", "x" * 300])
def test_names_of_methods_that_name_files(capsys, name):
    with pytest.raises(SystemExit):
        stage(5).parse_args([f"{name}=file", "--out", "o"])
    assert capsys.readouterr().err.count("\n") == 1


# ---------------------------------------------------------------------------------------------------------------------
# class 1: what is there already is not lost

@pytest.fixture(scope="module")
def report(data, tmp_path_factory):
    """A folder of 05 with files of the user's in it."""
    out = tmp_path_factory.mktemp("report") / "R"
    stage(5).main([f"a={data / 'demos.jsonl'}", "--out", str(out)])
    return out


@pytest.fixture
def used(report, data, tmp_path):
    """A copy of it, in which files of the user's stand."""
    import shutil
    shutil.copytree(report, tmp_path / "R")
    (tmp_path / "R" / "mine").mkdir()
    for name in ("mine.jsonl", "scored/mine.jsonl", "mine/mine.jsonl"):
        shutil.copy(data / "demos.jsonl", tmp_path / "R" / name)
    return tmp_path


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


BELOW = ["R/mine.jsonl", "R/mine/mine.jsonl", "./R/../R/mine.jsonl", "R/scored/a.jsonl", "link.jsonl",
         "folder/mine.jsonl"]


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
@pytest.mark.parametrize("name", BELOW)
def test_an_input_below_the_output_is_refused(used, monkeypatch, name, overwrite):
    monkeypatch.chdir(used)
    os.symlink("R/mine.jsonl", "link.jsonl")
    os.symlink("R", "folder")
    before = contents(used)
    for number, arguments in ((5, [f"a={name}"]), (3, ["--trajectories", name, "--model", MODEL])):
        line = stage_line(number, *arguments, "--out", "R", *overwrite)
        assert name in line and "below --out R" in line and contents(used) == before


def test_a_model_below_the_output_is_refused(data, used):
    import shutil
    shutil.copytree(MODEL, used / "R" / "base")
    before = contents(used)
    line = stage_line(4, "--method", "sft", "--trajectories", data / "demos.jsonl", "--model", used / "R" / "base",
                      "--out", used / "R", "--overwrite")
    assert "below --out" in line and contents(used) == before


def make_hard_link(source, place):
    os.link(source, place)
    return place


def make_link(source, place):
    os.symlink(source, place)
    return place


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
@pytest.mark.parametrize("out", [lambda tasks: tasks, lambda tasks: make_link(tasks, tasks.with_name("link")),
                                 lambda tasks: make_hard_link(tasks, tasks.with_name("hard")),
                                 lambda tasks: f"{tasks.parent}/../{tasks.parent.name}/t.jsonl"])
def test_an_input_that_is_the_output_is_refused(data, tmp_path, out, overwrite):
    tasks = tmp_path / "t.jsonl"
    tasks.write_bytes((data / "tasks.jsonl").read_bytes())
    name = out(tasks)
    for number, arguments in ((2, ["--tasks", tasks, "--agent", "script"]), (1, ["--check", tasks])):
        assert "is an input of this command" in stage_line(number, *arguments, "--out", name, *overwrite)
        assert tasks.read_bytes() == (data / "tasks.jsonl").read_bytes()


@pytest.mark.parametrize("ending", [".failed.jsonl", ".args.json", ".costs.json", ".partial", ".images/t.jsonl"])
def test_an_input_beside_an_output_file_that_it_may_replace_is_refused(data, tmp_path, ending):
    tasks = tmp_path / f"o{ending}"
    tasks.parent.mkdir(exist_ok=True)
    tasks.write_bytes((data / "tasks.jsonl").read_bytes())
    line = stage_line(2, "--tasks", tasks, "--agent", "script", "--out", tmp_path / "o")
    assert "which may replace it" in line and tasks.read_bytes() == (data / "tasks.jsonl").read_bytes()


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """The folder of a model after one step, and the flags that made it but for --out. Tests change copies of it."""
    folder = tmp_path_factory.mktemp("trained") / "model"
    flags = ["--method", "sft", "--trajectories", data / "demos.jsonl", "--model", MODEL, "--max-steps", 1]
    succeed("04_train_policy.py", *flags, "--out", folder)          # a process: the folder notes the script's name
    return folder, flags


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
@pytest.mark.parametrize("file, key", [("adapter_config.json", "base_model_name_or_path"),
                                       ("critic.json", "reference")])
def test_a_model_behind_an_input_is_an_input(data, trained, tmp_path, file, key, overwrite):
    """--overwrite removed an adapter's base model, and a critic's reference, before they were read."""
    model = tmp_path / "P"
    shutil.copytree(trained[0], model)
    (tmp_path / "C").mkdir()
    (tmp_path / "C" / file).write_text(json.dumps({key: str(model), "head": "lm", "normalize": "turn",
                                                   "privileged": True}))
    before = contents(model)
    line = stage_line(4, "--method", "sft", "--trajectories", data / "demos.jsonl", "--model", tmp_path / "C", "--out",
                      model, *overwrite)
    assert "is an input of this command" in line and contents(model) == before


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
def test_failures_that_no_run_of_this_output_noted_are_kept(data, tmp_path, overwrite):
    (tmp_path / "o.failed.jsonl").write_text("mine")
    line = stage_line(2, "--tasks", data / "tasks.jsonl", "--agent", "script", "--out", tmp_path / "o", *overwrite)
    assert "no run of" in line and (tmp_path / "o.failed.jsonl").read_text() == "mine"


@pytest.mark.parametrize("name", ["args.json", "critic.json"])
@pytest.mark.parametrize("plant", [os.mkfifo, lambda place: os.symlink("/dev/zero", place), os.mkdir])
def test_a_note_that_is_no_file_is_not_waited_for(tmp_path, name, plant):
    plant(tmp_path / name)
    read_note = {"args.json": functools.partial(runtime.read_json, kind=runtime.ARGS_JSON),
                 "critic.json": functools.partial(runtime.read_json, kind=common.CRITIC)}[name]
    assert line_of(read_note, tmp_path / name).endswith("is no file")


def test_a_long_flag_of_an_earlier_run_is_cut(data, tmp_path):
    arguments = ["--tasks", data / "tasks.jsonl", "--agent", "script", "--out", tmp_path / "o"]
    stage(2).main([str(argument) for argument in arguments])
    path = tmp_path / "o.args.json"
    record = json.loads(path.read_text())
    record["args"]["seed"] = "x" * 3000
    path.write_text(json.dumps(record))
    line = stage_line(2, *arguments)
    assert "made with --seed xxx" in line and len(line) < 1000


def test_a_false_fault_of_the_parser_is_not_believed(monkeypatch):
    """CPython 3.11, with threads: AST constructor recursion depth mismatch."""
    faults, parse = [SystemError("AST constructor recursion depth mismatch")] * 2, questions.ast.parse

    def parse_later(*arguments, **options):
        if faults:
            raise faults.pop()
        return parse(*arguments, **options)
    monkeypatch.setattr(questions.ast, "parse", parse_later)
    assert questions.question_of("f(2) == 3").operator == "Eq" and not faults


def test_overwrite_removes_what_the_run_listed_and_nothing_else(data, used, capsys):
    out = used / "R"
    (out / "scored" / "old.partial").write_text("")
    os.symlink(data, out / "export")                                # a link where a folder of ours could be
    foreign = {name: text for name, text in contents(out).items() if "mine" in name or "old" in name}
    others = contents(data)
    stage(5).main([f"b={data / 'demos.jsonl'}", "--out", str(out), "--overwrite"])
    after = contents(out)
    assert foreign.items() <= after.items() and contents(data) == others and (out / "export").is_symlink()
    assert "scored/b.jsonl" in after and "scored/a.jsonl" not in after
    assert "what no run listed as its own stays there: export, mine, mine.jsonl, scored" in capsys.readouterr().out


def test_a_training_that_is_overwritten_leaves_no_state_behind(trained, tmp_path):
    folder, flags = trained
    shutil.copytree(folder, tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    for name in ("candidates.jsonl", "candidates.jsonl.abc.0of1.partial", "ref.pt", "states/3/.metadata", "notes.txt"):
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text("x")
    printed = succeed("04_train_policy.py", *flags, "--out", tmp_path / "out", "--seed", 1, "--overwrite")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted([*names, "notes.txt"])
    assert "stays there: notes.txt" in printed


def test_overwrite_does_not_replace_the_output_of_another_stage(data, trained, tmp_path):
    """05 --out at a trained model's folder, by mistake: the model stays."""
    model = tmp_path / "model"
    shutil.copytree(trained[0], model)
    before = {path: path.read_bytes() for path in model.rglob("*") if path.is_file()}
    process = run("05_evaluate.py", f"a={data / 'demos.jsonl'}", "--out", model, "--overwrite")
    assert process.returncode == 2 and "04_train_policy.py made it" in process.stderr
    assert {path: path.read_bytes() for path in model.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("args_json", [None, "", "[]", "{}", '{"args": {}, "inputs": {}, "id": "../x"}', DEEP])
@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
def test_a_folder_that_is_no_output_is_not_emptied(data, tmp_path, args_json, overwrite):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    if args_json is not None:
        (tmp_path / "mine" / "args.json").write_text(args_json)
    before = contents(tmp_path)
    stage_line(5, f"a={data / 'demos.jsonl'}", "--out", tmp_path / "mine", *overwrite)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
def test_a_file_that_is_no_output_is_not_replaced(data, tmp_path, overwrite):
    (tmp_path / "config.json").write_text("mine")
    stage_line(1, "--num-tasks", 1, "--out", tmp_path / "config.json", *overwrite)
    assert contents(tmp_path) == {"config.json": b"mine"}


def test_an_output_is_removed_only_after_the_inputs_are_read(used, data):
    before = contents(used)
    bad = written(used / "bad.jsonl", "{}")
    stage_line(5, f"a={bad}", "--out", used / "R", "--overwrite")
    stage_line(5, f"a={data / 'demos.jsonl'}", "--candidates", bad, "--out", used / "R", "--overwrite")
    assert contents(used / "R") == {name[2:]: text for name, text in before.items() if name.startswith("R/")}


@pytest.mark.parametrize("number, out", [
    (1, "/proc/x/t.jsonl"), (5, "/proc/report"), (1, "file/t.jsonl"), (5, "file/R"), (5, "file"), (1, "folder"),
    (1, "x" * 240), (5, "x" * 300), (1, "x" * 5000), (1, "..")])
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


# ---------------------------------------------------------------------------------------------------------------------
# class 2: partial files

def test_partial_files_of_another_run_are_neither_taken_over_nor_removed(data, tmp_path, capsys):
    out = tmp_path / "o"
    foreign = ["o.0of1.partial", "o.abcdef.0of1.partial", "other.abcdef.0of1.partial"]
    for name in foreign:
        (tmp_path / name).write_text('0 {"row": "of another seed"}\n')
    stage(2).main(["--tasks", str(data / "tasks.jsonl"), "--agent", "script", "--out", str(out)])
    assert [row["sample"] for row in read(out)] == [0] * 12 and "dialogues are there already" not in (
        text := capsys.readouterr().out)
    assert "partial files of other runs are left alone: o.0of1.partial, o.abcdef.0of1.partial" in text
    stage(2).main(["--tasks", str(data / "tasks.jsonl"), "--agent", "script", "--out", str(out), "--seed", "1",
                   "--overwrite"])
    assert sorted(path.name for path in tmp_path.glob("*.partial")) == foreign


@pytest.mark.parametrize("name", ["*", "[a-z]*", "?", "o*"])
def test_a_name_with_the_signs_of_a_pattern(tmp_path, name):
    others = [tmp_path / f"{other}.abcdef.0of1.partial" for other in ("o", "x", "other")]
    for path in others:
        path.write_text("0 {}\n")
    for more in ([], ["--overwrite"]):
        stage(1).main(["--num-tasks", "2", "--out", str(tmp_path / name), "--seed", str(len(more)), *more])
    assert all(path.read_text() == "0 {}\n" for path in others) and len(read(tmp_path / name)) == 2


@pytest.mark.parametrize("make", [make_link, make_hard_link, lambda victim, place: os.mkfifo(place)])
@pytest.mark.parametrize("ending", [".partial", ".args.json.partial", ".costs.json.partial"])
def test_a_planted_link_is_not_followed(tmp_path, make, ending):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    make(victim, f"{tmp_path / 't.jsonl'}{ending}")
    stage(1).main(["--num-tasks", "2", "--out", str(tmp_path / "t.jsonl")])
    assert victim.read_text() == "precious" and len(read(tmp_path / "t.jsonl")) == 2


@pytest.mark.parametrize("make", [make_link, make_hard_link, lambda victim, place: os.mkfifo(place)])
def test_a_planted_link_in_the_place_of_rows_ends_the_run(tmp_path, make):
    start(0)
    victim = tmp_path / "victim"
    victim.write_text('0 {"row": 1}\n')
    make(victim, tmp_path / "o.abc.0of1.partial")
    line = line_of(Rows, tmp_path / "o", Runtime(0, 1, torch.device("cpu"), "abc"))
    assert "is a link or no file" in line and victim.read_text() == '0 {"row": 1}\n'


@pytest.mark.parametrize("content", [b"x {}\n", b"{}\n", b"1 \n", b"-1 {}\n", b"9" * 5000 + b" {}\n"])
def test_a_partial_file_of_something_else(tmp_path, content):
    start(0)
    (tmp_path / "o.abc.0of1.partial").write_bytes(content)
    assert "no rows of this program" in line_of(Rows, tmp_path / "o", Runtime(0, 1, torch.device("cpu"), "abc"))


@pytest.mark.parametrize("row", [b"{garbage", b"\0\0\0", b'{"a": "\xff"}'])
def test_a_damaged_row_is_not_written_into_the_output(tmp_path, row):
    start(0)
    with Rows(tmp_path / "o", Runtime(0, 1, "cpu", "ab")) as rows:
        rows.add(0, {"a": 1})
    with open(rows.path, "ab") as file:
        file.write(b"1 " + row + b"\n")
    assert line_of(rows.finish, 2).startswith(f"{rows.path}: row 1: not ") and not (tmp_path / "o").exists()


def test_the_same_command_cannot_write_twice_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("lib.runtime.LOCK_S", 0.3)
    start(0)
    one = Runtime(0, 1, "cpu", "ab")
    with Rows(tmp_path / "o", one) as rows:
        rows.add(0, {"a": 1})
        assert "the same command is running already" in line_of(Rows, tmp_path / "o", one)
        Rows(tmp_path / "o", Runtime(0, 1, "cpu", "cd")).file.close()                       # another one may
    with Rows(tmp_path / "o", one) as rows:
        assert rows.done == {0}                                     # and a third start goes on
    with open(rows.path, "a") as file:                              # it ends between our open and our lock
        monkeypatch.setattr("lib.runtime.open_file", lambda *_, **__: os.remove(rows.path) or file)
        assert "has just written it" in line_of(Rows, tmp_path / "o", one)


def test_a_run_goes_on_with_its_own_partial_file(data, tmp_path):
    arguments = ["--tasks", str(data / "tasks.jsonl"), "--agent", "script", "--out", str(tmp_path / "o")]
    stage(2).main(arguments)
    lines = (tmp_path / "o").read_text().splitlines(True)
    Partial(tmp_path / "o").write_text(f"3 {lines[5]}")
    (tmp_path / "o").unlink()
    stage(2).main(arguments)
    assert (tmp_path / "o").read_text().splitlines(True) == [*lines[:3], lines[5], *lines[4:]]


# ---------------------------------------------------------------------------------------------------------------------
# class 3: losses that are no numbers

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


def test_weights_that_are_not_finite_after_the_last_step_are_not_written(data, tmp_path, broken):
    out = tmp_path / "out"
    line = stage_line(4, "--method", "sft", "--trajectories", data / "demos.jsonl", "--model", MODEL, "--max-steps", 1,
                      "--out", out)
    assert "not finite" in line and not list(out.glob("*.safetensors"))


def test_all_ranks_end(data, tmp_path):
    """A model with a NaN in it: a real run, on two ranks."""
    import shutil

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
# class 5: long dialogues

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


def test_pages_asked_for_at_once_are_as_one_after_the_other():
    task = template_task("frontend")
    rng, history = random.Random(0), []
    for slot in task["slots"]:
        history += [{"role": "user", "content": f"The {slot['topic']} should be {slot['names'][rng.randrange(2)]}."},
                    {"role": "assistant", "content": "<p>"}]
    assert frontend.facts_by_turn(task, history) == [
        {n for n, (_, is_known) in enumerate(frontend.facts(task, history[:i])) if is_known}
        for i in range(len(history) + 1)]


@pytest.mark.parametrize("name", ["backend", "sql"])
def test_what_is_asked_of_a_dialogue_grows_with_its_turns(monkeypatch, name):
    from lib.report import dialogue_data
    task, domain, calls = template_task(name), colbench.DOMAINS[name], []
    original = domain.topics_asked
    monkeypatch.setattr(domain, "topics_asked", lambda *arguments: calls.append(1) or original(*arguments))
    history = long_history(task, 500)
    row = {"task": task, "dialogue_history": history, "reward": 1.0, "sample": 0, "answer": ""}
    credit.measure_turns([row], domain)
    dialogue_data(row, domain)
    assert 500 <= len(calls) <= 6 * len(history)


def test_prompts_of_a_dialogue_that_is_far_too_long_are_not_rendered(data, tmp_path, monkeypatch, capsys):
    rows = read(data / "demos.jsonl")
    long = {**rows[0], "dialogue_history": long_history(rows[0]["task"], 2000), "sample": 99}
    file, rendered, original = written(tmp_path / "t.jsonl", *rows, long), [], common.prompt_text
    monkeypatch.setattr(common, "prompt_text", lambda *arguments: rendered.append(1) or original(*arguments))
    stage(4).main(["--method", "sft", "--trajectories", str(file), "--model", MODEL, "--max-steps", "1",
                   "--max-length", "4096", "--out", str(tmp_path / "out")])
    turns = sum(turn["role"] == "assistant" for row in rows for turn in row["dialogue_history"])
    assert len(rendered) == turns + 1
    assert "dropped 1 of 37 examples to train on: longer than --max-length 4096" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------------
# class 9: saved states

class Evil:
    """A pickle of this writes a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.fixture
def checkpoints(tmp_path):
    start(0)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved = training.Checkpoints(tmp_path, model, optimizer)
    saved.save(1)
    return saved


def test_a_state_is_read_again(checkpoints):
    before = {name: tensor.clone() for name, tensor in checkpoints.model.state_dict().items()}
    for parameter in checkpoints.model.parameters():
        parameter.data.zero_()
    assert checkpoints.load() == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in checkpoints.model.state_dict().items())


def evil_metadata(folder, marker):
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(marker)))


def evil_attribute(folder, marker):
    """Metadata as it was, with one more thing in it."""
    with open(folder / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    metadata.planner_data["more"] = Evil(marker)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def other_place(folder, marker):
    with open(folder / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    for place in metadata.storage_data.values():
        place.relative_path = "../../" + place.relative_path
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def changed_class(folder, marker):
    """A pickle that sets an attribute of a class that it may name."""
    code = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\nN}X\x03\x00\x00\x00badX\x01\x00\x00\x001s\x86b."
    (folder / ".metadata").write_bytes(code)


def linked_shard(folder, marker):
    [shard] = folder.glob("*.distcp")
    shard.rename(folder.parent / "elsewhere")
    shard.symlink_to(folder.parent / "elsewhere")


PLANTED = {"a pickle": evil_metadata, "a pickle inside": evil_attribute, "another place": other_place,
           "a class": changed_class, "a link": linked_shard,
           "nothing": lambda folder, marker: (folder / ".metadata").write_bytes(b""),
           "noise": lambda folder, marker: (folder / ".metadata").write_bytes(b"\x80\x04garbage"),
           "a number": lambda folder, marker: (folder / ".metadata").write_bytes(pickle.dumps(5)),
           "no shards": lambda folder, marker: [path.unlink() for path in folder.glob("*.distcp")]}


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
def test_a_state_that_somebody_else_wrote_runs_nothing(checkpoints, tmp_path, caplog, plant):
    marker = tmp_path / "code has run"
    plant(tmp_path / "states" / "1", marker)
    line = line_of(checkpoints.load)
    assert str(tmp_path / "states" / "1") in line and not marker.exists()
    # pytest 9.2 also has what torch says to a handler that drops it
    messages = [record.getMessage() for record in caplog.records if "NullHandler" not in record.name]
    assert not any("Traceback" in message for message in messages)
    assert not hasattr(states.Metadata, "bad")


def test_values_of_a_state_that_are_no_tensors_run_nothing(checkpoints, tmp_path):
    """These are pickles in *.distcp, which torch's own planner reads with weights_only=False."""
    marker = tmp_path / "code has run"
    checkpoints.optimizer.param_groups[0]["eps"] = Evil(marker)
    checkpoints.save(2)
    checkpoints.optimizer.param_groups[0]["eps"] = 1e-8
    assert not marker.exists()
    line = line_of(checkpoints.load)
    assert str(tmp_path / "states" / "2") in line and not marker.exists()


def test_names_in_states_that_are_no_steps(checkpoints, tmp_path):
    for name in ("x", "²", "-1", "1" * 30):
        (tmp_path / "states" / name).mkdir()
        (tmp_path / "states" / name / ".metadata").write_bytes(b"")
    assert checkpoints.whole() == [1]


def test_a_run_does_not_read_a_planted_state(data, tmp_path):
    """The case of the attack: COMPLETED is removed, and a pickle stands where the state of a step would be."""
    arguments = ["--trajectories", str(data / "demos.jsonl"), "--model", MODEL, "--max-steps", "1", "--out",
                 str(tmp_path / "out")]
    stage(3).main(arguments)
    (tmp_path / "out" / "COMPLETED").unlink()
    (tmp_path / "out" / "states" / "1").mkdir(parents=True)
    evil_metadata(tmp_path / "out" / "states" / "1", tmp_path / "code has run")
    line = stage_line(3, *arguments)
    assert "posix.system is not what a saved state is made of" in line and not (tmp_path / "code has run").exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"step": "1"}', DEEP])
def test_metrics_of_an_interrupted_run(checkpoints, tmp_path, text):
    (tmp_path / "metrics.jsonl").write_text(text + "\n")
    assert line_of(checkpoints.load).startswith(f"{tmp_path / 'metrics.jsonl'}:1: ")


def test_metrics_that_are_a_link_are_not_written(checkpoints, tmp_path):
    (tmp_path / "victim").write_text('{"step": 9}\n')
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "victim")
    assert "is a link" in line_of(checkpoints.load) and (tmp_path / "victim").read_text() == '{"step": 9}\n'
