"""Finds the residual branches of a model on a small model of its class, and checks that they can be changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

from ..core.globs import Names
from ..core.plan_table import refuse_private_forward
from ..errors import NothingToPatchError
from ..measure.copies import copy_of
from ..measure.float64_forward import host_errors
from ..measure.outputs import max_error, outputs_of
from ..measure.quiet_forward import inference_state
from ..runtime.apply import apply, condense
from ..runtime.batch_norm import Padded
from ..runtime.edits import LENS_SLOT, Edit, pattern_of
from ..runtime.joins import Gains, Join, Joins
from ..runtime.lens import lens_of
from ..runtime.patch_errors import UnsupportedError
from ..schemes.from_scratch import Depth
from .block_runs import measuring
from .deepnorm_weights import with_weights
from .residual_branches import Branch, find_branches
from .sites import Sites

SECOND_NORM_SUFFIX = "_after"  # a sandwich's second norm is called like the first one, with this
_CONTAINERS = (nn.Sequential, nn.ModuleDict)
_TOLERANCE = 1e-9  # relative, in float64; some hosts compute a part in float32


@dataclass
class BranchSite:
    """A residual branch in one block of the user's model; `reason` says why a plan keeps it, None if it changes."""

    branch: Branch
    block_name: str
    block: nn.Module
    reason: str | None = None

    @property
    def norm(self) -> nn.Module:
        return self.block.get_submodule(self.branch.norm)

    @property
    def norm_name(self) -> str:
        return f"{self.block_name}.{self.branch.norm}"

    def join(self, form: str, alpha: float = 1.0) -> Edit:
        """Return the edit that adds this branch to the stream in one of the forms of runtime/joins.py."""
        own = self.branch
        second = f"{own.norm}{SECOND_NORM_SUFFIX}" if form == "sandwich" else ""
        join = Join(form, own.norm, own.outlet, own.call, own.dropout, second, own.readers, alpha)
        return Edit.of(f"{self.block_name}.{LENS_SLOT}", Joins((join,)))


@dataclass
class StackBranches:
    """Residual branches of each stack of a model, found on a small model of its class.

    Attributes:
        branches: one for all layers of a stack, with the pattern of the blocks' names in place of the name.
        depths: pattern of blocks -> the depth of that stack in the user's model.
    """

    branches: list[Branch]
    depths: dict[str, Depth]


def discover(sites: Sites, request: str, weights: bool = False) -> StackBranches:
    """Find the residual branches of a model, whose weights aren't needed.

    Args:
        sites: of the model.
        request: named in error messages.
        weights: also find the weights that DeepNorm scales.

    Raises:
        UnsupportedError: no small model runs, an earlier patch changed the branches, or layers of a stack differ.
        NothingToPatchError: the model has no residual branch with a norm.
    """
    model = sites.model
    require_untouched(model)
    small, inputs = sites.twin
    with measuring(model, f"{request} can't find their branches"):
        layers = find_branches(small, inputs)
        layers = with_weights(small, inputs, layers) if weights else layers
    if not layers:
        raise NothingToPatchError(
            f"{type(model).__name__}: no residual branch with a norm was found, so {request} has nothing to change."
        )
    branches = _merge(layers, request)
    _require_everywhere(small, branches, layers, request)
    return StackBranches(branches, _depths(model, branches, layers))


def require_untouched(model: nn.Module) -> None:
    """Refuse a model whose branches an earlier patch changed.

    Raises:
        UnsupportedError: names the module.
    """
    for name, module in model.named_modules():
        if any(lens_of(module, kind) for kind in (Gains, Joins, Padded)):
            raise UnsupportedError(
                f"{name}: an earlier patch changed the inputs of its residual branches or norms. Start from the "
                "original."
            )


def _merge(layers: list[Branch], request: str) -> list[Branch]:
    """Merge the same branch of all layers into one, with the pattern of the blocks' names in place of the name."""
    found: dict[tuple, Branch] = {}
    for branch in layers:
        key = branch.stack, branch.outlet, branch.call
        known = found.setdefault(key, replace(branch, block=branch.stack))
        same = ("norm", "outer", "altered", "dropout", "placement", "readers")
        if any(getattr(known, name) != getattr(branch, name) for name in same):
            raise UnsupportedError(
                f"{branch.block}: its {branch.outlet} is added to the residual stream in another way "
                f"({branch.placement}) than in earlier layers ({known.placement}), so {request} can't change all "
                "layers in the same way."
            )
        projection = known.projection if known.projection == branch.projection else ""
        weights = tuple(dict.fromkeys((*known.weights, *branch.weights)))
        found[key] = replace(known, weights=weights, projection=projection)
    return list(found.values())


def _require_everywhere(small: nn.Module, branches: list[Branch], layers: list[Branch], request: str) -> None:
    """Refuse stacks in which only some layers have these branches (as where some layers cut windows)."""
    found = {(branch.block, branch.outlet, branch.call) for branch in layers}
    for site in sites_of(small, branches):
        if (site.block_name, site.branch.outlet, site.branch.call) not in found:
            raise UnsupportedError(
                f"{site.block_name}: its {site.branch.outlet} isn't added to the residual stream as in other layers "
                f"of its stack, so {request} can't change all layers in the same way."
            )


def _depths(model: nn.Module, branches: list[Branch], layers: list[Branch]) -> dict[str, Depth]:
    sites = list(sites_of(model, branches))
    counts = Counter(site.branch.stack for site in sites)
    number = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    for stack in {branch.stack for branch in layers if branch.shared} & set(counts):
        if not isinstance(number, int):
            raise UnsupportedError(
                f"{stack} runs several times in one forward, and the config doesn't say how often (num_hidden_layers), "
                "so the depth of its stack isn't known."
            )
        blocks = len({site.block_name for site in sites if site.branch.stack == stack})
        counts[stack] = counts[stack] * number // blocks
    crossing = {branch.stack for branch in layers if branch.cross}
    read = sum(counts[stack] for stack in crossing)
    return {stack: Depth(count, 0 if stack in crossing else read) for stack, count in counts.items()}


def sites_of(model: nn.Module, branches: list[Branch]) -> Iterator[BranchSite]:
    """Return every block of the model with one of the branches, in module order."""
    names = Names.of(model)
    for name, block in model.named_modules():
        patterns = {pattern_of(form) for form in names.forms(name)}
        here = [branch for branch in branches if branch.stack in patterns]
        inside = {path for path, _ in block.named_modules(remove_duplicate=False) if path} if here else set()
        yield from (BranchSite(branch, name, block) for branch in here if {branch.norm, branch.outlet} <= inside)


def require_joinable(site: BranchSite) -> None:
    """Refuse branches whose output is changed before it is added to the stream, in ways that a join can't reproduce.

    Raises:
        UnsupportedError: something is multiplied, dropped or hidden on the way.
        WrappedModelError: a module carries a forward of its own.
    """
    branch = site.branch
    if branch.altered:
        raise UnsupportedError(
            f"{site.block_name}: the output of its {branch.outlet} is scaled, or its positions are permuted, before "
            "it is added to the residual stream, so no norm can be put after it."
        )
    if branch.dropout == "?":
        raise UnsupportedError(
            f"{site.block_name}: its {branch.outlet} is followed by a dropout whose rate isn't found, so no norm can "
            "be put after it."
        )
    for path in (branch.norm, branch.outlet, *branch.readers):
        parts = path.split(".")[:-1]
        for depth in range(len(parts) + 1):
            inner = ".".join(parts[:depth])
            require_own_forward(f"{site.block_name}.{inner}".strip("."), site.block.get_submodule(inner))


def require_own_forward(name: str, module: nn.Module) -> None:
    """Refuse modules that can't take a lens.

    Raises:
        UnsupportedError: a container.
        WrappedModelError: a forward of the instance's own.
    """
    refuse_private_forward(name, module)
    if isinstance(module, _CONTAINERS):
        raise UnsupportedError(
            f"{name} is a {module._get_name()} inside a residual branch, whose forward hfpatch can't run with "
            "other modules in it."
        )


def require_transparent(sites: Sites, branches: list[Branch], request: str) -> None:
    """Refuse blocks whose outputs change under joins with the present placement.

    Raises:
        UnsupportedError: they change, or fail, on the small model.
    """
    twin, inputs = sites.twin
    small = copy_of(twin)
    places = list(sites_of(small, branches))
    for site in places:
        require_joinable(site)
    with inference_state(small):
        before = outputs_of(small, inputs)
        with host_errors(
            f"{type(small).__name__}: the forward of its {type(places[0].block).__name__} fails on a stand-in for "
            f"the module ({{error}}), so {request} can't change its branches."
        ):
            apply(condense([site.join(site.branch.placement) for site in places], small), small)
            same = max_error(before, outputs_of(small, inputs)) <= _TOLERANCE
    if not same:
        raise UnsupportedError(
            f"{type(small).__name__}: its blocks give other outputs when run with the branches that were found "
            f"in them, so {request} can't change them. Please report this model."
        )
