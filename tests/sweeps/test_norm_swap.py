"""The norm swap over model types: all of them on request, and in every run a fixed sample."""

from __future__ import annotations

import functools
from typing import Any

import norm_swap
import pytest
import torch
import transformers
import zoo
from sampled import sampled
from torch import nn

FIXED = ["albert", "bloom", "cohere", "convnext", "deberta", "mpt", "nemotron", "olmo"]
FIXED += ["moonshine_streaming", "squeezebert"]  # a norm without a name, (B, C, T) norms
VERSION = norm_swap.SWEEP.report()["transformers"]
GOOD = {one.model_type for one in norm_swap.SWEEP.results() if one.status == "ok"} & set(zoo.model_types())


@pytest.mark.sample(3)
@pytest.mark.parametrize("model_type", [*FIXED, *sampled(sorted(GOOD - set(FIXED)), 8)])
def test_type_converts(model_type: str) -> None:
    result = norm_swap.examine(model_type)
    if result.status.startswith("not run") and transformers.__version__ != VERSION:
        pytest.skip(f"the report is of another transformers; here {model_type} is {result.status}")
    assert result.status == "ok", result
    assert result.converted > 0
    assert result.missed == result.wrong == []
    assert result.converted + sum(result.kept.values()) == result.layer_norms


@pytest.mark.sweep
def test_all_types_convert() -> None:
    results = norm_swap.SWEEP.sweep(zoo.model_types())
    good, counted, missed = norm_swap.totals(results).values()
    assert missed == 0, [(result.model_type, result.missed) for result in results if result.missed]
    assert good >= 0.95 * counted, [(r.model_type, r.status) for r in results if r.counted and r.status != "ok"]


@pytest.mark.parametrize(
    ("module", "shape", "is_layer_norm"),
    [
        (nn.LayerNorm(8), (2, 5, 8), True),
        (nn.LayerNorm(8, bias=False), (2, 5, 8), True),
        (nn.LayerNorm((4, 6)), (3, 5, 4, 6), True),
        (nn.LayerNorm(8, elementwise_affine=False), (1, 1, 8), True),
        (nn.RMSNorm(8), (2, 5, 8), False),
        (nn.BatchNorm1d(8).eval(), (4, 8, 5), False),
        (nn.GroupNorm(2, 8), (2, 8, 5), False),
        (nn.GroupNorm(8, 8), (2, 8, 5), False),
        (nn.Identity(), (2, 5, 8), False),
        (nn.Linear(8, 8), (2, 5, 8), False),
        (nn.Softmax(-1), (2, 5, 8), False),
    ],
)
def test_ground_truth(module: nn.Module, shape: tuple[int, ...], is_layer_norm: bool) -> None:
    """The sweep's own judgement tells LayerNorms from what resembles them."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        seen = norm_swap.Seen((x,), module(x))
    assert (norm_swap.fit_layer_norm(module, seen) is not None) == is_layer_norm


def with_wider_gains(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if "RMSNorm" in type(module).__name__:
            module.weight.data *= 1.01
    return model


def without_a_norm(plan: Any) -> Any:
    plan.planned[0].changes.pop()
    return plan


@pytest.mark.parametrize(
    ("step", "fault", "status"),
    [
        ("patch_model", lambda call, model, **how: model, "is still a"),
        ("patch_model", lambda call, model, **how: with_wider_gains(call(model, **how)), "doesn't compute RMSNorm"),
        ("plan_patch", lambda call, model, **how: without_a_norm(call(model, **how)), "missed 1: ln_f"),
    ],
    ids=["norms left in place", "another formula", "a norm that the plan leaves out"],
)
def test_control_a_wrong_swap_is_seen(step: str, fault: Any, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_swap, step, functools.partial(fault, getattr(norm_swap, step)))
    assert status in norm_swap.examine("gpt2").status
