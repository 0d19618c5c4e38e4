"""A part of a larger transformers model isn't patched by itself, whatever holds it; what is no part any more is."""

from __future__ import annotations

import copy
import gc
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zoo
from forms import called
from tiny_models import changes, difference, fingerprint, outputs, patch, peft_of_transformers, randomise, reload, tiny
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from hfpatch.errors import UnsupportedError
from hfpatch.patch import patch_model
from hfpatch.plan import plan_patch

LM, IMAGE = "AutoModelForCausalLM", "AutoModelForImageTextToText"


class HolderConfig(PreTrainedConfig):
    model_type = "holder_of_a_test"
    folder: str = ""


class Holder(PreTrainedModel):
    """Somebody's model, which builds its encoder from the encoder's own checkpoint."""

    config_class = HolderConfig

    def __init__(self, config: HolderConfig):
        super().__init__(config)
        self.encoder = AutoModel.from_config(AutoConfig.from_pretrained(config.folder))
        self.top = nn.Linear(32, 3)
        self.post_init()

    def forward(self, input_ids: Any) -> Any:
        return {"logits": self.top(self.encoder(input_ids).last_hidden_state)}


class Around(Holder):
    """Somebody's model around what it is given, in modules that are none of transformers."""

    def __init__(self, part: Any):
        PreTrainedModel.__init__(self, HolderConfig())
        self.towers = nn.ModuleDict({"text": nn.Sequential(part)})
        self.post_init()


def test_a_part_of_a_larger_model_isnt_patched_by_itself() -> None:
    (model, _), head = zoo.tiny("llava", auto_class=IMAGE), tiny("gpt2", LM)
    before = fingerprint(model)
    for do in (patch_model, plan_patch):
        with pytest.raises(UnsupportedError, match=r"only='model\.language_model\.\*'"):
            do(model.model.language_model, norm="dyt")
    with pytest.raises(UnsupportedError, match=r"GPT2Model is transformer of a GPT2LMHeadModel"):
        patch_model(head.transformer, norm="rms")
    assert not changes(before, fingerprint(model))


def test_the_largest_one_is_named() -> None:
    """Through modules of others, and of several the one that has all."""
    whole = Around(tiny("gpt2", LM))
    inner = whole.towers["text"][0]
    for part, place in ((inner, "towers.text.0"), (inner.transformer, "towers.text.0.transformer")):
        with pytest.raises(UnsupportedError, match=re.escape(f" is {place} of a Around")) as error:
            patch_model(part, norm="dyt")
        assert f"only='{place}.*'" in str(error.value)


def test_of_an_encoder_and_a_decoder_that_were_put_together() -> None:
    encoder, decoder = tiny("bert"), tiny("bert", LM, is_decoder=True, add_cross_attention=True)
    composite = transformers.EncoderDecoderModel(encoder=encoder, decoder=decoder)
    with pytest.raises(UnsupportedError, match="is encoder of a EncoderDecoderModel"):
        patch_model(encoder, norm="dyt")
    del composite
    patch(encoder, norm="dyt")


def test_what_was_a_part_isnt_any_more(tmp_path: Path) -> None:
    for free in (
        copy.deepcopy(tiny("gpt2", LM).transformer),
        _taken_out(tiny("gpt2", LM)),
        tiny("gpt2", LM).transformer,  # whose outer model is gone
        _of_garbage(),
    ):
        assert difference(patch(free, norm="dyt"), reload(free, tmp_path)) == 0


def _taken_out(model: Any) -> Any:
    part, model.transformer = model.transformer, None
    return part


def _of_garbage() -> Any:
    """A part whose outer model nobody holds but itself, so that only the garbage collector frees it."""
    gc.disable()  # it would have to run just now
    whole = tiny("gpt2", LM)
    vars(whole)["own"] = [whole]
    gc.enable()
    return whole.transformer


def test_what_else_holds_a_model_is_no_larger_one(tmp_path: Path) -> None:
    """Namespaces, lists, pipelines, wrappers and holders that are none of transformers' models."""
    model = tiny("gpt2", LM)
    holders: list[Any] = [types.SimpleNamespace(model=model), {"model": model}, [model], nn.ModuleDict({"a": model})]
    wrapped = nn.DataParallel(model)
    patch(model, norm="dyt")
    assert difference(model, reload(model, tmp_path, LM)) == 0
    del holders, wrapped


def test_what_peft_put_around_it_is_none_either() -> None:
    peft = peft_of_transformers()
    base = patch(tiny("gpt2", LM), norm="rms", init="copy")
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    patch(adapted.merge_and_unload(), pos="rope")  # while the wrapper is there


@pytest.mark.slow
def test_a_model_that_was_built_before_the_import(tmp_path: Path) -> None:
    script = """
import transformers
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16))
import hfpatch
try:
    hfpatch.patch_model(model.transformer, norm="dyt")
except hfpatch.errors.UnsupportedError as error:
    print(error)
"""
    assert "is transformer of a GPT2LMHeadModel" in called(sys.executable, "-c", script, home=tmp_path).stdout


# What goes on working


def test_a_class_that_builds_its_part_patched(tmp_path: Path) -> None:
    patch(tiny("bert"), norm="dyt").save_pretrained(tmp_path / "part")
    model = randomise(Holder(HolderConfig(folder=str(tmp_path / "part"))))
    assert hasattr(type(model.encoder), "hfpatch_model")
    model.save_pretrained(tmp_path / "whole")
    given = {"input_ids": torch.arange(10)[None]}
    assert difference(outputs(model, **given), outputs(Holder.from_pretrained(tmp_path / "whole").eval(), **given)) == 0
