"""What position schemes that keep a table do to it: rows by a rule, or more and fewer of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .architectures import Stack
from .edits import Edits
from .errors import UnsupportedError
from .limits import ConstantPositions
from .positions import Learned, Position
from .record import Part
from .rows import Change, Row
from .tables import ComputedPositions, computed, resized

ALL_KEPT = "its attentions are kept"


class FoundTable(Protocol):
    """A table of positions in the model in hand, and the stack that it feeds."""

    stack: Stack
    owner: Any
    table_name: str

    def holder(self) -> tuple[nn.Module, str]: ...
    def table(self) -> nn.Module | Tensor | None: ...
    def removed_rows(self) -> int | None: ...


def kept_table_change(item: FoundTable, part: Part, row: Row, lift_limits: Callable[[Edits, Position], None]) -> Change:
    """A table that stays, computed or resized.

    Args:
        item, part: the table, and what is asked for.
        row: what the plan says of it so far.
        lift_limits: what else has to change for other lengths.

    Raises:
        UnsupportedError: the table is gone, or isn't one row a position; or exactness was asked for, and isn't there.
    """
    scheme, table = part.scheme, item.table()
    assert isinstance(scheme, Position)
    if item.removed_rows() is not None:
        raise UnsupportedError(
            f"{item.table_name}: an earlier patch removed this table, and pos={scheme.name!r} needs it. Use "
            "unpatch_model (after a patch with reversible=True), or start from the original checkpoint."
        )
    why = _why_not_kept(item, table)
    if why is not None:
        raise UnsupportedError(
            f"{item.table_name}: pos={scheme.name!r} needs a table with one row a position, and {row.now} {why}. "
            "pos='rope' and pos='nope' do without."
        )
    assert isinstance(table, nn.Embedding)
    if isinstance(scheme, Learned) and isinstance(table, ComputedPositions):
        raise UnsupportedError(
            f"{item.table_name} is computed since an earlier patch, so it has no rows to resize. Start from the "
            "original checkpoint."
        )
    first = first_row(item)
    old, new = table.num_embeddings - first, scheme.max_positions
    row.action, row.becomes = "replace", scheme.describe(0)
    if not isinstance(scheme, Learned):
        same = _follows(table, scheme, first)
        row.reason = "inputs of any length" + (" (the table's own rule)" if same else "")
        row.loss = None if same else "learned positions are replaced"
    elif part.init == "reset":
        row.loss = "its rows start afresh"
    elif new in (None, old) and not part.modules:  # a replayed part finds the table as the config built it
        row.action, row.becomes = "keep", None
        row.reason = f"holds {old} positions already" if new else "max_positions says how many it is to hold"
        return Change(row)
    else:
        row.loss = scheme.loss(old)
    if part.init == "exact" and row.loss:
        raise UnsupportedError(
            f"{item.table_name}: pos={scheme.name!r} isn't exact: {row.loss}. Use init='auto' to accept that."
        )

    def apply(edits: Edits) -> None:
        _keep(edits, item, scheme, first, fresh=part.init == "reset")
        lift_limits(edits, scheme)

    return Change(row, apply)


def _keep(edits: Edits, item: FoundTable, scheme: Position, first: int, fresh: bool) -> None:
    holder, attribute = item.holder()
    table = item.table()
    assert isinstance(table, nn.Embedding)
    if isinstance(scheme, Learned):
        weight = resized(table, scheme, first)
        if fresh:
            nn.init.normal_(weight.data[first:], std=_initial_spread(item.owner.config))
        edits.set_parameter(table, "weight", weight)
        edits.set_attribute(table, "num_embeddings", len(weight))
    else:
        edits.set_module(holder, attribute, computed(table, scheme, first))


def _why_not_kept(item: FoundTable, table: Any) -> str | None:
    """Why a table can't be computed or resized in its place, None where it can."""
    stack = item.stack
    if stack.grid is not None or isinstance(table, nn.Parameter):
        return "holds a grid of patches, whose rows have two coordinates"
    if not isinstance(table, nn.Embedding):
        return "is no nn.Embedding"
    if stack.others:
        return f"isn't the only one ({', '.join(stack.others)})"
    if any(limit.with_table(stack.reserved_rows) is None for _, limit in stack.limits):
        return "is read by its host in a way of its own"
    return None


def _initial_spread(config: Any) -> float:
    """The standard deviation with which transformers starts embeddings of this family."""
    return getattr(config, "initializer_range", None) or getattr(config, "init_std", None) or 0.02


def _follows(table: nn.Embedding, scheme: Position, first: int) -> bool:
    """Whether the table's rows are already those of a scheme's rule."""
    if table.weight.is_meta:
        return False
    indices = torch.arange(table.num_embeddings - first, device=table.weight.device)
    rows = scheme.rows(indices, table.embedding_dim)
    exact = 1e-5 if table.weight.dtype in (torch.float32, torch.float64) else 1e-2
    return rows is not None and torch.allclose(table.weight[first:].to(rows.dtype), rows, atol=exact, rtol=0)


def first_row(item: FoundTable) -> int:
    """The row of position 0: after the padding index where the host counts from there, else after reserved rows."""
    padding = getattr(item.table(), "padding_idx", None)
    return item.stack.reserved_rows if padding is None else padding + 1


def ends_somewhere(table: Any) -> bool:
    """Whether a table, or what stands for one, holds rows for so many positions and no more."""
    return isinstance(table, Tensor | nn.Module) and not isinstance(table, ConstantPositions | ComputedPositions)
