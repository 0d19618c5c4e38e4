"""Swap the norms of every model type of transformers and check the result against a ground truth of its own.

    python tests/sweeps/norm_swap.py                   # all types; writes norm_swap.json and docs/support/norm_swap.md
    python tests/sweeps/norm_swap.py gpt2 bert         # these types; prints what it found

The sweep decides what a LayerNorm is without hfpatch: a leaf module, if its output is, by least squares,
`gain * (x - mean) / sqrt(var + eps) + shift` per channel. hfpatch has to convert it or to give the reason why it is
kept (otherwise the module is *missed*), and must convert nothing else. Each new module must return
`x / sqrt(mean(x^2) + eps) * gain + shift` with the gain and shift that were measured on the old one.
"""

from __future__ import annotations

import copy
import math
import site
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

site.addsitedir(str(Path(__file__).resolve().parents[1] / "support"))

import torch
import workers
import zoo
from tiny_models import tensors
from torch import Tensor, nn

from hfpatch.errors import NothingToPatchError
from hfpatch.measure.quiet_forward import CallArguments, observe_calls
from hfpatch.measure.randomness import seed_deterministically
from hfpatch.patch import patch_model
from hfpatch.plan import Plan, plan_patch
from hfpatch.runtime.patch_errors import PatchError

LENGTH_IS_PREDICTED = {"vits"}  # the model decides how long its waveform is
UNREACHED = "the forward reaches none of them"
FIT, FORMULA = 1e-4, 1e-5  # relative errors: of a LayerNorm's fit, and of a new module against the formula


# --- ground truth -----------------------------------------------------------------------------------------------------


@dataclass
class LayerNormFit:
    """How a module normalises: over the last `over` axes, or over axis 1."""

    gain: Tensor
    shift: Tensor
    eps: float
    over: int
    channels_first: bool

    def rows(self, x: Tensor) -> Tensor:
        """`x` with the normalised channels last."""
        return x.movedim(1, -1) if self.channels_first else x

    def rms(self, x: Tensor) -> Tensor:
        """What an RMSNorm with the measured gain and shift returns, in the layout of `rows`."""
        x = self.rows(x).double()
        mean = x.square().mean(tuple(range(-self.over, 0)), keepdim=True)
        return x / (mean + self.eps).sqrt() * self.gain + self.shift


@dataclass
class Seen:
    """The inputs and the output of a module's first call."""

    inputs: tuple[Any, ...]
    output: Any


def candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Leaf modules that could be a LayerNorm: named like a norm, or of a class that torch doesn't have."""
    found = {}
    for name, module in model.named_modules():
        if name and not module._modules:
            kind = type(module)
            if "norm" in kind.__name__.lower() or isinstance(module, nn.LayerNorm) or not _from_torch(kind):
                found[name] = module
    return found


def _from_torch(kind: type) -> bool:
    return kind.__module__.startswith("torch.nn.modules")


def fit_layer_norm(module: nn.Module, seen: Seen | None) -> LayerNormFit | None:
    """The fit if the module is a LayerNorm, else None. It isn't changed, and not called in its own precision."""
    if seen is not None and not (len(seen.inputs) == 1 and _same_shape(seen.inputs[0], seen.output)):
        return None
    try:
        double = copy.deepcopy(module).double().eval()
    except Exception:  # what can't be copied holds more than parameters
        return None
    shapes = [tuple(seen.inputs[0].shape)] if seen is not None else list(_likely_shapes(module))
    two_axes = len(_shape_of(getattr(module, "normalized_shape", ()))) == 2 or any(
        p.dim() == 2 for p in module.parameters()
    )
    layouts = [(False, 1, 2), (False, 2, 2)] if two_axes else [(False, 1, 1), (True, 1, 1)]
    for shape in shapes:
        for channels_first, over, each in layouts:
            fit = _fit(double, shape, channels_first, over, each)
            if fit is not None:
                return fit
    return None


def _shape_of(size: Any) -> tuple[int, ...]:
    return (size,) if isinstance(size, int) else tuple(size)


def _same_shape(a: Any, b: Any) -> bool:
    return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.is_floating_point()


def _likely_shapes(module: nn.Module) -> Iterator[tuple[int, ...]]:
    """Shapes that a module which the forward never reached might take."""
    stated = getattr(module, "normalized_shape", None)
    if stated is not None:
        yield (2, 24, *_shape_of(stated))
    for parameter in module.parameters(recurse=False):
        yield (2, 24, *parameter.shape)
        yield (2, *parameter.shape, 5, 5)


def _fit(module: nn.Module, shape: tuple[int, ...], channels_first: bool, over: int, each: int) -> LayerNormFit | None:
    if len(shape) < (3 if channels_first else 1 + each) or min(shape) == 0:
        return None
    channels = shape[1] if channels_first else math.prod(shape[-over:])
    if channels < 3:  # two channels normalise to plus and minus one whatever the formula is
        return None
    x = torch.randn(_sample_shape(shape, channels_first, each), dtype=torch.float64, generator=_generator())
    answers = [_answer(module, x * scale + 0.7 * scale) for scale in (1e3, 1.0)]
    if any(answer is None for answer in answers):
        return None
    layout = LayerNormFit(torch.ones(()), torch.zeros(()), 0.0, over, channels_first)
    h, y = _standardised(layout, x * 1e3 + 700.0, 0.0), layout.rows(answers[0])
    rows = tuple(range(h.dim() - each))
    h_mean, y_mean = h.mean(rows), y.mean(rows)
    gain = ((h - h_mean) * (y - y_mean)).mean(rows) / (h - h_mean).square().mean(rows)
    shift = y_mean - gain * h_mean
    if gain.abs().max() <= FIT * y.abs().max() or any(p.numel() != gain.numel() for p in module.parameters()):
        return None  # doesn't depend on its input, or has parameters that are no gain and shift per channel
    fit = LayerNormFit(gain, shift, stated_eps(module), over, channels_first)
    for scale, answer in zip((1e3, 1.0), answers, strict=True):
        expected = _standardised(fit, x * scale + 0.7 * scale, fit.eps) * gain + shift
        if not _close(layout.rows(answer), expected, FIT):
            return None
    return fit


def _sample_shape(shape: tuple[int, ...], channels_first: bool, each: int) -> tuple[int, ...]:
    """`shape` with the channels as they are and 24 rows or more, but not many more."""
    fixed = {1} if channels_first else set(range(len(shape) - each, len(shape)))
    rows = [min(size, 6) for place, size in enumerate(shape) if place not in fixed and place != 0]
    rest = iter(rows)
    first = max(2, math.ceil(24 / math.prod(rows)))
    return tuple(first if place == 0 else size if place in fixed else next(rest) for place, size in enumerate(shape))


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _answer(module: nn.Module, x: Tensor) -> Tensor | None:
    try:
        with torch.no_grad():
            y = module(x)
    except Exception:  # wants another layout
        return None
    return y.double() if _same_shape(x, y) else None


def _standardised(fit: LayerNormFit, x: Tensor, eps: float) -> Tensor:
    axes = tuple(range(-fit.over, 0))
    x = fit.rows(x)
    return (x - x.mean(axes, keepdim=True)) / (x.var(axes, correction=0, keepdim=True) + eps).sqrt()


def stated_eps(module: nn.Module) -> float:
    for name in ("eps", "variance_epsilon", "epsilon"):
        if isinstance(value := getattr(module, name, None), float):
            return value
    return 1e-5  # what those use that state none, as F.layer_norm does


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return bool((a.double() - b).abs().max() <= tolerance * max(1e-6, float(b.abs().max())))


# --- one model type ---------------------------------------------------------------------------------------------------


@dataclass
class Result(workers.Result):
    """What the sweep found for one model type; `status` is "ok", or says what is wrong."""

    class_name: str = ""
    layer_norms: int = 0
    converted: int = 0
    kept: dict[str, int] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    note: str = ""

    @property
    def counted(self) -> bool:
        """Whether the type is one of the M with a LayerNorm."""
        return self.layer_norms > 0


def examine(model_type: str) -> Result:
    """Build, run, patch and run again; see the module's docstring for what is checked."""
    result = Result(model_type)
    model, inputs = zoo.tiny(model_type)
    try:
        before, seen = run(model, inputs)
    except Exception as error:
        result.status = f"not run: {zoo.last_line(error)}"
        return result
    result.class_name = type(model).__name__
    found = {name: fit_layer_norm(module, seen.get(name)) for name, module in candidates(model).items()}
    truth = {name: fit for name, fit in found.items() if fit is not None}
    result.layer_norms = len(truth)
    try:
        plan, only = _plan(model, sorted(truth))
    except NothingToPatchError as error:
        result.missed = sorted(truth)
        result.status = f"nothing to patch: {error}" if truth else "no LayerNorm"
        return result
    except PatchError as error:
        result.status = f"refused: {error}"
        return result
    _compare(result, plan, truth)
    if only:
        result.note = "all are kept unless only= names them, as here"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            patch_model(model, norm="rms", only=only, init="copy")
        after, seen_after = run(model, inputs)
    except Exception as error:
        result.status = f"failed: {zoo.last_line(error)}"
        return result
    result.status = _problem(result, plan, model, truth, (before, after), (seen, seen_after)) or "ok"
    return result


def run(model: nn.Module, inputs: dict[str, Any]) -> tuple[Any, dict[str, Seen]]:
    """The output of one forward, and what each leaf module was given and returned on its first call."""
    seen: dict[str, Seen] = {}
    given: dict[str, tuple[Any, ...]] = {}

    def on_call(name: str, call: CallArguments) -> None:
        given[name] = tuple(map(_cloned, (*call.args, *call.kwargs.values())))

    def on_result(name: str, output: Any) -> None:
        seen.setdefault(name, Seen(given[name], _cloned(output)))

    leaves = {name: module for name, module in model.named_modules() if name and not module._modules}
    with observe_calls(leaves, on_call, on_result), torch.no_grad(), seed_deterministically(0):
        return model(**copy.deepcopy(inputs)), seen


def _cloned(output: Any) -> Any:
    return output.clone() if isinstance(output, Tensor) else output


def _plan(model: nn.Module, layer_norms: list[str]) -> tuple[Plan, list[str] | None]:
    """The plan for the whole model; where it would keep every LayerNorm, the plan that asks for them by name."""
    try:
        return plan_patch(model, norm="rms", init="copy"), None
    except NothingToPatchError:
        if not layer_norms:
            raise
        return plan_patch(model, norm="rms", only=layer_norms, init="copy"), layer_norms


def _compare(result: Result, plan: Plan, truth: dict[str, LayerNormFit]) -> None:
    """Fill in what is converted, kept, missed, and converted without being a LayerNorm."""
    listed = {name: row for row in plan.rows for name in (row.module, *row.aliases)}
    kept = Counter(str(listed[name].reason) for name in truth if name in listed and listed[name].action == "keep")
    result.kept = dict(sorted(kept.items()))
    result.converted = sum(name in listed and listed[name].action == "replace" for name in truth)
    result.missed = sorted(name for name in truth if name not in listed)
    replaced = [row for row in plan.rows if row.action == "replace"]
    result.wrong = sorted(row.module for row in replaced if not {row.module, *row.aliases} & truth.keys())


def _problem(
    result: Result,
    plan: Plan,
    model: nn.Module,
    truth: dict[str, LayerNormFit],
    outputs: tuple[Any, Any],
    seen: tuple[dict[str, Seen], dict[str, Seen]],
) -> str | None:
    """The first thing that is wrong with the patched model, or None."""
    denied = [reason for reason in result.kept if "LayerNorm's arithmetic" in reason]
    if denied:
        return f"{result.kept[denied[0]]} LayerNorms are taken for something else"
    if result.missed:
        return f"missed {len(result.missed)}: {result.missed[0]}"
    if result.wrong:
        return f"converted {len(result.wrong)} that are no LayerNorm: {result.wrong[0]}"
    replaced = [row.module for row in plan.rows if row.action == "replace"]
    for name in replaced:
        module = model.get_submodule(name)
        if "RMSNorm" not in type(module).__name__:
            return f"{name} is still a {type(module).__name__}"
        got = seen[1].get(name)
        x = got.inputs[0] if got else torch.randn(_shape_for(truth[name]))
        y = got.output if got else module(x).detach()
        if torch.isfinite(x).all() and not _close(truth[name].rows(y), truth[name].rms(x), FORMULA):
            return f"{name} doesn't compute RMSNorm of its input"
    before, after = (dict(tensors(output)) for output in outputs)
    if before.keys() != after.keys():
        return "the outputs have other names"
    changed = False
    for name, old in before.items():
        new = after[name]
        if old.shape != new.shape:
            if result.model_type in LENGTH_IS_PREDICTED and old.dim() == new.dim():
                return None
            return f"{name} has shape {tuple(new.shape)} after {tuple(old.shape)}"
        if old.is_floating_point():
            if bool((~torch.isfinite(new) & torch.isfinite(old)).any()):
                return f"{name} isn't finite"
            both = torch.isfinite(new) & torch.isfinite(old)
            changed |= bool(((new - old)[both].abs() > 1e-5 * old[both].abs().max()).any()) if both.any() else False
        else:
            changed |= not torch.equal(old, new)
    if not changed and any(name in seen[0] and not _zero_mean(truth[name], seen[0][name]) for name in replaced):
        return "the outputs didn't change"
    if not any(name in seen[0] for name in replaced):
        result.note = "; ".join(filter(None, (result.note, UNREACHED)))
    return None


def _shape_for(fit: LayerNormFit) -> tuple[int, ...]:
    d = tuple(fit.gain.shape)
    return (2, *d, 5, 5) if fit.channels_first else (2, 5, *d)


def _zero_mean(fit: LayerNormFit, seen: Seen) -> bool:
    x = fit.rows(seen.inputs[0])
    means = x.mean(tuple(range(-fit.over, 0)))
    return bool((means.abs() <= 1e-4 * x.abs().max()).all())


# --- all model types --------------------------------------------------------------------------------------------------


def totals(results: list[Result]) -> dict[str, int]:
    """Types converted without fault, types with a LayerNorm, and the number of missed modules."""
    counted = [result for result in results if result.counted]
    converted, missed = sum(one.status == "ok" for one in counted), sum(len(one.missed) for one in counted)
    return {"converted": converted, "of": len(counted), "missed": missed}


def page(results: list[Result], of: str) -> list[str]:
    good, counted, missed = totals(results).values()
    not_run = [result for result in results if result.status.startswith("not ")]
    without = [result.model_type for result in results if result.status == "no LayerNorm"]
    unreached = [result for result in results if UNREACHED in result.note]
    norms = sum(result.layer_norms for result in results)
    changed = sum(result.converted for result in results)
    share = f"{100 * good / counted:.1f} %" if counted else "none"
    return [
        f"{of}: **{good} of {counted} model types with a LayerNorm converted without fault ({share})**, "
        f"{missed} modules missed; {changed} of {norms} LayerNorms converted, the rest kept for the reasons below.",
        f"Of {len(results)} model types {len(results) - len(not_run)} run here, "
        f"{len(without)} of them have no LayerNorm.",
        f"In {len(unreached)} of the {counted} types the forward doesn't reach the LayerNorms (models of images or "
        "sound get text alone). Each new module of these is checked by itself.",
        "",
        *workers.table(
            "model type | status | >LayerNorms | >converted | kept (reason) | class",
            (_cells(result) for result in results if result.counted),
        ),
        *workers.section("Without a LayerNorm", [", ".join(without)]),
        *workers.not_run(not_run),
    ]


def _cells(result: Result) -> tuple[object, ...]:
    kept = workers.counted(result.kept)
    status = result.status + (f" ({result.note})" if result.note else "")
    return result.model_type, status, result.layer_norms, result.converted, kept, result.class_name


SWEEP = workers.Sweep(
    title="LayerNorm to RMSNorm over every model type of transformers",
    says="Look up here which norms of a model type are replaced. The models are tiny and random.",
    every=zoo.model_types,
    examine=examine,
    totals=totals,
    batch=100,
    seconds=120,
)
if __name__ == "__main__":
    SWEEP.main()
