"""Dialogues about functions and queries: topics, kinds of turns, what is known, leaks of code."""
import asyncio
import itertools
import json
import random

import pytest

from colbench import backend, dialogue, make_tasks, sql
from conftest import ROOT, turns

TASK = json.loads((ROOT / "tests" / "queries.json").read_text())["task"]    # a limit, a year to look up, a deadline
TOLD = {**TASK, "facts": [{**fact, "told": True} for fact in TASK["facts"]]}
LOOK = "QUERY: SELECT MAX(placed) FROM orders"
START = turns("How many?")
_, *ASKED = turns("How many?", "What is the limit?", "1")
_, *LOOKED = turns("How many?", LOOK, "MAX(placed)\n2025-01-01")


def test_topics_asked_is_tolerant_and_tells_topics_apart():
    facts = [{"topic": topic, "questions": list(questions)} for topic, questions in (
        ("the mark to pass", ["What should the mark to pass be?"]),
        ("a value of exactly the mark to pass", ["What happens at exactly the mark to pass?"]),
        ("the separator of the names", ["What should stand between the names?"]),
        ("the order of the names", ["In which order should the names be?"]),
        ("the country of the parcel", ["What about the country of the parcel?"]))]
    for message, asked in (("What mark do students need to pass?", [0]),
                           ("What happens exactly at the pass mark?", [1]),
                           ("What stands between two names?", [2]), ("Which order should they have?", [3]),
                           ("Which separator and which order?", [2, 3]), ("Does the country matter?", [4]),
                           ("Where does it stand?", []), ("Can you tell me more?", [])):
        assert dialogue.topics_asked(facts, message) == asked, message


@pytest.mark.parametrize("task, history, message, of_query, of_function", [
    (TASK, START, "What is the limit?", "ask needed", "needed"),
    (TASK, START + ASKED, "The limit?", "ask repeat", "repeat"), (TOLD, START, "The limit?", "ask repeat", "repeat"),
    (TASK, START + ASKED, "What is the limit? And the deadline?", "ask repeat", "repeat"),
    (TASK, START + ASKED, "What is the limit? And which year is it now?", "ask for a look", "needed"),
    (TASK, START, "What is the deadline?", "ask idle", "idle"), (TASK, START, "Well?", "ask vague", "vague"),
    (TASK, START, "Which year is it now?", "ask for a look", "needed"), (TASK, START, LOOK, "look needed", "vague"),
    (TASK, START + LOOKED, LOOK, "look repeat", "vague"),
    (TASK, START + LOOKED, "QUERY: SELECT MIN(placed) FROM orders", "look repeat", "vague"),
    (TASK, START, "QUERY: SELECT * FROM orders", "look needed", "vague"),
    (TASK, START, "QUERY: SELECT COUNT(*) FROM orders", "look idle", "vague"),
    (TASK, START, f"{sql.MARKER}\nselect 1", "early answer", "early answer"),
    (TASK, START, f"{sql.MARKER}\nSELECT 1, 1", "right answer", "right answer"),
    (TASK, START, f"{sql.MARKER}\nSELECT 1,\n 1;", "right answer", "early answer"),
    (TASK, START + ASKED + LOOKED, f"{sql.MARKER}\nSELECT 1, 2", "wrong answer", "early answer"),
    (TOLD, START, f"{sql.MARKER}\nSELECT 1, 2", "wrong answer", "wrong answer")])
def test_kinds_of_turns(task, history, message, of_query, of_function):
    """References of other people's files may end with blanks, those of queries with a semicolon."""
    for domain, kind, end in ((sql, of_query, ";\n"), (backend, of_function, "\n")):
        ended = {**task, "ground_truth": task["ground_truth"] + end}
        assert domain.turn_kind(task, history, message) == domain.turn_kind(ended, history, message) == kind


def test_what_is_known_decision_by_decision():
    failed = turns("How many?", LOOK, "Error: no such column: placed")[1:]
    only_said = turns("How many?", "Which year is it now?", "What is the limit?")[1:]
    for more, known in (([], [False, False]), (ASKED, [True, False]), (LOOKED, [False, True]), (failed, [False, False]),
                        (only_said, [False, False]), (LOOKED + ASKED, [True, True])):
        facts = sql.facts(TASK, START + more)
        assert [is_known for _, is_known in facts] == known
        assert sql.all_known(TASK, START + more) == all(known)
    assert facts[0] == ("the limit: 1", True)
    assert sql.facts({}, START) is None and sql.turn_kind({}, START, "Well?") is None


@pytest.mark.parametrize("reply, known", [
    ("1", True), ("It is so.", True), ("No.", True), ("That does not matter to me.", True),
    ("I am not sure about the deadline. The limit is 1.", True), ("Well, I'd say 1. Do you need more?", True),
    ("I do not know.", False), ("I don’t know that.", False), ("", False), ("What do you mean?", False),
    ("I have no idea. Could you ask about something specific?", False), ("I cannot tell you.", False),
    ("I do not know the limit. The deadline is May.", False), ("I don't know. Let me know if you need more.", False),
    ("I can't help with that.", False), ("The function does not specify that.", False), ("It is not defined.", False),
    ("I have no preference.", False), ("I don't have that information.", False),
    ("We do not have a limit.", True), ("I am not sure, but I think it is 1.", True),
    ("The limit is 1, and I don't know the deadline.", True)])
def test_what_the_user_does_not_answer_is_not_known(reply, known):
    history = turns("How many?", "What is the limit? And the deadline?", reply)
    told = {**TASK, "facts": [{**fact, "told": fact["by"] == "look"} for fact in TASK["facts"]]}
    assert backend.all_known(told, history) == sql.all_known(told, history) == known
    assert backend.turn_kind(told, history, "The limit?") == ("repeat" if known else "needed")


@pytest.mark.parametrize("domain", [backend, sql])
def test_the_rule_based_user_answers_all_that_it_is_asked(domain):
    rng, environment = random.Random(0), domain.Environment()
    for task in make_tasks(domain, 20, 0, "all", "none"):
        for fact, other in itertools.product(task["facts"], repeat=2):
            history = turns("?", f"{rng.choice(fact['questions'])} {rng.choice(other['questions'])}")
            asked = dialogue.topics_asked(task["facts"], history[1]["content"])
            reply = {"role": "user", "content": asyncio.run(environment.rule_reply(task, history, rng))}
            for_user = {index for index in asked if task["facts"][index].get("by") != "look"}
            assert domain.known_facts(task, [*history, reply]) == for_user


def test_an_asker_takes_what_has_most_values_first():
    assert sql.asker_turn(TASK, START, 8, random.Random(0)) == LOOK
    assert sql.asker_turn(TASK, START + LOOKED, 8, random.Random(0)) == "What is the limit?"
    assert sql.asker_turn(TASK, START, 1, random.Random(0)).startswith(sql.MARKER)


def test_a_simulating_model_is_told_the_query():
    history = START + ASKED + LOOKED + ASKED[:1]                     # of looks it is not told
    chat = asyncio.run(sql.Environment().simulator_chat({**TASK, "problem_description": "?"}, history))
    assert TASK["ground_truth"] in chat[0]["content"]
    question, reply = ({"role": role, "content": turn["content"]} for role, turn in zip(("user", "assistant"), ASKED))
    assert chat[1:] == [question, reply, question]


FUNCTION = '''def price(weight, zone):
    """The price of a parcel: heavy parcels that go far away cost more."""
    rate = {"near": 2, "far": 5}[zone]  # euros, for each kilogram that it weighs when packed
    if weight > 20 and zone == "far":
        return rate * weight + 7
    return rate * weight'''
QUERY = "SELECT COUNT(o.id) FROM orders o WHERE o.total > 5"


@pytest.mark.parametrize("domain, reply, kind", [
    (backend, "Here it is:\n```python\nx\n```", "fence"),
    (backend, "It is def price(weight, zone): and so on", "signature"),
    (backend, "Then, if weight > 20 and zone == 'far': add seven", "code"),
    (backend, "it does return rate*weight+7 return rate there", "code"),
    (backend, "rate = {'near': 2,\n 'far': 5}[zone] is it", "code"),
    (backend, "it does return rate*weight+7 return there", None), (backend, "You define price(weight, zone).", None),
    (backend, "The price of a parcel: heavy parcels that go far away cost more.", None),
    (backend, "euros, for each kilogram that it weighs when packed", None),
    (backend, "It's 'near' or 'far', don't you think?", None), (backend, "", None),
    (sql, "```SELECT 1```", "fence"), (sql, "Use SELECT name FROM customers c WHERE it fits", "query"),
    (sql, "select name from customers", "query"),
    (sql, "It is COUNT(o.id) FROM orders o WHERE o.total then", "code"),
    (sql, "Select what you like from it.", None), (sql, "The total counts.", None)])
def test_leaks_are_code_and_not_what_it_says(domain, reply, kind):
    task = {"ground_truth": FUNCTION if domain is backend else QUERY, "schema": "CREATE TABLE customers(name TEXT);"}
    assert domain.leak_of(task, reply) == kind
