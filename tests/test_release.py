"""What archives and hubs read (the version, CITATION.cff, model cards), and what is installed: the lock, pip or uv."""
import argparse
import ast
import hashlib
import importlib
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys

import pytest
import yaml
from huggingface_hub import ModelCard
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lib
from conftest import fork, ROOT, stage
from lib import runtime

model_card = importlib.import_module("scripts.model_card")
STAGES_AND_FORKS = [*(stage(number) for number in range(1, 6)), fork("grpo"), fork("distill")]


# ---------------------------------------------------------------------------------------------------------------------
# the version

@pytest.mark.parametrize("module", STAGES_AND_FORKS, ids=lambda module: module.__name__)
def test_every_stage_prints_the_version(module, capsys):
    with pytest.raises(SystemExit) as stop:
        module.parse_args(["--version"])
    assert stop.value.code == 0 and capsys.readouterr().out == f"SWEET-RL, minimal {lib.VERSION}\n"


def output_of(arguments, folder):
    """Begin an output as a stage does; returns its args.json."""
    args = argparse.Namespace(out=str(folder / "rows.jsonl"), seed=arguments, overwrite=False)
    runtime.is_done(args, args.out, [])
    runtime.begin_output(args, args.out, [])
    return json.loads((folder / "rows.jsonl.args.json").read_text())


def test_args_json_keeps_the_version(tmp_path):
    versions = output_of(0, tmp_path)["versions"]
    assert versions["sweet-rl"] == lib.VERSION
    assert set(versions) == {"sweet-rl", "python", "torch", "transformers", "code"}


def test_another_version_goes_on_with_the_same_output_and_says_so(tmp_path, monkeypatch, capsys):
    begun = output_of(0, tmp_path)
    monkeypatch.setattr(runtime, "VERSION", "9.8.7")
    capsys.readouterr()
    assert output_of(0, tmp_path) == begun
    path = tmp_path / "rows.jsonl"
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{path}: begun with sweet-rl {lib.VERSION}, now 9.8.7", f"{path}: continues an interrupted run"]
    with pytest.raises(runtime.InputError, match="--seed 0, now 1"):
        output_of(1, tmp_path)


def test_a_finished_output_of_another_version_is_done(tmp_path, monkeypatch, capsys):
    output_of(0, tmp_path)
    path = tmp_path / "rows.jsonl"
    path.write_text("{}\n")
    monkeypatch.setattr(runtime, "VERSION", "9.8.7")
    assert runtime.is_done(argparse.Namespace(out=str(path), seed=0, overwrite=False), path, [])
    assert f"begun with sweet-rl {lib.VERSION}, now 9.8.7\n" in capsys.readouterr().out


def test_an_output_of_a_changed_fork_says_so(tmp_path, monkeypatch, capsys):
    fork = tmp_path / "mine.py"
    fork.write_text("x = 1\n")
    monkeypatch.setattr(sys, "argv", [str(fork)])
    output_of(0, tmp_path)
    path = tmp_path / "rows.jsonl"
    path.write_text("{}\n")
    args = argparse.Namespace(out=str(path), seed=0, overwrite=False)
    capsys.readouterr()
    assert runtime.is_done(args, path, []) and "begun with" not in capsys.readouterr().out
    fork.write_text("x = 2\n")
    assert runtime.is_done(args, path, [])
    assert capsys.readouterr().out == (
        f"{path}: begun with another text of mine.py or common.py (--overwrite makes it again)\n"
        f"{path}: done already by the same command\n")


def test_outputs_that_keep_no_version_are_taken_for_those_of_today(tmp_path, capsys):
    output_of(0, tmp_path)
    path = tmp_path / "rows.jsonl.args.json"
    record = json.loads(path.read_text())
    del record["versions"]["sweet-rl"]
    path.write_text(json.dumps(record))
    output_of(0, tmp_path)
    del record["versions"]
    path.write_text(json.dumps(record))
    output_of(0, tmp_path)
    assert "begun with" not in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------------
# CITATION.cff

def follows_the_schema(path):
    """Does a file follow the published schema of citation files, which the package check-jsonschema carries?"""
    process = subprocess.run([sys.executable, "-m", "check_jsonschema", "--builtin-schema",
                              "vendor.citation-file-format", str(path)], capture_output=True, text=True)
    assert process.returncode in (0, 1) and "validation" in process.stdout, process.stdout + process.stderr
    return process.returncode == 0


def test_the_citation_follows_the_published_schema(tmp_path):
    text = (ROOT / "CITATION.cff").read_text()
    without_title = tmp_path / "CITATION.cff"
    without_title.write_text(text.replace('\ntitle: "SWEET-RL, minimal"', ""))
    assert follows_the_schema(ROOT / "CITATION.cff") and not follows_the_schema(without_title)


def test_the_citation_names_the_version_and_the_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0" and citation["license"] == "MIT"
    assert citation["version"] == lib.VERSION
    [paper] = citation["references"]
    assert paper["url"] == "https://arxiv.org/abs/2503.15478" and "SWEET-RL" in paper["title"]


# ---------------------------------------------------------------------------------------------------------------------
# model cards: README.md of the base models

BASE_MODELS = sorted(path.parent for path in ROOT.glob("models/*/config.json"))


@pytest.mark.parametrize("folder", BASE_MODELS, ids=lambda folder: folder.name)
def test_a_model_card_is_in_the_hub_s_format_and_its_table_shows_its_metadata(folder):
    card = ModelCard.load(folder / "README.md")
    data = card.data
    assert (data.license, data.library_name, data.pipeline_tag, data.language) == (
        "mit", "transformers", "text-generation", "en")
    assert data.model_name == folder.name and len(data.eval_results) >= 2
    for result in data.eval_results:
        row = rf"^\| {result.metric_name} \| {result.metric_value:.3f}( \[\d\.\d+, \d\.\d+\])? \|$"
        assert re.search(row, card.text, re.MULTILINE), result.metric_name


@pytest.mark.parametrize("folder", BASE_MODELS, ids=lambda folder: folder.name)
def test_a_model_card_is_of_the_weights_beside_it(folder):
    text = (folder / "README.md").read_text()
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() in text
    assert f"{model_card.count_parameters(folder / 'model.safetensors'):,} parameters" in text


@pytest.mark.parametrize("folder", BASE_MODELS, ids=lambda folder: folder.name)
def test_a_model_card_names_the_tasks_that_make_tiny_draws(folder):
    domain = model_card.DOMAINS[folder.name]
    script = (ROOT / "scripts" / "make_tiny.sh").read_text()
    assert f"{domain.flag}) num_tasks={domain.num_tasks} " in script and "--samples 2" in script
    text = (folder / "README.md").read_text()
    assert f"{domain.num_tasks:,} training tasks" in text and f"{6 * domain.num_tasks:,} scripted" in text


@pytest.mark.parametrize("folder", BASE_MODELS, ids=lambda folder: folder.name)
def test_the_example_of_a_model_card_runs(folder, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    [example] = re.findall(r"^```python\n(.*?)^```$", (folder / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    exec(example.replace("max_new_tokens=220", "max_new_tokens=8"), {})
    assert len(capsys.readouterr().out.split()) >= 3


def test_a_model_card_shows_what_was_measured(tmp_path):
    metrics = {"n": 40, "success_rate": 0.25, "ci95": [0.125, 0.5], "mean_rounds": 3.0, "leaks": 0.0}
    gates = {"needed": {"n": 7, "without_c": -3.25, "with_c": -2.5}}
    text = model_card.card(ROOT / "models" / "tiny", metrics, gates)
    assert "| success | 0.250 [0.125, 0.500] |\n| rounds | 3.000 |\n" in text and "20 test tasks" in text
    assert "| needed | 7 | -3.25 | -2.50 |" in text and "leaks" not in text
    assert "log-probability" not in model_card.card(ROOT / "models" / "tiny", metrics, None)
    (tmp_path / "README.md").write_text(text)
    assert ModelCard.load(tmp_path / "README.md").data.eval_results[0].metric_value == 0.25


def test_a_model_card_is_no_part_of_a_model_s_fingerprint():
    names = {path.name for path in runtime.model_files(ROOT / "models" / "tiny")}
    assert "model.safetensors" in names and "README.md" not in names


# ---------------------------------------------------------------------------------------------------------------------
# scripts/requirements-lock.txt

LOCK = ROOT / "scripts" / "requirements-lock.txt"
# Modules of what is installed for some flags alone, by whom: scripts/frontend.txt, and README's and docs' pip lines
OPTIONAL_MODULES = {"openai", "peft", "PIL", "playwright", "skimage", "trackio"}
CUDA_PACKAGE = re.compile(r"(nvidia|cuda|triton)\b")                # torch's, which it pins itself


def requirements_of(path):
    """{name: Requirement} of a requirements file."""
    requirements = {}
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            requirements[canonicalize_name(requirement.name)] = requirement
    return requirements


def imported_modules(folder):
    """The modules that the program's files import and that are neither Python's nor the program's."""
    modules = set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules.add(node.module.partition(".")[0])
    return modules - set(sys.stdlib_module_names) - {"colbench", "common", "lib"}


def test_the_lock_names_one_version_of_each_requirement_and_within_its_range():
    locked = requirements_of(LOCK)
    wanted = requirements_of(ROOT / "requirements.txt")
    assert len(wanted) >= 9 and set(wanted) <= set(locked)
    for name, requirement in locked.items():
        [pin] = requirement.specifier
        assert pin.operator == "==" and not re.search(r"[+*]", pin.version), requirement
        assert name not in wanted or wanted[name].specifier.contains(pin.version), requirement


def test_the_lock_has_what_its_packages_need():
    """Of the packages as they are installed here, and on this machine."""
    locked = requirements_of(LOCK)
    missing = []
    for name, requirement in locked.items():
        if requirement.marker and not requirement.marker.evaluate():
            continue
        for text in importlib.metadata.requires(name) or []:
            needed = Requirement(text)
            is_needed = needed.marker is None or needed.marker.evaluate({"extra": ""})
            if is_needed and canonicalize_name(needed.name) not in locked and not CUDA_PACKAGE.match(needed.name):
                missing.append((name, text))
    assert missing == []


def test_the_lock_has_what_the_stages_import():
    locked = requirements_of(LOCK)
    modules = set()
    for folder in (ROOT, ROOT / "lib", ROOT / "colbench"):
        modules |= imported_modules(folder)
    modules = {module for module in modules if not (ROOT / "colbench" / f"{module}.py").exists()}
    packages = importlib.metadata.packages_distributions()
    assert {"torch", "transformers", "matplotlib"} <= modules and len(modules - OPTIONAL_MODULES) > 6
    for module in modules - OPTIONAL_MODULES:
        assert {canonicalize_name(name) for name in packages[module]} & set(locked), module


def test_the_lock_names_no_host():
    assert "://" not in LOCK.read_text()


# ---------------------------------------------------------------------------------------------------------------------
# scripts/setup.sh, with stand-ins for python and uv that note their arguments

STAND_IN = """#!/bin/bash
echo "$(basename "$0") $*" | head -n 1 >> "$LOG"
case "$1 $2" in
    "-m venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    "-c "*) exit $TORCH_IS_INSIDE ;;
    "pip install") exit $UV_FAILS ;;
esac
"""


def installed_by(folder, with_uv, torch_is_inside=1, uv_fails=0):
    """The lines of the programs that setup_environment starts in a folder without .venv."""
    programs = folder / "programs"
    programs.mkdir()
    for name in ["python", "uv"][:1 + with_uv]:
        (programs / name).write_text(STAND_IN)
        (programs / name).chmod(0o755)
    (folder / "requirements.txt").write_text("torch\n")
    environment = {
        "PATH": f"{programs}:/usr/bin:/bin",
        "PYTHON": "python",
        "LOG": str(folder / "log"),
        "TORCH_IS_INSIDE": str(torch_is_inside),
        "UV_FAILS": str(uv_fails)}
    script = f"set -euo pipefail; . {ROOT}/scripts/setup.sh; setup_environment requirements.txt; echo ready"
    process = subprocess.run(["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True)
    assert process.returncode == 0 and process.stdout == "installing requirements.txt\nready\n", process.stderr
    again = subprocess.run(["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True)
    assert again.stdout == "ready\n"                                # nothing is installed twice
    lines = (folder / "log").read_text().splitlines()
    return [line for line in lines if " install " in line]


BY_PIP = "python -m pip install --quiet --disable-pip-version-check -r requirements.txt"
BY_UV = "uv pip install --quiet --python .venv/bin/python -r requirements.txt"


@pytest.mark.skipif(shutil.which("uv", path="/usr/bin:/bin") is not None, reason="a uv that cannot be hidden")
def test_pip_installs_where_there_is_no_uv(tmp_path):
    assert installed_by(tmp_path, False) == [BY_PIP]


def test_uv_installs_where_it_is(tmp_path):
    assert installed_by(tmp_path, True) == [BY_UV]


def test_pip_installs_where_a_torch_lies_outside_which_uv_does_not_see(tmp_path):
    assert installed_by(tmp_path, True, torch_is_inside=0) == [BY_PIP]


def test_pip_installs_what_uv_does_not_find(tmp_path):
    assert installed_by(tmp_path, True, uv_fails=2) == [BY_UV, BY_PIP]
