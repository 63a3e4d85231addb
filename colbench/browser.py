"""Renders HTML pages in a Chromium without a network: screenshots, and values that a script reads from the page."""
import asyncio
import base64
import contextlib
import functools
import hashlib
import json
import logging
import os
import pathlib
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import types
import urllib.parse
from collections import namedtuple
from html import unescape

from colbench.domain import beside
from colbench.schema import InputError, one_line

log = logging.getLogger(__name__)

Render = namedtuple("Render", "image spec fault")
VIEWPORT = {"width": 1280, "height": 720}
MAX_WIDTH_PX, MAX_HEIGHT_PX = 2560, 8192
MAX_PAGE_BYTES, MAX_PAGE_S = 2_000_000, 10                         # of HTML; for all of a page
MAX_MEMORY = 2 << 30                                               # bytes that a process of the browser can fill
PAGE_CLOCK_MS = 2000                                               # of its own clock a page has after loading
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER_FLAGS = [line for line in beside("browser_flags.txt").splitlines() if line[0] != "#"]
FONTS = beside("fonts.conf")
FONT_ROOTS = "/usr/share/fonts", "/usr/local/share/fonts", "~/.local/share/fonts", "~/.fonts", "/Library/Fonts"


# Runs in every frame before a page's own scripts: a clock that stands still until __run moves it, seeded random
# numbers, dialogs that return at once, and storage that ends with the page.
PAGE_START = beside("page_start.js")
# These run in a world of their own: they see the page's document, but no function that its scripts may have changed.
# They wait for the load event, because readyState is "complete" as soon as a written document is closed.
PAGE_LOAD = beside("page_load.js")
PAGE_SCROLL = beside("page_scroll.js") % MAX_HEIGHT_PX
PAGE_SETTLE = beside("page_settle.js")
# All that may act, load or move, and the attributes whose effect outlives their elements (the colours of links, the
# title that chooses among style sheets). A page without any of these leaves no trace: the next page gets its window.
ACTIVE = re.compile(r"<(script|iframe|frame|object|embed|portal|meta|base|link|template|video|audio|svg)\b|<style[^>]|"
                    r"[\s/\"'](on\w+|[av]?link)\s*=|javascript:|@([\w-]*\\|import)|autofocus", re.IGNORECASE)
PHOTO = ('<svg xmlns="http://www.w3.org/2000/svg" width="{0}" height="{1}">'
         '<rect width="{0}" height="{1}" fill="#bbb"/></svg>')
SIZE_IN_PATH = r"(?<![\w.-])([1-9]\d{1,3})(?:x|/(?=[2-9]\d|\d{3}))([1-9]\d{1,3})(?![\w-])"
SIZE_IN_QUERY = r"\A(?>.*?\bw=(\d+)\b).*\bh=(\d+)\b"                    # no backtracking: it may have 2 MB
SQUARE = r"([1-9]\d{1,3})/?(?=$|[?.])"
PHOTO_HOSTS = re.compile(r"(.*\.)?(picsum\.photos|source\.unsplash\.com|placehold\.(co|it)|fakeimg\.pl|"
                         r"(placeholder|dummyimage|placekitten|loremflickr|placeimg)\.com)$")
NPM, CDNJS = r"https?://(cdn\.jsdelivr\.net/npm|unpkg\.com)", r"https?://cdnjs\.cloudflare\.com/ajax/libs"
CDN = r"https?://cdn\.tailwindcss\.com/?(3[^/?]*)?"
TAILWIND = [                                                       # address -> file, under sys.prefix/tailwind
    (rf"({NPM}/tailwindcss@[~^]?2[^/]*/dist|{CDNJS}/tailwindcss/2[^/]*)/tailwind(\.min)?\.css",
     "tailwindcss-2.2.19/dist/tailwind.min.css"),
    (rf"{CDN}\?plugins=.*", "tailwindcss-cdn-3.4.10/tailwindcss-with-all-plugins.js"),
    (CDN, "tailwindcss-cdn-3.4.10/tailwindcss.js"),
    (rf"{NPM}/@tailwindcss/browser@[~^]?4[^/]*(/|/dist/index\.global\.js)?",
     "tailwindcss-browser-4.3.3/dist/index.global.js")]
RENDERER = hashlib.sha256(repr((VIEWPORT, MAX_WIDTH_PX, MAX_HEIGHT_PX, PAGE_CLOCK_MS, BROWSER_FLAGS, FONTS, PAGE_START,
                                PAGE_LOAD, PAGE_SCROLL, PAGE_SETTLE, PHOTO)).encode()).hexdigest()


def screenshot_path(images, html):
    """Path of a page's screenshot; the name depends on its text and the renderer's settings."""
    return pathlib.Path(images) / (hashlib.sha256(f"{RENDERER}{json.dumps(html)}".encode()).hexdigest()[:16] + ".png")


def photo_size(address):
    """(width, height) in the address of an image, as texts, or None: /300x200, /300/200 (but not a year and a month),
    ?w=300&h=200, or /300 as the whole path for a square."""
    path = re.sub(r"^(https?:)?//[^/]*/((id|seed|collection|user)/[^/]+/)?", "", address)
    pair = re.search(SIZE_IN_PATH, path) or re.search(SIZE_IN_QUERY, path)
    if pair:
        return pair.groups()
    square = re.match(SQUARE, path)
    return (square[1], square[1]) if square else None


@functools.cache
def style_rules(path):
    """[(text, classes)] of a minified style sheet's rules. A rule needs an element with one of its classes. The start
    and end of a block, and rules for elements of any class, have none."""
    rules = []
    for text in re.findall(r"@media[^{]*\{|@[\w-]*keyframes[^{]*\{(?:[^{}]*\{[^}]*\})*\}|[^{}]+\{[^}]*\}|\}",
                           path.read_text("utf-8")):
        selectors = re.sub(r"/\*.*?\*/", "", text.partition("{")[0])
        names = []
        if text[0] not in "@}" and all("." in selector for selector in selectors.split(",")):
            names = re.findall(r"\.((?:\\.|[\w-])+)", selectors)
        classes = {name.replace("\\", "").lower() for name in names}
        rules.append((text, classes - {"group"}))                   # found in rules for classes like "group-hover:p-9"
    return rules


def style_sheet(path, page):
    """The text of Tailwind 2's style sheet, without the rules for classes that the page does not name: 2.9 MB of rules
    take longer than the rest of a page. The whole text if a script might make up names, or there is a checksum."""
    if re.search(r"<script|\bon\w+\s*=|javascript:|srcdoc|integrity", page, re.IGNORECASE):
        return path.read_text("utf-8")
    words = set(re.split(r"[\s\"'<>=]+", unescape(page).lower()))
    return "".join(text for text, names in style_rules(path) if not names or names & words)


def local_answer(url, html):
    """Playwright's answer (body and content type) if the page `html` requests a URL. None: the request is refused."""
    for pattern, name in TAILWIND:
        if re.fullmatch(pattern, urllib.parse.unquote(url)):
            path = pathlib.Path(sys.prefix, "tailwind", name)
            if not path.exists():
                raise InputError(f"a page asks for {url}, and its copy {path} is not there: without it the "
                                    "screenshot would be another one; `bash tests/run.sh` puts it there (with npm)")
            if path.suffix == ".css":
                return {"body": style_sheet(path, html), "content_type": "text/css"}
            return {"body": path.read_text("utf-8"), "content_type": "text/javascript"}
    if PHOTO_HOSTS.match(urllib.parse.urlsplit(url).hostname or ""):
        width, height = photo_size(url) or ("1080", "720")
        return {"body": PHOTO.format(width, height), "content_type": "image/svg+xml"}
    return None


def write_fonts(folder):
    """Write fonts.conf into `folder`: Liberation for every font name. Returns its path, or None without Liberation."""
    folders = set()
    for root in FONT_ROOTS:
        for path in pathlib.Path(root).expanduser().rglob("LiberationSans-Regular.*"):
            folders.add(f"<dir>{path.parent}</dir>")
    if not folders:
        return None
    path = pathlib.Path(folder, "fonts.conf")
    path.write_text(FONTS.format(folders="".join(sorted(folders)), cache=folder))
    return path


async def with_deadline(seconds, call, *ends):
    """The result of an awaitable. Raises TimeoutError after some seconds, or when one of the futures `ends` is done.
    asyncio.wait_for would keep waiting for a call that ignores its cancellation."""
    task = asyncio.ensure_future(call)
    task.add_done_callback(lambda task: task.cancelled() or task.exception())        # no warning if nobody asks for it
    try:
        if task in (await asyncio.wait({task, *ends}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED))[0]:
            return task.result()
        raise TimeoutError
    finally:
        task.cancel()


def fault_of(tab, error):
    """Why a page has no screenshot, in one line."""
    if tab and tab.crashed.done():
        return "its process crashed"
    if re.search("[Cc]ontext (was destroyed|with specified id)|target navigated", str(error)):
        return "not drawn: the page replaced itself"
    return f"not drawn: {one_line(error)}" if str(error) else f"not drawn within {MAX_PAGE_S} s"


class Browser:
    """Renders HTML pages in one Chromium, which the first page starts and which logs its isolation.

        browser = Browser("out/images")
        image, spec, fault = await browser.render(html)             # in any event loop, several at a time
        browser.close()

    It has its own thread and event loop: sampling from a local model blocks the caller's loop, and pages would time out
    there.

    A page is shown at rest (docs/pages.md) or not at all: one that does not come to rest within 10 s, hangs or crashes
    is a fault. If the whole browser dies, the pages in flight are rendered again, one at a time, so that each can only
    harm itself. Raises InputError if there is no browser, or if a page needs a missing Tailwind file."""

    def __init__(self, images, path=None, num_tabs=2):
        self.images, self.path, self.num_tabs = pathlib.Path(images), path, num_tabs
        self.loop, self.thread, self.specs = asyncio.new_event_loop(), None, {}
        self.tabs, self.free = [None] * num_tabs, asyncio.Semaphore(num_tabs)
        self.alone, self.starting = asyncio.Lock(), asyncio.Lock()
        self.chromium = self.driver = self.pulse = self.folder = self.error = None
        self.Error = TimeoutError                                   # later Playwright's

    def call(self, coroutine):
        """Run a coroutine in the browser's own loop; returns its future."""
        if not self.thread:
            self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
            self.thread.start()
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def close(self):
        if self.thread:
            self.call(self.stop()).result()
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()
            self.thread = None

    async def render(self, html, screenshot=True, read=None):
        """The Render of a page.

        image: path of a PNG of the whole page, 1,280 px wide, or as wide and high as it is, up to 2,560 x 8,192. An
        existing one is reused. None: it could not be rendered.
        spec: the JSON value of the JavaScript expression `read`.
        fault: None, or one line that says why there is no screenshot."""
        path = screenshot_path(self.images, html)
        if screenshot and not read and path.is_file():
            return Render(str(path), None, None)
        if not screenshot and (path.name, read) in self.specs:
            return self.specs[path.name, read]
        size = len(html.encode("utf-8", "replace"))
        if size > MAX_PAGE_BYTES:
            return Render(None, None, f"page larger than {MAX_PAGE_BYTES:,} bytes ({size:,})")
        drawing = self.call(self.draw_alive(html, path if screenshot else None, read))
        render = await asyncio.wrap_future(drawing)
        if not screenshot:
            self.specs[path.name, read] = render
        return render

    # All other methods run in the browser's own loop.

    async def start(self):
        try:
            from playwright.async_api import async_playwright, Error
        except ImportError:
            raise InputError("pages need the package playwright: pip install -r scripts/frontend.txt") from None
        self.Error = Error
        self.driver = await async_playwright().start()
        names = [self.path] if self.path else [*BROWSERS, self.driver.chromium.executable_path]
        path = next(filter(None, map(shutil.which, names)), None)
        if not path:
            raise InputError(f"--browser {self.path}: no such program" if self.path else
                                "no browser for pages: apt-get install chromium, or playwright install chromium, or "
                                "--browser PATH")
        self.folder = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        fonts = write_fonts(self.folder.name)
        # No keys or settings of the user's environment reach the browser.
        env = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "TMPDIR") if name in os.environ}
        env |= {"HOME": self.folder.name, "LANG": "C.UTF-8"} | ({"FONTCONFIG_FILE": str(fonts)} if fonts else {})
        for sandbox_on in [True, False] if os.geteuid() else [False]:
            try:
                self.chromium = await self.driver.chromium.launch(
                    executable_path=path, args=BROWSER_FLAGS, env=env, chromium_sandbox=sandbox_on,
                    ignore_default_args=["--disable-popup-blocking"])
                break
            except Error as error:
                if not sandbox_on:
                    raise InputError(f"{path}: does not start ({one_line(error)})") from None
        self.pulse = await self.chromium.new_browser_cdp_session()
        processes = (await self.pulse.send("SystemInfo.getProcessInfo"))["processInfo"]
        self.pid = next(process["id"] for process in processes if process["type"] == "browser")
        for path in pathlib.Path("/proc").glob("[0-9]*"):           # its later processes inherit the limit
            with contextlib.suppress(OSError):
                if os.getpgid(int(path.name)) == self.pid:
                    resource.prlimit(int(path.name), resource.RLIMIT_DATA, (MAX_MEMORY, MAX_MEMORY))
        fonts = "Liberation" if fonts else ("the system's; without Liberation (apt-get install fonts-liberation) "
                                            "screenshots differ from those of other machines")
        log.info(f"browser: Chromium {self.chromium.version}, no network, its sandbox {'on' if sandbox_on else 'off'}, "
                 f"fonts: {fonts}")

    async def stop(self):
        """Stop the browser and its driver, in any state."""
        try:
            if self.chromium:
                await with_deadline(5, self.chromium.close())
        except Exception:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)                 # Playwright starts it in a group of its own
        with contextlib.suppress(Exception):
            if self.driver:
                await with_deadline(5, self.driver.stop())
        if self.folder:
            self.folder.cleanup()
        self.chromium = self.driver = self.pulse = None

    async def alive(self):
        with contextlib.suppress(self.Error, TimeoutError):
            if self.pulse:
                await with_deadline(3, self.pulse.send("Browser.getVersion"))
                return self.chromium.is_connected()
        return False

    async def draw_alive(self, html, path, read):
        """The Render of a page. If the browser dies meanwhile, perhaps because of another page, render it once more."""
        render = await self.attempt(html, path, read, 1)
        if not render:
            async with self.alone:
                render = await self.attempt(html, path, read, self.num_tabs)
        return render or Render(None, None, "the browser died of it")

    async def attempt(self, html, path, read, num_tabs):
        """The Render of a page, or None if the whole browser died. `num_tabs`: number of tabs to hold; with all of them
        the page is the only one."""
        for _ in range(num_tabs):
            await self.free.acquire()
        tab, clean_tab, render, fault = self.tabs.pop(), None, None, None
        try:
            if not tab or not tab.chromium.is_connected():
                tab = None
                async with self.starting:                           # a start may take longer than a page
                    if not await self.alive():
                        await self.stop()
                        await self.start()
                tab = await with_deadline(MAX_PAGE_S, self.new_tab())      # its calls hang where the browser dies
            render = await with_deadline(MAX_PAGE_S, self.draw(tab, html, path, read), tab.crashed)
            if ACTIVE.search(html):
                await with_deadline(5, self.clear(tab), tab.crashed)
            clean_tab = tab
        except (self.Error, TimeoutError) as error:
            fault = fault_of(tab, error)
        finally:
            if tab and not clean_tab:
                await self.close_part(tab.context)
            self.tabs.append(clean_tab)
            for _ in range(num_tabs):
                self.free.release()
        if self.error:
            raise self.error
        return render or (Render(None, None, fault) if await self.alive() else None)

    async def new_tab(self):
        """A page in its own context, hence in its own process."""
        context = await self.chromium.new_context(
            viewport=VIEWPORT, device_scale_factor=1, locale="en-US", timezone_id="UTC", color_scheme="light",
            service_workers="block", accept_downloads=False)
        tab = types.SimpleNamespace(chromium=self.chromium, context=context, crashed=asyncio.Future())
        await context.add_init_script(PAGE_START)
        await context.route("**/*", lambda route: self.answer(tab, route))
        tab.page = await context.new_page()
        tab.page.on("crash", lambda _: tab.crashed.done() or tab.crashed.set_result(True))
        context.on("page", lambda page: asyncio.ensure_future(self.close_part(page)))
        tab.session = await context.new_cdp_session(tab.page)
        await tab.session.send("Animation.enable")
        await tab.session.send("Animation.setPlaybackRate", {"playbackRate": 0})     # animations wait for PAGE_SETTLE
        tab.frame = (await tab.session.send("Page.getFrameTree"))["frameTree"]["frame"]["id"]
        await self.clear(tab)
        return tab

    async def clear(self, tab):
        """Give a tab a new window (100 ms) with a world for our own scripts, without traces of the last page."""
        await tab.page.goto("about:blank")
        await tab.session.send("Page.resetNavigationHistory")
        reply = await tab.session.send("Page.createIsolatedWorld", {"frameId": tab.frame})
        tab.world, tab.new = reply["executionContextId"], True

    async def close_part(self, part):
        """Close a page or a context."""
        with contextlib.suppress(self.Error, TimeoutError):
            await with_deadline(5, part.close())

    async def answer(self, tab, route):
        """Answer or refuse one request of a page."""
        answer = None
        try:
            answer = local_answer(route.request.url, tab.html)
        except InputError as error:
            self.error = error
        with contextlib.suppress(self.Error):                       # the page may be gone
            if answer:
                await route.fulfill(**answer, headers={"access-control-allow-origin": "*"})
            else:
                await route.abort("aborted")                        # for a navigation, too: the page stays where it is

    async def evaluate(self, tab, expression):
        """The JSON value of a JavaScript expression (or of its promise) in the world of our own scripts."""
        reply = await tab.session.send("Runtime.evaluate", {
            "expression": expression, "contextId": tab.world, "awaitPromise": True, "returnByValue": True})
        if "exceptionDetails" in reply:
            details = reply["exceptionDetails"]
            raise self.Error(details.get("exception", {}).get("description") or details["text"])
        return reply["result"].get("value")

    async def run_clock(self, tab, until_ms):
        """Advance a page's own clock to a time."""
        for frame in tab.page.frames:
            if frame.url:                                           # a refused frame has none, and runs nothing
                await frame.evaluate(f"window.__run && __run({until_ms})")

    async def draw(self, tab, html, path, read):
        """The Render of a page in a tab."""
        active = ACTIVE.search(html)
        if active and not tab.new:
            await self.clear(tab)
        tab.html, tab.new = html, False
        await self.evaluate(tab, PAGE_LOAD % json.dumps(html))
        if active:
            await self.run_clock(tab, PAGE_CLOCK_MS // 2)
            await self.evaluate(tab, PAGE_SCROLL)                   # some parts only appear when they are scrolled to
            await self.run_clock(tab, PAGE_CLOCK_MS)
        await self.evaluate(tab, PAGE_SETTLE)
        spec = await self.evaluate(tab, read) if read else None
        if path and not path.is_file():
            size = (await tab.session.send("Page.getLayoutMetrics"))["cssContentSize"]
            width = min(max(size["width"], VIEWPORT["width"]), MAX_WIDTH_PX)
            height = min(max(size["height"], VIEWPORT["height"]), MAX_HEIGHT_PX)
            clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
            png = (await tab.session.send("Page.captureScreenshot", {
                "format": "png", "captureBeyondViewport": True, "clip": clip}))["data"]
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f"{path.name}.{os.getpid()}-{id(tab)}.partial")
            partial.write_bytes(base64.b64decode(png))
            partial.rename(path)
        return Render(path and str(path), spec, None)
