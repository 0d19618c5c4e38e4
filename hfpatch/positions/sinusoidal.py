"""Sinusoidal positions (Vaswani et al. 2017, arXiv:1706.03762, section 3.5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import OptionError
from ..registry import POSITIONS
from ..scheme import require_number
from .scheme import Position

LAYOUTS = ("interleaved", "half", "tensor2tensor")


@POSITIONS.register("sinusoidal")
@dataclass(frozen=True)
class Sinusoidal(Position):
    """Sinusoidal positions in the place of the table: computed, not learned, and defined at any length.

    PE(pos, 2i) = sin(pos / base^(2i/d)), PE(pos, 2i+1) = cos(pos / base^(2i/d)), Vaswani et al. 2017,
    arXiv:1706.03762, section 3.5. The host's own count of positions stays: offsets, padding, `position_ids`. Rows that
    hold no position (the reserved ones of BART and RoBERTa, padding) are zeros.

    Args:
        base: of the frequencies, 10,000 in the paper.
        layout: "interleaved" has sines at even and cosines at odd channels (the paper); "half" has all sines, then all
            cosines (Marian, Pegasus); "tensor2tensor" is that with frequencies base^(-i/(d/2-1)), as in tensor2tensor,
            fairseq and Whisper's encoder.
        scale: factor on all of it. Embeddings of pretrained models are often much smaller than sines.

    Raises:
        OptionError: an option is outside its domain.
    """

    base: float = 10_000.0
    layout: str = "interleaved"
    scale: float = 1.0
    keeps_table: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("Sinusoidal", "base", self.base, above=0.0)
        require_number("Sinusoidal", "scale", self.scale, above=0.0)
        if self.layout not in LAYOUTS:
            raise OptionError(f"Sinusoidal: layout must be one of {', '.join(LAYOUTS)}, not {self.layout!r}.")

    def rows(self, positions: Tensor, width: int) -> Tensor:
        """PE at integer positions (...), as (..., width) in float32."""
        sines = (width + 1) // 2
        steps = torch.arange(sines, device=positions.device, dtype=torch.float32)
        denominator = max(width // 2 - 1, 1) if self.layout == "tensor2tensor" else width / 2
        angles = positions[..., None].float() * self.base ** (-steps / denominator)
        sin, cos = angles.sin(), angles.cos()
        if self.layout == "interleaved":
            rows = torch.stack((sin, cos), dim=-1).flatten(-2)[..., :width]
        else:
            rows = torch.cat((sin, cos[..., : width // 2]), dim=-1)
        return self.scale * rows

    def describe(self, head_dim: int) -> str:
        scale = "" if self.scale == 1 else f", scale={self.scale:g}"
        return f"Sinusoidal(base={self.base:g}, {self.layout}{scale})"
