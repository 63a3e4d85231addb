"""Turn advantages (common.score_turns) by kind and by round; SWEET's candidates as 04 left them."""
import collections
import pathlib

from lib.data import name_of
from lib.runtime import read_jsonl
from lib.servers import visible_text
from lib.statistics import aligned, average_ranks, mean

# ---------------------------------------------------------------------------------------------------------------------
# turn advantages

def advantage_summary(trajectories):
    """The turn advantages of dialogues (after measure_turns), by "advantages":

    {"mean": of the dialogues' sums, "unscored": how many dialogues have none,
     "by_kind", "by_round": {kind or round: {"n", "mean"} of the turns}}; no kinds where the tasks state none."""
    by_kind = collections.defaultdict(list)
    by_round = collections.defaultdict(list)
    scored = [trajectory for trajectory in trajectories if trajectory["advantages"] is not None]
    sums = [sum(trajectory["advantages"]) for trajectory in scored]
    for trajectory in scored:
        turns = zip(trajectory["kinds"], trajectory["advantages"])
        for number, (kind, advantage) in enumerate(turns, 1):
            by_round[number].append(advantage)
            if kind is not None:
                by_kind[kind].append(advantage)
    return {
        "mean": sum(sums) / max(1, len(sums)),
        "unscored": len(trajectories) - len(sums),
        "by_kind": number_and_mean(by_kind),
        "by_round": number_and_mean(by_round),
    }


def number_and_mean(groups):
    """{name: {"n", "mean"}} of {name: values}, in the order of the names."""
    result = {}
    for name in sorted(groups):
        result[str(name)] = {"n": len(groups[name]), "mean": mean(groups[name])}
    return result


# ---------------------------------------------------------------------------------------------------------------------
# SWEET's candidates

def read_states(folder):
    """The rows of scored.jsonl in 04's output folder. Candidates get "chosen" and "rejected": in how many pairs of its
    pairs.jsonl they are (of equal ones the first)."""
    candidates = {}                                                  # {name of a state: those of the state}
    states = read_jsonl(pathlib.Path(folder, "scored.jsonl"), {"task_id": str})
    for state in states:
        candidates[name_of(state)] = state["candidates"]
        for candidate in state["candidates"]:
            candidate["chosen"] = candidate["rejected"] = 0
    for pair in read_jsonl(pathlib.Path(folder, "pairs.jsonl"), {"task_id": str}):
        of_state = candidates[name_of(pair)]
        actions = [candidate["ids"] for candidate in of_state]
        for side in ("chosen", "rejected"):
            of_state[actions.index(pair[side]["ids"])][side] += 1
    return states


def kind_lines(states, domain):
    """Lines of a table about SWEET's pairs, by the domain's turn_kind; none if the domain has no kinds. Every candidate
    gets its kind as "kind".

    A row for each kind of turn, before and after all that matters is known: the number of candidates, their mean rank
    by advantage (0 the worst, 1 the best), and how many are chosen and rejected. A collapse of the training is visible
    here first."""
    groups = collections.defaultdict(list)                           # {(known, kind): (rank, chosen, rejected) of each}
    for state in states:
        task, history = state["task"], state["history"]
        best = max(1, len(state["candidates"]) - 1)
        for candidate, rank in zip(state["candidates"], average_ranks(state["advantages"])):
            text = visible_text(domain, candidate["text"], state.get("prompt"))
            kind = domain.turn_kind(task, history, text)
            candidate["kind"] = kind
            if kind is not None:
                known = domain.all_known(task, history)
                groups[known, kind].append((rank / best, candidate["chosen"], candidate["rejected"]))
    rows = []
    for (known, kind), group in sorted(groups.items()):
        when = "all known" if known else "not all known"
        ranks, chosen, rejected = zip(*group)
        row = [when, kind, str(len(group)), f"{mean(ranks):.2f}"]
        rows.append([*row, str(sum(chosen)), str(sum(rejected))])
    return aligned(["what the pairs say", "", "candidates", "rank", "chosen", "rejected"], rows)
