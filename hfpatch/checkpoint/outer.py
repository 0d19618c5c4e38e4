"""Finds the transformers model that contains another one, if it was built after hfpatch was imported.

A module doesn't know its parent. torch tells whoever asks when a module becomes the child of another
(`register_module_module_registration_hook`); of these only transformers models inside transformers models are kept,
by weak references.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import PreTrainedModel

from ..runtime.errors import UnsupportedError

_parents: WeakKeyDictionary[nn.Module, ref[nn.Module]] = WeakKeyDictionary()


def _keep_parent(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if isinstance(child, PreTrainedModel) and isinstance(parent, PreTrainedModel):
        _parents[child] = ref(parent)


register_module_module_registration_hook(_keep_parent)


def require_outermost(model: PreTrainedModel) -> None:
    """Refuse a part of a larger transformers model, whose checkpoint would have no record of its patch.

    Raises:
        UnsupportedError: it is one; gives the call that patches it through the larger one.
    """
    outer, path = _outer_of(model)
    if outer is not None:
        whole, part, name = type(outer).__name__, type(model).__name__, ".".join(path)
        raise UnsupportedError(
            f"this {part} is {name} of a {whole}, whose checkpoint would have no record of the patch. Patch the outer "
            f"model, the one that is saved, and choose the part: patch_model(outer, ..., "
            f"only={f'{name}.*'!r}). To patch the part for use without the rest, take a copy: copy.deepcopy(part)."
        )


def _outer_of(model: Any) -> tuple[nn.Module | None, list[str]]:
    """The outermost model that is known to hold this one, and the path to it in there; None if none is."""
    path: list[str] = []
    while (known := _parents.get(model)) is not None:
        parent = known()
        name = None if parent is None else next((name for name, one in parent.named_children() if one is model), None)
        if name is None:
            break
        path.insert(0, name)
        model = parent
    return (model if path else None), path
