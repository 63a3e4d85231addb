"""Pages in a real Chromium: the same bytes whenever, after and beside whatever they are drawn, hostile pages, a browser
that dies, what answers the addresses of Tailwind and of photos."""
import asyncio
import contextlib
import json
import os
import pathlib
import select
import signal
import socket
import sys
import threading
import time
import types

import pytest

import colbench.browser as renderer
from colbench import InputError, published
from colbench.browser import Browser, PAGE_START, Render, screenshot_path

PAGES = pathlib.Path(__file__).parent / "pages"
MOVING, REACH, RTC, LEAVE, FIND, CLASSES = (
    (PAGES / f"{name}.html").read_text() for name in ("moving", "reach", "rtc", "leave", "find", "classes"))
GIVEN = json.loads((PAGES / "pages.json").read_text())                # [page, its fault], [page, its text]
pytest.importorskip("playwright", reason="no playwright: pip install -r scripts/frontend.txt")
PLAIN = "<!DOCTYPE html><body style='margin:0;background:rgb(10,20,30)'><h1>A shop</h1><p>Texts, <b>fat</b>, " \
        "<code>fixed</code></p>"


@pytest.fixture(scope="module")
def listener():
    """Sockets on loopback, TCP and UDP with one port number; heard() are those that something comes in at."""
    tcp = socket.create_server(("127.0.0.1", 0))
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(tcp.getsockname())

    def heard():
        return select.select([tcp, udp], [], [], 0.3)[0]

    socket.create_connection(tcp.getsockname()).close()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.sendto(b"probe", tcp.getsockname())
    assert heard() == [tcp, udp]                                    # so that its silence means something
    tcp.accept()[0].close()
    udp.recv(9)
    return types.SimpleNamespace(port=tcp.getsockname()[1], heard=heard)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A Browser with a single tab, so that each page follows another on the same tab."""
    browser = Browser(tmp_path_factory.mktemp("images"), num_tabs=1)
    yield browser
    browser.close()


def render(browser, html, **options):
    return asyncio.run(browser.render(html, **options))


def value(browser, html, read):
    """What JavaScript reads on the page, which is drawn anew; there must be no fault."""
    browser.specs.clear()
    image, spec, fault = render(browser, html, screenshot=False, read=read)
    assert (image, fault) == (None, None)
    return spec


def draw(browser, html, read=None):
    """(bytes of the screenshot, spec, fault), drawn anew."""
    screenshot_path(browser.images, html).unlink(missing_ok=True)
    image, spec, fault = render(browser, html, read=read)
    return pathlib.Path(image).read_bytes(), spec, fault


def forget_tab(browser):
    """The next page gets a new tab, which is a process of its own."""
    if browser.tabs[0]:
        browser.call(browser.close_part(browser.tabs[0].context)).result()
        browser.tabs[0] = None


TAILWIND_FILES = pathlib.Path(sys.prefix, "tailwind")
needs_tailwind = pytest.mark.skipif(not TAILWIND_FILES.exists(), reason="bash tests/run.sh fetches it where npm is")


def picture(path):
    from PIL import Image
    return Image.open(path).convert("RGB")


# --- pictures

def test_a_picture(browser):
    result = render(browser, PLAIN)
    assert result == Render(str(screenshot_path(browser.images, PLAIN)), None, None)
    assert picture(result.image).size == (1280, 720) and picture(result.image).getpixel((1200, 700)) == (10, 20, 30)
    assert len(pathlib.Path(result.image).stem) == 16
    assert [path for path in browser.images.iterdir() if path.suffix != ".png"] == []
    for width, height, size in ((1500, 1000, (1500, 1000)), (9000, 200_000, (2560, 8192))):
        large = render(browser, f"<body style='margin:0'><div style='height:{height}px;width:{width}px'>")
        assert picture(large.image).size == size and large.fault is None
    assert render(Browser(browser.images, "/no/browser/is/needed"), PLAIN) == result           # it is there
    assert render(browser, "é" * 1_000_001) == Render(None, None, "page larger than 2,000,000 bytes (2,000,002)")
    assert render(browser, "<p>lone \ud800 surrogate").fault is None and render(browser, "").fault is None


def test_read(browser):
    assert value(browser, "<p id=a>two <b>words", "({text: a.innerText, list: [1, null]})") == {
        "text": "two words", "list": [1, None]}
    # what a page does to its own JavaScript does not reach what is read
    page = "<p id=a>one<script>Element.prototype.getBoundingClientRect = () => ({height: 1}); " \
           "JSON.stringify = 0; Promise = 0</script>"
    assert value(browser, page, "a.getBoundingClientRect().height > 10") is True
    assert "boom" in render(browser, "<p>", screenshot=False, read="(() => { throw new Error('boom') })()").fault
    for harmless, text in GIVEN["harmless"]:                        # pages that act, and come to rest
        assert "".join(value(browser, harmless, "document.body.innerText").split()) == text


def test_same_bytes(browser, tmp_path):
    """Again on the same tab, and beside others in another browser; animations stand at their end, clocks at 2 s."""
    gradient = "<body style='background:linear-gradient(red,blue);height:3000px;font-size:30px'>ff fi é €" * 5
    pages = [PLAIN, MOVING, gradient]
    first = [draw(browser, page) for page in pages]
    assert [draw(browser, page) for page in pages] == first
    other = Browser(tmp_path)

    async def draw_all():
        return await asyncio.gather(*map(other.render, ["<h1>other", *pages, "<h1>last"]))
    renders = asyncio.run(draw_all())
    other.close()
    assert [(pathlib.Path(result.image).read_bytes(), None, None) for result in renders[1:4]] == first
    assert len({result.image for result in renders}) == 5
    margins = "[...document.querySelectorAll('div')].map(x => getComputedStyle(x).marginLeft)"
    margins, text, at_end, bar = value(browser, MOVING, f"[{margins}, e.textContent, s.scrollTop > 700, b.position]")
    assert margins == ["300px", "0px", "200px", "100px"] and at_end and bar == 0
    assert text.startswith("Wed Jan 01 2025 12:00:00 GMT+0000 (Coordinated Universal Time),Wed Jan 01 2025 12:00:00")
    assert ",1735732800000,0,0.36925" in text and text.endswith(" text0 1 2 3 late 4 5 6")
    scrolled = ("<style>@keyframes go {to {margin-left: 90px}} p {animation: go linear; animation-timeline: scroll()}"
                "</style><p id=a>a<div style='height: 9000px'>")
    assert value(browser, scrolled, "[getComputedStyle(a).marginLeft, document.getAnimations().length]") == ["90px", 0]


PARTS = "<style>body {margin: 0} p {height: 900px; margin: 0; opacity: 0; background: red; transition: 1s} .on " \
        "{opacity: 1}</style>" + 5 * "<p></p>" + "<script>const parts = document.querySelectorAll('p'); %s</script>"
OBSERVE = "const o = new IntersectionObserver(all => all.forEach(e => %s)); parts.forEach(part => o.observe(part))"


@pytest.mark.parametrize("script", [
    OBSERVE % "e.isIntersecting && e.target.classList.add('on')",
    OBSERVE % "e.target.classList.toggle('on', e.isIntersecting)",             # it leaves, too
    OBSERVE % "e.isIntersecting && setTimeout(() => e.target.classList.add('on'), 300)",
    "onscroll = () => parts.forEach(p => p.getBoundingClientRect().top < 720 && p.classList.add('on')); onscroll()"])
def test_what_appears_when_it_is_scrolled_to_is_shown(browser, script):
    image, place, fault = render(browser, PARTS % script, read="scrollY")
    image = picture(image)
    assert (fault, place, image.size) == (None, 0, (1280, 4500))
    assert [image.getpixel((600, top)) for top in range(450, 4500, 900)] == 5 * [(255, 0, 0)]


def test_a_page_that_grows_when_it_is_scrolled_ends(browser):
    grow = "onscroll = () => { for (let i = 0; i < 9; i++) document.body.append(document.createElement('p')) }"
    assert picture(render(browser, PARTS % grow).image).size == (1280, 8192)


# Each page that could leave something in the window stands before one that would show it: the colours of links, the
# style sheet that a title chose, colour scheme, fonts and rules by name, direction, sizes, quirks, form fields,
# pictures and sheets in the cache, what was visited, what moves.
SEQUENCE = (PAGES / "sequence.txt").read_text().removesuffix("\n").split("\n----\n")
SHEET = [f"<style>@\\69mport 'https://unpkg.com/tailwindcss@2.2.19/dist/tailwind.min.css'</style><p class={name}>a"
         for name in ("p-4", "pl-8")]


def test_no_page_changes_the_next(browser):
    """One after the other on one tab, pages give the bytes and specs that each gives in a process of its own."""
    pages = SEQUENCE + (SHEET if TAILWIND_FILES.exists() else [])
    read = (PAGES / "layout.js").read_text()
    in_turn = [draw(browser, page, read) for page in pages]
    images, _, faults = zip(*in_turn)
    assert {*faults} == {None} and len({*images}) > len(pages) - 3
    for number in (1, 3, 5, 7, *range(8, len(pages), 2)):           # what would show what the page before has left
        forget_tab(browser)
        assert draw(browser, pages[number], read) == in_turn[number], pages[number]


def test_fonts(browser):
    if not renderer.write_fonts(os.environ.get("TMPDIR", "/tmp")):
        pytest.skip("no Liberation fonts: apt-get install fonts-liberation")
    widths = value(browser, "<p>", (PAGES / "widths.js").read_text())                            # of "Wim" at 100 px
    # 944 + 222 + 833 thousandths; 944 + 278 + 778, less 40 between W and i; 3 of 600
    assert [round(width) for width in widths] == [200, 200, 200, 196, 196, 180, 180]


# --- addresses

@pytest.mark.parametrize("address, size", [
    ("https://picsum.photos/id/48/300/200", "300x200"), ("https://picsum.photos/seed/a7/40/30.jpg?blur", "40x30"),
    ("https://picsum.photos/250", "250x250"), ("https://source.unsplash.com/random/640x480?sea", "640x480"),
    ("https://source.unsplash.com/random/300x200/?bakery,tea", "300x200"),
    ("https://source.unsplash.com/random", None), ("https://via.placeholder.com/150", "150x150"),
    ("https://via.placeholder.com/350x65/FF0000/FFFFFF?text=9x9", "350x65"),
    ("//placehold.co/600x400.png?text=Tea", "600x400"), ("https://loremflickr.com/320/240/dog", "320x240"),
    ("https://dummyimage.com/600x400/000/fff", "600x400"), ("https://a.com/photo-12-34?w=50&amp;h=40", "50x40"),
    ("https://source.unsplash.com/random/?sea", None), ("https://a.com/2020/05/x.jpg", None)])
def test_photo_sizes(address, size):
    """The size that an address asks for, in what the browser draws there, and in a page of WebSight."""
    asked = renderer.photo_size(address)
    assert (asked and "x".join(asked)) == size
    width, height = asked or ("1080", "720")
    answer = renderer.local_answer(address, "")
    assert "//a.com" in address if answer is None else f'width="{width}" height="{height}"' in answer["body"]
    width, height = asked or ("640", "480")
    photo = f"https://picsum.photos/id/48/{width}/{height}"
    page = '<img class="a" src="{0}"><p style="background: url({0})"></p><style>a {{background: url(\'{0}\')}}</style>'
    assert published.one_photo(page.format(address)) == page.format(photo)
    assert published.one_photo(page.format(photo)) == page.format(photo)


def test_a_long_address_is_read_at_once():
    begin = time.process_time()                                     # a page has 2 MB for it; once it took hours
    assert renderer.photo_size("https://picsum.photos/?" + "w=1&" * 30_000) is None
    assert renderer.photo_size("https://picsum.photos/?" + "w=1&" * 30_000 + "h=2") == ("1", "2")
    assert time.process_time() - begin < 5


def test_photos(browser):
    page = "<style>* {margin:0; display:block}</style><img src=https://picsum.photos/id/48/300/200>" \
           "<img style='margin-top:3000px' loading=lazy src=https://placehold.co/60x40>"
    sizes = "[...document.images].map(i => [i.naturalWidth, i.naturalHeight])"
    image, spec, _ = render(browser, page, read=sizes)
    assert spec == [[300, 200], [60, 40]] and picture(image).getpixel((150, 100)) == (187, 187, 187)


TAILWIND = ['<link rel="stylesheet" href="https://cdn.jsdelivr.net/npm/tailwindcss@2.2.19/dist/tailwind.min.css">',
            '<script src="https://cdn.tailwindcss.com"></script>',
            '<script src="https://cdn.jsdelivr.net/npm/@tailwindcss/browser@4"></script>']


@needs_tailwind
@pytest.mark.parametrize("head", TAILWIND, ids=range(2, 5))
def test_tailwind(browser, head):
    page = f"<!DOCTYPE html><head>{head}</head><body><h1 class='p-4 md:w-1/2'>A</h1><p id=a></p><script>" \
           "setTimeout(() => { a.className = 'pl' + '-6' }, 500)</script>"
    looks = "[...document.querySelectorAll('h1, p')].map(x => [getComputedStyle(x).paddingLeft, x.offsetWidth])"
    assert value(browser, page, looks) == [["16px", 640], ["24px", 1280]]


STYLE_2, CDN_3 = "tailwindcss-2.2.19/dist/tailwind.min.css", "tailwindcss-cdn-3.4.10/tailwindcss"


@needs_tailwind
@pytest.mark.parametrize("url, name", [
    ("https://unpkg.com/tailwindcss@^2/dist/tailwind.min.css", STYLE_2),
    ("https://cdnjs.cloudflare.com/ajax/libs/tailwindcss/2.0.2/tailwind.min.css", STYLE_2),
    ("https://cdn.tailwindcss.com/3.4.1", f"{CDN_3}.js"),
    ("https://cdn.tailwindcss.com?plugins=forms", f"{CDN_3}-with-all-plugins.js"),
    ("https://cdn.tailwindcss.com/4.0.0", None),
    ("https://unpkg.com/tailwindcss@3/dist/tailwind.min.css", None), ("https://cdn.tailwindcss.com.evil.org", None)])
def test_addresses_of_tailwind(url, name):
    answer = renderer.local_answer(url, "<script>")
    assert (answer and answer["body"]) == (name and (TAILWIND_FILES / name).read_text())


@needs_tailwind
def test_rules_left_out(browser, monkeypatch):
    """A page without scripts gets the rules for its own classes alone, and looks as with all of them."""
    path = TAILWIND_FILES / STYLE_2
    assert 6_000 < len(renderer.style_sheet(path, CLASSES)) < 7_000
    assert len(renderer.style_sheet(path, CLASSES + "<script>")) == path.stat().st_size == 2_934_019
    assert "".join(text for text, _ in renderer.style_rules(path)) == path.read_text()
    result = draw(browser, CLASSES)
    monkeypatch.setattr(renderer, "style_sheet", lambda path, page: path.read_text())
    assert draw(browser, CLASSES) == result


def test_tailwind_missing(browser, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(InputError, match="bash tests/run.sh"):
        render(browser, TAILWIND[0])
    browser.error = None


# --- hostile pages: they reach nothing, and the next page is drawn

def test_reaches_nothing(browser, listener, monkeypatch):
    refused, answer = [], browser.answer

    async def counted(tab, route):
        refused.append(route.request.url)
        await answer(tab, route)
    monkeypatch.setattr(browser, "answer", counted)
    leaves, once = REACH.replace("AT", f"127.0.0.1:{listener.port}"), "for (const name in tries)"
    assert once in leaves
    stays = leaves.replace(once, f"{once} if (!/click|download|form|leave/.test(name))")
    result = render(browser, stays, read="out.textContent")
    assert result.fault is None and result.spec == "" and picture(result.image).size[0] == 1280
    monkeypatch.setattr(renderer, "MAX_PAGE_S", 3)                    # no load event comes while a page tries to leave
    assert render(browser, leaves).image is None
    monkeypatch.setattr(renderer, "MAX_PAGE_S", 10)
    assert render(browser, PLAIN, read="document.querySelector('h1').innerText").spec == "A shop"
    assert listener.heard() == []
    assert len([url for url in refused if f"127.0.0.1:{listener.port}" in url]) > 15
    assert len(browser.chromium.contexts) == 1 and len(browser.chromium.contexts[0].pages) == 1


def test_second_wall(browser, listener, monkeypatch):
    """With all requests let through, the browser itself still reaches nothing."""
    async def let_through(tab, route):
        with contextlib.suppress(browser.Error):
            await route.continue_()
    monkeypatch.setattr(browser, "answer", let_through)
    monkeypatch.setattr(renderer, "MAX_PAGE_S", 3)
    for wall in ("RTCPeerConnection: undefined, webkitRTCPeerConnection: undefined,", "open: () => null, "):
        assert wall in PAGE_START
        monkeypatch.setattr(renderer, "PAGE_START", renderer.PAGE_START.replace(wall, ""))
    forget_tab(browser)                                             # the next one starts without these walls
    for host in ("127.0.0.1", "localhost"):
        for page in (REACH, RTC):
            render(browser, page.replace("AT", f"{host}:{listener.port}"), screenshot=False,
                   read="new Promise(done => setTimeout(done, 500))")
    assert render(browser, "<p>alive", read="document.body.innerText").spec == "alive"
    forget_tab(browser)
    assert listener.heard() == []


@pytest.mark.parametrize("page, fault", GIVEN["faults"])
def test_faults(browser, monkeypatch, page, fault):
    limit = float(fault.split()[-2]) if "within" in fault else 10
    monkeypatch.setattr(renderer, "MAX_PAGE_S", limit)
    assert render(browser, page) == Render(None, None, fault)
    monkeypatch.setattr(renderer, "MAX_PAGE_S", 10)
    assert render(browser, "<p>next", read="document.body.innerText").spec == "next"


def test_nothing_is_left_behind_and_nothing_goes_on(browser):
    found = value(browser, LEAVE + FIND, "a.textContent")           # on one page, so that its silence means something
    assert set(found.split(",")) == {                               # cookies are denied to every page
        "channel", "global1", "namemark", "array1", "document1", "local1", "titlemark", "session1", "historytrue",
        "statemark", "hash#mark", "scroll4330"}
    assert value(browser, FIND, "a.textContent") == ""
    for _ in range(2):
        value(browser, LEAVE, "1")
        assert value(browser, FIND, "a.textContent") == ""
    assert browser.call(browser.chromium.contexts[0].cookies()).result() == []
    # a page that acts is gone as soon as it is drawn
    assert value(browser, "<p>a<script>onload = () => { (function f() { fetch('data:,').then(f) })() }</script>",
                 "document.body.innerText") == "a"
    assert browser.call(browser.tabs[0].page.evaluate("document.body.innerHTML")).result() == ""


# --- a browser that dies, or is not there

def test_killed(tmp_path):
    """The pages in flight when the browser dies are drawn again; one that it dies of each time is a fault."""
    slow = "<p>{}<script>for (const t = new Event('').timeStamp; new Event('').timeStamp - t < 300;);</script>"
    browser = Browser(tmp_path)

    async def faults_of(*pages):
        return [render.fault for render in await asyncio.gather(*map(browser.render, pages))]

    async def draw_all():
        await browser.render("first")
        first, draw_page = browser.pid, browser.draw
        tasks = asyncio.create_task(faults_of(*map(slow.format, range(3))))
        await asyncio.sleep(0.5)
        os.kill(first, signal.SIGKILL)
        assert await tasks == [None] * 3
        assert browser.pid != first
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)

        async def deadly(tab, html, *options):
            if html == "deadly":
                os.kill(browser.pid, signal.SIGKILL)
            return await draw_page(tab, html, *options)
        browser.draw = deadly
        assert await faults_of(slow.format(8), "deadly", PLAIN) == [None, "the browser died of it", None]
    asyncio.run(draw_all())
    browser.close()
    assert [path.suffix for path in tmp_path.iterdir()] == [".png"] * 6


@pytest.mark.parametrize("path, missing, line, pages", [
    ("/nowhere/chromium", (), "--browser /nowhere/chromium: no such program", (PLAIN, "another")),
    ("/bin/false", (), "/bin/false: does not start", [PLAIN]), (None, (), "apt-get install chromium", [PLAIN]),
    (None, "playwright.async_api", "pip install -r scripts/frontend.txt", (PLAIN, "another"))], ids=range(4))
def test_no_browser(path, missing, line, pages, tmp_path, monkeypatch, capfd):
    """It is said to each page, as those in flight each ask for their first one, and leaves no thread."""
    monkeypatch.setattr(renderer, "BROWSERS", ())
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path))
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)
    browser, num_threads = Browser(tmp_path, path), threading.active_count()
    for page in pages:
        with pytest.raises(InputError, match=line):
            asyncio.run(browser.render(page))
    browser.close()
    deadline = time.monotonic() + 60
    while threading.active_count() > num_threads:                   # asyncio waits for the end of the driver in one
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert capfd.readouterr().err == ""
