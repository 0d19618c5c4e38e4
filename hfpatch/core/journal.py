"""Rollback journal: tensors on disk, in a file without a name that is gone with the process, read back bit for bit."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import IO

import torch
from torch import Tensor

from .staging import temporary_files


@dataclass(frozen=True)
class Entry:
    """A tensor in a journal.

    Attributes:
        shape, stride, dtype, device, inference: of the tensor; inference is whether it is one of inference mode.
    """

    journal: Journal
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    inference: bool

    def tensor(self, device: torch.device | None = None) -> Tensor:
        """A new tensor of the same bits and strides, on its device or another."""
        with torch.inference_mode(self.inference):
            new = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device or self.device)
            self.copy_to(new)
        return new

    def copy_to(self, target: Tensor) -> None:
        """Overwrite a tensor of the same shape, strides and dtype."""
        assert target.stride() == self.stride
        self.journal.read(self.offset, target)


class Journal:
    """A temporary file (where TMPDIR says) that tensors are appended to; made with the first one."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None

    def write(self, tensor: Tensor) -> Entry:
        """Append a plain tensor that `is_dense`.

        Raises:
            PatchError: the file can't be written; a full disk, for one.
        """
        with temporary_files(tempfile.gettempdir()), torch.no_grad():
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="hfpatch-")  # noqa: SIM115  # open until `close`
            offset = self._file.seek(0, 2)
            self._file.write(_bytes(_flat(tensor.detach()).cpu()))
            self._file.flush()
        place = tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.is_inference()
        return Entry(self, offset, *place)

    def read(self, offset: int, target: Tensor) -> None:
        """Fill a tensor with what was written at a place."""
        assert self._file is not None
        self._file.seek(offset)
        flat = _flat(target)
        read = flat if flat.device.type == "cpu" else torch.empty_like(flat, device="cpu")
        self._file.readinto(_bytes(read))  # type: ignore[attr-defined]
        if read is not flat:
            flat.copy_(read)

    def close(self) -> None:
        """Give the disk its room back; what was stored is gone."""
        if self._file is not None:
            self._file.close()


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements lie side by side in memory, in some order of its axes."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


def _flat(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in the order in which they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _bytes(flat: Tensor) -> memoryview:
    return flat.view(torch.uint8).numpy().data
