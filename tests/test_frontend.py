"""The frontend domain through the stages: a real browser, the shipped base model of pages, a simulating model on a
server that sees images."""
import json

import pytest

from colbench import backend, frontend
from colbench.similarity import PageScorer
from conftest import read, refused, succeed

BASE = "models/tiny_pages"
PLAY = ["--similarity", "pixels", "--max-rounds", 3, "--max-new-tokens", 220]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A folder with tasks.jsonl and offline.jsonl, three dialogues of the base model on each of eight tasks."""
    folder = tmp_path_factory.mktemp("pages")
    succeed("01_generate_tasks.py", "--domain", "frontend", "--split", "train", "--num-tasks", 8, "--out",
            folder / "tasks.jsonl")
    succeed("02_rollout.py", "--tasks", folder / "tasks.jsonl", "--agent", BASE, "--samples", 3, *PLAY, "--out",
            folder / "offline.jsonl")
    return folder


def test_page_of_and_shown():
    page = "<!DOCTYPE html><html><body>a > b</body></html>"
    assert frontend.page_of(f"Here:\n```html\n{page}\n```\nand ```html\n<p>last</p>\n```") == page
    assert frontend.page_of("```html\n<p>first</p>\n```\nand ```html\n<p>last</p>\n```") == "<p>last</p>"
    assert frontend.page_of(f"Look at {page} please") == page
    assert frontend.page_of("<!doctype html><body>cut off in the mid") == "<!doctype html><body>cut off in the mid"
    assert frontend.page_of("I made <style>a{}</style><p>x</p> for you") == "<style>a{}</style><p>x</p>"
    assert frontend.page_of("Is 3 < 4 and 5 > 2?") is None and frontend.page_of("") is None
    assert frontend.shown("I think.\nOUTPUT:\n<p>x</p>") == "<p>x</p>"
    assert backend.shown("OUTPUT: of a function") == "OUTPUT: of a function"
    history = [{"role": "user", "content": "<p>user</p>"}, {"role": "assistant", "content": "<p>1</p>"},
               {"role": "user", "content": "?"}, {"role": "assistant", "content": "What else?"}]
    assert frontend.last_page(history) == "<p>1</p>" and frontend.last_page(history[:1]) is None


@pytest.mark.parametrize("text", [
    "Here:\n~~~html\n{page}\n~~~\nI used a <nav>.",
    "```html title=\"index.html\"\n{page}\n```\n\nThe `<nav>` is on top.",
    "```html:index.html\n{page}\n```", "````HTML\n{page}\n````", "{page}\n\nI made it with a <nav> tag and it is > 3.",
    "```css\na{}\n```\n```html\n{page}\n```", "{page}\nTo change the colour:\n`<p class=\"red\">`"])
def test_a_page_is_found_without_what_models_write_around_it(text):
    page = "<!DOCTYPE html>\n<html>\n<body><p>x</p></body>\n</html>"
    assert frontend.page_of(text.replace("{page}", page)) == page


@pytest.mark.parametrize("text", [
    "Do you want a <b>bold</b> title?", "Should I use <header> or <nav> tags?",
    "In the page, is the <header>...</header> dark?", "<div><p>" * 100_000], ids=range(4))
def test_a_question_that_names_a_tag_is_no_page(text):                       # nor one that once took hours
    assert frontend.page_of(text) is None


def test_dialogues_end_after_the_last_round_with_the_last_page(pages):
    rows = read(pages / "offline.jsonl")
    scorer = PageScorer("pixels")
    assert len(rows) == 24 and any(0.1 < row["reward"] < 1 for row in rows)
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
    critic = succeed("03_train_critic.py", *flags, "--out", pages / "critic")
    rows = read(pages / "offline.jsonl")
    gaps = [a["reward"] - b["reward"] for a in rows for b in rows if a["task_id"] == b["task_id"]]
    trained, held_out = (int(critic.split(mark)[0].split()[-1]) for mark in (" trajectory pairs", " pairs of other"))
    assert trained + held_out == sum(gap >= 0.1 for gap in gaps)
    assert "The page that this person needs is the following.\n<style>" in critic
    sweet = ["--critic", pages / "critic", "--data-frac", 0.05, "--num-candidates", 4, "--max-new-tokens", 220]
    for method, more in (("sweet", sweet), ("mtdpo", []), ("rft", [])):
        printed = succeed("04_train_policy.py", "--method", method, *flags, *more, "--out", pages / method)
        assert "8 successful (or best) trajectories" in printed or method != "rft"
    assert all(row["task"]["ground_truth"] not in row["prompt"] or row["task"]["ground_truth"] in str(row["history"])
               for row in read(pages / "sweet" / "candidates.jsonl"))
    flags = ["--baseline", "base", "--similarity", "pixels", "--costs", "--out", pages / "report"]
    table = succeed("05_evaluate.py", *(f"{name}={pages / 'offline.jsonl'}" for name in ("base", "same")), *flags)
    metrics = json.loads((pages / "report" / "metrics.json").read_text())
    assert abs(metrics["base"]["pixel_similarity"] - sum(row["reward"] for row in rows) / 24) < 1e-9
    assert metrics["same"]["against_baseline"]["difference"] == 0 and metrics["base"]["win_rate"] == 0.5
    assert "pixel similarity" in table and "success" not in table


def test_a_simulator_on_a_server_sees_both_pages(pages, tmp_path, serve):
    simulator = serve()
    (tmp_path / "t.jsonl").write_text((pages / "tasks.jsonl").read_text().split("\n")[0] + "\n")
    succeed("02_rollout.py", "--tasks", tmp_path / "t.jsonl", "--agent", "script-informed", "--simulator",
            f"{simulator['url']}#viewer",
            "--similarity", "pixels", "--max-rounds", 4, "--out", tmp_path / "o.jsonl")
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
    task = json.loads((pages / "tasks.jsonl").read_text().split("\n")[0])
    function = {"problem_description": "?", "ground_truth": "def f(): return 1", "test_cases": {"a": "f()"}}
    (tmp_path / "mixed.jsonl").write_text(json.dumps(task) + "\n" + json.dumps(function) + "\n")
    (tmp_path / "plain.jsonl").write_text(json.dumps({**task, "slots": None}).replace('"slots": null', '"x": 1') + "\n")
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
