"""Web pages (ColBench's frontend): template pages, the user simulators (rule-based, or a model that sees images),
scores by similarity.

In each round the agent sends an HTML page, which is rendered in a browser without a network. The user simulator
compares it with the page that solves the task, and names the main differences in at most 1,000 characters. If a turn
has "OUTPUT:", the dialogue keeps only the text after it. After the last round the last page is the answer; its return
is the similarity of its screenshot to the solution's. Each slot of a template page (colours, layout, font, title) is
visible: with any other value the page looks different.
"""
import asyncio
import collections
import colorsys
import functools
import hashlib
import json
import os
import re
import string

from colbench.browser import Browser, Render
from colbench.domain import beside, check_template, Domain, Environment, task_id, task_kind
from colbench.schema import check_kind, InputError, list_of, record
from colbench.similarity import CLIP_MODEL, PageScorer

OUTPUT = "OUTPUT:"
SIMULATOR_SYSTEM = beside("prompts/frontend_simulator.txt")

# ---------------------------------------------------------------------------------------------------------------------
# pages in messages

# A document begins with <!doctype or <html> and another tag behind it: prose names <html>, too. The content of RAW is
# text, whatever it says.
START = r"<(?:!doctype|html)\b[^<>]*>(?:\s|<!--.*?-->)*+(?:<html\b[^<>]*>)?(?=\s*(?:<|\Z))"
RAW = {kind: rf"<{kind}\b[^>]*>.*?(?:(?P<{kind}_end></{kind}\s*>)|\Z)"
       for kind in ("script", "style", "textarea", "title", "pre", "code")}
RAW |= {"comment": r"<!--.*?(?:(?P<comment_end>-->)|\Z)",
        # values in a tag may hold tags
        "tag": r"""<[a-z](?:=\s*+(?:"[^"]*+(?:"|\Z)|'[^']*+(?:'|\Z))|[^>])*+(?:(?P<tag_end>>)|\Z)"""}
OPENS = r"(?<![`~])(?P<fence>```++|~~~++)[^\n`~]*\n"
BEGIN = re.compile(rf"{OPENS}(?=\s*<[!?a-z])|{START}", re.DOTALL | re.IGNORECASE)
CLOSE = r"(?P<close>(?:^[ \t]*|(?<=>)){fence}[`~]*[ \t]*$)"
NEVER = "(?!)"
DOCUMENT = re.compile(r"<(?:!doctype|html)\b.*", re.DOTALL | re.IGNORECASE)
TO_ITS_END = re.compile(r".*</html\s*>", re.DOTALL | re.IGNORECASE)
OPENING_TAG = re.compile(r"<([a-z][a-z0-9]*)\b[^>]*>", re.IGNORECASE)
CLOSING_TAG = re.compile(r"</([a-z][a-z0-9]*)\s*>", re.IGNORECASE)


def page_of(text):
    """The HTML page in an agent's turn, or None. It is the first of these that exists:

    1. the last document, fenced or not;
    2. the last fenced block that starts with a tag;
    3. the text from <!doctype or <html to the last </html> or the end;
    4. the result of elements_of, if it is more than half of the turn: a question may also name a <b>tag</b>."""
    pages = pages_in(text)
    if pages:
        return next(filter(DOCUMENT.search, reversed(pages)), pages[-1])
    document = DOCUMENT.search(text)
    if document:
        whole = TO_ITS_END.match(document[0])
        return whole[0] if whole else document[0].strip()
    elements = elements_of(text)
    return elements if elements and 2 * len(elements) > len(text.strip()) else None


def pages_in(text):
    """The documents in a text, and its fenced blocks that begin with a tag."""
    pages, position, kinds = [], 0, tuple(RAW)
    while begin := BEGIN.search(text, position):
        first = begin.end() if begin["fence"] else begin.start()
        last, position, kinds = end_of_page(text, first, begin["fence"], kinds)
        pages.append(text[first:last].strip())
    return pages


@functools.cache
def parts_of_page(fence, kinds):
    """A pattern for all that can end a page inside a fence (or None), and for RAW text of some kinds."""
    raw = "".join(f"|(?P<{kind}>{RAW[kind]})" for kind in kinds)
    pattern = rf"{CLOSE.format(fence=fence or NEVER)}|(?P<start>(?:{OPENS}\s*)?{START})|(?P<end></html\s*>){raw}"
    return re.compile(pattern, re.DOTALL | re.IGNORECASE | re.MULTILINE)


def end_of_page(text, first, fence, kinds):
    """Returns (end of the page, where to look for the next page, those of `kinds` whose RAW text may still end).
    The page begins at `first`, behind `fence` (or None). An opened <code> without an end tag is ordinary text.

    A fence ends at a line of its own, or behind a tag at the end of a line. Inside a document a fence is text, unless
    the document has no </html>."""
    is_in_document, document_end, close, end = False, None, None, len(text)
    position = first
    while part := parts_of_page(fence, kinds).search(text, position):
        position = part.end()
        raw = next((kind for kind in kinds if part[kind]), None)
        if raw and not part[f"{raw}_end"]:
            kinds = tuple(kind for kind in kinds if kind != raw)
            position = part.start() + 1
        elif part["start"] and (is_in_document or document_end):     # another document
            end = part.start()
            break
        elif part["start"]:
            is_in_document = True
        elif part["end"]:
            is_in_document, document_end, close = False, part.end(), None
            if not fence:
                break
        elif part["close"] and not close:
            close = part
            if not is_in_document:
                break
    if close:
        return close.start("close"), close.end(), kinds
    end = document_end or end
    return end, end, kinds


def elements_of(text):
    """The text from the first tag that is closed later to the last ">", or None if there is no such tag."""
    closed = {match[1].lower(): match.start() for match in CLOSING_TAG.finditer(text)}       # {tag: its last end}
    for match in OPENING_TAG.finditer(text):
        if closed.get(match[1].lower(), -1) >= match.end():
            return text[match.start():text.rindex(">") + 1]
    return None


def last_page(history):
    """The current page of a dialogue: that of the last agent turn with a page, or None."""
    for turn in reversed(history):
        if turn["role"] == "assistant" and (page := page_of(turn["content"])):
            return page
    return None


# ---------------------------------------------------------------------------------------------------------------------
# template tasks: families of pages, and the slots that their ideas leave out

PAGE = string.Template(beside("page.html"))            # {slots}, and $texts of the family
PAGES = json.loads(beside("pages.json"))               # slots, families; texts
FAMILIES = PAGES["families"]


# ---------------------------------------------------------------------------------------------------------------------
# the rule-based user simulator: names the differences

LOOK = beside("look.js")
COUNTS = PAGES["counts"].split()
# {aspect: [what the user calls it, the key of its sayings]}
ASPECTS, SAYINGS = PAGES["aspects"], PAGES["sayings"]
# Aspects of a part that are only mentioned if it is there
PROPERTIES = ("sidebar colour", "card columns", "card colour", "button colour", "title place", "font")
HUES = PAGES["hues"]                                    # [where it ends in degrees, its name]


@functools.cache
def colour_names():
    """{(red, green, blue): its name in CSS}, the usual one of two names."""
    from PIL import ImageColor
    names = [name for name in sorted(ImageColor.colormap) if "grey" not in name]        # cyan, not aqua
    return {ImageColor.getrgb(name): name for name in names}


def colour_words(colour):
    """The user's words for a colour: its name in CSS, or "a dark blue"."""
    css_name = colour_names().get(tuple(colour))
    if css_name:
        return css_name
    red, green, blue = colour
    hue, light, strength = colorsys.rgb_to_hls(red / 255, green / 255, blue / 255)
    if light < 0.05:
        return "almost black"
    if light > 0.96:
        return "almost white"
    shade = "dark " if light < 0.35 else "light " if light > 0.7 else ""
    if strength < 0.15:
        return f"a {shade}gray"
    name = next(name for end, name in HUES if 360 * hue <= end)
    article = "an" if name == "orange" and not shade else "a"
    return f"{article} {shade}{name}"


def aspect_words(aspect, wanted, present):
    """The user's words for the wanted value of an aspect; `present` is the page's value."""
    if isinstance(wanted, list):
        words = colour_words(wanted)
        is_same_word = present and words == colour_words(present)
        return "#" + bytes(wanted).hex() if is_same_word else words
    if aspect == "navigation":
        return "a"
    if isinstance(wanted, int):
        number = COUNTS[wanted] if wanted < len(COUNTS) else str(wanted)
        columns = "column" if wanted == 1 else "columns"
        return f"in {number} {columns}" if aspect == "card columns" else number
    return f'"{wanted[:100]}"' if aspect in ("title", "button") else wanted


def looks_alike(a, b):
    if isinstance(a, list) and isinstance(b, list):
        return all(abs(x - y) <= 12 for x, y in zip(a, b))
    return str(a).lower() == str(b).lower()


def page_differences(wanted_spec, page_spec):
    """[(aspect, wanted value, the page's value, area)], the largest area first."""
    differences = []
    for aspect, (wanted, area) in wanted_spec.items():
        present, present_area = page_spec[aspect]
        part_is_missing = aspect in PROPERTIES and (wanted is None or present is None)
        if not looks_alike(wanted, present) and not part_is_missing:
            differences.append((aspect, wanted, present, max(area, present_area)))
    return sorted(differences, key=lambda difference: -difference[3])


def wish(aspect, wanted, present, rng):
    """The user's sentence about a difference."""
    name, saying = ASPECTS[aspect]
    if wanted is None:
        return rng.choice(SAYINGS["unwanted"]).format(name)
    if present is None and saying in ("be", "put"):
        saying = "missing"
    if saying == "show" and wanted == 1:
        name = name.removesuffix("s")
    return rng.choice(SAYINGS[saying]).format(name, aspect_words(aspect, wanted, present))


def page_reply(wanted_spec, page_spec, rng):
    """The rule-based user's reply to a page: the two largest differences by area, or that there is none. Specs are the
    output of look.js. page_spec is None if the agent has sent no page."""
    if page_spec is None:
        return rng.choice(SAYINGS["no page"])
    differences = page_differences(wanted_spec, page_spec)
    if not differences:
        return rng.choice(SAYINGS["content"])
    wishes = [wish(aspect, wanted, present, rng) for aspect, wanted, present, _ in differences[:2]]
    openers = ("", "Almost. ") if len(differences) <= 2 else ("", "", "Thanks. ")
    return rng.choice(openers) + " ".join(wishes)


# ---------------------------------------------------------------------------------------------------------------------
# what the user asks for

def asked_values(task, reply):
    """{slot: code} that a reply asks for: the name of the value follows the topic in the same sentence."""
    asked = {}
    for sentence in re.split(r"(?<=[.?])\s", reply):
        for slot in task["slots"]:
            for code, name in zip(slot["guesses"], slot["names"]):
                if names_value(sentence, slot["topic"], name):
                    asked[slot["slot"]] = code
    return asked


@functools.lru_cache(100_000)                                       # each later turn asks again for the earlier turns
def names_value(sentence, topic, name):
    """Whether a sentence has a topic, and after it the name of a value; "no footer" is both."""
    texts = [name] if topic in name else [topic, name]
    pattern = ".*".join(rf"(?<![\w-]){re.escape(text)}(?![\w-])" for text in texts)
    return re.search(pattern, sentence) is not None


# ---------------------------------------------------------------------------------------------------------------------
# the scripted designer

def page_values(task, text):
    """{slot: code} of a page made from the task's template, or None."""
    pattern = ""
    for literal, slot, _, _ in string.Formatter().parse(task["template"]):
        pattern += re.escape(literal)
        if slot:
            pattern += f"(?P<{slot}>.*?)"
    match = re.search(pattern, text)
    return match.groupdict() if match else None


def last_values(task, history):
    """(page_values of the last page, or None; what the user has said since)."""
    values, replies = None, []
    for turn in history:
        if turn["role"] == "user":
            replies.append(turn["content"])
        elif sent := page_values(task, turn["content"]):
            values, replies = sent, []
    return values, " ".join(replies)


def guess(slot, rng, informed):
    """The designer's value for a slot that nobody has mentioned; informed: mostly the right one."""
    if slot["told"] or informed and rng.random() < 0.75:
        return slot["code"]
    return rng.choice(slot["guesses"])


def scripted_turn(task, history, max_rounds, rng, informed=False):
    """The next message of the noisy scripted designer.

    It first sends a guess, then its last page with the changes that the user asked for since. It forgets and
    misunderstands some of them, changes other things, or sends the same page again, or only words."""
    slots = {slot["slot"]: slot for slot in task["slots"]}
    talk, repeat, forget, change = (0.02, 0.03, 0.05, 0.10) if informed else (0.08, 0.10, 0.22, 0.35)
    values, replies = last_values(task, history)
    luck = rng.random()
    if luck < talk:
        return rng.choice(PAGES["talk"])
    changes, thought = {}, "I keep the page."
    if not values:
        values = {name: guess(slot, rng, informed) for name, slot in slots.items()}
        thought = "I begin with a simple page."
    elif luck >= talk + repeat:
        for name, code in asked_values(task, replies).items():
            if rng.random() < forget:
                code = rng.choice([values[name], *slots[name]["guesses"]])
            changes[name] = code
        if rng.random() < change:
            name = rng.choice(list(slots))
            changes.setdefault(name, guess(slots[name], rng, informed))
    if changes:
        topics = dict.fromkeys(slots[name]["topic"] for name in changes)
        thought = f"I change the {' and the '.join(topics)}."
    page = task["template"].format(**values | changes)
    return f"{thought}\n{OUTPUT}\n{page}" if rng.random() < 1 / 3 else page


# ---------------------------------------------------------------------------------------------------------------------
# the browser, scores, and the user simulators

def text_part(text):
    return {"type": "text", "text": text}


class PageEnvironment(Environment):
    """The browser, the similarity of screenshots, and the user simulator. similarity=None: only renders pages."""

    TAKES = "images", "rows_in", "browser", "similarity", "clip_model", "device"

    def __init__(self, images, rows_in=None, browser=None, similarity=None, clip_model=None, device="cpu"):
        self.images, self.rows_in = images, rows_in
        self.browser = Browser(images, browser)                     # which starts with the first page
        if similarity:
            self.scorer = PageScorer(similarity, clip_model or CLIP_MODEL, device)
            self.about = {"similarity": self.scorer.name}

    def __exit__(self, *exception):
        self.browser.close()

    async def rendered(self, task, history, **options):
        """The Renders of the solution and of the current page (None if the agent has sent none). Sets "render_fault" in
        the agent's turn if its page cannot be shown. Raises InputError if the solution cannot."""
        solution = await self.browser.render(task["ground_truth"], **options)
        if solution.fault:
            raise InputError(f"task {task_id(task)}: its solution cannot be rendered: {solution.fault}")
        page = last_page(history)
        render = await self.browser.render(page, **options) if page else None
        if render and render.fault and page_of(history[-1]["content"]):
            history[-1]["render_fault"] = render.fault
        return solution, render

    async def rule_reply(self, task, history, rng):
        solution, page = await self.rendered(task, history, screenshot=False, read=LOOK)
        page_spec = page.spec if page_of(history[-1]["content"]) else None
        return page_reply(solution.spec, page_spec, rng)

    async def simulator_chat(self, task, history):
        """Messages with images (paths)."""
        solution, page = await self.rendered(task, history)
        message = history[-1]["content"]
        sent_page = page_of(message)
        words = message.replace(sent_page, "[the page]") if sent_page else message
        question = f"What the assistant says:\n{words}\n\nWhat do I answer?"
        content = [text_part("The page that I want:"), {"type": "image", "path": solution.image}]
        if page and page.image:
            content += [text_part("The page that the assistant made:"), {"type": "image", "path": page.image}]
        else:
            question = f"The assistant has made no page that can be shown.\n{question}"
        system = [text_part(SIMULATOR_SYSTEM.format(**task))]
        return [{"role": "system", "content": system}, {"role": "user", "content": [*content, text_part(question)]}]

    async def verdicts(self, pairs, explain):
        """"reward": the similarity of the screenshots; "image", "reference_image": their files; "render_fault"."""
        pages = [page for task, answer in pairs for page in (task["ground_truth"], answer)]
        renders = await self.render_all(pages)
        image_pairs = [(renders[task["ground_truth"]].image, renders[answer].image) for task, answer in pairs]
        rewards = await asyncio.to_thread(self.scorer.score, image_pairs)
        rows = []
        for (_, answer), (solution, image), reward in zip(pairs, image_pairs, rewards):
            row = {"reward": reward, "similarity": self.scorer.name,
                   "image": self.path_in_row(image),
                   "reference_image": self.path_in_row(solution)}
            if renders[answer].fault:
                row["render_fault"] = renders[answer].fault
            rows.append(row)
        return rows

    async def render_all(self, pages):
        """{page: its Render}. "" stands for no answer, and has an empty Render."""
        pages = sorted({*pages} - {""})
        renders = await asyncio.gather(*map(self.browser.render, pages))
        return {"": Render(None, None, None), **dict(zip(pages, renders))}

    def path_in_row(self, image):
        return os.path.relpath(image, self.rows_in) if image else image

    async def show(self, documents):
        renders = await self.render_all(documents)
        return {document: renders[document].image for document in documents}


# ---------------------------------------------------------------------------------------------------------------------
# the domain

SLOT = record({"slot": str, "topic": str, "code": str, "told": bool, "guesses": list_of(str, 1),
               "names": list_of(str, 1)})
TASK = task_kind({}, {"template": str, "slots": list_of(SLOT, 1)})


class Frontend(Domain):
    """Tasks whose solution is an HTML page."""

    NOUN = "page"
    REPLY_CHARS, REPLY_TOKENS = 1000, 320
    SIMULATOR_SEES = True
    MIN_RETURN_GAP = 0.1
    ANSWERS_EARLY = False
    SCORE_KEYS = "reward", "similarity", "image", "reference_image", "render_fault"
    COLUMNS = (("no_page", "no page", ".3f"), ("failed_renders", "not rendered", "d"))
    MEANINGS = {"no page": "share of the answers that are no page",
                "not rendered": "pages that gave no screenshot (a black one counts)"}
    AGENT_SYSTEM = beside("prompts/frontend_agent.txt")
    FAMILIES = list(FAMILIES)
    PLAYERS = {"script": scripted_turn, "script-informed": functools.partial(scripted_turn, informed=True)}
    Environment = PageEnvironment

    def owns(self, task):
        """A task whose solution is HTML, and that has neither tests nor databases."""
        if task.get("test_cases") or "databases" in task:
            return False
        return task["ground_truth"].lstrip().startswith("<")

    def check_task(self, task, where):
        check_kind(task, TASK, where)
        if "slots" in task:
            check_kind(task, record({"template": str}), where)
            check_template(task, {slot["slot"] for slot in task["slots"]}, where)

    def make_task(self, rng, name, told, accept):
        family = FAMILIES[name]
        cards = "".join(f"<article>{card}</article>" for card in family["cards"])
        template = PAGE.substitute(family, cards=cards)             # with a field for each slot
        titles = {title: title for title in family["titles"]}
        # slot: topic, how an idea states it, {code: what the user calls it}
        slots = PAGES["slots"] | {"title": ["title", 'The title should be "{}".', titles]}
        codes = {slot: rng.choice(list(names)) for slot, (_, _, names) in slots.items()}
        page = template.format(**codes)
        task_id = hashlib.sha256(page.encode()).hexdigest()[:16]
        if reason := accept(task_id):
            return reason

        num_told = rng.choice((1, 2)) if rng.random() < 0.3 else 0
        some = rng.sample(sorted(slots), num_told)                  # drawn even where `told` does not ask for it
        told_slots = {"none": [], "some": some, "all": list(slots)}[told]
        rows = []
        for slot, (topic, _, names) in slots.items():
            code = codes[slot]
            guesses = [code, *sorted(names.keys() - {code})]
            rows.append({
                "slot": slot,
                "topic": topic,
                "code": code,
                "guesses": guesses,
                "names": [names[guess] for guess in guesses],
                "told": slot in told_slots,
            })
        opening = rng.choice(PAGES["openings"])
        sentences = [opening.format(rng.choice(family["ideas"]))]
        for slot in told_slots:
            topic, statement, names = slots[slot]
            value = names[codes[slot]]
            if value == f"no {topic}":
                statement = "There should be {}."
            sentences.append(statement.format(value))
        return {
            "task_id": task_id,
            "problem_description": " ".join(sentences),
            "ground_truth": page,
            "family": name,
            "template": template,
            "slots": rows,
        }

    def shown(self, message):
        """The text after "OUTPUT:", if the message has it."""
        return message.split(OUTPUT, 1)[1].strip() if OUTPUT in message else message

    def answer_of(self, history, is_last):
        """The last page, after the last round; "" if there is none."""
        return (last_page(history) or "") if is_last else None

    def lacks(self, task, player):
        return "slots" if player == "script" and "slots" not in task else None

    def leak_of(self, task, reply):
        """A reply leaks if it has tags. It may name texts of the page."""
        if "```" in reply:
            return "fence"
        return "code" if re.search(r"</?[a-zA-Z][^<>]*>", reply) else None

    def views(self, task, history, sees_c):
        """The request, the user's last message, the page that solves the task (`sees_c`) and the current page."""
        request = f"A person wants a web page: {task['problem_description']}"
        if len(history) > 2:
            request += f"\nLast they said: {history[-2]['content']}"
        page = last_page(history)
        caption = "\nThe page that they get:" if page else "\nThey get no page yet:"
        if not sees_c:
            return [(request + caption, page)]
        return [(f"{request}\nThe page that they need:", task["ground_truth"]), (caption, page)]

    def metric(self, trajectories):
        """The two similarities have two names: they are two scales and cannot be compared."""
        similarity = trajectories[0]["similarity"].partition(":")[0]
        return {"clip": "cosine_similarity", "pixels": "pixel_similarity"}[similarity]

    def eval_score(self, trajectory):
        return trajectory["reward"]

    def measure(self, trajectories):
        answers = [trajectory for trajectory in trajectories if trajectory["answer"]]
        faults = collections.Counter(answer.get("render_fault") for answer in answers)
        del faults[None]
        failed_tasks = {task_id(trajectory["task"]) for trajectory in trajectories if not trajectory["reference_image"]}
        metrics = {"no_page": 1 - len(answers) / len(trajectories),
                   "failed_renders": sum(not answer["image"] for answer in answers),
                   "failed_references": len(failed_tasks), "faults": dict(faults.most_common())}
        if failed_tasks:
            metrics["notes"] = [f"the solutions of {len(failed_tasks)} tasks cannot be rendered; no answer is like "
                                "them"]
        return metrics

    def facts(self, task, history):
        """The facts of a page are its slots, as "slot: value". A known one is in the idea, or the user has correctly
        asked for it."""
        if "slots" not in task:
            return None
        asked = set()
        for turn in history:
            if turn["role"] == "user":
                asked.update(asked_values(task, turn["content"]).items())
        rows = []
        for slot in task["slots"]:
            is_known = slot["told"] or (slot["slot"], slot["code"]) in asked
            rows.append((f"{slot['topic']}: {slot['names'][0]}", is_known))
        return rows
