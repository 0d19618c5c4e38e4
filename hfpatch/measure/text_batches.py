"""Tokenization of texts and text files with a checkpoint's tokenizer."""

from __future__ import annotations

import copy
import itertools
import os
from typing import Any

from transformers import AutoProcessor

from ..errors import OptionError

_WORD_START = "\u2581"  # of SentencePiece; an invented Unigram tokenizer knows no other token


def tokenizer_of(processor: Any) -> Any:
    """Return a tokenizer itself, or the tokenizer inside a processor; None if there is none."""
    tokenizer = getattr(processor, "tokenizer", processor)
    return tokenizer if hasattr(tokenizer, "get_vocab") else None


def processor_of(checkpoint: str, trust_remote_code: bool = False) -> Any:
    """Return a checkpoint's tokenizer or processor; None if neither opens."""
    try:
        processor = AutoProcessor.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
    except Exception:  # tokenizers fail in many ways (missing files or packages); the model is still usable
        return None
    tokenizer = tokenizer_of(processor)
    if tokenizer is not None and tokenizer.get_vocab().keys() <= {*tokenizer.all_special_tokens, _WORD_START}:
        return None  # invented by transformers for a folder without a tokenizer's files
    return processor


def copy_tokenizer(processor: Any, option: str) -> Any:
    """Return a copy of the tokenizer, since calls change what it would save.

    Raises:
        OptionError: there is no tokenizer.
    """
    if processor is None:
        raise OptionError(f"{option} holds text: pass tokenizer=, the model's tokenizer or processor.")
    tokenizer = tokenizer_of(processor)
    if not callable(tokenizer):
        raise OptionError(f"tokenizer= takes a tokenizer or a processor that has one, not {type(processor).__name__}.")
    return copy.deepcopy(tokenizer)


def lines_of(path: str | os.PathLike[str], most: int, option: str) -> list[str]:
    """Return the first lines of a text file that aren't empty.

    Raises:
        OptionError: there is no such file, or it isn't text in UTF-8.
    """
    if not os.path.isfile(path):
        raise OptionError(
            f"there is no text file {os.fspath(path):.200}. In Python, texts themselves are passed as a list of "
            "strings."
        )
    try:
        with open(path, encoding="utf-8") as file:
            return list(itertools.islice((line.rstrip("\n") for line in file if line.strip()), most))
    except UnicodeDecodeError as error:
        raise OptionError(f"{option}: {os.fspath(path)} isn't text in UTF-8: {error}.") from error
