"""Tables of aligned text, best-of-N curves, and the page that 05 writes (report.html, by jinja2)."""
import base64
import io
import pathlib

from lib.runtime import InputError

LINES = [(style, marker) for style in ("-", "--", ":") for marker in "osD^v"]        # told apart without colours, too


def aligned(headings, rows):
    """Lines of a table: cells (texts) below each other, the first column to the left, the others to the right."""
    rows = [headings, *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(headings))]
    return ["  ".join(f"{cell:{'>' if column else '<'}{width}s}" for column, (cell, width) in
                      enumerate(zip(row, widths))).rstrip() for row in rows]


def interval(bounds, sign=""):
    """"[.12, .34]" with three digits; sign "+": with signs, of differences."""
    return f"[{bounds[0]:{sign}.3f}, {bounds[1]:{sign}.3f}]"


def heading_of(metric):
    """What a table calls a metric: "success_rate" -> "success"."""
    return metric.removesuffix("_rate").replace("_", " ")


def curve_svg(curves, metric):
    """An SVG element: `metric` against N (log2) with 95 % error bars. curves: {label: {"N": {metric, "ci95"}}}."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("curves need the package matplotlib: pip install matplotlib") from None
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "curves", "font.size": 10}):
        axes = (figure := Figure(figsize=(7, 4), layout="constrained")).subplots()
        for number, (label, points) in enumerate(curves.items()):
            sizes = sorted(points, key=int)
            means = [points[n][metric] for n in sizes]
            errors = [[abs(points[n]["ci95"][side] - mean) for n, mean in zip(sizes, means)] for side in (0, 1)]
            style, marker = LINES[number % len(LINES)]
            shift = 1 + 0.02 * (number - (len(curves) - 1) / 2)                        # points of one N side by side
            axes.errorbar([int(n) * shift for n in sizes], means, errors, linestyle=style, marker=marker, capsize=3,
                          label=label.replace("$", r"\$"))                            # no formula
        sizes = sorted({int(n) for points in curves.values() for n in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, labels=map(str, sizes), minor=False)
        axes.set_xlabel("N, candidates a turn")
        axes.set_ylabel(metric.replace("_", " "))
        axes.grid(axis="y", alpha=0.3)
        figure.legend(loc="outside right upper")
        figure.savefig(svg := io.StringIO(), format="svg", metadata={"Date": None})
    return svg.getvalue()[svg.getvalue().index("<svg"):]


def embedded(path):
    """The data URL of a screenshot, scaled down to at most 320 x 640."""
    from PIL import Image
    small = Image.open(path).convert("RGB")
    small.thumbnail((320, 640))
    small.save(data := io.BytesIO(), "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(data.getvalue()).decode()


def write_report(path, lines, metrics, files, curves, metric, images_from, num_tasks=12):
    """Write report.html: the tables (`lines`), the curves, and of the first tasks each method's first dialogue, with
    screenshots where rows name them ("image", "reference_image", relative to `images_from`)."""
    from jinja2 import Environment, FileSystemLoader
    first = {name: {t["task_id"]: t for t in reversed(own)} for name, own in files.items()}
    tasks = []
    for task in list(dict.fromkeys(t["task_id"] for own in files.values() for t in own))[:num_tasks]:
        rows = {name: own[task] for name, own in first.items() if task in own}
        shown = next(iter(rows.values()))
        shots = []                                                  # (caption, data URL or None, what stands instead)
        if "reference_image" in shown:
            named = [("reference", shown["reference_image"], "not rendered"),
                     *((f"{name}: {row['reward']:.3f}", row["image"], "not rendered" if row["answer"] else "no answer")
                       for name, row in rows.items())]
            shots = [(caption, image and embedded(pathlib.Path(images_from) / image), instead)
                     for caption, image, instead in named]
        tasks.append({"id": task, "task": shown["task"], "rows": rows, "shots": shots})
    environment = Environment(loader=FileSystemLoader(pathlib.Path(__file__).parent), autoescape=True,
                              trim_blocks=True, lstrip_blocks=True)
    page = environment.get_template("report.html").render(
        lines=lines, metrics=metrics, tasks=tasks, curves=curve_svg(curves, metric) if curves else None)
    pathlib.Path(path).write_text(page, encoding="utf-8", errors="backslashreplace")
