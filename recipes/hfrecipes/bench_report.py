"""Report of a benchmark: a table for each part, and a figure of the ratios."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from .bench_models import NATIVE, UNPATCHED
from .curves import COLOURS
from .report import machine, table
from .settings import CONTROL
from .timing import MODES, middle

Timing = dict[str, Any]
NOTES = {
    "models": "Compiled are the blocks, for decoding the whole model, which then has a static cache; *first call*: "
    f"compilation included. *{NATIVE}*: the stock model of transformers with equal weights. The weights of all lie in "
    "the same memory while they are timed.",
    "places": "*before*, *after*: the time in all of the modules that a patch replaced, where they stand in the model. "
    "The ratio is that of the whole model's time if nothing else of it changed.",
    "micro": "*basis*: LayerNorm, for rotations transformers' own.",
}
CONTROL_NOTE = " *control*: an unpatched copy: that its ratio isn't 1 is chance."


def against_basis(timing: Timing, basis: Timing) -> tuple[float, float, float] | None:
    """Time over the basis's, round by round: the median and its interval. None for the basis itself.

    Where a patch's modules were timed inside, it is that of the whole if only theirs had changed.
    """
    if timing is basis or not timing["seconds"] or not basis["seconds"]:
        return None
    patch, new, old = timing["subject"], timing["seconds"], basis["seconds"]
    if patch not in timing["inside_seconds"]:
        return middle([a / b for a, b in zip(new, old, strict=True)])
    new, old, whole = timing["inside_seconds"][patch], basis["inside_seconds"][patch], middle(old)[0]
    return middle([1 + (a - b) / whole for a, b in zip(new, old, strict=True)])


def show_time(seconds: list[float]) -> str:
    median = middle(seconds)[0]
    return f"{1e3 * median:.2f} ms" if median > 1e-3 else f"{1e6 * median:.0f} µs"


def cells(race: dict[str, Any], timing: Timing) -> dict[str, str]:
    """What a table says of one timing, by heading."""
    mode, subject, basis = race["mode"], timing["subject"], race["timings"][0]
    told = {mode: show_time(timing["seconds"])}
    if ratio := against_basis(timing, basis):
        over = "basis" if race["part"] == "micro" else basis["subject"]
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
            rows.setdefault(tuple(named.values()), named).update(cells(race, timing))
    frame = pd.DataFrame(rows.values())
    headings = sorted(frame.columns[3:], key=lambda heading: (heading not in MODES, "/" not in heading))
    group = frame[["case", "work"]]
    frame[["case", "work"]] = group.mask(group.duplicated(), "")
    return table(frame[["case", "work", "subject", *headings]])


def benchmark_report(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    config, lines = results["config"], []
    failed = [f"{name}: out of time" for name in results["left_out"]]
    for part, note in NOTES.items():
        races = [race for race in results["races"] if race["part"] == part]
        if races:
            control = CONTROL_NOTE if part != "micro" and CONTROL in config["patches"] else ""
            lines += [*part_table(races), "", f"{note}{control}", ""]
        for race in races:
            name = f"{race['case']}, {race['work']}, {race['mode']}"
            failed += [f"{name}, {t['subject']}: {t['failed']}" for t in race["timings"] if t["failed"]]
    if failed:
        lines += ["Not measured:", "", *(f"* {line}" for line in failed), ""]
    sizes = ("layers", "width", "vocab_size", "batch_size", "block_size", "new_tokens", "precision")
    told = ", ".join(f"{name} {config[name] or 'of the model itself'}" for name in sizes)
    lines.append(f"{told}. Medians of {config['repeats']} samples taken in turn; in brackets their 95 % interval.")
    if results["memory_kept"]:
        lines.append("Freed memory is kept by the process, so that page faults aren't timed.")
    return "\n".join([*lines, machine(results), f"`{results['command']}`", ""])


def draw_benchmark(results: dict[str, Any], path: Path) -> bool:
    """Ratios to the basis, with their intervals: a panel for each part and mode.

    Returns:
        Whether there was anything to draw.
    """
    points = [
        (race["part"], race["mode"], f"{race['case']}\n{race['work']}", timing["subject"], *ratio)
        for race in results["races"]
        for timing in race["timings"]
        if (ratio := against_basis(timing, race["timings"][0]))
    ]
    frame = pd.DataFrame(points, columns=["part", "mode", "group", "subject", "ratio", "low", "high"])
    panels = list(frame.groupby(["part", "mode"], sort=False))
    if not panels:
        return False
    figure, axes = plt.subplots(len(panels), 1, figsize=(12, 4 * len(panels)), squeeze=False, layout="constrained")
    for ((part, mode), points), axis in zip(panels, axes[:, 0], strict=True):
        grid = points.set_index(["group", "subject"])[["ratio", "low", "high"]].unstack("subject", sort=False)
        ratio, low, high = (grid[name] for name in ("ratio", "low", "high"))
        whiskers = np.stack([(ratio - low).T, (high - ratio).T], 1)
        (ratio - 1).plot.bar(ax=axis, bottom=1, yerr=whiskers, rot=0, width=0.8, color=COLOURS, ecolor="0.3")
        axis.axhline(1, color="0.2", lw=1)
        axis.grid(axis="y", alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
        basis = "basis" if part == "micro" else UNPATCHED
        axis.set(xlabel="", ylabel=f"time / {basis}", title=f"{part}, {mode}")
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True
