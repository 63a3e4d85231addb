"""Families of models (tiny, with random weights): log-probabilities, trees, samples and saved folders of each are those
of transformers, or there is one line; and so where files are damaged."""
import json
import math
import pathlib
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM

import common
import lib.load
from compare import assert_refused, load_split
from conftest import BASE, call, critic_note, load_critic, read
from lib.fast import WIDTH_STEP
from lib.load import load_model, load_tokenizer, lora_config, most_positions, save_model, shard, Sharding, takes_masks
from lib.logps import action_outputs, ActionModel, collate, Sequence, without_trees
from lib.runtime import InputError, start
from lib.tokens import encode, stop_ids
from server import generate

SIZES = {"vocab_size": 781, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 780, "initializer_range": 0.3}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOW = {"sliding_window": 8}                                       # tokens, less than the prompt
HALVES = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
QWEN = {**HALVES, "use_sliding_window": True, "max_window_layers": 0}

FULL = {                                                            # every layer sees all tokens before it
    "llama": {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "rope_theta": 5e5,
                                  "high_freq_factor": 4.0, "original_max_position_embeddings": 32}},
    "qwen3_moe": EXPERTS, "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}, "gpt_neox": {},
    "granite": {"logits_scaling": 4.0}, "cohere": {"logit_scale": 0.3}, "nanochat": {"final_logit_softcapping": 3.0}}
WINDOWED = {                                                        # some layers, or all, see the last tokens alone
    **dict.fromkeys(("cohere2", "cwm", "exaone4", "gemma3_text", "granite_swa", "olmo3", "vaultgemma"), HALVES),
    **dict.fromkeys(("afmoe", "exaone_moe", "gpt_oss", "laguna", "mimo_v2_flash"), {**HALVES, **EXPERTS}),
    **dict.fromkeys(("ministral", "mistral", "phi3, window", "starcoder2"), WINDOW), "mixtral": {**WINDOW, **EXPERTS},
    "gemma2": {**WINDOW, "final_logit_softcapping": 3.0}, "gemma4_text": {**HALVES, "vocab_size_per_layer_input": 781},
    "qwen2": QWEN, "qwen3, window": QWEN, "smollm3, window": {**QWEN, "no_rope_layers": [1, 0]}}
LIMITED = {                                                         # layers that take no masks, or no positions
    "qwen3_5_text": {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
                     "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
    "bloom": {"n_layer": 2, "n_head": 4}, "mamba": {"state_size": 8}}
FAMILIES = {**FULL, **WINDOWED, **LIMITED}

PROMPT = "<|user|>Can you write a function that works out the price of a ticket for a visitor?<|end|><|assistant|>"
ACTIONS = [[33, 34, 780], [50, 51, 52, 53, 54, 780], [60, 780]]


def model_of(family, **more):
    sizes = {**SIZES, **FAMILIES.get(family, {}), **more}
    if family == "mamba":
        sizes = {key: value for key, value in sizes.items() if "head" not in key}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.removesuffix(", window"), **sizes)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(BASE))


@pytest.fixture(scope="module")
def tree(tokenizer):
    return common.actions_item(tokenizer, PROMPT, ACTIONS)


def folder_of(model, tokenizer, path):
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def add_tensors(folder, *names):
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: torch.ones(8) for name in names}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_and_samples_are_the_models_own(tokenizer, tree, family):
    """In rows, padded, and in a tree; and so are the gradients."""
    model = model_of(family)
    if family in LIMITED:
        with pytest.raises(InputError, match=f"cannot sample from a {family} model here, .*; run it as a server"):
            generate(model, [[1, 2]], torch.zeros(1, 2), 0, [])
    else:
        ids = encode(tokenizer, PROMPT)
        prompts = [ids, ids[:7]]
        for prompt, ids in zip(prompts, generate(model, prompts, torch.full((2, 6), .5), 0, [780, 17])):
            expected = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=[780, 17])
            assert ids == expected[0, len(prompt):].tolist()
    logps = []
    for action in ACTIONS:
        ids = torch.tensor([encode(tokenizer, PROMPT) + action])
        token_logps = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, :-1], -1)
        logps.append(token_logps.gather(1, ids[0, 1:, None])[-len(action):].sum())
    expected = torch.stack(logps)
    expected.pow(2).sum().backward()
    trained = [parameter for parameter in model.parameters() if parameter.grad is not None]        # not all biases
    gradients = [parameter.grad.clone() for parameter in trained]
    other = "<|user|>the fee<|end|><|assistant|>"                    # a second row: padding
    items = [tree, common.actions_item(tokenizer, other, ACTIONS[:2])]
    action_model = ActionModel(model)
    for takes_trees in {action_model.takes_trees, False}:
        action_model.takes_trees = takes_trees
        model.zero_grad()
        logps, [*_, missing] = action_model(action_model.collate(items, "cpu"))
        torch.testing.assert_close(logps, expected, atol=1e-4, rtol=0)
        assert missing == 0                                         # the second has two actions alone
        logps.pow(2).sum().backward()
        for parameter, gradient in zip(trained, gradients):
            torch.testing.assert_close(parameter.grad, gradient, atol=1e-3 * gradient.abs().max().item(), rtol=1e-3)


def test_all_families_whose_windows_are_known_are_here():
    """Another one, Llama 4's, takes no masks."""
    assert sorted(lib.load.WINDOWED) == sorted(family.removesuffix(", window") for family in WINDOWED)
    config = AutoConfig.for_model("llama4_text", **SIZES, attention_chunk_size=8, layer_types=["chunked_attention"] * 2)
    assert not takes_masks(AutoModelForCausalLM.from_config(config))


def test_a_family_whose_logits_are_not_known_is_refused(tokenizer, tmp_path):
    """HyperCLOVA X multiplies by what Granite, which has the same name for it, divides by."""
    folder = folder_of(model_of("hyperclovax", logits_scaling=4.0), tokenizer, tmp_path)
    assert_refused(folder, "a hyperclovax model computes logits from its last hidden states in an unknown way")


@pytest.mark.parametrize("family, dtype", [("llama", "float32"), ("qwen3_moe", "float32"), ("gemma2", "bfloat16"),
                                           ("gpt2", "bfloat16")])
def test_what_is_saved_loads_again_as_it_was(tokenizer, tmp_path, family, dtype):
    """Weights, whether they are tied, and all ids that end a turn, which generation_config.json may have alone."""
    model = model_of(family)
    model.generation_config.eos_token_id = [780, 17]
    base = folder_of(model, tokenizer, tmp_path / "base")
    save_model(tmp_path / "saved", load_split(base, Sharding(dtype)).model, tokenizer)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert saved.dtype == torch.float32 and saved.generation_config.eos_token_id == [780, 17]
    assert saved.config.tie_word_embeddings == model.config.tie_word_embeddings
    tensors = saved.state_dict()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in model.state_dict().items())


def test_an_adapter_of_transposed_weights_is_merged(tokenizer, tree, tmp_path):
    folder = folder_of(model_of("gpt2"), tokenizer, tmp_path / "base")
    action_model = load_split(folder, lora=lora_config(folder, 4, None, False)).eval()
    for name, parameter in action_model.named_parameters():
        if ".lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    batch = collate([tree])
    with torch.no_grad():
        expected = action_model(batch)
        for out, merge in (("adapter", False), ("whole", True)):
            save_model(tmp_path / out, action_model.model, tokenizer, merge)
            model, _ = load_model(str(tmp_path / out), "cpu")
            torch.testing.assert_close(ActionModel(model)(batch), expected, atol=1e-3, rtol=0)


def test_an_adapter_of_experts_is_refused_before_training(tokenizer, tmp_path):
    folder = folder_of(model_of("qwen3_moe"), tokenizer, tmp_path)
    with pytest.raises(InputError, match="--lora: would adapt experts, .* q_proj v_proj"):
        lora_config(folder, 4, None, False)
    assert lora_config(folder, 4, ["q_proj", "v_proj"], False)


@pytest.mark.parametrize("family, more", [("gpt2", {}), ("qwen2", {"attention_dropout": .5})])
def test_preferences_are_compared_without_dropout(tokenizer, workspace, tmp_path, family, more):
    """As the reference is. Imitation keeps it."""
    model = model_of(family, n_positions=2048, max_position_embeddings=2048, **more)
    words = ["--trajectories", workspace / "offline.jsonl", "--num-trajectories", 36, "--max-steps", 1, "--model",
             folder_of(model, tokenizer, tmp_path / "model"), "--nll-coef", 0, "--out"]
    losses = {}
    for number, method in ((4, ["--method", "mtdpo"]), (3, []), (4, ["--method", "rft"])):
        out = tmp_path / "".join(["out", *method])
        call(number, *words, out, *method)
        losses[out.name] = read(out / "metrics.jsonl")[0]["loss"]
    assert losses.pop("out--methodrft") > 0
    assert list(losses.values()) == pytest.approx([math.log(2)] * 2, abs=1e-5)


def test_layers_are_computed_again_in_evaluation_mode_too(tree):
    gradients, num_passes = [], []
    for again in (False, True):
        action_model = ActionModel(model_of("llama"))
        shard(action_model, start(0), Sharding(activation_checkpointing=again)).eval()
        attention = action_model.model.model.layers[0].self_attn
        attention.register_forward_hook(lambda *_, again=again: num_passes.append(again))
        action_model(collate([tree])).pow(2).sum().backward()
        gradients.append([parameter.grad for parameter in action_model.parameters()])
    assert num_passes == [False, True, True] and all(map(torch.equal, *gradients))


def test_layers_that_are_computed_again_are_compiled(tree):
    action_model = ActionModel(model_of("qwen3, window"))
    shard(action_model, start(0), Sharding(activation_checkpointing=True)).eval()
    action_model.model.model.layers[0].compile(backend="eager")
    counters.clear()
    action_model(collate([tree])).sum().backward()
    assert counters["stats"]["calls_captured"] > 0 and not counters["graph_break"]


def test_what_is_longer_than_the_model_takes_is_one_line(tokenizer, tmp_path):
    """Of a tree it is the prompt with its longest action that counts."""
    model = model_of("gpt2")                                         # has 256 positions, and no others
    fitting = common.actions_item(tokenizer, PROMPT, [[33] * 150, [34] * 180, [60, 780]])
    assert len(fitting[0].ids) > 256
    logps = action_outputs(ActionModel(model), [fitting], 4096)
    assert logps[0].isfinite().all()
    tree = common.actions_item(tokenizer, PROMPT, [[33] * 240, [60, 780]])
    for long in (tree, without_trees(tree)):
        with pytest.raises(InputError, match=r"takes 256 tokens, and a prompt with its action has up to \d+ "):
            action_outputs(ActionModel(model), [long], 4096)


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0] * 4,
            "original_max_position_embeddings": 64}
NEIGHBOURS = {"phi3": {"rope_parameters": {"rope_theta": 1e4, **LONGROPE}, "original_max_position_embeddings": 64},
              "llama": {"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 4.0},
                        "max_position_embeddings": 64}}


@pytest.mark.parametrize("family", NEIGHBOURS)
@pytest.mark.parametrize("step", [1, 48])
def test_no_number_depends_on_how_long_its_neighbours_are(tokenizer, family, step, monkeypatch):
    """Rotary frequencies that change with the highest position of a pass: a row of 49 tokens beside a tree of 130, and
    both in other orders; in the engine a prompt beside longer ones. step: of padding, as on a GPU."""
    monkeypatch.setitem(WIDTH_STEP, "cpu", step)
    model, prompt = model_of(family, **NEIGHBOURS[family]), "<|user|>the price<|end|><|assistant|>"
    start = encode(tokenizer, prompt)
    row = [Sequence(start + [33] * (49 - len(start)), [-1] * len(start) + [0] * (49 - len(start)))]
    ids = torch.tensor([row[0].ids])
    with torch.no_grad():
        logps = torch.log_softmax(model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])
    expected = logps[len(start) - 1:].sum()
    tree = common.actions_item(tokenizer, prompt, [[40] * 30, [50] * 40, [60] * 55])
    action_model, alone = ActionModel(model), []
    for item in (row, tree):
        alone += action_outputs(action_model, [item], 4096)
    torch.testing.assert_close(alone[0][0], expected, atol=1e-3, rtol=0)
    found_reversed = action_outputs(action_model, [tree, row], 4096)
    for found in (action_outputs(action_model, [row, tree], 4096), found_reversed[::-1]):
        torch.testing.assert_close(torch.cat(found), torch.cat(alone), atol=1e-3, rtol=0)
    with pytest.raises(InputError, match="takes 64 tokens"):
        action_outputs(action_model, [row, [Sequence([33] * 65, [-1] + [0] * 64)]], 4096)
    prompts = [start, [33] * 40, [50] * 56]
    uniforms = torch.full((3, 8), .5)
    together = generate(model, prompts, uniforms, 1.0, [])
    assert together == sum((generate(model, [prompt], uniforms[:1], 1.0, []) for prompt in prompts), [])
    with pytest.raises(AssertionError):                             # Sampler says it in a line
        generate(model, [*prompts, [33] * 60], torch.full((4, 8), .5), 1.0, [])


def test_a_model_that_takes_fewer_tokens_than_its_files_say_is_said(tokenizer, tmp_path, capsys):
    folder = folder_of(model_of("phi3", **NEIGHBOURS["phi3"]), tokenizer, tmp_path)
    load_model(folder, "cpu")
    assert capsys.readouterr().out.count(f"{folder}: is limited to 64 tokens, not 256: ") == 1


@pytest.mark.parametrize("family, rope, most", [
    ("llama", {"rope_type": "default"}, 256),
    ("llama", {"rope_type": "dynamic", "factor": 4.0}, 256), ("llama", LONGROPE, 64),
    ("llama", {**LONGROPE, "long_factor": [1.0] * 4}, 256),          # never changes
    ("gemma3_text", {"full_attention": {"rope_theta": 1e4, **LONGROPE},
                     "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}}, 64),
    ("qwen2", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
    ("llama", FULL["llama"]["rope_parameters"], 256),                # Llama 3's files give the length after stretching
    ("mamba", {}, math.inf)])                                        # has no positions
def test_how_many_tokens_a_model_takes(family, rope, most):
    sizes = SIZES if family != "mamba" else {}
    config = AutoConfig.for_model(family, **sizes, rope_parameters={"rope_theta": 1e4, **rope})
    assert most_positions(config) == most


FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}


def quantised(folder, note):
    """Make the weights of a folder's layers float8, with a scale for each 16 x 16 of them. Returns what they stand for.
    note: what config.json says of it."""
    tensors, stands_for = {}, load_file(folder / "model.safetensors")
    for name, weight in stands_for.items():
        tensors[name] = weight
        if "_proj" in name:
            blocks = weight.reshape(len(weight) // 16, 16, -1, 16)
            scales = blocks.abs().amax((1, 3), keepdim=True) / 448                 # the largest number of this type
            small = (blocks / scales).to(torch.float8_e4m3fn)
            tensors[name] = small.reshape(weight.shape)
            tensors[f"{name}_scale_inv"] = scales[:, 0, :, 0].contiguous()
            stands_for[name] = (small.float() * scales).reshape(weight.shape)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **note}))
    return stands_for


def test_a_quantised_folder_is_the_numbers_that_it_stands_for(tokenizer, tmp_path, monkeypatch):
    """Also on a card that could compute with them; and what is saved says that it is not quantised."""
    folder_of(model_of("llama"), tokenizer, tmp_path / "base")
    stands_for = quantised(tmp_path / "base", {"quantization_config": FP8})
    monkeypatch.setattr("transformers.quantizers.quantizer_finegrained_fp8.FineGrainedFP8HfQuantizer."
                        "validate_environment", lambda *_, **__: None)
    model, _ = load_model(str(tmp_path / "base"), "cpu")
    save_model(tmp_path / "saved", load_split(tmp_path / "base").model, tokenizer)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    for name, tensor in stands_for.items():
        assert torch.equal(model.get_parameter(name), tensor) and torch.equal(saved[name], tensor)
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())


@pytest.mark.parametrize("note, message", [
    ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, r"quantised \(bitsandbytes\)"),
    ({"quantization_config": {"quant_method": "modelopt"}}, r"quantised \(modelopt\), .*; use the model before"),
    ({}, "its files hold model.layers.0.mlp.down_proj.weight_scale_inv, .* they would be ignored")])
def test_other_quantised_folders_are_refused(tokenizer, tmp_path, note, message):
    folder = folder_of(model_of("llama"), tokenizer, tmp_path)
    quantised(tmp_path, note)
    assert_refused(folder, message)


def test_parts_that_a_model_does_not_have_may_be_in_its_files(tokenizer, tmp_path):
    """Heads for several tokens, frequencies. A bias of a layer that has none is refused."""
    folder = folder_of(model_of("llama"), tokenizer, tmp_path)
    add_tensors(tmp_path, "mtp.layers.0.weight", "model.layers.2.self_attn.q_proj.weight",
                "model.layers.0.self_attn.rotary_emb.inv_freq")
    assert load_model(folder, "cpu")
    add_tensors(tmp_path, "model.layers.0.self_attn.q_proj.bias")
    assert_refused(folder, "its files hold model.layers.0.self_attn.q_proj.bias, which layers")


def shortened(name, length):
    return name, lambda path: path.write_bytes(path.read_bytes()[:length])


def broken_adapter(path):
    path.with_name("model.safetensors").unlink()
    config = {"base_model_name_or_path": str(BASE), "peft_type": "LORA", "r": "x", "target_modules": ["q_proj"]}
    path.write_text(json.dumps(config))
    save_file({"base_model.model.a": torch.zeros(1)}, path.with_name("adapter_model.safetensors"))


def template(text):
    return "chat_template.jinja", lambda path: path.write_text(text)


def critic_with(head, weights=None):
    def change(path):
        path.write_text(json.dumps(critic_note(head)))
        if weights:
            torch.save(weights, path.with_name("turn_head.pt"))
    return "critic.json", change


DAMAGES = {                     # {what: (a file, what is done to it)}
    "code of its own": ("config.json", lambda path: path.write_text('{"auto_map": {"AutoConfig": "code.Config"}}')),
    "half a config": shortened("config.json", 100), "half of the weights": shortened("model.safetensors", 1_000_000),
    "half a tokenizer": shortened("tokenizer.json", 20_000), "an adapter": ("adapter_config.json", broken_adapter),
    "no weights": ("model.safetensors", pathlib.Path.unlink),
    "no template": ("chat_template.jinja", pathlib.Path.unlink), "a template's syntax error": template("{% for %}"),
    "a template's own error": template("{{ raise_exception('No system\nprompt') }}"),
    "an unknown head": critic_with("unknown"), "no turn_head.pt": critic_with("regression"),
    "a head of another shape": critic_with("regression", {"weight": torch.zeros(1, 7), "bias": torch.zeros(1)})}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_one_line(tmp_path, name, monkeypatch):
    folder, (file, change), asked = shutil.copytree(BASE, tmp_path / "model"), DAMAGES[name], []
    monkeypatch.setattr("builtins.input", lambda *question: asked.append(question) or "n")
    change(folder / file)
    with pytest.raises(InputError) as error:
        if file == "critic.json":
            load_critic(folder)
        else:
            stop_ids(*load_model(str(folder), "cpu"))
    line = str(error.value)
    assert "\n" not in line and str(folder) in line and len(line) < 600 and asked == []
    assert ("its chat template fails" in line) == ("error" in name)
