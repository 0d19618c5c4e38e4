"""Attention with linear biases, ALiBi (Press et al. 2022, arXiv:2108.12409, section 3)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..schemes.positions import ALiBi


class LinearBias(nn.Module):
    """-slope_h * |i - j|, added to the attention score of query i and key j in head h.

    Slopes live in a non-persistent float32 buffer: a state dict has no key for them, half precision leaves them alone.

    Args:
        scheme: the options.
        num_heads: heads of the attention.
    """

    slopes: Tensor

    def __init__(self, scheme: ALiBi, num_heads: int):
        super().__init__()
        self.scheme, self.num_heads = scheme, num_heads
        self.register_buffer("slopes", self._slopes(), persistent=False)

    def _slopes(self) -> Tensor:
        return torch.tensor(self.scheme.slopes(self.num_heads), dtype=torch.float32, device="cpu")

    def reset(self) -> None:
        """Fill the buffer again, on the device where it is; loading and moving a model need it."""
        self.slopes = self._slopes().to(self.slopes.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LinearBias:
        super()._apply(fn, recurse)  # moves the buffer, and with .half() also rounds it
        self.reset()
        return self

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The bias (B or 1, H, T, S) in float32, of positions (B or 1, T) of queries and (S,) of keys."""
        distances = (queries[:, None, :, None] - keys).abs().float()
        return -self.slopes.to(distances.device)[:, None, None] * distances

    def extra_repr(self) -> str:
        return self.scheme.describe(0)
