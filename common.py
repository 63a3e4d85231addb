"""From a dialogue to an advantage: its tokens, states and actions, pairs of trajectories, eq. 3, and critics."""
import lib  # noqa: F401  # isort: skip (first: it says how to set up where torch is missing)
import collections
import dataclasses
import hashlib
import itertools
import math
import pathlib
from collections import namedtuple

import torch

from colbench import domain_of
from colbench.schema import label, one_of, record
from lib import vision
from lib.load import (
    base_of,
    check_base,
    check_weights,
    folder_config,
    is_adapter,
    load_adapter,
    load_head,
    load_tokenizer,
    most_positions,
    without_adapter,
)
from lib.runtime import InputError, read_json, say
from lib.scorer import action_outputs, example_outputs, items_of, Row
from lib.tokens import agent_turns, encode, generation_cue, LAST_ROUND, plain, prompt_text, say_kinds, tokenizer_name
from lib.training import longest_row

# ---------------------------------------------------------------------------------------------------------------------
# tokens of a dialogue, and where c stands

HIDDEN_INFO = "The {noun} that this person needs is the following.\n{ground_truth}\nThe dialogue with the person:\n"


def hidden_info(task):
    """The text that states c; empty for a task without one."""
    if not task["ground_truth"]:
        return ""
    return HIDDEN_INFO.format(noun=domain_of(task).NOUN, ground_truth=task["ground_truth"])


def vocabulary_text(trajectory):
    """All the text of a trajectory that a fresh tokenizer should know."""
    turns = [turn["content"] for turn in trajectory["dialogue_history"]]
    return "\n".join([*turns, turns[0] + LAST_ROUND, hidden_info(trajectory["task"])])


def critic_prompt(tokenizer, prompt, task):
    """A prompt (text) as a critic reads it: [BOS] + hidden_info(task) + prompt. c is in no message of the chat. The
    beginning-of-sequence token stays in front of c, unless the template opens messages with it, as SmolLM2's does."""
    bos = tokenizer.bos_token or ""
    if not prompt.startswith(bos) or generation_cue(tokenizer).startswith(bos):
        bos = ""
    return bos + plain(tokenizer, hidden_info(task)) + prompt[len(bos):]


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


def as_one_action(item):
    """A trajectory's item with all agent tokens as action 0: multi-turn DPO compares whole dialogues."""
    rows = []
    for row in item:
        numbers = [min(number, 0) for number in row.turn_ids]
        rows.append(row._replace(turn_ids=numbers))
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# a state and actions in it

# A state and actions in it: the prompt's text, the task, the turns so far, the actions' ids and their visible texts
DecisionPoint = namedtuple("DecisionPoint", "prompt task history actions texts")


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


# ---------------------------------------------------------------------------------------------------------------------
# trajectories: what training examples are made of, and pairs of them

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


def visual_item(rows):
    """The item of the (ids, image files) of vision.turn_rows: each row is one action."""
    return [Row(ids, [number] * len(ids), images=images) for number, (ids, images) in enumerate(rows)]


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


# ---------------------------------------------------------------------------------------------------------------------
# eq. 3

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


# ---------------------------------------------------------------------------------------------------------------------
# a critic: the advantages of actions in a state, and of the turns of trajectories

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
    most = min(max_tokens, most_positions(critic.scorer.model.config))
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


# ---------------------------------------------------------------------------------------------------------------------
# critics of --critic: reading and loading

CRITIC = record({"head": one_of("lm", "regression", "value"), "normalize": one_of("turn", "trajectory", "none"),
                 "privileged": bool, "reference": label},
                {"visual": bool, "reference_sees_c": bool, "prompt_form": str})
UNTRAINED = "untrained"                                             # --critic: the base model, with no training
# In front of a chat template: in place of a date it then writes the date's format
UNDATED = "{% macro strftime_now(format) %}{{ format }}{% endmacro %}"


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
    if is_adapter(folder):
        critic.reference = base_of(folder)
    if not ref_sees_c and (critic.head != "lm" or not critic.sees_c):
        say(f"{folder}: --reference-sees-c no does nothing for a critic with a head, or one that does not see c")
        critic.ref_sees_c = True
    if critic.is_visual and not domain.views:
        raise InputError(f"{folder}: a visual critic cannot rank {domain.NOUN}s, which have nothing to see")
    if tokenizer and not critic.is_visual:
        if tokenizer_name(load_tokenizer(str(folder))) != tokenizer_name(tokenizer):
            raise InputError(f"{folder}: its tokenizer is not the policy's; train the critic from the same model")
    trained_form = note.get("prompt_form")                           # older critics have none
    if trained_form and trained_form != prompt_form(critic, load_tokenizer(str(folder)), domain):
        raise InputError(f"{folder}: was trained with another critic's prompt than this code makes (HIDDEN_INFO, "
                         "critic_prompt, the chat template); train it again, or score with the code that trained it")
    if is_adapter(folder):
        check_base(folder)
    elif critic.head == "lm":
        check_weights(folder, critic.reference, note.get("reference_fingerprint"))
    return critic


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
    lora = folder_config(critic.folder) if is_trained else None
    scorer = load(critic.reference if lora else critic.folder, lora=lora, has_head=has_head)
    if lora:
        load_adapter(scorer.model, critic.folder)
    if has_head:
        load_head(scorer.head, critic.folder)
    critic.scorer = scorer.eval()
    critic.ref_scorer = without_adapter(scorer) if lora else scorer
    if has_head:
        critic.ref_scorer = None
    elif is_trained and not lora:
        critic.ref_scorer = load(critic.reference).eval()
    for split_scorer in (critic.scorer, critic.ref_scorer):
        if hasattr(split_scorer, "set_reshard_after_forward"):       # no backward pass needs its layers again
            split_scorer.set_reshard_after_forward(True)
    return critic
