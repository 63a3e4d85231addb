"""Stage 2: let an agent work with a simulated human on every task, and score the answers.

Reads   tasks.jsonl (01).
Writes  trajectories.jsonl in the published format, {"task", "dialogue_history", "answer", "reward"}, with "task_id",
        "sample", "tests" (a verdict a test), "num_rounds", "max_rounds"; an agent's turn has "input" (the rendered
        prompt), "output" (the raw text) and "output_ids" (the sampled ids); a person's turn that shows code "leak".
        "system_prompt" with --system-prompt, so that 03 and 04 render it again where they must.
        FILE.failed.jsonl where dialogues failed: the same command again plays these alone.
        Of pages also "similarity" (which one), "image" and "reference_image" (in the folder FILE.images).

The protocol (ColBench, backend): the person opens with the request. In each of `--max-rounds` rounds the agent sends a
message and the person answers it in at most 400 characters. What follows "I WANT TO ANSWER:" is the answer and ends the
episode; in the last round the whole turn is the answer if the marker is not in it. `reward` is the fraction of hidden
tests that the answer passes.

The protocol (ColBench, frontend; tasks whose reference is a page): in each round the agent sends an HTML page, which is
rendered in a browser without a network; the person compares it with the reference page and says the main differences,
in at most 1,000 characters. Of a turn with "OUTPUT:" only what follows is kept in the dialogue. After the last round
the last page is the answer, and `reward` the similarity of its picture with the reference's (--similarity). Humans:
`rules` reads both pages' DOM; a model that sees gets both pictures.

--best-of N: at each turn the agent samples N messages and a critic says which one is sent; it may see the reference, so
this measures a critic and is no way to use an agent. `--critic DIR` takes a critic of 03, `--critic judge:MODEL` a
model that compares two messages at a time, in both orders: where the orders disagree, or a verdict cannot be read, the
earlier message stays. The first message of each turn is the one that would be sent with N = 1.

Every dialogue goes its own way, `--concurrency` of them at a time. A model on this machine takes what waits for it in
batches; a server (http://HOST:PORT/v1#NAME, or http://A/v1,http://B/v1#NAME; for agents, humans and judges) is asked at
once. What a server's agent says has no token ids, so that 03 and 04 tokenise it anew, but for vLLM's with
--agent-tokenizer. Agents: a model (see README), or `script`, a noisy scripted agent for template tasks whose dialogues
a base model is taught by (`script-informed`: one that knows the reference). Humans: `rules` (template tasks), or a
model with a prompt. <think> blocks are kept in "output", and the other side does not see them.

Differs from the paper: the agent is told when the last round begins. The prompts are ours.

    python 02_rollout.py --tasks out/test.jsonl --agent out/policy --simulator rules --out out/trajectories.jsonl
    torchrun --nproc-per-node 8 02_rollout.py --tasks tasks.jsonl --agent meta-llama/Llama-3.1-8B-Instruct \\
        --simulator http://localhost:8000/v1#meta-llama/Llama-3.1-70B-Instruct --out trajectories.jsonl
"""
import argparse
import asyncio
import base64
import collections
import colorsys
import contextlib
import functools
import json
import os
import pathlib
import random
import re
import string
import sys
import time
from collections import namedtuple

import common

SIMULATOR_SYSTEM = (
    "You are a person who asked an assistant for a Python function, in these words:\n{problem_description}\n\n"
    "Only you know what you need: the function below. Answer the assistant's last message in one or two short "
    "sentences of plain English. Say only what was asked about. If the function does not settle it, say that you do "
    "not know. Never write or quote code.\n\n{ground_truth}")
VIEWER_SYSTEM = (
    "You are a person who asked an assistant for a web page, in these words:\n{problem_description}\n\nYou have the "
    "page that you want before your eyes: the first picture. The assistant cannot see it. Look at what the assistant "
    "made, and describe in a few sentences of plain English what differs most from your page: layout, colours, sizes, "
    "texts, what is missing. Answer what the assistant asks. Never write HTML or CSS.")
JUDGE = (
    "An assistant writes a Python function for a person. It cannot see what the person needs; you can:\n"
    "{ground_truth}\n\nThe dialogue so far:\n{dialogue}\n\nTwo ways for the assistant to go on:\n[A] {a}\n[B] {b}\n\n"
    "Which one brings the assistant nearer to the function that the person needs? Reply with the letter A or B alone.")
UNCLEAR = ("Could you ask about something specific?", "I am not sure what you mean.", "Please ask me about one thing.")
VAGUE = ("Can you tell me more?", "What else should I know?", "Could you describe the function?")
OPENERS = ("", "", "", "Thanks. ", "Okay. ", "One more question. ")
PAGE_TALK = ("Could you tell me more?", "What should it look like?", "Which colours do you like?")


# ---------------------------------------------------------------------------------------------------------------------
# humans

def rules_reply(task, history, rng):
    """The rule-based human: says what it knows of the (at most two) facts that the last message asks about."""
    asked = common.topics_asked(task["facts"], history[-1]["content"])
    if not asked:
        return rng.choice(UNCLEAR)
    return " ".join(rng.choice(task["facts"][index]["replies"]) for index in asked)


def simulator_messages(task, history):
    """The chat that a model sees which plays the human: the roles swapped, its own request in the system prompt."""
    swapped = {"assistant": "user", "user": "assistant"}
    return [{"role": "system", "content": SIMULATOR_SYSTEM.format(**task)}] + [
        {"role": swapped[turn["role"]], "content": turn["content"]} for turn in history[1:]]


def viewer_messages(task, history, reference, page):
    """The chat that a model sees which plays the human and looks at pictures (paths; page: None where none was
    sent)."""
    said = history[-1]["content"].replace(common.page_of(history[-1]["content"]) or "\0", "[the page]")
    parts = [{"type": "text", "text": "The page that I want:"}, {"type": "image", "path": reference}]
    if page:
        parts += [{"type": "text", "text": "The page that the assistant made:"}, {"type": "image", "path": page}]
    parts.append({"type": "text", "text": ("" if page else "The assistant has made no page that can be shown.\n") +
                  f"What the assistant says:\n{said}\n\nWhat do I answer?"})
    return [{"role": "system", "content": [{"type": "text", "text": VIEWER_SYSTEM.format(**task)}]},
            {"role": "user", "content": parts}]


# What a person sees of a rendered page: {aspect: [value, the share of the page's area that it covers]}. A colour is
# [red, green, blue]; null is what is not there. Parts are found by their tags, else by common class names, else by how
# they look.
SPEC_JS = r"""(() => {
  const root = document.documentElement, body = document.body;
  const W = Math.max(root.clientWidth, 1), H = Math.max(root.scrollHeight, 1), white = [255, 255, 255];
  const box = e => e.getBoundingClientRect(), style = e => getComputedStyle(e);
  const size = e => box(e).width * box(e).height;
  const seen = e => box(e).width > 1 && box(e).height > 1 && style(e).visibility == "visible" && style(e).opacity > 0.1;
  const share = n => Math.round(1e4 * Math.min(1, Math.max(0, n / (W * H)))) / 1e4;
  const all = selector => [...document.querySelectorAll(selector)].filter(seen);
  const first = (...selectors) => selectors.map(s => all(s)[0]).find(e => e);
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true}), known = {};
  const rgba = css => known[css] ??= (canvas.clearRect(0, 0, 1, 1), canvas.fillStyle = css, canvas.fillRect(0, 0, 1, 1),
                                      [...canvas.getImageData(0, 0, 1, 1).data]);
  const paint = e => {                                                    // its own colour; of a gradient the first one
    const gradient = style(e).backgroundImage.match(/gradient\(.*?((?:rgba?|hsla?|oklch|oklab|color)\([^)]*\))/);
    const colour = rgba(gradient ? gradient[1] : style(e).backgroundColor);
    return colour[3] > 127 ? colour.slice(0, 3) : null;
  };
  const under = e => { for (; e; e = e.parentElement) if (paint(e)) return paint(e); return white; };
  const cover = e => [...e.children].find(c => seen(c) && size(c) >= 0.9 * size(e) && (paint(c) || cover(c)));
  const surface = e => { while (cover(e) && !paint(e)) e = cover(e); return under(e); };
  const outer = e => !e.parentElement.closest("article, section, main, aside");

  let ground = body;
  while ([...ground.children].some(c => seen(c) && size(c) >= 0.9 * W * H && (paint(c) || c.children.length)))
    ground = [...ground.children].find(c => seen(c) && size(c) >= 0.9 * W * H && (paint(c) || c.children.length));
  const background = under(ground);
  const nav = first("nav, [role=navigation]", ".nav, .navbar, .navigation, #nav, .menu");
  const aside = first("aside, [role=complementary]", "[class*=sidebar], [id*=sidebar]");
  const header = all("header, [role=banner], .header, #header").find(outer) || all("body *").find(e =>
    e != nav && outer(e) && box(e).top < 40 && box(e).width > 0.6 * W && box(e).height > 20 && size(e) < 0.45 * W * H &&
    paint(e) && "" + paint(e) != "" + background);
  const footer = all("footer, [role=contentinfo], .footer, #footer").find(outer);
  const largest = list => list.sort((a, b) => size(b) - size(a))[0];
  const button = largest(all("button, [role=button], input[type=submit], input[type=button]")) ||
    largest(all("[class*=btn], [class*=button]")) ||
    largest(all("a").filter(a => paint(a) && !a.closest("nav") && "" + paint(a) != "" + under(a.parentElement)));
  const free = e => !e.closest("header, nav, aside, footer");
  const tagged = "article, [class~=card], [class*=card-], [class*=-card]";
  let cards = all(tagged).filter(e => free(e) && !e.parentElement.closest(tagged));
  if (cards.length < 2) {
    const groups = all("body, body *").filter(free).map(parent => {
      const kids = [...parent.children].filter(k =>
        seen(k) && free(k) && /^(DIV|LI|SECTION|FIGURE|A|TD)$/.test(k.tagName));
      const alike = kids.filter(k => k.tagName == kids[0].tagName && size(k) < 0.4 * W * H &&
                                     Math.abs(box(k).width / box(kids[0]).width - 1) < 0.2);
      const row = alike.some((k, i) => i && Math.abs(box(k).top - box(alike[0]).top) < 5);
      return alike.length > 1 && (row || alike.every(k => paint(k))) ? alike : [];
    });
    const total = list => list.reduce((sum, e) => sum + size(e), 0);
    cards = groups.sort((a, b) => total(b) - total(a))[0] || [];
  }
  const rows = cards.map(card => cards.filter(other => Math.abs(box(other).top - box(card).top) < 5).length);
  const area = cards.reduce((sum, card) => sum + size(card), 0);

  const texts = all("body *").map(e => {                                   // elements with text of their own
    const boxes = [...e.childNodes].filter(n => n.nodeType == 3 && n.data.trim()).map(n => {
      const range = document.createRange(); range.selectNodeContents(n); return range.getBoundingClientRect(); });
    return {e, area: boxes.reduce((sum, b) => sum + b.width * b.height, 0)};
  }).filter(text => text.area > 0);
  const kind = e => {
    const names = style(e).fontFamily.toLowerCase();
    return /mono|courier|consolas|menlo/.test(names) ? "monospace" : /cursive|comic|script/.test(names) ? "cursive" :
      /sans|system-ui|arial|helvetica|verdana|roboto|inter\b/.test(names) ? "sans-serif" :
      /serif|times|georgia|garamond|playfair/.test(names) ? "serif" : "sans-serif";
  };
  const fonts = {};
  for (const {e, area} of texts) fonts[kind(e)] = (fonts[kind(e)] || 0) + area;
  const font = Object.entries(fonts).sort((a, b) => b[1] - a[1])[0];
  const title = first("h1", "h2") || texts.map(text => text.e).sort((a, b) =>
    parseFloat(style(b).fontSize) - parseFloat(style(a).fontSize))[0];
  const words = e => (e.innerText || e.value || "").trim().replace(/\s+/g, " ");
  let place = null, line = 0;
  if (title) {
    const range = document.createRange(); range.selectNodeContents(title);
    const text = range.getBoundingClientRect(), frame = header && header.contains(title) ? box(header) : box(root);
    const left = text.left - frame.left, right = frame.right - text.right;
    const middle = Math.abs(left - right) < 0.1 * frame.width;
    place = middle ? "in the center" : left < right ? "on the left" : "on the right";
    line = text.width * text.height;
  }
  const pictures = all("img, video").filter(e => share(size(e)) > 0.002);
  const parts = [header, aside, footer, button, ...cards].filter(e => e).reduce((sum, e) => sum + size(e), 0);
  const part = (e, value) => [e ? value(e) : null, e ? share(size(e)) : 0];
  const middle = e => (box(e).left + box(e).right) / 2;
  return {
    background: [background, Math.max(0.05, share(W * H - parts))],
    header: part(header, surface), sidebar: part(aside, e => box(e).width > 0.7 * W ? "across the page" :
      middle(e) < W / 2 ? "on the left" : "on the right"), "sidebar colour": part(aside, surface),
    cards: [cards.length || null, share(area)], "card columns": [cards.length ? Math.max(...rows) : null, share(area)],
    "card colour": [cards.length ? surface(cards[0]) : null, share(area)],
    footer: part(footer, surface),
    pictures: [pictures.length || null, share(pictures.reduce((sum, e) => sum + size(e), 0))],
    navigation: part(nav, () => true), button: part(button, words), "button colour": part(button, surface),
    title: [title ? words(title) : null, share(line)], "title place": [place, share(line)],
    font: font ? [font[0], share(font[1])] : [null, 0],
  };
})()"""

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
# aspect: what the person calls it, how they say what it should be
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
    try:
        from PIL import ImageColor
    except ImportError:
        raise common.InputError("--simulator rules needs the package pillow for pages; pip install -r "
                                "tests/frontend.txt") from None
    names = [name for name in sorted(ImageColor.colormap) if "grey" not in name]        # cyan, not aqua
    return {ImageColor.getrgb(name): name for name in names}


def colour_words(colour):
    """What a person calls a colour: its name in CSS, or "a dark blue"."""
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
    """How a person puts the value of an aspect; `shown` is what the page has instead."""
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
    none. Specs are what SPEC_JS gives; None for the page: the agent has sent none."""
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
# the scripted agent

def script_turn(task, history, max_rounds, informed, rng):
    """What the noisy scripted agent says next. It asks for facts that matter less often than it should, repeats itself,
    asks about things that do not matter, and sometimes answers too early, guessing what it does not know."""
    facts, known = task["facts"], common.known_facts(task, history)
    needed = [i for i, fact in enumerate(facts) if fact["matters"] and i not in known]
    idle = [i for i, fact in enumerate(facts) if not fact["matters"] and i not in known]
    num_turns = sum(turn["role"] == "assistant" for turn in history)
    early, vague, repeat, useless = (0.01, 0.03, 0.04, 0.10) if informed else (0.03, 0.06, 0.14, 0.37)
    luck = rng.random()
    if num_turns + 1 == max_rounds or luck < (early if needed else 0.85):
        values = {fact["slot"]: fact["code"] if informed or i in known else rng.choice(fact["guesses"])
                  for i, fact in enumerate(facts) if fact["matters"]}
        return f"{common.MARKER}\n{task['template'].format(**values)}"
    luck = rng.random()
    if luck < vague:
        return rng.choice(VAGUE)
    if luck < vague + repeat and known:
        ask = rng.choice(sorted(known))
    elif luck < vague + repeat + useless or not needed:
        ask = rng.choice(idle or sorted(known))
    else:
        ask = rng.choice(needed)
    return (rng.choice(OPENERS) if len(history) > 1 else "") + rng.choice(facts[ask]["questions"])


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


def script_page(task, history, informed, rng):
    """What the noisy scripted designer sends next: a guess at first, then its last page with what the person asked for
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
    return f"{thought}\n{common.OUTPUT}\n{page}" if rng.random() < 1 / 3 else page


# ---------------------------------------------------------------------------------------------------------------------
# one turn of a dialogue. A dialogue is {"number", "task", "sample", "history", "answer", "waited_s"}; who speaks is a
# Speaker, a local model (engine) or a server, or None for the scripted agent and the rule-based human.

Speaker = namedtuple("Speaker", "model tokenizer engine server template_args sees",
                     defaults=(None, None, None, None, {}, None))


def open_speaker(name, role, opened, args, device, sees=False):
    """The Speaker of a role (agent, simulator, judge); a name is opened once for all of its roles. sees: it will be
    shown pictures, and a local one takes one request at a time (then .sees is a lock, and .tokenizer a processor)."""
    if name not in opened:
        if common.is_server(name):
            opened[name] = Speaker(server=common.open_server(name, args.timeout, args.retries))
        elif sees:
            opened[name] = Speaker(*common.load_vision(name, device, args.dtype), sees=asyncio.Lock())
        else:
            model, tokenizer = common.load_model(name, device, args.dtype)
            roles = 2 if args.agent == args.simulator else 1        # each side of a dialogue has its own cache
            engine = common.Engine(model.eval(), common.stop_ids(model, tokenizer),
                                   roles * args.concurrency * args.best_of, args.max_tokens,
                                   functools.partial(has_stop, tokenizer=tokenizer, args=args) if args.stop else None)
            opened[name] = Speaker(model, tokenizer, engine)
    return opened[name]._replace(template_args=args.chat_template_args.get(role, {}))


def has_stop(ids, tokenizer, args):
    """Whether the last of some sampled ids has brought a text of --stop to its end."""
    tail = tokenizer.decode(ids[-40:], skip_special_tokens=False)
    return any(text in tail for text in args.stop)


def new_dialogue(task, sample, number=0, history=None, system=None):
    """`system`: the agent's system prompt; None: ours."""
    history = history or [{"role": "user", "content": task["problem_description"]}]
    return {"number": number, "task": task, "sample": sample, "history": history, "system": system, "answer": None,
            "waited_s": 0.0}


def dialogue_key(dialogue, args, who):
    return args.seed, common.task_id(dialogue["task"]), dialogue["sample"], len(dialogue["history"]), who


async def ask(speaker, chat, key, temperature, max_new_tokens, args, count=1, cache=None, **fields):
    """(prompt text, [common.Reply, …]): `count` continuations of a chat (messages) by a model, drawn with the random
    numbers of `key`. `cache` lets the engine find what it has computed for this dialogue; a server gets more `fields`,
    and its prompt is only known with its tokenizer."""
    tokenizer, more = speaker.tokenizer, speaker.template_args
    prompt = tokenizer and tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **more)
    if speaker.server:
        fields |= ({"chat_template_kwargs": more} if more else {}) | ({"stop": args.stop} if args.stop else {})
        seed = common.server_seed(*key)
        return prompt, [await common.server_reply(speaker.server, chat, temperature, max_new_tokens, seed, **fields)]
    ids, stops = common.encode(tokenizer, prompt), common.stop_ids(speaker.model, tokenizer)
    outputs = await speaker.engine.generate(ids, common.uniforms((count, max_new_tokens), *key), temperature, cache)
    replies = []
    for new in outputs:
        text = tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for stop in args.stop:                                       # servers leave it out, too
            text = text.split(stop, 1)[0]
        replies.append(common.Reply(text, new[-1] in stops or has_stop(new, tokenizer, args), new, None, len(ids),
                                    len(new)))
    return prompt, replies


def visible(speaker, prompt, reply):
    """What the other side sees of a reply. A server may already have put apart the thoughts that its prompt opened."""
    return common.visible_text(reply.text, None if speaker.server else prompt)


async def look(speaker, messages, key, temperature, args):
    """The Reply of a model that sees to messages with pictures. A server gets them as data URLs."""
    if speaker.sees:
        async with speaker.sees:
            return await asyncio.to_thread(common.vision_reply, speaker.model, speaker.tokenizer, messages,
                                           args.simulator_max_new_tokens)

    def sent(part):
        if part["type"] == "text":
            return part
        data = base64.b64encode(pathlib.Path(part["path"]).read_bytes()).decode()
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    chat = [{**message, "content": [sent(part) for part in message["content"]]} for message in messages]
    seed = common.server_seed(*key)
    return await common.server_reply(speaker.server, chat, temperature, args.simulator_max_new_tokens, seed)


async def agent_turn(dialogue, agent, chooser, args):
    """The agent's next turn. A model sees the dialogue alone; with --best-of it is the one of several that `chooser`
    prefers. A server's turn has the prompt and the sampled ids only with --agent-tokenizer."""
    task, history, key = dialogue["task"], dialogue["history"], dialogue_key(dialogue, args, "agent")
    frontend = common.is_frontend(task)
    if agent is None:
        informed, rng = args.agent == "script-informed", random.Random(repr(key))
        text = (script_page(task, history, informed, rng) if frontend else
                script_turn(task, history, args.max_rounds, informed, rng))
        return {"role": "assistant", "content": common.shown_text(text, frontend)}
    fields = ({"logprobs": True} if args.server_logprobs else {}) | (
        {"return_token_ids": True} if args.agent_tokenizer else {})
    chat = common.agent_messages(history, args.max_rounds, frontend, dialogue["system"])
    prompt, replies = await ask(agent, chat, key, args.temperature, args.max_new_tokens, args, args.best_of,
                                ("agent", dialogue["number"]), **fields)
    reply = replies[await chooser(dialogue, prompt, replies) if args.best_of > 1 else 0]
    if args.agent_tokenizer and (not reply.ids or reply.prompt_tokens != len(common.encode(agent.tokenizer, prompt))):
        raise common.InputError(f"{args.agent}: --agent-tokenizer needs a server that gives token ids, as vLLM does, "
                                "and reads prompts as this tokenizer and template make them; this one does not")
    content = common.shown_text(visible(agent, prompt, reply), frontend)
    turn = {"role": "assistant", "content": content, "input": prompt, "output": reply.text, "output_ids": reply.ids,
            "output_logps": reply.logps, "truncated": not reply.ended}
    return {key: value for key, value in turn.items() if value or key in ("content", "output")}


async def critic_choice(dialogue, prompt, replies, critic, tokenizer, device, browser=None):
    """The number of the reply with the highest score of a critic (03), or of the oracle. A visual critic is shown what
    `browser` renders."""
    states = [common.State(prompt, dialogue["task"], dialogue["history"], [reply.ids for reply in replies],
                           [reply.text for reply in replies])]
    if not isinstance(critic, str) and critic.get("visual"):
        pages = common.pages_needed(critic, states)
        renders = await asyncio.gather(*map(browser.render, pages))
        critic = {**critic, "show": lambda _: {page: render.image for page, render in zip(pages, renders)}}
    [scores] = common.score_actions(critic, tokenizer, states, 16384, device)
    return max(range(len(scores)), key=scores.__getitem__)


async def judge_choice(dialogue, _, replies, judge, counts, args):
    """The number of the reply that is left after comparing the best so far with the next, N - 1 times; `counts` counts
    verdicts "decided", "tie" (the two orders disagree) and "unreadable"."""
    texts = [reply.text.strip() for reply in replies]
    said = "\n".join(f"{'Assistant' if turn['role'] == 'assistant' else 'Person'}: {turn['content']}"
                     for turn in dialogue["history"])

    async def letters(a, b):
        content = JUDGE.format(ground_truth=dialogue["task"]["ground_truth"], dialogue=said, a=texts[a], b=texts[b])
        key = dialogue_key(dialogue, args, "judge")
        prompt, [reply] = await ask(judge, [{"role": "user", "content": content}], key, 0.0, 8, args)
        return set(re.findall(r"\b[AB]\b", visible(judge, prompt, reply)))

    best = 0
    for challenger in range(1, len(texts)):
        if texts[best] == texts[challenger]:
            continue
        first, second = await asyncio.gather(letters(best, challenger), letters(challenger, best))
        verdict = "unreadable" if len(first) != 1 or len(second) != 1 else "tie" if first == second else "decided"
        counts[verdict] += 1
        if verdict == "decided" and first == {"B"}:
            best = challenger
    return best


async def rendered(dialogue, browser, **options):
    """(reference page, the page so far) of a frontend dialogue as common.Render; the second is None where the agent has
    sent none. A page that cannot be shown leaves "render_fault" in the agent's turn. InputError if it is the
    reference."""
    task, turn = dialogue["task"], dialogue["history"][-1]
    reference = await browser.render(task["ground_truth"], **options)
    if reference.fault and not reference.image and not reference.spec:
        raise common.InputError(f"task {common.task_id(task)}: its reference page cannot be rendered: "
                                f"{reference.fault}")
    page = common.last_page(dialogue["history"])
    render = await browser.render(page, **options) if page else None
    if render and render.fault and common.page_of(turn["content"]):
        turn["render_fault"] = render.fault
    return reference, render


async def person_turn(dialogue, person, args, browser):
    """The person's answer to the agent's turn that ends the history. Where it shows code, "leak" says how; with
    --reject-leaks it is sampled anew, at temperature 1, as temperature 0 would repeat it."""
    task, history, key = dialogue["task"], dialogue["history"], dialogue_key(dialogue, args, "human")
    rng, frontend = random.Random(repr(key)), common.is_frontend(task)
    if person is None and frontend:
        reference, page = await rendered(dialogue, browser, picture=False, read=SPEC_JS)
        sent = common.page_of(history[-1]["content"])
        return {"role": "user", "content": page_reply(reference.spec, page.spec if sent else None, rng)}
    if person is None:
        return {"role": "user", "content": rules_reply(task, history, rng)}
    limit = common.MAX_PAGE_REPLY_CHARS if frontend else common.MAX_REPLY_CHARS
    for attempt in range(args.reject_leaks + 1):
        temperature, attempt_key = (1.0, (*key, attempt)) if attempt else (0.0, key)
        if frontend:
            reference, page = await rendered(dialogue, browser)
            messages = viewer_messages(task, history, reference.image, page and page.image)
            prompt, reply = None, await look(person, messages, attempt_key, temperature, args)
        else:
            prompt, [reply] = await ask(person, simulator_messages(task, history), attempt_key, temperature,
                                        args.simulator_max_new_tokens, args, cache=("human", dialogue["number"]))
        content = visible(person, prompt, reply)[:limit]
        leak = common.leak_of(task, content)
        if leak is None:
            break
    turn = {"role": "user", "content": content, "output": reply.text if reply.text.strip() != content else None,
            "leak": leak, "resampled": attempt}
    return {key: value for key, value in turn.items() if value or key == "content"}


# ---------------------------------------------------------------------------------------------------------------------
# episodes

async def play(dialogue, agent, person, chooser, args, browser=None):
    """Play one dialogue from where it stands to its answer."""
    history, frontend = dialogue["history"], common.is_frontend(dialogue["task"])
    while dialogue["answer"] is None:
        if history[-1]["role"] == "user":
            history.append(await agent_turn(dialogue, agent, chooser, args))
        content, last = history[-1]["content"], len(history) == 2 * args.max_rounds
        if frontend and last:
            dialogue["answer"] = common.last_page(history) or ""
        elif common.MARKER in content and not frontend:
            dialogue["answer"] = content.split(common.MARKER, 1)[1].strip("\n")
        elif last:
            dialogue["answer"] = content
        else:
            begin = time.perf_counter()
            history.append(await person_turn(dialogue, person, args, browser))
            dialogue["waited_s"] += time.perf_counter() - begin


async def each(work, items, concurrency):
    """work(item) for all items, `concurrency` of them in flight: who has ended one takes the next at once. What work()
    may return, a coroutine, is done beside: its time must not decide what a local model has in one batch."""
    waiting, beside = iter(items), []

    async def worker():
        for item in waiting:
            if (rest := await work(item)) is not None:
                beside.append(asyncio.create_task(rest))
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    await asyncio.gather(*beside)


# ---------------------------------------------------------------------------------------------------------------------
# the output: finished dialogues are appended to a partial file of the rank as "NUMBER ROW", in any order

def partial_files(out):
    return [path for path in out.parent.iterdir()
            if re.fullmatch(re.escape(out.name) + r"\.\d+of\d+\.partial", path.name)]


def find_rows(out):
    """{number of a finished dialogue: (file, offset)} of what all ranks, of this run and those before, have written. A
    line that a kill has cut is none."""
    places = {}
    for path in partial_files(out):
        with open(path, "rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    places[int(line.split(b" ", 1)[0])] = (path, file.tell() - len(line))
    return places


def open_partial(path):
    """The file to append to, without the line that a kill has cut."""
    with open(path, "ab+") as file:
        file.seek(0)
        file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))
    return open(path, "a", encoding="utf-8", errors="backslashreplace")


def merge(out, num_rows):
    """Make the output whole, in the order of the numbers, and remove the partial files."""
    places = find_rows(out)
    files = {path: open(path, "rb") for path, _ in places.values()}
    with open(f"{out}.partial", "wb") as whole:
        for number in range(num_rows):
            path, offset = places[number]
            files[path].seek(offset)
            whole.write(files[path].readline().split(b" ", 1)[1])
    os.rename(f"{out}.partial", out)
    for file in files.values():
        file.close()
    for path in partial_files(out):
        path.unlink()
    pathlib.Path(f"{out}.failed.jsonl").unlink(missing_ok=True)
    common.say(f"writes {out} ({num_rows:,} rows)")


def read_text(path):
    """A file's text as it is, but for a newline at its end."""
    try:
        return pathlib.Path(path).read_bytes().decode().removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise common.InputError(f"{path}: cannot be read as UTF-8 text ({common.one_line(error)})") from None


def to_trajectory(dialogue, verdicts, tokenizer, args):
    """The finished dialogue in the published format, with what score_answer says of it."""
    task, history = dialogue["task"], dialogue["history"]
    return {"task_id": common.task_id(task), "sample": dialogue["sample"], "task": task, "dialogue_history": history,
            "answer": dialogue["answer"], **verdicts,
            "num_rounds": sum(turn["role"] == "assistant" for turn in history), "max_rounds": args.max_rounds,
            "agent": args.agent, "simulator": args.simulator, "tokenizer": tokenizer,
            "best_of": args.best_of, "critic": args.critic,
            "informed": args.agent == "script-informed",
            **({} if dialogue["system"] is None else {"system_prompt": dialogue["system"]})}


async def finish(item, browser, speakers, scorer, file, progress, tally, failed, tokenizer, system, args):
    """Play a dialogue, (number, task, sample); returns what scores it and appends its row to `file`. One that a server
    does not answer goes to `failed`; many of these in a row end the run."""
    number, task, sample = item
    dialogue, begin = new_dialogue(task, sample, number, system=system), time.perf_counter()
    try:
        await play(dialogue, *speakers, args, browser)
    except common.ReplyError as error:
        failed.append({"number": number, "task_id": common.task_id(task), "sample": sample, "failed": str(error),
                       "dialogue_history": dialogue["history"]})
        progress.set_postfix_str(f"{len(failed):,} failed")
        tally["failed in a row"] += 1
        if tally["failed in a row"] >= max(20, args.concurrency):
            raise common.InputError(f"{args.out}: {tally['failed in a row']} dialogues in a row failed, the last with "
                                    f"{error}; run the same command again to go on") from None
        return None
    tally["played_s"] += time.perf_counter() - begin
    tally["waited_s"] += dialogue["waited_s"]
    tally["failed in a row"] = 0
    return record(dialogue, browser, scorer, file, progress, tally, tokenizer, args)


async def score_answer(dialogue, browser, scorer, args):
    """{"reward", "tests"} of a function, {"reward", "similarity", "image", "reference_image"} of a page."""
    if browser is None:
        [score] = await asyncio.to_thread(scorer.score, [(dialogue["task"], dialogue["answer"])])
        return {"reward": common.reward_of(score.tests), "tests": score.tests}
    reference, page = await rendered(dialogue, browser)
    images = [render and render.image for render in (reference, page)]
    [similarity] = await asyncio.to_thread(scorer.score, [tuple(images)])
    reference, image = (path and os.path.relpath(path, pathlib.Path(args.out).parent) for path in images)
    return {"reward": similarity, "similarity": scorer.name, "image": image, "reference_image": reference}


async def record(dialogue, browser, scorer, file, progress, tally, tokenizer, args):
    verdicts = await score_answer(dialogue, browser, scorer, args)
    row = json.dumps(to_trajectory(dialogue, verdicts, tokenizer, args), ensure_ascii=False)
    file.write(f"{dialogue['number']} {row}\n")
    file.flush()
    tally["played"] += 1
    progress.update()


def report(opened, ranks, wall_s):
    """Print how fast it went, all ranks together; ranks: the "tally", "stats" and "verdicts" of each."""
    def total(dicts):
        return functools.reduce(lambda a, b: {key: a.get(key, 0) + b.get(key, 0) for key in {**a, **b}}, dicts)

    tally = total([rank["tally"] for rank in ranks])
    print(f"{tally['played']:,} dialogues in {wall_s:,.0f} s, {60 * tally['played'] / wall_s:,.1f} a minute; they "
          f"waited {tally['waited_s']:,.1f} s of {tally['played_s']:,.1f} s for the person")
    for name in ranks[0]["stats"]:
        stats = total([rank["stats"][name] for rank in ranks])
        if opened[name].server:
            retried = [f"{count:,} {key[9:]}" for key, count in stats.items() if key.startswith("retried: ")]
            print(f"{name}: {stats.get('requests', 0):,} requests, {stats.get('prompt_tokens', 0):,} prompt and "
                  f"{stats.get('completion_tokens', 0):,} completion tokens; retried: {', '.join(retried) or 'none'}")
        else:
            speeds = [f"{what} {stats[what + '_tokens']:,} tokens, "
                      f"{len(ranks) * stats[what + '_tokens'] / max(1e-9, stats[what + '_s']):,.0f} a second"
                      for what in ("prefill", "decode")]
            print(f"{name}: {'; '.join(speeds)}; {stats['reused_tokens']:,} tokens reused; occupancy "
                  f"{stats['occupancy'] / len(ranks):.0%}")
    verdicts = total([rank["verdicts"] for rank in ranks])
    if any(verdicts.values()):
        print("judge's comparisons: " + ", ".join(f"{count:,} {verdict}" for verdict, count in verdicts.items()))


def summary(trajectories):
    """One line: success, tests passed, rounds, what was cut or forced, and replies of the person that show code; of
    pages the similarity, and how many could not be shown."""
    sums, leaks, kind = collections.Counter(), collections.Counter(), None
    for t in trajectories:
        kind = t.get("similarity")
        agent = [turn for turn in t["dialogue_history"] if turn["role"] == "assistant"]
        person = [turn for turn in t["dialogue_history"][1:] if turn["role"] == "user"]
        sums.update(n=1, success=t["reward"] == 1, reward=t["reward"], rounds=t["num_rounds"], replies=len(person),
                    forced=common.MARKER not in agent[-1]["content"], cut=sum("truncated" in turn for turn in agent),
                    rejected=sum(turn.get("resampled", 0) for turn in person), no_page=not t["answer"],
                    faults=sum("render_fault" in turn for turn in agent))
        leaks.update(turn["leak"] for turn in person if "leak" in turn)
    mean = {key: value / sums["n"] for key, value in sums.items()}
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(leaks.items()))
    head = (f"similarity ({kind}) {mean['reward']:.3f} | {mean['no_page']:.1%} without a page | {sums['faults']} pages "
            "could not be shown as they are" if kind else
            f"success {mean['success']:.3f} | tests passed {mean['reward']:.3f} | rounds {mean['rounds']:.2f} | "
            f"{mean['forced']:.1%} ended without the marker")
    return (f"{head} | {sums['cut']} turns stopped by --max-new-tokens | "
            f"{leaks.total() / max(1, sums['replies']):.1%} of the person's replies leak code" +
            (f" ({kinds})" if kinds else "") + (f", {sums['rejected']} rejected" if sums["rejected"] else ""))


# ---------------------------------------------------------------------------------------------------------------------

PRESETS = {f"paper-{domain}": {"max_rounds": 10, "temperature": 1.0, "max_new_tokens": 1024, "dtype": "bfloat16"}
           for domain in ("backend", "frontend")}


def parse_args(argv=None):
    parser = common.argument_parser(__doc__)
    parser.add_argument("--tasks", required=True, help="tasks file (01)")
    parser.add_argument("--agent", required=True, help="a model (folder, hub id, smollm2), script or script-informed")
    parser.add_argument("--simulator", default="rules", help="who plays the human: rules, or a model")
    parser.add_argument("--samples", type=common.positive_int, default=1, help="dialogues a task")
    parser.add_argument("--max-rounds", type=common.positive_int, default=10, help="agent turns in a dialogue")
    parser.add_argument("--single-turn", action="store_true", help="the agent answers at once (--max-rounds 1)")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the agent; the human's is 0")
    parser.add_argument("--max-new-tokens", type=common.positive_int, default=1024, help="tokens a turn of the agent")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT",
                        help="ends a turn, beside the model's own end tokens; can be given more than once")
    parser.add_argument("--system-prompt", metavar="FILE",
                        help="its text, taken as it is, is the agent's system prompt in place of ours and of our note "
                        "on the last round; 01 --trajectories writes that of published ones")
    parser.add_argument("--best-of", type=common.positive_int, default=1, help="messages sampled at each turn")
    parser.add_argument("--critic", help="who picks one of --best-of: a critic folder (03), judge:MODEL, or oracle "
                        "(-patient): what the template task says of a turn")
    # the person
    parser.add_argument("--simulator-max-new-tokens", type=common.positive_int,
                        help="tokens a reply of a model that plays the human, of which 400 characters are shown, 1,000 "
                        "on pages (None: 128, on pages 320)")
    parser.add_argument("--reject-leaks", type=int, default=0, metavar="N",
                        help="sample a reply of the human that shows code again, up to N times")
    # models and servers
    parser.add_argument("--concurrency", type=common.positive_int, default=64, help="dialogues in flight")
    parser.add_argument("--max-tokens", type=common.positive_int, default=16384,
                        help="of a dialogue, and of a pass of a local model over prompts")
    parser.add_argument("--chat-template-args", type=json.loads, default={}, metavar="JSON", help="arguments of "
                        "chat templates by role: {\"agent\": {\"enable_thinking\": false}, \"simulator\": …, …}")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that a request to a server may take")
    parser.add_argument("--retries", type=int, default=8, help="times that a failed request is tried again")
    parser.add_argument("--server-logprobs", action="store_true",
                        help="keep the log-probabilities of what a server's agent says")
    parser.add_argument("--agent-tokenizer", metavar="MODEL", help="the tokenizer of a vLLM server's agent: keeps the "
                        "sampled ids and the prompt, so that 03 and 04 train on just these")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="arithmetic of the models")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samples")
    common.add_scorer(parser)
    common.add_browser(parser)
    common.add_similarity(parser)
    parser.add_argument("--out", required=True, help="trajectories file to write (JSONL)")
    common.add_overwrite(parser)
    common.set_preset(parser, PRESETS, argv)
    args = parser.parse_args(argv)
    if args.best_of > 1 and (args.critic is None or args.agent.startswith("script")):
        parser.error("--best-of needs an agent that is a model, and --critic DIR or judge:MODEL")
    if args.system_prompt and args.agent.startswith("script"):
        parser.error("--system-prompt is for an agent that is a model")
    by_role = args.chat_template_args
    if not (isinstance(by_role, dict) and by_role.keys() <= {"agent", "simulator", "judge"} and
            all(isinstance(own, dict) for own in by_role.values())):
        parser.error("--chat-template-args: an object with an object for agent, simulator or judge")
    if min(args.reject_leaks, args.retries) < 0 or args.timeout <= 0:
        parser.error("--reject-leaks and --retries cannot be negative, and --timeout must be positive")
    if args.agent_tokenizer and not common.is_server(args.agent):
        parser.error("--agent-tokenizer is for an agent behind http://; others bring their own")
    return args


def main(argv=None):
    args = parse_args(argv)
    if args.single_turn:
        args.max_rounds = 1
    from tqdm import tqdm
    runtime = common.start(args.seed)
    tasks = common.read_jsonl(args.tasks, common.TASK_KEYS)
    scripted, frontend = args.agent.startswith("script"), common.is_frontend(tasks[0])
    oracle = args.critic in common.ORACLES
    args.simulator_max_new_tokens = args.simulator_max_new_tokens or (320 if frontend else 128)
    lacking = "slots" if frontend and scripted else "facts"
    if args.simulator == "rules" and not frontend or scripted or oracle:
        for number, task in enumerate(tasks, 1):
            if lacking not in task:
                raise common.InputError(f'{args.tasks}:{number}: missing "{lacking}", which the rules of template '
                                        "tasks need; use --agent MODEL --simulator MODEL, and a critic that is no "
                                        "oracle")
    if frontend and (args.critic or "").startswith("judge:"):
        raise common.InputError("--critic judge: compares messages about functions; pages need a critic of 03")
    inputs = [args.tasks, args.agent, args.simulator, None if oracle else (args.critic or "").removeprefix("judge:"),
              args.agent_tokenizer, args.system_prompt]
    system = read_text(args.system_prompt) if args.system_prompt else None
    record = argparse.Namespace(**{k: v for k, v in vars(args).items() if k != "concurrency"})     # it changes no row
    if common.claim_output(record, args.out, inputs, begin=False):
        return

    opened, verdicts, critic = {}, dict.fromkeys(("decided", "tie", "unreadable"), 0), None
    load = functools.partial(open_speaker, opened=opened, args=args, device=runtime.device)
    agent = None if scripted else load(args.agent, "agent")
    if args.best_of > 1 and agent.server:
        raise common.InputError("--best-of needs an agent whose tokens are at hand: a folder or hub id, no server")
    if args.agent_tokenizer:
        agent = agent._replace(tokenizer=common.load_tokenizer(args.agent_tokenizer))
    if agent and agent.tokenizer:
        common.check_system_prompt(args.agent, agent.tokenizer, system, args.max_rounds, frontend)
    person = None if args.simulator == "rules" else load(args.simulator, "simulator", sees=frontend)
    if person and person.sees and args.reject_leaks:
        raise common.InputError("--reject-leaks: a local model that sees always says the same; use a server")
    browser = page_scorer = None
    if frontend:
        browser = common.BrowserThread(f"{args.out}.images", args.browser)
        page_scorer = common.PageScorer(args.similarity, args.clip_model, runtime.device)
    chooser = None
    if args.best_of > 1 and args.critic.startswith("judge:"):
        judge = load(args.critic.removeprefix("judge:"), "judge")
        chooser = functools.partial(judge_choice, judge=judge, counts=verdicts, args=args)
    elif args.best_of > 1:
        critic = args.critic if oracle else common.load_critic(
            common.read_critic(args.critic, agent.tokenizer, frontend), common.load_whole(runtime.device, args.dtype))
        chooser = functools.partial(critic_choice, critic=critic, tokenizer=agent.tokenizer, device=runtime.device,
                                    browser=browser)
    if common.claim_output(record, args.out, inputs):
        return

    costs, out = common.Costs(args.out, runtime.device), pathlib.Path(args.out)
    name = common.tokenizer_name(agent.tokenizer) if agent and agent.tokenizer else None
    models = [speaker.model for speaker in opened.values() if speaker.model]
    models += [critic["model"], *filter(None, [critic["reference"]])] if critic and not oracle else []
    servers = [speaker.server.counts for speaker in opened.values() if speaker.server]
    tally, failed = {"played": 0, "played_s": 0.0, "waited_s": 0.0, "failed in a row": 0}, []

    def record_costs():
        costs.record([common.work_of(model) for model in models], servers=servers)

    items = [(number, task, sample) for number, (task, sample) in
             enumerate((task, sample) for task in tasks for sample in range(args.samples))]
    done = find_rows(out)
    common.barrier()                                                 # before any rank adds to what all must read alike
    mine = [item for item in items if item[0] not in done][runtime.rank::runtime.world_size]
    if done:
        common.say(f"{len(done):,} of {len(items):,} dialogues are there already")
    with (contextlib.nullcontext(page_scorer) if page_scorer else common.Scorer(args.unsafe_scorer) as scorer,
          browser or contextlib.nullcontext(),
          open_partial(out.with_name(f"{out.name}.{runtime.rank}of{runtime.world_size}.partial")) as file,
          tqdm(total=len(mine), unit="dialogue", desc=out.name, mininterval=5, disable=runtime.rank > 0) as progress):
        try:
            asyncio.run(each(functools.partial(
                finish, browser=browser, speakers=(agent, person, chooser), scorer=scorer, file=file,
                progress=progress, tally=tally, failed=failed, tokenizer=name, system=system, args=args), mine,
                args.concurrency))
        except common.InputError:
            if runtime.world_size == 1:                              # the tokens are paid for (ranks need each other)
                record_costs()
            raise
    stats = {key: speaker.server.counts if speaker.server else speaker.engine.stats for key, speaker in opened.items()
             if not speaker.sees}
    ranks = common.gather({"tally": tally, "failed": failed, "stats": stats, "verdicts": verdicts})
    record_costs()
    failed = sorted((row for rank in ranks for row in rank["failed"]), key=lambda row: row["number"])
    if runtime.rank == 0:
        report(opened, ranks, time.perf_counter() - costs.begin)
        if failed:
            common.write_jsonl(f"{out}.failed.jsonl", failed)
        else:
            merge(out, len(items))
            with open(out, encoding="utf-8") as rows:
                print(summary(map(json.loads, rows)), flush=True)
    common.barrier()
    if failed and runtime.rank == 0:
        raise common.InputError(f"{out}: {len(failed):,} of {len(items):,} dialogues failed, the first with "
                                f"{failed[0]['failed']}; run the same command again to play these")
    if failed:
        sys.exit(2)


if __name__ == "__main__":
    common.run_stage(main)
