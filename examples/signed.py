"""A fork of grpo: the outcome gives a turn's sign, the critic its size. `diff examples/grpo.py examples/signed.py`.

Reads   trajectories.jsonl (02), a model, and for --method sweet a critic (03).
Writes  a model folder with metrics.jsonl and agent.json (the system prompt that it was trained with); for sweet also
        candidates.jsonl (without --candidates), scored.jsonl and pairs.jsonl.

--method sweet   For every agent turn of --data-frac of the trajectories: sample 16 candidates given o_t (never c),
                 score each by the critic's A(o_t, a, c) (eq. 3), pair a random one of the better half with a random one
                 of the worse, and train by single-turn DPO:
    eq. 4        -log s( b log[p(a+|o) / p_ref(a+|o)] - b log[p(a-|o) / p_ref(a-|o)] ) + nll_coef * mean NLL of a+
                 with s the sigmoid, b --beta, and sums over the tokens of an action (end of turn included).
                 --reference blind: p_ref of eq. 3 does not read c, as in the published code (default: as trained).
                 --answer-coef adds the mean NLL of a right answer that is logged, drawn for each example: an agent that
                 learns to ask keeps how it answers. The paper has no such term.
                 With --answers-by-outcome no pair chooses an answer, except in the last turn of a logged dialogue whose
                 answer was right: a critic that sees c likes lucky guesses. The paper has no such rule.
--method mtdpo   Multi-turn DPO: the same loss on pairs of trajectories of one task, all agent tokens summed.
--method rft     Rejection fine-tuning: likelihood of the agent's turns of successful trajectories (where returns are
                 graded: of the best trajectory of each task).
--method sft     Likelihood of the agent's turns of all trajectories.
                 rft and sft put c in front of dialogues whose agent saw it (02 --agent script-informed).

--method signed  Each agent token of a trajectory has an advantage: the trajectory's return less the mean return of its
                 task's trajectories, over their standard deviation, as with grpo. It is shared among the turns by
                 the size of the critic's credit (eq. 3): a turn's share is |A(o_t, a_t, c)| over the trajectory's mean.
                 So all turns of a success rise and all turns of a failure fall, those that the critic calls important
                 more. Without --critic every share is 1, which is grpo. The ratio of the token's probability to that
                 under the model at the start, which must have sampled it, is clipped as in PPO.
The idea is that of arXiv 2604.03128, 2605.19447, 2606.12634, whose teacher sees the solution.
What changed against grpo: credit_shares() is new, with_advantages() uses it.

    python -m examples.signed --method signed --trajectories out/offline.jsonl --model models/tiny \\
        --critic out/critic --lr 3e-4 --out out/signed
    torchrun --nproc-per-node 8 -m examples.signed --method signed --critic critic …
"""
import collections
import functools
import gc
import itertools
import math
import os
import pathlib
import random
import statistics

import torch
import torch.nn.functional as F

import common
from colbench import ColBenchError, domain_of
from colbench.schema import label, list_of, record, token_ids, whole
from lib import training
from lib.costs import Costs, say_made_with
from lib.engine import generate
from lib.flags import (
    add_reference,
    add_training,
    argument_parser,
    non_negative_float,
    num_samples_flag,
    num_tokens_flag,
    positive_int,
    set_preset,
    share_flag,
    temperature_flag,
    text_flag,
)
from lib.memory import dry_run, PlannedStep
from lib.models import (
    encode,
    fresh_model,
    load_model,
    load_tokenizer,
    lora_config,
    max_positions,
    reads_images,
    Sharding,
    stop_ids,
    work_of,
)
from lib.runtime import (
    begin_output,
    InputError,
    is_done,
    map_blocks,
    read_jsonl,
    read_rows,
    Rows,
    run_stage,
    say,
    start,
    write_jsonl,
)
from lib.sampling import add_rows, finish_rows, open_sampler
from lib.seeds import uniforms
from lib.servers import is_server, said
from lib.statistics import aligned, average_ranks
from lib.tracking import check_track, Track

# ---------------------------------------------------------------------------------------------------------------------
# losses

def dpo_loss(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta):
    """Eq. 4 without its NLL term, from summed log-probabilities (P,) of chosen and rejected under policy and reference.
    Returns (losses, chosen_rewards, rejected_rewards), each (P,)."""
    chosen_rewards = beta * (chosen_logps - ref_chosen_logps)                                     # (P,)
    rejected_rewards = beta * (rejected_logps - ref_rejected_logps)                               # (P,)
    return -F.logsigmoid(chosen_rewards - rejected_rewards), chosen_rewards, rejected_rewards


def batch_loss(logps, ref_logps, lengths, examples, shares, args):
    """(loss, numbers for the log) of a micro-batch. signed: clipped_objective; with pairs: eq. 4; else: likelihood.

    logps, ref_logps   (B, M) log-probabilities of each item's actions under the policy and under the model at the start
                       (None where the method has no reference). B: items of all examples; without pairs one an example
    lengths            (B, M) tokens of each action
    shares             (examples,) the weight of one term of each example: 1 over the step's num_terms, 0 for a stand-in
                       (training.rank_batches). A term is a pair (P of them here) or a token to imitate"""
    if args.method == "signed":
        advantages = common.padded_outputs([[example.advantages] for example in examples], logps.device)
        objectives, ratios = clipped_objective(logps, ref_logps, advantages, args.clip, args.kl_coef)   # (B, M)
        token_shares = lengths * shares[:, None]                     # (B, M); a length is 1, or 0 of no token
        is_clipped = (ratios - 1).abs() > args.clip                                                   # (B, M)
        numbers = {"ratio": (ratios * token_shares).sum().item(), "clipped": (is_clipped * token_shares).sum().item()}
        return -(objectives.sum(1) * shares).sum(), numbers
    if not examples[0].pairs:
        return -(logps.sum(1) * shares).sum(), {}
    pairs = common.batch_pairs(examples)                                                          # (P, 2, 2)
    num_pairs = torch.tensor([len(example.pairs) for example in examples], device=shares.device)
    pair_shares = shares.repeat_interleave(num_pairs)                                             # (P,)
    chosen, rejected = common.chosen_and_rejected(logps, pairs)                                   # (P,)
    ref_chosen, ref_rejected = common.chosen_and_rejected(ref_logps, pairs)                       # (P,)
    chosen_lengths, _ = common.chosen_and_rejected(lengths, pairs)                                # (P,)
    losses, chosen_rewards, rejected_rewards = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, args.beta)
    nll = -chosen / chosen_lengths                                   # (P,) a mean over the chosen action's tokens
    loss = ((losses + args.nll_coef * nll) * pair_shares).sum()
    numbers = training.preference_numbers(chosen_rewards, rejected_rewards, nll, pair_shares, args.dtype)
    if args.answer_coef:                                             # two items an example (with_right_answers)
        answer_logps, answer_lengths = logps[1::2].sum(1), lengths[1::2].sum(1)                   # (examples,)
        answer_nll = -answer_logps / answer_lengths                                               # (examples,)
        answer_loss = (answer_nll * num_pairs * shares).sum()        # a mean over pairs, as the other terms
        loss = loss + args.answer_coef * answer_loss
        numbers["answer_nll"] = answer_loss.item()
    return loss, numbers


def clipped_objective(logps, sampled_logps, advantages, clip, kl_coef):
    """PPO's objective of each token (an action of its own), (B, M): min(r A, clip(r, 1 - clip, 1 + clip) A), where r is
    its probability over that under the model which sampled it, less kl_coef times an estimate of KL(policy || that
    model) that is never negative: r log r - r + 1. Returns (objectives, ratios)."""
    log_ratios = logps - sampled_logps                                                            # (B, M)
    ratios = log_ratios.exp()                                                                     # (B, M)
    clipped = torch.minimum(ratios * advantages, ratios.clamp(1 - clip, 1 + clip) * advantages)
    return clipped - kl_coef * (ratios * log_ratios - ratios + 1), ratios


def num_terms(example):
    """How many terms an example adds to the loss of its step: its pairs or, where turns are imitated, its tokens."""
    if example.pairs:
        return len(example.pairs)
    return common.num_action_tokens(example)


# ---------------------------------------------------------------------------------------------------------------------
# SWEET's turns: the states in which actions are compared

SAMPLED_TOGETHER = 128          # states of a block; a killed run repeats at most one block on each rank
SCORED_TOGETHER = 64

# The rows of candidates.jsonl, for one of another run (--candidates)
CANDIDATE = record({"text": str, "ids": token_ids, "ended": bool})
CANDIDATES = record({"task_id": label, "sample": int, "turn": whole(0), "prompt": str, "task": dict,
                     "history": list_of(common.TURN), "candidates": list_of(CANDIDATE)})


def read_states(trajectories, tokenizer, args):
    """The states of all agent turns of --data-frac of the trajectories, {"task_id", "sample", "turn", "task", "prompt",
    "history", "max_rounds"} each. "prompt" is the one that was logged where the file allows (common.agent_turns)."""
    common.check_names(trajectories, args.trajectories, may_repeat=True)
    chosen = sample_trajectories(trajectories, args.data_frac, args.seed)
    num_turns = sum(turn["role"] == "assistant" for t in chosen for turn in t["dialogue_history"])
    say(f"{num_turns:,} agent turns of {len(chosen):,} dialogues (--data-frac {args.data_frac:g} of "
        f"{len(trajectories):,})")
    fitting = [t for t in chosen if not common.overlong_row(tokenizer, t, args.max_length)]
    states, counts = [], {}
    for trajectory in fitting:
        states += states_of(trajectory, common.agent_turns(tokenizer, trajectory, counts))
    if len(fitting) < len(chosen):
        say(f"left out {len(chosen) - len(fitting):,} trajectories, whose last prompt is longer than twice "
            f"--max-length {args.max_length}: {len(states):,} turns are left")
    states = states_with_room(states, tokenizer, max_positions(args.model), args.max_new_tokens)
    if not states:
        raise InputError(f"{args.trajectories}: no turns to train on: all prompts are far longer than --max-length "
                         f"{args.max_length}, or leave no room for --max-new-tokens {args.max_new_tokens}")
    common.say_kinds("their prompts", counts)
    return states


def sample_trajectories(trajectories, fraction, seed):
    """A seeded share of the trajectories, in their order; at least one."""
    order = list(range(len(trajectories)))
    random.Random(seed).shuffle(order)
    number = max(1, round(fraction * len(order)))
    return [trajectories[i] for i in sorted(order[:number])]


def states_of(trajectory, turns):
    """The states of a trajectory. turns: its common.agent_turns."""
    history = [{"role": turn["role"], "content": turn["content"]} for turn in trajectory["dialogue_history"]]
    places = [i for i, turn in enumerate(history) if turn["role"] == "assistant"]
    states = []
    for number, (place, (prompt, _)) in enumerate(zip(places, turns)):
        states.append({"task_id": trajectory["task_id"], "sample": trajectory["sample"], "turn": number,
                       "task": trajectory["task"], "prompt": prompt, "history": history[:place],
                       "max_rounds": trajectory.get("max_rounds", 10)})
    return states


def states_with_room(states, tokenizer, most_positions, max_new_tokens):
    """The states whose prompts leave room for `max_new_tokens` within the model's positions; says how many do not."""
    most = most_positions - max_new_tokens
    fitting = [state for state in states if len(encode(tokenizer, state["prompt"])) <= most]
    if len(fitting) < len(states):
        say(f"left out {len(states) - len(fitting):,} turns, whose prompts are longer than {most:,} tokens, so that "
            f"the model has no room for --max-new-tokens {max_new_tokens}: {len(fitting):,} turns are left")
    return fitting


def name_of(state):
    """What names a state, its candidates and its random numbers."""
    return state["task_id"], state["sample"], state["turn"]


def check_candidates_task(row, where, first):
    common.check_task(row["task"], f"{where}: task", first["task"])


def read_candidates(path, states, tokenizer, args):
    """The rows of another run's candidates.jsonl; InputError where they are not those of these states, or not of this
    tokenizer."""
    rows = read_jsonl(path, CANDIDATES, check=check_candidates_task)
    say_made_with(path, args, ("temperature", "max_new_tokens"))
    wanted = [(*name_of(state), args.num_candidates) for state in states]
    given = [(*name_of(row), len(row["candidates"])) for row in rows]
    if given != wanted:
        raise InputError(f"{path}: made from other turns or with another --num-candidates; the trajectories, "
                         "--num-trajectories, --data-frac and --seed must be the same")
    for row, state in zip(rows, states):
        if row["prompt"] != state["prompt"]:
            raise InputError(f"{path}: task {row['task_id']}, sample {row['sample']}, turn {row['turn']}: its "
                             "candidates continue another prompt than the trajectories log; sample them anew "
                             "(no --candidates)")
        for candidate in row["candidates"]:
            if max(candidate["ids"]) >= len(tokenizer):
                raise InputError(f'{path}: task {row["task_id"]}: a candidate has the id {max(candidate["ids"])}, and '
                                 f"this tokenizer has only {len(tokenizer):,} ids")
    return [{**state, "candidates": row["candidates"]} for state, row in zip(states, rows)]


# ---------------------------------------------------------------------------------------------------------------------
# SWEET's first phase: candidates of each state, sampled from the policy

def sample_candidates(states, model, tokenizer, args):
    """The states with "candidates": after each prompt, --num-candidates actions sampled from the policy."""
    shape = args.num_candidates, args.max_new_tokens
    randoms = torch.cat([uniforms(shape, args.seed, "candidates", *name_of(state)) for state in states])
    prompts = [encode(tokenizer, state["prompt"]) for state in states]
    stops = stop_ids(model, tokenizer)
    actions = generate(model, prompts, randoms, args.temperature, stops, args.concurrency, args.max_tokens)
    rows = []
    for number, state in enumerate(states):
        first = number * args.num_candidates
        candidates = []
        for ids in actions[first:first + args.num_candidates]:
            text = tokenizer.decode(ids, skip_special_tokens=True)
            candidates.append({"text": text, "ids": ids, "ended": ids[-1] in stops})
        rows.append({**state, "candidates": candidates})
    return rows


def candidates_phase(states, tokenizer, args, run, costs):
    """Rows of candidates.jsonl. The ranks share the states. Each rank holds the whole policy, or asks --sampler."""
    path = pathlib.Path(args.out) / "candidates.jsonl"
    if args.sampler:
        return served_candidates(path, states, tokenizer, args, run, costs)
    model = None
    if not path.exists():
        model = load_model(args.model, run.device, args.dtype)[0].eval()
        costs.works.append(work_of(model))
    blocks = [states[i:i + SAMPLED_TOGETHER] for i in range(0, len(states), SAMPLED_TOGETHER)]
    return map_blocks(path, blocks, lambda block: sample_candidates(block, model, tokenizer, args), run, "state")


# ---------------------------------------------------------------------------------------------------------------------
# SWEET's second phase: the critic's score of each candidate

def scores_phase(rows, critic, tokenizer, args, run, costs):
    """Rows of scored.jsonl. Critic and reference are split over the ranks, which score every block together."""
    path = pathlib.Path(args.out) / "scored.jsonl"
    if not isinstance(critic, str) and not path.exists():            # a str is an oracle, which needs no loading
        load = functools.partial(common.load_scorer, run=run, sharding=sharding_of(args))
        critic = common.load_critic(critic, load)
        costs.works += common.works_of(critic)
    blocks = [rows[i:i + SCORED_TOGETHER] for i in range(0, len(rows), SCORED_TOGETHER)]
    return map_blocks(path, blocks, lambda block: score_candidates(block, critic, tokenizer, args, run.device), run,
                      "state", together=True)


def score_candidates(rows, critic, tokenizer, args, device):
    """The rows with "advantages": the critic's score of every candidate, by eq. 3 where it has no head."""
    points = []
    for row in rows:
        texts = [candidate_says(row, candidate) for candidate in row["candidates"]]
        ids = [candidate["ids"] for candidate in row["candidates"]]
        points.append(common.DecisionPoint(row["prompt"], row["task"], row["history"], ids, texts))
    scores = common.score_actions(critic, tokenizer, points, args.max_tokens, device)
    scored = []
    for row, advantages in zip(rows, scores):
        if not all(map(math.isfinite, advantages)):
            raise InputError(f"{args.critic}: gives candidates scores that are not finite; train this critic again")
        scored.append({**row, "advantages": advantages})
    return scored


def candidate_says(row, candidate):
    """What a candidate of a state (or a side of a pair) says, without its thoughts."""
    return said(domain_of(row["task"]), candidate["text"], row["prompt"])


# ---------------------------------------------------------------------------------------------------------------------
# SWEET's third phase: pairs of candidates

def candidate_pairs(row, pairs_per_turn, rng, barred=()):
    """Pairs (better, worse) of candidate numbers: a random one of the better half, a random one of the worse.

    They are drawn with replacement, so a pair can be there twice. Candidates stopped by length are left out, and two
    equal actions are no pair. barred: numbers of candidates that no pair chooses."""
    order = [i for i, candidate in enumerate(row["candidates"]) if candidate["ended"]]
    rng.shuffle(order)                                                               # ties fall either way
    order.sort(key=lambda i: -row["advantages"][i])
    half = len(order) // 2
    better_half = [i for i in order[:half] if i not in barred]
    if not better_half:
        return []
    pairs = []
    for _ in range(pairs_per_turn):
        better = rng.choice(better_half)
        worse = rng.choice(order[-half:])
        if row["candidates"][better]["ids"] != row["candidates"][worse]["ids"]:
            pairs.append((better, worse))
    return pairs


def turns_of_right_answers(trajectories, path):
    """Names (name_of) of the turns whose logged answers were right: the last ones of successful dialogues.
    InputError, which names the file `path`, where there is none."""
    names = set()
    for trajectory in trajectories:
        if domain_of(trajectory["task"]).outcome(trajectory) == 1:
            num_turns = sum(turn["role"] == "assistant" for turn in trajectory["dialogue_history"])
            names.add((trajectory["task_id"], trajectory["sample"], num_turns - 1))
    if not names:
        raise InputError(f"{path}: --answers-by-outcome: no successful dialogue")
    return names


def answering_candidates(row):
    """The numbers of the candidates that are answers, so that the dialogue would end with them: in the last round all,
    as 02 takes whatever is said there for the answer."""
    domain = domain_of(row["task"])
    answers = []
    for number, candidate in enumerate(row["candidates"]):
        history = [*row["history"], {"role": "assistant", "content": candidate_says(row, candidate)}]
        if domain.answer_of(history, len(history) == 2 * row["max_rounds"]) is not None:
            answers.append(number)
    return answers


def as_pair(row, chosen, rejected):
    """A pair of two candidates of a state, given by number."""
    pair = {key: row[key] for key in ("task_id", "sample", "turn", "prompt")}
    for side, number in (("chosen", chosen), ("rejected", rejected)):
        pair[side] = {**row["candidates"][number], "advantage": row["advantages"][number]}
    return pair


def pairs_phase(rows, right_turns, args, run):
    """(rows of pairs.jsonl, why there are not more of them), of the rows of scored.jsonl; says what they are.
    right_turns: where a pair may choose an answer (turns_of_right_answers); None: everywhere."""
    rng = random.Random(args.seed)
    pairs = []
    for row in rows:
        barred = []
        if right_turns is not None and name_of(row) not in right_turns:
            barred = answering_candidates(row)
        for chosen, rejected in candidate_pairs(row, args.pairs_per_turn, rng, barred):
            pairs.append(as_pair(row, chosen, rejected))
    num_cut = too_few = 0
    for row in rows:
        num_ended = sum(candidate["ended"] for candidate in row["candidates"])
        num_cut += len(row["candidates"]) - num_ended
        too_few += num_ended < 2
    num_asked = len(rows) * args.pairs_per_turn
    num_same = num_asked - too_few * args.pairs_per_turn - len(pairs)
    same = "two equal actions"
    if right_turns is not None:
        same += " or had only answers to choose (--answers-by-outcome)"
    say(f"{len(pairs):,} pairs of {num_asked:,} asked for; {num_same:,} were {same}, {num_cut:,} "
        f"candidates stopped by --max-new-tokens were left out, so that {too_few:,} of {len(rows):,} turns had no two")
    if run.rank == 0:
        write_jsonl(pathlib.Path(args.out) / "pairs.jsonl", pairs)
    say(*kind_lines(rows, pairs))
    missing = (f"of {num_asked:,} pairs asked for {num_same:,} are {same}, "
               f"{too_few * args.pairs_per_turn:,} are of turns with fewer than two candidates that --max-new-tokens "
               f"{args.max_new_tokens} did not stop")
    return pairs, missing


def drop_long_pairs(pairs, tokenizer, max_length):
    """The pairs whose actions each fit into `max_length` tokens with the prompt; says how many do not. A tree of
    several pairs may be longer: an action sees the prompt and itself."""
    prompts = {pair["prompt"] for pair in pairs}
    room = {prompt: max_length - len(encode(tokenizer, prompt)) for prompt in prompts}
    fitting = []
    for pair in pairs:
        lengths = [len(pair[side]["ids"]) for side in ("chosen", "rejected")]
        if max(lengths) <= room[pair["prompt"]]:
            fitting.append(pair)
    if len(fitting) < len(pairs):
        say(f"dropped {len(pairs) - len(fitting):,} of {len(pairs):,} pairs: prompt and action are longer than "
            f"--max-length {max_length}")
    return fitting


# ---------------------------------------------------------------------------------------------------------------------
# examples: what the loop trains on

def scored_candidates(states, critic, tokenizer, args, run, costs):
    """Rows of scored.jsonl: run the first two phases, or read what an earlier run left of them.

    The models of a phase are freed before those of the next one are loaded (gc.collect)."""
    rows = states                                                    # with --candidates they have theirs already
    if not args.candidates:
        rows = candidates_phase(states, tokenizer, args, run, costs)
        costs.record()
    gc.collect()
    rows = scores_phase(rows, critic, tokenizer, args, run, costs)
    gc.collect()
    return rows


def sweet_examples(rows, right_turns, tokenizer, args, run):
    """Examples of pairs of actions, of the rows of scored.jsonl. right_turns: see pairs_phase."""
    pairs, missing = pairs_phase(rows, right_turns, args, run)
    fitting = drop_long_pairs(pairs, tokenizer, args.max_length)
    if not fitting:
        raise InputError(f"{args.trajectories}: no examples to train on: {missing}, {len(pairs):,} are longer than "
                         f"--max-length {args.max_length}")
    return pair_examples(fitting, tokenizer, args.pairs_together)


def pair_examples(pairs, tokenizer, together):
    """Examples of pairs of actions: one a pair or, with `together`, one of all pairs of a turn.

    An example has one item, its prompt and all of its actions (common.actions_item)."""
    pairs_of = collections.defaultdict(list)                         # of a turn, or each pair alone
    for number, pair in enumerate(pairs):
        state = pair["task_id"], pair["sample"], pair["turn"], pair["prompt"]
        pairs_of[state if together else number].append(pair)
    examples = []
    for example_of in pairs_of.values():
        actions, example_pairs = [], []
        for pair in example_of:
            sides = []
            for side in ("chosen", "rejected"):
                action = pair[side]["ids"]
                if action not in actions:
                    actions.append(action)
                sides.append((0, actions.index(action)))             # (item, action)
            example_pairs.append(tuple(sides))
        item = common.actions_item(tokenizer, pair["prompt"], actions)
        examples.append(common.Example([item], example_pairs, pair["task_id"]))
    return examples


def right_answer_items(successful, tokenizer):
    """An item of the last turn of each of these trajectories, whose action tokens are those that state the answer: not
    that the agent answers, but what."""
    items = []
    for trajectory in successful:
        history = trajectory["dialogue_history"]
        last = max(i for i, turn in enumerate(history) if turn["role"] == "assistant")
        [(prompt, action)] = common.agent_turns(tokenizer, trajectory, only=last)
        first = first_answer_token(tokenizer, action, trajectory["answer"].strip())
        if first is not None:
            read = encode(tokenizer, prompt) + action[:first]
            stated = action[first:]
            items.append([common.Row(read + stated, [-1] * len(read) + [0] * len(stated))])
    return items


def first_answer_token(tokenizer, action, answer):
    """From which token of an action (ids) its text still holds the `answer`; None where it does not hold it."""
    for first in reversed(range(len(action))):
        if answer in tokenizer.decode(action[first:], skip_special_tokens=True):
            return first
    return None


def read_right_answers(trajectories, tokenizer, args):
    """The right_answer_items that are short enough, and says how many are not there; InputError where there is none."""
    successful = [t for t in trajectories if domain_of(t["task"]).outcome(t) == 1]
    stated = right_answer_items(successful, tokenizer)
    items = [item for item in stated if training.item_length(item) <= args.max_length]
    say(f"{len(items):,} right answers of {len(trajectories):,} trajectories (--answer-coef)")
    if len(items) < len(successful):
        say(f"left out {len(successful) - len(items):,} more right answers: {len(successful) - len(stated):,} do not "
            f"stand in the last turn, {len(stated) - len(items):,} are longer than --max-length {args.max_length} with "
            "their prompt")
    if not items:
        raise InputError(f"{args.trajectories}: --answer-coef: no successful dialogue whose last turn states an answer")
    return items


def with_right_answers(examples, right_answers, seed):
    """The examples, each with a second item: one of the items of read_right_answers, drawn once at random."""
    rng = random.Random(seed)
    return [example._replace(items=[*example.items, rng.choice(right_answers)]) for example in examples]


def mtdpo_examples(trajectories, tokenizer, args):
    """Examples of pairs of trajectories: two items, each one action, because a dialogue is compared as a whole."""
    groups = common.trajectory_pairs(trajectories, args.trajectories)
    say(f"{len(groups):,} trajectory pairs")
    examples = []
    for example in common.trajectory_examples(trajectories, groups, tokenizer, False, max_length=args.max_length):
        items = [common.as_one_action(item) for item in example.items]
        examples.append(example._replace(items=items, pairs=[((0, 0), (1, 0))]))
    return examples


def rft_examples(trajectories, tokenizer, args):
    """Examples of trajectories to imitate: the successful ones; where returns are graded, the best of each task."""
    is_graded = domain_of(trajectories[0]["task"]).MIN_GAP is not None
    if is_graded:
        best = {}                                                    # of each task, the first of equals
        for trajectory in trajectories:
            task = trajectory["task_id"]
            if task not in best or trajectory["reward"] > best[task]["reward"]:
                best[task] = trajectory
        good = list(best.values())
        say(f"the best trajectory of each of {len(good):,} tasks")
    else:
        good = [trajectory for trajectory in trajectories if trajectory["reward"] == 1]
        if not good:
            raise InputError(f"{args.trajectories}: no successful trajectories (reward 1) to train on")
        say(f"{len(good):,} successful trajectories")
    return sft_examples(good, tokenizer, args)


def sft_examples(trajectories, tokenizer, args):
    """Examples of trajectories to imitate: all of them."""
    groups = [(i,) for i in range(len(trajectories))]
    return common.trajectory_examples(trajectories, groups, tokenizer, max_length=args.max_length)


# common.Example with its trajectory and, later, an advantage for each agent token, in their order
GroupExample = collections.namedtuple("GroupExample", "items pairs task_id trajectory advantages", defaults=(None,))
EQUAL = 1e-6                                                         # a smaller deviation is rounding


def signed_examples(trajectories, tokenizer, args):
    """An example of each trajectory, whose turns it keeps apart; advantages come later (with_advantages)."""
    groups = [(i,) for i in range(len(trajectories))]
    num_foreign = sum(os.path.realpath(str(t.get("agent"))) != os.path.realpath(args.model) for t in trajectories)
    num_changed = sum(t.get("temperature", 1) != 1 or t.get("best_of", 1) != 1 for t in trajectories)
    say(f"of {len(trajectories):,} trajectories {num_foreign:,} are of another agent than --model {args.model}, and "
        f"{num_changed:,} not sampled at temperature 1 without --best-of: no samples of this model's own probabilities")
    examples = common.trajectory_examples(trajectories, groups, tokenizer, False, max_length=args.max_length)
    return [GroupExample(*example, trajectory) for example, trajectory in zip(examples, trajectories)]


def with_advantages(examples, critic, tokenizer, args, run, costs):
    """The examples whose tokens have an advantage, each token an action of its own; says how many have none."""
    trajectories = [example.trajectory for example in examples]
    credit = [None] * len(trajectories)
    if critic:
        credit = critic_credit(trajectories, critic, tokenizer, args, run, costs)              # a number for each turn
    values = [[float(domain_of(t["task"]).outcome(t))] for t in trajectories]                  # one for all turns
    advantages = group_advantages(values, [example.task_id for example in examples])
    ready = []
    for example, numbers, turn_credit in zip(examples, advantages, credit):
        if numbers and turn_credit != []:
            [item] = example.items
            actions = [action for row in item for action in row.action_numbers if action >= 0]
            share_of = credit_shares(turn_credit, 1 + max(actions))
            tokens = torch.tensor([numbers[0] * share_of[action] for action in actions])
            ready.append(example._replace(items=[token_item(item)], advantages=tokens))
    num_long = credit.count([])
    num_equal = len(examples) - len(ready) - num_long
    say(f"{num_equal:,} of {len(examples):,} trajectories are left out: all those of their task are equally good; "
        f"{num_long:,} more are too long for the critic (--max-tokens {args.max_tokens})")
    if not ready:
        raise InputError(f"{args.trajectories}: no examples to train on: those of each task are equally good, or too "
                         f"long ({num_long:,})")
    return ready


def critic_credit(trajectories, critic, tokenizer, args, run, costs):
    """The critic's credit of each turn (common.score_turns), kept in credit.jsonl; [] of too long a trajectory."""
    path = pathlib.Path(args.out) / "credit.jsonl"
    if path.exists():                                                # of a run that was interrupted later
        return [row["advantages"] or [] for row in read_rows(path)]
    load = functools.partial(common.load_scorer, run=run, sharding=sharding_of(args))
    critic = common.load_critic(critic, load)
    costs.works += common.works_of(critic)
    credit = common.score_turns(critic, tokenizer, trajectories, args.max_tokens, run.device)
    if run.rank == 0:
        rows = [{"task_id": t["task_id"], "sample": t["sample"], "advantages": values}
                for t, values in zip(trajectories, credit)]
        write_jsonl(path, rows)
    return [values or [] for values in credit]


def group_advantages(values, task_ids):
    """`values`, a list of numbers for each trajectory, less the mean of the numbers of its group (the trajectories of
    its task), over their standard deviation; None for those of a group whose numbers are all equal."""
    groups = collections.defaultdict(list)
    for numbers, task in zip(values, task_ids):
        groups[task] += numbers
    advantages = []
    for numbers, task in zip(values, task_ids):
        group = groups[task]
        if len(group) < 2 or statistics.pstdev(group) <= EQUAL:
            advantages.append(None)
        else:
            mean, deviation = statistics.fmean(group), statistics.pstdev(group)
            advantages.append([(number - mean) / deviation for number in numbers])
    return advantages


def credit_shares(credit, num_turns):
    """What each turn of a trajectory has of its advantage: the size of its credit over their mean; 1 without credit."""
    if credit is None or statistics.fmean(map(abs, credit)) <= EQUAL:
        return [1.0] * num_turns
    mean = statistics.fmean(map(abs, credit))
    return [abs(number) / mean for number in credit]


def token_item(item):
    """An item whose agent tokens are actions of their own, so that a Scorer gives a log-probability for each."""
    numbers = itertools.count()
    rows = []
    for row in item:
        action_numbers = [next(numbers) if number >= 0 else -1 for number in row.action_numbers]
        rows.append(row._replace(action_numbers=action_numbers))
    return rows


# What the methods differ in.
# make_examples       of (trajectories, tokenizer, args); None: from ranked candidates (main)
# num_items           of an example
# epochs, batch_size  defaults, of table 5's backend row
# reads_rewards       trajectories without a reward are scored first
# has_reference       batch_loss gets the log-probabilities under the model at the start
Method = collections.namedtuple("Method", "make_examples num_items epochs batch_size reads_rewards has_reference")
METHODS = {
    "sweet": Method(None, num_items=1, epochs=1, batch_size=8, reads_rewards=False, has_reference=True),
    "mtdpo": Method(mtdpo_examples, num_items=2, epochs=4, batch_size=8, reads_rewards=True, has_reference=True),
    "rft": Method(rft_examples, num_items=1, epochs=4, batch_size=32, reads_rewards=True, has_reference=False),
    "sft": Method(sft_examples, num_items=1, epochs=4, batch_size=32, reads_rewards=False, has_reference=False),
    "signed": Method(signed_examples, num_items=1, epochs=1, batch_size=32, reads_rewards=True, has_reference=True),
}

# ---------------------------------------------------------------------------------------------------------------------
# candidates from servers; what the pairs say

def served_candidates(path, states, tokenizer, args, run, costs):
    """candidates_phase by the servers --sampler, which are sent the ids of prompts and give those that they sample.

    As with a local model ranks share the states, and a run that was killed goes on with those that are missing."""
    if not path.exists():
        sampler = open_sampler(args.sampler, run.device, args.dtype, args.concurrency, None, tokenizer)
        in_flight = 2 * math.ceil(args.concurrency / args.num_candidates)   # a slow candidate leaves no gap at the gate

        async def make_row(state):
            key = (args.seed, "candidates", *name_of(state))
            replies = await sampler.sample(state["prompt"], args.num_candidates, args.temperature,
                                           args.max_new_tokens, key)
            candidates = [{"text": reply.text, "ids": reply.ids, "ended": reply.ended} for reply in replies]
            return {**state, "candidates": candidates}

        with Rows(path, run) as rows:
            failures = add_rows(rows, states, make_row, in_flight, run)
        finish_rows(rows, len(states), failures, run)
    return read_rows(path)


def kind_lines(rows, pairs):
    """A table of what SWEET's pairs say, by the domain's turn_kind (no lines where it has none).

    Of each kind of turn: the candidates, their mean rank by advantage (0 the worst, 1 the best), and how many are
    chosen and rejected, before and after all that matters is known. A collapse shows here before training."""
    domain = domain_of(rows[0]["task"])
    if any(domain.turn_kind(row["task"], row["history"], "") is None for row in rows):
        return []
    states = {name_of(row): row for row in rows}
    counts = collections.defaultdict(collections.Counter)            # {(known, kind): {"number", "ranks", …}}

    def counts_of(row, candidate):
        kind = domain.turn_kind(row["task"], row["history"], candidate_says(row, candidate))
        return counts[domain.all_known(row["task"], row["history"]), kind]

    for row in rows:
        highest = max(1, len(row["candidates"]) - 1)
        for candidate, rank in zip(row["candidates"], average_ranks(row["advantages"])):
            counts_of(row, candidate).update(number=1, ranks=rank / highest)
    for pair in pairs:
        row = states[name_of(pair)]
        for side in ("chosen", "rejected"):
            counts_of(row, pair[side])[side] += 1
    lines = []
    for (known, kind), count in sorted(counts.items()):
        lines.append(["all known" if known else "not all known", kind, str(count["number"]),
                      f"{count['ranks'] / count['number']:.2f}", str(count["chosen"]), str(count["rejected"])])
    return aligned(["what the pairs say", "", "candidates", "rank", "chosen", "rejected"], lines)

# ---------------------------------------------------------------------------------------------------------------------

# Table 5 of the paper, as far as it differs from the defaults
PRESETS = {name: {"dtype": "bfloat16", "activation_checkpointing": True}
           for name in ("paper-backend", "paper-frontend")}


def by_method(field):
    """A field of METHODS, as a default in a help text."""
    return ", ".join(f"{name} {getattr(method, field)}" for name, method in METHODS.items())


def parse_args(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument("--method", choices=METHODS, required=True, help="see above")
    add_training(parser, max_length=16384)
    parser.add_argument("--epochs", type=positive_int, help=f"passes over the examples (None: {by_method('epochs')}; "
                        "with --preset paper-frontend 8 in place of 4)")
    parser.add_argument("--batch-size", type=positive_int, help=f"examples a step (None: {by_method('batch_size')})")
    group = parser.add_argument_group("a critic (sweet, signed); candidates and pairs (sweet alone)")
    group.add_argument("--critic", type=text_flag, help="a folder of 03; untrained (--model, its reference blind); "
                       "oracle, oracle-patient (the kind of a turn by the task's facts; neither knows the last round)")
    add_reference(group)
    group.add_argument("--data-frac", type=share_flag, default=0.1, help="share of the trajectories whose turns are "
                       "used (the paper's tenth is of 15,000; with few hundred take all: 1)")
    group.add_argument("--num-candidates", type=num_samples_flag, default=16, help="actions sampled a turn")
    group.add_argument("--pairs-per-turn", type=positive_int, default=4, help="DPO pairs a turn")
    group.add_argument("--answer-coef", type=non_negative_float, default=0.0, help="weight of the mean NLL of a right "
                       "answer, drawn once for each example from all successful trajectories (whatever --data-frac)")
    group.add_argument("--answers-by-outcome", action="store_true", help="no pair chooses an answer, except in the "
                       "last turn of a dialogue whose answer was right")
    group.add_argument("--temperature", type=temperature_flag, default=1.0, help="of the candidates")
    group.add_argument("--max-new-tokens", type=num_tokens_flag, default=1024, help="tokens of a candidate")
    group.add_argument("--candidates", type=text_flag, metavar="FILE", help="candidates.jsonl of another run of the "
                       "same model, seed, trajectories and sampling; None: sample them")
    group.add_argument("--sampler", type=text_flag, metavar="http://HOST:PORT/v1#NAME",
                       help="servers of --model's weights (commas between addresses) that give token ids, as vLLM "
                       "does: they sample the candidates, which then do not repeat bit for bit; None: every rank holds "
                       "the model and samples")
    group.add_argument("--concurrency", type=num_samples_flag, default=256,
                       help="candidates sampled at a time, by a rank")
    group.add_argument("--pairs-together", action="store_true", help="an example is all pairs of a turn, which share "
                       "the prompt (faster); a batch has --batch-size / --pairs-per-turn of them")
    parser.add_argument("--clip", type=non_negative_float, default=0.2, help="of the ratio, up and down")
    parser.add_argument("--kl-coef", type=non_negative_float, default=0.0, help="of the divergence from the start")
    set_preset(parser, PRESETS, argv)
    args = parser.parse_args(argv)
    if args.critic and args.method not in ("sweet", "signed"):
        parser.error("--critic goes with --method sweet and signed")
    if args.method != "sweet":
        for flag in ("candidates", "sampler", "pairs_together", "answer_coef", "answers_by_outcome"):
            if getattr(args, flag):
                parser.error(f"--{flag.replace('_', '-')} goes with --method sweet")
    elif args.critic is None:
        parser.error("--method sweet needs --critic: a folder, untrained, oracle or oracle-patient")
    if args.sampler and (args.candidates or not is_server(args.sampler)):
        parser.error("--sampler takes http://HOST:PORT/v1#NAME, without --candidates")
    if args.reference and not args.critic:
        parser.error("--reference goes with --critic")
    if args.epochs is None:
        args.epochs = METHODS[args.method].epochs
        if args.preset == "paper-frontend" and args.epochs == 4:
            args.epochs = 8
    args.batch_size = args.batch_size or METHODS[args.method].batch_size
    return args


def sharding_of(args):
    return Sharding(args.dtype, args.replicate, args.activation_checkpointing, args.out, args.seed,
                    args.compile)


def open_critic(trajectories, tokenizer, args):
    """What scores candidates, as common.score_actions takes it once it is loaded: the name of an oracle, or a critic's
    description (common.read_critic). InputError where it cannot score these trajectories."""
    domain = domain_of(trajectories[0]["task"])
    if args.critic in domain.ORACLES:
        if args.method == "signed":
            raise InputError(f"--critic {args.critic}: signed takes a critic folder (03); an oracle ranks, and has no "
                             "advantages")
        if args.reference:
            raise InputError(f"--reference {args.reference} does nothing with --critic {args.critic}: it has no "
                             "reference")
        if any(domain.lacks(trajectory["task"], args.critic) for trajectory in trajectories):
            raise InputError(f"{args.trajectories}: --critic {args.critic} needs template tasks (01), which state "
                             "facts")
        return args.critic
    if args.critic == common.UNTRAINED:
        critic = common.untrained_critic(args.model, args.reference)
    else:
        critic = common.read_critic(args.critic, tokenizer, domain, args.reference)
    if args.method == "signed" and (critic.get("visual") or critic["head"] == "value"):
        raise InputError(f"{args.critic}: signed takes a critic that reads text and has advantages: 03 --head lm or "
                         "regression")
    line = common.reference_line(critic)
    if line:
        say(line)
    critic["sight"] = common.sight_of(None, domain, args.out, common.world_flags(args))
    return critic


def examples_a_step(args):
    if args.pairs_together:
        return max(1, args.batch_size // args.pairs_per_turn)
    return args.batch_size


def train(scorer, examples, all_ref_logps, args, run, costs):
    """Train the scorer's model on the examples, from the last checkpoint.
    all_ref_logps: of each example what common.reference_logps gives; None where turns are imitated."""
    batch_size = examples_a_step(args)
    batches = training.epoch_batches(len(examples), batch_size, args.epochs, args.seed)[:args.max_steps]
    steps_an_epoch = math.ceil(len(examples) / batch_size)
    common.check_positions(common.items_of(examples), scorer.model)
    say(f"{len(examples):,} examples, {len(batches):,} steps of {batch_size}")
    optimizer = training.adamw(scorer, args.lr)
    checkpoints = training.Checkpoints(args.out, scorer, optimizer)
    first = checkpoints.load()
    open_track = functools.partial(Track, args.track, args.out, vars(args))
    log = training.StepLog(args.out, first, len(batches), args.log_every, open_track)
    scorer.train()
    for step in range(first, len(batches)):
        torch.manual_seed(args.seed * len(batches) + step)          # models with dropout: a resumed run draws the same
        batch_examples = [examples[i] for i in batches[step]]
        total = sum(map(num_terms, batch_examples))                 # the step's loss is a mean over these
        sums = collections.Counter()
        for micro, weights in training.rank_batches(batches[step], examples, args.micro_batch_size, run):
            micro_examples = [examples[i] for i in micro]
            batch = common.collate(common.items_of(micro_examples), run.device)
            logps = scorer(batch)                                   # (B, M)
            ref_logps = None
            if all_ref_logps:
                ref_logps = common.padded_outputs([all_ref_logps[i] for i in micro], run.device)       # (B, M)
            loss, numbers = batch_loss(logps, ref_logps, batch.lengths, micro_examples, weights / total, args)
            (loss * run.world_size).backward()                      # FSDP takes the ranks' mean, the batch is their sum
            num_tokens = training.num_tokens(micro_examples, weights)
            sums.update(loss=loss.item(), **numbers, num_tokens=num_tokens)
        done = step + 1
        lr = training.learning_rate(step, len(batches), args.lr)
        where = f"{args.out}: step {done} of {len(batches)}"
        tasks = {example.task_id for example in batch_examples}
        numbers = training.optimizer_step(scorer, optimizer, sums, lr, where, tasks)     # num_tokens is one of them
        log.step(done, **numbers)
        if done % args.save_every == 0 or done % steps_an_epoch == 0 or done == len(batches):
            checkpoints.save(done)
            costs.record(log.total_tokens)
    checkpoints.wait()
    costs.record(log.total_tokens)


def main(argv=None):
    args = parse_args(argv)
    method = METHODS[args.method]
    if args.dry_run:
        num_items = method.num_items + bool(args.answer_coef)
        lora = lora_config(args.model, args.lora, args.lora_targets, args.merge)
        step = PlannedStep(args.dry_run, sharding_of(args), examples_a_step(args), args.micro_batch_size, num_items,
                           args.max_length, method.make_examples is None, lora)
        return dry_run(args.model, step, common.token_logps)
    run = start(args.seed)
    trajectories = common.read_trajectories(args.trajectories, args.num_trajectories, args.seed)
    domain = domain_of(trajectories[0]["task"])
    inputs = [args.trajectories, args.model, args.candidates, args.sampler]
    if args.critic not in (*domain.ORACLES, common.UNTRAINED):
        inputs.append(args.critic)
    if is_done(vars(args), args.out, inputs, folder=True):
        return
    lora = lora_config(args.model, args.lora, args.lora_targets, args.merge)
    check_track(args.track)
    if method.reads_rewards or args.answer_coef or args.answers_by_outcome:
        common.fill_rewards(trajectories, common.scoring_world(domain, args.out, common.world_flags(args)))
    is_fresh = args.model == "tiny" and args.method == "sft"
    if is_fresh:
        model, tokenizer = fresh_model([common.vocabulary_text(trajectory) for trajectory in trajectories])
    else:
        tokenizer = load_tokenizer(args.model)
        if reads_images(args.model):
            raise InputError(f"{args.model}: policies read and write text alone; a model that sees can be a critic")
    critic = open_critic(trajectories, tokenizer, args) if args.critic else None
    if method.make_examples is None:
        states = read_states(trajectories, tokenizer, args)
        if args.candidates:
            states = read_candidates(args.candidates, states, tokenizer, args)
        if args.answer_coef:
            right_answers = read_right_answers(trajectories, tokenizer, args)
        right_turns = None
        if args.answers_by_outcome:
            right_turns = turns_of_right_answers(trajectories, args.trajectories)
    else:
        examples = method.make_examples(trajectories, tokenizer, args)
        examples = training.drop_long(examples, args.max_length, args.trajectories)
    begin_output(vars(args), args.out, inputs, folder=True)
    costs = Costs(args.out, run.device)
    if method.make_examples is None:
        rows = scored_candidates(states, critic, tokenizer, args, run, costs)
        examples = sweet_examples(rows, right_turns, tokenizer, args, run)
        if args.answer_coef:
            examples = with_right_answers(examples, right_answers, args.seed)
        costs.record()
    if args.method == "signed":
        examples = with_advantages(examples, critic, tokenizer, args, run, costs)
        costs.record()
    training.show_samples(tokenizer, examples[0])

    # The reference is this model before its first update; its log-probabilities are computed once, by the same function
    if is_fresh:
        scorer = common.shard_scorer(model.to(run.device), run, sharding_of(args))
    else:
        scorer = common.load_scorer(args.model, run, sharding_of(args), lora)
    costs.trained = work_of(scorer.model)
    all_ref_logps = None
    if method.has_reference:
        all_ref_logps = common.reference_logps(args.out, scorer, examples, args.max_tokens, run.device)
    train(scorer, examples, all_ref_logps, args, run, costs)
    common.note_system_prompt(args.out, trajectories)
    training.finish_training(args.out, scorer, tokenizer, args.merge)


if __name__ == "__main__":
    run_stage(main, ColBenchError)
