"""A checkpoint of hfpatch 0.2 is refused, and what the error says makes another of it.

fixtures/version2.json holds the config.json that hfpatch 0.2.0 wrote with transformers 5.23 of a GPT-2 with
`norm="rms", pos="rope:theta=300"`, the tensors by name and shape, and what the model returned. The weights are a
function of their names (`values`), so that none are stored.
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import inputs, patch
from torch import Tensor
from transformers import AutoConfig, AutoModel, GPT2Config, GPT2Model

from hfpatch.hub.push import push_patched
from hfpatch.runtime.patch_errors import CheckpointError

SAVED: dict[str, Any] = json.loads((Path(__file__).parent / "fixtures/version2.json").read_text(encoding="utf-8"))


def values(name: str, shape: list[int]) -> Tensor:
    """Numbers between -1 and 1 (gains: 0 and 1), by the name alone: the same on every machine."""
    i = torch.arange(1, 1 + math.prod(shape), dtype=torch.float64) + zlib.crc32(name.encode()) % 9973
    fractions = (i * ((5**0.5 - 1) / 2)).frac().view(shape)
    return (fractions if len(shape) == 1 and name.endswith("weight") else 2 * fractions - 1).float()


def sums(model: Any) -> list[float]:
    """Of the last hidden state, weighted by other numbers of the same kind: each entry counts."""
    with torch.no_grad():
        x = model(**inputs(model)).last_hidden_state.double()
    weights = torch.stack([values(str(k), list(x.shape)) for k in range(4)]).double()
    return (weights * x).sum((1, 2, 3)).tolist()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SAVED["config"]), encoding="utf-8")
    weights = {name: values(name, shape) for name, shape in SAVED["tensors"].items()}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


@pytest.mark.parametrize(("version", "until"), [(2, "0.4"), (1, "0.2")])
def test_it_is_refused_with_what_to_do(version: int, until: str, folder: Path) -> None:
    config = json.loads(json.dumps(SAVED["config"]))
    config["hfpatch"]["version"] = version
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    says = rf"hfpatch 0\.{version}, .*Patch the original again.*load_state_dict.*'hfpatch<{until}'"
    for opened in (
        lambda: AutoModel.from_pretrained(folder),
        lambda: AutoModel.from_pretrained(folder, check_fingerprint=False),
        lambda: AutoConfig.from_pretrained(folder),
        lambda: push_patched(folder, "me/old", dry_run=True),
    ):
        with pytest.raises(CheckpointError, match=says):
            opened()


def test_the_original_patched_again_takes_over_its_tensors(folder: Path) -> None:
    """It computes what version 0.2 computed; the one tensor more in its file was the mark of that version."""
    settings = {name: value for name, value in SAVED["config"].items() if name not in ("hfpatch", "architectures")}
    settings |= SAVED["config"]["hfpatch"]["guarded"]
    model = GPT2Model(GPT2Config(**settings)).eval()
    patch(model, norm="rms", pos="rope:theta=300")
    found = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not found.missing_keys
    assert len(found.unexpected_keys) == 1
    assert sums(model) == pytest.approx(SAVED["outputs"], rel=1e-4, abs=1e-4)
