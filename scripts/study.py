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
from lib.runtime import InputError, read_rows, run_stage  # noqa: E402

MANY = 800                       # dialogues, above which an arm's "many" counts
RESULT = re.compile(r"^(?:success|[a-z]+ similarity|held-out|writes) .*", re.MULTILINE)

# An agent to make. size: its number of dialogues, None for all of them; settings: {flag of 04: value} of a search
Run = collections.namedtuple("Run", "arm size settings round seed")


class StepFailed(Exception):
    """A stage has failed, and its last lines have been printed."""


def run_step(out, words, ranks=1, threads=1):
    """Run a stage that writes `out`, and print lines about it; returns the text of OUT.log, where its output goes.
    What the same command has finished (OUT.done) is not asked again."""
    command = [sys.executable, *words, "--out", str(out)]
    if ranks > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    log = pathlib.Path(f"{out}.log")
    done = pathlib.Path(f"{out}.done")
    if out.exists() and is_done(done, command):
        return log.read_text()
    environment = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
    environment["OMP_NUM_THREADS"] = str(threads)
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"{str(out):36} begins (log: {log})", flush=True)
    begin = time.monotonic()
    with open(log, "w") as file:
        process = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment)
    text = log.read_text()
    if process.returncode != 0:
        last_lines = "\n".join(text.splitlines()[-20:])
        print(f"{last_lines}\nfailed: {out} (whole log: {log})", file=sys.stderr, flush=True)
        raise StepFailed
    done.write_text(str(command))
    seconds = time.monotonic() - begin
    [*_, result] = ["", *RESULT.findall(text)]
    print(f"{str(out):36} {seconds:4.0f} s  {result}", flush=True)
    return text


def is_done(done, command):
    """Whether the file `done` says that this command has ended, and nothing that it names is newer."""
    if not done.exists() or done.read_text() != str(command):
        return False
    for name in re.split("[ =,]", " ".join(command)):
        path = pathlib.Path(name)
        files = (path, *path.glob("*.*")) if name and path.exists() else ()
        if any(file.stat().st_mtime > done.stat().st_mtime for file in files):
            return False
    return True


def show(text):
    """Print the tables of what a stage has printed."""
    for line in text.splitlines():
        if not line.startswith(("reads ", "writes ", "arguments: ")) and "%|" not in line:             # a bar
            print(line)


def seed_of(run):
    """A seed for each round, as 04 draws dialogues and candidates by it."""
    return run.seed + 1000 * (run.round - 1)


# ---------------------------------------------------------------------------------------------------------------------
# what an agent needs: each method makes one output, and before it the outputs that it needs

class Study:
    def __init__(self, args, domain):
        self.args = args
        self.domain = domain                                         # of read_domain
        self.shared_ranks = 1                                        # processes of the steps that others wait for
        if args.chain is not None:
            self.shared_ranks = num_devices()
        self.made = set()                                            # the outputs of this call
        self.locks = {}                                              # {output: a lock}

    def path(self, run, name):
        """Where an output of a run's seed stands."""
        if self.args.chain is not None:
            return self.args.out / name
        return self.args.out / f"seed{run.seed}" / name

    def arm(self, run):
        """The table of a run's arm; empty for base."""
        return self.domain["arms"].get(run.arm, {})

    def name(self, run):
        """ARM, ARM_lr1e-4_epochs2, ARM@SIZE or ARM@ROUND."""
        name = run.arm
        for flag, value in run.settings.items():
            name += f"_{flag}{value}"
        number = run.round if self.args.rounds > 1 else run.size
        if number and run.arm != "base":
            name += f"@{number}"
        return name

    def step(self, run, name, program, ranks=1, **flags):
        """Make an output of a run's seed once, whoever asks for it; returns its path. Flags of None are left out."""
        words = program.split()
        for flag, value in flags.items():
            if value is not None:
                words += [f"--{flag.replace('_', '-')}", str(value)]
        out = self.path(run, name)
        with self.locks.setdefault(out, threading.Lock()):
            if out not in self.made:
                run_step(out, words, ranks)
                self.made.add(out)
        return out

    def tasks(self, run, name, **flags):
        program = f"01_generate_tasks.py --domain {self.domain['domain']}"
        return self.step(run, name, program, **flags)

    def rollout(self, run, name, ranks, **flags):
        program = f"02_rollout.py --simulator rules {self.domain['rollout']}"
        flags["max_rounds"] = self.domain["max_rounds"]
        return self.step(run, name, program, ranks, **flags)

    def train(self, run, name, program, ranks, **flags):
        flags["model"] = self.model_before(run)
        flags["seed"] = seed_of(run)
        flags["num_trajectories"] = run.size
        return self.step(run, name, program, ranks, **flags)

    def model_before(self, run):
        """The model that a round begins with."""
        if run.round == 1:
            return self.domain["base"]
        return self.agent(run._replace(round=run.round - 1))

    def dialogues(self, run):
        """Four dialogues of this model on each training task of the round."""
        name, tasks_name = "offline.jsonl", "train.jsonl"
        if run.round > 1:
            name = f"{self.name(run)}-offline.jsonl"
            tasks_name = f"train@{run.round}.jsonl"
        seed, num_tasks = seed_of(run), self.domain["dialogues"] // 4
        tasks = self.tasks(run, tasks_name, split="train", num_tasks=num_tasks, seed=seed)
        agent = self.model_before(run)
        return self.rollout(run, name, self.shared_ranks, tasks=tasks, agent=agent, samples=4, seed=seed)

    def all_dialogues(self, run):
        """The dialogues of all rounds until this one, in one file."""
        if run.round == 1:
            return self.dialogues(run)
        path = self.path(run, f"{self.name(run)}-all.jsonl")
        with open(path, "wb") as file:
            for number in range(1, run.round + 1):
                dialogues = self.dialogues(run._replace(round=number))
                file.write(dialogues.read_bytes())
        return path

    def training_dialogues(self, run):
        """The dialogues of all rounds until this one, with the c that the arm's critic reads."""
        path = self.all_dialogues(run)
        kind = self.arm(run).get("c")
        if kind is None:
            return path
        return self.step(run, f"offline-{kind}.jsonl", f"scripts/change_c.py --kind {kind}", trajectories=path)

    def critic(self, run):
        """The critic of a run: a folder, "untrained", or None."""
        kind = self.arm(run).get("critic")
        if kind in (None, "untrained"):
            return kind
        name = "critic" if kind == "lm" else f"critic-{kind}"
        if "c" in self.arm(run):
            name += f"-{self.arm(run)['c']}"
        name = self.name(run._replace(arm=name, settings={}))
        if run.round > 1:
            name = f"{self.name(run)}-critic"
        program = " ".join(["03_train_critic.py", self.domain["critic"], self.domain["critics"][kind]])
        dialogues = self.training_dialogues(run)
        return self.train(run, name, program, self.shared_ranks, trajectories=dialogues)

    def candidates(self, run):
        """The candidates that an arm takes from another one in the first round."""
        other = self.arm(run).get("candidates")
        if other is None or run.round > 1:
            return None
        return self.agent(run._replace(arm=other, settings={})) / "candidates.jsonl"

    def agent(self, run):
        """The model folder of a run's agent. Of a flag that its settings name twice the last one counts."""
        if run.arm == "base":
            return self.domain["base"]
        arm = self.arm(run)
        method = arm["method"]
        words = [arm.get("program", "04_train_policy.py"), "--method", method]
        words += [self.domain["methods"].get(method, ""), arm["flags"]]
        if (run.size or 0) > MANY:
            words.append(arm.get("many", ""))
        if run.round > 1:
            words.append(arm.get("later", ""))
        for flag, value in run.settings.items():
            words.append(f"--{flag} {value}")
        dialogues = self.training_dialogues(run) if "c" in arm else self.dialogues(run)
        critic = self.critic(run)
        candidates = self.candidates(run)
        name, program = self.name(run), " ".join(words)
        return self.train(run, name, program, 1, trajectories=dialogues, critic=critic, candidates=candidates)

    def evaluate(self, run):
        """Dialogues of a run's agent on the tasks of --split."""
        split, samples = self.args.split, self.domain["samples"]
        seed = self.domain["test_seed"] if split == "test" else 0
        num_tasks = self.domain[f"num_{split}"]
        tasks = self.tasks(run, f"{split}.jsonl", split=split, num_tasks=num_tasks, seed=seed)
        agent = self.agent(run)
        ranks = self.shared_ranks if self.has_critic(run) else 1     # the longest chain of steps: the others have ended
        name = f"{self.name(run)}.jsonl"
        return self.rollout(run, name, ranks, tasks=tasks, agent=agent, samples=samples, seed=run.seed)

    def has_critic(self, run):
        return "critic" in self.arm(run)


# ---------------------------------------------------------------------------------------------------------------------
# tables

def report_words(study, points):
    """The command of 05."""
    files, flags = [], study.domain.get("evaluate", "").split()
    for name, runs in points.items():
        paths = [str(study.path(run, f"{name}.jsonl")) for run in runs]
        files.append(f"{name}={','.join(paths)}")
        if runs[0].arm == "mtdpo" and not runs[0].settings:
            flags += ["--baseline", name]                            # the last one counts
    if study.args.chain is None:
        return ["05_evaluate.py", *files, *flags, "--costs", "--overwrite"]
    flags += ["--critic", f"{study.args.out}/critic", "--candidates", f"{study.args.out}/sweet"]
    if "--reference-sees-c no" in study.domain["arms"]["sweet"]["flags"]:
        flags += ["--reference-sees-c", "no"]                        # turns are scored as candidates were
    return ["05_evaluate.py", *files, *flags]


def write_tables(out, points, domain):
    """Write table.csv and tasks.csv of what 05 has evaluated."""
    report = out / "report"
    metrics = json.loads((report / "metrics.json").read_text())
    rows, task_rows = [], []
    for name, runs in points.items():
        rows.append(table_row(runs[0], metrics[name]))
        scored = report / "scored" / f"{name}.jsonl"
        for dialogue in read_rows(scored):
            task_rows.append(task_row(name, runs, dialogue, domain))
    write_csv(out / "table.csv", rows)
    write_csv(out / "tasks.csv", task_rows)
    print(f"writes {out}/table.csv, {out}/tasks.csv; the page: {report}/report.html")


def table_row(run, metrics):
    """A row of table.csv: what differs between runs, and the numbers of 05."""
    row = {"method": run.arm, **run.settings, "dialogues": run.size, "round": run.round}
    for key, value in {**metrics, **metrics.get("costs", {})}.items():
        if isinstance(value, (int, float)):
            column = key.removesuffix("_rate").removeprefix("mean_")
            row[column] = f"{value:.7g}"
    row["low"], row["high"] = metrics.get("ci95", ("", ""))
    return row


def task_row(name, runs, dialogue, domain):
    """A row of tasks.csv."""
    return {
        "task_id": dialogue["task_id"],
        "family": dialogue["task"].get("family"),
        "sample": dialogue["sample"],
        "seed": runs[dialogue.get("run", 0)].seed,                   # 05 numbers the files of a name
        "arm": name,
        "success": float(domain.eval_score(dialogue)),
        "rounds": dialogue["num_rounds"],
    }


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
        if key not in domain or not number.isdigit():
            raise InputError(f"--set {change}: must be NAME=NUMBER, with a NAME of [{name}] in scripts/arms.toml")
        domain[key] = int(number)
    return domain


def check_arm(name, domain):
    """InputError for an arm that scripts/arms.toml does not have, or has without a rate."""
    if name not in ["base", *domain["arms"]]:
        raise InputError(f"{name}: no such arm in scripts/arms.toml, which has {', '.join(domain['arms'])}")
    if name != "base" and "--lr" not in domain["arms"][name].get("flags", ""):
        raise InputError(f"scripts/arms.toml, {name}: no --lr among its flags, and 04's default is for a model of 8B")


def settings_of(arguments):
    """[{flag: value}], all combinations, of arguments FLAG=VALUE,VALUE."""
    names, values = [], []
    for argument in arguments:
        name, _, texts = argument.partition("=")
        names.append(name)
        values.append(texts.split(","))
    return [dict(zip(names, combination)) for combination in itertools.product(*values)]


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
    domain = read_domain(args.domain, args.set)
    if args.chain is not None:
        args.seeds = [args.chain]
    runs = all_runs(args)
    for run in runs:
        check_arm(run.arm, domain)
        domain["dialogues"] = max(domain["dialogues"], run.size or 0)
    study = Study(args, domain)
    points = {}                                                      # {name: its runs, one a seed}
    for run in runs:
        points.setdefault(study.name(run), []).append(run)
    try:
        longest_first = sorted(runs, key=study.has_critic, reverse=True)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            ended = pool.map(study.evaluate, longest_first)
        list(ended)                                                  # raises what a call has raised
        if args.chain is not None and domain["has_gates"]:
            gates = ["scripts/critics.py", "--trajectories", f"{args.out}/base.jsonl", "--gates", domain["base"]]
            show(run_step(args.out / "gates", gates, threads=2))
        show(run_step(args.out / "report", report_words(study, points), threads=2))
    except StepFailed:
        sys.exit(1)
    write_tables(args.out, points, DOMAINS[domain["domain"]])


if __name__ == "__main__":
    run_stage(main)
