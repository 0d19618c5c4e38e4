"""What a removed table leaves behind: a constant, its mean row, and lenses that lift the old length's limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..swap.native_rope import SETTINGS_AT
from .errors import PositionError
from .lens import Arguments, host_class

NO_ROW = "_hfpatch_no_row"  # of a module whose buffer of positions counts for nothing: training starts from zero


class ConstantPositions(nn.Module):
    """Stands where a table of positions stood and returns one row, whatever the positions.

    The row starts as the mean of the table's: what every position had in common isn't about position.

    Args:
        table: the removed table (rows, width).
        first: its first row that holds a position.
        padding_idx: the removed module's own.
        by_token: give a row of its own to each token, which hosts may reshape or add to in place.
        more: how many values are returned besides, each None.
    """

    def __init__(
        self, table: Tensor, first: int = 0, padding_idx: int | None = None, by_token: bool = False, more: int = 0
    ):
        super().__init__()
        self.num_embeddings, self.embedding_dim = table.shape  # some hosts still ask for them
        self.padding_idx, self.by_token, self.more = padding_idx, by_token, more
        self.constant = constant_of(table, mean_row(table, first))

    @property
    def weight(self) -> Tensor:
        """The constant in each row of the removed table's shape, for hosts that read it; what fills it is lost."""
        return self.constant.expand(self.num_embeddings, self.embedding_dim).clone()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.more:
            return self.constant, *[None] * self.more
        if self.by_token:
            tokens = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            shape = tokens.shape[:2] if tokens.is_floating_point() else tokens.shape
            return self.constant.expand(*shape, -1).clone()
        return self.constant

    def extra_repr(self) -> str:
        return f"{self.embedding_dim}, was {self.num_embeddings} x {self.embedding_dim}"


class NoPositions(nn.Module):
    """Stands where positions were computed from the hidden states, and answers as if there were none.

    Args:
        answer: "zeros" of its input's shape, its "input" itself (where the host had it add positions to that), or
            "nothing" (None).
    """

    def __init__(self, answer: str):
        super().__init__()
        self.answer = answer

    def forward(self, states: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        if self.answer == "nothing":
            return None
        return states if self.answer == "input" else states.new_zeros(()).expand(states.shape)

    def extra_repr(self) -> str:
        return self.answer


def constant_of(table: Tensor, row: Tensor) -> nn.Parameter:
    """A row in the table's place: trained where the table was."""
    trained = table.requires_grad if isinstance(table, nn.Parameter) else True
    return nn.Parameter(row, requires_grad=trained)


def mean_row(table: Tensor, first: int = 0) -> Tensor:
    """The mean (width,) of a table's rows (rows, width) from row `first` on."""
    return table.detach()[first:].double().mean(0).to(table.dtype)


def mean_rows(table: Tensor) -> Tensor:
    """The mean of a table that its host adds as it is, with as many dimensions.

    (rows, width) becomes (1, width), (tables, rows, width) and (tables, rows, columns, width) one row for each table.
    """
    axes = (0,) if table.dim() == 2 else tuple(range(1, table.dim() - 1))
    return table.detach().double().mean(axes, keepdim=True).to(table.dtype)


@dataclass(frozen=True)
class Given:
    """A lens on an attention that gets other arguments than it is handed: "zeros" stands for zeros like those."""

    arguments: tuple[tuple[str, Any], ...]
    hfpatch_note: ClassVar[str] = "its own positions are hidden from it"

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        filled = {}
        for name, value in self.arguments:
            if arguments.get(name) is not None:
                filled[name] = torch.zeros_like(arguments[name]) if value == "zeros" else value
        return {}, filled


class NoBias(nn.Module):
    """Stands where a table of biases stood: zeros for every distance.

    Args:
        num_embeddings, embedding_dim: the removed table's size.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int):
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim

    @property
    def weight(self) -> Tensor:
        """Scratch of the removed table's shape, for hosts whose `_init_weights` fills it or that ask its device."""
        return torch.empty(self.num_embeddings, self.embedding_dim)

    def forward(self, distances: Tensor) -> Tensor:
        return torch.zeros(*distances.shape, self.embedding_dim, device=distances.device)


@dataclass(frozen=True)
class Unrotated:
    """A lens on a rotary module: it hands out the rotation by nothing, cos 1 and sin 0 (or the complex number 1).

    Attributes:
        layer_types: the types of layers for which it does; None is that of modules which don't tell them apart.
    """

    layer_types: tuple[str | None, ...]
    hfpatch_note: ClassVar[str] = "queries and keys aren't rotated"

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        return {}, {}

    def finish(self, output: Any, arguments: Arguments) -> Any:
        if None not in self.layer_types and arguments.get("layer_type") not in self.layer_types:
            return output
        if isinstance(output, Tensor) and output.is_complex():
            return torch.ones_like(output)
        if isinstance(output, tuple) and len(output) == 2 and all(isinstance(part, Tensor) for part in output):
            return torch.ones_like(output[0]), torch.zeros_like(output[1])
        raise PositionError(f"a rotary module returned {type(output).__name__}, and no cos and sin.")


def refill(module: nn.Module) -> None:
    """Fill a rebuilt rotation's buffers again, where they are: loading leaves them empty."""
    if SETTINGS_AT not in module.__dict__:
        return
    with torch.device("cpu"):
        fresh = host_class(type(module))(module.config)
    for name in module._non_persistent_buffers_set:
        buffer, value = module._buffers.get(name), fresh._buffers.get(name)
        if buffer is not None and value is not None:
            module._buffers[name] = value.to(buffer.device if not buffer.is_meta else "cpu", buffer.dtype)
