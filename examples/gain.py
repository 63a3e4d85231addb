"""A fork of 04: turns ranked by what their reply tells, in place of a critic.

Reads   trajectories.jsonl (02) and a model. There is no critic to train.
Writes  a model folder with metrics.jsonl and agent.json (the system prompt that it was trained with), and
        candidates.jsonl (without --candidates), scored.jsonl and pairs.jsonl.

As 04 --method sweet, but each candidate a is scored by the model at the start alone. A question (or a look) gets its
reply from the rule-based human, and is worth what that says about the reference answer c:
    max(0, log p(c | o_t, a, reply) - log p(c | o_t))            in nats
An answer is worth how much likelier c makes it, a mean over its tokens, as with 04 --critic untrained:
    log p(a | o_t, c) - log p(a | o_t)
So a question whose reply is known already is worth nothing. Pairs of candidates and eq. 4 are 04's.
The idea is that of arXiv 2602.12342 and 2510.14967, which reward turns of whole dialogues.

    python -m examples.gain --trajectories out/offline.jsonl --model models/tiny --out out/gain
    torchrun --nproc-per-node 8 -m examples.gain …
"""
import asyncio
import collections
import functools
import gc
import math
import pathlib
import random

import torch
import torch.nn.functional as F

import common
from colbench import ColBenchError, domain_of
from colbench.schema import label, list_of, record, token_ids, whole
from lib import data, flags, training
from lib.models import encode, end_of_turn, load_tokenizer, lora_config, max_positions, reads_images, sharding_of
from lib.runtime import (
    add_costs,
    begin_output,
    gather,
    InputError,
    is_done,
    map_blocks,
    read_jsonl,
    read_rows,
    Rows,
    run_stage,
    say,
    start,
    write_jsonl,
)
from lib.sampling import add_rows, finish_rows, open_sampler
from lib.servers import visible_text
from lib.tracking import check_track, Track

# ---------------------------------------------------------------------------------------------------------------------
# losses

def pair_losses(logps, ref_logps, lengths, beta, nll_coef):
    """Eq. 4 of pairs of actions: (losses (P,), {name: (P,)} for the log).

    logps, ref_logps   of the chosen and the rejected action of each pair, (P, 2): its log-probability under the policy
                       and under the model at the start
    lengths            their tokens, (P, 2)"""
    chosen_rewards, rejected_rewards = beta * (logps - ref_logps).T                               # (P,)
    nll = -logps[:, 0] / lengths[:, 0]                               # (P,) a mean over the chosen action's tokens
    losses = -F.logsigmoid(chosen_rewards - rejected_rewards) + nll_coef * nll
    return losses, {"chosen": chosen_rewards, "rejected": rejected_rewards, "nll": nll}


# ---------------------------------------------------------------------------------------------------------------------
# the states in which actions are compared

SCORED_TOGETHER = 64            # states of a block; a killed run repeats at most one

# The rows of candidates.jsonl, for one of another run (--candidates)
CANDIDATE = record({"text": str, "ids": token_ids, "ended": bool})
CANDIDATES = record({"task_id": label, "sample": int, "turn": whole(0), "prompt": str, "task": dict,
                     "history": list_of(data.TURN), "candidates": list_of(CANDIDATE)})


def read_states(trajectories, tokenizer, args):
    """The states of all agent turns of --data-frac of the trajectories, {"task_id", "sample", "turn", "task", "prompt",
    "history", "max_rounds", "system"} each. "prompt" is the one that was logged where the file allows
    (common.agent_turns)."""
    chosen = sample_trajectories(trajectories, args.data_frac, args.seed)
    states, kinds = [], collections.Counter()
    for trajectory in chosen:
        states += states_of(trajectory, common.agent_turns(tokenizer, trajectory, kinds))
    most = max_positions(args.model) - args.max_new_tokens
    fitting = [state for state in states if len(encode(tokenizer, state["prompt"])) <= most]
    say(f"{len(states):,} agent turns of {len(chosen):,} dialogues (--data-frac {args.data_frac:g} of "
        f"{len(trajectories):,}); {len(states) - len(fitting):,} are left out, whose prompts are longer than {most:,} "
        f"tokens, so that the model has no room for --max-new-tokens {args.max_new_tokens}")
    common.say_kinds("their prompts", kinds)
    if not fitting:
        raise InputError(f"{args.trajectories}: no turns to train on: their prompts leave no room for --max-new-tokens "
                         f"{args.max_new_tokens}")
    return fitting


def sample_trajectories(trajectories, fraction, seed):
    """A seeded share of the trajectories, in their order; at least one."""
    order = list(range(len(trajectories)))
    random.Random(seed).shuffle(order)
    number = max(1, round(fraction * len(order)))
    return [trajectories[i] for i in sorted(order[:number])]


def states_of(trajectory, turns):
    """The states of a trajectory. turns: its common.agent_turns."""
    history = [{"role": turn["role"], "content": turn["content"]} for turn in trajectory["dialogue_history"]]
    places = [i for i, turn in enumerate(history) if turn["role"] == "assistant"]
    states = []
    for number, (place, (prompt, _)) in enumerate(zip(places, turns)):
        states.append({"task_id": trajectory["task_id"], "sample": trajectory["sample"], "turn": number,
                       "task": trajectory["task"], "prompt": prompt, "history": history[:place],
                       "max_rounds": trajectory.get("max_rounds", 10),
                       "system_prompt": common.shown_system(trajectory),
                       "chat_template_args": common.template_args(trajectory)})
    return states


def name_of(state):
    """What names a state, its candidates and its random numbers."""
    return state["task_id"], state["sample"], state["turn"]


def read_candidates(path, states, num_candidates):
    """The rows of another run's candidates.jsonl; InputError where they are not those of these states."""
    rows = read_jsonl(path, CANDIDATES)
    wanted = [(*name_of(state), num_candidates, state["prompt"]) for state in states]
    given = [(*name_of(row), len(row["candidates"]), row["prompt"]) for row in rows]
    if given != wanted:
        raise InputError(f"{path}: made from other turns or prompts, or with another --num-candidates; the "
                         "trajectories, --num-trajectories, --data-frac and --seed must be the same")
    return [{**state, "candidates": row["candidates"]} for state, row in zip(states, rows)]


# ---------------------------------------------------------------------------------------------------------------------
# sample candidates of each state, score them, pair them

def sample_candidates(states, tokenizer, args, run):
    """Rows of candidates.jsonl: the states with "candidates", --num-candidates actions after each prompt. The ranks
    share the states; each holds the whole policy."""
    path = pathlib.Path(args.out) / "candidates.jsonl"
    if path.exists():                                                # of a run that was interrupted later
        return read_rows(path)
    slots = max(args.num_candidates, args.concurrency)
    longest = max(len(encode(tokenizer, state["prompt"])) for state in states) + args.max_new_tokens
    sampler = open_sampler(args.model, run.device, args.dtype, slots, max(args.max_tokens, longest))

    async def make_row(state):
        replies = await sampler.sample(state["prompt"], args.num_candidates, args.temperature, args.max_new_tokens,
                                       (args.seed, "candidates", *name_of(state)))
        candidates = [{"text": reply.text, "ids": reply.ids, "ended": reply.ended} for reply in replies]
        return {**state, "candidates": candidates}

    with Rows(path, run) as rows:
        in_flight = 2 * math.ceil(slots / args.num_candidates)       # the next one waits already
        failures = add_rows(rows, states, make_row, in_flight, run)
    add_costs(args.out, folder=True, generated_tokens=sum(gather(sampler.generated_tokens)))
    finish_rows(rows, len(states), failures, run)
    return read_rows(path)


def score_candidates(rows, tokenizer, args, run):
    """Rows of scored.jsonl: those of candidates.jsonl with "advantages" (worths). The model is split over the ranks,
    which score every block together."""
    path = pathlib.Path(args.out) / "scored.jsonl"
    if path.exists():
        return read_rows(path)
    critic = common.Critic(args.model, args.model, ref_sees_c=False)
    common.load_critic(critic, functools.partial(common.load_scorer, run=run, sharding=sharding_of(args)))
    blocks = [rows[i:i + SCORED_TOGETHER] for i in range(0, len(rows), SCORED_TOGETHER)]
    domain = domain_of(rows[0]["task"])
    with data.environment(domain, f"{args.out}.images", pathlib.Path(args.out).parent, vars(args)) as environment:

        def score_block(block):
            advantages_of = worths(block, critic, tokenizer, environment, args.max_tokens)
            return [{**row, "advantages": advantages} for row, advantages in zip(block, advantages_of)]
        rows = map_blocks(path, blocks, score_block, run, "state", together=True)
    add_costs(args.out, folder=True)
    return rows


def worths(rows, critic, tokenizer, environment, max_tokens):
    """What every candidate of the rows is worth, a list for each row: by gains() or, of an answer, by the untrained
    critic."""
    points = [decision_point(row) for row in rows]
    scores = common.score_actions(critic, tokenizer, points, max_tokens, critic.scorer.model.device)
    gain_of = gains(rows, critic.scorer, tokenizer, environment, max_tokens)
    worths_of_rows = []
    for number, point in enumerate(points):
        texts = zip(point.texts, scores[number])
        worths_of_rows.append([gain_of.get((number, text), score) for text, score in texts])
    return worths_of_rows


def decision_point(row):
    """The candidates of a state as common.score_actions takes them."""
    domain = domain_of(row["task"])
    texts = [visible_text(domain, candidate["text"], row["prompt"]) for candidate in row["candidates"]]
    ids = [candidate["ids"] for candidate in row["candidates"]]
    return common.DecisionPoint(row["prompt"], row["task"], row["history"], ids, texts)


def gains(rows, scorer, tokenizer, environment, max_tokens):
    """{(number of a row, text): log p(c | o_t, text, reply) - log p(c | o_t), at least 0} of all candidates of the rows
    that are no answers."""
    items = [solution_item(tokenizer, row["prompt"], row["task"]) for row in rows]             # after o_t
    questions = []
    for number, row in enumerate(rows):
        domain = domain_of(row["task"])
        for text in sorted(set(decision_point(row).texts)):
            history = [*row["history"], {"role": "assistant", "content": text}]
            if domain.answer_of(history, len(history) == 2 * row["max_rounds"]) is None:
                history.append(reply_to(row["task"], history, environment))
                prompt = common.prompt_text(tokenizer, row, history)
                items.append(solution_item(tokenizer, prompt, row["task"]))                    # after the reply
                questions.append((number, text))
    logps = [values.item() for values in common.action_outputs(scorer, items, max_tokens, scorer.model.device)]
    gain_of = {}
    for (number, text), logp in zip(questions, logps[len(rows):]):
        gain_of[number, text] = max(0.0, logp - logps[number])
    return gain_of


def solution_item(tokenizer, prompt, task):
    """The item of one action after a prompt: the message that gives the reference as the answer."""
    answer = encode(tokenizer, domain_of(task).answer_message(task)) + [end_of_turn(tokenizer)]
    return common.actions_item(tokenizer, prompt, [answer])


def reply_to(task, history, environment):
    """The turn that follows the agent's: what the environment says, or the rule-based human, drawn by the history."""
    reply = asyncio.run(environment.tool_reply(task, history))
    if reply is None:
        reply = asyncio.run(environment.rule_reply(task, history, random.Random(repr(history))))
    return {"role": "user", "content": reply}


def candidate_pairs(row, pairs_per_turn, rng):
    """Pairs (better, worse) of candidate numbers: a random one of the better half, a random one of the worse.

    They are drawn with replacement, so a pair can be there twice. Candidates stopped by length are left out, and two
    equal actions are no pair."""
    order = [i for i, candidate in enumerate(row["candidates"]) if candidate["ended"]]
    rng.shuffle(order)                                               # ties fall either way
    order.sort(key=lambda i: -row["advantages"][i])
    half = len(order) // 2
    pairs = []
    for _ in range(pairs_per_turn if half else 0):
        better = rng.choice(order[:half])
        worse = rng.choice(order[-half:])
        if row["candidates"][better]["ids"] != row["candidates"][worse]["ids"]:
            pairs.append((better, worse))
    return pairs


def as_pair(row, chosen, rejected):
    """A row of pairs.jsonl: a state with two of its candidates, given by number."""
    pair = {key: row[key] for key in ("task_id", "sample", "turn", "prompt")}
    for side, number in (("chosen", chosen), ("rejected", rejected)):
        pair[side] = {**row["candidates"][number], "advantage": row["advantages"][number]}
    return pair


def pairs_of(rows, tokenizer, args, run):
    """The rows of pairs.jsonl that are short enough, of the rows of scored.jsonl; says how many are not there, and
    why."""
    rng = random.Random(args.seed)
    pairs, num_cut = [], 0
    for row in rows:
        num_cut += sum(not candidate["ended"] for candidate in row["candidates"])
        for chosen, rejected in candidate_pairs(row, args.pairs_per_turn, rng):
            pairs.append(as_pair(row, chosen, rejected))
    if run.rank == 0:
        write_jsonl(pathlib.Path(args.out) / "pairs.jsonl", pairs)
    fitting = [pair for pair in pairs if pair_length(pair, tokenizer) <= args.max_length]
    counts = (f"{len(pairs):,} pairs of {len(rows) * args.pairs_per_turn:,} asked for (others: two equal actions, or "
              f"fewer than two that ended), {num_cut:,} candidates stopped by --max-new-tokens were left out; "
              f"{len(pairs) - len(fitting):,} pairs are longer than --max-length {args.max_length}")
    if not fitting:
        raise InputError(f"{args.trajectories}: no examples to train on: {counts}")
    say(counts)
    return fitting


def pair_length(pair, tokenizer):
    """The tokens of a pair's prompt with its longer action."""
    return len(encode(tokenizer, pair["prompt"])) + max(len(pair[side]["ids"]) for side in ("chosen", "rejected"))


def pair_examples(pairs, tokenizer, together):
    """Examples of pairs of actions: one a pair or, with `together`, one of all pairs of a turn.

    An example has one item, its prompt and all of its actions (common.actions_item)."""
    groups = collections.defaultdict(list)                           # the pairs of a turn, or each pair alone
    for number, pair in enumerate(pairs):
        groups[(*name_of(pair), pair["prompt"]) if together else number].append(pair)
    examples = []
    for group in groups.values():
        actions, numbered_pairs = [], []
        for pair in group:
            sides = []
            for side in ("chosen", "rejected"):
                action = pair[side]["ids"]
                if action not in actions:
                    actions.append(action)
                sides.append((0, actions.index(action)))             # (item, action)
            numbered_pairs.append(tuple(sides))
        item = common.actions_item(tokenizer, group[0]["prompt"], actions)
        examples.append(common.Example([item], numbered_pairs, group[0]["task_id"]))
    return examples


# ---------------------------------------------------------------------------------------------------------------------
# what the loop trains on, and the loop

def gain_examples(trajectories, tokenizer, args, run, begin):
    """Examples of pairs of candidates. The models of a phase are freed before those of the next are loaded.
    begin: begins the output, when all inputs are read."""
    if any(domain_of(t["task"]).lacks(t["task"], "rules") for t in trajectories):
        raise InputError(f"{args.trajectories}: gain needs template tasks (01), whose human has rules")
    rows = read_states(trajectories, tokenizer, args)
    if args.candidates:
        rows = read_candidates(args.candidates, rows, args.num_candidates)
    begin()
    if not args.candidates:
        rows = sample_candidates(rows, tokenizer, args, run)
    gc.collect()
    rows = score_candidates(rows, tokenizer, args, run)
    gc.collect()
    return pair_examples(pairs_of(rows, tokenizer, args, run), tokenizer, args.pairs_together)


def train(scorer, examples, ref_logps, args, run):
    """Train the scorer's model on the examples, from the last saved state.
    ref_logps: of each example what common.reference_logps gives."""
    batch_size = args.batch_size
    if args.pairs_together:
        batch_size = max(1, batch_size // args.pairs_per_turn)
    batches = training.epoch_batches(len(examples), batch_size, args.epochs, args.seed)[:args.max_steps]
    say(f"{len(examples):,} examples, {len(batches):,} steps of {batch_size}")
    optimizer = training.adamw(scorer, args.lr)
    checkpoints = training.Checkpoints(args.out, scorer, optimizer)
    first = checkpoints.load()
    log = training.StepLog(args.out, first, len(batches), functools.partial(Track, args.track, args.out, vars(args)))
    scorer.train()
    for step in range(first, len(batches)):
        torch.manual_seed(args.seed * len(batches) + step)          # models with dropout: a resumed run draws the same
        batch_examples = [examples[i] for i in batches[step]]
        num_pairs = sum(len(example.pairs) for example in batch_examples)      # the step's loss is a mean over these
        sums = collections.Counter()
        for micro, weights in training.rank_batches(batches[step], examples, args.micro_batch_size, run):
            micro_examples = [examples[i] for i in micro]
            batch = scorer.collate(common.items_of(micro_examples), run.device)
            logps = scorer(batch)                                   # (B, M): of each item's actions
            sums["num_tokens"] += training.num_tokens(micro_examples, weights)
            weights = weights / num_pairs                           # (examples,)
            pairs = common.batch_pairs(micro_examples)                                         # (P, 2, 2)
            start_logps = common.padded_outputs([ref_logps[i] for i in micro], run.device)     # (B, M)
            sides = [values[pairs[..., 0], pairs[..., 1]] for values in (logps, start_logps, batch.lengths)]
            losses, numbers = pair_losses(*sides, args.beta, args.nll_coef)                     # (P,), eq. 4
            numbers = training.preference_numbers(**numbers, dtype=args.dtype)
            pairs_of_each = torch.tensor([len(example.pairs) for example in micro_examples], device=run.device)
            weights = weights.repeat_interleave(pairs_of_each)      # (P,)
            loss = (losses * weights).sum()
            (loss * run.world_size).backward()                      # FSDP takes the ranks' mean, the batch is their sum
            sums.update(training.weighted_sums({"loss": losses, **numbers}, weights))
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
    parser.add_argument("--method", choices=["gain"], default="gain", help="the only one")
    flags.add_training(parser, max_length=16384)
    parser.add_argument("--epochs", type=flags.positive_int, default=1, help="passes over the examples")
    parser.add_argument("--batch-size", type=flags.positive_int, default=8, help="pairs a step")
    group = parser.add_argument_group("candidates and pairs")
    group.add_argument("--data-frac", type=flags.share_flag, default=0.1,
                       help="share of the trajectories whose turns are "
                       "used (the published code's tenth is of 15,000; with few hundred take all: 1)")
    group.add_argument("--num-candidates", type=flags.num_samples_flag, default=16, help="actions sampled a turn")
    group.add_argument("--pairs-per-turn", type=flags.positive_int, default=4, help="DPO pairs a turn")
    group.add_argument("--temperature", type=flags.temperature_flag, default=1.0, help="of the candidates")
    group.add_argument("--max-new-tokens", type=flags.num_tokens_flag, default=1024, help="tokens of a candidate")
    group.add_argument("--candidates", type=flags.text_flag, metavar="FILE",
                       help="candidates.jsonl of another run of the "
                       "same model, seed, trajectories and sampling; None: sample them")
    group.add_argument("--concurrency", type=flags.num_samples_flag, default=256,
                       help="candidates sampled at once by a rank")
    group.add_argument("--pairs-together", action="store_true", help="an example is all pairs of a turn, which share "
                       "the prompt (faster); a batch has --batch-size / --pairs-per-turn of them")
    args = parser.parse_args(argv)
    if args.dry_run:
        parser.error("--dry-run goes with 04_train_policy.py")
    return args


def main(argv=None):
    args = parse_args(argv)
    run = start(args.seed)
    trajectories = data.read_trajectories(args.trajectories, args.num_trajectories, args.seed)
    inputs = [args.trajectories, args.model, args.candidates]
    if is_done(vars(args), args.out, inputs, folder=True):
        return
    check_track(args.track)
    if reads_images(args.model):
        raise InputError(f"{args.model}: policies read and write text alone; a model that sees can be a critic")
    tokenizer = load_tokenizer(args.model)
    lora = lora_config(args.model, args.lora, args.lora_targets, args.merge)
    begin = functools.partial(begin_output, vars(args), args.out, inputs, folder=True)
    examples = gain_examples(trajectories, tokenizer, args, run, begin)
    training.show_samples(tokenizer, examples[0])

    # The reference is this model before its first update; its log-probabilities are computed once, by the same function
    scorer = common.load_scorer(args.model, run, sharding_of(args), lora)
    common.check_positions(common.items_of(examples), scorer.model)
    ref_logps = common.reference_logps(args.out, scorer, examples, args.max_tokens, run.device)
    train(scorer, examples, ref_logps, args, run)
    common.note_prompt(args.out, trajectories)
    training.finish_training(args.out, scorer, tokenizer, args.merge)
    add_costs(args.out, folder=True)


if __name__ == "__main__":
    run_stage(main, ColBenchError)
