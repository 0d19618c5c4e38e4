"""Planners of fixed and of folded norms: gain, shift and fixed mean go into the linear maps that alone read a norm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import nn
from transformers.pytorch_utils import Conv1D

from ..core.globs import Names, same_layer
from ..core.plan_table import Change, refuse_private_forward
from ..core.weight_change import Product, WeightChange
from ..runtime.edits import Call, Edit, pattern_of
from ..runtime.fixed import BiasedLinear, FixedNorm
from ..runtime.norms import NormFacts
from ..runtime.patch_errors import UnsupportedError
from ..schemes.constant_norms import Folded
from ..schemes.request import SchemeRequest
from ..sites.final_norms import find_final_norms
from ..sites.linear_maps import holds_maps, is_linear_map
from ..sites.norm_facts import describe
from ..sites.norm_readers import Reader, find_readers
from ..sites.sites import Sites
from .interface import PlannerResult
from .norm_swaps import norm_text, plan_norms

_WHY_EXACT = "the layers that read it compute with its gain and shift"


def plan_fixed(sites: Sites, part: SchemeRequest) -> PlannerResult:
    """Plan a swap to fixed norms, as for other norms; each stack's last norm is kept unless `only` names it.

    Raises:
        UnsupportedError: no small model of this class runs, so the last norm isn't known.
    """
    special = dict.fromkeys(find_final_norms(sites), "the stack's output, whose scale it sets")
    return PlannerResult(part, plan_norms(sites, part, special))


def plan_folded(sites: Sites, part: SchemeRequest) -> PlannerResult:
    """Plan folding a model's norms.

    Raises:
        UnsupportedError: init is "reset", or no small model of the model's class runs.
    """
    if part.init == "reset":
        raise UnsupportedError("norm='folded' keeps the function, and init='reset' gives new starting values: choose.")
    found, folder = plan_norms(sites, part), _Folder.of(sites, part)
    named = folder.named(found)
    folded = [
        folder.fold(one, sites.model.get_submodule(one.row.module), named) if one.replaces else one for one in found
    ]
    return PlannerResult(part, folded)


def plan_without_norms(sites: Sites, part: SchemeRequest) -> PlannerResult:
    """Plan fixed norms, and how they are folded once they are repaired.

    Raises:
        UnsupportedError: as in `plan_folded` and `plan_fixed`.
    """
    found, folder, folds = plan_fixed(sites, part), _Folder.of(sites, part), list[Change]()
    named, changes = folder.named(found.changes), list[Change]()
    for change in found.changes:
        if not change.replaces:
            changes.append(change)
            continue
        (edit,), name = change.edits, change.row.module
        old, parent = (sites.model.get_submodule(one) for one in (name, name.rpartition(".")[0]))
        fixed = edit.value.make_module(old, parent)
        row = replace(change.row, now=norm_text(fixed, fixed.facts), losses=())
        if (reason := Folded().reason_to_keep(fixed.facts)) is None:
            fold = folder.fold(Change(row, (Edit.of(name, Folded().call(fixed.facts, fixed)),)), fixed, named)
        else:
            fold = Change(row.keep(reason))
        note = f"then folded{folder.note(change)}" if fold.replaces else f"not folded: {fold.row.reason}"
        changes.append(replace(change, row=replace(change.row, reason=note)))
        folds.append(fold)
    return replace(found, changes=changes, folds=folds)


@dataclass
class _Folder:
    """Folds norms of one model.

    A norm whose output a model inside returns (LlamaModel in LlamaForCausalLM) is kept unless `only` names it: that
    model's class, and every other head, opens the checkpoint without the map that took the gain over.

    Attributes:
        part: the request, of this scheme or of a scheme that folds later.
        globs: the modules that the request's globs match.
        readers: what reads a norm, or why it can't be folded, by the pattern of the norm's name.
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
    def of(cls, sites: Sites, part: SchemeRequest) -> _Folder:
        model = sites.model
        owners = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
        maps: dict[str, list[tuple[int, str]]] = {}
        for place, (name, module) in enumerate(model.named_modules()):
            if is_linear_map(module) or holds_maps(module):  # and no norm beside one in a Sequential
                maps.setdefault(pattern_of(name), []).append((place, name))
        return cls(model, part, sites.names, find_readers(sites.twin[0], sites.media_inputs), owners, maps)

    def named(self, changes: Iterable[Change]) -> set[tuple[str, ...]]:
        """The norms, by names, whose output a model inside returns and that `only` names nevertheless."""
        returned = {_names(one): one.replaces and bool(self._returned(one)) for one in changes}
        return self.globs.explicitly_selected(self.part.only, returned)

    def _returned(self, change: Change) -> str:
        readers = self.readers.get(pattern_of(change.row.module), "")
        return "" if isinstance(readers, str) else max((reader.returned for reader in readers), default="")

    def note(self, change: Change) -> str:
        """Where a fold isn't exact, in words for the plan; "" if it is exact everywhere."""
        return f"; not in {returned}" if (returned := self._returned(change)) else ""

    def fold(self, change: Change, norm: nn.Module, named: set[tuple[str, ...]]) -> Change:
        """Return a norm's change with what its readers take over; without edits if it can't be folded.

        Args:
            change: the change that puts in what is left of the norm.
            norm: the norm as it is at that time.
            named: what `named` returns.
        """
        row, names = change.row, _names(change)
        facts = describe(norm)
        assert facts is not None
        if (reason := self._reason_to_keep(change, facts, named)) is not None:
            return Change(row.keep(reason))
        gone = norm if isinstance(norm, FixedNorm) and norm.bound is None else None
        found = list(self._readers_of(names))
        biases, edits = [], list(change.edits)
        for name, _ in found if facts.shift else ():
            reader = self.model.get_submodule(name)
            constant = Product(f"{name}.weight", f"{row.module}.{facts.shift}", isinstance(reader, Conv1D))
            biases.append(WeightChange(f"{name}.bias", "add", constant))
            edits += [Edit.of(name, Call.of(BiasedLinear))] if reader._parameters.get("bias") is None else []
        weights = list(self._weights(row.module, facts, found, gone is not None and gone.mean))
        without = " and ".join(what for what in ("gain", "shift") if getattr(facts, what))
        becomes = "(gone)" if gone is not None else f"{norm_text(norm, facts)} without {without}"
        into = ", ".join(dict.fromkeys(name.removeprefix(_common(row.module, name)) for name, _ in found))
        row = replace(row, becomes=becomes, why_exact=_WHY_EXACT, reason=f"folded into {into}{self.note(change)}")
        return Change(row, tuple(edits), (*biases, *weights), change.starts)

    def _reason_to_keep(self, change: Change, facts: NormFacts, named: set[tuple[str, ...]]) -> str | None:
        """Why a norm with these facts isn't folded; None if it is."""
        names = _names(change)
        found = self.readers.get(pattern_of(names[0]), "it isn't in the small model")
        if isinstance(found, str):
            return found
        norm = self.model.get_submodule(names[0])
        present = describe(norm)
        new_shift = present is not None and present.shift is None
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
                way_out = "; norm='none:shift=false' adds no shift" if new_shift else ""
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
        """Changes of the readers' weights: they take up the gain, and a fixed norm's mean is taken out."""
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


def _common(norm: str, reader: str) -> str:
    """The part of a reader's name, up to a dot, that the norm's name begins with as well."""
    parts, same = norm.split("."), 0
    for one, other in zip(parts, reader.split("."), strict=False):
        if one != other:
            break
        same += len(one) + 1
    return reader[:same]
