"""What every stage stands on: the process group, JSONL files, outputs that a killed run goes on with."""
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

# Where a stage runs, as start() says it: the number of this process, how many there are, its torch.device
Runtime = namedtuple("Runtime", "rank world_size device")


def run_stage(main):
    """Run a stage's main(). Bad input (InputError) and what the system refuses (OSError) become one
    line on stderr and exit status 2. What the benchmark logs is printed."""
    sys.stdout.reconfigure(errors="backslashreplace")                # what cannot be shown must not end a run
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
    """The module of a package that only some runs need: optional("peft", "LoRA adapters need"); InputError that says
    how to install it."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise InputError(f"{who_needs} {package}: pip install {package}") from None


def error_text(error):
    """What is wrong, by an error that run_stage catches."""
    if not isinstance(error, OSError):
        return str(error)
    return f"{error.filename}: {error.strerror.lower()}" if error.filename else one_line(error)


LIBC = ctypes.CDLL(None)


def start(seed):
    """Join the process group (torchrun's, or one of size 1), seed torch; returns Runtime(rank, world_size, device)."""
    # glibc returns big buffers to the kernel at every free, and page faults then dominate small models on a CPU:
    # M_MMAP_MAX = 0 and a high M_TRIM_THRESHOLD keep them (several times faster training, measured).
    if hasattr(LIBC, "mallopt"):
        LIBC.mallopt(-4, 0)
        LIBC.mallopt(-1, 2 ** 31 - 1)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        local_rank, num_cards = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if local_rank >= num_cards:
            raise InputError(f"torchrun --nproc-per-node: only {num_cards} GPUs can be seen here")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)                               # before the group: NCCL takes the current one
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
    """Give the kernel back what start() keeps of freed buffers. Batches of all lengths leave holes between them that
    no later one fits into: a run of a 135M model grew to 13 GB where 2 GB are in use."""
    if hasattr(LIBC, "malloc_trim"):
        LIBC.malloc_trim(0)


def is_main():
    return not dist.is_initialized() or dist.get_rank() == 0


def say(*lines):
    """Print lines, if there are any, on rank 0 alone, at once."""
    if is_main() and lines:
        print(*lines, sep="\n", flush=True)


def barrier():
    if dist.is_initialized():
        dist.barrier()


def gather(value):
    """The `value`s (any objects) of all ranks in their order, on every rank."""
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def peak_memory_mb():
    """Highest memory use so far in MiB: of the GPU where there is one, else resident memory of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2 ** 20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# ---------------------------------------------------------------------------------------------------------------------
# reading

def read_jsonl(path, keys, check=None):
    """colbench.schema.read_jsonl; says what it has read."""
    rows = schema.read_jsonl(path, keys, check)
    say(f"reads {path} ({len(rows):,} rows)")
    return rows


def read_text(path):
    """A file's text as it is, but for a newline at its end."""
    try:
        return pathlib.Path(path).read_bytes().decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: no UTF-8 text ({error})") from None


# ---------------------------------------------------------------------------------------------------------------------
# writing: each file beside its name, and renamed when it is whole

@contextlib.contextmanager
def whole_file(path):
    """Opens a text file beside `path`, and gives it this name at the end."""
    partial = f"{path}.partial"
    with open(partial, "w", encoding="utf-8", errors="backslashreplace") as file:
        yield file
    os.rename(partial, path)


def write_json(path, value):
    with whole_file(path) as file:
        file.write(json.dumps(value, indent=1, ensure_ascii=False) + "\n")     # a lone surrogate becomes JSON's escape


def write_jsonl(path, rows):
    """Write a whole JSONL file beside its name and rename it."""
    with whole_file(path) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    say(f"writes {path} ({len(rows):,} rows)")


class RowFile:
    """A JSONL file that is made row by row. Every rank appends lines "NUMBER ROW" to a partial file of its own, in any
    order; a run that was killed finds the rows that are there (`done`: their numbers) and adds the others, on any
    number of ranks; finish() puts all rows in the order of their numbers."""

    def __init__(self, out, runtime):
        self.out = pathlib.Path(out)
        self.runtime = runtime
        self.path = self.out.with_name(f"{self.out.name}.partial.{runtime.rank}of{runtime.world_size}")
        if runtime.rank == 0:
            for path in partial_files(self.out):                     # without the line that a kill has cut
                os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        barrier()
        self.done = set(self.find())
        barrier()                                                   # before any rank adds to what all must read alike

    def find(self):
        """{number of a row: the row as bytes}, of this run and those before, of all ranks."""
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
        """Write the whole file and remove the partial ones; one rank calls this, when all have ended."""
        rows = self.find()
        with whole_file(self.out) as file:
            for number in range(num_rows):
                file.write(rows[number].decode() + "\n")
        for path in partial_files(self.out):
            path.unlink()
        say(f"writes {self.out} ({num_rows:,} rows)")


def partial_files(out):
    """The partial files of an output (RowFile), of all ranks."""
    return sorted(out.parent.glob(f"{glob.escape(out.name)}.partial.*"))


def read_rows(path):
    """The rows of a JSONL file that this program made."""
    with open(path, "rb") as file:
        return [json.loads(line) for line in file]


# ---------------------------------------------------------------------------------------------------------------------
# outputs: args.json says what made one. The same command goes on with it, or says that it is done; another one is an
# error that names --overwrite

# Arguments that change nothing of what stands in an output but rounding and dropout
NO_INFLUENCE = {"activation_checkpointing", "browser", "compile", "concurrency", "dry_run", "max_attempts",
                "micro_batch_size", "out", "overwrite", "save_every", "track"}
MODEL_ENDINGS = ".safetensors", ".bin", ".gguf", ".pt", ".json", ".jinja", ".model", ".txt"


@functools.cache
def fingerprint(path):
    """What tells an input from another: a file's hash; of a model folder that of all files that decide what the model
    says; a name that is no path stands for itself."""
    path = pathlib.Path(path)
    files = [path]
    if path.is_dir():
        files = [file for file in path.iterdir()
                 if file.suffix in MODEL_ENDINGS and not file.name.endswith("args.json")]
    return files_digest(files) if path.exists() else str(path)


def files_digest(paths):
    """A hash of the contents and, of several files, of the names."""
    digests = []
    for path in paths:
        with open(path, "rb") as file:
            digests.append((path.name, hashlib.file_digest(file, "sha256").hexdigest()))
    if len(digests) == 1:
        return digests[0][1][:16]
    return hashlib.sha256(repr(sorted(digests)).encode()).hexdigest()[:16]


def on_main(decide):
    """A decorator: what rank 0 returns or raises (bad input, what the system refuses), on every rank."""
    @functools.wraps(decide)
    def decide_on_main(*arguments, **options):
        decision = None
        if is_main():
            try:
                decision = decide(*arguments, **options)
            except (InputError, OSError) as error:
                decision = InputError(error_text(error))
        if dist.is_initialized():
            decision = gather(decision)[0]
        if isinstance(decision, InputError):
            raise decision
        return decision
    return decide_on_main


def args_path(out, folder):
    """Where an output's args.json stands."""
    return pathlib.Path(out) / "args.json" if folder else pathlib.Path(f"{out}.args.json")


def read_args(out):
    """What args.json says of an output, a file or a folder; of "no run" where there is none."""
    path = args_path(out, pathlib.Path(out).is_dir())
    args = {"stage": "no run", "args": {}, "inputs": {}}
    if path.exists():
        args |= read_json(path, record({}, {"stage": str, "args": dict, "inputs": dict}))
    return args


class Output:
    """A file or a folder that a stage writes. args.json in it, or FILE.args.json, says what made it.

    arguments   all flags of the stage, {name: value}
    inputs      files, folders, names of models
    folder      whether it is a folder"""

    lock = None                     # the args.json of this process's output, open and locked until the process ends

    def __init__(self, out, arguments, inputs, folder=False):
        self.path = pathlib.Path(out)
        self.arguments = arguments
        self.inputs = [name for name in inputs if name]
        self.folder = folder

    @on_main
    def is_done(self):
        """True if the same command already made this output; InputError if another command did, unless --overwrite, or
        if an input lies in it. Writes nothing, so that a stage can ask before it loads models."""
        fingerprint.cache_clear()
        out = self.path
        if out.exists() and out.is_dir() != self.folder:
            raise InputError(f"{out}: is {'a folder' if out.is_dir() else 'no folder'}; choose another --out")
        for name in self.inputs:
            if os.path.exists(name) and pathlib.Path(name).resolve().is_relative_to(out.resolve()):
                raise InputError(f"{name}: is an input of this command and lies in --out {out}; choose another --out")
        if not self.begun_files():                                   # nothing is lost, whoever began it
            return False
        before, now = read_args(out), self.record()
        if before["stage"] != now["stage"]:
            raise InputError(f"{out}: {before['stage']} made it; choose another --out, or remove it")
        if self.arguments["overwrite"]:
            return False
        check_same_command(out, before, now)
        if self.is_whole():
            say(f"{out}: done already by the same command (after a change of code: --overwrite)")
            return True
        return False

    @on_main
    def begin(self):
        """Keep arguments and versions in args.json, and other processes out until this one ends. What an interrupted
        run of the same command left is kept; what another one made is removed (--overwrite)."""
        path = args_path(self.path, self.folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        Output.lock = None                                           # this process may begin it again
        Output.lock = locked(path)
        self.last_cost = time.perf_counter()
        note = self.record()
        if self.arguments["overwrite"] or not self.begun_files():
            if self.folder:
                (self.path / "COMPLETED").unlink(missing_ok=True)    # first: a kill in the loop leaves no whole output
            for old in self.begun_files():
                if old.is_dir():
                    shutil.rmtree(old)
                else:
                    old.unlink()
        elif self.is_whole():                                        # since is_done was asked
            raise InputError(f"{self.path}: the same command has just made it")
        else:
            say(f"{self.path}: continues an interrupted run")
            note = json.loads(path.read_text("utf-8"))               # with its costs
        self.write_args({**note, "process": f"{os.getpid()} on {platform.node()}"})

    def record(self):
        """What args.json says: the stage, its arguments, its inputs, versions."""
        return {
            "stage": pathlib.Path(sys.argv[0]).name,
            "args": {key: value for key, value in sorted(self.arguments.items()) if key not in NO_INFLUENCE},
            "inputs": {str(name): fingerprint(name) for name in self.inputs},
            "versions": {"sweet-rl": VERSION, "python": sys.version.split()[0], "torch": str(torch.__version__),
                         "transformers": importlib.metadata.version("transformers")},
        }

    def begun_files(self):
        """What is there of it, but for its args.json."""
        files = self.path.glob("*") if self.folder else (self.path, *partial_files(self.path))
        return [path for path in files if path.exists() and not path.name.startswith("args.json")]

    def is_whole(self):
        """Whether the stage that made it has ended."""
        return (self.path / "COMPLETED" if self.folder else self.path).exists()

    def kept_rows(self, name):
        """The rows of a file in the folder that an interrupted run of the same command has finished; None: it has not.
        To be asked before begin()."""
        path = self.path / name
        return read_rows(path) if path.exists() and not self.arguments["overwrite"] else None

    def write_args(self, record):
        """Write args.json, which is locked at every moment."""
        path = args_path(self.path, self.folder)
        partial = pathlib.Path(f"{path}.partial")
        write_json(partial, record)
        lock = locked(partial)
        os.rename(partial, path)
        Output.lock = lock                                           # this closes the replaced file, too

    def add_costs(self, **numbers):
        """Add numbers of this process ("trained_tokens", "generated_tokens"), and the seconds since begin() or the last
        call, to "costs" in args.json; on rank 0."""
        if is_main():
            now = time.perf_counter()
            record = json.loads(args_path(self.path, self.folder).read_text("utf-8"))
            record["costs"] = Counter(record.get("costs"))
            record["costs"].update(numbers, seconds=now - self.last_cost)
            self.last_cost = now
            self.write_args(record)


def check_same_command(out, before, now):
    """InputError where two records (Output) name other arguments or inputs. A server's address may have changed."""
    old, new = [json.loads(re.sub(r'https?:/[^#"]*', "", json.dumps(said))) for said in (before, now)]
    for part in ("args", "inputs"):
        for key in sorted({**old[part], **new[part]}.keys() - NO_INFLUENCE):
            old_value, new_value = old[part].get(key), new[part].get(key)
            if old_value != new_value:
                raise InputError(f"{out}: made with another {key} ({old_value}, now {new_value}); choose another --out "
                                 "or add --overwrite")


def locked(path):
    """The file `path`, made if it is missing, with a lock that ends with this process. InputError where another process
    has it, by its number and host."""
    file = open(path, "ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = re.search('"process": "(.*)"', path.read_text("utf-8"))
        process = f"process {holder[1]}" if holder else "another process"
        raise InputError(f"{path}: {process} is making this output; wait for it, or choose another --out") from None
    except OSError as error:                                        # Lustre, say, as it is often mounted
        say(f"{path}: no lock here ({one_line(error)}): nothing keeps a second process from this output")
    if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
        return file
    return locked(path)                                             # Output.write_args has replaced it meanwhile


# ---------------------------------------------------------------------------------------------------------------------
# --track PROJECT: what a stage logs goes to trackio, too, a tracker on this machine with the interface of wandb

def open_track(output):
    """A function log(step, **numbers): the curve of an Output in the project --track of trackio, on rank 0; each start
    of a stage is a run of its own. Without a project it does nothing."""
    project = output.arguments["track"]
    if project is None or not is_main():
        return lambda step, **numbers: None
    import trackio
    name = f"{output.path} {time.strftime('%Y-%m-%d %H:%M:%S')}"
    run = trackio.init(project=project, name=name, config=output.arguments)
    return lambda step, **numbers: run.log(numbers, step=step)
