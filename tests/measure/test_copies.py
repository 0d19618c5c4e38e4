"""Copies of models: what they compute, and that the original stays as it is."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import zoo
from tiny_models import changes, fingerprint, inputs, patch, tiny

from hfpatch.measure.copies import copy_of, unpatched_config

LM = "AutoModelForCausalLM"


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
    assert torch.equal(copied(**batch).logits, model.eval()(**batch).logits)
    assert calls == 2 * [uncopyable], "hooks are the original's"
    assert not changes(before, fingerprint(model.train()))
    assert copied.lm_head.weight is copied.transformer.wte.weight, "tied as before"
    assert copied.lm_head.weight.mark == 3
    shared = {one.untyped_storage().data_ptr() for one in model.parameters()}
    assert {one.untyped_storage().data_ptr() in shared for one in copied.parameters()} == {share}


def test_buffers_of_one_axis_are_never_shared() -> None:
    """transformers' dynamic scaling writes its frequencies in place where an input is longer than before."""
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = tiny("llama", max_position_embeddings=16, rope_parameters=scaling)
    before = model.rotary_emb.inv_freq.clone()
    copied = copy_of(model, share=True)
    copied(input_ids=torch.ones(1, 40).long())
    assert not torch.equal(copied.rotary_emb.inv_freq, before)  # control
    assert torch.equal(model.rotary_emb.inv_freq, before)


def test_experts_compute_in_float64() -> None:
    model, batch = zoo.tiny("mixtral")
    copied = copy_of(model, dtype=torch.float64)
    assert copied.config._experts_implementation == "eager"
    assert copied(**batch).last_hidden_state.dtype == torch.float64


def test_a_copy_that_is_built_anew_draws_no_random_numbers() -> None:
    model = patch(tiny("gpt2", LM, n_layer=5), norm="dyt")
    before = fingerprint(model)  # with the random streams
    small = copy_of(model, size="small", dtype=torch.float64)
    assert (len(small.transformer.h), type(small)) == (2, type(model))
    host = copy_of(model, config=unpatched_config(model.config), device="meta")
    assert type(host.transformer.ln_f) is torch.nn.LayerNorm
    assert not changes(before, fingerprint(model))
