"""Planner interface: a function from a model's sites and one request to changes; each scheme names its planner.

The results of several schemes of one kind, each for the modules that its globs match, are joined into one plan.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ..core.globs import Names, no_match, require_all_match
from ..core.plan_table import Change, Kept, Row
from ..core.scheme import Scheme
from ..errors import NoMatchError
from ..exact.conversion import Conversion
from ..runtime.patch_errors import UnsupportedError
from ..schemes.request import KINDS, Request, SchemeRequest, kind_of
from ..sites.sites import Sites

_IN_MAPPING: dict[str | None, str] = {  # what is said of modules that no glob of a mapping matches
    Kept.NOT_IN_ONLY: "no glob matches it",
    Kept.WITHOUT_TABLE: "no glob matches it: sees no positions unless its table is kept",
}


@dataclass(frozen=True)
class PlannerResult:
    """Result of a planner: what one requested scheme changes in one model.

    Attributes:
        part: the request as the patch record will hold it.
        changes: one per module: its table row, edits and new values; empty if the model is patched this way already.
        conversion: the swap to norms that compute the same function, which `patch_model` checks; None without one.
        lengths: new values of settings for max_positions or image_size: path of a config, attribute, value.
        shared: rows of modules that another scheme of the same call changes for this scheme, too.
        folds: how norms are folded once they are repaired; norms that can't be folded have no edits.

    Raises:
        UnsupportedError: something isn't preserved, and the request has init="exact".
    """

    part: SchemeRequest
    changes: list[Change]
    conversion: Conversion | None = None
    lengths: list[tuple[tuple[str, ...], str, Any]] = field(default_factory=list)
    shared: list[Row] = field(default_factory=list)
    folds: list[Change] = field(default_factory=list)

    @property
    def rows(self) -> list[Row]:
        """Rows of its own changes and of shared ones, and of the modules that it keeps."""
        return [*self.shared, *(change.row for change in self.changes)]

    @property
    def kind(self) -> str:
        """The kind of the scheme: "norm", "pos", "mlp" or "placement"."""
        return kind_of(self.part.scheme)

    @property
    def losses(self) -> list[str]:
        """What the scheme doesn't preserve, without repetition; empty if exact."""
        return list(dict.fromkeys(text for row in self.rows for text in row.full_losses))

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
    """Return the error that a module's change isn't exact; `loss` is what it doesn't preserve."""
    return UnsupportedError(
        f"{name}: {kind_of(scheme)}={scheme.name!r} isn't exact here: {loss}. Use init='auto' to accept that."
    )


class Planner(Protocol):
    """Signature of a planner: plans one requested scheme without changing the model.

    Args:
        sites: of any module tree.
        part: the scheme, with its globs and `init`.

    Raises:
        PatchError: one of its subclasses, for any error that can be foreseen.
    """

    def __call__(self, sites: Sites, part: SchemeRequest) -> PlannerResult: ...


def planner_of(scheme: Scheme) -> Planner:
    """Return the planner that a scheme names ("module:function"), imported on first use."""
    return pkgutil.resolve_name(scheme.planner)


# Several schemes of one kind


def join(results: Sequence[PlannerResult], request: Request) -> list[PlannerResult]:
    """Return the results of a request, each left with only the modules that are its own.

    Those of one kind of scheme then have one row for each module. If several of them change a module alike (a position
    table that feeds attentions of several), the first of them changes it, and it counts for all: `shared` of the others
    has its row. The row has the losses that all of them have.

    Raises:
        UnsupportedError: two of them change a module, or a setting of the config, in different ways.
    """
    owners: dict[tuple[str, ...], tuple[int, Change]] = {}
    for index, found in enumerate(results):
        for change in found.changes:
            place = _place(found, change)
            owner, first = owners.setdefault(place, (index, change))
            if change.replaces and first.replaces and owner != index and _texts(change) != _texts(first):
                raise _conflict(change.row.module, results[owner], found, "change it in different ways")
            if _rank(change) < _rank(first):
                owners[place] = index, change
    _require_one_centring(results)
    _require_equal_settings(results)
    lost: dict[int, tuple[str, ...]] = {}  # by all that share a change: under NoPE alone a stack can't tell the order
    for change, first in ((change, owners[_place(found, change)][1]) for found in results for change in found.changes):
        if change.replaces and first.replaces:
            before = lost.get(id(first), first.row.losses)
            lost[id(first)] = tuple(loss for loss in before if loss in change.row.losses)
    joined = []
    for index, found in enumerate(results):
        own, shared = list[Change](), list[Row]()
        for change in found.changes:
            owner, first = owners[_place(found, change)]
            row = replace(first.row, losses=lost.get(id(first), first.row.losses))
            if owner == index:
                own.append(replace(first, row=row))
            elif change.replaces and first.replaces:
                shared.append(row)
        by_globs = found.kind in request.mapped and not request.only
        joined.append(replace(found, changes=list(map(_worded, own)) if by_globs else own, shared=shared))
    return joined


def require_matches(names: Names, request: Request, results: Sequence[PlannerResult]) -> None:
    """Refuse globs of a request without effect; `results` are the joined ones.

    Raises:
        NoMatchError: a glob matches no module; or earlier globs of its mapping match all modules that it matches.
        UnsupportedError: modules that a glob of a mapping keeps go with modules of another glob.
    """
    rows = {kind: list[Row]() for kind in KINDS}
    for found in results:
        rows[found.kind] += [change.row for change in found.changes if change.row.kind != "stream"]
    require_all_match(
        names, {"only": request.only, "keep": request.keep}, [row for own in rows.values() for row in own]
    )
    for kind, by_glob in request.mapped.items():
        if rows[kind]:
            _require_each_counts(names, kind, by_glob, rows[kind])


def _require_each_counts(names: Names, kind: str, by_glob: Mapping[str, Scheme | None], rows: Sequence[Row]) -> None:
    left = list(rows)
    for glob, scheme in by_glob.items():
        where = f"{kind}={{{glob!r}: {None if scheme is None else str(scheme)!r}}}"
        named = {id(row) for row in rows if names.matches(glob, (row.module, *row.aliases))}
        if not named:
            raise no_match(where, glob, rows)
        own = [row for row in left if id(row) in named]
        left = [row for row in left if id(row) not in named]
        if not own:
            raise NoMatchError(f"{where} matches only modules that earlier globs match. Put it before them.")
        if scheme is None and all(row.action == "replace" for row in own):
            raise UnsupportedError(
                f"{where}: {own[0].module} goes with modules of an earlier glob. Put this glob first to keep it."
            )


def _place(found: PlannerResult, change: Change) -> tuple[str, str, str]:
    return found.kind, change.row.kind, change.row.module


def _texts(change: Change) -> tuple[Any, ...]:
    weights = [str(one.to_json()) for one in (*change.values, *change.starts)]
    return list(map(str, change.edits)), weights


def _rank(change: Change) -> int:
    """How little a row says: that a module changes, why it can't, that a glob keeps it, that no glob names it."""
    reason = change.row.reason
    return 0 if change.replaces else 3 if reason in _IN_MAPPING else 2 if reason is Kept.BY_KEEP else 1


def _worded(change: Change) -> Change:
    """A change whose row speaks of a mapping's globs, not of `only`, if it comes from a mapping."""
    if change.replaces or change.row.reason not in _IN_MAPPING:
        return change
    return replace(change, row=replace(change.row, reason=_IN_MAPPING[change.row.reason]))


def _require_one_centring(results: Sequence[PlannerResult]) -> None:
    """Refuse two ways to centre the stream."""
    centring = [found for found in results if found.conversion is not None and found.conversion.centres]
    for found in centring:
        if found.part.scheme.centring != centring[0].part.scheme.centring:
            raise _conflict("the residual stream", centring[0], found, "centre it in different ways")


def _require_equal_settings(results: Sequence[PlannerResult]) -> None:
    """Refuse two values of one setting of the config."""
    seen: dict[str, tuple[Any, PlannerResult]] = {}
    for found in results:
        for path, name, value in found.lengths:
            place = ".".join(("config", *path, name))
            before, other = seen.setdefault(place, (value, found))
            if before != value:
                raise _conflict(place, other, found, f"set it to {before!r} and to {value!r}")


def _conflict(where: str, one: PlannerResult, other: PlannerResult, what: str) -> UnsupportedError:
    schemes = " and ".join(repr(str(found.part.scheme)) for found in (one, other))
    return UnsupportedError(f"{where}: {one.kind}={schemes} {what}. Choose one of them for it.")
