"""RMSNorm and partial RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4 and section 4.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import OptionError
from ..registry import NORMS
from ..scheme import require_number
from .detect import NormFacts
from .scheme import AffineNorm, Norm


class RMSNorm(AffineNorm):
    """y = x / sqrt(mean(x^2) + eps) * gain + shift over the last axis, eps inside the root.

    Unlike most RMSNorm classes it keeps a shift where the replaced LayerNorm had one. The arithmetic is float32 for
    half-precision input. Arguments as in `AffineNorm`.
    """

    def normalise(self, h: Tensor) -> Tensor:
        shape = self.normalised_shape(h)
        if not h.is_cpu or torch.compiler.is_compiling():
            return F.rms_norm(h, shape, None, self.eps)
        # F.rms_norm's own sum over an axis is slow where nothing fuses it
        length = torch.linalg.vector_norm(h, dim=tuple(range(-len(shape), 0)), keepdim=True)
        return h * torch.rsqrt(length.square() / shape.numel() + self.eps_for(h))


class PartialRMSNorm(RMSNorm):
    """y = x / sqrt(mean(x_k^2) + eps) * gain + shift, x_k the first k = ceil(fraction * d) of the d channels.

    Args:
        fraction: in (0, 1). The rest as in `AffineNorm`.
    """

    def __init__(
        self, facts: NormFacts, kind: str, gain: nn.Parameter | None, shift: nn.Parameter | None, fraction: float
    ):
        super().__init__(facts, kind, gain, shift)
        self.fraction = fraction

    def normalise(self, h: Tensor) -> Tensor:
        axes = len(self.normalised_shape(h))
        x = h.flatten(-axes)
        first = x[..., : math.ceil(self.fraction * x.shape[-1])]
        scale = (first.square().mean(-1, keepdim=True) + self.eps_for(h)).rsqrt()
        return (x * scale).unflatten(-1, h.shape[-axes:])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fraction={self.fraction}"


@NORMS.register("rms")
@dataclass(frozen=True)
class RMS(Norm):
    """Root mean square normalisation: LayerNorm without the subtraction of the mean.

    x / sqrt(mean(x^2) + eps) * gain + shift, Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4. Gain, shift and eps are
    the replaced norm's. It is the same function wherever the input's mean over the channels is zero, so everything that
    writes to the residual stream is centred first, wherever that leaves the model's outputs as they are. Hidden states
    that the model records (`output_hidden_states=True`) lose their mean.

    Args:
        mode: "fold" subtracts the mean from the weights: an RMSNorm model, whose training takes another course than the
            LayerNorm model's. "parametrize" leaves the weights and centres each branch's output in every forward, so
            that training follows the LayerNorm model's trajectory.
        fold_bias: move the shift into the linear layers that read the norm, where nothing else does.
        fraction: below 1 the root mean square is estimated on the first ceil(fraction * d) channels alone: pRMSNorm,
            0.0625 in the paper's section 4.2. Another function whatever the input's mean, so nothing is centred.

    Raises:
        OptionError: no such mode; `fold_bias` is no bool, or asked for together with "parametrize"; `fraction` isn't in
            (0, 1], or asked for together with an option that keeps the function.
    """

    mode: str = "fold"
    fold_bias: bool = False
    fraction: float = 1.0
    label: ClassVar[str] = "RMSNorm"

    def __post_init__(self) -> None:
        if self.mode not in ("fold", "parametrize"):
            raise OptionError(f"RMS: mode must be fold or parametrize, not {self.mode!r}.")
        if not isinstance(self.fold_bias, bool):
            raise OptionError(f"RMS: fold_bias must be True or False, not {self.fold_bias!r}.")
        if self.fold_bias and self.mode == "parametrize":
            raise OptionError("RMS: fold_bias writes to weights, which mode='parametrize' doesn't. Choose one of them.")
        require_number("RMS", "fraction", self.fraction, above=0.0, at_most=1.0)
        if self.fraction < 1 and (self.fold_bias or self.mode != "fold"):
            raise OptionError("RMS: fraction below 1 is another function, which mode and fold_bias can't keep.")

    @property
    def centring(self) -> str | None:
        return self.mode if self.fraction == 1 else None

    def build(self, facts: NormFacts, gain: nn.Parameter | None, shift: nn.Parameter | None, like: Tensor) -> RMSNorm:
        if self.fraction < 1:
            return PartialRMSNorm(facts, "prms", gain, shift, self.fraction)
        return RMSNorm(facts, self.name, gain, shift)

    def reason_to_keep(self, facts: NormFacts) -> str | None:
        return super().reason_to_keep(facts) if self.fraction == 1 else None

    def loss(self, facts: NormFacts) -> str | None:
        if self.fraction < 1:
            return f"the root mean square is estimated on the first {self.fraction:.4g} of the channels"
        if facts.kind != "layer":
            return f"another function than {facts.kind}'s"
        return "the mean of the norm's input is no longer removed"
