"""A model in little: a digest over samples of its weights, and its forward cut down to one block of each kind.

A whole forward reads every weight, and where a checkpoint's file is only mapped it costs more than all the rest of
opening it. Samples of all weights tell whether they are those that were saved; one block of each kind, with a narrow
output layer, tells whether the code around them computes the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_WHOLE = 4096  # entries up to which a tensor is read in full: gains, shifts and biases are
_RUN = 64  # neighboring entries that are read at each place of a larger one
_APART, _FEWEST, _MOST = 2**18, 8, 64  # entries between places, and how many places there are
_NARROW = 64  # rows of an output layer
_SCALARS = (bool, int, float, str, type(None))
_OURS = "_hfpatch_"  # start of the attributes that a patch sets; other private ones are torch's and transformers' own
_NUMBERING = ("idx", "index", "_id")  # endings of attributes that number blocks


def sample(tensor: Tensor) -> Tensor:
    """Entries of a tensor, flat: all of a small one, else runs at evenly spaced places."""
    flat = tensor.detach().reshape(-1)
    n = len(flat)
    if n <= _WHOLE:
        return flat
    places = min(max(n // _APART, _FEWEST), _MOST)
    return flat.as_strided((places, _RUN), ((n - _RUN) // (places - 1), 1)).reshape(-1)


def digest(model: nn.Module, dtype: torch.dtype) -> str:
    """A digest over samples of all Parameters and stored buffers, with floats rounded to a dtype first.

    Rounding is exact arithmetic, so the digest is the same on every machine, and the same for weights that were rounded
    to that dtype before.
    """
    hashed = hashlib.blake2b(digest_size=16)
    samples: dict[Any, list[Tensor]] = {}
    for tensor in _stored(model):
        samples.setdefault((tensor.dtype, tensor.device), []).append(sample(tensor))
    for (own, _), pieces in samples.items():
        hashed.update(bytes_of(torch.cat(pieces).to(dtype if own.is_floating_point else own)))
    return hashed.hexdigest()


def bytes_of(flat: Tensor) -> memoryview:
    """What a flat tensor holds, for a digest."""
    return flat.cpu().view(torch.uint8).numpy().data


def parameters_of(model: nn.Module) -> Iterator[nn.Parameter]:
    """All of them, shared ones as often as they are shared; faster than `model.parameters()`."""
    for module in model.modules():
        yield from (parameter for parameter in module._parameters.values() if parameter is not None)


def _stored(model: nn.Module) -> list[Tensor]:
    """All Parameters, and the buffers that a checkpoint stores; each once."""
    found: dict[int, Tensor] = {id(parameter): parameter for parameter in parameters_of(model)}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[id(buffer)] = buffer
    return list(found.values())


@contextmanager
def cut_down(model: Any) -> Iterator[None]:
    """One block of each kind in every list, and few rows of the output layer, while it is open."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    kept: list[tuple[nn.Module, str, Any]] = [(one, "_modules", one._modules) for one in lists]
    try:
        for one in lists:
            kinds: dict[Any, nn.Module] = {}
            for child in one:
                kinds.setdefault(_kind(child), child)
            one.__dict__["_modules"] = {str(i): child for i, child in enumerate(kinds.values())}
        if isinstance(head, nn.Linear) and len(head.weight) > _NARROW:
            kept.append((head, "_parameters", head._parameters))
            narrow = {name: None if value is None else _rows(value) for name, value in head._parameters.items()}
            head.__dict__["_parameters"] = narrow
        yield
    finally:
        for module, name, members in kept:
            module.__dict__[name] = members


def _rows(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach()[:_NARROW], requires_grad=False)


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """What blocks that run the same code have in common: classes, settings, and buffers that no checkpoint stores."""
    return tuple(_facts(name, module) for name, module in block.named_modules())


def _facts(name: str, module: nn.Module) -> tuple[Any, ...]:
    settings = tuple(
        (key, value)
        for key, value in module.__dict__.items()
        if (key[0] != "_" or key.startswith(_OURS)) and isinstance(value, _SCALARS) and not key.endswith(_NUMBERING)
    )
    computed = tuple(
        bytes(bytes_of(sample(buffer)))
        for key in sorted(module._non_persistent_buffers_set)
        if (buffer := module._buffers.get(key)) is not None
    )
    return name, type(module), settings, computed
