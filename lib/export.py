"""Dialogues for other programs (05 --export): as ATIF, the Agent Trajectory Interchange Format (package atif), or as
chats of OpenAI's form. Both are made from the data of the report's page (lib/report.py)."""
import pathlib

from lib.runtime import InputError, say, write_json, write_jsonl

FORMATS = "atif", "messages"


def check_format(form):
    """InputError where a format needs a package that is not there."""
    if form == "atif":
        try:
            import atif  # noqa: F401  that it can be imported
        except ImportError:
            raise InputError("--export atif needs the package atif: pip install atif") from None


def export(folder, form, data, rows):
    """Write every dialogue of the data into `folder`: NAME.jsonl (messages), or NAME/NUMBER.json (atif), the number of
    the dialogue among its method's. rows: for each dialogue {"system": the agent's system prompt, "agent": its model
    or None}."""
    folder = pathlib.Path(folder)
    folder.mkdir(exist_ok=True)
    for m, name in enumerate(data["methods"]):
        own = [(dialogue, row) for dialogue, row in zip(data["dialogues"], rows) if dialogue["m"] == m]
        if form == "messages":
            write_jsonl(folder / f"{name}.jsonl", [as_messages(name, data, *pair) for pair in own])
            continue
        (folder / name).mkdir(exist_ok=True)
        for number, pair in enumerate(own):
            write_json(folder / name / f"{number:06d}.json", as_atif(name, data, *pair))
        say(f"writes {folder / name} ({len(own):,} dialogues)")


def about(name, data, dialogue):
    """What both formats say of a dialogue as a whole; of a key that is not known: None."""
    task_id = encodable(data["tasks"][dialogue["t"]]["id"])
    return {"method": encodable(name), "task_id": task_id, "run": dialogue["run"],
            "sample": dialogue["sample"], "reward": float(dialogue["reward"]), "credit": dialogue.get("credit")}


def as_messages(name, data, dialogue, row):
    """{"messages": [{"role", "content"}, …], …, "advantages", "kinds": of the agent's turns in their order}."""
    roles = {"agent": "assistant", "human": "user"}
    agent = [turn for turn in dialogue["turns"] if turn["who"] == "agent"]
    return {"messages": [{"role": "system", "content": encodable(row["system"])},
                         *({"role": roles[turn["who"]], "content": encodable(turn["text"])}
                           for turn in dialogue["turns"])],
            **about(name, data, dialogue), "advantages": [turn.get("credit") for turn in agent],
            "kinds": [turn.get("kind") for turn in agent]}


def as_atif(name, data, dialogue, row):
    """An ATIF document, checked by the package's own models. What it has no field for stands in "extra": of a turn of
    the agent its advantage, kind and whether it was cut, of the whole the reward."""
    from atif import Agent, Metrics, Step, Trajectory
    steps = [Step(step_id=1, source="system", message=encodable(row["system"]))]
    for turn in dialogue["turns"]:
        is_agent = turn["who"] == "agent"
        extra = {"advantage": turn.get("credit")} | {key: turn.get(key) for key in ("kind", "cut", "leak", "tool")}
        extra = {key: value for key, value in extra.items() if value is not None}
        steps.append(Step(step_id=len(steps) + 1, source="agent" if is_agent else "user", extra=extra or None,
                          message=encodable(turn["text"]),
                          metrics=Metrics(completion_tokens=turn["tokens"]) if "tokens" in turn else None))
    extra = {key: value for key, value in about(name, data, dialogue).items() if value is not None}
    document = Trajectory(
        schema_version="ATIF-v1.8",
        session_id="/".join(str(extra[key]) for key in ("method", "task_id", "run", "sample")),
        agent=Agent(name=encodable(name), version="unversioned", model_name=encodable(row["agent"])),
        steps=steps, extra=extra)
    return document.to_json_dict()


def encodable(value):
    """A text whose lone surrogates, which UTF-8 has no bytes for, are escapes; other values as they are."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
