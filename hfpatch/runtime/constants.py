"""Replacements for removed positions: a table's mean row as a constant, zeros, fixed arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from .float64 import float64_device
from .lens import Arguments

Answer = Literal["zeros", "input", "nothing", "rows"]
ZERO_MEAN_ROW = "_hfpatch_no_row"  # marks a module whose position buffer counts as zeros: training starts from zero


class Recomputed(nn.Module):
    """Module whose non-persistent buffers `reset` computes from its arguments: after loading, moving and rounding."""

    def reset(self) -> None:
        """Fill the buffers again, on their device."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # moves the buffers, and with .half() also rounds them
        self.reset()
        return self


class ConstantPositions(nn.Module):
    """Replacement of a position table: returns one constant row for all positions.

    The row starts as the mean of the table's rows: the part that all positions share doesn't encode position.

    Args:
        table: the removed table (rows, width).
        first: its first row that holds a position.
        by_token: return a row for each token, which hosts may reshape or add to in place.
        more: how many values are returned besides, each None.
        padding_idx: the removed module's.
    """

    def __init__(
        self, table: Tensor, first: int = 0, by_token: bool = False, more: int = 0, padding_idx: int | None = None
    ):
        super().__init__()
        self.num_embeddings, self.embedding_dim = table.shape  # some hosts still ask for them
        self.padding_idx, self.by_token, self.more = padding_idx, by_token, more
        self.constant = constant_of(table, mean_rows(table, first)[0])

    @classmethod
    def replacing(
        cls, old: nn.Module | None, parent: nn.Module, first: int = 0, by_token: bool = False, more: int = 0
    ) -> ConstantPositions:
        """Return the replacement of a table; if the table has a padding index, positions start after it."""
        assert old is not None
        padding: Any = getattr(old, "padding_idx", None)
        return cls(rows_of(old), first if padding is None else padding + 1, by_token, more, padding)

    @property
    def weight(self) -> Tensor:
        """The constant in each row of the removed table's shape, for hosts that read it; writes to it are lost."""
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
    """Replacement of computed positions or bias look-ups that returns as if there were none.

    Args:
        answer: "zeros" of its input's shape, its "input" itself (if the replaced module added positions to it),
            "nothing" (None), or "rows" of zeros for indices (...): (..., embedding_dim).
        num_embeddings, embedding_dim: the size of the replaced table, if it was a table.
    """

    def __init__(self, answer: Answer, num_embeddings: int = 0, embedding_dim: int = 0):
        super().__init__()
        self.answer, self.num_embeddings, self.embedding_dim = answer, num_embeddings, embedding_dim

    @classmethod
    def replacing(cls, old: nn.Module | None, parent: nn.Module, answer: Answer) -> NoPositions:
        """Return the replacement of a module."""
        return cls(answer, getattr(old, "num_embeddings", 0), getattr(old, "embedding_dim", 0))

    @property
    def weight(self) -> Tensor:
        """Scratch of the removed table's shape, for hosts whose `_init_weights` fills it or that read its device."""
        return torch.empty(self.num_embeddings, self.embedding_dim)

    def forward(self, states: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        if self.answer == "nothing":
            return None
        if self.answer == "rows":
            return torch.zeros(*states.shape, self.embedding_dim, device=states.device)
        return states if self.answer == "input" else states.new_zeros(()).expand(states.shape)

    def extra_repr(self) -> str:
        return self.answer


def constant_of(table: Tensor, row: Tensor) -> nn.Parameter:
    """Return a row in place of a table, a trained Parameter if the table was one."""
    return nn.Parameter(row, requires_grad=isinstance(table, nn.Parameter) and table.requires_grad)


def mean_rows(table: Tensor, first: int = 0) -> Tensor:
    """Return a table's mean row, from row `first` on, with the same number of dimensions.

    (rows, width) becomes (1, width), (tables, rows, width) and (tables, rows, columns, width) one row for each table.
    """
    axes = (0,) if table.dim() == 2 else tuple(range(1, table.dim() - 1))
    rows = table.detach().to(float64_device(table.device))
    rows = rows.to(torch.float64, copy=True)  # inference tensors can't be sliced where others are recorded
    return rows[first:].mean(axes, keepdim=True).to(table.dtype).to(table.device)


def rows_of(table: nn.Module | Tensor) -> Tensor:
    """Return the rows (..., rows, width) of a table; sinusoidal tables keep them in a buffer."""
    if isinstance(table, Tensor):
        return table
    stored = [value for value in (*table.parameters(), *table.buffers()) if value.dim() >= 2]
    width: Any = getattr(table, "embed_dim", None)
    return stored[0] if stored else torch.zeros(1, width)  # computed in the table's forward


def MeanRow(table: Tensor, zero: bool = False) -> Tensor:  # noqa: N802  # a component, called like the others
    """Return the mean row (or zeros) in place of a table that the host adds directly."""
    row = mean_rows(table)
    row = row.zero_() if zero else row
    return constant_of(table, row) if isinstance(table, nn.Parameter) else row


def Rows(table: Tensor, *shape: int) -> nn.Parameter:  # noqa: N802
    """Return a Parameter for a table of another size, to be filled by a patch or checkpoint.

    Until then it has a host's initial values: the table's own if the host was built with the config's new length or
    size, so that its table has this size; otherwise random values with the table's spread.
    """
    old = table.detach()
    if old.shape == shape:
        return nn.Parameter(old.clone(), requires_grad=table.requires_grad)
    new = old.new_empty(shape)
    if not old.is_meta:
        wide = old.float()
        new.normal_(float(wide.mean()), float(wide.std()))
    return nn.Parameter(new, requires_grad=table.requires_grad)


@dataclass(frozen=True)
class FixedArguments:
    """Lens on an attention that fixes some of its arguments; "zeros" replaces a value by zeros.

    GPT-J's and CodeGen's attentions turn nothing at position 0. From transformers 5.24 on they don't look positions up
    themselves: their model passes (sin, cos) as `position_embeddings`, which is fixed to that of position 0 instead.
    """

    arguments: tuple[tuple[str, Any], ...]
    hfpatch_note: ClassVar[str] = "its own positions are hidden from it"

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        filled: Arguments = {}
        for name, value in self.arguments:
            if value != "zeros":
                filled[name] = value
            elif name == "position_ids" and "position_embeddings" in arguments:
                sin, cos = arguments["position_embeddings"]
                filled["position_embeddings"] = (torch.zeros_like(sin), torch.ones_like(cos))
            elif arguments.get(name) is not None:
                filled[name] = torch.zeros_like(arguments[name])
        return {}, filled


@dataclass(frozen=True)
class ZeroBiases:
    """Lens on a module whose method computes position biases from (B, T): it returns zeros (B, 1, T, T)."""

    method: str

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        states = next(x for x in arguments.values() if isinstance(x, Tensor) and x.is_floating_point())

        def answer(positions: Tensor) -> Tensor:
            batch, tokens = positions.shape
            return states.new_zeros(batch, 1, tokens, tokens)

        return {self.method: answer}, {}
