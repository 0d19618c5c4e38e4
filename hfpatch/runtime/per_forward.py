"""Computes values that depend on positions only once per forward of a stack, not in each attention.

cos and sin, ALiBi's biases and causal masks are equal in all attentions of a stack. In each forward the stack's owner
hands an empty `Once` down (handing_down.py); the attention that first needs a value computes it, the others find it
there. An attention that was handed none, because it is called alone or its host drops arguments that it doesn't know,
computes its own. So does compiled code, which plain arguments alone serve with one graph for all layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

ONCE = "computed_once"  # argument, or attribute of an attention's view, with the `Once` of this forward


class Once:
    """Values of one forward, by kind: of each kind the last one alone, lest layers that differ pile theirs up.

    It belongs to the forward that made it and ends with it, or with the backward that computes its layers again. A
    value is found by all that it was computed from: numbers and texts by what they are, tensors by which they are.
    """

    def __init__(self) -> None:
        self.values: dict[tuple, dict[tuple, Any]] = {}

    def of(self, kind: tuple, sources: tuple, compute: Callable[[], Any]) -> Any:
        """Return the value of a kind that was computed from these sources; computed now if it wasn't."""
        held = self.values.get(kind)
        if held is None or sources not in held:
            self.values[kind] = held = {sources: compute()}
        return held[sources]


def once(values: Once | None, kind: tuple, sources: tuple, compute: Callable[[], Any]) -> Any:
    """Return `Once.of`; without one the value is computed."""
    return compute() if values is None else values.of(kind, sources, compute)


def key_of(module: nn.Module) -> str | None:
    """Return what says which values a module computes, for modules to share them; None if they are its alone.

    Those are of what is learned, and of a module that somebody's hooks watch or change.
    """
    if module._parameters or module._forward_pre_hooks or module._forward_hooks:
        return None
    key = getattr(module, "key", None)
    return key if isinstance(key, str) else None
