"""Planner of norm schemes: which norms of a model are replaced and which are kept, with reasons."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from ..core.globs import Names
from ..core.plan_table import Change, Row, refuse_private_forward
from ..core.weight_change import WeightChange
from ..errors import NothingToPatchError
from ..exact.conversion import Conversion, find_conversion
from ..runtime.edits import Edit
from ..runtime.norms import NormFacts
from ..schemes.norm_schemes import Norm
from ..schemes.request import SchemeRequest
from ..sites.norm_facts import describe, looks_like_norm, size_of
from ..sites.sites import Sites
from .interface import PlannerResult, not_exact

_QUERY_KEY = re.compile(
    r"^((q|k|qk|query|key)_?(layer_?norm|norm|ln)|(layer_?)?norm_?(q|k|query|key)|(ln|norm)_(q|k))$"
)
_FEATURES = re.compile(r"feature_(extractor|projection|encoder)|^cmvn$")
_SAME = "the same arithmetic with the same gain, shift and eps"
_NO_MEAN = "the mean over the channels of its input is zero"


@dataclass
class _NormSite:
    """One norm module with its names and parents; a shared module has several.

    Attributes:
        module: the norm, or a module that looks like one.
        facts: what it computes; None if it computes anything but gain * normalised input + shift.
        names, parents: a name and a parent for each place that holds the norm.
        reason: why it is kept; None if it is to be replaced.
        loss: what the swap doesn't preserve; None if it is exact.
        otherwise: what it wouldn't preserve if nothing were centred; None if that makes no difference.
    """

    module: nn.Module
    facts: NormFacts | None
    names: list[str] = field(default_factory=list)
    parents: list[nn.Module] = field(default_factory=list)
    reason: str | None = None
    loss: str | None = None
    otherwise: str | None = None


def plan_norm_request(sites: Sites, part: SchemeRequest[Norm]) -> PlannerResult:
    """Plan a norm scheme: exact swaps if scheme and `init` allow it, else with copied gain and shift."""
    if part.scheme.centring is None or part.init in ("copy", "reset"):  # only the norms are swapped
        return PlannerResult(part, plan_norms(sites, part))
    changes, conversion = plan_with(sites, part, exactly=True)
    assert conversion is not None
    init = part.init if conversion.centres else "copy"  # as the record stores it
    return PlannerResult(replace(part, init=init), changes, conversion)


def plan_norms(sites: Sites, part: SchemeRequest[Norm], special: Mapping[str, str] | None = None) -> list[Change]:
    """Plan a swap of norms that copies gain and shift; arguments and errors as in `plan_with`."""
    return plan_with(sites, part, special)[0]


def plan_with(
    sites: Sites,
    part: SchemeRequest[Norm],
    special: Mapping[str, str] | None = None,
    exactly: bool = False,
) -> tuple[list[Change], Conversion | None]:
    """Plan what `part` does to each of the model's norms; nothing is changed yet.

    Args:
        sites: of any module tree.
        part: a norm scheme, with its globs.
        special: what further norms are, by norm; they are kept unless `only` names them.
        exactly: whether to search for norms that can be swapped exactly, and what to centre for that; else gain and
            shift are copied, and there is no conversion.

    Returns:
        The changes; and the conversion, with what the search found and the norms that it changes.

    Raises:
        NothingToPatchError: the model has no norm.
        UnsupportedError: init is "exact", and no swap is exact.
        WrappedModelError: another library has replaced a norm's forward on the instance.
    """
    model, norms = sites.model, _find_sites(sites.model)
    if not any(site.facts for site in norms):
        raise NothingToPatchError(
            f"{type(model).__name__} has no LayerNorm-like module, so norm={part.scheme.name!r} has nothing to replace."
        )
    _give_reasons_to_keep(norms, part, sites.names, special or {})
    changing = [site for site in norms if site.reason is None]
    conversion = Conversion() if exactly else None
    if exactly and any(site.facts is not None and site.facts.kind == "layer" for site in changing):
        conversion = find_conversion(sites.model, part.scheme, sites.example_inputs)
    for site in changing:
        _give_loss(site, part, conversion)
    if conversion is not None:
        replaced = [site for site in changing if site.reason is None]
        exact, approximate = (tuple(s.names[0] for s in replaced if (s.loss is None) == same) for same in (True, False))
        conversion = replace(conversion, exact_names=exact, approximate_names=approximate)
    if changing and all(site.reason for site in changing):
        raise not_exact(changing[0].names[0], part.scheme, str(changing[0].loss))
    why = _SAME if conversion is None else _NO_MEAN
    changes = [_change(model, site, part, why) for site in norms]
    return changes + ([] if conversion is None else conversion.changes), conversion  # the latter are "stream" rows


def _give_loss(site: _NormSite, part: SchemeRequest[Norm], conversion: Conversion | None) -> None:
    """Find what the swap of a norm doesn't preserve; with init="exact" a norm that loses something is kept."""
    assert site.facts is not None
    loss, obstacle = part.scheme.loss(site.facts), None
    if conversion is None:  # gain and shift are copied, and nothing else changes
        site.loss = loss if part.init != "reset" else "parameters are reinitialised"
        return
    if site.facts.kind == "layer":
        site.otherwise = loss
        obstacle = conversion.why_not_exact(site.names)
        loss = loss if obstacle else None
        if loss is not None and part.init != "exact" and conversion.compensates(site.names[0]):
            loss = "only the constant part of the mean of the norm's input is removed"
    if loss is not None and part.init == "exact":
        site.reason = f"not exact: {obstacle or loss}"
    site.loss = f"{loss} ({obstacle})" if loss and obstacle else loss


def _find_sites(model: nn.Module) -> list[_NormSite]:
    """All norms of a model, and modules that look like norms but compute something else."""
    sites: dict[int, _NormSite | None] = {}
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        modules[name] = module
        if id(module) not in sites:
            facts = describe(module)
            found = facts is not None or (looks_like_norm(module) and set(module._modules) <= {"parametrizations"})
            sites[id(module)] = _NormSite(module, facts) if found and name else None
        site = sites[id(module)]
        if site is not None:
            site.names.append(name)
            site.parents.append(modules[name.rpartition(".")[0]])
    return [site for site in sites.values() if site is not None]


# Which norms stay


def _give_reasons_to_keep(
    sites: list[_NormSite], part: SchemeRequest[Norm], names: Names, kinds: Mapping[str, str]
) -> None:
    """Find why norms are kept.

    Norms off the residual stream (of queries and keys, feature extractors, heads) are kept, unless a glob in `only`
    matches no other replaceable norms. So are the norms that `kinds` names.
    """
    special = {}
    for site in sites:
        site.reason = _unconditional_reason(site, part.scheme)
        if site.reason is None:
            special[tuple(site.names)] = _reason_to_name(site, names, kinds)
    named = names.explicitly_selected(part.only, {key: reason is not None for key, reason in special.items()})
    for site in sites:
        key = tuple(site.names)
        outside = None if key in named else special.get(key)
        site.reason = site.reason or names.reason_to_keep(site.names, part.only, part.keep) or outside


def _unconditional_reason(site: _NormSite, scheme: Norm) -> str | None:
    """Why a norm is kept regardless of the globs; None if it may be replaced."""
    if "parametrizations" in site.module._modules:
        return "parametrized: take its parametrizations off first"
    if site.facts is None:
        return "not LayerNorm's arithmetic: its output isn't gain * normalised input + shift"
    if any(isinstance(parent, nn.TransformerEncoderLayer) for parent in site.parents):
        return "torch's TransformerEncoderLayer reads its weights in a fused path"
    return scheme.reason_to_keep(site.facts)


def _reason_to_name(site: _NormSite, names: Names, kinds: Mapping[str, str]) -> str | None:
    """Why a norm changes only if `only` names it: it isn't on the residual stream, or `kinds` says so; else None."""
    parts, what = site.names[0].split("."), None
    if known := [kinds[name] for name in site.names if name in kinds]:
        what = known[0]
    elif any(_QUERY_KEY.match(piece) for piece in parts):
        what = "queries or keys"
    elif any(_FEATURES.search(piece) for piece in parts):
        what = "a feature extractor"
    elif names.in_head(site.names[0]):
        what = "a head"
    return what and f"norm of {what}: only=['*', its name] changes it too"


# What changes


def _change(model: nn.Module, site: _NormSite, part: SchemeRequest[Norm], why_exact: str) -> Change:
    """The plan's row of a norm, with the edit that replaces it unless there is a reason to keep it.

    Args:
        why_exact: why the swap loses nothing, if that is so.
    """
    facts, scheme, name = site.facts, part.scheme, site.names[0]
    row = Row("norm", name, norm_text(site.module, facts), aliases=tuple(site.names[1:]), reason=site.reason)
    if row.reason is not None:
        return Change(row)
    refuse_private_forward(name, site.module)
    assert facts is not None
    becomes = scheme.label + size_of(scheme.remaining_facts(facts), replaced=facts)
    note = f"shared by {len(site.names)} places" if len(site.names) > 1 else None
    row = row.replace_by(becomes, site.loss, why_exact=why_exact, note=note)
    edits = (Edit.of(name, scheme.call(facts, site.module)),)
    return Change(row, edits, starts=starting_values(model, name, part, edits), otherwise=site.otherwise)


def norm_text(module: nn.Module, facts: NormFacts | None) -> str:
    """Return a norm as plans print it: "LayerNorm(768)"."""
    return module._get_name() + size_of(facts)


def starting_values(
    model: nn.Module, name: str, part: SchemeRequest[Any], edits: Iterable[Edit]
) -> tuple[WeightChange, ...]:
    """Return the initial values of Parameters in new norms if `part` has init="reset"."""
    calls = [edit.value for edit in edits if edit.at == (name,)]
    if part.init != "reset" or not calls:
        return ()
    new = calls[-1].make_module(model.get_submodule(name), model.get_submodule(name.rpartition(".")[0]))
    own = [parameter for parameter, value in new._parameters.items() if value is not None]
    return tuple(WeightChange(f"{name}.{one}", "fill", float(new.initial_value(one)), anew=True) for one in own)
