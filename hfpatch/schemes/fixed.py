"""Norm schemes without a variance of the input: fixed norms, whose scale is a constant."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import nn

from ..core.registry import NORMS
from ..runtime.edits import Call
from ..runtime.fixed import FixedNorm
from ..runtime.norms import AffineNorm, NormFacts
from .norms import Elementwise


@NORMS.register("fixed")
@dataclass(frozen=True)
class Fixed(Elementwise):
    """Fixed norm: LayerNorm or RMSNorm whose 1/sigma is a constant, so that an affine map of each channel is left.

    `gain * (x - mean(x)) + shift`, without the mean where an RMSNorm was. The constant is in the gain. It is measured
    on calibration data, as the median of 1/sigma over tokens; then a repair fits gain and shift of each norm. So
    `calibration=` is needed, or `init="reset"` to train from scratch, where the gain starts at 1.

    A stack's last norm is kept unless `only` names it: it sets the scale of the outputs, and fixing it costs most. The
    approach is that of LayerNorm-free GPT-2s (arXiv:2409.13710, arXiv:2507.02559), where training replaces the fit.

    Raises:
        OptionError: when a model is patched without calibration data.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> config = GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=64, bos_token_id=0, eos_token_id=1)
        >>> model = GPT2LMHeadModel(config)
        >>> from functools import partial
        >>> from hfpatch import patch_model, sample_batches
        >>> few = partial(sample_batches, sequences=8, length=16)
        >>> patch_model(model, norm="fixed", calibration=few).transformer.h[0].ln_1
        FixedNorm(16, ...)
    """

    also_called: ClassVar[tuple[str, ...]] = ("static", "constant", "affine")
    component: ClassVar[type[AffineNorm]] = FixedNorm
    planner: ClassVar[str] = "hfpatch.swap.fixed:plan_fixed"
    needs_calibration: ClassVar[bool] = True

    def call(self, facts: NormFacts, old: nn.Module | None) -> Call:
        call = super().call(facts, old)
        return call if facts.kind == "layer" else replace(call, kwargs=(*call.kwargs, ("mean", False)))

    def reason_to_keep(self, facts: NormFacts) -> str | None:
        if facts.kind in ("layer", "rms"):
            return None
        return (
            super().reason_to_keep(facts)
            or f"has no variance to fix: it is neither LayerNorm nor RMSNorm ({facts.kind})"
        )

    def loss(self, facts: NormFacts) -> str | None:
        return "the scale of its input is taken to be a constant"
