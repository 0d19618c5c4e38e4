"""Hosts with classes that aren't their own: `register_patch_mapping`, `fusion_config=` and kernels put them there."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sampled import slow_but
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention, GPT2Block, GPT2PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaPreTrainedModel, LlamaRotaryEmbedding
from transformers.monkey_patching import clear_patch_mapping, register_patch_mapping
from zoo import tiny, tiny_config

from hfpatch import patch_model
from hfpatch.errors import NothingToPatchError, UnsupportedError, WrappedModelError

IDS = torch.randint(5, 90, (2, 9), generator=torch.Generator().manual_seed(1))


class OwnRMSNorm(nn.Module):
    """An RMSNorm under another name."""

    def __init__(self, d: int, eps: float = 1e-6):
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(d)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon)


class NoNorm(OwnRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class SameAttention(GPT2Attention):
    """The host's under another name."""


class OtherAttention(GPT2Attention):
    """Whose one projection makes v, k and q, in this order."""

    def forward(self, hidden_states: Tensor, **_: Any) -> Any:  # type: ignore[override]
        parts = self.c_attn(hidden_states).chunk(3, -1)
        v, k, q = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).flatten(2)), None


class HalfBlock(GPT2Block):
    """With branches of half the strength."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        mixed, _ = self.attn(self.ln_1(hidden_states), attention_mask=kwargs.get("attention_mask"))
        hidden_states = hidden_states + 0.5 * mixed
        return hidden_states + 0.5 * self.mlp(self.ln_2(hidden_states))


class Unturned(LlamaRotaryEmbedding):
    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        cos, sin = LlamaRotaryEmbedding.forward(self, x, position_ids)
        return torch.ones_like(cos), torch.zeros_like(sin)


class DoubleMLP(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * LlamaMLP.forward(self, x)


@pytest.fixture(autouse=True)
def _nothing_registered() -> Iterator[None]:
    """Nothing is left: transformers writes a registered block into the classes' own lists of what can be recorded."""
    lists = [kind._can_record_outputs for kind in (GPT2PreTrainedModel, LlamaPreTrainedModel)]
    before = copy.deepcopy(lists)
    clear_patch_mapping()
    yield
    clear_patch_mapping()
    for one, own in zip(lists, before, strict=True):
        one.update(own)


def built(family: str, mapping: dict[str, type[nn.Module]]) -> Any:
    register_patch_mapping(mapping, overwrite=True)
    model, _ = tiny(family, auto_class="AutoModelForCausalLM")
    return model


def patched(model: Any, request: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return patch_model(model, **request)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


RIGHT: list[tuple[str, dict[str, type[nn.Module]], dict[str, Any]]] = [
    *(("llama", {"LlamaRMSNorm": OwnRMSNorm}, {"norm": norm}) for norm in ("dyt", "layer")),
    *(("gpt2", {"GPT2Attention": SameAttention}, one) for one in ({"pos": "rope"}, {"pos": "alibi"}, {"norm": "rms"})),
    *(("gpt2", {"GPT2Attention": OtherAttention}, one) for one in ({"pos": "nope"}, {"norm": "rms"})),
    *(("gpt2", {"GPT2Block": HalfBlock}, one) for one in ({"norm": "rms"}, {"pos": "rope"}, {"mlp": "swiglu"})),
    *(("llama", {"LlamaMLP": DoubleMLP}, one) for one in ({"norm": "dyt"}, {"pos": "rope:theta=5e5"})),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("family", "mapping", "request_"), slow_but(RIGHT, RIGHT[2:9:2]))
def test_a_host_of_other_classes_is_patched_saved_and_reopened(
    family: str, mapping: dict, request_: dict, tmp_path: Path
) -> None:
    model = built(family, mapping)
    before = logits(model)
    moved = float((logits(patched(model, request_)) - before).abs().max() / before.std())
    assert moved < 1e-3 if request_ == {"norm": "rms"} else moved > 1e-3
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("norm", ["dyt", "layer"])
def test_a_foreign_norm_that_a_patch_replaces_is_not_missed(norm: str, tmp_path: Path) -> None:
    model = patched(built("llama", {"LlamaRMSNorm": OwnRMSNorm}), {"norm": norm})
    model.save_pretrained(tmp_path)
    clear_patch_mapping()
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(model))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("family", "mapping", "request_", "error", "words"),
    [
        ("llama", {"LlamaRMSNorm": NoNorm}, {"norm": "dyt"}, NothingToPatchError, "no LayerNorm-like module"),
        *(
            ("gpt2", {"GPT2Attention": OtherAttention}, {"pos": pos}, UnsupportedError, words)
            for pos, words in (("rope", "isn't transformers' own"), ("alibi", "can't be given the bias"))
        ),
        *(
            ("llama", {"LlamaRotaryEmbedding": Unturned}, {"pos": pos}, UnsupportedError, "isn't transformers' own")
            for pos in ("nope", "rope:theta=5e5")
        ),
        ("gpt2", {"GPT2Block": HalfBlock}, {"placement": "post"}, UnsupportedError, ""),
    ],
)
def test_what_is_not_known_of_a_foreign_class_is_refused(
    family: str, mapping: dict, request_: dict, error: type[Exception], words: str
) -> None:
    model = built(family, mapping)
    before = logits(model)
    with pytest.raises(error, match=words):
        patch_model(model, **request_)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize(("child", "request_"), [("attn", {"pos": "rope"}), ("ln_1", {"norm": "dyt"})])
def test_a_kernel_on_a_module_is_refused(child: str, request_: dict) -> None:
    """`kernelize` gives modules a forward of their own; the package that does it isn't needed for that."""
    model, _ = tiny("gpt2", auto_class="AutoModelForCausalLM")
    module = getattr(model.transformer.h[0], child)
    module.forward = types.MethodType(type(module).forward, module)
    with pytest.raises(WrappedModelError, match="carries a forward of its own"):
        patch_model(model, **request_)


@pytest.mark.slow
@pytest.mark.parametrize("fused_again", [True, False])
def test_fused_patch_embeddings(fused_again: bool, tmp_path: Path) -> None:
    """`fusion_config=` puts a linear layer into the place of a convolution, and converts its weights on the way."""
    plain = AutoModelForImageTextToText.from_config(tiny_config("qwen2_vl"))
    plain.save_pretrained(tmp_path / "plain")
    fusion = {"patch_embeddings": True}
    model: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "plain", fusion_config=fusion)
    assert type(model.model.visual.patch_embed).__name__.startswith("Fused")
    patched(model, {"norm": "dyt"}).save_pretrained(tmp_path / "patched")
    clear_patch_mapping()
    options = {"fusion_config": fusion} if fused_again else {}
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "patched", **options)
    assert torch.equal(logits(again.eval()), logits(model.eval()))
    image = torch.randn(16, model.model.visual.patch_embed.patch_volume, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(again.model.visual.patch_embed(image), model.model.visual.patch_embed(image), atol=1e-5)
