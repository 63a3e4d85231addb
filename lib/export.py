"""Dialogues for other programs (05 --export messages): chats of OpenAI's form, made from the data of the report's page
(lib/report.py)."""
import pathlib

from lib.runtime import write_jsonl

ROLES = {"agent": "assistant", "human": "user"}


def export(folder, data, systems):
    """Write every dialogue of the data to `folder`/NAME.jsonl, NAME being its method.

    systems: the agent's system prompt in each dialogue."""
    folder = pathlib.Path(folder)
    folder.mkdir(exist_ok=True)
    for number, name in enumerate(data["methods"]):
        rows = []
        for dialogue, system in zip(data["dialogues"], systems):
            if dialogue["m"] == number:
                rows.append(as_messages(name, data, dialogue, system))
        write_jsonl(folder / f"{name}.jsonl", rows)


def as_messages(name, data, dialogue, system):
    """A row: "messages", what is known of the dialogue, and "advantages" and "kinds" of the agent's turns in order.

    What is not known is None."""
    messages = [{"role": "system", "content": encodable(system)}]
    for turn in dialogue["turns"]:
        messages.append({"role": ROLES[turn["who"]], "content": encodable(turn["text"])})
    agent_turns = [turn for turn in dialogue["turns"] if turn["who"] == "agent"]
    return {
        "messages": messages,
        "method": encodable(name),
        "task_id": encodable(data["tasks"][dialogue["t"]]["id"]),
        "run": dialogue["run"],
        "sample": dialogue["sample"],
        "reward": float(dialogue["reward"]),
        "credit": dialogue.get("credit"),
        "advantages": [turn.get("credit") for turn in agent_turns],
        "kinds": [turn.get("kind") for turn in agent_turns]}


def encodable(value):
    """A text whose lone surrogates, which UTF-8 has no bytes for, are escapes; other values as they are."""
    if not isinstance(value, str):
        return value
    return value.encode("utf-8", "backslashreplace").decode()
