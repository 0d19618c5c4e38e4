"""Norm modules whose scale doesn't look at the input: FixedNorm, and NoNorm, which is left of it once it is folded."""

from __future__ import annotations

from typing import Any

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


class NoNorm(AffineNorm):
    """y = x: a fixed norm whose gain, mean and shift are in the weights of the layers that read it.

    Arguments as in `AffineNorm`; there is no gain and no shift.
    """

    kind = "none"

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def normalise(self, h: Tensor) -> Tensor:
        return h
