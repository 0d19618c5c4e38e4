"""Norm modules whose scale doesn't depend on the input, and modules that replace a folded norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .norms import AffineNorm


class FixedNorm(AffineNorm):
    """y = (x - mean(x)) * gain + shift over the last axis: LayerNorm with a constant 1/sigma, which is in the gain.

    With a `bound` this holds for rows (tokens) whose size is at most `bound` times `size`. Larger rows, attention sinks
    and outliers, are divided by their own size and multiplied by `size`: they get the norm that was replaced.
    Gain and shift aren't stored as weight and bias: the unpatched model would load them silently as a LayerNorm's.

    Args:
        mean: subtract the mean; False if an RMSNorm was replaced: y = x * gain + shift.
        bound: 1 or more; None for no bound. The rest as in `AffineNorm`.

    Attributes:
        size: with a bound, the size (root mean square, after the mean is subtracted) of a usual row: a learned scalar.
    """

    kind = "fixed"

    names = ("gain", "shift")

    gain: nn.Parameter | None
    shift: nn.Parameter | None

    def __init__(self, *norm: Any, mean: bool = True, bound: float | None = None, like: Tensor):
        super().__init__(*norm)
        self.mean, self.bound = mean, bound
        if bound is not None:
            self.size = self.new_scalar(1.0, like)

    def normalise(self, h: Tensor) -> Tensor:
        axes = tuple(range(-len(self.normalised_shape(h)), 0)) if self.mean or self.bound is not None else ()
        if self.mean:
            h = h - h.mean(axes, keepdim=True)
        if self.bound is None:
            return h
        squares = h.square().mean(axes, keepdim=True)
        share = self.size * squares.clamp_min(torch.finfo(h.dtype).tiny).rsqrt()  # size / the row's own
        return h * torch.where(share * self.bound < 1, share, 1.0)

    def initial_values(self) -> dict[str, float]:
        return super().initial_values() | ({} if self.bound is None else {"size": 1.0})

    def extra_repr(self) -> str:
        bound = "" if self.bound is None else f", bound={self.bound:g}"
        return super().extra_repr() + bound + ("" if self.mean else ", mean=False")


class NoNorm(nn.Module):
    """y = x: in place of a fixed norm whose gain, mean and shift are in the weights of the layers that read it.

    Its `weight` holds no values, and isn't stored: hosts read the dtype of their norm's weight (Mamba casts to it).
    """

    weight: Tensor

    def __init__(self, like: Tensor | None = None):
        super().__init__()
        self.register_buffer("weight", torch.empty(0) if like is None else like.new_empty(0), persistent=False)

    @classmethod
    def replacing(cls, old: nn.Module | None, parent: nn.Module) -> NoNorm:
        """Return a `NoNorm` whose weight has the dtype and device of the norm that it replaces."""
        beside = parent.parameters() if old is None else old.parameters()
        return cls(next((one.detach() for one in beside if one.is_floating_point()), None))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


class BiasedLinear(nn.Linear):
    """`nn.Linear` that gets a new bias, y = x W' + b with b = 0; the weight is the same Parameter."""

    @classmethod
    def replacing(cls, old: nn.Module | None, parent: nn.Module) -> nn.Linear:
        """Return a plain `nn.Linear` with a bias in place of `old`; `old` itself if it got a bias meanwhile."""
        if not isinstance(old, nn.Linear):
            raise TypeError(f"a bias can be added to nn.Linear, not to {type(old).__name__}")
        if old.bias is not None:
            return old
        new = nn.Linear(1, 1, device="meta")
        new.in_features, new.out_features, new.weight = old.in_features, old.out_features, old.weight
        bias = torch.zeros(old.out_features, dtype=old.weight.dtype, device=old.weight.device)
        new.bias = nn.Parameter(bias, requires_grad=old.weight.requires_grad)
        return new
