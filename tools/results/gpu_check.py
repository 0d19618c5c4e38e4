"""What only a GPU can show, in ten minutes: the tests that need one, and whether patched models reach their goals.

One process, no network. Parts come in order of worth; each has its share of the time, and is written to results.json
as soon as it is done. The same command again does what is left.

    python tools/results/gpu_check.py --minutes 10 --output_dir runs/gpu
    python tools/results/gpu_check.py --device cpu --tiny  # a try of the script itself: its figures say nothing

In the output folder: results.md, results.json, gpu_check.png, pytest.log.
"""

import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import matplotlib.pyplot as plt
import torch
import transformers
from accelerate import Accelerator
from harness import bench_micro, bench_models
from harness.bench_models import FORWARD, TOKEN, TRAINING
from harness.bench_report import MICRO, colours_of, draw_ratios, name_of, panels_of
from harness.command import progress, run_recipe
from harness.device import count_work, describe_device, run_gpu_tests
from harness.gpu_report import draw_fractions, gpu_report
from harness.report import environment
from harness.results import OutputFolder, read_results
from harness.settings import COUNT, NOT_NEGATIVE, option, read_settings
from harness.timing import NO_TIME, Entrant, time_in_turn
from methods import keep_freed_memory
from texts import RecipeError

from hfpatch.runtime.patch_errors import describe_error

PARTS = ("environment", "tests", MICRO, "models")
# subjects in order of worth: what no time is left for is at the end
PATCHES = {
    "gpt2": ["none", "rms", "control", "rope", "rms then folded", "dyt", "rms+rope", "fixed"],
    "bert": ["rms", "control", "rope", "dyt", "rms+rope", "fixed"],
    "llama-1b": ["none", "control", "dyt", "nope", "fixed"],
}
LEFT_OUT = (bench_models.NATIVE, "Derf")  # for their compilation's time
# model, work and mode, in order of worth, with the seconds that each takes on an H100
RACES = [
    ("gpt2", TRAINING, "compiled", 80),
    ("gpt2", TOKEN, "compiled", 100),
    ("gpt2", FORWARD, "compiled", 35),
    ("llama-1b", TOKEN, "compiled", 80),
    ("bert", TRAINING, "compiled", 50),
    ("gpt2", TRAINING, "eager", 20),
    ("gpt2", TOKEN, "eager", 20),
    ("gpt2", FORWARD, "eager", 15),
    ("bert", FORWARD, "compiled", 30),
    ("llama-1b", FORWARD, "compiled", 35),
    ("llama-1b", TRAINING, "compiled", 50),
    ("bert", TRAINING, "eager", 20),
    ("bert", FORWARD, "eager", 15),
    ("llama-1b", TOKEN, "eager", 20),
    ("llama-1b", FORWARD, "eager", 20),
    ("llama-1b", TRAINING, "eager", 30),
]
ENVIRONMENT_SECONDS, TEST_SECONDS, MICRO_SECONDS = 30, 90, {"eager": 2, "compiled": 7}


@dataclass
class GpuCheckConfig:
    """How long, on what; sizes are fixed, so that figures of several GPUs can be compared."""

    output_dir: str = option("runs/gpu_check", "where the results go; what is there already isn't measured again")
    minutes: float = option(10.0, "parts begin as long as it leaves them their share", NOT_NEGATIVE)
    device: Literal["cuda", "cpu"] = option("cuda", "cpu, with --tiny, tries out the script itself")
    tiny: bool = option(False, "small sizes, without code generation: no figure of it says anything")
    parts: list[str] = option([*PARTS], "in this order", PARTS)
    repeats: int = option(15, "samples of each subject, after those that warm it up", COUNT)

    resume = True  # the same command goes on

    def check(self) -> None:
        if self.device == "cuda" and not torch.cuda.is_available():
            raise RecipeError(
                "torch sees no CUDA device here. Run it where there is one; --device cpu --tiny tries out the script"
            )
        if self.device == "cpu" and not self.tiny:
            raise RecipeError(
                "--device cpu takes --tiny: at full sizes a CPU would need hours (tools/results/time_patched.py)"
            )


@dataclass
class Sizes:
    """Of the models and tensors that are measured: what `bench_models` and `bench_micro` read."""

    patches: list[str] = field(default_factory=list)
    layers: int | None = None  # None: the model's own
    width: int | None = None
    vocab_size: int = 50257
    batch_size: int = 8
    block_size: int = 1024
    new_tokens: int = 256
    precision: str = "bfloat16"
    mebibytes: int = 512  # of a tensor; with less, a GPU would be waiting for Python


TINY = {"layers": 2, "width": 64, "vocab_size": 64, "batch_size": 2, "block_size": 16, "new_tokens": 4, "mebibytes": 1}
WIDTHS, TINY_WIDTHS = (768, 2048, 8192), (64,)


@dataclass
class Step:
    """A part of the work, or a piece of one."""

    told: dict[str, str]  # part, case, work, mode
    share: float  # seconds
    run: Callable[[float], dict[str, Any]]  # given when its time is over: what to keep

    @property
    def name(self) -> str:
        return name_of(self.told)


def plan_steps(config: GpuCheckConfig, folder: OutputFolder) -> list[Step]:
    """Everything that there is to do, in order of worth."""
    device = folder.accelerator.device
    sizes = partial(Sizes, **TINY) if config.tiny else Sizes
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def race(told: dict[str, str], share: float, made: Callable[[str], Any], trains: bool) -> Step:
        def run(until: float) -> dict[str, Any]:
            backend = "eager" if config.tiny else None
            look = partial(count, device=device, trains=trains) if told["part"] == "models" else None
            timings = time_in_turn(
                [one for one in made(told["mode"]) if one.subject not in LEFT_OUT],
                told["mode"],
                config.repeats,
                backend=backend,
                until=until,
                count=look,
            )
            return {"timings": timings}

        return Step(told, share, run)

    def tests(until: float) -> dict[str, Any]:
        workers = max(1, min(12, cores - 2)) if device.type == "cuda" else 1
        return run_gpu_tests(folder.out / "pytest.log", max(1.0, until - time.perf_counter()), workers)

    found = [
        Step(
            {"part": "environment", "case": "environment", "work": "versions and speed", "mode": "eager"},
            ENVIRONMENT_SECONDS,
            lambda until: {"environment": describe_device(device, config.tiny)},
        ),
        Step({"part": "tests", "case": "tests", "work": "pytest -m gpu", "mode": "both"}, TEST_SECONDS, tests),
    ]
    for width in TINY_WIDTHS if config.tiny else WIDTHS:
        for mode in ("compiled", "eager"):
            for kind in ("norm", "rotary"):
                for work in (bench_micro.FORWARD, bench_micro.BACKWARD):
                    told = {"part": MICRO, "case": f"{kind}, {width}", "work": work, "mode": mode}
                    made = partial(bench_micro.entrants, kind, work, width, sizes(), device)
                    found.append(race(told, MICRO_SECONDS[mode], made, False))
    for name, work, mode, share in RACES:
        given = sizes(patches=PATCHES[name])
        if name == "llama-1b" and not config.tiny:
            given.batch_size = 2  # so that weights, gradients and AdamW's moments of all subjects fit 80 GB
            if work == TRAINING:
                given.patches = given.patches[:3]
        told = {"part": "models", "case": name, "work": work, "mode": mode}
        found.append(race(told, share, partial(bench_models.entrants, name, work, given, device), work == TRAINING))
    return [step for step in found if step.told["part"] in config.parts]


def count(entrant: Entrant, device: torch.device, trains: bool) -> dict[str, int]:
    return count_work(entrant.once, entrant.model, device, trains)


def is_finished(result: dict[str, Any]) -> bool:
    """Whether nothing of it was left out for want of time."""
    return not result.get("stopped") and all(t["failed"] != NO_TIME for t in result.get("timings", []))


def gpu_check(config: GpuCheckConfig, command: str) -> None:
    started = time.perf_counter()
    transformers.logging.set_verbosity_error()
    folder = OutputFolder(config, command, Accelerator(cpu=config.device == "cpu"))
    require_same_device(folder)
    kept = keep_freed_memory()
    results = folder.open_results({"output_dir", "minutes", "parts"}, memory_kept=kept, done={}, left_out=[], broken={})
    results |= {"left_out": [], "broken": {}}
    steps = sorted(plan_steps(config, folder), key=lambda step: step.name in results["done"])  # what never began first
    end = started + 60 * config.minutes
    try:
        with progress("gpu_check", len(steps)) as bar:
            for step in steps:
                bar.set_postfix_str(step.name, refresh=True)
                do_step(step, results, end)
                folder.write_results()
                bar.update()
    finally:  # Ctrl-C too: what was measured is reported
        folder.report(gpu_report, draw_gpu_check, "gpu_check.png")


def do_step(step: Step, results: dict[str, Any], end: float) -> None:
    """Do what isn't done yet, if there is time; what it finds, or why it broke, goes into the results."""
    began = time.perf_counter()
    if step.name in results["done"] and is_finished(results["done"][step.name]):
        return
    if end - began < step.share / 2:
        results["left_out"].append(step.name)
        return
    try:
        found = step.run(min(end, began + 1.25 * step.share))
        results["done"][step.name] = step.told | found | {"took_seconds": time.perf_counter() - began}
    except Exception as error:  # the parts behind it are worth something too
        results["broken"][step.name] = describe_error(error)
    finally:
        torch.compiler.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def require_same_device(folder: OutputFolder) -> None:
    """Refuse to go on with another device's figures."""
    path, here = folder.out / "results.json", environment(folder.accelerator)["hardware"]["device"]
    before = read_results(path)["hardware"]["device"] if path.exists() else here
    if before != here:
        raise RecipeError(f"{folder.out} has figures of {before}, and this is {here}: take another --output_dir")


def draw_gpu_check(results: dict[str, Any], path: Path) -> None:
    """Whole models against the unpatched one; norms and rotations as a share of a copy's speed."""
    races = [race for race in results["done"].values() if "timings" in race]
    panels = panels_of([race for race in races if race["part"] == "models"])
    micro = [race for race in races if race["part"] == MICRO]
    number = len(panels) + bool(micro)
    if not number:
        return
    whole = plt.figure(figsize=(15, 4.2 * number), layout="constrained")
    parts = whole.subfigures(number, 1, squeeze=False)[:, 0]
    colours = colours_of(subject for _, points in panels for subject in points["subject"])
    for ((part, mode), points), inside in zip(panels, parts, strict=False):
        draw_ratios(inside.subplots(), part, mode, points, colours)
    if micro:
        draw_fractions(parts[-1], micro)
    whole.suptitle(results["hardware"]["device"] + (", tiny sizes: says nothing" if results["config"]["tiny"] else ""))
    whole.savefig(path, dpi=110)
    plt.close(whole)


def main(argv: list[str] | None = None) -> int:
    """Run the recipe. Returns the exit status: 0, 2 (bad input) or 130 (stopped)."""
    return run_recipe("gpu_check.py", argv, __doc__, partial(read_settings, GpuCheckConfig), gpu_check, resumable=False)


if __name__ == "__main__":
    sys.exit(main())
