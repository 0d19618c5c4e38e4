"""The junctions of a model: where the branches of its blocks meet the stream, found on a small model of its class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..core.globs import Names
from ..core.plan_table import refuse_private_forward
from ..errors import NothingToPatchError
from ..measure.outputs import max_error, outputs_of
from ..measure.quiet_forward import quiet
from ..measure.twin import twin
from ..runtime.apply import apply, condensed
from ..runtime.edits import LENS_SLOT, Edit, pattern_of
from ..runtime.errors import PatchError, UnsupportedError
from ..runtime.joins import Gains, Join, Joins
from ..runtime.lens import lens_of
from ..runtime.padding import Padded
from ..schemes.norms import Depth
from .anatomy import Branch, find_branches
from .branches import Junction, junction_of
from .projections import Projection, find_projections

SECOND = "_after"  # of a sandwich's second norm, behind the first one's name
_CONTAINERS = (nn.Sequential, nn.ModuleDict)
_SAME = 1e-9  # relative, in float64; some hosts compute a part in float32


@dataclass
class Site:
    """A junction in one block of the model in hand."""

    junction: Junction
    block_name: str
    block: nn.Module

    @property
    def norm(self) -> nn.Module:
        return self.block.get_submodule(self.junction.norm)

    @property
    def norm_name(self) -> str:
        return f"{self.block_name}.{self.junction.norm}"

    def join(self, form: str) -> Join:
        """How this branch meets the stream when it is patched so."""
        own = self.junction
        second = f"{own.norm}{SECOND}" if form == "sandwich" else ""
        return Join(form, own.norm, own.outlet, own.call, own.dropout, second, own.readers, own.alpha)

    def edit(self, form: str) -> Edit:
        """The edit that lets this branch meet the stream so."""
        return Edit.of(f"{self.block_name}.{LENS_SLOT}", Joins((self.join(form),)))


@dataclass
class Found:
    """What was found on the small model.

    Attributes:
        junctions: of the model.
        depths: for each pattern of blocks, how deep its stack is in the model itself.
        small, inputs: the small model, which may be changed, and keyword arguments of its forward.
    """

    junctions: list[Junction]
    depths: dict[str, Depth]
    small: nn.Module
    inputs: dict[str, Any]


def discover(model: nn.Module, request: str, example_inputs: Mapping[str, Any] | None, weights: bool = False) -> Found:
    """The junctions of a model.

    Args:
        model: isn't changed; its weights aren't needed.
        request: for messages.
        example_inputs: keyword arguments of one forward, where they can't be made.
        weights: find the weights that DeepNorm scales, too.

    Raises:
        UnsupportedError: no small model can be made, branches were changed before, or layers of one stack differ.
        NothingToPatchError: there is no branch.
    """
    require_untouched(model)
    small, inputs = twin(model, example_inputs)
    try:
        branches = find_branches(small, inputs)
        scaled = scaled_weights(find_projections(small, inputs, branches)) if weights else {}
    except PatchError:
        raise
    except Exception as error:  # a block that can't run by itself, with the arguments of a call in the model
        raise UnsupportedError(
            f"{type(model).__name__}: its blocks can't be measured one by one ({type(error).__name__}: {error}), so "
            f"{request} can't find their branches."
        ) from error
    if not branches:
        raise NothingToPatchError(
            f"{type(model).__name__}: no residual branch with a norm was found, so {request} has nothing to change."
        )
    junctions = _merged(branches, scaled, request)
    _require_everywhere(small, junctions, branches, request)
    return Found(junctions, _depths(model, junctions, branches), small, inputs)


def scaled_weights(found: Mapping[Branch, tuple[Projection, ...]]) -> dict[Branch, tuple[tuple[str, str], ...]]:
    """For each branch what DeepNorm scales at initialisation: values and outputs, feed-forward; not queries and keys.

    Raises:
        UnsupportedError: values lie in a fused projection in an order that isn't known.
    """
    scaled = {}
    for branch, projections in found.items():
        unknown = next((one.name for one in projections if one.values == "?"), None)
        if unknown:
            raise UnsupportedError(
                f"{branch.block}.{unknown}: its outputs hold queries, keys and values in an order that isn't known, so "
                "init='reset' can't scale the values alone. Use init='copy' and scale them yourself."
            )
        pairs = ((one.name, one.values) for one in projections if one.values and one.role != "router")
        scaled[branch] = tuple(dict.fromkeys(pairs))
    return scaled


def require_untouched(model: nn.Module) -> None:
    """Refuse a model whose branches an earlier patch changed.

    Raises:
        UnsupportedError: names the module.
    """
    for name, module in model.named_modules():
        if any(lens_of(module, kind) for kind in (Gains, Joins, Padded)):
            raise UnsupportedError(
                f"{name}: what its branches or norms see was changed by an earlier patch. Start from the original."
            )


def _merged(branches: list[Branch], weights: Mapping[Branch, Any], request: str) -> list[Junction]:
    """One junction for the same branch of all layers."""
    junctions: dict[tuple, Junction] = {}
    for branch in branches:
        junction = junction_of(branch)
        key = junction.block, junction.outlet, junction.call
        known = junctions.setdefault(key, junction)
        if replace(known, projection="", weights=()) != replace(junction, projection=""):
            raise UnsupportedError(
                f"{branch.block}: its {junction.outlet} meets the stream another way than in the layers before "
                f"({junction.placement}, {known.placement}), so {request} can't change all of them alike."
            )
        projection = known.projection if known.projection == junction.projection else ""
        scaled = tuple(dict.fromkeys((*known.weights, *weights.get(branch, ()))))
        junctions[key] = replace(known, weights=scaled, projection=projection)
    return list(junctions.values())


def _require_everywhere(small: nn.Module, junctions: list[Junction], branches: list[Branch], request: str) -> None:
    """Refuse stacks in which only some layers meet the stream so (windows that some layers cut, say)."""
    found = {(branch.block, junction_of(branch).outlet, branch.call) for branch in branches}
    for site in sites_of(small, junctions):
        if (site.block_name, site.junction.outlet, site.junction.call) not in found:
            raise UnsupportedError(
                f"{site.block_name}: its {site.junction.outlet} doesn't meet the stream as in other layers of its "
                f"stack, so {request} can't change all of them alike."
            )


def _depths(model: nn.Module, junctions: list[Junction], branches: list[Branch]) -> dict[str, Depth]:
    sites = list(sites_of(model, junctions))
    counts: dict[str, int] = {}
    for site in sites:
        counts[site.junction.block] = counts.get(site.junction.block, 0) + 1
    for stack in {pattern_of(branch.block) for branch in branches if branch.shared} & set(counts):
        blocks = len({site.block_name for site in sites if site.junction.block == stack})
        counts[stack] = counts[stack] * _layers(model, stack) // blocks
    crossing = {pattern_of(branch.block) for branch in branches if branch.cross}
    read = sum(counts.get(stack, 0) for stack in crossing)
    return {stack: Depth(count, 0 if stack in crossing else read) for stack, count in counts.items()}


def _layers(model: nn.Module, stack: str) -> int:
    layers = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    if not isinstance(layers, int):
        raise UnsupportedError(
            f"{stack} runs several times in one forward, and the config doesn't say how often (num_hidden_layers), so "
            "the depth of its stack isn't known."
        )
    return layers


def sites_of(model: nn.Module, junctions: list[Junction]) -> Iterator[Site]:
    """Every place in the model that the junctions name, in the order of its modules."""
    names = Names.of(model)
    for name, block in model.named_modules():
        patterns = {pattern_of(form) for form in names.forms(name)}
        for junction in junctions:
            if junction.block in patterns and _has(block, junction.norm) and _has(block, junction.outlet):
                yield Site(junction, name, block)


def _has(block: nn.Module, path: str) -> bool:
    try:
        block.get_submodule(path)
    except AttributeError:
        return False
    return bool(path)


def require_joinable(site: Site) -> None:
    """Refuse branches between whose output and the stream more happens than a join can reproduce.

    Raises:
        UnsupportedError: something is multiplied, dropped or hidden on the way.
        WrappedModelError: a module carries a forward of its own.
    """
    junction = site.junction
    if junction.altered:
        raise UnsupportedError(
            f"{site.block_name}: what its {junction.outlet} returns is multiplied on its way to the stream, or its "
            "positions are moved, so no norm can be put behind it."
        )
    if junction.dropout == "?":
        raise UnsupportedError(
            f"{site.block_name}: a dropout follows its {junction.outlet} whose rate isn't found, so no norm can be put "
            "behind it."
        )
    for path in (junction.norm, junction.outlet, *junction.readers):
        parts = path.split(".")[:-1]
        for depth in range(len(parts) + 1):
            inner = ".".join(parts[:depth])
            require_own_forward(f"{site.block_name}.{inner}".strip("."), site.block.get_submodule(inner))


def require_own_forward(name: str, module: nn.Module) -> None:
    """Refuse what can't be seen through.

    Raises:
        UnsupportedError: a container.
        WrappedModelError: a forward of the instance's own.
    """
    refuse_private_forward(name, module)
    if isinstance(module, _CONTAINERS):
        raise UnsupportedError(f"{name} is a {module._get_name()} inside a branch, which can't be seen through.")


def require_transparent(found: Found, request: str) -> None:
    """Refuse blocks that give something else, or fail, when they are seen through as what they are.

    Raises:
        UnsupportedError: on the small model, which is changed.
    """
    sites = list(sites_of(found.small, found.junctions))
    for site in sites:
        require_joinable(site)
    with quiet(found.small):
        before = outputs_of(found.small, found.inputs)
        try:
            apply(condensed([site.edit(site.junction.placement) for site in sites], found.small), found.small)
            after = outputs_of(found.small, found.inputs)
            same = max_error(before, after) <= _SAME
        except Exception as error:
            raise UnsupportedError(
                f"{type(found.small).__name__}: the forward of its {type(sites[0].block).__name__} can't run on a view "
                f"({type(error).__name__}: {error}), so {request} can't change its branches."
            ) from error
    if not same:
        raise UnsupportedError(
            f"{type(found.small).__name__}: its blocks don't compute the sums that were found in them, so {request} "
            "can't change them. Please report this model."
        )
