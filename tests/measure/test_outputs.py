from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
import zoo
from tiny_models import tiny
from torch import Tensor, nn

from hfpatch.measure.outputs import (
    Deviation,
    Outputs,
    deviations,
    last_bit,
    mask_of,
    max_error,
    noise_floor,
    outputs_of,
)
from hfpatch.measure.snapshot import _largest_mean

INF, NAN, LOWEST = math.inf, math.nan, torch.finfo(torch.float32).min


def deviation(truth: Any, output: Any, mask: Any = None, equal_nan: bool = False) -> Deviation:
    found = Deviation(equal_nan)
    found.add(torch.tensor(truth), torch.tensor(output), None if mask is None else torch.tensor(mask))
    return found


class TestOutputs:
    def test_tensors_by_name_caches_aside(self) -> None:
        x, states = torch.ones(2), (torch.ones(1), torch.zeros(1))
        names = ("past_key_values", "mems", "state", "decoder_cache", "cache_params", "cross_attentions")
        caches = {name: [x] for name in names}
        found = Outputs.of({"logits": x, "inner": {"parts": (x, [x])}, "encoder_hidden_states": states, **caches})
        assert list(found.tensors) == ["logits", "inner.parts[0]", "inner.parts[1][0]"]
        assert {name: len(layers) for name, layers in found.streams.items()} == {"encoder_hidden_states": 2}

    def test_names_of_caches_for_tensors_what_holds_no_numbers_and_what_has_no_name(self) -> None:
        named = {"hidden_states": torch.ones(1), "last_hidden_state": torch.ones(1)}
        assert list(Outputs.of(named).tensors) == list(named)
        assert Outputs.of({"loss": torch.ones(0), "other": None}).tensors == {}
        assert list(Outputs.of(torch.ones(1)).tensors) == ["output"]
        assert outputs_of(lambda x: {"ids": x.long(), "y": x}, {"x": torch.ones(1)}).keys() == {"y"}


class TestDeviation:
    @pytest.mark.parametrize("pieces", [4, 1])
    @pytest.mark.parametrize("mean", [0.0, 1000.0])
    def test_its_reductions(self, mean: float, pieces: int) -> None:
        """Batches add up; what a mask leaves out counts for nothing; the spread is about the mean."""
        generator = torch.Generator().manual_seed(0)
        truth, noise = (torch.randn(8, 5, dtype=torch.float64, generator=generator) for _ in range(2))
        truth += mean
        mask, found = torch.arange(8) < 6, Deviation()
        for one, output, kept in zip(
            truth.chunk(pieces), (truth + noise).chunk(pieces), mask.chunk(pieces), strict=True
        ):
            found.add(one, output, kept)
        rms, largest = truth[mask].square().mean().sqrt(), noise[mask].abs().max()
        assert found.max_error == pytest.approx(float(largest / rms))
        assert found.rms_error == pytest.approx(float(noise[mask].square().mean().sqrt() / rms))
        assert found.spread_error == pytest.approx(float(largest / truth[mask].std(correction=0)))
        assert deviation([4.0, 4.0], [4.0, 5.0]).spread_error == 0.25, "nothing spreads: by the size"

    @pytest.mark.parametrize(
        ("truth", "output", "error"),
        [
            ([1.0, -INF], [1.0, LOWEST], 0),  # masked logits are equal in every dtype
            ([1.0, 2.0], [1.0, -INF], INF),
            ([1.0, -INF], [1.0, INF], INF),
            ([1.0, LOWEST], [2.0, LOWEST], 1),  # what is masked hides no difference
            ([1.0, NAN], [1.0, NAN], INF),
            ([0.0, 0.0], [0.0, 0.0], 0),
            ([0.0, 0.0], [1.0, 1.0], INF),
            ([1, 2], [1, 2], 0),
            ([1, 2], [1, 3], INF),
            ([1.0, 2.0], [1.0], INF),
        ],
    )
    def test_what_is_equal_and_what_cant_be_compared(self, truth: list, output: list, error: float) -> None:
        assert deviation(truth, output).max_error == error

    def test_incomparable_numbers_are_counted_and_nan_is_equal_where_that_is_asked_for(self) -> None:
        found = deviation([1.0, -INF], [1.0, LOWEST])
        assert found.incomparable == 0
        found.add(torch.tensor([1.0, 2.0]), torch.tensor([1.0, -INF]))
        assert (found.max_error, found.incomparable) == (INF, 1)
        assert deviation([1.0, -INF], [1.0, INF]).incomparable == 1
        assert deviation([1.0, NAN], [1.0, NAN], equal_nan=True).max_error == 0
        assert deviation([1.0, 2.0], [1.0, NAN], equal_nan=True).max_error == INF

    def test_of_all_outputs(self) -> None:
        x, y = torch.tensor([1.0, 1.0]), torch.tensor([1.0, 1.5])
        assert max_error({"a": x, "b": x}, {"a": x, "b": y}) == 0.5
        assert [one.max_error for one in deviations({"a": x}, {"a": y})] == [0.5]
        assert max_error({"a": x}, {"b": x}) == max_error({"a": x}, {"a": x, "b": x}) == max_error({}, {}) == INF


RIGHT, LEFT = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]), torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
SOUND = torch.tensor([[1] * 10 + [0] * 6, [1] * 16])
PADDED = {"attention_mask": RIGHT}


def kept(name: str, shape: tuple[int, ...], decodes: bool = False, **given: Tensor) -> Any:
    """Which positions count, as a list of rows; None for all."""
    mask = mask_of(name, torch.Size(shape), given, decodes)
    return None if mask is None else mask.long().tolist()


class TestPadding:
    @pytest.mark.parametrize("mask", [RIGHT, LEFT], ids=["right", "left"])
    @pytest.mark.parametrize("dtype", [torch.long, torch.int32, torch.bool, torch.float32])
    def test_it_is_left_out_of_what_has_an_axis_of_tokens(self, mask: Tensor, dtype: torch.dtype) -> None:
        given = {"attention_mask": mask.to(dtype)}
        for name, shape in [("logits", (2, 4, 9)), ("last_hidden_state", (2, 4, 3)), ("start_logits", (2, 4))]:
            assert kept(name, shape, **given) == mask.tolist()
            assert kept(f"inner.{name}", shape, **given) == mask.tolist()
        for name, shape in [("pooler_output", (2, 4)), ("logits", (2, 5, 9)), ("loss", ()), ("maps", (2, 8, 4, 4))]:
            assert kept(name, shape, **given) is None

    def test_masks_that_dont_say_what_is_padding(self) -> None:
        who_reads_whom = torch.ones(2, 1, 4, 4).tril()
        for mask in (who_reads_whom, who_reads_whom[:, 0], torch.ones(2, 4), torch.zeros(2, 4), torch.ones(2, 7)):
            assert kept("logits", (2, 4, 9), attention_mask=mask) is None
        assert kept("logits", (2, 4, 9)) is None

    def test_a_second_text_has_a_mask_of_its_own(self) -> None:
        given = {"attention_mask": RIGHT, "decoder_input_ids": RIGHT}
        assert kept("logits", (2, 4, 9), True, **given) is None
        assert kept("logits", (2, 4, 9), True, **given, decoder_attention_mask=LEFT) == LEFT.tolist()
        assert kept("logits", (2, 4, 9), True, **given, labels=LEFT.masked_fill(LEFT == 0, -100)) == LEFT.tolist()
        for name in ("encoder_last_hidden_state", "model.encoder.last_hidden_state"):
            assert kept(name, (2, 4, 9), True, **given) == RIGHT.tolist()
        assert kept("logits", (2, 4, 9), True, attention_mask=RIGHT) == RIGHT.tolist(), "BART's reads the same text"
        assert kept("logits", (2, 4, 9), False, labels=LEFT - 1, **PADDED) == RIGHT.tolist()

    def test_what_is_computed_of_images_has_none(self) -> None:
        for name in (
            "vision_model_output.last_hidden_state",
            "image_hidden_states",
            "qformer_outputs.last_hidden_state",
        ):
            assert kept(name, (2, 4, 9), **PADDED) is None
        assert kept("text_model_output.last_hidden_state", (2, 4, 9), **PADDED) == RIGHT.tolist()

    def test_steps_of_sounds_count_if_nothing_in_them_is_padding(self) -> None:
        given = {"attention_mask": SOUND, "input_values": torch.ones(2, 16)}
        assert kept("logits", (2, 4, 9), **given) == [[1, 1, 0, 0], [1, 1, 1, 1]]
        assert kept("logits", (2, 16, 9), **given) == SOUND.tolist()
        assert kept("embeddings", (2, 9), **given) is None
        assert kept("logits", (2, 4, 9), attention_mask=SOUND, input_ids=SOUND) is None, "control"

    @pytest.mark.parametrize(("family", "head"), [("wav2vec2", "Wav2Vec2ForCTC"), ("hubert", "HubertForCTC")])
    def test_steps_that_real_encoders_of_sounds_make(self, family: str, head: str) -> None:
        model = getattr(transformers, head)(zoo.tiny_config(family)).eval()
        mask = torch.tensor([[1] * 2000 + [0] * 2000, [1] * 4000])
        sounds = torch.randn(2, 4000)
        steps = model(sounds, attention_mask=mask).logits.shape[1]
        own = model._get_feature_vector_attention_mask(steps, mask)
        found = kept("logits", (2, steps, 9), attention_mask=mask, input_values=sounds)
        assert all(theirs >= ours for theirs, ours in zip(own.flatten(), torch.tensor(found).flatten(), strict=True))
        assert sum(found[0]) >= int(own[0].sum()) - 1
        assert sum(found[1]) == steps

    def test_what_an_encoder_alone_returns(self) -> None:
        both, half = tiny("t5"), tiny("t5", "AutoModelForTokenClassification")
        given = {"input_ids": RIGHT + 5, "attention_mask": RIGHT, "decoder_input_ids": RIGHT + 5}
        assert outputs_of(both, given)["last_hidden_state"].shape[:2] == (2, 4)
        given.pop("decoder_input_ids")
        assert outputs_of(half, given)["logits"].shape[0] == RIGHT.sum()


def test_noise_that_no_output_feels() -> None:
    class Constant(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return input.new_tensor([1.0])

    eight_bits = nn.Linear(2, 2).requires_grad_(False).to(torch.float8_e4m3fn)  # they have no last bit of their own
    assert last_bit(eight_bits) == torch.finfo(torch.float32).eps
    assert noise_floor(nn.Sequential(Constant(2, 2), nn.ReLU()), {"input": torch.ones(2)}) < 1e-6


def test_means_that_were_no_numbers_before_say_nothing() -> None:
    before = {"norm": torch.tensor([0.0, NAN, 0.0])}
    assert _largest_mean(before, {"norm": torch.tensor([0.5, 9.0, 0.0])}) == 0.5
    assert not _largest_mean(before, {"norm": torch.tensor([NAN, NAN, 0.0])}) <= 1.0, "control"
