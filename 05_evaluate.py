"""Stage 5: score trajectory files, compare them in one table, and show every turn's credit in a page.

Reads   NAME=trajectories.jsonl … (02); the logged rewards are not trusted: every answer is scored again.
Writes  metrics.json, scored/NAME.jsonl (the trajectories with fresh rewards), report.html, and by what is asked for
        curves.json, critics.json, agreement.json, images/ (of pages), export/.

n, rounds, tests         dialogues; mean number of agent turns; mean share of the tests passed
success                  share of the dialogues whose answer passes all tests; of pages the mean similarity of the
                         screenshots of answer and reference, by clip (the paper's) or by pixels: two scales. As its
                         interval and the differences it is the mean over tasks of the mean of a task's dialogues (of
                         several runs their mean); the other columns are means over dialogues
leaks                    share of the human's replies that show the reference
all known, when known    template tasks: share of the dialogues in which the agent had found out all that matters
                         before its last turn; success among these
no page, not rendered    answers that are no page; pages that gave no screenshot (a black one counts)
wins, ties               graded returns: share of better answers against the --baseline's over all pairs of a task, a
                         tie (within 1e-6) half; then the mean over tasks
[..]                     95 % interval by bootstrap over tasks, of several runs (NAME=FILE,FILE,…) over runs as well;
                         against --baseline paired by task and run; "families drawn": over families, then their tasks
LABEL@N=FILE             points of a curve: of best-of-N (02 --best-of N), of N training trajectories (04), or of N
                         rounds of training (an agent of 04 that was made from one of N - 1)

docs/results.md says what the intervals leave out, docs/report.md how to read the page and what --critic adds to it.

    python 05_evaluate.py base=out/base.jsonl sweet=out/sweet.jsonl --baseline base --critic out/critic \
        --candidates out/sweet --costs --out out/report
    python 05_evaluate.py base=out/base.jsonl --critics lm=out/critic --returns out/branches.jsonl --out out/critics
"""
import asyncio
import collections
import glob
import math
import os
import pathlib
import re

import torch

import common
from colbench import ColBenchError, domain_of, task_id
from lib import schema, statistics, tables
from lib.arguments import add_overwrite, add_reference, add_world, argument_parser, text_flag
from lib.costs import compare_costs, cost_lines, Costs, read_record
from lib.credit import agreement, count_pairs, credit_of, credit_summary, measure_turns, read_states
from lib.export import export
from lib.models import encode, load_model, load_tokenizer, tokenizer_name
from lib.plots import report_plots
from lib.report import page_data, spread, write_report
from lib.runtime import begin_output, InputError, is_done, read_jsonl, run_stage, say, start, write_json, write_jsonl

MAX_TOKENS = 16384               # of a batch without gradients, and of a dialogue whose turns get credit


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
    """Give every trajectory of all files fresh domain.SCORE_KEYS ("reward", …) and "failed" by one World after the
    other (the second one: the published scorer's verdicts). Returns what the first scorer says of itself."""
    everything = [trajectory for own in files.values() for trajectory in own]
    pairs = [(t["task"], t["answer"]) for t in everything]
    for world in worlds:
        with world:
            for name, own in files.items():
                for key, value in world.about.items():
                    if logged := {str(t[key]) for t in own if t.get(key, value) != value}:
                        say(f"{name}: logged with {', '.join(sorted(logged))}, scored again with {value}")
            scores = asyncio.run(world.score(pairs, explain=True))
        for trajectory, fresh in zip(everything, scores):
            if world is worlds[0]:
                for key in (*domain.SCORE_KEYS, "failed", "advantages"):
                    trajectory.pop(key, None)                        # of an earlier evaluation
            trajectory |= fresh
    return worlds[0].about


def measure(trajectories, domain):
    """The metrics of one file (see above)."""
    means = [statistics.task_means(own, domain.outcome) for own in statistics.by_run(trajectories)]
    families, n = statistics.families_of(trajectories), len(trajectories)
    agent = [[turn for turn in t["dialogue_history"] if turn["role"] == "assistant"] for t in trajectories]
    metrics = {"n": n, "tasks": len(means[0]), "dialogues_a_task": statistics.dialogues_a_task(trajectories),
               domain.metric(trajectories): statistics.mean_over_tasks(trajectories, domain.outcome),
               **statistics.intervals([[*own.values()] for own in means], [families[task] for task in means[0]]),
               "mean_rounds": sum(map(len, agent)) / n, **domain.measure(trajectories),
               **measure_turns(trajectories, domain)}
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
            metrics[name] |= statistics.win_rate(trajectories, files[baseline], domain.outcome)
        difference = statistics.paired_difference(trajectories, files[baseline], domain.outcome)
        if name != baseline and difference:
            metrics[name]["against_baseline"] = {"name": baseline, **difference}
        if note := statistics.pairing_note(trajectories, files[baseline]):
            metrics[name].setdefault("notes", []).append(f"against {baseline} {note}")


# ---------------------------------------------------------------------------------------------------------------------
# points of curves

def curve_point(name, path, trajectories):
    """("sweet", "8", "best of N") of a file named sweet@8, None of a name without @; with "trajectories" or "rounds"
    where the agent was trained on so many trajectories, or in so many rounds from 2 on (its args.json). InputError
    where N is no positive number or, of best-of-N, not the one that the rows were made with ("best_of")."""
    if "@" not in name:
        return None
    label, _, number = name.rpartition("@")
    if not label or not re.fullmatch("[1-9][0-9]*", number):
        raise InputError(f"{path}: named {name}, but a name with @ must be LABEL@N, N a whole number from 1 up")
    agent = trajectories[0].get("agent")
    if agent and read_record(agent, "args").get("args", {}).get("num_trajectories") == int(number):
        return label, number, "trajectories"
    if agent and rounds_of(agent) == int(number) > 1 and trajectories[0].get("best_of", 1) == 1:
        return label, number, "rounds"
    for trajectory in trajectories:
        if trajectory.get("best_of", int(number)) != int(number):
            raise InputError(f'{path}: named {name}, N = {number}, but its "best_of" is {trajectory["best_of"]}')
    return label, number, "best of N"


def rounds_of(agent):
    """How often the agent (a folder of 04) was trained, one model made from another; not counting --method sft."""
    rounds, seen = 0, set()
    while agent not in seen:                                         # a record could name its own folder as its model
        seen.add(agent)
        args = read_record(agent, "args").get("args", {})
        if "method" not in args or not isinstance(args.get("model"), str):
            return rounds
        rounds += args["method"] != "sft"
        agent = args["model"]
    return rounds


# ---------------------------------------------------------------------------------------------------------------------
# gates: does a model read c?

def gate_lines(trajectories, domain, name, device):
    """Mean summed log-probability of turns under a model, without c and with c in front: of questions of the logged
    dialogues (after measure_turns) by kind, of the right answer and of another task's answer as a first turn."""
    model, tokenizer = load_model(name, device)
    turns = []                                                       # (what it is, history, turn, trajectory)
    first_of_family = {}
    for trajectory in trajectories[:200]:
        task, history = trajectory["task"], trajectory["dialogue_history"]
        agent = [i for i, turn in enumerate(history) if turn["role"] == "assistant"]
        turns += [(kind, history[:i], history[i]["content"], trajectory) for i, kind in zip(agent, trajectory["kinds"])
                  if "answer" not in kind]
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
        columns.append([logps.sum().item() for logps in common.turn_scores_of(model, items, MAX_TOKENS, device)])
    rows = []
    for kind in sorted({turn[0] for turn in turns}):
        chosen = [i for i, turn in enumerate(turns) if turn[0] == kind]
        rows.append([kind, str(len(chosen)), *(f"{sum(column[i] for i in chosen) / len(chosen):.2f}"
                                               for column in columns)])
    return [f"{name}: log-probability of a turn", *tables.aligned(["", "n", "without c", "with c"], rows)]


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
            if row.get("tokenizer") != critic["tokenizer_name"]:
                raise InputError(f"{critic['folder']}: its tokenizer is not that of the agent in {path}")
        i = row["branch"]["turn"]
        turns = row["dialogue_history"][i:i + 1]
        if not turns or not {"input", "output", "output_ids"} <= turns[0].keys():
            raise InputError(f"{path}: task {row['task_id']}, sample {row['sample']}: turn {i}, of which its "
                             '"branch" speaks, is no turn that the agent sampled')
        turn, own = row["dialogue_history"][i], states.setdefault((row["task_id"], row["branch"]["sample"], i), {})
        own.setdefault(tuple(turn["output_ids"]), (turn, row, []))[2].append(float(domain.outcome(row)))
    points = []
    for (_, _, i), own in states.items():
        turns, rows, returns = zip(*own.values())
        returns = [sum(values) / len(values) for values in returns]
        if len(set(returns)) > 1:
            points.append((common.DecisionPoint(
                turns[0]["input"], rows[0]["task"], rows[0]["dialogue_history"][:i], [t["output_ids"] for t in turns],
                [t["content"] for t in turns]), returns))
    if not points:
        raise InputError(f"{path}: no state whose candidates differ in return; raise --branch or --samples of 02")
    return points


def measure_critic(critic, trajectories, branches, path, device):
    """{"pair_accuracy", "num_pairs"}, with `branches` also {"rank_correlation", "ci95", "num_states"}, of a critic
    (common.load_critic)."""
    tokenizer = load_tokenizer(critic["folder"])
    pairs = common.trajectory_pairs(trajectories, path)
    examples = common.trajectory_examples(trajectories, pairs, tokenizer, critic["privileged"])
    ref_examples = common.reference_examples(critic, examples, trajectories, pairs, tokenizer)
    ref = common.example_scores(critic["reference"], ref_examples, MAX_TOKENS, device)
    found = {"pair_accuracy": common.pair_accuracy(critic["model"], examples, ref, critic, MAX_TOKENS, device),
             "num_pairs": len(pairs)}
    if branches:
        (points, returns), by_task = zip(*branches), {}
        scored = common.score_actions(critic, tokenizer, points, MAX_TOKENS, device)
        for point, own, scores in zip(points, returns, scored):
            by_task.setdefault(task_id(point.task), []).append(statistics.rank_correlation(scores, own))
        mean, interval = statistics.mean_of_groups(by_task)
        found |= {"rank_correlation": mean, "ci95": interval, "num_states": len(points)}
    return found


def critic_lines(critics, trajectories, branches, path, out, device):
    """The table of --critics, also kept in critics.json."""
    found = {name: measure_critic(common.load_critic(critic, common.load_whole(device)), trajectories, branches, path,
                                  device) for name, critic in critics.items()}
    write_json(out / "critics.json", found)
    rows = [[name, f"{m['pair_accuracy']:.3f}", str(m["num_pairs"]), *(
        [f"{m['rank_correlation']:.3f}", tables.interval(m["ci95"], "+"), str(m["num_states"])] if branches else [])]
        for name, m in found.items()]
    more = ["rank correlation", "95 %", "states"] if branches else []
    return [*tables.aligned(["critic", "pair accuracy", "pairs", *more], rows),
            "one training run of each critic: the intervals leave other seeds out"]


# ---------------------------------------------------------------------------------------------------------------------
# the page: credit of the turns, and what else it shows

def text_critic(folder, domain, reference):
    """common.read_critic of one that reads text."""
    critic = common.read_critic(folder, None, domain, reference)
    if critic.get("visual"):
        raise InputError(f"{folder}: --critic and --critics take critics that read text, and this one sees images")
    return critic


def add_credit(metrics, files, critic, domain, device):
    """Give every trajectory "advantages" (common.score_turns) and every method's metrics their means ("credit")."""
    critic = common.load_critic(critic, common.load_whole(device))
    everything = [trajectory for own in files.values() for trajectory in own]
    credits = common.score_turns(critic, load_tokenizer(critic["folder"]), everything, MAX_TOKENS, device)
    for trajectory, advantages in zip(everything, credits):
        trajectory["advantages"] = advantages
    for name, own in files.items():
        metrics[name]["credit"] = credit_of(own)


NUMBERS = schema.table_of(schema.number(-math.inf, math.inf))
METRICS = schema.record({"step": int})


def metrics_row(value):
    """The kind of a row of metrics.jsonl: numbers alone, one of them the step."""
    return METRICS(value) or NUMBERS(value)


def training_histories(files, critic):
    """{name: rows of metrics.jsonl} of the models that are at hand: the agents of the files, and the critic."""
    models = {"critic": critic} | {name: own[0].get("agent") for name, own in reversed(files.items())}
    paths = {folder: (name, pathlib.Path(folder) / "metrics.jsonl") for name, folder in models.items() if folder}
    return {name: read_jsonl(path, metrics_row) for name, path in reversed(paths.values()) if path.is_file()}


def agent_systems(files):
    """The agent's system prompt in each dialogue, in the order of the page's data."""
    systems = []
    for trajectories in files.values():
        for trajectory in trajectories:
            systems.append(common.system_prompt(trajectory) or common.our_system(trajectory))
    return systems


# ---------------------------------------------------------------------------------------------------------------------

def parse_args(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument("files", nargs="+", metavar="NAME=FILE",
                        help="trajectory files (02), each with a name; FILE,FILE,…: runs of one method; LABEL@N: a "
                        "point of a best-of-N curve")
    parser.add_argument("--out", type=text_flag, required=True, help="folder to write")
    parser.add_argument("--baseline", type=text_flag, metavar="NAME", help="compare the others with this one")
    parser.add_argument("--compat", action="store_true", help="show the published scorer's verdicts as well")
    parser.add_argument("--costs", action="store_true", help="show what it took to make each method")
    parser.add_argument("--gates", type=text_flag, metavar="MODEL",
                        help="print a base model's gates, on dialogues of the first file")
    parser.add_argument("--critics", nargs="+", metavar="NAME=DIR",
                        help="compare these critics, on dialogues of the first file")
    parser.add_argument("--returns", type=text_flag, metavar="FILE",
                        help="--critics: dialogues of 02 --branch on the first file")
    parser.add_argument("--critic", type=text_flag, metavar="DIR",
                        help="the page shows each turn's credit by this critic (03)")
    add_reference(parser)
    parser.add_argument("--candidates", type=text_flag, metavar="PATH",
                        help="the page shows SWEET's candidates: 04's output folder or "
                        "its scored.jsonl, with pairs.jsonl beside it")
    parser.add_argument("--export", choices=["messages"], help="write every dialogue for other programs as well")
    add_world(parser)
    add_overwrite(parser)
    args = parser.parse_args(argv)
    if args.reference and not (args.critic or args.critics):
        parser.error("--reference goes with --critic or --critics")
    if args.returns and not args.critics:
        parser.error("--returns needs --critics")
    for argument in args.files + (args.critics or []):
        if not all(argument.partition("=")):
            parser.error(f"{argument}: must be NAME=PATH")
        name = argument.partition("=")[0]
        if "/" in name or name in (".", ".."):
            parser.error(f"{argument}: a name cannot contain /, or be . or ..")
        if len(os.fsencode(name)) > 200:                            # it names files
            parser.error(f"{name[:40]} …: a name cannot be longer than 200 bytes")
    names = [argument.partition("=")[0] for argument in args.files]
    if len(set(names)) < len(names):
        parser.error("every file needs a name of its own")
    if args.baseline and args.baseline not in names:
        parser.error(f"--baseline {args.baseline}: none of {', '.join(names)}")
    return args


def output_files(names):
    """Patterns of all files that this stage writes into its folder, for methods of these names."""
    names = list(map(glob.escape, names))
    return ["metrics.json", "curves.json", "critics.json", "agreement.json", "report.html", "images/*.png",
            *(f"scored/{name}.jsonl" for name in names), *(f"export/{name}.jsonl" for name in names)]


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
    repeated = {point[0] for point in points.values() if point and point[2] == "rounds"}
    domain = one_domain(files, args)
    first, first_path = next(iter(files.values())), args.files[0].partition("=")[2]
    folders = dict(argument.split("=", 1) for argument in args.critics or [])
    critics = {name: text_critic(folder, domain, args.reference) for name, folder in folders.items()}
    for critic in critics.values():
        critic["tokenizer_name"] = tokenizer_name(load_tokenizer(critic["folder"]))
    branches = read_branches(args.returns, domain, critics) if args.returns else None
    if critics:
        common.trajectory_pairs(first, first_path)                   # errors now, not after the scoring
    programs = "rules", common.UNTRAINED, *domain.PLAYERS, *domain.ORACLES
    costs = compare_costs({name: own[0] for name, own in runs.items()}, programs) if args.costs else {}
    critic = text_critic(args.critic, domain, args.reference) if args.critic else None
    states = read_states(args.candidates) if args.candidates else []
    for row in states:
        common.check_task(row["task"], f"{args.candidates}: task {row['task_id']}", first[0]["task"])
    histories = training_histories(files, args.critic)
    out, inputs = pathlib.Path(args.out), [path for own in runs.values() for path in own]
    inputs += [args.gates, args.returns, args.clip_model, *folders.values(), args.critic, args.candidates]
    if is_done(args, out, inputs, folder=True):
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    worlds = [common.world(domain, args, out / "images", out / "scored", device=device, compat=compat)
              for compat in (False, True)[:1 + args.compat]]
    begin_output(args, out, inputs, output_files(runs))
    spent = Costs(out, folder=True)
    (out / "scored").mkdir(exist_ok=True)
    about = rescore(files, domain, worlds)
    metrics, curves, metric = {}, {}, domain.metric(first)           # curves: {kind: {label: {N: a point}}}
    for name, trajectories in files.items():
        write_jsonl(out / "scored" / f"{name}.jsonl", trajectories)
        metrics[name] = measure(trajectories, domain) | about | ({"costs": costs[name]} if costs else {})
        if points[name]:
            label, number, kind = points[name]
            if label in repeated and number == "1":                 # a first round is a best of 1, too
                kind = "rounds"
            own = curves.setdefault(kind, {}).setdefault(label, {})
            own[number] = {key: metrics[name][key] for key in (metric, "ci95")} | costs.get(name, {})
    if args.baseline:
        compare(metrics, files, args.baseline, domain)
    write_json(out / "metrics.json", metrics)                        # before everything that is optional
    headings, rows = tables.result_table(metrics, metric, domain.COLUMNS, args.baseline)
    notes = tables.note_lines(metrics, metric)
    parts = [("95 % intervals, families drawn", tables.family_lines(metrics, args.baseline)),
             ("the runs of each method", tables.run_lines(metrics, metric, args.baseline)),
             *((kind, tables.curve_lines(own, metric, kind)) for kind, own in curves.items()),
             ("costs", cost_lines(costs) if costs else [])]
    parts = [(heading, lines) for heading, lines in parts if lines]
    say("\n" + "\n\n".join("\n".join(lines) for lines in [tables.aligned(headings, rows) + notes, *(
        lines for _, lines in parts)]) + "\n")
    if curves:
        drawn = {label: {} for labels in curves.values() for label in labels}
        for labels in curves.values():
            for label, own in labels.items():
                drawn[label] |= {n: {key: point[key] for key in (metric, "ci95")} for n, point in own.items()}
        write_json(out / "curves.json", drawn)
    forms = [line for line in map(common.reference_line, [*critics.values(), *([critic] if critic else [])]) if line]
    say(*dict.fromkeys(forms))
    notes += dict.fromkeys(forms)
    if critic:
        add_credit(metrics, files, critic, domain, device)
        write_json(out / "metrics.json", metrics)
        if critic["head"] == "value":
            notes.append(f"{args.critic}: has a value head; a turn's credit is how it changes the value, not eq. 3")
        if too_long := sum(m["credit"]["too_long"] for m in metrics.values()):
            notes.append(f"{too_long:,} dialogues are longer than {MAX_TOKENS:,} tokens: their turns have no credit")
    if found := agreement(states, domain):
        write_json(out / "agreement.json", found)
    shown = count_pairs(spread(states))
    if len(shown) < len(states):
        notes.append(f"{len(shown):,} of the {len(states):,} states of --candidates are shown, at equal distances")
    data = page_data(files, domain, metric, args.critic, shown)
    if args.export:
        export(out / "export", data, agent_systems(files))
    credit = credit_summary(metrics) if critic else {}
    bars = {name: {"value": m[metric], "low": m["ci95"][0], "high": m["ci95"][1]} for name, m in metrics.items()}
    left_out = write_report(
        out / "report.html", data, out / "images", title="Evaluation", metric_heading=tables.heading_of(metric),
        notes=notes, headings=headings[1:], table=[{"name": row[0], "cells": row[1:]} for row in rows],
        bars=list(bars.values()), lines=[(heading, "\n".join(lines)) for heading, lines in parts],
        plots=report_plots(metrics, bars, metric, files, curves, histories),
        credit={**credit, "agreement": tables.agreement_lines(found)} if credit or found else None,
        hints=tables.hint_lines(args, files, histories))
    if left_out:
        say(f"report.html: {left_out}")
    if args.gates:
        say("\n".join(gate_lines(first, domain, args.gates, "cpu")))
    if critics:
        say("\n".join(critic_lines(critics, first, branches, first_path, out, device)))
    spent.record()
    (out / "COMPLETED").touch()
    say(f"writes {out / 'metrics.json'}, {out / 'report.html'}")


if __name__ == "__main__":
    run_stage(main, ColBenchError)
