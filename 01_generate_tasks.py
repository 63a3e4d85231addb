"""Stage 1: make collaborative programming tasks in ColBench's format, or take ColBench's own.

Reads   nothing (--source template), the published files (--source colbench), or a tasks file (--check).
Writes  tasks.jsonl, one task a line: {"problem_description", "ground_truth", "test_cases"} as published, "task_id", and
        of template tasks {"family", "template", "facts"}, which the rule-based human and the scripted agent of 02 read;
        with --trajectories: trajectories.jsonl, as published, with "task_id", "sample" and "reward".

A template task is a vague request with a signature, a reference function and 10 test calls. What the request leaves
out stands in `facts`: those that matter (thresholds, prices, orders, words: each is a value in the reference) and
plausible ones that do not (`matters: false`: the delivery time of a parcel whose price depends on its weight alone).
A task is kept only if its reference runs on all its tests, and if every fact that matters does so provably: with any
other value of that fact at least one test gives another result.

Splits are disjoint by content: the hash of the reference puts a task into train (80 %), validation (10 %) or test
(10 %), whatever the seed. No two tasks of a file have the same reference.

--source colbench takes the published tasks as they are, from the Hugging Face hub or from --path: a folder with
backend_tasks/train.jsonl and backend_tasks/test.jsonl, or one JSONL file, which is taken whole. --trajectories takes
the published offline trajectories instead, every row and key as it is: a row gets "task_id" and "sample" (0, 1, 2 ...
by order of appearance of its task: the file holds its samples of the tasks as blocks one after the other), and a row
without "reward" gets "reward" and "tests" from our scorer.

--check FILE writes no tasks but says what is wrong with those of a file: references that raise, lack a package, are
random or return what cannot be compared; tests that say nothing; and how far an answer comes that always returns the
same value (the best one for each task), the floor under every "tests passed".

Differs from the paper: ColBench's tasks were written by Llama-3.1-70B-Instruct. These need no model, and a human that
answers by rule can play them.

    python 01_generate_tasks.py --split train --num-tasks 1000 --seed 0 --out out/train.jsonl
    python 01_generate_tasks.py --split test --num-tasks 300 --seed 1 --out out/test.jsonl
    python 01_generate_tasks.py --check out/test.jsonl
    python 01_generate_tasks.py --source colbench --split test --out colbench/test.jsonl
    python 01_generate_tasks.py --source colbench --trajectories --path LOCAL_COPY --out colbench/offline.jsonl
"""
import collections
import hashlib
import json
import pathlib
import random
import re
import string

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


def generate(num_tasks, seed, split, told):
    """`num_tasks` tasks without repeats, the families in turn until one has no more; the dropped draws by reason."""
    rng = random.Random(seed)
    tasks, dropped = {}, {}

    def accept(task_id):
        if split != "all" and int(task_id, 16) % 100 not in SPLITS[split]:
            return "of another split"
        return "repeated" if task_id in tasks else None

    families = sorted(FAMILIES)
    misses = {name: 0 for name in families}
    while len(tasks) < num_tasks:
        if not families:
            raise common.InputError(f"--num-tasks {num_tasks}: there are only {len(tasks)} different tasks "
                                    f"(--split {split})")
        name = families[len(tasks) % len(families)]
        task = template_task(rng, name, told, accept)
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
    seen = {}
    for number, row in enumerate(rows, 1):
        task = row["task"] if trajectories else row
        row["task_id"] = row.get("task_id") or common.task_id(task)
        if trajectories:
            row.setdefault("sample", seen.get(row["task_id"], 0))
            seen[row["task_id"]] = seen.get(row["task_id"], 0) + 1
            if not isinstance(row.get("reward"), (int, float, type(None))):
                raise common.InputError(f'{path}:{number}: "reward" is a {type(row["reward"]).__name__}, not a number')
    return rows


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


def take_published(args):
    """--source colbench: write published tasks or trajectories to args.out."""
    if args.split == "validation":
        raise common.InputError("--split validation: the published data have none, only train and test")
    if args.trajectories and args.split == "test":
        raise common.InputError("--split test: the published trajectories are all of training tasks")
    names = ([COLBENCH_TRAJECTORIES] if args.trajectories else
             list(COLBENCH_TASKS.values()) if args.split == "all" else [COLBENCH_TASKS[args.split]])
    files = published_files(names, args.path)
    rows = [row for file in files for row in read_published(file, args.trajectories)]
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
    else:
        print(f"kept {len(kept):,} of {len(rows):,} tasks, {len(kept) - len(samples):,} of them repeat another")
    common.write_jsonl(args.out, kept)


# ---------------------------------------------------------------------------------------------------------------------
# the data check

def check_tasks(tasks, unsafe):
    """For each task {"findings": {what: detail}, "constant": share of its tests that the best constant answer passes}.
    A finding is a reason why the task, or one of its tests, measures nothing."""
    with common.Scorer(unsafe) as scorer, common.Scorer(unsafe, hash_seed=1) as other_hashes:
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
    parser.add_argument("--source", choices=["template", "colbench"], default="template", help="where tasks come from")
    parser.add_argument("--path", metavar="LOCAL_COPY", help="colbench: a folder with the published files, or one "
                        "JSONL file, which is taken whole; without it they are downloaded from the hub")
    parser.add_argument("--trajectories", action="store_true", help="colbench: take the offline trajectories instead")
    parser.add_argument("--num-tasks", type=common.positive_int,
                        help="tasks to write, in an order by --seed (where not given: template: 1000, colbench: all)")
    parser.add_argument("--split", choices=["all", *SPLITS], default="all",
                        help="which part: template: disjoint by content; colbench: a published file (no validation)")
    parser.add_argument("--told", choices=["none", "some", "all"], default="some",
                        help="facts that the request states: none, one in 30 %% of the tasks, or all (clear requests)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the tasks")
    parser.add_argument("--check", metavar="FILE", help="check the tasks of this file instead of making tasks")
    parser.add_argument("--out", help="tasks file to write (JSONL); with --check its findings, a row a task (optional)")
    common.add_scorer(parser)
    common.add_overwrite(parser)
    args = parser.parse_args(argv)
    if not args.out and not args.check:
        parser.error("the following arguments are required: --out")
    if args.source == "template" and (args.path or args.trajectories):
        parser.error("--path and --trajectories need --source colbench")
    if args.source == "template" and args.num_tasks is None:
        args.num_tasks = 1000
    return args


def main(argv=None):
    args = parse_args(argv)
    if args.source == "colbench" and not args.check:
        return take_published(args)
    tasks = args.check and common.read_jsonl(args.check, common.TASK_KEYS)
    if args.out and common.claim_output(args, args.out, [args.check]):
        return
    if args.check:
        checks = check_tasks(tasks, args.unsafe_scorer)
        print_check(args.check, tasks, checks)
        if args.out:
            common.write_jsonl(args.out, checks)
        return
    costs = common.Costs(args.out)
    tasks, dropped = generate(args.num_tasks, args.seed, args.split, args.told)
    print("dropped draws: " + (", ".join(f"{count:,} {reason}" for reason, count in dropped.items()) or "none"))
    needed = [sum(fact["matters"] and not fact["told"] for fact in task["facts"]) for task in tasks]
    print(f"{len(tasks):,} tasks of {len({t['family'] for t in tasks})} families, {sum(needed) / len(needed):.2f} "
          "facts to find out in each")
    common.write_jsonl(args.out, tasks)
    costs.record()


if __name__ == "__main__":
    common.run_stage(main)
