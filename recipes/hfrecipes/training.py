"""One output folder of a recipe: trains models one after another, saves, stops and resumes."""

import json
import logging
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator, PartialState
from accelerate.utils import DataLoaderConfiguration, DistributedType, parse_flag_from_env, set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hfpatch.runtime.errors import PatchError

from .compiled import compiled, really_called
from .corpus import RecipeError
from .progress import Progress
from .report import hardware, versions
from .settings import FREE_TO_CHANGE, check, read_run
from .tasks import Batch, Figures, Task, find_task


class TrainingError(RuntimeError):
    """Training went wrong; the last good state is on disk."""


class DivergedError(TrainingError):
    """A loss or gradient isn't finite."""


class Stopped(Exception):  # noqa: N818
    """Stopped on request, with everything saved."""


class Requests(list[float]):
    """When it was asked to stop."""

    at_once = False

    @contextmanager
    def obeyed_at_once(self) -> Iterator[None]:
        """What lasts long and saves nothing is interrupted, not brought to its end."""
        self.at_once = True
        try:
            yield
        finally:
            self.at_once = False


@contextmanager
def stop_requests() -> Iterator[Requests]:
    """Collects Ctrl-C and SIGTERM, so that a step is never cut in two; Ctrl-C two seconds later interrupts at once."""
    received = Requests()

    def note(number: int, frame: Any) -> None:
        received.append(time.monotonic())
        if received.at_once or received[-1] - received[0] > 2:  # sooner, a launcher passes the first one on
            raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def shard_on_cpu() -> None:
    """FSDP on CPUs, where it is asked for: accelerate 1.15 would train whole copies there, without a word."""
    if parse_flag_from_env("ACCELERATE_USE_FSDP") and parse_flag_from_env("ACCELERATE_USE_CPU"):
        state = PartialState(cpu=True)
        if state.distributed_type == DistributedType.MULTI_CPU:
            state.distributed_type = (
                DistributedType.MULTI_GPU
            )  # as which it looks at the FSDP settings; the device stays


class Objective:
    """What training minimises: the task's own loss, unless a subclass says otherwise."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def loss(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Per item the summed loss, (B,), and the number of terms in it, (B,)."""
        return self.task.loss(model, batch)

    def finished(self, model: nn.Module) -> nn.Module:
        """The trained model as it is measured in the end, and saved."""
        return model


class Run:
    """What is trained, on what, and where it goes.

    `stage` is one model: built, measured, trained, measured again, saved. Finished stages are skipped by a run that
    is resumed, and a stage that was stopped goes on from its newest state.

    Raises:
        RecipeError: accelerate refuses the settings, or a batch can't be shared by the processes.
    """

    def __init__(self, config: Any, command: str) -> None:
        self.config, self.command = config, command
        self.out = Path(config.output_dir)
        self.started = time.perf_counter()
        self.steps_taken = 0
        self.requests = Requests()
        shard_on_cpu()
        try:
            self.accelerator = Accelerator(
                mixed_precision=config.mixed_precision,
                gradient_accumulation_steps=config.gradient_accumulation_steps,
                log_with=None if config.tracker == "none" else config.tracker,
                project_dir=self.out,
                dataloader_config=DataLoaderConfiguration(split_batches=True),  # a batch is shared, not multiplied
            )
        except ValueError as error:  # a precision that the device lacks, for one
            raise RecipeError(f"accelerate refuses: {error}") from None
        self.main = self.accelerator.is_main_process
        if config.batch_size % self.accelerator.num_processes:
            raise RecipeError(
                f"--batch_size {config.batch_size} can't be shared by {self.accelerator.num_processes} processes"
            )
        self.task = find_task(config.task)(config, self.accelerator, self.out)
        if config.tracker != "none":
            self.accelerator.init_trackers("logs", {k: str(v) for k, v in asdict(config).items()})

    # -- training and measuring

    def stage(
        self,
        name: str,
        build: Callable[[], transformers.PreTrainedModel],
        steps: int,
        *,
        seed: int,
        first: int = 0,
        schedule: str = "cosine",
        objective: Objective | None = None,
    ) -> dict[str, Any]:
        """Measure a model, train it, measure it again. Returns the stage's record.

        Args:
            first: the step of the data that it begins at.
            schedule: of the learning rate, one of transformers'.
        """
        if name in self.results["stages"]:
            self.accelerator.print(f"{name}: done before")
            return self.results["stages"][name]
        c, objective = self.config, objective or Objective(self.task)
        set_seed(seed)  # what a patch draws doesn't depend on the stages before it
        self.mark = time.perf_counter()
        with self.requests.obeyed_at_once():
            model = build()
        record, state = self.find_state(name)
        if c.gradient_checkpointing:
            if not model.supports_gradient_checkpointing:
                raise RecipeError(f"{type(model).__name__} doesn't support --gradient_checkpointing")
            old = model.gradient_checkpointing_enable  # older transformers' name
            getattr(model, "activation_checkpointing_enable", old)({"use_reentrant": False})
        items = c.batch_size * self.accelerator.gradient_accumulation_steps  # in a step
        left = 0 if record.get("stopped_early") else steps - record["step"]
        train_set = self.task.train_set(seed, (first + record["step"]) * items, left * items)
        optimizer = torch.optim.AdamW(self.task.parameter_groups(model, c.learning_rate, c.weight_decay))
        scheduler = transformers.get_scheduler(schedule, optimizer, c.warmup_steps, max(steps, 1))
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED:  # which asks before it sees a loader
            settings = self.accelerator.state.deepspeed_plugin.deepspeed_config
            settings["train_micro_batch_size_per_gpu"] = c.batch_size // self.accelerator.num_processes
            settings["gradient_clipping"] = c.max_grad_norm  # it clips itself, 0: not at all
        training = self.accelerator.prepare(model, optimizer, scheduler)
        model = training[0]
        heldout, self.curve_loader = self.loader(self.task.heldout), self.loader(self.task.curve)
        trained = self.accelerator.unwrap_model(model)
        with compiled(trained, c.compile):
            if state:
                self.accelerator.load_state(state)
            else:
                record["start"] = self.measure(model, heldout)
                record["curve"] = [{"step": 0, **self.measure(model, self.curve_loader)}]
            if left:
                self.train(name, *training, self.loader(train_set), objective, record, steps)
            if "best" in record:
                self.accelerator.load_state(str(self.best_folder(name)))
            final = objective.finished(trained)
            seen = model if final is trained else final
            record["end"] = self.measure(seen, heldout, model) if steps else record["start"]
        self.finish(name, final, record)
        self.accelerator.free_memory()
        return record

    def train(self, name, model, optimizer, scheduler, loader: DataLoader, objective: Objective, record, steps) -> None:
        """Steps of training up to `steps`, with points of the curve and saved states on the way."""
        c = self.config
        batches, units, times = iter(loader), 0, []
        with Progress(name, steps, record["step"], self.main) as bar:
            for step in range(record["step"] + 1, steps + 1):
                self.steps_taken += 1
                stop = bool(self.requests) or self.steps_taken == c.stop_after
                begun = time.perf_counter()
                where = f"step {step} of {name}"
                with really_called(model):
                    loss, seen, stop = self.train_step(where, model, optimizer, scheduler, batches, objective, stop)
                times.append(time.perf_counter() - begun)
                units += seen
                record["step"] = step
                record["train_loss"].append(loss)
                record[f"{self.task.unit}_per_second"] = rate = round(units / sum(times))
                record["step_seconds"] = statistics.median(times)  # what else runs on a machine hardly moves it
                self.accelerator.log({f"{name}/loss": loss, f"{name}/{self.task.unit}_per_second": rate}, step=step)
                if step in (1, 2, 5) or step % c.eval_every == 0 or step == steps:
                    record["curve"].append({"step": step, **self.measure(model, self.curve_loader)})
                    figure = record["curve"][-1][self.task.main]
                    self.accelerator.log({f"{name}/heldout_{self.task.main}": figure}, step=step)
                    record["stopped_early"] = self.out_of_patience(name, record)
                bar.step(step, f"loss {loss:.3f}, {rate:,} {self.task.unit}/s")
                last = step == steps or record.get("stopped_early", False)
                if stop or last or step % c.save_every == 0:
                    self.save_state(name, record)
                if stop:
                    raise Stopped(f"stopped after step {step} of {steps} of {name!r}; everything is saved")
                if last:
                    break

    def train_step(
        self, where: str, model, optimizer, scheduler, batches: Iterator, objective: Objective, stop: bool
    ) -> tuple[float, int, bool]:
        """One optimizer step. Returns the loss over all processes, the units seen, and whether to stop."""
        accelerator = self.accelerator
        model.train()
        total = torch.zeros((), device=accelerator.device)
        units = 0
        for _ in range(accelerator.gradient_accumulation_steps):
            batch = next(batches)
            units += self.task.size(batch) * accelerator.num_processes
            with accelerator.accumulate(model):
                sums, counts = objective.loss(model, batch)
                # Processes may hold unequal shares of what is averaged over, as of hidden tokens.
                terms = accelerator.reduce(counts.sum().detach().to(sums.dtype), "mean")
                loss = sums.sum() / terms
                accelerator.backward(loss)
                total += loss.detach() / accelerator.gradient_accumulation_steps
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), self.config.max_grad_norm or math.inf)
                    norm = float(norm or 0)  # DeepSpeed may have none
                    seen = accelerator.reduce(torch.stack([total, total.new_tensor(float(stop))]), "mean").tolist()
                    # fp16 meets infinite gradients now and then; its scaler skips such steps by itself.
                    if not math.isfinite(seen[0]) or (
                        accelerator.mixed_precision != "fp16" and not math.isfinite(norm)
                    ):
                        raise DivergedError(f"loss {seen[0]:g}, gradient norm {norm:g} in {where}")
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return seen[0], units, seen[1] > 0

    def loader(self, items: Dataset) -> DataLoader:
        # A generator of its own: opening a loader must not draw from the one that dropout uses.
        options = {"collate_fn": self.task.collate, "generator": torch.Generator()}
        return self.accelerator.prepare(DataLoader(items, batch_size=self.config.batch_size, **options))

    @torch.no_grad()
    def measure(self, model: nn.Module, loader: DataLoader, prepared: nn.Module | None = None) -> Figures:
        """The task's figures; of a model that isn't the `prepared` one in the precision in which that runs."""
        model.eval()
        own = prepared is None or model is prepared
        with really_called(model), nullcontext() if own else self.accelerator.autocast():
            model = model if own else model.to(self.accelerator.device)
            return self.task.figures(model, loader, self.accelerator.gather_for_metrics)

    def out_of_patience(self, name: str, record: dict[str, Any]) -> bool:
        """With --patience: keep the best state seen; True once the curve has gone too long without a better one."""
        if self.config.patience is None:
            return False
        figures = [point[self.task.main] for point in record["curve"][1:]]
        best = (max if self.task.higher_is_better else min)(figures)
        if figures.index(best) == len(figures) - 1:
            self.accelerator.save_state(str(self.best_folder(name)))
            record["best"] = record["curve"][-1]["step"]
        return len(figures) - 1 - figures.index(best) >= self.config.patience

    # -- what is kept on disk

    def open_results(self, free_to_change: set[str] = FREE_TO_CHANGE) -> None:
        """results.json, begun or taken up again; what it doesn't know of is stale.

        Args:
            free_to_change: settings that may differ from those of the run that is taken up.
        """
        settings = {k: v for k, v in asdict(self.config).items() if k != "resume"}
        path = self.out / "results.json"
        if self.config.resume and path.exists():
            self.results = read_results(path)
            new = {k: getattr(type(self.config), k, None) for k in settings}  # settings that came later: their defaults
            before = new | self.results["config"]
            changed = [k for k in settings if k not in free_to_change and before[k] != settings[k]]
            if self.results["data"]["sha256"] != self.task.data["sha256"]:
                changed.append("data (its content)")
            if changed:
                raise RecipeError(f"can't resume {self.out} with other settings: {', '.join(changed)} changed")
            self.results["config"] = settings
        else:
            if self.main:
                for stale in ("state", "best"):
                    shutil.rmtree(self.out / stale, ignore_errors=True)
            self.results = {
                "command": self.command,
                "config": settings,
                "task": self.task.name,
                "main": self.task.main,
                "higher_is_better": self.task.higher_is_better,
                "data": self.task.data,
                "hardware": hardware(self.accelerator),
                "versions": versions(),
                "wall_seconds": 0.0,
                "stages": {},
            }
        self.earlier = self.results["wall_seconds"]
        self.write_results()

    def write_results(self) -> None:
        self.results["wall_seconds"] = self.earlier + time.perf_counter() - self.started
        if self.main:
            write_json(self.out / "results.json", self.results)
        self.accelerator.wait_for_everyone()

    def report(self, tell: Callable[[dict], str], draw: Callable[[dict, Path], None], more: str) -> None:
        """results.md and curves.png, and what a reader sees in the end; `more` names what else is in the folder."""
        self.write_results()
        if self.main:
            text = tell(self.results)
            (self.out / "results.md").write_text(text, "utf-8")
            draw(self.results, self.out / "curves.png")
            print(f"\n{text}\nin {self.out}: results.md, results.json, curves.png, {more}")

    def find_state(self, name: str) -> tuple[dict[str, Any], str | None]:
        """The stage's record and the folder of its newest state, or a new record and None."""
        for path in sorted(self.out.glob("state/*/stage.json"), reverse=True):
            record = json.loads(path.read_text("utf-8"))
            if record["name"] == name:
                return record, str(path.parent)
        return {"name": name, "step": 0, "seconds": 0.0, "train_loss": []}, None

    def save_state(self, name: str, record: dict[str, Any]) -> None:
        """A state counts once its stage.json is there, which is written last; then the older ones go."""
        folder = self.out / "state" / f"{record['step']:07d}-{folder_name(name)}"
        self.count_seconds(record)
        try:
            self.accelerator.save_state(str(folder))
            self.accelerator.wait_for_everyone()
            if self.main:
                write_json(folder / "stage.json", record)
        except (OSError, RuntimeError) as error:  # torch and safetensors wrap a full disk in errors of their own
            if self.main:
                shutil.rmtree(folder, ignore_errors=True)
            raise TrainingError(f"can't save after step {record['step']} of {name}: {error}") from None
        if self.main:
            for other in folder.parent.iterdir():
                if other != folder:
                    shutil.rmtree(other)
        self.write_results()

    def best_folder(self, name: str) -> Path:
        return self.out / "best" / folder_name(name)

    def finish(self, name: str, model: transformers.PreTrainedModel, record: dict[str, Any]) -> None:
        self.count_seconds(record)
        record["parameters"] = model.num_parameters()
        if record["step"]:
            self.save_model(model, self.out / folder_name(name))
        self.results["stages"][name] = record
        self.write_results()
        if self.main:
            for done in (self.out / "state", self.best_folder(name)):
                shutil.rmtree(done, ignore_errors=True)

    def save_model(self, model: transformers.PreTrainedModel, folder: Path) -> None:
        """A checkpoint like any other, also of a model that the processes hold in pieces."""
        if self.accelerator.distributed_type == DistributedType.FSDP:
            whole = self.accelerator.get_state_dict(model)  # all processes take part
            if self.main:
                model.save_pretrained(folder, state_dict=whole)
        elif self.main:
            model.save_pretrained(folder)
        if self.main:
            self.task.save_extras(folder)
            if self.accelerator.distributed_type == DistributedType.FSDP:
                self.task.load(str(folder)).save_pretrained(folder)  # adds what is measured on a whole model

    def count_seconds(self, record: dict[str, Any]) -> None:
        now = time.perf_counter()
        record["seconds"], self.mark = record["seconds"] + now - self.mark, now


def folder_name(name: str) -> str:
    return re.sub(r"[^\w+.=,-]", "-", name)


def read_results(path: Path) -> dict[str, Any]:
    """results.json of an earlier run.

    Raises:
        RecipeError: it isn't one.
    """
    try:
        results = json.loads(path.read_text("utf-8"))
        if not {"config", "data", "stages"} <= set(results):
            raise ValueError("it isn't a recipe's")
    except (OSError, ValueError, TypeError) as error:
        raise RecipeError(f"can't read {path}: {error}; take another --output_dir, or remove it") from None
    return results


def require_own_folder(recipe: str, folder: str) -> None:
    """Refuse an output folder with results that aren't the recipe's; its own are replaced, or gone on with.

    Raises:
        RecipeError: says whose they are.
    """
    path = Path(folder) / "results.json"
    if not path.exists():
        return
    try:
        results = json.loads(path.read_text("utf-8"))
        words = shlex.split(results["command"].strip())
        theirs = Path(words[1]).name
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        told = f"can't read {path}: it isn't a recipe's ({type(error).__name__}: {error})"
        raise RecipeError(f"{told}; take another --output_dir, or remove it") from None
    if theirs != recipe:
        resumable = {"stages", "cells"} & set(results)
        go_on = f", or go on with {theirs} there: {shlex.join([*words, '--resume'])}" if resumable else ""
        raise RecipeError(f"{folder} holds results of {theirs}: take another --output_dir, or remove {path}{go_on}")


def write_json(path: Path, value: Any) -> None:
    """Replaced as a whole, never left half-written."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1), "utf-8")
    os.replace(partial, path)


def exit_status(recipe: str, argv: list[str], work: Callable[[str], int | None], resumable: bool = True) -> int:
    """Do a recipe's work, given its command. Returns `work`'s status, else 0; 2 (bad input) or 130 (stopped)."""
    command = ["python", f"recipes/{recipe}", *(a for a in argv if a != "--resume")]
    try:
        return work(shlex.join(command)) or 0
    except (RecipeError, PatchError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except (Stopped, KeyboardInterrupt) as stop:
        print(str(stop) or "interrupted", file=sys.stderr)
        if resumable:
            print(f"to go on: {shlex.join([*command, '--resume'])}", file=sys.stderr)
        return 130


def run_recipe(recipe: str, argv: list[str], about: str, work: Callable[[Run], None], *settings: type) -> int:
    """Read the settings, do the work. Returns the exit status: 0, 1 (training failed), 2 (bad input), 130 (stopped)."""
    transformers.logging.disable_progress_bar()
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)  # tied weights are saved once: as they should

    def train(command: str) -> int:
        config = read_run(argv, recipe, about, *settings)
        check(config)
        require_own_folder(recipe, config.output_dir)
        states = f"last good state, if any, is in {config.output_dir}/state"
        try:
            work(Run(config, command))
        except DivergedError as error:
            advice = (
                "start again with a lower --learning_rate; in the first step it is the model or the data that isn't"
            )
            print(f"{type(error).__name__}: {error}: {advice} sound. The {states}", file=sys.stderr)
            return 1
        except TrainingError as error:
            print(f"{type(error).__name__}: {error}; the {states}, and --resume goes on from it", file=sys.stderr)
            return 1
        return 0

    return exit_status(recipe, argv, train)
