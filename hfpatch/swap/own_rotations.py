"""Attentions that rotate by tables of their own: other settings, or no rotation."""

from __future__ import annotations

import fnmatch
from typing import Any

from torch import nn

from ..core.globs import Names
from ..core.plan_table import Change, Row
from ..core.registry import by_class
from ..runtime.attention import ROTARY
from ..runtime.constants import Given
from ..runtime.edits import LENS_SLOT, Edit
from ..runtime.errors import UnsupportedError
from ..runtime.lens import lens_of, named_modules
from ..schemes.positions import Position
from ..schemes.request import Part
from ..schemes.rope import RoPE
from ..sites.records.record import Stack
from ..sites.records.rotating import OWN_ROTATIONS, OwnRotation
from ..sites.stacks import FoundStack
from .attentions import attention_change
from .native_rope import OWN_STAYS


def find_own_rotations(model: nn.Module) -> list[tuple[nn.Module, str, OwnRotation]]:
    """Owners of attentions that rotate by tables of their own: (owner, its name, the record)."""
    found = []
    for name, module in named_modules(model):
        own = by_class(OWN_ROTATIONS, module)
        if own is not None:
            found.append((module, name, own))
    return found


def own_attentions(owner: nn.Module, name: str, own: OwnRotation) -> dict[str, tuple[nn.Module, RoPE]]:
    """Each of their attentions, and how it turns by itself."""
    found = {}
    for path, module in owner.named_modules():
        if fnmatch.fnmatchcase(path, own.attention):
            head_dim = getattr(module, own.head_dim)
            turned = getattr(module, own.rotary_dim) if own.rotary_dim else None
            scheme = RoPE(partial=(turned or head_dim) / head_dim, pairing="interleaved").resolved()
            found[f"{name}.{path}".strip(".")] = module, scheme
    return found


def own_changes(
    model: nn.Module, owner: nn.Module, name: str, own: OwnRotation, part: Part, names: Names
) -> list[Change]:
    """What happens to attentions that rotate by tables of their own: other settings, or no rotation.

    Raises:
        UnsupportedError: one turns more than queries and keys.
    """
    stack = Stack(
        *(own.owner, "", own.attention, own.projections),
        head_dim=own.head_dim,
        cache=own.cache,
    )
    length = getattr(getattr(owner, "config", None), "max_position_embeddings", 0)
    attentions = own_attentions(owner, name, own)
    found = FoundStack(stack, owner, name, name, {path: module for path, (module, _) in attentions.items()}, length)
    return [_own_change(model, path, own, found, itself, part, names) for path, (_, itself) in attentions.items()]


def _own_change(
    model: nn.Module, path: str, own: OwnRotation, found: FoundStack, itself: RoPE, part: Part, names: Names
) -> Change:
    """What happens to one of them; `itself` is how it turns by its own table."""
    module, scheme = found.attentions[path], part.scheme
    assert isinstance(scheme, Position)
    rotary: Any = module._modules.get(ROTARY)
    hidden = lens_of(module, Given) is not None
    reason = names.reason_to_keep([path], part.only, part.keep)
    described = itself.describe(getattr(module, own.head_dim))
    present = rotary or (None if hidden else described)
    now = f"{module._get_name()} with {present}" if present else module._get_name()
    if reason is None and not (isinstance(scheme, RoPE) or scheme.name == "nope"):
        reason = OWN_STAYS
    if reason is not None:
        return Change(Row("position", "keep", path, now, reason=reason))
    if isinstance(scheme, RoPE) and not hidden and scheme.over(itself) == itself:
        return Change(Row("position", "replace", path, now, described, reason="its own settings"))
    if own.refused and getattr(module, own.refused[0]):
        raise UnsupportedError(f"{path}: {module._get_name()} rotates already, and that stays: {own.refused[1]}.")
    if isinstance(scheme, RoPE):
        scheme = scheme.over(RoPE.of(rotary) if rotary is not None else itself)
    change = attention_change(model, path, module, found, scheme, None)
    change.row.now = now
    if scheme.name == "nope":
        if hidden and rotary is None:
            change.row.reason = "dropped already"
        else:
            change.row.action, change.row.becomes, change.row.reason = "replace", "no rotation", None
            change.row.loss = "queries and keys are rotated no more: a causal mask alone still shows order"
    if change.changes:
        change.edits = (Edit.of(f"{path}.{LENS_SLOT}", Given(own.given)), *change.edits)
        if part.init == "exact":
            raise UnsupportedError(
                f"{path}: pos={scheme.name!r} isn't exact: {change.row.loss}. Use init='auto' to accept that."
            )
    return change
