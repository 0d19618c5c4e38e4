"""One forward of a model in float64: what it returns, and what its norms and modules see on the way."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..measure.randomness import own_randomness
from ..runtime.norms import NormFacts

# Collections of tensors that other forwards or readers take, in other coordinates when the stream is centred
_INTERNAL = {"hidden_states", "attentions", "past_key_values", "mems", "cache_params"}
_NARROW = {torch.float32, torch.float16, torch.bfloat16}
_NARROWING = {Tensor.float, Tensor.half, Tensor.bfloat16}
_FACTORIES = {torch.tensor, torch.full}


class Float64(TorchFunctionMode):
    """Everything that would be computed in float32 or less is computed in float64.

    Many families widen or narrow to float32 inside whatever the model's dtype is; rounding would then hide the
    difference between what is invariant and what nearly is. Only code inside the `with`, on this thread, is concerned.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _NARROWING:
            return args[0].double()
        kwargs = kwargs or {}
        if any(map(_is_narrow, args)):
            args = tuple(torch.float64 if _is_narrow(value) else value for value in args)
        if _is_narrow(kwargs.get("dtype")):
            kwargs = {**kwargs, "dtype": torch.float64}
        elif func in _FACTORIES and kwargs.get("dtype") is None and _is_float(args):
            kwargs = {**kwargs, "dtype": torch.float64}  # the least float64 doesn't fit into the default dtype
        result = func(*args, **kwargs)
        return result.double() if type(result) is Tensor and result.dtype in _NARROW else result


def _is_narrow(value: Any) -> bool:
    return type(value) is torch.dtype and value in _NARROW


def _is_float(values: Any) -> bool:
    return isinstance(values, float) or (isinstance(values, list | tuple) and any(map(_is_float, values)))


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

    def then(self, other: Forward, name: str) -> Forward:
        """Both forwards as one: another's outputs go by names of their own, its calls come later."""
        for new in (seen for calls in (*other.means.values(), *other.returned.values()) for seen in calls):
            new.place += self.calls
        self.outputs |= {f"{key} ({name})": value for key, value in other.outputs.items()}
        for own, its in ((self.means, other.means), (self.returned, other.returned)):
            for key, calls in its.items():
                own.setdefault(key, []).extend(calls)
        self.called |= other.called
        self.calls += other.calls
        return self


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
    with ExitStack() as hooks, own_randomness(0), torch.no_grad(), Float64():
        for name, facts in (norms or {}).items():
            module = model.get_submodule(name)
            hook = module.register_forward_pre_hook(_mean_of_input(seen, name, facts), with_kwargs=True)
            hooks.callback(hook.remove)
        if watch:
            for name, module in model.named_modules():
                hooks.callback(module.register_forward_hook(_returned(seen, name)).remove)
        result = model(**{name: _own(value) for name, value in inputs.items()})
    seen.outputs = dict(_tensors(result))
    return seen


def _own(value: Any) -> Any:
    """A copy, for forwards that write into their inputs."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {key: _own(one) for key, one in value.items()}
    return type(value)(_own(one) for one in value) if type(value) in (list, tuple) else value


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


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name or "output", value.double() if value.is_floating_point() else value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            if isinstance(one, Tensor) or not any(str(key).endswith(internal) for internal in _INTERNAL):
                yield from _tensors(one, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for place, one in enumerate(value):
            yield from _tensors(one, f"{name}[{place}]")


def relative_error(original: Forward, other: Forward) -> float:
    """Largest difference of the outputs, relative to each one's largest value; infinite where incomparable."""
    if original.outputs.keys() != other.outputs.keys():
        return float("inf")
    return max((_error(value, other.outputs[name]) for name, value in original.outputs.items()), default=0.0)


def _error(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    if not a.is_floating_point():
        return 0.0 if torch.equal(a, b) else float("inf")
    difference = float((a - b).abs().max()) if a.numel() else 0.0
    if math.isfinite(difference):
        return difference / max(float(a.abs().max()), 1e-30) if a.numel() else 0.0
    finite = a.isfinite()
    if not torch.equal(finite, b.isfinite()) or not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
        return float("inf")
    if not finite.any():
        return 0.0
    return float((a - b)[finite].abs().max() / a[finite].abs().max().clamp_min(1e-30))


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
def added_to_outputs(modules: list[tuple[nn.Module, int]], size: float, seed: int) -> Iterator[list[Tensor]]:
    """Random constants, one for all places along an axis, added to what the modules return; yields them, call by call.

    `size` is relative to the output's root mean square.
    """
    generator, drawn = torch.Generator().manual_seed(seed), []

    def add(axis: int) -> Any:
        def hook(module: nn.Module, args: tuple, output: Any) -> Any:
            shape = list(output.shape)
            shape[axis] = 1
            constant = torch.randn(shape, generator=generator, dtype=torch.float64)
            drawn.append(constant * size * max(float(output.square().mean().sqrt()), 1e-6))
            return output + drawn[-1]

        return hook

    with ExitStack() as hooks:
        for module, axis in modules:
            hooks.callback(module.register_forward_hook(add(axis)).remove)
        yield drawn
