"""Dynamic Tanh, DyT (Zhu et al. 2025, arXiv:2503.10622, eq. 2)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..errors import OptionError, UnsupportedError
from ..registry import NORMS
from ..scheme import require_number
from .detect import NormFacts
from .scheme import AffineNorm, Norm

_SLOPES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0)  # alpha times the input's rms
_FACTORS = (0.6, 0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.2, 1.3, 1.5)
# (width of the stream, alpha0 of attentions' norms, of the others): LLaMA of the paper, up to 70B
_LLM = ((1024, 1.0, 1.0), (2048, 1.0, 0.5), (4096, 0.8, 0.2), (5120, 0.6, 0.15), (8192, 0.2, 0.05))


def llm_alpha(width: int, attention: bool) -> float:
    """The paper's alpha0 of a language model: at its widths the table's, between two interpolated in log(width) and
    log(alpha0), beyond the first and the last theirs.

    Args:
        width: of the residual stream.
        attention: whether the norm is that of an attention's branch; feed-forward and last norms are not.
    """
    known = [(row[0], row[1] if attention else row[2]) for row in _LLM]
    width = min(max(width, known[0][0]), known[-1][0])
    (low, start), (high, end) = next(pair for pair in pairwise(known) if width <= pair[1][0])
    if width in (low, high):
        return start if width == low else end
    return start * (end / start) ** (math.log(width / low) / math.log(high / low))


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

    def __getattr__(self, name: str) -> Any:
        if name in AffineNorm.names:  # some hosts read the dtype of their norm's weight
            name = self.names[AffineNorm.names.index(name)]
        return super().__getattr__(name)

    def normalise(self, h: Tensor) -> Tensor:
        # 1 - 2 sigmoid(-2 u) takes a CPU a fifth of the time, but is off by 1e-7 where u is small, as repairs make it
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
        alpha: starting value of the learned scalar; the paper's default outside LLMs is 0.5. "llm" is the paper's way
            to train a language model from scratch, with `init="reset"` only: the starting value hangs on the stream's
            width and on whether the norm is that of an attention's branch,

                width                       1024   2048   4096   5120   8192
                norms of attentions            1      1     .8     .6     .2
                other norms, the last too      1     .5     .2    .15    .05

            between these interpolated on log-log axes, beyond them as at the nearest; and the output of the token
            embedding is multiplied by a learned scalar, its `stream_scale`, that starts at the root of the width (of
            the whole model, whatever `only` and `keep` choose; not where the model multiplies it itself, as Gemma).
            Pre-norm decoders are what the paper has. In post-norm models LN(x + f(x)) is the norm of f; an
            encoder-decoder has two scales; whatever mixes positions, as Mamba does, counts as an attention.

    Raises:
        OptionError: alpha is neither a positive finite number nor "llm".
    """

    alpha: float | str = 0.5
    label: ClassVar[str] = "DynamicTanh"

    def __post_init__(self) -> None:
        if isinstance(self.alpha, str) and self.alpha != "llm":
            raise OptionError(f"DyT: alpha must be a number in (0, inf), not {self.alpha!r:.80}; or the word 'llm'.")
        if self.alpha != "llm":
            require_number("DyT", "alpha", self.alpha, above=0.0)

    @property
    def by_branch(self) -> bool:
        return self.alpha == "llm"

    def at(self, attention: bool, width: int) -> tuple[Norm, str | None]:
        if not self.by_branch:
            return self, None
        alpha = llm_alpha(width, attention)
        return replace(self, alpha=alpha), f"alpha0 = {alpha:.4g}" + (", norm of an attention" if attention else "")

    def build(
        self, facts: NormFacts, gain: nn.Parameter | None, shift: nn.Parameter | None, like: Tensor
    ) -> DynamicTanh:
        if isinstance(self.alpha, str):
            raise UnsupportedError(f"DyT(alpha={self.alpha!r}) starts each norm of a model in its own way: build at().")
        return DynamicTanh(facts, self.name, gain, shift, self.alpha, like)

    def loss(self, facts: NormFacts) -> str | None:
        return "the scale of its input isn't removed; on trained weights DyT needs repair (calibration=) or training"
