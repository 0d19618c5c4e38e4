"""A device without float64, emulated on the CPU: Apple's MPS, which refuses to convert a tensor to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

MPS = torch.device("mps", 0)


class OnMPS(TorchFunctionMode):
    """Inside, a model's tensors and whatever is computed from them say that they are on MPS, and refuse float64.

    A tensor is known by its memory. What `.cpu()` or `.to("cpu")` returns is on the CPU; a tensor goes over by
    `.to("mps")`, and new ones are made there under `torch.device("mps")`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.storages = {_place(value): value.untyped_storage() for value in (*model.parameters(), *model.buffers())}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        here = any(self._holds(value) for value in _tensors((args, kwargs)))
        if func == Tensor.device.__get__:
            return MPS if here else func(*args, **kwargs)
        if (
            func in (Tensor.cpu, Tensor.to)
            and here
            and (func is Tensor.cpu or "cpu" in map(_kind, _values(args, kwargs)))
        ):
            moved = args[0].clone()
            self._require_no_float64(args[1:], kwargs)  # not even on the way
            return func(moved, *args[1:], **kwargs)
        arrives = "mps" in map(_kind, _values(args, kwargs))
        if here or arrives:
            self._require_no_float64(args, kwargs)
            if func is Tensor.double:
                raise _refused()
        args = tuple("cpu" if _kind(value) == "mps" else value for value in args)
        kwargs = {name: "cpu" if _kind(value) == "mps" else value for name, value in kwargs.items()}
        if arrives and func is Tensor.to:
            args = (args[0].clone(), *args[1:])
        found = func(*args, **kwargs)
        if here or arrives:
            for value in _tensors(found):
                if value.dtype == torch.float64:
                    raise _refused()
                self.storages[_place(value)] = value.untyped_storage()
        return found

    def _holds(self, value: Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            return not value.is_meta and value.numel() > 0 and _place(value) in self.storages

    def _require_no_float64(self, args: Any, kwargs: Any) -> None:
        if torch.float64 in [value for value in _values(args, kwargs) if isinstance(value, torch.dtype)]:
            raise _refused()


def _refused() -> TypeError:
    return TypeError(
        "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. Please use float32 "
        "instead."
    )


def _place(value: Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return value.untyped_storage().data_ptr()


def _values(args: Any, kwargs: Any) -> list[Any]:
    return [*args, *kwargs.values()]


def _kind(value: Any) -> str | None:
    """The type of a device, or of its name."""
    if isinstance(value, torch.device):
        return value.type
    return value.partition(":")[0] if isinstance(value, str) else None


def _tensors(value: Any) -> list[Tensor]:
    return [one for one in tree_leaves(value) if isinstance(one, Tensor)]
