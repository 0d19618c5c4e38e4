"""Queries and keys are fitted to the original's attention maps, and nothing else of an attention is touched."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_models import patch, tiny
from torch import Tensor
from transformers import PreTrainedModel

from hfpatch.measure.quiet_forward import CallArguments, use_attention
from hfpatch.patch import patch_model, repair_report
from hfpatch.repairs import attention_maps as maps
from hfpatch.repairs import fits
from hfpatch.repairs.attention_maps import Example, fit_maps, map_in, map_of
from hfpatch.repairs.repair_report import RepairReport
from hfpatch.schemes.rope import RoPE

LM = "AutoModelForCausalLM"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maps, "STEPS", 60)


def batches(original: PreTrainedModel, count: int = 4, sequences: int = 32) -> list[dict[str, Tensor]]:
    drawn = torch.Generator().manual_seed(1)
    vocabulary = original.config.get_text_config().vocab_size
    return [{"input_ids": torch.randint(5, vocabulary, (sequences, 10), generator=drawn)} for _ in range(count)]


def repaired(original: PreTrainedModel, **request: Any) -> tuple[PreTrainedModel, RepairReport]:
    model = patch_model(copy.deepcopy(original), calibration=batches(original), **request)
    report = repair_report(model)
    assert report is not None
    return model, report


def fitted(report: RepairReport) -> list[tuple[float, float]]:
    return [(step.before, step.after) for step in report.steps if step.kind == "maps" and step.kept]


def test_the_reported_divergence_is_that_of_the_models_maps() -> None:
    """Of the first attention, whose input no other step changes, on every eighth sequence: those are held out."""
    original = tiny("gpt2", LM)
    data = batches(original, 1, 32)
    model = patch_model(copy.deepcopy(original), pos="rope", calibration=data)
    step = next(step for step in repair_report(model).steps if step.kind == "maps")
    attention: list[Tensor] = []
    for one in (original, model):
        one.set_attn_implementation("eager")
        attention.append(one(input_ids=data[0]["input_ids"][7::8], output_attentions=True).attentions[0].detach())
    old, new = attention
    expected = (old * (old.clamp_min(1e-9).log() - new.clamp_min(1e-9).log())).sum(-1).mean()
    assert step.after == pytest.approx(float(expected), rel=1e-3)


def test_only_what_moves_the_maps_is_fitted() -> None:
    """Of a fused projection the values' third keeps its bits, but for what the readers' step did."""
    original = tiny("gpt2", LM)
    model = patch(copy.deepcopy(original), pos="rope")
    attention, width = model.transformer.h[0].attn, model.config.hidden_size
    states = torch.randn(4, 10, width, generator=torch.Generator().manual_seed(0))
    with use_attention("eager", original), torch.no_grad():
        target = map_of(original.transformer.h[0].attn, CallArguments((states,), {}))
    rows = torch.ones(4, 10, dtype=torch.bool)
    example = Example(CallArguments((states,), {}), target, rows, rows)
    own = {name for name, _ in attention.named_parameters()}
    before = {name: value.clone() for name, value in attention.state_dict().items()}
    found = fit_maps(attention, [example], "qk", own)
    assert set(found.values) == {"c_attn.weight", "c_attn.bias"}
    for name, value in found.values.items():
        assert torch.equal(value[..., 2 * width :], before[name][..., 2 * width :])
        assert not torch.equal(value[..., : 2 * width], before[name][..., : 2 * width])
    assert all(torch.equal(value, before[name]) for name, value in attention.state_dict().items())
    only = fit_maps(attention, [example], "bias", own)
    assert set(only.values) == {"c_attn.bias"}
    assert fit_maps(attention, [example], "bias", own - {"c_attn.bias"}) is None


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_values_and_output_take_no_time_and_change_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the copy that is fitted; a copy in which more were left out than may be runs as it is."""
    original = tiny(family, LM)
    name, attention = next((n, m) for n, m in original.named_modules() if n.endswith(("attn", "attention")))
    states = torch.randn(4, 10, original.config.hidden_size, generator=torch.Generator().manual_seed(0))
    with use_attention("eager", original), torch.no_grad():
        target = map_of(attention, CallArguments((states + 0.5,), {}))
    rows = torch.ones(4, 10, dtype=torch.bool)
    example = Example(CallArguments((states,), {}), target, rows, rows)
    own = {one for one, _ in attention.named_parameters()}
    left_out: list[int] = []
    inner = maps._zeros

    def counted(x: Tensor, width: int) -> Tensor:
        left_out.append(width)
        return inner(x, width)

    monkeypatch.setattr(maps, "_zeros", counted)
    fast = fit_maps(attention, [example], "qk", own)
    assert len(left_out) > maps.STEPS // 2, name
    monkeypatch.setattr(maps, "_leave_out_maps", lambda *_: None)
    whole = fit_maps(attention, [example], "qk", own)
    assert not any(torch.equal(value, attention.get_parameter(one)) for one, value in whole.values.items())
    assert all(torch.equal(fast.values[one], whole.values[one]) for one in whole.values)


def test_all_that_makes_a_map_runs_where_biases_alone_are_fitted() -> None:
    """Control: a linear map whose weights aren't fitted, and that makes the map, isn't left out."""
    original = tiny("gpt2", LM)
    attention = original.transformer.h[0].attn
    attention.c_attn.bias.requires_grad_(False)
    states = torch.randn(2, 6, original.config.hidden_size)
    rows = torch.ones(2, 6, dtype=torch.bool)
    with use_attention("eager", original), torch.no_grad():
        target = map_of(attention, CallArguments((states,), {}))
        example = Example(CallArguments((states,), {}), target, rows, rows)
        maps._leave_out_maps(attention, example, [])
        assert torch.equal(map_of(attention, example.call), target)
    assert "forward" not in vars(attention.c_attn)


def test_it_stops_where_it_gains_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    original = tiny("gpt2", LM)
    attention = original.transformer.h[0].attn
    states = torch.randn(2, 6, original.config.hidden_size)
    rows = torch.ones(2, 6, dtype=torch.bool)
    with use_attention("eager", original), torch.no_grad():
        target = map_of(attention, CallArguments((states,), {}))
    example = Example(CallArguments((states,), {}), target, rows, rows)  # nothing is to be gained
    looks: list[float] = []
    inner = maps.held_out_divergence
    monkeypatch.setattr(maps, "held_out_divergence", lambda *a: looks.append(inner(*a)) or looks[-1])
    fit_maps(attention, [example], "qk", {name for name, _ in attention.named_parameters()})
    assert len(looks) == 1 + maps._PATIENCE < maps.LOOKS


@pytest.mark.slow
def test_biases_alone() -> None:
    original = tiny("opt", LM, num_hidden_layers=1)
    _, weights = repaired(original, pos="rope")
    _, biases = repaired(original, pos="rope", fit="bias")
    assert fitted(weights)[0][1] < fitted(biases)[0][1] < fitted(biases)[0][0]


@pytest.mark.slow
def test_cross_attention_is_fitted_too() -> None:
    original = tiny("bart", "AutoModelForSeq2SeqLM")
    data = [{**batch, "decoder_input_ids": batch["input_ids"].flip(0)} for batch in batches(original)]
    model = patch_model(copy.deepcopy(original), pos="rope", calibration=data)
    names = [step.module for step in repair_report(model).steps if step.kind == "maps"]
    assert any(name.endswith("encoder_attn") for name in names)
    assert sum(name.endswith("self_attn") for name in names) == sum(
        "rotary_emb" in module._modules for module in model.modules()
    )


def test_padding_makes_no_difference() -> None:
    original = tiny("gpt2", LM, n_layer=1)
    data = batches(original, 2)
    models = []
    for filler in (7, 60):
        padded = []
        for batch in data:
            ids = torch.cat([batch["input_ids"], torch.full((32, 4), filler)], 1)
            padded.append({"input_ids": ids, "attention_mask": (torch.arange(14) < 10).long().expand(32, 14)})
        models.append(patch_model(copy.deepcopy(original), pos="rope", calibration=padded))
    a, b = (dict(model.named_parameters()) for model in models)
    assert fitted(repair_report(models[0]))
    assert max(float((a[name] - b[name]).detach().abs().max()) for name in a) < 1e-3


def test_queries_that_see_nothing_in_float64() -> None:
    """Padding on the left masks all that the first queries see, by a value that float32 hasn't."""
    original = tiny("gpt2", LM, n_layer=1).double()
    [batch] = batches(original, 1)
    mask = torch.ones_like(batch["input_ids"])
    mask[::2, :3] = 0
    model = patch_model(copy.deepcopy(original), pos="rope", calibration=[{**batch, "attention_mask": mask}])
    assert fitted(repair_report(model))


@pytest.mark.slow
def test_maps_are_kept_as_far_as_memory_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And as far as it takes to judge them: of batches of four every second holds one that judges."""
    original = tiny("gpt2", LM)
    heads, seen = original.config.n_head, []
    data = batches(original, 6, 4)
    inner = fits.fit_maps

    def spied(module: Any, examples: list[Example], *rest: Any) -> Any:
        seen.append(examples)
        return inner(module, examples, *rest)

    monkeypatch.setattr(fits, "fit_maps", spied)
    for numbers, kept in ((2**27, 9), (3 * 4 * heads * 100, 4), (1, 3)):
        monkeypatch.setattr(fits, "_MAP_NUMBERS", numbers)
        seen.clear()
        model = patch_model(copy.deepcopy(original), pos="rope", calibration=data)
        assert {len(examples) for examples in seen} == {kept}
        assert fitted(repair_report(model))
    assert all(any(bool(example.held_out.any()) for example in examples) for examples in seen)
    assert all(not (example.held_out & example.fitted).any() for examples in seen for example in examples)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "pos", "share"),
    [(torch.bfloat16, "rope", 1.0), (torch.float32, RoPE(theta=100.0, partial=0.5, pairing="interleaved"), 0.8)],
)
def test_in_half_precision_and_with_another_rotation(dtype: torch.dtype, pos: str | RoPE, share: float) -> None:
    model, report = repaired(tiny("gpt2", LM).to(dtype), pos=pos)
    assert all(after < share * before for before, after in fitted(report))
    assert len(fitted(report)) > 1
    assert {p.dtype for p in model.parameters()} == {dtype}


def test_what_is_a_map() -> None:
    probabilities = torch.rand(2, 3, 4, 5).softmax(-1)
    assert map_in((torch.zeros(2, 4, 8), probabilities)) is probabilities
    assert map_in((torch.zeros(2, 4, 8), torch.rand(2, 3, 4, 5))) is None
    assert map_in((torch.zeros(2, 4, 8), None)) is None
    assert map_in(probabilities) is None


@pytest.mark.slow
def test_an_attention_that_shows_no_map_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits, "map_of", lambda module, call: None)
    _, report = repaired(tiny("gpt2", LM), pos="rope")
    told = [step for step in report.steps if step.kind == "maps"]
    assert told
    assert all(step.note == "it returns no attention map" and not step.kept for step in told)
