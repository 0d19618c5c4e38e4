"""Planner of position tables: removed (a constant remains), resized, or computed by a rule."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from ..core.plan_table import Change, Kept, Row, refuse_private_forward
from ..core.weight_change import WeightChange
from ..runtime.constants import ZERO_MEAN_ROW, ConstantPositions, MeanRow
from ..runtime.edits import LENS_SLOT, Call, Edit
from ..runtime.length_lenses import MEAN_ROW, NOTHING
from ..runtime.tables import ComputedPositions
from ..schemes.learned import Learned
from ..schemes.position_schemes import Position
from ..schemes.request import Record, SchemeRequest
from ..sites.sites import Sites
from ..sites.stacks import REMOVED_ROWS, FoundStack, first_row, max_positions, table_size
from .config_diff import Setting, host_with
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
    if isinstance(scheme, Learned) and not gone and item.is_grid:
        from .kept_tables import grid_table_change

        return grid_table_change(item, scheme, row, fresh=part.init == "reset")
    if scheme.keeps_table:
        return _kept(model, item, scheme, row, part)
    becomes = NOTHING if item.stack.computes else MEAN_ROW
    losses = "absolute positions are removed", loses_order(item, scheme)
    row = row.replace_by(becomes, *losses, note="inputs of any length")
    edits, constants = removal(model, item, fresh=part.init == "reset")
    return Change(row, edits, starts=tuple(WeightChange(path, "fill", 0.0, anew=True) for path in constants))


def _kept(model: nn.Module, item: FoundStack, scheme: Position, row: Row, part: SchemeRequest[Position]) -> Change:
    from .kept_tables import kept_table_change  # most schemes remove the table

    return kept_table_change(item, scheme, row, part.init == "reset", partial(_longer, model, item))


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
            change = _kept(model, item, scheme, row, part)
            made.append(replace(change, row=change.row.with_note("its class makes it as long as the first")))
    return made


def takes_any_length(record: Record, sites: Sites, planned: Sequence[PlannerResult]) -> bool:
    """Return whether no table limits the length of inputs after a plan; False for a model that never had a table.

    The record and the sites are the model's as it is now.
    """
    new = [one for one in planned if one.kind == "pos"]
    if not new:
        return record.any_length
    schemes = {change.row.module: one.part.scheme for one in new for change in one.changes if change.replaces}
    left = [one.table() for one in sites.tables if one.table_name not in schemes and one.removed_rows() is None]
    ending = [isinstance(one, Tensor | nn.Module) and not isinstance(one, ComputedPositions) for one in left]
    ending += [not schemes[one.table_name].any_length for one in sites.tables if one.table_name in schemes]
    return new[-1].part.scheme.max_positions is None and bool(sites.tables) and not any(ending)
