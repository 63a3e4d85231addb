"""Seconds to score 1,000 well-behaved trajectories (10 tests each) behind walls, and by exec in this process.

    python tests/bench_scorer.py [--rounds 5]

Both score the same answers, alternating; a fresh namespace for each test on both sides. 500 tasks with 2 answers each,
as an evaluation has them: the references are evaluated inside the time, once a task (twice, to find random ones). The
two answers differ in their prose. The processor's time is that of all processes, the start included."""
import argparse
import os
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from colbench import backend, make_tasks  # noqa: E402
from colbench.extract_code import names_of_calls, pieces_of  # noqa: E402
from colbench.scorer import Scorer  # noqa: E402


def values_in_process(code, calls):
    """What the calls give by exec in this process, without walls and limits."""
    compiled = [compile(piece.source, "<answer>", "exec") for piece in pieces_of(code, names_of_calls(calls))]
    results = []
    for call in calls:
        namespace = {"__name__": "answer"}
        for source in compiled:
            exec(source, namespace)
        results.append(eval(call, namespace))
    return results


def score_in_process(pairs):
    references, verdicts = {}, []
    for task, answer in pairs:
        calls = list(task["test_cases"].values())
        if task["task_id"] not in references:
            references[task["task_id"]] = values_in_process(task["ground_truth"], calls)
        values = values_in_process(answer, calls)
        verdicts.append([a == b for a, b in zip(references[task["task_id"]], values)])
    return verdicts


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    pairs = []
    for task in make_tasks(backend, 500, 0, "train", "none"):
        for end in ("", "It is done.\n"):
            pairs.append((task, f"Here is the function.\n\n```python\n{task['ground_truth']}\n```\n{end}"))
    seconds = {"in process": [], "namespaces": [], "landlock": []}
    for _ in range(args.rounds):
        began = time.perf_counter()
        expected = score_in_process(pairs)
        seconds["in process"].append(time.perf_counter() - began)
        for layer in ("namespaces", "landlock"):
            before = sum(os.times()[:4])
            scorer = Scorer()
            scorer.layers = [layer]
            with scorer:
                began = time.perf_counter()
                scores = scorer.score(pairs)
                seconds[layer].append(time.perf_counter() - began)
            print(f"{layer}: {sum(os.times()[:4]) - before:.2f} s of processor time")
            assert [score.tests for score in scores] == expected
    for name, values in seconds.items():
        print(f"{name:12s} {statistics.median(values):6.2f} s for {len(pairs):,} answers (median of {len(values)}, "
              f"{min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()
