"""Studies: arms x seeds x sizes (or rounds, or settings), two processes at a time. Start it in the repository's root.

Reads   scripts/arms.toml: the settings of the domains and of their arms. `base`, the base model, is an arm, too.
Writes  OUT/seedN/: tasks, dialogues, critics and agents of a seed, beside each of them a log
        OUT/report/ (05); OUT/table.csv: a row for each arm and size, round or setting
        OUT/tasks.csv: success and rounds of each task, seed and arm, from which other tables can be made

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
from lib.arguments import argument_parser  # noqa: E402
from lib.runtime import InputError, run_stage  # noqa: E402

MANY = 800                       # dialogues, above which an arm's "many" counts
RESULT = re.compile(r"^(?:success|[a-z]+ similarity|held-out|writes) .*", re.MULTILINE)

# An agent to make. size: its number of dialogues, None for all of them; settings: {flag of 04: value} of a search
Run = collections.namedtuple("Run", "arm seed size settings round")


class StepFailed(Exception):
    """A stage has failed, and its last lines have been printed."""


def run_step(out, words, ranks=1, threads=1):
    """Run a stage that writes `out`, with its output in OUT.log, and print a line about it."""
    command = [sys.executable, *words, "--out", str(out)]
    if ranks > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {**os.environ, "OMP_NUM_THREADS": str(threads)}
    log = pathlib.Path(f"{out}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    with open(log, "a") as file:
        process = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment)
    text = log.read_text()
    if process.returncode:
        last_lines = "\n".join(text.splitlines()[-20:])
        print(f"{last_lines}\nfailed: {out} (whole log: {log})", file=sys.stderr, flush=True)
        raise StepFailed
    results = ["", *RESULT.findall(text)]
    print(f"{str(out):36} {time.monotonic() - begin:4.0f} s  {results[-1]}", flush=True)


def seed_of(run):
    """A seed for each round, as 04 draws dialogues and candidates by it."""
    return run.seed + 1000 * (run.round - 1)


# ---------------------------------------------------------------------------------------------------------------------
# what an agent needs: each method makes one output, and before it the outputs that it needs

@dataclasses.dataclass
class Study:
    domain: dict                 # a table of scripts/arms.toml, with the table "critics"
    folders: dict                # {seed: its folder}
    shared_ranks: int            # processes of a step that all arms wait for
    split: str                   # of the tasks that agents are compared on
    num_tasks: dict              # {split: number}
    samples: int                 # dialogues on each of these tasks
    num_rounds: int
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

    def rounds_of(self, run):
        """A run in each of its rounds; the base model has one."""
        last = 1 if run.arm == "base" else self.num_rounds
        return [run._replace(round=number) for number in range(1, last + 1)]

    def tasks(self, run, split, name, seed):
        program = f"01_generate_tasks.py --domain {self.domain['domain']}"
        return self.step(run, name, program, split=split, num_tasks=self.num_tasks[split], seed=seed)

    def rollout(self, run, name, ranks, **flags):
        program = f"02_rollout.py --simulator rules {self.domain['rollout']}"
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
        tasks = self.tasks(run, "train", tasks_name, seed)
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

    def critic(self, run):
        """The critic of a run: a folder, "untrained", or None."""
        kind = self.domain["arms"][run.arm].get("critic")
        if kind in (None, "untrained"):
            return kind
        name = self.name("critic" if kind == "lm" else f"critic-{kind}", run._replace(settings={}))
        if run.round > 1:
            name = f"{self.name(run.arm, run)}-critic"
        program = f"03_train_critic.py {self.domain['critic']} {self.domain['critics'][kind]}"
        return self.train(run, name, program, self.shared_ranks, trajectories=self.all_dialogues(run))

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
        return self.train(run, self.name(run.arm, run), program, 1, trajectories=dialogues, critic=critic,
                          candidates=candidates)

    def evaluate(self, run, ranks=1):
        """Dialogues of a run's agent on the tasks of `split`."""
        tasks = self.tasks(run, self.split, f"{self.split}.jsonl", 1000 if self.split == "test" else 0)
        name, agent = f"{self.name(run.arm, run)}.jsonl", self.agent(run)
        return self.rollout(run, name, ranks, tasks=tasks, agent=agent, samples=self.samples, seed=run.seed)


# ---------------------------------------------------------------------------------------------------------------------
# in which order

def two_at_a_time(function, items):
    """Call a function for each item in two threads; then raise the first exception, if any."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        results = pool.map(function, items)
    list(results)                                                    # raises the first exception


def num_devices():
    """GPUs that CUDA_VISIBLE_DEVICES names, at most two; without it two cores."""
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return 1 if devices and "," not in devices else 2


def play_chain(study, runs):
    """As run.sh: dialogues and critic on both cores; the last run's agent beside all of the others; its dialogues on
    both cores."""
    *others, last = runs
    study.critic(last)

    def play(part):
        if part == [last]:
            study.agent(last)
        else:
            list(map(study.evaluate, part))
    two_at_a_time(play, [[last], others])
    study.evaluate(last, study.shared_ranks)
    if study.domain["has_gates"]:
        folder = study.folders[last.seed]
        words = ["scripts/critics.py", "--trajectories", str(folder / "base.jsonl"), "--gates", study.domain["base"]]
        run_step(folder / "gates", words, threads=2)
        print(pathlib.Path(f"{folder / 'gates'}.log").read_text())


# ---------------------------------------------------------------------------------------------------------------------
# tables

def report(study, out, runs, words):
    """Evaluate everything, print the tables, write table.csv and tasks.csv. words: more flags of 05."""
    points = {}                                                      # {name: its runs, one a seed}
    for run in itertools.chain(*map(study.rounds_of, runs)):
        points.setdefault(study.name(run.arm, run), []).append(run)
    files = []
    for name, runs in points.items():
        paths = [str(study.folders[run.seed] / f"{name}.jsonl") for run in runs]
        files.append(f"{name}={','.join(paths)}")
        if runs[0].arm == "mtdpo" and not runs[0].settings:
            words = [*words, "--baseline", name]                     # the last one counts
    words += study.domain.get("evaluate", "").split()
    folder = out / "report"
    run_step(folder, ["05_evaluate.py", *files, *words], threads=2)
    print(pathlib.Path(f"{folder}.log").read_text())
    metrics = json.loads((folder / "metrics.json").read_text())
    rows, task_rows = [], []
    for name, runs in points.items():
        rows.append(table_row(runs[0], metrics[name]))
        with open(folder / "scored" / f"{name}.jsonl", encoding="utf-8") as file:
            task_rows += [task_row(name, runs, json.loads(line), study.domain["domain"]) for line in file]
    write_csv(out / "table.csv", rows)
    write_csv(out / "tasks.csv", task_rows)
    print(f"writes {out / 'table.csv'}, {out / 'tasks.csv'}; the page: {folder / 'report.html'}")


def table_row(run, metrics):
    """A row of table.csv: what differs between runs, and the numbers of 05."""
    row = {"method": run.arm, **run.settings, "dialogues": run.size, "round": run.round}
    for key, value in {**metrics, **metrics.get("costs", {})}.items():
        if isinstance(value, (int, float)):
            row[key.removesuffix("_rate").removeprefix("mean_")] = f"{value:.4g}"
    row["low"], row["high"] = metrics["ci95"]
    return row


def task_row(name, runs, dialogue, domain):
    """A row of tasks.csv, of a dialogue that 05 has scored; "run" is the number of its run."""
    return {
        "task_id": dialogue["task_id"],
        "sample": dialogue["sample"],
        "seed": runs[dialogue.get("run", 0)].seed,
        "arm": name,
        "success": float(DOMAINS[domain].outcome(dialogue)),
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
    parser.add_argument("--train-tasks", type=int, help="a quarter of the largest size, unless given")
    parser.add_argument("--test-tasks", type=int, help="the domain's, unless given")
    parser.add_argument("--samples", type=int, default=2, help="dialogues on each test task")
    parser.add_argument("--max-rounds", type=int, help="rounds of a dialogue; the domain's, unless given")
    return parser.parse_args(argv)


def read_domain(name):
    """A domain of scripts/arms.toml, with the critics."""
    domains = tomllib.loads((ROOT / "scripts" / "arms.toml").read_text())
    critics = domains.pop("critics")
    if name not in domains:
        raise InputError(f"--domain {name}: must be one of {', '.join(domains)} (scripts/arms.toml)")
    return {"domain": name, "critics": critics, **domains[name]}


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
    flags, values = [], []
    for argument in arguments:
        flag, _, text = argument.partition("=")
        flags.append(flag)
        values.append(text.split(","))
    return [dict(zip(flags, combination)) for combination in itertools.product(*values)]


def all_runs(args):
    """The runs of the command line, those of an arm together."""
    runs = []
    for argument in args.arms:
        arm, _, size = argument.partition("@")
        sizes, settings = args.sizes, settings_of(args.grid)
        if size:
            sizes = [int(size)]
        if arm == "base":
            sizes, settings = [None], [{}]
        for size, run_settings, seed in itertools.product(sizes, settings, args.seeds):
            runs.append(Run(arm, seed, size, run_settings, 1))
    return runs


def main(argv=None):
    args = parse_args(argv)
    domain = read_domain(args.domain)
    if args.max_rounds:
        domain["rollout"] += f" --max-rounds {args.max_rounds}"
    folders = {seed: args.out / f"seed{seed}" for seed in args.seeds}
    is_chain = args.chain is not None
    if is_chain:
        args.seeds, folders = [args.chain], {args.chain: args.out}
    runs = all_runs(args)
    for arm in {run.arm for run in runs} - {"base"}:
        check_arm(arm, domain)
    num_dialogues = max(run.size or domain["dialogues"] for run in runs)
    study = Study(
        domain=domain,
        folders=folders,
        shared_ranks=num_devices() if is_chain else 1,
        split=args.split,
        num_tasks={"train": args.train_tasks or num_dialogues // 4,
                   args.split: args.test_tasks or domain[f"num_{args.split}"]},
        samples=args.samples,
        num_rounds=args.rounds)
    try:
        if is_chain:
            play_chain(study, runs)
            words = ["--critic", str(args.out / "critic"), "--candidates", str(args.out / "sweet")]
        else:
            two_at_a_time(study.evaluate, itertools.chain(*map(study.rounds_of, runs)))
            words = ["--costs", "--overwrite"]
        report(study, args.out, runs, words)
    except StepFailed:
        sys.exit(1)


if __name__ == "__main__":
    run_stage(main)
