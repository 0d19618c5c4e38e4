"""From a position scheme and a model to the tables that go and the attentions that change."""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..core.globs import Names
from ..core.plan_table import Change, Row
from ..core.registry import ARCHITECTURES, by_class
from ..runtime.errors import UnsupportedError
from ..runtime.lens import named_modules
from ..schemes.positions import Position
from ..schemes.request import Part
from ..sites.biases import find_biases
from ..sites.records.record import Stack
from ..sites.records.refused import REFUSED
from ..sites.stacks import FoundStack, find_stacks, is_attention
from .attentions import attention_change, reason_to_keep, try_bias
from .biases import bias_changes, other_biases
from .native_rope import plan_native
from .own_rotations import find_own_rotations, own_changes
from .tables import ALL_KEPT, table_change

_RELATIVE = re.compile(r"relative_(attention_)?(bias|position)|rel_pos|rel_embeddings|pos_bias|position_bias", re.I)


def plan_positions(model: nn.Module, part: Part, example_inputs: Mapping[str, Any] | None = None) -> list[Change]:
    """What `part` does to each table and attention of the model's stacks; nothing is changed yet.

    Args:
        model: any module tree that contains a recorded stack.
        part: a position scheme with its globs.
        example_inputs: keyword arguments of one forward, for small models that no inputs can be made for.

    Raises:
        UnsupportedError: no record names any of the model's classes; says what the model has instead.
        OptionError: the scheme doesn't fit the attention heads.
    """
    scheme = part.scheme
    assert isinstance(scheme, Position)
    names, found = Names.of(model), find_stacks(model)
    changes = [change for item in found for change in _changes(model, item, scheme, part, names)]
    covered = {name for item in found for name in item.attentions}
    biases = find_biases(model)
    for bias in biases:
        changes += bias_changes(model, bias, covered, part, names)
    changes += plan_native(model, part, names, example_inputs)
    for owner, name, own in find_own_rotations(model):
        changes += own_changes(model, owner, name, own, part, names)
    staying = other_biases(model, found, biases)
    if not changes:
        raise _unsupported(model, staying)
    refused = _refused(model).items()
    return changes + staying + [Change(Row("position", "keep", name, "positions", reason=why)) for name, why in refused]


def affected_stacks(model: nn.Module, part: Part) -> list[FoundStack]:
    """The stacks whose tables a part would change, were they there."""
    names = Names.of(model)
    return [
        item
        for item in find_stacks(model)
        if not any(names.matches(glob, [item.table_name]) for glob in part.keep)
        and not all(reason_to_keep(name, part, names) for name in item.attentions)
    ]


def _refused(model: nn.Module) -> dict[str, str]:
    """Names of modules whose positions stay, and why."""
    reasons = {}
    for name, module in named_modules(model):
        reason = by_class(REFUSED, module)
        if reason is not None:
            reasons[name or type(module).__name__] = reason
    return reasons


def _changes(model: nn.Module, item: FoundStack, scheme: Position, part: Part, names: Names) -> list[Change]:
    reasons = {name: reason_to_keep(name, part, names) for name in item.attentions}
    kept_by_name = any(names.matches(glob, [item.table_name]) for glob in part.keep)
    all_kept = all(reasons.values())
    why = ALL_KEPT if all_kept else "keep" if kept_by_name else None
    if not all_kept:
        _require_settings(item)
    changes = [table_change(model, item, part, why)]
    for name, module in item.attentions.items():
        changes.append(attention_change(model, name, module, item, scheme, reasons[name]))
    try_bias(item.attentions, item.stack, part, changes)
    return changes


def _require_settings(item: FoundStack) -> None:
    for name, value in item.stack.requires:
        present, setting = operator.attrgetter(name)(item.owner), name.rpartition(".")[2]
        if present != value:
            raise UnsupportedError(
                f"{item.name or type(item.owner).__name__}: positions can only be changed with {setting}={value!r}; "
                f"with {present!r} its attentions work otherwise. Load the model with "
                f"from_pretrained(..., {setting}={value!r}), or name other modules in only=."
            )


def _unsupported(model: nn.Module, staying: list[Change]) -> UnsupportedError:
    if staying:
        row = staying[0].row
        return UnsupportedError(f"{row.module}: its positions are relative, and they stay: {row.reason}.")
    family = str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
    for name, reason in _refused(model).items():
        return UnsupportedError(f"{family}: the positions of {name} can't be changed: {reason}. norm= works without.")
    alike = [name for name, record in ARCHITECTURES.items() if any(_built_like(model, s) for s in record.stacks)]
    close = difflib.get_close_matches(family, alike or list(ARCHITECTURES), n=1, cutoff=0.0 if alike else 0.6)
    nearest = f" Nearest supported family{', built alike' if alike else ''}: {close[0]}." if close else ""
    return UnsupportedError(
        f"{family}: {_positions_of(model)} hfpatch has no record for it, so pos= can't change its positions yet."
        f"{nearest} `hfpatch families` lists the {len(ARCHITECTURES)} that have one; norm= works without."
    )


def _built_like(model: nn.Module, stack: Stack) -> bool:
    """Whether some module holds a table and attentions where this stack's owner does."""
    path, _, attribute = stack.table.rpartition(".")
    wanted = stack.projections.names
    for owner in model.modules():
        children = dict(owner.named_modules())
        if path in children and hasattr(children[path], attribute):
            attentions = [child for name, child in children.items() if is_attention(name, stack)]
            if attentions and all(hasattr(attentions[0], name) for name in wanted):
                return True
    return False


def _positions_of(model: nn.Module) -> str:
    """What kind of positions an unrecorded model has, as far as its modules tell."""
    for name, module in model.named_modules():
        owned = [*module._parameters, *module._buffers, *module._modules]
        if any(_RELATIVE.search(piece) for piece in owned):
            return f"its positions are relative biases ({name or type(module).__name__})."
    for name, module in model.named_modules():
        if "rotary" in type(module).__name__.lower() or "rotary" in name.rpartition(".")[2].lower():
            return f"it rotates queries and keys already ({name})."
    return "none of its classes is recorded as owning a table of positions."
