"""Calibration inputs of a repair: checked, stored on disk, and divided into fitted and held-out sequences."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..core.staging import save_temporary
from ..errors import OptionError
from ..measure.batches import read_batches
from ..measure.quiet_forward import fitting, give_back_memory, quiet
from ..measure.randomness import keep_random_state

HELD_OUT = 8  # one of every so many sequences is held out, for judging
_LEAST_OUTPUTS = 8  # at held-out tokens; fewer don't tell help from noise
_ROWS = 512  # of activations that are converted at once
_MOST = 100_000  # sequences; a generator that gives more is taken for an endless one


class Batches:
    """Calibration inputs stored on disk, the same in every pass, with masks of padding and of held-out rows.

    Args:
        calibration: what `read_batches` takes. Labels are dropped.
        model: the model that takes them.
        folder: where they are stored.
        tokenizer: for texts.

    Raises:
        OptionError: there are fewer than two sequences, too many, or the data isn't of a form that can be read.
    """

    def __init__(self, calibration: Any, model: PreTrainedModel, folder: Path, tokenizer: Any = None):
        self.folder = folder
        self._counts: list[int] = []
        self._masks: list[dict[str, Tensor]] = []
        takes = inspect.signature(model.forward).parameters
        self._always = {"use_cache": False} if "use_cache" in takes else {}
        if not getattr(model.config, "return_dict", True):
            self._always["return_dict"] = True
        for index, batch in enumerate(read_calibration(calibration, model, tokenizer)):
            inputs = {name: stored(value) for name, value in batch.items()}
            self._counts.append(count_sequences(inputs, model.main_input_name))
            masks = {name: inputs.get(name) for name in ("attention_mask", "decoder_attention_mask")}
            self._masks.append({name: mask for name, mask in masks.items() if isinstance(mask, Tensor)})
            save_temporary(inputs, self._path(index))
            if self.sequences > _MOST:
                raise OptionError(
                    f"calibration gave more than {_MOST:,} sequences: does its generator end? Some hundred sequences "
                    "are enough; take them with itertools.islice."
                )
        _require_two(self._counts)

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def sequences(self) -> int:
        return sum(self._counts)

    def _path(self, index: int) -> Path:
        return self.folder / f"inputs-{index}.pt"

    def inputs(self, index: int) -> dict[str, Any]:
        """Keyword arguments of a forward of one batch, on the CPU."""
        return {**torch.load(self._path(index), weights_only=True), **self._always}

    def count_of(self, index: int) -> int:
        """How many sequences a stored batch holds."""
        return self._counts[index]

    def held_out(self, index: int) -> Tensor:
        """Which of a batch's sequences are for judging: every eighth, or the last of fewer."""
        places = torch.arange(self._counts[index]) + sum(self._counts[:index])
        every = min(HELD_OUT, self.sequences)
        return places % every == every - 1

    def count_held_out(self) -> int:
        """How many sequences are for judging."""
        return sum(int(self.held_out(index).sum()) for index in range(len(self)))

    def mask(self, index: int, decoder: bool) -> Tensor | None:
        """1 where an input isn't padding, of the encoder's (or only) side or of the decoder's."""
        return self._masks[index].get("decoder_attention_mask" if decoder else "attention_mask")

    def rows(self, index: int, shape: torch.Size, decoder: bool) -> tuple[Tensor, Tensor]:
        """For activations (B, T, ..., d): which of the flattened rows count (no padding), and which are held out.

        Raises:
            OptionError: activations that can't be divided among the sequences.
        """
        rows, count = shape[:-1].numel(), self._counts[index]
        if rows % count:
            raise OptionError(f"activations of shape {tuple(shape)} can't be divided among {count} sequences.")
        mask = self.mask(index, decoder)
        valid = torch.ones(rows, dtype=torch.bool)
        if mask is not None and mask.dim() in (2, 3) and mask.numel() == rows:
            valid = mask.bool().flatten()
        return valid, self.held_out(index).repeat_interleave(rows // count)

    def row_pieces(self, index: int, decoder: bool, *values: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Activations (B, T, ..., d) as rows (n, d) without padding, some at a time, in float32 or wider.

        Yields which of the rows are held out, and the rows of each of the values.
        """
        device = values[0].device  # of a model in bfloat16, all rows of a wide layer would take much room in float32
        masks = [mask.to(device) for mask in self.rows(index, values[0].shape, decoder)]
        flat = [value.to(device).flatten(0, -2) for value in values]
        for valid, held_out, *parts in zip(*(one.split(_ROWS) for one in (*masks, *flat)), strict=True):
            rows = [part[valid] for part in parts]
            yield held_out[valid], *(row if row.dtype == torch.float64 else row.float() for row in rows)


def read_calibration(
    calibration: Any, model: PreTrainedModel, tokenizer: Any = None
) -> list[dict[str, Any]] | Iterator[dict[str, Any]]:
    """The inputs for a repair that `read_batches` makes of some data, without labels; a decoder reads them instead.

    Raises:
        OptionError: as in `read_batches`; of a list also if it holds one sequence.
    """
    batches = read_batches(calibration, model, tokenizer, option="calibration")
    inputs = (_without_labels(batch, index, model) for index, batch in enumerate(batches))
    if not isinstance(batches, list):
        return inputs
    listed = list(inputs)
    _require_two([count_sequences(batch, model.main_input_name) for batch in listed])
    return listed


def tried(batches: Iterable[dict[str, Any]], model: PreTrainedModel) -> Iterable[dict[str, Any]]:
    """The same inputs of a repair, after a forward of the first ones.

    Raises:
        OptionError: the model doesn't take them.
    """
    rest = iter(batches)
    with keep_random_state():  # a shuffling loader draws its order when its iterator is made
        first = next(rest)
    takes = inspect.signature(model.forward).parameters
    few = {name: value for name, value in {"logits_to_keep": 1, "use_cache": False}.items() if name in takes}
    with quiet(model):
        try:
            model(**fitting(model, first), **few)
        except Exception as error:
            raise OptionError(f"{type(model).__name__} doesn't take calibration batch 0: {error}") from error
    give_back_memory()
    return batches if isinstance(batches, list) else itertools.chain([first], rest)


def _without_labels(batch: dict[str, Any], index: int, model: PreTrainedModel) -> dict[str, Any]:
    """A batch without labels, refused where nothing is left; a decoder that has no other input reads them."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    labels = batch.get("labels")
    if not any(isinstance(value, Tensor) and value.dim() for value in inputs.values()):
        raise OptionError(f"calibration batch {index} holds no tensor with a batch axis besides labels.")
    decodes = model.config.is_encoder_decoder and not {"decoder_input_ids", "decoder_inputs_embeds"} & inputs.keys()
    if labels is not None and decodes:
        if not hasattr(model, "prepare_decoder_input_ids_from_labels"):
            return {**inputs, "labels": labels}
        inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=labels)
        inputs.setdefault("decoder_attention_mask", (labels != -100).long())
    return inputs


def count_sequences(inputs: Mapping[str, Any], main: str) -> int:
    """How many sequences a batch holds, by its main input where that is a tensor."""
    tensors = [inputs.get(main), *inputs.values()]
    return next(len(value) for value in tensors if isinstance(value, Tensor) and value.dim())


def _require_two(counts: list[int]) -> None:
    if sum(counts) < 2:
        raise OptionError(
            "calibration holds one sequence. At least two are needed, since one of every eight (of fewer, the last) is "
            "held out to judge the repair; some hundred make a good one."
        )


def require_enough(outputs: int, batches: Batches) -> None:
    """Refuse held-out sequences with so few tokens that help can't be told from noise.

    Raises:
        OptionError: says how many sequences are needed.
    """
    if outputs < _LEAST_OUTPUTS:
        held_out = batches.count_held_out()
        needed = HELD_OUT * math.ceil(_LEAST_OUTPUTS * held_out / max(outputs, 1))
        raise OptionError(
            f"calibration is too little to judge a repair: of {batches.sequences} sequences {held_out} are held out, "
            f"with {outputs} tokens (or outputs) in all, and {_LEAST_OUTPUTS} are needed. Pass {needed} sequences of "
            "this length, or longer ones; some hundred make a good repair."
        )


def stored(value: Any) -> Any:
    """A tensor in the form in which it is saved: on the CPU, without the memory of a larger base tensor."""
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value
