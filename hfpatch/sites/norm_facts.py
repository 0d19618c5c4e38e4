"""Measures what a norm module computes (kind, eps, gain, shift) by running it.

transformers holds some thirty LayerNorm classes: subclasses of `nn.LayerNorm` with another gain (Nemotron's 1 + w),
modules without parameters (OLMo), per-head gains (Cohere), channels-first ones (ConvNeXt). Each is read by feeding a
copy of it chosen inputs; a module whose answers no LayerNorm or RMSNorm could give is left alone.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..measure.copies import copy_of
from ..runtime.norms import NormFacts

_TOLERANCE = 1e-5  # relative; some families compute in float32 whatever the input
EPS_NAMES = ("eps", "variance_epsilon", "epsilon", "layer_norm_eps")
_LAYOUTS = ("channels last", "images", "sequences")  # the latter two with channels first
_NOT_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)


def describe(module: nn.Module) -> NormFacts | None:
    """Return a norm module's facts; None if it isn't like LayerNorm or RMSNorm. The module isn't changed."""
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
    """Return whether a class name or base class says LayerNorm, so that users expect it in a plan."""
    return isinstance(module, nn.LayerNorm) or "layernorm" in type(module).__name__.lower().replace("_", "")


def _may_be_norm(module: nn.Module) -> bool:
    if isinstance(module, _NOT_NORMS) or _takes_two_arguments(type(module)):  # type: ignore[arg-type]
        return False
    if any(one is not None for one in (*module._modules.values(), *module._buffers.values())):
        return False
    parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
    if not parameters:
        named = "norm" in type(module).__name__.lower() or hasattr(module, "normalized_shape")
        named = named or any(hasattr(module, name) for name in EPS_NAMES)
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
    """The norm whose formula gives the module's answers, of all that its Parameters could be gain and shift of."""
    clone, values = _with_known_values(module)
    if clone is None:
        return None
    shape = next(iter(values.values())).shape if values else _declared_shape(module)
    names = (*values, *[None] * (2 - len(values)))
    roles = [
        (offset, gain, shift)
        for gain, shift in dict.fromkeys(itertools.permutations(names, 2))
        for offset in ((0.0, 1.0) if gain else (0.0,))
    ]
    for layout in _LAYOUTS if len(shape) == 1 else _LAYOUTS[:1]:
        large = _answer(clone, shape, layout, 1e3)  # eps is negligible here
        if large is None:
            continue
        for kind, role in itertools.product(("layer", "rms"), roles):
            facts = NormFacts(kind, tuple(shape[-1:]), 0.0, layout != _LAYOUTS[0], *role)
            if _error(large, facts, values) <= _TOLERANCE:
                eps = _read_eps(_answer(clone, shape, layout, 1e-7), facts, values)
                facts = replace(facts, eps=eps)
                # where eps matters most, and where it doesn't
                answers = [_answer(clone, shape, layout, scale) for scale in (math.sqrt(max(eps, 1e-12)), 1.0)]
                if all(_error(answer, facts, values) <= 1e-3 for answer in answers):
                    known = bool(values) or hasattr(module, "normalized_shape")
                    return replace(facts, eps=_stated_eps(module, eps), shape=facts.shape if known else ())
    return None


def _with_known_values(module: nn.Module) -> tuple[nn.Module | None, dict[str, Tensor]]:
    """A float64 copy on the CPU with known random parameters, also for modules on the meta device."""
    generator = torch.Generator().manual_seed(0)
    try:
        clone = copy_of(module, dtype=torch.float64, device="cpu")
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


def _answer(module: nn.Module, shape: tuple[int, ...], layout: str, scale: float) -> tuple[Tensor, Tensor] | None:
    """An input of this layout and a module's answer, both with the channels last; None if it gives none."""
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn((2, 3, 5, *shape), generator=generator, dtype=torch.float64) + 0.7) * scale
    shaped = x if layout == "images" else x.flatten(1, 2)
    if layout != _LAYOUTS[0]:
        shaped = shaped.movedim(-1, 1)
    try:
        with torch.no_grad():
            y = type(module).forward(module, shaped)  # without the user's hooks
    except Exception:  # wants other inputs: not a plain norm in this layout
        return None
    if not isinstance(y, Tensor) or y.shape != shaped.shape:
        return None
    y = y.double().movedim(1, -1) if layout != _LAYOUTS[0] else y.double()
    return x, y if layout == "images" else y.unflatten(1, (3, 5))


def _error(answer: tuple[Tensor, Tensor] | None, facts: NormFacts, values: dict[str, Tensor]) -> float:
    """How far an answer is from what the facts say, relative to the largest number."""
    if answer is None:
        return math.inf
    x, y = answer
    x = x - x.mean(-1, keepdim=True) if facts.kind == "layer" else x
    gain, shift = _affine(facts, values)
    expected = x / (x.square().mean(-1, keepdim=True) + (facts.eps or 0.0)).sqrt() * gain + shift
    return float((expected - y).abs().max() / expected.abs().max())


def _affine(facts: NormFacts, values: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    gain = values[facts.gain] + facts.offset if facts.gain else torch.ones((), dtype=torch.float64)
    return gain, values[facts.shift] if facts.shift else torch.zeros((), dtype=torch.float64)


def _read_eps(small: tuple[Tensor, Tensor] | None, facts: NormFacts, values: dict[str, Tensor]) -> float:
    """eps from the slope at inputs far below sqrt(eps): y = gain * x / sqrt(v + eps) + shift."""
    if small is None:
        return 0.0
    x, y = small
    gain, shift = _affine(facts, values)
    x = x - x.mean(-1, keepdim=True) if facts.kind == "layer" else x
    slope = float(((y - shift) * gain * x).sum() / (gain.square() * x.square()).sum())
    return max(0.0, 1.0 / slope**2 - float(x.square().mean())) if slope > 0 else 0.0


def _stated_eps(module: nn.Module, measured: float) -> float:
    """The module's eps attribute if it agrees with the measured value, else the measured value."""
    for name in EPS_NAMES:
        stated = getattr(module, name, None)
        if isinstance(stated, float) and abs(stated - measured) <= 0.02 * stated + 1e-15:
            return stated
    return float(f"{measured:.3g}")


def size_of(facts: NormFacts | None, replaced: NormFacts | None = None) -> str:
    """Return a norm's shape as plans print it: "(768)", or "(768, bias=False)" if it lost a shift."""
    if facts is None:
        return ""
    dropped = replaced is not None and replaced.shift and not facts.shift
    return f"({', '.join(map(str, facts.shape))}{', bias=False' if dropped else ''})"
