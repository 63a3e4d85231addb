"""Stage 4: train the agent, by SWEET-RL or by one of its baselines.

Reads   trajectories.jsonl (02), a model, and for --method sweet a critic (03).
Writes  a model folder with metrics.jsonl and agent.json (the system prompt that it was trained with); for sweet also
        candidates.jsonl, scored.jsonl and pairs.jsonl.

--method sweet   For every agent turn of `--data-frac` of the trajectories, sample 16 candidates given o_t (the prompt
                 that is logged, if this tokenizer's template made it, else it is rendered again), score each
                 with the critic's A(o_t, a, c) (eq. 3), pair a random one of the better half with a random one of the
                 worse, and train by single-turn DPO (eq. 4); c never reaches the policy. --critic oracle (or
                 oracle-patient, which has no preference for answering at once) ranks by what
                 a template task says of a turn; --candidates takes those of another run, to compare critics.
--method mtdpo   Multi-turn DPO on pairs of trajectories of one task, all agent tokens summed.
--method rft     Rejection fine-tuning: likelihood of the agent's turns of successful trajectories (of pages, which are
                 more or less alike: of the best trajectory of each task).
--method sft     Likelihood of the agent's turns of all trajectories; makes the embedded default's base model.
                 Trajectories of the informed script are trained with c in front, as it saw c.

Equations, with sums over the tokens of an action (end of turn included):
    eq. 4   -log s( b [log p(a+|o) / p_ref(a+|o)] - b [log p(a-|o) / p_ref(a-|o)] ) + nll_coef * mean NLL of a+

Differs from the paper: nothing in the method. Differs from the published code: see the README's list.

    python 04_train_policy.py --method sweet --trajectories out/offline.jsonl --model tests/tiny --critic out/critic \\
        --out out/sweet
    torchrun --nproc-per-node 8 04_train_policy.py --method sweet --trajectories trajectories.jsonl \\
        --model meta-llama/Llama-3.1-8B-Instruct --critic critic --dtype bfloat16 --out policy
"""
import functools
import gc
import math
import pathlib
import random

import torch
import torch.nn.functional as F

import common


# ---------------------------------------------------------------------------------------------------------------------
# losses

def dpo_loss(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta):
    """Eq. 4 without its NLL term, from summed log-probabilities (B,) of chosen and rejected under policy and reference.
    Returns (losses, chosen_rewards, rejected_rewards), each (B,)."""
    chosen_rewards = beta * (chosen_logps - ref_chosen_logps)                                     # (B,)
    rejected_rewards = beta * (rejected_logps - ref_rejected_logps)                               # (B,)
    return -F.logsigmoid(chosen_rewards - rejected_rewards), chosen_rewards, rejected_rewards


def sides(values, pairs=None):
    """Chosen and rejected, each (P,), of a batch's values per turn: of trajectories (2P, M) the sums; of actions (B, M)
    those that `pairs` name, [(chosen, rejected), …] for each row."""
    if pairs is None:
        return values.sum(1)[0::2], values.sum(1)[1::2]
    rows = [row for row, own in enumerate(pairs) for _ in own]
    chosen, rejected = zip(*(pair for own in pairs for pair in own))
    return values[rows, list(chosen)], values[rows, list(rejected)]


# ---------------------------------------------------------------------------------------------------------------------
# the embedded default's fresh model

TINY_TEMPLATE = ("{% for message in messages %}{% if message.role != 'system' %}<|{{ message.role }}|>"
                 "{{ message.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>"
                 "{% endif %}")


def tiny_model(texts):
    """A fresh Llama of about a million parameters and its word-level tokenizer, whose words are those of `texts`.

    A word is one token wherever it stands (in a reply, in code): "▁" marks both its ends, two marks side by side are a
    space. Other text falls back to characters and bytes, so that every text survives encoding. The template leaves the
    system prompt out, which never changes for a model that knows one job."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    normalizer = normalizers.Sequence([
        normalizers.Replace(Regex(r"(?<=\w) (?=\w)"), "▁▁"),
        normalizers.Replace(Regex(r"(?<![\w▁])(?=\w)|(?<=\w)(?![\w▁])"), "▁")])
    pre_tokenizer = pre_tokenizers.Split(Regex(r"▁\w+▁|[^\w▁]+"), "isolated")
    counts = {}
    for text in texts:
        for piece, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(text)):
            counts[piece] = counts.get(piece, 0) + 1
    pieces = sorted((p for p, count in counts.items() if count >= 5), key=lambda p: (-counts[p], p))[:2000]
    characters = [c for c in [*map(chr, range(32, 127)), "\n", "▁"] if c not in pieces]
    vocabulary = ([("<|pad|>", 0.0)] + [(p, -1.0) for p in pieces] + [(c, -20.0) for c in characters]
                  + [(f"<0x{byte:02X}>", -40.0) for byte in range(256)])
    words = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    words.normalizer, words.pre_tokenizer = normalizer, pre_tokenizer
    words.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁▁", " "),
                                       decoders.Replace("▁", "")])
    words.add_special_tokens(["<|user|>", "<|assistant|>", "<|end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<|pad|>", eos_token="<|end|>",
                                        chat_template=TINY_TEMPLATE)
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=3,
                         num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=2048,
                         tie_word_embeddings=True, bos_token_id=None, pad_token_id=tokenizer.pad_token_id,
                         eos_token_id=tokenizer.eos_token_id,
                         initializer_range=0.08)        # about 1 / sqrt(hidden size); 0.02 never learns to copy values
    return LlamaForCausalLM(config), tokenizer


def vocabulary_text(trajectory):
    """All words that a fresh tokenizer should know of a trajectory."""
    turns = [turn["content"] for turn in trajectory["dialogue_history"]]
    return "\n".join([*turns, turns[0] + common.LAST_ROUND, common.hidden_info(trajectory["task"]["ground_truth"])])


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


PROMPT_KINDS = {"sampled ids": "as sampled", "logged prompt": "as logged", "rendered again": "rendered again"}


def state_prompts(states, tokenizer, counts=None):
    """The prompt of each state: the one that its trajectory logged, where the file allows (common.agent_turns)."""
    trajectories = {id(trajectory): trajectory for trajectory, _, _ in states}
    turns = {key: common.agent_turns(tokenizer, trajectory, counts) for key, trajectory in trajectories.items()}
    return [turns[id(trajectory)][number][0] for trajectory, number, _ in states]


def sample_candidates(states, model, tokenizer, args):
    """A row of candidates.jsonl for each state: the prompt, and `num_candidates` actions sampled from the policy."""
    prompts = state_prompts(states, tokenizer)
    keys = [(args.seed, "candidates", t["task_id"], t["sample"], number) for t, number, _ in states]
    randoms = torch.cat([common.uniforms((args.num_candidates, args.max_new_tokens), *key) for key in keys])
    ids = [common.encode(tokenizer, prompt) for prompt in prompts]
    stops = common.stop_ids(model, tokenizer)
    actions = common.generate(model, ids, randoms, args.temperature, stops, args.concurrency, args.max_tokens)
    rows = []
    for s, ((trajectory, number, i), prompt) in enumerate(zip(states, prompts)):
        history = [{"role": turn["role"], "content": turn["content"]} for turn in trajectory["dialogue_history"][:i]]
        own = actions[s * args.num_candidates:(s + 1) * args.num_candidates]
        rows.append({"task_id": trajectory["task_id"], "sample": trajectory["sample"], "turn": number,
                     "task": trajectory["task"], "prompt": prompt, "history": history,
                     "candidates": [{"text": tokenizer.decode(a, skip_special_tokens=True), "ids": a,
                                     "ended": a[-1] in stops} for a in own]})
    return rows


def candidates_phase(path, states, tokenizer, args, runtime, works):
    """Rows of candidates.jsonl. Every rank holds the whole policy, and samples for other states than the others."""
    blocks = [states[i:i + 128] for i in range(0, len(states), 128)]
    model = None
    if not path.exists():
        model = common.load_model(args.model, runtime.device, args.dtype)[0].eval()
        works.append(common.work_of(model))
    return common.map_blocks(path, blocks, lambda block, _: sample_candidates(block, model, tokenizer, args), runtime,
                             "state")


def scores_phase(path, rows, critic, tokenizer, args, runtime, works):
    """Rows of scored.jsonl. Critic and reference are split over the ranks, which score every block together."""
    sampler = None
    if not isinstance(critic, str) and not path.exists():
        load = functools.partial(common.load_sharded, runtime=runtime, args=args)
        critic = common.load_critic(critic, lambda name, head: load(name, head=head))
        sampler = load(args.model).eval() if args.published_ranking else None
        works += [common.work_of(model) for model in (critic["model"], critic["reference"], sampler) if model]
    blocks = [rows[i:i + 64] for i in range(0, len(rows), 64)]
    return common.map_blocks(path, blocks, lambda block, _: score_candidates(
        block, critic, tokenizer, args, runtime.device, sampler), runtime, "state", together=True)


def read_candidates(path, states, prompts, num_candidates):
    """The rows of another run's candidates.jsonl; InputError where they are not those of the states asked for."""
    rows = common.read_jsonl(path, {"task_id": str, "sample": int, "turn": int, "prompt": str, "task": dict,
                                    "history": list, "candidates": list})
    wanted = [(t["task_id"], t["sample"], number, num_candidates) for t, number, _ in states]
    if wanted != [(row["task_id"], row["sample"], row["turn"], len(row["candidates"])) for row in rows]:
        raise common.InputError(f"{path}: made from other turns or with another --num-candidates; the trajectories, "
                                "--num-trajectories, --data-frac and --seed must be the same")
    for row, prompt in zip(rows, prompts):
        if row["prompt"] != prompt:
            raise common.InputError(f"{path}: task {row['task_id']}, sample {row['sample']}, turn {row['turn']}: its "
                                    "candidates continue another prompt than the trajectories log; sample them anew "
                                    "(no --candidates)")
        for candidate in row["candidates"]:
            common.check_keys(candidate, {"text": str, "ids": list, "ended": bool}, f"{path}: a candidate")
    return rows


def check_prompts(states, prompts, path):
    """InputError, which names `path`, where (task_id, sample, turn) names two prompts: what is kept under this name
    (candidates, pairs, random numbers) would belong to either."""
    found = {}
    for (trajectory, number, _), prompt in zip(states, prompts):
        if found.setdefault((trajectory["task_id"], trajectory["sample"], number), prompt) != prompt:
            raise common.InputError(f"{path}: two dialogues of task {trajectory['task_id']} have \"sample\" "
                                    f"{trajectory['sample']}; give each a number of its own, or leave out the key "
                                    '"sample" everywhere')


def score_candidates(rows, critic, tokenizer, args, device, sampler=None):
    """The rows with "advantages": the critic's score of every candidate, by eq. 3 where it has no head."""
    states = [common.State(row["prompt"], row["task"], row["history"], *([c[key] for c in row["candidates"]]
                                                                         for key in ("ids", "text"))) for row in rows]
    scores = common.score_actions(critic, tokenizer, states, args.max_tokens, device, args.no_tree, sampler)
    return [{**row, "advantages": advantages} for row, advantages in zip(rows, scores)]


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


def print_kinds(rows, pairs):
    """What the candidates of template tasks are, how they rank (0 the worst of a turn, 1 the best) and how often they
    are chosen and rejected, before and after all that matters is known: a collapse shows here before it is trained."""
    if any("facts" not in row["task"] for row in rows):
        return
    found = {}                                                       # (known, kind): [number, ranks, chosen, rejected]

    def entry(row, text):
        known = common.all_known(row["task"], row["history"])
        return found.setdefault((known, common.action_kind(row["task"], row["history"], text)), [0, 0.0, 0, 0])

    for row in rows:
        for candidate, rank in zip(row["candidates"], common.average_ranks(row["advantages"])):
            counts = entry(row, candidate["text"])
            counts[0] += 1
            counts[1] += rank / max(1, len(row["candidates"]) - 1)
    for pair in pairs:
        for index, side in ((2, "chosen"), (3, "rejected")):
            entry(pair, pair[side]["text"])[index] += 1
    common.say(f"{'what the pairs say':42s} {'candidates':>10s}  {'rank':>4s}  {'chosen':>6s}  {'rejected':>8s}")
    for (known, kind), (number, ranks, chosen, rejected) in sorted(found.items()):
        when = "all known" if known else "not all known"
        common.say(f"    {when:18s} {kind:19s} {number:10d}  {ranks / number:4.2f}  {chosen:6d}  {rejected:8d}")


# ---------------------------------------------------------------------------------------------------------------------
# examples: tuples of items, an item being a list of rows (common.py): (trajectory,) for likelihoods, (chosen
# trajectory, rejected trajectory) for multi-turn DPO, (candidates,) for SWEET: turn 0 the chosen, 1 the rejected action

def likelihood_examples(trajectories, tokenizer, args):
    if args.method == "rft" and common.is_frontend(trajectories[0]["task"]):
        best = {}
        for t in trajectories:
            best[t["task_id"]] = max(best.get(t["task_id"], t), t, key=lambda t: t["reward"])
        trajectories = list(best.values())
        common.say(f"the best trajectory of each of {len(trajectories):,} tasks")
    elif args.method == "rft":
        trajectories = [t for t in trajectories if t["reward"] == 1]
        if not trajectories:
            raise common.InputError(f"{args.trajectories}: no successful trajectories (reward 1) to train on")
        common.say(f"{len(trajectories):,} successful trajectories")
    examples = []
    for trajectory, turns in zip(trajectories, common.all_turns(tokenizer, trajectories)):
        c = trajectory["task"]["ground_truth"] if trajectory.get("informed") else None
        examples.append((common.trajectory_rows(tokenizer, turns, c),))
    return examples


def trajectory_pair_examples(trajectories, tokenizer, args):
    pairs = common.trajectory_pairs(trajectories, args.trajectories, args.min_gap)
    common.say(f"{len(pairs):,} trajectory pairs")
    used = sorted({i for pair in pairs for i in pair})
    turns = common.all_turns(tokenizer, [trajectories[i] for i in used])
    items = {i: common.trajectory_rows(tokenizer, own) for i, own in zip(used, turns)}
    return [(items[chosen], items[rejected]) for chosen, rejected in pairs]


def drop_long_pairs(pairs, tokenizer, max_length):
    """(pairs whose actions each fit into `max_length` tokens with the prompt, how many do not), which it says. A tree
    of several pairs may be longer: an action sees the prompt and itself."""
    prompts = {pair["prompt"] for pair in pairs}
    room = {prompt: max_length - len(common.encode(tokenizer, prompt)) for prompt in prompts}
    kept = [pair for pair in pairs
            if max(len(pair[side]["ids"]) for side in ("chosen", "rejected")) <= room[pair["prompt"]]]
    if len(kept) < len(pairs):
        common.say(f"dropped {len(pairs) - len(kept):,} of {len(pairs):,} pairs: prompt and action are longer than "
                   f"--max-length {max_length}")
    return kept, len(pairs) - len(kept)


def sweet_examples(trajectories, tokenizer, critic, args, runtime, works):
    """Run the three phases (or read what an earlier run left of them). Returns the examples and, for each, its pairs
    [(chosen, rejected), …] as numbers of the example's actions. A phase has its models for itself."""
    out = pathlib.Path(args.out)
    states = sample_states(trajectories, args.data_frac, args.seed)
    common.say(f"{len(states):,} agent turns of {args.data_frac:.0%} of the trajectories")
    counts = {}
    prompts = state_prompts(states, tokenizer, counts)
    common.say("their prompts: " + ", ".join(f"{count:,} {PROMPT_KINDS[kind]}" for kind, count in counts.items()))
    check_prompts(states, prompts, args.trajectories)
    if args.candidates:
        rows = read_candidates(args.candidates, states, prompts, args.num_candidates)
    else:
        rows = candidates_phase(out / "candidates.jsonl", states, tokenizer, args, runtime, works)
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
    common.say(f"{len(pairs):,} pairs of {asked:,} asked for; {same:,} were twice the same text; {cut:,} candidates "
               f"stopped by --max-new-tokens were left out, so that {too_few:,} of {len(rows):,} turns had no two")
    if runtime.rank == 0:
        common.write_jsonl(out / "pairs.jsonl", [{key: value for key, value in pair.items()
                                                  if key not in ("task", "history")} for pair in pairs])
    print_kinds(rows, pairs)
    pairs, long = drop_long_pairs(pairs, tokenizer, args.max_length)
    if not pairs:
        raise common.InputError(
            f"{args.trajectories}: no examples to train on: of {asked:,} pairs asked for {long:,} are longer than "
            f"--max-length {args.max_length}, {same:,} are twice the same text, {too_few * args.pairs_per_turn:,} are "
            f"of turns with fewer than two candidates that --max-new-tokens {args.max_new_tokens} did not stop")
    # An example is a pair, or with --pairs-together all pairs of a turn: a tree of its prompt and their actions
    groups = {}
    for number, pair in enumerate(pairs):
        key = tuple(pair[name] for name in kept[:4]) if args.pairs_together else number
        groups.setdefault(key, []).append(pair)
    examples, places = [], []
    for group in groups.values():
        actions = list(dict.fromkeys(tuple(pair[side]["ids"]) for pair in group for side in ("chosen", "rejected")))
        examples.append((common.candidate_rows(tokenizer, group[0]["prompt"], actions, args.no_tree),))
        places.append([tuple(actions.index(tuple(pair[side]["ids"])) for side in ("chosen", "rejected"))
                       for pair in group])
    return examples, places


# ---------------------------------------------------------------------------------------------------------------------

# Table 5 of the paper, and what it leaves unsaid as the published code sets it; epochs and batch size: see parse_args
PRESETS = {name: {"beta": 0.1, "nll_coef": 0.01, "lr": 2e-7, "data_frac": 0.1, "num_candidates": 16,
                  "pairs_per_turn": 4, "temperature": 1.0, "max_new_tokens": 1024, "max_length": 16384,
                  "warmup_frac": 0.03, "final_lr_frac": 0.1, "adam_betas": [0.9, 0.95], "weight_decay": 0.0,
                  "max_grad_norm": 1.0, "dtype": "bfloat16", "activation_checkpointing": True, "min_gap": min_gap}
           for name, min_gap in (("paper-backend", None), ("paper-frontend", 0.1))}


def parse_args(argv=None):
    parser = common.argument_parser(__doc__)
    parser.add_argument("--method", choices=["sweet", "mtdpo", "rft", "sft"], required=True, help="see above")
    parser.add_argument("--trajectories", required=True, help="trajectories file (02)")
    parser.add_argument("--num-trajectories", type=common.positive_int, help="use so many (nested subsets of a seed)")
    parser.add_argument("--model", required=True, help="the model to train (folder, hub id, smollm2; tiny for sft)")
    parser.add_argument("--critic", help="critic folder (03), of any kind, for sweet; oracle, oracle-patient: what "
                        "the template task says of a turn, a critic without errors")
    parser.add_argument("--min-gap", type=float,
                        help="mtdpo: pair all trajectories of a task whose returns differ by so "
                        "much (frontend: 0.1); None: successes with the rest")
    # SWEET's candidates and pairs
    parser.add_argument("--data-frac", type=float, default=0.1, help="share of the trajectories whose turns are used")
    parser.add_argument("--num-candidates", type=common.positive_int, default=16, help="actions sampled a turn")
    parser.add_argument("--candidates", metavar="FILE",
                        help="candidates.jsonl of another run of the same model, seed and trajectories; None: sample "
                        "them")
    parser.add_argument("--pairs-per-turn", type=common.positive_int, default=4, help="DPO pairs a turn")
    parser.add_argument("--published-ranking", action="store_true",
                        help="rank as the published code does: subtract the "
                        "policy's log-probabilities without c, not the critic's reference's with c")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the candidates")
    parser.add_argument("--max-new-tokens", type=common.positive_int, default=1024, help="tokens of a candidate")
    parser.add_argument("--concurrency", type=common.positive_int, default=256, help="candidates sampled at a time")
    # training
    parser.add_argument("--beta", type=float, default=0.1, help="scale of the log-ratios in the loss")
    parser.add_argument("--nll-coef", type=float, default=0.01, help="weight of the chosen side's mean NLL")
    parser.add_argument("--lr", type=float, default=2e-7, help="peak learning rate")
    parser.add_argument("--epochs", type=common.positive_int, help="passes over the examples (None: sweet 1, else 4; "
                        "with paper-frontend 8)")
    parser.add_argument("--batch-size", type=common.positive_int,
                        help="examples a step, over all ranks (None: 8 for sweet and mtdpo, else 32)")
    parser.add_argument("--micro-batch-size", type=common.positive_int, default=8, help="examples a forward pass")
    parser.add_argument("--max-steps", type=common.positive_int, help="stop (and end the schedule) after so many steps")
    parser.add_argument("--max-length", type=common.positive_int, default=16384,
                        help="drop what is longer (tokens): trajectories; of SWEET pairs, a prompt with one action")
    parser.add_argument("--max-tokens", type=common.positive_int, default=16384, help="tokens a pass without gradients")
    parser.add_argument("--pairs-together", action="store_true",
                        help="keep the pairs of a turn in one batch, where they share the prompt (faster)")
    parser.add_argument("--no-tree", action="store_true", help="give every candidate a prompt of its own (slower)")
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
    if (args.published_ranking or args.candidates or args.pairs_together) and args.method != "sweet":
        parser.error("--published-ranking, --candidates and --pairs-together go with --method sweet")
    if (args.method == "sweet") != (args.critic is not None):
        parser.error("--critic DIR goes with --method sweet, and sweet needs it")
    args.epochs = args.epochs or (1 if args.method == "sweet" else 8 if args.preset == "paper-frontend" else 4)
    args.batch_size = args.batch_size or (8 if args.method in ("sweet", "mtdpo") else 32)
    return args


def main(argv=None):
    args = parse_args(argv)
    if args.dry_run:
        return common.dry_run(args, 2 if args.method == "mtdpo" else 1, tree=args.method == "sweet")
    runtime = common.start(args.seed)
    trajectories = common.read_trajectories(args.trajectories, args.num_trajectories, args.seed)
    oracle = args.critic in common.ORACLES
    if oracle and any("facts" not in trajectory["task"] for trajectory in trajectories):
        raise common.InputError(f"{args.trajectories}: --critic {args.critic} needs template tasks (01), which state "
                                "facts")
    if args.model != "tiny" and common.reads_pictures(args.model):
        raise common.InputError(f"{args.model}: policies read and write text alone; a model that sees can be a critic")
    inputs = [args.trajectories, args.model, args.candidates, None if oracle else args.critic]
    if common.claim_output(args, args.out, inputs, folder=True, begin=False):
        return
    if args.method in ("rft", "mtdpo"):
        common.fill_rewards(trajectories, args.unsafe_scorer)
    fresh = args.model == "tiny" and args.method == "sft"
    if fresh:
        model, tokenizer = tiny_model([vocabulary_text(trajectory) for trajectory in trajectories])
    else:
        tokenizer = common.load_tokenizer(args.model)
    places = None                                                                       # of pairs in their examples
    if args.method == "sweet":
        pages = common.is_frontend(trajectories[0]["task"])
        critic = args.critic if oracle else common.read_critic(args.critic, tokenizer, pages)
        if not oracle and critic.get("visual"):
            if args.published_ranking:
                raise common.InputError(f"{args.critic}: a critic that sees has no --published-ranking")
            critic["show"] = functools.partial(common.show_pages, images=pathlib.Path(args.out) / "images",
                                               browser=args.browser)
    else:
        build = trajectory_pair_examples if args.method == "mtdpo" else likelihood_examples
        examples = build(trajectories, tokenizer, args)
        examples = [examples[i] for i in common.drop_long(examples, args)]
    if common.claim_output(args, args.out, inputs, folder=True):
        return
    costs, works = common.Costs(args.out, runtime.device, folder=True), []
    if args.method == "sweet":
        examples, places = sweet_examples(trajectories, tokenizer, critic, args, runtime, works)
        costs.record(works)
    pairs_an_example = args.pairs_per_turn if args.pairs_together else 1
    batch_size = max(1, args.batch_size // pairs_an_example)
    batches = common.epoch_batches(len(examples), batch_size, args.epochs, args.seed)[:args.max_steps]
    steps_an_epoch = math.ceil(len(examples) / batch_size)
    common.say(f"{len(examples):,} examples, {len(batches):,} steps of {batch_size}")
    common.show_samples(tokenizer, [item for example in examples[:1] for item in example])

    # The reference is the policy before its first update; its log-probabilities are computed once, by the same function
    if fresh:
        common.shard(model.to(runtime.device), runtime, args)
    else:
        model = common.load_sharded(args.model, runtime, args)
    works.append(common.work_of(model))
    is_dpo = args.method in ("sweet", "mtdpo")
    if is_dpo:
        ref_values = common.reference_values(args.out, model, examples, args, runtime)
        ref = [torch.stack(sides(torch.nn.utils.rnn.pad_sequence(values, batch_first=True), places and [places[i]]), 1)
               for i, values in enumerate(ref_values)]                                  # (P, 2) each
    optimizer = common.adamw(model, args)
    states = common.States(args.out, model, optimizer)
    first = states.load()
    log = common.StepLog(args.out, first, len(batches), args.log_every)
    model.train()
    for step in range(first, len(batches)):
        torch.manual_seed(args.seed * len(batches) + step)          # models with dropout: a resumed run draws the same
        num_pairs = sum(len(places[i]) if places else 1 for i in batches[step])
        num_tokens = sum(turn >= 0 for i in batches[step] for row in examples[i][0] for turn in row.turns)
        sums = torch.zeros(6, dtype=torch.float64)
        for micro, weights in common.rank_batches(batches[step], args.micro_batch_size, runtime):
            batch = common.collate([item for i in micro for item in examples[i]], runtime.device)
            logps = model.turn_values(batch)                                            # per turn, see `sides`
            if is_dpo:
                pairs = places and [places[i] for i in micro]
                counts = torch.tensor([len(ref[i]) for i in micro], device=runtime.device)
                shares = weights.repeat_interleave(counts) / num_pairs                  # (P,)
                chosen, rejected = sides(logps, pairs)                                  # (P,)
                ref_chosen, ref_rejected = torch.cat([ref[i] for i in micro]).to(runtime.device).T       # (P,)
                losses, chosen_rewards, rejected_rewards = dpo_loss(chosen, rejected, ref_chosen, ref_rejected,
                                                                    args.beta)
                nll = -chosen / sides(batch.lengths, pairs)[0]                          # (P,) mean over chosen tokens
                loss = ((losses + args.nll_coef * nll) * shares).sum()
                margin = chosen_rewards - rejected_rewards
                sums[1:5] += (torch.stack([margin > 0, margin, chosen_rewards, nll]) * shares).sum(1).detach().cpu()
            else:
                loss = -(logps.sum(1) * weights).sum() / num_tokens                     # mean NLL of the batch's tokens
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
        preferences = {"acc": accuracy, "margin": margin, "chosen": chosen_reward, "nll": nll} if is_dpo else {}
        log.step(step + 1, num_tokens, loss=loss, **preferences, lr=lr, gnorm=grad_norm)
        if (step + 1) % args.save_every == 0 or (step + 1) % steps_an_epoch == 0:
            states.save(step + 1)
            costs.record(works, log.total_tokens)
    states.wait()
    costs.record(works, log.total_tokens)
    common.note_system_prompt(args.out, trajectories)
    common.finish_training(args.out, model, tokenizer)


if __name__ == "__main__":
    common.run_stage(main)
