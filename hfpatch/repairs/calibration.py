"""Calibration inputs of a repair: checked, stored on disk, and split into fitted and held-out sequences."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..core.bare import has_weights
from ..core.mapped import Scratch
from ..core.scheme import Scheme
from ..errors import OptionError
from ..measure.batches import read_batches
from ..measure.inputs import main_input
from ..measure.quiet_forward import cast_for_model, free_unused_memory, inference_state
from ..measure.randomness import keep_random_state
from ..schemes.norm_schemes import Norm
from .near_duplicates import HELD_OUT, Key, divide, key_of, names_of
from .sample import SELF, require_generates, sample_batches

_GRIDS = "grid_thw"  # argument of vision towers that take the patches of several images in one tensor
_ENOUGH = "some hundred make a good repair."
_LEAST_OUTPUTS = 8  # held-out tokens, at least; fewer don't tell help from noise
_ROWS = 1024  # rows of activations that are converted at once
_TOKENS = 1024  # tokens that a CPU runs at once; more is no faster, takes more room, and makes steps of maps longer
_MOST = 100_000  # sequences; a generator that gives more counts as endless


class StoredBatch(NamedTuple):
    """What is known of a stored batch besides its inputs.

    Attributes:
        sequences: how many sequences it holds.
        judges: whether it is for judging.
        origin: index of the user's batch that it is a part of.
        divisible: whether its sequences can be run one by one, as in `is_divisible`.
        masks: its inputs that mark padding, by name.
    """

    sequences: int
    judges: bool
    origin: int
    divisible: bool
    masks: dict[str, Tensor]


class Batches:
    """Calibration batches stored on disk, split into batches to fit and batches to judge.

    No sequence to fit nearly equals a sequence to judge (see `near_duplicates.py`). A batch that can't be divided among
    its sequences (images packed into one tensor) counts as one sequence.

    Args:
        batches: keyword arguments of forwards, as `read_calibration` returns them.
        model: the model that takes them.

    Attributes:
        sequences, distinct: how many sequences were passed, and how many of them differ.
        tokens: how many tokens (or other positions of the main input) are fitted.
        longest: the most tokens that a sequence has; 0 if the main input isn't token ids.

    Raises:
        OptionError: there are fewer than two distinct sequences, or too many.
    """

    def __init__(self, batches: Iterable[dict[str, Any]], model: PreTrainedModel):
        self.sequences = self.distinct = self.tokens = self.longest = 0
        self._inputs, self._main = Scratch(), main_input(model)
        self._stored: list[StoredBatch] = []
        takes = inspect.signature(model.forward).parameters
        self._always = {"use_cache": False} if "use_cache" in takes else {}
        if not getattr(model.config, "return_dict", True):
            self._always["return_dict"] = True
        keys: list[Key] = []
        parts: list[int] = []  # how many sequences of each batch can be told apart
        for index, batch in enumerate(batches):
            self._inputs.put(("given", index), batch)
            inputs = self._inputs.get(("given", index))
            for name, value in inputs.items():
                if isinstance(value, Tensor) and "mask" not in name:  # a mask that is added to scores may be infinite
                    _require_finite(value, index, name)
            count = count_sequences(inputs, self._main)
            self.sequences += count
            found = self._keys(inputs, count)
            keys += found
            parts.append(len(found))
            if self.sequences > _MOST:
                raise OptionError(
                    f"calibration gave more than {_MOST:,} sequences: does its generator end? Some hundred sequences "
                    "are enough; take them with itertools.islice."
                )
        self._divide(keys, parts, model.device.type == "cpu")

    def _keys(self, inputs: dict[str, Any], count: int) -> list[Key]:
        """The keys by which a batch's sequences are compared; one key for the whole batch if it can't be divided."""
        first = _main_tensor(inputs, self._main)
        mask = inputs.get("attention_mask")
        if not first.is_floating_point():
            self.longest = max(self.longest, first.shape[-1])
        if not is_divisible(inputs, count):
            return [key_of(first, None)]
        masks = mask if isinstance(mask, Tensor) and mask.shape == first.shape else [None] * count
        return [key_of(row, row_mask) for row, row_mask in zip(first, masks, strict=True)]

    def _divide(self, keys: list[Key], parts: list[int], on_cpu: bool) -> None:
        """Store each batch anew in two parts: its sequences to fit, and its sequences to judge."""
        self.distinct = len(set(names_of(keys)))
        require_distinct(self.distinct, self.sequences)
        fitted, held_out = (set(places) for places in divide(keys))
        if not fitted:
            raise OptionError(
                f"calibration holds {self.distinct} distinct sequences of {self.sequences}, all nearly equal to those "
                f"that are held out to judge the repair. Pass sequences that differ; {_ENOUGH}"
            )
        place = 0
        for origin, several in enumerate(parts):
            inputs = self._inputs.get(("given", origin))
            count = count_sequences(inputs, self._main)
            at_once = _sequences_at_once(inputs.get(self._main)) if on_cpu else _MOST
            for side in (fitted, held_out):
                rows = torch.tensor([i - place for i in range(place, place + several) if i in side], dtype=torch.long)
                for few in rows.split(at_once) if len(rows) else ():
                    divided = rows_of(inputs, few, count) if is_divisible(inputs, count) else inputs
                    self._add(divided, side is held_out, origin)
            place += several
            self._inputs.drop(("given", origin))

    def _add(self, inputs: dict[str, Any], judges: bool, origin: int) -> None:
        count = count_sequences(inputs, self._main)
        names = ("attention_mask", "decoder_attention_mask")
        masks = {name: mask for name in names if isinstance(mask := inputs.get(name), Tensor)}
        self._inputs.put((len(self),), inputs)
        self._stored.append(StoredBatch(count, judges, origin, is_divisible(inputs, count), masks))
        if not judges:
            mask = masks.get("attention_mask")
            self.tokens += _main_tensor(inputs, self._main).shape[:2].numel() if mask is None else int(mask.sum())

    def __len__(self) -> int:
        return len(self._stored)

    def __getitem__(self, index: int) -> StoredBatch:
        return self._stored[index]

    def inputs(self, index: int) -> dict[str, Any]:
        """Return the keyword arguments of a forward of one batch, on the CPU."""
        return {**self._inputs.get((index,)), **self._always}

    def held_out_batches(self) -> list[int]:
        """Return the batches that are for judging."""
        return [index for index, batch in enumerate(self._stored) if batch.judges]

    def count_held_out(self) -> int:
        """Return how many sequences are for judging."""
        return sum(batch.sequences for batch in self._stored if batch.judges)

    def count_tokens(self, index: int) -> int:
        """Return how many positions the main input of a batch has, padding included."""
        return _main_tensor(self._inputs.get((index,)), self._main).shape[:2].numel()

    def single_rows(self, index: int) -> list[Tensor | None]:
        """Return a batch's sequences one by one, as rows for `BlockReplay.forward`; None for all at once."""
        batch = self._stored[index]
        return [torch.tensor([row]) for row in range(batch.sequences)] if batch.divisible else [None]

    def mask(self, index: int, decoder: bool) -> Tensor | None:
        """Return a mask with 1 where inputs aren't padding, of the encoder (or only) side or the decoder."""
        return self._stored[index].masks.get("decoder_attention_mask" if decoder else "attention_mask")

    def require_finite(self, index: int, activations: Any, decoder: bool, where: str) -> None:
        """Refuse a batch on which an activation of the original isn't finite; positions of padding don't count.

        Raises:
            OptionError: the message names the user's batch.
        """
        if isinstance(activations, Tensor):
            mask = self.mask(index, decoder)
            if mask is not None and mask.shape == activations.shape[:2]:
                activations = activations[mask.bool().to(activations.device)]
            _require_finite(activations, self._stored[index].origin, where)

    def rows(self, index: int, shape: torch.Size, decoder: bool) -> Tensor:
        """Return which rows of flattened activations (B, T, ..., d) aren't padding.

        Raises:
            OptionError: the activations can't be divided among the sequences.
        """
        rows, count = shape[:-1].numel(), self._stored[index].sequences
        if rows % count:
            raise OptionError(f"activations of shape {tuple(shape)} can't be divided among {count} sequences.")
        mask = self.mask(index, decoder)
        valid = torch.ones(rows, dtype=torch.bool)
        if mask is not None and mask.dim() in (2, 3) and mask.numel() == rows:
            valid = mask.bool().flatten()
        return valid

    def row_pieces(self, index: int, decoder: bool, *values: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield activations (B, T, ..., d) as rows (n, d) without padding, in float32 or wider; last, which judge."""
        device = values[0].device  # in bfloat16 models all rows of a wide layer would take much room in float32
        valid = self.rows(index, values[0].shape, decoder).to(device)
        flat = [value.to(device).flatten(0, -2) for value in values]
        for chosen, *parts in zip(*(one.split(_ROWS) for one in (valid, *flat)), strict=True):
            rows = parts if bool(chosen.all()) else [part[chosen] for part in parts]
            judge = torch.full((len(rows[0]),), self._stored[index].judges, device=device)
            yield *(row if row.dtype == torch.float64 else row.float() for row in rows), judge


def _require_finite(value: Tensor, batch: int, what: str) -> None:
    """Refuse a batch with a tensor that isn't finite.

    Raises:
        OptionError: the message names the batch.
    """
    if value.is_floating_point() and not bool(value.isfinite().all()):
        raise OptionError(
            f"calibration batch {batch}: its {what} isn't finite (NaN, or too large for {str(value.dtype)[6:]}). Leave "
            "the batch out, mend it, or load the model in a wider dtype."
        )


def _sequences_at_once(first: Any) -> int:
    """How many sequences of token ids a CPU runs at once; batches of images and sound aren't divided."""
    tokens = isinstance(first, Tensor) and first.dim() == 2 and not first.is_floating_point()
    return max(1, _TOKENS // first.shape[1]) if tokens else _MOST


def read_calibration(calibration: Any, model: PreTrainedModel, tokenizer: Any = None) -> Iterator[dict[str, Any]]:
    """Yield a repair's inputs from data, as `read_batches` does, without labels; a decoder reads them instead.

    Raises:
        OptionError: as in `read_batches`.
    """
    batches = read_batches(calibration, model, tokenizer, option="calibration")
    return (_without_labels(batch, index, model) for index, batch in enumerate(batches))


def require_data(model: PreTrainedModel, schemes: Iterable[Scheme], generates: bool) -> None:
    """Refuse a norm scheme whose starting values are measured on data, if there is no data.

    Args:
        model: the model; on the meta device it has no weights, and nothing is measured.
        schemes: the planned schemes.
        generates: whether the model can write its own calibration.

    Raises:
        OptionError: the message says what to pass.
    """
    for norm in schemes:
        if isinstance(norm, Norm) and norm.needs_calibration and has_weights(model):
            data = "'self' (sequences that the model writes), texts or inputs" if generates else "texts or inputs"
            raise OptionError(
                f"norm={str(norm)!r} puts a constant in place of 1/sigma, which is measured on data: pass calibration= "
                f"({data}; --calibration), or init='reset' to train from scratch."
            )


class Calibration:
    """Data of a repair, read once: when the repair, or prices of norms, first ask for it.

    Args:
        data: what `read_batches` takes, "self", or a function that draws such data from the original.
        tokenizer: for texts.

    Attributes:
        drawn: whether a function draws the data: `sample_batches`, or the user's.
        prices: by norm, what its replacement alone costs on the data; empty without a budget.
    """

    def __init__(self, data: Any, tokenizer: Any = None):
        draw = sample_batches if isinstance(data, str) and data == SELF else data
        self.drawn = callable(draw)
        self._read = lambda model: read_calibration(draw(model) if self.drawn else data, model, tokenizer)
        self._batches: Batches | None = None
        self.prices: dict[str, float] = {}

    def batches(self, original: PreTrainedModel) -> Batches:
        """Return the data as batches that the original takes.

        Raises:
            OptionError: as in `read_batches` and `Batches`; or the original can't write data.
        """
        self._batches = self._batches or Batches(self._read(original), original)
        return self._batches


def calibration_for(model: PreTrainedModel, data: Any, tokenizer: Any) -> Calibration:
    """Return the calibration of `patch_model(calibration=data)`, read already; "self" is read when a repair needs it.

    Raises:
        OptionError: there are no inputs, or the model can't run them or has no weights; "self", and it can't generate.
    """
    if not has_weights(model):
        raise OptionError("calibration needs weights, and this model has none yet (meta device). Load it first.")
    found = Calibration(data, tokenizer)
    if found.drawn:
        require_generates(model)
        return found
    with keep_random_state():  # a shuffling loader draws its order
        batches = found.batches(model)
    takes = inspect.signature(model.forward).parameters
    few = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
    with inference_state(model):
        try:
            model(**cast_for_model(model, batches.inputs(0)), **few)
        except Exception as error:
            raise OptionError(f"{type(model).__name__} doesn't take calibration batch 0: {error}") from error
    free_unused_memory()
    return found


def _without_labels(batch: dict[str, Any], index: int, model: PreTrainedModel) -> dict[str, Any]:
    """A batch without labels, refused if no input is left; a decoder that has no other input reads the labels."""
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
    """Return how many sequences a batch holds, by its main input if that is a tensor.

    Images' patches that are packed into one tensor, with their grids in `grid_thw`, count as one sequence.
    """
    if _GRIDS in inputs:
        return 1
    return len(_main_tensor(inputs, main))


def _main_tensor(inputs: Mapping[str, Any], main: str) -> Tensor:
    """A batch's main input; its largest tensor if that isn't a tensor."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and value.dim()}
    return tensors[main] if main in tensors else max(tensors.values(), key=Tensor.numel)


def is_divisible(inputs: Mapping[str, Any], count: int) -> bool:
    """Return whether every tensor of a batch has a row for each of its sequences, or is the same for all of them."""
    return all(len(value) in (count, 1) for value in inputs.values() if isinstance(value, Tensor) and value.dim())


def rows_of(inputs: Mapping[str, Any], rows: Tensor, count: int) -> dict[str, Any]:
    """Return some sequences of a batch that `is_divisible`."""
    divided = {name: isinstance(one, Tensor) and one.dim() and len(one) == count for name, one in inputs.items()}
    return {name: value[rows] if divided[name] else value for name, value in inputs.items()}


def require_distinct(distinct: int, sequences: int) -> None:
    """Refuse calibration without two different sequences.

    Raises:
        OptionError: the message says how many there are.
    """
    if distinct < 2:
        found = "one sequence" if sequences == 1 else f"one distinct sequence, {sequences} times"
        raise OptionError(
            f"calibration holds {found}. At least two that differ are needed, since one of every {HELD_OUT} (two of 4 "
            f"to 15; the last of fewer) is held out to judge the repair; {_ENOUGH}"
        )


def require_enough(outputs: int, batches: Batches) -> None:
    """Refuse held-out sequences with too few tokens to tell an improvement from noise.

    Raises:
        OptionError: the message says how many sequences are needed.
    """
    if outputs < _LEAST_OUTPUTS:
        held_out = batches.count_held_out()
        needed = HELD_OUT * math.ceil(_LEAST_OUTPUTS * held_out / max(outputs, 1))
        raise OptionError(
            f"calibration is too little to judge a repair: of {batches.sequences} sequences {held_out} are held out, "
            f"with {outputs} tokens (or outputs) in all, and {_LEAST_OUTPUTS} are needed. Pass {needed} different "
            f"sequences of this length, or longer ones; {_ENOUGH}"
        )
