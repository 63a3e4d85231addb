"""The parts of a training step on a CPU in bfloat16 against float32: where --dtype bfloat16 pays, and where not.

    python tests/bench_dtype.py [--rows 4] [--tokens 450] [--rounds 5]

Random numbers in the shapes of SmolLM2-135M, one thread; the two take turns. "linear layers" are the seven matrices of
each of the 30 layers, forward and backward; attention is causal, without padding. The projection on the vocabulary,
here of a third of the tokens, is computed in float32 whatever --dtype is (common.token_logps); its bfloat16 is for
comparison."""
import argparse
import statistics
import time

import torch
import torch.nn.functional as F

LAYERS, HIDDEN, HEADS, HEAD_SIZE, KEY_HEADS, INNER, VOCABULARY = 30, 576, 9, 64, 3, 1536, 49152
MATRICES = [(HIDDEN, HIDDEN), (HIDDEN, KEY_HEADS * HEAD_SIZE), (HIDDEN, KEY_HEADS * HEAD_SIZE), (HIDDEN, HIDDEN),
            (HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN)]


def seconds(function, *args, **options):
    begin = time.perf_counter()
    result = function(*args, **options)
    return time.perf_counter() - begin, result


def backward_seconds(out):
    return seconds(out.backward, torch.ones_like(out))[0]


def linear_layers(rows, tokens, dtype):
    """{part: seconds} of a step's linear layers, one layer timed."""
    took = 0.0
    for before, after in MATRICES:
        hidden = torch.randn(rows * tokens, before, dtype=dtype, requires_grad=True)
        weight = torch.randn(after, before, dtype=dtype, requires_grad=True)
        forward_s, out = seconds(F.linear, hidden, weight)
        took += forward_s + backward_seconds(out)
    return {"linear layers": took * LAYERS}


def attention(rows, tokens, dtype):
    query, key, value = (torch.randn(rows, HEADS, tokens, HEAD_SIZE, dtype=dtype, requires_grad=True) for _ in range(3))
    forward_s, out = seconds(F.scaled_dot_product_attention, query, key, value, is_causal=True)
    return {"attention, forward": forward_s * LAYERS, "attention, backward": backward_seconds(out) * LAYERS}


def projection(rows, tokens, dtype):
    hidden = torch.randn(rows * tokens // 3, HIDDEN, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN, dtype=dtype, requires_grad=True)
    ids = torch.zeros(len(hidden), dtype=torch.long)
    forward_s, logits = seconds(F.linear, hidden, weight)
    loss_s, loss = seconds(F.cross_entropy, logits, ids)
    return {"projection": forward_s + loss_s + backward_seconds(loss)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=450, help="of each row")
    parser.add_argument("--rounds", type=int, default=5, help="after one that warms up")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for round_number in range(args.rounds + 1):
        for dtype in (torch.float32, torch.bfloat16):
            for part in (linear_layers, attention, projection):
                for name, took in part(args.rows, args.tokens, dtype).items():
                    if round_number:
                        found.setdefault(name, {}).setdefault(dtype, []).append(took)
    print(f"{args.rows} rows of {args.tokens} tokens, one thread, median of {args.rounds}; seconds a step")
    for name, own in found.items():
        plain, half = (statistics.median(own[dtype]) for dtype in (torch.float32, torch.bfloat16))
        print(f"{name:20s} float32 {plain:6.2f} | bfloat16 {half:6.2f} | {plain / half:4.1f} times as fast")


if __name__ == "__main__":
    main()
