"""Whether a conversion held on the real model: its outputs, and the means at its norms, against rounding alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..measure.quiet_forward import outputs_of, quiet
from ..sites.norms import describe

FACTOR = 10.0
DRAWS = 2
_PIECE = 2**18  # elements of an output that are compared at once


@dataclass
class Verdict:
    """What was measured, and what rounding explains; both relative.

    Attributes:
        error, tolerance: largest difference of an output, by the output's root mean square.
        mean, mean_tolerance: largest |mean| at an exact norm's input, by its standard deviation plus the |mean| that
            the original has there.
    """

    error: float
    tolerance: float
    mean: float
    mean_tolerance: float

    @property
    def holds(self) -> bool:
        return self.error <= self.tolerance and self.mean <= self.mean_tolerance  # False where one is no number

    def __str__(self) -> str:
        return (
            f"outputs differ by {self.error:.1e} where rounding explains {self.tolerance:.1e}, means at the norms are "
            f"{self.mean:.1e} where it explains {self.mean_tolerance:.1e}"
        )


@dataclass
class _Run:
    outputs: dict[str, Tensor]
    means: dict[str, Tensor]
    widths: set[int]


class Reference:
    """The original's outputs and its own noise floor, measured before anything changes.

    The floor of the outputs is how far they move when the output of every module that has Parameters is multiplied by
    1 + eps * u, u uniform in (-1, 1): the last bit of the model's coarsest dtype, or of float32 if that is coarser
    (some families compute in float32 inside, whatever their weights are). The larger of two draws, times ten, is what a
    conversion may differ by. The mean of d channels, each with an error in the last bit, is off by eps / sqrt(d), and
    what is centred in every forward by float32's last bit: ten times the larger of the two is what a mean may be.

    Args:
        model: the original.
        given: inputs for one forward.
        norms: names of the norms that will be exact.
    """

    def __init__(self, model: nn.Module, given: Mapping[str, Any], norms: list[str]):
        self.given, self.norms = given, norms
        self.eps = max(
            [torch.finfo(torch.float32).eps]
            + [torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point() and p.element_size() > 1]
        )
        self.original = _run(model, given, norms)
        noisy = [_run(model, given, norms, self.eps, seed) for seed in range(DRAWS)]
        self.floor = max(_difference(self.original.outputs, run.outputs) for run in noisy)
        width = min(self.original.widths, default=1)
        self.mean_floor = max(self.eps / width**0.5, torch.finfo(torch.float32).eps)

    def check(self, model: nn.Module) -> Verdict:
        """The converted model against the original."""
        run = _run(model, self.given, self.norms)
        return Verdict(
            _difference(self.original.outputs, run.outputs),
            FACTOR * max(self.floor, self.eps),
            _largest_mean(self.original.means, run.means),
            FACTOR * self.mean_floor,
        )


def mean_ratios(model: nn.Module, given: Mapping[str, Any], norms: list[str]) -> dict[str, Tensor]:
    """At each norm the mean of its input over the channels, by the standard deviation, for every position."""
    return _run(model, given, norms).means


def _run(model: nn.Module, given: Mapping[str, Any], norms: list[str], noise: float = 0.0, seed: int = 0) -> _Run:
    found: dict[str, list[Tensor]] = {}
    widths: set[int] = set()
    with quiet(model):
        if noise:
            shake(model, noise, seed)
        for name in norms:
            norm = model.get_submodule(name)
            norm.register_forward_pre_hook(_watcher(norm, found.setdefault(name, []), widths), with_kwargs=True)
        outputs = outputs_of(model, given)
    return _Run(outputs, {name: torch.cat(ratios) for name, ratios in found.items() if ratios}, widths)


def shake(model: nn.Module, noise: float, seed: int) -> None:
    """Multiply the output of every module that has Parameters by 1 + noise * u, u uniform in (-1, 1).

    To be called in `quiet`, which takes the hooks off again and puts the random stream back.
    """
    torch.manual_seed(seed)
    for module in model.modules():
        if module._parameters:
            module.register_forward_hook(_shaker(noise))


def _shaker(noise: float) -> Any:
    def shake(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        wide = output.double()
        return (wide * (1 + noise * (2 * torch.rand_like(wide) - 1))).to(output.dtype)

    return shake


def _watcher(norm: nn.Module, found: list[Tensor], widths: set[int]) -> Any:
    facts = describe(norm)

    def watch(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        x = (args[0] if args else next(iter(kwargs.values()))).detach().double()
        if facts is not None and facts.channels_first:
            x = x.movedim(1, -1)
        over = tuple(range(-max(1, len(facts.shape) if facts else 1), 0))
        eps = facts.eps if facts is not None and facts.eps is not None else 0.0
        deviation = (x.var(over, correction=0) + max(eps, 1e-30)).sqrt()
        widths.add(x.shape[over[0] :].numel())
        found.append((x.mean(over) / deviation).flatten().cpu())

    return watch


def _difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest difference of two models' outputs by the root mean square of each, infinite where they don't compare."""
    if a.keys() != b.keys() or not a:
        return float("inf")
    return max(_relative(a[name], b[name]) for name in a)


def _relative(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    largest, squares, count = 0.0, 0.0, 0
    for x, y in zip(a.flatten().split(_PIECE), b.flatten().split(_PIECE), strict=True):
        finite = x.isfinite()
        if not torch.equal(finite, y.isfinite()):
            return float("inf")
        x, y = x[finite].double(), y[finite].double()
        if x.numel():
            largest = max(largest, float((x - y).abs().max()))
            squares, count = squares + float(x.square().sum()), count + x.numel()
    return largest / max((squares / max(count, 1)) ** 0.5, 1e-30)


def _largest_mean(original: dict[str, Tensor], converted: dict[str, Tensor]) -> float:
    """Largest of |ratio| / (1 + |the original's ratio|) at the same place."""
    if original.keys() != converted.keys() or any(original[n].shape != converted[n].shape for n in original):
        return float("inf")
    pairs = ((converted[name].abs(), original[name].abs()) for name in original)
    return max((float((now / (1 + before)).max()) for now, before in pairs), default=0.0)
