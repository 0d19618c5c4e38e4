"""Patched checkpoints opened by `device_map="auto"` with too little memory: what doesn't fit lies on disk."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import inputs, patch, tiny
from torch import Tensor

from hfpatch.export import export_model

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("gpt2", "AutoModelForCausalLM", {"norm": "rms", "pos": "rope"}),
    "llama": ("llama", "AutoModelForCausalLM", {"norm": "dyt"}),
    "opt": ("opt", "AutoModelForCausalLM", {"norm": "rms"}),
    "bert": ("bert", "AutoModelForMaskedLM", {"pos": "rope"}),
    "t5": ("t5", "AutoModelForSeq2SeqLM", {"norm": "dyt"}),
}


_ALL = [(name, form) for name in CASES for form in ("plugin", "remote")]
_QUICK = [("gpt2", "remote"), *((name, "plugin") for name in CASES)]
FORMS = [pytest.param(*one, marks=() if one in _QUICK else pytest.mark.slow) for one in _ALL]
FORMS += [pytest.param("gpt2", "native")]  # the only one of these that a stock architecture equals


def outputs(model: Any, given: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return model(**given).logits


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_what_memory_leaves(name: str, form: str, tmp_path: Path) -> None:
    family, auto, request = CASES[name]
    model = patch(tiny(family, auto), **request)
    given, folder = inputs(model), tmp_path / form
    expected = outputs(model, given)
    export_model(copy.deepcopy(model), folder, form)
    options: dict[str, Any] = {"trust_remote_code": True} if form == "remote" else {}
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    options |= {"device_map": "auto", "max_memory": {"cpu": size // 2}, "offload_folder": tmp_path / "offload"}
    again = getattr(transformers, auto).from_pretrained(folder, **options)
    places = again.hf_device_map
    assert "disk" in places.values()
    assert any(parameter.is_meta for parameter in again.parameters())
    torch.testing.assert_close(outputs(again, given), expected, rtol=1e-5, atol=1e-5)
    whole = [name for name, one in again.named_modules() if type(one).__name__ in again._no_split_modules]
    assert whole
    assert not [place for place in places if any(place.startswith(f"{block}.") for block in whole)]
