"""Learned scheme: keeps a learned position table and resizes it to another length or image size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..core.registry import POSITIONS
from ..errors import OptionError
from .positions import Position

METHODS = ("tile", "linear")  # of a sequence's table, the first by default
GRID_METHODS = ("bicubic", "bicubic-antialias", "linear", "linear-antialias")  # of a grid's
_MOST_PIXELS = 2**20  # a side


@POSITIONS.register("learned")
@dataclass(frozen=True)
class Learned(Position):
    """Learned absolute positions in another number: the table is kept and resized; new rows need training.

    The table of a sequence is extended, so that its first rows stay bit for bit (fewer are cut off), or stretched over
    the new length, so that every row changes but the first and the last.

    The table of an image's patches is interpolated between rows and between columns, as for fine-tuning at a higher
    resolution (Dosovitskiy et al. 2021, arXiv:2010.11929, section 3.2), with corners not aligned: what transformers'
    `interpolate_pos_encoding` does in every forward (ViT's, after DINO's code). Rows of class and other tokens stay bit
    for bit. The config's `image_size` follows, so that the model is its host's for images of that size,
    and needs no flag; the image processor's size is the caller's to set.

    Args:
        max_positions: positions of the new table; rows that hold none (BART's and OPT's two) come on top and are kept.
            Of a square grid of patches: how many patches, a square number.
        method: "tile" repeats the table (Longformer: Beltagy et al. 2020, arXiv:2004.05150, section 5); "linear"
            interpolates it between its ends (position interpolation: Chen et al. 2023, arXiv:2306.15595, on a table).
            On a grid: "bicubic" or "linear", both also as "...-antialias". None is "tile", and on a grid what the host
            itself does: "bicubic" mostly.
        image_size: pixels of the new images, a side or (height, width), for tables on a grid; others stay.

    Raises:
        OptionError: an option is outside its domain.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16))
        >>> from hfpatch import Learned, plan_patch
        >>> plan_patch(model, pos=Learned(max_positions=2048)).rows[0].becomes
        'Learned(2048, tile)'
    """

    also_called: ClassVar[tuple[str, ...]] = ("absolute", "table", "interpolated")
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
        return self._method_of(METHODS, "grids of patches; a sequence's table") or METHODS[0]

    def grid_method(self, usual: str = "bicubic") -> str:
        """The method that resizes a table on a grid; `usual` if None was passed.

        Raises:
            OptionError: the method is one for sequences alone.
        """
        return self._method_of(GRID_METHODS, "sequences; a grid of patches") or usual

    def _method_of(self, known: tuple[str, ...], kinds: str) -> str | None:
        if self.method is not None and self.method not in known:
            raise OptionError(f"Learned: method {self.method!r} is for {kinds} takes {', '.join(known)}.")
        return self.method

    def loss(self, old: int) -> str | None:
        """What resizing a table of `old` positions doesn't preserve; None if every position keeps its row."""
        if self.line_method() == "linear":
            return f"its {old} positions are stretched over {self.max_positions}"
        if self.max_positions is not None and self.max_positions < old:
            return f"inputs beyond {self.max_positions} tokens are refused"
        return None

    def note(self, old: int) -> str | None:
        """Where the rows come from that a table of `old` positions hadn't; None if it had them all."""
        new = self.max_positions or old
        if new <= old:
            return None
        if self.line_method() == "linear":
            return "interpolated rows were never trained"
        return f"rows {old} to {new - 1} repeat the first ones, and were never trained"

    def resize(self, table: Tensor) -> Tensor:
        """A table (rows, width) of positions as (max_positions, width), in its dtype."""
        old, new = len(table), self.max_positions or len(table)
        if old == new:
            return table.clone()
        if self.line_method() == "tile":
            return table.repeat(-(-new // old), 1)[:new]
        return _interpolate(table.T[None], new, mode="linear", align_corners=True)[0].T.contiguous()

    def interpolate(self, grid: Tensor, rows: int, columns: int, usual: str = "bicubic") -> Tensor:
        """A table (frames, rows, columns, width) of patches with other rows and columns, in its dtype.

        `usual` as in `grid_method`.
        """
        if grid.shape[1:3] == (rows, columns):
            return grid.clone()
        kind, _, antialias = self.grid_method(usual).partition("-")
        mode = {"bicubic": "bicubic", "linear": "bilinear"}[kind]
        options: dict[str, Any] = {"mode": mode, "align_corners": False, "antialias": bool(antialias)}
        return _interpolate(grid.permute(0, 3, 1, 2), (rows, columns), **options).permute(0, 2, 3, 1).contiguous()

    def describe(self, head_dim: int) -> str:
        if self.image_size is not None:
            return f"Learned(image_size={self.image_size}{f', {self.method}' if self.method else ''})"
        return f"Learned({self.max_positions}, {self.line_method()})"


def _interpolate(x: Tensor, size: int | tuple[int, int], **options: Any) -> Tensor:
    """x (batch, channels, ...) with another size of its last axes, computed in float32 or wider."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    return nn.functional.interpolate(wide, size=size, **options).to(x.dtype)
