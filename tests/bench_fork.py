"""What one process of the scorer costs, step by step: microseconds of processor time and faults of pages.

    python tests/bench_fork.py [--rounds 300]

It runs in an image like the server's (colbench/child.py, after its warm-up). Each line is a process that does what the
lines above it do, and one step more. The time is that of both processes, from the fork to the end; the lines are
alternated, and medians are printed. "unshare": what a process would cost with a namespace of its own (the server has
them, and its processes share them). A kernel that forbids a step gives "-"."""
import gc
import importlib
import marshal
import os
import resource
import sys

COLBENCH = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "colbench")
ANSWER = """Here is the function.

```python
def player_score(points, lives):
    score = points * 2 + lives * 15
    if lives == 0:
        score = score - 25
    return score
```
"""
CALLS = [f"player_score({number}, {number + 1})" for number in range(10)]
NAMESPACES = {"user": 0x10000000, "mount": 0x20000, "process": 0x20000000, "network": 0x40000000, "IPC": 0x8000000}


def processor_times():
    """Seconds of this process and of those that it has waited for, and the faults of pages of the latter."""
    here, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return here.ru_utime + here.ru_stime + ended.ru_utime + ended.ru_stime, ended.ru_minflt


def cost_of(work):
    """(Microseconds, faults) of a process that calls work() and ends; None if that fails."""
    begin_s, begin_faults = processor_times()
    process = os.fork()
    if process == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(process, 0)
    end_s, end_faults = processor_times()
    if status:
        return None
    return 1e6 * (end_s - begin_s), end_faults - begin_faults


def measure(steps, rounds):
    """Print a line for each step: {name: function}."""
    costs = {name: [] for name in steps}
    for _ in range(rounds):
        for name, work in steps.items():
            costs[name].append(cost_of(work))
    for name, results in costs.items():
        if None in results:
            print(f"{name:44s}      -      -")
            continue
        middle = len(results) // 2
        microseconds, _ = sorted(results)[middle]
        faults = sorted(faults for _, faults in results)[middle]
        print(f"{name:44s} {microseconds:6.0f} {faults:6.0f}", flush=True)


def server_image(child, folder):
    """Bring this process to where a server forks (see child.main); its Walls."""
    walls = child.Walls("landlock")
    walls.program, walls.rules = child.system_call_filter(), child.landlock_rules(child.readable_paths([]), folder, 99)
    walls.steps = child.confinement(walls)
    for name in child.PRELOADED.split():
        importlib.import_module(name)
    child.warm_up()
    gc.collect()
    gc.freeze()
    return walls


def steps_of_an_answer(child, walls, results):
    """{name: function}: a process, and what more it does until it has answered."""
    codes = [compile(call, "<string>", "eval") for call in CALLS]
    request = {"code": ANSWER, "calls": CALLS, "codes": codes, "tested": ["player_score"], "imports": [],
               "pieces": None}
    messages = []
    child.run_calls(request, messages.append)
    child.parsed.cache_clear()
    unread, known = marshal.dumps(request), marshal.dumps({**request, "pieces": bytes.fromhex(messages[0])})
    limits = [step for step in walls.steps if step[0] is resource.setrlimit]

    def send(message):
        os.write(results, child.json.dumps(message).encode() + b"\n")

    def read(data):
        child.confine(walls.steps, 20)
        return marshal.loads(data)

    def find_code():
        request = read(unread)
        child.code_that_defines(request["code"], set(request["tested"]))

    return {"fork, end": lambda: None,
            "+ limits": lambda: child.confine(limits, 20),
            "+ privileges, Landlock": lambda: child.confine(walls.steps[:-1], 20),
            "+ list of system calls": lambda: child.confine(walls.steps, 20),
            "+ request": lambda: read(unread),
            "+ find the code": find_code,
            "+ compile, 10 tests, results": lambda: child.run_calls(read(unread), send),
            "the same, where the code is known": lambda: child.run_calls(read(known), send)}


def measure_in_image(rounds, folder):
    """Print the table. This process imports what the server does, and no more."""
    print(f"{'':44s}     us faults")
    measure({"an interpreter without modules: fork, end": lambda: None}, rounds)
    sys.path.insert(0, COLBENCH)
    child = importlib.import_module("child")
    walls = server_image(child, folder)
    steps = steps_of_an_answer(child, walls, os.open(os.devnull, os.O_WRONLY))
    for name, flag in NAMESPACES.items():
        steps[f"fork, unshare ({name}), end"] = lambda flag=flag: child.check(child.libc.unshare(flag), "unshare")
    measure(steps, rounds)


def main():
    import argparse  # here, so that the image of the server does not hold them
    import subprocess
    import tempfile
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-s", "-S", "-P", "-B", __file__, "--in-image", str(args.rounds), folder]
        sys.exit(subprocess.run(command, env={"PYTHONHASHSEED": "0"}).returncode)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--in-image"]:
        measure_in_image(int(sys.argv[2]), sys.argv[3])
    else:
        main()
