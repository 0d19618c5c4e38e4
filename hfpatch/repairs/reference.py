"""Checks of the two models of a repair: the patched one and its original."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from ..core.bare import require_unquantized
from ..core.globs import listed_modules
from ..errors import OptionError, WrappedModelError
from ..measure.inputs import input_embedding
from ..measure.quiet_forward import device_of
from ..runtime.lens import host_class
from ..runtime.patch_errors import PatchError, UnsupportedError, describe_error
from ..runtime.record import KEY


def require_repairable(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    """Refuse a model that isn't patched, a reference that isn't its original, and models on the meta device.

    Only the reference may be offloaded.

    Raises:
        WrappedModelError: a Parameter of the patched model is on the meta device.
        OptionError: the model carries no patch record; or the reference is the model itself, isn't of its class, has
            other layers or another embedding, or holds no weights.
        UnsupportedError: the patched model is quantized.
    """
    missing = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if missing:
        raise WrappedModelError(
            f"{missing} of the patched {type(model).__name__} is on the meta device (offloaded, or never loaded), and "
            "a repair writes to weights. Load the patched model whole; only the reference may be offloaded."
        )
    if not getattr(model.config, KEY, None):
        raise OptionError(
            f"this {type(model).__name__} isn't patched, so there is nothing to repair. repair(model, reference, ...) "
            "takes the patched model first and its original second; patch_model(model, ..., calibration=...) patches "
            "and repairs in one call."
        )
    require_unquantized(model)
    if reference is model:
        raise OptionError(
            "model and reference are the same object: patch_model works in place. Pass the original loaded anew, or a "
            "copy.deepcopy made before the patch."
        )
    if difference := _difference(model, reference):
        raise OptionError(
            f"the reference isn't the original of this {type(model).__name__}: {difference}. "
            "repair(model, reference, ...) takes the patched model first and its original second."
        )
    if device_of(reference).type == "meta":
        raise OptionError(f"the reference {type(reference).__name__} is on the meta device: it holds no weights.")


def _difference(model: PreTrainedModel, reference: Any) -> str:
    """What shows that a reference is another model: its class, its layers, or its embedding; "" if nothing does."""
    if not isinstance(reference, PreTrainedModel) or host_class(type(reference)) is not host_class(type(model)):
        return f"it is a {type(reference).__name__}"
    left = {name for name, _ in model.named_modules()}  # a patch of positions removes convolutions that gave them
    layers = [name for name, stack in listed_modules(reference).items() if stack in left]
    if len(layers) != (expected := len(listed_modules(model))):
        return f"it has {len(layers)} layers, and the model {expected}"
    shapes = [tuple(table.weight.shape) for one in (reference, model) if (table := input_embedding(one)) is not None]
    return f"their embeddings are {' and '.join(map(str, shapes))}" if len(set(shapes)) > 1 else ""


@contextmanager
def refusing_failures(model: PreTrainedModel) -> Iterator[None]:
    """Context of a forward whose failure means that a model can't be repaired; an UnsupportedError says so."""
    try:
        yield
    except (PatchError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnsupportedError(
            f"{type(model).__name__} can't be repaired: its forward fails on single sequences of calibration, or where "
            f"finished blocks don't run again ({describe_error(error)}). Patch it without calibration."
        ) from error
