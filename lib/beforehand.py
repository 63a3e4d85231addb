"""Diagnostics before training: does the untrained model read c (03), and do SWEET's pairs teach the agent to answer or
to ask (04)? docs/faq.md says what follows."""
import collections

from lib.data import name_of
from lib.runtime import say
from lib.servers import visible_text
from lib.statistics import agent_places, interval, intervals, mean

# ---------------------------------------------------------------------------------------------------------------------
# does the model read c?

def untrained_pair_accuracy(task_ids, gaps):
    """The share of trajectory pairs in which c raises the untrained model's score more for the better dialogue. Prints
    and returns it as {"share", "ci95"}, averaged over tasks.

    gaps   (P,) how much more c raises the log-probability of the chosen one's turns than of the rejected one's"""
    shares = collections.defaultdict(list)
    for task, gap in zip(task_ids, gaps.tolist()):
        shares[task].append(0.5 if gap == 0 else float(gap > 0))
    of_tasks = [mean(values) for values in shares.values()]
    share = mean(of_tasks)
    trajectories = [{"task_id": task, "task": {}} for task in shares]
    bounds = intervals([of_tasks], list(shares), trajectories).get("ci95", [0.0, 1.0])
    text = ("before training, c raises log p more for the better dialogue in "
            f"{share:.3f} {interval(bounds)} of the pairs")
    if bounds[0] > 0.5:
        say(f"{text}: the model reads c (04 --reference-sees-c no uses that)")
    else:
        say(f"{text}: not enough to say that the model reads c (docs/faq.md, Will it work for my model?)")
    return {"share": share, "ci95": bounds}


# ---------------------------------------------------------------------------------------------------------------------
# do the pairs teach the agent to answer?

def answering_candidates(state, domain):
    """Numbers of a state's candidates that are answers: they would end the dialogue before the last round, too.
    All others are called questions.
    state: a row of candidates.jsonl (04)"""
    answers = []
    for number, candidate in enumerate(state["candidates"]):
        text = visible_text(domain, candidate["text"], state["prompt"])
        if domain.answer_of([*state["history"], {"role": "assistant", "content": text}], is_last=False) is not None:
            answers.append(number)
    return answers


def last_turns_of_successes(trajectories, domain):
    """Names (name_of) of the states in which a logged dialogue gave a right answer."""
    names = set()
    for trajectory in trajectories:
        if isinstance(trajectory.get("reward"), (int, float)) and domain.eval_score(trajectory) == 1:
            last = len(agent_places(trajectory["dialogue_history"])) - 1
            names.add(name_of({**trajectory, "turn": last}))
    return names


def say_answers_in_pairs(pairs, rows, trajectories, domain):
    """Say how often pairs prefer an answer to a question, and a question to an answer: in all states, and in those
    where the log has a right answer. In these, pairs that mostly prefer the question teach the agent not to answer.

    pairs    rows of pairs.jsonl (04)
    rows     of scored.jsonl, the states of the pairs"""
    actions_of, answers_of = {}, {}
    for row in rows:
        actions_of[name_of(row)] = [candidate["ids"] for candidate in row["candidates"]]
        answers_of[name_of(row)] = answering_candidates(row, domain)
    right = last_turns_of_successes(trajectories, domain)
    in_all, in_right = collections.Counter(), collections.Counter()
    for pair in pairs:
        name = name_of(pair)
        sides = [actions_of[name].index(pair[side]["ids"]) in answers_of[name] for side in ("chosen", "rejected")]
        if sides[0] != sides[1]:
            kind = "answer" if sides[0] else "question"
            in_all[kind] += 1
            in_right[kind] += name in right
    if in_all:
        say(f"pairs of an answer and a question: {in_all['answer']:,} prefer the answer, {in_all['question']:,} the "
            f"question; where the log has a right answer, {in_right['answer']:,} and {in_right['question']:,}")
    if in_right["question"] > 2 * in_right["answer"]:
        say("these pairs teach the agent not to answer: it may ask until the last round")
