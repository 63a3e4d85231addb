"""Dialogues that another program has made: critic, agent and report take {"messages", "reward", "c"} as it is."""
import json

import pytest

import common
from colbench import ColBenchError
from conftest import call, refused, ROOT
from lib.data import read_trajectories
from lib.runtime import InputError

BASE = ROOT / "models" / "tiny"


def dialogue(request, reply, reward, system="Be brief.", **more):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": request},
                {"role": "assistant", "content": "What is the fee?"}, {"role": "user", "content": "12"},
                {"role": "assistant", "content": reply}]
    return {"messages": messages[not system:], "reward": reward, **more}


@pytest.fixture
def path(tmp_path):
    rows = []
    for number in range(8):
        for reply, reward in (("Please use 12 for the fee.", 0.75), ("12 and <script>", 0.25)):
            rows.append(dialogue(f"the price of {number}", reply, reward, c=f"the fee is {number}"))
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_dialogue_is_what_the_file_says(path, tiny):
    [first, second, third, *_] = read_trajectories(path)
    assert first["task_id"] == second["task_id"] != third["task_id"] and (first["sample"], second["sample"]) == (0, 1)
    assert [first["reward"], second["reward"]] == [0.75, 0.25] and first["system_prompt"] == "Be brief."
    assert [turn["role"] for turn in first["dialogue_history"]] == ["user", "assistant", "user", "assistant"]
    chat = common.agent_chat(first, first["dialogue_history"][:3])
    assert [message["content"] for message in chat] == ["Be brief.", "the price of 0", "What is the fee?", "12"]
    assert common.trajectory_pairs([first, second], path) == [(0, 1)]
    assert "the fee is 0" in common.hidden_info(first["task"]) and common.hidden_info({**first["task"],
                                                                                    "ground_truth": ""}) == ""


def test_without_a_system_message_there_is_none(path):
    path.write_text(json.dumps(dialogue("a", "b", 1, system="")))
    [row] = read_trajectories(path)
    assert [message["role"] for message in common.agent_chat(row, row["dialogue_history"][:1])] == ["user"]


def test_all_stages_take_it(path, tmp_path):
    flags = ["--trajectories", path, "--model", BASE, "--epochs", 1, "--lr", 1e-4]
    printed = call(3, *flags, "--out", tmp_path / "critic")
    assert "32 rendered again without their system prompt, which the template leaves out" in printed
    call(4, "--method", "mtdpo", *flags, "--out", tmp_path / "mtdpo")
    call(4, "--method", "sweet", *flags, "--critic", tmp_path / "critic", "--max-new-tokens", 8,
            "--num-candidates", 4, "--out", tmp_path / "sweet")
    printed = call(5, f"mine={path}", "--critic", tmp_path / "critic", "--out", tmp_path / "report")
    metrics = json.loads((tmp_path / "report" / "metrics.json").read_text())["mine"]
    assert metrics["mean_reward"] == 0.5 and metrics["n"] == 16 and "0.500" in printed
    page = (tmp_path / "report" / "report.html").read_text()
    assert "the price of 3" in page and "12 and <script>" not in page


@pytest.mark.parametrize("change, fault", [
    ({"reward": "good"}, '"reward" is a str'),
    ({"messages": []}, '"messages" must begin with'),
    ({"messages": [{"role": "assistant", "content": "a"}]}, '"messages" must begin with'),
    ({"messages": [{"role": "tool", "content": "a"}]}, 'messages: item 0: "role"'),
    ({"c": 1}, '"c" is a int')])
def test_a_row_that_is_none_is_one_line(path, change, fault):
    path.write_text(json.dumps({**dialogue("a", "b", 1), **change}))
    with pytest.raises((InputError, ColBenchError), match=fault) as error:
        read_trajectories(path)
    assert str(error.value).startswith(f"{path}:1: ")


def test_two_kinds_in_one_file_are_refused(path, workspace):
    first = (workspace / "offline.jsonl").read_text().splitlines()[0]
    path.write_text(f"{first}\n{path.read_text()}")
    assert "a task of another domain" in refused(3, "--trajectories", path, "--model", BASE, "--out", path.parent / "o")
