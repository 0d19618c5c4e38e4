"""Accumulates errors and agreement of outputs against the reference in float64, batch by batch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..measure.outputs import Deviation, pieces, to_comparable
from .verify_report import OutputRow

NO_TARGET = -100
Columns = Iterator[tuple[str, Tensor]]


@dataclass
class Sums:
    """Accumulated errors of one output, or of the stream after one layer, in one run.

    Attributes:
        deviation: errors of the values.
        centred: errors of a stream's values without their mean over the channels.
        columns: the numbers per position in `logit_columns` or `vector_columns`, by column, piece by piece.
    """

    deviation: Deviation = field(default_factory=Deviation)
    centred: Deviation = field(default_factory=Deviation)
    columns: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))

    def add_output(self, name: str, truth: Tensor, output: Tensor, mask: Tensor | None, targets: Tensor | None) -> None:
        """Add one batch of an output.

        Args:
            name: the output's name; outputs called "logits" are compared as distributions, others as vectors.
            truth, output: (B, T, d), images (B, C, H, W) or others.
            mask: (B, T), True where values count; None if all do.
            targets: (B, T), the class of each position, or -100 for none; for logits.
        """
        self.deviation.add(truth, output, mask)
        reduce = logit_columns if "logits" in name.rpartition(".")[2] else vector_columns
        for column, values in reduce(truth, output, mask, targets):
            self.columns[column].append(values.double().cpu())

    def add_layer(self, truth: Tensor, output: Tensor, mask: Tensor | None) -> None:
        """Add one batch of a stream."""
        t, y = (channels_last(x, mask) for x in to_comparable(truth, output))
        self.deviation.add(t, y, mask)
        self.centred.add(t - t.mean(-1, keepdim=True), y - y.mean(-1, keepdim=True), mask)

    def output_row(self, name: str, role: str, dtype: str) -> OutputRow:
        """Return an output's sums as a row of the report."""
        found = {column: torch.cat(values) for column, values in self.columns.items()}
        mean = {column: float(values.mean()) for column, values in found.items() if len(values)}
        least = {column: float(values.min()) for column, values in found.items() if len(values)}
        surprise = mean.get("surprise")
        return OutputRow(
            *(name, role, dtype, self.deviation.max_error, self.deviation.rms_error, self.deviation.incomparable),
            top1=mean.get("top1"),
            kl=mean.get("kl"),
            perplexity=None if surprise is None else math.inf if surprise > 700 else math.exp(surprise),
            cosine_mean=mean.get("cosine"),
            cosine_min=least.get("cosine"),
            pooled_mean=mean.get("pooled"),
            pooled_min=least.get("pooled"),
        )


def logit_columns(truth: Tensor, output: Tensor, mask: Tensor | None, targets: Tensor | None) -> Columns:
    """Per position, with p and q the softmax of truth and output over the classes: "top1" (1 where both have the same
    argmax), "kl" = sum p_i (log p_i - log q_i) in nats, and "surprise" = -log q[target].
    """
    t, y = (_classes_last(x, mask) for x in (truth, output))
    if t.shape[-1] < 2:
        return
    mask = mask if t.dim() == truth.dim() > 2 else None
    classes = torch.full(t.shape[:-1], NO_TARGET) if targets is None else targets
    for a, b, target in pieces(mask, t, y, classes[..., None]):
        log_p, log_q = a.log_softmax(-1), b.log_softmax(-1)
        p, known = log_p.exp(), target[:, 0] >= 0
        yield "top1", (a.argmax(-1) == b.argmax(-1)).double()
        yield "kl", torch.where(p == 0, 0.0, p * (log_p - log_q)).sum(-1)
        yield "surprise", -log_q[known].gather(-1, target[known])


def vector_columns(truth: Tensor, output: Tensor, mask: Tensor | None, targets: Tensor | None = None) -> Columns:
    """Yield cosines between vectors (..., d): "cosine" at each position, "pooled" between means over positions."""
    if truth.dim() < 2 or truth.shape[-1] < 2:
        return
    t, y = (channels_last(x, mask) for x in to_comparable(truth, output))
    if t.dim() > 3 and mask is None:
        t, y = t.flatten(1, -2), y.flatten(1, -2)
    for a, b in pieces(mask, t, y):
        yield "cosine", _cosines(a, b)
    if t.dim() == 3 and t.shape[1] > 1:
        yield "pooled", _cosines(_pool(t, mask), _pool(y, mask))


def channels_last(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return images (B, C, H, W) as (B, H, W, C); streams of tokens and (B, H, H, C) unchanged."""
    if x.dim() != 4 or mask is not None or x.shape[1] == x.shape[2] != x.shape[3]:
        return x
    return x.movedim(1, -1)


def _classes_last(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Logits with the classes last: over channels for images, over the positions that count for spans."""
    logits = channels_last(logits, mask)
    if logits.dim() == 2 and mask is not None:
        return logits.masked_fill(~mask.to(logits.device), -torch.inf)
    return logits


def _cosines(t: Tensor, y: Tensor) -> Tensor:
    """Cosines over the last axis; 1 between two zero vectors, 0 if one of the two is zero."""
    lengths = t.norm(dim=-1) * y.norm(dim=-1)
    both_zero = (t == 0).all(-1) & (y == 0).all(-1)
    return torch.where(lengths == 0, both_zero.double(), (t * y).sum(-1) / lengths)


def _pool(x: Tensor, mask: Tensor | None) -> Tensor:
    """The mean (B, d) of the vectors of x (B, T, d) that count."""
    if mask is None:
        return x.mean(1)
    mask = mask.to(x.device)
    return x.masked_fill(~mask[..., None], 0.0).sum(1) / mask.sum(1, keepdim=True).clamp_min(1)
