"""Saving into a folder that holds something already: as transformers does, and nothing older is opened instead."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_edits import stored_in
from safetensors.torch import save_file
from tiny_models import difference, load, patch, peft_of_transformers, randomise, tiny
from transformers import AutoModel, AutoModelForCausalLM, GPT2LMHeadModel, GPT2Model

from hfpatch.checkpoint.files import PAGE
from hfpatch.errors import FingerprintWarning
from hfpatch.runtime.patch_errors import CheckpointError

SHARDED, WHOLE = "60KB", "1GB"
OTHERS = {"tokenizer.json": b"{}", "optimizer.pt": b"state", "model.fp16.safetensors": b"another variant", ".git": b""}


def model(seed: int, cls: Any = GPT2Model) -> Any:
    return randomise(patch(tiny("gpt2", cls), norm="rms", init="copy"), seed=seed)


def test_files_of_an_older_save_are_replaced(tmp_path: Path) -> None:
    """Also those that transformers would open before the new ones, and what is written of the older; nobody else's."""
    for name, content in {**OTHERS, PAGE: b"<html>"}.items():
        (tmp_path / name).write_bytes(content)
    for seed, shard in ((1, WHOLE), (2, SHARDED), (3, "30KB"), (4, WHOLE)):
        one = model(seed)
        one.save_pretrained(tmp_path, max_shard_size=shard)
        assert difference(one, AutoModel.from_pretrained(tmp_path, check_fingerprint="full")) < 1e-5
    left = {path.name for path in tmp_path.iterdir()} - OTHERS.keys()
    assert left == {"config.json", "model.safetensors", "hfpatch_weights.json"}
    assert {name: (tmp_path / name).read_bytes() for name in OTHERS} == OTHERS


def test_a_model_is_saved_over_the_files_that_it_is_mapped_from(tmp_path: Path) -> None:
    model(1).save_pretrained(tmp_path)
    opened, control = AutoModel.from_pretrained(tmp_path), load(tmp_path)
    opened.save_pretrained(tmp_path, max_shard_size=SHARDED)
    assert difference(opened, control) == difference(load(tmp_path, check_fingerprint="full"), control) == 0


def test_an_adapter_leaves_the_base_as_it_is(tmp_path: Path) -> None:
    """Files that weren't written now get no new digests."""
    peft = peft_of_transformers()
    model(1, GPT2LMHeadModel).save_pretrained(tmp_path)
    adapted = load(tmp_path, AutoModelForCausalLM)
    before = (tmp_path / "hfpatch_weights.json").read_bytes()
    save_file({"wte.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    adapted.add_adapter(peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    adapted.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()
    assert (tmp_path / "hfpatch_weights.json").read_bytes() == before


def test_a_save_that_broke_off_is_told_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At whatever file: the digests are those of the older checkpoint until all others are there."""
    old, new = model(1), randomise(patch(tiny("gpt2", GPT2Model), norm="dyt"), seed=2)
    old.save_pretrained(tmp_path / "old", max_shard_size=SHARDED)
    count = len(list((tmp_path / "old").glob("*.safetensors")))
    for written in range(count):
        folder, left = shutil.copytree(tmp_path / "old", tmp_path / str(written)), [None] * written

        def save(tensors: Any, path: Any, left: list[Any] = left, **options: Any) -> None:
            if not left:
                raise KeyboardInterrupt
            left.pop()
            save_file(tensors, path, **options)

        with monkeypatch.context() as patched:
            patched.setattr("transformers.modeling_utils.safe_save_file", save)
            with pytest.raises(KeyboardInterrupt):
                new.save_pretrained(folder, max_shard_size=SHARDED)
        assert stored_in(folder)["hfpatch"]["request"][0]["norm"] == "dyt", "the control: config.json is the new one"
        with pytest.raises((CheckpointError, OSError)):
            AutoModel.from_pretrained(folder)
        new.save_pretrained(folder, max_shard_size=SHARDED)
        assert difference(new, load(folder, check_fingerprint="full")) == 0


def test_weights_that_are_still_the_older_ones_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one file: config.json is written first."""
    old, new = model(1), patch(tiny("gpt2", GPT2Model, activation_function="relu"), norm="rms", init="copy")
    old.save_pretrained(tmp_path)

    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        new.save_pretrained(tmp_path)
    with pytest.warns(FingerprintWarning, match="edited"):
        AutoModel.from_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="edited"):
        AutoModel.from_pretrained(tmp_path, check_fingerprint="full")
