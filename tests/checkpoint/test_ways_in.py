"""Every way into a patched checkpoint: patched, or an error, or a warning that says what it is; never silently half.

The guards in config.json are tested in test_guard.py. Here is the rest: a config that the caller brings, weights that
are loaded by hand, and what must go on working without a word. Llama without positions is the hard case: all names of
its weights are the host's.
"""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import zoo
from accelerate import init_empty_weights, load_checkpoint_and_dispatch, load_checkpoint_in_model
from checkpoint_edits import weights_of, with_config, with_weights
from tiny_models import difference, load, logged, patch, peft_of_transformers, tiny
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.trainer_utils import load_sharded_checkpoint

from hfpatch.checkpoint.marker import MARKER
from hfpatch.errors import FingerprintWarning

CAUSAL = "AutoModelForCausalLM"
WEIGHTS = "model.safetensors"
REQUESTS: dict[str, dict[str, Any]] = {"gpt2": {"norm": "dyt", "pos": "rope"}, "llama": {"pos": "nope"}}


class Saved(NamedTuple):
    """A patched model with its checkpoint, and its unpatched host with one."""

    model: Any
    folder: Path
    plain: Any
    plain_folder: Path


@pytest.fixture(scope="module", params=REQUESTS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp(request.param)
    plain = tiny(request.param, CAUSAL, tie_word_embeddings=False)  # strict loading by hand misses a tied head
    model = patch(copy.deepcopy(plain), **REQUESTS[request.param])
    for one, name in ((model, "patched"), (plain, "plain")):
        one.save_pretrained(folder / name)
        one.save_pretrained(folder / name / "shards", max_shard_size="40KB")
    return Saved(model, folder / "patched", plain, folder / "plain")


def filled(model: Any, fill: Callable[[Any], Any]) -> Any:
    fill(model)
    return model.eval()


def fresh(config: Any) -> Any:
    return AutoModelForCausalLM.from_config(config)


# Into the host


def config_of(folder: Path) -> Any:
    return AutoConfig.from_pretrained(folder)


# each way: what it does with a folder, the host's own config and class, and whether it warns, or what it raises
PATCHED = "patched by hfpatch.*open it with an Auto class"
INTO_THE_HOST: dict[str, tuple[Callable[[Path, Any, Any], Any], str]] = {
    "the host's config": (lambda folder, config, host: host.from_pretrained(folder, config=config), "warns"),
    "the checkpoint's config, weights given": (
        lambda folder, config, host: host.from_pretrained(
            None, config=config_of(folder), state_dict=weights_of(folder)
        ),
        PATCHED,
    ),
    "load_state_dict": (
        lambda folder, config, host: filled(fresh(config), lambda one: one.load_state_dict(weights_of(folder))),
        MARKER,
    ),
    "load_sharded_checkpoint": (
        lambda folder, config, host: filled(fresh(config), lambda one: load_sharded_checkpoint(one, folder / "shards")),
        MARKER,
    ),
    "accelerate": (
        lambda folder, config, host: filled(fresh(config), lambda one: load_checkpoint_in_model(one, folder)),
        "warns",
    ),
}


@pytest.mark.parametrize("way", INTO_THE_HOST)
def test_into_the_host(way: str, saved: Saved) -> None:
    enter, outcome = INTO_THE_HOST[way]
    host = type(saved.plain)
    with logged() as lines:  # control: on the host's own checkpoint each way is silent and right
        assert difference(saved.plain, enter(saved.plain_folder, saved.plain.config, host)) == 0
    assert not lines
    if outcome == "warns":
        with logged() as lines:
            found = enter(saved.folder, saved.plain.config, host)
        assert type(found) is host
        assert difference(saved.model, found) > 1e-3
        assert any(MARKER in line for line in lines)
    else:
        with pytest.raises(Exception, match=outcome):
            enter(saved.folder, saved.plain.config, host)


# Into a patched model: not a word, and equal to the bit
def by_hand(saved: Saved, folder: Path) -> Any:
    model = fresh(config_of(folder))
    assert not any(model.load_state_dict(weights_of(folder)))
    assert not any(model.load_state_dict(weights_of(folder), strict=False))
    return model.eval()


def by_accelerate(saved: Saved, folder: Path) -> Any:
    with init_empty_weights():
        empty = fresh(saved.model.config)
    return load_checkpoint_and_dispatch(empty, str(saved.folder / "shards"), device_map={"": "cpu"}).eval()


def with_weights_given(saved: Saved, folder: Path) -> Any:
    given = saved.model.state_dict()
    names = list(given)
    with pytest.warns(FingerprintWarning):
        saved.model.save_pretrained(folder / "given", state_dict=given)
    assert list(given) == names
    assert MARKER in weights_of(folder / "given")
    return load(folder / "given", CAUSAL)


def with_an_adapter_of_transformers(saved: Saved, folder: Path) -> Any:
    peft = peft_of_transformers()
    adapted = load(folder, CAUSAL)
    adapted.add_adapter(peft.LoraConfig(target_modules="all-linear", bias="all"))
    with pytest.warns(FingerprintWarning, match="adapters"):
        adapted.save_pretrained(folder / "own")
    assert not [name for name in weights_of(folder / "own") if MARKER in name]
    model = load(folder, CAUSAL)
    model.load_adapter(str(folder / "own"))
    return model


def as_earlier_versions_wrote_it(saved: Saved, folder: Path) -> Any:
    with_config(folder, model_type="hfpatch")
    with_weights(folder, lambda weights: weights.pop(MARKER))
    return load(folder, CAUSAL)


INTO_A_PATCHED_MODEL: dict[str, Callable[[Saved, Path], Any]] = {
    "the class that architectures names": lambda saved, folder: load(
        folder, getattr(sys.modules["transformers"], config_of(folder).architectures[0])
    ),
    "its config": lambda saved, folder: load(folder, CAUSAL, config=config_of(folder)),
    "its weights": lambda saved, folder: type(saved.model).from_pretrained(
        None, config=saved.model.config, state_dict=weights_of(folder)
    ),
    "by hand": by_hand,
    "accelerate": by_accelerate,
    "weights given": with_weights_given,
    "transformers' adapters": with_an_adapter_of_transformers,
    "an earlier version's": as_earlier_versions_wrote_it,
}


@pytest.mark.parametrize("way", INTO_A_PATCHED_MODEL)
def test_into_a_patched_model(way: str, saved: Saved, tmp_path: Path) -> None:
    for name in ("config.json", WEIGHTS):
        shutil.copy(saved.folder / name, tmp_path)
    with logged() as lines:
        found = INTO_A_PATCHED_MODEL[way](saved, tmp_path)
    assert difference(saved.model, found) == 0
    heard = [line for line in lines if MARKER in line]
    # accelerate goes by the names in the model's state_dict, and lists this one as not used; nothing can be done there
    assert len(heard) == (way == "accelerate"), heard


def test_a_host_that_decides_what_to_ignore_when_it_is_built(tmp_path: Path) -> None:
    model = patch(zoo.tiny("gemma3n_text")[0], norm="layer")
    model.save_pretrained(tmp_path)
    assert MARKER in weights_of(tmp_path)
    with logged() as lines:
        type(model).from_pretrained(tmp_path)
    assert not lines


# Where the marker is


def test_it_is_in_files_and_not_in_models(saved: Saved, tmp_path: Path) -> None:
    names = list(saved.plain.state_dict()) if "llama" in saved.model.config.model_type else None
    model = copy.deepcopy(saved.model)
    model.half().save_pretrained(tmp_path / "half")
    assert weights_of(tmp_path / "half")[MARKER].dtype == torch.float16  # a second dtype would show on the Hub
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        model.save_pretrained(tmp_path / "file" / "below")
    for one in (model, load(tmp_path / "half", CAUSAL)):
        held = [*one.state_dict(), *(name for name, _ in (*one.named_buffers(), *one.named_parameters()))]
        assert MARKER not in held
        assert not hasattr(one, MARKER.partition(".")[0])
        assert names is None or list(one.state_dict()) == names
    index = json.loads((saved.folder / "shards/model.safetensors.index.json").read_text())
    assert MARKER in index["weight_map"]
