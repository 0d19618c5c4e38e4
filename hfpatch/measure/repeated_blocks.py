"""Finds the repeated blocks of a model in its module lists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


def repeated_blocks(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks that a model repeats, by name: elements of the outermost lists that hold several of one class.

    If no two elements have the same shapes and they hold such lists (stages of a vision model), the inner elements.
    """
    for name, child in model.named_children():
        path = f"{prefix}{name}"
        elements = list(child.named_children()) if isinstance(child, nn.ModuleList | nn.Sequential) else []
        inside = {index: list(repeated_blocks(element, f"{path}.{index}.")) for index, element in elements}
        distinct = len({_shapes(element) for _, element in elements}) == len(elements)
        if len({type(element) for _, element in elements}) == len(elements) or (distinct and all(inside.values())):
            yield from repeated_blocks(child, f"{path}.")
        else:
            yield from ((f"{path}.{index}", element) for index, element in elements)


def _shapes(module: nn.Module) -> tuple[Any, ...]:
    return type(module), *((name, p.shape) for name, p in module.named_parameters())


def listed_modules(model: nn.Module) -> dict[str, str]:
    """Return the elements of the outermost `nn.ModuleList`s, with the list's name."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{element}.") for element in found):
            found |= {f"{name}.{child}": name for child, element in module._modules.items() if element is not None}
    return found


def same_layer(outer: str, inner: str) -> bool:
    """Return whether another module's name begins with the numbers in a module's, as in h.0.ln and h.0.experts.3."""
    own, others = ([piece for piece in name.split(".") if piece.isdigit()] for name in (outer, inner))
    return others[: len(own)] == own
