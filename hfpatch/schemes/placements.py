"""Placement schemes: where the norm of a residual branch is. They change the function (training from scratch)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..core.registry import PLACEMENTS, Registry
from ..core.scheme import Scheme


@dataclass(frozen=True)
class Depth:
    """Numbers of residual branches that DeepNorm's a and b depend on.

    Attributes:
        sublayers: branches of the stack.
        decoder_sublayers: for an encoder, branches of the decoder that reads it; else 0.
    """

    sublayers: int
    decoder_sublayers: int = 0


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
