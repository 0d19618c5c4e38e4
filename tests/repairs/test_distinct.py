"""Calibration is divided so that nothing is judged by what it was fitted to; fresh sequences show what it doesn't."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from tiny_models import inputs, patch, tiny
from torch import Tensor, nn

from hfpatch.errors import NotPreservedWarning, OptionError
from hfpatch.measure.inputs import redrawn_tokens
from hfpatch.patch import patch_model, repair_report
from hfpatch.repairs.near_duplicates import divide, key_of, names_of
from hfpatch.repairs.repair_report import Fresh, Judgement, RepairReport

LM = "AutoModelForCausalLM"


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(5, 97, shape, generator=torch.Generator().manual_seed(seed))


def keys(rows: Tensor) -> list:
    return [key_of(row, None) for row in rows]


def test_equal_and_nearly_equal_sequences_are_on_one_side() -> None:
    rows = draw(20, 16)
    assert divide(keys(rows)) == ([i for i in range(20) if i not in (7, 15)], [7, 15])
    near = rows[7].clone()
    near[3] = 4  # four of thirteen runs go, so this is another sequence; at an end one goes
    assert divide(keys(torch.cat([rows, near[None]])))[0][-1] == 20
    near = rows[7].clone()
    near[0] = 4
    shifted = torch.cat([rows[7, 2:], rows[3, :2]])
    some = torch.cat([rows, rows[7:8], near[None], shifted[None], rows[:1]])
    assert divide(keys(some)) == ([*[i for i in range(20) if i not in (7, 15)], 23], [7, 15])
    assert len(set(names_of(keys(some)))) == 22
    prefix = [*keys(rows), key_of(rows[7, :9], None)]
    assert divide(prefix)[0][-1] == 19


def test_padding_isnt_compared() -> None:
    rows = draw(9, 16)
    rows[8, :10], rows[8, 10:] = rows[7, :10], 0
    mask = torch.ones_like(rows)
    mask[8, 10:] = 0
    some = [key_of(row, one) for row, one in zip(rows, mask, strict=True)]
    assert 8 not in divide(some)[0]


def test_images_are_compared_by_their_numbers() -> None:
    images = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    assert divide(keys(images)) == ([i for i in range(16) if i not in (7, 15)], [7, 15])
    images[3] = images[7] + 0.01 * images[3]
    images[4] = images[7]
    fitted, judges = divide(keys(images))  # of fifteen that differ
    assert judges == [6, 14]
    assert fitted == [i for i in range(16) if i not in judges]  # the three are fitted
    images[10] = images[6] + 0.01 * images[10]
    assert 10 not in divide(keys(images))[0]


def test_copies_of_one_sequence_are_refused() -> None:
    model = tiny("gpt2", LM)
    with pytest.raises(OptionError, match="one distinct sequence, 64 times"):
        patch_model(model, norm="dyt", calibration=[{"input_ids": draw(1, 12).expand(64, 12)}])


def test_duplicates_judge_nothing_that_they_were_fitted_to() -> None:
    """Two thirds are copies of the ninth part that judged before: what is reported holds on fresh sequences."""
    original, ids = tiny("gpt2", LM), draw(24, 12)
    data = torch.cat([ids[:8], ids[:8], ids[8:], ids[8:]])
    model = patch(copy.deepcopy(original), norm="dyt", calibration=[{"input_ids": data}])
    report = repair_report(model)
    assert (report.sequences, report.distinct, report.held_out) == (48, 24, 3)
    assert report.after == pytest.approx(divergence(original, model, ids[7::8]), rel=1e-3)
    assert divergence(original, model, draw(64, 12, seed=9)) < 2 * report.after


def divergence(original: nn.Module, model: nn.Module, ids: Tensor) -> float:
    with torch.no_grad():
        p, q = (torch.log_softmax(m(ids).logits, -1) for m in (original, model))
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_few_sequences_are_judged_by_two() -> None:
    """One sequence is no judgement; of two or three no more can be spared."""
    assert [divide(keys(draw(n, 16)))[1] for n in (2, 3, 4, 5, 12, 15, 16)] == [
        *([1], [2], [1, 3], [1, 3], [5, 11], [6, 13], [7, 15])
    ]


def judgement(report: RepairReport, kind: str) -> Judgement | None:
    return next((one for one in report.fresh if one.kind == kind), None)


def test_short_calibration_is_judged_on_longer_sequences() -> None:
    """At positions that no training reached a good repair is worse than none: said, and not undone for that."""
    original = tiny("gpt2", LM)
    original.transformer.wpe.weight.data[8:] *= 6
    ids = draw(64, 8)
    with pytest.warns(NotPreservedWarning, match="at 64 tokens") as caught:
        model = patch_model(copy.deepcopy(original), norm="dyt", calibration=[{"input_ids": ids}])
    report = repair_report(model)
    longer = judgement(report, Fresh.LONGER)
    assert (report.longest, report.positions, longer.length) == (8, 64, 64)
    assert report.kept
    assert longer.after > longer.before  # farther than unrepaired
    assert longer in report.farther
    plain = patch(copy.deepcopy(original), norm="dyt")
    assert divergence(original, model, ids[7::8]) < 0.1 * divergence(original, plain, ids[7::8])
    for text in (str(caught[0].message), report.summary()):
        assert f"{longer.before:.3g} -> {longer.after:.3g} at 64 tokens" in text
        assert "calibrate on sequences as long as those that it is used for" in text
    joined = ids[7::8].reshape(1, 64)
    assert longer.after == pytest.approx(divergence(original, model, joined), rel=1e-3)
    assert longer.before == pytest.approx(divergence(original, plain, joined), rel=1e-3)


def test_calibration_as_long_as_the_model_is_judged_on_no_longer_ones() -> None:
    report = repair_report(patch(tiny("gpt2", LM), norm="dyt", calibration=[{"input_ids": draw(16, 20)}]))
    assert judgement(report, Fresh.LONGER) is None
    assert "positions" not in report.summary()
    assert report.tokens == 14 * 20


def test_tokens_given_as_vectors_are_counted() -> None:
    vectors = torch.randn(16, 20, 32, generator=torch.Generator().manual_seed(0))
    report = repair_report(patch(tiny("gpt2", LM), norm="dyt", calibration=[{"inputs_embeds": vectors}]))
    assert report.tokens == 14 * 20


@pytest.mark.slow
@pytest.mark.parametrize("family", ["vit", "bart", "t5"])
def test_which_models_are_judged_on_fresh_sequences(family: str) -> None:
    """Those that read tokens alone; longer ones of an encoder-decoder would be of two texts."""
    model = tiny(family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotPreservedWarning)
        patch_model(model, norm="dyt", calibration=[inputs(model, seed) for seed in range(8)])
    assert {one.kind for one in repair_report(model).fresh} == ({Fresh.RANDOM} if family != "vit" else set())


@pytest.mark.slow
def test_fresh_sequences_are_of_the_calibrations_kind() -> None:
    """Random tokens keep length, padding and special tokens; what the model writes starts as it always does."""
    original, ids = tiny("gpt2", LM), draw(24, 12)
    ids[:, 0] = 1  # bos
    mask = torch.ones_like(ids)
    mask[::2, 9:] = 0
    model = patch(copy.deepcopy(original), norm="dyt", calibration=[{"input_ids": ids, "attention_mask": mask}])
    report = repair_report(model)
    kinds = {one.kind: one for one in report.fresh}
    assert set(kinds) == {Fresh.RANDOM, Fresh.OWN, Fresh.LONGER}
    assert (kinds[Fresh.RANDOM].sequences, kinds[Fresh.RANDOM].length) == (24, 12)
    assert (kinds[Fresh.OWN].sequences, kinds[Fresh.OWN].length) == (16, 12)
    random = torch.stack([redrawn_tokens(original, row) for row in ids])
    assert (random[:, 0] == 1).all()
    assert (random != ids)[:, 1:].any()
    found = divergence(original, model, random)
    assert 0.5 * found < kinds[Fresh.RANDOM].after < 2 * found
    shown = str(report)
    assert "random tokens" in shown
    assert "worst before" in shown
    written = repair_report(patch(tiny("gpt2", LM), norm="dyt", calibration="self"))
    assert Fresh.OWN not in {one.kind for one in written.fresh}  # what it wrote was calibrated on
