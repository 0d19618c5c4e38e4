"""What a patch did to each module, read off the two models themselves rather than off the request."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from ..core.plan_table import Row
from ..runtime.attention import BIAS, ROTARY, AttentionLens
from ..runtime.constants import ConstantPositions, NoPositions
from ..runtime.errors import PatchError
from ..runtime.length_lenses import MEAN_ROW, NOTHING, LengthLimit
from ..runtime.lens import CENTRED, LENS, host_class
from ..runtime.norms import NormFacts
from ..schemes.request import Record
from ..sites.norms import describe, looks_like_norm
from ..swap.mlps import plan_mlps
from ..swap.norms import plan_norms
from ..swap.positions import plan_positions
from .report import ModuleRow

Facts = dict[nn.Module, NormFacts | None]


def compare_modules(model: PreTrainedModel, reference: PreTrainedModel) -> list[ModuleRow]:
    """A row for every module that isn't what it is in `reference`, and for every norm and position that was kept."""
    new_parts, old_parts = dict(model.named_modules()), dict(reference.named_modules())
    planned = _planned(model, reference)
    facts = {module: describe(module) for tree in (new_parts, old_parts) for module in tree.values()}
    rows: list[ModuleRow] = []
    replaced: list[str] = []
    for name, old in old_parts.items():
        if any(name.startswith(f"{parent}.") for parent in replaced):
            continue
        row = _row(name or type(old).__name__, old, new_parts.get(name), planned.get(name), facts)
        if row is not None:
            rows.append(row)
            if row.state == "converted":
                replaced.append(name)
    rows += _tables_that_were_parameters(model, reference, planned)
    rows += _added(new_parts, old_parts, replaced, facts)
    return rows


def _planned(model: PreTrainedModel, reference: PreTrainedModel) -> dict[str, Row]:
    """What planning the model's requests again says of each module of the reference: the reasons why some are kept."""
    record, found = Record.of(model.config), dict[str, Row]()
    for kind, planner in (("norm", plan_norms), ("pos", plan_positions), ("mlp", plan_mlps)):
        for part in getattr(record, kind):
            try:
                changes = planner(reference, part)
            except PatchError:  # the reference is of another make than what was patched: no reasons to be had
                continue
            for change in changes:
                row = change.row
                if row.action == "replace" or found.get(row.module, row).action == "keep":
                    found[row.module] = row
    return found


def _row(name: str, old: nn.Module, new: nn.Module | None, planned: Row | None, facts: Facts) -> ModuleRow | None:
    was, now = _text(old, facts), "removed" if new is None else _text(new, facts)
    if new is None or host_class(type(new)) is not host_class(type(old)) or facts[new] != facts[old]:
        return ModuleRow(name, was, now, "converted", planned.reason if planned else None, _runtime(new))
    runtime = _runtime(new) if _runtime(new) != _runtime(old) else None
    change, note = _change(old, new)
    if runtime:
        return ModuleRow(name, was, now, "runtime", note, runtime, change)
    is_norm = facts[old] is not None or looks_like_norm(old)
    if is_norm or (planned is not None and planned.action == "keep"):
        reason = "; ".join(filter(None, (planned.reason if planned else None, note)))
        return ModuleRow(name, was, now, "kept", reason or None, None, change)
    if change:
        return ModuleRow(name, was, now, "weights", note, None, change)
    return None


def _runtime(module: nn.Module | None) -> str | None:
    """What a module does in every forward that its own class doesn't."""
    if module is None:
        return None
    notes = [getattr(module, "hfpatch_note", None)]
    lens = module.__dict__.get(LENS)
    for one in getattr(lens, "lenses", (lens,)):
        if isinstance(one, AttentionLens) and BIAS in module._modules:
            notes.append(f"scores biased: {module._modules[BIAS].extra_repr()}")  # type: ignore[union-attr]
        elif isinstance(one, AttentionLens) and ROTARY in module._modules:
            notes.append(f"queries and keys rotated: {module._modules[ROTARY].extra_repr()}")  # type: ignore[union-attr]
        elif isinstance(one, AttentionLens | LengthLimit):
            notes.append("inputs of any length")
        elif one is not None:
            notes.append(getattr(one, "hfpatch_note", f"seen through {type(one).__name__}"))
    if module.__dict__.get(CENTRED) is not None:
        notes.append("centred in every forward")
    texts = [str(note) for note in notes if note]
    generated = "hfpatch_host" in vars(type(module)) and not isinstance(module, PreTrainedModel)
    return "; ".join(texts) or ("runs a forward made by hfpatch" if generated else None)


def _change(old: nn.Module, new: nn.Module) -> tuple[float, str | None]:
    """rms of the difference of the module's own Parameters, relative to the old ones'; and names that don't match."""
    new_parts, old_parts = (dict(m.named_parameters(recurse=False)) for m in (new, old))
    names = [f"{name} added" for name in new_parts.keys() - old_parts.keys()]
    names += [f"{name} removed" for name in old_parts.keys() - new_parts.keys()]
    largest = 0.0
    for name in new_parts.keys() & old_parts.keys():
        a, b = new_parts[name].detach(), old_parts[name].detach()
        b = b.to(a.device, a.dtype)  # another dtype alone is no change
        if a.shape != b.shape:
            names.append(f"{name} is {tuple(a.shape)}, was {tuple(b.shape)}")
        elif not a.equal(b):
            scale = float(b.double().square().mean().sqrt())
            error = float((a.double() - b.double()).square().mean().sqrt())
            largest = max(largest, error / scale if scale else math.inf)
    return (math.inf if names else largest), ", ".join(sorted(names)) or None


def _tables_that_were_parameters(
    model: nn.Module, reference: nn.Module, planned: dict[str, Row]
) -> Iterator[ModuleRow]:
    kept = dict(model.named_parameters())
    for name, parameter in reference.named_parameters():
        if name in planned and planned[name].kind == "position":
            gone = name not in kept or kept[name].shape != parameter.shape
            now = MEAN_ROW if gone else planned[name].now
            reason = planned[name].reason
            text = f"Parameter{tuple(parameter.shape)}"
            yield ModuleRow(name, text, now if gone else text, "converted" if gone else "kept", reason)


def _added(
    new_parts: dict[str, nn.Module], old_parts: dict[str, nn.Module], replaced: list[str], facts: Facts
) -> Iterator[ModuleRow]:
    for name, module in new_parts.items():
        parent, _, attribute = name.rpartition(".")
        inside = any(name.startswith(f"{one}.") for one in replaced)
        if name not in old_parts and parent in old_parts and not inside and attribute not in (ROTARY, BIAS):
            yield ModuleRow(name, "none", _text(module, facts), "converted", None, _runtime(module))


def _text(module: nn.Module, facts: Facts) -> str:
    norm = facts[module]
    if norm is not None:
        return module._get_name() + (f"({', '.join(map(str, norm.shape))})" if norm.shape else "")
    if isinstance(module, ConstantPositions):
        return MEAN_ROW
    if isinstance(module, NoPositions):
        return NOTHING
    if isinstance(module, nn.Embedding):
        return f"{module._get_name()}({module.num_embeddings}, {module.embedding_dim})"
    return module._get_name()
