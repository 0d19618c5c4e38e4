"""Finds a model's MLPs by running their modules rather than by names.

An MLP is a linear projection d -> d_ff, an activation that takes its output and nothing else, and a projection d_ff ->
d that takes the activation's. Hosts hold the three in one module (GPT-2, ViT), in a whole layer (OPT, BART) or in two
(BERT). A twin of the module on the meta device, without memory or values, is run to see which tensor goes where.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType

from torch import nn
from transformers import PreTrainedModel

from ..runtime.gated import GatedActivation, GatedLinear, projection_sizes
from ..schemes.mlps import Activation
from .mlp_flow import MLPParts, is_activation, is_projection, on_meta_in_float32, runs

_MIXTURE = re.compile(r"(Experts?|MoE|Moe|SparseMLP)(Layer|Block|FeedForward)?$")  # names of classes
_FUNCTIONS = ("torch", "transformers.activations")


@dataclass
class MLPSite:
    """One MLP: last(act(first(x))).

    Attributes:
        name: the first projection's name in the model.
        owner: the name of the module that holds the activation, or a gated one's projections.
        sizes: (d, d_ff).
        act, attribute: the activation and what its owner calls it; a gated one's isn't looked for.
        last: the last projection's name; a gated one's isn't looked for.
        direct: whether the last projection was seen to take what the activation gave, rather than is the only one that
            could.
        kind: the registered name of the hfpatch scheme in place, None where there is none.
        reason: why it can't be replaced, None where it can.
    """

    name: str
    owner: str
    sizes: tuple[int, int]
    act: Activation | None = None
    attribute: str = ""
    last: str | None = None
    direct: bool = True
    kind: str | None = None
    reason: str | None = None

    @property
    def activation(self) -> str:
        """The activation's name in the model."""
        return f"{self.owner}.{self.attribute}".strip(".")


def find_mlps(model: nn.Module) -> list[MLPSite]:
    """Every MLP of a model, those that can't be replaced with the reason. The model isn't changed."""
    modules = dict(model.named_modules())
    names = {id(module): name for name, module in modules.items()}
    shared = _shared(model)
    found: dict[str, MLPSite] = {}
    with on_meta_in_float32():
        for name, module in modules.items():
            if isinstance(module, GatedLinear):
                sizes, kind = projection_sizes(module.gate), module.kind
                owner = name.rpartition(".")[0]
                found.setdefault(name, MLPSite(name, owner, sizes, kind=kind, reason=f"is {kind} already"))
            for attribute in _activations(module):
                site = _site(name, attribute, modules, names)
                if site is not None:
                    found.setdefault(site.name, site)
    for site in found.values():
        parted = "its weights are shared with another module" if shared & {site.name, site.last} else None
        site.reason = site.reason or _mixture(site.name, modules) or parted
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


def _shared(model: nn.Module) -> set[str]:
    """Projections whose Parameters other modules hold too: new ones would part them."""
    holders = Counter(id(p) for module in model.modules() for p in set(module.parameters(recurse=False)))
    projections = ((name, module) for name, module in model.named_modules() if is_projection(module))
    return {name for name, one in projections if any(holders[id(p)] > 1 for p in one.parameters(recurse=False))}


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
                reading.reason = "its activation doesn't read its projection's output directly"
            if reading is not None and (reading.last is not None or reading.reason):
                return _mlp_site(reading, name, attribute, modules, names)
            if reading is not None:
                first = reading.first
            if flow.whole:
                break
    if first is None or isinstance(around, PreTrainedModel) or projection_sizes(first)[0] > projection_sizes(first)[1]:
        return None
    back = [m for m in around.modules() if is_projection(m) and projection_sizes(m) == projection_sizes(first)[::-1]]
    if len(back) != 1 or back[0] is first:  # nothing else there could take what the activation gives
        return None
    site = _mlp_site(MLPParts(first, back[0]), name, attribute, modules, names)
    site.direct = False
    return site


def _mlp_site(
    reading: MLPParts, name: str, attribute: str, modules: dict[str, nn.Module], names: dict[int, str]
) -> MLPSite:
    act = getattr(modules[name], attribute)
    last = None if reading.last is None else names[id(reading.last)]
    sizes = projection_sizes(reading.first)
    return MLPSite(names[id(reading.first)], name, sizes, act, attribute, last, reason=reading.reason)
