"""Fixed norms as stock ones: LayerNorm or RMSNorm with so large an eps that the variance has no bit left.

(x - mean) / sqrt(variance + E) * gain * sqrt(E) is (x - mean) * gain, less variance / (2 E) of it, which is nothing in
float32 and float64. E is a power of four, so that its root scales numbers without rounding them.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from ..measure.randomness import keep_random_state
from ..runtime.patch_errors import UnsupportedError
from ..sites.norm_facts import EPS_NAMES

ROOT = 2.0**40
LARGE_EPS = ROOT**2
_SHOWN = 3  # names in a message


def with_fixed_norms(model: Any, fixed: Collection[nn.Module]) -> Any:
    """Return a stock model, filled already, whose settings of eps are so large that some of its norms are fixed.

    Args:
        model: a stock model; it is returned itself if no norm is to be fixed.
        fixed: norms of it that are to be fixed; their gains were multiplied by `ROOT`.

    Raises:
        UnsupportedError: no setting is the eps of all of these norms and of no other norm.
    """
    if not fixed:
        return model
    names = [name for name, module in model.named_modules() if any(module is one for one in fixed)]
    config = fixing_config(type(model), model.config, names)
    with keep_random_state(), torch.device("cpu"):
        new = type(model)._from_config(config, dtype=model.dtype).eval()
    new.load_state_dict(model.state_dict())
    return new.to(model.device)


def fixing_config(cls: Any, config: Any, fixed: Collection[str]) -> Any:
    """Return a copy of a config whose settings of eps are large for the norms of these names, and for no others.

    Args:
        cls: the stock class that reads it.
        config: a config of that class.
        fixed: names of these norms in the model that is built from the config.

    Raises:
        UnsupportedError: as in `with_fixed_norms`.
    """
    found, left = copy.deepcopy(config), set(fixed)
    for number, (part, setting) in enumerate(_settings(found)):
        trial = copy.deepcopy(config)
        _set(*list(_settings(trial))[number])
        with keep_random_state(), torch.device("meta"):
            governed = [name for name, module in cls._from_config(trial).named_modules() if _is_large(module)]
        if left.isdisjoint(governed):
            continue
        if others := [name for name in governed if name not in fixed]:
            raise UnsupportedError(
                f"its {setting} is that of all its norms, and of these {_some(fixed)} {_are(fixed)} fixed and "
                f"{_some(others)} {_are(others)} not. Fix those too (only=['*', 'NAME'] with the last norm's name, as "
                "it is kept otherwise), or none"
            )
        _set(part, setting)
        left.difference_update(governed)
    if left:
        raise UnsupportedError(
            f"it has no setting for the eps of {_some([name for name in fixed if name in left])}, and a fixed norm is "
            "one with a large eps"
        )
    return found


def _settings(config: Any) -> Iterator[tuple[Any, str]]:
    """Yield the numbers of a config, and of those inside it, that are called eps in some way."""
    inside = (getattr(config, name, None) for name in getattr(config, "sub_configs", ()))
    for part in (config, *(one for one in inside if one is not None)):
        yield from ((part, name) for name, value in vars(part).items() if "eps" in name and type(value) is float)


def _set(part: Any, setting: str) -> None:
    setattr(part, setting, LARGE_EPS)


def _is_large(module: nn.Module) -> bool:
    return any(getattr(module, name, None) == LARGE_EPS for name in EPS_NAMES)


def _some(names: Collection[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join([*names][:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _are(names: Collection[str]) -> str:
    return "is" if len(names) == 1 else "are"
