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
from lib.runtime import InputError, run_stage  # noqa: E402

MANY = 800                       # dialogues, above which an arm's "many" counts
RESULT = re.compile(r"^(?:success|[a-z]+ similarity|held-out|writes) .*", re.MULTILINE)

HAS_RUN = threading.Event()      # a step of this call

# An agent to make. size: its number of dialogues, None for all of them; settings: {flag of 04: value} of a search
Run = collections.namedtuple("Run", "arm size settings round seed")


class StepFailed(Exception):
    """A stage has failed, and its last lines have been printed."""


def run_step(out, words, ranks=1, threads=1):
    """Run a stage that writes `out`, and print lines about it; returns the text of OUT.log, where its output goes.

    While no step of this call had anything to do, what the same command has finished (OUT.done) is not asked again."""
    command = [sys.executable, *words, "--out", str(out)]
    if ranks > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {**os.environ, "OMP_NUM_THREADS": str(threads)}
    log, done = pathlib.Path(f"{out}.log"), pathlib.Path(f"{out}.done")
    if not HAS_RUN.is_set() and pathlib.Path(out).exists() and is_done(done, command) and log.exists():
        return log.read_text()
    HAS_RUN.set()
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"{str(out):36} begins (log: {log})", flush=True)
    begin = time.monotonic()
    with open(log, "a") as file:
        process = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment)
    text = log.read_text()
    if process.returncode:
        last_lines = "\n".join(text.splitlines()[-20:])
        print(f"{last_lines}\nfailed: {out} (whole log: {log})", file=sys.stderr, flush=True)
        raise StepFailed
    done.write_text(str(command))
    results = ["", *RESULT.findall(text)]
    print(f"{str(out):36} {time.monotonic() - begin:4.0f} s  {results[-1]}", flush=True)
    return text


def is_done(done, command):
    """Whether the file `done` says that this command has ended, and no file that it names has changed since."""
    if not done.exists() or done.read_text() != str(command):
        return False
    made_s = done.stat().st_mtime
    for name in re.split("[ =,]", " ".join(command)):
        path = pathlib.Path(name)
        if name and path.exists() and any(file.stat().st_mtime > made_s for file in (path, *path.glob("*.*"))):
            return False
    return True


def show(text):
    """Print the tables of what a stage has printed."""
    for line in text.splitlines():
        if not line.startswith(("reads ", "writes ", "arguments: ")):
            print(line)


def seed_of(run):
    """A seed for each round, as 04 draws dialogues and candidates by it."""
    return run.seed + 1000 * (run.round - 1)


# ---------------------------------------------------------------------------------------------------------------------
# what an agent needs: each method makes one output, and before it the outputs that it needs

@dataclasses.dataclass
class Study:
    domain: dict                 # a table of scripts/arms.toml, with the table "critics"
    folders: dict                # {seed: its folder}
    num_rounds: int
    split: str                   # of the tasks that agents are compared on
    shared_ranks: int            # processes of the steps that others wait for
    made: set = dataclasses.field(default_factory=set)               # the outputs of this call
    locks: dict = dataclasses.field(default_factory=dict)            # {output: a lock}

    def step(self, run, name, program, ranks=1, **flags):
        """Make an output of a run's seed once, whoever asks for it; returns its path. Flags of None are left out."""
        words = program.split()
        for flag, value in flags.items():
            if value is not None:
                words += [f"--{flag.replace('_', '-')}", str(value)]
        out = self.folders[run.seed] / name
        with self.locks.setdefault(out, threading.Lock()):
            if out not in self.made:
                run_step(out, words, ranks)
                self.made.add(out)
        return out

    def name(self, arm, run):
        """ARM, ARM_lr1e-4_epochs2, ARM@SIZE or ARM@ROUND."""
        if arm == "base":
            return arm
        settings = "".join(f"_{flag}{value}" for flag, value in run.settings.items())
        number = run.round if self.num_rounds > 1 else run.size
        suffix = f"@{number}" if number else ""
        return f"{arm}{settings}{suffix}"

    def tasks(self, run, name, **flags):
        return self.step(run, name, f"01_generate_tasks.py --domain {self.domain['domain']}", **flags)

    def rollout(self, run, name, ranks, **flags):
        program = f"02_rollout.py --simulator rules --max-rounds {self.domain['max_rounds']} {self.domain['rollout']}"
        return self.step(run, name, program, ranks, **flags)

    def train(self, run, name, program, ranks, **flags):
        model, seed = self.model_before(run), seed_of(run)
        return self.step(run, name, program, ranks, model=model, seed=seed, num_trajectories=run.size, **flags)

    def model_before(self, run):
        """The model that a round begins with."""
        if run.round == 1:
            return self.domain["base"]
        return self.agent(run._replace(round=run.round - 1))

    def dialogues(self, run):
        """Four dialogues of this model on each training task of the round."""
        name, tasks_name = "offline.jsonl", "train.jsonl"
        if run.round > 1:
            name, tasks_name = f"{self.name(run.arm, run)}-offline.jsonl", f"train@{run.round}.jsonl"
        seed = seed_of(run)
        tasks = self.tasks(run, tasks_name, split="train", num_tasks=self.domain["dialogues"] // 4, seed=seed)
        agent = self.model_before(run)
        return self.rollout(run, name, self.shared_ranks, tasks=tasks, agent=agent, samples=4, seed=seed)

    def all_dialogues(self, run):
        """The dialogues of all rounds until this one, in one file."""
        if run.round == 1:
            return self.dialogues(run)
        path = self.folders[run.seed] / f"{self.name(run.arm, run)}-all.jsonl"
        with open(path, "wb") as file:
            for number in range(1, run.round + 1):
                file.write(self.dialogues(run._replace(round=number)).read_bytes())
        return path

    def training_dialogues(self, run):
        """The dialogues of all rounds until this one, with the c that the arm's critic reads."""
        path, kind = self.all_dialogues(run), self.domain["arms"][run.arm].get("c")
        if kind is None:
            return path
        return self.step(run, f"offline-{kind}.jsonl", f"scripts/change_c.py --kind {kind}", trajectories=path)

    def critic(self, run):
        """The critic of a run: a folder, "untrained", or None."""
        kind = self.domain["arms"][run.arm].get("critic")
        if kind in (None, "untrained"):
            return kind
        names = ["critic", kind if kind != "lm" else None, self.domain["arms"][run.arm].get("c")]
        name = self.name("-".join(filter(None, names)), run._replace(settings={}))
        if run.round > 1:
            name = f"{self.name(run.arm, run)}-critic"
        program = f"03_train_critic.py {self.domain['critic']} {self.domain['critics'][kind]}"
        return self.train(run, name, program, self.shared_ranks, trajectories=self.training_dialogues(run))

    def candidates(self, run):
        """The candidates that an arm takes from another one in the first round."""
        other = self.domain["arms"][run.arm].get("candidates")
        if other is None or run.round > 1:
            return None
        return self.agent(run._replace(arm=other, settings={})) / "candidates.jsonl"

    def agent(self, run):
        """The model folder of a run's agent. Of a flag that its settings name twice the last one counts."""
        if run.arm == "base":
            return self.domain["base"]
        arm = self.domain["arms"][run.arm]
        method = arm["method"]
        program = arm.get("program", "04_train_policy.py")
        program += f" --method {method} {self.domain['methods'].get(method, '')} {arm['flags']} "
        if (run.size or 0) > MANY:
            program += arm.get("many", "")
        if run.round > 1:
            program += arm.get("later", "")
        for flag, value in run.settings.items():
            program += f" --{flag} {value}"
        dialogues, critic, candidates = self.dialogues(run), self.critic(run), self.candidates(run)
        if "c" in arm:
            dialogues = self.training_dialogues(run)
        return self.train(run, self.name(run.arm, run), program, 1, trajectories=dialogues, critic=critic,
                          candidates=candidates)

    def evaluate(self, run):
        """Dialogues of a run's agent on the tasks of `split`."""
        number = self.domain[f"num_{self.split}"]
        seed = self.domain["test_seed"] if self.split == "test" else 0
        tasks = self.tasks(run, f"{self.split}.jsonl", split=self.split, num_tasks=number, seed=seed)
        name, agent = f"{self.name(run.arm, run)}.jsonl", self.agent(run)
        ranks = self.shared_ranks if self.has_critic(run) else 1     # the longest chain of steps: the others have ended
        return self.rollout(run, name, ranks, tasks=tasks, agent=agent, samples=self.domain["samples"], seed=run.seed)

    def has_critic(self, run):
        return "critic" in self.domain["arms"].get(run.arm, {})


# ---------------------------------------------------------------------------------------------------------------------
# tables

def report_files(study, points):
    """05's arguments NAME=FILE,FILE,…"""
    arguments = []
    for name, runs in points.items():
        files = [str(study.folders[run.seed] / f"{name}.jsonl") for run in runs]
        arguments.append(f"{name}={','.join(files)}")
    return arguments


def write_tables(out, points, domain):
    """Write table.csv and tasks.csv of what 05 has evaluated."""
    metrics = json.loads((out / "report" / "metrics.json").read_text())
    eval_score = DOMAINS[domain["domain"]].eval_score
    rows, task_rows = [], []
    for name, runs in points.items():
        rows.append(table_row(runs[0], metrics[name]))
        with open(out / "report" / "scored" / f"{name}.jsonl", encoding="utf-8") as file:
            for dialogue in map(json.loads, file):
                task_rows.append({
                    "task_id": dialogue["task_id"],
                    "family": dialogue["task"].get("family"),
                    "sample": dialogue["sample"],
                    "seed": runs[dialogue.get("run", 0)].seed,       # 05 numbers the files of a name
                    "arm": name,
                    "success": float(eval_score(dialogue)),
                    "rounds": dialogue["num_rounds"],
                })
    write_csv(out / "table.csv", rows)
    write_csv(out / "tasks.csv", task_rows)
    print(f"writes {out}/table.csv, {out}/tasks.csv; the page: {out}/report/report.html")


def table_row(run, metrics):
    """A row of table.csv: what differs between runs, and the numbers of 05."""
    row = {"method": run.arm, **run.settings, "dialogues": run.size, "round": run.round}
    for key, value in {**metrics, **metrics.get("costs", {})}.items():
        if isinstance(value, (int, float)):
            row[key.removesuffix("_rate").removeprefix("mean_")] = f"{value:.7g}"
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
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/study"), help="folder to write")
    parser.add_argument("--sizes", type=int, nargs="+", default=[None], help="numbers of dialogues to train on, nested")
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11, 12, 13, 14])
    parser.add_argument("--rounds", type=int, default=1, help="rounds of training")
    parser.add_argument("--split", choices=["test", "validation"], default="test", help="tasks to compare agents on")
    parser.add_argument("--grid", nargs="+", default=[], metavar="FLAG=VALUE,VALUE",
                        help="settings to try in place of the arms', all combinations")
    parser.add_argument("--chain", type=int, metavar="SEED", help="the chain of run.sh with this seed")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=NUMBER",
                        help="in place of a number of the domain: dialogues, num_test, test_seed, samples, …")
    return parser.parse_args(argv)


def read_domain(name, changes=()):
    """A domain of scripts/arms.toml, with the critics; changes: NAME=NUMBER, in place of its own."""
    domains = tomllib.loads((ROOT / "scripts" / "arms.toml").read_text())
    critics = domains.pop("critics")
    if name not in domains:
        raise InputError(f"--domain {name}: must be one of {', '.join(domains)} (scripts/arms.toml)")
    domain = {"domain": name, "critics": critics, **domains[name]}
    for change in changes:
        key, _, number = change.partition("=")
        if not isinstance(domain.get(key), int) or not number.isdigit():
            raise InputError(f"--set {change}: must be NAME=NUMBER, with a number of [{name}] in scripts/arms.toml")
        domain[key] = int(number)
    return domain


def check_arm(name, domain):
    """InputError for an arm that would be trained with settings that are not its own."""
    arm = domain["arms"].get(name)
    if arm is None:
        raise InputError(f"{name}: no such arm in scripts/arms.toml, which has {', '.join(domain['arms'])}")
    if "--lr" not in arm.get("flags", ""):
        raise InputError(f"scripts/arms.toml, {name}: no --lr among its flags, and 04's default is for a model of 8B")
    if arm.get("critic", "untrained") not in ["untrained", *domain["critics"]]:
        raise InputError(f"scripts/arms.toml, {name}: no critic {arm['critic']} in its table of critics")


def settings_of(arguments):
    """[{flag: value}], all combinations, of arguments FLAG=VALUE,VALUE."""
    values_of = dict(argument.split("=") for argument in arguments)
    combinations = itertools.product(*(values.split(",") for values in values_of.values()))
    return [dict(zip(values_of, combination)) for combination in combinations]


def all_runs(args):
    """The runs of the command line, those of an arm together, a round of all seeds after the other."""
    runs = []
    for argument in args.arms:
        arm, _, size = argument.partition("@")
        sizes, settings, last_round = args.sizes, settings_of(args.grid), args.rounds
        if size:
            sizes = [int(size)]
        if arm == "base":
            sizes, settings, last_round = [None], [{}], 1
        for point in itertools.product(sizes, settings, range(1, last_round + 1), args.seeds):
            runs.append(Run(arm, *point))
    return runs


def num_devices():
    """GPUs that CUDA_VISIBLE_DEVICES names, at most two; without it two cores."""
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return 1 if devices and "," not in devices else 2


def main(argv=None):
    args = parse_args(argv)
    HAS_RUN.clear()
    domain = read_domain(args.domain, args.set)
    folders = {seed: args.out / f"seed{seed}" for seed in args.seeds}
    shared_ranks = 1
    words = domain.get("evaluate", "").split()
    if args.chain is None:
        words += ["--costs", "--overwrite"]
    else:
        args.seeds, folders = [args.chain], {args.chain: args.out}
        shared_ranks = num_devices()
        words += ["--critic", str(args.out / "critic"), "--candidates", str(args.out / "sweet")]
        if "--reference-sees-c no" in domain["arms"]["sweet"]["flags"]:
            words += ["--reference-sees-c", "no"]                    # turns are scored as candidates were
    runs = all_runs(args)
    for arm in {run.arm for run in runs} - {"base"}:
        check_arm(arm, domain)
    domain["dialogues"] = max([domain["dialogues"], *(run.size for run in runs if run.size)])
    study = Study(domain, folders, args.rounds, args.split, shared_ranks)
    points = {}                                                      # {name: its runs, one a seed}
    for run in runs:
        name = study.name(run.arm, run)
        points.setdefault(name, []).append(run)
        if run.arm == "mtdpo" and not run.settings:
            words += ["--baseline", name]                            # the last one counts
    try:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            ended = pool.map(study.evaluate, sorted(runs, key=study.has_critic, reverse=True))
        list(ended)                                                  # raises what a call has raised
        if args.chain is not None and domain["has_gates"]:
            words_of_gates = ["--trajectories", str(args.out / "base.jsonl"), "--gates", domain["base"]]
            show(run_step(args.out / "gates", ["scripts/critics.py", *words_of_gates], threads=2))
        show(run_step(args.out / "report", ["05_evaluate.py", *report_files(study, points), *words], threads=2))
    except StepFailed:
        sys.exit(1)
    write_tables(args.out, points, domain)


if __name__ == "__main__":
    run_stage(main)
