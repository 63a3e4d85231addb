"""From a dialogue to an advantage: its tokens, states and actions, pairs of trajectories, eq. 3, and critics.

c is the solution of the task: a critic may see it, the agent may not."""
import lib  # noqa: F401  # isort: skip (first: it says how to set up where torch is missing)
import collections
import contextlib
import dataclasses
import hashlib
import itertools
import math
import pathlib
from collections import namedtuple
from typing import NamedTuple

import torch

from colbench import domain_of
from colbench.schema import label, one_of, record
from lib import vision
from lib.flags import UNTRAINED
from lib.load import adapter_off, base_of, check_base, check_weights, is_adapter, load_tokenizer, most_positions
from lib.logps import (
    action_lengths,
    action_outputs,
    ActionModel,
    for_scoring,
    HeadModel,
    load_trained,
    longest_sequence,
    num_actions,
    padded_outputs,
    Sequence,
)
from lib.runtime import InputError, read_json, say
from lib.tokens import agent_turns, encode, generation_cue, plain, prompt_text, say_kinds, tokenizer_name

# ---------------------------------------------------------------------------------------------------------------------
# tokens of a dialogue, and where c is inserted

def solution_text(task):
    """Text that states c (Domain.SOLUTION_TEXT, or the task's own); empty if the task has none."""
    if not task["ground_truth"]:
        return ""
    domain = domain_of(task)
    text = task.get("solution_text", domain.SOLUTION_TEXT)
    return text.replace("{noun}", domain.NOUN).replace("{c}", task["ground_truth"])


def critic_prompt(tokenizer, prompt, task):
    """A prompt (text) as a critic reads it: [BOS] + solution_text(task) + prompt. c is not part of any chat message.
    BOS stays in front, unless the template starts every message with it, as SmolLM2's does."""
    bos = tokenizer.bos_token or ""
    if not prompt.startswith(bos) or generation_cue(tokenizer).startswith(bos):
        bos = ""
    return bos + plain(tokenizer, solution_text(task)) + prompt[len(bos):]


def trajectory_sequences(tokenizer, turns, task=None):
    """The item of a trajectory, a list of Sequences, from its agent_turns. Each turn of the agent is an action.
    task: if given, c is put in front of each sequence (critic_prompt), which is usually one.

    Turns "<u>hi<a>" -> "who?<e>", "<u>hi<a>who?<e><u>me<a>" -> "ok<e>" give one sequence:
        ids             <u> hi <a> who ? <e> <u> me <a> ok <e>
        action_ids      -1  -1 -1   0  0  0  -1 -1 -1   1   1
    The ids before an action are its whole prompt, as the agent read it. If a prompt does not start with the ids so far
    (the template drops thoughts, or an action's text is tokenized differently), it starts a new sequence."""
    sequences = []
    for number, (prompt, action) in enumerate(turns):
        if task is not None:
            prompt = critic_prompt(tokenizer, prompt, task)
        read = encode(tokenizer, prompt)
        if not sequences or read[:len(sequences[-1].ids)] != sequences[-1].ids:
            sequences.append(Sequence([], []))
        ids, action_ids, _ = sequences[-1]
        num_new = len(read) - len(ids)
        ids.extend(read[len(ids):] + action)
        action_ids.extend([-1] * num_new + [number] * len(action))
    return sequences


# ---------------------------------------------------------------------------------------------------------------------
# a state and actions in it

class State(NamedTuple):
    """A dialogue up to an agent's turn, with candidates for this turn."""

    prompt: str                                                      # the text that the agent reads, without c
    task: dict
    history: list                                                    # the turns so far
    actions: list                                                    # each candidate's token ids
    texts: list                                                      # of each, what the other side would see


def actions_item(tokenizer, prompt, actions):
    """The item of several actions (id lists) after one prompt (text): one Sequence, a tree.

    Prompt "<u>hi<a>" and actions "who?<e>", "ok<e>" give
        ids             <u> hi <a> who ? <e> ok <e>
        action_ids      -1  -1 -1   0  0  0  1   1       prompt_length = 3"""
    ids = list(encode(tokenizer, prompt))
    num_read = len(ids)
    action_ids = [-1] * num_read
    for number, action in enumerate(actions):
        ids += action
        action_ids += [number] * len(action)
    return [Sequence(ids, action_ids, prompt_length=num_read)]


# ---------------------------------------------------------------------------------------------------------------------
# trajectories, training examples, and pairs

# A training example.
# items         lists of Sequences: a trajectory (one if the chat template only appends, else several), or the actions
#               of one state (one, a tree)
# action_pairs  ((item, action), (item, action)) of chosen and rejected actions
# task_id       the task of its first item, by which 03 holds out whole tasks
#
#                  items                        actions of an item           action_pairs
#     sweet        1: a state                   its paired candidates        of actions of this item
#     mtdpo        2: trajectories              1, the whole dialogue        1: the action of item 0, that of item 1
#     rft, sft     1: a trajectory              the agent's turns            none: all actions are imitated
#     critic       2: chosen, rejected          the agent's turns            none: the items are compared as wholes
#     value head   1: a trajectory              the agent's turns            none
Example = namedtuple("Example", "items action_pairs task_id")


def trajectory_items(tokenizer, trajectories, sees_c):
    """An item for each trajectory. sees_c: whether c is in front; None: only if the logged agent saw it."""
    items, kinds = [], collections.Counter()
    for trajectory in trajectories:
        with_c = trajectory.get("informed") if sees_c is None else sees_c
        turns = agent_turns(tokenizer, trajectory, kinds)
        items.append(trajectory_sequences(tokenizer, turns, trajectory["task"] if with_c else None))
    say_kinds("agent turns", kinds)
    return items


def trajectory_examples(trajectories, groups, make_items, sees_c):
    """An Example, without action_pairs, for each tuple of trajectory numbers; one item per trajectory.
    make_items(trajectories, sees_c) makes the items (trajectory_items)."""
    numbers = sorted({number for group in groups for number in group})
    items = dict(zip(numbers, make_items([trajectories[number] for number in numbers], sees_c)))
    examples = []
    for group in groups:
        examples.append(Example([items[number] for number in group], [], trajectories[group[0]]["task_id"]))
    return examples


def trajectory_pairs(trajectories, path, needed=True, min_gap=None):
    """[(chosen, rejected)] numbers of trajectories of one task.

    If returns are graded (min_gap, or the domain's MIN_RETURN_GAP): every two whose rewards differ by at least that.
    Otherwise each failure (reward below 1) gets a success (reward 1) of its task, round-robin.
    needed: raises InputError, which names `path`, if there is no pair."""
    if min_gap is None:
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
        else:
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
        advice = "roll out more --samples per task"
        if len(by_task) == len(trajectories):
            advice = ("each task has one dialogue: train on single dialogues (03 --score value), or give those that "
                      'belong together one "task_id"')
        raise InputError(f"{path}: no trajectory pairs: no task has {lack}; {advice}")
    return pairs


def reaches(gap, min_gap):
    """True if a gap between rewards is at least `min_gap`, up to rounding: .3 - .2 is less than .1 in floats."""
    return gap > 0 and (gap >= min_gap or math.isclose(gap, min_gap, rel_tol=1e-9))


# ---------------------------------------------------------------------------------------------------------------------
# eq. 3

def action_advantages(logps, ref_logps, lengths, normalize):
    """Eq. 3: the advantages of actions, (B, M).

    logps, ref_logps   (B, M) log-probabilities of actions under the critic and its reference model
    lengths            (B, M) how many tokens they have; 0 where an action is missing
    normalize          "turn": a mean over the action's tokens; "trajectory": over all agent tokens; "none": a sum

    The actions are candidates in one state, or a trajectory's turns, whose advantages add up to its score."""
    logratios = logps - ref_logps                                                   # (B, M)
    if normalize == "turn":
        return logratios / lengths.clamp(min=1)                                     # (B, M)
    if normalize == "trajectory":
        return logratios / lengths.sum(1, keepdim=True)                             # (B, M)
    return logratios


# ---------------------------------------------------------------------------------------------------------------------
# critics: the advantages of actions in states, and of the turns of trajectories

class TextCritic:
    """Base class of text critics. vision.VisualCritic has the methods that 02 and 04 call.

    folder             made by 03; for an untrained critic the model's name
    tokenizer          must be the policy's
    critic_sees_c      whether the critic reads c
    reference_sees_c   False: its reference model reads the dialogue without c; True: what the critic reads
    normalize          see eq. 3"""

    def prompt(self, prompt, task, sees_c):
        """An agent's prompt (text) as the critic reads it: with c in front, or unchanged."""
        return critic_prompt(self.tokenizer, prompt, task) if sees_c else prompt

    def trajectory_items(self, trajectories, sees_c):
        """An item for each trajectory; its actions are the agent's turns."""
        return trajectory_items(self.tokenizer, trajectories, sees_c)

    def state_items(self, states, sees_c):
        """An item for each State, with or without c in front; its actions are the state's."""
        prompts = [self.prompt(state.prompt, state.task, sees_c) for state in states]
        return [actions_item(self.tokenizer, prompt, state.actions) for prompt, state in zip(prompts, states)]

    def score_actions(self, states):
        """The advantage of each action of States, a list of floats for each state. Equal actions are scored once.
        A candidate's sum is divided by its own length, also if the critic was trained with --normalize trajectory."""
        distinct = [state._replace(actions=sorted(set(map(tuple, state.actions)))) for state in states]
        items = self.state_items(distinct, self.critic_sees_c)
        ref_items = items if self.reference_sees_c else self.state_items(distinct, sees_c=False)
        normalize = "turn" if self.normalize == "trajectory" else self.normalize
        advantages = self.advantages(items, ref_items, normalize)                          # (states, M)
        if not advantages.isfinite().all():
            raise InputError(f"{self.folder}: its scores are not finite; train this critic again")
        scores = []
        for state, distinct_state, of_actions in zip(states, distinct, advantages.tolist()):
            advantage_of = dict(zip(distinct_state.actions, of_actions))
            scores.append([advantage_of[tuple(action)] for action in state.actions])
        return scores

    def score_turns(self, trajectories):
        """The advantage of each agent turn: a list of floats for each trajectory; their sum is its score. None for a
        trajectory with more tokens than --max-tokens or than the critic accepts."""
        items = self.trajectory_items(trajectories, self.critic_sees_c)
        ref_items = items if self.reference_sees_c else self.trajectory_items(trajectories, sees_c=False)
        most = min(self.max_tokens, most_positions(self.model.model.config))
        fitting = [number for number, item in enumerate(items) if longest_sequence([item]) <= most]
        scores = [None] * len(trajectories)
        if fitting:
            advantages = self.advantages([items[i] for i in fitting], [ref_items[i] for i in fitting], self.normalize)
            if self.score == "value":                                # the change of the value, which is 0 at first
                advantages = torch.diff(advantages, prepend=torch.zeros(len(fitting), 1))  # (B, M)
            for i, of_turns in zip(fitting, advantages.tolist()):
                scores[i] = of_turns[:num_actions(items[i])]
        return scores

    async def seeing(self, states, environment):
        """Prepare for score_actions(states). Text critics need no images."""
        return self

    def check_tokenizer(self, tokenizer, agent):
        """Raises InputError if an agent's tokenizer (None: unknown) is not the critic's."""
        if not tokenizer:
            raise InputError(f"--best-of with {self.folder}, a critic that reads tokens: {agent} needs "
                             "--agent-tokenizer MODEL")
        if tokenizer_name(self.tokenizer) != tokenizer_name(tokenizer):
            raise InputError(f"{self.folder}: its tokenizer is not the policy's; train the critic from the same model")

    def empty_prompts(self, task, history):
        """The critic's prompts of a placeholder dialogue, for prompt_form."""
        undated = {"chat_template": UNDATED + self.tokenizer.get_chat_template()}
        dummy = {"task": task, "max_rounds": 2, "dialogue_history": history, "chat_template_args": undated}
        prompts = []
        for trajectory in (dummy, {**dummy, "system_prompt": "?"}):
            prompts.append(self.prompt(prompt_text(self.tokenizer, trajectory, history[:-1]), task, self.critic_sees_c))
        return prompts


@dataclasses.dataclass(eq=False)
class LogRatioCritic(TextCritic):
    """A critic that scores by eq. 3: how much likelier it makes an action than its reference model does.

    reference   name of the reference model; an untrained critic is its own reference, which does not see c"""

    folder: str
    reference: str
    tokenizer: object
    critic_sees_c: bool = True
    reference_sees_c: bool = True
    normalize: str = "turn"
    score = "logratio"
    model_class = ActionModel

    @property
    def is_untrained(self):
        return self.folder == self.reference

    def load(self, open_model, max_tokens):
        """Load the models. The reference model is the one that 03 started from: for an adapter its base, for an
        untrained critic itself.

        open_model(name, lora=…, kind=…) returns an ActionModel: training.Job.load, split over the ranks, or
        load_whole(device). max_tokens: of a batch."""
        self.max_tokens = max_tokens
        if self.is_untrained:
            self.model = self.ref_model = for_scoring(open_model(self.folder))
            return
        self.model = self.ref_model = load_trained(self.folder, open_model, self.model_class)
        if not is_adapter(self.folder):                              # advantages() switches an adapter off instead
            self.ref_model = for_scoring(open_model(self.reference))

    def advantages(self, items, ref_items, normalize):
        """Eq. 3 of the actions of items, (B, M)."""
        logps = action_outputs(self.model, items, self.max_tokens)                         # (actions,) of each item
        ref_is_base = self.ref_model is self.model and not self.is_untrained       # an adapter: the model with it off
        with adapter_off(self.model.model) if ref_is_base else contextlib.nullcontext():
            ref_logps = action_outputs(self.ref_model, ref_items, self.max_tokens)
        logps = padded_outputs([logps])                                                    # (B, M)
        ref_logps = padded_outputs([ref_logps])                                            # (B, M)
        if self.is_untrained:
            # Without c both sides read the same tokens: the advantages are exactly 0, whatever the batches.
            is_same = torch.tensor([item == ref_item for item, ref_item in zip(items, ref_items)])
            ref_logps[is_same] = logps[is_same]
        return action_advantages(logps, ref_logps, action_lengths(items), normalize)

    def describe(self):
        """One line that says what its scores are."""
        model = "p_ref" if self.is_untrained else "p"
        prompt = "o, c" if self.critic_sees_c else "o"
        ref_prompt = "o, c" if self.critic_sees_c and self.reference_sees_c else "o"
        mean = {"turn": "a mean over the tokens of a", "none": "a sum over the tokens of a",
                "trajectory": "a mean over the tokens of a (in training over all agent tokens)"}[self.normalize]
        logratio = f"log {model}(a|{prompt}) - log p_ref(a|{ref_prompt})"
        return f"{self.folder}: scores are {logratio}, {mean}"


@dataclasses.dataclass(eq=False)
class HeadCritic(TextCritic):
    """A critic with a head on the mean of an action's last hidden states.

    score "regression": the head outputs advantages. "value": it outputs the value after a turn (a logit); the advantage
    of a turn is its change of the value, which is 0 before the first turn."""

    folder: str
    score: str
    tokenizer: object
    critic_sees_c: bool = True
    reference_sees_c = True                                          # it has no reference model
    normalize = "none"
    model_class = HeadModel

    def load(self, open_model, max_tokens):
        """As in LogRatioCritic."""
        self.max_tokens = max_tokens
        self.model = load_trained(self.folder, open_model, self.model_class)

    def advantages(self, items, ref_items, normalize):
        """The head's outputs for the actions of items, (B, M)."""
        return padded_outputs([action_outputs(self.model, items, self.max_tokens)])

    def describe(self):
        return f"{self.folder}: scores are the outputs of its {self.score} head"


# ---------------------------------------------------------------------------------------------------------------------
# --critic: from a name to a critic

CRITIC = record({"score": one_of("logratio", "regression", "value"), "normalize": one_of("turn", "trajectory", "none"),
                 "critic_sees_c": bool, "reference": label},
                {"visual": bool, "reference_sees_c": bool, "prompt_form": str})
# Prepended to a chat template so that dates render as their format string
UNDATED = "{% macro strftime_now(format) %}{{ format }}{% endmacro %}"


def open_critic(name, model, domain, reference_sees_c=None, show=None):
    """The critic that --critic names, not loaded yet: a folder's (read_critic) or, for "untrained", the `model` itself,
    which scores log p(a|o, c) - log p(a|o), a mean over the tokens of a."""
    if name != UNTRAINED:
        return read_critic(name, domain, reference_sees_c, show)
    if reference_sees_c:
        raise InputError(f"--critic {UNTRAINED}: every score is 0 if the reference model sees c; it needs "
                         "--reference-sees-c no")
    return LogRatioCritic(model, model, load_tokenizer(model), reference_sees_c=False)


def read_critic(folder, domain, reference_sees_c=None, show=None):
    """The critic in a folder of 03, not loaded yet, for tasks of a domain. Raises InputError if it cannot be used.

    reference_sees_c: whether its reference model sees c; None: as in training.
    show: for a visual critic (vision.VisualCritic)."""
    path = pathlib.Path(folder) / "critic.json"
    if path.parent.is_file():
        raise InputError(f"{folder}: is a file, not a folder written by 03_train_critic.py (did you mean "
                         f"{path.parent.parent}?)")
    if not path.exists():
        raise InputError(f"{folder}: has no critic.json, so it is not a finished critic of 03_train_critic.py")
    note = read_json(path, CRITIC)
    folder, score, critic_sees_c = str(folder), note["score"], note["critic_sees_c"]
    if note.get("visual"):
        if not domain.views:
            raise InputError(f"{folder}: a visual critic cannot score a {domain.NOUN}: it has no rendered view")
        critic = vision.VisualCritic(folder, score, domain, show, critic_sees_c)
    elif score == "logratio":
        reference = base_of(folder) if is_adapter(folder) else note["reference"]
        critic = LogRatioCritic(folder, reference, load_tokenizer(folder), critic_sees_c,
                                note.get("reference_sees_c", True), note["normalize"])
    else:
        critic = HeadCritic(folder, score, load_tokenizer(folder), critic_sees_c)
    if reference_sees_c is not None and isinstance(critic, LogRatioCritic) and critic.critic_sees_c:
        critic.reference_sees_c = reference_sees_c
    elif reference_sees_c is False:
        say(f"{folder}: --reference-sees-c no has no effect on a critic with a head, or one that does not see c")
    trained_form = note.get("prompt_form")                           # older critics have none
    if trained_form and trained_form != prompt_form(critic, domain):
        raise InputError(f"{folder}: its prompt format differs from this code's (SOLUTION_TEXT, critic_prompt, the "
                         "chat template); train it again, or score with the code that trained it")
    if is_adapter(folder):
        check_base(folder)
    elif critic.score == "logratio":
        check_weights(folder, critic.reference, note.get("reference_fingerprint"))
    return critic


def must_read_text(critic):
    """Raises InputError if a critic is visual."""
    if not isinstance(critic, TextCritic):
        raise InputError(f"{critic.folder}: --critic needs a critic that reads text; this one sees images")


def prompt_form(critic, domain):
    """A hash of the critic's prompts for a placeholder dialogue; it changes when the prompt format does."""
    task = {"problem_description": "?", "ground_truth": "c", "own": True, "solution_text": domain.SOLUTION_TEXT}
    history = [{"role": role, "content": "?"} for role in ("user", "assistant", "user")]
    page = {"role": "assistant", "content": "```html\n<p>?</p>\n```"}
    prompts = critic.empty_prompts(task, [*history, page])
    return hashlib.sha256(repr(prompts).encode()).hexdigest()[:16]
