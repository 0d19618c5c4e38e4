"""Ways into a patched checkpoint beside its own: a config that the caller brings, weights that are loaded by hand.

The guards in config.json are tested in test_guard.py. Files hold the tensors of the patched model and no others, so
strict loaders open them.
"""

from __future__ import annotations

import copy
import functools
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from accelerate import init_empty_weights, load_checkpoint_and_dispatch, load_checkpoint_in_model
from checkpoint_edits import weights_of
from tiny_models import difference, load, logged, patch, peft_of_transformers, tiny
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.trainer_utils import load_sharded_checkpoint

from hfpatch.checkpoint.patched_classes import answer_to_architectures

CAUSAL = "AutoModelForCausalLM"
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


def test_the_checkpoints_config_is_refused_by_the_host(saved: Saved) -> None:
    """The host's own config is the caller's own doing, and is said in docs/guides/serving.md."""
    host = type(saved.plain)
    given = {"config": saved.plain.config, "state_dict": weights_of(saved.plain_folder)}
    assert difference(saved.plain, host.from_pretrained(None, **given)) == 0, "the control"
    for folder, weights in ((saved.folder, None), (None, weights_of(saved.folder))):
        with pytest.raises(Exception, match=r"patched by hfpatch.*open it with an Auto class"):
            host.from_pretrained(folder, config=config_of(saved.folder), state_dict=weights)


# Into a patched model: not a word, and equal to the bit
def by_hand(saved: Saved, folder: Path) -> Any:
    model = fresh(config_of(folder))
    assert not any(model.load_state_dict(weights_of(folder)))
    assert not any(model.load_state_dict(weights_of(folder), strict=False))
    return model.eval()


def by_transformers(saved: Saved, folder: Path) -> Any:
    return filled(fresh(config_of(folder)), lambda one: load_sharded_checkpoint(one, saved.folder / "shards"))


def by_accelerate(saved: Saved, folder: Path, strict: bool = True) -> Any:
    with init_empty_weights():
        empty = fresh(saved.model.config)
    place = str(saved.folder / "shards")
    return load_checkpoint_and_dispatch(empty, place, device_map={"": "cpu"}, strict=strict).eval()


def in_place(saved: Saved, folder: Path) -> Any:
    return filled(fresh(config_of(folder)), lambda one: load_checkpoint_in_model(one, folder, strict=True))


def with_an_adapter_of_transformers(saved: Saved, folder: Path) -> Any:
    peft = peft_of_transformers()
    adapted = load(folder, CAUSAL)
    adapted.add_adapter(peft.LoraConfig(target_modules="all-linear", bias="all"))
    adapted.save_pretrained(folder / "own")
    model = load(folder, CAUSAL)
    model.load_adapter(str(folder / "own"))
    return model


INTO_A_PATCHED_MODEL: dict[str, Callable[[Saved, Path], Any]] = {
    "the class that architectures names": lambda saved, folder: load(
        folder, getattr(sys.modules["transformers"], config_of(folder).architectures[0])
    ),
    "its config": lambda saved, folder: load(folder, CAUSAL, config=config_of(folder)),
    "its weights": lambda saved, folder: type(saved.model).from_pretrained(
        None, config=saved.model.config, state_dict=weights_of(folder)
    ),
    "by hand": by_hand,
    "load_sharded_checkpoint": by_transformers,
    "accelerate, strict": by_accelerate,
    "accelerate": functools.partial(by_accelerate, strict=False),
    "accelerate, in place": in_place,
    "transformers' adapters": with_an_adapter_of_transformers,
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("way", INTO_A_PATCHED_MODEL)
def test_into_a_patched_model(way: str, saved: Saved, tmp_path: Path) -> None:
    for name in ("config.json", "hfpatch_weights.json", "model.safetensors"):
        shutil.copy(saved.folder / name, tmp_path)
    with logged() as lines:
        found = INTO_A_PATCHED_MODEL[way](saved, tmp_path)
    assert difference(saved.model, found) == 0
    of_host: list[str] = []
    if lines and way == "transformers' adapters":  # transformers 5.17 misses an adapter's weights in any model
        shutil.copytree(saved.plain_folder, tmp_path / "plain")
        with logged() as of_host:
            with_an_adapter_of_transformers(saved, tmp_path / "plain")
    assert len(lines) == len(of_host), lines


def test_a_file_has_the_models_tensors_and_no_others(saved: Saved) -> None:
    for folder in (saved.folder, saved.folder / "shards"):
        assert weights_of(folder).keys() == saved.model.state_dict().keys()


def test_the_entry_point_of_vllm_answers_to_names_that_no_config_was_read_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes get a config that another one read."""
    module = sys.modules["transformers"]
    monkeypatch.setitem(vars(module), "__getattr__", None)  # taken away again afterwards
    answer_to_architectures()
    assert getattr(module, "HfpatchCTRLModel").hfpatch_host is module.CTRLModel  # noqa: B009
    for name in ("HfpatchNoSuchModel", "HfpatchGPT2Config", "NoSuchModel"):
        with pytest.raises(AttributeError, match=name):
            getattr(module, name)
