"""The training loop's plumbing, the same for 03 and 04: batches, schedule, optimiser, checkpoints, log."""
import json
import math
import pathlib
import re
import shutil
import time

import torch
import torch.distributed as dist

from lib.models import save_model, whole_tensor
from lib.runtime import (
    barrier,
    InputError,
    is_main,
    on_main,
    peak_memory_mb,
    read_rows,
    say,
    trim_memory,
    whole_file,
)


def fitting_numbers(examples, max_length):
    """The numbers of the examples whose rows all have at most `max_length` tokens; says how many have not."""
    numbers = [i for i, example in enumerate(examples) if longest_row(example) <= max_length]
    if len(numbers) < len(examples):
        say(f"dropped {len(examples) - len(numbers):,} of {len(examples):,} examples: longer than --max-length "
            f"{max_length}")
    return numbers


def item_length(item):
    """The number of tokens of the longest row of an item."""
    return max(len(row.ids) for row in item)


def longest_row(example):
    """The number of tokens of the longest row of an example (common.Example)."""
    return max(map(item_length, example.items))


def show_samples(tokenizer, example):
    """Print an example as text before training, with the tokens that the loss sees in [brackets]; each action of a tree
    begins a line."""
    for item in example.items:
        for row in item:
            numbers, text, start_at = row.turn_ids, "", 0
            for end in range(1, len(row.ids) + 1):
                if end == len(row.ids) or numbers[end] != numbers[start_at]:
                    piece = tokenizer.decode(row.ids[start_at:end], skip_special_tokens=False)
                    if numbers[start_at] >= 0:
                        piece = f"[{piece}]" if row.prompt_length is None else f"\n[{piece}]"
                    text += piece
                    start_at = end
            text = re.sub(r"(<\|\w+\|>)\1{3,}", r"\1 …", text)                      # tokens of a picture
            say(f"--- sample, the loss sees [brackets]:\n{text}\n---")


def epoch_batches(num_items, batch_size, epochs, seed):
    """Batches of item indices for a whole run: one seeded permutation an epoch, the last batch of each may be short."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(epochs):
        order = torch.randperm(num_items, generator=generator).tolist()
        batches += [order[i:i + batch_size] for i in range(0, num_items, batch_size)]
    return batches


# What the paper leaves open, as the published runs have it
WARMUP_FRAC = 0.03                                                  # of the steps, with a rising learning rate
FINAL_LR_FRAC = 0.1                                                 # of the peak learning rate, where the cosine ends
ADAM_BETAS = 0.9, 0.95
WEIGHT_DECAY = 0.0
MAX_GRAD_NORM = 1.0

PRINT_EVERY = 10                                                    # steps


def learning_rate(step, num_steps, peak):
    """Linear warm-up over WARMUP_FRAC of the steps, then a cosine down to FINAL_LR_FRAC of the peak; step from 0."""
    warmup = max(1, round(WARMUP_FRAC * num_steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))               # from 1 to 0
    return peak * (FINAL_LR_FRAC + (1 - FINAL_LR_FRAC) * cosine)


def rank_batches(batch, examples, micro_batch_size, run):
    """This rank's share of a batch of example numbers, in micro-batches: yields (numbers, weights (examples,)).

    Examples of like length go together, so that little is padded.
    Every rank has as many micro-batches, because ranks gather layers together: where a rank has fewer examples than
    others, the batch's shortest is a dummy example with weight 0; all others have weight 1."""
    batch = sorted(batch, key=lambda i: longest_row(examples[i]))
    mine = batch[run.rank::run.world_size]
    weights = [1.0] * len(mine)
    most = -(-len(batch) // run.world_size)
    while len(mine) < most:
        mine.append(batch[0])
        weights.append(0.0)
    for first in range(0, len(mine), micro_batch_size):
        last = first + micro_batch_size
        yield mine[first:last], torch.tensor(weights[first:last], device=run.device)


def num_tokens(examples, weights):
    """Tokens of the examples of a micro-batch, without dummy examples (rank_batches)."""
    number = 0
    for example, weight in zip(examples, weights.tolist()):          # at once: each element would wait for the device
        if weight:
            number += sum(len(row.ids) for item in example.items for row in item)
    return number


# Two rewards closer than this count as equal: rounding of up to 8e-7 and 3e-4 was seen
EQUAL_MARGIN = {"float32": 1e-5, "bfloat16": 1e-3}


def preference_numbers(chosen, rejected, nll, dtype):
    """What a log line shows of preferences, {name: (P,)}: rewards of both sides, the chosen one's mean NLL. A pair of
    equal rewards (EQUAL_MARGIN) is half right; before the first update all are (but for 03 --reference-sees-c no)."""
    margin = chosen - rejected
    right = torch.where(margin.abs() <= EQUAL_MARGIN[dtype], 0.5, (margin > 0).float())
    return {"acc": right, "margin": margin, "chosen": chosen, "nll": nll}


def weighted_sums(values, weights):
    """{name: sum of values * weights} of {name: values (n,)}, computed and copied to the host at once."""
    sums = torch.stack([(value.detach() * weights).sum() for value in values.values()])
    return dict(zip(values, sums.tolist()))


def optimizer_step(scorer, optimizer, sums, lr, where, task_ids):
    """One update. Returns numbers for the log: `sums` over all ranks, learning rate and gradient norm.

    InputError on all ranks, before anything is updated, where the loss or the norm is not finite; it begins with
    `where` and names the `task_ids` of the batch."""
    grad_norm = whole_tensor(torch.nn.utils.clip_grad_norm_(scorer.parameters(), MAX_GRAD_NORM)).item()
    device = next(scorer.parameters()).device
    totals = torch.tensor(list(sums.values()), dtype=torch.float64, device=device)
    dist.all_reduce(totals)
    numbers = dict(zip(sums, totals.tolist()))
    if not (math.isfinite(numbers["loss"]) and math.isfinite(grad_norm)):
        raise InputError(f"{where}: the loss is {numbers['loss']:g} and the norm of its gradient {grad_norm:g}; no "
                         f"model is written: lower --lr or --beta, or look at its tasks ({', '.join(task_ids)})")
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {**numbers, "lr": lr, "gnorm": grad_norm}


class Checkpoints:
    """What a run needs to go on, in `folder`/states/STEP: the shards of model and optimiser by
    torch.distributed.checkpoint, the last two that are whole; read again on any number of ranks. Order, schedule and
    seeds follow from the step and the arguments."""

    def __init__(self, folder, model, optimizer):
        self.folder, self.model, self.optimizer = pathlib.Path(folder) / "states", model, optimizer

    def whole(self):
        """Steps of the states that are whole: .metadata is written last."""
        return sorted(int(path.parent.name) for path in self.folder.glob("*/.metadata"))

    def state(self):
        from torch.distributed.checkpoint.state_dict import get_state_dict
        model, optimizer = get_state_dict(self.model, self.optimizer)
        frozen = self.frozen()
        return {"model": {name: tensor for name, tensor in model.items() if name not in frozen}, "optimizer": optimizer}

    def frozen(self):
        """Names of parameters that are not trained, which a resumed run reads from the model's files again."""
        return {name for name, parameter in self.model.named_parameters(remove_duplicate=False)
                if not parameter.requires_grad}

    def save(self, step):
        """Save the state after `step` steps."""
        from torch.distributed import checkpoint as dcp
        folder = self.folder / str(step)
        if is_main():
            shutil.rmtree(folder, ignore_errors=True)               # of a kill
        barrier()
        dcp.save(self.state(), checkpoint_id=folder)
        if is_main():
            for old in self.whole()[:-2]:
                shutil.rmtree(self.folder / str(old))
        trim_memory()

    def load(self):
        """Load the last whole state, cut metrics.jsonl back to it, and return its step (0: a new run)."""
        from torch.distributed import checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict, StateDictOptions
        step = max(self.whole(), default=0)
        barrier()
        if step:
            state = self.state()
            dcp.load(state, checkpoint_id=self.folder / str(step))
            set_state_dict(self.model, self.optimizer, model_state_dict=state["model"],
                           optim_state_dict=state["optimizer"], options=StateDictOptions(strict=not self.frozen()))
            say(f"continues at step {step}")
        cut_metrics(self.folder.parent / "metrics.jsonl", step)
        return step


@on_main
def cut_metrics(path, step):
    """Cut metrics.jsonl back to the rows up to `step`."""
    if not path.exists():
        return
    lines = [line for line in path.read_text().splitlines() if line.endswith("}")]      # a kill may have cut the last
    with whole_file(path) as file:
        for line in lines:
            if json.loads(line)["step"] <= step:
                file.write(line + "\n")


class StepLog:
    """Keeps the numbers of each step in `out`/metrics.jsonl, and tracks them; prints those of each tenth step.

    The numbers are of that step alone: loss has its further terms in it, chosen and margin are rewards (beta times
    log-ratios)."""

    def __init__(self, out, first_step, num_steps, open_track):
        """open_track: gives the tracking.Track of the rows that are there already."""
        self.path = pathlib.Path(out) / "metrics.jsonl"
        self.first_step, self.num_steps = first_step, num_steps
        rows = read_rows(self.path) if self.path.exists() else []
        self.track = open_track(rows=rows)
        self.seconds_before = rows[-1]["seconds"] if rows else 0
        self.begin = self.last = time.perf_counter()
        self.tokens = 0                                             # trained on since take_tokens()

    def step(self, step, num_tokens, **numbers):
        """`step` counts from 1; `num_tokens` were trained on by all ranks in this step."""
        self.tokens += int(num_tokens)
        now = time.perf_counter()
        speed = num_tokens / (now - self.last)
        self.last = now
        if step % PRINT_EVERY == 0 or step == self.num_steps:
            eta = (now - self.begin) / (step - self.first_step) * (self.num_steps - step)
            texts = [f"{name} {value:{'.1e' if name == 'lr' else '.4f'}}" for name, value in numbers.items()]
            say(f"step {step:05d}/{self.num_steps:05d} | {' | '.join(texts)} | {speed:,.0f} tok/s | "
                f"eta {eta / 60:.1f}m")
        if is_main():
            row = {"step": step, **numbers, "tokens": num_tokens, "tokens_per_s": speed,
                   "peak_memory_mb": peak_memory_mb(), "seconds": self.seconds_before + now - self.begin}
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            self.track.log(**row)

    def take_tokens(self):
        """Tokens trained on since the last call."""
        tokens, self.tokens = self.tokens, 0
        return tokens


def adamw(scorer, lr):
    """AdamW of the parameters that are not frozen."""
    trained = [parameter for parameter in scorer.parameters() if parameter.requires_grad]
    num_parameters = sum(parameter.numel() for parameter in scorer.parameters())
    if num_parameters < 1e7 and lr < 1e-5:
        say(f"--lr {lr:g} is for a model of 8B: one of {num_parameters:,} parameters hardly learns by it; run.sh's "
            "rates are in scripts/arms.toml")
    # fused: makes no copies of all parameters
    return torch.optim.AdamW(trained, lr=lr, betas=ADAM_BETAS, weight_decay=WEIGHT_DECAY, fused=True)


def finish_training(out, scorer, tokenizer, merge):
    """Write the trained model (and a critic's head beside it) into the folder `out`, mark the folder as complete, and
    remove what only a resumed run needs. merge: write a whole model in place of an adapter."""
    folder = pathlib.Path(out)
    save_model(folder, scorer.model, tokenizer, merge)
    if scorer.head is not None:
        save_head(folder / "turn_head.pt", scorer.head)
    if is_main():
        (folder / "COMPLETED").touch()                              # first: a kill from here on costs no training
        for name in ("states", "initial"):
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / "ref.pt").unlink(missing_ok=True)
        say(f"writes {folder}")
    barrier()


def save_head(path, head):
    """Write a critic's head; for all ranks. Not as safetensors: what serves the folder as a plain model would take it
    for a part of the model."""
    weights = {name: whole_tensor(tensor.detach()).cpu() for name, tensor in head.named_parameters()}
    if is_main():
        torch.save(weights, path)
