"""Holders: objects of sentence-transformers that contain a transformers model.

A holder is an object with the property `transformers_model`, such as a `SentenceTransformer`, `CrossEncoder`,
`SparseEncoder` or `MultiVectorEncoder`. sentence-transformers is imported only to look up a list (`_opens_patched`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from ..runtime.lens import host_class
from ..runtime.patch_errors import UnsupportedError

F = TypeVar("F", bound=Callable[..., Any])
_OPENED_BY_CLASS = ("EncoderModel", "Encoder")  # of encoder-decoders, such as T5EncoderModel


def model_inside(candidate: Any) -> Any:
    """Return the transformers model of a holder; anything else as it is.

    Raises:
        UnsupportedError: a holder has no model, or several, or a model that its library couldn't open again.
    """
    if isinstance(candidate, PreTrainedModel) or not hasattr(type(candidate), "transformers_model"):
        return candidate
    found = dict(_outermost(candidate))
    kind = type(candidate).__name__
    if len(found) == 1:
        (model,) = found.values()
        name = host_class(type(model)).__name__
        if name.endswith(_OPENED_BY_CLASS):
            raise UnsupportedError(
                f"this {kind} holds a {name}, which its library opens by that class, whatever the checkpoint says: it "
                "couldn't open a saved patch again. Patch that model by itself, and put it into the library's object "
                "each time the object was opened from the original."
            )
        return model
    if not found:
        raise UnsupportedError(f"this {kind} holds no model of transformers in PyTorch, so nothing can be patched.")
    raise UnsupportedError(
        f"this {kind} holds {len(found)} transformers models ({', '.join(found)}), and a patch is of one. Patch each "
        "by itself: patch_model takes the models inside too, and the whole object saves and opens as before."
    )


def _outermost(holder: nn.Module) -> Iterator[tuple[str, PreTrainedModel]]:
    """The outermost transformers models in a holder by name; a model that occurs twice keeps one name."""
    inner: set[nn.Module] = set()
    for name, one in holder.named_modules():
        if one not in inner and isinstance(one, PreTrainedModel):
            inner.update(one.modules())
            yield name, one


def tokenizer_owner(holder: nn.Module) -> nn.Module:
    """Return the module of a holder that has its transformers model as a child, and the tokenizer."""
    model = model_inside(holder)
    return next(one for one in holder.modules() if any(child is model for child in one.children()))


def unwrap_holders(function: F) -> F:
    """Decorate a function of models: it takes a holder in place of the model inside, and returns the holder.

    If no `tokenizer` is passed, it is the holder's `tokenizer_owner`. If the default device is meta, because a model is
    built there, the function's own tensors aren't made on meta: the device of the model counts.
    """
    reads_texts = "tokenizer" in inspect.signature(function).parameters

    @functools.wraps(function)
    def run(model: Any, *args: Any, **kwargs: Any) -> Any:
        inner = model_inside(model)
        if inner is not model and reads_texts and kwargs.get("tokenizer") is None:
            kwargs["tokenizer"] = tokenizer_owner(model)
        kwargs = {name: one if name == "tokenizer" else model_inside(one) for name, one in kwargs.items()}
        with _off_meta():
            returned = function(inner, *map(model_inside, args), **kwargs)
        return model if returned is inner else returned

    return cast(F, run)


def _off_meta() -> AbstractContextManager[Any]:
    return torch.device("cpu") if torch.get_default_device().type == "meta" else nullcontext()
