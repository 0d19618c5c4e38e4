"""Layers share the angles of positions that they are given: never those of other positions, nor in a way that shows."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from tiny_models import inputs, patch, tiny

from hfpatch.runtime.attention import PHASES, Rotation
from hfpatch.runtime.rotary import RotaryEmbedding
from hfpatch.schemes.rope import RoPE


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


@pytest.mark.parametrize("number", [1, 9])
def test_what_is_left_on_positions_goes_with_them(number: int) -> None:
    model, given = made()
    positions = torch.arange(number)[None]
    with torch.no_grad():
        expected = model(given["input_ids"][:, :number], position_ids=positions).logits
        for copied in (copy.deepcopy(positions), pickle.loads(pickle.dumps(positions))):
            assert torch.equal(model(given["input_ids"][:, :number], position_ids=copied).logits, expected)
    left = [weakref.ref(rotation) for _, rotation in getattr(positions, PHASES).values()]
    assert left
    gc.disable()
    try:
        del positions
        assert [one() for one in left] == [None], "without the garbage collector, which may be off"
    finally:
        gc.enable()


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


# --- one token ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_token_in_few_calls(dtype: torch.dtype) -> None:
    rotary = RotaryEmbedding(8, theta=100.0)
    positions = torch.tensor([[3], [5], [0]])  # rows with positions of their own
    phases = rotary(positions)
    y = torch.randn(3, 1, 6 * 8, dtype=dtype, generator=torch.Generator().manual_seed(0)).requires_grad_()
    along = torch.randn(3, 1, 6 * 8, dtype=dtype, generator=torch.Generator().manual_seed(1))
    q, v = y.view(3, 1, 6, 8).split((4, 2), dim=-2)
    wanted = torch.cat((rotary.rotate(q, phases), v), dim=-2).view(y.shape)
    given = y.detach().clone()
    found = rotary.turner(positions, 6, 4, dtype)(y)
    assert found.dtype == dtype
    assert torch.equal(y, given), "the projection's output is left alone"
    assert torch.equal(found[..., 32:], y[..., 32:])
    tolerance = {"rtol": 0, "atol": 4 * torch.finfo(dtype).eps}
    torch.testing.assert_close(found, wanted, **tolerance)
    gradients = (torch.autograd.grad(out, y, along)[0] for out in (found, wanted))
    torch.testing.assert_close(*gradients, **tolerance)


@pytest.mark.parametrize(
    "options",
    [{"partial": 0.5}, {"pairing": "interleaved"}, {"axes": 2}, {"scaling": {"rope_type": "yarn", "factor": 4.0}}],
)
def test_rotations_of_other_kinds_take_the_usual_way(options: dict[str, Any]) -> None:
    assert RotaryEmbedding(8).has_turner
    assert not RoPE(**options).rotation(8, 64).make().has_turner


def test_decoding_takes_the_few_calls_where_nothing_fuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    turned = Rotation.first
    monkeypatch.setattr(
        Rotation, "first", lambda self, y, *args: shapes.append(tuple(y.shape)) or turned(self, y, *args)
    )
    model, given = made()
    del given["position_ids"]
    with torch.no_grad():
        expected = model(**given).logits
        assert not shapes
        cache = model(input_ids=given["input_ids"][:, :-1], use_cache=True).past_key_values
        last = model(input_ids=given["input_ids"][:, -1:], past_key_values=cache).logits
        assert {shape[:2] for shape in shapes} == {(given["input_ids"].shape[0], 1)}
        assert len(shapes) == model.config.n_layer
        torch.testing.assert_close(last[:, 0], expected[:, -1], rtol=1e-4, atol=1e-4)
        monkeypatch.setattr(Rotation, "first", lambda self, y, *args: y)
        cache.crop(-1)
        unturned = model(input_ids=given["input_ids"][:, -1:], past_key_values=cache).logits
    assert (unturned[:, 0] - expected[:, -1]).abs().max() > 1e-3


def test_frequencies_that_change_turn_one_token_otherwise() -> None:
    """What is kept of them belongs to these frequencies, as they were."""
    rotary = RotaryEmbedding(8)
    position, y = torch.tensor([[3]]), torch.ones(1, 1, 3 * 8)

    def turned() -> torch.Tensor:
        found = rotary.turner(position, 3, 2, y.dtype)(y)
        wanted = rotary.rotate(y.view(1, 1, 3, 8)[:, :, :2], rotary(position)).flatten(-2)
        torch.testing.assert_close(found[..., :16], wanted, rtol=0, atol=1e-6)
        return found

    before = turned()
    rotary.inv_freq.mul_(2)
    assert (turned() - before).abs().max() > 0.1
    rotary.reset()
    assert torch.equal(turned(), before)
    assert torch.equal(rotary.turner(position, 3, 1, y.dtype)(y)[..., 8:], y[..., 8:])
    rotary = pickle.loads(pickle.dumps(copy.deepcopy(rotary)))
    assert torch.equal(turned(), before)
