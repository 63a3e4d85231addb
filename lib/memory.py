"""--dry-run: the memory that a training step needs on each rank, from a run on the meta device."""
import copy
import math
import warnings
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lib.adapters import add_adapter
from lib.models import check_replicate, from_pretrained, lora_config, reads_images, token_logps
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


def fused_attention(module, query, key, value, mask, scaling=None, **unused):
    """Attention that keeps what fused kernels keep: q, k, v, the output and a float32 a row and head. (On the meta
    device scaled_dot_product_attention takes its plain path, with (T, T) matrices.)"""
    output = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True, scale=scaling)[0]
    return output.transpose(1, 2).contiguous(), None


def memory_plan(config, world_size, replicate, dtype, checkpointing, num_rows, row_tokens, optimizer_bytes,
                accumulates=False, tree=False, lora=None):
    """Bytes on each rank when a training step needs most, as a dict; takes no memory itself: the model of `config` runs
    on the meta device over one micro-batch, a Ledger counts what lives, and hooks book what FSDP2 does beside it.

    num_rows, row_tokens       rows of a micro-batch, tokens of each, half of which are taken to be actions'
    dtype, optimizer_bytes     of the arithmetic (trained parameters stay float32); of the state of one parameter
    accumulates, tree          a step has several micro-batches, whose gradients add up; the rows have their own masks
    lora                       a LoraConfig: its adapter alone is trained, all else stays in `dtype`

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
        if lora:
            add_adapter(model, lora, getattr(torch, dtype))
    if checkpointing:
        model.activation_checkpointing_enable()
    layers, shards, width = list(model.get_decoder().layers), world_size // replicate, getattr(torch, dtype).itemsize
    params = {layer: list(layer.parameters()) for layer in layers}
    params[model] = list(set(model.parameters()) - {p for layer in layers for p in params[layer]})
    numel = {group: sum(p.numel() for p in params[group]) for group in params}
    trained = {group: sum(p.numel() for p in params[group] if p.requires_grad) for group in params}
    shard, frozen = sum(trained.values()) / shards, sum(numel[group] - trained[group] for group in params) / shards
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
        ledger.book({"root" if group is model else "layer": 0, "reduced": 4 * trained[group]})     # of the next, too
        for parameter in params[group]:
            ledger.now.pop(parameter, None)
        before = ledger.now["gradients"]
        ledger.book({"gradients": before + 4 * trained[group] / shards})
        if accumulates:
            ledger.book({"gradients": before})

    for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
        parameter.register_post_accumulate_grad_hook(keep_gradient)
    for layer in layers:
        layer.register_forward_pre_hook(before_forward)
        layer.register_forward_hook(after_forward)
        layer.register_full_backward_pre_hook(before_backward)
        layer.register_full_backward_hook(after_backward)
    with torch.device("meta"), ledger, warnings.catch_warnings():
        warnings.simplefilter("ignore")                             # the first layer's hook is early in a frozen model
        ids = torch.zeros(num_rows, row_tokens, dtype=torch.long)
        places = torch.zeros(num_rows * row_tokens // 2, dtype=torch.long)
        hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        token_logps(model.get_output_embeddings(), hidden[places, places], ids[places, places]).sum().backward()
        after_backward(model)
    plan = {"parameters": 4 * shard + width * frozen, "gradients": ledger.peak.pop("gradients"),
            "optimizer": optimizer_bytes * shard,
            "activations": ledger.peak.pop("activations") + ledger.peak.pop("masks"),
            "gathered": sum(ledger.peak.values())}
    largest = max(max(width * numel[group], 4 * trained[group]) for group in params)
    return {**plan, "total": sum(plan.values()), "largest_buffer": max(ledger.largest, largest)}


def dry_run(args, rows_an_example, tree=False):
    """Print the memory plan of a stage by its arguments, for --dry-run ranks."""
    from transformers import AutoConfig
    check_replicate(args.replicate, args.dry_run)
    if reads_images(args.model):
        raise InputError(f"{args.model}: --dry-run knows models of text alone")
    examples = min(args.micro_batch_size, math.ceil(args.batch_size / args.dry_run))
    plan = memory_plan(from_pretrained(AutoConfig, args.model), args.dry_run, args.replicate, args.dtype,
                       args.activation_checkpointing, examples * rows_an_example, args.max_length,
                       8, args.batch_size > examples * args.dry_run, tree,
                       lora_config(args.model, args.lora, args.lora_alpha, args.lora_targets, args.merge))
    say(f"{args.model} on {args.dry_run} ranks in {args.replicate} groups, {args.dtype}; on each rank a micro-batch of "
        f"{examples * rows_an_example} rows of {args.max_length:,} tokens (--max-length):")
    for name, number in plan.items():
        say(f"    {name.replace('_', ' '):15s} {number / 1e9:9.3f} GB")
