"""A fork of 04: candidates ranked by what the user's reply reveals about c, instead of by a critic.

Reads   trajectories.jsonl (02) and a model. There is no critic to train.
Writes  a model folder with metrics.jsonl and agent.json (its system prompt in training), candidates.jsonl (without
        --candidates), scored.jsonl and pairs.jsonl.

Same as 04 --method sweet, but only the initial model scores each candidate a. A question gets a reply from the
rule-based user simulator (a look: from the database). Its score is the information in the reply about the solution c:
    max(0, log p(c | o_t, a, reply, m) - log p(c | o_t, m))      in nats
m opens an answer (a function's: "I WANT TO ANSWER:"). Its own probability is not counted: a prompt's "(last round)"
makes an answer likelier, which says nothing about c.
The score of an answer is how much likelier c makes it, a mean over its tokens, as with 04 --critic untrained:
    log p(a | o_t, c) - log p(a | o_t)
So a question whose reply is already known scores almost 0. Pairs of candidates and eq. 4 are those of 04.
The idea is that of arXiv 2602.12342 and 2510.14967, which reward turns of whole dialogues.

    python -m examples.gain --trajectories out/offline.jsonl --model models/tiny --out out/gain
    torchrun --nproc-per-node 8 -m examples.gain …
"""
from lib import flags

# ---------------------------------------------------------------------------------------------------------------------
# arguments

def parse_args(argv=None):
    parser = flags.argument_parser(__doc__)
    parser.add_argument("--method", choices=["gain"], default="gain", help="the only one")
    parser.set_defaults(critic=None)
    flags.add_training(parser, max_length=16384, epochs=1, batch_size=8)
    flags.add_candidates(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    parse_args()                    # answers --help and wrong flags before the imports below, which take seconds

import asyncio
import functools
import importlib
import random

import common
from colbench import domain_of
from lib import data
from lib.logps import action_outputs
from lib.runtime import InputError, run_stage
from lib.tokens import continuation, end_of_turn, note_prompt, prompt_text, shown_system

policy = importlib.import_module("04_train_policy")

# ---------------------------------------------------------------------------------------------------------------------
# scores of candidates

def candidate_scores(environment, rows, critic):
    """The score of every candidate, a list for each row: by gains() or, for an answer, by the untrained critic."""
    scores = policy.score_rows(rows, critic)
    gain_of = gains(environment, rows, critic)
    for number, row in enumerate(rows):
        for place, text in enumerate(policy.as_state(row).texts):
            if (number, text) in gain_of:
                scores[number][place] = gain_of[number, text]
    return scores


def gains(environment, rows, critic):
    """{(number of a row, text): log p(c | o_t, text, reply, m) - log p(c | o_t, m), at least 0} for all candidates that
    are not answers."""
    tokenizer = critic.tokenizer
    before = [solution_item(tokenizer, row["prompt"], row["task"]) for row in rows]
    after = {}                                                       # {(number of a row, text): an item}
    for number, row in enumerate(rows):
        for text in sorted(set(policy.as_state(row).texts)):
            prompt = prompt_after(row, text, tokenizer, environment)
            if prompt is not None:
                after[number, text] = solution_item(tokenizer, prompt, row["task"])
    items = [*before, *after.values()]
    logps = action_outputs(critic.model, items, critic.max_tokens)                                 # (1,) each
    gain_of = {}
    for (number, text), logp in zip(after, logps[len(before):]):
        gain = logp.item() - logps[number].item()
        gain_of[number, text] = max(0.0, gain)
    return gain_of


def prompt_after(row, text, tokenizer, environment):
    """The agent's prompt after a candidate, its `text`, and the reply; None after an answer."""
    history = [*row["history"], {"role": "assistant", "content": text}]
    is_last = len(history) == 2 * row["max_rounds"]
    if domain_of(row["task"]).answer_of(history, is_last) is not None:
        return None
    history.append(reply_to(row["task"], history, environment))
    return prompt_text(tokenizer, row, history)


def solution_item(tokenizer, prompt, task):
    """The item of one action, the solution c, after a prompt and what opens an answer (a marker)."""
    solution = task["ground_truth"]
    opened = prompt + domain_of(task).answer_message(task).removesuffix(solution)
    action = [*continuation(tokenizer, opened, solution), end_of_turn(tokenizer)]
    return common.actions_item(tokenizer, opened, [action])


def reply_to(task, history, environment):
    """The turn that follows the agent's: of the environment, or of the rule-based simulator, drawn by the history."""
    reply = asyncio.run(environment.tool_reply(task, history))
    if reply is None:
        rng = random.Random(repr(history))
        reply = asyncio.run(environment.rule_reply(task, history, rng))
    return {"role": "user", "content": reply}


# ---------------------------------------------------------------------------------------------------------------------

def with_agents(rows, trajectories):
    """The rows with the system prompt and template arguments of the agent's prompt after a reply (prompt_text)."""
    by_name = {data.name_of(trajectory): trajectory for trajectory in trajectories}
    prepared = []
    for row in rows:
        trajectory = by_name[data.name_of(row)[:-1]]               # without the turn
        system = shown_system(trajectory)
        arguments = trajectory.get("chat_template_args", {})
        prepared.append({**row, "system_prompt": system, "chat_template_args": arguments})
    return prepared


def main(argv=None):
    args = parse_args(argv)
    opened = policy.open_training(vars(args), [args.candidates, args.sampler])
    if not opened:
        return
    job, trajectories, tokenizer, load = opened
    domain = domain_of(trajectories[0]["task"])
    if any(domain.lacks(trajectory["task"], "rules") for trajectory in trajectories):
        raise InputError(f"{args.trajectories}: gain needs template tasks (01), with a rule-based user simulator")
    critic = policy.checked_critic(common.UNTRAINED, tokenizer, domain, None, job)

    # as in 04, except the score of candidates
    sampling = flags.pick(policy.Sampling, vars(args))
    read_candidates = policy.open_candidates(trajectories, tokenizer, critic, sampling, job)
    job.output.begin()
    rows = read_candidates()
    del read_candidates
    options = {**vars(args), "similarity": None}                     # it only replies and does not score
    with data.environment(domain, f"{args.out}.images", None, options) as environment:
        score = functools.partial(candidate_scores, environment)
        rows = policy.score_candidates(with_agents(rows, trajectories), critic, job, score)
    pairs = policy.pairs_of(rows, tokenizer, args.pairs_per_turn, job)
    examples = policy.pair_examples(pairs, tokenizer, args.pairs_together)

    losses_of = functools.partial(policy.preference_losses, job=job)
    note_prompt(args.out, trajectories)
    policy.train_policy(load, tokenizer, examples, losses_of, job)


if __name__ == "__main__":
    run_stage(main)
