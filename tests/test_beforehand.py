"""lib/beforehand.py: what 03 and 04 say before the agent is trained."""
import pytest
import torch

import common
from colbench import backend, own
from conftest import FUNCTION, stage, turns
from lib import beforehand
from lib.logps import Sequence


def test_the_order_of_an_untrained_model_by_hand(capsys):
    """Means over the pairs of a task, then over tasks; a tie is half right."""
    gaps = torch.tensor([1.0, -1.0, 0.0, 2.0])
    order = beforehand.untrained_pair_accuracy(["a", "a", "b", "c"], gaps)
    assert order["share"] == pytest.approx((0.5 + 0.5 + 1) / 3)
    assert order["ci95"][0] == pytest.approx(0.5) and order["ci95"][1] == pytest.approx(1)
    assert "in 0.667 [0.500, 1.000] of the pairs" in (text := capsys.readouterr().out) and "not enough to say" in text
    order = beforehand.untrained_pair_accuracy([f"t{number}" for number in range(9)], torch.ones(9))
    assert order == {"share": 1.0, "ci95": [0.025 ** (1 / 9), 1.0]}              # exact: a bootstrap has no width
    assert ": the model reads c" in capsys.readouterr().out


def test_how_much_more_c_raises_the_chosen_one_by_hand():
    """Two turns of 2 and 4 tokens: (2 / 2 + 4 / 4) chosen, (1 / 2 + 0 / 4) rejected."""
    item = [Sequence([1] * 7, [-1, 0, 0, 1, 1, 1, 1])]
    example = common.Example([item, item], [], "t")
    with_c = [[torch.tensor([-1.0, -1.0]), torch.tensor([-2.0, -5.0])]]
    without_c = [[torch.tensor([-3.0, -5.0]), torch.tensor([-3.0, -5.0])]]
    assert stage(3).gaps_of_c(with_c, without_c, [example], "turn").tolist() == pytest.approx([2 - 0.5])


def test_answers_in_pairs_by_hand(capsys):
    """Two states of a dialogue: in the first a question is preferred, in the last, where the logged answer was right,
    twice a question and once an answer."""
    answer, question = f"{backend.MARKER}\nx", "Which one?"
    texts = [answer, question, "Why?"]
    candidates = [{"text": text, "ids": [number], "ended": True} for number, text in enumerate(texts)]
    states = [{"task": FUNCTION, "task_id": "t", "sample": 0, "turn": turn, "prompt": "p", "max_rounds": 4,
               "history": turns("?"), "candidates": candidates} for turn in (0, 1)]
    assert beforehand.answering_candidates(states[0], backend) == [0]
    assert beforehand.answering_candidates(states[0], own) == []

    def pair(turn, chosen, rejected):
        return {**states[turn], "chosen": candidates[chosen], "rejected": candidates[rejected]}
    pairs = [pair(0, 1, 0), pair(0, 1, 2), pair(1, 1, 0), pair(1, 2, 0), pair(1, 0, 1)]
    logged = {**states[0], "dialogue_history": turns("?", question, "x", answer), "reward": 1.0}
    beforehand.say_answers_in_pairs(pairs, states, [logged], backend)
    assert capsys.readouterr().out == ("pairs of an answer and a question: 1 prefer the answer, 3 the question; where "
                                       "the log has a right answer, 1 and 2\n")
    beforehand.say_answers_in_pairs([*pairs, pairs[3]], states, [logged], backend)
    assert "these pairs teach the agent not to answer" in capsys.readouterr().out
    beforehand.say_answers_in_pairs(pairs[1:2], states, [{**logged, "reward": None}], backend)
    assert capsys.readouterr().out == ""                             # no such pairs
