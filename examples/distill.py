"""A fork of 04: privileged self-distillation, in place of pairs.

Reads   trajectories.jsonl (02) and a model. There is no critic: the teacher is this same model, which is told c.
Writes  a model folder with metrics.jsonl and agent.json (the system prompt that it was trained with).

At each token of the agent's own turns the loss is the divergence, over the whole vocabulary, between the policy and the
model at the start with c in front.

    python -m examples.distill --trajectories out/offline.jsonl --model models/tiny --out out/distill
    torchrun --nproc-per-node 8 -m examples.distill --divergence forward …
"""
import collections
import functools

import torch
import torch.nn.functional as F

import common
from colbench import ColBenchError
from lib import data, flags, training
from lib.models import load_model, load_tokenizer, lora_config, projection_of, reads_images, sharding_of
from lib.runtime import add_costs, begin_output, InputError, is_done, run_stage, say, start
from lib.tracking import check_track, Track

# ---------------------------------------------------------------------------------------------------------------------
# loss

def token_kls(projection, hidden, teacher_projection, teacher_hidden, direction):
    """KL divergences (N,) float32 between what follows the states `hidden` (N, H) by the output projection and the
    states of a teacher by its own, over the whole vocabulary.

    "forward": KL(teacher || policy), which covers what the teacher does; "reverse": KL(policy || teacher)."""
    def kls_of(hidden, teacher_hidden):
        policy = F.log_softmax(projection.float_logits(hidden), -1)                              # (n, V)
        teacher = F.log_softmax(teacher_projection.float_logits(teacher_hidden), -1)             # (n, V)
        if direction == "forward":
            return (teacher.exp() * (teacher - policy)).sum(-1)
        return (policy.exp() * (policy - teacher)).sum(-1)
    return common.in_chunks(kls_of, projection, hidden, teacher_hidden)


class Distiller(common.Scorer):
    """A Scorer that gives the divergence from a `teacher` at each action's tokens, summed, (B, M).

    teacher: a whole model without gradients, which reads the same actions after other prompts (teacher_batch)."""

    def forward(self, batch, teacher, teacher_batch, direction):
        teacher_hidden = before_actions(teacher, teacher_batch)                                   # (N, H)
        kls = token_kls(projection_of(self.model), before_actions(self.model, batch), projection_of(teacher),
                        teacher_hidden, direction)                                                # (N,)
        return common.action_sums(batch, kls)


def before_actions(model, batch):
    """The last hidden state of the token before each action token, (N, H)."""
    r, t = common.action_tokens(batch)
    return common.hidden_states(model, batch)[r, batch.previous[r, t]]


# ---------------------------------------------------------------------------------------------------------------------
# examples

# common.Example, and the items that the teacher reads in place of `items`
TaughtExample = collections.namedtuple("TaughtExample", "items pairs task_id informed")


def distill_examples(trajectories, tokenizer, args):
    """Examples of all trajectories, without c and, for the teacher, with c; the latter are longer."""
    groups = [(i,) for i in range(len(trajectories))]
    plain = common.trajectory_examples(trajectories, groups, tokenizer, sees_c=False)
    informed = common.trajectory_examples(trajectories, groups, tokenizer, sees_c=True)
    fitting = training.fitting_numbers(informed, args.max_length)
    if not fitting:
        raise InputError(f"{args.trajectories}: no examples to train on: all {len(plain):,} are longer than "
                         f"--max-length {args.max_length}")
    return [TaughtExample(*plain[i], informed[i].items) for i in fitting]


# ---------------------------------------------------------------------------------------------------------------------

def train(scorer, examples, teacher, args, run):
    """Train the scorer's model on the examples, from the last saved state."""
    batches = training.epoch_batches(len(examples), args.batch_size, args.epochs, args.seed)[:args.max_steps]
    say(f"{len(examples):,} examples, {len(batches):,} steps of {args.batch_size}")
    optimizer = training.adamw(scorer, args.lr)
    checkpoints = training.Checkpoints(args.out, scorer, optimizer)
    first = checkpoints.load()
    log = training.StepLog(args.out, first, len(batches), functools.partial(Track, args.track, args.out, vars(args)))
    scorer.train()
    for step in range(first, len(batches)):
        torch.manual_seed(args.seed * len(batches) + step)          # models with dropout: a resumed run draws the same
        batch_examples = [examples[i] for i in batches[step]]
        num_terms = sum(map(common.num_action_tokens, batch_examples))            # the step's loss is a mean over these
        sums = collections.Counter()
        for micro, weights in training.rank_batches(batches[step], examples, args.micro_batch_size, run):
            micro_examples = [examples[i] for i in micro]
            batch = scorer.collate(common.items_of(micro_examples), run.device)
            informed = [item for example in micro_examples for item in example.informed]
            kls = scorer(batch, teacher, scorer.collate(informed, run.device), args.divergence)                # (B, M)
            losses = kls.sum(1)                                     # (B,)
            weights = weights / num_terms                           # (B,)
            loss = (losses * weights).sum()
            (loss * run.world_size).backward()                      # FSDP takes the ranks' mean, the batch is their sum
            sums["num_tokens"] += training.num_tokens(micro_examples, weights)
            sums.update(training.weighted_sums({"loss": losses}, weights))
        done = step + 1
        lr = training.learning_rate(step, len(batches), args.lr)
        where = f"{args.out}: step {done} of {len(batches)}"
        tasks = {example.task_id for example in batch_examples}
        log.step(done, **training.optimizer_step(scorer, optimizer, sums, lr, where, tasks))
        if done % args.save_every == 0 or done == len(batches):
            checkpoints.save(done)
            add_costs(args.out, folder=True, trained_tokens=log.take_tokens())
    checkpoints.wait()


def parse_args(argv=None):
    parser = flags.argument_parser(__doc__)
    parser.add_argument("--method", choices=["distill"], default="distill", help="the only one")
    flags.add_training(parser, max_length=16384)
    parser.add_argument("--epochs", type=flags.positive_int, default=1, help="passes over the examples")
    parser.add_argument("--batch-size", type=flags.positive_int, default=32, help="trajectories a step")
    parser.add_argument("--divergence", choices=["forward", "reverse"], default="reverse", help="see token_kls")
    args = parser.parse_args(argv)
    if args.dry_run:
        parser.error("--dry-run goes with 04_train_policy.py")
    return args


def main(argv=None):
    args = parse_args(argv)
    run = start(args.seed)
    trajectories = data.read_trajectories(args.trajectories, args.num_trajectories, args.seed)
    inputs = [args.trajectories, args.model]
    if is_done(vars(args), args.out, inputs, folder=True):
        return
    check_track(args.track)
    if reads_images(args.model):
        raise InputError(f"{args.model}: policies read and write text alone; a model that sees can be a critic")
    tokenizer = load_tokenizer(args.model)
    lora = lora_config(args.model, args.lora, args.lora_targets, args.merge)
    examples = distill_examples(trajectories, tokenizer, args)
    begin_output(vars(args), args.out, inputs, folder=True)
    training.show_samples(tokenizer, examples[0])

    scorer = common.load_scorer(args.model, run, sharding_of(args), lora, kind=Distiller)
    teacher = load_model(args.model, run.device, args.dtype)[0].eval().requires_grad_(False)       # whole, on each rank
    common.check_positions([item for example in examples for item in example.informed], scorer.model)
    train(scorer, examples, teacher, args, run)
    common.note_prompt(args.out, trajectories)
    training.finish_training(args.out, scorer, tokenizer, args.merge)
    add_costs(args.out, folder=True)


if __name__ == "__main__":
    run_stage(main, ColBenchError)
