"""Norm schemes that remove the input's variance from norms (fixed, none), or their parameters (folded)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from ..core.registry import NORMS
from ..core.scheme import require_number
from ..runtime.edits import Call
from ..runtime.fixed import FixedNorm, NoNorm
from ..runtime.norms import AffineNorm, NormFacts
from .norm_schemes import Elementwise, Norm


@NORMS.register("fixed")
@dataclass(frozen=True)
class Fixed(Elementwise):
    """Fixed norm: LayerNorm or RMSNorm whose 1/sigma is a constant, so that an affine map of each channel is left.

    `gain * (x - mean(x)) + shift`, without the mean if it replaces an RMSNorm. The constant is in the gain. It is
    measured on calibration data, as the median of 1/sigma over tokens; then a repair fits gain and shift of each norm.
    So `calibration=` is needed, or `init="reset"` to train from scratch, with gains that start at 1.

    A stack's last norm is kept unless `only` names it: it sets the scale of the outputs, and fixing it costs most. The
    approach is from LayerNorm-free GPT-2s (arXiv:2409.13710, arXiv:2507.02559); there, training replaces the fit.

    A first token that is much larger than the others (an attention sink) does no harm if it is the same in all
    sequences. If it varies, a constant doesn't serve it: the repair's report then says at which norms, and by how much.
    Keep these norms, start every sequence with the same token, or set a bound.

    Args:
        bound: the constant is for tokens whose size at the norm is at most so many times the median (1 or more); larger
            tokens are divided by their own size, as before. Language models of over 100M parameters need it: a sink is
            100 times as large as other tokens there, and a gated MLP squares what is too large. With 1.5 SmolLM2-135M's
            norms are linear for 98 % of the tokens. None: no bound.
        shift: add a shift, which the repair fits, if the replaced norm has none (Llama's). False: no new shift, so that
            experts, which take no bias, can take the norm over (`WithoutNorms`).

    Raises:
        OptionError: `bound` is below 1; or, when a model is patched, there is no calibration data.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> config = GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=64, bos_token_id=0, eos_token_id=1)
        >>> model = GPT2LMHeadModel(config)
        >>> from hfpatch import patch_model, sample_batches
        >>> few = sample_batches(model, sequences=8, length=16)
        >>> patch_model(model, norm="fixed", calibration=few).transformer.h[0].ln_1
        FixedNorm(16, ...)
    """

    shift: bool = True
    bound: float | None = None
    also_called: ClassVar[tuple[str, ...]] = ("static", "constant", "affine")
    component: ClassVar[type[AffineNorm]] = FixedNorm
    planner: ClassVar[str] = "hfpatch.planners.norm_folds:plan_fixed"
    needs_calibration: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.bound is not None:
            require_number(type(self).__name__, "bound", self.bound, above=math.nextafter(1.0, 0.0))

    def remaining_facts(self, facts: NormFacts) -> NormFacts:
        found = super().remaining_facts(facts)
        return found if self.shift else replace(found, shift=facts.shift)

    def call(self, facts: NormFacts, old: nn.Module | None) -> Call:
        return _fixed_call(super().call(facts, old), facts.kind == "layer")

    def module_options(self) -> dict[str, Any]:
        return {} if self.bound is None else {"bound": self.bound}

    def reason_to_keep(self, facts: NormFacts) -> str | None:
        if not facts.shape:
            return "takes inputs of any size, so there is no gain to hold the constant"
        if facts.kind in ("layer", "rms"):
            return None
        if facts.kind == FixedNorm.kind:
            return "is fixed already; norm='folded' folds it"
        return f"has no variance to fix: it is neither LayerNorm nor RMSNorm ({facts.kind})"

    def loss(self, facts: NormFacts) -> str | None:
        most = "" if self.bound is None else f", up to {self.bound:g} times its median"
        return f"the scale of its input is taken to be a constant{most}"


@NORMS.register("none")
@dataclass(frozen=True)
class WithoutNorms(Fixed):
    """No norms: fixed norms (`Fixed`), which are then folded into the layers that read them (`Folded`).

    If a norm's output is also read otherwise (by a residual connection in post-norm models, or by a function that isn't
    linear), it stays a fixed norm, and the plan says so.

    Raises:
        OptionError: when a model is patched without calibration data.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> config = GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=64, bos_token_id=0, eos_token_id=1)
        >>> model = GPT2LMHeadModel(config)
        >>> from hfpatch import patch_model, sample_batches
        >>> few = sample_batches(model, sequences=8, length=16)
        >>> patch_model(model, norm="none", calibration=few).transformer.h[0].ln_1
        NoNorm()
    """

    also_called: ClassVar[tuple[str, ...]] = ("normless", "identity")
    planner: ClassVar[str] = "hfpatch.planners.norm_folds:plan_without_norms"
    folds: ClassVar[bool] = True

    def call(self, facts: NormFacts, old: nn.Module | None) -> Call:
        """The call of the fixed norm that is folded afterwards."""
        return Fixed(self.shift, self.bound).call(facts, old)


@NORMS.register("folded")
@dataclass(frozen=True)
class Folded(Norm):
    """Norms of the same kind without parameters: gain and shift are folded into the layers that read the norms.

    For a linear map W, b that reads `gain * h + shift`: W' = W diag(gain), b' = b + W shift. A fixed norm goes
    altogether, except for its bound: W' = W diag(gain) (I - 11'/d) takes its mean over as well. The function stays the
    same. This is done if only linear maps read the norm; a map without a bias gets a bias if the norm has a shift.
    FlashNorm (arXiv:2407.09577) does it for RMSNorm. A norm whose output the base model returns is kept unless `only`
    names it.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16))
        >>> from hfpatch import patch_model
        >>> patch_model(model, norm="folded").transformer.h[0].ln_1.weight is None
        True
    """

    also_called: ClassVar[tuple[str, ...]] = ("fold", "flashnorm", "weightless")
    planner: ClassVar[str] = "hfpatch.planners.norm_folds:plan_folded"
    folds: ClassVar[bool] = True
    label: ClassVar[str] = "norm"

    @property
    def turn(self) -> int:
        return 0

    def call(self, facts: NormFacts, old: nn.Module | None) -> Call:
        """The call of a norm of the same kind, without gain and shift; of a fixed norm without a bound, `NoNorm`."""
        kept = replace(facts, gain=None, shift=None, offset=0.0)
        if not isinstance(old, FixedNorm):
            return NORMS[facts.kind]().call_with(kept, old)
        if old.bound is None:
            return Call.of(NoNorm)
        return _fixed_call(Fixed(bound=old.bound).call_with(kept, old), old.mean)

    def reason_to_keep(self, facts: NormFacts) -> str | None:
        if facts.kind not in NORMS or facts.kind == "batch":
            return f"norms of the kind {facts.kind} aren't folded"
        if facts.channels_first or len(facts.shape) != 1:
            return "it normalises other axes than the last"
        return None if facts.gain or facts.shift else "has no gain and no shift"

    def loss(self, facts: NormFacts) -> str | None:
        return None


def _fixed_call(call: Call, mean: bool) -> Call:
    return call if mean else replace(call, kwargs=(*call.kwargs, ("mean", False)))
