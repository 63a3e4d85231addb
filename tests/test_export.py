"""05 --export: what it writes is read by the packages whose formats these are."""
import json

import pytest

from conftest import read, refused, succeed
from lib import export

HALF = "a\ud800b"


@pytest.fixture(scope="module")
def exported(workspace, tmp_path_factory):
    """05's folder with both exports, and the rows: one with a lone surrogate, one that states no agent."""
    folder = tmp_path_factory.mktemp("export")
    rows = read(workspace / "offline.jsonl")[:6]
    rows[0]["dialogue_history"][1]["content"] = HALF
    del rows[1]["agent"]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for form in export.FORMATS:
        succeed("05_evaluate.py", f"base={folder / 'a.jsonl'}", "--export", form, "--out", folder / form)
    return folder, read(folder / "atif" / "scored" / "base.jsonl")


def test_atif_documents_are_valid(exported):
    atif = pytest.importorskip("atif")
    folder, rows = exported
    paths = sorted((folder / "atif" / "export" / "base").iterdir())
    assert [path.name for path in paths] == [f"{n:06d}.json" for n in range(6)]
    for path, row in zip(paths, rows):
        document = atif.Trajectory.model_validate_json(path.read_text(encoding="utf-8"))
        assert document.schema_version == "ATIF-v1.8" and document.extra["reward"] == row["reward"]
        assert document.extra["task_id"] == row["task_id"] and document.agent.model_name == row.get("agent")
        assert [step.source for step in document.steps] == ["system"] + [
            {"assistant": "agent"}.get(turn["role"], "user") for turn in row["dialogue_history"]]
        assert [step.message for step in document.steps[1:]] == [
            turn["content"].replace("\ud800", "\\ud800") for turn in row["dialogue_history"]]
        agent = [turn for turn in row["dialogue_history"] if turn["role"] == "assistant"]
        steps = [step for step in document.steps if step.source == "agent"]
        assert [step.metrics.completion_tokens for step in steps] == [len(turn["output_ids"]) for turn in agent]
        assert all(step.extra["kind"] for step in steps) and "advantage" not in steps[0].extra


def test_messages_are_a_data_set(exported, tmp_path):
    datasets = pytest.importorskip("datasets")
    folder, rows = exported
    found = datasets.load_dataset("json", data_files=str(folder / "messages" / "export" / "base.jsonl"), split="train",
                                  cache_dir=str(tmp_path))
    assert len(found) == 6 and found["reward"][:] == [row["reward"] for row in rows]
    for example, row in zip(found, rows):
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
    row, data = {"system": "s", "agent": None}, {"tasks": [{"id": "x"}]}
    messages = export.as_messages("n", data, dialogue, row)
    assert messages == {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "?"},
                                     {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}],
                        "method": "n", "task_id": "x", "run": 2, "sample": 1, "reward": 1.0, "credit": 0.5,
                        "advantages": [0.5], "kinds": ["needed"]}
    pytest.importorskip("atif")
    steps = export.as_atif("n", data, dialogue, row)["steps"]
    assert [step.get("extra") for step in steps] == [None, None, {"advantage": 0.5, "kind": "needed", "cut": True},
                                                     {"leak": "code"}]


def test_without_the_package_atif_it_says_so_at_once(workspace, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "atif", None)
    assert refused(5, f"a={workspace}/offline.jsonl", "--export", "atif", "--out", tmp_path / "out") == (
        "--export atif needs the package atif: pip install atif")
    assert not (tmp_path / "out").exists()
