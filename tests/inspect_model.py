"""examples/colbench_inspect.py on a file of three tasks with Inspect's mock model: python inspect_model.py TASKS LOGS.

It asks for the first fact that a task needs; then it gives the reference, or (second task) what passes no test, or
(third task) it asks on. Prints a JSON line a task: its messages and its scores."""
import json
import sys

import colbench_inspect
from inspect_ai import eval as evaluate
from inspect_ai.model import get_model, ModelOutput, ModelUsage

path, logs = sys.argv[1:]
with open(path) as file:
    tasks = list(map(json.loads, file))


def say(messages, *_):
    request = messages[1].text.removesuffix("\n(last round)")
    [number] = [number for number, task in enumerate(tasks) if task["problem_description"] == request]
    fact = next(fact for fact in tasks[number]["facts"] if fact["matters"])
    answer = tasks[number]["ground_truth"] if number == 0 else "no code"
    asks = number == 2 or len(messages) == 2
    output = ModelOutput.from_content("mockllm/model", fact["questions"][0] if asks else f"I WANT TO ANSWER:\n{answer}")
    output.usage = ModelUsage()                                     # or the mock model asks the network for a tokenizer
    return output


model = get_model("mockllm/model", custom_outputs=say)
user_output = ModelOutput.from_content("mockllm/user", "As you like.")
user_output.usage = ModelUsage()
for simulator in ("rules", get_model("mockllm/user", custom_outputs=[user_output] * 4)):
    task = colbench_inspect.colbench(tasks=path, max_rounds=3, simulator=simulator)
    [log] = evaluate(task, model=model, log_dir=logs, display="none")
    assert log.status == "success", log.error
    for sample in log.samples:
        messages = [[message.role, message.text] for message in sample.messages]
        print(json.dumps({"messages": messages, "scores": sample.scores["hidden_tests"].value}))

# A single turn is the last round, too (02 --single-turn).
[log] = evaluate(colbench_inspect.colbench(tasks=path, max_rounds=1), model=model, log_dir=logs, display="none")
assert all(sample.messages[1].text.endswith("\n(last round)") for sample in log.samples)
