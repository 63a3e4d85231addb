"""Stage 5: score trajectory files, compare them in one table, and show every turn's advantage in an HTML report.

Reads   NAME=trajectories.jsonl … (02); every answer is scored again. Dialogues made by other programs keep their own
        rewards (docs/faq.md).
Writes  metrics.json, scored/NAME.jsonl (the trajectories with fresh rewards, kinds of turns and endings), report.html;
        images/ (of web pages); with --export export/.

n, rounds, tests         dialogues; mean number of agent turns; mean share of the tests passed
success                  share of the dialogues whose answer passes all tests; for pages the mean similarity of the
                         screenshots of answer and solution, by clip (the paper's) or by pixels: two scales. It is a
                         mean over a task's dialogues, then over tasks, then over runs; so are its interval and the
                         differences. The other columns are means over dialogues
asks last                share of the dialogues in which the agent still asked in the last round (metrics.json has the
                         shares answered_early, before the last round, and answered_last, in it)
leaks                    share of the simulator's replies that show the solution
all known, when known    template tasks: share of the dialogues in which the agent knew every fact that matters before
                         its last turn; success among these
no page, not rendered    answers that are not a page; pages without a screenshot (a black image is scored)
wins, ties               pages: share of answers that beat the --baseline's, over all pairs of a task, a
                         tie (within 1e-6) half; then the mean over tasks
[..]                     95 % interval by bootstrap over tasks; with several runs (NAME=FILE,FILE,…) also over runs;
                         against --baseline paired by task and run; "families drawn": over families, then their tasks
LABEL@N=FILE             points of a curve over N: the N of best-of-N (02), training trajectories (04) or rounds
--costs                  tokens trained on, tokens generated and minutes for training the agent and its critics (from
                         their args.json)

docs/results.md says what the intervals cover, docs/faq.md how to read report.html.
scripts/critics.py measures critics, and whether a model reads c.

    python 05_evaluate.py base=out/base.jsonl sweet=out/sweet.jsonl --baseline base --critic out/critic \\
        --candidates out/sweet --costs --out out/report
"""
from lib import flags

# ---------------------------------------------------------------------------------------------------------------------
# arguments

def parse_args(argv=None):
    parser = flags.argument_parser(__doc__)
    parser.add_argument("files", type=flags.named_paths, nargs="+", metavar="NAME=FILE",
                        help="trajectory files (02), each with a name; FILE,FILE,…: runs of one method; LABEL@N: a "
                        "point of a curve")
    parser.add_argument("--out", type=flags.text_flag, required=True, help="output folder")
    parser.add_argument("--baseline", type=flags.text_flag, metavar="NAME", help="compare the others with this one")
    parser.add_argument("--compat", action="store_true", help="show the published scorer's verdicts as well")
    parser.add_argument("--costs", action="store_true", help="show each method's training costs (first file)")
    parser.add_argument("--critic", type=flags.text_flag, metavar="DIR", help="show turn advantages by this critic")
    parser.add_argument("--advantage-tasks", type=flags.positive_int, metavar="N", help="only for the first N tasks of "
                        "each name (None: 100; with --export all)")
    flags.add_reference(parser)
    parser.add_argument("--candidates", type=flags.text_flag, metavar="DIR", help="show candidates of a folder of 04")
    parser.add_argument("--export", choices=["messages"], help="write every dialogue for other programs as well")
    flags.add_world(parser)
    args = parser.parse_args(argv)
    if args.reference_sees_c is not None and not args.critic:
        parser.error("--reference-sees-c goes with --critic")
    if args.advantage_tasks is None:
        args.advantage_tasks = 10 ** 9 if args.export else 100
    names = [name for name, _ in args.files]
    if len(set(names)) < len(names):
        parser.error("each file needs its own name")
    if args.baseline and args.baseline not in names:
        parser.error(f"--baseline {args.baseline}: not one of {', '.join(names)}")
    return args


if __name__ == "__main__":
    parse_args()                    # answers --help and wrong flags before the imports below, which take seconds

import asyncio
import collections
import itertools
import pathlib
import re
import shlex
import sys

import common
from colbench import domain_of
from colbench.schema import list_of
from lib import data, runtime, statistics
from lib.logps import load_whole
from lib.report.export import export
from lib.report.page import about_lines, page_data, write_report
from lib.report.plots import report_plots
from lib.report.turn_advantages import advantage_summary, kind_lines, read_states
from lib.runtime import InputError, Output, read_json, read_jsonl, run_stage, say, start, write_json, write_jsonl

MAX_TOKENS = 16384               # in a batch without gradients, and in a dialogue whose turns get advantages


# ---------------------------------------------------------------------------------------------------------------------
# reading

def read_runs(paths):
    """The trajectories of all files (runs) of one name. If there are several, "run" is the number of the file.
    Raises InputError if their tasks differ."""
    trajectories = []
    for number, path in enumerate(paths):
        for trajectory in data.read_trajectories(path):
            if len(paths) > 1:
                trajectory["run"] = number
            trajectories.append(trajectory)
    runs = statistics.outcomes_of_runs(trajectories, lambda _: 0)
    if len(set(map(frozenset, runs))) > 1:                           # {task_id: …} each
        raise InputError(f"{', '.join(paths)}: the runs of a name must have the same tasks")
    return trajectories


def check_tasks(files, states, where):
    """The domain of the tasks of all files and of the states of the file `where`. Raises InputError if domains are
    mixed or a task_id is ambiguous."""
    trajectories = list(itertools.chain(*files.values()))
    tasks = [trajectory["task"] for trajectory in trajectories]
    for name, rows in [*files.items(), (where, states)]:
        for row in rows[:1]:                                         # reading checked that a file has one domain
            data.check_task(row["task"], name, tasks[0])
    data.check_ids(tasks, [trajectory["task_id"] for trajectory in trajectories], " and ".join(files))
    return domain_of(tasks[0])


COSTS = "trained_tokens", "generated_tokens", "seconds"


def costs_of(path):
    """{each of COSTS: total} of the agent that rolled out this file, its critic and the critic of best-of-N."""
    rollout_args = runtime.read_args(path)["args"]
    if "agent" not in rollout_args:
        raise InputError(f"{path}: --costs needs the args.json that 02_rollout.py writes next to it")
    agent_args = runtime.read_args(rollout_args["agent"])["args"]
    models = {rollout_args["agent"], rollout_args.get("critic"), agent_args.get("critic")} - {None}
    costs = dict.fromkeys(COSTS, 0)
    for model in models:
        for key, value in runtime.read_args(model).get("costs", {}).items():
            costs[key] += value
    return costs


def trained_folders(files, critic):
    """{name: folder} of the agents of the files and of the critic, if they have a metrics.jsonl."""
    names = {}                                                       # {model: the first method that uses it}
    for name, trajectories in files.items():
        names.setdefault(trajectories[0].get("agent"), name)
    names.setdefault(critic, "critic")
    folders = {name: pathlib.Path(str(model)) for model, name in names.items()}
    return {name: folder for name, folder in folders.items() if (folder / "metrics.jsonl").is_file()}


def curves_of(metrics):
    """{label: {N: metrics}} of the methods named LABEL@N."""
    curves = {}
    for name, method in metrics.items():
        label_and_number = re.fullmatch("(.+)@([1-9][0-9]*)", name)
        if label_and_number:
            label, number = label_and_number.groups()
            curves.setdefault(label, {})[int(number)] = method
    return curves


# ---------------------------------------------------------------------------------------------------------------------
# scoring

def rescore(trajectories, environments, domain):
    """Re-score every trajectory, discarding its old scores."""
    for trajectory in trajectories:
        for key in (*domain.SCORE_KEYS, "failed"):
            trajectory.pop(key, None)
    answers = [(trajectory["task"], trajectory["answer"]) for trajectory in trajectories]
    for environment in environments:
        with environment:
            scores = asyncio.run(environment.score(answers, explain=True))
        for trajectory, score in zip(trajectories, scores):
            trajectory.update(score)


def measure(trajectories, domain):
    """The metrics of one method; the docstring of this file explains most of them. Also gives every trajectory its
    "kinds", "known" (measure_turns) and "ending". A metric needs a line in statistics.result_table to be a column."""
    tasks, values = statistics.values_of_runs(trajectories, domain.eval_score)               # values: (runs, tasks)
    turns = [turn for trajectory in trajectories for turn in trajectory["dialogue_history"]
             if turn["role"] == "assistant"]
    metrics = {
        "n": len(trajectories),
        "tasks": len(tasks),
        domain.metric(trajectories): statistics.mean_over_tasks(trajectories, domain.eval_score),
        **statistics.intervals(values, tasks, trajectories),
        "mean_rounds": len(turns) / len(trajectories),
        **domain.measure(trajectories),
        **statistics.measure_turns(trajectories, domain),
        **statistics.measure_endings(trajectories, domain),
        **measure_leaks(trajectories, domain),
    }
    num_tokens = [len(turn["output_ids"]) for turn in turns if "output_ids" in turn]
    if num_tokens:
        metrics["turn_tokens"] = sum(num_tokens) / len(num_tokens)
    return metrics


def measure_leaks(trajectories, domain):
    """{"leaks": share of the simulator's replies that show the solution, "leaks_by_kind": {kind: number}}.

    Empty if the simulator never replied, or if leaks cannot be detected (colbench/own.py)."""
    if domain.leak_of is None:
        return {}
    leaks = []                                                       # kind of leak in each reply, or None
    for trajectory in trajectories:
        for turn in trajectory["dialogue_history"][1:]:
            if turn["role"] == "user" and not turn.get("tool"):
                leaks.append(domain.leak_of(trajectory["task"], turn["content"]))
    if not leaks:
        return {}
    kinds = collections.Counter(filter(None, leaks))
    return {"leaks": kinds.total() / len(leaks), "leaks_by_kind": dict(sorted(kinds.items()))}


def compare(metrics, files, baseline, domain):
    """Add to each method's metrics its difference to the baseline, paired by task."""
    for name, trajectories in files.items():
        if domain.MIN_RETURN_GAP is not None:
            metrics[name] |= statistics.win_rate(trajectories, files[baseline], domain.eval_score)
        difference = statistics.paired_difference(trajectories, files[baseline], domain.eval_score)
        if name != baseline and difference:
            metrics[name]["against_baseline"] = {"name": baseline, **difference}
        num_tasks = difference["n"] if difference else 0
        if {num_tasks} != {metrics[name]["tasks"], metrics[baseline]["tasks"]}:
            metrics[name].setdefault("notes", []).append(
                f"difference to {baseline} uses the {num_tasks:,} shared tasks (needs equally many runs); rates above "
                "use all tasks")


# ---------------------------------------------------------------------------------------------------------------------
# the comparison, and the tables below it

def tables_of(metrics, metric, baseline, states, domain, training):
    """Print the tables of the metrics and of the training (training_lines). Returns them for the page: {"headings",
    "rows" of the comparison, "notes", "tables": {heading: text} of those below it}."""
    headings, rows = statistics.result_table(metrics, metric, domain.COLUMNS, baseline)
    notes = statistics.note_lines(metrics)
    further = {
        "families and runs": statistics.detail_lines(metrics, baseline),
        "training": training,
        "costs": cost_lines(metrics),
        "kinds of candidates": kind_lines(states, domain),
    }
    tables = {heading: "\n".join(lines) for heading, lines in further.items() if lines}
    comparison = "\n".join([*statistics.aligned(headings, rows), *notes])
    say("\n" + "\n\n".join([comparison, *tables.values()]) + "\n")
    return {"headings": headings[1:], "rows": rows, "notes": notes, "tables": tables}


def training_lines(folders, histories):
    """What each model was trained on, in how many steps, and the critic's accuracy."""
    rows = []
    for name, folder in folders.items():
        trained_on = runtime.read_args(folder).get("trained_on", "-")
        rows.append([name, trained_on, f"{len(histories[name]):,}", held_out_accuracy(folder)])
    return statistics.aligned(["training", "trained on", "steps", "held-out accuracy"], rows)


def held_out_accuracy(folder):
    """A critic's accuracy on pairs of held-out tasks, as text; "-" for other models."""
    path = folder / "critic.json"
    if not path.exists():
        return "-"
    critic = read_json(path, common.CRITIC)
    if critic.get("held_out_pair_accuracy") is None:
        return "not measured"
    return f"{critic['held_out_pair_accuracy']:.3f} ({critic['num_held_out_pairs']:,} pairs)"


def cost_lines(metrics):
    rows = []
    for name, method in metrics.items():
        if "costs" in method:
            trained, generated, seconds = (method["costs"][key] for key in COSTS)
            rows.append([name, f"{trained / 1e6:,.3f}", f"{generated / 1e6:,.3f}", f"{seconds / 60:,.1f}"])
    return statistics.aligned(["costs", "M trained", "M generated", "minutes"], rows)


def add_turn_advantages(metrics, files, critic, num_tasks, device):
    """Give the trajectories "advantages" and every method their advantage_summary. Returns the summary of all.

    A critic scores those of the first num_tasks tasks of each name, and the others get None. Without a critic they keep
    their own."""
    trajectories = list(itertools.chain(*files.values()))
    if critic:
        scored = []
        for of_name in files.values():
            tasks = dict.fromkeys(trajectory["task_id"] for trajectory in of_name)
            first_tasks = set(itertools.islice(tasks, num_tasks))
            scored += [trajectory for trajectory in of_name if trajectory["task_id"] in first_tasks]
        for trajectory in trajectories:
            trajectory["advantages"] = None
        critic.load(load_whole(device), MAX_TOKENS)
        for trajectory, advantages in zip(scored, critic.score_turns(scored)):
            trajectory["advantages"] = advantages
        say(f"{len(scored):,} of {len(trajectories):,} dialogues scored (--advantage-tasks)")
    for trajectory in trajectories:
        trajectory.setdefault("advantages", None)
    for name in files:
        metrics[name]["turn_advantages"] = advantage_summary(files[name])
    summary = advantage_summary(trajectories)
    if summary["unscored"]:
        say(f"{summary['unscored']:,} dialogues have no turn advantages")
    return summary


def turn_form(critic, trajectories):
    """Lines that say where the turn advantages come from: a critic, or the trajectories themselves."""
    if not critic:
        own = [row for row in trajectories if row.get("advantages") is not None]
        for row in own:
            num_turns = len(statistics.agent_places(row["dialogue_history"]))
            if list_of(float)(row["advantages"]) or len(row["advantages"]) != num_turns:
                raise InputError(f'task {row["task_id"]}: "advantages" must be one number for each turn of the agent')
        return ["turn advantages come from the files"] if own else []
    lines = [critic.describe()]
    if critic.score == "value":
        lines.append(f"{critic.folder}: has a value head; a turn's advantage is its change of the value, not eq. 3")
    if critic.normalize == "trajectory":
        lines.append(f"{critic.folder}: a turn's advantage is a sum over its tokens, divided by the dialogue's agent "
                     "tokens")
    return lines


def critic_lines(folder, paths):
    """Lines that say how far the critic in a folder can be trusted. paths: {name: [the file of each run]}."""
    trained_on = runtime.read_args(folder)["inputs"].values()        # fingerprints
    lines = [f"{folder}: accuracy on pairs of held-out tasks: {held_out_accuracy(pathlib.Path(folder))}"]
    for name, runs in paths.items():
        if any(runtime.fingerprint(path) in trained_on for path in runs):
            lines.append(f"{name}: the critic was trained on these dialogues, so their turn advantages are in-sample "
                         "(except on its held-out tasks)")
    return lines


def candidate_form(folder, domain, form_of_turns):
    """Lines that describe the scores of the candidates in a folder of 04, from its args.json."""
    args = runtime.read_args(folder)["args"]
    try:
        critic = common.open_critic(args["critic"], args["model"], domain, args["reference_sees_c"])
    except (KeyError, InputError):
        return [f"{folder}: not ranked by a critic, or its critic is missing or no longer matches"]
    lines = [critic.describe()]
    if form_of_turns not in ([], lines):
        lines.append("Turn advantages come from another critic or another form of eq. 3; do not compare the two.")
    return lines


# ---------------------------------------------------------------------------------------------------------------------

def main(argv=None):
    args = parse_args(argv)
    run = start(0)
    if run.world_size > 1:
        raise InputError("05_evaluate.py is a single process: start it with python, not torchrun")
    out = pathlib.Path(args.out)

    # read and check everything before anything is scored
    paths = dict(args.files)                                         # {name: [the file of each run]}
    files = {name: read_runs(runs) for name, runs in paths.items()}
    all_trajectories = list(itertools.chain(*files.values()))
    states = read_states(args.candidates) if args.candidates else []
    domain = check_tasks(files, states, args.candidates)
    costs = {name: costs_of(runs[0]) for name, runs in paths.items()} if args.costs else {}
    critic = None
    if args.critic:
        critic = common.read_critic(args.critic, domain, args.reference_sees_c)
        common.must_read_text(critic)
    form_of_turns = turn_form(critic, all_trajectories)
    forms = {"advantages": form_of_turns + (critic_lines(args.critic, paths) if critic else [])}
    folders = trained_folders(files, args.critic)
    histories = {name: read_jsonl(folder / "metrics.jsonl", {"step": int}) for name, folder in folders.items()}
    inputs = [*itertools.chain(*paths.values()), args.clip_model, args.critic]
    if args.candidates:
        inputs += [f"{args.candidates}/scored.jsonl", f"{args.candidates}/pairs.jsonl"]
    output = Output(out, vars(args), inputs, folder=True)
    if output.is_done():
        return
    environments = []
    for compat in [False, True] if args.compat else [False]:
        options = {**vars(args), "compat": compat}
        environments.append(data.environment(domain, out / "images", out / "scored", options, run.device))
    output.begin()

    # scores and metrics, written before anything optional
    (out / "scored").mkdir(exist_ok=True)
    rescore(all_trajectories, environments, domain)
    data.say_graded(all_trajectories)
    metrics = {}
    for name, trajectories in files.items():
        metrics[name] = measure(trajectories, domain) | environments[0].about
        write_jsonl(out / "scored" / f"{name}.jsonl", trajectories)
    for name in costs:
        metrics[name]["costs"] = costs[name]
    if args.baseline:
        compare(metrics, files, args.baseline, domain)
    write_json(out / "metrics.json", metrics)
    metric = domain.metric(all_trajectories)
    training = training_lines(folders, histories)
    tables = tables_of(metrics, metric, args.baseline, states, domain, training)

    # turn advantages
    advantages = {}
    if args.candidates:
        forms["candidates"] = candidate_form(args.candidates, domain, form_of_turns)
    say(*dict.fromkeys(itertools.chain(*forms.values())))            # each line once
    if forms["advantages"]:
        advantages = add_turn_advantages(metrics, files, critic, args.advantage_tasks, run.device)
        write_json(out / "metrics.json", metrics)

    # the page
    if args.export:
        export(out / "export", files)
    page = page_data(files, domain, forms, states)
    rewards = {}
    if domain.MIN_RETURN_GAP is not None:
        for name, trajectories in files.items():
            rewards[name] = [trajectory["reward"] for trajectory in trajectories]
    plots = report_plots(metric, curves_of(metrics), histories, rewards)
    rollouts = {name: runtime.read_args(runs[0])["args"] for name, runs in paths.items()}
    about = about_lines(shlex.join(["python", "05_evaluate.py", *map(str, argv or sys.argv[1:])]), rollouts)
    write_report(out / "report.html", page, out / "images", **tables, about=about, metrics=metrics, metric=metric,
                 metric_heading=statistics.heading_of(metric), advantages=advantages, plots=plots, forms=forms)
    (out / "COMPLETED").touch()
    if page["left_out"]:
        say(f"report.html: {page['left_out']}")
    say(f"writes {out / 'metrics.json'}, {out / 'report.html'}")


if __name__ == "__main__":
    run_stage(main)
