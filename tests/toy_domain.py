"""A domain of its own: the user likes a colour, and the agent has to say it. test_house.py rolls it out."""
from colbench import check_keys, defaults
from colbench.defaults import *  # noqa: F403

NOUN = "colour"
FAMILIES = "car", "house"
AGENT_SYSTEM = "Find out the colour in {max_rounds} rounds."


def owns(task):
    return "toy" in task


def check_task(task, where):
    check_keys(task, {"toy": bool}, where)


def make_task(rng, family, told, accept):
    task_id = f"{rng.getrandbits(64):016x}"
    request = f"Guess what I like about my {family}."
    colour = rng.choice(("red", "green", "blue"))
    return accept(task_id) or {"task_id": task_id, "problem_description": request, "ground_truth": colour,
                               "family": family, "toy": True}


def answer_of(history, is_last):
    text = history[-1]["content"]
    return text.removeprefix("I say ") if text.startswith("I say ") or is_last else None


def scripted_turn(task, history, max_rounds, rng):
    if len(history) == 1:
        return rng.choice(("Which colour?", "I say red", "Is it round?"))
    return f"I say {task['ground_truth'] if 'It is' in history[-1]['content'] else rng.choice(('red', 'blue'))}"


PLAYERS = {"script": scripted_turn}


class Environment(defaults.Environment):
    about = {"judge": "equality"}

    async def rule_reply(self, task, history, rng):
        return f"It is {task['ground_truth']}." if "colour" in history[-1]["content"] else "What do you mean?"

    async def simulator_chat(self, task, history):
        return [{"role": "user", "content": f"You like {task['ground_truth']}. {history[-1]['content']}"}]

    async def score(self, pairs, explain=False):
        return [{"reward": float(answer == task["ground_truth"])} for task, answer in pairs]
