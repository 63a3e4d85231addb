"""Python functions (ColBench's backend): template tasks, the rule-based human, kinds of turns, oracles, scores.

A template task is a vague request with a signature, a reference function and 10 test calls. What the request leaves
out stands in "facts": those that matter (each is a value in the reference) and plausible ones that do not. The human
opens with the request and answers questions in at most 400 characters; what follows "I WANT TO ANSWER:" is the answer.
dialogue.py has what functions and queries have in common.
"""
import asyncio
import collections
import functools
import hashlib
import re
import string

from colbench import check_kind, defaults, dialogue, MORE_KEYS, task_id, TASK_KEYS
from colbench.defaults import *  # noqa: F403
from colbench.dialogue import (
    human_chat,
    kind_scores,
    known_reply,
    knows_all,
    MARKER,
    needed_facts,
    numbers_known,
    OPENERS,
    topics_asked,
)
from colbench.schema import list_of, record, table_of
from colbench.scorer import check_tasks, reward_of, Scorer

NOUN = "function"
ORACLES = "oracle", "oracle-patient"
COLUMNS = (("tests_passed", "tests", ".3f"), ("all_known", "all known", ".3f"),
           ("success_when_known", "when known", ".3f"), ("success_rate_compat", "published: success", ".3f"),
           ("tests_passed_compat", "tests", ".3f"))
SCORE_KEYS = "reward", "tests", "faults", "tests_compat", "ends_evaluation"
AGENT_SYSTEM = (
    "You help a person with one Python function. The request leaves things out that only the person knows. In each "
    "turn, ask one short question about something that changes what the function returns. The person cannot read or "
    f'run code. When you know enough, write "{MARKER}" and then nothing but the complete Python function. You have '
    "{max_rounds} rounds, and the last one must be that answer.")
SIMULATOR_SYSTEM = (
    "You are a person who asked an assistant for a Python function, in these words:\n{problem_description}\n\n"
    "Only you know what you need: the function below. Answer the assistant's last message in one or two short "
    "sentences of plain English. Say only what was asked about. If the function does not settle it, say that you do "
    "not know. Never write or quote code.\n\n{ground_truth}")
JUDGE = (
    "An assistant writes a Python function for a person. It cannot see what the person needs; you can:\n"
    "{ground_truth}\n\nThe dialogue so far:\n{dialogue}\n\nTwo ways for the assistant to go on:\n[A] {a}\n[B] {b}\n\n"
    "Which one brings the assistant nearer to the function that the person needs? Reply with the letter A or B alone.")


# ---------------------------------------------------------------------------------------------------------------------
# template tasks: what a request can leave out
#
# A fact of a family is {"topic", "questions", "options": [([what the human says of it, …], how it stands in the code)]}

# Ranges of numbers. Facts of one family have disjoint ranges, as prices, ages and limits mostly have.
FEW = (2, 3, 4, 5)
SOME = (6, 7, 8, 9)
TEENS = (10, 11, 12, 14, 15, 16, 18)
TENS = (20, 25, 30, 40, 50)
BIG = (60, 70, 75, 80, 90, 100, 120, 150, 200, 250)
PERCENT = (5, 10, 15, 20, 25, 30)
NUM_TESTS = 10


def number_fact(noun, values):
    """A fact with a number for its value; `noun` begins with "the"."""
    options = []
    for value in values:
        replies = (f"{noun.capitalize()} is {value}.", f"Well, {noun} is {value}.", f"I think {noun} is {value}.")
        options.append((replies, str(value)))
    questions = (f"What should {noun} be?", f"Could you tell me {noun}?", f"Do you have a value in mind for {noun}?")
    return {"topic": noun, "questions": questions, "options": options}


def word_fact(noun, values):
    """A fact with a word for its value, which the function returns as a string."""
    fact = number_fact(noun, values)
    fact["options"] = [(replies, f'"{value}"') for replies, value in fact["options"]]
    return fact


def choice_fact(topic, questions, *options):
    """A fact with a few possible values; each option is (how it stands in the code, what the human says …)."""
    return {"topic": topic, "questions": questions, "options": [(replies, code) for code, *replies in options]}


def limit_fact(noun, values, variable):
    """An upper limit that may be absent; its code is a whole line, or nothing."""
    fact = number_fact(noun, values)
    limits = [(replies, f"\n    {variable} = min({variable}, {code})") for replies, code in fact["options"]]
    no_limit = ((f"There is no need for {noun}.", f"We do not have {noun}."), "")
    fact["options"] = [no_limit, no_limit, *limits]
    return fact


def boundary_fact(noun, below):
    """Whether a value exactly at the limit counts; `below` tells which side of the limit the code compares."""
    without, including = ("<", "<=") if below else (">", ">=")
    questions = (f"Does a value of exactly {noun} count as well?", f"What happens at exactly {noun}?",
                 f"Should a value of exactly {noun} be included?")
    return choice_fact(f"a value of exactly {noun}", questions,
                       (without, f"No, exactly {noun} does not count.", f"At exactly {noun} it is not included."),
                       (including, f"Yes, exactly {noun} counts too.", f"At exactly {noun} it is included."))


def order_fact(noun, variable):
    questions = (f"In which order should {noun} be?", f"Could you tell me the order of {noun}?",
                 f"Should I change the order of {noun}?")
    return choice_fact(f"the order of {noun}", questions,
                       ("", f"Keep the order of {noun} as it is.", f"Please do not change the order of {noun}."),
                       (f"\n    {variable} = sorted({variable})", f"Please sort {noun} upwards.",
                        f"The order of {noun} should go up."),
                       (f"\n    {variable} = sorted({variable}, reverse=True)", f"Please sort {noun} downwards.",
                        f"The order of {noun} should go down."))


def letters_fact(noun):
    questions = (f"Should the letters of {noun} be capital or small?", f"Could you tell me the letters of {noun}?",
                 f"Do you have a wish for the letters of {noun}?")
    return choice_fact(f"the letters of {noun}", questions,
                       (".upper()", f"Use capital letters for {noun}.",
                        f"The letters of {noun} should all be capital."),
                       (".lower()", f"Use small letters for {noun}.", f"The letters of {noun} should all be small."),
                       ("", f"Leave the letters of {noun} as they are.",
                        f"Please do not change the letters of {noun}."))


def separator_fact(noun):
    questions = (f"What should stand between {noun}?", f"Could you tell me the separator of {noun}?",
                 f"Do you have a separator in mind for {noun}?")
    options = []
    for sign, name in (("-", "dash"), ("_", "underscore"), ("/", "slash"), (".", "dot"), ("+", "plus")):
        options.append((f'"{sign}"', f"Please put a {name} between {noun}.", f"The separator of {noun} is a {name}."))
    return choice_fact(f"the separator of {noun}", questions, *options)


def end_sign_fact(noun):
    questions = (f"What should stand at the end of {noun}?", f"Could you tell me the end of {noun}?",
                 f"Do you have a sign in mind for the end of {noun}?")
    options = []
    for sign, name in (("...", "three dots"), ("-", "a dash"), ("", "nothing")):
        options.append((f'"{sign}"', f"Please put {name} at the end of {noun}.",
                        f"At the end of {noun} we want {name}."))
    return choice_fact(f"the end of {noun}", questions, *options)


# ---------------------------------------------------------------------------------------------------------------------
# template tasks: arguments of test calls, as source text. arguments(rng, values); values: the numbers of the task

def integers(low, high):
    """Draws an integer, sometimes at or beside a value of the task."""
    def draw(rng, values):
        near = [value + step for value in values if low <= value <= high for step in (-1, 0, 1)]
        if near and rng.random() < 0.5:
            return str(rng.choice(near))
        return str(rng.randint(low, high))
    return draw


def number_list(low, high):
    draw_number = integers(low, high)

    def draw(rng, values):
        numbers = [draw_number(rng, values) for _ in range(rng.randint(3, 7))]
        return f"[{', '.join(numbers)}]"
    return draw


def price_and_count(rng, values):
    if rng.random() < 0.4:
        return f"{rng.choice(values)}, {rng.choice((1, 1, 1, 2, 3))}"
    return f"{integers(5, 100)(rng, values)}, {rng.randint(1, 9)}"


def points_and_lives(rng, values):
    return f"{rng.randint(0, 99)}, {rng.choice((0, 1, 2, 3))}"


def random_word(rng, low=2, high=9):
    return "".join(rng.choice(string.ascii_letters) for _ in range(rng.randint(low, high)))


def word_list(rng, values):
    return repr([random_word(rng) for _ in range(rng.randint(3, 9))])


def two_words(rng, values):
    return f"{random_word(rng, 3, 14)!r}, {random_word(rng, 3, 14)!r}"


def sentence(rng, values):
    words = [random_word(rng, 1, 10) for _ in range(rng.randint(3, 14))]
    repeated = words[:rng.randint(0, 2)]
    return repr(" ".join(words + repeated))


# ---------------------------------------------------------------------------------------------------------------------
# template tasks: the families, and how a task is drawn

FAMILIES = {
    "parcel_price": dict(
        requests=("the price of sending a parcel", "what a customer pays for a parcel"),
        code="def parcel_price(weight):\n    price = {base} + {rate} * weight\n    if weight > {heavy}:\n"
             "        price = price + {extra}\n    return price",
        facts=dict(base=number_fact("the basic price", TEENS), rate=number_fact("the kilo price", FEW),
                   heavy=number_fact("the weight limit", TENS), extra=number_fact("the extra charge", SOME)),
        idle=("the country of the parcel", "the size of the box", "the insurance", "the delivery time"),
        arguments=integers(1, 60)),
    "order_total": dict(
        requests=("the total of an order", "what an order costs in our shop"),
        code="def order_total(price, count):\n    total = price * count\n    if total {exact} {minimum}:\n"
             "        total = total - total * {percent} // 100\n    return total + {fee}",
        facts=dict(minimum=number_fact("the least amount", BIG), percent=number_fact("the discount", PERCENT),
                   fee=number_fact("the shipping fee", (2, 3, 4, *SOME)),
                   exact=boundary_fact("the least amount", below=False)),
        idle=("the currency", "the name of the customer", "the way of payment", "the coupon code"),
        arguments=price_and_count),
    "grade": dict(
        requests=("the grade of a score", "how a student did in a test"),
        code='def grade(score):\n    if score {exact} {mark}:\n        return {good}\n    return {bad}',
        facts=dict(mark=number_fact("the pass mark", TENS + BIG), exact=boundary_fact("the pass mark", below=False),
                   good=word_fact("the pass label", ("good", "pass", "yes", "fine", "well", "great")),
                   bad=word_fact("the fail label", ("bad", "fail", "no", "poor", "retry", "weak"))),
        idle=("the name of the student", "the date of the test", "the number of questions", "the teacher"),
        arguments=integers(0, 260)),
    "join_names": dict(
        requests=("one line of text from a list of names", "a line with all names of a list"),
        code="def join_names(names):{sort}\n    return {sep}.join(names[:{limit}]){case}",
        facts=dict(limit=number_fact("the name limit", (2, 3, 4, 5, 6)), sep=separator_fact("the names"),
                   sort=order_fact("the names", "names"), case=letters_fact("the names")),
        idle=("the title of a person", "the names of children", "the longest name", "the middle initial"),
        arguments=word_list),
    "filter_readings": dict(
        requests=("the useful readings of a sensor", "which readings of our sensor are fine"),
        code="def filter_readings(readings):\n    readings = [r * {scale} for r in readings if r {exact} {top}]{sort}\n"
             "    return readings",
        facts=dict(top=number_fact("the highest reading", TEENS + TENS + BIG),
                   exact=boundary_fact("the highest reading", below=True),
                   sort=order_fact("the readings", "readings"), scale=number_fact("the scale factor", FEW + SOME)),
        idle=("the name of the sensor", "the time of a reading", "the unit of the readings", "a missing sensor"),
        arguments=number_list(1, 260)),
    "sales_bonus": dict(
        requests=("the bonus of a seller", "what bonus somebody gets for sales"),
        code="def sales_bonus(sales):\n    bonus = max(0, sales - {target}) * {percent} // 100{top}\n    return bonus",
        facts=dict(target=number_fact("the sales target", BIG), percent=number_fact("the seller share", PERCENT),
                   top=limit_fact("the maximum bonus", (11, 12, 14, 16, 18, 40, 50), "bonus")),
        idle=("the name of the seller", "the region of the seller", "the month", "the size of the team"),
        arguments=integers(50, 1500)),
    "late_fee": dict(
        requests=("the fee for a late book", "what a reader pays for being late"),
        code="def late_fee(days):\n    fee = max(0, days - {grace}) * {rate}{top}\n    return fee",
        facts=dict(grace=number_fact("the grace period", FEW), rate=number_fact("the daily fee", SOME + TEENS),
                   top=limit_fact("the maximum fee", TENS + BIG, "fee")),
        idle=("the title of the book", "the age of the reader", "the closing hours", "a lost book"),
        arguments=integers(0, 40)),
    "water_bill": dict(
        requests=("the water bill of a household", "what a household pays for water"),
        code="def water_bill(litres):\n    bill = {basic} + {rate} * max(0, litres - {free})\n"
             "    return max(bill, {least})",
        facts=dict(basic=number_fact("the basic fee", SOME), rate=number_fact("the litre price", FEW),
                   free=number_fact("the free amount", TEENS), least=number_fact("the smallest bill", TENS)),
        idle=("the address of the household", "the season", "the number of people", "the pressure of the water"),
        arguments=integers(0, 70)),
    "player_score": dict(
        requests=("the score of a player", "the result of a player in our game"),
        code="def player_score(points, lives):\n    score = points * {factor} + lives * {bonus}\n    if lives == 0:\n"
             "        score = score - {penalty}\n    return score",
        facts=dict(factor=number_fact("the point factor", FEW), bonus=number_fact("the life bonus", SOME + TEENS),
                   penalty=number_fact("the loss penalty", TENS)),
        idle=("the name of the player", "the level of the game", "the time played", "the high score"),
        arguments=points_and_lives),
    "shorten": dict(
        requests=("a short form of a text", "a short title from a long text"),
        code="def shorten(text):\n    return text[:{length}]{case} + {end}",
        facts=dict(length=number_fact("the text length", SOME + TEENS + TENS), case=letters_fact("the text"),
                   end=end_sign_fact("the text")),
        idle=("the language of the text", "the author of the text", "the font", "the width of the page"),
        arguments=sentence),
    "count_words": dict(
        requests=("the number of words in a text", "how many words a text has"),
        code="def count_words(text):\n    words = [w for w in text.split() if len(w) {exact} {length}]\n"
             "    return len({unique}(words)) * {weight}",
        facts=dict(length=number_fact("the word length", FEW), exact=boundary_fact("the word length", below=False),
                   unique=choice_fact("the same word twice", ("Does the same word twice count once?",
                                                              "What about the same word twice?",
                                                              "How do you count the same word twice?"),
                                      ("set", "The same word twice counts once.", "Count the same word only once."),
                                      ("list", "The same word twice counts twice.", "Count the same word each time.")),
                   weight=number_fact("the word weight", SOME + TEENS + TENS)),
        idle=("the language of the text", "the author of the text", "the spelling", "the headlines"),
        arguments=sentence),
    "alarm": dict(
        requests=("the alarm of an oven", "what our oven should report"),
        code="def alarm(degrees):\n    if degrees > {high}:\n        return {hot}\n    if degrees < {low}:\n"
             "        return {cold}\n    return {normal}",
        facts=dict(high=number_fact("the highest heat", BIG), low=number_fact("the lowest heat", TEENS + TENS),
                   hot=word_fact("the hot label", ("hot", "stop", "high", "red")),
                   cold=word_fact("the cold label", ("cold", "wait", "low", "blue")),
                   normal=word_fact("the normal label", ("fine", "good", "ready", "green"))),
        idle=("the type of the oven", "the time of day", "the door of the oven", "the noise of the alarm"),
        arguments=integers(0, 260)),
    "ticket_price": dict(
        requests=("the price of a ticket", "what a visitor pays at the door"),
        code="def ticket_price(age):\n    if age < {child} or age > {senior}:\n        return {reduced}\n"
             "    return {full}",
        facts=dict(child=number_fact("the child age", SOME), senior=number_fact("the senior age", (60, 70, 75, 80)),
                   reduced=number_fact("the reduced price", FEW), full=number_fact("the full price", TEENS + TENS)),
        idle=("the day of the week", "the seat of the visitor", "the size of a group", "the name of the show"),
        arguments=integers(1, 99)),
    "user_name": dict(
        requests=("the user name of a person", "a user name from two names"),
        code="def user_name(first, last):\n    names = [{order}]\n    return {sep}.join(names)[:{length}]{case}",
        facts=dict(order=choice_fact("the name to begin with", ("Which is the name to begin with?",
                                                                "Could you tell me the name to begin with?",
                                                                "Do you have a wish for the name to begin with?"),
                                     ("first, last", "Begin with the first name.", "The first name should begin."),
                                     ("last, first", "Begin with the last name.", "The last name should begin.")),
                   sep=separator_fact("the names"), length=number_fact("the name length", SOME + TEENS),
                   case=letters_fact("the user name")),
        idle=("the age of the person", "the address of the person", "the password", "the middle initial"),
        arguments=two_words),
}
IDLE = ("the type hints", "the comments", "the log file", "the speed", "the error messages", "the python version")
OPENINGS = ("I need a function that gives me {}.", "Please write a function that returns {}.",
            "Can you write a function that works out {}?")


def run_reference(code, calls):
    """The results of compiled calls as text. Only for references that this file made: it runs them in this process."""
    namespace = {}
    exec(code, namespace)
    return [repr(eval(call, namespace)) for call in calls]


def draw_calls(rng, name, values):
    """NUM_TESTS different calls of a family's function."""
    calls = []
    while len(calls) < NUM_TESTS:
        call = f"{name}({FAMILIES[name]['arguments'](rng, values)})"
        if call not in calls:
            calls.append(call)
    return calls


def needed_fact(slot, fact, replies, code):
    """A fact of a task: that of a family, with the value that was drawn for it."""
    alternatives = sorted({other for _, other in fact["options"]} - {code})
    return {"topic": fact["topic"], "matters": True, "told": False, "slot": slot, "code": code,
            "guesses": [code, *alternatives], "questions": list(fact["questions"]), "replies": list(replies)}


def idle_fact(noun):
    questions = [f"Could you tell me {noun}?", f"Do you have a wish for {noun}?", f"What about {noun}?"]
    replies = ["That does not matter to me.", f"It does not depend on {noun}.", f"Do not worry about {noun}."]
    return {"topic": noun, "matters": False, "told": False, "questions": questions, "replies": replies}


def has_proof(fact, template, codes, calls):
    """Whether every other value of a fact changes the result of some call."""
    results = run_reference(template.format(**codes), calls)
    for guess in fact["guesses"][1:]:
        changed = codes | {fact["slot"]: guess}
        if run_reference(template.format(**changed), calls) == results:
            return False
    return True


def make_task(rng, name, told, accept):
    """One task of the family of this name, or the reason why there is none: that of accept(), or that its tests do not
    prove every fact."""
    family = FAMILIES[name]
    drawn = {slot: rng.choice(fact["options"]) for slot, fact in family["facts"].items()}
    codes = {slot: code for slot, (_, code) in drawn.items()}
    reference = family["code"].format(**codes)
    task_id = hashlib.sha256(reference.encode()).hexdigest()[:16]
    if reason := accept(task_id):
        return reason

    values = [int(code) for code in codes.values() if code.isdigit()]
    calls = draw_calls(rng, name, values or [1])
    compiled = [compile(call, "<call>", "eval") for call in calls]
    facts = [needed_fact(slot, fact, *drawn[slot]) for slot, fact in family["facts"].items()]
    for fact in facts:
        if not has_proof(fact, family["code"], codes, compiled):
            return "a fact without proof"
    facts += [idle_fact(noun) for noun in family["idle"] + IDLE]
    rng.shuffle(facts)

    needed = [fact for fact in facts if fact["matters"]]
    states_one = rng.random() < 0.3                                 # drawn even where `told` does not ask for it
    one_or_none = needed[:1] if states_one else []
    told_facts = {"none": [], "some": one_or_none, "all": needed}[told]
    for fact in told_facts:
        fact["told"] = True
    opening = rng.choice(OPENINGS)
    hints = [" " + rng.choice(fact["replies"]) for fact in told_facts]
    request = opening.format(rng.choice(family["requests"])) + "".join(hints)
    signature = reference.splitlines()[0]
    return {"task_id": task_id, "problem_description": f"{request}\n{signature}", "ground_truth": reference,
            "test_cases": {f"test{number}": call for number, call in enumerate(calls, 1)},
            "family": name, "template": family["code"], "facts": facts}


# ---------------------------------------------------------------------------------------------------------------------
# what the agent knows, and what a turn is worth

def known_by_turn(task, history):
    """The facts (a set of indices) that are known after 0, 1, … all turns.

    Known is what the request states, or the agent has asked about."""
    known = [{index for index, fact in enumerate(task["facts"]) if fact["told"]}]
    for turn in history:
        asked = topics_asked(task["facts"], turn["content"]) if turn["role"] == "assistant" else []
        known.append(known[-1].union(asked))
    return known


def known_facts(task, history):
    """The facts (a set of indices) that are known after `history`."""
    return known_by_turn(task, history)[-1]


def all_known(task, history):
    return knows_all(task, known_facts(task, history))


def facts(task, history):
    """The text of a fact is the first thing that the human says of it."""
    if not task.get("facts"):
        return None
    known = known_facts(task, history)
    rows = []
    for index in needed_facts(task):
        fact = task["facts"][index]
        texts = fact.get("replies") or [fact["topic"]]
        rows.append((texts[0], index in known))
    return rows


def facts_by_turn(task, history):
    return [numbers_known(task, known) for known in known_by_turn(task, history)]


def turn_kind(task, history, message):
    """Kinds: "needed" (asks for a fact that matters and is not known), "repeat" (known already), "idle" (does not
    matter), "vague" (no topic), "right answer" (the reference's text), "wrong answer" (another text, which may pass all
    tests; all that matters was known), "early answer" (another text; it was not all known)."""
    if not task.get("facts"):
        return None
    return kind_of(task, known_facts(task, history), message)


def turn_kinds(task, history):
    known = known_by_turn(task, history) if task.get("facts") else None
    kinds = []
    for number, turn in enumerate(history):
        if turn["role"] == "assistant":
            kinds.append(kind_of(task, known[number], turn["content"]) if known else None)
    return kinds


def kind_of(task, known, message):
    """turn_kind of a message where these facts are known."""
    facts = task["facts"]
    answer = answer_of([{"content": message}], False)
    if answer is not None:
        if answer.strip() == task["ground_truth"].strip():
            return "right answer"
        return "wrong answer" if knows_all(task, known) else "early answer"
    asked = topics_asked(facts, message)
    if not asked:
        return "vague"
    if any(facts[index]["matters"] and index not in known for index in asked):
        return "needed"
    return "idle" if known.isdisjoint(asked) else "repeat"


def oracle_scores(oracle, task, history, messages):
    kinds = [turn_kind(task, history, message) for message in messages]
    return kind_scores(oracle, all_known(task, history), kinds)


# ---------------------------------------------------------------------------------------------------------------------
# the scripted agent

VAGUE = ("Can you tell me more?", "What else should I know?", "Could you describe the function?")


def scripted_turn(task, history, max_rounds, rng, informed=False):
    """What the noisy scripted agent says next.

    It asks for facts that matter less often than it should, repeats itself, and asks about what does not matter.
    Sometimes it answers too early, and guesses what it does not know. informed: it knows the answer."""
    facts, known = task["facts"], known_facts(task, history)
    unknown = [index for index in range(len(facts)) if index not in known]
    needed = [index for index in unknown if facts[index]["matters"]]
    idle = [index for index in unknown if not facts[index]["matters"]]
    early, vague, repeat, useless = (0.01, 0.03, 0.04, 0.10) if informed else (0.03, 0.06, 0.14, 0.37)
    num_turns = sum(turn["role"] == "assistant" for turn in history)
    answer_rate = early if needed else 0.85
    if rng.random() < answer_rate or num_turns + 1 == max_rounds:
        return scripted_answer(task, known, rng, informed)

    luck = rng.random()
    if luck < vague:
        return rng.choice(VAGUE)
    if luck < vague + repeat and known:
        index = rng.choice(sorted(known))
    elif luck < vague + repeat + useless or not needed:
        index = rng.choice(idle or sorted(known) or needed)
    else:
        index = rng.choice(needed)
    opener = rng.choice(OPENERS) if len(history) > 1 else ""
    return opener + rng.choice(facts[index]["questions"])


def scripted_answer(task, known, rng, informed):
    """The answer of an agent that guesses what it does not know."""
    codes = {}
    for index in needed_facts(task):
        fact = task["facts"][index]
        codes[fact["slot"]] = fact["code"] if informed or index in known else rng.choice(fact["guesses"])
    return f"{MARKER}\n{task['template'].format(**codes)}"


PLAYERS = {"script": scripted_turn, "script-informed": functools.partial(scripted_turn, informed=True)}


# ---------------------------------------------------------------------------------------------------------------------
# the rest of the interface (colbench/__init__.py)

TASK = record({**TASK_KEYS, "test_cases": table_of(str)},
              {**MORE_KEYS, "template": str, "facts": list_of(dialogue.FACT)})


def owns(task):
    """A task with tests. A page (frontend.py) may have the field, but no test in it."""
    if "test_cases" not in task:
        return False
    return len(task["test_cases"]) > 0 or not task["ground_truth"].lstrip().startswith("<")


def check_task(task, where):
    check_kind(task, TASK, where)
    if task.get("facts"):
        dialogue.check_facts(task, where)


def check_data(tasks, unsafe_scorer):
    """check_tasks, whose two scorers have different hash seeds."""
    with Scorer(unsafe_scorer) as scorer, Scorer(unsafe_scorer, hash_seed=1) as other_hashes:
        return check_tasks(tasks, scorer, other_hashes)


lacks = dialogue.missing_field
leak_of = dialogue.code_leak


def answer_of(history, is_last):
    """What follows the marker.

    It is the whole turn where nothing follows the marker, where code stands before it and a remark follows ("the
    function above"), where the marker stands in a comment of the code, and in the last round without a marker."""
    content = history[-1]["content"]
    before, marker, after = content.partition(MARKER)
    if not marker:
        return content if is_last else None
    is_in_comment = re.search(r"#[^\w\n]*$", before)
    is_before = "def " in before and not re.search(r"\b(?:def|lambda|import)\b|=", after)
    if is_in_comment or is_before or not after.strip():
        return content
    return after.strip("\n")


def answer_message(task):
    return f"{MARKER}\n{task['ground_truth']}"


def measure(trajectories):
    """05_evaluate.py says what the columns are. "faults" counts by reason the tests that are not passed."""
    n = len(trajectories)
    faults = collections.Counter()
    not_gradeable = set()
    for trajectory in trajectories:
        for number, fault in enumerate(trajectory["faults"]):
            if fault:
                faults[fault.partition(":")[0]] += 1
            if fault and fault.startswith("not gradeable"):
                not_gradeable.add((task_id(trajectory["task"]), number))
    tasks = {task for task, _ in not_gradeable}
    forced = [dialogue.is_forced(trajectory) for trajectory in trajectories]
    metrics = {"tests_passed": sum(trajectory["reward"] for trajectory in trajectories) / n,
               "forced_answers": sum(forced) / n, "not_gradeable_tests": len(not_gradeable),
               "not_gradeable_tasks": len(tasks), "faults": dict(faults.most_common())}
    if not_gradeable:
        metrics["notes"] = [f"{len(not_gradeable)} tests of {len(tasks)} tasks cannot be graded (the reference raises, "
                            "is random, or returns what cannot be compared, or the test asks the answer nothing); no "
                            "answer passes them"]
    if all("tests_compat" in trajectory for trajectory in trajectories):
        rewards = [reward_of(trajectory["tests_compat"]) for trajectory in trajectories]
        metrics["success_rate_compat"] = rewards.count(1) / n
        metrics["tests_passed_compat"] = sum(rewards) / n
        metrics["ends_evaluation"] = sum(trajectory["ends_evaluation"] for trajectory in trajectories)
    return metrics


class World(defaults.World):
    """The scorer, and the rule-based human."""

    TAKES = "unsafe_scorer", "compat"

    def __init__(self, unsafe_scorer=False, compat=False):
        self.scorer = Scorer(unsafe_scorer, compat=compat)

    def __enter__(self):
        self.scorer.__enter__()
        self.about = {"scorer": self.scorer.layer}
        return self

    def __exit__(self, *exception):
        self.scorer.__exit__(*exception)

    async def rule_reply(self, task, history, rng):
        return known_reply(task, history, rng)

    async def person_chat(self, task, history):
        return human_chat(SIMULATOR_SYSTEM.format(**task), history)

    async def score(self, pairs, explain=False):
        """"tests": a verdict a test, "faults": why a test is not passed, "reward": the share of tests passed."""
        scores = await asyncio.to_thread(self.scorer.score, pairs)
        if self.scorer.compat:
            return [published_row(score) for score in scores]
        return [score_row(score, explain) for score in scores]


def score_row(score, explain):
    row = {"reward": reward_of(score.tests), "tests": score.tests, "faults": score.faults}
    if explain and score.failed:
        row["failed"] = score.failed
    return row


def published_row(score):
    """The verdicts of the published scorer, and whether its evaluation would have ended here."""
    ends = "process ended" in score.faults or "time limit" in score.faults
    return {"tests_compat": score.tests, "ends_evaluation": ends}
