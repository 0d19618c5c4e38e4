"""A GPT-2 with RoPE is a GPT-NeoX: the model that transformers ships for it gives the same logits, gradients, texts."""

from __future__ import annotations

import pytest
import torch
from tiny_models import patch, tiny
from transformers import GPT2LMHeadModel

from hfpatch.export.native import native_model
from hfpatch.schemes.rope import RoPE

LM = "AutoModelForCausalLM"


def twins(theta: float = 10_000.0) -> tuple[GPT2LMHeadModel, torch.nn.Module]:
    model = patch(tiny("gpt2", LM), pos=RoPE(theta=theta))
    return model, native_model(model, "gpt_neox")


@pytest.mark.parametrize("theta", [10_000.0, 100.0])
def test_equal_logits(theta: float) -> None:
    ours, theirs = twins(theta)
    ids = torch.randint(5, ours.config.vocab_size, (3, 2 * ours.config.n_positions))
    with torch.no_grad():
        a, b = ours(ids).logits, theirs(ids).logits
    assert float((a - b).abs().max()) <= 1e-5 * float(b.abs().max())


def test_control_another_theta() -> None:
    (ours, _), (_, theirs) = twins(), twins(100.0)
    ids = torch.randint(5, ours.config.vocab_size, (3, 20))
    with torch.no_grad():
        a, b = ours(ids).logits, theirs(ids).logits
    assert float((a - b).abs().max()) > 1e-2 * float(b.abs().max())


def test_equal_gradients_and_tokens() -> None:
    ours, theirs = twins()
    ids = torch.randint(5, ours.config.vocab_size, (2, 12))
    for model in (ours, theirs):
        model(ids, labels=ids).loss.backward()
    a = ours.transformer.h[0].mlp.c_fc.weight.grad.T
    b = theirs.gpt_neox.layers[0].mlp.dense_h_to_4h.weight.grad
    assert float((a - b).abs().max()) <= 1e-4 * float(b.abs().max())
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "num_beams": 2}
    assert torch.equal(ours.generate(ids, **settings), theirs.generate(ids, **settings))
