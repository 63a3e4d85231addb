"""Kinds of turns; the credit of turns (common.score_turns) by kind and by round; SWEET's candidates as 04 left them,
and how far their critic agrees with the oracles of a domain."""
import collections
import pathlib

from colbench import schema
from colbench.schema import list_of, record, token_ids, whole
from lib.runtime import InputError, read_jsonl
from lib.servers import said
from lib.statistics import mean, mean_of_groups, rank_correlation

MAX_ROUNDS = 50                      # rows of the credit by round


# ---------------------------------------------------------------------------------------------------------------------
# kinds of turns

def turn_kinds(task, history, domain):
    """The domain's turn_kind of each agent turn."""
    if domain.turn_kinds:
        return domain.turn_kinds(task, history)
    kinds = []
    for place, turn in enumerate(history):
        if turn["role"] == "assistant":
            kinds.append(domain.turn_kind(task, history[:place], turn["content"]))
    return kinds


def measure_turns(trajectories, domain):
    """Give every trajectory the "kinds" of its agent turns and "known": was all that matters known before the last one?

    Returns {"all_known", "success_when_known", "success_when_not_known", "turns": {kind: share}} of one method.
    Where a task does not say what matters, "known" is None, and the answer is empty."""
    for trajectory in trajectories:
        task, history = trajectory["task"], trajectory["dialogue_history"]
        trajectory["kinds"] = turn_kinds(task, history, domain)
        trajectory["known"] = None
        if any(trajectory["kinds"]):
            last = max(place for place, turn in enumerate(history) if turn["role"] == "assistant")
            trajectory["known"] = domain.all_known(task, history[:last])
    if any(trajectory["known"] is None for trajectory in trajectories):
        return {}
    counts = collections.Counter()
    outcomes = {True: [], False: []}                                 # by "known"
    for trajectory in trajectories:
        counts.update(trajectory["kinds"])
        outcomes[bool(trajectory["known"])].append(domain.outcome(trajectory))
    return {
        "all_known": len(outcomes[True]) / len(trajectories),
        "success_when_known": sum(outcomes[True]) / max(1, len(outcomes[True])),
        "success_when_not_known": sum(outcomes[False]) / max(1, len(outcomes[False])),
        "turns": {kind: counts[kind] / counts.total() for kind in sorted(counts)},
    }


# ---------------------------------------------------------------------------------------------------------------------
# the credit of turns

def credit_of(trajectories):
    """The credit of one method's dialogues (after measure_turns), by their "advantages":

    {"mean": of the dialogues' sums, "too_long": how many dialogues have none,
     "by_kind", "by_round": {kind or round: {"n", "mean"} of the turns}}; no kinds where the tasks state none."""
    by_kind, by_round, sums = {}, {}, []
    for trajectory in trajectories:
        advantages = trajectory["advantages"]
        if advantages is None:
            continue
        sums.append(sum(advantages))
        for number, (kind, advantage) in enumerate(zip(trajectory["kinds"], advantages), 1):
            by_round.setdefault(number, []).append(advantage)
            if kind is not None:
                by_kind.setdefault(kind, []).append(advantage)
    return {
        "mean": sum(sums) / max(1, len(sums)),
        "too_long": len(trajectories) - len(sums),
        "by_kind": number_and_mean(by_kind),
        "by_round": number_and_mean(by_round),
    }


def number_and_mean(groups):
    """{name: {"n", "mean"}} of {name: values}, in the order of the names."""
    return {str(name): {"n": len(groups[name]), "mean": mean(groups[name])} for name in sorted(groups)}


def credit_summary(metrics):
    """The "credit" (credit_of) of all methods together, for the page.

    {"by_kind", "by_round": [{"label", "n", "mean", "methods": {name: {"n", "mean"}}}], "num_rounds"}; of the rounds the
    first MAX_ROUNDS."""
    by_kind = credit_rows(metrics, "by_kind")
    by_round = credit_rows(metrics, "by_round")
    by_kind.sort(key=lambda row: row["label"])
    by_round.sort(key=lambda row: int(row["label"]))
    return {"by_kind": by_kind, "by_round": by_round[:MAX_ROUNDS], "num_rounds": len(by_round)}


def credit_rows(metrics, key):
    """A row for each kind ("by_kind") or round ("by_round") that a method has."""
    methods_of = {}                                                  # {label: {name of a method: {"n", "mean"}}}
    for name, method in metrics.items():
        for label, values in method["credit"][key].items():
            methods_of.setdefault(label, {})[name] = values
    rows = []
    for label, methods in methods_of.items():
        n = sum(values["n"] for values in methods.values())
        total = sum(values["n"] * values["mean"] for values in methods.values())
        rows.append({"label": label, "n": n, "mean": total / n, "methods": methods})
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# SWEET's candidates

STATE_KEYS = {"task_id": schema.label, "sample": int, "turn": whole(0)}
SIDE = record({"ids": token_ids})
CANDIDATE = record({"ids": token_ids, "text": str, "ended": bool})
SCORED = record({**STATE_KEYS, "task": dict, "history": list_of(record({"role": str, "content": str})),
                 "candidates": list_of(CANDIDATE), "advantages": list_of(float)})
PAIR = record({**STATE_KEYS, "chosen": SIDE, "rejected": SIDE})


def state_files(path):
    """(scored.jsonl, the pairs.jsonl beside it) of that file, or of 04's output folder."""
    path = pathlib.Path(path)
    if path.is_dir():
        path = path / "scored.jsonl"
    return path, path.with_name("pairs.jsonl")


def read_states(path):
    """The rows of SWEET's scored.jsonl (state_files) with "pairs" [(chosen, rejected)]: numbers of candidates, by the
    pairs.jsonl (of equal candidates the first). InputError where the two do not fit."""
    path, pairs_path = state_files(path)
    states = {}                                                      # {name of a state: (it, {ids: its candidate})}
    rows = read_jsonl(path, SCORED)
    for row in rows:
        if len(row["candidates"]) != len(row["advantages"]):
            raise InputError(f'{path}: task {row["task_id"]}: "candidates" and "advantages" differ in number')
        row["pairs"] = []
        _, numbers = states.setdefault(state_name(row), (row, {}))
        for number, candidate in enumerate(row["candidates"]):
            numbers.setdefault(tuple(candidate["ids"]), number)
    for pair in read_jsonl(pairs_path, PAIR):
        row, numbers = states.get(state_name(pair), (None, {}))
        chosen = numbers.get(tuple(pair["chosen"]["ids"]))
        rejected = numbers.get(tuple(pair["rejected"]["ids"]))
        if chosen is None or rejected is None:
            raise InputError(f"{pairs_path}: a pair of task {pair['task_id']}, turn {pair['turn']}, is of no "
                             f"candidates in {path}")
        row["pairs"].append((chosen, rejected))
    return rows


def state_name(row):
    return tuple(row[key] for key in STATE_KEYS)


def count_pairs(states):
    """Give every candidate of read_states "chosen" and "rejected": in how many pairs it is."""
    for state in states:
        for candidate in state["candidates"]:
            candidate["chosen"] = candidate["rejected"] = 0
        for chosen, rejected in state["pairs"]:
            state["candidates"][chosen]["chosen"] += 1
            state["candidates"][rejected]["rejected"] += 1
    return states


# ---------------------------------------------------------------------------------------------------------------------
# agreement of the critic that scored the candidates with a domain's oracles

def agreement(states, domain):
    """{oracle: agreement_with} of each of the domain's oracles that can score a state."""
    agreements = {}
    for oracle in domain.ORACLES:
        values = agreement_with(oracle, states, domain)
        if values:
            agreements[oracle] = values
    return agreements


def agreement_with(oracle, states, domain):
    """How far the advantages of read_states agree with an oracle's scores; None where it tells no candidates apart.

    "rank_correlation": Spearman's, of states whose candidates differ for the oracle: the mean of a task's states, then
    the mean over tasks. "ci95": over tasks. "num_states", "num_pairs".
    "right", "wrong": shares of the pairs whose chosen, whose rejected side has the higher score."""
    correlations, gaps = {}, []                                      # {task_id: those of its states}; of the pairs
    for state in states:
        if domain.lacks(state["task"], oracle):
            continue
        texts = [said(domain, candidate["text"], state.get("prompt")) for candidate in state["candidates"]]
        scores = domain.oracle_scores(oracle, state["task"], state["history"], texts)
        for chosen, rejected in state["pairs"]:
            gaps.append(scores[chosen] - scores[rejected])
        if len(set(scores)) > 1:
            correlation = rank_correlation(state["advantages"], scores)
            correlations.setdefault(state["task_id"], []).append(correlation)
    if not correlations or not gaps:
        return None
    mean_correlation, interval = mean_of_groups(correlations)
    return {
        "rank_correlation": mean_correlation,
        "ci95": interval,
        "num_states": sum(map(len, correlations.values())),
        "num_pairs": len(gaps),
        "right": sum(gap > 0 for gap in gaps) / len(gaps),
        "wrong": sum(gap < 0 for gap in gaps) / len(gaps),
    }
