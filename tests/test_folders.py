"""Model folders: damaged files, broken chat templates, adapters and critics end with one line, and no code of a folder
runs."""
import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import save_file

import common
from colbench import backend
from conftest import BASE
from lib.models import load_model, stop_ids
from lib.runtime import InputError


class Planted:
    """What runs where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(BASE, tmp_path / "model")
    return tmp_path / "model"


def code_of(folder):
    """A config that names code of its folder."""
    (folder / "planted.py").write_text(f"open({str(folder.parent / 'ran')!r}, 'w')\nclass Planted:\n    pass\n")
    config = {"auto_map": {"AutoConfig": "planted.Planted"}, "model_type": "planted"}
    (folder / "config.json").write_text(json.dumps(config))


def pickled(folder):
    (folder / "model.safetensors").unlink()
    with open(folder / "pytorch_model.bin", "wb") as file:
        pickle.dump(Planted(folder.parent / "ran"), file)


def shortened(name, length):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:length])


def template(text):
    return lambda folder: (folder / "chat_template.jinja").write_text(text)


DAMAGES = {
    "code of a config": code_of, "pickled weights that run code": pickled,
    "half a config": shortened("config.json", 100),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "half of the weights": shortened("model.safetensors", 1_000_000),
    "half a tokenizer": shortened("tokenizer.json", 20_000),
    "no template": lambda folder: (folder / "chat_template.jinja").unlink(),
    "a template's syntax error": template("{% for %}"),
    "a template's own error": template("{{ raise_exception('No system\nprompt') }}")}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_one_line(folder, name, monkeypatch):
    asked = []
    monkeypatch.setattr("builtins.input", lambda *question: asked.append(question) or "n")
    DAMAGES[name](folder)
    with pytest.raises(InputError) as error:
        model, tokenizer = load_model(str(folder), "cpu")
        stop_ids(model, tokenizer)
    line = str(error.value)
    assert "\n" not in line and str(folder) in line and len(line) < 600
    assert ("its chat template fails" in line) == ("error" in name)
    assert asked == [] and not (folder.parent / "ran").exists()


def test_a_damaged_adapter_is_one_line(tmp_path):
    config = {"base_model_name_or_path": str(BASE), "peft_type": "LORA", "r": "x", "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file({"base_model.model.a": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(InputError) as error:
        load_model(str(tmp_path), "cpu")
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


CRITIC = {"head": "regression", "normalize": "turn", "privileged": True, "reference": str(BASE)}
CRITICS = {                                                         # critic.json, turn_head.pt
    "an unknown head": ({**CRITIC, "head": "planted"}, None), "no turn_head.pt": (CRITIC, None),
    "a head that runs code": (CRITIC, Planted),
    "a head of another shape": (CRITIC, {"weight": torch.zeros(1, 7), "bias": torch.zeros(1)})}


@pytest.mark.parametrize("name", CRITICS)
def test_a_damaged_critic_is_one_line(folder, name, tiny):
    note, head = CRITICS[name]
    (folder / "critic.json").write_text(json.dumps(note))
    if head is not None:
        torch.save(head(folder.parent / "ran") if head is Planted else head, folder / "turn_head.pt")
    with pytest.raises(InputError) as error:
        common.load_critic(common.read_critic(folder, tiny[1], backend), common.load_whole("cpu"))
    assert "\n" not in str(error.value) and str(error.value).startswith(str(folder))
    assert not (folder.parent / "ran").exists()
