"""Attention sinks at norms that get a constant scale: measured, and named in the report where one constant fails."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hfpatch import patch_model, repair_report
from hfpatch.errors import NotPreservedWarning
from hfpatch.repairs import prices
from hfpatch.repairs.input_scale import InputScale
from hfpatch.repairs.repair import _Repairer
from hfpatch.repairs.repair_report import RepairReport

BOS, SINK = 0, 30.0


def gpt2(sink: float) -> Any:
    """A GPT-2 in which three channels of the first position make its input that many times as large as others'."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 32, "n_positions": 12}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=BOS, eos_token_id=BOS, initializer_range=0.6)).eval()
    stream = model.transformer.wte.weight.std()
    with torch.no_grad():
        model.transformer.wpe.weight[0, [3, 7, 11]] += sink * stream * torch.tensor([1.0, -1.0, 1.0]) * (16 / 3) ** 0.5
    return model


def sequences(bos: bool) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(1, 32, (32, 12), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = BOS if bos else ids[:, 0]
    return [{"input_ids": part} for part in ids.split(16)]


def patched(sink: float, bos: bool, pads: int = 0, **options: Any) -> tuple[Any, list[str]]:
    """A model with fixed norms, and the warnings that were given; so many first tokens are padding."""
    mask = (torch.arange(12) >= pads).long().expand(16, -1)
    data = [{**batch, "attention_mask": mask} for batch in sequences(bos)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", NotPreservedWarning)
        with pytest.MonkeyPatch.context() as patched:  # what isn't repaired is refused, and here the advice matters
            patched.setattr(_Repairer, "_require_usable", lambda *_: None)
            model = patch_model(gpt2(sink), norm="fixed", calibration=data, **options)
    return model, [str(one.message) for one in caught if one.category is NotPreservedWarning]


def test_a_sink_is_named_with_its_size_and_what_to_do() -> None:
    model, warned = patched(SINK, bos=False)
    report = repair_report(model)
    assert report is not None
    assert report.after > 0.1  # one constant doesn't serve
    assert len(warned) == 1
    for text in (warned[0], report.summary()):
        assert "keep=['transformer.h.0.ln_1', " in text
        assert "21.8 times as large as the median" in text
        assert "bound=1.5" in text
        assert "start every sequence with the same token" in text


def test_a_price_counts_that_a_repair_refits_what_alone_reads_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for fit in (prices.fit_ridge, lambda *_, **__: None):
        monkeypatch.setattr(prices, "fit_ridge", fit)
        model = patch_model(gpt2(SINK), norm="dyt", keep="auto:100", calibration=sequences(bos=True))
        report = repair_report(model)
        assert report is not None
        found.append({name.removeprefix("transformer."): price for name, price in report.prices.items()})
    assert found[0]["h.0.ln_1"] < 0.7 * found[1]["h.0.ln_1"]
    assert found[0]["ln_f"] == found[1]["ln_f"]  # read by a head, which shares its weights


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("sink", "bos", "options"),
    [
        (0.0, False, {}),
        (0.0, True, {}),
        (SINK, False, {"pads": 1}),
    ],
    ids=["no sink", "neither", "padding"],
)
def test_other_models_get_no_such_advice(sink: float, bos: bool, options: dict[str, Any]) -> None:
    model, warned = patched(sink, bos, **options)
    report = repair_report(model)
    assert report is not None
    assert report.advice == ""
    assert not any("sink" in text for text in [*warned, report.summary()])


def test_a_fixed_sink_costs_less_where_the_first_token_is_always_the_same() -> None:
    """The constant is then fitted; what differs between sequences isn't."""
    found = [repair_report(patched(SINK, bos)[0]) for bos in (False, True)]
    assert found[1].after < 0.8 * found[0].after


def test_advice_isnt_given_where_the_repair_suffices() -> None:
    report = RepairReport(measure="KL divergence", before=1.0, after=0.01, kept=True, advice="keep it")
    assert "keep it" not in report.summary()
    report.after = 0.6
    assert report.summary().endswith(" keep it")  # control


def test_sizes_are_those_of_the_rows() -> None:
    x = torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[3, 2] *= 1000
    inverse = x.square().mean(-1).rsqrt()
    scale = InputScale([part.flatten() for part in inverse.split(2)])
    assert scale.median == float(inverse.flatten().median())
    assert scale.largest == pytest.approx(float(1 / inverse[3, 2]) * scale.median)
    assert f"largest {scale.largest:.3g}" in str(scale)
