"""Digest of a model's weights, over samples of them.

All weights are sampled: a digest over every number would read the whole file, which is only mapped when a checkpoint is
opened, and would cost more than all the rest of opening it.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

_WHOLE = 4096  # entries up to which a tensor is read in full: gains, shifts and biases are
_RUN = 64  # neighboring entries that are read at each place of a larger one
_APART, _FEWEST, _MOST = 2**18, 8, 64  # entries between places, and how many places there are


def sample(tensor: Tensor) -> Tensor:
    """Entries of a tensor, flat: all of a small one, else runs at evenly spaced places."""
    flat, n = tensor.detach().reshape(-1), tensor.numel()
    if n <= _WHOLE:
        return flat
    places = min(max(n // _APART, _FEWEST), _MOST)
    return flat.as_strided((places, _RUN), ((n - _RUN) // (places - 1), 1)).reshape(-1)


def digest(model: nn.Module, dtype: torch.dtype, sampled: dict[int, Tensor] | None = None) -> str:
    """A digest over samples of all tensors that a checkpoint stores, rounded to a dtype first.

    Rounding is exact arithmetic, so the digest is the same on every machine, and the same for weights that were rounded
    to that dtype before. Tensors come in the order of their names, shared ones under each of theirs.

    Args:
        sampled: samples that were taken already, by the id of their tensor; others join them. Reading a tensor may take
            longer than all else.

    Returns:
        Three parts: how many tensors there are, a digest of all, and one of those in lists of blocks.
    """
    everything, blocks = _samples(model, dtype, {} if sampled is None else sampled)
    return f"{len(everything)}-{_hash(everything)}-{_hash(blocks)}"


def same_weights(saved: str, model: nn.Module, dtype: torch.dtype, other_head: bool) -> bool:
    """Whether a model has the weights that a digest was taken of, as far as they can be compared.

    Args:
        saved: the digest of weights rounded to `dtype`.
        other_head: whether the models have different heads. What is around the blocks may then differ: some heads are
            put on a base without its pooling layer, or with a token for masked patches.
    """
    count, of_everything, of_blocks = saved.split("-")
    everything, blocks = _samples(model, dtype, {})
    if _hash(everything) == of_everything:
        return True
    return other_head and int(count) != len(everything) and _hash(blocks) == of_blocks


def _samples(model: nn.Module, dtype: torch.dtype, sampled: dict[int, Tensor]) -> tuple[list[Any], list[Any]]:
    """Samples as bytes: of all tensors that a checkpoint stores, and of those in lists of blocks."""
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
    everything, blocks = [], []
    for _, (tensor, inside) in sorted(found.items()):
        kept = tensor.dtype if tensor.is_complex() else dtype  # loading casts some integers too
        if id(tensor) not in sampled:
            sampled[id(tensor)] = sample(tensor)
        everything.append(as_bytes(sampled[id(tensor)].to(kept)))
        if inside:
            blocks.append(everything[-1])
    return everything, blocks


def as_bytes(flat: Tensor) -> Any:
    """A tensor's memory as an array of bytes, which numpy can read in every dtype."""
    return flat.cpu().view(torch.uint8).numpy()


def _hash(samples: list[Any]) -> str:
    return hashlib.blake2b(b"".join(samples), digest_size=8).hexdigest()


def has_adapters(model: nn.Module) -> bool:
    """Whether PEFT's layers stand in a model, whose weights are then saved under other names."""
    return getattr(model, "_hf_peft_config_loaded", False) or any(
        type(module).__module__.startswith("peft.") for module in model.modules()
    )
