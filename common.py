"""What 03 and 04 are made of: dialogues as tokens, batches, scores of actions, critics, pairs of trajectories."""
import lib  # noqa: F401  # isort: skip (first: it says how to set up where torch is missing)
import collections
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import pathlib
import re
from collections import namedtuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from colbench import domain_of
from colbench.schema import label, one_of, record
from lib import models, vision
from lib.models import continuation, encode, end_of_turn, generation_cue, plain, render_chat, tokenizer_name
from lib.runtime import barrier, gather, InputError, is_main, read_json, say, write_json
from lib.training import item_length, longest_row

# ---------------------------------------------------------------------------------------------------------------------
# dialogue: what the agent sees

AGENT = record({"system_prompt": str}, {"chat_template_args": dict})
CRITIC = record({"head": one_of("lm", "regression", "value"), "normalize": one_of("turn", "trajectory", "none"),
                 "privileged": bool, "reference": label},
                {"visual": bool, "reference_sees_c": bool, "prompt_form": str})

LAST_ROUND = "\n(last round)"
HIDDEN_INFO = "The {noun} that this person needs is the following.\n{ground_truth}\nThe dialogue with the person:\n"


def agent_chat(trajectory, history):
    """The chat that a trajectory's agent sees after `history` (agent_messages)."""
    max_rounds = trajectory.get("max_rounds", 10)
    return agent_messages(history, max_rounds, domain_of(trajectory["task"]).AGENT_SYSTEM, system_prompt(trajectory))


def template_args(trajectory):
    """The arguments of the chat template that the agent of a trajectory had (02 --chat-template-args)."""
    return trajectory.get("chat_template_args", {})


def agent_messages(history, max_rounds, domain_prompt, system=None):
    """The chat that an agent sees before its next turn: a system prompt and the dialogue.

    The prompt is the domain's; the user's message that opens the last round then ends with a note.
    system: a text that replaces this prompt and the note.
    `c` is not an argument: no model that plays the agent can see it."""
    prompt = domain_prompt.format(max_rounds=max_rounds) if system is None else system
    messages = [{"role": "system", "content": prompt}] if prompt or system is not None else []
    for turn in history:
        messages.append({"role": turn["role"], "content": turn["content"]})
    if system is None and len(history) == 2 * max_rounds - 1:
        messages[-1]["content"] += LAST_ROUND
    return messages


def our_system(trajectory):
    """The system prompt that our agent had in a trajectory."""
    return domain_of(trajectory["task"]).AGENT_SYSTEM.format(max_rounds=trajectory.get("max_rounds", 10))


# The beginning of a logged prompt: the system prompt in Llama 3's template (which puts two dates in front) or ChatML
LOGGED_SYSTEM = re.compile(
    r"(?:<\|begin_of_text\|>)*<\|start_header_id\|>system<\|end_header_id\|>\n\n"
    r"(?:Cutting Knowledge Date: [^\n]*\n)?(?:Today Date: [^\n]*\n)?\n?(.*?)<\|eot_id\|>|"
    r"<\|im_start\|>system\n(.*?)<\|im_end\|>", re.DOTALL)


def system_prompt(trajectory):
    """The system prompt that the agent of a trajectory had: its "system_prompt" (of 02 --system-prompt), or the one in
    the logged prompt of its first turn (published files). None: ours, or one that cannot be read."""
    text = trajectory.get("system_prompt")
    if text is None:
        first = next(turn for turn in trajectory["dialogue_history"] if turn["role"] == "assistant")
        if match := LOGGED_SYSTEM.match(first.get("input", "")):
            text = match[1] if match[2] is None else match[2]
    return None if text == our_system(trajectory) else text


def shown_system(trajectory):
    """The system prompt that the agent of a trajectory had, also where it is ours; it may be empty."""
    text = system_prompt(trajectory)
    return our_system(trajectory) if text is None else text


def hidden_info(task):
    """The text that states c; empty for a task without one."""
    if not task["ground_truth"]:
        return ""
    return HIDDEN_INFO.format(noun=domain_of(task).NOUN, ground_truth=task["ground_truth"])


def vocabulary_text(trajectory):
    """All the text of a trajectory that a fresh tokenizer should know."""
    turns = [turn["content"] for turn in trajectory["dialogue_history"]]
    return "\n".join([*turns, turns[0] + LAST_ROUND, hidden_info(trajectory["task"])])


def note_prompt(folder, trajectories):
    """Write agent.json into an agent's `folder`: what its prompts were made with in training (check_prompt)."""
    notes = collections.Counter()
    for trajectory in trajectories:
        note = {"system_prompt": shown_system(trajectory), "chat_template_args": template_args(trajectory)}
        notes[json.dumps(note, sort_keys=True)] += 1
    [(note, count)] = notes.most_common(1)
    if len(notes) > 1:
        say(f"{len(trajectories) - count:,} of {len(trajectories):,} trajectories have another system prompt, or other "
            "arguments of the chat template, than most")
    if is_main():
        write_json(pathlib.Path(folder) / "agent.json", json.loads(note))


def check_prompt(agent, tokenizer, system, arguments):
    """Say if an agent (a folder of 04) was trained with another system prompt, or other arguments of the chat template,
    than it has now, unless the template renders both alike."""
    path = pathlib.Path(agent) / "agent.json"
    if not path.is_file():
        return
    note = read_json(path, AGENT)

    def prompt_with(system, arguments):
        chat = [{"role": "system", "content": system}, {"role": "user", "content": "?"}]
        return render_chat(tokenizer, chat, add_generation_prompt=True, **arguments)
    trained_prompt = prompt_with(note["system_prompt"], note.get("chat_template_args", {}))
    if trained_prompt != prompt_with(system, arguments):
        say(f"{agent}: was trained with another system prompt, or other arguments of the chat template, than it has "
            f"here; {path} has them (--system-prompt FILE, --max-rounds, --chat-template-args)")


# ---------------------------------------------------------------------------------------------------------------------
# dialogue tokens

# A row of tokens.
# ids             token ids
# turn_ids        of each token the number of the action that it belongs to, -1 where it is only read (prompts, the
#                 simulator, c). An action is what gets one log-probability: an agent's turn (critics, rft, sft), a
#                 candidate (sweet), a whole dialogue (mtdpo: as_one_action); in examples/grpo.py a single token
# prompt_length   None or, for a tree, the number of its prompt's tokens: several actions continue one prompt, which is
#                 computed once; each action sees the prompt and itself
# images          the image files (None: a black one) that a row of a visual critic shows; it is one action
Row = namedtuple("Row", "ids turn_ids prompt_length images", defaults=(None, ()))

# What one training example is made of.
# items    lists of rows: a trajectory (one row where the chat template only appends, else several), or actions of one
#          state (one row, a tree)
# pairs    ((item, action), (item, action)) of chosen and rejected actions
# task_id  the task of its first item: 03 holds out whole tasks by it
#
#                  items                        actions of an item           pairs
#     sweet        1: a state                   its candidates               of actions of this item
#     mtdpo        2: trajectories              1, the whole dialogue        1: the action of item 0, that of item 1
#     rft, sft     1: a trajectory              the agent's turns            none: all actions are imitated
#     critic       2: chosen, rejected          the agent's turns            none: the items are compared as wholes
#     value head   1: a trajectory              the agent's turns            none
Example = namedtuple("Example", "items pairs task_id")


def prompt_text(tokenizer, trajectory, history):
    """The text that the agent of a trajectory continues after `history`, with the cue of its turn."""
    chat = agent_chat(trajectory, history)
    return render_chat(tokenizer, chat, add_generation_prompt=True, **template_args(trajectory))


def critic_prompt(tokenizer, prompt, task):
    """A prompt (text) as a critic reads it: [BOS] + hidden_info(task) + prompt. c is in no message of the chat. The
    beginning-of-sequence token stays in front of c, unless the template opens messages with it, as SmolLM2's does."""
    bos = tokenizer.bos_token or ""
    if not prompt.startswith(bos) or generation_cue(tokenizer).startswith(bos):
        bos = ""
    return bos + plain(tokenizer, hidden_info(task)) + prompt[len(bos):]


def agent_turns(tokenizer, trajectory, counts=None):
    """[(prompt text, action ids)] of a trajectory's agent turns, as near to what was sampled as the file allows.
    The ids end with the end-of-turn token, but for sampled turns that --max-new-tokens has cut.

    A turn is of one of three kinds, which `counts` (a Counter) counts:
    "as sampled"      this tokenizer sampled it: the ids are in the file
    "as logged"       its logged prompt ends with this template's cue (published files): ids come from the raw output
    "rendered again"  else: prompt and ids are what the template makes of the turns"""
    history = trajectory["dialogue_history"]
    is_sampled = trajectory.get("tokenizer") == tokenizer_name(tokenizer)
    cue = generation_cue(tokenizer)                                  # "" of a template that has none
    end = end_of_turn(tokenizer)
    turns = []
    for index, turn in enumerate(history):
        if turn["role"] != "assistant":
            continue
        if is_sampled and "input" in turn and "output_ids" in turn:            # not the kept texts of 02 --branch
            kind = "as sampled"
            prompt, action = turn["input"], turn["output_ids"]
        elif "output" in turn and cue and turn.get("input", "").endswith(cue):
            kind = "as logged"
            output = turn["output"].removesuffix(tokenizer.decode(end))
            prompt, action = turn["input"], [*continuation(tokenizer, turn["input"], output), end]
        else:
            kind = "rendered again"
            prompt, text = rendered_turn(tokenizer, trajectory, index)
            action = [*continuation(tokenizer, prompt, text), end]
            if trajectory.get("system_prompt", "").strip() not in prompt:       # that of models/tiny shows none
                kind += " without their system prompt, which the template leaves out"
        turns.append((prompt, action))
        if counts is not None:
            counts[kind] += 1
    return turns


def rendered_turn(tokenizer, trajectory, index):
    """(prompt, action), texts of an agent's turn as the template writes them in a dialogue that ends with it. The
    prompt ends with the cue or, where the template opens a finished turn in another way (a cue that begins a thought,
    say), just before the content."""
    history = trajectory["dialogue_history"]
    content = history[index]["content"]
    prompt = prompt_text(tokenizer, trajectory, history[:index])
    chat = [*agent_chat(trajectory, history[:index]), {"role": "assistant", "content": content}]
    whole, _, _ = render_chat(tokenizer, chat, **template_args(trajectory)).rpartition(
        tokenizer.decode(end_of_turn(tokenizer)))
    if content.strip() and whole.startswith(prompt):
        return prompt, whole[len(prompt):]
    content = plain(tokenizer, content)
    for text in (content, content.strip()):                          # many templates trim
        if text.strip() and whole.endswith(text):
            return whole.removesuffix(text), text
    return prompt, content


def say_kinds(what, kinds):
    """Say how many turns are of which kind (agent_turns), if there are any."""
    if kinds:
        say(f"{what}: {', '.join(f'{count:,} {kind}' for kind, count in kinds.items())}")


def rows_of_trajectory(tokenizer, turns, task=None):
    """Rows of a trajectory from its agent_turns: one, in which only agent tokens have turn_ids of 0 or more. With its
    `task` c stands once, at the very front (critic_prompt).

    For turns "<u>hi<a>" -> "who?<e>", "<u>hi<a>who?<e><u>me<a>" -> "ok<e>" it is one row:
        ids             <u> hi <a> who ? <e> <u> me <a> ok <e>
        turn_ids        -1 -1  -1   0 0   0  -1 -1  -1  1   1
    The ids before an action are those of its whole prompt, as the agent read them. Where a prompt does not begin with
    the ids of the row (a template that drops thoughts, an action that its text encodes otherwise), a new row begins."""
    rows = []
    for number, (prompt, action) in enumerate(turns):
        if task is not None:
            prompt = critic_prompt(tokenizer, prompt, task)
        read = encode(tokenizer, prompt)
        if not rows or read[:len(rows[-1].ids)] != rows[-1].ids:
            rows.append(Row([], []))
        row = rows[-1]
        num_new = len(read) - len(row.ids)
        row.ids.extend(read[len(row.ids):] + action)
        row.turn_ids.extend([-1] * num_new + [number] * len(action))
    return rows


def actions_item(tokenizer, prompt, actions):
    """The item of several actions (id lists) after one prompt (text): one row, a tree. Their numbers are 0, 1, …

    For prompt "<u>hi<a>" and actions "who?<e>", "ok<e>" the row is
        ids             <u> hi <a> who ? <e> ok <e>
        turn_ids        -1 -1  -1   0 0   0  1   1      prompt_length = 3"""
    ids = list(encode(tokenizer, prompt))
    num_read = len(ids)
    turn_ids = [-1] * num_read
    for number, action in enumerate(actions):
        ids += action
        turn_ids += [number] * len(action)
    return [Row(ids, turn_ids, prompt_length=num_read)]


def without_trees(item):
    """The item with a row for each action of a tree."""
    rows = []
    for row in item:
        if row.prompt_length is None:
            rows.append(row)
            continue
        prompt = row.ids[:row.prompt_length]
        for number in range(1 + max(row.turn_ids)):
            action = [token for token, turn_id in zip(row.ids, row.turn_ids) if turn_id == number]
            rows.append(Row(prompt + action, [-1] * len(prompt) + [number] * len(action)))
    return rows


def as_one_action(item):
    """A trajectory's item with all agent tokens as action 0: multi-turn DPO compares whole dialogues."""
    rows = []
    for row in item:
        numbers = [min(number, 0) for number in row.turn_ids]
        rows.append(row._replace(turn_ids=numbers))
    return rows


def items_of(examples):
    """All items of examples, in their order, as collate takes them."""
    return [item for example in examples for item in example.items]


# ---------------------------------------------------------------------------------------------------------------------
# batches
#
# In shapes: R rows, T tokens of the longest, B items, M most actions of an item, N action tokens, P pairs, H hidden
# size, V vocabulary

Batch = namedtuple("Batch", "ids positions turn_ids previous item_index lengths action_tokens mask images")


def collate(items, device="cpu"):
    """Pad items (each a list of rows) on the right to one Batch:

    ids             (R, T) token ids, 0 where padded
    positions       (R, T) position of each token; a tree's actions all begin where its prompt ends
    turn_ids        (R, T) as of Row, -1 where padded
    previous        (R, T) place of the token before; for the first token of a tree's action, of the prompt's last
    item_index      (R,)   the item of each row
    lengths         (B, M) number of tokens of each item's actions, 0 where it has no such action
    action_tokens   (2, N) row and place of each token of an action
    mask            None, or if a row is a tree (R, 1, T, T) True where a token (third axis) sees another (fourth)
    images          of all rows, in their order"""
    rows = [row for item in items for row in item]
    item_index = [number for number, item in enumerate(items) for _ in item]
    # Of a list of 2,000 numbers NumPy makes an array in a fifth of the time that torch takes.
    ids = pad_sequence([torch.from_numpy(np.array(row.ids)) for row in rows], batch_first=True)
    turn_ids = [torch.from_numpy(np.array(row.turn_ids)) for row in rows]
    turn_ids = pad_sequence(turn_ids, batch_first=True, padding_value=-1)
    padding = 0, models.width_padding(ids.shape[1], device)
    ids, turn_ids = F.pad(ids, padding), F.pad(turn_ids, padding, value=-1)
    num_rows, width = ids.shape
    positions = torch.arange(width).repeat(num_rows, 1)
    previous = positions - 1
    most_actions = 1 + turn_ids.max().item()
    lengths = torch.zeros(len(items), most_actions)
    for r, row in enumerate(rows):
        is_action = turn_ids[r] >= 0                                                      # (T,)
        action_ids = turn_ids[r, is_action]
        counts = torch.bincount(action_ids, minlength=most_actions)                       # (M,)
        lengths[item_index[r]] += counts
        if row.prompt_length is not None:                # a tree: its actions lie in the order of their numbers
            begins = row.prompt_length + counts.cumsum(0) - counts                        # (M,) where actions begin
            positions[r, is_action] += row.prompt_length - begins[action_ids]
            previous[r, begins[counts > 0]] = row.prompt_length - 1
            positions[r, len(row.ids):] = 0              # padding of a row that is longer than the model has positions
    action_tokens = (turn_ids >= 0).nonzero().t()       # here: a GPU would have to end all work before it knew N
    turn_ids = turn_ids.to(device)
    tensors = [ids, positions, turn_ids, previous, torch.tensor(item_index), lengths, action_tokens]
    tensors = [tensor.to(device) for tensor in tensors]
    return Batch(*tensors, tree_mask(rows, turn_ids), images=[image for row in rows for image in row.images])


def tree_mask(rows, turn_ids):
    """Which tokens (fourth axis) each token (third) of a batch sees, (R, 1, T, T) bool. None where no row is a tree.

    In a tree these are the tokens before it of its own action and of the prompt; else all tokens before it.
    turn_ids: (R, T), as of collate."""
    is_tree = torch.tensor([row.prompt_length is not None for row in rows])               # (R,)
    if not is_tree.any():
        return None
    places = torch.arange(turn_ids.shape[1], device=turn_ids.device)                      # (T,)
    lengths = torch.tensor([len(row.ids) for row in rows], device=turn_ids.device)        # (R,)
    is_token = places < lengths[:, None]                                                  # (R, T)
    branches = turn_ids.where(is_tree.to(turn_ids.device)[:, None], -1)                   # (R, T)
    is_prompt = branches[:, None, :] == -1                                                # (R, 1, T)
    same_branch = branches[:, None, :] == branches[:, :, None]                            # (R, T, T)
    is_before = places <= places[:, None]                                                 # (T, T)
    itself = places == places[:, None]                  # padding sees itself: a softmax over nothing is NaN
    sees = (is_prompt | same_branch) & is_before & (is_token[:, None, :] | itself)        # (R, T, T)
    return sees[:, None]


def batch_pairs(examples):
    """The pairs of several examples, whose items are numbered through as collate takes them, as a tensor (P, 2, 2):
    of each pair the chosen and the rejected action, of each action its item and number.

    For two examples of one item with pairs ((0, 0), (0, 1)) and ((0, 2), (0, 1)) it is
        [[[0, 0], [0, 1]], [[1, 2], [1, 1]]]"""
    pairs, first_item = [], 0
    for example in examples:
        for (chosen_item, chosen_action), (rejected_item, rejected_action) in example.pairs:
            chosen = [first_item + chosen_item, chosen_action]
            rejected = [first_item + rejected_item, rejected_action]
            pairs.append([chosen, rejected])
        first_item += len(example.items)
    return torch.tensor(pairs)


# ---------------------------------------------------------------------------------------------------------------------
# scores of actions: action_logps or action_values of a batch, (B, M); action_outputs of many items, [(actions,)];
# example_outputs of examples, [[(actions,)]]; padded_outputs of some of these again (B, M)

class Scorer(torch.nn.Module):
    """A model that gives each action of a batch (collate) a number, (B, M); 0 where an item has no such action.

    Without a head it is the action's log-probability (action_logps), with one the head's value (action_values).
    03 and 04 call this, never the model (but to sample). Where it is split over the ranks, a call gathers what it
    needs, and keeps part of it for the backward pass: without gradients call action_outputs, which frees that.

    model      a causal language model, or one of the Qwen2-VL family
    head       None, or a linear layer from a hidden state to one number
    processor  of a model that sees images"""

    def __init__(self, model, has_head=False, processor=None):
        super().__init__()
        self.model = model
        self.processor = processor
        self.takes_trees = models.takes_masks(model)
        self.head = None
        if has_head:
            self.head = torch.nn.Linear(model.config.get_text_config().hidden_size, 1, device=model.device)
            self.reset_head()
            output, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
            if output.weight is not embeddings.weight:
                # It gets no gradients, and so no optimiser state; a run could not be resumed with it.
                output.requires_grad_(False)

    def collate(self, items, device):
        """The Batch of items; without trees for a model that takes no masks of ours."""
        if not self.takes_trees:
            items = [without_trees(item) for item in items]
        return collate(items, device)

    def check_logits(self, name):
        """models.check_logits where the model's logits are used."""
        if self.head is None and not models.is_visual(self.model):
            models.check_logits(self.model, name)

    def reset_head(self):
        """An untrained head gives every action 0."""
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, batch, outputs_of=None):
        """outputs_of: what a fork asks of (projection, hidden states, batch) in place of action_logps."""
        if batch.images:
            hidden = vision.hidden_states(self.model, self.processor, batch)              # (R, T, H)
        else:
            hidden = hidden_states(self.model, batch)                                     # (R, T, H)
        if self.head is not None:
            return action_values(self.head, hidden, batch)
        outputs_of = outputs_of or action_logps
        return outputs_of(models.projection_of(self.model), hidden, batch)


def hidden_states(model, batch):
    """The last hidden state of each token, (R, T, H)."""
    mask = None                                   # rows are padded on the right: with causal attention no token sees it
    if batch.mask is not None:
        mask = models.decoder_mask(model, models.sliding_window(model), batch.mask, batch.positions, batch.positions)
    positions, most = batch.positions, models.most_positions(model.config)
    if positions.shape[1] > most:                                    # those of padding may have no place in the model
        positions = positions.clamp(max=int(most) - 1)
    output = model.get_decoder()(input_ids=batch.ids, attention_mask=mask, position_ids=positions, use_cache=False)
    return output.last_hidden_state


MAX_LOGITS = 2 ** 26                                                # in memory at a time, in float32
MAX_SLOPES = 2 ** 31                                                # kept for the backward pass, in bfloat16


def token_logps(projection, hidden, ids):
    """Log-probabilities (N,) of the tokens `ids` (N,), each after the state `hidden` (N, H) of the token before it.

    projection: the model's models.Projection. Logits are float32 sums, whatever states and weights are in: in bfloat16
    a logit of 20 is rounded by .06, more than the advantages of many candidates differ."""
    def logps_of(logits, ids):
        return -F.cross_entropy(logits, ids, reduction="none")                                    # (n,)
    return in_chunks(logps_of, projection, hidden, ids)


def in_chunks(function, projection, hidden, *tensors):
    """function(logits, *tensors) (N,) of the float32 logits (N, V) of states `hidden` (N, H) and of tensors (N, …), in
    parts of about MAX_LOGITS logits; each number must depend on its own row alone, and the tensors get no gradient.
    Where there are several parts, their logits are made again in the backward pass. In bfloat16 on a GPU
    models.RowValues keeps up to MAX_SLOPES slopes instead."""
    weight, bias, _, _ = projection
    keeps_slopes = models.has_fast_bfloat16(hidden, weight) and torch.is_grad_enabled()

    def num_parts(hidden, most):
        return math.ceil(len(hidden) * len(weight) / most)

    def of_sums(sums, *tensors):
        return function(projection.finished(sums), *tensors)

    def of_states(hidden, *tensors):
        if keeps_slopes:
            return models.RowValues.apply(hidden, weight, bias, of_sums, num_parts(hidden, MAX_LOGITS), *tensors)
        return function(projection.logits(hidden), *tensors)
    num_chunks = num_parts(hidden, MAX_SLOPES if keeps_slopes else MAX_LOGITS)
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
    place = batch.item_index[r], batch.turn_ids[r, t]                                   # item and action of a token
    return sums.index_put(place, values, accumulate=True)


def action_logps(projection, hidden, batch):
    """The log-probability of each action, summed over its tokens (agent_turns), (B, M) float32.
    hidden: (R, T, H). The vocabulary projection runs at action tokens alone."""
    r, t = batch.action_tokens
    before = hidden[r, batch.previous[r, t]]                                              # (N, H)
    return action_sums(batch, token_logps(projection, before, batch.ids[r, t]))


def action_values(head, hidden, batch):
    """A head's number for each action, from the mean of its tokens' hidden states (R, T, H); (B, M) float32."""
    r, t = batch.action_tokens
    states = hidden[r, t].float()                                                         # (N, H)
    lengths = batch.lengths.clamp(min=1)                                                  # (B, M)
    means = action_sums(batch, states) / lengths[..., None]                               # (B, M, H)
    values = F.linear(means, head.weight.float(), head.bias.float())                      # (B, M, 1)
    return values.squeeze(-1) * (batch.lengths > 0)


def action_outputs(scorer, items, max_tokens):
    """scorer(batch) of many items, in evaluation mode and without gradients: a list of float32 tensors (number of
    actions of the item,).

    Items go through it in batches of at most `max_tokens` padded tokens; a longer item is a batch of its own. If it is
    split over the ranks, every rank must call this with the same items, and takes its part of the batches.
    scorer: None, the reference of a critic with a head, whose initial values are 0; or a WithoutAdapter."""
    if scorer is None:
        return [torch.zeros(num_actions(item)) for item in items]
    if isinstance(scorer, models.WithoutAdapter):
        with models.adapter_off(scorer.scorer.model):
            return action_outputs(scorer.scorer, items, max_tokens)
    check_positions(items, scorer.model)
    if not scorer.takes_trees:
        items = [without_trees(item) for item in items]
    chunks = chunks_of(items, max_tokens)
    is_split = hasattr(scorer, "reshard")
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if is_split else (0, 1)
    outputs = {}
    was_training = scorer.training
    scorer.eval()
    starts = range(0, len(chunks), world_size)
    for first in tqdm(starts, "tokens scored", unit="pass", leave=False, delay=10, disable=rank > 0):
        # Ranks gather layers together, so all make equally many passes: a rank without a chunk repeats the last one.
        chunk = chunks[min(first + rank, len(chunks) - 1)]
        with torch.no_grad():
            values = scorer(collate([items[i] for i in chunk], scorer.model.device)).cpu()      # (B, M)
        for i, item_values in zip(chunk, values):
            outputs[i] = item_values[:num_actions(items[i])].clone()
    scorer.train(was_training)
    models.reshard(scorer)
    if world_size > 1:
        for outputs_of_rank in gather(outputs):
            outputs |= outputs_of_rank
    return [outputs[i] for i in range(len(items))]


class TooLong(InputError):
    """More tokens than a model takes."""


def check_positions(items, model):
    """TooLong where a row goes on for more tokens than the model takes."""
    most = models.most_positions(model.config)
    longest = max((num_positions(row) for item in items for row in item), default=0)
    if longest > most:
        raise TooLong(f"{model.name_or_path}: takes {most:,.0f} tokens, and a prompt with its action has up to "
                      f"{longest:,} (with c, for a critic); in training --max-length leaves out what is longer")


def num_positions(row):
    """How many positions a row needs: one a token; for a tree, those of its prompt and its longest action."""
    if row.images:                                                  # has positions of its own kind
        return 0
    if row.prompt_length is None:
        return len(row.ids)
    return row.prompt_length + max(collections.Counter(row.turn_ids[row.prompt_length:]).values())


def num_actions(item):
    return 1 + max(max(row.turn_ids) for row in item)


def chunks_of(items, max_tokens):
    """Lists of item numbers, the longest items first, so that a list padded has at most `max_tokens` tokens if it has
    more than one item."""
    lengths = [item_length(item) for item in items]
    chunks, num_rows = [], 0
    for i in sorted(range(len(items)), key=lambda i: -lengths[i]):
        # the first item of a chunk is its longest
        if chunks and (num_rows + len(items[i])) * lengths[chunks[-1][0]] <= max_tokens:
            chunks[-1].append(i)
            num_rows += len(items[i])
        else:
            chunks.append([i])
            num_rows = len(items[i])
    return chunks


def example_outputs(scorer, examples, max_tokens):
    """action_outputs of every example's items, each item once: a list of tensors (actions,) for each example."""
    items = {id(item): item for item in items_of(examples)}         # trajectories are in several pairs
    outputs = dict(zip(items, action_outputs(scorer, list(items.values()), max_tokens)))
    results = []
    for example in examples:
        results.append([outputs[id(item)] for item in example.items])
    return results


def padded_outputs(outputs, device):
    """The example_outputs of some examples as one tensor (B, M), 0 where an item has no such action."""
    return pad_sequence([values for items in outputs for values in items], batch_first=True).to(device)


def reference_logps(folder, scorer, examples, max_tokens):
    """example_outputs under the initial weights: to be called before training.Loop loads the saved state of a resumed
    run. They are kept in `folder`/ref.pt for a run that goes on with the same examples. With a head they are 0."""
    path = pathlib.Path(folder) / "ref.pt"
    digest = hashlib.sha256()
    for item in items_of(examples):
        digest.update(repr(item).encode())
    kept = torch.load(path, weights_only=True) if path.exists() else {}
    barrier()                                                        # all have read it
    if kept.get("examples") == digest.hexdigest():
        return kept["outputs"]
    initial = None                                                   # a head begins at 0
    if scorer.head is None:
        initial = models.without_adapter(scorer)
        say(f"reference log-probabilities of {len(examples):,} examples")
    outputs = example_outputs(initial, examples, max_tokens)
    if is_main():
        partial = path.with_suffix(".partial")
        torch.save({"examples": digest.hexdigest(), "outputs": outputs}, partial)
        partial.rename(path)
    return outputs


def load_scorer(name, run, sharding, lora=None, has_head=False):
    """A Scorer for training, or for scoring with a model that is too large for one rank: split over the ranks."""
    processor = vision.load_processor(name) if models.reads_images(name) else None
    build = functools.partial(Scorer, has_head=has_head, processor=processor)
    scorer = models.load_sharded(name, run, sharding, lora, build)
    if has_head:
        scorer.reset_head()
    scorer.check_logits(name)
    models.reshard(scorer)
    return scorer


def load_whole(device, dtype="float32"):
    """A `load` for load_critic: whole models on this rank."""
    def load(name, lora=None, has_head=False):
        processor = None
        if models.reads_images(name):
            model, processor = vision.load_vision(name, device, dtype)
        else:
            model, _ = models.load_model(name, device, dtype)
        if lora:
            models.add_adapter(model, lora, getattr(torch, dtype))     # as in a pass of a model that is split
        return Scorer(model, has_head, processor)
    return load


# ---------------------------------------------------------------------------------------------------------------------
# critics: loading, and the score of an action, whatever the critic's kind

def action_advantages(logps, ref_logps, lengths, normalize):
    """Eq. 3: the advantage, also called the score of a candidate (02, 04) and the advantage of a turn (05, the report).

    logps, ref_logps   (B, M) log-probabilities of actions under critic and reference; with a head, its numbers and 0
    lengths            (B, M) how many tokens they have; 0 where an action is missing

    Returns advantages (B, M). A trajectory's score is their sum over M; of actions in one state, each is a score.
    normalize "turn": each action's mean; "trajectory": one mean over all agent tokens; "none": no mean."""
    logratios = logps - ref_logps                                                   # (B, M)
    if normalize == "turn":
        return logratios / lengths.clamp(min=1)                                     # (B, M)
    if normalize == "trajectory":
        return logratios / lengths.sum(1, keepdim=True)                             # (B, M)
    return logratios


def item_advantages(items, logps, ref_logps, normalize):
    """action_advantages of items, a list of tensors (actions,). An action's length is the number of its tokens.
    logps, ref_logps: the items' action_outputs under critic and reference."""
    advantages = []
    for item, item_logps, item_ref_logps in zip(items, logps, ref_logps):
        turn_ids = torch.tensor([number for row in item for number in row.turn_ids])
        lengths = torch.bincount(turn_ids[turn_ids >= 0])                                 # (M,)
        advantages.append(action_advantages(item_logps[None], item_ref_logps[None], lengths[None], normalize)[0])
    return advantages


UNTRAINED = "untrained"                                             # --critic: the base model, with no training


@dataclasses.dataclass
class Critic:
    """A critic, and what its scores are. load_critic fills in the scorers."""

    folder: str                                 # of 03; of an untrained critic the name of the model
    reference: str                              # the name of the reference model of eq. 3
    head: str = "lm"                            # lm: log-probabilities; regression, value: a head's number
    normalize: str = "turn"                     # see action_advantages
    sees_c: bool = True
    ref_sees_c: bool = True                     # whether the reference reads c when actions are scored
    is_visual: bool = False
    sight: object = None                        # of a visual critic: vision.Sight
    scorer: object = None
    ref_scorer: object = None                   # None: a head, whose initial values are 0


def read_critic(folder, tokenizer, domain, ref_sees_c=None):
    """The Critic of a folder of 03, not loaded yet, for a policy with `tokenizer` (None: not compared) on a domain's
    tasks. InputError where it does not fit.
    ref_sees_c: what the reference reads; None: what it read in training."""
    path = pathlib.Path(folder) / "critic.json"
    if path.parent.is_file():
        raise InputError(f"{folder}: a file; a critic is a folder of 03_train_critic.py, {path.parent.parent} perhaps")
    if not path.exists():
        raise InputError(f"{folder}: no critic.json in it, so no finished critic of 03_train_critic.py")
    note = read_json(path, CRITIC)
    if ref_sees_c is None:
        ref_sees_c = note.get("reference_sees_c", True)
    critic = Critic(str(folder), note["reference"], note["head"], note["normalize"], note["privileged"], ref_sees_c,
                    note.get("visual", False))
    if models.is_adapter(folder):
        critic.reference = models.base_of(folder)
    if not ref_sees_c and (critic.head != "lm" or not critic.sees_c):
        say(f"{folder}: --reference-sees-c no does nothing for a critic with a head, or one that does not see c")
        critic.ref_sees_c = True
    if critic.is_visual and not domain.views:
        raise InputError(f"{folder}: a visual critic cannot rank {domain.NOUN}s, which have nothing to see")
    if tokenizer and not critic.is_visual:
        if tokenizer_name(models.load_tokenizer(str(folder))) != tokenizer_name(tokenizer):
            raise InputError(f"{folder}: its tokenizer is not the policy's; train the critic from the same model")
    trained_form = note.get("prompt_form")                           # older critics have none
    if trained_form and trained_form != prompt_form(critic, models.load_tokenizer(str(folder)), domain):
        raise InputError(f"{folder}: was trained with another critic's prompt than this code makes (HIDDEN_INFO, "
                         "critic_prompt, the chat template); train it again, or score with the code that trained it")
    if models.is_adapter(folder):
        models.check_base(folder)
    elif critic.head == "lm":
        models.check_weights(folder, critic.reference, note.get("reference_fingerprint"))
    return critic


# In front of a chat template: in place of a date it then writes the date's format
UNDATED = "{% macro strftime_now(format) %}{{ format }}{% endmacro %}"


def prompt_form(critic, tokenizer, domain):
    """A hash of how the prompt of a Critic is made, that is, of one that is made of a task and a dialogue that say
    nothing, on no date."""
    task = {"problem_description": "?", "ground_truth": "c", "own": True}
    history = [{"role": role, "content": "?"} for role in ("user", "assistant", "user")]
    if critic.is_visual:
        page = {"role": "assistant", "content": "```html\n<p>?</p>\n```"}
        prompts = list(domain.views(task, [*history, page], critic.sees_c))
    else:
        undated = {"chat_template": UNDATED + tokenizer.get_chat_template()}
        dummy = {"task": task, "max_rounds": 2, "dialogue_history": history, "chat_template_args": undated}
        prompts = []
        for trajectory in (dummy, {**dummy, "system_prompt": "?"}):
            prompt = prompt_text(tokenizer, trajectory, history)
            prompts.append(critic_prompt(tokenizer, prompt, task) if critic.sees_c else prompt)
    return hashlib.sha256(repr(prompts).encode()).hexdigest()[:16]


def open_critic(name, model, tokenizer, domain, ref_sees_c=None):
    """The Critic of --critic (its `name`), not loaded yet: that of a folder (read_critic) or, with "untrained", the
    `model` itself, whose scores are log p(a|o, c) - log p(a|o), a mean over the tokens of a."""
    if name != UNTRAINED:
        critic = read_critic(name, tokenizer, domain, ref_sees_c)
    elif ref_sees_c:
        raise InputError(f"--critic {UNTRAINED}: scores every action 0 with a reference that sees c; it needs "
                         "--reference-sees-c no")
    else:
        critic = Critic(model, model, ref_sees_c=False)
    say(critic_line(critic))
    return critic


def critic_line(critic):
    """What a critic's scores are, in a line."""
    if critic.head != "lm":
        return f"{critic.folder}: scores are the numbers of its {critic.head} head"
    model = "p_ref" if critic.folder == critic.reference else "p"
    prompt = "o, c" if critic.sees_c else "o"
    ref_prompt = "o, c" if critic.sees_c and critic.ref_sees_c else "o"
    mean = {"turn": "a mean over the tokens of a", "none": "a sum over the tokens of a",
            "trajectory": "a mean over the tokens of a (in training over all agent tokens)"}[critic.normalize]
    logratio = f"log {model}(a|{prompt}) - log p_ref(a|{ref_prompt})"
    return f"{critic.folder}: scores are {logratio}, {mean}"


def load_critic(critic, load):
    """Load the Scorers of a Critic. The reference is the model that 03 began with, by its name. Of an adapter it is
    the same model with its adapter off, of an untrained critic the critic itself, of a critic with a head None.

    load(name, lora=…, has_head=…) loads one: load_whole, or load_scorer where it is split over the ranks."""
    has_head = critic.head != "lm"
    is_trained = critic.folder != critic.reference
    lora = models.folder_config(critic.folder) if is_trained else None
    scorer = load(critic.reference if lora else critic.folder, lora=lora, has_head=has_head)
    if lora:
        models.load_adapter(scorer.model, critic.folder)
    if has_head:
        models.load_head(scorer.head, critic.folder)
    critic.scorer = scorer.eval()
    critic.ref_scorer = models.without_adapter(scorer) if lora else scorer
    if has_head:
        critic.ref_scorer = None
    elif is_trained and not lora:
        critic.ref_scorer = load(critic.reference).eval()
    for split_scorer in (critic.scorer, critic.ref_scorer):
        if hasattr(split_scorer, "set_reshard_after_forward"):       # no backward pass needs its layers again
            split_scorer.set_reshard_after_forward(True)
    return critic


# A state and actions in it: the prompt's text, the task, the turns so far, the actions' ids and their visible texts
DecisionPoint = namedtuple("DecisionPoint", "prompt task history actions texts")


def score_actions(critic, tokenizer, points, max_tokens):
    """The score A(o_t, a, c) of each action of DecisionPoints by a loaded Critic, a list of floats for each point: a
    mean over the action's own tokens, with --normalize none a sum. Equal actions are scored once."""
    if critic.is_visual:
        views = vision.action_views(critic.sight, points, critic.sees_c)
        rows = vision.view_rows(critic.sight, views)
        values = action_outputs(critic.scorer, [visual_item([row]) for row in rows.values()], max_tokens)
        value_of = dict(zip(rows, torch.cat(values).tolist()))
        return [list(map(value_of.get, point_views)) for point_views in views]
    actions = [sorted(set(map(tuple, point.actions))) for point in points]
    items = ref_items = [actions_item(tokenizer, point.prompt, ids) for point, ids in zip(points, actions)]
    if critic.sees_c:
        prompts = [critic_prompt(tokenizer, point.prompt, point.task) for point in points]
        items = [actions_item(tokenizer, prompt, ids) for prompt, ids in zip(prompts, actions)]
    if critic.ref_sees_c:
        ref_items = items
    logps, ref_logps = critic_outputs(critic, items, ref_items, max_tokens)
    normalize = critic.normalize
    if normalize == "trajectory":                                    # one action is scored alone: its own tokens' mean
        normalize = "turn"
    scores = []
    for point, point_actions, advantages in zip(points, actions, item_advantages(items, logps, ref_logps, normalize)):
        if not advantages.isfinite().all():
            raise InputError(f"{critic.folder}: gives scores that are not finite; train this critic again")
        score_of = dict(zip(point_actions, advantages.tolist()))
        scores.append([score_of[tuple(action)] for action in point.actions])
    return scores


def critic_outputs(critic, items, ref_items, max_tokens):
    """(logps, ref_logps): the action_outputs of items under a loaded Critic, and of ref_items under its reference.

    An untrained critic is its own reference. What both read alike (without c) then has the same numbers, bit for bit,
    whatever batches it was in, so its advantages are exactly 0."""
    logps = action_outputs(critic.scorer, items, max_tokens)
    ref_logps = action_outputs(critic.ref_scorer, ref_items, max_tokens)
    if critic.ref_scorer is critic.scorer:
        for number, (item, ref_item) in enumerate(zip(items, ref_items)):
            if item == ref_item:
                ref_logps[number] = logps[number]
    return logps, ref_logps


def visual_item(rows):
    """The item of the (ids, image files) of vision.turn_rows: each row is one action."""
    return [Row(ids, [number] * len(ids), images=images) for number, (ids, images) in enumerate(rows)]


# ---------------------------------------------------------------------------------------------------------------------
# trajectories as items, their scores, and pairs of them

def trajectory_examples(trajectories, groups, reader, sees_c):
    """An Example, without pairs, for each tuple of trajectory numbers, an item a trajectory.

    reader: the tokenizer or, for a visual critic, vision.Sight.
    sees_c: whether c stands in front; None: where the logged agent saw it."""
    numbers = sorted({number for group in groups for number in group})
    if isinstance(reader, vision.Sight):
        turn_rows = vision.turn_rows(reader, [trajectories[number] for number in numbers], sees_c)
        items = {number: visual_item(rows) for number, rows in zip(numbers, turn_rows)}
    else:
        items, kinds = {}, collections.Counter()
        for number in numbers:
            trajectory = trajectories[number]
            with_c = trajectory.get("informed") if sees_c is None else sees_c
            turns = agent_turns(reader, trajectory, kinds)
            items[number] = rows_of_trajectory(reader, turns, trajectory["task"] if with_c else None)
        say_kinds("agent turns", kinds)
    examples = []
    for group in groups:
        examples.append(Example([items[number] for number in group], [], trajectories[group[0]]["task_id"]))
    return examples


def pair_accuracy(scorer, examples, ref_logps, critic, max_tokens):
    """The share of pairs of trajectories whose chosen one has the higher score; a tie is half right.
    ref_logps: the examples' example_outputs under the reference.
    A value head compares the values of the last turns."""
    right = 0.0
    example_logps = example_outputs(scorer, examples, max_tokens)
    for example, logps, item_ref_logps in zip(examples, example_logps, ref_logps):
        advantages = item_advantages(example.items, logps, item_ref_logps, critic.normalize)
        if critic.head == "value":
            chosen, rejected = (values[-1] for values in advantages)
        else:
            chosen, rejected = (values.sum() for values in advantages)
        if chosen > rejected:
            right += 1.0
        elif chosen == rejected:
            right += 0.5
    return right / len(examples)


def score_turns(critic, tokenizer, trajectories, max_tokens):
    """The advantage of each agent turn of trajectories by a loaded Critic that reads text with its `tokenizer`.

    For each trajectory a list of floats, one a turn, whose sum is the score of the trajectory; None for one with a row
    of more than `max_tokens` tokens, or than the critic takes.
    With an lm or regression head it is A(o_t, a_t, c) of eq. 3. Whether its reference reads c, critic.ref_sees_c says:
    in training it may have been otherwise (--reference-sees-c).
    A value head gives the value of a dialogue up to and with a turn (a logit, which is no advantage): here it is the
    change of value from turn to turn, from 0 before the first one."""
    groups = [(i,) for i in range(len(trajectories))]
    examples = ref_examples = trajectory_examples(trajectories, groups, tokenizer, critic.sees_c)
    if not critic.ref_sees_c:
        ref_examples = trajectory_examples(trajectories, groups, tokenizer, sees_c=False)
    most = min(max_tokens, models.most_positions(critic.scorer.model.config))
    fitting = [i for i, example in enumerate(examples) if longest_row(example) <= most]
    items = items_of(examples[i] for i in fitting)                   # one of each
    ref_items = items_of(ref_examples[i] for i in fitting)
    logps, ref_logps = critic_outputs(critic, items, ref_items, max_tokens)
    advantages = [None] * len(trajectories)
    for i, values in zip(fitting, item_advantages(items, logps, ref_logps, critic.normalize)):
        if critic.head == "value":
            values = torch.diff(values, prepend=torch.zeros(1))
        advantages[i] = values.tolist()
    return advantages


def trajectory_pairs(trajectories, path, needed=True):
    """[(chosen, rejected)] numbers of trajectories of one task.

    Where the domain has a MIN_RETURN_GAP, as its returns are graded: every two whose rewards differ by so much.
    Otherwise a pair for each failure (reward below 1), with one of the successes (reward 1) of its task in turn.
    needed: InputError, which names `path`, where there is no pair."""
    min_gap = domain_of(trajectories[0]["task"]).MIN_RETURN_GAP
    by_task = {}
    for number, trajectory in enumerate(trajectories):
        by_task.setdefault(trajectory["task_id"], []).append(number)
    pairs = []
    for group in by_task.values():
        rewards = {i: trajectories[i]["reward"] for i in group}
        if min_gap is not None:
            for chosen, rejected in itertools.permutations(group, 2):
                if reaches(rewards[chosen] - rewards[rejected], min_gap):
                    pairs.append((chosen, rejected))
            continue
        successes = [i for i in group if rewards[i] == 1]
        failures = [i for i in group if rewards[i] < 1]
        if successes:
            pairs += zip(itertools.cycle(successes), failures)
    if needed and not pairs:
        lack = "both a success (reward 1) and a failure"
        if min_gap is not None:
            lack = f"two dialogues whose rewards differ by {min_gap}"
        if len({trajectory["reward"] for trajectory in trajectories}) == 1:
            lack += f" (all rewards are {trajectories[0]['reward']:g})"
        raise InputError(f"{path}: no trajectory pairs: no task has {lack}; roll out more --samples a task")
    return pairs


def reaches(gap, min_gap):
    """Whether a gap between rewards is at least `min_gap`, but for rounding: .3 - .2 is less than .1 in floats."""
    return gap > 0 and (gap >= min_gap or math.isclose(gap, min_gap, rel_tol=1e-9))
