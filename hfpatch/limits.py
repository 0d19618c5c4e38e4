"""What a removed table leaves behind: a constant, its mean row, and lenses that lift the old length's limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .errors import PositionError
from .view import Arguments, InnerView, View

NO_ROW = "_hfpatch_no_row"  # of a module whose buffer of positions counts for nothing: training starts from zero
_ANY = 2**31  # rows enough for any length

MEAN_ROW = "its mean row"  # what a plan and a report say of a removed table


class LengthLimit:
    """A lens on a module that would refuse, or cut, inputs beyond the removed table's length."""


@dataclass(frozen=True)
class ZeroArguments(LengthLimit):
    """Fills index arguments that the host would slice from a buffer of the old length (BERT's `token_type_ids`)."""

    names: tuple[str, ...]

    def __init__(self, *names: str):
        object.__setattr__(self, "names", names)

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        tokens = arguments.get("input_ids")
        if tokens is None:
            tokens = arguments["inputs_embeds"][..., 0]
        missing = [name for name in self.names if arguments.get(name) is None]
        return {}, {name: torch.zeros_like(tokens, dtype=torch.long) for name in missing}


@dataclass(frozen=True)
class AnyTextLength(LengthLimit):
    """Text embeddings that compare their input's length with the table's or a buffer's (CLIP's) take any length."""

    table: str = "position_embedding"

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        table: Any = getattr(module, self.table)
        rows = torch.empty(1, table.embedding_dim, device="meta").expand(_ANY, -1)
        position_ids = torch.zeros(1, 1, dtype=torch.long, device=table.constant.device).expand(1, _ANY)
        return {self.table: InnerView(table, {"weight": rows}), "position_ids": position_ids}, {}


@dataclass(frozen=True)
class AnyBufferLength(LengthLimit):
    """A model that cuts its positions from a buffer of a child's finds as many there as it wants.

    Attributes:
        child: name of the child.
        buffer: the buffer (1, rows) of integers; what is in it no longer counts.
    """

    child: str
    buffer: str

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        child = getattr(module, self.child)
        buffer = getattr(child, self.buffer)[:, :1].expand(1, _ANY)
        return {self.child: InnerView(child, {self.buffer: buffer})}, {}


@dataclass(frozen=True)
class AnyRow(LengthLimit):
    """A table in a buffer, which hosts fill by themselves when they load, stays there: every position gets its mean.

    Attributes:
        table: the buffer.
        first: its first row that holds a position.
    """

    table: str
    first: int = 0

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        table = getattr(module, self.table)
        row = mean_row(table, self.first)
        return {self.table: EveryRow(table, torch.zeros_like(row) if NO_ROW in module.__dict__ else row)}, {}


class EveryRow:
    """Answers every index with one row (width,), and otherwise is a table (rows, width)."""

    def __init__(self, table: Tensor, row: Tensor):
        self.table, self.row = table, row

    def __getitem__(self, index: Any) -> Tensor:
        return self.row

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """The table cast, for hosts that store it; the row is cast as well."""
        self.row = self.row.to(*args, **kwargs)
        return self.table.to(*args, **kwargs)


@dataclass(frozen=True)
class RefusedArguments(LengthLimit):
    """Arguments that bring tokens whose positions aren't known here."""

    names: tuple[str, ...]

    def __init__(self, *names: str):
        object.__setattr__(self, "names", names)

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        for name in self.names:
            if arguments.get(name) is not None:
                raise PositionError(
                    f"{type(module).__name__} was given {name}, which stand at positions of their own: those can't be "
                    "rotated. Leave them out, or leave this model's positions as they are."
                )
        return {}, {}


@dataclass(frozen=True)
class AnyImageSize(LengthLimit):
    """Patch embeddings whose table is a constant take images of any size."""

    table: str = "position_embeddings"

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        attributes = {
            "image_size": tuple(arguments["pixel_values"].shape[-2:]),
            "interpolate_pos_encoding": lambda *args, **kwargs: getattr(module, self.table),
        }
        return attributes, {}


@dataclass(frozen=True)
class AnyInputLength(LengthLimit):
    """An audio encoder that compares its input's length with the config's takes any (even) number of frames.

    Attributes:
        setting: config attribute with the number of positions.
        convolutions: the convolutions whose strides lie between frames and positions.
    """

    setting: str
    convolutions: tuple[str, ...]

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        positions = arguments["input_features"].shape[-1]
        for name in self.convolutions:
            positions = positions // getattr(module, name).stride[0]
        return {"config": View(module.config, {self.setting: positions})}, {}


class ConstantPositions(nn.Module):
    """Stands where a table of positions stood and returns one row, whatever the positions.

    The row starts as the mean of the table's: what every position had in common isn't about position.

    Args:
        table: the removed table (rows, width).
        first: its first row that holds a position.
        padding_idx: the removed module's own.
        by_token: give a tensor (B, T, width) that hosts may add to in place, not the row itself.
    """

    def __init__(self, table: Tensor, first: int = 0, padding_idx: int | None = None, by_token: bool = False):
        super().__init__()
        self.num_embeddings, self.embedding_dim = table.shape  # some hosts still ask for them
        self.padding_idx, self.by_token = padding_idx, by_token
        self.constant = constant_of(table, mean_row(table, first))

    @property
    def weight(self) -> Tensor:
        """Scratch of the removed table's shape, for hosts whose `_init_weights` fills it."""
        return torch.empty(self.num_embeddings, self.embedding_dim)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.by_token:
            tokens = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            return self.constant.expand(*tokens.shape[:2], -1).clone()
        return self.constant

    def extra_repr(self) -> str:
        return f"{self.embedding_dim}, was {self.num_embeddings} x {self.embedding_dim}"


def constant_of(table: Tensor, row: Tensor) -> nn.Parameter:
    """A row in the table's place: trained where the table was."""
    trained = table.requires_grad if isinstance(table, nn.Parameter) else True
    return nn.Parameter(row, requires_grad=trained)


def mean_row(table: Tensor, first: int = 0) -> Tensor:
    """The mean (..., width) of a table's rows (..., rows, width) from row `first` on."""
    return table.detach()[..., first:, :].double().mean(-2).to(table.dtype)
