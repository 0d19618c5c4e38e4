"""check_fingerprint="full": every byte of the weights, by name of the tensor, where opening alone sees nothing."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_edits import stored_in, with_config, with_weights
from safetensors.torch import load_file
from tiny_models import patch, tiny
from torch import Tensor
from transformers import AutoModel, GPT2Model

from hfpatch.checkpoint.file_digests import compare, digests_or_warning, read_digests, variant_of, write_digests
from hfpatch.checkpoint.patched_classes import patched_model_class
from hfpatch.checkpoint.stored_config import config_digest
from hfpatch.errors import FingerprintWarning, OptionError
from hfpatch.runtime.patch_errors import CheckpointError

WTE, GAIN, OTHER = "wte.weight", "ln_f.weight", "h.0.ln_1.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    patch(tiny("gpt2", GPT2Model, vocab_size=2_000), norm="rms", init="copy").save_pretrained(folder / "whole")
    AutoModel.from_pretrained(folder / "whole").save_pretrained(folder / "shards", max_shard_size="100KB")
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint in one file."""
    return shutil.copytree(saved / "whole", tmp_path / "whole")


def full(folder: Any, **options: Any) -> Any:
    return AutoModel.from_pretrained(folder, check_fingerprint="full", **options)


def flip(folder: Path, entry: int, files: str = "*.safetensors") -> None:
    """A bit of the embedding, in the file that has it."""
    path = next(path for path in folder.glob(files) if WTE in load_file(path))
    with_weights(folder, lambda weights: weights[WTE].view(torch.int16).view(-1)[entry].bitwise_xor_(1), path.name)


def test_what_is_stored(saved: Path) -> None:
    """By its formula, written out; wherever a tensor is."""
    stored = json.loads((saved / "whole/hfpatch_weights.json").read_text())
    assert stored.keys() == {"version", "config", "tensors"}
    assert stored["config"] == config_digest(stored_in(saved / "whole"))
    weights = load_file(saved / "whole/model.safetensors")
    assert stored["tensors"].keys() == weights.keys()
    for name, tensor in weights.items():
        text = f"F32 {list(tensor.shape)}\n".encode() + tensor.numpy().tobytes()
        assert stored["tensors"][name] == hashlib.sha256(text).hexdigest()[:32]
    assert json.loads((saved / "shards/hfpatch_weights.json").read_text()) == stored
    for kind in ("whole", "shards"):
        expected = (len(weights), sum(one.nbytes for one in weights.values()), {})
        assert compare(saved / kind, {}, read_digests(saved / kind, {})) == expected


@pytest.mark.parametrize("kind", ["whole", "shards"])
def test_one_bit(kind: str, saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved / kind, tmp_path / kind)
    before = full(folder).wte.weight.clone()  # the model's is mapped from the file
    flip(folder, 50_001)
    changed = AutoModel.from_pretrained(folder)  # control: opening alone sees nothing
    assert not torch.equal(changed.wte.weight, before)
    for options in ({}, {"dtype": torch.bfloat16}, {"vocab_size": 2_000}, {"attn_implementation": "eager"}):
        with pytest.raises(CheckpointError, match=r"wte\.weight \(changed\)"):
            full(folder, **options)
    flip(folder, 50_001)
    assert torch.equal(full(folder).wte.weight, before)


CHANGES: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "swapped": (
        lambda weights: weights.update({GAIN: weights[OTHER], OTHER: weights[GAIN]}),
        r"2 of .*: h\.0\.ln_1\.weight \(changed\), ln_f\.weight \(changed\)",
    ),
    "renamed": (
        lambda weights: weights.update({"wtf.weight": weights.pop(WTE)}),
        r"2 of .*: wte\.weight \(missing\), wtf\.weight \(added\)",
    ),
    "the same bytes as another dtype": (
        lambda weights: weights.update({WTE: weights[WTE].view(torch.int32)}),
        r"1 of .*: wte\.weight \(changed\)",
    ),
    "the same bytes in another shape": (
        lambda weights: weights.update({WTE: weights[WTE].view(32, -1)}),
        r"1 of .*: wte\.weight \(changed\).*without hfpatch",
    ),
    "all rounded": (
        lambda weights: weights.update({name: one.bfloat16() for name, one in weights.items()}),
        r"\(changed\) and \d+ more",
    ),
}


@pytest.mark.parametrize(("change", "says"), CHANGES.values(), ids=CHANGES)
def test_tensors(change: Callable[[dict[str, Tensor]], Any], says: str, folder: Path) -> None:
    with_weights(folder, change)
    with pytest.raises(CheckpointError, match=says) as caught:
        full(folder)
    assert len(str(caught.value)) < 1_500


def test_variants_and_subfolders(saved: Path, tmp_path: Path) -> None:
    """Each variant has digests of its own."""
    model = AutoModel.from_pretrained(saved / "whole")
    model.save_pretrained(tmp_path / "part")
    for shard in ("1GB", "60KB"):
        model.half().save_pretrained(tmp_path / "part", variant="fp16.ema", max_shard_size=shard)
        assert full(tmp_path, subfolder="part", variant="fp16.ema").dtype == torch.float16
        full(tmp_path, subfolder="part", dtype=torch.float32)
    write_digests(tmp_path / "part")
    names = {path.name: variant_of(path.name) for path in (tmp_path / "part").iterdir()}
    assert names["model.safetensors"] == ""
    assert names["model.safetensors.index.fp16.ema.json"] == ".fp16.ema"
    assert names["model.fp16.ema-00001-of-00002.safetensors"] == ".fp16.ema"
    assert names["config.json"] is None
    assert variant_of("model-00001-of-00002.safetensors") == variant_of("model.safetensors.index.json") == ""
    assert variant_of("adapter_model.safetensors") is None
    full(tmp_path, subfolder="part", variant="fp16.ema")
    flip(tmp_path / "part", 20_001, "model.fp16*")
    full(tmp_path, subfolder="part")
    with pytest.raises(CheckpointError, match=r"fp16\.ema\.json: wte\.weight \(changed\)"):
        full(tmp_path, subfolder="part", variant="fp16.ema")


def test_saved_without_digests(folder: Path, saved: Path) -> None:
    """Nothing to say when it is opened; where all should be compared, it is told or refused."""
    (folder / "hfpatch_weights.json").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FingerprintWarning)
        AutoModel.from_pretrained(folder)
    with pytest.warns(FingerprintWarning, match=r"has no hfpatch_weights\.json.*isn't known"):
        assert digests_or_warning(folder, {}) is None
    with pytest.raises(CheckpointError, match=r"hfpatch_weights\.json"):
        full(folder)
    full(saved / "whole").save_pretrained(folder, variant="x")
    with pytest.raises(CheckpointError, match=r"hfpatch_weights\.json"):
        full(folder)
    full(folder, variant="x")


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{}", "[" * 100_000, '{"version": 1, "tensors": 5}', '{"version": 2, "tensors": {}}'),
        *('{"version": 1, "tensors": {}}', '{"version": 1, "tensors": {}, "config": 5}'),
        json.dumps({"version": 1, "config": "0", "tensors": [[5, "x"], ["y", "z"]]}),
        json.dumps({"version": 1, "config": "0", "tensors": {}, "repair": []}),
    ],
    ids=lambda text: text[:40],
)
def test_malformed_digests(content: str, folder: Path) -> None:
    (folder / "hfpatch_weights.json").write_text(content)
    for check in (True, "full"):
        with pytest.raises(CheckpointError, match=r"hfpatch_weights\.json") as caught:
            AutoModel.from_pretrained(folder, check_fingerprint=check)
        assert len(str(caught.value)) < 3_000


def test_what_is_opened_is_what_is_compared(folder: Path) -> None:
    """Options that open something else are refused; files that are opened before the usual ones are compared."""
    cls: Any = patched_model_class(GPT2Model)
    for options in ({"use_safetensors": False}, {"gguf_file": "model.gguf"}):
        with pytest.raises(OptionError, match="safetensors"):
            cls.from_pretrained(folder, check_fingerprint="full", **options)
    model = cls.from_pretrained(folder, check_fingerprint="full")
    with pytest.raises(OptionError):
        cls.from_pretrained(None, config=model.config, state_dict=model.state_dict(), check_fingerprint="full")
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    with_config(folder, transformers_weights="other.safetensors")
    flip(folder, 50_001, "model*")
    for damaged in (False, True):
        if damaged:
            flip(folder, 50_001, "other*")
        for opening in (full, partial(cls.from_pretrained, check_fingerprint="full")):
            with pytest.raises(CheckpointError, match=r"wte\.weight \(changed\)") if damaged else nullcontext():
                opening(folder)


def test_a_file_of_an_earlier_version_is_read(folder: Path) -> None:
    """Version 0.3 stored samples besides, for a check that there isn't any more; whatever stands there is ignored."""
    stored = json.loads((folder / "hfpatch_weights.json").read_text())
    for samples in ({WTE: "0"}, 5):
        (folder / "hfpatch_weights.json").write_text(json.dumps(stored | {"samples": samples}))
        full(folder)


def test_digests_that_are_none(folder: Path) -> None:
    """All tensors differ; what is named is bounded."""
    digests = {WTE: 5, "\n" * 2_000: []}
    (folder / "hfpatch_weights.json").write_text(json.dumps({"version": 1, "config": "0", "tensors": digests}))
    with pytest.raises(CheckpointError, match=r"hfpatch_weights\.json") as caught:
        full(folder)
    assert len(str(caught.value)) < 3_000
