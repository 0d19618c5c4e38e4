"""Checkpoints that hfpatch 0.2 saved open, whatever scheme they hold, and compute what they computed then.

fixtures/version2.json holds, for each scheme, the config.json that hfpatch 0.2.0 wrote with transformers 5.23, the
tensors by name and shape, and what the model returned. The weights are a function of their names (`values`), so that
none are stored. version2_checked.json is one with what that version stored to compare by: digests of weights and
config.json, the outputs of a small forward, and a tensor in the file that no model has. Both are of that version.
"""

from __future__ import annotations

import json
import math
import warnings
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_edits import weights_of, with_config, with_weights
from safetensors.torch import save_file
from tiny_models import inputs, logged
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

from hfpatch.checkpoint.files import MARKER
from hfpatch.core.registry import MLPS, NORMS, PLACEMENTS, POSITIONS
from hfpatch.errors import FingerprintWarning
from hfpatch.runtime.errors import CheckpointError

FIXTURE = Path(__file__).parent / "fixtures/version2.json"
SAVED: dict[str, dict[str, Any]] = json.loads(FIXTURE.read_text(encoding="utf-8"))


def values(name: str, shape: list[int]) -> Tensor:
    """Numbers between -1 and 1 (gains and variances: 0 and 1), by the name alone: the same on every machine."""
    i = torch.arange(1, 1 + math.prod(shape), dtype=torch.float64) + zlib.crc32(name.encode()) % 9973
    fractions = (i * ((5**0.5 - 1) / 2)).frac().view(shape)
    positive = name.endswith("running_var") or (len(shape) == 1 and name.endswith("weight"))
    return (fractions if positive else 2 * fractions - 1).float()


def written(saved: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(saved["config"]), encoding="utf-8")
    weights = {name: values(name, shape) for name, shape in saved["tensors"].items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def opened(folder: Path) -> tuple[Any, dict[str, Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FingerprintWarning)  # it has none: it would be of other weights
        return AutoModel.from_pretrained(folder, output_loading_info=True)


def sums(model: Any) -> list[float]:
    """Of the last hidden state, weighted by other numbers of the same kind: each entry counts."""
    with torch.no_grad():
        x = model(**inputs(model)).last_hidden_state.double()
    weights = torch.stack([values(str(k), list(x.shape)) for k in range(4)]).double()
    return (weights * x).sum((1, 2, 3)).tolist()


@pytest.mark.parametrize("scheme", SAVED)
def test_a_checkpoint_of_version_2_opens_as_it_was(scheme: str, tmp_path: Path) -> None:
    saved = SAVED[scheme]
    model, found = opened(written(saved, tmp_path))
    assert not any(found[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert sums(model) == pytest.approx(saved["outputs"], rel=1e-4, abs=1e-4)


def test_another_pairing_of_the_hosts_own_rotation_is_refused_with_what_opens_it(tmp_path: Path) -> None:
    """What `rope:pairing=` wrote for a rotating model, and `convert_pairing`."""
    saved = json.loads(json.dumps(SAVED["rope"]))
    order = "HostOrder('interleaved', Projections('q_proj', 'k_proj'), 16, 16)"
    saved["config"]["hfpatch"]["edits"].append(f"h.*.attn.@lens = {order}")
    with pytest.raises(CheckpointError, match=r"'HostOrder'.*'hfpatch<0\.3'"):
        opened(written(saved, tmp_path))


CHECKED: dict[str, Any] = json.loads(FIXTURE.with_name("version2_checked.json").read_text(encoding="utf-8"))


@pytest.fixture
def checked(tmp_path: Path) -> Path:
    written(CHECKED, tmp_path)
    (tmp_path / "hfpatch_weights.json").write_text(json.dumps(CHECKED["digests"]), encoding="utf-8")
    with_weights(tmp_path, lambda weights: weights.update({MARKER: torch.zeros(1)}))
    return tmp_path


def test_what_version_2_compared_by_is_compared(checked: Path, tmp_path: Path) -> None:
    """Every byte as ever, and by default small tensors and the names of larger ones."""
    with warnings.catch_warnings(), logged() as lines:
        warnings.simplefilter("error", FingerprintWarning)
        for check in (True, "full"):
            model = AutoModelForCausalLM.from_pretrained(checked, check_fingerprint=check)
        assert sums(model.transformer) == pytest.approx(CHECKED["outputs"], rel=1e-4, abs=1e-4)
        assert not model.load_state_dict(weights_of(checked), strict=False).unexpected_keys
        model.save_pretrained(tmp_path / "again")
        AutoModelForCausalLM.from_pretrained(tmp_path / "again", check_fingerprint="full")
    assert not [line for line in lines if MARKER in line]
    assert MARKER not in weights_of(tmp_path / "again")
    bias, large = "transformer.h.0.mlp.c_fc.bias", "transformer.wte.weight"
    with_weights(checked, lambda weights: weights[large].view(-1)[0].add_(1))
    AutoModelForCausalLM.from_pretrained(checked)
    with pytest.raises(CheckpointError, match=r"wte\.weight \(changed\)"):
        AutoModelForCausalLM.from_pretrained(checked, check_fingerprint="full")
    with_weights(checked, lambda weights: weights[bias].add_(1))
    with pytest.raises(CheckpointError, match=r"1 of its tensors.*c_fc\.bias \(changed\)"):
        AutoModelForCausalLM.from_pretrained(checked)


def test_a_config_of_version_2_that_was_edited_is_told(checked: Path) -> None:
    with_config(checked, layer_norm_epsilon=0.1)
    with pytest.warns(FingerprintWarning, match="edited"):
        AutoModelForCausalLM.from_pretrained(checked)
    with pytest.raises(CheckpointError, match="edited"):
        AutoModelForCausalLM.from_pretrained(checked, check_fingerprint="full")


def test_every_scheme_is_there() -> None:
    requests = [one for saved in SAVED.values() for one in saved["config"]["hfpatch"]["request"]]
    names = {json.dumps(one) for one in requests}
    later = {"fixed", "folded", "none"}  # which it didn't have
    for scheme in {*NORMS, *POSITIONS, *MLPS, *PLACEMENTS} - later:
        assert any(f'"{scheme}' in text for text in names), scheme
