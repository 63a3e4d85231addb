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
--head value        its value is the logit of success (of a page: its similarity) given the dialogue up to and with the
                    turn, and c, trained by binary cross-entropy at every turn of every trajectory (those without a
                    pair, too)

Of pages (frontend) a `--model` of the Qwen2-VL family makes a visual critic, with one of these heads: it reads the
request, what the person said last, the picture of the reference page (c) and that of the page after the turn, and its
head sees the mean of the last hidden states over all of these tokens, of pictures and text. Other models read the
reference's HTML as c.

Pairs of `--held-out-frac` of the tasks are not trained on: their accuracy is what is reported (of values: the last).

Differs from the paper: nothing. Differs from the published code: the sum over turns of each turn's mean, where it takes
one mean over all tokens of the trajectory (`--normalize trajectory`).

    python 03_train_critic.py --trajectories out/offline.jsonl --model tests/tiny --out out/critic
    torchrun --nproc-per-node 8 03_train_critic.py --trajectories trajectories.jsonl \\
        --model meta-llama/Llama-3.1-8B-Instruct --dtype bfloat16 --out critic
"""
import functools
import hashlib
import math
import pathlib

import torch
import torch.nn.functional as F

import common


# ---------------------------------------------------------------------------------------------------------------------
# losses

def bradley_terry_loss(chosen_scores, rejected_scores, beta):
    """Eq. 2 without its NLL term, from scores (B,). Returns (losses, chosen_rewards, rejected_rewards), each (B,)."""
    chosen_rewards, rejected_rewards = beta * chosen_scores, beta * rejected_scores              # (B,)
    return -F.logsigmoid(chosen_rewards - rejected_rewards), chosen_rewards, rejected_rewards


def value_losses(values, labels, lengths):
    """Binary cross-entropy of success (labels in [0, 1], (B,)) at each turn's logit (values, (B, M)), the mean over the
    turns of a trajectory (those with lengths > 0); returns (B,)."""
    exists = (lengths > 0).float()                                                                # (B, M)
    losses = F.binary_cross_entropy_with_logits(values, labels[:, None].expand_as(values), reduction="none")
    return (losses * exists).sum(1) / exists.sum(1)


def last_values(values, lengths):
    """The value of each trajectory's last turn, (B,)."""
    return values.gather(1, (lengths > 0).sum(1, keepdim=True) - 1).squeeze(1)


# ---------------------------------------------------------------------------------------------------------------------
# examples: (chosen item, rejected item), (item,) for values; an item is a list of rows (common.py)

def is_held_out(task_id, fraction):
    """Whether a task's hash puts it into the held-out fraction; all data of a task fall on the same side."""
    return int(hashlib.sha256(f"held out {task_id}".encode(errors="replace")).hexdigest()[:8], 16) / 2 ** 32 < fraction


def picture_items(trajectories, processor, privileged, show):
    """An item for each trajectory, of a row for each agent turn, which shows it to a visual critic."""
    turns = []                                                       # (trajectory number, history, page) of each
    for number, trajectory in enumerate(trajectories):
        history = trajectory["dialogue_history"]
        turns += [(number, history[:i], common.last_page(history[:i + 1]))
                  for i, turn in enumerate(history) if turn["role"] == "assistant"]
    pages = [page for _, _, page in turns if page]
    shown = show(pages + [trajectory["task"]["ground_truth"] for trajectory in trajectories if privileged])
    items = [[] for _ in trajectories]
    for number, history, page in turns:
        items[number].append(common.page_row(processor, trajectories[number]["task"], history, page, len(items[number]),
                                             shown, privileged))
    return items


def trajectory_examples(trajectories, groups, tokenizer, privileged, show=None):
    """An example for each tuple of trajectory numbers; `show` (common.show_pages) makes those of a visual critic, whose
    processor is then in the place of the tokenizer."""
    used = sorted({i for group in groups for i in group})
    items = {}
    if show:
        items = dict(zip(used, picture_items([trajectories[i] for i in used], tokenizer, privileged, show)))
        return [tuple(items[i] for i in group) for group in groups]
    for i, turns in zip(used, common.all_turns(tokenizer, [trajectories[i] for i in used])):
        c = trajectories[i]["task"]["ground_truth"] if privileged else None
        items[i] = common.trajectory_rows(tokenizer, turns, c)
    return [tuple(items[i] for i in group) for group in groups]


def pair_accuracy(model, examples, ref, args, device):
    """The share of pairs whose chosen trajectory has the higher score; a tie is half right."""
    items = [item for example in examples for item in example]
    values = common.values_of(model, items, args.max_tokens, device)
    right = 0.0
    for i, (example, refs) in enumerate(zip(examples, ref)):
        lengths = [common.collate([item]).lengths[0] for item in example]
        scores = [common.turn_advantages(values[2 * i + side][None], refs[side][None], lengths[side][None],
                                         args.normalize) for side in (0, 1)]                     # (1, M) each
        chosen, rejected = (score[0, -1] if args.head == "value" else score.sum() for score in scores)
        right += 1.0 if chosen > rejected else 0.5 if chosen == rejected else 0.0
    return right / len(examples)


# ---------------------------------------------------------------------------------------------------------------------

# Table 5 of the paper, and what it leaves unsaid as the published code sets it
PRESETS = {name: {"beta": 0.1, "nll_coef": 0.01, "lr": 2e-7, "epochs": epochs, "batch_size": 8, "max_length": 8192,
                  "warmup_frac": 0.03, "final_lr_frac": 0.1, "adam_betas": [0.9, 0.95], "weight_decay": 0.0,
                  "max_grad_norm": 1.0, "normalize": "turn", "dtype": "bfloat16", "activation_checkpointing": True,
                  "min_gap": min_gap}
           for name, epochs, min_gap in (("paper-backend", 4, None), ("paper-frontend", 8, 0.1))}


def parse_args(argv=None):
    parser = common.argument_parser(__doc__)
    parser.add_argument("--trajectories", required=True, help="trajectories file (02), with rewards")
    parser.add_argument("--num-trajectories", type=common.positive_int, help="use so many (nested subsets of a seed)")
    parser.add_argument("--model", required=True, help="the policy's model, to start from (folder, hub id, smollm2)")
    # the critic
    parser.add_argument("--head", choices=["lm", "regression", "value"], default="lm",
                        help="what scores a turn, see above")
    parser.add_argument("--no-privileged", action="store_true", help="leave c out")
    parser.add_argument("--normalize", choices=["turn", "trajectory", "none"], default="turn", help="see above")
    parser.add_argument("--min-gap", type=float, help="pair all trajectories of a task whose returns differ by so much "
                        "(frontend: 0.1); None: successes with the rest")
    parser.add_argument("--held-out-frac", type=float, default=0.05, help="share of the tasks kept for the accuracy")
    # training
    parser.add_argument("--beta", type=float, default=0.1, help="scale of the log-ratios in the loss")
    parser.add_argument("--nll-coef", type=float, default=0.01, help="weight of the chosen side's mean NLL")
    parser.add_argument("--lr", type=float, default=2e-7, help="peak learning rate")
    parser.add_argument("--epochs", type=common.positive_int, default=4, help="passes over the examples")
    parser.add_argument("--batch-size", type=common.positive_int, default=8, help="examples a step, over all ranks")
    parser.add_argument("--micro-batch-size", type=common.positive_int, default=8, help="examples a forward pass")
    parser.add_argument("--max-steps", type=common.positive_int, help="stop (and end the schedule) after so many steps")
    parser.add_argument("--max-length", type=common.positive_int, default=8192, help="drop longer rows (tokens)")
    parser.add_argument("--max-tokens", type=common.positive_int, default=16384, help="tokens a pass without gradients")
    parser.add_argument("--warmup-frac", type=float, default=0.03,
                        help="share of the steps with a rising learning rate")
    parser.add_argument("--final-lr-frac", type=float, default=0.1,
                        help="share of the learning rate at the end (cosine)")
    parser.add_argument("--adam-betas", type=float, nargs=2, default=[0.9, 0.95], help="of AdamW")
    parser.add_argument("--weight-decay", type=float, default=0.0, help="of AdamW")
    parser.add_argument("--max-grad-norm", type=float, default=1.0, help="gradient clipping")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32",
                        help="arithmetic; the parameters stay float32")
    parser.add_argument("--optimizer", choices=["adamw", "adamw8bit"], default="adamw",
                        help="adamw8bit: its state in 8 bits (needs torchao)")
    parser.add_argument("--attention", choices=["sdpa", "flex"], default="sdpa",
                        help="flex: FlexAttention, for trees on a GPU (skips what a mask hides)")
    parser.add_argument("--activation-checkpointing", action="store_true",
                        help="compute each layer again in the backward pass: less memory, a third more time")
    parser.add_argument("--replicate", type=common.positive_int, default=1,
                        help="groups of ranks that each hold the whole model (1: it is split over all ranks)")
    parser.add_argument("--dry-run", type=common.positive_int, metavar="RANKS",
                        help="print the memory that a step needs on each of so many ranks, and stop")
    parser.add_argument("--seed", type=int, default=0, help="seed of order and samples")
    parser.add_argument("--save-every", type=common.positive_int, default=200, help="steps between saved states")
    parser.add_argument("--log-every", type=common.positive_int, default=10, help="steps between log lines")
    parser.add_argument("--out", required=True, help="folder to write")
    common.add_scorer(parser)
    common.add_browser(parser)
    common.add_overwrite(parser)
    common.set_preset(parser, PRESETS, argv)
    args = parser.parse_args(argv)
    if args.head != "lm":
        args.normalize, args.nll_coef = "none", 0.0                  # the head's input is a mean already
    return args


def check_visual(trajectories, args):
    """InputError where a model that sees cannot be the critic."""
    from transformers import AutoConfig
    if not common.is_frontend(trajectories[0]["task"]):
        raise common.InputError(f"{args.model}: a model that sees is a critic of pages, but {args.trajectories} has "
                                "dialogues about functions; name a language model")
    if args.head == "lm":
        raise common.InputError(f"{args.model}: a model that sees needs --head regression (or value); one by --head lm "
                                "reads the reference's HTML, with any language model")
    if not common.from_pretrained(AutoConfig, args.model).model_type.startswith("qwen"):
        raise common.InputError(f"{args.model}: a visual critic must be of the Qwen2-VL family")


def main(argv=None):
    args = parse_args(argv)
    if args.dry_run:
        return common.dry_run(args, 1 if args.head == "value" else 2)
    runtime = common.start(args.seed)
    trajectories = common.read_trajectories(args.trajectories, args.num_trajectories, args.seed)
    inputs = [args.trajectories, args.model]
    if common.claim_output(args, args.out, inputs, folder=True, begin=False):
        return
    common.fill_rewards(trajectories, args.unsafe_scorer)
    pairs = common.trajectory_pairs(trajectories, args.trajectories, args.min_gap)
    frontend, visual, show = common.is_frontend(trajectories[0]["task"]), common.reads_pictures(args.model), None
    if visual:
        check_visual(trajectories, args)
        show = functools.partial(common.show_pages, images=pathlib.Path(args.out) / "images", browser=args.browser)
        if common.claim_output(args, args.out, inputs, folder=True):
            return
    tokenizer = common.load_processor(args.model) if visual else common.load_tokenizer(args.model)
    if visual:
        limit = tokenizer.image_processor.size["longest_edge"]
        common.say(f"a visual critic; pictures are scaled to at most {limit:,} pixels")
    held = [is_held_out(trajectory["task_id"], args.held_out_frac) for trajectory in trajectories]
    train, test = ([pair for pair in pairs if held[pair[0]] == side] for side in (False, True))
    common.say(f"{len(train):,} trajectory pairs to train on, {len(test):,} of other tasks held out")
    if args.head == "value":
        train = [(i,) for i in range(len(trajectories)) if not held[i]]
    examples, held_out = (trajectory_examples(trajectories, groups, tokenizer, not args.no_privileged, show)
                          for groups in (train, test))
    if not examples:
        raise common.InputError(f"{args.trajectories}: no examples to train on: all {len(test):,} pairs are of tasks "
                                f"that --held-out-frac {args.held_out_frac} keeps apart")
    kept = common.drop_long(examples, args)
    examples, train = [examples[i] for i in kept], [train[i] for i in kept]
    held_out = [held_out[i] for i in common.drop_long(held_out, args, "held-out pairs", needed=False)]
    if not visual and common.claim_output(args, args.out, inputs, folder=True):
        return
    costs = common.Costs(args.out, runtime.device, folder=True)
    batches = common.epoch_batches(len(examples), args.batch_size, args.epochs, args.seed)[:args.max_steps]
    steps_an_epoch = math.ceil(len(examples) / args.batch_size)
    common.say(f"{len(examples):,} examples, {len(batches):,} steps of {args.batch_size}")
    common.show_samples(tokenizer, [item for example in examples[:1] for item in example])

    # The reference is the critic before its first update; its log-probabilities are computed once, by the same function
    model = common.load_sharded(args.model, runtime, args, head=args.head != "lm")
    reference_fingerprint = common.weights_fingerprint(args.model)
    ref = common.reference_values(args.out, model, examples + held_out, args, runtime)
    optimizer = common.adamw(model, args)
    states = common.States(args.out, model, optimizer)
    first = states.load()
    log = common.StepLog(args.out, first, len(batches), args.log_every)
    model.train()
    for step in range(first, len(batches)):
        torch.manual_seed(args.seed * len(batches) + step)          # models with dropout: a resumed run draws the same
        sums = torch.zeros(6, dtype=torch.float64)
        for micro, weights in common.rank_batches(batches[step], args.micro_batch_size, runtime):
            shares = weights / len(batches[step])                                       # (B,)
            batch = common.collate([item for i in micro for item in examples[i]], runtime.device)
            values = model.turn_values(batch)                                           # (2B, M) chosen, rejected, …
            if args.head == "value":
                rewards = [trajectories[train[i][0]]["reward"] for i in micro]
                labels = torch.tensor([float(reward if frontend else reward == 1) for reward in rewards],
                                      device=runtime.device)                            # (B,)
                loss = (value_losses(values, labels, batch.lengths) * shares).sum()
                right = (last_values(values, batch.lengths) > 0) == (labels > 0.5)
                sums[1] += (right * shares).sum().item()
            else:
                ref_values = torch.nn.utils.rnn.pad_sequence([ref[i][side] for i in micro for side in (0, 1)],
                                                             batch_first=True).to(runtime.device)     # (2B, M)
                scores = common.turn_advantages(values, ref_values, batch.lengths, args.normalize).sum(1)      # (2B,)
                losses, chosen_rewards, rejected_rewards = bradley_terry_loss(scores[0::2], scores[1::2], args.beta)
                nll = -values[0::2].sum(1) / batch.lengths[0::2].sum(1)                 # (B,) mean over chosen tokens
                loss = ((losses + args.nll_coef * nll) * shares).sum()
                margin = chosen_rewards - rejected_rewards
                sums[1:5] += (torch.stack([margin > 0, margin, chosen_rewards, nll]) * shares).sum(1).detach().cpu()
            (loss * runtime.world_size).backward()                  # FSDP takes the ranks' mean, the batch is their sum
            sums[0] += loss.item()
            sums[5] += sum(len(row.ids) for i, weight in zip(micro, weights) if weight
                           for item in examples[i] for row in item)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm).full_tensor().item()
        lr = common.learning_rate(step, len(batches), args.lr, args.warmup_frac, args.final_lr_frac)
        common.set_learning_rate(optimizer, lr)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss, accuracy, margin, chosen_reward, nll, num_tokens = common.reduce_sums(sums.tolist(), runtime.device)
        preferences = {} if args.head == "value" else {"margin": margin, "chosen": chosen_reward, "nll": nll}
        log.step(step + 1, num_tokens, loss=loss, acc=accuracy, **preferences, lr=lr, gnorm=grad_norm)
        if (step + 1) % args.save_every == 0 or (step + 1) % steps_an_epoch == 0:
            states.save(step + 1)
            costs.record([common.work_of(model)], log.total_tokens)
    states.wait()

    accuracy = pair_accuracy(model, held_out, ref[len(examples):], args, runtime.device) if held_out else None
    common.say(f"held-out pair accuracy: {accuracy:.3f} on {len(held_out)} pairs of tasks that were not trained on"
               if held_out else "held-out pair accuracy: not measured, no held-out pairs")
    if runtime.rank == 0:
        common.write_json(pathlib.Path(args.out) / "critic.json", {
            "head": args.head, "visual": visual, "normalize": args.normalize, "privileged": not args.no_privileged,
            "beta": args.beta, "reference": args.model, "reference_fingerprint": reference_fingerprint,
            "held_out_pair_accuracy": accuracy, "num_held_out_pairs": len(held_out)})
    costs.record([common.work_of(model)], log.total_tokens)
    common.finish_training(args.out, model, tokenizer)


if __name__ == "__main__":
    common.run_stage(main)
