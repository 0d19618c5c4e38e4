"""The two modules of a gated MLP: projections that return a pair, and the activation that multiplies the pair."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class GatedLinear(nn.Module):
    """x -> (gate(x), up(x)), in place of an MLP's first projection; x is (..., d), each of the pair (..., d_ff).

    Nothing but a `GatedActivation` takes the pair: a host that did anything else between the two would fail at once
    rather than compute something else.

    Args:
        kind: the registered name of the scheme.
        gate, up: the projections, of the replaced one's class (`nn.Linear`, or transformers' transposed `Conv1D`).
    """

    def __init__(self, kind: str, gate: nn.Module, up: nn.Module):
        super().__init__()
        self.kind, self.gate, self.up = kind, gate, up

    @property
    def weight(self) -> Tensor:
        """The gate's, for hosts that read a dtype from it or initialise it by name."""
        return self.gate.weight  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        """The gate's."""
        return self.gate.bias  # type: ignore[return-value]

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return self.gate(hidden_states), self.up(hidden_states)

    def extra_repr(self) -> str:
        return self.kind


class GatedActivation(nn.Module):
    """(gate, up) -> act(gate) * up, in place of an MLP's activation; what is no pair goes to the one that was there.

    Args:
        act: the activation of the gate.
        replaced: the activation that stood here.
    """

    def __init__(self, act: nn.Module, replaced: Callable[[Tensor], Tensor]):
        super().__init__()
        self.act, self.replaced = act, replaced

    def forward(self, hidden_states: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        if isinstance(hidden_states, torch.Tensor):
            return self.replaced(hidden_states)
        gate, up = hidden_states
        return self.act(gate) * up
