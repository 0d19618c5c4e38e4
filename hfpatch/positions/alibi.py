"""Attention with linear biases, ALiBi (Press et al. 2022, arXiv:2108.12409, section 3)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..registry import POSITIONS
from ..scheme import require_number
from .scheme import Position


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


@POSITIONS.register("alibi")
@dataclass(frozen=True)
class ALiBi(Position):
    """Attention with linear biases: the table goes, and a head's scores fall with distance at a slope of its own.

    softmax(q_i K' / sqrt(d) - m_h [i - 1, ..., 2, 1, 0]), Press et al. 2022, arXiv:2108.12409, section 3. The slopes of
    n heads are m_h = 2^(-8 h / n), h = 1..n, for n a power of two; for other n those of the next smaller power of two,
    then every other slope of the next larger one (the authors' code).

    Without a causal mask the bias is symmetric, -m_h |i - j|: the authors' own proposal for encoders
    (github.com/ofirpress/attention_with_linear_biases/issues/5), which MosaicBERT and JinaBERT took up.

    Distances are counted along the sequence as it lies in memory (the cache included), so left padding and packed
    sequences need nothing; `position_ids` with gaps inside one sequence don't count. The patches of an image are a
    sequence, row after row.

    The bias travels in the attention mask, (1 or B, H, T, S): attention "eager" and "sdpa" take it, the latter without
    its kernels for plain causal masks. transformers' flash attention takes no bias, and its flex attention would read
    the first head's for all; both are refused, by the plan and, where the implementation is switched later, by the
    forward.

    Args:
        max_bias: the largest slope's exponent over all heads, 8 in the paper (MPT's `alibi_bias_max`).
    """

    max_bias: float = 8.0
    attends: ClassVar[str | None] = "attention scores fall with distance, which they were not trained for"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("ALiBi", "max_bias", self.max_bias, above=0.0)

    def slopes(self, num_heads: int) -> list[float]:
        """m_h of every head."""
        power = 2 ** int(math.log2(num_heads))

        def geometric(n: int) -> list[float]:
            return [2.0 ** (-self.max_bias * (h + 1) / n) for h in range(n)]

        return geometric(power) + geometric(2 * power)[0::2][: num_heads - power]

    def build_bias(self, num_heads: int) -> LinearBias:
        return LinearBias(self, num_heads)

    def describe(self, head_dim: int) -> str:
        return "ALiBi" if self.max_bias == 8 else f"ALiBi(max_bias={self.max_bias:g})"
