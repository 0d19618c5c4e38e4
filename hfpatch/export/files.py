"""Writes an export's folder completely or not at all, with a tokenizer that opens again."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from ..errors import OptionError
from ..runtime.errors import PatchError

_SAMPLE = "The quick (brown) fox: 12.5 jumps; c1ccccc1O naïve\n"
_GENERIC = "PreTrainedTokenizerFast"  # reads tokenizer.json as it stands, whatever the model's type


def require_free(folder: Path, overwrite: bool = False) -> None:
    """Refuse a file, and a folder that isn't empty unless it is to be overwritten.

    Raises:
        PatchError: it is one of these.
    """
    if folder.is_file():
        raise PatchError(f"{folder} is a file; a folder is needed.")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise PatchError(f"{folder} isn't empty. Choose another folder, or ask to overwrite it.")


def require_plain_options(options: Mapping[str, Any]) -> None:
    """Refuse options of `save_pretrained` with which an export would save or publish something else.

    Raises:
        OptionError: names the option.
    """
    for option in ("push_to_hub", "state_dict", "distributed_checkpoint", "is_main_process"):
        if option in options:
            raise OptionError(f"{option}= isn't an option here: what is saved is the model that was checked.")


@contextmanager
def staged(folder: Path, overwrite: bool = False, tokenizer: Any = None) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its place once everything inside the context has succeeded.

    Args:
        folder: what is written in the end.
        overwrite: whether a folder that isn't empty is replaced.
        tokenizer: a tokenizer or processor that is saved last.

    Raises:
        PatchError: as in `require_free`; nothing can be written there; the tokenizer doesn't open again from there.
    """
    require_free(folder, overwrite)
    folder = folder.absolute()
    staging = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
    replaced = staging.with_name(f"{staging.name}-replaced")
    try:
        staging.mkdir(parents=True)
    except OSError as error:
        raise PatchError(f"{folder} can't be written: {error.strerror}. Choose another folder.") from error
    try:
        yield staging
        if tokenizer is not None:
            _save_tokenizer(tokenizer, staging)
        if folder.is_dir():
            folder.rename(replaced)
        staging.rename(folder)
    except BaseException:
        if replaced.is_dir() and not folder.exists():
            replaced.rename(folder)
        shutil.rmtree(staging, ignore_errors=True)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save a tokenizer or processor beside a model's config, and check that the Auto class opens the same one.

    An Auto class goes by the model's type as well as by the tokenizer's config; where that gives another tokenizer, the
    config is changed to name the class that reads `tokenizer.json` as it stands.

    Raises:
        PatchError: it opens as another tokenizer all the same.
    """
    tokenizer.save_pretrained(folder)
    if not hasattr(tokenizer, "get_vocab") or _opens_equal(tokenizer, folder):  # processors have no vocabulary
        return
    path = folder / "tokenizer_config.json"
    if path.is_file() and (folder / "tokenizer.json").is_file():
        stored = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**stored, "tokenizer_class": _GENERIC}, indent=2) + "\n", encoding="utf-8")
        if _opens_equal(tokenizer, folder):
            return
    raise PatchError(
        f"{type(tokenizer).__name__} doesn't open again beside a model of this type: it would split text otherwise. "
        "Export without tokenizer=, and save it in a folder of its own."
    )


def _opens_equal(tokenizer: Any, folder: Path) -> bool:
    """Whether the Auto class opens a tokenizer that has the same special tokens and splits a sample in the same way."""
    sample = _SAMPLE + " ".join(sorted(tokenizer.get_vocab())[:50])
    try:
        opened = AutoTokenizer.from_pretrained(folder)
    except Exception:  # tokenizers fail in many ways
        return False
    return _behaviour(tokenizer, sample) == _behaviour(opened, sample)


def _behaviour(tokenizer: Any, text: str) -> list[Any]:
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "padding_side")
    facts = [len(tokenizer), *(getattr(tokenizer, name, None) for name in names)]
    try:
        return [*facts, dict(tokenizer(text)), tokenizer.decode(tokenizer(text)["input_ids"])]
    except Exception as error:  # one that can't encode the sample must fail in the same way
        return [*facts, type(error).__name__]
