"""Modules of a gated MLP: gate and up projections as one module, and the activation that multiplies them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .classes import FRESH, TIMES
from .edits import Call
from .patch_errors import CheckpointError


class GatedLinear(nn.Module):
    """x -> (gate(x), up(x)), replacing an MLP's first projection; x is (..., d), each of the pair (..., d_ff).

    Only a `GatedActivation` takes the pair: a host that did anything between the two would fail at once rather than
    compute something else.

    Args:
        kind: the registered name of the scheme.
        gate, up: the projections, of the replaced module's class (`nn.Linear`, or transformers' transposed `Conv1D`).
    """

    def __init__(self, kind: str, gate: nn.Module, up: nn.Module):
        super().__init__()
        self.kind, self.gate, self.up = kind, gate, up

    @classmethod
    def replacing(
        cls,
        old: nn.Module | None,
        parent: nn.Module,
        kind: str,
        width: int | None = None,
        *biases: bool,
        scale: float = 1.0,
    ) -> GatedLinear:
        """Return the replacement of a projection.

        Args:
            old, parent: the projection, and what it stands in.
            kind: the registered name of the scheme.
            width: hidden channels, with fresh projections; None keeps the projection as the gate.
            biases: with a width, whether gate and up have a bias.
            scale: without a width, k of the start: W = k W1 (the same Parameters, multiplied later: `TIMES`), V = 0
                with a bias of 1 / k.

        Raises:
            ValueError: the kind isn't a name, the width isn't positive or comes without two biases, or the scale isn't
                positive.
        """
        assert old is not None
        sized = width is None or (type(width) is int and width > 0 and tuple(map(type, biases)) == (bool, bool))
        scaled = type(scale) in (int, float) and 0 < scale < float("inf")
        if not (isinstance(kind, str) and kind.isidentifier() and sized and scaled):
            raise ValueError(f"no gated MLP {kind!r:.40} of {width=!r:.40}, {biases=!r:.40}, {scale=!r:.40}")
        if width is not None:
            d_in = projection_sizes(old)[0]
            return cls(kind, *(new_projection(old, d_in, width, bias) for bias in biases))
        weight: Any = old.weight
        gate, up = bare_copy(old), bare_copy(old)
        vars(gate)[TIMES] = scale
        ones = torch.ones(projection_sizes(old)[1], dtype=weight.dtype, device=weight.device)
        up._parameters |= {
            "weight": parameter_like(weight, torch.zeros_like(weight)),
            "bias": parameter_like(weight, ones / scale),
        }
        return cls(kind, gate, up)

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
    """(gate, up) -> act(gate) * up, replacing an MLP's activation; other inputs go to the original activation.

    Args:
        act: the activation of the gate.
        replaced: the activation that stood here.
    """

    def __init__(self, act: nn.Module, replaced: Callable[[Tensor], Tensor]):
        super().__init__()
        self.act, self.replaced = act, replaced

    @classmethod
    def replacing(cls, old: Any, parent: nn.Module, act: str | None = None) -> GatedActivation:
        """Return the replacement of an activation.

        Args:
            old, parent: the activation (a module or a function), and what it stands in.
            act: name of the gate's activation in `torch.nn`; None for the present activation.
        """
        replaced = bare_copy(old) if isinstance(old, nn.Module) else old  # its hooks go to the replacement
        return cls(replaced if act is None else activation(act), replaced)

    def forward(self, hidden_states: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        if isinstance(hidden_states, torch.Tensor):
            return self.replaced(hidden_states)
        gate, up = hidden_states
        return self.act(gate) * up


class Projection(nn.Module):
    """Builds a projection of another width; it is never a module of a model."""

    @classmethod
    def replacing(cls, old: nn.Module | None, parent: nn.Module, width: int, bias: bool) -> nn.Module:
        """Return a new projection to the outputs of `old`, from `width` channels."""
        assert old is not None
        return new_projection(old, width, projection_sizes(old)[1], bias)


def activation(name: str) -> nn.Module:
    """Return an activation of torch, or a registered component that is made without arguments.

    Raises:
        ValueError: there is no activation of that name. `apply` adds the edit to the message.
    """
    found = getattr(nn.modules.activation, name, None) if isinstance(name, str) else None
    if isinstance(found, type) and issubclass(found, nn.Module):
        return found()
    try:
        function = Call(str(name)).make()
    except CheckpointError as error:
        raise ValueError(f"torch.nn has no activation {name!r:.80}, and {error}") from error
    if not isinstance(function, nn.Module):
        raise ValueError(f"{name!r:.80} is no activation")
    return function


def new_projection(like: nn.Module, d_in: int, d_out: int, bias: bool) -> nn.Module:
    """Return a new projection of a class (Conv1D always has a bias), with a dtype and device."""
    weight = like.weight
    with torch.device("meta" if weight.is_meta else "cpu"):
        new = Conv1D(d_out, d_in) if isinstance(like, Conv1D) and bias else nn.Linear(d_in, d_out, bias)
    vars(new)[FRESH] = True
    return new if weight.is_meta else new.to(weight.device, weight.dtype)  # type: ignore[arg-type]


def projection_sizes(module: nn.Module) -> tuple[int, int]:
    """Return a projection's input and output channels; transformers' Conv1D stores its matrix transposed."""
    rows, columns = module.weight.shape  # type: ignore[misc]
    return (rows, columns) if isinstance(module, Conv1D) else (columns, rows)


def bare_copy(module: nn.Module) -> Any:
    """Return a copy with the same children, Parameters and buffers, but without hooks; other attributes are shared."""
    new: Any = type(module).__new__(type(module))
    for name, value in module.__dict__.items():
        if isinstance(value, dict) and "hooks" in name:
            value = type(value)()
        elif name in ("_modules", "_parameters", "_buffers"):
            value = value.copy()
        new.__dict__[name] = value
    return new


def parameter_like(old: Any, value: Tensor) -> nn.Parameter:
    """Return a Parameter of these values with the device, dtype and requires_grad of `old`."""
    return nn.Parameter(value.to(old.device, old.dtype), requires_grad=old.requires_grad)
