"""Stage 5: score trajectory files and compare them in one table.

Reads   NAME=trajectories.jsonl … (02); the logged rewards are not trusted: every answer is scored again.
Writes  metrics.json, scored/NAME.jsonl (the trajectories with fresh rewards), report.html.

success      share of the dialogues whose answer passes all tests of its task
tests        mean share of the tests passed
rounds       mean number of agent turns
all known    template tasks: share of the dialogues in which the agent had found out every fact that matters before its
             last turn; "when known": success among these
± and [..]   95 % intervals by bootstrap over tasks (all dialogues of a task are drawn together); a difference against
             --baseline is paired: the same drawn tasks on both sides

--compat adds what the published scorer says of the same answers: no imports, helpers or recursion, words that cost all
tests, objects that claim to be equal. "ends_evaluation" counts the answers that would have ended or hung it.

--gates MODEL also prints what a base model must pass before any claim is made with it: the log-probability of turns
without and with c in front (needed and useless questions of the logged dialogues; the right answer, and another task's
answer, as a first turn).

    python 05_evaluate.py base=out/base.jsonl sweet=out/sweet.jsonl --baseline base --out out/report
"""
import html
import pathlib

import numpy as np

import common

NUM_RESAMPLES = 2000


# ---------------------------------------------------------------------------------------------------------------------
# statistics

def task_means(trajectories, value):
    """{task_id: mean of value(trajectory) over its dialogues}."""
    by_task = {}
    for trajectory in trajectories:
        by_task.setdefault(trajectory["task_id"], []).append(float(value(trajectory)))
    return {task: sum(values) / len(values) for task, values in by_task.items()}


def bootstrap_interval(values, seed=0):
    """95 % percentile interval [low, high] of the mean of `values` (one a task), resampling tasks."""
    values = np.asarray(values, dtype=np.float64)                                          # (tasks,)
    draws = np.random.default_rng(seed).integers(len(values), size=(NUM_RESAMPLES, len(values)))
    return [float(x) for x in np.percentile(values[draws].mean(1), [2.5, 97.5])]


def success(trajectory):
    return trajectory["reward"] == 1


def paired_difference(trajectories, baseline):
    """{"difference", "ci95", "n"} of success over the tasks that both have; None without common tasks."""
    ours, theirs = task_means(trajectories, success), task_means(baseline, success)
    differences = [ours[task] - theirs[task] for task in sorted(ours) if task in theirs]
    if not differences:
        return None
    return {"difference": sum(differences) / len(differences), "ci95": bootstrap_interval(differences),
            "n": len(differences)}


# ---------------------------------------------------------------------------------------------------------------------
# scoring

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


def measure(trajectories):
    """The metrics of one file (see above)."""
    successes = task_means(trajectories, success)
    agent = [[turn for turn in t["dialogue_history"] if turn["role"] == "assistant"] for t in trajectories]
    metrics = {"n": len(trajectories), "tasks": len(successes),
               "success_rate": sum(map(success, trajectories)) / len(trajectories),
               "ci95": bootstrap_interval(list(successes.values())),
               "tests_passed": sum(t["reward"] for t in trajectories) / len(trajectories),
               "tests_passed_ci95": bootstrap_interval(list(task_means(trajectories, lambda t: t["reward"]).values())),
               "mean_rounds": sum(map(len, agent)) / len(agent),
               "forced_answers": sum(common.MARKER not in turns[-1]["content"] for turns in agent) / len(agent)}
    if all("facts" in t["task"] for t in trajectories):
        kinds, known = {}, []
        for trajectory in trajectories:
            history = trajectory["dialogue_history"]
            for i, turn in enumerate(history):
                if turn["role"] == "assistant":
                    kind = common.action_kind(trajectory["task"], history[:i], turn["content"])
                    kinds[kind] = kinds.get(kind, 0) + 1
            known.append(common.all_known(trajectory["task"], history[:-1]))
        wins = [success(t) for t, k in zip(trajectories, known) if k]
        metrics |= {"all_known": sum(known) / len(known), "success_when_known": sum(wins) / max(1, len(wins)),
                    "turns": {kind: count / sum(kinds.values()) for kind, count in sorted(kinds.items())}}
    return metrics


def table(metrics, baseline):
    """The comparison as lines of text."""
    compat = any("success_rate_compat" in m for m in metrics.values())
    lines = [f"{'':12s} {'n':>5s}  {'success':>7s} {'95 %':>15s}  {'tests':>5s}  {'rounds':>6s}  {'all known':>9s}  "
             f"{'when known':>10s}" + ("  published scorer: success, tests" if compat else "") +
             (f"  against {baseline}" if baseline else "")]
    for name, m in metrics.items():
        known = [f"{m[key]:.3f}" if key in m else "-" for key in ("all_known", "success_when_known")]
        line = (f"{name:12s} {m['n']:5d}  {m['success_rate']:7.3f} [{m['ci95'][0]:.3f}, {m['ci95'][1]:.3f}]  "
                f"{m['tests_passed']:5.3f}  {m['mean_rounds']:6.2f}  {known[0]:>9s}  {known[1]:>10s}")
        if compat:
            line += f"  {m['success_rate_compat']:25.3f}, {m['tests_passed_compat']:.3f}"
        if "against_baseline" in m:
            d = m["against_baseline"]
            line += f"  {d['difference']:+.3f} [{d['ci95'][0]:+.3f}, {d['ci95'][1]:+.3f}]"
        lines.append(line)
    return lines


# ---------------------------------------------------------------------------------------------------------------------
# gates: does a model read c?

def print_gates(trajectories, name, device):
    """Mean summed log-probability of turns under a model, without c and with c in front."""
    model, tokenizer = common.load_model(name, device)
    turns = []                                                       # (what it is, history, turn, task)
    first_of_family = {}
    for trajectory in trajectories[:200]:
        task, history = trajectory["task"], trajectory["dialogue_history"]
        for i, turn in enumerate(history):
            kind = common.action_kind(task, history[:i], turn["content"]) if turn["role"] == "assistant" else "user"
            if kind in ("needed", "idle", "repeat", "vague"):
                turns.append((kind, history[:i], turn["content"], task))
        other = first_of_family.setdefault(task["family"], task)
        for what, answer in (("right answer at once", task), ("wrong answer at once", other)):
            if what.startswith("right") or answer["ground_truth"] != task["ground_truth"]:
                turns.append((what, history[:1], f"{common.MARKER}\n{answer['ground_truth']}", task))
    columns = []
    for with_c in (False, True):
        items = [common.trajectory_rows(tokenizer, [(common.prompt_text(tokenizer, history, trajectory["max_rounds"]),
                                                     common.encode(tokenizer, text) + [tokenizer.eos_token_id])],
                                        task["ground_truth"] if with_c else None) for _, history, text, task in turns]
        columns.append([logps.sum().item() for logps in common.logps_of(model, items, 16384, device, "float32")])
    print(f"\n{name}: log-probability of a turn\n{'':22s} {'n':>5s}  {'without c':>9s}  {'with c':>9s}")
    for kind in sorted({turn[0] for turn in turns}):
        chosen = [i for i, turn in enumerate(turns) if turn[0] == kind]
        means = [sum(column[i] for i in chosen) / len(chosen) for column in columns]
        print(f"{kind:22s} {len(chosen):5d}  {means[0]:9.2f}  {means[1]:9.2f}")


# ---------------------------------------------------------------------------------------------------------------------
# report

STYLE = ("body{font:15px/1.45 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
         "pre{background:#f5f5f2;padding:.7rem;overflow-x:auto}.user{color:#555}.assistant{color:#0a4a7a}"
         "details{margin:.6rem 0}p{margin:.2rem 0;white-space:pre-wrap}")


def report(metrics, lines, files):
    """One HTML page: the table, and for every file the dialogues of the first tasks."""
    parts = [f"<!doctype html><meta charset=utf-8><title>Evaluation</title><style>{STYLE}</style><h1>Evaluation</h1>",
             f"<pre>{html.escape(chr(10).join(lines))}</pre>"]
    for name, trajectories in files.items():
        if "turns" in metrics[name]:
            shares = ", ".join(f"{kind} {share:.1%}" for kind, share in metrics[name]["turns"].items())
            parts.append(f"<h2>{html.escape(name)}</h2><p>Agent turns: {html.escape(shares)}</p>")
        for trajectory in trajectories[:10]:
            summary = f"{trajectory['task_id']}: reward {trajectory['reward']:.1f}"
            parts.append(f"<details><summary>{html.escape(summary)}</summary>")
            for turn in trajectory["dialogue_history"]:
                role = "assistant" if turn["role"] == "assistant" else "user"
                parts.append(f"<p class={role}><b>{role}:</b> {html.escape(turn['content'])}</p>")
            parts.append(f"<p>reference</p><pre>{html.escape(trajectory['task']['ground_truth'])}</pre></details>")
    return "\n".join(parts) + "\n"


# ---------------------------------------------------------------------------------------------------------------------

def parse_args(argv=None):
    parser = common.argument_parser(__doc__)
    parser.add_argument("files", nargs="+", metavar="NAME=FILE", help="trajectory files (02), each with a name")
    parser.add_argument("--baseline", metavar="NAME", help="compare the others with this one")
    parser.add_argument("--compat", action="store_true", help="show the published scorer's verdicts as well")
    common.add_scorer(parser)
    parser.add_argument("--gates", metavar="MODEL", help="print a base model's gates, on dialogues of the first file")
    parser.add_argument("--out", required=True, help="folder to write")
    common.add_overwrite(parser)
    args = parser.parse_args(argv)
    for argument in args.files:
        if not all(argument.partition("=")):
            parser.error(f"{argument}: must be NAME=FILE")
        if "/" in argument.partition("=")[0]:
            parser.error(f"{argument}: a name cannot contain /")
    names = [argument.partition("=")[0] for argument in args.files]
    if len(set(names)) < len(names):
        parser.error("every file needs a name of its own")
    if args.baseline and args.baseline not in names:
        parser.error(f"--baseline {args.baseline}: none of {', '.join(names)}")
    return args


def main(argv=None):
    args = parse_args(argv)
    paths = dict(argument.split("=", 1) for argument in args.files)
    files = {name: common.read_trajectories(path) for name, path in paths.items()}
    out = pathlib.Path(args.out)
    if common.claim_output(args, out, [*paths.values(), args.gates], folder=True):
        return
    (out / "scored").mkdir(exist_ok=True)
    metrics = {}
    with common.Scorer(args.unsafe_scorer) as scorer:
        for name, trajectories in files.items():
            scoring = rescore(trajectories, scorer)
            if scoring["not_gradeable_tests"]:
                print(f"{name}: {scoring['not_gradeable_tests']} tests of {scoring['not_gradeable_tasks']} tasks "
                      "cannot be graded (the reference raises, is random, or returns what cannot be compared); no "
                      "answer passes them")
            metrics[name] = measure(trajectories) | scoring
            if args.compat:
                with common.Scorer(args.unsafe_scorer, compat=True) as published:
                    metrics[name] |= published_verdicts(trajectories, published)
            common.write_jsonl(out / "scored" / f"{name}.jsonl", trajectories)
    for name in files:
        if args.baseline and name != args.baseline:
            difference = paired_difference(files[name], files[args.baseline])
            if difference:
                metrics[name]["against_baseline"] = {"name": args.baseline, **difference}
    lines = table(metrics, args.baseline)
    print("\n" + "\n".join(lines) + "\n")
    if args.gates:
        print_gates(next(iter(files.values())), args.gates, "cpu")
    (out / "report.html").write_text(report(metrics, lines, files), encoding="utf-8")
    common.write_json(out / "metrics.json", metrics)
    (out / "COMPLETED").touch()
    print(f"writes {out / 'metrics.json'}, {out / 'report.html'}")


if __name__ == "__main__":
    common.run_stage(main)
