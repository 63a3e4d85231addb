"""Dialogues made by other programs, one per line: {"messages": [{"role", "content"}, …], "reward"}; optional: "c",
"c_text", "task_id".

The rewards of the file, from 0 to 1, are kept, because nothing here can score the answers. A leading system message is
the agent's system prompt. "c" is the critic's information: the solution, or anything else that the agent did not see.
"c_text" states it before the dialogue, with {c} in its place (default: Domain.SOLUTION_TEXT). Dialogues with the same
first user message and the same "c" belong to one task, or those with the same "task_id", which may differ in "c"."""
from colbench.domain import Domain, Environment, task_id
from colbench.schema import check_kind, InputError, label, list_of, nullable, number, one_of, record

MESSAGE = record({"role": one_of("system", "user", "assistant"), "content": str})
ROW = record({"messages": list_of(MESSAGE), "reward": number(0, 1)},
             {"c": str, "c_text": str, "task_id": label, "advantages": list_of(nullable(float))})


class OwnEnvironment(Environment):
    async def simulator_chat(self, task, history):
        raise InputError("dialogues of other programs have no user simulator")

    async def verdicts(self, pairs, explain):
        return [{} for _ in pairs]


class Own(Domain):
    """Makes no tasks, and is in no list of domains."""

    NOUN = "text"
    FAMILIES = ()
    AGENT_SYSTEM = ""
    SCORE_KEYS = ()
    MIN_RETURN_GAP = 1e-6
    ANSWERS_EARLY = False
    Environment = OwnEnvironment

    def as_trajectory(self, row, where):
        """The trajectory of a row. Raises InputError, which starts with `where`, if the row is not a dialogue."""
        check_kind(row, ROW, where)
        messages = row["messages"]
        roles = [message["role"] for message in messages]
        turns = messages[roles[:1].count("system"):]
        if "system" in roles[1:] or not {"user", "assistant"} <= set(roles) or turns[0]["role"] != "user":
            raise InputError(f'{where}: "messages" must begin with a user\'s, after at most one of the system, and '
                                "have one of the assistant")
        task = {"problem_description": turns[0]["content"], "ground_truth": row.get("c", ""), "own": True}
        if "c_text" in row:
            task["solution_text"] = row["c_text"]
        answer = [turn["content"] for turn in turns if turn["role"] == "assistant"][-1]
        advantages = row.get("advantages", [None])
        advantages = None if None in advantages else advantages      # 05 exports None where it knows no advantage
        name = row.get("task_id") or task_id(task)
        trajectory = {"task_id": name, "task": task, "dialogue_history": turns, "answer": answer,
                      "reward": row["reward"], "max_rounds": len(turns), "advantages": advantages}
        if len(turns) < len(messages):
            trajectory["system_prompt"] = messages[0]["content"]
        return trajectory

    def owns(self, task):
        return "own" in task

    def check_task(self, task, where):
        pass

    def answer_of(self, history, is_last):
        return history[-1]["content"] if is_last else None

    def lacks(self, task, player):
        return "facts"

    def metric(self, trajectories):
        return "mean_reward"

    def eval_score(self, trajectory):
        return trajectory["reward"]
