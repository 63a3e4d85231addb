"""A fork of 04: privileged self-distillation, in place of pairs.

Reads   trajectories.jsonl (02) and a model. There is no critic: the teacher is the same model, which is told c.
Writes  a model folder with metrics.jsonl and agent.json (its system prompt in training).

At each token of the agent's turns the loss is the divergence, over the whole vocabulary, between the policy and the
initial model with c in front.

    python -m examples.distill --trajectories out/offline.jsonl --model models/tiny --out out/distill
    torchrun --nproc-per-node 8 -m examples.distill --divergence forward …
"""
from lib import flags

# ---------------------------------------------------------------------------------------------------------------------
# arguments

def parse_args(argv=None):
    parser = flags.argument_parser(__doc__)
    parser.add_argument("--method", choices=["distill"], default="distill", help="the only one")
    flags.add_training(parser, max_length=16384, epochs=1, batch_size=32)
    parser.add_argument("--divergence", choices=["forward", "reverse"], default="reverse",
                        help="forward: KL(teacher || policy); reverse: KL(policy || teacher)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    parse_args()                    # answers --help and wrong flags before the imports below, which take seconds

import collections
import functools
import importlib

import torch.nn.functional as F

import common
from lib.load import load_model, most_positions, projection_of, read_config
from lib.logps import ActionModel, in_chunks
from lib.runtime import run_stage
from lib.tokens import note_prompt

policy = importlib.import_module("04_train_policy")

# ---------------------------------------------------------------------------------------------------------------------
# loss

def token_kls(projection, hidden, teacher_projection, teacher_hidden, direction):
    """KL divergences (N,) float32, over the whole vocabulary, between the next-token distributions of the states
    `hidden` (N, H) and of a teacher's states, each with its own output projection.

    "forward": KL(teacher || policy), which is mode-covering; "reverse": KL(policy || teacher)."""
    def kls_of(logits, teacher_hidden):
        logps = F.log_softmax(logits, -1)                                                        # (n, V)
        teacher_logps = F.log_softmax(teacher_projection.logits(teacher_hidden), -1)       # (n, V)
        if direction == "forward":
            return (teacher_logps.exp() * (teacher_logps - logps)).sum(-1)
        return (logps.exp() * (logps - teacher_logps)).sum(-1)
    return in_chunks(kls_of, projection, hidden, teacher_hidden)


def distill_losses(action_model, batch, examples, ref_logps, teacher, direction):
    """The divergence from the teacher (an ActionModel), summed over the action tokens of each example, for 04's
    losses_of: {"loss": (examples,)}."""
    informed = [item for example in examples for item in example.informed]
    teacher_batch = action_model.collate(informed, batch.ids.device)
    r, t = teacher_batch.action_tokens
    teacher_hidden = teacher.hidden_states(teacher_batch)[r, teacher_batch.previous[r, t]]                    # (N, H)

    def kls_of(projection, hidden, _):
        return token_kls(projection, hidden, projection_of(teacher.model), teacher_hidden, direction)         # (N,)
    return {"loss": action_model(batch, kls_of).sum(1)}


# ---------------------------------------------------------------------------------------------------------------------
# examples

# common.Example, plus the items that the teacher reads in place of `items`
TaughtExample = collections.namedtuple("TaughtExample", "items action_pairs task_id informed")


# ---------------------------------------------------------------------------------------------------------------------

def main(argv=None):
    args = parse_args(argv)
    opened = policy.open_training(vars(args))
    if not opened:
        return
    job, trajectories, tokenizer, load = opened
    job.max_length = min(args.max_length, most_positions(read_config(args.model)))
    groups = [(i,) for i in range(len(trajectories))]
    make_items = functools.partial(common.trajectory_items, tokenizer)
    plain = common.trajectory_examples(trajectories, groups, make_items, sees_c=False)
    informed = common.trajectory_examples(trajectories, groups, make_items, sees_c=True)          # longer
    examples = [TaughtExample(*plain[i], informed[i].items) for i in job.fitting_indices(informed)]
    job.output.begin()

    # the initial model, a full copy on each rank, without gradients
    teacher = ActionModel(load_model(args.model, job.run.device, args.dtype)[0]).eval().requires_grad_(False)
    losses_of = functools.partial(distill_losses, teacher=teacher, direction=args.divergence)
    note_prompt(args.out, trajectories)
    policy.train_policy(load, tokenizer, examples, losses_of, job, has_reference=False)


if __name__ == "__main__":
    run_stage(main)
