"""Report of a training run: the table, the curves, and the machine that it ran on."""

import os
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import matplotlib
import matplotlib.pyplot as plt
import torch
import transformers
from accelerate import Accelerator
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

import hfpatch

from .settings import CONTROL
from .tasks import Figures

matplotlib.use("Agg")  # to a file, with or without a screen
LOWER_IS_BETTER = {"loss", "perplexity", "bits_per_byte"}
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
        "distributed": accelerator.distributed_type.value,
        "mixed_precision": accelerator.mixed_precision,
    }


def versions() -> dict[str, str]:
    modules = {"hfpatch": hfpatch, "torch": torch, "transformers": transformers, "accelerate": accelerate}
    return {"python": platform.python_version(), **{name: module.__version__ for name, module in modules.items()}}


def show(figure: float) -> str:
    return f"{figure:.3f}" if figure < 10 else f"{figure:,.1f}" if figure < 1000 else f"{figure:,.0f}"


def report(results: dict[str, Any]) -> str:
    """The results as Markdown that is also aligned in a terminal."""
    config, stages = results["config"], results["stages"]
    before, control = stages["baseline"]["end"], stages.get(CONTROL)
    runs = {name: (before, stages[name]["start"], stages[name]["end"]) for name in config["variants"]}
    columns = [["variant", *runs]]
    for measure in (name for name in before if before[name] is not None):
        figures = [[show(at[measure]) for at in run] for run in runs.values()]
        widths = [max(map(len, moment)) for moment in zip(*figures, strict=True)]
        cells = [" → ".join(f.rjust(w) for f, w in zip(row, widths, strict=True)) for row in figures]
        columns.append([measure.replace("_", " "), *cells])
    what, gap, form = distance(results)
    if control:
        gaps = {name: gap(end, control["end"]) for name, (_, _, end) in runs.items()}
        columns.append(["vs control", *("-" if name == CONTROL else format(g, form) for name, g in gaps.items())])
    back = [back_at(results, name) for name in runs]
    columns.append(["back at step", *("not yet" if step is None else str(step) for step in back)])
    lines = [
        "Held-out figures: before the patch → right after it → after training.",
        "",
        *table(columns),
        "",
        f"*vs control*: final {what} against the unpatched copy's. "
        f"*back at step*: where the curve first reaches the {results['main'].replace('_', ' ')} before the patch.",
        settings_line(results),
        data_line(results["data"]),
        machine(results),
    ]
    return "\n".join(lines) + "\n"


def distance(results: dict[str, Any]) -> tuple[str, Callable[[Figures, Figures], float], str]:
    """How far a model is from the control: of which figure, a function of both models' figures, and its format.

    Perplexities are compared by their ratio, other figures by their difference.
    """
    if "perplexity" in results["stages"]["baseline"]["end"]:
        return "perplexity", lambda own, control: own["perplexity"] / control["perplexity"] - 1, "+z.1%"
    main = results["main"]
    return main.replace("_", " "), lambda own, control: own[main] - control[main], "+z.3f"


def back_at(results: dict[str, Any], name: str) -> int | None:
    """The first step of a stage's curve whose main figure is as good as the baseline's last, but for rounding."""
    main, sign = results["main"], 1 if results["higher_is_better"] else -1
    level = results["stages"]["baseline"]["curve"][-1][main]
    points = results["stages"][name]["curve"]
    return next((p["step"] for p in points if sign * p[main] >= sign * level - 1e-6 * abs(level)), None)


def settings_line(results: dict[str, Any]) -> str:
    config, steps = results["config"], results["stages"]["baseline"]["step"]
    size = f"{config['batch_size']} x {config['block_size']} tokens" if "block_size" in config else config["batch_size"]
    starts = {
        "repaired": f"what a patch didn't keep was repaired on {config['calibration']} items of the training data",
        "self": f"what a patch didn't keep was repaired on {config['calibration']} sequences that the model drew",
        "auto": "patched without data",
        "copied": "gains and shifts were copied",
        "reset": "every model starts from scratch",
    }
    return (
        f"Baseline: {config['model'] or 'from scratch'}, {steps} steps; {starts[config['start']]}; "
        f"then {config['steps']} steps of {size}; seed {config['seed']}."
    )


def data_line(data: dict[str, Any]) -> str:
    held_out = f"; {data['heldout_tokens_evaluated']:,} tokens held out" if "heldout_tokens_evaluated" in data else ""
    simple = {name: value for name, value in data.get("baselines", {}).items() if value is not None}
    told = "; ".join(f"{name.replace('_', ' ')}: {figure_list(value)}" for name, value in simple.items())
    return f"Data: {data['source']}, sha256 {data['sha256'][:12]}{held_out}." + f" Simple methods: {told}." * bool(told)


def figure_list(figures: Figures | float) -> str:
    if isinstance(figures, dict):
        return ", ".join(f"{name.replace('_', ' ')} {show(value)}" for name, value in figures.items())
    return show(figures)


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


def heal_report(results: dict[str, Any]) -> str:
    """As `report`, for one model that was patched and brought back: its figures, and how far each model agrees with the
    unpatched one.
    """
    config, stages = results["config"], results["stages"]
    moments = {"before": stages["baseline"]["end"], "after the patch": stages["swapped"]["start"]}
    moments |= {"healed": stages["healed"]["end"]} | ({CONTROL: stages[CONTROL]["end"]} if CONTROL in stages else {})
    names = [name for name in moments["before"] if moments["before"][name] is not None]
    columns = [["held-out", *(name.replace("_", " ") for name in names)]]
    columns += [[moment, *(show(figures[name]) for name in names)] for moment, figures in moments.items()]
    against = moments.get(CONTROL, moments["before"])
    columns.append([f"healed vs {CONTROL if CONTROL in stages else 'before'}"])
    for name in names:
        own, theirs = moments["healed"][name], against[name]
        columns[-1].append(f"{own / theirs - 1:+z.1%}" if name == "perplexity" else f"{own - theirs:+z.3f}")
    columns.append(["recovered", *(recovered(results, name, against[name]) for name in names)])
    agreed = results["agreement"]
    kinds = list(next(iter(agreed.values())))
    told = {"divergence": "KL divergence (nats)", "same_answer": "same answer", "cosine": "cosine of hidden states"}
    shares = [["agreement with the unpatched model", *({"swapped": "after the patch"}.get(n, n) for n in agreed)]]
    for kind in kinds:
        form = "{:.1%}" if kind == "same_answer" else "{:z.4f}"
        shares.append([told[kind], *(form.format(figures[kind]) for figures in agreed.values())])
    versus = "an unpatched copy of equal budget" if CONTROL in stages else "the model before the patch"
    lines = [
        f"Patch {config['patch']}, method {config['method']}"
        + (f", LoRA of rank {config['lora_rank']}." if config["lora_rank"] else "."),
        "",
        *table(columns),
        "",
        *table(shares),
        "",
        f"*recovered*: how much of the gap that the patch opened is closed, against {versus}; - where it opened none.",
        settings_line(results),
        data_line(results["data"]),
        machine(results),
    ]
    return "\n".join(lines) + "\n"


def recovered(results: dict[str, Any], name: str, against: float) -> str:
    """How much of the gap in one figure that the patch opened is closed; "-" where the patch cost nothing of it."""
    stages = results["stages"]
    moments = stages["baseline"]["end"], stages["swapped"]["start"], stages["healed"]["end"]
    before, after, healed = (figures[name] for figures in moments)
    cost = after - before
    higher = results["higher_is_better"] and name not in LOWER_IS_BETTER
    if (-cost if higher else cost) <= 1e-3 * abs(before):
        return "-"
    return f"{1 - (healed - against) / cost:z.1%}"


def draw_healing(results: dict[str, Any], path: Path) -> None:
    """`draw_curves` of one healed model and its control."""
    stages, config = results["stages"], results["config"]
    labels = {"healed": f"{config['patch']}, {config['method']}", CONTROL: CONTROL}
    figures = stages["swapped"]["curve"][0]
    draw_curves(results, path, {n: label for n, label in labels.items() if n in stages}, {"after the patch": figures})


def draw_curves(
    results: dict[str, Any],
    path: Path,
    labels: dict[str, str] | None = None,
    levels: dict[str, Figures] | None = None,
) -> None:
    """The main figure (perplexity for language models) while training and, with a control, the gap to it.

    Args:
        labels: what to call each stage that is drawn; all variants by their names if none is given.
        levels: further figures, drawn as lines across.
    """
    stages, steps = results["stages"], results["config"]["steps"]
    labels = labels or {name: name for name in results["config"]["variants"]}
    names = list(labels)
    what, _, _ = distance(results)
    shown, perplexity = what.replace(" ", "_"), what == "perplexity"
    before = stages["baseline"]["curve"][-1][shown]
    curves = {n: {p["step"]: p for p in stages[n]["curve"]} for n in names}
    patched = [n for n in names if n != CONTROL]
    # Each line is thinner than the one it may cover, and the control lies on top: equal curves show as stripes.
    widths = [max(min(5.0, len(patched) + 1.0) - i, 1.5) for i in range(len(patched))]
    style = {n: {"color": COLOURS[i % 6], "lw": widths[i], "zorder": 2 + i} for i, n in enumerate(patched)}
    style |= {CONTROL: {"color": "black", "lw": 1.2, "zorder": 99}}
    figure, axes = plt.subplots(1, 1 + (CONTROL in names), figsize=(11 if CONTROL in names else 6, 4.4), squeeze=False)
    left = axes[0, 0]
    for name in names:
        left.plot([*curves[name]], [point[shown] for point in curves[name].values()], **style[name], label=labels[name])
    left.axhline(before, color="#888888", ls="--", lw=1.2, label="before the patch")
    for level, point in (levels or {}).items():
        left.axhline(point[shown], color="#888888", ls=":", lw=1.2, label=level)
    left.set(ylabel=f"held-out {what}" + " (log scale)" * perplexity, title="After the patch")
    if perplexity:
        left.set_yscale("log")
        left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        left.yaxis.set_major_formatter("{x:g}")
        left.yaxis.set_minor_formatter(NullFormatter())
    left.legend(frameon=False)
    if CONTROL in names:
        draw_gaps(axes[0, 1], results, curves, style)
    for axis in axes[0]:
        count_steps(axis, steps)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_gaps(axis: Any, results: dict[str, Any], curves: dict[str, dict[int, Figures]], style: dict[str, Any]) -> None:
    """Every curve's distance from the control's at the same step."""
    what, distant, _ = distance(results)
    perplexity = what == "perplexity"
    for name, curve in curves.items():
        both = {step: (point, curves[CONTROL][step]) for step, point in curve.items() if step in curves[CONTROL]}
        gaps = [(100 if perplexity else 1) * distant(*pair) for pair in both.values()]
        axis.plot([*both], gaps, **style[name])
    low, high = axis.get_ylim()
    if perplexity and max(-low, high) > 20:
        axis.set_yscale("symlog", linthresh=10)  # linear up to 10 %
        low, high = axis.get_ylim()
    least = 0.1 if perplexity else 1e-3  # of rounding errors no more than a line is to be seen
    axis.set_ylim(min(low, -least), max(high, least))
    axis.yaxis.set_major_formatter("{x:+g} %" if perplexity else "{x:+g}")
    axis.set(ylabel=f"{what} against the control's", title="Distance from the control at the same step")


def count_steps(axis: Any, steps: int) -> None:
    axis.set_xscale("symlog", linthresh=1, linscale=0.4)  # most happens in the first steps
    axis.set_xlim(0, steps)
    axis.set_xticks([0, *(m * 10**e for e in range(7) for m in (1, 2, 5) if m * 10**e <= steps)])
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("optimizer steps after the patch")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
