"""What position schemes with a bias on attention scores attach, and which attentions can't take it."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from ..runtime.attention import MASK, NUMBER_OF_HEADS, TAKE_A_BIAS, AttentionLens, attention_implementation, no_bias
from ..runtime.edits import Call
from ..runtime.errors import UnsupportedError
from ..runtime.lens import host_class
from ..schemes.positions import Position
from .bias_probe import why_no_bias


def bias_for(name: str, module: nn.Module, scheme: Position) -> Call | None:
    """What the scheme adds to this attention's scores, None for nothing.

    Raises:
        UnsupportedError: the attention takes no mask, or its implementation would lose the bias.
    """
    if scheme.attends is None:
        return None
    host: Any = host_class(type(module))
    takes = inspect.signature(host.forward).parameters
    if MASK not in takes:
        raise UnsupportedError(
            f"{name}: {module._get_name()} takes no mask of the shape (B, 1, T, S), so its scores can't be given the "
            f"bias of pos={scheme.name!r}. pos='rope' works here."
        )
    kind = attention_implementation(module)
    if kind not in TAKE_A_BIAS:
        raise UnsupportedError(no_bias(name, kind))
    return scheme.score_bias(_num_heads(name, module))


def require_bias(attentions: dict[str, nn.Module], lens: AttentionLens, scheme: Position) -> None:
    """Try one attention of each class with a bias.

    Raises:
        UnsupportedError: it would be lost; says what the attention does with a mask.
    """
    for name, module in {type(module): (name, module) for name, module in attentions.items()}.values():
        why = why_no_bias(module, lens, _num_heads(name, module))
        if why is not None:
            raise UnsupportedError(
                f"{name}: {module._get_name()} {why}, so its scores can't be given the bias of pos={scheme.name!r}. "
                "pos='rope' works here."
            )


def _num_heads(name: str, module: nn.Module) -> int:
    for holder in (module, getattr(module, "config", None)):
        for attribute in NUMBER_OF_HEADS:
            number = getattr(holder, attribute, None)
            if isinstance(number, int):
                return number
    raise UnsupportedError(f"{name}: {module._get_name()} doesn't say how many heads it has.")
