"""Distance of a patched model's outputs from the original's on held-out sequences."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .block_replay import Walk, first_tensor

_AT_ONCE = 16  # rows of logits that are compared in one go: vocabularies are large


def output_distance(new: Walk, old: Walk) -> tuple[str, float]:
    """What is measured, and its mean over the tokens of the held-out sequences that aren't padding."""
    total, count, measure = 0.0, 0, ""
    for i in range(len(new.batches)):
        for row in new.batches.held_out(i).nonzero()[:, 0]:
            measure, distances = token_distances(*(walk.forward(i, row[None]) for walk in (old, new)))
            mask = new.batches.mask(i, decoder=new.model.config.is_encoder_decoder)
            if mask is not None and mask[row[None]].shape == distances.shape:
                distances = distances[mask[row[None]].bool()]
            total, count = total + float(distances.double().sum()), count + distances.numel()
    return measure, total / max(count, 1)


def token_distances(old: Any, new: Any) -> tuple[str, Tensor]:
    """What is measured of two models' outputs, and how far they are from each other at each token.

    KL(old || new) in nats of the distributions over the vocabulary; without logits |old - new|^2 / mean(|old|^2) of the
    first output.
    """
    logits = old.get("logits")
    if isinstance(logits, Tensor) and logits.dim() >= 2 and logits.shape[-1] > 1:
        return "KL divergence", _divergence(logits, new["logits"])
    a, b = (
        first_tensor([v for v in out.values() if isinstance(v, Tensor) and v.is_floating_point() and v.dim()]).float()
        for out in (old, new)
    )
    size = a.square().mean().clamp_min(1e-30)
    return "relative squared error of the outputs", (a - b.to(a.device)).square().mean(-1) / size


def _divergence(old: Tensor, new: Tensor) -> Tensor:
    """KL(old || new) over the last axis of logits."""
    found = []
    for rows in zip(old.flatten(0, -2).split(_AT_ONCE), new.flatten(0, -2).split(_AT_ONCE), strict=True):
        a, b = (F.log_softmax(part.to(old.device).float(), -1) for part in rows)
        found.append((a.exp() * (a - b)).sum(-1))
    return torch.cat(found).unflatten(0, old.shape[:-1])
