"""An object of sentence-transformers stands for the model inside it wherever a model is asked for."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_encoders import (
    LENGTH,
    TEXTS,
    cross_encoder,
    embedded,
    module,
    outputs_of_texts,
    sentence_encoder,
    sparse_encoder,
    t5_encoder,
    transformer,
)
from tiny_models import patch
from torch import nn

from hfpatch import outcomes, patch_model, plan_patch, read_batches, unpatch_model, verify
from hfpatch.core.holders import model_inside
from hfpatch.errors import WrappedModelError
from hfpatch.measure.outputs import max_error
from hfpatch.runtime.patch_errors import UnsupportedError

ROPE = "rope:max_positions=96"


def test_it_is_patched_in_place_and_stays_what_it_is() -> None:
    encoder = sentence_encoder()
    before, modules = embedded(encoder), [type(module) for module in encoder]
    inner = encoder[0].auto_model
    assert str(plan_patch(encoder, norm="rms")) == str(plan_patch(inner, norm="rms"))
    assert patch(encoder, norm="rms", init="exact") is encoder
    assert encoder[0].auto_model is inner
    assert [type(module) for module in encoder] == modules
    assert outcomes(encoder) == outcomes(inner)
    assert [outcome.partition(":")[0] for outcome in outcomes(encoder).values()] == ["exact"]
    torch.testing.assert_close(embedded(encoder), before, rtol=0, atol=1e-5)
    patch(encoder, pos="rope")
    assert (embedded(encoder) - before).abs().max() > 1e-4
    for given in (encoder[0], nn.Sequential(inner)):  # what only contains a model is no holder
        assert model_inside(given) is given
        with pytest.raises(WrappedModelError, match="Pass a SentenceTransformer as a whole"):
            patch_model(given, norm="rms")


def test_it_is_verified_against_another_on_texts_that_its_own_tokenizer_reads() -> None:
    encoder = sentence_encoder()
    original = copy.deepcopy(encoder)
    patch(encoder, norm="rms")
    report = verify(encoder, original, TEXTS, dtypes=[])
    inside = verify(encoder[0].auto_model, original[0].auto_model, TEXTS, dtypes=[], tokenizer=encoder.tokenizer)
    assert str(report) == str(inside)
    assert report.examples == len(TEXTS)
    assert str(verify(encoder, reference=original, dtypes=[])) != str(report)  # random inputs
    batch = next(iter(read_batches(TEXTS, encoder)))
    assert torch.equal(batch["input_ids"][0], encoder.tokenizer(TEXTS[0], return_tensors="pt")["input_ids"][0])


def test_the_length_that_positions_set_is_its_own_too() -> None:
    encoder = sentence_encoder()
    far = [" ".join(TEXTS[:3]), " ".join([*TEXTS[:2], *TEXTS[3:5]])]  # alike up to the old length
    assert encoder.max_seq_length == LENGTH
    assert torch.equal(*embedded(encoder, far).split(1))
    before = embedded(encoder)
    patch(encoder, pos=ROPE, reversible=True)
    assert encoder.max_seq_length == encoder.tokenizer.model_max_length == 96
    assert (embedded(encoder, far[:1]) - embedded(encoder, far[1:])).abs().max() > 1e-6
    assert unpatch_model(encoder) is encoder
    assert encoder.max_seq_length == LENGTH
    assert torch.equal(embedded(encoder), before)


def test_a_module_that_keeps_a_length_of_its_own_is_told() -> None:
    """sentence-transformers before 6 cuts at an attribute of its module, whatever the tokenizer says."""
    encoder = sentence_encoder()
    own = vars(encoder[0])
    own["max_seq_length"] = LENGTH
    patch(encoder, pos="rope", reversible=True)
    assert own["max_seq_length"] == encoder.max_seq_length == LENGTH
    patch(encoder, pos=ROPE + ",theta=500", reversible=True)
    assert own["max_seq_length"] == 96
    unpatch_model(encoder)
    assert own["max_seq_length"] == LENGTH


@pytest.mark.slow
@pytest.mark.parametrize("make", [cross_encoder, sparse_encoder])
def test_others_of_its_kind(make: Any, tmp_path: Path) -> None:
    encoder = make()
    before = outputs_of_texts(encoder, TEXTS)
    texts = [f"{one} {other}" for one in TEXTS[:9] for other in TEXTS[9:]]
    assert patch(encoder, norm="dyt", calibration=texts) is encoder
    patched = outputs_of_texts(encoder, TEXTS)
    assert max_error(before, patched) > 1e-5
    encoder.save_pretrained(str(tmp_path))
    again = type(encoder)(str(tmp_path), device="cpu")
    assert outcomes(again) == outcomes(encoder)
    assert max_error(patched, outputs_of_texts(again, TEXTS)) < 1e-6


def test_several_models_in_one_object_are_refused_and_one_twice_is_not() -> None:
    first = transformer()
    from sentence_transformers import SentenceTransformer

    def routed(query: Any, document: Any) -> Any:
        pooling = module("Pooling")(first.auto_model.config.hidden_size)
        router = module("Router").for_query_document(
            query_modules=[query, pooling], document_modules=[document, pooling]
        )
        return SentenceTransformer(modules=[router], device="cpu")

    shared = routed(first, first)
    assert model_inside(shared) is first.auto_model
    two = routed(first, transformer())
    with pytest.raises(
        UnsupportedError, match=r"2 transformers models \(0.sub_modules.query.0.(auto_)?model, 0.sub_modules.doc"
    ):
        patch_model(two, norm="rms")
    assert not hasattr(two[0].sub_modules["query"][0].auto_model.config, "hfpatch")
    static = SentenceTransformer(modules=[module("StaticEmbedding")(first.tokenizer, embedding_dim=4)], device="cpu")
    with pytest.raises(UnsupportedError, match="no model of transformers"):
        patch_model(static, norm="rms")


def test_the_encoder_of_an_encoder_decoder(tmp_path: Path) -> None:
    """sentence-transformers calls T5EncoderModel.from_pretrained, which refuses a patched folder."""
    encoder = t5_encoder()
    before = embedded(encoder)
    with pytest.raises(UnsupportedError, match=r"holds a T5EncoderModel, .* open a saved patch again.*put it into"):
        patch_model(encoder, norm="dyt")
    encoder[0].model = patch(encoder[0].auto_model, norm="dyt")
    assert (embedded(encoder) - before).abs().max() > 1e-3
    encoder.save_pretrained(str(tmp_path))
    with pytest.raises(Exception, match=r"patched by hfpatch.*open it with an Auto class"):
        type(encoder)(str(tmp_path), device="cpu")


def test_it_saves_and_opens_as_it_did(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    encoder = sentence_encoder(truncate_dim=8)
    encoder.save_pretrained(str(tmp_path / "plain"))
    card = (tmp_path / "plain/README.md").read_text() + "\nOf the author.\n"
    (tmp_path / "plain/README.md").write_text(card)
    encoder = patch(SentenceTransformer(str(tmp_path / "plain"), device="cpu"), norm="rms", pos=ROPE)
    dim = encoder.truncate_dim
    assert dim in (8, None)  # which older versions don't save
    encoder.save_pretrained(str(tmp_path / "patched"))
    assert (tmp_path / "patched/README.md").read_text() == card
    again = SentenceTransformer(str(tmp_path / "patched"), device="cpu")
    assert [type(module) for module in again] == [type(module) for module in encoder]
    assert (again.prompts, again.similarity_fn_name, again.truncate_dim) == (encoder.prompts, "dot", dim)
    assert again.max_seq_length == 96
    for options in ({}, {"prompt_name": "query"}, {"truncate_dim": 5}):
        torch.testing.assert_close(embedded(again, **options), embedded(encoder, **options), rtol=0, atol=1e-6)
    assert embedded(again).shape[1] == (dim or 12)
    assert outcomes(again) == outcomes(encoder)
