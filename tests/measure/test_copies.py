"""Copies of models: what they share, in which dtype and on which device, and that the original stays as it is."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import zoo
from tiny_models import changes, fingerprint, inputs, patch, tiny

from hfpatch.measure.copies import copy_of, unpatched_config
from hfpatch.runtime.lens import host_class

LM = "AutoModelForCausalLM"


def storage(tensor: Any) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("share", [False, True])
def test_a_copy_computes_the_same_and_nothing_of_the_original_changes(share: bool) -> None:
    model = tiny("gpt2", LM).train()
    model.lm_head.weight.mark = 3
    uncopyable = threading.Lock()  # as a user's hook may hold
    calls: list[Any] = []
    model.transformer.h[0].register_forward_hook(lambda *_: calls.append(uncopyable))
    before, batch = fingerprint(model), inputs(model)
    copied = copy_of(model, share=share)
    assert not copied.training
    assert not any(p.requires_grad for p in copied.parameters())
    assert torch.equal(copied(**batch).logits, model.eval()(**batch).logits)
    assert calls == 2 * [uncopyable], "hooks are the original's"
    assert not changes(before, fingerprint(model.train()))
    assert copied.lm_head.weight is copied.transformer.wte.weight, "tied as before"
    assert copied.lm_head.weight.mark == 3
    assert copied.config is not model.config
    for name, parameter in model.named_parameters():
        other = copied.get_parameter(name)
        assert other is not parameter
        assert (storage(other) == storage(parameter)) is share


def test_buffers_of_one_axis_are_never_shared() -> None:
    """transformers' dynamic scaling writes its frequencies in place where an input is longer than before."""
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = tiny("llama", max_position_embeddings=16, rope_parameters=scaling)
    before = model.rotary_emb.inv_freq.clone()
    copied = copy_of(model, share=True)
    copied(input_ids=torch.ones(1, 40).long())
    assert not torch.equal(copied.rotary_emb.inv_freq, before)  # control
    assert torch.equal(model.rotary_emb.inv_freq, before)


def test_dtypes_and_devices() -> None:
    model = tiny("llama").bfloat16()
    model.rotary_emb.float()
    wide = copy_of(model, dtype=torch.float64)
    assert {value.dtype for value in wide.state_dict().values()} == {torch.float64}
    half = copy_of(model, dtype=torch.float16, share=True)
    assert half.norm.weight.dtype == torch.float16
    assert half.rotary_emb.inv_freq.dtype == torch.float32
    empty = copy_of(model, device="meta")
    assert {value.device.type for value in (*empty.parameters(), *empty.buffers())} == {"meta"}
    assert empty.norm.weight.dtype == torch.bfloat16
    again = copy_of(empty, dtype=torch.float32, device="cpu")
    assert {value.device.type for value in (*again.parameters(), *again.buffers())} == {"cpu"}
    assert again.norm.weight.shape == model.norm.weight.shape


def test_experts_compute_in_float64() -> None:
    model, batch = zoo.tiny("mixtral")
    copied = copy_of(model, dtype=torch.float64)
    assert copied.config._experts_implementation == "eager"
    assert copied(**batch).last_hidden_state.dtype == torch.float64


def test_a_copy_that_is_built_anew() -> None:
    model = patch(tiny("gpt2", LM, n_layer=5), norm="dyt")
    stream = torch.get_rng_state()
    small = copy_of(model, size="small", dtype=torch.float64)
    assert len(small.transformer.h) == 2
    assert type(small) is type(model)
    assert type(small.transformer.ln_f).__name__ == "DynamicTanh"
    assert small.lm_head.weight.dtype == torch.float64
    assert torch.equal(stream, torch.get_rng_state())
    config = unpatched_config(model.config)
    host = copy_of(model, config=config, device="meta")
    assert type(host) is host_class(type(model)) is not type(model)
    assert host.config is config
    assert host.lm_head.weight.is_meta
    assert type(host.transformer.ln_f) is torch.nn.LayerNorm
