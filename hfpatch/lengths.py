"""How long inputs may be after a position patch: what configs say, what scaling starts from, what ends nowhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from .errors import OptionError, UnsupportedError
from .positions import Position
from .record import KEY, Part
from .swap_positions import affected_stacks, find_stacks, max_positions
from .swap_tables import ends_somewhere, first_row


def settle_positions(model: nn.Module, part: Part, example_inputs: Any = None) -> Part:
    """The part with the length that the model's tables have, where another is asked for.

    Raises:
        OptionError: frequencies are scaled from that length, and the stacks have different ones.
    """
    scheme = part.scheme
    assert isinstance(scheme, Position)
    if scheme.max_positions is None or scheme.original_max_positions is not None:
        return part
    lengths = _recorded(model, "original_max_positions") or set(map(max_positions, affected_stacks(model, part)))
    if len(lengths) > 1 and getattr(scheme, "scaling", None):
        raise OptionError(
            f"pos={scheme.name!r} scales from the old length, and the tables have {sorted(lengths)} positions. Patch "
            "one stack at a time (only=), or give original_max_positions."
        )
    return replace(part, scheme=scheme.for_lengths(lengths))


def config_lengths(model: nn.Module, part: Part) -> list[tuple[nn.Module, str, int]]:
    """What max_positions changes in configs: (the stack's owner, the attribute of its config, the new value).

    Raises:
        UnsupportedError: a stack's config doesn't say how many positions its table holds.
    """
    scheme = part.scheme
    assert isinstance(scheme, Position)
    found: list[tuple[nn.Module, str, int]] = []
    if scheme.max_positions is None:
        return []
    for item in affected_stacks(model, part):
        config, attribute = getattr(item.owner, "config", None), item.stack.config_length
        number = getattr(config, attribute, None)
        positions = {max_positions(item), *_recorded(model, "max_positions")}
        more = {number - p for p in positions} & {0, first_row(item)} if isinstance(number, int) else set()
        if not more:
            raise UnsupportedError(
                f"{item.table_name}: max_positions can't be told to its config, whose {attribute} is {number!r} where "
                f"the table holds {max_positions(item)} positions. Leave max_positions out."
            )
        found.append((item.owner, attribute, scheme.max_positions + min(more)))
    return found


def takes_any_length(model: nn.Module) -> bool:
    """Whether no table is left that would end somewhere, in a model that has or had one."""
    tables = [None if item.removed_rows() is not None else item.table() for item in find_stacks(model)]
    return bool(tables) and not any(map(ends_somewhere, tables))


def _recorded(model: nn.Module, option: str) -> set[int]:
    """What earlier position patches of this model set an option to."""
    stored = getattr(getattr(model, "config", None), KEY, None) or {}
    return {part["scheme"].get(option) for part in stored.get("pos", [])} - {None}
