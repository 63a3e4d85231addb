"""Means, intervals by bootstrap, paired differences, win rates, rank correlation. A row has "task_id", of several runs
of a method also "run" (its number); value(row) is the number that is compared."""
import numpy as np

NUM_RESAMPLES = 2000
TIE = 1e-6                       # returns that differ by no more are equal


def task_values(trajectories, value):
    """{task_id: [value(trajectory) of each of its dialogues]}."""
    by_task = {}
    for trajectory in trajectories:
        by_task.setdefault(trajectory["task_id"], []).append(float(value(trajectory)))
    return by_task


def by_run(trajectories):
    """The trajectories of each run (each file of a name that has several)."""
    runs = {}
    for trajectory in trajectories:
        runs.setdefault(trajectory.get("run", 0), []).append(trajectory)
    return [own for _, own in sorted(runs.items())]


def task_means(trajectories, value):
    """{task_id: mean of value(trajectory) over its dialogues}, in the order of the ids."""
    return {task: sum(values) / len(values) for task, values in sorted(task_values(trajectories, value).items())}


def mean_over_tasks(trajectories, value):
    """The mean over tasks of task_means, of several runs their mean: what intervals and differences are about. A task
    counts once, however many dialogues it has."""
    means = [np.mean([*task_means(own, value).values()]) for own in by_run(trajectories)]
    return float(np.mean(means))


def mean_of_groups(groups):
    """(the mean over tasks, its bootstrap_interval) of `groups`, {task: its values}: each task counts once."""
    means = [sum(values) / len(values) for values in groups.values()]
    return sum(means) / len(means), bootstrap_interval(means)


def dialogues_a_task(trajectories):
    """[fewest, most] dialogues that a task has (in a run)."""
    counts = [len(values) for own in by_run(trajectories) for values in task_values(own, lambda _: 0).values()]
    return [min(counts), max(counts)]


def bootstrap_interval(values, families=None, seed=0):
    """95 % percentile interval [low, high] of the mean of `values`, one a task, resampling tasks; of a row of these for
    each run, resampling runs as well, each independently of the other. With `families`, one a task, families are drawn
    first, and from each drawn one as many tasks as it has."""
    values = np.atleast_2d(np.asarray(values, dtype=np.float64))                           # (runs, tasks)
    rng = np.random.default_rng(seed)
    if families is None:
        tasks = rng.integers(values.shape[1], size=(NUM_RESAMPLES, values.shape[1]))
        by_run = np.stack([row[tasks].mean(1) for row in values], 1)                       # (resamples, runs)
    else:
        names, family = np.unique(families, return_inverse=True)
        drawn = rng.multinomial(len(names), np.full(len(names), 1 / len(names)), NUM_RESAMPLES)
        times = np.zeros((NUM_RESAMPLES, values.shape[1]))       # how often each task is drawn: (resamples, tasks)
        for number in range(len(names)):
            size = (family == number).sum()
            times[:, family == number] = rng.multinomial(drawn[:, number] * size, np.full(size, 1 / size))
        by_run = times @ values.T / times.sum(1, keepdims=True)                            # (resamples, runs)
    runs = rng.integers(values.shape[0], size=(NUM_RESAMPLES, values.shape[0]))
    weights = np.stack([np.bincount(draw, minlength=values.shape[0]) for draw in runs]) / values.shape[0]
    return [float(x) for x in np.percentile((weights * by_run).sum(1), [2.5, 97.5])]


def families_of(trajectories):
    """{task_id: its task's "family", None where it states none}."""
    return {t["task_id"]: t.get("task", {}).get("family") for t in trajectories}


def intervals(values, families):
    """{"ci95", "ci95_families" (two or more families, stated by every task), "runs": the mean of each run (of several)}
    of `values`, (runs, tasks)."""
    found = {"ci95": bootstrap_interval(values)}
    if None not in families and len(set(map(str, families))) > 1:
        found["ci95_families"] = bootstrap_interval(values, [*map(str, families)])
    return found | ({"runs": [float(np.mean(row)) for row in values]} if len(values) > 1 else {})


def paired(trajectories, baseline, value, compare):
    """(compare([ours], [theirs]) of the values that a task's dialogues have, for every task that both have, run by run:
    (runs, tasks); the tasks' ids); both None without common tasks or with another number of runs."""
    ours, theirs = ([task_values(own, value) for own in by_run(side)] for side in (trajectories, baseline))
    tasks = sorted(set.intersection(*map(set, ours + theirs)))
    if not tasks or len(ours) != len(theirs):
        return None, None
    return [[compare(a[task], b[task]) for task in tasks] for a, b in zip(ours, theirs)], tasks


def pairing_note(trajectories, baseline):
    """One line where `paired` leaves out tasks or can compare nothing; None where it compares everything."""
    num_runs = [len(by_run(side)) for side in (trajectories, baseline)]
    if num_runs[0] != num_runs[1]:
        return f"not compared: {num_runs[0]} and {num_runs[1]} runs, which cannot be paired; give both as many files"
    ours, theirs = ({t["task_id"] for t in side} for side in (trajectories, baseline))
    if ours == theirs:
        return None
    if not ours & theirs:
        return "not compared: no task that both have"
    return (f"compared on the {len(ours & theirs):,} tasks that both have (of {len(ours):,} and {len(theirs):,}); the "
            "rates above are those of all")


def paired_difference(trajectories, baseline, value):
    """{"difference", "n", what intervals() gives} of the tasks' means; None where paired gives None."""
    differences, tasks = paired(trajectories, baseline, value, lambda a, b: sum(a) / len(a) - sum(b) / len(b))
    families = families_of(trajectories)
    return differences and {"difference": float(np.mean(differences)), "n": len(tasks),
                            **intervals(differences, [families[task] for task in tasks])}


def win_rate(trajectories, baseline, value):
    """{"win_rate", "win_rate_ci95", "ties"} over all pairs of the two sides' answers to a task, a tie half a win, and
    over the tasks; empty where paired gives None."""
    gaps, _ = paired(trajectories, baseline, value, np.subtract.outer)                     # (ours, theirs) of each task
    if not gaps:
        return {}
    ties = [[(abs(gap) <= TIE).mean() for gap in own] for own in gaps]
    wins = [[(gap > TIE).mean() + 0.5 * tie for gap, tie in zip(*own)] for own in zip(gaps, ties)]
    return {"win_rate": float(np.mean(wins)), "win_rate_ci95": bootstrap_interval(wins), "ties": float(np.mean(ties))}


def rank_correlation(a, b):
    """Spearman's; 0 where one side is all equal."""
    from scipy.stats import spearmanr
    return 0.0 if len(set(a)) == 1 or len(set(b)) == 1 else float(spearmanr(a, b).statistic)


def average_ranks(values):
    """Ranks from 0, equal values sharing the mean of theirs: [3, 1, 3] -> [1.5, 0.0, 1.5]."""
    from scipy.stats import rankdata
    return (rankdata(values) - 1).tolist()
