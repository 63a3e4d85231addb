"""Python functions (ColBench's backend): template tasks, the rule-based human, kinds of turns, oracles, scores.

A template task is a vague request with a signature, a reference function and 10 test calls. What the request leaves
out stands in "facts": those that matter (each is a value in the reference) and plausible ones that do not. The human
opens with the request and answers questions in at most 400 characters; what follows "I WANT TO ANSWER:" is the answer.
"""
import asyncio
import collections
import functools
import hashlib
import re
import string

from colbench import check_kind, check_template, MORE_KEYS, task_id, TASK_KEYS
from colbench.schema import list_of, record, short_text, table_of
from colbench.scorer import check_tasks, reward_of, Scorer

MARKER = "I WANT TO ANSWER:"
NOUN = "function"
REPLY_CHARS, REPLY_TOKENS = 400, 128
PERSON_SEES = False
MIN_GAP = None
views = None
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
# template tasks: families of functions and the facts that their requests leave out

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
    said = [(f"{noun.capitalize()} is {v}.", f"Well, {noun} is {v}.", f"I think {noun} is {v}.") for v in values]
    questions = (f"What should {noun} be?", f"Could you tell me {noun}?", f"Do you have a value in mind for {noun}?")
    return {"topic": noun, "questions": questions, "options": [(s, str(v)) for s, v in zip(said, values)]}


def word(noun, values):
    """A fact with a word for its value, which the function returns as a string."""
    fact = number_fact(noun, values)
    return {**fact, "options": [(said, f'"{value}"') for said, value in fact["options"]]}


def choice(topic, questions, *options):
    """A fact with a few possible values; each option is (how it stands in the code, what the human says …)."""
    return {"topic": topic, "questions": questions, "options": [(said, code) for code, *said in options]}


def maximum(noun, values, variable):
    """An upper limit that may be absent; its code is a whole line, or nothing."""
    fact = number_fact(noun, values)
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


def integers(low, high):
    """An integer as source text, sometimes at or beside a value of the task."""
    def draw(rng, values):
        near = [v + d for v in values if low <= v <= high for d in (-1, 0, 1)]
        return str(rng.choice(near) if near and rng.random() < 0.5 else rng.randint(low, high))
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
                   exact=boundary("the least amount", below=False)),
        idle=("the currency", "the name of the customer", "the way of payment", "the coupon code"),
        arguments=lambda rng, values: f"{rng.choice(values)}, {rng.choice((1, 1, 1, 2, 3))}"
        if rng.random() < 0.4 else integers(5, 100)(rng, values) + f", {rng.randint(1, 9)}"),
    "grade": dict(
        requests=("the grade of a score", "how a student did in a test"),
        code='def grade(score):\n    if score {exact} {mark}:\n        return {good}\n    return {bad}',
        facts=dict(mark=number_fact("the pass mark", TENS + BIG), exact=boundary("the pass mark", below=False),
                   good=word("the pass label", ("good", "pass", "yes", "fine", "well", "great")),
                   bad=word("the fail label", ("bad", "fail", "no", "poor", "retry", "weak"))),
        idle=("the name of the student", "the date of the test", "the number of questions", "the teacher"),
        arguments=integers(0, 260)),
    "join_names": dict(
        requests=("one line of text from a list of names", "a line with all names of a list"),
        code="def join_names(names):{sort}\n    return {sep}.join(names[:{limit}]){case}",
        facts=dict(limit=number_fact("the name limit", (2, 3, 4, 5, 6)), sep=separator("the names"),
                   sort=order("the names", "names"), case=letters("the names")),
        idle=("the title of a person", "the names of children", "the longest name", "the middle initial"),
        arguments=word_list),
    "filter_readings": dict(
        requests=("the useful readings of a sensor", "which readings of our sensor are fine"),
        code="def filter_readings(readings):\n    readings = [r * {scale} for r in readings if r {exact} {top}]{sort}\n"
             "    return readings",
        facts=dict(top=number_fact("the highest reading", TEENS + TENS + BIG),
                   exact=boundary("the highest reading", below=True),
                   sort=order("the readings", "readings"), scale=number_fact("the scale factor", FEW + SOME)),
        idle=("the name of the sensor", "the time of a reading", "the unit of the readings", "a missing sensor"),
        arguments=number_list(1, 260)),
    "sales_bonus": dict(
        requests=("the bonus of a seller", "what bonus somebody gets for sales"),
        code="def sales_bonus(sales):\n    bonus = max(0, sales - {target}) * {percent} // 100{top}\n    return bonus",
        facts=dict(target=number_fact("the sales target", BIG), percent=number_fact("the seller share", PERCENT),
                   top=maximum("the maximum bonus", (11, 12, 14, 16, 18, 40, 50), "bonus")),
        idle=("the name of the seller", "the region of the seller", "the month", "the size of the team"),
        arguments=integers(50, 1500)),
    "late_fee": dict(
        requests=("the fee for a late book", "what a reader pays for being late"),
        code="def late_fee(days):\n    fee = max(0, days - {grace}) * {rate}{top}\n    return fee",
        facts=dict(grace=number_fact("the grace period", FEW), rate=number_fact("the daily fee", SOME + TEENS),
                   top=maximum("the maximum fee", TENS + BIG, "fee")),
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
        arguments=lambda rng, values: f"{rng.randint(0, 99)}, {rng.choice((0, 1, 2, 3))}"),
    "shorten": dict(
        requests=("a short form of a text", "a short title from a long text"),
        code="def shorten(text):\n    return text[:{length}]{case} + {end}",
        facts=dict(length=number_fact("the text length", SOME + TEENS + TENS), case=letters("the text"),
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
        facts=dict(length=number_fact("the word length", FEW), exact=boundary("the word length", below=False),
                   unique=choice("the same word twice", ("Does the same word twice count once?",
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
                   hot=word("the hot label", ("hot", "stop", "high", "red")),
                   cold=word("the cold label", ("cold", "wait", "low", "blue")),
                   normal=word("the normal label", ("fine", "good", "ready", "green"))),
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
        facts=dict(order=choice("the name to begin with", ("Which is the name to begin with?",
                                                           "Could you tell me the name to begin with?",
                                                           "Do you have a wish for the name to begin with?"),
                                ("first, last", "Begin with the first name.", "The first name should begin."),
                                ("last, first", "Begin with the last name.", "The last name should begin.")),
                   sep=separator("the names"), length=number_fact("the name length", SOME + TEENS),
                   case=letters("the user name")),
        idle=("the age of the person", "the address of the person", "the password", "the middle initial"),
        arguments=two_words),
}
IDLE = ("the type hints", "the comments", "the log file", "the speed", "the error messages", "the python version")


def run_reference(code, calls):
    """The results of compiled calls as text. Only for references that this file made: it runs them in this process."""
    namespace = {}
    exec(code, namespace)
    return [repr(eval(call, namespace)) for call in calls]


def make_task(rng, name, told, accept):
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


# ---------------------------------------------------------------------------------------------------------------------
# what a message asks about, and what a turn is worth

STOP_WORDS = set("a an the of for to in at is be as it i me you do does have any if and or on should could would can "
                 "tell what which how want use please mind wish value about there your we that this when will".split())


@functools.lru_cache(100_000)
def content_words(text):
    words = re.findall(r"[a-z]+", text.lower())
    return frozenset(word[:-1] if len(word) > 3 and word.endswith("s") else word for word in words
                     if word not in STOP_WORDS)


def topics_asked(facts, message):
    """Which facts (indices, best first, at most two) a message asks about: the one with the largest share of the words
    of its topic or of one of its ways of asking, a word counting the less the more facts share it; at least half."""
    return list(best_topics(tuple((fact["topic"], *fact["questions"]) for fact in facts), message))


@functools.lru_cache(10_000)
def best_topics(texts, message):
    """topics_asked of each fact's texts; kept, because every later turn asks it again of all turns before."""
    said = content_words(message)
    phrases = [[content_words(text) for text in own] for own in texts]
    shared = collections.Counter(word for fact_phrases in phrases for word in set().union(*fact_phrases))
    best = []
    for index, fact_phrases in enumerate(phrases):
        share, phrase = max(((sum(1 / shared[w] for w in p & said) / sum(1 / shared[w] for w in p), p)
                             for p in fact_phrases if p), key=lambda pair: (pair[0], len(pair[1])),
                            default=(0, frozenset()))               # of a fact that is named by stop words alone
        best.append((share, index, phrase & said))
    top = max(share for share, _, _ in best)
    asked = [(share, index, words) for share, index, words in best if share >= max(0.5, top - 1e-9)]
    # "exactly the mark to pass" names "the mark to pass" too: the longer topic is meant.
    asked = [a for a in asked if not any(a[2] < b[2] for b in asked)]
    return tuple(index for _, index, _ in asked)[:2]


def known_by_turn(task, history):
    """[the facts (indices) that are known after 0, 1, … all turns]: those that the request states or that the agent has
    asked about."""
    known = [{i for i, fact in enumerate(task["facts"]) if fact["told"]}]
    for turn in history:
        asked = topics_asked(task["facts"], turn["content"]) if turn["role"] == "assistant" else ()
        known.append(known[-1].union(asked) if asked else known[-1])
    return known


def known_facts(task, history):
    """Indices of the facts that the request states or that the agent has asked about."""
    return known_by_turn(task, history)[-1]


def knows_all(task, known):
    return {i for i, fact in enumerate(task["facts"]) if fact["matters"]} <= known


def all_known(task, history):
    """Whether every fact that matters is known after `history`."""
    return knows_all(task, known_facts(task, history))


def facts(task, history):
    """[(what the person says of it, whether it is known after `history`)] of the facts that matter; None where the task
    states none."""
    if not task.get("facts"):
        return None
    known = known_facts(task, history)
    return [(next(iter(fact.get("replies", ())), fact["topic"]), i in known) for i, fact in enumerate(task["facts"])
            if fact["matters"]]


def facts_by_turn(task, history):
    """[the facts (numbers in the list of `facts`) that are known after 0, 1, … all turns]; as `facts`, all at once."""
    needed = [i for i, fact in enumerate(task["facts"]) if fact["matters"]]
    return [{number for number, i in enumerate(needed) if i in known} for known in known_by_turn(task, history)]


def turn_kind(task, history, action):
    """What an agent's turn is worth after `history`: "needed" (asks for a fact that matters and is not known), "repeat"
    (known already), "idle" (does not matter), "vague" (no topic), "right answer", "wrong answer" (all that matters was
    known), "early answer" (it was not, and the answer is wrong). None where the task states no facts."""
    return kind_of(task, known_facts(task, history), action) if task.get("facts") else None


def turn_kinds(task, history):
    """turn_kind of each agent turn of a history, all at once."""
    agent = [(i, turn["content"]) for i, turn in enumerate(history) if turn["role"] == "assistant"]
    if not task.get("facts"):
        return [None] * len(agent)
    known = known_by_turn(task, history)
    return [kind_of(task, known[i], content) for i, content in agent]


def kind_of(task, known, action):
    """turn_kind of an action where these facts are known."""
    facts = task["facts"]
    if (answer := answer_of([{"content": action}], False)) is not None:
        if answer.strip() == task["ground_truth"]:
            return "right answer"
        return "wrong answer" if knows_all(task, known) else "early answer"
    asked = topics_asked(facts, action)
    if not asked:
        return "vague"
    if any(facts[i]["matters"] and i not in known for i in asked):
        return "needed"
    return "repeat" if any(i in known for i in asked) else "idle"


ORACLES = "oracle", "oracle-patient"


def oracle_scores(oracle, task, history, actions):
    """Scores of actions (texts) by one who knows what a template task needs: a critic without errors. "oracle" would
    have the answer as soon as it is right. "oracle-patient" knows that the agent cannot see whether it knows enough:
    among right answers and further questions it has no preference, and a right answer before that is none."""
    return kind_scores(oracle, all_known(task, history), [turn_kind(task, history, action) for action in actions])


def kind_scores(oracle, known, kinds):
    """oracle_scores of turns of these kinds, once everything that matters is known, or before (`known`)."""
    worth, other = {"right answer": 3, "needed": 2, "wrong answer": 0, "early answer": 0}, 1
    if oracle == "oracle-patient":
        worth, other = {**worth, "right answer": 2 if known else 0, "needed": 3}, 2 if known else 1
    return [worth.get(kind, other) for kind in kinds]


# ---------------------------------------------------------------------------------------------------------------------
# what the human says

UNCLEAR = ("Could you ask about something specific?", "I am not sure what you mean.", "Please ask me about one thing.")


def known_reply(task, history, rng):
    """What the human knows of the (at most two) facts that the last message asks about."""
    asked = topics_asked(task["facts"], history[-1]["content"])
    return " ".join(rng.choice(task["facts"][index].get("replies", UNCLEAR)) for index in asked) or rng.choice(UNCLEAR)


def human_chat(system, history):
    """The chat that a model sees which plays the human: the roles swapped, the request left to the system prompt."""
    swapped = {"assistant": "user", "user": "assistant"}
    return [{"role": "system", "content": system}] + [
        {"role": swapped[turn["role"]], "content": turn["content"]} for turn in history[1:]]


LEAK_TOKENS = 8


def code_tokens(text):
    """Words, numbers and signs; a string literal is one token, as what it says is no code."""
    text = re.sub(r"""(?<!\w)("[^"\n]*"|'[^'\n]*')(?!\w)""", " STRING ", text)
    return re.findall(r"[^\W\d]\w*|\d+(?:\.\d+)?|[^\w\s]", text)


@functools.lru_cache(1024)
def leak_marks(ground_truth):
    """What gives a reference away: the names that it defines, and its runs of LEAK_TOKENS code tokens."""
    code = re.sub(r'"""[\s\S]*?"""|' r"'''[\s\S]*?'''" r"|(?m:(^|\s)#.*$)", " ", ground_truth)      # these are English
    tokens = code_tokens(code)
    return (set(re.findall(r"\b(?:def|class)\s+(\w+)", code)),
            {tuple(tokens[i:i + LEAK_TOKENS]) for i in range(len(tokens) - LEAK_TOKENS + 1)})


def leak_of(task, reply):
    """How a reply of the human shows code: "fence" (a code block), "signature" (of a function of the reference), "code"
    (LEAK_TOKENS tokens of the reference in a row); None where it describes what it wants."""
    if "```" in reply:
        return "fence"
    names, runs = leak_marks(task["ground_truth"])
    if names & set(re.findall(r"\b(?:def|class)\s+(\w+)", reply)):
        return "signature"
    tokens = code_tokens(reply)
    return "code" if any(tuple(tokens[i:i + LEAK_TOKENS]) in runs for i in range(len(tokens))) else None


# ---------------------------------------------------------------------------------------------------------------------
# the scripted agent

VAGUE = ("Can you tell me more?", "What else should I know?", "Could you describe the function?")
OPENERS = ("", "", "", "Thanks. ", "Okay. ", "One more question. ")


def scripted_turn(task, history, max_rounds, informed, rng):
    """What the noisy scripted agent says next. It asks for facts that matter less often than it should, repeats itself,
    asks about things that do not matter, and sometimes answers too early, guessing what it does not know."""
    facts, known = task["facts"], known_facts(task, history)
    needed = [i for i, fact in enumerate(facts) if fact["matters"] and i not in known]
    idle = [i for i, fact in enumerate(facts) if not fact["matters"] and i not in known]
    num_turns = sum(turn["role"] == "assistant" for turn in history)
    early, vague, repeat, useless = (0.01, 0.03, 0.04, 0.10) if informed else (0.03, 0.06, 0.14, 0.37)
    luck = rng.random()
    if num_turns + 1 == max_rounds or luck < (early if needed else 0.85):
        values = {fact["slot"]: fact["code"] if informed or i in known else rng.choice(fact["guesses"])
                  for i, fact in enumerate(facts) if fact["matters"]}
        return f"{MARKER}\n{task['template'].format(**values)}"
    luck = rng.random()
    if luck < vague:
        return rng.choice(VAGUE)
    if luck < vague + repeat and known:
        ask = rng.choice(sorted(known))
    elif luck < vague + repeat + useless or not needed:
        ask = rng.choice(idle or sorted(known) or needed)
    else:
        ask = rng.choice(needed)
    return (rng.choice(OPENERS) if len(history) > 1 else "") + rng.choice(facts[ask]["questions"])


# ---------------------------------------------------------------------------------------------------------------------
# the rest of the interface (colbench/__init__.py)

def owns(task):
    return "test_cases" in task


FACT_KEYS = {"topic": str, "matters": bool, "told": bool, "questions": list_of(str)}
SLOT_KEYS = {"slot": short_text, "code": str, "guesses": list_of(str, 1)}             # of a fact that matters
REPLIES = {"replies": list_of(str, 1)}                                          # may be missing
FACT = record(FACT_KEYS, {**REPLIES, **SLOT_KEYS})
TASK = record({**TASK_KEYS, "test_cases": table_of(str)}, {**MORE_KEYS, "template": str, "facts": list_of(FACT)})


def check_task(task, where):
    check_kind(task, TASK, where)
    if task.get("facts"):
        check_facts(task, where)


def check_facts(task, where):
    """ColBenchError for a "template" that the facts of a task cannot fill."""
    if "template" in task:
        check_template(task, {fact["slot"] for fact in task["facts"] if fact["matters"] and "slot" in fact}, where)


def check_data(tasks, unsafe_scorer):
    """check_tasks, whose two scorers have different hash seeds."""
    with Scorer(unsafe_scorer) as scorer, Scorer(unsafe_scorer, hash_seed=1) as other:
        return check_tasks(tasks, scorer, other)


def num_hidden(task):
    return sum(fact["matters"] and not fact["told"] for fact in task["facts"])


def lacks(task, player):
    facts = task.get("facts")
    if not facts:
        return "facts"
    if player == "script":
        if "template" not in task:
            return "template"
        for fact in facts:
            needed = ("questions", *SLOT_KEYS) if fact["matters"] else ("questions",)
            for key in needed:
                if key not in fact or fact[key] == []:
                    return key
    return None


def answer_of(history, is_last):
    """What follows the marker; the whole turn where nothing follows it, where it stands in a comment of the code, and
    in the last round without it."""
    content = history[-1]["content"]
    before, marker, after = content.partition(MARKER)
    if not marker:
        return content if is_last else None
    return after.strip("\n") if after.strip() and not re.search(r"#[^\w\n]*$", before) else content


def answer_message(task):
    return f"{MARKER}\n{task['ground_truth']}"


def shown(message):
    return message


def metric(trajectories):
    return "success_rate"


def outcome(trajectory):
    return trajectory["reward"] == 1


def measure(trajectories):
    """See 05_evaluate.py for the columns; "faults" counts tests that are not passed by reason."""
    n = len(trajectories)
    ends = [t["dialogue_history"][-1]["content"] for t in trajectories]
    faults = collections.Counter(fault.partition(":")[0] for t in trajectories for fault in t["faults"] if fault)
    not_gradeable = {(task_id(t["task"]), i) for t in trajectories for i, fault in enumerate(t["faults"])
                     if (fault or "").startswith("not gradeable")}
    metrics = {"tests_passed": sum(t["reward"] for t in trajectories) / n,
               "forced_answers": sum(MARKER not in content for content in ends) / n,
               "not_gradeable_tests": len(not_gradeable),
               "not_gradeable_tasks": len({task for task, _ in not_gradeable}), "faults": dict(faults.most_common())}
    if not_gradeable:
        metrics["notes"] = [f"{len(not_gradeable)} tests of {metrics['not_gradeable_tasks']} tasks cannot be graded "
                            "(the reference raises, is random, or returns what cannot be compared, or the test asks "
                            "the answer nothing); no answer passes them"]
    if all("tests_compat" in t for t in trajectories):
        rewards = [reward_of(t["tests_compat"]) for t in trajectories]
        metrics |= {"success_rate_compat": rewards.count(1) / n, "tests_passed_compat": sum(rewards) / n,
                    "ends_evaluation": sum(t["ends_evaluation"] for t in trajectories)}
    return metrics


class World:
    """The scorer, and the rule-based human."""

    def __init__(self, images=None, rows_in=None, unsafe_scorer=False, compat=False, **unused):
        self.scorer = Scorer(unsafe_scorer, compat=compat)

    def __enter__(self):
        self.scorer.__enter__()
        self.about = {"scorer": self.scorer.layer}
        return self

    def __exit__(self, *exception):
        self.scorer.__exit__(*exception)

    async def tool_reply(self, task, history):
        return None

    async def rule_reply(self, task, history, rng):
        return known_reply(task, history, rng)

    async def person_chat(self, task, history):
        return human_chat(SIMULATOR_SYSTEM.format(**task), history)

    async def score(self, pairs, explain=False):
        """"tests": a verdict a test, "faults": why a test is not passed, "reward": the share of tests passed."""
        scores = await asyncio.to_thread(self.scorer.score, pairs)
        if self.scorer.compat:
            return [{"tests_compat": score.tests, "ends_evaluation": bool({"process ended", "time limit"} &
                                                                          set(score.faults))} for score in scores]
        return [{"reward": reward_of(score.tests), "tests": score.tests, "faults": score.faults,
                 **({"failed": score.failed} if explain and score.failed else {})} for score in scores]
