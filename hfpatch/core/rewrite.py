"""A change of a Parameter's values in place, with an inverse that is exact to the bit and much smaller than a copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

CHUNK = 2**16  # elements worked on at once; a few float64 copies of them are all the memory that a rewrite takes
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(eq=False)
class Rewrite:
    """new = forward(old), in float64 and rounded to the Parameter's dtype; only what backward(new) misses is kept.

    | kind | forward | backward |
    |---|---|---|
    | "centre" | x - mean(x) over `axis` | x + mean |
    | "add" | x + operand | x - operand |
    | "multiply" | x * operand | x / operand |
    | "ones" | 1 | x * operand, the old values |

    Where the Parameter was trained in between, `undo` applies backward to what training made of it: the mean is added
    back, the scale taken off. Where it wasn't, every bit is restored. A Parameter that has grown or shrunk along one
    axis since (a resized vocabulary) is undone as far as the two overlap; one of another shape stays as it is.

    Attributes:
        module, name: the holder, rather than the Parameter, which loading or moving the model may exchange.
        kind: of the table.
        axis: of "centre".
        operand: float64, of a shape that broadcasts against the Parameter; "centre" fills it.
        split: the axis along which chunks are cut; never one that is reduced.
        kept: (start, length, flat indices into the chunk or None for all, old values) for each finished chunk.
        pending: (start, old chunk) while a chunk is being written.
    """

    module: nn.Module
    name: str
    kind: str
    axis: int | None = None
    operand: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    shape: torch.Size = field(init=False)
    split: int = field(init=False)
    kept: list[tuple[int, int, Tensor | None, Tensor]] = field(default_factory=list)
    pending: tuple[int, Tensor] | None = None

    def __post_init__(self) -> None:
        value = self._value()
        self.shape = value.shape
        free = [i for i in range(value.dim()) if i != self.axis] or [0]
        self.split = max(free, key=lambda i: value.shape[i])
        if self.kind == "centre":
            means = [1 if i == self.axis else size for i, size in enumerate(value.shape)]
            self.operand = torch.zeros(means, dtype=torch.float64, device=_work_device(value))

    def _value(self) -> Tensor:
        value = self.module._parameters[self.name]
        assert value is not None
        return value.detach()

    def run(self) -> None:
        """Write the new values."""
        value = self._value()
        with torch.inference_mode(value.is_inference()), torch.no_grad():
            for start, length in self._chunks():
                part = value.narrow(self.split, start, length)
                old = part.to(_work_device(value), copy=True)
                operand = self._operand(start, length, old.device)
                if self.kind == "centre":
                    operand.copy_(old.double().mean(self.axis, keepdim=True))
                new = self._forward(old, operand)
                missed = _bits(self._backward(new, operand)) != _bits(old)
                self.pending = (start, old)
                part.copy_(new)
                self.kept.append((start, length, *_smallest(missed, old)))
                self.pending = None

    def _chunks(self) -> Iterator[tuple[int, int]]:
        size = self.shape[self.split] if self.shape else 0
        step = size
        if self.shape.numel() > CHUNK and not (self.axis is not None and len(self.shape) == 1):
            step = max(1, CHUNK * size // self.shape.numel())
        for start in range(0, size, max(step, 1)):
            yield start, min(step, size - start)

    def _operand(self, start: int, length: int, device: torch.device) -> Tensor:
        operand = self.operand if self.operand.device == device else self.operand.to(device)
        if operand.dim() != len(self.shape) or operand.shape[self.split] == 1:
            return operand
        return operand.narrow(self.split, start, length)

    def _forward(self, x: Tensor, operand: Tensor) -> Tensor:
        wide = x.double()
        if self.kind == "centre":
            wide = wide - operand
        elif self.kind == "add":
            wide = wide + operand
        elif self.kind == "multiply":
            wide = wide * operand
        else:
            wide = torch.ones_like(wide)
        return wide.to(x.dtype)

    def _backward(self, x: Tensor, operand: Tensor) -> Tensor:
        wide = x.double()
        if self.kind == "centre":
            wide = wide + operand
        elif self.kind == "add":
            wide = wide - operand
        elif self.kind == "multiply":
            wide = wide / operand
        else:
            wide = wide * operand
        return wide.to(x.dtype)

    def undo(self) -> None:
        """Bring the old values back; whatever was written by then, all, some or none."""
        value = self._value()
        others = [i for i in range(len(self.shape)) if i != self.split]
        if value.dim() != len(self.shape) or any(value.shape[i] != self.shape[i] for i in others):
            return
        with torch.inference_mode(value.is_inference()), torch.no_grad():
            if self.pending is not None:
                start, old = self.pending
                value.narrow(self.split, start, old.shape[self.split]).copy_(old)
            for start, length, indices, old in self.kept:
                if self.pending is None or start != self.pending[0]:
                    self._undo_chunk(value, start, length, indices, old)

    def _undo_chunk(self, value: Tensor, start: int, length: int, indices: Tensor | None, old: Tensor) -> None:
        size = min(length, value.shape[self.split] - start)
        if size <= 0:
            return
        part = value.narrow(self.split, start, size)
        now = part.to(_work_device(value))
        operand = self._operand(start, length, now.device)
        back = self._backward(now, operand.narrow(self.split, 0, size) if _long(operand, self.split) else operand)
        chunk = [length if i == self.split else n for i, n in enumerate(self.shape)]
        if indices is None:
            indices = torch.arange(old.numel(), device=old.device)
        places = torch.unravel_index(indices.to(now.device), chunk)
        inside = places[self.split] < size
        places, old = tuple(place[inside] for place in places), old.to(now.device)[inside]
        at = (
            tuple(0 if n == 1 else place for n, place in zip(operand.shape, places, strict=True))
            if operand.dim()
            else ()
        )
        written = self._forward(old, operand[at]).to(now.dtype)
        same = _bits(written) == _bits(now[places])  # not trained since
        back[tuple(place[same] for place in places)] = old[same].to(now.dtype)
        part.copy_(back)


def _long(operand: Tensor, axis: int) -> bool:
    return operand.dim() > axis and operand.shape[axis] != 1


def _work_device(value: Tensor) -> torch.device:
    return torch.device("cpu") if value.device.type == "mps" else value.device  # which has no float64


def _bits(x: Tensor) -> Tensor:
    return x.view(_INTEGERS[x.element_size()])


def _smallest(missed: Tensor, old: Tensor) -> tuple[Tensor | None, Tensor]:
    """Indices and old values, or all old values where those would take less."""
    indices = missed.flatten().nonzero().flatten().to(torch.int32)
    if indices.numel() * (4 + old.element_size()) >= old.numel() * old.element_size():
        return None, old.flatten().clone()
    return indices, old.flatten()[indices.long()]
