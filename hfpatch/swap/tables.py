"""What happens to a table of positions: it goes and leaves a constant, or it stays, by a rule or with other rows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.record import Part
from ..core.plan_table import Change, Row, refuse_private_forward
from ..core.transaction import Edits
from ..runtime.constants import NO_ROW, ConstantPositions, NoPositions, constant_of, mean_rows
from ..runtime.errors import UnsupportedError
from ..runtime.length_lenses import MEAN_ROW, NOTHING, LengthLimit
from ..runtime.lens import look_through
from ..runtime.tables import ComputedPositions, computed, resized
from ..schemes.learned import Learned
from ..schemes.positions import Position
from ..sites.stacks import REMOVED_ROWS, FoundStack, first_row, rows_of, table_size
from .image_tables import grid_table_change

ALL_KEPT = "its attentions are kept"


def table_change(model: nn.Module, item: FoundStack, part: Part, why: str | None) -> Change:
    """What becomes of a stack's table; `why` is why it is kept, if it is.

    Raises:
        UnsupportedError: exactness was asked for, or the scheme needs a table of another kind.
    """
    table, scheme = item.table(), part.scheme
    assert isinstance(scheme, Position)
    if item.removed_rows() is not None and (why == ALL_KEPT or not scheme.keeps_table):
        return Change(Row("position", "keep", item.table_name, "a constant", reason="its table is removed already"))
    if table is None:
        return Change(Row("position", "keep", item.table_name, "no table", reason="this configuration has none"))
    gone, computed = item.removed_rows() is not None, item.stack.table in dict(item.stack.answers)
    row = Row("position", "keep", item.table_name, _table_text(table, computed or gone), reason=why)
    if why and not gone:
        return Change(row)
    for path, _ in item.stack.limits:
        refuse_private_forward(f"{item.name}.{path}".strip("."), item.owner.get_submodule(path))
    if isinstance(scheme, Learned) and not gone and _is_grid(item, table):
        return grid_table_change(item, part, row)
    if scheme.keeps_table:
        return kept_table_change(item, part, row, _limits_lifter(model, item))
    if part.init == "exact":
        raise UnsupportedError(
            f"{item.table_name}: pos={part.scheme.name!r} isn't exact: what this table adds can't be had from it. "
            "Use init='auto' to accept that."
        )
    row.action, row.becomes, row.reason = "replace", NOTHING if computed else MEAN_ROW, "inputs of any length"
    row.loss = "absolute positions are removed"
    if part.scheme.name == "nope" and not item.stack.causal:
        row.loss += "; without a causal mask the stack becomes blind to order"
    return Change(row, _remover(model, item, fresh=part.init == "reset"))


def _table_text(table: nn.Module | Tensor, computed: bool) -> str:
    kind = table._get_name() if isinstance(table, nn.Module) else type(table).__name__
    if computed:
        return kind
    rows, width = table_size(table)
    return f"{kind}({rows}, {width})"


def _remover(model: nn.Module, item: FoundStack, fresh: bool) -> Callable[[Edits], None]:
    def apply(edits: Edits) -> None:
        for path in (item.stack.table, *item.stack.others):
            _remove(edits, item, path, fresh)
        for path, attribute in item.stack.switches:
            edits.set_attribute(item.owner.get_submodule(path), attribute, False)
        for path in item.stack.unread:
            above, _, attribute = path.rpartition(".")
            holder = item.owner.get_submodule(above)
            if holder._modules.get(attribute) is not None:  # some configurations have none
                edits.set_module(holder, attribute, None)
        _lift_limits(edits, model, item, item.stack.limits, sys.maxsize)

    return apply


def _remove(edits: Edits, item: FoundStack, path: str, fresh: bool) -> None:
    """Put a constant where the table at `path` is, or what answers as if there were no positions."""
    above, _, attribute = path.rpartition(".")
    holder = dict(item.owner.named_modules()).get(above)
    table = getattr(holder, attribute, None)
    if holder is None or table is None:  # this configuration has none
        return
    answer = dict(item.stack.answers).get(path)
    if answer is not None:
        edits.set_module(holder, attribute, NoPositions(answer))
        return
    if isinstance(table, nn.Module):
        padding = getattr(table, "padding_idx", None)
        stack = item.stack
        first = first_row(item) if path == stack.table else stack.reserved_rows
        stand_in = ConstantPositions(rows_of(table), first, padding, stack.by_token, more=stack.returns_more)
        constant: Tensor = stand_in.constant
        edits.set_module(holder, attribute, stand_in)
    elif attribute in holder._buffers:
        edits.set_attribute(holder, REMOVED_ROWS, table_size(table)[0])  # limits.AnyRow hides it
        constant = torch.zeros(())
        if fresh:
            edits.set_attribute(holder, NO_ROW, True)
    else:
        constant = mean_rows(table)
        if isinstance(table, nn.Parameter):
            constant = constant_of(table, constant)
            edits.set_parameter(holder, attribute, constant)
        else:
            edits.set_attribute(holder, attribute, constant)
        if path == item.stack.table:
            edits.set_attribute(holder, REMOVED_ROWS, table_size(table)[0])
    if fresh:
        constant.data.zero_()


def _limits_lifter(model: nn.Module, item: FoundStack) -> Callable[[Edits, Position], None]:
    """What lifts the limits of a stack whose table stays."""

    def lift(edits: Edits, scheme: Position) -> None:
        counting = [(path, limit.with_table(item.stack.reserved_rows)) for path, limit in item.stack.limits]
        limits = [(path, limit) for path, limit in counting if limit is not None]
        if scheme.any_length or scheme.max_positions is not None:
            longest = sys.maxsize if scheme.any_length else scheme.max_positions
            assert longest is not None
            _lift_limits(edits, model, item, limits, longest)

    return lift


def _lift_limits(
    edits: Edits, model: nn.Module, item: FoundStack, limits: Sequence[tuple[str, LengthLimit]], longest: int
) -> None:
    for path, limit in limits:
        look_through(edits, item.owner.get_submodule(path), limit, model)
    for length in item.stack.lengths:
        for module in model.modules():
            if length in module.__dict__ and any(inner is item.owner for inner in module.modules()):
                edits.set_attribute(module, length, longest)


def kept_table_change(item: FoundStack, part: Part, row: Row, lift_limits: Callable[[Edits, Position], None]) -> Change:
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
    if isinstance(scheme, Learned) and scheme.image_size is not None:
        row.reason = "image_size is of images"
        return Change(row)
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


def _keep(edits: Edits, item: FoundStack, scheme: Position, first: int, fresh: bool) -> None:
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


def _why_not_kept(item: FoundStack, table: Any) -> str | None:
    """Why a table can't be computed or resized in its place, None where it can."""
    stack = item.stack
    if _is_grid(item, table):
        return "holds a grid of patches, whose rows have two coordinates"
    if not isinstance(table, nn.Embedding):
        return "is no nn.Embedding"
    if stack.others:
        return f"isn't the only one ({', '.join(stack.others)})"
    if any(limit.with_table(stack.reserved_rows) is None for _, limit in stack.limits):
        return "is read by its host in a way of its own"
    return None


def _is_grid(item: FoundStack, table: Any) -> bool:
    return item.stack.grid is not None or isinstance(table, nn.Parameter)


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


def ends_somewhere(table: Any) -> bool:
    """Whether a table, or what stands for one, holds rows for so many positions and no more."""
    return isinstance(table, Tensor | nn.Module) and not isinstance(table, ConstantPositions | ComputedPositions)
