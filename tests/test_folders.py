"""Model folders: damaged files, broken chat templates, adapters and critics end with one line."""
import json
import pathlib
import shutil

import pytest
import torch
from safetensors.torch import save_file

import common
from colbench import backend
from conftest import BASE
from lib.models import load_model, stop_ids
from lib.runtime import InputError


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(BASE, tmp_path / "model")
    return tmp_path / "model"


def shortened(name, length):
    return name, lambda path: path.write_bytes(path.read_bytes()[:length])


def broken_adapter(path):
    config = {"base_model_name_or_path": str(BASE), "peft_type": "LORA", "r": "x", "target_modules": ["q_proj"]}
    path.write_text(json.dumps(config))
    save_file({"base_model.model.a": torch.zeros(1)}, path.with_name("adapter_model.safetensors"))


def template(text):
    return "chat_template.jinja", lambda path: path.write_text(text)


DAMAGES = {                     # {what: (a file, what is done to it)}
    "code of its own": ("config.json", lambda path: path.write_text('{"auto_map": {"AutoConfig": "code.Config"}}')),
    "half a config": shortened("config.json", 100), "half of the weights": shortened("model.safetensors", 1_000_000),
    "half a tokenizer": shortened("tokenizer.json", 20_000), "an adapter": ("adapter_config.json", broken_adapter),
    "no weights": ("model.safetensors", pathlib.Path.unlink),
    "no template": ("chat_template.jinja", pathlib.Path.unlink), "a template's syntax error": template("{% for %}"),
    "a template's own error": template("{{ raise_exception('No system\nprompt') }}")}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_one_line(folder, name, monkeypatch):
    asked = []
    monkeypatch.setattr("builtins.input", lambda *question: asked.append(question) or "n")
    file, change = DAMAGES[name]
    change(folder / file)
    with pytest.raises(InputError) as error:
        model, tokenizer = load_model(str(folder), "cpu")
        stop_ids(model, tokenizer)
    line = str(error.value)
    assert "\n" not in line and str(folder) in line and len(line) < 600 and asked == []
    assert ("its chat template fails" in line) == ("error" in name)


@pytest.mark.parametrize("head, weights", [
    ("unknown", None), ("regression", None), ("regression", {"weight": torch.zeros(1, 7), "bias": torch.zeros(1)})],
    ids=["an unknown head", "no turn_head.pt", "a head of another shape"])
def test_a_damaged_critic_is_one_line(folder, tiny, head, weights):
    note = {"head": head, "normalize": "turn", "privileged": True, "reference": str(BASE)}
    (folder / "critic.json").write_text(json.dumps(note))
    if weights:
        torch.save(weights, folder / "turn_head.pt")
    with pytest.raises(InputError) as error:
        common.load_critic(common.read_critic(folder, tiny[1], backend), common.load_whole("cpu"))
    assert "\n" not in str(error.value) and str(error.value).startswith(str(folder))
