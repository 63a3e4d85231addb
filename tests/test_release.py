"""What archives and hubs read: the version, in one place, and CITATION.cff."""
import argparse
import json
import subprocess
import sys

import pytest
import yaml

import lib
from conftest import fork, ROOT, stage
from lib import runtime

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
    assert versions["sweet-rl"] == lib.VERSION and set(versions) == {"sweet-rl", "python", "torch", "transformers"}


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
