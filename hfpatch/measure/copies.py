"""Copies of models and modules: with other tensors, or of the host's class without weights and without a patch."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..core.transaction import UNDO_RECORD
from ..runtime.lens import host_class
from ..runtime.record import KEY
from .quiet_forward import is_library_hook
from .randomness import keep_random_state


def unpatched_config(config: PreTrainedConfig) -> Any:
    """A copy of a config as one of its host's class, without the record of a patch."""
    plain = copy.deepcopy(config)
    vars(plain).pop(KEY, None)
    object.__setattr__(plain, "__class__", host_class(type(config)))
    return plain


def host_on_meta(model: PreTrainedModel, config: PreTrainedConfig) -> Any:
    """A model of a model's host class without weights, from a config that isn't copied; no random number is drawn."""
    host: Any = host_class(type(model))
    with torch.device("meta"), keep_random_state():
        return host(config)


def copy_with(module: nn.Module, tensor: Callable[[str, Tensor], Tensor], memo: Mapping[int, Any] | None = None) -> Any:
    """A deep copy of a module with other Parameters and buffers, shared where the originals are.

    Args:
        module: isn't changed.
        tensor: a Parameter's or buffer's name and itself -> what stands for it in the copy, itself where it is shared.
        memo: as in copy.deepcopy: the id of an object -> what stands for it.
    """
    known = dict(memo or {})
    for name, parameter in module.named_parameters():
        value = tensor(name, parameter)
        if value is not parameter:
            trains = parameter.requires_grad and not value.is_inference()  # torch 2.9 refuses both at once
            value = nn.Parameter(value, requires_grad=trains)
            vars(value).update(vars(parameter))
        known[id(parameter)] = value
    known |= {id(buffer): tensor(name, buffer) for name, buffer in module.named_buffers()}
    return copy.deepcopy(module, known)


def copy_of(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model that computes the same even after the model is patched: the reference of a repair.

    It shares the memory of all Parameters, and of buffers with several axes: a patch gives new values memory of their
    own.
    """
    memo: dict[int, Any] = {id(vars(model).get(UNDO_RECORD)): None}
    for module in model.modules():
        for name, hooks in vars(module).items():
            if name.endswith("_hooks") and isinstance(hooks, dict):  # a user's hook may hold what can't be copied
                memo[id(hooks)] = OrderedDict((key, hook) for key, hook in hooks.items() if is_library_hook(hook))

    def shared(_: str, tensor: Tensor) -> Tensor:
        # transformers' longrope and dynamic scaling write their frequencies in place
        return tensor.clone() if not isinstance(tensor, nn.Parameter) and tensor.dim() < 2 else tensor.detach()

    return copy_with(model, shared, memo).requires_grad_(False)
