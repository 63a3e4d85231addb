"""Families of models (tiny, with random weights): log-probabilities, trees, samples and saved folders of each are those
of transformers, or there is one line."""
import math

import pytest
import torch

import common
from conftest import ROOT, trajectory, turns
from lib import models
from lib.models import load_model, load_tokenizer, lora_config, most_positions, save_model, Sharding, stop_ids
from lib.runtime import InputError, start
from server import generate

SIZES = {"vocab_size": 781, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 780, "initializer_range": 0.3}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
          "layer_types": ["linear_attention", "full_attention"]}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
WINDOW = {"sliding_window": 8}                                       # tokens, less than the prompt
HALVES = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
QWEN = {**HALVES, "use_sliding_window": True, "max_window_layers": 0}

FULL = {                                                            # every layer sees all tokens before it
    "llama": {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "rope_theta": 5e5,
                                  "high_freq_factor": 4.0, "original_max_position_embeddings": 32}},
    "qwen3_moe": EXPERTS, "gpt2": GPT2, "gpt_neox": {}, "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.3}, "nanochat": {"final_logit_softcapping": 3.0}}
WINDOWED = {                                                        # some layers, or all, see the last tokens alone
    "afmoe": {**HALVES, **EXPERTS}, "cohere2": HALVES, "cwm": HALVES, "exaone4": HALVES,
    "exaone_moe": {**HALVES, **EXPERTS}, "gemma2": {**WINDOW, "final_logit_softcapping": 3.0}, "gemma3_text": HALVES,
    "gemma4_text": {**HALVES, "vocab_size_per_layer_input": 781}, "gpt_oss": {**HALVES, **EXPERTS},
    "granite_swa": HALVES, "laguna": {**HALVES, **EXPERTS}, "mimo_v2_flash": {**HALVES, **EXPERTS},
    "ministral": WINDOW, "mistral": WINDOW, "mixtral": {**WINDOW, **EXPERTS}, "olmo3": HALVES, "phi3, window": WINDOW,
    "qwen2": QWEN, "qwen3, window": QWEN, "smollm3, window": {**QWEN, "no_rope_layers": [1, 0]}, "starcoder2": WINDOW,
    "vaultgemma": HALVES}
LIMITED = {                                                         # layers that take no masks, or no positions
    "qwen3_5_text": LINEAR, "bloom": {"n_layer": 2, "n_head": 4}, "mamba": {"state_size": 8}}
FAMILIES = {**FULL, **WINDOWED, **LIMITED}

PROMPT = "<|user|>Can you write a function that works out the price of a ticket for a visitor?<|end|><|assistant|>"
ACTIONS = [[33, 34, 780], [50, 51, 52, 53, 54, 780], [60, 780]]


def model_of(family):
    from transformers import AutoConfig, AutoModelForCausalLM
    sizes = {**SIZES, **FAMILIES[family]}
    if family == "mamba":
        sizes = {key: value for key, value in sizes.items() if "head" not in key}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.removesuffix(", window"), **sizes)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(ROOT / "models" / "tiny"))


def folder_of(model, tokenizer, path):
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def expected_logps(model, tokenizer):
    """Of each action after the prompt, by the model's own logits."""
    prompt, logps = common.encode(tokenizer, PROMPT), []
    for action in ACTIONS:
        ids = torch.tensor([prompt + action])
        token_logps = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, :-1], -1)
        logps.append(token_logps.gather(1, ids[0, 1:, None])[-len(action):].sum())
    return torch.stack(logps)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_and_samples_are_the_models_own(tokenizer, family):
    """In rows, padded, and in a tree; and so are the gradients."""
    model = model_of(family)
    if family in LIMITED:
        with pytest.raises(InputError, match=f"a {family} model, .* cannot be sampled from here; run it as a server"):
            generate(model, [[1, 2]], torch.zeros(1, 2), 0, [])
    else:
        ids = common.encode(tokenizer, PROMPT)
        prompts = [ids, ids[:7]]
        for prompt, ids in zip(prompts, generate(model, prompts, torch.full((2, 6), .5), 0, [780, 17])):
            expected = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=[780, 17])
            assert ids == expected[0, len(prompt):].tolist()
    expected = expected_logps(model, tokenizer)
    expected.pow(2).sum().backward()
    trained = [parameter for parameter in model.parameters() if parameter.grad is not None]        # not all biases
    gradients = [parameter.grad.clone() for parameter in trained]
    other = "<|user|>the fee<|end|><|assistant|>"                    # a second row: padding
    items = [common.actions_item(tokenizer, PROMPT, ACTIONS), common.actions_item(tokenizer, other, ACTIONS[:2])]
    scorer = common.Scorer(model)
    for takes_trees in {scorer.takes_trees, False}:
        scorer.takes_trees = takes_trees
        model.zero_grad()
        logps, [*_, missing] = scorer(scorer.collate(items, "cpu"))
        torch.testing.assert_close(logps, expected, atol=1e-4, rtol=0)
        assert missing == 0                                         # the second has two actions alone
        logps.pow(2).sum().backward()
        for parameter, gradient in zip(trained, gradients):
            torch.testing.assert_close(parameter.grad, gradient, atol=1e-3 * gradient.abs().max().item(), rtol=1e-3)


def test_all_families_whose_windows_are_known_are_here():
    """Another one, Llama 4's, takes no masks."""
    from transformers import AutoConfig, AutoModelForCausalLM
    assert sorted(models.WINDOWED) == sorted(family.removesuffix(", window") for family in WINDOWED)
    config = AutoConfig.for_model("llama4_text", **SIZES, attention_chunk_size=8, layer_types=["chunked_attention"] * 2)
    assert not models.takes_masks(AutoModelForCausalLM.from_config(config))


def test_a_family_whose_logits_are_not_known_is_refused(tokenizer, tmp_path):
    """HyperCLOVA X multiplies by what Granite, which has the same name for it, divides by."""
    from transformers import AutoConfig, AutoModelForCausalLM
    config = AutoConfig.for_model("hyperclovax", **SIZES, logits_scaling=4.0)
    folder = folder_of(AutoModelForCausalLM.from_config(config), tokenizer, tmp_path)
    for load in (lambda: load_model(folder, "cpu"), lambda: common.load_scorer(folder, start(0), Sharding())):
        with pytest.raises(InputError, match="a hyperclovax model makes logits of its last hidden states in a way"):
            load()


# --- chat templates

# In our own words, of families whose tokenizer's eos_token is not what ends a turn, or whose template takes no system
# message, ends a finished chat with one more token, or adds a date
GEMMA = ("{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
         "{{ raise_exception('Roles must alternate') }}{% endif %}<turn>"
         "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<eot>\n{% endfor %}"
         "{% if add_generation_prompt %}<turn>model\n{% endif %}")
MISTRAL = ("{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
           "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% if m.role == 'user' %}"
           "[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}")
PHI = ("{% for m in messages %}<turn>{{ m.role }}\n{{ m.content }}<eot>\n{% endfor %}{% if add_generation_prompt %}"
       "<turn>assistant\n{% else %}{{ eos_token }}{% endif %}")
DATED = ("{{ bos_token }}<turn>system\nToday: {{ strftime_now('%d %b %Y') }}<eot>{% for m in messages %}<turn>"
         "{{ m.role }}\n\n{{ m.content | trim }}<eot>{% endfor %}{% if add_generation_prompt %}<turn>assistant\n\n"
         "{% endif %}")
TRAJECTORY = {**trajectory("t", ""), "dialogue_history": turns("the fee", "What fee?", "12", "Thanks")}


@pytest.mark.parametrize("template", [GEMMA, MISTRAL, PHI, DATED])
def test_turns_that_are_rendered_again_end_as_in_the_template(template):
    tokenizer = load_tokenizer(str(ROOT / "models" / "tiny"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>", "<eot>"], "bos_token": "<s>",
                                  "eos_token": "<eos>"})
    tokenizer.chat_template = template
    end, other = tokenizer.convert_tokens_to_ids(["<eot>", "<eos>"] if template != MISTRAL else ["<eos>", "<eot>"])
    agent_turns = common.agent_turns(tokenizer, TRAJECTORY)
    [row] = common.rows_of_trajectory(tokenizer, agent_turns, TRAJECTORY["task"])
    for number, text in enumerate(["What fee?", "Thanks"]):
        ids = [token for token, action in zip(row.ids, row.turn_ids) if action == number]
        assert ids[-1] == end and other not in ids and tokenizer.decode(ids[:-1]).strip() == text
    system = common.our_system(TRAJECTORY)
    for prompt, _ in agent_turns:
        assert prompt.count(system) == 1
        if template in (GEMMA, MISTRAL):                            # which refuse a system message
            assert f"{system}\n\nthe fee" in prompt
    if template != PHI:
        assert common.encode(tokenizer, agent_turns[1][0]).count(tokenizer.bos_token_id) == 1
    model = model_of("llama")
    model.generation_config.eos_token_id = 17
    assert stop_ids(model, tokenizer) == sorted({17, tokenizer.eos_token_id, end})


# --- folders

@pytest.mark.parametrize("family, dtype", [("llama", "float32"), ("qwen3_moe", "float32"), ("gemma2", "bfloat16"),
                                           ("gpt2", "bfloat16")])
def test_what_is_saved_loads_again_as_it_was(tokenizer, tmp_path, family, dtype):
    """Weights, whether they are tied, and all ids that end a turn, which generation_config.json may have alone."""
    from transformers import AutoModelForCausalLM
    model = model_of(family)
    model.generation_config.eos_token_id = [780, 17]
    base = folder_of(model, tokenizer, tmp_path / "base")
    scorer = common.load_scorer(base, start(0), Sharding(dtype))
    save_model(tmp_path / "saved", scorer.model, tokenizer)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert saved.dtype == torch.float32 and saved.generation_config.eos_token_id == [780, 17]
    assert saved.config.tie_word_embeddings == model.config.tie_word_embeddings
    tensors = saved.state_dict()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in model.state_dict().items())


def test_an_adapter_of_transposed_weights_is_merged(tokenizer, tmp_path):
    folder = folder_of(model_of("gpt2"), tokenizer, tmp_path / "base")
    scorer = common.load_scorer(folder, start(0), Sharding(), lora_config(folder, 4, None, False)).eval()
    for name, parameter in scorer.named_parameters():
        if ".lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    batch = common.collate([common.actions_item(tokenizer, PROMPT, ACTIONS)])
    with torch.no_grad():
        expected = scorer(batch)
        for out, merge in (("adapter", False), ("whole", True)):
            save_model(tmp_path / out, scorer.model, tokenizer, merge)
            model, _ = load_model(str(tmp_path / out), "cpu")
            torch.testing.assert_close(common.Scorer(model)(batch), expected, atol=1e-3, rtol=0)


def test_an_adapter_of_experts_is_refused_before_training(tokenizer, tmp_path):
    folder = folder_of(model_of("qwen3_moe"), tokenizer, tmp_path)
    with pytest.raises(InputError, match="--lora: would adapt experts, .* q_proj v_proj"):
        lora_config(folder, 4, None, False)
    assert lora_config(folder, 4, ["q_proj", "v_proj"], False)


# --- how long a row may be

def test_what_is_longer_than_the_model_takes_is_one_line(tokenizer, tmp_path):
    """Of a tree it is the prompt with its longest action that counts."""
    model = model_of("gpt2")                                         # has 256 positions, and no others
    fitting = common.actions_item(tokenizer, PROMPT, [[33] * 150, [34] * 180, [60, 780]])
    assert len(fitting[0].ids) > 256
    logps = common.action_outputs(common.Scorer(model), [fitting], 4096, "cpu")
    assert logps[0].isfinite().all()
    tree = common.actions_item(tokenizer, PROMPT, [[33] * 240, [60, 780]])
    for long in (tree, common.without_trees(tree)):
        with pytest.raises(InputError, match=r"takes 256 tokens, and a prompt with its action has up to \d+ "):
            common.action_outputs(common.Scorer(model), [long], 4096, "cpu")


@pytest.mark.parametrize("family, rope, most", [
    ("llama", {"rope_type": "default"}, 256),
    ("qwen2", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
    ("llama", FULL["llama"]["rope_parameters"], 256),                # Llama 3's files give the length after stretching
    ("mamba", {}, math.inf)])                                        # has no positions
def test_how_many_tokens_a_model_takes(family, rope, most):
    from transformers import AutoConfig
    sizes = SIZES if family != "mamba" else {}
    config = AutoConfig.for_model(family, **sizes, rope_parameters={"rope_theta": 1e4, **rope})
    assert most_positions(config) == most
