"""Distance of a patched model's outputs from the original's on held-out sequences."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..measure.outputs import Outputs
from ..runtime.float64 import in_float64
from ..runtime.patch_errors import UnsupportedError
from ..schemes.verdicts import Metric
from .block_replay import BlockReplay

_ROWS_AT_ONCE = 16  # rows of logits compared at once, since vocabularies are large


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

    A distance that isn't finite counts as infinite, so having fewer such tokens counts more than all else.
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
