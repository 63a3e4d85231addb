"""Where run.sh spends its time: each stage alone, one process of one thread, under Python's profiler.

    python tests/bench_chain.py [--tasks 80] [--test-tasks 300] [--domain backend]

The commands are those of run.sh, whose settings scripts/chain.sh has. Of each stage: its seconds, its share of all, and
what its parts take of it. The profiler makes Python's own lines slower, so that parts with many small steps look
somewhat larger than they are. run.sh itself has two processes side by side."""
import argparse
import os
import pathlib
import pstats
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
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


def settings(domain):
    """What scripts/chain.sh sets for run.sh: {name: words}."""
    names = "base rollout critic_settings rft_settings mtdpo_settings sweet_settings".split()
    shown = " ".join(f'"${name}"' for name in names)
    script = f". scripts/chain.sh; take_domain --domain {domain}; set_up_domain; few_dialogues; printf '%s\\n' {shown}"
    lines = subprocess.run(["bash", "-c", script], cwd=ROOT, text=True, capture_output=True, check=True).stdout
    return {name: line.split() for name, line in zip(names, lines.splitlines()[-len(names):])}


def stages(out, domain, tasks, test_tasks):
    """[(name, words of the command)] of run.sh, in its order."""
    chain = settings(domain)
    [base] = chain["base"]
    make = ["01_generate_tasks.py", "--domain", domain]
    train = ["--trajectories", f"{out}/offline.jsonl", "--model", base]

    def play(name, agent):
        return [*chain["rollout"], "--tasks", f"{out}/test.jsonl", "--agent", agent, "--samples", "2",
                "--out", f"{out}/{name}.jsonl"]

    def policy(method, *flags):
        return ["04_train_policy.py", "--method", method, *train, *chain[f"{method}_settings"], *flags,
                "--out", f"{out}/{method}"]

    named = [f"{name}={out}/{name}.jsonl" for name in ("base", "rft", "mtdpo", "sweet")]
    return [
        ("01 train", [*make, "--split", "train", "--num-tasks", str(tasks), "--out", f"{out}/train.jsonl"]),
        ("01 test", [*make, "--split", "test", "--num-tasks", str(test_tasks), "--seed", "1000",
                     "--out", f"{out}/test.jsonl"]),
        ("02 offline", [*chain["rollout"], "--tasks", f"{out}/train.jsonl", "--agent", base, "--samples", "4",
                        "--out", f"{out}/offline.jsonl"]),
        ("03", ["03_train_critic.py", *train, *chain["critic_settings"], "--out", f"{out}/critic"]),
        ("04 sweet", policy("sweet", "--critic", f"{out}/critic")),
        ("04 mtdpo", policy("mtdpo")),
        ("04 rft", policy("rft")),
        *((f"02 {name}", play(name, base if name == "base" else f"{out}/{name}"))
          for name in ("base", "rft", "mtdpo", "sweet")),
        ("05", ["05_evaluate.py", *named, "--baseline", "mtdpo", "--critic", f"{out}/critic",
                "--candidates", f"{out}/sweet", "--out", f"{out}/report"])]


def parts_of(profile):
    """[(name, seconds)] of PARTS that a stage has spent time in, by its profile."""
    seconds = []
    times = pstats.Stats(str(profile)).stats                        # {(file, line, function): five numbers}
    for name, functions in PARTS:
        spent = 0
        for (file, _, function), (_, _, _, with_calls, _) in times.items():
            if any(file.endswith(end) and function == called for end, called in functions):
                spent += with_calls
        if spent:
            seconds.append((name, spent))
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=80)
    parser.add_argument("--test-tasks", type=int, default=300)
    parser.add_argument("--domain", choices=["backend", "sql"], default="backend")
    args = parser.parse_args()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as out:
        profile, measured = f"{out}/profile", []
        for name, words in stages(out, args.domain, args.tasks, args.test_tasks):
            begin = time.perf_counter()
            process = subprocess.run([sys.executable, "-m", "cProfile", "-o", profile, *words], cwd=ROOT, text=True,
                                     env=environment, capture_output=True)
            if process.returncode:
                sys.exit(f"{' '.join(words)}: {process.stderr}")
            measured.append((name, time.perf_counter() - begin, parts_of(profile)))
    total = sum(seconds for _, seconds, _ in measured)
    print(f"{total:.0f} s of one core in all")
    for name, seconds, parts in measured:
        print(f"{name:12} {seconds:6.1f} s {seconds / total:6.1%}")
        for part, spent in sorted(parts, key=lambda part: -part[1]):
            print(f"    {part:20} {spent:6.1f} s {spent / seconds:6.1%}")


if __name__ == "__main__":
    main()
