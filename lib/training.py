"""The training loop's plumbing, the same for 03 and 04: batches, schedule, optimiser, checkpoints, log."""
import collections
import json
import math
import pathlib
import re
import shutil
import time

import torch

from lib.adapters import adapter_parameters
from lib.models import save_model, whole_tensor
from lib.runtime import (
    barrier,
    check_row,
    InputError,
    is_main,
    listing,
    new_file,
    on_main,
    open_file,
    parse_json,
    peak_memory_mb,
    reduce_sums,
    say,
    trim_memory,
)
from lib.servers import said
from lib.statistics import average_ranks
from lib.tables import aligned
from lib.tracking import Track


def drop_long(examples, args, what="examples to train on", needed=True):
    """Indices of the examples (tuples of items) whose rows all have at most args.max_length tokens; says how many it
    dropped. InputError where none of those `needed` is left."""
    tokens = [longest_row(example) for example in examples]
    kept = [i for i, length in enumerate(tokens) if length <= args.max_length]
    if needed and not kept:
        raise InputError(f"{args.trajectories}: no {what}: all {len(examples):,} are longer than --max-length "
                         f"{args.max_length}, the shortest has {min(tokens):,} tokens")
    if len(kept) < len(examples):
        say(f"dropped {len(examples) - len(kept):,} of {len(examples):,} {what}: longer than --max-length "
            f"{args.max_length}")
    return kept


def longest_row(example):
    """Tokens of the longest row of an example."""
    return max(len(row.ids) for item in example for row in item)


def show_samples(tokenizer, example):
    """Print an example as text before training, with the tokens that the loss sees in [brackets]."""
    for item in example:
        for ids, turns, *_ in item:
            text, start_at = "", 0
            for end in range(1, len(ids) + 1):
                if end == len(ids) or turns[end] != turns[start_at]:
                    piece = tokenizer.decode(ids[start_at:end], skip_special_tokens=False)
                    text += piece if turns[start_at] < 0 else f"[{piece}]"
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


def learning_rate(step, num_steps, peak, warmup_frac=0.03, final_frac=0.1):
    """Linear warm-up over `warmup_frac` of the steps, then a cosine down to `final_frac` of the peak; step from 0."""
    warmup = max(1, round(warmup_frac * num_steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    return peak * (final_frac + (1 - final_frac) * 0.5 * (1 + math.cos(math.pi * progress)))


def rank_batches(batch, examples, micro_batch_size, runtime):
    """[(numbers, weights (B,)), …]: this rank's share of a batch of example numbers in micro-batches. Examples of like
    length go together, so that little is padded. Every rank has as many micro-batches, because ranks gather layers
    together: where a rank has fewer examples than others, the batch's shortest stands in with weight 0."""
    batch = sorted(batch, key=lambda i: longest_row(examples[i]))
    mine = [(example, 1.0) for example in batch[runtime.rank::runtime.world_size]]
    mine += [(batch[0], 0.0)] * (-(-len(batch) // runtime.world_size) - len(mine))
    for start in range(0, len(mine), micro_batch_size):
        numbers, weights = zip(*mine[start:start + micro_batch_size])
        yield list(numbers), torch.tensor(weights, device=runtime.device)


def num_tokens(examples, micro, weights):
    """Tokens of the examples of a micro-batch, without stand-ins (rank_batches)."""
    return sum(len(row.ids) for i, weight in zip(micro, weights) if weight for item in examples[i] for row in item)


# Margins of a pair up to these are rounding: at the first step, where each is 0, up to 8e-7 and 3e-4 were seen
EQUAL_MARGIN = {"float32": 1e-5, "bfloat16": 1e-3}


def preference_numbers(chosen_rewards, rejected_rewards, nll, shares, dtype):
    """What a log line shows of preferences, each (P,) weighted by its share (P,) of the batch. An equal pair, as all
    are before the first update, is half right."""
    margin = chosen_rewards - rejected_rewards
    right = torch.where(margin.abs() <= EQUAL_MARGIN[dtype], 0.5, (margin > 0).float())
    sums = (torch.stack([right, margin, chosen_rewards, nll]) * shares).sum(1)
    return dict(zip(("acc", "margin", "chosen", "nll"), sums.tolist()))


def kind_lines(domain, rows, pairs):
    """A table of what SWEET's pairs say, by the domain's turn_kind (no lines where it has none): of each kind of turn
    the candidates, their mean rank by advantage (0 the worst, 1 the best), and how many are chosen and rejected, before
    and after all that matters is known. A collapse shows here before training."""
    if any(domain.turn_kind(row["task"], row["history"], "") is None for row in rows):
        return []
    found = collections.defaultdict(collections.Counter)             # {(known, kind): {"number", "ranks", …}}

    def counts_of(row, text):
        kind = domain.turn_kind(row["task"], row["history"], said(domain, text, row.get("prompt")))
        return found[domain.all_known(row["task"], row["history"]), kind]

    for row in rows:
        for candidate, rank in zip(row["candidates"], average_ranks(row["advantages"])):
            counts_of(row, candidate["text"]).update(number=1, ranks=rank / max(1, len(row["candidates"]) - 1))
    for pair in pairs:
        for side in ("chosen", "rejected"):
            counts_of(pair, pair[side]["text"])[side] += 1
    return aligned(["what the pairs say", "", "candidates", "rank", "chosen", "rejected"], [
        ["all known" if known else "not all known", kind, str(own["number"]), f"{own['ranks'] / own['number']:.2f}",
         str(own["chosen"]), str(own["rejected"])] for (known, kind), own in sorted(found.items())])


# number: from 0; total: of the whole run; task_ids: of the examples of the step's batch
Step = collections.namedtuple("Step", "number total task_ids")


def optimizer_step(model, optimizer, sums, step, args, runtime):
    """One update; returns the batch's numbers for the log: `sums` over all ranks, learning rate and gradient norm.
    InputError on all ranks, before anything is updated, where the loss or the norm is not finite."""
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm).full_tensor().item()
    numbers = dict(zip(sums, reduce_sums(list(sums.values()), runtime.device)))
    if not (math.isfinite(numbers["loss"]) and math.isfinite(grad_norm)):
        raise InputError(f"{args.out}: step {step.number + 1} of {step.total}: the loss is {numbers['loss']:g} and the "
                         f"norm of its gradient {grad_norm:g}, in a batch of these tasks: "
                         f"{listing(set(step.task_ids), 20)}. The step is not taken and no model is written; lower "
                         "--lr or --beta, or look at these tasks")
    lr = learning_rate(step.number, step.total, args.lr, args.warmup_frac, args.final_lr_frac)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {**numbers, "lr": lr, "gnorm": grad_norm}


def check_weights(model, out):
    """InputError on all ranks where a weight is not finite: the last step can have made it so, after its loss."""
    broken = torch.zeros((), dtype=torch.float64)
    for parameter in model.parameters():
        shard = parameter.detach()
        shard = shard.to_local() if hasattr(shard, "to_local") else shard
        broken += int(not torch.isfinite(shard).all())
    [number] = reduce_sums([broken.item()], next(model.parameters()).device)
    if number:
        raise InputError(f"{out}: {number:.0f} tensors of the trained model have numbers that are not finite; no model "
                         "is written: lower --lr")


class Checkpoints:
    """What a run needs to go on, in `folder`/states/STEP: the shards of model and optimiser by
    torch.distributed.checkpoint, the last two that are whole; read again on any number of ranks. Order, schedule and
    seeds follow from the step and the arguments. lib/states.py says what is safe about reading them."""

    def __init__(self, folder, model, optimizer):
        self.folder, self.model, self.optimizer = pathlib.Path(folder) / "states", model, optimizer
        self.saving = None

    def whole(self):
        """Steps of the states that are whole: .metadata is written last."""
        if self.folder.is_symlink():
            raise InputError(f"{self.folder}: is a link; this program did not make it, so remove it")
        return sorted(int(path.parent.name) for path in self.folder.glob("*/.metadata")
                      if re.fullmatch("[0-9]{1,15}", path.parent.name) and not path.parent.is_symlink())

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
        """Save the state after `step` steps; on a GPU it is copied now and written while the training goes on."""
        from torch.distributed import checkpoint as dcp
        self.wait()
        if is_main():
            remove_folder(self.folder / str(step))                  # of a kill, or with links in it
        barrier()
        if torch.cuda.is_available():
            # by the default group's gloo, which nothing else uses while the training goes on
            self.saving = dcp.async_save(self.state(), checkpoint_id=self.folder / str(step))
        else:
            dcp.save(self.state(), checkpoint_id=self.folder / str(step))
        if is_main():
            for old in self.whole()[:-2]:
                shutil.rmtree(self.folder / str(old))
        trim_memory()

    def wait(self):
        if self.saving is not None:
            self.saving.result()
            self.saving = None

    def load(self):
        """Load the last whole state, cut metrics.jsonl back to it, and return its step (0: a new run)."""
        from torch.distributed.checkpoint.state_dict import set_state_dict, StateDictOptions

        from lib.states import load_state  # here, because it imports torch.distributed.checkpoint
        step = max(self.whole(), default=0)
        barrier()
        if step:
            state = self.state()
            load_state(state, self.folder / str(step))
            set_state_dict(self.model, self.optimizer, model_state_dict=state["model"],
                           optim_state_dict=state["optimizer"], options=StateDictOptions(strict=not self.frozen()))
            say(f"continues at step {step}")
        cut_metrics(self.folder.parent / "metrics.jsonl", step)
        return step


def remove_folder(path):
    """Remove a folder with all that is in it; of a link the link alone."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


@on_main
def cut_metrics(path, step):
    """Cut metrics.jsonl back to the rows up to `step`."""
    if not path.exists():
        return
    with open_file(path, "r", encoding="utf-8") as file:
        lines = [line for line in file.read().splitlines(True) if line.endswith("\n")]
    partial = path.with_name(path.name + ".partial")
    with new_file(partial, "w", encoding="utf-8") as file:
        for number, line in enumerate(lines, 1):
            row, where = parse_json(line, f"{path}:{number}"), f"{path}:{number}"
            check_row(row, {"step": int}, {}, where)
            if row["step"] <= step:
                file.write(line)
    partial.rename(path)


# What 03 and 04 write into their folders: --overwrite removes these and nothing else (runtime.begin_output)
FILES = [
    "metrics.jsonl", "critic.json", "agent.json", "turn_head.pt", "ref.pt", "ref", "states/*/*", "initial/*/*",
    *(f"{name}.jsonl{ending}" for name in ("candidates", "scored", "pairs", "credit")
      for ending in ("", ".failed.jsonl")),
    # a model in the form of Hugging Face or PEFT, in the end and while it is written
    *(f"{folder}{name}" for folder in ("", "model.partial/") for name in (
        "config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json",
        "adapter_config.json", "adapter_model.safetensors", "README.md", "tokenizer*.json", "tokenizer.model",
        "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "*.spm", "*.bpe.model",
        "spiece.model", "*.tiktoken", "chat_template.jinja", "chat_template.json", "preprocessor_config.json",
        "processor_config.json", "video_preprocessor_config.json"))]


class StepLog:
    """Prints one line each --log-every steps, keeps the same numbers in metrics.jsonl of args.out, and tracks them."""

    def __init__(self, args, first_step, num_steps):
        self.path = pathlib.Path(args.out) / "metrics.jsonl"
        self.first_step, self.num_steps, self.every = first_step, num_steps, args.log_every
        kept = self.path.read_text().splitlines() if self.path.exists() else []
        self.track = Track(args.track, args.out, vars(args), (parse_json(line, self.path) for line in kept))
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
            with open_file(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            self.track.log(**row)
        self.last, self.tokens = now, 0


def adamw(model, args):
    """AdamW of the parameters that are not frozen, by the flags --lr, --adam-betas and --weight-decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # fused: makes no copies of all parameters
    return torch.optim.AdamW(trained, lr=args.lr, betas=args.adam_betas, weight_decay=args.weight_decay, fused=True)


def finish_training(args, model, tokenizer):
    """Write the trained model (and a critic's head beside it) into args.out, remove what only a resumed run needs, and
    mark the folder as complete."""
    folder = pathlib.Path(args.out)
    check_weights(model, folder)
    save_model(folder, model, tokenizer, args.merge)
    if hasattr(model, "turn_head"):
        # not as safetensors: what serves the folder as a plain model would take it for a part of the model
        head = {name: whole_tensor(tensor.detach()).cpu() for name, tensor in model.turn_head.named_parameters()}
        if is_main():
            (folder / "turn_head.pt").unlink(missing_ok=True)        # torch.save would follow a link
            torch.save(head, folder / "turn_head.pt")
    if is_main():
        for name in ("states", "initial"):
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / "ref.pt").unlink(missing_ok=True)
        (folder / "COMPLETED").touch()
        of_adapter = sum(parameter.numel() for parameter in adapter_parameters(model).values())
        of_all = sum(parameter.numel() for parameter in model.parameters())
        written = of_adapter if args.lora and not args.merge else of_all - of_adapter
        say(f"writes {folder} ({written:,} parameters)")
    barrier()
