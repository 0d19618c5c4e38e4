"""Learned positions of another number: the table stays and is resized, the baseline of every other scheme."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..errors import OptionError
from ..registry import POSITIONS
from .scheme import Position

METHODS = ("tile", "linear", "nearest", "mean", "normal", "zeros")


@POSITIONS.register("learned")
@dataclass(frozen=True)
class Learned(Position):
    """Learned absolute positions, as many as asked for: the table is kept and resized, its new rows are trained on.

    "tile" and those after "nearest" extend the table: the first rows stay bit for bit (fewer are cut off). "linear"
    and "nearest" stretch it over the new length, so that every row changes but the first and the last.

    Args:
        max_positions: positions of the new table; rows that hold none (BART's and OPT's two) come on top and are kept.
        method: "tile" repeats the table (Longformer: Beltagy et al. 2020, arXiv:2004.05150, section 5); "linear"
            interpolates it between its ends (position interpolation: Chen et al. 2023, arXiv:2306.15595, on a table);
            "nearest" repeats each row in place; "mean" fills with the mean row; "normal" draws from a normal
            distribution of the table's mean and standard deviation per channel; "zeros" fills with zeros.

    Raises:
        OptionError: an option is outside its domain.
    """

    method: str = "tile"
    any_length: ClassVar[bool] = False
    keeps_table: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method not in METHODS:
            raise OptionError(f"Learned: method must be one of {', '.join(METHODS)}, not {self.method!r}.")

    @property
    def stretches(self) -> bool:
        """Whether old positions move, rather than new ones being added after them."""
        return self.method in ("linear", "nearest")

    def loss(self, old: int) -> str | None:
        """What a resized table of `old` positions doesn't preserve; None where each of them keeps its row."""
        if self.stretches:
            return f"its {old} positions are stretched over {self.max_positions}"
        if self.max_positions is not None and self.max_positions < old:
            return f"inputs beyond {self.max_positions} tokens are refused"
        return None

    def resized(self, table: Tensor) -> Tensor:
        """A table (rows, width) of positions as (max_positions, width), in its dtype; float32 or wider inside."""
        old, new = len(table), self.max_positions or len(table)
        if old == new:
            return table.clone()
        wide = table.float() if table.dtype in (torch.float16, torch.bfloat16) else table
        if self.stretches:
            mode = {"mode": "linear", "align_corners": True} if self.method == "linear" else {"mode": "nearest"}
            stretched = nn.functional.interpolate(wide.T[None], size=new, **mode)
            return stretched[0].T.to(table.dtype).contiguous()
        if new < old:
            return table[:new].clone()
        return torch.cat((table, self._added(wide, new - old).to(table.dtype)))

    def _added(self, table: Tensor, count: int) -> Tensor:
        """Rows (count, width) that follow the table's own."""
        if self.method == "tile":
            return table.repeat(-(-count // len(table)), 1)[:count]
        rows = table.new_zeros(count, table.shape[-1])
        if self.method == "mean":
            rows += table.mean(0)
        elif self.method == "normal":
            generator = torch.Generator().manual_seed(count)
            noise = torch.randn(rows.shape, generator=generator, dtype=rows.dtype, device="cpu").to(rows.device)
            rows += table.mean(0) + table.std(0) * noise
        return rows

    def describe(self, head_dim: int) -> str:
        return f"Learned({self.max_positions}, {self.method})"
