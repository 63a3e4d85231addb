"""Stage 5: score trajectory files and compare them in one table.

Reads   NAME=trajectories.jsonl … (02); the logged rewards are not trusted: every answer is scored again.
Writes  metrics.json, scored/NAME.jsonl (the trajectories with fresh rewards), report.html, curves.json (of curves),
        images/ (of pages).

success      share of the dialogues whose answer passes all tests of its task
tests        mean share of the tests passed
rounds       mean number of agent turns
leaks        share of the person's replies that show code in place of describing it (common.leak_of)
all known    template tasks: share of the dialogues in which the agent had found out every fact that matters before its
             last turn; "when known": success among these
[..]         "ci95": 95 % interval by bootstrap over tasks (all dialogues of a task are drawn together); a difference
             against --baseline is paired: the same drawn tasks on both sides
runs         NAME=FILE,FILE,… are several runs of one method (seeds) on the same tasks: the bootstrap draws runs as well
             as tasks, differences are paired by run and task, and a second table has each run ("runs"). With one run the
             interval leaves other seeds out. It is then too narrow to say that one method is better than another: it
             covered 47 to 82 % of the true differences in simulations.
families     "ci95_families": the bootstrap draws families, then tasks within each drawn family, and runs. It says how
             far a result holds for other families, and is wide rather than narrow (95 to 99 % in simulations). Only for
             tasks that state a "family": 01's template tasks; published, WebSight's and a model's tasks state none.
No interval covers another base model, or how the settings were chosen.

Frontend tasks (answers that are pages) are scored by --similarity of the screenshots of answer and reference, both of
which are rendered again here. The mean stands under "cosine_similarity" (clip, the paper's) or "pixel_similarity"
(pixels): two scales, never to be compared with each other. In place of success, tests and known facts:
no page      share of the dialogues whose answer is no page; it counts as a black one
not rendered number of answers that are pages, but gave no picture; they count as black ones
wins         against --baseline, over all pairs of answers to a task and then over the tasks: the share in which the
             similarity is higher, where equal ones (within 1e-6) count half, so that a method against itself has 50 %
             as in the paper; "ties" is the share of equal ones
--compat, --gates and --critics are for backend tasks: Monte-Carlo returns would need a rendered page for every sample.
--gates and --critics need template tasks ("facts").

--compat adds what the published scorer says of the same answers: no imports, helpers or recursion, words that cost all
tests, objects that claim to be equal. "ends_evaluation" counts the answers that would have ended or hung it.

Names of the form LABEL@N (judge@1=… judge@2=… judge@4=…) are the points of LABEL's best-of-N curve (02 --best-of N):
success (or similarity) against N, the paper's figure 3a, as a table and a drawing.

--costs adds what it took to make each method: the cost records (costs.json) of the agent, for best-of-N also of the
critic, and of all that they were made from, found through the inputs in args.json. Every output counts once a method;
the memory is the highest peak among them; of several runs the first is taken. The rollout that is evaluated here stands
apart. Candidates that 04 took from another run (--candidates) are named as not counted.

--gates MODEL also prints what a base model must pass before any claim is made with it: the log-probability of turns
without and with c in front (needed and useless questions of the logged dialogues; the right answer, and another task's
answer, as a first turn).

--critics NAME=DIR … compares critics (03) on the dialogues of the first file, of tasks that they were not trained on:
how often the better trajectory of a pair scores higher, and the rank correlation (Spearman, the mean over states) of a
turn's score with its Monte-Carlo return: --policy samples --mc-candidates turns in each of --mc-states states and goes
on --mc-samples times after each with the rule-based human; the return is the share of successes. Writes critics.json
and monte_carlo.jsonl.

    python 05_evaluate.py base=out/base.jsonl sweet=out/sweet.jsonl --baseline base --costs --out out/report
    python 05_evaluate.py base=out/base.jsonl sweet=out/sweet.jsonl --baseline base --similarity pixels --out out/report
    python 05_evaluate.py base=out/base.jsonl --critics lm=out/critic --policy tests/tiny --out out/critics
"""
import argparse
import asyncio
import base64
import collections
import contextlib
import functools
import html
import importlib
import io
import json
import math
import os
import pathlib
import random
import re

import numpy as np
import torch

import common

NUM_RESAMPLES = 2000
TIE = 1e-6                       # similarities that differ by no more are equal
RATES = {"": "success_rate", "clip": "cosine_similarity", "pixels": "pixel_similarity"}


# ---------------------------------------------------------------------------------------------------------------------
# statistics

def task_values(trajectories, value):
    """{task_id: [value(trajectory) of each of its dialogues]}."""
    by_task = {}
    for trajectory in trajectories:
        by_task.setdefault(trajectory["task_id"], []).append(float(value(trajectory)))
    return by_task


def task_means(trajectories, value):
    """{task_id: mean of value(trajectory) over its dialogues}."""
    return {task: sum(values) / len(values) for task, values in task_values(trajectories, value).items()}


def by_run(trajectories):
    """The trajectories of each run (each file of a name that has several)."""
    runs = {}
    for trajectory in trajectories:
        runs.setdefault(trajectory.get("run", 0), []).append(trajectory)
    return [own for _, own in sorted(runs.items())]


def run_means(trajectories, value):
    """task_means of each run, in the order of the task ids."""
    return [dict(sorted(task_means(own, value).items())) for own in by_run(trajectories)]


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


def success(trajectory):
    return trajectory["reward"] == 1


def similarity(trajectory):
    return trajectory["reward"]


def rate_of(scored):
    """Under which name the mean over the dialogues stands: of a scored trajectory, or of metrics."""
    return RATES[scored.get("similarity", "").partition(":")[0]]


def paired(trajectories, baseline, value, compare):
    """(compare([ours], [theirs]) of the values that a task's dialogues have, for every task that both have, run by run:
    (runs, tasks); the tasks' ids); both None without common tasks or with another number of runs."""
    ours, theirs = ([task_values(own, value) for own in by_run(side)] for side in (trajectories, baseline))
    tasks = sorted(set.intersection(*map(set, ours + theirs)))
    if not tasks or len(ours) != len(theirs):
        return None, None
    return [[compare(a[task], b[task]) for task in tasks] for a, b in zip(ours, theirs)], tasks


def paired_difference(trajectories, baseline, value=success):
    """{"difference", "n", what intervals() gives} of the tasks' means; None where paired gives None."""
    differences, tasks = paired(trajectories, baseline, value, lambda a, b: sum(a) / len(a) - sum(b) / len(b))
    families = families_of(trajectories)
    return differences and {"difference": float(np.mean(differences)), "n": len(tasks),
                            **intervals(differences, [families[task] for task in tasks])}


def win_rate(trajectories, baseline):
    """{"win_rate", "win_rate_ci95", "ties"} of similarity over all pairs of the two sides' answers to a task, a tie
    half a win, and over the tasks; empty where paired gives None."""
    gaps, _ = paired(trajectories, baseline, similarity, np.subtract.outer)                # (ours, theirs) of each task
    if not gaps:
        return {}
    ties = [[(abs(gap) <= TIE).mean() for gap in own] for own in gaps]
    wins = [[(gap > TIE).mean() + 0.5 * tie for gap, tie in zip(*own)] for own in zip(gaps, ties)]
    return {"win_rate": float(np.mean(wins)), "win_rate_ci95": bootstrap_interval(wins), "ties": float(np.mean(ties))}


# ---------------------------------------------------------------------------------------------------------------------
# scoring

def read_runs(paths):
    """The trajectories of the files of one name; of several with "run", the number of the file. InputError where these
    have not the same tasks."""
    runs = [common.read_trajectories(path) for path in paths]
    for number, (path, own) in enumerate(zip(paths, runs)):
        if {t["task_id"] for t in own} != {t["task_id"] for t in runs[0]}:
            raise common.InputError(f"{path}: other tasks than {paths[0]}; the runs of a name must have the same")
        if len(runs) > 1:
            for trajectory in own:
                trajectory["run"] = number
    return [trajectory for own in runs for trajectory in own]


def rescore(trajectories, scorer):
    """Fresh "tests", "faults" (why a test is not passed) and "reward" for every trajectory; returns metrics of the
    scoring: {"scorer", "not_gradeable_tests", "not_gradeable_tasks", "faults": {kind: number of tests}}."""
    ungradeable, faults = set(), {}
    for trajectory, score in zip(trajectories, scorer.score([(t["task"], t["answer"]) for t in trajectories])):
        trajectory |= {"tests": score.tests, "faults": score.faults, "reward": common.reward_of(score.tests)}
        ungradeable |= {(trajectory["task_id"], i) for i, ok in enumerate(score.gradeable) if not ok}
        for fault in filter(None, score.faults):
            kind = fault.partition(":")[0]
            faults[kind] = faults.get(kind, 0) + 1
    return {"scorer": scorer.layer, "not_gradeable_tests": len(ungradeable),
            "not_gradeable_tasks": len({task for task, _ in ungradeable}),
            "faults": dict(sorted(faults.items(), key=lambda item: -item[1]))}


def published_verdicts(trajectories, scorer):
    """Metrics of the published scorer's verdicts (--compat); "tests_compat" for every trajectory."""
    for trajectory, score in zip(trajectories, scorer.score([(t["task"], t["answer"]) for t in trajectories])):
        trajectory["tests_compat"] = score.tests
        trajectory["ends_evaluation"] = any(fault in ("process ended", "time limit") for fault in score.faults)
    rewards = [common.reward_of(t["tests_compat"]) for t in trajectories]
    return {"success_rate_compat": sum(reward == 1 for reward in rewards) / len(rewards),
            "tests_passed_compat": sum(rewards) / len(rewards),
            "ends_evaluation": sum(t["ends_evaluation"] for t in trajectories)}


def rescore_functions(files, args):
    """rescore() for all files, with what --compat adds; {name: metrics of the scoring}."""
    metrics = {}
    published_scorer = common.Scorer(args.unsafe_scorer, compat=True) if args.compat else contextlib.nullcontext()
    with common.Scorer(args.unsafe_scorer) as scorer, published_scorer as published:
        for name, trajectories in files.items():
            metrics[name] = scoring = rescore(trajectories, scorer)
            if scoring["not_gradeable_tests"]:
                print(f"{name}: {scoring['not_gradeable_tests']} tests of {scoring['not_gradeable_tasks']} tasks "
                      "cannot be graded (the reference raises, is random, or returns what cannot be compared); no "
                      "answer passes them")
            if args.compat:
                metrics[name] |= published_verdicts(trajectories, published)
    return metrics


def rescore_pages(files, scorer, browser, out):
    """Fresh "reward", "similarity", "image" and "reference_image" (relative to out/scored) for every trajectory of all
    files, each page rendered once; returns {name: metrics of the scoring}. Answers that are no page, or cannot be
    rendered, have the image None."""
    pages = {page for own in files.values() for t in own for page in (t["task"]["ground_truth"], t["answer"]) if page}
    pages = sorted(pages)
    renders = dict(zip(pages, common.render_pages(pages, out / "images", browser)))
    metrics = {}
    for name, trajectories in files.items():
        shots = [[renders[page].image if page else None for page in (t["task"]["ground_truth"], t["answer"])]
                 for t in trajectories]
        logged = {str(t["similarity"]) for t in trajectories if "similarity" in t} - {scorer.name}
        if logged:
            print(f"{name}: logged with {', '.join(sorted(logged))}, scored again with {scorer.name}")
        answers = [renders[t["answer"]] for t in trajectories if t["answer"]]
        faults = collections.Counter(answer.fault for answer in answers if answer.fault)        # or what was cut
        bad = {t["task_id"] for t, (reference, _) in zip(trajectories, shots) if not reference}
        if bad:
            print(f"{name}: the references of {len(bad)} tasks cannot be rendered; no answer is like them")
        for trajectory, shot, score in zip(trajectories, shots, scorer.score(shots)):
            reference, image = (path and os.path.relpath(path, out / "scored") for path in shot)
            trajectory |= {"reward": score, "similarity": scorer.name, "image": image, "reference_image": reference}
        metrics[name] = {"similarity": scorer.name, "failed_renders": sum(not answer.image for answer in answers),
                         "failed_references": len(bad), "faults": dict(faults.most_common())}
    return metrics


def measure(trajectories):
    """The metrics of one file (see above)."""
    pages = common.is_frontend(trajectories[0]["task"])
    value = similarity if pages else success
    by_task = run_means(trajectories, value)
    values = [[*means.values()] for means in by_task]                                      # (runs, tasks)
    families = families_of(trajectories)
    agent = [[turn for turn in t["dialogue_history"] if turn["role"] == "assistant"] for t in trajectories]
    metrics = {"n": len(trajectories), "tasks": len(values[0]),
               rate_of(trajectories[0]): sum(map(value, trajectories)) / len(trajectories),
               **intervals(values, [families[task] for task in by_task[0]]),
               "mean_rounds": sum(map(len, agent)) / len(agent)}
    if pages:
        metrics["no_page"] = sum(not t["answer"] for t in trajectories) / len(trajectories)
    else:
        rewards = [[*means.values()] for means in run_means(trajectories, lambda t: t["reward"])]
        forced = sum(common.MARKER not in turns[-1]["content"] for turns in agent)
        metrics |= {"tests_passed": sum(t["reward"] for t in trajectories) / len(trajectories),
                    "tests_passed_ci95": bootstrap_interval(rewards), "forced_answers": forced / len(agent)}
    replies = [(t["task"], turn["content"]) for t in trajectories for turn in t["dialogue_history"][1:]
               if turn["role"] != "assistant"]
    if replies:
        leaks = collections.Counter(filter(None, (common.leak_of(*reply) for reply in replies)))
        metrics |= {"leaks": leaks.total() / len(replies), "leaks_by_kind": dict(sorted(leaks.items()))}
    lengths = [len(turn["output_ids"]) for turns in agent for turn in turns if "output_ids" in turn]
    if lengths:
        metrics["turn_tokens"] = sum(lengths) / len(lengths)
    if all(t["task"].get("facts") for t in trajectories):
        kinds, known = {}, []
        for trajectory in trajectories:
            history = trajectory["dialogue_history"]
            for i, turn in enumerate(history):
                if turn["role"] == "assistant":
                    kind = common.action_kind(trajectory["task"], history[:i], turn["content"])
                    kinds[kind] = kinds.get(kind, 0) + 1
            known.append(common.all_known(trajectory["task"], history[:-1]))
        wins = [success(t) for t, k in zip(trajectories, known) if k]
        guesses = [success(t) for t, k in zip(trajectories, known) if not k]
        metrics |= {"all_known": sum(known) / len(known), "success_when_known": sum(wins) / max(1, len(wins)),
                    "success_when_not_known": sum(guesses) / max(1, len(guesses)),
                    "turns": {kind: count / sum(kinds.values()) for kind, count in sorted(kinds.items())}}
    return metrics


def page_table(metrics, baseline):
    """The comparison of answers that are pages as lines of text."""
    width, used = max(12, *map(len, metrics)), next(iter(metrics.values()))
    heading = rate_of(used).replace("_", " ")
    lines = [f"{'':{width}s} {'n':>5s}  {heading:>17s} {'95 %':>15s}  {'rounds':>6s}  {'leaks':>5s}  {'no page':>7s}  "
             f"{'not rendered':>12s}" + (f"  {'wins':>5s} {'95 %':>15s}  {'ties':>5s}  against {baseline}" if baseline
                                         else "")]
    for name, m in metrics.items():
        leaks = f"{m['leaks']:.3f}" if "leaks" in m else "-"
        line = (f"{name:{width}s} {m['n']:5d}  {m[rate_of(m)]:17.3f} [{m['ci95'][0]:.3f}, {m['ci95'][1]:.3f}]  "
                f"{m['mean_rounds']:6.2f}  {leaks:>5s}  {m['no_page']:7.3f}  {m['failed_renders']:12d}")
        if "win_rate" in m:
            low, high = m["win_rate_ci95"]
            line += f"  {m['win_rate']:5.3f} [{low:.3f}, {high:.3f}]  {m['ties']:5.3f}"
        if "against_baseline" in m:
            d = m["against_baseline"]
            line += f"  {d['difference']:+.3f} [{d['ci95'][0]:+.3f}, {d['ci95'][1]:+.3f}]"
        lines.append(line)
    return lines + [f"similarity of screenshots: {used['similarity']}"]


def table(metrics, baseline):
    """The comparison as lines of text."""
    compat = any("success_rate_compat" in m for m in metrics.values())
    width = max(12, *map(len, metrics))
    lines = [f"{'':{width}s} {'n':>5s}  {'success':>7s} {'95 %':>15s}  {'tests':>5s}  {'rounds':>6s}  {'leaks':>5s}  "
             f"{'all known':>9s}  {'when known':>10s}" + ("  published scorer: success, tests" if compat else "") +
             (f"  against {baseline}" if baseline else "")]
    for name, m in metrics.items():
        leaks, *known = (f"{m[key]:.3f}" if key in m else "-" for key in ("leaks", "all_known", "success_when_known"))
        line = (f"{name:{width}s} {m['n']:5d}  {m['success_rate']:7.3f} [{m['ci95'][0]:.3f}, {m['ci95'][1]:.3f}]  "
                f"{m['tests_passed']:5.3f}  {m['mean_rounds']:6.2f}  {leaks:>5s}  {known[0]:>9s}  {known[1]:>10s}")
        if compat:
            line += f"  {m['success_rate_compat']:25.3f}, {m['tests_passed_compat']:.3f}"
        if "against_baseline" in m:
            d = m["against_baseline"]
            line += f"  {d['difference']:+.3f} [{d['ci95'][0]:+.3f}, {d['ci95'][1]:+.3f}]"
        lines.append(line)
    return lines


def limits_table(metrics, baseline):
    """What the intervals leave out, and those for which families are drawn as well, as lines of text."""
    single = [name for name, m in metrics.items() if "runs" not in m]
    which = "one run each" if len(single) == len(metrics) else f"one run of {', '.join(single)}"
    lines = [f"{which}: the intervals leave other seeds out"] if single else []
    if not any("ci95_families" in m for m in metrics.values()):
        return [*lines, 'no intervals over families: a task states no "family", or all state the same']
    width = max(20, *map(len, metrics))
    lines += ["", f"{'95 %, families drawn':{width}s}  {'own rate':>16s}" + f"  against {baseline}" * bool(baseline)]
    for name, m in metrics.items():
        found = [own["ci95_families"] for own in (m, m.get("against_baseline", {})) if "ci95_families" in own]
        lines.append(f"{name:{width}s}" + "".join(f"  [{low:+.3f}, {high:+.3f}]" for low, high in found))
    return lines


def run_table(metrics, baseline):
    """The runs of every name as lines of text: success (or similarity) and difference, their mean, and each run's."""
    width, against = max(12, *map(len, metrics)), f"against {baseline}"
    lines = [f"{'over the runs':{width}s}  {'':{len(against)}s}  {'mean':>6s}  each run"]
    what = "similarity" if any("similarity" in m for m in metrics.values()) else "success"
    for what in (what, against):
        for name, m in metrics.items():
            own = m.get("against_baseline", {}) if what == against else m
            if "runs" in own:
                lines.append(f"{name:{width}s}  {what:{len(against)}s}  {sum(own['runs']) / len(own['runs']):+6.3f}  " +
                             " ".join(f"{mean:+.3f}" for mean in own["runs"]))
    return lines


# ---------------------------------------------------------------------------------------------------------------------
# best-of-N curves: {label: {"N": {"success_rate" (or a similarity), "ci95"}}}

def curve_place(name, path, trajectories):
    """("sweet", "8") of a file named sweet@8, None of a name without @; InputError where N is no positive number or not
    the one that the rows were made with ("best_of")."""
    if "@" not in name:
        return None
    label, _, number = name.rpartition("@")
    if not label or not re.fullmatch("[1-9][0-9]*", number):
        raise common.InputError(f"{path}: named {name}, but a name with @ must be LABEL@N, N a whole number from 1 up")
    for trajectory in trajectories:
        if trajectory.get("best_of", int(number)) != int(number):
            raise common.InputError(f'{path}: named {name}, N = {number}, but its "best_of" is {trajectory["best_of"]}')
    return label, number


def curve_table(curves, rate="success_rate"):
    """The success rates as lines of text: a row a label, a column an N."""
    width, sizes = max(12, *map(len, curves)), sorted({n for points in curves.values() for n in points}, key=int)
    rows = [("best of N", sizes)]
    for label, points in curves.items():
        rows.append((label, [f"{points[n][rate]:.3f}" if n in points else "-" for n in sizes]))
    return [f"{label:{width}s}" + "".join(f"  {cell:>5s}" for cell in cells) for label, cells in rows]


COLOURS = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9", "#555555"
LEFT, RIGHT, TOP, BOTTOM, MARGIN = 48, 548, 36, 280, 40              # the plot in pixels; its points keep a margin


def svg_text(x, y, anchor, content):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(str(content))}</text>'


def curve_svg(curves, rate="success_rate"):
    """The curves as an SVG element: N on a log2 axis, the success rate (or `rate`) upwards, a 95 % error bar at every
    point. Points of one N stand side by side; labels stand to the right, in the order of the lines' ends."""
    sizes = sorted({int(n) for points in curves.values() for n in points})
    bounds = [bound for points in curves.values() for p in points.values() for bound in (p[rate], *p["ci95"])]
    low, high = math.floor(10 * min(bounds) + 1e-9), math.ceil(10 * max(bounds) - 1e-9)             # in tenths
    step = 1 if high - low <= 5 else 2
    low, high = low // step * step, -(-high // step) * step
    if low == high:
        low, high = max(0, low - 1), min(10, high + 1)

    def x_of(n):
        place = math.log2(n / sizes[0]) / math.log2(sizes[-1] / sizes[0]) if len(sizes) > 1 else 0.5
        return round(LEFT + MARGIN + place * (RIGHT - LEFT - 2 * MARGIN), 1)

    def y_of(height):
        return round(BOTTOM - (BOTTOM - TOP) * (10 * height - low) / (high - low), 1)

    heading = rate.replace("_", " ")
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{RIGHT + 50 + 8 * max(map(len, curves))}" height="330" '
             'role="img" font-family="system-ui, sans-serif" font-size="13" fill="#222">',
             f"<title>{heading.capitalize()} against N, the candidates a turn: "
             f"{html.escape(', '.join(curves))}</title>",
             svg_text((LEFT + RIGHT) / 2, BOTTOM + 42, "middle", "N, candidates a turn (log2)"),
             svg_text(12, TOP - 20, "start", heading)]
    for tenths in range(low, high + 1, step):
        y = y_of(tenths / 10)
        parts += [f'<path d="M{LEFT} {y}H{RIGHT}" stroke="{"#222" if tenths == low else "#ddd"}"/>',
                  svg_text(LEFT - 8, y + 4, "end", tenths / 10)]
    for n in sizes:
        parts += [f'<path d="M{x_of(n)} {BOTTOM}v5" stroke="#222"/>', svg_text(x_of(n), BOTTOM + 20, "middle", n)]
    ends = {label: y_of(points[max(points, key=int)][rate]) for label, points in curves.items()}
    below = TOP - 18                                                 # where the label above stands
    for rank, label in enumerate(sorted(curves, key=ends.get)):
        number, points = list(curves).index(label), curves[label]
        colour, shift = COLOURS[number % len(COLOURS)], (number - (len(curves) - 1) / 2) * min(10, 60 / len(curves))
        places = {n: (x_of(int(n)) + shift, y_of(points[n][rate])) for n in sorted(points, key=int)}
        line = " ".join(f"{x:.1f},{y}" for x, y in places.values())
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for n, (x, y) in places.items():
            least, most = points[n]["ci95"]
            what = html.escape(f"{label}, N = {n}: {points[n][rate]:.3f} [{least:.3f}, {most:.3f}]")
            bar = f"M{x - 3:.1f} {y_of(most)}h6m-3 0V{y_of(least)}m-3 0h6"
            parts += [f'<path d="{bar}" fill="none" stroke="{colour}"/>',
                      f'<circle cx="{x:.1f}" cy="{y}" r="4" fill="{colour}"><title>{what}</title></circle>']
        below = min(max(ends[label], below + 18), BOTTOM - 18 * (len(curves) - 1 - rank))
        parts += [f'<path d="M{RIGHT + 8} {below:.1f}h16" stroke="{colour}" stroke-width="3"/>',
                  svg_text(RIGHT + 30, below + 4, "start", label)]
    return "\n".join([*parts, "</svg>"])


# ---------------------------------------------------------------------------------------------------------------------
# costs: what it took to make each method

COST_KEYS = "wall_s", "trained_tokens", "generated_tokens", "flops", "peak_memory_mb"
SERVER_KEYS = "server_prompt_tokens", "server_completion_tokens"          # not in every record, nor in every table
PROGRAMS = "rules", "script", *common.ORACLES           # simulator, agent and critic that are no models


def record_path(path, kind):
    """Where a stage keeps its record ("args" or "costs") of an output: DIR/kind.json or FILE.kind.json."""
    path = pathlib.Path(path)
    return path / f"{kind}.json" if path.is_dir() else pathlib.Path(f"{path}.{kind}.json")


def read_record(path, kind):
    """That record, a dict; empty where there is none."""
    path = record_path(path, kind)
    if not path.is_file():
        return {}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise common.InputError(f"{path}: not JSON") from None
    common.check_keys(record, {}, path)
    for key in COST_KEYS if kind == "costs" else ():
        if not isinstance(record.get(key), (int, float)):
            raise common.InputError(f'{path}: "{key}" is missing or not a number')
    return record


def method_costs(*roots):
    """({path: cost record}, [names without one]) of `roots` (an agent; with best-of-N also the critic) and of all that
    they were made from; an output to which several ways lead is there once."""
    counted, not_counted, seen, waiting = {}, [], set(), list(roots)
    while waiting:
        name = waiting.pop(0)
        path = os.path.relpath(name)            # one name for out/critic, ./out/critic/ and /home/me/out/critic
        if path in seen or name in PROGRAMS:
            continue
        seen.add(path)
        costs = read_record(name, "costs")
        if costs:
            counted[path] = costs
        else:
            not_counted.append(path if os.path.exists(name) else name)
        waiting += read_record(name, "args").get("inputs", {})
    return counted, not_counted


def total_costs(records):
    """The sums of cost records; of the peaks the highest."""
    records = list(records)
    totals = {key: sum(record[key] for record in records) for key in COST_KEYS}
    totals |= {key: sum(r.get(key, 0) for r in records) for key in SERVER_KEYS if any(r.get(key) for r in records)}
    return totals | {"peak_memory_mb": max((record["peak_memory_mb"] for record in records), default=0)}


def compare_costs(paths):
    """{name: totals, "outputs" counted, "not_counted", "shared" (what is part of every method that costs anything) and
    "evaluation" (the rollout itself)} of {name: trajectory file}."""
    found, evaluations = {}, {}
    for name, path in paths.items():
        args, evaluations[name] = read_record(path, "args").get("args", {}), read_record(path, "costs")
        for kind, there in (("args", "agent" in args), ("costs", evaluations[name])):
            if not there:
                raise common.InputError(f"{record_path(path, kind)}: not there or not of a rollout; --costs needs the "
                                        "records that 02_rollout.py keeps beside its output")
        roots = [args["agent"], (args.get("critic") or "").removeprefix("judge:")]
        found[name] = method_costs(*filter(None, roots))
    paid = [set(counted) for counted, _ in found.values() if counted]
    common_part = set.intersection(*paid) if len(paid) > 1 else set()
    costs = {}
    for name, (counted, not_counted) in found.items():
        shared = sorted(common_part & set(counted))
        costs[name] = total_costs(counted.values()) | {
            "outputs": sorted(counted), "not_counted": not_counted, "evaluation": total_costs([evaluations[name]]),
            "shared": total_costs([counted[path] for path in shared]) | {"outputs": shared}}
    return costs


def cost_table(costs):
    """The costs as lines of text: methods, the part they share, the evaluation rollouts."""
    part = next((c["shared"] for c in costs.values() if c["shared"]["outputs"]), None)
    rows = [*costs.items(), *([("shared, included above", part)] if part else []), ("evaluation, not above:", None),
            *((name, c["evaluation"]) for name, c in costs.items())]
    width = max(len(name) for name, _ in rows)
    served = any(key in c for _, c in rows if c for key in SERVER_KEYS)
    lines = [f"{'costs':{width}s}  {'wall min':>9s}  {'M trained':>9s}  {'M generated':>11s}  {'PFLOPs':>9s}  "
             f"{'peak MB':>8s}" + ("  M read, written by servers" if served else "")]
    for name, c in rows:
        lines.append(f"{name:{width}s}  {c['wall_s'] / 60:9,.1f}  {c['trained_tokens'] / 1e6:9,.3f}  "
                     f"{c['generated_tokens'] / 1e6:11,.3f}  {c['flops'] / 1e15:9,.3f}  {c['peak_memory_mb']:8,.0f}" +
                     "".join(f"  {c.get(key, 0) / 1e6:11,.3f}" for key in SERVER_KEYS if served) if c else name)
    if part:
        lines.append(f"shared, included in every method that costs anything: {', '.join(part['outputs'])}")
    not_counted = sorted({name for c in costs.values() for name in c["not_counted"]})
    return lines + ([f"not counted: {', '.join(not_counted)}"] if not_counted else [])


# ---------------------------------------------------------------------------------------------------------------------
# gates: does a model read c?

def print_gates(trajectories, name, device):
    """Mean summed log-probability of turns under a model, without c and with c in front."""
    model, tokenizer = common.load_model(name, device)
    turns = []                                                       # (what it is, history, turn, trajectory)
    first_of_family = {}
    for trajectory in trajectories[:200]:
        task, history = trajectory["task"], trajectory["dialogue_history"]
        for i, turn in enumerate(history):
            kind = common.action_kind(task, history[:i], turn["content"]) if turn["role"] == "assistant" else "user"
            if kind in ("needed", "idle", "repeat", "vague"):
                turns.append((kind, history[:i], turn["content"], trajectory))
        other = first_of_family.setdefault(task.get("family"), task)
        for what, answer in (("right answer at once", task), ("wrong answer at once", other)):
            if what.startswith("right") or answer["ground_truth"] != task["ground_truth"]:
                turns.append((what, history[:1], f"{common.MARKER}\n{answer['ground_truth']}", trajectory))
    columns = []
    for with_c in (False, True):
        items = [common.trajectory_rows(tokenizer, [(
            common.prompt_text(tokenizer, history, trajectory.get("max_rounds", 10)),
            common.encode(tokenizer, text) + [tokenizer.eos_token_id])],
            trajectory["task"]["ground_truth"] if with_c else None) for _, history, text, trajectory in turns]
        columns.append([logps.sum().item() for logps in common.values_of(model, items, 16384, device)])
    print(f"\n{name}: log-probability of a turn\n{'':22s} {'n':>5s}  {'without c':>9s}  {'with c':>9s}")
    for kind in sorted({turn[0] for turn in turns}):
        chosen = [i for i, turn in enumerate(turns) if turn[0] == kind]
        means = [sum(column[i] for i in chosen) / len(chosen) for column in columns]
        print(f"{kind:22s} {len(chosen):5d}  {means[0]:9.2f}  {means[1]:9.2f}")


# ---------------------------------------------------------------------------------------------------------------------
# critics: held-out pair accuracy, and rank correlation with Monte-Carlo returns

def rank_correlation(a, b):
    """Spearman's; None where one side is all equal."""
    a, b = (np.array(common.average_ranks(values)) - (len(values) - 1) / 2 for values in (a, b))
    scale = np.sqrt((a * a).sum() * (b * b).sum())
    return float((a * b).sum() / scale) if scale else None


def monte_carlo_returns(trajectories, policy, scorer, args, device):
    """States of the trajectories with candidates of the policy, and for each candidate the share of --mc-samples
    continuations (by the policy, with the rule-based human) that succeed: rows like 04's, with "returns"."""
    rollout, policy_stage = (importlib.import_module(name) for name in ("02_rollout", "04_train_policy"))
    options = argparse.Namespace(seed=0, num_candidates=args.mc_candidates, max_new_tokens=args.mc_max_new_tokens,
                                 temperature=1.0, concurrency=128, max_tokens=16384, agent=args.policy,
                                 agent_tokenizer=None, stop=[], server_logprobs=False, best_of=1)
    states = policy_stage.sample_states(trajectories, 1.0, 0)
    states = random.Random(0).sample(states, min(args.mc_states, len(states)))
    rows = policy_stage.sample_candidates(states, *policy, options)
    plays = []                                                       # (dialogue, its options)
    for (trajectory, _, i), row in zip(states, rows):
        own = argparse.Namespace(**vars(options), max_rounds=trajectory.get("max_rounds", 10))
        for number, candidate in enumerate(row["candidates"]):
            turn = {"role": "assistant", "content": candidate["text"].strip()}
            history = [*trajectory["dialogue_history"][:i], turn]
            plays += [(rollout.new_dialogue(row["task"], f"{row['sample']} {number} {n}", len(plays) + n,
                                            list(history)), own) for n in range(args.mc_samples)]
    engine = common.Engine(policy[0], common.stop_ids(*policy), options.concurrency, options.max_tokens)
    agent = rollout.Speaker(*policy, engine)
    asyncio.run(rollout.each(lambda play: rollout.play(play[0], agent=agent, person=None, chooser=None, args=play[1]),
                             plays, options.concurrency))
    wins = np.array([common.reward_of(score.tests) == 1 for score in scorer.score(
        [(d["task"], d["answer"]) for d, _ in plays])]).reshape(len(rows), -1, args.mc_samples)
    return [{**row, "returns": share.mean(-1).tolist()} for row, share in zip(rows, wins)]


def measure_critic(critic, trajectories, rows, tokenizer, device):
    """{"pair_accuracy", "num_pairs", "rank_correlation", "ci95", "num_states"} of a critic (common.load_critic)."""
    critic_stage = importlib.import_module("03_train_critic")
    options = argparse.Namespace(max_tokens=16384, normalize=critic["normalize"], head=critic["head"])
    pairs = common.trajectory_pairs(trajectories, "the first file")
    examples = critic_stage.trajectory_examples(trajectories, pairs, tokenizer, critic["privileged"])
    values = common.values_of(critic["reference"] or critic["model"], [item for pair in examples for item in pair],
                              options.max_tokens, device)
    if critic["reference"] is None:
        values = [torch.zeros_like(value) for value in values]
    ref = list(zip(values[0::2], values[1::2]))
    accuracy = critic_stage.pair_accuracy(critic["model"], examples, ref, options, device)
    states = [common.State(row["prompt"], row["task"], row["history"], *([c[key] for c in row["candidates"]]
                                                                         for key in ("ids", "text"))) for row in rows]
    scores = common.score_actions(critic, tokenizer, states, options.max_tokens, device)
    by_task = {}
    for row, own in zip(rows, scores):
        if len(set(row["returns"])) > 1:
            by_task.setdefault(row["task_id"], []).append(rank_correlation(own, row["returns"]) or 0.0)
    if not by_task:
        raise common.InputError("--critics: no state whose candidates differ in return; raise --mc-states")
    return {"pair_accuracy": accuracy, "num_pairs": len(pairs),
            "rank_correlation": float(np.mean([value for values in by_task.values() for value in values])),
            "ci95": bootstrap_interval([float(np.mean(values)) for values in by_task.values()]),
            "num_states": sum(map(len, by_task.values()))}


def compare_critics(trajectories, args, out):
    """The table of --critics, also kept in critics.json; the returns are kept in monte_carlo.jsonl."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy = common.load_model(args.policy, device)
    policy[0].eval()
    critics = {name: common.read_critic(path, policy[1], False)      # errors now, not after the hour of Monte Carlo
               for name, path in (argument.split("=", 1) for argument in args.critics)}
    common.trajectory_pairs(trajectories, "the first file")
    with common.Scorer(args.unsafe_scorer) as scorer:
        rows = monte_carlo_returns(trajectories, policy, scorer, args, device)
    common.write_jsonl(out / "monte_carlo.jsonl", rows)
    found = {name: measure_critic(common.load_critic(critic, common.load_whole(device)), trajectories, rows, policy[1],
                                  device) for name, critic in critics.items()}
    common.write_json(out / "critics.json", found)
    print(f"\n{'critic':20s} {'pair accuracy':>13s} {'pairs':>5s}  {'rank correlation':>16s} {'95 %':>17s} "
          f"{'states':>6s}")
    for name, m in found.items():
        print(f"{name:20s} {m['pair_accuracy']:13.3f} {m['num_pairs']:5d}  {m['rank_correlation']:16.3f} "
              f"[{m['ci95'][0]:+.3f}, {m['ci95'][1]:+.3f}] {m['num_states']:6d}")
    print("one training run of each critic: the intervals leave other seeds out")


# ---------------------------------------------------------------------------------------------------------------------
# report

STYLE = ("body{font:15px/1.45 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#222}"
         "pre{background:#f5f5f2;padding:.7rem;overflow-x:auto}.user{color:#555}.assistant{color:#0a4a7a}"
         "details{margin:.6rem 0}p{margin:.2rem 0;white-space:pre-wrap}")
PAGE_STYLE = ("body{max-width:85rem}details pre,p{white-space:pre-wrap;overflow-wrap:anywhere}"
              "details details{margin-left:1rem}.pages{display:flex;gap:1rem;overflow-x:auto;align-items:flex-start}"
              "figure{margin:0;flex:0 1 320px;min-width:150px}figure img{display:block;width:100%;"
              "outline:1px solid #bbb}.none{padding:4rem 0;text-align:center;background:#eee}")


def dialogue(trajectory, summary):
    """A dialogue and its reference, folded."""
    parts = [f"<details><summary>{html.escape(summary)}</summary>"]
    for turn in trajectory["dialogue_history"]:
        role = "assistant" if turn["role"] == "assistant" else "user"
        parts.append(f"<p class={role}><b>{role}:</b> {html.escape(turn['content'])}</p>")
    return [*parts, f"<p>reference</p><pre>{html.escape(trajectory['task']['ground_truth'])}</pre></details>"]


def figure(caption, path, fault="not rendered"):
    """A screenshot, scaled down to at most 320 x 640 and embedded (without one the fault), and its caption below."""
    from PIL import Image
    picture = f"<div class=none>{fault}</div>"
    if path:
        small = Image.open(path).convert("RGB")
        small.thumbnail((320, 640))
        small.save(data := io.BytesIO(), "JPEG", quality=85)
        picture = f'<img alt="" src="data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode()}">'
    return f"<figure>{picture}<figcaption>{html.escape(caption)}</figcaption></figure>"


def page_tasks(files, folder, num_tasks=12):
    """For the first tasks: the idea, the screenshots of the reference and of each name's first answer in one row, the
    dialogues. `folder`: where the paths of the screenshots start from."""
    first = {name: {t["task_id"]: t for t in reversed(own)} for name, own in files.items()}
    parts = ["<h2>Pages</h2><p>The reference, and each method's first answer with its similarity.</p>"]
    for task in list(dict.fromkeys(t["task_id"] for own in files.values() for t in own))[:num_tasks]:
        rows = {name: own[task] for name, own in first.items() if task in own}
        shown = next(iter(rows.values()))
        parts += [f"<h3>{html.escape(shown['task']['problem_description'])}</h3><div class=pages>",
                  figure("reference", shown["reference_image"] and folder / shown["reference_image"])]
        for name, row in rows.items():
            parts.append(figure(f"{name}: {row['reward']:.3f}", row["image"] and folder / row["image"],
                                "not rendered" if row["answer"] else "no page"))
        parts.append(f"</div><details><summary>dialogues ({html.escape(task)})</summary>")
        for name, row in rows.items():
            parts += dialogue(row, name)
        parts.append("</details>")
    return parts


def report(metrics, lines, files, curves, out, pages):
    """One HTML page: the tables, the curves, and for every file the dialogues of the first tasks."""
    style = STYLE + PAGE_STYLE if pages else STYLE
    parts = [f"<!doctype html><meta charset=utf-8><title>Evaluation</title><style>{style}</style><h1>Evaluation</h1>",
             f"<pre>{html.escape(chr(10).join(lines))}</pre>"]
    if curves:
        parts += ["<h2>Best of N</h2>", curve_svg(curves, rate_of(next(iter(metrics.values()))))]
    if pages:
        return "\n".join(parts + page_tasks(files, out / "scored")) + "\n"
    for name, trajectories in files.items():
        if "turns" in metrics[name]:
            shares = ", ".join(f"{kind} {share:.1%}" for kind, share in metrics[name]["turns"].items())
            tokens = f"; {metrics[name]['turn_tokens']:.1f} tokens each" if "turn_tokens" in metrics[name] else ""
            parts.append(f"<h2>{html.escape(name)}</h2><p>Agent turns: {html.escape(shares + tokens)}</p>")
        for trajectory in trajectories[:10]:
            parts += dialogue(trajectory, f"{trajectory['task_id']}: reward {trajectory['reward']:.1f}")
    return "\n".join(parts) + "\n"


# ---------------------------------------------------------------------------------------------------------------------

def parse_args(argv=None):
    parser = common.argument_parser(__doc__)
    parser.add_argument("files", nargs="+", metavar="NAME=FILE",
                        help="trajectory files (02), each with a name; FILE,FILE,…: runs of one method; LABEL@N: a "
                        "point of a best-of-N curve")
    parser.add_argument("--baseline", metavar="NAME", help="compare the others with this one")
    parser.add_argument("--compat", action="store_true", help="show the published scorer's verdicts as well")
    parser.add_argument("--costs", action="store_true", help="show what it took to make each method")
    common.add_scorer(parser)
    common.add_similarity(parser)
    common.add_browser(parser)
    parser.add_argument("--gates", metavar="MODEL", help="print a base model's gates, on dialogues of the first file")
    parser.add_argument("--critics", nargs="+", metavar="NAME=DIR",
                        help="compare these critics, on dialogues of the first file")
    parser.add_argument("--policy", metavar="MODEL",
                        help="--critics: the model that samples turns and goes on after them")
    parser.add_argument("--mc-states", type=common.positive_int, default=60, help="--critics: turns of the first file")
    parser.add_argument("--mc-candidates", type=common.positive_int, default=8,
                        help="--critics: turns sampled in each state")
    parser.add_argument("--mc-samples", type=common.positive_int, default=8,
                        help="--critics: dialogues after each of them")
    parser.add_argument("--mc-max-new-tokens", type=common.positive_int, default=160,
                        help="--critics: tokens of a turn")
    parser.add_argument("--out", required=True, help="folder to write")
    common.add_overwrite(parser)
    args = parser.parse_args(argv)
    if bool(args.critics) != bool(args.policy):
        parser.error("--critics and --policy go together")
    for argument in args.files + (args.critics or []):
        if not all(argument.partition("=")):
            parser.error(f"{argument}: must be NAME=PATH")
        if "/" in argument.partition("=")[0]:
            parser.error(f"{argument}: a name cannot contain /")
    names = [argument.partition("=")[0] for argument in args.files]
    if len(set(names)) < len(names):
        parser.error("every file needs a name of its own")
    if args.baseline and args.baseline not in names:
        parser.error(f"--baseline {args.baseline}: none of {', '.join(names)}")
    return args


def all_pages(files, args):
    """Whether the tasks are frontend tasks; InputError where only some are, or where an option makes no sense there."""
    kinds = {common.is_frontend(t["task"]): name for name, own in files.items() for t in own}
    if len(kinds) > 1:
        raise common.InputError(f"frontend tasks in {kinds[True]}, backend tasks in {kinds[False]}; evaluate each "
                                "domain in a call of its own")
    for option in ("compat", "gates", "critics"):
        if True in kinds and getattr(args, option):
            raise common.InputError(f"--{option} is for backend tasks, and these are frontend tasks; leave it out")
    return True in kinds


def check_facts(trajectories, path, args):
    """InputError where --gates or --critics cannot work on the tasks of the first name, whose files `path` says."""
    option = next((name for name in ("gates", "critics") if getattr(args, name)), None)
    lacking = next((t for t in trajectories if not t["task"].get("facts")), None)
    if option and lacking:
        raise common.InputError(f'{path}: task {lacking["task_id"]} has no "facts", which '
                                f"--{option} needs (01's template tasks have them); leave --{option} out")


def main(argv=None):
    args = parse_args(argv)
    runs = {name: path.split(",") for name, path in (argument.split("=", 1) for argument in args.files)}
    paths = [path for own in runs.values() for path in own]
    files = {name: read_runs(own) for name, own in runs.items()}
    places = {name: curve_place(name, runs[name][0], files[name]) for name in files}
    pages = all_pages(files, args)
    first = next(iter(files.values()))
    check_facts(first, args.files[0].partition("=")[2], args)
    costs = compare_costs({name: own[0] for name, own in runs.items()}) if args.costs else {}
    out = pathlib.Path(args.out)
    critics = [argument.partition("=")[2] for argument in args.critics or []]
    inputs = [*paths, args.gates, args.policy, *critics, args.clip_model if pages else None]
    if common.claim_output(args, out, inputs, folder=True, begin=False):
        return
    if pages:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        page_scorer = common.PageScorer(args.similarity, args.clip_model, device)
    common.claim_output(args, out, inputs, folder=True)
    if args.critics:
        common.start(0)
    spent = common.Costs(out, folder=True)
    (out / "scored").mkdir(exist_ok=True)
    metrics, curves = {}, {}
    scoring = rescore_pages(files, page_scorer, args.browser, out) if pages else rescore_functions(files, args)
    for name, trajectories in files.items():
        metrics[name] = measure(trajectories) | scoring[name]
        common.write_jsonl(out / "scored" / f"{name}.jsonl", trajectories)
    for name in files:
        if places[name]:
            label, number = places[name]
            curves.setdefault(label, {})[number] = {key: metrics[name][key] for key in (rate_of(metrics[name]), "ci95")}
        if costs:
            metrics[name]["costs"] = costs[name]
        if args.baseline and pages:
            metrics[name] |= win_rate(files[name], files[args.baseline])
        if args.baseline and name != args.baseline:
            difference = paired_difference(files[name], files[args.baseline], similarity if pages else success)
            if difference:
                metrics[name]["against_baseline"] = {"name": args.baseline, **difference}
    common.write_json(out / "metrics.json", metrics)                 # before everything that is optional
    lines = (page_table if pages else table)(metrics, args.baseline) + limits_table(metrics, args.baseline)
    if any(len(own) > 1 for own in runs.values()):
        lines += ["", *run_table(metrics, args.baseline)]
    if curves:
        lines += ["", *curve_table(curves, rate_of(next(iter(metrics.values()))))]
        common.write_json(out / "curves.json", curves)
    if costs:
        lines += ["", *cost_table(costs)]
    print("\n" + "\n".join(lines) + "\n")
    (out / "report.html").write_text(report(metrics, lines, files, curves, out, pages), encoding="utf-8",
                                     errors="backslashreplace")
    if args.gates:
        print_gates(first, args.gates, "cpu")
    if args.critics:
        compare_critics(first, args, out)
    spent.record()
    (out / "COMPLETED").touch()
    print(f"writes {out / 'metrics.json'}, {out / 'report.html'}")


if __name__ == "__main__":
    common.run_stage(main)
