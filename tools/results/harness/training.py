"""The training loop: one model after another, each measured, trained, measured again and saved.

What is minimised is a `Method` (methods.py); what is learnt, from what data, is a `Task` (tasks.py).

    run = Run(config, command)
    run.begin()
    run.stage("model", build, steps=150, seed=0)        # build() returns a PreTrainedModel
"""

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import set_seed
from texts import refusing
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hfpatch.measure.quiet_forward import free_unused_memory

from .command import DivergedError, Stopped, progress, run_recipe, stop_requests
from .results import OutputFolder
from .settings import FREE_TO_CHANGE, read_run
from .tasks import Drawn, Figures, find_task
from .ways import Method

# Steps; the one after gets new pages, so it takes longer. Of windows of 2,048 tokens beside queries of any length,
# three at a time, a process grew from 2.3 to 4.1 GB in 27 steps; freed after every third, it stayed below 2.5 GB.
FREE_MEMORY_EVERY = 10

Changes = dict[int, Callable[[nn.Module], object]]


class Run(OutputFolder):
    """What is trained, on what, and where it goes.

    `stage` is one model. Finished stages are skipped by a run that is resumed, and a stage that was stopped goes on
    from its newest state.
    """

    def __init__(self, config: Any, command: str) -> None:
        super().__init__(config, command, make_accelerator(config))
        self.task = find_task(config.task)(config, self.accelerator, self.out)
        self.steps_taken = 0
        self.requests: list[float] = []  # times at which it was asked to stop

    def begin(self, free_to_change: set[str] = FREE_TO_CHANGE) -> None:
        """Begin results.json, or take it up again."""
        told = {name: getattr(self.task, name) for name in ("main", "higher_is_better", "data")}
        self.open_results(free_to_change, task=self.task.name, **told, stages={})

    def stage(
        self,
        name: str,
        build: Callable[[], transformers.PreTrainedModel],
        steps: int,
        *,
        seed: int,
        first: int = 0,
        schedule: str = "cosine",
        method: Method | None = None,
        changes: Changes | None = None,
    ) -> dict[str, Any]:
        """Measure a model, train it, measure it again. Returns the stage's record.

        Args:
            first: the step of the data that it begins at.
            schedule: of the learning rate, one of transformers'.
            method: makes of the model what is trained, and says by which loss; none: as it is, by the task's own.
            changes: what changes the model in place while it is trained, by the number of steps before it.
        """
        if name in self.results["stages"]:
            self.accelerator.print(f"{name}: done before")
            return self.results["stages"][name]
        c, accelerator, method, changes = self.config, self.accelerator, method or Method(self.task), changes or {}
        set_seed(seed)  # what a patch draws doesn't depend on the stages before it
        begun = time.perf_counter()
        model = method.prepare(build())
        record, state = self.find_state(name)
        record.setdefault("made_in_seconds", time.perf_counter() - begun)
        for step in (step for step in changes if step < record["step"]):
            changes[step](model)  # so that the state fits, whose weights replace these
        optimizer = torch.optim.AdamW(self.task.parameter_groups(model, c.learning_rate, c.weight_decay))
        scheduler = transformers.get_scheduler(schedule, optimizer, c.warmup_steps, max(steps, 1))
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        heldout, curve = self.loader(self.task.heldout), self.loader(self.task.curve)
        trained = accelerator.unwrap_model(model)
        if state:
            accelerator.load_state(state)
        else:
            record["start"] = self.measure(model, heldout)
            record["curve"] = [{"step": 0, **self.measure(model, curve)}]
        if left := steps - record["step"]:
            # Items are a function of (seed, index): going on is beginning at another index.
            train_set = Drawn(self.task, seed, (first + record["step"]) * c.batch_size, left * c.batch_size)
            batches = iter(self.loader(train_set))
            self.train(name, model, optimizer, scheduler, batches, method, record, steps, curve, changes)
        record["end"] = self.measure(model, heldout) if steps else record["start"]
        self.finish(name, method.finished(trained), record)
        accelerator.free_memory()
        return record

    def train(
        self, name: str, model, optimizer, scheduler, batches: Iterator, method: Method, record, steps, curve, changes
    ) -> None:
        """Steps of training up to `steps`, with points of the curve and saved states on the way."""
        c, unit = self.config, self.task.unit
        units, times = 0, []
        with stop_requests(self.requests), progress(name, steps, record["step"]) as bar:
            for step in range(record["step"] + 1, steps + 1):
                if step - 1 in changes:
                    changes[step - 1](model)
                    self.follow(model, optimizer)
                begun = time.perf_counter()
                where = f"step {step} of {name}"
                loss, seen = self.train_step(where, model, optimizer, scheduler, batches, method)
                if step % FREE_MEMORY_EVERY == 0:
                    free_unused_memory()
                times.append(time.perf_counter() - begun)
                units += seen
                rate = round(units / sum(times))
                record["step"] = step
                record["train_loss"].append(loss)
                record[f"{unit}_per_second"] = rate
                record["step_seconds"] = statistics.median(times)  # what else runs on a machine hardly moves it
                if step in (1, 2, 5) or step % c.eval_every == 0 or step == steps:
                    point = self.measure(model, curve)
                    record["curve"].append({"step": step, **point})
                bar.set_postfix_str(f"loss {loss:.3f}, {rate:,} {unit}/s", refresh=False)
                bar.update()
                stop = self.stop_requested()
                if stop or step == steps or step % c.save_every == 0:
                    self.save_state(name, record)
                if stop:
                    raise Stopped(f"stopped after step {step} of {steps} of {name!r}; everything is saved")

    def train_step(
        self, where: str, model, optimizer, scheduler, batches: Iterator, method: Method
    ) -> tuple[float, int]:
        """One optimizer step. Returns the loss, and the units seen."""
        accelerator = self.accelerator
        model.train()
        self.steps_taken += 1
        batch = next(batches)
        sums, counts = method.loss(model, batch)
        loss = sums.sum() / counts.sum()
        accelerator.backward(loss)
        norm = float(accelerator.clip_grad_norm_(model.parameters(), self.config.max_grad_norm or math.inf))
        scaled = accelerator.mixed_precision == "fp16"  # its scaler skips steps of infinite gradients
        if not (math.isfinite(loss) and (scaled or math.isfinite(norm))):
            raise DivergedError(f"loss {loss:g}, gradient norm {norm:g} in {where}")
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss.item(), self.task.size(batch)

    def follow(self, model, optimizer) -> None:
        """Give an optimizer the Parameters that a model has now; what it knows of those that stayed is kept."""
        groups = self.task.parameter_groups(model, self.config.learning_rate, self.config.weight_decay)
        for group, new in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = new["params"]
        kept = {parameter for group in groups for parameter in group["params"]}
        for parameter in optimizer.state.keys() - kept:
            del optimizer.state[parameter]

    def loader(self, items: Dataset) -> DataLoader:
        # A generator of its own: opening a loader must not draw from the one that dropout uses.
        options = {"collate_fn": self.task.collate, "generator": torch.Generator()}
        return self.accelerator.prepare(DataLoader(items, batch_size=self.config.batch_size, **options))

    @torch.no_grad()
    def measure(self, model: nn.Module, loader: DataLoader) -> Figures:
        """The task's figures of a model."""
        return self.task.figures(model.eval(), loader, self.accelerator.gather_for_metrics)

    def stop_requested(self) -> bool:
        """Whether it was asked to stop, or has taken as many steps as --stop_after allows."""
        return bool(self.requests) or self.steps_taken == self.config.stop_after


def run_training(recipe: str, argv: list[str] | None, about: str, work: Callable[[Run], None], *more: type) -> int:
    """`run_recipe` for one that trains, whose own settings are `more`. Returns the exit status."""
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()  # which weights are new is said in fewer words, or refused
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)  # tied weights are saved once: as they should
    read = partial(read_run, more=more)
    return run_recipe(recipe, argv, about, read, lambda config, command: work(Run(config, command)))


def make_accelerator(config: Any) -> Accelerator:
    """With the precision that a run asks for."""
    with refusing("accelerate refuses"):  # a precision that the device lacks, for one
        return Accelerator(mixed_precision=config.mixed_precision)
