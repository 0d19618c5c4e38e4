"""nnsight reads and changes a GPT-2 without norms: logit lens and direct attribution are plain sums.

Needs `pip install nnsight`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_models import patch
from torch import Tensor
from zoo import tiny

pytest.importorskip("nnsight", reason="nnsight isn't installed")
import nnsight

pytestmark = pytest.mark.slow
IDS = torch.randint(5, 90, (2, 9), generator=torch.Generator().manual_seed(1))
EQUAL, WRONG = 1e-5, 0.1


def traced(model: Any) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """What each component adds to the stream (embeddings first), the streams behind the blocks, and the logits."""
    wrapped = nnsight.NNsight(model)
    with torch.no_grad(), wrapped.trace(IDS):
        parts, streams = nnsight.save([]), nnsight.save([])
        body = wrapped.transformer
        parts.append(body.wte.output)
        parts.append(body.wpe.output)
        for block in body.h:
            parts.append(block.attn.c_proj.output)
            parts.append(block.mlp.c_proj.output)
            streams.append(block.output)
        logits = wrapped.lm_head.output.save()
    return parts, streams, logits


def effect_of_the_last_mlp(model: Any, before: Tensor) -> Tensor:
    """The logits less those of a run in which the last MLP writes nothing."""
    wrapped = nnsight.NNsight(model)
    with torch.no_grad(), wrapped.trace(IDS):
        wrapped.transformer.h[-1].mlp.c_proj.output[:] = 0
        logits = wrapped.lm_head.output.save()
    return before - logits


def off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.std())


@torch.no_grad()
def errors(model: Any) -> dict[str, float]:
    """How far nnsight's logits are from the model's, and plain sums from what they are to be."""
    norm, (parts, streams, logits) = model.transformer.ln_f, traced(model)

    def through_the_head(x: Tensor) -> Tensor:
        """Without the head's constant, and without a scale."""
        gain = getattr(norm, "weight", None)
        x = x if gain is None or not len(gain) else (x - x.mean(-1, keepdim=True)) * gain
        return x @ model.lm_head.weight.T

    constant = model.lm_head(norm(torch.zeros_like(parts[0])))  # an embedding of nothing
    attributed = [through_the_head(part) for part in parts]
    lens = [model.lm_head(norm(stream)) for stream in streams]
    sums = [sum(attributed[: 2 * place + 4]) + constant for place in range(len(streams))]
    return {
        "logits": off(logits, model(IDS).logits),
        "logit lens": max(off(found, expected) for found, expected in zip(sums, lens, strict=True)),
        "attribution": off(sums[-1], logits),
        "direct effect": off(attributed[-1], effect_of_the_last_mlp(model, logits)),
    }


@pytest.mark.parametrize("tied", [True, False])
def test_attributions_of_a_model_without_norms_are_sums(tied: bool, record: Any) -> None:
    model = tiny("gpt2", auto_class="AutoModelForCausalLM", tie_word_embeddings=tied)[0].double()
    control = errors(copy.deepcopy(model))
    patch(model, norm="none", only=["*", "transformer.ln_f"], init="reset")
    found = errors(model)
    assert max(found.values()) < EQUAL, found
    assert control.pop("logits") < EQUAL
    assert min(control.values()) > WRONG, control  # LayerNorm's scale is another one for each token
    what = f"GPT-2 without norms{'' if tied else ', its head untied'}: logit lens, attributions and a direct effect"
    record("nnsight", what, "sums", f"off by at most {max(found.values()):.0e}", f"{min(control.values()):.2g}")
