"""Pages a second and per second of processor time (Chromium's processes, Playwright's driver and this one together),
with and without pictures, and the memory of all processes at the end.

    python tests/bench_browser.py [--pages 40] [--concurrency 2] [--browser PATH]

Two kinds of pages, all different: a small one, as the template tasks have, and one in the manner of WebSight, with
Tailwind 2.2.19 and photos."""
import argparse
import asyncio
import os
import pathlib
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from colbench.browser import Browser  # noqa: E402

SMALL = """<!DOCTYPE html><html><head><style>body {{margin: 0; font-family: sans-serif}} .head {{background: #{0:06x};
color: white; padding: 40px}} .card {{border: 1px solid #ccc; border-radius: 8px; padding: 20px; margin: 20px;
float: left; width: 240px}}</style></head><body><div class="head"><h1>Shop {0}</h1><button>Order</button></div>
<div class="card">One</div><div class="card">Two</div><div class="card">Three</div></body></html>"""
TAILWIND = """<html><link href="https://cdn.jsdelivr.net/npm/tailwindcss@2.2.19/dist/tailwind.min.css" rel="stylesheet">
<body class="bg-gray-100"><header class="bg-white p-4 shadow-md"><h1 class="text-2xl font-bold">Company {0}</h1>
</header><div class="container mx-auto px-4 py-8 grid md:grid-cols-3 gap-4"><div class="bg-white rounded-lg shadow p-6">
<img src="https://picsum.photos/id/48/300/200" class="w-full"><h2 class="text-xl">First</h2><p
class="text-gray-700">Some text of this card.</p></div><div class="bg-white rounded-lg shadow p-6"><p>Second</p></div>
</div><footer class="bg-gray-800 text-white p-4 text-center">&copy; {0}</footer></body></html>"""


def processes():
    """(seconds of processor time, MiB of memory, each page of it counted once) of this process and all below it."""
    stats, seconds, memory = {}, 0, 0
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            stats[int(path.parent.name)] = path.read_text().rpartition(")")[2].split()
        except OSError:
            pass
    mine = {os.getpid()}
    while more := {pid for pid, stat in stats.items() if int(stat[1]) in mine} - mine:
        mine |= more
    for pid in mine:
        seconds += sum(map(int, stats[pid][11:15])) / os.sysconf("SC_CLK_TCK")      # its own and its ended children's
        try:
            memory += int(pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().split("Pss:")[1].split()[0]) / 1024
        except OSError:
            pass
    return seconds, memory


async def measure(args, name, page, picture):
    with tempfile.TemporaryDirectory() as folder:
        async with Browser(folder, args.browser, args.concurrency) as browser:
            await asyncio.gather(*[browser.render(page.format(10 ** 6 + number)) for number in range(args.concurrency)])
            _, before = processes()
            begin, (cpu, _) = time.perf_counter(), processes()
            renders = await asyncio.gather(*[browser.render(page.format(number), picture, read=None if picture else "1")
                                             for number in range(args.pages)])
            wall, (after, memory) = time.perf_counter() - begin, processes()
            assert not any(render.fault for render in renders)
            print(f"{name:9s} {'pictures' if picture else 'no picture':10s} {args.pages / wall:6.1f} pages/s "
                  f"{args.pages / (after - cpu):6.1f} pages/s of one core   {before:,.0f} MiB -> {memory:,.0f} MiB",
                  flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=40)
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--browser", metavar="PATH", help="Chromium or Chrome (None: the first one found)")
    args = parser.parse_args()
    for name, page in (("small", SMALL), ("tailwind", TAILWIND)):
        for picture in (True, False):
            asyncio.run(measure(args, name, page, picture))


if __name__ == "__main__":
    main()
