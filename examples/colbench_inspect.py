"""ColBench as an evaluation of Inspect (inspect_ai 0.3).

    pip install "inspect-ai>=0.3.285,<0.4" openai
    PYTHONPATH=. inspect eval examples/colbench_inspect.py --model openai/NAME -T domain=backend -T num_tasks=100 \\
        -T max_rounds=10 -T simulator=rules

domain is backend (functions) or sql (queries). The agent and the user simulator take turns. The simulator is "rules",
or a model of Inspect (openai/NAME). The reward is the share of hidden tests that the answer passes, by the confined
scorer; success is a reward of 1. -T tasks=FILE takes a file of 01_generate_tasks.py in place of new template tasks.
"""
import atexit
import contextlib
import functools
import json
import random

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessageAssistant, ChatMessageSystem, ChatMessageUser, get_model
from inspect_ai.scorer import mean, Score, scorer, stderr
from inspect_ai.solver import solver

from colbench import domain_of, DOMAINS, make_tasks, task_id
from colbench.schema import read_jsonl

MESSAGES = {"system": ChatMessageSystem, "user": ChatMessageUser, "assistant": ChatMessageAssistant}


@functools.cache
def environment(domain):
    """The scorer and the simulator of a domain, open from the first use to the end of this process."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(domain.Environment())


async def reply_to(row, history, simulator):
    """The next reply: by the environment (a look into a database) or by the user simulator."""
    domain = domain_of(row)
    if reply := await environment(domain).tool_reply(row, history):
        return reply
    if simulator == "rules":
        rng = random.Random(f"{task_id(row)} {len(history)}")
        return (await environment(domain).rule_reply(row, history, rng))[:domain.REPLY_CHARS]
    chat = await environment(domain).simulator_chat(row, history)
    messages = [MESSAGES[turn["role"]](content=turn["content"]) for turn in chat]
    return (await get_model(simulator).generate(messages)).completion[:domain.REPLY_CHARS]


@solver
def dialogue(max_rounds, simulator):
    async def solve(state, generate):
        row, domain = state.metadata, domain_of(state.metadata)
        state.messages.insert(0, ChatMessageSystem(content=domain.agent_system(max_rounds)))
        history = [{"role": "user", "content": row["problem_description"]}]
        for number in range(1, max_rounds + 1):
            if number == max_rounds:
                state.messages[-1] = ChatMessageUser(content=history[-1]["content"] + "\n(last round)")
            state = await generate(state)
            history.append({"role": "assistant", "content": domain.shown(state.output.completion)})
            answer = domain.answer_of(history, number == max_rounds)
            if answer is not None:
                break
            history.append({"role": "user", "content": await reply_to(row, history, simulator)})
            state.messages.append(ChatMessageUser(content=history[-1]["content"]))
        state.store.set("answer", answer)
        return state
    return solve


@scorer(metrics={"reward": [mean(), stderr()], "success": [mean(), stderr()]})
def hidden_tests():
    async def score(state, target):
        answer = state.store.get("answer")
        [verdict] = await environment(domain_of(state.metadata)).score([(state.metadata, answer)])
        reward = verdict["reward"]
        return Score(value={"reward": reward, "success": reward == 1}, answer=answer, explanation=json.dumps(verdict))
    return score


@task
def colbench(tasks=None, domain="backend", num_tasks=100, max_rounds=10, simulator="rules"):
    rows = make_tasks(DOMAINS[domain], num_tasks, 0, "test", "none")
    if tasks:
        rows = read_jsonl(tasks, {})
    samples = []
    for row in rows:
        samples.append(Sample(row["problem_description"], target=row["ground_truth"], id=task_id(row), metadata=row))
    return Task(dataset=MemoryDataset(samples), solver=dialogue(max_rounds, simulator), scorer=hidden_tests())
