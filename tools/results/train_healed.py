"""Bring a patched model back.

One model (by default a small GPT-2, trained on the spot), one patch. A copy is patched and repaired (`--start`), then
trained by a method (`--method`): on the task's loss, or by distillation from the unpatched model. An unpatched copy
gets the same budget: the control. Figures are measured before the patch, right after it, and in the end, and so is how
far each model agrees with the unpatched one.

    python tools/results/train_healed.py  # nothing to prepare, nothing downloaded
    python tools/results/train_healed.py --patch dyt --method distil
    python tools/results/train_healed.py --model gpt2 --text notes/*.txt --patch rms+rope --lora_rank 16
    python tools/results/train_healed.py --patch fixed --schedule 0  # norm after norm, while it is trained

In the output folder: results.md, results.json, curves.png; of the models: baseline (where it was trained), swapped,
healed and control. `--resume` goes on where a stopped run was, to the bit on one machine.
"""

import argparse
import os
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in recipes/finetune.py; read when torch is loaded
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import torch
from harness.report import draw_curves, heal_report
from harness.settings import NOT_NEGATIVE, option
from harness.start import Baseline, check_schedule, measure_copies
from harness.training import Run, run_training
from harness.ways import METHODS, Method, MethodConfig, agreement
from methods import CONTROL, request_of
from texts import RecipeError
from transformers import PreTrainedModel

SWAPPED, HEALED = "swapped", "healed"


@dataclass
class HealConfig(MethodConfig):
    """Flags of tools/results/train_healed.py besides training's and the task's."""

    patch: str = option(
        "rms+rope",
        "a norm, a position scheme, an MLP, or several joined by +, by registered name, with options as in "
        "dyt:alpha=0.8",
    )
    method: str = option("finetune", "how it is trained back", METHODS)
    schedule: int = option(
        1,
        "of a norm: parts in which norms change while the model is trained, from the first layers to the last, at "
        "equal distances; 0: norm after norm",
        NOT_NEGATIVE,
    )
    no_control: bool = option(
        False, "leave out the unpatched copy of equal budget; where distil uses no labels there is none"
    )
    output_dir: str = option("runs/heal", "where results, models and states go")
    variants: list[str] = option([], argparse.SUPPRESS)  # of the report: what there is to heal and its control

    def check(self) -> None:
        if self.method == "distil" and self.distil_weight == 1:
            self.no_control = True  # without labels there is nothing that an unpatched copy would learn
        if not request_of(self.patch):
            raise RecipeError(f"--patch {self.patch} patches nothing")
        if self.model is None and self.baseline_steps == 0:
            raise RecipeError("--baseline_steps 0 leaves a model from scratch untrained: there is nothing to heal")


def heal(run: Run) -> None:
    """A baseline, its unpatched copy, and its patched copy right after the patch and healed: each a stage."""
    c = run.config
    check_schedule(run, [c.patch], [c.schedule])
    baseline = Baseline(run.task, c, c.seed, [c.patch])
    method, plain = METHODS[c.method](run.task, c, baseline.copy), Method(run.task, c)
    c.variants = [HEALED] if c.no_control else [HEALED, CONTROL]  # as the report calls them
    run.begin()
    swapped = run.model_folder(SWAPPED)

    def swap() -> PreTrainedModel:
        model = baseline.patched(c.patch)
        model.save_pretrained(swapped)
        run.task.save_extras(swapped)
        return model

    baseline.train(run)
    run.stage(SWAPPED, swap, 0, seed=c.seed)
    options: dict[str, Any] = {"seed": c.seed, "first": baseline.steps}
    if not c.no_control:
        run.stage(CONTROL, baseline.copy, c.steps, method=plain, **options)
    build, changes = baseline.in_parts(c.patch, c.schedule, c.steps)
    if c.schedule == 1:
        build = partial(run.task.load, str(swapped))  # the same once more, without a second repair
    run.stage(HEALED, build, c.steps, method=method, changes=changes, **options)
    compare_with_teacher(run, baseline)
    measure_copies(run, baseline, [c.patch])
    run.report(heal_report, draw_curves)
    run.accelerator.end_training()


@torch.no_grad()
def compare_with_teacher(run: Run, baseline: Baseline) -> None:
    """results["agreement"]: how far each model agrees with the unpatched one, on the curve's held-out data."""
    found = run.results.setdefault("agreement", {})
    loader = run.loader(run.task.curve)
    for name in (SWAPPED, HEALED, CONTROL):
        if name in run.results["stages"] and name not in found:
            teacher, model = baseline.copy(), run.task.load(str(run.model_folder(name)))
            both = (one.eval().to(run.accelerator.device) for one in (teacher, model))
            found[name] = agreement(*both, run.task, loader, run.accelerator.gather_for_metrics)


def main(argv: list[str] | None = None) -> int:
    return run_training("train_healed.py", argv, __doc__, heal, HealConfig)


if __name__ == "__main__":
    sys.exit(main())
