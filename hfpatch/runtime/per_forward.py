"""Computes values that depend only on positions once per forward of a stack, not in each attention.

cos and sin, ALiBi's biases and causal masks are equal in all attentions of a stack. In each forward the stack's owner
passes an empty `Once` on (handing_down.py). The attention that first needs a value computes it, and the others find it
there. An attention computes its own values if it got no `Once`, because it is called alone or its host drops unknown
arguments. So does compiled code: with plain arguments only, a single graph serves all layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

ONCE = "computed_once"  # argument, or attribute of an attention's view, with the `Once` of this forward


class Once:
    """Values of one forward, by kind. Each kind keeps only its last value: else values of different layers pile up.

    It belongs to the forward that made it and ends with it, or with the backward that computes its layers again. A
    value is found by its sources: numbers and texts are compared by value, tensors by identity.
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
    """Return `Once.of`; without a `Once` the value is computed."""
    return compute() if values is None else values.of(kind, sources, compute)


def key_of(module: nn.Module) -> str | None:
    """Return the key by which modules share the values that they compute; None if a module's values aren't shared.

    Values aren't shared if the module has learned parameters, or hooks that may watch or change it.
    """
    if module._parameters or module._forward_pre_hooks or module._forward_hooks:
        return None
    key = getattr(module, "key", None)
    return key if isinstance(key, str) else None
