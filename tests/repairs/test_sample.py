"""Sequences that a model draws from itself: its own distribution, repeatable, and no trace of the drawing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_models import PAD, changes, fingerprint, patch, tiny
from torch import Tensor

import hfpatch.repairs.repair
from hfpatch.core.transaction import Transaction
from hfpatch.errors import OptionError
from hfpatch.patch import repair_report
from hfpatch.repairs.sample import sample_batches

LM, SEQ2SEQ = "AutoModelForCausalLM", "AutoModelForSeq2SeqLM"
Batch = dict[str, Tensor]


def same(a: list[Batch], b: list[Batch]) -> bool:
    pairs = zip(a, b, strict=True)
    return all(x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x) for x, y in pairs)


@pytest.mark.parametrize(("family", "head"), [("gpt2", LM), ("bart", SEQ2SEQ)])
def test_a_draw_repeats_and_leaves_no_trace(family: str, head: str) -> None:
    model = tiny(family, head).train()
    settings = copy.deepcopy(model.generation_config.to_dict())
    before = fingerprint(model)
    first = sample_batches(model, sequences=5, length=8)
    assert not changes(before, fingerprint(model))  # modes and random streams too
    assert model.generation_config.to_dict() == settings
    torch.manual_seed(99)
    assert same(first, sample_batches(model, sequences=5, length=8))
    assert not same(first, sample_batches(model, sequences=5, length=8, seed=1))


def test_it_is_the_models_distribution() -> None:
    """Second tokens are as frequent as the model says; so not greedy, not cut to the likeliest."""
    model = tiny("gpt2", LM, eos_token_id=None, bos_token_id=1)
    model.lm_head.weight.data *= 0.2
    drawn = torch.cat([batch["input_ids"] for batch in sample_batches(model, sequences=1500, length=2)])[:, 1]
    with torch.no_grad():
        p = model(torch.tensor([[1]])).logits[0, -1].softmax(-1)
    found = torch.bincount(drawn, minlength=len(p)) / len(drawn)
    assert (found - p).abs().sum() < 0.25
    assert (found - torch.full_like(p, 1 / len(p))).abs().sum() > 0.4  # control
    assert len(set(drawn.tolist())) > 50  # the default top_k


@pytest.mark.parametrize(
    "tokens",
    [
        {"eos_token_id": [2, 3]},
        {"eos_token_id": None, "pad_token_id": None},
        {"bos_token_id": None},
        {"bos_token_id": 2},  # bos == eos
    ],
)
def test_special_tokens(tokens: dict[str, Any]) -> None:
    model = tiny("gpt2", LM)
    for name, value in tokens.items():
        setattr(model.config, name, value)
        setattr(model.generation_config, name, value)
    ends = model.generation_config.eos_token_id
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    model.lm_head.weight.data[ends] += 0.3  # they come up
    batch = sample_batches(model, sequences=24, length=12)[0]
    ids, mask = batch["input_ids"], batch["attention_mask"]
    assert ids.shape == mask.shape
    for row, valid in zip(ids.tolist(), mask.tolist(), strict=True):
        place = next((i for i, token in enumerate(row) if i and token in ends), len(row))
        assert valid == [1] * min(place + 1, len(row)) + [0] * (len(row) - place - 1)
    if tokens.get("bos_token_id", 1) is None:
        assert len(set(ids[:, 0].tolist())) > 5  # random starts
    else:
        assert set(ids[:, 0].tolist()) == {model.generation_config.bos_token_id}


def test_random_starts_are_of_the_vocabulary_and_not_special() -> None:
    model = tiny("gpt2", LM, bos_token_id=None, eos_token_id=None, pad_token_id=40)
    drawn = [ids for batch in sample_batches(model, 512, 2) for ids in batch["input_ids"][:, 0].tolist()]
    assert len(set(drawn)) > 80
    assert not set(drawn) & {0, 1, 2, 40}


@pytest.mark.parametrize("most", [4, 9])
def test_short_position_tables(most: int) -> None:
    """A draw is as long as the table, and no longer."""
    endless = {"eos_token_id": None}
    gpt2 = tiny("gpt2", LM, n_positions=most, **endless)
    assert sample_batches(gpt2, 3)[0]["input_ids"].shape[1] == most
    roberta = tiny("roberta", LM, max_position_embeddings=most, is_decoder=True, pad_token_id=1, **endless)
    assert sample_batches(roberta, 3)[0]["input_ids"].shape[1] == most - 2  # its table starts behind the padding
    drawn = sample_batches(tiny("bart", SEQ2SEQ, max_position_embeddings=most), 3)[0]
    assert max(drawn["input_ids"].shape[1], drawn["decoder_input_ids"].shape[1]) <= most


def test_an_encoder_decoder_reads_and_writes_its_own_language() -> None:
    model = tiny("bart", SEQ2SEQ)
    batch = sample_batches(model, sequences=6, length=9)[0]
    assert batch.keys() == {"input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask"}
    assert (batch["decoder_input_ids"][:, 0] == 3).all()
    assert (batch["input_ids"][:, 0] == 3).all()
    model(**batch)
    for name in ("", "decoder_"):
        hidden = batch[f"{name}attention_mask"] == 0
        assert (batch[f"{name}input_ids"][hidden] == PAD).all()


def test_a_models_own_generation_settings_dont_matter() -> None:
    plain, model = tiny("bart", SEQ2SEQ), tiny("bart", SEQ2SEQ)
    settings = model.generation_config
    settings.num_beams, settings.min_length, settings.no_repeat_ngram_size = 4, 50, 2
    settings.max_new_tokens, settings.repetition_penalty, settings.forced_bos_token_id = 40, 3.0, 7
    assert same(sample_batches(plain, 4, 8), sample_batches(model, 4, 8))
    assert settings.max_new_tokens == 40
    assert model.generation_config is settings


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", ["bert", "vit", "whisper", "bart"])
def test_what_doesnt_write_text_is_refused_before_anything_changes(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a decoder that has no first token."""
    model = tiny(family, {"bart": SEQ2SEQ, "whisper": "AutoModelForSpeechSeq2Seq"}.get(family, "AutoModel"))
    if family == "bart":
        model.generation_config.decoder_start_token_id = None
        sample_batches(model, 2, 4)  # it starts at the bos token then
        model.generation_config.bos_token_id = None
    before = fingerprint(model)
    monkeypatch.setattr(Transaction, "_record", lambda *a: pytest.fail("the model was changed"))
    message = "at which token its decoder starts" if family == "bart" else "doesn't generate text"
    with pytest.raises(OptionError, match=message):
        patch(model, norm="dyt", calibration="self")
    assert not changes(before, fingerprint(model))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hfpatch.repairs.calibration, "sample_batches", lambda model: sample_batches(model, 12, 8))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("family", "head"), [("gpt2", LM), ("bart", SEQ2SEQ)])
@pytest.mark.usefixtures("few")
def test_a_repair_on_its_own_samples(family: str, head: str) -> None:
    small = {"n_layer": 1} if family == "gpt2" else {"encoder_layers": 1, "decoder_layers": 1}
    models = [tiny(family, head, **small) for _ in range(2)]
    for seed, model in enumerate(models):
        torch.manual_seed(seed)
        stream = torch.get_rng_state()
        patch(model, norm="dyt", calibration="self")
        assert torch.equal(torch.get_rng_state(), stream)
        report = repair_report(model)
        assert report.kept
        assert report.sequences == 12
        assert report.after < 0.5 * report.before
    assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in models), strict=True))


def test_a_function_draws_another_number_once_something_needs_a_repair() -> None:
    drawn: list[Any] = []

    def draw(original: Any) -> list[Batch]:
        drawn.append(original)
        return sample_batches(original, 12, 8)

    patch(tiny("gpt2", LM), norm="rms", calibration=draw)
    assert not drawn  # it is exact
    model = patch(tiny("gpt2", LM), norm="dyt", calibration=draw)
    assert len(drawn) == 1
    assert drawn[0] is not model  # the original, as a copy
    assert repair_report(model).sequences == 12
    with pytest.raises(OptionError, match="can't be calibrated on samples of its own"):
        patch(tiny("bert"), norm="dyt", calibration=draw)
