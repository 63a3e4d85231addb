"""What stages spend: the records that they keep beside their outputs, and their sums over all that a method took."""
import os
import pathlib
import time

import torch.distributed as dist

from colbench.schema import record
from lib.runtime import fingerprint, InputError, is_main, peak_memory_mb, read_json, reduce_sums, say, write_json
from lib.statistics import aligned

COST_KEYS = "wall_s", "trained_tokens", "generated_tokens", "flops", "peak_memory_mb"
SERVER_KEYS = "server_prompt_tokens", "server_completion_tokens"          # not in every record, nor in every table


RECORDS = {"args": record({}, {"args": dict, "inputs": dict, "id": str}),
           "costs": record(dict.fromkeys(COST_KEYS, float), dict.fromkeys(SERVER_KEYS, float))}


class Costs:
    """What a stage spends, kept beside its output `out` (record_path): COST_KEYS and SERVER_KEYS, all
    ranks together but for wall time and memory (the highest). A resumed run adds to what the run before it recorded;
    what that run spent after its last record() is lost if it was killed.

    works: what models (work_of) and servers (their counts) did for this process on this rank. Stages append to it.
    trained: the work of the model that is trained, which is not among them."""

    def __init__(self, out, device="cpu"):
        self.device = device
        self.works, self.trained = [], {}
        self.path = record_path(out, "costs")
        self.begin = time.perf_counter()
        self.before = dict.fromkeys((*COST_KEYS, *SERVER_KEYS), 0)
        self.before |= read_record(out, "costs")

    def record(self, trained_tokens=0):
        """trained_tokens: by all ranks."""
        spent = dict.fromkeys(("generated_tokens", "flops", *SERVER_KEYS), 0)
        for work in [*self.works, self.trained]:
            for key in ("generated_tokens", *SERVER_KEYS):
                spent[key] += work.get(key, 0)
            # 2 N D: a multiplication and an addition for each parameter and token
            passed = work.get("read_tokens", 0) + work.get("generated_tokens", 0)
            spent["flops"] += 2 * work.get("parameters", 0) * passed
        if dist.is_initialized():
            spent = dict(zip(spent, map(int, reduce_sums(list(spent.values()), self.device))))
        if trained_tokens:
            spent["flops"] += 6 * self.trained["parameters"] * trained_tokens          # 6 N D: the backward pass, too
        spent |= {"wall_s": time.perf_counter() - self.begin, "trained_tokens": trained_tokens}
        if is_main():
            sums = {key: self.before[key] + value for key, value in spent.items()}
            peak = max(self.before["peak_memory_mb"], peak_memory_mb())
            write_json(self.path, {**sums, "peak_memory_mb": peak})


def record_path(path, kind):
    """Where a stage keeps its record ("args" or "costs") of an output: DIR/kind.json or FILE.kind.json."""
    path = pathlib.Path(path)
    return path / f"{kind}.json" if path.is_dir() else pathlib.Path(f"{path}.{kind}.json")


def read_record(path, kind):
    """That record, a dict; empty where there is none."""
    path = record_path(path, kind)
    if not path.is_file():
        return {}
    return read_json(path, RECORDS[kind])


def say_made_with(path, args, names):
    """Say which of these arguments, and --model, had other values in the run that wrote this file of its folder. Of a
    file that stands alone nothing is known."""
    record_before = read_record(pathlib.Path(path).parent, "args")
    args_before = record_before.get("args", {})
    model = args_before.get("model")
    if record_before.get("inputs", {}).get(model) not in (None, fingerprint(args.model)):
        say(f"{path}: sampled by {model}, which is another model than --model {args.model}")
    for name in names:
        if name in args_before and args_before[name] != getattr(args, name):
            flag = f"--{name.replace('_', '-')}"
            say(f"{path}: made with {flag} {args_before[name]}, so {getattr(args, name)} does nothing here")


def method_costs(roots, programs):
    """({path: cost record}, [names without one]) of `roots` (an agent; with best-of-N also the critic) and of all that
    they were made from, but for `programs` (names of what is no model); an output is counted once."""
    counted, not_counted, seen = {}, [], set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop(0)
        path = os.path.relpath(os.path.realpath(name))          # one name for out/critic, ./out/critic/ and a link
        if path in seen or name in programs:
            continue
        seen.add(path)
        costs = read_record(name, "costs")
        if costs:
            counted[path] = costs
        else:
            not_counted.append(path if os.path.exists(name) else name)
        waiting += read_record(name, "args").get("inputs", {})
    return counted, not_counted


def total_costs(records):
    """The sums of cost records; of the peaks the highest."""
    totals = dict.fromkeys(COST_KEYS, 0)
    for spent in records:
        for key in COST_KEYS:
            if key == "peak_memory_mb":
                totals[key] = max(totals[key], spent[key])
            else:
                totals[key] += spent[key]
        for key in SERVER_KEYS:
            if spent.get(key):
                totals[key] = totals.get(key, 0) + spent[key]
    return totals


def method_roots(path):
    """(models that a rollout used, its own cost record), by the records beside its file. InputError without them."""
    args = read_record(path, "args").get("args", {})
    evaluation = read_record(path, "costs")
    for kind, is_there in (("args", "agent" in args), ("costs", evaluation)):
        if not is_there:
            raise InputError(f"{record_path(path, kind)}: not there or not of a rollout; --costs needs the records "
                             "that 02_rollout.py keeps beside its output")
    roots = [args["agent"]]
    critic = (args.get("critic") or "").removeprefix("judge:")
    if critic:
        roots.append(critic)
    return roots, evaluation


def compare_costs(paths, programs):
    """{name: totals, "outputs" counted, "not_counted", "shared" (what is part of every method that costs anything) and
    "evaluation" (the rollout itself)} of {name: trajectory file}."""
    methods, evaluations = {}, {}
    for name, path in paths.items():
        roots, evaluations[name] = method_roots(path)
        methods[name] = method_costs(roots, programs)
    paid = [set(counted) for counted, _ in methods.values() if counted]
    in_all = set.intersection(*paid) if len(paid) > 1 else set()
    costs = {}
    for name, (counted, not_counted) in methods.items():
        shared = sorted(in_all & set(counted))
        costs[name] = total_costs(counted.values())
        costs[name]["outputs"] = sorted(counted)
        costs[name]["not_counted"] = not_counted
        costs[name]["evaluation"] = total_costs([evaluations[name]])
        costs[name]["shared"] = {**total_costs(counted[path] for path in shared), "outputs": shared}
    return costs


# Columns of the table: key, heading, what one of it is in the table, digits
COLUMNS = [("wall_s", "wall min", 60, 1), ("trained_tokens", "M trained", 1e6, 3),
           ("generated_tokens", "M generated", 1e6, 3), ("flops", "PFLOPs", 1e15, 3),
           ("peak_memory_mb", "peak MB", 1, 0)]
SERVER_COLUMNS = [("server_prompt_tokens", "M prompt by servers", 1e6, 3),
                  ("server_completion_tokens", "M completion by servers", 1e6, 3)]


def cost_lines(costs):
    """The costs as lines of text: methods, the part they share, the evaluation rollouts."""
    part = None
    for method in costs.values():
        if method["shared"]["outputs"]:
            part = method["shared"]
    rows = list(costs.items())
    if part:
        rows.append(("shared, included above", part))
    rows.append(("evaluation, not above:", None))
    for name, method in costs.items():
        rows.append((name, method["evaluation"]))
    columns = list(COLUMNS)
    for column in SERVER_COLUMNS:
        if any(column[0] in totals for _, totals in rows if totals):
            columns.append(column)
    cells = []
    for name, totals in rows:
        cells.append([name] + [cost_cell(totals, column) for column in columns])
    lines = aligned(["costs"] + [heading for _, heading, _, _ in columns], cells)
    if part:
        lines.append(f"shared, included in every method that costs anything: {', '.join(part['outputs'])}")
    not_counted = sorted({name for method in costs.values() for name in method["not_counted"]})
    if not_counted:
        lines.append(f"not counted: {', '.join(not_counted)}")
    return lines


def cost_cell(totals, column):
    """A number of the table; empty in a heading's row."""
    key, _, unit, digits = column
    return f"{totals.get(key, 0) / unit:,.{digits}f}" if totals else ""
