"""What every stage stands on: the process group, JSONL files, outputs that a killed run goes on with."""
import contextlib
import ctypes
import errno
import fcntl
import fnmatch
import functools
import hashlib
import importlib.metadata
import io
import json
import logging
import os
import pathlib
import platform
import re
import shutil
import stat
import sys
import time
import uuid
from typing import NamedTuple

import torch
import torch.distributed as dist

from colbench.schema import list_of, MAX_DEPTH, record, short_text
from lib import VERSION


class InputError(Exception):
    """Bad input from the user: one line that says where, what and how to mend it. Ends the stage with status 2."""


class Runtime(NamedTuple):
    """Where a stage runs, as start() says it."""

    rank: int                       # of this process, from 0
    world_size: int                 # processes
    device: torch.device
    run_id: str = ""                # of begin_output; stands in the names of the run's partial files


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

    is_detached = False

    def write(self, text):
        match = re.match(r"\r|(\x1b\[A)*\Z", text)
        begin = match[0] if match else ""
        super().write(begin + printable(text[len(begin):]))
        return len(text)

    def close(self):
        """Leave the stream below open: others write to it, too."""
        if not self.is_detached:
            self.flush()
            self.is_detached = True
            self.detach()


def run_stage(main, *errors):
    """Run a stage's main(); bad input (InputError, or one of `errors`), what the system refuses (OSError) and what is
    nested too deeply become one line on stderr and exit status 2. What the benchmark logs is printed."""
    sys.stdout.reconfigure(errors="backslashreplace")                # what cannot be shown must not end a run
    sys.stderr = EscapedStream(sys.stderr.buffer, sys.stderr.encoding, "backslashreplace", line_buffering=True)
    log = logging.getLogger("colbench")
    log.setLevel(logging.INFO)
    log.addHandler(SayHandler())
    try:
        main()
        barrier()                               # a rank that leaves early would break the connections of the others
    except (InputError, OSError, RecursionError, *errors) as error:
        print(printable(f"error: {error_text(error)}").replace("\n", "\\n"), file=sys.stderr)
        sys.exit(2)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


ROOM_BYTES = 2 ** 20                            # a disk with less free is full


@contextlib.contextmanager
def writing(path):
    """Where the disk of a file or folder is full, what libraries raise (each its own kind) becomes an InputError."""
    try:
        yield
    except BaseException as error:              # torch's CheckpointException is no Exception
        folder = pathlib.Path(path)
        while not folder.is_dir():
            folder = folder.parent
        if isinstance(error, InputError) or shutil.disk_usage(folder).free > ROOM_BYTES:
            raise
        raise InputError(f"{path}: cannot be written ({type(error).__name__}: {one_line(error)}): the disk is full. "
                         "The same command goes on from what is there, once there is room") from None


def one_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def error_text(error):
    """What is wrong, by an error that run_stage catches."""
    if isinstance(error, RecursionError):
        return f"something is nested too deeply ({one_line(error)})"
    if not isinstance(error, OSError):
        return str(error)
    if error.strerror and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return one_line(error)


def glibc():
    """The C library where it is glibc, whose malloc can be told what to keep; else None."""
    if platform.system() == "Linux" and platform.libc_ver()[0] == "glibc":
        return ctypes.CDLL(None)
    return None


def start(seed):
    """Join the process group (torchrun's, or one of size 1), seed torch; returns Runtime(rank, world_size, device)."""
    # glibc returns big buffers to the kernel at every free, and page faults then dominate small models on a CPU:
    # M_MMAP_MAX = 0 and a high M_TRIM_THRESHOLD keep them (several times faster training, measured).
    libc = glibc()
    if libc:
        libc.mallopt(-4, 0)
        libc.mallopt(-1, 2 ** 31 - 1)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", card_of_this_rank(torch.cuda.device_count()))
        torch.cuda.set_device(device)                               # before the group: NCCL takes the current one
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        store, rank, world_size = dist.HashStore(), 0, 1
        if "RANK" in os.environ:
            store, rank, world_size = next(dist.rendezvous("env://"))
            store = new_store(store, rank, world_size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    torch.manual_seed(seed)
    return Runtime(dist.get_rank(), dist.get_world_size(), device)


def card_of_this_rank(num_cards):
    """The number of this rank's GPU. InputError where torchrun starts more ranks on this machine than it has GPUs."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if local_rank >= num_cards:
        raise InputError(f"torchrun --nproc-per-node: rank {local_rank} of this machine has no GPU: {num_cards} can be "
                         "seen here; start as many ranks as GPUs, or set CUDA_VISIBLE_DEVICES= to use the CPU")
    return local_rank


def new_store(store, rank, world_size):
    """A part of torchrun's store where nothing stands yet, the same one on every rank. torchrun keeps its store when it
    starts the ranks again, and torch 2.13 takes the addresses of ranks that are gone for those of the new ones.

    Each rank says hello with a word of its own. Rank 0 answers every word with the name of the new part until all
    ranks have read it: what earlier starts left behind is answered too, but nobody reads that."""
    word = uuid.uuid4().hex
    if rank > 0:
        store.set(f"hello {rank}", word)
        name = store.get(f"welcome {word}").decode()                # waits for it
        store.set(f"{name} {rank}", "read")
        return dist.PrefixStore(name, store)
    missing = set(range(1, world_size))
    while missing:
        for other_rank in missing:
            if store.check([f"hello {other_rank}"]):
                hello = store.get(f"hello {other_rank}").decode()
                store.set(f"welcome {hello}", word)
        time.sleep(0.01)
        missing = {other_rank for other_rank in missing if not store.check([f"{word} {other_rank}"])}
    return dist.PrefixStore(word, store)


def trim_memory():
    """Give the kernel back what start() keeps of freed buffers. Batches of all lengths leave holes between them that
    no later one fits into: a run of a 135M model grew to 13 GB where 2 GB are in use."""
    libc = glibc()
    if libc:
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


def reduce_sums(values, device):
    """The sums over all ranks of a list of numbers."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.tolist()


def peak_memory_mb():
    """Highest memory use so far in MiB: of the GPU where there is one, else resident memory of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2 ** 20
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# ---------------------------------------------------------------------------------------------------------------------
# reading

def parse_json(text, where):
    """The value of a JSON text; InputError, which begins with `where`. The one place where JSON of others is read; what
    it may be is said by the kinds of colbench/schema.py."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise InputError(f"{where}: nested deeper than {MAX_DEPTH}") from None
    except UnicodeDecodeError:
        raise InputError(f"{where}: not UTF-8 text") from None
    except ValueError as error:                                     # an integer of more than 4,300 digits
        raise InputError(f"{where}: not JSON that can be read ({one_line(error)[:80]})") from None
    return value


def read_json(path, kind):
    """The value of a JSON file, of a kind (a function of colbench/schema.py); InputError that names the file."""
    value = parse_json(read_text(path), path)
    refuse(kind(value), path)
    return value


def read_jsonl(path, keys, check=None):
    """The objects of a JSONL file as dicts; InputError by line.

    keys: {name: kind} that each must have (colbench/schema.py), or the kind of a row.
    check(row, where, first row): may say more of a row."""
    kind = keys if callable(keys) else record(keys)
    if not os.path.isfile(path):
        raise InputError(f"{path}: no such file")
    rows = []
    with open(path, encoding="utf-8-sig") as file:                   # some editors begin a file with a mark
        try:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                row = parse_json(line, where)
                refuse(kind(row), where)
                rows.append(row)
                if check:
                    check(row, where, rows[0])
        except UnicodeDecodeError:
            raise InputError(f"{path}: not UTF-8 text") from None
    if not rows:
        raise InputError(f"{path}: no rows in it")
    say(f"reads {path} ({len(rows):,} rows)")
    return rows


def refuse(fault, where):
    """InputError, which begins with `where`, if there is a fault (what a kind of schema.py says of a value)."""
    if fault:
        raise InputError(f"{where}: {fault.removeprefix('is ')}")


def read_text(path):
    """A file's text as it is, but for a newline at its end. Neither a pipe, which would be waited for, nor a device,
    which may never end."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise InputError(f"{path}: is no file")
    try:
        return pathlib.Path(path).read_bytes().decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as UTF-8 text ({one_line(error)})") from None


# ---------------------------------------------------------------------------------------------------------------------
# writing: each file beside its name, and renamed when it is whole

def open_file(path, mode, **options):
    """open() of a regular file that has this one name. Neither a link is followed, symbolic or hard, nor a pipe or a
    device opened: somebody else may have put it there to have another file written. InputError says so."""
    def opener(name, flags):
        descriptor = os.open(name, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o666)
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
            os.close(descriptor)
            raise InputError(f"{path}: is a link or no file; this program did not make it, so remove it")
        return descriptor
    try:
        return open(path, mode, opener=opener, **options)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):               # a symbolic link; a pipe
            raise InputError(f"{path}: is a link or no file; this program did not make it, so remove it") from None
        raise


def new_file(path, mode="wb", **options):
    """open() of a new file of this name. What had the name before is removed, not written to, be it a link."""
    pathlib.Path(path).unlink(missing_ok=True)
    return open_file(path, mode.replace("w", "x"), **options)


def write_jsonl(path, rows):
    """Write a whole JSONL file beside its name and rename it."""
    path = pathlib.Path(path)
    partial = path.with_name(path.name + ".partial")
    with new_file(partial, "w", encoding="utf-8", errors="backslashreplace") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    partial.rename(path)
    say(f"writes {path} ({len(rows):,} rows)")


LOCK_S = 20                                                         # how long a second start of a command waits


class Rows:
    """A JSONL file that is made row by row; a context manager. Every rank appends lines "NUMBER ROW" to a partial file
    of its own, in any order; a run that was killed finds the rows that are there (`done`: their numbers) and adds the
    others, on any number of ranks; finish() puts all rows in the order of their numbers.

    The names of partial files have Runtime.run_id: those of another run, which may have had another seed or
    other flags, are neither read nor removed."""

    def __init__(self, out, runtime):
        self.out = pathlib.Path(out)
        self.name = f"{self.out.name}.{runtime.run_id}" if runtime.run_id else self.out.name
        self.path = self.out.with_name(f"{self.name}.{runtime.rank}of{runtime.world_size}.partial")
        self.file = open_file(self.path, "a", encoding="utf-8", errors="backslashreplace")
        self.lock()
        self.done = set(self.find())
        of_any_run = self.partial_files(rf"{re.escape(self.out.name)}(\.\w+)?")
        of_this_run = self.parts()
        foreign = [path.name for path in of_any_run if path not in of_this_run]
        if foreign:
            say(f"{self.out}: partial files of other runs are left alone: {listing(foreign)}")
        barrier()                                                   # before any rank adds to what all must read alike

    def partial_files(self, name):
        """The partial files of a name (a regular expression), of all ranks."""
        pattern = name + r"\.\d+of\d+\.partial"
        return [path for path in sorted(self.out.parent.iterdir()) if re.fullmatch(pattern, path.name)]

    def parts(self):
        return self.partial_files(re.escape(self.name))

    def find(self):
        """{number of a row: (file, offset)} of all whole lines, of this run and those before, of all ranks."""
        offsets = {}
        for path in self.parts():
            with open_file(path, "rb") as file:
                for line in file:
                    number = re.match(rb"(\d{1,18}) \S", line)
                    if not line.endswith(b"\n"):
                        continue
                    if not number:
                        raise InputError(f"{path}: no rows of this program in it; remove it")
                    offsets[int(number[1])] = (path, file.tell() - len(line))
        return offsets

    def rows(self):
        """The rows that are `done`, in any order."""
        for number, (path, offset) in self.find().items():
            if number in self.done:
                with open_file(path, "rb") as file:
                    file.seek(offset)
                    _, row = file.readline().split(b" ", 1)
                yield parse_json(row.decode(errors="replace"), path)

    def lock(self):
        """Keep out other processes until this one ends. InputError where the same command runs already: another process
        holds the file for LOCK_S (ranks of a killed run take a moment to end), or has ended it just now."""
        end = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise InputError(f"{self.out}: the same command is running already, and writes to {self.path}"
                                     ) from None
                time.sleep(0.2)
            except OSError:                                         # a file system without locks
                break
        if os.fstat(self.file.fileno()).st_nlink == 0:
            raise InputError(f"{self.out}: the same command has just written it; start it once")

    def __enter__(self):
        with open_file(self.path, "ab+") as file:                   # without the line that a kill has cut
            file.seek(0)
            file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))
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
        files = {path: open_file(path, "rb") for path, _ in offsets.values()}
        with new_file(f"{self.out}.partial") as whole:
            for number in range(num_rows):
                path, offset = offsets[number]
                files[path].seek(offset)
                _, row = files[path].readline().split(b" ", 1)
                parse_json(row, f"{path}: row {number}")            # a disk may have lost a part of it
                whole.write(row)
        for file in files.values():
            file.close()
        os.rename(f"{self.out}.partial", self.out)
        for path in self.parts():
            path.unlink()
        say(f"writes {self.out} ({num_rows:,} rows)")


def listing(names, most=5):
    """"a, b and 3 more": the first of some names."""
    first = ", ".join(sorted(names)[:most])
    if len(names) <= most:
        return first
    return f"{first} and {len(names) - most:,} more"


def read_rows(path):
    """The rows of a JSONL file that this program made."""
    with open(path, encoding="utf-8") as file:
        return [parse_json(line, f"{path}:{number}") for number, line in enumerate(file, 1)]


def map_blocks(out, blocks, work, runtime, unit, together=False):
    """Write the rows that `work(block)` returns, one for each item of each block, to the JSONL file `out`, in order.

    Ranks take turns over the blocks of which a row is missing (Rows), so that the file is the same bit for bit however
    often the run was killed. With `together` all ranks work on every block, as models that are split over them need,
    and rank 0 writes. Returns all rows, on every rank."""
    from tqdm import tqdm
    out = pathlib.Path(out)
    if out.exists():
        return read_rows(out)
    is_writer = not together or runtime.rank == 0
    with Rows(out, runtime) as rows:
        missing, num_rows = [], 0
        for block in blocks:
            numbers = range(num_rows, num_rows + len(block))
            num_rows += len(block)
            if not rows.done.issuperset(numbers):
                missing.append((numbers, block))
        mine = missing if together else missing[runtime.rank::runtime.world_size]
        num_items = sum(len(block) for _, block in mine)
        with tqdm(total=num_items, unit=unit, desc=out.name, mininterval=5, disable=runtime.rank > 0) as progress:
            for numbers, block in mine:
                for number, row in zip(numbers, work(block), strict=True):
                    if is_writer:
                        rows.add(number, row)
                progress.update(len(block))
        barrier()
        if runtime.rank == 0:
            rows.finish(num_rows)
        barrier()
    return read_rows(out)


def write_json(path, value):
    partial = pathlib.Path(str(path) + ".partial")
    with new_file(partial, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(json.dumps(value, indent=1, ensure_ascii=False) + "\n")     # a lone surrogate becomes JSON's escape
    partial.rename(path)


# ---------------------------------------------------------------------------------------------------------------------
# outputs: is it there already, whose is it, may it be replaced

def fingerprint(path):
    """What tells an input from another: a file's hash; of a model folder that of all files that decide what the model
    says (weights: file_digest); a name that is no path stands for itself."""
    path = pathlib.Path(path)
    if path.is_dir():
        return files_digest(model_files(path))
    if path.is_file():
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    return str(path)


def model_files(folder):
    """The files of a model folder that decide what the model says."""
    files = {*weight_files(folder), *folder.glob("turn_head.pt")}
    for ending in ("json", "jinja", "model", "txt"):
        files.update(folder.glob(f"*.{ending}"))
    # without what a training, and a file that 01 or 02 wrote into this folder, say about themselves
    return {path for path in files if not path.name.endswith(("args.json", "costs.json", ".system_prompt.txt"))}


def weight_files(folder):
    """The files of a model folder that hold its weights: of the kinds of files there, those that are read."""
    for ending in ("safetensors", "bin", "gguf"):
        files = list(folder.glob(f"*.{ending}"))
        if files:
            return files
    return []


def files_digest(files):
    """A hash of the names and contents (file_digest) of some files."""
    digests = sorted((path.name, file_digest(path)) for path in files)
    return hashlib.sha256(repr(digests).encode()).hexdigest()[:16]


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


# Arguments that change nothing of what stands in an output
NO_INFLUENCE = {"browser", "out", "overwrite", "save_every", "dry_run", "max_attempts", "timeout", "retries", "track"}
known_fingerprint = functools.cache(fingerprint)                    # from is_done to begin_output: hashed once


def on_main(decide):
    """A decorator: what rank 0 returns or raises (bad input, what the system refuses), on every rank."""
    @functools.wraps(decide)
    def decide_on_main(*arguments, **options):
        decision = None
        if is_main():
            try:
                decision = decide(*arguments, **options)
            except (InputError, OSError, RecursionError) as error:
                decision = InputError(error_text(error))
        decision = broadcast(decision)
        if isinstance(decision, InputError):
            raise decision
        return decision
    return decide_on_main


def output_record(args, out, inputs, folder):
    """(path of args.json, what stands in it but for the versions)."""
    path = out.with_name(out.name + ".args.json")
    if folder:
        path = out / "args.json"
    arguments = {key: value for key, value in sorted(vars(args).items()) if key not in NO_INFLUENCE}
    fingerprints = {str(name): known_fingerprint(name) for name in inputs if name}
    return path, {"args": arguments, "inputs": fingerprints}


def run_id_fault(value):
    """What is wrong with the id of a run, which stands in names of files; None: nothing."""
    if type(value) is str and re.fullmatch("[0-9a-f]{1,32}", value):
        return None
    return "is no id of a run"


ARGS_JSON = record({"args": dict, "inputs": dict},
                   {"id": run_id_fault, "files": list_of(str), "versions": dict, "stage": str})


def stage_name():
    """The file that was started, 04_train_policy.py say."""
    return pathlib.Path(sys.argv[0]).name


def without_address(value):
    """The name of a server's model alone: when a run goes on, the same model may answer at another address."""
    if not isinstance(value, str):
        return value
    return re.sub(r"^(judge:)?https?:/[^#]*", r"\1", value)


MAX_OUT_BYTES = 200             # of the last part of --out: names of partial files are longer, 255 is what systems take
BESIDE = ".args.json", ".costs.json", ".failed.jsonl", ".partial", ".system_prompt.txt"     # of an output file


def check_place(out, folder):
    """InputError where an output of this name cannot be written."""
    if not folder and not out.name:
        raise InputError(f"--out {out}: names no file")
    if len(os.fsencode(out.name)) > MAX_OUT_BYTES:
        raise InputError(f"--out {out.name[:40]} …: its name is longer than {MAX_OUT_BYTES} bytes")
    for parent in out.parents:
        if parent.exists() and not parent.is_dir():
            raise InputError(f"--out {out}: {parent} is no folder")
    if out.is_dir() and not folder:
        raise InputError(f"{out}: is a folder; choose another --out")
    if folder and out.exists() and not out.is_dir():
        raise InputError(f"{out}: is no folder; choose another --out")


MODELS_BEHIND = ("adapter_config.json", "base_model_name_or_path"), ("critic.json", "reference")


def with_models_behind(inputs):
    """Those inputs that are files or folders (others are of a hub, a server or a program) and, of model folders, the
    models that they need: an adapter's base model, a critic's reference."""
    names, rest = [], [name for name in inputs if name]
    while rest:
        name = str(rest.pop())
        if name in names or not os.path.exists(name):
            continue
        names.append(name)
        for file, key in MODELS_BEHIND:
            path = os.path.join(name, file)
            if not os.path.exists(path):
                continue
            value = parse_json(read_text(path), path)
            if isinstance(value, dict) and short_text(value.get(key)) is None:
                rest.append(value[key])
    return names


def check_inputs(out, inputs, folder):
    """InputError where an input is the output, stands below an output folder, or is one of the files that are written
    beside an output file. Names are compared by what they lead to: links and other spellings are the same file."""
    outputs = [out]
    if not folder:
        outputs += [f"{out}.images", f"{out.with_suffix('')}.rejected.jsonl"]
        outputs += [f"{out}{ending}" for ending in BESIDE]
    output_stats = {name: os.stat(name) for name in outputs if os.path.exists(name)}
    for name in with_models_behind(inputs):
        path = pathlib.Path(os.path.realpath(name))
        for place in (path, *path.parents):
            place_stat = os.stat(place)
            for output, output_stat in output_stats.items():
                if not os.path.samestat(place_stat, output_stat):
                    continue
                if place == path and output == out:
                    raise InputError(f"{out}: is an input of this command; choose another --out")
                where = "beside" if place == path else "below"
                raise InputError(f"{name}: is an input of this command and {where} --out {out}, which may replace it; "
                                 "choose another --out")


@on_main
def is_done(args, out, inputs, folder=False):
    """True if the same command (arguments and inputs) already made this output; InputError if another command did,
    unless args.overwrite, or if an input would be written to. Writes nothing, so that a stage can ask before it loads
    models."""
    known_fingerprint.cache_clear()
    out = pathlib.Path(out)
    check_place(out, folder)
    check_inputs(out, inputs, folder)
    path, record = output_record(args, out, inputs, folder)
    is_there = out.exists() and (not folder or any(out.iterdir()))
    before = read_json(path, ARGS_JSON) if path.exists() else None
    failures = pathlib.Path(f"{out}.failed.jsonl")
    if not folder and before is None and failures.exists():
        raise InputError(f"{failures}: no run of {out} made it (no {path.name}), and this one may replace it; choose "
                         "another --out")
    if args.overwrite:
        if is_there and before is None:
            raise InputError(f"{out}: not made by this program (no {path.name}), so --overwrite does not delete it")
        if before and before.get("stage", stage_name()) != stage_name():            # older outputs do not say it
            raise InputError(f"{out}: {before['stage'][:80]} made it, and --overwrite replaces outputs of the same "
                             "stage alone; choose another --out, or remove it")
        return False
    if before is None:
        if is_there:
            raise InputError(f"{out}: exists and was not made by this command; choose another --out")
        return False
    check_same_command(out, before, record)
    say_other_versions(out, before.get("versions", {}))
    completed = out / "COMPLETED" if folder else out
    if completed.exists():
        say(f"{out}: done already by the same command")
        return True
    return False


def check_same_command(out, before, now):
    """InputError where the records (output_record) of two runs name other arguments or inputs, but for addresses."""
    for kind in ("args", "inputs"):
        values_before = {without_address(key): value for key, value in before[kind].items()}
        values_now = {without_address(key): value for key, value in now[kind].items()}
        for key in {**values_before, **values_now}:
            old = values_before.get(key, "not given")
            new = values_now.get(key, "not given")
            flag = f"--{key[:80].replace('_', '-')}"
            if without_address(old) != without_address(new):
                difference = f"another {key[:500]}"
                if kind == "args":
                    difference = f"{flag} {str(old)[:500]}, now {str(new)[:500]}"
                raise InputError(f"{out}: made with {difference}; choose another --out or add --overwrite")
            if old != new and kind == "args":
                say(f"{out}: begun with {flag} {old}; {new} is taken for the same model")


def current_versions():
    """What args.json keeps of the programs that make an output."""
    return {
        "sweet-rl": VERSION,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": importlib.metadata.version("transformers"),
        "code": code_digest()}


def code_digest():
    """A digest of the texts of the file that was started, 04 or a fork of it, say, and of common.py."""
    digest = hashlib.sha256()
    for path in (pathlib.Path(sys.argv[0]), pathlib.Path(__file__).parents[1] / "common.py"):
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def say_other_versions(out, versions_before):
    """Say in one line which versions differ from those that an output was begun with. The run goes on all the same."""
    differences = []
    for name, version in current_versions().items():
        version_before = str(versions_before.get(name, version))
        if version_before == version:
            continue
        if name == "code":
            differences.append(f"another text of {stage_name()} or common.py (--overwrite makes it again)")
        else:
            differences.append(f"{name} {version_before[:80]}, now {version}")
    if differences:
        say(f"{out}: begun with {'; '.join(differences)}")


@on_main
def begin_output(args, out, inputs, files=None):
    """Keep arguments, versions and an id of this run in `out`/args.json (or `out`.args.json); returns the id. What an
    interrupted run of the same command left is kept, what another made goes (args.overwrite).

    files: patterns of the names of all files that the stage writes into the folder `out` ("scored/*.jsonl"), which
    args.json keeps: a later --overwrite removes these and nothing else. None: `out` is one file."""
    out, folder = pathlib.Path(out), files is not None
    path, record = output_record(args, out, inputs, folder)
    if path.exists():
        before = read_json(path, ARGS_JSON)
        if not args.overwrite:
            say(f"{out}: continues an interrupted run")
            return before.get("id", "")
        if folder:
            remove_listed(out, before.get("files", files))
        else:
            remove_file(out, path, before.get("id"))
    path.parent.mkdir(parents=True, exist_ok=True)
    record["versions"] = current_versions()
    record["id"] = uuid.uuid4().hex[:6]
    record["stage"] = stage_name()
    if folder:
        record["files"] = list(files)
    write_json(path, record)
    arguments = ", ".join(f"{key}={value}" for key, value in record["args"].items())
    say(f"arguments: {arguments}")
    return record["id"]


def remove_file(out, args_json, run_id):
    """Remove an output file and what its run of this id has left beside it, args.json at last. Screenshots and what 01
    writes beside its output stay, until the new run replaces them."""
    paths = [out, pathlib.Path(f"{out}.costs.json"), pathlib.Path(f"{out}.failed.jsonl")]
    if run_id:
        for path in out.parent.iterdir():
            if path.name.startswith(f"{out.name}.{run_id}.") and path.name.endswith(".partial"):
                paths.append(path)
    for path in (*paths, args_json):
        path.unlink(missing_ok=True)


def remove_listed(folder, patterns):
    """Remove the files of a folder whose names match one of the `patterns`, and its folders that are empty then. Says
    what stays at its top. No link is followed. COMPLETED goes first and args.json last, so that a kill in between
    leaves an output that is not complete, and that is known for one of this program."""
    parts_of_patterns = []
    for pattern in (*patterns, "args.json", "costs.json", "COMPLETED"):
        for name in (pattern, f"{pattern}.partial", f"{pattern}.*.partial"):
            parts_of_patterns.append(name.split("/"))
    files, folders = [], []
    for place, folder_names, names in os.walk(folder, topdown=False):
        for name in (*names, *folder_names):
            path = pathlib.Path(place, name)
            parts = path.relative_to(folder).parts
            if path.is_dir() and not path.is_symlink():
                if any(lies_above(parts, pattern) for pattern in parts_of_patterns):
                    folders.append(path)
            elif any(matches(parts, pattern) for pattern in parts_of_patterns):
                files.append(path)
    files.sort(key=lambda path: (path.name == "args.json", path.name != "COMPLETED"))
    for path in files:
        path.unlink()
    for path in folders:
        if not any(path.iterdir()):
            path.rmdir()
    remaining = os.listdir(folder)
    if remaining:
        say(f"{folder}: what no run listed as its own stays there: {listing(remaining)}")


def lies_above(parts, pattern):
    """Whether the parts of a folder's path match the first ones of a pattern, which goes on below it."""
    return len(pattern) > len(parts) and matches(parts, pattern[:len(parts)])


def matches(parts, pattern):
    """Whether the parts of a path match those of a pattern."""
    return len(parts) == len(pattern) and all(map(fnmatch.fnmatchcase, parts, pattern))
