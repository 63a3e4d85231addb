"""Shared by all stages: the process group, JSONL files, and outputs that a killed run can continue."""
import contextlib
import ctypes
import datetime
import fcntl
import functools
import glob
import hashlib
import importlib.metadata
import json
import logging
import os
import pathlib
import platform
import re
import resource
import shutil
import sys
import time
from collections import Counter, namedtuple

import torch
import torch.distributed as dist

from colbench import schema
from colbench.schema import InputError, one_line, read_json, record
from lib import VERSION

# Where a stage runs (returned by start): the number of this process, how many there are, its torch.device
Runtime = namedtuple("Runtime", "rank world_size device")


def run_stage(main):
    """Run a stage's main(). InputError and OSError become one line on stderr, exit status 2.
    colbench's log goes to stdout."""
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    logging.getLogger("colbench").setLevel("INFO" if os.environ.get("RANK", "0") == "0" else "WARNING")
    try:
        main()
        barrier()                               # a rank that leaves early would break the connections of the others
    except (InputError, OSError) as error:
        print("error:", error_text(error).replace("\n", "\\n"), file=sys.stderr)
        sys.exit(2)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def optional(package, who_needs):
    """Import a package that only some runs need, e.g. optional("peft", "LoRA adapters need"). If it is missing, raises
    InputError with the command that installs it."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise InputError(f"{who_needs} {package}: pip install {package}") from None


def error_text(error):
    """Message for an exception caught by run_stage."""
    if not isinstance(error, OSError):
        return str(error)
    return f"{error.filename}: {error.strerror.lower()}" if error.filename else one_line(error)


LIBC = ctypes.CDLL(None)


def start(seed):
    """Join the process group (torchrun's, or one of size 1) and seed torch. Returns Runtime(rank, world_size, device).
    """
    # glibc returns big buffers to the kernel at every free, and page faults then dominate small models on a CPU:
    # M_MMAP_MAX = 0 and a high M_TRIM_THRESHOLD keep them (several times faster training, measured).
    if hasattr(LIBC, "mallopt"):
        LIBC.mallopt(-4, 0)
        LIBC.mallopt(-1, 2 ** 31 - 1)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        local_rank, num_cards = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if local_rank >= num_cards:
            raise InputError(f"torchrun --nproc-per-node: only {num_cards} GPUs are visible")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)                               # before the group: NCCL uses the current device
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        store, rank, world_size = dist.HashStore(), 0, 1
        if "RANK" in os.environ:
            store, rank, world_size = next(dist.rendezvous("env://"))
        week = datetime.timedelta(days=7)                           # a rank that samples may be hours behind the others
        dist.init_process_group(backend, timeout=week, store=store, rank=rank, world_size=world_size)
    torch.manual_seed(seed)
    return Runtime(dist.get_rank(), dist.get_world_size(), device)


def trim_memory():
    """Return freed memory that start() keeps to the kernel. Batches of varying length fragment it: a run of a 135M
    model grew to 13 GB with 2 GB in use."""
    if hasattr(LIBC, "malloc_trim"):
        LIBC.malloc_trim(0)


def is_main():
    return not dist.is_initialized() or dist.get_rank() == 0


def say(*lines):
    """Print on rank 0 and flush. Without lines, print nothing."""
    if is_main() and lines:
        print(*lines, sep="\n", flush=True)


def barrier():
    if dist.is_initialized():
        dist.barrier()


def gather(value):
    """List of all ranks' `value`s (any objects), in rank order, on every rank."""
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def peak_memory_mb():
    """Peak memory so far in MiB: of the GPU if there is one, else the resident memory of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2 ** 20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# ---------------------------------------------------------------------------------------------------------------------
# reading

def read_jsonl(path, keys, check=None):
    """colbench.schema.read_jsonl, which also prints what it read."""
    rows = schema.read_jsonl(path, keys, check)
    say(f"reads {path} ({len(rows):,} rows)")
    return rows


def read_text(path):
    """A file's text, unchanged except that a final newline is removed."""
    try:
        return pathlib.Path(path).read_bytes().decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error})") from None


# ---------------------------------------------------------------------------------------------------------------------
# writing: each file is written under a temporary name and renamed when complete

@contextlib.contextmanager
def whole_file(path):
    """Open a temporary text file next to `path`; rename it to `path` at the end."""
    partial = f"{path}.partial"
    with open(partial, "w", encoding="utf-8", errors="backslashreplace") as file:
        yield file
    os.rename(partial, path)


def write_json(path, value):
    with whole_file(path) as file:
        file.write(json.dumps(value, indent=1, ensure_ascii=False) + "\n")     # a lone surrogate becomes JSON's escape


def write_jsonl(path, rows):
    """Write a JSONL file under a temporary name, then rename it."""
    with whole_file(path) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    say(f"writes {path} ({len(rows):,} rows)")


class RowFile:
    """A JSONL file that is made row by row. Every rank appends lines "NUMBER ROW" to its own partial file, in any
    order. A resumed run finds the existing rows (`done`: their numbers) and adds the others, on any number of ranks.
    finish() sorts all rows by number."""

    def __init__(self, out, runtime):
        self.out = pathlib.Path(out)
        self.runtime = runtime
        self.path = self.out.with_name(f"{self.out.name}.partial.{runtime.rank}of{runtime.world_size}")
        if runtime.rank == 0:
            for path in partial_files(self.out):                     # drop a last line cut short by a kill
                os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        barrier()
        self.done = set(self.find())
        barrier()                                                   # all ranks must read the same before one adds rows

    def find(self):
        """{number of a row: the row as bytes}, from all ranks of this run and of earlier ones."""
        rows = {}
        for path in partial_files(self.out):
            for line in path.read_bytes().splitlines():
                number, row = line.split(b" ", 1)
                rows[int(number)] = row
        return rows

    def add(self, number, row):
        with open(self.path, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{number} {json.dumps(row, ensure_ascii=False)}\n")

    def finish(self, num_rows):
        """Write the whole file and remove the partial ones. One rank calls this when all have ended."""
        rows = self.find()
        with whole_file(self.out) as file:
            for number in range(num_rows):
                file.write(rows[number].decode() + "\n")
        for path in partial_files(self.out):
            path.unlink()
        say(f"writes {self.out} ({num_rows:,} rows)")


def partial_files(out):
    """The partial files of an output (RowFile) from all ranks."""
    return sorted(out.parent.glob(f"{glob.escape(out.name)}.partial.*"))


def read_rows(path):
    """Rows of a JSONL file that this program made."""
    with open(path, "rb") as file:
        return [json.loads(line) for line in file]


# ---------------------------------------------------------------------------------------------------------------------
# outputs: args.json records the command. The same command continues the output or reports that it is done; another
# command is an error that names --overwrite

# Arguments that change nothing in an output except rounding and dropout
NO_INFLUENCE = {"activation_checkpointing", "browser", "compile", "concurrency", "dry_run", "max_attempts",
                "micro_batch_size", "out", "overwrite", "save_every", "track"}
MODEL_ENDINGS = ".safetensors", ".bin", ".gguf", ".pt", ".json", ".jinja", ".model", ".txt"


@functools.cache
def fingerprint(path):
    """Fingerprint of an input: hash of a file, or of all files in a model folder that affect its output. A name that is
    not a path is returned unchanged."""
    path = pathlib.Path(path)
    files = [path]
    if path.is_dir():
        files = [file for file in path.iterdir()
                 if file.suffix in MODEL_ENDINGS and not file.name.endswith("args.json")]
    return files_digest(files) if path.exists() else str(path)


def files_digest(paths):
    """Hash of the files' contents; for several files, of their names too."""
    digests = []
    for path in paths:
        with open(path, "rb") as file:
            digests.append((path.name, hashlib.file_digest(file, "sha256").hexdigest()))
    if len(digests) == 1:
        return digests[0][1][:16]
    return hashlib.sha256(repr(sorted(digests)).encode()).hexdigest()[:16]


def on_main(function):
    """Decorator: run on rank 0 only and return its result on every rank. InputError and OSError are raised on every
    rank."""
    @functools.wraps(function)
    def on_rank_0(*arguments, **options):
        result = None
        if is_main():
            try:
                result = function(*arguments, **options)
            except (InputError, OSError) as error:
                result = InputError(error_text(error))
        if dist.is_initialized():
            result = gather(result)[0]
        if isinstance(result, InputError):
            raise result
        return result
    return on_rank_0


ARGS = record({}, {"stage": str, "args": dict, "inputs": dict})         # of args.json


def read_args(out):
    """Read an output's args.json; if missing, return a record whose stage is "no run"."""
    path = pathlib.Path(out, "args.json") if os.path.isdir(out) else pathlib.Path(f"{out}.args.json")
    args = {"stage": "no run", "args": {}, "inputs": {}}
    if path.exists():
        args |= read_json(path, ARGS)
    return args


class Output:
    """A file or a folder that a stage writes. args.json in it, or FILE.args.json, records the command that made it.

    arguments   all flags of the stage, {name: value}
    inputs      files, folders, names of models
    folder      whether it is a folder"""

    lock = None                     # this process's args.json, open and locked until the process ends

    def __init__(self, out, arguments, inputs, folder=False):
        self.path = pathlib.Path(out)
        self.args_path = self.path / "args.json" if folder else pathlib.Path(f"{out}.args.json")
        self.complete = self.path / "COMPLETED" if folder else self.path        # exists when the stage has finished
        self.arguments = arguments
        self.inputs = [name for name in inputs if name]
        self.folder = folder

    @on_main
    def is_done(self):
        """True if the same command already made this output. Raises InputError if another command did (without
        --overwrite) or if an input lies in it. Writes nothing, so a stage can ask before it loads models."""
        fingerprint.cache_clear()
        out = self.path
        if out.exists() and out.is_dir() != self.folder:
            raise InputError(f"{out}: is {'a folder' if out.is_dir() else 'not a folder'}; choose another --out")
        for name in self.inputs:
            if os.path.exists(name) and pathlib.Path(name).resolve().is_relative_to(out.resolve()):
                raise InputError(f"{name}: is an input of this command and lies in --out {out}; choose another --out")
        if not self.begun_files():                                   # nothing can be lost
            return False
        before, now = read_args(out), self.record()
        if before["stage"] != now["stage"]:
            raise InputError(f"{out}: {before['stage']} made it; choose another --out, or remove it")
        if self.arguments["overwrite"]:
            return False
        check_same_command(out, before, now)
        if self.complete.exists():
            say(f"{out}: done already by the same command (add --overwrite if the code has changed)")
            return True
        return False

    @on_main
    def begin(self):
        """Write args.json and lock the output until this process exits. Continues an interrupted run of the same
        command; --overwrite deletes what is there."""
        self.args_path.parent.mkdir(parents=True, exist_ok=True)
        Output.lock = None                                           # the same process may call begin() again
        Output.lock = locked(self.args_path)
        self.last_cost = time.perf_counter()
        note = self.record()
        if self.arguments["overwrite"] or not self.begun_files():
            if self.folder:
                self.complete.unlink(missing_ok=True)                # first: a kill in the loop must not look complete
            for old in self.begun_files():
                if old.is_dir():
                    shutil.rmtree(old)
                else:
                    old.unlink()
        elif self.complete.exists():                                 # finished since is_done()
            raise InputError(f"{self.path}: has just been made by the same command")
        else:
            say(f"{self.path}: continues an interrupted run")
            note = json.loads(self.args_path.read_text("utf-8"))     # keeps its costs
        self.write_args({**note, "process": f"{os.getpid()} on {platform.node()}"})

    def record(self):
        """Contents of args.json: the stage, its arguments, its inputs, versions."""
        return {
            "stage": pathlib.Path(sys.argv[0]).name,
            "args": {key: value for key, value in sorted(self.arguments.items()) if key not in NO_INFLUENCE},
            "inputs": {str(name): fingerprint(name) for name in self.inputs},
            "versions": {"sweet-rl": VERSION, "python": sys.version.split()[0], "torch": str(torch.__version__),
                         "transformers": importlib.metadata.version("transformers")},
        }

    def begun_files(self):
        """Existing files of this output, except args.json."""
        files = self.path.glob("*") if self.folder else (self.path, *partial_files(self.path))
        return [path for path in files if path.exists() and not path.name.startswith("args.json")]

    def kept_rows(self, name):
        """Rows of a file in the folder that an interrupted run of the same command finished; None if it did not.
        Call this before begin()."""
        path = self.path / name
        return read_rows(path) if path.exists() and not self.arguments["overwrite"] else None

    def write_args(self, record):
        """Replace args.json without ever releasing the lock."""
        partial = pathlib.Path(f"{self.args_path}.partial")
        write_json(partial, record)
        lock = locked(partial)
        os.rename(partial, self.args_path)
        Output.lock = lock                                           # this also closes the replaced file

    def note(self, **values):
        """Rank 0 adds these values to args.json."""
        if is_main():
            self.write_args(read_args(self.path) | values)

    def add_costs(self, **numbers):
        """Rank 0 adds these numbers ("trained_tokens", "generated_tokens") and the seconds since begin() or the last
        call to "costs" in args.json."""
        if is_main():
            now = time.perf_counter()
            costs = Counter(read_args(self.path).get("costs"))
            costs.update(numbers, seconds=now - self.last_cost)
            self.last_cost = now
            self.note(costs=costs)


def check_same_command(out, before, now):
    """Raises InputError if two records (Output) differ in arguments or inputs. A server's address may differ."""
    old, new = [json.loads(re.sub(r'https?:/[^#"]*', "", json.dumps(said))) for said in (before, now)]
    for part in ("args", "inputs"):
        for key in sorted({**old[part], **new[part]}.keys() - NO_INFLUENCE):
            old_value, new_value = old[part].get(key), new[part].get(key)
            if old_value != new_value:
                raise InputError(f"{out}: made with another {key} ({old_value}, now {new_value}); choose another --out "
                                 "or add --overwrite")


def locked(path):
    """Open the file `path` (made if missing) with a lock that ends with this process. If another process holds it,
    raises InputError with its number and host."""
    file = open(path, "ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = re.search('"process": "(.*)"', path.read_text("utf-8"))
        process = f"process {holder[1]}" if holder else "another process"
        raise InputError(f"{path}: {process} is making this output; wait for it, or choose another --out") from None
    except OSError as error:                                        # e.g. Lustre, as it is often mounted
        say(f"{path}: cannot be locked ({one_line(error)}): make sure that no other process writes this output")
    if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
        return file
    return locked(path)                                             # Output.write_args replaced it meanwhile


# ---------------------------------------------------------------------------------------------------------------------
# --track PROJECT: a stage also logs to trackio, a local tracker with wandb's interface

def open_track(output):
    """Returns log(step, **numbers), which logs on rank 0 to the trackio project --track, or does nothing without one.
    Each start of a stage is a separate run."""
    project = output.arguments["track"]
    if project is None or not is_main():
        return lambda step, **numbers: None
    import trackio
    name = f"{output.path} {time.strftime('%Y-%m-%d %H:%M:%S')}"
    run = trackio.init(project=project, name=name, config=output.arguments)
    return lambda step, **numbers: run.log(numbers, step=step)
