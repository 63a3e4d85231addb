"""ColBench as an environment of TRL's GRPOTrainer (1.16): two tools, `ask` and `submit`, and one reward per dialogue.

    pip install "trl>=1.16,<1.17"
    PYTHONPATH=. python examples/colbench_trl.py --tasks out/train.jsonl --model Qwen/Qwen3-0.6B --out out/grpo

The tasks are a file of 01_generate_tasks.py, of Python functions. The user simulator is rule-based. The reward is the
share of hidden tests that the submitted code passes, by the confined scorer. TRL must recognise the model's chat
template as one with tools; its `environment_factory` is experimental. Further settings (memory, batches) are those of
GRPOConfig.
"""
import argparse
import functools
import json
import random

from datasets import Dataset
from transformers.utils import is_torch_bf16_gpu_available
from trl import GRPOConfig, GRPOTrainer

from colbench import backend
from colbench.schema import read_jsonl

SYSTEM = ("You help a person with one Python function. The request leaves things out that only the person knows. Ask "
          "one short question at a time with `ask`. When you know enough, `submit` the complete function.")


class ColBench:
    """One dialogue. TRL runs several at a time. All public methods except reset and get_reward are tools."""

    def __init__(self, environment):
        self.environment = environment

    def reset(self, task, **row):
        self.task, self.code = json.loads(task), None
        self.history = [{"role": "user", "content": self.task["problem_description"]}]

    async def ask(self, question: str) -> str:
        """Ask the person one short question about what the function should do.

        Args:
            question: The question, in plain English.
        """
        self.history.append({"role": "assistant", "content": question})
        rng = random.Random(f"{self.task['task_id']} {len(self.history)}")
        reply = (await self.environment.rule_reply(self.task, self.history, rng))[:backend.REPLY_CHARS]
        self.history.append({"role": "user", "content": reply})
        return reply

    async def submit(self, code: str) -> str:
        """Give the complete Python function. The first one counts.

        Args:
            code: The function.
        """
        self.code = code if self.code is None else self.code
        return "Thank you."

    async def get_reward(self) -> float:
        return 0.0 if self.code is None else (await self.environment.score([(self.task, self.code)]))[0]["reward"]


def main():
    parser = argparse.ArgumentParser()
    for name in ("tasks", "model", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    rows = []
    for task in read_jsonl(args.tasks, {"problem_description": str}):
        request = {"role": "user", "content": task["problem_description"]}
        prompt = [{"role": "system", "content": SYSTEM}, request]
        rows.append({"task": json.dumps(task), "prompt": prompt})   # JSON text, because tasks differ in their fields
    config = GRPOConfig(args.out, max_steps=args.steps, num_generations=8, per_device_train_batch_size=8,
                        max_completion_length=1024, max_tool_calling_iterations=10, logging_steps=1, report_to="none",
                        bf16=is_torch_bf16_gpu_available())
    with backend.Environment() as environment:
        trainer = GRPOTrainer(args.model, args=config, train_dataset=Dataset.from_list(rows),
                              environment_factory=functools.partial(ColBench, environment))
        trainer.train()
        trainer.save_model()


if __name__ == "__main__":
    main()
