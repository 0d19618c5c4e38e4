"""RoPE's settings over model types that rotate by themselves: whether the report is true, on a sample of types."""

from __future__ import annotations

import json
from typing import Any

import native_rope
import pytest
import torch
import transformers
import zoo
from sampled import sampled

pytestmark = pytest.mark.filterwarnings("ignore::hfpatch.errors.NotPreservedWarning")
FIXED = ["llama", "phi", "gpt_neox"]
SAMPLE = 3
REPORT = json.loads(native_rope.REPORT.read_text())


def _sample() -> list[str]:
    types = [one for one, row in REPORT["types"].items() if "same" in row and one in zoo.model_types()]
    return sampled(types, SAMPLE)


@pytest.mark.parametrize("model_type", [*FIXED, *_sample()])
def test_type_is_as_reported(model_type: str) -> None:
    if transformers.__version__ != REPORT["transformers"]:
        pytest.skip("the report is of another transformers")
    kinds = lambda row: {name: answer.partition(":")[0] for name, answer in row.items()}  # noqa: E731
    found = kinds(native_rope.examine(model_type))
    assert found["same"] == "yes"
    assert "DIFFERS" not in found.values()
    assert found == kinds(REPORT["types"][model_type])


def test_the_report_is_of_its_rows() -> None:
    counted = native_rope.totals(REPORT["types"])
    assert {name: REPORT[name] for name in counted} == counted


def test_a_wrong_angle_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control."""
    original = native_rope.run

    def off(model: Any, given: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {name: value * (1 + 1e-6) for name, value in original(model, given).items()}

    calls = iter([original, original, off])
    monkeypatch.setattr(native_rope, "run", lambda model, given: next(calls)(model, given))
    assert native_rope.checked("llama", "theta") == "DIFFERS"
