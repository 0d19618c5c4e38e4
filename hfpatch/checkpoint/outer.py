"""Finds the transformers model that contains another one, by what Python's garbage collector knows of references.

A module doesn't know its parent, and a checkpoint has one patch record, that of the model which is saved.
"""

from __future__ import annotations

import gc
from contextlib import suppress
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..runtime.errors import UnsupportedError


def require_outermost(model: PreTrainedModel) -> None:
    """Refuse a part of a larger transformers model, whose checkpoint would have no record of its patch.

    Raises:
        UnsupportedError: it is one; gives the call that patches it through the larger one.
    """
    if not _is_child(model) or _place_of(model) is None:
        return
    gc.collect()  # the larger one may be garbage that isn't collected yet
    if (place := _place_of(model)) is not None:
        whole, name = place
        raise UnsupportedError(
            f"this {type(model).__name__} is {name} of a {whole}, whose checkpoint would have no record of the patch. "
            "Patch the outer model, the one that is saved, and choose the part: patch_model(outer, ..., "
            f"only={f'{name}.*'!r}). To patch the part for use without the rest, take a copy: copy.deepcopy(part)."
        )


def _is_child(model: Any) -> bool:
    """Whether a dictionary like the `_modules` of a module holds it: one pass over all objects, in C."""
    held = (one for one in gc.get_referrers(model) if isinstance(one, dict))
    return any(all(isinstance(value, nn.Module | None) for value in list(one.values())) for one in held)


def _place_of(model: Any) -> tuple[str, str] | None:
    """The class of the largest transformers model that holds this one, and its name in there; None if none does."""
    found = []
    for one in gc.get_objects():
        # by its type: lazy objects of other packages may answer for another class, and run code for it
        if issubclass(type(one), PreTrainedModel) and one is not model:
            with suppress(AttributeError, RuntimeError):  # another thread is building it
                names = {module: name for name, module in one.named_modules()}
                if model in names:
                    found.append((len(names), type(one).__name__, names[model]))
    return max(found)[1:] if found else None
