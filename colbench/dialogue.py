"""Dialogues about functions and queries: a task states facts, and the agent learns them by asking the human.

A fact is {"topic", "questions": [ways of asking], "replies": [what the human says], "matters", "told": the request
states it}. One that matters also has "slot" (a field of the task's "template"), "code" (what fills it in the
reference) and "guesses" (what could fill it). Facts are named by their index in task["facts"].
"""
import collections
import functools
import re
import string

from colbench import check_template
from colbench.schema import list_of, record, short_text

MARKER = "I WANT TO ANSWER:"
OPENERS = ("", "", "", "Thanks. ", "Okay. ", "One more question. ")
UNCLEAR = ("Could you ask about something specific?", "I am not sure what you mean.", "Please ask me about one thing.")



def put(text, words):
    """`text`, or each text of a list or dict, with `words` in the place of $names."""
    if isinstance(text, str):
        return string.Template(text).substitute(words)
    if isinstance(text, dict):
        return {put(key, words): put(value, words) for key, value in text.items()}
    return [put(part, words) for part in text]


# ---------------------------------------------------------------------------------------------------------------------
# the facts of a task

FACT_KEYS = {"topic": str, "matters": bool, "told": bool, "questions": list_of(str)}
SLOT_KEYS = {"slot": short_text, "code": str, "guesses": list_of(str, 1)}       # of a fact that matters
REPLIES = {"replies": list_of(str, 1)}                                          # may be missing
FACT = record(FACT_KEYS, {**REPLIES, **SLOT_KEYS})


def check_facts(task, where):
    """ColBenchError for a "template" that the facts of a task cannot fill."""
    check_template(task, {fact["slot"] for fact in task["facts"] if fact["matters"] and "slot" in fact}, where)


def missing_field(task, player):
    """The field that a player needs and that the task has not; None: it can be played."""
    facts = task.get("facts")
    if not facts:
        return "facts"
    if player != "script":
        return None
    if "template" not in task:
        return "template"
    for fact in facts:
        keys = ("questions", *SLOT_KEYS) if fact["matters"] else ("questions",)
        for key in keys:
            if key not in fact or fact[key] == []:
                return key
    return None


def is_forced(trajectory):
    """Whether --max-rounds has ended a dialogue, and not the agent."""
    last = [turn for turn in trajectory["dialogue_history"] if turn["role"] == "assistant"][-1]
    return MARKER not in last["content"] and "no_room" not in trajectory


def needed_facts(task):
    """Indices of the facts that matter."""
    return [index for index, fact in enumerate(task["facts"]) if fact["matters"]]


class Facts:
    """What functions and queries say of facts (colbench/__init__.py), from three functions of the domain.

    learned(task, history, place)   the facts (indices) that become known by the turn at this place
    kind_of(task, known, texts_before, message)     turn_kind, where these facts are known and these texts were said
    text_of(fact)                   the text of a fact that matters
    """

    def __init__(self, learned, kind_of, text_of):
        self.learned, self.kind_of, self.text_of = learned, kind_of, text_of

    def known_by_turn(self, task, history):
        """The facts (a set of indices) that are known after 0, 1, … all turns: told by the request, or learned."""
        known = [{index for index, fact in enumerate(task["facts"]) if fact["told"]}]
        for place in range(len(history)):
            known.append(known[-1].union(self.learned(task, history, place)))
        return known

    def known_facts(self, task, history):
        return self.known_by_turn(task, history)[-1]

    def all_known(self, task, history):
        return self.known_facts(task, history).issuperset(needed_facts(task))

    def facts(self, task, history):
        if not task.get("facts"):
            return None
        known = self.known_facts(task, history)
        return [(self.text_of(task["facts"][index]), index in known) for index in needed_facts(task)]

    def facts_by_turn(self, task, history):
        numbers = {index: number for number, index in enumerate(needed_facts(task))}
        return [{numbers[index] for index in known & numbers.keys()} for known in self.known_by_turn(task, history)]

    def turn_kind(self, task, history, message):
        if not task.get("facts"):
            return None
        texts_before = {turn["content"] for turn in history}
        return self.kind_of(task, self.known_facts(task, history), texts_before, message)

    def turn_kinds(self, task, history):
        known = self.known_by_turn(task, history) if task.get("facts") else None
        texts_before, kinds = set(), []
        for place, turn in enumerate(history):
            if turn["role"] == "assistant":
                kinds.append(self.kind_of(task, known[place], texts_before, turn["content"]) if known else None)
            texts_before.add(turn["content"])
        return kinds

    def oracle_scores(self, oracle, task, history, messages):
        kinds = [self.turn_kind(task, history, message) for message in messages]
        return kind_scores(oracle, self.all_known(task, history), kinds)


def answer_kind(task, known, is_reference):
    """The kind of a turn that answers: with the reference's text, or with another one, before all is known or not."""
    if is_reference:
        return "right answer"
    return "wrong answer" if known.issuperset(needed_facts(task)) else "early answer"


# ---------------------------------------------------------------------------------------------------------------------
# what a message asks about

STOP_WORDS = set("a an the of for to in at is be as it i me you do does have any if and or on should could would can "
                 "tell what which how want use please mind wish value about there your we that this when will".split())


@functools.lru_cache(100_000)
def content_words(text):
    """The words of a text in small letters, without stop words and without the s of a plural."""
    words = set()
    for word in re.findall(r"[a-z]+", text.lower()):
        if word not in STOP_WORDS:
            is_plural = len(word) > 3 and word.endswith("s")
            words.add(word[:-1] if is_plural else word)
    return frozenset(words)


def topics_asked(facts, message):
    """Which facts a message asks about: their indices, best first, at most two.

    Each fact has phrases: its topic, and its ways of asking. It is asked about by the share of the words of a phrase
    that the message has. A word counts the less the more facts have it. The largest share wins, from one half on."""
    texts = tuple((fact["topic"], *fact["questions"]) for fact in facts)
    return list(best_topics(texts, message))


@functools.lru_cache(10_000)                                        # each later turn asks again about those before it
def best_topics(texts, message):
    """topics_asked of facts with these phrases, a tuple of texts for each fact."""
    said = content_words(message)
    phrases = [list(map(content_words, fact_texts)) for fact_texts in texts]
    num_facts_with = collections.Counter()
    for fact_phrases in phrases:
        num_facts_with.update(frozenset().union(*fact_phrases))

    def weight(words):
        return sum(1 / num_facts_with[word] for word in words)

    best = []
    for index, fact_phrases in enumerate(phrases):
        matches = [(weight(phrase & said) / weight(phrase), len(phrase), phrase & said)
                   for phrase in fact_phrases if phrase]            # a phrase of stop words alone matches nothing
        share, _, words = max(matches, key=lambda match: match[:2], default=(0, 0, frozenset()))
        best.append((share, index, words))
    least_share = max(0.5, max(best)[0] - 1e-9)
    asked = [(index, words) for share, index, words in best if share >= least_share]
    # "exactly the mark to pass" names "the mark to pass" too: the longer topic is meant.
    longest = []
    for index, words in asked:
        if not any(words < longer_words for _, longer_words in asked):
            longest.append(index)
    return tuple(longest[:2])


# ---------------------------------------------------------------------------------------------------------------------
# oracles: critics that know the facts of the task

def kind_scores(oracle, known, kinds):
    """Scores of turns of these kinds by one who knows what the task needs, but not which round is the last.

    known: whether everything that matters is known already.
    "oracle" would have the answer as soon as it is right.
    "oracle-patient" knows that the agent cannot see whether it knows enough. Among right answers and further questions
    it has no preference once all is known. A right answer before that is worth nothing to it."""
    worth = {"right answer": 3, "needed": 2, "wrong answer": 0, "early answer": 0}
    worth_of_others = 1
    if oracle == "oracle-patient":
        worth["needed"] = 3
        worth["right answer"] = 2 if known else 0
        worth_of_others = 2 if known else 1
    worth["ask needed"] = worth["look needed"] = worth["needed"]     # as queries say it
    return [worth.get(kind, worth_of_others) for kind in kinds]


# ---------------------------------------------------------------------------------------------------------------------
# the scripted agent

class ScriptedAgent:
    """An agent for 02 --agent that makes mistakes: it asks about what does not matter, repeats itself, answers too
    early, and guesses what it does not know. informed: it makes few of them, and knows the answer.

    A domain's subclass has VAGUE (turns that ask nothing), RATES and INFORMED_RATES (of early answers, vague, repeated
    and useless turns), and the methods known_facts(task, history), ask(fact, history, rng, is_new),
    useless(task, known, history, rng) and answer(task, known, rng)."""

    def __init__(self, informed=False):
        self.informed, self.rates = informed, self.INFORMED_RATES if informed else self.RATES

    def __call__(self, task, history, max_rounds, rng):
        facts, known = task["facts"], self.known_facts(task, history)
        needed = [index for index in needed_facts(task) if index not in known]
        early, vague, repeat, useless = self.rates
        answer_rate = early if needed else 0.85
        if rng.random() < answer_rate or num_agent_turns(history) + 1 == max_rounds:
            return self.answer(task, known, rng)
        luck = rng.random()
        if luck < vague:
            return rng.choice(self.VAGUE)
        if luck < vague + repeat and known:
            return self.ask(facts[rng.choice(sorted(known))], history, rng, is_new=False)
        if luck < vague + repeat + useless or not needed:
            return self.useless(task, known, history, rng)
        return self.ask(facts[rng.choice(needed)], history, rng, is_new=True)


def num_agent_turns(history):
    return sum(turn["role"] == "assistant" for turn in history)


def answer_with(task, codes):
    """The agent's turn with the task's template, filled with {slot: code}."""
    return f"{MARKER}\n{task['template'].format(**codes)}"


# ---------------------------------------------------------------------------------------------------------------------
# what the human says

def known_reply(task, history, rng):
    """What the human knows of the (at most two) facts that the last message asks about."""
    asked = topics_asked(task["facts"], history[-1]["content"])
    replies = [rng.choice(task["facts"][index].get("replies", UNCLEAR)) for index in asked]
    return " ".join(replies) or rng.choice(UNCLEAR)


def human_chat(system, history):
    """The chat that a model sees which plays the human: the roles swapped, the request left to the system prompt."""
    swapped = {"assistant": "user", "user": "assistant"}
    chat = [{"role": "system", "content": system}]
    for turn in history[1:]:
        chat.append({"role": swapped[turn["role"]], "content": turn["content"]})
    return chat


LEAK_TOKENS = 8
DEFINITION = r"\b(?:def|class)\s+(\w+)"


def code_tokens(text):
    """Words, numbers and signs; a string literal is one token, as what it says is no code."""
    text = re.sub(r"""(?<!\w)("[^"\n]*"|'[^'\n]*')(?!\w)""", " STRING ", text)
    return re.findall(r"[^\W\d]\w*|\d+(?:\.\d+)?|[^\w\s]", text)


def token_runs(tokens):
    """All runs of LEAK_TOKENS tokens."""
    return {tuple(tokens[i:i + LEAK_TOKENS]) for i in range(len(tokens) - LEAK_TOKENS + 1)}


@functools.lru_cache(1024)
def leak_marks(ground_truth):
    """What gives a reference away: the names that it defines, and its runs of LEAK_TOKENS code tokens."""
    english = r'"""[\s\S]*?"""|' r"'''[\s\S]*?'''" r"|(?m:(^|\s)#.*$)"             # docstrings and comments
    code = re.sub(english, " ", ground_truth)
    return set(re.findall(DEFINITION, code)), token_runs(code_tokens(code))


def code_leak(task, reply):
    """How a reply of the human shows code; None where it describes what it wants.

    "fence": a code block.
    "signature": that of a function of the reference.
    "code": LEAK_TOKENS tokens of the reference in a row."""
    if "```" in reply:
        return "fence"
    names, runs = leak_marks(task["ground_truth"])
    if names.intersection(re.findall(DEFINITION, reply)):
        return "signature"
    if runs & token_runs(code_tokens(reply)):
        return "code"
    return None
