"""Model folders: damaged files, broken chat templates, adapters and critics end with one line, and no code of a folder
runs."""
import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import common
from colbench import backend
from conftest import refused, ROOT, run
from lib.models import load_model, load_tokenizer, render_chat, stop_ids
from lib.runtime import InputError

TINY = ROOT / "models" / "tiny"
USER = [{"role": "user", "content": "What is it?"}]


class Planted:
    """What runs where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(TINY, tmp_path / "model")
    return tmp_path / "model"


def change_json(folder, name, **fields):
    value = json.loads((folder / name).read_text()) | fields
    (folder / name).write_text(json.dumps(value))


def text(name, content):
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def config(**fields):
    return lambda folder: change_json(folder, "config.json", **fields)


def cut(name, length):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:length])


def without(name):
    return lambda folder: (folder / name).unlink()


def code_of(name, kind):
    def damage(folder):
        (folder / "planted.py").write_text(f"open({str(folder.parent / 'ran')!r}, 'w')\nclass Planted:\n    pass\n")
        change_json(folder, name, auto_map={kind: "planted.Planted"}, model_type="planted")
    return damage


def pickled(folder):
    (folder / "model.safetensors").unlink()
    with open(folder / "pytorch_model.bin", "wb") as file:
        pickle.dump(Planted(folder.parent / "ran"), file)


def other_shapes(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor[:-1] if "norm" in name else tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


DAMAGES = {
    "code of a config": code_of("config.json", "AutoConfig"),
    "code of a model": code_of("config.json", "AutoModelForCausalLM"),
    "pickled weights that run code": pickled,
    "an empty config": text("config.json", ""), "half a config": cut("config.json", 100),
    "a config that is a list": text("config.json", "[]"), "an empty object as config": text("config.json", "{}"),
    "a config that is no UTF-8": text("config.json", b"\xff\xfe{}"),
    "an unknown kind of model": config(model_type="unknown"), "a size that is a string": config(hidden_size="large"),
    "another size": config(hidden_size=64), "another number of words": config(vocab_size=99),
    "an unknown activation": config(hidden_act="planted"), "no config": without("config.json"),
    "no weights": without("model.safetensors"), "empty weights": text("model.safetensors", ""),
    "half of the weights": cut("model.safetensors", 1_000_000), "a cut header": cut("model.safetensors", 100),
    "a shape of other numbers": other_shapes,
    "no tokenizer": without("tokenizer.json"), "an empty tokenizer": text("tokenizer.json", ""),
    "half a tokenizer": cut("tokenizer.json", 20_000), "half a tokenizer_config": cut("tokenizer_config.json", 50),
    "no end": lambda folder: change_json(folder, "tokenizer_config.json", eos_token=None),
    "no template": without("chat_template.jinja"), "a template that is no UTF-8": text("chat_template.jinja", b"\xff"),
}
BROKEN = {
    "a syntax error": "{% for %}", "an unknown filter": "{{ messages|planted }}",
    "an attribute of Python": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "an error of its own": "{{ raise_exception('No system\nprompt') }}", "a type error": "{{ 1 + 'a' }}",
}


@pytest.mark.parametrize("name", [*DAMAGES, *BROKEN])
def test_a_damaged_folder_is_one_line(folder, name, monkeypatch):
    asked = []
    monkeypatch.setattr("builtins.input", lambda *question: asked.append(question) or "n")
    if name in BROKEN:
        (folder / "chat_template.jinja").write_text(BROKEN[name])
    else:
        DAMAGES[name](folder)
    with pytest.raises(InputError) as error:
        model, tokenizer = load_model(str(folder), "cpu")
        stop_ids(model, tokenizer)
        render_chat(tokenizer, USER, add_generation_prompt=True)
    line = str(error.value)
    assert "\n" not in line and str(folder) in line and len(line) < 600
    assert ("its chat template fails" in line) == (name in BROKEN)
    assert asked == [] and not (folder.parent / "ran").exists()


def test_stages_end_with_one_line_and_status_2(workspace, folder, tmp_path):
    code_of("config.json", "AutoConfig")(folder)
    arguments = {"02_rollout.py": ["--tasks", workspace / "tasks.jsonl", "--agent", folder],
                 "04_train_policy.py": ["--method", "rft", "--trajectories", workspace / "offline.jsonl", "--model",
                                        folder]}
    for script, flags in arguments.items():
        process = run(script, *flags, "--out", tmp_path / script)
        assert process.returncode == 2, process.stderr
        [line] = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
        assert "custom code" in line and str(folder) in line and "Traceback" not in process.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name, message", [
    ("tiny", "fresh parameters can only be trained"), ("http://127.0.0.1:1/v1#x", "a server cannot be used here"),
    ("./nowhere", "no such folder"), ("/no/where", "no such folder"), ("someone/nothing", "download it first")])
def test_a_name_that_cannot_be_loaded_says_what_to_do(workspace, tmp_path, name, message):
    line = refused(3, "--trajectories", workspace / "offline.jsonl", "--model", name, "--out", tmp_path / "x")
    assert line.startswith(name) and message in line


ADAPTER = {"base_model_name_or_path": str(TINY), "peft_type": "LORA", "r": 2, "lora_alpha": 4,
           "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}


@pytest.mark.parametrize("name, content", [
    ("adapter_config.json", ""), ("adapter_config.json", "[]"), ("adapter_config.json", "{}"),
    ("adapter_config.json", json.dumps({**ADAPTER, "peft_type": "PLANTED"})),
    ("adapter_config.json", json.dumps({**ADAPTER, "r": "x"})),
    ("adapter_model.safetensors", ""), ("adapter_model.safetensors", None)])
def test_a_damaged_adapter_is_one_line(tmp_path, name, content):
    pytest.importorskip("peft")
    (tmp_path / "adapter_config.json").write_text(json.dumps(ADAPTER))
    save_file({"base_model.model.a": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    if content is None:
        with open(tmp_path / "adapter_model.bin", "wb") as file:
            pickle.dump(Planted(tmp_path / "ran"), file)
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(InputError) as error:
        load_model(str(tmp_path), "cpu")
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value) and not (tmp_path / "ran").exists()


CRITIC = {"head": "regression", "normalize": "turn", "privileged": True, "reference": str(TINY)}
CRITICS = {
    "no JSON": "{", "a list": "[]", "empty": {}, "an unknown head": {**CRITIC, "head": "planted"},
    "an unknown way": {**CRITIC, "normalize": "planted"}, "privileged a string": {**CRITIC, "privileged": "no"},
    "no reference": {"head": "lm", "normalize": "turn", "privileged": True}, "no turn_head.pt": CRITIC}
HEADS = {"an empty head": b"", "a head of text": b"What is it?", "a pickle that runs code": None,
         "a head of another shape": {"weight": torch.zeros(1, 7), "bias": torch.zeros(1)},
         "a head without bias": {"weight": torch.zeros(1, 128)}, "a head that is a list": [1, 2]}


@pytest.mark.parametrize("name", [*CRITICS, *HEADS])
def test_a_damaged_critic_is_one_line(folder, name, tiny):
    content = CRITICS.get(name, CRITIC)
    (folder / "critic.json").write_text(json.dumps(content) if isinstance(content, dict) else content)
    if name == "a pickle that runs code":
        torch.save(Planted(folder.parent / "ran"), folder / "turn_head.pt")
    elif isinstance(HEADS.get(name), bytes):
        (folder / "turn_head.pt").write_bytes(HEADS[name])
    elif name in HEADS:
        torch.save(HEADS[name], folder / "turn_head.pt")
    with pytest.raises(InputError) as error:
        common.load_critic(common.read_critic(folder, tiny[1], backend), common.load_whole("cpu"))
    assert "\n" not in str(error.value) and str(error.value).startswith(str(folder))
    assert not (folder.parent / "ran").exists()


def test_a_folder_that_is_whole_is_loaded_as_it_is(tiny):
    model, tokenizer = load_model(str(TINY), "cpu")
    for name, tensor in load_file(TINY / "model.safetensors").items():
        assert torch.equal(tensor, model.state_dict()[name])
    prompt = tokenizer.apply_chat_template(USER, tokenize=False, add_generation_prompt=True)
    assert render_chat(load_tokenizer(str(TINY)), USER, add_generation_prompt=True) == prompt
