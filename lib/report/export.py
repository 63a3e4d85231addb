"""Dialogues for other programs (05 --export messages): chats of OpenAI's form."""
import json

from lib.runtime import say


def export(folder, files, system_of):
    """Write the scored dialogues of each method, {name: trajectories}, to `folder`/NAME.jsonl, a row each.

    system_of(trajectory): the agent's system prompt."""
    folder.mkdir(exist_ok=True)
    for name, trajectories in files.items():
        path = folder / f"{name}.jsonl"
        with open(path, "w", encoding="utf-8", errors="replace") as file:                         # of half an emoji
            for trajectory in trajectories:
                row = as_messages(name, trajectory, system_of(trajectory))
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        say(f"writes {path} ({len(trajectories):,} rows)")


def as_messages(name, trajectory, system):
    """A row: "messages", what is known of the dialogue, and "advantages" and "kinds" of the agent's turns in order.

    What is not known is None."""
    kinds, advantages = trajectory["kinds"], trajectory.get("advantages")
    turns = [{"role": "system", "content": system}, *trajectory["dialogue_history"]]
    return {
        "messages": [{"role": turn["role"], "content": turn["content"]} for turn in turns],
        "method": name,
        "task_id": trajectory["task_id"],
        "run": trajectory.get("run", 0),
        "sample": trajectory["sample"],
        "reward": float(trajectory["reward"]),
        "advantage": round(sum(advantages), 6) if advantages else None,
        "advantages": [round(value, 6) for value in advantages] if advantages else [None] * len(kinds),
        "kinds": kinds,
    }
