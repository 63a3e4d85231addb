"""colbench/backend.py: what the user simulator understands, kinds of turns, oracles, leaks of code."""
import pytest

from colbench import backend


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
                           ("Hello there!", []), ("Can you tell me more?", [])):
        assert backend.topics_asked(facts, message) == asked, message


def test_kinds_of_turns():
    facts = [{"topic": "the fee", "questions": ["What should the fee be?"], "matters": True, "told": False},
             {"topic": "the price", "questions": ["What should the price be?"], "matters": True, "told": True},
             {"topic": "the weather", "questions": ["What about the weather?"], "matters": False, "told": False}]
    task = {"facts": facts, "ground_truth": "def f(): return 1"}
    start = [{"role": "user", "content": "?"}]
    asked = start + [{"role": "assistant", "content": "What should the fee be?"}, {"role": "user", "content": "3"}]
    right, wrong = backend.MARKER + "\ndef f(): return 1", backend.MARKER + "\ndef f(): return 2"
    ended = {**task, "ground_truth": task["ground_truth"] + "\n"}             # files of others may end a text so
    assert backend.turn_kind(ended, start, right) == "right answer"
    for history, action, kind in ((start, "What should the fee be?", "needed"), (asked, "What is the fee?", "repeat"),
                                  (start, "And the price?", "repeat"), (start, "How is the weather?", "idle"),
                                  (start, "Well?", "vague"), (start, right, "right answer"),
                                  (start, wrong, "early answer"),
                                  (asked, wrong, "wrong answer")):
        assert backend.turn_kind(task, history, action) == kind, action


REFERENCE = '''def price(weight, zone):
    """The price of a parcel: heavy parcels that go far away cost more."""
    rate = {"near": 2, "far": 5}[zone]  # euros, for each kilogram that it weighs when packed
    if weight > 20 and zone == "far":
        return rate * weight + 7
    return rate * weight'''


@pytest.mark.parametrize("reply, kind", [
    ("Here it is:\n```python\nx\n```", "fence"), ("It is def price(weight, zone): and so on", "signature"),
    ("Then, if weight > 20 and zone == 'far': add seven", "code"),
    ("it does return rate*weight+7 return rate there", "code"),
    ("rate = {'near': 2,\n 'far': 5}[zone] is it", "code"), ("If weight > 20 it costs 7 more.", None),
    ("The price of a parcel: heavy parcels that go far away cost more.", None),
    ("You define price(weight, zone).", None),
    ("euros, for each kilogram that it weighs when packed", None), ("It's 'near' or 'far', don't you think?", None),
    ("", None)])
def test_leaks_are_code_and_not_what_it_says(reply, kind):
    assert backend.leak_of({"ground_truth": REFERENCE}, reply) == kind
