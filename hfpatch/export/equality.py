"""Whether two models are the same function, measured: random inputs of several lengths, with padding and without."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..measure.inputs import Inputs, example_inputs
from ..measure.outputs import FACTOR, Deviation, noise_floor, outputs_of
from ..measure.quiet_forward import fitting, quiet
from ..measure.randomness import own_randomness

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}  # relative to an output's spread
LENGTHS = (1, 6, 23)
_HOPELESS = 1e-2  # no rounding explains this
_MOST = 2**30  # parameters of models of which a float64 copy is made


@dataclass(frozen=True)
class Measured:
    """Two models compared.

    Attributes:
        error: largest difference of an output, by that output's standard deviation.
        tolerance: what may be.
        inputs: how many batches were compared.
        worst: the output that differs most, and on which input.
    """

    error: float
    tolerance: float
    inputs: int
    worst: str

    @property
    def holds(self) -> bool:
        return self.error <= self.tolerance  # False where it is no number

    def __str__(self) -> str:
        return f"{self.worst} differs by {self.error:.1e} of its spread, where {self.tolerance:.0e} is allowed"


def compare(model: Any, other: Any, longest: int | None = None, beyond: int = 0, seed: int = 0) -> Measured:
    """Every output of `model` against that of the same name of `other`, on inputs that both take.

    Text is random tokens, one batch of each of several lengths, the longer ones also with padding on the left and on
    the right. What is said of padding isn't compared, nor what is said of a text as a whole that starts with it. Other
    inputs are random, two draws.

    Where two float32 models differ by more than 1e-5, but not by more than rounding might explain, float64 copies of
    both are compared; of classes that don't compute in it, noise in the last bit says what rounding explains.

    Args:
        model, other: in one dtype, float32 or float64, on one device.
        longest: of a text, where one of the two takes no longer ones.
        beyond: a length that one text must have, where functions part only there.
        seed: of the inputs.
    """
    found, there = _compared(model, other, longest, beyond, seed)
    if found.holds or not found.error < _HOPELESS:
        return found
    wide = _in_float64(model, other, longest, beyond, seed)
    if wide is not None and wide.error <= found.tolerance:
        return replace(wide, tolerance=found.tolerance)
    return replace(found, tolerance=max(found.tolerance, FACTOR * noise_floor(model, there)))


def _in_float64(model: Any, other: Any, longest: int | None, beyond: int, seed: int) -> Measured | None:
    """Float64 copies of two float32 models compared; None where they are too large or don't compute in it."""
    parameters = list(model.parameters())
    if parameters[0].dtype != torch.float32 or sum(value.numel() for value in parameters) > _MOST:
        return None
    try:
        copies = [copy.deepcopy(one).double() for one in (model, other)]
        return _compared(copies[0], copies[1], longest, beyond, seed)[0]
    except Exception:  # some classes put numbers of another dtype into their arithmetic
        return None


def _compared(model: Any, other: Any, longest: int | None, beyond: int, seed: int) -> tuple[Measured, dict[str, Any]]:
    """What was measured, and the inputs on which the two differ most."""
    worst, where, count, there = -1.0, "no output", 0, {}
    for name, inputs, padding in batches(model, other, longest, beyond, seed):
        given = fitting(model, inputs)
        outputs = []
        for one in (model, other):
            with quiet(one):
                outputs.append(outputs_of(one, given))
        count += 1
        for key, ours in outputs[0].items():
            error = _deviation(ours, outputs[1].get(key), padding).spread_error
            if not error <= worst:
                worst, where, there = error, f"{key} ({name})", given
    tolerance = TOLERANCE.get(next(model.parameters()).dtype, 1e-5)
    return Measured(worst if worst >= 0 else float("nan"), tolerance, count, where), there


def _deviation(ours: Tensor, theirs: Tensor | None, padding: Tensor | None) -> Deviation:
    if theirs is None:
        return Deviation(incomparable=1)
    deviation, kept = Deviation(equal_nan=True), None
    if padding is not None and len(ours) == len(padding):
        of_tokens = ours.dim() > 1 and ours.shape[:2] == padding.shape
        kept = (padding if of_tokens else padding[:, 0]).bool()  # encoders pool the first token
    deviation.add(ours, theirs, kept)
    return deviation


def batches(
    model: Any, other: Any, longest: int | None, beyond: int, seed: int
) -> Iterator[tuple[str, dict[str, Any], Tensor | None]]:
    """(what it is, inputs, attention mask or None)."""
    takes = [inspect.signature(one.forward).parameters for one in (model, other)]
    if model.main_input_name != "input_ids" or "decoder_input_ids" in takes[0]:
        for draw in range(2):
            yield f"inputs {draw}", {k: v for k, v in example_inputs(model, seed + draw).items() if k in takes[1]}, None
        return
    lengths = sorted({min(length, longest or length) for length in (*LENGTHS, beyond) if length})
    alone = "SequenceClassification" in type(model).__name__ and model.config.pad_token_id is None
    for length in lengths:
        ids, extra = _text(model, other, 1 if alone else 3, length, seed)
        yield f"{length} tokens", {"input_ids": ids, **extra}, None
        if length < 4 or alone:
            continue
        for side in ("left", "right"):
            mask = torch.ones_like(ids)
            for row, padded in enumerate((length // 2, 2)):
                mask[row, slice(None, padded) if side == "left" else slice(length - padded, None)] = 0
            pad = model.config.pad_token_id
            padded_ids = ids.where(mask.bool(), torch.full_like(ids, 0 if pad is None else pad))
            yield f"{length} tokens, padded {side}", {"input_ids": padded_ids, "attention_mask": mask, **extra}, mask


def _text(model: Any, other: Any, rows: int, length: int, seed: int) -> tuple[Tensor, Mapping[str, Tensor]]:
    config, extra = model.config.get_text_config(), {}
    with own_randomness(seed + length), torch.device("cpu"):
        ids = Inputs(model.config).ids(rows, length, below=2**31)
        types = getattr(config, "type_vocab_size", 0) or 0
        takes = [inspect.signature(one.forward).parameters for one in (model, other)]
        if types > 1 and all("token_type_ids" in names for names in takes):
            extra["token_type_ids"] = torch.randint(types, (rows, length))
    return ids, extra
