"""The register of real models: its figures, its rows, and two of the models themselves where their folder is known."""

from __future__ import annotations

import json
import os
import re
import stat
import wave
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import real_judges
import real_models
import torch
from stand_ins import CORPUS, save_stand_in
from tiny_models import patch

import hfpatch
from hfpatch.errors import NothingToPatchError

FOLDER = os.environ.get("HFPATCH_REAL_MODELS")


# --- figures ----------------------------------------------------------------------------------------------------------


def test_word_error() -> None:
    said = ["The North Koreas, killed them."]
    assert real_judges.word_error(said, ["the north koreas killed them"]) == 0
    assert real_judges.word_error(said, ["the north koreas them"]) == 0.2  # left out
    assert real_judges.word_error(said, ["the north koreas have killed them"]) == 0.2  # put in
    assert real_judges.word_error(said, ["the south koreas killed him"]) == 0.4  # mistaken
    assert real_judges.word_error(said * 2, ["", "the north koreas killed them"]) == 0.5
    assert real_judges.word_error(["one"], ["one two three"]) == 2


def test_divergence_is_of_each_token() -> None:
    logits = torch.tensor([[0.0, 0.0], [0.0, 2.0]]).log_softmax(-1)
    other = torch.tensor([[0.0, 0.0], [2.0, 0.0]])
    each = real_judges.divergences(logits, other)
    assert each[0] == 0
    expected = torch.nn.functional.kl_div(other.log_softmax(-1)[1], logits[1], log_target=True, reduction="sum")
    assert each[1] == pytest.approx(float(expected))
    figures = real_judges.of_tokens(each)
    assert figures["KL worst"] == 2 * figures["KL mean"] == pytest.approx(float(expected))
    other[0, 0] = torch.nan
    figures = real_judges.of_tokens(real_judges.divergences(logits, other))
    assert (figures["not finite"], figures["tokens"]) == (1, 2)
    assert real_models.rounded(figures)["KL mean"] is None
    assert json.dumps(real_models.rounded({"loss": 2 / 3, "tokens": 123_456})) == '{"loss": 0.66667, "tokens": 123456}'


def test_paragraphs_are_as_people_write_them() -> None:
    text = " \n = A Heading = \n \n He had a guest @-@ starring role ( 2,000 ) , then Stevens 's play . \n"
    assert real_judges.paragraphs(text) == ["He had a guest-starring role (2,000), then Stevens's play."]


def test_sentences_are_spoken_by_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for espeak-ng: it writes a second of a tone at another rate."""
    tone = np.sin(2 * np.pi * 440 * np.arange(22_050) / 22_050)
    with wave.open(str(tmp_path / "tone.wav"), "wb") as file:
        file.setparams((1, 2, 22_050, 0, "NONE", ""))
        file.writeframes((tone * 2**14).astype("<i2").tobytes())
    program = tmp_path / "espeak-ng"
    program.write_text(f'#!/bin/sh\necho "$2: $7" >> "{tmp_path}/said"\ncp "{tmp_path}/tone.wav" "$6"\n')
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    sounds = real_judges.spoken(["One.", "Two."])
    assert (tmp_path / "said").read_text() == "en-us: One.\nen-gb: Two.\n"
    assert [len(sound) for sound in sounds] == [real_judges.RATE] * 2
    expected = 0.5 * np.sin(2 * np.pi * 440 * (np.arange(16_000) + 0.18) / 16_000)  # half a sample of both rates apart
    assert np.abs(sounds[0] - expected)[100:-100].max() < 0.02


def test_vowels_differ_and_repeat() -> None:
    sounds, again = real_judges.hummed(["a" * 30, "b" * 30]), real_judges.hummed(["a" * 30])
    assert len(sounds[0]) == 2 * real_judges.RATE
    assert np.array_equal(sounds[0], again[0])
    assert not np.allclose(sounds[0], sounds[1])
    assert 0.02 < sounds[0].std() < 0.5


# --- rows -------------------------------------------------------------------------------------------------------------


class Inline:
    """Stands in for a process of its own."""

    def __init__(self, *_: Any) -> None: ...
    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *_: object) -> None: ...
    def submit(self, work: Any, request: Any) -> Inline:
        self.result = lambda: work(request)
        return self


@pytest.fixture
def request_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes requests of small models that stand in for real ones, on small texts."""
    monkeypatch.setattr(real_models, "ProcessPoolExecutor", Inline)
    monkeypatch.setattr(real_judges.LanguageModel, "WINDOW", 32)
    monkeypatch.setattr(real_judges.SentenceEncoder, "WORDS", 10)
    public = {"smollm2": "meta-llama/Llama-3.2-1B", "minilm": "sentence-transformers/all-MiniLM-L6-v2"}
    for name, model_id in public.items():
        save_stand_in(model_id, tmp_path)
        (tmp_path / model_id).rename(tmp_path / name)
    plays = [" ".join(text.split()) for text in CORPUS.read_text().split("\n\n")]
    for i, split in enumerate(("valid", "test")):
        (tmp_path / f"{split}.txt").write_text("\n".join(plays[i * 200 : i * 200 + 200]))

    def make(model: str, patch: str, **options: Any) -> real_models.Request:
        settings: dict[str, Any] = {"only": (), "keep": (), "init": "auto", "sequences": 12, "tokens": 24, "judged": 6}
        places = {"folder": tmp_path, "text": tmp_path, "version": "0.1"}
        return real_models.Request(model=model, patch=patch, **places, **{**settings, **options})

    return make


@pytest.mark.slow
def test_a_row_is_measured_once(request_of: Any, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    request = request_of("minilm", "dyt")
    row = real_models.add(request, out)
    assert row is not None
    assert row["copied"]["cosine mean"] < row["repaired"]["cosine mean"] <= 1
    assert row["norms"] == {"replaced": 5, "kept": 0}
    assert row["said"]["norm='dyt'"].startswith("repaired: ")
    assert real_models.add(request, out) is None
    other = real_models.add(replace(request, keep=("*.0.*",), version="0.2"), out)  # control
    part = real_models.add(replace(request, only=("*.0.*",)), out)
    assert other is not None
    assert other["norms"] == {"replaced": 3, "kept": 2}
    assert real_models.read(out) == [row, other, part]
    page = out.with_suffix(".md").read_text()
    assert page == real_models.to_markdown([row, other, part])
    assert "| `dyt keep=*.0.*` | 12 x 24 | 6 passages in halves of 10 words | 3 of 5 |" in page
    assert "| `dyt only=*.0.*` | 12 x 24 | 6 passages in halves of 10 words | 2 of 5 |" in page


@pytest.mark.slow
def test_what_is_exact_isnt_repaired_and_what_is_refused_is_a_row(request_of: Any, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    exact = real_models.add(request_of("smollm2", "folded"), out)
    assert exact is not None
    assert "repaired" not in exact
    assert exact["copied"]["KL worst"] < 1e-6
    dyt = real_models.add(request_of("smollm2", "dyt+rope:theta=5000"), out)
    assert dyt is not None
    assert {"KL mean", "KL worst", "perplexity", "not finite"} <= dyt["repaired"].keys()
    assert dyt["passes"] > 1
    refused = real_models.add(request_of("smollm2", "rms"), out)
    assert refused is not None
    assert refused["refused"].startswith("NothingToPatchError: ")
    page = out.with_suffix(".md").read_text()
    assert "Refused:\n\n* `rms`, hfpatch 0.1: NothingToPatchError: " in page
    assert page.count("| none | 6 windows of 32 tokens |") == 1
    with pytest.raises(SystemExit, match="dty: no norm, position or MLP is called 'dty'; there are batch, "):
        real_models.main([str(tmp_path), "--models", "smollm2", "--patches", "rms", "dty", "--out", str(out)])


@pytest.mark.slow
def test_windows_begin_with_bos_if_that_is_asked_for(request_of: Any) -> None:
    request = request_of("smollm2", "dyt", bos=True)
    judge, other = request.judge(), replace(request, bos=False).judge()
    judge.tokenizer.bos_token = other.tokenizer.bos_token = judge.tokenizer.convert_ids_to_tokens(3)
    (first, *_), (plain, *_) = (one.calibration(8, 16) for one in (judge, other))
    assert first["input_ids"][:, 0].tolist() == [3] * 8
    assert plain["input_ids"][:, 0].unique().numel() > 1
    assert torch.equal(first["input_ids"][0, 1:], plain["input_ids"][0, :-1])
    assert request.key()["settings"]["bos"] is True
    assert "bos" not in replace(request, bos=False).key()["settings"]
    assert request.command.endswith(" --bos")


def test_the_page_is_made_of_the_rows() -> None:
    rows, page = real_models.read(real_models.OUT), real_models.PAGE.read_text()
    assert page == real_models.to_markdown(rows)
    assert page != real_models.to_markdown(rows[1:])  # control
    keys = [
        json.dumps([row[name] for name in ("model", "sha256", "patch", "settings", "calibration", "judged", "hfpatch")])
        for row in rows
    ]
    assert len(keys) == len({*keys})
    for row in rows:
        assert {"command", "packages", "hardware", "date", "torch", "transformers", "source"} <= row.keys()
        assert ("said" in row) != ("refused" in row)
        assert not re.search(r" /|~", row["command"])


# --- real models ------------------------------------------------------------------------------------------------------


def judge(kind: str, name: str, tmp_path: Path, judged: int) -> Any:
    """That of a real model, on the recipes' text, which is always there."""
    assert FOLDER is not None
    plays = [" ".join(text.split()) for text in CORPUS.read_text().split("\n\n")]
    for i, split in enumerate(("valid", "test")):
        (tmp_path / f"{split}.txt").write_text("\n".join(plays[i * 2000 : i * 2000 + 2000]))
    return real_judges.JUDGES[kind](Path(FOLDER) / name, tmp_path, judged)


real = [pytest.mark.real, pytest.mark.slow, pytest.mark.skipif(FOLDER is None, reason="HFPATCH_REAL_MODELS isn't set")]


class TestRealWeights:
    pytestmark = real

    def test_smollm2_is_told_what_is_exact(self, tmp_path: Path) -> None:
        judged = judge("language", "smollm2", tmp_path, 1)
        original, model = judged.open(), judged.open()
        with pytest.raises(NothingToPatchError):  # a Llama has RMSNorms
            patch(model, norm="rms")
        assert judged.figures(original, model)["KL worst"] == 0
        patch(model, norm="folded")
        assert hfpatch.outcomes(model).found["norm='folded'"].verdict == "exact"
        assert judged.figures(original, model)["KL worst"] < 1e-3
        patch(model, pos="nope")  # control
        assert hfpatch.outcomes(model).found["pos='nope'"].verdict == "approximate"
        assert judged.figures(original, model)["KL mean"] > 1

    def test_whisper_is_told_what_is_measured(self, tmp_path: Path) -> None:
        judged = judge("speech", "whisper", tmp_path, 4)
        model = patch(judged.open(), norm="rms")
        figures = judged.figures(judged.open(), model)
        assert figures["not finite"] == 0
        told = hfpatch.outcomes(model).found["norm='rms'"].verdict
        assert (told == "exact") == (figures["KL worst"] < 1e-3)

    @pytest.mark.parametrize(
        ("kind", "name", "count", "sequences", "share"),
        [("language", "smollm2", 2, (16, 64), 0.5), ("speech", "whisper", 4, (6, 32), 1)],
    )
    def test_a_repaired_dyt_is_nearer(
        self, kind: str, name: str, count: int, sequences: tuple[int, int], share: float, tmp_path: Path
    ) -> None:
        judged = judge(kind, name, tmp_path, count)
        original, copied, repaired = (judged.open() for _ in range(3))
        patch(copied, norm="dyt")
        patch(repaired, norm="dyt", calibration=judged.calibration(*sequences))
        before, after = (judged.figures(original, model) for model in (copied, repaired))
        assert after["not finite"] == 0
        assert after["KL mean"] < share * before["KL mean"]
