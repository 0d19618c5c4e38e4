"""Learned scheme: keeps a learned position table and resizes it to another length or image size."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..core.registry import POSITIONS
from ..errors import OptionError
from .position_schemes import Position

IMAGE_SIZE = "image_size"  # transformers' name
ALL = "all"  # rows
KEEPS = ("table", "rows")  # which old rows stay; the first is the default
METHODS = ("tile", "linear")  # for a sequence's table; the first is the default
GRID_METHODS = ("bicubic", "bicubic-antialias", "linear", "linear-antialias")  # for a grid's table
_MOST_PIXELS = 2**20  # of a side


def sides(size: Any) -> tuple[int, int]:
    """Return height and width of a config's image size, a side or both."""
    return (size[0], size[1]) if isinstance(size, list | tuple) else (size, size)


@POSITIONS.register("learned")
@dataclass(frozen=True)
class Learned(Position):
    """Learned absolute positions: the table is kept and resized to another number of rows; new rows need training.

    The table of a sequence is extended, so that its first rows stay bit for bit (for fewer positions it is cut off), or
    stretched over the new length, so that every row changes but the first and the last. Extended by n rows that repeat,
    a table w of N positions has at position i the row

        w[i] if i < N, else w[i mod n]    (keep="table": inputs up to N tokens give the same outputs, bit for bit)
        w[i mod n]                        (keep="rows": inputs up to n tokens do)

    The table of an image's patches is interpolated between rows and between columns, as for fine-tuning at a higher
    resolution (Dosovitskiy et al. 2021, arXiv:2010.11929, section 3.2), with corners not aligned: what transformers'
    `interpolate_pos_encoding` does in every forward (ViT's, after DINO's code). Rows of class and other tokens stay bit
    for bit. The config's `image_size` follows, so that the model is its host's for images of that size, and needs no
    flag; the caller sets the image processor's size.

    Args:
        max_positions: positions of the new table; rows without a position (BART's and OPT's two) come on top and are
            kept. For a square grid of patches, in a model without such a table: how many patches, a square number.
        method: "tile" repeats the table (Longformer: Beltagy et al. 2020, arXiv:2004.05150, section 5); "linear"
            interpolates it between its ends (position interpolation: Chen et al. 2023, arXiv:2306.15595, on a table).
            On a grid: "bicubic" or "linear", both also as "...-antialias". None is "tile", on a grid the host's own:
            "bicubic" mostly.
        rows: n, how many of the first rows are repeated: a number, or "all". None takes the trained rows, if they are
            known: up to the `max_seq_length` in the sentence-transformers folder that the model is from. Otherwise all.
        keep: which of the old rows stay in their places: the whole "table", or the repeated "rows" alone, if the rows
            behind them are worse than a repetition.
        image_size: pixels of the new images, a side or (height, width), for tables on a grid; other tables stay.

    Raises:
        OptionError: an option is outside its domain, or is for tables of another kind.

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
    rows: int | str | None = field(default=None, kw_only=True)
    keep: str = field(default="table", kw_only=True)
    any_length: ClassVar[bool] = False
    keeps_table: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        known = list(dict.fromkeys((*METHODS, *GRID_METHODS)))
        if self.method is not None and self.method not in known:
            raise OptionError(f"Learned: method must be one of {', '.join(known)}, not {self.method!r}.")
        if self.rows is not None and self.rows != ALL and (type(self.rows) is not int or self.rows < 1):
            raise OptionError(f"Learned: rows must be a positive integer or {ALL!r}, not {self.rows!r:.40}.")
        if self.keep not in KEEPS:
            raise OptionError(f"Learned: keep must be one of {', '.join(KEEPS)}, not {self.keep!r:.40}.")
        if self.repeats and (self.method not in (None, METHODS[0]) or self.image_size is not None):
            raise OptionError(
                f"Learned: rows and keep only extend a sequence's table (method={METHODS[0]}). Leave them out."
            )
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

    @property
    def repeats(self) -> bool:
        """Whether the scheme says which rows of a sequence's table are repeated."""
        return self.rows is not None or self.keep != KEEPS[0]

    def repeated(self, old: int) -> int:
        """How many rows of a table of `old` positions are repeated.

        Raises:
            OptionError: the table has fewer than `rows`.
        """
        if not isinstance(self.rows, int):
            return old
        if self.rows > old:
            raise OptionError(f"Learned: rows={self.rows} are more than the {old} positions of the table. Lower rows.")
        return self.rows

    def equal_up_to(self, old: int) -> int:
        """The longest inputs for which a table of `old` positions gives the same outputs as before; 0 if stretched."""
        new = self.max_positions or old
        if self.line_method() == "linear":
            return new if new == old else 0
        return min(new, old if self.keep == KEEPS[0] else self.repeated(old))

    def line_method(self) -> str:
        """The method for the table of a sequence.

        Raises:
            OptionError: the method is for grids only.
        """
        return self._method_of(METHODS, "grids of patches; a sequence's table") or METHODS[0]

    def grid_method(self, usual: str = "bicubic") -> str:
        """The method that resizes a table on a grid; `usual` if `method` is None.

        Raises:
            OptionError: the method is for sequences only.
        """
        return self._method_of(GRID_METHODS, "sequences; a grid of patches") or usual

    def _method_of(self, known: tuple[str, ...], kinds: str) -> str | None:
        if self.method is not None and self.method not in known:
            raise OptionError(f"Learned: method {self.method!r} is for {kinds} takes {' or '.join(known)}.")
        return self.method

    def loss(self, old: int) -> str | None:
        """What resizing a table of `old` positions doesn't preserve; None if every position keeps its row."""
        if self.line_method() == "linear":
            return f"its {old} positions are stretched over {self.max_positions}"
        equal, new = self.equal_up_to(old), self.max_positions or old
        changed = f"rows {equal} to {min(new, old) - 1} are replaced by the first ones" if equal < min(new, old) else ""
        refused = f"inputs beyond {new} tokens are refused" if new < old else ""
        return "; ".join(filter(None, (changed, refused))) or None

    def note(self, old: int) -> str | None:
        """Where new rows of a table of `old` positions come from, and which inputs stay equal; None if none are new."""
        equal, new = self.equal_up_to(old), self.max_positions or old
        if new <= old and equal == new:
            return None
        if self.line_method() == "linear":
            return "interpolated rows were never trained" if new > old else None
        rows, first = self.repeated(old), min(equal, old)
        which = "the first ones" if rows == old else f"rows 0 to {rows - 1}"
        return f"rows {first} to {new - 1} repeat {which}; inputs up to {equal} tokens stay equal, bit for bit"

    def resize(self, table: Tensor) -> Tensor:
        """A table (rows, width) of positions as (max_positions, width), in its dtype."""
        old, new = len(table), self.max_positions or len(table)
        if new == self.equal_up_to(old) == old:
            return table.clone()
        if self.line_method() == "tile":
            places = torch.arange(new, device=table.device)
            repeated = places % self.repeated(old)
            return table[repeated if self.keep != KEEPS[0] else torch.where(places < old, places, repeated)]
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
        options = [str(self.max_positions), self.line_method()] if self.max_positions else [self.line_method()]
        options += [] if self.rows is None else [f"rows={self.rows}"]
        return f"Learned({', '.join(options + ([] if self.keep == KEEPS[0] else [f'keep={self.keep}']))})"


def _interpolate(x: Tensor, size: int | tuple[int, int], **options: Any) -> Tensor:
    """x (batch, channels, ...) with another size of its last axes, computed in float32 or wider."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    return nn.functional.interpolate(wide, size=size, **options).to(x.dtype)
