"""The ways in which transformers opens a model, on patched checkpoints: shards, places, precision, pipelines."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zoo
from checkpoint_edits import with_weights
from tiny_models import difference, inputs, load, norms_of, outputs, patch, tiny, word_tokenizer
from transformers import AutoConfig, AutoModel, GPT2LMHeadModel

from hfpatch.runtime.norms import DynamicTanh
from hfpatch.runtime.patch_errors import CheckpointError
from hfpatch.schemes.norm_schemes import DyT
from hfpatch.schemes.rope import RoPE

BOTH = {"norm": DyT(0.4), "pos": RoPE(theta=300.0)}
CAUSAL = "AutoModelForCausalLM"


@pytest.mark.parametrize("norm", ["dyt", "derf"])
def test_layers_that_stay_in_float32(norm: str, tmp_path: Path) -> None:
    """Opened in float16, T5 keeps the last layer of each MLP in float32; its norms lead back to float16."""
    model = patch(tiny("t5"), norm=norm)
    model.save_pretrained(tmp_path)
    half = AutoModel.from_pretrained(tmp_path, dtype=torch.float16)
    assert {p.dtype for p in half.parameters()} == {torch.float16, torch.float32}
    given = inputs(model)
    with torch.no_grad():
        expected, found = (one(**given).last_hidden_state for one in (model, half))
    assert found.dtype == torch.float16
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize(
    ("family", "auto", "sizes", "request_"),
    [
        ("gpt2", CAUSAL, {"n_layer": 6}, {"norm": "rms", "pos": "rope"}),
        ("t5", "AutoModelForSeq2SeqLM", {}, {"norm": "dyt"}),
    ],
)
def test_what_memory_leaves(
    family: str, auto: str, sizes: dict[str, int], request_: dict[str, Any], tmp_path: Path
) -> None:
    """With too little memory for `device_map="auto"` the rest lies on disk, whole blocks at a time."""
    model = patch(tiny(family, auto, **sizes), **request_)
    model.save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    options = {"device_map": "auto", "max_memory": {"cpu": int(0.6 * size)}, "offload_folder": tmp_path / "offload"}
    again = getattr(transformers, auto).from_pretrained(tmp_path, **options)
    places = again.hf_device_map
    assert set(places.values()) == {"cpu", "disk"}  # accelerate 1.10 refuses to put everything on disk
    assert difference(outputs(again, **inputs(model)), outputs(model)) < 1e-5
    whole = [name for name, one in again.named_modules() if type(one).__name__ in again._no_split_modules]
    assert whole
    assert not [place for place in places if any(place.startswith(f"{block}.") for block in whole)]
    again.save_pretrained(tmp_path / "again")  # which accelerate gathers
    assert difference(model, load(tmp_path / "again", auto)) == 0


@pytest.mark.parametrize(
    "model_type",
    [
        "shieldgemma2",  # it builds its base by an Auto class, from its own config
        "jev",  # its own from_pretrained takes the pair that output_loading_info gives for the model
    ],
)
def test_hosts_that_load_in_a_way_of_their_own(model_type: str, tmp_path: Path) -> None:
    try:
        model, _ = zoo.tiny(model_type)
    except zoo.Unbuildable as error:  # an older transformers
        pytest.skip(str(error))
    patch(model, norm="dyt", init="copy")
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert norms_of(loaded, DynamicTanh) == norms_of(model, DynamicTanh) != []
    assert all(map(torch.equal, loaded.state_dict().values(), model.state_dict().values()))
    gain = next(name for name in model.state_dict() if name.endswith("gain"))
    with_weights(tmp_path, lambda weights: weights[gain].add_(1))
    with pytest.raises(CheckpointError):
        type(model).from_pretrained(tmp_path, check_fingerprint="full")


# Pipelines


def test_a_pipeline(tmp_path: Path) -> None:
    """By the folder's name alone it gives what the model in memory gives."""
    model = patch(tiny("gpt2", GPT2LMHeadModel), norm="rms", pos="rope", init="copy")
    tokenizer = word_tokenizer(pad_token="w0")
    for one in (model, tokenizer):
        one.save_pretrained(tmp_path)
    expected, found = (
        transformers.pipeline("text-generation", **given)("w3 w5 w6", max_new_tokens=4, do_sample=False)
        for given in ({"model": model, "tokenizer": tokenizer}, {"model": str(tmp_path)})
    )
    assert found == expected


# Settings that are overridden at opening, of modules whose edits fix them

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0, "original_max_position_embeddings": 64}
ROPE, NOPE, RMS = {"pos": RoPE(theta=500.0)}, {"pos": "nope"}, {"norm": "rms", "init": "copy"}
OF_ONE_KIND = {
    "full_attention": {"rope_type": "default", "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
}
IN_VAIN: dict[str, tuple[str, dict[str, Any], str, Any]] = {
    "a rotation": ("llama", ROPE, "rope_parameters", YARN),
    "a rotation that was dropped": ("llama", NOPE, "rope_parameters", YARN),
    "a rotation of one type of layers": ("gemma3_text", ROPE, "rope_parameters", OF_ONE_KIND),
    "one of these that was dropped": ("gemma3_text", NOPE, "rope_parameters", OF_ONE_KIND),
    "a part's rotation": ("llava", ROPE, "text_config.rope_parameters", YARN),
    "hfpatch's rotation": ("esm", ROPE, "rope_theta", 700.0),
    "eps": ("gpt2", RMS, "layer_norm_epsilon", 0.5),
    "eps of a norm that has none": ("gpt2", {"norm": "dyt"}, "layer_norm_epsilon", 0.5),
    "eps beside a norm that was kept": ("gpt2", {**RMS, "keep": ["ln_f"]}, "layer_norm_epsilon", 0.5),
    "eps of norms without, beside one that was kept": (
        "gpt2",
        {"norm": "dyt", "keep": ["ln_f"]},
        "layer_norm_epsilon",
        0.5,
    ),
    "a part's eps": ("llava", RMS, "vision_config.layer_norm_eps", 0.5),
}
IN_EFFECT: dict[str, tuple[str, dict[str, Any], str, Any]] = {
    "a rotation that was kept": ("llama", {"norm": "dyt"}, "rope_parameters", YARN),
    "eps of norms that were kept": ("llama", ROPE, "rms_norm_eps", 0.5),
    "another part's rotation": ("llava", RMS, "text_config.rope_parameters", YARN),
    "another part's eps": ("llava", RMS, "text_config.rms_norm_eps", 0.5),
    "dropout": ("llama", ROPE, "attention_dropout", 0.5),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", [*IN_VAIN, *IN_EFFECT])
def test_a_setting_that_the_patch_fixes_is_named_and_others_have_an_effect(case: str, tmp_path: Path) -> None:
    """It was ignored without a word, while the config said that it applied."""
    family, patched, place, value = (IN_VAIN | IN_EFFECT)[case]
    patch(zoo.tiny(family)[0], **patched).save_pretrained(tmp_path)
    *way, name = place.split(".")
    config = part = AutoConfig.from_pretrained(tmp_path)
    for one in way:
        part = getattr(part, one)
    present = getattr(part, name)
    setattr(part, name, value)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        changed = AutoModel.from_pretrained(tmp_path, config=config)
        assert bool(told) == (case in IN_VAIN), [str(one.message) for one in told]
        if case in IN_EFFECT:
            ids = {"input_ids": torch.arange(5, 12)[None]}
            assert "dropout" in name or difference(changed, AutoModel.from_pretrained(tmp_path), **ids) > 1e-4
            return
        assert re.search(rf"{name}.*=.*which has no effect", str(told[0].message))
    if not way:
        with pytest.warns(UserWarning, match="which has no effect"):
            AutoModel.from_pretrained(tmp_path, **{name: value})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            AutoModel.from_pretrained(tmp_path, **{name: present})  # what it is anyway


def test_a_head_that_gives_its_base_another_name_than_its_own(tmp_path: Path) -> None:
    """Llama 4's text model: for the head the base's prefix is "language_model", and it holds it as `model`."""
    head, given = zoo.tiny("llama4_text", auto_class=CAUSAL)
    patch(head, norm="dyt", init="copy")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head.save_pretrained(tmp_path)
        base = AutoModel.from_pretrained(tmp_path)
    assert len(norms_of(base, DynamicTanh)) == len(norms_of(head, DynamicTanh)) == 5
    with torch.no_grad():
        expected = head(**given, output_hidden_states=True).hidden_states[-1]
        assert torch.equal(base.eval()(**given).last_hidden_state, expected)


def test_a_class_with_none_of_the_places_that_were_patched_says_so(tmp_path: Path) -> None:
    patch(tiny("t5", "AutoModelForSeq2SeqLM"), norm="dyt", only="decoder.*").save_pretrained(tmp_path / "decoder")
    patch(tiny("t5", "AutoModelForSeq2SeqLM"), norm="dyt", only="*.0.*").save_pretrained(tmp_path / "both")
    with pytest.warns(UserWarning, match="as T5EncoderModel. This class has none of the places that the patch"):
        encoder = transformers.AutoModelForTextEncoding.from_pretrained(tmp_path / "decoder")
    assert norms_of(encoder, DynamicTanh) == []
    with warnings.catch_warnings():  # control: some are there
        warnings.simplefilter("error")
        encoder = transformers.AutoModelForTextEncoding.from_pretrained(tmp_path / "both")
    assert norms_of(encoder, DynamicTanh)
