"""A fork of 04: SWEET-RL that keeps the agent's ability to answer, by training on right answers from the log.

Reads   trajectories.jsonl (02), a model, and a critic (03).
Writes  a model folder with metrics.jsonl and agent.json (its system prompt in training), candidates.jsonl (without
        --candidates), scored.jsonl and pairs.jsonl.

04 --method sweet with two more flags, which are not in the paper:
--answer-coef C       adds C times the mean NLL of a right answer to eq. 4, so that an agent that learns to ask does not
                      forget how to answer. The answer is drawn from the log, once for each example.
--pairs-by-kind       An answer is compared with answers, a question with questions. Eq. 2 leaves open how an answer
                      compares with a question: every dialogue has one answer, so a constant added to the advantage of
                      all answers cancels between chosen and rejected. The log decides it where it can:
                          last turn of a successful dialogue                                 the answer wins
                          last turn of a failed one that lacked a fact (Domain.all_known)    the question wins
                          last round                                                         the answer wins
                      There the winning kind ranks above the other, and pairs are drawn as in 04.

    python -m examples.answers --answer-coef 1 --trajectories out/offline.jsonl --model models/tiny \\
        --critic out/critic --out out/answers
    torchrun --nproc-per-node 8 -m examples.answers --answer-coef 1 …
"""
from lib import flags

# ---------------------------------------------------------------------------------------------------------------------
# arguments

def parse_args(argv=None):
    parser = flags.argument_parser(__doc__)
    parser.add_argument("--method", choices=["sweet"], default="sweet", help="the only one")
    flags.add_training(parser, max_length=16384, epochs=1, batch_size=8)
    flags.add_critic(parser, is_needed=True)
    flags.add_candidates(parser)
    parser.add_argument("--answer-coef", type=flags.non_negative_float, default=0.0, help="weight of the mean NLL of a "
                        "right answer, drawn once for each example from all successful trajectories (whatever "
                        "--data-frac)")
    parser.add_argument("--pairs-by-kind", action="store_true", help="compare answers with answers and questions with "
                        "questions, except where the log decides between them")
    return parser.parse_args(argv)


if __name__ == "__main__":
    parse_args()                    # answers --help and wrong flags before the imports below, which take seconds

import functools
import importlib
import random

import torch

import common
from colbench import domain_of
from lib import beforehand, data
from lib.logps import longest_sequence, Sequence
from lib.runtime import InputError, run_stage, say
from lib.statistics import agent_places
from lib.tokens import agent_turns, decode, encode, note_prompt

policy = importlib.import_module("04_train_policy")

# ---------------------------------------------------------------------------------------------------------------------
# loss

def answers_losses(action_model, batch, examples, ref_logps, job, answer_coef):
    """04's preference_losses; --answer-coef adds the NLL of right answers, once for each pair."""
    logps = action_model(batch)                                      # (B, M)
    losses = policy.preference_losses(lambda _: logps, batch, examples, ref_logps, job)
    if answer_coef:
        num_pairs = torch.tensor([len(example.action_pairs) for example in examples], device=logps.device)
        losses["answer_nll"] = answer_nlls(logps, batch.lengths) * num_pairs                        # (examples,)
        losses["loss"] = losses["loss"] + answer_coef * losses["answer_nll"]
    return losses


def answer_nlls(logps, lengths):
    """The mean NLL of each example's right answer, (examples,). It is the second of the two items, with one action.
    logps, lengths: (B, M) of all items."""
    return -logps[1::2].sum(1) / lengths[1::2].sum(1)


# ---------------------------------------------------------------------------------------------------------------------
# logged right answers

def read_right_answers(trajectories, tokenizer, job):
    """An item for the last turn of each successful trajectory that fits --max-length. Only the tokens that state the
    answer are action tokens, not the decision to answer. Raises InputError if there is none."""
    successful = [t for t in trajectories if domain_of(t["task"]).eval_score(t) == 1]
    items = []
    for trajectory in successful:
        prompt, action = agent_turns(tokenizer, trajectory)[-1]
        first = first_answer_token(tokenizer, action, trajectory["answer"].strip())
        if first is None:
            continue
        read = encode(tokenizer, prompt) + action[:first]
        stated = action[first:]
        item = [Sequence(read + stated, [-1] * len(read) + [0] * len(stated))]
        if longest_sequence([item]) <= job.max_length:
            items.append(item)
    if not items:
        raise InputError(f"{job.path}: --answer-coef: no successful dialogue whose last turn states an answer")
    say(f"{len(items):,} right answers of {len(trajectories):,} trajectories (--answer-coef); "
        f"{len(successful) - len(items):,} more are not in the last turn, or exceed --max-length")
    return items


def first_answer_token(tokenizer, action, answer):
    """The last token of an action (ids) from which its text still contains the `answer`; None if it never does."""
    for first in reversed(range(len(action))):
        if answer in decode(tokenizer, action[first:]):
            return first
    return None


def with_right_answers(examples, right_answers, seed):
    """The examples, each with a second item: one of the items of read_right_answers, drawn once at random."""
    rng = random.Random(seed)
    return [example._replace(items=[*example.items, rng.choice(right_answers)]) for example in examples]


# ---------------------------------------------------------------------------------------------------------------------
# pairs by kind

def winners_of(trajectories, domain):
    """{name of a state (data.name_of): "answer" or "question"}, what the log says about the last turns of dialogues."""
    winners = {}
    for trajectory in trajectories:
        task, history = trajectory["task"], trajectory["dialogue_history"]
        places = agent_places(history)
        name = data.name_of({**trajectory, "turn": len(places) - 1})
        before = history[:places[-1]]
        kind = domain.turn_kind(task, before, history[places[-1]]["content"])
        if domain.eval_score(trajectory) == 1:
            winners[name] = "answer"
        elif kind is not None and not domain.all_known(task, before):
            winners[name] = "question"
    return winners


def pairs_by_kind(winners, row, pairs_per_turn, rng):
    """04's candidate_pairs with --pairs-by-kind. winners: of winners_of."""
    answers = beforehand.answering_candidates(row, domain_of(row["task"]))
    questions = [number for number in range(len(row["candidates"])) if number not in answers]
    winner = winners.get(data.name_of(row))
    if len(row["history"]) + 1 == 2 * row["max_rounds"]:
        winner = "answer"
    if winner:
        gap = 1 + max(row["advantages"]) - min(row["advantages"])
        raised = list(row["advantages"])
        for number in answers if winner == "answer" else questions:
            raised[number] += gap
        return policy.candidate_pairs({**row, "advantages": raised}, pairs_per_turn, rng)
    pairs = []
    for kind in rng.choices([answers, questions], [len(answers), len(questions)], k=pairs_per_turn):
        pairs += policy.candidate_pairs(row, 1, rng, kind)
    return pairs


# ---------------------------------------------------------------------------------------------------------------------

def main(argv=None):
    args = parse_args(argv)
    inputs = [name for name in (args.candidates, args.sampler, args.critic) if name != common.UNTRAINED]
    opened = policy.open_training(vars(args), inputs)
    if not opened:
        return
    job, trajectories, tokenizer, load = opened
    domain = domain_of(trajectories[0]["task"])
    critic = policy.checked_critic(args.critic, tokenizer, domain, args.reference_sees_c, job)
    data.fill_rewards(trajectories, job.output)
    choose = policy.candidate_pairs
    if args.pairs_by_kind:
        choose = functools.partial(pairs_by_kind, winners_of(trajectories, domain))
    right_answers = read_right_answers(trajectories, tokenizer, job) if args.answer_coef else None

    # as in 04
    sampling = flags.pick(policy.Sampling, vars(args))
    read_candidates = policy.open_candidates(trajectories, tokenizer, critic, sampling, job)
    job.output.begin()
    rows = read_candidates()
    del read_candidates
    rows = policy.score_candidates(rows, critic, job)
    pairs = policy.pairs_of(rows, tokenizer, args.pairs_per_turn, job, choose)
    beforehand.say_answers_in_pairs(pairs, rows, trajectories, domain)
    examples = policy.pair_examples(pairs, tokenizer, args.pairs_together)
    if args.answer_coef:
        examples = with_right_answers(examples, right_answers, args.seed)

    losses_of = functools.partial(answers_losses, job=job, answer_coef=args.answer_coef)
    note_prompt(args.out, trajectories)
    policy.train_policy(load, tokenizer, examples, losses_of, job)


if __name__ == "__main__":
    run_stage(main)
