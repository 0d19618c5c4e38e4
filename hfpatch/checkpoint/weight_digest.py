"""Excerpts of a model: a digest over samples of its weights, and sums over the outputs of a small forward.

A whole forward reads every weight, and where a checkpoint's file is only mapped it costs more than all the rest of
opening it. Samples of all weights tell whether they are those that were saved; a forward through one block of each kind
and a narrow output layer tells whether the code around them computes the same.

An output x of n entries becomes nine numbers: its root mean square, and for k = 0..7 the sum of w_i x_i over the
entries i = k (mod 8), divided by the root of n / 8, with weights w_i of unit variance, a fixed function of i. If the
entries of x are off by independent relative errors e, the sums are off by about e times the root mean square.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from ..runtime.errors import UnsupportedError

SUMS = 8
_WHOLE = 4096  # entries up to which a tensor is read in full: gains, shifts and biases are
_RUN = 64  # neighboring entries that are read at each place of a larger one
_APART, _FEWEST, _MOST = 2**18, 8, 64  # entries between places, and how many places there are
_NARROW = 64  # rows of an output layer
_OURS = "_hfpatch_"  # start of the attributes that a patch sets; other private ones are torch's and transformers' own
_NUMBERING = ("idx", "index", "_id")  # endings of attributes that number blocks
_MASKED = 6e4  # what is larger stands for minus infinity in one dtype or another
_MOST_OUTPUTS = 16

Sums = dict[str, tuple[float, ...]]  # by the path of an output


def sample(tensor: Tensor) -> Tensor:
    """Entries of a tensor, flat: all of a small one, else runs at evenly spaced places."""
    flat = tensor.detach().reshape(-1)
    n = len(flat)
    if n <= _WHOLE:
        return flat
    places = min(max(n // _APART, _FEWEST), _MOST)
    return flat.as_strided((places, _RUN), ((n - _RUN) // (places - 1), 1)).reshape(-1)


def digest(model: nn.Module, dtype: torch.dtype) -> str:
    """A digest over samples of all tensors that a checkpoint stores, rounded to a dtype first.

    Rounding is exact arithmetic, so the digest is the same on every machine, and the same for weights that were rounded
    to that dtype before. Tensors come in the order of their names, shared ones under each of theirs.

    Returns:
        Three parts: how many tensors there are, a digest of all, and one of those in lists of blocks.
    """
    unsaved = getattr(model, "_keys_to_ignore_on_save", None) or ()
    lists: list[str] = []
    found: dict[str, tuple[Tensor, bool]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        inside = any(path.startswith(start) for start in lists)
        if isinstance(module, nn.ModuleList) and not inside:
            lists.append(f"{path}.")
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            key = f"{path}.{name}" if path else name
            if tensor is not None and name not in module._non_persistent_buffers_set and key not in unsaved:
                found[key] = tensor, inside
    everything, blocks = (hashlib.blake2b(digest_size=8) for _ in range(2))
    for _, (tensor, inside) in sorted(found.items()):
        rounded = sample(tensor).to(tensor.dtype if tensor.is_complex() else dtype)  # loading casts some integers too
        values = _bytes(rounded)
        everything.update(values)
        if inside:
            blocks.update(values)
    return f"{len(found)}-{everything.hexdigest()}-{blocks.hexdigest()}"


def same_weights(saved: str, found: str, other_head: bool) -> bool:
    """Whether two digests are of the same weights, as far as they can be compared.

    Args:
        other_head: whether the models have different heads. What is around the blocks may then differ: some heads are
            put on a base without its pooling layer, or with a token for masked patches.
    """
    (count, everything, blocks), (other_count, *others) = saved.split("-"), found.split("-")
    return [everything, blocks] == others or (other_head and count != other_count and blocks == others[1])


def _bytes(flat: Tensor) -> bytes:
    return flat.cpu().view(torch.uint8).numpy().tobytes()


@contextmanager
def cut_down(model: Any, whole: bool = False) -> Iterator[None]:
    """One block of each kind in every list, and few rows of the output layer, while it is open.

    Afterwards everything is put back, also what a forward changes for good: BigBird gives up its sparse attention at
    the first short input.

    Args:
        model: to be run inside.
        whole: leave it as it is, and put back what a forward changes all the same.
    """
    modules = list(model.modules())
    states = [module.__dict__ for module in modules]
    states += [state[name] for state in states for name in ("_modules", "_parameters", "_buffers")]
    before = [(state, dict(state)) for state in states]
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    try:
        for one in () if whole else modules:
            if isinstance(one, nn.ModuleList) and len(one) > 1:
                kinds: dict[Any, nn.Module] = {}
                for child in one:
                    kinds.setdefault(_kind(child), child)
                one.__dict__["_modules"] = {str(i): child for i, child in enumerate(kinds.values())}
        if isinstance(head, nn.Linear) and len(head.weight) > _NARROW and not whole:
            head.__dict__["_parameters"] = {name: _rows(value) for name, value in head._parameters.items()}
        yield
    finally:
        for state, content in before:
            state.clear()
            state.update(content)


def _rows(parameter: nn.Parameter | None) -> nn.Parameter | None:
    return None if parameter is None else nn.Parameter(parameter.detach()[:_NARROW], requires_grad=False)


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """What blocks that run the same code have in common: classes, settings, and buffers that no checkpoint stores."""
    return tuple((name, type(module), *_settings(module)) for name, module in block.named_modules())


def _settings(module: nn.Module) -> Iterator[Any]:
    for key, value in module.__dict__.items():
        public = (key[0] != "_" or key.startswith(_OURS)) and not key.endswith(_NUMBERING)
        if public and isinstance(value, bool | int | float | str | None):
            yield key, value
    for key in sorted(module._non_persistent_buffers_set):
        if (buffer := module._buffers.get(key)) is not None:
            yield _bytes(sample(buffer))


def run(model: nn.Module, inputs: Mapping[str, Tensor], whole: bool, noise: float = 0.0, seed: int = 0) -> Sums:
    """The sums over each output of a forward of the model cut down, which leaves no trace.

    Args:
        whole: run all of it.
        noise: the output of every module with Parameters is multiplied by 1 + noise * u, u uniform in (-1, 1).

    Raises:
        UnsupportedError: random numbers are drawn for the outputs.
    """
    from ..measure.outputs import outputs_of, shake  # opening a checkpoint without a check needs nothing that measures
    from ..measure.quiet_forward import device_of, fitting, quiet

    device = device_of(model)
    with quiet(model), cut_down(model, whole), _full_precision(device):  # whether a block trains is no kind of its own
        if noise:
            shake(model, noise, seed)
        before = _random_states(device)
        found = outputs_of(model, fitting(model, inputs))
        if not noise and before != _random_states(device):
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
    on_gpu = torch.cuda.get_rng_state(device).tolist() if device.type == "cuda" else None
    name, words, *rest = tuple[Any, ...](numpy.random.get_state())
    return torch.get_rng_state().tolist(), on_gpu, random.getstate(), name, words.tolist(), rest


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
    shared = [
        (x, y, max(a[path][0], 1e-30)) for path in a.keys() & b.keys() for x, y in zip(a[path], b[path], strict=True)
    ]
    return max(abs(x - y) / size for x, y, size in shared)
