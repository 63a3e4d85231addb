"""Web pages (ColBench's frontend): template pages, the rule-based human, what a human sees, scores by similarity.

In each round the agent sends an HTML page, which is rendered in a browser without a network; the human compares it
with the reference page and says the main differences, in at most 1,000 characters. Of a turn with "OUTPUT:" only what
follows stands in the dialogue. After the last round the last page is the answer; its return is the similarity of its
screenshot to the reference's. Each slot of a template page (colours, layout, font, title) shows: with any other value
the page looks different.
"""
import asyncio
import collections
import colorsys
import contextlib
import functools
import hashlib
import json
import os
import re
import string

from colbench import beside, check_kind, check_template, ColBenchError, defaults, MORE_KEYS, task_id, TASK_KEYS
from colbench.browser import BrowserThread, is_stored, screenshot_path, stored_render
from colbench.defaults import *  # noqa: F403
from colbench.schema import list_of, record, short_text
from colbench.similarity import CLIP_MODEL, PageScorer

OUTPUT = "OUTPUT:"
NOUN = "page"
REPLY_CHARS, REPLY_TOKENS = 1000, 320
PERSON_SEES = True
MIN_GAP = 0.1
SCORE_KEYS = "reward", "similarity", "image", "reference_image", "render_fault"
COLUMNS = (("no_page", "no page", ".3f"), ("failed_renders", "not rendered", "d"))
AGENT_SYSTEM = (
    "You design a web page for a person who has it before their eyes but cannot write HTML. In each turn send the "
    "whole page as one HTML document; Tailwind CSS can be loaded from its CDN. The person looks at it in a browser and "
    f'says what should be different. You may think before you write: then put "{OUTPUT}" behind your thoughts, as the '
    "person gets only what follows it. You have {max_rounds} rounds, and the last page that you send is the one that "
    "counts.")
VIEWER_SYSTEM = (
    "You are a person who asked an assistant for a web page, in these words:\n{problem_description}\n\nYou have the "
    "page that you want before your eyes: the first picture. The assistant cannot see it. Look at what the assistant "
    "made, and describe in a few sentences of plain English what differs most from your page: layout, colours, sizes, "
    "texts, what is missing. Answer what the assistant asks. Never write HTML or CSS.")


# ---------------------------------------------------------------------------------------------------------------------
# pages in messages

def shown(message):
    """Of a message with "OUTPUT:" what follows it."""
    return message.split(OUTPUT, 1)[1].strip() if OUTPUT in message else message


def page_of(text):
    """The HTML page in an agent's turn: the last fenced block that begins with a tag; else from <!doctype or <html, or
    the first tag that is closed later, to the last ">" (or the end, where the page was cut). None if there is none."""
    if blocks := re.findall(r"```[a-z]*\s*\n(\s*<[!a-z].*?)(?:```|\Z)", text, re.DOTALL | re.IGNORECASE):
        return blocks[-1].strip()
    if match := re.search(r"<(!doctype|html)\b.*", text, re.DOTALL | re.IGNORECASE):
        page = match[0]
        return page[:page.rindex(">") + 1] if re.search(r"</html\s*>", page, re.IGNORECASE) else page.strip()
    match = re.search(r"<([a-z][a-z0-9]*)\b[^>]*>.*</\1\s*>", text, re.DOTALL | re.IGNORECASE)
    return match and text[match.start():text.rindex(">") + 1]


def last_page(history):
    """The page so far of a dialogue: of its last agent turn that has one; None if none has."""
    pages = (page_of(turn["content"]) for turn in reversed(history) if turn["role"] == "assistant")
    return next(filter(None, pages), None)


# ---------------------------------------------------------------------------------------------------------------------
# template tasks: families of pages, and the slots that their ideas leave out

def page_slot(topic, sentence, names):
    """names: {code: what the human calls it}, or codes that are called what they are."""
    names = names if isinstance(names, dict) else {name: name for name in names}
    return topic, {code: (name, f"There should be {name}." if name == f"no {topic}" else sentence.format(name))
                   for code, name in names.items()}


PAGE = string.Template(beside("page.html"))            # {slots}, and $texts of the family
PAGES = json.loads(beside("pages.json"))               # slot: [topic, how an idea states it, values]; families
PAGE_SLOTS = {slot: page_slot(*given) for slot, given in PAGES["slots"].items()}
FAMILIES = PAGES["families"]
PAGE_OPENINGS = ("A page for {}.", "A website for {}.", "I need a page for {}.", "Please make a page for {}.")


def make_task(rng, name, told, accept):
    """One task of a family of pages, or the reason why there is none."""
    family = FAMILIES[name]
    cards = "".join(f"<article>{card}</article>" for card in family["cards"])
    template = PAGE.substitute(nav=family["nav"], aside=family["aside"], cards=cards, button=family["button"],
                               footer=family["footer"])
    slots = PAGE_SLOTS | {"title": page_slot("title", 'The title should be "{}".', family["titles"])}
    codes = {slot: rng.choice(list(options)) for slot, (_, options) in slots.items()}
    page = template.format(**codes)
    task_id = hashlib.sha256(page.encode()).hexdigest()[:16]
    if reason := accept(task_id):
        return reason
    stated = {"none": [], "some": rng.sample(sorted(slots), rng.choice((1, 2)) if rng.random() < 0.3 else 0),
              "all": list(slots)}[told]
    rows = []
    for slot, (topic, options) in slots.items():
        guesses = [codes[slot], *sorted(options.keys() - {codes[slot]})]
        rows.append({"slot": slot, "topic": topic, "code": codes[slot], "guesses": guesses,
                     "names": [options[code][0] for code in guesses], "told": slot in stated})
    idea = rng.choice(PAGE_OPENINGS).format(rng.choice(family["ideas"]))
    idea += "".join(" " + slots[slot][1][codes[slot]][1] for slot in stated)
    return {"task_id": task_id, "problem_description": idea, "ground_truth": page, "family": name,
            "template": template, "slots": rows}


# ---------------------------------------------------------------------------------------------------------------------
# the human

def viewer_messages(task, history, reference, page):
    """The chat that a model sees which plays the human and looks at images (paths; page: None where none was
    sent)."""
    said = history[-1]["content"].replace(page_of(history[-1]["content"]) or "\0", "[the page]")
    parts = [{"type": "text", "text": "The page that I want:"}, {"type": "image", "path": reference}]
    if page:
        parts += [{"type": "text", "text": "The page that the assistant made:"}, {"type": "image", "path": page}]
    parts.append({"type": "text", "text": ("" if page else "The assistant has made no page that can be shown.\n") +
                  f"What the assistant says:\n{said}\n\nWhat do I answer?"})
    return [{"role": "system", "content": [{"type": "text", "text": VIEWER_SYSTEM.format(**task)}]},
            {"role": "user", "content": parts}]


LOOK = beside("look.js")
NO_PAGE = ("I cannot see a page yet. Could you show me one?", "Please show me a page.",
           "Just make a page, and I will look.")
CONTENT = ("That is the page that I want.", "It looks right to me now.", "Yes, just like this. Thank you.")
COUNTS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
BE = ("The {} should be {}.", "I want the {} to be {}.", "Please make the {} {}.")
PUT = ("The {} should be {}.", "I want the {} {}.", "Please put the {} {}.")
SAY = ("The {} should say {}.", "I want the {} to say {}.", "Please let the {} say {}.")
SHOW = ("There should be {1} {0}.", "I want {1} {0}.", "Please show {1} {0}.")
MISSING = ("There should be a {0}, and it should be {1}.", "I miss the {0}: it should be {1}.")
UNWANTED = ("There should be no {0}.", "I want no {0}.", "It should have no {0}.")
# aspect: what the human calls it, how they say what it should be
ASPECTS = {"background": ("background", BE), "header": ("header", BE), "sidebar": ("sidebar", PUT),
           "sidebar colour": ("sidebar", BE), "cards": ("cards", SHOW), "card columns": ("cards", PUT),
           "card colour": ("cards", BE), "footer": ("footer", BE), "pictures": ("pictures", SHOW),
           "navigation": ("navigation", SHOW), "button": ("button", SAY), "button colour": ("button", BE),
           "title": ("title", BE), "title place": ("title", PUT), "font": ("font", BE)}
# Aspects of a part, of which one speaks only if it is there.
PROPERTIES = ("sidebar colour", "card columns", "card colour", "button colour", "title place", "font")


@functools.cache
def colour_names():
    """{(red, green, blue): its name in CSS}; of two names the one that people use."""
    from PIL import ImageColor
    names = [name for name in sorted(ImageColor.colormap) if "grey" not in name]        # cyan, not aqua
    return {ImageColor.getrgb(name): name for name in names}


def colour_words(colour):
    """What the human calls a colour: its name in CSS, or "a dark blue"."""
    if name := colour_names().get(tuple(colour)):
        return name
    hue, light, strength = colorsys.rgb_to_hls(*(value / 255 for value in colour))
    shade = "dark " if light < 0.35 else "light " if light > 0.7 else ""
    if light < 0.05 or light > 0.96:
        return "almost " + ("black" if light < 0.5 else "white")
    if strength < 0.15:
        return f"a {shade}gray"
    ends = {15: "red", 45: "orange", 70: "yellow", 165: "green", 195: "turquoise", 255: "blue", 290: "purple",
            345: "pink", 360: "red"}
    name = next(name for end, name in ends.items() if 360 * hue <= end)
    return f"a {shade}{name}" if shade or name != "orange" else "an orange"


def aspect_words(aspect, value, shown):
    """How the human puts the value of an aspect; `shown` is what the page has instead."""
    if isinstance(value, list):
        words = colour_words(value)
        return words if not shown or words != colour_words(shown) else "#{:02x}{:02x}{:02x}".format(*value)
    if aspect == "navigation":
        return "a"
    if isinstance(value, int):
        number = COUNTS[value] if value < len(COUNTS) else str(value)
        return f"in {number} column{'s' * (value > 1)}" if aspect == "card columns" else number
    return f'"{value[:100]}"' if aspect in ("title", "button") else value


def looks_alike(a, b):
    if isinstance(a, list) and isinstance(b, list):
        return max(abs(x - y) for x, y in zip(a, b)) <= 12
    return str(a).lower() == str(b).lower()


def page_reply(reference_spec, page_spec, rng):
    """The rule-based human on a page: names the largest differences, by area and at most two, or says that there is
    none. Specs are what look.js gives; None for the page: the agent has sent none."""
    if page_spec is None:
        return rng.choice(NO_PAGE)
    differences = []
    for aspect, (wanted, area) in reference_spec.items():
        shown, shown_area = page_spec[aspect]
        if not looks_alike(wanted, shown) and not (aspect in PROPERTIES and None in (wanted, shown)):
            differences.append((max(area, shown_area), aspect, wanted, shown))
    if not differences:
        return rng.choice(CONTENT)
    said = []
    for _, aspect, wanted, shown in sorted(differences, key=lambda difference: -difference[0])[:2]:
        name, ways = ASPECTS[aspect]
        if wanted is None:
            said.append(rng.choice(UNWANTED).format(name))
            continue
        ways = MISSING if shown is None and ways in (BE, PUT) else ways
        name = name.removesuffix("s") if ways is SHOW and wanted == 1 else name
        said.append(rng.choice(ways).format(name, aspect_words(aspect, wanted, shown)))
    return rng.choice(("", "Almost. ") if len(differences) <= 2 else ("", "", "Thanks. ")) + " ".join(said)


# ---------------------------------------------------------------------------------------------------------------------
# the scripted designer

PAGE_TALK = ("Could you tell me more?", "What should it look like?", "Which colours do you like?")


def page_values(task, text):
    """{slot: code} of a page that was made from the task's template, or None."""
    pattern = "".join(re.escape(literal) + (f"(?P<{slot}>.*?)" if slot else "")
                      for literal, slot, _, _ in string.Formatter().parse(task["template"]))
    match = re.search(pattern, text)
    return match and match.groupdict()


def asked_values(task, reply):
    """{slot: code} that a reply asks for: the value's name behind the topic's in the same sentence."""
    asked = {}
    for sentence in re.split(r"(?<=[.?])\s", reply):
        for slot in task["slots"]:
            for code, name in zip(slot["guesses"], slot["names"]):
                texts = [name] if slot["topic"] in name else [slot["topic"], name]             # "no footer" says both
                if re.search(".*".join(rf"(?<![\w-]){re.escape(text)}(?![\w-])" for text in texts), sentence):
                    asked[slot["slot"]] = code
    return asked


def scripted_turn(task, history, max_rounds, rng, informed=False):
    """What the noisy scripted designer sends next: a guess at first, then its last page with what the human asked for
    since. It forgets and misunderstands some of that, changes what nobody asked for, sends the same page again, or only
    words."""
    slots = {slot["slot"]: slot for slot in task["slots"]}
    talk, repeat, forget, change = (0.02, 0.03, 0.05, 0.10) if informed else (0.08, 0.10, 0.22, 0.35)
    pages = [(i, values) for i, turn in enumerate(history)
             if turn["role"] == "assistant" and (values := page_values(task, turn["content"]))]

    def guess(slot):
        return slot["code"] if slot["told"] or informed and rng.random() < 0.75 else rng.choice(slot["guesses"])

    luck, thought = rng.random(), "I begin with a simple page."
    if luck < talk:
        return rng.choice(PAGE_TALK)
    if not pages:
        values = {name: guess(slot) for name, slot in slots.items()}
    else:
        index, values = pages[-1]
        said = " ".join(turn["content"] for turn in history[index + 1:] if turn["role"] == "user")
        asked, changes = asked_values(task, said), {}
        if luck >= talk + repeat:
            for name, code in asked.items():
                changes[name] = code if rng.random() >= forget else rng.choice([values[name], *slots[name]["guesses"]])
            if rng.random() < change:
                name = rng.choice(list(slots))
                changes.setdefault(name, guess(slots[name]))
        topics = " and the ".join(dict.fromkeys(slots[name]["topic"] for name in changes))
        values, thought = values | changes, f"I change the {topics}." if topics else "I keep the page."
    page = task["template"].format(**values)
    return f"{thought}\n{OUTPUT}\n{page}" if rng.random() < 1 / 3 else page


PLAYERS = {"script": scripted_turn, "script-informed": functools.partial(scripted_turn, informed=True)}


# ---------------------------------------------------------------------------------------------------------------------
# the rest of the interface (colbench/__init__.py)

def owns(task):
    """A task whose reference is HTML, and that has no tests."""
    return not task.get("test_cases") and task["ground_truth"].lstrip().startswith("<")


def identifier(text):
    """What is wrong with the name of a slot, which names a group of a regular expression (page_values)."""
    return short_text(text) or (None if text.isidentifier() else f"is {text[:80]!r}, not a name of letters and digits")


SLOT = record({"slot": identifier, "topic": str, "code": str, "told": bool, "guesses": list_of(str, 1),
               "names": list_of(str, 1)})
TASK = record(TASK_KEYS, {**MORE_KEYS, "template": str, "slots": list_of(SLOT, 1)})


def check_task(task, where):
    check_kind(task, TASK, where)
    if "slots" in task:
        if "template" not in task:
            raise ColBenchError(f'{where}: missing "template", which a task with "slots" has')
        check_template(task, {slot["slot"] for slot in task["slots"]}, where)
        fields = [field for _, field, _, _ in string.Formatter().parse(task["template"]) if field]
        if len(set(fields)) < len(fields):
            raise ColBenchError(f'{where}: "template" has a field twice')


def lacks(task, player):
    return "slots" if player == "script" and "slots" not in task else "facts" if player.startswith("oracle") else None


def answer_of(history, is_last):
    """After the last round the last page that was sent; "" if there was none."""
    return (last_page(history) or "") if is_last else None


def facts(task, history):
    """[(a slot and its value, whether the person has asked for it)]; None where the task states no slots."""
    if "slots" not in task:
        return None
    known = {slot["slot"] for slot in task["slots"] if slot["told"]}
    for turn in history:
        if turn["role"] == "user":
            asked = asked_values(task, turn["content"])
            known |= {slot["slot"] for slot in task["slots"] if asked.get(slot["slot"]) == slot["code"]}
    return [(f"{slot['topic']}: {slot['names'][0]}", slot["slot"] in known) for slot in task["slots"]]


def facts_by_turn(task, history):
    """[the slots (numbers) whose value the person has asked for after 0, 1, … all turns]; as `facts`, all at once."""
    known = [{number for number, slot in enumerate(task["slots"]) if slot["told"]}]
    for turn in history:
        asked = asked_values(task, turn["content"]) if turn["role"] == "user" else {}
        known.append(known[-1] | {number for number, slot in enumerate(task["slots"])
                                  if asked.get(slot["slot"]) == slot["code"]} if asked else known[-1])
    return known


def leak_of(task, reply):
    """A reply may name texts of the page, but shows no tags."""
    return "fence" if "```" in reply else "code" if re.search(r"</?[a-zA-Z][^<>]*>", reply) else None


def views(task, history, privileged):
    """The request, what the human said last, the reference page (`privileged`) and the page after the last turn."""
    said = f"\nLast they said: {history[-2]['content']}" if len(history) > 2 else ""
    request, page = f"A person wants a web page: {task['problem_description']}{said}", last_page(history)
    now = ("\nThe page that they get:" if page else "\nThey get no page yet:", page)
    if not privileged:
        return [(request + now[0], page)]
    return [(request + "\nThe page that they need:", task["ground_truth"]), now]


def metric(trajectories):
    """Two similarities, two names: they are two scales, never to be compared with each other."""
    return {"clip": "cosine_similarity", "pixels": "pixel_similarity"}[trajectories[0]["similarity"].partition(":")[0]]


def outcome(trajectory):
    return trajectory["reward"]


def measure(trajectories):
    answers = [t for t in trajectories if t["answer"]]
    faults = collections.Counter(t["render_fault"] for t in answers if t.get("render_fault"))
    failed = len({task_id(t["task"]) for t in trajectories if not t["reference_image"]})
    notes = [f"the references of {failed} tasks cannot be rendered; no answer is like them"] if failed else []
    return {"no_page": 1 - len(answers) / len(trajectories), "failed_renders": sum(not t["image"] for t in answers),
            "failed_references": failed, "faults": dict(faults.most_common()), **({"notes": notes} if notes else {})}


class World(defaults.World):
    """The browser, the similarity of screenshots, and the rule-based human. similarity None: it only shows pages."""

    TAKES = "images", "rows_in", "browser", "similarity", "clip_model", "device"

    def __init__(self, images, rows_in=None, browser=None, similarity=None, clip_model=None, device="cpu"):
        self.stack = contextlib.ExitStack()
        self.images, self.browser, self.started, self.rows_in = images, BrowserThread(images, browser), False, rows_in
        self.scorer = similarity and PageScorer(similarity, clip_model or CLIP_MODEL, device)
        self.about = {"similarity": self.scorer.name} if self.scorer else {}

    def __exit__(self, *exception):
        self.stack.close()

    async def render(self, page, **options):
        """The Render of a page; the browser starts with the first one of which there is no screenshot yet."""
        if not options and is_stored(screenshot_path(self.images, page)):
            return stored_render(screenshot_path(self.images, page))
        if not self.started:
            self.stack.enter_context(self.browser)
            self.started = True
        return await self.browser.render(page, **options)

    async def rendered(self, task, history, **options):
        """(reference page, the page so far) as Render; the second is None where the agent has sent none. A page that
        cannot be shown leaves "render_fault" in the agent's turn; ColBenchError if it is the reference."""
        reference = await self.render(task["ground_truth"], **options)
        if reference.fault and not reference.image and not reference.spec:
            raise ColBenchError(f"task {task_id(task)}: its reference page cannot be rendered: {reference.fault}")
        page = last_page(history)
        render = await self.render(page, **options) if page else None
        if render and render.fault and page_of(history[-1]["content"]):
            history[-1]["render_fault"] = render.fault
        return reference, render

    async def rule_reply(self, task, history, rng):
        reference, page = await self.rendered(task, history, screenshot=False, read=LOOK)
        return page_reply(reference.spec, page.spec if page_of(history[-1]["content"]) else None, rng)

    async def person_chat(self, task, history):
        reference, page = await self.rendered(task, history)
        return viewer_messages(task, history, reference.image, page and page.image)

    async def score(self, pairs, explain=False):
        """"reward": the similarity of the screenshots, "image", "reference_image": their files, "render_fault"."""
        pages = list(dict.fromkeys(page for task, answer in pairs for page in (task["ground_truth"], answer) if page))
        renders = dict(zip(pages, await asyncio.gather(*map(self.render, pages))))
        shots = [[renders[page].image if page else None for page in (task["ground_truth"], answer)]
                 for task, answer in pairs]
        scores = await asyncio.to_thread(self.scorer.score, [tuple(shot) for shot in shots])
        rows = []
        for (_, answer), shot, score in zip(pairs, shots, scores):
            reference, image = (path and os.path.relpath(path, self.rows_in) for path in shot)
            fault = renders[answer].fault if answer else None
            rows.append({"reward": score, "similarity": self.scorer.name, "image": image, "reference_image": reference,
                         **({"render_fault": fault} if fault else {})})
        return rows

    async def show(self, documents):
        documents = list(dict.fromkeys(documents))
        renders = await asyncio.gather(*map(self.render, documents))
        return {document: render.image for document, render in zip(documents, renders)}
