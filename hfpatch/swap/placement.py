"""From a placement of norms and a model to the list of branches that meet their stream another way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from ..core.plan_table import Change, Row, refuse_private_forward
from ..core.registry import NORMS
from ..errors import NothingToPatchError
from ..runtime.edits import Edit
from ..runtime.errors import UnsupportedError
from ..runtime.norms import NormFacts
from ..schemes.norms import Norm
from ..schemes.placements import PLACEMENTS, Placement
from ..schemes.request import Part
from ..sites.branches import Junction
from ..sites.junctions import SECOND, Found, Site, discover, require_joinable, require_transparent, sites_of
from ..sites.norms import describe
from .branches import joins_kept, other_norms, reasons_to_keep
from .norms import size_of, start_afresh


def settle_placement(model: nn.Module, part: Part, example_inputs: Mapping[str, Any] | None = None) -> Part:
    """The part with the junctions of the model.

    Raises:
        UnsupportedError: a branch has no norm of its own before it or behind the sum, can't be seen through, or
            `init="exact"` is asked for.
        NothingToPatchError: there is no branch.
    """
    name = part.scheme.name
    if part.init == "exact":
        raise UnsupportedError(
            f"placement={name!r} is another function than the model's, whatever its weights, so init='exact' can't be "
            "had. Use init='auto' to accept that, or 'reset' to train from scratch."
        )
    found = discover(model, f"placement={name!r}", example_inputs)
    for junction in found.junctions:
        _require_strict(junction, found)
    require_transparent(found, f"placement={name!r}")
    return replace(part, branches=tuple(found.junctions))


def _require_strict(junction: Junction, found: Found) -> None:
    where = f"{junction.block}.{junction.outlet}"
    if junction.placement not in ("pre", "post"):
        raise UnsupportedError(
            f"{where}: its norms are placed as {junction.placement!r}; placement= starts from x + f(norm(x)) or "
            "norm(x + f(x)), with a norm for every branch."
        )
    if junction.placement == "post" and not junction.readers:
        raise UnsupportedError(
            f"{where}: which modules read the stream for this branch can't be told, so no norm can be put before it."
        )
    sharing = [one for one in found.junctions if (one.block, one.norm) == (junction.block, junction.norm)]
    if len(sharing) > 1:
        raise UnsupportedError(f"{where}: several branches share {junction.norm}, so it can't go to one of them.")


def plan_placement(model: nn.Module, part: Part) -> list[Change]:
    """How each branch of the model will meet its stream; nothing is changed yet.

    Args:
        model: any module tree.
        part: a placement, settled.

    Raises:
        NothingToPatchError: none of the part's junctions is in the model.
        UnsupportedError: a branch can't be seen through.
        WrappedModelError: a module carries a forward of its own, put there by another library.
    """
    sites = list(sites_of(model, list(part.branches)))
    if not sites:
        raise NothingToPatchError(f"{type(model).__name__} has none of the branches that its patch record names.")
    reasons = reasons_to_keep(model, sites, part)
    for site in sites:
        if site.junction.placement == part.scheme.name:
            reasons[site.norm_name] = reasons[site.norm_name] or f"is {part.scheme.name} already"
    return [*other_norms(model, sites, "placement"), *(_change(site, part, reasons, sites) for site in sites)]


def _change(site: Site, part: Part, reasons: dict[str, str | None], sites: list[Site]) -> Change:
    scheme, reason = part.scheme, reasons[site.norm_name]
    assert isinstance(scheme, Placement)
    facts = describe(site.norm)
    host: Any = PLACEMENTS[site.junction.placement]
    now = host.formula
    row = Row("placement", "keep", site.norm_name, f"{site.norm._get_name()}{size_of(facts)}: {now}", reason=reason)
    if reason is not None:
        return Change(row)
    assert facts is not None
    require_joinable(site)
    refuse_private_forward(site.norm_name, site.norm)
    row.action, row.becomes = "replace", scheme.formula
    row.loss = f"norms are placed as {scheme.formula} in place of {now}"
    if site.junction.placement == "post":
        row.reason = "its stack ends without a norm of its own"
    edits = [*joins_kept(site, sites, reasons), site.edit(part.scheme.name)]
    if part.scheme.name == "sandwich":
        edits.append(Edit.of(f"{site.norm_name}{SECOND}", _scheme(facts).call(facts, None)))
    if part.init != "reset":
        return Change(row, tuple(edits))
    edits.append(Edit.of(site.norm_name, _scheme(facts).call(facts, site.norm)))
    return Change(row, tuple(edits), lambda changes: start_afresh(site.norm, changes))


def _scheme(facts: NormFacts) -> Norm:
    return NORMS[facts.kind]()
