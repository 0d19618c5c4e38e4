"""Sums over the outputs of a small forward: through one block of each kind and a narrow output layer.

A whole forward reads every weight, and where a checkpoint's file is only mapped it costs more than all the rest of
opening it. Samples tell whether the weights are those that were saved (weight_digest.py); a forward through one block
of each kind tells whether the code around them computes the same.

An output x of n entries becomes nine numbers: its root mean square, and for k = 0..7 the sum of w_i x_i over the
entries i = k (mod 8), divided by the root of n / 8, with weights w_i of unit variance, a fixed function of i. If the
entries of x are off by independent relative errors e, the sums are off by about e times the root mean square.

What runs is a copy of the model's modules over the same tensors: another thread may run the model meanwhile.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from ..runtime.errors import UnsupportedError
from .weight_digest import as_bytes, sample

SUMS = 8
_NARROW = 64  # rows of an output layer
_OURS = "_hfpatch_"  # start of the attributes that a patch sets; other private ones are torch's and transformers' own
_NUMBERING = ("idx", "index", "_id")  # endings of attributes that number blocks
_SETTINGS = (bool, int, float, str, type(None))
_MASKED = 6e4  # what is larger stands for minus infinity in one dtype or another
_MOST_OUTPUTS = 16
_COLLECTIONS = (dict, OrderedDict, list, set)
# tables of hooks that no forward reads or writes, in every module
_UNREAD = {name for name in vars(nn.Module()) if name.endswith("_hooks") and "forward" not in name}
_PLAIN = {*_SETTINGS, Tensor, nn.Parameter, torch.dtype, torch.device}  # types of what a copy shares; looked up first

Sums = dict[str, tuple[float, ...]]  # by the path of an output


@contextmanager
def cut_down(model: Any) -> Iterator[Any]:
    """A copy of a model with one block of each kind in every list and few rows of the output layer, over its tensors.

    A list keeps its length, since some models read it by number, together with another list, or for the outputs of all
    its blocks: those after the first of their kind get its children, and pass on their input (`_Kind`).

    The model isn't written to, whatever a forward changes for good (BigBird gives up its sparse attention at the first
    short input). At the end the copy is emptied, so that it holds no weights until the garbage collector comes.
    """
    copies = _Copies()
    try:
        small = copies(model)
        for module in small.modules():  # lazily: children that blocks share are walked once
            kinds: dict[Any, _Kind] = {}
            for block in module if isinstance(module, nn.ModuleList) else ():
                kind = kinds.setdefault(_kind(block), _Kind(block))
                if kind.first is not block and not isinstance(block, nn.ModuleList):
                    block.__dict__.update(_modules=kind.first._modules, forward=partial(kind.pass_on, block.forward))
                    kind.first.__dict__["forward"] = kind.run
        head = small.get_output_embeddings() if hasattr(small, "get_output_embeddings") else None
        if isinstance(head, nn.Linear) and len(head.weight) > _NARROW:
            rows = len(head.weight)
            for holder in (head, small):  # some models add a bias of theirs to the output
                for tensors in ("_parameters", "_buffers"):
                    narrow = {name: _narrow(value, rows) for name, value in holder.__dict__[tensors].items()}
                    holder.__dict__[tensors] = narrow
        yield small
    finally:
        copies.empty()


class _Copies:
    """Copies of modules, which share their tensors, and of what leads to these modules.

    A module's attributes are copied where they are plain collections. Inside them, a collection, bound method or
    partial is copied if there is a module in it: a forward that accelerate puts in the place of a module's own then
    runs the copy. All else is shared.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[Any, Any]] = {}  # by id an original, which keeps its id so, and its copy

    def __call__(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if id(value) in self._found:
            return self._found[id(value)][1]
        if isinstance(value, nn.Module):
            return self._module(value)
        if kind in _COLLECTIONS:
            return self._collection(value)
        if kind is tuple:
            return self._made(value, lambda *parts: parts, value)
        if kind is MethodType:
            return self._made(value, MethodType, (value.__func__, value.__self__))
        if kind is partial:
            return self._made(value, _bound, (value.func, value.args, value.keywords))
        return value

    def empty(self) -> None:
        for original, copied in self._found.values():
            if isinstance(copied, nn.Module) and copied is not original:
                copied.__dict__.clear()
        self._found.clear()

    def _keep(self, original: Any, copied: Any) -> Any:
        self._found[id(original)] = original, copied
        return copied

    def _module(self, module: nn.Module) -> nn.Module:
        if isinstance(module, torch.jit.ScriptModule):  # its state isn't Python's
            return module
        new: nn.Module = self._keep(module, object.__new__(type(module)))
        state = dict(module.__dict__)  # at once: another thread's forward may add to it
        state.pop("_compiled_call_impl", None)
        # a user's own, which no checkpoint stores; with accelerate's autocast around the forward, `quiet` takes it off
        if not isinstance(state.get("forward"), MethodType | partial) and "_original_forward" not in state:
            state.pop("forward", None)
        tables = {name: dict(state[name]) for name in ("_modules", "_parameters", "_buffers")}
        tables["_modules"] = {name: self(child) for name, child in tables["_modules"].items()}
        for name, value in state.items():
            if name in tables or type(value) in _PLAIN or (name in _UNREAD and not value):
                continue
            state[name] = copied = self(value)
            if copied is value and type(value) in _COLLECTIONS:
                state[name] = self._keep(value, value.copy())
        new.__dict__.update({**state, **tables})
        return new

    def _collection(self, value: Any) -> Any:
        if not value:
            return value
        new = self._keep(value, value.copy())
        items = list(new.values() if isinstance(new, dict) else new)
        copied = [self(item) for item in items]
        if all(one is item for one, item in zip(copied, items, strict=True)):
            return self._keep(value, value)
        if isinstance(new, dict):
            new.update(zip(list(new), copied, strict=True))
        else:
            new.clear()
            (new.extend if isinstance(new, list) else new.update)(copied)
        return new

    def _made(self, value: Any, make: Callable[..., Any], parts: tuple[Any, ...]) -> Any:
        """What is made of the parts' copies; the value itself where none of them is another."""
        copied = [self(part) for part in parts]
        changed = any(one is not part for one, part in zip(copied, parts, strict=True))
        return self._keep(value, make(*copied) if changed else value)


def _bound(function: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> Callable[..., Any]:
    return partial(function, *args, **keywords)


class _Kind:
    """Blocks that run the same code: the first one runs, the others return their input in the form of its output.

    Where the first returns something of another shape than its input, all run, with the children of the first.
    """

    def __init__(self, first: nn.Module) -> None:
        self.first, self.forward = first, first.forward
        self.output: Any = None  # of the first, if it has its input's shape

    def run(self, *args: Any, **kwargs: Any) -> Any:
        output = self.forward(*args, **kwargs)
        returned = output[0] if isinstance(output, tuple | list) and output else output
        shape = getattr(_first_argument(args, kwargs), "shape", None)
        keeps_shape = isinstance(returned, Tensor) and returned.shape == shape
        self.output = output if keeps_shape else None
        return output

    def pass_on(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.output is None:
            return forward(*args, **kwargs)
        argument = _first_argument(args, kwargs)
        return argument if isinstance(self.output, Tensor) else (argument, *self.output[1:])


def _first_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a block changes: its first argument."""
    return next(iter((*args, *kwargs.values())), None)


def _narrow(tensor: Any, rows: int) -> Any:
    """A Parameter or buffer with the first few of an output layer's rows; as it is where it has no axis of them."""
    if tensor is None or rows not in tensor.shape:
        return tensor
    part = tensor.detach().narrow(tensor.shape.index(rows), 0, _NARROW)
    return nn.Parameter(part, requires_grad=False) if isinstance(tensor, nn.Parameter) else part


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """What blocks that run the same code have in common: classes, settings, and buffers that no checkpoint stores."""
    return tuple((name, type(module), *_settings(module)) for name, module in block.named_modules())


def _settings(module: nn.Module) -> Iterator[Any]:
    for key, value in module.__dict__.items():
        public = (key[0] != "_" or key.startswith(_OURS)) and key != "training"
        listed = value if isinstance(value, tuple) else (value,)  # such as a convolution's strides
        if public and not key.endswith(_NUMBERING) and all(isinstance(one, _SETTINGS) for one in listed):
            yield key, value
    for key in sorted(module._non_persistent_buffers_set):
        if (buffer := module._buffers.get(key)) is not None:
            yield as_bytes(sample(buffer)).tobytes()


def run(model: nn.Module, inputs: Mapping[str, Tensor], noise: float = 0.0, seed: int = 0) -> Sums:
    """The sums over each output of a forward of the model cut down, which leaves no trace in the model.

    Args:
        noise, seed: as in `shaken`.

    Raises:
        UnsupportedError: random numbers are drawn for the outputs.
    """
    from ..measure.outputs import outputs_of, shaken  # opening a checkpoint without a check needs nothing that measures
    from ..measure.quiet_forward import device_of, fitting

    with cut_down(model) as small, shaken(small, noise, seed), _full_precision(device := device_of(small)):
        before = _random_states(device)
        found = outputs_of(small, fitting(small, inputs))
        if not noise and before != _random_states(device):  # also where a first forward exchanges modules for good
            before = _random_states(device)
            found = outputs_of(small, fitting(small, inputs))
            if before != _random_states(device):
                raise UnsupportedError("its outputs depend on random numbers.")
    return {path: _sums(x) for path, x in list(found.items())[:_MOST_OUTPUTS] if x.numel() and path != "loss"}


@contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """No TF32 on a GPU, whatever is set."""
    backends: Any = torch.backends
    settings = [backends.cuda.matmul, backends.cudnn.conv] if device.type == "cuda" else []
    before = [one.fp32_precision for one in settings]
    try:
        for one in settings:
            one.fp32_precision = "ieee"
        yield
    finally:
        for one, value in zip(settings, before, strict=True):
            one.fp32_precision = value


def _random_states(device: torch.device) -> Any:
    on_gpu = torch.cuda.get_rng_state(device).numpy().tobytes() if device.type == "cuda" else None
    name, words, *rest = tuple[Any, ...](numpy.random.get_state())
    return torch.get_rng_state().numpy().tobytes(), on_gpu, random.getstate(), name, words.tobytes(), rest


def _sums(x: Tensor) -> tuple[float, ...]:
    flat = x.detach().cpu().double().flatten()
    flat[flat.abs() > _MASKED] = 0.0  # no NaN is
    weighted = nn.functional.pad(flat * texture(len(flat)), (0, -len(flat) % SUMS)).view(-1, SUMS).sum(0)
    values = (flat.square().mean().sqrt(), *(weighted / (len(flat) / SUMS) ** 0.5))
    return tuple(float(f"{float(value):.9g}") for value in values)


def texture(*shape: int) -> Tensor:
    """Numbers of mean 0 and variance 1, a fixed function of their place: (golden * i) mod 1, shifted and scaled.

    IEEE arithmetic alone makes them, so that they are the same on every machine.
    """
    i = torch.arange(1, 1 + math.prod(shape), dtype=torch.float64)
    return (12**0.5 * ((i * ((5**0.5 - 1) / 2)).frac() - 0.5)).view(shape)


def is_finite(sums: Sums) -> bool:
    """Whether there are sums, and all are finite numbers."""
    return bool(sums) and all(math.isfinite(value) for values in sums.values() for value in values)


def deviation(a: Sums, b: Sums) -> float:
    """How far the sums of outputs that both have are apart, by the root mean square in `a`."""
    if next(iter(a)) not in b or not is_finite(a) or not is_finite(b):
        return math.inf
    shared = a.keys() & b.keys()
    return max(abs(x - y) / max(a[path][0], 1e-30) for path in shared for x, y in zip(a[path], b[path], strict=True))
