"""Planners of fixed and of folded norms: gain, shift and fixed mean go into the linear maps that alone read a norm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..core.globs import Names
from ..core.plan_table import Change, refuse_private_forward
from ..core.weight_change import WeightChange
from ..measure.blocks import same_layer
from ..runtime.edits import Call, Edit, pattern_of
from ..runtime.errors import UnsupportedError
from ..runtime.fixed import BiasedLinear, FixedNorm
from ..runtime.float64 import in_float64
from ..runtime.norms import NormFacts
from ..schemes.fixed import Folded
from ..schemes.request import SchemeRequest
from ..sites.final_norms import find_final_norms
from ..sites.linear_maps import holds_maps, is_linear_map
from ..sites.norm_readers import Reader, find_readers
from ..sites.norms import describe
from ..sites.sites import Sites
from .norms import norm_text, plan_norms
from .planners import PlannerResult

_WHY_EXACT = "the layers that read it compute with its gain and shift"
_ROWS = 4096  # of a weight, multiplied at once


def plan_fixed(sites: Sites, part: SchemeRequest) -> PlannerResult:
    """Plan a swap to fixed norms, as for others, but the last norm of each stack is kept unless it is named.

    Raises:
        UnsupportedError: no small model of this class runs, so its last norm isn't known.
    """
    special = dict.fromkeys(find_final_norms(sites), "the stack's output, whose scale it sets")
    return PlannerResult(part, plan_norms(sites, part, special))


def plan_folded(sites: Sites, part: SchemeRequest) -> PlannerResult:
    """Plan folding a model's norms.

    Raises:
        UnsupportedError: init="reset"; or no small model of its class runs.
    """
    if part.init == "reset":
        raise UnsupportedError("norm='folded' keeps the function, and init='reset' gives new starting values: choose.")
    return PlannerResult(part, _Folder.of(sites, part).fold_all(plan_norms(sites, part)))


def plan_without_norms(sites: Sites, part: SchemeRequest) -> PlannerResult:
    """Plan fixed norms that are folded after the repair; `plan_fold_of_fixed` plans that, once they are in place.

    Raises:
        UnsupportedError: as in `plan_folded` and `plan_fixed`.
    """
    folder, found = _Folder.of(sites, part), plan_fixed(sites, part)
    named = folder.named(found.changes)
    for change in found.changes:
        if change.changes:
            facts = describe(sites.model.get_submodule(change.row.module))
            assert facts is not None
            reason = folder.reason_to_keep(change, part.scheme.remaining_facts(facts), named)
            change.row.reason = f"then folded{folder.note(change)}" if reason is None else f"not folded: {reason}"
    return replace(found, readers=folder.readers)


def plan_fold_of_fixed(
    sites: Sites, part: SchemeRequest, names: Iterable[str], readers: Mapping[str, Any] | None
) -> PlannerResult:
    """Plan folding the fixed norms of these names, for a request that is in the record already.

    Args:
        sites: of the model with fixed norms.
        part: the request.
        names: of the fixed norms.
        readers: what read the norms before they were fixed, if nothing else was changed. None finds them anew, on a
            small model, which can't be made if the patch names some layers of many.
    """
    changes = plan_norms(sites, SchemeRequest(Folded(), tuple(names)))
    folded = _Folder.of(sites, part, readers).fold_all(changes)
    return PlannerResult(part, [new for new, old in zip(folded, changes, strict=True) if old.changes])


@dataclass
class _Folder:
    """Folds norms of one model.

    A norm whose output a model inside returns (LlamaModel in LlamaForCausalLM) is kept unless `only` names it: that
    model's class, and every other head, opens the checkpoint without the map that took the gain over.

    Attributes:
        part: the request, of this scheme or of one that folds later.
        globs: what its globs match.
        readers: by pattern of a norm's name, what reads it, or why it can't be folded.
        owners: how many modules hold each Parameter, by id.
        maps: names of the linear maps by their pattern, each with its place among the modules.
    """

    model: nn.Module
    part: SchemeRequest
    globs: Names
    readers: Mapping[str, tuple[Reader, ...] | str]
    owners: Counter[int]
    maps: Mapping[str, list[tuple[int, str]]]

    @classmethod
    def of(cls, sites: Sites, part: SchemeRequest, readers: Mapping[str, Any] | None = None) -> _Folder:
        model = sites.model
        owners = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
        maps: dict[str, list[tuple[int, str]]] = {}
        for place, (name, module) in enumerate(model.named_modules()):
            if is_linear_map(module) or holds_maps(module):  # and no norm beside one in a Sequential
                maps.setdefault(pattern_of(name), []).append((place, name))
        return cls(model, part, sites.names, readers or find_readers(*sites.twin), owners, maps)

    def fold_all(self, changes: list[Change]) -> list[Change]:
        """Return norms' changes with what their readers take over; without edits where one can't be folded."""
        named = self.named(changes)
        return [self._fold(one, named) if one.changes else one for one in changes]

    def named(self, changes: Iterable[Change]) -> set[tuple[str, ...]]:
        """The names of norms whose output a model inside returns, and that `only` names nevertheless."""
        returned = {_names(one): one.changes and bool(self._returned(one)) for one in changes}
        return self.globs.explicitly_selected(self.part.only, returned)

    def _returned(self, change: Change) -> str:
        readers = self.readers.get(pattern_of(change.row.module), "")
        return "" if isinstance(readers, str) else max((reader.returned for reader in readers), default="")

    def note(self, change: Change) -> str:
        """Where a fold isn't exact, in words for the plan; "" if it is everywhere."""
        return f"; not in {returned}" if (returned := self._returned(change)) else ""

    def _fold(self, change: Change, named: set[tuple[str, ...]]) -> Change:
        row, names = change.row, _names(change)
        norm = self.model.get_submodule(row.module)
        facts = describe(norm)
        assert facts is not None
        if (reason := self.reason_to_keep(change, facts, named)) is not None:
            return Change(replace(row, becomes=None, why_exact=None, reason=reason))
        gone = norm if isinstance(norm, FixedNorm) and norm.bound is None else None
        found = list(self._readers_of(names))
        biases, new_biases, edits = [], [], list(change.edits)
        if facts.shift:
            shift = norm.get_parameter(facts.shift)
            for name, _ in found:
                reader = self.model.get_submodule(name)
                constant = _product(reader, shift)
                if reader._parameters.get("bias") is None:
                    edits.append(Edit.of(name, Call.of(BiasedLinear)))
                    new_biases.append(WeightChange(f"{name}.bias", "value", constant))
                else:
                    biases.append(WeightChange(f"{name}.bias", "add", constant))
        weights = list(self._weights(row.module, facts, found, gone is not None and gone.mean))
        without = " and ".join(what for what in ("gain", "shift") if getattr(facts, what))
        becomes = "(gone)" if gone is not None else f"{norm_text(norm, facts)} without {without}"
        into = ", ".join(dict.fromkeys(name.removeprefix(_common(row.module, name)) for name, _ in found))
        row = replace(row, becomes=becomes, why_exact=_WHY_EXACT, reason=f"folded into {into}{self.note(change)}")
        return Change(row, tuple(edits), (*biases, *weights), (*change.starts, *new_biases, *_own_values(row, norm)))

    def reason_to_keep(self, change: Change, facts: NormFacts, named: set[tuple[str, ...]]) -> str | None:
        """Return why a norm with these facts isn't folded; None if it is. `named` are those of its method."""
        names = _names(change)
        found = self.readers.get(pattern_of(names[0]), "it isn't in the small model")
        if isinstance(found, str):
            return found
        norm = self.model.get_submodule(names[0])
        if any(self.owners[id(p)] > 1 for p in norm._parameters.values() if p is not None):
            return "another module has the same parameters"
        for name, axes in self._readers_of(names):
            reader = self.model.get_submodule(name)
            name = name.removeprefix(_common(names[0], name))
            bias = reader._parameters.get("bias") if facts.shift else None
            values = [*(reader.get_parameter(parameter) for parameter, _ in axes), *([] if bias is None else [bias])]
            if any(self.owners[id(value)] > 1 for value in values):
                return f"{name}, which reads it, shares its weights with another module"
            if kinds := {type(value.data).__name__ for value in values} - {"Tensor"}:
                return f"{name}, which reads it, has weights of the type {kinds.pop()}"
            if facts.shift and bias is None and not isinstance(reader, nn.Linear):
                way_out = "; norm='none:shift=false' adds no shift" if facts.kind == "rms" else ""
                return f"its shift would need a bias in {name} ({type(reader).__name__}){way_out}"
        if (returned := self._returned(change)) and names not in named:
            return f"it is {returned}: only=['*', its name] folds it too"
        for name, _ in self._readers_of(names):
            refuse_private_forward(name, self.model.get_submodule(name))
        return None

    def _readers_of(self, names: Iterable[str]) -> Iterator[tuple[str, tuple[tuple[str, int], ...]]]:
        """(name, Parameters with axes) of each map that reads a norm."""
        patterns = {
            reader.pattern: reader.axes
            for name in names
            for reader in self.readers[pattern_of(name)]
            if isinstance(reader, Reader)
        }
        for _, reader in sorted(one for pattern in patterns for one in self.maps.get(pattern, ())):
            if any(same_layer(name, reader) for name in names):
                yield reader, patterns[pattern_of(reader)]

    def _weights(
        self, norm: str, facts: NormFacts, found: Iterable[tuple[str, tuple[tuple[str, int], ...]]], centres: bool
    ) -> Iterator[WeightChange]:
        """Changes of the readers' weights: times the gain, and without a fixed norm's mean."""
        if facts.gain and facts.offset:
            yield WeightChange(f"{norm}.{facts.gain}", "add", facts.offset)
        for name, axes in found:
            for parameter, axis in axes:
                value = self.model.get_submodule(name).get_parameter(parameter)
                place, axis = f"{name}.{parameter}", axis % value.dim()
                if facts.gain:
                    yield WeightChange(place, "multiply", f"{norm}.{facts.gain}", axis)
                if centres:
                    yield WeightChange(place, "centre", axis=axis)


def _names(change: Change) -> tuple[str, ...]:
    return (change.row.module, *change.row.aliases)


def _product(reader: nn.Module, shift: Tensor) -> Tensor:
    """What a linear map makes of a norm's shift, in float64."""
    weight, vector = reader.get_parameter("weight").detach(), in_float64(shift.detach())
    weight = weight.T if isinstance(reader, Conv1D) else weight
    return torch.cat([in_float64(rows) @ vector for rows in weight.split(_ROWS)])


def _own_values(row: Any, norm: nn.Module) -> Iterator[WeightChange]:
    """The present values of a norm's Parameters besides gain and shift (DyT's alpha), for the norm in its place."""
    for name in getattr(norm, "own_names", ()):
        yield WeightChange(f"{row.module}.{name}", "value", norm.get_parameter(name).detach())


def _common(norm: str, reader: str) -> str:
    """The part of a reader's name, up to a dot, that the norm's name begins with as well."""
    parts, same = norm.split("."), 0
    for one, other in zip(parts, reader.split("."), strict=False):
        if one != other:
            break
        same += len(one) + 1
    return reader[:same]
