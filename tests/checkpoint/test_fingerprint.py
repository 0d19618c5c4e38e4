"""A checkpoint whose files aren't those that were saved is refused or told of; nothing intact is."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zoo
from checkpoint_edits import weights_of, with_config, with_weights
from sampled import sampled
from tiny_models import RECORDED, difference, load, patch, randomise, tiny
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GPT2LMHeadModel

from hfpatch.checkpoint import files
from hfpatch.errors import FingerprintWarning, OptionError
from hfpatch.runtime.patch_errors import CheckpointError, PatchError
from hfpatch.schemes.norm_schemes import DyT
from hfpatch.schemes.rope import RoPE

AUTOS = ("AutoModelForCausalLM", "AutoModel", "AutoModelForTokenClassification")
another = pytest.raises(CheckpointError, match="check_fingerprint=False")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    model = patch(tiny("gpt2", GPT2LMHeadModel), norm=DyT(0.3), pos=RoPE(theta=300.0), keep=["*.ln_f"])
    randomise(model, seed=5).save_pretrained(folder)
    return folder


@pytest.fixture
def silent() -> Any:
    """Whatever is opened, hfpatch says nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FingerprintWarning)
        yield


# What is caught


def afresh(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(weights: dict[str, Tensor]) -> None:
        weights[name] = torch.randn(weights[name].shape, generator=torch.Generator().manual_seed(3))

    return change


def in_edits(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    """Something else in the text of the record's edits."""

    def change(config: dict[str, Any]) -> None:
        edits = config["hfpatch"]["edits"]
        changed = [edit.replace(old, new) for edit in edits]
        assert changed != edits
        config["hfpatch"]["edits"] = changed

    return change


def lost(weights: dict[str, Tensor]) -> None:
    weights.pop("transformer.h.0.ln_1.alpha")


IN_CONFIG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "eps": lambda config: config.update(layer_norm_epsilon=1.1e-5),
    "activation": lambda config: config.update(activation_function="relu"),
    "theta": in_edits("theta=300.0", "theta=310.0"),
    "pairing": in_edits("theta=300.0", "theta=300.0, pairing='interleaved'"),
    "length": lambda config: config.update(n_positions=2 * config["n_positions"]),
    "dropout": lambda config: config.update(attn_pdrop=0.5),
    "what the record says": lambda config: config["hfpatch"]["request"][0].update(outcome={"verdict": "exact"}),
}


@pytest.mark.parametrize("auto", AUTOS)
def test_other_weights_are_refused(auto: str, folder: Path, silent: None) -> None:
    """Of the base, under its names and those that a head has: lost ones whenever they are opened, as they would start
    afresh; others by the full check, of which test_file_digests.py has all that may differ.
    """
    opener = getattr(transformers, auto)
    opener.from_pretrained(folder, check_fingerprint="full")
    with_weights(folder, afresh("transformer.h.1.mlp.c_proj.weight"))
    with another:
        opener.from_pretrained(folder, check_fingerprint="full")
    with_weights(folder, lost)
    with pytest.raises(CheckpointError, match=r"lacks 1 weights that were saved with it .*h\.0\.ln_1\.alpha"):
        opener.from_pretrained(folder)
    opener.from_pretrained(folder, check_fingerprint=False)


@pytest.mark.sample(3)
@pytest.mark.parametrize("auto", AUTOS)
@pytest.mark.parametrize("change", IN_CONFIG.values(), ids=IN_CONFIG)
def test_an_edited_config_is_told_and_refused_by_the_full_check(
    change: Any, auto: str, folder: Path, tmp_path: Path
) -> None:
    opener = getattr(transformers, auto)
    with_config(folder, change)
    for options in ({}, {"embd_pdrop": 0.3}):  # beside settings that are changed on purpose
        with pytest.warns(FingerprintWarning, match=r"config\.json.*edited") as told:
            opener.from_pretrained(folder, **options)
        assert len(told) == 1
    with pytest.raises(CheckpointError, match="edited"):
        opener.from_pretrained(folder, check_fingerprint="full")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opener.from_pretrained(folder, check_fingerprint=False).save_pretrained(tmp_path / "again")
        opener.from_pretrained(tmp_path / "again", check_fingerprint="full")


def test_weights_by_other_names_are_refused_where_transformers_changed(folder: Path, silent: None) -> None:
    """The files are whole, but their names aren't those of this version's class."""
    found = {"missing_keys": {"transformer.wte.renamed"}, "unexpected_keys": {"transformer.wte.weight"}}
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(CheckpointError, match=r"wte\.renamed.*wte\.weight.*check_fingerprint=False"):
        files.require_known_names(model, folder, found)
    files.require_known_names(AutoModel.from_pretrained(folder), folder, found)  # of another head some are left out


# What isn't damage


WAYS: dict[str, dict[str, Any]] = {
    "tuples": {"return_dict": False},
    "without its pooling layer": {"add_pooling_layer": False},
    "eager": {"attn_implementation": "eager"},
    "float16": {"dtype": torch.float16},
    "bfloat16": {"dtype": torch.bfloat16},
    "without a cache": {"use_cache": False},
    "labels": {"num_labels": 7},
    "a setting that is meant": {"hidden_act": "relu"},
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_ways_to_open_an_intact_checkpoint(way: dict[str, Any], tmp_path: Path, silent: None) -> None:
    patch(tiny("bert"), norm="dyt").save_pretrained(tmp_path)
    for check in (True, "full"):
        AutoModel.from_pretrained(tmp_path, check_fingerprint=check, **way)


def test_a_part_that_was_never_there(tmp_path: Path) -> None:
    """Saved without a pooling layer, opened with one: that is fresh, as transformers says; nothing is damaged."""
    model = patch(randomise(transformers.BertModel(tiny("bert").config, add_pooling_layer=False)), norm="dyt")
    model.save_pretrained(tmp_path)
    with pytest.warns(FingerprintWarning, match=r"lacks 2 weights.*pooler.*saved without them") as told:
        opened = type(model).from_pretrained(tmp_path)
    assert [one.filename for one in told] == [__file__]
    assert all(torch.equal(one, opened.state_dict()[name]) for name, one in model.state_dict().items())
    with warnings.catch_warnings():
        warnings.simplefilter("error", FingerprintWarning)
        AutoModel.from_pretrained(tmp_path, add_pooling_layer=False)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "model_type",
    [*sampled(RECORDED, 4), *(pytest.param(one, marks=pytest.mark.sweep) for one in zoo.model_types())],
)
def test_no_family_gives_a_false_alarm(model_type: str, tmp_path: Path, silent: None) -> None:
    """Every model type that can be made and patched opens in four precisions, and with the other attention."""
    try:
        model, _ = zoo.tiny(model_type)
    except zoo.Unbuildable as error:
        pytest.skip(str(error))
    try:
        model.save_pretrained(tmp_path)
        type(model).from_pretrained(tmp_path)
    except AttributeError as error:  # inkling_audio
        pytest.skip(f"transformers can't open it unpatched: {error}")
    if model_type == "diffusion_gemma":
        pytest.skip("it ties norms by the names of their parameters, which DynamicTanh doesn't have (a known limit)")
    patched = False
    for request in ({"norm": "rms", "init": "copy"}, {"norm": "dyt"}, {"pos": "rope"}):
        try:
            patched = bool(patch(model, **request)) or patched
        except PatchError:
            continue
    if not patched:
        pytest.skip("no patch applies")
    model.save_pretrained(tmp_path)
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    ways: list[dict[str, Any]] = [{"dtype": dtype} for dtype in dtypes]
    for way in [*ways, {"attn_implementation": "eager"}, {"return_dict": False}]:
        type(model).from_pretrained(tmp_path, **way)
    if model_type in RECORDED:
        type(model).from_pretrained(tmp_path, check_fingerprint="full")
        alpha = next(name for name in weights_of(tmp_path) if name.endswith("alpha"))
        with_weights(tmp_path, afresh(alpha))
        with another:
            type(model).from_pretrained(tmp_path, check_fingerprint="full")


# Weights that are handed to save_pretrained


def test_given_weights_are_what_is_compared(saved: Path, tmp_path: Path, silent: None) -> None:
    """As accelerator.get_state_dict hands them over, and Trainer under FSDP and DeepSpeed."""
    model = AutoModelForCausalLM.from_pretrained(saved)
    other = {name: tensor + 0.01 for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=other)
    for check in (True, "full"):
        again = AutoModelForCausalLM.from_pretrained(tmp_path, check_fingerprint=check)
    assert all(torch.equal(tensor, other[name]) for name, tensor in again.state_dict().items())
    assert difference(again, model) > 1e-3, "the control: they aren't the model's"
    with_weights(tmp_path, afresh("transformer.ln_f.weight"))
    with another:
        AutoModelForCausalLM.from_pretrained(tmp_path, check_fingerprint="full")
    model.save_pretrained(tmp_path / "other", is_main_process=False, state_dict={})
    assert not (tmp_path / "other/config.json").exists()


def test_given_weights_that_lack_some_or_have_other_shapes(saved: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved)
    given = model.state_dict()
    lost = given.pop("transformer.h.0.ln_1.alpha")
    with pytest.warns(FingerprintWarning, match=r"lacks 1 weights of GPT2LMHeadModel .*ln_1\.alpha") as told:
        model.save_pretrained(tmp_path, state_dict=given)
    assert [one.filename for one in told] == [__file__]
    with pytest.warns(FingerprintWarning, match=r"lacks 1 weights.*ln_1\.alpha"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    given["transformer.h.0.ln_1.alpha"] = lost.new_ones(5)
    model.save_pretrained(tmp_path, state_dict=given)
    with pytest.raises(RuntimeError, match=r"size mismatch|mismatched"):  # transformers' own
        AutoModelForCausalLM.from_pretrained(tmp_path)
    given = model.state_dict()
    for tied in ("lm_head.weight", "transformer.wte.weight"):
        with warnings.catch_warnings():
            warnings.simplefilter("error", FingerprintWarning)
            model.save_pretrained(tmp_path, state_dict={name: one for name, one in given.items() if name != tied})
            assert difference(model, AutoModelForCausalLM.from_pretrained(tmp_path)) == 0


# What decides


@pytest.mark.filterwarnings("ignore:.*no effect on modules that the patch put in")
def test_settings_that_are_changed_on_purpose(folder: Path, saved: Path, silent: None) -> None:
    """In the call or on the config, another function is what was asked for; the files are compared all the same."""
    AutoModel.from_pretrained(saved, layer_norm_epsilon=0.1)
    config = AutoConfig.from_pretrained(saved)
    config.layer_norm_epsilon = 0.1
    AutoModel.from_pretrained(saved, config=config)
    with_weights(folder, afresh("transformer.h.1.mlp.c_proj.weight"))
    config = AutoConfig.from_pretrained(folder)
    for options in ({"config": config}, {"num_labels": 7}, {"layer_norm_epsilon": 0.1}, {"use_cache": False}):
        with another:
            AutoModel.from_pretrained(folder, check_fingerprint="full", **options)


def test_a_config_from_elsewhere(saved: Path, tmp_path: Path, silent: None) -> None:
    """The weights are compared with the digests beside them, whatever folder the config is from."""
    other = AutoModelForCausalLM.from_pretrained(saved)
    randomise(other, seed=9).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(saved)
    assert difference(AutoModelForCausalLM.from_pretrained(tmp_path, config=config), other) < 1e-5
    again = AutoModelForCausalLM.from_pretrained(tmp_path, config=other.config)
    assert difference(again, other) < 1e-5


def test_another_number_of_labels(tmp_path: Path, silent: None) -> None:
    auto = transformers.AutoModelForSequenceClassification
    patch(tiny("bert", "AutoModelForSequenceClassification", num_labels=3), norm="dyt").save_pretrained(tmp_path)
    options = {"num_labels": 5, "ignore_mismatched_sizes": True}
    auto.from_pretrained(tmp_path, **options)
    options["check_fingerprint"] = "full"
    auto.from_pretrained(tmp_path, **options)
    auto.from_pretrained(tmp_path, vocab_size=120, ignore_mismatched_sizes=True)
    with_weights(tmp_path, afresh("bert.encoder.layer.0.output.dense.weight"))
    with another:
        auto.from_pretrained(tmp_path, **options)


def test_a_config_that_was_saved_alone(saved: Path, tmp_path: Path, silent: None) -> None:
    """With other settings it is told, and with the same ones there is nothing to tell."""
    model = load(saved, AutoModelForCausalLM)
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config.save_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path, check_fingerprint="full")
    config = copy.deepcopy(config)
    config.activation_function = "relu"
    config.save_pretrained(tmp_path)
    with pytest.warns(FingerprintWarning, match="edited"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("value", ["Full", 1, None, "compared"])
def test_the_option_of_the_check(value: Any, saved: Path) -> None:
    with pytest.raises(OptionError, match=f"check_fingerprint.*{value!r}"):
        AutoModel.from_pretrained(saved, check_fingerprint=value)
