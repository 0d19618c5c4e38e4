"""What patched models cost, eager and compiled: against the unpatched ones and their stock siblings.

Whole models (a training step, a forward, a cached decoding), the replaced modules where they stand in them (on a CPU),
and norms and rotations by themselves are timed subject after subject in turn, so that whatever else the machine does
meets all of them. Figures are medians, and ratios of one run. On a CPU nothing else should run: threads wait as torch's
own do, spinning, where the other recipes let them sleep.

    python recipes/benchmark.py                          # small sizes on a CPU, full ones on a GPU; under 10 minutes
    python recipes/benchmark.py --parts models --models gpt2 bert --layers 12 --minutes 60   # at full size on a CPU
    python recipes/benchmark.py --parts micro --widths 768 --modes eager --repeats 5

In the output folder: results.md, results.json, benchmark.png.
"""

import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from accelerate import Accelerator, PartialState
from hfrecipes.bench_micro import micro_races
from hfrecipes.bench_models import MODELS, model_races
from hfrecipes.bench_places import place_races
from hfrecipes.bench_report import benchmark_report, draw_benchmark
from hfrecipes.command import run_recipe
from hfrecipes.corpus import RecipeError
from hfrecipes.files import write_json
from hfrecipes.memory import keep_freed_memory
from hfrecipes.options import COUNT, NOT_NEGATIVE, Range, option
from hfrecipes.progress import Progress
from hfrecipes.report import hardware, versions
from hfrecipes.settings import parse_variant, read_settings
from hfrecipes.timing import MODES

PARTS = {"models": model_races, "places": place_races, "micro": micro_races}
KNOWN = {"parts": PARTS, "modes": MODES, "models": MODELS, "precision": ("float32", "bfloat16")}


def by_device(cpu: Any, gpu: Any, about: str, choices: Range | None = None) -> Any:
    """A setting whose default goes by the device."""
    return option(lambda: gpu if PartialState().device.type == "cuda" else cpu, about, choices)


@dataclass
class BenchmarkConfig:
    """Sizes go by the device: small ones on a CPU, full ones on a GPU."""

    output_dir: str = option("runs/benchmark", "where the results go")
    parts: list[str] = option([*PARTS], f"{', '.join(PARTS)}; in this order")
    modes: list[str] = option([*MODES], "eager, compiled")
    repeats: int = option(9, "samples of each subject, after those that warm it up", COUNT)
    minutes: float = option(8.0, "no measurement begins later; the report names what is left", NOT_NEGATIVE)
    patches: list[str] = option(
        ["control", "rms", "rope", "dyt", "rms+rope"],
        "schemes joined by +; control is an unpatched copy, which shows what chance does",
    )
    models: list[str] = by_device(["gpt2", "bert"], list(MODELS), f"of {', '.join(MODELS)}; random weights")
    layers: int | None = by_device(2, None, "of every model; none: the model's own", COUNT)
    width: int | None = option(None, "channels, 64 to a head; none: the model's own")
    vocab_size: int = by_device(8192, 50257, "tokens that a model knows", COUNT)
    batch_size: int = by_device(2, 8, "sequences or images", COUNT)
    block_size: int = by_device(128, 1024, "tokens of a sequence", COUNT)
    new_tokens: int = by_device(16, 128, "tokens that are decoded, behind a prompt of as many", COUNT)
    precision: str = by_device("float32", "bfloat16", "float32, or bfloat16: autocast for training, else weights")
    widths: list[int] = by_device([768, 2048], [768, 1024, 2048, 4096, 8192, 16384], "channels of the micro part")

    def check(self) -> None:
        for name, known in KNOWN.items():
            values = getattr(self, name)
            if unknown := [v for v in ([values] if isinstance(values, str) else values) if v not in known]:
                raise RecipeError(f"--{name} knows {', '.join(known)}, not {', '.join(unknown)}")
        if wrong := [width for width in (self.width or 64, *self.widths) if width < 64 or width % 64]:
            raise RecipeError(f"--width and --widths must be multiples of 64, not {wrong[0]}")
        if self.new_tokens > self.block_size:
            raise RecipeError(
                f"--new_tokens can't be more than --block_size, {self.block_size}: they are the prompt too"
            )
        for patch in self.patches:
            parse_variant(patch)


def benchmark(config: BenchmarkConfig, command: str) -> None:
    transformers.logging.set_verbosity_error()
    accelerator, started, out = Accelerator(), time.perf_counter(), Path(config.output_dir)
    device = accelerator.device
    results = {"command": command, "config": asdict(config), "hardware": hardware(accelerator), "versions": versions()}
    results |= {"memory_kept": keep_freed_memory(), "races": [], "left_out": []}
    races = [race for part in config.parts for race in PARTS[part](config, device)]
    if not races:
        raise RecipeError("nothing to measure: --parts places is on a CPU and in --modes eager")
    try:
        with Progress("benchmark", len(races)) as bar:
            for number, race in enumerate(races, 1):
                name = f"{race.case}, {race.work}, {race.mode}"
                if time.perf_counter() - started > 60 * config.minutes:
                    results["left_out"].append(name)
                else:
                    told = {"part": race.part, "case": race.case, "work": race.work, "mode": race.mode}
                    results["races"].append(told | {"timings": race.run(config.repeats, device)})
                results["wall_seconds"] = time.perf_counter() - started
                write_json(out / "results.json", results)
                bar.step(number, name)
    finally:  # Ctrl-C too: what was measured is reported
        if "wall_seconds" in results:
            text = benchmark_report(results)
            (out / "results.md").write_text(text, "utf-8")
            drawn = draw_benchmark(results, out / "benchmark.png")
            print(f"{text}\nin {out}: results.md, results.json{', benchmark.png' * drawn}")


def main(argv: list[str] | None = None) -> int:
    """Run the recipe. Returns the exit status: 0, 2 (bad input) or 130 (stopped)."""
    read = partial(read_settings, BenchmarkConfig)
    return run_recipe("benchmark.py", argv, __doc__, read, benchmark, resumable=False)


if __name__ == "__main__":
    sys.exit(main())
