"""Snapshot of a model's inputs and outputs before a patch, for comparison afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..core.bare import has_weights
from ..runtime.float64 import in_float64
from ..runtime.patch_errors import UnsupportedError, describe_error
from .copies import copy_of
from .media import with_media
from .outputs import (
    DRAWS,
    FACTOR,
    Deviation,
    add_rounding_noise,
    deviating,
    deviations,
    last_bit,
    max_error,
    noise_floor,
    not_a_number,
    outputs_inside,
    outputs_of,
)
from .quiet_forward import CallArguments, cast_for_model, first_tensor, observe_calls

MakeInputs = Callable[[], Mapping[str, Any] | None]  # keyword arguments of a forward; None if they can't be made
OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)  # not the fault of the model or its inputs


@dataclass(frozen=True)
class NormInput:
    """Input of a norm whose mean is measured.

    Attributes:
        axes: the axes over which the norm takes its mean.
        eps: what it adds to the variance.
    """

    axes: tuple[int, ...]
    eps: float


@dataclass
class Forward:
    """Results of one forward: outputs, also of models inside, and mean / standard deviation at norm inputs by position.

    It also holds the widths of these norms.
    """

    outputs: dict[str, Tensor]
    inside: dict[str, list[Tensor]] = field(default_factory=dict)
    means: dict[str, Tensor] = field(default_factory=dict)
    widths: set[int] = field(default_factory=set)


def run(
    model: nn.Module, inputs: Mapping[str, Any], norms: Mapping[str, NormInput], noise: float = 0.0, seed: int = 0
) -> Forward:
    """Return one forward of a model with rounding noise of this size, and the means at the inputs of norms."""
    found, ratios = Forward({}), dict[str, list[Tensor]]()

    def watch(name: str, call: CallArguments) -> None:
        x, axes = in_float64(first_tensor(call).detach()), norms[name].axes
        deviation = (x.var(axes, correction=0) + max(norms[name].eps, 1e-30)).sqrt()
        found.widths.add(math.prod(x.shape[axis] for axis in axes))
        ratios.setdefault(name, []).append((x.mean(axes) / deviation).flatten().cpu())

    modules = {name: model.get_submodule(name) for name in norms}
    with (
        add_rounding_noise(model, noise, seed),
        observe_calls(modules, on_call=watch),
        outputs_inside(model, inputs) as found.inside,
    ):
        found.outputs = outputs_of(model, inputs)
    found.means = {name: torch.cat(ratios[name]) for name in norms if name in ratios}
    return found


def attempt(model: nn.Module, make: MakeInputs) -> dict[str, Tensor] | Exception:
    """Return the outputs of one forward of a copy on new inputs, or the error that prevented it.

    The forward runs on a copy, since some models change their own settings in a forward.

    Args:
        model: isn't changed.
        make: makes the keyword arguments of the forward; if it returns None, there are no outputs.

    Raises:
        MemoryError, torch.OutOfMemoryError: there is too little memory.
    """
    try:
        made = make()
        return {} if made is None else run(copy_of(model, share=True), cast_for_model(model, made), {}).outputs
    except OUT_OF_MEMORY:
        raise
    except Exception as error:  # a forward may raise anything
        return error


def media_inputs(model: Any, seed: int = 0) -> dict[str, Any] | None:
    """Return `with_media`'s inputs of one forward if a model runs on them, else None.

    On text alone a language model's towers of images and sounds don't run, so they would not be measured.
    """
    try:
        made = with_media(model, seed)
    except UnsupportedError:
        return None
    return None if made is None or isinstance(attempt(model, lambda: made), Exception) else made


@dataclass
class Verdict:
    """Measured errors of an exact conversion, each with the tolerance that rounding justifies.

    Attributes:
        error, tolerance: largest difference of an output, divided by the output's root mean square.
        mean, mean_tolerance: largest |mean| at an exact norm's input, divided by the input's standard deviation plus
            the |mean| at that place in the original.
        elsewhere: changed outputs of models inside: "LlamaModel's last_hidden_state"; "" for none.
    """

    error: float
    tolerance: float
    mean: float = 0.0
    mean_tolerance: float = 0.0
    elsewhere: str = ""

    @property
    def holds(self) -> bool:
        """Whether both errors are within their tolerances."""
        return self.error <= self.tolerance and self.mean <= self.mean_tolerance  # False if one is NaN

    @property
    def figures(self) -> str:
        """The errors of the outputs alone, in words."""
        return f"outputs differ by {self.error:.1e}, rounding explains {self.tolerance:.1e}"

    def __str__(self) -> str:
        return (
            f"outputs differ by {self.error:.1e} (rounding explains {self.tolerance:.1e}), means of the norms' inputs "
            f"are {self.mean:.1e} (rounding explains {self.mean_tolerance:.1e})"
        )


class Snapshot:
    """Inputs and outputs of a model before a patch, and with `norms` also the effect of rounding on them; no weights.

    `add_rounding_noise` in the last bit (eps) of the output of every module with Parameters moves the outputs and the
    means at the norms. An exact patch may change outputs by ten times as much, and leave means of the largest of three
    sizes: ten times as much; ten times eps / sqrt(d), the error of a mean of d channels that each have an error in the
    last bit; ten times float32's last bit, since outputs may be centred in every forward.

    Forwards run on copies that share the weights: some models change their own settings in a forward.

    Args:
        model: the model before the patch.
        makers: each makes keyword arguments of one forward, or None; the first with which the model runs are taken.
        norms: inputs of the norms that are to be exact, by name; with them the noise floors are measured. None if
            nothing is checked.

    Attributes:
        inputs: keyword arguments of the forward, on the model's device.
        forward: the results of the forward; None if it didn't run.
        why_not: why it didn't run, in words; "" if it ran.
        error: the exception behind `why_not`, if there was one.

    Raises:
        MemoryError, torch.OutOfMemoryError: there is too little memory to run the model as it is.
    """

    def __init__(
        self, model: nn.Module, makers: Iterable[MakeInputs], norms: Mapping[str, NormInput] | None = None
    ) -> None:
        self.norms = norms or {}
        self.inputs: dict[str, Any] = {}
        self.forward: Forward | None = None
        self.why_not, self.error = "", None
        self.floor: float | None = None
        self.eps = last_bit(model)
        if not has_weights(model):
            self.why_not = "weights aren't in memory"
            return
        for make in makers:
            try:
                if (made := make()) is None:
                    continue
                self.inputs, copied = cast_for_model(model, made), copy_of(model, share=True)
                forward = run(copied, self.inputs, self.norms)
            except OUT_OF_MEMORY:
                raise
            except Exception as error:  # a forward on generated inputs may raise anything
                self.why_not, self.error = describe_error(error), error
                continue
            self.why_not, self.error = "", None
            break
        else:
            return
        if (broken := not_a_number(forward.outputs)) is not None:
            self.why_not = f"its {broken} was NaN throughout before the patch"
            return
        self.forward = forward
        if norms is not None:
            self._measure_floors(copied, forward)

    def _measure_floors(self, model: nn.Module, forward: Forward) -> None:
        width = min(forward.widths, default=1)
        self.floor, self.mean_floor = 0.0, max(self.eps / width**0.5, torch.finfo(torch.float32).eps)
        for seed in range(DRAWS):
            noisy = run(model, self.inputs, self.norms, self.eps, seed)
            self.floor = max(self.floor, max_error(forward.outputs, noisy.outputs))
            moved = {name: mean - forward.means[name] for name, mean in noisy.means.items()}
            self.mean_floor = max(self.mean_floor, _largest_mean(forward.means, moved))

    @property
    def checks(self) -> bool:
        """Whether the noise floors are known, so that what should be exact can be checked."""
        return self.floor is not None

    def verdict(self, model: nn.Module) -> Verdict:
        """Return the verdict on a model whose function should be the same, with the means at its exact norms.

        Raises:
            Exception: the model's forward raises it.
        """
        assert self.forward is not None
        assert self.floor is not None
        now, tolerance = run(copy_of(model, share=True), self.inputs, self.norms), FACTOR * max(self.floor, self.eps)
        return Verdict(
            max_error(self.forward.outputs, now.outputs),
            tolerance,
            _largest_mean(self.forward.means, now.means),
            FACTOR * self.mean_floor,
            self._elsewhere(now, tolerance),
        )

    def _elsewhere(self, now: Forward, tolerance: float) -> str:
        assert self.forward is not None
        return ", ".join(deviating(self.forward.inside, now.inside, tolerance))

    def outputs_after(self, model: nn.Module) -> dict[str, Tensor] | Exception:
        """Return the outputs of a patched model on the same inputs, or the error of its forward.

        Raises:
            MemoryError, torch.OutOfMemoryError: there is too little memory.
        """
        return attempt(model, lambda: self.inputs)

    def deviations(self, outputs: Mapping[str, Tensor]) -> list[Deviation]:
        """Return how far outputs are from the outputs before the patch, one deviation an output."""
        assert self.forward is not None
        return deviations(self.forward.outputs, outputs)

    def within_rounding(self, model: nn.Module, error: float) -> Verdict:
        """Return the verdict on an error of a patched model's outputs: rounding in either model may explain it."""
        floor = max(last_bit(model), self.floor or 0.0)
        floor = max(floor, noise_floor(copy_of(model, share=True), self.inputs) if error > FACTOR * floor else 0.0)
        now, tolerance = run(copy_of(model, share=True), self.inputs, {}), FACTOR * floor
        return Verdict(error, tolerance, elsewhere=self._elsewhere(now, tolerance))


def _largest_mean(original: dict[str, Tensor], converted: dict[str, Tensor]) -> float:
    """Largest |ratio| / (1 + |ratio in the original|) over all norms and positions, except for NaN in the original."""
    if original.keys() != converted.keys() or any(original[n].shape != converted[n].shape for n in original):
        return float("inf")
    known = {name: ~ratio.isnan() for name, ratio in original.items()}  # padding may be NaN
    pairs = ((converted[name][known[name]].abs(), original[name][known[name]].abs()) for name in original)
    return max((float((new / (1 + old)).max()) for new, old in pairs if len(old)), default=0.0)
