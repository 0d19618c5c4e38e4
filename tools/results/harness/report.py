"""Reports of training runs: tables, curves, and what they were measured on."""

import math
import os
import platform
import re
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pandas as pd
import torch
import transformers
from accelerate import Accelerator
from methods import CONTROL
from paired import markdown

import hfpatch
from hfpatch.schemes.verdicts import ENOUGH

from .curves import Panel, curve_of, draw_panels

Results = dict[str, Any]


# -- what was measured on what


def environment(accelerator: Accelerator) -> dict[str, Any]:
    """Hardware and versions, for results.json."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    gpu = torch.cuda.get_device_name() if accelerator.device.type == "cuda" else None
    hardware = {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": gpu or accelerator.device.type,
        "processes": accelerator.num_processes,
        "distributed": accelerator.distributed_type.value,
        "mixed_precision": accelerator.mixed_precision,
    }
    versions = {module.__name__: module.__version__ for module in (hfpatch, torch, transformers, accelerate)}
    return {"hardware": hardware, "versions": {"python": platform.python_version(), **versions}}


def machine(results: Results) -> str:
    """One line: hardware and versions, also those that the run began on, and time."""
    told = []
    for where in [*results.get("earlier", []), results]:
        hard, versions = where["hardware"], ", ".join(f"{name} {number}" for name, number in where["versions"].items())
        cores = f"{hard['cores']} cores, {hard['processes']} process(es) on {hard['device']}"
        told.append(f"{hard['cpu']}, {cores}; {versions}; ")
    return "then ".join(dict.fromkeys(told)) + f"{results['wall_seconds']:.0f} s."


def data_line(data: dict[str, Any]) -> str:
    """One line: where the data came from, and how simple methods do on it."""
    held_out = f"; {data['heldout_tokens_evaluated']:,} tokens held out" if "heldout_tokens_evaluated" in data else ""
    simple = [
        f"{name}: {', '.join(f'{words(figure)} {show(value)}' for figure, value in figures.items())}"
        for name, figures in data.get("baselines", {}).items()
    ]
    told = f" Simple methods: {'; '.join(simple)}." * bool(simple)
    return f"Data: {data['source']}, sha256 {data['sha256'][:12]}{held_out}.{told}"


def provenance(results: Results) -> list[str]:
    """What stands under every table of a training run: data, command, machine."""
    return [data_line(results["data"]), f"`{results['command']}`", machine(results)]


def paragraphs(parts: list[list[str]], results: Results) -> str:
    """Tables and lines one under the other, and what they were measured on."""
    parts = [*parts, [data_line(results["data"]), machine(results), f"`{results['command']}`"]]
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def settings_line(results: Results) -> str:
    """One line: what models begin as, and what they are trained on for how long."""
    c = results["config"]
    before = max(stage["step"] for name, stage in results["stages"].items() if name.startswith("baseline"))
    batch = f"{c['batch_size']} x {c['block_size']} tokens" if "block_size" in c else f"{c['batch_size']} items"
    starts, steps, seeds = (c.get("starts", [c["start"]]), np.ravel(c["steps"]), c.get("seeds", [c["seed"]]))
    return (
        f"Task {results['task']}; baseline: {c['model'] or 'from scratch'}, {before} steps; copies "
        f"{' or '.join(starts)} (calibration {c['calibration']}), {' or '.join(map(str, steps))} steps of {batch}; "
        f"learning rate {c['learning_rate']:g}; seeds {', '.join(map(str, seeds))}."
    )


# -- names, numbers and tables


def words(name: str) -> str:
    """A figure's name as it is written: "bits_per_byte" is "bits per byte"."""
    return name.replace("_", " ")


def show(figure: float) -> str:
    return f"{figure:.3f}" if figure < 10 else f"{figure:,.1f}" if figure < 1000 else f"{figure:,.0f}"


def table(rows: pd.DataFrame | list[dict[str, str]]) -> list[str]:
    """Lines of a Markdown table from rows of text; "-" where a row has none.

    The first column is to the left, others are to the right.
    """
    return markdown(pd.DataFrame(rows)).splitlines()


def report(results: Results) -> str:
    """The results of several variants as Markdown that is also aligned in a terminal."""
    return "\n".join([*quality(results), *all_figures(results)]) + "\n"


def quality(results: Results) -> list[str]:
    """What each patch leaves of a model: copied, repaired, trained, and whether it needs that. None from scratch."""
    stages, config, before = results["stages"], results["config"], results["stages"]["baseline"]["end"]
    figure = "perplexity" if before.get("perplexity") else results["main"]
    higher = results["higher_is_better"] and figure == results["main"]
    original, control = before[figure], stages.get(CONTROL)
    patches = {name: config.get("patch", name) for name in config["variants"] if name != CONTROL}
    if config["start"] == "reset" or not original or not patches:
        return []

    def share(value: float, of: float) -> float:
        return (value / of if higher else of / value) if value else math.nan

    rows = []
    for name, patch in patches.items():
        start, end = (stages[name][moment][figure] for moment in ("start", "end"))
        row = {"patch": patch, "original": show(original)}
        if (copied := results.get("copied", {}).get(patch)) is not None:
            row["copied"] = show(copied[figure])
        kept, step = share(start, original), back_at(results, name)
        after = f"more than {config['steps']} steps" if step is None else f"{step} step{'s' * (step != 1)}"
        needed = "no" if round(kept, 3) >= ENOUGH else after  # as it is shown
        row |= {config["start"]: show(start), "kept": f"{kept:.1%}", "training required?": needed, "trained": show(end)}
        row |= {"of the control": f"{share(end, control['end'][figure]):.1%}"} if control else {}
        made = stages.get("swapped", stages[name])  # train_healed.py's copy, from which training begins
        rows.append(row | {"seconds": f"{made['made_in_seconds']:.0f}"})
    told = f"*copied*: weights as they were; *{config['start']}*: how training begins, made in so many *seconds*. "
    told += f"*kept*: that part of the original's {words(figure)}{'' if higher else ', which is better if lower'}. "
    told += f"*training required?*: no from {ENOUGH:.0%} on; else until it is the original's. "
    told += "*of the control*: against an unpatched copy of equal budget." * bool(control)
    return [f"Held-out {words(figure)}, before any training and after it:", "", *table(rows), "", told.rstrip(), ""]


def all_figures(results: Results) -> list[str]:
    """Every figure of every variant at three moments, and what was run on what."""
    stages, main = results["stages"], results["main"]
    before, control = stages["baseline"]["end"], stages.get(CONTROL)
    rows = []
    for name in results["config"]["variants"]:
        moments = before, stages[name]["start"], stages[name]["end"]
        row = {"variant": name}
        row |= {words(f): " → ".join(show(at[f]) for at in moments) for f in before if before[f] is not None}
        if control:
            gap = stages[name]["end"][main] - control["end"][main]
            row["vs control"] = "-" if name == CONTROL else f"{gap:+z.3f}"
        rows.append(row)
    return [
        "All figures: before the patch → right after it → after training.",
        "",
        *table(rows),
        "",
        f"*vs control*: final {words(main)} against the unpatched copy's." * bool(control),
        settings_line(results),
        *provenance(results),
    ]


def back_at(results: Results, name: str) -> int | None:
    """The first step of a stage's curve whose main figure is as good as the baseline's last, but for rounding."""
    main, sign = results["main"], 1 if results["higher_is_better"] else -1
    level = results["stages"]["baseline"]["curve"][-1][main]
    points = results["stages"][name]["curve"]
    return next((p["step"] for p in points if sign * p[main] >= sign * level - 1e-6 * abs(level)), None)


def draw_curves(results: Results, path: Path) -> None:
    """The main figure of every variant while training and, with a control, the gap to it."""
    stages, main = results["stages"], results["main"]
    names = [name for name in dict.fromkeys([*results["config"]["variants"], CONTROL]) if name in stages]
    curves = {name: curve_of({0: stages[name]}, main) for name in names}
    control, before = curves.pop(CONTROL, None), stages["baseline"]["curve"][-1][main]
    draw_panels([Panel("After the patch", f"held-out {words(main)}", curves, control, before=before)], path)


def heal_report(results: Results) -> str:
    """As `report`, and how far each model agrees with the unpatched one."""
    config = results["config"]
    rows = []
    for name, figures in results["agreement"].items():
        written = {words(figure): f"{value:z.4f}" for figure, value in figures.items()}
        rows.append({"agreement with the unpatched model": name, **written})
    versus = "an unpatched copy of equal budget" if CONTROL in config["variants"] else "the model before the patch"
    gap = f"of the gap in {words(results['main'])} that the patch opened, against {versus}"
    share = recovered(results)
    lora = f", LoRA of rank {config['lora_rank']}" * (config["lora_rank"] > 0)
    lines = [
        f"Patch {config['patch']}, method {config['method']}{lora}.",
        f"Recovered: {share} {gap}." if share else "Recovered: the patch opened no gap.",
        "",
        *table(rows),
        "",
        "*swapped*: right after the patch. *divergence*: KL from the unpatched model's answers, in nats.",
        "",
        report(results),
    ]
    return "\n".join(lines)


def recovered(results: Results) -> str | None:
    """How much of the gap in the main figure that the patch opened is closed; None where the patch cost nothing."""
    stages, main = results["stages"], results["main"]
    before, after = stages["baseline"]["end"][main], stages["swapped"]["start"][main]
    against = stages[CONTROL]["end"][main] if CONTROL in stages else before
    cost = after - before
    if (-cost if results["higher_is_better"] else cost) <= 1e-3 * abs(before):
        return None
    return f"{1 - (stages['healed']['end'][main] - against) / cost:z.1%}"
