"""Models at the start of training: the unpatched one, and patched copies of it."""

import warnings
from itertools import product
from typing import Any

from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from hfpatch.compile import compile_model, uncompile_model
from hfpatch.errors import NotPreservedWarning
from hfpatch.patch import patch_model
from hfpatch.plan import plan_patch

from .methods import switch_off_dropout
from .settings import CONTROL, parse_variant
from .tasks import Drawn, Task
from .training import Run

INIT = {"copied": {"init": "copy"}, "reset": {"init": "reset"}}  # patch_model's, where it isn't its default


class Baseline:
    """The unpatched model, trained for `--baseline_steps`; every copy begins as it ended.

    Raises:
        RecipeError: the model doesn't fit the data.
        PatchError: it repeats no block to compile, or a variant is refused; all are tried out on paper.
    """

    def __init__(self, task: Task, config: Any, seed: int, variants: list[str]) -> None:
        self.task, self.config, self.seed = task, config, seed
        self.steps = config.baseline_steps if config.baseline_steps is not None else 0 if config.model else 900
        self.source = config.model
        set_seed(seed)
        self.model: PreTrainedModel | None = task.baseline()
        if config.model and not config.keep_dropout:
            switch_off_dropout(self.model)
        if config.compile:
            uncompile_model(compile_model(self.model))  # refused before anything is trained
        for variant, start in product(variants, getattr(config, "starts", [config.start])):
            if variant != CONTROL:
                plan_patch(self.model, **parse_variant(variant), **INIT.get(start, {}))

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
        if variant == CONTROL:
            return model
        options: dict[str, Any] = {**parse_variant(variant), **INIT.get(start, {}), "only": only}
        if start == "repaired":
            items = Drawn(self.task, self.seed, 0, config.calibration)
            batches = DataLoader(items, config.batch_size, collate_fn=self.task.collate)
            options["calibration"] = [self.task.inputs(batch) for batch in batches]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotPreservedWarning)  # what isn't preserved is what the table shows
            return patch_model(model, **options)
