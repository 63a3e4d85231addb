"""The README's reproduction page: its lines are parsed, and run on the embedded default in small."""
import os
import re
import shlex
import subprocess

import pytest

from conftest import ROOT, run, stage

README = (ROOT / "README.md").read_text()
BLOCK, LAPTOP, PAGES = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)


def commands(environment, folder):
    """The block's commands as argument lists, its variables and loops expanded by the shell itself. The last two list
    files, so they are expanded when the others have run."""
    script = f"{LAPTOP}\nexport PY=echo RUN=echo D={folder}\n{environment}\n{BLOCK}"
    process = subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=ROOT, text=True, capture_output=True)
    assert process.returncode == 0, process.stderr
    return [shlex.split(line) for line in process.stdout.splitlines()]


@pytest.mark.parametrize("block, number", [(BLOCK, 3 + 5 + 3 + 4 + 6 + 1 + 4 + 3 + 1 + 18 + 6 + 3 * 3 + 6),
                                           (PAGES, 2 + 1 + 1 + 2 + 1 + 4)])
def test_the_paper_s_scale_parses(block, number):
    script = f"mkdir -p /tmp/none; export PY=echo RUN=echo D=/tmp/none\n{block}"
    lines = subprocess.run(["bash", "-c", script], text=True, capture_output=True, env={"PATH": os.environ["PATH"]}).stdout
    parsed = 0
    for line in lines.splitlines():
        words = shlex.split(line)
        if words[0] != "05_evaluate.py":                                # these list the files of a finished run
            args = stage(int(words[0][:2])).parse_args(words[1:])
            assert args.out.startswith("/tmp/none/")
            parsed += 1
    assert parsed == number


def test_every_row_runs_small(tmp_path, workspace):
    """Two tasks' worth of everything; BIG has another tokenizer, so that its dialogues are rendered again."""
    environment = (f"export DATA='--num-tasks 12' K=3 NS=2 SIZES=18 BIG={workspace}/model "
                   "ROLL='--max-rounds 8 --max-new-tokens 100' CRITIC='--lr 3e-4 --max-steps 1 --held-out-frac 0' "
                   "SWEET='--max-steps 1 --max-new-tokens 100 --num-candidates 4 --data-frac 0.2' MTDPO='--max-steps 1' "
                   "RFT='--max-steps 1'")
    before = commands(environment, tmp_path)
    for words in before:
        if words[0] != "05_evaluate.py":
            if words[0] == "02_rollout.py" and "offline" not in words[-1]:
                words += ["--max-rounds", "2", "--max-new-tokens", "30"]                                  # the last one wins
            process = run(*words)
            assert process.returncode == 0, (words, process.stderr)
    evaluations = [words for words in commands(environment, tmp_path) if words[0] == "05_evaluate.py"]
    outputs = [run(*words) for words in evaluations]
    assert all(process.returncode == 0 for process in outputs), [process.stderr for process in outputs]
    table, curves = (process.stdout for process in outputs)
    for row in ("single", "base", "rft", "mtdpo", "sweet", "sweet-no-c", "sweet-no-norm", "sweet-regression", "big-sweet",
                "sweet-n18", "mtdpo-n18"):
        assert re.search(rf"^{row} ", table, re.MULTILINE), row
    assert "published scorer" in table and "PFLOP" in table
    assert all(re.search(rf"^{label} ", curves, re.MULTILINE) for label in ("critic", "critic-no-c", "critic-value", "judge"))


@pytest.mark.parametrize("name", re.findall(r"`((?:tests/)?[\w/]+\.(?:py|sh))`", README))
def test_files_that_the_readme_names_exist(name):
    assert (ROOT / name).exists()
