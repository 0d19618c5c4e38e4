"""Measures whether two models compute the same, on random inputs of several lengths, with and without padding."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..measure.copies import copy_of
from ..measure.inputs import Inputs, example_inputs
from ..measure.outputs import FACTOR, Deviation, noise_floor, outputs_of
from ..measure.quiet_forward import cast_for_model, inference_state
from ..measure.randomness import seed_deterministically
from ..measure.shrink import BATCH
from ..measure.snapshot import attempt, media_inputs

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}  # relative to an output's spread
LENGTHS = (1, 6, 23)
_BEYOND_ROUNDING = 1e-2  # rounding explains no larger error
_MOST_PARAMETERS = 2**30  # parameters; no float64 copy is made of larger models

Case = tuple[str, dict[str, Any], Tensor | None]  # its name, keyword arguments, attention mask


@dataclass(frozen=True)
class OutputComparison:
    """Measured difference of two models' outputs.

    Attributes:
        error: largest difference of an output, by that output's standard deviation.
        tolerance: the largest error at which they count as equal.
        inputs: how many batches were compared.
        worst: the output that differs most, and the input on which it does.
    """

    error: float
    tolerance: float
    inputs: int
    worst: str

    @property
    def holds(self) -> bool:
        return self.error <= self.tolerance  # False for NaN

    def __str__(self) -> str:
        return f"{self.worst} differs by {self.error:.1e} of its spread, where {self.tolerance:.0e} is allowed"


def compare(model: Any, other: Any, longest: int | None = None, beyond: int = 0) -> OutputComparison:
    """Compare outputs of the same name of two models, on inputs that both take.

    Text is random tokens, one batch of each of several lengths; the longer batches are also padded on the left and on
    the right. Outputs at padding aren't compared, nor outputs for a whole text that starts with padding. Other inputs
    are random, two draws.

    If two float32 models differ by more than 1e-5, but not by more than rounding might explain, float64 copies of both
    are compared. For classes that don't compute in float64, noise in the last bit says what rounding explains.

    Args:
        model, other: both in one dtype, float32 or float64, on one device.
        longest: length of the longest text, if one of the two takes no longer texts.
        beyond: a length that one text must have, if functions part only there.
    """
    inputs = list(batches(model, other, longest, beyond))
    found, worst = _compare_outputs(model, other, inputs)
    if found.holds or not found.error < _BEYOND_ROUNDING:
        return found
    wide = _in_float64(model, other, inputs)
    if wide is not None and wide.error <= found.tolerance:
        return replace(wide, tolerance=found.tolerance)
    return replace(found, tolerance=max(found.tolerance, FACTOR * noise_floor(model, cast_for_model(model, worst))))


def _in_float64(model: Any, other: Any, inputs: list[Case]) -> OutputComparison | None:
    """Compare float64 copies of two float32 models; None if they are too large or don't compute in float64."""
    if model.dtype != torch.float32 or model.num_parameters() > _MOST_PARAMETERS:
        return None
    try:
        return _compare_outputs(copy_of(model, dtype=torch.float64), copy_of(other, dtype=torch.float64), inputs)[0]
    except Exception:  # some classes put numbers of another dtype into their arithmetic
        return None


def _compare_outputs(model: Any, other: Any, inputs: list[Case]) -> tuple[OutputComparison, dict[str, Any]]:
    """How far two models differ, and the inputs on which they differ most."""
    errors: list[tuple[float, str, dict[str, Any]]] = []
    for name, batch, padding in inputs:
        outputs = []
        for one in (model, other):
            with inference_state(one):
                outputs.append(outputs_of(one, cast_for_model(model, batch)))
        for key, truth in outputs[0].items():
            errors.append((_error(truth, outputs[1].get(key), padding), f"{key} ({name})", batch))
    error, where, worst = max(errors, key=lambda one: (one[0] != one[0], one[0]), default=(float("nan"), "nothing", {}))
    return OutputComparison(error, TOLERANCE.get(model.dtype, 1e-5), len(inputs), where), worst


def _error(truth: Tensor, output: Tensor | None, padding: Tensor | None) -> float:
    """Largest difference, relative to the truth's spread."""
    deviation, kept = Deviation(equal_nan=True), None
    if padding is not None and len(truth) == len(padding):
        kept = padding[:, 0].bool()  # encoders pool the first token
    if output is None:
        return float("inf")
    deviation.add(truth, output, kept)
    nothing = not deviation.count and bool(truth.isnan().any())  # a truth that is NaN throughout equals anything
    return float("inf") if nothing else deviation.spread_error


def batches(model: Any, other: Any, longest: int | None, beyond: int) -> Iterator[Case]:
    """Yield the inputs on which two models are compared."""
    takes, also = (inspect.signature(one.forward).parameters for one in (model, other))
    if model.main_input_name != "input_ids" or "decoder_input_ids" in takes:
        for draw in range(2):
            found = example_inputs(model, draw)
            yield f"inputs {draw}", {name: value for name, value in found.items() if name in also}, None
        return
    for draw in range(2 if "pixel_values" in takes and "pixel_values" in also else 0):
        if image := media_inputs(model, draw):
            yield f"text and image {draw}", image, None
    given = example_inputs(model)
    media = {name: one for name, one in given.items() if getattr(one, "shape", ())[:2] != given["input_ids"].shape}
    if media and isinstance(attempt(model, lambda: given | dict.fromkeys(media)), dict):  # GIT's texts need no image
        media = {}
    config = model.config.get_text_config()
    pad, types = getattr(config, "pad_token_id", None), getattr(config, "type_vocab_size", 0) or 0
    alone = "SequenceClassification" in type(model).__name__ and pad is None
    for length in sorted({min(length, longest or length) for length in (*LENGTHS, beyond) if length}):
        rows, extra = 1 if alone else BATCH if media else 3, dict(media)
        with seed_deterministically(length), torch.device("cpu"):
            ids = Inputs(model).ids(rows, length)
            if types > 1 and "token_type_ids" in takes and "token_type_ids" in also:
                extra["token_type_ids"] = torch.randint(types, (rows, length))
        yield f"{length} tokens", {"input_ids": ids, **extra}, None
        for side in () if length < 4 or alone else ("left", "right"):
            mask = torch.ones_like(ids)
            for row, padded in enumerate((length // 2, 2)):
                mask[row, slice(None, padded) if side == "left" else slice(length - padded, None)] = 0
            extra |= {"input_ids": ids.where(mask.bool(), torch.full_like(ids, pad or 0)), "attention_mask": mask}
            yield f"{length} tokens, padded {side}", dict(extra), mask
