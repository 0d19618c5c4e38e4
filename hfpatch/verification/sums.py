"""Running sums over batches of how far outputs are from the truth, so that no two batches are held at once."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..measure.outputs import Deviation, aligned, pieces
from .report import LayerRow, OutputRow

NO_TARGET = -100


@dataclass
class Mean:
    """Mean and minimum of numbers that come piece by piece; NaN stays NaN."""

    count: int = 0
    total: float = 0.0
    least: float = math.inf

    def add(self, values: Tensor) -> None:
        """Count all of them."""
        if values.numel():
            self.count += values.numel()
            self.total += float(values.double().sum())
            least = float(values.min())  # NaN wins in a tensor's min, but not in Python's
            self.least = least if math.isnan(least) else min(self.least, least)

    @property
    def mean(self) -> float:
        return self.total / max(self.count, 1)


@dataclass
class OutputSums:
    """One output of one run: its deviation, and means of what the other columns of the report show.

    For logits, over the last axis and with p, q = softmax(t), softmax(y): "top1" (same argmax), "kl" = sum p_i (log p_i
    - log q_i) in nats and "surprise" = -log q[target]. For others "cosine" of the vectors (..., d), one for two zero
    vectors, and "pooled", that of their means over the positions.
    """

    deviation: Deviation = field(default_factory=Deviation)
    means: dict[str, Mean] = field(default_factory=lambda: defaultdict(Mean))

    def add(self, name: str, truth: Tensor, output: Tensor, mask: Tensor | None, targets: Tensor | None) -> None:
        """Count one batch. `mask` (over the leading axes) is True where values count.

        Args:
            name: of the output.
            truth, output: (B, T, d), images (B, C, H, W) or others.
            mask: (B, T).
            targets: (B, T), a class each, or -100 for none; of logits.
        """
        self.deviation.add(truth, output, mask)
        if "logits" in name.rpartition(".")[2]:
            t, y = (_distributions(x, mask) for x in (truth, output))
            if t.shape[-1] > 1:
                self.add_logits(t, y, mask if t.dim() == truth.dim() > 2 else None, targets)
        elif truth.dim() > 1 and truth.shape[-1] > 1:
            t, y = (channels_last(x, mask) for x in aligned(truth, output))
            if t.dim() > 3 and mask is None:
                t, y = t.flatten(1, -2), y.flatten(1, -2)
            self.add_vectors("cosine", t, y, mask)
            if t.dim() == 3 and t.shape[1] > 1:
                self.add_vectors("pooled", _pooled(t, mask), _pooled(y, mask))

    def add_logits(
        self, truth: Tensor, output: Tensor, mask: Tensor | None = None, targets: Tensor | None = None
    ) -> None:
        """Count logits (..., V) with `mask` and `targets` (...)."""
        classes = torch.full(truth.shape[:-1], NO_TARGET) if targets is None else targets
        for t, y, target in pieces(mask, truth, output, classes[..., None]):
            log_p, log_q = t.log_softmax(-1), y.log_softmax(-1)
            p, wanted = log_p.exp(), target[:, 0] >= 0
            self.means["top1"].add((t.argmax(-1) == y.argmax(-1)).double())
            self.means["kl"].add(torch.where(p == 0, 0.0, p * (log_p - log_q)).sum(-1))
            self.means["surprise"].add(-log_q[wanted].gather(-1, target[wanted]))

    def add_vectors(self, column: str, truth: Tensor, output: Tensor, mask: Tensor | None = None) -> None:
        """Count the cosines of vectors (..., d)."""
        for t, y in pieces(mask, truth, output):
            lengths = t.norm(dim=-1) * y.norm(dim=-1)
            both_zero = (t == 0).all(-1) & (y == 0).all(-1)
            self.means[column].add(torch.where(lengths == 0, both_zero.double(), (t * y).sum(-1) / lengths))

    def row(self, name: str, role: str, dtype: str) -> OutputRow:
        """The sums as a row of the report."""
        mean = {name: sums.mean for name, sums in self.means.items() if sums.count}
        least = {name: sums.least for name, sums in self.means.items() if sums.count}
        deviation, surprise = self.deviation, mean.get("surprise")
        return OutputRow(
            *(name, role, dtype, deviation.max_error, deviation.rms_error, deviation.incomparable),
            top1=mean.get("top1"),
            kl=mean.get("kl"),
            perplexity=None if surprise is None else math.inf if surprise > 700 else math.exp(surprise),
            cosine_mean=mean.get("cosine"),
            cosine_min=least.get("cosine"),
            pooled_mean=mean.get("pooled"),
            pooled_min=least.get("pooled"),
        )


@dataclass
class LayerSums:
    """The stream after one layer of one run, as it is and without its mean over the channels."""

    raw: Deviation = field(default_factory=Deviation)
    centred: Deviation = field(default_factory=Deviation)

    def add(self, truth: Tensor, output: Tensor, mask: Tensor | None) -> None:
        """Count one batch."""
        t, y = (channels_last(x, mask) for x in aligned(truth, output))
        self.raw.add(t, y, mask)
        self.centred.add(t - t.mean(-1, keepdim=True), y - y.mean(-1, keepdim=True), mask)

    def row(self, stream: str, layer: int, role: str, dtype: str) -> LayerRow:
        """The sums as a row of the report."""
        return LayerRow(stream, layer, role, dtype, self.raw.rms_error, self.centred.rms_error)


def channels_last(x: Tensor, mask: Tensor | None) -> Tensor:
    """Images (B, C, H, W) as (B, H, W, C); streams of tokens and (B, H, H, C) have their channels last already."""
    if x.dim() != 4 or mask is not None or x.shape[1] == x.shape[2] != x.shape[3]:
        return x
    return x.movedim(1, -1)


def _distributions(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Logits with the classes last: over channels for images, over the positions that count for spans."""
    logits = channels_last(logits, mask)
    if logits.dim() == 2 and mask is not None:
        return logits.masked_fill(~mask.to(logits.device), -torch.inf)
    return logits


def _pooled(x: Tensor, mask: Tensor | None) -> Tensor:
    """The mean (B, d) of the vectors of x (B, T, d) that count."""
    if mask is None:
        return x.mean(1)
    mask = mask.to(x.device)
    return x.masked_fill(~mask[..., None], 0.0).sum(1) / mask.sum(1, keepdim=True).clamp_min(1)
