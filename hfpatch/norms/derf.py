"""Dynamic erf, Derf ("Stronger Normalization-Free Transformers" 2025, arXiv:2512.10938)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..registry import NORMS
from ..scheme import require_number
from .detect import NormFacts
from .dyt import DynamicTanh
from .scheme import Norm


class DynamicErf(DynamicTanh):
    """y = gain * erf(alpha x + s) + shift, alpha and s learned. Arguments as in `DynamicTanh`; s starts at `s`."""

    scalars = ("alpha", "s")

    def __init__(
        self,
        facts: NormFacts,
        kind: str,
        gain: nn.Parameter | None,
        shift: nn.Parameter | None,
        alpha: float,
        s: float,
        like: Tensor,
    ):
        super().__init__(facts, kind, gain, shift, alpha, like)
        self.s0 = s
        self.s = self.new_scalar(s, like)

    def normalise(self, h: Tensor) -> Tensor:
        return torch.erf(self.alpha * h + self.s)

    def trials(self, spread: float) -> list[dict[str, float]]:
        return [{**trial, "s": 0.0} for trial in super().trials(spread)]

    def finer(self, best: dict[str, float]) -> list[dict[str, float]]:
        shifts = (-0.3, -0.1, -0.03, 0.0, 0.03, 0.1, 0.3)
        return [{**trial, "s": s} for trial in super().finer(best) for s in shifts]

    def initial_values(self) -> dict[str, float]:
        return {**super().initial_values(), "s": self.s0}


@NORMS.register("derf")
@dataclass(frozen=True)
class Derf(Norm):
    """Dynamic erf: like DyT with the error function and a learned shift inside.

    gain * erf(alpha x + s) + shift, arXiv:2512.10938. gain and shift are the replaced norm's own Parameters.

    Args:
        alpha: starting value of the learned slope (paper: 0.5).
        s: starting value of the learned inner shift (paper: 0).

    Raises:
        OptionError: alpha is no positive finite number, or s no finite one.
    """

    alpha: float = 0.5
    s: float = 0.0
    label: ClassVar[str] = "DynamicErf"

    def __post_init__(self) -> None:
        require_number("Derf", "alpha", self.alpha, above=0.0)
        require_number("Derf", "s", self.s, above=float("-inf"))

    def build(
        self, facts: NormFacts, gain: nn.Parameter | None, shift: nn.Parameter | None, like: Tensor
    ) -> DynamicErf:
        return DynamicErf(facts, self.name, gain, shift, self.alpha, self.s, like)

    def loss(self, facts: NormFacts) -> str | None:
        return "the scale of its input isn't removed; on trained weights Derf needs repair (calibration=) or training"
