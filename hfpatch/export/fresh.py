"""Script `fresh.py JOB ANSWER`: opens a checkpoint in a process that can't import hfpatch, and saves its outputs.

The job is a file that `remote.verify_remote` writes; the answer has the outputs of what was opened, and of what was
saved from there and opened again, or an error.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BLOCKED = "hfpatch"


class Blocker(MetaPathFinder):
    """Lets no import of hfpatch through."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname.partition(".")[0] == BLOCKED:
            raise ModuleNotFoundError(f"{fullname} must not be needed here.")


def outputs_of_checkpoint(job: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """Open the checkpoint, save what was opened and open that again; run both."""
    import transformers

    sys.path.append(str(Path(__file__).parents[1]))  # what measures outputs needs nothing else of the package
    from measure.outputs import outputs_of  # type: ignore[import-not-found]
    from measure.quiet_forward import fitting  # type: ignore[import-not-found]

    sys.path.pop()
    torch.set_num_threads(job["threads"])
    auto, found = getattr(transformers, job["auto"]), []
    for folder in (job["folder"], job["again"]):
        model = auto.from_pretrained(folder, trust_remote_code=True, **job["options"]).to(job["device"]).eval()
        if type(model).__name__ != job["class"] or not type(model).__module__.startswith("transformers_modules"):
            raise TypeError(f"{job['auto']} opens it as {type(model).__module__}.{type(model).__name__}")
        if folder == job["folder"]:
            model.save_pretrained(job["again"])
        for parameter in model.parameters():  # mapped from a file it may lie unaligned, which moves the last bit
            parameter.data = parameter.data.clone()
        torch.manual_seed(0)
        with torch.no_grad():
            found.append(outputs_of(model, fitting(model, job["inputs"])))
    return [{name: value.cpu() for name, value in outputs.items()} for outputs in found]


def main() -> None:
    """Read the job, write the answer."""
    sys.meta_path.insert(0, Blocker())
    job, written = sys.argv[1:]
    try:
        found: dict[str, Any] = {"outputs": outputs_of_checkpoint(torch.load(job, weights_only=True))}
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    torch.save(found, written)


if __name__ == "__main__":
    main()
