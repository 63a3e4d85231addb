"""Stage 4: train the agent, by SWEET-RL or by one of its baselines.

Reads   trajectories.jsonl (02), a model, and for --method sweet a critic (03).
Writes  a model folder with metrics.jsonl (as 03) and agent.json (its system prompt in training); for sweet also
        candidates.jsonl  {"task_id", "sample", "turn", "task", "history", "max_rounds", "prompt" (o_t),
                          "candidates": [{"text", "ids", "ended"}, …]}, unless --candidates names such a file
        scored.jsonl      the same rows with "advantages", eq. 3 of each candidate
        pairs.jsonl       {"task_id", "sample", "turn", "prompt", "chosen", "rejected": candidates with "advantage"}

--method sweet   Sample 16 candidates given o_t (never c) for each agent turn of --data-frac of the trajectories. The
                 critic scores them: A(o_t, a, c), eq. 3. --pairs-per-turn pairs are drawn with replacement, a candidate
                 of the better half and one of the worse. Single-turn DPO trains on the pairs:
    eq. 4        -log s( b log[p(a+|o) / p_ref(a+|o)] - b log[p(a-|o) / p_ref(a-|o)] ) + nll_coef * mean NLL of a+
                 with s the sigmoid, b --beta, and sums over the tokens of an action (end of turn included).
                 --reference-sees-c no: p_ref does not read c in ranking, as in the published code (default: as in the
                 critic's training). This adds what the base model itself reads out of c:
                 log p(a|o,c) - log p_ref(a|o) = [log p(a|o,c) - log p_ref(a|o,c)] + [log p_ref(a|o,c) - log p_ref(a|o)]
--method mtdpo   Multi-turn DPO: the same loss on pairs of trajectories of one task, all agent tokens summed.
--method rft     Rejection fine-tuning: likelihood of the agent's turns in successful trajectories (if returns are
                 graded: in the best trajectory of each task).
--method sft     Likelihood of the agent's turns in all trajectories. With --model tiny a new small model.
                 rft and sft put c in front of dialogues whose agent saw it (02 --agent script-informed).

Epochs and batch size: sweet 1, 8; mtdpo 4, 8; rft and sft 4, 32 (--preset paper-frontend: 8 in place of 4 epochs).
Differs from the paper: drops pairs of equal advantage and candidates stopped by length (docs/reproduce.md).
Other methods are forks of this file, in examples/: docs/fork.md.

    python 04_train_policy.py --method sweet --trajectories out/offline.jsonl --model models/tiny --critic out/critic \\
        --data-frac 1 --lr 3e-5 --out out/sweet
    torchrun --nproc-per-node 8 04_train_policy.py --method sweet --trajectories trajectories.jsonl \\
        --model meta-llama/Llama-3.1-8B-Instruct --critic critic --dtype bfloat16 --out policy
"""
from lib import flags

# ---------------------------------------------------------------------------------------------------------------------
# arguments

# Epochs and batch size if no flag sets them: table 5's backend row
EPOCHS = {"sweet": 1, "mtdpo": 4, "rft": 4, "sft": 4}
BATCH_SIZE = {"sweet": 8, "mtdpo": 8, "rft": 32, "sft": 32}

# Settings of the paper (its text and table 5) and of the published code (docs/reproduce.md)
PAPER = {"dtype": "bfloat16", "activation_checkpointing": True, "lr": 2e-7, "beta": 0.1, "nll_coef": 0.01,
         "data_frac": 0.1, "num_candidates": 16, "pairs_per_turn": 4, "temperature": 1.0}
PRESETS = {"paper-backend": PAPER, "paper-frontend": PAPER, "published-backend": PAPER}
# Not in PRESETS: parse_args refuses this flag for other methods
REFERENCE_SEES_C = {"paper-backend": True, "paper-frontend": True, "published-backend": False}        # in ranking


def parse_args(argv=None):
    parser = flags.argument_parser(__doc__)
    parser.add_argument("--method", choices=EPOCHS, required=True, help="see above")
    flags.add_training(parser, max_length=16384)
    flags.add_critic(parser)
    flags.add_candidates(parser)
    flags.set_preset(parser, PRESETS, argv)
    args = parser.parse_args(argv)
    if args.method != "sweet":
        for flag in ("critic", "candidates", "sampler", "pairs_together", "reference_sees_c"):
            if getattr(args, flag) != parser.get_default(flag):
                parser.error(f"--{flag.replace('_', '-')} goes with --method sweet")
    elif args.critic is None:
        parser.error("--method sweet needs --critic: a folder, or untrained")
    elif args.reference_sees_c is None:
        args.reference_sees_c = REFERENCE_SEES_C.get(args.preset)
    if args.preset == "paper-frontend" and args.epochs is None and args.method != "sweet":
        args.epochs = 8
    args.epochs = args.epochs or EPOCHS[args.method]
    args.batch_size = args.batch_size or BATCH_SIZE[args.method]
    return args


if __name__ == "__main__":
    parse_args()                    # answers --help and wrong flags before the imports below, which take seconds

import collections
import functools
import gc
import math
import random
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tqdm import tqdm

import common
from colbench import domain_of
from colbench.schema import label, list_of, record, token_ids, whole
from lib import beforehand, data, training
from lib.load import fresh_model, load_tokenizer, most_positions, read_config, reads_images, shard
from lib.logps import ActionModel, items_of, padded_outputs, reference_logps
from lib.memory import dry_run
from lib.runtime import InputError, read_jsonl, read_rows, RowFile, run_stage, say, write_jsonl
from lib.sampling import add_rows, finish_rows, open_sampler
from lib.servers import visible_text
from lib.statistics import agent_places
from lib.tokens import agent_turns, encode, LAST_ROUND, note_prompt, say_kinds

# ---------------------------------------------------------------------------------------------------------------------
# losses

def dpo_losses(logps, ref_logps, lengths, beta, nll_coef):
    """Eq. 4 of pairs of actions: (losses (P,), {name: (P,)} for the log).

    logps, ref_logps   (P, 2) log-probabilities of each pair's chosen and rejected action under the policy and under the
                       reference model
    lengths            (P, 2) their numbers of tokens"""
    rewards = beta * (logps - ref_logps)                             # (P, 2)
    chosen, rejected = rewards.T                                     # (P,) each
    nll = -logps[:, 0] / lengths[:, 0]                               # (P,) a mean over the chosen action's tokens
    losses = -F.logsigmoid(chosen - rejected) + nll_coef * nll       # (P,)
    return losses, {"chosen": chosen, "rejected": rejected, "nll": nll}


def batch_pairs(examples):
    """The pairs of several examples as a tensor (P, 2, 2): for each pair the chosen and the rejected action, for each
    action its item (numbered over all examples) and its number.

    Two examples of one item with pairs ((0, 0), (0, 1)) and ((0, 2), (0, 1)) give
        [[[0, 0], [0, 1]], [[1, 2], [1, 1]]]"""
    pairs, first_item = [], 0
    for example in examples:
        for pair in example.action_pairs:
            pairs.append([(first_item + item, action) for item, action in pair])
        first_item += len(example.items)
    return torch.tensor(pairs)


def preference_losses(action_model, batch, examples, ref_logps, job):
    """Eq. 4 of a micro-batch, with numbers for the log: {"loss", …: (examples,)}. They are sums over each example's
    pairs; train() divides them by the step's number of pairs.
    ref_logps: (B, M), of each action under the reference model."""
    items, actions = batch_pairs(examples).unbind(-1)                # of chosen and rejected, (P, 2) each
    pair_logps = action_model(batch)[items, actions]                 # of (B, M), each action's log-probability: (P, 2)
    pair_ref_logps = ref_logps[items, actions]                                              # (P, 2)
    lengths = batch.lengths[items, actions]                                                 # (P, 2)
    losses, metrics = dpo_losses(pair_logps, pair_ref_logps, lengths, job.beta, job.nll_coef)      # (P,)
    metrics = training.preference_metrics(**metrics, dtype=job.sharding.dtype)
    num_pairs = [len(example.action_pairs) for example in examples]
    sums = {}
    for name, values in {"loss": losses, **metrics}.items():
        sums[name] = torch.stack([part.sum() for part in values.split(num_pairs)])
    return sums


def imitation_losses(action_model, batch, examples, ref_logps):
    """Negative log-probability of all actions of each example, which has one item: {"loss": (examples,)}."""
    return {"loss": -action_model(batch).sum(1)}


# ---------------------------------------------------------------------------------------------------------------------
# sweet: the states in which actions are compared

SCORED_TOGETHER = 64            # states per block; a killed run repeats at most one block

# Rows of another run's candidates.jsonl (--candidates)
CANDIDATE = record({"text": str, "ids": token_ids, "ended": bool})
CANDIDATES = record({"task_id": label, "sample": int, "turn": whole(0), "prompt": str, "task": dict,
                     "history": list_of(data.TURN), "candidates": list_of(CANDIDATE)})


class Sampling(NamedTuple):
    """Flags of the candidates."""

    data_frac: float                                                 # share of the trajectories whose states are used
    candidates: str | None                                           # candidates.jsonl of another run
    sampler: str | None                                              # servers of the policy's weights
    num_candidates: int                                              # of a state
    temperature: float
    max_new_tokens: int
    seed: int
    concurrency: int                                                 # candidates in flight per rank

    @property
    def slots(self):
        """Candidates that are sampled at a time."""
        return max(self.num_candidates, self.concurrency)


def read_states(trajectories, tokenizer, data_frac, seed):
    """The states of all agent turns of a share of the trajectories, {"task_id", "sample", "turn", "task", "prompt",
    "history", "max_rounds"} each. "prompt" is o_t, without c, as logged if the file has it (agent_turns)."""
    order = list(range(len(trajectories)))
    random.Random(seed).shuffle(order)
    num_used = max(1, round(data_frac * len(order)))
    subset = [trajectories[i] for i in sorted(order[:num_used])]
    states, kinds = [], collections.Counter()
    for trajectory in subset:
        history = [{"role": turn["role"], "content": turn["content"]} for turn in trajectory["dialogue_history"]]
        dialogue = {key: trajectory[key] for key in data.NAME if key in trajectory}
        turns = zip(agent_places(history), agent_turns(tokenizer, trajectory, kinds))
        for number, (place, (prompt, _)) in enumerate(turns):
            states.append({**dialogue, "turn": number, "task": trajectory["task"], "prompt": prompt,
                           "history": history[:place], "max_rounds": trajectory.get("max_rounds", 10)})
    say(f"{len(states):,} agent turns of {len(subset):,} dialogues (--data-frac {data_frac:g} of "
        f"{len(trajectories):,})")
    say_kinds("their prompts", kinds)
    return states


def fitting_states(states, tokenizer, critic, max_new_tokens, job):
    """The states that have room for a candidate after the prompt, also as the critic reads it. Raises InputError if
    there is none."""
    max_prompt_tokens = most_positions(read_config(job.model)) - max_new_tokens
    fitting = []
    for state in states:
        prompt = critic.prompt(state["prompt"], state["task"], critic.critic_sees_c)         # the longer of the two
        if len(encode(tokenizer, prompt)) <= max_prompt_tokens:
            fitting.append(state)
    if len(fitting) < len(states):
        say(f"dropped {len(states) - len(fitting):,} turns: their prompts are longer than {max_prompt_tokens:,} tokens "
            f"and leave no room for --max-new-tokens {max_new_tokens}; {len(fitting):,} turns are left")
    if not fitting:
        raise InputError(f"{job.path}: no turns to train on: their prompts leave no room for --max-new-tokens "
                         f"{max_new_tokens}")
    return fitting


def find_candidates(states, sampling, job):
    """Rows of candidates.jsonl from --candidates or from an interrupted run of this command; None if there are none.
    Raises InputError if those of --candidates do not belong to these states."""
    path = sampling.candidates
    if not path:
        return job.output.kept_rows("candidates.jsonl")
    rows = read_jsonl(path, CANDIDATES)
    wanted = [(*data.name_of(state), sampling.num_candidates, state["prompt"]) for state in states]
    given = [(*data.name_of(row), len(row["candidates"]), row["prompt"]) for row in rows]
    if given != wanted:
        raise InputError(f"{path}: made from other turns or prompts, or with another --num-candidates; the "
                         "trajectories, --num-trajectories, --data-frac and --seed must be the same")
    return [{**state, "candidates": row["candidates"]} for state, row in zip(states, rows)]


# ---------------------------------------------------------------------------------------------------------------------
# sweet: sample candidates of each state, score them, pair them

def open_candidates(trajectories, tokenizer, critic, sampling, job):
    """A function that returns the rows of candidates.jsonl, each a state with its candidates. They are read from a file
    or sampled: by servers (--sampler), else by the policy, one full copy per rank."""
    states = read_states(trajectories, tokenizer, sampling.data_frac, sampling.seed)
    states = fitting_states(states, tokenizer, critic, sampling.max_new_tokens, job)
    rows = find_candidates(states, sampling, job)
    if rows:
        return lambda: rows
    longest = max(len(encode(tokenizer, state["prompt"])) for state in states) + sampling.max_new_tokens
    sampler = open_sampler(sampling.sampler or job.model, job.run.device, job.sharding.dtype, sampling.slots,
                           max(job.max_tokens, longest), tokenizer)
    return functools.partial(sample_candidates, states, sampler, sampling, job)


def sample_candidates(states, sampler, sampling, job):
    """Rows of candidates.jsonl: the states with "candidates", actions sampled after each prompt. The ranks share the
    states."""
    async def make_row(state):
        key = sampling.seed, "candidates", *data.name_of(state)      # RNG key
        replies = await sampler.sample(state["prompt"], sampling.num_candidates, sampling.temperature,
                                       sampling.max_new_tokens, key)
        candidates = [{"text": reply.text, "ids": reply.ids, "ended": reply.ended} for reply in replies]
        return {**state, "candidates": candidates}

    rows = RowFile(job.output.path / "candidates.jsonl", job.run)
    in_flight = 2 * math.ceil(sampling.slots / sampling.num_candidates)       # states; half wait, so no slot is idle
    failures = add_rows(rows, states, make_row, in_flight)
    job.output.add_costs()
    finish_rows(rows, len(states), failures)
    states = read_rows(rows.out)                                     # a killed run may have made some of them
    num_tokens = sum(len(candidate["ids"]) for state in states for candidate in state["candidates"])
    job.output.add_costs(generated_tokens=num_tokens)
    return states


def score_rows(rows, critic):
    """The critic's advantage of every candidate (eq. 3), a list for each row."""
    return critic.score_actions([as_state(row) for row in rows])


def score_candidates(rows, critic, job, score=score_rows):
    """Rows of scored.jsonl: those of candidates.jsonl with "advantages", the `score` of every candidate.
    Critic and reference model are split over the ranks, which score every block together."""
    path = job.output.path / "scored.jsonl"
    if path.exists():
        return read_rows(path)
    gc.collect()                                                     # frees the model that sampled them
    torch.cuda.empty_cache()                                         # NCCL takes memory that torch does not hold
    critic.load(job.load, job.max_tokens)
    scored = RowFile(path, job.run)
    starts = range(0, len(rows), SCORED_TOGETHER)
    for first in tqdm(starts, path.name, mininterval=5, disable=job.run.rank > 0):
        block = rows[first:first + SCORED_TOGETHER]
        numbers = range(first, first + len(block))
        if scored.done.issuperset(numbers):                          # scored before the run was killed
            continue
        scores = score(block, critic)
        if job.run.rank == 0:
            for number, row, advantages in zip(numbers, block, scores, strict=True):
                scored.add(number, {**row, "advantages": advantages})
    finish_rows(scored, len(rows), [])
    job.output.add_costs()
    critic.model = critic.ref_model = None                           # freed before the policy is loaded
    gc.collect()
    return read_rows(path)


def as_state(row):
    """The common.State of a row of candidates.jsonl."""
    domain = domain_of(row["task"])
    texts = [visible_text(domain, candidate["text"], row["prompt"]) for candidate in row["candidates"]]
    ids = [candidate["ids"] for candidate in row["candidates"]]
    return common.State(row["prompt"], row["task"], row["history"], ids, texts)


def candidate_pairs(row, pairs_per_turn, rng, among=None):
    """Pairs (better, worse) of candidate numbers: a random one of the better half by score, and one of the worse half.
    With an odd number of candidates the middle one is in neither half.

    Pairs are drawn with replacement, so one can occur twice. Candidates stopped by length are dropped, and so are pairs
    of equal advantage (e.g. equal actions).
    among: numbers of the candidates to compare; None: all (examples/answers.py)."""
    order = [i for i in ended_candidates(row) if among is None or i in among]
    rng.shuffle(order)                                               # breaks ties at random
    order.sort(key=lambda i: -row["advantages"][i])
    half = len(order) // 2
    if not half:
        return []
    pairs = []
    for _ in range(pairs_per_turn):
        better = rng.choice(order[:half])
        worse = rng.choice(order[-half:])
        if row["advantages"][better] > row["advantages"][worse]:
            pairs.append((better, worse))
    return pairs


def ended_candidates(row):
    """Numbers of the candidates that --max-new-tokens did not stop."""
    return [i for i, candidate in enumerate(row["candidates"]) if candidate["ended"]]


def as_pair(row, chosen, rejected):
    """A row of pairs.jsonl: a state with two of its candidates, which are given by number."""
    pair = {key: row[key] for key in (*data.NAME, "prompt") if key in row}      # NAME: "task_id", "sample", "turn"
    for side, number in (("chosen", chosen), ("rejected", rejected)):
        pair[side] = {**row["candidates"][number], "advantage": row["advantages"][number]}
    return pair


def pairs_of(rows, tokenizer, pairs_per_turn, job, choose=candidate_pairs):
    """Write pairs.jsonl; return the pairs that fit --max-length and report what was dropped.
    rows: of scored.jsonl. choose: returns the pairs of a row."""
    rng = random.Random(job.schedule.seed)
    pairs, num_cut, num_equal_turns, num_equal = [], 0, 0, 0
    for row in rows:
        advantages = [row["advantages"][i] for i in ended_candidates(row)]
        num_cut += len(row["candidates"]) - len(advantages)
        if len(advantages) > 1 and len(set(advantages)) == 1:
            num_equal_turns += 1
            num_equal += len(advantages)
        for chosen, rejected in choose(row, pairs_per_turn, rng):
            pairs.append(as_pair(row, chosen, rejected))
    if job.run.rank == 0:
        write_jsonl(job.output.path / "pairs.jsonl", pairs)
    fitting = [pair for pair in pairs if pair_length(pair, tokenizer) <= job.max_length]
    num_without_c = sum(not row["task"]["ground_truth"] for row in rows)
    counts = [f"{len(pairs):,} of {len(rows) * pairs_per_turn:,} requested pairs (the rest: equal advantages, or fewer "
              f"than two usable candidates), {num_cut:,} candidates stopped by --max-new-tokens were dropped",
              f"{len(pairs) - len(fitting):,} pairs are longer than --max-length {job.max_length}"]
    if num_equal_turns:
        counts.append(f"{num_equal_turns:,} of {len(rows):,} turns give no pair: all of their {num_equal:,} candidates "
                      "have equal advantages")
    if num_without_c:
        counts.append(f"{num_without_c:,} of {len(rows):,} turns have no c")
    if not fitting:
        raise InputError(f"{job.path}: no examples to train on: {'; '.join(counts)}")
    say(*counts)
    return fitting


def pair_length(pair, tokenizer):
    """Number of tokens in a pair's prompt and its longer action."""
    lengths = [len(pair[side]["ids"]) for side in ("chosen", "rejected")]
    return len(encode(tokenizer, pair["prompt"])) + max(lengths)


def pair_examples(pairs, tokenizer, together):
    """Examples: one per pair or, if `together`, one per turn. Pairs are ((0, chosen), (0, rejected)).

    An example has one item: its prompt and all of its actions (common.actions_item)."""
    groups = collections.defaultdict(list)                           # the pairs of a turn, or single pairs
    for number, pair in enumerate(pairs):
        key = (*data.name_of(pair), pair["prompt"]) if together else number         # name_of: the values of NAME
        groups[key].append(pair)
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
# the baselines

def pair_of_dialogues(example):
    """mtdpo: the example of two trajectories. All agent tokens of each are its action 0: whole dialogues are compared.
    """
    items = []
    for item in example.items:
        sequences = []
        for sequence in item:
            numbers = [min(number, 0) for number in sequence.action_ids]
            sequences.append(sequence._replace(action_ids=numbers))
        items.append(sequences)
    return example._replace(items=items, action_pairs=[((0, 0), (1, 0))])


def successful(trajectories, path):
    """rft: the successful trajectories; if returns are graded, the best of each task."""
    if domain_of(trajectories[0]["task"]).MIN_RETURN_GAP is None:
        good = [trajectory for trajectory in trajectories if trajectory["reward"] == 1]
    else:
        by_task = collections.defaultdict(list)
        for trajectory in trajectories:
            by_task[trajectory["task_id"]].append(trajectory)
        good = [max(group, key=lambda trajectory: trajectory["reward"]) for group in by_task.values()]
    if not good:
        raise InputError(f"{path}: no successful trajectories (reward 1) to train on")
    say(f"{len(good):,} successful (or best) trajectories")
    return good


# ---------------------------------------------------------------------------------------------------------------------

def train(action_model, examples, ref_logps, losses_of, job):
    """Train the model on the examples, from the last saved state.

    ref_logps   reference_logps of the examples; None for imitation
    losses_of   (action_model, batch, examples, ref_logps (B, M) or None) -> {"loss": …, …}, (examples,) each"""
    loop = training.Loop(action_model, examples, job, train_mode=ref_logps is None)
    for step, batch_numbers in loop.steps():
        num_terms = sum(num_loss_terms(examples[i]) for i in batch_numbers)     # the step's loss is a mean over these
        for micro, weights in training.rank_batches(batch_numbers, examples, job):
            micro_examples = [examples[i] for i in micro]
            batch = action_model.collate(items_of(micro_examples), job.run.device)
            micro_ref_logps = None
            if ref_logps is not None:
                micro_ref_logps = padded_outputs([ref_logps[i] for i in micro], job.run.device)     # (B, M)
            terms = losses_of(action_model, batch, micro_examples, micro_ref_logps)     # sums, (examples,) each
            loop.backward(terms, weights / num_terms)
        loop.update(step)


def num_loss_terms(example):
    """Number of terms that an example adds to the step's loss: its pairs or, for imitation, its action tokens."""
    if example.action_pairs:
        return len(example.action_pairs)
    return sum(number >= 0 for item in example.items for sequence in item for number in sequence.action_ids)


def train_policy(load, tokenizer, examples, losses_of, job, has_reference=True):
    """Train the model that load() returns on the examples, and write it.
    losses_of: as in train(). has_reference: whether the loss needs log-probabilities of the model before its first
    update; they are computed once, before training."""
    training.show_samples(tokenizer, examples[0])
    action_model = load()
    action_model.check_positions(items_of(examples))
    ref_logps = None
    if has_reference:
        ref_logps = reference_logps(job.output.path / "ref.pt", action_model, examples, job.max_tokens)
    train(action_model, examples, ref_logps, losses_of, job)
    training.finish_training(job, action_model, tokenizer)


# ---------------------------------------------------------------------------------------------------------------------

def vocabulary_text(trajectory):
    """Text of a trajectory that the tokenizer of a new model should know."""
    turns = [turn["content"] for turn in trajectory["dialogue_history"]]
    return "\n".join([*turns, turns[0] + LAST_ROUND, common.solution_text(trajectory["task"])])


def checked_critic(name, tokenizer, domain, reference_sees_c, job):
    """The critic of --critic (common.open_critic), if it has the policy's tokenizer."""
    show = functools.partial(data.show_documents, domain, job.output)
    critic = common.open_critic(name, job.model, domain, reference_sees_c, show)
    critic.check_tokenizer(tokenizer, job.model)
    say(critic.describe())
    return critic


def open_training(flags, inputs=()):
    """Common start of this stage and its forks: (job, trajectories, tokenizer, a function that loads the ActionModel);
    None if the output is done. flags: {name: value}. inputs: as in training.Job."""
    job = training.Job(flags, inputs)
    if job.dry_run:
        raise InputError("--dry-run works only with 04_train_policy.py")
    trajectories = data.read_trajectories(job.path, flags["num_trajectories"], flags["seed"])
    if job.output.is_done():
        return None
    if job.model == "tiny" and flags["method"] == "sft" and not job.lora:      # a new model of the trajectories' words
        model, tokenizer = fresh_model(map(vocabulary_text, trajectories))
        load = functools.partial(shard, ActionModel(model.to(job.run.device)), job.run, job.sharding)
    elif reads_images(job.model):
        raise InputError(f"{job.model}: a policy must be text-only; vision-language models can only be critics")
    else:
        tokenizer = load_tokenizer(job.model)
        load = functools.partial(job.load, job.model, lora=job.lora)
    return job, trajectories, tokenizer, load


def main(argv=None):
    args = parse_args(argv)
    if args.dry_run:
        rows_an_example = 2 if args.method == "mtdpo" else 1
        return dry_run(training.Job(vars(args), []), rows_an_example, is_tree=args.method == "sweet")
    more_inputs = [name for name in (args.candidates, args.sampler, args.critic) if name != common.UNTRAINED]
    opened = open_training(vars(args), more_inputs)
    if not opened:
        return
    job, trajectories, tokenizer, load = opened

    if args.method == "sweet":
        domain = domain_of(trajectories[0]["task"])
        critic = checked_critic(args.critic, tokenizer, domain, args.reference_sees_c, job)
        read_candidates = open_candidates(trajectories, tokenizer, critic, flags.pick(Sampling, vars(args)), job)
        job.output.begin()
        rows = read_candidates()
        del read_candidates                                          # frees the memory of the model that sampled them
        rows = score_candidates(rows, critic, job)                   # eq. 3: critic.score_actions
        pairs = pairs_of(rows, tokenizer, args.pairs_per_turn, job)
        beforehand.say_answers_in_pairs(pairs, rows, trajectories, domain)
        examples = pair_examples(pairs, tokenizer, args.pairs_together)
    else:
        make_items = functools.partial(common.trajectory_items, tokenizer)
        if args.method != "sft":
            data.fill_rewards(trajectories, job.output)
        if args.method == "mtdpo":
            groups = common.trajectory_pairs(trajectories, args.trajectories, min_gap=args.min_return_gap)
            data.say_pairs(trajectories, groups)
            examples = common.trajectory_examples(trajectories, groups, make_items, sees_c=False)
            examples = [pair_of_dialogues(example) for example in examples]
        else:
            good = successful(trajectories, args.trajectories) if args.method == "rft" else trajectories
            examples = common.trajectory_examples(good, [(i,) for i in range(len(good))], make_items, sees_c=None)
        examples = [examples[i] for i in job.fitting_indices(examples)]
        job.output.begin()

    is_preference = args.method in ("sweet", "mtdpo")
    losses_of = imitation_losses
    if is_preference:
        losses_of = functools.partial(preference_losses, job=job)
    note_prompt(args.out, trajectories)
    train_policy(load, tokenizer, examples, losses_of, job, has_reference=is_preference)


if __name__ == "__main__":
    run_stage(main)
