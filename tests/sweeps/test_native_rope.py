"""RoPE's settings over model types that rotate by themselves: whether the report is true, on a sample of types."""

from __future__ import annotations

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
VERSION = native_rope.SWEEP.report()["transformers"]
ANSWERS = {result.model_type: result.answers for result in native_rope.SWEEP.results() if result.answers}


def _sample() -> list[str]:
    return sampled([one for one in ANSWERS if one in zoo.model_types()], SAMPLE)


@pytest.mark.sample(2)
@pytest.mark.parametrize("model_type", [*FIXED, *_sample()])
def test_type_is_as_reported(model_type: str) -> None:
    if transformers.__version__ != VERSION:
        pytest.skip("the report is of another transformers")
    kinds = lambda row: {name: answer.partition(":")[0] for name, answer in row.items()}  # noqa: E731
    found = kinds(native_rope.examine(model_type).answers)
    assert found["same"] == "yes"
    assert "DIFFERS" not in found.values()
    assert found == kinds(ANSWERS[model_type])


def test_a_wrong_angle_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control."""
    original = native_rope.run

    def off(model: Any, given: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {name: value * (1 + 1e-6) for name, value in original(model, given).items()}

    calls = iter([original, original, off])
    monkeypatch.setattr(native_rope, "run", lambda model, given: next(calls)(model, given))
    assert native_rope.checked("llama", "theta") == "DIFFERS"
