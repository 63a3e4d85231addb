"""Stage 4: train the agent, by SWEET-RL or by one of its baselines.

Reads   trajectories.jsonl (02), a model, and for --method sweet a critic (03).
Writes  a model folder with metrics.jsonl and agent.json (the system prompt that it was trained with); for sweet also
        candidates.jsonl, scored.jsonl and pairs.jsonl.

--method sweet   For every agent turn of --data-frac of the trajectories: sample 16 candidates given o_t (never c),
                 score each by the critic's A(o_t, a, c) (eq. 3), pair a random one of the better half with a random one
                 of the worse, and train by single-turn DPO:
    eq. 4        -log s( b [log p(a+|o) / p_ref(a+|o)] - b [log p(a-|o) / p_ref(a-|o)] ) + nll_coef * mean NLL of a+
                 with sums over the tokens of an action (end of turn included).
--method mtdpo   Multi-turn DPO: the same loss on pairs of trajectories of one task, all agent tokens summed.
--method rft     Rejection fine-tuning: likelihood of the agent's turns of successful trajectories (where returns are
                 graded: of the best trajectory of each task).
--method sft     Likelihood of the agent's turns of all trajectories. Those of the informed script have c in front.
--method grpo    Policy gradient with group baselines: each token of a trajectory has its return less the mean of its
                 task's trajectories, over their deviation, as advantage; the ratio to the model at the start, which
                 must have sampled them, is clipped (PPO). With --critic: eq. 3's advantage of its turn in place of the
                 return, standardised over all turns of the task's trajectories.
--method distill Privileged self-distillation: at each token of the agent's own turns the divergence from the model at
                 the start with c in front. No critic.
Differs from the paper: grpo and distill are not in it. From the published code: docs/reproduce.md.

    python 04_train_policy.py --method sweet --trajectories out/offline.jsonl --model models/tiny --critic out/critic \\
        --out out/sweet
    torchrun --nproc-per-node 8 04_train_policy.py --method sweet --trajectories trajectories.jsonl \\
        --model meta-llama/Llama-3.1-8B-Instruct --critic critic --dtype bfloat16 --out policy
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
from torch.nn.utils.rnn import pad_sequence

import common
from colbench import ColBenchError, domain_of
from lib import training
from lib.adapters import lora_config
from lib.arguments import (
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
from lib.costs import Costs
from lib.engine import generate
from lib.memory import dry_run
from lib.models import encode, fresh_model, load_model, load_tokenizer, reads_images, stop_ids, work_of
from lib.runtime import begin_output, InputError, is_done, map_blocks, run_stage, say, start, write_jsonl
from lib.seeds import uniforms
from lib.servers import is_server, said
from lib.speakers import served_candidates
from lib.tracking import check_track

# ---------------------------------------------------------------------------------------------------------------------
# losses

def dpo_loss(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta):
    """Eq. 4 without its NLL term, from summed log-probabilities (B,) of chosen and rejected under policy and reference.
    Returns (losses, chosen_rewards, rejected_rewards), each (B,)."""
    chosen_rewards = beta * (chosen_logps - ref_chosen_logps)                                     # (B,)
    rejected_rewards = beta * (rejected_logps - ref_rejected_logps)                               # (B,)
    return -F.logsigmoid(chosen_rewards - rejected_rewards), chosen_rewards, rejected_rewards


def chosen_and_rejected(scores, pairs=None):
    """Chosen and rejected, each (P,), of a batch's scores per turn: of trajectories (2P, M) the sums; of actions (B, M)
    those that `pairs` name, [(chosen, rejected), …] for each row."""
    if pairs is None:
        return scores.sum(1)[0::2], scores.sum(1)[1::2]
    rows = [row for row, own in enumerate(pairs) for _ in own]
    chosen, rejected = zip(*(pair for own in pairs for pair in own))
    return scores[rows, list(chosen)], scores[rows, list(rejected)]


def clipped_objective(logps, sampled_logps, advantages, clip, kl_coef):
    """What PPO wants large of each token, all (B, T): min(r A, clip(r, 1 - clip, 1 + clip) A), where r is its
    probability over that under the model which sampled it, less kl_coef times an estimate of KL(policy || that model)
    that is never negative: r log r - r + 1. Returns (objectives, ratios)."""
    log_ratios = logps - sampled_logps                                                            # (B, T)
    ratios = log_ratios.exp()                                                                     # (B, T)
    clipped = torch.minimum(ratios * advantages, ratios.clamp(1 - clip, 1 + clip) * advantages)
    return clipped - kl_coef * (ratios * log_ratios - ratios + 1), ratios


# ---------------------------------------------------------------------------------------------------------------------
# SWEET's three phases before the training: candidates, their scores, pairs

def sample_states(trajectories, fraction, seed):
    """[(trajectory, number of its agent turn, index in its history)] of all turns of a seeded share of trajectories."""
    order = list(range(len(trajectories)))
    random.Random(seed).shuffle(order)
    states = []
    for index in sorted(order[:max(1, round(fraction * len(order)))]):
        history = trajectories[index]["dialogue_history"]
        agent = [i for i, turn in enumerate(history) if turn["role"] == "assistant"]
        states += [(trajectories[index], number, i) for number, i in enumerate(agent)]
    return states


def sample_candidates(rows, model, tokenizer, args):
    """The rows with "candidates": after each prompt, `num_candidates` actions sampled from the policy."""
    keys = [(args.seed, "candidates", row["task_id"], row["sample"], row["turn"]) for row in rows]
    randoms = torch.cat([uniforms((args.num_candidates, args.max_new_tokens), *key) for key in keys])
    stops = stop_ids(model, tokenizer)
    actions = generate(model, [encode(tokenizer, row["prompt"]) for row in rows], randoms, args.temperature, stops,
                       args.concurrency, args.max_tokens)
    candidates = [{"text": tokenizer.decode(a, skip_special_tokens=True), "ids": a, "ended": a[-1] in stops}
                  for a in actions]
    return [{**row, "candidates": candidates[r * args.num_candidates:(r + 1) * args.num_candidates]}
            for r, row in enumerate(rows)]


def candidates_phase(path, states, prompts, tokenizer, args, runtime, works):
    """Rows of candidates.jsonl. Every rank holds the whole policy, or asks --sampler, for other states than the others.
    """
    rows = [{"task_id": t["task_id"], "sample": t["sample"], "turn": number, "task": t["task"], "prompt": prompt,
             "history": [{"role": turn["role"], "content": turn["content"]} for turn in t["dialogue_history"][:i]]}
            for (t, number, i), prompt in zip(states, prompts)]
    if args.sampler:
        return served_candidates(path, rows, tokenizer, args, runtime, works)
    blocks = [rows[i:i + 128] for i in range(0, len(rows), 128)]
    model = None
    if not path.exists():
        model = load_model(args.model, runtime.device, args.dtype)[0].eval()
        works.append(work_of(model))
    return map_blocks(path, blocks, lambda block: sample_candidates(block, model, tokenizer, args), runtime, "state")


def scores_phase(path, rows, critic, tokenizer, args, runtime, works):
    """Rows of scored.jsonl. Critic and reference are split over the ranks, which score every block together."""
    if not isinstance(critic, str) and not path.exists():
        critic = common.load_critic(critic, functools.partial(common.load_sharded, runtime=runtime, args=args))
        works += [work_of(model) for model in (critic["model"], critic["reference"]) if model]
    blocks = [rows[i:i + 64] for i in range(0, len(rows), 64)]
    return map_blocks(path, blocks, lambda block: score_candidates(block, critic, tokenizer, args, runtime.device),
                      runtime, "state", together=True)


def score_candidates(rows, critic, tokenizer, args, device):
    """The rows with "advantages": the critic's score of every candidate, by eq. 3 where it has no head."""
    points = []
    for row in rows:
        texts = [candidate_says(row, candidate) for candidate in row["candidates"]]
        ids = [candidate["ids"] for candidate in row["candidates"]]
        points.append(common.DecisionPoint(row["prompt"], row["task"], row["history"], ids, texts))
    scores = common.score_actions(critic, tokenizer, points, args.max_tokens, device, args.no_tree)
    if not all(math.isfinite(score) for own in scores for score in own):
        raise InputError(f"{args.critic}: gives candidates scores that are not finite; train this critic again")
    return [{**row, "advantages": advantages} for row, advantages in zip(rows, scores)]


def candidate_says(row, candidate):
    """What a candidate of a state (or a side of a pair) says, without its thoughts."""
    return said(domain_of(row["task"]), candidate["text"], row["prompt"])


def is_alike(pair, is_last):
    """Whether both sides of a pair are answers, or neither is. In the last round the whole turn is the answer, whatever
    it says."""
    domain, answers = domain_of(pair["task"]), []
    for side in ("chosen", "rejected"):
        turn = {"role": "assistant", "content": candidate_says(pair, pair[side])}
        answers.append(domain.answer_of([*pair["history"], turn], is_last))
    return (answers[0] is None) == (answers[1] is None)


def candidate_pairs(row, pairs_per_turn, rng):
    """Pairs (better, worse) of candidate numbers: a random one of the better half, a random one of the worse.
    Candidates stopped by length are left out, and a pair of twice the same text is none."""
    order = [i for i, candidate in enumerate(row["candidates"]) if candidate["ended"]]
    rng.shuffle(order)                                                               # ties fall either way
    order.sort(key=lambda i: -row["advantages"][i])
    half = len(order) // 2
    if half == 0:
        return []
    pairs = [(rng.choice(order[:half]), rng.choice(order[-half:])) for _ in range(pairs_per_turn)]
    return [(a, b) for a, b in pairs if row["candidates"][a]["ids"] != row["candidates"][b]["ids"]]


def sweet_turns(trajectories, tokenizer, args):
    """(states, their prompts, the rows of --candidates or None): what the three phases work on. All that is read is
    read here, before an output is replaced."""
    states = sample_states(trajectories, args.data_frac, args.seed)
    sampled = {id(trajectory): trajectory for trajectory, _, _ in states}.values()
    say(f"{len(states):,} agent turns of {len(sampled):,} dialogues (--data-frac {args.data_frac:g} of "
        f"{len(trajectories):,})")
    endless = {id(trajectory) for trajectory in sampled if common.endless_row(tokenizer, trajectory, args.max_length)}
    if endless:
        states = [state for state in states if id(state[0]) not in endless]
        say(f"left out {len(endless):,} trajectories, whose last prompt is longer than twice --max-length "
            f"{args.max_length}: {len(states):,} turns are left")
        if not states:
            raise InputError(f"{args.trajectories}: no turns to train on: all prompts are far longer than --max-length "
                             f"{args.max_length}")
    prompts = common.checked_prompts(states, tokenizer, args.trajectories)
    rows = None
    if args.candidates:
        rows = common.read_candidates(args.candidates, states, prompts, tokenizer, args.num_candidates)
    return states, prompts, rows


def sweet_examples(turns, tokenizer, critic, args, runtime, works):
    """Run the three phases on `turns` (sweet_turns), or read what an earlier run left of them. Returns the examples
    and, for each, its pairs [(chosen, rejected), …] as numbers of the example's actions, and its task's id. A phase has
    its models for itself."""
    out = pathlib.Path(args.out)
    states, prompts, rows = turns
    if rows is None:
        rows = candidates_phase(out / "candidates.jsonl", states, prompts, tokenizer, args, runtime, works)
    gc.collect()                                                    # a phase's models go before the next phase's come
    rows = scores_phase(out / "scored.jsonl", rows, critic, tokenizer, args, runtime, works)
    gc.collect()

    rng = random.Random(args.seed)
    kept = "task_id", "sample", "turn", "prompt", "task", "history"
    pairs = [{**{key: row[key] for key in kept},
              **{side: {**row["candidates"][i], "advantage": row["advantages"][i]}
                 for side, i in zip(("chosen", "rejected"), pair)}}
             for row in rows for pair in candidate_pairs(row, args.pairs_per_turn, rng)]
    ended = [sum(candidate["ended"] for candidate in row["candidates"]) for row in rows]
    too_few, asked = sum(n < 2 for n in ended), len(rows) * args.pairs_per_turn
    same = asked - too_few * args.pairs_per_turn - len(pairs)
    cut = args.num_candidates * len(rows) - sum(ended)
    found = len(pairs)
    if args.like_pairs:
        last_turns = {(t["task_id"], t["sample"], number) for t, number, _ in states
                      if number == t.get("max_rounds", 10) - 1}
        pairs = [pair for pair in pairs
                 if is_alike(pair, (pair["task_id"], pair["sample"], pair["turn"]) in last_turns)]
    left_out = f"{found - len(pairs):,} are none by --like-pairs, " * (found > len(pairs))
    say(f"{len(pairs):,} pairs of {asked:,} asked for; {same:,} were twice the same text, {left_out}{cut:,} candidates "
        f"stopped by --max-new-tokens were left out, so that {too_few:,} of {len(rows):,} turns had no two")
    if runtime.rank == 0:
        write_jsonl(out / "pairs.jsonl", [{key: value for key, value in pair.items() if key not in ("task", "history")}
                                          for pair in pairs])
    say(*training.kind_lines(domain_of(rows[0]["task"]), rows, pairs))
    pairs, long = common.drop_long_pairs(pairs, tokenizer, args.max_length)
    if not pairs:
        raise InputError(
            f"{args.trajectories}: no examples to train on: of {asked:,} pairs asked for {long:,} are longer than "
            f"--max-length {args.max_length}, {same:,} are twice the same text, {left_out}"
            f"{too_few * args.pairs_per_turn:,} are of turns with fewer than two candidates that --max-new-tokens "
            f"{args.max_new_tokens} did not stop")
    examples, pair_indices = common.pair_examples(pairs, tokenizer, args.pairs_together, args.no_tree)
    state = "task_id", "sample", "turn", "prompt"
    states = [tuple(pair[key] for key in state) for pair in pairs]
    tasks = [task for task, *_ in (dict.fromkeys(states) if args.pairs_together else states)]
    return examples, pair_indices, tasks


# ---------------------------------------------------------------------------------------------------------------------
# the advantages of --method grpo

EQUAL = 1e-6                                                         # a smaller deviation is rounding


def group_advantages(values, task_ids):
    """`values`, a list of numbers for each trajectory, less the mean of all numbers of its group (the trajectories of
    its task), over their standard deviation; None for those of a group whose numbers are all equal."""
    groups = collections.defaultdict(list)
    for own, task in zip(values, task_ids):
        groups[task] += own
    scales = {task: (statistics.fmean(group), statistics.pstdev(group)) if group else (0, 0)
              for task, group in groups.items()}
    return [[(value - scales[task][0]) / scales[task][1] for value in own]
            if scales[task][1] > EQUAL else None for own, task in zip(values, task_ids)]


def sampled_otherwise(trajectory):
    """Whether an agent's turns were sampled at another temperature than 1 or chosen among several (02 --best-of)."""
    return trajectory.get("temperature", 1) != 1 or trajectory.get("best_of", 1) != 1


def grpo_advantages(trajectories, critic, tokenizer, args, runtime, works):
    """For each trajectory an advantage a turn, standardised over the trajectories of its task; None where they are all
    equal, [] where it is too long for the critic. With a critic they are its credit (common.score_turns), which is
    written to credit.jsonl. Else they are the trajectory's return, the same for all turns."""
    tasks, lost = [trajectory["task_id"] for trajectory in trajectories], 0
    if critic:
        critic = common.load_critic(critic, functools.partial(common.load_sharded, runtime=runtime, args=args))
        works += [work_of(model) for model in (critic["model"], critic["reference"]) if model]
        credit = common.score_turns(critic, tokenizer, trajectories, args.max_tokens, runtime.device)
        if runtime.rank == 0:
            write_jsonl(pathlib.Path(args.out) / "credit.jsonl",
                        [{"task_id": t["task_id"], "sample": t["sample"], "advantages": own}
                         for t, own in zip(trajectories, credit)])
        lost = credit.count(None)
        found = [[] if before is None else own for own, before in
                 zip(group_advantages([own or [] for own in credit], tasks), credit)]
    else:
        domain = domain_of(trajectories[0]["task"])
        returns = [float(domain.outcome(t)) for t in trajectories]
        found = group_advantages([[value] for value in returns], tasks)
        found = [own and own * sum(turn["role"] == "assistant" for turn in t["dialogue_history"])
                 for own, t in zip(found, trajectories)]
    say(f"{found.count(None):,} of {len(found):,} trajectories are left out: all those of their task are equally good")
    if lost:
        say(f"{lost:,} of {len(found):,} trajectories are left out: with c longer than --max-tokens {args.max_tokens}")
    if not any(found):
        raise InputError(f"{args.trajectories}: no examples to train on: those of each task are equally good" +
                         f", or too long ({lost:,})" * (lost > 0))
    return found


def token_item(item):
    """An item whose action tokens are turns of their own, so that turn_scores gives a log-probability for each."""
    numbers = itertools.count()
    return [row._replace(turns=[next(numbers) if turn >= 0 else -1 for turn in row.turns]) for row in item]


# ---------------------------------------------------------------------------------------------------------------------
# the baselines' examples

def baseline_groups(trajectories, args):
    """Tuples of trajectory numbers, an example each: (chosen, rejected) for multi-turn DPO, else one to imitate."""
    if args.method == "mtdpo":
        pairs = common.trajectory_pairs(trajectories, args.trajectories, args.min_gap)
        say(f"{len(pairs):,} trajectory pairs")
        return pairs
    kept = range(len(trajectories))
    if args.method == "rft":
        graded = domain_of(trajectories[0]["task"]).MIN_GAP is not None
        if not graded:
            kept = [i for i in kept if trajectories[i]["reward"] == 1]
        if not kept:
            raise InputError(f"{args.trajectories}: no successful trajectories (reward 1) to train on")
        if graded:
            best = {}                                                # of each task, the first of equals
            for i in kept:
                task = trajectories[i]["task_id"]
                best[task] = max(best.get(task, i), i, key=lambda i: trajectories[i]["reward"])
            kept = best.values()
            say(f"the best trajectory of each of {len(kept):,} tasks")
        else:
            say(f"{len(kept):,} successful trajectories")
    return [(i,) for i in kept]


# ---------------------------------------------------------------------------------------------------------------------

# Table 5 of the paper, as far as it differs from the defaults; epochs and batch size: see parse_args
PRESETS = {name: {"dtype": "bfloat16", "activation_checkpointing": True}
           for name in ("paper-backend", "paper-frontend")}


def parse_args(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument("--method", choices=["sweet", "mtdpo", "rft", "sft", "grpo", "distill"], required=True,
                        help="see above")
    add_training(parser, max_length=16384)
    group = parser.add_argument_group("SWEET's candidates and pairs")
    group.add_argument("--critic", type=text_flag,
                       help="critic folder (03), of any kind, for sweet, or for grpo; untrained: --model "
                       "itself, with --reference blind; oracle, oracle-patient: what the template task says of a turn, "
                       "a critic without errors, for sweet")
    add_reference(group)
    group.add_argument("--data-frac", type=share_flag, default=0.1, help="share of the trajectories whose turns are "
                       "used (the paper's tenth is of 15,000; with few hundred take all: 1)")
    group.add_argument("--num-candidates", type=num_samples_flag, default=16, help="actions sampled a turn")
    group.add_argument("--pairs-per-turn", type=positive_int, default=4, help="DPO pairs a turn")
    group.add_argument("--like-pairs", action="store_true", help="make no pair of an answer and a turn that goes on")
    group.add_argument("--temperature", type=temperature_flag, default=1.0, help="of the candidates")
    group.add_argument("--max-new-tokens", type=num_tokens_flag, default=1024, help="tokens of a candidate")
    group.add_argument("--candidates", type=text_flag, metavar="FILE",
                       help="candidates.jsonl of another run of the same model, seed "
                       "and trajectories; None: sample them")
    group.add_argument("--sampler", type=text_flag, metavar="http://HOST:PORT/v1#NAME",
                       help="servers of --model's weights (commas "
                       "between addresses) that give token ids, as vLLM does: they sample the candidates, which then "
                       "do not repeat bit for bit; None: every rank holds the model and samples")
    group.add_argument("--concurrency", type=num_samples_flag, default=256,
                       help="candidates sampled at a time, by a rank")
    group.add_argument("--pairs-together", action="store_true",
                       help="keep the pairs of a turn in one batch, where they share the prompt (faster)")
    group.add_argument("--no-tree", action="store_true", help="give every candidate a prompt of its own (slower)")
    group = parser.add_argument_group("grpo and distill")
    group.add_argument("--clip", type=non_negative_float, default=0.2, help="grpo: the ratio counts from 1 - CLIP to "
                       "1 + CLIP")
    group.add_argument("--kl-coef", type=non_negative_float, default=0.0, help="grpo: weight of the divergence from "
                       "the model at the start")
    group.add_argument("--divergence", choices=["forward", "reverse"], default="reverse", help="distill: "
                       "KL(teacher || policy) or KL(policy || teacher)")
    set_preset(parser, PRESETS, argv)
    args = parser.parse_args(argv)
    if (args.candidates or args.pairs_together or args.like_pairs) and args.method != "sweet":
        parser.error("--candidates, --pairs-together and --like-pairs go with --method sweet")
    if args.sampler and (args.method != "sweet" or args.candidates or not is_server(args.sampler)):
        parser.error("--sampler http://HOST:PORT/v1#NAME goes with --method sweet, without --candidates")
    if args.method == "sweet" and args.critic is None or args.critic and args.method not in ("sweet", "grpo"):
        parser.error("--critic DIR goes with --method sweet, which needs it, and grpo")
    if args.reference and not args.critic:
        parser.error("--reference goes with --critic")
    if args.dry_run and args.method == "distill":
        parser.error("--dry-run does not know the teacher of --method distill")
    epochs = 8 if args.preset == "paper-frontend" else 4
    args.epochs = args.epochs or (1 if args.method in ("sweet", "grpo", "distill") else epochs)
    args.batch_size = args.batch_size or (8 if args.method in ("sweet", "mtdpo") else 32)
    return args


def main(argv=None):
    args = parse_args(argv)
    if args.dry_run:
        return dry_run(args, 2 if args.method == "mtdpo" else 1, tree=args.method == "sweet")
    runtime = start(args.seed)
    trajectories = common.read_trajectories(args.trajectories, args.num_trajectories, args.seed)
    domain = domain_of(trajectories[0]["task"])
    oracle, fresh = args.critic in domain.ORACLES, args.model == "tiny" and args.method == "sft"
    untrained = args.critic == common.UNTRAINED
    inputs = [args.trajectories, args.model, args.candidates, args.sampler,
              None if oracle or untrained else args.critic]
    if is_done(args, args.out, inputs, folder=True):
        return
    lora = lora_config(args)
    check_track(args.track)
    if oracle and args.reference:
        raise InputError(f"--reference {args.reference} does nothing with --critic {args.critic}: it has no reference")
    if untrained and args.method == "sweet" and args.model == "tiny":
        raise InputError("--critic untrained: needs a model that was trained to read c, and tiny is a fresh one")
    if oracle and args.method == "grpo":
        raise InputError(f"--critic {args.critic}: grpo takes a critic folder (03); an oracle ranks, and has no "
                         "advantages")
    if oracle and any(domain.lacks(trajectory["task"], args.critic) for trajectory in trajectories):
        raise InputError(f"{args.trajectories}: --critic {args.critic} needs template tasks (01), which state facts")
    if args.model != "tiny" and reads_images(args.model):
        raise InputError(f"{args.model}: policies read and write text alone; a model that sees can be a critic")
    if args.method in ("rft", "mtdpo", "grpo") and not args.critic:
        common.fill_rewards(trajectories, domain, args)
    if fresh:
        model, tokenizer = fresh_model([common.vocabulary_text(trajectory) for trajectory in trajectories])
    else:
        tokenizer = load_tokenizer(args.model)
    critic = args.critic
    if critic and not oracle:
        if untrained:
            critic = common.untrained_critic(args.model, args.reference)
        else:
            critic = common.read_critic(critic, tokenizer, domain, args.reference)
        if line := common.reference_line(critic):
            say(line)
        if args.method == "grpo" and (critic.get("visual") or critic["head"] == "value"):
            raise InputError(f"{args.critic}: grpo takes a critic that reads text and has advantages: 03 --head lm or "
                             "regression")
        critic["show"] = functools.partial(common.show_documents, domain=domain, args=args)
    own = os.path.realpath(args.model)
    others = sum(os.path.realpath(str(trajectory.get("agent"))) != own for trajectory in trajectories)
    if others and args.method in ("grpo", "distill"):
        say(f"{others:,} of {len(trajectories):,} trajectories are of another agent than --model {args.model}")
    elsewhere = sum(sampled_otherwise(trajectory) for trajectory in trajectories)
    if elsewhere and args.method in ("grpo", "distill"):
        say(f"{elsewhere:,} of {len(trajectories):,} trajectories were sampled at another temperature than 1 or by "
            "--best-of (02), so their tokens are no samples of a model's own probabilities")
    if args.method != "sweet":
        groups, pair_indices = baseline_groups(trajectories, args), None
        examples = common.trajectory_examples(trajectories, groups, tokenizer,
                                              privileged=None if args.method in ("rft", "sft") else False,
                                              max_length=args.max_length)
        informed = examples                                          # distill: what the teacher reads, which is longer
        if args.method == "distill":
            informed = common.trajectory_examples(trajectories, groups, tokenizer, privileged=True,
                                                  max_length=args.max_length)
        kept = training.drop_long(informed, args)
        examples, informed = [examples[i] for i in kept], [informed[i] for i in kept]
        example_tasks = [trajectories[groups[i][0]]["task_id"] for i in kept]
    if args.method == "sweet":
        turns = sweet_turns(trajectories, tokenizer, args)
    runtime = runtime._replace(run=begin_output(args, args.out, inputs, training.FILES))
    costs, works = Costs(args.out, runtime.device, folder=True), []
    if args.method == "sweet":
        examples, pair_indices, example_tasks = sweet_examples(turns, tokenizer, critic, args, runtime, works)
        costs.record(works)
    if args.method == "grpo":
        advantages = grpo_advantages([trajectories[i] for i in kept], critic, tokenizer, args, runtime, works)
        gc.collect()
        examples, advantages, example_tasks = zip(*(
            row for row in zip(examples, advantages, example_tasks) if row[1]))
        costs.record(works)
    batch_size = max(1, args.batch_size // (args.pairs_per_turn if args.pairs_together else 1))
    batches = training.epoch_batches(len(examples), batch_size, args.epochs, args.seed)[:args.max_steps]
    steps_an_epoch = math.ceil(len(examples) / batch_size)
    say(f"{len(examples):,} examples, {len(batches):,} steps of {batch_size}")
    training.show_samples(tokenizer, examples[0])

    # The reference is this model before its first update; its log-probabilities are computed once, by the same function
    if fresh:
        common.shard(model.to(runtime.device), runtime, args)
    else:
        model = common.load_sharded(args.model, runtime, args, lora)
    works.append(work_of(model))
    is_dpo = args.method in ("sweet", "mtdpo")
    if args.method == "distill":
        teacher = load_model(args.model, runtime.device, args.dtype)[0].eval().requires_grad_(False)    # on each rank
        works.append(work_of(teacher))
    if args.method == "grpo":                                        # a number for each token, in place of each turn
        advantages = [torch.tensor([own[turn] for row in item for turn in row.turns if turn >= 0])
                      for [item], own in zip(examples, advantages)]
        examples = [(token_item(item),) for [item] in examples]
        sampled = [own for [own] in common.reference_logps(args.out, model, examples, args, runtime)]
    if is_dpo:
        ref_scores = common.reference_logps(args.out, model, examples, args, runtime)
        ref = [torch.stack(chosen_and_rejected(pad_sequence(own, batch_first=True), pair_indices and [pair_indices[i]]),
                           1) for i, own in enumerate(ref_scores)]                      # (P, 2) each
    optimizer = training.adamw(model, args)
    checkpoints = training.Checkpoints(args.out, model, optimizer)
    first = checkpoints.load()
    log = training.StepLog(args, first, len(batches))
    model.train()
    for step in range(first, len(batches)):
        torch.manual_seed(args.seed * len(batches) + step)          # models with dropout: a resumed run draws the same
        sums = collections.Counter()
        num_pairs = sum(len(pair_indices[i]) if pair_indices else 1 for i in batches[step])
        num_action_tokens = sum(turn >= 0 for i in batches[step] for row in examples[i][0] for turn in row.turns)
        for micro, weights in training.rank_batches(batches[step], examples, args.micro_batch_size, runtime):
            batch = common.collate([item for i in micro for item in examples[i]], runtime.device)
            if args.method == "distill":
                shown = common.collate([item for i in micro for item in informed[i]], runtime.device)
                scores = -model.turn_kls(batch, teacher, shown, args.divergence)        # (items, M)
            else:
                scores = model.turn_scores(batch)                   # (items, M): a value for each turn, action or token
            numbers = {}
            if args.method == "grpo":
                before, own = (pad_sequence([of[i] for i in micro], batch_first=True).to(runtime.device)
                               for of in (sampled, advantages))                         # (items, M)
                scores, ratios = clipped_objective(scores, before, own, args.clip, args.kl_coef)
                shares = batch.lengths * weights[:, None] / num_action_tokens           # 0 where there is no token
                numbers = {"ratio": (ratios * shares).sum().item(),
                           "clipped": (((ratios - 1).abs() > args.clip) * shares).sum().item()}
            if is_dpo:
                pairs = pair_indices and [pair_indices[i] for i in micro]
                counts = torch.tensor([len(ref[i]) for i in micro], device=runtime.device)
                shares = weights.repeat_interleave(counts) / num_pairs                  # (P,)
                chosen, rejected = chosen_and_rejected(scores, pairs)                   # (P,)
                ref_chosen, ref_rejected = torch.cat([ref[i] for i in micro]).to(runtime.device).T       # (P,)
                losses, chosen_rewards, rejected_rewards = dpo_loss(chosen, rejected, ref_chosen, ref_rejected,
                                                                    args.beta)
                nll = -chosen / chosen_and_rejected(batch.lengths, pairs)[0]            # (P,) mean over chosen tokens
                loss = ((losses + args.nll_coef * nll) * shares).sum()
                numbers = training.preference_numbers(chosen_rewards, rejected_rewards, nll, shares, args.dtype)
            else:
                loss = -(scores.sum(1) * weights).sum() / num_action_tokens             # a mean over the batch's tokens
            (loss * runtime.world_size).backward()                  # FSDP takes the ranks' mean, the batch is their sum
            sums.update(loss=loss.item(), **numbers, num_tokens=training.num_tokens(examples, micro, weights))
        numbers = training.optimizer_step(model, optimizer, sums, training.Step(
            step, len(batches), [example_tasks[i] for i in batches[step]]), args, runtime)
        log.step(step + 1, **numbers)
        if (step + 1) % args.save_every == 0 or (step + 1) % steps_an_epoch == 0:
            checkpoints.save(step + 1)
            costs.record(works, log.total_tokens)
    checkpoints.wait()

    common.note_system_prompt(args.out, trajectories)
    costs.record(works, log.total_tokens)
    training.finish_training(args, model, tokenizer)


if __name__ == "__main__":
    run_stage(main, ColBenchError)
