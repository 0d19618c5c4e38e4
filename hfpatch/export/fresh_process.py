"""Script `fresh_process.py JOB ANSWER`: opens a checkpoint in a process without hfpatch, and saves its outputs.

The job is a file that `remote.run_job` writes; the answer has the opened model's outputs, or an error.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Mapping
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BLOCKED = "hfpatch"
_HOME = "transformers_modules."  # package of code that lies beside weights
_FILES = "files_of_hfpatch"  # a package of its files, without its __init__.py


class Blocker(MetaPathFinder):
    """Import hook that blocks hfpatch."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname.partition(".")[0] == BLOCKED:
            raise ModuleNotFoundError(f"{fullname} must not be needed here.")


def import_file(name: str) -> Any:
    """Import a file of this package ("measure.outputs") without the package: measuring needs little of it."""
    package = types.ModuleType(_FILES)
    package.__path__ = [str(Path(__file__).parents[1])]
    sys.modules.setdefault(_FILES, package)
    return importlib.import_module(f"{_FILES}.{name}")


def outputs_of_checkpoint(job: Mapping[str, Any]) -> dict[str, Tensor]:
    """Open the checkpoint by an Auto class, and run it."""
    import transformers

    measured, quiet_forward = import_file("measure.outputs"), import_file("measure.quiet_forward")
    torch.set_num_threads(job["threads"])
    auto = getattr(transformers, job["auto"])
    model = auto.from_pretrained(job["folder"], trust_remote_code=True, **job["options"]).to(job["device"]).eval()
    cls = type(model)
    if cls.__name__ != job["class"] or not cls.__module__.startswith(_HOME):
        raise TypeError(f"it opens as {cls.__module__}.{cls.__name__}")
    for parameter in model.parameters():  # mapped weights may lie unaligned, which moves the last bit
        parameter.data = parameter.data.clone()
    torch.manual_seed(0)
    with torch.no_grad():
        outputs = measured.outputs_of(model, quiet_forward.cast_for_model(model, job["inputs"]))
    return {name: value.cpu() for name, value in outputs.items()}


def main() -> None:
    """Read the job, write the answer."""
    path, written = sys.argv[1:]
    try:
        job = torch.load(path, weights_only=True)
        sys.meta_path.insert(0, Blocker())
        found: dict[str, Any] = {"outputs": outputs_of_checkpoint(job)}
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    torch.save(found, written)


if __name__ == "__main__":
    main()
