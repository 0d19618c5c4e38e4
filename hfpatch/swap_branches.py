"""From a scheme that changes how residual branches meet their stream to the list of what changes in the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .branches import Branch, Junction, find_branches, junction_of
from .convert.centring import pattern_of
from .convert.twin import twin
from .edits import Edits
from .errors import NothingToPatchError, UnsupportedError
from .initial import heads_of, scaled_weights, values_of
from .norms import Norm, NormFacts, describe
from .norms.deepnorm import DeepNorm, Depth
from .record import Part
from .registry import NORMS
from .residual import Gains, Join, Joins, add_gain, add_join
from .rows import Change, Row, refuse_private_forward
from .select import Names
from .swap_norms import start_afresh
from .view import lens_of

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass
class _Site:
    """One branch of one block of the model in hand."""

    junction: Junction
    block_name: str
    block: nn.Module

    @property
    def norm(self) -> nn.Module:
        return self.block.get_submodule(self.junction.norm)

    @property
    def norm_name(self) -> str:
        return f"{self.block_name}.{self.junction.norm}"


def settle_norm(model: nn.Module, part: Part, example_inputs: Mapping[str, Any] | None = None) -> Part:
    """The part with what has to be found on the model first: for schemes of branches, the junctions.

    Raises:
        UnsupportedError: the model has no branches that the scheme could change, or changes branches already.
        NothingToPatchError: it has none at all.
    """
    if not getattr(part.scheme, "branchwise", False):
        return part
    assert isinstance(part.scheme, DeepNorm)
    junctions, branches = discover(model, f"norm={part.scheme.name!r}", example_inputs, part.init == "reset")
    for junction in junctions:
        _require_sequential(junction, part.scheme)
    depths = _depths(model, junctions, branches)
    settled = []
    for junction in junctions:
        alpha, beta = part.scheme.gains(depths[junction.block])
        settled.append(replace(junction, alpha=alpha, beta=beta))
    return replace(part, branches=tuple(settled))


def discover(
    model: nn.Module, request: str, example_inputs: Mapping[str, Any] | None = None, weights: bool = False
) -> tuple[list[Junction], list[Branch]]:
    """The junctions of a model, found on a small one of its class, and that one's branches.

    Raises:
        UnsupportedError: no small model can be made, it changes branches already, or layers of one stack differ.
        NothingToPatchError: there is no branch.
    """
    for name, module in model.named_modules():
        if lens_of(module, Gains) or lens_of(module, Joins):
            raise UnsupportedError(
                f"{name}: how its branches meet the stream was changed by an earlier patch. Start from the original."
            )
    small, inputs = twin(model, example_inputs)
    branches = find_branches(small, inputs)
    scaled = scaled_weights(small, inputs, branches) if weights else {}
    if not branches:
        raise NothingToPatchError(
            f"{type(model).__name__}: no residual branch with a norm was found in it, so {request} has nothing to change."
        )
    junctions: dict[tuple, Junction] = {}
    for branch in branches:
        junction = junction_of(branch)
        key = junction.block, junction.outlet, junction.call
        known = junctions.setdefault(key, junction)
        known_weights = dict.fromkeys((*known.weights, *scaled.get(branch, ())))
        projection = known.projection if known.projection == junction.projection else ""
        junctions[key] = replace(known, weights=tuple(known_weights), projection=projection)
        if replace(known, projection="", weights=()) != replace(junction, projection=""):
            raise UnsupportedError(
                f"{branch.block}: its {junction.outlet} meets the stream another way than in the layers before "
                f"({junction.placement}, {known.placement}), so {request} can't change all of them alike."
            )
    return list(junctions.values()), branches


def _require_sequential(junction: Junction, scheme: DeepNorm) -> None:
    where = f"{junction.block}.{junction.outlet}"
    if junction.placement == "parallel":
        raise UnsupportedError(
            f"{where}: parallel residual: its branches read and write the same points of the stream, while DeepNorm "
            "normalises after one branch before the next reads. There is no DeepNorm for such blocks."
        )
    if junction.placement not in ("pre", "post"):
        raise UnsupportedError(
            f"{where}: its norms are placed as {junction.placement!r}; DeepNorm is made from x + f(norm(x)) or "
            "norm(x + f(x)) only."
        )
    if junction.placement == "pre" and scheme.preserve:
        raise UnsupportedError(
            f"{where}: preserve=True needs norm(x + f(x)), and this is x + f(norm(x)): no weights make LN(a x + f(x)) "
            "the same function. Leave preserve out (the function changes), or keep the norms."
        )


def _depths(model: nn.Module, junctions: list[Junction], branches: list[Branch]) -> dict[str, Depth]:
    """For each pattern of blocks, how many branches its stack has."""
    counts: dict[str, int] = {}
    for site in _sites(model, junctions):
        counts[site.junction.block] = counts.get(site.junction.block, 0) + 1
    shared = {pattern_of(branch.block) for branch in branches if branch.shared}
    for stack in shared & set(counts):
        blocks = len({site.block_name for site in _sites(model, junctions) if site.junction.block == stack})
        counts[stack] = counts[stack] * _layers(model, stack) // blocks
    crossing = {pattern_of(branch.block) for branch in branches if branch.cross}
    read = sum(counts.get(stack, 0) for stack in crossing)
    return {stack: Depth(count, 0 if stack in crossing else read) for stack, count in counts.items()}


def _layers(model: nn.Module, stack: str) -> int:
    layers = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    if not isinstance(layers, int):
        raise UnsupportedError(
            f"{stack} runs several times in one forward, and the config doesn't say how often (num_hidden_layers). "
            "Give DeepNorm alpha and beta yourself."
        )
    return layers


def _sites(model: nn.Module, junctions: list[Junction]) -> Iterator[_Site]:
    names = Names.of(model)
    for name, block in model.named_modules():
        patterns = {pattern_of(form) for form in names.forms(name)}
        for junction in junctions:
            if junction.block in patterns and _has(block, junction.norm) and _has(block, junction.outlet):
                yield _Site(junction, name, block)


def _has(block: nn.Module, path: str) -> bool:
    try:
        block.get_submodule(path)
    except AttributeError:
        return False
    return True


def plan_branch_norms(model: nn.Module, part: Part, strict: bool = True) -> list[Change]:
    """What a norm scheme of branches does to each of the model's norms; nothing is changed yet.

    Args:
        model: any module tree.
        part: the scheme, settled.
        strict: raise where there is no branch; replaying a record on another head doesn't.

    Raises:
        NothingToPatchError: none of the part's junctions is in the model.
        UnsupportedError: `init="exact"` where the swap isn't.
        WrappedModelError: a module carries a forward of its own, put there by another library.
    """
    sites = list(_sites(model, list(part.branches)))
    if strict and not sites:
        raise NothingToPatchError(f"{type(model).__name__} has none of the branches that its patch record names.")
    names = Names.of(model)
    reasons = {site.norm_name: _reason_to_keep(site, part, names) for site in sites}
    changes = [_kept(name, module) for name, module in _other_norms(model, sites)]
    for site in sites:
        changes += _changes(model, site, part, reasons, sites)
    return changes


def _other_norms(model: nn.Module, sites: list[_Site]) -> Iterator[tuple[str, nn.Module]]:
    of_branches = {id(site.norm) for site in sites}
    for name, module in model.named_modules():
        if id(module) not in of_branches and describe(module) is not None:
            yield name, module


def _kept(name: str, module: nn.Module) -> Change:
    now = module._get_name() + _size(describe(module))
    return Change(Row("norm", "keep", name, now, reason="not the norm of a residual branch"))


def _size(facts: NormFacts | None) -> str:
    return f"({', '.join(map(str, facts.shape))})" if facts else ""


def _reason_to_keep(site: _Site, part: Part, names: Names) -> str | None:
    assert isinstance(part.scheme, Norm)
    facts = describe(site.norm)
    if facts is None:
        return "not LayerNorm's arithmetic"
    if any(names.matches(glob, [site.norm_name]) for glob in part.keep):
        return "keep"
    if part.only and not any(names.matches(glob, [site.norm_name]) for glob in part.only):
        return "not in only"
    return part.scheme.reason_to_keep(facts)


def _changes(
    model: nn.Module, site: _Site, part: Part, reasons: dict[str, str | None], sites: list[_Site]
) -> list[Change]:
    scheme, junction, reason = part.scheme, site.junction, reasons[site.norm_name]
    assert isinstance(scheme, DeepNorm)
    facts = describe(site.norm)
    row = Row("norm", "keep", site.norm_name, site.norm._get_name() + _size(facts), reason=reason)
    if reason is not None:
        return [Change(row)]
    assert facts is not None
    refuse_private_forward(site.norm_name, site.norm)
    alpha = junction.alpha
    form = "LN" if facts.kind == "layer" else "RMS"
    row.action, row.becomes = "replace", f"{scheme.label}{_size(facts)}"
    row.reason = f"a = {alpha:.4g}"
    row.loss = None if scheme.preserve else f"{form}({alpha:.4g} x + f(x)) in place of {_before(junction, form)}"
    if part.init == "reset":
        row.loss = "parameters start afresh"
    if row.loss and part.init == "exact":
        raise UnsupportedError(
            f"{site.norm_name}: norm={scheme.name!r} isn't exact here: {row.loss}. Use init='auto' to accept that, or "
            "preserve=True on a post-norm model."
        )
    if junction.placement == "post":
        return [Change(row, _gain(site, facts, part)), *_weights(site, part)]
    in_block = [s for s in sites if s.block is site.block]
    return [Change(row, _join(site, facts, part, in_block, reasons)), *_weights(site, part)]


def _before(junction: Junction, form: str) -> str:
    return f"{form}(x + f(x))" if junction.placement == "post" else f"x + f({form}(x))"


def _gain(site: _Site, facts: NormFacts, part: Part) -> Callable[[Edits], None]:
    """LN_eps(a x + f(x)) = LN_(eps/a^2)(x + f(x)/a)."""
    junction, scheme = site.junction, part.scheme
    assert isinstance(scheme, DeepNorm)
    path, _, child = junction.outlet.rpartition(".")
    parent = site.block.get_submodule(path)
    _require_own_forward(f"{site.block_name}.{path}".strip("."), parent)
    if facts.eps is None:
        raise UnsupportedError(f"{site.norm_name}: its eps is the dtype's, which DeepNorm can't divide by a^2.")
    eps = facts.eps if scheme.preserve else facts.eps / junction.alpha**2

    def apply(edits: Edits) -> None:
        add_gain(edits, parent, child, junction.call, 1 / junction.alpha)
        _set_norm(edits, site, replace(facts, eps=eps), part.init)

    return apply


def _join(
    site: _Site, facts: NormFacts, part: Part, in_block: list[_Site], reasons: dict[str, str | None]
) -> Callable[[Edits], None]:
    """LN(a x + f(x)) from x + f(LN(x))."""
    junction = site.junction
    if junction.scale:
        raise UnsupportedError(
            f"{site.block_name}: what its {junction.outlet} returns is multiplied on its way to the stream, so "
            "the norm can't be put behind the sum."
        )
    if junction.dropout == "?":
        raise UnsupportedError(
            f"{site.block_name}: a dropout follows its {junction.outlet} whose rate isn't found, so the norm can't be "
            "put behind it. Set the model's dropouts to 0."
        )
    for path in (junction.norm, junction.outlet):
        parts = path.split(".")[:-1]
        for depth in range(len(parts) + 1):
            inner = ".".join(parts[:depth])
            _require_own_forward(f"{site.block_name}.{inner}".strip("."), site.block.get_submodule(inner))

    def apply(edits: Edits) -> None:
        for other in in_block:
            if other is not site and reasons[other.norm_name] is not None and other.junction.dropout:
                add_join(edits, site.block, _as_join(other.junction, "host"))
        add_join(edits, site.block, _as_join(junction, "deepnorm"))
        if part.init == "reset":
            _set_norm(edits, site, facts, part.init)

    return apply


def _as_join(junction: Junction, form: str) -> Join:
    return Join(form, junction.norm, junction.outlet, junction.call, junction.dropout, junction.outer, junction.alpha)


def _require_own_forward(name: str, module: nn.Module) -> None:
    refuse_private_forward(name, module)
    if isinstance(module, _CONTAINERS):
        raise UnsupportedError(
            f"{name} is a {module._get_name()}, whose forward can't be seen through, and it holds what a branch ends in."
        )


def _set_norm(edits: Edits, site: _Site, facts: NormFacts, init: str) -> None:
    path, _, name = site.junction.norm.rpartition(".")
    old = site.norm
    gain = getattr(old, facts.gain) if facts.gain else None
    shift = getattr(old, facts.shift) if facts.shift else None
    like = next((v for v in (gain, shift, *site.block.parameters()) if v is not None), torch.zeros(()))
    new = NORMS[facts.kind]().build(facts, gain, shift, like)
    if init == "reset":
        start_afresh(new)
    edits.set_module(site.block.get_submodule(path), name, new)


def _weights(site: _Site, part: Part) -> list[Change]:
    """What changes in weights: with preserve=True the projection times a, from scratch what the paper scales by b."""
    junction, scheme = site.junction, part.scheme
    assert isinstance(scheme, DeepNorm)
    changes = []
    if scheme.preserve:
        _require_one_matrix(site, junction.projection)
        changes.append(_scale(site, junction.projection, "all", junction.alpha, junction.alpha))
    elif part.init == "reset":
        for pattern, which in junction.weights:
            for name, _ in site.block.named_modules():
                if pattern_of(name) == pattern:
                    changes.append(_scale(site, name, which, junction.beta, 0.0))
    return changes


def _require_one_matrix(site: _Site, path: str) -> None:
    module = site.block.get_submodule(path) if path else site.block
    matrices = [p for p in module._parameters.values() if p is not None and p.dim() > 1]
    if not path or len(matrices) != 1:
        raise UnsupportedError(
            f"{site.block_name}.{path}: preserve=True multiplies a branch's output projection, and this one has "
            f"{len(matrices)} matrices. Leave preserve out (the function changes)."
        )


def _scale(site: _Site, path: str, which: str, factor: float, bias: float) -> Change:
    """A module's matrices times one factor and its biases times another; or those of the values in it alone."""
    module = site.block.get_submodule(path)
    values = "" if which == "all" else "values "
    row = Row("norm", "replace", f"{site.block_name}.{path}", module._get_name(), f"{values}x {factor:.4g}")
    if bias != factor:
        row.reason, row.loss = "biases start at zero", "parameters start afresh"
    heads = heads_of(site.block, module, row.module) if which == "heads" else 1

    def apply(edits: Edits) -> None:
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and not parameter.is_meta:
                by = _factors(module, parameter, which, heads, bias if parameter.dim() == 1 else factor)
                by = by.to(parameter.device)
                if parameter.dim() == 1 and bias == 0.0:  # no factor takes back what training makes of a zero
                    new = (parameter.detach() * by).to(parameter.dtype)
                    edits.set_parameter(module, name, nn.Parameter(new, requires_grad=parameter.requires_grad))
                else:
                    edits.rewrite(module, name, "multiply", by)

    return Change(row, apply, replayed=False)


def _factors(module: nn.Module, parameter: Tensor, which: str, heads: int, factor: float) -> Tensor:
    """What a Parameter is multiplied by: one number, or one for each of the module's outputs."""
    one = torch.tensor(factor, dtype=torch.float64)
    if which == "all":
        return one
    axis = _out_axis(module) if parameter.dim() > 1 else 0
    by = torch.where(values_of(parameter.shape[axis], which, heads), one, 1.0)
    return by.reshape([-1 if i == axis else 1 for i in range(parameter.dim())])


def _out_axis(module: nn.Module) -> int:
    return 1 if type(module).__name__ == "Conv1D" else 0
