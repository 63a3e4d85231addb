"""lib/report/page.html, page.css and page.js in headless Chromium, on made dialogues."""
import io
import json
import random
import re
import shutil

import pytest

from colbench.browser import BROWSERS
from conftest import ROOT
from lib.report import page as report
from lib.report.plots import report_plots

FOLDER = ROOT / "lib" / "report"
FACTS = {"game": ("point factor", "life bonus", "loss penalty"), "shipping": ("base price", "price per kilogram"),
         "grades": ("pass mark", "bonus limit", "rounding", "top grade")}
KINDS = ["needed", "repeat", "idle", "vague", "right answer", "wrong answer"]
FORMS = {"advantages": ["out/critic: scores are p"], "candidates": ["out/critic: scores are q", "They do not compare."]}


def make_task(rng, number):
    family = rng.choice(list(FACTS))
    facts = [f"{name} = {rng.randint(2, 40)}" for name in FACTS[family]]
    return {"id": f"{number:06x}", "family": family, "request": f"A function for {family}, please.\ndef f(x):",
            "reference": "def f(x):\n    return " + " + ".join(fact.split()[-1] for fact in facts), "facts": facts}


def make_dialogue(rng, m, t, task):
    """One dialogue: asks for the facts, with detours, then answers."""
    turns, num_known, right = [{"who": "user", "text": task["request"]}], 0, rng.random() < 0.5
    for _ in range(rng.randint(1, 7)):
        turn = {"who": "agent", "text": "Can you tell me more?", "kind": rng.choice([*KINDS[:4], "needed"])}
        reply = {"who": "user", "text": "That does not matter.", "leak": "code" if rng.random() < 0.05 else None}
        if turn["kind"] == "needed" and num_known < len(task["facts"]):
            reply |= {"text": f"In our company {task['facts'][num_known]}.", "learned": [num_known]}
            num_known += 1
        turns += [turn, reply]
    answer = task["reference"] if right else "def f(x):\n    return x"
    turns.append({"who": "agent", "text": f"I WANT TO ANSWER:\n{answer}", "kind": KINDS[4 if right else 5]})
    for turn in turns[1::2]:
        turn |= {"tokens": rng.randint(7, 90), "advantage": round(rng.gauss(0, 0.3), 4), "cut": rng.random() < 0.05}
    failed = [{"call": "f(0)", "expected": "1", "said": "time"}, {"call": "f(1)", "expected": "1", "got": "2"}]
    return {"m": m, "t": t, "run": 0, "sample": 0, "reward": 1.0 if right else round(rng.randint(0, 9) / 10, 1),
            "rounds": len(turns) // 2, "known": num_known == len(task["facts"]), "answer": answer, "turns": turns,
            "advantage": round(sum(turn["advantage"] for turn in turns[1::2]), 4), "failed": [] if right else failed}


def make_state(rng, t, task):
    """A state of a training dialogue, with 8 candidates of which 2 are chosen and 2 rejected."""
    candidates = []
    for rank, kind in enumerate(rng.choices(KINDS[:4], k=8)):
        candidates.append({"text": f"What about {rng.choice(task['facts'])}?", "kind": kind, "ended": True, "tokens": 9,
                           "chosen": int(rank < 2), "rejected": int(rank > 5), "advantage": round(0.4 - rank / 10, 4)})
    rng.shuffle(candidates)
    history = [{"who": "user", "text": task["request"]}]
    return {"t": t, "sample": t % 2, "history": history, "candidates": candidates}


def make_data(num_tasks, methods=("mtdpo", "sweet"), num_states=20):
    """The data of a page as page_data gives them: a dialogue of each method on each task."""
    rng = random.Random(0)
    tasks = [make_task(rng, number) for number in range(num_tasks)]
    dialogues = [make_dialogue(rng, m, t, task) for m in range(len(methods)) for t, task in enumerate(tasks)]
    states = [make_state(rng, t, tasks[t]) for t in range(min(num_states, num_tasks))]
    return {"graded": False, "methods": list(methods), "forms": FORMS, "tasks": tasks, "dialogues": dialogues,
            "states": states, "left_out": None}


def make_pages(folder):
    """Graded dialogues about three pages; screenshots of references and of the second method's answers in `folder`."""
    from PIL import Image
    data = make_data(0) | {"graded": True, "forms": {}}
    html = "<!doctype html><h1>Shop</h1><script>document.title = 'ran'</script>"
    for t in range(3):
        for name in (f"r{t}.png", f"a{t}.png"):
            Image.new("RGB", (320, 400), (90 * t, 60, 120)).save(folder / name)
        data["tasks"].append({"id": f"p{t}", "request": f"A page for shop {t}", "reference": html,
                              "image": f"../images/r{t}.png"})
        for m, more in enumerate(({"fault": "no page"}, {"image": f"../images/a{t}.png"})):
            data["dialogues"].append({
                "m": m, "t": t, "run": 0, "sample": 0, "reward": 0.2 * t + 0.1 * m, "answer": html, **more,
                "turns": [{"who": "user", "text": "?"}, {"who": "agent", "text": html, "fault": "slow"}]})
    return data


def summary(n, **means):
    """{kind or round: {"n", "mean"}}."""
    return {label.strip("_"): {"n": n, "mean": mean} for label, mean in means.items()}


ADVANTAGES = {"by_kind": summary(224, needed=0.303, idle=-0.1), "by_round": summary(1_460, _1=-0.0625)}
OF_METHODS = {"base": {"by_kind": summary(112, needed=0.357, idle=-0.1), "by_round": summary(730, _1=0.125)},
              "sweet": {"by_kind": summary(112, needed=0.25), "by_round": summary(730, _1=-0.25)}}


def write(path, data, **changes):
    """Write the page of these data and return its path."""
    metrics = {}
    for m, name in enumerate(data["methods"]):
        wins = [d.get("reward") == 1 for d in data["dialogues"] if d["m"] == m]
        rate = sum(wins) / max(1, len(wins))
        metrics[name] = {"success_rate": rate, "ci95": [rate - 0.02, rate + 0.02],
                         "turn_advantages": OF_METHODS.get(name, {"by_kind": {}, "by_round": {}})}
    values = {"metrics": metrics, "metric": "success_rate", "metric_heading": "success",
              "headings": ["success", "leaks"],
              "rows": [[name, f"{method['success_rate']:.3f}", "224"] for name, method in metrics.items()],
              "notes": ["one run"], "tables": {"Runs": "run  success"}, "plots": [], "forms": data["forms"],
              "advantages": ADVANTAGES if data["forms"] else None}
    report.write_report(path, data, path.parent, **values | changes)
    return path


def launch(driver):
    """Headless Chromium; the system's where there is one."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    return driver.chromium.launch(executable_path=path, args=["--proxy-server=http://nothing.invalid:9"])


DRAWN = """async () => {
  const deadline = Date.now() + 60_000;
  while (typeof drawn !== "undefined" && drawn !== location.hash) {
    if (Date.now() > deadline) throw new Error("not drawn");
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
        for owner, names in ((self.tab, ("goto", "click", "go_back", "go_forward")), (self.tab.keyboard, ("press",))):
            for name in names:
                setattr(owner, name, self.drawn_after(getattr(owner, name)))
        self.tab.goto(self.address)

    def drawn_after(self, act):
        def act_and_wait(*args, **options):
            act(*args, **options)
            self.tab.evaluate(DRAWN)                                # the policy forbids wait_for_function
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
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install -r scripts/frontend.txt")
    with sync_api.sync_playwright() as driver:
        browser = launch(driver)
        yield browser
        browser.close()


N = 18                                                              # 3 methods on 18 tasks, and a second sample
DATA = make_data(N, ("base", "mtdpo", "sweet"))
DIALOGUES = DATA["dialogues"]
DIALOGUES.append(make_dialogue(random.Random(7), 2, 0, DATA["tasks"][0]) | {"sample": 1})


def first(is_asked):
    """The number of the first dialogue that is so."""
    return next(number for number, d in enumerate(DIALOGUES) if is_asked(d))


@pytest.fixture(scope="module")
def small(browser, tmp_path_factory):
    """The Page of DATA."""
    page = Page(browser, write(tmp_path_factory.mktemp("page") / "report.html", DATA))
    yield page
    page.close()


@pytest.fixture
def at(small):
    """A function that opens the page of DATA at an address, and gives the tab."""
    small.tab.set_checked("#secrets", False)
    yield small.open
    assert small.faults == []


@pytest.fixture
def page_of(browser, tmp_path):
    """page_of(data, **changes): the Page of other data."""
    pages = []

    def page_of(data, **changes):
        pages.append(Page(browser, write(tmp_path / "report.html", data, **changes)))
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


def words(text):
    return " ".join(text.split())


def table(tab, selector):
    """The cells of each row."""
    return [list(map(words, row.split("\t"))) for row in shown(tab, f"{selector} tbody tr")]


def has(d, **keys):
    return any(turn.get(key) == value for turn in d["turns"] for key, value in keys.items())


def test_first_screen_is_the_table_with_bars(at):
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
    assert "show the reference" in tab.get_attribute(".results th:has-text('leaks')", "title")
    assert shown(tab, ".legend") == []                              # where a pointer shows titles


@pytest.mark.parametrize("fragment, keeps", [
    ("m=sweet", lambda d: d["m"] == 2),
    ("reward=success", lambda d: d["reward"] == 1),
    ("reward=failed", lambda d: d["reward"] < 1),
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


def test_a_long_list_has_pages(page_of):
    tab = page_of(make_data(51)).open("#view=dialogues")
    assert numbers(tab) == list(range(100))
    tab.click("#page-on")
    assert numbers(tab) == [100, 101] and "page=1" in tab.url


def test_rows_have_their_task_and_can_be_downloaded(at):
    tab = at("#view=dialogues&m=sweet&reward=failed")
    kept = [d for d in DIALOGUES if d["m"] == 2 and d["reward"] < 1]
    assert shown(tab, "#list tbody td:nth-child(3)") == [DATA["tasks"][d["t"]]["id"] for d in kept]
    with tab.expect_download() as download:
        tab.locator("#f-download").click()
    assert download.value.suggested_filename == "dialogues.jsonl"
    rows = [json.loads(line) for line in download.value.path().read_text().splitlines()]
    assert [(row["method"], row["task"], row["turns"]) for row in rows] == [
        ("sweet", DATA["tasks"][d["t"]], d["turns"]) for d in kept]


def test_filters_by_hand_and_back(at):
    tab, everything = at(anew=True), f"{3 * N + 1} of {3 * N + 1} dialogues"
    tab.click("nav >> text=Dialogues")
    tab.select_option("#f-m", "base")
    tab.locator("#f-q").press_sequentially("bonus")
    found = [i for i in range(N) if any("bonus" in turn["text"] for turn in DIALOGUES[i]["turns"])]
    assert numbers(tab) == found and 0 < len(found) < N
    assert tab.evaluate("document.activeElement.id") == "f-q" and tab.url.endswith("m=base&q=bonus")
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
    d = first(lambda d: d["rounds"] == 6 and d["reward"] < 1)
    tab, one = at(f"#d={d}&turn=3"), DIALOGUES[d]
    assert list(map(words, shown(tab, "#dialogue .said"))) == [words(turn["text"]) for turn in one["turns"]]
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


def test_reference_and_facts_are_behind_the_switch(at):
    d = first(lambda d: d["known"] and d["reward"] < 1)
    one, task, tab = DIALOGUES[d], DATA["tasks"][DIALOGUES[d]["t"]], at(f"#d={d}")
    assert shown(tab, ".secret") == [] and "learned" not in tab.inner_text("body")
    assert task["reference"] not in tab.inner_text("body")
    tab.check("#secrets")
    assert tab.inner_text("#dialogue div.secret pre") == task["reference"]
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


def test_advantage_tables(at):
    tab = at("#view=advantages")
    assert table(tab, "#advantages") == [
        ["needed", "224", "+0.303", "+0.357 (112)", "–", "+0.250 (112)"],
        ["idle", "224", "\u22120.100", "\u22120.100 (112)", "–", "–"],
        ["1", "1,460", "\u22120.062", "+0.125 (730)", "–", "\u22120.250 (730)"]]
    assert FORMS["advantages"][0] in shown(tab, "#advantages .note")


def test_candidates_are_ranked_and_marked(at):
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


def test_candidates_are_filtered_and_lead_to_their_dialogue(at):
    tab = at("#view=candidates")
    assert "task 000000" in shown(tab, "#candidates .badge") and f"1 of {N} states" in tab.inner_text("#candidates")
    tab.select_option("#k-side", "chosen")
    tab.select_option("#k-kind", "needed")
    asked = [number for number, state in enumerate(DATA["states"]) if any(
        one["chosen"] and one["kind"] == "needed" for one in state["candidates"])]
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


def test_screenshots_of_a_page_side_by_side_with_a_slider(page_of, tmp_path):
    data = make_pages(tmp_path)
    page = page_of(data)
    tab = page.open("#d=0")                                         # of the first method, which has no screenshots
    tab.check("#secrets")
    assert tab.locator("#dialogue .none").inner_text() == "no screenshot in this page"
    assert "the answer cannot be rendered: no page" in tab.inner_text("#dialogue")
    page.open("#d=1")
    assert "reward 0.100" in tab.inner_text("#dialogue .about")
    assert "this page cannot be rendered: slow" in tab.inner_text("#dialogue .turn.agent")
    assert tab.locator("#dialogue img").evaluate_all("all => all.map(image => image.naturalWidth)") == [320] * 4
    clip = "image => getComputedStyle(image).clipPath"
    assert tab.locator(".stack img").last.evaluate(clip) == "inset(0px 0px 0px 50%)"
    tab.locator("#dialogue input[type=range]").fill("80")
    assert tab.locator(".stack img").last.evaluate(clip) == "inset(0px 0px 0px 80%)"
    page.open("#view=dialogues&reward=0")
    assert numbers(tab) == [i for i, d in enumerate(data["dialogues"]) if d["reward"] < 0.25]
    assert "A page for shop" in tab.inner_text("#list") and tab.title() == "Evaluation"
    assert not tab.locator("#f-family").count() and not tab.locator("#f-kind").count()


ATTACKS = json.loads((ROOT / "tests" / "page_attacks.json").read_text())


@pytest.fixture(scope="module")
def hostile(browser, tmp_path_factory):
    """The Page with attacks in every field, and a turn of a megabyte. After all tests nothing has run, and its title is
    the one that it began with."""
    data = make_data(len(ATTACKS), (ATTACKS[0], "<b>sweet</b>"), num_states=3)
    data |= {"left_out": ATTACKS[0], "forms": dict.fromkeys(FORMS, [ATTACKS[0]])}
    for attack, task, d in zip(ATTACKS, data["tasks"], data["dialogues"]):
        task |= dict.fromkeys(("id", "family", "request", "reference"), attack) | {"facts": [attack] * 4}
        d |= {"answer": attack, "reward": 0.5, "fault": attack,
              "failed": [dict.fromkeys(("call", "expected", "got", "said"), attack)]}
        for turn in d["turns"]:
            turn |= {"text": attack} | ({"kind": attack, "fault": attack} if "kind" in turn else {"leak": attack})
    data["states"][0]["candidates"][0] |= {"text": ATTACKS[0], "kind": ATTACKS[1]}
    data["dialogues"][0]["turns"][1]["text"] = "\U0001F600" * 3000 + "a" * (2 ** 20 - 3000)
    script, image, *_ = ATTACKS
    plots = report_plots("success_rate", {script: {1: {"success_rate": 0.5}}}, {})
    page = Page(browser, write(
        tmp_path_factory.mktemp("hostile") / "report.html", data, notes=[script], tables={image: script},
        metric_heading=image, plots=plots,
        advantages={"by_kind": summary(1, **{script: 0.5}), "by_round": {}}))
    yield page
    assert page.tab.title() == "Evaluation"
    page.close()


def test_hostile_texts_stay_texts(hostile):
    tab = hostile.open("#view=results")
    assert shown(tab, ".results tbody th") == [ATTACKS[0], "<b>sweet</b>"]
    tab.check("#secrets")
    for number, attack in enumerate(ATTACKS):
        hostile.open(f"#d={number}")
        said, *texts = tab.evaluate("""[".turn:last-child .said", ".tests td", ".secret pre"].map(
            selector => document.querySelector("#dialogue " + selector).textContent)""")
        assert said.startswith(attack) and texts == [attack, attack]
        if "\u0645" in attack:                                      # Arabic: a text has its own direction
            assert tab.locator(".turn .text").first.evaluate("node => getComputedStyle(node).direction") == "rtl"


def test_every_address_shows_something(hostile):
    views = ("compare", "advantages", "failures", "dialogues&q=%3Cscript", "__proto__",
             "dialogues&sort=constructor", "candidates&kind=__proto__&side=constructor",
             "dialogues&m=constructor&kind=__proto__&page=-7", "compare&t=__proto__&pick=a,99999", "<script>")
    for fragment in (*(f"view={view}" for view in views), "d=__proto__", "d=-1&turn=x", "d=99999999", "s=1e9",
                     "d=1&turn=%3Cscript%3E", "%E0%A4%A"):
        assert hostile.open(f"#{fragment}").inner_text("main") != ""


def test_a_long_text_is_cut_until_it_is_asked_for(hostile):
    tab = hostile.open("#d=0")
    block = tab.locator("#turn-0-1 .text")
    assert len(block.inner_text()) <= 5001
    tab.click("text=show all 1,048,576 characters")
    assert block.evaluate("node => [...node.textContent].length") == 2 ** 20
    # a hostile dialogue adds no script, no handler and no foreign link
    assert tab.locator("script").count() == 2
    assert tab.locator("main img, main iframe, main form:not(.filters)").count() == 0
    names = tab.evaluate("[...document.querySelectorAll('*')].flatMap(node => node.getAttributeNames())")
    assert len(names) > 100 and [name for name in names if name.startswith("on")] == []
    links = tab.evaluate("[...document.querySelectorAll('a')].map(a => a.getAttribute('href'))")
    assert len(links) > 10 and [link for link in links if not link.startswith("#")] == []


def test_the_policy_of_the_page_stops_what_is_not_its_script(browser, tmp_path):
    """So that the silence of the tests above means something: markup that gets in is refused, and this is seen."""
    markup = """<img src=http://nothing.invalid/a.png><script>document.title = 'ran'</script>
                <p onclick="document.title = 'ran'">x</p>"""
    path = write(tmp_path / "report.html", make_data(2))
    path.write_text(path.read_text().replace("<main>", "<main>" + markup))
    page = Page(browser, path)
    tab = page.open()
    tab.click("p:has-text('x')")
    assert tab.title() == "Evaluation"
    blocked = sorted(re.findall("(image|script|handler).* violates the following Content", "\n".join(page.faults)))
    assert blocked == ["handler", "image", "script"]
    page.faults.clear()
    page.close()


def without(data, *keys, of_turns=()):
    """Data whose dialogues, and their turns, lack some keys."""
    for d in data["dialogues"]:
        for row, gone in ((d, keys), *((turn, of_turns) for turn in d["turns"])):
            for key in gone:
                row.pop(key, None)
    return data


def test_missing_pieces_leave_their_section_out(page_of):
    """page_data leaves the advantage out where a critic gives no finite number."""
    data = make_data(3, num_states=0) | {"forms": {}, "left_out": "4 of 10 dialogues are left out"}
    data = without(data, "advantage", "known", "failed",
                   of_turns=("advantage", "kind", "learned", "tokens", "cut", "leak"))
    for task in data["tasks"]:
        del task["facts"], task["family"]
    page = page_of(data)
    assert shown(page.tab, "#nav a") == ["Results", "Dialogues", "Compare"]
    for view, place in (("results", "#left-out"), ("dialogues", "#dialogues"), ("compare", "#compare")):
        assert data["left_out"] in page.open(f"#view={view}").inner_text(place)
    tab = page.open("#d=4")
    assert tab.locator(".turn").count() == len(data["dialogues"][4]["turns"])
    assert not {"advantage", "no."} & set(shown(tab, "#list th"))
    assert tab.locator(".advantage, .strip, .bars, .facts").count() == 0
    for view in ("advantages", "candidates"):
        assert shown(page.open(f"#view={view}"), "#nav a[aria-current]") == ["Results"]
    some = without(make_data(4, num_states=2), "reward", "advantage", "sample", of_turns=("advantage",))
    for data, advantages, views in (
            (make_data(0), None, ("results", "compare", "advantages", "candidates")),
            (some, {"by_kind": {}, "by_round": {}}, ("results", "compare", "advantages", "candidates",
             "dialogues&sort=reward", "dialogues&sort=-advantage", "dialogues&reward=failed"))):
        page = page_of(data, advantages=advantages)
        for view in views:
            tab = page.open(f"#view={view}")
            assert tab.locator("#nav a[aria-current]").count() == 1 and tab.inner_text("main") != ""
        assert page.open("#view=dialogues").locator("#list tbody tr").count() == len(data["dialogues"])
        if data is some:
            assert "no number" in page.open("#d=0").inner_text("#dialogue .about")


CONTRAST = (ROOT / "tests" / "contrast.js").read_text()
VIEWS = ("#view=results", "#view=dialogues", "#d=0&turn=1", "#view=compare&t=1", "#view=advantages",
         "#view=candidates&s=1")


@pytest.fixture(scope="module")
def phone(browser, tmp_path_factory):
    """The Page of two tasks with a plot, on a phone, where fingers cannot hover."""
    data = make_data(2)
    plots = report_plots("success_rate", {"a": {1: {"success_rate": 0.5}, 8: {"success_rate": 0.6}}}, {})
    path = write(tmp_path_factory.mktemp("phone") / "r.html", data, plots=plots)
    page = Page(browser, path, viewport={"width": 375, "height": 800}, has_touch=True, is_mobile=True)
    page.tab.check("#secrets")
    yield page
    page.close()


@pytest.mark.parametrize("scheme, width", [("light", 1280), ("light", 700), ("light", 375), ("dark", 375)])
def test_contrast_width_and_numbers_of_a_phone(phone, scheme, width):
    """Texts are seen, nothing is wider than the screen, and no number breaks over lines."""
    from PIL import Image
    tab = phone.tab
    tab.set_viewport_size({"width": width, "height": 800})
    tab.emulate_media(color_scheme=scheme)
    for fragment in VIEWS:
        phone.open(fragment)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, fragment
        right_edges = tab.evaluate("""[...document.querySelectorAll(".results td, .candidates td")].map(
            node => node.getBoundingClientRect().right)""")
        assert max(right_edges, default=0) <= width, fragment
        texts = "p, a, button:not(:disabled), th, td, span:not([aria-hidden]), label, li, pre, h1, h2, h3, b"
        assert tab.evaluate(CONTRAST, texts) >= 4.5, fragment
        heights = tab.evaluate("""[...document.querySelectorAll(".num, .number, .badge, .candidates th")].filter(
            node => node.offsetParent && /^[-+.,0-9\u2212]+$/.test(node.textContent)).map(node => {
              const range = document.createRange();
              range.selectNodeContents(node);
              return range.getClientRects().length;
            })""")
        assert set(heights) <= {1}, fragment
    phone.open("#view=results")
    shot = Image.open(io.BytesIO(tab.locator("figure svg").screenshot())).convert("L")
    darkest, lightest = shot.getextrema()
    assert lightest - darkest > 150                                 # the plot is seen


@pytest.mark.parametrize("fragment, lines", [
    ("#view=results", ["leaks: share of the simulator's replies that show the reference"]),
    ("#view=dialogues", ["reward: share of the tests that the answer passes", "advantage: sum of the turn advantages"]),
    ("#view=advantages", ["turns: number of turns, of all methods"]),
    ("#view=candidates&s=1", ["rank: by the critic's score, 1 the best"])])
def test_a_finger_reads_what_the_columns_mean(phone, fragment, lines):
    tab = phone.open(fragment)
    tab.locator(".legend summary").locator("visible=true").tap()
    assert set(lines) <= set(shown(tab, ".legend .note"))
    if "candidates" in fragment:                                    # each number has its heading; of no pair: none
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
    assert set(spreads) <= {"shown", "ranked"}
