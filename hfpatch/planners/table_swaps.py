"""Planner of position tables: removed (a constant remains), resized, or computed by a rule."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..core.plan_table import Change, Kept, Row, refuse_private_forward
from ..core.weight_change import WeightChange
from ..runtime.constants import ZERO_MEAN_ROW, ConstantPositions, MeanRow
from ..runtime.edits import LENS_SLOT, Call, Edit
from ..runtime.length_lenses import MEAN_ROW, NOTHING, CountedLength, limit_beside_table
from ..runtime.patch_errors import UnsupportedError
from ..runtime.tables import ComputedPositions
from ..schemes.learned import Learned
from ..schemes.position_schemes import Position
from ..schemes.request import Record, SchemeRequest
from ..sites.sites import Sites
from ..sites.stacks import REMOVED_ROWS, FoundStack, first_row, max_positions, table_size
from .config_diff import Setting, host_with
from .image_tables import grid_table_change, resize_table
from .interface import PlannerResult


def table_change(model: nn.Module, item: FoundStack, part: SchemeRequest[Position], why: str | None) -> Change:
    """Plan the change of a stack's table; `why` is the reason to keep it, if any.

    Raises:
        UnsupportedError: the scheme needs a table of another kind.
    """
    table, scheme, gone = item.table(), part.scheme, item.removed_rows() is not None
    if gone and (why is Kept.WITH_ITS_ATTENTIONS or not scheme.keeps_table):
        return Change(Row("position", item.table_name, "a constant", reason=why or Kept.DONE))
    row = Row("position", item.table_name, _table_text(table, item.stack.computes or gone), reason=why)
    if why and not gone:
        return Change(row)
    for path, _ in item.stack.limits:
        refuse_private_forward(item.path(path), item.owner.get_submodule(path))
    if isinstance(scheme, Learned) and not gone and is_grid(item):
        return grid_table_change(item, scheme, row, fresh=part.init == "reset")
    if scheme.keeps_table:
        return _kept_table_change(model, item, scheme, row, fresh=part.init == "reset")
    becomes = NOTHING if item.stack.computes else MEAN_ROW
    losses = "absolute positions are removed", loses_order(item, scheme)
    row = row.replace_by(becomes, *losses, note="inputs of any length")
    edits, constants = removal(model, item, fresh=part.init == "reset")
    return Change(row, edits, starts=tuple(WeightChange(path, "fill", 0.0, anew=True) for path in constants))


def _table_text(table: nn.Module | Tensor, computed: bool) -> str:
    kind = table._get_name() if isinstance(table, nn.Module) else type(table).__name__
    if computed:
        return kind
    rows, width = table_size(table)
    return f"{kind}({rows}, {width})"


def loses_order(item: FoundStack, scheme: Position) -> str | None:
    """Return the loss of a stack that can't tell the order of its tokens without positions; None for other stacks."""
    if scheme.name != "nope" or item.stack.causal or getattr(item.owner, "is_decoder", False):
        return None
    return "without a causal mask the stack can't tell the order of its tokens"


def removal(model: nn.Module, item: FoundStack, fresh: bool = False) -> tuple[tuple[Edit, ...], list[str]]:
    """Return the edits that remove a stack's positions, and with `fresh` the names of Parameters to set to zero.

    What is left starts at the mean of what was there; with `fresh` it starts as for training from scratch.
    """
    stack, table, has_table = item.stack, item.table(), item.length is None
    places = list(stack.removal)
    if has_table and all(place != stack.table for place, _ in places):
        places.insert(0, (stack.table, Call.of(ConstantPositions)))
    found: list[Edit] = []
    constants: list[str] = []
    for place, value in places:
        for above, holder, attribute in item.places(place):
            if attribute != LENS_SLOT and getattr(holder, attribute, None) is None:  # this configuration has none
                continue
            if isinstance(value, Call) and value.name == ConstantPositions.__name__:
                edit, constant = _mean(item, above, attribute, holder, value, fresh)
                found += edit
                constants += constant
            else:
                found.append(Edit.of(item.path(above, attribute), value))
    if not isinstance(table, nn.Module):
        above, _, _ = stack.table.rpartition(".")
        found.append(Edit.of(item.path(above, REMOVED_ROWS), table_size(table)[0] if has_table else 0))
    return (*found, *_longer(model, item, sys.maxsize)), constants if fresh else []


def _mean(
    item: FoundStack, above: str, attribute: str, holder: nn.Module, value: Call, fresh: bool
) -> tuple[list[Edit], list[str]]:
    """The edit that puts a constant in the place of one table, and the constant's name if it is a Parameter."""
    path, table = item.path(above, attribute), getattr(holder, attribute)
    if isinstance(table, nn.Module):
        first = {"first": item.stack.reserved_rows} if item.stack.reserved_rows else {}
        return [Edit.of(path, Call.of(ConstantPositions, **first, **dict(value.kwargs)))], [f"{path}.constant"]
    if attribute in holder._buffers:  # length_lenses.MeanOfBuffer hides it
        return [Edit.of(item.path(above, ZERO_MEAN_ROW), True)] if fresh else [], []
    if isinstance(table, nn.Parameter):
        return [Edit.of(path, Call.of(MeanRow))], [path]
    return [Edit.of(path, Call.of(MeanRow, zero=True) if fresh else Call.of(MeanRow))], []


def _longer(model: nn.Module, item: FoundStack, longest: int) -> Iterator[Edit]:
    """Edits of attributes that hold the old maximum length, in the owner and in the modules around it."""
    for length in item.stack.lengths:
        for name, module in model.named_modules():
            if length in module.__dict__ and any(inner is item.owner for inner in module.modules()):
                yield Edit.of(f"{name}.{length}", longest)


def _kept_table_change(model: nn.Module, item: FoundStack, scheme: Position, row: Row, fresh: bool) -> Change:
    """Return the change of a table that is kept, computed or resized; with `fresh`, its rows are new.

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
        edits += _longer(model, item, longest)
    return Change(row, tuple(edits), values)


def tables_beside(
    model: nn.Module, tables: list[FoundStack], part: SchemeRequest[Position], done: list[Change], sizes: list[Setting]
) -> list[Change]:
    """Return the changes of further tables that a class makes as long as the first (LiLT's boxes, LUKE's entities).

    Args:
        model: the model as it is now.
        tables: the tables that a part changes.
        part: the request.
        done: the part's changes so far.
        sizes: what the part's changes set in the model's config.
    """
    placed = {place for change in done for edit in change.edits for place in edit.at}
    found: dict[str, FoundStack] = {}
    for item in tables:
        rows = max_positions(item) + first_row(item)
        stack = replace(item.stack, removal=(), lengths=(), reserved_rows=first_row(item))
        for name, module in item.owner.named_modules():
            path, is_table = item.path(name), isinstance(module, nn.Embedding)
            if is_table and module.num_embeddings == rows and not {path, f"{path}.weight"} & placed:
                found[path] = replace(item, stack=replace(stack, table=name))
    longer = dict(host_with(model, sizes).named_modules()) if found and sizes else {}
    scheme = part.scheme if isinstance(part.scheme, Learned) else Learned(max_positions=part.scheme.max_positions)
    made = []
    for path, item in found.items():
        if path in longer and table_size(longer[path]) != table_size(item.table()):
            row = Row("position", path, _table_text(item.table(), False))
            change = _kept_table_change(model, item, scheme, row, fresh=part.init == "reset")
            made.append(replace(change, row=change.row.with_note("its class makes it as long as the first")))
    return made


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
    if is_grid(item):
        return "holds a grid of patches, whose rows have two coordinates"
    if not isinstance(table, nn.Embedding):
        return "is no nn.Embedding"
    if stack.others and not isinstance(scheme, Learned):  # the others may be read at positions beyond their last
        return f"isn't the only one ({', '.join(stack.others)})"
    if any(limit_beside_table(limit, stack.reserved_rows) is None for _, limit in stack.limits):
        return "is read by the model in a way that hfpatch can't follow"
    return None


def is_grid(item: FoundStack) -> bool:
    """Return whether a stack's table holds an image's patches."""
    return item.stack.grid is not None or isinstance(item.table(), nn.Parameter)


def _follows(table: nn.Embedding, scheme: Position, first: int) -> bool:
    """Whether the table's rows are already those of a scheme's rule."""
    if table.weight.is_meta:
        return False
    indices = torch.arange(table.num_embeddings - first, device=table.weight.device)
    rule = scheme.rule()
    rows = None if rule is None else rule.rows(indices, table.embedding_dim)
    tolerance = 1e-5 if table.weight.dtype in (torch.float32, torch.float64) else 1e-2
    return rows is not None and torch.allclose(table.weight[first:].to(rows.dtype), rows, atol=tolerance, rtol=0)


def takes_any_length(record: Record, sites: Sites, planned: Sequence[PlannerResult]) -> bool:
    """Return whether no table limits the length of inputs after a plan; False for a model that never had a table.

    The record and the sites are the model's as it is now.
    """
    new = [one for one in planned if one.kind == "pos"]
    if not new:
        return record.any_length
    schemes = {change.row.module: one.part.scheme for one in new for change in one.changes if change.changes}
    left = [one.table() for one in sites.tables if one.table_name not in schemes and one.removed_rows() is None]
    ending = [isinstance(one, Tensor | nn.Module) and not isinstance(one, ComputedPositions) for one in left]
    ending += [not schemes[one.table_name].any_length for one in sites.tables if one.table_name in schemes]
    return new[-1].part.scheme.max_positions is None and bool(sites.tables) and not any(ending)
