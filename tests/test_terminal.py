"""Control characters that files, models and servers bring are escaped where lines are printed; files keep them."""
import ast
import json
import logging
import sys

import pytest
from test_replies import answer, http_reply  # noqa: F401

from conftest import begin, read, ROOT, run, stage, wait
from lib.runtime import InputError, printable, run_stage, say

HOSTILE = "a\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202eb\u2066c\x08\x7f"
ESCAPED = r"a\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202eb\u2066c\x08\x7f"
CONTROLS = {
    "zero": ("\0", r"\x00"), "bell": ("\a", r"\x07"), "backspace": ("\b", r"\x08"), "vertical tab": ("\v", r"\x0b"),
    "form feed": ("\f", r"\x0c"), "carriage return": ("\r", r"\r"), "shift out": ("\x0e", r"\x0e"),
    "escape": ("\x1b", r"\x1b"), "colour": ("\x1b[31mred", r"\x1b[31mred"), "title": ("\x1b]0;t\a", r"\x1b]0;t\x07"),
    "link": ("\x1b]8;;http://a\x1b\\b", r"\x1b]8;;http://a\x1b" + r"\b"), "unit separator": ("\x1f", r"\x1f"),
    "delete": ("\x7f", r"\x7f"), "padding": ("\x80", r"\x80"), "next line": ("\x85", r"\x85"),
    "C1 sequence": ("\x9b2J", r"\x9b2J"), "C1 command": ("\x9d0;t\x9c", r"\x9d0;t\x9c"), "last C1": ("\x9f", r"\x9f"),
    "line separator": ("\u2028", r"\u2028"), "paragraph separator": ("\u2029", r"\u2029"),
    "right-to-left override": ("\u202e", r"\u202e"), "embedding": ("\u202a", r"\u202a"),
    "isolate": ("\u2066", r"\u2066"), "end of isolate": ("\u2069", r"\u2069"), "all": (HOSTILE, ESCAPED),
    # what stays
    "newline": ("a\nb", "a\nb"), "tab": ("a\tb", "a\tb"), "umlauts": ("äöü ß", "äöü ß"), "Chinese": ("你好", "你好"),
    "Hebrew": ("שלום\u200f", "שלום\u200f"), "emoji": ("👩\u200d💻", "👩\u200d💻"), "soft hyphen": ("\xad", "\xad"),
    "no-break space": ("\xa0", "\xa0"), "a backslash": (r"\x1b", r"\x1b")}


@pytest.mark.parametrize("name", CONTROLS)
def test_control_characters_are_escaped_where_lines_are_printed(name, capsys):
    text, wanted = CONTROLS[name]
    say("first", f"<{text}>", 3)
    assert capsys.readouterr().out == f"first\n<{wanted}>\n3\n"
    assert printable(printable(text)) == wanted


@pytest.mark.parametrize("text, wanted", [(HOSTILE, ESCAPED), ("a\nerror: b", r"a\nerror: b"), ("a\r\nb", r"a\r\nb"),
                                          ("\ud800", r"\ud800")])
def test_an_error_is_one_line(tmp_path, text, wanted):
    """Also a warning of a library on stderr; a progress bar's own characters stay."""
    script = tmp_path / "script.py"
    script.write_text(f"""
import logging, sys, warnings
sys.path.insert(0, {str(ROOT)!r})
from lib.runtime import InputError, run_stage
def main():
    text = {text!r}
    logging.getLogger("library").warning(text.replace("\\n", ""))
    sys.stderr.write("\\r50 %|###  |")
    sys.stderr.write("\\x1b[A\\x1b[A")
    raise InputError(text)
run_stage(main)
""")
    assert wait(begin(str(script), folder=tmp_path)) == 2
    warning, _, error = (tmp_path / "0.err").read_bytes().decode().partition("\n")     # a text would have no \r
    assert (warning, error) == (wanted.replace(r"\n", ""), f"\r50 %|###  |\x1b[A\x1b[Aerror: {wanted}\n")
    assert (tmp_path / "0.out").read_bytes() == b""


def hostile_trajectories(workspace, path, **fields):
    with open(path, "w", encoding="utf-8") as file:
        for row in read(workspace / "demos.jsonl")[:1]:
            file.write(json.dumps({**row, **fields}) + "\n")
    return path


def assert_plain(process):
    """Nothing but printable characters and newlines in what a stage has printed, bars aside."""
    for text in (process.stdout, process.stderr.replace("\r", "")):
        assert printable(text) == text


def test_fields_of_rows_are_escaped(workspace, tmp_path):
    path = hostile_trajectories(workspace, tmp_path / "a.jsonl", scorer=HOSTILE)
    process = run("05_evaluate.py", f"a={path}", "--out", tmp_path / "report")
    assert process.returncode == 0 and f"logged with {ESCAPED}, scored again" in process.stdout
    assert_plain(process)
    path = hostile_trajectories(workspace, tmp_path / "b.jsonl", task_id=HOSTILE, max_rounds=3)
    process = run("02_rollout.py", "--tasks", path, "--agent", "models/tiny", "--branch", 2, "--max-rounds", 4, "--out",
                  tmp_path / "out")
    assert process.returncode == 2 and f"task {ESCAPED} was played with --max-rounds 3" in process.stderr
    assert_plain(process)


def test_errors_of_references_and_names_of_files_are_escaped(workspace, tmp_path):
    tasks = read(workspace / "tasks.jsonl")[:2]
    for task in tasks:
        task["ground_truth"] = f"raise ValueError({HOSTILE!r})"
    path = tmp_path / f"{HOSTILE.replace('/', '')}.jsonl"
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    for process in (run("01_generate_tasks.py", "--check", path),
                    run("02_rollout.py", "--tasks", f"{path}.none", "--agent", "script", "--out", tmp_path / "out")):
        assert ESCAPED in process.stdout + process.stderr
        assert_plain(process)


def test_messages_of_servers_are_escaped_and_kept_raw_in_files(tmp_path, answer):  # noqa: F811
    stage(1).main(["--num-tasks", "2", "--out", str(tmp_path / "tasks")])
    listener = answer(http_reply({"error": {"message": HOSTILE.replace("\r", "")}}, "500 Wrong"))
    process = run("02_rollout.py", "--tasks", tmp_path / "tasks", "--agent", listener.url, "--simulator", "rules",
                  "--retries", 0, "--out", tmp_path / "out")
    assert process.returncode == 2 and f"status 500: {ESCAPED.replace(chr(92) + 'r', '')}" in process.stderr
    assert_plain(process)
    assert all(HOSTILE.replace("\r", "") in row["failed"] for row in read(tmp_path / "out.failed.jsonl"))


def test_the_log_of_the_benchmark_is_escaped(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stderr", sys.stderr)                 # run_stage replaces it
    monkeypatch.setattr(logging.getLogger("colbench"), "handlers", [])

    def main():
        logging.getLogger("colbench").info(HOSTILE)
        raise InputError(HOSTILE)
    with pytest.raises(SystemExit):
        run_stage(main)
    assert capsys.readouterr().out == ESCAPED + "\n"


def test_lines_are_printed_in_one_place():
    """A print() elsewhere would bring control characters to the terminal. colbench's two say where a folder is."""
    files = [*ROOT.glob("0*.py"), ROOT / "common.py", *ROOT.glob("lib/*.py"), *ROOT.glob("colbench/*.py")]
    prints = {}
    for path in files:
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        prints[path.name] = sum(getattr(call.func, "id", "") == "print" for call in calls)
    assert len(files) > 25
    assert {name: count for name, count in prints.items() if count} == {"runtime.py": 2, "sandbox_worker.py": 2, "sandbox.py": 1}
