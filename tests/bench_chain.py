"""Where run.sh spends its time: each of its stages alone, one process of one thread, under Python's profiler.

    python tests/bench_chain.py [--tasks 80] [--test-tasks 300] [--domain backend]

Of each stage: its seconds, its share of all, and what its parts take of it. The profiler makes Python's own lines
slower, so that parts with many small steps look somewhat larger than they are."""
import argparse
import pathlib
import pstats
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from scripts import study  # noqa: E402

# What is shown of a stage: a name, and the functions whose time it is (file, function)
PARTS = [
    ("imports", [("_bootstrap>", "_find_and_load")]),
    ("loading models", [("models.py", "load_model"), ("models.py", "load_tokenizer")]),
    ("tokenising", [("models.py", "encode")]),
    ("sampling, prompts", [("engine.py", "prefill")]),
    ("sampling, tokens", [("engine.py", "decode")]),
    ("collating", [("common.py", "collate")]),
    ("forward passes", [("common.py", "forward")]),
    ("backward passes", [("_tensor.py", "backward")]),
    ("optimizer", [("training.py", "optimizer_step")]),
    ("saved states", [("training.py", "save")]),
    ("scoring answers", [("05_evaluate.py", "rescore")]),
    ("intervals", [("05_evaluate.py", "measure"), ("05_evaluate.py", "compare")]),
    ("page", [("report.py", "write_report")])]


def parts_of(profile):
    """[(name, seconds)] of PARTS that a stage has spent time in, by its profile."""
    seconds = dict.fromkeys((name for name, _ in PARTS), 0)
    for (file, _, function), (_, _, _, with_calls, _) in pstats.Stats(profile).stats.items():
        for name, functions in PARTS:
            if any(file.endswith(end) and function == called for end, called in functions):
                seconds[name] += with_calls
    return sorted(seconds.items(), key=lambda part: -part[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=80)
    parser.add_argument("--test-tasks", type=int, default=300)
    parser.add_argument("--domain", choices=["backend", "sql"], default="backend")
    args = parser.parse_args()
    measured, one_at_a_time, run_step = [], threading.Lock(), study.run_step

    def profiled(out, words, ranks=1, threads=1):
        with one_at_a_time:
            begin = time.perf_counter()
            text = run_step(out, ["-m", "cProfile", "-o", f"{out}.profile", *words])
            measured.append((out.name, time.perf_counter() - begin, parts_of(f"{out}.profile")))
        return text

    study.run_step = profiled
    with tempfile.TemporaryDirectory() as out:
        numbers = [f"dialogues={4 * args.tasks}", f"num_test={args.test_tasks}"]
        arms = ["base", "rft", "mtdpo", "sweet"]
        study.main([*arms, "--chain", "0", "--domain", args.domain, "--out", out, "--set", *numbers])
    total = sum(seconds for _, seconds, _ in measured)
    print(f"{total:.0f} s of one core in all")
    for name, seconds, parts in measured:
        print(f"{name:14} {seconds:6.1f} s {seconds / total:6.1%}")
        for part, spent in parts:
            if spent:
                print(f"    {part:20} {spent:6.1f} s {spent / seconds:6.1%}")


if __name__ == "__main__":
    main()
