"""What patched models cost, eager and compiled: against the unpatched ones, their stock siblings, and the hardware.

Whole models (a training step, a forward, a cached decoding), the replaced modules where they stand in them (on a CPU),
and norms, norms of a sum and rotations by themselves are timed subject after subject in turn, so that whatever else the
machine does meets all of them. Figures are medians, and ratios of one run; of what is timed by itself, also the bytes
moved a second against those of a plain copy in the same turns. On a CPU nothing else should run: threads wait as
torch's own do, spinning, where the other recipes let them sleep.

    python recipes/benchmark.py                          # small sizes on a CPU, full ones on a GPU; under 10 minutes
    python recipes/benchmark.py --parts models --models gpt2 bert --layers 12 --minutes 60   # at full size on a CPU
    python recipes/benchmark.py --parts micro --widths 768 --modes eager --repeats 5

In the output folder: results.md, results.json, benchmark.png.
"""

import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # its profiler, which counts memory, would tell of every use

import torch
import transformers
from accelerate import Accelerator
from hfrecipes.bench_micro import micro_groups
from hfrecipes.bench_models import MODELS, model_groups
from hfrecipes.bench_places import place_groups
from hfrecipes.bench_report import benchmark_report, draw_benchmark
from hfrecipes.corpus import RecipeError
from hfrecipes.memory import keep_freed_memory
from hfrecipes.progress import Progress
from hfrecipes.report import hardware, versions
from hfrecipes.settings import check_numbers, check_output_folder, parse_variant, read_settings
from hfrecipes.timing import MODES
from hfrecipes.training import exit_status, require_own_folder, write_json

PARTS = {"models": model_groups, "places": place_groups, "micro": micro_groups}
# of a setting that isn't given: on a CPU, on a GPU
BY_DEVICE = {
    "models": (["gpt2", "bert"], list(MODELS)),
    "layers": (2, None),
    "vocab_size": (8192, 50257),
    "batch_size": (2, 8),
    "block_size": (128, 1024),
    "new_tokens": (16, 128),
    "precision": ("float32", "bfloat16"),
    "widths": ([768, 2048], [4096, 768, 1024, 2048, 8192, 16384]),
    "dtypes": (["float32"], ["bfloat16", "float32"]),
    "megabytes": (8.0, 64.0),
}


@dataclass
class BenchmarkConfig:
    """Sizes that aren't given go by the device."""

    output_dir: str = field(default="runs/benchmark", metadata={"help": "where the results go"})
    parts: list[str] = field(
        default_factory=lambda: list(PARTS), metadata={"help": f"{', '.join(PARTS)}; in this order"}
    )
    modes: list[str] = field(default_factory=lambda: list(MODES), metadata={"help": "eager, compiled"})
    repeats: int = field(default=9, metadata={"help": "samples of each subject, after those that warm it up"})
    minutes: float = field(default=8.0, metadata={"help": "no measurement begins later; the report names what is left"})
    seed: int = field(default=0, metadata={"help": "of weights and tokens"})
    models: list[str] | None = field(
        default=None,
        metadata={"help": f"of {', '.join(MODELS)}, with random weights. On a CPU gpt2 and bert, on a GPU all"},
    )
    patches: list[str] = field(
        default_factory=lambda: ["control", "rms", "rope", "dyt", "rms+rope"],
        metadata={"help": "schemes joined by +; control is an unpatched copy, which shows what chance does"},
    )
    regions: str = field(
        default="blocks", metadata={"help": "what is compiled for training and forward: blocks, or the whole model"}
    )
    layers: int | None = field(default=None, metadata={"help": "of every model. On a CPU 2, on a GPU the model's own"})
    width: int | None = field(default=None, metadata={"help": "channels, 64 to a head; the model's own"})
    vocab_size: int | None = field(default=None, metadata={"help": "tokens. On a CPU 8192, on a GPU 50257"})
    batch_size: int | None = field(default=None, metadata={"help": "sequences or images. On a CPU 2, on a GPU 8"})
    block_size: int | None = field(default=None, metadata={"help": "tokens of one. On a CPU 128, on a GPU 1024"})
    new_tokens: int | None = field(
        default=None,
        metadata={"help": "tokens that are decoded, behind a prompt of as many. On a CPU 16, on a GPU 128"},
    )
    precision: str | None = field(
        default=None,
        metadata={"help": "float32, or bfloat16: autocast for training, else weights. On a GPU the latter"},
    )
    widths: list[int] | None = field(
        default=None, metadata={"help": "channels of the parts. On a CPU 768 2048, on a GPU up to 16384"}
    )
    dtypes: list[str] | None = field(
        default=None, metadata={"help": "of the parts. On a CPU float32, on a GPU bfloat16 too"}
    )
    megabytes: float | None = field(
        default=None, metadata={"help": "that a large tensor of a part takes. On a CPU 8, on a GPU 64"}
    )


def fill_in(config: BenchmarkConfig, device: torch.device) -> None:
    """The sizes that weren't given."""
    for name, (cpu, gpu) in BY_DEVICE.items():
        if getattr(config, name) is None:
            setattr(config, name, gpu if device.type == "cuda" else cpu)


def check(config: BenchmarkConfig) -> None:
    """Refuse what can't work before anything is run."""
    at_least = ("repeats", "layers", "vocab_size", "batch_size", "block_size", "new_tokens")
    check_numbers(config, dict.fromkeys(at_least, 1) | {"minutes": 0})
    known = {"parts": PARTS, "modes": MODES, "models": MODELS, "dtypes": ("float32", "bfloat16", "float16")}
    for name, values in known.items():
        if unknown := [value for value in getattr(config, name) if value not in values]:
            raise RecipeError(f"--{name} knows {', '.join(values)}, not {', '.join(unknown)}")
    for name, values in {"regions": ("blocks", "model"), "precision": ("float32", "bfloat16")}.items():
        if getattr(config, name) not in values:
            raise RecipeError(f"--{name} must be {' or '.join(values)}, not {getattr(config, name)}")
    for width in [*config.widths, *([] if config.width is None else [config.width])]:
        if width < 64 or width % 64:
            raise RecipeError(f"a width must be a multiple of 64, not {width}")
    if config.new_tokens > config.block_size:
        raise RecipeError(f"--new_tokens can't be more than --block_size, {config.block_size}: they are the prompt too")
    if not config.megabytes > 0:
        raise RecipeError(f"--megabytes must be positive, not {config.megabytes}")
    for patch in config.patches:
        parse_variant(patch)
    check_output_folder(config.output_dir)


def benchmark(config: BenchmarkConfig, command: str) -> None:
    transformers.logging.set_verbosity_error()
    accelerator = Accelerator()
    fill_in(config, accelerator.device)
    check(config)
    require_own_folder("benchmark.py", config.output_dir)
    started = time.perf_counter()
    out = Path(config.output_dir)
    results = {"command": command, "config": asdict(config), "hardware": hardware(accelerator)}
    results |= {"versions": versions(), "memory_kept": keep_freed_memory(), "groups": []}
    try:
        total = sum(1 for part in config.parts for _ in PARTS[part](config, accelerator.device))  # makes nothing
        with Progress("benchmark", total) as bar:
            for part in config.parts:
                for group, measure in PARTS[part](config, accelerator.device):
                    late = time.perf_counter() - started > 60 * config.minutes
                    measured = {"left_out": "out of time", "timings": []} if late else measure()
                    results["groups"].append(group | measured)
                    results["wall_seconds"] = time.perf_counter() - started
                    write_json(out / "results.json", results)
                    bar.step(len(results["groups"]), f"{group['case']}, {group['work']}")
    finally:  # Ctrl-C too: what was measured is reported
        if results["groups"]:
            text = benchmark_report(results)
            (out / "results.md").write_text(text, "utf-8")
            drawn = draw_benchmark(results, out / "benchmark.png")
            print(f"{text}\nin {out}: results.md, results.json{', benchmark.png' * drawn}")


def main(argv: list[str] | None = None) -> int:
    """Run the recipe. Returns the exit status: 0, 2 (bad input) or 130 (stopped)."""
    argv = sys.argv[1:] if argv is None else argv

    def measure(command: str) -> None:
        benchmark(read_settings(BenchmarkConfig, "benchmark.py", argv, (__doc__ or "").split("\n\n")[1]), command)

    return exit_status("benchmark.py", argv, measure, resumable=False)


if __name__ == "__main__":
    sys.exit(main())
