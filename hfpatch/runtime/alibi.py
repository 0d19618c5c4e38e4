"""Attention with linear biases, ALiBi (Press et al. 2022, arXiv:2108.12409, section 3)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .constants import Recomputed


class LinearBias(Recomputed):
    """-slope_h * |i - j|, added to the attention score of query i and key j in head h.

    Slopes live in a non-persistent float32 buffer: a state dict has no key for them, half precision leaves them alone.

    Args:
        num_heads: heads of the attention.
        max_bias: the largest slope's exponent over all heads.
    """

    slopes: Tensor

    def __init__(self, num_heads: int, max_bias: float = 8.0):
        super().__init__()
        self.num_heads, self.max_bias = num_heads, max_bias
        self.key = str((num_heads, max_bias))
        self.register_buffer("slopes", self._slopes(), persistent=False)

    def _slopes(self) -> Tensor:
        return torch.tensor(slopes_of(self.num_heads, self.max_bias), dtype=torch.float32, device="cpu")

    def reset(self) -> None:
        """Fill the buffer again on its device, after loading or moving a model."""
        self.slopes = self._slopes().to(self.slopes.device)

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the bias (B or 1, H, T, S) in float32 for positions (B or 1, T) of queries and (S,) of keys."""
        distances = (queries[:, None, :, None] - keys).abs().float()
        return -self.slopes.to(distances.device)[:, None, None] * distances

    def extra_repr(self) -> str:
        return f"max_bias={self.max_bias:g}"


def slopes_of(num_heads: int, max_bias: float) -> list[float]:
    """Return m_h = 2^(-max_bias h / n) of heads h = 1..n; others interleave if n is no power of two."""
    power = 2 ** int(math.log2(num_heads))

    def geometric(n: int) -> list[float]:
        return [2.0 ** (-max_bias * (h + 1) / n) for h in range(n)]

    return geometric(power) + geometric(2 * power)[0::2][: num_heads - power]
