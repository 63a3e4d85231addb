"""A fork of 04: turns ranked by what their reply tells, in place of a critic.

Reads   trajectories.jsonl (02) and a model. There is no critic to train.
Writes  a model folder with metrics.jsonl and agent.json (the system prompt that it was trained with), and
        candidates.jsonl (without --candidates), scored.jsonl and pairs.jsonl.

As 04 --method sweet, but each candidate a is scored by the model at the start alone. A question (or a look) gets its
reply from the rule-based user simulator, and is worth what that says about the reference answer c:
    max(0, log p(c | o_t, a, reply) - log p(c | o_t))            in nats
An answer is worth how much likelier c makes it, a mean over its tokens, as with 04 --critic untrained:
    log p(a | o_t, c) - log p(a | o_t)
So a question whose reply is known already is worth nothing. Pairs of candidates and eq. 4 are 04's.
The idea is that of arXiv 2602.12342 and 2510.14967, which reward turns of whole dialogues.

    python -m examples.gain --trajectories out/offline.jsonl --model models/tiny --out out/gain
    torchrun --nproc-per-node 8 -m examples.gain …
"""
import asyncio
import functools
import gc
import importlib
import pathlib
import random

import common
from colbench import ColBenchError, domain_of
from lib import data, flags
from lib.models import encode, end_of_turn, sharding_of
from lib.runtime import add_costs, InputError, map_blocks, read_rows, run_stage

policy = importlib.import_module("04_train_policy")

# ---------------------------------------------------------------------------------------------------------------------
# what candidates are worth

def worths(rows, critic, tokenizer, environment, max_tokens):
    """What every candidate of the rows is worth, a list for each row: by gains() or, of an answer, by the untrained
    critic."""
    points = [policy.decision_point(row) for row in rows]
    scores = common.score_actions(critic, tokenizer, points, max_tokens, critic.scorer.model.device)
    gain_of = gains(rows, critic.scorer, tokenizer, environment, max_tokens)
    worths_of_rows = []
    for number, point in enumerate(points):
        texts = zip(point.texts, scores[number])
        worths_of_rows.append([gain_of.get((number, text), score) for text, score in texts])
    return worths_of_rows


def gains(rows, scorer, tokenizer, environment, max_tokens):
    """{(number of a row, text): log p(c | o_t, text, reply) - log p(c | o_t), at least 0} of all candidates of the rows
    that are no answers."""
    items = [solution_item(tokenizer, row["prompt"], row["task"]) for row in rows]             # after o_t
    questions = []
    for number, row in enumerate(rows):
        domain = domain_of(row["task"])
        for text in sorted(set(policy.decision_point(row).texts)):
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
    """The turn that follows the agent's: of the environment, or of the rule-based simulator, drawn by the history."""
    reply = asyncio.run(environment.tool_reply(task, history))
    if reply is None:
        reply = asyncio.run(environment.rule_reply(task, history, random.Random(repr(history))))
    return {"role": "user", "content": reply}


def score_candidates(rows, tokenizer, args, run):
    """Rows of scored.jsonl: those of candidates.jsonl with "advantages" (worths). The model is split over the ranks,
    which score every block together."""
    path = pathlib.Path(args.out) / "scored.jsonl"
    if path.exists():
        return read_rows(path)
    critic = common.Critic(args.model, args.model, ref_sees_c=False)
    common.load_critic(critic, functools.partial(common.load_scorer, run=run, sharding=sharding_of(args)))
    blocks = [rows[i:i + policy.SCORED_TOGETHER] for i in range(0, len(rows), policy.SCORED_TOGETHER)]
    domain = domain_of(rows[0]["task"])
    with data.environment(domain, f"{args.out}.images", pathlib.Path(args.out).parent, vars(args)) as environment:

        def score_block(block):
            advantages_of = worths(block, critic, tokenizer, environment, args.max_tokens)
            return [{**row, "advantages": advantages} for row, advantages in zip(block, advantages_of)]
        rows = map_blocks(path, blocks, score_block, run)
    add_costs(args.out, folder=True)
    return rows


# ---------------------------------------------------------------------------------------------------------------------

def gain_examples(trajectories, tokenizer, args, run):
    """As 04's sweet_examples, without a critic."""
    if any(domain_of(t["task"]).lacks(t["task"], "rules") for t in trajectories):
        raise InputError(f"{args.trajectories}: gain needs template tasks (01), with a rule-based user simulator")
    states = policy.read_states(trajectories, tokenizer, args, sees_c=False)
    rows = policy.with_candidates(states, tokenizer, args, run)
    rows = score_candidates(with_agents(rows, trajectories), tokenizer, args, run)
    gc.collect()
    return policy.pair_examples(policy.pairs_of(rows, tokenizer, args, run), tokenizer, args.pairs_together)


def with_agents(rows, trajectories):
    """The rows with what the agent's prompt after a reply is made with (common.prompt_text)."""
    by_name = {(trajectory["task_id"], trajectory["sample"]): trajectory for trajectory in trajectories}
    prepared = []
    for row in rows:
        trajectory = by_name[row["task_id"], row["sample"]]
        prepared.append({**row, "system_prompt": common.shown_system(trajectory),
                         "chat_template_args": common.template_args(trajectory)})
    return prepared


METHODS = {"gain": policy.Method(gain_examples, policy.preference_losses, has_reference=True, num_items=1, epochs=1,
                                 batch_size=8)}


def parse_args(argv=None):
    parser = flags.argument_parser(__doc__)
    parser.add_argument("--method", choices=METHODS, default="gain", help="the only one")
    parser.set_defaults(critic=None)
    flags.add_training(parser, max_length=16384)
    parser.add_argument("--epochs", type=flags.positive_int, default=1, help="passes over the examples")
    parser.add_argument("--batch-size", type=flags.positive_int, default=8, help="pairs a step")
    policy.add_candidates(parser)
    args = parser.parse_args(argv)
    if args.dry_run:
        parser.error("--dry-run goes with 04_train_policy.py")
    return args


def main(argv=None):
    policy.main(argv, parse_args, METHODS)


if __name__ == "__main__":
    run_stage(main, ColBenchError)
