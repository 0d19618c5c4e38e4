"""Dynamic Tanh, DyT (Zhu et al. 2025, arXiv:2503.10622, eq. 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..registry import NORMS
from ..scheme import require_number
from .detect import NormFacts
from .scheme import AffineNorm, Norm


class DynamicTanh(AffineNorm):
    """y = gamma * tanh(alpha x) + beta, alpha a learned scalar.

    The parameters aren't called weight and bias: a plain reload would silently make a LayerNorm out of them.

    Args:
        alpha: the starting value of alpha.
        like: a tensor whose dtype and device alpha takes. The rest as in `AffineNorm`.
    """

    names = ("gamma", "beta")

    def __init__(
        self,
        facts: NormFacts,
        kind: str,
        gain: nn.Parameter | None,
        shift: nn.Parameter | None,
        alpha: float,
        like: Tensor,
    ):
        super().__init__(facts, kind, gain, shift)
        self.alpha0 = alpha
        self.alpha = self.new_scalar(alpha, like)

    def normalise(self, h: Tensor) -> Tensor:
        return torch.tanh(self.alpha * h)

    def initial_values(self) -> dict[str, float]:
        return {**super().initial_values(), "alpha": self.alpha0}

    def extra_repr(self) -> str:
        return super().extra_repr().partition(", eps=")[0] + f", alpha0={self.alpha0}"


@NORMS.register("dyt")
@dataclass(frozen=True)
class DyT(Norm):
    """Dynamic Tanh: an elementwise squashing in place of normalisation.

    gamma * tanh(alpha x) + beta, Zhu et al. 2025, arXiv:2503.10622, eq. 2. gamma and beta start as the replaced norm's
    gain and shift (the same Parameters).

    Args:
        alpha: starting value of the learned scalar; the paper's default outside LLMs is 0.5.

    Raises:
        OptionError: alpha is no positive finite number.
    """

    alpha: float = 0.5
    label: ClassVar[str] = "DynamicTanh"

    def __post_init__(self) -> None:
        require_number("DyT", "alpha", self.alpha, above=0.0)

    def build(
        self, facts: NormFacts, gain: nn.Parameter | None, shift: nn.Parameter | None, like: Tensor
    ) -> DynamicTanh:
        return DynamicTanh(facts, self.name, gain, shift, self.alpha, like)

    def loss(self, facts: NormFacts) -> str | None:
        return "the scale of the norm's input is no longer removed; DyT on trained weights needs training"
