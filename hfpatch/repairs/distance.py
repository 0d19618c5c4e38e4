"""Distance of a model's outputs from the original's, token by token."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .block_replay import first_tensor

_AT_ONCE = 16  # rows of logits that are compared in one go: vocabularies are large


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
