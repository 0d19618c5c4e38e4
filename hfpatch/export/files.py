"""Writes an export's folder completely or not at all, with a tokenizer that opens again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from ..core.staging import staged_folder
from ..runtime.errors import PatchError

_SAMPLE = "The quick (brown) fox: 12.5 jumps; c1ccccc1O naïve\n"
_GENERIC = "PreTrainedTokenizerFast"  # reads tokenizer.json as it stands, whatever the model's type


@contextmanager
def staged(folder: Path, overwrite: bool = False, tokenizer: Any = None) -> Iterator[Path]:
    """Temporary folder that replaces `folder`, with a tokenizer or processor, when the context ends without an error.

    Raises:
        PatchError: as in `staged_folder`, or the tokenizer doesn't open again from there.
    """
    with staged_folder(folder, overwrite) as staging:
        yield staging
        if tokenizer is not None:
            save_tokenizer(tokenizer, staging)


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
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
        f"{type(tokenizer).__name__} would open as another class beside a model of this type, and split text in "
        "another way. Export without tokenizer=, and save it in a folder of its own."
    )


def _opens_equal(tokenizer: Any, folder: Path) -> bool:
    """Whether the Auto class opens a tokenizer that has the same special tokens and splits a sample in the same way."""
    sample = _SAMPLE + " ".join(sorted(tokenizer.get_vocab())[:50])
    try:
        opened = AutoTokenizer.from_pretrained(folder)
    except Exception:  # tokenizers fail in many ways
        return False
    return _settings_and_sample(tokenizer, sample) == _settings_and_sample(opened, sample)


def _settings_and_sample(tokenizer: Any, text: str) -> list[Any]:
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "padding_side")
    facts = [len(tokenizer), *(getattr(tokenizer, name, None) for name in names)]
    try:
        return [*facts, dict(tokenizer(text)), tokenizer.decode(tokenizer(text)["input_ids"])]
    except Exception as error:  # one that can't encode the sample must fail in the same way
        return [*facts, type(error).__name__]
