"""Report of a benchmark: a table of whole models, one of their parts, and a figure."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from .bench_micro import BASIS, COPY
from .bench_models import NATIVE, UNPATCHED
from .bench_places import TOKENS
from .report import COLOURS, machine, table
from .timing import MODES, middle, ratios

Group = dict[str, Any]
Timing = dict[str, Any]


def find(group: Group, subject: str, mode: str) -> Timing | None:
    """A subject's timing, if it was measured."""
    found = [t for t in group["timings"] if (t["subject"], t["mode"]) == (subject, mode) and t["seconds"]]
    return found[0] if found else None


def subjects(group: Group) -> list[str]:
    return list(dict.fromkeys(t["subject"] for t in group["timings"]))


def show_time(timing: Timing | None) -> str:
    if timing is None:
        return "-"
    seconds = middle(timing["seconds"])[0]
    return f"{1e3 * seconds:.1f} ms" if seconds > 1e-3 else f"{1e6 * seconds:.0f} µs"


def show_ratio(timing: Timing | None, other: Timing | None) -> str:
    """Median of the ratios of samples of the same round, and its interval."""
    if timing is None or other is None or timing is other:
        return "-"
    return show_middle(ratios(timing, other))


def show_middle(values: list[float]) -> str:
    """Median and its interval."""
    median, low, high = middle(values)
    return f"{median:.3f} ({low:.3f}-{high:.3f})"


def models_table(groups: list[Group]) -> list[str]:
    """Without columns in which nothing was measured."""
    headings = ["model, work", "subject", "eager", "/ unpatched", "compiled", "/ unpatched", "/ eager", "first call"]
    rows: list[list[str]] = []
    modes = [mode for mode in MODES if any(t["mode"] == mode for group in groups for t in group["timings"])]
    for group in groups:
        plain = {mode: find(group, UNPATCHED, mode) for mode in MODES}
        for i, subject in enumerate(subjects(group)):
            timings = {mode: find(group, subject, mode) for mode in MODES}
            eager, compiled = timings.values()
            row = [f"{group['case']}, {group['work']}" if i == 0 else "", subject]
            row += [show_time(eager), show_ratio(eager, plain["eager"])]
            row += [show_time(compiled), show_ratio(compiled, plain["compiled"])]
            row.append(f"{middle(ratios(compiled, eager))[0]:.2f}" if compiled and eager else "-")
            row.append(f"{compiled['first_seconds']:.0f} s, {graphs(compiled)}" if compiled else "-")
            peaks = [None if (t := timings[mode]) is None else t["peak_bytes"] for mode in modes]
            told = " / ".join("-" if peak is None else f"{peak / 2**20:,.0f}" for peak in peaks)
            rows.append([*row, told if {*peaks} != {None} else "-"])
    columns = zip([*headings, "peak MiB"], *rows, strict=True)
    return table([[*column] for column in columns if {*column[1:]} != {"-"}])


def places_table(groups: list[Group]) -> list[str]:
    headings = ["model, work", "patch", "modules", "unpatched", "patched", "model, patched / unpatched"]
    rows: list[list[str]] = []
    for group in groups:
        plain = find(group, UNPATCHED, "eager")
        for i, (patch, count) in enumerate(group["modules"].items()):
            row = [f"{group['case']}, {group['work']}" if i == 0 else "", patch, str(count)]
            patched = find(group, patch, "eager")
            if plain and patched:
                old, new = (middle(timing["inside"][patch])[0] for timing in (plain, patched))
                row += [f"{1e3 * old:.2f} ms", f"{1e3 * new:.2f} ms", show_middle(in_place(plain, patched, patch))]
            rows.append(row + ["-"] * (len(headings) - len(row)))
    return table([[name, *column] for name, column in zip(headings, map(list, zip(*rows, strict=True)), strict=True)])


def in_place(plain: Timing, patched: Timing, patch: str) -> list[float]:
    """Time of the whole model if only the replaced modules' own had changed, over the unpatched one's, by rounds."""
    whole = middle(plain["seconds"])[0]
    old, new = plain["inside"][patch], patched["inside"][patch]
    return [1 + (b - a) / whole for a, b in zip(old, new, strict=True)]


def graphs(timing: Timing) -> str:
    """How many graphs a subject was compiled to, and whether any of them ends in a break."""
    told = f"{timing['graphs']} graph{'s' if timing['graphs'] != 1 else ''}"
    return told + (f", {timing['breaks']} breaks" if timing["breaks"] else "")


def micro_table(groups: list[Group]) -> list[str]:
    headings = ["part", "work", "subject", "eager", "compiled", "eager / basis", "compiled / basis"]
    headings += ["eager of copy", "compiled of copy"]
    rows = []
    for group in groups:
        basis, copied = BASIS[group["case"]], find(group, COPY, "eager")
        for i, subject in enumerate(name for name in subjects(group) if name != COPY):
            timings = [find(group, subject, mode) for mode in MODES]
            row = [f"{group['case']}, {group['width']} {group['dtype']}" if i == 0 else ""]
            row += [group["work"] if i == 0 else "", subject, *map(show_time, timings)]
            row += [show_ratio(t, find(group, basis, mode)) for t, mode in zip(timings, MODES, strict=True)]
            row += ["-" if t is None or copied is None else f"{of_copy(t, copied):.0%}" for t in timings]
            rows.append(row)
    return table([[name, *column] for name, column in zip(headings, map(list, zip(*rows, strict=True)), strict=True)])


def of_copy(timing: Timing, copied: Timing) -> float:
    """Bytes moved a second, against a plain copy's: the least bytes that the work has to move."""
    share = [1 / ratio for ratio in ratios(timing, copied)]
    return middle(share)[0] * timing["moved"] / copied["moved"]


def benchmark_report(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    config = results["config"]
    parts: dict[str, list[Group]] = {"models": [], "places": [], "micro": []}
    for group in results["groups"]:
        if group["timings"]:
            parts[group["part"]].append(group)
    lines: list[str] = []
    control = "*control*: an unpatched copy: that its ratio isn't 1 is chance."
    if parts["models"]:
        regions = "blocks" if config["regions"] == "blocks" else "the whole model"
        lines += [
            *models_table(parts["models"]),
            "",
            f"{sizes(parts['models'], config)}, with a static cache when compiled. Compiled is {regions}, for decoding "
            "the whole model.",
            "*/ unpatched*: of the same mode. *first call*: compilation included; *graphs*: of it and the warm-up. "
            f"*peak*: memory of tensors above what was held before, {' / '.join(config['modes'])}. "
            f"*{NATIVE}*: the stock model of transformers with equal weights. {control} "
            "The weights of all lie in the same memory while they are timed.",
            "",
        ]
    if parts["places"]:
        lines += [
            *places_table(parts["places"]),
            "",
            f"{sizes(parts['places'], config)}; eager. The modules that a patch replaced, timed where they stand in "
            "the model: *unpatched*, *patched*: their time in all, in a training step forward and backward, in "
            f"decoding for a token, after each of which it's the next model's turn ({TOKENS} for each sample of the "
            f"rest). The ratio is that of the whole model's time if nothing else of it changed. {control}",
            "",
        ]
    if parts["micro"]:
        copied = [find(group, COPY, "eager") for group in parts["micro"]]
        rates = [t["moved"] / middle(t["seconds"])[0] / 1e9 for t in copied if t]
        lines += [*micro_table(parts["micro"]), ""]
        lines += [
            "*basis*: LayerNorm, for rotations transformers' own. *of copy*: the bytes that the work has to move, a "
            f"second, against those of a plain copy in the same turns ({min(rates):.1f} to {max(rates):.1f} GB/s, on "
            f"tensors of {config['megabytes']:g} MiB).",
            "",
        ]
    lines += left_out(results["groups"])
    kept = " Freed memory is kept by the process, so that page faults aren't timed." * results.get("memory_kept", False)
    lines += [
        f"Medians of {config['repeats']} samples taken in turn; in brackets the median's 95 % interval.{kept}",
        machine(results),
    ]
    return "\n".join([*lines, f"`{results['command']}`", ""])


def sizes(groups: list[Group], config: dict[str, Any]) -> str:
    """Of the models, and of what they are given."""
    models = {g["case"]: f"{g['case']}: {g['layers']} layers of {g['width']}" for g in groups}
    inputs = f"{config['batch_size']} x {config['block_size']} tokens, or images of 224 x 224; {config['precision']}"
    return f"{'; '.join(models.values())}. {inputs}; decoding {config['new_tokens']} tokens behind as many"


def left_out(groups: list[Group]) -> list[str]:
    """What wasn't measured, and why."""
    told: dict[str, None] = {}
    for group in groups:
        name = f"{group['case']}, {group['work']}" + (
            f", {group['width']} {group['dtype']}" if "dtype" in group else ""
        )
        if "left_out" in group:
            told[f"{name}: {group['left_out']}"] = None
        for patch, reason in group.get("missing", {}).items():
            told[f"{group['case']} with {patch}: {reason}"] = None
        for timing in group["timings"]:
            if timing["failed"]:
                told[f"{name}, {timing['subject']} {timing['mode']}: {timing['failed']}"] = None
    return ["Not measured:", "", *(f"* {line}" for line in told), ""] if told else []


def draw_benchmark(results: dict[str, Any], path: Path) -> bool:
    """Ratios to the unpatched model, eager and compiled, with intervals; below, the share of a copy's rate of norms.

    Returns:
        Whether there was anything to draw.
    """
    measured = [g for g in results["groups"] if g["timings"]]
    models = [g for g in measured if g["part"] == "models"]
    norms = [g for g in measured if g["part"] == "micro" and g["case"] == "norm"]
    norms = [g for g in norms if g["dtype"] == norms[0]["dtype"]]
    modes = [m for m in MODES if any(find(g, UNPATCHED, m) for g in models)]
    panels = [*modes, *(["norms"] if norms else [])]
    if not panels:
        return False
    size = (max(9.0, 1.15 * len(models), 1.4 * len(norms)), 3.6 * len(panels))
    figure, axes = plt.subplots(len(panels), 1, figsize=size, squeeze=False, layout="constrained")
    for panel, axis in zip(panels, axes[:, 0], strict=True):
        draw_norms(axis, norms) if panel == "norms" else draw_models(axis, models, panel)
        axis.axhline(1, color="0.2", lw=1)
        axis.grid(axis="y", alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True


def draw_models(axis: Any, groups: list[Group], mode: str) -> None:
    bars: dict[str, dict[int, Any]] = {s: {} for group in groups for s in subjects(group) if s != UNPATCHED}
    for i, group in enumerate(groups):
        plain = find(group, UNPATCHED, mode)
        for name in bars:
            if plain and (timing := find(group, name, mode)):
                bars[name][i] = middle(ratios(timing, plain))
    for label, place, width, found in grouped(axis, bars, [f"{g['case']}\n{g['work']}" for g in groups]):
        ratio, low, high = (np.array(values) for values in zip(*found, strict=True))
        style = look(list(bars).index(label))
        whiskers = [ratio - low, high - ratio]
        axis.bar(place, ratio - 1, width, bottom=1, yerr=whiskers, ecolor="0.3", label=label, **style)
    axis.set(ylabel="time / unpatched", title=f"Patched against unpatched, {mode}")


def draw_norms(axis: Any, groups: list[Group]) -> None:
    bars: dict[str, dict[int, Any]] = {s: {} for group in groups for s in subjects(group) if s != COPY}
    for i, group in enumerate(groups):
        copied = find(group, COPY, "eager")
        for name in bars:
            if copied and (timing := find(group, name, "compiled") or find(group, name, "eager")):
                bars[name][i] = of_copy(timing, copied)
    ticks = [f"{g['width']}\n{g['work'].replace(' and ', ' and' + chr(10))}" for g in groups]
    for label, place, width, shares in grouped(axis, bars, ticks):
        axis.bar(place, shares, width, label=label, **look(list(bars).index(label)))
    title = f"Norms in {groups[0]['dtype']}, compiled where they aren't kernels: bytes moved a second"
    axis.set(ylabel="of a copy's rate", title=title)


def grouped(
    axis: Any, bars: dict[str, dict[int, Any]], ticks: list[str]
) -> Iterator[tuple[str, Any, float, list[Any]]]:
    """For bars side by side at each tick: a name, where its bars stand, how wide they are, and its values."""
    axis.set_xticks(range(len(ticks)), ticks, fontsize=8)
    width = 0.8 / max(1, len(bars))
    for j, (name, found) in enumerate(bars.items()):
        places = np.array([*found]) + (j - (len(bars) - 1) / 2) * width
        if found:
            yield name, places, 0.9 * width, [*found.values()]


def look(index: int) -> dict[str, Any]:
    """A colour, hatched from the seventh on."""
    return {"color": COLOURS[index % 6], "hatch": "///" if index >= 6 else None, "edgecolor": "white"}
