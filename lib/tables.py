"""Tables as lines of aligned text, and those that 05 prints and shows in its page, from what stands in metrics.json.

metrics: {name of a method: its metrics}; metric: the key of the one that methods are compared by."""
import numpy as np


def aligned(headings, rows):
    """Lines of a table: cells (texts) below each other, the first column to the left, the others to the right."""
    table = [headings, *rows]
    first_width, *widths = [max(map(len, column)) for column in zip(*table)]
    lines = []
    for first, *cells in table:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths)]
        lines.append("  ".join([first.ljust(first_width), *padded]).rstrip())
    return lines


def markdown(headings, rows):
    """Lines of a table in Markdown."""
    lines = []
    for cells in [headings, ["---"] * len(headings), *rows]:
        escaped = [cell.replace("|", "\\|") for cell in cells]
        lines.append(f"| {' | '.join(escaped)} |")
    return lines


LATEX_ESCAPES = str.maketrans({character: "\\" + character for character in "#$%&_{}"} | {
    "\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}"})


def latex(headings, rows):
    """Lines of a table in LaTeX with the rules of the package booktabs."""
    def line(cells):
        escaped = [cell.translate(LATEX_ESCAPES) for cell in cells]
        return f"{' & '.join(escaped)} \\\\"
    columns = "l" + "r" * (len(headings) - 1)
    begin = [f"\\begin{{tabular}}{{{columns}}}", r"\toprule", line(headings), r"\midrule"]
    return [*begin, *map(line, rows), r"\bottomrule", r"\end{tabular}"]


FORMS = {"markdown": markdown, "latex": latex}


def finite(value):
    """A number that can be drawn and that every reader of JSON takes; None for NaN, an infinite or a huge one, and for
    what is no number."""
    if isinstance(value, (int, float)) and abs(value) <= 1e15:
        return value
    return None


def spread(items, number):
    """At most `number` of the items, at equal distances."""
    if len(items) <= number:
        return items
    return [items[i * len(items) // number] for i in range(number)]


def interval(bounds, sign=""):
    """"[.12, .34]" with three digits; sign "+": with signs, of differences."""
    low, high = bounds
    return f"[{low:{sign}.3f}, {high:{sign}.3f}]"


def heading_of(metric):
    """What a table calls a metric: "success_rate" -> "success"."""
    return metric.removesuffix("_rate").replace("_", " ")


def has_any(metrics, key):
    """Whether a method has this metric."""
    return any(key in method for method in metrics.values())


# ---------------------------------------------------------------------------------------------------------------------
# the comparison

INTERVAL = ""                    # the form of a cell that is an interval


def result_table(metrics, metric, domain_columns, baseline):
    """(headings, rows of cells) of the comparison; domain_columns: (key, heading, form) each."""
    columns = [
        ("n", "n", "d"),
        (metric, heading_of(metric), ".3f"),
        ("ci95", "95 %", INTERVAL),
        ("mean_rounds", "rounds", ".2f"),
        ("leaks", "leaks", ".3f"),
        *domain_columns,
        ("win_rate", "wins", ".3f"),
        ("win_rate_ci95", "95 %", INTERVAL),
        ("ties", "ties", ".3f"),
    ]
    columns = [column for column in columns if has_any(metrics, column[0])]
    headings = ["", *(heading for _, heading, _ in columns)]
    rows = []
    for name, method in metrics.items():
        rows.append([name, *(cell_of(method, key, form) for key, _, form in columns)])
    if baseline:
        headings.append(f"against {baseline}")
        for row, method in zip(rows, metrics.values()):
            row.append(difference_cell(method))
    return headings, rows


def cell_of(method, key, form):
    if key not in method:
        return "-"
    if form == INTERVAL:
        return interval(method[key])
    return format(method[key], form)


def difference_cell(method):
    if "against_baseline" not in method:
        return ""
    difference = method["against_baseline"]
    return f"{difference['difference']:+.3f} {interval(difference['ci95'], '+')}"


def note_lines(metrics, metric):
    """What a reader of the comparison has to know, and what its intervals leave out."""
    lines = []
    unequal, single, few = [], [], []                                # names of methods
    for name, method in metrics.items():
        lines += [f"{name}: {note}" for note in method.get("notes", [])]
        fewest, most = method["dialogues_a_task"]
        if fewest < most:
            unequal.append(name)
        if "runs" not in method:
            single.append(name)
        elif len(method["runs"]) < 5:
            few.append(name)
    if unequal:
        lines.append(f"tasks of {', '.join(unequal)} have unequal numbers of dialogues: {heading_of(metric)}, its "
                     "interval and differences are means over tasks, the other columns over dialogues")
    first_method = next(iter(metrics.values()))
    if "similarity" in first_method:
        lines.append(f"similarity of screenshots: {first_method['similarity']}")
    if len(single) == len(metrics):
        lines.append("one run each: the intervals leave other seeds out")
    elif single:
        lines.append(f"one run of {', '.join(single)}: the intervals leave other seeds out")
    if few:
        lines.append(f"fewer than five runs of {', '.join(few)}: where runs differ much the intervals are too narrow "
                     "(docs/results.md, What the intervals cover)")
    if not has_any(metrics, "ci95_families"):
        lines.append('no intervals over families: a task states no "family", or all state the same')
    return lines


# ---------------------------------------------------------------------------------------------------------------------
# the tables below it; each has no lines where there is nothing to say

def family_lines(metrics, baseline):
    """The intervals over families, where there are any."""
    if not has_any(metrics, "ci95_families"):
        return []
    headings = ["95 %, families drawn", "own rate"]
    if baseline:
        headings.append(f"against {baseline}")
    rows = []
    for name, method in metrics.items():
        row = [name, family_cell(method, "")]
        if baseline:
            row.append(family_cell(method.get("against_baseline", {}), "+"))
        rows.append(row)
    return aligned(headings, rows)


def family_cell(values, sign):
    if "ci95_families" not in values:
        return ""
    return interval(values["ci95_families"], sign)


def run_lines(metrics, metric, baseline):
    """The runs of every name that has several: the metric and the difference, their mean, and each run's."""
    rows = []
    for name, method in metrics.items():
        if "runs" in method:
            rows.append(run_row(name, heading_of(metric), method["runs"]))
    for name, method in metrics.items():
        difference = method.get("against_baseline", {})
        if "runs" in difference:
            rows.append(run_row(name, f"against {baseline}", difference["runs"]))
    if not rows:
        return []
    return aligned(["over the runs", "", "mean", "each run"], rows)


def run_row(name, what, runs):
    return [name, what, f"{np.mean(runs):+.3f}", " ".join(f"{value:+.3f}" for value in runs)]


def curve_lines(curves, metric, kind="best of N"):
    """A row a label, a column an N; curves: {label: {"N": {metric, "ci95"}}}."""
    numbers = set()
    for points in curves.values():
        numbers |= points.keys()
    numbers = sorted(numbers, key=int)
    rows = []
    for label, points in curves.items():
        rows.append([label, *(cell_of(points.get(number, {}), metric, ".3f") for number in numbers)])
    return aligned([kind, *numbers], rows)


def agreement_lines(agreements):
    """A line for each oracle of credit.agreement."""
    lines = []
    for oracle, values in agreements.items():
        lines.append(
            f"{oracle}: rank correlation of the critic's advantages with its scores {values['rank_correlation']:+.3f} "
            f"{interval(values['ci95'], '+')} over {values['num_states']:,} states of --candidates; of "
            f"{values['num_pairs']:,} pairs {values['right']:.1%} right, {values['wrong']:.1%} wrong, the rest equal "
            "to it")
    return lines


def bars_of(metrics, metric):
    """{name: {"value", "low", "high"}}: the metric of each method and its interval."""
    bars = {}
    for name, method in metrics.items():
        low, high = method["ci95"]
        bars[name] = {"value": method[metric], "low": low, "high": high}
    return bars
