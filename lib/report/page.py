"""The page that 05 writes: its data, and report.html with its style and script (jinja2).

Models wrote most texts of the page. These texts are in one JSON element (tojson), and the script inserts them as text
nodes; the page's policy blocks every other script."""
import base64
import collections
import hashlib
import io
import itertools
import math
import pathlib
import random
import shlex
import subprocess
import time

from lib.runtime import whole_file

MAX_BYTES = 19_000_000                # of dialogues with their tasks and screenshots in the page, about
MAX_STATES = 100                      # of --candidates
MAX_TEXT = 20_000                     # characters of a text; the rest is cut
IMAGE_BYTES = 25_000                  # of a screenshot in the page, about


# ---------------------------------------------------------------------------------------------------------------------
# the page's data: methods, tasks, dialogues, states. Keys are short; keys without a value are left out

def page_data(files, domain, forms, states=()):
    """The data of the page.

    files: {name: trajectories, scored, with "kinds" and "known" (measure_turns), and with "failed" (Environment.score)
    and "advantages" (common.score_turns) where these are known}.
    forms: {"advantages", "candidates": lines that say what these numbers are}.
    states: of turn_advantages.read_states, with the "kind" of each candidate."""
    fitting, left_out = fitting_tasks(list(itertools.chain(*files.values())))
    tasks, dialogues, page_states = {}, [], []                       # tasks: {key of a task: its data}
    for method, trajectories in enumerate(files.values()):
        for trajectory in trajectories:
            if trajectory["task_id"] in fitting:
                key = key_of(trajectory)
                if key not in tasks:
                    tasks[key] = task_data(trajectory, domain)
                dialogues.append({"m": method, "t": key, **dialogue_data(trajectory, domain)})
    for state in states[::math.ceil(len(states) / MAX_STATES) or 1]:        # at equal distances
        tasks.setdefault(key_of(state), task_data(state, domain))
        page_states.append(state_data(state))
    places = {key: place for place, key in enumerate(tasks)}
    for item in dialogues + page_states:
        item["t"] = places[item["t"]]
    return {
        "graded": domain.MIN_RETURN_GAP is not None,
        "meanings": domain.MEANINGS,
        "methods": list(files),
        "forms": forms,
        "tasks": list(tasks.values()),
        "dialogues": dialogues,
        "states": page_states,
        "left_out": left_out,
    }


def key_of(row):
    """Key of a row's task on the page. Dialogues of other programs may share a task_id and differ in the rest."""
    return row["task_id"], row["task"]["problem_description"], row["task"]["ground_truth"]


def slim(row):
    return {key: value for key, value in row.items() if value is not None and value != []}


def text_of(value):
    """A text for the page, not longer than MAX_TEXT."""
    text = str(value)
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[:MAX_TEXT]} … [{len(text) - MAX_TEXT:,} more characters]"


def rounded(value):
    """Six digits; None where there is no number, or one that JSON lacks."""
    return round(value, 6) if value is not None and math.isfinite(value) else None


def task_data(row, domain):
    """A row's task for the page."""
    task = row["task"]
    return slim({
        "id": row["task_id"],
        "family": text_of(task["family"]) if "family" in task else None,
        "request": text_of(task["problem_description"]),
        "solution": text_of(task["ground_truth"]),
        "facts": [text_of(text) for text, _ in domain.facts(task, []) or []],
        "image": row.get("reference_image") if "image" in domain.SCORE_KEYS else None,       # not another program's
    })


def dialogue_data(trajectory, domain):
    """A scored trajectory for the page; "image": the file of its screenshot, as the row names it."""
    return slim({
        "run": trajectory.get("run", 0),
        "sample": trajectory["sample"],
        "reward": trajectory["reward"],
        "answer": text_of(trajectory["answer"]),
        "known": trajectory["known"],
        "image": trajectory.get("image") if "image" in domain.SCORE_KEYS else None,
        "fault": trajectory.get("render_fault"),
        "failed": [slim(test) for test in trajectory.get("failed") or []],
        "num_failed": sum(fault is not None for fault in trajectory.get("faults") or []) or None,
        "turns": turns_data(trajectory, domain),
    })


def turns_data(trajectory, domain):
    task, history = trajectory["task"], trajectory["dialogue_history"]
    known = set()
    kinds = iter(trajectory["kinds"])
    advantages = iter(trajectory.get("advantages") or [])
    turns = []
    for place, turn in enumerate(history):
        if turn["role"] == "assistant":
            turns.append(slim({
                "who": "agent",
                "text": text_of(turn["content"]),
                "kind": next(kinds),
                "advantage": rounded(next(advantages, None)),
                "tokens": len(turn["output_ids"]) if "output_ids" in turn else None,
                "cut": turn.get("truncated") or None,
                "fault": turn.get("render_fault"),
            }))
        else:
            facts = domain.facts(task, history[:place + 1]) or []
            known_now = {number for number, (_, is_known) in enumerate(facts) if is_known}
            may_leak = domain.leak_of and place > 0 and not turn.get("tool")
            turns.append(slim({
                "who": "user",
                "text": text_of(turn["content"]),
                "learned": sorted(known_now - known),
                "tool": "tool" if turn.get("tool") else None,
                "leak": domain.leak_of(task, turn["content"]) if may_leak else None,
            }))
            known |= known_now
    return turns


def state_data(state):
    """A state with its candidates for the page."""
    history = []
    for turn in state["history"]:
        history.append({"who": "agent" if turn["role"] == "assistant" else "user", "text": text_of(turn["content"])})
    candidates = []
    for candidate, advantage in zip(state["candidates"], state["advantages"]):
        row = {key: candidate[key] for key in ("kind", "ended", "chosen", "rejected")}
        row |= {"text": text_of(candidate["text"]), "tokens": len(candidate["ids"]), "advantage": rounded(advantage)}
        candidates.append(slim(row))
    return {"t": key_of(state), "sample": state["sample"], "history": history, "candidates": candidates}


# ---------------------------------------------------------------------------------------------------------------------
# what fits into the page

def fitting_tasks(trajectories):
    """(the ids of the tasks whose dialogues fit into MAX_BYTES, a line about the others, or None).

    Tasks come in one random order, each with all of its dialogues: the same sample in every report on them."""
    sizes = collections.Counter()
    for trajectory in trajectories:
        sizes[trajectory["task_id"]] += size_of(trajectory)
    order = sorted(sizes)
    random.Random(0).shuffle(order)
    totals = itertools.accumulate(sizes[task_id] for task_id in order)
    fitting = {task_id for task_id, total in zip(order, totals) if total <= MAX_BYTES}
    if len(fitting) == len(order):
        return fitting, None
    return fitting, (f"shown are the dialogues of {len(fitting):,} of {len(order):,} tasks, as the page holds about "
                     f"{MAX_BYTES / 10 ** 6:g} MB of them; scored/ has all")


def size_of(trajectory):
    """About how many bytes a dialogue takes in the page."""
    task = trajectory["task"]
    texts = [turn["content"] for turn in trajectory["dialogue_history"]]
    texts += [trajectory["answer"], task["problem_description"], task["ground_truth"]]
    return sum(len(text_of(text)) + 60 for text in texts) + IMAGE_BYTES * ("image" in trajectory)


# ---------------------------------------------------------------------------------------------------------------------
# the page

def screenshots(data, folder):
    """{name: data URL} of the screenshots that tasks and dialogues name "../images/NAME", NAME being a file of
    `folder`, scaled down to at most 320 x 640."""
    images = {}
    for item in [*data["tasks"], *data["dialogues"]]:
        if "image" in item and item["image"] not in images:
            from PIL import Image
            image = Image.open(folder / pathlib.Path(item["image"]).name).convert("RGB")
            image.thumbnail((320, 640))
            file = io.BytesIO()
            image.save(file, "JPEG", quality=85)
            images[item["image"]] = "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
    return images


def about_lines(command, rollouts):
    """Lines that say how the page was made: models and seeds, the command, commit and date.

    rollouts: {name: the arguments of 02 that made its first file}."""
    made = [f"{name}: {args.get('agent')}, seed {args.get('seed')}" for name, args in rollouts.items() if args]
    folder = shlex.quote(str(pathlib.Path(__file__).parent))
    status, commit = subprocess.getstatusoutput(f"git -C {folder} rev-parse --short HEAD")
    return ["; ".join(made), f"{command} (commit {'unknown' if status else commit}, {time.strftime('%Y-%m-%d')})"]


def write_report(path, data, images, **variables):
    """Write the page: page.html with page.css and page.js beside it in this folder. data: page_data; images: the folder
    of this run's screenshots; variables: about (lines), metrics, metric, headings, rows (of the comparison), notes
    [line], tables {heading: text}, plots [(title, SVG, caption)], advantages (None, or advantage_summary of
    all)."""
    from jinja2 import Environment, FileSystemLoader
    folder = pathlib.Path(__file__).parent
    environment = Environment(loader=FileSystemLoader(folder), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    script = (folder / "page.js").read_text(encoding="utf-8")
    page = environment.get_template("page.html").render(
        **variables,
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=(folder / "page.css").read_text(encoding="utf-8"),
        data={**data, "images": screenshots(data, images)})
    with whole_file(path) as file:
        file.write(page)
