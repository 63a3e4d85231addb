"""The published data: ColBench's tasks and trajectories, and WebSight, from the hub (package datasets) or a copy."""
import hashlib
import pathlib
import re

from colbench import frontend, in_split
from colbench.browser import photo_size
from colbench.schema import InputError

# The published data set on the hub, and its files.
COLBENCH = "facebook/collaborative_agent_bench"
COLBENCH_TASKS = {"train": "backend_tasks/train.jsonl", "test": "backend_tasks/test.jsonl"}
COLBENCH_TRAJECTORIES = "colbench_code_offline_15k_llama8b.jsonl"

# Web pages on the hub, the one photo that stands for all their images, and its size where an address names none.
WEBSIGHT, WEBSIGHT_CONFIG = "HuggingFaceM4/WebSight", "v0.2"
WEBSIGHT_KEYS = ["text", "llm_generated_idea"]
PHOTO, PHOTO_SIZE = "https://picsum.photos/id/48/{}/{}", ("640", "480")


def existing(path):
    """The path that the user gave. Raises InputError if it does not exist."""
    if not pathlib.Path(path).exists():
        raise InputError(f"{path}: no such file or folder")
    return pathlib.Path(path)


def published_files(names, copy):
    """Paths of the published files `names` in a local copy (a folder, or one file in their place), or from the hub."""
    if not copy:
        return [download(name, names) for name in names]
    copy = existing(copy)
    if copy.is_file():
        return [copy]
    files = []
    for name in map(pathlib.Path, names):
        file = next(filter(pathlib.Path.is_file, (copy / name, copy / name.name)), None)
        if not file:
            raise InputError(f"{copy}: no {name} in it")
        files.append(file)
    return files


def download(name, names):
    """The path of a file of the hub's data set, from the cache if possible; `names` are all needed files. Its rows are
    read unchanged: load_dataset would give every row the keys of all others."""
    try:
        from datasets import DownloadManager
        return DownloadManager().download(f"hf://datasets/{COLBENCH}/{name}")
    except Exception as error:                                      # the hub's client raises those of several libraries
        raise InputError(
            f"{COLBENCH}: {name} could not be downloaded ({type(error).__name__}); where the hub can be reached run "
            f'"hf download --repo-type dataset {COLBENCH} {" ".join(names)} --local-dir FOLDER", then pass '
            "--path FOLDER") from None


# ---------------------------------------------------------------------------------------------------------------------
# WebSight: ideas and pages

def websight_tasks(path, split):
    """(end, task) for each row of the data set, in its order. end: "kept", or why the row gives no task: "empty",
    "no page", "of another split", "repeated"."""
    ids = set()
    for row in websight_rows(path):
        html, idea = ((row.get(key) or "").strip() for key in WEBSIGHT_KEYS)
        html = one_photo(html)
        name = hashlib.sha256(html.encode(errors="replace")).hexdigest()[:16]
        task = {"task_id": name, "problem_description": idea, "ground_truth": html}
        if not html or not idea:
            end = "empty"
        elif not frontend.owns(task):
            end = "no page"
        elif not in_split(name, split):
            end = "of another split"
        else:
            end = "repeated" if name in ids else "kept"
            ids.add(name)
        yield end, task


def websight_rows(path):
    """Yield all rows of the data set, from the hub or from a local copy: a parquet or JSONL file, or a folder of
    parquet files. The copy may be larger than the memory."""
    source, options = WEBSIGHT, {"name": WEBSIGHT_CONFIG}
    if path:
        files = list(map(str, websight_files(path)))
        source, options = "parquet" if files[0].endswith(".parquet") else "json", {"data_files": files}
    try:
        import datasets
        rows = datasets.load_dataset(source, **options, split="train", streaming=True)
        yield from rows.select_columns(WEBSIGHT_KEYS)               # not the screenshots
    except Exception as error:                                      # the library raises those of several others
        raise InputError(
            f"{path or WEBSIGHT}: cannot be read ({type(error).__name__}); where the hub can be reached, run "
            f'"hf download --repo-type dataset {WEBSIGHT} --include "{WEBSIGHT_CONFIG}/*" --local-dir FOLDER", then '
            f"pass --path FOLDER/{WEBSIGHT_CONFIG}") from None


def websight_files(path):
    """The files of a local copy, in the order of their names."""
    if not path:
        return []
    path = existing(path)
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise InputError(f"{path}: no .parquet files in it")
    return files


def tag_size(tag):
    """(width, height) in the tag of an image, as texts, or None."""
    width, height = (re.search(rf"""\s{side}=["']?(\d+)(?:px)?["'\s>/]""", tag) for side in ("width", "height"))
    return (width[1], height[1]) if width and height else None


def one_photo(html):
    """A page whose images from the net are all PHOTO, in the size that the address asks for, or else the tag, or else
    PHOTO_SIZE."""
    def photo(address, tag=""):
        return PHOTO.format(*(photo_size(address) or tag_size(tag) or PHOTO_SIZE))

    def in_tag(tag):
        return re.sub(r"""(\ssrc=["']?)((?:https?:)?//[^"'\s>]+)""", lambda src: src[1] + photo(src[2], tag[0]), tag[0])

    def in_style(url):
        begin, address = url.groups()
        is_style_or_font = re.search(r"\.(css|woff2?|ttf|otf)\b|//fonts\.", address)
        return url[0] if is_style_or_font else begin + photo(address)

    html = re.sub(r"<img\b[^>]*>", in_tag, html, flags=re.IGNORECASE)
    quote = "[\"']|&quot;|&#39;"
    return re.sub(rf"(\burl\(\s*(?:{quote})?)((?:https?:)?//[^)\s]+?)(?=\)|\s|{quote})", in_style, html)
