"""Reads and fills the norms, linear layers and embeddings of a model by the paths of their roles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..runtime.fixed import FixedNorm, NoNorm
from ..runtime.gated import GatedLinear
from ..runtime.joins import Gains, Joins
from ..runtime.lens import first_at, lens_of
from ..runtime.norms import NormFacts
from ..runtime.patch_errors import UnsupportedError
from ..sites.norm_facts import describe
from .anatomy import Affine, Parts, PlainNorm
from .fixed_norms import ROOT
from .layouts import BLOCK, OUTPUT, STEM, FamilyLayout

EXPRESSIBLE = ("layer", "rms", FixedNorm.kind)  # norms that stock models have
MAX_EPS_DIFFERENCE = 1e-11  # eps of norms that differ by less are equal
_UNUSED_PARTS = ("contacts",)  # parts of a head that no forward reads
_OPTIONAL = ("pooler", "contacts")  # parts of a head that are zero if the model has none
_OUTPUT_BIAS = "bias"  # role of a head's Parameter that is its output's bias, or a second name of that bias


def sections(model: Any, layout: FamilyLayout, auto: str) -> Iterator[tuple[str, Any, Mapping[str, str]]]:
    """Yield the blocks of a stack, its stem and its head: name, module, and paths by role."""
    body, blocks = body_of(model, layout), layout.paths["blocks"]
    for index, block in enumerate(body.get_submodule(blocks)):
        yield f"{blocks}.{index}.", block, layout.at(BLOCK)
    yield "", body, layout.at(STEM)
    yield "", model, layout.heads[auto]


class Weights:
    """Reads or fills parts of a model, and tracks which Parameters were used.

    Args:
        model: a transformers model; values that are read have its dtype.
        gains: factors on the outputs of linear layers, by the layer's id; they are read with the layers.
    """

    def __init__(self, model: Any, gains: Mapping[int, float] | None = None):
        self.model, self.gains = model, gains or {}
        self.touched: set[int] = set()  # by address, as a transposed weight is a view
        self.fixed: list[nn.Module] = []  # norms that were filled as fixed ones

    def names_left(self, layout: FamilyLayout) -> list[str]:
        """Return the names of unused Parameters, without tables that the class computes."""
        computed = self.model.base_model.get_submodule(layout.computed).parameters() if layout.computed else ()
        done = self.touched | {value.data_ptr() for value in computed}
        return [name for name, value in self.model.named_parameters() if value.data_ptr() not in done]

    def read(self, where: str, root: Any, paths: Mapping[str, str]) -> Parts:
        """Return the parts of a section by role; absent ones are left out.

        Raises:
            UnsupportedError: a norm is neither LayerNorm nor RMSNorm, nor fixed.
        """
        parts: Parts = {}
        for role, path in paths.items():
            module = None if role == _OUTPUT_BIAS else module_at(root, path)
            if isinstance(module, GatedLinear):
                parts |= {role: self.layer(module.up), "gate": self.layer(module.gate)}
            elif module is not None and role.endswith("norm"):
                parts[role] = self.norm(module, where + path)
            elif module is not None:
                parts[role] = self.layer(module, _output_bias(root, role, paths))
        return parts

    def fill(self, root: Any, paths: Mapping[str, str], parts: Parts) -> None:
        """Copy parts into a section.

        Raises:
            UnsupportedError: the section has no place for a part, no part for a place, or another shape.
        """
        for role in dict.fromkeys((*parts, *paths)):
            part, path = parts.get(role), paths.get(role, "")
            module = module_at(root, path) if path and role != _OUTPUT_BIAS else None
            if module is None and part is not None and role not in _UNUSED_PARTS:
                raise UnsupportedError(f"it has no place for the {role}")
            if module is not None and part is None and role not in _OPTIONAL:
                raise UnsupportedError(f"it has a {role}, and here is none")
            if module is not None and isinstance(part, PlainNorm):
                self.fill_norm(module, part, path)
            elif module is not None:
                self._fill(
                    _parameters_of_layer(module, _output_bias(root, role, paths)), vars(part) if part else {}, path
                )

    def layer(self, module: nn.Module, output_bias: Tensor | None = None) -> Affine:
        """Return a linear layer or embedding."""
        values = self._values(_parameters_of_layer(module, output_bias))
        layer = Affine(values["weight"], values.get("bias"))
        return layer.times(self.gains[id(module)]) if id(module) in self.gains else layer

    def norm(self, module: nn.Module, path: str) -> PlainNorm:
        """Return a norm; its gain is 1 if it stores none.

        Raises:
            UnsupportedError: it is neither LayerNorm nor RMSNorm, nor fixed.
        """
        like = self.model
        if isinstance(module, NoNorm):
            return PlainNorm(torch.ones(1, dtype=like.dtype, device=like.device), None, "rms", 0.0, fixed=True)
        facts = _facts(module, path)
        values = self._values(_parameters_of_norm(module, facts))
        gain = torch.ones(facts.shape[:1] or 0, dtype=like.dtype, device=like.device)
        gain = values["gain"] + facts.offset if "gain" in values else gain
        if isinstance(module, FixedNorm):
            if module.bound is not None:
                raise UnsupportedError(f"{path} is a fixed norm with a bound, which no stock model has")
            return PlainNorm(gain, values.get("shift"), "layer" if module.mean else "rms", 0.0, fixed=True)
        return PlainNorm(gain, values.get("shift"), facts.kind, _eps(facts, like.dtype))

    def fill_norm(self, module: nn.Module, norm: PlainNorm, path: str) -> None:
        """Copy gain and shift into a stock norm; `with_fixed_norms` fixes it afterwards, if it has to.

        Raises:
            UnsupportedError: the norm has another eps, or no place for gain or shift.
        """
        facts = _facts(module, path)
        if norm.fixed:
            self.fixed.append(module)
            norm = replace(norm, weight=norm.weight.expand(facts.shape) * ROOT)
        elif abs(_eps(facts, norm.weight.dtype) - norm.eps) > MAX_EPS_DIFFERENCE:
            raise UnsupportedError(
                f"its {path} has an eps of {_eps(facts, norm.weight.dtype):g}, and here {norm.eps:g}"
            )
        stored = _parameters_of_norm(module, facts)
        gain = norm.weight - (facts.offset if stored["gain"] else 1.0)
        self._fill(stored, {"gain": gain, "shift": norm.bias}, path)

    def value(self, *places: Tensor) -> Tensor:
        """Return the value stored at the first of these places; the other places hold copies."""
        self.touched |= {place.data_ptr() for place in places}
        return places[0].detach().to(self.model.dtype)

    def _values(self, stored: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
        return {name: self.value(*places) for name, places in stored.items() if places}

    def _fill(self, stored: Mapping[str, list[Tensor]], given: Mapping[str, Tensor | None], path: str) -> None:
        """Copy values to where they are stored; without given values write zeros, which need no place."""
        for name, places in stored.items():
            values = given.get(name)
            if not places and values is not None and bool(values.any()):
                raise UnsupportedError(f"its {path} has no {name}")
            for place in places:
                values = torch.zeros_like(place) if values is None else values
                if place.shape != values.shape:
                    raise UnsupportedError(f"its {path} is {tuple(place.shape)}, and here {tuple(values.shape)}")
                self.touched.add(place.data_ptr())
                place.copy_(values)


def _facts(module: nn.Module, path: str) -> NormFacts:
    facts = describe(module)
    if facts is None or facts.kind not in EXPRESSIBLE:
        kind = facts.kind if facts is not None else module._get_name()
        raise UnsupportedError(f"{path} computes {kind!r}, which no architecture of transformers has")
    return facts


def _eps(facts: NormFacts, dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if facts.eps is None else facts.eps


def _parameters_of_layer(module: Any, output_bias: Tensor | None = None) -> dict[str, list[Tensor]]:
    """The Parameters, or views of them, that hold a layer's weight (out, in) and bias; a bias may have two places."""
    transposed = isinstance(module, nn.Embedding) or "Conv1D" in type(module).__name__
    weight, bias = module.weight.T if transposed else module.weight, getattr(module, "bias", None)
    return {"weight": [weight], "bias": [one for one in (bias, output_bias) if one is not None]}


def _parameters_of_norm(module: nn.Module, facts: NormFacts) -> dict[str, list[Tensor]]:
    """The Parameters, or views of them, that hold a norm's gain, less its offset, and its shift."""
    places = zip(("gain", "shift"), facts.parameters_of(module), strict=True)
    return {name: [] if place is None else [place] for name, place in places}


def _output_bias(root: Any, role: str, paths: Mapping[str, str]) -> Tensor | None:
    return module_at(root, paths[_OUTPUT_BIAS]) if role == "head" and _OUTPUT_BIAS in paths else None


def module_at(root: Any, path: str) -> Any:
    """Return the module at the first path that exists in a module or its base model; None if no path does."""
    if path == OUTPUT:
        output = root.get_output_embeddings()
        return module_at(root, "lm_head.decoder") if output is None else output
    paths = path.split(" | ")
    inner = first_at(root, *paths)
    return first_at(getattr(root, "base_model", None), *paths) if inner is None else inner


def body_of(model: Any, layout: FamilyLayout) -> Any:
    """Return the module that holds the stack."""
    return model.base_model.get_submodule(layout.paths.get("body", ""))


def gains_of(model: nn.Module) -> dict[str, float]:
    """Return factors by the last linear layers of the residual branches whose output is multiplied.

    Raises:
        UnsupportedError: a branch meets its stream in another way, or the multiplied module isn't a linear layer.
    """
    gains: dict[str, float] = {}
    modules: dict[str, Any] = dict(model.named_modules())
    for name, module in modules.items():
        if lens_of(module, Joins) is not None:
            raise UnsupportedError(f"{name}: its norms stand elsewhere than in the class that it was patched from")
        lens = lens_of(module, Gains)
        for child, _, gain in () if lens is None else lens.gains:
            path = f"{name}.{child}".strip(".")
            if isinstance(modules[path], nn.Dropout):  # the dropout stands behind the linear layer
                path = f"{path.rpartition('.')[0]}.dense"
            if getattr(modules.get(path), "weight", None) is None:
                raise UnsupportedError(f"{path} is multiplied by {gain:g} in every forward")
            gains[path] = gains.get(path, 1.0) * gain
    return gains
