"""Size and speed of the report page in headless Chromium, on made dialogues: python tests/bench_report.py

Prints the time that fitting the data into the page takes, the size of the file, the time to the first contentful
paint, and the times of filters and of opening a dialogue: by the clock, from the event to the next frame, and of the
processor, for a machine that does other work as well."""
import argparse
import pathlib
import statistics
import tempfile
import time

from playwright.sync_api import sync_playwright
from test_report_page import launch, make_data, Page, write

from lib.report import fitting, MAX_PAGE

PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
# from the change of a control, or of the address, until the frame that shows what it gives has been laid out
CHANGE = """([id, value]) => new Promise(done => {
  const begin = performance.now(), control = document.getElementById(id);
  if (control) {
    control.value = value;
    control.dispatchEvent(new Event(control.type === "search" ? "input" : "change"));
  } else location.hash = value;
  requestAnimationFrame(() => { document.body.offsetHeight; done(performance.now() - begin); });
})"""


def processor_ms(session):
    """What the page's main thread has worked so far; unlike the clock, it leaves out what else the machine does."""
    metrics = {metric["name"]: metric["value"] for metric in session.send("Performance.getMetrics")["metrics"]}
    return 1000 * metrics["TaskDuration"]


def measure(browser, path, repeats):
    """Prints the times of one page."""
    paints = []
    for _ in range(repeats):
        page = Page(browser, path)
        tab = page.open()
        page.wait_for(PAINT)
        paints.append(tab.evaluate(PAINT))
        page.close()
    print(f"first paint {statistics.median(paints):6.0f} ms, at most {max(paints):6.0f} ms")
    page = Page(browser, path)
    tab = page.open("#view=dialogues")
    session, times, work = page.context.new_cdp_session(tab), {}, {}
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    for _ in range(repeats):
        for control, values in (("f-q", ["b", "bo", "bonus", "no such words", ""]), ("f-m", ["sweet", ""]),
                                ("f-reward", ["failed", ""]), ("f-family", ["game", ""]), ("f-rounds", ["6", ""]),
                                ("f-kind", ["repeat", ""]), ("open", ["#d=700", "#d=1700&turn=3", "#view=dialogues"])):
            for value in values:
                before = processor_ms(session)
                times.setdefault(control, []).append(tab.evaluate(CHANGE, [control, value]))
                work.setdefault(control, []).append(processor_ms(session) - before)
    for control, own in times.items():
        name = "open a dialogue" if control == "open" else f"filter {control[2:]}"
        print(f"{name:16s} {statistics.median(own):6.0f} ms, at most {max(own):6.0f} ms; "
              f"processor {statistics.median(work[control]):6.0f} ms, at most {max(work[control]):6.0f} ms")
    page.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=1000, help="tasks, each with a dialogue of both methods")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    data = make_data(args.tasks)
    begin = time.process_time()
    data = fitting(data, pathlib.Path("images"), MAX_PAGE - 200_000)         # what is not data: less than this
    print(f"fitting {time.process_time() - begin:.1f} s; {data['left_out'] or 'nothing is left out'}")
    rounds = statistics.mean(d["rounds"] for d in data["dialogues"])
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        path = write(pathlib.Path(folder, "report.html"), data)
        print(f"{len(data['dialogues']):,} dialogues of {rounds:.1f} rounds: {path.stat().st_size / 1e6:.1f} MB")
        browser = launch(driver)
        measure(browser, path, args.repeats)
        browser.close()


if __name__ == "__main__":
    main()
