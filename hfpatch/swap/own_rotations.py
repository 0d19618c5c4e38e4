"""Plans position swaps for attentions that rotate by sine tables of their own (GPT-J, CodeGen, RoFormer)."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..core.globs import Names
from ..core.plan_table import Change, Row
from ..runtime.attention import ROTARY
from ..runtime.constants import FixedArguments
from ..runtime.lens import lens_of
from ..schemes.positions import Position
from ..schemes.request import Part
from ..schemes.rope import RoPE
from ..sites.stacks import FoundStack, require_settings
from .attentions import attention_change
from .native_rope import NO_ROTATION, OWN_ROTATION_KEPT


def own_rotation(item: FoundStack, attention: nn.Module) -> RoPE:
    """The RoPE settings that such an attention computes."""
    head_dim = getattr(attention, item.stack.head_dim)
    turned = getattr(attention, item.stack.rotary_dim) if item.stack.rotary_dim else None
    return RoPE(partial=(turned or head_dim) / head_dim, pairing="interleaved").resolved()


def own_change(path: str, module: nn.Module, item: FoundStack, part: Part, names: Names) -> Change:
    """Change of an attention that rotates by a sine table of its own: other settings, or no rotation.

    Raises:
        UnsupportedError: it turns more than queries and keys.
    """
    scheme, own = part.scheme, own_rotation(item, module)
    assert isinstance(scheme, Position)
    rotary: Any = module._modules.get(ROTARY)
    hidden = lens_of(module, FixedArguments) is not None
    described = own.describe(getattr(module, item.stack.head_dim))
    present = rotary or (None if hidden else described)
    now = f"{module._get_name()} with {present}" if present else module._get_name()
    reason = names.reason_to_keep([path], part.only, part.keep)
    if reason is None and not (isinstance(scheme, RoPE) or scheme.name == "nope"):
        reason = OWN_ROTATION_KEPT
    if reason is None and scheme.name == "nope" and hidden and rotary is None:
        reason = "dropped already"
    if reason is not None:
        return Change(Row("position", path, now, reason=reason))
    if isinstance(scheme, RoPE) and not hidden and scheme.over(own) == own:
        row = Row("position", path, now, reason="its own settings")
        return Change(row.replace_by(described, exact="it rotates like this already"))
    require_settings(item)
    if isinstance(scheme, RoPE) and rotary is None:
        scheme = scheme.over(own)
    change = attention_change(path, module, item, scheme)
    row, row.now = change.row, now
    if scheme.name == "nope":
        row.replace_by("no rotation", loss=NO_ROTATION).reason = None
    return change
