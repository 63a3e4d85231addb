"""Dialogues for other programs (05 --export messages): chats of OpenAI's form."""
import json


def export(path, name, trajectories, systems):
    """Write the scored dialogues of a method to a file, a row each. systems: the agent's system prompt of each."""
    with open(path, "w", encoding="utf-8", errors="replace") as file:    # no program reads half an emoji
        for trajectory, system in zip(trajectories, systems):
            file.write(json.dumps(as_messages(name, trajectory, system), ensure_ascii=False) + "\n")


def as_messages(name, trajectory, system):
    """A row: "messages", what is known of the dialogue, and "advantages" and "kinds" of the agent's turns in order.

    What is not known is None."""
    kinds, advantages = trajectory["kinds"], trajectory.get("advantages")
    messages = [{"role": "system", "content": system}]
    for turn in trajectory["dialogue_history"]:
        messages.append({"role": turn["role"], "content": turn["content"]})
    return {
        "messages": messages,
        "method": name,
        "task_id": trajectory["task_id"],
        "run": trajectory.get("run", 0),
        "sample": trajectory["sample"],
        "reward": float(trajectory["reward"]),
        "credit": round(sum(advantages), 6) if advantages else None,
        "advantages": [round(value, 6) for value in advantages] if advantages else [None] * len(kinds),
        "kinds": kinds,
    }
