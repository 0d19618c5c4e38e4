"""Planner of MLP schemes: which MLPs become gated and which are kept, with reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..core.globs import Names
from ..core.plan_table import Change, Row, refuse_private_forward
from ..core.transaction import Transaction
from ..core.weight_change import WeightChange
from ..errors import NothingToPatchError
from ..runtime.classes import FRESH, TIMES
from ..runtime.edits import Call, Edit
from ..runtime.gated import GatedActivation, GatedLinear, Projection
from ..runtime.patch_errors import UnsupportedError
from ..schemes.mlp_schemes import MAX_START_ERROR, MLP, Start
from ..schemes.request import SchemeRequest
from ..sites.mlp_sites import MLPSite, find_mlps, mixtures
from ..sites.sites import Sites
from .config_diff import innermost_model
from .interface import PlannerResult


def plan_mlp_request(sites: Sites, part: SchemeRequest[MLP]) -> PlannerResult:
    """Plan an MLP scheme for each of the model's MLPs.

    Raises:
        NothingToPatchError: the model has no MLP of the form projection, activation, projection.
        UnsupportedError: the start has to keep the function, and the activation is too far from the gate's, or the
            width isn't the replaced MLP's, or V has no bias.
        WrappedModelError: one of an MLP's modules carries a forward of its own, put there by another library.
    """
    scheme, model, names = part.scheme, sites.model, sites.names
    found = find_mlps(model)
    named = names.explicitly_selected(part.only, {_names(site): names.in_head(site.name) for site in found})
    changes = [_change(model, site, part, _reason_to_keep(site, part, names, named)) for site in found]
    changes += [
        Change(Row("mlp", name, type(model.get_submodule(name)).__name__, reason="a mixture of routed experts"))
        for name in mixtures(model)
    ]
    if not changes:
        raise NothingToPatchError(
            f"{type(model).__name__} has no MLP of a form that hfpatch finds (a projection, an activation that is an "
            f"attribute, a projection back to the same width), so mlp={scheme.name!r} has nothing to replace."
        )
    return PlannerResult(part, changes)


def _names(site: MLPSite) -> tuple[str, ...]:
    return (site.name, site.owner) if site.owner else (site.name,)


def _reason_to_keep(site: MLPSite, part: SchemeRequest[MLP], names: Names, named: set[tuple[str, ...]]) -> str | None:
    if site.reason:
        return site.reason
    reason = names.reason_to_keep(_names(site), part.only, part.keep)
    if reason is None and names.in_head(site.name) and _names(site) not in named:
        return "MLP of a head: only=['*', its name] changes it too"
    return reason


def _change(model: nn.Module, site: MLPSite, part: SchemeRequest[MLP], reason: str | None) -> Change:
    scheme, (d, d_ff) = part.scheme, site.sizes
    row = Row("mlp", site.name, _text(site), reason=reason, aliases=_names(site)[1:])
    if reason is not None:
        return Change(row)
    first, last = model.get_submodule(site.name), model.get_submodule(str(site.last))
    for module in (first, site.act, last if part.init == "reset" else None):
        if isinstance(module, nn.Module):
            refuse_private_forward(site.name, module)
    becomes = f"{scheme.label}({d}, {scheme.width(d_ff)})"
    if part.init == "reset":
        _require_resizable(model, site, scheme)
        row = row.replace_by(becomes, "parameters are reinitialised")
        edits = _fresh_edits(site, scheme, first, last)
        new = ((f"{site.name}.gate", first), (f"{site.name}.up", first), (str(site.last), last))
        return Change(row, edits, then=(_GatedStart(_trained_names(*new), site.name, site.activation, str(site.last)),))
    start = _require_start(site, scheme)
    loss = None
    if not start.is_exact:
        assert site.act is not None
        gate, k = type(scheme.activation(site.act)).__name__, start.scale
        stand_in = f"{gate}(x)" if k == 1 else f"{gate}({k:g} x) / {k:g}"
        loss = f"{stand_in} stands for {_activation_name(site)}(x), off by at most {start.error:.4f}"
    why_exact = "the new projection starts as the constant 1 / k, and act(k x) / k is its activation"
    row = row.replace_by(becomes, loss, why_exact=why_exact)
    scale = {} if start.scale == 1.0 else {"scale": start.scale}
    edits = Edit.of(site.name, Call.of(GatedLinear, scheme.name, **scale)), _gated_activation(site, scheme)
    own = [name for name, parameter in first._parameters.items() if parameter is not None]
    times = [WeightChange(f"{site.name}.gate.{name}", "multiply", start.scale) for name in own if start.scale != 1.0]
    return Change(
        row, edits, starts=tuple(times), then=(_GatedStart(_trained_names((f"{site.name}.up", first)), site.name),)
    )


def _text(site: MLPSite) -> str:
    d, d_ff = site.sizes
    if site.kind is not None:
        return f"{site.kind} MLP({d}, {d_ff})"
    return f"MLP({d}, {d_ff}), {_activation_name(site)}"


def _activation_name(site: MLPSite) -> str:
    return getattr(site.act, "__name__", type(site.act).__name__)


def _require_start(site: MLPSite, scheme: MLP) -> Start:
    """The start that keeps the function; refused if there is none."""
    d_ff, anew = site.sizes[1], "Use init='reset' for fresh weights"
    if scheme.width(d_ff) != d_ff or scheme.bias is False:
        option = "bias=False" if scheme.bias is False else f"d_ff={scheme.width(d_ff)}"
        raise UnsupportedError(
            f"{site.name}: a gated MLP that starts as the trained one needs all of its {d_ff} hidden channels and a "
            f"bias, not {option}. {anew}, or leave that option out."
        )
    assert site.act is not None
    start = scheme.start(site.act)
    if not start.error <= MAX_START_ERROR:  # the error may be NaN
        raise UnsupportedError(
            f"{site.name}: mlp={scheme.name!r} can't start as this MLP, whose activation "
            f"{_activation_name(site)} is too far from the gate's (by {start.error:.3g}). "
            f"{anew}, or keep={site.name!r}."
        )
    return start


def _require_resizable(model: nn.Module, site: MLPSite, scheme: MLP) -> None:
    """Refuse another width if a module between the activation and the last projection has the old width."""
    d_ff = site.sizes[1]
    if site.direct or scheme.width(d_ff) == d_ff:
        return
    for name, module in model.get_submodule(site.owner).named_modules(prefix=site.owner):
        if name not in (site.name, site.last) and any(d_ff in p.shape for p in module.parameters(recurse=False)):
            raise UnsupportedError(
                f"{site.name}: {name} stands behind the activation and has its {d_ff} channels, so d_ff can't become "
                f"{scheme.width(d_ff)}. Use ratio=1."
            )


def _gated_activation(site: MLPSite, scheme: MLP) -> Edit:
    assert site.act is not None
    act = scheme.activation(site.act)
    options = {} if act is site.act else {"act": type(act).__name__}
    return Edit.of(site.activation, Call.of(GatedActivation, **options))


def _fresh_edits(site: MLPSite, scheme: MLP, first: nn.Module, last: nn.Module) -> tuple[Edit, ...]:
    """Edits that make all three projections anew, with another width."""
    width = scheme.width(site.sizes[1])
    biases = [module.bias is not None and scheme.bias is not False for module in (first, last)]
    up = biases[0] if scheme.bias is None else scheme.bias
    return (
        Edit.of(site.name, Call.of(GatedLinear, scheme.name, width, biases[0], up)),
        Edit.of(str(site.last), Call.of(Projection, width, biases[1])),
        _gated_activation(site, scheme),
    )


@dataclass(frozen=True)
class _GatedStart:
    """Freezes a gated MLP's new Parameters if the old ones are frozen; with all names, initialises them as the host.

    Without them the gate has the replaced projection's (shared ones are kept: `find_mlps`), and V's are new.

    Attributes:
        trained: (name, whether it is trained) of the new Parameters.
        first, activation, last: names of the gated projection, the activation, and the projection back.
    """

    trained: tuple[tuple[str, bool], ...]
    first: str
    activation: str | None = None
    last: str | None = None

    def apply(self, model: nn.Module, transaction: Transaction) -> None:
        """Carry it out; it changes new modules alone, which `transaction` logged."""
        gated = model.get_submodule(self.first)
        assert isinstance(gated, GatedLinear)
        if self.activation is None or self.last is None:
            vars(gated.gate).pop(TIMES)
        else:
            for module in (gated.gate, gated.up, model.get_submodule(self.last)):
                vars(module).pop(FRESH)
            if not gated.weight.is_meta:
                _initialise(model, (self.first, self.activation, self.last))
        for name, trained in self.trained:
            path, _, leaf = name.rpartition(".")
            if (parameter := model.get_submodule(path)._parameters.get(leaf)) is not None:
                parameter.requires_grad_(trained)


def _trained_names(*modules: tuple[str, Any]) -> tuple[tuple[str, bool], ...]:
    """(name, whether it is trained) of the Parameters that replace those of modules, by the modules' new names."""
    return tuple(
        (f"{where}.{name}", (old.weight if old._parameters.get(name) is None else old._parameters[name]).requires_grad)
        for where, old in modules
        for name in ("weight", "bias")
    )


def _initialise(model: nn.Module, names: tuple[str, str, str]) -> None:
    """Initialise by the host's own rules, for a projection and for a module that holds nothing but this MLP.

    It runs twice, since such a rule writes to the first projection, here the gate: V keeps the first draw.
    """
    modules = dict(model.named_modules())
    host, gated, last = innermost_model(modules, names[0]), modules[names[0]], modules[names[2]]
    assert isinstance(gated, GatedLinear)
    if host is None:
        return
    own = {id(parameter) for module in (gated, last) for parameter in module.parameters()}
    around = dict.fromkeys(name.rpartition(".")[0] for name in names)
    holders = [model.get_submodule(name) for name in around]
    holders = [module for module in holders if all(id(parameter) in own for parameter in module.parameters())]
    with torch.no_grad():
        for again in (False, True):
            for module in (gated.gate, last, *holders):
                host._init_weights(module)
            if not again:
                host._init_weights(gated.up)
                gated.up.weight.copy_(gated.gate.weight)  # type: ignore[operator,arg-type]
