"""Figures of a report page as plain shapes, which its template writes as SVG: sketches of blocks, curves by layer."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..verification.report import LayerRow, error_lines
from .sketch import BlockSketch, BranchSketch, Piece

# In pixels at full size, which is small enough for a phone
_WIDTH, _STREAM, _LEFT, _LINE, _GAP, _RADIUS = 340, 22, 62, 16, 20, 9
_LETTER = 7.4  # the width of one in a box
_TICKS = 6  # labels of an axis, at most


@dataclass(frozen=True)
class Box:
    """A rectangle with a title and lines of text; `style` is a class of the page's CSS."""

    x: float
    y: float
    width: float
    height: float
    title: str
    lines: tuple[str, ...]
    style: str


@dataclass(frozen=True)
class Text:
    """A line of text at a point; `style` is a class of the page's CSS."""

    x: float
    y: float
    text: str
    style: str = ""


@dataclass
class Figure:
    """Shapes of one SVG: boxes, sums (x, y), paths (SVG path data, class) and texts."""

    width: float
    height: float = 0
    title: str = ""
    boxes: list[Box] = field(default_factory=list)
    sums: list[tuple[float, float]] = field(default_factory=list)
    paths: list[tuple[str, str]] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)


def block_figures(before: BlockSketch, after: BlockSketch, positions: list[tuple[Piece, Piece]]) -> list[Figure]:
    """A block and what holds positions outside of it, before and after the patch; what differs is marked."""
    both = []
    for title, mine, other, side in (("Before", before, after, 0), ("After", after, before, 1)):
        there = {*_pieces(other), *(("", pair[1 - side]) for pair in positions)}
        drawing = _Drawing(f"{title}: {mine.names}", "after" if side else "before", there)
        for pair in positions:
            drawing.box(_LEFT, _WIDTH - _LEFT - 2, pair[side])
            drawing.y += 8
        drawing.block(mine)
        both.append(drawing.figure)
    for figure in both:
        figure.height = max(one.height for one in both)
    return both


def _pieces(block: BlockSketch) -> Iterator[tuple[str, Piece]]:
    """The pieces of a block, norms with the placement of their branch."""
    for branch in block.branches:
        yield "", branch.body
        yield from ((branch.placement, norm) for norm in (branch.norm, branch.second) if norm)


class _Drawing:
    """Draws a block from top to bottom: the stream on the left, its branches on the right.

    Args:
        title, side: of the figure, and the style of what differs from the other one.
        others: the other one's pieces, as `_pieces` has them.

    Attributes:
        y: where the next shape goes.
    """

    def __init__(self, title: str, side: str, others: set[tuple[str, Piece]]):
        self.figure, self.side, self.others, self.y = Figure(_WIDTH, title=title), side, others, 4.0
        self.middle = _LEFT + (_WIDTH - _LEFT - 2) / 2

    def box(self, x: float, width: float, piece: Piece, placement: str = "", note: str = "") -> None:
        """A piece's box at the present height; `placement` is that of a norm's branch."""
        letters = int(width / _LETTER)
        text = (piece.name, piece.text, *piece.notes, note)
        lines = tuple(line for one in text if one for line in textwrap.wrap(one, letters))
        height = 2 * 7 + _LINE * (1 + len(lines))
        style = "same" if (placement, piece) in self.others else self.side
        self.figure.boxes.append(Box(x, self.y, width, height, piece.title, lines, style))
        self.y += height

    def path(self, data: str, style: str = "flow") -> None:
        self.figure.paths.append((data, style))

    def block(self, block: BlockSketch) -> None:
        """The stream with all branches."""
        self.y += 14
        self.figure.texts.append(Text(_STREAM + 10, self.y + 4, "residual stream", "small"))
        top = self.y
        self.y += 12
        branches = list(block.branches)
        while branches:
            count = 1
            while branches[0].placement == branches[min(count, len(branches) - 1)].placement == "parallel":
                if count == len(branches):
                    break
                count += 1
            self._branches(branches[:count])
            del branches[:count]
        self.path(f"M{_STREAM},{top - 10}V{self.y + 16}", "stream")
        self.figure.height = self.y + 26

    def _branches(self, together: list[BranchSketch]) -> None:
        """One branch, or several that read and write the same points of the stream."""
        fork, ends, several = self.y, [], len(together) > 1
        width = _WIDTH - _LEFT - (14 if several else 2)
        for i, branch in enumerate(together):
            self.y += _GAP + (14 if i else 0)
            to = f"V{self.y - 14}H{self.middle}" if i else f"H{self.middle}"
            self.path(f"M{_STREAM},{fork}" + (f"H{_STREAM + 14}" if i else "") + f"{to}V{self.y - 2}")
            boxes: dict[str, tuple[Piece, ...]] = {
                "pre": (branch.norm, branch.body),
                "parallel": (branch.norm, branch.body),
            }
            boxes["sandwich"] = (branch.norm, branch.body, branch.second or branch.norm)
            boxes["olmo2"] = (branch.body, branch.norm)
            for j, piece in enumerate(boxes.get(branch.placement, (branch.body,))):
                if j:
                    self.path(f"M{self.middle},{self.y}V{self.y + 14}")
                    self.y += 16
                again = bool(i) and piece is branch.norm and piece == together[0].norm
                placement = "" if piece is branch.body else branch.placement
                self.box(_LEFT, width, piece, placement, "(the same module)" if again else "")
            ends.append(self.y)
        self.y += _GAP
        for end in ends:
            down = f"V{end + 8}H{_WIDTH - 1}V{self.y}" if end != ends[-1] else f"V{self.y}"
            self.path(f"M{self.middle},{end}{down}H{_STREAM + _RADIUS + 2}")
        self.figure.sums.append((_STREAM, self.y))
        last = together[-1]
        if last.alpha != 1.0:
            self.figure.texts.append(Text(_STREAM + 14, self.y + 16, f"{last.alpha:.4g} x + f(x)", "small"))
        self.y += _RADIUS
        if last.placement in ("post", "deepnorm"):
            self.y += 14
            self.box(4, _WIDTH - 6, last.norm, last.placement)
        self.y += 12


_Line = tuple[str, int, str]  # in a legend: its name, the number of its colour, its dashes
_DASHES = {"reference": "dotted", "model": "", "centred": "dashed"}


@dataclass(frozen=True)
class Curves:
    """Errors layer by layer of one stream, in two sizes, with the legend."""

    stream: str
    figures: dict[str, Figure]
    legend: list[_Line]


def layer_curves(rows: list[LayerRow]) -> list[Curves]:
    """The error of each stream layer by layer, on a logarithmic axis: colours are dtypes, dashes tell what is drawn."""
    found = []
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    for stream, points in error_lines(rows).items():
        lines = {(line.label, dtypes.index(line.dtype), _DASHES[line.kind]): errors for line, errors in points.items()}
        if not all(math.isnan(error) for line in lines.values() for error in line.values()):
            sizes = {"wide": (760, 300), "narrow": (340, 260)}
            figures = {size: _curves(f"{stream}, {size}", lines, *shape) for size, shape in sizes.items()}
            found.append(Curves(stream, figures, list(lines)))
    return found


def _curves(title: str, lines: dict[_Line, dict[int, float]], width: int, height: int) -> Figure:
    figure = Figure(width, height, title)
    left, right, top, bottom = 46, width - 10, 12, height - 38
    errors = [error for line in lines.values() for error in line.values() if not math.isnan(error)]
    low, high = math.floor(math.log10(min(errors))), math.ceil(math.log10(max(errors)))
    high = max(high, low + 1)
    layers = sorted({layer for line in lines.values() for layer in line})
    last = max(layers[-1], 1)

    def place(layer: float, power: float) -> tuple[float, float]:
        return left + (right - left) * layer / last, bottom - (bottom - top) * (power - low) / (high - low)

    for power in range(low, high + 1, math.ceil((high - low + 1) / _TICKS)):
        y = place(0, power)[1]
        figure.paths.append((f"M{left},{y:.1f}H{right}", "grid"))
        figure.texts.append(Text(left - 6, y + 4, f"1e{power}", "small end"))
    for layer in layers[:: math.ceil(len(layers) / (2 * _TICKS))]:
        figure.texts.append(Text(place(layer, low)[0], bottom + 18, str(layer), "small middle"))
    figure.texts.append(Text((left + right) / 2, height - 4, "layer (0: what enters the first)", "small middle"))
    for (_, colour, dots), line in lines.items():
        data, pen_up = "", True
        for layer, error in sorted(line.items()):
            if not math.isnan(error):
                x, y = place(layer, math.log10(error))
                data, pen_up = data + f"{'M' if pen_up else 'L'}{x:.1f},{y:.1f}", False
            else:
                pen_up = True
        figure.paths.append((data, f"curve c{colour % 8} {dots}"))
    return figure
