"""The norm swap over model types: all of them on request, and in every run a fixed sample."""

from __future__ import annotations

import json

import norm_swap
import pytest
import torch
import transformers
import zoo
from sampled import sampled

FIXED = ["albert", "bloom", "cohere", "convnext", "deberta", "mpt", "nemotron", "olmo"]
FIXED += ["moonshine_streaming", "squeezebert"]  # a norm without a name, (B, C, T) norms
SAMPLE = 8
REPORT = norm_swap.HERE / "norm_swap.json"


def _sample() -> list[str]:
    """Types that the committed report says convert."""
    types = json.loads(REPORT.read_text())["types"]
    here = set(zoo.model_types())
    good = [one["model_type"] for one in types if one["status"] == "ok" and one["model_type"] in here]
    good = [model_type for model_type in good if model_type not in FIXED]
    return sampled(good, SAMPLE)


@pytest.mark.parametrize("model_type", [*FIXED, *_sample()])
def test_type_converts(model_type: str) -> None:
    result = norm_swap.examine(model_type)
    if (
        result.status.startswith("not run")
        and transformers.__version__ != json.loads(REPORT.read_text())["transformers"]
    ):
        pytest.skip(f"the report is of another transformers; here {model_type} is {result.status}")
    assert result.status == "ok", result
    assert result.converted > 0
    assert result.missed == result.wrong == []
    assert result.converted + sum(result.kept.values()) == result.layer_norms


@pytest.mark.sweep
def test_all_types_convert() -> None:
    results = norm_swap.sweep(zoo.model_types())
    good, counted, missed = norm_swap.totals(results)
    assert missed == 0, [(result.model_type, result.missed) for result in results if result.missed]
    assert good >= 0.95 * counted, [(r.model_type, r.status) for r in results if r.counted and r.status != "ok"]


class TestGroundTruth:
    """The sweep is only worth what its own judgement is worth: it must tell LayerNorms from what resembles them."""

    @pytest.mark.parametrize(
        ("module", "shape"),
        [
            (torch.nn.LayerNorm(8), (2, 5, 8)),
            (torch.nn.LayerNorm(8, bias=False), (2, 5, 8)),
            (torch.nn.LayerNorm((4, 6)), (3, 5, 4, 6)),
            (torch.nn.LayerNorm(8, elementwise_affine=False), (1, 1, 8)),
        ],
    )
    def test_finds_layer_norms(self, module: torch.nn.Module, shape: tuple[int, ...]) -> None:
        assert norm_swap.fit_layer_norm(module, _seen(module, shape)) is not None

    @pytest.mark.parametrize(
        ("module", "shape"),
        [
            (torch.nn.RMSNorm(8), (2, 5, 8)),
            (torch.nn.BatchNorm1d(8).eval(), (4, 8, 5)),
            (torch.nn.GroupNorm(2, 8), (2, 8, 5)),
            (torch.nn.GroupNorm(8, 8), (2, 8, 5)),
            (torch.nn.Identity(), (2, 5, 8)),
            (torch.nn.Linear(8, 8), (2, 5, 8)),
            (torch.nn.Softmax(-1), (2, 5, 8)),
        ],
    )
    def test_takes_nothing_else(self, module: torch.nn.Module, shape: tuple[int, ...]) -> None:
        assert norm_swap.fit_layer_norm(module, _seen(module, shape)) is None


class TestFailuresAreSeen:
    """Controls: a swap that does nothing, or the wrong thing, must not pass."""

    def test_norms_left_in_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(norm_swap, "patch_model", lambda model, **_: model)
        assert "is still a" in norm_swap.examine("gpt2").status

    def test_another_formula(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = norm_swap.patch_model
        monkeypatch.setattr(norm_swap, "patch_model", lambda model, **how: _with_wider_gains(original(model, **how)))
        assert "doesn't compute RMSNorm" in norm_swap.examine("gpt2").status

    def test_a_norm_the_plan_leaves_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = norm_swap.plan_patch

        def forgetful(*args: object, **how: object) -> object:
            plan = original(*args, **how)
            plan.by_kind["norm"].pop()
            return plan

        monkeypatch.setattr(norm_swap, "plan_patch", forgetful)
        assert norm_swap.examine("gpt2").status == "missed 1: ln_f"


def _seen(module: torch.nn.Module, shape: tuple[int, ...]) -> norm_swap.Seen:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return norm_swap.Seen((x,), module(x))


def _with_wider_gains(model: torch.nn.Module) -> torch.nn.Module:
    for module in model.modules():
        if "RMSNorm" in type(module).__name__:
            module.weight.data *= 1.01
    return model
