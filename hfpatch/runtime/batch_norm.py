"""Batch normalisation of sequences (Ioffe & Szegedy 2015, arXiv:1502.03167, algorithms 1 and 2), padding left out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .norms import AffineNorm, NormFacts


class MaskedBatchNorm(AffineNorm):
    """y = (x - mean_c) / sqrt(var_c + eps) * gain + shift, statistics per channel c over batch and positions.

    In training mode they are those of the batch, var biased, and running averages of them (var unbiased, as in
    `nn.BatchNorm1d`) are kept in buffers, which eval mode uses. Under gradient checkpointing a forward runs twice, and
    the averages move twice.

    Args:
        momentum: weight of the newest batch in the running averages. The rest as in `AffineNorm`.
    """

    kind = "batch"

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        facts: NormFacts,
        gain: nn.Parameter | None,
        shift: nn.Parameter | None,
        momentum: float,
        like: Tensor,
    ):
        super().__init__(facts, gain, shift)
        self.momentum = momentum
        (width,) = facts.shape
        self.register_buffer("running_mean", torch.zeros(width, device=like.device, dtype=like.dtype))
        self.register_buffer("running_var", torch.ones(width, device=like.device, dtype=like.dtype))
        self.register_buffer("num_batches_tracked", torch.tensor(0, device=like.device))

    def normalise(self, h: Tensor, keep: Tensor | None = None) -> Tensor:
        """h normalised; `keep` (B, T) is False where a position is padding."""
        if self.training:
            mean, var = self._statistics(h, keep)
        else:
            mean, var = self.running_mean.to(h.dtype), self.running_var.to(h.dtype)
        return (h - mean) * (var + self.eps_for(h)).rsqrt()

    def _statistics(self, h: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        positions = tuple(range(h.dim() - 1))
        weight = torch.ones_like(h[..., :1]) if keep is None else keep.reshape(h.shape[:-1])[..., None].to(h.dtype)
        count = weight.sum().clamp_min(1.0)
        mean = (h * weight).sum(positions) / count
        var = ((h - mean).square() * weight).sum(positions) / count
        with torch.no_grad():
            unbiased = var * (count / (count - 1).clamp_min(1.0))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
            self.num_batches_tracked.add_(1)
        return mean, var

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, momentum={self.momentum}"
