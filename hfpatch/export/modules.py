"""Reads and fills the norms, linear layers and embeddings of a model by the paths of their roles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..runtime.errors import UnsupportedError
from ..runtime.gated import GatedLinear
from ..runtime.norms import NormFacts
from ..sites.norms import describe
from .anatomy import CLOSE, Affine, NormValues, Parts
from .layouts import OUTPUT, Layout

_UNREAD = ("contacts",)  # parts of a head that no forward reads
_OPTIONAL = ("pooler", "contacts")  # parts of a head that are zero where there is nothing for them

Find = Callable[[str], Any]  # the module at a path, None where there is none


class Access:
    """Reads or fills parts of one model, and remembers which Parameters it has touched.

    Args:
        model: a transformers model; what is read has its dtype.
        gains: factors on the outputs of linear layers that are read, by the layer's id.
    """

    def __init__(self, model: Any, gains: Mapping[int, float] | None = None):
        self.model, self.gains = model, gains or {}
        self.touched: set[int] = set()  # by address, as a transposed weight is a view

    def untouched(self, layout: Layout) -> list[str]:
        """Names of the Parameters that are left, apart from a table that the model's class computes."""
        computed = self.model.base_model.get_submodule(layout.computed).parameters() if layout.computed else ()
        done = self.touched | {value.data_ptr() for value in computed}
        return [name for name, value in self.model.named_parameters() if value.data_ptr() not in done]

    def value(self, stored: Tensor) -> Tensor:
        self.touched.add(stored.data_ptr())
        return stored.detach().to(self.model.dtype)

    def fill(self, stored: Tensor, values: Tensor | None, where: str) -> None:
        """Copy values, or zeros.

        Raises:
            UnsupportedError: they have another shape.
        """
        values = torch.zeros_like(stored) if values is None else values
        if stored.shape != values.shape:
            raise UnsupportedError(f"its {where} is {tuple(stored.shape)}, and here {tuple(values.shape)}")
        self.touched.add(stored.data_ptr())
        stored.copy_(values)

    def read(self, find: Find, paths: Mapping[str, str], where: str = "") -> Parts:
        """What stands at these paths, by role; what isn't there is left out.

        Raises:
            UnsupportedError: a norm is neither LayerNorm nor RMSNorm.
        """
        parts = Parts()
        for role, path in paths.items():
            module = find(path)
            if isinstance(module, GatedLinear):
                parts.layers |= {role: self._layer(module.up), "gate": self._layer(module.gate)}
            elif module is not None and role.endswith("norm"):
                parts.norms[role] = self._norm(module, where + path)
            elif module is not None:
                parts.layers[role] = self._layer(module)
        return parts

    def write(self, find: Find, paths: Mapping[str, str], parts: Parts) -> None:
        """Fill what stands at these paths.

        Raises:
            UnsupportedError: a part has no place there, or a place no part.
        """
        for role in dict.fromkeys((*parts.norms, *parts.layers, *paths)):
            part, path = parts.get(role), paths.get(role, "")
            module = find(path) if path else None
            if module is None and part is not None and role not in _UNREAD:
                raise UnsupportedError(f"it has no place for the {role}")
            if module is not None and part is None and role not in _OPTIONAL:
                raise UnsupportedError(f"it has a {role}, and here is none")
            if module is not None:
                self._write(module, part, path)

    def _write(self, module: nn.Module, part: NormValues | Affine | None, path: str) -> None:
        facts = _facts(module, path) if isinstance(part, NormValues) else None
        if isinstance(part, NormValues) and facts and abs((facts.eps or part.eps) - part.eps) > CLOSE:
            raise UnsupportedError(f"its {path} has an eps of {facts.eps:g}, and here {part.eps:g}")
        for name, stored in _stored(module, facts).items():
            values = getattr(part, name, None)
            if values is not None and facts is not None and name == "gain":
                values = values - facts.offset
            if stored is not None:
                self.fill(stored, values, path)
            elif values is not None and bool((values != float(name == "gain")).any()):
                raise UnsupportedError(f"its {path} has no {name}")

    def _layer(self, module: nn.Module) -> Affine:
        layer = Affine(**self._read(_stored(module)))
        return layer.times(self.gains[id(module)]) if id(module) in self.gains else layer

    def _norm(self, module: nn.Module, path: str) -> NormValues:
        facts = _facts(module, path)
        values = self._read(_stored(module, facts))
        gain = torch.ones(facts.shape[:1] or 0, dtype=self.model.dtype, device=self.model.device)
        values["gain"] = values["gain"] + facts.offset if "gain" in values else gain
        eps = torch.finfo(self.model.dtype).eps if facts.eps is None else facts.eps
        return NormValues(facts.kind, eps, **values)

    def _read(self, stored: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        return {name: self.value(one) for name, one in stored.items() if one is not None}


def _facts(module: nn.Module, path: str) -> NormFacts:
    facts = describe(module)
    if facts is None or facts.kind not in ("layer", "rms"):
        kind = facts.kind if facts is not None else module._get_name()
        raise UnsupportedError(f"{path} computes {kind!r}, which no architecture of transformers has")
    return facts


def _stored(module: Any, facts: NormFacts | None = None) -> dict[str, Tensor | None]:
    """A layer's weight (out, in) and bias, or a norm's gain and shift: Parameters, or views of them."""
    if facts is not None:
        gain, shift = facts.parameters_of(module)
        return {"gain": gain, "shift": shift}
    transposed = isinstance(module, nn.Embedding) or "Conv1D" in type(module).__name__
    return {"weight": module.weight.T if transposed else module.weight, "bias": getattr(module, "bias", None)}


def found(module: Any, path: str) -> Any:
    """What stands at a path or at the first of several that is there, None where nothing does."""
    for one in path.split(" | "):
        inner = module
        for name in one.split("."):
            inner = getattr(inner, name, None)
        if inner is not None:
            return inner
    return None


def found_in_head(model: Any, path: str) -> Any:
    """A part of a head, in the model or in its base; None where it has none."""
    if path == OUTPUT:
        output = model.get_output_embeddings()
        return found(model, "lm_head.decoder") if output is None else output
    inside = found(model, path)
    return found(model.base_model, path) if inside is None else inside


def body_of(model: Any, layout: Layout) -> Any:
    """The module that holds the stack."""
    return model.base_model.get_submodule(layout.paths.get("body", ""))
