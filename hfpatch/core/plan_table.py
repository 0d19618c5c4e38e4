"""Rows of a printed plan and the changes behind them; rows that differ only in layer numbers are one line."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from torch import nn

from ..errors import WrappedModelError
from ..runtime.edits import Edit
from ..runtime.lens import host_class
from ..runtime.patch_errors import UnsupportedError
from .transaction import Transaction
from .weight_change import WeightChange

_LIBRARIES = {"torch", "transformers", __name__.partition(".")[0]}  # whose modules' forwards are known
R = TypeVar("R", bound=Any)  # a row about one module or Parameter


class Kept(StrEnum):
    """Reasons to keep a module that the code tells apart. All other reasons are free text, which only people read."""

    BY_KEEP = "keep"
    NOT_IN_ONLY = "not in only"
    WITHOUT_TABLE = "not in only: sees no positions unless its table is kept"
    DONE = "already as requested"
    WITH_ITS_ATTENTIONS = "its attentions are kept"


@dataclass(frozen=True)
class Row:
    """One module in a plan: what happens to it and why.

    Attributes:
        kind: "norm", "position", "mlp", "placement"; "stream" for what is centred so that norms may change, or scaled.
        module: its name in the model.
        now, becomes: what it is, and what it will be (None if it is kept).
        reason: why it is kept (`Kept`, or a text), or a note on the replacement.
        losses: what the replacement doesn't preserve; empty if the function stays the same.
        why_exact: why the function stays the same; None if it doesn't.
        aliases: further names of the same module.
    """

    kind: str
    module: str
    now: str
    becomes: str | None = None
    reason: str | None = None
    losses: tuple[str, ...] = ()
    why_exact: str | None = None
    aliases: tuple[str, ...] = ()

    def replace_by(
        self, becomes: str, *losses: str | None, why_exact: str | None = None, note: str | None = None
    ) -> Row:
        """Return the row of a replaced module, with what is lost (None doesn't count), or with why nothing is lost.

        Raises:
            ValueError: neither losses nor `why_exact` are given. No replacement is exact by default.
        """
        lost = tuple(filter(None, losses))
        if not lost and why_exact is None:
            raise ValueError(f"{self.module}: say what the replacement loses, or why it is exact")
        return replace(self, becomes=becomes, losses=lost, why_exact=None if lost else why_exact, reason=note)

    def keep(self, reason: str | None) -> Row:
        """Return the row of a module that is kept, with the reason."""
        return replace(self, becomes=None, losses=(), why_exact=None, reason=reason)

    def with_note(self, note: str) -> Row:
        """Return the row with a further note."""
        return replace(self, reason="; ".join(filter(None, (self.reason, note))))

    @property
    def action(self) -> str:
        """ "replace" or "keep"."""
        return "keep" if self.becomes is None else "replace"

    @property
    def expected(self) -> str:
        """ "exact" or "approximate"; "" for a kept module."""
        return "" if self.becomes is None else "exact" if self.why_exact else "approximate"

    @property
    def loss(self) -> str | None:
        """The losses as one text; None if there are no losses."""
        return "; ".join(self.losses) or None

    @property
    def full_losses(self) -> Iterable[str]:
        """The losses as texts that stand without the row: the losses of a new norm or MLP begin with its name."""
        if self.becomes is None or self.kind in ("position", "placement"):
            return self.losses
        return [f"{self.becomes.partition('(')[0]}: {loss}" for loss in self.losses]


class HostStep(Protocol):
    """Step of a plan that runs code of the model's class, as plain data."""

    def apply(self, model: nn.Module, transaction: Transaction) -> None:
        """Apply the step to the model, after the edits."""


@dataclass(frozen=True)
class Change:
    """A row of a plan with the edits and weight changes that apply it.

    Attributes:
        row: for the plan; its action says whether anything changes.
        edits: changes of the model's structure, each at one place, by its name in the model.
        values: changes of present Parameters' values, before the edits. No checkpoint records them: weights hold them.
        starts: values of Parameters that the edits bring in, after the edits.
        then: what runs code of the host's class at the end: how it initialises, what it computes from new lengths.
        otherwise: what the change doesn't preserve if nothing is centred for it; None if that makes no difference.
    """

    row: Row
    edits: tuple[Edit, ...] = ()
    values: tuple[WeightChange, ...] = ()
    starts: tuple[WeightChange, ...] = ()
    then: tuple[HostStep, ...] = ()
    otherwise: str | None = None

    def inexact(self, measured: str) -> Change:
        """Return the change without centring, for an exact conversion whose check failed.

        Args:
            measured: how it failed, in words.
        """
        if self.otherwise is None or not self.replaces:
            return self
        return replace(self, row=replace(self.row, losses=(f"{self.otherwise} ({measured})",), why_exact=None))

    @property
    def replaces(self) -> bool:
        """Return whether the module isn't kept."""
        return self.row.action == "replace"


def refuse_private_forward(name: str, module: nn.Module) -> None:
    """Refuse a module whose instance has its own forward, which would still run after its class is changed.

    Raises:
        WrappedModelError: it has one, as some speed and quantization libraries set it.
    """
    if "forward" in module.__dict__:
        raise WrappedModelError(
            f"{name} carries a forward of its own, set by another library, which would still run after the patch. "
            "Patch the model first, then wrap it."
        )


def refuse_foreign_forward(name: str, module: nn.Module, owner: nn.Module) -> None:
    """Refuse a module of another library inside a module of transformers.

    Args:
        name, module: an attention or a rotation; rules for transformers' classes say how to read it.
        owner: the module that holds it; other packages' hosts have modules of their own.

    Raises:
        UnsupportedError: `register_patch_mapping`, a fusion or a kernel put its class there.
    """
    own = next(kind for kind in host_class(type(module)).__mro__ if "forward" in vars(kind))
    library = own.__module__.partition(".")[0]
    if library not in _LIBRARIES and host_class(type(owner)).__module__.startswith("transformers."):
        raise UnsupportedError(
            f"{name} is a {type(module).__name__}, which isn't transformers' own and has a forward of its own: how it "
            "makes queries, keys and rotations isn't known. Build the model without it (clear_patch_mapping(), no "
            "kernels, no fusion_config=) and patch that, or name other modules in only=."
        )


def group_rows(
    rows: list[R], words: Callable[[R], tuple[object, ...]], name: Callable[[R], str] = lambda row: row.module
) -> list[tuple[list[R], str]]:
    """Return rows that differ only in the numbers of their names as one line: (the rows, `h.{0-11}.ln_1`).

    `words` returns what the rows of one line must have in common besides the words of their names.
    """
    groups: dict[tuple, list[R]] = {}
    for row in rows:
        pattern = re.sub(r"\d+", "#", name(row))
        groups.setdefault((pattern, *words(row)), []).append(row)
    return [line for members in groups.values() for line in _lines(members, name)]


def _lines(rows: list[R], name: Callable[[R], str]) -> list[tuple[list[R], str]]:
    """One line if the numbers make a full grid; else a line for each value of what follows the first number."""
    pieces = [re.split(r"(\d+)", name(row)) for row in rows]
    values = [{piece[i] for piece in pieces} for i in range(len(pieces[0]))]
    if math.prod(map(len, values)) == len(rows):
        return [(rows, "".join(map(_ranges, values)))]
    tails: dict[tuple[str, ...], list[R]] = {}
    for row, piece in zip(rows, pieces, strict=True):
        tails.setdefault(tuple(piece[2:]), []).append(row)
    return [line for members in tails.values() for line in _lines(members, name)]


def _ranges(values: set[str]) -> str:
    if len(values) == 1:
        return next(iter(values))
    numbers = sorted(map(int, values))
    runs = [[numbers[0], numbers[0]]]
    for number in numbers[1:]:
        if number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return "{" + ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs) + "}"
