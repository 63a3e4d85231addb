"""Studies: arms x seeds x sizes (or rounds, or settings), two processes at a time. Start it in the repository's root.

Reads   scripts/arms.toml: the settings of the domains and of their arms. `base`, the base model, is an arm, too.
Writes  OUT/seedN/: tasks, dialogues, critics and agents of a seed, beside each of them a log
        OUT/report/ (05); OUT/table.csv: a row for each arm and size, round or setting
        OUT/tasks.csv: success and rounds of each task, seed and arm (scripts/table.py makes a table of it)

The arms of a seed share tasks, dialogues and critics. The same command again goes on where the last one stopped. To
make an arm again with other settings or other code, remove it: rm -r OUT/seed*/ARM*

    python scripts/study.py sweet mtdpo --sizes 80 320                  success against the number of dialogues
    python scripts/study.py sweet mtdpo mtdpo@3200 --sizes 80 320       one arm with a further size
    python scripts/study.py sweet mtdpo --rounds 4 --seeds 20 21 22     rounds: new dialogues of the last agent, from
                                                                        which critic and agent are trained further
    python scripts/study.py mtdpo --split validation --grid lr=1e-4,3e-4 epochs=2,4             a search
    python scripts/study.py base rft mtdpo sweet --chain 0 --out out    the chain of run.sh: one seed, in OUT itself
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
import subprocess
import sys
import threading
import time
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from colbench import DOMAINS  # noqa: E402
from lib.flags import argument_parser  # noqa: E402
from lib.runtime import InputError, read_rows, run_stage, say  # noqa: E402

ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
MANY = 800                       # dialogues, above which an arm's "many" counts

locks = collections.defaultdict(threading.Lock)      # of each output


def run_step(out, words, ranks=1, threads=1):
    """Run a stage that writes `out`, and print lines about it; returns the text of OUT.log, where its output goes.
    What the same command has finished (OUT.done) is not asked again. Ends with status 1 where the stage fails."""
    command = [sys.executable, *words, "--out", str(out)]
    if ranks > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    log = pathlib.Path(f"{out}.log")
    done = pathlib.Path(f"{out}.done")
    if out.exists() and is_done(done, command):
        return log.read_text()
    environment = {**ENVIRONMENT, **os.environ, "OMP_NUM_THREADS": str(threads)}
    log.parent.mkdir(parents=True, exist_ok=True)
    say(f"{out!s:36} begins (log: {log})")
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
    """Whether the file `done` says that this command has ended, and nothing that it names is newer."""
    if not done.exists() or done.read_text() != str(command):
        return False
    files = []
    for name in re.split("[=,\0]", "\0".join(command)):
        path = pathlib.Path(name)
        files += [path, *path.glob("*.*")]
    end = done.stat().st_mtime
    return not any(file.exists() and file.stat().st_mtime > end for file in files)


def show(text):
    """Print the tables of what a stage has printed: no bars, nor what it reads and writes."""
    for line in text.splitlines():
        if not re.match(r"reads |writes |arguments: |.*%\||\s+$", line):
            print(line)


# ---------------------------------------------------------------------------------------------------------------------
# what an agent needs: each method makes one output, and before it the outputs that it needs

@dataclasses.dataclass
class Run:
    """An agent to make and to evaluate."""

    arm: str
    size: int | None                                                 # number of dialogues; None: all of them
    settings: dict                                                   # {flag of 04: value} of a search
    round: int
    seed: int
    args: object                                                     # of the command line
    domain: dict                                                     # of read_domain

    def __post_init__(self):
        self.folder = self.args.out                                  # of the outputs of its seed
        self.ranks = num_devices()                                   # processes of a step that others wait for
        if self.args.chain is None:
            self.folder = self.args.out / f"seed{self.seed}"
            self.ranks = 1
        self.table = self.domain["arms"][self.arm]                   # empty for base
        self.name = self.name_of(self.arm, self.settings)
        self.round_seed = self.seed + 1000 * (self.round - 1)        # by which 04 draws dialogues and candidates

    def name_of(self, arm, settings):
        """ARM, ARM_lr1e-4_epochs2, ARM@SIZE or ARM@ROUND."""
        for flag, value in settings.items():
            arm += f"_{flag}{value}"
        number = self.round if self.args.rounds > 1 else self.size
        if number and self.arm != "base":
            arm += f"@{number}"
        return arm

    def step(self, name, program, ranks=1, **flags):
        """Make an output of the seed; returns its path. Flags of None are left out."""
        words = program.split()
        for flag, value in flags.items():
            if value is not None:
                words += [f"--{flag.replace('_', '-')}", str(value)]
        out = self.folder / name
        with locks[out]:
            run_step(out, words, ranks)
        return out

    def tasks(self, name, **flags):
        return self.step(name, f"01_generate_tasks.py --domain {self.domain['domain']}", **flags)

    def rollout(self, name, ranks, **flags):
        program = f"02_rollout.py --simulator rules {self.domain['rollout']}"
        return self.step(name, program, ranks, **flags, max_rounds=self.domain["max_rounds"])

    def train(self, name, program, ranks, **flags):
        flags["model"] = self.model_before()
        return self.step(name, program, ranks, **flags, seed=self.round_seed, num_trajectories=self.size)

    def model_before(self):
        """The model that its round begins with."""
        if self.round == 1:
            return self.domain["base"]
        return dataclasses.replace(self, round=self.round - 1).agent()

    def dialogues(self):
        """Four dialogues of this model on each training task of the round, with the c that the arm's critic reads."""
        name, tasks_name = "offline.jsonl", "train.jsonl"
        if self.round > 1:
            name = f"{self.name}-offline.jsonl"
            tasks_name = f"train@{self.round}.jsonl"
        num_tasks = self.domain["dialogues"] // 4
        tasks = self.tasks(tasks_name, split="train", num_tasks=num_tasks, seed=self.round_seed)
        agent = self.model_before()
        path = self.rollout(name, self.ranks, tasks=tasks, agent=agent, samples=4, seed=self.round_seed)
        if "c" not in self.table:
            return path
        kind = self.table["c"]
        program = f"scripts/change_c.py --kind {kind}"
        return self.step(f"{path.stem}-{kind}.jsonl", program, trajectories=path)

    def all_dialogues(self):
        """The dialogues of all rounds until this one, in one file."""
        rounds = [dataclasses.replace(self, round=number + 1) for number in range(self.round)]
        files = [run.dialogues() for run in rounds]
        path = files[0]
        if self.round > 1:
            path = self.folder / f"{self.name}-all.jsonl"
            # Rounds may share tasks, and each counts "sample" from 0: without this key their order numbers them.
            rows = re.sub(rb'"sample": \d+, ', b"", b"".join(file.read_bytes() for file in files))
            with locks[path]:
                if not path.exists() or path.read_bytes() != rows:   # a newer file would train its critic again
                    path.write_bytes(rows)
        return path

    def critic(self):
        """Its critic: a folder, "untrained", or None."""
        kind = self.table.get("critic")
        if kind in (None, "untrained"):
            return kind
        name = "critic" if kind == "lm" else f"critic-{kind}"
        if "c" in self.table:
            name += f"-{self.table['c']}"
        name = self.name_of(name, {})
        if self.round > 1:
            name = f"{self.name}-critic"
        program = f"03_train_critic.py {self.domain['critic']} {self.domain['critics'][kind]}"
        return self.train(name, program, self.ranks, trajectories=self.all_dialogues())

    def agent(self):
        """Its model folder. Of a flag that its settings name twice the last one counts."""
        if self.arm == "base":
            return self.domain["base"]
        arm = self.table
        method = arm["method"]
        words = [arm.get("program", "04_train_policy.py"), "--method", method]
        words += [self.domain["methods"].get(method, ""), arm["flags"]]
        if (self.size or self.domain["dialogues"]) > MANY:
            words.append(arm.get("many", ""))
        if self.round > 1:
            words.append(arm.get("later", ""))
        flags = {**self.settings, "trajectories": self.dialogues(), "critic": self.critic()}
        if "candidates" in arm and self.round == 1:                  # another arm's
            other = dataclasses.replace(self, arm=arm["candidates"], settings={})
            flags["candidates"] = other.agent() / "candidates.jsonl"
        return self.train(self.name, " ".join(words), 1, **flags)

    def evaluate(self):
        """Its dialogues on the tasks of --split."""
        domain = self.domain
        split = self.args.split
        num_tasks = domain[f"num_{split}"]
        seed = domain[f"{split}_seed"]
        tasks = self.tasks(f"{split}.jsonl", split=split, num_tasks=num_tasks, seed=seed)
        agent = self.agent()
        ranks = self.ranks if "critic" in self.table else 1          # the longest chain of steps: the others have ended
        return self.rollout(f"{self.name}.jsonl", ranks, tasks=tasks, agent=agent, samples=domain["samples"],
                            seed=self.seed)


# ---------------------------------------------------------------------------------------------------------------------
# tables

def report_words(args, domain, points):
    """The command of 05."""
    words = ["05_evaluate.py"]
    flags = domain.get("evaluate", "").split()
    for name, runs in points.items():
        paths = ",".join(str(run.folder / f"{name}.jsonl") for run in runs)
        words.append(f"{name}={paths}")
        if runs[0].arm == "mtdpo" and not runs[0].settings:
            flags += ["--baseline", name]                            # the last one counts
    more = "--costs" if args.chain is None else domain["chain"]
    return [*words, *flags, *words_of(more, args.out), "--overwrite"]


def words_of(command, out):
    """The words of a command of scripts/arms.toml."""
    return [word.replace("OUT", str(out)) for word in command.split()]


def write_tables(out, points, domain):
    """Write table.csv and tasks.csv of what 05 has evaluated."""
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
                "success": float(domain.eval_score(dialogue)),
                "rounds": dialogue["num_rounds"]})
    write_csv(out / "table.csv", rows)
    write_csv(out / "tasks.csv", task_rows)
    say(f"writes {out}/table.csv, {out}/tasks.csv; the page: {report}/report.html")


def table_row(run, metrics):
    """A row of table.csv: what differs between runs, and the numbers of 05."""
    row = {"method": run.arm, **run.settings, "dialogues": run.size, "round": None if run.arm == "base" else run.round}
    for key, value in {**metrics, **metrics.get("costs", {})}.items():
        if isinstance(value, (int, float)):
            column = key.removesuffix("_rate").removeprefix("mean_")
            row[column] = f"{value:.7g}"
    row["low"], row["high"] = metrics.get("ci95", ("", ""))
    return row


def write_csv(path, rows):
    columns = dict.fromkeys(itertools.chain(*rows))                  # of all rows, in their order
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


# ---------------------------------------------------------------------------------------------------------------------

def parse_args(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument("arms", nargs="+", metavar="ARM", help="base, or an arm of scripts/arms.toml; ARM@SIZE")
    parser.add_argument("--domain", default="backend", help="a domain of scripts/arms.toml")
    parser.add_argument("--out", type=pathlib.Path, default="out/study", help="folder to write")
    parser.add_argument("--sizes", type=int, nargs="+", default=[None], help="numbers of dialogues to train on, nested")
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11, 12, 13, 14])
    parser.add_argument("--rounds", type=int, default=1, help="rounds of training")
    parser.add_argument("--split", choices=["test", "validation"], default="test", help="tasks to compare agents on")
    parser.add_argument("--grid", nargs="+", default=[], metavar="FLAG=VALUE,VALUE", help="settings, all combinations")
    parser.add_argument("--chain", type=int, metavar="SEED", help="the chain of run.sh with this seed")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=NUMBER", help="of the domain: num_test=60, say")
    return parser.parse_args(argv)


def read_domain(name, changes=()):
    """A domain of scripts/arms.toml, with the critics; changes: NAME=NUMBER, in place of its own."""
    domains = tomllib.loads((ROOT / "scripts" / "arms.toml").read_text())
    critics = domains.pop("critics")
    if name not in domains:
        raise InputError(f"--domain {name}: must be one of {', '.join(domains)} (scripts/arms.toml)")
    domain = {"domain": name, "critics": critics, **domains[name]}
    domain["arms"]["base"] = {}
    for change in changes:
        key, _, number = change.partition("=")
        if type(domain.get(key)) is not int or not number.isdigit():
            raise InputError(f"--set {change}: must be NAME=NUMBER, with a number of [{name}] in scripts/arms.toml")
        domain[key] = int(number)
    return domain


def settings_of(arguments):
    """[{flag: value}], all combinations, of arguments FLAG=VALUE,VALUE."""
    choices = []
    for argument in arguments:
        flag, _, values = argument.partition("=")
        choices.append([(flag, value) for value in values.split(",")])
    return [dict(choice) for choice in itertools.product(*choices)]


def all_runs(args, domain):
    """The runs of the command line, those of an arm together, a round of all seeds after the other."""
    runs = []
    for argument in args.arms:
        arm, _, size = argument.partition("@")
        if arm not in domain["arms"]:
            raise InputError(f"{arm}: no such arm in scripts/arms.toml, which has {', '.join(domain['arms'])}")
        sizes, settings, last_round = args.sizes, settings_of(args.grid), args.rounds
        if size:
            sizes = [int(size)]
        if arm == "base":
            sizes, settings, last_round = [None], [{}], 1
        for point in itertools.product(sizes, settings, range(1, last_round + 1), args.seeds):
            runs.append(Run(arm, *point, args, domain))
    return runs


def num_devices():
    """GPUs that CUDA_VISIBLE_DEVICES names, at most two; without it two cores."""
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return 1 if devices and "," not in devices else 2


def main(argv=None):
    args = parse_args(argv)
    domain = read_domain(args.domain, args.set)
    if args.chain is not None:
        args.seeds = [args.chain]
    runs = all_runs(args, domain)
    points = {}                                                      # {name: its runs, one a seed}
    for run in runs:
        domain["dialogues"] = max(domain["dialogues"], run.size or 0)
        points.setdefault(run.name, []).append(run)
    longest_first = sorted(runs, key=lambda run: "critic" not in run.table)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        ended = pool.map(Run.evaluate, longest_first)
    list(ended)                                                      # raises what a call has raised
    if args.chain is not None and "gates" in domain:
        show(run_step(args.out / "gates", words_of(domain["gates"], args.out), threads=2))
    show(run_step(args.out / "report", report_words(args, domain, points), threads=2))
    write_tables(args.out, points, DOMAINS[domain["domain"]])


if __name__ == "__main__":
    run_stage(main)
