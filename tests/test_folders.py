"""Model folders from elsewhere: damaged files, code, pickles and endless chat templates end with one line and status 2;
nothing asks on the terminal, nothing runs."""
import json
import os
import pickle
import shutil
import signal
import threading
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

import common
from conftest import refused, ROOT, run
from lib import folders
from lib.models import load_model, load_tokenizer, stop_ids
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


def header(content):
    """A file of safetensors with this header (bytes)."""
    return text("model.safetensors", len(content).to_bytes(8, "little") + content)


def one_tensor(**fields):
    tensor = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **fields}
    return header(json.dumps({"model.norm.weight": tensor}).encode() + b" " * 8)


def change_tensors(change):
    def damage(folder):
        tensors = load_file(folder / "model.safetensors")
        save_file(change(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return damage


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


def torch_pickled(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def in_parts(*names):
    def damage(folder):
        (folder / "model.safetensors").unlink()
        index = {"metadata": {}, "weight_map": {f"model.{i}": name for i, name in enumerate(names)}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return damage


DAMAGES = {
    # code and pickles
    "code of a config": code_of("config.json", "AutoConfig"),
    "code of a model": code_of("config.json", "AutoModelForCausalLM"),
    "code of another repository": config(auto_map={"AutoConfig": "evil/repository--planted.P"}, model_type="planted"),
    "pickled weights that run code": pickled,
    "pickled weights": torch_pickled,
    # config.json
    "an empty config": text("config.json", ""), "half a config": cut("config.json", 100),
    "a config that is a list": text("config.json", "[]"), "a config that is null": text("config.json", "null"),
    "a config that is a number": text("config.json", "7"), "an empty object as config": text("config.json", "{}"),
    "a config that is no UTF-8": text("config.json", b"\xff\xfe{}"),
    "a config 100,000 deep": text("config.json", "[" * 100_000),
    "an integer of 5,000 digits": text("config.json", '{"vocab_size": ' + "9" * 5000 + "}"),
    "an unknown kind of model": config(model_type="unknown"), "a kind that is a number": config(model_type=7),
    "a kind that is a list": config(model_type=["llama"]), "a kind that is null": config(model_type=None),
    "a size that is a string": config(hidden_size="large"), "a size that is null": config(hidden_size=None),
    "a size of 0": config(hidden_size=0), "a size below zero": config(hidden_size=-128),
    "another size": config(hidden_size=64), "another number of words": config(vocab_size=99),
    "heads of 0": config(num_attention_heads=0),
    "heads that do not divide": config(num_attention_heads=3, head_dim=None),
    "a billion layers": config(num_hidden_layers=10 ** 9), "layers below zero": config(num_hidden_layers=-1),
    "layers that are a string": config(num_hidden_layers="3"), "an unknown activation": config(hidden_act="planted"),
    "rope of a wrong type": config(rope_parameters="default"), "rope of an unknown kind": config(
        rope_parameters={"rope_type": "planted"}),
    "a quantization that is a list": config(quantization_config=[1]),
    "an attention from the hub": config(attn_implementation="evil/kernel"),
    "experts from the hub": config(experts_implementation="evil/kernel"),
    "an unknown dtype": config(dtype="float31"),
    "dropout below zero": config(attention_dropout=-1), "dropout of all": config(attention_dropout=1.0),
    "a lone surrogate": config(more="\ud800"),
    "a lone surrogate of the tokenizer": lambda folder: change_json(folder, "tokenizer_config.json", more="\ud800"),
    # weights
    "no weights": without("model.safetensors"), "empty weights": text("model.safetensors", ""),
    "half of the weights": cut("model.safetensors", 1_000_000), "a cut header": cut("model.safetensors", 100),
    "seven bytes": cut("model.safetensors", 7), "a header of 2^63 bytes": text("model.safetensors", b"\xff" * 64),
    "a header that is no JSON": header(b"{{{{"), "a header that is a list": header(b"[]"),
    "offsets outside": one_tensor(data_offsets=[0, 10 ** 9]), "offsets below zero": one_tensor(data_offsets=[-4, 0]),
    "a shape of another length": one_tensor(shape=[10 ** 6]), "a huge shape": one_tensor(shape=[2 ** 62, 2 ** 62]),
    "an unknown type": one_tensor(dtype="F31"), "a header 100,000 deep": header(b"[" * 100_000),
    "a shape of other numbers": change_tensors(lambda tensors: {
        name: tensor[:-1] if "norm" in name else tensor for name, tensor in tensors.items()}),
    "weights that are a folder": lambda folder: (without("model.safetensors")(folder), (
        folder / "model.safetensors").mkdir()),
    "parts that are not there": in_parts("model-1.safetensors"), "parts elsewhere": in_parts("../../etc/passwd"),
    "an index that is no JSON": lambda folder: (in_parts()(folder), text("model.safetensors.index.json", "{")(folder)),
    "an index without a map": lambda folder: (in_parts()(folder), text("model.safetensors.index.json", "{}")(folder)),
    # the tokenizer
    "no tokenizer": without("tokenizer.json"), "an empty tokenizer": text("tokenizer.json", ""),
    "half a tokenizer": cut("tokenizer.json", 20_000), "a tokenizer that is a list": text("tokenizer.json", "[]"),
    "a tokenizer that is an empty object": text("tokenizer.json", "{}"),
    "a tokenizer 100,000 deep": text("tokenizer.json", "[" * 100_000),
    "a tokenizer of an unknown model": text("tokenizer.json", '{"version": "1.0", "model": {"type": "Planted"}}'),
    "a tokenizer with a broken regex": lambda folder: change_json(folder, "tokenizer.json", pre_tokenizer={
        "type": "Split", "pattern": {"Regex": "(((("}, "behavior": "Isolated", "invert": False}),
    "a vocabulary of wrong types": lambda folder: change_json(folder, "tokenizer.json", model={
        "type": "Unigram", "vocab": [1, 2], "unk_id": 0}),
    "half a tokenizer_config": cut("tokenizer_config.json", 50),
    "a tokenizer_config that is a list": text("tokenizer_config.json", "[]"),
    "an end that is a list": lambda folder: change_json(folder, "tokenizer_config.json", eos_token=[1]),
    "no end": lambda folder: change_json(folder, "tokenizer_config.json", eos_token=None),
    "a class that is a number": lambda folder: change_json(folder, "tokenizer_config.json", tokenizer_class=7),
    "a length that is a text": lambda folder: change_json(folder, "tokenizer_config.json", model_max_length=""),
    "no template": without("chat_template.jinja"),
    "a template that is no UTF-8": text("chat_template.jinja", b"\xff\xfe"),
    "a template that is a number": lambda folder: (without("chat_template.jinja")(folder), change_json(
        folder, "tokenizer_config.json", chat_template=7)),
}
ENDLESS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops in text": "{% for i in range(99999) %}{{ range(99999)|join|length }}{% endfor %}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
                                       "{{ f(40) }}",
    "a huge power": "{{ messages|length * 9 ** (9 ** 9) }}", "a power that is folded": "{{ 9 ** (9 ** 9) }}",
    "a power of a variable": "{% set n = 9 %}{{ n ** (n ** n) }}",
    "a long chat alone": "{% if messages|length > 20 %}{{ 9 ** (9 ** 9) }}{% endif %}{{ messages[0].content }}",
    "a system prompt alone": "{% if messages[0].role == 'system' %}{{ 9 ** (9 ** 9) }}{% endif %}",
    "the cue alone": "{% if add_generation_prompt %}{{ 9 ** (9 ** 9) }}{% endif %}",
    "an endless namespace": "{% set ns = namespace(a='x') %}{% for i in range(64) %}{% set ns.a = ns.a + ns.a %}"
                            "{% endfor %}{{ ns.a }}",
    "ten gigabytes": "{{ 'a' * 10 ** 10 }}", "a wide text": "{{ 'a'|center(10 ** 10) }}",
    "a format": "{{ '%10000000000d' % 1 }}", "a list": "{{ ([0] * 10 ** 10)|length }}",
    "ten million characters": "{{ 'a' * 10 ** 7 }}",
}
BROKEN = {
    "a syntax error": "{% for %}", "no end": "{% if messages %}", "an unknown filter": "{{ messages|planted }}",
    "an unknown tag": "{% include 'a' %}", "an attribute of Python": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "an error of its own": "{{ raise_exception('No\x1b[31m system\nprompt') }}", "a division by zero": "{{ 1 // 0 }}",
    "an unknown name": "{{ nothing.at.all }}", "a type error": "{{ 1 + 'a' }}",
    "deep": "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "a macro without an end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a long range": "{{ range(10 ** 9)|list }}",
}


def load_as_stages_do(folder):
    """Model, tokenizer, and the prompt of a chat."""
    model, tokenizer = load_model(str(folder), "cpu")
    stop_ids(model, tokenizer)
    return common.prompt_text(tokenizer, USER, 10, "Help.")


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_one_line(folder, name, monkeypatch):
    asked = []
    monkeypatch.setattr("builtins.input", lambda *question: asked.append(question) or "n")
    DAMAGES[name](folder)
    with pytest.raises(InputError) as error:
        load_as_stages_do(folder)
    assert "\n" not in str(error.value) and str(folder) in str(error.value) and len(str(error.value)) < 600
    assert asked == [] and not (folder.parent / "ran").exists()


@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_template_is_one_line(folder, name, monkeypatch):
    monkeypatch.setattr(folders, "TEMPLATE_S", 0.5)
    monkeypatch.setattr(folders, "TEMPLATE_BYTES", 2 ** 27)
    (folder / "chat_template.jinja").write_text(ENDLESS[name])
    begin = time.monotonic()
    with pytest.raises(InputError, match="its chat template (takes|makes) more than .* a short chat") as error:
        load_tokenizer(str(folder))
    assert str(error.value).startswith(f"{folder}: ") and time.monotonic() - begin < 15


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_template_is_one_line(folder, name):
    (folder / "chat_template.jinja").write_text(BROKEN[name])
    with pytest.raises(InputError, match="its chat template fails") as error:
        load_as_stages_do(folder)
    assert str(error.value).startswith(f"{folder}: ") and "\n" not in str(error.value)


def test_a_template_that_is_slow_for_one_dialogue_is_stopped(folder, monkeypatch):
    """The probes cannot know every dialogue; a prompt has a limit of its own. In a thread it has none."""
    monkeypatch.setattr(folders, "RENDER_S", 0.3)
    (folder / "chat_template.jinja").write_text(
        "{% if 'magic' in messages[0].content %}" + ENDLESS["nested loops"] + "{% endif %}{{ messages[0].content }}")
    tokenizer, before = load_tokenizer(str(folder)), signal.getsignal(signal.SIGPROF)
    assert folders.render_chat(tokenizer, USER) == "What is it?"
    with pytest.raises(InputError, match=f"{folder}: its chat template fails .*more than 0.3 CPU seconds"):
        folders.render_chat(tokenizer, [{"role": "user", "content": "magic"}])
    assert signal.getsignal(signal.SIGPROF) is before and signal.getitimer(signal.ITIMER_PROF)[0] == 0
    texts = []
    thread = threading.Thread(target=lambda: texts.append(folders.render_chat(tokenizer, USER)))
    thread.start()
    thread.join()
    assert texts == ["What is it?"]


def test_a_template_that_is_slow_for_system_messages_is_stopped(folder, monkeypatch):
    monkeypatch.setattr(folders, "RENDER_S", 0.3)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    tokenizer = load_tokenizer(str(folder))                          # whose probes have no system message to be slow at
    tokenizer.chat_template = ("{% if messages[0].role == 'system' %}" + ENDLESS["nested loops"] +
                               "{% endif %}{{ messages[0].content }}")
    with pytest.raises(InputError, match=f"{folder}: its chat template fails .*more than 0.3 CPU seconds"):
        folders.render_chat(tokenizer, [{"role": "system", "content": "Ask."}, *USER])


def test_a_template_is_tried_once_a_process(folder, monkeypatch):
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }} once")
    tried, probe_fault = [], folders.probe_fault
    monkeypatch.setattr(folders, "probe_fault", lambda tokenizer: tried.append(tokenizer) or probe_fault(tokenizer))
    for _ in range(3):
        load_tokenizer(str(folder))
    assert len(tried) == 1


def test_a_probe_works_beside_threads_and_leaves_no_process(folder, monkeypatch):
    """Also in a thread, as a fork of a process with others that compute."""
    stop, found, pids, fork = threading.Event(), [], [], os.fork

    def fork_and_note():
        pid = fork()
        pids.append(pid)
        return pid
    monkeypatch.setattr(os, "fork", fork_and_note)

    def compute():
        while not stop.is_set():
            torch.randn(200, 200) @ torch.randn(200, 200)
    workers = [threading.Thread(target=compute) for _ in range(2)]
    for worker in workers:
        worker.start()
    tokenizer = load_tokenizer(str(folder))
    for _ in range(5):
        thread = threading.Thread(target=lambda: found.append(folders.probe_fault(tokenizer)))
        thread.start()
        thread.join()
    stop.set()
    for worker in workers:
        worker.join()
    assert found == [None] * 5 and len(pids) >= 5
    for pid in pids:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def arguments_with(number, folder, workspace, out):
    """02 with such an agent, and 04 with such a model."""
    if number == 2:
        return ["--tasks", workspace / "tasks.jsonl", "--agent", folder, "--out", out]
    return ["--method", "rft", "--trajectories", workspace / "offline.jsonl", "--model", folder, "--out", out]


@pytest.mark.parametrize("damage, message", [
    ("code of a config", "custom code"), ("pickled weights that run code", "are pickled"),
    ("half of the weights", "cannot be loaded"), ("half a tokenizer", "cannot be loaded"),
    ("another size", "cannot be loaded"), ("an attention from the hub", "names code of a hub"),
    ("a billion layers", "num_hidden_layers")])
def test_stages_end_with_one_line(workspace, folder, tmp_path, damage, message):
    DAMAGES[damage](folder)
    for number in (2, 4):
        line = refused(number, *arguments_with(number, folder, workspace, tmp_path / f"{number}"))
        assert message in line and str(folder) in line
    assert not (tmp_path / "ran").exists()


def test_stages_end_with_one_line_and_status_2(workspace, folder, tmp_path):
    DAMAGES["code of a config"](folder)
    for number, script in ((2, "02_rollout.py"), (4, "04_train_policy.py")):
        process = run(script, *arguments_with(number, folder, workspace, tmp_path / script))
        assert process.returncode == 2, process.stderr
        [line] = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
        assert "custom code" in line and str(folder) in line and "Traceback" not in process.stderr
    assert not (tmp_path / "ran").exists()


def test_02_ends_where_a_template_hangs(workspace, folder, tmp_path):
    (folder / "chat_template.jinja").write_text(ENDLESS["nested loops"])
    process = run("02_rollout.py", "--tasks", workspace / "tasks.jsonl", "--agent", folder, "--out", tmp_path / "out")
    assert process.returncode == 2 and process.stderr.count("\n") == 1
    assert process.stderr == (f"error: {folder}: its chat template takes more than 5 CPU seconds for a short chat; "
                              "mend chat_template.jinja or tokenizer_config.json there\n")


@pytest.mark.parametrize("name, content", [
    ("adapter_config.json", b""), ("adapter_config.json", b"[]"), ("adapter_config.json", b"{}"),
    ("adapter_config.json", b"[" * 100_000), ("adapter_config.json", b'{"base_model_name_or_path": 7}'),
    ("adapter_config.json", b'{"base_model_name_or_path": ["a"]}'),
    ("adapter_config.json", b'{"base_model_name_or_path": "models/tiny", "peft_type": "PLANTED"}'),
    ("adapter_config.json", b'{"base_model_name_or_path": "models/tiny", "peft_type": "LORA", "r": "x"}'),
    ("adapter_model.safetensors", b""), ("adapter_model.safetensors", b"\xff" * 100),
    ("adapter_model.safetensors", None)])
def test_a_damaged_adapter_is_one_line(tmp_path, name, content):
    pytest.importorskip("peft")
    good = {"base_model_name_or_path": str(TINY), "peft_type": "LORA", "r": 2, "lora_alpha": 4,
            "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(good))
    save_file({"base_model.model.a": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    if content is None:
        with open(tmp_path / "adapter_model.bin", "wb") as file:
            pickle.dump(Planted(tmp_path / "ran"), file)
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as error:
        load_model(str(tmp_path), "cpu")
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value) and not (tmp_path / "ran").exists()


CRITIC = {"head": "regression", "normalize": "turn", "privileged": True, "reference": str(TINY)}
CRITICS = {
    "no JSON": "{", "a list": "[]", "deep": "[" * 100_000, "no UTF-8": b"\xff", "empty": {},
    "a head that is a number": {**CRITIC, "head": 7}, "an unknown head": {**CRITIC, "head": "planted"},
    "an unknown way": {**CRITIC, "normalize": "planted"}, "no reference": {
        "head": "lm", "normalize": "turn", "privileged": True},
    "a reference that is a list": {**CRITIC, "head": "lm", "reference": ["a"]},
    "privileged a string": {**CRITIC, "privileged": "no"}, "visual a number": {**CRITIC, "visual": 1},
    "no way": {"head": "regression", "privileged": True}, "not said whether privileged": {
        "head": "regression", "normalize": "turn"}, "no turn_head.pt": CRITIC}
HEADS = {"empty": b"", "text": b"What is it?", "a pickle that runs code": None,
         "another shape": {"weight": torch.zeros(1, 7), "bias": torch.zeros(1)},
         "no bias": {"weight": torch.zeros(1, 128)}, "a list": [1, 2]}


def load_critic(folder, tokenizer):
    from colbench import backend
    return common.load_critic(common.read_critic(folder, tokenizer, backend), common.load_whole("cpu"))


@pytest.mark.parametrize("name", CRITICS)
def test_a_damaged_critic_is_one_line(folder, name, tiny):
    content = CRITICS[name]
    content = json.dumps(content) if isinstance(content, dict) else content
    text("critic.json", content)(folder)
    with pytest.raises(InputError) as error:
        load_critic(folder, tiny[1])
    assert "\n" not in str(error.value) and str(error.value).startswith(str(folder))


@pytest.mark.parametrize("name", HEADS)
def test_a_damaged_head_is_one_line(folder, name, tiny):
    text("critic.json", json.dumps(CRITIC))(folder)
    if name == "a pickle that runs code":
        torch.save(Planted(folder.parent / "ran"), folder / "turn_head.pt")
    elif isinstance(HEADS[name], bytes):
        text("turn_head.pt", HEADS[name])(folder)
    else:
        torch.save(HEADS[name], folder / "turn_head.pt")
    with pytest.raises(InputError) as error:
        load_critic(folder, tiny[1])
    assert "\n" not in str(error.value) and str(folder) in str(error.value) and not (folder.parent / "ran").exists()


def test_a_folder_that_is_whole_is_loaded_as_before(tiny):
    """The same weights, the same prompt; a tokenizer whose template is one of several, too."""
    model, tokenizer = load_model(str(TINY), "cpu")
    for name, tensor in tiny[0].state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
    assert folders.render_chat(tokenizer, USER, add_generation_prompt=True) == tokenizer.apply_chat_template(
        USER, tokenize=False, add_generation_prompt=True)
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": "{{ tools }}"}
    folders.check_template("models/tiny", tokenizer)
