"""The page that 05 writes: its data, what of them fits, and report.html with its style and script (jinja2).

Everything that the page shows passes two places. page_data gives texts, labels and finite numbers, whatever a file has
in their place. write_report keeps the whole file at MAX_PAGE bytes, and says in the page what it cut or left out."""
import base64
import collections
import hashlib
import io
import json
import os
import pathlib
import re
import stat
import warnings

from lib.servers import said
from lib.tables import finite, heading_of

MAX_PAGE = 20_000_000                 # bytes of the whole file
MAX_STATES = 300                      # states of --candidates that are shown
MAX_STATE_BYTES = 4_000_000           # of all states, where dialogues are left out
MAX_PLOT_BYTES = 4_000_000            # of all plots
MAX_IMAGES = 12_000_000               # characters of all screenshots in the page
IMAGE_BYTES = 50_000                  # what a screenshot takes at most in most pages; so much is kept free for each
MAX_LABEL = 200                       # characters of a family, a kind of turn, a task_id, …
LIMITS = None, 20_000, 5_000, 2_000, 1_000           # a text is cut to so many characters: the first that fits
LABELS = "id", "family", "kind", "tool", "leak"

MAX_FILE = 64_000_000                 # bytes of a screenshot's file, and its pixels: what the browser draws at most
MAX_SIZE = 2560, 8192


class UnfitImage(Exception):
    """A file that is no screenshot of this run."""


# ---------------------------------------------------------------------------------------------------------------------
# the page's data: methods, tasks, dialogues, states; short keys, and none whose value says nothing

def slim(row):
    return {key: value for key, value in row.items() if value is not None and value != []}


def text_of(value):
    """A text for the page; of a value that is none its type."""
    return value if isinstance(value, str) else f"(no text, but a {type(value).__name__})"


def label_of(value):
    """A text for the page; None where a row has nothing there."""
    return text_of(value) if value else None


def page_data(files, domain, metric, critic=None, states=()):
    """The data of the whole page, of which write_report shows what fits. files: {name: trajectories, scored, with
    "kinds" and "known" (lib.credit.measure_turns), and with "failed" (World.score) and "advantages"
    (common.score_turns) where these are known}; critic: whose advantages they are; states: some rows of SWEET's
    scored.jsonl with "chosen" and "rejected" in their candidates."""
    tasks, dialogues, numbers = {}, [], {}
    for row in [*(row for own in files.values() for row in own), *states]:
        task = row["task"]
        if row["task_id"] not in tasks:
            tasks[row["task_id"]] = slim({
                "id": text_of(row["task_id"]), "family": label_of(task.get("family")),
                "request": text_of(task["problem_description"]), "reference": text_of(task["ground_truth"]),
                "facts": [text_of(text) for text, _ in domain.facts(task, []) or ()]})
    order = {task_id: number for number, task_id in enumerate(tasks)}
    for method, own in enumerate(files.values()):
        for row in own:
            numbers.setdefault((row["task_id"], row["sample"]), []).append((len(dialogues), row))
            dialogues.append({"m": method, "t": order[row["task_id"]], **dialogue_data(row, domain)})
            reference_image = scores_of(row, domain).get("reference_image")
            if reference_image:
                tasks[row["task_id"]]["image"] = reference_image
    shown = [state_data(row, order[row["task_id"]], domain) for row in states]
    for number, (state, row) in enumerate(zip(shown, states)):
        place = len(row["history"])
        for d, dialogue in numbers.get((row["task_id"], row["sample"]), ()):
            if [turn["content"] for turn in dialogue["dialogue_history"][:place]] == [
                    turn["content"] for turn in row["history"]] and place < len(dialogue["dialogue_history"]):
                state["d"] = d
                dialogues[d]["turns"][place]["state"] = number
    kinds = {turn["kind"]: 0 for dialogue in dialogues for turn in dialogue["turns"] if "kind" in turn}
    return {"metric": metric, "heading": heading_of(metric), "graded": domain.MIN_GAP is not None,
            "methods": list(files), "critic": critic, "kinds": sorted(kinds), "tasks": list(tasks.values()),
            "dialogues": dialogues, "states": shown, "images": {}, "left_out": None}


def scores_of(row, domain):
    """What this run's scorer wrote into a row. A file's own "image" says nothing where the scorer draws none."""
    return {key: row[key] for key in domain.SCORE_KEYS if key in row}


def dialogue_data(row, domain):
    """What the page shows of a scored trajectory; "image": the file of a screenshot, as the row names it."""
    task, history, scores = row["task"], row["dialogue_history"], scores_of(row, domain)
    advantages, known, turns, faults = row.get("advantages") or [], set(), [], []
    known_after = facts_known(task, history, domain)
    kinds, credits = iter(row["kinds"]), (finite(round(advantage, 6)) for advantage in advantages)
    for i, turn in enumerate(history):
        shown = {"who": "agent" if turn["role"] == "assistant" else "human", "text": turn["content"]}
        if turn["role"] == "assistant":
            shown |= {"kind": next(kinds), "credit": next(credits, None),
                      "tokens": len(turn["output_ids"]) if isinstance(turn.get("output_ids"), list) else None,
                      "cut": bool(turn.get("truncated")) or None}
        else:
            learned = known_after(i + 1) - known
            known |= learned
            shown |= {"learned": sorted(learned), "tool": label_of(turn.get("tool")),
                      "leak": domain.leak_of(task, turn["content"]) if i else None}
        if turn.get("render_fault"):
            faults.append(f"turn {i}: its page cannot be rendered: {text_of(turn['render_fault'])}")
        turns.append(slim(shown))
    if scores.get("render_fault"):
        faults.append(f"the answer cannot be rendered: {text_of(scores['render_fault'])}")
    if "reference_image" in scores and not scores["reference_image"]:
        faults.append("the reference cannot be rendered")
    return slim({
        "run": finite(row.get("run", 0)) or 0, "sample": finite(row["sample"]), "reward": finite(row["reward"]),
        "rounds": sum(turn["who"] == "agent" for turn in turns), "answer": row["answer"],
        "known": row["known"],
        "similarity": finite(row["reward"]) if "reference_image" in scores else None,
        "credit": finite(round(sum(advantages), 6)) if advantages else None,
        "image": scores.get("image") or None,
        "faults": faults, "failed": [slim(test) for test in row.get("failed") or ()], "turns": turns})


def facts_known(task, history, domain):
    """A function of a number of turns: the numbers of the facts that are known after so many."""
    if not domain.facts(task, []):
        return lambda number: set()
    if domain.facts_by_turn:
        return domain.facts_by_turn(task, history).__getitem__
    return lambda number: {n for n, (_, is_known) in enumerate(domain.facts(task, history[:number])) if is_known}


def state_data(row, task, domain):
    """What the page shows of a state's candidates."""
    who, prompt = {"assistant": "agent"}, row.get("prompt")
    return {"d": None, "t": task, "turn": finite(row["turn"]),
            "history": [{"who": who.get(turn["role"], "human"), "text": turn["content"]} for turn in row["history"]],
            "candidates": [slim({
                "text": candidate["text"], "advantage": round(advantage, 6), "tokens": len(candidate["ids"]),
                "kind": domain.turn_kind(row["task"], row["history"], said(domain, candidate["text"], prompt)),
                "cut": not candidate["ended"],
                "chosen": candidate["chosen"], "rejected": candidate["rejected"]})
                for candidate, advantage in zip(row["candidates"], row["advantages"])]}


def spread(rows, number=MAX_STATES):
    """At most `number` of the rows, at equal distances."""
    return rows if len(rows) <= number else [rows[i * len(rows) // number] for i in range(number)]


# ---------------------------------------------------------------------------------------------------------------------
# screenshots: the one way into the page

def add_images(data, folder, room=MAX_IMAGES):
    """Put the screenshots that tasks and dialogues name into the data, those of a task after each other, until there
    are `room` characters of them; "image" is then a key of data["images"]. Returns what is left out, as lines."""
    keys, unfit, too_many, used = {}, set(), set(), 0
    for dialogue in sorted(data["dialogues"], key=lambda dialogue: dialogue["t"]):
        for place in (data["tasks"][dialogue["t"]], dialogue):
            path = place.get("image")
            if path is None or path in keys or path in unfit or path in too_many:
                continue
            try:
                image = embedded(folder, path)
            except UnfitImage:
                unfit.add(path)
                continue
            if used + len(image) > room:
                too_many.add(path)
                continue
            used += len(image)
            keys[path] = f"k{len(keys)}"
            data["images"][keys[path]] = image
    for place in (*data["tasks"], *data["dialogues"]):
        if place.get("image") in keys:
            place["image"] = keys[place["image"]]
        elif "image" in place:
            place["image"] = "left out"
    lines, number = [], len(keys) + len(unfit) + len(too_many)
    if too_many:
        lines.append(f"{len(too_many):,} of {number:,} screenshots are left out: the page holds at most "
                     f"{MAX_IMAGES // 10 ** 6} MB of them")
    if unfit:
        lines.append(f"{len(unfit):,} of {number:,} screenshots are left out: they are no PNG files in images/ of at "
                     f"most {MAX_FILE // 10 ** 6} MB and {MAX_SIZE[0]:,} x {MAX_SIZE[1]:,} pixels")
    return lines


def embedded(folder, path):
    """The data URL of a screenshot, scaled down to at most 320 x 640. UnfitImage unless `path`, relative to a folder
    beside `folder`, is a file in `folder` that this run's browser can have drawn."""
    from PIL import Image
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")                         # of many pixels: they are counted here
            image = Image.open(io.BytesIO(read_screenshot(folder, path)), formats=["PNG"])
        if image.width > MAX_SIZE[0] or image.height > MAX_SIZE[1]:
            raise UnfitImage(path)
        small = image.convert("RGB")
        small.thumbnail((320, 640))
        small.save(data := io.BytesIO(), "JPEG", quality=85)
    except UnfitImage:
        raise
    except Exception as error:                                      # a broken PNG gives errors of many types
        raise UnfitImage(path) from error
    return "data:image/jpeg;base64," + base64.b64encode(data.getvalue()).decode()


def read_screenshot(folder, path):
    """The bytes of a file right in `folder`, which a row names "../images/NAME". UnfitImage for every other path and
    for what is no regular file. Neither the folder nor the file may be a link, and a FIFO is not waited for."""
    folder = pathlib.Path(folder)
    name = re.fullmatch(rf"\.\./{re.escape(folder.name)}/([\w-][\w.-]*)", path) if isinstance(path, str) else None
    if not name:
        raise UnfitImage(path)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        place = os.open(folder, flags | os.O_DIRECTORY)
        try:
            handle = os.open(name[1], flags, dir_fd=place)
        finally:
            os.close(place)
        with open(handle, "rb") as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode) or about.st_size > MAX_FILE:
                raise UnfitImage(path)
            return file.read(MAX_FILE)
    except OSError as error:
        raise UnfitImage(path) from error


# ---------------------------------------------------------------------------------------------------------------------
# what fits into the page

ESCAPES = {character: f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def as_json(value):
    """A value as JSON that can stand in a script element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character, escape in ESCAPES.items():
        text = text.replace(character, escape)
    return text


def size_of(value):
    """Bytes of a value in the page, with a comma behind it."""
    return len(as_json(value).encode("utf-8", "backslashreplace")) + 1


def shortened(value, limit, counts, key=None):
    """The value with its texts cut to `limit` characters (None: whole) and its labels to MAX_LABEL, which the text
    itself says; counts["texts"] and counts["labels"] count them."""
    if isinstance(value, str):
        most = MAX_LABEL if key in LABELS else limit
        if most is None or len(value) <= most:
            return value
        counts["labels" if key in LABELS else "texts"] += 1
        return f"{value[:most]} … [{len(value) - most:,} more characters]"
    if isinstance(value, list):
        return [shortened(item, limit, counts) for item in value]
    if isinstance(value, dict):
        return {key: shortened(item, limit, counts, key) for key, item in value.items()}
    return value


Measure = collections.namedtuple("Measure", "size longest")           # bytes in the page; characters of a text, at most


def measured(item):
    """The Measure of an item. A text's escapes are counted as they stand in the page: none is longer than `longest`."""
    text = as_json(item)
    size = len(text.encode("utf-8", "backslashreplace")) + 1
    pieces = text.replace("\\\\", "xx").replace('\\"', "xx").split('"')          # between marks that are no escapes
    return Measure(size, max(map(len, pieces)))


def sizes_at(limit, items, measures):
    """Bytes of each item with its texts cut to `limit`; of one without a longer text they are known."""
    sizes = []
    for item, measure in zip(items, measures):
        if limit is not None and measure.longest > limit:
            item = shortened(item, limit, collections.Counter())
            sizes.append(size_of(item))
        else:
            sizes.append(measure.size)
    return sizes


def without_history(state):
    """A state whose dialogue is in the page needs no history of its own."""
    return {key: value for key, value in state.items() if key != "history"} if state["d"] is not None else state


def fitting(data, folder, room):
    """The data that fit into `room` bytes, ready for the page. First long texts are cut, to the first of LIMITS that
    is enough; then dialogues are left out (select_dialogues). "left_out" says what was cut or left out."""
    paths = {place["image"] for place in (*data["tasks"], *data["dialogues"]) if "image" in place}
    frame = {key: value for key, value in data.items() if key not in ("tasks", "dialogues", "states")}
    line_bytes = 2_000 + size_of(data["methods"]) + 60 * len(data["methods"])            # of "left_out", at most
    text_room = room - size_of(frame) - line_bytes - min(MAX_IMAGES, IMAGE_BYTES * len(paths))
    states_with_links = list(map(without_history, data["states"]))
    items = {"tasks": data["tasks"], "dialogues": data["dialogues"], "states": states_with_links}
    measures = {key: list(map(measured, own)) for key, own in items.items()}
    for limit in LIMITS:
        sizes = {key: sizes_at(limit, own, measures[key]) for key, own in items.items()}
        if sum(map(sum, sizes.values())) <= text_room:
            numbers, states = list(range(len(data["dialogues"]))), list(range(len(data["states"])))
            break
    else:
        state_sizes = sizes_at(limit, data["states"], map(measured, data["states"]))        # with their histories
        states = select_states(state_sizes)
        numbers = select_dialogues(data, sizes, text_room - sum(state_sizes[s] for s in states),
                                   {data["states"][s]["t"] for s in states})
    page, counts = subset(data, numbers, states), collections.Counter()
    page["states"] = list(map(without_history, page["states"]))
    for key in ("tasks", "dialogues", "states"):
        page[key] = shortened(page[key], limit, counts)
    lines = left_out_lines(data, numbers, states)
    if counts["texts"]:
        lines.append(f"{counts['texts']:,} texts longer than {limit:,} characters are cut; scored/ has them whole")
    if counts["labels"]:
        lines.append(f"{counts['labels']:,} labels longer than {MAX_LABEL} characters are cut")
    lines += add_images(page, folder, min(MAX_IMAGES, max(0, room - size_of(page) - line_bytes)))
    page["left_out"] = "; ".join(lines) or None
    return page


def select_states(sizes):
    """Numbers of at most MAX_STATE_BYTES of states, at equal distances."""
    number = len(sizes)
    while sum(spread(sizes, number)) > MAX_STATE_BYTES:
        number //= 2
    return spread(list(range(len(sizes))), number)


def select_dialogues(data, sizes, room, tasks):
    """Numbers of the dialogues that fit into `room` bytes, in order; `tasks`: those that the states need anyway.

    The unit is the n-th dialogue of every name (and run) on one task: what is compared stays together.
    The first dialogues come before the second ones, and so on.
    Tasks come in the order of a hash of their task_id: a sample that is the same in every report.
    Tasks that other names have take turns, so that no name crowds another one out.
    Units of a 20th of the room and more come last: a few long dialogues must not take the place of all others."""
    counts, units = collections.Counter(), {}                       # {(n, task): numbers of dialogues}
    for number, dialogue in enumerate(data["dialogues"]):
        name = dialogue["m"], dialogue["run"], dialogue["t"]
        units.setdefault((counts[name], dialogue["t"]), []).append(number)
        counts[name] += 1
    digests = [hashlib.sha256(task["id"].encode(errors="replace")).digest() for task in data["tasks"]]
    unit_sizes = {unit: sum(sizes["dialogues"][number] for number in numbers) for unit, numbers in units.items()}
    groups = {}                                                     # {(n, the names that have it): units}
    for unit, numbers in units.items():
        names = frozenset((data["dialogues"][number]["m"], data["dialogues"][number]["run"]) for number in numbers)
        groups.setdefault((unit[0], names), []).append(unit)
    order = []
    for (n, names), own in groups.items():
        for place, unit in enumerate(sorted(own, key=lambda unit: (digests[unit[1]], unit[1]))):
            order.append((unit_sizes[unit] > room / 20, n, place, -len(names), digests[unit[1]], unit))
    tasks, selected = set(tasks), []
    room -= sum(sizes["tasks"][t] for t in tasks)
    for *_, unit in sorted(order):
        size = unit_sizes[unit]
        if unit[1] not in tasks:
            size += sizes["tasks"][unit[1]]
        if size <= room:
            room -= size
            tasks.add(unit[1])
            selected += units[unit]
    return sorted(selected)


def subset(data, numbers, states):
    """The data with the dialogues and the states of these numbers alone, and their tasks; all are counted afresh."""
    places = {old: new for new, old in enumerate(numbers)}
    state_places = {old: new for new, old in enumerate(states)}
    dialogues = [dict(data["dialogues"][number]) for number in numbers]
    own_states = [dict(data["states"][number]) for number in states]
    needed = {one["t"] for one in (*dialogues, *own_states)}
    if len(numbers) == len(data["dialogues"]):
        needed |= set(range(len(data["tasks"])))
    tasks = {old: new for new, old in enumerate(sorted(needed))}
    for dialogue in dialogues:
        dialogue["t"] = tasks[dialogue["t"]]
        dialogue["turns"] = [with_state(turn, state_places) for turn in dialogue["turns"]]
    for state in own_states:
        state["t"], state["d"] = tasks[state["t"]], places.get(state["d"])
    own_tasks = [dict(data["tasks"][old]) for old in tasks]
    return {**data, "tasks": own_tasks, "dialogues": dialogues, "states": own_states, "images": {}}


def with_state(turn, places):
    """A turn whose "state" has its place among the states that are shown; without it where the state is not."""
    if "state" not in turn:
        return turn
    return slim({**turn, "state": places.get(turn["state"])})


def left_out_lines(data, numbers, states):
    """How many dialogues and states are left out, of which names, and by what rule."""
    lines, every = [], len(data["dialogues"])
    if len(numbers) < every:
        total = collections.Counter(dialogue["m"] for dialogue in data["dialogues"])
        shown = collections.Counter(data["dialogues"][number]["m"] for number in numbers)
        tasks = {dialogue["t"] for dialogue in data["dialogues"]}
        shown_tasks = {data["dialogues"][number]["t"] for number in numbers}
        names = ", ".join(f"{shown[m]:,} of {total[m]:,} of {name}" for m, name in enumerate(data["methods"]))
        lines.append(f"{every - len(numbers):,} of {every:,} dialogues are left out, as the page holds at most "
                     f"{MAX_PAGE / 10 ** 6:g} MB; shown are {len(shown_tasks):,} of {len(tasks):,} tasks ({names}): "
                     "the same ones for all names that have them, by a hash of the task_id, the first dialogue of "
                     "every task before a second one; scored/ has all dialogues")
    if len(states) < len(data["states"]):
        lines.append(f"{len(data['states']) - len(states):,} of {len(data['states']):,} states are left out, at equal "
                     "distances")
    return lines


# ---------------------------------------------------------------------------------------------------------------------
# the page

def fitting_plots(plots):
    """(plots of at most MAX_PLOT_BYTES together, lines that name the others)."""
    fit, lines, room = [], [], MAX_PLOT_BYTES
    for plot in plots:
        size = len(plot["svg"].encode("utf-8", "backslashreplace"))
        if size <= room:
            room -= size
            fit.append(plot)
        else:
            lines.append(f'the plot "{plot["title"]}" is left out: it has {size:,} bytes')
    return fit, lines


def write_report(path, data, images, **variables):
    """Write the page: report.html with report.css and report.js beside it in this folder. data: page_data; images: the
    folder of this run's screenshots; variables: title, table [{"name", "cells"}], headings, bars [{"value", "low",
    "high"} of each row], metric_heading, notes [line], lines [(heading, text)], plots [{"title", "svg", "caption"}],
    credit (None or {"by_kind", "by_round": [{"label", "n", "mean", "methods": {name: {"n", "mean"}}}], "agreement":
    [line]}), hints [line]. Returns the line that the page says of what was cut or left out; None: nothing was."""
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup
    folder = pathlib.Path(__file__).parent
    script, style = ((folder / f"report.{kind}").read_text(encoding="utf-8") for kind in ("js", "css"))
    environment = Environment(loader=FileSystemLoader(folder), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.get_template("report.html")
    variables["plots"], plot_lines = fitting_plots(variables["plots"])
    variables |= {"script": Markup(script), "style": Markup(style),
                  "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}
    variables["notes"] = [*variables["notes"], *plot_lines]
    frame = template.render(**variables, data_json="").encode("utf-8", "backslashreplace")
    data = fitting(data, images, MAX_PAGE - len(frame))
    page = template.render(**variables, data_json=Markup(as_json(data)))
    path = pathlib.Path(path)
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    with open(partial, "x", encoding="utf-8", errors="backslashreplace") as file:       # never through a link
        file.write(page)
    partial.replace(path)
    return "; ".join(filter(None, [*plot_lines, data["left_out"]])) or None
