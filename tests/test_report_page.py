"""lib/report/page.html, page.css and page.js in headless Chromium, on made dialogues."""
import io
import json
import random
import re
import shutil

import pytest
from markupsafe import Markup

from colbench.browser import BROWSERS
from conftest import ROOT
from lib.report import page as report
from lib.report.plots import report_plots

FOLDER = ROOT / "lib" / "report"
KINDS = ["needed", "repeat", "idle", "vague"]
FORMS = {"advantages": ["out/critic: scores are p"], "candidates": ["out/critic: scores are q", "They do not compare."]}


def make_task(rng, number):
    family = rng.choice(["game", "shipping", "grades"])
    facts = [f"{name} = {rng.randint(2, 40)}" for name in ("base price", "life bonus", "pass mark")]
    return {"id": f"{number:06x}", "family": family, "request": f"A function for {family}, please.\ndef f(x):",
            "solution": f"def f(x):\n    return {number}", "facts": facts}


def make_dialogue(rng, m, t, task):
    """One dialogue: asks for the facts, with detours, then answers."""
    turns, num_known, right = [{"who": "user", "text": task["request"]}], 0, rng.random() < 0.5
    for _ in range(rng.randint(1, 7)):
        turn = {"who": "agent", "text": "Can you tell me more?", "kind": rng.choice([*KINDS, "needed"])}
        reply = {"who": "user", "text": "That does not matter.", "leak": "code" if rng.random() < 0.05 else None}
        if turn["kind"] == "needed" and num_known < 3:
            reply |= {"text": f"In our company {task['facts'][num_known]}.", "learned": [num_known]}
            num_known += 1
        turns += [turn, reply]
    answer, kind = (task["solution"], "right answer") if right else ("def f(x): return x", "wrong answer")
    turns.append({"who": "agent", "text": f"I WANT TO ANSWER:\n{answer}", "kind": kind})
    for turn in turns[1::2]:
        turn |= {"tokens": rng.randint(7, 90), "advantage": round(rng.gauss(0, 0.3), 4), "cut": rng.random() < 0.05}
    failed = [{"call": "f(0)", "expected": "1", "said": "time"}, {"call": "f(1)", "expected": "1", "got": "2"}]
    return {"m": m, "t": t, "run": 0, "sample": 0, "reward": 1.0 if right else round(rng.randint(0, 9) / 10, 1),
            "rounds": len(turns) // 2, "known": num_known == 3, "answer": answer, "turns": turns,
            "advantage": sum(turn["advantage"] for turn in turns[1::2]), "failed": [] if right else failed}


def make_state(rng, t, task):
    """A state of a training dialogue, with 8 candidates of which 2 are chosen and 2 rejected."""
    candidates = []
    for rank, kind in enumerate(rng.choices(KINDS, k=8)):
        candidates.append({"text": f"What about {rng.choice(task['facts'])}?", "kind": kind, "ended": True, "tokens": 9,
                           "chosen": int(rank < 2), "rejected": int(rank > 5), "advantage": round(0.4 - rank / 10, 4)})
    rng.shuffle(candidates)
    return {"t": t, "sample": t % 2, "history": [{"who": "user", "text": task["request"]}], "candidates": candidates}


def make_data(num_tasks, methods=("mtdpo", "sweet"), num_states=20):
    """The data of a page as page_data gives them: a dialogue of each method on each task."""
    rng = random.Random(0)
    tasks = [make_task(rng, number) for number in range(num_tasks)]
    dialogues = [make_dialogue(rng, m, t, task) for m in range(len(methods)) for t, task in enumerate(tasks)]
    states = [make_state(rng, t, tasks[t]) for t in range(min(num_states, num_tasks))]
    return {"graded": False, "meanings": {"colour": "of the answer"}, "methods": list(methods), "forms": FORMS,
            "tasks": tasks, "dialogues": dialogues, "states": states, "left_out": None}


def without(data, *keys):
    """Remove keys of tasks, of dialogues and of their turns."""
    for row in [*data["tasks"], *data["dialogues"], *(turn for d in data["dialogues"] for turn in d["turns"])]:
        for key in keys:
            row.pop(key, None)


NONE = {"by_kind": {}, "by_round": {}}
ADVANTAGES = {"by_kind": {"needed": dict(n=224, mean=0.303), "idle": dict(n=224, mean=-0.1)},
              "by_round": {"1": dict(n=1_460, mean=-0.0625), "9": dict(n=1, mean=2.0)}}
OF_METHODS = {"base": {"by_kind": {"needed": dict(n=112, mean=0.357)}, "by_round": {"1": dict(n=730, mean=0.125)}},
              "sweet": {"by_kind": {"needed": dict(n=112, mean=0.25)}, "by_round": {"1": dict(n=730, mean=-0.25)}}}


def write(path, data, **changes):
    """Write the page of these data, whose screenshots are beside it, and return its path."""
    metrics, rows = {}, []
    for m, name in enumerate(data["methods"]):
        wins = [d.get("reward") == 1 for d in data["dialogues"] if d["m"] == m]
        rate = sum(wins) / max(1, len(wins))
        metrics[name] = {"success_rate": rate, "ci95": [rate - 0.02, rate + 0.02],
                         "turn_advantages": OF_METHODS.get(name, NONE)}
        rows.append([name, f"{rate:.3f}", "224"])
    values = {"metrics": metrics, "metric": "success_rate", "metric_heading": "success", "rows": rows,
              "headings": ["success", "leaks"], "notes": ["one run"], "tables": {"Runs": "run  success"}, "plots": [],
              "forms": data["forms"], "advantages": ADVANTAGES if data["forms"] else None}
    report.write_report(path, data, path.parent, **values | changes)
    return path


DRAWN = """async () => {                                            // the policy forbids wait_for_function
  for (const end = Date.now() + 60_000; typeof drawn !== "undefined" && drawn !== location.hash;) {
    if (Date.now() > end) throw new Error("not drawn");
    await new Promise(done => setTimeout(done, 10));
  }
}"""


class Page:
    """A page of the browser that notes what must not happen: errors, dialogs, other requests than for the file."""
    def __init__(self, browser, path, **options):
        self.context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
        self.tab, self.faults, self.address = self.context.new_page(), [], path.as_uri()
        self.context.set_default_timeout(180_000)
        self.context.on("request", self.asked)
        self.context.on("page", lambda page: self.faults.append(f"opened {page.url}"))
        self.tab.on("console", lambda message: self.faults.append(f"{message.type}: {message.text}"))
        self.tab.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        self.tab.on("dialog", lambda dialog: (self.faults.append(f"dialog {dialog.message}"), dialog.dismiss()))

        # a link's view is drawn by an event that follows the click: what is read afterwards must not come before it
        for name in ("goto", "click", "go_back", "go_forward"):
            setattr(self.tab, name, self.drawn_after(getattr(self.tab, name)))
        self.tab.keyboard.press = self.drawn_after(self.tab.keyboard.press)
        self.tab.goto(self.address)

    def drawn_after(self, act):
        def act_and_wait(*args, **options):
            act(*args, **options)
            self.tab.evaluate(DRAWN)
        return act_and_wait

    def asked(self, request):
        if request.url.partition("#")[0] != self.address and not request.url.startswith("data:image/"):
            self.faults.append(f"asked for {request.url[:200]}")

    def open(self, fragment="#", anew=False):
        """At another address of the page, which is loaded only if `anew`."""
        if anew:
            self.tab.goto("about:blank")
        self.tab.goto(self.address + fragment)
        return self.tab

    def close(self):
        self.context.close()
        assert self.faults == []


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium; the system's where there is one."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install -r scripts/frontend.txt")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--proxy-server=http://nothing.invalid:9"])
        yield browser
        browser.close()


N = 18                                                              # 3 methods on 18 tasks, and a second sample
DATA = make_data(N, ("base", "mtdpo", "sweet"))
DIALOGUES = DATA["dialogues"]
DIALOGUES.append(make_dialogue(random.Random(7), 2, 0, DATA["tasks"][0]) | {"sample": 1})


@pytest.fixture(scope="module")
def at(browser, tmp_path_factory):
    """A function that opens the page of DATA at an address, its switch off, and gives the tab."""
    page = Page(browser, write(tmp_path_factory.mktemp("page") / "report.html", DATA))

    def at(fragment="#", anew=False):
        page.tab.set_checked("#secrets", False)
        return page.open(fragment, anew)
    yield at
    page.close()


@pytest.fixture
def page_of(browser, tmp_path):
    """page_of(data, screen, **changes): the Page of other data, on a screen with these options."""
    pages = []

    def page_of(data, screen=None, **changes):
        pages.append(Page(browser, write(tmp_path / "report.html", data, **changes), **screen or {}))
        return pages[-1]
    yield page_of
    for page in pages:
        page.close()


def shown(tab, selector):
    return tab.locator(selector).locator("visible=true").all_inner_texts()


def numbers(tab):
    """The numbers of the dialogues in the list, in its order."""
    return [int(cell) for cell in shown(tab, "#list tbody td:first-child")]


def signed(value):
    return f"{value:+.3f}".replace("-", "\u2212")


def table(tab, selector):
    """The cells of each row."""
    return [[" ".join(cell.split()) for cell in row.split("\t")] for row in shown(tab, f"{selector} tbody tr")]


def has(d, **keys):
    return any(turn.get(key) == value for turn in d["turns"] for key, value in keys.items())


def test_first_screen_is_the_table_with_bars_and_another_has_the_advantages(at):
    tab = at()
    assert shown(tab, ".results tbody th") == DATA["methods"]
    for m, bar in enumerate(tab.locator(".interval").all()):
        wins = [d["reward"] == 1 for d in DIALOGUES if d["m"] == m]
        rate = sum(wins) / len(wins)
        box, fill = bar.bounding_box(), bar.locator(".fill").bounding_box()
        assert fill["width"] / box["width"] == pytest.approx(rate, abs=0.005)
        assert bar.get_attribute("aria-label") == f"{rate:.3f}, 95 % interval {rate - 0.02:.3f} to {rate + 0.02:.3f}"
    assert m == 2 and shown(tab, "section h2") == []                # neither plots nor hints, and no other view
    assert tab.locator(".results th[scope=col]").count() == 4
    assert "show the solution" in tab.get_attribute(".results th:has-text('leaks')", "title")
    assert shown(tab, ".legend") == []                              # where a pointer shows titles
    tab = at("#view=advantages")
    assert table(tab, "#advantages") == [
        ["needed", "224", "+0.303", "+0.357 (112)", "–", "+0.250 (112)"],
        ["idle", "224", "\u22120.100", "–", "–", "–"],
        ["1", "1,460", "\u22120.062", "+0.125 (730)", "–", "\u22120.250 (730)"],
        ["9", "1", "+2.000 beyond the bar", "–", "–", "–"]]
    [round_bar] = tab.locator("#advantages tr:has-text('1,460') .fill").all()
    track = round_bar.locator("..").bounding_box()                  # not flattened by the mean of a single turn
    assert round_bar.bounding_box()["width"] / track["width"] == pytest.approx(0.5, abs=0.01)
    assert FORMS["advantages"][0] in shown(tab, "#advantages .note")


@pytest.mark.parametrize("fragment, keeps", [
    ("reward=success", lambda d: d["reward"] == 1),
    ("family=game", lambda d: DATA["tasks"][d["t"]]["family"] == "game"),
    ("rounds=6", lambda d: d["rounds"] == 6),
    ("kind=right+answer", lambda d: has(d, kind="right answer")),
    ("kind=%7Ecut", lambda d: has(d, cut=True)),
    ("kind=%7Eleak", lambda d: has(d, leak="code")),
    ("q=no+such+words", lambda d: False),
    ("m=mtdpo&reward=failed&kind=needed&q=COMPANY", lambda d: d["m"] == 1 and d["reward"] < 1 and has(d, kind="needed")
     and any("company" in turn["text"] for turn in d["turns"]))])
def test_filters_in_the_address(at, fragment, keeps):
    tab = at(f"#view=dialogues&{fragment}")
    kept = [i for i, d in enumerate(DIALOGUES) if keeps(d)]
    assert shown(tab, "#counter") == [f"{len(kept)} of {3 * N + 1} dialogues"]
    assert numbers(tab) == kept
    assert shown(tab, "#list tbody td:nth-child(3)") == [DATA["tasks"][DIALOGUES[i]["t"]]["id"] for i in kept]


def test_filters_by_hand_back_and_a_download(at):
    tab, everything = at(anew=True), f"{3 * N + 1} of {3 * N + 1} dialogues"
    tab.click("nav >> text=Dialogues")
    tab.select_option("#f-m", "base")
    tab.locator("#f-q").press_sequentially("bonus")
    found = [i for i in range(N) if any("bonus" in turn["text"] for turn in DIALOGUES[i]["turns"])]
    assert numbers(tab) == found and 0 < len(found) < N
    assert tab.evaluate("document.activeElement.id") == "f-q" and tab.url.endswith("m=base&q=bonus")
    with tab.expect_download() as download:
        tab.locator("#f-download").click()
    assert download.value.suggested_filename == "dialogues.jsonl"
    rows = [json.loads(line) for line in download.value.path().read_text().splitlines()]
    assert [(row["method"], row["task"], row["turns"]) for row in rows] == [
        ("base", DATA["tasks"][i], DIALOGUES[i]["turns"]) for i in found]
    tab.go_back()                                                   # typing is one step with what was there before
    assert shown(tab, "#counter") == [everything]
    assert tab.input_value("#f-q") == tab.input_value("#f-m") == ""
    tab.go_forward()
    assert numbers(tab) == found and tab.input_value("#f-m") == "base"
    tab.click("#f-reset")
    assert shown(tab, "#counter") == [everything]


def test_sorting(at):
    tab = at("#view=dialogues&m=sweet")
    own = [i for i, d in enumerate(DIALOGUES) if d["m"] == 2]
    for key in ("advantage", "rounds", "reward"):
        for sign, order in ((1, "ascending"), (-1, "descending")):
            tab.click(f"#sort-{key}")
            assert numbers(tab) == sorted(own, key=lambda i: sign * DIALOGUES[i][key])
            assert tab.locator("th[aria-sort]").get_attribute("aria-sort") == order
    for key, name in (("request", "request"), ("task", "id")):
        tab.click(f"#sort-{key}")
        assert numbers(tab) == sorted(own, key=lambda i: DATA["tasks"][DIALOGUES[i]["t"]][name])


def test_a_dialogue_shows_every_turn_with_its_advantage(at):
    d = next(i for i, one in enumerate(DIALOGUES) if one["rounds"] == 6 and one["reward"] < 1)
    tab, one = at(f"#d={d}&turn=3"), DIALOGUES[d]
    said = [text.split() for text in shown(tab, "#dialogue .said")]
    assert said == [turn["text"].split() for turn in one["turns"]]
    agent = [turn for turn in one["turns"] if turn["who"] == "agent"]
    assert shown(tab, "#dialogue .turn .number") == [signed(turn["advantage"]) for turn in agent]
    assert shown(tab, "#dialogue .badge.kind") == [turn["kind"] for turn in agent]
    assert tab.locator("#dialogue .turn.named").get_attribute("id") == f"turn-{d}-3"
    tracks, fills = (tab.locator(f"#dialogue .turn {bar}").all() for bar in (".track", ".fill"))
    for turn, track, fill in zip(agent, tracks, fills, strict=True):
        box, bar = track.bounding_box(), fill.bounding_box()
        edge = bar["x"] + (0 if turn["advantage"] > 0 else bar["width"])
        assert edge == pytest.approx(box["x"] + box["width"] / 2, abs=1)
    assert tab.locator("#dialogue .sum .number").inner_text() == signed(one["advantage"])
    assert tab.locator("#dialogue .bars a").count() == 6 and FORMS["advantages"][0] in tab.inner_text("#dialogue .sum")
    assert tab.locator(f"#turn-{d}-3").bounding_box()["y"] < 900
    tab.click("summary:has-text('failed tests')")
    assert table(tab, ".tests") == [
        [test["call"], test["expected"], test.get("got", "nothing"), test.get("said", "")] for test in one["failed"]]
    tab.click("#dialogue .bars a >> nth=1")
    assert tab.url.endswith(f"#d={d}&turn=3")
    tab.click(f"#turn-{d}-4 .anchor")
    assert tab.url.endswith(f"#d={d}&turn=4") and "named" in tab.get_attribute(f"#turn-{d}-4", "class")
    tab.go_back()
    assert "named" in tab.get_attribute(f"#turn-{d}-3", "class")


def test_solution_and_facts_are_behind_the_switch(at):
    d = next(i for i, one in enumerate(DIALOGUES) if one["known"] and one["reward"] < 1)
    one, task, tab = DIALOGUES[d], DATA["tasks"][DIALOGUES[d]["t"]], at(f"#d={d}")
    assert shown(tab, ".secret") == [] and "learned" not in tab.inner_text("body")
    assert task["solution"] not in tab.inner_text("body")
    tab.check("#secrets")
    assert tab.inner_text("#dialogue div.secret pre") == task["solution"]
    rounds = [place // 2 for place, turn in enumerate(one["turns"]) if "learned" in turn]            # of fact 0, 1, …
    facts = list(zip(task["facts"], rounds, strict=True))
    assert shown(tab, "#dialogue p.secret") == [
        f"\u2713 learned: {fact} ({number} of {len(facts)} known)" for number, (fact, _) in enumerate(facts, 1)]
    assert shown(tab, "#dialogue .facts li") == [f"\u2713 {fact} learned in round {number}" for fact, number in facts]
    tab.keyboard.press("Escape")                                    # the switch has the focus; the dialogue closes
    assert numbers(tab) != [] and not tab.locator("#dialogue").is_visible()
    tab.keyboard.press("r")
    assert not tab.is_checked("#secrets")


def test_keyboard(at):
    tab = at("#view=dialogues&m=sweet&sort=-advantage", anew=True)
    order = numbers(tab)

    def press(*keys):
        for key in keys:
            tab.keyboard.press(key)
        return tab.evaluate("document.activeElement.id")
    assert press("j", "j", "ArrowDown", "k", "ArrowUp", "j") == f"open-{order[1]}"
    assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    press("Enter")
    assert f"d={order[1]}" in tab.url and tab.locator("#dialogue").is_visible()
    press("j", "ArrowRight")
    assert f"d={order[3]}&" in tab.url and shown(tab, ".moves .muted") == [f"4 of {len(order)}"]
    press("k")
    assert f"d={order[2]}&" in tab.url
    assert press("Escape") == f"open-{order[2]}"
    assert not re.search("[#&]d=", tab.url) and not tab.locator("#dialogue").is_visible()
    press("?")
    assert tab.locator("#help").is_visible()
    assert press("j", "Escape") == f"open-{order[2]}"               # nothing moves behind the help
    assert not tab.locator("#help").is_visible()
    press("/")
    tab.keyboard.type("jk?r")                                       # in a field they are letters
    assert tab.input_value("#f-q") == "jk?r"
    assert not tab.locator("#help").is_visible() and not tab.is_checked("#secrets")


def test_methods_side_by_side(at):
    tab, picks = at("#d=0", anew=True), [0, N, 2 * N]
    tab.click("text=compare the methods on this task")
    assert shown(tab, ".columns .head a") == DATA["methods"]
    assert tab.locator(".columns .cell").count() == 3 * (max(len(DIALOGUES[d]["turns"]) for d in picks) - 1)
    boxes = [tab.locator(f"#turn-{d}-1").bounding_box() for d in picks]
    assert len({round(box["y"]) for box in boxes}) == 1 and len({box["x"] for box in boxes}) == 3
    tab.uncheck("#c-0")
    assert tab.url.endswith(f"t=0&pick={N}%2C{2 * N}") and tab.locator(".columns .head").count() == 2
    tab.select_option("#c-which-2", str(3 * N))
    assert shown(tab, ".columns .head a") == ["mtdpo", "sweet, sample 2"] and f"pick={N}%2C{3 * N}" in tab.url
    tab.select_option("#c-what", "differ")
    by_task = [[d["reward"] == 1 for d in DIALOGUES if d["t"] == t] for t in range(N)]
    differ = [t for t, wins in enumerate(by_task) if any(wins) and not all(wins)]
    assert f"1 of {len(differ)} tasks" in tab.inner_text("#compare .filters") and 0 < len(differ) < N
    tab.keyboard.press("Tab")
    tab.click("#task-on")
    assert f"t={differ[1]}&" in tab.url and tab.evaluate("document.activeElement.id") == "task-on"
    tab.keyboard.press("k")
    assert f"t={differ[0]}&" in tab.url


def test_candidates_are_ranked_marked_and_filtered_and_lead_to_their_dialogue(at):
    tab, one = at("#view=candidates&s=3"), DATA["states"][3]
    ranked = sorted(one["candidates"], key=lambda candidate: -candidate["advantage"])
    marks = 2 * ["\u25B2 chosen"] + 4 * [""] + 2 * ["\u25BC rejected"]
    assert table(tab, ".candidates") == [
        [str(rank), signed(candidate["advantage"]), mark, candidate["kind"], "9", candidate["text"]]
        for rank, (mark, candidate) in enumerate(zip(marks, ranked), 1)]
    classes = tab.locator(".candidates tbody tr").evaluate_all("all => all.map(row => row.className)")
    assert classes == 4 * [""] + ["half"] + 3 * [""]
    assert one["history"][0]["text"].split("\n")[0] in tab.inner_text("#candidates .turn")
    assert shown(tab, "#candidates .note") == FORMS["candidates"]
    tab.keyboard.press("k")
    assert "s=2" in tab.url
    at("#view=candidates")
    assert "task 000000" in shown(tab, "#candidates .badge") and f"1 of {N} states" in tab.inner_text("#candidates")
    tab.select_option("#k-side", "chosen")
    tab.select_option("#k-kind", "needed")
    asked = [number for number, state in enumerate(DATA["states"]) if any(
        candidate["chosen"] and candidate["kind"] == "needed" for candidate in state["candidates"])]
    assert 1 < len(asked) < N and f"1 of {len(asked)} states" in tab.inner_text("#candidates")
    tab.click("#state-on")
    assert f"s={asked[1]}&kind=needed&side=chosen" in tab.url
    assert set(shown(tab, ".candidates td:nth-child(4)")) == {"needed"}
    assert set(shown(tab, ".candidates .badge")) == {"\u25B2 chosen"}
    at("#view=candidates&s=1")
    assert "of sample 2, not in this page" in tab.inner_text("#candidates")
    tab.click("#state-back")
    tab.click("text=open its dialogue")
    assert tab.url.endswith("#d=0&turn=1") and tab.locator("#dialogue").is_visible()


def test_screenshots_of_graded_pages_side_by_side_with_a_slider_and_a_list_of_two_pages(page_of, tmp_path):
    """The first method has no screenshots; there are neither families nor kinds."""
    from PIL import Image
    data = make_data(51, num_states=0) | {"graded": True, "forms": {}}
    without(data, "family", "kind", "cut", "leak")
    Image.new("RGB", (320, 400)).save(tmp_path / "a.png")
    for item in data["tasks"] + data["dialogues"][51:]:
        item["image"] = "../images/a.png"
    for number, d in enumerate(data["dialogues"]):
        d["reward"] = number / 100
    data["dialogues"][0]["fault"], data["dialogues"][60]["turns"][1]["fault"] = "no page", "slow"
    page = page_of(data)
    tab = page.open("#d=0")
    tab.check("#secrets")
    assert tab.locator("#dialogue .none").inner_text() == "no screenshot in this page"
    assert "the answer cannot be rendered: no page" in tab.inner_text("#dialogue")
    page.open("#d=60")
    assert "reward 0.600" in tab.inner_text("#dialogue .about")
    assert "this page cannot be rendered: slow" in tab.inner_text("#dialogue .turn.agent >> nth=0")
    assert tab.locator("#dialogue img").evaluate_all("all => all.map(image => image.naturalWidth)") == [320] * 4
    clip = "image => getComputedStyle(image).clipPath"
    assert tab.locator(".stack img").last.evaluate(clip) == "inset(0px 0px 0px 50%)"
    tab.locator("#dialogue input[type=range]").fill("80")
    assert tab.locator(".stack img").last.evaluate(clip) == "inset(0px 0px 0px 80%)"
    page.open("#view=dialogues&reward=0")
    assert numbers(tab) == list(range(25))
    assert not tab.locator("#f-family").count() and not tab.locator("#f-kind").count()
    page.open("#view=dialogues")
    assert numbers(tab) == list(range(100))
    tab.click("#page-on")
    assert numbers(tab) == [100, 101] and "page=1" in tab.url


ATTACKS = json.loads((ROOT / "tests" / "page_attacks.json").read_text())


def test_hostile_texts_stay_texts(page_of):
    """Attacks in every field, and a turn of a megabyte: nothing runs, and every address shows something."""
    data = make_data(len(ATTACKS), (ATTACKS[0], "<b>sweet</b>"), num_states=3)
    data |= {"left_out": ATTACKS[0], "forms": dict.fromkeys(FORMS, [ATTACKS[0]])}
    for attack, task, d in zip(ATTACKS, data["tasks"], data["dialogues"]):
        task |= dict.fromkeys(("id", "family", "request", "solution"), attack) | {"facts": [attack] * 4}
        d |= {"answer": attack, "reward": 0.5, "fault": attack,
              "failed": [dict.fromkeys(("call", "expected", "got", "said"), attack)]}
        for turn in d["turns"]:
            turn |= {"text": attack} | ({"kind": attack, "fault": attack} if "kind" in turn else {"leak": attack})
    data["states"][0]["candidates"][0] |= {"text": ATTACKS[0], "kind": ATTACKS[1]}
    script, image, *_ = ATTACKS
    data["dialogues"][0]["turns"][1]["text"] = "\U0001F600" * 3000 + image.rjust(2 ** 20 - 3000, "a")
    page = page_of(data, notes=[script], tables={image: script}, metric_heading=image,
                   plots=report_plots("success_rate", {script: {1: {"success_rate": 0.5}}}, {}, {}),
                   advantages=NONE | {"by_kind": {script: dict(n=1, mean=0.5)}})
    tab = page.tab
    assert shown(tab, ".results tbody th") == data["methods"]
    tab.check("#secrets")
    for number, attack in enumerate(ATTACKS):
        page.open(f"#d={number}")
        said, *texts = tab.evaluate("""[".turn:last-child .said", ".tests td", ".secret pre"].map(
            selector => document.querySelector("#dialogue " + selector).textContent)""")
        assert said.startswith(attack) and texts == [attack, attack]
        if "\u0645" in attack:                                      # Arabic: a text has its own direction
            assert tab.locator(".turn .text").first.evaluate("node => getComputedStyle(node).direction") == "rtl"

    views = ("compare", "advantages", "failures", "dialogues&q=%3Cscript", "__proto__",
             "dialogues&sort=constructor", "candidates&kind=__proto__&side=constructor",
             "dialogues&m=constructor&kind=__proto__&page=-7", "compare&t=__proto__&pick=a,99999", "<script>")
    for fragment in (*(f"view={view}" for view in views), "d=__proto__", "d=-1&turn=x", "d=99999999", "s=1e9",
                     "d=1&turn=%3Cscript%3E", "%E0%A4%A"):
        assert page.open(f"#{fragment}").inner_text("main") != ""

    page.open("#d=0")                                               # a long text is cut until it is asked for
    block = tab.locator("#turn-0-1 .text")
    assert len(block.inner_text()) <= 5001
    tab.click("text=show all 1,048,576 characters")
    assert block.evaluate("node => [...node.textContent].length") == 2 ** 20
    # a hostile dialogue adds no script, no handler and no foreign link
    assert tab.locator("script").count() == 2 and tab.title() == "Evaluation"
    assert tab.locator("main img, main iframe, main form:not(.filters)").count() == 0
    names = tab.evaluate("[...document.querySelectorAll('*')].flatMap(node => node.getAttributeNames())")
    assert len(names) > 100 and [name for name in names if name.startswith("on")] == []
    links = tab.evaluate("[...document.querySelectorAll('a')].map(a => a.getAttribute('href'))")
    assert len(links) > 10 and [link for link in links if not link.startswith("#")] == []


def test_the_policy_of_the_page_stops_what_is_not_its_script(page_of):
    """So that the silence of the test above means something: markup that gets in is refused, and this is seen."""
    page = page_of(make_data(2), notes=[Markup("""<img src=http://nothing.invalid/a.png>
        <script>document.title = 'ran'</script><p onclick="document.title = 'ran'">x</p>""")])
    page.tab.click("[onclick]")
    assert page.tab.title() == "Evaluation"
    blocked = sorted(re.findall("(image|script|handler).* violates the following Content", "\n".join(page.faults)))
    assert blocked == ["handler", "image", "script"]
    page.faults.clear()


def test_missing_pieces_leave_their_section_out(page_of):
    """page_data leaves the advantage out where a critic gives no finite number."""
    bare = make_data(4, num_states=2) | {"left_out": "4 of 10 dialogues are left out"}
    without(bare, "facts", "family", "reward", "advantage", "sample", "known", "failed", "kind", "learned", "tokens",
            "cut", "leak")
    page = page_of(bare, advantages=NONE)
    views = "#view=results", "#view=compare", "#view=advantages", "#view=candidates", "#view=dialogues"
    for fragment in (*views, "#view=dialogues&sort=-advantage", "#view=dialogues&reward=failed"):
        text = page.open(fragment).inner_text("main")
        assert (bare["left_out"] in text) == ("advantages" not in fragment and "candidates" not in fragment)
        assert len(shown(page.tab, "#nav a[aria-current]")) == 1
    tab = page.open("#view=dialogues&sort=reward&d=5")
    assert tab.locator("#list tbody tr").count() == 8 and "no number" in tab.inner_text("#dialogue .about")
    assert tab.locator("#dialogue .turn").count() == len(bare["dialogues"][5]["turns"])
    assert not {"advantage", "no."} & set(shown(tab, "#list th"))
    assert tab.locator(".advantage, .strip, .bars, .facts").count() == 0

    page = page_of(make_data(0) | {"forms": {}})
    assert shown(page.tab, "#nav a") == ["Results", "Dialogues", "Compare"]
    for fragment in views:
        assert page.open(fragment).inner_text("main") != ""
        is_there = "advantages" not in fragment and "candidates" not in fragment
        assert shown(page.tab, "#nav a[aria-current]") == [fragment[6:].title() if is_there else "Results"]
    assert page.tab.locator("#list tbody tr").count() == 0


VIEWS = {                                                           # and what a finger reads of their columns
    "#view=results": {"leaks: share of the simulator's replies that show the solution"},
    "#view=dialogues": {"reward: share of the tests that the answer passes", "advantage: sum of the turn advantages"},
    "#d=0&turn=1": set(),
    "#view=compare&t=1": set(),
    "#view=advantages": {"turns: number of turns, of all methods"},
    "#view=candidates&s=1": {"rank: by the critic's score, 1 the best"}}


@pytest.mark.parametrize("scheme, width", [("light", 1280), ("light", 700), ("light", 375), ("dark", 375)])
def test_contrast_width_numbers_and_headings_where_fingers_cannot_hover(page_of, scheme, width):
    """Texts are seen, nothing is wider than the screen, and no number breaks over lines."""
    from PIL import Image
    screen = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme, "has_touch": True, "is_mobile": True}
    plots = report_plots("success_rate", {"a": {1: {"success_rate": 0.5}, 8: {"success_rate": 0.6}}}, {}, {"a": [0.5]})
    page = page_of(make_data(2), screen, plots=plots)
    tab = page.tab
    shot = Image.open(io.BytesIO(tab.locator("figure svg").first.screenshot())).convert("L")
    darkest, lightest = shot.getextrema()
    assert lightest - darkest > 150                                 # the plot is seen
    tab.check("#secrets")
    for fragment, lines in VIEWS.items():
        page.open(fragment)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, fragment
        right_edges = tab.evaluate("""[...document.querySelectorAll(".results td, .candidates td")].map(
            node => node.getBoundingClientRect().right)""")
        assert max(right_edges, default=0) <= width, fragment
        texts = "p, a, button:not(:disabled), th, td, span:not([aria-hidden]), label, li, pre, h1, h2, h3, b"
        assert tab.evaluate((ROOT / "tests" / "contrast.js").read_text(), texts) >= 4.5, fragment
        heights = tab.evaluate("""[...document.querySelectorAll(".num, .number, .badge, .candidates th")].filter(
            node => node.offsetParent && /^[-+.,0-9\u2212]+$/.test(node.textContent)).map(node => {
              const range = document.createRange();
              range.selectNodeContents(node);
              return range.getClientRects().length;
            })""")
        assert set(heights) <= {1}, fragment
        if lines:
            tab.locator(".legend summary").locator("visible=true").tap()
            assert lines <= set(shown(tab, ".legend .note"))
    if width < 600:                                                 # each number has its heading; of no pair: none
        contents = tab.evaluate("""[...document.querySelectorAll(".candidates tr:nth-child(3) > *")].map(
            cell => getComputedStyle(cell, "::before").content)""")
        assert ["".join(re.findall('"(.*?)"', text)) for text in contents] == ["rank ", "score ", "", "kind ",
                                                                               "tokens ", ""]


def test_the_page_is_one_file_without_addresses(tmp_path):
    page = write(tmp_path / "report.html", make_data(2)).read_text()
    assert page.count("<script") == 2 and not re.search(r"""(src|href)=["']?(?!#)\w|url\(|@import""", page)
    for name in ("page.js", "page.html"):
        assert not re.search(r"innerHTML|insertAdjacentHTML|outerHTML|document\.write|eval\(|Function\(|https?://",
                             (FOLDER / name).read_text(encoding="utf-8"))
    # no spread of all dialogues or turns into arguments, which end with an error at about 120,000
    spreads = re.findall(r"(?:Math\.\w+|push)\([^)]*\.\.\.(\w+)", (FOLDER / "page.js").read_text(encoding="utf-8"))
    assert set(spreads) <= {"picks", "ranked"}
