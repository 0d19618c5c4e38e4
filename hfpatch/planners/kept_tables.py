"""Planner of position tables that stay: computed by a rule, resized, or interpolated to another image size."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.plan_table import Change, Kept, Row
from ..core.weight_change import WeightChange
from ..runtime.constants import Rows
from ..runtime.edits import LENS_SLOT, Call, Edit
from ..runtime.length_lenses import CountedLength, limit_beside_table
from ..runtime.patch_errors import UnsupportedError
from ..runtime.tables import ComputedPositions
from ..schemes.learned import IMAGE_SIZE, Learned, sides
from ..schemes.position_schemes import Position
from ..sites.stacks import FoundStack, first_row


def kept_table_change(
    item: FoundStack, scheme: Position, row: Row, fresh: bool, longer: Callable[[int], Iterable[Edit]]
) -> Change:
    """Return the change of a table that is kept, computed or resized; with `fresh`, its rows are new.

    Args:
        row: the plan's row so far.
        longer: gives the edits of attributes that hold the old maximum length, for a new one.

    Raises:
        UnsupportedError: the table is gone, or doesn't have one row for each position.
    """
    table: Any = item.table()
    if item.removed_rows() is not None:
        raise UnsupportedError(
            f"{item.table_name}: an earlier patch removed this table, and pos={scheme.name!r} needs it. Use "
            "unpatch_model (after a patch with reversible=True), or start from the original checkpoint."
        )
    why = _reason_not_to_resize(item, table, scheme)
    if why is not None:
        raise UnsupportedError(
            f"{item.table_name}: pos={scheme.name!r} needs a table with one row a position, and {row.now} {why}. "
            "pos='rope' and pos='nope' do without."
        )
    if isinstance(scheme, Learned) and isinstance(table, ComputedPositions):
        raise UnsupportedError(
            f"{item.table_name} is computed since an earlier patch, so it has no rows to resize. Start from the "
            "original checkpoint."
        )
    first = first_row(item)
    old, new = table.num_embeddings - first, scheme.max_positions
    edits, values = list[Edit](), tuple[WeightChange, ...]()
    if not isinstance(scheme, Learned):
        same = _follows(table, scheme, first)
        loss = None if same else "learned positions are replaced"
        why_exact = "its rows follow this rule already"
        note = "inputs of any length" + (" (the table's own rule)" if same else "")
        row = row.replace_by(scheme.describe(0), loss, why_exact=why_exact, note=note)
        edits.append(Edit.of(item.table_name, Call.of(ComputedPositions, scheme.rule(), first)))
    elif scheme.image_size is not None:
        row = row.keep("image_size is for tables of image patches")
    elif new in (None, old) and not (scheme.repeats and scheme.equal_up_to(old) < old) and not fresh:
        row = row.keep(Kept.DONE if new else "needs max_positions, the number of rows to resize it to")
    else:
        loss = "its rows are reinitialised" if fresh else scheme.loss(old)
        kept = None if fresh else scheme.note(old)
        row = row.replace_by(scheme.describe(0), loss, why_exact="every position keeps its row", note=kept)
        edits, values = resize_table(item, _Resize(scheme, first), slice(first, None) if fresh else None)
    longest = sys.maxsize if scheme.any_length else new
    if longest is not None and row.becomes is not None:
        limits = [(path, limit_beside_table(limit, item.stack.reserved_rows)) for path, limit in item.stack.limits]
        if isinstance(scheme, Learned):  # buffers of indices are as long as the table
            limits = [(path, limit) for path, limit in limits if isinstance(limit, CountedLength)]
        edits += [Edit.of(item.path(path, LENS_SLOT), limit) for path, limit in limits if limit is not None]
        edits += longer(longest)
    return Change(row, tuple(edits), values)


@dataclass(frozen=True)
class _Resize:
    """Gives a learned table another number of rows; the first rows, of no position, stay.

    Attributes:
        scheme: makes the new rows.
        first: how many rows belong to no position.
    """

    scheme: Learned
    first: int

    def __call__(self, rows: Tensor) -> Tensor:
        return torch.cat((rows[: self.first], self.scheme.resize(rows[self.first :])))

    def __str__(self) -> str:
        return f"rows of x by {self.scheme}"


def _reason_not_to_resize(item: FoundStack, table: Any, scheme: Position) -> str | None:
    """Why a table can't be computed or resized in its place; None if it can."""
    stack = item.stack
    if item.is_grid:
        return "holds a grid of patches, whose rows have two coordinates"
    if not isinstance(table, nn.Embedding):
        return "is no nn.Embedding"
    if stack.others and not isinstance(scheme, Learned):  # the others may be read at positions beyond their last
        return f"isn't the only one ({', '.join(stack.others)})"
    if any(limit_beside_table(limit, stack.reserved_rows) is None for _, limit in stack.limits):
        return "is read by the model in a way that hfpatch can't follow"
    return None


def _follows(table: nn.Embedding, scheme: Position, first: int) -> bool:
    """Whether the table's rows are already those of a scheme's rule."""
    if table.weight.is_meta:
        return False
    indices = torch.arange(table.num_embeddings - first, device=table.weight.device)
    rule = scheme.rule()
    rows = None if rule is None else rule.rows(indices, table.embedding_dim)
    tolerance = 1e-5 if table.weight.dtype in (torch.float32, torch.float64) else 1e-2
    return rows is not None and torch.allclose(table.weight[first:].to(rows.dtype), rows, atol=tolerance, rtol=0)


# Grids of patches


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
