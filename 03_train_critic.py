"""Stage 3: train the turn-level critic, which sees the reference solution c.

Reads   trajectories.jsonl (02) with rewards, a model.
Writes  a critic folder: a model folder with critic.json and metrics.jsonl.

A turn's advantage is the mean log-ratio of its tokens against the initial model, both with c before the dialogue:
    eq. 3   A(o_t, a_t, c) = 1/L sum_l [ log p(a_t^l | o_t, a_t^<l, c) - log p_ref(a_t^l | o_t, a_t^<l, c) ]
Bradley-Terry on pairs of trajectories of one task, the chosen one with the higher return:
    eq. 2   -log s( b sum_t A(o_t+, a_t+, c) - b sum_t A(o_t-, a_t-, c) ) + nll_coef * mean NLL of the chosen
L: tokens of the turn; s: the sigmoid; b: --beta.

--reference blind   p_ref does not read c: log p(a|o, c) - log p_ref(a|o). Before the first step A is how much likelier
                    c makes a turn, not 0. (04 has a flag of this name for ranking alone.)
--no-privileged     leaves c out
--normalize none    leaves out 1/L (trajectory: one mean over all agent tokens, as in the published code)
--head regression   a linear head on the mean of a turn's last hidden states gives its advantage, trained by eq. 2
--head value        the head gives the logit of the return after each turn of every trajectory, trained by binary
                    cross-entropy
Reports the pair accuracy on tasks that are held out, by default 5 % of them; otherwise nothing differs from the paper.
A visual critic, for pages: a --model of the Qwen2-VL family with one of these heads. It reads the request, what the
human said last, and the images of c and of what the agent has made; its head sees the mean over all of these tokens.

    python 03_train_critic.py --trajectories out/offline.jsonl --model models/tiny --out out/critic
    torchrun --nproc-per-node 8 03_train_critic.py --trajectories trajectories.jsonl \\
        --model meta-llama/Llama-3.1-8B-Instruct --dtype bfloat16 --out critic
"""
import collections
import functools
import hashlib
import math
import pathlib

import torch
import torch.nn.functional as F

import common
from colbench import ColBenchError, domain_of
from lib import training
from lib.costs import Costs
from lib.flags import add_training, argument_parser, positive_int, REFERENCES, set_preset, share_flag
from lib.memory import dry_run
from lib.models import load_tokenizer, lora_config, reads_images, Sharding, weights_fingerprint, work_of
from lib.runtime import begin_output, InputError, is_done, run_stage, say, start, write_json
from lib.tracking import check_track, Track
from lib.vision import check_visual_critic, load_processor

# ---------------------------------------------------------------------------------------------------------------------
# losses

def bradley_terry_loss(chosen_scores, rejected_scores, beta):
    """Eq. 2 without its NLL term, from scores of trajectories (P,). Returns (losses, chosen_rewards, rejected_rewards),
    each (P,)."""
    chosen_rewards = beta * chosen_scores                                                         # (P,)
    rejected_rewards = beta * rejected_scores                                                     # (P,)
    return -F.logsigmoid(chosen_rewards - rejected_rewards), chosen_rewards, rejected_rewards


def value_losses(values, labels, lengths):
    """Binary cross-entropy of returns (labels in [0, 1], (B,)) at each turn's logit (values, (B, M)), the mean over the
    turns of a trajectory (those with lengths > 0); returns (B,)."""
    exists = (lengths > 0).float()                                                                # (B, M)
    turn_labels = labels[:, None].expand_as(values)                                               # (B, M)
    losses = F.binary_cross_entropy_with_logits(values, turn_labels, reduction="none")            # (B, M)
    return (losses * exists).sum(1) / exists.sum(1)


def last_values(values, lengths):
    """The value of each trajectory's last turn, (B,)."""
    num_turns = (lengths > 0).sum(1, keepdim=True)                                                # (B, 1)
    return values.gather(1, num_turns - 1).squeeze(1)


def batch_loss(values, ref_values, lengths, shares, args):
    """Eq. 2 over a micro-batch of pairs of trajectories. Returns (loss, numbers for the log).

    values, ref_values   of each turn, under critic and reference, (2P, M): its log-probability (common.action_logps)
                         or, of a head, its number. The chosen trajectory of a pair, then its rejected one, and so on
    lengths              the turns' numbers of tokens, (2P, M)
    shares               of each pair in the step's loss, (P,)"""
    advantages = common.action_advantages(values, ref_values, lengths, args.normalize)              # (2P, M), eq. 3
    scores = advantages.sum(1)                                       # (2P,) of trajectories: sums over turns
    chosen, rejected = scores[0::2], scores[1::2]                                                 # (P,)
    losses, chosen_rewards, rejected_rewards = bradley_terry_loss(chosen, rejected, args.beta)
    # Of a head these are no log-probabilities; nll_coef is then 0 (parse_args), and "nll" is not logged.
    chosen_logps = values[0::2].sum(1)                                                            # (P,)
    chosen_tokens = lengths[0::2].sum(1)                                                          # (P,)
    nll = -chosen_logps / chosen_tokens                                                           # (P,)
    loss = ((losses + args.nll_coef * nll) * shares).sum()
    numbers = training.preference_numbers(chosen_rewards, rejected_rewards, nll, shares, args.dtype)
    if args.head != "lm":
        del numbers["nll"]
    return loss, numbers


def value_batch_loss(values, labels, lengths, shares):
    """The value head's loss over a micro-batch of trajectories. Returns (loss, numbers for the log).
    labels: their returns, (B,)."""
    loss = (value_losses(values, labels, lengths) * shares).sum()
    is_right = (last_values(values, lengths) > 0) == (labels > 0.5)                               # (B,)
    return loss, {"acc": (is_right * shares).sum().item()}


def is_held_out(task_id, fraction):
    """Whether a task's hash puts it into the held-out fraction; all data of a task fall on the same side."""
    digest = hashlib.sha256(f"held out {task_id}".encode(errors="backslashreplace"))
    number = int(digest.hexdigest()[:8], 16)                         # below 2 ** 32
    return number / 2 ** 32 < fraction


# ---------------------------------------------------------------------------------------------------------------------

# Table 5 of the paper, as far as it differs from the defaults
PRESETS = {name: {"epochs": epochs, "dtype": "bfloat16", "activation_checkpointing": True}
           for name, epochs in (("paper-backend", 4), ("paper-frontend", 8))}


def parse_args(argv=None):
    parser = argument_parser(__doc__)
    add_training(parser, max_length=8192)
    parser.add_argument("--epochs", type=positive_int, default=4, help="passes over the examples")
    parser.add_argument("--batch-size", type=positive_int, default=8, help="examples a step, over all ranks: pairs of "
                        "trajectories; with --head value trajectories")
    group = parser.add_argument_group("the critic")
    group.add_argument("--head", choices=["lm", "regression", "value"], default="lm",
                       help="what scores a turn, see above")
    group.add_argument("--no-privileged", action="store_true", help="leave c out")
    group.add_argument("--reference", choices=REFERENCES, default="informed", help="informed: the reference of eq. 3 "
                       "reads c, as the paper prints it; blind: it reads the dialogue alone")
    group.add_argument("--normalize", choices=["turn", "trajectory", "none"], default="turn", help="see above")
    group.add_argument("--held-out-frac", type=share_flag, default=0.05,
                       help="share of the tasks kept for the accuracy")
    set_preset(parser, PRESETS, argv)
    args = parser.parse_args(argv)
    if args.reference == "blind" and (args.no_privileged or args.head != "lm"):
        parser.error("--reference blind goes with --head lm, without --no-privileged: no other critic compares prompts "
                     "with c and without")
    if args.head != "lm":
        args.normalize, args.nll_coef = "none", 0.0                  # a head sees a mean, and gives no probability
    return args


def read_pairs(trajectories, args):
    """(groups of trajectory numbers to train on, pairs of tasks that are held out).

    A group is a pair (chosen, rejected); with --head value, which learns from trajectories one by one, a single one."""
    pairs = common.trajectory_pairs(trajectories, args.trajectories, needed=args.head != "value")
    groups, what = pairs, "trajectory pairs"
    if args.head == "value":
        groups, what = [(number,) for number in range(len(trajectories))], "trajectories"

    def is_apart(group):
        return is_held_out(trajectories[group[0]]["task_id"], args.held_out_frac)

    train = [group for group in groups if not is_apart(group)]
    test = [pair for pair in pairs if is_apart(pair)]
    say(f"{len(train):,} {what} to train on, {len(test):,} pairs of other tasks held out")
    if not train:
        raise InputError(f"{args.trajectories}: no examples to train on: all {len(test):,} pairs are of tasks that "
                         f"--held-out-frac {args.held_out_frac} keeps apart")
    return train, test


def critic_examples(trajectories, groups, tokenizer, show, args, needed=True):
    """Make examples of groups of trajectory numbers. Returns (groups, examples, ref_examples) of those that are short
    enough. ref_examples: what the reference reads, the same or, where it is blind, the same without c.
    needed: InputError where none is left."""
    form = critic_form(args)
    examples = common.trajectory_examples(trajectories, groups, tokenizer, form["privileged"], show, args.max_length)
    if needed:
        fitting = training.fitting_numbers(examples, args.max_length, "examples to train on", args.trajectories)
    else:
        fitting = training.fitting_numbers(examples, args.max_length, "held-out pairs")
    groups = [groups[i] for i in fitting]
    examples = [examples[i] for i in fitting]
    ref_examples = common.reference_examples(form, examples, trajectories, groups, tokenizer)
    return groups, examples, ref_examples


def critic_form(args):
    """The part of critic.json that scores depend on."""
    return {"head": args.head, "normalize": args.normalize, "privileged": not args.no_privileged,
            "reference_sees": args.reference}


def open_visual(domain, args):
    """(processor, show) of a model that reads images: `show` renders what it is shown (common.show_documents)."""
    check_visual_critic(args, domain)
    processor = load_processor(args.model)
    say(f"a visual critic; images are scaled to at most {processor.image_processor.size['longest_edge']:,} pixels")
    world_flags = common.world_flags(args)
    return processor, common.renderer(domain, args.out, world_flags)


def train(scorer, examples, targets, args, run, costs):
    """Train the scorer's model on the examples, from the last checkpoint.
    targets: of each example what the reference says of its turns (common.reference_logps); with --head value the
    return of its trajectory."""
    batches = training.epoch_batches(len(examples), args.batch_size, args.epochs, args.seed)[:args.max_steps]
    steps_an_epoch = math.ceil(len(examples) / args.batch_size)
    say(f"{len(examples):,} examples, {len(batches):,} steps of {args.batch_size}")
    optimizer = training.adamw(scorer, args.lr)
    checkpoints = training.Checkpoints(args.out, scorer, optimizer)
    first = checkpoints.load()
    open_track = functools.partial(Track, args.track, args.out, vars(args))
    log = training.StepLog(args.out, first, len(batches), args.log_every, open_track)
    scorer.train()
    for step in range(first, len(batches)):
        torch.manual_seed(args.seed * len(batches) + step)          # models with dropout: a resumed run draws the same
        batch_examples = [examples[i] for i in batches[step]]
        sums = collections.Counter()
        for micro, weights in training.rank_batches(batches[step], examples, args.micro_batch_size, run):
            micro_examples = [examples[i] for i in micro]
            batch = common.collate(common.items_of(micro_examples), run.device)
            values = scorer(batch)                                  # (B, M): a value for each turn
            shares = weights / len(batch_examples)                  # (examples,)
            if args.head == "value":
                labels = torch.tensor([targets[i] for i in micro], device=run.device)              # (examples,)
                loss, numbers = value_batch_loss(values, labels, batch.lengths, shares)
            else:
                ref_values = common.padded_outputs([targets[i] for i in micro], run.device)        # (B, M)
                loss, numbers = batch_loss(values, ref_values, batch.lengths, shares, args)
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
    if args.dry_run:
        return dry_run(args, args.batch_size, common.token_logps, 1 if args.head == "value" else 2)
    run = start(args.seed)
    trajectories = common.read_trajectories(args.trajectories, args.num_trajectories, args.seed)
    domain = domain_of(trajectories[0]["task"])
    inputs = [args.trajectories, args.model]
    if is_done(vars(args), args.out, inputs, folder=True):
        return
    lora = lora_config(args.model, args.lora, args.lora_alpha, args.lora_targets, args.merge)
    check_track(args.track)
    world_flags = common.world_flags(args)
    common.fill_rewards(trajectories, common.scoring_world(domain, args.out, world_flags))
    train_groups, test_groups = read_pairs(trajectories, args)
    visual = reads_images(args.model)
    if visual:
        tokenizer, show = open_visual(domain, args)
        begin_output(vars(args), args.out, inputs, folder=True)        # its screenshots are drawn beside it
    else:
        tokenizer, show = load_tokenizer(args.model), None
    train_groups, examples, ref_examples = critic_examples(trajectories, train_groups, tokenizer, show, args)
    _, test_examples, ref_test_examples = critic_examples(trajectories, test_groups, tokenizer, show, args,
                                                          needed=False)
    if not visual:
        begin_output(vars(args), args.out, inputs, folder=True)
    costs = Costs(args.out, run.device)
    training.show_samples(tokenizer, examples[0])

    # The reference is this model before its first update; its log-probabilities are computed once, by the same function
    sharding = Sharding(args.dtype, args.replicate, args.activation_checkpointing, args.out, args.seed)
    scorer = common.load_scorer(args.model, run, sharding, lora, has_head=args.head != "lm")
    common.check_positions(common.items_of(examples + test_examples), scorer.model)
    costs.trained = work_of(scorer.model)
    critic = {**critic_form(args), "visual": visual, "beta": args.beta, "reference": args.model,
              "reference_fingerprint": weights_fingerprint(args.model),
              "held_out_pair_accuracy": None, "num_held_out_pairs": len(test_examples)}
    all_ref_examples = ref_examples + ref_test_examples
    ref_values = common.reference_logps(args.out, scorer, all_ref_examples, args.max_tokens, run.device)
    if args.head == "value":
        targets = [float(domain.outcome(trajectories[number])) for [number] in train_groups]
    else:
        targets = ref_values[:len(examples)]
    train(scorer, examples, targets, args, run, costs)
    if test_examples:
        critic["held_out_pair_accuracy"] = accuracy = common.pair_accuracy(
            scorer, test_examples, ref_values[len(examples):], critic, args.max_tokens, run.device)
        say(f"held-out pair accuracy: {accuracy:.3f} on {len(test_examples)} pairs of tasks that were not trained on")
    else:
        say("held-out pair accuracy: not measured, no held-out pairs")
    if run.rank == 0:
        write_json(pathlib.Path(args.out) / "critic.json", critic)
    training.finish_training(args.out, scorer, tokenizer, args.merge)


if __name__ == "__main__":
    run_stage(main, ColBenchError)
