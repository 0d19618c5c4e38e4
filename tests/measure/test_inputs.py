from __future__ import annotations

import pytest
import torch
import transformers
import zoo
from sampled import slow_but
from tiny_models import tiny
from torch import nn

from hfpatch.measure.inputs import Inputs, example_inputs, random_tokens
from hfpatch.measure.media import missing_media, with_media
from hfpatch.runtime.patch_errors import UnsupportedError

TYPES = ["gpt2", "bart", "vit", "clip", "whisper", "wav2vec2", "videomae", "timesformer"]
TYPES += ["audio-spectrogram-transformer", "speech_to_text", "blip", "beit", "llava", "reformer", "convnext"]
HEADS = [
    ("bert", "AutoModelForMultipleChoice"),
    ("bert", "AutoModelForQuestionAnswering"),
    ("gpt2", "AutoModelForSequenceClassification"),
    ("gpt2", "GPT2DoubleHeadsModel"),
    ("bart", "AutoModelForSequenceClassification"),
    ("opt", "AutoModelForSequenceClassification"),
    ("vit", "AutoModelForImageClassification"),
]


@pytest.mark.sample(17)
@pytest.mark.parametrize(("family", "head"), [*HEADS, *((one, "") for one in TYPES)])
def test_a_forward_takes_them(family: str, head: str) -> None:
    model = tiny(family, head) if head else zoo.tiny(family)[0]
    with torch.no_grad():
        output = model(**example_inputs(model))
    assert all(value.isfinite().all() for value in output.values() if isinstance(value, torch.Tensor))


def test_text_without_a_padding_token() -> None:
    model = transformers.GPT2ForSequenceClassification(transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2))
    assert model.config.pad_token_id is None
    assert model(**example_inputs(model)).logits.shape == (1, 2)


def test_cross_attention_is_fed() -> None:
    model = tiny("bert", "BertLMHeadModel", is_decoder=True, add_cross_attention=True)
    assert "encoder_hidden_states" in example_inputs(model)
    assert "encoder_hidden_states" not in example_inputs(tiny("bert", "BertLMHeadModel", is_decoder=True))


def test_tokens_depend_on_nothing_but_the_vocabulary_and_the_seed() -> None:
    """GPT-2's default end of text is one of 50,257; a classifier of another vocabulary may keep it in its config."""
    model, other = tiny("bert", vocab_size=30_522), tiny("bert", vocab_size=30_522, seed=1).train()
    first = random_tokens(model, 4, 8)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    assert torch.equal(random_tokens(other, 4, 8), first)
    assert torch.equal(example_inputs(model)["input_ids"], example_inputs(other)["input_ids"])
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(random_tokens(model, 4, 8, seed=1), first)
    assert not torch.equal(example_inputs(model, seed=1)["input_ids"], example_inputs(model)["input_ids"])
    classifier = tiny("gpt2", "AutoModelForSequenceClassification")
    classifier.config.eos_token_id = 50_256
    classifier(**example_inputs(classifier))


MARIAN = {"vocab_size": 300, "decoder_vocab_size": 60, "share_encoder_decoder_embeddings": False, "pad_token_id": 5}
NAMED = {"sep_token_id": 40, "im_start_id": 41, "mask_index": 42, "eos_token_id": [43, 44], "image_token_index": 45}


def test_tokens_are_of_the_whole_vocabulary() -> None:
    """BERT's first hundred tokens were never trained: what a model computes of them says nothing of its texts."""
    model = tiny("bert", vocab_size=30_522)
    ids = example_inputs(model, batch=16)["input_ids"]
    assert ids.min() < 3_000 < 27_000 < ids.max()
    many = random_tokens(tiny("gpt2"), 64, 128)
    assert set(range(3, 97)) - set(many.flatten().tolist()) == set()
    assert many.shape == (64, 128)


def test_special_tokens_of_any_name_are_left_out() -> None:
    plain = set(random_tokens(tiny("gpt2"), 64, 128).flatten().tolist())
    model = tiny("gpt2")
    for name, value in NAMED.items():
        setattr(model.config, name, value)
    model.generation_config = transformers.GenerationConfig(pad_token_id=46, forced_bos_token_id=47)
    assert plain - set(random_tokens(model, 64, 128).flatten().tolist()) == set(range(40, 48))


def test_tokens_have_a_row_and_are_text() -> None:
    """Behind the ordinary tokens there may be rows for padding, or for images and sounds; or none at all."""
    for name in ("unpadded_vocab_size", "vocab_size_per_layer_input", "vocab_offset"):
        model = tiny("gpt2")
        setattr(model.config, name, 50)
        assert set(random_tokens(model, 64, 128).flatten().tolist()) == set(range(3, 50))
    model = tiny("gpt2")
    model.set_input_embeddings(nn.Embedding(50, model.config.n_embd))
    assert random_tokens(model, 64, 128).max() == 49
    tiniest = tiny("gpt2", vocab_size=3)
    tiniest(random_tokens(tiniest, 2, 4))


@pytest.mark.parametrize(
    ("family", "settings", "most"),
    [
        ("marian", MARIAN, (299, 59)),
        ("fsmt", {"src_vocab_size": 300, "tgt_vocab_size": 60}, (299, 59)),
        ("fsmt", {"src_vocab_size": 60, "tgt_vocab_size": 300}, (59, 299)),
        ("musicgen", {}, (255, 31)),
        ("encoder-decoder", {}, (255, 31)),
    ],
)
def test_each_side_has_its_own_vocabulary(family: str, settings: dict[str, int], most: tuple[int, int]) -> None:
    config = zoo.tiny_config(family)
    for name, value in settings.items():
        setattr(config, name, value)
    if not settings:
        config.decoder.vocab_size = 32
    with torch.device("meta"):
        kind = {"musicgen": "MusicgenForConditionalGeneration", "encoder-decoder": "EncoderDecoderModel"}
        make = getattr(transformers, kind[family]) if family in kind else transformers.AutoModel.from_config
        model = make(config)
    for largest, decoder in zip(most, (False, True), strict=True):
        found = set(Inputs(model).ids(64, 256, decoder=decoder).flatten().tolist())
        assert max(found) <= largest < 1.1 * max(found)


@pytest.mark.parametrize("family", ["clip", "metaclip_2", "clipseg", "groupvit"])
def test_texts_end_where_they_are_pooled(family: str) -> None:
    """Without an end they would be pooled at the first token, which sees no other."""
    model, _ = zoo.tiny(family)
    given = example_inputs(model)
    assert set(given["input_ids"][:, -1].tolist()) == {model.config.text_config.eos_token_id}
    other = {**given, "input_ids": given["input_ids"].clone()}
    other["input_ids"][:, 1] = (other["input_ids"][:, 1] + 1) % 100 + 3
    with torch.no_grad():
        assert not torch.equal(model(**given).text_embeds, model(**other).text_embeds)


def test_an_unknown_input_and_a_module_without_config_are_refused() -> None:
    with torch.device("meta"):
        config = transformers.TimeSeriesTransformerConfig(prediction_length=4)
        model = transformers.AutoModel.from_config(config)
    with pytest.raises(UnsupportedError, match=r"TransformerModel.*'past_.*example_inputs="):
        example_inputs(model)
    with pytest.raises(UnsupportedError, match="Linear"):
        example_inputs(nn.Linear(2, 2))


TILES = {"image_grid_pinpoints": [[64, 128], [128, 64], [128, 128]]}  # in whole images of the small model


@pytest.mark.parametrize(
    ("model_type", "settings", "given"),
    slow_but(
        [
            ("idefics3", {}, {"input_ids", "pixel_values"}),  # it wants an axis of a text's images
            ("llava_next", TILES, {"input_ids", "pixel_values", "image_sizes"}),
            ("audioflamingo3", {}, {"input_ids", "input_features", "input_features_mask"}),
            ("glmasr", {}, {"input_ids", "input_features", "input_features_mask"}),  # bins first
            ("mistral3", {}, {"input_ids", "pixel_values", "image_sizes"}),
            ("idefics2", {}, {"input_ids", "pixel_values"}),
            ("smolvlm", {}, {"input_ids", "pixel_values"}),
            ("lighton_ocr", {}, {"input_ids", "pixel_values", "image_sizes"}),
            ("llava_onevision", TILES, {"input_ids", "pixel_values", "image_sizes"}),
            ("voxtral", {"audio_token_id": 24}, {"input_ids", "input_features"}),
        ],
        4,
    ),
)
def test_what_encoders_want_beside_images_and_sounds(model_type: str, settings: dict, given: set[str]) -> None:
    try:
        model, _ = zoo.tiny(model_type, **settings)
    except zoo.Unbuildable as error:  # an older transformers
        pytest.skip(str(error))
    found = with_media(model)
    assert found is not None
    assert found.keys() == given
    with torch.no_grad():
        model(**found)
    assert not missing_media(model, found)
    assert missing_media(model, example_inputs(model))


@pytest.mark.parametrize(
    ("model_type", "given"),
    [
        ("llava", {"input_ids", "pixel_values"}),
        ("qwen2_vl", {"input_ids", "pixel_values", "image_grid_thw", "mm_token_type_ids"}),
        ("granite_speech", {"input_ids", "input_features"}),
    ],
)
def test_images_and_sounds_stand_in_front_of_text(model_type: str, given: set[str]) -> None:
    model, _ = zoo.tiny(model_type)
    found = with_media(model)
    assert found is not None
    assert found.keys() == given
    model(**found)
    longest = with_media(model, tokens=40, batch=1)
    assert longest is not None
    assert longest["input_ids"].shape == (1, 40)
    model(**longest)
    assert with_media(model, tokens=3) is None  # no room


def test_there_are_none_where_a_model_reads_nothing_but_text() -> None:
    model, _ = zoo.tiny("gpt2")
    assert with_media(model) is None
    assert not missing_media(model, {"input_ids"})
