"""A table of positions on a grid of patches, interpolated for images of another size, and what its host derives from
that size.

What a host derives (numbers of patches, buffers of indices, sizes that its forward checks) is in no record: the host's
class is built twice without weights, from the config as it is and from one with the new size, and what differs between
the two is what has to change. So the model becomes the one that its config describes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from .edits import Edits
from .errors import UnsupportedError
from .grid import PackedGrid, PlacedGrid
from .positions import Learned
from .record import Part
from .rows import Change, Row
from .scheme import KEY
from .stacks import FoundStack
from .view import host_class

IMAGE_SIZE = "image_size"  # transformers' name
_UNSET = -12345  # what no buffer of indices or offsets holds throughout
_PLAIN = (int, float, str, bool, type(None))


@dataclass(frozen=True)
class Layout:
    """How a table's rows lie: some of other tokens, then frames of rows of columns of patches, then others again."""

    before: int
    frames: int
    rows: int
    columns: int
    after: int = 0

    @property
    def patches(self) -> int:
        return self.frames * self.rows * self.columns

    def resized(self, table: Tensor, scheme: Learned, rows: int, columns: int, usual: str) -> Tensor:
        """A table (..., width) with other rows and columns of patches; `usual` is its host's method."""
        flat = table.reshape(-1, table.shape[-1])
        first, last = self.before, self.before + self.patches
        grid = flat[first:last].reshape(self.frames, self.rows, self.columns, -1)
        new = scheme.interpolated(grid, rows, columns, usual).reshape(-1, flat.shape[-1])
        joined = torch.cat((flat[:first], new, flat[last:]))
        if table.dim() == 4:
            return joined.reshape(1, rows, columns, -1)
        return joined.reshape(*[1] * (table.dim() - 2), *joined.shape)


@dataclass
class Derived:
    """What the host's class makes of another size: (module, name, value) of attributes and of buffers."""

    attributes: list[tuple[str, str, Any]]
    buffers: list[tuple[str, str, Tensor]]


def grid_table_change(model: nn.Module, item: FoundStack, part: Part, row: Row) -> Change:
    """What becomes of a table on a grid of patches.

    Args:
        model: the outermost model.
        item, part: the table, and what is asked for.
        row: what the plan says of it so far.

    Raises:
        UnsupportedError: how its patches lie isn't known, or the host's class isn't made for the new size.
    """
    scheme = part.scheme
    assert isinstance(scheme, Learned)
    if part.modules:  # a replayed part finds the table as the config built it
        row.action, row.becomes = "replace", scheme.describe(0)
        return Change(row, lambda edits: None)
    if scheme.image_size is None and scheme.max_positions is None and part.init != "reset":
        row.reason = "image_size says for which images it is to hold"
        return Change(row)
    table, where, usual = item.table(), item.table_name, getattr(item.stack.grid, "interpolation", "bicubic")
    method = scheme.grid_method(usual)
    weight = table.weight if isinstance(table, nn.Embedding) else table
    if not isinstance(weight, nn.Parameter):
        raise UnsupportedError(f"{where}: its rows are computed ({type(table).__name__}), so none are interpolated.")
    layout = layout_of(item, weight)
    size = _new_size(item, scheme, layout)
    rows, columns = _cut(item, *_sides(size))
    same = (rows, columns) == (layout.rows, layout.columns)
    if same and part.init != "reset":
        row.reason = f"holds {rows} x {columns} patches already"
        return Change(row)
    new = _resized(weight, layout, scheme, rows, columns, usual)
    if part.init == "reset":
        _start_afresh(new, layout, rows * columns, item.owner.config)
    derived = Derived([], []) if same else derive(model, item, size, tuple(new.shape))
    row.action, row.becomes = "replace", f"Learned({rows} x {columns} patches, {method})"
    row.reason = f"{IMAGE_SIZE}={size}"
    row.loss = f"its {layout.rows} x {layout.columns} positions are stretched over {rows} x {columns}"
    if part.init == "reset":
        row.loss = "its rows start afresh"
    if part.init == "exact":
        raise UnsupportedError(f"{where}: pos='learned' isn't exact: {row.loss}. Use init='auto' to accept that.")

    def apply(edits: Edits) -> None:
        parameter = nn.Parameter(new.to(weight.device), requires_grad=weight.requires_grad)
        holder, name = (table, "weight") if isinstance(table, nn.Embedding) else item.holder()
        edits.set_parameter(holder, name, parameter)
        for path, attribute, value in derived.attributes:
            edits.set_attribute(model.get_submodule(path), attribute, value)
        for path, name, buffer in derived.buffers:
            edits.set_buffer(model.get_submodule(path), name, buffer.to(weight.device))

    return Change(row, apply)


def _resized(weight: Tensor, layout: Layout, scheme: Learned, rows: int, columns: int, usual: str) -> Tensor:
    return layout.resized(weight.detach(), scheme, rows, columns, usual)


def _start_afresh(table: Tensor, layout: Layout, patches: int, config: Any) -> None:
    spread = getattr(config, "initializer_range", None) or 0.02
    first = layout.before
    table.view(-1, table.shape[-1])[first : first + layout.frames * patches].normal_(std=spread)


# --- sizes ------------------------------------------------------------------------------------------------------------


def config_size(item: FoundStack, scheme: Learned) -> tuple[Any, str, Any] | None:
    """What a scheme sets in a config: (the config, its attribute, the value); None where the table keeps its size."""
    table = item.table()
    weight = table.weight if isinstance(table, nn.Embedding) else table
    if not isinstance(weight, nn.Parameter) or (scheme.image_size is None and scheme.max_positions is None):
        return None
    size = _new_size(item, scheme, layout_of(item, weight))
    return item.owner.config, IMAGE_SIZE, size


def layout_of(item: FoundStack, table: Tensor) -> Layout:
    """How the rows of a stack's table lie.

    Raises:
        UnsupportedError: the config and the record don't tell.
    """
    grid, config = item.stack.grid, getattr(item.owner, "config", None)
    size = getattr(config, IMAGE_SIZE, None)
    where = f"{item.table_name} holds a grid of patches, whose rows have two coordinates"
    if item.stack.others:
        raise UnsupportedError(
            f"{where}, and isn't the only one ({', '.join(item.stack.others)}): it can't be resized."
        )
    if grid is None or isinstance(grid, PackedGrid | PlacedGrid) or not _is_size(size):
        raise UnsupportedError(
            f"{where}, and how many rows and columns it has can't be told from {type(config).__name__}. pos='rope' and "
            "pos='nope' do without."
        )
    rows, columns = _cut(item, *_sides(size))
    total = table.numel() // table.shape[-1]
    before, after = (grid.tokens(item.owner, counts) for counts in (grid.before, grid.after))
    frames = max(total // (rows * columns), 1) if grid.projection and grid.axes(item.owner) == 3 else 1
    others = total - frames * rows * columns
    if (table.dim() == 4 and table.shape[1:3] == (rows, columns)) or others == 0:
        return Layout(0, frames, rows, columns)
    if others == before + after:
        return Layout(before, frames, rows, columns, after)
    if 0 < others <= before:  # registers have no rows
        return Layout(others, frames, rows, columns)
    raise UnsupportedError(
        f"{where}: {total} rows aren't the {rows} x {columns} patches of {IMAGE_SIZE}={size} with {before + after} "
        "other tokens, so it can't be interpolated."
    )


def _is_size(size: Any) -> bool:
    if isinstance(size, list | tuple):
        return len(size) == 2 and all(type(side) is int for side in size)
    return type(size) is int


def _sides(size: Any) -> tuple[int, int]:
    return (size[0], size[1]) if isinstance(size, list | tuple) else (size, size)


def _cut(item: FoundStack, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of the patches of an image."""
    grid = item.stack.grid
    assert grid is not None
    if grid.projection:
        rows, columns = grid.cut_sizes(item.owner, height, width)
    else:
        patch = _sides(getattr(item.owner.config, "patch_size", None) or 0)
        if not all(patch):
            raise UnsupportedError(f"{item.table_name}: {type(item.owner.config).__name__} has no patch_size.")
        rows, columns = height // patch[0], width // patch[1]
    if rows < 1 or columns < 1:
        raise UnsupportedError(f"{item.table_name}: an image of {height} x {width} pixels has no patch.")
    return rows, columns


def _new_size(item: FoundStack, scheme: Learned, layout: Layout) -> Any:
    """The config's new image size, in the form of its old one."""
    old = getattr(item.owner.config, IMAGE_SIZE)
    size = scheme.image_size if scheme.image_size is not None else old
    if scheme.max_positions is not None:
        side = math.isqrt(scheme.max_positions)
        if side**2 != scheme.max_positions or layout.rows != layout.columns or layout.frames > 1:
            raise UnsupportedError(
                f"{item.table_name} holds {layout.rows} x {layout.columns} patches, and {scheme.max_positions} of them "
                "don't say how many rows and columns. Give image_size instead; only= chooses other parts."
            )
        sides = _sides(old)
        size = tuple(length * side // cells for length, cells in zip(sides, (layout.rows, layout.columns), strict=True))
    height, width = _sides(size)
    if isinstance(old, list | tuple):
        return type(old)((height, width))
    return height if height == width else (height, width)


# --- what the host derives --------------------------------------------------------------------------------------------


def derive(model: nn.Module, item: FoundStack, size: Any, shape: tuple[int, ...]) -> Derived:
    """What besides its table a model of this class has otherwise for images of another size.

    Args:
        model: the outermost model.
        item: the stack.
        size: the config's new image size.
        shape: of the resized table.

    Raises:
        UnsupportedError: the class can't be built for that size, or other weights have another shape then.
    """
    where = item.table_name
    path = _path(model.config, item.owner.config)
    if path is None:
        raise UnsupportedError(f"{where}: {type(item.owner).__name__} reads a config that isn't part of the model's.")
    before = _twin(model, path, None)
    try:
        after = _twin(model, path, size)
    except Exception as error:
        raise UnsupportedError(
            f"{where}: {host_class(type(model)).__name__} can't be built for {IMAGE_SIZE}={size} "
            f"({type(error).__name__}: {str(error).partition(chr(10))[0][:120]})."
        ) from error
    _require_alike(where, size, shape, before, after)
    old, new = (dict(twin.named_modules()) for twin in (before, after))
    derived = Derived([], [])
    for name, module in model.named_modules():
        if name in old:
            derived.attributes += [(name, *pair) for pair in _attributes(where, name, module, old[name], new[name])]
            derived.buffers += [(name, *pair) for pair in _buffers(where, name, module, old[name], new[name], after)]
    return derived


def _path(config: Any, wanted: Any) -> tuple[str, ...] | None:
    """Attributes that lead from a config to one inside it."""
    if config is wanted:
        return ()
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            below = _path(value, wanted)
            if below is not None:
                return (name, *below)
    return None


def _twin(model: nn.Module, path: tuple[str, ...], size: Any) -> Any:
    """The host's model without weights, with another image size if one is given."""
    config: Any = copy.deepcopy(model.config)
    vars(config).pop(KEY, None)
    object.__setattr__(config, "__class__", host_class(type(config)))
    if size is not None:
        inner = config
        for name in path:
            inner = getattr(inner, name)
        setattr(inner, IMAGE_SIZE, size)
    host: Any = host_class(type(model))
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return host(config)


def _require_alike(where: str, size: Any, shape: tuple[int, ...], before: nn.Module, after: nn.Module) -> None:
    """Refuse a size for which more than the table changes its shape."""
    old, new = (dict(twin.named_parameters()) for twin in (before, after))
    table = where if where in new else f"{where}.weight"
    built = tuple(new[table].shape) if table in new else None
    if built != shape:
        raise UnsupportedError(f"{where} would be {shape} for {IMAGE_SIZE}={size}, and its host makes {built} of that.")
    others = [name for name in {**old, **new} if name != table and _shape(old.get(name)) != _shape(new.get(name))]
    modules = [set(dict(twin.named_modules())) for twin in (before, after)]
    others += sorted(modules[0] ^ modules[1])
    if others:
        raise UnsupportedError(
            f"{where}: {others[0]} is made for {IMAGE_SIZE} as well"
            + (f" (and {len(others) - 1} more)" if len(others) > 1 else "")
            + ", and isn't interpolated. pos='rope' and pos='nope' take images of any size."
        )


def _shape(parameter: Tensor | None) -> tuple[int, ...] | None:
    return None if parameter is None else tuple(parameter.shape)


def _attributes(
    where: str, name: str, module: nn.Module, before: nn.Module, after: nn.Module
) -> Iterator[tuple[str, Any]]:
    """The plain attributes that differ."""
    for attribute, value in vars(after).items():
        present = vars(before).get(attribute)
        if isinstance(value, Tensor) and isinstance(present, Tensor) and value.shape != present.shape:
            raise UnsupportedError(f"{where}: {name}.{attribute} is made for {IMAGE_SIZE} as well, and isn't resized.")
        if not _is_plain(value) or not _is_plain(present) or value == present:
            continue
        if vars(module).get(attribute) == present:
            yield attribute, value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _buffers(
    where: str, name: str, module: nn.Module, before: nn.Module, after: Any, whole: Any
) -> Iterator[tuple[str, Tensor]]:
    """The buffers whose shape differs, as the host's class fills them."""
    changed = {
        buffer: present
        for buffer, present in module._buffers.items()
        if present is not None and _shape(after._buffers.get(buffer)) != _shape(before._buffers.get(buffer))
    }
    if not changed:
        return
    after.to_empty(device="cpu", recurse=False)
    for buffer in changed:
        after._buffers[buffer].fill_(_UNSET)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        whole._init_weights(after)  # as transformers fills them after it has loaded a model
    for buffer, present in changed.items():
        value = after._buffers[buffer]
        if bool((value == _UNSET).all()):
            raise UnsupportedError(
                f"{where}: {name}.{buffer} is made for {IMAGE_SIZE} as well, and what fills it isn't known."
            )
        yield buffer, value.to(present.dtype)
