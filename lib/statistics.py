"""Means, intervals by bootstrap, paired differences, win rates, rank correlation.

A trajectory has "task_id" and, of several runs of a method, "run" (its number). outcome(trajectory) is the number that
is compared."""
import numpy as np

NUM_RESAMPLES = 2000
TIE = 1e-6                       # returns that differ by no more are equal


# ---------------------------------------------------------------------------------------------------------------------
# means

def task_values(trajectories, outcome):
    """{task_id: [outcome of each of its dialogues]}."""
    by_task = {}
    for trajectory in trajectories:
        by_task.setdefault(trajectory["task_id"], []).append(float(outcome(trajectory)))
    return by_task


def by_run(trajectories):
    """The trajectories of each run (each file of a name that has several)."""
    runs = {}
    for trajectory in trajectories:
        runs.setdefault(trajectory.get("run", 0), []).append(trajectory)
    return [runs[number] for number in sorted(runs)]


def task_means(trajectories, outcome):
    """{task_id: mean outcome of its dialogues}, in the order of the ids."""
    by_task = task_values(trajectories, outcome)
    return {task: mean(by_task[task]) for task in sorted(by_task)}


def mean(values):
    return sum(values) / len(values)


def values_of_runs(trajectories, outcome):
    """(ids of the tasks, the mean outcome of each of them in each run: (runs, tasks))."""
    means = [task_means(run, outcome) for run in by_run(trajectories)]
    tasks = list(means[0])
    values = [list(run.values()) for run in means]
    return tasks, values


def mean_over_tasks(trajectories, outcome):
    """The mean over tasks of task_means, of several runs their mean: what intervals and differences are about.

    A task counts once, however many dialogues it has."""
    _, values = values_of_runs(trajectories, outcome)
    return float(np.mean([np.mean(run) for run in values]))


def mean_of_groups(groups):
    """(the mean over tasks, its bootstrap_interval) of `groups`, {task: its values}: each task counts once."""
    means = [mean(values) for values in groups.values()]
    return mean(means), bootstrap_interval(means)


def dialogues_a_task(trajectories):
    """[fewest, most] dialogues that a task has (in a run)."""
    counts = []
    for run in by_run(trajectories):
        counts += map(len, task_values(run, lambda trajectory: 0).values())
    return [min(counts), max(counts)]


# ---------------------------------------------------------------------------------------------------------------------
# intervals

def bootstrap_interval(values, families=None, seed=0):
    """95 % percentile interval [low, high] of the mean of `values`, one a task, or a row of these for each run.

    With `families`, one a task, families are drawn first, and from each drawn one as many tasks as it has."""
    low, high = np.percentile(resampled_means(values, families, seed), [2.5, 97.5])
    return [float(low), float(high)]


def chance_at_most(values, mark, seed=0):
    """The share of resamples whose mean is at most `mark`: a one-sided p-value of being above it. values: as above."""
    return float((resampled_means(values, None, seed) <= mark).mean())


def resampled_means(values, families, seed):
    """The means of NUM_RESAMPLES bootstrap samples of bootstrap_interval's values.

    Tasks are drawn with replacement, and runs as well, each independently of the other."""
    values = np.atleast_2d(np.asarray(values, dtype=np.float64))                           # (runs, tasks)
    num_runs, num_tasks = values.shape
    rng = np.random.default_rng(seed)
    if families is None:
        draws = rng.integers(num_tasks, size=(NUM_RESAMPLES, num_tasks))
        means = np.stack([run[draws].mean(1) for run in values], 1)                        # (resamples, runs)
    else:
        times = times_drawn(families, rng)                                                 # (resamples, tasks)
        means = times @ values.T / times.sum(1, keepdims=True)                             # (resamples, runs)
    run_draws = rng.integers(num_runs, size=(NUM_RESAMPLES, num_runs))
    run_times = np.stack([np.bincount(draw, minlength=num_runs) for draw in run_draws])    # (resamples, runs)
    return (run_times / num_runs * means).sum(1)                                           # (resamples,)


def times_drawn(families, rng):
    """How often each task is drawn in each resample, (resamples, tasks), where families are drawn first."""
    names, family_of_task = np.unique(families, return_inverse=True)
    num_families = len(names)
    family_times = rng.multinomial(num_families, equal_shares(num_families), NUM_RESAMPLES)
    times = np.zeros((NUM_RESAMPLES, len(families)))
    for family in range(num_families):
        members = family_of_task == family
        size = members.sum()
        times[:, members] = rng.multinomial(family_times[:, family] * size, equal_shares(size))
    return times


def equal_shares(number):
    return np.full(number, 1 / number)


def families_of(tasks, trajectories):
    """The "family" of each of these tasks (ids); None for one that states none."""
    families = {}
    for trajectory in trajectories:
        families[trajectory["task_id"]] = trajectory.get("task", {}).get("family")
    return [families[task] for task in tasks]


def intervals(values, families):
    """{"ci95", "ci95_families" where every task states a family, and not all the same; of several runs "runs": the mean
    of each} of `values`, (runs, tasks)."""
    result = {"ci95": bootstrap_interval(values)}
    names = list(map(str, families))
    if None not in families and len(set(names)) > 1:
        result["ci95_families"] = bootstrap_interval(values, names)
    if len(values) > 1:
        result["runs"] = [float(np.mean(run)) for run in values]
    return result


# ---------------------------------------------------------------------------------------------------------------------
# comparisons with a baseline, paired by run and task

def paired(trajectories, baseline, outcome, compare):
    """(ids of the tasks that both sides have, compare(our outcomes, theirs) of each in each run: (runs, tasks)).

    ([], []) without a common task or with another number of runs."""
    ours = [task_values(run, outcome) for run in by_run(trajectories)]
    theirs = [task_values(run, outcome) for run in by_run(baseline)]
    tasks = sorted(set.intersection(*map(set, ours + theirs)))
    if not tasks or len(ours) != len(theirs):
        return [], []
    values = []
    for our_run, their_run in zip(ours, theirs):
        values.append([compare(our_run[task], their_run[task]) for task in tasks])
    return tasks, values


def pairing_note(trajectories, baseline):
    """One line where `paired` leaves out tasks or can compare nothing; None where it compares everything."""
    our_runs, their_runs = len(by_run(trajectories)), len(by_run(baseline))
    if our_runs != their_runs:
        return f"not compared: {our_runs} and {their_runs} runs, which cannot be paired; give both as many files"
    our_tasks = {trajectory["task_id"] for trajectory in trajectories}
    their_tasks = {trajectory["task_id"] for trajectory in baseline}
    common_tasks = our_tasks & their_tasks
    if our_tasks == their_tasks:
        return None
    if not common_tasks:
        return "not compared: no task that both have"
    return (f"compared on the {len(common_tasks):,} tasks that both have (of {len(our_tasks):,} and "
            f"{len(their_tasks):,}); the rates above are those of all")


def difference_of_means(ours, theirs):
    return mean(ours) - mean(theirs)


def paired_difference(trajectories, baseline, outcome):
    """{"difference", "n", what intervals() gives} of the tasks' means; None where nothing can be paired."""
    tasks, differences = paired(trajectories, baseline, outcome, difference_of_means)
    if not tasks:
        return None
    return {
        "difference": float(np.mean(differences)),
        "n": len(tasks),
        **intervals(differences, families_of(tasks, trajectories)),
    }


def wins_and_ties(ours, theirs):
    """(share of wins, a tie half a win; share of ties) over all pairs of our outcomes and theirs."""
    gaps = np.subtract.outer(ours, theirs)
    ties = (abs(gaps) <= TIE).mean()
    return (gaps > TIE).mean() + 0.5 * ties, ties


def win_rate(trajectories, baseline, outcome):
    """{"win_rate", "win_rate_ci95", "ties"} over all pairs of the two sides' answers to a task, then over the tasks.

    Empty where nothing can be paired."""
    tasks, shares = paired(trajectories, baseline, outcome, wins_and_ties)
    if not tasks:
        return {}
    wins, ties = np.array(shares).transpose(2, 0, 1).copy()                                # (runs, tasks) each
    return {
        "win_rate": float(wins.mean()),
        "win_rate_ci95": bootstrap_interval(wins),
        "ties": float(ties.mean()),
    }


# ---------------------------------------------------------------------------------------------------------------------
# ranks

def rank_correlation(a, b):
    """Spearman's; 0 where one side is all equal."""
    from scipy.stats import spearmanr
    if len(set(a)) == 1 or len(set(b)) == 1:
        return 0.0
    return float(spearmanr(a, b).statistic)


def average_ranks(values):
    """Ranks from 0, equal values sharing the mean of theirs: [3, 1, 3] -> [1.5, 0.0, 1.5]."""
    from scipy.stats import rankdata
    return (rankdata(values) - 1).tolist()
