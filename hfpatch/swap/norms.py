"""From a norm scheme and a model to the list of norms that change and those that stay, each with its reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from ..core.globs import Names
from ..core.plan_table import Change, Row, refuse_private_forward
from ..core.transaction import Transaction
from ..errors import NothingToPatchError
from ..exact.request import Conversion
from ..runtime.edits import Edit, pattern_of
from ..runtime.errors import UnsupportedError
from ..runtime.norms import AffineNorm, NormFacts
from ..schemes.norms import Norm
from ..schemes.request import Part
from ..sites.norms import describe, looks_like_norm
from .from_scratch import of_attention, plan_scales, stream_width

_QUERY_KEY = re.compile(
    r"^((q|k|qk|query|key)_?(layer_?norm|norm|ln)|(layer_?)?norm_?(q|k|query|key)|(ln|norm)_(q|k))$"
)
_FEATURES = re.compile(r"feature_(extractor|projection|encoder)|^cmvn$")


@dataclass
class _Site:
    """One norm module and every place where it stands."""

    module: nn.Module
    facts: NormFacts | None
    names: list[str] = field(default_factory=list)
    places: list[tuple[nn.Module, str]] = field(default_factory=list)


def plan_norms(model: nn.Module, part: Part, conversion: Conversion | None = None) -> list[Change]:
    """What `part` does to each of the model's norms; nothing is changed yet.

    Args:
        model: any module tree.
        part: a norm scheme with its globs.
        conversion: of a request that keeps the function where it can. None for a plain swap.

    Raises:
        NothingToPatchError: the model has no norm.
        UnsupportedError: `init="exact"` where no swap is.
        WrappedModelError: a norm carries a forward of its own, put there by another library.
    """
    scheme = part.scheme
    assert isinstance(scheme, Norm)
    names = Names.of(model)
    sites = _find(model)
    if not any(site.facts for site in sites):
        raise NothingToPatchError(
            f"{type(model).__name__} has no LayerNorm-like module, so norm={scheme.name!r} has nothing to replace."
        )
    reasons = {id(site): _reason_to_keep(site, scheme, part, names) for site in sites}
    _take_special_norms_that_were_named(sites, reasons, scheme, part, names)
    for site in sites:
        reasons[id(site)] = reasons[id(site)] or _reason_to_leave(site, part, names)
    changing = [site for site in sites if reasons[id(site)] is None]
    if conversion is None:
        centring: list[Change] = []
        plans = {id(site): _plain(site, part, names, model) for site in changing}
    else:
        plans = _converted(changing, conversion)
        centring = conversion.changes()
    changes = [_change(model, site, scheme, part, reasons[id(site)], plans.get(id(site))) for site in sites]
    if scheme.by_branch and changing:
        changes += plan_scales(model, part, names)
    return changes + centring


@dataclass
class _Swap:
    """How one norm is replaced.

    Attributes:
        loss: what isn't preserved, None where the function stays the same.
        stays: why it is kept after all, since that is more than was allowed.
        note: for the plan.
        scheme: the scheme as it is for this norm, where norms differ in how they start.
    """

    loss: str | None
    stays: str | None = None
    note: str | None = None
    scheme: Norm | None = None


def _plain(site: _Site, part: Part, names: Names, model: nn.Module) -> _Swap:
    """A swap with gain and shift copied.

    Raises:
        UnsupportedError: it isn't exact, as it was asked to be.
    """
    scheme = part.scheme
    assert isinstance(scheme, Norm)
    assert site.facts is not None
    loss = scheme.loss(site.facts) if part.init != "reset" else "parameters start afresh"
    if loss and part.init == "exact" and scheme.centring is None:
        raise UnsupportedError(
            f"{site.names[0]}: norm={scheme.name!r} isn't exact here: {loss}. Use init='auto' to accept that."
        )
    swap = _Swap(loss)
    if scheme.by_branch:
        forms = [form for name in site.names for form in names.forms(name)]
        swap.scheme, swap.note = scheme.at(of_attention(part, forms), stream_width(model))
    return swap


def _named(patterns: tuple[str, ...], site: _Site, names: Names) -> bool:
    """Whether one of some patterns is a norm's."""
    forms = {form for name in site.names for form in names.forms(name)}
    return not forms.isdisjoint(patterns) or not set(map(pattern_of, forms)).isdisjoint(patterns)


def _converted(sites: list[_Site], conversion: Conversion) -> dict[int, _Swap]:
    """How the norms of a new request are replaced: exactly where that is possible.

    Raises:
        UnsupportedError: none is exact, as they were asked to be.
    """
    if any(site.facts is not None and site.facts.kind == "layer" for site in sites):
        conversion.find()
    found = {id(site): _convert(site, conversion) for site in sites}
    if sites and not any(swap.stays is None for swap in found.values()):
        first, name = sites[0], conversion.part.scheme.name
        raise UnsupportedError(
            f"{first.names[0]}: norm={name!r} isn't exact here: {found[id(first)].loss}. "
            "Use init='auto' to accept that."
        )
    return found


def _convert(site: _Site, conversion: Conversion) -> _Swap:
    scheme, name = conversion.part.scheme, site.names[0]
    assert isinstance(scheme, Norm)
    assert site.facts is not None
    why = conversion.why_not_exact(site.names) if site.facts.kind == "layer" else None
    loss = scheme.loss(site.facts) if site.facts.kind != "layer" or why else None
    if loss is None:
        conversion.exact.append(name)
        return _Swap(None)
    if conversion.part.init == "exact":
        return _Swap(f"{loss} ({why})" if why else loss, stays=f"not exact: {why or loss}")
    conversion.approximate.append(name)
    if conversion.compensates(name):
        loss = "the mean of the norm's input is removed in its constant part only"
    return _Swap(f"{loss} ({why})" if why else loss)


def _find(model: nn.Module) -> list[_Site]:
    sites: dict[int, _Site | None] = {}
    parents: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        parents[name] = module
        if id(module) not in sites:
            facts = describe(module)
            found = facts is not None or (looks_like_norm(module) and set(module._modules) <= {"parametrizations"})
            sites[id(module)] = _Site(module, facts) if found and name else None
        site = sites[id(module)]
        if site is not None:
            parent, _, attribute = name.rpartition(".")
            site.names.append(name)
            site.places.append((parents[parent], attribute))
    return [site for site in sites.values() if site is not None]


def _special(site: _Site, names: Names) -> str | None:
    """Why a norm isn't one of the residual stream's; such norms change only when `only` names them."""
    parts = site.names[0].split(".")
    if any(_QUERY_KEY.match(piece) for piece in parts):
        return "norm of queries or keys: name it in only= to change it"
    if any(_FEATURES.search(piece) for piece in parts):
        return "norm of a feature extractor: name it in only= to change it"
    if names.in_head(site.names[0]):
        return "norm of a head: name it in only= to change it"
    return None


def _reason_to_keep(site: _Site, scheme: Norm, part: Part, names: Names) -> str | None:
    if "parametrizations" in site.module._modules:
        return "parametrized: take its parametrizations off first"
    if site.facts is None:
        return "not LayerNorm's arithmetic: its output isn't gain * normalised input + shift"
    if any(isinstance(parent, nn.TransformerEncoderLayer) for parent, _ in site.places):
        return "torch's TransformerEncoderLayer reads its weights in a fused path"
    already = scheme.reason_to_keep(site.facts)
    return already or names.reason_to_keep(site.names, part.only, part.keep) or _special(site, names)


def _reason_to_leave(site: _Site, part: Part, names: Names) -> str | None:
    """A norm that the scheme leaves in place."""
    assert isinstance(part.scheme, Norm)
    return part.scheme.why_left if part.left and _named(part.left, site, names) else None


def _take_special_norms_that_were_named(
    sites: list[_Site], reasons: dict[int, str | None], scheme: Norm, part: Part, names: Names
) -> None:
    """A glob in `only` that matches no ordinary norm to replace was written for the special ones that it does match."""
    settled = {id(site) for site in sites if site.facts is None or scheme.reason_to_keep(site.facts)}
    for glob in part.only:
        matched = [site for site in sites if names.matches(glob, site.names) and id(site) not in settled]
        if all(_special(site, names) for site in matched):
            for site in matched:
                if reasons[id(site)] == _special(site, names):
                    reasons[id(site)] = None


def _change(model: nn.Module, site: _Site, scheme: Norm, part: Part, reason: str | None, swap: _Swap | None) -> Change:
    now = site.module._get_name() + size_of(site.facts)
    row = Row("norm", "keep", site.names[0], now, aliases=tuple(site.names[1:]), reason=reason)
    if swap is None:
        return Change(row)
    if swap.stays is not None:
        row.reason = swap.stays
        return Change(row)
    refuse_private_forward(site.names[0], site.module)
    assert site.facts is not None
    row.action, row.becomes, row.loss = "replace", scheme.label + size_of(site.facts), swap.loss
    shared = f"shared by {len(site.names)} places" if len(site.names) > 1 else None
    row.reason = "; ".join(filter(None, (shared, swap.note))) or None
    put = Edit.of(site.names[0], (swap.scheme or scheme).call(site.facts, site.module))
    return Change(row, (put,), _values(model, site, part))


def size_of(facts: NormFacts | None) -> str:
    """As plans print it."""
    return f"({', '.join(map(str, facts.shape))})" if facts else ""


def _values(model: nn.Module, site: _Site, part: Part) -> Callable[[Transaction], None] | None:
    """What changes in Parameters besides the swap itself: values that start afresh."""
    if part.init != "reset":
        return None
    return lambda changes: start_afresh(model.get_submodule(site.names[0]), changes)


def start_afresh(module: nn.Module, changes: Transaction) -> None:
    """New Parameters at the scheme's starting values: the replaced norm's own must stay as they were."""
    assert isinstance(module, AffineNorm)
    values = module.initial_values()
    for name, old in list(module._parameters.items()):
        if old is not None:
            new = nn.Parameter(torch.full_like(old, values[name]), requires_grad=old.requires_grad)
            changes.set_parameter(module, name, new)
