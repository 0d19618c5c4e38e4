"""Figure of recipes/compare.py: learning curves (means over seeds), and their differences from the control."""

import io
import math
import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from .compare_report import main_name
from .paired import Kind, control_kind, control_of, grid_of, read_cells, t_interval
from .report import COLOURS
from .settings import CONTROL

DASHES = ["-", (0, (4, 1.5)), (0, (1, 1)), (0, (6, 1.5, 1, 1.5))]  # a colour that comes again has another one
MOST_PANELS = 6
MOST_BANDS = 5  # of more lines the bands would hide each other
INK = "#010203"  # stands for the page's own colour of text in an SVG

Results = dict[str, Any]
Points = dict[int, list[float]]  # step -> a figure for each seed


def draw_curves(results: Results, path: Path) -> None:
    figure = make_figure(results, "black")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def svg_curves(results: Results, about: str) -> str:
    """The same as an SVG element: colours are the page's CSS variables, and screen readers are told what it shows."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "hfpatch", "font.family": "sans-serif"}):
        figure = make_figure(results, INK)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        plt.close(figure)
    text = re.sub(r"<metadata>.*?</metadata>", "", stream.getvalue(), flags=re.DOTALL)
    text = text[text.index("<svg") :].replace(INK, "var(--ink)")
    for i, colour in enumerate(COLOURS):
        text = re.sub(colour, f"var(--line{i})", text, flags=re.IGNORECASE)
    text = re.sub(
        r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-label="{about}">', text, count=1
    )
    text = re.sub(r"font: ([^;\"]*?)'?DejaVu Sans'?[^;\"]*", r"font: \1sans-serif", text)
    return re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")


def make_figure(results: Results, ink: str) -> Any:
    """A row for each panel: curves to the left, paired differences to the right, bands for the spread over seeds."""
    names = ["text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"]
    with mpl.rc_context(dict.fromkeys(names, ink)):
        panels = panels_of(results)
        looks = looks_of(results, panels)
        size = (11, 0.7 + 3.6 * len(panels))
        figure, axes = plt.subplots(len(panels), 2, figsize=size, squeeze=False, layout="constrained")
        for (heading, lines), (left, right) in zip(panels.items(), axes, strict=True):
            draw_panel(results, lines, looks, left, right, ink)
            left.set_title(heading, loc="left")
            right.set_title("difference from the control, step by step", loc="left", fontsize="medium")
        named = {}
        for axis in axes.flat:
            handles, texts = axis.get_legend_handles_labels()
            named |= {text: handle for text, handle in zip(texts, handles, strict=True) if text not in named}
        # Below the axes: nothing is covered, whatever the curves do; in as many columns as there is room for.
        below = {"loc": "outside lower left", "frameon": False, "handlelength": 2.2}
        for columns in range(6, 0, -1):
            legend = figure.legend(named.values(), named, ncols=columns, **below)
            if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
                break
            legend.remove()
    return figure


def looks_of(results: Results, panels: dict[str, dict[str, Kind]]) -> dict[str, dict[str, Any]]:
    """How each line looks, the same in all panels. Where starts and methods differ both, dashes tell the start."""
    kinds = {name: kind for lines in panels.values() for name, kind in lines.items()}
    starts = list(dict.fromkeys(kind.start for kind in kinds.values()))
    methods = list(dict.fromkeys(kind.method for kind in kinds.values()))
    both = len(starts) > 1 and len(methods) > 1
    looks = {}
    for i, (name, kind) in enumerate(kinds.items()):
        colour, dash = (methods.index(kind.method), starts.index(kind.start)) if both else (i % 6, i // 6)
        # Each line is thinner than the one it may cover, so that equal curves show as stripes.
        wide = max(3.6 - 0.5 * i, 1.4) if len(kinds) <= 6 else 1.6
        looks[name] = {"color": COLOURS[colour % 6], "ls": DASHES[dash % len(DASHES)], "lw": wide, "zorder": 3 + i}
    return looks


def panels_of(results: Results) -> dict[str, dict[str, Kind]]:
    """Heading -> what each line is called -> its kind.

    One way to start and to train: a panel shows the variants. Several: each variant has a panel, which shows the ways.
    """
    done = {cell.kind for cell, record in read_cells(results).items() if not record.get("failed")}
    kinds = [kind for kind in dict.fromkeys(cell.kind for cell in grid_of(results)) if kind in done]
    compared = [kind for kind in kinds if not kind.is_control] or kinds
    ways = len({(kind.start, kind.method) for kind in compared}) > 1
    budgets = sorted({kind.steps for kind in compared})
    subjects = list(dict.fromkeys(kind.variant for kind in compared)) if ways else [""]
    if len(subjects) * len(budgets) > MOST_PANELS:
        budgets = budgets[-1:]
    panels: dict[str, dict[str, Kind]] = {}
    for subject, steps in list(product(subjects, budgets))[: 2 * MOST_PANELS]:
        lines = {}
        for kind in compared:
            if kind.steps == steps and subject in ("", kind.variant):
                lines[", ".join(varied_names(results, kind)) if ways else kind.variant] = kind
        heading = [subject] * bool(subject) + [f"{steps} steps"] * (len(budgets) > 1)
        if lines:
            panels[", ".join(heading) or f"held-out {main_name(results)}"] = lines
    return panels


def varied_names(results: Results, kind: Kind) -> list[str]:
    """Start and method, as far as they differ in the grid."""
    compared = [cell.kind for cell in grid_of(results) if not cell.kind.is_control]
    return [getattr(kind, n) for n in ("start", "method") if len({getattr(k, n) for k in compared}) > 1]


def draw_panel(
    results: Results, lines: dict[str, Kind], looks: dict[str, dict[str, Any]], left: Any, right: Any, ink: str
) -> None:
    steps, black = next(iter(lines.values())).steps, {"color": ink, "lw": 1.2, "zorder": 99}
    few, means = len(lines) <= MOST_BANDS, []
    for name, kind in lines.items():
        own, gaps = points(results, kind)
        if not kind.is_control:
            means += line(left, own, looks[name], name, deviation if few else None)
            line(right, gaps, looks[name], name, confidence if few else None)
    control, _ = points(results, control_kind(results, steps))
    if control:
        means += line(left, control, black, CONTROL, deviation if few else None)
        right.axhline(0, label=CONTROL, **black)
        margin = margin_of(results, steps)
        right.axhspan(-margin, margin, color=ink, alpha=0.08, lw=0, zorder=0, label="counts as no difference")
        spread_out(right, margin)
    falls = not results["higher_is_better"] and means and min(means) > 0
    if falls and max(means) > 2.5 * min(means):  # a loss that was high at first
        left.set_yscale("log")
        left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        left.yaxis.set_major_formatter("{x:g}")
        left.yaxis.set_minor_formatter(NullFormatter())
    left.set(ylabel=f"held-out {main_name(results)}")
    right.set(ylabel=f"{main_name(results)} - control's")
    for axis in (left, right):
        step_axis(axis, steps)


def points(results: Results, kind: Kind) -> tuple[Points, Points]:
    """The main figure of every seed by step, and its differences from the control's."""
    cells, main = read_cells(results), results["main"]
    own: Points = {}
    gaps: Points = {}
    for cell, record in cells.items():
        if cell.kind != kind or record.get("failed"):
            continue
        control = cells.get(control_of(cell, results), {})
        reference = {p["step"]: p[main] for p in control.get("curve", ())}
        for point in record["curve"]:
            own.setdefault(point["step"], []).append(point[main])
            if point["step"] in reference:
                gaps.setdefault(point["step"], []).append(point[main] - reference[point["step"]])
    return own, gaps


def deviation(figures: Sequence[float]) -> tuple[float, float]:
    found = t_interval(figures)
    return found.mean - (found.sd or 0), found.mean + (found.sd or 0)


def confidence(figures: Sequence[float]) -> tuple[float, float]:
    found = t_interval(figures)
    return (found.mean, found.mean) if found.low is None or found.high is None else (found.low, found.high)


def line(axis: Any, found: Points, look: dict[str, Any], name: str, band: Any) -> list[float]:
    """The mean of each step and a band; returns the means. Steps that not all seeds have are left out."""
    most = max(map(len, found.values()), default=0)
    steps = sorted(step for step, figures in found.items() if len(figures) == most)
    means = [float(np.mean(found[step])) for step in steps]
    axis.plot(steps, means, label=name, **look)
    if most > 1 and band:
        low, high = zip(*(band(found[step]) for step in steps), strict=True)
        axis.fill_between(steps, low, high, color=look["color"], alpha=0.16, lw=0, zorder=1)
    return means


def margin_of(results: Results, steps: int) -> float:
    controls = [r for c, r in read_cells(results).items() if c.kind == control_kind(results, steps) and "end" in r]
    return results["config"]["margin"] * abs(float(np.mean([r["end"][results["main"]] for r in controls])))


def spread_out(axis: Any, margin: float) -> None:
    """What a swap cost at first must not flatten the rest: far from zero by orders of magnitude, if it is far."""
    low, high = axis.get_ylim()
    if max(-low, high) > 12 * margin > 0:
        wide = 2 * margin
        axis.set_yscale("asinh", linear_width=wide)
        places = sorted((m * 10.0**e for e in range(-9, 9) for m in (1, 2, 5)), reverse=True)
        ticks, gap = [0.0], 0.06 * (math.asinh(high / wide) - math.asinh(low / wide))
        for tick in (sign * place for place in places for sign in (1, -1) if low <= sign * place <= high):
            if all(abs(math.asinh(tick / wide) - math.asinh(other / wide)) > gap for other in ticks):
                ticks.append(tick)
        axis.set_yticks(ticks)
        axis.yaxis.set_minor_locator(NullLocator())
        axis.set_ylim(low, high)
    axis.yaxis.set_major_formatter(lambda x, _: f"{x:+.3g}" if x else "0")


def step_axis(axis: Any, steps: int) -> None:
    axis.set_xscale("symlog", linthresh=1, linscale=0.4)  # most happens in the first steps
    axis.set_xlim(0, steps)
    ticks = [0, *(m * 10**e for e in range(8) for m in (1, 2, 5) if m * 10**e <= steps)]
    axis.set_xticks(ticks if len(ticks) < 12 else [t for t in ticks if str(t)[0] in "01"])
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("optimizer steps", loc="right")
    axis.grid(alpha=0.12)
    axis.spines[["top", "right"]].set_visible(False)
