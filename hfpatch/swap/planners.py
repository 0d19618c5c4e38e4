"""Planner interface: a function from a model's sites and one request to changes; each scheme names its planner."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ..core.plan_table import Change, Row
from ..core.scheme import Scheme
from ..exact.request import Conversion
from ..runtime.errors import UnsupportedError
from ..schemes.request import SchemeRequest, kind_of
from ..sites.sites import Sites


@dataclass
class PlannerResult:
    """Result of a planner: what one requested scheme changes in one model.

    Attributes:
        part: the request as the patch record will hold it.
        changes: one per module: its table row, edits and new values; empty if the model is patched this way already.
        conversion: the swap to norms that compute the same function, which `patch_model` checks; None without one.
        lengths: (config, attribute, new value) where the request sets max_positions or image_size.
        shared: rows of what another scheme of the same call changes for this one, too.

    Raises:
        UnsupportedError: something isn't preserved, and the request is init="exact".
    """

    part: SchemeRequest
    changes: list[Change]
    conversion: Conversion | None = None
    lengths: list[tuple[Any, str, Any]] = field(default_factory=list)
    shared: list[Row] = field(default_factory=list)

    @property
    def rows(self) -> list[Row]:
        """Rows of what is changed for it as for others, of what it changes itself, and of what it keeps."""
        return [*self.shared, *(change.row for change in self.changes)]

    @property
    def kind(self) -> str:
        """The kind of its scheme: "norm", "pos", "mlp" or "placement"."""
        return kind_of(self.part.scheme)

    @property
    def losses(self) -> list[str]:
        """What it doesn't preserve, without repetition; empty if exact."""
        return list(dict.fromkeys(text for row in self.rows for text in row.losses))

    def inexact(self, measured: str) -> PlannerResult:
        """Return the result without its exact conversion, which failed its check: only norms change.

        Args:
            measured: how it failed, in words.
        """
        changes = [change.inexact(measured) for change in self.changes if change.row.kind != "stream"]
        return replace(self, part=replace(self.part, init="copy"), changes=changes, conversion=None)

    def __post_init__(self) -> None:
        for row in (change.row for change in self.changes if self.part.init == "exact"):
            if row.loss is not None:
                raise not_exact(row.module, self.part.scheme, row.loss)


def not_exact(name: str, scheme: Scheme, loss: str) -> UnsupportedError:
    """Return the error that a module's change isn't exact, with what it doesn't preserve."""
    return UnsupportedError(
        f"{name}: {kind_of(scheme)}={scheme.name!r} isn't exact here: {loss}. Use init='auto' to accept that."
    )


class Planner(Protocol):
    """Signature of a planner: plans one requested scheme without changing the model.

    Args:
        sites: of any module tree.
        part: the scheme with its globs and `init`.

    Raises:
        PatchError: one of its subclasses, for any error that can be foreseen.
    """

    def __call__(self, sites: Sites, part: SchemeRequest) -> PlannerResult: ...


def planner_of(scheme: Scheme) -> Planner:
    """Return the planner that a scheme names ("module:function"), imported on first use."""
    return pkgutil.resolve_name(scheme.planner)
