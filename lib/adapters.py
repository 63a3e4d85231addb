"""LoRA by the package peft: adapters in a model's layers, the model without them, adapter folders."""
import contextlib
import math
import os

import torch

from lib import folders
from lib.runtime import InputError, read_json

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."


def import_peft():
    try:
        import peft  # here, because it is optional and its import takes seconds
    except ImportError:
        raise InputError("LoRA adapters need peft: pip install peft") from None
    return peft


def is_adapter(name):
    """Whether a model's name is an adapter folder: one whose weights are those of another model and an adapter."""
    return os.path.exists(os.path.join(name, CONFIG)) and not os.path.exists(os.path.join(name, "config.json"))


def adapter_base(folder):
    """The name of the model that an adapter folder belongs to. InputError where it names none, or an adapter."""
    with base_errors(folder):
        base = read_json(os.path.join(folder, CONFIG), folders.ANY_OBJECT).get("base_model_name_or_path")
        if not isinstance(base, str) or not base:
            raise InputError("no name")
        if is_adapter(base):
            raise InputError("an adapter itself")
    return base


@contextlib.contextmanager
def base_errors(folder):
    """An InputError about the base model of an adapter folder says what to do."""
    try:
        yield
    except InputError as error:
        base = read_json(os.path.join(folder, CONFIG), folders.ANY_OBJECT).get("base_model_name_or_path")
        if str(error).startswith(f"{folder}: its base model"):       # said already
            raise
        raise InputError(f"{folder}: its base model {base} cannot be used ({error}); start from the folder where the "
                         f"adapter was trained, or write where the base is into {os.path.join(folder, CONFIG)} "
                         "(base_model_name_or_path)") from None


def check_base(folder, fingerprint):
    """InputError where an adapter's base has another `fingerprint` than when the adapter was trained; one that other
    programs made has none."""
    from safetensors import safe_open
    with folders.loading(folder), safe_open(os.path.join(folder, WEIGHTS), "pt") as file:
        known = (file.metadata() or {}).get("base_fingerprint")
    if None not in (known, fingerprint) and known != fingerprint:
        raise InputError(f"{folder}: its base model {adapter_base(folder)} has other weights than when the adapter was "
                         f"trained (fingerprint {known}, now {fingerprint}); put them back, or train it again")


def folder_config(folder):
    """The LoraConfig of a folder that 03 or 04 made; None: a whole model."""
    if not is_adapter(folder):
        return None
    peft = import_peft()
    with folders.loading(folder):
        return peft.LoraConfig.from_pretrained(folder)


def add_adapter(model, config, dtype=torch.float32):
    """Put a new adapter into a model, whose own parameters are frozen. InputError where one of the config's
    targets names no layer of the model, or the output projection or embeddings, which are computed elsewhere."""
    peft, wanted = import_peft(), config.target_modules
    try:
        peft.inject_adapter_in_model(config, model)
    except ValueError as error:
        raise InputError(f"--lora-targets {show(wanted)}: {' '.join(str(error).split())[:300]}") from None
    if config.target_parameters:                                    # what peft makes of all-linear in some families
        raise InputError(f"--lora-targets {show(wanted)}: would adapt experts, which are no linear layers; name those "
                         f"of its attention: --lora-targets {' '.join(linear_names(model, 'attn'))}")
    names = [name for name, _ in adapter_layers(model)]
    for target in [] if isinstance(wanted, str) else sorted(wanted):
        if not any(f".{name}".endswith(f".{target}") for name in names):
            raise InputError(f"--lora-targets {target}: names no linear layer of the model; it has "
                             f"{', '.join(linear_names(model))}")
    for module in (model.get_output_embeddings(), model.get_input_embeddings()):
        if hasattr(module, "base_layer"):
            raise InputError(f"--lora-targets {show(wanted)}: embeddings and the output projection cannot be adapted")
    for tensor in adapter_parameters(model).values():
        tensor.data = tensor.data.to(dtype)


def show(targets):
    return targets if isinstance(targets, str) else " ".join(sorted(targets))


def linear_names(model, part=""):
    """Last parts of the names of layers that an adapter can go into, of those whose names have this part."""
    return sorted({name.removesuffix(".base_layer").rpartition(".")[2] for name, module in model.named_modules()
                   if isinstance(module, torch.nn.Linear) and part in name and ".lora_" not in name
                   and module is not model.get_output_embeddings()})


def adapter_layers(model):
    """[(name, layer)] of a model's layers that have an adapter."""
    return [(name, module) for name, module in model.named_modules() if hasattr(module, "lora_A")]


def adapter_parameters(model):
    """{name: parameter} of a model's adapter; empty where it has none."""
    return {name: parameter for name, parameter in model.named_parameters() if ".lora_" in name}


def set_adapter(model, tensors):
    """Copy whole tensors, {name: tensor} as in adapter_parameters, into a model's adapter, split over ranks or not."""
    from torch.distributed.tensor import distribute_tensor, DTensor
    for name, parameter in adapter_parameters(model).items():
        whole = tensors[name].to(parameter.device, parameter.dtype)
        if isinstance(parameter, DTensor):
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.data.copy_(whole)


def start_adapter(model, seed):
    """A new adapter's first values, the same on any number of ranks: A by `seed`; B zero, so that it does nothing."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, parameter in adapter_parameters(model).items():
        tensors[name] = torch.zeros(parameter.shape)
        if ".lora_A." in name:
            torch.nn.init.kaiming_uniform_(tensors[name], a=math.sqrt(5), generator=generator)
    set_adapter(model, tensors)


def load_adapter(model, folder):
    """Read the weights of an adapter folder into a model that has such an adapter (add_adapter)."""
    from safetensors.torch import load_file
    with folders.loading(folder):
        set_adapter(model, {name.removeprefix(PREFIX).replace(".weight", ".default.weight"): tensor
                            for name, tensor in load_file(os.path.join(folder, WEIGHTS)).items()})


def stored_adapter(model):
    """{name in PEFT's files: parameter} of a model's adapter."""
    return {PREFIX + name.replace(".default.", "."): tensor for name, tensor in adapter_parameters(model).items()}


def adapter_delta(layer, whole):
    """What a layer's adapter adds to its weight, float32; `whole` makes a tensor of the ranks' shards of one."""
    a, b = (whole(getattr(layer, name)["default"].weight.detach()).float() for name in ("lora_A", "lora_B"))
    delta = layer.scaling["default"] * (b @ a)
    return delta.T if layer.fan_in_fan_out else delta               # GPT-2 keeps weights the other way round


@contextlib.contextmanager
def adapter_off(model):
    """The model computes as if it had no adapter; for passes without gradients."""
    needed = {parameter: parameter.requires_grad for parameter in adapter_parameters(model).values()}

    def turn(on):
        for _, layer in adapter_layers(model):
            layer.enable_adapters(on)
        for parameter, needs in needed.items():         # peft changes it; by it FSDP2's first pass, which may be one of
            parameter.requires_grad_(needs)             # the reference, settles the dtype of the gradients
    turn(False)
    try:
        yield
    finally:
        turn(True)


class WithoutAdapter:
    """A common.Scorer whose model has its adapter off: the reference of what was trained from it, in no memory of its
    own. Its passes count as the Scorer's."""

    def __init__(self, scorer):
        self.scorer = scorer


def without_adapter(scorer):
    """WithoutAdapter(scorer), or the Scorer itself where its model has no adapter."""
    return WithoutAdapter(scorer) if adapter_layers(scorer.model) else scorer
