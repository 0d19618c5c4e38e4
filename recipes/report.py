"""What a reader sees of a run: the table, the curves, and the machine that it ran on."""

import os
import platform
import re
from pathlib import Path
from typing import Any

import accelerate
import matplotlib
import matplotlib.pyplot as plt
import torch
import transformers
from accelerate import Accelerator
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator
from settings import CONTROL

import hfpatch

matplotlib.use("Agg")  # to a file, with or without a screen
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]  # Okabe and Ito: also for the colour-blind


def hardware(accelerator: Accelerator) -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    gpu = torch.cuda.get_device_name() if accelerator.device.type == "cuda" else None
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": gpu or accelerator.device.type,
        "processes": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
    }


def versions() -> dict[str, str]:
    modules = {"hfpatch": hfpatch, "torch": torch, "transformers": transformers, "accelerate": accelerate}
    return {"python": platform.python_version(), **{name: module.__version__ for name, module in modules.items()}}


def show(figure: float) -> str:
    return f"{figure:.3f}" if figure < 10 else f"{figure:,.1f}" if figure < 1000 else f"{figure:,.0f}"


def report(results: dict[str, Any]) -> str:
    """The results as Markdown that is also aligned in a terminal."""
    config, data = results["config"], results["data"]
    stages = results["stages"]
    before, control, level = stages["baseline"]["end"], stages.get(CONTROL), stages["baseline"]["curve"][-1]["loss"]
    runs = {name: (before, stages[name]["start"], stages[name]["end"]) for name in config["variants"]}
    columns = [["variant", *runs]]
    for measure in ("loss", "perplexity", "bits_per_byte")[: 3 if before["bits_per_byte"] else 2]:
        figures = [[show(at[measure]) for at in run] for run in runs.values()]
        widths = [max(map(len, moment)) for moment in zip(*figures, strict=True)]
        cells = [" → ".join(f.rjust(w) for f, w in zip(row, widths, strict=True)) for row in figures]
        columns.append([measure.replace("_", " "), *cells])
    if control:
        gaps = {name: end["perplexity"] / control["end"]["perplexity"] - 1 for name, (_, _, end) in runs.items()}
        columns.append(["vs control", *("-" if name == CONTROL else f"{gap:+.1%}" for name, gap in gaps.items())])
    back = [next((p["step"] for p in stages[name]["curve"] if p["loss"] <= level), None) for name in runs]
    columns.append(["back at step", *("not yet" if step is None else str(step) for step in back)])
    lines = [
        "Held-out figures: before the patch → right after it → healed.",
        "",
        *table(columns),
        "",
        "*vs control*: healed perplexity against the unpatched copy's. "
        "*back at step*: where the curve first reaches the loss before the patch.",
        f"Baseline: {config['model'] or 'GPT-2 from scratch'}, {stages['baseline']['step']} steps; what a patch didn't "
        f"keep was repaired on {config['calibration']} blocks; healing: {config['steps']} steps of "
        f"{config['batch_size']} x {config['block_size']} tokens; seed {config['seed']}.",
        f"Text: {data['source']}, sha256 {data['sha256'][:12]}; {data['heldout_tokens_evaluated']:,} tokens held out.",
        machine(results),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def table(columns: list[list[str]]) -> list[str]:
    """Lines of a Markdown table from columns with their headings: the first to the left, others to the right."""
    columns = [[cell.rjust(max(map(len, column))) for cell in column] for column in columns]
    columns[0] = [cell.strip().ljust(len(cell)) for cell in columns[0]]
    rows = ["| " + " | ".join(row) + " |" for row in zip(*columns, strict=True)]
    rule = "|" + "|".join("-" * (len(c[0]) + 1) + ("-" if i == 0 else ":") for i, c in enumerate(columns)) + "|"
    return [rows[0], rule, *rows[1:]]


def machine(results: dict[str, Any]) -> str:
    """One line: hardware, versions, time."""
    hard = results["hardware"]
    return (
        f"{hard['cpu']}, {hard['cores']} cores, {hard['processes']} process(es) on {hard['device']}; "
        + ", ".join(f"{name} {number}" for name, number in results["versions"].items())
        + f"; {results['wall_seconds']:.0f} s."
    )


def draw_curves(results: dict[str, Any], path: Path) -> None:
    """Held-out perplexity while healing and, where there is a control, the gap to it at the same step."""
    stages, names, steps = results["stages"], results["config"]["variants"], results["config"]["steps"]
    before = stages["baseline"]["curve"][-1]["perplexity"]
    curves = {n: {p["step"]: p["perplexity"] for p in stages[n]["curve"]} for n in names}
    patched = [n for n in names if n != CONTROL]
    # Each line is thinner than the one it may cover, and the control lies on top: equal curves show as stripes.
    style = {n: {"color": COLOURS[i % 6], "lw": max(5.0 - i, 1.5), "zorder": 2 + i} for i, n in enumerate(patched)}
    style |= {CONTROL: {"color": "black", "lw": 1.2, "zorder": 99}}
    figure, axes = plt.subplots(1, 1 + (CONTROL in names), figsize=(11 if CONTROL in names else 6, 4.4), squeeze=False)
    for name in names:
        axes[0, 0].plot(*zip(*curves[name].items(), strict=True), **style[name], label=name)
        if CONTROL in names:
            gap = {step: 100 * (p / curves[CONTROL][step] - 1) for step, p in curves[name].items()}
            axes[0, 1].plot(*zip(*gap.items(), strict=True), **style[name])
    axes[0, 0].axhline(before, color="#888888", ls="--", lw=1.2, label="before the patch")
    axes[0, 0].set(yscale="log", ylabel="held-out perplexity (log scale)", title="Healing")
    axes[0, 0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes[0, 0].yaxis.set_major_formatter("{x:g}")
    axes[0, 0].yaxis.set_minor_formatter(NullFormatter())
    axes[0, 0].legend(frameon=False)
    if CONTROL in names:
        axes[0, 1].set_yscale("symlog", linthresh=10)  # linear up to 10 %
        axes[0, 1].yaxis.set_major_formatter("{x:+g} %")
        axes[0, 1].set(ylabel="perplexity against the control's", title="Distance from the control at the same step")
    for axis in axes[0]:
        axis.set_xscale("symlog", linthresh=1, linscale=0.4)  # most happens in the first steps
        axis.set_xlim(0, steps)
        axis.set_xticks(
            [0, *(m * 10**e for e in range(7) for m in (1, 2, 5) if m * 10**e <= results["config"]["steps"])]
        )
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xlabel("optimizer steps after the patch")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
