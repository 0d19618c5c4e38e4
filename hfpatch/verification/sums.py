"""How far outputs are from a float64 truth: running sums over batches, so that no two batches are held at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_PIECE = 2**22
_INFINITE = 1e30  # masked logits are -inf in some models and the dtype's lowest number in others


@dataclass
class ErrorSum:
    """The error of one tensor against the truth, over everything added so far.

    With y the output, t the truth and rms(t) = sqrt(mean(t^2)): `max_error` is max|y - t| / rms(t), `rms_error` is
    rms(y - t) / rms(t). Infinities that both have in the same places (masked logits) don't count.

    Attributes:
        values: how many numbers were compared.
        nonfinite: how many are NaN or infinite in one of the two and not the same in the other; with any, both errors
            are infinite.
    """

    values: int = 0
    nonfinite: int = 0
    largest: float = 0.0
    squared_error: float = 0.0
    squared_truth: float = 0.0

    def add(self, truth: Tensor, output: Tensor, mask: Tensor | None = None) -> None:
        """Count one batch. `mask` (over the leading axes) is True where values count; shapes must be equal."""
        for t, y in _pieces(mask, truth, output):
            finite = t.isfinite() & y.isfinite()
            self.values += t.numel()
            self.nonfinite += int((~finite & (t != y)).sum())
            t = t.masked_fill(~finite, 0.0)
            difference = (y.masked_fill(~finite, 0.0) - t).abs()
            self.largest = max(self.largest, float(difference.max()))
            self.squared_error += float(difference.square().sum())
            self.squared_truth += float(t.square().sum())

    @property
    def max_error(self) -> float:
        return self._relative(self.largest)

    @property
    def rms_error(self) -> float:
        return self._relative(math.sqrt(self.squared_error / max(self.values, 1)))

    def _relative(self, error: float) -> float:
        if self.nonfinite:
            return math.inf
        rms = math.sqrt(self.squared_truth / max(self.values, 1))
        return error / rms if rms else math.inf if error else 0.0


def output_errors(
    truth: Mapping[str, Tensor], outputs: Mapping[str, Tensor], mask: Tensor | None = None
) -> dict[str, ErrorSum]:
    """The error of each output that both have, for one batch.

    Args:
        truth, outputs: tensors by name; names that only one of them has are left out.
        mask: (B, T), True (or 1) where positions count. It holds for tensors of shape (B, T, ...) with three or more
            axes; others count in full.

    Returns:
        Name -> error; read `max_error` and `rms_error`. `add` carries on with further batches.
    """
    found = {}
    for name in truth.keys() & outputs.keys():
        fits = mask is not None and truth[name].dim() > 2 and truth[name].shape[:2] == mask.shape
        found[name] = ErrorSum()
        found[name].add(truth[name], outputs[name], mask.bool() if mask is not None and fits else None)
    return found


@dataclass
class AgreementSum:
    """Agreement of two sets of distributions over the last axis, softmax(logits).

    Attributes:
        count: distributions compared.
        same: of those, how many have their largest value at the same place.
        divergence: sum of KL(truth || output) = sum_i p_i (log p_i - log q_i), in nats.
        surprise, targets: sum of -log q[target], and of how many targets.
    """

    count: int = 0
    same: int = 0
    divergence: float = 0.0
    surprise: float = 0.0
    targets: int = 0

    def add(self, truth: Tensor, output: Tensor, mask: Tensor | None = None, targets: Tensor | None = None) -> None:
        """Count logits (..., V). `mask` (...) as in ErrorSum; `targets` (...) hold a class each, or -100 for none."""
        wanted = torch.full(truth.shape[:-1], -100) if targets is None else targets
        for t, y, target in _pieces(mask, truth, output, wanted[..., None]):
            log_p, log_q = t.log_softmax(-1), y.log_softmax(-1)
            p = log_p.exp()
            self.count += len(t)
            self.same += int((t.argmax(-1) == y.argmax(-1)).sum())
            self.divergence += float(torch.where(p == 0, 0.0, p * (log_p - log_q)).sum())
            given = target[:, 0] >= 0
            self.surprise -= float(log_q[given].gather(-1, target[given]).sum())
            self.targets += int(given.sum())

    @property
    def top1(self) -> float:
        return self.same / max(self.count, 1)

    @property
    def kl(self) -> float:
        return self.divergence / max(self.count, 1)

    @property
    def perplexity(self) -> float | None:
        """exp of the mean surprise; None without targets."""
        if not self.targets:
            return None
        mean = self.surprise / self.targets
        return math.exp(mean) if mean < 700 else math.inf if mean == mean else math.nan


@dataclass
class CosineSum:
    """Cosines between vectors of two tensors: their mean and their smallest."""

    count: int = 0
    total: float = 0.0
    smallest: float = 1.0

    def add(self, truth: Tensor, output: Tensor, mask: Tensor | None = None) -> None:
        """Count vectors (..., d). Two zero vectors have cosine one; `mask` as in ErrorSum."""
        for t, y in _pieces(mask, truth, output):
            lengths = t.norm(dim=-1) * y.norm(dim=-1)
            both_zero = (t == 0).all(-1) & (y == 0).all(-1)
            cosine = torch.where(lengths == 0, both_zero.double(), (t * y).sum(-1) / lengths)
            self.count += cosine.numel()
            self.total += float(cosine.sum())
            least = float(cosine.min())  # NaN wins in a tensor's min, but not in Python's
            self.smallest = least if least != least else min(self.smallest, least)

    @property
    def mean(self) -> float:
        return self.total / max(self.count, 1)


def _pieces(mask: Tensor | None, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The vectors (N, d) that count, `aligned`, a few million numbers at a time: float64 of all logits is large."""
    if mask is not None:
        tensors = tuple(x[mask.to(x.device)] for x in tensors)
    rows = [x.detach().reshape(-1, x.shape[-1] if x.dim() > 1 else 1) for x in tensors]
    size = max(1, _PIECE // max(rows[0].shape[-1], 1))
    for pieces in zip(*(x.split(size) for x in rows), strict=True):
        if pieces[0].numel():
            truth, *others = pieces
            yield *aligned(truth, others[0]), *(x.to(truth.device) for x in others[1:])


def aligned(truth: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    """Both in float64 on the truth's device; numbers beyond 1e30 are the infinities that they stand for."""
    pair = (x.detach().to(truth.device).double() for x in (truth, output))
    t, y = (torch.where(x.abs() > _INFINITE, x.sign() * math.inf, x) for x in pair)
    return t, y


def centred(x: Tensor) -> Tensor:
    """x (..., d) without its mean over the last axis."""
    return x - x.mean(-1, keepdim=True)


def pooled(x: Tensor, mask: Tensor | None) -> Tensor:
    """The mean (B, d) of the vectors of x (B, T, d) that count."""
    if mask is None:
        return x.mean(1)
    mask = mask.to(x.device)
    return x.masked_fill(~mask[..., None], 0.0).sum(1) / mask.sum(1, keepdim=True).clamp_min(1)
