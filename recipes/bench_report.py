"""What a reader sees of a benchmark: a table of whole models, one of their parts, and a figure."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from bench_micro import BASIS, COPY
from bench_models import NATIVE, UNPATCHED
from report import COLOURS, machine, table
from timing import MODES, middle, ratios

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
    """Median of the ratios of samples that followed one another, and their quartiles."""
    if timing is None or other is None or timing is other:
        return "-"
    median, low, high = middle(ratios(timing, other))
    return f"{median:.3f} ({low:.3f}-{high:.3f})"


def models_table(groups: list[Group]) -> list[str]:
    headings = ["model, work", "subject", "eager", "/ unpatched", "compiled", "/ unpatched", "/ eager", "first call"]
    rows: list[list[str]] = []
    on_gpu = any(t["peak_bytes"] is not None for group in groups for t in group["timings"])
    for group in groups:
        plain = {mode: find(group, UNPATCHED, mode) for mode in MODES}
        for i, subject in enumerate(subjects(group)):
            eager, compiled = (find(group, subject, mode) for mode in MODES)
            row = [f"{group['case']}, {group['work']}" if i == 0 else "", subject]
            row += [show_time(eager), show_ratio(eager, plain["eager"])]
            row += [show_time(compiled), show_ratio(compiled, plain["compiled"])]
            row.append(f"{middle(ratios(compiled, eager))[0]:.2f}" if compiled and eager else "-")
            row.append(f"{compiled['first_seconds']:.0f} s, {graphs(compiled)}" if compiled else "-")
            if on_gpu:
                row.append(" / ".join(f"{t['peak_bytes'] / 2**30:.2f}" if t else "-" for t in (eager, compiled)))
            rows.append(row)
    columns = [list(column) for column in zip(*rows, strict=True)]
    return table([[name, *cells] for name, cells in zip([*headings, "peak GiB"], columns, strict=False)])


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
    parts: dict[str, list[Group]] = {"models": [], "micro": []}
    for group in results["groups"]:
        if group["timings"]:
            parts[group["part"]].append(group)
    lines: list[str] = []
    if parts["models"]:
        shapes = {g["case"]: f"{g['case']}: {g['layers']} layers of {g['width']}" for g in parts["models"]}
        lines += [*models_table(parts["models"]), ""]
        inputs = f"{config['batch_size']} x {config['block_size']} tokens, or images of 224 x 224"
        regions = "blocks" if config["regions"] == "blocks" else "the whole model"
        lines += [
            f"{'; '.join(shapes.values())}. {inputs}; {config['precision']}; decoding {config['new_tokens']} tokens "
            f"behind as many, with a static cache when compiled. Compiled is {regions}, for decoding the whole model.",
            "*/ unpatched*: of the same mode. *first call*: compilation included; *graphs*: of it and the warm-up. "
            f"*{NATIVE}*: the stock model of transformers with equal weights.",
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
    lines += [f"Medians of {config['repeats']} samples taken in turn; quartiles in brackets.", machine(results)]
    return "\n".join([*lines, f"`{results['command']}`", ""])


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


def draw_benchmark(results: dict[str, Any], path: Path) -> None:
    """Above: ratios to the unpatched model, quartiles as whiskers; below: what share of a copy's rate parts reach."""
    models = [g for g in results["groups"] if g["part"] == "models" and g["timings"]]
    micro = [g for g in results["groups"] if g["part"] == "micro" and g["timings"] and g["case"] == "norm"]
    panels = [draw for draw, groups in ((draw_models, models), (draw_micro, micro)) if groups]
    if not panels:
        return
    figure, axes = plt.subplots(len(panels), 1, figsize=(11, 4.6 * len(panels)), squeeze=False, layout="constrained")
    for draw, axis in zip(panels, axes[:, 0], strict=True):
        draw(axis, models if draw is draw_models else micro)
        axis.grid(axis="y", alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_models(axis: Any, groups: list[Group]) -> None:
    names = list(dict.fromkeys(s for group in groups for s in subjects(group) if s != UNPATCHED))
    width = 0.8 / max(1, len(names))
    for j, name in enumerate(names):
        for k, mode in enumerate(MODES):
            points = []
            for i, group in enumerate(groups):
                timing, plain = find(group, name, mode), find(group, UNPATCHED, mode)
                if timing and plain:
                    points.append((2 * i + k * 0.9 + (j + 0.5) * width, *middle(ratios(timing, plain))))
            if points:
                x, y, low, high = map(list, zip(*points, strict=True))
                errors = [[b - a for a, b in zip(low, y, strict=True)], [b - a for a, b in zip(y, high, strict=True)]]
                look = {"color": COLOURS[j % 6], "alpha": 0.55 if k == 0 else 1.0, "ecolor": "0.3"}
                label = name if k == 1 or len(axis.get_legend_handles_labels()[1]) < j + 1 else None
                axis.bar(x, [v - 1 for v in y], 0.9 * width, bottom=1, yerr=errors, label=label, **look)
    axis.axhline(1, color="0.2", lw=1)
    axis.set_xticks(
        [2 * i + 0.85 for i in range(len(groups))],
        [f"{g['case']}\n{g['work']}" for g in groups],
    )
    axis.set(ylabel="time / unpatched", title="Patched against unpatched: eager (pale), compiled (full)")


def draw_micro(axis: Any, groups: list[Group]) -> None:
    names = [name for name in subjects(groups[0]) if name != COPY]
    ticks = []
    for i, group in enumerate(groups):
        ticks.append(f"{group['width']} {group['dtype']}\n{group['work'].replace(' and ', ' +' + chr(10))}")
        copied = find(group, COPY, "eager")
        for j, name in enumerate(names):
            timing = find(group, name, "compiled") or find(group, name, "eager")
            if timing and copied:
                position = i + (j + 0.5) * 0.8 / len(names)
                label = name if i == 0 else None
                axis.bar(position, of_copy(timing, copied), 0.72 / len(names), color=COLOURS[j % 6], label=label)
    axis.axhline(1, color="0.2", lw=1)
    axis.set_xticks([i + 0.4 for i in range(len(groups))], ticks, fontsize=8)
    axis.set(ylabel="of a copy's rate", title="Norms, compiled where they aren't kernels: bytes moved a second")
