"""The frontend domain through the stages: a real browser, the shipped base model of pages, a simulating model on a
server that sees images."""
import json

import pytest

from colbench import backend, frontend
from colbench.similarity import PageScorer
from conftest import call, read, refused, succeed, write

BASE = "models/tiny_pages"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A folder with tasks.jsonl and offline.jsonl, three dialogues of the base model on each of five tasks."""
    folder = tmp_path_factory.mktemp("pages")
    call(1, "--domain", "frontend", "--split", "train", "--num-tasks", 5, "--out", folder / "tasks.jsonl")
    succeed("02_rollout.py", "--tasks", folder / "tasks.jsonl", "--agent", BASE, "--samples", 3, "--max-rounds", 3,
            "--similarity", "pixels", "--max-new-tokens", 220, "--out", folder / "offline.jsonl")
    return folder


PAGE = "<!DOCTYPE html>\n<html>\n<body><p>x > y</p></body>\n</html>"
CUT = "<!doctype html><body>cut off in the mid"


TEXTS = [
    *((text, PAGE) for text in (
        "Here:\n```html\n{page}\n```\nand ```html\n<p>last</p>\n```", "Look at {page} please",
        "Here:\n~~~html\n{page}\n~~~\nI used a <nav>.",
        "```html title=\"index.html\"\n{page}\n```\n\nThe `<nav>` is on top.", "```html:index.html\n{page}\n```",
        "````HTML\n{page}\n````", "{page}\n\nI made it with a <nav> tag and it is > 3.",
        "```css\na{}\n```\n```html\n{page}\n```", "{page}\nTo change the colour:\n`<p class=\"red\">`")),
    ("```html\n<p>first</p>\n```\nand ```html\n<p>last</p>\n```", "<p>last</p>"), (CUT, CUT),
    ("I made <style>a{}</style><p>x</p> for you", "<style>a{}</style><p>x</p>"),
    *((text, None) for text in (                                    # a question that names a tag is no page
        "", "Is 3 < 4 and 5 > 2?", "Do you want a <b>bold</b> title?", "Should I use <header> or <nav> tags?",
        "In the page, is the <header>...</header> dark?", "<div><p>" * 100_000))]          # the last once took hours


@pytest.mark.parametrize("text, page", TEXTS, ids=range(len(TEXTS)))
def test_the_page_in_what_models_write(text, page):
    assert frontend.page_of(text.replace("{page}", PAGE)) == page


def test_what_is_shown_and_the_last_page():
    assert frontend.shown("I think.\nOUTPUT:\n<p>x</p>") == "<p>x</p>"
    assert backend.shown("OUTPUT: of a function") == "OUTPUT: of a function"
    history = [{"role": "user", "content": "<p>user</p>"}, {"role": "assistant", "content": "<p>1</p>"},
               {"role": "user", "content": "?"}, {"role": "assistant", "content": "What else?"}]
    assert frontend.last_page(history) == "<p>1</p>" and frontend.last_page(history[:1]) is None


def test_dialogues_end_after_the_last_round_with_the_last_page(pages):
    rows = read(pages / "offline.jsonl")
    scorer = PageScorer("pixels")
    assert len(rows) == 15 and any(0.1 < row["reward"] < 1 for row in rows)
    for row in rows:
        history = row["dialogue_history"]
        assert [turn["role"] for turn in history] == ["user", "assistant"] * 3 and row["num_rounds"] == 3
        assert row["answer"] == (frontend.last_page(history) or "") and row["similarity"] == "pixels"
        reference, image = (row[key] and str(pages / row[key]) for key in ("reference_image", "image"))
        assert scorer.score([(reference, image)]) == [row["reward"]]
        for turn in history[1::2]:
            assert turn["content"] == frontend.shown(turn["output"].strip())
            said = [earlier["content"] for earlier in history if earlier["role"] == "assistant"]
            reference = row["task"]["ground_truth"]
            assert reference not in turn["input"] or reference in said                                  # c stays hidden
        assert all(0 < len(turn["content"]) <= frontend.REPLY_CHARS and "<" not in turn["content"]
                   for turn in history[2::2])


def test_critic_policies_and_report(pages):
    flags = ["--trajectories", pages / "offline.jsonl", "--model", BASE, "--max-steps", 1]
    critic = call(3, *flags, "--out", pages / "critic")
    rows = read(pages / "offline.jsonl")
    gaps = [a["reward"] - b["reward"] for a in rows for b in rows if a["task_id"] == b["task_id"]]
    trained, held_out = (int(critic.split(mark)[0].split()[-1]) for mark in (" trajectory pairs", " pairs of other"))
    assert trained + held_out == sum(gap >= 0.1 for gap in gaps)
    assert "The page that this person needs is the following.\n<style>" in critic
    call(4, "--method", "sweet", *flags, "--critic", pages / "critic", "--data-frac", 0.05, "--num-candidates", 2,
         "--max-new-tokens", 220, "--out", pages / "sweet")
    assert all(row["task"]["ground_truth"] not in row["prompt"] or row["task"]["ground_truth"] in str(row["history"])
               for row in read(pages / "sweet" / "candidates.jsonl"))
    printed = call(4, "--method", "rft", *flags, "--out", pages / "rft")
    assert "5 successful (or best) trajectories" in printed
    table = call(5, *(f"{name}={pages / 'offline.jsonl'}" for name in ("base", "same")), "--baseline", "base",
                 "--similarity", "pixels", "--costs", "--out", pages / "report")
    metrics = json.loads((pages / "report" / "metrics.json").read_text())
    assert abs(metrics["base"]["pixel_similarity"] - sum(row["reward"] for row in rows) / 15) < 1e-9
    assert metrics["same"]["against_baseline"]["difference"] == 0 and metrics["base"]["win_rate"] == 0.5
    assert "pixel similarity" in table and "success" not in table


def test_a_simulator_on_a_server_sees_both_pages(pages, tmp_path, serve):
    simulator = serve()
    tasks = write(tmp_path / "t.jsonl", read(pages / "tasks.jsonl")[:1])
    call(2, "--tasks", tasks, "--agent", "script-informed", "--simulator", f"{simulator['url']}#viewer", "--similarity",
         "pixels", "--max-rounds", 4, "--out", tmp_path / "o.jsonl")
    [row] = read(tmp_path / "o.jsonl")
    agent, replies = row["dialogue_history"][1::2], row["dialogue_history"][2::2]
    for number, turn in enumerate(replies):
        made = any(frontend.page_of(earlier["content"]) for earlier in agent[:number + 1])
        assert turn["content"] == f"I see {1 + made} pictures."
    request = read(simulator["log"])[0]
    assert row["task"]["problem_description"] in request["messages"][0]["content"][0]["text"]
    code = json.dumps(row["task"]["ground_truth"])[1:-1]            # as it would stand in the request
    assert "\\n" in code and code not in json.dumps(request)        # it sees the page, not its code


def test_bad_input(pages, tmp_path):
    task = read(pages / "tasks.jsonl")[0]
    function = {"problem_description": "?", "ground_truth": "def f(): return 1", "test_cases": {"a": "f()"}}
    write(tmp_path / "mixed.jsonl", [task, function])
    write(tmp_path / "plain.jsonl", [{key: value for key, value in task.items() if key != "slots"}])
    out = ["--out", tmp_path / "o.jsonl", "--similarity", "pixels"]
    line = refused(2, "--tasks", tmp_path / "mixed.jsonl", "--agent", "script", *out)
    assert "mixed.jsonl:2: a task of another domain (functions) than in the lines before" in line
    line = refused(2, "--tasks", tmp_path / "plain.jsonl", "--agent", "script", *out)
    assert 'plain.jsonl:1: missing "slots"' in line
    flags = ["--tasks", pages / "tasks.jsonl", "--agent", BASE, *out]
    line = refused(2, *flags, "--best-of", 2, "--critic", f"judge:{BASE}")
    assert "judge: cannot compare messages about pages" in line
    assert "choose --similarity pixels" in refused(2, *flags, "--similarity", "clip", "--clip-model", tmp_path)
    assert "--browser /none: no such program" in refused(2, *flags[:-1], "pixels", "--browser", "/none")
    assert not (tmp_path / "o.jsonl").exists()
    assert refused(1, "--check", pages / "tasks.jsonl") == (
        f"{pages / 'tasks.jsonl'}: --check knows nothing to check about pages, which have no tests")
