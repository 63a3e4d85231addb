"""HTML pages -> screenshots, and what a script reads of them, in a real Chromium that reaches nothing."""
import asyncio
import base64
import contextlib
import functools
import hashlib
import io
import json
import logging
import os
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import threading
import types
import urllib.parse
from collections import Counter, namedtuple
from html import unescape

from colbench import beside, ColBenchError

log = logging.getLogger(__name__)

Render = namedtuple("Render", "image spec fault")
VIEWPORT = {"width": 1280, "height": 720}
MAX_WIDTH_PX, MAX_HEIGHT_PX = 2560, 8192
MAX_PAGE_BYTES, MAX_PAGE_S = 2_000_000, 10                         # of HTML; for all of a page
PAGE_CLOCK_MS = 2000                                               # of its own clock a page has after loading
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER_FLAGS = [line for line in beside("browser_flags.txt").splitlines() if line[0] != "#"]
FONTS = beside("fonts.conf")
FONT_NAMES = {"Sans": "sans-serif sans system-ui Arial Helvetica", "Serif": "serif Times Times_New_Roman",
              "Mono": "monospace mono Courier Courier_New"}


def one_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


# Runs before a page's own scripts, in every frame: a clock that stands still until __run moves it, seeded random
# numbers, dialogs that return at once, storage that lasts as long as the page (its origin has none).
PAGE_START = beside("page_start.js")
# These run in a world of their own, with the page's document, but without what its scripts may have changed. The load
# event is what tells that all is there: readyState is "complete" as soon as a written document is closed.
PAGE_LOAD = beside("page_load.js")
PAGE_SETTLE = beside("page_settle.js")
# What may act, load or move, and the attributes whose effect outlives their elements (the colours of links, the title
# that chooses among style sheets): a page without any of these leaves nothing behind, and the next gets its window.
ACTIVE = re.compile(r"<(script|iframe|frame|object|embed|portal|meta|base|link|template|video|audio|svg)\b|<style[^>]|"
                    r"[\s/\"'](on\w+|[av]?link)\s*=|javascript:|@([\w-]*\\|import)|autofocus", re.IGNORECASE)
PHOTO = ('<svg xmlns="http://www.w3.org/2000/svg" width="{0}" height="{1}">'
         '<rect width="{0}" height="{1}" fill="#bbb"/></svg>')
SIZE_IN_PATH = r"(?<![\w.-])([1-9]\d{1,3})(?:x|/(?=[2-9]\d|\d{3}))([1-9]\d{1,3})(?![\w-])"
SIZE_IN_QUERY = r"\bw=(\d+)\b.*\bh=(\d+)\b"
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
RENDERER = hashlib.sha256(repr((VIEWPORT, MAX_WIDTH_PX, MAX_HEIGHT_PX, PAGE_CLOCK_MS, BROWSER_FLAGS, FONTS, FONT_NAMES,
                                PAGE_START, PAGE_LOAD, PAGE_SETTLE, PHOTO)).encode()).hexdigest()


def screenshot_path(images, html):
    """Where a page's screenshot is kept: a name that its text and the renderer's settings give."""
    return pathlib.Path(images) / (hashlib.sha256(f"{RENDERER}{json.dumps(html)}".encode()).hexdigest()[:16] + ".png")


def with_note(png, note):
    """A PNG file's bytes with a text chunk "fault", so that a screenshot used again says what was cut from it."""
    from PIL import Image, PngImagePlugin
    notes = PngImagePlugin.PngInfo()
    notes.add_text("fault", note)
    Image.open(io.BytesIO(png)).save(out := io.BytesIO(), "PNG", pnginfo=notes)
    return out.getvalue()


def stored_render(path):
    """The Render of a screenshot that was drawn before."""
    from PIL import Image
    with Image.open(path) as image:
        return Render(str(path), None, image.text.get("fault"))


def photo_size(address):
    """(width, height) that the address of an image asks for, as texts, or None: /300x200, /300/200 (but not a year and
    a month), ?w=300&h=200, or /300 as the whole path for a square."""
    path = re.sub(r"^(https?:)?//[^/]*/((id|seed|collection|user)/[^/]+/)?", "", address)
    pair = re.search(SIZE_IN_PATH, path) or re.search(SIZE_IN_QUERY, path)
    if pair:
        return pair.groups()
    square = re.match(SQUARE, path)
    return (square[1], square[1]) if square else None


def photo(url):
    """The plain image (SVG) that stands for a photo address."""
    return PHOTO.format(*(photo_size(url) or ("1080", "720")))


def local_file(url):
    """The local file that answers a Tailwind address, or None where it is not one."""
    name = next((name for pattern, name in TAILWIND if re.fullmatch(pattern, urllib.parse.unquote(url))), None)
    path = name and pathlib.Path(sys.prefix, "tailwind", name)
    if path and not path.exists():
        raise ColBenchError(f"a page asks for {url}, and its copy {path} is not there: without it the screenshot would "
                            "be another one; `bash tests/run.sh` puts it there (with npm)")
    return path


@functools.cache
def style_rules(path):
    """[(text, the sets of classes, one of which an element needs)] of a minified style sheet's rules; what opens or
    closes a block, or needs no class, has an empty set."""
    parts = re.findall(r"@media[^{]*\{|@[\w-]*keyframes[^{]*\{(?:[^{}]*\{[^}]*\})*\}|[^{}]+\{[^}]*\}|\}",
                       path.read_text("utf-8"))
    return [(part, needed_classes(part)) for part in parts]


def needed_classes(part):
    """Of each selector of a rule the set of the classes that it names."""
    selectors = ""
    if part[0] not in "@}":
        selectors = re.sub(r"/\*.*?\*/", "", part.partition("{")[0])
    needs = []
    for selector in selectors.split(","):
        names = re.findall(r"\.((?:\\.|[\w-])+)", selector)
        needs.append(frozenset(name.replace("\\", "").lower() for name in names))
    return needs


def style_sheet(path, page):
    """The text of Tailwind 2's style sheet, without the rules for classes that the page does not name: 2.9 MB of them
    cost more than all else of a page. All of it where a script might make up names, or a check sum is asked for."""
    if re.search(r"<script|\bon\w+\s*=|javascript:|srcdoc|integrity", page, re.IGNORECASE):
        return path.read_text("utf-8")
    words = set(re.split(r"[\s\"'<>=]+", unescape(page).lower()))
    texts = []
    for text, needs in style_rules(path):
        if any(names <= words for names in needs):
            texts.append(text)
    return "".join(texts)


def write_fonts(folder):
    """Write fonts.conf into `folder`: Liberation alone, for every name; returns its path, None without Liberation."""
    roots = "/usr/share/fonts", "/usr/local/share/fonts", "~/.local/share/fonts", "~/.fonts", "/Library/Fonts"
    folders = set()
    for root in roots:
        for path in pathlib.Path(root).expanduser().rglob("LiberationSans-Regular.*"):
            folders.add(f"<dir>{path.parent}</dir>")
    if not folders:
        return None
    aliases = []
    for kind, names in FONT_NAMES.items():
        for name in names.split():
            aliases.append(f'<alias binding="same"><family>{name.replace("_", " ")}</family><prefer><family>Liberation '
                           f"{kind}</family></prefer></alias>")
    path = pathlib.Path(folder, "fonts.conf")
    path.write_text(FONTS.format(folders="".join(sorted(folders)), cache=folder, aliases="".join(aliases)))
    return path


async def with_deadline(seconds, call, *ends):
    """What an awaitable gives, or TimeoutError after some seconds, or when one of the futures `ends` is done;
    asyncio.wait_for would wait on for a call that ignores its end."""
    task = asyncio.ensure_future(call)
    task.add_done_callback(lambda task: task.cancelled() or task.exception())        # nobody else may ask for it
    try:
        if task in (await asyncio.wait({task, *ends}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED))[0]:
            return task.result()
        raise TimeoutError
    finally:
        task.cancel()


class Browser:
    """Draws HTML pages; an async context manager around one Chromium, which names itself and its state of isolation.

        async with Browser("out/images") as browser:
            image, spec, fault = await browser.render(html)            # up to `concurrency` at a time

    image: path of a PNG of the whole page, 1,280 px wide, or as wide and high as it is, up to 2,560 x 8,192; None where
    it could not be drawn. An existing screenshot is used again. spec: the JSON value of the JavaScript expression
    `read`. fault: None, or one line: why there is no screenshot, or (with a screenshot) what was cut from it.

    A page is shown at rest (docs/pages.md) or not at all: one that does not come to rest, hangs or crashes within 10 s
    is a fault. Where the whole browser dies, the pages in flight are drawn again, one at a time, so that each can only
    harm itself. Addresses that are refused are counted by host in `blocked`. ColBenchError if there is no browser, or a
    page needs a Tailwind file that is not there."""

    def __init__(self, images, path=None, concurrency=2):
        self.images, self.path, self.concurrency = pathlib.Path(images), path, concurrency
        self.blocked, self.specs = Counter(), {}
        self.tabs, self.alone, self.starting = [None] * concurrency, asyncio.Lock(), asyncio.Lock()
        self.free = asyncio.Semaphore(concurrency)                  # a queue would let some wait for ever
        self.chromium = self.driver = self.name = self.error = None

    async def __aenter__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        try:
            await self.start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exception):
        await self.stop()
        self.folder.cleanup()
        if self.blocked:
            hosts = ", ".join(f"{host} ({count:,})" for host, count in self.blocked.most_common())
            log.info(f"browser: refused: {hosts}")

    async def start(self):
        try:
            from playwright.async_api import async_playwright, Error
        except ImportError:
            raise ColBenchError("pages need the package playwright: pip install -r scripts/frontend.txt") from None
        self.Error = Error
        self.driver = await async_playwright().start()
        path = shutil.which(self.path) if self.path else next(
            filter(None, map(shutil.which, BROWSERS)), self.driver.chromium.executable_path)
        if self.path and not path:
            raise ColBenchError(f"--browser {self.path}: no such program")
        if not os.path.exists(path):
            raise ColBenchError("no browser for pages: apt-get install chromium, or playwright install chromium, or "
                                "--browser PATH")
        fonts = write_fonts(self.folder.name)
        # Neither keys nor settings of the user's environment reach it.
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
                    raise ColBenchError(f"{path}: does not start ({one_line(error)})") from None
        self.pulse = await self.chromium.new_browser_cdp_session()
        processes = (await self.pulse.send("SystemInfo.getProcessInfo"))["processInfo"]
        self.pid = next(process["id"] for process in processes if process["type"] == "browser")
        if not self.name:
            self.name = f"Chromium {self.chromium.version}"
            fonts = "Liberation" if fonts else ("the system's; without Liberation (apt-get install fonts-liberation) "
                                                "screenshots differ from those of other machines")
            log.info(f"browser: {self.name}, no network, its sandbox {'on' if sandbox_on else 'off'}, fonts: {fonts}")

    async def stop(self):
        """End the browser and its driver, whatever state they are in."""
        try:
            if self.chromium:
                await with_deadline(5, self.chromium.close())
        except Exception:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)                 # Playwright starts it in a group of its own
        with contextlib.suppress(Exception):
            if self.driver:
                await with_deadline(5, self.driver.stop())
        self.chromium = self.driver = None

    async def alive(self):
        try:
            await with_deadline(3, self.pulse.send("Browser.getVersion"))
            return self.chromium.is_connected()
        except (self.Error, TimeoutError):
            return False

    async def render(self, html, screenshot=True, read=None):
        """The Render of one page; see the class."""
        path = screenshot_path(self.images, html)
        if not screenshot and (path.name, read) in self.specs:
            return self.specs[path.name, read]
        size = len(html.encode("utf-8", "replace"))
        if size > MAX_PAGE_BYTES:
            render = Render(None, None, f"page larger than {MAX_PAGE_BYTES:,} bytes ({size:,})")
        elif not (render := await self.attempt(html, path if screenshot else None, read, 1)):
            async with self.alone:
                render = await self.attempt(html, path if screenshot else None, read, self.concurrency)
            render = render or Render(None, None, "the browser died of it")
        if not screenshot:
            self.specs[path.name, read] = render
        return render

    async def attempt(self, html, path, read, num_tabs):
        """The Render of a page, or None where the whole browser died, perhaps of another page. `num_tabs`: how many
        tabs to hold; with all of them the page is alone."""
        for _ in range(num_tabs):
            await self.free.acquire()
        tab, render, fault = self.tabs.pop(), None, f"not drawn within {MAX_PAGE_S} s"
        try:
            if not tab or tab.chromium is not self.chromium or not self.chromium.is_connected():
                tab = await with_deadline(MAX_PAGE_S, self.new_tab())      # its calls hang where the browser dies
            render = await with_deadline(MAX_PAGE_S, self.draw(tab, html, path, read), tab.crashed)
        except (self.Error, TimeoutError) as error:
            if tab and tab.crashed.done():
                fault = "its process crashed"
            elif re.search("[Cc]ontext (was destroyed|with specified id)|target navigated", str(error)):
                fault = "not drawn: the page replaced itself"
            elif str(error):
                fault = f"not drawn: {one_line(error)}"
        finally:
            if render and tab.busy:
                with contextlib.suppress(self.Error, TimeoutError):
                    await with_deadline(5, self.clear(tab), tab.crashed)
            if tab and (not render or tab.busy):
                await self.close(tab)
                tab = None
            self.tabs.append(tab)
            for _ in range(num_tabs):
                self.free.release()
        if self.error:
            raise self.error
        return render or (Render(None, None, fault) if await self.alive() else None)

    async def new_tab(self):
        """A page in a context, and so a process, of its own."""
        async with self.starting:
            if not await self.alive():
                await self.stop()
                await self.start()
        context = await self.chromium.new_context(
            viewport=VIEWPORT, device_scale_factor=1, locale="en-US", timezone_id="UTC", color_scheme="light",
            service_workers="block", accept_downloads=False)
        tab = types.SimpleNamespace(chromium=self.chromium, context=context, crashed=asyncio.Future())
        await context.add_init_script(PAGE_START)
        await context.route("**/*", lambda route: self.answer(tab, route))
        tab.page = await context.new_page()
        tab.page.on("crash", lambda _: tab.crashed.done() or tab.crashed.set_result(True))
        tab.page.on("websocket", lambda socket: self.refuse(socket.url))
        context.on("page", lambda page: asyncio.ensure_future(self.close(types.SimpleNamespace(context=page))))
        tab.session = await context.new_cdp_session(tab.page)
        await tab.session.send("Animation.enable")
        await tab.session.send("Animation.setPlaybackRate", {"playbackRate": 0})     # animations wait for PAGE_SETTLE
        tab.frame = (await tab.session.send("Page.getFrameTree"))["frameTree"]["frame"]["id"]
        await self.clear(tab)
        return tab

    async def clear(self, tab):
        """Give a tab a new window (100 ms) with a world for our own scripts. Nothing of the last page goes on."""
        await tab.page.goto("about:blank")
        await tab.session.send("Page.resetNavigationHistory")
        reply = await tab.session.send("Page.createIsolatedWorld", {"frameId": tab.frame})
        tab.world, tab.new, tab.busy = reply["executionContextId"], True, False

    async def close(self, tab):
        with contextlib.suppress(self.Error, TimeoutError):
            await with_deadline(5, tab.context.close())

    def refuse(self, url):
        with contextlib.suppress(ValueError):
            self.blocked[urllib.parse.urlsplit(url).hostname or url.partition(":")[0]] += 1

    async def answer(self, tab, route):
        """Answer or refuse one request of a page."""
        url, path, headers = route.request.url, None, {"access-control-allow-origin": "*"}
        try:
            path = local_file(url)
        except ColBenchError as error:
            self.error = error
        with contextlib.suppress(self.Error):                       # the page may be gone
            if path and path.suffix == ".css":
                await route.fulfill(body=style_sheet(path, tab.html), content_type="text/css", headers=headers)
            elif path:
                await route.fulfill(body=path.read_text("utf-8"), content_type="text/javascript", headers=headers)
            elif PHOTO_HOSTS.match(urllib.parse.urlsplit(url).hostname or ""):
                await route.fulfill(body=photo(url), content_type="image/svg+xml", headers=headers)
            else:
                self.refuse(url)
                await route.abort("aborted")                        # for a navigation, too: the page stays where it is

    async def draw(self, tab, html, path, read):
        """The Render of a page in a tab."""
        send = tab.session.send

        async def evaluate(expression):
            reply = await send("Runtime.evaluate", {"expression": expression, "contextId": world, "awaitPromise": True,
                                                    "returnByValue": True})
            if "exceptionDetails" in reply:
                details = reply["exceptionDetails"]
                raise self.Error(details.get("exception", {}).get("description") or details["text"])
            return reply["result"].get("value")

        active = ACTIVE.search(html)
        if active and not tab.new:
            await self.clear(tab)
        world, tab.html, tab.new, tab.busy = tab.world, html, False, bool(active)
        await evaluate(PAGE_LOAD % json.dumps(html))
        for frame in tab.page.frames if tab.busy else []:
            if frame.url:                                           # one that was refused has none, and runs nothing
                await frame.evaluate(f"window.__run && __run({PAGE_CLOCK_MS})")
        await evaluate(PAGE_SETTLE)
        spec = await evaluate(read) if read else None
        size = (await send("Page.getLayoutMetrics"))["cssContentSize"]
        limits = {"width": (VIEWPORT["width"], MAX_WIDTH_PX), "height": (VIEWPORT["height"], MAX_HEIGHT_PX)}
        clip = {name: min(max(size[name], least), most) for name, (least, most) in limits.items()}
        fault = "; ".join(f"{name} {size[name]:,} px cut to {most:,}" for name, (_, most) in limits.items()
                          if size[name] > most) or None
        if path and not path.is_file():
            options = {"format": "png", "captureBeyondViewport": True, "clip": {**clip, "x": 0, "y": 0, "scale": 1}}
            png = base64.b64decode((await send("Page.captureScreenshot", options))["data"])
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f"{path.name}.{os.getpid()}-{id(tab)}.partial")
            partial.write_bytes(with_note(png, fault) if fault else png)
            partial.rename(path)
        return Render(path and str(path), spec, fault)


class BrowserThread:
    """A Browser in a thread of its own, which the first page starts and whose render() any event loop may await: a
    local model that samples keeps its own loop busy, and pages would time out there."""

    def __init__(self, images, path=None):
        self.browser, self.loop, self.thread = Browser(images, path), asyncio.new_event_loop(), None

    def start(self):
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        try:
            self.call(self.browser.__aenter__()).result()
        except BaseException:                                       # no browser is there, say; the next page asks again
            self.stop()
            raise

    def close(self):
        if self.thread:
            self.call(self.browser.__aexit__()).result()
            self.stop()

    def stop(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.thread = None

    def call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    async def render(self, html, screenshot=True, read=None):
        path = screenshot_path(self.browser.images, html)
        if screenshot and not read and path.is_file():
            return stored_render(path)
        if not self.thread:
            self.start()
        return await asyncio.wrap_future(self.call(self.browser.render(html, screenshot, read)))
