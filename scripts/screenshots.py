"""Two pictures of a report page, for README: python scripts/screenshots.py out/report/report.html [--out docs]

Writes report_first.png (the first screen) and report_dialogue.png (a dialogue with its turns' credit), at most 150 KB
each. Without --dialogue it takes the dialogue of the last method that has credit, at least five rounds and the
largest difference between two of its turns."""
import argparse
import io
import pathlib
import shutil
import sys

MAX_BYTES = 150_000
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SIZE = {"width": 1180, "height": 760}
# the number of the dialogue described above, of the data in the page; null: none has credit
CHOOSE = """() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  let best = null, most = -1;
  data.dialogues.forEach((dialogue, number) => {
    const credits = dialogue.turns.map(turn => turn.credit).filter(credit => credit !== undefined);
    const range = Math.max(...credits) - Math.min(...credits);
    if (dialogue.m === data.methods.length - 1 && credits.length >= 5 && range > most) [best, most] = [number, range];
  });
  return best;
}"""


def save(png, path):
    """Writes the picture with as many colours (256 at most) as fit into MAX_BYTES."""
    from PIL import Image
    image = Image.open(io.BytesIO(png)).convert("RGB")
    for colors in (256, 128, 64, 32, 16):
        image.quantize(colors, dither=Image.Dither.NONE).save(data := io.BytesIO(), "PNG", optimize=True)
        if data.tell() <= MAX_BYTES:
            break
    else:
        sys.exit(f"{path}: more than {MAX_BYTES:,} bytes with 16 colours")
    path.write_bytes(data.getvalue())
    print(f"writes {path} ({data.tell():,} bytes, {colors} colours)")


def main(argv=None):
    from playwright.sync_api import sync_playwright
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=pathlib.Path, help="report.html of 05_evaluate.py")
    parser.add_argument("--out", type=pathlib.Path, default="docs", help="folder of the two pictures")
    parser.add_argument("--dialogue", type=int, metavar="N", help="its number in the page (#d=N)")
    args = parser.parse_args(argv)
    if not args.report.exists():
        parser.error(f"{args.report}: no such file")
    with sync_playwright() as driver:
        path = next(filter(None, map(shutil.which, BROWSERS)), None)
        browser = driver.chromium.launch(executable_path=path)
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.goto(args.report.resolve().as_uri())
        first = page.screenshot()
        number = page.evaluate(CHOOSE) if args.dialogue is None else args.dialogue
        if number is None:
            parser.error(f"{args.report}: no dialogue of the last method has five turns with credit: see 05 --critic")
        page.goto(f"{args.report.resolve().as_uri()}#d={number}")
        page.wait_for_selector("#dialogue-title", state="visible", timeout=10_000)
        page.locator("#dialogue-title").evaluate("title => scrollBy(0, title.getBoundingClientRect().top - 60)")
        second = page.screenshot()
        browser.close()
    args.out.mkdir(parents=True, exist_ok=True)
    save(first, args.out / "report_first.png")
    save(second, args.out / "report_dialogue.png")


if __name__ == "__main__":
    main()
