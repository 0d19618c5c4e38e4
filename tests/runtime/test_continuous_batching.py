"""`generate_batch` (continuous batching) gives the tokens of `generate`, under every scheme of positions."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from sampled import slow_but
from torch import nn
from transformers import ContinuousBatchingConfig, GenerationConfig, GPT2Config, GPT2LMHeadModel
from zoo import tiny

from hfpatch import patch_model
from hfpatch.errors import PositionError
from hfpatch.runtime import attention

PROMPTS = [torch.randint(3, 90, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (20, 5, 11)]
SCHEMES = (None, "alibi", "rope", "nope", "sinusoidal", "learned:max_positions=48", "alibi:max_bias=4")
NEW = 6


def made(family: str, pos: str | None) -> Any:
    if family == "gpt2":
        torch.manual_seed(0)
        config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=64, initializer_range=0.4)
        model: Any = GPT2LMHeadModel(config).eval()
    else:
        model = tiny(family, auto_class="AutoModelForCausalLM")[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model if pos is None else patch_model(model, pos=pos)


def one_by_one(model: Any) -> list[list[int]]:
    settings = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    found = [model.generate(torch.tensor([prompt]), generation_config=settings)[0] for prompt in PROMPTS]
    return [ids[len(prompt) :].tolist() for ids, prompt in zip(found, PROMPTS, strict=True)]


def together(model: Any, **options: Any) -> list[list[int]]:
    settings = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=64, **options)
    found = model.generate_batch(PROMPTS, settings, continuous_batching_config=small, progress_bar=False)
    return [one.generated_tokens for _, one in sorted(found.items())]


CASES = [("gpt2", pos, kind) for pos in SCHEMES for kind in ("sdpa", "eager")]
CASES += [(family, "alibi", "sdpa") for family in ("gpt_bigcode",)] + [("llama", "nope", "sdpa")]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("family", "pos", "kind"), slow_but(CASES, [("gpt2", "alibi", kind) for kind in ("sdpa", "eager")])
)
def test_tokens_are_those_of_generate(family: str, pos: str | None, kind: str) -> None:
    model = made(family, pos)
    model.set_attn_implementation(kind)
    assert together(model) == one_by_one(model)
    assert len({token for tokens in one_by_one(model) for token in tokens}) > 3  # tokens with power


@pytest.mark.slow
def test_distances_by_places_in_the_row_are_seen(monkeypatch: Any) -> None:
    """The control: keys counted over all requests."""
    monkeypatch.setattr(attention, "packed_slots", lambda *_: None)
    model = made("gpt2", "alibi")
    model.set_attn_implementation("sdpa")
    assert together(model) != one_by_one(model)


def test_positions_of_packed_requests() -> None:
    """Two requests: 3 new tokens after 2 cached ones, and 1 after 4; then 2 places of padding."""
    module, tokens = nn.Module(), torch.zeros(1, 6, 8)
    module.config = GPT2Config()
    ends_q, ends_k = torch.tensor([0, 3, 4, 4]), {"full_attention": torch.tensor([0, 5, 10, 10])}
    arguments = {"cu_seq_lens_q": ends_q, "cu_seq_lens_k": ends_k, "attention_mask": torch.zeros(1, 1, 6, 10)}
    queries, keys = attention.packed_slots(module, "layer_idx", tokens, arguments)
    assert queries[0, :4].tolist() == [2, 3, 4, 4]
    assert keys.tolist() == [0, 1, 2, 3, 4] * 2
    assert attention.packed_slots(module, "layer_idx", tokens, {}) is None
    of_one_type = arguments | {"cu_seq_lens_k": ends_k["full_attention"]}  # as in transformers 5.17
    module.config._attn_implementation_internal = "paged|sdpa"
    again = attention.packed_slots(module, "layer_idx", tokens, of_one_type)
    assert again is not None
    assert torch.equal(again[0], queries)
    assert torch.equal(again[1], keys)
    module.config._attn_implementation_internal = "sdpa"  # a packed batch of training
    assert attention.packed_slots(module, "layer_idx", tokens, of_one_type) is None


@pytest.mark.parametrize("kind", ["flash_attention_2", "flex_attention"])
def test_an_attention_that_loses_the_bias_is_refused_when_it_is_chosen(kind: str, monkeypatch: Any) -> None:
    """As continuous batching does where flash attention is installed: an error in its thread would only be logged."""
    monkeypatch.setattr(GPT2LMHeadModel, "_check_and_adjust_attn_implementation", lambda self, name, *_, **__: name)
    model, other = made("gpt2", "alibi"), made("gpt2", "rope")
    model.set_attn_implementation("eager")
    with pytest.raises(PositionError, match="bias would be lost"):
        model.set_attn_implementation(kind)
    assert model.config._attn_implementation == "eager"
    other.set_attn_implementation(kind)
    assert other.config._attn_implementation == kind
