"""What a reader sees of timings: a line for each subject with both modes side by side, and bars of the ratios."""

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
from paired import spread

from .bench_micro import COPY
from .curves import COLOURS
from .report import table
from .timing import MODES

Timing = dict[str, Any]
MICRO = "micro"  # the part of modules by themselves
MORE_COLOURS = [*COLOURS, "#F0E442", "#000000", "#999999", "#7F3C8D"]


def name_of(race: dict[str, Any]) -> str:
    return "{case}, {work}, {mode}".format(**race)


def against_basis(timing: Timing, basis: Timing) -> tuple[float, float, float] | None:
    """Time over the basis's, round by round: the median and its interval. None for the basis itself.

    Where a patch's modules were timed inside, it is that of the whole if only theirs had changed.
    """
    if timing is basis or not timing["seconds"] or not basis["seconds"]:
        return None
    patch, new, old = timing["subject"], timing["seconds"], basis["seconds"]
    if patch not in timing["inside_seconds"]:
        return spread([a / b for a, b in zip(new, old, strict=True)])
    new, old, whole = timing["inside_seconds"][patch], basis["inside_seconds"][patch], spread(old)[0]
    return spread([1 + (a - b) / whole for a, b in zip(new, old, strict=True)])


def show_time(seconds: list[float]) -> str:
    median = spread(seconds)[0]
    return f"{1e3 * median:.2f} ms" if median > 1e-3 else f"{1e6 * median:.0f} µs"


def row_of(race: dict[str, Any], timing: Timing) -> dict[str, str]:
    """What a table says of one timing, by heading."""
    mode, subject, basis = race["mode"], timing["subject"], race["timings"][0]
    told = {mode: show_time(timing["seconds"])}
    if ratio := against_basis(timing, basis):
        over = "basis" if race["part"] == MICRO else basis["subject"]
        told[f"{mode} / {over}"] = "{:.3f} ({:.3f}-{:.3f})".format(*ratio)
    if mode == "compiled":
        told["first call"] = f"{timing['first_seconds']:.0f} s"
    if timing["modules"] and ratio:
        before, after = (t["inside_seconds"][subject] for t in (basis, timing))
        told |= {"modules": str(timing["modules"]), "before": show_time(before), "after": show_time(after)}
    return told


def part_table(races: list[dict[str, Any]]) -> list[str]:
    """A line for each subject, with the case and the work in the first of a group; both modes side by side."""
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for race in races:
        for timing in (timing for timing in race["timings"] if timing["seconds"]):
            named = {"case": race["case"], "work": race["work"], "subject": timing["subject"]}
            rows.setdefault(tuple(named.values()), named).update(row_of(race, timing))
    frame = pd.DataFrame(rows.values())
    headings = sorted(frame.columns[3:], key=lambda heading: (heading not in MODES, "/" not in heading))
    group = frame[["case", "work"]]
    frame[["case", "work"]] = group.mask(group.duplicated(), "")
    return table(frame[["case", "work", "subject", *headings]])


def failures(races: list[dict[str, Any]]) -> list[str]:
    """What wasn't measured of races that ran, with the reason."""
    timings = ((race, timing) for race in races for timing in race["timings"])
    return [f"{name_of(race)}, {timing['subject']}: {timing['failed']}" for race, timing in timings if timing["failed"]]


def panels_of(races: list[dict[str, Any]]) -> list[tuple[tuple[str, str], pd.DataFrame]]:
    """Ratios to the basis with their intervals, for each part and mode that has any; norms and rotations by themselves
    apart, and without the copy that shows how fast memory is.
    """
    points = []
    for race in races:
        part, case = race["part"], race["case"]
        if part == MICRO:
            part, _, case = case.partition(", ")
        about = part, race["mode"], f"{case}\n{race['work']}", race["timings"][0]["subject"]
        for timing in race["timings"]:
            if timing["subject"] != COPY and (ratio := against_basis(timing, race["timings"][0])):
                points.append((*about, timing["subject"], *ratio))
    frame = pd.DataFrame(points, columns=["part", "mode", "group", "basis", "subject", "ratio", "low", "high"])
    return list(frame.groupby(["part", "mode"], sort=False))


def colours_of(subjects: Iterable[str]) -> dict[str, str]:
    """A colour for each, the same in every panel."""
    return dict(zip(dict.fromkeys(subjects), itertools.cycle(MORE_COLOURS), strict=False))


def draw_ratios(axis: Any, part: str, mode: str, points: pd.DataFrame, colours: dict[str, str]) -> None:
    """Bars that begin at 1, for each case and work, with intervals."""
    grid = points.set_index(["group", "subject"])[["ratio", "low", "high"]].unstack("subject", sort=False)
    ratio, low, high = (grid[name] for name in ("ratio", "low", "high"))
    whiskers = np.stack([(ratio - low).T, (high - ratio).T], 1)
    width = min(0.8, 0.2 * ratio.shape[1])
    (ratio - 1).plot.bar(ax=axis, bottom=1, yerr=whiskers, rot=0, width=width, color=colours, ecolor="0.3")
    axis.axhline(1, color="0.2", lw=1)
    axis.grid(axis="y", alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    axis.set(xlabel="", ylabel=f"time / {points['basis'].iloc[0]}", title=f"{part}, {mode}")
