"""05 --export messages: what it writes is a data set."""
import json

import pytest

from conftest import read, succeed
from lib import export

HALF = "a\ud800b"


@pytest.fixture(scope="module")
def exported(workspace, tmp_path_factory):
    """05's export file and the rows: one with a lone surrogate, one that states no agent."""
    folder = tmp_path_factory.mktemp("export")
    rows = read(workspace / "offline.jsonl")[:6]
    rows[0]["dialogue_history"][1]["content"] = HALF
    del rows[1]["agent"]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    succeed("05_evaluate.py", f"base={folder / 'a.jsonl'}", "--export", "messages", "--out", folder / "out")
    return folder / "out" / "export" / "base.jsonl", read(folder / "out" / "scored" / "base.jsonl")


def test_messages_are_a_data_set(exported, tmp_path):
    datasets = pytest.importorskip("datasets")
    path, rows = exported
    examples = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path))
    assert len(examples) == 6 and examples["reward"][:] == [row["reward"] for row in rows]
    for example, row in zip(examples, rows):
        assert [message["role"] for message in example["messages"]] == ["system"] + [
            turn["role"] for turn in row["dialogue_history"]]
        assert [message["content"] for message in example["messages"]][1:] == [
            turn["content"].replace("\ud800", "\\ud800") for turn in row["dialogue_history"]]
        assert example["messages"][0]["content"].startswith("You help a person")
        assert len(example["kinds"]) == len(example["advantages"]) == row["num_rounds"]


def test_credit_goes_with_the_turns():
    turns = [{"who": "human", "text": "?"}, {"who": "agent", "text": "a", "kind": "needed", "credit": 0.5, "cut": True},
             {"who": "human", "text": "b", "leak": "code"}]
    dialogue = {"m": 0, "t": 0, "run": 2, "sample": 1, "reward": 1, "credit": 0.5, "turns": turns}
    row = export.as_messages("n", {"tasks": [{"id": "x"}]}, dialogue, "s")
    assert row == {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "?"},
                                {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}],
                   "method": "n", "task_id": "x", "run": 2, "sample": 1, "reward": 1.0, "credit": 0.5,
                   "advantages": [0.5], "kinds": ["needed"]}
