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
import importlib

import torch.nn.functional as F

import common
from colbench import ColBenchError
from lib import flags, training
from lib.load import load_model, max_positions, projection_of
from lib.runtime import run_stage
from lib.scorer import action_sums, hidden_states, in_chunks

policy = importlib.import_module("04_train_policy")

# ---------------------------------------------------------------------------------------------------------------------
# loss

def token_kls(projection, hidden, teacher_projection, teacher_hidden, direction):
    """KL divergences (N,) float32 between what follows the states `hidden` (N, H) by the output projection and the
    states of a teacher by its own, over the whole vocabulary.

    "forward": KL(teacher || policy), which covers what the teacher does; "reverse": KL(policy || teacher)."""
    def kls_of(logits, teacher_hidden):
        logps = F.log_softmax(logits, -1)                                                        # (n, V)
        teacher_logps = F.log_softmax(teacher_projection.logits(teacher_hidden), -1)       # (n, V)
        if direction == "forward":
            return (teacher_logps.exp() * (teacher_logps - logps)).sum(-1)
        return (logps.exp() * (logps - teacher_logps)).sum(-1)
    return in_chunks(kls_of, projection, hidden, teacher_hidden)


def distill_losses(scorer, batch, examples, start_logps, args):
    """The divergence from the teacher at all tokens of each example: {"loss": (examples,)}, as 04's losses_of."""
    teacher = load_teacher(args.model, batch.ids.device, args.dtype)
    informed = [item for example in examples for item in example.informed]
    teacher_batch = scorer.collate(informed, batch.ids.device)
    teacher_hidden = before_actions(hidden_states(teacher, teacher_batch), teacher_batch)                     # (N, H)

    def kls_of(projection, hidden, batch):
        kls = token_kls(projection, before_actions(hidden, batch), projection_of(teacher), teacher_hidden,
                        args.divergence)                                                                      # (N,)
        return action_sums(batch, kls)
    return {"loss": scorer(batch, kls_of).sum(1)}


@functools.cache
def load_teacher(name, device, dtype):
    """The model at the start, whole on each rank, without gradients."""
    return load_model(name, device, dtype)[0].eval().requires_grad_(False)


def before_actions(hidden, batch):
    """The state of the token before each action token, (N, H), of all states (R, T, H)."""
    r, t = batch.action_tokens
    return hidden[r, batch.previous[r, t]]


# ---------------------------------------------------------------------------------------------------------------------
# examples

# common.Example, and the items that the teacher reads in place of `items`
TaughtExample = collections.namedtuple("TaughtExample", "items pairs task_id informed")


def distill_examples(trajectories, tokenizer, args, run):
    """Examples of all trajectories, without c and, for the teacher, with c; the latter are longer."""
    groups = [(i,) for i in range(len(trajectories))]
    make_items = functools.partial(common.trajectory_items, tokenizer)
    plain = common.trajectory_examples(trajectories, groups, functools.partial(make_items, sees_c=False))
    informed = common.trajectory_examples(trajectories, groups, functools.partial(make_items, sees_c=True))
    max_length = min(args.max_length, max_positions(args.model))
    fitting = training.fitting_numbers(informed, max_length, args.trajectories)
    policy.begin(args)
    return [TaughtExample(*plain[i], informed[i].items) for i in fitting]


# ---------------------------------------------------------------------------------------------------------------------

METHODS = {"distill": policy.Method(distill_examples, distill_losses, has_reference=False)}


def parse_args(argv=None):
    parser = flags.argument_parser(__doc__)
    parser.add_argument("--method", choices=METHODS, default="distill", help="the only one")
    flags.add_training(parser, max_length=16384, epochs=1, batch_size=32)
    parser.add_argument("--divergence", choices=["forward", "reverse"], default="reverse",
                        help="forward: KL(teacher || policy); reverse: KL(policy || teacher)")
    return parser.parse_args(argv)


def main(argv=None):
    policy.main(argv, parse_args, METHODS)


if __name__ == "__main__":
    run_stage(main, ColBenchError)
