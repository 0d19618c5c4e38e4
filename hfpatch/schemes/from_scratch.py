"""Schemes for training from scratch: placements (where the norm of a residual branch is), DeepNorm and BatchNorm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ..core.registry import NORMS, PLACEMENTS, Registry
from ..core.scheme import Scheme, require_number
from ..runtime.batch_norm import MaskedBatchNorm
from ..runtime.edits import Call
from ..runtime.norms import AffineNorm, NormFacts
from .norm_schemes import Norm


@dataclass(frozen=True)
class Placement(Scheme):
    """How a branch f with its norm meets the stream x. Norms keep their Parameters, branches everything."""

    registry: ClassVar[Registry] = PLACEMENTS
    planner: ClassVar[str] = "hfpatch.planners.branch_swaps:plan_placement"
    formula: ClassVar[str] = ""


PLACEMENTS.base = Placement


@PLACEMENTS.register("pre")
@dataclass(frozen=True)
class Pre(Placement):
    """Pre-norm, x + f(LN(x)): GPT-2, Llama; Xiong et al. 2020, arXiv:2002.04745. The stack needs a norm at its end."""

    also_called: ClassVar[tuple[str, ...]] = ("pre-norm", "pre-LN")
    formula: ClassVar[str] = "x + f(LN(x))"


@PLACEMENTS.register("post")
@dataclass(frozen=True)
class Post(Placement):
    """Post-norm, LN(x + f(x)): BERT; Vaswani et al. 2017, arXiv:1706.03762."""

    also_called: ClassVar[tuple[str, ...]] = ("post-norm", "post-LN")
    formula: ClassVar[str] = "LN(x + f(x))"


@PLACEMENTS.register("olmo2")
@dataclass(frozen=True)
class OLMo2(Placement):
    """x + LN(f(x)): OLMo 2; arXiv:2501.00656."""

    formula: ClassVar[str] = "x + LN(f(x))"


@PLACEMENTS.register("sandwich")
@dataclass(frozen=True)
class Sandwich(Placement):
    """x + LN2(f(LN(x))): CogView (arXiv:2105.13290), Gemma 2. LN2 is a new norm, named as LN with `_after` appended."""

    also_called: ClassVar[tuple[str, ...]] = ("peri-LN", "gemma2")
    formula: ClassVar[str] = "x + LN2(f(LN(x)))"


@dataclass(frozen=True)
class Depth:
    """Numbers of residual branches that DeepNorm's a and b depend on.

    Attributes:
        sublayers: branches of the stack.
        decoder_sublayers: for an encoder, branches of the decoder that reads it; else 0.
    """

    sublayers: int
    decoder_sublayers: int = 0


@NORMS.register("deepnorm")
@dataclass(frozen=True)
class DeepNorm(Norm):
    """DeepNorm: `LN(a x + f(x))` in every residual branch f, in place of `LN(x + f(x))` or `x + f(LN(x))`.

    With N encoder layers of two branches and M decoder layers of three (Wang et al. 2022, arXiv:2203.00555, fig. 2):

        model                     a                   b
        encoder or decoder only   (2N)^(1/4)          (8N)^(-1/4)
        encoder-decoder: encoder  .81(N^4 M)^(1/16)   .87(N^4 M)^(-1/16)
                         decoder  (3M)^(1/4)          (12M)^(-1/4)

    a multiplies the stream in every forward. b scales weights once, with `init="reset"`: those of feed-forward networks
    (gates and experts included, routers not) and of attention values and outputs, whose biases start at zero; queries
    and keys stay as they are. The paper draws these weights by Xavier's rule with gain b (1 for queries and keys); here
    the model's own initial values are multiplied by b, so `init="reset"` is for models just built.

    Post-norm models are changed by `LN_eps(a x + f(x)) = LN_(eps/a^2)(x + f(x)/a)`: a gain on the branch and a smaller
    eps. In pre-norm models the norm moves behind the sum; the stack's last norm stays.

    Args:
        alpha, beta: a and b for all stacks, instead of the table's.
        preserve: for trained post-norm models: output projections are multiplied by a and eps by a^2, so that the model
            starts as the same function.

    Raises:
        OptionError: an option is outside its domain.
    """

    also_called: ClassVar[tuple[str, ...]] = ("deepnet",)
    alpha: float | None = None
    beta: float | None = None
    preserve: bool = False
    planner: ClassVar[str] = "hfpatch.planners.branch_swaps:plan_deepnorm"
    label: ClassVar[str] = "DeepNorm"
    places: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.alpha is not None:
            require_number("DeepNorm", "alpha", self.alpha, above=0.0)
        if self.beta is not None:
            require_number("DeepNorm", "beta", self.beta, above=0.0)

    def gains(self, depth: Depth) -> tuple[float, float]:
        """(a, b) of a stack; depths are counted in branches, since not all layers have the same number of them."""
        if depth.decoder_sublayers:
            n, m = depth.sublayers / 2, depth.decoder_sublayers / 3
            alpha, beta = 0.81 * (n**4 * m) ** (1 / 16), 0.87 * (n**4 * m) ** (-1 / 16)
        else:
            alpha, beta = depth.sublayers**0.25, (4 * depth.sublayers) ** -0.25
        return (alpha if self.alpha is None else self.alpha), (beta if self.beta is None else self.beta)

    def call(self, facts: NormFacts, old: nn.Module | None) -> Call:
        """The call of a norm of the same kind."""
        return NORMS[facts.kind]().call(facts, old)

    def reason_to_keep(self, facts: NormFacts) -> str | None:
        return None if facts.kind in ("layer", "rms") else f"DeepNorm needs LayerNorm or RMSNorm, not {facts.kind}"


@NORMS.register("batch")
@dataclass(frozen=True)
class BatchNorm(Norm):
    """Batch normalisation per channel, over all positions of the batch that aren't padding.

    `(x - mean_c) / sqrt(var_c + eps) * gain + shift`, Ioffe & Szegedy 2015, arXiv:1502.03167. For encoders: in a causal
    stack batch statistics would leak later positions into earlier ones, so such stacks keep their norms, and a causal
    model is refused. Padding is read from the attention mask of the block around a norm; in models that take a mask,
    norms outside of any block stay. The running averages start at mean 0 and variance 1: before training, eval mode
    passes `x * gain + shift` on.

    Args:
        momentum: weight of the newest batch in the running averages.

    Raises:
        OptionError: momentum isn't a number in (0, 1].
    """

    also_called: ClassVar[tuple[str, ...]] = ("bn",)
    momentum: float = 0.1
    component: ClassVar[type[AffineNorm]] = MaskedBatchNorm
    planner: ClassVar[str] = "hfpatch.planners.batch_norm_swaps:plan_batch_norms"
    label: ClassVar[str] = "BatchNorm"

    def __post_init__(self) -> None:
        require_number("BatchNorm", "momentum", self.momentum, above=0.0, at_most=1.0)

    def reason_to_keep(self, facts: NormFacts) -> str | None:
        if len(facts.shape) != 1:
            return "it normalises other axes than the last"
        return super().reason_to_keep(facts)

    def loss(self, facts: NormFacts) -> str | None:
        return "statistics are taken over the batch instead of each position; running averages need training"
