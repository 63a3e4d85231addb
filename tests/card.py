"""A pretended card: runs stages as on a GPU, without one.

    python tests/card.py RUNS.json

Its tensors say that they are on the device "card:0", and their numbers lie in CPU tensors. So loss, gradients and
samples are what the CPU gives, the backward pass included. What a GPU refuses is refused: tensors of two devices in one
operation, but for copies and for indices from the CPU.

RUNS.json: [{"stage": 3, "argv": […], "log": FILE, "mutant": null or [FILE, old text, new text]}, …]. Each is a fork of
this process. Its log: {"error": null or the last line, "waits": {"FILE:FUNCTION what": times}}, where waits are all
operations that wait for the device. The card has no streams, so training states are not saved on it."""
import collections
import importlib
import json
import os
import pathlib
import sys
import traceback

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from processes import prepare_what_stages_need

ROOT = pathlib.Path(__file__).resolve().parents[1]
aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default}
TAKES_CPU_INDICES = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default,
                     aten._index_put_impl_.default}
SIZE_DEPENDS_ON_VALUES = {aten.nonzero.default, aten.masked_select.default, aten.repeat_interleave.Tensor,
                          aten.bincount.default, aten._unique2.default}
waits = collections.Counter()                   # of the operations that wait for the device


class OnCard(torch.Tensor):
    """A tensor on the pretended card. numbers: the CPU tensor that holds them."""

    @staticmethod
    def __new__(cls, numbers):
        return torch.Tensor._make_wrapper_subclass(
            cls, numbers.size(), strides=numbers.stride(), storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype, device=torch.device("card", 0), requires_grad=numbers.requires_grad)

    def __init__(self, numbers):
        self.numbers = numbers

    def __repr__(self, *, tensor_contents=None):
        return f"OnCard({self.numbers})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return compute(function, args, kwargs or {})

    def tolist(self):
        count("tolist")
        return self.numbers.tolist()

    def numpy(self, **options):
        raise TypeError("a tensor on a card has no numpy array; copy it to the CPU first")


class Card(TorchDispatchMode):
    """While it is on, a new tensor may be made on the card."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return compute(function, args, kwargs or {})


class FromNumbers(TorchFunctionMode):
    """What torch makes of lists where no dispatch mode sees it: torch.tensor(list, device=…), and lists as indices."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.tensor and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return torch.tensor(*args, **kwargs).to(device)
        if function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            tensor, index, *value = args
            args = (tensor, as_tensors(index, tensor.device), *value)
        return function(*args, **kwargs)


def as_tensors(index, device):
    """An index with tensors in the place of its lists."""
    if isinstance(index, list):
        return torch.tensor(index).to(device)
    if isinstance(index, tuple):
        return tuple(as_tensors(part, device) if isinstance(part, list) else part for part in index)
    return index


def count(what):
    """Note who waits for the device: the innermost function of this repository. A dict comprehension has a frame of its
    own before Python 3.12 alone."""
    frame = sys._getframe(1)
    while frame:
        path = pathlib.Path(frame.f_code.co_filename)
        function = frame.f_code.co_name
        is_ours = path.is_relative_to(ROOT) and path.name != "card.py" and ".venv" not in path.parts
        if is_ours and function != "<dictcomp>":
            waits[f"{path.relative_to(ROOT)}:{function} {what}"] += 1
            return
        frame = frame.f_back


def check_devices(function, args, tensors):
    """RuntimeError where a GPU would refuse these tensors. A CPU tensor of one number may go with those of a card."""
    on_card = [tensor for tensor in tensors if isinstance(tensor, OnCard)]
    on_cpu = [tensor for tensor in tensors if not isinstance(tensor, OnCard) and tensor.dim() > 0]
    if not on_card or function in COPIES:
        return
    is_mixed = bool(on_cpu)
    if function in TAKES_CPU_INDICES:
        values = [args[0], *args[2:3]]                               # what is indexed, and what is put there
        is_mixed = any(value.dim() > 0 and not isinstance(value, OnCard) for value in values)
    if is_mixed:
        raise RuntimeError(f"{function}: tensors of two devices, card:0 and cpu")


def compute(function, args, kwargs):
    """What an operation gives, on the device where a GPU would have it."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    check_devices(function, args, tensors)
    is_on_card = any(isinstance(tensor, OnCard) for tensor in tensors)
    if is_on_card:
        if function in SIZE_DEPENDS_ON_VALUES:
            count(function.overloadpacket.__name__)
        if function is aten._local_scalar_dense.default:
            count("item")
    if function is aten.copy_.default:
        if isinstance(args[1], OnCard) and not isinstance(args[0], OnCard):
            count("cpu")
        if isinstance(args[0], OnCard) and not isinstance(args[1], OnCard):
            count("to the device")
        is_on_card = isinstance(args[0], OnCard)
    if kwargs.get("device") is not None:
        goes_to_card = torch.device(kwargs["device"]).type == "card"
        if is_on_card and not goes_to_card and kwargs["device"].type == "cpu":
            count("cpu")
        if goes_to_card and not is_on_card and tensors:
            count("to the device")
        is_on_card = goes_to_card
    card_tensors = {id(tensor.numbers): tensor for tensor in tensors if isinstance(tensor, OnCard)}

    def without_card(value):
        if isinstance(value, OnCard):
            return value.numbers
        if isinstance(value, torch.device) and value.type == "card":
            return torch.device("cpu")
        return value

    def with_card(value):
        if not isinstance(value, torch.Tensor) or not is_on_card:
            return value
        if id(value) in card_tensors:
            return card_tensors[id(value)]
        return OnCard(value)

    result = function(*tree_map(without_card, args), **tree_map(without_card, kwargs))
    return tree_map(with_card, result)


def spoil(file, old, new):
    """Change a line of a module that is imported already."""
    path = ROOT / file
    source = path.read_text()
    assert source.count(old) == 1, (file, old, source.count(old))
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    exec(compile(source.replace(old, new), path, "exec"), vars(module))


def run(stage, argv, log, mutant):
    """Run a stage on the card, in this process."""
    from lib import runtime, training
    training.Checkpoints.save = lambda checkpoints, step: None
    start, result = runtime.start, {"error": None}
    module = importlib.import_module(next(ROOT.glob(f"{stage:02d}_*.py")).stem)
    if mutant:
        spoil(*mutant)
    for user in [module, *sys.modules.values()]:
        if getattr(user, "start", None) is start:
            user.start = lambda seed: start(seed)._replace(device=torch.device("card", 0))
    sys.argv = [str(ROOT / f"{module.__name__}.py"), *argv]
    try:
        with Card(), FromNumbers():
            module.main(argv)
    except BaseException as error:                                   # torch's own for checkpoints, a refused flag
        traceback.print_exc()
        result["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    pathlib.Path(log).write_text(json.dumps({**result, "waits": waits}))


def main():
    runs = json.loads(pathlib.Path(sys.argv[1]).read_text())
    _setup_privateuseone_for_python_backend("card")
    prepare_what_stages_need()                                        # once for all forks
    for options in runs:
        pid = os.fork()
        if pid == 0:
            run(**options)
            os._exit(0)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
