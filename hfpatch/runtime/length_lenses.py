"""Lenses that lift the length limit of a removed position table.

They fill or refuse arguments, show tables with other numbers of rows, count lengths on the input, and replace methods
that would fit a table to an image by the constant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .constants import ZERO_MEAN_ROW, ConstantPositions, mean_rows
from .lens import Arguments, StandIn, View, first_at
from .patch_errors import PositionError
from .tables import ComputedPositions

MEAN_ROW, NOTHING = "its mean row", "nothing"  # what plans and reports call a removed table's replacement

_ANY = 2**31  # rows, enough for any length


class LengthLimit:
    """Lens on a module that would refuse or truncate inputs longer than the removed table."""

    hfpatch_note = "inputs of any length"


@dataclass(frozen=True)
class FilledArguments(LengthLimit):
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

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        tokens = arguments.get("input_ids")
        if tokens is None and (embeds := arguments.get("inputs_embeds")) is not None:
            tokens = embeds[..., 0]
        if tokens is None:
            return {}, {}  # the host's own error says what it needs
        missing = [name for name in self.names if arguments.get(name) is None]
        filled = {name: torch.zeros_like(tokens, dtype=torch.long) for name in missing}
        if self.counts and "position_ids" in filled:
            slots = torch.arange(tokens.shape[1], device=tokens.device)
            before = arguments.get("cache_length") or arguments.get("past_key_values_length") or 0  # until 5.23
            counted = slots[None] + before
            filled["position_ids"] = counted.expand(tokens.shape[:2])
        return {}, filled


@dataclass(frozen=True)
class RefusedArguments(LengthLimit):
    """Refuses arguments that add tokens whose positions aren't known here."""

    names: tuple[str, ...]

    def __init__(self, *names: str):
        object.__setattr__(self, "names", names)

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        for name in self.names:
            if arguments.get(name) is not None:
                raise PositionError(
                    f"{type(module).__name__} was given {name}, which have positions of their own that can't be "
                    "rotated. Leave them out, or leave this model's positions as they are."
                )
        return {}, {}


@dataclass(frozen=True)
class ExpandedRows(LengthLimit):
    """Shows constants (rows, width) and index buffers (1, rows) with as many rows as the host expects.

    Attributes:
        rows: (path, number of rows), the paths of tensors of the module or of its children. None means more rows than
            any input needs; the name of an attribute means 1, or 2 if the attribute is true.
    """

    rows: tuple[tuple[str, int | str | None], ...]

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        attributes: dict[str, Any] = {}
        for path, number in self.rows:
            child, _, attribute = path.rpartition(".")
            holder: Any = getattr(module, child) if child else module
            if isinstance(holder, nn.Embedding) and not isinstance(holder, ComputedPositions):
                continue  # a resized table
            is_constant = isinstance(holder, ConstantPositions)
            tensor: Tensor | None = holder.constant[None] if is_constant else getattr(holder, attribute, None)
            if tensor is None:  # this configuration has no such tensor
                continue
            count = 1 + bool(getattr(module, number)) if isinstance(number, str) else number or _ANY
            first = tensor[..., :1, :] if tensor.is_floating_point() else tensor[..., :1, None]
            seen = first.expand(*first.shape[:-2], count, -1)
            seen = seen if tensor.is_floating_point() else seen[..., 0]
            attributes[child or attribute] = View(holder, {attribute: seen}) if child else seen
        return attributes, {}


@dataclass(frozen=True)
class MeanOfBuffer(LengthLimit):
    """Shows a table in a buffer, which hosts fill on loading, as its mean at every position.

    Attributes:
        table: the buffer (rows, width).
    """

    table: str

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        table: Tensor = getattr(module, self.table)
        row = mean_rows(table)[0]
        row = torch.zeros_like(row) if ZERO_MEAN_ROW in module.__dict__ else row
        # on the buffer's present device and in its dtype: some hosts cast it before they index it
        return {self.table: StandIn(table, lambda *_: row.to(getattr(module, self.table)))}, {}


@dataclass(frozen=True)
class CountedLength(LengthLimit):
    """Shows the old length as the number of positions that convolutions produce from the input.

    Attributes:
        argument: argument of the forward, cut along its last axes.
        convolutions: convolutions whose strides turn its sizes into positions; they have as many axes.
        places: paths of the numbers from the module, through children or its config.
        more: number of further tokens.
        never_multiple_of: the host masks wrongly if the number of tokens is a multiple of this; see the error.
    """

    argument: str
    convolutions: tuple[str, ...]
    places: tuple[str, ...]
    more: int = 0
    never_multiple_of: int | None = None

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        strides = [getattr(module, name).stride for name in self.convolutions]
        if not isinstance(arguments.get(self.argument), Tensor):
            return {}, {}  # the host's own error says what it needs
        sizes = list(arguments[self.argument].shape[-len(strides[0]) :])
        for stride in strides:
            sizes = [size // step for size, step in zip(sizes, stride, strict=True)]
        tokens = math.prod(sizes) + self.more
        if self.never_multiple_of is not None and tokens % self.never_multiple_of == 0:
            raise PositionError(  # its mask takes "no padding" for "padding only"
                f"{type(module).__name__} pads tiles to a multiple of {self.never_multiple_of} tokens, and masks all "
                f"of one that needs none: {' x '.join(map(str, sizes))} patches and a class token. Choose another "
                "image size."
            )
        attributes: dict[str, Any] = {}
        for place in self.places:
            name, _, number = place.rpartition(".")
            holder: Any = getattr(module, name) if name else None
            if not name:
                attributes[number] = tokens
            elif not isinstance(holder, ConstantPositions):
                attributes[name] = View(holder, {number: tokens})
        return attributes, {}


@dataclass(frozen=True)
class AnyImageSize(LengthLimit):
    """Lets patch embeddings with a constant table take images of any size and aspect ratio.

    Attributes:
        table: path of the constant, or several paths of which one exists ("a | b"); None if another module adds it.
        resize: methods (or children) that would fit the table to an image; they return the constant instead.
        flag: whether the forward takes `interpolate_pos_encoding`, without which it would require the old size.
        rows: rows of the constant, if the host splits it into rows of patches and rows of other tokens.
        argument: the forward's argument with the pixels.
    """

    table: str | None = "position_embeddings"
    resize: tuple[str, ...] = ("interpolate_pos_encoding",)
    flag: bool = False
    rows: int = 1
    argument: str = "pixel_values"

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        attributes: dict[str, Any] = {}
        if isinstance(arguments.get(self.argument), Tensor):  # else the host's own error says what it needs
            attributes["image_size"] = tuple(arguments[self.argument].shape[-2:])
        constant = first_at(module, *self.table.split(" | ")) if self.table is not None else None
        if constant is not None:
            constant = constant if isinstance(constant, Tensor) else constant()
            if self.rows > 1 and self.table is not None:
                attributes[self.table] = constant = constant.expand(*constant.shape[:-2], self.rows, -1)

            def answer(*args: Any, **kwargs: Any) -> Tensor:
                return constant

            attributes |= dict.fromkeys(self.resize, answer)
        return attributes, {"interpolate_pos_encoding": True} if self.flag else {}


def limit_beside_table(limit: LengthLimit, reserved_rows: int) -> LengthLimit | None:
    """Return the lens for a stack that keeps a table, so that positions must be counted; None if unknown.

    Args:
        limit: the lens for a stack without a table.
        reserved_rows: as in `sites.architectures.architecture.Stack`.
    """
    if isinstance(limit, FilledArguments):  # hosts with reserved rows count positions themselves, without padding
        counted = "position_ids" in limit.names and not reserved_rows
        return FilledArguments(*(name for name in limit.names if counted or name != "position_ids"), counts=counted)
    if isinstance(limit, ExpandedRows):  # hosts that only compare their input with the number of rows can keep it
        return limit if all(number is None for _, number in limit.rows) else None
    return limit if isinstance(limit, RefusedArguments | CountedLength) else None
