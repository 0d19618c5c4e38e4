"""Compares a patched model with its original module by module."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..core.globs import Names
from ..measure.outputs import Deviation
from ..runtime.apply import Tree
from ..runtime.attention import BIAS, ROTARY, AttentionLens
from ..runtime.constants import ConstantPositions, NoPositions
from ..runtime.edits import CENTRE_SLOT, LENS_SLOT, SCALE_SLOT, find_component
from ..runtime.length_lenses import MEAN_ROW, NOTHING
from ..runtime.lens import host_class
from ..runtime.norms import NormFacts
from ..schemes.request import Record
from ..sites.norm_facts import describe, looks_like_norm, size_of
from .verify_report import ModuleRow

_MEAN_ROW = "MeanRow"  # the component that stands for a Parameter that was a table of positions
_OF_SLOTS = {CENTRE_SLOT: "centred in every forward", SCALE_SLOT: "multiplied by a learned scalar in every forward"}
Edits = dict[str, list[tuple[str, Any]]]  # module's name -> what edits assign in it, and the values


def compare_modules(model: PreTrainedModel, reference: PreTrainedModel) -> list[ModuleRow]:
    """Return rows for all modules that differ from `reference`, and for all norms that were kept."""
    new_modules, old_modules = dict(model.named_modules()), dict(reference.named_modules())
    facts = {module: describe(module) for module in (*new_modules.values(), *old_modules.values())}
    edits, old_edits = _edits(model), _edits(reference)
    parts, names = Record.of(model.config).norm[-1:], Names.of(model)
    rows: list[ModuleRow] = []
    replaced: tuple[str, ...] = ()
    for name, old in old_modules.items():
        if name.startswith(replaced):
            continue
        new = new_modules.get(name)
        now = "removed" if new is None else _text(new, facts[new], facts[old])
        row = ModuleRow(name or type(old).__name__, _text(old, facts[old]), now, "converted")
        rows.append(row)
        added = [edit for edit in edits[name] if edit not in old_edits[name]]
        row.runtime = None if new is None else _runtime(new, old, added)
        if new is None or host_class(type(new)) is not host_class(type(old)) or facts[new] != facts[old]:
            replaced = (*replaced, f"{name}.")
            continue
        tables = [(leaf, value) for leaf, value in added if getattr(value, "name", "") == _MEAN_ROW]
        constants = {leaf: NOTHING if dict(value.kwargs).get("zero") else MEAN_ROW for leaf, value in tables}
        row.change, row.reason = _changed_parameters(old, new, constants)
        if row.runtime:
            row.state = "runtime"
        elif facts[old] is not None or looks_like_norm(old):
            globs = next((names.reason_to_keep([name], part.only, part.keep) for part in parts), None)
            row.state, row.reason = "kept", "; ".join(filter(None, (globs, row.reason))) or None
        elif row.change:
            row.state = "weights"
        else:
            rows.pop()
        for leaf, now in constants.items():
            was = f"Parameter{tuple(old.get_parameter(leaf).shape)}"
            rows.append(ModuleRow(f"{name}.{leaf}".strip("."), was, now, "converted"))
    for name, new in new_modules.items():
        above, _, leaf = name.rpartition(".")
        is_new = name not in old_modules and above in old_modules and not name.startswith(replaced)
        if is_new and leaf not in (ROTARY, BIAS):
            rows.append(ModuleRow(name, "none", _text(new, facts[new]), "converted"))
    return rows


def _edits(model: PreTrainedModel) -> Edits:
    """What the patch record's edits assign, by module's name."""
    found: Edits = defaultdict(list)
    names = {module: name for name, module in model.named_modules()}
    tree = Tree(model)
    for edit in Record.of(model.config).edits:
        for _, module, leaf in tree.places(edit.at):
            if module is not None and (leaf, edit.value) not in found[names[module]]:
                found[names[module]].append((leaf, edit.value))
    return found


def _runtime(new: nn.Module, old: nn.Module, added: list[tuple[str, Any]]) -> str | None:
    """What a module computes in every forward that the original doesn't, from its note and its edits."""
    notes = [getattr(new, "hfpatch_note", None)] if not hasattr(old, "hfpatch_note") else []
    notes += [_note(new, leaf, value) for leaf, value in added]
    return "; ".join(dict.fromkeys(filter(None, notes))) or None


def _note(module: nn.Module, leaf: str, value: Any) -> str | None:
    """What an edit of a slot adds to every forward of its module; None if other rows show it."""
    if leaf != LENS_SLOT or value is None:
        return _OF_SLOTS.get(leaf)
    lens = find_component(value.name)
    if lens is AttentionLens and BIAS in module._modules:
        return f"scores biased: {module.get_submodule(BIAS).extra_repr()}"
    if lens is AttentionLens and ROTARY in module._modules:
        return f"queries and keys rotated: {module.get_submodule(ROTARY).extra_repr()}"
    return getattr(lens, "hfpatch_note", f"seen through {value.name}")


def _changed_parameters(old: nn.Module, new: nn.Module, ignored: Collection[str]) -> tuple[float, str | None]:
    """rms of the difference of a module's own Parameters, relative to the old rms; and names that don't match.

    It is over all of them together: a bias near zero says little about the module.
    """
    a, b = ({name: p for name, p in m.named_parameters(recurse=False) if name not in ignored} for m in (new, old))
    notes = [f"{name} added" for name in a.keys() - b.keys()] + [f"{name} removed" for name in b.keys() - a.keys()]
    deviation = Deviation()
    for name in sorted(a.keys() & b.keys()):
        if a[name].shape != b[name].shape:
            notes.append(f"{name} is {tuple(a[name].shape)}, was {tuple(b[name].shape)}")
        elif not (a[name].is_meta or b[name].is_meta):  # meta tensors have no values
            deviation.add(b[name].to(a[name].dtype), a[name])  # another dtype alone is no change
    return (math.inf if notes else deviation.rms_error), ", ".join(sorted(notes)) or None


def _text(module: nn.Module, norm: NormFacts | None, replaced: NormFacts | None = None) -> str:
    """A module's class, with the sizes of norms and tables; constants in place of tables are named in words."""
    if isinstance(module, ConstantPositions):
        return MEAN_ROW
    if isinstance(module, NoPositions):
        return NOTHING
    if norm is not None and norm.shape:
        return module._get_name() + size_of(norm, replaced)
    if isinstance(module, nn.Embedding):
        return f"{module._get_name()}({module.num_embeddings}, {module.embedding_dim})"
    return module._get_name()
