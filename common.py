"""What 03 and 04 are made of: dialogue tokens, trees, scores of turns, critics, pairs; and the reading of tasks and
trajectories, which every stage shares."""
import asyncio
import collections
import functools
import hashlib
import itertools
import math
import pathlib
import re
from collections import namedtuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from colbench import ColBenchError, domain_of, task_id
from lib import adapters, models
from lib.folders import check_critic, read_critic_json, render_chat
from lib.models import add_head, add_work, encode, generation_cue, load_model, load_tokenizer, tokenizer_name
from lib.runtime import (
    barrier,
    broadcast,
    gather,
    InputError,
    is_main,
    read_json,
    read_jsonl,
    say,
    write_json,
)
from lib.schema import label, list_of, nullable, one_of, record, short_text, token_ids, whole
from lib.vision import image_row, read_images

# Flags that a World may take, and their values where they are not set
WORLD_FLAGS = {"compat": False, "browser": None, "similarity": "clip", "clip_model": None}


def world(domain, args, images, rows_in, score=True, **more):
    """The World of a domain by the flags of add_world; without `score` it only shows documents.

    It is given what it TAKES. InputError for a flag that is set and that it does not take: it would do nothing."""
    options = {"images": images, "rows_in": rows_in, "unsafe_scorer": args.unsafe_scorer, "browser": args.browser,
               "similarity": args.similarity if score else None, "clip_model": args.clip_model, **more}
    for name, default in WORLD_FLAGS.items():
        if name not in domain.World.TAKES and options.get(name) not in (None, default):
            raise InputError(f"--{name.replace('_', '-')} does nothing for a {domain.NOUN}; leave it out")
    return domain.World(**{name: options[name] for name in domain.World.TAKES if name in options})


# ---------------------------------------------------------------------------------------------------------------------
# tasks and trajectories: the one place where files of others are checked

# The kinds of rows, with all fields of theirs that some stage uses (lib/schema.py); further ones are kept as they are.
TURN = record({"role": one_of("user", "assistant"), "content": str},
              {"input": str, "output": str, "output_ids": token_ids, "truncated": bool, "leak": str, "tool": bool,
               "resampled": int, "render_fault": str})
TRAJECTORY = record(
    {"task": dict, "dialogue_history": list_of(TURN), "answer": str},
    {"task_id": nullable(label), "sample": int, "reward": nullable(float), "max_rounds": whole(1),
     "num_rounds": int, "system_prompt": str, "agent": nullable(short_text), "simulator": nullable(short_text),
     "critic": nullable(short_text), "tokenizer": nullable(str), "informed": nullable(bool), "best_of": whole(1),
     "run": whole(0), "similarity": str, "image": nullable(short_text), "reference_image": nullable(short_text),
     "render_fault": nullable(str), "continuation": int,
     "branch": record({"sample": int, "turn": whole(0), "candidate": int})})
CANDIDATE = record({"text": str, "ids": token_ids, "ended": bool})
CANDIDATES = record({"task_id": label, "sample": int, "turn": whole(0), "prompt": str, "task": dict,
                     "history": list_of(TURN), "candidates": list_of(CANDIDATE)})
AGENT = record({"system_prompt": str})


def check_task(task, where, first):
    """InputError, which begins with `where`, for a task that its domain does not take, or of another domain than the
    `first` task of the file."""
    try:
        domain = domain_of(task, where)
        domain.check_task(task, where)
        if domain is not domain_of(first):
            raise ColBenchError(f"{where}: a task of another domain ({domain.NOUN}s) than in the lines before; keep "
                                "each domain in files of its own")
    except ColBenchError as error:
        raise InputError(str(error)) from None


def read_tasks(path):
    """The tasks of a file, all of one domain."""
    return read_jsonl(path, {}, check=check_task)


def check_trajectory(row, where, first):
    check_task(row["task"], f"{where}: task", first["task"])
    if not any(turn["role"] == "assistant" for turn in row["dialogue_history"]):
        raise InputError(f'{where}: dialogue_history has no turn of role "assistant"')


def read_trajectories(path, num_trajectories=None, seed=0):
    """Trajectories with "task_id" (a hash of the task) and "sample" (0, 1, 2 … in the order of the file) filled in
    where a published file has none, so that (task_id, sample) names one dialogue. With `num_trajectories` those of
    whole tasks, in an order that `seed` shuffles, until there are so many: subsets of one seed are nested."""
    trajectories, seen = read_jsonl(path, TRAJECTORY, check=check_trajectory), collections.Counter()
    for trajectory in trajectories:
        name = trajectory["task_id"] = trajectory.get("task_id") or task_id(trajectory["task"])
        trajectory.setdefault("sample", seen[name])
        seen[name] += 1
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


def fill_rewards(trajectories, domain, args):
    """Give trajectories that have no "reward" (published ones may not) what World.score says, once for all ranks."""
    missing = [t for t in trajectories if not isinstance(t.get("reward"), (int, float))]
    if not missing:
        return
    verdicts = None
    if is_main():
        with world(domain, args, f"{args.out}.images", pathlib.Path(args.out).parent) as scorer:
            for key, value in scorer.about.items():
                if other := {t[key] for t in trajectories if t.get(key, value) != value}:
                    raise InputError(f'{len(missing):,} dialogues have no "reward", and others have it by '
                                     f"{', '.join(sorted(map(str, other)))}: two scales; score all with 05 first")
            verdicts = asyncio.run(scorer.score([(t["task"], t["answer"]) for t in missing]))
    for trajectory, fresh in zip(missing, broadcast(verdicts)):
        trajectory |= fresh
    say(f"computed {len(missing):,} missing rewards")


# ---------------------------------------------------------------------------------------------------------------------
# dialogue: what the agent sees

LAST_ROUND = "\n(last round)"
HIDDEN_INFO = "The {noun} that this person needs is the following.\n{ground_truth}\nThe dialogue with the person:\n"


def agent_messages(history, max_rounds, own_prompt, system=None):
    """The chat an agent sees before its next turn: the domain's `own_prompt`, then the dialogue, with a note on the
    message of the human that opens the last round. `system` (a text, taken as it is) replaces our prompt and this note,
    which is a part of it. `c` is not an argument, so that it cannot reach a policy."""
    messages = [{"role": "system", "content": own_prompt.format(max_rounds=max_rounds) if system is None else system}]
    messages += [{"role": turn["role"], "content": turn["content"]} for turn in history]
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
    first = next(turn for turn in trajectory["dialogue_history"] if turn["role"] == "assistant")
    text = trajectory.get("system_prompt")
    if text is None and (match := LOGGED_SYSTEM.match(first.get("input") or "")):
        text = match[1] if match[2] is None else match[2]
    return None if text == our_system(trajectory) else text


def hidden_info(task):
    """The sentence that states c."""
    return HIDDEN_INFO.format(noun=domain_of(task).NOUN, ground_truth=task["ground_truth"])


def vocabulary_text(trajectory):
    """All words that a fresh tokenizer should know of a trajectory."""
    turns = [turn["content"] for turn in trajectory["dialogue_history"]]
    return "\n".join([*turns, turns[0] + LAST_ROUND, hidden_info(trajectory["task"])])


def note_system_prompt(folder, trajectories):
    """Keep the system prompt that an agent is trained with in its `folder`, as agent.json (check_system_prompt)."""
    counts = collections.Counter(system_prompt(t) or our_system(t) for t in trajectories)
    [(text, count)] = counts.most_common(1)
    if len(counts) > 1:
        say(f"{len(trajectories) - count:,} of {len(trajectories):,} trajectories have another system prompt than most")
    if is_main():
        write_json(pathlib.Path(folder) / "agent.json", {"system_prompt": text})


def check_system_prompt(agent, tokenizer, domain, system, max_rounds):
    """Say where an agent (a folder of 04) was trained with another system prompt than it has now, unless its template
    shows none."""
    note = pathlib.Path(agent) / "agent.json"
    if not note.is_file():
        return
    trained = read_json(note, AGENT)["system_prompt"]
    texts = trained, domain.AGENT_SYSTEM.format(max_rounds=max_rounds) if system is None else system
    shown = [prompt_text(tokenizer, [{"role": "user", "content": "?"}], max_rounds, "", text) for text in texts]
    if shown[0] != shown[1]:
        say(f"{agent}: was trained with another system prompt than it has here; {note} has its text "
            "(--system-prompt FILE, --max-rounds)")


# ---------------------------------------------------------------------------------------------------------------------
# dialogue tokens
#
# A row is token ids and, for each token, the index of the agent turn that it belongs to, or -1 for what is only read
# (prompts, the person, c). A trajectory is one row where the chat template only ever appends, else several. A tree is a
# row of several actions that continue the same prompt: each sees the prompt and itself, so that the prompt, `shared`
# tokens, is computed once for all of them. A row of a visual critic shows one turn in images (files, None: a black
# one), all of its tokens are that turn's, and a trajectory is a row for each turn.

Row = namedtuple("Row", "ids turns shared images", defaults=(None, ()))


def prompt_text(tokenizer, history, max_rounds, own_prompt, system=None):
    """The text that the agent continues: its chat (agent_messages) through the template, with the cue of its turn."""
    return render_chat(tokenizer, agent_messages(history, max_rounds, own_prompt, system), add_generation_prompt=True)


def with_hidden_info(tokenizer, text, privileged_info):
    """`text` (a rendered prompt) with the sentence that states c (hidden_info) in front, after the
    beginning-of-sequence token."""
    bos = tokenizer.bos_token if tokenizer.bos_token and text.startswith(tokenizer.bos_token) else ""
    return bos + privileged_info + text[len(bos):]


def agent_turns(tokenizer, trajectory, counts=None, only=None):
    """[(prompt text, action ids)] of a trajectory's agent turns, as near to what was sampled as the file allows:
    "as sampled" where this tokenizer sampled it, "as logged" where the logged prompt ends with this template's cue
    (published files: the ids are made from the raw output), else "rendered again" from the contents of the turns.
    `counts` (a dict) counts the turns of each kind. only: the index in the history of the one turn asked for."""
    history, turns = trajectory["dialogue_history"], []
    own_ids = trajectory.get("tokenizer") == tokenizer_name(tokenizer)
    for index, turn in enumerate(history):
        if turn["role"] != "assistant" or only not in (None, index):
            continue
        if own_ids:
            kind = "as sampled"
            check_sampled(turn, tokenizer, f"task {trajectory['task_id']}, sample {trajectory['sample']}, turn {index}")
            turns.append((turn["input"], turn["output_ids"]))
        elif "output" in turn and turn.get("input", "").endswith(generation_cue(tokenizer)):
            kind = "as logged"
            turns.append((turn["input"], encode(tokenizer, turn["output"].removesuffix(tokenizer.eos_token))
                          + [tokenizer.eos_token_id]))
        else:
            kind = "rendered again"
            text = prompt_text(tokenizer, history[:index], trajectory.get("max_rounds", 10),
                               domain_of(trajectory["task"]).AGENT_SYSTEM, system_prompt(trajectory))
            turns.append((text, encode(tokenizer, turn["content"]) + [tokenizer.eos_token_id]))
        if counts is not None:
            counts[kind] = counts.get(kind, 0) + 1
    return turns


def check_sampled(turn, tokenizer, where):
    """InputError unless an agent's turn that is said to be of this tokenizer has the prompt and ids of it."""
    for key in ("input", "output_ids"):
        if key not in turn:
            raise InputError(f'{where}: missing "{key}", which a turn that this tokenizer sampled has')
    if max(turn["output_ids"]) >= len(tokenizer):
        raise InputError(f'{where}: "output_ids" has {max(turn["output_ids"])}, and this tokenizer has only '
                         f"{len(tokenizer):,} ids")


def all_turns(tokenizer, trajectories, what="agent turns"):
    """agent_turns of many trajectories; says how many turns are of which kind."""
    counts = {}
    turns = [agent_turns(tokenizer, trajectory, counts) for trajectory in trajectories]
    say(f"{what}: " + ", ".join(f"{count:,} {kind}" for kind, count in counts.items()))
    return turns


def rows_of_trajectory(tokenizer, turns, privileged_info=None):
    """Rows of a trajectory from its agent_turns; with `privileged_info` (hidden_info) c stands in front.

    For turns "<u>hi<a>" -> "who?<e>", "<u>hi<a>who?<e><u>me<a>" -> "ok<e>" it is one row:
        ids    <u> hi <a> who ? <e> <u> me <a> ok <e>
        turns   -1 -1  -1   0 0   0  -1 -1  -1  1   1
    The text between two actions is tokenised apart, so the ids of an action are exactly the sampled ones."""
    rows, consumed = [], None
    for index, (prompt, action) in enumerate(turns):
        if privileged_info is not None:
            prompt = with_hidden_info(tokenizer, prompt, privileged_info)
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


Batch = namedtuple("Batch", "ids mask positions turns previous owners lengths sizes images")


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
    images     of all rows, in their order"""
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
                 [len(row.ids) for _, row in rows], [image for _, row in rows for image in row.images])


def hidden_states(model, batch):
    """The last hidden state of each token, (R, T, H)."""
    if batch.images:                              # the model gives their tokens positions in rows and columns
        pixels = read_images(model.processor, batch.images)
        add_work(model, batch.sizes, patches=len(pixels["pixel_values"]))
        return model.base_model(input_ids=batch.ids, mm_token_type_ids=(batch.ids == model.config.image_token_id).int(),
                                use_cache=False, **{name: x.to(batch.ids.device) for name, x in pixels.items()}
                                ).last_hidden_state
    add_work(model, batch.sizes)
    mask = None                                   # rows are padded on the right: with causal attention no token sees it
    if batch.mask.dim() == 4:                         # added to scores; as bool every layer would keep a copy like it
        mask = torch.zeros_like(batch.mask, dtype=model.get_input_embeddings().weight.dtype)
        mask.masked_fill_(~batch.mask, -torch.inf)
    return model.get_decoder()(input_ids=batch.ids, attention_mask=mask, position_ids=batch.positions,
                               use_cache=False).last_hidden_state


def action_tokens(batch):
    """(r, t), each (N,): the places of the action tokens of a batch."""
    return (batch.turns >= 0).nonzero(as_tuple=True)


def states_before_actions(model, batch):
    """The last hidden state of the token before each action token, (N, H)."""
    r, t = action_tokens(batch)
    return hidden_states(model, batch)[r, batch.previous[r, t]]


def turn_sums(batch, values):
    """The sums of `values` (N,) of action tokens over each action, (B, M) float32; 0 where an item has no such turn."""
    r, t = action_tokens(batch)
    return torch.zeros_like(batch.lengths).index_put((batch.owners[r], batch.turns[r, t]), values, accumulate=True)


def turn_logps(model, batch):
    """Log-probability of each action, summed over its tokens (end of turn included), as (B, M) float32; 0 where an item
    has no such turn. The vocabulary projection runs at action tokens alone."""
    return turn_sums(batch, models.token_logps(model.get_output_embeddings(), states_before_actions(model, batch),
                                        batch.ids[action_tokens(batch)]))


def turn_kls(model, batch, teacher, teacher_batch, direction):
    """The divergence of a model from a `teacher` (token_kls) at each action token, summed as turn_logps, (B, M). The
    teacher has no gradients and reads `teacher_batch`: the same actions, after other prompts."""
    with torch.no_grad():
        teacher_hidden = states_before_actions(teacher, teacher_batch)
    return turn_sums(batch, models.token_kls(model.get_output_embeddings(), states_before_actions(model, batch),
                                      teacher.get_output_embeddings(), teacher_hidden, direction))


def turn_means(model, batch):
    """The mean of the last hidden states over each action's tokens, (B, M, H) float32; 0 where a turn is missing."""
    hidden = hidden_states(model, batch)                                               # (R, T, H)
    r, t = action_tokens(batch)
    sums = torch.zeros(*batch.lengths.shape, hidden.shape[-1], device=hidden.device)
    sums = sums.index_put((batch.owners[r], batch.turns[r, t]), hidden[r, t].float(), accumulate=True)
    return sums / batch.lengths.clamp(min=1)[..., None]


def turn_scores(model, batch):
    """What a critic's model says of each action, (B, M): turn_logps, or its head on turn_means where it has one."""
    if hasattr(model, "turn_head"):
        weight, bias = model.turn_head.weight.float(), model.turn_head.bias.float()
        return F.linear(turn_means(model, batch), weight, bias).squeeze(-1) * (batch.lengths > 0)
    return turn_logps(model, batch)


def turn_scores_of(model, items, max_tokens, device):
    """turn_scores of many items without gradients, in batches of at most `max_tokens` padded tokens, longest first.
    Returns a list of float32 tensors (number of turns of the item,) in the items' order. A model that is sharded over
    the ranks takes them all: every rank must call this with the same items. No model, the reference of a critic with a
    head (load_critic), whose initial values are 0: zeros (1,)."""
    if model is None:
        return [torch.zeros(1)] * len(items)
    if isinstance(model, adapters.WithoutAdapter):
        with adapters.adapter_off(model.model):
            return turn_scores_of(model.model, items, max_tokens, device)
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
            score = getattr(model, "turn_scores", functools.partial(turn_scores, model))       # of a sharded model
            values = score(collate([items[i] for i in chunk], device)).cpu()
        for i, row in zip(chunk, values):
            found[i] = row[:1 + max(max(r.turns) for r in items[i])].clone()
    model.train(was_training)
    if sharded:
        model.reshard()                                             # the root stays gathered for a backward pass
    if world_size > 1:
        found = {i: row for part in gather(found) for i, row in part.items()}
    return [found[i] for i in range(len(items))]


# ---------------------------------------------------------------------------------------------------------------------
# critics: loading, and the score of an action, whatever the critic's kind

def turn_advantages(values, ref_values, lengths, normalize):
    """Eq. 3. values, ref_values (turn_scores under critic and reference), lengths: (B, M), 0 where a turn is missing.
    Returns (B, M) contributions whose sum over M is the score of a trajectory.
    normalize "turn": each turn's mean; "trajectory": one mean over all agent tokens; "none": no mean."""
    logratios = values - ref_values                                                 # (B, M)
    if normalize == "turn":
        return logratios / lengths.clamp(min=1)                                     # (B, M)
    if normalize == "trajectory":
        return logratios / lengths.sum(1, keepdim=True)                             # (B, M)
    return logratios


def shard(model, runtime, args):
    """models.shard, with model.turn_scores(batch) and turn_kls, which gather what they need. Call these, never the
    model."""
    models.shard(model, runtime, args)
    attach_turn_scores(model)


def attach_turn_scores(model):
    from torch.distributed.fsdp import register_fsdp_forward_method
    for function in (turn_scores, turn_kls):
        setattr(model, function.__name__, functools.partial(function, model))
        register_fsdp_forward_method(model, function.__name__)


def load_sharded(name, runtime, args, lora=None, head=False):
    """models.load_sharded, with model.turn_scores(batch) as shard gives it."""
    model = models.load_sharded(name, runtime, args, lora, head)
    attach_turn_scores(model)
    return model


UNTRAINED = "untrained"                                             # --critic: the base model, with no training


def untrained_critic(model_name, reference):
    """The model itself as a critic, as read_critic gives it: log p(a|o, c) - log p(a|o), a mean over the tokens of a.
    reference: "blind". With an informed one all of its scores would be 0: InputError."""
    if reference == "informed":
        raise InputError(f"--critic {UNTRAINED}: scores every action 0 with a reference that sees c; it needs "
                         "--reference blind")
    return {"folder": model_name, "head": "lm", "normalize": "turn", "privileged": True, "reference": model_name,
            "trained_with": None, "reference_sees": "blind"}


def read_critic(folder, tokenizer, domain, reference=None):
    """A critic folder's critic.json, {"privileged", "normalize", "head", …}, for a policy with `tokenizer` (None: not
    compared) on a domain's tasks. A "visual" one also needs "show" (show_documents). InputError where it does not fit.

    "reference_sees" is what the reference of eq. 3 reads when actions are scored: `reference`, or what the critic was
    trained with ("trained_with"; a folder without the key: "informed")."""
    path = pathlib.Path(folder) / "critic.json"
    if not path.exists():
        raise InputError(f"{folder}: no critic.json in it, so no finished critic of 03_train_critic.py")
    critic = {**read_critic_json(path), "folder": str(folder)}
    if adapters.is_adapter(folder):
        critic["reference"] = adapters.adapter_base(folder)
    critic["trained_with"] = critic.get("reference_sees", "informed")
    critic["reference_sees"] = reference or critic["trained_with"]
    if reference == "blind" and (critic["head"] != "lm" or not critic.get("privileged")):
        raise InputError(f"{folder}: --reference blind needs a language model that sees c as a critic; this one has "
                         + ("a head, whose initial values are 0" if critic["head"] != "lm" else "never seen c"))
    if critic.get("visual") and not domain.views:
        raise InputError(f"{folder}: a critic that sees cannot rank {domain.NOUN}s, which have nothing to see")
    own = not critic.get("visual") and tokenizer and load_tokenizer(str(folder))
    if own and tokenizer_name(own) != tokenizer_name(tokenizer):
        raise InputError(f"{folder}: its tokenizer is not the policy's; train the critic from the same model")
    if critic["head"] != "lm" and not adapters.is_adapter(folder):  # these need no reference
        return critic
    known, name = critic.get("reference_fingerprint"), critic["reference"]
    found = models.weights_fingerprint(name)
    if known is None:
        say(f"{folder}: critic.json has no fingerprint of its reference {name}; taken as it is")
    elif found not in (None, known):                                # None: it cannot be loaded either, which says more
        raise InputError(f"{folder}: its reference {name} has other weights than when the critic was trained from it "
                         f"(fingerprint {str(known)[:40]}, now {found}); put them back, or train the critic again")
    return critic


def reference_line(critic):
    """What a critic's scores are, in a line; None where there is no choice (a head, a critic without c)."""
    if critic["head"] != "lm" or not critic["privileged"]:
        return None
    model = "p" if critic["trained_with"] else "p_ref"
    prompt = "o, c" if critic["reference_sees"] == "informed" else "o"
    trained = f"trained with --reference {critic['trained_with']}" if critic["trained_with"] else "not trained"
    return f"{critic['folder']}: scores are log {model}(a|o, c) - log p_ref(a|{prompt}), means over tokens; {trained}"


def load_critic(critic, load):
    """read_critic's answer with its "model" and "reference" (None with a head: its initial values are 0; of an adapter
    folder the model with its adapter off), each loaded by load(name, lora=…, head=…), a whole one (load_whole) or one
    that is split over the ranks (load_sharded)."""
    check_critic(critic)
    has_head = critic["head"] != "lm"
    is_trained = critic["folder"] != critic["reference"]
    lora = adapters.folder_config(critic["folder"]) if is_trained else None
    model = load(critic["reference"] if lora else critic["folder"], lora=lora, head=has_head)
    if lora:
        adapters.load_adapter(model, critic["folder"])
    if has_head:
        models.load_head(model, critic["folder"])
    model.eval()
    if has_head:
        reference = None
    elif lora:
        reference = adapters.without_adapter(model)
    else:
        reference = load(critic["reference"]).eval() if is_trained else model
    return {**critic, "model": model, "reference": reference}


def load_whole(device, dtype="float32"):
    """A `load` for load_critic: whole models on this rank."""
    def load(name, lora=None, head=False):
        model, _ = load_model(name, device, dtype)
        if lora:
            adapters.add_adapter(model, lora, getattr(torch, dtype))     # as in a pass of a model that is split
        if head:
            add_head(model)
        return model
    return load


# A state and actions in it: the prompt's text, the task, the turns so far, the actions' ids and what they say (said)
DecisionPoint = namedtuple("DecisionPoint", "prompt task history actions texts")


def show_documents(documents, domain, args):
    """{document: its image file, None where it cannot be rendered}, rendered by rank 0 (World.show). For all ranks. A
    visual critic's "show" is this function with domain and arguments."""
    shown = None
    if is_main():
        with world(domain, args, f"{args.out}.images", None, score=False) as browser:
            shown = asyncio.run(browser.show(documents))
    shown = broadcast(shown)
    if lost := list(shown.values()).count(None):
        say(f"{lost:,} of {len(shown):,} {domain.NOUN}s cannot be rendered: shown as black images")
    return shown


def views_after(critic, point):
    """For each action of a point what a visual critic is shown of it (domain.views), as a tuple."""
    domain, views = domain_of(point.task), []
    for text in point.texts:
        turn = {"role": "assistant", "content": text}
        views.append(tuple(domain.views(point.task, [*point.history, turn], critic["privileged"])))
    return views


def documents_needed(critic, points):
    """All documents that a visual critic looks at to score the actions of points."""
    return list(dict.fromkeys(document for point in points for views in views_after(critic, point)
                              for _, document in views if document is not None))


def view_row(processor, views, number, shown):
    """The Row that shows a visual critic the agent's turn `number`: captions and images of `views`; `shown` has the
    files."""
    ids, images = image_row(processor, [(caption, document and shown[document]) for caption, document in views])
    return Row(ids, [number] * len(ids), None, images)


def score_actions(critic, tokenizer, points, max_tokens, device, no_tree=False):
    """The score A(o_t, a, c) of each action of DecisionPoints by a critic (load_critic) or a domain's oracle (its
    name), a list of floats for each point. Equal actions are scored once."""
    if isinstance(critic, str):
        return [domain_of(point.task).oracle_scores(critic, point.task, point.history, point.texts) for point in points]
    if critic.get("visual"):
        model, shown = critic["model"], critic["show"](documents_needed(critic, points))
        keys = [[(number, views) for views in views_after(critic, point)] for number, point in enumerate(points)]
        different = list(dict.fromkeys(key for own in keys for key in own))
        items = [[view_row(model.processor, views, 0, shown)] for _, views in different]
        values = dict(zip(different, turn_scores_of(model, items, max_tokens, device)))
        return [[values[key].item() for key in own] for own in keys]
    different = [sorted(set(map(tuple, point.actions))) for point in points]
    items = action_items(points, different, tokenizer, critic["privileged"], no_tree)
    ref_items = items
    if ref_sees_c(critic) != critic["privileged"]:
        ref_items = action_items(points, different, tokenizer, False, no_tree)
    own_values = turn_scores_of(critic["model"], items, max_tokens, device)
    ref_values = turn_scores_of(critic["reference"], ref_items, max_tokens, device)
    normalize = "none" if critic["normalize"] == "none" else "turn"                 # one turn is all of a trajectory
    scores = []
    for point, unique, value, ref_value in zip(points, different, own_values, ref_values):
        lengths = torch.tensor([[len(action) for action in unique]])
        score = dict(zip(unique, turn_advantages(value[None], ref_value[None], lengths, normalize)[0].tolist()))
        scores.append([score[tuple(action)] for action in point.actions])
    return scores


def ref_sees_c(critic):
    """Whether the reference of eq. 3 reads c: where the critic does, unless its reference is "blind"."""
    return critic["privileged"] and critic.get("reference_sees", "informed") == "informed"


def action_items(points, actions, tokenizer, privileged, no_tree):
    """Of each DecisionPoint the item (candidate_rows) of its `actions` after its prompt, which c may precede."""
    items = []
    for point, point_actions in zip(points, actions):
        prompt = point.prompt
        if privileged:
            prompt = with_hidden_info(tokenizer, prompt, hidden_info(point.task))
        items.append(candidate_rows(tokenizer, prompt, point_actions, no_tree))
    return items


MANY_TURNS = 64                 # of the agent: what has more is looked at before all of its prompts are rendered


def endless_row(tokenizer, trajectory, max_length):
    """The last agent turn of a dialogue of many turns as a Row, where its prompt alone has more than twice `max_length`
    tokens; else None. Such a dialogue is left out anyway, and the prompts of all of its turns would take a time and a
    memory that grow with the square of their number."""
    history = trajectory["dialogue_history"]
    agent = [i for i, turn in enumerate(history) if turn["role"] == "assistant"]
    if max_length is None or len(agent) <= MANY_TURNS:
        return None
    [(prompt, action)] = agent_turns(tokenizer, trajectory, only=agent[-1])
    read = encode(tokenizer, prompt)
    if len(read) <= 2 * max_length:
        return None
    return Row(read + list(action), [-1] * len(read) + [len(agent) - 1] * len(action))


def trajectory_examples(trajectories, groups, tokenizer, privileged=None, show=None, max_length=None):
    """An example, (item, …), for each tuple of trajectory numbers; an item is a list of rows. privileged: whether c
    stands in front (None: where the logged agent saw it). `show` (show_documents) makes the rows of a visual critic,
    whose processor is then in the place of the tokenizer. max_length: what is far longer (endless_row) is not made
    whole, as it is left out by its length."""
    used = sorted({i for group in groups for i in group})
    own = [trajectories[i] for i in used]
    if show:
        items = dict(zip(used, viewed_items(own, tokenizer, privileged, show)))
    else:
        infos = [hidden_info(t["task"]) if (t.get("informed") if privileged is None else privileged) else None
                 for t in own]
        endless = {i: row for i in used if (row := endless_row(tokenizer, trajectories[i], max_length))}
        infos = dict(zip(used, infos))
        rendered = [i for i in used if i not in endless]
        turns = dict(zip(rendered, all_turns(tokenizer, [trajectories[i] for i in rendered])))
        items = {i: [endless[i]] if i in endless else rows_of_trajectory(tokenizer, turns[i], infos[i]) for i in used}
    return [tuple(items[i] for i in group) for group in groups]


def reference_examples(critic, examples, trajectories, groups, tokenizer, max_length=None):
    """What the reference of eq. 3 reads in place of a critic's `examples` (trajectory_examples of these groups): the
    same, or without c where it is blind."""
    if ref_sees_c(critic) == critic["privileged"]:
        return examples
    return trajectory_examples(trajectories, groups, tokenizer, privileged=False, max_length=max_length)


def pair_examples(pairs, tokenizer, together, no_tree):
    """(examples, pair indices) of pairs of actions: an example, a tree of a prompt and actions (candidate_rows), is a
    pair, or with `together` all pairs of a turn; its pairs are [(chosen, rejected), …] as numbers of its actions."""
    groups = {}                                                      # {…: (prompt, [(chosen, rejected), …])}
    for number, pair in enumerate(pairs):
        key = tuple(pair[name] for name in ("task_id", "sample", "turn", "prompt")) if together else number
        own = tuple(tuple(pair[side]["ids"]) for side in ("chosen", "rejected"))
        groups.setdefault(key, (pair["prompt"], []))[1].append(own)
    examples, indices = [], []
    for prompt, group in groups.values():
        actions = list(dict.fromkeys(action for pair in group for action in pair))
        examples.append((candidate_rows(tokenizer, prompt, actions, no_tree),))
        indices.append([tuple(map(actions.index, pair)) for pair in group])
    return examples, indices


def viewed_items(trajectories, processor, privileged, show):
    """An item for each trajectory, of a row for each agent turn, which shows it to a visual critic."""
    views = [[domain_of(t["task"]).views(t["task"], t["dialogue_history"][:i + 1], privileged)
              for i, turn in enumerate(t["dialogue_history"]) if turn["role"] == "assistant"] for t in trajectories]
    shown = show(list(dict.fromkeys(document for own in views for turn in own for _, document in turn if document)))
    return [[view_row(processor, turn, number, shown) for number, turn in enumerate(own)] for own in views]


def example_scores(model, examples, max_tokens, device):
    """turn_scores_of every example's items, [(tensor (turns,), …)]."""
    values = iter(turn_scores_of(model, [item for example in examples for item in example], max_tokens, device))
    return [tuple(next(values) for _ in example) for example in examples]


def pair_accuracy(model, examples, ref, critic, max_tokens, device):
    """The share of pairs whose chosen trajectory has the higher score; a tie is half right. ref: example_scores under
    the reference; critic: {"normalize", "head"}; a value head compares last-turn values."""
    right = 0.0
    for own in advantages_of(model, examples, ref, critic["normalize"], max_tokens, device):
        chosen, rejected = (values[-1] if critic["head"] == "value" else values.sum() for values in own)
        right += 1.0 if chosen > rejected else 0.5 if chosen == rejected else 0.0
    return right / len(examples)


def advantages_of(model, examples, ref, normalize, max_tokens, device):
    """turn_advantages of every example's items, [(tensor (turns,), …)]; ref: their example_scores under the
    reference."""
    return [tuple(turn_advantages(value[None], ref_value[None], collate([item]).lengths, normalize)[0]
                  for item, value, ref_value in zip(example, *both))
            for example, *both in zip(examples, example_scores(model, examples, max_tokens, device), ref)]


def score_turns(critic, tokenizer, trajectories, max_tokens, device):
    """The credit of each agent turn of trajectories by a critic that reads text (load_critic) with its `tokenizer`: for
    each trajectory a list of floats, one a turn, whose sum is the score of the trajectory; None for one with a row of
    more than `max_tokens` tokens.

    With an lm or regression head it is A(o_t, a_t, c) of eq. 3, for which the critic was trained. A value head gives
    the value of a dialogue up to and with a turn (a logit, which is no advantage): the credit is then its change from
    turn to turn, from 0 before the first one. An untrained critic whose reference sees c gives 0 for every turn."""
    if critic.get("visual"):
        raise InputError(f"{critic['folder']}: a critic that sees images; turns are scored by one that reads text")
    groups = [(i,) for i in range(len(trajectories))]
    examples = trajectory_examples(trajectories, groups, tokenizer, critic["privileged"], max_length=max_tokens)
    kept = [i for i, [item] in enumerate(examples) if max(len(row.ids) for row in item) <= max_tokens]
    ref_examples = reference_examples(critic, examples, trajectories, groups, tokenizer, max_tokens)
    examples, ref_examples = [examples[i] for i in kept], [ref_examples[i] for i in kept]
    ref = example_scores(critic["reference"], ref_examples, max_tokens, device)
    found = [own for [own] in advantages_of(critic["model"], examples, ref, critic["normalize"], max_tokens, device)]
    if critic["head"] == "value":
        found = [torch.diff(values, prepend=torch.zeros(1)) for values in found]
    credits = dict(zip(kept, found))
    return [credits[i].tolist() if i in credits else None for i, _ in enumerate(trajectories)]


# ---------------------------------------------------------------------------------------------------------------------
# SWEET's candidates: the prompts that they continue, and the checks of files and lengths

def checked_prompts(states, tokenizer, path):
    """The prompt of each state: the one that its trajectory logged, where the file allows (agent_turns); says where
    they come from. InputError, which names `path`, where (task_id, sample, turn) names two prompts: what is kept under
    this name (candidates, pairs, random numbers) would belong to either."""
    found, trajectories = {}, {id(trajectory): trajectory for trajectory, _, _ in states}
    turns = dict(zip(trajectories, all_turns(tokenizer, trajectories.values(), "their prompts")))
    prompts = [turns[id(trajectory)][number][0] for trajectory, number, _ in states]
    for (trajectory, number, _), prompt in zip(states, prompts):
        if found.setdefault((trajectory["task_id"], trajectory["sample"], number), prompt) != prompt:
            raise InputError(f"{path}: two dialogues of task {trajectory['task_id']} have \"sample\" "
                             f"{trajectory['sample']}; give each a number of its own, or leave out the key "
                             '"sample" everywhere')
    return prompts


def check_candidates(row, where, first):
    check_task(row["task"], f"{where}: task", first["task"])


def read_candidates(path, states, prompts, tokenizer, num_candidates):
    """The rows of another run's candidates.jsonl; InputError where they are not those of the states asked for, or not
    of this tokenizer."""
    rows = read_jsonl(path, CANDIDATES, check=check_candidates)
    wanted = [(t["task_id"], t["sample"], number, num_candidates) for t, number, _ in states]
    if wanted != [(row["task_id"], row["sample"], row["turn"], len(row["candidates"])) for row in rows]:
        raise InputError(f"{path}: made from other turns or with another --num-candidates; the trajectories, "
                         "--num-trajectories, --data-frac and --seed must be the same")
    for row, prompt in zip(rows, prompts):
        if row["prompt"] != prompt:
            raise InputError(f"{path}: task {row['task_id']}, sample {row['sample']}, turn {row['turn']}: its "
                             "candidates continue another prompt than the trajectories log; sample them anew "
                             "(no --candidates)")
        for candidate in row["candidates"]:
            if max(candidate["ids"]) >= len(tokenizer):
                raise InputError(f'{path}: task {row["task_id"]}: a candidate has the id {max(candidate["ids"])}, and '
                                 f"this tokenizer has only {len(tokenizer):,} ids")
    return rows


def drop_long_pairs(pairs, tokenizer, max_length):
    """(pairs whose actions each fit into `max_length` tokens with the prompt, how many do not), which it says. A tree
    of several pairs may be longer: an action sees the prompt and itself."""
    prompts = {pair["prompt"] for pair in pairs}
    room = {prompt: max_length - len(encode(tokenizer, prompt)) for prompt in prompts}
    kept = [pair for pair in pairs
            if max(len(pair[side]["ids"]) for side in ("chosen", "rejected")) <= room[pair["prompt"]]]
    if len(kept) < len(pairs):
        say(f"dropped {len(pairs) - len(kept):,} of {len(pairs):,} pairs: prompt and action are longer than "
            f"--max-length {max_length}")
    return kept, len(pairs) - len(kept)


# ---------------------------------------------------------------------------------------------------------------------
# pairs and examples

def trajectory_pairs(trajectories, path, min_gap=None):
    """[(chosen, rejected)] indices of trajectories of one task. With `min_gap` (None: the domain's MIN_GAP): every two
    whose rewards differ by so much. Where that is None, too: every failure (reward below 1) is paired with a success
    (reward 1) of its task, these in turn. InputError, which names `path`, where there is no pair."""
    min_gap = domain_of(trajectories[0]["task"]).MIN_GAP if min_gap is None else min_gap
    by_task = {}
    for index, trajectory in enumerate(trajectories):
        by_task.setdefault(trajectory["task_id"], []).append(index)
    pairs = []
    for group in by_task.values():
        rewards = {i: trajectories[i]["reward"] for i in group}
        if min_gap is not None:
            pairs += [(i, j) for i in group for j in group if reaches(rewards[i] - rewards[j], min_gap)]
            continue
        successes = [i for i in group if rewards[i] == 1]
        failures = [i for i in group if rewards[i] < 1]
        if successes:
            pairs += zip(itertools.cycle(successes), failures)
    if not pairs:
        lack = ("both a success (reward 1) and a failure" if min_gap is None else
                f"two dialogues whose rewards differ by {min_gap}")
        raise InputError(f"{path}: no trajectory pairs: no task has {lack}; roll out more --samples a task")
    return pairs


def reaches(gap, min_gap):
    """Whether a gap between rewards is at least `min_gap`, but for rounding: .3 - .2 is less than .1 in floats."""
    return gap > 0 and (gap >= min_gap or math.isclose(gap, min_gap, rel_tol=1e-9))


def reference_logps(folder, model, examples, args, runtime):
    """example_scores under the initial model, kept in `folder`/ref.pt."""
    path = pathlib.Path(folder) / "ref.pt"
    if not path.exists():
        say(f"reference log-probabilities of {len(examples):,} examples")
        scores = example_scores(adapters.without_adapter(model), examples, args.max_tokens, runtime.device)
        if is_main():
            path.with_suffix(".partial").unlink(missing_ok=True)     # torch.save would follow a link
            torch.save(scores, path.with_suffix(".partial"))
            path.with_suffix(".partial").rename(path)
    barrier()
    return torch.load(path, weights_only=True)
