"""Which swap is worth it: a grid of patches, starts and methods over seeds and budgets, against an unpatched control.

For each seed a baseline is trained once; every model of the grid starts from it and trains on the same batches in the
same order, as does the control: an unpatched copy for each seed and budget, which is always there. Differences are
taken within a seed, and their interval over the seeds says whether a swap is better, the same or worse.

    python tools/results/train_grid.py  # rms, dyt, rope, rms+rope; 5 seeds
    python tools/results/train_grid.py --variants dyt rope --starts copied repaired --methods finetune distil
    python tools/results/train_grid.py --variants none --schedules 1 0  # at once, and norm after norm
    python tools/results/train_grid.py --baseline_steps 0 --starts reset --steps 900  # all models from scratch

In the output folder: report.html, results.md, results.json, curves.png. A grid that was stopped (Ctrl-C, kill -9)
goes on with --resume, and trains no model twice; one stopped by Ctrl-C or SIGTERM reports what is finished.
"""

import os
import shutil
import sys
from dataclasses import dataclass
from itertools import product
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in recipes/finetune.py; read when torch is loaded
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from harness.command import DivergedError
from harness.compare_report import compare_report, draw_reports
from harness.grid import AT_ONCE, Cell
from harness.settings import COUNT, FREE_TO_CHANGE, NOT_NEGATIVE, STARTS, option
from harness.start import Baseline, check_schedule
from harness.training import Run, run_training
from harness.ways import METHODS, MethodConfig
from methods import CONTROL
from texts import RecipeError

# What may change besides when a grid goes on: finished models keep their figures, others come on top.
GRID = {"methods", "starts", "schedules", "seeds", "steps", "start", "seed", "margin", "keep_models"}


@dataclass
class CompareConfig(MethodConfig):
    """The grid; what is trained on what are the flags of finetune.py."""

    variants: list[str] = option(
        ["rms", "dyt", "rope", "rms+rope"],
        "patches, by registered names as in rms+rope or dyt:alpha=0.8; the control is always there",
    )
    methods: list[str] = option(["finetune"], "how patched copies are trained; see train_healed.py", METHODS)
    starts: list[str] | None = option(None, "how patched copies begin; none: as --start says", STARTS)
    schedules: list[int] = option(
        [1],
        "of norms: parts in which they change while a model is trained, from the first layers to the last; 1: all at "
        "once, before; 0: norm after norm",
        NOT_NEGATIVE,
    )
    seeds: list[int] | None = option(
        None, "of weights and of the order of the data; none: five, the first is --seed", NOT_NEGATIVE
    )
    steps: list[int] = option([150], "budgets: steps after the patch, the control's as well", COUNT)
    margin: float = option(0.005, "a difference below this share of the control's figure counts as none", NOT_NEGATIVE)
    keep_models: bool = option(False, "keep the trained models, not only their figures")
    output_dir: str = option("runs/compare", "where the results go")

    def __post_init__(self) -> None:
        self.starts = self.starts or [self.start]
        self.seeds = self.seeds or [self.seed + i for i in range(5)]
        for name in ("variants", "methods", "starts", "schedules", "seeds", "steps"):
            setattr(self, name, list(dict.fromkeys(getattr(self, name))))  # each once
        self.variants = [variant for variant in self.variants if variant != CONTROL]
        # For checks of a single run; what can't begin with an untrained model must meet the one that says so.
        self.start = next((start for start in self.starts if start != "reset"), "reset")

    def check(self) -> None:
        if not self.variants:
            raise RecipeError("--variants names nothing to compare with the control")


def cells_of(config: Any) -> list[Cell]:
    """Seed after seed, each with its controls: what is finished of a stopped grid can be compared."""
    cells = []
    for seed in config.seeds:
        cells += [Cell(CONTROL, "", control_method(config), steps, seed, "") for steps in config.steps]
        axes = config.variants, config.starts, config.methods, config.steps, [seed], map(in_words, config.schedules)
        cells += [Cell(*kind) for kind in product(*axes)]
    return cells


def in_words(schedule: int) -> str:
    return {0: "norm after norm", 1: AT_ONCE}.get(schedule, f"in {schedule} parts")


def control_method(config: Any) -> str:
    """How the control is trained: on the task's loss (""), or, where no method uses labels, distilled from itself."""
    return "distil" if config.distil_weight == 1 and config.methods == ["distil"] else ""


def compare(run: Run) -> None:
    """Train what isn't trained yet, and report all that is, also when it is stopped."""
    c, cells = run.config, cells_of(run.config)
    check_schedule(run, c.variants, c.schedules)
    first = Baseline(run.task, c, c.seeds[0], c.variants)
    run.begin(FREE_TO_CHANGE | GRID)
    run.results["control_method"] = control_method(c)
    run.results["grid"] = [cell._asdict() for cell in cells]
    run.results["from_scratch"] = not first.steps and not c.model
    try:
        for seed in c.seeds:
            left = [cell for cell in cells if cell.seed == seed and cell.name not in run.results["stages"]]
            run.accelerator.print(f"seed {seed}: {len(left)} of {len(cells) // len(c.seeds)} models to train")
            if left:
                train_seed(run, first if seed == c.seeds[0] else Baseline(run.task, c, seed, []), left)
    finally:
        if any(cell.name in run.results["stages"] for cell in cells):
            run.report(compare_report, draw_reports)
    run.accelerator.end_training()


def train_seed(run: Run, baseline: Baseline, cells: list[Cell]) -> None:
    """A baseline, and all models that begin with it; each goes on in its data."""
    baseline.train(run, f"baseline-{baseline.seed}")
    for cell in cells:
        method = METHODS[cell.method or "finetune"](run.task, run.config, baseline.copy)
        schedule = {in_words(schedule): schedule for schedule in run.config.schedules}.get(cell.schedule, 1)
        build, changes = baseline.in_parts(cell.variant, schedule, cell.steps, cell.start)
        options = {"seed": cell.seed, "first": baseline.steps, "method": method, "changes": changes}
        try:
            run.stage(cell.name, build, cell.steps, **options)
        except DivergedError as error:  # a result as well
            run.accelerator.print(f"{cell.name}: {error}")
            run.results["stages"][cell.name] = {"name": cell.name, "failed": str(error).partition(": ")[0]}
            run.accelerator.free_memory()
            run.write_results()
        if not run.config.keep_models:  # only figures are
            shutil.rmtree(run.model_folder(cell.name), ignore_errors=True)


def main(argv: list[str] | None = None) -> int:
    return run_training("train_grid.py", argv, __doc__, compare, CompareConfig)


if __name__ == "__main__":
    sys.exit(main())
