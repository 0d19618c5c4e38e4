"""Distance of a patched model's outputs from the original's, on held-out sequences and on fresh ones."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from ..core.mapped import Scratch
from ..errors import OptionError
from ..measure.inputs import longest_text, redrawn_tokens
from ..measure.outputs import Outputs
from ..measure.quiet_forward import cast, device_of
from ..runtime.float64 import in_float64
from ..runtime.patch_errors import UnsupportedError
from ..schemes.verdicts import Metric
from .block_replay import BlockReplay, refusing_failures
from .calibration import Batches, rows_of
from .repair_report import Fresh, Judgement, is_short
from .sample import generates, sample_batches

_ROWS_AT_ONCE = 16  # rows of logits compared at once, since vocabularies are large
_LONG, _TIMES = 512, 8  # longer sequences have at most so many tokens, and so many times the calibration's
_SEQUENCES = {Fresh.LONGER: 4, Fresh.OWN: 16, Fresh.RANDOM: 32}  # at most, of each kind
_TOKENS = 2048  # at most, of each kind
_NUMBERS = 2**26  # outputs of the original that are stored, for each kind
_SIDES = ("", "decoder_")  # prefixes of an encoder-decoder's inputs
_PLAIN = {f"{side}{name}" for side in _SIDES for name in ("input_ids", "attention_mask")} | {"token_type_ids"}

Found = dict[str, list[Tensor]]  # kind -> the distances at the tokens of each sequence


def output_distance(new: BlockReplay, old: BlockReplay, again: bool = False) -> tuple[str, Tensor]:
    """Return the measure's name, and its values at all held-out tokens that aren't padding.

    Args:
        new, old: the patched model and the original.
        again: whether this is the second time; the original's blocks may then have been freed.
    """
    original = old.forward_from_store if again else old.forward_and_store
    found, measure = [], ""
    for i in new.batches.held_out_batches():
        for row in new.batches.single_rows(i):
            measure, distances = token_distances(original(i, row), new.forward(i, row))
            found.append(without_padding(new, i, row, distances))
    return measure, torch.cat(found)


def without_padding(replay: BlockReplay, index: int, row: Tensor | None, distances: Tensor) -> Tensor:
    """Return the distances, in float64, at the tokens of a batch or of one sequence that aren't padding."""
    mask = replay.batches.mask(index, decoder=replay.model.config.is_encoder_decoder)
    mask = mask if mask is None or row is None else mask[row]
    if mask is not None and mask.shape == distances.shape:
        distances = distances[mask.bool()]
    return in_float64(distances.flatten()).cpu()


def helps(before: Tensor, after: Tensor) -> bool:
    """Return whether distances at the same tokens shrank by more than noise: twice the mean's standard error.

    Tokens count as independent, which those of one sequence aren't quite. A distance that isn't finite counts as
    infinite, so having fewer such tokens counts more than all else.
    """
    broken = [int((~one.isfinite()).sum()) for one in (before, after)]
    if broken[0] != broken[1]:
        return broken[1] < broken[0]
    gain = (before - after)[before.isfinite() & after.isfinite()]
    return len(gain) > 1 and bool(gain.mean() > 2 * gain.std() / len(gain) ** 0.5)


def mean_and_worst(distances: Tensor) -> tuple[float, float]:
    """Return the mean distance and the largest; both are infinite if one isn't finite."""
    found = distances.nan_to_num(nan=math.inf, posinf=math.inf)
    return float(found.mean()), float(found.max())


def token_distances(old: Any, new: Any) -> tuple[str, Tensor]:
    """Return the measure's name, and the distance of two models' outputs at each token.

    KL(old || new) in nats of the distributions over the vocabulary; without logits |old - new|^2 / mean(|old|^2) of the
    first output.
    """
    logits = logits_of(old)
    if logits is not None and logits.dim() >= 2 and logits.shape[-1] > 1:
        return Metric.KL, _divergence(logits, new["logits"])
    a, b = (next(x for x in Outputs.of(out).floats.values() if x.dim()).float() for out in (old, new))
    if a.shape != b.shape:
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise UnsupportedError(
            f"the original's output and the patched model's differ in shape, {shapes}, so a repair can't be judged "
            "(VITS chooses how long its speech is). Patch it without calibration."
        )
    size = a.square().mean().clamp_min(1e-30)
    return Metric.SQUARED_ERROR, (a - b.to(a.device)).square().mean(-1) / size


def logits_of(output: Any) -> Tensor | None:
    """Return the tensor that a model's output calls its logits; None if the output is a tuple or a tensor itself."""
    logits = output.get("logits") if isinstance(output, Mapping) else None
    return logits if isinstance(logits, Tensor) else None


def comparable(output: Any) -> dict[str, Tensor]:
    """Return the part of a model's outputs that is compared: its logits, or else its first output with an axis."""
    logits = logits_of(output)
    found = Outputs.of(output).floats if logits is None else {"logits": logits}
    name = next(name for name, value in found.items() if value.dim())
    return {name: found[name].detach().cpu()}


def _divergence(old: Tensor, new: Tensor) -> Tensor:
    """KL(old || new) over the last axis of logits."""
    found = []
    for rows in zip(old.flatten(0, -2).split(_ROWS_AT_ONCE), new.flatten(0, -2).split(_ROWS_AT_ONCE), strict=True):
        a, b = (F.log_softmax(part.to(old.device).float(), -1) for part in rows)
        found.append(torch.where(a.isneginf(), 0, a.exp() * (a - b)).sum(-1))  # -inf: a logit that the model masks
    return torch.cat(found).unflatten(0, old.shape[:-1])


class FreshSequences:
    """Fresh sequences, which nobody calibrated on, with the original's outputs, to report what a repair does there.

    There are three kinds, each of texts alone: sequences that the original writes; the calibration with random tokens
    in place of its own; and, if the calibration is much shorter than the model's positions, held-out sequences joined
    into longer sequences, since nothing else shows what a repair does at later positions. No labels are needed, since
    the outputs are compared with the original's. Models that read more than token ids have none.

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
