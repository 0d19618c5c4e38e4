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

_SLOPES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0)  # alpha times the input's rms
_FACTORS = (0.6, 0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.2, 1.3, 1.5)


class DynamicTanh(AffineNorm):
    """y = gain * tanh(alpha x) + shift, alpha a learned scalar; gain and shift are the paper's gamma and beta.

    They are called neither weight and bias, out of which a plain reload would silently make a LayerNorm, nor gamma and
    beta, which transformers renames while loading (`LayerNorm.gamma` becomes `LayerNorm.weight`, for old checkpoints).

    Args:
        alpha: the starting value of alpha.
        like: a tensor whose dtype and device alpha takes. The rest as in `AffineNorm`.
    """

    names = ("gain", "shift")
    scalars: ClassVar[tuple[str, ...]] = ("alpha",)

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

    def trials(self, spread: float) -> list[dict[str, float]]:
        return [{"alpha": slope / spread} for slope in _SLOPES]

    def finer(self, best: dict[str, float]) -> list[dict[str, float]]:
        return [{**best, "alpha": best["alpha"] * factor} for factor in _FACTORS]

    def initial_values(self) -> dict[str, float]:
        return {**super().initial_values(), "alpha": self.alpha0}

    def extra_repr(self) -> str:
        return super().extra_repr().partition(", eps=")[0] + f", alpha0={self.alpha0}"


@NORMS.register("dyt")
@dataclass(frozen=True)
class DyT(Norm):
    """Dynamic Tanh: an elementwise squashing in place of normalisation.

    gain * tanh(alpha x) + shift, Zhu et al. 2025, arXiv:2503.10622, eq. 2 (gamma and beta there). gain and shift are
    the replaced norm's own Parameters.

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
        return "the scale of its input isn't removed; on trained weights DyT needs repair (calibration=) or training"
