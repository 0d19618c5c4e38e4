"""The folder of a push: the one that is given, or the one that a model is written to in the form that is asked for."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, AutoProcessor, PreTrainedModel

from ..checkpoint.classes import patched_model_class
from ..errors import OptionError
from ..export import FORMS, export_model
from ..export.modeling import FILE
from ..plan import require_bare
from ..runtime.errors import CheckpointError, first_line
from ..runtime.record import KEY
from .folder import CARD, Folder, read_folder, travelling

_VOCABULARIES = ("tokenizer", "vocab", "spiece")


def checkpoint_of(
    model: PreTrainedModel | str | PathLike[str],
    native: bool,
    tokenizer: Any,
    scratch: Path,
    max_shard_size: str | int | None,
    form: str | None = None,
) -> Folder:
    """The checkpoint with its tokenizer; what isn't on disk yet is written to `scratch`.

    Args:
        form: as in `export_model`; None is what a folder holds, and of a model in memory "plugin".

    Raises:
        CheckpointError: it isn't one that can be pushed.
        WrappedModelError: the model is wrapped.
        OptionError: the tokenizer is none, or there is no such form.
        UnsupportedError, VerificationError: the model doesn't have that form; says why.
    """
    if form is not None and form not in FORMS:
        raise OptionError(f"form must be one of {', '.join(FORMS)}, not {form!r:.40}.")
    tokenizer = _opened(tokenizer)
    limit: dict[str, Any] = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    if isinstance(model, str | PathLike):
        folder = read_folder(Path(model), native)
        if form not in (None, _form_of(folder)):
            carried = tokenizer if tokenizer is not None else _tokenizer_in(Path(model))
            export_model(_model_in(Path(model)), scratch / "model", form, tokenizer=carried, **limit)
            written, card = read_folder(scratch / "model", form == "native"), folder.files.get(CARD)
            folder = replace(written, files=written.files | ({} if card is None else {CARD: card}))
        elif tokenizer is not None:
            tokenizer.save_pretrained(scratch / "tokenizer")
            folder.files |= travelling(scratch / "tokenizer", [])
    else:
        _require_patched(model)
        export_model(model, scratch / "model", form or "plugin", tokenizer=tokenizer, **limit)
        folder = read_folder(scratch / "model", form == "native")
    if "vocab_size" in folder.config and not any(name.startswith(_VOCABULARIES) for name in folder.files):
        folder.notes.append("no tokenizer travels along: give one with tokenizer= (--tokenizer)")
    return folder


def _require_patched(model: PreTrainedModel) -> None:
    require_bare(model)
    if not getattr(model.config, KEY, None):
        raise CheckpointError(
            f"this {type(model).__name__} isn't patched. Call patch_model on it first, or use its own push_to_hub."
        )
    if any(tensor.is_meta for tensor in model.parameters()):
        raise CheckpointError(f"this {type(model).__name__} has no weights: it is on the meta device. Load it first.")


def _form_of(folder: Folder) -> str:
    """In which form a checkpoint in a folder is."""
    if folder.record is None:
        return "native"
    return "remote" if FILE in folder.files and folder.config.get("auto_map") else "plugin"


def _model_in(folder: Path) -> PreTrainedModel:
    """The patched model of a folder, as the class that it was saved from.

    Raises:
        CheckpointError: it isn't patched, or transformers has no such class.
    """
    config = AutoConfig.from_pretrained(folder)
    name = (config.architectures or [""])[0]
    host = getattr(transformers, name, None)
    if not getattr(config, KEY, None) or host is None:
        raise CheckpointError(
            f"{folder} holds {name or 'a model without a class'}, which can't be opened as a patched model of "
            "transformers. Open it yourself, and push the model in memory."
        )
    return patched_model_class(host).from_pretrained(folder, config=config, dtype="auto")


def _tokenizer_in(folder: Path) -> Any:
    """A folder's tokenizer or processor; None where it has none that opens."""
    try:
        found = AutoProcessor.from_pretrained(folder)
    except Exception:  # tokenizers fail in many ways
        return None
    return found if _has_words(found) else None


def _opened(tokenizer: Any) -> Any:
    """A tokenizer or processor, or that of which the name is given.

    Raises:
        OptionError: there is none.
    """
    if tokenizer is None:
        return None
    if isinstance(tokenizer, str | PathLike):
        try:
            tokenizer = AutoProcessor.from_pretrained(tokenizer)
        except Exception as error:  # tokenizers fail in many ways
            reason = first_line(error)
            raise OptionError(f"tokenizer: {tokenizer} has none that opens here ({reason:.200}).") from error
    if not hasattr(tokenizer, "save_pretrained"):
        raise OptionError(f"tokenizer is a tokenizer or processor, or the name of one, not {type(tokenizer).__name__}.")
    if not _has_words(tokenizer):
        raise OptionError("tokenizer has no vocabulary: transformers opens a folder without tokenizer files as that.")
    return tokenizer


def _has_words(tokenizer: Any) -> bool:
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    return not hasattr(inner, "get_vocab") or len(inner.get_vocab()) > len(inner.all_special_ids)
