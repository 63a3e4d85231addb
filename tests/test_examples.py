"""examples/: the benchmark in other trainers, and colbench/ alone. `bash tests/run.sh --examples` runs it all, with an
environment for each trainer; without these (the variable EXAMPLES names their folder) only what needs no package."""
import ast
import http.server
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import tomllib
import zipfile

import pytest

import colbench
import colbench.__main__ as package
from colbench import backend, dialogue
from conftest import read, ROOT, stage
from lib.runtime import write_jsonl

ENVIRONMENTS = os.environ.get("EXAMPLES")
in_environments = pytest.mark.skipif(not ENVIRONMENTS, reason="bash tests/run.sh --examples")


@pytest.fixture
def alone(tmp_path):
    """alone(code) runs code in a Python without any package but a copy of colbench/, as pip would install it; returns
    what it prints."""
    folder = tmp_path / "site-packages"
    shutil.copytree(ROOT / "colbench", folder / "colbench", ignore=shutil.ignore_patterns("__pycache__"))

    def alone(code):
        code = f"import sys\nsys.path.insert(0, {str(folder)!r})\n{code}"
        process = subprocess.run([sys.executable, "-I", "-S", "-c", code], cwd="/", text=True, capture_output=True)
        assert process.returncode == 0, process.stderr
        return process.stdout
    return alone


def test_the_docstring_s_lines_run_without_any_package(alone):
    code = "import colbench, importlib.util\nassert importlib.util.find_spec('torch') is None\nprint(*colbench.DOMAINS)"
    assert alone(code).split() == list(colbench.DOMAINS)
    lines = re.findall(r"(?m)^    (.*)$", re.search(r"(?s)In ten lines.*?:\n\n(.*?)\n\n", colbench.__doc__)[1])
    assert len(lines) == 10
    said, good, bad = alone("\n".join(lines)).splitlines()
    assert re.search(r"\d", said) and "pass mark" in said
    assert float(good) == 1 and 0 <= float(bad) < 1


def by_command(alone, *words):
    """What python -m colbench prints, as JSON lines."""
    code = f"sys.argv = {['colbench', *map(str, words)]}\nfrom colbench.__main__ import main\nmain()"
    return list(map(json.loads, alone(code).splitlines()))


def test_the_lines_of_the_package_in_the_docs_and_its_commands(alone, tmp_path):
    page = (ROOT / "docs" / "fork.md").read_text()
    [lines] = re.findall(r"(?s)This asks one question.*?```python\n(.*?)```", page)
    assert len(lines.splitlines()) == 10
    *said, scores = alone(f"import os\nos.chdir({str(tmp_path)!r})\n{lines}").splitlines()
    assert len(said) == 3 and not set(said) & set(dialogue.UNCLEAR)
    assert [score["reward"] for score in ast.literal_eval(scores)] == [0, 0, 0]
    rows = read(tmp_path / "answers.jsonl")
    assert [row["task"] for row in rows] == by_command(alone, "tasks", "--domain", "backend", "--num-tasks", 3)
    rows[0]["answer"] = "no code"
    write_jsonl(tmp_path / "answers.jsonl", rows)
    (tmp_path / "answers.jsonl").write_text((tmp_path / "answers.jsonl").read_text().replace("\n", "\n\n") + " \n")
    verdicts = by_command(alone, "score", tmp_path / "answers.jsonl")
    assert [verdict["task_id"] for verdict in verdicts] == [row["task"]["task_id"] for row in rows]
    assert [verdict["reward"] for verdict in verdicts] == [0, 1, 1] and len(verdicts[0]["faults"]) == 10


def test_the_package_is_described_as_the_repository_is():
    project = tomllib.loads((ROOT / "colbench" / "pyproject.toml").read_text())
    assert f"\nversion: {project['project']['version']}\n" in (ROOT / "CITATION.cff").read_text()
    assert project["project"]["license"] == "MIT"                   # an SPDX expression
    pinned = [line for line in (ROOT / "scripts" / "frontend.txt").read_text().splitlines() if line[0] != "#"]
    assert project["project"]["optional-dependencies"]["frontend"] == pinned
    patterns = project["tool"]["hatch"]["build"]["targets"]["wheel"]["include"]
    files = [path for path in (ROOT / "colbench").rglob("*.*") if path.suffix not in (".pyc", ".toml")]
    packed = {path for pattern in patterns for path in (ROOT / "colbench").glob(pattern.removeprefix("/"))}
    assert files and set(files) == packed


def test_an_install_leaves_nothing_in_the_source_and_takes_nothing_old(tmp_path):
    source = shutil.copytree(ROOT / "colbench", tmp_path / "source", ignore=shutil.ignore_patterns("__pycache__"))
    files = sorted(path.relative_to(source) for path in source.rglob("*.*"))
    (source / "build" / "lib" / "colbench").mkdir(parents=True)     # as an install by setuptools left it
    (source / "build" / "lib" / "colbench" / "old.py").write_text("")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path / "wheels", source]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode and "hatchling" in process.stderr:
        pytest.skip("hatchling cannot be downloaded")
    assert process.returncode == 0, process.stderr
    shutil.rmtree(source / "build")
    assert sorted(path.relative_to(source) for path in source.rglob("*.*")) == files
    [wheel] = (tmp_path / "wheels").iterdir()
    packed = [name for name in zipfile.ZipFile(wheel).namelist() if "dist-info" not in name]
    assert sorted(packed) == sorted(f"colbench/{path}" for path in files if path.name != "pyproject.toml")


def test_bad_input_of_the_package_is_one_line(tmp_path, capsys):
    path, domains = tmp_path / "a.jsonl", ""
    for domain in ("backend", "sql"):
        [task] = colbench.make_tasks(colbench.DOMAINS[domain], 1, 0, "all", "none")
        domains += json.dumps({"task": task, "answer": ""}) + "\n"
    for text, line in ((domains, f"{path}:2: a task of another domain than the first"),
                       ('{"task": {}}', f'{path}:1: missing "answer"'), ("[1]", f"{path}:1: a list, not an object"),
                       ("{", f"{path}:1: not JSON"), *((text, f"{path}: no rows in it") for text in ("", " \n\n")),
                       ("\n" + "[" * 200_000, f"{path}:2: not JSON"),
                       ('{"task": {}, "answer": ""}', f'{path}:1: missing "problem_description"')):
        path.write_text(text)
        with pytest.raises(SystemExit) as ended:
            package.main(["score", str(path)])
        error = capsys.readouterr().err
        assert ended.value.code == 2 and error.startswith(f"error: {line}") and error.count("\n") == 1


class Streamer(http.server.BaseHTTPRequestHandler):
    """A server of OpenAI's protocol that streams. Its agent asks for the first fact that the task needs; then it gives
    the reference, or (second task) what passes no test, or (third task) it asks on."""
    tasks, requests = [], []

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append(request)
        said = [message["content"] for message in request["messages"] if message["role"] != "system"]
        [number] = [number for number, task in enumerate(self.tasks) if task["problem_description"] == said[0]]
        content = next(fact["questions"][0] for fact in self.tasks[number]["facts"] if fact["matters"])
        if len(said) > 1 and number < 2:
            answer = [self.tasks[0]["ground_truth"], "def nothing(): pass"][number]
            content = f"{backend.MARKER}\n{answer}"
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for part in ({"role": "assistant", "content": content}, {}):
            choice = {"index": 0, "delta": part, "finish_reason": None if part else "stop"}
            event = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": request["model"],
                     "choices": [choice], "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_):
        pass


@pytest.fixture
def streamer():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Streamer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


@pytest.fixture(scope="session")
def tasks(tmp_path_factory):
    path = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    stage(1).main(["--num-tasks", "3", "--split", "train", "--out", str(path)])
    return path


def command_of(example):
    """The command that an example's docstring shows, as words."""
    text = ast.get_docstring(ast.parse((ROOT / "examples" / f"{example}.py").read_text()))
    return re.search(r"(?m)^ +(PYTHONPATH=(?:.*\\\n)*.*)", text)[1].replace("\\\n", " ").split()


def execute(environment, words, **variables):
    """Run a command, PYTHONPATH=… and the program's name in front, in an environment; returns what it prints."""
    folder = pathlib.Path(ENVIRONMENTS, environment, "bin").absolute()
    variables |= {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": words[0].removeprefix("PYTHONPATH=")}
    process = subprocess.run([folder / words[1], *map(str, words[2:])], cwd=ROOT, text=True, capture_output=True,
                             timeout=600, env={**os.environ, **variables})
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def check_dialogue(messages, task, number, replies=None):
    """[(role, content)] of the agent that asks once and answers or, in the third task (number 2), asks in each round.
    replies: what the simulator may say, in place of what it knows of what was asked."""
    roles, said = zip(*messages)
    assert list(roles) == ["system", *["user", "assistant"] * (3 if number == 2 else 2)]
    assert "3 rounds" in said[0] and said[1] == task["problem_description"]
    replies = replies or next(fact["replies"] for fact in task["facts"] if fact["matters"])
    assert said[3] in replies
    assert number < 2 or said[5] in [f"{reply}\n(last round)" for reply in replies]


@in_environments
def test_verifiers_evaluates_it(tasks, streamer, tmp_path):
    Streamer.tasks, Streamer.requests = read(tasks), []
    values = {"out/test.jsonl": str(tasks), "NAME": "fake", "http://HOST:PORT/v1": streamer}
    words = [values.get(word, word) for word in command_of("colbench_verifiers")]
    assert set(values) & set(command_of("colbench_verifiers")) == set(values)
    execute("verifiers", [*words, "--env.taskset.max-rounds", "3", "--output-dir", tmp_path], OPENAI_API_KEY="none")
    [file] = tmp_path.rglob("traces.jsonl")
    traces = {trace["task"]["data"]["idx"]: trace for row in read(file) for trace in row["traces"]}
    assert {i: trace["rewards"]["tests_passed"]["score"] for i, trace in traces.items()} == {0: 1, 1: 0, 2: 0}
    assert not any(trace["errors"] for trace in traces.values())
    for number, task in enumerate(Streamer.tasks):
        messages = [node["message"] for node in traces[number]["nodes"]]
        check_dialogue([(message["role"], message["content"]) for message in messages], task, number)
    sent = json.dumps([request["messages"] for request in Streamer.requests])
    assert all(request["stream"] for request in Streamer.requests) and len(Streamer.requests) == 2 + 2 + 3
    assert not any(json.dumps(task["ground_truth"])[1:-1] in sent for task in Streamer.tasks)


@in_environments
def test_inspect_evaluates_it(tasks, tmp_path):
    printed = execute("inspect", ["PYTHONPATH=.:examples", "python", "tests/inspect_model.py", tasks, tmp_path])
    samples = list(map(json.loads, printed.splitlines()))
    assert len(samples) == 6
    rows = read(tasks)
    for place, sample in enumerate(samples):
        messages = sample["messages"]
        [number] = [number for number, task in enumerate(rows) if task["problem_description"] == messages[1][1]]
        assert sample["scores"] == {"reward": float(number == 0), "success": number == 0}
        check_dialogue(messages, rows[number], number, ["As you like."] if place >= 3 else None)    # of a model


@in_environments
def test_trl_trains_on_it(tasks, tmp_path):
    task = tmp_path / "task.jsonl"
    task.write_text(tasks.read_text().splitlines()[0] + "\n")
    execute("trl", ["PYTHONPATH=.", "python", "tests/tool_model.py", task, tmp_path / "model"])
    values = {"out/train.jsonl": task, "Qwen/Qwen3-0.6B": tmp_path / "model", "out/grpo": tmp_path / "grpo"}
    words = [values.get(word, word) for word in command_of("colbench_trl")]
    assert set(values) <= set(command_of("colbench_trl"))
    execute("trl", [*words, "--steps", "2"])
    [state] = (tmp_path / "grpo").glob("checkpoint-2/trainer_state.json")
    steps = [step for step in json.loads(state.read_text())["log_history"] if "loss" in step]
    assert len(steps) == 2
    assert any(float(step["tools/call_frequency"]) > 0.5 for step in steps)
    assert any(float(step["reward"]) > 0 for step in steps)
    before, after = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("model", "grpo"))
    assert before != after
