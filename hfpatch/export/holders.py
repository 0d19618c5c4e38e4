"""Export of sentence-transformers models: the holder saves itself, and the exported model replaces its inner one.

So its modules, prompts and settings lie where its library wants them, in whatever layout that has. Of the exported
model the outputs are compared, as of one without a holder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.holders import tokenizer_owner
from ..measure.text_batches import tokenizer_of
from ..runtime.errors import UnsupportedError
from .tokenizer import save_tokenizer

if TYPE_CHECKING:
    from .native import Exported


def write_holder(holder: Any, model: Any, folder: Path, write: Callable[[Path], Exported]) -> Exported:
    """Save a holder with `write` for the model inside it.

    Raises:
        UnsupportedError: it doesn't save its model by `save_pretrained`, or where remote code is looked for.
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
    return exported
