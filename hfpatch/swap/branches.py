"""Planner of DeepNorm: scaled residual sums, the norms after them, and the scale of initial weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..core.globs import Names
from ..core.plan_table import Change, Row, refuse_private_forward
from ..core.transaction import Transaction
from ..runtime.edits import LENS_SLOT, Edit, pattern_of
from ..runtime.errors import UnsupportedError
from ..runtime.joins import Gains
from ..runtime.norms import NormFacts
from ..schemes.norms import DeepNorm, Norm
from ..schemes.request import Part
from ..sites.anatomy import Branch
from ..sites.blocks import has_matrix
from ..sites.branches import Site, discover, require_joinable, require_own_forward, require_transparent, sites_of
from ..sites.deepnorm_weights import heads_of, values_of
from ..sites.norms import describe, size_of
from .norms import norm_text, start_afresh
from .planners import Planned


def plan_deepnorm(
    model: nn.Module, part: Part, example_inputs: Mapping[str, Any] | None, inexact: str | None
) -> Planned:
    """What DeepNorm does to each of the model's norms, and to the weights of its branches; nothing is changed yet.

    Raises:
        NothingToPatchError: the model has no branches at all.
        UnsupportedError: it has none that DeepNorm could change, or they were changed before.
        WrappedModelError: a module carries a forward of its own, put there by another library.
    """
    scheme = part.scheme
    assert isinstance(scheme, DeepNorm)
    request = f"norm={scheme.name!r}"
    found = discover(model, request, example_inputs, weights=part.init == "reset")
    for branch in found.branches:
        _require_sequential(branch, scheme)
    if any(branch.placement == "pre" for branch in found.branches):
        require_transparent(found, request)
    sites = list(sites_of(model, found.branches))
    reasons = reasons_to_keep(model, sites, part)
    changes = list(other_norms(model, sites))
    for site in sites:
        alpha, beta = scheme.gains(found.depths[site.branch.stack])
        change = _change(model, site, part, alpha, reasons, sites)
        changes += [change, *(_weights(site, part, alpha, beta) if change.changes else ())]
    return Planned(part, changes)


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


def other_norms(model: nn.Module, sites: list[Site], kind: str = "norm") -> Iterator[Change]:
    """Lines for the norms that belong to no branch."""
    of_branches = {id(site.norm) for site in sites}
    for name, module in model.named_modules():
        facts = describe(module)
        if id(module) not in of_branches and facts is not None:
            yield Change(Row(kind, name, norm_text(module, facts), reason="not the norm of a residual branch"))


def reasons_to_keep(model: nn.Module, sites: list[Site], part: Part) -> dict[str, str | None]:
    """For each norm of a branch why it stays, None where it changes."""
    names = Names.of(model)
    return {site.norm_name: _reason_to_keep(site, part, names) for site in sites}


def _reason_to_keep(site: Site, part: Part, names: Names) -> str | None:
    facts = describe(site.norm)
    if facts is None:
        return "not LayerNorm's arithmetic"
    reason = names.reason_to_keep([site.norm_name], part.only, part.keep)
    return reason or (part.scheme.reason_to_keep(facts) if isinstance(part.scheme, Norm) else None)


def _change(
    model: nn.Module, site: Site, part: Part, alpha: float, reasons: dict[str, str | None], sites: list[Site]
) -> Change:
    scheme, branch, name = part.scheme, site.branch, site.norm_name
    assert isinstance(scheme, DeepNorm)
    facts = describe(site.norm)
    row = Row("norm", name, norm_text(site.norm, facts), reason=reasons[name])
    if row.reason is not None:
        return Change(row)
    assert facts is not None
    refuse_private_forward(name, site.norm)
    a, norm = f"{alpha:.4g}", "LN" if facts.kind == "layer" else "RMS"
    before = f"{norm}(x + f(x))" if branch.placement == "post" else f"x + f({norm}(x))"
    afresh, becomes, row.reason = part.init == "reset", f"{scheme.label}{size_of(facts)}", f"a = {a}"
    if afresh:
        row.replace_by(becomes, loss="parameters are reinitialised")
    elif scheme.preserve:
        row.replace_by(
            becomes, exact="its branch is multiplied by a as well, and the norm divides by the size of the sum"
        )
    else:
        row.replace_by(becomes, loss=f"{norm}({a} x + f(x)) in place of {before}")
    if branch.placement == "post":
        edits = _gain(site, facts, scheme, alpha)
    else:  # LN(a x + f(x)) from x + f(LN(x))
        require_joinable(site)
        put = [Edit.of(name, scheme.call(facts, site.norm))] if afresh else []
        edits = (*joins_kept(site, sites, reasons), site.join("deepnorm", alpha), *put)
    return Change(row, edits, start_afresh(model, [name]) if afresh else None)


def _gain(site: Site, facts: NormFacts, scheme: DeepNorm, alpha: float) -> tuple[Edit, ...]:
    """LN_eps(a x + f(x)) = LN_(eps/a^2)(x + f(x)/a)."""
    path, _, child = site.branch.outlet.rpartition(".")
    parent = site.block.get_submodule(path)
    while isinstance(parent, nn.ModuleList):  # which has no forward
        path, _, name = path.rpartition(".")
        parent, child = site.block.get_submodule(path), f"{name}.{child}"
    where = f"{site.block_name}.{path}".strip(".")
    require_own_forward(where, parent)
    if facts.eps is None:
        raise UnsupportedError(
            f"{site.norm_name}: its eps is None (that of the dtype), which DeepNorm can't divide by a^2."
        )
    facts = facts if scheme.preserve else replace(facts, eps=facts.eps / alpha**2)
    lens = Gains(((child, site.branch.call, 1 / alpha),))
    return Edit.of(f"{where}.{LENS_SLOT}", lens), Edit.of(site.norm_name, scheme.call(facts, site.norm))


def joins_kept(site: Site, sites: list[Site], reasons: dict[str, str | None]) -> list[Edit]:
    """Edits for unchanged branches of the same block whose functional dropout a join must apply itself."""
    kept = [other for other in sites if other.block is site.block and reasons[other.norm_name] is not None]
    return [other.join("host") for other in kept if other.branch.dropout]


def _weights(site: Site, part: Part, alpha: float, beta: float) -> list[Change]:
    """Changes of weights: with preserve=True projections times a; from scratch, initial values scaled by b."""
    branch, scheme = site.branch, part.scheme
    assert isinstance(scheme, DeepNorm)
    if scheme.preserve:
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


def _require_one_matrix(site: Site, path: str) -> None:
    module = site.block.get_submodule(path) if path else site.block
    matrices = [p for p in module._parameters.values() if p is not None and p.dim() > 1]
    if not path or len(matrices) != 1:
        raise UnsupportedError(
            f"{site.block_name}.{path}: preserve=True multiplies a branch's output projection, and this one has "
            f"{len(matrices)} matrices. Leave preserve out (the function changes)."
        )


def _scale(site: Site, path: str, which: str, factor: float, bias: float) -> Change:
    """A module's matrices times one factor and its biases times another; or those of the values in it alone."""
    module = site.block.get_submodule(path)
    part = "" if which == "all" else "values "
    row, becomes = Row("norm", f"{site.block_name}.{path}", module._get_name()), f"{part}x {factor:.4g}"
    if bias == factor:
        row.replace_by(
            becomes,
            exact="the stream beside it is multiplied by the same factor, and the norm divides by the size of the sum",
        )
    else:
        row.reason = "biases start at zero"
        row.replace_by(becomes, loss="parameters are reinitialised")
    heads = heads_of(site.block, module) or 1  # which isn't "heads" unless the small model said their number

    def values(edits: Transaction) -> None:
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and not parameter.is_meta:
                by = _factors(module, parameter, which, heads, bias if parameter.dim() == 1 else factor)
                by = by.to(parameter.device)
                if parameter.dim() == 1 and bias == 0.0:  # no factor takes back what training makes of a zero
                    new = (parameter.detach() * by).to(parameter.dtype)
                    edits.set_parameter(module, name, nn.Parameter(new, requires_grad=parameter.requires_grad))
                else:
                    edits.rewrite(module, name, "multiply", by)

    return Change(row, values=values)


def _factors(module: nn.Module, parameter: Tensor, which: str, heads: int, factor: float) -> Tensor:
    """Factor for a Parameter: one number, or one for each of the module's outputs."""
    one = torch.tensor(factor, dtype=torch.float64)
    if which == "all":
        return one
    axis = (1 if type(module).__name__ == "Conv1D" else 0) if parameter.dim() > 1 else 0
    by = torch.where(values_of(parameter.shape[axis], which, heads), one, 1.0)
    return by.reshape([-1 if i == axis else 1 for i in range(parameter.dim())])
