"""ALiBi: slopes as in the paper, the bias added in every recorded attention or refused, any way of decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from position_checks import difference, patched, tokens
from position_families import make
from torch import Tensor, nn
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from hfpatch.errors import NothingToPatchError
from hfpatch.plan import plan_patch
from hfpatch.runtime.alibi import LinearBias, slopes_of
from hfpatch.runtime.patch_errors import PositionError, UnsupportedError

# --- slopes and the bias ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 7, 8, 12, 16, 20, 25, 32, 40])
def test_slopes_of_any_number_of_heads_are_bloom_s(heads: int) -> None:
    """Which are the paper's."""
    bloom = build_alibi_tensor(torch.ones(1, 5), heads, torch.float32)  # slope * j
    assert torch.allclose(torch.tensor(slopes_of(heads, 8.0)), bloom[:, 0, 1], rtol=1e-6)
    if heads & (heads - 1) == 0:  # MPT orders the others differently
        mpt = build_mpt_alibi_tensor(heads, 5, 16).reshape(heads, 1, 5)  # -slope * (T - 1 - j)
        assert torch.allclose(torch.tensor(slopes_of(heads, 16.0)), -mpt[:, 0, -2], rtol=1e-6)


@pytest.mark.sample(2)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_it_is_nope_with_the_bias_in_its_mask(name: str, implementation: str) -> None:
    model, without = (patched(make(name), pos=pos) for pos in ("alibi", "nope"))
    distances = (torch.arange(7)[:, None] - torch.arange(7)).abs()
    mask = torch.stack([-distances * 2 ** (-8 * (head + 1) / 4) for head in range(4)])[None]
    if name == "gpt2":
        mask = mask.masked_fill(torch.ones(7, 7).triu(1).bool(), torch.finfo(mask.dtype).min)
    given = tokens(2, 7)
    with torch.no_grad():
        for one in (model, without):
            one.set_attn_implementation(implementation)
        expected = without(given, attention_mask=mask).logits
        assert difference(model(given).logits, expected) <= 1e-5
        assert difference(without(given).logits, expected) > 1e-2  # control


# that distances alone count, on every record: tests/contracts/test_schemes.py; padding and half precision: the table of
# tests/contracts/test_table.py


def test_slopes_stay_in_float32() -> None:
    model = patched(make("gpt2"), pos="alibi").half()
    slopes = next(module.slopes for module in model.modules() if isinstance(module, LinearBias))
    assert slopes.dtype == torch.float32
    assert slopes.tolist() == slopes_of(4, 8.0)


# --- what can't carry a bias ------------------------------------------------------------------------------------------


def with_implementation(model: Any, implementation: str) -> Any:
    model.config._attn_implementation_internal = implementation
    return model


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flex_attention", "paged|flash_attention_2"])
def test_an_implementation_without_a_bias_is_refused(implementation: str) -> None:
    """By the plan; by the forward, where another one was chosen later."""
    with pytest.raises(UnsupportedError, match=r"h\.0\.attn.*set_attn_implementation\('sdpa'\)"):
        plan_patch(with_implementation(make("gpt2"), implementation), pos="alibi")
    model = with_implementation(patched(make("gpt2"), pos="alibi"), implementation)
    with pytest.raises(PositionError, match=r"ALiBi.*'eager'"):
        model.transformer.h[0].attn(torch.randn(1, 3, 32))


def test_a_mask_without_heads_is_refused() -> None:
    model = patched(make("gpt2"), pos="alibi")
    with pytest.raises(PositionError, match=r"attention_mask \(1, 3\)"):
        model.transformer.h[0].attn(torch.randn(1, 3, 32), attention_mask=torch.ones(1, 3))


class Attention(nn.Module):
    """In the place of GPT-2's: takes a mask and adds to its scores what its class makes of that."""

    __module__ = GPT2Attention.__module__  # as of another version of transformers: other packages' classes are refused

    def __init__(self, host: nn.Module):
        super().__init__()
        self.c_attn, self.num_heads, self.head_dim, self.layer_idx = host.c_attn, 4, 8, host.layer_idx
        self.config, self.is_causal = host.config, True

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, **_: Any) -> Any:
        q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.c_attn(hidden_states).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) + self.added(attention_mask)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2), None


def with_attentions(added: Callable[[Any, Tensor], Any]) -> Any:
    """GPT-2 whose attentions add this to their scores."""
    model, kind = make("gpt2"), type("Odd", (Attention,), {"added": added})
    for block in model.transformer.h:
        block.attn = kind(block.attn)
    return model


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("added", "message"),
    [
        (lambda _, mask: 0.0, "doesn't add its mask to its scores"),
        (lambda _, mask: mask[:, :1], "reads a mask of one head for all"),
        (lambda _, mask: torch.zeros(mask.shape).masked_fill(mask.bool(), -1e4), "reads its mask as boolean"),
        (lambda _, mask: mask.view(len(mask), 1, 1, mask.shape[1]), "couldn't be tried with a mask of its own for"),
    ],
)
def test_an_attention_that_would_lose_the_bias_is_refused(added: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"h\.\d\.attn: Odd {message}.*pos='rope' works here"):
        plan_patch(with_attentions(added), pos="alibi")
    assert not plan_patch(with_attentions(lambda _, mask: mask), pos="alibi").empty  # control


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("mpt", "can't be tried alone with a bias, since its model also hands it position_bias"),
        ("bloom", "can't be tried alone with a bias, since its model also hands it residual, alibi"),
        ("t5", r"takes no mask of the shape \(B, 1, T, S\)"),
        ("deberta-v2", "doesn't add its mask to its scores"),
    ],
)
def test_biases_that_leave_no_place_for_it_are_named_with_what_works(model_type: str, why: str) -> None:
    message = f"has relative biases of its own and {why}, so its scores can't be given the bias of pos='alibi'"
    for pos in ("alibi", "alibi:max_bias=16"):
        with pytest.raises(UnsupportedError, match=rf"{message}\. pos='rope' replaces those, pos='nope' drops them"):
            plan_patch(zoo.tiny(model_type)[0], pos=pos)
    for works in ("rope:theta=500", "nope"):
        assert not plan_patch(zoo.tiny(model_type)[0], pos=works).empty


def test_biases_beside_a_mask_leave_it_a_place() -> None:
    assert not plan_patch(zoo.tiny("umt5")[0], pos="alibi").empty


def test_a_host_that_rotates_is_told_what_works() -> None:
    model = zoo.tiny("llama")[0]
    for pos in ("alibi", "sinusoidal"):
        with pytest.raises(NothingToPatchError, match=r"rope:theta=\.\.\.' changes that rotation, pos='nope' drops it"):
            plan_patch(model, pos=pos)
    for works in ("rope:theta=500", "nope"):
        assert not plan_patch(model, pos=works).empty
