"""Lazy imports: a module's names are imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(namespace: dict[str, Any], modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's `__getattr__` that imports its names.

    Args:
        namespace: the module's `globals()`, which keep a name once it was used.
        modules: the names of each module, which is relative to hfpatch: {module: "name name ..."}.
    """
    owner = namespace["__name__"]
    places = {name: module for module, names in modules.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {owner!r} has no attribute {name!r}")
        namespace[name] = value = getattr(importlib.import_module(f"hfpatch.{places[name]}"), name)
        return value

    return get
