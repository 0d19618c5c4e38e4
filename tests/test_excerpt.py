"""Samples of weights and models cut down: what they see, and that they leave a model as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_models import changes, inputs, patch, tiny
from tiny_models import fingerprint as trace
from torch import nn

from hfpatch.checkpoint.weight_digest import cut_down, digest, same_weights, sample


def test_small_tensors_are_read_in_full() -> None:
    assert torch.equal(sample(torch.arange(4096).view(64, 64)), torch.arange(4096))
    assert sample(torch.tensor(3.0)).tolist() == [3.0]
    assert sample(torch.empty(0)).tolist() == []


@pytest.mark.parametrize("shape", [(4097,), (300, 768), (3, 5, 7, 900), (768, 30_000)])
def test_larger_ones_at_places_from_end_to_end(shape: tuple[int, ...]) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    found = sample(whole)
    runs = found.view(-1, 64)
    assert 8 <= len(runs) <= 64
    assert torch.equal(runs - runs[:, :1], torch.arange(64).expand(len(runs), -1))  # neighbors
    apart = (runs[1:, 0] - runs[:-1, 0]).unique()
    assert len(apart) == 1
    assert runs[0, 0] == 0
    assert whole.numel() - runs[-1, -1] <= apart + 64
    assert torch.equal(sample(whole.transpose(0, -1)), sample(whole.transpose(0, -1).contiguous()))


def test_a_view_is_sampled_where_it_lies() -> None:
    whole = torch.arange(200_000)
    assert sample(whole[100_000:])[0] == 100_000


class Layer(nn.Module):
    """A wide matrix, a gain, and buffers of both kinds."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 700))
        self.register_buffer("stored", torch.arange(5))
        self.register_buffer("computed", torch.arange(5.0), persistent=False)


def layer() -> Layer:
    return Layer(torch.randn(700, 900, generator=torch.Generator().manual_seed(1)))


def test_a_digest_goes_by_values() -> None:
    one = digest(layer(), torch.float32)
    assert one == digest(layer(), torch.float32)
    for change in (
        lambda m: m.gain.data[699].mul_(1 + 2e-7),
        lambda m: m.weight.data.mul_(1.001),
        lambda m: m.weight.data.copy_(m.weight.data.flip(0)),
        lambda m: m.weight.data[:, 450:].zero_(),
        lambda m: m.stored.add_(1),
    ):
        other = layer()
        change(other)
        assert digest(other, torch.float32) != one
    same = layer()
    same.computed.add_(1)  # no checkpoint has it; the forward tells
    same.stored = same.stored.float()  # as transformers opens some counters
    assert digest(same, torch.float32) == one


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_digest_of_rounded_weights_is_the_rounded_digest(dtype: torch.dtype) -> None:
    rounded = layer().to(dtype)
    assert digest(layer(), dtype) == digest(rounded, dtype) == digest(rounded.float(), dtype)
    assert digest(layer(), torch.float32) != digest(rounded.float(), torch.float32)


def test_tied_weights_count_as_equal_ones_do() -> None:
    """Some models come back with weights shared that a patch held apart."""
    model = tiny("gpt2", "AutoModelForCausalLM")
    tied = digest(model, torch.float32)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    assert tied == digest(model, torch.float32)
    model.lm_head.weight.data[0, 0] += 1
    assert tied != digest(model, torch.float32)


def test_weights_of_another_head() -> None:
    """A base without its pooling layer: its blocks are compared; with the same tensors, all of them."""
    whole = tiny("bert")
    one, without = copy.deepcopy(whole), copy.deepcopy(whole)
    without.pooler = None
    one.embeddings.LayerNorm.weight.data[0] += 1
    saved, changed, fewer = (digest(model, torch.float32) for model in (whole, one, without))
    assert same_weights(saved, saved, other_head=False)
    assert not same_weights(saved, changed, other_head=False)
    assert not same_weights(saved, changed, other_head=True)
    assert same_weights(saved, fewer, other_head=True)
    assert same_weights(fewer, saved, other_head=True)
    assert not same_weights(saved, fewer, other_head=False)
    without.encoder.layer[1].output.dense.bias.data[0] += 1
    assert not same_weights(saved, digest(without, torch.float32), other_head=True)


def test_the_order_of_modules_is_no_difference() -> None:
    model = tiny("bert")
    before = digest(model, torch.float32)
    model._modules["embeddings"] = model._modules.pop("embeddings")
    assert list(model._modules)[-1] == "embeddings"
    assert digest(model, torch.float32) == before


def lengths(model: Any) -> list[int]:
    return [len(module) for module in model.modules() if isinstance(module, nn.ModuleList)]


def test_one_block_of_each_kind() -> None:
    model = tiny("gpt2", n_layer=6)
    with cut_down(model):
        assert lengths(model) == [1]
        assert model(**inputs(model)).last_hidden_state.isfinite().all()
    assert lengths(model) == [6]
    some = patch(tiny("gpt2", n_layer=6), norm="dyt", pos="rope", only=["h.[12].*", "h.4.ln_1"])
    with cut_down(some):
        assert lengths(some) == [3]  # as it was, both changed, one norm changed
    windows = tiny("gpt_neo", num_layers=6, attention_types=[[["global", "local"], 3]])
    with cut_down(windows):
        assert lengths(windows) == [2]
    model.h[3].attn.scale_attn_weights = False
    with cut_down(model):
        assert lengths(model) == [2]


def test_a_buffer_that_nobody_filled_is_a_kind_of_its_own() -> None:
    """Frequencies of a later block that were lost on the way are run with, and so seen."""
    model = patch(tiny("gpt2", n_layer=6), pos="rope")
    with cut_down(model):
        assert lengths(model) == [1]
    model.h[4].attn._modules["rotary_emb"].inv_freq.zero_()
    with cut_down(model):
        assert lengths(model) == [2]


def test_buffers_of_half_precision() -> None:
    model = patch(tiny("gpt2", n_layer=3), pos="rope")
    for block in model.h:
        block.attn.register_buffer("slopes", torch.ones(4, dtype=torch.bfloat16), persistent=False)
    with cut_down(model):
        assert lengths(model) == [1]
    model.h[1].attn.slopes[2] = 2.0
    with cut_down(model):
        assert lengths(model) == [2]


def test_the_output_layer_gets_narrow_and_the_embedding_stays() -> None:
    model = tiny("gpt2", "AutoModelForCausalLM", vocab_size=500)
    whole = model(**inputs(model)).logits
    with cut_down(model):
        assert model.lm_head.weight.shape == (64, 32)
        assert model.transformer.wte.weight.shape == (500, 32)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert torch.equal(model(**inputs(model)).logits, whole)


def test_a_model_is_put_back_whatever_happens() -> None:
    model = patch(tiny("gpt2", "AutoModelForCausalLM"), norm="dyt", pos="rope")
    before = trace(model)
    with pytest.raises(KeyError), cut_down(model):
        raise KeyError
    assert not changes(before, trace(model))
