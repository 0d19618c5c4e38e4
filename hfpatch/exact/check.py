"""Checks an exact conversion on the user's model: outputs and means at the norms must agree up to rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..measure.hooks import Call, first_tensor, hooked
from ..measure.outputs import DRAWS, FACTOR, in_float64, last_bit, max_error, outputs_of, shaken
from ..schemes.request import EXACT
from ..sites.norms import describe
from .observe import channel_axes


@dataclass
class Verdict:
    """Measured relative errors of a conversion, each with the tolerance that rounding justifies.

    Attributes:
        error, tolerance: largest difference of an output, divided by the output's root mean square.
        mean, mean_tolerance: largest |mean| at an exact norm's input, divided by the input's standard deviation plus
            the |mean| at that place in the original.
    """

    error: float
    tolerance: float
    mean: float = 0.0
    mean_tolerance: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether both errors are within their tolerances."""
        return self.error <= self.tolerance and self.mean <= self.mean_tolerance  # False if one is NaN

    @property
    def outcome(self) -> str:
        """What should be exact, as the patch record says what it came to."""
        words = f"outputs differ by {self.error:.1e}, rounding explains {self.tolerance:.1e}"
        return f"{EXACT}: {words}" if self.holds else f"approximate: planned as exact, but {words}"

    def __str__(self) -> str:
        return (
            f"outputs differ by {self.error:.1e} (rounding explains {self.tolerance:.1e}), means of the norms' inputs "
            f"are {self.mean:.1e} (rounding explains {self.mean_tolerance:.1e})"
        )


@dataclass
class Run:
    """One forward: outputs, mean / standard deviation at the inputs of norms, at every position, and their widths."""

    outputs: dict[str, Tensor]
    means: dict[str, Tensor]
    widths: set[int]


class Reference:
    """Outputs, means and noise floor of the original, measured before the conversion.

    Noise in the last bit (eps) of every module's output (`shaken`) moves the outputs and the means at the norms; a
    conversion may change either by ten times as much. A mean may always be off by ten times eps / sqrt(d), the error of
    a mean of d channels that each have an error in the last bit, and, since outputs may be centred in every forward, by
    ten times float32's last bit.

    Args:
        model: the original.
        inputs: of one forward.
        norms: names of the norms that will be exact.
        original: the model's `run` on these inputs, if there was one.
    """

    def __init__(
        self, model: nn.Module, inputs: Mapping[str, Any], norms: list[str], original: Run | None = None
    ) -> None:
        self.inputs, self.norms = inputs, norms
        self.eps = last_bit(model)
        self.original = original or run(model, inputs, norms)
        width = min(self.original.widths, default=1)
        self.floor, self.mean_floor = 0.0, max(self.eps / width**0.5, torch.finfo(torch.float32).eps)
        for seed in range(DRAWS):
            noisy = run(model, inputs, norms, self.eps, seed)
            self.floor = max(self.floor, max_error(self.original.outputs, noisy.outputs))
            moved = {name: mean - self.original.means[name] for name, mean in noisy.means.items()}
            self.mean_floor = max(self.mean_floor, _largest_mean(self.original.means, moved))

    def check(self, model: nn.Module) -> Verdict:
        """Compare the converted model with the original."""
        now = run(model, self.inputs, self.norms)
        return Verdict(
            max_error(self.original.outputs, now.outputs),
            FACTOR * max(self.floor, self.eps),
            _largest_mean(self.original.means, now.means),
            FACTOR * self.mean_floor,
        )


def run(model: nn.Module, inputs: Mapping[str, Any], norms: list[str], noise: float = 0.0, seed: int = 0) -> Run:
    """One forward, `shaken` by a noise."""
    found = Run({}, {}, set())
    ratios: dict[str, list[Tensor]] = {}
    modules = {name: model.get_submodule(name) for name in norms}

    def watch(name: str, call: Call) -> None:
        facts = describe(modules[name])
        assert facts is not None
        x, axes = in_float64(first_tensor(call).detach()), channel_axes(facts)
        deviation = (x.var(axes, correction=0) + max(facts.eps or 0.0, 1e-30)).sqrt()
        found.widths.add(math.prod(x.shape[axis] for axis in axes))
        ratios.setdefault(name, []).append((x.mean(axes) / deviation).flatten().cpu())

    with shaken(model, noise, seed), hooked(modules, before=watch):
        found.outputs = outputs_of(model, inputs)
    found.means = {name: torch.cat(ratios[name]) for name in norms if name in ratios}
    return found


def _largest_mean(original: dict[str, Tensor], converted: dict[str, Tensor]) -> float:
    """Largest |ratio| / (1 + |ratio in the original|) over all norms and positions."""
    if original.keys() != converted.keys() or any(original[n].shape != converted[n].shape for n in original):
        return float("inf")
    pairs = ((converted[name].abs(), original[name].abs()) for name in original)
    return max((float((now / (1 + before)).max()) for now, before in pairs), default=0.0)
