"""From a position scheme and a model to the tables that go and the attentions that change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..core.globs import Names
from ..core.plan_table import Change, Row
from ..core.registry import ARCHITECTURES, by_class
from ..runtime.errors import UnsupportedError
from ..schemes.positions import Position
from ..schemes.request import Part
from ..sites.records.biases import BIASES
from ..sites.records.record import Stack
from ..sites.records.refused import REFUSED
from ..sites.records.rotating import OWN_ROTATIONS
from ..sites.stacks import FoundStack, find_stacks, require_settings
from .attentions import ALL_ATTENTIONS_KEPT, attention_changes, own_change, reasons_to_keep
from .biases import bias_changes, other_biases
from .native_rope import plan_native
from .tables import table_change


def plan_positions(
    model: nn.Module, part: Part[Position], example_inputs: Mapping[str, Any] | None = None
) -> list[Change]:
    """What `part` does to each table and attention of the model's stacks; nothing is changed yet.

    Args:
        model: any module tree that contains a recorded stack.
        part: a position scheme with its globs.
        example_inputs: keyword arguments of one forward, for small models that no inputs can be made for.

    Raises:
        UnsupportedError: no record names any of the model's classes; says what the model has instead.
        OptionError: the scheme doesn't fit the attention heads.
    """
    names, found = Names.of(model), find_stacks(model)
    changes = [change for item in found for change in _changes(model, item, part, names)]
    covered = {name for item in found for name in item.attentions}
    biases = find_stacks(model, BIASES)
    for bias in biases:
        changes += bias_changes(model, bias, covered, part, names)
    changes += plan_native(model, part, names, example_inputs)
    for item in find_stacks(model, OWN_ROTATIONS):
        changes += [own_change(name, module, item, part, names) for name, module in item.attentions.items()]
    staying = other_biases(model, found, biases)
    if not changes:
        raise _unsupported(model, staying)
    refused = _refused(model).items()
    return changes + staying + [Change(Row("position", name, "positions", reason=why)) for name, why in refused]


def affected_stacks(
    model: nn.Module, part: Part[Position], records: Mapping[str, Stack] | None = None
) -> list[FoundStack]:
    """The stacks whose tables or biases a part would change, were they there; `records` as in `find_stacks`."""
    names = Names.of(model)
    return [item for item in find_stacks(model, records) if reasons_to_keep(item, part, names)[1] is None]


def _refused(model: nn.Module) -> dict[str, str]:
    """Names of modules whose positions stay, and why."""
    reasons = {}
    for name, module in model.named_modules():
        reason = by_class(REFUSED, module)
        if reason is not None:
            reasons[name or type(module).__name__] = reason
    return reasons


def _changes(model: nn.Module, item: FoundStack, part: Part[Position], names: Names) -> list[Change]:
    reasons, why = reasons_to_keep(item, part, names)
    if why != ALL_ATTENTIONS_KEPT:
        require_settings(item)
    return [table_change(model, item, part, why), *attention_changes(item, item.attentions, part, reasons)]


def _unsupported(model: nn.Module, staying: list[Change]) -> UnsupportedError:
    if staying:
        row = staying[0].row
        return UnsupportedError(f"{row.module}: its positions are relative, and they stay: {row.reason}.")
    family = str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
    for name, reason in _refused(model).items():
        return UnsupportedError(f"{family}: the positions of {name} can't be changed: {reason}. norm= works without.")
    return UnsupportedError(
        f"{family}: none of its classes is recorded as owning a table of positions. hfpatch has no record for it, so "
        f"pos= can't change its positions yet. `hfpatch families` lists the {len(ARCHITECTURES)} that have one; norm= "
        "works without."
    )
