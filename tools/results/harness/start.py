"""Models at the start of training: the unpatched one, and patched copies of it."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from accelerate.utils import set_seed
from methods import CONTROL, INIT, patched, request_of, switch_off_dropout
from texts import RecipeError
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from hfpatch.plan import plan_patch
from hfpatch.runtime.patch_errors import PatchError
from hfpatch.schemes.request import budget_in

from .tasks import Drawn, Task
from .training import Changes, Run


class Baseline:
    """The unpatched model, trained for `--baseline_steps`; every copy begins as it ended.

    Raises:
        RecipeError: the model doesn't fit the data.
        PatchError: a variant is refused; all are tried out on paper.
    """

    def __init__(self, task: Task, config: Any, seed: int, variants: list[str]) -> None:
        self.task, self.config, self.seed = task, config, seed
        default = 0 if config.model else task.from_scratch
        self.steps = default if config.baseline_steps is None else config.baseline_steps
        self.source = config.model
        set_seed(seed)
        self.model: PreTrainedModel | None = task.baseline()
        if config.model and not config.keep_dropout:
            switch_off_dropout(self.model)
        globs, budget = budget_in(tuple(config.keep))
        for variant, start in product(variants, getattr(config, "starts", [config.start])):
            if variant != CONTROL:
                if budget and start != "repaired":
                    raise RecipeError(f"--keep auto:{budget:g} measures on a repair's data: --start repaired")
                plan_patch(self.model, **request_of(variant), **INIT.get(start, {}), keep=globs)

    def train(self, run: Run, name: str = "baseline") -> None:
        model, self.model = self.model, None
        run.stage(name, lambda: model, self.steps, seed=self.seed, schedule="constant_with_warmup")
        if self.steps:
            self.source = str(run.model_folder(name))

    def copy(self) -> PreTrainedModel:
        if self.source:
            return self.task.load(self.source)
        set_seed(self.seed)  # never trained: the same weights once more
        return self.task.baseline()

    def in_parts(
        self, variant: str, schedule: int, steps: int, start: str | None = None
    ) -> tuple[Callable[[], PreTrainedModel], Changes]:
        """What makes a patched copy, and what changes the rest of it while it is trained for `steps`.

        Args:
            schedule: parts in which norms change, from the first layers to the last, at equal distances; 1: all at
                once; 0: norm after norm.
        """
        if schedule == 1:
            return partial(self.patched, variant, start), {}
        plan = plan_patch(self.copy(), **request_of(variant), keep=self.config.keep)
        norms = [row.module for row in plan.rows if row.kind == "norm" and row.action == "replace"]
        most = max(1, min(len(norms), steps))
        parts = [list(part) for part in np.array_split(norms, min(schedule or most, most))]
        starts = [steps * i // len(parts) for i in range(len(parts))]
        build, *changes = (partial(self.patched, variant, start, part) for part in parts)
        return build, dict(zip(starts[1:], changes, strict=True))

    def patched(
        self,
        variant: str,
        start: str | None = None,
        only: list[str] | None = None,
        model: PreTrainedModel | None = None,
    ) -> PreTrainedModel:
        """A copy, patched, and repaired where `start` says so: the settings', unless another one is given.

        Args:
            only: names of the modules that change; None for all.
            model: patched in place of a copy.
        """
        model, start, config = model or self.copy(), start or self.config.start, self.config
        calibration = []
        if start == "repaired":
            items = Drawn(self.task, self.seed, 0, config.calibration)
            batches = DataLoader(items, config.batch_size, collate_fn=self.task.collate)
            calibration = [self.task.inputs(batch) for batch in batches]
        return patched(model, variant, start, calibration, only=only, keep=config.keep)


def measure_copies(run: Run, baseline: Baseline, variants: list[str]) -> None:
    """results["copied"]: the held-out figures of patched copies without a repair, where training begins with one."""
    found, loader = run.results.setdefault("copied", {}), run.loader(run.task.heldout)
    for variant in variants if run.config.start == "repaired" else ():
        if variant != CONTROL and variant not in found:
            with suppress(PatchError):  # norm="fixed" takes no weights as they are
                set_seed(baseline.seed)  # as a stage does: what a patch draws doesn't depend on the models before it
                model = baseline.patched(variant, "copied")
                found[variant] = run.measure(model.to(run.accelerator.device), loader)
                run.write_results()


def check_schedule(run: Run, variants: list[str], schedules: list[int]) -> None:
    """Refuse norms that change while a model is trained, where they can't.

    Raises:
        RecipeError: a variant changes something else as well, or the optimizer can't follow.
    """
    if set(schedules) == {1}:
        return
    told = f"a schedule of {next(one for one in schedules if one != 1)} changes norms one after another"
    if other := [variant for variant in variants if set(request_of(variant)) != {"norm"}]:
        raise RecipeError(f"{told}: it takes a norm alone, not {other[0]}")
    for name in ("lora_rank", *(["keep"] if budget_in(tuple(run.config.keep))[1] else ())):
        if getattr(run.config, name):
            raise RecipeError(f"{told}, while the model is trained: leave out --{name}")
