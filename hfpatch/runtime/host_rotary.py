"""Rotary modules of the host with other settings, or without rotation."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .lens import LENS, Arguments, host_class, lens_of, lensed_class
from .patch_errors import PositionError
from .rotary import LENGTH, ORIGINAL

ROPE_SETTINGS_PATH = "_hfpatch_rope_settings_at"  # attribute of a rebuilt rotation: path of its settings in the config


class HostRotary(nn.Module):
    """Rebuilds a host's rotary module from other settings; it is never a module of a model."""

    @classmethod
    def replacing(
        cls,
        old: nn.Module | None,
        parent: nn.Module,
        settings: dict[str, Any],
        at: tuple[str, ...] | None = (),
        layer_type: str | None = None,
        note: str = "",
        length: int | None = None,
    ) -> nn.Module:
        """Return another instance of the host's class with these settings, with the same device, dtype and mode.

        If this type of layers wasn't rotated, it is rotated again; other types stay as they are.

        Args:
            old, parent: the module, and what it stands in.
            settings: transformers' `rope_parameters`.
            at: the attributes of the model's config that lead to the part it reads; None if there is no such part.
            layer_type: the type of layer that the settings are for; None for all layers.
            note: text for reports.
            length: the new `max_position_embeddings`, which some scalings read; None if it doesn't change.
        """
        assert old is not None
        present = next(value for name, value in old._buffers.items() if name.endswith("inv_freq") and value is not None)
        new = with_settings(old, settings, layer_type, length, "meta" if present.is_meta else "cpu")
        if not present.is_meta:
            new.to(present.device, present.dtype)
        new.training = old.training
        new._parameters.update(old._parameters)
        for name, buffer in old._buffers.items():
            if name in new._buffers and name not in old._non_persistent_buffers_set and not name.endswith("inv_freq"):
                new._buffers[name] = buffer
        vars(new)[ROPE_SETTINGS_PATH] = at
        if note:
            vars(new)["hfpatch_note"] = note
        dropped = lens_of(old, Unrotated)
        if dropped is not None and set(dropped.layer_types) != {layer_type}:  # other types of layers stay unrotated
            vars(new)[LENS] = Unrotated(tuple(one for one in dropped.layer_types if one != layer_type))
            new.__class__ = lensed_class(host_class(type(new)))
        return new


def with_settings(
    rotary: nn.Module, settings: dict[str, Any], layer_type: str | None, length: int | None, device: str = "cpu"
) -> nn.Module:
    """Return a new rotary module of the host with other settings; None as `length` keeps the config's length."""
    config: Any = copy.deepcopy(rotary.config)
    for name, value in settings_in(config, settings, layer_type, length).items():
        setattr(config, name, value)
    with torch.device(device):
        return host_class(type(rotary))(config)


def settings_in(
    config: Any, settings: dict[str, Any], layer_type: str | None, length: int | None = None
) -> dict[str, Any]:
    """Return the rotation settings in a config, by the attributes where transformers looks for them."""
    settings = copy.deepcopy(settings)
    if not isinstance(getattr(config, "rope_parameters", None), dict):  # the host reads nothing but theta
        found = {"rope_theta": settings["rope_theta"]}
    elif layer_type is None:
        found = {"rope_parameters": settings}
    else:
        found = {"rope_parameters": {**config.rope_parameters, layer_type: settings}}
    if ORIGINAL in settings and getattr(config, ORIGINAL, None) is not None:
        found[ORIGINAL] = settings[ORIGINAL]  # which transformers prefers to the settings' own
    return found if length is None else found | {LENGTH: length}


@dataclass(frozen=True)
class Unrotated:
    """Lens on a rotary module that makes it return no rotation: cos 1 and sin 0 (or the complex number 1).

    Attributes:
        layer_types: the types of layers that aren't rotated; None stands for modules that don't tell types apart.
    """

    layer_types: tuple[str | None, ...]
    hfpatch_note: ClassVar[str] = "queries and keys aren't rotated"

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        return {}, {}

    def finish(self, output: Any, arguments: Arguments) -> Any:
        if None not in self.layer_types and arguments.get("layer_type") not in self.layer_types:
            return output
        if isinstance(output, Tensor) and output.is_complex():
            return torch.ones_like(output)
        if isinstance(output, tuple) and len(output) == 2 and all(isinstance(part, Tensor) for part in output):
            return torch.ones_like(output[0]), torch.zeros_like(output[1])
        raise PositionError(f"a rotary module returned {type(output).__name__}, not cos and sin.")
