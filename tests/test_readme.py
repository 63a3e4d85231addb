"""README.md and docs/: their commands are parsed, what they name exists, and the reproduction page runs in small."""
import contextlib
import functools
import importlib
import io
import json
import os
import re
import shlex
import subprocess
import tempfile
import tomllib
import types

import pytest
import torch

from colbench import Domain, DOMAINS, Environment
from colbench.domain import check_domain, REQUIRED
from conftest import call, ROOT
from scripts import study
from scripts.table import read_csv

PAGES = {path.relative_to(ROOT).as_posix(): path.read_text()
         for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]}
BLOCKS = {f"{page}, block {number}": block for page, text in PAGES.items()
          for number, block in enumerate(re.findall(r"^```bash\n(.*?)^```$", text, re.DOTALL | re.MULTILINE), 1)}
PROSE = {page: re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE) for page, text in PAGES.items()}
SPANS = [(page, span) for page, text in PROSE.items() for span in re.findall(r"`([^`\n]+)`", text)]
PAPER = max(BLOCKS.values(), key=lambda block: block.count("--out"))             # the reproduction lines, and
[LAPTOP] = [block for block in BLOCKS.values()                                   # their variables on a laptop
            if all(line.startswith("export ") for line in block.splitlines())]
NOTEBOOK = "docs/notebook.md"                                       # its entries name what earlier commits have
CODE = "\n".join(path.read_text() for folder in ("", "colbench/", "examples/", "lib/", "scripts/", "tests/bench_")
                 for path in ROOT.glob(f"{folder}*.py"))

# In place of programs: notes the words, and makes the output, which later lines list.
NOTE = """
exec 3>&1 > /dev/null
note() {
    printf '%q ' "$@" >&3
    echo >&3
    while [ $# -gt 1 ]; do
        if [ "$1" = --out ]; then mkdir -p "$(dirname "$2")"; [[ $2 != *.* ]] || touch "$2"; fi
        shift
    done
}
for name in python torchrun bash pip cp vllm sbatch; do eval "$name() { note $name \\"\\$@\\"; }"; done
"""


@functools.cache
def started(block):
    """The commands that a block starts, as lists of words; its variables and loops are expanded by the shell itself."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.run(["bash", "-euo", "pipefail", "-c", NOTE + block], cwd=folder, text=True,
                                 capture_output=True, env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"})
    assert process.returncode == 0, process.stderr
    return [shlex.split(line) for line in process.stdout.splitlines()]


def command_of(words):
    """(the program, its arguments) of a command: a file, or a module after -m."""
    at = next(number for number, word in enumerate(words) if word == "-m" or word.endswith((".py", ".sh")))
    at += words[at] == "-m"
    return words[at], words[at + 1:]


def commands_of(block):
    return [command_of(words) for words in started(block)]


def program_of(name):
    """The module of a stage, of a fork ("examples.grpo"), of a script ("scripts/critics.py"), or of colbench."""
    name = name.removesuffix(".py").replace("/", ".")
    return importlib.import_module("colbench.__main__" if name == "colbench" else name)


@functools.cache
def flags_of(name):
    """The flags of a program, as its --help shows them; those that a shell script names."""
    if name.endswith(".sh"):
        return set(re.findall(r"--[a-z][\w-]*", (ROOT / name).read_text() + (ROOT / "scripts/setup.sh").read_text()))
    text = io.StringIO()
    with contextlib.redirect_stdout(text), pytest.raises(SystemExit):
        program_of(name).parse_args(["--help"])
    return set(re.findall(r"--[a-z][\w-]*", text.getvalue()))


def check_command(name, words):
    """A command of a page is parsed by its program; a study's arms are those of scripts/recipes.toml."""
    if name.endswith(".sh"):
        assert {word for word in words if word.startswith("--")} <= flags_of(name)
    elif hasattr(program_of(name), "parse_args"):
        args = program_of(name).parse_args(words)
        if name == "scripts/study.py":
            domain = study.read_domain(args.domain, args.set)
            domain["outputs"]["mine"] = "--method sweet"             # the reader's
            assert study.all_runs(args, domain)


@pytest.mark.parametrize("name", BLOCKS)
def test_every_command_parses(name):
    copies = {"examples.mine": "04_train_policy.py"}                 # {a copied stage, as a module: the stage}
    for program, *words in started(BLOCKS[name]):
        if program == "cp":
            copies[words[1].removesuffix(".py").replace("/", ".")] = words[0]
        elif program in ("bash", "python", "torchrun", "sbatch"):
            name, arguments = command_of(words[words.index("your_job.sh") + 1:] if program == "sbatch" else words)
            if name != "pytest":
                check_command(copies.get(name, name), arguments)
        elif program == "pip" and "-r" in words:
            assert (ROOT / words[words.index("-r") + 1]).is_file()


def test_a_slurm_job_starts_torchrun_on_all_its_nodes(tmp_path):
    [block] = [block for block in BLOCKS.values() if "sbatch" in block]
    write_job, _ = block.split("sbatch --nodes")
    stand_ins = "scontrol() { printf 'a\\nb\\n'; }; srun() { echo \"$@\"; }; export -f scontrol srun\n"
    run_job = "bash your_job.sh 03_train_critic.py --lr 1"
    process = subprocess.run(["bash", "-c", stand_ins + write_job + run_job], text=True, cwd=tmp_path,
                             capture_output=True,
                             env={**os.environ, "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "a,b", "SLURM_JOB_ID": "7"})
    assert process.stdout.split() == [
        ".venv/bin/torchrun", "--nnodes", "2", "--nproc-per-node", "8", "--max-restarts", "3", "--rdzv-backend", "c10d",
        "--rdzv-id", "7", "--rdzv-endpoint", "a:29500", "03_train_critic.py", "--lr", "1"]


def test_the_paper_s_rows_are_all_there_and_take_the_published_code_s_preset():
    for name, arguments in commands_of(f"export PRESET=published-backend\n{PAPER}"):
        check_command(name, arguments)
    last_three = [arguments for _, arguments in commands_of(PAPER)[-3:]]
    rows, points, sizes = ({word.split("=")[0] for word in words if "=" in word} for words in last_three)
    assert rows >= {"single", "base", "rft", "mtdpo", "sweet", "sweet-no-norm", "big", "big-sweet", "big-single"}
    assert sizes >= {"sweet@15000", "mtdpo@3000"}
    assert points >= {"critic@32", "critic-no-c@1", "critic-value@4", "judge@16"} and not rows & points


def test_flags_and_functions_that_the_pages_name_exist():
    names = {span[:-2] for page, span in SPANS if re.fullmatch(r"\w+\(\)", span) and page != NOTEBOOK}
    assert [name for name in names if not re.search(rf"\bdef {name}\(", CODE)] == []
    known = {"--help", *re.findall(r'"(--[\w-]+)"', CODE)}
    for page, span in SPANS:
        words = span.split() or [""]
        if page == NOTEBOOK or words[0] in ("vllm", "torchrun", "pip", ".venv/bin/python"):          # their own flags
            continue
        scripts = [word for word in words if re.fullmatch(r"0\d_\w+\.py|scripts/\w+\.py|[\w/]+\.sh", word)]
        flags = {word.split("=")[0] for word in words if word.startswith("--")}
        assert not flags or flags <= (flags_of(scripts[0]) if scripts else known), (page, span)


@pytest.mark.parametrize("page", PAGES)
def test_files_that_the_pages_name_exist(page):
    folders = "tests|docs|lib|colbench|examples|models|scripts"
    named = set(re.findall(rf"(?<![\w/.$}}-])((?:{folders})/[\w./-]*\w|\w+\.(?:py|sh))", PAGES[page]))
    named -= {"examples/mine.py", "examples/discounted.py"}
    missing = [name for name in named if not name.startswith("your_") and not (ROOT / name).exists()]
    assert page == NOTEBOOK or named and missing == []
    for address in re.findall(r"\[[^]]+\]\(([^)]+)\)", PROSE[page]):
        if not address.startswith("http"):
            path, _, anchor = address.partition("#")
            target = (ROOT / page).parent / path if path else ROOT / page
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if anchor else []
            anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert target.exists() and (not anchor or anchor in anchors), address


def changed(name):
    """The module of a file with the change that docs/fork.md shows for it, as a dict."""
    [change] = re.findall(rf"```diff\n--- {name}\n(.*?)```", PAGES["docs/fork.md"], re.DOTALL)
    old, new = ("".join(line[1:] + "\n" for line in change.splitlines() if line[0] == sign) for sign in "-+")
    text, module = (ROOT / name).read_text(), {"__name__": "changed"}
    assert text.count(old) == 1
    exec(text.replace(old, new), module)
    return module


def fork_block(begin):
    """The block of Python in docs/fork.md that begins so."""
    return re.search(rf"```python\n({begin}.*?)```", PAGES["docs/fork.md"], re.DOTALL)[1]


def test_the_changes_that_fork_md_shows_do_what_it_says():
    zeros, lengths = torch.zeros(2, 2), torch.ones(2, 2)
    losses, _ = changed("04_train_policy.py")["dpo_losses"](zeros, zeros, lengths, beta=0.1, nll_coef=0.0)
    assert losses.tolist() == pytest.approx([25, 25])                # (1 / (2 beta)) ** 2
    grpo = changed("examples/grpo.py")
    exec(fork_block("def discounted"), grpo)
    assert grpo["discounted_advantages"]([1.0, 0.0], [2, 1], ["a", "a"], gamma=0.5) == [[0.5, 1.0], [-1.0]]


def test_the_arm_that_fork_md_adds_names_what_there_is():
    [arm] = re.findall(r"```toml\n(.*?)```", PAGES["docs/fork.md"], re.DOTALL)
    domain = study.read_domain("backend")
    assert set(re.findall(r"{([\w.-]+)}", arm)) <= {*domain, *domain["outputs"]}
    assert tomllib.loads(arm)["mine"].split()[:4] == ["-m", "examples.mine", "--method", "sweet"]


def test_pairs_as_trl_takes_them(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    row = {"prompt": "<|user|>hi<|end|><|assistant|>", "turn": 0}
    row |= {side: {"text": side, "ids": [1], "advantage": 1.0} for side in ("chosen", "rejected")}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    names = {}
    code = fork_block("from datasets").replace("out/sweet", str(tmp_path)).replace("models", str(ROOT / "models"))
    exec(code, names)
    assert list(names["pairs"]) == [{"prompt": row["prompt"], "chosen": "chosen", "rejected": "rejected"}]


def test_the_interface_of_a_domain_is_documented_whole():
    """At each name: a docstring, or a comment beside it or above it."""
    assert "](../colbench/domain.py)" in PAGES["docs/fork.md"]
    text = (ROOT / "colbench" / "domain.py").read_text()
    names = {owner: [name for name in vars(owner) if not name.startswith("_")] for owner in (Domain, Environment)}
    for owner, owned_names in names.items():
        for name in owned_names:
            method = getattr(owner, name)
            comment = re.search(rf"\n    (# .*\n    {name} = .*|{name} = .*  # .*)\n", text)
            assert getattr(method, "__doc__", None) if isinstance(method, types.FunctionType) else comment, name
    assert len(names[Domain]) > 20 and 5 < len(REQUIRED) <= 16 and set(REQUIRED) <= set(names[Domain])
    for domain in DOMAINS.values():
        assert isinstance(domain, Domain) and issubclass(domain.Environment, Environment)
        check_domain(domain)


def test_the_readme_is_short_and_the_number_of_attacks_is_right():
    assert len(PAGES["README.md"].splitlines()) <= 100
    assert all(len(line) <= 120 for line in PAGES["README.md"].splitlines())
    [number] = re.findall(r"len\(ATTACKS\) == (\d+)\n", (ROOT / "tests" / "test_sandbox.py").read_text())
    assert set(re.findall(r"(\d+) attacks", "\n".join(PAGES.values()))) <= {number}


def test_the_equations_of_the_readme_are_those_of_the_stages():
    [code] = re.findall(r"```python\n(.*?)```", PAGES["README.md"], re.DOTALL)
    torch.manual_seed(0)
    logps, ref_logps, policy_logps, policy_ref_logps = -torch.rand(4, 4, 2)
    lengths, beta = torch.tensor([[3, 5], [2, 1], [4, 4], [1, 7]]), 0.1
    names = {**locals(), "logsigmoid": torch.nn.functional.logsigmoid}
    exec(code, names)
    critic, policy = map(program_of, ("03_train_critic", "04_train_policy"))
    advantages = critic.common.action_advantages(logps, ref_logps, lengths, "turn")
    critic_losses, _ = critic.bradley_terry_losses(advantages, logps, lengths, beta, nll_coef=0.0)
    policy_losses, _ = policy.dpo_losses(policy_logps, policy_ref_logps, lengths, beta, nll_coef=0.0)
    for name, own in (("advantages", advantages), ("critic_losses", critic_losses), ("policy_losses", policy_losses)):
        assert torch.allclose(names[name], own), name


def table_of(name):
    return read_csv(ROOT / "docs" / "data" / f"{name}.csv")


@pytest.mark.parametrize("name", ["seeds", "efficiency", "rounds_320", "rounds_sql_320"])
def test_the_pages_show_the_figures_of_the_pictures(name):
    """Each mean with its interval, or the means of a method's rounds."""
    figures, rounds = [], {}
    for row in table_of(name):
        mean, low, high = (f"{float(row[key] or 0):.3f}".removeprefix("0") for key in ("success", "low", "high"))
        if name.startswith("rounds"):
            rounds.setdefault(row["method"], []).append(mean)
        elif row["low"]:
            figures.append(f"{mean} [{low}, {high}]")
    figures += [" ".join(means) for means in rounds.values()]
    text = "\n".join(PAGES.values()).replace("*", "").replace(" | ", " ")
    assert len(figures) >= 2 and [line for line in figures if line not in text] == []


def test_the_means_of_the_seeds_are_theirs():
    rows = table_of("seeds")
    for whole in [row for row in rows if row["seed"] == "all"]:
        seeds = [float(row["success"]) for row in rows if row["method"] == whole["method"] and row["seed"] != "all"]
        assert len(seeds) == 10 and sum(seeds) / 10 == pytest.approx(float(whole["success"]), abs=6e-4)


def test_every_row_runs_small(tmp_path, workspace):
    """Two tasks' worth of everything, and of the rows of a kind, whose words are the same but for paths, the first one:
    the others get a link to its output. BIG has another tokenizer, so that its dialogues are rendered again."""
    environment = (f"export DATA='--num-tasks 6' K=2 NS=2 SIZES=12 BIG={workspace}/model "
                   "ROLL='--max-rounds 8 --max-new-tokens 100' CRITIC='--lr 3e-4 --max-steps 1 --held-out-frac 0' "
                   "SWEET='--max-steps 1 --max-new-tokens 30 --num-candidates 4 --pairs-per-turn 1 --data-frac 0.1' "
                   "MTDPO='--max-steps 1' RFT='--max-steps 1'")
    commands = []
    for name, words in commands_of(f"{LAPTOP}\n{environment}\n{PAPER}"):
        commands.append((int(name[:2]), [word.replace("out/rows", str(tmp_path)) for word in words]))
    outputs = {}                                                     # {kind: the output of its first row}
    for number, words in commands[:-3]:
        out = words[-1]
        names = [word for word in words if "/" not in word or "judge:" in word]
        kind = number, *names, out.endswith(("big-critic", "big-sweet"))
        first = outputs.setdefault(kind, out)
        if first != out:
            for ending in ("", ".args.json"):                        # of a folder this leads nowhere
                os.symlink(first + ending, out + ending)
        else:
            if number == 1 and "test" in words:
                words += ["--num-tasks", "2"]                        # the last one wins
            if number == 2 and "offline" not in out:
                words += ["--max-rounds", "2", "--max-new-tokens", "30"]
            call(number, *words)
    assert len(outputs) == 20
    table, curves, scaling = [call(5, *words) for _, words in commands[-3:]]
    assert "published: success" in table and "sweet-regression" in table
    assert "critic-value" in curves and "sweet" in scaling
