"""The output folder of a recipe: results.json, its report and, of training, saved states and trained models."""

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import get_int_from_env
from texts import RecipeError, refusing
from transformers import PreTrainedModel

from .report import environment
from .tasks import Task


class TrainingError(RuntimeError):
    """Training went wrong; the last good state is on disk."""


def read_results(path: Path) -> dict[str, Any]:
    """results.json of an earlier run."""
    with refusing(f"can't read a recipe's results from {path}; take another --output_dir, or remove it"):
        results = json.loads(path.read_text("utf-8"))
        return results | {"command": str(results["command"])}


def require_own_folder(recipe: str, folder: str) -> None:
    """Refuse an output folder with results that aren't the recipe's; its own are replaced, or gone on with."""
    path = Path(folder) / "results.json"
    if path.exists():
        command = read_results(path)["command"]
        if not command.startswith(f"python tools/results/{recipe}"):
            raise RecipeError(f"{folder} holds results of another recipe ({command}): take another --output_dir")


def write_json(path: Path, value: Any) -> None:
    """Replaced as a whole, never left half-written."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1), "utf-8")
    os.replace(partial, path)


class OutputFolder:
    """What a run leaves on disk, written whole: a run that is killed goes on from the state before.

    results.json has the records of finished models; of the one in training state/ has the newest state.
    """

    task: Task  # of a run that trains

    def __init__(self, config: Any, command: str, accelerator: Accelerator) -> None:
        if get_int_from_env(["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"], 1) > 1:
            raise RecipeError("what is published was made in one process: start it without a launcher")
        self.config, self.command, self.accelerator = config, command, accelerator
        self.out = Path(config.output_dir)
        self.started = time.perf_counter()

    # -- results

    def open_results(self, free_to_change: Collection[str] = (), **more: Any) -> dict[str, Any]:
        """Begin results.json, or with --resume take it up again: the same data, and the same settings but for some.

        Where another machine, or other versions, take it up, those before are in "earlier".

        Args:
            free_to_change: settings that may differ from those of the run that is taken up.
            more: what results hold besides the command, the settings and the machine.
        """
        config = {name: value for name, value in asdict(self.config).items() if name != "resume"}
        here = environment(self.accelerator)
        self.results = {"command": self.command, "config": config, **more, **here, "wall_seconds": 0.0}
        path = self.out / "results.json"
        if getattr(self.config, "resume", False) and path.exists():
            before = read_results(path)
            fixed = config.keys() - free_to_change
            changed = [name for name in config if name in fixed and before["config"].get(name) != config[name]]
            if before.get("data", {}).get("sha256") != more.get("data", {}).get("sha256"):
                changed.append("data (its content)")
            if changed:
                raise RecipeError(f"can't resume {self.out} with other settings: {', '.join(changed)} changed")
            there = {name: before[name] for name in here}
            earlier = before.get("earlier", []) + [there] * (there != here)
            self.results = before | {"command": self.command, "config": config, **here, "earlier": earlier}
            self.started -= before["wall_seconds"]
        else:
            shutil.rmtree(self.out / "state", ignore_errors=True)
        self.write_results()
        return self.results

    def write_results(self) -> None:
        self.results["wall_seconds"] = time.perf_counter() - self.started
        write_json(self.out / "results.json", self.results)

    def report(
        self, tell: Callable[[dict], str], draw: Callable[[dict, Path], Any], picture: str = "curves.png"
    ) -> None:
        """results.md and a drawing, and what a reader sees in the end."""
        self.write_results()
        text = tell(self.results)
        (self.out / "results.md").write_text(text, "utf-8")
        draw(self.results, self.out / picture)
        print(f"\n{text}\nin {self.out}: {', '.join(sorted(path.name for path in self.out.iterdir()))}")

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
        folder = self.out / "state" / f"{record['step']:07d}-{self.model_folder(name).name}"
        try:
            self.accelerator.save_state(str(folder))
            write_json(folder / "stage.json", record)
        except (OSError, RuntimeError) as error:  # torch and safetensors wrap a full disk in errors of their own
            shutil.rmtree(folder, ignore_errors=True)
            raise TrainingError(f"can't save after step {record['step']} of {name}: {error}") from None
        for other in folder.parent.iterdir():
            if other != folder:
                shutil.rmtree(other)
        self.write_results()

    # -- models

    def model_folder(self, name: str) -> Path:
        """Of a stage, whose name may hold what a folder's can't."""
        return self.out / re.sub(r"[^\w+.=,-]", "-", name)

    def finish(self, name: str, model: PreTrainedModel, record: dict[str, Any]) -> None:
        """Save a trained model and its record; its states go."""
        record["parameters"] = model.num_parameters()
        if record["step"]:
            folder = self.model_folder(name)
            model.save_pretrained(folder)
            self.task.save_extras(folder)
        self.results["stages"][name] = record
        self.write_results()
        shutil.rmtree(self.out / "state", ignore_errors=True)
