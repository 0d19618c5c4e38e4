"""Repair: what a swap changed comes back, on data that nothing was fitted to, and nothing else changes."""

from __future__ import annotations

import copy
import functools
import json
import math
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from sampled import slow_but
from tiny_models import changes, fingerprint, inputs, outputs, patch, tiny, tiny_config
from torch import Tensor, nn
from transformers import GPT2LMHeadModel, PreTrainedModel
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

from hfpatch.core.transaction import Transaction
from hfpatch.errors import NotPreservedWarning, OptionError, WrappedModelError
from hfpatch.patch import patch_model, repair_report, unpatch_model
from hfpatch.repairs import linear_roles
from hfpatch.repairs import repair as engine
from hfpatch.repairs.distance import helps, token_distances
from hfpatch.repairs.repair import repair
from hfpatch.repairs.report import RepairReport

LM = "AutoModelForCausalLM"
ONE_LAYER = {"encoder_layers": 1, "decoder_layers": 1, "num_hidden_layers": 1}
Batch = dict[str, Tensor]


def batches(model: PreTrainedModel, count: int = 8, seed: int = 0) -> list[Batch]:
    return [inputs(model, seed + i) for i in range(count)]


def joined(parts: list[Batch]) -> Batch:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def distance(model: nn.Module, original: nn.Module, fresh: list[Batch] | None = None) -> float:
    """Mean squared difference of the first output, relative to the original's, on data that no repair saw."""
    a, b = (
        torch.stack([outputs(m, **given)[0] for given in fresh or batches(original, 8, 900)]) for m in (model, original)
    )
    return float((a - b).square().mean() / a.var())


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def largest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest difference of two models' weights, relative to the weight's own size."""
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).abs().max() / a[n].abs().max().clamp_min(1e-6)) for n in a)


def repaired(original: PreTrainedModel, data: Any, norm: str | None = "dyt", **request: Any) -> PreTrainedModel:
    """A copy that is patched and repaired."""
    return patch(copy.deepcopy(original), norm=norm, calibration=data, **request)


def swapped(original: PreTrainedModel, norm: str | None = "dyt", **request: Any) -> PreTrainedModel:
    """A copy that is patched alone."""
    return patch(copy.deepcopy(original), norm=norm, **request)


@pytest.fixture(autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Temporary folders of a repair are made in a place of their own, and none is left."""
    place = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    yield
    assert not list(place.iterdir())


# It helps


@pytest.mark.parametrize(
    ("family", "head", "request_", "factor"),
    [
        ("gpt2", LM, {"norm": "dyt"}, 4),
        ("gpt2", LM, {"norm": "derf", "pos": "rope"}, 2),
        ("bert", "AutoModelForMaskedLM", {"norm": "dyt"}, 4),
        ("bert", "AutoModelForMaskedLM", {"norm": "rms"}, 10),  # compensated in closed form before
        pytest.param("bart", "AutoModelForSeq2SeqLM", {"norm": "dyt"}, 4, marks=pytest.mark.slow),
        pytest.param("whisper", "AutoModelForSpeechSeq2Seq", {"norm": "dyt"}, 3, marks=pytest.mark.slow),
        ("vit", "AutoModel", {"norm": "dyt"}, 3),
        pytest.param("opt", LM, {"norm": "dyt"}, 2, marks=pytest.mark.slow),
    ],
)
def test_a_repair_brings_the_original_back(family: str, head: str, request_: dict, factor: float) -> None:
    original = tiny(family, head)
    plain, model = swapped(original, **request_), repaired(original, [joined(batches(original, 12))], **request_)
    report = repair_report(model)
    assert report is not None
    assert report.kept
    assert distance(model, original) < distance(plain, original) / factor
    kinds = {step.kind for step in report.steps if step.kept}
    assert kinds == {"norm", "readers", "projection"} | ({"maps"} if "pos" in request_ else set())
    shuffled = [{name: value.flip(-1) for name, value in given.items()} for given in batches(original, 8, 900)]
    assert distance(plain, original, shuffled) > 0  # the measure isn't blind


@pytest.mark.parametrize(
    ("family", "factor", "projections", "experts"),
    [("gpt_neox", 4, 4, 0), ("gptj", 4, 4, 0), ("phi", 4, 4, 0), ("mixtral", 1, 2, 2), ("phimoe", 1, 2, 2)],
)
def test_parallel_branches_and_experts(family: str, factor: float, projections: int, experts: int) -> None:
    """Of two blocks: attentions and MLPs have projections, experts have none, and that is said."""
    original = zoo.tiny(family)[0]
    data = [{"input_ids": torch.randint(5, original.config.vocab_size, (4, 12))} for _ in range(5)]
    model = repaired(original, data[:4])
    assert distance(model, original, data[4:]) < distance(swapped(original), original, data[4:]) / factor
    steps = [step for step in repair_report(model).steps if step.kind == "projection"]
    assert sum("experts" in step.note for step in steps) == experts
    assert len(steps) - experts == projections


@pytest.mark.slow
@pytest.mark.parametrize("pos", ["rope", "nope"])
@pytest.mark.parametrize("norm", [None, "dyt"])
def test_positions_alone_and_with_a_norm(pos: str, norm: str | None) -> None:
    original = tiny("gpt2", LM)
    model = repaired(original, [joined(batches(original, 32))], norm, pos=pos)
    report = repair_report(model)
    assert report.kept
    assert report.measure == "KL divergence"
    assert distance(model, original) < 0.9 * distance(swapped(original, norm, pos=pos), original)
    projections = [step.module.rpartition("transformer.")[2] for step in report.steps if step.kind == "projection"]
    assert projections == ["h.0.attn.c_proj", "h.0.mlp.c_proj", "h.1.attn.c_proj", "h.1.mlp.c_proj"]


def test_another_models_activations_dont_help() -> None:
    """Control: fitted to a stranger, the model gets away from its original; so the reference matters."""
    original, stranger = tiny("gpt2", LM), tiny("gpt2", LM, seed=5)
    right, wrong = swapped(original), swapped(original)
    repair(right, original, [joined(batches(original))])
    repair(wrong, stranger, [joined(batches(original))])
    assert distance(right, original) < 0.2 * distance(wrong, original)


@pytest.mark.slow
def test_a_repair_with_a_reference_is_the_repair_of_the_patch() -> None:
    original = tiny("gpt2", LM)
    inside, outside = repaired(original, batches(original)), swapped(original)
    report = repair(outside, original, batches(original))
    assert largest(weights(inside), weights(outside)) == 0
    assert report.to_json() == repair_report(inside).to_json()


HERE = dict.fromkeys(["transformer.wte", "transformer.wpe", "transformer.ln_f", "lm_head"], "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("device_map", [{"": "disk"}, {**HERE, "transformer.h": "disk"}])
def test_a_reference_that_lies_on_disk_is_loaded_block_by_block(device_map: dict[str, str], tmp_path: Path) -> None:
    original = tiny("gpt2", LM)
    original.save_pretrained(tmp_path)
    offload = {"device_map": device_map, "offload_folder": tmp_path / "offload"}
    offloaded = type(original).from_pretrained(tmp_path, **offload)
    assert all(p.is_meta for p in offloaded.transformer.h.parameters())
    here, there = swapped(original), swapped(original)
    loaded = most_weights_loaded(offloaded)
    whole, report = (repair(m, o, batches(original)) for m, o in ((here, original), (there, offloaded)))
    assert largest(weights(here), weights(there)) == 0
    assert whole.to_json() == report.to_json()
    assert set(loaded) == {2}
    assert all(p.is_meta for p in offloaded.transformer.h.parameters())
    with pytest.raises(WrappedModelError, match="reference"):
        repair(offloaded, original, batches(original))


def most_weights_loaded(model: PreTrainedModel) -> list[int]:
    """As an MLP's first map runs: how many Parameters of the model's blocks are in memory then."""
    counts: list[int] = []
    for block in model.transformer.h:
        forward = block.mlp.c_fc._old_forward  # accelerate's name for what its hooks surround

        def counted(*args: Any, forward: Callable = forward) -> Tensor:
            counts.append(sum(not p.is_meta for p in model.transformer.h.parameters()))
            return forward(*args)

        block.mlp.c_fc._old_forward = counted
    return counts


def test_what_is_exact_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hfpatch.patch.sample_batches", lambda *_: pytest.fail("nothing has to be repaired"))
    plain = patch_model(tiny("gpt2", LM), norm="rms")

    def unused() -> Iterator[Batch]:
        yield from batches(plain, 1)
        raise AssertionError("only the first batch is looked at")

    for calibration in (unused(), "self"):
        model = patch_model(tiny("gpt2", LM), norm="rms", calibration=calibration)
        assert repair_report(model) is None
        assert largest(weights(model), weights(plain)) == 0


def test_norms_are_fitted_to_the_originals_output() -> None:
    """The first norm of GPT-2 sees the same input as before: its gain and shift are plain least squares."""
    original = tiny("gpt2", LM)
    data = batches(original, 16)
    model = repaired(original, [joined(data)])
    norm, old, seen = model.transformer.h[0].ln_1, original.transformer.h[0].ln_1, []
    handle = old.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    original(**joined(data))
    handle.remove()
    fitted = torch.arange(32) % 8 != 7
    x = seen[0][fitted].flatten(0, 1).double()
    h, y = torch.tanh(norm.alpha.double() * x), old(x.float()).double()
    gain = ((h - h.mean(0)) * (y - y.mean(0))).mean(0) / (h - h.mean(0)).square().mean(0)
    torch.testing.assert_close(norm.gain.double(), gain, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(norm.shift.double(), y.mean(0) - gain * h.mean(0), rtol=1e-4, atol=1e-4)

    def error(alpha: float) -> float:
        h = torch.tanh(alpha * x)
        g = ((h - h.mean(0)) * (y - y.mean(0))).mean(0) / (h - h.mean(0)).square().mean(0)
        return (y - y.mean(0) - g * (h - h.mean(0))).square().mean().item()

    alpha = norm.alpha.item()
    assert error(alpha) < min(error(0.5 * alpha), error(2 * alpha))


# What isn't fitted says why


@pytest.mark.parametrize(
    ("head", "kept"), [("AutoModel", True), pytest.param("AutoModelForMaskedLM", False, marks=pytest.mark.slow)]
)
def test_a_repair_that_repairs_little_says_why_and_warns(head: str, kept: bool) -> None:
    """Layers that share their weights can't be fitted: the warning gives the distance that remains."""
    original = tiny("albert", head)
    message = "is repaired: .* -> " if kept else "approximate: a repair was undone"
    with pytest.warns(NotPreservedWarning, match=message):
        patch_model(model := copy.deepcopy(original), norm="dyt", calibration=[joined(batches(original))])
    report = repair_report(model)
    assert report.kept == kept
    assert report.recovered < 0.5
    shared = [step for step in report.steps if "share" in step.note]
    assert len(shared) == 2
    assert all(step.before is None and not step.kept for step in shared)
    assert {step.kind for step in report.steps} == {"norm"}
    with pytest.warns(
        NotPreservedWarning, match=r"Albert\w+: Repair on 16 sequences"
    ) as caught:  # by itself it does too
        repair(swapped(original), original, batches(original))
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():  # control
        warnings.simplefilter("error", NotPreservedWarning)
        patch_model(model := tiny("gpt2", LM), norm="dyt", calibration=[joined(batches(model))])
        repair(swapped(tiny("gpt2", LM)), tiny("gpt2", LM), batches(model))
    assert repair_report(model).recovered > 0.5


@pytest.mark.slow
def test_tied_weights_arent_touched() -> None:
    original = tiny("gpt2", LM)
    model = repaired(original, batches(original), pos="rope")
    assert model.lm_head.weight is model.transformer.wte.weight
    assert torch.equal(model.lm_head.weight, original.lm_head.weight)
    tied = tiny("gpt2", LM)
    tied.transformer.h[1].mlp.c_proj.weight = tied.transformer.h[0].mlp.c_proj.weight  # by a user
    before = tied.transformer.h[0].mlp.c_proj.weight.detach().clone()
    patch(tied, norm="dyt", calibration=batches(original))
    assert torch.equal(tied.transformer.h[0].mlp.c_proj.weight, before)
    assert tied.transformer.h[1].mlp.c_proj.weight is tied.transformer.h[0].mlp.c_proj.weight


# Batches


@pytest.mark.slow
def test_the_result_doesnt_depend_on_how_sequences_are_batched() -> None:
    original = tiny("gpt2", LM, dtype=torch.float64).double()
    parts = [{"input_ids": row[None]} for row in joined(batches(original, 4))["input_ids"]]
    three = [joined(parts[:3]), parts[3], joined(parts[4:])]
    fits = []
    for given in (parts, [joined(parts)], three, (part["input_ids"] for part in parts)):
        model = repaired(original, given)
        assert (repair_report(model).sequences, repair_report(model).held_out) == (8, 1)
        fits.append(weights(model))
    for other in fits[1:]:
        assert largest(fits[0], other) < 1e-6
    less = weights(repaired(original, parts[:-1]))
    assert largest(fits[0], less) > 1e-2  # control


@pytest.mark.slow
def test_batches_of_unequal_length() -> None:
    original = tiny("bert", "AutoModelForMaskedLM")
    data = [{"input_ids": given["input_ids"][:, : 12 - i]} for i, given in enumerate(batches(original, 8))]
    assert distance(repaired(original, data), original) < 0.3 * distance(swapped(original), original)


@pytest.mark.parametrize("sequences", [2, 16])
@pytest.mark.slow
def test_few_sequences(sequences: int) -> None:
    original = tiny("gpt2", LM)
    data = [{"input_ids": row[None]} for row in joined(batches(original, 8))["input_ids"][:sequences]]
    model = repaired(original, data)
    report = repair_report(model)
    assert report.held_out == {2: 1, 16: 2}[sequences]
    assert f"on {report.held_out} held-out sequence" in report.summary()
    assert all(value.isfinite().all() for value in weights(model).values())
    assert report.after < report.before or not report.kept


def test_help_is_told_from_noise() -> None:
    gains = torch.randn(4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    before = torch.full_like(gains, 9.0)
    error = float(gains.std()) / len(gains) ** 0.5
    gains -= gains.mean()
    assert helps(before, before - gains - 2.1 * error)
    assert not helps(before, before - gains - 1.9 * error)
    assert not helps(before, before)
    assert not helps(before, before - gains * math.nan)
    assert helps(before, before - 1e-3), "the same help everywhere is none of noise"


@pytest.mark.parametrize(
    ("measure", "before", "after", "kept", "suffices"),
    [
        ("KL divergence", 4.0, 0.09, True, True),
        ("KL divergence", 4.0, 0.11, True, False),  # much was repaired, and much is left
        ("KL divergence", 0.1, 0.06, True, False),  # little is left, and little was repaired
        ("KL divergence", 0.1, 0.04, True, True),
        ("KL divergence", 0.1, 0.04, False, False),  # undone
        ("relative squared error of the outputs", 1.0, 0.011, True, False),
        ("relative squared error of the outputs", 1.0, 0.009, True, True),
        ("KL divergence", 1e-9, 1e-9, False, True),  # there was nothing to repair
        ("KL divergence", 1.0, math.nan, False, False),
        ("KL divergence", math.nan, math.nan, False, False),
    ],
)
def test_what_a_repair_may_leave(measure: str, before: float, after: float, kept: bool, suffices: bool) -> None:
    assert RepairReport(8, 1, measure, before, after, kept).suffices is suffices


def test_the_reference_keeps_the_positions_of_an_earlier_patch() -> None:
    """The model itself has a lens there, which hands its grid down."""
    model = patch(tiny("vit"), pos="rope:axes=2")
    patch(model, norm="dyt", calibration=[joined(batches(model))])
    assert repair_report(model).recovered > 0.5


def padded(original: PreTrainedModel, side: str, garbage: int, both: bool) -> list[Batch]:
    data = []
    for i, given in enumerate(batches(original, 3)):
        for name in ("input_ids", "decoder_input_ids") if both else ("input_ids",):
            mask = torch.ones_like(given[name])
            hidden = slice(0, 3 + i % 2) if side == "left" else slice(-3 - i % 2, None)
            mask[0, hidden] = 0
            given[name] = torch.where(mask == 1, given[name], garbage)
            given["attention_mask" if name == "input_ids" else "decoder_attention_mask"] = mask
        data.append(given)
    return data


@pytest.mark.parametrize(
    ("family", "head", "side"),
    [
        ("gpt2", LM, "right"),
        ("gpt2", LM, "left"),
        ("bert", "AutoModelForMaskedLM", "right"),
        pytest.param("bart", "AutoModelForSeq2SeqLM", "right", marks=pytest.mark.slow),
    ],
)
def test_what_stands_at_padding_changes_nothing(family: str, head: str, side: str) -> None:
    original = tiny(family, head, **ONE_LAYER).double()
    fits = []
    for garbage in (7, 60):
        data = padded(original, side, garbage, family == "bart")
        model = repaired(original, data)
        fits.append((weights(model), repair_report(model)))
    assert largest(fits[0][0], fits[1][0]) < 1e-6
    assert fits[0][1].after == pytest.approx(fits[1][1].after, rel=1e-6)
    for given in data:
        given.pop("attention_mask")
    assert largest(fits[0][0], weights(repaired(original, data))) > 1e-3  # control


@pytest.mark.slow
def test_encoder_and_decoder_of_one_length_have_masks_of_their_own() -> None:
    """The padding of one side is never taken for the other's, even where the shapes would allow it."""
    original = tiny("bart", "AutoModelForSeq2SeqLM", **ONE_LAYER).double()
    fits = []
    for garbage in (7, 60):
        data = padded(original, "right", garbage, both=False)
        for given in data:
            given["decoder_input_ids"] = torch.cat([given["decoder_input_ids"], given["decoder_input_ids"][:, :3]], 1)
        for name in ("input_ids", "attention_mask", "decoder_input_ids"):
            data[-1][name] = data[-1][name].flip(0)  # the last sequence, one of the held-out, is padded then
        model = repaired(original, data)
        fits.append(weights(model))
    assert largest(*fits) < 1e-6
    held = {name: value[-1:] for name, value in data[-1].items()}
    assert not held["attention_mask"].all()
    p, q = (torch.log_softmax(m(**held).logits, -1) for m in (original, model))
    assert repair_report(model).after == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-4)


def test_a_single_number_as_output() -> None:
    model = tiny("bert", "AutoModelForSequenceClassification", num_labels=1)
    with pytest.raises(OptionError, match="Pass 64 sequences"):
        patch_model(model, norm="dyt", calibration=[joined(batches(model))])
    patch(model, norm="dyt", calibration=[joined(batches(model, 32))])
    report = repair_report(model)
    assert math.isfinite(report.before)
    assert report.kept


# Both checks on held-out data


def test_a_step_that_doesnt_help_on_held_out_sequences_isnt_taken() -> None:
    """Held-out tokens are of another kind: what fits the others doesn't fit them."""
    original = tiny("gpt2", LM)
    generator = torch.Generator().manual_seed(0)
    data = [{"input_ids": torch.randint(5, 8, (7, 2), generator=generator)} for _ in range(4)]
    held = torch.randint(40, 97, (4, 2), generator=generator)
    data = [{"input_ids": torch.cat([given["input_ids"], held[i : i + 1]])} for i, given in enumerate(data)]
    plain, model = (swapped(original), copy.deepcopy(original))
    patch(model, norm="dyt", calibration=data)
    report = repair_report(model)
    undone = [step for step in report.steps if step.after is not None and not step.kept]
    assert undone
    assert all(step.after >= step.before for step in undone)
    assert all(step.after < step.before for step in report.steps if step.kept)
    for step in undone:
        if step.kind == "projection":
            assert torch.equal(
                model.get_parameter(f"{step.module}.weight"), plain.get_parameter(f"{step.module}.weight")
            )
    assert "undone: it didn't help" in str(report)


def test_a_norms_fit_that_doesnt_help_isnt_written(monkeypatch: pytest.MonkeyPatch) -> None:
    real = engine.fit_norm

    def of_no_help(*args: Any) -> Any:
        fit = real(*args)
        fit.after = fit.before
        return fit

    monkeypatch.setattr(engine, "fit_norm", of_no_help)
    original, plain = tiny("gpt2", LM), swapped(tiny("gpt2", LM))
    model = patch(original, norm="dyt", calibration=[joined(batches(original))])
    steps = [step for step in repair_report(model).steps if step.kind == "norm"]
    assert steps
    assert not any(step.kept for step in steps)
    for step in steps:
        for name, parameter in model.get_submodule(step.module).named_parameters():
            assert torch.equal(parameter, plain.get_submodule(step.module).get_parameter(name)), step.module


@pytest.mark.parametrize(("before", "after"), [(1.0, 2.0), (math.nan, math.nan)])
def test_a_whole_that_doesnt_help_is_taken_back_bit_for_bit(
    before: float, after: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = tiny("gpt2", LM), swapped(tiny("gpt2", LM))
    measured = iter([("KL divergence", torch.full((8,), value)) for value in (before, after)])
    monkeypatch.setattr(engine, "output_distance", lambda *_, **__: next(measured))
    with pytest.warns(NotPreservedWarning):
        patch_model(model, norm="dyt", calibration=[joined(batches(model))])
    report = repair_report(model)
    assert not report.kept
    assert any(step.kept for step in report.steps)  # control: something was fitted meanwhile
    assert largest(weights(model), weights(plain)) == 0
    assert "undone, since it didn't help" in report.summary()


# Nothing else changes


def test_the_original_the_batches_and_the_streams_are_only_read() -> None:
    original = tiny("gpt2", LM).train()
    original.transformer.h[0].register_forward_hook(lambda *a: pytest.fail("a user's hook ran"))
    model = swapped(tiny("gpt2", LM))
    data = batches(original)
    copied, before = copy.deepcopy(data), fingerprint(original)
    repair(model, original, data)
    assert not changes(before, fingerprint(original))  # with the random streams
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(data, copied, strict=True))


def test_objects_modes_hooks_and_gradients_are_kept() -> None:
    model = tiny("gpt2", LM)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(**inputs(model)).logits.sum().backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict()["state"])
    model.train()
    model.transformer.h[0].mlp.eval()
    calls: list[int] = []
    model.transformer.h[1].register_forward_hook(lambda *a: calls.append(1))
    model.transformer.h[0].attn.c_attn.weight.requires_grad_(False)
    model.transformer.h[0].ln_1.weight.requires_grad_(False)
    before = {name: (p, p.requires_grad, p.grad) for name, p in model.named_parameters()}
    modes = {name: m.training for name, m in model.named_modules()}
    stream = torch.get_rng_state()
    patch(model, norm="dyt", calibration=batches(model), optimizer=optimizer)
    after = dict(model.named_parameters())
    for name, (parameter, requires_grad, grad) in before.items():
        if ".ln_" in name:
            name = name.replace("weight", "gain").replace("bias", "shift")
        assert after[name] is parameter
        assert parameter.requires_grad == requires_grad
        assert parameter.grad is grad
        assert parameter.is_contiguous()
    assert {name: m.training for name, m in model.named_modules() if name in modes} == modes
    assert torch.equal(torch.get_rng_state(), stream)
    assert not calls
    now = optimizer.state_dict()["state"]
    assert all(torch.equal(now[k]["exp_avg"], state[k]["exp_avg"]) for k in state)
    model(**inputs(model)).logits.sum().backward()
    assert calls == [1]


def test_a_forward_that_somebody_put_on_a_block_stays() -> None:
    model = tiny("gpt2", LM)
    block = model.transformer.h[0]
    own = functools.partial(type(block).forward, block)
    block.forward = own
    data = [joined(batches(model))]
    patch(model, norm="dyt", calibration=data)
    assert block.__dict__["forward"] is own
    assert not any("forward" in vars(m) for m in model.transformer.h[1:])
    assert largest(weights(model), weights(repaired(tiny("gpt2", LM), data))) == 0


def test_hooks_that_cant_be_copied_are_no_obstacle() -> None:
    class Counter:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __call__(self, *args: Any) -> None:
            pytest.fail("a user's hook ran")

    model = tiny("gpt2", LM)
    model.transformer.h[0].register_forward_hook(Counter())
    patch(model, norm="dyt", calibration=[joined(batches(model))])
    assert repair_report(model).kept


@pytest.mark.slow
@pytest.mark.parametrize("context", [torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.bfloat16)])
def test_the_callers_context_makes_no_difference(context: Callable) -> None:
    model, other = tiny("gpt2", LM), tiny("gpt2", LM)
    data = batches(model)
    with context():
        patch(model, norm="dyt", calibration=data)
    patch(other, norm="dyt", calibration=data)
    assert largest(weights(model), weights(other)) == 0
    model(**data[0]).logits.sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    original = tiny("gpt2", LM).to(dtype)
    model = repaired(original, batches(original, 12))
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert distance(model, original) < 0.25 * distance(swapped(original), original)


@pytest.mark.parametrize("drowned", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_projections_are_found_in_half_precision(
    dtype: torch.dtype, drowned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a stream that is louder than its branches, rounding hides what a projection adds; the control shows it."""
    original = tiny("gpt2", LM, n_layer=1)
    with torch.no_grad():
        original.transformer.wte.weight.mul_(300)
    data = batches(original, 4)
    if not drowned:
        monkeypatch.setattr(linear_roles, "_drowning_out", lambda noise, streams: noise)
    kinds = []
    for one in (original, copy.deepcopy(original).to(dtype)):
        kinds.append([(step.module, step.kind) for step in repair_report(repaired(one, data)).steps])
    assert (kinds[0] == kinds[1]) is drowned
    assert "projection" in {kind for _, kind in kinds[0]}


def test_a_second_patch_can_be_undone() -> None:
    model = tiny("gpt2", LM, n_layer=1)
    before, original = fingerprint(model), weights(model)
    patch(model, pos="rope", calibration=batches(model, 2), reversible=True)
    patch(model, norm="dyt", calibration=batches(model, 2), reversible=True)
    copied = copy.deepcopy(model)
    unpatch_model(copied)
    assert largest(weights(copied), original) == 0
    unpatch_model(model)
    assert not changes(before, fingerprint(model))
    assert repair_report(model) is None


def test_a_repair_by_itself_can_be_undone_with_the_patch() -> None:
    model = tiny("gpt2", LM, n_layer=1)
    before, original = fingerprint(model), copy.deepcopy(model)
    patch(model, norm="dyt", reversible=True)
    repair(model, original, batches(model, 2))
    unpatch_model(model)
    assert not changes(before, fingerprint(model))
    assert repair_report(model) is None


# Failures


class StopHereError(Exception):
    pass


@pytest.mark.slow
def test_a_failure_at_any_logged_change_restores_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("gpt2", LM, n_layer=1)
    data, original, count = batches(model, 2), Transaction._record, [0]
    before = fingerprint(model)

    def record(self: Transaction, kind: str, *inverse: Any) -> None:
        count[0] += 1
        if count[0] == stop:
            raise StopHereError
        original(self, kind, *inverse)

    monkeypatch.setattr(Transaction, "_record", record)
    stop = 0
    patch(copy.deepcopy(model), norm="dyt", calibration=data)
    steps = count[0]
    assert steps > 11
    for stop in range(11, steps + 1):
        count[0] = 0
        with pytest.raises(StopHereError):
            patch(model, norm="dyt", calibration=data)
        assert not changes(before, fingerprint(model)), f"change {stop} of {steps}"


@pytest.mark.parametrize(
    ("alone", "error"),
    slow_but(product((False, True), (StopHereError, KeyboardInterrupt)), [(True, KeyboardInterrupt)]),
)
def test_a_failing_forward_restores_everything(alone: bool, error: type, monkeypatch: pytest.MonkeyPatch) -> None:
    original = tiny("gpt2", LM)
    model = swapped(original) if alone else copy.deepcopy(original)
    data, before, count = batches(model, 2), fingerprint(model), [0]
    forward = GPT2MLP.forward

    def failing(self: nn.Module, x: Tensor) -> Tensor:
        count[0] += 1
        if count[0] == stop:
            raise error
        return forward(self, x)

    monkeypatch.setattr(GPT2MLP, "forward", failing)

    def work(model: PreTrainedModel) -> None:
        count[0] = 0
        if alone:
            repair(model, original, data)
        else:
            patch(model, norm="dyt", calibration=data)

    stop = 0
    work(copy.deepcopy(model))
    calls = count[0]
    assert calls > 20
    for stop in (calls // 3, 2 * calls // 3, calls):
        with pytest.raises(error):
            work(model)
        assert count[0] == stop
        assert not changes(before, fingerprint(model))


def test_a_stream_that_ends_in_an_error_restores_everything() -> None:
    model = tiny("gpt2", LM)
    before = fingerprint(model)

    def broken() -> Iterator[Batch]:
        yield inputs(model)
        raise StopHereError

    def wrong() -> Iterator[Any]:
        yield inputs(model)
        yield {"input_ids": torch.full((2, 3), 5000)}

    with pytest.raises(StopHereError):
        patch(model, norm="dyt", calibration=broken())
    assert not changes(before, fingerprint(model))
    with pytest.raises(OptionError, match="batch 1"):
        patch(model, norm="dyt", calibration=wrong())
    assert not changes(before, fingerprint(model))


def ids(*rows: list[int]) -> Batch:
    return {"input_ids": torch.tensor(rows)}


@pytest.mark.parametrize("form", [list, iter])
@pytest.mark.parametrize(
    ("calibration", "text"),
    [
        ([], "no batch"),
        ([ids([1, 1, 1])], "one sequence"),
        ([ids([5], [6])], "Pass 64 sequences"),
        ([ids([*range(7)], [*range(7)])], "Pass 16 sequences"),
        ([ids([5000] * 3, [5000] * 3)], "batch 0"),
        ([{"labels": torch.ones(2, 3).long()}], "batch 0"),
    ],
)
def test_bad_batches_change_nothing(calibration: list[Any], text: str, form: Callable) -> None:
    """The forms that they may have are those of tests/measure/test_batches.py."""
    model = tiny("gpt2", LM)
    before = fingerprint(model)
    with pytest.raises(OptionError, match=text):
        patch_model(model, norm="dyt", calibration=form(calibration))
    assert not changes(before, fingerprint(model))


def test_just_enough_tokens_to_judge_by() -> None:
    assert repair_report(repaired(tiny("gpt2", LM), [ids([*range(8)], [*range(8)])])) is not None


def test_fresh_parameters_are_not_fitted() -> None:
    model = tiny("gpt2", LM)
    before = fingerprint(model)
    with pytest.raises(OptionError, match="choose one"):
        patch_model(model, norm="dyt", init="reset", calibration=batches(model, 4))
    assert changes(before, fingerprint(model)) == []


def test_a_model_without_weights_is_refused() -> None:
    with torch.device("meta"):
        model = GPT2LMHeadModel(tiny_config("gpt2"))
    with pytest.raises(OptionError, match="has none yet"):
        patch(model, norm="dyt", calibration=[ids([1, 1, 1], [1, 1, 1])])
    with pytest.raises(OptionError, match="weights"):
        repair(swapped(tiny("gpt2", LM)), model, [ids([1, 1, 1], [1, 1, 1])])


def test_a_model_that_is_not_patched_is_refused_before_anything_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    original = tiny("gpt2", LM)
    monkeypatch.setattr(engine, "sample_batches", lambda *a: pytest.fail("sequences were drawn"))
    with pytest.raises(OptionError, match="GPT2LMHeadModel isn't patched, so there is nothing to repair"):
        repair(copy.deepcopy(original), original, "self")
    with pytest.raises(OptionError, match="isn't patched"):  # in the wrong order
        repair(original, swapped(original), batches(original))


# The report


def test_the_report() -> None:
    model = tiny("gpt2", LM)
    patch(model, norm="dyt", calibration=[joined(batches(model))])
    report = repair_report(model)
    order = [step.module for step in report.steps]
    place = {name: i for i, (name, _) in enumerate(model.named_modules())}
    assert order == sorted(order, key=lambda name: place[name])
    assert sum(step.kind == "norm" for step in report.steps) == 5
    assert json.loads(json.dumps(report.to_json()))["steps"][0]["kind"] == "norm"
    text = str(report)
    assert all(name in text for name in order)
    assert report.summary() in text
    assert all(0 <= step.after < step.before for step in report.steps if step.kept)


@pytest.mark.slow
def test_the_reported_errors_are_those_of_the_model() -> None:
    """The whole's: KL divergence on the held-out sequences, computed here; the last norm's: likewise."""
    original = tiny("gpt2", LM)
    data = batches(original, 8)
    plain, model = swapped(original), copy.deepcopy(original)
    patch(model, norm="dyt", calibration=data)
    held = joined(data)["input_ids"][7::8]

    def divergence(other: nn.Module) -> float:
        p, q = (torch.log_softmax(m(input_ids=held).logits, -1) for m in (original, other))
        return (p.exp() * (p - q)).sum(-1).mean().item()

    report = repair_report(model)
    assert report.before == pytest.approx(divergence(plain), rel=1e-4)
    assert report.after == pytest.approx(divergence(model), rel=1e-4)
    (new, y), ids = (last_norm(m, held) for m in (model, original)), joined(data)["input_ids"]
    variance = last_norm(original, ids[torch.arange(16) % 8 != 7]).flatten(0, 1).var(0, correction=0).mean()
    assert report.steps[-1].module == "transformer.ln_f"
    assert report.steps[-1].after == pytest.approx(float((new - y).square().mean() / variance), rel=1e-3)


def last_norm(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model.transformer(input_ids=ids).last_hidden_state


def test_a_wrong_writer_is_not_found() -> None:
    """A branch whose output is scaled before it is added is no plain addend; it isn't fitted as one."""

    class Scaled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return 0.3 * self.inner(*args, **kwargs)

    model = tiny("gpt2", LM)
    for block in model.transformer.h:
        block.mlp = Scaled(block.mlp)
    patch(model, norm="dyt", calibration=[joined(batches(model))])
    projections = [s for s in repair_report(model).steps if s.kind == "projection"]
    assert sum("scaled branch" in s.note for s in projections) == 2
    assert not any("mlp" in s.module for s in projections)


def test_outputs_in_a_list_have_a_distance() -> None:
    """A backbone returns its feature maps as one."""
    old, new = ({"feature_maps": (torch.full((2, 3, 4), value), torch.ones(2, 3))} for value in (1.0, 3.0))
    assert token_distances(old, old)[1].tolist() == [[0.0] * 3] * 2
    assert token_distances(old, new)[1].tolist() == [[4.0] * 3] * 2
