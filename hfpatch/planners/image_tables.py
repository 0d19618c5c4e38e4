"""Resizing of position tables; tables on a grid of patches are interpolated to another image size."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.plan_table import Change, Row
from ..core.weight_change import WeightChange
from ..runtime.constants import Rows
from ..runtime.edits import Call, Edit
from ..runtime.patch_errors import UnsupportedError
from ..schemes.learned import Learned
from ..sites.stacks import FoundStack

IMAGE_SIZE = "image_size"  # transformers' name


@dataclass(frozen=True)
class RowOrder:
    """Order of a table's rows: other tokens, then frames of rows of columns of patches, then other tokens."""

    before: int
    frames: int
    rows: int
    columns: int
    after: int = 0

    @property
    def patches(self) -> int:
        return self.frames * self.rows * self.columns

    def resize(self, table: Tensor, scheme: Learned, rows: int, columns: int, usual: str) -> Tensor:
        """Return a table (..., width) with other rows and columns of patches; `usual` is its host's method."""
        flat = table.reshape(-1, table.shape[-1])
        first, last = self.before, self.before + self.patches
        grid = flat[first:last].reshape(self.frames, self.rows, self.columns, -1)
        new = scheme.interpolate(grid, rows, columns, usual).reshape(-1, flat.shape[-1])
        joined = torch.cat((flat[:first], new, flat[last:]))
        if table.dim() == 4:
            return joined.reshape(1, rows, columns, -1)
        return joined.reshape(*[1] * (table.dim() - 2), *joined.shape)


def grid_table_change(item: FoundStack, scheme: Learned, row: Row, fresh: bool) -> Change:
    """Return the change of a table on a grid of patches; `row` is the plan's row so far.

    Raises:
        UnsupportedError: the order of its patches isn't known, or the host's class isn't made for the new size.
    """
    if scheme.repeats:
        raise UnsupportedError(
            f"{item.table_name}: rows= and keep= are for the table of a sequence, and this one is a grid of patches, "
            "which is interpolated. Leave them out, or choose another part by only=."
        )
    if scheme.image_size is None and scheme.max_positions is None and not fresh:
        return Change(row.keep("pass image_size= to resize it"))
    table, where, usual = item.table(), item.table_name, getattr(item.stack.grid, "interpolation", "bicubic")
    weight = _weight(table)
    if weight is None:
        raise UnsupportedError(f"{where}: its rows are computed ({type(table).__name__}), so none are interpolated.")
    order = row_order_of(item, weight)
    size = _new_size(item, scheme, order)
    rows, columns = _count_patches(item, *sides(size))
    if (rows, columns) == (order.rows, order.columns) and not fresh:
        return Change(row.keep(f"holds {rows} x {columns} patches already"))
    loss = f"its {order.rows} x {order.columns} positions are stretched over {rows} x {columns}"
    loss = "its rows start afresh" if fresh else loss
    becomes = f"Learned({rows} x {columns} patches, {scheme.grid_method(usual)})"
    row = row.replace_by(becomes, loss, note=f"{IMAGE_SIZE}={size}")
    patches = slice(order.before, order.before + order.frames * rows * columns)
    edits, values = resize_table(item, _Stretch(order, scheme, rows, columns, usual), patches if fresh else None)
    return Change(row, tuple(edits), values)


@dataclass(frozen=True)
class _Stretch:
    """Interpolates a table on a grid of patches; arguments as in `RowOrder.resize`."""

    order: RowOrder
    scheme: Learned
    rows: int
    columns: int
    usual: str

    def __call__(self, table: Tensor) -> Tensor:
        return self.order.resize(table, self.scheme, self.rows, self.columns, self.usual)

    def __str__(self) -> str:
        return f"rows of x stretched over {self.rows} x {self.columns}"


@dataclass(frozen=True)
class _Redraw:
    """Resizes a table, and draws some of its new rows at random.

    Attributes:
        resize: makes the new rows.
        drawn: which of the new rows are random.
        spread: their standard deviation.
    """

    resize: Callable[[Tensor], Tensor]
    drawn: slice
    spread: float

    def __call__(self, table: Tensor) -> Tensor:
        new = self.resize(table)
        new.view(-1, new.shape[-1])[self.drawn].normal_(std=self.spread)
        return new

    def __str__(self) -> str:
        return f"random, of standard deviation {self.spread:.4g}"


def resize_table(
    item: FoundStack, resized: Callable[[Tensor], Tensor], fresh: slice | None
) -> tuple[list[Edit], tuple[WeightChange, ...]]:
    """Return the edits that resize a learned table, and the change of its values before them.

    Args:
        resized: makes the new values from the table's.
        fresh: which of the new rows start at random values; None for none.
    """
    table, old, config = item.table(), _weight(item.table()), item.config
    assert old is not None
    shape, where = resized(old.detach()).shape, item.table_name if table is old else f"{item.table_name}.weight"
    if fresh is not None:
        spread = getattr(config, "initializer_range", None) or getattr(config, "init_std", None) or 0.02
        resized = _Redraw(resized, fresh, spread)
    edits = [Edit.of(where, Call.of(Rows, *shape))]
    if table is not old:
        edits.append(Edit.of(f"{item.table_name}.num_embeddings", shape[0]))
    return edits, (WeightChange(where, "rows", resized),)


# --- sizes ------------------------------------------------------------------------------------------------------------


def new_size(item: FoundStack, scheme: Learned) -> Any:
    """Return the config's new image size; None if the table keeps its size."""
    weight = _weight(item.table())
    if weight is None or (scheme.image_size is None and scheme.max_positions is None):
        return None
    return _new_size(item, scheme, row_order_of(item, weight))


def _weight(table: Any) -> nn.Parameter | None:
    """The rows of a table, if they are trained."""
    weight = table.weight if isinstance(table, nn.Embedding) else table
    return weight if isinstance(weight, nn.Parameter) else None


def row_order_of(item: FoundStack, table: Tensor) -> RowOrder:
    """Return the order of a stack's table.

    Raises:
        UnsupportedError: neither the config nor the architecture tells the order.
    """
    grid, config = item.stack.grid, item.config
    size = getattr(config, IMAGE_SIZE, None)
    what = "holds a grid of patches, whose rows have two coordinates" if grid is not None else "is no nn.Embedding"
    where = f"{item.table_name} {what}"
    if grid is None or grid.projection == "" or not _is_size(size):
        raise UnsupportedError(
            f"{where}, and how many rows and columns it has can't be told from {type(config).__name__}. pos='rope' and "
            "pos='nope' do without."
        )
    rows, columns = _count_patches(item, *sides(size))
    total = table.numel() // table.shape[-1]
    before, after = (grid.tokens(item.owner, counts) for counts in (grid.before, grid.after))
    frames = max(total // (rows * columns), 1) if grid.projection and grid.axes(item.owner) == 3 else 1
    others = total - frames * rows * columns
    if (table.dim() == 4 and table.shape[1:3] == (rows, columns)) or others == 0:
        return RowOrder(0, frames, rows, columns)
    if others == before + after:
        return RowOrder(before, frames, rows, columns, after)
    if 0 < others <= before:  # registers have no rows
        return RowOrder(others, frames, rows, columns)
    raise UnsupportedError(
        f"{where}: {total} rows aren't the {rows} x {columns} patches of {IMAGE_SIZE}={size} with {before + after} "
        "other tokens, so it can't be interpolated."
    )


def _is_size(size: Any) -> bool:
    if isinstance(size, list | tuple):
        return len(size) == 2 and all(type(side) is int for side in size)
    return type(size) is int


def sides(size: Any) -> tuple[int, int]:
    """Return height and width of a config's image size, a side or both."""
    return (size[0], size[1]) if isinstance(size, list | tuple) else (size, size)


def _count_patches(item: FoundStack, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of the patches of an image."""
    grid = item.stack.grid
    assert grid is not None
    if grid.projection:
        rows, columns = grid.count_patches(item.owner, height, width)
    else:
        patch = sides(getattr(item.config, "patch_size", None) or 0)
        if not all(patch):
            raise UnsupportedError(f"{item.table_name}: {type(item.config).__name__} has no patch_size.")
        rows, columns = height // patch[0], width // patch[1]
    if rows < 1 or columns < 1:
        raise UnsupportedError(f"{item.table_name}: an image of {height} x {width} pixels has no patch.")
    return rows, columns


def _new_size(item: FoundStack, scheme: Learned, order: RowOrder) -> Any:
    """The config's new image size, in the form of its old one."""
    old = getattr(item.config, IMAGE_SIZE)
    size = scheme.image_size if scheme.image_size is not None else old
    if scheme.max_positions is not None:
        side = math.isqrt(scheme.max_positions)
        if side**2 != scheme.max_positions or order.rows != order.columns or order.frames > 1:
            raise UnsupportedError(
                f"{item.table_name} holds {order.rows} x {order.columns} patches, and {scheme.max_positions} of them "
                "don't say how many rows and columns. Give image_size instead; only= chooses other parts."
            )
        grid = (order.rows, order.columns)
        size = tuple(length * side // cells for length, cells in zip(sides(old), grid, strict=True))
    height, width = sides(size)
    if isinstance(old, list | tuple):
        return type(old)((height, width))
    return height if height == width else (height, width)
