"""MLP schemes by themselves and in models: options, widths, how near their start is, that all of it trains.

What every scheme promises, and what is exact in which family, is in the table of tests/contracts/test_table.py.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sampled import slow_but
from tiny_models import changes, difference, fingerprint, inputs, outputs, patch, registered, reload, tiny
from torch import nn
from transformers.activations import ACT2FN

from hfpatch.core.registry import MLPS
from hfpatch.errors import OptionError, UnknownNameError
from hfpatch.patch import unpatch_model
from hfpatch.plan import plan_patch
from hfpatch.runtime.gated import GatedActivation, GatedLinear
from hfpatch.runtime.patch_errors import PatchError
from hfpatch.schemes.mlp_schemes import MLP, SCALES, GeGLU, ReGLU, SwiGLU
from hfpatch.sites.mlp_sites import find_mlps


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("swiglu:d_ff=0", r"SwiGLU: d_ff must be a number in \(0, inf\), not 0"),
        ("swiglu:d_ff=10.5", r"d_ff must be int \| None, not 10\.5"),
        ("geglu:ratio=-1", "GeGLU: ratio must be a number"),
        ("geglu:ratio=0.5,d_ff=8", "give d_ff or ratio, not both"),
        ("reglu:bias=1", r"ReGLU: bias must be bool \| None, not 1"),
        ("reglu:beta=1", r"mlp 'reglu' has no option 'beta'\. Options: d_ff, ratio, bias"),
        ("swiglue", r"'swiglue'.*'swiglu'"),
    ],
)
def test_options_outside_their_domain(text: str, message: str) -> None:
    with pytest.raises(UnknownNameError if text == "swiglue" else OptionError, match=message):
        MLP.resolve(text)


@pytest.mark.parametrize(
    ("scheme", "init", "d_ff", "width"),
    [
        (SwiGLU(), "auto", 3072, 3072),
        (SwiGLU(), "exact", 3072, 3072),
        (SwiGLU(), "copy", 3072, 3072),
        (SwiGLU(), "reset", 3072, 2048),  # two thirds, rounded up to a multiple of eight
        (SwiGLU(), "reset", 12, 8),
        (SwiGLU(), "reset", 13, 16),
        (SwiGLU(ratio=0.3333), "reset", 3072, 1024),
        (SwiGLU(ratio=1.0), "reset", 3072, 3072),
        (SwiGLU(d_ff=7), "reset", 3072, 7),
    ],
)
def test_widths(scheme: MLP, init: str, d_ff: int, width: int) -> None:
    assert scheme.with_defaults(init).width(d_ff) == width
    assert scheme.with_defaults(init).with_defaults(init) == scheme.with_defaults(init)


@pytest.mark.parametrize(
    ("scheme", "activation", "scale", "error"),
    [
        (SwiGLU(), "silu", 1.0, 0.0),
        (SwiGLU(), "quick_gelu", 1.702, 0.0),
        (SwiGLU(), "gelu", 1.712, 0.0194),
        (SwiGLU(), "gelu_new", 1.712, 0.0197),
        (SwiGLU(), "relu", 1.712, 0.1627),
        (GeGLU(), "gelu", 1.0, 0.0),
        (GeGLU(), "gelu_fast", 1.0, 0.0),
        (GeGLU(), "quick_gelu", 1.0, 0.0203),
        (GeGLU(), "relu", 1.712, 0.0993),
        (ReGLU(), "relu", 1.0, 0.0),
        (ReGLU(), "gelu", 1.0, 0.17),
        (SwiGLU(), "relu2", 1.0, 380),
    ],
)
def test_starts(scheme: MLP, activation: str, scale: float, error: float) -> None:
    start = scheme.start(ACT2FN[activation])
    assert start.scale == scale or error > 1
    assert start.error == pytest.approx(error, rel=0.01, abs=1e-12)
    assert start.is_exact == (error == 0)


@pytest.mark.parametrize("scheme", [SwiGLU(), GeGLU(), ReGLU()])
def test_the_formula(scheme: Any) -> None:
    act = {"swiglu": F.silu, "geglu": F.gelu, "reglu": F.relu}[scheme.name]
    gate, up, x = nn.Linear(4, 6), nn.Linear(4, 6), torch.randn(2, 3, 4)
    middle = GatedActivation(scheme.activation(nn.Tanh()), nn.Tanh())
    torch.testing.assert_close(middle(GatedLinear(scheme.name, gate, up)(x)), act(gate(x)) * up(x))
    torch.testing.assert_close(middle(x), x.tanh())  # what is no pair goes to the activation that was there


def test_an_activation_that_is_a_function() -> None:
    """Some hosts hold one (XLM its relu) rather than a module."""
    model = tiny("bert")
    for layer in model.encoder.layer:
        del layer.intermediate.intermediate_act_fn
        layer.intermediate.intermediate_act_fn = torch.nn.functional.relu
    before, expected = fingerprint(model), outputs(model)
    patch(model, mlp="reglu", reversible=True)
    assert isinstance(model.encoder.layer[0].intermediate.intermediate_act_fn, GatedActivation)
    assert difference(outputs(model), expected) == 0
    unpatch_model(model)
    assert not changes(before, fingerprint(model))


# --- in models: the start ---------------------------------------------------------------------------------------------

FAMILIES = ("gpt2", "bert", "vit", "opt", "t5", "bart", "whisper", "distilbert", "albert")
each = pytest.mark.parametrize(("family", "scheme"), slow_but(itertools.product(FAMILIES, MLPS), 8))


def gated(model: nn.Module) -> list[GatedLinear]:
    return [module for module in model.modules() if isinstance(module, GatedLinear)]


def activation_error(family: str, scheme: str) -> float:
    """How much a patch changes at most in what the first of a model's activations gives."""
    model, first = tiny(family), []
    for _ in range(2):
        seen: list[torch.Tensor] = []  # several, where layers share the module
        ours = [module for module in model.modules() if isinstance(module, GatedActivation)]
        act: Any = ours[0] if ours else find_mlps(model)[0].act
        hook = act.register_forward_hook(lambda *call, seen=seen: seen.append(call[-1]))
        outputs(model)
        hook.remove()
        first.append(seen[0])
        patch(model, mlp=scheme)
    return float((first[1] - first[0]).abs().max())


@pytest.mark.sample(2)
@each
def test_the_start_is_as_near_as_was_measured(family: str, scheme: str) -> None:
    start = MLPS[scheme]().start(find_mlps(tiny(family))[0].act)
    assert activation_error(family, scheme) <= start.error + 1e-5  # between the points where it was measured


def test_control_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """silu(x) for gelu(x), as a gate of W1 and an up bias of 1 would have it."""
    monkeypatch.setattr("hfpatch.schemes.mlp_schemes.SCALES", SCALES[:1])
    assert activation_error("gpt2", "swiglu") > 0.1


@pytest.mark.parametrize(("family", "scheme"), [("gpt2", "geglu"), ("bert", "geglu"), ("opt", "reglu")])
def test_what_is_exact_is_so_in_half_precision(family: str, scheme: str) -> None:
    model = tiny(family).bfloat16()
    before = outputs(model)
    assert all(map(torch.equal, outputs(patch(model, mlp=scheme)), before))


@pytest.mark.sample(2)
@each
def test_every_part_is_active_and_trained(family: str, scheme: str) -> None:
    model = patch(tiny(family), mlp=scheme)
    before = outputs(model)
    for parameter in gated(model)[0].parameters():
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter += torch.linspace(0.1, 0.6, parameter.numel()).view_as(parameter)
        assert difference(outputs(model), before) > 1e-4
        with torch.no_grad():
            parameter.copy_(kept)
    assert difference(outputs(model), before) == 0, "control: it is what was changed"
    model(**inputs(model))[0].square().sum().backward()
    for linear in gated(model):
        assert all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in linear.parameters())
    assert find_mlps(model)[0].kind == scheme


# --- in models: fresh weights, and what others put on -----------------------------------------------------------------


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


@pytest.mark.parametrize(("init", "scale"), [("auto", 1.712), ("reset", 1.0)])
def test_its_config_starts_it_at_the_scale_of_the_host(init: str, scale: float) -> None:
    model = patch(tiny("gpt2", n_embd=64, initializer_range=0.3), mlp="swiglu", init=init)
    torch.manual_seed(0)
    fresh = type(model)._from_config(model.config)
    assert fresh.h[1].mlp.c_fc.gate.weight.std().item() == pytest.approx(0.3 * scale, rel=0.05)


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


def test_another_gate_in_its_place_is_refused() -> None:
    model = patch(tiny("bert"), mlp="swiglu")
    before = fingerprint(model)
    with pytest.raises(PatchError, match="swiglu"):
        patch(model, mlp="geglu")
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
