"""Stage 5: score trajectory files, compare them in one table, and show every turn's credit in a page.

Reads   NAME=trajectories.jsonl … (02); the logged rewards are not trusted: every answer is scored again.
Writes  metrics.json, scored/NAME.jsonl (the trajectories with fresh rewards), report.html, and by what is asked for
        agreement.json, images/ (of pages), export/.

n, rounds, tests         dialogues; mean number of agent turns; mean share of the tests passed
success                  share of the dialogues whose answer passes all tests; of pages the mean similarity of the
                         screenshots of answer and reference, by clip (the paper's) or by pixels: two scales. It is a
                         mean over a task's dialogues, then over tasks, then over runs; so are its interval and the
                         differences. The other columns are means over dialogues
leaks                    share of the human's replies that show the reference
all known, when known    template tasks: share of the dialogues in which the agent had found out all that matters
                         before its last turn; success among these
no page, not rendered    answers that are no page; pages that gave no screenshot (a black one counts)
wins, ties               pages: share of better answers against the --baseline's over all pairs of a task, a
                         tie (within 1e-6) half; then the mean over tasks
[..]                     95 % interval by bootstrap over tasks, of several runs (NAME=FILE,FILE,…) over runs as well;
                         against --baseline paired by task and run; "families drawn": over families, then their tasks
LABEL@N=FILE             points of a curve: of best-of-N (02 --best-of N), of N training trajectories (04), or of N
                         rounds of training (an agent of 04 that was made from one of N - 1)

docs/results.md says what the intervals leave out, docs/report.md how to read the page and what --critic adds to it.
scripts/critics.py measures critics, and whether a model reads c.

    python 05_evaluate.py base=out/base.jsonl sweet=out/sweet.jsonl --baseline base --critic out/critic \\
        --candidates out/sweet --costs --out out/report
"""
import asyncio
import collections
import glob
import itertools
import math
import pathlib
import re

import torch

import common
from colbench import ColBenchError, domain_of, schema
from lib import statistics, tables
from lib.costs import compare_costs, cost_lines, Costs, read_record
from lib.credit import agreement, count_pairs, credit_of, credit_summary, measure_turns, read_states, state_files
from lib.export import export
from lib.flags import add_overwrite, add_reference, add_world, argument_parser, named_path, text_flag
from lib.models import load_tokenizer
from lib.plots import report_plots
from lib.report import MAX_STATES, page_data, write_report
from lib.runtime import begin_output, InputError, is_done, read_jsonl, run_stage, say, start, write_json, write_jsonl

MAX_TOKENS = 16384               # of a batch without gradients, and of a dialogue whose turns get credit

# A point of a curve, of a file named LABEL@NUMBER; kind: what the number counts, a key of lib.plots.CURVES
CurvePoint = collections.namedtuple("CurvePoint", "label number kind")


# ---------------------------------------------------------------------------------------------------------------------
# arguments

def parse_args(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument("files", type=named_path, nargs="+", metavar="NAME=FILE",
                        help="trajectory files (02), each with a name; FILE,FILE,…: runs of one method; LABEL@N: a "
                        "point of a curve")
    parser.add_argument("--out", type=text_flag, required=True, help="folder to write")
    parser.add_argument("--baseline", type=text_flag, metavar="NAME", help="compare the others with this one")
    parser.add_argument("--compat", action="store_true", help="show the published scorer's verdicts as well")
    parser.add_argument("--costs", action="store_true", help="show what it took to make each method (of "
                        "several runs the first)")
    parser.add_argument("--critic", type=text_flag, metavar="DIR",
                        help="the page shows each turn's credit by this critic (03)")
    add_reference(parser)
    parser.add_argument("--candidates", type=text_flag, metavar="PATH",
                        help="the page shows SWEET's candidates: 04's output folder or its scored.jsonl, with "
                        "pairs.jsonl beside it")
    parser.add_argument("--table", choices=tables.FORMS, help="print the comparison once more, for a paper")
    parser.add_argument("--export", choices=["messages"], help="write every dialogue for other programs as well")
    add_world(parser)
    add_overwrite(parser)
    args = parser.parse_args(argv)
    if args.reference and not args.critic:
        parser.error("--reference goes with --critic")
    names = [argument.partition("=")[0] for argument in args.files]
    if len(set(names)) < len(names):
        parser.error("every file needs a name of its own")
    if args.baseline and args.baseline not in names:
        parser.error(f"--baseline {args.baseline}: none of {', '.join(names)}")
    return args


def hint_lines(args, histories):
    """Which flag adds what is not in the page."""
    hints = []
    if not args.critic:
        hints.append("--critic DIR (of 03_train_critic.py) adds the credit of every turn")
    if not args.candidates:
        hints.append("--candidates DIR (of 04_train_policy.py --method sweet) adds the candidates of states")
    if not args.baseline and len(args.files) > 1:
        hints.append("--baseline NAME adds the differences against a method")
    if not args.costs:
        hints.append("--costs adds what it took to make each method")
    if not histories:
        hints.append("training curves: no agent's folder with a metrics.jsonl is at hand")
    return hints


def output_files(names):
    """Patterns of all files that this stage writes into its folder, for methods of these names."""
    patterns = ["metrics.json", "agreement.json", "report.html", "images/*.png"]
    for name in map(glob.escape, names):
        patterns += [f"scored/{name}.jsonl", f"export/{name}.jsonl"]
    return patterns


# ---------------------------------------------------------------------------------------------------------------------
# reading

def paths_of(arguments):
    """{name: [the file of each run]} of arguments NAME=FILE,FILE,…"""
    paths = {}
    for argument in arguments:
        name, _, files = argument.partition("=")
        paths[name] = files.split(",")
    return paths


def read_runs(paths):
    """The trajectories of all files of one name. Of several files, its runs, "run" is the number of the file. A single
    file may have "run", too: one that this stage has scored.

    InputError where the runs have not the same tasks."""
    runs = [common.read_trajectories(path) for path in paths]
    if len(runs) == 1:
        first, *others = map(task_ids, statistics.by_run(runs[0]))
        if any(tasks != first for tasks in others):
            raise InputError(f'{paths[0]}: its rows have "run", and not all runs have the same tasks')
        return runs[0]
    first = task_ids(runs[0])
    for number, (path, run) in enumerate(zip(paths, runs)):
        if task_ids(run) != first:
            raise InputError(f"{path}: other tasks than {paths[0]}; the runs of a name must have the same")
        for trajectory in run:
            trajectory["run"] = number
    return list(itertools.chain(*runs))


def task_ids(trajectories):
    return {trajectory["task_id"] for trajectory in trajectories}


def one_domain(files):
    """The domain of all files' tasks; InputError where they have several."""
    names = {}                                                       # {domain: a file that has it}
    for name, trajectories in files.items():
        names[domain_of(trajectories[0]["task"])] = name
    if len(names) > 1:
        listing = ", ".join(f"{domain.NOUN}s in {name}" for domain, name in names.items())
        raise InputError(f"tasks of several domains: {listing}; evaluate each domain in a call of its own")
    return next(iter(names))


def text_critic(folder, domain, reference):
    """common.read_critic of one that reads text."""
    critic = common.read_critic(folder, None, domain, reference)
    if critic.get("visual"):
        raise InputError(f"{folder}: --critic takes a critic that reads text, and this one sees images")
    return critic


def read_candidates(path, first_task):
    """The states of --candidates (read_states); InputError where they are not of the domain of `first_task`."""
    states = read_states(path)
    for state in states:
        common.check_task(state["task"], f"{path}: task {state['task_id']}", first_task)
    return states


def costs_of_methods(paths, domain):
    """compare_costs of {name: its files}; of several runs those of the first one."""
    programs = ["rules", common.UNTRAINED, *domain.PLAYERS, *domain.ORACLES]       # what is no model costs nothing
    first_paths = {name: runs[0] for name, runs in paths.items()}
    return compare_costs(first_paths, programs)


NUMBERS = schema.table_of(schema.number(-math.inf, math.inf))
METRICS = schema.record({"step": int})


def metrics_row(value):
    """The kind of a row of metrics.jsonl: numbers alone, one of them the step."""
    return METRICS(value) or NUMBERS(value)


def training_histories(files, critic):
    """{name: rows of metrics.jsonl} of the models that are at hand: the agents of the files, and the critic."""
    names = {}                                                       # {model: the first method that has it}
    for name, trajectories in files.items():
        names.setdefault(trajectories[0].get("agent"), name)
    names.setdefault(critic, "critic")
    histories = {}
    for model, name in names.items():
        path = pathlib.Path(model or "") / "metrics.jsonl"
        if model and path.is_file():
            histories.setdefault(name, read_jsonl(path, metrics_row))
    return histories


# ---------------------------------------------------------------------------------------------------------------------
# scoring

def rescore(files, domain, worlds):
    """Give every trajectory of all files the fresh scores of each World. Returns what the first one says of itself.

    The first World scores as the benchmark does; keys that an earlier evaluation has left are removed before. A second
    one scores as the published scorer does (--compat)."""
    trajectories = list(itertools.chain(*files.values()))
    answers = [(trajectory["task"], trajectory["answer"]) for trajectory in trajectories]
    for number, world in enumerate(worlds):
        with world:
            for name in files:
                say_other_scales(name, files[name], world.about)
            scores = asyncio.run(world.score(answers, explain=True))
        for trajectory, score in zip(trajectories, scores):
            if number == 0:
                for key in (*domain.SCORE_KEYS, "failed", "advantages"):
                    trajectory.pop(key, None)                        # "advantages": of another program
            trajectory.update(score)
    return worlds[0].about


def say_other_scales(name, trajectories, about):
    """Say where rewards were logged with another scorer than one that says `about` of itself."""
    for key, value in about.items():
        logged = {str(trajectory.get(key, value)) for trajectory in trajectories} - {str(value)}
        if logged:
            say(f"{name}: logged with {', '.join(sorted(logged))}, scored again with {value}")


def measure(trajectories, domain):
    """The metrics of one method, most of which the docstring of this file explains. Gives every trajectory its "kinds"
    and "known" (measure_turns), too. To be a column of the table, a metric needs a line in tables.result_table."""
    tasks, values = statistics.values_of_runs(trajectories, domain.outcome)               # values: (runs, tasks)
    turns = list(itertools.chain(*map(assistant_turns, trajectories)))
    metrics = {
        "n": len(trajectories),
        "tasks": len(tasks),
        "dialogues_a_task": statistics.dialogues_a_task(trajectories),
        domain.metric(trajectories): statistics.mean_over_tasks(trajectories, domain.outcome),
        **statistics.intervals(values, statistics.families_of(tasks, trajectories)),
        "mean_rounds": len(turns) / len(trajectories),
        **domain.measure(trajectories),
        **measure_turns(trajectories, domain),
        **measure_leaks(trajectories, domain),
    }
    num_tokens = [len(turn["output_ids"]) for turn in turns if "output_ids" in turn]
    if num_tokens:
        metrics["turn_tokens"] = sum(num_tokens) / len(num_tokens)
    return metrics


def assistant_turns(trajectory):
    return [turn for turn in trajectory["dialogue_history"] if turn["role"] == "assistant"]


def measure_leaks(trajectories, domain):
    """{"leaks": share of the human's replies that show the reference, "leaks_by_kind": {kind: number}}.

    Empty where the human never replied."""
    num_replies, leaks = 0, collections.Counter()
    for trajectory in trajectories:
        for turn in trajectory["dialogue_history"][1:]:
            if turn["role"] == "assistant" or turn.get("tool"):
                continue
            num_replies += 1
            kind = domain.leak_of(trajectory["task"], turn["content"])
            if kind:
                leaks[kind] += 1
    if num_replies == 0:
        return {}
    return {"leaks": leaks.total() / num_replies, "leaks_by_kind": dict(sorted(leaks.items()))}


def compare(metrics, files, baseline, domain):
    """Add to each method's metrics what it is against the baseline's dialogues."""
    for name, trajectories in files.items():
        if domain.MIN_GAP is not None:
            metrics[name] |= statistics.win_rate(trajectories, files[baseline], domain.outcome)
        difference = statistics.paired_difference(trajectories, files[baseline], domain.outcome)
        if name != baseline and difference:
            metrics[name]["against_baseline"] = {"name": baseline, **difference}
        note = statistics.pairing_note(trajectories, files[baseline])
        if note:
            metrics[name].setdefault("notes", []).append(f"against {baseline} {note}")


# ---------------------------------------------------------------------------------------------------------------------
# points of curves

def curve_points(paths, files):
    """{name: CurvePoint} of the names LABEL@N; paths: {name: its files}."""
    points = {}
    for name, trajectories in files.items():
        if "@" in name:
            points[name] = curve_point(name, paths[name][0], trajectories)
    labels_of_rounds = {point.label for point in points.values() if point.kind == "rounds"}
    for name, point in points.items():
        if point.number == "1" and point.label in labels_of_rounds:  # a first round is a best of 1, too
            points[name] = point._replace(kind="rounds")
    return points


def curve_point(name, path, trajectories):
    """The CurvePoint of a file. Its kind is "trajectories" or "rounds" where the agent's args.json says that it was
    trained on N trajectories, or in N rounds from 2 on.

    InputError where N is no positive number or, of best-of-N, not the one that the rows were made with ("best_of")."""
    label, _, number = name.rpartition("@")
    if not label or not re.fullmatch("[1-9][0-9]*", number):
        raise InputError(f"{path}: named {name}, but a name with @ must be LABEL@N, N a whole number from 1 up")
    agent = trajectories[0].get("agent")
    if agent and training_args(agent).get("num_trajectories") == int(number):
        return CurvePoint(label, number, "trajectories")
    if agent and rounds_of(agent) == int(number) > 1 and trajectories[0].get("best_of", 1) == 1:
        return CurvePoint(label, number, "rounds")
    for trajectory in trajectories:
        if trajectory.get("best_of", int(number)) != int(number):
            raise InputError(f'{path}: named {name}, N = {number}, but its "best_of" is {trajectory["best_of"]}, and '
                             f"no record of its agent tells of {number} trajectories or rounds of training")
    return CurvePoint(label, number, "best of N")


def training_args(agent):
    """The arguments of the training that made an agent; empty where no record is at hand."""
    return read_record(agent, "args").get("args", {})


def rounds_of(agent):
    """How often the agent (a folder of 04) was trained, one model made from another; not counting --method sft."""
    rounds, visited = 0, set()
    while agent not in visited:                                      # a record could name its own folder as its model
        visited.add(agent)
        args = training_args(agent)
        if "method" not in args or not isinstance(args.get("model"), str):
            break
        if args["method"] != "sft":
            rounds += 1
        agent = args["model"]
    return rounds


def curves_of(points, metrics, metric):
    """{kind: {label: {N: {metric, "ci95", with --costs those of the method}}}} of curve_points."""
    curves = {}
    for name, point in points.items():
        numbers = curves.setdefault(point.kind, {}).setdefault(point.label, {})
        numbers[point.number] = {
            metric: metrics[name][metric],
            "ci95": metrics[name]["ci95"],
            **metrics[name].get("costs", {}),
        }
    return curves


# ---------------------------------------------------------------------------------------------------------------------
# further tables, and the credit of the turns

def further_tables(metrics, metric, baseline, curves, costs):
    """{heading: text} of the tables below the comparison."""
    tables_of_lines = {
        "95 % intervals, families drawn": tables.family_lines(metrics, baseline),
        "the runs of each method": tables.run_lines(metrics, metric, baseline),
    }
    for kind, labels in curves.items():
        tables_of_lines[kind] = tables.curve_lines(labels, metric, kind)
    if costs:
        tables_of_lines["costs"] = cost_lines(costs)
    return {heading: "\n".join(lines) for heading, lines in tables_of_lines.items() if lines}


def add_credit(metrics, files, critic, device):
    """Give every trajectory "advantages" (common.score_turns) and every method's metrics their means ("credit").

    Returns what a reader of the credit has to know, as lines."""
    lines = []
    reference_line = common.reference_line(critic)
    if reference_line:
        say(reference_line)
        lines.append(reference_line)
    loaded_critic = common.load_critic(critic, common.load_whole(device))
    tokenizer = load_tokenizer(critic["folder"])
    trajectories = list(itertools.chain(*files.values()))
    credits = common.score_turns(loaded_critic, tokenizer, trajectories, MAX_TOKENS, device)
    for trajectory, advantages in zip(trajectories, credits):
        trajectory["advantages"] = advantages
    too_long = 0
    for name in files:
        metrics[name]["credit"] = credit_of(files[name])
        too_long += metrics[name]["credit"]["too_long"]
    if critic["head"] == "value":
        lines.append(f"{critic['folder']}: has a value head; a turn's credit is how it changes the value, not eq. 3")
    if too_long:
        lines.append(f"{too_long:,} dialogues are longer than {MAX_TOKENS:,} tokens: their turns have no credit")
    return lines


def agent_systems(files):
    """The agent's system prompt in each dialogue, in the order of the page's data."""
    systems = []
    for trajectories in files.values():
        for trajectory in trajectories:
            systems.append(common.shown_system(trajectory))
    return systems


# ---------------------------------------------------------------------------------------------------------------------

def main(argv=None):
    args = parse_args(argv)
    start(0)

    # everything is read and checked before anything is scored
    paths = paths_of(args.files)
    files = {name: read_runs(runs) for name, runs in paths.items()}
    first_trajectories = next(iter(files.values()))
    of_all = list(itertools.chain(*files.values()))
    common.check_ids([t["task"] for t in of_all], [t["task_id"] for t in of_all], " and ".join(paths))
    points = curve_points(paths, files)
    domain = one_domain(files)
    costs = costs_of_methods(paths, domain) if args.costs else {}
    critic = text_critic(args.critic, domain, args.reference) if args.critic else None
    states = read_candidates(args.candidates, first_trajectories[0]["task"]) if args.candidates else []
    histories = training_histories(files, args.critic)
    out = pathlib.Path(args.out)
    inputs = [*itertools.chain(*paths.values()), args.clip_model, args.critic]
    if args.candidates:
        inputs += map(str, state_files(args.candidates))
    if is_done(vars(args), out, inputs, folder=True):
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    worlds = []
    for compat in [False, True] if args.compat else [False]:
        flags = {**common.world_flags(args), "compat": compat}
        worlds.append(common.world(domain, out / "images", out / "scored", flags, device))
    begin_output(vars(args), out, inputs, folder=True)
    spent = Costs(out)

    # scores and metrics, on disk before everything that is optional
    (out / "scored").mkdir(exist_ok=True)
    about = rescore(files, domain, worlds)
    metrics = {}
    for name, trajectories in files.items():
        write_jsonl(out / "scored" / f"{name}.jsonl", trajectories)
        metrics[name] = measure(trajectories, domain) | about
        if costs:
            metrics[name]["costs"] = costs[name]
    if args.baseline:
        compare(metrics, files, args.baseline, domain)
    write_json(out / "metrics.json", metrics)

    # tables
    metric = domain.metric(first_trajectories)
    curves = curves_of(points, metrics, metric)
    headings, rows = tables.result_table(metrics, metric, domain.COLUMNS, args.baseline)
    notes = tables.note_lines(metrics, metric)
    parts = further_tables(metrics, metric, args.baseline, curves, costs)
    comparison = "\n".join([*tables.aligned(headings, rows), *notes])
    say("\n" + "\n\n".join([comparison, *parts.values()]) + "\n")
    if args.table:
        for line in tables.FORMS[args.table](headings, rows):
            say(line)

    # credit of the turns, and how far the critic of the candidates agrees with the domain's oracles
    credit = {}
    if critic:
        notes += add_credit(metrics, files, critic, device)
        write_json(out / "metrics.json", metrics)
        credit = credit_summary(metrics)
    agreements = agreement(states, domain)
    if agreements:
        write_json(out / "agreement.json", agreements)
        credit["agreement"] = tables.agreement_lines(agreements)

    # the page
    page_states = count_pairs(tables.spread(states, MAX_STATES))
    if len(page_states) < len(states):
        notes.append(f"{len(page_states):,} of the {len(states):,} states of --candidates are shown, at equal "
                     "distances")
    data = page_data(files, domain, metric, args.critic, page_states)
    if args.export:
        export(out / "export", data, agent_systems(files))
    bars = tables.bars_of(metrics, metric)
    left_out = write_report(
        out / "report.html", data, out / "images", title="Evaluation", metric_heading=tables.heading_of(metric),
        headings=headings[1:], table=[{"name": row[0], "cells": row[1:]} for row in rows], bars=list(bars.values()),
        notes=notes, lines=list(parts.items()), credit=credit, hints=hint_lines(args, histories),
        plots=report_plots(metrics, bars, metric, files, curves, histories))
    if left_out:
        say(f"report.html: {left_out}")
    spent.record()
    (out / "COMPLETED").touch()
    say(f"writes {out / 'metrics.json'}, {out / 'report.html'}")


if __name__ == "__main__":
    run_stage(main, ColBenchError)
