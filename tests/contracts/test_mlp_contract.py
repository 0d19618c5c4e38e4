"""What MLP schemes promise besides what every scheme does (see test_contract.py), on many families. Each check has a
control: on something that was broken on purpose it must fail."""

from __future__ import annotations

import copy
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from sampled import slow_but
from tiny_models import (
    CONFIGS,
    changes,
    difference,
    fingerprint,
    inputs,
    outputs,
    patch,
    registered,
    reload,
    tiny,
    without_outcomes,
)
from torch import Tensor, nn

from hfpatch.checkpoint.patched_classes import patched_model_class
from hfpatch.core.registry import MLPS
from hfpatch.measure.quiet_forward import cast
from hfpatch.plan import plan_patch
from hfpatch.runtime.gated import GatedActivation, GatedLinear
from hfpatch.runtime.patch_errors import PatchError
from hfpatch.schemes.mlp_schemes import MLP, SCALES, SwiGLU
from hfpatch.sites.mlp_sites import find_mlps

KINDS = {  # activation -> families; those that tiny_models hasn't are of zoo.py
    "gelu": "gpt2 bert vit roberta bart whisper distilbert albert gptj timesformer wav2vec2 falcon",
    "relu": "opt t5",
    "quick_gelu": "clip",
}
FAMILIES = {family: kind for kind, families in KINDS.items() for family in families.split()}
HEADS = {"gpt2": "CausalLM", "opt": "CausalLM", "bart": "Seq2SeqLM", "vit": "ImageClassification"}
HEADS |= dict.fromkeys(("bert", "roberta"), "MaskedLM")
EXACT = {("geglu", "gelu"), ("swiglu", "quick_gelu"), ("reglu", "relu")}
EVERY = list(product(FAMILIES, MLPS))


@cache
def _made(family: str) -> tuple[Any, dict[str, Any]]:
    if family in CONFIGS:
        model: Any = tiny(family, f"AutoModelFor{HEADS[family]}" if family in HEADS else "AutoModel")
        return model, inputs(model)
    return zoo.tiny(family)


def make(family: str, dtype: torch.dtype = torch.float64) -> tuple[Any, dict[str, Any]]:
    """A tiny model of wide spread, and inputs of its dtype."""
    model, given = _made(family)
    return copy.deepcopy(model).to(dtype), cast(given, torch.device("cpu"), dtype)


def answer(model: nn.Module, given: dict[str, Any]) -> Tensor:
    """The first tensor that a model returns, in float64."""
    with torch.no_grad():
        result = model(**given)
    return next(value for value in result.values() if isinstance(value, Tensor) and value.is_floating_point()).double()


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def gated(model: nn.Module) -> list[GatedLinear]:
    return [module for module in model.modules() if isinstance(module, GatedLinear)]


def patched(family: str, dtype: torch.dtype = torch.float64, **request: Any) -> tuple[Any, dict[str, Any]]:
    model, given = make(family, dtype)
    return patch(model, **request), given


# --- the start --------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize(("family", "scheme"), slow_but(EVERY, 20))
def test_the_start_is_what_the_plan_says(family: str, scheme: str) -> None:
    model, given = make(family)
    before = answer(model, given)
    plan = plan_patch(model, mlp=scheme)
    exact = (scheme, FAMILIES[family]) in EXACT
    assert all((row.loss is None) == exact for row in plan.rows if row.becomes)
    assert len(gated(patch(model, mlp=scheme))) == sum(row.becomes is not None for row in plan.rows) > 0
    assert not any(isinstance(module, GatedLinear) for name, module in model.named_modules() if "head" in name)
    error = relative(answer(model, given), before)
    assert error <= 1e-12 if exact else error > 1e-6
    start = MLPS[scheme]().start(find_mlps(make(family)[0])[0].act)
    assert activation_error(family, scheme) <= start.error + 1e-6  # between the points where it was measured


def activation_error(family: str, scheme: str) -> float:
    """How much a patch changes at most in what the first of a model's activations gives."""
    model, given = make(family)
    first = []
    for _ in range(2):
        seen: list[Tensor] = []  # several, where layers share the module
        ours = [module for module in model.modules() if isinstance(module, GatedActivation)]
        act: Any = ours[0] if ours else find_mlps(model)[0].act
        hook = act.register_forward_hook(lambda *call, seen=seen: seen.append(call[-1]))
        answer(model, given)
        hook.remove()
        first.append(seen[0])
        patch(model, mlp=scheme)
    return float((first[1] - first[0]).abs().max())


def test_control_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """silu(x) for gelu(x), as a gate of W1 and an up bias of 1 would have it."""
    monkeypatch.setattr("hfpatch.schemes.mlp_schemes.SCALES", SCALES[:1])
    assert activation_error("gpt2", "swiglu") > 0.1


def test_control_the_up_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    ones = torch.ones
    monkeypatch.setattr("hfpatch.runtime.gated.torch.ones", lambda *size, **options: ones(*size, **options) * 0.9)
    model, given = make("gpt2")
    before = answer(model, given)
    assert relative(answer(patch(model, mlp="geglu"), given), before) > 1e-3


# --- active and trainable ---------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize(("family", "scheme"), slow_but(EVERY, 11))
def test_every_part_is_active_and_trained(family: str, scheme: str) -> None:
    model, given = patched(family, mlp=scheme)
    site = find_mlps(model)[0]
    before = answer(model, given)
    for parameter in gated(model)[0].parameters():
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter += torch.linspace(0.1, 0.6, parameter.numel(), dtype=parameter.dtype).view_as(parameter)
        assert relative(answer(model, given), before) > 1e-6
        with torch.no_grad():
            parameter.copy_(kept)
    assert relative(answer(model, given), before) == 0, "control: it is what was changed"
    result = next(value for value in model(**given).values() if isinstance(value, Tensor) and value.requires_grad)
    result.square().sum().backward()
    for linear in gated(model):
        assert all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in linear.parameters())
    assert site.kind == scheme


# --- fresh weights ----------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("family", "options", "gate", "last"),
    [
        ("gpt2", {"n_embd": 128, "initializer_range": 0.3}, 0.3, 0.3 / 2),  # the last one by 1 / sqrt(2 n_layer)
        ("bert", {"hidden_size": 128, "intermediate_size": 512, "initializer_range": 0.3}, 0.3, 0.3),
        ("opt", {"hidden_size": 128, "ffn_dim": 512, "word_embed_proj_dim": 128, "initializer_range": 0.3}, 0.3, 0.3),
        ("t5", {"d_model": 128, "d_ff": 512}, 128**-0.5, 512**-0.5),
    ],
)
def test_fresh_weights_start_as_the_host_starts_its_own(family: str, options: Any, gate: float, last: float) -> None:
    model = tiny(family, **options)
    sites = find_mlps(model)
    norms = {name: p.clone() for name, p in model.named_parameters() if "norm" in name.lower() or "attn" in name}
    patch(model, mlp="swiglu", init="reset")
    for site, linear in zip(sites, gated(model), strict=True):
        assert linear.gate.weight.std().item() == pytest.approx(gate, rel=0.05)
        assert linear.up.weight.std().item() == pytest.approx(gate, rel=0.05)
        assert model.get_submodule(site.last).weight.std().item() == pytest.approx(last, rel=0.05)
        assert linear.up.bias is None or linear.up.bias.abs().max() == 0
        assert (linear.up.bias is None) == (linear.gate.bias is None)
        assert not torch.equal(linear.gate.weight, linear.up.weight)
        width = linear.gate.weight.numel() // site.sizes[0]  # two thirds of the channels, rounded up to eight
        assert width % 8 == 0
        assert 0 <= width - 2 / 3 * site.sizes[1] < 8
    assert all(torch.equal(p, norms[name]) for name, p in model.named_parameters() if name in norms)


@pytest.mark.parametrize(
    ("scheme", "width"),
    [("swiglu:d_ff=40", 40), ("swiglu:ratio=0.5", 64), ("swiglu:bias=false", 88), ("geglu:d_ff=3", 3)],
)
def test_options_of_fresh_weights(scheme: str, width: int) -> None:
    model = patch(tiny("gpt2").to(torch.bfloat16), mlp=scheme, init="reset")
    linear, last = gated(model)[0], model.h[0].mlp.c_proj
    for module in (linear.up, linear.gate, last):
        assert module.weight.numel() == 32 * width
        assert module.weight.dtype == torch.bfloat16
        assert (module.bias is None) == ("false" in scheme)


# --- checkpoints and copies -------------------------------------------------------------------------------------


@pytest.mark.parametrize("init", ["auto", "reset"])
def test_from_config_builds_a_patched_model(init: str) -> None:
    model = patch(tiny("gpt2", n_embd=64, initializer_range=0.3), mlp="swiglu", init=init)
    host = type(tiny("gpt2"))
    torch.manual_seed(0)
    fresh = patched_model_class(host)._from_config(model.config).eval()
    assert {k: v.shape for k, v in fresh.state_dict().items()} == {k: v.shape for k, v in model.state_dict().items()}
    scale = 1.712 if init == "auto" else 1.0
    assert fresh.h[1].mlp.c_fc.gate.weight.std().item() == pytest.approx(0.3 * scale, rel=0.05)
    assert all(value.isfinite().all() for value in outputs(fresh))


def test_a_scheme_of_ones_own(tmp_path: Path) -> None:
    class TanhGLU(MLP):
        def activation(self, replaced: Any) -> nn.Module:
            return nn.Tanh()

    with registered(MLPS, "tanhglu", TanhGLU):
        model = patch(tiny("gpt2"), mlp="tanhglu", init="reset")
        assert type(model.h[0].mlp.act.act) is nn.Tanh
        assert difference(model, reload(model, tmp_path)) == 0
        with pytest.raises(PatchError, match=r"mlp='tanhglu'"):
            plan_patch(tiny("gpt2"), mlp="tanhglu")


# --- precision, adapters ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "bert", "opt"])
def test_a_half_precision_model_keeps_its_dtype_and_its_function(family: str) -> None:
    model, given = make(family, torch.bfloat16)
    before = answer(model, given)
    patch(model, mlp="reglu" if family == "opt" else "geglu")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.equal(answer(model, given), before)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_lora_on_gate_and_up_merges_exactly(family: str) -> None:
    peft = pytest.importorskip("peft")
    model, given = patched(family, mlp="swiglu")
    before = answer(model, given)
    config = peft.LoraConfig(target_modules=["gate", "up"], init_lora_weights=False, fan_in_fan_out=family == "gpt2")
    tuned = peft.get_peft_model(model, config).double().eval()
    assert sum("lora_A" in name for name, _ in tuned.named_parameters()) == 2 * len(gated(model))
    unmerged = answer(tuned, given)
    assert relative(unmerged, before) > 1e-3, "the adapter does nothing"
    assert relative(answer(tuned.merge_and_unload(), given), unmerged) <= 1e-9


# --- together with the rest of a patch --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "bert", "bart"])
@pytest.mark.parametrize(("norm", "pos"), [("rms", "rope"), ("derf", "alibi"), ("deepnorm", "nope"), ("prms", "rope")])
def test_the_order_of_patches_is_irrelevant(norm: str, pos: str, family: str) -> None:
    request = {"norm": "rms:fraction=0.25" if norm == "prms" else norm, "pos": pos, "mlp": "swiglu"}
    at_once, given = patched(family, **request)
    for order in (("mlp", "norm", "pos"), ("norm", "mlp", "pos"), ("pos", "norm", "mlp")):
        model, _ = make(family)
        for kind in order:
            patch(model, **{kind: request[kind]})
        # a table's mean row is centred before it is taken, or after: equal but for rounding in float64
        torch.testing.assert_close(answer(model, given), answer(at_once, given), rtol=1e-12, atol=1e-12)
        records = [without_outcomes(one.config.hfpatch) for one in (model, at_once)]
        for record in records:
            record["edits"] = sorted(record["edits"])
        assert records[0] == records[1]


@pytest.mark.parametrize("init", ["auto", "reset"])
def test_the_same_request_twice_changes_nothing_and_another_is_refused(init: str) -> None:
    model = patch(tiny("bert"), mlp="swiglu", init=init)
    before = fingerprint(model)
    patch(model, mlp=SwiGLU(), init=init)
    with pytest.raises(PatchError, match="swiglu"):
        patch(model, mlp="geglu", init=init)
    assert not changes(before, fingerprint(model))


def test_hooks_move_and_run_once() -> None:
    model, calls = tiny("gpt2"), []
    for name in ("c_fc", "act", "c_proj"):
        getattr(model.h[0].mlp, name).register_forward_hook(lambda module, args, output: calls.append(type(module)))
    patch(model, mlp="geglu")
    outputs(model)
    assert [kind.__name__ for kind in calls] == ["GatedLinear", "GatedActivation", "Conv1D"]


def test_frozen_projections_stay_frozen() -> None:
    for init in ("auto", "reset"):
        model = tiny("bert")
        model.encoder.layer[0].requires_grad_(False)
        patch(model, mlp="swiglu", init=init)
        assert not any(parameter.requires_grad for parameter in model.encoder.layer[0].parameters())
        assert all(parameter.requires_grad for parameter in model.encoder.layer[1].parameters())
