"""Stage 1: make collaborative tasks in ColBench's format, by rule or by a model, or take ColBench's own: Python
functions (--domain backend) or web pages (--domain frontend).

Reads   nothing (--source template), a model and texts (--source llm), the published files (--source colbench), the
        data set WebSight (--source websight), or a tasks file (--check).
Writes  tasks.jsonl, one task a line: {"problem_description", "ground_truth", "test_cases"} as published, "task_id", and
        of template tasks {"family", "template", "facts"}, which the rule-based human and the scripted agent of 02 read;
        with --source llm also tasks.rejected.jsonl: {"attempt", "seed_text", "reason", "detail", "reply"};
        with --trajectories: trajectories.jsonl, as published, with "task_id", "sample" and "reward", and beside it
        FILE.system_prompt.txt: the agent's system prompt, from the logged prompts, for 02 --system-prompt.
        Tasks of pages have no "test_cases", and template ones "slots" in place of "facts".

A template task is a vague request with a signature, a reference function and 10 test calls. What the request leaves
out stands in `facts`: those that matter (thresholds, prices, orders, words: each is a value in the reference) and
plausible ones that do not (`matters: false`: the delivery time of a parcel whose price depends on its weight alone).
A task is kept only if its reference runs on all its tests, and if every fact that matters does so provably: with any
other value of that fact at least one test gives another result.

Splits are disjoint by content: the hash of the reference puts a task into train (80 %), validation (10 %) or test
(10 %), whatever the seed. No two tasks of a file have the same reference.

--source llm lets a model (--model) write the tasks: a text, an excerpt of --seeds or one of our topics, gives it the
idea, and it replies with one JSON object: a vague request, a function, 10 calls. A task is kept if the request names
the signature and quotes no other code, the function has at most 50 lines and gives the same values twice and with
other hash seeds, not all of them equal, and no kept task is like it. It goes on until --num-tasks are kept; what is
rejected is kept apart, with the reason and the reply. What the person knows stands in no list of facts, so the human
must be a model, too. SmolLM2-135M is too small to write one (none in 6 replies).

--source colbench takes the published tasks as they are, from the Hugging Face hub or from --path: a folder with
backend_tasks/train.jsonl and backend_tasks/test.jsonl, or one JSONL file, which is taken whole. --trajectories takes
the published offline trajectories instead, every row and key as it is: a row gets "task_id" and "sample" (0, 1, 2 ...
by order of appearance of its task: the file holds its samples of the tasks as blocks one after the other), and a row
without "reward" gets "reward" and "tests" from our scorer.

--domain frontend: a task is an idea of a page in one line and its HTML. Template pages are short, as a small model
writes one whole in every turn. Each slot of such a page (colours, layout, font, title) shows: with any other value the
page looks different, which tests/test_pages.py proves in a browser. --source websight takes ideas and pages of
WebSight v0.2, from the hub or from --path (parquet, or JSONL with its keys), as ColBench does: in the data set's order,
without repeats, and every picture is the same photo in the size that its address asks for. --source colbench takes a
file of published tasks of pages as it is.

--check FILE writes no tasks but says what is wrong with those of a file: references that raise, lack a package, are
random or return what cannot be compared; tests that say nothing; and how far an answer comes that always returns the
same value (the best one for each task), the floor under every "tests passed".

Differs from the paper: ColBench's tasks were written by Llama-3.1-70B-Instruct. Template tasks need no model, and a
human that answers by rule can play them; for tasks of a model the prompt and the checks are ours.

    python 01_generate_tasks.py --split train --num-tasks 1000 --seed 0 --out out/train.jsonl
    python 01_generate_tasks.py --split test --num-tasks 300 --seed 1 --out out/test.jsonl
    python 01_generate_tasks.py --check out/test.jsonl
    python 01_generate_tasks.py --source llm --model http://localhost:8000/v1#NAME --num-tasks 1000 --split train \\
        --out llm/train.jsonl
    python 01_generate_tasks.py --source colbench --split test --out colbench/test.jsonl
    python 01_generate_tasks.py --source colbench --trajectories --path LOCAL_COPY --out colbench/offline.jsonl
    python 01_generate_tasks.py --domain frontend --split train --num-tasks 1000 --out pages/train.jsonl
    python 01_generate_tasks.py --source websight --path LOCAL_COPY --split train --num-tasks 10000 --out pages.jsonl
"""
import ast
import asyncio
import collections
import contextlib
import functools
import hashlib
import itertools
import json
import pathlib
import random
import re
import string
import warnings

import torch

import common

# Ranges of numbers. Facts of one family have disjoint ranges, as prices, ages and limits mostly have.
FEW = (2, 3, 4, 5)
SOME = (6, 7, 8, 9)
TEENS = (10, 11, 12, 14, 15, 16, 18)
TENS = (20, 25, 30, 40, 50)
BIG = (60, 70, 75, 80, 90, 100, 120, 150, 200, 250)
PERCENT = (5, 10, 15, 20, 25, 30)
NUM_TESTS = 10
SPLITS = {"train": range(0, 80), "validation": range(80, 90), "test": range(90, 100)}

# The published data set on the hub, and its files.
COLBENCH = "facebook/collaborative_agent_bench"
COLBENCH_TASKS = {"train": "backend_tasks/train.jsonl", "test": "backend_tasks/test.jsonl"}
COLBENCH_TRAJECTORIES = "colbench_code_offline_15k_llama8b.jsonl"

# Web pages on the hub, the one photo that stands for all their pictures, and its size where an address names none.
WEBSIGHT, WEBSIGHT_CONFIG = "HuggingFaceM4/WebSight", "v0.2"
WEBSIGHT_KEYS = {"text": str, "llm_generated_idea": str}
PHOTO, PHOTO_SIZE = "https://picsum.photos/id/48/{}/{}", ("640", "480")

# What a model is asked to write, and the limits of what is kept.
MAX_LINES = 50                  # of a reference
MAX_SEED_CHARS = 2000           # of a text that gives the idea
NEAR_DUPLICATE = 0.6            # the share of word triples, of two tasks' together, that makes one a repeat
TASK_PROMPT = (
    "Invent one small programming job. Take the idea for it from this text:\n\n{text}\n\nLet it be about {kind}.\n\n"
    "Somebody knows exactly which function they need, but will tell a programmer too little at first. Write both as "
    "one JSON object, with nothing around it and with these keys:\n"
    '"code": the Python function that they need: complete, standard library only, at most 50 lines. It returns its '
    "result, prints and reads nothing, and uses neither chance nor the present time. The result depends on at least "
    "four decisions that nobody could guess, such as limits, rates, orders, exceptions, words.\n"
    '"description": what they say at first: one to three sentences in everyday words about what the function is for, '
    "without any of those decisions, without examples and without code; then, on a line of its own, the function's "
    "signature.\n"
    '"tests": a list of exactly 10 different strings, each one call of the function with all arguments written out. '
    "Together they reach every decision, and their results differ.\n\n"
    'The form: {{"code": "def name(a, b):\\n    …", "description": "…\\ndef name(a, b):", "tests": ["name(1, 2)", …]}}')
NO_PYTHON = (SyntaxError, ValueError, MemoryError, RecursionError)      # what ast.parse raises on a model's text
MEASURES_NOTHING = ("missing package", "random", "not comparable", "reference fails", "order of a set", "vacuous")
WRITTEN_KEYS = {"description": "problem_description", "code": "ground_truth", "tests": "test_cases"}
KINDS = ("a price or an amount with exceptions", "checking whether something is allowed", "grouping and counting",
         "turning one text into another", "picking the best of several things", "sorting and ranking records",
         "dates, times or a schedule", "cleaning up a list of entries", "a short summary as text")
TOPICS = """\
a bakery's orders for cakes; lending books in a library; parking meters; a chess club's ladder; rooms of a youth hostel
watering a greenhouse; the score of a quiz night; a taxi's meter; renting skis; a school's timetable; a bicycle workshop
recycling at a village depot; the tide at a harbour; tickets of a zoo; a beekeeper's notes; a choir's seating
sending out newsletters; a food bank's shelves; a swimming competition; postcodes and delivery tours; a piano's tuning
names for pets; the menu of a canteen; repairs in rented flats; a second-hand shop's labels; shifts of nurses
a running plan; lost luggage; votes in a club; knitting patterns; a weather diary; codes on museum objects
donations for a playground; phone numbers of a firm; a bus timetable; playing cards; mixing paint; a family's chores
seeds and sowing times; a film festival's programme; marks of an exam; a lorry's load; reviews of restaurants
mountain huts; opening hours; a treasure hunt; a laundry's machines; invoices of a plumber; vaccination dates
a radio station's playlist; a vineyard's harvest; birthdays at work; spare parts; a fishing licence; a dance class
passwords for guests; a recipe for more people; meter readings; a carpool; street names; a stamp collection
a night watchman's rounds; an auction of paintings; a blood pressure diary; a wedding's tables"""


# ---------------------------------------------------------------------------------------------------------------------
# facts: what the human knows. `options` are (what the human says, how it stands in the code).

def number(noun, values):
    """A fact with a number for its value; `noun` begins with "the"."""
    said = [(f"{noun.capitalize()} is {v}.", f"Well, {noun} is {v}.", f"I think {noun} is {v}.") for v in values]
    questions = (f"What should {noun} be?", f"Could you tell me {noun}?", f"Do you have a value in mind for {noun}?")
    return {"topic": noun, "questions": questions, "options": [(s, str(v)) for s, v in zip(said, values)]}


def word(noun, values):
    """A fact with a word for its value, which the function returns as a string."""
    fact = number(noun, values)
    return {**fact, "options": [(said, f'"{value}"') for said, value in fact["options"]]}


def choice(topic, questions, *options):
    """A fact with a few possible values; each option is (how it stands in the code, what the human says …)."""
    return {"topic": topic, "questions": questions, "options": [(said, code) for code, *said in options]}


def maximum(noun, values, variable):
    """An upper limit that may be absent; its code is a whole line, or nothing."""
    fact = number(noun, values)
    limits = [(said, f"\n    {variable} = min({variable}, {code})") for said, code in fact["options"]]
    none = ((f"There is no need for {noun}.", f"We do not have {noun}."), "")
    return {**fact, "options": [none, none, *limits]}


def boundary(noun, below):
    """Whether a value exactly at the limit counts; `below` tells which side of the limit the code compares."""
    operators = ("<", "<=") if below else (">", ">=")
    return choice(f"a value of exactly {noun}",
                  (f"Does a value of exactly {noun} count as well?", f"What happens at exactly {noun}?",
                   f"Should a value of exactly {noun} be included?"),
                  (operators[0], f"No, exactly {noun} does not count.", f"At exactly {noun} it is not included."),
                  (operators[1], f"Yes, exactly {noun} counts too.", f"At exactly {noun} it is included."))


def order(noun, variable):
    return choice(f"the order of {noun}",
                  (f"In which order should {noun} be?", f"Could you tell me the order of {noun}?",
                   f"Should I change the order of {noun}?"),
                  ("", f"Keep the order of {noun} as it is.", f"Please do not change the order of {noun}."),
                  (f"\n    {variable} = sorted({variable})", f"Please sort {noun} upwards.",
                   f"The order of {noun} should go up."),
                  (f"\n    {variable} = sorted({variable}, reverse=True)", f"Please sort {noun} downwards.",
                   f"The order of {noun} should go down."))


def letters(noun):
    return choice(f"the letters of {noun}",
                  (f"Should the letters of {noun} be capital or small?", f"Could you tell me the letters of {noun}?",
                   f"Do you have a wish for the letters of {noun}?"),
                  (".upper()", f"Use capital letters for {noun}.", f"The letters of {noun} should all be capital."),
                  (".lower()", f"Use small letters for {noun}.", f"The letters of {noun} should all be small."),
                  ("", f"Leave the letters of {noun} as they are.", f"Please do not change the letters of {noun}."))


def separator(noun):
    said = {'"-"': "dash", '"_"': "underscore", '"/"': "slash", '"."': "dot", '"+"': "plus"}
    return choice(f"the separator of {noun}",
                  (f"What should stand between {noun}?", f"Could you tell me the separator of {noun}?",
                   f"Do you have a separator in mind for {noun}?"),
                  *((code, f"Please put a {name} between {noun}.", f"The separator of {noun} is a {name}.")
                    for code, name in said.items()))


def integers(low, high, count=1):
    """An argument list of `count` integers as source text, sometimes at or beside a value of the task."""
    def draw(rng, values):
        near = [v + d for v in values if low <= v <= high for d in (-1, 0, 1)]
        return ", ".join(str(rng.choice(near) if near and rng.random() < 0.5 else rng.randint(low, high))
                         for _ in range(count))
    return draw


def number_list(low, high):
    return lambda rng, values: "[" + ", ".join(integers(low, high)(rng, values)
                                               for _ in range(rng.randint(3, 7))) + "]"


def random_word(rng, low=2, high=9):
    return "".join(rng.choice(string.ascii_letters) for _ in range(rng.randint(low, high)))


def word_list(rng, values):
    return repr([random_word(rng) for _ in range(rng.randint(3, 9))])


def two_words(rng, values):
    return f"{random_word(rng, 3, 14)!r}, {random_word(rng, 3, 14)!r}"


def sentence(rng, values):
    words = [random_word(rng, 1, 10) for _ in range(rng.randint(3, 14))]
    return repr(" ".join(words + words[:rng.randint(0, 2)]))


# ---------------------------------------------------------------------------------------------------------------------
# families: requests, signature, reference with a place for every fact that matters, facts, what does not matter.

FAMILIES = {
    "parcel_price": dict(
        requests=("the price of sending a parcel", "what a customer pays for a parcel"),
        code="def parcel_price(weight):\n    price = {base} + {rate} * weight\n    if weight > {heavy}:\n"
             "        price = price + {extra}\n    return price",
        facts=dict(base=number("the basic price", TEENS), rate=number("the kilo price", FEW),
                   heavy=number("the weight limit", TENS),
                   extra=number("the extra charge", SOME)),
        idle=("the country of the parcel", "the size of the box", "the insurance", "the delivery time"),
        arguments=integers(1, 60)),
    "order_total": dict(
        requests=("the total of an order", "what an order costs in our shop"),
        code="def order_total(price, count):\n    total = price * count\n    if total {exact} {minimum}:\n"
             "        total = total - total * {percent} // 100\n    return total + {fee}",
        facts=dict(minimum=number("the least amount", BIG), percent=number("the discount", PERCENT),
                   fee=number("the shipping fee", (2, 3, 4, *SOME)),
                   exact=boundary("the least amount", below=False)),
        idle=("the currency", "the name of the customer", "the way of payment", "the coupon code"),
        arguments=lambda rng, values: f"{rng.choice(values)}, {rng.choice((1, 1, 1, 2, 3))}"
        if rng.random() < 0.4 else integers(5, 100, 1)(rng, values) + f", {rng.randint(1, 9)}"),
    "grade": dict(
        requests=("the grade of a score", "how a student did in a test"),
        code='def grade(score):\n    if score {exact} {mark}:\n        return {good}\n    return {bad}',
        facts=dict(mark=number("the pass mark", TENS + BIG), exact=boundary("the pass mark", below=False),
                   good=word("the pass label", ("good", "pass", "yes", "fine", "well", "great")),
                   bad=word("the fail label", ("bad", "fail", "no", "poor", "retry", "weak"))),
        idle=("the name of the student", "the date of the test", "the number of questions", "the teacher"),
        arguments=integers(0, 260)),
    "join_names": dict(
        requests=("one line of text from a list of names", "a line with all names of a list"),
        code="def join_names(names):{sort}\n    return {sep}.join(names[:{limit}]){case}",
        facts=dict(limit=number("the name limit", (2, 3, 4, 5, 6)), sep=separator("the names"),
                   sort=order("the names", "names"), case=letters("the names")),
        idle=("the title of a person", "the names of children", "the longest name", "the middle initial"),
        arguments=word_list),
    "filter_readings": dict(
        requests=("the useful readings of a sensor", "which readings of our sensor are fine"),
        code="def filter_readings(readings):\n    readings = [r * {scale} for r in readings if r {exact} {top}]{sort}\n"
             "    return readings",
        facts=dict(top=number("the highest reading", TEENS + TENS + BIG),
                   exact=boundary("the highest reading", below=True),
                   sort=order("the readings", "readings"), scale=number("the scale factor", FEW + SOME)),
        idle=("the name of the sensor", "the time of a reading", "the unit of the readings", "a missing sensor"),
        arguments=number_list(1, 260)),
    "sales_bonus": dict(
        requests=("the bonus of a seller", "what bonus somebody gets for sales"),
        code="def sales_bonus(sales):\n    bonus = max(0, sales - {target}) * {percent} // 100{top}\n    return bonus",
        facts=dict(target=number("the sales target", BIG), percent=number("the seller share", PERCENT),
                   top=maximum("the maximum bonus", (11, 12, 14, 16, 18, 40, 50), "bonus")),
        idle=("the name of the seller", "the region of the seller", "the month", "the size of the team"),
        arguments=integers(50, 1500)),
    "late_fee": dict(
        requests=("the fee for a late book", "what a reader pays for being late"),
        code="def late_fee(days):\n    fee = max(0, days - {grace}) * {rate}{top}\n    return fee",
        facts=dict(grace=number("the grace period", FEW), rate=number("the daily fee", SOME + TEENS),
                   top=maximum("the maximum fee", TENS + BIG, "fee")),
        idle=("the title of the book", "the age of the reader", "the closing hours", "a lost book"),
        arguments=integers(0, 40)),
    "water_bill": dict(
        requests=("the water bill of a household", "what a household pays for water"),
        code="def water_bill(litres):\n    bill = {basic} + {rate} * max(0, litres - {free})\n"
             "    return max(bill, {least})",
        facts=dict(basic=number("the basic fee", SOME), rate=number("the litre price", FEW),
                   free=number("the free amount", TEENS), least=number("the smallest bill", TENS)),
        idle=("the address of the household", "the season", "the number of people", "the pressure of the water"),
        arguments=integers(0, 70)),
    "player_score": dict(
        requests=("the score of a player", "the result of a player in our game"),
        code="def player_score(points, lives):\n    score = points * {factor} + lives * {bonus}\n    if lives == 0:\n"
             "        score = score - {penalty}\n    return score",
        facts=dict(factor=number("the point factor", FEW), bonus=number("the life bonus", SOME + TEENS),
                   penalty=number("the loss penalty", TENS)),
        idle=("the name of the player", "the level of the game", "the time played", "the high score"),
        arguments=lambda rng, values: f"{rng.randint(0, 99)}, {rng.choice((0, 1, 2, 3))}"),
    "shorten": dict(
        requests=("a short form of a text", "a short title from a long text"),
        code="def shorten(text):\n    return text[:{length}]{case} + {end}",
        facts=dict(length=number("the text length", SOME + TEENS + TENS), case=letters("the text"),
                   end=choice("the end of the text", ("What should stand at the end of the text?",
                                                      "Could you tell me the end of the text?",
                                                      "Do you have a sign in mind for the end of the text?"),
                              *((f'"{sign}"', f"Please put {name} at the end of the text.",
                                 f"At the end of the text we want {name}.")
                                for sign, name in (("...", "three dots"), ("-", "a dash"), ("", "nothing"))))),
        idle=("the language of the text", "the author of the text", "the font", "the width of the page"),
        arguments=sentence),
    "count_words": dict(
        requests=("the number of words in a text", "how many words a text has"),
        code="def count_words(text):\n    words = [w for w in text.split() if len(w) {exact} {length}]\n"
             "    return len({unique}(words)) * {weight}",
        facts=dict(length=number("the word length", FEW), exact=boundary("the word length", below=False),
                   unique=choice("the same word twice", ("Does the same word twice count once?",
                                                         "What about the same word twice?",
                                                         "How do you count the same word twice?"),
                                 ("set", "The same word twice counts once.", "Count the same word only once."),
                                 ("list", "The same word twice counts twice.", "Count the same word each time.")),
                   weight=number("the word weight", SOME + TEENS + TENS)),
        idle=("the language of the text", "the author of the text", "the spelling", "the headlines"),
        arguments=sentence),
    "alarm": dict(
        requests=("the alarm of an oven", "what our oven should report"),
        code="def alarm(degrees):\n    if degrees > {high}:\n        return {hot}\n    if degrees < {low}:\n"
             "        return {cold}\n    return {normal}",
        facts=dict(high=number("the highest heat", BIG), low=number("the lowest heat", TEENS + TENS),
                   hot=word("the hot label", ("hot", "stop", "high", "red")),
                   cold=word("the cold label", ("cold", "wait", "low", "blue")),
                   normal=word("the normal label", ("fine", "good", "ready", "green"))),
        idle=("the type of the oven", "the time of day", "the door of the oven", "the noise of the alarm"),
        arguments=integers(0, 260)),
    "ticket_price": dict(
        requests=("the price of a ticket", "what a visitor pays at the door"),
        code="def ticket_price(age):\n    if age < {child} or age > {senior}:\n        return {reduced}\n"
             "    return {full}",
        facts=dict(child=number("the child age", SOME),
                   senior=number("the senior age", (60, 70, 75, 80)),
                   reduced=number("the reduced price", FEW), full=number("the full price", TEENS + TENS)),
        idle=("the day of the week", "the seat of the visitor", "the size of a group", "the name of the show"),
        arguments=integers(1, 99)),
    "user_name": dict(
        requests=("the user name of a person", "a user name from two names"),
        code="def user_name(first, last):\n    names = [{order}]\n    return {sep}.join(names)[:{length}]{case}",
        facts=dict(order=choice("the name to begin with", ("Which is the name to begin with?",
                                                           "Could you tell me the name to begin with?",
                                                           "Do you have a wish for the name to begin with?"),
                                ("first, last", "Begin with the first name.", "The first name should begin."),
                                ("last, first", "Begin with the last name.", "The last name should begin.")),
                   sep=separator("the names"), length=number("the name length", SOME + TEENS),
                   case=letters("the user name")),
        idle=("the age of the person", "the address of the person", "the password", "the middle initial"),
        arguments=two_words),
}
IDLE = ("the type hints", "the comments", "the log file", "the speed", "the error messages", "the python version")


# ---------------------------------------------------------------------------------------------------------------------
# pages: a template, and for each of its slots (topic, {code: (what the person calls it, how the idea states it)}). The
# slots of a page share no value, so that a word says whose it is.

def page_slot(topic, sentence, names):
    """names: {code: what the person calls it}, or codes that are called what they are."""
    names = names if isinstance(names, dict) else {name: name for name in names}
    return topic, {code: (name, f"There should be {name}." if name == f"no {topic}" else sentence.format(name))
                   for code, name in names.items()}


PAGE = string.Template("""\
<style>
*{{padding:2%}}
body{{background:{page};font-family:{font}}}
header{{background:{head};color:white;text-align:{align}}}
aside{{{side};padding:8%;background:silver}}
main{{display:grid;grid:auto-flow 8em/repeat({columns},1fr);gap:2%}}
article{{background:{card}}}
button{{background:{button}}}
footer{{{footer}}}
</style>
<header><h1>{title}</h1>$nav</header>
<aside>$aside</aside>
<main>$cards</main>
<button>$button</button>
<footer>$footer</footer>""")
PAGE_SLOTS = {
    "page": page_slot("background", "The background should be {}.",
                      ("white", "beige", "lavender", "pink", "lightblue", "khaki")),
    "font": page_slot("font", "The font should be {}.", ("serif", "sans-serif", "monospace")),
    "head": page_slot("header", "The header should be {}.", ("navy", "black", "maroon", "indigo", "darkgreen")),
    "align": page_slot("title", "The title should be {}.",
                       {"left": "on the left", "center": "in the center", "right": "on the right"}),
    "side": page_slot("sidebar", "The sidebar should be {}.",
                      {"float:left": "on the left", "float:right": "on the right", "display:none": "no sidebar"}),
    "columns": page_slot("cards", "The cards should be in {}.",
                         {"1": "one column", "2": "two columns", "3": "three columns", "4": "four columns"}),
    "card": page_slot("cards", "The cards should be {}.", ("gold", "salmon", "turquoise", "yellowgreen", "violet")),
    "button": page_slot("button", "The button should be {}.", ("red", "blue", "orange", "lime", "magenta")),
    "footer": page_slot("footer", "There should be a footer, and it should be {}.",
                        {f"background:{name}": name for name in ("brown", "gray", "olive", "teal")} |
                        {"display:none": "no footer"}),
}
PAGE_FAMILIES = {
    "bakery": dict(ideas=("a bakery that sells bread and cakes", "a small bakery", "an old bakery in our town"),
                   titles=("Crumbs", "Oven", "Loaf", "Flour", "Rye"), nav="", aside="Hours",
                   cards=("Bread", "Cakes", "Rolls", "Pies"), button="Order", footer="Welcome"),
    "cafe": dict(ideas=("a cafe with a terrace", "a cafe at the station", "a cafe that roasts its own coffee"),
                 titles=("Mocha", "Brew", "Beans", "Steam", "Cups"), nav="", aside="Menu",
                 cards=("Coffee", "Tea", "Juice", "Cocoa"), button="Reserve", footer="Thanks"),
    "concert": dict(ideas=("concerts in a park", "the summer concert of a choir", "a concert for children"),
                    titles=("Encore", "Stage", "Tempo", "Finale", "Chorus"), nav="<nav>Home News</nav>", aside="Map",
                    cards=("Friday", "Saturday", "Sunday", "Monday"), button="Tickets", footer="Contact"),
    "photographer": dict(ideas=("a photographer who shows her work", "a photographer of families",
                                "pictures that a photographer took on journeys"),
                         titles=("Lens", "Frame", "Focus", "Shutter", "Prism"), nav="<nav>Home About</nav>",
                         aside="Prices", cards=("Faces", "Cities", "Forests", "Oceans"), button="Hire",
                         footer="Studio"),
}
PAGE_OPENINGS = ("A page for {}.", "A website for {}.", "I need a page for {}.", "Please make a page for {}.")


# ---------------------------------------------------------------------------------------------------------------------
# tasks

def run_reference(code, calls):
    """The results of compiled calls as text. Only for references that this file made: it runs them in this process."""
    namespace = {}
    exec(code, namespace)
    return [repr(eval(call, namespace)) for call in calls]


def template_task(rng, name, told, accept):
    """One task of a family, or the reason why there is none: `accept(task_id)` says no, or its tests do not prove every
    fact."""
    family = FAMILIES[name]
    chosen = {slot: rng.randrange(len(fact["options"])) for slot, fact in family["facts"].items()}
    codes = {slot: fact["options"][chosen[slot]][1] for slot, fact in family["facts"].items()}
    reference = family["code"].format(**codes)
    task_id = hashlib.sha256(reference.encode()).hexdigest()[:16]
    if reason := accept(task_id):
        return reason
    values = [int(code) for code in codes.values() if code.isdigit()] or [1]
    calls = []
    while len(calls) < NUM_TESTS:
        call = f"{name}({family['arguments'](rng, values)})"
        calls += [call] if call not in calls else []
    compiled = [compile(call, "<call>", "eval") for call in calls]
    results = run_reference(reference, compiled)

    facts = []
    for slot, fact in family["facts"].items():
        alternatives = sorted({code for _, code in fact["options"]} - {codes[slot]})
        if any(run_reference(family["code"].format(**{**codes, slot: code}), compiled) == results
               for code in alternatives):
            return "a fact without proof"
        facts.append({"topic": fact["topic"], "matters": True, "told": False, "slot": slot, "code": codes[slot],
                      "guesses": [codes[slot], *alternatives], "questions": list(fact["questions"]),
                      "replies": list(fact["options"][chosen[slot]][0])})
    for noun in family["idle"] + IDLE:
        facts.append({"topic": noun, "matters": False, "told": False,
                      "questions": [f"Could you tell me {noun}?", f"Do you have a wish for {noun}?",
                                    f"What about {noun}?"],
                      "replies": ["That does not matter to me.", f"It does not depend on {noun}.",
                                  f"Do not worry about {noun}."]})
    rng.shuffle(facts)
    needed = [fact for fact in facts if fact["matters"]]
    for fact in {"none": [], "some": needed[:rng.random() < 0.3], "all": needed}[told]:
        fact["told"] = True
    opening = rng.choice(("I need a function that gives me {}.", "Please write a function that returns {}.",
                          "Can you write a function that works out {}?"))
    hints = "".join(" " + rng.choice(fact["replies"]) for fact in needed if fact["told"])
    signature = reference.splitlines()[0]
    return {"task_id": task_id,
            "problem_description": f"{opening.format(rng.choice(family['requests']))}{hints}\n{signature}",
            "ground_truth": reference, "test_cases": {f"test{i + 1}": call for i, call in enumerate(calls)},
            "family": name, "template": family["code"], "facts": facts}


def template_page(rng, name, told, accept):
    """One task of a family of pages, or the reason why there is none."""
    family = PAGE_FAMILIES[name]
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


def generate(num_tasks, seed, split, told, domain="backend"):
    """`num_tasks` tasks without repeats, the families in turn until one has no more; the dropped draws by reason."""
    rng, make = random.Random(seed), template_page if domain == "frontend" else template_task
    tasks, dropped = {}, {}

    def accept(task_id):
        if split != "all" and int(task_id, 16) % 100 not in SPLITS[split]:
            return "of another split"
        return "repeated" if task_id in tasks else None

    families = sorted(PAGE_FAMILIES if domain == "frontend" else FAMILIES)
    misses = {name: 0 for name in families}
    while len(tasks) < num_tasks:
        if not families:
            raise common.InputError(f"--num-tasks {num_tasks}: there are only {len(tasks)} different tasks "
                                    f"(--split {split})")
        name = families[len(tasks) % len(families)]
        task = make(rng, name, told, accept)
        if isinstance(task, dict):
            tasks[task["task_id"]] = task
            misses[name] = 0
            continue
        dropped[task] = dropped.get(task, 0) + 1
        misses[name] += 1
        if misses[name] == 300:
            families.remove(name)
    return list(tasks.values()), dropped


# ---------------------------------------------------------------------------------------------------------------------
# tasks written by a language model: text -> prompt -> reply -> task, or the reason why there is none

def read_seed_texts(path):
    """The texts of a JSONL file of {"text"}, or of a plain one: its paragraphs, or its lines where none is empty."""
    path = pathlib.Path(path)
    if path.suffix == ".jsonl":
        texts = [row["text"] for row in common.read_jsonl(path, {"text": str})]
    else:
        try:
            content = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise common.InputError(f"{path}: no file of UTF-8 text ({type(error).__name__})") from None
        texts = re.split(r"\n\s*\n" if re.search(r"\n\s*\n", content) else r"\n", content)
    if not any(text.strip() for text in texts):
        raise common.InputError(f"{path}: no text in it")
    return [text.strip()[:MAX_SEED_CHARS] for text in texts if text.strip()]


def parse_reply(reply):
    """The first object in a reply that has a key which was asked for, or None: JSON, with line breaks in strings or
    commas too many, or a Python literal. Thoughts, fences and prose around it do not matter."""
    text = common.visible_text(reply)
    decode = json.JSONDecoder(strict=False).raw_decode
    string_or_comma = re.compile(r'("(?:\\.|[^"\\])*")|,(?=\s*[}\]])', re.DOTALL)
    for read in (lambda part: decode(part)[0],
                 lambda part: decode(string_or_comma.sub(lambda match: match[1] or "", part))[0],
                 lambda part: ast.literal_eval(part[:part.rfind("}") + 1])):
        for match in itertools.islice(re.finditer(r"""\{\s*["']""", text), 20):
            with contextlib.suppress(*NO_PYTHON, TypeError):
                value = read(text[match.start():])
                if isinstance(value, dict) and {*WRITTEN_KEYS, *WRITTEN_KEYS.values()} & value.keys():
                    return value
    return None


def bare_code(code):
    """(tree, text) of Python code without docstrings and comments; raises one of NO_PYTHON."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree, ast.unparse(tree)


def squeeze(code):
    """Code without what two ways of writing it differ in."""
    return re.sub(r"\s", "", code).replace('"', "'").rstrip(":")


def names_signature(text, function):
    """Whether a text names a function (an ast node) with its arguments; their types and defaults do not matter."""
    said = re.findall(rf"\b{function.name}\s*\(((?:[^()]|\([^()]*\))*)\)", text)
    names = []
    for arguments in [ast.unparse(function.args), *said]:
        with contextlib.suppress(*NO_PYTHON):
            nodes = ast.walk(ast.parse(f"def f({arguments}): 0"))
            names.append([node.arg for node in nodes if isinstance(node, ast.arg)])
    return names[0] in names[1:]


def call_of(text, name):
    """A call of the function `name`, written in the one way that ast has; None where `text` is none."""
    with contextlib.suppress(*NO_PYTHON):
        call = ast.parse(text.strip(), mode="eval").body
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == name:
            return ast.unparse(call)


def written_task(reply, ended):
    """The task in a reply, not run yet, or "reason: detail"."""
    written = parse_reply(reply)
    if written is None:
        return "no JSON object" if ended else "cut by --max-new-tokens"
    description, code, tests = (written.get(key, written.get(other)) for key, other in WRITTEN_KEYS.items())
    code = "\n".join(map(str, code)) if isinstance(code, list) else code
    for key, text in (("description", description), ("code", code)):
        if not isinstance(text, str) or not text.strip():
            return f"no {key}"
    code = re.sub(r"^```\w*\n|\n```$", "", code.strip())
    try:
        tree, bare = bare_code(code)
    except NO_PYTHON as error:
        return f"code is no Python: {error}"
    if (num_lines := len(code.splitlines())) > MAX_LINES:
        return f"too many lines: {num_lines}"
    names = [node.name for node in tree.body
             if isinstance(node, ast.FunctionDef) and names_signature(description, node)]
    if not names:
        return "no signature in the description"
    said = squeeze(description)
    for line in map(squeeze, bare.splitlines()):
        if len(line) >= 8 and re.search(r"[-+*/%=<>([{]", line) and not line.startswith("def") and line in said:
            return f"code in the description: {line}"
    tests = tests.values() if isinstance(tests, dict) else tests if isinstance(tests, list) else []
    calls = {call_of(str(test), names[-1]): test for test in tests}
    if None in calls:
        return f"a test is no call of the function: {str(calls[None])[:100]}"
    if len(calls) < NUM_TESTS:
        return f"too few tests: {len(calls)}"
    return {"task_id": hashlib.sha256(code.encode(errors="replace")).hexdigest()[:16],
            "problem_description": description.strip(), "ground_truth": code,
            "test_cases": {f"test{i}": call for i, call in zip(range(1, NUM_TESTS + 1), calls)},
            "written_tests": len(calls)}


def repeat_reason(task, seen):
    """Why a task repeats one of `seen` = (bodies, numbers of triples, {triple: tasks}), or None: then it joins."""
    bodies, sizes, places = seen
    name = task["test_cases"]["test1"].split("(")[0]
    body = re.sub(rf"(?m)^def {name}\(.*|\b{name}\b", "", bare_code(task["ground_truth"])[1])
    if body in bodies:
        return "the body of a kept task"
    words = re.findall(r"\w+", f"{task['problem_description']} {task['ground_truth']}".lower())
    triples = set(zip(words, words[1:], words[2:]))
    shared = collections.Counter(place for triple in triples for place in places.get(triple, ()))
    near = max((both / (len(triples) + sizes[place] - both) for place, both in shared.items()), default=0)
    if near >= NEAR_DUPLICATE:
        return f"near duplicate: {near:.2f} of the word triples of a kept task and its own"
    for triple in triples:
        places.setdefault(triple, []).append(len(sizes))
    bodies.add(body)
    sizes.append(len(triples))


def attempt_rows(numbers, ask, texts, scorers, args):
    """Rows of a block of attempts: the reply, and its task or the reason why there is none; repeats aside."""
    ideas = [(texts[number % len(texts)], random.Random(f"{args.seed} {number}").choice(KINDS)) for number in numbers]
    chats = [[{"role": "user", "content": TASK_PROMPT.format(text=text, kind=kind)}] for text, kind in ideas]
    rows = [{"attempt": number, "seed_text": text, "reason": None, "task": None, **reply}
            for number, (text, _), reply in zip(numbers, ideas, ask(chats, numbers))]
    written = [written_task(row["reply"], row.pop("ended")) for row in rows]
    tasks = [task for task in written if isinstance(task, dict)]
    checks = iter(zip(check_tasks(tasks, *scorers), scorers[0].reference_values(tasks)))
    for row, task in zip(rows, written):
        if isinstance(task, str):
            row["reason"] = task
            continue
        check, values = next(checks)
        found = [f"{what}: {detail}" for what, detail in check["findings"].items() if what in MEASURES_NOTHING]
        if found or (args.split != "all" and int(task["task_id"], 16) % 100 not in SPLITS[args.split]):
            row["reason"] = (found or ["of another split"])[0]
        else:
            row["task"] = {**task, "attempt": row["attempt"]}
            row["types"] = [value[0] if isinstance(value, list) else type(value).__name__ for _, value in values]
    return rows


def ask_model(chats, numbers, model, tokenizer, args):
    """A local model's replies to chats, {"reply", "ended", "tokens"}; the number of the attempt is the seed."""
    prompts = [common.encode(tokenizer, tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
               for chat in chats]
    randoms = torch.cat([common.uniforms((1, args.max_new_tokens), args.seed, number, "task") for number in numbers])
    stops = common.stop_ids(model, tokenizer)
    return [{"reply": tokenizer.decode(ids, skip_special_tokens=True), "ended": ids[-1] in stops, "tokens": len(ids)}
            for ids in common.generate(model, prompts, randoms, args.temperature, stops, args.concurrency)]


def ask_server(chats, numbers, server, loop, args):
    """The same of a server, all chats in flight together."""
    seeds = [common.server_seed(args.seed, number, "task") for number in numbers]

    async def all_replies():
        return await asyncio.gather(*(common.server_reply(server, chat, args.temperature, args.max_new_tokens, seed)
                                      for chat, seed in zip(chats, seeds)))

    return [{"reply": reply.text, "ended": reply.ended, "tokens": reply.completion_tokens or 0}
            for reply in loop.run(all_replies())]


def write_tasks(args):
    """--source llm: ask the model in rounds of attempts until --num-tasks of its tasks are kept. A round's attempts are
    a partial file, which the same command reads or goes on in; how they are batched does not change what is kept."""
    warnings.simplefilter("ignore", SyntaxWarning)                      # of what the model writes
    runtime, out = common.start(args.seed), pathlib.Path(args.out)
    inputs, texts = [args.seeds, args.model], read_seed_texts(args.seeds) if args.seeds else re.split("; |\n", TOPICS)
    random.Random(args.seed).shuffle(texts)
    if common.claim_output(args, out, inputs, begin=False):
        return
    rows, kept, seen, model = [], [], (set(), [], {}), None
    with contextlib.ExitStack() as stack:
        if common.is_server(args.model):
            server, loop = common.open_server(args.model), stack.enter_context(asyncio.Runner())
            ask = functools.partial(ask_server, server=server, loop=loop, args=args)
        else:
            model, tokenizer = common.load_model(args.model, runtime.device, args.dtype)
            ask = functools.partial(ask_model, model=model.eval(), tokenizer=tokenizer, args=args)
        if common.claim_output(args, out, inputs):
            return
        costs = common.Costs(out, runtime.device)
        scorers = [stack.enter_context(common.Scorer(args.unsafe_scorer, hash_seed=number)) for number in (0, 1)]
        while len(kept) < args.num_tasks and len(rows) < args.max_attempts:
            first, missing = len(rows), max(args.num_tasks - len(kept), args.concurrency)
            numbers = range(first, min(first + missing, args.max_attempts))
            blocks = [numbers[i:i + args.concurrency] for i in range(0, len(numbers), args.concurrency)]
            for row in common.map_blocks(f"{out}.{first}.partial", blocks, lambda block, _: attempt_rows(
                    block, ask, texts, scorers, args), runtime, "attempt"):
                if len(kept) < args.num_tasks:
                    row["reason"] = row["reason"] or repeat_reason(row["task"], seen)
                    rows.append(row)
                    kept += [] if row["reason"] else [row]
    common.barrier()                                                    # all have read the partial files
    finish_tasks(args, out, rows, kept)
    generated = {"generated_tokens": sum(row["tokens"] for row in rows) if common.is_main() else 0, "flops": 0}
    costs.record([common.work_of(model) if model else generated])


def counted(items):
    return ", ".join(f"{count:,} {item}" for item, count in collections.Counter(items).most_common())


def finish_tasks(args, out, rows, kept):
    """Write the rejected replies and the tasks and print what they are like; InputError where tasks are missing."""
    ends = counted((row["reason"] or "kept").partition(": ")[0] for row in rows)
    rejected, tasks = out.with_name(out.stem + ".rejected.jsonl"), [row["task"] for row in kept]
    if common.is_main():
        common.write_jsonl(rejected, [
            {"attempt": row["attempt"], "seed_text": row["seed_text"], "reason": row["reason"].partition(": ")[0],
             "detail": row["reason"].partition(": ")[2], "reply": row["reply"]}
            for row in rows if row["reason"] not in (None, "of another split")])
    if len(tasks) < args.num_tasks:
        raise common.InputError(f"--max-attempts {args.max_attempts}: {len(tasks)} of {args.num_tasks} tasks kept "
                                f"({ends}; see {rejected}); the same command with a higher one goes on from here")
    if common.is_main():
        common.write_jsonl(out, tasks)
        for path in out.parent.glob(f"{out.name}.*.partial"):
            path.unlink()
    lines = sum(len(task["ground_truth"].splitlines()) for task in tasks) / len(tasks)
    words = sum(len(task["problem_description"].split()) for task in tasks) / len(tasks)
    more = sum(task["written_tests"] > NUM_TESTS for task in tasks)
    common.say(f"{len(rows):,} attempts: {ends}\na task has {lines:.1f} lines of code and a description of {words:.1f} "
               f"words (means); {more:,} had more than {NUM_TESTS} tests\n"
               f"values of the tests: {counted(kind for row in kept for kind in row['types'])}")


# ---------------------------------------------------------------------------------------------------------------------
# the published tasks and trajectories

def published_files(names, copy):
    """Paths of the published files `names` in a local copy (a folder, or one file in their place), or from the hub."""
    if not copy:
        return [download(name, names) for name in names]
    copy = pathlib.Path(copy)
    if copy.is_file():
        return [copy]
    if not copy.is_dir():
        raise common.InputError(f"{copy}: no such file or folder")
    files = [copy / name if (copy / name).is_file() else copy / pathlib.Path(name).name for name in names]
    for name, file in zip(names, files):
        if not file.is_file():
            raise common.InputError(f"{copy}: no {name} in it")
    return files


def download(name, names):
    """The path of a file of the hub's data set, from the cache if it is there; `names` are all that are needed."""
    from huggingface_hub import hf_hub_download
    try:
        return hf_hub_download(COLBENCH, name, repo_type="dataset")
    except Exception as error:                                      # the hub's client raises those of several libraries
        raise common.InputError(
            f"{COLBENCH}: {name} could not be downloaded ({type(error).__name__}); where the hub can be reached run "
            f'"hf download --repo-type dataset {COLBENCH} {" ".join(names)} --local-dir FOLDER", then pass '
            "--path FOLDER") from None


def read_published(path, trajectories):
    """The rows of a published file, as they are but for "task_id", and a trajectory's "sample", where missing."""
    rows = common.read_jsonl(path, common.TRAJECTORY_KEYS if trajectories else common.TASK_KEYS)
    if not trajectories:
        for row in rows:
            row["task_id"] = common.task_id(row)
        return rows
    common.number_samples(rows)
    for number, row in enumerate(rows, 1):
        if not isinstance(row.get("reward"), (int, float, type(None))):
            raise common.InputError(f'{path}:{number}: "reward" is a {type(row["reward"]).__name__}, not a number')
    return rows


def write_system_prompt(path, trajectories):
    """Write the system prompt that the agent of the trajectories had, for 02 --system-prompt."""
    counts = collections.Counter(map(common.system_prompt, trajectories))
    unread = counts.pop(None, 0)
    path.unlink(missing_ok=True)
    if counts:
        [(text, count)] = counts.most_common(1)
        partial = path.with_name(path.name + ".partial")
        partial.write_bytes(f"{text}\n".encode(errors="backslashreplace"))
        partial.rename(path)
        print(f"writes {path}: the system prompt in the logged prompts of {count:,} of {len(trajectories):,} "
              f"trajectories; {counts.total() - count:,} have another, {unread:,} ours or none that can be read")
    else:
        print("no logged prompt shows a system prompt other than ours")


def first_shuffled(items, args, files):
    """The first --num-tasks of `items` in a seeded order; all of them, in their own, where it is not given."""
    if args.num_tasks is None:
        return items
    if args.num_tasks > len(items):
        raise common.InputError(f"--num-tasks {args.num_tasks}: there are only {len(items)} tasks in "
                                f"{' and '.join(map(str, files))}")
    items = list(items)
    random.Random(args.seed).shuffle(items)
    return items[:args.num_tasks]


def published_paths(args):
    """The files of what is asked for of the published data."""
    if args.domain == "frontend":
        if args.trajectories or args.split != "all":
            raise common.InputError("--domain frontend of --source colbench takes a file whole: no --split and no "
                                    "--trajectories")
        if not args.path or not pathlib.Path(args.path).is_file():
            raise common.InputError(f"--path {args.path or 'is missing'}: the published tasks of pages are taken from "
                                    f"a JSONL file alone; download it from {COLBENCH} and pass --path FILE")
    if args.split == "validation":
        raise common.InputError("--split validation: the published data have none, only train and test")
    if args.trajectories and args.split == "test":
        raise common.InputError("--split test: the published trajectories are all of training tasks")
    names = ([COLBENCH_TRAJECTORIES] if args.trajectories else
             list(COLBENCH_TASKS.values()) if args.split == "all" else [COLBENCH_TASKS[args.split]])
    return published_files(names, args.path)


def take_published(args):
    """--source colbench: write published tasks or trajectories to args.out."""
    files = published_paths(args)
    rows = [row for file in files for row in read_published(file, args.trajectories)]
    if common.is_frontend(rows[0].get("task", rows[0])) != (args.domain == "frontend"):
        raise common.InputError(f"{files[0]}: no tasks of --domain {args.domain}")
    if args.trajectories:
        ids = list(dict.fromkeys(row["task_id"] for row in rows))
        chosen = set(first_shuffled(ids, args, files))
        kept = [row for row in rows if row["task_id"] in chosen]
    else:
        kept = first_shuffled(rows, args, files)
    if common.claim_output(args, args.out, files):
        return
    samples = collections.Counter(row["task_id"] for row in kept)
    if args.trajectories:
        low, high = min(samples.values()), max(samples.values())
        print(f"kept {len(kept):,} of {len(rows):,} trajectories, {len(samples):,} of {len(ids):,} tasks, "
              f"{low if low == high else f'{low} to {high}'} samples a task")
        common.fill_rewards(kept, args.unsafe_scorer)
        write_system_prompt(pathlib.Path(f"{args.out}.system_prompt.txt"), kept)
    else:
        print(f"kept {len(kept):,} of {len(rows):,} tasks, {len(kept) - len(samples):,} of them repeat another")
    common.write_jsonl(args.out, kept)


# ---------------------------------------------------------------------------------------------------------------------
# WebSight: ideas and pages

def websight_rows(path):
    """(where it stands, row) of all rows of the data set, one after the other: of the hub's, or of a local copy, a
    parquet or JSONL file or a folder of parquet files, which may be larger than the memory."""
    if not path:
        try:
            import datasets
            rows = datasets.load_dataset(WEBSIGHT, WEBSIGHT_CONFIG, split="train", streaming=True)
            for number, row in enumerate(rows.select_columns(list(WEBSIGHT_KEYS)), 1):
                yield f"{WEBSIGHT}:{number}", row
        except Exception as error:                                  # the hub's client raises those of several libraries
            raise common.InputError(
                f"{WEBSIGHT}: could not be read from the hub ({type(error).__name__}); it needs the package datasets "
                '(pip install -r tests/frontend.txt); or, where the hub can be reached, run "hf download --repo-type '
                f'dataset {WEBSIGHT} --include "{WEBSIGHT_CONFIG}/*" --local-dir FOLDER", then pass '
                f"--path FOLDER/{WEBSIGHT_CONFIG}") from None
        return
    for file in websight_files(path):
        if file.suffix != ".parquet":
            for number, row in enumerate(common.read_jsonl(file, {}), 1):
                yield f"{file}:{number}", row
            continue
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise common.InputError(f"{file}: parquet needs the package pyarrow; pip install -r "
                                    "tests/frontend.txt") from None
        number = 0
        try:
            with pyarrow.parquet.ParquetFile(file) as table:
                columns = [key for key in WEBSIGHT_KEYS if key in table.schema_arrow.names]
                for batch in table.iter_batches(256, columns=columns):
                    for number, row in enumerate(batch.to_pylist(), number + 1):
                        yield f"{file}:{number}", row
        except pyarrow.ArrowException as error:
            raise common.InputError(f"{file}: no parquet file ({type(error).__name__})") from None


def websight_files(path):
    """The files of a local copy, in the order of their names."""
    if not path:
        return []
    path = pathlib.Path(path)
    if not path.exists():
        raise common.InputError(f"{path}: no such file or folder")
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise common.InputError(f"{path}: no .parquet files in it")
    return files


def photo_size(address):
    """(width, height) that the address of a picture asks for, as texts, or None: /300x200, /300/200 (but not a year and
    a month), ?w=300&h=200, or /300 as the whole path for a square."""
    path = re.sub(r"^(https?:)?//[^/]*/(id/\d+/)?", "", address)
    if pair := (re.search(r"(?<![\w.-])([1-9]\d{1,3})(?:x|/(?=[2-9]\d|\d{3}))([1-9]\d{1,3})(?![\w-])", path) or
                re.search(r"\bw=(\d+)\b.*\bh=(\d+)\b", path)):
        return pair.groups()
    square = re.match(r"([1-9]\d{1,3})/?(?=$|[?.])", path)
    return square and (square[1], square[1])


def one_photo(html, counts):
    """A page whose pictures from the net are all PHOTO, in the size that the address asks for, or else the tag, or else
    PHOTO_SIZE; `counts` counts them by host, and at "" those without a size."""
    def photo(address, tag=""):
        given = [re.search(rf"""\s{side}=["']?(\d+)(?:px)?["'\s>/]""", tag) for side in ("width", "height")]
        size = photo_size(address) or all(given) and [side[1] for side in given]
        counts[address.split("//", 1)[1].split("/")[0]] += 1
        counts[""] += not size
        return PHOTO.format(*(size or PHOTO_SIZE))

    def in_tag(tag):
        return re.sub(r"""(\ssrc=["']?)((?:https?:)?//[^"'\s>]+)""", lambda src: src[1] + photo(src[2], tag[0]), tag[0])

    def in_style(url):
        return url[0] if re.search(r"\.(css|woff2?|ttf|otf)\b|//fonts\.", url[2]) else url[1] + photo(url[2])

    html = re.sub(r"<img\b[^>]*>", in_tag, html, flags=re.IGNORECASE)
    quote = "[\"']|&quot;|&#39;"
    return re.sub(rf"(\burl\(\s*(?:{quote})?)((?:https?:)?//[^)\s]+?)(?=\)|\s|{quote})", in_style, html)


def take_websight(args):
    """--source websight: write the first --num-tasks of the data set, in its order, that are of --split and new."""
    if common.claim_output(args, args.out, websight_files(args.path), begin=False):
        return
    tasks, ends, pictures = {}, collections.Counter(), collections.Counter()
    for where, row in websight_rows(args.path):
        common.check_keys({key: value or "" for key, value in row.items()}, WEBSIGHT_KEYS, where)
        html, idea = ((row[key] or "").strip() for key in WEBSIGHT_KEYS)
        counts = collections.Counter()
        html = one_photo(html, counts)
        task_id = hashlib.sha256(html.encode(errors="replace")).hexdigest()[:16]
        elsewhere = args.split != "all" and int(task_id, 16) % 100 not in SPLITS[args.split]
        end = ("empty" if not html or not idea else "no page" if not common.is_page(html) else
               "of another split" if elsewhere else "repeated" if task_id in tasks else "kept")
        ends[end] += 1
        if end == "kept":
            tasks[task_id] = {"task_id": task_id, "problem_description": idea, "ground_truth": html}
            pictures += counts
        if len(tasks) == args.num_tasks:
            break
    if len(tasks) < args.num_tasks:
        raise common.InputError(f"--num-tasks {args.num_tasks}: there are only {len(tasks)} tasks in "
                                f"{args.path or WEBSIGHT} (rows: {counted(ends)})")
    common.claim_output(args, args.out, websight_files(args.path))
    unsized = pictures.pop("", 0)
    print(f"{ends.total():,} rows in the order of the data set: {counted(ends)}\n"
          f"{pictures.total():,} addresses of pictures rewritten to {PHOTO.format('W', 'H')} "
          f"({counted(pictures) or 'none'}), {unsized:,} of them without a size as {'x'.join(PHOTO_SIZE)}")
    common.write_jsonl(args.out, tasks.values())


# ---------------------------------------------------------------------------------------------------------------------
# the data check

def check_tasks(tasks, scorer, other_hashes):
    """For each task {"findings": {what: detail}, "constant": share of its tests that the best constant answer passes}.
    A finding is a reason why the task, or one of its tests, measures nothing. Two scorers, of different hash seeds."""
    results, others = scorer.reference_values(tasks), other_hashes.reference_values(tasks)
    checks, seen = [], {}
    for index, (task, values, other_values) in enumerate(zip(tasks, results, others)):
        findings = {}
        for name, (status, value) in zip(task["test_cases"], values):
            if status == "error":
                kind = ("missing package" if value.startswith("no module") else
                        "random" if value == "not the same value twice" else
                        "not comparable" if "cannot be compared" in value else "reference fails")
                findings.setdefault(kind, f"{name}: {value}")
        if not findings and values != other_values:
            findings["order of a set"] = "other results with another hash seed"
        counts = {}
        for status, value in values:
            if status == "ok":
                counts[json.dumps(value)] = counts.get(json.dumps(value), 0) + 1
        constant = max(counts.values(), default=0) / max(1, len(values))
        if not values:
            findings["no tests"] = "nothing to pass"
        elif constant == 1:
            findings["vacuous"] = f"every test gives {next(iter(counts))[:60]}"
        comparisons = [name for name, call in task["test_cases"].items() if re.search(r"\)\s*[=!<>]=?\s*\S+$", call)]
        if comparisons:
            findings["test is a comparison"] = f"{comparisons[0]}: {task['test_cases'][comparisons[0]]}"
        first = seen.setdefault(task["ground_truth"], index)
        if first != index:
            findings["repeated"] = f"the reference of task {first + 1}"
        checks.append({"task_id": common.task_id(task), "findings": findings, "constant": constant})
    return checks


def print_check(path, tasks, checks):
    for number, check in enumerate(checks, 1):
        for what, detail in check["findings"].items():
            print(f"{path}:{number}: {what} ({detail})")
    counts = {}
    for what in (what for check in checks for what in check["findings"]):
        counts[what] = counts.get(what, 0) + 1
    num_tests = sum(len(task["test_cases"]) for task in tasks)
    print(f"{len(tasks):,} tasks, {num_tests:,} tests: " +
          (", ".join(f"{count:,} {what}" for what, count in sorted(counts.items())) or "no finding"))
    constants = [check["constant"] for check in checks]
    print(f"the best constant answer for each task passes {sum(constants) / len(constants):.1%} of the tests and "
          f"solves {sum(c == 1 for c in constants) / len(constants):.1%} of the tasks")


# ---------------------------------------------------------------------------------------------------------------------

def parse_args(argv=None):
    parser = common.argument_parser(__doc__)
    parser.add_argument("--source", choices=["template", "llm", "colbench", "websight"], default="template",
                        help="where tasks come from")
    parser.add_argument("--domain", choices=["backend", "frontend"], default="backend",
                        help="functions or pages; llm: only functions, websight: only pages")
    # a model that writes tasks
    parser.add_argument("--model", help="llm: who writes the tasks: a folder, a hub id, smollm2, or a server "
                        "http://HOST:PORT/v1#NAME")
    parser.add_argument("--seeds", metavar="FILE", help="llm: texts that give the ideas: JSONL with \"text\", or plain "
                        "paragraphs or lines; without it our own topics")
    parser.add_argument("--max-attempts", type=common.positive_int, help="llm: replies after which it gives up (where "
                        "not given: 20 a task, divided by the share of --split)")
    parser.add_argument("--temperature", type=float, default=1.0, help="llm: of the model")
    parser.add_argument("--max-new-tokens", type=common.positive_int, default=2048, help="llm: tokens of a reply")
    parser.add_argument("--concurrency", type=common.positive_int, default=64, help="llm: attempts in flight")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32",
                        help="llm: arithmetic of a local model")
    # the published data
    parser.add_argument("--path", metavar="LOCAL_COPY", help="colbench: a folder with the published files, or one "
                        "JSONL file, which is taken whole; websight: a parquet or JSONL file, or a folder of parquet "
                        "files; without it they are downloaded from the hub")
    parser.add_argument("--trajectories", action="store_true", help="colbench: take the offline trajectories instead")
    # the tasks
    parser.add_argument("--num-tasks", type=common.positive_int,
                        help="tasks to write, in an order by --seed (where not given: all of colbench, else 1000); "
                        "websight: in its own order")
    parser.add_argument("--split", choices=["all", *SPLITS], default="all",
                        help="which part: disjoint by content; colbench: a published file (no validation)")
    parser.add_argument("--told", choices=["none", "some", "all"], default="some",
                        help="facts that the request states: none, one (of a page one or two) in 30 %% of the tasks, "
                        "or all (clear requests)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the tasks")
    parser.add_argument("--check", metavar="FILE", help="check the tasks of this file instead of making tasks")
    parser.add_argument("--out", help="tasks file to write (JSONL); with --check its findings, a row a task (optional)")
    common.add_scorer(parser)
    common.add_overwrite(parser)
    args = parser.parse_args(argv)
    if not args.out and not args.check:
        parser.error("the following arguments are required: --out")
    if args.source not in ("colbench", "websight") and args.path or args.source != "colbench" and args.trajectories:
        parser.error("--path and --trajectories need --source colbench (--path also websight)")
    if args.source == "websight":
        args.domain = "frontend"
    if args.source == "llm" and args.domain == "frontend":
        parser.error("--source llm writes functions only; take --source template or websight for --domain frontend")
    if (args.source == "llm") != bool(args.model) or args.source != "llm" and (args.seeds or args.max_attempts):
        parser.error("--source llm needs --model; --model, --seeds and --max-attempts need --source llm")
    if args.source != "colbench" and args.num_tasks is None:
        args.num_tasks = 1000
    if args.source == "llm" and args.max_attempts is None:
        args.max_attempts = 20 * args.num_tasks * 100 // (100 if args.split == "all" else len(SPLITS[args.split]))
    return args


def main(argv=None):
    args = parse_args(argv)
    if args.source == "colbench" and not args.check:
        return take_published(args)
    if args.source == "llm" and not args.check:
        return write_tasks(args)
    if args.source == "websight" and not args.check:
        return take_websight(args)
    tasks = args.check and common.read_jsonl(args.check, common.TASK_KEYS)
    if tasks and common.is_frontend(tasks[0]):
        raise common.InputError(f"{args.check}: --check is for tasks of functions; pages have no tests to check")
    if args.out and common.claim_output(args, args.out, [args.check]):
        return
    if args.check:
        with common.Scorer(args.unsafe_scorer) as scorer, common.Scorer(args.unsafe_scorer, hash_seed=1) as other:
            checks = check_tasks(tasks, scorer, other)
        print_check(args.check, tasks, checks)
        if args.out:
            common.write_jsonl(args.out, checks)
        return
    costs = common.Costs(args.out)
    tasks, dropped = generate(args.num_tasks, args.seed, args.split, args.told, args.domain)
    print("dropped draws: " + (", ".join(f"{count:,} {reason}" for reason, count in dropped.items()) or "none"))
    needed = [not fact["told"] for task in tasks for fact in task.get("facts", task.get("slots"))
              if fact.get("matters", True)]
    print(f"{len(tasks):,} tasks of {len({t['family'] for t in tasks})} families, {sum(needed) / len(tasks):.2f} "
          "facts to find out in each")
    common.write_jsonl(args.out, tasks)
    costs.record()


if __name__ == "__main__":
    common.run_stage(main)
