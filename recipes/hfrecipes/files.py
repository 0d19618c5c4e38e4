"""Files of an output folder: results.json, whole or not at all, and whose it is."""

import json
import os
import re
from pathlib import Path
from typing import Any

from .corpus import RecipeError, refusing


def folder_name(name: str) -> str:
    """A stage's name as a folder's."""
    return re.sub(r"[^\w+.=,-]", "-", name)


def read_results(path: Path) -> dict[str, Any]:
    """results.json of an earlier run.

    Raises:
        RecipeError: it isn't one.
    """
    with refusing(f"can't read a recipe's results from {path}; take another --output_dir, or remove it"):
        results = json.loads(path.read_text("utf-8"))
        return results | {"command": str(results["command"])}


def begin_results(folder: Path, fresh: dict[str, Any], resume: bool, free_to_change: set[str]) -> dict[str, Any]:
    """A run's results: fresh ones, or with `resume` those of the folder, with the settings of now.

    Args:
        fresh: with its config and data.
        free_to_change: settings that may differ from those of the run that is taken up.

    Raises:
        RecipeError: results.json can't be read, or says what has changed.
    """
    if not (resume and (folder / "results.json").exists()):
        return fresh
    before = read_results(folder / "results.json")
    settings = fresh["config"].items()
    changed = [name for name, value in settings if name not in free_to_change and before["config"].get(name) != value]
    if before["data"]["sha256"] != fresh["data"]["sha256"]:
        changed.append("data (its content)")
    if changed:
        raise RecipeError(f"can't resume {folder} with other settings: {', '.join(changed)} changed")
    return before | {"config": fresh["config"]}


def require_own_folder(recipe: str, folder: str) -> None:
    """Refuse an output folder with results that aren't the recipe's; its own are replaced, or gone on with.

    Raises:
        RecipeError: says whose they are.
    """
    path = Path(folder) / "results.json"
    if path.exists():
        command = read_results(path)["command"]
        if not command.startswith(f"python recipes/{recipe}"):
            raise RecipeError(f"{folder} holds results of another recipe ({command}): take another --output_dir")


def write_json(path: Path, value: Any) -> None:
    """Replaced as a whole, never left half-written."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1), "utf-8")
    os.replace(partial, path)
