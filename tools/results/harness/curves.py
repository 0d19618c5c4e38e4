"""Learning curves: a figure by step on the left, its difference from the control's on the right."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import pandas as pd
from paired import half_width

matplotlib.use("Agg")  # to a file, with or without a screen
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]  # Okabe and Ito: also for the colour-blind
DASHES = ["-", (0, (4, 1.5)), (0, (1, 1)), (0, (6, 1.5, 1, 1.5))]  # a colour that comes again has another one
CONTROL_LINE = {"color": "black", "ls": "-", "lw": 1.2, "zorder": 99}
DASH = 4.0  # in widths of its line
ABOUT = (
    "Left: means over seeds, with bands of one standard deviation. Right: mean difference from the control of the same "
    "seed at the same step, with 95 % intervals; grey counts as none. Of more than five lines there are no bands. "
    "Lines that run on top of each other are drawn as one, in pieces of their colours by turns. "
    "Curves may be of a part of the held-out data."
)

Curve = pd.DataFrame  # a row for each step, a column for each seed


@dataclass
class Panel:
    """Curves that are drawn together."""

    title: str
    figure: str  # what they show
    lines: dict[str, Curve]
    control: Curve | None = None  # what they are compared with, if there is something
    control_name: str = "control"
    before: float | None = None  # the figure before the patch, drawn as a line across
    margin: float = 0.0  # a difference from the control within it counts as none


def curve_of(stages: dict[int, dict[str, Any]], figure: str) -> Curve:
    """One figure while training, of the stages of several seeds; steps that not all seeds have are left out."""
    points = {seed: {point["step"]: point[figure] for point in stage["curve"]} for seed, stage in stages.items()}
    return pd.DataFrame(points).sort_index().dropna()


def draw_panels(panels: Sequence[Panel], path: Path) -> None:
    """A row of plots for each panel, two where one has a control; lines of one name look the same in all."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    turns = turns_of(panels)
    rows = max(1, len(panels))  # where every model failed there is nothing to draw
    columns = 1 + any(panel.control is not None for panel in panels)
    size = (4 + 3.5 * columns, 1 + 3.6 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for panel, (left, *compared) in zip(panels, axes, strict=False):
        bands = len(panel.lines) <= 5  # of more lines they would hide each other
        for name, curve in panel.lines.items():
            i = names.index(name)
            look = {"color": COLOURS[i % 6], "ls": DASHES[i // 6 % 4], "lw": 1.8, "label": name} | turns.get(name, {})
            draw_line(left, curve, curve.std(axis=1) * bands, look)
            if panel.control is not None:
                gaps = (curve - panel.control).dropna(axis=1, how="all").dropna()
                draw_line(compared[0], gaps, half_width(gaps.std(axis=1), gaps.shape[1]) * bands, look)
        if panel.before is not None:
            left.axhline(panel.before, color="#888888", ls="--", lw=1.2, label="before the patch")
        left.set(ylabel=panel.figure)
        left.set_title(panel.title, loc="left")
        if panel.control is not None:
            look = CONTROL_LINE | turns.get(None, {})
            draw_line(left, panel.control, panel.control.std(axis=1) * bands, look | {"label": panel.control_name})
            finish_differences(compared[0], panel, look)
        for axis in compared:
            axis.set_visible(panel.control is not None)
        for axis in (left, *compared):
            count_steps(axis)
    named = {}
    for axis in axes.flat:
        named |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend(named.values(), named, loc="outside lower left", frameon=False, ncols=3, handlelength=3)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def turns_of(panels: Sequence[Panel]) -> dict[str | None, dict[str, Any]]:
    """How lines look that coincide wherever both are drawn: dashes in each other's gaps. The control's name is None."""
    drawn = [{**panel.lines} if panel.control is None else {**panel.lines, None: panel.control} for panel in panels]
    means = [{name: curve.mean(axis=1) for name, curve in lines.items()} for lines in drawn]
    groups: list[list[str | None]] = []
    for name in dict.fromkeys(name for lines in means for name in lines):
        group = next((group for group in groups if all(coincide(name, other, means) for other in group)), None)
        groups.append([name]) if group is None else group.append(name)
    return {
        name: {"ls": (DASH * turn, (DASH, DASH * (len(group) - 1))), "lw": 1.8}  # dashes grow with the width
        for group in groups
        for turn, name in enumerate(group)
        if len(group) > 1
    }


def coincide(name: str | None, other: str | None, means: Sequence[dict[str | None, pd.Series]]) -> bool:
    """Whether two lines are a line's width apart at most, in every panel that has both."""
    both = [lines for lines in means if name in lines and other in lines]
    spreads = [
        max(line.max() for line in lines.values()) - min(line.min() for line in lines.values()) for lines in both
    ]
    gaps = [(lines[name] - lines[other]).abs().max() for lines in both]
    return bool(both) and all(gap <= spread / 100 for gap, spread in zip(gaps, spreads, strict=True))


def draw_line(axis: Any, curve: Curve, half: pd.Series, look: dict[str, Any]) -> None:
    """The mean over seeds, and a band around it; a single seed has none."""
    mean = curve.mean(axis=1)
    axis.plot(mean.index, mean, **look)
    axis.fill_between(mean.index, mean - half, mean + half, color=look["color"], alpha=0.15, lw=0, zorder=1)


def finish_differences(axis: Any, panel: Panel, look: dict[str, Any]) -> None:
    axis.axhline(0, **look)
    if panel.margin:
        axis.axhspan(-panel.margin, panel.margin, color="black", alpha=0.08, lw=0, label="counts as no difference")
        if max(map(abs, axis.get_ylim())) > 12 * panel.margin:  # what a swap cost at first must not flatten the rest
            axis.set_yscale("symlog", linthresh=10 ** math.ceil(math.log10(2 * panel.margin)))
    axis.yaxis.set_major_formatter(lambda x, _: f"{x:+.3g}" if x else "0")
    axis.set(ylabel=f"{panel.figure} - {panel.control_name}'s")
    axis.set_title(f"difference from the {panel.control_name} at the same step", loc="left", fontsize="medium")


def count_steps(axis: Any) -> None:
    """Most happens in the first steps, which a logarithmic axis shows; 0 is on it."""
    axis.set_xscale("symlog", linthresh=1, linscale=0.4)
    axis.set_xlim(left=0)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("optimizer steps", loc="right")
    axis.grid(alpha=0.15)
    axis.spines[["top", "right"]].set_visible(False)
