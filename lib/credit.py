"""Kinds of turns; the credit of turns (common.score_turns) by kind and by round; SWEET's candidates as 04 left them,
and how far their critic agrees with the oracles of a domain."""
import collections
import pathlib

from lib import schema
from lib.runtime import check_row, InputError, read_jsonl
from lib.schema import list_of, record, token_ids, whole
from lib.servers import said
from lib.statistics import mean_of_groups, rank_correlation

MAX_ROUNDS = 50                      # rows of the credit by round


def turn_kinds(task, history, domain):
    """The domain's turn_kind of each agent turn."""
    if domain.turn_kinds:
        return domain.turn_kinds(task, history)
    return [domain.turn_kind(task, history[:i], turn["content"]) for i, turn in enumerate(history)
            if turn["role"] == "assistant"]


def measure_turns(trajectories, domain):
    """Give every trajectory "kinds", the domain's turn_kind of each agent turn, and "known", whether all that matters
    was known before the last turn (None where the task does not say). Returns {"all_known", "success_when_known",
    "success_when_not_known", "turns": {kind: share}} of one method, or {} where a task does not say."""
    for row in trajectories:
        task, history = row["task"], row["dialogue_history"]
        row["kinds"] = turn_kinds(task, history, domain)
        row["known"] = domain.all_known(task, history[:-1]) if any(row["kinds"]) else None
    if any(row["known"] is None for row in trajectories):
        return {}
    kinds = collections.Counter(kind for row in trajectories for kind in row["kinds"])
    wins, guesses = ([domain.outcome(row) for row in trajectories if row["known"] == side] for side in (True, False))
    return {"all_known": sum(row["known"] for row in trajectories) / len(trajectories),
            "success_when_known": sum(wins) / max(1, len(wins)),
            "success_when_not_known": sum(guesses) / max(1, len(guesses)),
            "turns": {kind: count / kinds.total() for kind, count in sorted(kinds.items())}}


def credit_of(trajectories):
    """{"mean": of the dialogues' sums of "advantages", "too_long": dialogues without them, "by_kind" and "by_round": of
    the turns {name: {"n", "mean"}}} of one method (after measure_turns); no kinds where the tasks state none."""
    kinds, rounds, sums = {}, {}, []
    for row in trajectories:
        if row["advantages"] is None:
            continue
        for number, (kind, advantage) in enumerate(zip(row["kinds"], row["advantages"]), 1):
            kinds.setdefault(kind, []).append(advantage)
            rounds.setdefault(str(number), []).append(advantage)
        sums.append(sum(row["advantages"]))
    kinds.pop(None, None)
    by_kind, by_round = ({name: {"n": len(found[name]), "mean": sum(found[name]) / len(found[name])} for name in names}
                         for found, names in ((kinds, sorted(kinds)), (rounds, sorted(rounds, key=int))))
    return {"mean": sum(sums) / max(1, len(sums)), "too_long": len(trajectories) - len(sums), "by_kind": by_kind,
            "by_round": by_round}


def credit_summary(metrics):
    """{"by_kind", "by_round": [{"label", "n", "mean", "methods": {name: {"n", "mean"}}}], "num_rounds"} over all
    methods' "credit" (credit_of); of the rounds the first MAX_ROUNDS."""
    credits, summary = {name: m["credit"] for name, m in metrics.items()}, {}
    for what, order in (("by_kind", str), ("by_round", int)):
        summary[what] = []
        for label in sorted({label for own in credits.values() for label in own[what]}, key=order):
            methods = {name: own[what][label] for name, own in credits.items() if label in own[what]}
            n = sum(own["n"] for own in methods.values())
            mean = sum(own["n"] * own["mean"] for own in methods.values()) / n
            summary[what].append({"label": label, "n": n, "mean": mean, "methods": methods})
    summary["num_rounds"] = len(summary["by_round"])
    summary["by_round"] = summary["by_round"][:MAX_ROUNDS]
    return summary


STATE_KEYS = {"task_id": schema.label, "sample": int, "turn": whole(0)}
SCORED = record({**STATE_KEYS, "task": dict, "history": list, "candidates": list, "advantages": list})
PAIR = record({**STATE_KEYS, "chosen": dict, "rejected": dict})


def ids_of(candidate, where):
    """The token ids of a candidate, or of a side of a pair; InputError, which begins with `where`, for other values."""
    if token_ids(candidate.get("ids")):
        raise InputError(f'{where}: "ids" of a candidate must be a list of whole numbers from 0 up, one at least')
    return candidate["ids"]


def check_state(row, where):
    """InputError, which begins with `where`, where the parts of a row of scored.jsonl are not what the page shows."""
    for candidate in row["candidates"]:
        check_row(candidate, {"text": str, "ended": bool}, {}, f"{where}: a candidate")
        ids_of(candidate, where)
    for turn in row["history"]:
        check_row(turn, {"role": str, "content": str}, {}, f"{where}: history")
    if list_of(float)(row["advantages"]):
        raise InputError(f'{where}: "advantages" must be finite numbers')


def read_states(path):
    """The rows of SWEET's scored.jsonl (a file, or in 04's output folder) with "pairs" [(chosen, rejected)]: numbers of
    candidates, by the pairs.jsonl beside it (of equal candidates the first). InputError where the two do not fit."""
    path = pathlib.Path(path)
    path = path / "scored.jsonl" if path.is_dir() else path
    rows = read_jsonl(path, SCORED)
    places = {}                                                      # {state: {ids: number of the candidate}}
    for row in rows:
        if len(row["candidates"]) != len(row["advantages"]):
            raise InputError(f'{path}: task {row["task_id"]}: "candidates" and "advantages" differ in number')
        check_state(row, f"{path}: task {row['task_id']}")
        row["pairs"], own = [], places.setdefault(tuple(row[key] for key in STATE_KEYS), (row, {}))[1]
        for number, candidate in enumerate(row["candidates"]):
            own.setdefault(tuple(candidate["ids"]), number)
    beside = path.with_name("pairs.jsonl")
    for pair in read_jsonl(beside, PAIR):
        row, numbers = places.get(tuple(pair[key] for key in STATE_KEYS), (None, {}))
        sides = [numbers.get(tuple(ids_of(pair[side], f"{beside}: a pair of task {pair['task_id']}")))
                 for side in ("chosen", "rejected")]
        if None in sides:
            raise InputError(f"{beside}: a pair of task {pair['task_id']}, turn {pair['turn']}, is of no candidates in "
                             f"{path}")
        row["pairs"].append(tuple(sides))
    return rows


def count_pairs(rows):
    """Give every candidate of read_states "chosen" and "rejected": in how many pairs it is."""
    for row in rows:
        for number, candidate in enumerate(row["candidates"]):
            candidate["chosen"], candidate["rejected"] = ([pair[side] for pair in row["pairs"]].count(number)
                                                          for side in (0, 1))
    return rows


def agreement(rows, domain):
    """{oracle: {"rank_correlation" (Spearman, of states whose candidates differ for the oracle: the mean of a task's
    states, then the mean over tasks), "ci95" (over tasks), "num_states", "num_pairs", "right", "wrong": shares of the
    pairs whose chosen, whose rejected side the oracle has above the other}} of read_states's advantages with each of
    the domain's oracles."""
    found = {}
    for oracle in domain.ORACLES:
        by_task, gaps = {}, []
        for row in rows:
            if domain.lacks(row["task"], oracle):
                continue
            texts = [said(domain, candidate["text"], row.get("prompt")) for candidate in row["candidates"]]
            scores = domain.oracle_scores(oracle, row["task"], row["history"], texts)
            gaps += [scores[chosen] - scores[rejected] for chosen, rejected in row["pairs"]]
            if len(set(scores)) > 1:
                by_task.setdefault(row["task_id"], []).append(rank_correlation(row["advantages"], scores))
        if by_task and gaps:
            mean, interval = mean_of_groups(by_task)
            found[oracle] = {
                "rank_correlation": mean, "ci95": interval, "num_states": sum(map(len, by_task.values())),
                "num_pairs": len(gaps),
                "right": sum(gap > 0 for gap in gaps) / len(gaps), "wrong": sum(gap < 0 for gap in gaps) / len(gaps)}
    return found
