"""The page that 05 writes: its data, what of them fits, and report.html with its style and script (jinja2).

Everything that the page shows passes two places. page_data gives texts, labels and finite numbers, whatever a file has
in their place. write_report keeps the whole file at MAX_PAGE bytes, and says in the page what it cut or left out."""
import base64
import collections
import hashlib
import io
import itertools
import json
import os
import pathlib
import re
import stat
import warnings

from lib.runtime import whole_file
from lib.servers import said
from lib.tables import finite, heading_of, spread

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
    if isinstance(value, str):
        return value
    return f"(no text, but a {type(value).__name__})"


def label_of(value):
    """A text for the page; None where a row has nothing there."""
    return text_of(value) if value else None


def rounded(value):
    """A number for the page; None where there is none."""
    return None if value is None else finite(round(value, 6))


def page_data(files, domain, metric, critic=None, states=()):
    """The data of the whole page, of which write_report shows what fits.

    files: {name: trajectories, scored, with "kinds" and "known" (lib.credit.measure_turns), and with "failed"
    (World.score) and "advantages" (common.score_turns) where these are known}.
    critic: whose advantages they are.
    states: some rows of SWEET's scored.jsonl with "chosen" and "rejected" in their candidates."""
    tasks = {}                                                       # {task_id: its data}
    for row in itertools.chain(*files.values(), states):
        if row["task_id"] not in tasks:
            tasks[row["task_id"]] = task_data(row, domain)
    task_numbers = {task_id: number for number, task_id in enumerate(tasks)}
    dialogues = []
    places = {}                                                      # {(task_id, sample): [(number, trajectory)]}
    for method, trajectories in enumerate(files.values()):
        for trajectory in trajectories:
            task_id = trajectory["task_id"]
            places.setdefault((task_id, trajectory["sample"]), []).append((len(dialogues), trajectory))
            dialogues.append({"m": method, "t": task_numbers[task_id], **dialogue_data(trajectory, domain)})
            reference_image = scores_of(trajectory, domain).get("reference_image")
            if reference_image:
                tasks[task_id]["image"] = reference_image
    page_states = []
    for number, state in enumerate(states):
        page_state = state_data(state, task_numbers[state["task_id"]], domain)
        for d, trajectory in places.get((state["task_id"], state["sample"]), []):
            if is_in(state, trajectory):
                page_state["d"] = d
                dialogues[d]["turns"][len(state["history"])]["state"] = number
        page_states.append(page_state)
    kinds = set()
    for dialogue in dialogues:
        kinds.update(turn["kind"] for turn in dialogue["turns"] if "kind" in turn)
    return {"metric": metric, "heading": heading_of(metric), "graded": domain.MIN_GAP is not None,
            "methods": list(files), "critic": critic, "kinds": sorted(kinds), "tasks": list(tasks.values()),
            "dialogues": dialogues, "states": page_states, "images": {}, "left_out": None}


def is_in(state, trajectory):
    """Whether a dialogue begins with the turns of a state, and goes on."""
    num_turns = len(state["history"])
    begin = [turn["content"] for turn in trajectory["dialogue_history"][:num_turns]]
    if begin != [turn["content"] for turn in state["history"]]:
        return False
    return num_turns < len(trajectory["dialogue_history"])


def scores_of(row, domain):
    """What this run's scorer wrote into a row. A file's own "image" says nothing where the scorer draws none."""
    return {key: row[key] for key in domain.SCORE_KEYS if key in row}


def task_data(row, domain):
    task = row["task"]
    return slim({
        "id": text_of(row["task_id"]),
        "family": label_of(task.get("family")),
        "request": text_of(task["problem_description"]),
        "reference": text_of(task["ground_truth"]),
        "facts": [text_of(text) for text, _ in domain.facts(task, []) or []],
    })


def dialogue_data(row, domain):
    """What the page shows of a scored trajectory; "image": the file of a screenshot, as the row names it."""
    scores = scores_of(row, domain)
    turns = turns_data(row, domain)
    advantages = row.get("advantages")
    return slim({
        "run": finite(row.get("run", 0)) or 0,
        "sample": finite(row["sample"]),
        "reward": finite(row["reward"]),
        "rounds": sum(turn["who"] == "agent" for turn in turns),
        "answer": row["answer"],
        "known": row["known"],
        "similarity": finite(row["reward"]) if "reference_image" in scores else None,
        "credit": rounded(sum(advantages)) if advantages else None,
        "image": scores.get("image") or None,
        "faults": render_faults(row, scores),
        "failed": [slim(test) for test in row.get("failed") or []],
        "turns": turns,
    })


def turns_data(row, domain):
    task, history = row["task"], row["dialogue_history"]
    known_after = facts_known(task, history, domain)
    known = set()
    kinds = iter(row["kinds"])
    advantages = iter(row.get("advantages") or [])
    turns = []
    for place, turn in enumerate(history):
        if turn["role"] == "assistant":
            turns.append(slim({
                "who": "agent",
                "text": turn["content"],
                "kind": next(kinds),
                "credit": rounded(next(advantages, None)),
                "tokens": len(turn["output_ids"]) if isinstance(turn.get("output_ids"), list) else None,
                "cut": True if turn.get("truncated") else None,
            }))
        else:
            learned = known_after(place + 1) - known
            known |= learned
            turns.append(slim({
                "who": "human",
                "text": turn["content"],
                "learned": sorted(learned),
                "tool": "tool" if turn.get("tool") else None,
                "leak": domain.leak_of(task, turn["content"]) if place > 0 and not turn.get("tool") else None,
            }))
    return turns


def render_faults(row, scores):
    """Which pages of a dialogue cannot be rendered, as lines."""
    lines = []
    for place, turn in enumerate(row["dialogue_history"]):
        if turn.get("render_fault"):
            lines.append(f"turn {place}: its page cannot be rendered: {text_of(turn['render_fault'])}")
    if scores.get("render_fault"):
        lines.append(f"the answer cannot be rendered: {text_of(scores['render_fault'])}")
    if "reference_image" in scores and not scores["reference_image"]:
        lines.append("the reference cannot be rendered")
    return lines


def facts_known(task, history, domain):
    """A function of a number of turns: the numbers of the facts that are known after so many."""
    if not domain.facts(task, []):
        return lambda num_turns: set()
    if domain.facts_by_turn:
        return domain.facts_by_turn(task, history).__getitem__

    def known_after(num_turns):
        facts = domain.facts(task, history[:num_turns])
        return {number for number, (_, is_known) in enumerate(facts) if is_known}
    return known_after


def state_data(row, task, domain):
    """What the page shows of a state's candidates; task: its number."""
    history = []
    for turn in row["history"]:
        history.append({"who": "agent" if turn["role"] == "assistant" else "human", "text": turn["content"]})
    candidates = []
    for candidate, advantage in zip(row["candidates"], row["advantages"]):
        message = said(domain, candidate["text"], row.get("prompt"))
        candidates.append(slim({
            "text": candidate["text"],
            "advantage": round(advantage, 6),
            "tokens": len(candidate["ids"]),
            "kind": domain.turn_kind(row["task"], row["history"], message),
            "cut": not candidate["ended"],
            "chosen": candidate["chosen"],
            "rejected": candidate["rejected"],
        }))
    return {"d": None, "t": task, "turn": finite(row["turn"]), "history": history, "candidates": candidates}


# ---------------------------------------------------------------------------------------------------------------------
# screenshots: the one way into the page

def add_images(data, folder, room=MAX_IMAGES):
    """Put the screenshots that tasks and dialogues name into the data, those of a task after each other, until there
    are `room` characters of them; "image" is then a key of data["images"]. Returns what is left out, as lines."""
    paths = {}                                                       # in order, each once
    for dialogue in sorted(data["dialogues"], key=lambda dialogue: dialogue["t"]):
        for place in (data["tasks"][dialogue["t"]], dialogue):
            if "image" in place:
                paths[place["image"]] = None
    keys, num_unfit, num_too_many = {}, 0, 0
    for path in paths:
        try:
            image = embedded(folder, path)
        except UnfitImage:
            num_unfit += 1
            continue
        if len(image) > room:
            num_too_many += 1
            continue
        room -= len(image)
        keys[path] = f"k{len(keys)}"
        data["images"][keys[path]] = image
    for place in (*data["tasks"], *data["dialogues"]):
        if "image" in place:
            place["image"] = keys.get(place["image"], "left out")
    lines = []
    if num_too_many:
        lines.append(f"{num_too_many:,} of {len(paths):,} screenshots are left out: the page holds at most "
                     f"{MAX_IMAGES // 10 ** 6} MB of them")
    if num_unfit:
        lines.append(f"{num_unfit:,} of {len(paths):,} screenshots are left out: they are no PNG files in images/ of "
                     f"at most {MAX_FILE // 10 ** 6} MB and {MAX_SIZE[0]:,} x {MAX_SIZE[1]:,} pixels")
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
        file = io.BytesIO()
        small.save(file, "JPEG", quality=85)
    except UnfitImage:
        raise
    except Exception as error:                                      # a broken PNG gives errors of many types
        raise UnfitImage(path) from error
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def read_screenshot(folder, path):
    """The bytes of a file right in `folder`, which a row names "../images/NAME". UnfitImage for every other path and
    for what is no regular file. Neither the folder nor the file may be a link, and a FIFO is not waited for."""
    folder = pathlib.Path(folder)
    pattern = rf"\.\./{re.escape(folder.name)}/([\w-][\w.-]*)"
    if not isinstance(path, str) or not re.fullmatch(pattern, path):
        raise UnfitImage(path)
    name = path.rpartition("/")[2]
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        place = os.open(folder, flags | os.O_DIRECTORY)
        try:
            handle = os.open(name, flags, dir_fd=place)
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
    if isinstance(value, list):
        return [shortened(item, limit, counts) for item in value]
    if isinstance(value, dict):
        return {key: shortened(item, limit, counts, key) for key, item in value.items()}
    if not isinstance(value, str):
        return value
    what, most = "texts", limit
    if key in LABELS:
        what, most = "labels", MAX_LABEL
    if most is None or len(value) <= most:
        return value
    counts[what] += 1
    return f"{value[:most]} … [{len(value) - most:,} more characters]"


def without_history(state):
    """A state whose dialogue is in the page needs no history of its own."""
    if state["d"] is None:
        return state
    return {key: value for key, value in state.items() if key != "history"}


ItemSizes = collections.namedtuple("ItemSizes", "tasks dialogues states")           # bytes of each of them in the page


def item_sizes(data, limit):
    """The ItemSizes with texts cut to `limit`; states have no history where their dialogue is there."""
    states = map(without_history, data["states"])
    return ItemSizes(sizes_at(limit, data["tasks"]), sizes_at(limit, data["dialogues"]), sizes_at(limit, states))


def sizes_at(limit, items):
    return [size_of(shortened(item, limit, collections.Counter())) for item in items]


def fitting(data, folder, room):
    """The data that fit into `room` bytes, ready for the page. First long texts are cut, to the first of LIMITS that
    is enough; then dialogues are left out (select_dialogues). "left_out" says what was cut or left out."""
    methods = data["methods"]
    line_bytes = 2_000 + size_of(methods) + 60 * len(methods)       # of "left_out", at most
    text_room = room - line_bytes - frame_bytes(data)
    for limit in LIMITS:
        sizes = item_sizes(data, limit)
        if sum(map(sum, sizes)) <= text_room:
            break
    numbers, states = select(data, limit, sizes, text_room)
    page = subset(data, numbers, states)
    lines = left_out_lines(data, numbers, states)
    lines += cut_texts(page, limit)
    image_room = room - line_bytes - size_of(page)
    lines += add_images(page, folder, min(MAX_IMAGES, max(0, image_room)))
    page["left_out"] = "; ".join(lines) or None
    return page


def frame_bytes(data):
    """Bytes of the data but for tasks, dialogues and states, and what is kept free for screenshots."""
    frame = dict(data)
    paths = set()
    for key in ItemSizes._fields:
        for item in frame.pop(key):
            paths.add(item.get("image"))
    paths.discard(None)
    return size_of(frame) + min(MAX_IMAGES, IMAGE_BYTES * len(paths))


def cut_texts(page, limit):
    """Cut the page's long texts and labels; returns how many, as lines."""
    counts = collections.Counter()
    page["states"] = list(map(without_history, page["states"]))
    for key in ItemSizes._fields:
        page[key] = shortened(page[key], limit, counts)
    lines = []
    if counts["texts"]:
        lines.append(f"{counts['texts']:,} texts longer than {limit:,} characters are cut; scored/ has them whole")
    if counts["labels"]:
        lines.append(f"{counts['labels']:,} labels longer than {MAX_LABEL} characters are cut")
    return lines


def select(data, limit, sizes, room):
    """(numbers of the dialogues, numbers of the states) that fit into `room` bytes; sizes: item_sizes."""
    if sum(map(sum, sizes)) <= room:
        return list(range(len(data["dialogues"]))), list(range(len(data["states"])))
    state_sizes = sizes_at(limit, data["states"])                   # with histories: their dialogues may be left out
    states = select_states(state_sizes)
    room -= sum(state_sizes[number] for number in states)
    needed_tasks = {data["states"][number]["t"] for number in states}
    return select_dialogues(data, sizes, room, needed_tasks), states


def select_states(sizes):
    """Numbers of at most MAX_STATE_BYTES of states, at equal distances."""
    number = len(sizes)
    while sum(spread(sizes, number)) > MAX_STATE_BYTES:
        number //= 2
    return spread(list(range(len(sizes))), number)


def select_dialogues(data, sizes, room, needed_tasks):
    """Numbers of the dialogues that fit into `room` bytes, in order; needed_tasks: those that the states need anyway.

    The unit is the n-th dialogue of every name (and run) on one task: what is compared stays together.
    The first dialogues come before the second ones, and so on.
    Tasks come in the order of a hash of their task_id: a sample that is the same in every report.
    Tasks that other names have take turns, so that no name crowds another one out.
    Units of a 20th of the room and more come last: a few long dialogues must not take the place of all others."""
    units = units_of(data["dialogues"])
    digests = [hashlib.sha256(task["id"].encode(errors="replace")).digest() for task in data["tasks"]]
    unit_sizes, groups = {}, {}                                     # groups: {(n, the names that have it): tasks}
    for (n, task), numbers in units.items():
        unit_sizes[n, task] = sum(sizes.dialogues[number] for number in numbers)
        names = frozenset(name_of(data["dialogues"][number]) for number in numbers)
        groups.setdefault((n, names), []).append(task)
    ranks = {}                                                      # {unit: what it is sorted by}
    for (n, names), tasks in groups.items():
        tasks.sort(key=lambda task: (digests[task], task))
        for place, task in enumerate(tasks):
            is_long = unit_sizes[n, task] > room / 20
            ranks[n, task] = (is_long, n, place, -len(names), digests[task], task)
    selected_tasks, selected = set(needed_tasks), []
    room -= sum(sizes.tasks[task] for task in selected_tasks)
    for n, task in sorted(units, key=ranks.get):
        size = unit_sizes[n, task]
        if task not in selected_tasks:
            size += sizes.tasks[task]
        if size <= room:
            room -= size
            selected_tasks.add(task)
            selected += units[n, task]
    return sorted(selected)


def name_of(dialogue):
    """What is compared: a method, and of several runs one of them."""
    return dialogue["m"], dialogue["run"]


def units_of(dialogues):
    """{(n, task): the numbers of the n-th dialogues of all names on this task}."""
    counts, units = collections.Counter(), {}
    for number, dialogue in enumerate(dialogues):
        task = dialogue["t"]
        n = counts[name_of(dialogue), task]
        counts[name_of(dialogue), task] += 1
        units.setdefault((n, task), []).append(number)
    return units


def subset(data, numbers, states):
    """The data with the dialogues and the states of these numbers alone, and their tasks; all are counted afresh."""
    dialogues = [dict(data["dialogues"][number]) for number in numbers]
    page_states = [dict(data["states"][number]) for number in states]
    if len(numbers) == len(data["dialogues"]):
        tasks = range(len(data["tasks"]))
    else:
        tasks = sorted({row["t"] for row in (*dialogues, *page_states)})
    task_places = places_of(tasks)
    dialogue_places = places_of(numbers)
    state_places = places_of(states)
    for dialogue in dialogues:
        dialogue["t"] = task_places[dialogue["t"]]
        dialogue["turns"] = [with_state(turn, state_places) for turn in dialogue["turns"]]
    for state in page_states:
        state["t"] = task_places[state["t"]]
        state["d"] = dialogue_places.get(state["d"])
    page_tasks = [dict(data["tasks"][number]) for number in tasks]
    return {**data, "tasks": page_tasks, "dialogues": dialogues, "states": page_states, "images": {}}


def places_of(numbers):
    """{number: its place in the list}."""
    return {number: place for place, number in enumerate(numbers)}


def with_state(turn, places):
    """A turn whose "state" has its place among the states that are shown; without it where the state is not."""
    if "state" not in turn:
        return turn
    return slim({**turn, "state": places.get(turn["state"])})


def left_out_lines(data, numbers, states):
    """How many dialogues and states are left out, of which names, and by what rule."""
    lines = []
    dialogues = data["dialogues"]
    page_dialogues = [dialogues[number] for number in numbers]
    if len(numbers) < len(dialogues):
        tasks = {dialogue["t"] for dialogue in dialogues}
        page_tasks = {dialogue["t"] for dialogue in page_dialogues}
        totals = collections.Counter(dialogue["m"] for dialogue in dialogues)
        counts = collections.Counter(dialogue["m"] for dialogue in page_dialogues)
        names = ", ".join(f"{counts[m]:,} of {totals[m]:,} of {name}" for m, name in enumerate(data["methods"]))
        lines.append(
            f"{len(dialogues) - len(numbers):,} of {len(dialogues):,} dialogues are left out, as the page holds at "
            f"most {MAX_PAGE / 10 ** 6:g} MB; shown are {len(page_tasks):,} of {len(tasks):,} tasks ({names}): the "
            "same ones for all names that have them, by a hash of the task_id, the first dialogue of every task "
            "before a second one; scored/ has all dialogues")
    num_states = len(data["states"])
    if len(states) < num_states:
        lines.append(f"{num_states - len(states):,} of {num_states:,} states are left out, at equal distances")
    return lines


# ---------------------------------------------------------------------------------------------------------------------
# the page

def fitting_plots(plots):
    """(plots of at most MAX_PLOT_BYTES together, lines that name the others)."""
    fitting_ones, lines, room = [], [], MAX_PLOT_BYTES
    for plot in plots:
        size = len(plot["svg"].encode("utf-8", "backslashreplace"))
        if size <= room:
            room -= size
            fitting_ones.append(plot)
        else:
            lines.append(f'the plot "{plot["title"]}" is left out: it has {size:,} bytes')
    return fitting_ones, lines


def write_report(path, data, images, **variables):
    """Write the page: report.html with report.css and report.js beside it in this folder. data: page_data; images: the
    folder of this run's screenshots; variables: title, table [{"name", "cells"}], headings, bars [{"value", "low",
    "high"} of each row], metric_heading, notes [line], lines [(heading, text)], plots [{"title", "svg", "caption"}],
    credit (None or {"by_kind", "by_round": [{"label", "n", "mean", "methods": {name: {"n", "mean"}}}], "agreement":
    [line]}), hints [line]. Returns the line that the page says of what was cut or left out; None: nothing was."""
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup
    folder = pathlib.Path(__file__).parent
    script = (folder / "report.js").read_text(encoding="utf-8")
    style = (folder / "report.css").read_text(encoding="utf-8")
    environment = Environment(loader=FileSystemLoader(folder), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.get_template("report.html")
    plots, plot_lines = fitting_plots(variables["plots"])
    script_hash = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    variables |= {"script": Markup(script), "style": Markup(style), "script_hash": script_hash, "plots": plots,
                  "notes": [*variables["notes"], *plot_lines]}
    frame = template.render(**variables, data_json="").encode("utf-8", "backslashreplace")
    page_content = fitting(data, images, MAX_PAGE - len(frame))
    page = template.render(**variables, data_json=Markup(as_json(page_content)))
    path = pathlib.Path(path)
    with whole_file(path) as file:
        file.write(page)
    left_out = [*plot_lines, page_content["left_out"]]
    return "; ".join(filter(None, left_out)) or None
