"""Finds what a norm module computes (kind, eps, gain, shift) by running it rather than by its name.

transformers holds some thirty LayerNorm classes: subclasses of `nn.LayerNorm` with another gain (Nemotron's 1 + w),
modules without parameters (OLMo), per-head gains (Cohere), channels-first ones (ConvNeXt). Each is read by feeding a
copy of it chosen inputs; a module whose answers no LayerNorm or RMSNorm could give is left alone.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..runtime.norms import NormFacts

_TOLERANCE = 1e-5  # relative; some families compute in float32 whatever the input
_EPS_NAMES = ("eps", "variance_epsilon", "epsilon", "layer_norm_eps")
_NOT_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)


def describe(module: nn.Module) -> NormFacts | None:
    """The facts of a norm module, None if it is nothing like LayerNorm or RMSNorm. The module isn't changed."""
    facts = module.__dict__.get("facts")
    if isinstance(facts, NormFacts):  # a norm of hfpatch's
        return facts
    if type(module) is nn.LayerNorm or type(module) is nn.RMSNorm:
        kind = "layer" if type(module) is nn.LayerNorm else "rms"
        gain, shift = (name if getattr(module, name, None) is not None else None for name in ("weight", "bias"))
        return NormFacts(kind, tuple(module.normalized_shape), module.eps, gain=gain, shift=shift)
    if not _may_be_norm(module):
        return None
    with torch.device("cpu"):  # whatever the default device is while a model loads
        return _probe(module)


def looks_like_norm(module: nn.Module) -> bool:
    """Whether class or base class says LayerNorm: a module that a reader of the plan expects to find in it."""
    return isinstance(module, nn.LayerNorm) or "layernorm" in type(module).__name__.lower().replace("_", "")


def _may_be_norm(module: nn.Module) -> bool:
    if isinstance(module, _NOT_NORMS) or _takes_two_arguments(type(module)):  # type: ignore[arg-type]
        return False
    if any(one is not None for one in (*module._modules.values(), *module._buffers.values())):
        return False
    parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
    if not parameters:
        named = "norm" in type(module).__name__.lower() or hasattr(module, "normalized_shape")
        named = named or any(hasattr(module, name) for name in _EPS_NAMES)
        return named and not type(module).__module__.startswith("torch.nn.modules.")
    one_shape = len({p.shape for p in parameters}) == 1
    return len(parameters) <= 2 and one_shape and parameters[0].dim() in (1, 2) and 1 < parameters[0].numel() < 2**18


@functools.cache
def _takes_two_arguments(module: type[nn.Module]) -> bool:
    """Whether a class's forward takes a second argument, as gated norms do; such modules aren't plain norms."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    arguments = inspect.signature(module.forward).parameters.values()
    return sum(parameter.kind in kinds for parameter in arguments) > 2  # the first is self


def _probe(module: nn.Module) -> NormFacts | None:
    clone, values = _testable_copy(module)
    if clone is None:
        return None
    shape = next(iter(values.values())).shape if values else _declared_shape(module)
    for layout in _Runner.LAYOUTS:
        run = _Runner(clone, shape, layout)
        for kind in ("layer", "rms"):
            facts = _fit(run, kind, values)
            if facts is not None:
                known = bool(values) or hasattr(module, "normalized_shape")
                return replace(facts, eps=_stated_eps(module, facts.eps), shape=facts.shape if known else ())
    return None


def _testable_copy(module: nn.Module) -> tuple[nn.Module | None, dict[str, Tensor]]:
    """A float64 copy on the CPU with known random parameters, also for modules on the meta device."""
    generator = torch.Generator().manual_seed(0)
    try:
        clone = copy.deepcopy(module)
        if any(p.is_meta for p in clone.parameters()):
            clone = clone.to_empty(device="cpu")
        clone = clone.to(device="cpu", dtype=torch.float64).eval()
    except Exception:  # an exotic module that can't be copied is no norm that we could replace
        return None, {}
    values = {}
    with torch.no_grad():
        for name, parameter in clone.named_parameters(recurse=False):
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3 + 0.7)
            values[name] = parameter.detach().clone()
    return clone, values


def _declared_shape(module: nn.Module) -> tuple[int, ...]:
    shape = getattr(module, "normalized_shape", None) or (16,)
    return (shape,) if isinstance(shape, int) else tuple(shape)


class _Runner:
    """Feeds a module inputs of one layout and returns outputs with the channels last: `(2, 3, 5, ..., d)`."""

    LAYOUTS = ("channels last", "images", "sequences")  # the latter two with channels first

    def __init__(self, module: nn.Module, shape: tuple[int, ...], layout: str):
        self.module, self.shape, self.layout = module, tuple(shape), layout
        self.channels_first = layout != self.LAYOUTS[0]
        generator = torch.Generator().manual_seed(1)
        self.input = torch.randn((2, 3, 5, *shape), generator=generator, dtype=torch.float64) + 0.7

    def __call__(self, scale: float) -> tuple[Tensor, Tensor] | None:
        x = self.input * scale
        shaped = x if self.layout == "images" else x.flatten(1, 2)
        if self.channels_first:
            shaped = shaped.movedim(-1, 1)
        try:
            with torch.no_grad():
                y = type(self.module).forward(self.module, shaped)  # without the user's hooks
        except Exception:  # wants other inputs: not a plain norm in this layout
            return None
        if not isinstance(y, Tensor) or y.shape != shaped.shape:
            return None
        y = y.double().movedim(1, -1) if self.channels_first else y.double()
        return x, y if self.layout == "images" else y.unflatten(1, (3, 5))


def _normalise(x: Tensor, kind: str, eps: float) -> Tensor:
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def _fit(run: _Runner, kind: str, values: dict[str, Tensor]) -> NormFacts | None:
    if run.channels_first and len(run.shape) != 1:
        return None
    large = run(1e3)  # eps is negligible here, so gain and shift can be read off
    if large is None:
        return None
    gain, shift, error = _regress(_normalise(large[0], kind, 0.0), large[1])
    if error > _TOLERANCE:
        return None
    names = _match_parameters(gain, shift, values)
    small = run(1e-7)
    if names is None or small is None:
        return None
    offset, gain_name, shift_name = names  # exact values from here on: the regression's are too rough for eps
    gain = values[gain_name] + offset if gain_name else torch.ones_like(gain)
    shift = values[shift_name] if shift_name else torch.zeros_like(shift)
    eps = _read_eps(small, kind, gain, shift)
    for scale in (math.sqrt(max(eps, 1e-12)), 1.0):  # where eps matters most, and where it doesn't
        measured = run(scale)
        if measured is None:
            return None
        expected = _normalise(measured[0], kind, eps) * gain + shift
        if (expected - measured[1]).abs().max() > 1e-3 * expected.abs().max():
            return None
    return NormFacts(kind, run.shape[-1:], eps, run.channels_first, *names)


def _regress(h: Tensor, y: Tensor) -> tuple[Tensor, Tensor, float]:
    """Least squares of y = gain * h + shift for each element of the trailing shape; relative error of the fit."""
    rows = (0, 1, 2)
    h_mean, y_mean = h.mean(rows), y.mean(rows)
    gain = ((h - h_mean) * (y - y_mean)).mean(rows) / (h - h_mean).square().mean(rows).clamp_min(1e-30)
    shift = y_mean - gain * h_mean
    error = (gain * h + shift - y).abs().max() / y.abs().max().clamp_min(1e-30)
    return gain, shift, float(error)


def _match_parameters(
    gain: Tensor, shift: Tensor, values: dict[str, Tensor]
) -> tuple[float, str | None, str | None] | None:
    """Which parameter is the gain (or its offset from one) and which the shift; None if that doesn't add up."""

    def same(a: Tensor, b: Tensor | float) -> bool:
        return bool((a - b).abs().max() <= _TOLERANCE * 10)

    shift_name = next((name for name, value in values.items() if same(shift, value)), None)
    rest = [name for name in values if name != shift_name]
    if len(rest) > 1 or (shift_name is None and not same(shift, 0.0)):
        return None
    if not rest:
        return (0.0, None, shift_name) if same(gain, 1.0) else None
    value = values[rest[0]]
    for offset in (0.0, 1.0):
        if same(gain, value + offset):
            return offset, rest[0], shift_name
    return None


def _read_eps(small: tuple[Tensor, Tensor], kind: str, gain: Tensor, shift: Tensor) -> float:
    """eps from the slope at inputs far below sqrt(eps): y = gain * x / sqrt(v + eps) + shift."""
    x, y = small
    x = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    projected = (y - shift) * gain
    slope = float((projected * x).sum() / (gain.square() * x.square()).sum())
    return max(0.0, 1.0 / slope**2 - float(x.square().mean())) if slope > 0 else 0.0


def _stated_eps(module: nn.Module, measured: float | None) -> float | None:
    """The module's eps attribute if it agrees with the measured value, else the measured value."""
    if measured is None:
        return None
    for name in _EPS_NAMES:
        stated = getattr(module, name, None)
        if isinstance(stated, float) and abs(stated - measured) <= 0.02 * stated + 1e-15:
            return stated
    return float(f"{measured:.3g}")


def size_of(facts: NormFacts | None, replaced: NormFacts | None = None) -> str:
    """A norm's shape as plans print it: "(768)", or "(768, bias=False)" without the shift of the norm it replaced."""
    if facts is None:
        return ""
    dropped = replaced is not None and replaced.shift and not facts.shift
    return f"({', '.join(map(str, facts.shape))}{', bias=False' if dropped else ''})"
