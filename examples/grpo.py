"""A fork of 04: policy gradient with group baselines (GRPO), instead of pairs.

Reads   trajectories.jsonl (02) that --model sampled itself, that model, and with --critic a critic (03).
Writes  a model folder with metrics.jsonl and agent.json (its system prompt in training); with --critic also
        advantages.jsonl, the critic's A(o_t, a_t, c) (eq. 3) of each turn.

All agent tokens of a turn have the same advantage:
without --critic   the trajectory's return, standardised: (return - mean) / deviation of its task's returns
--critic DIR       the critic's advantage of the turn, standardised over all turns of the task's trajectories
--signed           the outcome sets the sign of a turn, the critic its size: the advantage by the return, times
                   |A(o_t, a_t, c)| over the trajectory's mean of it. All turns of a success rise and all turns of a
                   failure fall, in proportion to the critic's advantage. The idea is that of arXiv 2604.03128,
                   2605.19447, 2606.12634, whose teacher sees the solution.
The ratio of a token's probability to that under the initial model is clipped as in PPO.
Differences between variants of GRPO; this one has:
    deviation    the population's, as in DeepSeekMath (arXiv 2402.03300); Dr. GRPO (arXiv 2503.20783) omits it
    loss         a mean over all tokens of a batch, as in DAPO (arXiv 2503.14476), not over trajectories
    clip         the same up and down, as in DeepSeekMath; DAPO has a higher upper limit
    KL           r log r - r + 1 with r = p / p_start; DeepSeekMath has 1/r - 1 + log r. Off by default

    python -m examples.grpo --trajectories out/offline.jsonl --model models/tiny --lr 3e-4 --out out/grpo
    torchrun --nproc-per-node 8 -m examples.grpo --critic critic --signed …
"""
from lib import flags

# ---------------------------------------------------------------------------------------------------------------------
# arguments

def parse_args(argv=None):
    parser = flags.argument_parser(__doc__)
    parser.add_argument("--method", choices=["grpo"], default="grpo", help="the only one")
    flags.add_training(parser, max_length=16384, epochs=1, batch_size=32)
    flags.add_critic(parser)
    parser.add_argument("--signed", action="store_true", help="see above")
    parser.add_argument("--clip", type=flags.non_negative_float, default=0.2, help="of the ratio, up and down")
    parser.add_argument("--kl-coef", type=flags.non_negative_float, default=0.0,
                        help="of the divergence from the start")
    args = parser.parse_args(argv)
    if args.critic is None and (args.signed or args.reference_sees_c is not None):
        parser.error("--signed and --reference-sees-c go with --critic")
    return args


if __name__ == "__main__":
    parse_args()                    # answers --help and wrong flags before the imports below, which take seconds

import collections
import functools
import importlib
import itertools
import os
import statistics

import torch

import common
from colbench import domain_of
from lib import data
from lib.logps import num_actions, padded_outputs
from lib.runtime import InputError, read_rows, run_stage, say, write_jsonl
from lib.tokens import note_prompt

policy = importlib.import_module("04_train_policy")

# ---------------------------------------------------------------------------------------------------------------------
# loss

def clipped_losses(log_ratios, advantages, lengths, clip, kl_coef):
    """PPO's negative objective, summed over the tokens of each trajectory: (losses (B,), {name: (B,)} for the log).

    The objective of a token is min(r A, clip(r, 1 - clip, 1 + clip) A) - kl_coef (r log r - r + 1). r is the ratio of
    its probability to that under the model which sampled it; r log r - r + 1 is a non-negative estimate of
    KL(policy || that model).

    log_ratios, advantages   (B, M) log r and A of each token, which is an action by itself
    lengths                  (B, M) 1; 0: no such token"""
    ratios = log_ratios.exp()                                                                     # (B, M)
    clipped = torch.minimum(ratios * advantages, ratios.clamp(1 - clip, 1 + clip) * advantages)   # (B, M)
    objectives = clipped - kl_coef * (ratios * log_ratios - ratios + 1)                           # (B, M)
    is_clipped = (ratios - 1).abs() > clip                                                        # (B, M)
    numbers = {"ratio": (ratios * lengths).sum(1), "clipped": (is_clipped * lengths).sum(1)}      # (B,)
    return -objectives.sum(1), numbers


# ---------------------------------------------------------------------------------------------------------------------
# advantages

EQUAL = 1e-6                                                         # a smaller deviation is rounding


def turn_advantages(returns, turn_scores, task_ids, is_signed):
    """A list of advantages for each trajectory: one for all turns, or with a critic one per turn. None: all
    trajectories of its task are equally good. []: it has no scores, as it is too long for the critic.

    returns, task_ids   of each trajectory
    turn_scores         None, or for each trajectory the critic's score of each turn"""
    if turn_scores and not is_signed:
        return group_advantages(turn_scores, task_ids)
    advantages = group_advantages([[number] for number in returns], task_ids)
    if is_signed:
        for numbers, turns in zip(advantages, turn_scores):
            if numbers:
                numbers[:] = [numbers[0] * share for share in advantage_shares(turns)]
    return advantages


def group_advantages(values, task_ids):
    """`values` (a list of numbers for each trajectory), standardised over all numbers of the group, which is the
    trajectories of a task; None if all numbers of the group are equal."""
    groups = collections.defaultdict(list)
    for numbers, task in zip(values, task_ids):
        groups[task] += numbers
    advantages = []
    for numbers, task in zip(values, task_ids):
        group = groups[task] or [0.0]
        mean, deviation = statistics.fmean(group), statistics.pstdev(group)
        if deviation <= EQUAL:
            advantages.append(None)
        else:
            advantages.append([(number - mean) / deviation for number in numbers])
    return advantages


def advantage_shares(turns):
    """The factor of each turn: the absolute value of its score over their mean; 1 if all are 0."""
    sizes = [abs(number) for number in turns]
    mean = statistics.fmean(sizes or [0.0])
    return [size / mean if mean > EQUAL else 1.0 for size in sizes]


# ---------------------------------------------------------------------------------------------------------------------
# examples

# common.Example, plus an advantage for each agent token, in their order (tokens,)
GroupExample = collections.namedtuple("GroupExample", "items action_pairs task_id advantages")


def say_whose(trajectories, model):
    """Warn about trajectories that are not samples of the model's own distribution, as the objective assumes."""
    num_foreign = sum(os.path.realpath(str(t.get("agent"))) != os.path.realpath(model) for t in trajectories)
    num_changed = sum(t.get("temperature", 1) != 1 or t.get("best_of", 1) != 1 for t in trajectories)
    if num_foreign or num_changed:
        say(f"of {len(trajectories):,} trajectories {num_foreign:,} are of another agent than --model {model}, and "
            f"{num_changed:,} not sampled at temperature 1 without --best-of: they are not samples of the model's own "
            "distribution")


def score_trajectories(trajectories, critic, job):
    """The critic's advantage of each turn, saved in advantages.jsonl; [] for a trajectory that is too long."""
    path = job.output.path / "advantages.jsonl"
    if path.exists():                                                # left by an interrupted run
        return [row["advantages"] or [] for row in read_rows(path)]
    critic.load(job.load, job.max_tokens)
    turn_scores = critic.score_turns(trajectories)
    if job.run.rank == 0:
        rows = []
        for trajectory, numbers in zip(trajectories, turn_scores):
            rows.append({"task_id": trajectory["task_id"], "sample": trajectory["sample"], "advantages": numbers})
        write_jsonl(path, rows)
    return [numbers or [] for numbers in turn_scores]


def token_examples(examples, advantages):
    """The examples that have advantages (turn_advantages). Each agent token becomes an action, so that an ActionModel
    returns a log-probability for each token."""
    ready = []
    for example, numbers in zip(examples, advantages):
        if not numbers:
            continue
        [item] = example.items
        if len(numbers) == 1:                                        # one for all turns
            numbers = numbers * num_actions(item)
        turns = [number for row in item for number in row.action_ids if number >= 0]
        tokens = torch.tensor([numbers[turn] for turn in turns])                                  # (tokens,)
        ready.append(GroupExample([token_item(item)], [], example.task_id, tokens))
    return ready


def token_item(item):
    """The item with each agent token as a separate action."""
    numbers = itertools.count()
    rows = []
    for row in item:
        action_ids = [next(numbers) if number >= 0 else -1 for number in row.action_ids]
        rows.append(row._replace(action_ids=action_ids))
    return rows


# ---------------------------------------------------------------------------------------------------------------------

def grpo_losses(action_model, batch, examples, ref_logps, clip, kl_coef):
    """clipped_losses of a micro-batch, like 04's preference_losses."""
    advantages = padded_outputs([[example.advantages] for example in examples], ref_logps.device)               # (B, M)
    log_ratios = action_model(batch) - ref_logps                     # (B, M): of each token
    losses, numbers = clipped_losses(log_ratios, advantages, batch.lengths, clip, kl_coef)
    return {"loss": losses, **numbers}


def main(argv=None):
    args = parse_args(argv)
    opened = policy.open_training(vars(args), [args.critic])
    if not opened:
        return
    job, trajectories, tokenizer, load = opened
    domain = domain_of(trajectories[0]["task"])
    if args.critic:
        critic = policy.checked_critic(args.critic, tokenizer, domain, args.reference_sees_c, job)
        common.must_read_text(critic)
        if critic.score == "value":
            raise InputError(f"{args.critic}: grpo needs a critic that outputs advantages, not values (03 --score)")
    data.fill_rewards(trajectories, job.output)
    say_whose(trajectories, args.model)
    groups = [(i,) for i in range(len(trajectories))]
    make_items = functools.partial(common.trajectory_items, tokenizer)
    examples = common.trajectory_examples(trajectories, groups, make_items, sees_c=False)
    fitting = job.fitting_indices(examples)
    examples = [examples[i] for i in fitting]
    fitting_trajectories = [trajectories[i] for i in fitting]
    job.output.begin()
    turn_scores = score_trajectories(fitting_trajectories, critic, job) if args.critic else None
    returns = [float(domain.eval_score(trajectory)) for trajectory in fitting_trajectories]
    advantages = turn_advantages(returns, turn_scores, [example.task_id for example in examples], args.signed)
    ready = token_examples(examples, advantages)
    num_long = (turn_scores or []).count([])
    counts = (f"{len(examples) - len(ready) - num_long:,} of {len(examples):,} trajectories dropped: all those of "
              f"their task are equally good; {num_long:,} more are too long for the critic (--max-tokens "
              f"{args.max_tokens})")
    if not ready:
        raise InputError(f"{args.trajectories}: no examples to train on: {counts}")
    say(counts)
    losses_of = functools.partial(grpo_losses, clip=args.clip, kl_coef=args.kl_coef)
    note_prompt(args.out, trajectories)
    policy.train_policy(load, tokenizer, ready, losses_of, job)


if __name__ == "__main__":
    run_stage(main)
