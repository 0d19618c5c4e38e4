"""Where a model's MLPs are, found by running their modules rather than by names.

An MLP is a linear projection d -> d_ff, an activation that takes its output and nothing else, and a projection d_ff ->
d that takes the activation's. Hosts hold the three in one module (GPT-2, ViT), in a whole layer (OPT, BART) or in two
(BERT). A twin of the module on the meta device, without memory or values, is run to see which tensor goes where.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType

from torch import nn
from transformers import PreTrainedModel

from ..runtime.gated import GatedActivation, GatedLinear, projection_sizes
from ..schemes.mlps import Activation
from .mlp_flow import Reading, is_activation, is_projection, runs, same_everywhere

Place = tuple[nn.Module, str]  # a module and the name of one of its attributes

_MIXTURE = re.compile(r"(Experts?|MoE|Moe|SparseMLP)(Layer|Block|FeedForward)?$")  # names of classes
_FUNCTIONS = ("torch", "transformers.activations")


@dataclass
class MLPSite:
    """One MLP: last(act(first(x))).

    Attributes:
        name: the first projection's name in the model.
        owner: the name of the module that holds the activation, or a gated one's projections.
        sizes: (d, d_ff).
        first, activation, last: where each of the three stands; a gated one's activation and last aren't looked for.
        direct: whether the last projection was seen to take what the activation gave, rather than is the only one that
            could.
        kind: the registered name of the hfpatch scheme in place, None where there is none.
        reason: why it can't be replaced, None where it can.
    """

    name: str
    owner: str
    sizes: tuple[int, int]
    first: Place
    activation: Place | None = None
    last: Place | None = None
    direct: bool = True
    kind: str | None = None
    reason: str | None = None

    @property
    def act(self) -> Activation:
        """The activation that stands there."""
        assert self.activation is not None
        return getattr(*self.activation)


def find_mlps(model: nn.Module) -> list[MLPSite]:
    """Every MLP of a model, those that can't be replaced with the reason. The model isn't changed."""
    modules = dict(model.named_modules())
    names = {id(module): name for name, module in modules.items()}
    shared = _shared(model)
    found: dict[tuple[int, str], MLPSite] = {}
    with same_everywhere():
        for name, module in modules.items():
            sites = [_site(name, attribute, modules, names) for attribute in _activations(module)]
            if isinstance(module, GatedLinear):
                sites = [_gated_site(name, module, modules)]
            for site in filter(None, sites):
                ends = [getattr(*place) for place in (site.first, site.last) if place is not None]
                parted = next((shared[id(end)] for end in ends if id(end) in shared), None)
                site.reason = site.reason or _mixture(site.name, modules) or parted
                found.setdefault((id(site.first[0]), site.first[1]), site)
    return list(found.values())


def mixtures(model: nn.Module) -> Iterator[str]:
    """Names of modules that hold routed experts as stacked Parameters."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        routed = "Expert" in kind or _MIXTURE.search(kind)
        if routed and any(p.dim() == 3 for p in module.parameters(recurse=False)):
            yield name


def _mixture(name: str, modules: dict[str, nn.Module]) -> str | None:
    pieces = name.split(".")
    above = (modules[".".join(pieces[:depth])] for depth in range(1, len(pieces)))
    if any(_MIXTURE.search(type(module).__name__) for module in above):
        return "expert of a mixture, which routes between MLPs"
    return None


def _shared(model: nn.Module) -> dict[int, str]:
    """Projections whose Parameters other modules hold too: new ones would part them."""
    holders: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), set()).add(id(module))
    return {
        id(module): "its weights are shared with another module"
        for module in model.modules()
        if is_projection(module) and any(len(holders[id(p)]) > 1 for p in module.parameters(recurse=False))
    }


def _activations(owner: nn.Module) -> Iterator[str]:
    """Attributes of a module that are activations: elementwise, without Parameters, not the identity."""
    if isinstance(owner, GatedActivation):
        return
    for name, child in owner._modules.items():
        bare = child is not None and not (child._modules or child._parameters or child._buffers)
        if child is not None and bare and is_activation(child):
            yield name
    for name, value in owner.__dict__.items():
        known = isinstance(value, FunctionType | BuiltinFunctionType) and str(value.__module__).startswith(_FUNCTIONS)
        if known and is_activation(value):  # calling any function might do anything
            yield name


def _site(name: str, attribute: str, modules: dict[str, nn.Module], names: dict[int, str]) -> MLPSite | None:
    """The MLP that this activation belongs to; looked for in its owner, then in the module around it."""
    owner = modules[name]
    around = modules[name.rpartition(".")[0]] if name else owner
    if not any(is_projection(module) for module in owner.modules()):
        return None
    first: nn.Module | None = None
    for root in dict.fromkeys((owner, around)):
        for run in runs(root, owner, attribute):
            flow = run(None)
            reading = flow.read()
            if reading is not None and reading.reason is None and not run(reading.first).paired:
                reading.reason = "something else happens between its projection and its activation"
            if reading is not None and (reading.last is not None or reading.reason):
                return _found(reading, name, attribute, modules, names)
            if reading is not None:
                first = reading.first
            if flow.whole:
                break
    if first is None or isinstance(around, PreTrainedModel) or projection_sizes(first)[0] > projection_sizes(first)[1]:
        return None
    back = [m for m in around.modules() if is_projection(m) and projection_sizes(m) == projection_sizes(first)[::-1]]
    if len(back) != 1 or back[0] is first:  # nothing else there could take what the activation gives
        return None
    site = _found(Reading(first, back[0]), name, attribute, modules, names)
    site.direct = False
    return site


def _found(
    reading: Reading, name: str, attribute: str, modules: dict[str, nn.Module], names: dict[int, str]
) -> MLPSite:
    return MLPSite(
        names[id(reading.first)],
        name,
        projection_sizes(reading.first),
        _place(names[id(reading.first)], modules),
        (modules[name], attribute),
        None if reading.last is None else _place(names[id(reading.last)], modules),
        reason=reading.reason,
    )


def _gated_site(name: str, module: GatedLinear, modules: dict[str, nn.Module]) -> MLPSite:
    sizes, owner = projection_sizes(module.gate), name.rpartition(".")[0]
    return MLPSite(name, owner, sizes, _place(name, modules), kind=module.kind, reason=f"is {module.kind} already")


def _place(name: str, modules: dict[str, nn.Module]) -> Place:
    parent, _, attribute = name.rpartition(".")
    return modules[parent], attribute
