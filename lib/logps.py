"""Log-probabilities of actions, and a head's outputs: padded batches, trees and their mask, many items at once."""
import collections
import functools
import hashlib
import itertools
import math
import pathlib
from collections import namedtuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from lib.fast import has_fast_bfloat16, RowValues, width_padding, WIDTH_STEP
from lib.load import (
    adapter_off,
    add_adapter,
    base_of,
    check_logits,
    decoder_mask,
    folder_config,
    load_adapter,
    load_model,
    loading,
    meta_model,
    most_positions,
    projection_of,
    read_whole,
    reshard,
    set_tensors,
    shard,
    sliding_window,
    takes_masks,
)
from lib.runtime import barrier, gather, InputError, is_main, say

# ---------------------------------------------------------------------------------------------------------------------
# sequences of tokens

# A sequence of tokens, with the actions in it.
# ids             token ids
# action_ids      each token's action number; -1 if it is only read (prompts, the simulator, c). An action gets one
#                 log-probability: it is an agent's turn (critics, rft, sft), a candidate (sweet), a whole dialogue
#                 (mtdpo) or, in examples/grpo.py, a single token
# prompt_length   None or, for a tree, the number of its prompt's tokens: several actions continue one prompt, which is
#                 computed once; each action sees the prompt and itself
Sequence = namedtuple("Sequence", "ids action_ids prompt_length", defaults=(None,))


def without_trees(item):
    """The item with each tree replaced by one sequence per action."""
    sequences = []
    for sequence in item:
        if sequence.prompt_length is None:
            sequences.append(sequence)
            continue
        prompt = sequence.ids[:sequence.prompt_length]
        for number in range(1 + max(sequence.action_ids)):
            action = [token for token, action_id in zip(sequence.ids, sequence.action_ids) if action_id == number]
            sequences.append(Sequence(prompt + action, [-1] * len(prompt) + [number] * len(action)))
    return sequences


def items_of(examples):
    """All items of examples, in their order, as input of collate."""
    return [item for example in examples for item in example.items]


def longest_sequence(items):
    """Number of tokens in the longest sequence of some items."""
    return max(len(sequence.ids) for item in items for sequence in item)


def num_actions(item):
    return 1 + max(max(sequence.action_ids) for sequence in item)


# ---------------------------------------------------------------------------------------------------------------------
# batches
#
# Shapes: R rows (sequences), T tokens of the longest row, B items, M most actions of an item, N action tokens, P pairs,
# H hidden size, V vocabulary

Batch = namedtuple("Batch", "ids positions action_ids previous item_index lengths action_tokens mask")


def collate(items, device="cpu"):
    """Pad items (each a list of sequences) on the right to one Batch:

    ids             (R, T) token ids, 0 where padded
    positions       (R, T) position of each token; a tree's actions all start where its prompt ends
    action_ids      (R, T) as in Sequence, -1 where padded
    previous        (R, T) index of the token before; for the first token of a tree's action, of the prompt's last
    item_index      (R,)   the item of each row
    lengths         (B, M) number of tokens in each item's actions; 0: no such action
    action_tokens   (2, N) row and index of each action token
    mask            None, or if a row is a tree (R, 1, T, T) True where a token (third axis) sees another (fourth)"""
    sequences = [sequence for item in items for sequence in item]
    item_index = [number for number, item in enumerate(items) for _ in item]
    # NumPy converts a list of 2,000 numbers five times as fast as torch.
    ids = pad_sequence([torch.from_numpy(np.array(sequence.ids)) for sequence in sequences], batch_first=True)
    action_ids = [torch.from_numpy(np.array(sequence.action_ids)) for sequence in sequences]
    action_ids = pad_sequence(action_ids, batch_first=True, padding_value=-1)
    padding = 0, width_padding(ids.shape[1], device)
    ids, action_ids = F.pad(ids, padding), F.pad(action_ids, padding, value=-1)
    num_rows, width = ids.shape
    positions = torch.arange(width).repeat(num_rows, 1)
    previous = positions - 1
    most_actions = 1 + action_ids.max().item()
    lengths = torch.zeros(len(items), most_actions)
    for r, sequence in enumerate(sequences):
        is_action = action_ids[r] >= 0                                                    # (T,)
        numbers = action_ids[r, is_action]
        counts = torch.bincount(numbers, minlength=most_actions)                          # (M,)
        lengths[item_index[r]] += counts
        if sequence.prompt_length is not None:           # a tree: its actions are in the order of their numbers
            begins = sequence.prompt_length + counts.cumsum(0) - counts                   # (M,) where actions start
            positions[r, is_action] += sequence.prompt_length - begins[numbers]
            previous[r, begins[counts > 0]] = sequence.prompt_length - 1
            positions[r, len(sequence.ids):] = 0         # padding may exceed the model's positions
    action_tokens = (action_ids >= 0).nonzero().t()       # on the CPU: on a GPU nonzero() would force a sync
    action_ids = action_ids.to(device)
    tensors = [ids, positions, action_ids, previous, torch.tensor(item_index), lengths, action_tokens]
    tensors = [tensor.to(device) for tensor in tensors]
    return Batch(*tensors, tree_mask(sequences, action_ids))


def tree_mask(sequences, action_ids):
    """Mask of the tokens (fourth axis) that each token (third) sees, (R, 1, T, T) bool; None if no row is a tree.

    In a tree a token sees the earlier tokens of its own action and of the prompt; elsewhere all earlier tokens.
    action_ids: (R, T), as in collate."""
    is_tree = torch.tensor([sequence.prompt_length is not None for sequence in sequences])  # (R,)
    if not is_tree.any():
        return None
    places = torch.arange(action_ids.shape[1], device=action_ids.device)                  # (T,)
    lengths = torch.tensor([len(sequence.ids) for sequence in sequences], device=action_ids.device)  # (R,)
    is_token = places < lengths[:, None]                                                  # (R, T)
    branches = action_ids.where(is_tree.to(action_ids.device)[:, None], -1)               # (R, T)
    is_prompt = branches[:, None, :] == -1                                                # (R, 1, T)
    same_branch = branches[:, None, :] == branches[:, :, None]                            # (R, T, T)
    is_before = places <= places[:, None]                                                 # (T, T)
    itself = places == places[:, None]                  # padding sees itself: a softmax over nothing is NaN
    sees = (is_prompt | same_branch) & is_before & (is_token[:, None, :] | itself)        # (R, T, T)
    return sees[:, None]


# ---------------------------------------------------------------------------------------------------------------------
# a batch: log-probabilities or a head's outputs of its actions, (B, M)

class ActionModel(torch.nn.Module):
    """A causal language model that returns the log-probability of each action of a batch (collate), a sum over its
    tokens, each from the state of the token before it: (B, M) float32; 0: no such action. The vocabulary projection is
    computed only at action tokens.

    Call this instead of the model, except to sample. When sharded, a call gathers weights and keeps some for backward:
    without gradients use action_outputs, which frees them."""

    open_model = staticmethod(load_model)       # an unsharded model: (name, device, dtype) -> (model, its tokenizer)

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.takes_trees = takes_masks(model)

    def collate(self, items, device):
        """The Batch of items; without trees if the model does not take our masks."""
        return collate(items if self.takes_trees else list(map(without_trees, items)), device)

    def check_logits(self, name):
        """lib.load.check_logits, for a model whose logits are used."""
        check_logits(self.model, name)

    def check_positions(self, items):
        """Raises TooLong if a sequence exceeds the model's context length."""
        most, longest = most_positions(self.model.config), 0
        for sequence in itertools.chain(*items):
            length = len(sequence.ids)
            if sequence.prompt_length is not None:                   # a tree: its prompt and its longest action
                num_tokens = collections.Counter(sequence.action_ids[sequence.prompt_length:])
                length = sequence.prompt_length + max(num_tokens.values())
            longest = max(longest, length)
        if longest > most:
            raise TooLong(f"{self.model.name_or_path}: takes {most:,.0f} tokens, and a prompt with its action has up "
                          f"to {longest:,} (with c, for a critic); in training --max-length drops longer ones")

    def hidden_states(self, batch):
        """The last hidden state of each token, (R, T, H)."""
        mask = None                               # padding is on the right: with causal attention no token sees it
        if batch.mask is not None:
            mask = decoder_mask(self.model, sliding_window(self.model), batch.mask, batch.positions, batch.positions)
        positions = batch.positions
        if positions.device.type in WIDTH_STEP:                      # padding may exceed the model's positions
            most = most_positions(self.model.config)
            positions = positions.clamp(max=min(most, positions.shape[1]) - 1)
        decoder = self.model.get_decoder()
        output = decoder(input_ids=batch.ids, attention_mask=mask, position_ids=positions, use_cache=False)
        return output.last_hidden_state

    def forward(self, batch, values_of=None):
        """values_of: a fork's function in place of token_logps."""
        r, t = batch.action_tokens
        before = self.hidden_states(batch)[r, batch.previous[r, t]]                       # (N, H)
        values = (values_of or token_logps)(projection_of(self.model), before, batch.ids[r, t])      # (N,)
        return action_sums(batch, values)


class HeadModel(ActionModel):
    """A model with a head, a linear layer from a hidden state to one number. Returns this number for each action, from
    the mean of its tokens' hidden states: (B, M) float32; 0: no such action."""

    def __init__(self, model):
        super().__init__(model)
        self.head = torch.nn.Linear(model.config.get_text_config().hidden_size, 1, device=model.device)
        torch.nn.init.zeros_(self.head.weight)                       # an untrained head scores every action 0
        torch.nn.init.zeros_(self.head.bias)
        output, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
        if output.weight is not embeddings.weight:
            # Unused here, so it has no optimizer state, which would break resuming.
            output.requires_grad_(False)

    def check_logits(self, name):
        """Nothing to check: a head does not use the logits."""

    def forward(self, batch):
        r, t = batch.action_tokens
        states = self.hidden_states(batch)[r, t].float()                                  # (N, H)
        lengths = batch.lengths.clamp(min=1)                                              # (B, M)
        means = action_sums(batch, states) / lengths[..., None]                           # (B, M, H)
        values = F.linear(means, self.head.weight.float(), self.head.bias.float())        # (B, M, 1)
        return values.squeeze(-1) * (batch.lengths > 0)


class TooLong(InputError):
    """A sequence exceeds a model's context length."""


MAX_LOGITS = 2 ** 26                                                # in memory at a time, in float32
MAX_SLOPES = 2 ** 31                                                # kept for the backward pass, in bfloat16


def token_logps(projection, hidden, ids):
    """Log-probabilities (N,) of the tokens `ids` (N,), each after the state `hidden` (N, H) of the token before it.

    projection: the model's Projection. Logits are float32 sums, whatever the type of states and weights: bfloat16
    rounds a logit of 20 by .06, more than the difference between many candidates' advantages."""
    return -in_chunks(functools.partial(F.cross_entropy, reduction="none"), projection, hidden, ids)


def in_chunks(function, projection, hidden, *tensors):
    """function(logits, *tensors) (N,) of the float32 logits (N, V) of states `hidden` (N, H) and of tensors (N, …), in
    parts of about MAX_LOGITS logits. Each result must depend only on its own row, and the tensors get no gradient.
    With several parts, their logits are recomputed in the backward pass. In bfloat16 on a GPU RowValues keeps up to
    MAX_SLOPES slopes instead."""
    weight, bias, _, _ = projection
    keeps_slopes = has_fast_bfloat16(hidden, weight) and torch.is_grad_enabled()

    def of_sums(sums, *tensors):
        return function(projection.finished(sums), *tensors)

    def of_states(hidden, *tensors):
        if keeps_slopes:
            num_parts = math.ceil(len(hidden) * len(weight) / MAX_LOGITS)
            return RowValues.apply(hidden, weight, bias, of_sums, num_parts, *tensors)
        return function(projection.logits(hidden), *tensors)
    num_chunks = math.ceil(len(hidden) * len(weight) / (MAX_SLOPES if keeps_slopes else MAX_LOGITS))
    if num_chunks == 1:
        return of_states(hidden, *tensors)
    results = []
    for chunk in zip(*(tensor.chunk(num_chunks) for tensor in (hidden, *tensors))):
        results.append(checkpoint(of_states, *chunk, use_reentrant=False))
    return torch.cat(results)


def action_sums(batch, values):
    """Sums of `values` (N,) or (N, H) of action tokens over each action, (B, M) or (B, M, H) float32."""
    r, t = batch.action_tokens
    shape = batch.lengths.shape + values.shape[1:]
    sums = torch.zeros(shape, device=values.device)
    place = batch.item_index[r], batch.action_ids[r, t]                                   # item and action of a token
    return sums.index_put(place, values, accumulate=True)


# ---------------------------------------------------------------------------------------------------------------------
# many items: action_outputs, [(actions,)]; reference_logps, [[(actions,)]]; padded_outputs, which are (B, M) again

def action_outputs(action_model, items, max_tokens):
    """action_model(batch) for many items, in evaluation mode and without gradients: a list of float32 tensors (number
    of actions of the item,). An item that occurs several times is computed once.

    Batches have at most `max_tokens` padded tokens; a longer item is a separate batch. If the model is split over the
    ranks, every rank must call this with the same items and computes a share of the batches."""
    distinct = {id(item): item for item in items}                    # trajectories are in several pairs
    numbers = {key: number for number, key in enumerate(distinct)}
    order = [numbers[id(item)] for item in items]
    items = list(distinct.values())
    action_model.check_positions(items)
    if not action_model.takes_trees:
        items = list(map(without_trees, items))
    chunks = chunks_of(items, max_tokens)
    is_split = hasattr(action_model, "reshard")
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if is_split else (0, 1)
    outputs = {}
    was_training = action_model.training
    action_model.eval()
    starts = range(0, len(chunks), world_size)
    for first in tqdm(starts, "tokens scored", unit="pass", leave=False, delay=10, disable=rank > 0):
        # Ranks gather layers together, so all need equally many passes: a rank without a chunk repeats the last one.
        chunk = chunks[min(first + rank, len(chunks) - 1)]
        with torch.no_grad():
            batch = action_model.collate([items[i] for i in chunk], action_model.model.device)
            values = action_model(batch).cpu()                                            # (B, M)
        for i, item_values in zip(chunk, values):
            outputs[i] = item_values[:num_actions(items[i])].clone()
    action_model.train(was_training)
    reshard(action_model)
    if world_size > 1:
        for outputs_of_rank in gather(outputs):
            outputs |= outputs_of_rank
    return [outputs[i] for i in order]


def action_lengths(items):
    """Number of tokens in each action of items, (B, M); 0: no such action."""
    lengths = []
    for item in items:
        action_ids = torch.tensor([number for sequence in item for number in sequence.action_ids])
        lengths.append(torch.bincount(action_ids[action_ids >= 0]))
    return pad_sequence(lengths, batch_first=True)


def chunks_of(items, max_tokens):
    """Lists of item numbers, the longest items first. A list with several items has at most `max_tokens` padded tokens.
    """
    lengths = [longest_sequence([item]) for item in items]
    chunks, num_rows = [], 0
    for i in sorted(range(len(items)), key=lambda i: -lengths[i]):
        # the first item of a chunk is the longest one
        if chunks and (num_rows + len(items[i])) * lengths[chunks[-1][0]] <= max_tokens:
            chunks[-1].append(i)
            num_rows += len(items[i])
        else:
            chunks.append([i])
            num_rows = len(items[i])
    return chunks


def padded_outputs(outputs, device="cpu"):
    """The reference_logps of some examples as one tensor (B, M); 0: no such action."""
    return pad_sequence([values for items in outputs for values in items], batch_first=True).to(device)


def reference_logps(path, action_model, examples, max_tokens):
    """action_outputs of the items of each example under the reference model: the model before its first update, with
    its adapter off. Call this before training.Loop loads the saved state of a resumed run. The outputs are cached in
    the file `path` for a run that continues with the same examples."""
    digest = hashlib.sha256()
    for item in items_of(examples):
        digest.update(repr(item).encode())
    kept = torch.load(path, weights_only=True) if path.exists() else {}
    barrier()                                                        # until all ranks have read it
    if kept.get("examples") == digest.hexdigest():
        return kept["outputs"]
    say(f"reference log-probabilities of {len(examples):,} examples")
    with adapter_off(action_model.model):
        of_items = iter(action_outputs(action_model, items_of(examples), max_tokens))
    outputs = [list(itertools.islice(of_items, len(example.items))) for example in examples]
    if is_main():
        partial = path.with_suffix(".partial")
        torch.save({"examples": digest.hexdigest(), "outputs": outputs}, partial)
        partial.rename(path)
    return outputs


# ---------------------------------------------------------------------------------------------------------------------
# loading

def load_sharded(name, run, sharding, lora=None, kind=ActionModel):
    """The ActionModel of a name, ready for training and split over the ranks (shard). Rank 0 reads the model's files,
    and every rank gets its part of each tensor.

    lora   None, or a LoraConfig: the model is kept in sharding.dtype, frozen, and gets a new adapter
    kind   ActionModel or a subclass; all of its own parameters start at zero"""
    dtype = getattr(torch, sharding.dtype) if lora else torch.float32
    tensors = {}
    config, generation_config, buffers = read_whole(name, dtype, lora, sharding.seed, tensors)
    with torch.device("meta"):
        model = meta_model(config, dtype)
        model.generation_config = generation_config
        if lora:
            add_adapter(model, lora)
        action_model = kind(model)
    shard(action_model, run, sharding)
    action_model.to_empty(device=run.device)
    model.tie_weights()                                             # to_empty unties weights
    for parameter in action_model.parameters():
        parameter.data.zero_()
    with loading(name):                                             # fails if the files make another model
        for key, buffer in model.named_buffers():
            buffer.copy_(buffers[key])
        set_tensors(model, tensors, broadcast_from_rank0=True)
    action_model.check_logits(name)
    reshard(action_model)
    return action_model


def load_whole(device, dtype="float32"):
    """A `load` for critics that loads whole models on this rank."""
    def load(name, lora=None, kind=ActionModel):
        model, _ = kind.open_model(name, device, dtype)
        if lora:
            add_adapter(model, lora, getattr(torch, dtype))            # as in a forward pass of a sharded model
        return kind(model)
    return load


def for_scoring(action_model):
    """The ActionModel in evaluation mode. If sharded, it frees layers after use, as there is no backward pass."""
    if hasattr(action_model, "set_reshard_after_forward"):
        action_model.set_reshard_after_forward(True)
    return action_model.eval()


def load_trained(folder, load, kind):
    """The ActionModel of a critic's folder, with its head, for scoring. For an adapter: its base with the adapter.
    load: training.Job.load, or load_whole(device). kind: ActionModel or a subclass."""
    lora = folder_config(folder)
    action_model = load(base_of(folder) if lora else folder, lora=lora, kind=kind)
    if lora:
        load_adapter(action_model.model, folder)
    if hasattr(action_model, "head"):
        with loading(folder):
            set_tensors(action_model.head, torch.load(pathlib.Path(folder) / "turn_head.pt", weights_only=True))
    return for_scoring(action_model)
