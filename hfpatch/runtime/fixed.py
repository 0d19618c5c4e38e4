"""Norm modules whose scale doesn't look at the input, and what is left of a norm once it is folded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .norms import AffineNorm


class FixedNorm(AffineNorm):
    """y = (x - mean(x)) * gain + shift over the last axis: LayerNorm with a constant 1/sigma, which is in the gain.

    Gain and shift aren't stored as weight and bias: the unpatched model would load them silently as a LayerNorm's.

    Args:
        mean: subtract the mean; False where an RMSNorm was replaced: y = x * gain + shift. The rest as in `AffineNorm`.
    """

    kind = "fixed"

    names = ("gain", "shift")

    gain: nn.Parameter | None
    shift: nn.Parameter | None

    def __init__(self, *norm: Any, mean: bool = True, **like: Any):
        super().__init__(*norm, **like)
        self.mean = mean

    def normalise(self, h: Tensor) -> Tensor:
        if not self.mean:
            return h
        axes = tuple(range(-len(self.normalised_shape(h)), 0))
        return h - h.mean(axes, keepdim=True)

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.mean else ", mean=False")


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
        """Return one whose weight has the dtype and device of the norm that it replaces."""
        beside = parent.parameters() if old is None else old.parameters()
        return cls(next((one.detach() for one in beside if one.is_floating_point()), None))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


class BiasedLinear(nn.Linear):
    """`nn.Linear` without a bias, with a new one: y = x W' + b, b = 0; the weight is the same Parameter."""

    @classmethod
    def replacing(cls, old: nn.Module | None, parent: nn.Module) -> nn.Linear:
        """Return a plain `nn.Linear` in place of the one without a bias."""
        if not isinstance(old, nn.Linear):
            raise TypeError(f"a bias can be added to nn.Linear, not to {type(old).__name__}")
        new = nn.Linear(1, 1, device="meta")
        new.in_features, new.out_features, new.weight = old.in_features, old.out_features, old.weight
        bias = torch.zeros(old.out_features, dtype=old.weight.dtype, device=old.weight.device)
        new.bias = nn.Parameter(bias, requires_grad=old.weight.requires_grad)
        return new
