"""Fresh sequences that nobody calibrated on, with the original's outputs, to report what a repair does there.

There are three kinds, each of texts alone: sequences that the original writes; the calibration with random tokens in
place of its own; and, if the calibration is much shorter than the model's positions, held-out sequences joined into
longer sequences, since nothing else shows what a repair does at later positions. No labels are needed, since the
outputs are compared with the original's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..core.mapped import Scratch
from ..errors import OptionError
from ..measure.inputs import longest_text, redrawn_tokens
from ..measure.quiet_forward import cast, device_of
from .calibration import Batches, rows_of
from .distance import comparable, mean_and_worst, token_distances
from .reference import refusing_failures
from .repair_report import Fresh, Judgement, is_short
from .sample import generates, sample_batches

_LONG, _TIMES = 512, 8  # longer sequences have at most so many tokens, and so many times the calibration's
_SEQUENCES = {Fresh.LONGER: 4, Fresh.OWN: 16, Fresh.RANDOM: 32}  # at most, of each kind
_TOKENS = 2048  # at most, of each kind
_NUMBERS = 2**26  # outputs of the original that are stored, for each kind
_SIDES = ("", "decoder_")  # prefixes of an encoder-decoder's inputs
_PLAIN = {f"{side}{name}" for side in _SIDES for name in ("input_ids", "attention_mask")} | {"token_type_ids"}

Found = dict[str, list[Tensor]]  # kind -> the distances at the tokens of each sequence


class FreshSequences:
    """Fresh sequences of one repair; models that read more than token ids have none.

    Args:
        batches: the calibration.
        model, reference: the patched model, and the original, which is run here.
        writes: whether sequences that the original writes are fresh; they may not be if the calibration was drawn.
    """

    def __init__(self, batches: Batches, model: PreTrainedModel, reference: PreTrainedModel, writes: bool):
        self.model = model
        self._inputs: list[tuple[str, dict[str, Any]]] = []
        self._outputs = Scratch()
        plain = [one for i in range(len(batches)) if set(one := _tensors(batches.inputs(i))) <= _PLAIN]
        if len(plain) < len(batches) or any(one["input_ids"].dim() != 2 for one in plain if "input_ids" in one):
            return
        if not all("input_ids" in one for one in plain):
            return
        held_out = [_tensors(batches.inputs(i)) for i in batches.held_out_batches()]
        limit = min(longest_text(one) or 0 for one in (reference, model))  # 0 if a config sets none
        kinds = {Fresh.LONGER: _longer(batches, held_out, limit)}
        kinds[Fresh.RANDOM] = ({**row, **_redrawn(row, reference, i)} for i, row in enumerate(_rows(plain)))
        if writes and generates(reference):
            length = max(2, min(batches.longest or 2, _TOKENS // _SEQUENCES[Fresh.OWN]))
            with contextlib.suppress(OptionError):  # its generate() fails
                kinds[Fresh.OWN] = _rows(sample_batches(reference, _SEQUENCES[Fresh.OWN], length))
        for kind, rows in kinds.items():
            self._store(kind, rows, reference)

    def _store(self, kind: Fresh, rows: Iterator[dict[str, Tensor]], reference: PreTrainedModel) -> None:
        """Run the original on sequences of a kind, all of one shape at once, and store its outputs."""
        by_shape: dict[tuple[Any, ...], list[dict[str, Tensor]]] = {}
        tokens = 0
        for row in islice(rows, _SEQUENCES[kind]):
            if tokens >= _TOKENS:
                break
            tokens += row["input_ids"].numel()
            by_shape.setdefault(tuple((name, x.shape) for name, x in row.items()), []).append(row)
        numbers = 0
        for few in by_shape.values():
            inputs = {name: torch.cat([row[name] for row in few]) for name in few[0]}
            try:
                output = comparable(_run(reference, inputs))
            except Exception:  # from the original's own code, on inputs that its user may never give
                continue
            self._outputs.put((len(self._inputs),), output)
            self._inputs.append((kind, inputs))
            numbers += sum(value.numel() for value in output.values())
            if numbers >= _NUMBERS:
                break

    def distances(self) -> Found:
        """Return the patched model's present distances from the original, where the original's outputs aren't NaN."""
        found: Found = {}
        for i, (kind, inputs) in enumerate(self._inputs):
            original = self._outputs.get((i,))
            with refusing_failures(self.model):
                distances = token_distances(original, comparable(_run(self.model, inputs)))[1]
            numbers = ~next(iter(original.values())).isnan().flatten(1).any(1)
            found.setdefault(kind, []).extend(row.flatten() for row in distances[numbers])
        return {kind: rows for kind, rows in found.items() if rows}

    def judgements(self, before: Found, after: Found) -> list[Judgement]:
        """Return a judgement for each kind from the distances before and after a repair."""
        found = []
        for kind, rows in before.items():
            shapes = [x.shape for one, inputs in self._inputs if one == kind for x in inputs.values()]
            figures = [mean_and_worst(torch.cat(one[kind])) for one in (before, after)]
            broken = [sum(not bool(row.isfinite().all()) for row in one[kind]) for one in (before, after)]
            (means, worst), length = zip(*figures, strict=True), max(shape[-1] for shape in shapes)
            found.append(Judgement(kind, len(rows), length, *means, *worst, *broken))
        return found


def _longer(batches: Batches, held_out: list[dict[str, Tensor]], limit: int) -> Iterator[dict[str, Tensor]]:
    """Held-out sequences joined into longer ones, of at most `limit` tokens."""
    if not is_short(batches.longest, limit) or any("decoder_input_ids" in one for one in held_out):
        return
    tokens = torch.cat([row["input_ids"][0] for row in _rows(held_out)])
    length = min(limit, _TIMES * batches.longest, _LONG)
    count = min(_SEQUENCES[Fresh.LONGER], max(1, len(tokens) // length))
    for ids in tokens.repeat(-(-count * length // len(tokens)))[: count * length].view(count, 1, length):
        yield {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _rows(batches: list[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """The sequences of some batches one by one, without the tokens that their masks leave out."""
    for batch in batches:
        for row in range(len(batch["input_ids"])):
            found = rows_of(batch, torch.tensor([row]), len(batch["input_ids"]))
            masks = {side: found.get(f"{side}attention_mask") for side in _SIDES}
            valid = {side: mask[0].bool() for side, mask in masks.items() if mask is not None and mask.dim() == 2}
            for name, value in found.items():
                side = next(one for one in reversed(_SIDES) if name.startswith(one))
                if side in valid and value.shape[-1] == len(valid[side]) and value.dim() == 2:
                    found[name] = value[:, valid[side]]
            yield found


def _redrawn(row: dict[str, Tensor], model: PreTrainedModel, seed: int) -> dict[str, Tensor]:
    """A sequence's token ids with random tokens in place of all but special tokens."""
    names = {f"{side}input_ids": side != "" for side in _SIDES if f"{side}input_ids" in row}
    return {name: redrawn_tokens(model, row[name], seed, decoder=decoder) for name, decoder in names.items()}


def _tensors(inputs: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in inputs.items() if isinstance(value, Tensor)}


def _run(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Any:
    with torch.no_grad():
        return model(**cast(inputs, device_of(model), model.dtype), return_dict=True)
