"""Studies: arms x seeds x sizes (or rounds, or settings), two processes at a time. Start it in the repository's root.

Reads   scripts/recipes.toml: the commands of each domain. `base`, the base model, is also an arm.
Writes  OUT/seedN/: tasks, dialogues, critics and agents of a seed, each with a log
        OUT/report/ (05); OUT/table.csv: a row for each arm and size, round or setting
        OUT/tasks.csv: success, rounds and ending of each dialogue, and whether all was known (for scripts/table.py)

The arms of a seed share tasks, dialogues and critics. The same command continues where the last one stopped. To make an
arm again with other settings or other code, remove it: rm -r OUT/seed*/ARM*

    python scripts/study.py sweet mtdpo --sizes 80 320                  success against the number of dialogues
    python scripts/study.py sweet mtdpo mtdpo@3200 --sizes 80 320       one arm with a further size
    python scripts/study.py sweet mtdpo --rounds 4 --seeds 20 21 22     rounds: new dialogues of the last agent, from
                                                                        which critic and agent are trained further
    python scripts/study.py mtdpo --split validation --grid lr=1e-4,3e-4 epochs=2,4             a search
    python scripts/study.py --chain 0 --out out                         the chain of run.sh: one seed, in OUT itself
"""
import collections
import concurrent.futures
import csv
import dataclasses
import itertools
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import threading
import time
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from colbench import domain_of  # noqa: E402
from lib.flags import argument_parser  # noqa: E402
from lib.runtime import InputError, read_rows, run_stage, say  # noqa: E402

RECIPES = "scripts/recipes.toml"
REQUIRED = "agents", "base", "dialogues", "agent.jsonl", "report"    # keys and outputs of a domain that are read here
FILLED_IN = "seed", "model", "num_train", "agent", "files"           # {names} of commands that are not keys or outputs
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
MANY = 800                       # an arm's "many" applies above this number of dialogues

locks = collections.defaultdict(threading.Lock)      # one per output


# ---------------------------------------------------------------------------------------------------------------------
# recipes

def read_domain(name, changes=(), split="test"):
    """A domain of scripts/recipes.toml as a dict: its keys, and `outputs`, the commands of its chain and its studies.
    changes: NAME=NUMBER, which replace its own numbers."""
    try:
        domains = tomllib.loads((ROOT / RECIPES).read_text())
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{RECIPES}: {error}") from None
    if name not in domains:
        raise InputError(f"--domain {name}: must be one of {', '.join(domains)} ({RECIPES})")
    domain = {"chain": {}, "study": {}, "first": {}, "later": {}, "many": {}, **domains[name]}
    for change in changes:
        key, _, number = change.partition("=")
        if type(domain.get(key)) is not int or not number.isdigit():
            raise InputError(f"--set {change}: must be NAME=NUMBER, with a number of [{name}] in {RECIPES}")
        domain[key] = int(number)
    domain["outputs"] = {**domain["chain"], **domain["study"]}
    domain["tasks"] = f"{{{split}.jsonl}}"
    dialogues = [f"{arm}.jsonl" for arm in arms_of(domain)]
    known = {*FILLED_IN, *domain, *domain["outputs"], *dialogues}
    for needed in [*REQUIRED, *re.findall(r"{(?:all:)?([\w.-]+)}", str(domain))]:
        if needed not in known:
            raise InputError(f"{RECIPES}: [{name}] needs {needed}, and has no key or output of this name")
    return domain


def arms_of(domain):
    """The base model, and the outputs that a method trains."""
    arms = [output for output, command in domain["outputs"].items() if "--method" in command]
    return ["base", *arms]


# ---------------------------------------------------------------------------------------------------------------------
# steps

def run_step(out, words, ranks=1, threads=1):
    """Run a stage that writes `out`, and print its command. Returns the text of OUT.log, the stage's output.
    Skipped if OUT.done records the same command. Exits with status 1 if the stage fails."""
    command = [sys.executable, *words, "--out", str(out)]
    if ranks > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    log = pathlib.Path(f"{out}.log")
    done = pathlib.Path(f"{out}.done")
    if out.exists() and is_done(done, command):
        return log.read_text()
    environment = {**ENVIRONMENT, **os.environ, "OMP_NUM_THREADS": str(threads)}
    log.parent.mkdir(parents=True, exist_ok=True)
    say(f"{out!s:36} starts (log: {log})\n    {shlex.join(['python', *command[1:]])}")
    begin = time.monotonic()
    with open(log, "w") as file:
        status = subprocess.call(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment)
    text = log.read_text()
    if status != 0:
        last_lines = "\n".join(text.splitlines()[-20:])             # at once: arms run side by side
        print(f"{last_lines}\nfailed: {out} (whole log: {log})", file=sys.stderr)
        sys.exit(1)
    done.write_text(str(command))
    seconds = time.monotonic() - begin
    last_line = text.strip().rpartition("\n")[2]
    say(f"{out!s:36} {seconds:4.0f} s  {last_line}")
    return text


def is_done(done, command):
    """True if the file `done` records this command, and no file that the command names is newer."""
    if not done.exists() or done.read_text() != str(command):
        return False
    files = []
    for name in re.split("[=,\0]", "\0".join(command)):
        path = pathlib.Path(name)
        files += [path, *path.glob("*.*")]
    end = done.stat().st_mtime
    return not any(file.exists() and file.stat().st_mtime > end for file in files)


def show(text):
    """Print a stage's output without progress bars and reads/writes lines."""
    for line in text.splitlines():
        if not re.match(r"reads |writes |arguments: |.*%\||\s+$", line):
            print(line)


# ---------------------------------------------------------------------------------------------------------------------
# an agent: the outputs that its command names are made first

@dataclasses.dataclass
class Run:
    """An agent to train and to evaluate."""

    arm: str
    size: int | None                                                 # number of dialogues; None: all of them
    settings: dict                                                   # {flag of 04: value} of a search
    round: int
    seed: int
    args: object                                                     # of the command line
    domain: dict                                                     # of read_domain

    def __post_init__(self):
        self.command = self.domain["outputs"].get(self.arm, "")      # base has none
        self.name = self.name_of(self.arm, self.settings)
        self.folder = self.args.out                                  # for the outputs of its seed
        self.ranks = num_devices()                                   # processes of a step that others wait for
        if self.args.chain is None:
            self.folder = self.args.out / f"seed{self.seed}"
            self.ranks = 1

    def name_of(self, output, settings):
        """OUTPUT, OUTPUT_lr1e-4_epochs2, OUTPUT@SIZE or OUTPUT@ROUND."""
        for flag, value in settings.items():
            output += f"_{flag}{value}"
        number = self.round if self.args.rounds > 1 else self.size
        if number and self.arm != "base":
            output += f"@{number}"
        return output

    def fill(self, command):
        """A command with its {names} filled in: keys of the domain, or paths of outputs, which are made first."""
        return re.sub(r"{([\w.:-]+)}", lambda match: self.value(match[1]), command)

    def value(self, name):
        """The text that replaces {name} in a command."""
        if name == "seed":
            return str(self.seed + 1000 * (self.round - 1))
        if name in self.domain:
            return self.fill(str(self.domain[name]))
        return shlex.quote(str(self.make(name)))

    def make(self, name):
        """Make the output that a command calls {name}; returns its path."""
        if name == "model" and self.round == 1:
            return self.domain["base"]
        if name == "model":
            return dataclasses.replace(self, round=self.round - 1).agent()
        if name.startswith("all:"):
            return self.join_rounds(name.removeprefix("all:"))
        arm = name.removesuffix(".jsonl")
        if arm in arms_of(self.domain):
            other = dataclasses.replace(self, arm=arm, settings={})
            return other.agent() if arm == name else other.evaluate()
        command = self.domain["outputs"][name]
        if self.round > 1:
            name = f"{self.name}-{name}"
        elif not name.endswith(".jsonl"):                            # all sizes share tasks and dialogues
            name = self.name_of(name, {})
        return self.step(name, command, self.ranks)

    def join_rounds(self, output):
        """An output of all rounds until this one, in one file."""
        rounds = [dataclasses.replace(self, round=number + 1) for number in range(self.round)]
        files = [run.make(output) for run in rounds]
        path = files[0]
        if self.round > 1:
            path = self.folder / f"{self.name}-all.jsonl"
            # Rounds may share tasks, and each counts "sample" from 0: without this key they are numbered in order.
            rows = re.sub(rb'"sample": \d+, ', b"", b"".join(file.read_bytes() for file in files))
            with locks[path]:
                if not path.exists() or path.read_bytes() != rows:   # a newer file would train its critic again
                    path.write_bytes(rows)
        return path

    def agent(self):
        """Train the agent; returns its model folder."""
        if self.arm == "base":
            return self.domain["base"]
        command = [self.command]
        if (self.size or self.domain["dialogues"]) > MANY:
            command.append(self.domain["many"].get(self.arm, ""))
        more = "first" if self.round == 1 else "later"
        command.append(self.domain[more].get(self.arm, ""))
        command += [f"--{flag} {shlex.quote(value)}" for flag, value in self.settings.items()]
        return self.step(self.name, " ".join(command), 1)

    def evaluate(self):
        """Roll out the agent on the tasks of --split; returns the file."""
        agent = shlex.quote(str(self.agent()))
        command = self.domain["outputs"]["agent.jsonl"].replace("{agent}", agent)
        ranks = self.ranks if "--critic" in self.command else 1      # the longest chain of steps: others have finished
        first = dataclasses.replace(self, round=1)                   # all rounds share its tasks and seed
        return first.step(f"{self.name}.jsonl", command, ranks)

    def step(self, name, command, ranks):
        """Make an output of the seed with its command; returns its path."""
        words = shlex.split(self.fill(command))
        if words[0] not in ("02_rollout.py", "03_train_critic.py"):  # agents are trained side by side
            ranks = 1
        if self.size and not name.endswith(".jsonl"):                # for training critics and agents
            words += ["--num-trajectories", str(self.size)]
        out = self.folder / name
        with locks[out]:
            run_step(out, words, ranks)
        return out


# ---------------------------------------------------------------------------------------------------------------------
# tables

def files_of(points):
    """Arguments for 05: the dialogues of all agents, and the baseline."""
    words = []
    for name, runs in points.items():
        paths = ",".join(str(run.folder / f"{name}.jsonl") for run in runs)
        words.append(f"{name}={paths}")
    baselines = [name for name, runs in points.items() if runs[0].arm == "mtdpo" and not runs[0].settings]
    if baselines:
        words += ["--baseline", baselines[-1]]
    return shlex.join(words)


def write_tables(out, points):
    """Write table.csv and tasks.csv from 05's results."""
    report = out / "report"
    metrics = json.loads((report / "metrics.json").read_text())
    rows, task_rows = [], []
    for name, runs in points.items():
        rows.append(table_row(runs[0], metrics[name]))
        for dialogue in read_rows(report / "scored" / f"{name}.jsonl"):
            task_rows.append({
                "task_id": dialogue["task_id"],
                "family": dialogue["task"].get("family"),
                "sample": dialogue["sample"],
                "seed": runs[dialogue.get("run", 0)].seed,           # 05 numbers the files of a name
                "arm": name,
                "success": float(domain_of(dialogue["task"]).eval_score(dialogue)),
                "rounds": dialogue["num_rounds"],
                "known": dialogue["known"],
                "ending": dialogue["ending"]})
    write_csv(out / "table.csv", rows)
    write_csv(out / "tasks.csv", task_rows)
    say(f"writes {out}/table.csv, {out}/tasks.csv; the page: {report}/report.html")


def table_row(run, metrics):
    """A row of table.csv: the settings of the run, and 05's numbers."""
    row = {"method": run.arm, **run.settings, "dialogues": run.size, "round": None if run.arm == "base" else run.round}
    for key, value in {**metrics, **metrics.get("costs", {})}.items():
        if isinstance(value, (int, float)):
            column = key.removesuffix("_rate").removeprefix("mean_")
            row[column] = f"{value:.7g}"
    row["low"], row["high"] = metrics.get("ci95", ("", ""))
    return row


def write_csv(path, rows):
    columns = dict.fromkeys(itertools.chain(*rows))                  # the keys of all rows, in their order
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


# ---------------------------------------------------------------------------------------------------------------------

def parse_args(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument("arms", nargs="*", metavar="ARM",
                        help="base, or an arm of scripts/recipes.toml; ARM@SIZE; default: those of run.sh")
    parser.add_argument("--domain", default="backend", help="a domain of scripts/recipes.toml")
    parser.add_argument("--out", type=pathlib.Path, default="out/study", help="folder to write")
    parser.add_argument("--sizes", type=int, nargs="+", default=[None], help="numbers of dialogues to train on, nested")
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11, 12, 13, 14],
                        help="each has tasks, dialogues and critics of its own")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of training")
    parser.add_argument("--split", choices=["test", "validation"], default="test", help="tasks to compare agents on")
    parser.add_argument("--grid", nargs="+", default=[], metavar="FLAG=VALUE,VALUE", help="settings, all combinations")
    parser.add_argument("--chain", type=int, metavar="SEED", help="the chain of run.sh with this seed")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=NUMBER",
                        help="replaces a number of the domain, e.g. num_test=60")
    return parser.parse_args(argv)


def settings_of(arguments):
    """[{flag: value}], all combinations, of arguments FLAG=VALUE,VALUE."""
    choices = []
    for argument in arguments:
        flag, _, values = argument.partition("=")
        choices.append([(flag, value) for value in values.split(",")])
    return [dict(choice) for choice in itertools.product(*choices)]


def all_runs(args, domain):
    """The runs of the command line, arm by arm, then round by round, each for all seeds."""
    runs = []
    arms = arms_of(domain)
    for argument in args.arms or domain["agents"].split():
        arm, _, size = argument.partition("@")
        if arm not in arms:
            raise InputError(f"{arm}: no such arm in {RECIPES}, which has {', '.join(arms)}")
        sizes, settings, last_round = args.sizes, settings_of(args.grid), args.rounds
        if size:
            sizes = [int(size)]
        if arm == "base":
            sizes, settings, last_round = [None], [{}], 1
        for point in itertools.product(sizes, settings, range(1, last_round + 1), args.seeds):
            runs.append(Run(arm, *point, args, domain))
    return runs


def num_devices():
    """Number of GPUs in CUDA_VISIBLE_DEVICES, at most two; two cores without GPUs."""
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return 1 if devices and "," not in devices else 2


def main(argv=None):
    args = parse_args(argv)
    domain = read_domain(args.domain, args.set, args.split)
    if args.chain is not None:
        args.seeds = [args.chain]
    runs = all_runs(args, domain)
    points = {}                                                      # {name: its runs, one per seed}
    for run in runs:
        domain["dialogues"] = max(domain["dialogues"], run.size or 0)
        points.setdefault(run.name, []).append(run)
    domain["num_train"] = domain["dialogues"] // 4
    domain["files"] = files_of(points)
    longest_first = sorted(runs, key=lambda run: "--critic" not in run.command)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        ended = pool.map(Run.evaluate, longest_first)
    list(ended)                                                      # re-raises exceptions of the calls
    commands = {"report": domain["outputs"]["report"]}               # the study's own, if it has one
    if args.chain is not None:
        commands = domain["chain"]
    for output in ("gates", "report"):
        if output in commands:
            words = shlex.split(runs[0].fill(commands[output]))
            show(run_step(args.out / output, words, threads=2))
    write_tables(args.out, points)


if __name__ == "__main__":
    run_stage(main)
