"""RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import OptionError
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
    the replaced norm's. It is the same function wherever the input's mean over the channels is zero, so everything that
    writes to the residual stream is centred first, wherever that leaves the model's outputs as they are. Hidden states
    that the model records (`output_hidden_states=True`) lose their mean.

    Args:
        mode: "fold" subtracts the mean from the weights: an RMSNorm model, whose training takes another course than the
            LayerNorm model's. "parametrize" leaves the weights and centres each branch's output in every forward, so
            that training follows the LayerNorm model's trajectory.
        fold_bias: move the shift into the linear layers that read the norm, where nothing else does.

    Raises:
        OptionError: no such mode; `fold_bias` is no bool, or asked for together with "parametrize".
    """

    mode: str = "fold"
    fold_bias: bool = False
    label: ClassVar[str] = "RMSNorm"

    def __post_init__(self) -> None:
        if self.mode not in ("fold", "parametrize"):
            raise OptionError(f"RMS: mode must be fold or parametrize, not {self.mode!r}.")
        if not isinstance(self.fold_bias, bool):
            raise OptionError(f"RMS: fold_bias must be True or False, not {self.fold_bias!r}.")
        if self.fold_bias and self.mode == "parametrize":
            raise OptionError("RMS: fold_bias writes to weights, which mode='parametrize' doesn't. Choose one of them.")

    @property
    def centring(self) -> str:
        return self.mode

    def build(self, facts: NormFacts, gain: nn.Parameter | None, shift: nn.Parameter | None, like: Tensor) -> RMSNorm:
        return RMSNorm(facts, self.name, gain, shift)

    def loss(self, facts: NormFacts) -> str | None:
        if facts.kind != "layer":
            return f"another function than {facts.kind}'s"
        return "the mean of the norm's input is no longer removed"
