"""The training loop's plumbing, the same for 03 and 04: batches, schedule, optimiser, checkpoints, log."""
import collections
import dataclasses
import functools
import itertools
import json
import math
import pathlib
import re
import shutil
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from lib import runtime
from lib.flags import pick
from lib.load import lora_config, save_model, Sharding, whole_tensor
from lib.logps import items_of, load_sharded, longest_sequence
from lib.runtime import barrier, InputError, is_main, open_track, say


class Schedule(NamedTuple):
    """The optimizer steps of a run: flags of flags.add_training."""

    batch_size: int                 # examples per step, over all ranks
    micro_batch_size: int           # examples per forward pass
    epochs: int
    max_steps: int | None
    lr: float
    seed: int
    save_every: int                 # steps


class Job:
    """Shared by 03, 04 and its forks: the flags of flags.add_training by name, the ranks and the output.

    run         runtime.start()
    output      runtime.Output, a folder
    path        of the trajectories, for errors
    model       name of the model that is trained
    lora        None, or the LoraConfig of its adapter; merge: whether a whole model is written
    load        logps.load_sharded: a model split over the ranks, to train it, or to score with it
    beta, nll_coef              of eq. 2 and 4
    sharding    load.Sharding
    max_length, max_tokens      tokens of an example, and of a pass without gradients
    dry_run     None, or the number of ranks whose memory is predicted"""

    def __init__(self, flags, inputs):
        """flags: all of the stage, {name: value}. inputs: further inputs of the output (Output)."""
        self.run = runtime.start(flags["seed"])
        self.output = runtime.Output(flags["out"], flags, [flags["trajectories"], flags["model"], *inputs], folder=True)
        self.path = flags["trajectories"]
        self.model = flags["model"]
        self.schedule = pick(Schedule, flags)
        if flags.get("pairs_together"):                              # an example is then all pairs of a turn
            batch_size = max(1, self.schedule.batch_size // flags["pairs_per_turn"])
            self.schedule = self.schedule._replace(batch_size=batch_size)
        self.beta = flags["beta"]
        self.nll_coef = flags["nll_coef"]
        self.sharding = Sharding(flags["dtype"], flags["activation_checkpointing"], flags["seed"], flags["compile"])
        self.load = functools.partial(load_sharded, run=self.run, sharding=self.sharding)
        self.max_length = flags["max_length"]
        self.max_tokens = flags["max_tokens"]
        self.merge = flags["merge"]
        self.lora = lora_config(self.model, flags["lora"], flags["lora_targets"], self.merge)
        self.dry_run = flags["dry_run"]

    def fitting_indices(self, examples):
        """Numbers of the examples whose sequences all fit --max-length; reports how many are dropped.
        Raises InputError if none fits."""
        numbers = [i for i, example in enumerate(examples) if longest_sequence(example.items) <= self.max_length]
        num_long = len(examples) - len(numbers)
        if not numbers:
            raise InputError(f"{self.path}: no examples to train on: all {num_long:,} are longer than --max-length "
                             f"{self.max_length}")
        if num_long:
            say(f"dropped {num_long:,} of {len(examples):,} examples: longer than --max-length {self.max_length}")
        return numbers


def kind_of_examples(examples):
    """What the examples are, as "62 pairs of dialogues"."""
    first = examples[0]
    kind = "dialogues" if len(first.items) == 1 else "pairs of dialogues"
    if first.action_pairs:
        (chosen_item, _), (rejected_item, _) = first.action_pairs[0]
        kind = "pairs of turns" if chosen_item == rejected_item else "pairs of dialogues"
    number = sum(len(example.action_pairs) or 1 for example in examples)
    return f"{number:,} {kind}"


def show_samples(tokenizer, example):
    """Print an example as text before training, with the tokens that the loss sees in [brackets]. Each action of a tree
    starts a new line."""
    for sequence in itertools.chain(*example.items):
        text = ""
        for number, places in itertools.groupby(range(len(sequence.ids)), sequence.action_ids.__getitem__):
            piece = tokenizer.decode([sequence.ids[place] for place in places], skip_special_tokens=False)
            if number >= 0:
                piece = f"[{piece}]" if sequence.prompt_length is None else f"\n[{piece}]"
            text += piece
        text = re.sub(r"(<\|\w+\|>)\1{3,}", r"\1 …", text)                          # an image's tokens
        say(f"--- sample, the loss sees [brackets]:\n{text}\n---")


def epoch_batches(num_items, batch_size, epochs, seed):
    """Batches of item indices for a whole run: one seeded permutation per epoch, whose last batch may be short."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(epochs):
        order = torch.randperm(num_items, generator=generator).tolist()
        batches += [order[i:i + batch_size] for i in range(0, num_items, batch_size)]
    return batches


# The paper does not state these; the values are those of the published runs
WARMUP_FRAC = 0.03                                                  # of the steps
FINAL_LR_FRAC = 0.1                         # of the peak learning rate, one step after the end of the run
ADAM_BETAS = 0.9, 0.95
WEIGHT_DECAY = 0.0
MAX_GRAD_NORM = 1.0
PRINT_EVERY = 10                                                    # steps


def learning_rate(step, num_steps, peak):
    """Linear warm-up over WARMUP_FRAC of the steps, then a cosine; step counts from 0. It would reach FINAL_LR_FRAC of
    the peak one step after the last step; the last of 8 steps has .145 of it."""
    warmup = max(1, round(WARMUP_FRAC * num_steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / (num_steps - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))               # from 1 to 0
    return peak * (FINAL_LR_FRAC + (1 - FINAL_LR_FRAC) * cosine)


def rank_batches(batch, examples, job):
    """This rank's share of a batch of example numbers, in micro-batches: yields (numbers, weights (examples,)).

    Examples of similar length go together, to reduce padding.
    All ranks make the same number of micro-batches, because they gather layers together: a rank with fewer examples
    than others adds the batch's shortest as a dummy example with weight 0; all others have weight 1."""
    batch = sorted(batch, key=lambda i: longest_sequence(examples[i].items))
    mine = batch[job.run.rank::job.run.world_size]
    weights = [1.0] * len(mine)
    if len(mine) * job.run.world_size < len(batch):
        mine.append(batch[0])
        weights.append(0.0)
    size = job.schedule.micro_batch_size
    for first in range(0, len(mine), size):
        yield mine[first:first + size], torch.tensor(weights[first:first + size], device=job.run.device)


# Two rewards (beta times log-ratios) closer than this count as equal: rounding errors were up to 8e-7 and 3e-4
EQUAL_MARGIN = {"float32": 1e-5, "bfloat16": 1e-3}


def preference_metrics(chosen, rejected, nll, dtype):
    """Numbers of pairs for the log, {name: (P,)}: accuracy, margin, the chosen side's implicit reward and mean NLL.
    A pair of equal rewards (EQUAL_MARGIN) is half right, as all pairs are before the first update (except with 03
    --reference-sees-c no)."""
    margin = chosen - rejected
    right = torch.where(margin.abs() <= EQUAL_MARGIN[dtype], 0.5, (margin > 0).float())
    return {"acc": right, "margin": margin, "chosen": chosen, "nll": nll}


class Loop:
    """The training loop without the loss: order of the examples, optimizer steps, log, saved states. A killed run
    continues from its last saved state.

    The numbers of each step are written to metrics.jsonl and tracked; every tenth step is printed. They are of that
    step alone. loss includes the NLL term; chosen and margin are rewards (beta times log-ratios).

        for step, batch_numbers in loop.steps():
            for micro, weights in rank_batches(batch_numbers, examples, job):
                loop.backward({"loss": …}, weights / num_terms)     # num_terms: of the step, whose loss is a mean
            loop.update(step)

    train_mode: whether dropout is on. Off for preferences: the reference log-probs are computed without it."""

    def __init__(self, action_model, examples, job, train_mode=True):
        self.action_model = action_model
        self.train_mode = train_mode
        self.examples = examples
        self.schedule = schedule = job.schedule
        self.output = job.output
        self.run = job.run
        batches = epoch_batches(len(examples), schedule.batch_size, schedule.epochs, schedule.seed)
        self.batches = batches[:schedule.max_steps]
        self.num_steps = len(self.batches)
        say(f"{len(examples):,} examples, {self.num_steps:,} steps of at most {schedule.batch_size}")
        self.output.note(trained_on=kind_of_examples(examples))
        self.optimizer = adamw(action_model, schedule.lr)
        self.checkpoints = Checkpoints(self.output.path / "states", action_model, self.optimizer)
        self.first_step = self.checkpoints.load()
        self.metrics = self.output.path / "metrics.jsonl"
        rows = cut_metrics(self.metrics, self.first_step)
        self.track = open_track(self.output)
        self.seconds = rows[-1]["seconds"] if rows else 0
        self.last = time.perf_counter()
        self.tokens = 0                                             # trained tokens since the last saved state

    def steps(self):
        """Yield (step, the numbers of its examples) for each remaining step."""
        self.action_model.train(self.train_mode)
        for step in range(self.first_step, self.num_steps):
            # for dropout: ranks draw different numbers, a resumed run the same ones again
            number = self.schedule.seed * self.num_steps + step
            torch.manual_seed(number * self.run.world_size + self.run.rank)
            self.sums = collections.Counter()
            yield step, self.batches[step]

    def backward(self, terms, weights):
        """Accumulate the gradient of sum(terms["loss"] * weights), (examples,) each: micro-batches and ranks add up
        until update(). The weighted sum of each term is added to the step's numbers in the log."""
        loss = (terms["loss"] * weights).sum()
        (loss * self.run.world_size).backward()                     # FSDP takes the ranks' mean, the batch is their sum
        for name, value in terms.items():
            self.sums[name] += (value.detach() * weights).sum().double()

    def update(self, step):
        """Clip the gradient's norm to MAX_GRAD_NORM, take an AdamW step and zero the gradient; then write a log line
        and, every --save-every steps, a saved state.

        Raises InputError on all ranks, before anything is updated, if the loss or the gradient's norm is not finite."""
        grad_norm = torch.nn.utils.clip_grad_norm_(self.action_model.parameters(), MAX_GRAD_NORM)
        grad_norm = whole_tensor(grad_norm).item()
        totals = torch.stack(list(self.sums.values()))
        dist.all_reduce(totals)
        numbers = dict(zip(self.sums, totals.tolist()))
        examples = [self.examples[i] for i in self.batches[step]]
        done = step + 1
        if not math.isfinite(numbers["loss"] + grad_norm):
            tasks = ", ".join({example.task_id for example in examples})
            raise InputError(f"{self.output.path}: step {done} of {self.num_steps}: the loss is {numbers['loss']:g} "
                             f"and its gradient norm {grad_norm:g}; no model was written; lower --lr or --beta, or "
                             f"check this step's tasks ({tasks})")
        lr = learning_rate(step, self.num_steps, self.schedule.lr)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        numbers |= {"lr": lr, "gnorm": grad_norm}
        num_tokens = sum(len(sequence.ids) for item in items_of(examples) for sequence in item)
        self.log(done, num_tokens, numbers)
        if done % self.schedule.save_every == 0 or done == self.num_steps:
            self.checkpoints.save(done)
            self.output.add_costs(trained_tokens=self.tokens)
            self.tokens = 0

    def log(self, step, num_tokens, numbers):
        """Write a log line. `step` counts from 1; `num_tokens`: of all ranks in this step."""
        now = time.perf_counter()
        step_s = now - self.last
        self.last = now
        self.seconds += step_s
        self.tokens += num_tokens
        speed = num_tokens / step_s
        if step % PRINT_EVERY == 0 or step == self.num_steps:
            eta = self.seconds / step * (self.num_steps - step) / 60
            texts = [f"{name} {value:.4g}" for name, value in numbers.items()]
            texts = [f"step {step:05d}/{self.num_steps:05d}", *texts, f"{speed:,.0f} tok/s", f"eta {eta:.1f}m"]
            say(" | ".join(texts))
        if is_main():
            row = {"step": step, **numbers, "tokens": num_tokens, "tokens_per_s": speed,
                   "peak_memory_mb": runtime.peak_memory_mb(), "seconds": self.seconds}
            with open(self.metrics, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            self.track(**row)


@dataclasses.dataclass(eq=False)
class Checkpoints:
    """The last two complete states of a run, in `folder`/STEP: shards of model and optimiser by
    torch.distributed.checkpoint, which any number of ranks can load. Order, schedule and seeds follow from the step and
    the arguments."""

    folder: pathlib.Path
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer

    def whole(self):
        """Steps of the complete states: .metadata is written last."""
        return sorted(int(path.parent.name) for path in self.folder.glob("*/.metadata"))

    def state(self):
        """Omits frozen parameters; a resumed run reloads them from the model's files."""
        from torch.distributed.checkpoint.state_dict import get_state_dict
        model, optimizer = get_state_dict(self.model, self.optimizer)
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if not parameter.requires_grad:
                model.pop(name, None)
        return {"model": model, "optimizer": optimizer}

    def save(self, step):
        """Save the state after `step` steps."""
        from torch.distributed import checkpoint as dcp
        folder = self.folder / str(step)
        if is_main():
            shutil.rmtree(folder, ignore_errors=True)               # left by a killed run
        barrier()
        dcp.save(self.state(), checkpoint_id=folder)
        if is_main():
            for old in self.whole()[:-2]:
                shutil.rmtree(self.folder / str(old))
        runtime.trim_memory()

    def load(self):
        """Load the last complete state and return its step (0: a new run)."""
        from torch.distributed import checkpoint as dcp
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
        from torch.distributed.checkpoint.state_dict import set_state_dict, StateDictOptions
        step = max(self.whole(), default=0)
        barrier()
        if step:
            state = self.state()
            # Parameters without a gradient (Gemma 3's vision tower) have no optimiser state.
            planner = DefaultLoadPlanner(allow_partial_load=True)
            dcp.load({"model": state["model"]}, checkpoint_id=self.folder / str(step))
            dcp.load({"optimizer": state["optimizer"]}, checkpoint_id=self.folder / str(step), planner=planner)
            set_state_dict(self.model, self.optimizer, model_state_dict=state["model"],
                           optim_state_dict=state["optimizer"], options=StateDictOptions(strict=False))
            say(f"continues at step {step}")
        return step


@runtime.on_main
def cut_metrics(path, step):
    """Cut metrics.jsonl back to the rows up to `step`; return these rows."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.endswith("}"):                                      # a kill may have cut the last line
            rows.append(json.loads(line))
    rows = [row for row in rows if row["step"] <= step]
    with runtime.whole_file(path) as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
    return rows


def adamw(action_model, lr):
    """AdamW of the parameters that are not frozen."""
    trained = [parameter for parameter in action_model.parameters() if parameter.requires_grad]
    if lr < 1e-5 and sum(parameter.numel() for parameter in action_model.parameters()) < 1e7:
        say(f"--lr {lr:g} is meant for 8B models; small models barely learn at it; scripts/recipes.toml has "
            "run.sh's rates")
    # fused: does not copy all parameters
    return torch.optim.AdamW(trained, lr=lr, betas=ADAM_BETAS, weight_decay=WEIGHT_DECAY, fused=True)


def finish_training(job, action_model, tokenizer):
    """Write the trained model (and a critic's head) into the output, mark the folder as complete, and remove files that
    only a resumed run needs."""
    folder = job.output.path
    save_model(folder, action_model.model, tokenizer, job.merge)
    head = getattr(action_model, "head", None)
    if head is not None:
        # not as safetensors: a server would load it as part of the model
        head = {name: whole_tensor(tensor.detach()).cpu() for name, tensor in head.named_parameters()}
    if is_main():
        if head is not None:
            torch.save(head, folder / "turn_head.pt")
        (folder / "COMPLETED").touch()                              # first, so that a kill from here on loses nothing
        for name in ("states", "initial"):
            shutil.rmtree(folder / name, ignore_errors=True)
        for path in folder.glob("ref*.pt"):                         # of logps.reference_logps
            path.unlink()
        say(f"writes {folder}")
    barrier()
    job.output.add_costs()
