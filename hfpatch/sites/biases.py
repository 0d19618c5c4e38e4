"""Biases on attention scores by distance: where a model has them, and what takes them out."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from ..core.registry import by_class
from ..runtime.constants import Given
from ..runtime.edits import LENS_SLOT, Call, Edit
from ..runtime.lens import named_modules
from .records.biases import BIASES, STAYING_PARTS, STAYS, Bias

NO_BIAS = Call.of("NoBias")
REMOVED = "_hfpatch_removed_biases"  # of an owner whose biases are gone


@dataclass
class FoundBias:
    """Recorded biases in the model in hand.

    Attributes:
        bias: the record.
        owner, prefix: the module that owns them, and what its children's names start with.
        attentions: the self-attentions that add them, by name.
    """

    bias: Bias
    owner: nn.Module
    prefix: str
    attentions: dict[str, nn.Module]

    @property
    def name(self) -> str:
        return self.prefix + self.bias.name

    @property
    def removed(self) -> bool:
        return REMOVED in self.owner.__dict__

    def matching(self, glob: str) -> Iterator[tuple[str, nn.Module]]:
        """The owner's modules whose paths match; the owner itself for ""."""
        for name, module in named_modules(self.owner):
            if fnmatch.fnmatchcase(name, glob):
                yield name, module

    def table_paths(self) -> list[tuple[str, bool]]:
        """(path from the owner, whether it is an embedding) of everything that makes the biases and is there."""
        found = []
        for glob in self.bias.tables:
            above, _, attribute = glob.rpartition(".")
            for path, holder in self.matching(above):
                made = holder._modules.get(attribute)
                if made is not None or holder._parameters.get(attribute) is not None:
                    found.append((f"{path}.{attribute}".strip("."), isinstance(made, nn.Embedding)))
        return found


def find_biases(model: nn.Module) -> list[FoundBias]:
    """The recorded biases of a model, also those that an earlier patch removed."""
    found = []
    for name, module in named_modules(model):
        bias = by_class(BIASES, module)
        if bias is None:
            continue
        prefix = f"{name}." if name else ""
        item = FoundBias(bias, module, prefix, {})
        item.attentions = {prefix + path: attention for path, attention in item.matching(bias.attention)}
        if item.attentions and (item.removed or _has_biases(item)):
            found.append(item)
    return found


def _has_biases(item: FoundBias) -> bool:
    path, _, attribute = (item.bias.present or "").rpartition(".")
    if attribute:
        return bool(getattr(item.owner.get_submodule(path), attribute))
    return bool(item.table_paths()) or not item.bias.tables


def unremovable(model: nn.Module, found: list[FoundBias]) -> dict[str, str]:
    """Names of modules ("" is the model) with biases that can't be taken out, and why; `found` are those that can."""
    owned = {id(module) for item in found for module in item.owner.modules()}
    reasons = {}
    for name, module in named_modules(model):
        reason = by_class(STAYS, module)
        if reason is None and id(module) not in owned:
            parts = (*module._modules, *module._parameters, *module._buffers)
            reason = next((STAYING_PARTS[part] for part in parts if part in STAYING_PARTS), None)
        if reason is not None:
            reasons[name] = reason
    return reasons


def removal(item: FoundBias) -> tuple[Edit, ...]:
    """The edits that take the biases out."""
    found = [Edit.of(item.prefix + path, NO_BIAS if is_table else None) for path, is_table in item.table_paths()]
    for glob, attribute, value in item.bias.switches:
        found += [Edit.of(f"{item.prefix}{path}.{attribute}", value) for path, _ in item.matching(glob)]
    if item.bias.given:
        lens = Given(item.bias.given)
        found += [Edit.of(f"{attention}.{LENS_SLOT}", lens) for attention in item.attentions]
    return (*found, Edit.of(f"{item.prefix}{REMOVED}", True))
