"""Planner of norm placements: which residual branches get their norm in another place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..core.plan_table import Change, Row, refuse_private_forward
from ..core.registry import NORMS, PLACEMENTS
from ..runtime.edits import Edit
from ..runtime.errors import UnsupportedError
from ..schemes.placements import Placement
from ..schemes.request import Part
from ..sites.anatomy import Branch
from ..sites.branches import (
    SECOND_NORM_SUFFIX,
    Site,
    StackBranches,
    discover,
    require_joinable,
    require_transparent,
    sites_of,
)
from ..sites.norms import describe
from .branches import joins_kept, other_norms, reasons_to_keep
from .norms import norm_text, start_afresh
from .planners import Planned


def plan_placement(
    model: nn.Module, part: Part, example_inputs: Mapping[str, Any] | None, inexact: str | None
) -> Planned:
    """How each branch of the model will meet its stream; nothing is changed yet.

    Raises:
        UnsupportedError: a branch has no norm of its own before it or behind the sum, or can't be seen through.
        NothingToPatchError: there is no branch.
        WrappedModelError: a module carries a forward of its own, put there by another library.
    """
    scheme = part.scheme
    assert isinstance(scheme, Placement)
    request = f"placement={scheme.name!r}"
    found = discover(model, request, example_inputs)
    for branch in found.branches:
        _require_strict(branch, found)
    require_transparent(found, request)
    sites = list(sites_of(model, found.branches))
    reasons = reasons_to_keep(model, sites, part)
    for site in sites:
        if site.branch.placement == scheme.name:
            reasons[site.norm_name] = reasons[site.norm_name] or f"is {scheme.name} already"
    others = other_norms(model, sites, "placement")
    return Planned(part, [*others, *(_change(model, site, part, reasons, sites) for site in sites)])


def _require_strict(branch: Branch, found: StackBranches) -> None:
    where = f"{branch.block}.{branch.outlet}"
    if branch.placement not in ("pre", "post"):
        raise UnsupportedError(
            f"{where}: its norms are placed as {branch.placement!r}; placement= starts from x + f(norm(x)) or "
            "norm(x + f(x)), with a norm for every branch."
        )
    if branch.placement == "post" and not branch.readers:
        raise UnsupportedError(
            f"{where}: it isn't known which modules read the stream for this branch, so no norm can be put before it."
        )
    sharing = [one for one in found.branches if (one.stack, one.norm) == (branch.stack, branch.norm)]
    if len(sharing) > 1:
        raise UnsupportedError(f"{where}: several branches share {branch.norm}, so it can't go to one of them.")


def _change(model: nn.Module, site: Site, part: Part, reasons: dict[str, str | None], sites: list[Site]) -> Change:
    scheme, name = part.scheme, site.norm_name
    assert isinstance(scheme, Placement)
    facts = describe(site.norm)
    host: Any = PLACEMENTS[site.branch.placement]
    now = host.formula
    row = Row("placement", name, f"{norm_text(site.norm, facts)}: {now}", reason=reasons[name])
    if row.reason is not None:
        return Change(row)
    assert facts is not None
    require_joinable(site)
    refuse_private_forward(name, site.norm)
    row.replace_by(scheme.formula, loss=f"norms are placed as {scheme.formula} in place of {now}")
    if site.branch.placement == "post":
        row.reason = "its stack ends without a norm of its own"
    edits = [*joins_kept(site, sites, reasons), site.join(scheme.name)]
    same_kind: Any = NORMS[facts.kind]()
    if scheme.name == "sandwich":
        edits.append(Edit.of(f"{name}{SECOND_NORM_SUFFIX}", same_kind.call(facts, None)))
    if part.init != "reset":
        return Change(row, tuple(edits))
    edits.append(Edit.of(name, same_kind.call(facts, site.norm)))
    return Change(row, tuple(edits), start_afresh(model, [name]))
