"""Dialogues that another program has made: {"messages": [{"role", "content"}, …], "reward", "c" (optional)} a line.

The rewards of the file, from 0 to 1, count, because nothing here can score the answers. A system message at the
beginning is the agent's system prompt. "c" is what a critic may know: a reference solution, or anything else that the
agent did not see. Dialogues that begin with the same message of the user, and have the same "c", are of one task."""
from colbench import check_kind, ColBenchError, task_id
from colbench.defaults import *  # noqa: F403
from colbench.schema import list_of, nullable, number, one_of, record

NOUN = "text"
FAMILIES = ()
AGENT_SYSTEM = ""
SCORE_KEYS = ()
MIN_RETURN_GAP = 1e-6

MESSAGE = record({"role": one_of("system", "user", "assistant"), "content": str})
ROW = record({"messages": list_of(MESSAGE), "reward": number(0, 1)}, {"c": str, "advantages": list_of(nullable(float))})


def as_trajectory(row, where):
    """The trajectory of a row; ColBenchError, which begins with `where`, if it is none."""
    check_kind(row, ROW, where)
    messages = row["messages"]
    roles = [message["role"] for message in messages]
    turns = messages[roles[:1].count("system"):]
    if "system" in roles[1:] or not {"user", "assistant"} <= set(roles) or turns[0]["role"] != "user":
        raise ColBenchError(f'{where}: "messages" must begin with a user\'s, after at most one of the system, and have '
                            "one of the assistant")
    task = {"problem_description": turns[0]["content"], "ground_truth": row.get("c", ""), "own": True}
    answer = [turn["content"] for turn in turns if turn["role"] == "assistant"][-1]
    advantages = row.get("advantages", [None])
    advantages = None if None in advantages else advantages          # 05 exports None where it knows no advantage
    trajectory = {"task_id": task_id(task), "task": task, "dialogue_history": turns, "answer": answer,
                  "reward": row["reward"], "max_rounds": len(turns), "advantages": advantages}
    if len(turns) < len(messages):
        trajectory["system_prompt"] = messages[0]["content"]
    return trajectory


def lacks(task, player):
    return "facts"


def owns(task):
    return "own" in task


def check_task(task, where):
    pass


def answer_of(history, is_last):
    return history[-1]["content"] if is_last else None


def metric(trajectories):
    return "mean_reward"


def eval_score(trajectory):
    return trajectory["reward"]


class Environment(Environment):                                     # noqa: F405
    async def simulator_chat(self, task, history):
        raise ColBenchError("dialogues of other programs have no user simulator")

    async def score(self, pairs, explain=False):
        return [{} for _ in pairs]
