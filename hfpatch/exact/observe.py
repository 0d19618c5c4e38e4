"""One forward of a model in float64: what it returns, and what its norms and modules see on the way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..measure.float64 import outputs_in_float64
from ..measure.outputs import deviations
from ..runtime.norms import NormFacts

SEED = 7  # of the constants that are added


@dataclass
class Seen:
    """A call of a module: its place in the forward, and the tensor that it was given or returned."""

    place: int
    value: Tensor
    rms: float = 0.0


@dataclass
class Forward:
    """What one forward showed.

    Attributes:
        outputs: name -> tensor, floats as float64.
        means: norm -> the mean over the normalised channels of what each call was given.
        returned: module -> what each call returned, for modules that return a tensor; empty unless watched.
        called: modules that were called; empty unless watched.
    """

    outputs: dict[str, Tensor] = field(default_factory=dict)
    means: dict[str, list[Seen]] = field(default_factory=dict)
    returned: dict[str, list[Seen]] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    calls: int = 0

    def place(self) -> int:
        self.calls += 1
        return self.calls

    def numbers(self) -> dict[str, Tensor]:
        """The outputs and the means, by name."""
        means = {f"{name} {one.place}": one.value for name, calls in self.means.items() for one in calls}
        return {**self.outputs, **means}

    def extend(self, other: Forward, name: str) -> None:
        """Add a later forward: its calls come later, its outputs go by names of their own where it has a name."""
        for new in (seen for calls in (*other.means.values(), *other.returned.values()) for seen in calls):
            new.place += self.calls
        self.outputs |= {f"{key} ({name})" if name else key: value for key, value in other.outputs.items()}
        for own, its in ((self.means, other.means), (self.returned, other.returned)):
            for key, calls in its.items():
                own.setdefault(key, []).extend(calls)
        self.called |= other.called
        self.calls += other.calls


def observe(
    model: nn.Module, inputs: Mapping[str, Any], norms: Mapping[str, NormFacts] | None = None, watch: bool = False
) -> Forward:
    """Run the model once, in float64 and with random numbers of its own.

    Args:
        model: in float64.
        inputs: keyword arguments of its forward.
        norms: the norms whose inputs are looked at.
        watch: keep what every module returned.
    """
    seen = Forward()
    with ExitStack() as hooks:
        for name, facts in (norms or {}).items():
            module = model.get_submodule(name)
            hook = module.register_forward_pre_hook(_mean_of_input(seen, name, facts), with_kwargs=True)
            hooks.callback(hook.remove)
        if watch:
            for name, module in model.named_modules():
                hooks.callback(module.register_forward_hook(_returned(seen, name)).remove)
        seen.outputs = outputs_in_float64(model, inputs)
    return seen


def _mean_of_input(seen: Forward, name: str, facts: NormFacts) -> Any:
    axes = (1,) if facts.channels_first else tuple(range(-max(1, len(facts.shape)), 0))

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
        x = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if x is not None and x.numel():
            rms = float(torch.linalg.vector_norm(x)) / x.numel() ** 0.5
            seen.means.setdefault(name, []).append(Seen(seen.place(), x.mean(axes), rms))

    return hook


def _returned(seen: Forward, name: str) -> Any:
    def hook(module: nn.Module, args: tuple, output: Any) -> None:
        place = seen.place()
        seen.called.add(name)
        if isinstance(output, Tensor) and output.is_floating_point():
            seen.returned.setdefault(name, []).append(Seen(place, output.clone()))

    return hook


def relative_error(original: Forward, other: Forward) -> float:
    """Largest difference of the outputs, relative to each one's largest value; infinite where incomparable."""
    return max(deviation.peak_error for deviation in deviations(original.outputs, other.outputs))


def moved(original: Forward, other: Forward, least: float = 1e-6) -> dict[str, int]:
    """Norms whose input's mean isn't what it was, and the place of the first call where."""
    found = {}
    for name, calls in original.means.items():
        others = other.means.get(name, [])
        if len(others) != len(calls):
            continue
        for old, new in zip(calls, others, strict=True):
            same = old.value.shape == new.value.shape
            if same and float((old.value - new.value).abs().max()) > least * max(old.rms, 1e-12):
                found[name] = new.place
                break
    return found


@contextmanager
def added(tensors: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Each tensor with the second of its pair added, inside; the same bits as before afterwards."""
    before = [tensor.clone() for tensor, _ in tensors]
    with torch.no_grad():
        try:
            for tensor, change in tensors:
                tensor.add_(change)
            yield
        finally:
            for (tensor, _), old in zip(tensors, before, strict=True):
                tensor.copy_(old)


@contextmanager
def added_to_outputs(modules: list[tuple[nn.Module, int]]) -> Iterator[list[Tensor]]:
    """Random constants, one for all places along an axis, added to what the modules return; yields them, call by call.

    They are as large as the output's root mean square.
    """
    generator, drawn = torch.Generator().manual_seed(SEED), []

    def add(axis: int) -> Any:
        def hook(module: nn.Module, args: tuple, output: Any) -> Any:
            shape = list(output.shape)
            shape[axis] = 1
            constant = torch.randn(shape, generator=generator, dtype=torch.float64)
            drawn.append(constant * max(float(output.square().mean().sqrt()), 1e-6))
            return output + drawn[-1]

        return hook

    with ExitStack() as hooks:
        for module, axis in modules:
            hooks.callback(module.register_forward_hook(add(axis)).remove)
        yield drawn
