"""Finds a model's MLPs by running their modules, not by names.

An MLP is a linear projection d -> d_ff, an activation that takes its output and nothing else, and a projection d_ff ->
d that takes the activation's. Hosts hold the three in one module (GPT-2, ViT), in a whole layer (OPT, BART) or in two
(BERT). The modules of a copy of the model on the meta device, without memory or values, are run one by one to see which
tensor goes where: a projection and an activation belong together if the activation takes what the projection returned,
itself and not something computed from it. No forward of the model is run: that of a model of text and images wouldn't
reach the MLPs of its vision tower.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..measure.copies import copy_of
from ..measure.float64_forward import host_errors
from ..measure.quiet_forward import inference_state
from ..runtime.gated import GatedActivation, GatedLinear, projection_sizes
from ..schemes.mlp_schemes import Activation, apply_activation
from .linear_maps import required_arguments

_MIXTURE = re.compile(r"(Experts?|MoE|Moe|SparseMLP)(Layer|Block|FeedForward)?$")  # names of classes
_FUNCTIONS = ("torch", "transformers.activations")
_GRID = torch.linspace(-3.0, 3.0, 24, dtype=torch.float64, device="cpu").reshape(2, 3, 4)


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
        kind: the registered name of the hfpatch scheme in place; None if there is none.
        reason: why it can't be replaced; None if it can.
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
    """Return every MLP of a model, those that can't be replaced with the reason. The model isn't changed.

    Raises:
        UnsupportedError: something in the model can't be copied.
    """
    found: dict[str, MLPSite] = {}
    with host_errors(f"{type(model).__name__}: it can't be copied ({{error}}), so its MLPs can't be found."):
        copied = copy_of(model, dtype=torch.float32, device="meta")
    modules = dict(copied.named_modules())
    names = {id(module): name for name, module in modules.items()}
    shared = _shared_projections(copied)
    for module in modules.values():
        for name in ("forward", "_hf_hook"):  # a library's own
            module.__dict__.pop(name, None)
    with inference_state(copied), _default_dtype(torch.float32):
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
        site.act = getattr(model.get_submodule(site.owner), site.attribute) if site.attribute else None
        parted = "its weights are shared with another module" if shared & {site.name, site.last} else None
        site.reason = site.reason or _mixture(site.name, modules) or parted
    return list(found.values())


def mixtures(model: nn.Module) -> Iterator[str]:
    """Yield names of modules that hold routed experts as stacked Parameters."""
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


def _shared_projections(model: nn.Module) -> set[str]:
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
        if known and is_activation(value):  # an unknown function might do anything when called
            yield name


def _site(name: str, attribute: str, modules: dict[str, nn.Module], names: dict[int, str]) -> MLPSite | None:
    """The MLP that this activation belongs to; looked for in its owner, then in the module around it."""
    owner = modules[name]
    around = modules[name.rpartition(".")[0]] if name else owner
    if not any(is_projection(module) for module in owner.modules()):
        return None
    first: nn.Module | None = None
    for root in dict.fromkeys((owner, around)):
        if isinstance(root, nn.ModuleList | nn.ModuleDict):  # which can't be run
            continue
        for run in runs(root, owner, attribute):
            flow = run(None)
            reading = flow.read()
            if reading is not None and reading.reason is None and not run(reading.first).paired:
                reading.reason = "its activation doesn't read its projection's output directly"
            if reading is not None and (reading.last is not None or reading.reason):
                return _mlp_site(reading, name, attribute, names)
            if reading is not None:
                first = reading.first
            if flow.whole:
                break
    if first is None or isinstance(around, PreTrainedModel) or projection_sizes(first)[0] > projection_sizes(first)[1]:
        return None
    back = [m for m in around.modules() if is_projection(m) and projection_sizes(m) == projection_sizes(first)[::-1]]
    if len(back) != 1 or back[0] is first:  # nothing else there could take what the activation gives
        return None
    site = _mlp_site(MLPParts(first, back[0]), name, attribute, names)
    site.direct = False
    return site


def _mlp_site(parts: MLPParts, name: str, attribute: str, names: dict[int, str]) -> MLPSite:
    last = None if parts.last is None else names[id(parts.last)]
    sizes = projection_sizes(parts.first)
    return MLPSite(names[id(parts.first)], name, sizes, attribute=attribute, last=last, reason=parts.reason)


# --- a run of a module ------------------------------------------------------------------------------------------------


def is_projection(module: object) -> bool:
    """Return whether a module is a Linear or a transposed Conv1D."""
    return isinstance(module, nn.Linear | Conv1D)


def is_activation(function: Activation) -> bool:
    """Return whether each output depends on its own input alone, and isn't equal to it."""
    if isinstance(function, nn.Identity | nn.modules.dropout._DropoutNd):
        return False
    try:
        y, flat = apply_activation(function, _GRID), apply_activation(function, _GRID.flatten().flip(0))
    except Exception:  # wants other arguments: no activation
        return False
    same_form = isinstance(y, Tensor) and isinstance(flat, Tensor) and y.shape == _GRID.shape
    return same_form and torch.allclose(y.flatten(), flat.flip(0), rtol=1e-9) and not torch.equal(y, _GRID)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Context with a default dtype, whatever is set while a model loads."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@dataclass
class MLPParts:
    """Projections before and after an activation, and the reason if the MLP can't be changed."""

    first: nn.Module
    last: nn.Module | None = None
    reason: str | None = None


@dataclass
class Flow:
    """Record of one run: inputs and outputs of projections and of one activation."""

    projections: list[tuple[nn.Module, Tensor, Tensor]] = field(default_factory=list)
    activations: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    whole: bool = False  # the run came to its end
    paired: bool = False  # the activation took a pair

    def read(self) -> MLPParts | None:
        """Return None if the activation isn't an MLP's."""
        if len(self.activations) != 1:
            return None
        act_input, act_output = self.activations[0]
        sources = [call for call in self.projections if call[2] is act_input]
        if len(sources) != 1:
            return self._read_fused(act_input)
        first, x, _ = sources[0]
        d, d_ff = projection_sizes(first)
        if [module for module, _, _ in self.projections].count(first) != 1:
            return None
        for module, entering, _ in self.projections:
            if _same_memory(entering, act_output) and projection_sizes(module) == (d_ff, d):
                return MLPParts(first, module)
        siblings = [m for m, entering, _ in self.projections if entering is x and m is not first]
        if any(projection_sizes(m) == (d, d_ff) for m in siblings):
            return MLPParts(first, reason="is gated already") if self._returns(d_ff, d) else None
        return MLPParts(first)

    def _read_fused(self, act_input: Tensor) -> MLPParts | None:
        for module, _, output in self.projections:
            d, width = projection_sizes(module)
            half = width // 2
            if _same_memory(output, act_input) and act_input.shape[-1] == half and self._returns(half, d):
                return MLPParts(module, reason="is gated already")
        return None

    def _returns(self, d_ff: int, d: int) -> bool:
        return any(projection_sizes(module) == (d_ff, d) for module, _, _ in self.projections)


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether one is the other or a view of it."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def runs(root: nn.Module, owner: nn.Module, attribute: str) -> Iterator[Callable[[nn.Module | None], Flow]]:
    """Runs of `root`, with other inputs and with less and less of what surrounds the MLP.

    Each takes the projection that is to give a pair, as it will once it is gated, or None.
    """
    required = required_arguments(root)
    widths = dict.fromkeys(projection_sizes(module)[0] for module in owner.modules() if is_projection(module))
    for width, stubs in itertools.product(widths, range(3)):
        for shape in ((1, 3, width), (1, width, 4, 4), (1, 4, 4, width), (3, width)):
            x = torch.empty(shape, device="meta")
            for filler in (None, x) if required else (None,):
                yield partial(_run, root, owner, attribute, x, dict.fromkeys(required, filler), stubs)


def _run(
    root: nn.Module,
    owner: nn.Module,
    attribute: str,
    x: Tensor,
    arguments: dict[str, Any],
    stubs: int,
    pair: nn.Module | None,
) -> Flow:
    flow, function = Flow(), getattr(owner, attribute)

    def record(module: nn.Module, args: tuple, output: Any) -> Any:
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            flow.projections.append((module, args[0], output))
        return (output, output) if module is pair else None

    def record_activation(x: Any) -> Tensor:
        flow.paired = isinstance(x, tuple)
        x = x[0] if flow.paired else x
        y = function(x)
        flow.activations.append((x, y))
        return y

    with ExitStack() as changes:
        for module in root.modules():
            if is_projection(module):
                changes.enter_context(module.register_forward_hook(record))
        children = {name: child for name, child in owner._modules.items() if name != attribute}
        changes.enter_context(_attributes(owner, {"_modules": children, attribute: record_activation}))
        if stubs:
            changes.enter_context(_attributes(root, {"_modules": _stub_children(root, owner, stubs, flow)}))
        try:
            type(root).forward(root, x, **arguments)
            flow.whole = True
        except Exception:  # it wants other arguments; what was seen until then counts
            pass
    return flow


@contextmanager
def _attributes(module: nn.Module, values: dict[str, Any]) -> Iterator[None]:
    """Context in which a module has other attributes."""
    before = dict(vars(module))
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).clear()
        vars(module).update(before)


class _Stub(nn.Module):
    """Stand-in for a module: returns its input, followed by as many Nones as the caller unpacks."""

    def __init__(self, returns: int, flow: Flow):
        super().__init__()
        self.returns, self.flow = returns, flow

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        if any(_same_memory(output, x) for _, _, output in self.flow.projections):
            raise RuntimeError("this module reads a projection's output, so it can't be stubbed")
        return x if self.returns == 1 else (x, *(None,) * (self.returns - 1))


def _stub_children(root: nn.Module, owner: nn.Module, returns: int, flow: Flow) -> dict[str, nn.Module | None]:
    """A module's children with stubs in place of modules before the MLP, such as attentions."""
    children = dict(root._modules)
    for name, child in root._modules.items():
        if child is not None and any(module is owner for module in child.modules()):
            break
        if child is not None and child._modules:
            children[name] = _Stub(returns, flow)
    return children
