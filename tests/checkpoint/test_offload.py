"""Patched checkpoints opened by `device_map="auto"` with too little memory: what doesn't fit lies on disk."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import measure_large
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
_QUICK = [(name, "plugin") for name in CASES]
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


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="a process's peak is read from /proc")
def test_a_larger_one_in_a_process_of_its_own(tmp_path: Path) -> None:
    """What `python tools/measure_large.py --offload` measures: to the bit, since nothing but the place differs."""
    folder, out = tmp_path / "model", tmp_path / "out"
    folder.mkdir()
    measure_large.make_checkpoint(folder, layers=4, width=512, vocabulary=2000, shard=8_000_000)
    measure_large.patch(folder, out, "--norm", "rms", "--calibration", "none")
    found, whole = (measure_large.opened(out, tmp_path, memory)[2] for memory in (12_000_000, 0))
    assert found["on disk"] > 0 == whole["on disk"]
    assert found["logits"].isfinite().all()
    assert torch.equal(found["logits"], whole["logits"])
    plain = measure_large.opened(folder, tmp_path, 0)[2]["logits"]
    assert 0 < (plain - whole["logits"]).abs().max() < 0.1 * plain.std()  # exact but for bfloat16
