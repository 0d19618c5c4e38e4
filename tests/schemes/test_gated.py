"""The schemes by themselves: options, widths, and how near one activation is to another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import changes, difference, fingerprint, outputs, patch, tiny
from torch import nn
from transformers.activations import ACT2FN

from hfpatch.errors import OptionError, UnknownNameError
from hfpatch.patch import unpatch_model
from hfpatch.runtime.gated import GatedActivation, GatedLinear
from hfpatch.schemes.mlp_schemes import MLP, GeGLU, ReGLU, SwiGLU


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
