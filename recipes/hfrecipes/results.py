"""The output folder of a recipe that trains: results.json, saved states to go on from, and trained models."""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from transformers import PreTrainedModel

from .command import TrainingError
from .files import begin_results, folder_name, write_json
from .report import environment
from .settings import FREE_TO_CHANGE
from .tasks import Task


class OutputFolder:
    """What a run leaves on disk, written whole: a run that is killed goes on from the state before.

    results.json has the records of finished models; of the one in training state/ has the newest state.
    """

    def __init__(self, config: Any, command: str, accelerator: Accelerator, task: Task) -> None:
        self.config, self.command, self.accelerator, self.task = config, command, accelerator, task
        self.out, self.main = Path(config.output_dir), accelerator.is_main_process
        self.started = time.perf_counter()

    # -- results

    def open_results(self, free_to_change: set[str] = FREE_TO_CHANGE) -> None:
        """Begin results.json, or with --resume take it up again.

        Args:
            free_to_change: settings that may differ from those of the run that is taken up.

        Raises:
            RecipeError: it can't be read, or other settings or data have changed.
        """
        fresh = {
            "command": self.command,
            "config": {name: value for name, value in asdict(self.config).items() if name != "resume"},
            "task": self.task.name,
            "main": self.task.main,
            "higher_is_better": self.task.higher_is_better,
            "data": self.task.data,
            **environment(self.accelerator),
            "wall_seconds": 0.0,
            "stages": {},
        }
        self.results = begin_results(self.out, fresh, self.config.resume, free_to_change)
        if self.results is fresh and self.main:
            shutil.rmtree(self.out / "state", ignore_errors=True)
        self.started -= self.results["wall_seconds"]
        self.write_results()

    def write_results(self) -> None:
        self.results["wall_seconds"] = time.perf_counter() - self.started
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

    # -- states

    def find_state(self, name: str) -> tuple[dict[str, Any], str | None]:
        """A stage's record and the folder of its newest state, or a new record and None."""
        for path in sorted(self.out.glob("state/*/stage.json"), reverse=True):
            record = json.loads(path.read_text("utf-8"))
            if record["name"] == name:
                return record, str(path.parent)
        return {"name": name, "step": 0, "train_loss": []}, None

    def save_state(self, name: str, record: dict[str, Any]) -> None:
        """A state counts once its stage.json is there, which is written last; then the older ones go."""
        folder = self.out / "state" / f"{record['step']:07d}-{folder_name(name)}"
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

    # -- models

    def finish(self, name: str, model: PreTrainedModel, record: dict[str, Any]) -> None:
        """Save a trained model and its record; its states go."""
        record["parameters"] = model.num_parameters()
        if record["step"]:
            self.save_model(model, self.out / folder_name(name))
        self.results["stages"][name] = record
        self.write_results()
        if self.main:
            shutil.rmtree(self.out / "state", ignore_errors=True)

    def save_model(self, model: PreTrainedModel, folder: Path) -> None:
        """A checkpoint like any other, also of a model that the processes hold in pieces."""
        in_pieces = self.accelerator.distributed_type == DistributedType.FSDP
        weights = self.accelerator.get_state_dict(model) if in_pieces else None  # all processes take part
        if self.main:
            model.save_pretrained(folder, state_dict=weights)
            self.task.save_extras(folder)
            if in_pieces:
                self.task.load(str(folder)).save_pretrained(folder)  # adds what is measured on a whole model
