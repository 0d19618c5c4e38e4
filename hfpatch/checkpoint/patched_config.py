"""Gives a model a patched copy of its config, with the patch record and the new lengths, and restores the original."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..core.transaction import Transaction
from ..planners.config_diff import Setting, config_at
from ..runtime.host_rotary import ROPE_SETTINGS_PATH
from ..runtime.lens import host_class
from ..runtime.record import KEY
from ..runtime.rotary import ORIGINAL
from ..schemes.learned import IMAGE_SIZE
from ..schemes.request import Record
from ..sites.rotations import configs_of_parts
from .patched_classes import registered_config_class

# settings that a forward changes in the model, not in its config: BigBird's, at the first short input
_SET_BY_FORWARDS = ("attention_type",)


def give_patched_config(
    model: PreTrainedModel, record: Record, transaction: Transaction, lengths: Iterable[Setting] = ()
) -> None:
    """Give a model a patched copy of its config; other models may share the old one.

    Every module that holds the config or a part of it gets the copy, in which settings that a forward changed are the
    model's. A config that a module holds in place of such a part is copied and changed likewise. A generation config
    that ended at an old length ends at the new length.

    Args:
        model: the model after its patch.
        record: the record of all its patches.
        transaction: the log.
        lengths: the new values that the patch gives the config.
    """
    copies: dict[int, Any] = {}
    config = copy.deepcopy(model.config, copies)
    object.__setattr__(config, "__class__", registered_config_class(host_class(type(config))))
    setattr(config, KEY, record.to_json())
    stored, held = configs_of_parts(model), defaultdict[int, list[Any]](list)
    for name, module in model.named_modules():
        own, part = vars(module).get("config"), id(stored[name])
        if not isinstance(own, PreTrainedConfig) or part not in copies or ROPE_SETTINGS_PATH in vars(module):
            continue
        held[part] += (copies[part], copy.deepcopy(own, copies))
        for setting in _SET_BY_FORWARDS if isinstance(module, PreTrainedModel) else ():
            for one in held[part][-2:] if setting in vars(module) and setting in vars(own) else ():
                setattr(one, setting, vars(module)[setting])
    for path, attribute, value in lengths:
        original = config_at(model.config, path)
        changed: Any = copies[id(original)]
        generation: Any = getattr(model, "generation_config", None)
        of_text = isinstance(value, int) and attribute not in (IMAGE_SIZE, ORIGINAL)
        if of_text and generation is not None and generation.max_length == getattr(changed, attribute):
            generation = copy.deepcopy(generation)
            generation.max_length = value
            transaction.set_attribute(model, "generation_config", generation)
        for one in (changed, *held[id(original)]):
            setattr(one, attribute, value)
    for module in model.modules():
        for name, value in list(module.__dict__.items()):
            if isinstance(value, PreTrainedConfig) and id(value) in copies:
                transaction.set_attribute(module, name, copies[id(value)])


def carry_over_config(model: nn.Module, patched: PreTrainedConfig, lengths: dict[str, Any]) -> None:
    """Copy a user's changes of the patched config to an unpatched model: a resized vocabulary, labels, ...

    They go into a copy of the original config, which other models may share.

    Args:
        model: with its original config.
        patched: the config that the model had while it was patched.
        lengths: the values that the patch itself put there, by name.
    """
    original: Any = model.config
    changed = {
        name: value
        for name, value in vars(patched).items()
        if name not in (KEY, *_SET_BY_FORWARDS)
        and not isinstance(value, PreTrainedConfig)
        and vars(original).get(name, KEY) != value
        and lengths.get(name, KEY) != value
    }
    config = original
    if changed:
        config = copy.copy(original)
        vars(config).update(changed)
    for module in model.modules():
        for name, value in vars(module).items():
            if value is patched or value is original:
                vars(module)[name] = config
