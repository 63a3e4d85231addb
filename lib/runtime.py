"""What every stage stands on: the process group, JSONL files, outputs that a killed run goes on with."""
import ctypes
import functools
import hashlib
import importlib.metadata
import io
import itertools
import json
import logging
import os
import pathlib
import platform
import re
import shutil
import sys
import time
import uuid
from collections import namedtuple

import torch
import torch.distributed as dist


class InputError(Exception):
    """Bad input from the user: one line that says where, what and how to mend it. Ends the stage with status 2."""


Runtime = namedtuple("Runtime", "rank world_size device")


class SayHandler(logging.Handler):
    def emit(self, record):
        say(record.getMessage())


# Control characters of terminals, which files and servers must not send there: C0 but for tab and newline, delete, C1,
# other ends of lines, and what turns the direction of text.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def printable(text):
    """A text with escapes ("\\x1b") for the control characters in it, for a terminal; files keep the raw text."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class EscapedStream(io.TextIOWrapper):
    """A stream to a terminal for what libraries print: printable(), but for a progress bar's carriage returns (at the
    beginning of what it writes) and its ways up."""

    def write(self, text):
        begin = re.match(r"\r|(\x1b\[A)*\Z", text)
        begin = begin[0] if begin else ""
        super().write(begin + printable(text[len(begin):]))
        return len(text)


def run_stage(main, *errors):
    """Run a stage's main(); bad input (InputError, or one of `errors`) becomes one line on stderr and exit status 2.
    What the benchmark logs is printed."""
    sys.stdout.reconfigure(errors="backslashreplace")                # what cannot be shown must not end a run
    sys.stderr = EscapedStream(sys.stderr.buffer, sys.stderr.encoding, "backslashreplace", line_buffering=True)
    log = logging.getLogger("colbench")
    log.setLevel(logging.INFO)
    log.addHandler(SayHandler())
    try:
        main()
        barrier()                               # a rank that leaves early would break the connections of the others
    except (InputError, *errors) as error:
        print(printable(f"error: {error}").replace("\n", "\\n"), file=sys.stderr)
        sys.exit(2)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def glibc():
    """The C library where it is glibc, whose malloc can be told what to keep; else None."""
    return ctypes.CDLL(None) if platform.system() == "Linux" and platform.libc_ver()[0] == "glibc" else None


def start(seed):
    """Join the process group (torchrun's, or one of size 1), seed torch; returns Runtime(rank, world_size, device)."""
    # glibc returns big buffers to the kernel at every free, and page faults then dominate small models on a CPU:
    # M_MMAP_MAX = 0 and a high M_TRIM_THRESHOLD keep them (several times faster training, measured).
    if libc := glibc():
        libc.mallopt(-4, 0)
        libc.mallopt(-1, 2 ** 31 - 1)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        store, rank, world_size = dist.HashStore(), 0, 1
        if "RANK" in os.environ:
            store, rank, world_size = next(dist.rendezvous("env://"))
            store = new_store(store, rank, world_size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    torch.manual_seed(seed)
    return Runtime(dist.get_rank(), dist.get_world_size(), device)


def new_store(store, rank, world_size):
    """A part of torchrun's store where nothing stands yet, the same one on every rank. torchrun keeps its store when it
    starts the ranks again, and torch 2.13 takes the addresses of ranks that are gone for those of the new ones.

    Each rank says hello with a word of its own. Rank 0 answers every word with the name of the new part until all
    ranks have read it: what earlier starts left behind is answered too, but nobody reads that."""
    word, others = uuid.uuid4().hex, set(range(1, world_size))
    if rank > 0:
        store.set(f"hello {rank}", word)
        name = store.get(f"welcome {word}").decode()                # waits for it
        store.set(f"{name} {rank}", "read")
        return dist.PrefixStore(name, store)
    while others := {other for other in others if not store.check([f"{word} {other}"])}:
        for other in others:
            if store.check([f"hello {other}"]):
                store.set(f"welcome {store.get(f'hello {other}').decode()}", word)
        time.sleep(0.01)
    return dist.PrefixStore(word, store)


def trim_memory():
    """Give the kernel back what start() keeps of freed buffers. Batches of all lengths leave holes between them that
    no later one fits into: a run of a 135M model grew to 13 GB where 2 GB are in use."""
    if libc := glibc():
        libc.malloc_trim(0)


def is_main():
    return not dist.is_initialized() or dist.get_rank() == 0


def say(*lines):
    """Print lines, if there are any, on rank 0 alone, at once; control characters that files or servers brought into
    them are escaped."""
    if is_main() and lines:
        print(printable("\n".join(map(str, lines))), flush=True)


def barrier():
    if dist.is_initialized():
        dist.barrier()


def broadcast(value):
    """Rank 0's `value` (any object), on every rank."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


def gather(value):
    """The `value`s (any objects) of all ranks in their order, on every rank."""
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def peak_memory_mb():
    """Highest memory use so far in MiB: of the GPU where there is one, else resident memory of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2 ** 20
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def read_jsonl(path, keys, optional=None, check=None):
    """The objects of a JSONL file as dicts. `keys` are {name: type} that each must have, `optional` those that it may
    have; InputError by line. check(row, where, first row) may say more of a row."""
    path, rows = pathlib.Path(path), []
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    with open(path, encoding="utf-8") as file:
        try:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    rows.append(json.loads(line))
                except json.JSONDecodeError as error:
                    raise InputError(f"{path}:{number}: not JSON ({error.msg} at column {error.colno})") from None
                check_row(rows[-1], keys, optional or {}, f"{path}:{number}")
                if check:
                    check(rows[-1], f"{path}:{number}", rows[0])
        except UnicodeDecodeError:
            raise InputError(f"{path}: not UTF-8 text") from None
    if not rows:
        raise InputError(f"{path}: no rows in it")
    say(f"reads {path} ({len(rows):,} rows)")
    return rows


def check_row(row, keys, optional, where):
    """InputError, which begins with `where`, unless `row` is a dict with all `keys` and, if at all, `optional` ones,
    {name: type}."""
    if not isinstance(row, dict):
        raise InputError(f"{where}: a {type(row).__name__}, not an object")
    for key, kind in {**optional, **keys}.items():
        if key in keys and key not in row:
            raise InputError(f'{where}: missing "{key}"')
        if key in row and not isinstance(row[key], kind):
            raise InputError(f'{where}: "{key}" is a {type(row[key]).__name__}, not a {kind.__name__}')


def read_text(path):
    """A file's text as it is, but for a newline at its end."""
    try:
        return pathlib.Path(path).read_bytes().decode().removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as UTF-8 text ({one_line(error)})") from None


def write_jsonl(path, rows):
    """Write a whole JSONL file beside its name and rename it."""
    path = pathlib.Path(path)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8", errors="backslashreplace") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    partial.rename(path)
    say(f"writes {path} ({len(rows):,} rows)")


class Rows:
    """A JSONL file that is made row by row; a context manager. Every rank appends lines "NUMBER ROW" to a partial file
    of its own, in any order; a run that was killed finds the rows that are there (`done`: their numbers) and adds the
    others, on any number of ranks; finish() puts all rows in the order of their numbers."""

    def __init__(self, out, runtime):
        self.out = pathlib.Path(out)
        self.path = self.out.with_name(f"{self.out.name}.{runtime.rank}of{runtime.world_size}.partial")
        self.done = set(self.find())
        barrier()                                                   # before any rank adds to what all must read alike

    def parts(self):
        return [path for path in self.out.parent.iterdir()
                if re.fullmatch(re.escape(self.out.name) + r"\.\d+of\d+\.partial", path.name)]

    def find(self):
        """{number of a row: (file, offset)} of all whole lines, of this run and those before, of all ranks."""
        offsets = {}
        for path in self.parts():
            with open(path, "rb") as file:
                for line in file:
                    if line.endswith(b"\n"):
                        offsets[int(line.split(b" ", 1)[0])] = (path, file.tell() - len(line))
        return offsets

    def rows(self):
        """The rows that are `done`, in any order."""
        for number, (path, offset) in self.find().items():
            if number in self.done:
                with open(path, "rb") as file:
                    file.seek(offset)
                    yield json.loads(file.readline().split(b" ", 1)[1])

    def __enter__(self):
        with open(self.path, "ab+") as file:                        # without the line that a kill has cut
            file.seek(0)
            file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))
        self.file = open(self.path, "a", encoding="utf-8", errors="backslashreplace")
        return self

    def __exit__(self, *exception):
        self.file.close()

    def add(self, number, row):
        self.file.write(f"{number} {json.dumps(row, ensure_ascii=False)}\n")
        self.file.flush()

    def finish(self, num_rows, failed=()):
        """Write the whole file and remove the partial ones or, where rows have failed, write what is known of these to
        FILE.failed.jsonl; one rank calls this, when all have ended."""
        failures = pathlib.Path(f"{self.out}.failed.jsonl")
        if failed:
            return write_jsonl(failures, failed)
        failures.unlink(missing_ok=True)
        offsets = self.find()
        files = {path: open(path, "rb") for path, _ in offsets.values()}
        with open(f"{self.out}.partial", "wb") as whole:
            for number in range(num_rows):
                path, offset = offsets[number]
                files[path].seek(offset)
                whole.write(files[path].readline().split(b" ", 1)[1])
        for file in files.values():
            file.close()
        os.rename(f"{self.out}.partial", self.out)
        for path in self.parts():
            path.unlink()
        say(f"writes {self.out} ({num_rows:,} rows)")


def map_blocks(out, blocks, work, runtime, unit, together=False):
    """Write the rows that `work(block)` returns, one for each item of each block, to the JSONL file `out`, in order.

    Ranks take turns over the blocks of which a row is missing (Rows), so that the file is the same bit for bit however
    often the run was killed. With `together` all ranks work on every block, as models that are split over them need,
    and rank 0 writes. Returns all rows, on every rank."""
    from tqdm import tqdm
    if not pathlib.Path(out).exists():
        starts = [0, *itertools.accumulate(map(len, blocks))]
        with Rows(out, runtime) as rows:
            missing = [(start, block) for start, block in zip(starts, blocks)
                       if not rows.done.issuperset(range(start, start + len(block)))]
            mine = missing if together else missing[runtime.rank::runtime.world_size]
            with tqdm(total=sum(len(block) for _, block in mine), unit=unit, desc=pathlib.Path(out).name, mininterval=5,
                      disable=runtime.rank > 0) as progress:
                for start, block in mine:
                    for number, row in enumerate(work(block), start):
                        if not together or runtime.rank == 0:
                            rows.add(number, row)
                    progress.update(len(block))
            barrier()
            if runtime.rank == 0:
                rows.finish(starts[-1])
            barrier()
    with open(out, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write_json(path, value):
    partial = pathlib.Path(str(path) + ".partial")
    partial.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8",
                       errors="backslashreplace")                    # a lone surrogate becomes JSON's own escape
    partial.rename(path)


def fingerprint(path):
    """What tells an input from another: a file's hash; of a model folder that of all files that decide what the model
    says (weights: file_digest); a name that is no path stands for itself."""
    path = pathlib.Path(path)
    if path.is_dir():
        notes = "args.json", "costs.json"                           # what a training says about itself
        return files_digest({*weight_files(path), *path.glob("turn_head.pt"),
                             *(file for ending in ("json", "jinja", "model", "txt") for file in path.glob(f"*.{ending}")
                               if file.name not in notes)})
    if path.is_file():
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    return str(path)


def weight_files(folder):
    """The files of a model folder that hold its weights: of the kinds of files there, those that are read."""
    kinds = (list(folder.glob(f"*.{ending}")) for ending in ("safetensors", "bin", "gguf"))
    return next(filter(None, kinds), [])


def files_digest(files):
    """A hash of the names and contents (file_digest) of some files."""
    found = sorted((path.name, file_digest(path)) for path in files)
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def file_digest(path):
    """A hash of a file's size and content. Of one of more than 64 MiB: the first and the last MiB (the header of
    safetensors, with all names and shapes, is in the first) and 1,024 blocks of 4 KiB at equal distances, 5 MB in a
    file of 5 GB. Weights that were trained on, merged or rounded differ in each block; what it can miss is an edit that
    lies between two blocks."""
    size, digest = path.stat().st_size, hashlib.sha256()
    digest.update(str(size).encode())
    with open(path, "rb") as file:
        if size <= 2 ** 26:
            digest.update(file.read())
            return digest.hexdigest()
        blocks = [(size * n // 1024, 4096) for n in range(1, 1024)]
        for start, length in [(0, 2 ** 20), *blocks, (size - 2 ** 20, 2 ** 20)]:
            file.seek(start)
            digest.update(file.read(length))
    return digest.hexdigest()


NO_INFLUENCE = {"browser", "out", "overwrite", "save_every", "dry_run", "max_attempts", "timeout", "retries", "track"}
known_fingerprint = functools.cache(fingerprint)                    # from is_done to begin_output: hashed once


def on_main(decide):
    """A decorator: what rank 0 returns or raises (InputError), on every rank."""
    @functools.wraps(decide)
    def decide_on_main(*arguments, **options):
        decision = None
        if is_main():
            try:
                decision = decide(*arguments, **options)
            except InputError as error:
                decision = error
        decision = broadcast(decision)
        if isinstance(decision, InputError):
            raise decision
        return decision
    return decide_on_main


def output_record(args, out, inputs, folder):
    """(path of args.json, what stands in it but for the versions)."""
    return (out / "args.json" if folder else out.with_name(out.name + ".args.json"),
            {"args": {k: v for k, v in sorted(vars(args).items()) if k not in NO_INFLUENCE},
             "inputs": {str(path): known_fingerprint(path) for path in inputs if path}})


def without_address(value):
    """The name of a server's model alone: when a run goes on, the same model may answer at another address."""
    return re.sub(r"^(judge:)?https?:/[^#]*", r"\1", value) if isinstance(value, str) else value


@on_main
def is_done(args, out, inputs, folder=False):
    """True if the same command (arguments and inputs) already made this output; InputError if another command did,
    unless args.overwrite. Writes nothing, so that a stage can ask before it loads models."""
    known_fingerprint.cache_clear()
    out = pathlib.Path(out)
    path, record = output_record(args, out, inputs, folder)
    if any(name and os.path.exists(name) and os.path.realpath(name) == os.path.realpath(out) for name in inputs):
        raise InputError(f"{out}: is an input of this command; choose another --out")
    if args.overwrite:
        if folder and out.exists() and not path.exists() and any(out.iterdir()):
            raise InputError(f"{out}: not made by this program (no args.json), so --overwrite does not delete it")
        return False
    if path.exists():
        before = json.loads(path.read_text())
        for kind in ("args", "inputs"):
            both = [{without_address(key): value for key, value in r[kind].items()} for r in (before, record)]
            for key in {**both[0], **both[1]}:
                old, new = (own.get(key, "not given") for own in both)
                if without_address(old) != without_address(new):
                    what = f"--{key.replace('_', '-')} {old}, now {new}" if kind == "args" else f"another {key}"
                    raise InputError(f"{out}: made with {what}; choose another --out or add --overwrite")
                if old != new and kind == "args":
                    say(f"{out}: begun with --{key.replace('_', '-')} {old}; {new} is taken for the same model")
        if (out / "COMPLETED" if folder else out).exists():
            say(f"{out}: done already by the same command")
            return True
    elif out.exists() and (not folder or any(out.iterdir())):
        raise InputError(f"{out}: exists and was not made by this command; choose another --out")
    return False


@on_main
def begin_output(args, out, inputs, folder=False):
    """Keep arguments, versions and an id of this run in `out`/args.json (or `out`.args.json). What an interrupted run
    of the same command left is kept, what another made goes (args.overwrite)."""
    out = pathlib.Path(out)
    path, record = output_record(args, out, inputs, folder)
    if args.overwrite and folder:
        shutil.rmtree(out, ignore_errors=True)
    elif args.overwrite:
        for old in (out, path, pathlib.Path(f"{out}.costs.json"), *out.parent.glob(out.name + ".*.partial")):
            old.unlink(missing_ok=True)
    if path.exists():
        say(f"{out}: continues an interrupted run")
        return
    (out if folder else out.parent).mkdir(parents=True, exist_ok=True)
    versions = {"python": platform.python_version(), "torch": torch.__version__,
                "transformers": importlib.metadata.version("transformers")}
    write_json(path, {**record, "versions": versions, "id": uuid.uuid4().hex[:6]})
    say("arguments: " + ", ".join(f"{k}={v}" for k, v in record["args"].items()))


def reduce_sums(values, device):
    """The sums over all ranks of a list of numbers."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.tolist()


def one_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
