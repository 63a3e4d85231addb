"""What every stage stands on: the process group, JSONL files, outputs that a killed run goes on with."""
import ctypes
import errno
import fnmatch
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
import stat
import sys
import time
import uuid
from collections import namedtuple

import torch
import torch.distributed as dist

from lib.schema import list_of, MAX_DEPTH, record, short_text


class InputError(Exception):
    """Bad input from the user: one line that says where, what and how to mend it. Ends the stage with status 2."""


# run: the id of the run (begin_output), which stands in the names of its partial files
Runtime = namedtuple("Runtime", "rank world_size device run", defaults=("",))


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
        begin = re.match(r"\r|(\x1b\[A)*\Z", text)
        begin = begin[0] if begin else ""
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


def error_text(error):
    """What is wrong, by an error that run_stage catches."""
    if isinstance(error, RecursionError):
        return f"something is nested too deeply ({one_line(error)})"
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return one_line(error) if isinstance(error, OSError) else str(error)


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


# ---------------------------------------------------------------------------------------------------------------------
# reading

def parse_json(text, where):
    """The value of a JSON text; InputError, which begins with `where`. The one place where JSON of others is read; what
    it may be is said by the kinds of lib/schema.py."""
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
    """The value of a JSON file, of a kind (a function of lib/schema.py); InputError that names the file."""
    value = parse_json(read_text(path), path)
    if fault := kind(value):
        raise InputError(f"{path}: {fault.removeprefix('is ')}")
    return value


def read_jsonl(path, keys, optional=None, check=None):
    """The objects of a JSONL file as dicts. `keys` are {name: kind} that each must have, `optional` those that it may
    have (lib/schema.py), or `keys` is the kind of a row; InputError by line. check(row, where, first row) may say more
    of a row."""
    rows, kind = [], keys if callable(keys) else record(keys, optional)
    if not os.path.isfile(path):
        raise InputError(f"{path}: no such file")
    with open(path, encoding="utf-8") as file:
        try:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                row = parse_json(line, where)
                if fault := kind(row):
                    raise InputError(f"{where}: {fault.removeprefix('is ')}")
                rows.append(row)
                if check:
                    check(row, where, rows[0])
        except UnicodeDecodeError:
            raise InputError(f"{path}: not UTF-8 text") from None
    if not rows:
        raise InputError(f"{path}: no rows in it")
    say(f"reads {path} ({len(rows):,} rows)")
    return rows


def check_row(row, keys, optional, where):
    """InputError, which begins with `where`, unless `row` is a dict with all `keys` and, if at all, `optional` ones,
    {name: kind} (lib/schema.py)."""
    if fault := record(keys, optional)(row):
        raise InputError(f"{where}: {fault.removeprefix('is ')}")


def read_text(path):
    """A file's text as it is, but for a newline at its end. Neither a pipe, which would be waited for, nor a device,
    which may never end."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise InputError(f"{path}: is no file")
    try:
        return pathlib.Path(path).read_bytes().decode().removesuffix("\n")
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


class Rows:
    """A JSONL file that is made row by row; a context manager. Every rank appends lines "NUMBER ROW" to a partial file
    of its own, in any order; a run that was killed finds the rows that are there (`done`: their numbers) and adds the
    others, on any number of ranks; finish() puts all rows in the order of their numbers.

    The names of partial files have the run's id (Runtime.run): those of another run, which may have had another seed or
    other flags, are neither read nor removed."""

    def __init__(self, out, runtime):
        self.out = pathlib.Path(out)
        self.name = f"{self.out.name}.{runtime.run}" if runtime.run else self.out.name
        self.path = self.out.with_name(f"{self.name}.{runtime.rank}of{runtime.world_size}.partial")
        self.done = set(self.find())
        if others := [path.name for path in self.partial_files(rf"{re.escape(self.out.name)}(\.\w+)?")
                      if path not in self.parts()]:
            say(f"{self.out}: partial files of other runs are left alone: {listing(others)}")
        barrier()                                                   # before any rank adds to what all must read alike

    def partial_files(self, name):
        return [path for path in sorted(self.out.parent.iterdir())
                if re.fullmatch(name + r"\.\d+of\d+\.partial", path.name)]

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
                    yield parse_json(file.readline().split(b" ", 1)[1].decode(errors="replace"), path)

    def __enter__(self):
        with open_file(self.path, "ab+") as file:                   # without the line that a kill has cut
            file.seek(0)
            file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))
        self.file = open_file(self.path, "a", encoding="utf-8", errors="backslashreplace")
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
                row = files[path].readline().split(b" ", 1)[1]
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
    return first if len(names) <= most else f"{first} and {len(names) - most:,} more"


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
    return (out / "args.json" if folder else out.with_name(out.name + ".args.json"),
            {"args": {k: v for k, v in sorted(vars(args).items()) if k not in NO_INFLUENCE},
             "inputs": {str(path): known_fingerprint(path) for path in inputs if path}})


def run_id(value):
    """What is wrong with the id of a run, which stands in names of files; None: nothing."""
    return None if type(value) is str and re.fullmatch("[0-9a-f]{1,32}", value) else "is no id of a run"


ARGS_JSON = record({"args": dict, "inputs": dict},
                   {"id": run_id, "files": list_of(str), "versions": dict, "stage": str})


def stage_name():
    """The file that was started, 04_train_policy.py say."""
    return pathlib.Path(sys.argv[0]).name


def without_address(value):
    """The name of a server's model alone: when a run goes on, the same model may answer at another address."""
    return re.sub(r"^(judge:)?https?:/[^#]*", r"\1", value) if isinstance(value, str) else value


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
    if out.exists() and out.is_dir() != bool(folder):
        raise InputError(f"{out}: is {'a folder' if out.is_dir() else 'no folder'}; choose another --out")


MODELS_BEHIND = ("adapter_config.json", "base_model_name_or_path"), ("critic.json", "reference")


def with_models_behind(inputs):
    """Those inputs that are files or folders (others are of a hub, a server or a program) and, of model folders, the
    models that they need: an adapter's base model, a critic's reference."""
    names = []
    rest = [*filter(None, inputs)]
    while rest:
        name = str(rest.pop())
        if name in names or not os.path.exists(name):
            continue
        names.append(name)
        for file, key in MODELS_BEHIND:
            path = os.path.join(name, file)
            value = parse_json(read_text(path), path) if os.path.exists(path) else None
            behind = value.get(key) if isinstance(value, dict) else None
            rest += [behind] * (short_text(behind) is None)
    return names


def check_inputs(out, inputs, folder):
    """InputError where an input is the output, stands below an output folder, or is one of the files that are written
    beside an output file. Names are compared by what they lead to: links and other spellings are the same file."""
    written = [out] if folder else [out, f"{out}.images", f"{out.with_suffix('')}.rejected.jsonl",
                                    *(f"{out}{ending}" for ending in BESIDE)]
    written = {name: os.stat(name) for name in written if os.path.exists(name)}
    for name in with_models_behind(inputs):
        path = pathlib.Path(os.path.realpath(name))
        for place in (path, *path.parents):
            about = os.stat(place)
            for own, own_about in written.items():
                if not os.path.samestat(about, own_about):
                    continue
                if place == path and own == out:
                    raise InputError(f"{out}: is an input of this command; choose another --out")
                raise InputError(f"{name}: is an input of this command and {'below' if place != path else 'beside'} "
                                 f"--out {out}, which may replace it; choose another --out")


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
    if before:
        for kind in ("args", "inputs"):
            both = [{without_address(key): value for key, value in r[kind].items()} for r in (before, record)]
            for key in {**both[0], **both[1]}:
                old, new = (own.get(key, "not given") for own in both)
                if without_address(old) != without_address(new):
                    what = f"another {key[:500]}"
                    if kind == "args":
                        what = f"--{key[:80].replace('_', '-')} {str(old)[:500]}, now {str(new)[:500]}"
                    raise InputError(f"{out}: made with {what}; choose another --out or add --overwrite")
                if old != new and kind == "args":
                    say(f"{out}: begun with --{key.replace('_', '-')} {old}; {new} is taken for the same model")
        if (out / "COMPLETED" if folder else out).exists():
            say(f"{out}: done already by the same command")
            return True
    elif is_there:
        raise InputError(f"{out}: exists and was not made by this command; choose another --out")
    return False


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
    (out if folder else out.parent).mkdir(parents=True, exist_ok=True)
    versions = {"python": platform.python_version(), "torch": torch.__version__,
                "transformers": importlib.metadata.version("transformers")}
    number = uuid.uuid4().hex[:6]
    record |= {"versions": versions, "id": number, "stage": stage_name()} | ({"files": list(files)} if folder else {})
    write_json(path, record)
    say("arguments: " + ", ".join(f"{k}={v}" for k, v in record["args"].items()))
    return number


def remove_file(out, args_json, number):
    """Remove an output file and what its run, of this id, left beside it, args.json at last."""
    own = [out, *(pathlib.Path(f"{out}{ending}") for ending in (".costs.json", ".failed.jsonl"))]
    if number:
        own += [path for path in out.parent.iterdir()
                if path.name.startswith(f"{out.name}.{number}.") and path.name.endswith(".partial")]
    for path in (*own, args_json):
        path.unlink(missing_ok=True)


def remove_listed(folder, patterns):
    """Remove the files of a folder whose names match one of the `patterns`, and its folders that are empty then. Says
    what stays at its top. No link is followed. COMPLETED goes first and args.json last, so that a kill in between
    leaves an output that is not complete, and that is known for one of this program."""
    always = "args.json", "costs.json", "COMPLETED"
    patterns = [name.split("/") for pattern in (*patterns, *always)
                for name in (pattern, f"{pattern}.partial", f"{pattern}.*.partial")]
    files, folders = [], []
    for place, folder_names, names in os.walk(folder, topdown=False):
        for name in (*names, *folder_names):
            path = pathlib.Path(place, name)
            parts = path.relative_to(folder).parts
            if path.is_dir() and not path.is_symlink():
                if any(matches(parts, pattern[:len(parts)]) for pattern in patterns if len(pattern) > len(parts)):
                    folders.append(path)
            elif any(matches(parts, pattern) for pattern in patterns):
                files.append(path)
    for path in sorted(files, key=lambda path: (path.name == "args.json", path.name != "COMPLETED")):
        path.unlink()
    for path in folders:
        if not any(path.iterdir()):
            path.rmdir()
    if others := os.listdir(folder):
        say(f"{folder}: what no run listed as its own stays there: {listing(others)}")


def matches(parts, pattern):
    """Whether the parts of a path match those of a pattern."""
    return len(parts) == len(pattern) and all(map(fnmatch.fnmatchcase, parts, pattern))


def reduce_sums(values, device):
    """The sums over all ranks of a list of numbers."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.tolist()


def one_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
