"""How fast this repository is on a GPU: a row of JSON for each measurement.

    python tests/bench_gpu.py --parts decode lora-compiled --out rows.jsonl
    python tests/bench_gpu.py --tiny                              # tries this program, on a CPU, too

Models have random weights, made on the GPU.
decode         a decoding step of the engine against the time in which the GPU reads all weights, keys and values
lora, critic   training steps; NAME-compiled: with --compile, of rows of several lengths
trees, trl     a step of 16 pairs, four for each of four prompts: as trees (--pairs-together), and by TRL's DPOTrainer,
               whose reference is computed before (pip install trl)
MFU is 6 N D over 989 TFLOP/s (H100, H200), of LoRA 4 N D: N parameters without input embeddings, D tokens without
padding. plan_gb: what --dry-run predicts."""
import argparse
import asyncio
import gc
import json
import pathlib
import random
import statistics
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from lib import memory, training  # noqa: E402
from lib.engine import Engine  # noqa: E402
from lib.load import add_adapter, import_peft, shard, Sharding
from lib.logps import ActionModel, collate, Sequence
from lib.runtime import peak_memory_mb, start  # noqa: E402

PEAK = 989e12                                   # FLOP/s of an H100 or H200, bfloat16
NAMES = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
SHAPES = {"8B": ((4096, 14336, 32, 32, 8), 128256, False), "1B": ((2048, 8192, 16, 32, 8), 128256, True),
          "tiny": ((64, 128, 2, 4, 2), 512, False)}
TREE, DIALOGUE = (600, 80, 8), (0, 252, 8)      # tokens of a prompt, of a turn; turns
TRAINING = {"lora": ("8B", 16, TREE, 6), "critic": ("1B", 0, DIALOGUE, 8),
            "trees": ("1B", 0, TREE, 4)}                            # model, rank of LoRA, rows and their number
PROMPT_TOKENS, NEW_TOKENS = 520, 48


def config_of(shape):
    sizes, vocab_size, is_tied = SHAPES[shape]
    return transformers.LlamaConfig(**dict(zip(NAMES, sizes)), vocab_size=vocab_size, tie_word_embeddings=is_tied,
                                    max_position_embeddings=16384)


def random_model(shape, device, dtype=torch.bfloat16, lora=None):
    """An ActionModel of random weights."""
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config_of(shape), dtype=dtype)
        if lora:
            add_adapter(model, lora)
    return ActionModel(model)


def random_items(number, num_prompt, num_action, num_actions):
    """Items of a tree of actions after a prompt; without a prompt of a dialogue, of whose turns a third is the
    agent's."""
    num_read = 0 if num_prompt else num_action * 2 // 3
    action_ids = [-1] * num_prompt
    for turn in range(num_actions):
        action_ids += [-1] * num_read + [turn] * (num_action - num_read)
    return [[Sequence(random_ids(len(action_ids)), action_ids, num_prompt or None)] for _ in range(number)]


def random_ids(number):
    return [random.randrange(3, 500) for _ in range(number)]


def num_parameters(model):
    return model.num_parameters(exclude_embeddings=not model.config.tie_word_embeddings)


def seconds_of(work, times, device):
    """The seconds of each call of work()."""
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return seconds


def train(name, is_tiny, device):
    kind, _, compiled = name.partition("-")
    shape, rank, form, num_rows = TRAINING[kind]
    if is_tiny:
        shape, form, num_rows = "tiny", (form[0] // 20, 9, form[2]), 2
    lora = import_peft().LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear") if rank else None
    sharding = Sharding("bfloat16", compile=bool(compiled))
    action_model = random_model(shape, device, torch.bfloat16 if lora else torch.float32, lora).train()
    shard(action_model, start(0), sharding)
    optimizer, items = training.adamw(action_model, 1e-6), random_items(num_rows, *form)

    def step(items=items):
        values = action_model(collate(items, device))               # (B, M)
        (-F.logsigmoid(.1 * values).mean()).backward()              # the losses of 03 and 04 cost no more
        torch.nn.utils.clip_grad_norm_(action_model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    first_s = seconds_of(step, 2, device)
    if compiled:                                                    # other lengths and numbers of rows
        others = iter([random_items(num_rows, *form[:2], form[2] // 2), items[:-1]])
        first_s += seconds_of(lambda: step(next(others)), 2, device)
    seconds = statistics.median(seconds_of(step, 5, device))
    row_tokens = len(items[0][0].ids)
    num_flop = (4 if rank else 6) * num_parameters(action_model.model) * num_rows * row_tokens
    planned = memory.PlannedStep(1, sharding, num_rows, row_tokens, False, form[0] > 0, lora)
    plan = memory.memory_plan(memory.planned_model(config_of(shape), planned), planned)
    yield {"model": shape, "first_s": first_s, "tokens_per_s": num_rows * row_tokens / seconds, "ms": 1000 * seconds,
           "mfu": num_flop / seconds / PEAK, "peak_gb": peak_memory_mb() * 2 ** 20 / 1e9,
           "plan_gb": plan["total"] / 1e9}


def train_by_trl(name, is_tiny, device):
    import datasets
    import trl
    pairs, begins = [], []
    for _ in range(4):
        prompt = random_ids(30 if is_tiny else 600)
        for _ in range(4):
            pairs.append({"prompt_ids": prompt, "chosen_ids": random_ids(80), "rejected_ids": random_ids(80)})

    class Trainer(trl.DPOTrainer):
        def _prepare_dataset(self, dataset, *_):
            return dataset                                          # these ids

        def training_step(self, *arguments):
            if device.type == "cuda":
                torch.cuda.synchronize()
            begins.append(time.perf_counter())
            return super().training_step(*arguments)

    model = random_model("tiny" if is_tiny else "1B", device, torch.float32).model
    settings = trl.DPOConfig(
        "/tmp/bench_gpu_trl", max_steps=8, per_device_train_batch_size=16, bf16=device.type == "cuda", max_length=None,
        use_cpu=device.type == "cpu", precompute_ref_log_probs=True, precompute_ref_batch_size=8, report_to="none",
        save_strategy="no", logging_strategy="no", learning_rate=1e-6, activation_checkpointing=False)
    trainer = Trainer(model, args=settings, train_dataset=datasets.Dataset.from_list(pairs * 8),
                      processing_class=transformers.AutoTokenizer.from_pretrained("models/tiny"))
    trainer.train()
    yield {"model": "1B", "trl": trl.__version__, "ms": 1000 * statistics.median(np.diff(begins)[2:]),
           "peak_gb": peak_memory_mb() * 2 ** 20 / 1e9}


def decode(name, is_tiny, device):
    numbers = torch.ones(2 ** (20 if is_tiny else 31), dtype=torch.bfloat16, device=device)
    bandwidth = numbers.nbytes / min(seconds_of(numbers.sum, 8, device))                    # bytes a second
    del numbers
    model = random_model("tiny" if is_tiny else "8B", device).eval().model
    config, num_tokens = model.config, PROMPT_TOKENS + NEW_TOKENS * 3 // 4
    kept = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * num_tokens      # bytes a row
    for num_rows in [3] if is_tiny else [64, 16, 256, 1]:
        seconds = seconds_of_steps(Engine(model, [], num_rows, 16384), num_rows)
        yield {"rows": num_rows, "bandwidth": bandwidth, "first_s": seconds[:4],
               "floor_ms": 1000 * (2 * num_parameters(model) + num_rows * kept) / bandwidth,
               "step_ms": 1000 * statistics.median(seconds[len(seconds) // 2:])}


def seconds_of_steps(engine, num_rows):
    """Of each decoding step."""
    plain_decode, seconds = engine.decode, []
    engine.decode = lambda: seconds.extend(seconds_of(plain_decode, 1, engine.device))

    async def sample_all():
        uniforms = torch.full((1, NEW_TOKENS), .5)
        await asyncio.gather(*(engine.generate(random_ids(PROMPT_TOKENS), uniforms, 1.0) for _ in range(num_rows)))
    asyncio.run(sample_all())
    return seconds


PARTS = {"decode": decode, **{kind + suffix: train for kind in TRAINING for suffix in ("", "-compiled")},
         "trl": train_by_trl}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["decode", "lora", "critic"])
    parser.add_argument("--tiny", action="store_true", help="small models")
    parser.add_argument("--out", default="bench_gpu.jsonl", help="file to append to")
    args = parser.parse_args()
    device = start(0).device
    card = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    for name in args.parts:
        random.seed(0)
        gc.collect()                                                # the model of the part before
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for row in PARTS[name](name, args.tiny, device):
            text = json.dumps({"part": name, **row, "card": card, "torch": torch.__version__})
            print(text, flush=True)
            with open(args.out, "a") as file:                       # a row is there as soon as it is measured
                file.write(text + "\n")


if __name__ == "__main__":
    main()
