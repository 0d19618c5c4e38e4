"""A config.json has one digest, however it is read: its values differ in memory and on disk."""

from __future__ import annotations

import functools
import json
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import zoo
from checkpoint_edits import stored_in, with_config
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled import slow_but
from tiny_models import patch, tiny
from transformers import AutoConfig, AutoModel, BertConfig, TimmWrapperConfig
from typer.testing import CliRunner

from hfpatch import export_model
from hfpatch.checkpoint.patched_classes import registered_config_class
from hfpatch.checkpoint.stored_config import config_digest
from hfpatch.cli import app
from hfpatch.errors import FingerprintWarning
from hfpatch.hub.push import push_patched
from hfpatch.runtime.patch_errors import CheckpointError
from hfpatch.runtime.record import KEY, OPENED

INF, NAN = float("inf"), float("nan")


def opened_silently(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FingerprintWarning)
        AutoModel.from_pretrained(folder)
        return AutoModel.from_pretrained(folder, check_fingerprint="full")


def require_told(folder: Path) -> None:
    with pytest.warns(FingerprintWarning, match="edited"):
        AutoModel.from_pretrained(folder)
    with pytest.raises(CheckpointError, match="edited"):
        AutoModel.from_pretrained(folder, check_fingerprint="full")


@pytest.mark.parametrize("model_type", slow_but(["mamba2", "bamba", "nemotron_h"], ["mamba2"]))
def test_limits_without_an_end(model_type: str, tmp_path: Path) -> None:
    """Their time steps end at infinity, which is an object in the file."""
    patch(zoo.tiny(model_type)[0], norm="layer", init="copy").save_pretrained(tmp_path / "saved")
    assert '"__float__": "Infinity"' in (tmp_path / "saved/config.json").read_text()
    opened = opened_silently(tmp_path / "saved")
    assert opened.config.time_step_limit[1] == INF
    assert CliRunner().invoke(app, ["verify", str(tmp_path / "saved")]).exit_code == 0
    export_model(opened, tmp_path / "again")
    opened_silently(tmp_path / "again")
    push_patched(tmp_path / "saved", "me/model", dry_run=True)
    with_config(tmp_path / "saved", time_step_limit=[0.0, 1.0])
    require_told(tmp_path / "saved")


NUMBERS = st.floats(allow_nan=True) | st.sampled_from([INF, -INF, NAN, -0.0, 1e-5, 1e22, 5e-324, 0.1])
PLAIN = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | NUMBERS | st.text(max_size=5)
PLAIN |= st.just("Infinity") | st.just({"__float__": "Infinity"}) | st.just({"__float__": "else"})


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """What JSON has otherwise than Python: tuples, keys that are numbers, dtypes."""
    lists = st.lists(inner, max_size=3)
    by_name = st.dictionaries(st.text(max_size=3), inner, max_size=3)
    by_number = st.dictionaries(st.integers(), inner, max_size=3)
    dtypes = st.builds(lambda value: {"dtype": torch.bfloat16, "more": value}, inner)
    return lists | lists.map(tuple) | by_name | by_number | dtypes


@functools.cache
def patched() -> Any:
    config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=11)
    return patch(AutoModel.from_config(config), norm="layer:bias=false", init="copy")


@pytest.mark.slow
@settings(max_examples=20)
@given(value=st.recursive(PLAIN, containers, max_leaves=6), inner=NUMBERS)
def test_whatever_a_config_holds(value: Any, inner: float) -> None:
    """It passes the full check; any other value in the file doesn't."""
    model = patched()
    model.config.some_value, model.config.part = value, BertConfig(some_number=inner, id2label={0: "a", 1: "b"})
    with TemporaryDirectory() as place:
        folder = Path(place)
        model.save_pretrained(folder)
        AutoModel.from_pretrained(folder, check_fingerprint="full")
        with_config(folder, some_value=[stored_in(folder)["some_value"]])
        with pytest.raises(CheckpointError, match="edited"):
            AutoModel.from_pretrained(folder, check_fingerprint="full")


def test_infinity_and_a_number_are_two_values(tmp_path: Path) -> None:
    model = tiny("bert")
    model.config.limit = (INF, -INF, NAN)
    patch(model, norm="rms", init="copy").save_pretrained(tmp_path)
    stored = stored_in(tmp_path)
    digests = {config_digest(stored)}
    for other in (["Infinity", "-Infinity", "NaN"], [1e308, -1e308, 0.0], [-INF, INF, NAN], [INF, -INF, None]):
        digests.add(config_digest(stored | {"limit": other}))
    assert len(digests) == 5
    assert config_digest(stored | {"limit": [INF, -INF, NAN]}) == config_digest(stored)  # control: as it is in memory


def test_a_host_that_changes_what_it_reads(tmp_path: Path) -> None:
    """The digest is of the file, not of what the host's class leaves of its dictionary."""
    host = registered_config_class(TimmWrapperConfig)
    config = TimmWrapperConfig(architecture="resnet18", label_names=["a", "b"], pretrained_cfg={"num_classes": 2})
    object.__setattr__(config, "__class__", host)
    setattr(config, KEY, {"version": 3, "base_model_type": "timm_wrapper", "request": [], "edits": []})
    config.save_pretrained(tmp_path)
    read = json.loads((tmp_path / "config.json").read_text())
    assert "num_classes" in read["pretrained_cfg"]
    assert vars(AutoConfig.from_pretrained(tmp_path))[OPENED].digest == config_digest(read)
