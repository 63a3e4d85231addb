"""Stage 3: train the turn-level critic, which sees the reference solution.

Reads   trajectories.jsonl (02) with rewards, a model.
Writes  a critic folder: a model folder with critic.json and metrics.jsonl.

The critic is a language model, started from the policy's weights, that reads c (the reference solution) before the
dialogue. The advantage of a turn is the mean log-ratio of its tokens against the initial model with the same input:

    A(o_t, a_t, c) = 1/L sum_l [ log p(a_t^l | o_t, a_t^<l, c) - log p_ref(a_t^l | o_t, a_t^<l, c) ]      (eq. 3)

trained by Bradley-Terry on pairs of trajectories of one task, the chosen one with the higher return:

    J = -log s( b sum_t A(o_t+, a_t+, c) - b sum_t A(o_t-, a_t-, c) ) + nll_coef * mean NLL of the chosen  (eq. 2)

Pairs of `--held-out-frac` of the tasks are not trained on: their accuracy is what is reported.

Differs from the paper: nothing. Differs from the published code: the sum over turns of each turn's mean, where it takes
one mean over all tokens of the trajectory (`--normalize trajectory`).

    python 03_train_critic.py --trajectories out/offline.jsonl --model tests/tiny --out out/critic
    torchrun --nproc-per-node 8 03_train_critic.py --trajectories trajectories.jsonl \\
        --model meta-llama/Llama-3.1-8B-Instruct --dtype bfloat16 --out critic
"""
import hashlib
import pathlib

import torch
import torch.nn.functional as F

import common


# ---------------------------------------------------------------------------------------------------------------------
# losses

def turn_advantages(logps, ref_logps, lengths, normalize):
    """Eq. 3. logps, ref_logps, lengths: (B, M), summed over each turn's tokens, 0 where a trajectory has no such turn.
    Returns (B, M) contributions whose sum over M is the score of a trajectory.
    normalize "turn": each turn's mean; "trajectory": one mean over all agent tokens; "none": no mean."""
    logratios = logps - ref_logps                                                   # (B, M)
    if normalize == "turn":
        return logratios / lengths.clamp(min=1)                                     # (B, M)
    if normalize == "trajectory":
        return logratios / lengths.sum(1, keepdim=True)                             # (B, M)
    return logratios


def bradley_terry_loss(chosen_scores, rejected_scores, beta):
    """Eq. 2 without its NLL term, from scores (B,). Returns (losses, chosen_rewards, rejected_rewards), each (B,)."""
    chosen_rewards, rejected_rewards = beta * chosen_scores, beta * rejected_scores              # (B,)
    return -F.logsigmoid(chosen_rewards - rejected_rewards), chosen_rewards, rejected_rewards


# ---------------------------------------------------------------------------------------------------------------------
# examples: (chosen item, rejected item); an item is a list of rows (common.py)

def is_held_out(task_id, fraction):
    """Whether a task's hash puts it into the held-out fraction; all data of a task fall on the same side."""
    return int(hashlib.sha256(f"held out {task_id}".encode()).hexdigest()[:8], 16) / 2 ** 32 < fraction


def trajectory_pair_examples(trajectories, pairs, tokenizer, privileged):
    own = common.tokenizer_name(tokenizer)
    items = {}
    for i in {i for pair in pairs for i in pair}:
        turns = common.agent_turns(tokenizer, trajectories[i], trajectories[i].get("tokenizer") == own)
        c = trajectories[i]["task"]["ground_truth"] if privileged else None
        items[i] = common.trajectory_rows(tokenizer, turns, c)
    return [(items[chosen], items[rejected]) for chosen, rejected in pairs]


def pair_accuracy(model, examples, ref, args, device):
    """The share of pairs whose chosen trajectory has the higher score; a tie is half right."""
    items = [item for example in examples for item in example]
    logps = common.logps_of(model, items, args.max_tokens, device, args.dtype)
    right = 0.0
    for i, (example, refs) in enumerate(zip(examples, ref)):
        lengths = [common.collate([item]).lengths[0] for item in example]
        chosen, rejected = (turn_advantages(logps[2 * i + side][None], refs[side][None], lengths[side][None],
                                            args.normalize).sum().item() for side in (0, 1))
        right += 1.0 if chosen > rejected else 0.5 if chosen == rejected else 0.0
    return right / len(examples)


# ---------------------------------------------------------------------------------------------------------------------

def parse_args(argv=None):
    parser = common.argument_parser(__doc__)
    parser.add_argument("--trajectories", required=True, help="trajectories file (02), with rewards")
    parser.add_argument("--model", required=True, help="the policy's model, to start from (folder, hub id, smollm2)")
    # the critic
    parser.add_argument("--no-privileged", action="store_true", help="leave c out")
    parser.add_argument("--normalize", choices=["turn", "trajectory", "none"], default="turn", help="see above")
    parser.add_argument("--held-out-frac", type=float, default=0.05, help="share of the tasks kept for the accuracy")
    # training
    parser.add_argument("--beta", type=float, default=0.1, help="scale of the log-ratios in the loss")
    parser.add_argument("--nll-coef", type=float, default=0.01, help="weight of the chosen side's mean NLL")
    parser.add_argument("--lr", type=float, default=2e-7, help="peak learning rate (3 %% warm-up, cosine to 10 %%)")
    parser.add_argument("--epochs", type=common.positive_int, default=4, help="passes over the examples")
    parser.add_argument("--batch-size", type=common.positive_int, default=8, help="examples a step, over all ranks")
    parser.add_argument("--micro-batch-size", type=common.positive_int, default=8, help="examples a forward pass")
    parser.add_argument("--max-steps", type=common.positive_int, help="stop (and end the schedule) after so many steps")
    parser.add_argument("--max-length", type=common.positive_int, default=8192, help="drop longer rows (tokens)")
    parser.add_argument("--max-tokens", type=common.positive_int, default=16384, help="tokens a pass without gradients")
    parser.add_argument("--max-grad-norm", type=float, default=1.0, help="gradient clipping")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32",
                        help="arithmetic; the parameters stay float32")
    parser.add_argument("--seed", type=int, default=0, help="seed of order and samples")
    parser.add_argument("--save-every", type=common.positive_int, default=200, help="steps between saved states")
    parser.add_argument("--log-every", type=common.positive_int, default=10, help="steps between log lines")
    parser.add_argument("--out", required=True, help="folder to write")
    common.add_overwrite(parser)
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    runtime = common.start(args.seed)
    trajectories = common.read_trajectories(args.trajectories)
    common.check_rewards(trajectories, args.trajectories)
    pairs = common.trajectory_pairs(trajectories, args.trajectories)
    inputs = [args.trajectories, args.model]
    if common.claim_output(args, args.out, inputs, folder=True, begin=False):
        return
    model, tokenizer = common.load_model(args.model, runtime.device)
    split = {held: [pair for pair in pairs if is_held_out(trajectories[pair[0]]["task_id"], args.held_out_frac) == held]
             for held in (False, True)}
    common.say(f"{len(split[False]):,} trajectory pairs to train on, {len(split[True]):,} of other tasks held out")
    examples, held_out = (common.drop_long(trajectory_pair_examples(
        trajectories, split[held], tokenizer, not args.no_privileged), args)
        if split[held] or not held else [] for held in (False, True))
    if common.claim_output(args, args.out, inputs, folder=True):
        return
    batches = common.epoch_batches(len(examples), args.batch_size, args.epochs, args.seed)[:args.max_steps]
    common.say(f"{len(examples):,} examples, {len(batches):,} steps of {args.batch_size}")
    common.show_samples(tokenizer, [item for example in examples[:1] for item in example])

    # The reference is the critic before its first update; its log-probabilities are computed once, by the same function
    ref = common.reference_logps(args.out, model, examples + held_out, args, runtime)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
    first = common.load_state(args.out, model, optimizer, runtime.device)
    log = common.StepLog(args.out, first, len(batches), args.log_every)
    model.train()
    for step in range(first, len(batches)):
        batch_examples = batches[step]
        mine = batch_examples[runtime.rank::runtime.world_size]
        sums = torch.zeros(6, dtype=torch.float64)
        for start in range(0, len(mine), args.micro_batch_size):
            micro = mine[start:start + args.micro_batch_size]
            batch = common.collate([item for i in micro for item in examples[i]], runtime.device)
            with common.autocast(runtime.device, args.dtype):
                logps = common.turn_logps(model, batch)                                 # (2B, M) chosen, rejected, …
            ref_logps = torch.zeros_like(logps)                                         # (2B, M)
            for row, ref_row in enumerate(ref[i][side] for i in micro for side in (0, 1)):
                ref_logps[row, :len(ref_row)] = ref_row
            scores = turn_advantages(logps, ref_logps, batch.lengths, args.normalize).sum(1)          # (2B,)
            losses, chosen_rewards, rejected_rewards = bradley_terry_loss(scores[0::2], scores[1::2], args.beta)
            nll = -logps[0::2].sum(1) / batch.lengths[0::2].sum(1)                      # (B,) mean over chosen tokens
            loss = (losses + args.nll_coef * nll).sum() / len(batch_examples)
            margin = chosen_rewards - rejected_rewards
            sums[1:5] += torch.stack([(margin > 0).sum(), margin.sum(), chosen_rewards.sum(),
                                      nll.sum()]).detach().double().cpu() / len(batch_examples)
            loss.backward()
            sums[0] += loss.item()
            sums[5] += sum(len(row.ids) for i in micro for item in examples[i] for row in item)
        common.reduce_gradients(model)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm).item()
        lr = common.learning_rate(step, len(batches), args.lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss, accuracy, margin, chosen_reward, nll, num_tokens = common.reduce_sums(sums.tolist(), runtime.device)
        log.step(step + 1, num_tokens, loss=loss, acc=accuracy, margin=margin, chosen=chosen_reward, nll=nll, lr=lr,
                 gnorm=grad_norm)
        if (step + 1) % args.save_every == 0:
            common.save_state(args.out, step + 1, model, optimizer)

    accuracy = pair_accuracy(model, held_out, ref[len(examples):], args, runtime.device) if held_out else None
    common.say(f"held-out pair accuracy: {accuracy:.3f} on {len(held_out)} pairs of tasks that were not trained on"
               if held_out else "held-out pair accuracy: not measured, no held-out pairs")
    if runtime.rank == 0:
        common.write_json(pathlib.Path(args.out) / "critic.json", {
            "head": "lm", "normalize": args.normalize, "privileged": not args.no_privileged, "beta": args.beta,
            "reference": args.model, "held_out_pair_accuracy": accuracy, "num_held_out_pairs": len(held_out)})
    common.finish_training(args.out, model, tokenizer)


if __name__ == "__main__":
    common.run_stage(main)
