"""What a patched model does when another library puts its own linear layers or packed weights in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import patch, tiny
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from hfpatch.runtime.patch_errors import CheckpointError
from hfpatch.runtime.qk_layouts import Fused, Projections, channels_per_head

CAUSAL = "AutoModelForCausalLM"


@pytest.mark.sample(3)
@pytest.mark.parametrize("mode", ["parametrize", "fold"])
@pytest.mark.parametrize("method", ["quanto", "bitsandbytes", "torchao", "gptq"])
def test_opened_by_a_quantizer_that_replaces_layers(method: str, mode: str, tmp_path: Path) -> None:
    """Its layers would drop the centring, which then isn't in the weights."""
    patch(tiny("opt", CAUSAL), norm=f"rms:mode={mode}").save_pretrained(tmp_path)
    config: Any = AutoConfig.from_pretrained(tmp_path)
    config.quantization_config = {"quant_method": method}
    if mode == "parametrize" and method in ("quanto", "gptq"):
        with pytest.raises(CheckpointError, match=f"out_proj is centred in every forward, and {method} replaces"):
            AutoModelForCausalLM.from_config(config)
    else:
        AutoModelForCausalLM.from_config(config)


def test_a_centred_layer_keeps_its_weight() -> None:
    """optimum-quanto takes the weight out of a layer that it has replaced."""
    plain, model = tiny("opt", CAUSAL), patch(tiny("opt", CAUSAL), norm="rms:mode=parametrize")
    layer, same = (one.model.decoder.layers[0] for one in (model, plain))
    with pytest.raises(RuntimeError, match=r"Linear is centred in every forward.*norm='rms'"):
        layer.fc2.weight = None
    layer.fc2.weight = nn.Parameter(torch.zeros_like(layer.fc2.weight))  # as optimizers of memory do
    for free in (layer.fc1, same.fc2):
        free.weight = None
        assert free.weight is None


@pytest.mark.parametrize(("layout", "width"), [(Projections("q", "k"), 32), (Fused("q"), 96)])
def test_the_width_of_queries_with_packed_weights(layout: Any, width: int) -> None:
    """bitsandbytes keeps 4-bit weights as one column of bytes."""
    attention = nn.Module()
    attention.q, attention.heads = nn.Linear(32, width), 4
    assert channels_per_head(attention, "/ heads", layout) == 8
    attention.q.weight = nn.Parameter(torch.zeros(32 * width // 2, 1, dtype=torch.uint8), requires_grad=False)
    assert channels_per_head(attention, "/ heads", layout) == 8
