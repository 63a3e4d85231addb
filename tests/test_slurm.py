"""scripts/slurm.sh: what it prints with DRY=1 are commands that the stages take, and what it submits is a chain."""
import os
import pathlib
import shlex
import subprocess
import sys

import pytest

from conftest import ROOT, stage

SCRIPT = ROOT / "scripts" / "slurm.sh"


def slurm(**settings):
    process = subprocess.run(["bash", SCRIPT], text=True, capture_output=True, env={**os.environ, **settings})
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


def commands(**settings):
    """The commands that DRY=1 prints, as lists of words."""
    return [shlex.split(line) for line in slurm(DRY="1", **settings) if line.startswith(" ")]


def parsed(words):
    """(stage number, arguments) of a command that runs a stage."""
    at = next(i for i, word in enumerate(words) if word.startswith("0") and word.endswith(".py"))
    return int(words[at][:2]), stage(int(words[at][:2])).parse_args(words[at + 1:])


def test_shellcheck():
    program = pathlib.Path(sys.executable).parent / "shellcheck"
    process = subprocess.run([program, SCRIPT], text=True, capture_output=True)
    assert process.returncode == 0, process.stdout


@pytest.mark.parametrize("human, samplers", [("rules", 0), ("some/model", 1), ("some/model", 2)])
def test_every_command_of_the_dry_run_parses(human, samplers, tmp_path):
    words = commands(HUMAN=human, SAMPLERS=str(samplers), OUT="out/of a-test", NODES="3", MODEL="mine")
    stages = [parsed(line) for line in words if any(word.endswith(".py") for word in line)]
    assert [number for number, _ in stages] == [1, 1, 2, 3, 4, 4, 4, 2, 2, 2, 2, 5]
    assert [args.method for number, args in stages if number == 4] == ["sweet", "mtdpo", "rft"]
    assert {args.simulator for number, args in stages if number == 2} == {
        "rules" if human == "rules" else "http://node3:8000/v1#some/model"}
    ranks = [line for line in words if ".venv/bin/torchrun" in line]
    assert len(ranks) == 9 and all(line[line.index("--nodelist") + 1] == "node0,node1,node2" for line in ranks)
    assert all(line[line.index("--max-restarts") + 1] == "3" for line in ranks)
    assert all(line[line.index("--rdzv-endpoint") + 1] == "node0:29500" for line in ranks)
    served = [line[line.index("serve") - 2:line.index("serve") + 2:3] for line in words if "serve" in line]
    humans, ours = [["node3", human]] * (human != "rules"), [[f"node{3 + n}", "mine"] for n in range(samplers)]
    assert served == humans + ours + humans * 4
    [sweet] = [args for number, args in stages if number == 4 and args.method == "sweet"]
    assert sweet.sampler == (",".join(f"http://{host}:8000/v1" for host, _ in ours) + "#mine" if ours else None)
    assert not (ROOT / "out" / "of a-test").exists()


def test_jobs_are_submitted_one_after_the_other(tmp_path):
    """A stand-in for sbatch notes its words and gives 101, 102, … as ids."""
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f'#!/bin/bash\necho "$*" >> {tmp_path}/log\necho $((100 + $(wc -l < {tmp_path}/log)))\n')
    sbatch.chmod(0o755)
    printed = slurm(PATH=f"{tmp_path}:{os.environ['PATH']}", OUT=str(tmp_path / "out"), SLURM_FLAGS="--partition gpu")
    jobs = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert [job[-1] for job in jobs] == ["tasks", "offline", "critic", *["policies"] * 3, "test", "evaluate"]
    assert all("--requeue" in job and job[-4:-1] == ["--partition", "gpu", "scripts/slurm.sh"] for job in jobs)
    after = [job[job.index("--dependency") + 1] if "--dependency" in job else None for job in jobs]
    assert after == [None, *(f"afterok:{number}" for number in (101, 102, 103, 103, 103, "104:105:106", 107))]
    assert [job[job.index("--nodes") + 1] for job in jobs] == ["1", "3", "2", "3", "2", "2", "3", "1"]
    assert printed[-1] == "evaluate: job 108" and (tmp_path / "out" / "logs").is_dir()
