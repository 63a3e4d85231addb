"""A domain of its own: the user likes a shade of a colour, and the agent has to say it. test_house.py rolls it out."""
from colbench.domain import Domain, Environment, task_id
from colbench.schema import check_keys

COLOURS = "red", "green", "blue"
SHADES = "light", "dark"


class ToyEnvironment(Environment):
    """What 02 and 05 run: the user, by rule or played by a model, and the scores of answers."""

    about = {"judge": "equality"}

    async def rule_reply(self, task, history, rng):
        shade, colour = task["ground_truth"].split()
        message = history[-1]["content"]
        if "shade" in message:
            return f"It is {shade}."
        return f"It is {colour}." if "colour" in message else "What do you mean?"

    async def simulator_chat(self, task, history):
        return [{"role": "user", "content": f"You like {task['ground_truth']}. {history[-1]['content']}"}]

    async def verdicts(self, pairs, explain):
        """The reward is the share of the words that are right."""
        rows = []
        for task, answer in pairs:
            words, right_words = answer.split(), task["ground_truth"].split()
            num_right = sum(map(str.__eq__, words, right_words))
            rows.append({"reward": num_right / len(right_words)})
        return rows


def scripted_turn(task, history, max_rounds, rng):
    """The agent of demonstrations and first dialogues: it asks too little, and then guesses."""
    said = " ".join(turn["content"] for turn in history if turn["role"] == "user")
    shade, colour = (next((word for word in words if f"It is {word}" in said), None) for words in (SHADES, COLOURS))
    if len(history) == 1:
        return rng.choice(("Which colour?", "Which shade?", "Is it round?"))
    if len(history) == 3 and rng.random() < 0.5:
        return "Which colour?" if shade else "Which shade?"
    return f"I say {shade or rng.choice(SHADES)} {colour or rng.choice(COLOURS)}"


class Toy(Domain):
    """Tasks with the key "toy"."""

    NOUN = "colour"
    FAMILIES = "car", "house"
    AGENT_SYSTEM = 'Find out the colour in {max_rounds} rounds. Do not answer in JSON, such as {"colour": "red"}.'
    PLAYERS = {"script": scripted_turn}
    MIN_RETURN_GAP = 0.4            # rewards are graded: a right colour in the wrong shade is better than nothing
    COLUMNS = (("right_colour", "colour", ".3f"),)
    MEANINGS = {"colour": "share of the answers whose colour is right"}
    Environment = ToyEnvironment

    def owns(self, task):
        return "toy" in task

    def check_task(self, task, where):
        check_keys(task, {"toy": bool}, where)

    def make_task(self, rng, family, told, accept):
        """The number in the request only lets there be enough tasks."""
        request = f"Guess what I like about my {family} number {rng.randrange(1000)}."
        task = {"problem_description": request, "ground_truth": f"{rng.choice(SHADES)} {rng.choice(COLOURS)}",
                "family": family, "toy": True}
        name = task_id(task)        # a hash of the content, so that equal tasks are of the same split
        return accept(name) or {"task_id": name, **task}

    def answer_of(self, history, is_last):
        text = history[-1]["content"]
        return text.removeprefix("I say ") if text.startswith("I say ") or is_last else None

    def metric(self, trajectories):
        return "mean_reward"

    def measure(self, trajectories):
        """Further columns of 05's table."""
        hits = [row["answer"].split()[-1:] == row["task"]["ground_truth"].split()[-1:] for row in trajectories]
        return {"right_colour": sum(hits) / len(hits)}

    def eval_score(self, trajectory):
        """The value that 05 averages: the reward itself (by default, whether it is 1)."""
        return trajectory["reward"]
