"""A patch that comes by degrees: at t = 0 a model is the original function, at t = 1 the patched one.

With t between the two,

* a norm that was replaced computes (1 - t) old(x) + t new(x), the old one frozen, the new one trained;
* queries and keys turn by t m theta (ALiBi's bias: times t), a table of positions is (1 - t) table + t constant;
* a gated MLP computes (1 - t) act(x W1) + t act'(x W) * (x V), where W is k W1 at first and both are trained as one;
* weights that the patch changed (a repair, an exact conversion) are at old + t (new - old), and training adds to that.

Every layer has a t of its own. What is trained is a model apart; `finished` copies its values into the patched model,
which never knew of it.
"""

import copy
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from data import RecipeError
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from hfpatch.errors import NothingToPatchError, NotPreservedWarning
from hfpatch.patch import patch_model
from hfpatch.schemes.mlps import MLP

EXACT = 1e-4  # of the outputs' largest: rounding, where weights were scaled or centred
_LAYER = re.compile(r"(.*?\.\d+)(?:\.|$)")


@dataclass
class Share:
    """How much of the new there is, 0 to 1: the t of one layer."""

    t: float = 0.0


class Blend:
    """A model between an original and its patched copy.

    Args:
        original: the unpatched model; it stays as it is.
        patched: its patched copy as it is to begin, repaired or not; in the end it gets the trained values.
        request: the arguments of `patch_model` that it was patched with, `init` included.

    Attributes:
        model: what is trained.
        layers: names of what changes together, in the model's order: its layers, each with what stands between it and
            the next one; what comes before the first goes with the first.

    Raises:
        RecipeError: this patch can't come by degrees; says which module.
    """

    def __init__(self, original: PreTrainedModel, patched: PreTrainedModel, request: dict[str, Any]) -> None:
        self.original, self.patched, self.request = original, patched, request
        self._constants = self._removed_tables()
        self.model = self._structure()
        self._layer_of = self._layers()
        self._shares: dict[str, Share] = {}
        self._positions = Share()  # of the tables, which all layers read
        self._turning: set[str] = set()
        self._moves: dict[str, list[tuple[nn.Parameter, Tensor]]] = {}
        replaced, gates = self._hook_modules()
        self._set_weights(replaced, gates)
        self._fade_tables()
        for layer in self._moves:
            self._share(layer)
        self.layers = [layer for layer in dict.fromkeys(self._layer_of.values()) if layer in self._shares]
        if not self.layers:
            raise RecipeError("this patch can't come by degrees: nothing that it changes has a share of old and new")
        self.move(dict.fromkeys(self.layers, 0.0))

    def move(self, shares: dict[str, float], before: dict[str, float] | None = None) -> None:
        """Bring every layer to its t; `before` are those at which its weights stand (None: they stay where they are).

        A table of positions stands at the mean t of the layers that turn: each of them needs it less.
        """
        for layer, share in self._shares.items():
            share.t = shares[layer]
            step = 0.0 if before is None else shares[layer] - before[layer]
            if step:
                with torch.no_grad():
                    for parameter, change in self._moves.get(layer, ()):
                        parameter.add_(change.to(parameter.device), alpha=step)
        turning = [shares[layer] for layer in self._turning or self.layers]
        self._positions.t = sum(turning) / len(turning)

    def finished(self) -> PreTrainedModel:
        """The patched model with the values that were trained."""
        trained = dict(self.model.named_parameters())
        tables = {constant: table for table, constant in self._constants.items()}
        with torch.no_grad():
            for name, parameter in self.patched.named_parameters():
                parameter.copy_(trained[_faded(tables[name], self.model) if name in tables else name])
            seen = dict(self.model.named_buffers())
            for name, buffer in self.patched.named_buffers():  # running statistics, of norms that keep them
                buffer.copy_(seen[name])
        return self.patched.to(self.model.device)

    def require_ends(self, inputs: dict[str, Any]) -> None:
        """Compare with the original and, all of the way, with the patched model; before any training.

        Raises:
            RecipeError: one of the two isn't the same function on these inputs.
        """
        none, whole = dict.fromkeys(self.layers, 0.0), dict.fromkeys(self.layers, 1.0)
        first = difference(self.model, self.original, inputs)
        begun = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.move(whole, before=none)
        last = difference(self.model, self.patched, inputs)
        self.move(none)
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), begun, strict=True):
                parameter.copy_(value)
        ends = {"with nothing of it the outputs are not the original's": first, "in the end they are not its own": last}
        for end, error in ends.items():
            if not error <= EXACT:
                raise RecipeError(f"this patch can't come by degrees: {end} (off by {error:.1e} of the largest)")

    # -- how it is put together

    def _removed_tables(self) -> dict[str, str]:
        """Tables of positions that are gone: the name of each, and of the constant in its place."""
        present = {name: p.shape for name, p in self.patched.named_parameters()}
        tables = {}
        for name, parameter in self.original.named_parameters():
            table = name.removesuffix(".weight")
            if f"{table}.constant" in present:
                tables[table] = f"{table}.constant"
            elif present.get(name, parameter.shape) != parameter.shape:
                tables[name] = name
        return tables

    def _structure(self) -> PreTrainedModel:
        """Patched, but for the tables, which hosts go on reading in their own way; its values don't count yet."""
        if not self._constants:
            return copy.deepcopy(self.patched)
        model = copy.deepcopy(self.original)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotPreservedWarning)
            try:
                return patch_model(model, **self.request, keep=list(self._constants))
            except NothingToPatchError:  # there is no more to this position scheme than that the table goes
                others = {name: value for name, value in self.request.items() if name != "pos"}
                return patch_model(model, **others) if {"norm", "mlp"} & set(others) else model

    def _layers(self) -> dict[str, str]:
        """The layer of every module by name."""
        names = [name for name, _ in self.model.named_modules()]
        present, layer_of = next((match[1] for name in names if (match := _LAYER.match(name))), ""), {}
        for name in names:
            match = _LAYER.match(name)
            present = layer_of[name] = match[1] if match else present
        return layer_of

    def _share(self, layer: str) -> Share:
        return self._shares.setdefault(layer, Share())

    def _hook_modules(self) -> tuple[set[str], dict[str, float]]:
        """Hooks on what was exchanged or put in.

        Returns:
            Names of the modules whose parameters are not the original's, and k of every gated projection.
        """
        originals, changed = dict(self.original.named_modules()), []
        for name, module in self.model.named_modules():
            old, inside = originals.get(name), any(name.startswith(f"{other}.") for other, _, _ in changed)
            if not inside and (old is None or type(old).__name__ != type(module).__name__):
                changed.append((name, module, old))
        gates = [name for name, module, _ in changed if hasattr(module, "gate") and hasattr(module, "up")]
        activations = [module for _, module, _ in changed if hasattr(module, "act") and hasattr(module, "replaced")]
        if len(gates) != len(activations):
            raise RecipeError(f"{gates[0]} can't come by degrees: the activation behind it is no module")
        scales = [MLP.resolve(self.request["mlp"]).start(module.replaced).scale for module in activations]
        replaced = set()
        for name, module, old in changed:
            layer = self._layer_of[name]
            share = self._share(layer)
            if module in activations:
                scale = scales[activations.index(module)]
                module.register_forward_hook(FadeGate(module.replaced, scale, share))
            elif old is not None and name not in gates:
                module.register_forward_hook(Fade(copy.deepcopy(old), share), with_kwargs=True)
                replaced.add(name)
            elif old is None:
                rotates = hasattr(module, "rotate")
                module.register_forward_pre_hook(Turn(share)) if rotates else module.register_forward_hook(Rise(share))
                self._turning.add(layer)
        if self._constants and not self._shares:
            for layer in self._layer_of.values():
                self._share(layer)
        return replaced, dict(zip(gates, scales, strict=True))

    def _set_weights(self, replaced: set[str], gates: dict[str, float]) -> None:
        """The original's values wherever there are any, and how far each is from the patched model's."""
        old, new = dict(self.original.named_parameters()), dict(self.patched.named_parameters())
        for name, parameter in self.model.named_parameters():
            module = name.rpartition(".")[0]
            plain, scale = name, 1.0
            if module.removesuffix(".gate") in gates:
                plain, scale = name.replace(".gate.", "."), gates[module.removesuffix(".gate")]
            begin = old.get(plain) if module not in replaced else None
            end = new.get(name)
            if begin is None and end is None:
                raise RecipeError(f"{name} can't come by degrees: neither model has it")
            with torch.no_grad():
                parameter.copy_(end if begin is None else scale * begin)
                if begin is not None and end is not None and end.shape == begin.shape and not end.equal(parameter):
                    layer = self._layer_of[module]
                    self._moves.setdefault(layer, []).append((parameter, end - parameter))

    def _fade_tables(self) -> None:
        constants = dict(self.patched.named_parameters())
        for table, constant in self._constants.items():
            owner, name = _place(table, self.model)
            faded = FadedTable(getattr(owner, name), constants[constant], self._positions)
            parametrize.register_parametrization(owner, name, faded, unsafe=True)


class Fade:
    """Forward hook: (1 - t) old(x) + t new(x)."""

    def __init__(self, old: nn.Module, share: Share) -> None:
        self.old, self.share = old.requires_grad_(False), share

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Tensor) -> Tensor:
        t, x = self.share.t, args[0] if args else next(iter(kwargs.values()))
        return (1 - t) * self.old.to(output.device)(x) + t * output


class FadeGate:
    """Forward hook of a gated activation, whose pair (x W, x V) gives the plain MLP's x W1 = x W / k as well."""

    def __init__(self, replaced: Callable[[Tensor], Tensor], k: float, share: Share) -> None:
        self.replaced, self.k, self.share = replaced, k, share

    def __call__(self, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        t, gate = self.share.t, args[0][0]
        return (1 - t) * self.replaced(gate / self.k) + t * output


class Turn:
    """Forward pre-hook of a rotation: angles t m theta."""

    def __init__(self, share: Share) -> None:
        self.share = share

    def __call__(self, module: nn.Module, args: tuple) -> tuple:
        return (args[0] * self.share.t, *args[1:])


class Rise:
    """Forward hook of what is added to scores: t times its output."""

    def __init__(self, share: Share) -> None:
        self.share = share

    def __call__(self, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        return self.share.t * output


class FadedTable(nn.Module):
    """A table of positions as a function of the constant that takes its place: (1 - t) table + t constant."""

    def __init__(self, table: Tensor, constant: Tensor, share: Share) -> None:
        super().__init__()
        self.register_buffer("table", table.detach().clone(), persistent=False)
        self.constant, self.share = constant.detach().clone(), share

    def forward(self, constant: Tensor) -> Tensor:
        return (1 - self.share.t) * self.table + self.share.t * constant

    def right_inverse(self, table: Tensor) -> Tensor:
        return self.constant


@torch.no_grad()
def difference(model: nn.Module, original: nn.Module, inputs: dict[str, Any]) -> float:
    """The largest difference of two models' outputs in eval mode, relative to the original's largest output."""
    was = model.training, original.training
    a, b = (m.eval()(**inputs)[0] for m in (model, original))
    model.train(was[0])
    original.train(was[1])
    return float((a - b).abs().max() / b.abs().max())


def _place(table: str, model: nn.Module) -> tuple[nn.Module, str]:
    """The module and the attribute that hold a table: a module's weight, or a Parameter."""
    modules = dict(model.named_modules())
    if table in modules:
        return modules[table], "weight"
    owner, _, name = table.rpartition(".")
    return modules[owner], name


def _faded(table: str, model: nn.Module) -> str:
    """The name of the constant that a faded table is a function of."""
    is_module = table in dict(model.named_modules())
    owner, name = (table, "weight") if is_module else table.rpartition(".")[::2]
    return f"{owner}.parametrizations.{name}.original"
