"""Lazy imports: a module's names are imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def modules_of(names: Mapping[str, str]) -> dict[str, str]:
    """Return the module of each name, from {module: "name name ..."}; modules are relative to hfpatch."""
    return {name: module for module, group in names.items() for name in group.split()}


def lazy_names(namespace: dict[str, Any], modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's `__getattr__` that imports its names.

    Args:
        namespace: the module's `globals()`, which keep a name once it was used.
        modules: the module of each name, relative to hfpatch.
    """
    owner = namespace["__name__"]

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {owner!r} has no attribute {name!r}")
        namespace[name] = value = getattr(importlib.import_module(f"hfpatch.{modules[name]}"), name)
        return value

    return get
