"""Turn advantages (common.score_turns) by kind and by round; SWEET's candidates as 04 left them, and how far their
critic agrees with the oracles of a domain."""
import pathlib

from colbench import schema
from colbench.schema import list_of, record, token_ids, whole
from lib.runtime import InputError, read_jsonl
from lib.servers import visible_text
from lib.statistics import aligned, average_ranks, interval, mean, mean_of_groups, rank_correlation

# ---------------------------------------------------------------------------------------------------------------------
# turn advantages

def advantage_summary(trajectories):
    """The turn advantages of one method's dialogues (after measure_turns), by "advantages":

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


def advantage_rows(metrics, key):
    """A row for each kind of turn ("by_kind") or round ("by_round") that a method has, of all methods together:
    {"label", "n", "mean", "methods": {name: {"n", "mean"}}}."""
    rows = {}
    for name, method in metrics.items():
        for label, values in method["turn_advantages"][key].items():
            row = rows.setdefault(label, {"label": label, "n": 0, "sum": 0, "methods": {}})
            row["n"] += values["n"]
            row["sum"] += values["n"] * values["mean"]
            row["methods"][name] = values
    for row in rows.values():
        row["mean"] = row.pop("sum") / row["n"]
    return sorted(rows.values(), key=lambda row: int(row["label"]) if key == "by_round" else row["label"])


# ---------------------------------------------------------------------------------------------------------------------
# SWEET's candidates

STATE_KEYS = {"task_id": schema.label, "sample": int, "turn": whole(0)}
SIDE = record({"ids": token_ids})
CANDIDATE = record({"ids": token_ids, "text": str, "ended": bool})
SCORED = record({**STATE_KEYS, "task": dict, "history": list_of(record({"role": str, "content": str})),
                 "candidates": list_of(CANDIDATE), "advantages": list_of(float)})
PAIR = record({**STATE_KEYS, "chosen": SIDE, "rejected": SIDE})


def read_states(folder):
    """The rows of scored.jsonl in 04's output folder, with "pairs" [(chosen, rejected)], numbers of candidates, by its
    pairs.jsonl (of equal candidates the first). InputError where the two do not fit.

    Candidates have "chosen" and "rejected": in how many pairs they are."""
    path, pairs_path = pathlib.Path(folder, "scored.jsonl"), pathlib.Path(folder, "pairs.jsonl")
    states, numbers = {}, {}                                         # by name; numbers: {(name, ids): the candidate's}
    for state in read_jsonl(path, SCORED):
        if len(state["candidates"]) != len(state["advantages"]):
            raise InputError(f'{path}: task {state["task_id"]}: "candidates" and "advantages" differ in number')
        name = state_name(state)
        states[name] = {**state, "pairs": []}
        for number, candidate in enumerate(state["candidates"]):
            candidate["chosen"] = candidate["rejected"] = 0
            numbers.setdefault((name, tuple(candidate["ids"])), number)
    for pair in read_jsonl(pairs_path, PAIR):
        name = state_name(pair)
        chosen = numbers.get((name, tuple(pair["chosen"]["ids"])))
        rejected = numbers.get((name, tuple(pair["rejected"]["ids"])))
        if chosen is None or rejected is None:
            raise InputError(f"{pairs_path}: a pair of task {pair['task_id']}, turn {pair['turn']}, is of no "
                             f"candidates in {path}")
        states[name]["pairs"].append((chosen, rejected))
        states[name]["candidates"][chosen]["chosen"] += 1
        states[name]["candidates"][rejected]["rejected"] += 1
    return list(states.values())


def state_name(row):
    return tuple(row[key] for key in STATE_KEYS)


def candidate_texts(state, domain):
    """What the user simulator would see of each candidate."""
    return [visible_text(domain, candidate["text"], state.get("prompt")) for candidate in state["candidates"]]


def kind_lines(states, domain):
    """A table of what SWEET's pairs say, by the domain's turn_kind (no lines where it has none), which every candidate
    gets as "kind".

    Of each kind of turn: the candidates, their mean rank by advantage (0 the worst, 1 the best), and how many are
    chosen and rejected, before and after all that matters is known. A collapse of the training shows here first."""
    groups = {}                                                      # {(known, kind): (rank, chosen, rejected) of each}
    for state in states:
        task, history, candidates = state["task"], state["history"], state["candidates"]
        ranks = average_ranks(state["advantages"])
        for candidate, text, rank in zip(candidates, candidate_texts(state, domain), ranks):
            candidate["kind"] = domain.turn_kind(task, history, text)
            if candidate["kind"] is not None:
                group = groups.setdefault((domain.all_known(task, history), candidate["kind"]), [])
                group.append((rank / max(1, len(candidates) - 1), candidate["chosen"], candidate["rejected"]))
    rows = []
    for (known, kind), numbers in sorted(groups.items()):
        ranks, chosen, rejected = zip(*numbers)
        rows.append(["all known" if known else "not all known", kind, str(len(ranks)), f"{mean(ranks):.2f}",
                     str(sum(chosen)), str(sum(rejected))])
    return aligned(["what the pairs say", "", "candidates", "rank", "chosen", "rejected"], rows) if rows else []


# ---------------------------------------------------------------------------------------------------------------------
# agreement of the critic that scored the candidates with a domain's oracles

def agreement(states, domain):
    """{oracle: agreement_with} of each of the domain's oracles that can score a state."""
    agreements = {oracle: agreement_with(oracle, states, domain) for oracle in domain.ORACLES}
    return {oracle: values for oracle, values in agreements.items() if values}


def agreement_with(oracle, states, domain):
    """How far the advantages of read_states agree with an oracle's scores; None where it tells no candidates apart.

    "rank_correlation": Spearman's, of states whose candidates differ for the oracle: the mean of a task's states, then
    the mean over tasks. "ci95": over tasks. "num_states", "num_pairs".
    "right", "wrong": shares of the pairs whose chosen, whose rejected side has the higher score."""
    correlations, gaps = {}, []                                      # {task_id: those of its states}; of the pairs
    for state in states:
        if domain.lacks(state["task"], oracle):
            continue
        scores = domain.oracle_scores(oracle, state["task"], state["history"], candidate_texts(state, domain))
        for chosen, rejected in state["pairs"]:
            gaps.append(scores[chosen] - scores[rejected])
        if len(set(scores)) > 1:
            correlation = rank_correlation(state["advantages"], scores)
            correlations.setdefault(state["task_id"], []).append(correlation)
    if not correlations or not gaps:
        return None
    mean_correlation, bounds = mean_of_groups(correlations)
    return {
        "rank_correlation": mean_correlation,
        "ci95": bounds,
        "num_states": sum(map(len, correlations.values())),
        "num_pairs": len(gaps),
        "right": sum(gap > 0 for gap in gaps) / len(gaps),
        "wrong": sum(gap < 0 for gap in gaps) / len(gaps),
    }


def agreement_lines(agreements):
    """A line for each oracle of `agreement`."""
    lines = []
    for oracle, values in agreements.items():
        lines.append(
            f"{oracle}: rank correlation of the critic's advantages with its scores {values['rank_correlation']:+.3f} "
            f"{interval(values['ci95'], '+')} over {values['num_states']:,} states of --candidates; of "
            f"{values['num_pairs']:,} pairs {values['right']:.1%} right, {values['wrong']:.1%} wrong, the rest equal "
            "to it")
    return lines
