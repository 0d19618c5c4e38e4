"""What counts as a norm is decided by what a module computes: none is missed, nothing else is taken for one."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from norm_kinds import Kind, every_kind
from tiny_models import changes, fingerprint, tiny
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.convnextv2.modeling_convnextv2 import ConvNextV2GRN
from transformers.models.dinov2.modeling_dinov2 import Dinov2LayerScale
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from hfpatch.errors import NothingToPatchError
from hfpatch.plan import plan_patch
from hfpatch.runtime.norms import NormFacts
from hfpatch.sites.norms import describe

D_ = 16


def facts(kind: Kind) -> NormFacts:
    return NormFacts(kind.kind, kind.shape, kind.eps, kind.channels_first, kind.offset, kind.gain, kind.shift)


@every_kind
def test_the_facts_of_every_kind(kind: Kind) -> None:
    assert describe(kind.make()) == facts(kind)


@every_kind
@pytest.mark.parametrize(
    "prepare",
    [
        lambda m: m.bfloat16(),
        lambda m: m.half(),
        lambda m: m.double(),
        lambda m: m.requires_grad_(False),
        lambda m: m.eval(),
        lambda m: m.to("meta"),
    ],
    ids=["bfloat16", "half", "double", "frozen", "eval", "meta"],
)
def test_facts_dont_depend_on_the_state(kind: Kind, prepare: Callable[[nn.Module], nn.Module]) -> None:
    assert describe(prepare(kind.make())) == facts(kind)


@every_kind
def test_facts_under_any_default_device_and_dtype(kind: Kind) -> None:
    """transformers loads models in such contexts."""
    with torch.device("meta"):
        module = kind.make()
        assert describe(module) == facts(kind)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert describe(kind.make()) == facts(kind)
    finally:
        torch.set_default_dtype(default)
    with torch.inference_mode():
        assert describe(kind.make()) == facts(kind)


@every_kind
def test_describing_changes_nothing_and_calls_no_hook(kind: Kind) -> None:
    module, called = kind.make(), []
    module.register_forward_hook(lambda *a: called.append("forward"))
    module.register_forward_pre_hook(lambda *a: called.append("pre"))
    random.random()
    before = fingerprint(module)
    describe(module)
    assert not changes(before, fingerprint(module))
    assert not called


# Norms under other names and with other parameter names


class TextbookNorm(nn.Module):
    def __init__(self, eps: float = 1e-5):
        super().__init__()
        self.g, self.b, self.e = nn.Parameter(torch.ones(D_)), nn.Parameter(torch.zeros(D_)), eps

    def forward(self, tokens: Tensor) -> Tensor:
        mean = tokens.mean(-1, keepdim=True)
        var = (tokens - mean).pow(2).mean(-1, keepdim=True)
        return (tokens - mean) * torch.rsqrt(var + self.e) * self.g + self.b


class ShiftOnly(TextbookNorm):
    def __init__(self, eps: float = 1e-5):
        super().__init__(eps)
        del self.g

    def forward(self, tokens: Tensor) -> Tensor:
        return F.layer_norm(tokens, (D_,), None, self.b, self.e)


class Swapped(TextbookNorm):
    """The parameter called b is the gain."""

    def forward(self, tokens: Tensor) -> Tensor:
        return F.layer_norm(tokens, (D_,), self.b, self.g, self.e)


class Doubled(nn.LayerNorm):
    """A subclass with arithmetic of its own: not LayerNorm's."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Renamed(nn.LayerNorm):
    """A subclass that changes nothing."""


@pytest.mark.parametrize("eps", [1e-3, 3e-5, 1e-8, 0.03, 0.3])
def test_eps_is_measured_where_no_attribute_states_it(eps: float) -> None:
    found = describe(TextbookNorm(eps))
    assert found is not None
    assert found.eps == pytest.approx(eps, rel=5e-3)
    assert (found.kind, found.gain, found.shift, found.offset) == ("layer", "g", "b", 0.0)


def test_parameters_are_told_apart_by_what_they_do() -> None:
    found = describe(Swapped())
    assert found is not None
    assert (found.gain, found.shift) == ("b", "g")
    found = describe(ShiftOnly())
    assert found is not None
    assert (found.gain, found.shift) == (None, "b")


def test_a_subclass_that_changes_nothing_is_a_layernorm() -> None:
    assert describe(Renamed(D_)) == NormFacts("layer", (D_,), 1e-5, gain="weight", shift="bias")


# What only looks like one


class EpsOutside(TextbookNorm):
    def forward(self, tokens: Tensor) -> Tensor:
        centred = tokens - tokens.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True).sqrt() + self.e) * self.g + self.b


class UnbiasedVariance(TextbookNorm):
    """The "annotated transformer" norm: divides by the unbiased deviation, eps outside."""

    def forward(self, tokens: Tensor) -> Tensor:
        mean, std = tokens.mean(-1, keepdim=True), tokens.std(-1, keepdim=True)
        return self.g * (tokens - mean) / (std + self.e) + self.b


class EpsOutsideRMS(nn.Module):
    def __init__(self, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(D_)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps)


class PartialRMS(EpsOutsideRMS):
    """pRMSNorm: the scale of the first half of the channels alone."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x[..., : D_ // 2].square().mean(-1, keepdim=True) + self.eps).sqrt()


class L2Norm(EpsOutsideRMS):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * F.normalize(x, dim=-1)


class PlainL2Norm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1)


class L1Norm(EpsOutsideRMS):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.abs().mean(-1, keepdim=True) + self.eps)


class Scale(EpsOutsideRMS):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class SoftmaxNorm(EpsOutsideRMS):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x.softmax(-1)


class NormWithResidual(TextbookNorm):
    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + super().forward(tokens)


class ClampedNorm(TextbookNorm):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).clamp(-1, 1)


class SequenceNorm(TextbookNorm):
    """Over time instead of channels."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward((tokens - tokens.mean(1, keepdim=True)) / (tokens.var(1, keepdim=True) + self.e).sqrt())


class BatchStatistics(TextbookNorm):
    def forward(self, tokens: Tensor) -> Tensor:
        return (tokens - tokens.mean()) / (tokens.var() + self.e).sqrt() * self.g + self.b


class MeanOnly(TextbookNorm):
    def forward(self, tokens: Tensor) -> Tensor:
        return (tokens - tokens.mean(-1, keepdim=True)) * self.g + self.b


class SquaredGain(TextbookNorm):
    def forward(self, tokens: Tensor) -> Tensor:
        return F.layer_norm(tokens, (D_,), self.g**2, self.b, self.e)


class GatedNorm(nn.LayerNorm):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x * torch.sigmoid(gate))


class ScaleNorm(nn.Module):
    """One gain for all channels (Nguyen & Salazar 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.g * F.normalize(x, dim=-1)


NOT_NORMS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(D_),
    "BatchNorm2d without statistics": lambda: nn.BatchNorm2d(D_, track_running_stats=False),
    "GroupNorm": lambda: nn.GroupNorm(4, D_),
    "GroupNorm of one": lambda: nn.GroupNorm(1, D_),
    "InstanceNorm": lambda: nn.InstanceNorm1d(D_, affine=True),
    "LocalResponseNorm": lambda: nn.LocalResponseNorm(2),
    "Linear": lambda: nn.Linear(D_, D_),
    "Linear without bias": lambda: nn.Linear(D_, D_, bias=False),
    "Embedding": lambda: nn.Embedding(10, D_),
    "Conv1d": lambda: nn.Conv1d(D_, D_, 1, groups=D_),
    "PReLU": lambda: nn.PReLU(D_),
    "Identity": nn.Identity,
    "Dropout": nn.Dropout,
    "ReLU": nn.ReLU,
    "LayerScale": lambda: Dinov2LayerScale(tiny_dinov2()),
    "GRN": lambda: ConvNextV2GRN(D_),
    **{
        cls.__name__: cls
        for cls in (
            EpsOutside,
            UnbiasedVariance,
            NormWithResidual,
            ClampedNorm,
            SequenceNorm,
            BatchStatistics,
            MeanOnly,
            SquaredGain,
            ScaleNorm,
            PlainL2Norm,
        )
    },
    **{
        f"{cls.__name__}({eps:g})": lambda cls=cls, eps=eps: cls(eps)
        for cls in (PartialRMS, L2Norm, L1Norm, Scale, SoftmaxNorm)
        for eps in (1e-5,)
    },
    **{f"EpsOutsideRMS({eps:g})": lambda eps=eps: EpsOutsideRMS(eps) for eps in (0.1, 1e-3, 1e-5, 1e-8)},
    "Doubled": lambda: Doubled(D_),
    "GatedNorm": lambda: GatedNorm(D_),
    "a gate that may be left out": lambda: Qwen3NextRMSNormGated(D_),
    "Sequential": lambda: nn.Sequential(nn.LayerNorm(D_)),
}


def tiny_dinov2():
    from transformers import Dinov2Config

    return Dinov2Config(hidden_size=D_)


@pytest.mark.parametrize("make", NOT_NORMS.values(), ids=NOT_NORMS)
def test_not_a_norm(make: Callable[[], nn.Module]) -> None:
    assert describe(make()) is None


def test_a_norm_by_arithmetic_whatever_its_name() -> None:
    """Llama4's "L2Norm" is x / sqrt(mean(x^2) + eps), an RMSNorm without gain."""
    found = describe(Llama4TextL2Norm(eps=1e-6))
    assert found is not None
    assert (found.kind, found.eps, found.gain, found.shift) == ("rms", 1e-6, None, None)


# In a plan


def test_a_norm_with_other_arithmetic_is_listed_and_kept() -> None:
    model = tiny("bert")
    model.encoder.layer[0].output.LayerNorm = Doubled(32)
    rows = {row.module: row for row in plan_patch(model, norm="rms").rows}
    row = rows["encoder.layer.0.output.LayerNorm"]
    assert row.action == "keep"
    assert row.reason == "not LayerNorm's arithmetic: its output isn't gain * normalised input + shift"
    assert sum(row.action == "replace" and row.kind == "norm" for row in rows.values()) == 4


def test_modules_that_are_no_norms_are_in_no_plan() -> None:
    model = tiny("bert")
    for make in NOT_NORMS.values():
        model.add_module(f"extra_{len(model._modules)}", make())
    named = {row.module for row in plan_patch(model, norm="dyt").rows}
    extras = [row for row in plan_patch(model, norm="dyt").rows if row.module.startswith("extra_")]
    assert {name for name in named if not name.startswith("extra_")} == {
        "embeddings.LayerNorm",
        *(f"encoder.layer.{i}.{part}.LayerNorm" for i in (0, 1) for part in ("attention.output", "output")),
    }
    # the two LayerNorm subclasses are listed as kept; so is the LayerNorm inside the Sequential, as what it is
    assert {row.now.partition("(")[0]: row.action for row in extras if row.action == "keep"} == {
        "Doubled": "keep",
        "GatedNorm": "keep",
    }


def test_a_torch_encoder_layer_keeps_its_norms() -> None:
    """Its fused path reads weight and bias of its norms itself."""
    model = tiny("bert")
    model.extra = nn.TransformerEncoderLayer(32, 4)
    rows = {row.module: row for row in plan_patch(model, norm="rms").rows}
    assert rows["extra.norm1"].reason == "torch's TransformerEncoderLayer reads its weights in a fused path"


def test_a_model_without_layernorm() -> None:
    with pytest.raises(NothingToPatchError, match=r"norm='rms'.*already"):
        plan_patch(tiny("llama"), norm="rms")
    model = tiny("gpt2")
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.LayerNorm):
                setattr(parent, name, nn.Identity())
    with pytest.raises(NothingToPatchError, match=r"GPT2Model.*norm='rms'"):
        plan_patch(model, norm="rms")
