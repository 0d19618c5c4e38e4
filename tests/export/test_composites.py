"""Models of several parts, patched through the outermost one: they save and open in every form, or say why not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zoo
from tiny_models import difference, outputs, patch, randomise, reload, tiny

from hfpatch.errors import UnsupportedError
from hfpatch.export import export_model
from hfpatch.export.equality import compare

LM, IMAGE, SPEECH = "AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSpeechSeq2Seq"
Built = tuple[Any, dict[str, Any]]


def tokens() -> torch.Tensor:
    return torch.randint(5, 97, (2, 9), generator=torch.Generator().manual_seed(0))


def encoder_decoder() -> Built:
    decoder = tiny("bert", LM, is_decoder=True, add_cross_attention=True)
    model = transformers.EncoderDecoderModel(encoder=tiny("bert"), decoder=decoder).eval()
    return model, {"input_ids": tokens(), "decoder_input_ids": tokens()}


def vision_encoder_decoder() -> Built:
    decoder = tiny("gpt2", LM, add_cross_attention=True)
    model = randomise(transformers.VisionEncoderDecoderModel(encoder=tiny("vit"), decoder=decoder))
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return model, {"pixel_values": pixels, "decoder_input_ids": tokens()}


def llava() -> Built:
    """With an image: its tokens are those of the vision tower."""
    model, _ = zoo.tiny("llava", auto_class=IMAGE)
    size, generator = model.config.vision_config.image_size, torch.Generator().manual_seed(0)
    pixels = torch.randn(2, 3, size, size, generator=generator)
    with torch.no_grad():
        count = len(model.get_image_features(pixel_values=pixels).pooler_output[0])
    image = torch.full((2, count), model.config.image_token_index)
    return model, {"input_ids": torch.cat((image, tokens()), 1), "pixel_values": pixels}


CASES: dict[str, tuple[Callable[[], Built], str, dict[str, Any]]] = {
    "llava": (llava, IMAGE, {"norm": "dyt", "pos": "nope", "only": "*language_model*"}),
    "llava's tower": (llava, IMAGE, {"norm": "dyt", "only": "*vision_tower*"}),
    "encoder": (encoder_decoder, "AutoModelForSeq2SeqLM", {"norm": "dyt", "pos": "rope", "only": "encoder.*"}),
    "decoder": (encoder_decoder, "AutoModelForSeq2SeqLM", {"norm": "dyt", "only": "decoder.*"}),
    "image captions": (vision_encoder_decoder, IMAGE, {"norm": "rms", "pos": "rope"}),
    "clip": (lambda: zoo.tiny("clip"), "AutoModel", {"norm": "rms", "pos": "rope"}),
    "whisper": (lambda: zoo.tiny("whisper", auto_class=SPEECH), SPEECH, {"norm": "rms", "pos": "rope"}),
    "whisper's classifier": (
        lambda: zoo.tiny("whisper", auto_class="AutoModelForAudioClassification"),
        "AutoModelForAudioClassification",
        {"norm": "dyt"},
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_where_hfpatch_is_imported(name: str, tmp_path: Path) -> None:
    build, auto, request = CASES[name]
    model, given = build()
    plain = outputs(model, **given)
    patch(model, **request)
    expected = outputs(model, **given)
    assert difference(plain, expected) > 0.01, "control: the patch changes what these inputs give"
    opened = reload(model, tmp_path, auto).eval()
    assert type(opened) is type(model)
    assert difference(expected, outputs(opened, **given)) <= 1e-6


@pytest.mark.sample(0, slow=3)
@pytest.mark.parametrize("name", CASES)
def test_without_hfpatch(name: str, tmp_path: Path) -> None:
    """The export opens itself in another process, saves from there, opens that, and compares bit for bit."""
    build, _, request = CASES[name]
    model, given = build()
    patch(model, **request)
    export_model(model, tmp_path / "remote", "remote", example_inputs=given)
    assert (tmp_path / "remote/modeling_hfpatch.py").exists()


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_as_a_stock_model_it_is_refused(name: str, tmp_path: Path) -> None:
    build, _, request = CASES[name]
    model, _ = build()
    patch(model, **request)
    with pytest.raises(UnsupportedError, match=r"DynamicTanh|rotates queries and keys"):
        export_model(model, tmp_path / "native", "native")


STOCK: dict[str, dict[str, Any]] = {
    "another rotation": {"pos": "rope:theta=500", "only": "*language_model*"},
    "no rotation": {"pos": "nope", "only": "*language_model*"},
    "the tower's norms": {"norm": "layer", "only": "*vision_tower*"},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", STOCK)
def test_what_a_stock_one_has_is_exported_as_that(name: str, tmp_path: Path) -> None:
    """With images as well as with text, on which it was measured."""
    model, given = llava()
    patch(model, **STOCK[name])
    expected = outputs(model, **given)
    measured = export_model(model, tmp_path / "native", "native").measured
    assert measured.inputs == 9, "two with images"
    stock = getattr(transformers, IMAGE).from_pretrained(tmp_path / "native").eval()
    assert type(stock) is transformers.LlavaForConditionalGeneration
    assert difference(expected, outputs(stock, **given)) <= 1e-5 * max(float(x.std()) for x in expected)


def test_an_image_is_compared() -> None:
    """Control: a tower that differs is seen."""
    model, _ = llava()
    other, _ = llava()
    assert compare(model, other).holds
    other.model.vision_tower.embeddings.position_embedding.weight.data.mul_(2)
    assert not compare(model, other).holds
