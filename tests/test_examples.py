"""examples/: the benchmark in other trainers, and colbench/ alone. `bash tests/run.sh --examples` runs it all, with an
environment for each trainer; without these (the variable EXAMPLES names their folder) only what needs no package."""
import ast
import contextlib
import http.server
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time

import pytest

import colbench
from colbench import backend
from conftest import read, ROOT, stage

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
ENVIRONMENTS = os.environ.get("EXAMPLES")
in_environments = pytest.mark.skipif(not ENVIRONMENTS, reason="bash tests/run.sh --examples")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_and_parses(path):
    text = path.read_text()
    num_lines, documented = text.count("\n"), bool(ast.get_docstring(ast.parse(text)))
    assert num_lines <= 80 and documented and len(EXAMPLES) == 2


# ---------------------------------------------------------------------------------------------------------------------
# colbench/ alone

@pytest.fixture
def alone(tmp_path):
    """alone(code) runs code in a Python without any package, with a copy of colbench/ and nothing else of this
    repository; returns what it prints."""
    shutil.copytree(ROOT / "colbench", tmp_path / "colbench", ignore=shutil.ignore_patterns("__pycache__"))

    def alone(code):
        code = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n{code}"
        process = subprocess.run([sys.executable, "-I", "-S", "-c", code], cwd="/", text=True, capture_output=True)
        assert process.returncode == 0, process.stderr
        return process.stdout
    return alone


def test_colbench_alone_needs_no_package(alone):
    code = "import colbench, importlib.util\nassert importlib.util.find_spec('torch') is None\nprint(*colbench.DOMAINS)"
    assert alone(code).split() == list(colbench.DOMAINS)


def test_the_docstring_s_lines_run(alone):
    """They play a task, and print what the human says and how two answers score."""
    lines = re.findall(r"(?m)^    (.*)$", re.search(r"(?s)In ten lines.*?:\n\n(.*?)\n\n", colbench.__doc__)[1])
    assert len(lines) == 10
    said, good, bad = alone("\n".join(lines)).splitlines()
    assert re.search(r"\d", said) and "pass mark" in said
    assert float(good) == 1 and 0 <= float(bad) < 1


# ---------------------------------------------------------------------------------------------------------------------
# the package verifiers, by its own command

class Streamer(http.server.BaseHTTPRequestHandler):
    """A server of OpenAI's protocol that streams. Its agent asks for the first fact that the task needs. Then it gives
    the reference, or, of every second task, what no test passes."""
    tasks, requests, lock = [], [], threading.Lock()

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            self.requests.append(request)
        said = [(message["role"], message["content"]) for message in request["messages"] if message["role"] != "system"]
        [number] = [number for number, task in enumerate(self.tasks) if task["problem_description"] == said[0][1]]
        task = self.tasks[number]
        question = next(fact["questions"][0] for fact in task["facts"] if fact["matters"])
        content = question if len(said) == 1 else f"{backend.MARKER}\n" + (
            "def nothing(): pass" if number % 2 else task["ground_truth"])
        chunk = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": request["model"]}
        usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
        parts = [{"role": "assistant", "content": ""}, *({"content": word} for word in re.findall(r"\s*\S+", content))]
        events = [*({**chunk, "choices": [{"index": 0, "delta": part, "finish_reason": None}]} for part in parts),
                  {**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": usage}]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream" if request.get("stream") else "application/json")
        self.end_headers()
        if request.get("stream"):
            self.wfile.write("".join(f"data: {json.dumps(event)}\n\n" for event in events).encode())
            self.wfile.write(b"data: [DONE]\n\n")
        else:
            message = {"role": "assistant", "content": content}
            self.wfile.write(json.dumps({**chunk, "object": "chat.completion", "usage": usage, "choices": [
                {"index": 0, "message": message, "finish_reason": "stop"}]}).encode())

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
    stage(1).main(["--num-tasks", "4", "--split", "train", "--out", str(path)])
    return path


def command_of(example):
    """The command that an example's docstring shows, as words."""
    text = ast.get_docstring(ast.parse((ROOT / "examples" / f"{example}.py").read_text()))
    return re.search(r"(?m)^    (PYTHONPATH\S* .*(?:\\\n.*)*)", text)[1].replace("\\\n", " ").split()


def execute(environment, words, **variables):
    """A command in an environment of `EXAMPLES`; PYTHONPATH and the program are taken from it as it stands."""
    folder = pathlib.Path(ENVIRONMENTS, environment, "bin")
    name, _, path = words[0].partition("=")
    began = time.monotonic()
    process = subprocess.run([folder / words[1], *words[2:]], cwd=ROOT, text=True, capture_output=True, timeout=600, env={
        **os.environ, "PATH": f"{folder}:{os.environ['PATH']}", name: path, **variables})
    assert process.returncode == 0, process.stdout + process.stderr
    print(f"{environment}: {time.monotonic() - began:.0f} s")
    return process.stdout


@in_environments
def test_verifiers_evaluates_it(tasks, streamer, tmp_path):
    Streamer.tasks, Streamer.requests = read(tasks), []
    values = {"out/test.jsonl": str(tasks), "NAME": "fake", "http://HOST:PORT/v1": streamer}
    words = [values.get(word, word) for word in command_of("colbench_verifiers")]
    assert set(values) & set(command_of("colbench_verifiers")) == set(values)
    execute("verifiers", [*words, "--output-dir", str(tmp_path)], OPENAI_API_KEY="none")
    [file] = tmp_path.rglob("traces.jsonl")
    traces = read(file)
    print(json.dumps(traces[0])[:3000])
