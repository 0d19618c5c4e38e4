"""Export as the stock class that was patched, if other weights or settings give the same outputs.

That is possible if a patch can be expressed by what the class reads: a table of positions with other rows (one row for
all if positions were dropped), settings of a rotation (`NO_ROTATION` if it was dropped), a stream without a mean, a
norm without a shift.
"""

from __future__ import annotations

import fnmatch
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..measure.copies import unpatched_config
from ..measure.randomness import keep_random_state
from ..planners.config_diff import config_at
from ..runtime.attention import BIAS, ROTARY, AttentionLens
from ..runtime.constants import ConstantPositions, FixedArguments
from ..runtime.fixed import NoNorm
from ..runtime.gated import GatedLinear
from ..runtime.host_rotary import settings_in
from ..runtime.lens import SCALED, host_class, lens_of
from ..runtime.norms import AffineNorm
from ..runtime.patch_errors import UnsupportedError
from ..runtime.refuse_host import parts
from ..runtime.tables import ComputedPositions
from ..schemes.rope import merged
from ..sites.architectures.biases import BIASES
from ..sites.rotations import find_rotations
from ..sites.stacks import find_stacks, max_positions
from .fixed_norms import with_fixed_norms
from .layouts import NO_ROTATION
from .weights import EXPRESSIBLE, Weights, gains_of

_CODE = ("auto_map", "custom_pipelines")  # settings that name code of the original's repository
_STAYS_ON = "has lost its positions, which in {host} can't be switched off"


@torch.no_grad()
def as_stock_host(model: Any) -> tuple[Any, int | None]:
    """Return a stock model of the host's class, and its maximum length if that became shorter.

    Args:
        model: a patched model, or a stock one, in float32 or float64.

    Raises:
        UnsupportedError: the host's class can't express a part of the patch; the message names it.
    """
    host: Any = host_class(type(model))
    for name, module in model.named_modules():
        obstacle = host_obstacle(module)
        if obstacle is not None:
            raise UnsupportedError(f"{name} {obstacle.format(host=host.__name__)}")
    config = _without_dropped_rotations(model)
    for _, part in parts(config):
        for name in _CODE:
            vars(part).pop(name, None)
    try:
        type(config).from_dict(config.to_dict())  # which checks what the class can't open again
        with keep_random_state(), torch.device("cpu"):
            twin = host._from_config(config, dtype=model.dtype).eval()
    except Exception as error:  # a class that doesn't know a setting may raise anything
        raise UnsupportedError(f"its config takes other values: {str(error).splitlines()[-1].strip()}") from error
    fixed = _fill(twin, model)
    for name, factor in gains_of(model).items():
        for value in twin.get_submodule(name).parameters(recurse=False):
            value.mul_(factor)
    return with_fixed_norms(twin, fixed).to(model.device), _longest_text(model)


def _longest_text(model: nn.Module) -> int | None:
    """The number of a text's positions that the host's tables hold; None without tables."""
    if "input_ids" not in inspect.signature(model.forward).parameters:
        return None
    held = [max_positions(item) for item in find_stacks(model) if not item.is_grid]
    return min(filter(None, held), default=None)


def host_obstacle(module: nn.Module) -> str | None:
    """Return why a module can't be expressed by weights and settings of the host's class; None if it can."""
    if isinstance(module, AffineNorm) and module.facts.kind not in EXPRESSIBLE:
        return f"is a {type(module).__name__}, which {{host}} doesn't have"
    if isinstance(module, GatedLinear):
        return f"is gated ({module.kind}), which the MLPs of {{host}} aren't"
    if SCALED in vars(module):
        return "is scaled by a learned number, which {host} doesn't have"
    if module._modules.get(ROTARY) is not None and lens_of(module, AttentionLens) is not None:  # else the host's
        return "rotates queries and keys, which {host} doesn't"
    if module._modules.get(BIAS) is not None:
        return "adds a bias by distance, which {host} doesn't"
    if lens_of(module, FixedArguments) is not None:
        return _STAYS_ON
    return None


def _without_dropped_rotations(model: Any) -> Any:
    """The host's config, with settings that turn nothing for every rotation that a patch dropped.

    Raises:
        UnsupportedError: the config has no such settings.
    """
    config = unpatched_config(model.config)
    for rotation in find_rotations(model):
        if not rotation.is_dropped:
            continue
        if rotation.path is None or rotation.reads_only_theta:
            raise UnsupportedError(f"{rotation.name} {_STAYS_ON.format(host=host_class(type(model)).__name__)}")
        part: Any = config_at(config, rotation.path)
        for name, value in settings_in(part, merged(NO_ROTATION, rotation.settings), rotation.layer_type).items():
            setattr(part, name, value)
    return config


def _fill(twin: nn.Module, model: nn.Module) -> list[nn.Module]:
    """Copy a patched model's values into a stock twin, norm by norm and then name by name; return its fixed norms.

    Raises:
        UnsupportedError: a value has no counterpart.
    """
    source, target, state = Weights(model), Weights(twin), dict(model.state_dict())
    modules: dict[str, Any] = dict(model.named_modules())
    norms = {name: module for name, module in modules.items() if isinstance(module, AffineNorm | NoNorm)}
    places = dict(twin.named_modules())
    for name, module in norms.items():
        if name not in places:
            raise UnsupportedError(f"{name} is a norm that {type(twin).__name__} doesn't have")
        target.fill_norm(places[name], source.norm(module, name), name)
    biases = [item for item in find_stacks(model, BIASES) if item.removed_rows() is not None]
    removed = [item.path(place) for item in biases for place, _ in item.stack.removal]
    used: set[str] = set()
    for key, place in twin.state_dict(keep_vars=True).items():
        holder = key.rpartition(".")[0]
        if holder in norms:
            continue
        used.add(f"{holder}.constant" if isinstance(modules.get(holder), ConstantPositions) else key)
        values = _values(modules.get(holder), state.get(key), place)
        if values is None and any(fnmatch.fnmatchcase(one, glob) for one in (key, holder) for glob in removed):
            values = torch.zeros_like(place)  # biases by distance that were removed
        if values is None or values.shape != place.shape:
            raise UnsupportedError(f"{key} has no counterpart of its shape")
        place.copy_(values)
    unused = [key for key in state if key not in used and key.rpartition(".")[0] not in norms]
    if unused:
        raise UnsupportedError(f"{min(unused)} has no counterpart")
    return target.fixed


def _values(module: Any, stored: Tensor | None, place: Tensor) -> Tensor | None:
    """Values for a Parameter of the stock model: rows of a table, or the stored values of the same name."""
    if isinstance(module, ComputedPositions):
        return module.rows(torch.arange(len(place), device=module.weight.device))
    values = module.constant if isinstance(module, ConstantPositions) else stored
    if values is None or values.shape == place.shape or place.numel() % values.numel():
        return values
    return values.expand_as(place)  # one row for all positions
