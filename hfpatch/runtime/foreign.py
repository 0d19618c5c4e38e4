"""Finds module classes that other libraries put into a model (`register_patch_mapping`, kernels).

They go by a class's name, for every model of the process, and a checkpoint has their weights alone: who opens it where
they aren't registered gets the host's own classes. (Those of `fusion_config=` are transformers' own: they compute the
same, and weights are converted from one to the other.)
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from .edits import COMPONENTS
from .lens import host_class

_LIBRARIES = {"torch", "transformers", __name__.partition(".")[0]}


def foreign_classes(model: nn.Module) -> tuple[str, ...]:
    """Return names of the classes of a model's modules that are neither the host's nor a patch's, sorted."""
    known = _LIBRARIES | {_package(host_class(type(model)))}
    kinds = {host_class(type(module)) for module in model.modules()} - {host_class(type(model))}
    others = {kind for kind in kinds if _package(kind) not in known}
    return tuple(sorted({kind.__name__ for kind in others if not {*kind.__mro__} & {*COMPONENTS.values()}}))


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def has_foreign_forward(module: nn.Module) -> bool:
    """Return whether a module's forward is of a class outside torch and transformers."""
    kinds = host_class(type(module)).__mro__
    return _package(next(kind for kind in kinds if "forward" in vars(kind))) not in _LIBRARIES


def warn_of_missing(model: nn.Module, expected: Any) -> None:
    """Warn of a newly built model without modules of classes that it had when it was patched."""
    missing = sorted(set(expected or ()) - set(foreign_classes(model)))
    if missing:
        warnings.warn(
            f"{type(model).__name__} was patched with modules of {', '.join(missing)} in the place of the host's own, "
            "which are here now: it may compute something else. Register them (register_patch_mapping, kernel_config=) "
            "before opening it; `hfpatch verify` compares the outputs.",
            UserWarning,
            stacklevel=3,
        )
