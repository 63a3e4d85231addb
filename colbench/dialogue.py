"""Dialogues about functions and queries: a task has facts, and the agent learns them by asking the user simulator.

A fact is {"topic", "questions": [ways of asking], "replies": [what the user says], "matters", "told": the request
states it}. One that matters also has "slot" (a field of the task's "template"), "code" (what fills it in the
solution) and "guesses" (what could fill it). Facts are named by their index in task["facts"].
"""
import asyncio
import collections
import functools
import re
import string

from colbench.domain import check_template, Domain, Environment
from colbench.schema import check_kind, label, list_of, record
from colbench.scorer import reward_of, Scorer

OPENERS = ("", "", "", "Thanks. ", "Okay. ", "One more question. ")
UNCLEAR = ("Could you ask about something specific?", "I am not sure what you mean.", "Please ask me about one thing.")


def put(text, words):
    """`text`, or each text of a list or dict, with `words` in the place of $names."""
    if isinstance(text, str):
        return string.Template(text).substitute(words)
    if isinstance(text, dict):
        return {put(key, words): put(value, words) for key, value in text.items()}
    if isinstance(text, list):
        return [put(part, words) for part in text]
    return text


# ---------------------------------------------------------------------------------------------------------------------
# the facts of a task

FACT = record({"topic": str, "questions": list_of(str, 1), "matters": bool, "told": bool}, {"replies": list_of(str, 1)})
DECISION = record({"slot": label, "code": str, "guesses": list_of(str, 1)})     # of a fact that matters


def fact_kind(fact):
    """The kind (schema.py) of a fact."""
    return FACT(fact) or (DECISION(fact) if fact["matters"] else None)


def needed_facts(task):
    """Indices of the facts that matter."""
    return [index for index, fact in enumerate(task["facts"]) if fact["matters"]]


def asking_kind(task, known, asked):
    """The kind of a question about these facts (indices): "vague", "needed", "idle" or "repeat"."""
    if not asked:
        return "vague"
    if not known.issuperset(set(asked).intersection(needed_facts(task))):
        return "needed"
    return "idle" if known.isdisjoint(asked) else "repeat"


def answer_kind(task, known, is_solution):
    """The kind of a turn that answers: with the solution's text, or with another one, before all is known or not."""
    if is_solution:
        return "right answer"
    return "wrong answer" if known.issuperset(needed_facts(task)) else "early answer"


# ---------------------------------------------------------------------------------------------------------------------
# what a message asks about

STOP_WORDS = set("a an the of for to in at is be as it i me you do does have any if and or on should could would can "
                 "tell what which how want use please mind wish value about there your we that this when will".split())


@functools.lru_cache(10_000)
def content_words(text):
    """The words of a text in small letters, without stop words and without the s of a plural."""
    words = set()
    for word in re.findall(r"[a-z]+", text.lower()):
        if word not in STOP_WORDS:
            is_plural = len(word) > 3 and word.endswith("s")
            words.add(word[:-1] if is_plural else word)
    return frozenset(words)


def topics_asked(facts, message):
    """Indices of the facts that a message asks about, best first, at most two.

    Each fact has phrases: its topic, and its ways of asking. Its score is the share of a phrase's words in the message;
    words that are in many facts have less weight. The highest score wins, if it is at least one half."""
    texts = [(fact["topic"], *fact["questions"]) for fact in facts]
    return list(best_topics(tuple(texts), message))


@functools.lru_cache(10_000)                                        # each later turn asks again for the earlier turns
def best_topics(texts, message):
    """topics_asked for facts with these phrases, a tuple of texts for each fact."""
    said = content_words(message)
    phrases = [list(map(content_words, fact_texts)) for fact_texts in texts]
    num_facts_with = collections.Counter()
    for fact_phrases in phrases:
        words = frozenset().union(*fact_phrases)
        num_facts_with.update(words)

    def weight(words):
        return sum(1 / num_facts_with[word] for word in words)

    best_matches = []                                               # for each fact (share, words of the phrase, both's)
    for fact_phrases in phrases:
        matches = [(0, 0, frozenset())]
        for phrase in filter(None, fact_phrases):                   # a phrase of stop words alone matches nothing
            matches.append((weight(phrase & said) / weight(phrase), len(phrase), phrase & said))
        best_matches.append(max(matches, key=lambda match: match[:2]))
    least_share = max(0.5, max(best_matches)[0] - 1e-9)
    asked = {index: words for index, (share, _, words) in enumerate(best_matches) if share >= least_share}
    # "exactly the mark to pass" names "the mark to pass" too: the longer topic is meant.
    longest = [index for index, words in asked.items() if not any(map(words.__lt__, asked.values()))]
    return tuple(longest[:2])


DOES_NOT_KNOW = re.compile(
    r"(?:\bnot|\bcannot|n['’]t)\b[^.!?;,]*\b(?:know|known|sure|certain|say|tell|help|answer|remember|recall|"
    r"specif\w+|defined?|mention\w*|stated?|clear|information|preference|opinion)\b|\bunsure\b|"
    r"\bno (?:idea|preference|information|opinion)\b|"
    r"\bunknown\b|\bunspecified\b|\bdunno\b|\bn/a\b|\bup to you\b|\byou (?:can )?(?:decide|choose)\b", re.IGNORECASE)
# Remarks to the agent, not about the task
COURTESY = re.compile(r"\b(?:let me know|thanks?|please ask|feel free|happy to|anything else|other questions)\b|"
                      r"^(?:sorry|okay|ok|sure)\W*$", re.IGNORECASE)


def facts_answered(facts, message, reply):
    """Indices of the facts that a message asks about and the reply answers.

    A reply answers if a part of one of its sentences neither says that the user does not know, nor asks back, nor is a
    courtesy. A fact that such a part mentions is not answered. Whether the answer is right is not checked."""
    refusals, answers = [], []
    for sentence in re.split(r"(?<=[.!?])\s+|\n", reply):
        parts = [] if sentence.rstrip().endswith("?") else re.split(r"[;,]\s+(?:and |but )?", sentence)
        for part in parts:
            if DOES_NOT_KNOW.search(part):
                refusals.append(part)
            elif part.strip() and not COURTESY.search(part):
                answers.append(part)
    if not answers:
        return []
    refused = topics_asked(facts, " ".join(refusals)) if refusals else []
    return [index for index in topics_asked(facts, message) if index not in refused]


# ---------------------------------------------------------------------------------------------------------------------
# the scripted agent

class ScriptedAgent:
    """An agent for 02 --agent that makes mistakes: it asks about what does not matter, repeats itself, answers too
    early, and guesses what it does not know. informed: it makes few of them, and knows the answer.

    A subclass has VAGUE (turns that ask nothing), RATES and INFORMED_RATES (of early answers, vague, repeated and
    useless turns), and the methods ask(fact, history, rng, is_new) and useless(task, known, history, rng)."""

    FORGET_RATE = 0                 # of a known fact, where the agent answers

    def __init__(self, domain, informed=False):
        self.domain, self.informed = domain, informed

    def __call__(self, task, history, max_rounds, rng):
        facts, known = task["facts"], self.domain.known_facts(task, history)
        needed = needed_facts(task)
        unknown = [index for index in needed if index not in known]
        early, vague, repeat, useless = self.INFORMED_RATES if self.informed else self.RATES
        answer_rate = early if unknown else 0.85
        if rng.random() < answer_rate or num_agent_turns(history) + 1 == max_rounds:
            if self.informed:
                return self.domain.best_answer(task, needed, rng)
            return self.domain.best_answer(task, known, rng, self.FORGET_RATE)
        luck = rng.random()
        if luck < vague:
            return rng.choice(self.VAGUE)
        if luck < vague + repeat and known:
            return self.ask(facts[rng.choice(sorted(known))], history, rng, is_new=False)
        if luck < vague + repeat + useless or not unknown:
            return self.useless(task, known, history, rng)
        return self.ask(facts[rng.choice(unknown)], history, rng, is_new=True)


def num_agent_turns(history):
    return sum(turn["role"] == "assistant" for turn in history)


# ---------------------------------------------------------------------------------------------------------------------
# the user simulator

class FactEnvironment(Environment):
    """The scorer, and the user simulator. A subclass has SIMULATOR_SYSTEM (the system prompt of a simulator model) and
    VERDICTS (the key of the tests' verdicts in rows)."""

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
        """The user's reply about the (at most two) facts that the last message asks about."""
        replies = []
        for index in topics_asked(task["facts"], history[-1]["content"]):
            fact = task["facts"][index]
            replies.append(rng.choice(fact.get("replies", UNCLEAR)))
        return " ".join(replies) or rng.choice(UNCLEAR)

    async def simulator_chat(self, task, history):
        """Roles are swapped, and the request is in the system prompt."""
        swapped = {"assistant": "user", "user": "assistant"}
        chat = [{"role": "system", "content": self.SIMULATOR_SYSTEM.format(**task)}]
        for turn in history[1:]:
            chat.append({"role": swapped[turn["role"]], "content": turn["content"]})
        return chat

    async def verdicts(self, pairs, explain):
        """VERDICTS: one verdict per test, "faults": why a test failed, "reward": the share of tests passed. With
        `compat`: the published scorer's verdicts, and whether its evaluation would have ended here."""
        rows = []
        for score in await asyncio.to_thread(self.scorer.score, pairs):
            if self.scorer.compat:
                ends = "process ended" in score.faults or "time limit" in score.faults
                rows.append({"tests_compat": score.tests, "ends_evaluation": ends})
                continue
            row = {"reward": reward_of(score.tests), self.VERDICTS: score.tests, "faults": score.faults}
            if explain and score.failed:
                row["failed"] = score.failed
            rows.append(row)
        return rows


# ---------------------------------------------------------------------------------------------------------------------
# leaks

LEAK_TOKENS = 8
DEFINITION = r"\b(?:def|class)\s+(\w+)"


def token_runs(text):
    """All runs of LEAK_TOKENS words, numbers and signs. A string literal is one token, as its content is not code."""
    text = re.sub(r"""(?<!\w)("[^"\n]*"|'[^'\n]*')(?!\w)""", " STRING ", text)
    tokens = re.findall(r"[^\W\d]\w*|\d+(?:\.\d+)?|[^\w\s]", text)
    ends = range(LEAK_TOKENS, len(tokens) + 1)
    return {tuple(tokens[end - LEAK_TOKENS:end]) for end in ends}


@functools.lru_cache(1024)
def leak_marks(ground_truth):
    """Marks of a solution in a leak: the names that it defines, and its runs of LEAK_TOKENS code tokens."""
    english = r'"""[\s\S]*?"""|' r"'''[\s\S]*?'''" r"|(?m:(^|\s)#.*$)"             # docstrings and comments
    code = re.sub(english, " ", ground_truth)
    return set(re.findall(DEFINITION, code)), token_runs(code)


# ---------------------------------------------------------------------------------------------------------------------
# the domain

class FactDomain(Domain):
    """Base class of functions and queries, whose tasks have facts. A subclass also defines TASK (the kind of its tasks,
    schema.py), SCRIPT (a ScriptedAgent), learned, kind_of and text_of."""

    MARKER = "I WANT TO ANSWER:"    # what follows it in an agent's turn is the answer
    MEANINGS = {"all known": "share of the dialogues in which the agent knew all that matters before its last turn",
                "when known": "success where the agent knew all that matters before its last turn"}

    def __init__(self):
        self.PLAYERS = {"script": self.SCRIPT(self), "script-informed": self.SCRIPT(self, informed=True)}

    def learned(self, task, message, reply):
        """The facts (indices) that become known by a message and the reply to it."""

    def kind_of(self, task, known, history, message):
        """The kind of a turn (turn_kind) if these facts are known."""

    def text_of(self, fact):
        """The text of a fact that matters."""

    def check_task(self, task, where):
        check_kind(task, self.TASK, where)
        if task.get("facts"):
            check_template(task, {task["facts"][index]["slot"] for index in needed_facts(task)}, where)

    def known_facts(self, task, history):
        """The facts (a set of indices) that the request states, or that the agent has learned."""
        known = {index for index, fact in enumerate(task["facts"]) if fact["told"]}
        no_reply = {"content": ""}
        for turn, reply in zip(history, [*history[1:], no_reply]):
            if turn["role"] == "assistant":
                learned = self.learned(task, turn["content"], reply["content"])
                known.update(learned)
        return known

    def facts(self, task, history):
        if not task.get("facts"):
            return None
        known = self.known_facts(task, history)
        return [(self.text_of(task["facts"][index]), index in known) for index in needed_facts(task)]

    def turn_kind(self, task, history, message):
        if not task.get("facts"):
            return None
        return self.kind_of(task, self.known_facts(task, history), history, message)

    def best_answer(self, task, known, rng, forget_rate=0):
        """The agent's turn that answers with the facts that it knows (indices), and guesses the others."""
        codes = {}
        for index in needed_facts(task):
            fact = task["facts"][index]
            knows = index in known
            if knows and forget_rate:
                knows = rng.random() > forget_rate
            codes[fact["slot"]] = fact["code"] if knows else rng.choice(fact["guesses"])
        return f"{self.MARKER}\n{task['template'].format(**codes)}"

    def answer_message(self, task):
        return f"{self.MARKER}\n{task['ground_truth']}"

    def lacks(self, task, player):
        if not task.get("facts"):
            return "facts"
        return "template" if player == "script" and "template" not in task else None

    def leak_of(self, task, reply):
        """None if a reply contains no code of the solution.

        "fence": a code block.
        "signature": that of a function of the solution.
        "code": LEAK_TOKENS tokens of the solution in a row."""
        if "```" in reply:
            return "fence"
        names, runs = leak_marks(task["ground_truth"])
        if names.intersection(re.findall(DEFINITION, reply)):
            return "signature"
        return "code" if runs & token_runs(reply) else None

    def measure(self, trajectories):
        """"faults": counts of failed tests by reason."""
        faults = collections.Counter()
        for trajectory in trajectories:
            for fault in filter(None, trajectory["faults"]):
                faults[fault.partition(":")[0]] += 1
        return {"faults": dict(faults.most_common())}


def mean(values):
    return sum(values) / max(1, len(values))
