"""A fork of 04: SWEET-RL that keeps how the agent answers, by the logged answers that were right.

Reads   trajectories.jsonl (02), a model, and a critic (03).
Writes  a model folder with metrics.jsonl and agent.json (the system prompt that it was trained with), and
        candidates.jsonl (without --candidates), scored.jsonl and pairs.jsonl.

04 --method sweet with two flags more, for what the paper lacks:
--answer-coef C       eq. 4 has a further term, C times the mean NLL of a right answer that is logged, drawn once for
                      each example: an agent that learns to ask keeps how it answers.
--answers-by-outcome  No pair chooses an answer, except in the last turn of a logged dialogue whose answer was right: a
                      critic that sees c overrates lucky guesses.

    python -m examples.answers --answer-coef 1 --trajectories out/offline.jsonl --model models/tiny \\
        --critic out/critic --out out/answers
    torchrun --nproc-per-node 8 -m examples.answers --answer-coef 1 …
"""
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
from lib.models import decode, encode, load_tokenizer, lora_config, max_positions, reads_images, sharding_of
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
from lib.servers import is_server, visible_text
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


def answer_nlls(logps, lengths):
    """The mean NLL of the right answer of each example, (examples,): of the second of its two items, one action.
    logps, lengths: (B, M) of all items."""
    return -logps[1::2].sum(1) / lengths[1::2].sum(1)


# ---------------------------------------------------------------------------------------------------------------------
# the states in which actions are compared

SCORED_TOGETHER = 64            # states of a block; a killed run repeats at most one

# The rows of candidates.jsonl, for one of another run (--candidates)
CANDIDATE = record({"text": str, "ids": token_ids, "ended": bool})
CANDIDATES = record({"task_id": label, "sample": int, "turn": whole(0), "prompt": str, "task": dict,
                     "history": list_of(data.TURN), "candidates": list_of(CANDIDATE)})


def read_states(trajectories, tokenizer, args):
    """The states of all agent turns of --data-frac of the trajectories, {"task_id", "sample", "turn", "task", "prompt",
    "history", "max_rounds"} each. "prompt" is the one that was logged where the file allows (common.agent_turns)."""
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
                       "max_rounds": trajectory.get("max_rounds", 10)})
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
    share the states; each holds the whole policy, or asks --sampler."""
    path = pathlib.Path(args.out) / "candidates.jsonl"
    if path.exists():                                                # of a run that was interrupted later
        return read_rows(path)
    slots = max(args.num_candidates, args.concurrency)
    longest = max(len(encode(tokenizer, state["prompt"])) for state in states) + args.max_new_tokens
    sampler = open_sampler(args.sampler or args.model, run.device, args.dtype, slots, max(args.max_tokens, longest),
                           tokenizer)

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


def score_candidates(rows, critic, tokenizer, args, run):
    """Rows of scored.jsonl: those of candidates.jsonl with "advantages", the critic's score of every candidate (eq. 3).
    Critic and reference are split over the ranks, which score every block together."""
    path = pathlib.Path(args.out) / "scored.jsonl"
    if path.exists():
        return read_rows(path)
    common.load_critic(critic, functools.partial(common.load_scorer, run=run, sharding=sharding_of(args)))
    if critic.is_visual:
        critic.sight = data.sight_of(critic.scorer.processor, domain_of(rows[0]["task"]), vars(args))
    blocks = [rows[i:i + SCORED_TOGETHER] for i in range(0, len(rows), SCORED_TOGETHER)]

    def score_block(block):
        points = [decision_point(row) for row in block]
        scores = common.score_actions(critic, tokenizer, points, args.max_tokens, run.device)
        return [{**row, "advantages": advantages} for row, advantages in zip(block, scores)]
    rows = map_blocks(path, blocks, score_block, run, "state", together=True)
    add_costs(args.out, folder=True)
    return rows


def decision_point(row):
    """The candidates of a state as common.score_actions takes them."""
    domain = domain_of(row["task"])
    texts = [visible_text(domain, candidate["text"], row["prompt"]) for candidate in row["candidates"]]
    ids = [candidate["ids"] for candidate in row["candidates"]]
    return common.DecisionPoint(row["prompt"], row["task"], row["history"], ids, texts)


def candidate_pairs(row, pairs_per_turn, rng, barred=()):
    """Pairs (better, worse) of candidate numbers: a random one of the better half, a random one of the worse.

    They are drawn with replacement, so a pair can be there twice. Candidates stopped by length are left out, and two
    equal actions are no pair. barred: numbers of candidates that no pair chooses."""
    order = [i for i, candidate in enumerate(row["candidates"]) if candidate["ended"]]
    rng.shuffle(order)                                               # ties fall either way
    order.sort(key=lambda i: -row["advantages"][i])
    half = len(order) // 2
    better_half = [i for i in order[:half] if i not in barred]
    pairs = []
    for _ in range(pairs_per_turn if better_half else 0):
        better = rng.choice(better_half)
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


def pairs_of(rows, right_turns, tokenizer, args, run):
    """The rows of pairs.jsonl that are short enough, of the rows of scored.jsonl; says how many are not there, and
    why. right_turns: where a pair may choose an answer (turns_of_right_answers); None: everywhere."""
    rng = random.Random(args.seed)
    pairs, num_cut = [], 0
    for row in rows:
        num_cut += sum(not candidate["ended"] for candidate in row["candidates"])
        barred = []
        if right_turns is not None and name_of(row) not in right_turns:
            barred = answering_candidates(row)
        for chosen, rejected in candidate_pairs(row, args.pairs_per_turn, rng, barred):
            pairs.append(as_pair(row, chosen, rejected))
    if run.rank == 0:
        write_jsonl(pathlib.Path(args.out) / "pairs.jsonl", pairs)
    fitting = [pair for pair in pairs if pair_length(pair, tokenizer) <= args.max_length]
    counts = (f"{len(pairs):,} pairs of {len(rows) * args.pairs_per_turn:,} asked for (others: two equal actions, "
              f"fewer than two that ended, or only answers to choose), {num_cut:,} candidates stopped by "
              f"--max-new-tokens were left out; {len(pairs) - len(fitting):,} pairs are longer than --max-length "
              f"{args.max_length}")
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
# right answers that are logged

def read_right_answers(trajectories, tokenizer, args):
    """An item of the last turn of each successful trajectory, if it is short enough, whose action tokens are those that
    state the answer: not that the agent answers, but what. InputError where there is none."""
    successful = [t for t in trajectories if domain_of(t["task"]).eval_score(t) == 1]
    items = []
    for trajectory in successful:
        prompt, action = common.agent_turns(tokenizer, trajectory)[-1]
        first = first_answer_token(tokenizer, action, trajectory["answer"].strip())
        if first is None:
            continue
        read = encode(tokenizer, prompt) + action[:first]
        stated = action[first:]
        item = [common.Row(read + stated, [-1] * len(read) + [0] * len(stated))]
        if training.item_length(item) <= args.max_length:
            items.append(item)
    if not items:
        raise InputError(f"{args.trajectories}: --answer-coef: no successful dialogue whose last turn states an answer")
    say(f"{len(items):,} right answers of {len(trajectories):,} trajectories (--answer-coef); "
        f"{len(successful) - len(items):,} more do not stand in the last turn, or are longer than --max-length with it")
    return items


def first_answer_token(tokenizer, action, answer):
    """From which token of an action (ids) its text still holds the `answer`; None where it does not hold it."""
    for first in reversed(range(len(action))):
        if answer in decode(tokenizer, action[first:]):
            return first
    return None


def with_right_answers(examples, right_answers, seed):
    """The examples, each with a second item: one of the items of read_right_answers, drawn once at random."""
    rng = random.Random(seed)
    return [example._replace(items=[*example.items, rng.choice(right_answers)]) for example in examples]


def turns_of_right_answers(trajectories, path):
    """Names (name_of) of the turns whose logged answers were right: the last ones of successful dialogues.
    InputError, which names the file `path`, where there is none."""
    names = set()
    for trajectory in trajectories:
        if domain_of(trajectory["task"]).eval_score(trajectory) == 1:
            num_turns = sum(turn["role"] == "assistant" for turn in trajectory["dialogue_history"])
            names.add((trajectory["task_id"], trajectory["sample"], num_turns - 1))
    if not names:
        raise InputError(f"{path}: --answers-by-outcome: no successful dialogue")
    return names


def answering_candidates(row):
    """The numbers of the candidates that are answers, so that the dialogue would end with them: in the last round all,
    as 02 takes whatever is said there for the answer."""
    domain = domain_of(row["task"])
    answers = []
    for number, text in enumerate(decision_point(row).texts):
        history = [*row["history"], {"role": "assistant", "content": text}]
        if domain.answer_of(history, len(history) == 2 * row["max_rounds"]) is not None:
            answers.append(number)
    return answers


# ---------------------------------------------------------------------------------------------------------------------
# what the loop trains on, and the loop

def answers_examples(trajectories, tokenizer, args, run, begin):
    """Examples of pairs of candidates. The models of a phase are freed before those of the next are loaded.
    begin: begins the output, when all inputs are read."""
    domain = domain_of(trajectories[0]["task"])
    critic = common.open_critic(args.critic, args.model, tokenizer, domain, args.reference_sees_c)
    if args.answer_coef or args.answers_by_outcome:
        data.fill_rewards(trajectories, vars(args))
    right_answers = read_right_answers(trajectories, tokenizer, args) if args.answer_coef else None
    right_turns = turns_of_right_answers(trajectories, args.trajectories) if args.answers_by_outcome else None
    rows = read_states(trajectories, tokenizer, args)
    if args.candidates:
        rows = read_candidates(args.candidates, rows, args.num_candidates)
    begin()
    if not args.candidates:
        rows = sample_candidates(rows, tokenizer, args, run)
    gc.collect()
    rows = score_candidates(rows, critic, tokenizer, args, run)
    del critic
    gc.collect()
    examples = pair_examples(pairs_of(rows, right_turns, tokenizer, args, run), tokenizer, args.pairs_together)
    if args.answer_coef:
        examples = with_right_answers(examples, right_answers, args.seed)
    return examples


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
            pair_weights = weights.repeat_interleave(pairs_of_each)                                 # (P,)
            loss = (losses * pair_weights).sum()
            sums.update(training.weighted_sums({"loss": losses, **numbers}, pair_weights))
            if args.answer_coef:
                nlls = answer_nlls(logps, batch.lengths)                                            # (examples,)
                answer_loss = (nlls * pairs_of_each * weights).sum()                                # a mean over pairs
                loss = loss + args.answer_coef * answer_loss
                sums.update(answer_nll=answer_loss.item(), loss=args.answer_coef * answer_loss.item())
            (loss * run.world_size).backward()                      # FSDP takes the ranks' mean, the batch is their sum
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
    parser.add_argument("--method", choices=["sweet"], default="sweet", help="the only one")
    flags.add_training(parser, max_length=16384)
    parser.add_argument("--epochs", type=flags.positive_int, default=1, help="passes over the examples")
    parser.add_argument("--batch-size", type=flags.positive_int, default=8, help="pairs a step")
    group = parser.add_argument_group("candidates and pairs")
    group.add_argument("--critic", type=flags.text_flag, required=True,
                       help="a folder of 03; or untrained (--model itself, "
                       "with a reference that does not see c)")
    flags.add_reference(group)
    group.add_argument("--data-frac", type=flags.share_flag, default=0.1,
                       help="share of the trajectories whose turns are "
                       "used (the published code's tenth is of 15,000; with few hundred take all: 1)")
    group.add_argument("--num-candidates", type=flags.num_samples_flag, default=16, help="actions sampled a turn")
    group.add_argument("--pairs-per-turn", type=flags.positive_int, default=4, help="DPO pairs a turn")
    group.add_argument("--answer-coef", type=flags.non_negative_float, default=0.0,
                       help="weight of the mean NLL of a right "
                       "answer, drawn once for each example from all successful trajectories (whatever --data-frac)")
    group.add_argument("--answers-by-outcome", action="store_true", help="no pair chooses an answer, except in the "
                       "last turn of a dialogue whose answer was right")
    group.add_argument("--temperature", type=flags.temperature_flag, default=1.0, help="of the candidates")
    group.add_argument("--max-new-tokens", type=flags.num_tokens_flag, default=1024, help="tokens of a candidate")
    group.add_argument("--candidates", type=flags.text_flag, metavar="FILE",
                       help="candidates.jsonl of another run of the "
                       "same model, seed, trajectories and sampling; None: sample them")
    group.add_argument("--sampler", type=flags.text_flag, metavar="http://HOST:PORT/v1#NAME",
                       help="servers of --model's weights (commas between addresses) that give token ids, as vLLM "
                       "does: they sample the candidates, which then do not repeat bit for bit; None: every rank holds "
                       "the model and samples")
    group.add_argument("--concurrency", type=flags.num_samples_flag, default=256,
                       help="candidates sampled at once by a rank")
    group.add_argument("--pairs-together", action="store_true", help="an example is all pairs of a turn, which share "
                       "the prompt (faster); a batch has --batch-size / --pairs-per-turn of them")
    args = parser.parse_args(argv)
    if args.sampler and (args.candidates or not is_server(args.sampler)):
        parser.error("--sampler takes http://HOST:PORT/v1#NAME, without --candidates")
    if args.dry_run:
        parser.error("--dry-run goes with 04_train_policy.py")
    return args


def main(argv=None):
    args = parse_args(argv)
    run = start(args.seed)
    trajectories = data.read_trajectories(args.trajectories, args.num_trajectories, args.seed)
    inputs = [args.trajectories, args.model, args.candidates, args.sampler]
    if args.critic != common.UNTRAINED:
        inputs.append(args.critic)
    if is_done(vars(args), args.out, inputs, folder=True):
        return
    check_track(args.track)
    if reads_images(args.model):
        raise InputError(f"{args.model}: policies read and write text alone; a model that sees can be a critic")
    tokenizer = load_tokenizer(args.model)
    lora = lora_config(args.model, args.lora, args.lora_targets, args.merge)
    begin = functools.partial(begin_output, vars(args), args.out, inputs, folder=True)
    examples = answers_examples(trajectories, tokenizer, args, run, begin)
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
