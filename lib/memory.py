"""--dry-run: the memory that a training step needs on each rank, from a run on the meta device."""
import collections
import functools
import math
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lib.fast import has_fast_bfloat16, MAX_GROUPED
from lib.load import (
    add_adapter,
    checkpoint_layers,
    layers_of,
    meta_model,
    most_positions,
    projection_of,
    read_config,
    reads_images,
)
from lib.logps import token_logps
from lib.runtime import InputError, one_line, say

USABLE_OF_80_GB = 76e9


class Ledger(TorchDispatchMode):
    """Counts live bytes. activations: of all storages made while the mode is on. gradients: counted by memory_plan.
    peak: both, when their sum was highest."""

    def __init__(self, known):
        super().__init__()
        self.activations = self.gradients = 0
        self.peak = 0, 0
        self.seen = {tensor.untyped_storage()._cdata for tensor in known}

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
            self.activations += size
            self.peak = max(self.peak, (self.activations, self.gradients), key=sum)

    def freed(self, number, size):
        self.seen.remove(number)
        self.activations -= size


def fused_attention(module, query, key, value, mask, **options):
    """Attention that keeps as much as fused kernels: q, k, v, the output, and a float32 for each row and head. (On the
    meta device scaled_dot_product_attention uses its plain path, with (T, T) matrices.)
    options["has_mask"]: with a mask, keys and values of grouped queries are repeated, except by grouped_attention."""
    if options["has_mask"] and not (has_fast_bfloat16(query) and query.shape[3] <= MAX_GROUPED):
        key = key.repeat_interleave(module.num_key_value_groups, 1)
        value = value.repeat_interleave(module.num_key_value_groups, 1)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output = attend(query, key, value, 0.0, True, scale=options["scaling"])[0]
    return output.transpose(1, 2).contiguous(), None


# The training step whose memory --dry-run predicts.
# world_size            ranks
# sharding              Sharding
# num_rows, row_tokens  rows of a rank's micro-batch, tokens per row; half of these are assumed to be action tokens
# accumulates           the step has several micro-batches, whose gradients add up
# tree                  the rows have their own masks
# lora                  a LoraConfig: only its adapter is trained, all else stays in the arithmetic's type
PlannedStep = collections.namedtuple("PlannedStep", "world_size sharding num_rows row_tokens accumulates tree lora")


def all_bytes(module):
    """Bytes of the parameters."""
    return sum(parameter.nbytes for parameter in module.parameters())


def trained_bytes(module):
    """Bytes of the trained parameters, in float32."""
    return 4 * sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def bytes_in_flight(model, step):
    """Bytes that FSDP2 holds besides the shards: full parameters outside the layers; those of one layer, with their
    flat buffer (on one rank: those of all layers); one layer's full gradients in float32."""
    layers = layers_of(model)
    layer_sizes = [all_bytes(layer) for layer in layers]
    gradients = max(map(trained_bytes, layers))
    if step.world_size == 1:
        return all_bytes(model) + gradients
    return all_bytes(model) - sum(layer_sizes) + 2 * max(layer_sizes) + gradients


def planned_model(config, step):
    """The model of `config` on the meta device, as PlannedStep `step` trains it."""
    from transformers import AttentionInterface
    AttentionInterface.register("fused_attention", functools.partial(fused_attention, has_mask=step.tree))
    dtype = getattr(torch, step.sharding.dtype)
    with torch.device("meta"):
        model = meta_model(config, dtype, attn_implementation="fused_attention").train()
        if step.lora:
            add_adapter(model, step.lora, dtype)
    if step.sharding.activation_checkpointing:
        checkpoint_layers(model)
    return model


def memory_plan(model, step):
    """Peak bytes on each rank in a training step (PlannedStep), as a dict. This uses no memory itself: the
    planned_model runs on one micro-batch, and a Ledger counts.

    parameters, gradients, optimizer  this rank's shard, 1 / world_size of each; AdamW keeps 8 bytes, and copies nothing
    gathered                          temporarily unsharded: bytes_in_flight
    activations                       all other tensors
    total                             the sum of these

    Not included: loading, buffers of NCCL and cuBLAS, fragmentation, and on one rank an adapter's copy in the
    arithmetic's type."""
    parameters = list(model.parameters())
    frozen = sum(parameter.nbytes for parameter in parameters if not parameter.requires_grad)
    trained = trained_bytes(model) / step.world_size
    ledger = Ledger([*parameters, *model.buffers()])
    if step.accumulates:
        ledger.gradients = trained
    if step.tree:
        mask_bytes = model.dtype.itemsize + 1                       # the added numbers, and bools
        ledger.activations = step.num_rows * step.row_tokens ** 2 * mask_bytes

    def reduce_gradient(parameter):
        parameter.grad = None
        if not step.accumulates:
            ledger.gradients += 4 * parameter.numel() / step.world_size

    uses_fsdp = step.sharding.uses_fsdp(step.world_size, step.lora is not None)
    # with FSDP2, gradients of parameters outside the layers stay unsharded until the end of the backward pass
    for module in layers_of(model) if uses_fsdp else [model]:
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(reduce_gradient)
    with torch.device("meta"), ledger:
        ids = torch.zeros(step.num_rows, step.row_tokens, dtype=torch.long)
        places = torch.zeros(ids.numel() // 2, dtype=torch.long)
        hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        states, tokens = hidden[places, places], ids[places, places]
        token_logps(projection_of(model), states, tokens).sum().backward()
    activations, gradients = ledger.peak
    plan = {
        "parameters": trained + frozen / step.world_size,
        "gradients": gradients,
        "optimizer": 2 * trained,
        "activations": activations,
        "gathered": bytes_in_flight(model, step) if uses_fsdp else 0,
    }
    plan["total"] = sum(plan.values())
    return plan


def dry_run(job, rows_an_example, is_tree=False):
    """--dry-run: print the memory plan (memory_plan) of a training.Job."""
    name, num_ranks = job.model, job.dry_run
    if reads_images(name):
        raise InputError(f"{name}: --dry-run supports only text models")
    config = read_config(name)
    batch_size = job.schedule.batch_size
    num_examples = min(job.schedule.micro_batch_size, math.ceil(batch_size / num_ranks))    # of a micro-batch
    num_rows = num_examples * rows_an_example
    row_tokens = min(job.max_length, most_positions(config))
    accumulates = batch_size > num_examples * num_ranks
    step = PlannedStep(num_ranks, job.sharding, num_rows, row_tokens, accumulates, is_tree, job.lora)
    say(f"{name} on {num_ranks} ranks, {job.sharding.dtype}; at the peak of a step, on each rank a micro-batch of "
        f"{num_rows} rows of {row_tokens:,} tokens (--max-length, or the model's most):")
    if is_tree:
        say("a row of SWEET is longer if its prompt and one action come near --max-length: it holds all actions of its "
            "pairs")
    try:
        model = planned_model(config, step)
        plan = memory_plan(model, step)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"{name}: no memory plan for a {config.model_type}: {one_line(error)}") from None
    for part, number in plan.items():
        say(f"    {part:15s} {number / 1e9:9.3f} GB")
    fits = "fits" if plan["total"] < USABLE_OF_80_GB else "does not fit"
    say(f"this step {fits} on a card of 80 GB ({USABLE_OF_80_GB / 1e9:.0f} GB assumed usable)")
