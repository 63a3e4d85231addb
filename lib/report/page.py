"""The page that 05 writes: its data, and report.html with its style and script (jinja2).

Models wrote most of what the page shows. Their texts stand in one JSON element (as_json), and the script makes text
nodes of them; the page's policy lets no other script run."""
import base64
import contextlib
import hashlib
import io
import json
import math
import pathlib
import subprocess
import time

from lib.runtime import whole_file
from lib.statistics import heading_of

MAX_BYTES = 19_000_000                # of dialogues with their tasks and screenshots in the page
MAX_STATES = 100                      # of --candidates
MAX_TEXT = 20_000                     # characters of a text; the rest is cut
IMAGE_BYTES = 25_000                  # of a screenshot in the page, about


# ---------------------------------------------------------------------------------------------------------------------
# the page's data: methods, tasks, dialogues, states; short keys, and none whose value says nothing

def page_data(files, domain, metric, critic=None, states=()):
    """The data of the page.

    files: {name: trajectories, scored, with "kinds" and "known" (measure_turns), and with "failed" (Environment.score)
    and "advantages" (common.score_turns) where these are known}.
    critic: whose advantages they are.
    states: turn_advantages.read_states, with the "kind" of each candidate."""
    tasks, dialogues = {}, []                                        # tasks: {task_id: its data}
    for method, trajectories in enumerate(files.values()):
        for trajectory in trajectories:
            task_id = trajectory["task_id"]
            if task_id not in tasks:
                tasks[task_id] = task_data(trajectory, domain)
            dialogues.append({"m": method, "t": task_id, **dialogue_data(trajectory, domain)})
            reference_image = scores_of(trajectory, domain).get("reference_image")
            if reference_image:
                tasks[task_id]["image"] = reference_image
    shown_dialogues, left_out = fitting_dialogues(dialogues, tasks)
    page_states = []
    for state in states[::max(1, -(-len(states) // MAX_STATES))]:           # at equal distances
        tasks.setdefault(state["task_id"], task_data(state, domain))
        page_states.append(state_data(state))
    places = {}                                                      # {task_id: its number in the page}
    for item in [*shown_dialogues, *page_states]:
        item["t"] = places.setdefault(item["t"], len(places))
    kinds = set()
    for dialogue in shown_dialogues:
        kinds.update(turn["kind"] for turn in dialogue["turns"] if "kind" in turn)
    return {"metric": metric, "heading": heading_of(metric), "graded": domain.MIN_RETURN_GAP is not None,
            "methods": list(files), "critic": critic, "kinds": sorted(kinds),
            "tasks": [tasks[task_id] for task_id in places], "dialogues": shown_dialogues, "states": page_states,
            "left_out": left_out}


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


def scores_of(trajectory, domain):
    """What this run's scorer wrote into a row. A file's own "image" says nothing where the scorer draws none."""
    return {key: trajectory[key] for key in domain.SCORE_KEYS if key in trajectory}


def task_data(row, domain):
    task = row["task"]
    return slim({
        "id": row["task_id"],
        "family": text_of(task["family"]) if "family" in task else None,
        "request": text_of(task["problem_description"]),
        "reference": text_of(task["ground_truth"]),
        "facts": [text_of(text) for text, _ in domain.facts(task, []) or []],
    })


def dialogue_data(trajectory, domain):
    """What the page shows of a scored trajectory; "image": the file of a screenshot, as the row names it."""
    scores = scores_of(trajectory, domain)
    turns = turns_data(trajectory, domain)
    advantages = trajectory.get("advantages")
    return slim({
        "run": trajectory.get("run", 0),
        "sample": trajectory["sample"],
        "reward": trajectory["reward"],
        "rounds": sum(turn["who"] == "agent" for turn in turns),
        "answer": text_of(trajectory["answer"]),
        "known": trajectory["known"],
        "similarity": trajectory["reward"] if "reference_image" in scores else None,
        "advantage": rounded(sum(advantages)) if advantages else None,
        "image": scores.get("image"),
        "faults": render_faults(trajectory, scores),
        "failed": [slim(test) for test in trajectory.get("failed") or []],
        "turns": turns,
    })


def turns_data(trajectory, domain):
    task, history = trajectory["task"], trajectory["dialogue_history"]
    known_after = facts_known(task, history, domain)
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
            }))
        else:
            learned = known_after[place + 1] - known
            known |= learned
            turns.append(slim({
                "who": "user",
                "text": text_of(turn["content"]),
                "learned": sorted(learned),
                "tool": "tool" if turn.get("tool") else None,
                "leak": domain.leak_of(task, turn["content"]) if place > 0 and not turn.get("tool") else None,
            }))
    return turns


def facts_known(task, history, domain):
    """The numbers of the facts that are known after 0, 1, … all turns."""
    known_after = []
    for num_turns in range(len(history) + 1):
        facts = domain.facts(task, history[:num_turns]) or []
        known_after.append({number for number, (_, is_known) in enumerate(facts) if is_known})
    return known_after


def render_faults(trajectory, scores):
    """Which pages of a dialogue cannot be rendered, as lines."""
    lines = []
    for place, turn in enumerate(trajectory["dialogue_history"]):
        if turn.get("render_fault"):
            lines.append(f"turn {place}: its page cannot be rendered: {text_of(turn['render_fault'])}")
    if scores.get("render_fault"):
        lines.append(f"the answer cannot be rendered: {text_of(scores['render_fault'])}")
    if "reference_image" in scores and not scores["reference_image"]:
        lines.append("the reference cannot be rendered")
    return lines


def state_data(state):
    """What the page shows of a state's candidates."""
    history = []
    for turn in state["history"]:
        history.append({"who": "agent" if turn["role"] == "assistant" else "user", "text": text_of(turn["content"])})
    candidates = []
    for candidate, advantage in zip(state["candidates"], state["advantages"]):
        candidates.append(slim({
            "text": text_of(candidate["text"]),
            "advantage": round(advantage, 6),
            "tokens": len(candidate["ids"]),
            "kind": candidate["kind"],
            "cut": not candidate["ended"],
            "chosen": candidate["chosen"],
            "rejected": candidate["rejected"],
        }))
    return {"t": state["task_id"], "turn": state["turn"], "history": history, "candidates": candidates}


# ---------------------------------------------------------------------------------------------------------------------
# what fits into the page

def fitting_dialogues(dialogues, tasks):
    """(the dialogues that fit into MAX_BYTES, in their order; a line about the others, or None).

    Tasks come in the order of a hash of their id, each with all of its dialogues: a sample that is the same in every
    report."""
    by_task = {}
    for dialogue in dialogues:
        by_task.setdefault(dialogue["t"], []).append(dialogue)
    room, shown_tasks = MAX_BYTES, set()
    for task_id in sorted(by_task, key=lambda task_id: hashlib.sha256(task_id.encode(errors="replace")).digest()):
        room -= size_of(tasks[task_id]) + sum(map(size_of, by_task[task_id]))
        if room < 0:
            break
        shown_tasks.add(task_id)
    shown = [dialogue for dialogue in dialogues if dialogue["t"] in shown_tasks]
    if len(shown) == len(dialogues):
        return dialogues, None
    return shown, (f"shown are the dialogues of {len(shown_tasks):,} of {len(tasks):,} tasks, as the page holds at "
                   f"most {MAX_BYTES / 10 ** 6:g} MB of them; scored/ has all")


def size_of(item):
    """Bytes of a task, a dialogue or a state in the page."""
    return len(as_json(item).encode(errors="backslashreplace")) + (IMAGE_BYTES if item.get("image") else 0)


# ---------------------------------------------------------------------------------------------------------------------
# the page

ESCAPES = {character: f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def as_json(value):
    """A value as JSON that can stand in a script element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(str.maketrans(ESCAPES))


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
    """What the page says of its making: models and seeds, the command, commit and date.

    rollouts: {name: the arguments of 02 that made its first file}."""
    made = [f"{name}: {args.get('agent')}, seed {args.get('seed')}" for name, args in rollouts.items() if args]
    commit = ""
    with contextlib.suppress(OSError):                               # without git
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=pathlib.Path(__file__).parent, text=True,
                                capture_output=True).stdout.strip()
    return ["; ".join(made), f"{command} (commit {commit or 'unknown'}, {time.strftime('%Y-%m-%d')})"]


def write_report(path, data, images, **variables):
    """Write the page: page.html with page.css and page.js beside it in this folder. data: page_data; images: the folder
    of this run's screenshots; variables: about (lines), metrics, metric, headings, rows (of the comparison), notes
    [line], tables {heading: text}, plots [(title, SVG, caption)], advantages (None, or {"by_kind", "by_round":
    advantage_rows})."""
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup
    folder = pathlib.Path(__file__).parent
    environment = Environment(loader=FileSystemLoader(folder), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    script = (folder / "page.js").read_text(encoding="utf-8")
    page = environment.get_template("page.html").render(
        **variables,
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=Markup((folder / "page.css").read_text(encoding="utf-8")),
        data_json=Markup(as_json({**data, "images": screenshots(data, images)})))
    with whole_file(path) as file:
        file.write(page)
