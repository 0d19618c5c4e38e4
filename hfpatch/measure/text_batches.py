"""Batches of inputs from a text file, by the tokenizer that comes with a checkpoint."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoProcessor, PreTrainedModel

from ..runtime.errors import PatchError, first_line

BATCH = 8
_WORD_START = "\u2581"  # of SentencePiece; an invented Unigram tokenizer knows no other token


def tokenizer_of(processor: Any) -> Any:
    """The tokenizer itself, or the one inside a processor; None if there is none."""
    tokenizer = getattr(processor, "tokenizer", processor)
    return tokenizer if hasattr(tokenizer, "get_vocab") else None


def processor_of(checkpoint: str, trust_remote_code: bool = False) -> Any:
    """A checkpoint's tokenizer or processor, None where it has none that opens."""
    try:
        processor = AutoProcessor.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
    except Exception:  # they fail in many ways (missing files, missing packages); none spoils the model
        return None
    tokenizer = tokenizer_of(processor)
    if tokenizer is not None and tokenizer.get_vocab().keys() <= {*tokenizer.all_special_tokens, _WORD_START}:
        return None  # invented by transformers for a folder without a tokenizer's files
    return processor


def text_batches(
    text: Path, model: PreTrainedModel, processor: Any, examples: int, length: int
) -> list[dict[str, Tensor]]:
    """The first lines of a file that aren't empty, one example each, in padded batches.

    Args:
        text: a file in UTF-8.
        model: what takes the batches; arguments that its forward doesn't have are left out.
        processor: a tokenizer, or a processor that has one.
        examples: how many lines, at most.
        length: tokens of a line, at most; the model's and the tokenizer's own limits hold as well.

    Raises:
        PatchError: there is no such file, no line of text in it, or no tokenizer that takes it.
    """
    if not text.is_file():
        raise PatchError(f"there is no text file {text}.")
    tokenizer = tokenizer_of(processor)
    if tokenizer is None:
        raise PatchError(f"no tokenizer for the text in {text} comes with the model.")
    lines = [line for line in text.read_text(encoding="utf-8").splitlines() if line.strip()][:examples]
    if not lines:
        raise PatchError(f"{text} holds no line of text.")
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    size = BATCH if tokenizer.pad_token is not None else 1
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or length
    cut = min(length, longest, tokenizer.model_max_length)
    takes = inspect.signature(model.forward).parameters
    batches = []
    for i in range(0, len(lines), size):
        few = lines[i : i + size]
        try:
            encoded = tokenizer(few, return_tensors="pt", truncation=True, max_length=cut, padding=size > 1)
        except Exception as error:  # whatever a tokenizer raises about text that isn't its own kind
            raise PatchError(f"the tokenizer takes no such text ({first_line(error):.200}): {few[0]:.60}") from error
        batches.append({name: value for name, value in encoded.items() if name in takes})
    return batches
