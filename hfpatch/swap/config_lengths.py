"""Plans what a position swap changes in configs: maximum length, image size, RoPE settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from ..errors import OptionError
from ..runtime.constants import ConstantPositions
from ..runtime.errors import UnsupportedError
from ..schemes.learned import Learned
from ..schemes.positions import Position
from ..schemes.request import Part, Record
from ..sites.records.biases import BIASES
from ..sites.stacks import FoundStack, find_stacks, first_row, max_positions
from .config_diff import Setting, derive
from .image_tables import IMAGE_SIZE, new_size
from .native_rope import changing_rotations, settings_of_rotations
from .planners import Planned
from .positions import affected_stacks, plan_positions

LENGTH = "max_position_embeddings"  # transformers' name, which configs with another map to their own


def settle_positions(model: nn.Module, part: Part[Position]) -> Part[Position]:
    """The request with the length of the model's tables as its original one, if it sets another.

    Raises:
        OptionError: frequencies are scaled from that length, and the stacks have different ones.
    """
    scheme = part.scheme
    if scheme.max_positions is None:
        return part
    lengths: set[int] = _recorded(model, "original_max_positions")
    if scheme.original_max_positions is not None:
        lengths = {scheme.original_max_positions}
    elif not lengths:
        configs = [*_of_rotations(model, part), *_of_biases(model, part)]
        lengths = {getattr(config, attribute, None) or 0 for config, attribute in configs}
        lengths |= set(map(max_positions, affected_stacks(model, part)))
        lengths -= {0}  # positions that are made without a table
    if len(lengths) > 1 and getattr(scheme, "scaling", None):
        raise OptionError(
            f"pos={scheme.name!r} scales from the old length, and this model has several: {sorted(lengths)}. Patch "
            "one stack at a time (only=), or give original_max_positions."
        )
    return replace(part, scheme=scheme.for_lengths(lengths))


def config_lengths(model: nn.Module, part: Part[Position]) -> list[Setting]:
    """Config changes of a position scheme: lengths, image sizes, settings of the model's own rotations.

    Raises:
        UnsupportedError: no config says how many positions there are.
    """
    scheme = part.scheme
    settings, affected = settings_of_rotations(model, part), affected_stacks(model, part)
    sizes = _image_sizes(affected, scheme) if isinstance(scheme, Learned) else []
    if scheme.max_positions is None:
        return settings + sizes
    found: list[Setting] = []
    for config, attribute in _of_rotations(model, part):
        if (getattr(scheme, "scaling", None) or {}).get("rope_type") == "dynamic":
            raise UnsupportedError(
                f"dynamic scaling starts from {type(config).__name__}.{LENGTH}, which max_positions would change. "
                "Leave max_positions out."
            )
        if getattr(config, attribute, None) is None:
            raise UnsupportedError(f"{type(config).__name__} has no {attribute} to set. Leave max_positions out.")
        found.append((config, attribute, scheme.max_positions))
    stacks = [item for item in affected if item.stack.grid is None]  # patches are no length of text
    found += [_of_stack(model, item, scheme.max_positions) for item in stacks]
    found += _pinned(model, part)
    known = {id(config) for config, _, _ in found}
    for config, attribute in _of_biases(model, part):
        if id(config) not in known and getattr(config, attribute, None) is not None:
            found.append((config, attribute, scheme.max_positions))
    if not found + sizes:
        raise UnsupportedError(
            f"{type(model).__name__}: none of its configs says how many positions there are. Leave max_positions out."
        )
    return settings + found + sizes


def _of_stack(model: nn.Module, item: FoundStack, length: int) -> Setting:
    """The setting of a stack's config for its new length; some configs also count rows that hold no position."""
    config, attribute = getattr(item.owner, "config", None), item.stack.config_length
    number = getattr(config, attribute, None)
    if isinstance(number, int) and not isinstance(item.table(), nn.Embedding | ConstantPositions):
        return config, attribute, length  # what its host computes has as many rows as are asked for
    positions = {max_positions(item), *_recorded(model, "max_positions")}
    counted = sorted({0, first_row(item)})
    more = next((n for n in counted if isinstance(number, int) and number - n in positions), None)
    if more is None:
        raise UnsupportedError(
            f"{item.table_name}: max_positions can't be written to its config, whose {attribute} is {number!r} "
            f"although the table holds {max_positions(item)} positions. Leave max_positions out."
        )
    return config, attribute, length + more


def _pinned(model: nn.Module, part: Part[Position]) -> list[Setting]:
    """Settings that keep the length of biases which stay: by default it follows that of the tables."""
    scheme, owners = part.scheme, [item.owner for item in affected_stacks(model, part)]
    found: list[Setting] = []
    for item in find_stacks(model, BIASES) if scheme.keeps_table else ():
        config, unset = getattr(item.owner, "config", None), item.stack.as_long_as_tables
        if unset is None or item.removed_rows() is not None or item.owner not in owners:
            continue
        number = getattr(config, unset, None)
        if number is not None and number < 1:
            found.append((config, unset, getattr(config, item.stack.config_length)))
    return found


def _image_sizes(stacks: list[FoundStack], scheme: Learned) -> list[Setting]:
    """Config changes for resized tables on a grid of patches."""
    grids = [item for item in stacks if item.stack.grid is not None]
    return [(item.owner.config, IMAGE_SIZE, new) for item in grids if (new := new_size(item, scheme)) is not None]


def _of_biases(model: nn.Module, part: Part[Position]) -> list[tuple[Any, str]]:
    """The configs of stacks with relative biases that a part changes, and the attributes with their length."""
    return [(item.owner.config, item.stack.config_length) for item in affected_stacks(model, part, BIASES)]


def _of_rotations(model: nn.Module, part: Part[Position]) -> list[tuple[Any, str]]:
    """The configs of the model's own rotations that a part changes, and the attribute with their length."""
    if part.scheme.name not in ("rope", "nope"):
        return []
    configs = {id(config): config for _, config in changing_rotations(model, part)}
    return [(config, LENGTH) for config in configs.values()]


def _recorded(model: nn.Module, option: str) -> set[int]:
    """What earlier position patches of this model set an option to."""
    return {getattr(part.scheme, option) for part in Record.of(model.config).pos} - {None}


def plan_position_request(
    model: Any, part: Part[Position], example_inputs: Mapping[str, Any] | None, inexact: str | None
) -> Planned:
    """Planner of position schemes: changes of modules and of configs."""
    part = settle_positions(model, part)
    if Record.of(model.config).has("pos", part):
        return Planned(part, [])
    changes = plan_positions(model, part, example_inputs)
    if not any(change.changes for change in changes):
        return Planned(part, changes)
    lengths = config_lengths(model, part)
    derived = derive(model, lengths, [edit for change in changes for edit in change.edits])
    return Planned(part, changes, lengths=lengths, derived=derived)
