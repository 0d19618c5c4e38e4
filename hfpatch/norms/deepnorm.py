"""DeepNorm (Wang et al. 2022, "DeepNet: Scaling Transformers to 1,000 Layers", arXiv:2203.00555)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..errors import OptionError
from ..registry import NORMS
from ..scheme import require_number
from .detect import NormFacts
from .scheme import Norm


@dataclass(frozen=True)
class Depth:
    """Sublayers (residual branches) of the stack that a branch is in, and of the decoder that reads it, if one does."""

    sublayers: int
    decoder_sublayers: int = 0


@NORMS.register("deepnorm")
@dataclass(frozen=True)
class DeepNorm(Norm):
    """LN(a x + f(x)) in every residual branch f, in place of LN(x + f(x)) or x + f(LN(x)).

    With N encoder layers of two branches and M decoder layers of three (Wang et al. 2022, arXiv:2203.00555, fig. 2):

        model                     a                   b
        encoder or decoder only   (2N)^(1/4)          (8N)^(-1/4)
        encoder-decoder: encoder  .81(N^4 M)^(1/16)   .87(N^4 M)^(-1/16)
                         decoder  (3M)^(1/4)          (12M)^(-1/4)

    a weighs the stream in every forward. b scales weights once, with `init="reset"`: those of feed-forward networks
    (gates and experts included, routers not), of values and of outputs of attentions, their biases start at zero;
    queries and keys stay as the model has them. The paper draws them by Xavier's rule with gain b (1 for queries and
    keys); here the model's own initial values are multiplied by b, so `init="reset"` is for models just built.

    Post-norm models are changed by LN_eps(a x + f(x)) = LN_(eps/a^2)(x + f(x)/a): a gain on the branch and a smaller
    eps. In pre-norm models the norm moves behind the sum; the stack's last norm stays.

    Args:
        alpha, beta: a and b for all stacks, instead of the table's.
        preserve: for trained post-norm models: output projections are multiplied by a and eps by a^2, so that the model
            starts as the same function.

    Raises:
        OptionError: an option outside its domain.
    """

    alpha: float | None = None
    beta: float | None = None
    preserve: bool = False
    label: ClassVar[str] = "DeepNorm"
    branchwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.alpha is not None:
            require_number("DeepNorm", "alpha", self.alpha, above=0.0)
        if self.beta is not None:
            require_number("DeepNorm", "beta", self.beta, above=0.0)
        if not isinstance(self.preserve, bool):
            raise OptionError(f"DeepNorm: preserve must be True or False, not {self.preserve!r}.")

    def gains(self, depth: Depth) -> tuple[float, float]:
        """(a, b) of a stack; layers may be any number of branches, so depths are counted in those."""
        if depth.decoder_sublayers:
            n, m = depth.sublayers / 2, depth.decoder_sublayers / 3
            alpha, beta = 0.81 * (n**4 * m) ** (1 / 16), 0.87 * (n**4 * m) ** (-1 / 16)
        else:
            alpha, beta = depth.sublayers**0.25, (4 * depth.sublayers) ** -0.25
        return (alpha if self.alpha is None else self.alpha), (beta if self.beta is None else self.beta)

    def reason_to_keep(self, facts: NormFacts) -> str | None:
        return None if facts.kind in ("layer", "rms") else f"DeepNorm needs LayerNorm or RMSNorm, not {facts.kind}"
