"""What patched models cost, eager and compiled: against the unpatched ones and their stock siblings.

Whole models (a training step, a forward, a cached decoding), the replaced modules where they stand in them (on a CPU),
and norms and rotations by themselves are timed subject after subject in turn, so that whatever else the machine does
meets all of them. Figures are medians, and ratios of one run. On a CPU nothing else should run: threads wait as torch's
own do, spinning, where other runs let them sleep.

    python tools/results/time_patched.py  # small sizes on a CPU, full ones on a GPU; under 10 minutes
    python tools/results/time_patched.py --parts models --models gpt2 bert --layers 12 --minutes 60  # at full size
    python tools/results/time_patched.py --parts micro --widths 768 --modes eager --repeats 5

In the output folder: results.md, results.json, benchmark.png.
"""

import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import transformers
from accelerate import Accelerator, PartialState
from harness.bench_micro import micro_cases
from harness.bench_models import MODELS, NATIVE, cases, place_cases
from harness.bench_report import MICRO, colours_of, draw_ratios, failures, name_of, panels_of, part_table
from harness.command import progress, run_recipe
from harness.report import machine
from harness.results import OutputFolder
from harness.settings import (
    CONTROL,
    COUNT,
    NOT_NEGATIVE,
    Range,
    multiple_of,
    option,
    parse_variants,
    read_settings,
)
from harness.timing import MODES, time_in_turn
from methods import keep_freed_memory
from texts import RecipeError

# what is timed, and in which modes: compiled, no module stands by itself
PARTS = {"models": (cases, MODES), "places": (place_cases, MODES[:1]), "micro": (micro_cases, MODES)}
NOTES = {
    "models": "Compiled are the blocks, for decoding the whole model, which then has a static cache; *first call*: "
    f"compilation included. *{NATIVE}*: the stock model of transformers with equal weights. The weights of all lie in "
    "the same memory while they are timed.",
    "places": "*before*, *after*: the time in all of the modules that a patch replaced, where they stand in the model. "
    "The ratio is that of the whole model's time if nothing else of it changed.",
    "micro": "*basis*: LayerNorm, for rotations transformers' own.",
}
PRECISIONS = ("float32", "bfloat16")
CONTROL_NOTE = " *control*: an unpatched copy: that its ratio isn't 1 is chance."


def by_device(cpu: Any, gpu: Any, about: str, choices: Range | Collection | None = None) -> Any:
    """A setting whose default goes by the device."""
    return option(lambda: gpu if PartialState().device.type == "cuda" else cpu, about, choices)


@dataclass
class BenchmarkConfig:
    """Sizes go by the device: small ones on a CPU, full ones on a GPU."""

    output_dir: str = option("runs/benchmark", "where the results go")
    parts: list[str] = option([*PARTS], "in this order", PARTS)
    modes: list[str] = option([*MODES], "how models run", MODES)
    repeats: int = option(9, "samples of each subject, after those that warm it up", COUNT)
    minutes: float = option(8.0, "no measurement begins later; the report names what is left", NOT_NEGATIVE)
    patches: list[str] = option(
        ["control", "rms", "rope", "dyt", "rms+rope"],
        "schemes joined by +, patches one after the other by ' then ' (\"rms then folded\"); control is an unpatched "
        "copy, which shows what chance does",
    )
    models: list[str] = by_device(["gpt2", "bert"], list(MODELS), "with random weights", MODELS)
    layers: int | None = by_device(2, None, "of every model; none: the model's own", COUNT)
    width: int | None = option(None, "channels, 64 to a head; none: the model's own", multiple_of(64))
    vocab_size: int = by_device(8192, 50257, "tokens that a model knows", COUNT)
    batch_size: int = by_device(2, 8, "sequences or images", COUNT)
    block_size: int = by_device(128, 1024, "tokens of a sequence", COUNT)
    new_tokens: int = by_device(16, 128, "tokens that are decoded, behind a prompt of as many", COUNT)
    precision: str = by_device("float32", "bfloat16", "bfloat16: autocast for training, else weights", PRECISIONS)
    widths: list[int] = by_device(
        [768, 2048], [768, 1024, 2048, 4096, 8192, 16384], "channels of the micro part", multiple_of(64)
    )
    mebibytes: int = by_device(8, 512, "that a tensor of the micro part takes", COUNT)  # a GPU's call takes its time

    def check(self) -> None:
        if self.new_tokens > self.block_size:
            raise RecipeError(
                f"--new_tokens can't be more than --block_size, {self.block_size}: they are the prompt too"
            )
        for patch in self.patches:
            parse_variants(patch)


def benchmark(config: BenchmarkConfig, command: str) -> None:
    transformers.logging.set_verbosity_error()
    folder, started = OutputFolder(config, command, Accelerator()), time.perf_counter()
    planned = [
        ({"part": part, "case": case, "work": work, "mode": mode}, entrants)
        for part in config.parts
        for case, work, entrants in PARTS[part][0](config, folder.accelerator.device)
        for mode in PARTS[part][1]
        if mode in config.modes
    ]
    if not planned:
        raise RecipeError("nothing to measure: --parts places is on a CPU and in --modes eager")
    results = folder.open_results(memory_kept=keep_freed_memory(), races=[], left_out=[])
    try:
        with progress("benchmark", len(planned)) as bar:
            for told, entrants in planned:
                if time.perf_counter() - started > 60 * config.minutes:
                    results["left_out"].append(name_of(told))
                else:
                    timings = time_in_turn(entrants(told["mode"]), told["mode"], config.repeats)
                    results["races"].append(told | {"timings": timings})
                folder.write_results()
                bar.set_postfix_str(name_of(told), refresh=False)
                bar.update()
    finally:  # Ctrl-C too: what was measured is reported
        folder.report(benchmark_report, draw_benchmark, "benchmark.png")


# -- what a reader sees


def benchmark_report(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    config, lines = results["config"], []
    failed = [f"{name}: out of time" for name in results["left_out"]]
    for part, note in NOTES.items():
        races = [race for race in results["races"] if race["part"] == part]
        if races:
            control = CONTROL_NOTE if part != MICRO and CONTROL in config["patches"] else ""
            lines += [*part_table(races), "", f"{note}{control}", ""]
        failed += failures(races)
    if failed:
        lines += ["Not measured:", "", *(f"* {line}" for line in failed), ""]
    sizes = ("layers", "width", "vocab_size", "batch_size", "block_size", "new_tokens", "precision")
    told = ", ".join(f"{name} {config[name] or 'of the model itself'}" for name in sizes)
    lines.append(f"{told}. Medians of {config['repeats']} samples taken in turn; in brackets their 95 % interval.")
    if results["memory_kept"]:
        lines.append("Freed memory is kept by the process, so that page faults aren't timed.")
    return "\n".join([*lines, machine(results), f"`{results['command']}`", ""])


def draw_benchmark(results: dict[str, Any], path: Path) -> None:
    """Ratios to the basis: a panel for each part and mode, if there is any."""
    panels = panels_of(results["races"])
    if not panels:
        return
    figure, axes = plt.subplots(len(panels), 1, figsize=(12, 4 * len(panels)), squeeze=False, layout="constrained")
    colours = colours_of(subject for _, points in panels for subject in points["subject"])
    for ((part, mode), points), axis in zip(panels, axes[:, 0], strict=True):
        draw_ratios(axis, part, mode, points, colours)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Run the recipe. Returns the exit status: 0, 2 (bad input) or 130 (stopped)."""
    return run_recipe(
        "time_patched.py", argv, __doc__, partial(read_settings, BenchmarkConfig), benchmark, resumable=False
    )


if __name__ == "__main__":
    sys.exit(main())
