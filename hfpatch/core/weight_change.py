"""Weight changes: changes of Parameters' values as data that can be printed, applied and undone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..runtime.edits import pattern_of
from ..runtime.float64 import float64_device, in_float64

_PIECE = 2**18  # elements converted to float64 at once
_ROWS = 4096  # rows of a weight that are multiplied at once


@dataclass(frozen=True)
class Product:
    """Operand W v in float64: a weight times a vector, both given by name and read when the change is applied.

    Attributes:
        weight: name of a matrix, whose last axis is the outputs' if `transposed` (as in `Conv1D`).
        vector: name of a vector as long as the other axis.
    """

    weight: str
    vector: str
    transposed: bool = False

    def __str__(self) -> str:
        return f"{self.weight}{'.T' if self.transposed else ''} @ {self.vector}"

    def values(self, root: nn.Module) -> Tensor:
        """Return the product, from the Parameters of a model."""
        weight, vector = root.get_parameter(self.weight).detach(), root.get_parameter(self.vector).detach()
        rows = (weight.T if self.transposed else weight).split(_ROWS)
        return torch.cat([in_float64(some) @ in_float64(vector) for some in rows])


@dataclass(frozen=True, eq=False)
class WeightChange:
    """Change of one Parameter's values x, computed in float64 and rounded to its dtype.

    Attributes:
        parameter: its name in the model; the bias that a linear map doesn't have yet starts at 0.
        op: "centre": x - mean(x) over `axis`. "add": x + operand. "multiply": x * operand. "fill": the operand, a
            number, everywhere. "value": the operand. "rows": operand(x), a table of another number of rows.
        operand: a number, a tensor that broadcasts against x, a `Product`, or the name of a Parameter: a vector along
            `axis` with the values that it has at that time. Of "rows" a function of x whose `str` says what it does.
        axis: axis for "centre", or for an operand that is a name; else None.
        anew: put a new Parameter there, since another module may hold the present Parameter and keep its values.
    """

    parameter: str
    op: str
    operand: float | Tensor | str | Product | Callable[[Tensor], Tensor] | None = None
    axis: int | None = None
    anew: bool = False

    def __str__(self) -> str:
        match self.op:
            case "centre":
                return f"x - mean(x, {self.axis})"
            case "add" | "multiply":
                return f"x {'+' if self.op == 'add' else '*'} {_text(self.operand)}"
        return _text(self.operand)

    def to_json(self) -> dict[str, Any]:
        """Return the change as plain JSON values, a tensor as its shape."""
        operand = self.operand if isinstance(self.operand, int | float | None) else _text(self.operand)
        return {"parameter": self.parameter, "op": self.op, "operand": operand, "axis": self.axis}

    def operand_in(self, root: nn.Module) -> Tensor | None:
        """Return the values of the Parameters that the operand names; None if it names none."""
        if isinstance(self.operand, Product):
            return self.operand.values(root)
        return root.get_parameter(self.operand).data if isinstance(self.operand, str) else None

    def apply(
        self, values: Tensor, operand: Tensor | None = None, copy: Callable[[Tensor], Tensor] = Tensor.clone
    ) -> Tensor:
        """Return the new values in new memory, with the strides of the old ones.

        The arithmetic runs in pieces, so it takes little memory besides the result.

        Args:
            values: the old values.
            operand: what `operand_in` returns.
            copy: copies a tensor to the place of the result.
        """
        given = self.operand if operand is None else operand
        with torch.inference_mode(values.is_inference()), torch.no_grad():
            match self.op:
                case "rows":
                    assert callable(given)
                    return given(values.detach())
                case "value":
                    assert isinstance(given, Tensor)
                    return copy(given.detach().to(values.device, values.dtype).reshape(values.shape))
                case "fill":
                    return copy(values).fill_(given)  # type: ignore[arg-type]
            if isinstance(given, Tensor):
                by = given.detach()
            else:
                by = torch.tensor(given or 0.0, dtype=torch.float64, device="cpu")
            if operand is not None and self.axis is not None:
                by = along_axis(by, values, self.axis)
            return self._rewrite(copy(values), by)

    def _rewrite(self, values: Tensor, operand: Tensor) -> Tensor:
        """Overwrite values by the result of the arithmetic, piece by piece."""
        device = float64_device(values.device)
        axis = self.axis if self.op == "centre" else None
        other_axes = [i for i in range(values.dim()) if i != axis]
        pieces = -(-values.numel() // _PIECE) if other_axes else 1
        chunk_axis = max(other_axes, key=lambda i: values.shape[i], default=0)
        parts = (values, operand.to(device).to(torch.float64).expand(values.shape))
        chunks = [x.chunk(pieces, chunk_axis) if pieces > 1 else [x] for x in parts]
        for x, y in zip(*chunks, strict=True):
            x.copy_(_calculate(self.op, x.to(device).to(torch.float64, copy=True), y, axis))
        return values


def along_axis(vector: Tensor, parameter: Tensor, axis: int | None) -> Tensor:
    """Return a vector in the shape in which it multiplies a Parameter along an axis."""
    return vector.reshape([-1 if i == axis else 1 for i in range(parameter.dim())])


def _calculate(op: str, x: Tensor, operand: Tensor, axis: int | None) -> Tensor:
    """The new values, in place of the old: new memory for every piece would take several times as long as the rest."""
    if op == "centre":
        return x.sub_(x.mean(axis, keepdim=True))
    return x.add_(operand) if op == "add" else x.mul_(operand)


def _text(operand: Any) -> str:
    """An operand in few words."""
    if isinstance(operand, Tensor):
        return f"a tensor {tuple(operand.shape)}"
    return f"{operand:.4g}" if isinstance(operand, float) else pattern_of(str(operand))
