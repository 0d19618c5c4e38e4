"""Runs the forward of a small model entirely in float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..runtime.patch_errors import PatchError, UnsupportedError
from .outputs import Outputs, without_padding
from .quiet_forward import cast
from .randomness import seed_deterministically

_NARROW = {torch.float32, torch.float16, torch.bfloat16}
_NARROWING = {Tensor.float, Tensor.half, Tensor.bfloat16}
_FACTORIES = {torch.tensor, torch.full}


class Float64(TorchFunctionMode):
    """Torch mode that computes everything narrower than float64 in float64.

    Many families widen or narrow to float32 inside, whatever the model's dtype is; rounding would then hide the
    difference between invariant and nearly invariant outputs. Only code inside the `with`, on this thread, is affected.
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
            kwargs = {**kwargs, "dtype": torch.float64}  # float64's least number doesn't fit into the default dtype
        result = func(*args, **kwargs)
        return result.double() if type(result) is Tensor and result.dtype in _NARROW else result


def _is_narrow(value: Any) -> bool:
    return type(value) is torch.dtype and value in _NARROW


def _is_float(values: Any) -> bool:
    return isinstance(values, float) or (isinstance(values, list | tuple) and any(map(_is_float, values)))


@contextmanager
def host_errors(message: str = "{error}") -> Iterator[None]:
    """Context that turns errors of a model's own code into an UnsupportedError with its last line."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError, PatchError):
        raise
    except Exception as error:
        lines = str(error).strip().splitlines()
        last = f"{type(error).__name__}: {lines[-1] if lines else '':.160}"
        raise UnsupportedError(message.replace("{error}", last)) from error


def outputs_in_float64(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return one forward's outputs by name, in float64, without positions of padding; the random state is restored.

    Args:
        model: in float64, on the CPU.
        inputs: keyword arguments of its forward; they are copied, for forwards that write into them.

    Raises:
        UnsupportedError: the forward fails.
    """
    inputs = cast(inputs, torch.device("cpu"), torch.float64)
    with seed_deterministically(0), torch.no_grad(), Float64(), host_errors():
        returned = model(**inputs)
    outputs = without_padding(Outputs.of(returned).tensors, model, inputs)
    return {name: x.double() if x.is_floating_point() else x for name, x in outputs.items()}
