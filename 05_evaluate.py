"""Stage 5: score trajectory files and compare them in one table.

Reads   NAME=trajectories.jsonl … (02); the logged rewards are not trusted: every answer is scored again.
Writes  metrics.json, scored/NAME.jsonl (the trajectories with fresh rewards), report.html, curves.json (of curves),
        images/ (of pages).

n            dialogues
success      share of the dialogues whose answer passes all tests; of pages the mean similarity of the screenshots of
             answer and reference, as "cosine similarity" (clip, the paper's) or "pixel similarity": two scales
rounds       mean number of agent turns
leaks        share of the human's replies that show the reference
tests        mean share of the tests passed
all known    template tasks: share of the dialogues in which the agent had found out every fact that matters before its
             last turn; "when known": success among these
no page, not rendered                    answers that are no page; pages that gave no screenshot (a black one counts)
wins         graded returns: over all pairs of answers to a task, and then over the tasks, the share in which ours is
             better than the --baseline's; equal ones (within 1e-6, "ties") count half
[..]         "ci95": 95 % interval by bootstrap over tasks (all dialogues of a task are drawn together); a difference
             against --baseline is paired: the same drawn tasks on both sides
runs         NAME=FILE,FILE,… are several runs of one method (seeds) on the same tasks: the bootstrap draws runs as well
             as tasks, differences are paired by run and task, and a second table has each run ("runs"). With one run
             the interval leaves other seeds out. It is then too narrow to say that one method is better than another:
             it covered 47 to 82 % of the true differences in simulations.
families     "ci95_families": the bootstrap draws families, then tasks within each drawn family, and runs. It says how
             far a result holds for other families, and is wide rather than narrow (95 to 99 % in simulations). Only for
             tasks that state a "family" (01's template tasks).
No interval covers another base model, or how the settings were chosen.

--compat     adds what the published scorer says of the same answers: no imports, helpers or recursion; a blacklisted
             word fails every test; a custom __eq__ can fake a pass. "ends_evaluation" counts the answers that would
             have ended or hung it.
LABEL@N=FILE the points of LABEL's best-of-N curve (02 --best-of N), the paper's figure 3a, as a table and a drawing
--costs      adds what each method took: the cost records (costs.json) of the agent, for best-of-N also of the critic,
             and of all that they were made from, found through the inputs in args.json. Every output counts once a
             method; memory is the highest peak; of several runs the first is taken.
--gates MODEL   what a base model must pass before any claim is made with it: the log-probability of turns without and
             with c in front, on dialogues of the first file
--critics NAME=DIR …  compares critics (03) on dialogues of the first file, of tasks that they were not trained on: how
             often the better trajectory of a pair scores higher; with --returns FILE (dialogues that 02 --branch plays
             on from these) also the rank correlation (Spearman, the mean over states) of a turn's score with its
             Monte-Carlo return. Writes critics.json.

    python 05_evaluate.py base=out/base.jsonl sweet=out/sweet.jsonl --baseline base --costs --out out/report
    python 05_evaluate.py base=out/base.jsonl sweet=out/sweet.jsonl --baseline base --similarity pixels --out out/report
    python 05_evaluate.py base=out/base.jsonl --critics lm=out/critic --returns out/branches.jsonl --out out/critics
"""
import asyncio
import collections
import pathlib
import re

import numpy as np
import torch

import common
from colbench import ColBenchError, domain_of, task_id
from lib.arguments import add_overwrite, add_world, argument_parser
from lib.costs import compare_costs, cost_lines, Costs
from lib.models import encode, load_model, load_tokenizer
from lib.report import aligned, heading_of, interval, write_report
from lib.runtime import begin_output, InputError, is_done, run_stage, start, write_json, write_jsonl

NUM_RESAMPLES = 2000
TIE = 1e-6                       # returns that differ by no more are equal


# ---------------------------------------------------------------------------------------------------------------------
# statistics

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


# ---------------------------------------------------------------------------------------------------------------------
# scoring

def read_runs(paths):
    """The trajectories of the files of one name; of several with "run", the number of the file. InputError where these
    have not the same tasks."""
    runs = [common.read_trajectories(path) for path in paths]
    for number, (path, own) in enumerate(zip(paths, runs)):
        if {t["task_id"] for t in own} != {t["task_id"] for t in runs[0]}:
            raise InputError(f"{path}: other tasks than {paths[0]}; the runs of a name must have the same")
        if len(runs) > 1:
            for trajectory in own:
                trajectory["run"] = number
    return [trajectory for own in runs for trajectory in own]


def rescore(files, domain, worlds):
    """Give every trajectory of all files fresh domain.SCORE_KEYS ("reward", …) by one World after the other (the second
    one: the published scorer's verdicts); returns what the first scorer says of itself."""
    everything = [trajectory for own in files.values() for trajectory in own]
    pairs = [(t["task"], t["answer"]) for t in everything]
    for world in worlds:
        with world:
            for name, own in files.items():
                for key, value in world.about.items():
                    if logged := {str(t[key]) for t in own if t.get(key, value) != value}:
                        print(f"{name}: logged with {', '.join(sorted(logged))}, scored again with {value}")
            scores = asyncio.run(world.score(pairs))
        for trajectory, fresh in zip(everything, scores):
            for key in domain.SCORE_KEYS if world is worlds[0] else ():
                trajectory.pop(key, None)                            # of an earlier evaluation
            trajectory |= fresh
    return worlds[0].about


def measure(trajectories, domain):
    """The metrics of one file (see above)."""
    means = [task_means(own, domain.outcome) for own in by_run(trajectories)]
    families, n = families_of(trajectories), len(trajectories)
    agent = [[turn for turn in t["dialogue_history"] if turn["role"] == "assistant"] for t in trajectories]
    metrics = {"n": n, "tasks": len(means[0]),
               domain.metric(trajectories): sum(map(domain.outcome, trajectories)) / n,
               **intervals([[*own.values()] for own in means], [families[task] for task in means[0]]),
               "mean_rounds": sum(map(len, agent)) / n, **domain.measure(trajectories)}
    replies = [(t["task"], turn["content"]) for t in trajectories for turn in t["dialogue_history"][1:]
               if turn["role"] != "assistant"]
    if replies:
        leaks = collections.Counter(filter(None, (domain.leak_of(*reply) for reply in replies)))
        metrics |= {"leaks": leaks.total() / len(replies), "leaks_by_kind": dict(sorted(leaks.items()))}
    lengths = [len(turn["output_ids"]) for turns in agent for turn in turns if "output_ids" in turn]
    if lengths:
        metrics["turn_tokens"] = sum(lengths) / len(lengths)
    return metrics


def compare(metrics, files, baseline, domain):
    """Add to each method's metrics what it is against the baseline's dialogues."""
    for name, trajectories in files.items():
        if domain.MIN_GAP is not None:
            metrics[name] |= win_rate(trajectories, files[baseline], domain.outcome)
        if name != baseline and (difference := paired_difference(trajectories, files[baseline], domain.outcome)):
            metrics[name]["against_baseline"] = {"name": baseline, **difference}


# ---------------------------------------------------------------------------------------------------------------------
# tables: lines of text

def result_lines(metrics, metric, columns, baseline):
    """The comparison, and below it what its intervals leave out."""
    columns = [("n", "n", "d"), (metric, heading_of(metric), ".3f"), ("ci95", "95 %", ""),
               ("mean_rounds", "rounds", ".2f"), ("leaks", "leaks", ".3f"), *columns,
               ("win_rate", "wins", ".3f"), ("win_rate_ci95", "95 %", ""), ("ties", "ties", ".3f")]
    columns = [column for column in columns if any(column[0] in m for m in metrics.values())]
    rows = []
    for name, m in metrics.items():
        d = m.get("against_baseline")
        rows.append([name, *("-" if key not in m else interval(m[key]) if form == "" else format(m[key], form)
                             for key, _, form in columns),
                     *([f"{d['difference']:+.3f} {interval(d['ci95'], '+')}" if d else ""] if baseline else [])])
    lines = aligned(["", *(heading for _, heading, _ in columns), *([f"against {baseline}"] if baseline else [])], rows)
    lines += [f"{name}: {note}" for name, m in metrics.items() for note in m.get("notes", [])]
    lines += [f"similarity of screenshots: {m['similarity']}" for m in [*metrics.values()][:1] if "similarity" in m]
    single = [name for name, m in metrics.items() if "runs" not in m]
    which = "one run each" if len(single) == len(metrics) else f"one run of {', '.join(single)}"
    lines += [f"{which}: the intervals leave other seeds out"] if single else []
    if not any("ci95_families" in m for m in metrics.values()):
        return [*lines, 'no intervals over families: a task states no "family", or all state the same']
    families = [[name, *(interval(own["ci95_families"], sign) if "ci95_families" in own else "" for own, sign in
                         ((m, ""), (m.get("against_baseline", {}), "+"))[:1 + bool(baseline)])]
                for name, m in metrics.items()]
    return [*lines, "", *aligned(["95 %, families drawn", "own rate", *([f"against {baseline}"] if baseline else [])],
                                 families)]


def run_lines(metrics, metric, baseline):
    """The runs of every name: the metric and the difference, their mean, and each run's."""
    rows = []
    for what in (heading_of(metric), f"against {baseline}"):
        for name, m in metrics.items():
            own = m.get("against_baseline", {}) if what.startswith("against ") else m
            if "runs" in own:
                rows.append([name, what, f"{np.mean(own['runs']):+.3f}", " ".join(f"{x:+.3f}" for x in own["runs"])])
    return aligned(["over the runs", "", "mean", "each run"], rows)


def curve_point(name, path, trajectories):
    """("sweet", "8") of a file named sweet@8, None of a name without @; InputError where N is no positive number or not
    the one that the rows were made with ("best_of")."""
    if "@" not in name:
        return None
    label, _, number = name.rpartition("@")
    if not label or not re.fullmatch("[1-9][0-9]*", number):
        raise InputError(f"{path}: named {name}, but a name with @ must be LABEL@N, N a whole number from 1 up")
    for trajectory in trajectories:
        if trajectory.get("best_of", int(number)) != int(number):
            raise InputError(f'{path}: named {name}, N = {number}, but its "best_of" is {trajectory["best_of"]}')
    return label, number


def curve_lines(curves, metric):
    """A row a label, a column an N; curves: {label: {"N": {metric, "ci95"}}}."""
    sizes = sorted({n for points in curves.values() for n in points}, key=int)
    return aligned(["best of N", *sizes], [[label, *(f"{points[n][metric]:.3f}" if n in points else "-" for n in sizes)]
                                           for label, points in curves.items()])


# ---------------------------------------------------------------------------------------------------------------------
# gates: does a model read c?

def gate_lines(trajectories, domain, name, device):
    """Mean summed log-probability of turns under a model, without c and with c in front: of questions of the logged
    dialogues by kind, of the right answer and of another task's answer as a first turn."""
    model, tokenizer = load_model(name, device)
    turns = []                                                       # (what it is, history, turn, trajectory)
    first_of_family = {}
    for trajectory in trajectories[:200]:
        task, history = trajectory["task"], trajectory["dialogue_history"]
        for i, turn in enumerate(history):
            kind = domain.turn_kind(task, history[:i], turn["content"]) if turn["role"] == "assistant" else "answer"
            if "answer" not in kind:
                turns.append((kind, history[:i], turn["content"], trajectory))
        other = first_of_family.setdefault(task.get("family"), task)
        turns.append(("right answer at once", history[:1], domain.answer_message(task), trajectory))
        if other["ground_truth"] != task["ground_truth"]:
            turns.append(("wrong answer at once", history[:1], domain.answer_message(other), trajectory))
    columns = []
    for with_c in (False, True):
        items = [common.rows_of_trajectory(tokenizer, [(
            common.prompt_text(tokenizer, history, trajectory.get("max_rounds", 10), domain.AGENT_SYSTEM,
                               common.system_prompt(trajectory)), encode(tokenizer, text) + [tokenizer.eos_token_id])],
            common.hidden_info(trajectory["task"]) if with_c else None) for _, history, text, trajectory in turns]
        columns.append([logps.sum().item() for logps in common.turn_scores_of(model, items, 16384, device)])
    rows = []
    for kind in sorted({turn[0] for turn in turns}):
        chosen = [i for i, turn in enumerate(turns) if turn[0] == kind]
        rows.append([kind, str(len(chosen)), *(f"{sum(column[i] for i in chosen) / len(chosen):.2f}"
                                               for column in columns)])
    return [f"{name}: log-probability of a turn", *aligned(["", "n", "without c", "with c"], rows)]


# ---------------------------------------------------------------------------------------------------------------------
# critics: held-out pair accuracy, and rank correlation with Monte-Carlo returns

def read_branches(path, domain, critics):
    """[(DecisionPoint, the mean return of each of its actions)] of the dialogues that 02 --branch played and scored, of
    those states whose actions differ in it. InputError unless they have the tokens of all `critics`."""
    states = {}                                                      # {state: {ids: (turn, row, [return, …])}}
    for row in common.read_trajectories(path):
        if "branch" not in row or not isinstance(row.get("reward"), (int, float)):
            raise InputError(f"{path}: no dialogues of 02_rollout.py --branch")
        for critic in critics.values():
            if row["tokenizer"] != critic["tokenizer_name"]:
                raise InputError(f"{critic['folder']}: its tokenizer is not that of the agent in {path}")
        i = row["branch"]["turn"]
        turn, own = row["dialogue_history"][i], states.setdefault((row["task_id"], row["branch"]["sample"], i), {})
        own.setdefault(tuple(turn["output_ids"]), (turn, row, []))[2].append(float(domain.outcome(row)))
    points = []
    for (_, _, i), own in states.items():
        turns, rows, returns = zip(*own.values())
        returns = [sum(values) / len(values) for values in returns]
        if len(set(returns)) > 1:
            points.append((common.DecisionPoint(
                turns[0]["input"], rows[0]["task"], rows[0]["dialogue_history"][:i], [t["output_ids"] for t in turns],
                [t["output"] for t in turns]), returns))
    if not points:
        raise InputError(f"{path}: no state whose candidates differ in return; raise --branch or --samples of 02")
    return points


def rank_correlation(a, b):
    """Spearman's; 0 where one side is all equal."""
    from scipy.stats import spearmanr
    return 0.0 if len(set(a)) == 1 or len(set(b)) == 1 else float(spearmanr(a, b).statistic)


def measure_critic(critic, trajectories, branches, path, device):
    """{"pair_accuracy", "num_pairs"}, with `branches` also {"rank_correlation", "ci95", "num_states"}, of a critic
    (common.load_critic)."""
    tokenizer = load_tokenizer(critic["folder"])
    pairs = common.trajectory_pairs(trajectories, path)
    examples = common.trajectory_examples(trajectories, pairs, tokenizer, critic["privileged"])
    ref = common.reference_of(critic, examples, 16384, device)
    found = {"pair_accuracy": common.pair_accuracy(critic["model"], examples, ref, critic, 16384, device),
             "num_pairs": len(pairs)}
    if branches:
        points, returns = zip(*branches)
        by_task = {}
        for point, own, scores in zip(points, returns, common.score_actions(critic, tokenizer, points, 16384, device)):
            by_task.setdefault(task_id(point.task), []).append(rank_correlation(scores, own))
        found |= {"rank_correlation": float(np.mean([value for values in by_task.values() for value in values])),
                  "ci95": bootstrap_interval([float(np.mean(values)) for values in by_task.values()]),
                  "num_states": len(points)}
    return found


def critic_lines(critics, trajectories, branches, path, out, device):
    """The table of --critics, also kept in critics.json."""
    found = {name: measure_critic(common.load_critic(critic, common.load_whole(device)), trajectories, branches, path,
                                  device) for name, critic in critics.items()}
    write_json(out / "critics.json", found)
    rows = [[name, f"{m['pair_accuracy']:.3f}", str(m["num_pairs"]), *(
        [f"{m['rank_correlation']:.3f}", interval(m["ci95"], "+"), str(m["num_states"])] if branches else [])]
        for name, m in found.items()]
    more = ["rank correlation", "95 %", "states"] if branches else []
    return [*aligned(["critic", "pair accuracy", "pairs", *more], rows),
            "one training run of each critic: the intervals leave other seeds out"]


# ---------------------------------------------------------------------------------------------------------------------

def parse_args(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument("files", nargs="+", metavar="NAME=FILE",
                        help="trajectory files (02), each with a name; FILE,FILE,…: runs of one method; LABEL@N: a "
                        "point of a best-of-N curve")
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--baseline", metavar="NAME", help="compare the others with this one")
    parser.add_argument("--compat", action="store_true", help="show the published scorer's verdicts as well")
    parser.add_argument("--costs", action="store_true", help="show what it took to make each method")
    parser.add_argument("--gates", metavar="MODEL", help="print a base model's gates, on dialogues of the first file")
    parser.add_argument("--critics", nargs="+", metavar="NAME=DIR",
                        help="compare these critics, on dialogues of the first file")
    parser.add_argument("--returns", metavar="FILE", help="--critics: dialogues of 02 --branch on the first file")
    add_world(parser)
    add_overwrite(parser)
    args = parser.parse_args(argv)
    if args.returns and not args.critics:
        parser.error("--returns needs --critics")
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


def one_domain(files, args):
    """The domain of all files' tasks; InputError where they have several, or where --gates cannot work on them."""
    domains = {domain_of(own[0]["task"]): name for name, own in files.items()}
    if len(domains) > 1:
        raise InputError("tasks of several domains: " + ", ".join(f"{domain.NOUN}s in {name}" for domain, name in
                         domains.items()) + "; evaluate each domain in a call of its own")
    [domain] = domains
    first = next(iter(files.values()))
    if args.gates and (lacking := next((t for t in first if domain.turn_kind(t["task"], [], "") is None), None)):
        raise InputError(f"{args.files[0].partition('=')[2]}: --gates needs template tasks (01), which say what a turn "
                         f"is worth, and task {lacking['task_id']} does not; leave --gates out")
    return domain


def main(argv=None):
    args = parse_args(argv)
    start(0)
    runs = {name: path.split(",") for name, path in (argument.split("=", 1) for argument in args.files)}
    files = {name: read_runs(own) for name, own in runs.items()}
    points = {name: curve_point(name, runs[name][0], files[name]) for name in files}
    domain = one_domain(files, args)
    first, first_path = next(iter(files.values())), args.files[0].partition("=")[2]
    folders = dict(argument.split("=", 1) for argument in args.critics or [])
    critics = {name: common.read_critic(folder, None, domain) for name, folder in folders.items()}
    for critic in critics.values():
        if critic.get("visual"):
            raise InputError(f"{critic['folder']}: --critics compares critics that read text, and this one sees images")
        critic["tokenizer_name"] = common.tokenizer_name(load_tokenizer(critic["folder"]))
    branches = read_branches(args.returns, domain, critics) if args.returns else None
    if critics:
        common.trajectory_pairs(first, first_path)                   # errors now, not after the scoring
    programs = "rules", "script", "script-informed", *getattr(domain, "PLAYERS", ()), *domain.ORACLES
    costs = compare_costs({name: own[0] for name, own in runs.items()}, programs) if args.costs else {}
    out, inputs = pathlib.Path(args.out), [path for own in runs.values() for path in own]
    inputs += [args.gates, args.returns, args.clip_model, *folders.values()]
    if is_done(args, out, inputs, folder=True):
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    worlds = [common.world(domain, args, out / "images", out / "scored", device=device, compat=compat)
              for compat in (False, True)[:1 + args.compat]]
    begin_output(args, out, inputs, folder=True)
    spent = Costs(out, folder=True)
    (out / "scored").mkdir(exist_ok=True)
    about = rescore(files, domain, worlds)
    metrics, curves, metric = {}, {}, domain.metric(first)
    for name, trajectories in files.items():
        metrics[name] = measure(trajectories, domain) | about | ({"costs": costs[name]} if costs else {})
        write_jsonl(out / "scored" / f"{name}.jsonl", trajectories)
        if points[name]:
            label, number = points[name]
            curves.setdefault(label, {})[number] = {key: metrics[name][key] for key in (metric, "ci95")}
    if args.baseline:
        compare(metrics, files, args.baseline, domain)
    write_json(out / "metrics.json", metrics)                        # before everything that is optional
    lines = result_lines(metrics, metric, domain.COLUMNS, args.baseline)
    if any(len(own) > 1 for own in runs.values()):
        lines += ["", *run_lines(metrics, metric, args.baseline)]
    if curves:
        lines += ["", *curve_lines(curves, metric)]
        write_json(out / "curves.json", curves)
    if costs:
        lines += ["", *cost_lines(costs)]
    print("\n" + "\n".join(lines) + "\n")
    write_report(out / "report.html", lines, metrics, files, curves, metric, out / "scored")
    if args.gates:
        print("\n".join(gate_lines(first, domain, args.gates, "cpu")))
    if critics:
        print("\n".join(critic_lines(critics, first, branches, first_path, out, device)))
    spent.record()
    (out / "COMPLETED").touch()
    print(f"writes {out / 'metrics.json'}, {out / 'report.html'}")


if __name__ == "__main__":
    run_stage(main, ColBenchError)
