"""What counts as a norm is decided by what a module computes: none is missed, nothing else is taken for one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from norm_kinds import Kind, every_kind
from tiny_models import changes, fingerprint, tiny
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.convnextv2.modeling_convnextv2 import ConvNextV2GRN
from transformers.models.dinov2.modeling_dinov2 import Dinov2LayerScale
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from hfpatch.errors import NothingToPatchError
from hfpatch.plan import plan_patch
from hfpatch.runtime.norms import NormFacts
from hfpatch.sites.norm_facts import describe

D_ = 16


def facts(kind: Kind) -> NormFacts:
    return NormFacts(kind.kind, kind.shape, kind.eps, kind.channels_first, kind.offset, kind.gain, kind.shift)


STATES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "as it is": lambda m: m,
    "bfloat16": lambda m: m.bfloat16(),
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "frozen": lambda m: m.requires_grad_(False),
    "eval": lambda m: m.eval(),
    "meta": lambda m: m.to("meta"),
}


@every_kind
def test_the_facts_of_every_kind_in_every_state_and_context(kind: Kind) -> None:
    """Read without a change, and without calling a user's hook."""
    for name, prepare in STATES.items():
        module = prepare(kind.make())
        module.register_forward_hook(lambda *args: pytest.fail("a user's hook ran"))
        module.register_forward_pre_hook(lambda *args: pytest.fail("a user's hook ran"))
        before = fingerprint(module)
        assert describe(module) == facts(kind), name
        assert not changes(before, fingerprint(module)), name
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # transformers loads models in such contexts
    try:
        with torch.device("meta"), torch.inference_mode():
            assert describe(kind.make()) == facts(kind)
        assert describe(kind.make()) == facts(kind)
    finally:
        torch.set_default_dtype(default)


# Norms under other names and with other parameter names


def layer(x: Tensor, g: Tensor | None, b: Tensor | None, e: float) -> Tensor:
    return F.layer_norm(x, (D_,), g, b, e)


class FormulaNorm(nn.Module):
    """A formula of x, a gain g, a shift b (None where it isn't among the parameters) and e."""

    def __init__(self, formula: Callable[..., Tensor] = layer, parameters: str = "gb", e: float = 1e-5, size: int = D_):
        super().__init__()
        for name in parameters:
            self.register_parameter(name, nn.Parameter(torch.full((size,), float(name == "g"))))
        self.formula, self.e = formula, e

    def forward(self, tokens: Tensor) -> Tensor:
        return self.formula(tokens, self._parameters.get("g"), self._parameters.get("b"), self.e)


class Doubled(nn.LayerNorm):
    """A subclass with arithmetic of its own: not LayerNorm's."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Renamed(nn.LayerNorm):
    """A subclass that changes nothing."""


@pytest.mark.parametrize("eps", [1e-3, 3e-5, 1e-8, 0.03, 0.3])
def test_eps_is_measured_where_no_attribute_states_it(eps: float) -> None:
    found = describe(FormulaNorm(e=eps))
    assert found is not None
    assert found.eps == pytest.approx(eps, rel=5e-3)
    assert (found.kind, found.gain, found.shift, found.offset) == ("layer", "g", "b", 0.0)


def test_parameters_are_told_apart_by_what_they_do() -> None:
    found = describe(FormulaNorm(lambda x, g, b, e: layer(x, b, g, e)))
    assert found is not None
    assert (found.gain, found.shift) == ("b", "g")
    found = describe(FormulaNorm(parameters="b"))
    assert found is not None
    assert (found.gain, found.shift) == (None, "b")
    assert describe(Renamed(D_)) == NormFacts("layer", (D_,), 1e-5, gain="weight", shift="bias")


# What only looks like one


def mean(x: Tensor, dim: int = -1) -> Tensor:
    return x.mean(dim, keepdim=True)


def rms(x: Tensor, e: float) -> Tensor:
    return (mean(x.square()) + e).sqrt()


# name -> (parameters, formula)
FORMULAS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "eps outside of the root": ("gb", lambda x, g, b, e: (x - mean(x)) / (rms(x - mean(x), 0) + e) * g + b),
    "unbiased variance": ("gb", lambda x, g, b, e: g * (x - mean(x)) / (x.std(-1, keepdim=True) + e) + b),
    "with a residual": ("gb", lambda x, *rest: x + layer(x, *rest)),
    "clamped": ("gb", lambda *all_: layer(*all_).clamp(-1, 1)),
    "over time": ("gb", lambda x, g, b, e: layer((x - mean(x, 1)) / (x.var(1, keepdim=True) + e).sqrt(), g, b, e)),
    "statistics of the batch": ("gb", lambda x, g, b, e: (x - x.mean()) / (x.var() + e).sqrt() * g + b),
    "squared gain": ("gb", lambda x, g, b, e: layer(x, g**2, b, e)),
    "L2 without a gain": ("", lambda x, g, b, e: F.normalize(x, dim=-1)),
    "half of the channels' scale": ("g", lambda x, g, b, e: g * x / rms(x[..., : D_ // 2], e)),  # pRMSNorm
    "L2": ("g", lambda x, g, b, e: g * F.normalize(x, dim=-1)),
    "scale": ("g", lambda x, g, b, e: g * x),
}


def rms_eps_outside(x: Tensor, g: Tensor, b: None, e: float) -> Tensor:
    return g * x / (rms(x, 0) + e)


class GatedNorm(nn.LayerNorm):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x * torch.sigmoid(gate))


NOT_NORMS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(D_),
    "GroupNorm of one": lambda: nn.GroupNorm(1, D_),
    "InstanceNorm": lambda: nn.InstanceNorm1d(D_, affine=True),
    "Linear": lambda: nn.Linear(D_, D_),
    "Embedding": lambda: nn.Embedding(10, D_),
    "Conv1d": lambda: nn.Conv1d(D_, D_, 1, groups=D_),
    "Identity": nn.Identity,
    "LayerScale": lambda: Dinov2LayerScale(tiny_dinov2()),
    "GRN": lambda: ConvNextV2GRN(D_),
    **{name: lambda case=case: FormulaNorm(case[1], case[0]) for name, case in FORMULAS.items()},
    **{f"eps={e:g} outside": lambda e=e: FormulaNorm(rms_eps_outside, "g", e) for e in (0.1, 1e-3, 1e-5, 1e-8)},
    "one gain for all channels": lambda: FormulaNorm(FORMULAS["L2"][1], "g", size=1),
    "Doubled": lambda: Doubled(D_),
    "GatedNorm": lambda: GatedNorm(D_),
    "a gate that may be left out": lambda: Qwen3NextRMSNormGated(D_),
    "Sequential": lambda: nn.Sequential(nn.LayerNorm(D_)),
}


def tiny_dinov2():
    from transformers import Dinov2Config

    return Dinov2Config(hidden_size=D_)


# In a plan


def test_what_is_listed_and_kept_and_what_is_in_no_plan() -> None:
    model = tiny("bert")
    expected = {row.module for row in plan_patch(model, norm="dyt").rows} | {"extra_torch.norm1", "extra_torch.norm2"}
    model.encoder.layer[0].output.LayerNorm = Doubled(32)
    model.extra_torch = nn.TransformerEncoderLayer(32, 4)
    for make in NOT_NORMS.values():
        model.add_module(f"extra_{len(model._modules)}", make())
    rows = {row.module: row for row in plan_patch(model, norm="dyt").rows}
    kept = {row.now.partition("(")[0]: row for row in rows.values() if row.action == "keep"}
    assert set(kept) == {"Doubled", "GatedNorm", "LayerNorm"}
    reason = "not LayerNorm's arithmetic: its output isn't gain * normalised input + shift"
    assert kept["Doubled"].reason == rows["encoder.layer.0.output.LayerNorm"].reason == reason
    fused = "torch's TransformerEncoderLayer reads its weights in a fused path"
    assert kept["LayerNorm"].reason == rows["extra_torch.norm1"].reason == fused
    # the two LayerNorm subclasses are listed as kept; the LayerNorm inside the Sequential as what it is
    others = [row for name, row in rows.items() if name not in expected]
    assert sorted(row.now.partition("(")[0] for row in others) == ["Doubled", "GatedNorm", "LayerNorm"]


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
