"""Export of sentence-transformers models: the holder saves itself, and the exported model replaces its inner one.

So its modules, prompts and settings lie where its library wants them, in whatever layout that has. What was written is
opened in another process, and its embeddings are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.holders import tokenizer_owner
from ..measure.inputs import example_inputs
from ..measure.outputs import FACTOR, noise_floor, outputs_of_texts
from ..measure.quiet_forward import cast_for_model, inference_state
from ..measure.text_batches import tokenizer_of
from ..runtime.errors import UnsupportedError, describe_error
from .equality import TOLERANCE, OutputComparison
from .remote import compare_in_subprocess
from .tokenizer import save_tokenizer

if TYPE_CHECKING:
    from .native import Exported

TEXTS = [
    "A cat sat on the mat.",
    "The quick (brown) fox: 12.5 jumps!",
    "Wie viele Normen hat ein Encoder?",
    "Pooling takes the mean over tokens, so that a text of any length becomes one vector. " * 6,
]
_HOMES = {"plugin": "", "remote": "transformers_modules.", "native": "transformers.models."}


def can_be_measured(holder: Any) -> bool:
    """Return whether a holder computes something from texts."""
    return hasattr(holder, "encode_query") or hasattr(holder, "predict")


def write_holder(holder: Any, model: Any, folder: Path, write: Callable[[Path], Exported]) -> Exported:
    """Save a holder with `write` for the model inside it, and compare it with what opens from the folder.

    Raises:
        UnsupportedError: it doesn't save its model by `save_pretrained`, or where remote code is looked for, or doesn't
            run on texts.
        VerificationError: what was written doesn't open, or not as the same function.
    """
    found: list[Exported] = []

    def save_inside(place: Any, **_: Any) -> None:
        vars(model).pop("save_pretrained", None)  # what writes calls the model's own
        found.append(write(Path(place)))

    vars(model)["save_pretrained"] = save_inside
    try:
        holder.save_pretrained(str(folder))
    finally:
        vars(model).pop("save_pretrained", None)
    if not found:
        raise UnsupportedError(f"{type(holder).__name__} doesn't save the model inside it by save_pretrained.")
    if found[0].to == "remote" and found[0].folder.resolve() != folder.resolve():
        raise UnsupportedError(
            f"{type(holder).__name__} saves its model in the subfolder {found[0].folder.name}, and transformers looks "
            "for a checkpoint's code in the folder itself. Use to='plugin' or to='native'."
        )
    exported, tokenizer = found[0], tokenizer_of(tokenizer_owner(holder))
    if tokenizer is not None:  # beside a model of another type another class may open it
        save_tokenizer(tokenizer, exported.folder)
    if not can_be_measured(holder):
        return exported
    return replace(exported, embeddings=_compare(holder, model, folder, exported))


def _compare(holder: Any, model: Any, folder: Path, exported: Exported) -> OutputComparison:
    """Compare a holder's embeddings with those after opening the folder in another process, and saving it there.

    Raises:
        UnsupportedError: it doesn't run on texts.
        VerificationError: nothing opens, or other embeddings come out.
    """
    kind = type(holder).__name__
    try:
        with inference_state(holder):
            outputs = outputs_of_texts(holder, TEXTS)
    except Exception as error:  # one for images, or a module of the user's
        raise UnsupportedError(
            f"{kind} can't be checked, since it doesn't run on texts: {describe_error(error)}. "
            "Export the model inside it."
        ) from error
    library = next(cls for cls in type(holder).__mro__ if cls.__module__.startswith("sentence_transformers."))
    job = {
        "holder": (library.__module__, library.__name__),
        "class": exported.architecture if exported.to == "native" else type(model).__name__,
        "home": _HOMES[exported.to],
        "plugin": exported.to == "plugin",
        "trust": exported.to == "remote" or getattr(holder, "trust_remote_code", False),
        "texts": TEXTS,
    }
    allowed = TOLERANCE.get(model.dtype) or FACTOR * noise_floor(model, cast_for_model(model, example_inputs(model)))
    worst = compare_in_subprocess(model, kind, folder, job, outputs, allowed)
    return OutputComparison(worst, allowed, len(TEXTS), "what it makes of texts")
