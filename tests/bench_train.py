"""DPO on pairs of actions: this project's training against TRL's DPOTrainer, same pairs, model and threads, in float32.

    pip install trl datasets accelerate     (or --peer-python of an environment that has them)
    python tests/bench_train.py --model FOLDER [--pairs shared|unshared] [--steps 3] [--rounds 3]

Each side is a process of its own on one thread; they take turns. Pairs are random token ids, 4 a step: "shared" has 4
pairs over each prompt, as SWEET makes them, "unshared" one. Sides:

ours            04 --pairs-together: one tree a turn
ours, LoRA      04 --pairs-together --lora 16 (needs peft)
trl, best       DPOTrainer with precomputed reference, the vocabulary projected at action tokens alone (TRL does so on
                GPUs alone; here one of its functions is patched), causal attention, and our allocator settings

Seconds are of the process's CPU, because other work on a machine changes wall time; the reference's share is included.
The losses of all sides must agree: they are printed."""
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

ROOT = pathlib.Path(__file__).resolve().parents[1]
VOCABULARY, BATCH = 49152, 4                                        # SmolLM2's; pairs a step


def make_pairs(args):
    """[(prompt, chosen, rejected)] of random ids, pairs of a prompt side by side."""
    rng, pairs = random.Random(0), []

    def ids(low, high):
        return [rng.randrange(17, VOCABULARY) for _ in range(rng.randint(low, high))]
    for number in range(args.steps * BATCH):
        if args.pairs == "unshared" or number % BATCH == 0:
            prompt = ids(*args.prompt)
        pairs.append((prompt, ids(*args.action), ids(*args.action)))
    return pairs


def status_mb(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key + ":")) / 1024


def train_ours(pairs, args):
    sys.path.insert(0, str(ROOT))
    import torch

    import common
    from lib.models import import_peft, Sharding, without_adapter
    from lib.runtime import start
    from lib.training import adamw
    dpo_loss = importlib.import_module("04_train_policy").dpo_loss
    lora = None
    if args.side == "ours, LoRA":
        lora = import_peft().LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    scorer = common.load_scorer(args.model, start(0), Sharding("float32", 1, False, args.out, 0), lora)
    together = BATCH if args.pairs == "shared" else 1
    examples = []                                                   # as 04 makes them: a prompt and its actions
    for first in range(0, len(pairs), together):
        prompt, actions = pairs[first][0], [action for pair in pairs[first:first + together] for action in pair[1:]]
        numbers = [n for n, action in enumerate(actions) for _ in action]
        item = [common.Row([*prompt, *sum(actions, [])], [-1] * len(prompt) + numbers, len(prompt))]
        examples.append(common.Example([item], [((0, 2 * n), (0, 2 * n + 1)) for n in range(together)], ""))
    begin = time.process_time()
    ref_outputs = common.example_outputs(without_adapter(scorer), examples, 4096, "cpu")
    reference_s = time.process_time() - begin
    optimizer = adamw(scorer.train(), 1e-6)
    losses, steps, size = [], [], BATCH // together
    for first in range(0, len(examples), size):
        begin, batch = time.process_time(), slice(first, first + size)
        sides = common.batch_pairs(examples[batch])
        logps = common.of_pairs(scorer(common.collate(common.items_of(examples[batch]))), sides)
        ref_logps = common.of_pairs(common.padded_outputs(ref_outputs[batch], "cpu"), sides)
        loss = dpo_loss(*logps.T, *ref_logps.T, 0.1)[0].mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(scorer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        steps.append(time.process_time() - begin)
    return reference_s, steps, losses


def train_trl(pairs, args):
    import torch
    import trl
    import trl.trainer.utils
    from datasets import Dataset, disable_progress_bars
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.trainer.dpo_trainer import DataCollatorForPreference
    torch.set_num_threads(1)
    disable_progress_bars()
    trl.trainer.utils._use_triton = lambda device: True
    steps, losses, reference = [], [], [0.0]

    class Causal(DataCollatorForPreference):
        """A mask of ones: padding is on the right, so no action sees it, and attention takes its causal kernel."""
        def torch_call(self, examples):
            batch = super().torch_call(examples)
            return {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}

    class Peer(trl.DPOTrainer):
        def _prepare_dataset(self, dataset, processing_class, args, dataset_name):
            return dataset                                          # token ids as they are

        def _precompute_ref_logps(self, *args):
            begin = time.process_time()
            dataset = super()._precompute_ref_logps(*args)
            reference[0] += time.process_time() - begin
            return dataset

        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            losses.append(loss.item())
            return loss

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            self.begin = time.process_time()

        def on_step_end(self, *args, **kwargs):
            steps.append(time.process_time() - self.begin)

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = [dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), pair)) for pair in pairs]
    config = trl.DPOConfig(
        output_dir=args.out, use_cpu=True, bf16=False, activation_checkpointing=False, max_length=None, beta=0.1,
        precompute_ref_log_probs=True, precompute_ref_batch_size=BATCH, max_steps=args.steps,
        per_device_train_batch_size=BATCH, train_sampling_strategy="sequential", learning_rate=1e-6,
        lr_scheduler_type="constant", adam_beta1=0.9, adam_beta2=0.95, weight_decay=0.0, max_grad_norm=1.0,
        eval_strategy="no", save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True,
        dataloader_pin_memory=False)
    Peer(model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32), processing_class=tokenizer,
         train_dataset=Dataset.from_list(rows), data_collator=Causal(pad_token_id=tokenizer.pad_token_id),
         callbacks=[Clock()], args=config).train()
    return reference[0], steps, losses


def run_side(args):
    """Train one side in this process, and print what it took."""
    args.out = tempfile.mkdtemp()
    pairs, before = make_pairs(args), status_mb("VmRSS")
    reference_s, steps, losses = (train_ours if args.side.startswith("ours") else train_trl)(pairs, args)
    pair_s = reference_s / len(pairs) + statistics.median(steps[1:]) / BATCH
    print(json.dumps({"pair_s": pair_s, "losses": losses, "peak_mb": status_mb("VmHWM") - before}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder of SmolLM2's vocabulary")
    parser.add_argument("--pairs", choices=["shared", "unshared"], default="shared")
    parser.add_argument("--prompt", type=int, nargs=2, default=[400, 800], help="least and most tokens")
    parser.add_argument("--action", type=int, nargs=2, default=[40, 120], help="least and most tokens")
    parser.add_argument("--steps", type=int, default=3, help="the first, which warms up, is not counted")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sides", nargs="+", default=["ours", "trl, best"])
    parser.add_argument("--peer-python", default=sys.executable, help="the interpreter for trl")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        return run_side(args)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
                   "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2 ** 31 - 1)}
    found = {side: [] for side in args.sides}
    for side in args.sides * args.rounds:
        python = sys.executable if side.startswith("ours") else args.peer_python
        process = subprocess.run([python, __file__, *sys.argv[1:], "--side", side], env=environment, text=True,
                                 stdout=subprocess.PIPE, check=True)
        found[side].append(json.loads(process.stdout.splitlines()[-1]))
    for side, runs in found.items():
        seconds, peak_mb = [1000 * run["pair_s"] for run in runs], statistics.median(run["peak_mb"] for run in runs)
        print(f"{side:12s} {statistics.median(seconds):8.0f} s of CPU for 1,000 {args.pairs} pairs ({min(seconds):.0f} "
              f"to {max(seconds):.0f}) | peak memory {peak_mb:6.0f} MB | losses "
              + ", ".join(f"{loss:.5f}" for loss in runs[0]["losses"]))


if __name__ == "__main__":
    main()
