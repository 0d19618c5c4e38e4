"""Learned positions of another number: the table stays and is resized, the baseline of every other scheme."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..core.registry import POSITIONS
from ..errors import OptionError
from .positions import Position

METHODS = ("tile", "linear", "nearest", "mean", "normal", "zeros")  # of a sequence's table, the first by default
# of a grid's, by torch's names
GRID_METHODS: dict[str, dict[str, Any]] = {
    "bicubic": {"mode": "bicubic", "align_corners": False},
    "bicubic-antialias": {"mode": "bicubic", "align_corners": False, "antialias": True},
    "linear": {"mode": "bilinear", "align_corners": False},
    "linear-antialias": {"mode": "bilinear", "align_corners": False, "antialias": True},
    "nearest": {"mode": "nearest-exact"},
}
_MOST_PIXELS = 2**20  # a side


@POSITIONS.register("learned")
@dataclass(frozen=True)
class Learned(Position):
    """Learned absolute positions, as many as asked for: the table is kept and resized, its new rows are trained on.

    The table of a sequence: "tile" and those after "nearest" extend it: the first rows stay bit for bit (fewer are cut
    off). "linear" and "nearest" stretch it over the new length, so that every row changes but the first and the last.

    The table of an image's patches is interpolated between rows and between columns, as for fine-tuning at a higher
    resolution (Dosovitskiy et al. 2021, arXiv:2010.11929, section 3.2), with corners not aligned: what transformers'
    `interpolate_pos_encoding` does in every forward (ViT's, after DINO's code). Rows of class and other tokens stay bit
    for bit. The config's `image_size` follows, so that the model is its host's for images of that size,
    and needs no flag; the image processor's size is the caller's to set.

    Args:
        max_positions: positions of the new table; rows that hold none (BART's and OPT's two) come on top and are kept.
            Of a square grid of patches: how many patches, a square number.
        method: "tile" repeats the table (Longformer: Beltagy et al. 2020, arXiv:2004.05150, section 5); "linear"
            interpolates it between its ends (position interpolation: Chen et al. 2023, arXiv:2306.15595, on a table);
            "nearest" repeats each row in place; "mean" fills with the mean row; "normal" draws from a normal
            distribution of the table's mean and standard deviation per channel; "zeros" fills with zeros. On a grid:
            "bicubic", "linear", both also as "...-antialias", or "nearest". None is "tile", and on a grid what the
            host itself does: "bicubic" mostly.
        image_size: pixels of the new images, a side or (height, width), for tables on a grid; others stay.

    Raises:
        OptionError: an option is outside its domain.
    """

    method: str | None = None
    image_size: int | tuple[int, int] | None = None
    any_length: ClassVar[bool] = False
    keeps_table: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        known = list(dict.fromkeys((*METHODS, *GRID_METHODS)))
        if self.method is not None and self.method not in known:
            raise OptionError(f"Learned: method must be one of {', '.join(known)}, not {self.method!r}.")
        if self.image_size is None:
            return
        if isinstance(self.image_size, list):  # JSON has no tuples
            object.__setattr__(self, "image_size", tuple(self.image_size))
        sides = self.image_size if isinstance(self.image_size, tuple) else (self.image_size,)
        if len(sides) not in (1, 2) or any(type(side) is not int or not 1 <= side <= _MOST_PIXELS for side in sides):
            raise OptionError(
                f"Learned: image_size must be a number of pixels, or [height, width], not {self.image_size!r:.40}."
            )
        if self.max_positions is not None:
            raise OptionError("Learned: image_size and max_positions both say how large the table is: choose one.")
        self.grid_method()

    def line_method(self) -> str:
        """The method for the table of a sequence.

        Raises:
            OptionError: the method is one for grids alone.
        """
        method = self.method or METHODS[0]
        if method not in METHODS:
            raise OptionError(
                f"Learned: method {method!r} is for grids of patches; a sequence's table takes {', '.join(METHODS)}."
            )
        return method

    def grid_method(self, usual: str = "bicubic") -> str:
        """The method for the table of a grid; `usual` is what None stands for.

        Raises:
            OptionError: the method is one for sequences alone.
        """
        method = self.method or usual
        if method not in GRID_METHODS:
            raise OptionError(
                f"Learned: method {method!r} is for sequences; a grid of patches takes {', '.join(GRID_METHODS)}."
            )
        return method

    @property
    def stretches(self) -> bool:
        """Whether old positions move, rather than new ones being added after them."""
        return self.line_method() in ("linear", "nearest")

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
        method = self.line_method()
        if self.stretches:
            mode = {"mode": "linear", "align_corners": True} if method == "linear" else {"mode": "nearest"}
            stretched = nn.functional.interpolate(wide.T[None], size=new, **mode)
            return stretched[0].T.to(table.dtype).contiguous()
        if new < old:
            return table[:new].clone()
        return torch.cat((table, self._added(wide, new - old).to(table.dtype)))

    def _added(self, table: Tensor, count: int) -> Tensor:
        """Rows (count, width) that follow the table's own."""
        method = self.line_method()
        if method == "tile":
            return table.repeat(-(-count // len(table)), 1)[:count]
        rows = table.new_zeros(count, table.shape[-1])
        if method == "mean":
            rows += table.mean(0)
        elif method == "normal":
            generator = torch.Generator().manual_seed(count)
            noise = torch.randn(rows.shape, generator=generator, dtype=rows.dtype, device="cpu").to(rows.device)
            rows += table.mean(0) + table.std(0) * noise
        return rows

    def interpolated(self, grid: Tensor, rows: int, columns: int, usual: str = "bicubic") -> Tensor:
        """A table (frames, rows, columns, width) of patches with other rows and columns, in its dtype.

        float32 or wider inside; `usual` as in `grid_method`.
        """
        settings = GRID_METHODS[self.grid_method(usual)]
        if grid.shape[1:3] == (rows, columns):
            return grid.clone()
        wide = grid.float() if grid.dtype in (torch.float16, torch.bfloat16) else grid
        between = nn.functional.interpolate(wide.permute(0, 3, 1, 2), size=(rows, columns), **settings)
        return between.permute(0, 2, 3, 1).to(grid.dtype).contiguous()

    def describe(self, head_dim: int) -> str:
        if self.image_size is not None:
            return f"Learned(image_size={self.image_size}{f', {self.method}' if self.method else ''})"
        return f"Learned({self.max_positions}, {self.line_method()})"
