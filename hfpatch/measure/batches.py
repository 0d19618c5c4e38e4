"""Converts user data (texts, rows, batches) to batches of model inputs, with a checkpoint's tokenizer."""

from __future__ import annotations

import copy
import functools
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoProcessor, BatchEncoding, BatchFeature, PreTrainedModel

from ..core.holders import model_inside, tokenizer_owner
from ..core.registry import nearest
from ..errors import OptionError
from ..runtime.patch_errors import first_line
from .inputs import input_embedding, longest_text, main_input, text_config

Batch = Mapping[str, Any]
SEQUENCES, LENGTH, BATCH = 256, 128, 8
# Number of axes of a single sequence in an input; a batch has one axis more.
_AXES = {"input_ids": 1, "inputs_embeds": 2, "input_values": 1, "input_features": 2, "pixel_values": 3}
# Inputs beside images that are given as patches, (N, d) each: the patches' places, or numbers of rows and columns.
_OF_PATCHES = {"pixel_position_ids", "spatial_shapes"}
_WORD_START = "\u2581"  # of SentencePiece; an invented Unigram tokenizer knows no other token
_WORKS = (
    '{} takes texts with tokenizer=tokenizer: ["a text", ...], a datasets.Dataset, "file.txt" with one text a line; '
    'or dictionaries of inputs: rows such as [{{"input_ids": [1, 2, 3]}}, ...], what a tokenizer returns, a DataLoader.'
)


def read_batches(
    data: Any,
    model: Any,
    tokenizer: Any = None,
    *,
    sequences: int = SEQUENCES,
    length: int = LENGTH,
    option: str = "batches",
) -> list[dict[str, Any]] | Iterator[dict[str, Any]]:
    """Return texts, rows or batches as batches of inputs for `model`, as `calibration=` and `verify` read them.

    Args:
        data: one of these, or an iterable of them, such as a list, a DataLoader or a generator. Strings are left out of
            rows and batches. Inputs that the forward doesn't take are left out of rows and of a tokenizer's output.

            * texts: strings, rows with a column of strings (a datasets.Dataset; of several such columns the column
              "text"), or a path of a text file, one text a line. Empty texts are left out.
            * rows: one sequence each, as dictionaries of lists (a tokenised datasets.Dataset, a tokenizer's output for
              one text). They are padded on the right and get an attention mask.
            * batches: dictionaries of tensors or of lists (padded, too), as a DataLoader gives; or the main input.
        model: the model that takes the inputs; it isn't run. An encoder-decoder that is given input_ids alone reads
            them, shifted by one, in its decoder too.
        tokenizer: a tokenizer, or a processor that has a tokenizer; needed for texts. It stays as it is.
        sequences: how many texts and rows are read, at most; all batches are read.
        length: tokens of a text, at most; the model's and the tokenizer's own limits hold as well. Rows and batches
            keep their length.
        option: what messages call the data.

    Returns:
        Keyword arguments of forwards, on the device where they were: a list, or an iterator if `data` is a stream (a
        generator, a DataLoader, a Dataset), which is read as the iterator is read.

    Raises:
        OptionError: the data is none of these, is empty, holds texts without a tokenizer, or isn't the model's input.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16))
        >>> from hfpatch import read_batches
        >>> read_batches([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}], model)[0]["attention_mask"]
        tensor([[1, 1, 1],
                [1, 1, 0]])
    """
    inner, items = model_inside(model), _items(data, sequences, option)
    if tokenizer is None and inner is not model:
        tokenizer = tokenizer_owner(model)
    batches = _Reader(inner, tokenizer, sequences, length, option).read(items)
    return list(batches) if isinstance(items, list | tuple) else batches


def require_example(inputs: Any, model: PreTrainedModel) -> None:
    """Refuse an `example_inputs=` that isn't keyword arguments of a model's forward, or None.

    Raises:
        OptionError: they aren't; the message says what they are, or which of them the forward doesn't take.
    """
    if inputs is None:
        return
    option = "example_inputs"
    if not isinstance(inputs, Mapping):
        raise OptionError(
            f"{option} takes the keyword arguments of one forward, as in {{{main_input(model)!r}: ...}}, not "
            f"{type(inputs).__name__}."
        )
    _Reader(model, None, 1, LENGTH, option).require_inputs(inputs, option)
    _require_values(inputs, option, model)


def _items(data: Any, sequences: int, option: str) -> Iterable[Any]:
    """The items of the data: a list or tuple if the data is in memory."""
    if isinstance(data, str | os.PathLike):
        return lines_of(data, sequences + 1, option)
    if isinstance(data, Mapping | Tensor):
        return [data]
    # a table (of pandas, say) iterates over the names of its columns
    if not hasattr(data, "columns") and (isinstance(data, Iterable) or hasattr(data, "__getitem__")):
        return data
    raise OptionError(f"{_WORKS.format(option)} Not {type(data).__name__}.")


@dataclass
class _Reader:
    """Turns items into batches of inputs; texts and rows are collected until they fill a batch."""

    model: PreTrainedModel
    tokenizer: Any
    sequences: int
    length: int
    option: str
    count: int = 0  # batches

    def __post_init__(self) -> None:
        parameters = signature(self.model.forward).parameters
        self.main = main_input(self.model)
        self.takes = parameters.keys() | {self.main}
        self.takes_others = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        self.of_patches = bool(_OF_PATCHES & self.takes)
        # Without a mask the model would read a sequence's padding.
        self.together = BATCH if "attention_mask" in parameters or self.main != "input_ids" else 1

    def read(self, items: Iterable[Any]) -> Iterator[dict[str, Any]]:
        """Yield all batches, in order."""
        rows: list[Mapping[str, Any]] = []
        read = 0
        for is_row, columns in (found for number, item in enumerate(items) for found in self._of(item, number)):
            if rows and (not is_row or read == self.sequences or len(rows) == self.together):
                yield self._to_arguments(rows)
                rows = []
            if not is_row:
                yield self._to_arguments(columns)
            elif read == self.sequences:
                return
            else:
                rows.append(columns)
                read += 1
        if rows:
            yield self._to_arguments(rows)
        if not self.count:
            raise OptionError(
                f"{self.option} is empty: it holds no batch and no text. (An iterator can be read only once; pass a "
                "list.)"
            )

    def _of(self, item: Any, number: int) -> Iterator[tuple[bool, Mapping[str, Any]]]:
        """Yield the rows in an item, or the item as a batch, each with whether it is a row."""
        place = f"{self.option}: item {number}"
        item = {self.main: item} if isinstance(item, Tensor) else item
        texts = self._text_column(item) if isinstance(item, Mapping) else _texts(item)
        if texts is not None:
            yield from ((True, row) for text in texts if text.strip() and len((row := self._encode(text))[self.main]))
            return
        if not isinstance(item, Mapping):
            raise OptionError(f"{place} is {type(item).__name__}. {_WORKS.format('It')}")
        columns = {name: value for name, value in item.items() if name in self.takes or not _is_text(value)}
        like = self._like(columns)
        value: Any = None if like is None else columns[like]
        if like is not None and _count_axes(value) == _AXES[like] - (like == "pixel_values" and self.of_patches):
            self.require_inputs(columns, place, of_row=True)
            if len(value):
                yield True, {name: one for name, one in columns.items() if name in self.takes and one is not None}
        elif like is not None and _are_tensors(value):
            raise OptionError(
                f"{place} has a list of tensors as {like}. Pad them into one tensor; a DataLoader of a "
                "datasets.Dataset gives such lists unless it reads dataset.with_format('torch')."
            )
        elif isinstance(item, BatchEncoding | BatchFeature) and not self.takes_others:
            yield False, {name: one for name, one in columns.items() if name in self.takes}
        else:
            yield False, columns

    def _like(self, columns: Iterable[str]) -> str | None:
        """The input that shows the number and length of sequences: the main input, or an input that stands for it."""
        return next((name for name in (self.main, *_AXES) if name in columns and name in _AXES), None)

    def _text_column(self, item: Mapping[str, Any]) -> list[str] | None:
        """The texts in a row, or in a batch of rows; None if it holds inputs.

        Raises:
            OptionError: there are several columns of text.
        """
        if any(name in self.takes and name != "labels" and not _is_text(value) for name, value in item.items()):
            return None
        found = {name: texts for name, value in item.items() if (texts := _texts(value)) is not None}
        if len(found) > 1 and "text" not in found:
            names = ", ".join(map(repr, found))
            raise OptionError(
                f"{self.option} has several columns of text ({names}): pass one, as dataset[{next(iter(found))!r}], or "
                "tokenise them yourself."
            )
        return found.get("text", next(iter(found.values()), None))

    @functools.cached_property
    def _tokenizer(self) -> Any:
        return copy_tokenizer(self.tokenizer, self.option)

    def _encode(self, text: str) -> Mapping[str, Any]:
        """A text as a row, truncated at `length` and the limits of tokenizer and model."""
        limits = longest_text(self.model), getattr(self._tokenizer, "model_max_length", None)
        try:
            encoded = self._tokenizer(text, truncation=True, max_length=min([self.length, *filter(None, limits)]))
        except Exception as error:  # tokenizers raise errors of any type for text of another kind
            raise OptionError(
                f"{self.option}: the tokenizer takes no such text ({first_line(error):.200}): {text:.60}"
            ) from error
        if self.main not in encoded or self.main not in self.takes:
            raise OptionError(
                f"{self.option} holds text, and {type(self.model).__name__} reads {self.main}: pass batches of it."
            )
        return {name: values for name, values in encoded.items() if name in self.takes}

    # One batch

    def _to_arguments(self, given: Mapping[str, Any] | list[Mapping[str, Any]]) -> dict[str, Any]:
        """A batch, or rows, as keyword arguments of the forward: lists as tensors, checked and completed."""
        columns: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
        if isinstance(given, list):
            columns = {name: [row[name] for row in given] for name in given[0] if all(name in row for row in given)}
        place = f"{self.option} batch {self.count}" if self.option != "batches" else f"batch {self.count}"
        self.count += 1
        self.require_inputs(columns, place)
        batch: dict[str, Any] = {}
        for name, value in columns.items():
            listed = isinstance(value, list | tuple) or (hasattr(value, "__array__") and not isinstance(value, Tensor))
            stacked = isinstance(given, list) or (listed and not _are_tensors(value))
            batch[name] = self._stack(name, value, place) if stacked else value
        like = self._like(columns)
        if (
            like is not None
            and isinstance(columns[like], list | tuple)
            and "attention_mask" in self.takes - batch.keys()
        ):
            ones = [torch.ones(len(one), dtype=torch.long) for one in columns[like]]
            if len({len(one) for one in ones}) > 1:
                batch["attention_mask"] = pad_sequence(ones, True)
        _require_values(batch, place, self.model)
        return _add_decoder_inputs(batch, self.model)

    def _stack(self, name: str, values: Any, place: str) -> Tensor:
        """One input of several sequences as a tensor, padded on the right if they differ in length."""
        try:
            each = [torch.as_tensor(value) for value in values]
            if len({one.shape for one in each}) > 1:
                return pad_sequence(each, batch_first=True, padding_value=self._padding(name))
            return torch.stack(each) if each else torch.empty(0)
        except (ValueError, TypeError, RuntimeError) as error:
            raise OptionError(f"{place}: {name} can't be made a tensor: {first_line(error)}") from error

    def _padding(self, name: str) -> int:
        """The value that fills up a column's shorter sequences, where the mask is 0."""
        if name in ("input_ids", "decoder_input_ids"):
            pad = getattr(text_config(self.model.config), "pad_token_id", None)
            table = input_embedding(self.model)
            return pad if isinstance(pad, int) and 0 <= pad < (table.num_embeddings if table else pad + 1) else 0
        return -100 if name == "labels" else 0

    def require_inputs(self, columns: Iterable[str], place: str, of_row: bool = False) -> None:
        """Refuse misspelt names, and inputs of a batch that the forward doesn't take; rows may have other columns.

        Raises:
            OptionError: there is such an input; the message names it, and the input that was meant.
        """
        kind = type(self.model).__name__
        # a row's "label" is not an input, nor a misspelt "labels"
        known = self.takes - {"labels"} if of_row else self.takes
        for name in columns:
            meant = None if name in self.takes else nearest(name, known, cutoff=0.85)
            if meant or not (name in self.takes or of_row or self.takes_others):
                hint = f"Did you mean {meant!r}?" if meant else "Leave it out."
                raise OptionError(f"{place} has {name!r}, which {kind}.forward doesn't take. {hint}")
        if columns and not of_row and not set(columns) & self.takes:
            names = ", ".join(map(repr, columns))
            raise OptionError(f"{place} has {names}, and {kind} takes none of these; it reads {self.main}.")


def _texts(value: Any) -> list[str] | None:
    """A text or a list of texts, as a list; None for anything else."""
    if isinstance(value, str):
        return [value]
    several = isinstance(value, list | tuple) and value and all(isinstance(one, str) for one in value)
    return list(value) if several else None


def _is_text(value: Any) -> bool:
    """Whether a value is a string, or None as missing values are."""
    return value is None or _texts(value) is not None


def _are_tensors(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(one, Tensor) for one in value)


def _count_axes(value: Any) -> int:
    axes = 0
    while isinstance(value, list | tuple):
        axes, value = axes + 1, value[0] if value else None
    return axes + getattr(value, "ndim", 0)


def _require_values(batch: Batch, place: str, model: PreTrainedModel) -> None:
    """Refuse inputs that are empty or masked throughout, and tokens for which the model's embedding has no row."""
    for name, value in batch.items():
        if isinstance(value, Tensor) and not value.numel():
            raise OptionError(f"{place}: {name} is empty, shape {tuple(value.shape)}.")
    for name in ("attention_mask", "decoder_attention_mask"):
        mask = batch.get(name)
        if isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.any()):
            raise OptionError(f"{place}: {name} is zero everywhere, so no position counts.")
    if not any(isinstance(value, Tensor) for value in batch.values()):
        raise OptionError(f"{place} holds no tensor.")
    table, ids = input_embedding(model), batch.get("input_ids")
    if table is not None and isinstance(ids, Tensor) and not ids.is_floating_point():
        least, most = int(ids.min()), int(ids.max())
        if least < 0 or most >= table.num_embeddings:
            raise OptionError(
                f"{type(model).__name__} doesn't take {place}: it has tokens {least} to {most}, and the embedding's "
                f"rows are 0 to {table.num_embeddings - 1}."
            )


def _add_decoder_inputs(batch: dict[str, Any], model: PreTrainedModel) -> dict[str, Any]:
    """An encoder-decoder given input_ids alone reads them in its decoder too, shifted by one."""
    tokens, start = batch.get("input_ids"), getattr(model.config, "decoder_start_token_id", None)
    has_decoder = {"decoder_input_ids", "decoder_inputs_embeds", "labels"} & batch.keys()
    takes = signature(model.forward).parameters
    if tokens is None or has_decoder or "decoder_input_ids" not in takes or not model.config.is_encoder_decoder:
        return batch
    start = start if start is not None else getattr(model.config, "pad_token_id", None) or 0
    shifted = torch.cat((torch.full_like(tokens[:, :1], start), tokens[:, :-1]), dim=1)
    batch = {**batch, "decoder_input_ids": shifted}
    if "attention_mask" in batch and "decoder_attention_mask" in takes:
        batch["decoder_attention_mask"] = batch["attention_mask"]
    return batch


def count_examples(batch: Batch) -> int:
    """Return how many examples a batch holds."""
    return next(len(value) for value in batch.values() if isinstance(value, Tensor) and value.dim())


def count_tokens(batch: Batch) -> int:
    """Return how many tokens of a batch aren't padding; 0 if it has no token ids."""
    tokens, mask = batch.get("input_ids"), batch.get("attention_mask")
    if not isinstance(tokens, Tensor):
        return 0
    fits = isinstance(mask, Tensor) and mask.shape == tokens.shape
    return int((mask != 0).sum()) if fits else tokens.numel()  # type: ignore[union-attr]


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
