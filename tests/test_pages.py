"""Pages through the stages: tasks (01), what models write, the rule-based user simulator, the scripted designer and the
shipped base model (02), critic and policies; and a browser that says whether what they take for granted is so:
every slot of a template page shows, and the simulator sees and names it."""
import asyncio
import json
import random
import re
from unittest import mock

import pytest

from colbench import frontend, make_tasks
from colbench.browser import Browser, Render
from colbench.frontend import asked_values, last_page, LOOK, OUTPUT, page_of, page_reply, page_values, scripted_turn
from colbench.frontend import PAGES as TEMPLATES
from colbench.similarity import PageScorer
from conftest import call, read, refused, ROOT, trajectory, turns, write
from examples import gain

BASE = "models/tiny_pages"
PAGES = ROOT / "tests" / "pages"
BLUE, GOLD, RED = [0, 0, 255], [255, 215, 0], [255, 0, 0]


@pytest.fixture(scope="module")
def tasks():
    return {split: make_tasks(frontend, 60, 3, split, "some") for split in ("train", "test")}


def codes_of(task):
    return {slot["slot"]: slot["code"] for slot in task["slots"]}


def test_a_task_is_its_template_with_its_codes_and_the_idea_leaves_out_what_is_not_told(tasks):
    for task in tasks["train"]:
        page, idea, codes = task["ground_truth"], task["problem_description"], codes_of(task)
        assert task["template"].format(**codes) == page == page_of(page) and frontend.owns(task)
        assert task.keys() == {"task_id", "problem_description", "ground_truth", "family", "template", "slots"}
        for slot in task["slots"]:
            assert slot["guesses"][0] == slot["code"]
            assert len({*slot["guesses"]}) == len(slot["guesses"]) == len(slot["names"]) >= 3
        assert page_values(task, f"Look:\n{page}\nDo you like it?") == codes
        assert len(re.findall(r"\w+|(?:(?!(?<=\w) (?=\w))\W)+", page)) <= 160        # the tokens of 04's tiny model
        told = asked_values(task, idea)
        assert told == {slot["slot"]: slot["code"] for slot in task["slots"] if slot["told"]}
        assert len(told) <= 2 and "\n" not in idea
        assert [known for _, known in frontend.facts(task, turns(idea))] == [slot["told"] for slot in task["slots"]]
    assert page_values(task, "Could you tell me more?") is None
    assert 0.15 < sum(any(s["told"] for s in task["slots"]) for task in tasks["train"]) / 60 < 0.45
    [none], [task] = (make_tasks(frontend, 1, 0, "all", told) for told in ("none", "all"))
    assert asked_values(none, none["problem_description"]) == {}
    asked = [turns("?", "", f"The {none['slots'][0]['topic']} should be {name}.") for name in none["slots"][0]["names"]]
    known = [[is_known for _, is_known in frontend.facts(none, history)] for history in asked]
    assert known[0] == [True] + [False] * 9 and not any(known[1])    # what is asked wrongly is not known
    assert len(asked_values(task, task["problem_description"])) == 10
    assert task["problem_description"].startswith(
        "A website for an old bakery in our town. The background should be pink. The font should be sans-serif. The ")
    assert task["slots"][4] == {
        "slot": "side", "topic": "sidebar", "code": "display:none",
        "guesses": ["display:none", "float:left", "float:right"],
        "names": ["no sidebar", "on the left", "on the right"], "told": True}


GIVEN = json.loads((PAGES / "pages.json").read_text())


def test_the_page_in_what_models_write():
    """None: a question that names a tag, or compares, is no page."""
    for text, page in [*GIVEN["turns"], ["<div><p>" * 100_000, None], ["`" * 20_000, None]]:    # these once took hours
        expected = page and page.replace("{page}", GIVEN["page"])
        assert page_of(text.replace("{page}", GIVEN["page"])) == expected, text[:200]
    assert frontend.shown("I think.\nOUTPUT:\n<p>x</p>") == "<p>x</p>"
    history = turns("<p>user</p>", "<p>1</p>", "?", "What else?")
    assert last_page(history) == "<p>1</p>" and last_page(history[:1]) is None


def spec(**changes):
    """What look.js gives for a small page."""
    return GIVEN["spec"] | changes


NO_SIDEBAR = {"sidebar": [None, 0], "sidebar colour": [None, 0]}


def replies(wanted, shown):
    """What the user may say of a page; shown None: none was sent."""
    return {page_reply(wanted, shown, random.Random(i)) for i in range(60)}


@pytest.mark.parametrize("wanted, shown, sentence", [
    (dict(header=[BLUE, 0.2]), {}, "Please make the header blue."),
    ({"card columns": [1, 0.3]}, {}, "I want the cards in one column."),
    ({}, NO_SIDEBAR, "I miss the sidebar: it should be on the left."),
    (NO_SIDEBAR, {}, "It should have no sidebar."), (dict(pictures=[1, 0.1]), {}, "Please show one picture."),
    (dict(navigation=[True, 0.1]), {}, "There should be a navigation."),
    (dict(button=["Buy", 0.01]), {}, 'Please let the button say "Buy".'),
    ({"card colour": [[30, 58, 138], 0.3]}, {}, "The cards should be a dark blue."),
    (dict(header=[[30, 58, 138], 0.2]), dict(header=[[30, 30, 100], 0.2]), "I want the header to be #1e3a8a.")])
def test_one_difference_in_words(wanted, shown, sentence):
    sentences = {reply.removeprefix("Almost. ") for reply in replies(spec(**wanted), spec(**shown))}
    assert sentence in sentences and len(sentences) in (2, 3)


def test_the_two_largest_differences_are_named_or_none():
    from colbench.frontend import SAYINGS
    wanted = spec(title=["Loaf", 0.02], header=[BLUE, 0.2], background=[GOLD, 0.5])
    for reply in replies(wanted, spec()):
        first, second = re.findall(r"[^.]+\.", reply.removeprefix("Thanks. "))
        assert "background" in first and "gold" in first and "header" in second and "blue" in second
    grown = spec(**{"card colour": [RED, 0.9]})                            # it covers most of what the agent made
    assert all("cards" in reply.removeprefix("Thanks. ").split(".")[0] for reply in replies(wanted, grown))
    same = spec(header=[[0, 0, 139], 0.3], title=["OVEN", 0.02])           # no eye sees these
    assert replies(spec(), same) == set(SAYINGS["content"])
    assert replies(spec(), None) == set(SAYINGS["no page"])
    both = [Render(None, one, None) for one in (wanted, spec())]
    world = mock.Mock(rendered=mock.AsyncMock(return_value=both))
    for said in ("<p>2</p>", "Do you like it?"):                     # after words it is not of the page before
        reply = frontend.Environment.rule_reply(world, None, turns("?", "<p>1</p>", "!", said), random.Random(0))
        assert (asyncio.run(reply) in SAYINGS["no page"]) == ("<p>" not in said)


@pytest.mark.parametrize("colour, words", [
    ([0, 0, 128], "navy"), ([128, 128, 128], "gray"), ([0, 255, 255], "cyan"), ([255, 0, 255], "magenta"),
    ([17, 24, 39], "a dark blue"), ([31, 32, 33], "a dark gray"), ([254, 250, 250], "almost white"),
    ([3, 3, 4], "almost black"), ([16, 185, 129], "a green"), ([253, 186, 116], "a light orange"),
    ([249, 115, 22], "an orange"), ([250, 10, 40], "a red")])
def test_colours_in_words(colour, words):
    from colbench.frontend import colour_words
    assert colour_words(colour) == words


def roll_out(task, seed, informed):
    """The share of slots that are right after each of four rounds, with a user who names the first two that are not."""
    said, page, shares = [task["problem_description"]], {}, []
    for number in range(4):
        text = scripted_turn(task, turns(*said), 4, random.Random(f"{seed} {number}"), informed)
        values = page_values(task, text)
        page = values or page
        wrong = [slot for slot in task["slots"] if page.get(slot["slot"]) != slot["code"]]
        shares.append(1 - len(wrong) / len(task["slots"]))
        wishes = [f"The {slot['topic']}: {slot['names'][0]}." for slot in wrong[:2] if values]
        said += [frontend.shown(text), " ".join(wishes)]
    return shares


@pytest.mark.parametrize("informed, first, last", [(False, 0.25, 0.65), (True, 0.8, 0.99)])
def test_pages_get_better_and_dialogues_differ(tasks, informed, first, last):
    shares = [[roll_out(task, f"{task['task_id']} {i}", informed) for i in range(4)] for task in tasks["train"]]
    means = [sum(s[n] for own in shares for s in own) / (4 * len(shares)) for n in range(4)]
    assert means == sorted(means) and abs(means[0] - first) < 0.05 and abs(means[3] - last) < 0.05
    spread = sum(max(s[3] for s in own) - min(s[3] for s in own) for own in shares) / len(shares)
    assert informed or spread > 0.25


def test_turns_of_the_designer(tasks):
    task = tasks["train"][0]
    request = task["problem_description"]
    texts = [scripted_turn(task, turns(request), 4, random.Random(i)) for i in range(300)]
    pages = [page_values(task, text) for text in texts]
    assert {text for text, page in zip(texts, pages) if not page} == set(TEMPLATES["talk"])
    assert all(page[s["slot"]] == s["code"] for page in pages if page for s in task["slots"] if s["told"])
    assert any(text.startswith(f"I begin with a simple page.\n{OUTPUT}\n<style>") for text in texts)
    history = turns(request, task["ground_truth"], "The cards should be in one column.", "Could you tell me more?",
                    "Please show me a page.")
    later = [page_values(task, scripted_turn(task, history, 4, random.Random(i), True))
             for i in range(60)]
    assert sum(page is not None and page["columns"] == "1" for page in later) > 45        # what was said since its page


def test_every_slot_shows_and_is_named_and_a_page_in_another_style_is_read(tasks, tmp_path):
    """Each slot alone, with another value: another picture, and the simulator names the slot and its right value, and
    the designer understands it. One family with two values of all slots; of the others, which differ from it in texts
    and a navigation, one value of two slots."""
    wanted, cases = {}, []
    for name in frontend.FAMILIES:
        task = next(task for task in tasks["test"] if task["family"] == name)
        for slot in task["slots"] if name == "bakery" else task["slots"][::9]:
            for code in (slot["guesses"][1], slot["guesses"][-1])[:2 if name == "bakery" else 1]:
                cases.append((task, slot, code, task["template"].format(**{**codes_of(task), slot["slot"]: code})))
        wanted[task["task_id"]] = task["ground_truth"]
    pages = ["<p></p>", (PAGES / "other.html").read_text(), *wanted.values(), *(page for *_, page in cases)]
    browser = Browser(tmp_path)

    async def render_all():
        return await asyncio.gather(*(browser.render(page, read=LOOK) for page in pages))
    empty, other, *renders = asyncio.run(render_all())
    browser.close()
    references = dict(zip(wanted, renders))
    picture = pytest.importorskip("PIL.Image").open
    for (task, slot, code, _), render in zip(cases, renders[len(wanted):]):
        reference = references[task["task_id"]]
        assert picture(reference.image).tobytes() != picture(render.image).tobytes(), (slot["slot"], code)
        for reply in replies(reference.spec, render.spec):
            assert asked_values(task, reply) == {slot["slot"]: slot["code"]}, reply
        for reply in replies(render.spec, reference.spec):
            assert asked_values(task, reply) == {slot["slot"]: code}, reply

    assert {aspect: value for aspect, (value, _) in other.spec.items()} == GIVEN["other.html"]
    assert empty.spec.keys() == other.spec.keys() and empty.spec["background"] == [[255, 255, 255], 1]
    assert all(0 <= area <= 1 for _, area in other.spec.values()) and 0.05 < other.spec["header"][1] < 0.2
    assert all(value is None for aspect, (value, _) in empty.spec.items() if aspect != "background")
    rng = random.Random
    assert page_reply(other.spec, empty.spec, rng(3)) != page_reply(other.spec, None, rng(3))


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A folder with tasks.jsonl and offline.jsonl, two dialogues of the base model on each of three tasks."""
    folder = tmp_path_factory.mktemp("pages")
    call(1, "--domain", "frontend", "--split", "train", "--num-tasks", 3, "--out", folder / "tasks.jsonl")
    call(2, "--tasks", folder / "tasks.jsonl", "--agent", BASE, "--samples", 2, "--max-rounds", 2, "--similarity",
         "pixels", "--max-new-tokens", 220, "--out", folder / "offline.jsonl")
    return folder


def test_dialogues_end_after_the_last_round_with_the_last_page(pages):
    rows = read(pages / "offline.jsonl")
    scorer = PageScorer("pixels")
    assert len(rows) == 6 and any(0.1 < row["reward"] < 1 for row in rows)
    for row in rows:
        history = row["dialogue_history"]
        assert [turn["role"] for turn in history] == ["user", "assistant"] * 2 and row["num_rounds"] == 2
        assert row["answer"] == (last_page(history) or "") and row["similarity"] == "pixels"
        reference, image = (row[key] and str(pages / row[key]) for key in ("reference_image", "image"))
        assert scorer.score([(reference, image)]) == [row["reward"]]
        for turn in history[1::2]:
            assert turn["content"] == frontend.shown(turn["output"].strip())
            said = [earlier["content"] for earlier in history if earlier["role"] == "assistant"]
            reference = row["task"]["ground_truth"]
            assert reference not in turn["input"] or reference in said                                  # c stays hidden
        assert all(0 < len(turn["content"]) <= frontend.REPLY_CHARS and "<" not in turn["content"]
                   for turn in history[2::2])


def test_critic_and_policies(pages):
    flags = ["--trajectories", pages / "offline.jsonl", "--model", BASE, "--max-steps", 1]
    critic = call(3, *flags, "--out", pages / "critic")
    assert "The page that this person needs is the following.\n<style>" in critic
    call(4, "--method", "sweet", *flags, "--critic", pages / "critic", "--data-frac", 0.05, "--num-candidates", 2,
         "--max-new-tokens", 220, "--out", pages / "sweet")
    assert all(row["task"]["ground_truth"] not in row["prompt"] or row["task"]["ground_truth"] in str(row["history"])
               for row in read(pages / "sweet" / "candidates.jsonl"))
    printed = call(4, "--method", "rft", *flags, "--out", pages / "rft")
    assert "3 successful (or best) trajectories" in printed
    call(gain, *flags, "--candidates", pages / "sweet" / "candidates.jsonl", "--data-frac", 0.05,
         "--num-candidates", 2, "--max-new-tokens", 220, "--out", pages / "gain")          # without weights of CLIP


def test_a_simulator_on_a_server_sees_both_pages(pages, tmp_path, serve):
    simulator = serve()
    tasks = write(tmp_path / "t.jsonl", read(pages / "tasks.jsonl")[:1])
    call(2, "--tasks", tasks, "--agent", "script-informed", "--simulator", f"{simulator['url']}#viewer", "--similarity",
         "pixels", "--max-rounds", 3, "--out", tmp_path / "o.jsonl")
    [row] = read(tmp_path / "o.jsonl")
    agent, replies = row["dialogue_history"][1::2], row["dialogue_history"][2::2]
    for number, turn in enumerate(replies):
        made = any(page_of(earlier["content"]) for earlier in agent[:number + 1])
        assert turn["content"] == f"I see {1 + made} pictures."
    request = read(simulator["log"])[0]
    assert row["task"]["problem_description"] in request["messages"][0]["content"][0]["text"]
    code = json.dumps(row["task"]["ground_truth"])[1:-1]            # as it would stand in the request
    assert "\\n" in code and code not in json.dumps(request)        # it sees the page, not its code


def test_bad_input(pages, tmp_path):
    task, out = read(pages / "tasks.jsonl")[0], ["--similarity", "pixels", "--out", tmp_path / "out"]
    del task["slots"]
    plain, code = write(tmp_path / "plain.jsonl", [task]), write(tmp_path / "c.jsonl", [trajectory("t", "", reward=0)])
    assert 'plain.jsonl:1: missing "slots"' in refused(2, "--tasks", plain, "--agent", "script", *out)
    assert "judge: cannot compare messages about a page" in refused(
        2, "--tasks", pages / "tasks.jsonl", "--agent", BASE, "--best-of", 2, "--critic", f"judge:{BASE}", *out)
    assert refused(1, "--check", pages / "tasks.jsonl") == (
        f"{pages / 'tasks.jsonl'}: --check has nothing to check: a page has no tests")
    own = f"a={pages / 'offline.jsonl'}"
    assert refused(5, own, f"b={code}", *out).startswith(
        "b: a task of another domain (function) than in the lines before; keep each domain in separate files")
    assert refused(5, own, "--compat", *out) == "--compat has no effect for a page; leave it out"
    assert not (tmp_path / "out").exists()
