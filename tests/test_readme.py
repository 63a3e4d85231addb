"""README.md and docs/: their commands are parsed, what they name exists, and the reproduction page runs in small."""
import ast
import contextlib
import csv
import functools
import io
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

import pytest

from colbench import DOMAINS
from conftest import fork, ROOT, run, stage

PAGES = {path.relative_to(ROOT).as_posix(): path.read_text()
         for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]}
BLOCKS = {f"{page}, block {number}": block for page, text in PAGES.items()
          for number, block in enumerate(re.findall(r"^```bash\n(.*?)^```$", text, re.DOTALL | re.MULTILINE), 1)}
PROSE = {page: re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE) for page, text in PAGES.items()}
SPANS = [(page, span) for page, text in PROSE.items() for span in re.findall(r"`([^`\n]+)`", text)]
PAPER, LAPTOP = [block for name, block in BLOCKS.items() if name.startswith("docs/reproduce.md")][:2]
CODE = "\n".join(path.read_text() for folder in (".", "colbench", "examples", "lib", "scripts")
                 for path in ROOT.glob(f"{folder}/*.py"))
REMOVED_FLAGS = {"--turn-cost", "--min-margin", "--like-pairs", "--optimizer"}  # of 03 and 04, in commits up to 748f4b3
FORKS = "grpo", "distill", "gain", "signed"                                  # of 04, in examples/

# Stands for python, torchrun, bash, pip, cp and vllm: notes its words and makes the output, which later lines list.
# json and pathlib would take twice as long as all else of it.
STAND_IN = f"#!{sys.executable} -IS\n" + """
import os, sys
with open(os.environ["LOG"], "a") as log:
    log.write(ascii([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
if "--out" in sys.argv:
    out = sys.argv[sys.argv.index("--out") + 1]
    is_file = "." in os.path.basename(out)
    os.makedirs(os.path.dirname(out) or "." if is_file else out, exist_ok=True)
    if is_file:
        open(out, "a").close()
"""


@functools.cache
def started(block):
    """The commands that a block starts, as lists of words; its variables and loops are expanded by the shell itself."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("python", "torchrun", "bash", "pip", "cp", "vllm"):
            program = pathlib.Path(folder, name)
            program.write_text(STAND_IN)
            program.chmod(0o755)
        log = pathlib.Path(folder, "log")
        log.touch()
        process = subprocess.run(["/bin/bash", "-euo", "pipefail", "-c", block], cwd=folder, text=True,
                                 capture_output=True, env={"PATH": f"{folder}:/usr/bin:/bin", "LOG": str(log)})
        assert process.returncode == 0, process.stderr
        return [ast.literal_eval(line) for line in log.read_text().splitlines()]


def test_docstrings_and_help_texts_know_domains_and_defaults():
    assert all(f"--domain {name}" in stage(1).__doc__ for name in DOMAINS)
    texts = {}
    for flag in ("--epochs", "--batch-size"):
        [texts[flag]] = re.findall(rf"^  {flag} .*?(?=^  --)", (helped := help_of(4)), re.DOTALL | re.MULTILINE)
        texts[flag] = " ".join(texts[flag].split()).replace("- ", "-")          # a word that the help has broken
    assert "sweet 1, mtdpo 4, rft 4, sft 4; with --preset paper-frontend 8 in place of 4" in texts["--epochs"]
    assert "sweet 8, mtdpo 8, rft 32, sft 32" in texts["--batch-size"], helped
    for method in ("sweet", "mtdpo", "rft", "sft", *FORKS):
        module = fork(method) if method in FORKS else stage(4)
        more = ["--critic", "x"] if method == "sweet" else []
        flags = ["--method", method, "--trajectories", "x", "--model", "x", "--out", "x", *more]
        plain, pages = (module.parse_args([*flags, *preset]) for preset in ([], ["--preset", "paper-frontend"]))
        assert plain.batch_size == (8 if method in ("sweet", "mtdpo", "gain") else 32)
        assert (plain.epochs, pages.epochs) == ((4, 8) if method in ("mtdpo", "rft", "sft") else (1, 1))


def help_of(number):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        stage(number).parse_args(["--help"])
    return printed.getvalue()


def number_of(script):
    return int(re.fullmatch(r"0([1-5])_\w+\.py", script)[1])


@functools.cache
def flags_of(program):
    """The flags of a stage (its number) or of a fork (its name), as its --help shows them."""
    module = stage(program) if isinstance(program, int) else fork(program)
    text = io.StringIO()
    with contextlib.redirect_stdout(text), pytest.raises(SystemExit):
        module.parse_args(["--help"])
    return set(re.findall(r"--[a-z][\w-]*", text.getvalue()))


@pytest.mark.parametrize("name", BLOCKS)
def test_every_command_parses(name):
    copies = {}                                                              # {a copied stage: the stage}
    for program, *words in started(BLOCKS[name]):
        if program == "cp":
            assert (ROOT / words[0]).is_file()
            copies[words[1]] = words[0]
        elif program in ("python", "torchrun") and "-m" in words:
            at = words.index("-m") + 1
            assert at == 1 or program == "torchrun"
            copied = copies.get(words[at].replace(".", "/") + ".py")
            module = stage(number_of(copied)) if copied else fork(words[at].removeprefix("examples."))
            assert module.parse_args(words[at + 1:]).out
        elif program in ("bash", "python") and not (script := copies.get(words[0], words[0])).startswith("0"):
            assert (ROOT / script).is_file(), script
            source = (ROOT / script).read_text()
            assert all(word in source for word in words[1:] if word.startswith("--"))
        elif program in ("python", "torchrun"):
            at = next(i for i, word in enumerate(words) if copies.get(word, word).startswith("0"))
            script = copies.get(words[at], words[at])
            assert (ROOT / script).is_file() and (at == 0 or program == "torchrun")
            assert stage(number_of(script)).parse_args(words[at + 1:]).out
        elif program == "pip" and "-r" in words:
            assert (ROOT / words[words.index("-r") + 1]).is_file()


def test_the_paper_s_rows_are_all_there():
    commands = started(PAPER)
    assert len(commands) == 3 + 5 + 3 + 4 + 6 + 1 + 4 + 3 + 1 + 18 + 6 + 3 * 3 + 6 + 2
    table, curves = ({word.split("=")[0] for word in words if "=" in word} for words in commands[-2:])
    assert {"single", "base", "rft", "mtdpo", "sweet", "sweet-no-norm", "big", "big-sweet", "sweet-n15000"} <= table
    assert {"critic@32", "critic-no-c@1", "critic-value@4", "judge@16"} <= curves and not table & curves


@pytest.mark.parametrize("page, span", [pair for pair in SPANS if "--" in pair[1]])
def test_flags_that_the_pages_name_exist(page, span):
    words = span.split()
    if words[0] in ("vllm", "torchrun", "pip"):                              # their own flags
        words = words[next((i for i, word in enumerate(words) if word.startswith("0")), len(words)):]
    flags = {word.split("=")[0] for word in words if word.startswith("--")}
    scripts = [word for word in words if word.endswith((".py", ".sh"))]
    for script in scripts:
        known = flags_of(number_of(script)) if script.startswith("0") else (ROOT / script).read_text()
        assert flags and all(flag in known for flag in flags), span
    if not scripts:
        benchmarks = "".join(path.read_text() for path in ROOT.glob("tests/bench_*.py"))
        known = set().union(*map(flags_of, [1, 2, 3, 4, 5, *FORKS]), re.findall(r'"(--[\w-]+)"', benchmarks))
        if page == "docs/notebook.md":
            known |= REMOVED_FLAGS
        assert flags <= known, span


def test_entries_of_the_notebook_say_which_flags_were_removed():
    entries = re.split(r"^## ", PAGES["docs/notebook.md"], flags=re.MULTILINE)
    for flag in REMOVED_FLAGS:
        naming = [entry for entry in entries if flag in entry]
        assert naming
        for entry in naming:
            note = re.search(r"\*\*(.*) removed later; commits up to 748f4b3 have", entry)[1]
            assert f"`{flag}" in note


def test_entries_of_the_notebook_have_a_date_and_a_commit_and_the_newest_is_first():
    entries = re.split(r"^## ", PAGES["docs/notebook.md"], flags=re.MULTILINE)[1:]
    dates = []
    for entry in entries:
        first_line = entry.split("\n")[2]
        assert re.search(r"\b[0-9a-f]{7}\b", first_line), first_line
        dates.append(re.match(r"\d{4}-\d{2}-\d{2}", first_line)[0])
    assert dates == sorted(dates, reverse=True)


@pytest.mark.parametrize("page", PAGES)
def test_files_that_the_pages_name_exist(page):
    folders = "tests|docs|lib|colbench|examples|models|scripts"
    named = re.findall(rf"(?<![\w/.$}}-])((?:{folders})/[\w./-]*\w|\w+\.(?:py|sh))", PAGES[page])
    named = [name for name in named if not name.startswith("your_") and name != "examples/mine.py"]     # the reader's
    assert named
    for name in named:
        assert (ROOT / name).exists(), name
    for address in re.findall(r"\[[^]]+\]\(([^)]+)\)", PROSE[page]):
        if not address.startswith("http"):
            path, _, anchor = address.partition("#")
            target = (ROOT / page).parent / path if path else ROOT / page
            assert target.exists(), address
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if anchor else []
            anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert not anchor or anchor in anchors, address


@pytest.mark.parametrize("name", sorted({span[:-2] for _, span in SPANS if re.fullmatch(r"\w+\(\)", span)}))
def test_functions_that_the_pages_name_exist(name):
    assert re.search(rf"\bdef {name}\(", CODE)


@pytest.mark.parametrize("page, setting, script", [
    (page, *found) for page, text in PAGES.items()
    for found in re.findall(r"\b([A-Z_]+)=\S* ?[\w\" ]*?bash (\S+\.sh)", text)])
def test_settings_of_scripts_that_the_pages_name_exist(page, setting, script):
    sourced = (ROOT / "scripts" / "chain.sh").read_text()
    assert f"{{{setting}" in (ROOT / script).read_text() + sourced


def test_the_interface_of_a_domain_is_documented_whole():
    import colbench
    from colbench import defaults
    assert "](../colbench/__init__.py)" in PAGES["docs/fork.md"]     # where it is stated, once
    sections = re.split(r"\n-{10,}\n", colbench.__doc__)[1:]
    names = [set(re.findall(r"^([A-Z_]{2,}|[a-z_]+(?=\()|World)", section, re.MULTILINE)) for section in sections]
    required, *optional, of_world = names
    optional = set.union(*optional) - {"oracle_scores"}              # only of a domain with ORACLES
    assert 5 < len(required) <= 16 and len(optional) > 15 and of_world == {"TAKES"}
    for domain in DOMAINS.values():
        missing = [name for name in required | optional if not hasattr(domain, name)]
        assert not missing and hasattr(domain.World, "TAKES"), (domain.__name__, missing)
    assert not [name for name in optional if not hasattr(defaults, name)]
    assert not [name for name in required - {"World"} if hasattr(defaults, name)]


def test_the_number_of_attacks_is_right():
    number = re.search(r"holds (\d+) attacks", PAGES["docs/scorer.md"])[1]
    assert f"len(ATTACKS) == {number}\n" in (ROOT / "tests" / "test_sandbox.py").read_text()


def test_the_readme_is_short():
    assert len(PAGES["README.md"].splitlines()) <= 150
    assert all(len(line) <= 200 for line in PAGES["README.md"].splitlines())


def test_the_tables_and_the_picture_show_the_same_figures():
    with open(ROOT / "docs" / "seeds.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    assert len(methods) == 4
    for method in methods:
        seeds = [float(row["success"]) for row in rows if row["method"] == method and row["seed"] != "all"]
        [whole] = [row for row in rows if row["method"] == method and row["seed"] == "all"]
        mean, low, high = (f"{float(whole[key]):.3f}"[1:] for key in ("success", "low", "high"))
        assert len(seeds) == 10 and abs(sum(seeds) / 10 - float(whole["success"])) < 0.0006
        row = rf"^\| {method} \| (\*\*)?{mean}(\*\*)? \[{low}, {high}\]"
        assert re.search(row, PAGES["docs/results.md"], re.MULTILINE)
        cells = " | ".join(f"{value:.3f}"[1:] for value in seeds)
        assert f"| {method} | {cells} |" in PAGES["docs/results.md"]


def test_the_tables_of_few_dialogues_show_the_figures_of_their_picture():
    with open(ROOT / "docs" / "efficiency.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["method"] for row in rows} >= {"multi-turn DPO", "SWEET-RL, all turns"}
    for row in rows:
        mean, low, high = (f"{float(row[key]):.3f}"[1:] for key in ("success", "low", "high"))
        line = rf"^\| {row['method']} \| {int(row['dialogues']):,} \| (\*\*)?{mean}(\*\*)? \[{low}, {high}\]"
        for page in ("README.md", "docs/results.md"):
            is_left_out = page == "README.md" and (
                row["dialogues"] == "80" or row["method"] not in ("multi-turn DPO", "SWEET-RL, all turns"))
            assert is_left_out or re.search(line, PAGES[page], re.MULTILINE)


@pytest.mark.parametrize("name, page", [("rounds_320.csv", "docs/results.md"), ("rounds_sql_320.csv", "docs/sql.md")])
def test_the_tables_of_rounds_show_the_figures_of_their_file(name, page):
    with open(ROOT / "docs" / name, newline="") as file:
        rows = list(csv.DictReader(file))
    for method, called in (("mtdpo", "multi-turn DPO"), ("sweet", r"SWEET(-RL)?, all turns")):
        figures = [row for row in rows if row["method"] == method]
        assert [row["round"] for row in figures] == ["1", "2", "3", "4"]
        values = [f"{float(row['success']):.3f}"[1:] for row in figures]
        low, high = (f"{float(figures[-1][side]):.3f}"[1:] for side in ("low", "high"))
        cells = r" \| ".join(rf"(\*\*)?{value}(\*\*)?" for value in values)
        line = rf"^\| {called} \| {cells} \[{low}, {high}\]"
        assert re.search(line, PAGES[page], re.MULTILINE), line


def commands_of(environment, folder):
    """The reproduction block's commands in a laptop's settings. The last two list files, so they are expanded again
    when the others have run."""
    script = f"{LAPTOP}\nexport PY=echo RUN=echo D={folder}\n{environment}\n{PAPER}"
    process = subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=ROOT, text=True, capture_output=True,
                             env={"PATH": os.environ["PATH"]})
    assert process.returncode == 0, process.stderr
    return [shlex.split(line) for line in process.stdout.splitlines()]


def test_every_row_runs_small(tmp_path, workspace):
    """Two tasks' worth of everything; BIG has another tokenizer, so that its dialogues are rendered again."""
    environment = (f"export DATA='--num-tasks 12' K=3 NS=2 SIZES=18 BIG={workspace}/model "
                   "ROLL='--max-rounds 8 --max-new-tokens 100' CRITIC='--lr 3e-4 --max-steps 1 --held-out-frac 0' "
                   "SWEET='--max-steps 1 --max-new-tokens 30 --num-candidates 4 --pairs-per-turn 1 --data-frac 0.1' "
                   "MTDPO='--max-steps 1' RFT='--max-steps 1'")
    for words in commands_of(environment, tmp_path):
        if words[0] != "05_evaluate.py":
            if words[0] == "01_generate_tasks.py" and "test" in words:
                words += ["--num-tasks", "2"]                                # the last one wins
            if words[0] == "02_rollout.py" and "offline" not in words[-1]:
                words += ["--max-rounds", "2", "--max-new-tokens", "30"]
            process = run(*words)
            assert process.returncode == 0, (words, process.stderr)
    evaluations = [words for words in commands_of(environment, tmp_path) if words[0] == "05_evaluate.py"]
    outputs = [run(*words) for words in evaluations]
    assert all(process.returncode == 0 for process in outputs), [process.stderr for process in outputs]
    table, curves = (process.stdout for process in outputs)
    for row in ("single", "base", "rft", "mtdpo", "sweet", "sweet-no-c", "sweet-no-norm", "sweet-regression",
                "big-sweet", "sweet-n18", "mtdpo-n18"):
        assert re.search(rf"^{row} ", table, re.MULTILINE), row
    assert "published: success" in table and "PFLOP" in table
    for label in ("critic", "critic-no-c", "critic-value", "judge"):
        assert re.search(rf"^{label} ", curves, re.MULTILINE), label
