"""Finds the rotary modules of models with built-in RoPE (Llama), and their settings.

transformers' rotary modules follow one convention: a module holds its config, reads `config.rope_parameters` and keeps
frequencies (`inv_freq`, or one buffer for each type of layer) from which its forward makes cos and sin.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ..runtime.host_rotary import ROPE_SETTINGS_PATH, Unrotated, with_settings
from ..runtime.lens import host_class, lens_of
from ..runtime.refuse_host import parts

Path = tuple[str, ...]
Settings = dict[str, Any]  # transformers' `rope_parameters`


@dataclass
class NativeRotation:
    """Frequencies of one rotary module, for one type of layer if it has several.

    Attributes:
        name: the module's name, and the type of layer if it has several.
        holder, attribute: the module that holds it, and its own name there.
        layer_type: the type of layer; None if all are alike.
        path: attributes that lead from the model's config to the config with its settings; None if none lead there.
    """

    name: str
    holder: nn.Module
    attribute: str
    layer_type: str | None
    path: Path | None

    @property
    def module_name(self) -> str:
        """The rotary module's name."""
        return self.name if self.layer_type is None else self.name.rpartition(".")[0]

    @property
    def module(self) -> nn.Module:
        """The rotary module."""
        found = self.holder._modules[self.attribute]
        assert found is not None
        return found

    @property
    def kind(self) -> str:
        """Name of the rotary module's class."""
        return host_class(type(self.module)).__name__

    @property
    def settings(self) -> Settings:
        """What its config says, as transformers' `rope_parameters`."""
        config: Any = self.module.config
        if self.reads_only_theta:
            return {"rope_theta": config.rope_theta, "rope_type": "default"}
        return config.rope_parameters if self.layer_type is None else config.rope_parameters[self.layer_type]

    @property
    def reads_only_theta(self) -> bool:
        """Whether the module reads nothing but `config.rope_theta`."""
        return not isinstance(getattr(self.module.config, "rope_parameters", None), dict)

    @property
    def dropped_layer_types(self) -> tuple[str | None, ...]:
        """The types of layers for which an earlier patch dropped the module's rotation."""
        lens = lens_of(self.module, Unrotated)
        return () if lens is None else lens.layer_types

    @property
    def is_dropped(self) -> bool:
        """Whether an earlier patch dropped this rotation."""
        return self.layer_type in self.dropped_layer_types

    def frequencies(self, module: nn.Module) -> Tensor:
        """Return this rotation's frequencies (pairs,) in a module of its class."""
        found = module._buffers["inv_freq" if self.layer_type is None else f"{self.layer_type}_inv_freq"]
        assert found is not None
        return found

    def scale(self, module: nn.Module) -> Any:
        """Return the factor on this rotation's cos and sin in a module of its class; None if it has none."""
        return getattr(module, f"{self.layer_type}_attention_scaling" if self.layer_type else "attention_scaling", None)

    def rebuilt(self, settings: Settings, length: int | None = None) -> nn.Module:
        """Return another rotary module of the host's class, on the CPU."""
        return with_settings(self.module, settings, self.layer_type, length)

    def phases(self, module: nn.Module) -> Any:
        """Return a rotary module's output for positions 0 and 1: (cos, sin), or complex numbers."""
        positions = torch.arange(2)[None]
        extra = {} if self.layer_type is None else {"layer_type": self.layer_type}
        return module(torch.zeros(1, 2, 1), positions, **extra)


def find_rotations(model: nn.Module) -> list[NativeRotation]:
    """Return every rotation of the model that follows transformers' convention."""
    found, paths, stored = [], config_paths(getattr(model, "config", None)), configs_of_parts(model)
    others = [one for one in model.modules() if not any(name.endswith("inv_freq") for name in one._buffers)]
    held = {id(one.__dict__.get("config")) for one in others}  # not those that a class makes for a rotation alone
    for holder_name, holder in model.named_modules():
        for attribute, module in holder._modules.items():
            config = module.__dict__.get("config") if module is not None else None
            parameters: Any = getattr(config, "rope_parameters", None)
            theta: Any = getattr(config, "rope_theta", None)
            if module is None or (not isinstance(parameters, dict) and not isinstance(theta, int | float)):
                continue
            name = f"{holder_name}.{attribute}".strip(".")
            source = stored.get(name) if id(config) in held else config
            path = module.__dict__.get(ROPE_SETTINGS_PATH, paths.get(id(source)))
            if "inv_freq" in module._buffers:
                found.append(NativeRotation(name, holder, attribute, None, path))
            for kind in parameters if isinstance(parameters, dict) else ():
                if f"{kind}_inv_freq" in module._buffers and isinstance(parameters[kind], dict):
                    found.append(NativeRotation(f"{name}.{kind}", holder, attribute, kind, path))
    return found


def configs_of_parts(model: nn.Module) -> dict[str, Any]:
    """Return for each module, by name, the config that it is built from when a checkpoint is opened.

    That is its own, where it is inside the model's. The parts of a model that was put together from others hold copies
    of those, and so do T5's stacks: they are built from the config of the same class that the module around them has,
    as are modules without one.
    """
    inside, found = config_paths(getattr(model, "config", None)), dict[str, Any]()
    for name, module in model.named_modules():
        around, own = found.get(name.rpartition(".")[0]), module.__dict__.get("config")
        if isinstance(own, PreTrainedConfig) and isinstance(around, PreTrainedConfig) and id(own) not in inside:
            kind = host_class(type(own))
            same = [one for one in (around, *vars(around).values()) if host_class(type(one)) is kind]
            own = same[0] if len(same) == 1 else own
        found[name] = around if own is None else own
    return found


def config_paths(config: Any) -> dict[int, Path]:
    """Return for a config and each one inside: its id, and the attributes that first lead to it."""
    inside = [*parts(config)] if isinstance(config, PreTrainedConfig) else []
    return {id(one): path for path, one in reversed(inside)}
