"""Stage 3: train the turn-level critic, which sees the solution c.

Reads   trajectories.jsonl (02) with rewards, a model.
Writes  a model folder with critic.json (how it scores, "untrained_pair_accuracy", "held_out_pair_accuracy") and
        metrics.jsonl: {"step", "loss", "acc", "margin", "chosen", "nll", "lr", "gnorm", "tokens", "tokens_per_s",
        "peak_memory_mb", "seconds"}.

A turn's advantage is the mean log-ratio of its tokens against the initial model. Both models read c before the
first message (Domain.SOLUTION_TEXT):
    eq. 3   A(o_t, a_t, c) = 1/L sum_l [ log p(a_t^l | o_t, a_t^<l, c) - log p_ref(a_t^l | o_t, a_t^<l, c) ]
Bradley-Terry on pairs of trajectories of one task; the chosen one has the higher reward. Each failure gets a success of
its task, round-robin. With graded rewards any two that differ by --min-return-gap form a pair.
    eq. 2   -log s( b sum_t A(o_t+, a_t+, c) - b sum_t A(o_t-, a_t-, c) ) + nll_coef * mean NLL of the chosen
s: the sigmoid; b: --beta (.1); --nll-coef .01; NLL: a mean over the agent's tokens. o_t: the dialogue so far.

--normalize turn        L: the tokens of the turn (default)
--normalize trajectory  L: all agent tokens of the trajectory, as in the published code
--normalize none        L: 1
--reference-sees-c no   p_ref does not read c. An untrained A is then what c adds to log p's mean, not 0.
                        04 has its own flag of this name, for ranking; its default is this one's.
--critic-sees-c no      neither p nor p_ref reads c
--score regression      a linear head on the mean of a turn's last hidden states outputs its advantage; trained by eq. 2
--score value           a head predicts the trajectory's return after each turn, as a logit; trained by binary
                        cross-entropy
An example is a pair of trajectories; with --score value a single one. 5 % of the tasks (the paper gives no figure)
are held out to measure pair accuracy.
A visual critic, for pages: a --model of the Qwen2-VL family with --score regression or value. It reads the request,
the user's last message, and images of c and of the agent's page; its head sees the mean over all of these tokens.

    python 03_train_critic.py --trajectories out/offline.jsonl --model models/tiny --beta 1 --lr 3e-4 --out out/critic
    torchrun --nproc-per-node 8 03_train_critic.py --trajectories trajectories.jsonl \\
        --model meta-llama/Llama-3.1-8B-Instruct --dtype bfloat16 --out critic
"""
import argparse

from lib import flags

# ---------------------------------------------------------------------------------------------------------------------
# arguments

# Settings of the paper (its text and table 5) and of the published code (docs/reproduce.md)
PAPER = {"dtype": "bfloat16", "activation_checkpointing": True, "epochs": 4, "batch_size": 8, "lr": 2e-7, "beta": 0.1,
         "score": "logratio", "normalize": "turn", "nll_coef": 0.01, "critic_sees_c": True, "reference_sees_c": True,
         "held_out_frac": 0.05}
PRESETS = {"paper-backend": PAPER,
           "paper-frontend": {**PAPER, "epochs": 8, "score": "regression"},
           "published-backend": {**PAPER, "normalize": "trajectory", "nll_coef": 0.0, "held_out_frac": 0.03}}


def parse_args(argv=None):
    parser = flags.argument_parser(__doc__)
    flags.add_training(parser, max_length=8192, epochs=4, batch_size=8)
    group = parser.add_argument_group("the critic")
    group.add_argument("--score", choices=["logratio", "regression", "value"], default="logratio",
                       help="how a turn is scored, see above")
    group.add_argument("--critic-sees-c", type=flags.yes_or_no, default=True, metavar="yes|no",
                       help="whether the critic reads c (default: yes)")
    group.add_argument("--reference-sees-c", type=flags.yes_or_no, default=True, metavar="yes|no",
                       help="whether eq. 3's reference model reads c, as in the paper (default: yes)")
    group.add_argument("--normalize", choices=["turn", "trajectory", "none"], default="turn",
                       help="the L of eq. 3, see above")
    group.add_argument("--held-out-frac", type=flags.share_flag, default=0.05,
                       help="share of the tasks held out, for the pair accuracy")
    flags.set_preset(parser, PRESETS, argv)
    args = parser.parse_args(argv)
    if not args.reference_sees_c and (not args.critic_sees_c or args.score != "logratio"):
        parser.error("--reference-sees-c no needs --score logratio and a critic that sees c: only then are prompts "
                     "with and without c compared")
    if args.score != "logratio":
        given = parser.parse_args(argv, argparse.Namespace(normalize=None, nll_coef=None))       # no defaults
        if given.normalize not in (None, "none") or given.nll_coef:
            parser.error(f"--normalize and --nll-coef need --score logratio: a {args.score} head sees a mean over the "
                         "tokens and outputs no probability")
        args.normalize, args.nll_coef = "none", 0.0
    return args


if __name__ == "__main__":
    parse_args()                    # answers --help and wrong flags before the imports below, which take seconds

import functools
import hashlib
import pathlib

import torch
import torch.nn.functional as F

import common
from colbench import domain_of
from lib import beforehand, data, training
from lib.load import load_tokenizer, reads_images, weights_fingerprint
from lib.logps import action_lengths, action_outputs, items_of, padded_outputs, reference_logps
from lib.memory import dry_run
from lib.runtime import InputError, run_stage, say, write_json
from lib.vision import critic_processor, VisualCritic

# ---------------------------------------------------------------------------------------------------------------------
# losses

def bradley_terry_losses(advantages, logps, lengths, beta, nll_coef):
    """Eq. 2 of pairs of trajectories: (losses (P,), {name: (P,)} for the log). Rows alternate: chosen, rejected.

    advantages   (2P, M) eq. 3 of each turn
    logps        (2P, M) each turn's log-probability under the critic, or a head's output (nll_coef is then 0)
    lengths      (2P, M) each turn's number of tokens; 0: no such turn"""
    scores = advantages.sum(1)                                       # (2P,) of trajectories: sums over turns
    chosen = beta * scores[0::2]                                     # (P,) implicit rewards
    rejected = beta * scores[1::2]                                   # (P,)
    nll = -logps[0::2].sum(1) / lengths[0::2].sum(1)                 # (P,) a mean over the chosen one's agent tokens
    losses = -F.logsigmoid(chosen - rejected) + nll_coef * nll       # (P,)
    return losses, {"chosen": chosen, "rejected": rejected, "nll": nll}


def value_losses(values, labels, lengths):
    """{"loss", "acc"}, (B,) each. loss: binary cross-entropy of each turn's logit (values, (B, M)) with the return
    (labels in [0, 1], (B,)), averaged over the turns (lengths > 0). acc: whether the last value is right."""
    exists = lengths > 0                                                                          # (B, M)
    num_turns = exists.sum(1)                                                                     # (B,)
    turn_labels = labels[:, None].expand_as(values)                                               # (B, M)
    losses = F.binary_cross_entropy_with_logits(values, turn_labels, reduction="none")            # (B, M)
    is_right = (last_values(values, lengths) > 0) == (labels > 0.5)                               # (B,)
    return {"loss": (losses * exists).sum(1) / num_turns, "acc": is_right}


def last_values(values, lengths):
    """The value after the last turn of each trajectory, (B,)."""
    num_turns = (lengths > 0).sum(1, keepdim=True)                                                # (B, 1)
    return values.gather(1, num_turns - 1).squeeze(1)


def is_held_out(task_id, fraction):
    """Whether a task is held out, by a hash of its id; all its data share a side."""
    digest = hashlib.sha256(f"held out {task_id}".encode(errors="backslashreplace"))
    number = int(digest.hexdigest()[:8], 16)                         # below 2 ** 32
    return number / 2 ** 32 < fraction


def split_groups(trajectories, needs_pairs, min_gap, held_out_frac, path):
    """(groups of trajectory numbers to train on, pairs of held-out tasks).

    A group is a pair (chosen, rejected) or, if not needs_pairs, a single trajectory. path: of the file, for errors."""
    pairs = common.trajectory_pairs(trajectories, path, needs_pairs, min_gap)
    data.say_pairs(trajectories, pairs)
    groups = pairs if needs_pairs else [(number,) for number in range(len(trajectories))]
    held_out = {t["task_id"] for t in trajectories if is_held_out(t["task_id"], held_out_frac)}
    trained = [group for group in groups if trajectories[group[0]]["task_id"] not in held_out]
    held_out_pairs = [pair for pair in pairs if trajectories[pair[0]]["task_id"] in held_out]
    what = "trajectory pairs" if needs_pairs else "trajectories"
    say(f"{len(trained):,} {what} to train on, {len(held_out_pairs):,} pairs of other tasks held out")
    if not trained:
        raise InputError(f"{path}: no examples to train on: --held-out-frac {held_out_frac} holds out the tasks of all "
                         f"{len(groups):,} {what}")
    return trained, held_out_pairs


# ---------------------------------------------------------------------------------------------------------------------

def train(action_model, examples, ref_logps, returns, critic, job):
    """Train the model on the examples, from the last saved state.

    ref_logps   reference_logps of the examples, for a log-ratio critic
    returns     of each example's first trajectory, at least 0: the targets of --score value"""
    loop = training.Loop(action_model, examples, job, train_mode=critic.score == "value")
    for step, batch_numbers in loop.steps():
        num_terms = len(batch_numbers)                                    # the step's loss is a mean over these
        for micro, weights in training.rank_batches(batch_numbers, examples, job):
            micro_examples = [examples[i] for i in micro]
            batch = action_model.collate(items_of(micro_examples), job.run.device)
            outputs = action_model(batch)        # (B, M) of turns: log-probabilities, or a head's; of P pairs B = 2P
            if critic.score == "value":
                labels = torch.tensor([returns[i] for i in micro], device=outputs.device)          # (B,)
                terms = value_losses(outputs, labels, batch.lengths)                               # (B,) each
            else:
                advantages = outputs                                # a regression head outputs advantages
                if critic.score == "logratio":
                    micro_ref_logps = padded_outputs([ref_logps[i] for i in micro], outputs.device)        # (B, M)
                    # eq. 3, (B, M)
                    advantages = common.action_advantages(outputs, micro_ref_logps, batch.lengths, critic.normalize)
                losses, metrics = bradley_terry_losses(advantages, outputs, batch.lengths, job.beta, job.nll_coef)
                terms = {"loss": losses, **training.preference_metrics(**metrics, dtype=job.sharding.dtype)}    # (P,)
                if critic.score == "regression":
                    del terms["nll"]                                # a head's outputs are not log-probabilities
            loop.backward(terms, weights / num_terms)
        loop.update(step)


def pair_accuracy(action_model, examples, ref_logps, critic, max_tokens):
    """Print and return the share of held-out trajectory pairs in which the chosen one scores higher; a tie is half
    right. None without such pairs. The score is the sum of a trajectory's advantages, or the value after its last turn.
    """
    if not examples:
        say("held-out pair accuracy: not measured, no held-out pairs (with few tasks raise --held-out-frac)")
        return None
    items = items_of(examples)                                                             # chosen, rejected, chosen, …
    lengths = action_lengths(items)                                                        # (2P, M)
    outputs = padded_outputs([action_outputs(action_model, items, max_tokens)])            # (2P, M)
    if critic.score == "value":
        scores = last_values(outputs, lengths)                                             # (2P,)
    else:
        advantages = outputs                                                               # (2P, M)
        if critic.score == "logratio":
            advantages = common.action_advantages(outputs, padded_outputs(ref_logps), lengths, critic.normalize)
        scores = advantages.sum(1)                                                         # (2P,)
    gaps = scores[0::2] - scores[1::2]                                                     # (P,)
    accuracy = ((gaps > 0).sum() + 0.5 * (gaps == 0).sum()).item() / len(gaps)
    say(f"held-out pair accuracy: {accuracy:.3f} on {len(gaps)} pairs of held-out tasks")
    return accuracy


def gaps_of_c(logps_with_c, logps_without_c, examples, normalize):
    """How much more c raises the score of the chosen trajectory than that of the rejected one, (P,), before training.
    logps: reference_logps of pairs. The score adds up the turns' log-probabilities, each by `normalize`."""
    lengths = action_lengths(items_of(examples))                                           # (2P, M)
    gains = common.action_advantages(padded_outputs(logps_with_c), padded_outputs(logps_without_c), lengths, normalize)
    scores = gains.sum(1)                                                                  # (2P,)
    return scores[0::2] - scores[1::2]


# ---------------------------------------------------------------------------------------------------------------------

def main(argv=None):
    args = parse_args(argv)
    job = training.Job(vars(args), inputs=[])
    needs_pairs = args.score != "value"
    if args.dry_run:
        return dry_run(job, rows_an_example=2 if needs_pairs else 1)
    trajectories = data.read_trajectories(args.trajectories, args.num_trajectories, args.seed)
    domain = domain_of(trajectories[0]["task"])
    if job.output.is_done():
        return
    data.fill_rewards(trajectories, job.output)
    trained_groups, held_out_pairs = split_groups(trajectories, needs_pairs, args.min_return_gap, args.held_out_frac,
                                                  args.trajectories)
    groups = trained_groups + held_out_pairs                         # examples[:num_trained] are trained on

    # the critic decides how a trajectory becomes tokens
    if reads_images(args.model):
        processor = critic_processor(args.model, args.score, domain, args.trajectories)
        show = functools.partial(data.show_documents, domain, job.output)
        critic = VisualCritic(args.out, args.score, domain, show, args.critic_sees_c, processor)
    elif args.score == "logratio":
        critic = common.LogRatioCritic(args.out, args.model, load_tokenizer(args.model), args.critic_sees_c,
                                       args.reference_sees_c, args.normalize)
    else:
        critic = common.HeadCritic(args.out, args.score, load_tokenizer(args.model), args.critic_sees_c)
    examples = common.trajectory_examples(trajectories, groups, critic.trajectory_items, args.critic_sees_c)
    fitting = job.fitting_indices(examples)
    examples, groups = [examples[i] for i in fitting], [groups[i] for i in fitting]
    num_trained = sum(number < len(trained_groups) for number in fitting)
    if not num_trained:
        raise InputError(f"{args.trajectories}: no examples to train on fit --max-length {args.max_length}")
    job.output.begin()

    action_model = job.load(args.model, lora=job.lora, kind=critic.model_class)
    action_model.check_positions(items_of(examples))
    training.show_samples(critic.tokenizer, examples[0])
    ref_logps, untrained_accuracy = [None] * len(examples), None
    if args.score == "logratio":                                     # p_ref is this model before its first update
        ref_logps = reference_logps(job.output.path / "ref.pt", action_model, examples, job.max_tokens)
    if args.score == "logratio" and args.critic_sees_c:
        plain_examples = common.trajectory_examples(trajectories, groups, critic.trajectory_items, sees_c=False)
        plain_logps = reference_logps(job.output.path / "ref_plain.pt", action_model, plain_examples, job.max_tokens)
        gaps = gaps_of_c(ref_logps, plain_logps, examples, args.normalize)
        untrained_accuracy = beforehand.untrained_pair_accuracy([example.task_id for example in examples], gaps)
        if not args.reference_sees_c:
            ref_logps = plain_logps                                  # without c
    returns = [max(0.0, float(domain.eval_score(trajectories[first]))) for first, *_ in groups]
    train(action_model, examples[:num_trained], ref_logps, returns, critic, job)    # the others are held out

    accuracy = pair_accuracy(action_model, examples[num_trained:], ref_logps[num_trained:], critic, job.max_tokens)
    if job.run.rank == 0:
        write_json(pathlib.Path(args.out) / "critic.json", {
            **{name: getattr(args, name) for name in ("score", "normalize", "critic_sees_c", "reference_sees_c")},
            "visual": isinstance(critic, VisualCritic),
            "beta": args.beta,
            "reference": args.model,
            "reference_fingerprint": weights_fingerprint(args.model),
            "prompt_form": common.prompt_form(critic, domain),
            "untrained_pair_accuracy": untrained_accuracy,
            "held_out_pair_accuracy": accuracy,
            "num_held_out_pairs": len(examples) - num_trained})
    training.finish_training(job, action_model, critic.tokenizer)


if __name__ == "__main__":
    run_stage(main)
