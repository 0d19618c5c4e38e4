"""Repair: what a swap changed comes back, on data that nothing was fitted to, and nothing else changes."""

from __future__ import annotations

import copy
import functools
import math
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from tiny_models import changes, fingerprint, inputs, outputs, patch, tiny, tiny_config
from torch import Tensor, nn
from transformers import GPT2LMHeadModel, PreTrainedModel
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

from hfpatch.errors import NotPreservedWarning, OptionError, WrappedModelError
from hfpatch.measure.quiet_forward import observe_calls
from hfpatch.patch import patch_model, repair_report, unpatch_model
from hfpatch.repairs import fits, norm_fit
from hfpatch.repairs import repair as engine
from hfpatch.repairs.distance import helps, mean_and_worst, token_distances
from hfpatch.repairs.repair import repair
from hfpatch.repairs.repair_report import Judgement, RepairReport
from hfpatch.sites import block_runs

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


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("family", "head", "request_", "factor"),
    [
        ("gpt2", LM, {"norm": "derf", "pos": "rope"}, 2),
        ("bert", "AutoModelForMaskedLM", {"norm": "rms"}, 10),  # compensated in closed form before
        ("vit", "AutoModel", {"norm": "dyt"}, 3),
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


@pytest.mark.sample(1)
@pytest.mark.parametrize(("family", "factor"), [("gptj", 4), ("mixtral", 1), ("phimoe", 1), ("gpt_oss", 1)])
def test_parallel_branches_and_experts(family: str, factor: float) -> None:
    """Of two blocks: attentions, MLPs and experts have projections."""
    original = zoo.tiny(family)[0]
    data = [{"input_ids": torch.randint(5, original.config.vocab_size, (4, 12))} for _ in range(5)]
    model = repaired(original, data[:4])
    assert distance(model, original, data[4:]) < distance(swapped(original), original, data[4:]) / factor
    steps = [step for step in repair_report(model).steps if step.kind == "projection"]
    assert len(steps) == 4
    assert all(step.before is not None for step in steps)


@pytest.mark.slow
def test_a_reference_that_lies_on_disk_is_loaded_block_by_block(tmp_path: Path) -> None:
    original = tiny("gpt2", LM)
    original.save_pretrained(tmp_path)
    offload = {"device_map": {"": "disk"}, "offload_folder": tmp_path / "offload"}
    offloaded = type(original).from_pretrained(tmp_path, **offload)
    assert all(p.is_meta for p in offloaded.transformer.h.parameters())
    here, there = swapped(original), swapped(original)
    whole, report = (repair(m, o, batches(original)) for m, o in ((here, original), (there, offloaded)))
    assert largest(weights(here), weights(there)) == 0
    assert whole.to_json() == report.to_json()
    assert all(p.is_meta for p in offloaded.transformer.h.parameters())
    with pytest.raises(WrappedModelError, match="reference"):
        repair(offloaded, original, batches(original))


def test_norms_are_fitted_to_the_originals_output() -> None:
    """The first norm of GPT-2 sees the same input as before: its gain and shift are plain least squares.

    Its alpha starts far off, so that it has to be searched.
    """
    original = tiny("gpt2", LM)
    data = batches(original, 16)
    model = repaired(original, [joined(data)], norm="dyt:alpha=20")
    norm, old = model.transformer.h[0].ln_1, original.transformer.h[0].ln_1
    with torch.no_grad():
        x = original(**joined(data), output_hidden_states=True).hidden_states[0][torch.arange(32) % 8 != 7].double()
    x, y = x.flatten(0, 1), old(x.float()).flatten(0, 1).double()

    def fit(alpha: float) -> tuple[Tensor, Tensor, float]:
        h = torch.tanh(alpha * x)
        gain = ((h - h.mean(0)) * (y - y.mean(0))).mean(0) / (h - h.mean(0)).square().mean(0)
        shift = y.mean(0) - gain * h.mean(0)
        return gain, shift, float((y - gain * h - shift).square().mean())

    alpha = norm.alpha.item()
    gain, shift, error = fit(alpha)
    torch.testing.assert_close(norm.gain.double(), gain, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(norm.shift.double(), shift, rtol=1e-4, atol=1e-4)
    assert error < min(fit(0.5 * alpha)[2], fit(2 * alpha)[2])


# What isn't fitted says why


@pytest.mark.slow
def test_a_repair_that_repairs_little_warns() -> None:
    """The linear maps of layers that are one aren't fitted: the warning gives the distance that remains."""
    original = tiny("albert")
    with pytest.warns(NotPreservedWarning, match="a repair was undone, .* -> "):
        patch_model(model := copy.deepcopy(original), pos="rope", calibration=[joined(batches(original))])
    assert not repair_report(model).kept
    rotated = patch_model(copy.deepcopy(original), pos="rope")
    with pytest.warns(
        NotPreservedWarning, match="AlbertModel: Repair on 16 sequences"
    ) as caught:  # by itself it does too
        repair(rotated, original, batches(original))
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():  # control
        warnings.simplefilter("error", NotPreservedWarning)
        patch_model(model := tiny("gpt2", LM), norm="dyt", calibration=[joined(batches(model))])
        repair(swapped(tiny("gpt2", LM)), tiny("gpt2", LM), batches(model))
    assert repair_report(model).recovered > 0.5


@pytest.mark.parametrize("norm", ["dyt", "rms"])
def test_norms_of_layers_that_are_one_are_fitted_at_all_calls(norm: str) -> None:
    """Each was called once a layer. The errors that the report gives are those of the model that comes out."""
    original = tiny("albert", num_hidden_layers=3)
    for name, parameter in original.named_parameters():
        if "LayerNorm" in name or "layer_norm" in name:
            parameter.data += 0.2 * torch.randn_like(parameter)
    data, untouched = batches(original), copy.deepcopy(original)
    report = repair(model := patch_model(original, norm=norm, init="copy"), untouched, data)
    shared = [step for step in report.steps if "albert_layers" in step.module and step.kind == "norm"]
    assert [step.module.rpartition(".")[2] for step in shared] == ["LayerNorm", "full_layer_layer_norm"]
    assert all(step.kept and step.after < step.before for step in shared)
    assert report.after < 0.5 * report.before
    last = shared[-1]
    held_out = joined(data)["input_ids"][7::8]
    calls: dict[int, list[torch.Tensor]] = {}
    for number, one in enumerate((untouched, model)):
        seen = calls[number] = []
        with observe_calls({"": one.get_submodule(last.module)}, on_result=lambda _, y, seen=seen: seen.append(y)):
            one(input_ids=held_out)
    assert len(calls[0]) == 3, "once a layer"
    old, new = (torch.stack(one).detach().double().flatten(0, -2) for one in calls.values())
    error = (old - new).square().sum(-1).mean() / (old - old.mean(0)).square().sum(-1).mean()
    assert float(error) == pytest.approx(last.after, rel=1e-4)


def test_tied_weights_arent_touched() -> None:
    tied = tiny("gpt2", LM)
    tied.transformer.h[1].mlp.c_proj.weight = tied.transformer.h[0].mlp.c_proj.weight  # by a user
    before = tied.transformer.h[0].mlp.c_proj.weight.detach().clone()
    patch(tied, norm="dyt", calibration=[joined(batches(tied))])
    assert torch.equal(tied.transformer.h[0].mlp.c_proj.weight, before)
    assert tied.transformer.h[1].mlp.c_proj.weight is tied.transformer.h[0].mlp.c_proj.weight


# Batches


@pytest.mark.slow
def test_the_result_doesnt_depend_on_how_sequences_are_batched() -> None:
    original = tiny("gpt2", LM, n_layer=1, dtype=torch.float64).double()
    parts = [{"input_ids": row[None]} for row in joined(batches(original, 4))["input_ids"]]
    fits = []
    for given in (parts, [joined(parts[:3]), joined(parts[3:])]):
        model = repaired(original, given)
        assert (repair_report(model).sequences, repair_report(model).held_out) == (8, 2)
        fits.append(weights(model))
    assert largest(*fits) < 1e-6
    assert largest(fits[0], weights(repaired(original, parts[:-1]))) > 1e-2  # control


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


def test_what_isnt_finite_is_infinitely_far() -> None:
    """Each of the two: a repair of NaN helps, and one that leads there doesn't, whatever the other tokens say."""
    before, after = torch.full((16,), 2.0), torch.full((16,), 1.0)
    for bad in (math.nan, math.inf):
        some, more = before.clone(), after.clone()
        some[3], more[3:5] = bad, bad
        assert helps(some, after)
        assert helps(torch.full_like(before, bad), after + 100)
        assert not helps(before, more)
        assert not helps(some, more)
        assert not helps(torch.full_like(before, bad), torch.full_like(before, bad))
        assert mean_and_worst(some) == (math.inf, math.inf)
    assert not judged(math.inf, 1.0).farther
    assert judged(1.0, math.inf).farther
    assert mean_and_worst(after) == (1.0, 1.0)
    logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    logits[:, 2] = -math.inf  # the model's own mask
    assert float(token_distances({"logits": logits}, {"logits": logits.clone()})[1].abs().max()) == 0


def judged(before: float, after: float) -> RepairReport:
    """A report of random tokens, of which one sequence of two isn't finite if a distance is infinite."""
    broken = [int(math.isinf(one)) for one in (before, after)]
    fresh = [Judgement("random tokens", 2, 8, before, after, before, after, *broken)]
    return RepairReport(8, 1, "KL divergence", 1.0, 0.01, True, fresh=fresh)


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
        ("KL divergence", math.inf, math.inf, False, False),
    ],
)
def test_what_a_repair_may_leave(measure: str, before: float, after: float, kept: bool, suffices: bool) -> None:
    assert RepairReport(8, 1, measure, before, after, kept).suffices is suffices


def test_the_reference_keeps_the_positions_of_an_earlier_patch() -> None:
    """The model itself has a lens there, which hands its grid down."""
    model = patch(tiny("vit"), pos="rope:axes=2")
    patch(model, norm="dyt", calibration=[joined(batches(model))])
    assert repair_report(model).recovered > 0.5


def padded(original: PreTrainedModel, side: str, garbage: int) -> list[Batch]:
    """Batches of one padded sequence and one that isn't; a decoder's, of the same length, the other way round."""
    data = []
    for i, given in enumerate(batches(original, 3)):
        if "decoder_input_ids" in given:
            given["decoder_input_ids"] = given["input_ids"].flip(0)
        for row, prefix in enumerate(name.removesuffix("input_ids") for name in list(given)):
            mask = torch.ones_like(given["input_ids"])
            hidden = slice(0, 3 + i % 2) if side == "left" else slice(-3 - i % 2, None)
            mask[row, hidden] = 0
            given[f"{prefix}input_ids"] = torch.where(mask == 1, given[f"{prefix}input_ids"], garbage)
            given[f"{prefix}attention_mask"] = mask
        data.append(given)
    return data


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "head", "side"),
    [
        ("gpt2", LM, "left"),
        ("bert", "AutoModelForMaskedLM", "right"),
        ("bart", "AutoModelForSeq2SeqLM", "right"),
    ],
)
def test_what_stands_at_padding_changes_nothing(family: str, head: str, side: str) -> None:
    """The padding of an encoder is never taken for its decoder's, even where the shapes would allow it."""
    original = tiny(family, head, **ONE_LAYER).double()
    fits = []
    for garbage in (7, 60):
        data = padded(original, side, garbage)
        model = repaired(original, data)
        fits.append((weights(model), repair_report(model)))
    assert largest(fits[0][0], fits[1][0]) < 1e-6
    assert fits[0][1].after == pytest.approx(fits[1][1].after, rel=1e-6)
    for given in data:
        given.pop("attention_mask")
    assert largest(fits[0][0], weights(repaired(original, data))) > 1e-3  # control


# Both checks on held-out data


def test_a_fit_that_doesnt_help_isnt_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it promises: what judges is the model with the values in it."""

    def of_no_help(fit: Callable) -> Callable:
        def fitted(*args: Any) -> Any:
            found = fit(*args)
            found.values = {name: 3 * value + 1 for name, value in found.values.items()}
            return found

        return fitted

    for place, name in ((norm_fit, "fit_norm"), (fits, "fit_ridge"), (fits, "fit_maps")):
        monkeypatch.setattr(place, name, of_no_help(getattr(place, name)))
    monkeypatch.setattr(engine, "helps", lambda *_: True)  # so that it isn't the whole that is taken back
    original, request = tiny("gpt2", LM, n_layer=1), {"norm": "dyt", "pos": "rope"}
    model = repaired(original, [joined(batches(original))], **request)
    report = repair_report(model)
    assert {step.kind for step in report.steps} == {"norm", "readers", "projection", "maps"}
    assert not any(step.kept for step in report.steps)
    assert all(step.after > step.before for step in report.steps)
    assert largest(weights(model), weights(swapped(original, **request))) == 0
    assert "undone: it didn't help" in str(report)


@pytest.mark.sample(1)
@pytest.mark.parametrize("after", [2.0, math.nan, math.inf])
def test_a_whole_that_doesnt_help_is_taken_back_bit_for_bit(after: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = tiny("gpt2", LM), swapped(tiny("gpt2", LM))
    measured = iter([("KL divergence", torch.full((8,), value)) for value in (1.0, after)])
    monkeypatch.setattr(engine, "output_distance", lambda *_, **__: next(measured))
    with pytest.warns(NotPreservedWarning):
        patch_model(model, norm="dyt", calibration=[joined(batches(model))])
    report = repair_report(model)
    assert not report.kept
    assert any(step.kept for step in report.steps)  # control: something was fitted meanwhile
    assert largest(weights(model), weights(plain)) == 0
    why = "it didn't help" if after == 2 else "it made outputs NaN or infinite"
    assert f"undone, since {why}" in report.summary()


# Nothing else changes


@pytest.mark.slow
def test_the_original_the_batches_and_the_streams_are_only_read() -> None:
    original = tiny("gpt2", LM).train()
    original.transformer.h[0].register_forward_hook(lambda *a: pytest.fail("a user's hook ran"))
    model = swapped(tiny("gpt2", LM))
    data = batches(original)
    copied, before = copy.deepcopy(data), fingerprint(original)
    repair(model, original, data)
    assert not changes(before, fingerprint(original))  # with the random streams
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(data, copied, strict=True))


@pytest.mark.slow
def test_objects_modes_hooks_and_gradients_are_kept() -> None:
    model = tiny("gpt2", LM)
    model(**inputs(model)).logits.sum().backward()
    model.train()
    model.transformer.h[0].mlp.eval()
    calls: list[int] = []
    uncopyable = threading.Lock()  # as a user's hook may hold
    model.transformer.h[1].register_forward_hook(functools.partial(lambda lock, *_: calls.append(1), uncopyable))
    model.transformer.h[0].attn.c_attn.weight.requires_grad_(False)
    model.transformer.h[0].ln_1.weight.requires_grad_(False)
    before = {name: (p, p.requires_grad, p.grad) for name, p in model.named_parameters()}
    modes = {name: m.training for name, m in model.named_modules()}
    stream = torch.get_rng_state()
    patch(model, norm="dyt", calibration=batches(model))
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
    model(**inputs(model)).logits.sum().backward()
    assert calls == [1]


@pytest.mark.slow
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


@pytest.mark.sample(1)
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
        monkeypatch.setattr(block_runs, "loud_noise", lambda noise, streams: noise)
    kinds = []
    for one in (original, copy.deepcopy(original).to(dtype)):
        kinds.append([(step.module, step.kind) for step in repair_report(repaired(one, data)).steps])
    assert (kinds[0] == kinds[1]) is drowned
    assert "projection" in {kind for _, kind in kinds[0]}


def test_a_repair_by_itself_and_a_second_patch_can_be_undone() -> None:
    model = tiny("gpt2", LM, n_layer=1)
    before, original = fingerprint(model), copy.deepcopy(model)
    patch(model, norm="dyt", reversible=True)
    assert repair(model, original, batches(model, 2)).kept
    patch(model, pos="rope", calibration=batches(model, 2), reversible=True)
    copied = copy.deepcopy(model)
    unpatch_model(copied)
    assert largest(weights(copied), weights(original)) == 0
    unpatch_model(model)
    assert not changes(before, fingerprint(model))
    assert repair_report(model) is None


# Failures


@pytest.mark.slow
def test_a_failing_forward_restores_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a repair by itself; a patch that repairs is interrupted in tests/fuzz."""
    original = tiny("gpt2", LM)
    model = swapped(original)
    data, before, count = batches(model, 2), fingerprint(model), [0]
    forward = GPT2MLP.forward

    def failing(self: nn.Module, x: Tensor) -> Tensor:
        count[0] += 1
        if count[0] == stop:
            raise KeyboardInterrupt
        return forward(self, x)

    monkeypatch.setattr(GPT2MLP, "forward", failing)
    stop = 0
    repair(copy.deepcopy(model), copy.deepcopy(original), data)
    calls = count[0]
    assert calls > 20
    for stop in (calls // 3, 2 * calls // 3, calls):
        count[0] = 0
        with pytest.raises(KeyboardInterrupt):
            repair(model, original, data)
        assert count[0] == stop
        assert not changes(before, fingerprint(model))


def ids(*rows: list[int]) -> Batch:
    return {"input_ids": torch.tensor(rows)}


ONE, FOREIGN = [ids([1, 1, 1])], ids([5000] * 3, [5000] * 3)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("calibration", "text"),
    [
        ([], "no batch"),
        (iter([]), "no batch"),
        (ONE, "one sequence"),
        (iter(ONE), "one sequence"),  # of which a list is told before it is stored
        ([ids([5] * 9, [5] * 9)], "one distinct sequence, 2 times"),
        ([ids([*range(20)], [*range(20)], [*range(19), 3])], "2 distinct sequences of 3, all nearly equal"),
        ([ids([5], [6])], "Pass 64 different sequences"),
        ([ids([*range(7)], [*range(7, 14)])], "Pass 16 different sequences"),
        ([FOREIGN], "batch 0"),
        ([ids([*range(8)], [*range(8, 16)]), FOREIGN], "batch 1"),
        (iter([ids([*range(8)], [*range(8, 16)]), FOREIGN]), "batch 1"),
        ([{"labels": torch.ones(2, 3).long()}], "batch 0"),
    ],
)
def test_bad_batches_change_nothing(calibration: Any, text: str) -> None:
    """The forms that they may have are those of tests/measure/test_batches.py."""
    model = tiny("gpt2", LM)
    before = fingerprint(model)
    with pytest.raises(OptionError, match=text):
        patch_model(model, norm="dyt", calibration=calibration)
    assert not changes(before, fingerprint(model))


def test_just_enough_tokens_to_judge_by() -> None:
    assert repair_report(repaired(tiny("gpt2", LM), [ids([*range(8)], [*range(8, 16)])])) is not None


def without_weights() -> PreTrainedModel:
    with torch.device("meta"):
        return GPT2LMHeadModel(tiny_config("gpt2"))


NOT_PATCHED = "GPT2LMHeadModel isn't patched, so there is nothing to repair"


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda model: patch_model(model, norm="dyt", init="reset", calibration=batches(model)), "choose one"),
        (lambda model: patch_model(model, norm="dyt", calibration=batches(model), fit="q"), "fit"),
        (lambda model: patch_model(model, pos="rope", fit="bias"), "calibration="),
        (lambda model: repair(model, model, batches(model), fit=None), "fit"),  # type: ignore[arg-type]
        (lambda model: patch(without_weights(), norm="dyt", calibration=batches(model)), "has none yet"),
        (lambda model: repair(swapped(model), without_weights(), batches(model)), "weights"),
        (lambda model: repair(model, copy.deepcopy(model), "self"), NOT_PATCHED),
        (lambda model: repair(model, swapped(model), batches(model)), NOT_PATCHED),  # in the wrong order
    ],
)
def test_refused_before_anything_changes_or_is_drawn(
    work: Callable, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hfpatch.repairs.calibration.sample_batches", lambda *a: pytest.fail("sequences were drawn"))
    model = tiny("gpt2", LM)
    before = fingerprint(model)
    with pytest.raises(OptionError, match=message):
        work(model)
    assert not changes(before, fingerprint(model))


# The report


def test_the_reported_errors_are_those_of_the_model() -> None:
    """The whole's: KL divergence on the held-out sequences, computed here; the last norm's: likewise."""
    original = tiny("gpt2", LM, n_layer=1)
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
    new, y = (last_norm(m, held) for m in (model, original))
    variance = y.flatten(0, 1).var(0, correction=0).mean()
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
