"""Models that rotate by themselves: run, compared to the bit, and built by transformers with other settings."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PretrainedConfig

from hfpatch.measure.randomness import seed_deterministically
from hfpatch.schemes.rope import SCALING_OPTIONS


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def by_config(config: PretrainedConfig, settings: dict[str, Any]) -> PretrainedConfig:
    """A copy of a config with these settings in each of its parts that says how to rotate."""
    config = copy.deepcopy(config)

    def change(part: Any) -> None:
        parameters = getattr(part, "rope_parameters", None)
        if isinstance(parameters, dict):
            nested = [value for value in parameters.values() if isinstance(value, dict)]
            for one in nested or [parameters]:
                if one.get("rope_type") != "axial" or "rope_type" not in settings:
                    if "rope_type" in settings:  # options of another type would count for some attentions
                        for option in SCALING_OPTIONS - {"original_max_position_embeddings"}:
                            one.pop(option, None)
                    one.update(settings)
        elif "rope_theta" in settings and isinstance(getattr(part, "rope_theta", None), float):
            part.rope_theta = settings["rope_theta"]
        for value in vars(part).values():
            if isinstance(value, PretrainedConfig):
                change(value)

    change(config)
    return config


def built(model: Any, settings: dict[str, Any]) -> Any:
    """The model that transformers builds with these settings everywhere, with the same weights."""
    with seed_deterministically(0):
        other = type(model)(by_config(model.config, settings)).float().eval()
    other.load_state_dict(model.state_dict())
    return other
