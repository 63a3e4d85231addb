"""Tasks and trajectories: the kinds of their rows, reading, missing rewards, and the environments that score answers.
"""
import asyncio
import collections
import hashlib
import itertools

from colbench import domain_of, own, task_id
from colbench.domain import Domain, REWARD
from colbench.schema import label, list_of, nullable, one_of, record, token_ids, whole
from lib.runtime import InputError, on_main, read_jsonl, say

# ---------------------------------------------------------------------------------------------------------------------
# environments, which score answers and render pages (colbench)

# Flags that an environment may take, and their defaults
ENVIRONMENT_FLAGS = {"unsafe_scorer": False, "compat": False, "browser": None, "similarity": "clip", "clip_model": None}


def environment(domain, images, rows_in, flags, device="cpu"):
    """The environment of a domain, with those of a stage's `flags` that it TAKES ({name: value}; ENVIRONMENT_FLAGS may
    be missing). Raises InputError if another flag is set."""
    takes = domain.Environment.TAKES
    options = {"images": images, "rows_in": rows_in, "device": device}
    for name, default in ENVIRONMENT_FLAGS.items():
        options[name] = flags.get(name, default)
        is_set = options[name] not in (None, default)
        if is_set and name not in takes and name != "unsafe_scorer":
            raise InputError(f"--{name.replace('_', '-')} has no effect for a {domain.NOUN}; leave it out")
    return domain.Environment(**{name: options[name] for name in takes})


@on_main
def show_documents(domain, output, documents):
    """Render documents for a visual critic on rank 0: {document: image file, None if it cannot be rendered}. Each call
    opens an environment. Reports how many failed. output: the stage's (runtime.Output)."""
    options = {**output.arguments, "similarity": None}
    with environment(domain, f"{output.path}.images", None, options) as browser:
        files = asyncio.run(browser.show(documents))
    num_lost = list(files.values()).count(None)
    if num_lost:
        say(f"{num_lost:,} of {len(files):,} {domain.NOUN}s cannot be rendered: shown as black images")
    return files


# ---------------------------------------------------------------------------------------------------------------------
# tasks and trajectories

# The kinds of rows, with all fields that some stage uses (colbench/schema.py). Other fields are kept unchanged.
TASK = record({})                               # a domain checks its own fields
TURN = record({"role": one_of("user", "assistant"), "content": str},
              {"input": str, "output": str, "output_ids": token_ids, "truncated": bool, "leak": str, "tool": bool,
               "render_fault": str})
TRAJECTORY = record(
    {"task": dict, "dialogue_history": list_of(TURN), "answer": str},
    {"task_id": nullable(label), "sample": int, "reward": nullable(REWARD), "max_rounds": whole(1),
     "num_rounds": int, "system_prompt": str, "chat_template_args": dict, "agent": nullable(label),
     "tokenizer": nullable(str), "informed": nullable(bool), "best_of": whole(1), "run": whole(0), "similarity": str,
     "image": nullable(label), "reference_image": nullable(label), "render_fault": nullable(str), "no_room": bool,
     "branch": record({"sample": int, "turn": whole(0), "candidate": int}, {"run": whole(0)})})


NAME = "task_id", "sample", "run", "turn"      # keys that name a state; "run" if 05 has joined several runs


def name_of(row):
    """Name of the state of a row (04); it also seeds the random numbers of its candidates."""
    return tuple(row[key] for key in NAME if key in row)


def check_task(task, where, first):
    """Raises InputError, which starts with `where`, if a task's domain rejects it, or if it is of another domain than
    the `first` task of the file."""
    domain = domain_of(task, where)
    domain.check_task(task, where)
    if domain is not domain_of(first):
        raise InputError(f"{where}: a task of another domain ({domain.NOUN}) than in the lines before; keep each "
                         "domain in separate files")


def check_ids(tasks, names, path):
    """Raises InputError if a name (task_id) has tasks with different solutions: their dialogues would be compared as if
    they were of one task. Other programs' dialogues share a "task_id" to be compared."""
    solutions = {}
    for task, name in zip(tasks, names):
        if not own.owns(task) and solutions.setdefault(name, task["ground_truth"]) != task["ground_truth"]:
            raise InputError(f'{path}: two tasks with different solutions have the "task_id" {name}; give each its own '
                             'name, or leave out the key "task_id" everywhere')


def task_fault(row):
    """Fault of a task row, before its domain checks it (a kind of schema.py)."""
    if type(row) is dict and ("dialogue_history" in row or "messages" in row):
        return "is a dialogue, not a task; 01_generate_tasks.py makes tasks"
    return TASK(row)


def read_tasks(path):
    """The tasks of a file, all of one domain."""
    tasks = read_jsonl(path, task_fault, check_task)
    check_ids(tasks, map(task_id, tasks), path)
    return tasks


def dialogue_fault(row):
    """Fault of a trajectory row (a kind of schema.py). check_trajectory checks dialogues of other programs."""
    if type(row) is dict and row.get("messages") is not None:
        return None
    if type(row) is dict and "ground_truth" in row and "task" not in row:
        return "is a task, not a dialogue; 02_rollout.py makes dialogues from tasks"
    return TRAJECTORY(row)


def check_trajectory(row, where, first):
    """Raises InputError if a row is not a trajectory of the same domain as the `first`. A dialogue made by another
    program ({"messages", "reward"}, colbench/own.py) becomes a trajectory."""
    if row.get("messages") is not None:
        trajectory = own.as_trajectory(row, where)
        row.clear()
        row.update(trajectory)
    check_task(row["task"], f"{where}: task", first["task"])
    if not any(turn["role"] == "assistant" for turn in row["dialogue_history"]):
        raise InputError(f'{where}: dialogue_history has no turn of role "assistant"')


def read_trajectories(path, num_trajectories=None, seed=0):
    """The trajectories of a file, each with "task_id" and "sample", which together name one dialogue.

    Published files have neither: "task_id" is then a hash of the task, and "sample" counts a task's dialogues from 0 in
    the order of the file.
    num_trajectories: add whole tasks, in an order shuffled by `seed`, until there are this many. Subsets with the same
    seed are nested."""
    trajectories = read_jsonl(path, dialogue_fault, check_trajectory)
    samples = collections.defaultdict(set)
    for trajectory in trajectories:
        name = trajectory.get("task_id") or task_id(trajectory["task"])
        trajectory["task_id"] = name
        of_task = samples[name, trajectory.get("run")]              # "run": if 05 has joined several runs
        sample = trajectory.setdefault("sample", len(of_task))
        if sample in of_task:
            raise InputError(f'{path}: two dialogues of task {name} have "sample" {sample}; give each its own number, '
                             'or leave out the key "sample" everywhere')
        of_task.add(sample)
    tasks = [trajectory["task"] for trajectory in trajectories]
    names = [trajectory["task_id"] for trajectory in trajectories]
    check_ids(tasks, names, path)
    if num_trajectories is None:
        return trajectories
    if num_trajectories > len(trajectories):
        raise InputError(f"{path}: --num-trajectories {num_trajectories}, but it has only {len(trajectories):,}")
    return subset_of_tasks(trajectories, num_trajectories, seed)


def subset_of_tasks(trajectories, num_trajectories, seed):
    """At least this many trajectories: all those of the first tasks, in an order shuffled by `seed`."""
    def place(trajectory):
        return hashlib.sha256(f"{seed} {trajectory['task_id']}".encode(errors="replace")).digest()
    subset = []
    for _, of_task in itertools.groupby(sorted(trajectories, key=place), key=place):
        if len(subset) < num_trajectories:
            subset += of_task
    say(f"{len(subset):,} trajectories of whole tasks kept (--num-trajectories)")
    return subset


def fill_rewards(trajectories, output):
    """Score the trajectories that have no "reward", as some published ones.
    output: the stage's (runtime.Output). Raises InputError if they cannot be scored here."""
    unscored = [t for t in trajectories if not isinstance(t.get("reward"), (int, float))]
    if unscored:
        for trajectory, verdict in zip(unscored, missing_verdicts(unscored, trajectories, output)):
            trajectory |= verdict
        say(f"computed {len(unscored):,} missing rewards")
    say_graded(trajectories)


def say_graded(trajectories):
    """Warn if rewards between 0 and 1 count as failures, unless the domain itself says what a success is."""
    domain = domain_of(trajectories[0]["task"])
    graded = [t for t in trajectories if 0 < t.get("reward", 0) < 1]
    if graded and domain.MIN_RETURN_GAP is None and type(domain).eval_score is Domain.eval_score:
        say(f"{len(graded):,} of {len(trajectories):,} rewards are between 0 and 1 and count as failures (graded "
            "rewards: set MIN_RETURN_GAP and eval_score of the domain)")


def say_pairs(trajectories, pairs):
    """Say how many trajectory pairs there are, from how many tasks, and how many dialogues have a c."""
    tasks = {trajectory["task_id"] for trajectory in trajectories}
    paired = {trajectories[chosen]["task_id"] for chosen, _ in pairs}
    with_c = sum(bool(trajectory["task"]["ground_truth"]) for trajectory in trajectories)
    say(f"{len(pairs):,} trajectory pairs from {len(paired):,} of {len(tasks):,} tasks; {len(trajectories):,} "
        f"dialogues, {with_c:,} with c")


@on_main
def missing_verdicts(unscored, trajectories, output):
    """The environment's verdicts on the answers of `unscored`, a subset of the trajectories."""
    domain, out = domain_of(unscored[0]["task"]), output.path
    try:
        with environment(domain, f"{out}.images", out.parent, output.arguments) as scorer:
            for key, value in scorer.about.items():
                if any(t.get(key, value) != value for t in trajectories):
                    raise InputError(f'{len(unscored):,} dialogues have no "reward", and others were scored by another '
                                     f"{key} than {value}: two scales; score all with 05 first")
            answers = [(t["task"], t["answer"]) for t in unscored]
            return asyncio.run(scorer.score(answers))
    except InputError as error:
        raise InputError(f'{len(unscored):,} dialogues have no "reward": {error}. 05_evaluate.py has all scoring '
                         "flags; its scored/NAME.jsonl has the rewards") from None
