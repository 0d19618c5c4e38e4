"""LayerNorm (Ba et al. 2016, arXiv:1607.06450, eq. 3 and 4): the identity of the registry, and its bias-free form."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import OptionError
from ..registry import NORMS
from .detect import NormFacts
from .scheme import AffineNorm, Norm, per_channel


class LayerNorm(AffineNorm):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * gain + shift over the last axis, var biased.

    Arguments as in `AffineNorm`.
    """

    def normalise(self, h: Tensor) -> Tensor:
        return F.layer_norm(h, self.normalised_shape(h), None, None, self.eps_for(h))

    def normed(self, h: Tensor, gain: Tensor | None, shift: Tensor | None) -> Tensor:
        shape = self.normalised_shape(h)
        if not per_channel(h, shape, gain, shift):
            return super().normed(h, gain, shift)
        return F.layer_norm(h, shape, gain, shift, self.eps_for(h))  # one kernel


@NORMS.register("layer")
@dataclass(frozen=True)
class Layer(Norm):
    """Layer normalisation itself: the control of an ablation, or with `bias=False` LayerNorm without its shift.

    (x - mean) / sqrt(var + eps) * gain [+ shift], Ba et al. 2016, arXiv:1607.06450.

    Args:
        bias: keep the shift. Without it the swap is exact only where the shift was zero or absent.

    Raises:
        OptionError: `bias` is no bool.
    """

    bias: bool = True
    label: ClassVar[str] = "LayerNorm"

    def __post_init__(self) -> None:
        if not isinstance(self.bias, bool):
            raise OptionError(f"Layer: bias must be True or False, not {self.bias!r}.")

    def build(self, facts: NormFacts, gain: nn.Parameter | None, shift: nn.Parameter | None, like: Tensor) -> LayerNorm:
        facts = replace(facts, shift=facts.shift if self.bias else None)
        return LayerNorm(facts, self.name, gain, shift if self.bias else None)

    def reason_to_keep(self, facts: NormFacts) -> str | None:
        return None

    def loss(self, facts: NormFacts) -> str | None:
        if facts.kind != "layer":
            return "the mean of the norm's input is removed now"
        return "the shift is dropped" if facts.shift and not self.bias else None
