"""Plans what a swap of positions does to relative position biases: removed, or kept with a reason."""

from __future__ import annotations

from torch import nn

from ..core.globs import Names
from ..core.plan_table import Change, Row
from ..core.registry import by_class
from ..runtime.constants import ZeroBiases
from ..runtime.errors import UnsupportedError
from ..schemes.positions import Position
from ..schemes.request import Part
from ..sites.records.biases import KEPT_BIAS_PARTS, KEPT_BIASES
from ..sites.stacks import FoundStack, require_settings
from .attentions import ALL_ATTENTIONS_KEPT, attention_changes, reasons_to_keep
from .tables import loses_order, removal


def bias_changes(
    model: nn.Module, item: FoundStack, covered: set[str], part: Part[Position], names: Names
) -> list[Change]:
    """What happens to a stack's relative biases, and to those of its attentions that no table feeds as well."""
    scheme, name = part.scheme, item.table_name
    reasons, why = reasons_to_keep(item, part, names)
    row = Row("position", name, "biases by distance", reason=why)
    if item.removed_rows() is not None:
        row.now, row.reason = "no biases", "removed already"
    change = Change(row)
    left = {path: module for path, module in item.attentions.items() if path not in covered}
    if scheme.keeps_table and not left:
        row.reason = row.reason or "stays beside the table"
        return [change]
    if scheme.keeps_table and why != ALL_ATTENTIONS_KEPT:
        raise UnsupportedError(
            f"{name}: its positions are relative biases, and pos={scheme.name!r} needs a table of absolute ones."
        )
    if row.reason is None:
        row.replace_by("removed", loss="relative biases are removed" + loses_order(item, scheme))
        change.edits, _ = removal(model, item)
    if item.stack.projections is None or not left:
        return [change]
    if why != ALL_ATTENTIONS_KEPT:
        require_settings(item)
    return [change, *attention_changes(item, left, part, reasons)]


def other_biases(model: nn.Module, found: list[FoundStack], biases: list[FoundStack]) -> list[Change]:
    """Relative biases that stay where they are, in parts of the model that nothing else changes.

    `found` and `biases` are the model's stacks with tables, and with biases that can be taken out.

    Raises:
        UnsupportedError: they are added by attentions that would be changed, so that some positions would be left in.
    """
    switched = {id(inner) for item in found if _switches_biases_off(item) for inner in item.owner.modules()}
    owned = {id(inner) for item in biases for inner in item.owner.modules()}
    changed = owned | {id(inner) for item in found for inner in item.owner.modules()}
    rows = []
    for name, module in model.named_modules():
        reason = by_class(KEPT_BIASES, module)
        if reason is None and id(module) not in owned:
            parts = (*module._modules, *module._parameters, *module._buffers)
            reason = next((KEPT_BIAS_PARTS[part] for part in parts if part in KEPT_BIAS_PARTS), None)
        if reason is None or id(module) in switched:
            continue
        where = name or type(module).__name__
        if id(module) in changed:
            raise UnsupportedError(f"{where}: its positions are relative biases, and they stay: {reason}.")
        rows.append(Row("position", where, "relative positions", reason=reason))
    return [Change(row) for row in rows]


def _switches_biases_off(item: FoundStack) -> bool:
    """Whether a stack with a table also switches off the biases that its attentions add."""
    return bool(item.stack.in_attention) or any(isinstance(value, ZeroBiases) for _, value in item.stack.removal)
