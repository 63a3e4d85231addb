"""Tables as lines of aligned text, and those that 05 prints and shows in its page, from what stands in metrics.json."""
import numpy as np


def aligned(headings, rows):
    """Lines of a table: cells (texts) below each other, the first column to the left, the others to the right."""
    rows = [headings, *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(headings))]
    return ["  ".join(f"{cell:{'>' if column else '<'}{width}s}" for column, (cell, width) in
                      enumerate(zip(row, widths))).rstrip() for row in rows]


def finite(value):
    """A number that can be drawn and that every reader of JSON takes; None for NaN, an infinite or a huge one, and for
    what is no number."""
    return value if isinstance(value, (int, float)) and abs(value) <= 1e15 else None


def interval(bounds, sign=""):
    """"[.12, .34]" with three digits; sign "+": with signs, of differences."""
    return f"[{bounds[0]:{sign}.3f}, {bounds[1]:{sign}.3f}]"


def heading_of(metric):
    """What a table calls a metric: "success_rate" -> "success"."""
    return metric.removesuffix("_rate").replace("_", " ")


def result_table(metrics, metric, columns, baseline):
    """(headings, rows of cells) of the comparison."""
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
    return ["", *(heading for _, heading, _ in columns), *([f"against {baseline}"] if baseline else [])], rows


def note_lines(metrics, metric):
    """What a reader of the comparison has to know, and what its intervals leave out."""
    lines = [f"{name}: {note}" for name, m in metrics.items() for note in m.get("notes", [])]
    unequal = [name for name, m in metrics.items() if m["dialogues_a_task"][0] < m["dialogues_a_task"][1]]
    if unequal:
        lines.append(f"tasks of {', '.join(unequal)} have unequal numbers of dialogues: {heading_of(metric)}, its "
                     "interval and differences are means over tasks, the other columns over dialogues")
    lines += [f"similarity of screenshots: {m['similarity']}" for m in [*metrics.values()][:1] if "similarity" in m]
    single = [name for name, m in metrics.items() if "runs" not in m]
    which = "one run each" if len(single) == len(metrics) else f"one run of {', '.join(single)}"
    lines += [f"{which}: the intervals leave other seeds out"] if single else []
    few = [name for name, m in metrics.items() if "runs" in m and len(m["runs"]) < 5]
    if few:
        lines.append(f"fewer than five runs of {', '.join(few)}: where runs differ much the intervals are too narrow "
                     "(docs/results.md, What the intervals cover)")
    if not any("ci95_families" in m for m in metrics.values()):
        lines.append('no intervals over families: a task states no "family", or all state the same')
    return lines


def family_lines(metrics, baseline):
    """The intervals over families, where there are any."""
    if not any("ci95_families" in m for m in metrics.values()):
        return []
    rows = [[name, *(interval(own["ci95_families"], sign) if "ci95_families" in own else "" for own, sign in
                     ((m, ""), (m.get("against_baseline", {}), "+"))[:1 + bool(baseline)])]
            for name, m in metrics.items()]
    return aligned(["95 %, families drawn", "own rate", *([f"against {baseline}"] if baseline else [])], rows)


def run_lines(metrics, metric, baseline):
    """The runs of every name that has several: the metric and the difference, their mean, and each run's."""
    rows = []
    for what in (heading_of(metric), f"against {baseline}"):
        for name, m in metrics.items():
            own = m.get("against_baseline", {}) if what.startswith("against ") else m
            if "runs" in own:
                rows.append([name, what, f"{np.mean(own['runs']):+.3f}", " ".join(f"{x:+.3f}" for x in own["runs"])])
    return aligned(["over the runs", "", "mean", "each run"], rows) if rows else []


def curve_lines(curves, metric, what="best of N"):
    """A row a label, a column an N; curves: {label: {"N": {metric, "ci95"}}}."""
    sizes = sorted({n for points in curves.values() for n in points}, key=int)
    return aligned([what, *sizes], [[label, *(f"{points[n][metric]:.3f}" if n in points else "-" for n in sizes)]
                                           for label, points in curves.items()])


def agreement_lines(found):
    """A line for each oracle of credit.agreement."""
    return [f"{oracle}: rank correlation of the critic's advantages with its scores {m['rank_correlation']:+.3f} "
            f"{interval(m['ci95'], '+')} over {m['num_states']:,} states of --candidates; of "
            f"{m['num_pairs']:,} pairs {m['right']:.1%} right, {m['wrong']:.1%} wrong, the rest equal to it"
            for oracle, m in found.items()]


def hint_lines(args, files, histories):
    """Which flag adds what is not in the page."""
    hints = [(args.critic, "--critic DIR (of 03_train_critic.py) adds the credit of every turn"),
             (args.candidates, "--candidates DIR (of 04_train_policy.py --method sweet) adds the candidates of states"),
             (args.baseline or len(files) < 2, "--baseline NAME adds the differences against a method"),
             (args.costs, "--costs adds what it took to make each method"),
             (histories, "training curves: no agent's folder with a metrics.jsonl is at hand")]
    return [hint for there, hint in hints if not there]
