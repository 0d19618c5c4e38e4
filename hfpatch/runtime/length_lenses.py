"""What a removed table leaves behind: a constant, its mean row, and lenses that lift the old length's limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .constants import NO_ROW, ConstantPositions, mean_row
from .errors import PositionError
from .lens import Arguments, View
from .tables import ComputedPositions

_ANY = 2**31  # rows enough for any length


MEAN_ROW, NOTHING = "its mean row", "nothing"  # what a plan and a report say of a removed table


class LengthLimit:
    """A lens on a module that would refuse, or cut, inputs beyond the removed table's length."""

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        """As of any `lens.Lens`."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__(module, arguments).")

    def with_table(self, reserved_rows: int) -> LengthLimit | None:
        """The same for a stack in which a table stays, so that positions must be counted; None where that isn't known.

        Args:
            reserved_rows: as in `architectures.Stack`.
        """
        return None


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
            counted = slots[None] + (arguments.get("past_key_values_length") or 0)
            filled["position_ids"] = counted.expand(tokens.shape[:2])
        return {}, filled


@dataclass(frozen=True)
class AnyTextLength(LengthLimit):
    """Text embeddings that compare their input's length with the table's or a buffer's (CLIP's) take any length."""

    table: str = "position_embedding"

    def with_table(self, reserved_rows: int) -> AnyTextLength:
        return self

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        table: Any = getattr(module, self.table)
        if isinstance(table, nn.Embedding):
            counted: dict[str, Any] = {"position_ids": CountedRows(table.weight.device)}
            if isinstance(table, ComputedPositions):
                dtype = table.weight.dtype
                rows = torch.empty(1, table.embedding_dim, device="meta", dtype=dtype).expand(_ANY, -1)
                counted[self.table] = View(table, {"weight": rows})
            return counted, {}
        rows = torch.empty(1, table.embedding_dim, device="meta").expand(_ANY, -1)
        position_ids = torch.zeros(1, 1, dtype=torch.long, device=table.constant.device).expand(1, _ANY)
        return {self.table: View(table, {"weight": rows}), "position_ids": position_ids}, {}


class CountedRows:
    """Answers `[:, start:stop]` like a buffer (1, rows) of 0, 1, 2, ... of any length."""

    def __init__(self, device: torch.device):
        self.device = device

    def __getitem__(self, index: tuple[slice, slice]) -> Tensor:
        return torch.arange(index[1].start or 0, index[1].stop, device=self.device)[None]


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
        return {self.child: View(child, {self.buffer: buffer})}, {}


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

    def with_table(self, reserved_rows: int) -> RefusedArguments:
        return self

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
    """Patch embeddings whose table is a constant take images of any size and aspect ratio.

    Attributes:
        table: path of the constant, or several of which one is there ("a | b"); None where another module adds it.
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
        attributes: dict[str, Any] = {}
        if self.argument in arguments:
            attributes["image_size"] = tuple(arguments[self.argument].shape[-2:])
        constant = _first_at(module, self.table.split(" | ")) if self.table is not None else None
        if constant is not None:
            constant = constant if isinstance(constant, Tensor) else constant()
            if self.rows > 1 and self.table is not None:
                attributes[self.table] = constant = constant.expand(*constant.shape[:-2], self.rows, -1)

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
        table: the table, all of whose rows the encoder takes.
    """

    setting: str
    convolutions: tuple[str, ...]
    table: str = "embed_positions"

    def with_table(self, reserved_rows: int) -> AnyInputLength:
        return self

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        positions = arguments["input_features"].shape[-1]
        for name in self.convolutions:
            positions = positions // getattr(module, name).stride[0]
        attributes: dict[str, Any] = {"config": View(module.config, {self.setting: positions})}
        if not isinstance(getattr(module, self.table), ConstantPositions):
            attributes[self.table] = View(getattr(module, self.table), {"num_embeddings": positions})
        return attributes, {}


@dataclass(frozen=True)
class ReadRows(LengthLimit):
    """A host that reads the rows of the table itself, rather than ask it for positions, reads the one that is left.

    Attributes:
        table: the child that was the table.
        attribute: what it holds them in.
    """

    table: str
    attribute: str = "weight"

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        return {self.table: Rows(self.attribute, getattr(module, self.table)()[None])}, {}


@dataclass(frozen=True)
class AnyVideoSize(LengthLimit):
    """Video embeddings that compare the rows of their tables with the patches and frames in hand (TimeSformer).

    Attributes:
        space, time: attributes that hold the constants, after a class token and without one.
    """

    space: str = "position_embeddings"
    time: str = "time_embeddings"

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        _, frames, _, height, width = arguments["pixel_values"].shape
        patches: Any = module.patch_embeddings
        rows = (height // patches.patch_size[0]) * (width // patches.patch_size[1])
        attributes = {self.space: getattr(module, self.space).expand(1, 1 + rows, -1)}
        if hasattr(module, self.time):
            attributes[self.time] = getattr(module, self.time).expand(1, frames, -1)
        return attributes, {}


@dataclass(frozen=True)
class AnySeriesLength(LengthLimit):
    """A constant for each patch of a time series (PatchTST's), however many, since a class token's is taken apart."""

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        rows: Any = module.position_enc
        tokens = arguments["patch_input"].shape[2] + bool(module.use_cls_token)
        return {"position_enc": rows.expand(tokens, -1)}, {}


@dataclass(frozen=True)
class AnyTileSize(LengthLimit):
    """A vision model that cuts an image into tiles (Mllama's) takes tiles of any size."""

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        convolution: Any = module.patch_embedding
        height, width = arguments["pixel_values"].shape[-2:]
        rows, columns = height // convolution.stride[0], width // convolution.stride[1]
        tokens = rows * columns + 1
        if tokens % 8 == 0:  # its mask takes "no padding" for "padding only"
            raise PositionError(
                f"{type(module).__name__} pads tiles to a multiple of 8 tokens, and masks all of one that needs none: "
                f"{rows} x {columns} patches and a class token. Choose another image size."
            )
        return {"num_patches": tokens}, {}


class Rows:
    """Stands in the view of a module for the child that was a table, with its rows (1, width) in an attribute."""

    def __init__(self, attribute: str, rows: Tensor):
        setattr(self, attribute, rows)


def _first_at(module: Any, paths: list[str]) -> Any:
    """What stands at the first of several paths where anything does; a loop, as torch.compile of 2.11 wants it."""
    for path in paths:
        found = _at(module, path)
        if found is not None:
            return found
    return None


def _at(module: Any, path: str) -> Any:
    """What stands at a path, None where something on the way is missing."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module
