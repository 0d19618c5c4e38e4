"""RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from ..registry import NORMS
from .detect import NormFacts
from .scheme import AffineNorm, Norm


class RMSNorm(AffineNorm):
    """y = x / sqrt(mean(x^2) + eps) * gain + shift over the last axis, eps inside the root.

    Unlike most RMSNorm classes it keeps a shift where the replaced LayerNorm had one. The arithmetic is float32 for
    half-precision input. Arguments as in `AffineNorm`.
    """

    def normalise(self, h: Tensor) -> Tensor:
        return F.rms_norm(h, self.normalised_shape(h), None, self.eps)


@NORMS.register("rms")
@dataclass(frozen=True)
class RMS(Norm):
    """Root mean square normalisation: LayerNorm without the subtraction of the mean.

    x / sqrt(mean(x^2) + eps) * gain + shift, Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4. Gain, shift and eps are
    the replaced norm's. The same function wherever the input's mean over channels is zero, another one elsewhere.
    """

    label: ClassVar[str] = "RMSNorm"

    def build(self, facts: NormFacts, gain: nn.Parameter | None, shift: nn.Parameter | None, like: Tensor) -> RMSNorm:
        return RMSNorm(facts, self.name, gain, shift)

    def loss(self, facts: NormFacts) -> str | None:
        return "the mean of the norm's input is no longer removed"
