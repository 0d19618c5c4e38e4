"""Finds the stacks of a model that `ARCHITECTURES` describe, and the attentions that their positions reach."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from ..core.registry import ARCHITECTURES, by_class
from ..runtime.attention import NUMBER_OF_HEADS
from ..runtime.constants import ConstantPositions, NoPositions, rows_of
from ..runtime.edits import modules_at
from ..runtime.patch_errors import UnsupportedError
from .architectures.architecture import Stack
from .rotations import configs_of_parts

REMOVED_ROWS = "_hfpatch_removed_rows"  # of the module that held what a patch took out without a module in its place


@dataclass
class FoundStack:
    """A stack that an architecture describes, found in a model.

    Attributes:
        stack: its row.
        owner, name: the module that owns the positions, and its name.
        attentions: the self-attentions that they reach, by name.
        length: number of positions from its config; None if a table tells it.
        config: the config that it is built from when a checkpoint is opened; it may be a copy of the owner's.
    """

    stack: Stack
    owner: nn.Module
    name: str
    attentions: dict[str, nn.Module]
    length: int | None = None
    config: Any = None

    def path(self, *names: str) -> str:
        """Return the full name of a path relative to the owner."""
        return ".".join(filter(None, (self.name, *names)))

    @property
    def table_name(self) -> str:
        return self.path(self.stack.table)

    @property
    def is_grid(self) -> bool:
        """Whether the table holds an image's patches."""
        return self.stack.grid is not None or isinstance(self.table(), nn.Parameter)

    def holder(self) -> tuple[nn.Module, str]:
        """Return the module that holds the table, and the table's name in it."""
        path, _, attribute = self.stack.table.rpartition(".")
        return self.owner.get_submodule(path), attribute

    def table(self) -> Any:
        """Return the table: a module or a tensor."""
        holder, attribute = self.holder()
        return getattr(holder, attribute, None)

    def removed_rows(self) -> int | None:
        """Return how many rows the removed table had; None if the positions weren't removed."""
        table = self.table()
        if isinstance(table, ConstantPositions | NoPositions):
            return table.num_embeddings if isinstance(table, ConstantPositions) else 0
        return vars(self.holder()[0]).get(REMOVED_ROWS)

    def places(self, glob: str) -> Iterator[tuple[str, nn.Module, str]]:
        """Yield (path of a module from the owner, the module, its name) of every match of a glob."""
        for one in glob.split(" | "):
            above, _, attribute = one.rpartition(".")
            for path, holder in matching(self.owner, above).items():
                yield path, holder, attribute

    def is_present(self) -> bool:
        """Return whether this instance of a known class has the positions, or had them before a patch."""
        glob = self.stack.present
        if glob == "":
            return True
        places = self.places(self.stack.table if glob is None else glob)
        values = [getattr(holder, attribute, None) for _, holder, attribute in places]
        if any(value is not None and value is not False for value in values):
            return True
        return glob is not None and self.removed_rows() is not None


def find_stacks(model: nn.Module, known: Mapping[str, Stack] | None = None) -> list[FoundStack]:
    """Return the known stacks of a model, patched or not, in the order of its modules.

    Args:
        model: any module tree.
        known: by owner; None for those of `ARCHITECTURES`, whose positions are tables.
    """
    tables = {stack.owner: stack for family in ARCHITECTURES.values() for stack in family.stacks}
    found, configs = [], configs_of_parts(model)
    for name, module in model.named_modules():
        stack = by_class(tables if known is None else known, module)
        if stack is None:
            continue
        stack, attentions = _as_built(module, stack)
        item = FoundStack(stack, module, name, {}, config=configs[name])
        item.attentions = {item.path(path): attention for path, attention in attentions.items()}
        if known is not None:
            item.length = getattr(item.config, stack.config_length, None) or 0
        if item.is_present() and (attentions or known is None):
            found.append(item)
    return found


def require_settings(item: FoundStack) -> None:
    """Refuse a stack whose settings differ from what its row requires.

    Raises:
        UnsupportedError: says which setting it takes, or why its positions can't be changed.
    """
    for place, value, why in item.stack.requires:
        for path, holder, setting in item.places(place):
            present = getattr(holder, setting, None)
            if not isinstance(present, Tensor | nn.Module) and present == value:
                continue
            if why is not None:
                raise UnsupportedError(f"{item.path(path, setting)}: {type(item.owner).__name__} {why}.")
            raise UnsupportedError(
                f"{item.name or type(item.owner).__name__}: positions can only be changed with {setting}={value!r}; "
                f"with {present!r} its attentions work otherwise. Load the model with "
                f"from_pretrained(..., {setting}={value!r}), or name other modules in only=."
            )


def _as_built(owner: nn.Module, stack: Stack) -> tuple[Stack, dict[str, nn.Module]]:
    """The stack and its attentions, as this version of transformers builds them."""
    attentions = matching(owner, stack.attention)
    fits = all(hasattr(child, part) for child in attentions.values() for part in names_of(stack))
    if (attentions and fits) or not stack.older:
        return stack, attentions
    return _as_built(owner, replace(stack, **dict(stack.older), older=()))


def names_of(stack: Stack) -> tuple[str, ...]:
    """Return the attention's projections of queries and keys."""
    return () if stack.projections is None else stack.projections.names


def matching(owner: nn.Module, glob: str) -> dict[str, nn.Module]:
    """Return the owner's modules that match a glob, by path, in module order."""
    found = {name: chain[-1] for one in glob.split(" | ") for name, chain in modules_at(owner, one)}
    return {name: module for name, module in owner.named_modules() if name in found} if " | " in glob else found


def max_positions(item: FoundStack) -> int:
    """Return how many positions the table holds, or held before it was removed; 0 if it has no length."""
    if item.length is not None:
        return item.length
    table, rows = item.table(), item.removed_rows()
    if rows is None and table is not None and not item.stack.computes:
        rows = table_size(table)[0]
    return rows - first_row(item) if rows else 0


def first_row(item: FoundStack) -> int:
    """Return the row of position 0: after the padding index if the host counts from there, else after reserved rows."""
    padding = getattr(item.table(), "padding_idx", None)
    return item.stack.reserved_rows if padding is None else padding + 1


def number_of_heads(attention: nn.Module) -> int | None:
    """Return an attention's number of heads, from itself or its config."""
    holders = (attention, getattr(attention, "config", None))
    stated = (getattr(holder, name, None) for holder in holders for name in NUMBER_OF_HEADS)
    return next((number for number in stated if isinstance(number, int)), None)


def table_size(table: nn.Module | Tensor) -> tuple[int, int]:
    """Return rows and channels of a table."""
    weight = rows_of(table)
    return weight.numel() // weight.shape[-1], weight.shape[-1]
