"""--dry-run: the memory that a training step needs on each rank, from a run on the meta device."""
import copy
import dataclasses
import functools
import math
import warnings
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lib.adapters import add_adapter
from lib.models import (
    check_replicate,
    checkpoint_layers,
    from_pretrained,
    layers_of,
    lora_config,
    projection_of,
    reads_images,
)
from lib.runtime import InputError, say


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


def fused_attention(module, query, key, value, mask, scaling=None, is_tree=False, **unused):
    """Attention that keeps what fused kernels keep: q, k, v, the output and a float32 a row and head. (On the meta
    device scaled_dot_product_attention takes its plain path, with (T, T) matrices.)
    is_tree: transformers repeats keys and values for each query of a group, as there is a mask."""
    if is_tree:
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    output = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True, scale=scaling)[0]
    return output.transpose(1, 2).contiguous(), None


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """A training step whose memory is asked for.

    world_size, replicate  ranks, and groups of them that each hold the whole model
    dtype                  of the arithmetic; parameters that are trained stay float32
    checkpointing          layers are computed again in the backward pass
    num_rows, row_tokens   rows of a micro-batch, and tokens of each, half of which are taken to be actions'
    accumulates            the step has several micro-batches, whose gradients add up
    tree                   the rows have masks of their own
    lora                   a LoraConfig: its adapter alone is trained, all else stays in `dtype`"""
    world_size: int
    replicate: int
    dtype: str
    checkpointing: bool
    num_rows: int
    row_tokens: int
    accumulates: bool = False
    tree: bool = False
    lora: object = None

    @property
    def is_split(self):
        """Whether FSDP2 handles the model (models.shard)."""
        return self.world_size > 1 or self.dtype != "float32"

    @property
    def shards(self):
        return self.world_size // self.replicate

    @property
    def width(self):
        """Bytes of a number of the arithmetic."""
        return getattr(torch, self.dtype).itemsize


class Fsdp:
    """Books what FSDP2 does beside a model's passes, by hooks on its layers. A group is a layer, or the model itself
    for all that is in no layer."""

    def __init__(self, model, step):
        self.model, self.step = model, step
        self.layers = layers_of(model)
        self.parameters = {layer: list(layer.parameters()) for layer in self.layers}
        in_layers = {parameter for layer in self.layers for parameter in layer.parameters()}
        self.parameters[model] = list(set(model.parameters()) - in_layers)
        self.numel, self.trained = {}, {}
        for group, parameters in self.parameters.items():
            self.numel[group] = sum(parameter.numel() for parameter in parameters)
            self.trained[group] = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        self.shard = sum(self.trained.values()) / step.shards
        self.frozen = sum(self.numel.values()) / step.shards - self.shard
        masks = step.num_rows * step.row_tokens ** 2 * (step.width + 1) * step.tree
        self.ledger = Ledger([*model.parameters(), *model.buffers()], root=self.gathered_bytes(model),
                             gradients=4 * self.shard * step.accumulates, masks=masks)

    def gathered_bytes(self, group):
        """A group's whole parameters, in the arithmetic's type."""
        return self.step.width * self.numel[group] if self.step.is_split else 0

    def flat_bytes(self, group):
        """The all-gather's output, which is copied to the whole parameters."""
        return self.gathered_bytes(group) if self.step.shards > 1 else 0

    def reduced_bytes(self, group):
        """The whole gradients of a group in float32, before they are reduced."""
        return 4 * self.trained[group] if self.step.is_split else 0

    def before_forward(self, layer, *_):                            # its flat buffer is freed in the next layer
        self.ledger.book({"layer": self.gathered_bytes(layer), "flat": self.flat_bytes(layer)})

    def after_forward(self, layer, *_):
        self.ledger.book({"layer": 0})

    def before_backward(self, layer, *_):                           # the layer before is gathered ahead of time
        index = self.layers.index(layer)
        ahead = self.flat_bytes(self.layers[index - 1]) if index > 0 else 0
        self.ledger.book({"layer": self.gathered_bytes(layer), "flat": ahead})

    def keep_gradient(self, parameter):                 # of a whole parameter, until those of its group are reduced
        parameter.grad = None
        self.ledger.book({parameter: self.step.width * parameter.numel()})

    def after_backward(self, group, *_):
        place = "root" if group is self.model else "layer"
        self.ledger.book({place: 0, "reduced": self.reduced_bytes(group)})      # of the next group, too
        for parameter in self.parameters[group]:
            self.ledger.now.pop(parameter, None)
        before = self.ledger.now["gradients"]
        self.ledger.book({"gradients": before + 4 * self.trained[group] / self.step.shards})
        if self.step.accumulates:
            self.ledger.book({"gradients": before})

    def watch(self):
        """Put the hooks on the model."""
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.keep_gradient)
        for layer in self.layers:
            layer.register_forward_pre_hook(self.before_forward)
            layer.register_forward_hook(self.after_forward)
            layer.register_full_backward_pre_hook(self.before_backward)
            layer.register_full_backward_hook(self.after_backward)

    def plan(self):
        """The bytes at the peak (memory_plan)."""
        peak = dict(self.ledger.peak)
        plan = {"parameters": 4 * self.shard + self.step.width * self.frozen, "gradients": peak.pop("gradients"),
                "optimizer": 8 * self.shard, "activations": peak.pop("activations") + peak.pop("masks"),
                "gathered": sum(peak.values())}
        largest = self.ledger.largest
        for group in self.parameters:
            largest = max(largest, self.step.width * self.numel[group], 4 * self.trained[group])
        return {**plan, "total": sum(plan.values()), "largest_buffer": largest}


def memory_plan(config, step, token_logps):
    """Bytes on each rank when a training step (PlannedStep) needs most, as a dict. Takes no memory itself: the model of
    `config` runs on the meta device over one micro-batch, a Ledger counts what lives, and Fsdp books what FSDP2 does.

    parameters, gradients, optimizer  this rank's shard, 1 / (world_size / replicate) of each; AdamW keeps 8 bytes
    gathered                          whole parameters and gradients of groups in flight (a layer each; the root: all
                                      else) with the buffers they come from and go to (float32)
    activations                       all other tensors
    total, largest_buffer             the sum of these; the largest single one

    token_logps: common.token_logps, which this file must not import.

    Not in it: what loading needs, buffers of NCCL and cuBLAS, fragmentation. AdamW is fused, so it copies nothing."""
    from transformers import AttentionInterface, AutoModelForCausalLM
    AttentionInterface.register("fused_attention", functools.partial(fused_attention, is_tree=step.tree))
    dtype = getattr(torch, step.dtype)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype,
                                                 attn_implementation="fused_attention").train()
        if step.lora:
            add_adapter(model, step.lora, dtype)
    if step.checkpointing:
        checkpoint_layers(model)
    fsdp = Fsdp(model, step)
    fsdp.watch()
    with torch.device("meta"), fsdp.ledger, warnings.catch_warnings():
        warnings.simplefilter("ignore")                             # the first layer's hook is early in a frozen model
        ids = torch.zeros(step.num_rows, step.row_tokens, dtype=torch.long)
        places = torch.zeros(step.num_rows * step.row_tokens // 2, dtype=torch.long)
        hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        logps = token_logps(projection_of(model), hidden[places, places], ids[places, places])
        logps.sum().backward()
        fsdp.after_backward(model)
    return fsdp.plan()


def dry_run(args, batch_size, token_logps, rows_an_example, tree=False):
    """Print the memory plan of 03 or 04 by its arguments, for --dry-run ranks. batch_size: examples a step."""
    from transformers import AutoConfig
    check_replicate(args.replicate, args.dry_run)
    if reads_images(args.model):
        raise InputError(f"{args.model}: --dry-run knows models of text alone")
    num_examples = min(args.micro_batch_size, math.ceil(batch_size / args.dry_run))
    lora = lora_config(args.model, args.lora, args.lora_alpha, args.lora_targets, args.merge)
    step = PlannedStep(args.dry_run, args.replicate, args.dtype, args.activation_checkpointing,
                       num_examples * rows_an_example, args.max_length, batch_size > num_examples * args.dry_run,
                       tree, lora)
    plan = memory_plan(from_pretrained(AutoConfig, args.model), step, token_logps)
    say(f"{args.model} on {args.dry_run} ranks in {args.replicate} groups, {args.dtype}; on each rank a micro-batch of "
        f"{step.num_rows} rows of {args.max_length:,} tokens (--max-length):")
    for name, number in plan.items():
        say(f"    {name.replace('_', ' '):15s} {number / 1e9:9.3f} GB")
