"""StoredTensor: a tensor whose values stay in a file and are read anew for every operation.

A model of such tensors runs, is patched and is saved with one operand in memory at a time. Each operation maps the
file, applies what was changed since, computes with an ordinary tensor, and lets go of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

_ALIASES = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)


class _Values:
    """Where values come from; tensors that are aliases of each other share it."""

    def __init__(self, read: Callable[[], Tensor], memory: Tensor | None = None) -> None:
        self.read, self.memory = read, memory

    def __call__(self) -> Tensor:
        return self.read() if self.memory is None else self.memory


class StoredTensor(Tensor):
    """A tensor on the CPU that reads its values when an operation takes it.

    Of the operations `detach`, `changed` and assigning to `.data` read nothing. One that writes to it in place brings
    the values into memory for good. Others return ordinary tensors, views too: what is written to such a view isn't
    written here.
    """

    _values: _Values

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, values: _Values) -> StoredTensor:
        new = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device("cpu"))
        new._values = values
        return new

    @classmethod
    def of_file(cls, path: str, key: str) -> StoredTensor:
        """The tensor of that name in a safetensors file."""
        like = _read(path, key)
        return cls(like.shape, like.dtype, _Values(lambda: _read(path, key)))

    def read(self) -> Tensor:
        """The values as an ordinary tensor, mapped from the file where nothing was changed."""
        return self._values()

    def changed(self, change: Callable[[Tensor], Tensor]) -> StoredTensor:
        """A tensor with the values that a function makes of these, whenever they are read."""
        before = self._values
        return StoredTensor(self.shape, self.dtype, _Values(lambda: change(before())))

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, new: Tensor) -> None:
        if new.shape != self.shape or new.dtype != self.dtype:
            raise RuntimeError(f"a {type(self).__name__} of {self.dtype} {tuple(self.shape)} keeps its dtype and shape")
        self._values = new._values if isinstance(new, StoredTensor) else _Values(new.detach, new.detach())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copied = _in_memory(self)  # in memory, so that a copy can change its dtype
        return copied

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _ALIASES:
            return StoredTensor(args[0].shape, args[0].dtype, args[0]._values)
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.is_write and isinstance(value, StoredTensor):
                    value._keep_in_memory()
        args, kwargs = tree_map_only(StoredTensor, StoredTensor.read, (args, kwargs))
        return func(*args, **kwargs)

    def _keep_in_memory(self) -> None:
        if self._values.memory is None:
            self._values.memory = self.read().clone()


def _read(path: str, key: str) -> Tensor:
    with safe_open(path, "pt") as file:  # of its own, so that the pages are unmapped with the tensor
        return file.get_tensor(key)


def is_plain(tensor: Tensor) -> bool:
    """Whether its values are all here, as torch's own class or in a file: not sharded, quantized or fake."""
    return type(tensor.data) in (Tensor, StoredTensor)


def load_stored(model: nn.Module) -> None:
    """Bring a model's Parameters and buffers into memory, as far as they are in files; shared ones stay shared."""
    loaded: dict[int, Tensor] = {}
    for module in model.modules():
        kinds: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in kinds:
            for name, tensor in tensors.items():
                if isinstance(tensor, StoredTensor):
                    if id(tensor) not in loaded:
                        loaded[id(tensor)] = _in_memory(tensor)
                    tensors[name] = loaded[id(tensor)]


def _in_memory(tensor: StoredTensor) -> Tensor:
    """An ordinary tensor, or Parameter, of the same values."""
    values = tensor.read().clone()
    if not isinstance(tensor, nn.Parameter):
        return values
    new = nn.Parameter(values, tensor.requires_grad)
    vars(new).update({name: value for name, value in vars(tensor).items() if name != "_values"})
    return new
