"""The published data: ColBench's tasks and trajectories, and WebSight, from the hub (package datasets) or a copy."""
import collections
import hashlib
import json
import pathlib
import re

from colbench import check_keys, ColBenchError, in_split
from colbench.frontend import owns

# The published data set on the hub, and its files.
COLBENCH = "facebook/collaborative_agent_bench"
COLBENCH_TASKS = {"train": "backend_tasks/train.jsonl", "test": "backend_tasks/test.jsonl"}
COLBENCH_TRAJECTORIES = "colbench_code_offline_15k_llama8b.jsonl"

# Web pages on the hub, the one photo that stands for all their images, and its size where an address names none.
WEBSIGHT, WEBSIGHT_CONFIG = "HuggingFaceM4/WebSight", "v0.2"
WEBSIGHT_KEYS = {"text": str, "llm_generated_idea": str}
PHOTO, PHOTO_SIZE = "https://picsum.photos/id/48/{}/{}", ("640", "480")


def published_files(names, copy):
    """Paths of the published files `names` in a local copy (a folder, or one file in their place), or from the hub."""
    if not copy:
        return [download(name, names) for name in names]
    copy = pathlib.Path(copy)
    if copy.is_file():
        return [copy]
    if not copy.is_dir():
        raise ColBenchError(f"{copy}: no such file or folder")
    files = []
    for name in names:
        file = copy / name
        if not file.is_file():
            file = copy / file.name
        if not file.is_file():
            raise ColBenchError(f"{copy}: no {name} in it")
        files.append(file)
    return files


def download(name, names):
    """The path of a file of the hub's data set, from the cache if it is there; `names` are all that are needed. Its
    rows are read as they are: load_dataset would give every row the keys of all others."""
    try:
        from datasets import DownloadManager
        return DownloadManager().download(f"hf://datasets/{COLBENCH}/{name}")
    except Exception as error:                                      # the hub's client raises those of several libraries
        raise ColBenchError(
            f"{COLBENCH}: {name} could not be downloaded ({type(error).__name__}); where the hub can be reached run "
            f'"hf download --repo-type dataset {COLBENCH} {" ".join(names)} --local-dir FOLDER", then pass '
            "--path FOLDER") from None


# ---------------------------------------------------------------------------------------------------------------------
# WebSight: ideas and pages

def websight_tasks(path, split):
    """What becomes of each row of the data set, in its order: (end, task, addresses). end: "kept", or why the task is
    none: "empty", "no page", "of another split", "repeated"; addresses: what one_photo counts."""
    kept_ids = set()
    for where, row in websight_rows(path):
        check_keys(row, {}, where)
        check_keys({key: value or "" for key, value in row.items()}, WEBSIGHT_KEYS, where)
        html, idea = ((row[key] or "").strip() for key in WEBSIGHT_KEYS)
        addresses = collections.Counter()
        html = one_photo(html, addresses)
        name = hashlib.sha256(html.encode(errors="replace")).hexdigest()[:16]
        task = {"task_id": name, "problem_description": idea, "ground_truth": html}
        end = websight_end(task, split, kept_ids)
        if end == "kept":
            kept_ids.add(name)
        yield end, task, addresses


def websight_end(task, split, kept_ids):
    """What becomes of a task, where those of `kept_ids` are there already."""
    if not task["ground_truth"] or not task["problem_description"]:
        return "empty"
    if not owns(task):
        return "no page"
    if not in_split(task["task_id"], split):
        return "of another split"
    return "repeated" if task["task_id"] in kept_ids else "kept"


def websight_rows(path):
    """(where it stands, row) of all rows of the data set, one after the other: of the hub's, or of a local copy (a
    parquet or JSONL file or a folder of parquet files), which may be larger than the memory."""
    if not path:
        fault = ("could not be read from the hub; where it can be reached, run \"hf download --repo-type dataset "
                 f'{WEBSIGHT} --include "{WEBSIGHT_CONFIG}/*" --local-dir FOLDER", then pass '
                 f"--path FOLDER/{WEBSIGHT_CONFIG}")
        yield from enumerate_rows(WEBSIGHT, fault, WEBSIGHT, WEBSIGHT_CONFIG)
        return
    for file in websight_files(path):
        if file.suffix == ".parquet":
            yield from enumerate_rows(file, "no parquet file", "parquet", data_files=str(file))
        else:
            yield from jsonl_rows(file)


def enumerate_rows(where, fault, *source, **options):
    try:
        import datasets
        rows = datasets.load_dataset(*source, **options, split="train", streaming=True)
        keys = [key for key in WEBSIGHT_KEYS if rows.column_names is None or key in rows.column_names]
        for number, row in enumerate(rows.select_columns(keys), 1):
            yield f"{where}:{number}", row
    except Exception as error:                                      # the library raises those of several others
        raise ColBenchError(f"{where}: {fault} ({type(error).__name__})") from None


def jsonl_rows(path):
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield f"{path}:{number}", json.loads(line)
                except (ValueError, RecursionError) as error:       # UnicodeDecodeError is one, too
                    raise ColBenchError(f"{path}:{number}: not JSON ({type(error).__name__})") from None


def websight_files(path):
    """The files of a local copy, in the order of their names."""
    if not path:
        return []
    path = pathlib.Path(path)
    if not path.exists():
        raise ColBenchError(f"{path}: no such file or folder")
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise ColBenchError(f"{path}: no .parquet files in it")
    return files


SIZE_IN_PATH = r"(?<![\w.-])([1-9]\d{1,3})(?:x|/(?=[2-9]\d|\d{3}))([1-9]\d{1,3})(?![\w-])"
SIZE_IN_QUERY = r"\bw=(\d+)\b.*\bh=(\d+)\b"
SQUARE = r"([1-9]\d{1,3})/?(?=$|[?.])"


def photo_size(address):
    """(width, height) that the address of an image asks for, as texts, or None: /300x200, /300/200 (but not a year and
    a month), ?w=300&h=200, or /300 as the whole path for a square."""
    path = re.sub(r"^(https?:)?//[^/]*/(id/\d+/)?", "", address)
    pair = re.search(SIZE_IN_PATH, path) or re.search(SIZE_IN_QUERY, path)
    if pair:
        return pair.groups()
    square = re.match(SQUARE, path)
    return (square[1], square[1]) if square else None


def tag_size(tag):
    """(width, height) that the tag of an image gives, as texts, or None."""
    width, height = (re.search(rf"""\s{side}=["']?(\d+)(?:px)?["'\s>/]""", tag) for side in ("width", "height"))
    return (width[1], height[1]) if width and height else None


def one_photo(html, counts):
    """A page whose images from the net are all PHOTO, in the size that the address asks for, or else the tag, or else
    PHOTO_SIZE; `counts` counts them by host, and at "" those without a size."""
    def photo(address, tag=""):
        size = photo_size(address) or tag_size(tag)
        host = address.split("//", 1)[1].split("/")[0]
        counts[host] += 1
        counts[""] += not size
        return PHOTO.format(*(size or PHOTO_SIZE))

    def in_tag(tag):
        return re.sub(r"""(\ssrc=["']?)((?:https?:)?//[^"'\s>]+)""", lambda src: src[1] + photo(src[2], tag[0]), tag[0])

    def in_style(url):
        begin, address = url.groups()
        is_style_or_font = re.search(r"\.(css|woff2?|ttf|otf)\b|//fonts\.", address)
        return url[0] if is_style_or_font else begin + photo(address)

    html = re.sub(r"<img\b[^>]*>", in_tag, html, flags=re.IGNORECASE)
    quote = "[\"']|&quot;|&#39;"
    return re.sub(rf"(\burl\(\s*(?:{quote})?)((?:https?:)?//[^)\s]+?)(?=\)|\s|{quote})", in_style, html)
