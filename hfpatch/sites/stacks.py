"""Stacks in the model in hand: the tables of positions that records name, and the attentions that they feed."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

from torch import Tensor, nn

from ..core.registry import ARCHITECTURES, by_class
from ..runtime.constants import ConstantPositions, NoPositions, rows_of
from ..runtime.errors import UnsupportedError
from ..runtime.lens import named_modules
from .records import SHIPPED
from .records.record import Stack

REMOVED_ROWS = "_hfpatch_removed_rows"  # of the module that held a table which was a Parameter


@dataclass
class FoundStack:
    """A stack in the model in hand."""

    stack: Stack
    owner: nn.Module
    name: str
    table_name: str
    attentions: dict[str, nn.Module]
    length: int | None = None

    def holder(self) -> tuple[nn.Module, str]:
        """The module that holds the table, and the table's own name in it."""
        path, _, attribute = self.stack.table.rpartition(".")
        return self.owner.get_submodule(path), attribute

    def table(self) -> nn.Module | Tensor | None:
        holder, attribute = self.holder()
        if not hasattr(holder, attribute):
            raise UnsupportedError(
                f"{self.table_name}: this {type(self.owner).__name__} was configured to make its positions in another "
                "way than by a table, which pos= can't remove yet."
            )
        return getattr(holder, attribute)

    def removed_rows(self) -> int | None:
        """How many rows the table had that an earlier patch removed; None where it is there."""
        table, (holder, _) = self.table(), self.holder()
        if isinstance(table, NoPositions):
            return 0
        return table.num_embeddings if isinstance(table, ConstantPositions) else holder.__dict__.get(REMOVED_ROWS)


def find_stacks(model: nn.Module) -> list[FoundStack]:
    """The recorded stacks of a model, patched or not, in the order of its modules."""
    stacks = {stack.owner: stack for record in ARCHITECTURES.values() for stack in record.stacks}
    added = {stack.owner for name, record in ARCHITECTURES.items() if name not in SHIPPED for stack in record.stacks}
    found = []
    for name, module in named_modules(model):
        stack = by_class(stacks, module, added)
        if stack is None or not _has(module, stack.table):
            continue
        prefix = f"{name}." if name else ""
        stack, attentions = _as_built(module, stack)
        attentions = {prefix + child_name: child for child_name, child in attentions.items()}
        found.append(FoundStack(stack, module, name, prefix + stack.table, attentions))
    return found


def _as_built(owner: nn.Module, stack: Stack) -> tuple[Stack, dict[str, nn.Module]]:
    """The stack and its attentions, as this version of transformers builds them."""
    attentions = {name: child for name, child in named_modules(owner) if is_attention(name, stack)}
    fits = all(hasattr(child, part) for child in attentions.values() for part in stack.projections.names)
    return (stack, attentions) if (attentions and fits) or stack.older is None else _as_built(owner, stack.older)


def is_attention(name: str, stack: Stack) -> bool:
    """Whether a record means the module of this name, counted from the owner, as one of its attentions."""
    globs = stack.attention.split(" | ")
    return any(fnmatch.fnmatchcase(name, glob) and name.count(".") == glob.count(".") for glob in globs)


def _has(owner: nn.Module, table: str) -> bool:
    """Whether this instance of a recorded class owns a table; some do by their config only."""
    path, _, attribute = table.rpartition(".")
    holder = owner
    for name in filter(None, path.split(".")):
        holder = holder._modules.get(name)  # type: ignore[assignment]
        if holder is None:
            return False
    return getattr(holder, attribute, None) is not None


def max_positions(item: FoundStack) -> int:
    """Positions that the table holds, or held before an earlier patch removed it; 0 where it has no length."""
    if item.length is not None:
        return item.length
    table, rows = item.table(), item.removed_rows()
    if rows is None and table is not None and item.stack.table not in dict(item.stack.answers):
        rows = table_size(table)[0]
    return rows - first_row(item) if rows else 0


def first_row(item: FoundStack) -> int:
    """The row of position 0: after the padding index where the host counts from there, else after reserved rows."""
    padding = getattr(item.table(), "padding_idx", None)
    return item.stack.reserved_rows if padding is None else padding + 1


def table_size(table: nn.Module | Tensor) -> tuple[int, int]:
    """Rows and channels of a table."""
    weight = rows_of(table)
    return weight.numel() // weight.shape[-1], weight.shape[-1]
