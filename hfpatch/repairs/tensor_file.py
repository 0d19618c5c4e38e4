"""Tensors by name in one temporary file, whose room is used again: the activations of a repair."""

from __future__ import annotations

import tempfile
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..core.mapped import is_storable
from ..core.staging import temporary_files

Key = tuple[Any, ...]


class Scratch:
    """Values by key: tensors, or tuples and dictionaries of tensors and other values; only tensors are in the file.

    A file for each value would take longer to open and remove than to write. This file has no name (in TMPDIR), and is
    gone with the process.
    """

    def __init__(self) -> None:
        self._folder = tempfile.gettempdir()
        with temporary_files(self._folder):
            self._file = tempfile.TemporaryFile(prefix="hfpatch-", buffering=0)  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self._values: dict[Key, Any] = {}
        self._free: dict[int, list[int]] = defaultdict(list)  # size in bytes -> offsets of free room of this size
        self._end = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[Key]:
        return iter([*self._values])

    def put(self, key: Key, value: Any) -> None:
        """Store a value; it replaces a value with the same key.

        Raises:
            PatchError: it can't be written, for example because the disk is full.
        """
        self.drop(key)
        self._values[key] = _map(value, Tensor, self._write)

    def get(self, key: Key) -> Any:
        """Return a value anew, on the CPU."""
        return _map(self._values[key], _Place, self._read)

    def drop(self, key: Key) -> None:
        """Forget a value, if it is there."""
        _map(self._values.pop(key, None), _Place, lambda place: self._free[place.size].append(place.start))

    def _write(self, tensor: Tensor) -> _Place:
        tensor = tensor.detach().cpu()
        tensor = tensor if is_storable(tensor) else tensor.as_subclass(Tensor).contiguous().clone()
        free = self._free[tensor.nbytes]
        place = _Place(free.pop() if free else self._end, tensor)
        self._end = max(self._end, place.start + place.size)
        if place.size:
            data = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data
            with temporary_files(self._folder):
                self._file.seek(place.start)
                while data:
                    data = data[self._file.write(data) :]
        return place

    def _read(self, place: _Place) -> Tensor:
        flat = torch.empty(place.size, dtype=torch.uint8)
        data = flat.numpy().data
        self._file.seek(place.start)
        while data:
            data = data[self._file.readinto(data) :]
        return flat.view(place.dtype).as_strided(place.shape, place.stride)


class _Place:
    """Where in the file a tensor lies, and what it is."""

    def __init__(self, start: int, tensor: Tensor) -> None:
        self.start, self.size, self.dtype = start, tensor.nbytes, tensor.dtype
        self.shape, self.stride = tensor.shape, tensor.stride()


def _map(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """A value in which values of one type are replaced: itself, or its items."""
    if isinstance(value, tuple):
        return tuple(_map(item, kind, change) for item in value)
    if isinstance(value, dict):
        return {name: _map(item, kind, change) for name, item in value.items()}
    return change(value) if isinstance(value, kind) else value
