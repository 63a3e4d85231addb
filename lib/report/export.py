"""Dialogues for other programs (05 --export messages): chats of OpenAI's form."""
from lib.runtime import write_jsonl
from lib.sampling import sent_message
from lib.tokens import shown_system


def export(folder, files):
    """Write the scored dialogues of each method, {name: trajectories}, to `folder`/NAME.jsonl, a row each."""
    folder.mkdir(exist_ok=True)
    for name, trajectories in files.items():
        rows = [as_messages(name, trajectory, shown_system(trajectory)) for trajectory in trajectories]
        write_jsonl(folder / f"{name}.jsonl", rows)


def as_messages(name, trajectory, system):
    """A row: "messages", "c", what is known of the dialogue, "advantages" and "kinds" of the agent's turns in order.

    Unknown values are None."""
    kinds, advantages = trajectory["kinds"], trajectory.get("advantages")
    turns = [{"role": "system", "content": system}, *trajectory["dialogue_history"]]
    return {
        "messages": [sent_message({"role": turn["role"], "content": turn["content"]}) for turn in turns],
        "c": trajectory["task"]["ground_truth"],
        "method": name,
        "task_id": trajectory["task_id"],
        "run": trajectory.get("run", 0),
        "sample": trajectory["sample"],
        "reward": float(trajectory["reward"]),
        "advantage": round(sum(advantages), 6) if advantages else None,
        "advantages": [round(value, 6) for value in advantages] if advantages else [None] * len(kinds),
        "kinds": kinds,
    }
