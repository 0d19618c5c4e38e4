"""What a removed table leaves behind: a constant, its mean row, and lenses that lift the old length's limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .errors import PositionError
from .view import Arguments, View


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
class AnyImageSize(LengthLimit):
    """Patch embeddings whose table is a constant take images of any size and aspect ratio.

    Attributes:
        table: attribute that holds the constant; None where another module adds it.
        resize: methods (or children) that would fit the table to an image; they answer with the constant.
        flag: whether the forward takes `interpolate_pos_encoding`, without which it would insist on the old size.
        rows: rows of the constant, where the host takes those of patches and of other tokens apart.
        argument: the forward's argument with the pixels.
    """

    table: str | None = "position_embeddings"
    resize: tuple[str, ...] = ("interpolate_pos_encoding",)
    flag: bool = False
    rows: int = 1
    argument: str = "pixel_values"

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        attributes: dict[str, Any] = {"image_size": tuple(arguments[self.argument].shape[-2:])}
        if self.table is not None:
            constant = getattr(module, self.table)
            constant = constant if isinstance(constant, Tensor) else constant()
            if self.rows > 1:
                attributes[self.table] = constant = constant.expand(1, self.rows, -1)

            def answer(*args: Any, **kwargs: Any) -> Tensor:
                return constant

            attributes |= dict.fromkeys(self.resize, answer)
        return attributes, {"interpolate_pos_encoding": True} if self.flag else {}


@dataclass(frozen=True)
class AnyInputLength(LengthLimit):
    """An audio encoder that compares its input's length with the config's takes any (even) number of frames.

    Attributes:
        setting: config attribute with the number of positions.
        convolutions: the convolutions whose strides lie between frames and positions.
        table: the child with the table, where the host adds all of its rows.
    """

    setting: str
    convolutions: tuple[str, ...]
    table: str | None = None

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        positions = arguments["input_features"].shape[-1]
        for name in self.convolutions:
            positions = positions // getattr(module, name).stride[0]
        attributes: dict[str, Any] = {"config": View(module.config, {self.setting: positions})}
        if self.table is not None:
            attributes[self.table] = Rows(getattr(module, self.table)()[None])
        return attributes, {}


@dataclass(frozen=True)
class PositionsInOrder(LengthLimit):
    """Refuses inputs in which some tokens are left out, where the attentions can't be told which.

    Attributes:
        argument: the owner's argument that says which.
    """

    argument: str

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        if arguments.get(self.argument) is not None:
            raise PositionError(
                f"{type(module).__name__}: {self.argument} leaves tokens out, and its attentions aren't told which, so "
                "their positions would be wrong. Run it on whole inputs."
            )
        return {}, {}


class Rows:
    """Stands in the view of a module for the child that was a table, and whose `weight` is read."""

    def __init__(self, weight: Tensor):
        self.weight = weight


class ConstantPositions(nn.Module):
    """Stands where a table of positions stood and returns one row, whatever the positions.

    The row starts as the mean of the table's: what every position had in common isn't about position.

    Args:
        table: the removed table (rows, width).
        first: its first row that holds a position.
    """

    def __init__(self, table: Tensor, first: int = 0):
        super().__init__()
        self.num_embeddings, self.embedding_dim = table.shape  # some hosts still ask for them
        self.constant = nn.Parameter(mean_row(table, first))

    @property
    def weight(self) -> Tensor:
        """The constant in each row of the removed table's shape, for hosts that read it; what fills it is lost."""
        return self.constant.expand(self.num_embeddings, self.embedding_dim).clone()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.constant

    def extra_repr(self) -> str:
        return f"{self.embedding_dim}, was {self.num_embeddings} x {self.embedding_dim}"


ANSWERS = ("zeros", "input", "nothing")


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


def mean_row(table: Tensor, first: int = 0) -> Tensor:
    """The mean (width,) of a table's rows (..., rows, width) from row `first` on."""
    return table.detach()[..., first:, :].double().flatten(0, -2).mean(0).to(table.dtype)
