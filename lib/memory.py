"""--dry-run: the memory that a training step needs on each rank, from a run on the meta device."""
import copy
import dataclasses
import functools
import math
import warnings
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lib import models
from lib.runtime import InputError, say

USABLE_OF_80_GB = 76e9


class Ledger(TorchDispatchMode):
    """Bytes in use, by name: `now`, and `peak` when their sum was highest. "activations" are all storages made while
    the mode is on, for as long as they live; the other entries are booked by hand."""

    def __init__(self, known, **entries):
        super().__init__()
        self.now, self.peak = {"activations": 0, **entries}, {}
        self.seen = {tensor.untyped_storage()._cdata for tensor in known}

    def book(self, **entries):
        self.now.update(entries)
        if sum(self.now.values()) > sum(self.peak.values()):
            self.peak = dict(self.now)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.made(tensor.untyped_storage())
        return result

    def made(self, storage):
        number, size = storage._cdata, storage.nbytes()
        if number not in self.seen:
            self.seen.add(number)
            weakref.finalize(storage, self.freed, number, size)
            self.book(activations=self.now["activations"] + size)

    def freed(self, number, size):
        self.seen.remove(number)
        self.now["activations"] -= size


def fused_attention(module, query, key, value, mask, **options):
    """Attention that keeps what fused kernels keep: q, k, v, the output and a float32 a row and head. (On the meta
    device scaled_dot_product_attention takes its plain path, with (T, T) matrices.)
    options["has_mask"]: it would get one, for which the keys and values of grouped queries are repeated, but not by
    models.grouped_attention."""
    if options["has_mask"] and not models.has_fast_bfloat16(query):
        key = key.repeat_interleave(module.num_key_value_groups, 1)
        value = value.repeat_interleave(module.num_key_value_groups, 1)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output = attend(query, key, value, 0.0, True, scale=options["scaling"])[0]
    return output.transpose(1, 2).contiguous(), None


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """A training step whose memory is asked for.

    world_size            ranks
    sharding              how the model is split over them, and computes (models.Sharding)
    num_rows, row_tokens  rows of a rank's micro-batch, and tokens of each, half of which are taken to be actions'
    accumulates           the step has several micro-batches, whose gradients add up
    tree                  the rows have masks of their own
    lora                  a LoraConfig: its adapter alone is trained, all else stays in the arithmetic's type"""
    world_size: int
    sharding: models.Sharding
    num_rows: int
    row_tokens: int
    accumulates: bool
    tree: bool
    lora: object


class Fsdp:
    """Books what FSDP2 does beside a model's passes, by hooks on its layers. A group is a layer, or the model itself
    for all that is in no layer. Bytes of each group:

    gathered  its whole parameters, in the arithmetic's type
    flat      the all-gather's output, which is copied to the whole parameters
    reduced   its whole gradients in float32, before they are reduced
    kept      this rank's shard of these"""

    def __init__(self, model, step):
        self.model, self.layers = model, models.layers_of(model)
        self.accumulates = step.accumulates
        shards = step.world_size
        is_split = shards > 1 or step.sharding.dtype != "float32"                   # as of models.shard
        self.parameters = {layer: list(layer.parameters()) for layer in self.layers}
        in_layers = set().union(*self.parameters.values())
        self.parameters[model] = list(set(model.parameters()) - in_layers)
        self.gathered, self.reduced, self.kept = {}, {}, {}
        for group, parameters in self.parameters.items():
            trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
            gathers = [parameter for parameter in parameters if shards > 1 or parameter.requires_grad]     # models.split
            self.gathered[group] = sum(parameter.nbytes for parameter in gathers) * is_split
            self.reduced[group] = 4 * trained * is_split
            self.kept[group] = 4 * trained / shards
        self.flat = self.gathered if shards > 1 else dict.fromkeys(self.gathered, 0)
        self.ahead, before = {}, 0
        for layer in self.layers:
            self.ahead[layer], before = before, self.flat[layer]
        self.trained = sum(self.kept.values())
        self.frozen = 0
        mask_bytes = model.dtype.itemsize + 1                       # the numbers that are added, and bools
        masks = step.num_rows * step.row_tokens ** 2 * mask_bytes * step.tree
        self.ledger = Ledger([*model.parameters(), *model.buffers()], root=self.gathered[model],
                             gradients=self.trained * self.accumulates, masks=masks)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.keep_gradient)
            else:
                self.frozen += parameter.nbytes / shards
        for layer in self.layers:
            layer.register_forward_pre_hook(self.before_forward)
            layer.register_forward_hook(lambda *_: self.ledger.book(layer=0))
            layer.register_full_backward_pre_hook(self.before_backward)
            layer.register_full_backward_hook(self.after_backward)

    def before_forward(self, layer, *_):                            # its flat buffer is freed in the next layer
        self.ledger.book(layer=self.gathered[layer], flat=self.flat[layer])

    def before_backward(self, layer, *_):                           # the layer before is gathered ahead of time
        self.ledger.book(layer=self.gathered[layer], flat=self.ahead[layer])

    def after_backward(self, group, *_):
        place = "root" if group is self.model else "layer"
        self.ledger.book(**{place: 0, "reduced": self.reduced[group]})              # of the next group, too
        for parameter in self.parameters[group]:
            self.ledger.now.pop(str(id(parameter)), None)
        before = self.ledger.now["gradients"]
        self.ledger.book(gradients=before + self.kept[group])
        if self.accumulates:
            self.ledger.book(gradients=before)

    def keep_gradient(self, parameter):                 # of a whole parameter, until those of its group are reduced
        parameter.grad = None
        self.ledger.book(**{str(id(parameter)): parameter.nbytes})


def memory_plan(config, step, token_logps):
    """Bytes on each rank when a training step (PlannedStep) needs most, as a dict. Takes no memory itself: the model of
    `config` runs on the meta device over one micro-batch, a Ledger counts what lives, and Fsdp books what FSDP2 does.

    parameters, gradients, optimizer  this rank's shard, 1 / world_size of each; AdamW keeps 8 bytes
    gathered                          whole parameters and gradients of groups in flight (a layer each; the root: all
                                      else) with the buffers they come from and go to (float32)
    activations                       all other tensors
    total                             the sum of these

    token_logps: common.token_logps, which this file must not import.

    Not in it: what loading needs, buffers of NCCL and cuBLAS, fragmentation. AdamW is fused, so it copies nothing."""
    from transformers import AttentionInterface
    AttentionInterface.register("fused_attention", functools.partial(fused_attention, has_mask=step.tree))
    dtype = getattr(torch, step.sharding.dtype)
    with torch.device("meta"):
        model = models.meta_model(copy.deepcopy(config), dtype, attn_implementation="fused_attention").train()
        if step.lora:
            models.add_adapter(model, step.lora, dtype)
    if step.sharding.activation_checkpointing:
        models.checkpoint_layers(model)
    fsdp = Fsdp(model, step)
    # a warning: the first layer's hook is early in a frozen model
    with torch.device("meta"), fsdp.ledger, warnings.catch_warnings(action="ignore"):
        ids = torch.zeros(step.num_rows, step.row_tokens, dtype=torch.long)
        places = torch.zeros(ids.numel() // 2, dtype=torch.long)
        hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        states, tokens = hidden[places, places], ids[places, places]
        token_logps(models.projection_of(model), states, tokens).sum().backward()
        fsdp.after_backward(model)
    peak = dict(fsdp.ledger.peak)
    plan = {
        "parameters": fsdp.trained + fsdp.frozen,
        "gradients": peak.pop("gradients"),
        "optimizer": 2 * fsdp.trained,
        "activations": peak.pop("activations") + peak.pop("masks"),
        "gathered": sum(peak.values())}
    return {**plan, "total": sum(plan.values())}


def dry_run(args, batch_size, rows_an_example, token_logps, is_tree=False):
    """Print the memory plan (memory_plan) that a stage's --dry-run asks for."""
    from transformers import AutoConfig
    name = args.model
    lora = models.lora_config(name, args.lora, args.lora_targets, args.merge)
    num_examples = min(args.micro_batch_size, math.ceil(batch_size / args.dry_run))         # of a micro-batch
    if models.reads_images(name):
        raise InputError(f"{name}: --dry-run knows models of text alone")
    config = models.from_pretrained(AutoConfig, name)
    row_tokens = min(args.max_length, models.most_positions(config))
    step = PlannedStep(args.dry_run, models.sharding_of(args), num_examples * rows_an_example, row_tokens,
                       batch_size > num_examples * args.dry_run, is_tree, lora)
    say(f"{name} on {step.world_size} ranks, {step.sharding.dtype}; at the peak of a step, on each rank a micro-batch"
        f" of {step.num_rows} rows of {step.row_tokens:,} tokens (--max-length, or the model's most):")
    plan = memory_plan(config, step, token_logps)
    for part, number in plan.items():
        say(f"    {part:15s} {number / 1e9:9.3f} GB")
    fits = "fits" if plan["total"] < USABLE_OF_80_GB else "does not fit"
    say(f"this step {fits} a card of 80 GB, of which {USABLE_OF_80_GB / 1e9:.0f} GB are taken as usable")
    if step.tree:
        say(*sampling_lines(config, step))


def sampling_lines(config, step):
    """What sampling and scoring of candidates need, which come before the step."""
    dtype = getattr(torch, step.sharding.dtype)
    with torch.device("meta"):
        num_parameters = models.meta_model(copy.deepcopy(config)).num_parameters()
    config = config.get_text_config()
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_size * dtype.itemsize       # of the cache
    adapted = num_parameters * dtype.itemsize / step.world_size
    full = 2 * 4 * num_parameters / step.world_size                 # a critic and its reference in float32
    return [f"before it, sampling: {num_parameters * dtype.itemsize / 1e9:.3f} GB of weights on each rank, and "
            f"{token / 1e6:.3f} MB for each token of the --concurrency candidates",
            f"scoring by a critic of this size: {adapted / 1e9:.3f} GB with an adapter, {full / 1e9:.3f} GB without"]
