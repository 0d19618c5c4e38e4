"""The folder of a push: the one that is given, or the one that a model in memory is saved to."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from transformers import AutoProcessor, PreTrainedModel

from ..errors import CheckpointError, OptionError
from ..plan import require_bare
from ..record import KEY
from .folder import Folder, read_folder, travelling

_VOCABULARIES = ("tokenizer", "vocab", "spiece")


def checkpoint_of(
    model: PreTrainedModel | str | PathLike[str],
    native: bool,
    tokenizer: Any,
    scratch: Path,
    max_shard_size: str | int | None,
) -> Folder:
    """The checkpoint with its tokenizer; what isn't on disk yet is written to `scratch`.

    Raises:
        CheckpointError: it isn't one that can be pushed.
        WrappedModelError: the model is wrapped.
        OptionError: the tokenizer is none.
    """
    if isinstance(model, str | PathLike):
        folder = read_folder(Path(model), native)
    else:
        _require_patched(model)
        limit = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
        model.save_pretrained(scratch / "model", **limit)
        folder = read_folder(scratch / "model")
    if tokenizer is not None:
        _save(tokenizer, scratch / "tokenizer")
        folder.files |= travelling(scratch / "tokenizer", [])
    elif "vocab_size" in folder.config and not any(name.startswith(_VOCABULARIES) for name in folder.files):
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


def _save(tokenizer: Any, folder: Path) -> None:
    if isinstance(tokenizer, str | PathLike):
        try:
            tokenizer = AutoProcessor.from_pretrained(tokenizer)
        except Exception as error:  # tokenizers fail in many ways
            reason = str(error).strip().splitlines()[0]
            raise OptionError(f"tokenizer: {tokenizer} has none that opens here ({reason:.200}).") from error
    if not hasattr(tokenizer, "save_pretrained"):
        raise OptionError(f"tokenizer is a tokenizer or processor, or the name of one, not {type(tokenizer).__name__}.")
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    if hasattr(inner, "get_vocab") and len(inner.get_vocab()) <= len(inner.all_special_ids):
        raise OptionError("tokenizer has no vocabulary: transformers opens a folder without tokenizer files as that.")
    tokenizer.save_pretrained(folder)
