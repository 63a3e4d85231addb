"""Tasks of pages (01), the rule-based user simulator and the scripted designer (02), and a browser that says whether
what they take for granted is so: every slot of a template page shows, and the simulator sees and names it."""
import asyncio
import random
import re

import pytest

from colbench import frontend, published
from colbench.browser import Browser
from conftest import call, read, refused, ROOT, stage
from lib.runtime import write_jsonl

generate_tasks, rollout = stage(1), stage(2)
BLUE, NAVY, GOLD, RED = [0, 0, 255], [0, 0, 128], [255, 215, 0], [255, 0, 0]


@pytest.fixture(scope="module")
def tasks():
    return {split: generate_tasks.make_tasks(frontend, 60, 3, split, "some") for split in ("train", "test")}


def codes_of(task):
    return {slot["slot"]: slot["code"] for slot in task["slots"]}


# --- template tasks

def test_a_task_is_its_template_with_its_codes(tasks):
    for task in tasks["train"]:
        page = task["ground_truth"]
        assert task["template"].format(**codes_of(task)) == page == frontend.page_of(page) and frontend.owns(task)
        assert task.keys() == {"task_id", "problem_description", "ground_truth", "family", "template", "slots"}
        for slot in task["slots"]:
            assert slot["guesses"][0] == slot["code"]
            assert len({*slot["guesses"]}) == len(slot["guesses"]) == len(slot["names"]) >= 3
        assert frontend.page_values(task, f"Look:\n{page}\nDo you like it?") == codes_of(task)
    assert frontend.page_values(task, "Could you tell me more?") is None


def test_one_task_literally():
    [task] = generate_tasks.make_tasks(frontend, 1, 0, "all", "all")
    assert task["problem_description"].startswith(
        "A website for an old bakery in our town. The background should be pink. The font should be sans-serif. The ")
    assert task["slots"][4] == {
        "slot": "side", "topic": "sidebar", "code": "display:none",
        "guesses": ["display:none", "float:left", "float:right"],
        "names": ["no sidebar", "on the left", "on the right"], "told": True}


def test_the_idea_leaves_out_what_is_not_told(tasks):
    for task in tasks["train"]:
        told = frontend.asked_values(task, task["problem_description"])
        assert told == {slot["slot"]: slot["code"] for slot in task["slots"] if slot["told"]}
        assert len(told) <= 2 and "\n" not in task["problem_description"]
    assert 0.15 < sum(any(s["told"] for s in task["slots"]) for task in tasks["train"]) / 60 < 0.45
    for told, number in (("none", 0), ("all", 10)):
        [task] = generate_tasks.make_tasks(frontend, 1, 0, "all", told)
        assert len(frontend.asked_values(task, task["problem_description"])) == number


def test_splits_share_no_page_and_pages_are_short(tasks):
    pages = {split: {task["ground_truth"] for task in own} for split, own in tasks.items()}
    assert len(pages["train"]) == len(pages["test"]) == 60 and not pages["train"] & pages["test"]
    for page in pages["train"]:                                            # the tokens of 04's tiny model
        assert len(re.findall(r"\w+|(?:(?!(?<=\w) (?=\w))\W)+", page)) <= 160


# --- WebSight and the published tasks

SITE = [("<html><img src='https://source.unsplash.com/random/300x200/?tea'></html>", "Tea: a shop."),
        ("<html><p>Two</p></html>", " Two. "), ("", "Nothing."), ("<html><p>Two</p></html>", "Two again."),
        ("<html>No idea</html>", None), ("Sorry, I cannot.", "A page."), ("<html><p>Four</p></html>", "Four.")]
KEPT = [{"task_id": "933782ab14981e1a", "problem_description": "Tea: a shop.",
         "ground_truth": "<html><img src='https://picsum.photos/id/48/300/200'></html>"},
        {"task_id": "a7341a2621e47e0a", "problem_description": "Two.", "ground_truth": "<html><p>Two</p></html>"},
        {"task_id": "288167236c210403", "problem_description": "Four.", "ground_truth": "<html><p>Four</p></html>"}]


def site_rows(rows=SITE):
    return [{"text": text, "llm_generated_idea": idea} for text, idea in rows]


def take(*arguments, out):
    stage(1).main([str(argument) for argument in ("--source", "websight", *arguments, "--out", out)])
    return read(out)


def test_websight_from_jsonl_and_parquet(tmp_path, capsys):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    write_jsonl(tmp_path / "site.jsonl", site_rows())
    assert take("--path", tmp_path / "site.jsonl", "--num-tasks", 3, out=tmp_path / "a.jsonl") == KEPT
    assert "7 rows in the order of the data set: 3 kept, 2 empty, 1 repeated, 1 no page\n" in capsys.readouterr().out
    (tmp_path / "v0.2").mkdir()
    for name, rows in (("b", SITE[4:]), ("a", SITE[:4])):                  # read in the order of the names
        table = pyarrow.Table.from_pylist([{**row, "image": {"bytes": b"png"}} for row in site_rows(rows)])
        parquet.write_table(table, tmp_path / "v0.2" / f"{name}.parquet")
    assert take("--path", tmp_path / "v0.2", "--num-tasks", 3, out=tmp_path / "b.jsonl") == KEPT
    assert take("--path", tmp_path / "v0.2" / "a.parquet", "--num-tasks", 2, out=tmp_path / "c.jsonl") == KEPT[:2]
    test = take("--path", tmp_path / "site.jsonl", "--num-tasks", 1, "--split", "test", out=tmp_path / "d.jsonl")
    assert [int(task["task_id"], 16) % 100 for task in KEPT] == [66, 50, 95] and test == KEPT[2:]


def test_websight_is_refused_in_one_line(tmp_path):
    (bad := tmp_path / "x.parquet").write_text("no parquet")
    (empty := tmp_path / "empty").mkdir()
    site = tmp_path / "site.jsonl"
    write_jsonl(site, site_rows())
    for flags, line in (([], r"HuggingFaceM4/WebSight: cannot be read \(.*--path FOLDER/v0.2"),
                        (["--path", empty], f"{empty}: no .parquet files in it"),
                        (["--path", "no/such"], "no/such: no such file or folder"),
                        (["--path", bad], rf"{bad}: cannot be read \(.*"),
                        (["--path", site, "--num-tasks", 4], f"--num-tasks 4: there are only 3 tasks in {site} "
                         r"\(rows: 3 kept, 2 empty, 1 repeated, 1 no page\)")):
        assert re.fullmatch(line, refused(1, "--source", "websight", "--out", tmp_path / "t.jsonl", *flags))
    assert not (tmp_path / "t.jsonl").exists() and not (tmp_path / "t.jsonl.args.json").exists()


def test_other_addresses_stay_and_a_tag_can_name_the_size():
    for page in ('<img src="logo.png">', '<script src="https://cdn.com/10x10.js"></script>',
                 '<style>@import url("https://fonts.googleapis.com/css2"); a {src: url(https://a.com/b.woff)}</style>'):
        assert published.one_photo(page) == page
    assert published.one_photo('<img width="30" height=20 src="https://a.com/x">') == (
        '<img width="30" height=20 src="https://picsum.photos/id/48/30/20">')


def test_published_pages_are_taken_as_they_are(tmp_path):
    rows = [{"problem_description": "A page.", "ground_truth": f"<p>{i}</p><img src='https://a.com/9x9'>"}
            for i in range(3)]
    write_jsonl(tmp_path / "test.jsonl", rows)
    flags = ["--source", "colbench", "--path", tmp_path / "test.jsonl", "--out", tmp_path / "t.jsonl"]
    assert refused(1, *flags).endswith("test.jsonl: no tasks of --domain backend; pass --path FILE with such tasks")
    call(1, *flags, "--domain", "frontend")
    assert [{key: row[key] for key in rows[0]} for row in read(tmp_path / "t.jsonl")] == rows


# --- the rule-based user simulator

def spec(**changes):
    """What look.js gives for a small page, all literal."""
    return {"background": [[255, 255, 255], 0.5], "header": [NAVY, 0.2], "sidebar": ["on the left", 0.1],
            "sidebar colour": [[192, 192, 192], 0.1], "cards": [4, 0.3], "card columns": [2, 0.3],
            "card colour": [GOLD, 0.3], "footer": [None, 0], "pictures": [None, 0], "navigation": [None, 0],
            "button": ["Order", 0.01], "button colour": [RED, 0.01], "title": ["Oven", 0.02],
            "title place": ["on the left", 0.02], "font": ["serif", 0.03]} | changes


NO_SIDEBAR = {"sidebar": [None, 0], "sidebar colour": [None, 0]}


@pytest.mark.parametrize("wanted, shown, sentence", [
    (dict(header=[BLUE, 0.2]), {}, "Please make the header blue."),
    ({"card columns": [3, 0.3]}, {}, "Please put the cards in three columns."),
    ({"card columns": [1, 0.3]}, {}, "I want the cards in one column."),
    ({}, NO_SIDEBAR, "I miss the sidebar: it should be on the left."),
    (NO_SIDEBAR, {}, "It should have no sidebar."), (dict(pictures=[1, 0.1]), {}, "Please show one picture."),
    (dict(navigation=[True, 0.1]), {}, "There should be a navigation."),
    (dict(button=["Buy", 0.01]), {}, 'Please let the button say "Buy".'),
    ({"card colour": [[30, 58, 138], 0.3]}, {}, "The cards should be a dark blue."),
    (dict(header=[[30, 58, 138], 0.2]), dict(header=[[30, 30, 100], 0.2]), "I want the header to be #1e3a8a.")])
def test_one_difference_in_words(wanted, shown, sentence):
    replies = {frontend.page_reply(spec(**wanted), spec(**shown), random.Random(i)) for i in range(60)}
    replies = {reply.removeprefix("Almost. ") for reply in replies}
    assert sentence in replies and len(replies) in (2, 3)


def test_the_two_largest_differences_are_named():
    wanted = spec(title=["Loaf", 0.02], header=[BLUE, 0.2], background=[GOLD, 0.5])
    for i in range(20):
        reply = frontend.page_reply(wanted, spec(), random.Random(i)).removeprefix("Thanks. ")
        first, second = re.findall(r"[^.]+\.", reply)
        assert "background" in first and "gold" in first and "header" in second and "blue" in second
    grown = spec(**{"card colour": [RED, 0.9]})                            # it covers most of what the agent made
    assert "cards" in frontend.page_reply(wanted, grown, random.Random(0)).split(".")[0]


def test_a_page_as_wanted_and_no_page():
    same = spec(header=[[0, 0, 139], 0.3], title=["OVEN", 0.02])           # no eye sees these
    assert {frontend.page_reply(spec(), same, random.Random(i)) for i in range(60)} == set(frontend.SAYINGS["content"])
    assert {frontend.page_reply(spec(), None, random.Random(i)) for i in range(60)} == set(frontend.SAYINGS["no page"])


@pytest.mark.parametrize("colour, words", [
    ([0, 0, 128], "navy"), ([128, 128, 128], "gray"), ([0, 255, 255], "cyan"), ([255, 0, 255], "magenta"),
    ([17, 24, 39], "a dark blue"), ([31, 32, 33], "a dark gray"), ([254, 250, 250], "almost white"),
    ([3, 3, 4], "almost black"), ([16, 185, 129], "a green"), ([253, 186, 116], "a light orange"),
    ([249, 115, 22], "an orange"), ([250, 10, 40], "a red")])
def test_colours_in_words(colour, words):
    assert frontend.colour_words(colour) == words


# --- the scripted designer

def hand_spec(values):
    """The spec of a template page without a browser."""
    from PIL import ImageColor
    side = {"float:left": "on the left", "float:right": "on the right"}.get(values["side"])
    place = {"left": "on the left", "center": "in the center", "right": "on the right"}[values["align"]]
    footer = None if values["footer"] == "display:none" else values["footer"].split(":")[1]

    def colour(name):
        return name and list(ImageColor.getrgb(name))
    return spec(**{
        "background": [colour(values["page"]), 0.5], "header": [colour(values["head"]), 0.2],
        "footer": [colour(footer), 0.08], "sidebar": [side, 0.05], "sidebar colour": [colour(side and "silver"), 0.05],
        "card columns": [int(values["columns"]), 0.25], "card colour": [colour(values["card"]), 0.25],
        "button colour": [colour(values["button"]), 0.006], "font": [values["font"], 0.006],
        "title": [values["title"], 0.002], "title place": [place, 0.002]})


def roll_out(task, seed, informed):
    """The share of slots that are right after each of four rounds."""
    history, right, page, shares = [{"role": "user", "content": task["problem_description"]}], codes_of(task), {}, []
    for number in range(4):
        rng = random.Random(f"{seed} {number}")
        text = frontend.scripted_turn(task, history, 4, rng, informed)
        values = frontend.page_values(task, text)
        page = values or page
        shares.append(sum(page.get(slot) == code for slot, code in right.items()) / len(right))
        reply = frontend.page_reply(hand_spec(right), values and hand_spec(values), rng)
        history += [{"role": "assistant", "content": frontend.shown(text)}, {"role": "user", "content": reply}]
    return shares


def test_the_designer_understands_whatever_the_simulator_says(tasks):
    for task in tasks["train"][:8]:
        right = codes_of(task)
        for slot in task["slots"]:
            for code in slot["guesses"][1:]:
                other = hand_spec({**right, slot["slot"]: code})
                for i in range(6):
                    reply = frontend.page_reply(hand_spec(right), other, random.Random(i))
                    assert frontend.asked_values(task, reply) == {slot["slot"]: slot["code"]}, reply


@pytest.mark.parametrize("informed, first, last", [(False, 0.25, 0.65), (True, 0.8, 0.99)])
def test_pages_get_better_and_dialogues_differ(tasks, informed, first, last):
    shares = [[roll_out(task, f"{task['task_id']} {i}", informed) for i in range(4)] for task in tasks["train"]]
    means = [sum(s[n] for own in shares for s in own) / (4 * len(shares)) for n in range(4)]
    assert means == sorted(means) and abs(means[0] - first) < 0.05 and abs(means[3] - last) < 0.05
    spread = sum(max(s[3] for s in own) - min(s[3] for s in own) for own in shares) / len(shares)
    assert informed or spread > 0.25


def test_turns_of_the_designer(tasks):
    task = tasks["train"][0]
    opening = [{"role": "user", "content": task["problem_description"]}]
    texts = [frontend.scripted_turn(task, opening, 4, random.Random(i)) for i in range(300)]
    pages = [frontend.page_values(task, text) for text in texts]
    assert {text for text, page in zip(texts, pages) if not page} == set(frontend.PAGES["talk"])
    assert all(page[s["slot"]] == s["code"] for page in pages if page for s in task["slots"] if s["told"])
    assert any(text.startswith(f"I begin with a simple page.\n{frontend.OUTPUT}\n<style>") for text in texts)
    history = opening + [{"role": role, "content": content} for role, content in (
        ("assistant", task["ground_truth"]), ("user", "The cards should be in one column."),
        ("assistant", "Could you tell me more?"), ("user", "Please show me a page."))]
    later = [frontend.page_values(task, frontend.scripted_turn(task, history, 4, random.Random(i), True))
             for i in range(60)]
    assert sum(page is not None and page["columns"] == "1" for page in later) > 45        # what was said since its page


# --- a real browser

@pytest.fixture(scope="module")
def browse(tmp_path_factory):
    """renders([HTML, …]) with pictures and specs."""
    pytest.importorskip("playwright")
    browser = Browser(tmp_path_factory.mktemp("images"))

    async def all_of(pages):
        return await asyncio.gather(*(browser.render(page, read=frontend.LOOK) for page in pages))
    yield lambda pages: asyncio.run(all_of(pages))
    browser.close()


def picture(render):
    from PIL import Image
    return Image.open(render.image).convert("RGB")


def test_every_slot_shows_and_is_named(tasks, browse):
    """Each slot alone, with any other value: another picture, and the simulator names the slot and its right value. One
    family with all values; of the others, which differ from it in texts and a navigation, one value of two slots."""
    wanted, cases = {}, []
    for name in frontend.FAMILIES:
        task = next(task for task in tasks["test"] if task["family"] == name)
        for slot in task["slots"] if name == "bakery" else task["slots"][::9]:
            for code in slot["guesses"][1:None if name == "bakery" else 2]:
                cases.append((task, slot, code, task["template"].format(**{**codes_of(task), slot["slot"]: code})))
        wanted[task["task_id"]] = task["ground_truth"]
    renders = browse([*wanted.values(), *(page for *_, page in cases)])
    references = dict(zip(wanted, renders))
    for (task, slot, code, _), render in zip(cases, renders[len(wanted):]):
        reference = references[task["task_id"]]
        assert picture(reference).tobytes() != picture(render).tobytes(), (slot["slot"], code)
        reply = frontend.page_reply(reference.spec, render.spec, random.Random(0))
        assert frontend.asked_values(task, reply) == {slot["slot"]: slot["code"]}, reply
        back = frontend.page_reply(render.spec, reference.spec, random.Random(0))
        assert frontend.asked_values(task, back) == {slot["slot"]: code}, back


def test_a_page_in_another_style_is_read(browse):
    page = (ROOT / "tests" / "pages" / "other.html").read_text()
    empty, other = (render.spec for render in browse(["<p></p>", page]))
    assert {aspect: value for aspect, (value, _) in other.items()} == {
        "background": [243, 244, 246], "header": [30, 58, 138], "sidebar": "on the right",
        "sidebar colour": [0, 128, 0], "cards": 3, "card columns": 3, "card colour": GOLD, "footer": None,
        "pictures": 1, "navigation": None, "button": "Buy now", "button colour": RED, "title": "Rock Fest",
        "title place": "in the center", "font": "serif"}
    assert empty.keys() == other.keys() and empty["background"] == [[255, 255, 255], 1]
    assert all(0 <= area <= 1 for _, area in other.values()) and 0.05 < other["header"][1] < 0.2
    assert all(value is None for aspect, (value, _) in empty.items() if aspect != "background")
    assert frontend.page_reply(other, empty, random.Random(3)) != frontend.page_reply(other, None, random.Random(3))
