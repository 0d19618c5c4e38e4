"""Repairs by model type: all types on request; in every run some of them, and that the sweep would see a wrong one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import repaired_types
import torch
import transformers
from repaired_types import REQUESTS, outcome

from hfpatch.patch import patch_model

pytestmark = pytest.mark.filterwarnings("ignore::hfpatch.errors.NotPreservedWarning")
# shared layers, a cache that no argument turns off, positions in a list of convolutions, features of many depths, an
# empty slot in a list, no biases, patches of several images in one tensor, an image as patches, and masks that are
# drawn in the forward
SAMPLE = ["albert", "blip-2", "data2vec-audio", "dpt", "informer", "llama"]
SAMPLE += ["qwen2_vl_vision", "siglip2_vision_model", "vit_mae"]


def stored() -> dict[str, repaired_types.Result]:
    return {result.model_type: result for result in repaired_types.SWEEP.results()}


@pytest.mark.sample(1, slow=3)
@pytest.mark.parametrize("model_type", SAMPLE)
def test_outcomes_are_what_the_report_says(model_type: str) -> None:
    found = repaired_types.examine(model_type).outcomes
    assert not any(one.verdict.startswith(("wrong", "harmed")) for one in found.values()), found
    if transformers.__version__ == repaired_types.SWEEP.report()["transformers"]:
        words = {name: one.verdict.partition(":")[0] for name, one in found.items()}
        assert words == {name: one.verdict.partition(":")[0] for name, one in stored()[model_type].outcomes.items()}


@pytest.mark.sweep
def test_all_types() -> None:
    found = repaired_types.totals(repaired_types.SWEEP.sweep(repaired_types.zoo.model_types()))
    for name in REQUESTS:
        assert not {"wrong", "harmed"} & found[name].keys()
    assert found["norm"]["repaired"] >= 500


def after(change: Callable[[Any], None]) -> Callable[..., Any]:
    """patch_model, and a change of what it repaired."""

    def patch(model: Any, calibration: Any = None, **request: Any) -> Any:
        patched = patch_model(model, **request, **({"calibration": calibration} if calibration else {}))
        if calibration:
            with torch.no_grad():
                change(patched)
        return patched

    return patch


def negate(model: Any) -> None:
    model.encoder.layer[-1].output.LayerNorm.weight.neg_()


def fail(model: Any) -> None:
    raise KeyError("layer")


@pytest.mark.slow
@pytest.mark.parametrize(("change", "verdict"), [(negate, "harmed"), (fail, "wrong: KeyError")])
def test_control_what_isnt_repaired_is_seen(
    change: Callable[[Any], None], verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repaired_types, "patch_model", after(change))
    found = outcome("bert", REQUESTS["norm"])
    assert found is not None
    assert found.verdict.startswith(verdict)


@pytest.mark.slow
def test_control_an_undone_repair_that_left_something_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(model: Any) -> None:
        model.h[0].ln_1.weight[0] += 1

    monkeypatch.setattr(repaired_types, "patch_model", after(leave))
    monkeypatch.setattr("hfpatch.repairs.repair.helps", lambda *_: False)
    found = outcome("gpt2", REQUESTS["norm"])
    assert found is not None
    assert found.verdict.startswith("wrong: undone, but h.0.ln_1")


def test_control_a_refusal_that_changes_the_model_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: Any, **_: Any) -> None:
        model.pooler.dense.bias.data += 1
        raise repaired_types.PatchError("no")

    monkeypatch.setattr(repaired_types, "patch_model", refuse)
    found = outcome("bert", REQUESTS["norm"])
    assert found is not None
    assert found.verdict.startswith("wrong: refused, but pooler.dense")
