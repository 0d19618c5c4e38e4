"""What is accepted runs: all types on request; in every run some of them, and that the sweep would see what doesn't."""

from __future__ import annotations

from typing import Any

import acceptance
import pytest
import torch

CASES = {  # of many builds: what was accepted once and didn't run, or open, among them
    "dinov2": ("wide", "square"),
    "vit": ("tall", "axes"),
    "blip_2_vision_model": ("small",),
    "BarkSemanticModel": ("longer",),
    "led": ("shorter",),
    "gpt2": ("dynamic", "sinusoidal"),
    "phi3": ("yarn", "longrope"),
    "qwen2_vl_text": ("linear",),
    "t5": ("alibi",),
    "whisper": ("longer",),
}


def stored(model_type: str) -> dict[str, str]:
    """The report's verdicts; none of types that it doesn't have."""
    return next((one.verdicts for one in acceptance.SWEEP.results() if one.model_type == model_type), {})


@pytest.mark.sample(3)
@pytest.mark.parametrize("model_type", CASES)
def test_verdicts_are_what_the_report_says(model_type: str) -> None:
    for name in CASES[model_type]:
        found = acceptance.verdict(model_type, name)
        assert not found.startswith("wrong"), found
        assert found.partition(":")[0] == stored(model_type).get(name, found).partition(":")[0]


@pytest.mark.sweep
def test_all_types() -> None:
    count = acceptance.totals(acceptance.SWEEP.sweep(acceptance.every_type()))
    assert count["wrong"] == 0
    assert count["ok"] >= 2_000


def test_control_what_doesnt_run_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hfpatch.outcome.require_runs_in_full", lambda *args: True)
    assert acceptance.verdict("dinov2", "wide").startswith("wrong: at the new size it says RuntimeError")


def test_control_what_opens_otherwise_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = acceptance.proof.opened

    def other(model: Any, folder: Any) -> Any:
        loaded = opened(model, folder)
        with torch.no_grad():
            loaded.wte.weight[0] += 1e-3
            loaded.ln_f.bias += 1e-3
        return loaded

    monkeypatch.setattr(acceptance.proof, "opened", other)
    assert acceptance.verdict("gpt2", "rope").startswith("wrong: opened, it differs by ")
