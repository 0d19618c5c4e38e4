"""PartialRMSNorm: RMSNorm whose root mean square is estimated on some of the channels."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from .norms import AffineNorm


class PartialRMSNorm(AffineNorm):
    """y = x / sqrt(mean(x_k^2) + eps) * gain + shift, x_k the first k = ceil(fraction * d) of the d channels.

    Args:
        fraction: in (0, 1). The rest as in `AffineNorm`.
    """

    kind = "prms"

    def __init__(self, *norm: Any, fraction: float, like: Tensor | None = None):
        super().__init__(*norm)
        if not 0 < fraction <= 1:
            raise ValueError(f"PartialRMSNorm: fraction is {fraction}, not above 0 and at most 1")
        self.fraction = fraction
        if type(self) is PartialRMSNorm:
            self.__class__ = RMSNormOfSomeChannels  # SGLang would take a class name that ends in RMSNorm for an RMSNorm

    def normalise(self, h: Tensor) -> Tensor:
        axes = len(self.normalised_shape(h))
        x = h.flatten(-axes)
        first = x[..., : math.ceil(self.fraction * x.shape[-1])]
        scale = (first.square().mean(-1, keepdim=True) + self.eps_for(h)).rsqrt()
        return (x * scale).unflatten(-1, h.shape[-axes:])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fraction={self.fraction}"


class RMSNormOfSomeChannels(PartialRMSNorm):
    """Class of all `PartialRMSNorm`s, under a name that doesn't end in RMSNorm."""

    def _get_name(self) -> str:
        return PartialRMSNorm.__name__
