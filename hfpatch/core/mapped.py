"""Tensors in files: memory-mapped (pages are read on use, and freed by `release`), or by names in a temporary file."""

from __future__ import annotations

import math
import mmap
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import torch
from torch import Tensor, nn

from .staging import temporary_files

Key = tuple[Any, ...]
MAPPED = "_hfpatch_mapped"  # attribute of a model whose weights are mapped from its checkpoint: the `Mappings`


class Mappings:
    """Files that stay memory-mapped while tensors of them live.

    A mapped tensor is an ordinary tensor. Values written in place to a checkpoint's tensor are lost by `release`, and
    never reach the file.
    """

    def __init__(self) -> None:
        self._maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()  # tensors hold them

    def __deepcopy__(self, memo: dict[int, object]) -> Mappings:
        return self  # a copy of the model is of the same files

    def map(self, file: IO[bytes], access: int = mmap.ACCESS_COPY) -> mmap.mmap:
        """Map a file; it may be closed afterwards."""
        new = mmap.mmap(file.fileno(), 0, access=access)
        self._maps.add(new)
        return new

    def store(self, tensor: Tensor) -> Tensor:
        """Write a tensor to an unnamed temporary file (in TMPDIR) and map it: a CPU tensor of the same strides.

        Raises:
            PatchError: the file can't be written, for example because the disk is full.
        """
        with temporary_files(tempfile.gettempdir()), torch.no_grad(), tempfile.TemporaryFile(prefix="hfpatch-") as file:
            file.write(_flatten(tensor.detach()).cpu().view(torch.uint8).numpy().data)
            file.flush()
            flat = map_tensor(self.map(file, mmap.ACCESS_WRITE), tensor.dtype, (tensor.numel(),))
        return flat.as_strided(tensor.shape, tensor.stride())

    def release(self) -> None:
        """Free the pages that were read; they are read again on use."""
        for one in self._maps:
            if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
                one.madvise(mmap.MADV_DONTNEED)


def map_tensor(file: mmap.mmap, dtype: torch.dtype, shape: tuple[int, ...], start: int = 0) -> Tensor:
    """Return a tensor of a mapped file, from a byte offset."""
    count = math.prod(shape)
    return torch.frombuffer(file, dtype=dtype, count=count, offset=start).view(shape) if count else torch.empty(shape)


def read_into_memory(model: nn.Module) -> None:
    """Read a model's memory-mapped weights into memory."""
    if vars(model).pop(MAPPED, None) is not None:
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()


@contextmanager
def unload_after_forward(model: nn.Module) -> Iterator[None]:
    """Context in which a module's mapped weights are released after its forward."""
    mappings: Mappings | None = vars(model).get(MAPPED)
    hook = mappings and nn.modules.module.register_module_forward_hook(lambda *_: mappings.release())
    try:
        yield
    finally:
        if hook:
            hook.remove()


def is_storable(tensor: Tensor) -> bool:
    """Return whether a tensor is plain and its elements are contiguous in memory, in some order of its axes."""
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return False
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


def _flatten(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in the order in which they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


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
