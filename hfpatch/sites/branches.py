"""The residual branches of a model in hand, found on a small model of its class, and how they can be changed."""

from __future__ import annotations

from collections import Counter
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
from ..runtime.errors import UnsupportedError
from ..runtime.joins import Gains, Join, Joins
from ..runtime.lens import lens_of
from ..runtime.padding import Padded
from ..schemes.norms import Depth
from .anatomy import Branch, find_branches
from .blocks import measuring
from .deepnorm_weights import with_weights

SECOND = "_after"  # of a sandwich's second norm, behind the first one's name
_CONTAINERS = (nn.Sequential, nn.ModuleDict)
_SAME = 1e-9  # relative, in float64; some hosts compute a part in float32


@dataclass
class Site:
    """A branch of a stack in one block of the model in hand."""

    branch: Branch
    block_name: str
    block: nn.Module

    @property
    def norm(self) -> nn.Module:
        return self.block.get_submodule(self.branch.norm)

    @property
    def norm_name(self) -> str:
        return f"{self.block_name}.{self.branch.norm}"

    def join(self, form: str, alpha: float = 1.0) -> Edit:
        """The edit that lets this branch meet the stream in one of the forms of runtime/joins.py."""
        own = self.branch
        second = f"{own.norm}{SECOND}" if form == "sandwich" else ""
        join = Join(form, own.norm, own.outlet, own.call, own.dropout, second, own.readers, alpha)
        return Edit.of(f"{self.block_name}.{LENS_SLOT}", Joins((join,)))


@dataclass
class Found:
    """What was found on the small model.

    Attributes:
        branches: of each stack, whose pattern stands for the block's name.
        depths: for each pattern of blocks, how deep its stack is in the model itself.
        small, inputs: the small model, which may be changed, and keyword arguments of its forward.
    """

    branches: list[Branch]
    depths: dict[str, Depth]
    small: nn.Module
    inputs: dict[str, Any]


def discover(model: nn.Module, request: str, example_inputs: Mapping[str, Any] | None, weights: bool = False) -> Found:
    """The branches of a model.

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
    with measuring(model, f"{request} can't find their branches"):
        layers = find_branches(small, inputs)
        layers = with_weights(small, inputs, layers) if weights else layers
    if not layers:
        raise NothingToPatchError(
            f"{type(model).__name__}: no residual branch with a norm was found, so {request} has nothing to change."
        )
    branches = _merged(layers, request)
    _require_everywhere(small, branches, layers, request)
    return Found(branches, _depths(model, branches, layers), small, inputs)


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


def _merged(layers: list[Branch], request: str) -> list[Branch]:
    """One branch for the same branch of all layers, with the stack's pattern for the block's name."""
    found: dict[tuple, Branch] = {}
    for branch in layers:
        key = branch.stack, branch.outlet, branch.call
        known = found.setdefault(key, replace(branch, block=branch.stack))
        same = ("norm", "outer", "altered", "dropout", "placement", "readers")
        if any(getattr(known, name) != getattr(branch, name) for name in same):
            raise UnsupportedError(
                f"{branch.block}: its {branch.outlet} meets the stream another way than in the layers before "
                f"({branch.placement}, {known.placement}), so {request} can't change all of them alike."
            )
        projection = known.projection if known.projection == branch.projection else ""
        weights = tuple(dict.fromkeys((*known.weights, *branch.weights)))
        found[key] = replace(known, weights=weights, projection=projection)
    return list(found.values())


def _require_everywhere(small: nn.Module, branches: list[Branch], layers: list[Branch], request: str) -> None:
    """Refuse stacks in which only some layers meet the stream so (windows that some layers cut, say)."""
    found = {(branch.block, branch.outlet, branch.call) for branch in layers}
    for site in sites_of(small, branches):
        if (site.block_name, site.branch.outlet, site.branch.call) not in found:
            raise UnsupportedError(
                f"{site.block_name}: its {site.branch.outlet} doesn't meet the stream as in other layers of its "
                f"stack, so {request} can't change all of them alike."
            )


def _depths(model: nn.Module, branches: list[Branch], layers: list[Branch]) -> dict[str, Depth]:
    sites = list(sites_of(model, branches))
    counts = Counter(site.branch.stack for site in sites)
    for stack in {branch.stack for branch in layers if branch.shared} & set(counts):
        blocks = len({site.block_name for site in sites if site.branch.stack == stack})
        counts[stack] = counts[stack] * _layers(model, stack) // blocks
    crossing = {branch.stack for branch in layers if branch.cross}
    read = sum(counts[stack] for stack in crossing)
    return {stack: Depth(count, 0 if stack in crossing else read) for stack, count in counts.items()}


def _layers(model: nn.Module, stack: str) -> int:
    layers = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    if not isinstance(layers, int):
        raise UnsupportedError(
            f"{stack} runs several times in one forward, and the config doesn't say how often (num_hidden_layers), so "
            "the depth of its stack isn't known."
        )
    return layers


def sites_of(model: nn.Module, branches: list[Branch]) -> Iterator[Site]:
    """Every place in the model where one of the branches is, in the order of its modules."""
    names = Names.of(model)
    for name, block in model.named_modules():
        patterns = {pattern_of(form) for form in names.forms(name)}
        inside = (
            dict(block.named_modules(remove_duplicate=False))
            if any(branch.stack in patterns for branch in branches)
            else {}
        )
        for branch in branches:
            if branch.stack in patterns and {branch.norm, branch.outlet} <= inside.keys() - {""}:
                yield Site(branch, name, block)


def require_joinable(site: Site) -> None:
    """Refuse branches between whose output and the stream more happens than a join can reproduce.

    Raises:
        UnsupportedError: something is multiplied, dropped or hidden on the way.
        WrappedModelError: a module carries a forward of its own.
    """
    branch = site.branch
    if branch.altered:
        raise UnsupportedError(
            f"{site.block_name}: what its {branch.outlet} returns is multiplied on its way to the stream, or its "
            "positions are moved, so no norm can be put behind it."
        )
    if branch.dropout == "?":
        raise UnsupportedError(
            f"{site.block_name}: a dropout follows its {branch.outlet} whose rate isn't found, so no norm can be put "
            "behind it."
        )
    for path in (branch.norm, branch.outlet, *branch.readers):
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
    sites = list(sites_of(found.small, found.branches))
    for site in sites:
        require_joinable(site)
    with quiet(found.small):
        before = outputs_of(found.small, found.inputs)
        try:
            apply(condensed([site.join(site.branch.placement) for site in sites], found.small), found.small)
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
