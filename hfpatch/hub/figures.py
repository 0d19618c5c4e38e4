"""Plot of the error layer by layer as SVG path data for the report page."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..verification.report import ErrorLine, LayerRow, error_lines

WIDTH, HEIGHT = 640, 300  # in pixels at full size
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, WIDTH - 10, 12, HEIGHT - 38
_TICKS = 6  # labels of an axis, at most
_DASHES = {"reference": "2 4", "model": "none", "centred": "7 4"}
_COLOURS = ("#0b6bcb", "#c2410c", "#2a9d55", "#8b2fc9", "#0e7490", "#857000")


@dataclass(frozen=True)
class Curve:
    """One line of a figure: its name in the legend, its colour and dashes, and its SVG path data."""

    name: str
    colour: str
    dashes: str
    data: str


@dataclass(frozen=True)
class Figure:
    """Plot of the error layer by layer: curves, and positions of the axis labels."""

    stream: str
    curves: list[Curve]
    powers: list[tuple[float, str]]
    layers: list[tuple[float, str]]


def layer_figures(rows: list[LayerRow]) -> list[Figure]:
    """Return plots of each stream's error by layer, on a log axis; colours are dtypes, dashes are kinds of lines."""
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    colours = {dtype: _COLOURS[i % len(_COLOURS)] for i, dtype in enumerate(dtypes)}
    figures = (_figure(stream, lines, colours) for stream, lines in error_lines(rows).items())
    return [figure for figure in figures if figure is not None]


def _figure(stream: str, lines: dict[ErrorLine, dict[int, float]], colours: dict[str, str]) -> Figure | None:
    """None if no error has a logarithm."""
    powers = [math.log10(error) for line in lines.values() for error in line.values() if not math.isnan(error)]
    if not powers:
        return None
    low = math.floor(min(powers))
    high = max(math.ceil(max(powers)), low + 1)
    layers = sorted({layer for line in lines.values() for layer in line})

    def x(layer: int) -> float:
        return round(_LEFT + (_RIGHT - _LEFT) * layer / max(layers[-1], 1), 1)

    def y(power: float) -> float:
        return round(_BOTTOM - (_BOTTOM - _TOP) * (power - low) / (high - low), 1)

    curves = []
    for line, errors in lines.items():
        data, move = "", "M"
        for layer, error in sorted(errors.items()):
            if not math.isnan(error):
                data += f"{move}{x(layer)},{y(math.log10(error))}"
            move = "M" if math.isnan(error) else "L"
        curves.append(Curve(line.label, colours[line.dtype], _DASHES[line.kind], data))
    shown = range(low, high + 1, math.ceil((high - low + 1) / _TICKS))
    marked = layers[:: math.ceil(len(layers) / (2 * _TICKS))]
    return Figure(stream, curves, [(y(one), f"1e{one}") for one in shown], [(x(one), str(one)) for one in marked])
