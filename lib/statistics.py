"""Means over tasks, bootstrap intervals, paired differences, win rates, ranks; kinds of turns; tables as text.

trajectory   has "task_id" and, if the method has several runs, "run" (its number)
eval_score   eval_score(trajectory) is the number that is compared
metrics      {name of a method: its metrics}; metric: key of the metric by which methods are compared"""
import collections

import numpy as np

NUM_RESAMPLES = 20_000
CHUNK = 400                      # resamples at a time
TIE = 1e-6                       # largest difference between equal returns


# ---------------------------------------------------------------------------------------------------------------------
# means

def outcomes_of_runs(trajectories, eval_score):
    """For each run (a name may have several files): {task_id: [eval_score of each of its dialogues]}."""
    runs = {}
    for trajectory in trajectories:
        outcomes = runs.setdefault(trajectory.get("run", 0), {})
        outcomes.setdefault(trajectory["task_id"], []).append(float(eval_score(trajectory)))
    return [runs[number] for number in sorted(runs)]


def mean(values):
    return sum(values) / len(values)


def values_of_runs(trajectories, eval_score):
    """(ids of the tasks, mean eval_score of each task in each run: (runs, tasks))."""
    runs = outcomes_of_runs(trajectories, eval_score)
    tasks = sorted(runs[0])
    values = []
    for run in runs:
        values.append([mean(run[task]) for task in tasks])
    return tasks, values


def mean_over_tasks(trajectories, eval_score):
    """The mean over runs and tasks of values_of_runs: a task counts once, however many dialogues it has."""
    _, values = values_of_runs(trajectories, eval_score)
    return float(np.mean([np.mean(run) for run in values]))


# ---------------------------------------------------------------------------------------------------------------------
# intervals

def bootstrap_interval(values, families=None):
    """95 % percentile interval [low, high] of the mean of `values`: (tasks,), or (runs, tasks).

    Tasks are resampled, and runs, independently of the tasks.
    families: one per task. Families are resampled first, then as many tasks of each drawn family as it has."""
    values = np.array(values, float, ndmin=2)                                              # (runs, tasks)
    if families is None:
        families = np.zeros(values.shape[1])
    task_rng, run_rng = np.random.default_rng(0).spawn(2)
    means = []
    for _ in range(NUM_RESAMPLES // CHUNK):
        tasks, is_drawn = drawn_tasks(families, task_rng)
        sums = (values[:, tasks] * is_drawn).sum((2, 3))                                   # (runs, CHUNK)
        run_means = sums / is_drawn.sum((1, 2))
        drawn_runs = run_rng.integers(len(values), size=run_means.shape)
        means.append(np.take_along_axis(run_means, drawn_runs, 0).mean(0))                 # (CHUNK,)
    return np.percentile(np.concatenate(means), [2.5, 97.5]).tolist()


def drawn_tasks(families, rng):
    """CHUNK draws of F families, each with as many tasks as it has, at most M: (numbers of tasks (CHUNK, F, M), which
    of them count)."""
    _, family_of_task, sizes = np.unique(families, return_inverse=True, return_counts=True)
    tasks_by_family = np.argsort(family_of_task, kind="stable")
    drawn_families = rng.integers(len(sizes), size=(CHUNK, len(sizes), 1))
    drawn_sizes = sizes[drawn_families]                                                    # (CHUNK, F, 1)
    places = (rng.random((CHUNK, len(sizes), sizes.max())) * drawn_sizes).astype(int)      # in the family
    begins = (np.cumsum(sizes) - sizes)[drawn_families]
    is_drawn = np.arange(sizes.max()) < drawn_sizes
    return tasks_by_family[begins + places], is_drawn


def intervals(values, tasks, trajectories, is_share=True):
    """{"ci95", "ci95_families", "runs", "notes"} of `values` (runs, tasks).

    tasks          their ids
    ci95           missing if all values are equal, as a bootstrap then has no width; but a share (is_share) of 0 or 1
                   has the exact interval for this number of tasks (Clopper-Pearson)
    ci95_families  if every task states a family, and not all the same
    runs           the mean of each run, if there are several"""
    result = {}
    outcome = values[0][0]
    if np.ptp(values) > 0:
        result["ci95"] = bootstrap_interval(values)
        family_of = {trajectory["task_id"]: str(trajectory["task"].get("family")) for trajectory in trajectories}
        families = [family_of[task] for task in tasks]
        if "None" not in families and len(set(families)) > 1:
            result["ci95_families"] = bootstrap_interval(values, families)
    elif is_share and outcome in (0, 1):
        bound = 0.025 ** (1 / len(tasks))
        result["ci95"] = [bound, 1.0] if outcome else [0.0, 1 - bound]
        result["notes"] = ["all tasks have one mean: the interval is the exact one (Clopper-Pearson)"]
    elif is_share:
        result["notes"] = ["all tasks have one mean: no interval"]
    if len(values) > 1:
        result["runs"] = [float(np.mean(run)) for run in values]
    return result


# ---------------------------------------------------------------------------------------------------------------------
# comparisons with a baseline, paired by run and task

def paired(trajectories, baseline, eval_score, compare):
    """(ids of the tasks of both sides, compare(our outcomes, theirs) of each task in each run: (runs, tasks)).

    ([], []) if the numbers of runs differ."""
    ours = outcomes_of_runs(trajectories, eval_score)
    theirs = outcomes_of_runs(baseline, eval_score)
    if len(ours) != len(theirs):
        return [], []
    tasks = sorted(set(ours[0]) & set(theirs[0]))
    values = []
    for our_run, their_run in zip(ours, theirs):
        values.append([compare(our_run[task], their_run[task]) for task in tasks])
    return tasks, values


def paired_difference(trajectories, baseline, eval_score):
    """{"difference", "n", …intervals()} of the tasks' means; None if nothing can be paired."""
    tasks, differences = paired(trajectories, baseline, eval_score, lambda ours, theirs: mean(ours) - mean(theirs))
    if not tasks:
        return None
    return {
        "difference": float(np.mean(differences)),
        "n": len(tasks),
        **intervals(differences, tasks, trajectories, is_share=False),
    }


def wins_and_ties(ours, theirs):
    """(share of wins, a tie half a win; share of ties) over all pairs of our outcomes and theirs."""
    gaps = np.subtract.outer(ours, theirs)
    ties = (abs(gaps) <= TIE).mean()
    return (gaps > TIE).mean() + 0.5 * ties, ties


def win_rate(trajectories, baseline, eval_score):
    """{"win_rate", "win_rate_ci95", "ties"} over all pairs of the two sides' answers to a task, then over the tasks; {}
    if nothing can be paired."""
    tasks, shares = paired(trajectories, baseline, eval_score, wins_and_ties)
    if not tasks:
        return {}
    wins, ties = np.array(shares).transpose(2, 0, 1).copy()                                # (runs, tasks) each
    result = {"win_rate": float(wins.mean()), "ties": float(ties.mean())}
    if np.ptp(wins) > 0:
        result["win_rate_ci95"] = bootstrap_interval(wins)
    return result


# ---------------------------------------------------------------------------------------------------------------------
# ranks

def rank_correlation(a, b):
    """Spearman's; 0 if one side is all equal."""
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return 0.0
    return float(np.corrcoef(average_ranks(a), average_ranks(b))[0, 1])


def average_ranks(values):
    """Ranks from 0 as an array; equal values share their mean rank: [3, 1, 3] -> [1.5, 0.0, 1.5]."""
    gaps = np.subtract.outer(values, values)
    num_below = (gaps > 0).sum(1)
    num_equal = (gaps == 0).sum(1)
    return num_below + (num_equal - 1) / 2


# ---------------------------------------------------------------------------------------------------------------------
# kinds of the agent's turns

def agent_places(history):
    """Indices of the agent's turns in a dialogue."""
    return [place for place, turn in enumerate(history) if turn["role"] == "assistant"]


def turn_kinds(task, history, domain):
    """The domain's turn_kind of each agent turn."""
    kinds = []
    for place in agent_places(history):
        kinds.append(domain.turn_kind(task, history[:place], history[place]["content"]))
    return kinds


def measure_turns(trajectories, domain):
    """Give every trajectory the "kinds" of its agent turns and "known": was all that matters known before the last one?

    Returns {"all_known", "success_when_known", "success_when_not_known", "turns": {kind: share}} of one method, without
    a success that has no dialogues. If a task does not say what matters, its "known" is None and the result is {}."""
    outcomes = {True: [], False: [], None: []}                       # by "known"
    kinds = collections.Counter()
    for trajectory in trajectories:
        task, history = trajectory["task"], trajectory["dialogue_history"]
        trajectory["kinds"] = turn_kinds(task, history, domain)
        trajectory["known"] = None
        if any(trajectory["kinds"]):
            last = agent_places(history)[-1]
            trajectory["known"] = domain.all_known(task, history[:last])
        outcomes[trajectory["known"]].append(domain.eval_score(trajectory))
        kinds.update(trajectory["kinds"])
    if outcomes[None]:
        return {}
    successes = {"success_when_known": outcomes[True], "success_when_not_known": outcomes[False]}
    return {
        "all_known": len(outcomes[True]) / len(trajectories),
        **{name: mean(values) for name, values in successes.items() if values},
        "turns": {kind: kinds[kind] / kinds.total() for kind in sorted(kinds)},
    }


# ---------------------------------------------------------------------------------------------------------------------
# how dialogues end

# {how a dialogue ended: the key of its share among the metrics}
ENDINGS = {"answered": "answered_early", "answered in the last round": "answered_last",
           "asked in the last round": "asked_last"}


def ending_of(trajectory, domain):
    """One of ENDINGS, or None where the domain does not tell answers from questions, or a model had no room left."""
    if not domain.ANSWERS_EARLY or "no_room" in trajectory:
        return None
    history = trajectory["dialogue_history"]
    places = agent_places(history)
    if domain.answer_of(history[:places[-1] + 1], is_last=False) is None:
        return "asked in the last round"
    return "answered in the last round" if len(places) >= trajectory.get("max_rounds", 10) else "answered"


def measure_endings(trajectories, domain):
    """Give every trajectory its "ending"; {key: share} of ENDINGS."""
    for trajectory in trajectories:
        trajectory["ending"] = ending_of(trajectory, domain)
    endings = [trajectory["ending"] for trajectory in trajectories]
    if not domain.ANSWERS_EARLY:
        return {}
    return {key: endings.count(ending) / len(endings) for ending, key in ENDINGS.items()}


# ---------------------------------------------------------------------------------------------------------------------
# tables, as lines of aligned text

def aligned(headings, rows):
    """Lines of a table of texts: the first column is left-aligned, the others right-aligned. No lines without rows."""
    if not rows:
        return []
    table = [headings, *rows]
    first_width, *widths = [max(map(len, column)) for column in zip(*table)]
    lines = []
    for first, *cells in table:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths)]
        line = "  ".join([first.ljust(first_width), *padded])
        lines.append(line.rstrip())
    return lines


def interval(bounds, sign=""):
    """"[.12, .34]" with three digits; sign "+": with signs, for differences."""
    low, high = bounds
    return f"[{low:{sign}.3f}, {high:{sign}.3f}]"


def heading_of(metric):
    """Column heading of a metric: "success_rate" -> "success"."""
    return metric.removesuffix("_rate").replace("_", " ")


def cell_of(values, key, form=".3f"):
    """values[key] as text, "-" if there is none. An interval has its own form."""
    value = values.get(key, "-")
    if isinstance(value, list):
        return interval(value)
    return value if value == "-" else format(value, form)


def result_table(metrics, metric, domain_columns, baseline):
    """(headings, rows of cells) of the comparison; domain_columns: (key, heading, form) each."""
    columns = [
        ("n", "n", "d"),
        (metric, heading_of(metric), ".3f"),
        ("ci95", f"{heading_of(metric)}, 95 %", ""),
        ("mean_rounds", "rounds", ".2f"),
        ("asked_last", "asks last", ".3f"),
        ("leaks", "leaks", ".3f"),
        *domain_columns,
        ("win_rate", "wins", ".3f"),
        ("win_rate_ci95", "wins, 95 %", ""),
        ("ties", "ties", ".3f"),
    ]
    table = [["", *metrics]]                                         # columns
    for key, heading, form in columns:
        cells = [cell_of(method, key, form) for method in metrics.values()]
        if set(cells) != {"-"}:
            table.append([heading, *cells])
    if baseline:
        differences = [method.get("against_baseline") for method in metrics.values()]
        table.append([f"against {baseline}", *map(difference_cell, differences)])
    headings, *rows = zip(*table)
    return headings, rows


def difference_cell(difference):
    if not difference:
        return ""
    bounds = interval(difference["ci95"], "+") if "ci95" in difference else "(no interval)"
    return f"{difference['difference']:+.3f} {bounds}"


def note_lines(metrics):
    """Notes below the comparison, including limits of its intervals."""
    lines = []
    for name, method in metrics.items():
        lines += [f"{name}: {note}" for note in method.get("notes", [])]
    single = [name for name in metrics if "runs" not in metrics[name]]
    few = [name for name in metrics if 0 < len(metrics[name].get("runs", [])) < 5]
    if "similarity" in method:                                       # the same for all
        lines.append(f"similarity of screenshots: {method['similarity']}")
    if single:
        lines.append(f"one run of {', '.join(single)}: the intervals exclude seed variance")
    if few:
        lines.append(f"fewer than five runs of {', '.join(few)}: the intervals are too narrow if runs differ much")
    return lines


def detail_lines(metrics, baseline):
    """Intervals over families and the mean of each run, for the methods and differences that have them."""
    measured = {}
    for name, method in metrics.items():
        measured[name] = method
        measured[f"{name} against {baseline}"] = method.get("against_baseline") or {}
    rows = []
    for name, values in measured.items():
        runs = [f"{value:.3f}" for value in values.get("runs", [])]
        if runs or "ci95_families" in values:
            rows.append([name, cell_of(values, "ci95_families"), " ".join(runs)])
    return aligned(["", "95 %, families drawn", "each run"], rows)
