"""Models written as the class that they were patched from: rotations that are switched off, settings by older names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import native_cases
import pytest
import torch
from native_cases import CASES, LM
from tiny_models import VOCABULARY, load, patch, tiny
from transformers import GPTJConfig, GPTJForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hfpatch.export import export_model
from hfpatch.export.native import candidates


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", native_cases.NO_SWITCH)
def test_nope_is_the_family_itself_bit_for_bit(family: str, tmp_path: Path) -> None:
    """Rotary classes have no switch; settings that turn nothing give the same bits, at any length."""
    model = next(case for case in CASES if case.name == f"{family} (CausalLM): pos='nope'").model()
    written = export_model(model, tmp_path / "out", "native")
    assert written.architecture == type(model).__name__.removeprefix("Hfpatch")
    stock = load(tmp_path / "out", LM)
    for length in (1, 64, 1500):
        ids = torch.randint(5, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(length))
        with torch.no_grad():
            assert torch.equal(model(ids).logits, stock(ids).logits)
    with torch.no_grad():  # the control: the same weights, rotated
        stock.config.rope_parameters = {"rope_type": "default", "rope_theta": 10_000.0}
        rotated = type(stock)(stock.config).eval()
        rotated.load_state_dict(stock.state_dict())
        assert not torch.allclose(model(ids).logits, rotated(ids).logits, atol=1e-2)


def test_a_dropped_rotation_without_settings_is_refused() -> None:
    """GPT-J turns by a table of sines, which is no setting."""
    config = GPTJConfig(n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4, vocab_size=VOCABULARY)
    (found,) = candidates(patch(GPTJForCausalLM(config), pos="nope"), "gptj")
    assert "has lost its positions, which in GPTJForCausalLM can't be switched off" in found.reason


def test_a_class_that_fails_with_its_own_settings_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As some do whose rotation has sections: the error of their forward is the reason."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("sizes differ")

    model = patch(tiny("llama", LM), pos="nope")
    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", forward)
    (found,) = [each for each in candidates(model, "llama") if "forward" in (each.reason or "")][:1]
    assert found.reason == "its forward fails: RuntimeError: sizes differ"


@pytest.mark.parametrize("asked", [{"pos": "rope:partial=0.5,theta=500"}, {"pos": "nope"}])
def test_names_that_older_readers_ask_for(asked: dict[str, Any], tmp_path: Path, caplog: Any) -> None:
    """GPT-NeoX has its older settings in config.json beside the newer ones; transformers reads it without a word."""
    model = patch(tiny("gpt2", LM), **asked)
    export_model(model, tmp_path / "out", "native", architecture="gpt_neox")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    rope = written["rope_parameters"]
    assert (written["rotary_pct"], written["rotary_emb_base"]) == (rope["partial_rotary_factor"], rope["rope_theta"])
    caplog.clear()
    config = load(tmp_path / "out", LM).config
    assert not caplog.records
    assert config.rope_parameters == rope
