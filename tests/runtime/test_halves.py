"""A composite model with a patched part in it is never saved as an unpatched whole."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zoo
from forms import called
from tiny_models import COPIES, changes, difference, fingerprint, outputs, patch, randomise, reload, tiny
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from hfpatch.checkpoint import outer
from hfpatch.errors import UnsupportedError
from hfpatch.export import export_model
from hfpatch.patch import patch_model
from hfpatch.plan import plan_patch

LM, IMAGE = "AutoModelForCausalLM", "AutoModelForImageTextToText"
ALONE = "was patched by itself"


def patched(family: str = "bert", *head: str, **options: Any) -> Any:
    return patch(tiny(family, *head, **options), norm="dyt")


def saved(folder: Path, *args: Any, **options: Any) -> str:
    patched(*args, **options).save_pretrained(folder)
    return str(folder)


def bert_decoder() -> Any:
    return tiny("bert", LM, is_decoder=True, add_cross_attention=True)


def llava_around_a_patched_one(folder: Path) -> Any:
    model, _ = zoo.tiny("llava", auto_class=IMAGE)
    model.model.language_model = patch(copy.deepcopy(model.model.language_model), norm="dyt")
    return model


def llava_by_a_patched_config(folder: Path) -> Any:
    """In memory it is patched, since its constructor asks an Auto class; config.json has the host's model type."""
    config = zoo.tiny_config("llava")
    text = AutoModel.from_config(config.text_config)
    text.save_pretrained(folder)
    patch(text, norm="dyt").save_pretrained(folder)
    config.text_config = AutoConfig.from_pretrained(folder)
    return transformers.LlavaForConditionalGeneration(config)


def from_folders(kind: str, *names: str) -> Callable[[Path], Any]:
    """A composite of a patched checkpoint and an unpatched one."""

    def build(folder: Path) -> Any:
        first = "vit" if "vision" in kind else "bert"
        bert_decoder().save_pretrained(folder / "second")
        composite = getattr(transformers, names[0])
        return getattr(composite, names[1])(saved(folder / "first", first), str(folder / "second"))

    return build


HALVES: dict[str, Callable[[Path], Any]] = {
    "encoder": lambda _: transformers.EncoderDecoderModel(encoder=patched(), decoder=bert_decoder()),
    "decoder": lambda _: transformers.EncoderDecoderModel(
        encoder=tiny("bert"), decoder=patch(bert_decoder(), pos="nope")
    ),
    "both": lambda _: transformers.EncoderDecoderModel(encoder=patched(), decoder=patch(bert_decoder(), norm="dyt")),
    "folder": from_folders("text", "EncoderDecoderModel", "from_encoder_decoder_pretrained"),
    "vision": from_folders("vision", "VisionEncoderDecoderModel", "from_encoder_decoder_pretrained"),
    "vision and text": from_folders("vision", "VisionTextDualEncoderModel", "from_vision_text_pretrained"),
    "speech": lambda _: transformers.SpeechEncoderDecoderModel(
        encoder=zoo.tiny("wav2vec2")[0], decoder=patch(bert_decoder(), norm="dyt")
    ),
    "llava": llava_around_a_patched_one,
    "llava's config": llava_by_a_patched_config,
}


@pytest.mark.parametrize("build", HALVES.values(), ids=HALVES)
def test_a_patched_part_isnt_saved_in_an_unpatched_whole(build: Callable[[Path], Any], tmp_path: Path) -> None:
    model = build(tmp_path / "parts")
    before = fingerprint(model)
    with pytest.raises(UnsupportedError, match=ALONE) as error:
        model.save_pretrained(tmp_path / "whole")
    assert not (tmp_path / "whole").exists()
    assert not changes(before, fingerprint(model))
    assert "patch_model(model, " in str(error.value)


def test_nothing_else_of_it_is_refused(tmp_path: Path) -> None:
    """Only the save of the whole is."""
    model = transformers.EncoderDecoderModel(encoder=patched(), decoder=bert_decoder()).eval()
    tokens = torch.randint(5, 97, (2, 9), generator=torch.Generator().manual_seed(0))
    given = {"input_ids": tokens, "decoder_input_ids": tokens}
    expected = outputs(model, **given)
    for twin in [copied(model) for copied in COPIES.values()]:
        assert difference(expected, outputs(twin, **given)) == 0
        with pytest.raises(UnsupportedError, match=ALONE):
            twin.save_pretrained(tmp_path)
    assert len(model.state_dict()) == len(list(model.named_parameters(remove_duplicate=False))) + len(
        [name for name, _ in model.named_buffers() if "position_ids" not in name and "token_type_ids" not in name]
    )
    assert "encoder" in str(model.config)


def test_the_refusals_call_works(tmp_path: Path) -> None:
    """The whole patched as it says, with the values of the one that couldn't be saved, is that one, and reopens."""
    model, given = zoo.tiny("llava", auto_class=IMAGE)
    whole = copy.deepcopy(model)
    model.model.language_model = randomise(patch(copy.deepcopy(model.model.language_model), norm="dyt"))
    with pytest.raises(UnsupportedError) as error:
        model.save_pretrained(tmp_path)
    call = str(error.value).partition("whole: ")[2].partition(". Values")[0]
    assert call == "patch_model(model, norm='dyt', only='model.language_model.*')"
    eval(call, {"patch_model": patch, "model": whole})
    whole.load_state_dict(model.state_dict())
    assert difference(whole, model, **given) == 0
    assert difference(reload(whole, tmp_path, IMAGE), model, **given) == 0


# A part that is known to be one


def test_a_part_of_a_larger_model_isnt_patched_by_itself() -> None:
    (model, _), head = zoo.tiny("llava", auto_class=IMAGE), tiny("gpt2", LM)
    before = fingerprint(model)
    for do in (patch_model, plan_patch):
        with pytest.raises(UnsupportedError, match=r"only='model\.language_model\.\*'"):
            do(model.model.language_model, norm="dyt")
    with pytest.raises(UnsupportedError, match=r"GPT2Model is transformer of a GPT2LMHeadModel"):
        patch_model(head.transformer, norm="rms")
    assert not changes(before, fingerprint(model))


def test_what_was_a_part_isnt_any_more(tmp_path: Path) -> None:
    for free in (
        copy.deepcopy(tiny("gpt2", LM).transformer),
        _taken_out(tiny("gpt2", LM)),
        tiny("gpt2", LM).transformer,  # whose outer model is gone
    ):
        assert difference(patch(free, norm="dyt"), reload(free, tmp_path)) == 0


def _taken_out(model: Any) -> Any:
    part, model.transformer = model.transformer, None
    return part


def test_a_model_of_before_the_import_is_refused_when_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("gpt2", LM)
    monkeypatch.setattr(outer, "_parents", {})
    patch(model.transformer, norm="dyt")
    with pytest.raises(UnsupportedError, match=ALONE):
        model.save_pretrained(tmp_path)


# What goes on working


def test_a_head_on_a_patched_base(tmp_path: Path) -> None:
    base = patched()
    base.save_pretrained(tmp_path / "base")
    head = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "base").eval()
    assert difference(head, reload(head, tmp_path / "head", "AutoModelForSequenceClassification")) == 0


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_head_that_asks_an_auto_class_for_its_base(family: str, tmp_path: Path) -> None:
    """Llama's classifier does; its base has the same record."""
    head = patch(tiny(family, "AutoModelForSequenceClassification"), norm="dyt")
    again = reload(head, tmp_path, "AutoModelForSequenceClassification")
    assert difference(head, again) == 0
    assert difference(head, reload(again, tmp_path, "AutoModelForSequenceClassification")) == 0


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


def test_a_class_that_builds_its_part_patched(tmp_path: Path) -> None:
    model = randomise(Holder(HolderConfig(folder=saved(tmp_path / "part"))))
    assert hasattr(type(model.encoder), "hfpatch_model")
    model.save_pretrained(tmp_path / "whole")
    given = {"input_ids": torch.arange(10)[None]}
    assert difference(outputs(model, **given), outputs(Holder.from_pretrained(tmp_path / "whole").eval(), **given)) == 0


def test_a_class_whose_parts_its_caller_brings(tmp_path: Path) -> None:
    class Brought(Holder):
        def __init__(self, config: HolderConfig, encoder: Any):
            PreTrainedModel.__init__(self, config)
            self.encoder = encoder
            self.post_init()

    Brought(HolderConfig(), patched()).save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.slow
def test_a_part_of_remote_code_is_refused_too(tmp_path: Path) -> None:
    """In a process without hfpatch."""
    export_model(patched(), tmp_path / "part", "remote", verify=False)
    script = """
import sys, transformers
part = transformers.AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
config = transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
config.is_decoder = config.add_cross_attention = True
decoder = transformers.BertLMHeadModel(config)
transformers.EncoderDecoderModel(encoder=part, decoder=decoder).save_pretrained("whole")
"""
    done = called(sys.executable, "-c", script, tmp_path / "part", home=tmp_path, hide_hfpatch=True)
    assert ALONE in done.stderr, done.stderr
    assert not (tmp_path / "whole").exists()
