"""From a dialogue to an advantage: its tokens, states and actions, pairs of trajectories, eq. 3, and critics.

c is what a critic may know and the agent may not: the solution of the task."""
import lib  # noqa: F401  # isort: skip (first: it says how to set up where torch is missing)
import collections
import contextlib
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
    adapter_off,
    base_of,
    check_base,
    check_weights,
    is_adapter,
    load_head,
    load_tokenizer,
    most_positions,
)
from lib.runtime import InputError, read_json, say
from lib.scorer import (
    action_lengths,
    action_outputs,
    for_scoring,
    HeadScorer,
    item_length,
    load_trained,
    num_actions,
    padded,
    Scorer,
    Sequence,
)
from lib.tokens import agent_turns, encode, generation_cue, LAST_ROUND, plain, prompt_text, say_kinds, tokenizer_name

# ---------------------------------------------------------------------------------------------------------------------
# tokens of a dialogue, and where c stands

SOLUTION_TEXT = "The {noun} that this person needs is the following.\n{ground_truth}\nThe dialogue with the person:\n"


def solution_text(task):
    """The text that states c; empty for a task without one."""
    if not task["ground_truth"]:
        return ""
    return SOLUTION_TEXT.format(noun=domain_of(task).NOUN, ground_truth=task["ground_truth"])


def vocabulary_text(trajectory):
    """All the text of a trajectory that a fresh tokenizer should know."""
    turns = [turn["content"] for turn in trajectory["dialogue_history"]]
    return "\n".join([*turns, turns[0] + LAST_ROUND, solution_text(trajectory["task"])])


def critic_prompt(tokenizer, prompt, task):
    """A prompt (text) as a critic reads it: [BOS] + solution_text(task) + prompt. c is in no message of the chat.
    The beginning-of-sequence token stays in front, unless the template opens messages with it, as SmolLM2's does."""
    bos = tokenizer.bos_token or ""
    if not prompt.startswith(bos) or generation_cue(tokenizer).startswith(bos):
        bos = ""
    return bos + plain(tokenizer, solution_text(task)) + prompt[len(bos):]


def trajectory_sequences(tokenizer, turns, task=None):
    """The item of a trajectory, a list of Sequences, from its agent_turns. Each turn of the agent is an action.
    task: where it is given, c stands once, at the very front (critic_prompt).

    For turns "<u>hi<a>" -> "who?<e>", "<u>hi<a>who?<e><u>me<a>" -> "ok<e>" it is one sequence:
        ids             <u> hi <a> who ? <e> <u> me <a> ok <e>
        action_ids      -1  -1 -1   0  0  0  -1 -1 -1   1   1
    The ids before an action are those of its whole prompt, as the agent read them. Where a prompt does not begin with
    the ids so far (a template drops thoughts, or encodes an action's text otherwise), a new sequence begins."""
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


def as_one_action(item):
    """A trajectory's item with all agent tokens as action 0: multi-turn DPO compares whole dialogues."""
    sequences = []
    for sequence in item:
        numbers = [min(number, 0) for number in sequence.action_ids]
        sequences.append(sequence._replace(action_ids=numbers))
    return sequences


# ---------------------------------------------------------------------------------------------------------------------
# a state and actions in it

# A dialogue up to an agent's turn, with candidates for this turn.
# prompt          the text that the agent reads, without c
# task, history   the task, and the turns so far
# actions, texts  of each candidate its token ids, and what the other side would see of it
State = namedtuple("State", "prompt task history actions texts")


def actions_item(tokenizer, prompt, actions):
    """The item of several actions (id lists) after one prompt (text): one Sequence, a tree.

    For prompt "<u>hi<a>" and actions "who?<e>", "ok<e>" it is
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
# trajectories: what training examples are made of, and pairs of them

# What one training example is made of.
# items    lists of Sequences: a trajectory (one where the chat template only appends, else several), or actions of one
#          state (one, a tree)
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


def trajectory_items(tokenizer, trajectories, sees_c):
    """An item for each trajectory. sees_c: whether c stands in front; None: where the logged agent saw it."""
    items, kinds = [], collections.Counter()
    for trajectory in trajectories:
        with_c = trajectory.get("informed") if sees_c is None else sees_c
        turns = agent_turns(tokenizer, trajectory, kinds)
        items.append(trajectory_sequences(tokenizer, turns, trajectory["task"] if with_c else None))
    say_kinds("agent turns", kinds)
    return items


def trajectory_examples(trajectories, groups, make_items, sees_c):
    """An Example, without pairs, for each tuple of trajectory numbers, an item a trajectory.
    make_items(trajectories, sees_c): an item for each of them (trajectory_items)."""
    numbers = sorted({number for group in groups for number in group})
    items = dict(zip(numbers, make_items([trajectories[number] for number in numbers], sees_c)))
    examples = []
    for group in groups:
        examples.append(Example([items[number] for number in group], [], trajectories[group[0]]["task_id"]))
    return examples


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
    """Eq. 3: the advantages of actions, (B, M).

    logps, ref_logps   (B, M) log-probabilities of actions under the critic and its reference model
    lengths            (B, M) how many tokens they have; 0 where an action is missing
    normalize          "turn": a mean over the action's tokens; "trajectory": over all agent tokens; "none": a sum

    The actions are the turns of a trajectory, whose score is their sum over M, or candidates in one state."""
    logratios = logps - ref_logps                                                   # (B, M)
    if normalize == "turn":
        return logratios / lengths.clamp(min=1)                                     # (B, M)
    if normalize == "trajectory":
        return logratios / lengths.sum(1, keepdim=True)                             # (B, M)
    return logratios


# ---------------------------------------------------------------------------------------------------------------------
# critics: the advantages of actions in states, and of the turns of trajectories

class TextCritic:
    """What critics that read text have in common. vision.VisualCritic has the same methods.

    folder             made by 03; an untrained critic: the model's name
    tokenizer          its own, which must be the policy's
    critic_sees_c      whether it reads c
    reference_sees_c   whether its reference model does, where the critic does
    normalize          of eq. 3"""

    scorer_class = HeadScorer

    def __init__(self, folder, tokenizer, critic_sees_c=True, reference_sees_c=True, normalize="none"):
        self.folder = folder
        self.tokenizer = tokenizer
        self.critic_sees_c = critic_sees_c
        self.reference_sees_c = reference_sees_c
        self.normalize = normalize

    def prompt(self, prompt, task, sees_c):
        """What is read in place of an agent's prompt (text): with c in front, or the same."""
        return critic_prompt(self.tokenizer, prompt, task) if sees_c else prompt

    def trajectory_items(self, trajectories, sees_c):
        """An item for each trajectory; its actions are the agent's turns."""
        return trajectory_items(self.tokenizer, trajectories, sees_c)

    def state_items(self, states, sees_c):
        """An item for each State, with c in front or without; its actions are the state's."""
        prompts = [self.prompt(state.prompt, state.task, sees_c) for state in states]
        return [actions_item(self.tokenizer, prompt, state.actions) for prompt, state in zip(prompts, states)]

    def score_actions(self, states):
        """The advantage of each action of States, a list of floats for each state. Equal actions are scored once.
        An action is scored alone: with --normalize trajectory, too, by the mean over its own tokens."""
        distinct = [state._replace(actions=sorted(set(map(tuple, state.actions)))) for state in states]
        items = self.state_items(distinct, self.critic_sees_c)
        ref_items = items if self.reference_sees_c else self.state_items(distinct, sees_c=False)
        normalize = "turn" if self.normalize == "trajectory" else self.normalize
        advantages = self.advantages(items, ref_items, normalize)                          # (states, M)
        if not advantages.isfinite().all():
            raise InputError(f"{self.folder}: gives scores that are not finite; train this critic again")
        scores = []
        for state, distinct_state, numbers in zip(states, distinct, advantages.tolist()):
            advantage_of = dict(zip(distinct_state.actions, numbers))
            scores.append([advantage_of[tuple(action)] for action in state.actions])
        return scores

    def score_turns(self, trajectories):
        """The advantage of each agent turn of trajectories, a list of floats for each trajectory, whose sum is its
        score; None where it has more tokens than --max-tokens, or than the critic takes."""
        items = self.trajectory_items(trajectories, self.critic_sees_c)
        ref_items = items if self.reference_sees_c else self.trajectory_items(trajectories, sees_c=False)
        most = min(self.max_tokens, most_positions(self.scorer.model.config))
        fitting = [number for number, item in enumerate(items) if item_length(item) <= most]
        scores = [None] * len(trajectories)
        if fitting:
            advantages = self.turn_advantages([items[i] for i in fitting], [ref_items[i] for i in fitting])
            for i, numbers in zip(fitting, advantages.tolist()):
                scores[i] = numbers[:num_actions(items[i])]
        return scores

    def turn_advantages(self, items, ref_items):
        """The advantages of the turns of trajectories, (B, M)."""
        return self.advantages(items, ref_items, self.normalize)

    def free(self):
        """Free the memory of its models."""
        self.scorer = self.ref_scorer = None

    async def seeing(self, states, environment):
        """This critic, ready for score_actions(states): it needs no pictures of them."""
        return self

    def check_tokenizer(self, tokenizer, agent):
        """InputError where an agent's tokenizer (None: not known) is not the critic's."""
        if not tokenizer:
            raise InputError(f"--best-of with {self.folder}, a critic that reads tokens: {agent} needs "
                             "--agent-tokenizer MODEL")
        if tokenizer_name(self.tokenizer) != tokenizer_name(tokenizer):
            raise InputError(f"{self.folder}: its tokenizer is not the policy's; train the critic from the same model")

    def empty_prompts(self, task, history):
        """What it reads before the last turn of a dialogue that says nothing, on no date: prompt_form."""
        undated = {"chat_template": UNDATED + self.tokenizer.get_chat_template()}
        dummy = {"task": task, "max_rounds": 2, "dialogue_history": history, "chat_template_args": undated}
        prompts = []
        for trajectory in (dummy, {**dummy, "system_prompt": "?"}):
            prompts.append(self.prompt(prompt_text(self.tokenizer, trajectory, history[:-1]), task, self.critic_sees_c))
        return prompts

    def note(self):
        """What critic.json keeps of it."""
        return {"score": self.score, "normalize": self.normalize, "critic_sees_c": self.critic_sees_c,
                "reference_sees_c": self.reference_sees_c, "visual": False}


class LogRatioCritic(TextCritic):
    """A critic whose numbers are eq. 3: how much likelier than its reference model it makes an action.

    reference   the name of the reference model. An untrained critic is compared with itself: with c against without"""

    score = "logratio"
    scorer_class = Scorer

    def __init__(self, folder, reference, tokenizer, critic_sees_c=True, reference_sees_c=True, normalize="turn"):
        super().__init__(folder, tokenizer, critic_sees_c, reference_sees_c, normalize)
        self.reference = reference
        self.is_untrained = folder == reference

    def load(self, load, max_tokens):
        """Load the models. load(name, lora=…, kind=…) loads a Scorer: load_whole, or load_scorer where it is split over
        the ranks. max_tokens: of a batch."""
        self.max_tokens = max_tokens
        if self.is_untrained:
            self.scorer = for_scoring(load(self.folder))
            self.ref_scorer = self.scorer
        elif is_adapter(self.folder):
            self.scorer = load_trained(self.folder, load, self.scorer_class)
            self.ref_scorer = self.scorer                            # with its adapter off: advantages()
        else:
            self.scorer = load_trained(self.folder, load, self.scorer_class)
            self.ref_scorer = for_scoring(load(self.reference))

    def advantages(self, items, ref_items, normalize):
        """Eq. 3 of the actions of items, (B, M)."""
        logps = padded(action_outputs(self.scorer, items, self.max_tokens))                # (B, M)
        off = contextlib.nullcontext()
        if self.ref_scorer is self.scorer and not self.is_untrained:
            off = adapter_off(self.scorer.model)                     # what is below a trained adapter is its reference
        with off:
            ref_logps = padded(action_outputs(self.ref_scorer, ref_items, self.max_tokens))
        if self.is_untrained:
            # Tasks without c give both sides the same tokens: their advantages are exactly 0, in whatever batches.
            is_same = torch.tensor([item == ref_item for item, ref_item in zip(items, ref_items)])
            ref_logps[is_same] = logps[is_same]
        return action_advantages(logps, ref_logps, action_lengths(items), normalize)

    def describe(self):
        """What its numbers are, in a line."""
        model = "p_ref" if self.is_untrained else "p"
        prompt = "o, c" if self.critic_sees_c else "o"
        ref_prompt = "o, c" if self.critic_sees_c and self.reference_sees_c else "o"
        mean = {"turn": "a mean over the tokens of a", "none": "a sum over the tokens of a",
                "trajectory": "a mean over the tokens of a (in training over all agent tokens)"}[self.normalize]
        logratio = f"log {model}(a|{prompt}) - log p_ref(a|{ref_prompt})"
        return f"{self.folder}: scores are {logratio}, {mean}"


class HeadCritic(TextCritic):
    """A critic whose numbers are those of a head on the mean of an action's last hidden states.

    score "regression": advantages. "value": values of the dialogue up to and with a turn (logits); the advantage of a
    turn is then how it changes the value, from 0 before the first one."""

    def __init__(self, folder, score, tokenizer, critic_sees_c=True):
        super().__init__(folder, tokenizer, critic_sees_c)
        self.score = score

    def load(self, load, max_tokens):
        """As of LogRatioCritic."""
        self.max_tokens = max_tokens
        self.scorer = load_trained(self.folder, load, self.scorer_class)
        load_head(self.scorer.head, self.folder)

    def advantages(self, items, ref_items, normalize):
        """The head's numbers of the actions of items, (B, M)."""
        return padded(action_outputs(self.scorer, items, self.max_tokens))

    def turn_advantages(self, items, ref_items):
        numbers = self.advantages(items, ref_items, self.normalize)                        # (B, M)
        if self.score == "value":
            return torch.diff(numbers, prepend=torch.zeros(len(items), 1))
        return numbers

    def describe(self):
        return f"{self.folder}: scores are the numbers of its {self.score} head"


# ---------------------------------------------------------------------------------------------------------------------
# --critic: which critic it is

CRITIC = record({"score": one_of("logratio", "regression", "value"), "normalize": one_of("turn", "trajectory", "none"),
                 "critic_sees_c": bool, "reference": label},
                {"visual": bool, "reference_sees_c": bool, "prompt_form": str})
UNTRAINED = "untrained"                                             # --critic: the base model, with no training
# In front of a chat template: in place of a date it then writes the date's format
UNDATED = "{% macro strftime_now(format) %}{{ format }}{% endmacro %}"


def open_critic(name, model, domain, reference_sees_c=None, show=None):
    """The critic of --critic (its `name`), not loaded yet: that of a folder (read_critic) or, with "untrained", the
    `model` itself, whose scores are log p(a|o, c) - log p(a|o), a mean over the tokens of a."""
    if name != UNTRAINED:
        critic = read_critic(name, domain, reference_sees_c, show)
    elif reference_sees_c:
        raise InputError(f"--critic {UNTRAINED}: scores every action 0 with a reference model that sees c; it needs "
                         "--reference-sees-c no")
    else:
        critic = untrained_critic(model)
    say(critic.describe())
    return critic


def untrained_critic(model):
    """The critic that a model is, with no training."""
    return LogRatioCritic(model, model, load_tokenizer(model), reference_sees_c=False)


def read_critic(folder, domain, reference_sees_c=None, show=None):
    """The critic of a folder of 03, not loaded yet, for tasks of a domain. InputError where it does not fit.

    reference_sees_c: of its reference model; None: as in training.
    show: for a visual critic (vision.VisualCritic)."""
    path = pathlib.Path(folder) / "critic.json"
    if path.parent.is_file():
        raise InputError(f"{folder}: a file; a critic is a folder of 03_train_critic.py, {path.parent.parent} perhaps")
    if not path.exists():
        raise InputError(f"{folder}: no critic.json in it, so no finished critic of 03_train_critic.py")
    note = read_json(path, CRITIC)
    critic = critic_of_note(str(folder), note, domain, show)
    if reference_sees_c is not None and isinstance(critic, LogRatioCritic) and critic.critic_sees_c:
        critic.reference_sees_c = reference_sees_c
    elif reference_sees_c is False:
        say(f"{folder}: --reference-sees-c no does nothing for a critic with a head, or one that does not see c")
    trained_form = note.get("prompt_form")                           # older critics have none
    if trained_form and trained_form != prompt_form(critic, domain):
        raise InputError(f"{folder}: was trained with another critic's prompt than this code makes (SOLUTION_TEXT, "
                         "critic_prompt, the chat template); train it again, or score with the code that trained it")
    if is_adapter(folder):
        check_base(folder)
    elif critic.score == "logratio":
        check_weights(folder, critic.reference, note.get("reference_fingerprint"))
    return critic


def critic_of_note(folder, note, domain, show):
    """The critic that critic.json tells of."""
    if note.get("visual"):
        if not domain.views:
            raise InputError(f"{folder}: a visual critic cannot rank {domain.NOUN}s, which have nothing to see")
        return vision.VisualCritic(folder, note["score"], domain, show, note["critic_sees_c"])
    tokenizer = load_tokenizer(folder)
    if note["score"] != "logratio":
        return HeadCritic(folder, note["score"], tokenizer, note["critic_sees_c"])
    reference = base_of(folder) if is_adapter(folder) else note["reference"]
    return LogRatioCritic(folder, reference, tokenizer, note["critic_sees_c"], note.get("reference_sees_c", True),
                          note["normalize"])


def must_read_text(critic):
    """InputError for a visual critic."""
    if not isinstance(critic, TextCritic):
        raise InputError(f"{critic.folder}: --critic takes a critic that reads text, and this one sees images")


def prompt_form(critic, domain):
    """A hash of how a critic's prompts are made: of those for a task and a dialogue that say nothing."""
    task = {"problem_description": "?", "ground_truth": "c", "own": True}
    history = [{"role": role, "content": "?"} for role in ("user", "assistant", "user")]
    page = {"role": "assistant", "content": "```html\n<p>?</p>\n```"}
    prompts = critic.empty_prompts(task, [*history, page])
    return hashlib.sha256(repr(prompts).encode()).hexdigest()[:16]
