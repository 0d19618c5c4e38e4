"""Linear maps: `nn.Linear` and Conv1D, routers, and experts whose weights are stacked in one Parameter.

For routers and experts, the Parameters that multiply the input, and those that make the output, are found by running
the module: transforming them must have the same effect as transforming the input, or the output.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..measure.copies import copy_of
from ..measure.quiet_forward import CallArguments, first_tensor

Axes = tuple[tuple[str, int], ...]  # names of Parameters, each with an axis
_TOLERANCE = 1e-4  # relative; the module runs in float32: experts' kernels take no float64
_ROWS = 64  # of its input that it runs on


def is_linear_map(module: nn.Module) -> bool:
    """Return whether a module computes x W + b over the last axis with its own floating-point weight."""
    weight = module._parameters.get("weight")  # absent where it is parametrised
    return isinstance(module, nn.Linear | Conv1D) and weight is not None and weight.is_floating_point()


def required_arguments(module: nn.Module) -> list[str]:
    """Return the arguments beyond the first that a forward requires."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[2:]
    named = (p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
    return [p.name for p in named if p.default is p.empty]


def holds_maps(module: nn.Module) -> bool:
    """Return whether a module may be a router or experts: it has matrices itself, and isn't a usual kind of layer.

    Modules inside may hold vectors (a bias on a router's choice), but no matrices, which would be maps themselves, and
    none may be called a norm.
    """
    usual = (nn.Linear, Conv1D, nn.Embedding, nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase)
    if isinstance(module, usual) or type(module).__module__.startswith("torch.nn."):
        return False
    inside = [one for child in module.children() for one in child.modules() if [*one.parameters(recurse=False)]]
    if any(_is_matrix(p) for one in inside for p in one.parameters()):
        return False
    own = (p for p in module._parameters.values() if p is not None and p.dim() in (2, 3) and p.is_floating_point())
    return any(map(_is_matrix, own)) and not any("norm" in type(one).__name__.lower() for one in inside)


def _is_matrix(value: Tensor) -> bool:
    """Whether two axes are longer than 1: (1, d) is a vector."""
    return value.numel() > max(value.shape, default=1)


def reading_axes(module: nn.Module, call: CallArguments) -> Axes | None:
    """Return the Parameters that a module multiplies its input by: f(x T) = f'(x). None if there are none."""
    return _axes(module, call, reads=True)


def writing_axes(module: nn.Module, call: CallArguments) -> Axes | None:
    """Return the Parameters that produce a module's output: f(x) T = f'(x). None if there are none."""
    return _axes(module, call, reads=False)


def transform_along_axis(value: Tensor, transform: Tensor, axis: int, reads: bool) -> Tensor:
    """Return a Parameter's values after a transform T (n, n) along an axis: T v where the axis reads x, else v T."""
    moved = value.movedim(axis, -1) @ (transform.T if reads else transform)
    return moved.movedim(-1, axis)


def _axes(module: nn.Module, call: CallArguments, reads: bool) -> Axes | None:
    """Return the Parameters along whose axes a transform does what it does to the input (`reads`), or to the output."""
    x = first_tensor(call)
    rows = len(x)
    work = copy_of(module, dtype=torch.float32, device="cpu")

    def as_given(value: Any) -> Any:
        """An argument as the copy takes it: of what has a row for each row of x, the first ones."""
        if not isinstance(value, Tensor):
            return value
        value = given_x[0] if value is x else value.to("cpu", torch.float32 if value.is_floating_point() else None)
        return value[:_ROWS] if value.dim() and len(value) == rows else value

    def run() -> Tensor:
        args, kwargs = [*map(as_given, call.args)], {name: as_given(value) for name, value in call.kwargs.items()}
        with torch.no_grad():
            return first_tensor(work(*args, **kwargs)).clone()

    generator = torch.Generator().manual_seed(0)
    for parameter in work.parameters():  # biases of zero would seem to have no part in the output
        parameter.data += torch.randn(parameter.shape, generator=generator)
    given_x = [x.detach().to("cpu", torch.float32)]
    plain = run()
    width = (x if reads else plain).shape[-1]
    noise = torch.randn(width, width, generator=generator)
    transform = torch.eye(width, dtype=torch.float32) + 0.1 * noise / width**0.5
    if reads:
        given_x[0] = given_x[0] @ transform
        expected = run()
        given_x[0] = x.detach().to("cpu", torch.float32)
    else:
        expected = plain @ transform
    for axes in _candidates(work, width):
        before = {name: work.get_parameter(name).data for name, _ in axes}
        for name, axis in axes:
            work.get_parameter(name).data = transform_along_axis(before[name], transform, axis, reads)
        error = (run() - expected).abs().max()
        for name, _ in axes:
            work.get_parameter(name).data = before[name]
        if error <= _TOLERANCE * expected.abs().max():
            return axes
    return None


def _candidates(module: nn.Module, width: int) -> Iterator[Axes]:
    """One or two Parameters with an axis of that width, the last two axes of each."""
    places = [
        (name, axis)
        for name, p in module._parameters.items()
        if p is not None and p.is_floating_point()
        for axis in (-1, -2)
        if p.dim() > (axis == -2) and p.shape[axis] == width and p.dim() >= -axis
    ]
    for count in (1, 2):
        for some in itertools.combinations(places, count):
            if len({name for name, _ in some}) == count:
                yield some
