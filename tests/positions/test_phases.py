"""Layers share the angles of positions that they are given: never those of other positions, nor in a way that shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import inputs, patch, tiny

from hfpatch.positions import RotaryEmbedding


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    forward = RotaryEmbedding.forward

    def counted(self: Any, positions: torch.Tensor) -> Any:
        found.append(id(positions))
        return forward(self, positions)

    monkeypatch.setattr(RotaryEmbedding, "forward", counted)
    return found


def made() -> tuple[Any, dict[str, Any]]:
    given = inputs(model := patch(tiny("gpt2", "AutoModelForCausalLM"), pos="rope")) | {"use_cache": False}
    return model, given | {"position_ids": torch.arange(given["input_ids"].shape[1])[None]}


def test_layers_share_them(calls: list[int]) -> None:
    model, given = made()
    with torch.no_grad():
        first = model(**given).logits
        assert len(calls) == 1
        assert torch.equal(model(**given).logits, first)
        assert len(calls) == 1, "the same tensor: kept"
        model.transformer.h[0].attn.rotary_emb.register_forward_hook(lambda *a: None)
        model(**given)
        assert len(calls) == 2, "what is listened to is called"


def test_positions_that_were_changed_in_place_have_others() -> None:
    model, given = made()
    with torch.no_grad():
        before = model(**given).logits
        given["position_ids"].mul_(3)
        after = model(**given).logits
        expected = model(**{**given, "position_ids": given["position_ids"].clone()}).logits
    assert torch.equal(after, expected)
    assert not torch.allclose(after, before, atol=1e-3)


def test_rotations_that_differ_dont_share(calls: list[int]) -> None:
    model = patch(tiny("gpt2", "AutoModelForCausalLM"), pos="rope", only=["*.0.*", "*wpe"])
    model = patch(model, pos="rope:theta=500", only=["*.1.*"])
    _, given = made()
    with torch.no_grad():
        shared = model(**given).logits
        calls.clear()
        alone = model(**{**given, "position_ids": given["position_ids"].clone()}).logits
    assert len(calls) == 2
    assert torch.equal(shared, alone)


def test_inference_mode_leaves_nothing_that_training_cant_use() -> None:
    model, given = made()
    with torch.inference_mode():
        expected = model(**given).logits.clone()
    logits = model(**given).logits
    logits.sum().backward()
    assert torch.equal(logits.detach(), expected)
    assert model.transformer.h[0].attn.c_attn.weight.grad is not None


def test_a_model_in_half_precision_takes_the_angles_of_before() -> None:
    """They are float32 whatever the model is in."""
    model, given = made()
    with torch.no_grad():
        model(**given)
        found = model.bfloat16()(**given).logits
        expected = model(**{**given, "position_ids": given["position_ids"].clone()}).logits
    assert torch.equal(found, expected)
