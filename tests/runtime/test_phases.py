"""Angles of positions that a caller gives: those of these positions by the frequencies as they are, in every layer."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import inputs, patch, tiny


def made() -> tuple[Any, dict[str, Any]]:
    given = inputs(model := patch(tiny("gpt2", "AutoModelForCausalLM"), pos="rope")) | {"use_cache": False}
    return model, given | {"position_ids": torch.arange(given["input_ids"].shape[1])[None]}


def test_edited_frequencies_count() -> None:
    """Of one layer alone, and between two forwards with the same tensor of positions."""
    model, given = made()
    with torch.no_grad():
        before = model(**given).logits
        model.transformer.h[1].attn.rotary_emb.inv_freq.mul_(2)
        after = model(**given).logits
        expected = model(**{**given, "position_ids": given["position_ids"].clone()}).logits
    assert (after - before).abs().max() > 1e-3
    assert torch.equal(after, expected)


def test_every_layers_rotation_is_called() -> None:
    model, given = made()
    calls: list[int] = []
    for number, block in enumerate(model.transformer.h):
        block.attn.rotary_emb.register_forward_hook(lambda *_, number=number: calls.append(number))
    with torch.no_grad():
        model(**given)
        model(**given)
    assert calls == 2 * list(range(len(model.transformer.h)))


def test_nothing_is_written_to_the_callers_tensors() -> None:
    model, given = made()
    with torch.no_grad():
        model(**given)
    assert not vars(given["position_ids"])


def test_positions_that_were_changed_in_place_have_others() -> None:
    model, given = made()
    with torch.no_grad():
        before = model(**given).logits
        given["position_ids"].mul_(3)
        after = model(**given).logits
        expected = model(**{**given, "position_ids": given["position_ids"].clone()}).logits
    assert torch.equal(after, expected)
    assert not torch.allclose(after, before, atol=1e-3)


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


def test_a_token_behind_a_cache_is_turned_as_in_one_forward() -> None:
    model, given = made()
    del given["position_ids"]
    with torch.no_grad():
        expected = model(**given).logits
        cache = model(input_ids=given["input_ids"][:, :-1], use_cache=True).past_key_values
        last = model(input_ids=given["input_ids"][:, -1:], past_key_values=cache).logits
    torch.testing.assert_close(last[:, 0], expected[:, -1], rtol=1e-4, atol=1e-4)
