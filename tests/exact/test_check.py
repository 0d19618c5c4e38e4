"""The check of a conversion on the model itself: what it lets through, what it doesn't, and that it leaves no trace."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_models import changes, fingerprint, inputs, norms_of, patch, tiny
from torch import nn
from transformers import OPTConfig, OPTForCausalLM

from hfpatch.exact.observe import norm_inputs
from hfpatch.measure.quiet_forward import cast_for_model, inference_state
from hfpatch.measure.snapshot import Snapshot, Verdict, run

LM = "AutoModelForCausalLM"
NAN = float("nan")


@pytest.mark.parametrize(
    ("verdict", "holds"),
    [
        (Verdict(1e-6, 1e-5, 1e-7, 1e-6), True),
        (Verdict(2e-5, 1e-5, 1e-7, 1e-6), False),
        (Verdict(1e-6, 1e-5, 1e-5, 1e-6), False),
        (Verdict(NAN, 1e-5, 1e-7, 1e-6), False),
        (Verdict(1e-6, 1e-5, NAN, 1e-6), False),
    ],
)
def test_a_verdict_holds_when_both_measures_do(verdict: Verdict, holds: bool) -> None:
    assert verdict.holds == holds


def reference(model: Any) -> Snapshot:
    return Snapshot(model, [lambda: inputs(model)], norm_inputs(model, norms_of(model, nn.LayerNorm)))


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_floor_lies_between_what_rounding_does_and_what_a_change_does(dtype: torch.dtype) -> None:
    model = tiny("gpt2", LM).to(dtype)
    measured, again = reference(model), reference(model)
    assert (measured.floor, measured.mean_floor) == (again.floor, again.mean_floor), "the same every time"
    assert measured.eps == max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    converted = patch(copy.deepcopy(model), norm="rms")
    verdict = measured.verdict(converted)
    assert verdict.holds
    assert verdict.error < verdict.tolerance < 1e-4 * (measured.eps / torch.finfo(torch.float32).eps)
    copied = measured.verdict(patch(copy.deepcopy(model), norm="rms", init="copy"))
    assert not copied.holds
    assert copied.mean > copied.mean_tolerance
    other = copy.deepcopy(converted)
    with torch.no_grad():
        other.transformer.h[0].mlp.c_proj.weight[:, 0] += 300 * measured.eps
    moved = measured.verdict(other)
    assert not moved.holds


@pytest.mark.slow
def test_means_of_wide_models_in_half_precision() -> None:
    """At width 2,560 the mean of rounding errors of several layers is more than that of one."""
    torch.manual_seed(5)
    sizes = {"hidden_size": 2560, "word_embed_proj_dim": 2560, "ffn_dim": 2560, "num_attention_heads": 32}
    config = OPTConfig(vocab_size=300, num_hidden_layers=2, max_position_embeddings=64, **sizes)
    model = OPTForCausalLM(config).to(torch.bfloat16).eval()
    measured = reference(model)
    verdict = measured.verdict(patch(copy.deepcopy(model), norm="rms", init="exact"))
    assert verdict.holds
    assert 10 * measured.eps / 2560**0.5 < verdict.mean < verdict.mean_tolerance < 0.02  # one layer's bound is less
    copied = measured.verdict(patch(model, norm="rms", init="copy"))
    assert copied.mean > copied.mean_tolerance  # control


def leave_traces(model: Any) -> None:
    assert not model.transformer.h[0].training
    model.transformer.h[0].register_forward_hook(lambda *a: None)
    torch.rand(3)
    raise ZeroDivisionError


def test_quiet_restores_everything_after_an_error() -> None:
    model = tiny("gpt2", LM).train()
    model.transformer.drop.eval()
    before = fingerprint(model)
    with pytest.raises(ZeroDivisionError), inference_state(model):
        leave_traces(model)
    assert not changes(before, fingerprint(model))


def test_torchs_own_hooks_go_on_running() -> None:
    """Weight norm of the old kind computes its weight in a pre-hook."""
    layer = nn.Linear(4, 4, bias=False)
    with pytest.warns(FutureWarning, match="weight_norm"):
        model = nn.Sequential(nn.utils.weight_norm(layer))
    with torch.no_grad():
        layer.weight_g.mul_(3)
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    with inference_state(model):
        y = model(x)
    assert torch.equal(y, model(x))


def test_means_are_relative_to_the_standard_deviation() -> None:
    model = nn.Sequential(nn.LayerNorm(4, eps=0.0)).double()
    model.config = None
    x = torch.tensor([[1.0, 3.0, 1.0, 3.0], [-1.0, 1.0, -1.0, 1.0]]).double()
    model.forward = lambda x: model[0](x)  # type: ignore[method-assign]
    ratios = run(model, {"x": x}, norm_inputs(model, ["0"])).means["0"]
    torch.testing.assert_close(ratios, torch.tensor([2.0, 0.0], dtype=torch.float64))


def test_inputs_are_moved_and_cast_to_the_models_dtype() -> None:
    model = tiny("vit").bfloat16()
    found = cast_for_model(
        model, {"pixel_values": torch.zeros(1), "ids": torch.zeros(1, dtype=torch.long), "flag": True}
    )
    assert (found["pixel_values"].dtype, found["ids"].dtype, found["flag"]) == (torch.bfloat16, torch.long, True)
