"""Models that are refused as they are: quantized ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import patch, tiny
from torch import nn

from hfpatch import export_model, patch_model, plan_patch, repair, unpatch_model, verify
from hfpatch.core.bare import is_quantized
from hfpatch.runtime.patch_errors import UnsupportedError

CAUSAL = "AutoModelForCausalLM"
CALLS: dict[str, Callable[[Any, Any, Path], Any]] = {
    "patch": lambda model, plain, folder: patch_model(model, norm="dyt"),
    "plan": lambda model, plain, folder: plan_patch(model, norm="dyt"),
    "unpatch": lambda model, plain, folder: unpatch_model(model),
    "repair": lambda model, plain, folder: repair(model, plain, "self"),
    "verify": lambda model, plain, folder: verify(model, plain),
    "remote": lambda model, plain, folder: export_model(model, folder / "out", to="remote"),
    "native": lambda model, plain, folder: export_model(model, folder / "out", to="native"),
}


def quantize(model: nn.Module) -> None:
    """One weight in eight bits, as bitsandbytes keeps it."""
    layer = model.get_submodule("transformer.h.0.mlp.c_fc")
    layer.weight = nn.Parameter(layer.weight.detach().to(torch.int8), requires_grad=False)  # type: ignore[arg-type]


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CALLS)
def test_quantized_models(name: str, tmp_path: Path) -> None:
    plain, model = tiny("gpt2", CAUSAL), patch(tiny("gpt2", CAUSAL), pos="rope", reversible=True)
    quantize(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(UnsupportedError, match="quantized"):
        CALLS[name](model, plain, tmp_path)
    assert not list(tmp_path.iterdir())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_what_counts_as_quantized() -> None:
    class Packed(torch.Tensor):
        """As another library's tensors."""

    Packed.__module__ = "another.library"
    model = tiny("gpt2", CAUSAL)
    assert not any(is_quantized(model.to(dtype)) for dtype in (torch.float64, torch.float16, torch.bfloat16))
    model.transformer.ln_f.weight = nn.Parameter(torch.ones(32).as_subclass(Packed))
    assert is_quantized(model)
    model = tiny("gpt2", CAUSAL)
    model.hf_quantizer = object()
    assert is_quantized(model)
