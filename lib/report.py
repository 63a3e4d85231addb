"""The page that 05 writes: its data, and report.html with its style and script (jinja2)."""
import base64
import hashlib
import io
import json
import pathlib

from lib.tables import heading_of

MAX_STATES = 300                      # states of --candidates that are shown
MAX_IMAGES = 12_000_000               # characters of all screenshots in the page
MAX_DATA = 19_000_000                 # bytes of all data of the page
LIMITS = None, 20_000, 5_000, 2_000, 1_000, 500, 200        # a text is cut to so many characters: the first that fits

# ---------------------------------------------------------------------------------------------------------------------
# the page's data: methods, tasks, dialogues, states; short keys, and none whose value says nothing

def slim(row):
    return {key: value for key, value in row.items() if value is not None and value != []}


def page_data(files, domain, metric, critic=None, states=()):
    """The data of the page but for screenshots. files: {name: trajectories, scored, with "kinds" and "known"
    (lib.credit.measure_turns), and with "failed" (World.score) and "advantages" (common.score_turns) where these are
    known}; critic: whose advantages they are; states: some rows of SWEET's scored.jsonl with "chosen" and "rejected" in
    their candidates."""
    tasks, dialogues, numbers = {}, [], {}
    for row in [*(row for own in files.values() for row in own), *states]:
        task = row["task"]
        tasks.setdefault(row["task_id"], slim({
            "id": row["task_id"], "family": task.get("family"), "request": task["problem_description"],
            "reference": task["ground_truth"], "facts": [text for text, _ in domain.facts(task, []) or ()]}))
    order = {task_id: number for number, task_id in enumerate(tasks)}
    for method, own in enumerate(files.values()):
        for row in own:
            numbers.setdefault((row["task_id"], row["sample"]), []).append((len(dialogues), row))
            dialogues.append({"m": method, "t": order[row["task_id"]], **dialogue_data(row, domain)})
    shown = [state_data(row, order[row["task_id"]], domain) for row in states]
    for number, (state, row) in enumerate(zip(shown, states)):
        place = len(row["history"])
        for d, dialogue in numbers.get((row["task_id"], row["sample"]), ()):
            if [turn["content"] for turn in dialogue["dialogue_history"][:place]] == [
                    turn["content"] for turn in row["history"]] and place < len(dialogue["dialogue_history"]):
                state["d"] = d
                dialogues[d]["turns"][place]["state"] = number
                state.pop("history", None)
    kinds = {turn["kind"]: 0 for dialogue in dialogues for turn in dialogue["turns"] if "kind" in turn}
    return {"metric": metric, "heading": heading_of(metric), "graded": domain.MIN_GAP is not None,
            "methods": list(files), "critic": critic, "kinds": sorted(kinds), "tasks": list(tasks.values()),
            "dialogues": dialogues, "states": shown, "images": {}, "left_out": None}


def dialogue_data(row, domain):
    """What the page shows of a scored trajectory."""
    task, history = row["task"], row["dialogue_history"]
    advantages, known, turns, faults = row.get("advantages") or [], set(), [], []
    kinds, credits = iter(row["kinds"]), (round(advantage, 6) for advantage in advantages)
    for i, turn in enumerate(history):
        shown = {"who": "agent" if turn["role"] == "assistant" else "human", "text": turn["content"]}
        if turn["role"] == "assistant":
            shown |= {"kind": next(kinds), "credit": next(credits, None),
                      "tokens": len(turn["output_ids"]) if "output_ids" in turn else None,
                      "cut": bool(turn.get("truncated")) or None}
        else:
            facts = domain.facts(task, history[:i + 1]) or ()
            learned = {number for number, (_, is_known) in enumerate(facts) if is_known} - known
            known |= learned
            shown |= {"learned": sorted(learned), "tool": turn.get("tool"),
                      "leak": domain.leak_of(task, turn["content"]) if i else None}
        if turn.get("render_fault"):
            faults.append(f"turn {i}: its page cannot be rendered: {turn['render_fault']}")
        turns.append(slim(shown))
    if row.get("render_fault"):
        faults.append(f"the answer cannot be rendered: {row['render_fault']}")
    if "reference_image" in row and not row["reference_image"]:
        faults.append("the reference cannot be rendered")
    return slim({
        "run": row.get("run", 0), "sample": row["sample"], "reward": row["reward"],
        "rounds": sum(turn["who"] == "agent" for turn in turns), "answer": row["answer"],
        "known": row["known"],
        "similarity": row["reward"] if "reference_image" in row else None,
        "credit": round(sum(advantages), 6) if advantages else None,
        "faults": faults, "failed": [slim(test) for test in row.get("failed") or ()], "turns": turns})


def state_data(row, task, domain):
    """What the page shows of a state's candidates."""
    who = {"assistant": "agent"}
    return {"d": None, "t": task, "turn": row["turn"],
            "history": [{"who": who.get(turn["role"], "human"), "text": turn["content"]} for turn in row["history"]],
            "candidates": [slim({
                "text": candidate["text"], "advantage": round(advantage, 6), "tokens": len(candidate["ids"]),
                "kind": domain.turn_kind(row["task"], row["history"], candidate["text"]), "cut": not candidate["ended"],
                "chosen": candidate["chosen"], "rejected": candidate["rejected"]})
                for candidate, advantage in zip(row["candidates"], row["advantages"])]}


def spread(rows, number=MAX_STATES):
    """At most `number` of the rows, at equal distances."""
    return rows if len(rows) <= number else [rows[i * len(rows) // number] for i in range(number)]


def add_images(data, files, folder):
    """Put the screenshots that rows name ("image", "reference_image", relative to `folder`) into the data, those of a
    task after each other, until there are MAX_IMAGES characters of them."""
    names, left, used = {}, set(), 0
    rows = [row for own in files.values() for row in own]
    for dialogue, row in sorted(zip(data["dialogues"], rows), key=lambda pair: pair[0]["t"]):
        for shown, path in ((data["tasks"][dialogue["t"]], row.get("reference_image")), (dialogue, row.get("image"))):
            if path and path not in names and path not in left:
                image = embedded(pathlib.Path(folder) / path)
                if used + len(image) <= MAX_IMAGES:
                    names[path], used = f"k{len(names)}", used + len(image)
                    data["images"][names[path]] = image
                else:
                    left.add(path)
            if path in names:
                shown["image"] = names[path]
    if left:
        data["left_out"] = (f"{len(left):,} of {len(left) + len(names):,} screenshots are left out: the page holds at "
                            f"most {MAX_IMAGES // 10 ** 6} MB of them")


def embedded(path):
    """The data URL of a screenshot, scaled down to at most 320 x 640."""
    from PIL import Image
    small = Image.open(path).convert("RGB")
    small.thumbnail((320, 640))
    small.save(data := io.BytesIO(), "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(data.getvalue()).decode()


# ---------------------------------------------------------------------------------------------------------------------
# the page

ESCAPES = str.maketrans({character: f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"})


def shortened(value, limit, counts):
    """The value with its texts cut to `limit` characters, which the text itself says; counts["cut"] counts them."""
    if isinstance(value, str):
        if len(value) <= limit:
            return value
        counts["cut"] += 1
        return f"{value[:limit]} … [{len(value) - limit:,} more characters]"
    if isinstance(value, list):
        return [shortened(item, limit, counts) for item in value]
    if isinstance(value, dict):
        return {key: item if key == "images" else shortened(item, limit, counts) for key, item in value.items()}
    return value


def data_text(data):
    """The data as JSON that can stand in a script element, at most MAX_DATA bytes: where it is more, long texts are
    cut, which "left_out" says."""
    for limit in LIMITS:
        counts, own = {"cut": 0}, data
        if limit:
            own = shortened(data, limit, counts)
            line = f"{counts['cut']:,} texts longer than {limit:,} characters are cut; scored/ has them whole"
            own["left_out"] = "; ".join(filter(None, [data["left_out"], line]))
        text = json.dumps(own, ensure_ascii=False, separators=(",", ":")).translate(ESCAPES)
        if len(text.encode("utf-8", "backslashreplace")) <= MAX_DATA:
            break
    return text


def write_report(path, data, **variables):
    """Write the page: report.html with report.css and report.js beside it in this folder. data: page_data; variables:
    title, table [{"name", "cells"}], headings, bars [{"value", "low", "high"} of each row], metric_heading, notes
    [line], lines [(heading, text)], plots [{"title", "svg", "caption"}], credit (None or {"by_kind", "by_round":
    [{"label", "n", "mean", "methods": {name: {"n", "mean"}}}], "agreement": [line]}), hints [line]."""
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup
    folder = pathlib.Path(__file__).parent
    script, style = ((folder / f"report.{kind}").read_text(encoding="utf-8") for kind in ("js", "css"))
    environment = Environment(loader=FileSystemLoader(folder), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.get_template("report.html").render(
        **variables, data_json=Markup(data_text(data)), script=Markup(script), style=Markup(style),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode())
    pathlib.Path(path).write_text(page, encoding="utf-8", errors="backslashreplace")
