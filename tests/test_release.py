"""What archives and hubs read (the version, CITATION.cff, model cards), and what is installed: the lock, pip or uv."""
import hashlib
import importlib.metadata
import re
import shutil
import subprocess

import pytest
import yaml
from huggingface_hub import ModelCard
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lib
from conftest import ROOT, stage


def test_the_version_and_the_citation(capsys):
    with pytest.raises(SystemExit):
        stage(1).parse_args(["--version"])
    assert capsys.readouterr().out == f"SWEET-RL, minimal {lib.VERSION}\n"
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == lib.VERSION and citation["license"] == "MIT"
    [paper] = citation["references"]
    assert paper["url"] == "https://arxiv.org/abs/2503.15478" and "SWEET-RL" in paper["title"]


@pytest.mark.parametrize("folder", [path.parent for path in sorted(ROOT.glob("models/*/config.json"))],
                         ids=lambda folder: folder.name)
def test_a_model_card_has_the_hub_s_format_is_of_the_weights_beside_it_and_runs(folder, monkeypatch, capsys):
    card = ModelCard.load(folder / "README.md")
    data = card.data
    assert (data.license, data.library_name, data.pipeline_tag, data.language) == (
        "mit", "transformers", "text-generation", "en")
    assert data.model_name == folder.name and len(data.eval_results) >= 2
    for result in data.eval_results:
        row = rf"^\| {result.metric_name} \| {result.metric_value:.3f}( \[\d\.\d+, \d\.\d+\])? \|$"
        assert re.search(row, card.text, re.MULTILINE), result.metric_name
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() in card.text
    monkeypatch.chdir(ROOT)
    [example] = re.findall(r"^```python\n(.*?)^```$", card.text, re.DOTALL | re.MULTILINE)
    exec(example.replace("max_new_tokens=220", "max_new_tokens=8"), {})
    assert len(capsys.readouterr().out.split()) >= 3


def requirements_of(name):
    """{name: Requirement} of a requirements file."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and line[0] != "#"]
    return {canonicalize_name(requirement.name): requirement for requirement in map(Requirement, lines)}


def test_the_lock_names_one_version_of_each_requirement_and_within_its_range_and_what_its_packages_need():
    """What they need as far as these versions are installed here; but what torch pins itself, packages of CUDA."""
    locked, wanted = map(requirements_of, ("scripts/requirements-lock.txt", "requirements.txt"))
    assert len(wanted) >= 8 and set(wanted) <= set(locked)
    for name, requirement in locked.items():
        [pin] = requirement.specifier
        assert pin.operator == "==" and not re.search(r"[+*]", pin.version), requirement
        assert name not in wanted or wanted[name].specifier.contains(pin.version), requirement
    for package in importlib.metadata.distributions():
        pin = locked.get(canonicalize_name(package.name))
        if pin and package.version in pin.specifier and (pin.marker is None or pin.marker.evaluate()):
            for needed in map(Requirement, package.requires or []):
                is_needed = needed.marker is None or needed.marker.evaluate({"extra": ""})
                is_of_cuda = re.match(r"(nvidia|cuda|triton)\b", needed.name)
                assert not is_needed or is_of_cuda or canonicalize_name(needed.name) in locked, needed


STAND_IN = """#!/bin/bash
echo "$(basename "$0") $*" | head -n 1 >> "$LOG"
case "$1 $2" in
    "-m venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    "-c "*) exit $TORCH_IS_INSIDE ;;
    "pip install") exit $UV_FAILS ;;
esac
"""
BY_PIP = "python -m pip install --quiet --disable-pip-version-check -r requirements.txt"
BY_UV = "uv pip install --quiet --python .venv/bin/python -r requirements.txt"


@pytest.mark.parametrize("has_uv, torch_is_inside, uv_fails, commands", [
    (False, 1, 0, [BY_PIP]), (True, 1, 0, [BY_UV]), (True, 0, 0, [BY_PIP]),                # uv does not see it
    (True, 1, 2, [BY_UV, BY_PIP])])
def test_uv_installs_where_it_can(tmp_path, has_uv, torch_is_inside, uv_fails, commands):
    if not has_uv and shutil.which("uv", path="/usr/bin:/bin"):
        pytest.skip("a uv that cannot be hidden")
    for name in ["python", "uv"][:1 + has_uv]:
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "requirements.txt").write_text("torch\n")
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON": "python", "LOG": f"{tmp_path}/log",
                   "TORCH_IS_INSIDE": str(torch_is_inside), "UV_FAILS": str(uv_fails)}
    script = f"set -euo pipefail; . {ROOT}/scripts/setup.sh; setup_environment requirements.txt; echo ready"
    for printed in ("installing requirements.txt\nready\n", "ready\n"):        # nothing is installed twice
        process = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert process.stdout == printed, process.stderr
    assert [line for line in (tmp_path / "log").read_text().splitlines() if " install " in line] == commands
