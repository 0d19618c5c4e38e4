"""Checkpoints of hfpatch 0.1 are refused with one sentence, whatever scheme they hold.

fixtures/version1.json holds config.json files as hfpatch 0.1.0 wrote them with transformers 5.23, under the name of
their scheme and options: `patch_model` on a tiny model with random weights, then `save_pretrained`. They are of one
block, so that they stay short; nothing in them was edited.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel

import hfpatch
from hfpatch.core.registry import MLPS, NORMS, PLACEMENTS, POSITIONS
from hfpatch.runtime.errors import CheckpointError

SAVED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "fixtures/version1.json").read_text(encoding="utf-8")
)
SENTENCE = (
    "it was saved by hfpatch 0.1, whose patch record (version 1) this version doesn't read. "
    "Open it with hfpatch 0.1 (pip install 'hfpatch<0.2'), or patch the original again."
)
OPENERS = {"AutoConfig": AutoConfig.from_pretrained, "AutoModel": AutoModel.from_pretrained}


def schemes_in(config: dict[str, Any]) -> set[str]:
    """Names of all schemes in a record of version 1."""
    parts = [part for kind in ("norm", "pos", "mlp", "placement") for part in config["hfpatch"].get(kind, [])]
    return {part["scheme"]["name"] for part in parts}


@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("name", SAVED)
def test_a_checkpoint_of_version_1_is_refused(name: str, opener: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SAVED[name]), encoding="utf-8")
    save_file({"weight": torch.randn(2, 2)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        OPENERS[opener](tmp_path)
    assert str(caught.value) == f"this checkpoint's config.json: {SENTENCE}"


def test_the_advice_is_for_an_earlier_version_than_this_one() -> None:
    assert not hfpatch.__version__.startswith("0.1")


def test_every_scheme_of_version_1_is_there() -> None:
    """This version has no scheme that hfpatch 0.1 didn't have; a new one is left out here."""
    found = set().union(*map(schemes_in, SAVED.values()))
    assert found == {*NORMS, *POSITIONS, *MLPS, *PLACEMENTS}
    assert all(config["hfpatch"]["version"] == 1 for config in SAVED.values())
    assert all(config["hfpatch"]["fingerprint"] for config in SAVED.values())
