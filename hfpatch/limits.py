"""What a removed table leaves behind: a constant, its mean row, and lenses that lift the old length's limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .view import Arguments, InnerView, View

MEAN_ROW = "its mean row"  # what a plan and a report say of a removed table


class LengthLimit:
    """A lens on a module that would refuse, or cut, inputs beyond the removed table's length."""

    def with_table(self, reserved_rows: int) -> LengthLimit:
        """The same for a stack in which a table stays, so that positions must be counted.

        Args:
            reserved_rows: as in `architectures.Stack`.
        """
        return self


@dataclass(frozen=True)
class ZeroArguments(LengthLimit):
    """Fills index arguments that the host would slice from a buffer of the old length (BERT's `token_type_ids`).

    Attributes:
        names: the arguments.
        counts: whether `position_ids` are counted rather than zero.
    """

    names: tuple[str, ...]
    counts: bool = False

    def __init__(self, *names: str, counts: bool = False):
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "counts", counts)

    def with_table(self, reserved_rows: int) -> ZeroArguments:
        """Hosts with reserved rows count from their tokens, padding left out; for others they are counted here."""
        counted = "position_ids" in self.names and not reserved_rows
        return ZeroArguments(*(n for n in self.names if counted or n != "position_ids"), counts=counted)

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        tokens = arguments.get("input_ids")
        if tokens is None:
            tokens = arguments["inputs_embeds"][..., 0]
        missing = [name for name in self.names if arguments.get(name) is None]
        filled = {name: torch.zeros_like(tokens, dtype=torch.long) for name in missing}
        if self.counts and "position_ids" in filled:
            slots = torch.arange(tokens.shape[1], device=tokens.device)
            filled["position_ids"] = slots[None] + (arguments.get("past_key_values_length") or 0)
        return {}, filled


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
        table: the table, all of whose rows the encoder takes.
    """

    setting: str
    convolutions: tuple[str, ...]
    table: str = "embed_positions"

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        positions = arguments["input_features"].shape[-1]
        for name in self.convolutions:
            positions = positions // getattr(module, name).stride[0]
        attributes: dict[str, Any] = {"config": View(module.config, {self.setting: positions})}
        if not isinstance(getattr(module, self.table), ConstantPositions):
            attributes[self.table] = InnerView(getattr(module, self.table), {"num_embeddings": positions})
        return attributes, {}


class ConstantPositions(nn.Module):
    """Stands where a table of positions stood and returns one row, whatever the positions.

    The row starts as the mean of the table's: what every position had in common isn't about position.

    Args:
        table: the removed table (rows, width).
        first: its first row that holds a position.
        padding_idx: the table's.
    """

    def __init__(self, table: Tensor, first: int = 0, padding_idx: int | None = None):
        super().__init__()
        self.num_embeddings, self.embedding_dim = table.shape  # some hosts still ask for them
        self.padding_idx = padding_idx
        self.constant = constant_of(table, mean_row(table, first))

    @property
    def weight(self) -> Tensor:
        """Scratch of the removed table's shape, for hosts whose `_init_weights` fills it."""
        return torch.empty(self.num_embeddings, self.embedding_dim)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
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
