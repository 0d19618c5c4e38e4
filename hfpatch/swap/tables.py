"""What happens to a table of positions: it goes and leaves a constant, or it stays, by a rule or with other rows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core.plan_table import Change, Row, refuse_private_forward
from ..core.transaction import Transaction
from ..runtime.constants import NO_ROW, ConstantPositions, MeanRow, NoPositions, Rows, ZeroRow
from ..runtime.edits import LENS_SLOT, Call, Edit
from ..runtime.errors import UnsupportedError
from ..runtime.length_lenses import MEAN_ROW, NOTHING, LengthLimit
from ..runtime.tables import ComputedPositions
from ..schemes.learned import Learned
from ..schemes.positions import Position
from ..schemes.request import Part
from ..sites.stacks import REMOVED_ROWS, FoundStack, first_row, table_size
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
    return Change(row, *_removal(model, item, fresh=part.init == "reset"))


def _table_text(table: nn.Module | Tensor, computed: bool) -> str:
    kind = table._get_name() if isinstance(table, nn.Module) else type(table).__name__
    if computed:
        return kind
    rows, width = table_size(table)
    return f"{kind}({rows}, {width})"


def _removal(
    model: nn.Module, item: FoundStack, fresh: bool
) -> tuple[tuple[Edit, ...], Callable[[Transaction], None] | None]:
    """The edits that take a stack's tables out, and the values that they leave."""
    found, zero = [], []
    for path in (item.stack.table, *item.stack.others):
        put, constant = _removed(item, path, fresh)
        found += put
        zero += [constant] if fresh and constant else []
    for path, attribute in item.stack.switches:
        found.append(Edit.of(f"{item.name}.{path}.{attribute}", False))
    for path in item.stack.unread:
        above, _, attribute = path.rpartition(".")
        if item.owner.get_submodule(above)._modules.get(attribute) is not None:  # some configurations have none
            found.append(Edit.of(f"{item.name}.{path}", None))
    found += _lifted_limits(model, item, item.stack.limits, sys.maxsize)

    def values(changes: Transaction) -> None:
        for path in zero:
            above, _, attribute = path.rpartition(".")
            parameter = model.get_submodule(above)._parameters[attribute]
            assert parameter is not None
            parameter.data.zero_()

    return tuple(found), values if zero else None


def _removed(item: FoundStack, path: str, fresh: bool) -> tuple[list[Edit], str | None]:
    """Edits that put a constant where the table at `path` is, or what answers as if there were no positions, and the
    name of the constant's Parameter."""
    above, _, attribute = path.rpartition(".")
    name, holder_name = f"{item.name}.{path}".strip("."), f"{item.name}.{above}".strip(".")
    holder = dict(item.owner.named_modules()).get(above)
    table = getattr(holder, attribute, None)
    if holder is None or table is None:  # this configuration has none
        return [], None
    answer = dict(item.stack.answers).get(path)
    if answer is not None:
        return [Edit.of(name, Call.of(NoPositions, answer))], None
    if isinstance(table, nn.Module):
        stack = item.stack
        first = first_row(item) if path == stack.table else stack.reserved_rows
        options = {
            "first": first,
            "padding_idx": getattr(table, "padding_idx", None),
            "by_token": stack.by_token,
            "more": stack.returns_more,
        }
        given = {name: value for name, value in options.items() if value or (name == "padding_idx" and value == 0)}
        return [Edit.of(name, Call.of(ConstantPositions, **given))], f"{name}.constant"
    rows = Edit.of(f"{holder_name}.{REMOVED_ROWS}", table_size(table)[0])
    if attribute in holder._buffers:  # length_lenses.AnyRow hides it
        return [rows, *([Edit.of(f"{holder_name}.{NO_ROW}", True)] if fresh else [])], None
    kind = ZeroRow if fresh and not isinstance(table, nn.Parameter) else MeanRow
    constant = name if isinstance(table, nn.Parameter) else None
    return [Edit.of(name, Call.of(kind)), *([rows] if path == item.stack.table else [])], constant


def _limits_lifter(model: nn.Module, item: FoundStack) -> Callable[[Position], list[Edit]]:
    """What lifts the limits of a stack whose table stays."""

    def lift(scheme: Position) -> list[Edit]:
        counting = [(path, limit.with_table(item.stack.reserved_rows)) for path, limit in item.stack.limits]
        limits = [(path, limit) for path, limit in counting if limit is not None]
        if not scheme.any_length and scheme.max_positions is None:
            return []
        longest = sys.maxsize if scheme.any_length else scheme.max_positions
        assert longest is not None
        return _lifted_limits(model, item, limits, longest)

    return lift


def _lifted_limits(
    model: nn.Module, item: FoundStack, limits: Sequence[tuple[str, LengthLimit]], longest: int
) -> list[Edit]:
    found = [Edit.of(f"{item.name}.{path}.{LENS_SLOT}".replace("..", "."), limit) for path, limit in limits]
    for length in item.stack.lengths:
        for name, module in model.named_modules():
            if length in module.__dict__ and any(inner is item.owner for inner in module.modules()):
                found.append(Edit.of(f"{name}.{length}", longest))
    return found


def kept_table_change(item: FoundStack, part: Part, row: Row, lift_limits: Callable[[Position], list[Edit]]) -> Change:
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
    elif new in (None, old):
        row.action, row.becomes = "keep", None
        row.reason = f"holds {old} positions already" if new else "max_positions says how many it is to hold"
        return Change(row)
    else:
        row.loss = scheme.loss(old)
    if part.init == "exact" and row.loss:
        raise UnsupportedError(
            f"{item.table_name}: pos={scheme.name!r} isn't exact: {row.loss}. Use init='auto' to accept that."
        )

    edits, values = _kept(item, scheme, first, fresh=part.init == "reset")
    return Change(row, (*edits, *lift_limits(scheme)), values)


def _kept(
    item: FoundStack, scheme: Position, first: int, fresh: bool
) -> tuple[list[Edit], Callable[[Transaction], None] | None]:
    """Edits for a table that is computed or resized, and the rows of the latter."""
    table = item.table()
    assert isinstance(table, nn.Embedding)
    if not isinstance(scheme, Learned):
        return [Edit.of(item.table_name, Call.of(ComputedPositions, scheme.rule(), first))], None
    weight = table.weight.detach()
    rows = weight.new_empty(first + (scheme.max_positions or len(weight) - first), weight.shape[-1])
    edits = [
        Edit.of(f"{item.table_name}.weight", Call.of(Rows, *rows.shape)),
        Edit.of(f"{item.table_name}.num_embeddings", len(rows)),
    ]

    def values(changes: Transaction) -> None:
        if weight.is_meta:
            return
        new = torch.cat((weight[:first], scheme.resized(weight[first:])))
        if fresh:
            nn.init.normal_(new[first:], std=_initial_spread(item.owner.config))
        table.weight.data.copy_(new)

    return edits, values


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
    rule = scheme.rule()
    rows = None if rule is None else rule.rows(indices, table.embedding_dim)
    exact = 1e-5 if table.weight.dtype in (torch.float32, torch.float64) else 1e-2
    return rows is not None and torch.allclose(table.weight[first:].to(rows.dtype), rows, atol=exact, rtol=0)


def ends_somewhere(table: Any) -> bool:
    """Whether a table, or what stands for one, holds rows for so many positions and no more."""
    return isinstance(table, Tensor | nn.Module) and not isinstance(table, ConstantPositions | ComputedPositions)
