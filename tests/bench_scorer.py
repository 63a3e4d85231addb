"""Seconds to score 1,000 well-behaved answers (10 tests each) in each layer: python tests/bench_scorer.py [--rounds 5]

500 tasks with 2 answers each, as an evaluation has them: the references are evaluated inside the time, once a task
(twice, to find random ones). The two answers differ in their prose."""
import argparse
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from colbench import backend, make_tasks  # noqa: E402
from colbench.scorer import Scorer  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    pairs = []
    for task in make_tasks(backend, 500, 0, "train", "none"):
        for end in ("", "It is done.\n"):
            pairs.append((task, f"Here is the function.\n\n```python\n{task['ground_truth']}\n```\n{end}"))
    for layer in ("namespaces", "landlock"):
        seconds = []
        for _ in range(args.rounds):
            scorer = Scorer()
            scorer.layers = [layer]
            with scorer:
                began = time.perf_counter()
                scores = scorer.score(pairs)
                seconds.append(time.perf_counter() - began)
            assert all(all(score.tests) for score in scores)
        print(f"{layer:10s} {statistics.median(seconds):6.2f} s for {len(pairs):,} answers (median of {args.rounds})")


if __name__ == "__main__":
    main()
