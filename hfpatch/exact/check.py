"""Whether a conversion held on the real model: its outputs, and the means at its norms, against rounding alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..measure.outputs import FACTOR, last_bit, max_error, noise_floor, outputs_of
from ..measure.quiet_forward import quiet
from ..sites.norms import describe


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
        """Whether rounding explains all of it."""
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

    Ten times the `noise_floor` is what a conversion may differ by. The mean of d channels, each with an error in the
    last bit (eps), is off by eps / sqrt(d), and what is centred in every forward by float32's last bit: ten times the
    larger of the two is what a mean may be.

    Args:
        model: the original.
        inputs: inputs for one forward.
        norms: names of the norms that will be exact.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any], norms: list[str]):
        self.inputs, self.norms = inputs, norms
        self.eps = last_bit(model)
        self.original = _run(model, inputs, norms)
        self.floor = noise_floor(model, inputs, self.original.outputs)
        width = min(self.original.widths, default=1)
        self.mean_floor = max(self.eps / width**0.5, torch.finfo(torch.float32).eps)

    def check(self, model: nn.Module) -> Verdict:
        """The converted model against the original."""
        run = _run(model, self.inputs, self.norms)
        return Verdict(
            max_error(self.original.outputs, run.outputs),
            FACTOR * max(self.floor, self.eps),
            _largest_mean(self.original.means, run.means),
            FACTOR * self.mean_floor,
        )


def mean_ratios(model: nn.Module, inputs: Mapping[str, Any], norms: list[str]) -> dict[str, Tensor]:
    """At each norm the mean of its input over the channels, by the standard deviation, for every position."""
    return _run(model, inputs, norms).means


def _run(model: nn.Module, inputs: Mapping[str, Any], norms: list[str]) -> _Run:
    found: dict[str, list[Tensor]] = {}
    widths: set[int] = set()
    with quiet(model):
        for name in norms:
            norm = model.get_submodule(name)
            norm.register_forward_pre_hook(_watcher(norm, found.setdefault(name, []), widths), with_kwargs=True)
        outputs = outputs_of(model, inputs)
    return _Run(outputs, {name: torch.cat(ratios) for name, ratios in found.items() if ratios}, widths)


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


def _largest_mean(original: dict[str, Tensor], converted: dict[str, Tensor]) -> float:
    """Largest of |ratio| / (1 + |the original's ratio|) at the same place."""
    if original.keys() != converted.keys() or any(original[n].shape != converted[n].shape for n in original):
        return float("inf")
    pairs = ((converted[name].abs(), original[name].abs()) for name in original)
    return max((float((now / (1 + before)).max()) for now, before in pairs), default=0.0)
