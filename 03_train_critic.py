"""Stage 3: train the turn-level critic, which sees the reference solution.

Reads   trajectories.jsonl (02) with rewards, a model.
Writes  a critic folder: a model folder with critic.json and metrics.jsonl.

The critic is a language model, started from the policy's weights, that reads c (the reference solution) before the
dialogue. The advantage of a turn is the mean log-ratio of its tokens against the initial model with the same input:

    A(o_t, a_t, c) = 1/L sum_l [ log p(a_t^l | o_t, a_t^<l, c) - log p_ref(a_t^l | o_t, a_t^<l, c) ]      (eq. 3)

trained by Bradley-Terry on pairs of trajectories of one task, the chosen one with the higher return:

    J = -log s( b sum_t A(o_t+, a_t+, c) - b sum_t A(o_t-, a_t-, c) ) + nll_coef * mean NLL of the chosen  (eq. 2)

The paper's other critics: `--no-privileged` leaves c out, `--normalize none` leaves out 1/L, and `--head` puts a linear
head on the mean of the last hidden states over a turn's tokens, 0 before training, in the place of eq. 3:

--head regression   its value is the turn's advantage, trained by eq. 2 on its sums over turns (no NLL term)
--head value        its value is the logit of the return given the dialogue up to and with the turn, and c, trained by
                    binary cross-entropy at every turn of every trajectory (those without a pair, too)

Where the agent's turns can be looked at (pages), a `--model` of the Qwen2-VL family makes a visual critic, with one of
these heads: it reads the request, what the human said last, the image of the reference (c) and that of what the agent
has made, and its head sees the mean of the last hidden states over all of these tokens. Other models read the
reference's text as c.

Pairs of `--held-out-frac` of the tasks are not trained on. Reports held-out pair accuracy; the value head compares
last-turn values.

Differs from the paper: nothing. Differs from the published code: the sum over turns of each turn's mean, where it takes
one mean over all tokens of the trajectory (`--normalize trajectory`).

    python 03_train_critic.py --trajectories out/offline.jsonl --model models/tiny --out out/critic
    torchrun --nproc-per-node 8 03_train_critic.py --trajectories trajectories.jsonl \\
        --model meta-llama/Llama-3.1-8B-Instruct --dtype bfloat16 --out critic
"""
import collections
import hashlib
import math
import pathlib

import torch
import torch.nn.functional as F

import common
from colbench import ColBenchError, domain_of
from lib import training
from lib.arguments import add_training, argument_parser, set_preset
from lib.costs import Costs
from lib.memory import dry_run
from lib.models import load_tokenizer, reads_images, weights_fingerprint, work_of
from lib.runtime import begin_output, InputError, is_done, run_stage, say, start, write_json
from lib.vision import load_processor

# ---------------------------------------------------------------------------------------------------------------------
# losses

def bradley_terry_loss(chosen_scores, rejected_scores, beta):
    """Eq. 2 without its NLL term, from scores (B,). Returns (losses, chosen_rewards, rejected_rewards), each (B,)."""
    chosen_rewards, rejected_rewards = beta * chosen_scores, beta * rejected_scores              # (B,)
    return -F.logsigmoid(chosen_rewards - rejected_rewards), chosen_rewards, rejected_rewards


def value_losses(values, labels, lengths):
    """Binary cross-entropy of returns (labels in [0, 1], (B,)) at each turn's logit (values, (B, M)), the mean over the
    turns of a trajectory (those with lengths > 0); returns (B,)."""
    exists = (lengths > 0).float()                                                                # (B, M)
    losses = F.binary_cross_entropy_with_logits(values, labels[:, None].expand_as(values), reduction="none")
    return (losses * exists).sum(1) / exists.sum(1)


def last_values(values, lengths):
    """The value of each trajectory's last turn, (B,)."""
    return values.gather(1, (lengths > 0).sum(1, keepdim=True) - 1).squeeze(1)


def is_held_out(task_id, fraction):
    """Whether a task's hash puts it into the held-out fraction; all data of a task fall on the same side."""
    return int(hashlib.sha256(f"held out {task_id}".encode()).hexdigest()[:8], 16) / 2 ** 32 < fraction


# ---------------------------------------------------------------------------------------------------------------------

# Table 5 of the paper, as far as it differs from the defaults
PRESETS = {name: {"epochs": epochs, "dtype": "bfloat16", "activation_checkpointing": True}
           for name, epochs in (("paper-backend", 4), ("paper-frontend", 8))}


def parse_args(argv=None):
    parser = argument_parser(__doc__)
    add_training(parser, max_length=8192)
    parser.set_defaults(epochs=4, batch_size=8)
    group = parser.add_argument_group("the critic")
    group.add_argument("--head", choices=["lm", "regression", "value"], default="lm",
                       help="what scores a turn, see above")
    group.add_argument("--no-privileged", action="store_true", help="leave c out")
    group.add_argument("--normalize", choices=["turn", "trajectory", "none"], default="turn", help="see above")
    group.add_argument("--held-out-frac", type=float, default=0.05, help="share of the tasks kept for the accuracy")
    set_preset(parser, PRESETS, argv)
    args = parser.parse_args(argv)
    if args.head != "lm":
        args.normalize, args.nll_coef = "none", 0.0                  # the head's input is a mean already
    return args


def main(argv=None):
    args = parse_args(argv)
    if args.dry_run:
        return dry_run(args, 1 if args.head == "value" else 2)
    runtime, inputs = start(args.seed), [args.trajectories, args.model]
    trajectories = common.read_trajectories(args.trajectories, args.num_trajectories, args.seed)
    domain = domain_of(trajectories[0]["task"])
    if is_done(args, args.out, inputs, folder=True):
        return
    common.fill_rewards(trajectories, domain, args)
    pairs = common.trajectory_pairs(trajectories, args.trajectories, args.min_gap)
    visual, show = reads_images(args.model), None
    if visual:
        common.check_visual(args, trajectories)
        tokenizer, show = load_processor(args.model), common.shower(domain, args)
        say(f"a visual critic; images are scaled to at most {tokenizer.image_processor.size['longest_edge']:,} pixels")
    else:
        tokenizer = load_tokenizer(args.model)
    held = [is_held_out(trajectory["task_id"], args.held_out_frac) for trajectory in trajectories]
    train, test = ([pair for pair in pairs if held[pair[0]] == side] for side in (False, True))
    say(f"{len(train):,} trajectory pairs to train on, {len(test):,} of other tasks held out")
    if args.head == "value":
        train = [(i,) for i in range(len(trajectories)) if not held[i]]
    if not train:
        raise InputError(f"{args.trajectories}: no examples to train on: all {len(test):,} pairs are of tasks that "
                         f"--held-out-frac {args.held_out_frac} keeps apart")
    examples, held_out = (common.trajectory_examples(trajectories, groups, tokenizer, not args.no_privileged, show)
                          for groups in (train, test))
    kept = common.drop_long(examples, args)
    examples, train = [examples[i] for i in kept], [train[i] for i in kept]
    held_out = [held_out[i] for i in common.drop_long(held_out, args, "held-out pairs", needed=False)]
    begin_output(args, args.out, inputs, folder=True)
    costs = Costs(args.out, runtime.device, folder=True)
    batch_size = args.batch_size
    batches = training.epoch_batches(len(examples), batch_size, args.epochs, args.seed)[:args.max_steps]
    steps_an_epoch = math.ceil(len(examples) / batch_size)
    say(f"{len(examples):,} examples, {len(batches):,} steps of {batch_size}")
    common.show_samples(tokenizer, [item for example in examples[:1] for item in example])

    # The reference is the critic before its first update; its log-probabilities are computed once, by the same function
    model = common.load_sharded(args.model, runtime, args, head=args.head != "lm")
    reference_fingerprint, works = weights_fingerprint(args.model), [work_of(model)]
    ref = common.reference_logps(args.out, model, examples + held_out, args, runtime)
    optimizer = training.adamw(model, args)
    checkpoints = training.Checkpoints(args.out, model, optimizer)
    first = checkpoints.load()
    log = training.StepLog(args.out, first, len(batches), args.log_every)
    model.train()
    for step in range(first, len(batches)):
        torch.manual_seed(args.seed * len(batches) + step)          # models with dropout: a resumed run draws the same
        sums = collections.Counter()
        for micro, weights in training.rank_batches(batches[step], args.micro_batch_size, runtime):
            batch = common.collate([item for i in micro for item in examples[i]], runtime.device)
            scores = model.turn_scores(batch)                                           # (2B, M) chosen, rejected, …
            shares = weights / len(batches[step])                                       # (B,)
            if args.head == "value":
                labels = torch.tensor([float(domain.outcome(trajectories[train[i][0]])) for i in micro],
                                      device=runtime.device)                            # (B,)
                loss = (value_losses(scores, labels, batch.lengths) * shares).sum()
                right = (last_values(scores, batch.lengths) > 0) == (labels > 0.5)
                numbers = {"acc": (right * shares).sum().item()}
            else:
                ref_scores = torch.nn.utils.rnn.pad_sequence([ref[i][side] for i in micro for side in (0, 1)],
                                                             batch_first=True).to(runtime.device)              # (2B, M)
                advantages = common.turn_advantages(scores, ref_scores, batch.lengths, args.normalize)         # (2B, M)
                chosen, rejected = advantages.sum(1)[0::2], advantages.sum(1)[1::2]     # (B,) sums over turns
                losses, chosen_rewards, rejected_rewards = bradley_terry_loss(chosen, rejected, args.beta)
                nll = -scores[0::2].sum(1) / batch.lengths[0::2].sum(1)                 # (B,) mean over chosen tokens
                loss = ((losses + args.nll_coef * nll) * shares).sum()
                numbers = training.preference_numbers(chosen_rewards, rejected_rewards, nll, shares)
            (loss * runtime.world_size).backward()                  # FSDP takes the ranks' mean, the batch is their sum
            sums.update(loss=loss.item(), **numbers, num_tokens=training.num_tokens(examples, micro, weights))
        numbers = training.optimizer_step(model, optimizer, sums, step, len(batches), args, runtime)
        log.step(step + 1, **numbers)
        if (step + 1) % args.save_every == 0 or (step + 1) % steps_an_epoch == 0:
            checkpoints.save(step + 1)
            costs.record(works, log.total_tokens)
    checkpoints.wait()

    settings = {"head": args.head, "visual": visual, "normalize": args.normalize, "privileged": not args.no_privileged,
                "beta": args.beta, "reference": args.model, "reference_fingerprint": reference_fingerprint}
    accuracy = None
    if held_out:
        accuracy = common.pair_accuracy(model, held_out, ref[len(examples):], settings, args.max_tokens, runtime.device)
        say(f"held-out pair accuracy: {accuracy:.3f} on {len(held_out)} pairs of tasks that were not trained on")
    else:
        say("held-out pair accuracy: not measured, no held-out pairs")
    if runtime.rank == 0:
        write_json(pathlib.Path(args.out) / "critic.json", {
            **settings, "held_out_pair_accuracy": accuracy, "num_held_out_pairs": len(held_out)})
    costs.record(works, log.total_tokens)
    training.finish_training(args.out, model, tokenizer)


if __name__ == "__main__":
    run_stage(main, ColBenchError)
