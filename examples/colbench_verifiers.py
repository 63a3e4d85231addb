"""ColBench as an environment of the package verifiers (0.4), which prime-rl and other trainers use.

    pip install "verifiers>=0.4,<0.5" uv
    PYTHONPATH=.:examples vf-eval colbench_verifiers --env.taskset.tasks out/test.jsonl --model NAME \\
        --client.base-url http://HOST:PORT/v1 --client.api-key-var OPENAI_API_KEY --env.agent.harness.id null \\
        --env.agent.runtime.type subprocess --no-push

The tasks are a file of 01_generate_tasks.py. The agent and the rule-based user simulator take turns. The reward is the
share of hidden tests that the answer passes, by the confined scorer. Traces hold the solution: use a harness without
tools.
Without the last flags, verifiers runs the agent in a remote sandbox and uploads the traces.
"""
import atexit
import contextlib
import functools
import pathlib
import random

import verifiers.v1 as vf

from colbench import domain_of
from colbench.schema import InputError, read_jsonl

__all__ = ["ColBenchEnv", "ColBenchTaskset"]                        # verifiers finds the two classes here


class ColBenchConfig(vf.TasksetConfig):
    tasks: pathlib.Path = pathlib.Path("out/train.jsonl")
    max_rounds: int = 10


class ColBenchData(vf.TaskData):
    row: dict
    max_rounds: int


@functools.cache
def environment(domain):
    """The scorer and the user simulator of a domain, open from the first use to the end of this process."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(domain.Environment())


class ColBenchTask(vf.Task[ColBenchData]):
    @vf.reward
    async def tests_passed(self, trace: vf.Trace) -> float:
        """The return of the dialogue in `trace`; 0 if it ended without an answer."""
        domain, is_last = domain_of(self.data.row), len(trace.assistant_messages) == self.data.max_rounds
        answer = domain.answer_of([{"role": "assistant", "content": domain.shown(trace.last_reply)}], is_last)
        return 0.0 if answer is None else (await environment(domain).score([(self.data.row, answer)]))[0]["reward"]


class ColBenchTaskset(vf.Taskset[ColBenchTask, ColBenchConfig]):
    def load(self):
        def check(row, where, first):
            if missing := domain_of(row, where).lacks(row, "rules"):
                raise InputError(f'{where}: missing "{missing}"')
        rounds = self.config.max_rounds
        for row in read_jsonl(self.config.tasks, {}, check):
            system = domain_of(row).agent_system(rounds)
            prompt = row["problem_description"] + ("\n(last round)" if rounds == 1 else "")
            yield ColBenchTask(ColBenchData(prompt=prompt, system_prompt=system, row=row, max_rounds=rounds),
                               self.config.task)


class ColBenchEnv(vf.SingleAgentEnv):
    async def run(self, task, agents):
        row, domain = task.data.row, domain_of(task.data.row)
        history = [{"role": "user", "content": row["problem_description"]}]
        async with agents.agent.interaction(task) as chat:
            said = await chat.turn()                                # the agent's reply to the prompt
            for number in range(1, task.data.max_rounds + 1):
                history.append({"role": "assistant", "content": domain.shown(said.last_reply)})
                if said.terminated or domain.answer_of(history, number == task.data.max_rounds) is not None:
                    break
                rng = random.Random(f"{row['task_id']} {number}")
                reply = (await environment(domain).tool_reply(row, history) or
                         (await environment(domain).rule_reply(row, history, rng))[:domain.REPLY_CHARS])
                history.append({"role": "user", "content": reply})
                hint = "\n(last round)" if number + 1 == task.data.max_rounds else ""
                said = await chat.turn(reply + hint)
