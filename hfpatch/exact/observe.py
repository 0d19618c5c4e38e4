"""Runs a model once in float64 and records outputs, module outputs and the means at norm inputs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..measure.float64_forward import outputs_in_float64
from ..measure.outputs import max_error
from ..measure.quiet_forward import CallArguments, first_tensor, observe_calls
from ..measure.snapshot import NormInput
from ..runtime.norms import NormFacts
from ..sites.norm_facts import describe

SEED = 7  # for the constants that are added
_MOVED = 1e-6  # least change of a mean that counts, relative to the root mean square


@dataclass
class ObservedCall:
    """Observed call of a module.

    Attributes:
        index: number of the call in the forward.
        value: the output of a module, or the mean over channels of a norm's input.
        rms: root mean square of a norm's input.
    """

    index: int
    value: Tensor
    rms: float = 0.0


@dataclass
class Observation:
    """Observation of one forward, or of several.

    Attributes:
        outputs: the model's outputs, name -> tensor, floats as float64.
        means: norm -> the mean of its input over the normalised channels, for each call.
        returned: module -> its output in each call, for modules that return a tensor; empty unless `watch` was set.
        called: modules that were called; empty unless `watch` was set.
        calls: number of recorded calls.
    """

    outputs: dict[str, Tensor] = field(default_factory=dict)
    means: dict[str, list[ObservedCall]] = field(default_factory=dict)
    returned: dict[str, list[ObservedCall]] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    calls: int = 0

    def numbers(self) -> dict[str, Tensor]:
        """Return all outputs and means, by name."""
        means = {f"{name} {one.index}": one.value for name, calls in self.means.items() for one in calls}
        return {**self.outputs, **means}


def observe(
    model: nn.Module,
    inputs: Mapping[str, Any],
    norms: Mapping[str, NormFacts] | None = None,
    watch: bool = False,
    seen: Observation | None = None,
    name: str = "",
) -> Observation:
    """Run a model once in float64; the random state is restored.

    Args:
        model, inputs: as in `outputs_in_float64`.
        norms: norms whose inputs' means are recorded.
        watch: record every module's output as well.
        seen: observation of earlier forwards, to which this forward is added.
        name: is added to the names of this forward's outputs.
    """
    seen, known = seen or Observation(), norms or {}

    def mean_of_input(norm: str, call: CallArguments) -> None:
        x = _numbers(first_tensor(call))
        if x.numel():
            seen.calls += 1
            rms = float(torch.linalg.vector_norm(x)) / x.numel() ** 0.5
            seen.means.setdefault(norm, []).append(ObservedCall(seen.calls, x.mean(channel_axes(known[norm])), rms))

    def returned(module: str, output: Any) -> None:
        seen.calls += 1
        seen.called.add(module)
        if isinstance(output, Tensor) and output.is_floating_point():
            seen.returned.setdefault(module, []).append(ObservedCall(seen.calls, _numbers(output)))

    with (
        observe_calls({norm: model.get_submodule(norm) for norm in known}, on_call=mean_of_input),
        observe_calls(dict(model.named_modules()) if watch else {}, on_result=returned),
    ):
        outputs = outputs_in_float64(model, inputs)
    seen.outputs |= {f"{key} ({name})" if name else key: value for key, value in outputs.items()}
    return seen


def _numbers(x: Tensor) -> Tensor:
    """A copy with 0 for NaN, which may stand at padding and compares with nothing."""
    return x.nan_to_num(0.0, math.inf, -math.inf)


def channel_axes(facts: NormFacts) -> tuple[int, ...]:
    """Return the axes of a norm's input that the norm normalises."""
    return (1,) if facts.channels_first else tuple(range(-max(1, len(facts.shape)), 0))


def norm_inputs(model: nn.Module, norms: Iterable[str]) -> dict[str, NormInput]:
    """Return the inputs of norms, by name, as `measure.snapshot.run` measures their means."""
    found = {name: describe(model.get_submodule(name)) for name in norms}
    return {name: NormInput(channel_axes(facts), facts.eps or 0.0) for name, facts in found.items() if facts}


def relative_error(original: Observation, other: Observation) -> float:
    """Return the largest difference of outputs, relative to each output's RMS; infinite if incomparable."""
    return max_error(original.outputs, other.outputs)


def norms_with_changed_mean(original: Observation, other: Observation) -> dict[str, int]:
    """Return norms whose input's mean differs between two forwards -> index of the first call in which it does."""
    found = {}
    for name, calls in original.means.items():
        others = other.means.get(name, [])
        if len(others) != len(calls):
            continue
        for old, new in zip(calls, others, strict=True):
            same = old.value.shape == new.value.shape
            if same and float((old.value - new.value).abs().max()) > _MOVED * max(old.rms, 1e-12):
                found[name] = new.index
                break
    return found


@contextmanager
def add_constants(
    modules: Mapping[str, nn.Module], axis: int, size: float = 1.0, seed: int = SEED, argument: str = ""
) -> Iterator[list[Tensor]]:
    """Context that adds random values, constant along an axis, to what modules return; yields them call by call.

    Args:
        size: relative to the root mean square of the tensor that the values are added to.
        argument: name of the argument to which the values are added instead.
    """
    generator, drawn = torch.Generator().manual_seed(seed), list[Tensor]()

    def add(_: str, value: Tensor) -> Tensor:
        shape = list(value.shape)
        shape[axis] = 1
        constant = torch.randn(shape, generator=generator, dtype=torch.float64)
        drawn.append(constant * size * max(float(value.square().mean().sqrt()), 1e-6))
        return value + drawn[-1]

    def add_to_argument(name: str, call: CallArguments) -> CallArguments:
        value = named_arguments(modules[name], call).get(argument)
        if not isinstance(value, Tensor):
            return call
        new = {id(value): add(name, value)}
        return CallArguments(
            tuple(new.get(id(one), one) for one in call.args),
            {key: new.get(id(one), one) if key == argument else one for key, one in call.kwargs.items()},
        )

    with observe_calls(modules, **({"on_call": add_to_argument} if argument else {"on_result": add})):
        yield drawn


def named_arguments(module: nn.Module, call: CallArguments) -> dict[str, Any]:
    """Return a call's arguments by the names that the module's forward has for them."""
    return {**dict(zip(inspect.signature(module.forward).parameters, call.args, strict=False)), **call.kwargs}
