"""01_generate_tasks.py: every fact matters provably, splits share nothing, the same seed gives the same file."""
import hashlib

import pytest

from colbench import backend, DOMAINS, make_tasks, SPLITS
from colbench.dialogue import topics_asked
from colbench.scorer import Scorer
from conftest import call


@pytest.fixture(scope="module")
def tasks():
    return {split: make_tasks(backend, 70, 3, split, "some") for split in ("train", "test")}


def test_references_pass_their_tests_and_fail_one_when_a_fact_that_matters_changes(tasks):
    with Scorer() as scorer:
        references = [(task, task["ground_truth"]) for task in tasks["test"][:28]]
        for (task, _), score in zip(references, scorer.score(references)):
            assert len(task["test_cases"]) == 10 and score.gradeable == score.tests == [True] * 10
        for task in tasks["test"][:14]:                                    # each family once
            needed = {fact["slot"]: fact for fact in task["facts"] if fact["matters"]}
            codes = {slot: fact["code"] for slot, fact in needed.items()}
            assert task["template"].format(**codes) == task["ground_truth"]
            for slot, fact in needed.items():
                wrong = [task["template"].format(**{**codes, slot: guess}) for guess in fact["guesses"]
                         if guess != codes[slot]]
                scores = scorer.score([(task, answer) for answer in wrong[:2]])
                assert scores and not any(all(score.tests) for score in scores)


def test_the_request_is_vague_questions_reach_their_fact_and_replies_hold_no_code(tasks):
    for task in tasks["train"]:
        assert task["problem_description"].endswith(task["ground_truth"].splitlines()[0])
        for index, fact in enumerate(task["facts"]):
            for question in fact["questions"]:
                assert topics_asked(task["facts"], question) == [index], question
            assert fact["matters"] or not fact["told"]
            for reply in fact["replies"]:
                assert len(reply) <= backend.REPLY_CHARS and backend.leak_of(task, reply) is None
                assert not any(sign in reply for sign in ("def ", "return", "(", "=", "["))
    assert 0.15 < sum(any(f["told"] for f in t["facts"]) for t in tasks["train"]) / 70 < 0.45


@pytest.mark.parametrize("domain, digest", [
    ("backend", "d2da58908f230cef"), ("sql", "6e33b1e38519e547"), ("frontend", "c0d686a8aa3f60fc")])
def test_tasks_stay_what_results_were_measured_on_and_splits_share_none(domain, digest):
    """With every version of Python, and every hash seed."""
    tasks = [make_tasks(DOMAINS[domain], 14, 3, split, "some") for split in SPLITS]
    assert len({task["ground_truth"] for task in sum(tasks, [])}) == 42
    assert hashlib.sha256(repr(tasks).encode()).hexdigest()[:16] == digest


def test_told_all_states_every_fact_that_matters():
    for task in make_tasks(backend, 30, 0, "all", "all"):
        assert any(fact["matters"] for fact in task["facts"])
        for fact in task["facts"]:
            is_stated = any(reply in task["problem_description"] for reply in fact["replies"])
            assert fact["told"] == is_stated == fact["matters"], fact["topic"]


def test_same_seed_same_file(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        call(1, "--num-tasks", 20, "--seed", seed, "--out", tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() != (tmp_path / "c").read_bytes()
    assert "done already" in call(1, "--num-tasks", 20, "--seed", 1, "--out", tmp_path / "a")
