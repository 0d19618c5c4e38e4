"""Planners of norm placements and DeepNorm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..core.plan_table import Change, Row, refuse_private_forward
from ..core.registry import NORMS, PLACEMENTS
from ..core.weight_change import WeightChange, along_axis
from ..runtime.edits import LENS_SLOT, Edit, pattern_of
from ..runtime.joins import Gains
from ..runtime.norms import NormFacts
from ..runtime.patch_errors import UnsupportedError
from ..schemes.from_scratch import DeepNorm, Placement
from ..schemes.norm_schemes import Norm
from ..schemes.request import SchemeRequest
from ..sites.block_runs import has_matrix
from ..sites.branch_sites import (
    SECOND_NORM_SUFFIX,
    BranchSite,
    StackBranches,
    discover,
    require_joinable,
    require_own_forward,
    require_transparent,
    sites_of,
)
from ..sites.deepnorm_weights import heads_of, values_of
from ..sites.norm_facts import describe, size_of
from ..sites.residual_branches import Branch
from ..sites.sites import Sites
from .interface import PlannerResult
from .norm_swaps import norm_text, starting_values


def plan_placement(sites: Sites, part: SchemeRequest[Placement]) -> PlannerResult:
    """Plan the norm placement of each branch of the model.

    Raises:
        UnsupportedError: a branch has no norm of its own before it or behind the sum, or can't be seen through.
        NothingToPatchError: there is no branch.
        WrappedModelError: a module carries a forward of its own, put there by another library.
    """
    request = f"placement={part.scheme.name!r}"
    found = discover(sites, request)
    for branch in found.branches:
        _require_strict(branch, found)
    require_transparent(sites, found.branches, request)
    branches, others = _sites_to_change(sites, found, part, "placement")
    for site in branches:
        if site.branch.placement == part.scheme.name:
            site.reason = site.reason or f"is {part.scheme.name} already"
    return PlannerResult(part, [*others, *(_plan_site(sites.model, site, branches, part) for site in branches)])


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


def _plan_site(model: nn.Module, site: BranchSite, sites: list[BranchSite], part: SchemeRequest[Placement]) -> Change:
    scheme, name, facts = part.scheme, site.norm_name, describe(site.norm)
    host: Any = PLACEMENTS[site.branch.placement]
    row = Row("placement", name, f"{norm_text(site.norm, facts)}: {host.formula}", reason=site.reason)
    if row.reason is not None:
        return Change(row)
    assert facts is not None
    require_joinable(site)
    refuse_private_forward(name, site.norm)
    note = "its stack ends without a norm of its own" if site.branch.placement == "post" else None
    loss = f"norms are placed as {scheme.formula} in place of {host.formula}"
    row = row.replace_by(scheme.formula, loss, note=note)
    edits = [*_joins_kept(site, sites), site.join(scheme.name)]
    same_kind: Any = NORMS[facts.kind]()
    if scheme.name == "sandwich":
        edits.append(Edit.of(f"{name}{SECOND_NORM_SUFFIX}", same_kind.call(facts, None)))
    if part.init == "reset":
        edits.append(Edit.of(name, same_kind.call(facts, site.norm)))
    return Change(row, tuple(edits), starts=starting_values(model, name, part, edits))


# DeepNorm


def plan_deepnorm(sites: Sites, part: SchemeRequest[DeepNorm]) -> PlannerResult:
    """Plan the DeepNorm change of each norm, and of the branches' weights.

    Raises:
        NothingToPatchError: the model has no branches at all.
        UnsupportedError: it has no branches that DeepNorm could change, or they were changed before.
        WrappedModelError: a module carries a forward of its own, put there by another library.
    """
    request = f"norm={part.scheme.name!r}"
    found = discover(sites, request, weights=part.init == "reset")
    for branch in found.branches:
        _require_sequential(branch, part.scheme)
    if any(branch.placement == "pre" for branch in found.branches):
        require_transparent(sites, found.branches, request)
    branches, changes = _sites_to_change(sites, found, part, "norm")
    for site in branches:
        alpha, beta = part.scheme.gains(found.depths[site.branch.stack])
        change = _change(sites.model, site, branches, part, alpha)
        changes += [change, *(_weights(site, part, alpha, beta) if change.replaces else ())]
    return PlannerResult(part, changes)


def _require_sequential(branch: Branch, scheme: DeepNorm) -> None:
    where = f"{branch.block}.{branch.outlet}"
    if branch.placement == "parallel":
        raise UnsupportedError(
            f"{where}: parallel residual: its branches read and write the same points of the stream, while DeepNorm "
            "normalises after one branch before the next reads. There is no DeepNorm for such blocks."
        )
    if branch.placement not in ("pre", "post"):
        raise UnsupportedError(
            f"{where}: its norms are placed as {branch.placement!r}; DeepNorm replaces x + f(norm(x)) or "
            "norm(x + f(x)) only."
        )
    if branch.placement == "pre" and scheme.preserve:
        raise UnsupportedError(
            f"{where}: preserve=True needs norm(x + f(x)), and this is x + f(norm(x)): no weights make LN(a x + f(x)) "
            "the same function. Leave preserve out (the function changes), or keep the norms."
        )


def _change(
    model: nn.Module, site: BranchSite, sites: list[BranchSite], part: SchemeRequest[DeepNorm], alpha: float
) -> Change:
    scheme, branch, name, facts = part.scheme, site.branch, site.norm_name, describe(site.norm)
    row = Row("norm", name, norm_text(site.norm, facts), reason=site.reason)
    if row.reason is not None:
        return Change(row)
    assert facts is not None
    refuse_private_forward(name, site.norm)
    a, norm = f"{alpha:.4g}", "LN" if facts.kind == "layer" else "RMS"
    before = f"{norm}(x + f(x))" if branch.placement == "post" else f"x + f({norm}(x))"
    loss: str | None = f"{norm}({a} x + f(x)) in place of {before}"
    if part.init == "reset":
        loss = "parameters are reinitialised"
    elif scheme.preserve:
        loss = None
    why_exact = "its branch is multiplied by a as well, and the norm divides by the size of the sum"
    row = row.replace_by(f"{scheme.label}{size_of(facts)}", loss, why_exact=why_exact, note=f"a = {a}")
    if branch.placement == "post":
        edits = _gain(site, facts, scheme, alpha)
    else:  # LN(a x + f(x)) from x + f(LN(x))
        require_joinable(site)
        put = [Edit.of(name, scheme.call(facts, site.norm))] if part.init == "reset" else []
        edits = (*_joins_kept(site, sites), site.join("deepnorm", alpha), *put)
    return Change(row, edits, starts=starting_values(model, name, part, edits))


def _gain(site: BranchSite, facts: NormFacts, scheme: DeepNorm, alpha: float) -> tuple[Edit, ...]:
    """LN_eps(a x + f(x)) = LN_(eps/a^2)(x + f(x)/a)."""
    path, _, child = site.branch.outlet.rpartition(".")
    parent = site.block.get_submodule(path)
    while isinstance(parent, nn.ModuleList):  # it has no forward
        path, _, name = path.rpartition(".")
        parent, child = site.block.get_submodule(path), f"{name}.{child}"
    where = f"{site.block_name}.{path}".strip(".")
    require_own_forward(where, parent)
    if facts.eps is None:
        raise UnsupportedError(
            f"{site.norm_name}: its eps is None (the dtype's own), and DeepNorm has to divide eps by a^2."
        )
    facts = facts if scheme.preserve else replace(facts, eps=facts.eps / alpha**2)
    lens = Gains(((child, site.branch.call, 1 / alpha),))
    return Edit.of(f"{where}.{LENS_SLOT}", lens), Edit.of(site.norm_name, scheme.call(facts, site.norm))


def _weights(site: BranchSite, part: SchemeRequest[DeepNorm], alpha: float, beta: float) -> list[Change]:
    """Changes of weights: with preserve=True projections times a; from scratch, initial values scaled by b."""
    branch = site.branch
    if part.scheme.preserve:
        _require_one_matrix(site, branch.projection)
        return [_scale(site, branch.projection, "all", alpha, alpha)]
    if part.init != "reset":
        return []
    modules = [(pattern_of(name), name) for name, module in site.block.named_modules() if has_matrix(module)]
    return [
        _scale(site, name, which, beta, 0.0)
        for pattern, which in branch.weights
        for named, name in modules
        if named == pattern
    ]


def _require_one_matrix(site: BranchSite, path: str) -> None:
    module = site.block.get_submodule(path) if path else site.block
    matrices = [p for p in module._parameters.values() if p is not None and p.dim() > 1]
    if not path or len(matrices) != 1:
        raise UnsupportedError(
            f"{site.block_name}.{path}: preserve=True multiplies a branch's output projection, which here has "
            f"{len(matrices)} matrices. Leave preserve out (the function changes)."
        )


def _scale(site: BranchSite, path: str, which: str, factor: float, bias: float) -> Change:
    """Change of a module that multiplies its matrices by `factor` and its biases by `bias`, or of its values alone."""
    module = site.block.get_submodule(path)
    part = "" if which == "all" else "values "
    row, becomes = Row("norm", f"{site.block_name}.{path}", module._get_name()), f"{part}x {factor:.4g}"
    loss = None if bias == factor else "parameters are reinitialised"
    why_exact = "the stream beside it is multiplied by the same factor, and the norm divides by the size of the sum"
    row = row.replace_by(becomes, loss, why_exact=why_exact, note=loss and "biases start at zero")
    heads = heads_of(site.block, module) or 1  # "heads" occurs only if the small model said their number

    values = []
    for name, parameter in module._parameters.items():
        if parameter is not None and not parameter.is_meta:
            by = bias if parameter.dim() == 1 else factor
            operand = by if which == "all" else _factors(module, parameter, which, heads, by)
            values.append(WeightChange(f"{site.block_name}.{path}.{name}", "multiply", operand))
    return Change(row, values=tuple(values))


def _factors(module: nn.Module, parameter: Tensor, which: str, heads: int, factor: float) -> Tensor:
    """Factors for a Parameter, one for each of the module's outputs."""
    axis = (1 if type(module).__name__ == "Conv1D" else 0) if parameter.dim() > 1 else 0
    mask = values_of(parameter.shape[axis], which, heads)
    by = torch.where(mask, torch.tensor(factor, dtype=torch.float64, device="cpu"), 1.0)
    return along_axis(by, parameter, axis)


# Both


def _sites_to_change(
    sites: Sites, found: StackBranches, part: SchemeRequest[Any], kind: str
) -> tuple[list[BranchSite], list[Change]]:
    """The branches of a model's blocks, each with the reason if it is kept, and rows for norms of no branch."""
    branches = list(sites_of(sites.model, found.branches))
    for site in branches:
        facts = describe(site.norm)
        if facts is None:
            site.reason = "not LayerNorm's arithmetic"
            continue
        site.reason = sites.names.reason_to_keep([site.norm_name], part.only, part.keep)
        if site.reason is None and isinstance(part.scheme, Norm):
            site.reason = part.scheme.reason_to_keep(facts)
    of_branches = {id(site.norm) for site in branches}
    others = [(name, module) for name, module in sites.model.named_modules() if id(module) not in of_branches]
    rows = [
        Row(kind, name, norm_text(module, facts), reason="not the norm of a residual branch")
        for name, module in others
        if (facts := describe(module)) is not None
    ]
    return branches, [Change(row) for row in rows]


def _joins_kept(site: BranchSite, sites: list[BranchSite]) -> list[Edit]:
    """Edits for unchanged branches of the same block whose functional dropout a join must apply itself."""
    kept = [other for other in sites if other.block is site.block and other.reason is not None]
    return [other.join("host") for other in kept if other.branch.dropout]
