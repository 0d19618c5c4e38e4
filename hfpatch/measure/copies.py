"""Copies of models and modules that may be changed and run without changing the original."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ..core.transaction import UNDO_STATE
from ..runtime.lens import host_class
from ..runtime.record import KEY
from .randomness import keep_random_state
from .shrink import shallow, shrink

_SIZES = {"shallow": shallow, "small": shrink}


def unpatched_config(config: PreTrainedConfig) -> Any:
    """Return a copy of a config in the host's class, without the patch record."""
    plain = copy.deepcopy(config)
    vars(plain).pop(KEY, None)
    object.__setattr__(plain, "__class__", host_class(type(config)))
    return plain


def copy_of(
    module: Any,
    *,
    size: Literal["same", "shallow", "small"] = "same",
    config: PreTrainedConfig | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    share: bool = False,
) -> Any:
    """Return a copy of a model or module in eval mode, whose Parameters require no gradients.

    The copy has the original's own hooks, and Parameters tied in the original are tied in it. The random state is kept.

    Args:
        module: isn't changed. It may be on "meta": tensors without values are left uninitialised on another device.
        size: "same" copies values. "shallow" (few layers, of each kind) and "small" (also narrow) build the class anew
            from its config, with the class's initial values.
        config: builds the class anew from this config, which isn't copied; the host's class unless it has the record of
            a patch.
        dtype: dtype of floating-point Parameters and buffers; rotary frequencies stay in float32 at least, as they do
            when transformers loads half precision. None keeps each tensor's dtype.
        device: None keeps each tensor's device; on "meta" the copy takes neither memory nor time.
        share: Parameters, and buffers of several axes, lie in the original's memory, if dtype and device are the same.
            Code that gives the original new values (as patches do) doesn't change the copy; code that writes into its
            memory does. transformers' scaled rotations write their frequencies in place, so those are always copied.

    Examples:
        >>> from torch import nn
        >>> layer = nn.Linear(2, 3)
        >>> copy_of(layer, share=True).weight.data_ptr() == layer.weight.data_ptr()
        True
        >>> copy_of(layer, dtype=torch.float64, device="meta").weight.device
        device(type='meta')
    """
    place = None if device is None else torch.device(device)
    if size == "same" and config is None:
        copied = _deep_copy(module, dtype, place, share)
    else:
        new: Any = _SIZES[size](module.config) if config is None else config
        kind: Any = type(module) if KEY in vars(new) else host_class(type(module))
        with keep_random_state(), place or torch.device("cpu"):
            copied = kind(new)
        copied = copied if dtype is None else copied.to(dtype)
    if dtype == torch.float64 and hasattr(copied, "set_experts_implementation"):
        copied.set_experts_implementation("eager")  # grouped matrix products of experts take no float64
    return copied.eval().requires_grad_(False)


def _deep_copy(module: nn.Module, dtype: torch.dtype | None, device: torch.device | None, share: bool) -> Any:
    known: dict[int, Any] = {id(vars(module).get(UNDO_STATE)): None}  # id of an object -> its replacement in the copy
    for part in module.modules():
        for name, hooks in vars(part).items():
            if name.endswith("_hooks") and isinstance(hooks, dict):  # a hook may hold objects that can't be copied
                known[id(hooks)] = OrderedDict(hooks)
    for name, parameter in module.named_parameters():
        value = _convert(name, parameter, dtype, device, share)
        copied = copy.deepcopy(parameter) if value is None else nn.Parameter(value, requires_grad=False)
        vars(copied).update(vars(parameter))
        known[id(parameter)] = copied
    for name, buffer in module.named_buffers():
        value = _convert(name, buffer, dtype, device, share and buffer.dim() > 1)
        known[id(buffer)] = buffer.detach().clone() if value is None else value
    return copy.deepcopy(module, known)


def _convert(
    name: str, tensor: Tensor, dtype: torch.dtype | None, device: torch.device | None, share: bool
) -> Tensor | None:
    """The replacement of a tensor in a copy; None if deepcopy's own copy will do."""
    place, target = device or tensor.device, dtype or tensor.dtype
    is_kept = name.endswith("inv_freq") and target.is_floating_point and torch.finfo(target).bits < 32
    if is_kept or not tensor.is_floating_point():
        target = tensor.dtype
    if (place, target) == (tensor.device, tensor.dtype):
        return tensor.detach() if share else None
    if place.type == "meta" or tensor.is_meta:
        return torch.empty(tensor.shape, dtype=target, device=place)
    # first device, then dtype, since a device may lack the dtype; a torch mode may leave the dtype as it is
    return tensor.detach().to(place).to(target, copy=place == tensor.device)
