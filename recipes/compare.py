"""Which swap is worth it: a grid of patches, starts and methods over seeds and budgets, against an unpatched control.

For each seed a baseline is trained once; every model of the grid starts from it and trains on the same batches in the
same order, as does the control: an unpatched copy for each seed and budget, which is always there. Differences are
taken within a seed, and their interval over the seeds says whether a swap is better, the same or worse.

    python recipes/compare.py                                                      # rms, dyt, rope, rms+rope; 5 seeds
    python recipes/compare.py --variants dyt rope --starts copied repaired --methods finetune distil
    python recipes/compare.py --baseline_steps 0 --starts reset --steps 900       # all models from scratch
    python recipes/compare.py --task image recipes/configs/vision.yaml --list     # what would be trained
    accelerate launch --num_cpu_threads_per_process 2 recipes/compare.py          # with torchrun: -- before the script

In the output folder: report.html, results.md, results.json, curves.png. A grid that was stopped (Ctrl-C, --max_minutes,
kill -9) reports what is finished, and goes on with --resume; results.json of a killed one is reported then.
"""

import copy
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in finetune.py; read when torch is loaded

import torch
from hfrecipes.compare_figure import draw_curves
from hfrecipes.compare_report import compare_report
from hfrecipes.corpus import RecipeError
from hfrecipes.html_report import html_report
from hfrecipes.memory import keep_freed_memory
from hfrecipes.methods import METHODS, Distil, Method, MethodConfig, objective, with_adapters
from hfrecipes.paired import Cell, Kind, read_cells
from hfrecipes.report import table
from hfrecipes.settings import CONTROL, FREE_TO_CHANGE, check, read_run
from hfrecipes.start import Baseline, check_patch
from hfrecipes.training import (
    DivergedError,
    Run,
    Stopped,
    exit_status,
    folder_name,
    read_results,
    require_own_folder,
    run_recipe,
)

STARTS = ("repaired", "self", "auto", "copied", "reset")


@dataclass
class CompareConfig(MethodConfig):
    """The grid; what is trained on what are the flags of finetune.py."""

    variants: list[str] = field(
        default_factory=lambda: ["rms", "dyt", "rope", "rms+rope"],
        metadata={"help": "patches, by registered names as in rms+rope or dyt:alpha=0.8; the control is always there"},
    )
    methods: list[str] = field(
        default_factory=lambda: ["finetune"],
        metadata={"choices": METHODS, "help": "how patched copies are trained; see heal.py"},
    )
    starts: list[str] | None = field(
        default=None, metadata={"help": f"how patched copies begin: {', '.join(STARTS)}; none: as --start says"}
    )
    seeds: list[int] | None = field(
        default=None, metadata={"help": "of weights and of the order of the data; none: five, the first is --seed"}
    )
    steps: list[int] = field(
        default_factory=lambda: [150], metadata={"help": "budgets: steps after the patch, the control's as well"}
    )
    margin: float = field(
        default=0.005, metadata={"help": "a difference below this share of the control's figure counts as none"}
    )
    max_minutes: float | None = field(default=None, metadata={"help": "stop then; --resume goes on"})
    keep_models: bool = field(default=False, metadata={"help": "keep the trained models, not only their figures"})
    output_dir: str = field(default="runs/compare", metadata={"help": "where the results go"})
    list: bool = field(default=False, metadata={"help": "name the models and how long they take, and train none"})

    def __post_init__(self) -> None:
        self.variants = [variant for variant in self.variants if variant != CONTROL]
        self.starts = [self.start] if self.starts is None else self.starts
        self.seeds = [self.seed + i for i in range(5)] if self.seeds is None else self.seeds
        self.start = self.starts[0] if self.starts else ""  # what a check of a single run looks at

    def check(self) -> None:
        for name in ("variants", "methods", "starts", "seeds", "steps"):
            values = getattr(self, name)
            if not values:
                raise RecipeError(f"--{name} names nothing to compare" + " with the control" * (name == "variants"))
            if len(set(values)) < len(values):
                raise RecipeError(f"a value is named twice in --{name} {' '.join(map(str, values))}")
        super().check()
        if unknown := [start for start in self.starts if start not in STARTS]:
            raise RecipeError(f"--starts {unknown[0]} is not known; there are {', '.join(STARTS)}")
        if self.patience is not None:
            raise RecipeError(
                "--patience would stop models at different steps, and budgets must be equal: leave it out"
            )
        if min(self.seeds) < 0:
            raise RecipeError(f"--seeds must be at least 0, not {min(self.seeds)}")
        if not 0 <= self.margin < 1:
            raise RecipeError(f"--margin is a share of the control's figure, from 0 to below 1, not {self.margin:g}")
        if self.max_minutes is not None and not self.max_minutes > 0:
            raise RecipeError(f"--max_minutes must be positive, not {self.max_minutes:g}")
        others = [start for start in self.starts if start != "reset"]
        if others and self.baseline_steps == 0 and self.model is None:
            raise RecipeError(
                f"--baseline_steps 0 leaves nothing for --starts {others[0]} to begin with: from scratch there is "
                "--starts reset only, else train a baseline first"
            )


# What may change when a grid goes on: finished models keep their figures, others come on top.
GRID = {
    "variants",
    "methods",
    "starts",
    "seeds",
    "steps",
    "start",
    "seed",
    "margin",
    "max_minutes",
    "keep_models",
    "list",
}


def cells_of(config: Any) -> list[Cell]:
    """Seed after seed, each with its controls: what is finished of a stopped grid can be compared.

    What begins alike comes together, so that it is repaired once.
    """
    cells = []
    for seed in config.seeds:
        cells += [Cell(Kind(CONTROL, "", control_method(config), steps), seed) for steps in config.steps]
        for variant, start, steps, method in product(config.variants, config.starts, config.steps, config.methods):
            cells.append(Cell(Kind(variant, start, method, steps), seed))
    return cells


def control_method(config: Any) -> str:
    """How the control is trained: on the task's loss (""), or, where no method uses labels, distilled from itself."""
    unlabelled = config.distil_weight == 1 and all("distil" in method.split("+") for method in config.methods)
    return "distil" if unlabelled else ""


def compare(run: Run) -> None:
    """Train what isn't trained yet, and report all that is, also when it is stopped."""
    c, cells = run.config, cells_of(run.config)
    first = Baseline(run.task, c, c.seeds[0], [])
    check_patches(run, first)
    run.open_results(FREE_TO_CHANGE | GRID)
    run.results["unit"] = run.task.unit
    run.results["control_method"] = control_method(c)
    run.results["grid"] = [{**cell.kind._asdict(), "seed": cell.seed} for cell in cells]
    run.results["from_scratch"] = not first.steps and not c.model
    run.write_results()
    try:
        with stop_requested_after(c.max_minutes, run.requests):
            for seed in c.seeds:
                left = [cell for cell in cells if cell.seed == seed and not done(run, cell)]
                run.accelerator.print(f"seed {seed}: {len(left)} of {len(cells) // len(c.seeds)} models to train")
                if left:
                    train_seed(run, first if seed == c.seeds[0] else Baseline(run.task, c, seed, []), left)
    finally:
        write_reports(run)
    run.accelerator.end_training()


def train_seed(run: Run, baseline: Baseline, cells: list[Cell]) -> None:
    baseline.train(run, f"baseline-{baseline.seed}")
    for cell in cells:
        if stop_requested(run):
            raise Stopped(f"stopped before {cell.name}; everything is saved")
        try:
            train_cell(run, baseline, cell)
        except DivergedError as error:  # a result as well
            run.accelerator.print(f"{cell.name}: {error}")
            run.results["stages"][cell.name] = {"name": cell.name, "failed": str(error).partition(": ")[0]}
            run.accelerator.free_memory()
            run.write_results()
        done(run, cell)


def train_cell(run: Run, baseline: Baseline, cell: Cell) -> None:
    """One model: what is trained after the baseline goes on in its data."""
    variant, start, name, steps = cell.kind
    if not cell.kind.is_control:
        method = objective(name, run.task, baseline.copy, run.config, variant)
    else:
        method = Distil(run.task, run.config, baseline.copy) if name else Method(run.task, run.config)

    def build() -> Any:
        return method.prepare(baseline.patched(variant, start))

    run.stage(cell.name, build, steps, seed=cell.seed, first=baseline.steps, objective=method)


def done(run: Run, cell: Cell) -> bool:
    """Whether a cell has its figures; its model, saved by then, goes unless it is asked for."""
    found = cell.name in run.results["stages"]
    if found and run.main and not run.config.keep_models:
        shutil.rmtree(run.out / folder_name(cell.name), ignore_errors=True)
    return found


def check_patches(run: Run, baseline: Baseline) -> None:
    """Every patch is tried out from every start and with every method, as far as that takes no data.

    Raises:
        PatchError: hfpatch refuses one.
        RecipeError: a method can't be put together, or the model can't draw sequences for a repair.
    """
    c = run.config
    for variant, start in product(c.variants, c.starts):
        check_patch(baseline.model, variant, start)
    if c.lora_rank:
        with_adapters(copy.deepcopy(baseline.model), c)  # unknown --lora_targets are refused before anything is trained


@contextmanager
def stop_requested_after(minutes: float | None, requests: list[float]) -> Iterator[None]:
    """Context that stops the run after so many minutes as Ctrl-C does: at the end of the current step."""
    timer = threading.Timer(60 * (minutes or 0), lambda: requests.append(time.monotonic()))
    timer.daemon = True
    if minutes is not None:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def stop_requested(run: Run) -> bool:
    """Whether any of the processes was asked to stop."""
    asked = torch.tensor(float(bool(run.requests)), device=run.accelerator.device)
    return bool(run.accelerator.reduce(asked, "sum") > 0)


def write_reports(run: Run) -> None:
    run.write_results()
    if read_cells(run.results):
        if run.main:
            (run.out / "report.html").write_text(html_report(run.results), "utf-8")
        run.report(compare_report, draw_curves, "report.html")


# -- what would be done


def listing(config: Any) -> str:
    """The models of the grid and how long they take, by those that are finished."""
    path = Path(config.output_dir) / "results.json"
    stages = read_results(path)["stages"] if path.exists() else {}
    cells = cells_of(config)
    times = [minutes(cell, cells, stages) for cell in cells]
    columns = [
        ["model", *(cell.name for cell in cells)],
        ["state", *(status(stages.get(cell.name)) for cell in cells)],
        ["minutes", *("-" if time is None else f"{time:.1f}" for time in times)],
    ]
    left = [time for cell, time in zip(cells, times, strict=True) if cell.name not in stages]
    known = [time for time in left if time is not None]
    total = f": about {sum(known):.0f} minutes, and the baselines'" if known else "; no estimate before one is done"
    return "\n".join([*table(columns), "", f"{len(left)} of {len(cells)} models to train{total if left else ''}"])


def status(stage: dict[str, Any] | None) -> str:
    return "to train" if stage is None else "failed" if stage.get("failed") else "done"


def minutes(cell: Cell, cells: list[Cell], stages: dict[str, Any]) -> float | None:
    """Its own if it is finished, else by the time per step of those that are most like it."""
    for alike in (
        lambda other: other == cell,
        lambda other: other.kind == cell.kind,
        lambda other: other.kind._replace(steps=0) == cell.kind._replace(steps=0),
        lambda other: other.kind.method == cell.kind.method,
        lambda other: True,
    ):
        found = [stages[other.name] for other in cells if alike(other) and "seconds" in stages.get(other.name, {})]
        if found:
            return cell.kind.steps * sum(s["seconds"] for s in found) / sum(s["step"] for s in found) / 60
    return None


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    about = __doc__.split("\n\n")[1]
    if "--list" not in argv:
        return run_recipe("compare.py", argv, about, compare, CompareConfig)

    def show_list(command: str) -> None:
        config = read_run(argv, "compare.py", about, CompareConfig)
        check(config)
        require_own_folder("compare.py", config.output_dir)
        print(listing(config))

    return exit_status("compare.py", argv, show_list)


if __name__ == "__main__":
    keep_freed_memory()
    sys.exit(main())
