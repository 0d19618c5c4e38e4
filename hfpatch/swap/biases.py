"""Relative biases that go with a swap of positions, and those that stay."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..core.globs import Names
from ..core.plan_table import Change, Row
from ..runtime.errors import UnsupportedError
from ..schemes.positions import Position
from ..schemes.request import Part
from ..sites.biases import FoundBias, removal, unremovable
from ..sites.records.record import Stack
from ..sites.stacks import FoundStack
from .attentions import attention_change, reason_to_keep, try_bias
from .tables import ALL_KEPT


def bias_changes(model: nn.Module, item: FoundBias, covered: set[str], part: Part, names: Names) -> list[Change]:
    """What happens to relative biases, and to those of their attentions that no table feeds as well."""
    scheme, bias = part.scheme, item.bias
    assert isinstance(scheme, Position)
    reasons = {name: reason_to_keep(name, part, names) for name in item.attentions}
    by_name = any(names.matches(glob, [item.name]) for glob in part.keep)
    why = "its attentions are kept" if all(reasons.values()) else "keep" if by_name else None
    row = Row("position", "keep", item.name, "biases by distance", reason=why)
    if item.removed:
        row.now, row.reason = "no biases", "removed already"
    changes = [Change(row)]
    if scheme.keeps_table and all(name in covered for name in item.attentions):
        row.reason = row.reason or "stays beside the table"
        return changes
    if scheme.keeps_table and why != ALL_KEPT:
        raise UnsupportedError(
            f"{item.name}: its positions are relative biases, and pos={scheme.name!r} needs a table of absolute ones."
        )
    if row.reason is None:
        if part.init == "exact":
            raise UnsupportedError(
                f"{item.name}: pos={scheme.name!r} isn't exact: what these biases add can't be had from it. "
                "Use init='auto' to accept that."
            )
        row.action, row.becomes, row.loss = "replace", "removed", "relative biases are removed"
        if scheme.name == "nope" and not (bias.causal or getattr(item.owner, "is_decoder", False)):
            row.loss += "; without a causal mask the stack becomes blind to order"
        changes = [Change(row, removal(item))]
    left = {name: module for name, module in item.attentions.items() if name not in covered}
    if bias.projections is None or not left:
        return changes
    if bias.absolute and _of(item.owner, bias.absolute) is not None:
        raise UnsupportedError(
            f"{item.prefix}{bias.absolute}: {type(item.owner).__name__} adds a table of absolute positions besides its "
            "biases, for which hfpatch has no record."
        )
    stack = Stack(
        *(bias.owner, bias.name, bias.attention, bias.projections),
        head_dim=bias.head_dim,
        cache=bias.cache,
        causal=bias.causal,
    )
    length = getattr(getattr(item.owner, "config", None), bias.length, None)
    found = FoundStack(stack, item.owner, item.prefix.rstrip("."), item.name, left, length or 0)
    changes += [attention_change(model, name, module, found, scheme, reasons[name]) for name, module in left.items()]
    try_bias(left, stack, part, changes)
    return changes


def _of(owner: nn.Module, path: str) -> Any:
    holder, _, attribute = path.rpartition(".")
    return getattr(owner.get_submodule(holder), attribute, None)


def other_biases(model: nn.Module, found: list[FoundStack], biases: list[FoundBias]) -> list[Change]:
    """Relative biases that stay where they are, in parts of the model that nothing else changes.

    Raises:
        UnsupportedError: they are added by attentions that would be changed, so that some positions would be left in.
    """
    switched = [item for item in found if item.stack.biases or item.stack.switched_off]  # theirs go by the record
    off = {id(inner) for item in switched for inner in item.owner.modules()}
    reasons = {
        name: reason for name, reason in unremovable(model, biases).items() if id(model.get_submodule(name)) not in off
    }
    owners = [item.owner for item in found] + [item.owner for item in biases]
    changed = {id(inner) for owner in owners for inner in owner.modules()}
    rows = []
    for name, reason in reasons.items():
        module = model.get_submodule(name)
        where = name or type(module).__name__
        if id(module) in changed:
            raise UnsupportedError(f"{where}: its positions are relative biases, and they stay: {reason}.")
        rows.append(Row("position", "keep", where, "relative positions", reason=reason))
    return [Change(row) for row in rows]
