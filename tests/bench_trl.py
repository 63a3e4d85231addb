"""A step of DPO on pairs of actions here and by TRL's DPOTrainer, on a CPU: same weights, pairs, rate and threads.

    pip install trl
    python tests/bench_trl.py

SmolLM2-135M's shape with random weights, float32, one thread; a step of four pairs that share a prompt. The two sides
are processes of their own and take turns. Seconds are of the processor and include the reference model's share; peak
memory is what training adds. The losses must agree: both are printed.

ours   04's loss with --pairs-together: a prompt and its eight actions are one tree
trl    DPOTrainer with a precomputed reference, and with what makes it faster on a CPU: logits of action tokens alone
       (TRL does so on GPUs), the attention kernel for causal masks, and this repository's settings of malloc"""
import argparse
import importlib
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
import types

import torch
import transformers

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROMPT_TOKENS, ACTION_TOKENS = (400, 800), (40, 120)                 # least and most
NUM_PAIRS = 4                                                        # of a prompt, and of a step
LEARNING_RATE, BETA = 1e-6, .1


def random_prompts(number):
    """[(prompt, [(chosen, rejected), …])] of random token ids."""
    rng = random.Random(0)

    def random_ids(lengths):
        return [rng.randrange(17, 49152) for _ in range(rng.randint(*lengths))]
    prompts = []
    for _ in range(number):
        pairs = [(random_ids(ACTION_TOKENS), random_ids(ACTION_TOKENS)) for _ in range(NUM_PAIRS)]
        prompts.append((random_ids(PROMPT_TOKENS), pairs))
    return prompts


def random_model():
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, tie_word_embeddings=True, max_position_embeddings=8192))


def train_ours(prompts):
    """(processor seconds of the reference model, of each step, losses)."""
    sys.path.insert(0, str(ROOT))
    import common
    from lib import logps, runtime, training
    stage = importlib.import_module("04_train_policy")
    runtime.start(0)
    action_model = logps.ActionModel(random_model())
    job = types.SimpleNamespace(beta=BETA, nll_coef=0, sharding=types.SimpleNamespace(dtype="float32"))
    examples = []
    for prompt, pairs in prompts:
        ids, action_ids = list(prompt), [-1] * len(prompt)
        for number, action in enumerate(action for pair in pairs for action in pair):
            ids += action
            action_ids += [number] * len(action)
        item = [logps.Sequence(ids, action_ids, len(prompt))]
        action_pairs = [((0, 2 * pair), (0, 2 * pair + 1)) for pair in range(NUM_PAIRS)]
        examples.append(common.Example([item], action_pairs, ""))
    begin = time.process_time()
    ref_logps = [[outputs] for outputs in logps.action_outputs(action_model, logps.items_of(examples), 4096)]
    reference_s = time.process_time() - begin
    optimizer = training.adamw(action_model, LEARNING_RATE)
    seconds, losses = [], []
    for example, example_ref_logps in zip(examples, ref_logps):
        begin = time.process_time()
        batch = action_model.collate(example.items, "cpu")
        terms = stage.preference_losses(action_model, batch, [example], logps.padded_outputs([example_ref_logps]), job)
        loss = terms["loss"].sum() / NUM_PAIRS
        loss.backward()
        torch.nn.utils.clip_grad_norm_(action_model.parameters(), training.MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        seconds.append(time.process_time() - begin)
    return reference_s, seconds, losses


def train_by_trl(prompts):
    """As train_ours."""
    import datasets
    import trl
    import trl.trainer.utils
    from trl.trainer.dpo_trainer import DataCollatorForPreference
    torch.set_num_threads(1)
    trl.trainer.utils._use_triton = lambda device: True              # logits of action tokens alone
    reference_s, seconds, losses = [], [], []

    class Causal(DataCollatorForPreference):
        def torch_call(self, examples):
            batch = super().torch_call(examples)
            mask = torch.ones_like(batch["attention_mask"])          # padding is on the right: no action sees it
            return {**batch, "attention_mask": mask}

    class Trainer(trl.DPOTrainer):
        def _prepare_dataset(self, dataset, *_):
            return dataset                                           # these ids

        def _precompute_ref_logps(self, *arguments):
            begin = time.process_time()
            dataset = super()._precompute_ref_logps(*arguments)
            reference_s.append(time.process_time() - begin)
            return dataset

        def compute_loss(self, *arguments, **named):
            loss = super().compute_loss(*arguments, **named)
            losses.append(loss.item())
            return loss

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.begin = time.process_time()

        def on_step_end(self, *_, **__):
            seconds.append(time.process_time() - self.begin)

    rows = []
    for prompt, pairs in prompts:
        rows += [{"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected} for chosen, rejected in pairs]
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "models/tiny")
    settings = trl.DPOConfig(
        tempfile.mkdtemp(), use_cpu=True, bf16=False, activation_checkpointing=False, max_length=None, beta=BETA,
        precompute_ref_log_probs=True, precompute_ref_batch_size=NUM_PAIRS, per_device_train_batch_size=NUM_PAIRS,
        num_train_epochs=1, train_sampling_strategy="sequential", learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant", adam_beta1=.9, adam_beta2=.95, weight_decay=0, max_grad_norm=1,
        save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True, dataloader_pin_memory=False)
    trainer = Trainer(random_model(), args=settings, train_dataset=datasets.Dataset.from_list(rows),
                      processing_class=tokenizer, data_collator=Causal(pad_token_id=tokenizer.pad_token_id),
                      callbacks=[Clock()])
    trainer.train()
    return reference_s[0], seconds, losses


SIDES = {"ours": train_ours, "trl": train_by_trl}


def status_gb(key):
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024 / 1e9


def measure(side, num_steps):
    """Train in this process: {"pair_s", "peak_gb", "losses"}. The first step, which warms up, does not count."""
    before = status_gb("VmRSS")
    reference_s, seconds, losses = SIDES[side](random_prompts(num_steps))
    pair_s = (reference_s / num_steps + statistics.median(seconds[1:])) / NUM_PAIRS
    return {"pair_s": pair_s, "peak_gb": status_gb("VmHWM") - before, "losses": losses}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(measure(args.side, args.steps)))
        return
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MALLOC_MMAP_MAX_": "0",
                   "MALLOC_TRIM_THRESHOLD_": str(2 ** 31 - 1)}       # ours sets the last two itself
    command = [sys.executable, __file__, "--steps", str(args.steps), "--side"]
    runs = {side: [] for side in SIDES}
    for _ in range(args.rounds):
        for side in SIDES:
            process = subprocess.run([*command, side], env=environment, text=True, stdout=subprocess.PIPE, check=True)
            runs[side].append(json.loads(process.stdout.splitlines()[-1]))
    for side, measured in runs.items():
        pair_s = [run["pair_s"] for run in measured]
        print(f"{side:5} {1000 * statistics.median(pair_s):7,.0f} processor seconds for 1,000 pairs "
              f"({1000 * min(pair_s):,.0f} to {1000 * max(pair_s):,.0f}), "
              f"{statistics.median(run['peak_gb'] for run in measured):.1f} GB, "
              f"losses {' '.join(f'{loss:.5f}' for loss in measured[0]['losses'])}")


if __name__ == "__main__":
    main()
