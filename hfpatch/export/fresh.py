"""Opening a checkpoint in a process of its own, where hfpatch can't be imported: a script, `fresh.py JOB ANSWER`.

The job is a file that `remote.verify_remote` writes; the answer says how far outputs are from those that it holds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BLOCKED = "hfpatch"
_SKIPPED = ("past_key_values", "cache", "mems")  # what isn't made of tensors everywhere


class Blocker(MetaPathFinder):
    """Lets no import of hfpatch through."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname.partition(".")[0] == BLOCKED:
            raise ModuleNotFoundError(f"{fullname} must not be needed here.")


def outputs_of(model: Any, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """All floats that a forward returns, by path; caches aside. Random draws start from the same place each time."""
    torch.manual_seed(0)
    with torch.no_grad():
        return dict(_tensors("", model(**given)))


def _tensors(path: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(item, Tensor) or not str(key).endswith(_SKIPPED):
                yield from _tensors(f"{path}.{key}", item)
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from _tensors(f"{path}[{i}]", item)


def difference(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """The largest one of two models' outputs; infinite where they aren't of the same kind."""
    if (
        not a
        or a.keys() != b.keys()
        or any(a[name].shape != b[name].shape or a[name].dtype != b[name].dtype for name in a)
    ):
        return float("inf")
    found = [0.0]
    for name, x in a.items():
        y = b[name].to(x.device)
        differs = (x != y) & ~(x.isnan() & y.isnan())
        if differs.any():
            found.append(float((x[differs].double() - y[differs].double()).abs().nan_to_num(nan=float("inf")).max()))
    return max(found)


def answer(job: Mapping[str, Any]) -> dict[str, Any]:
    """Open the checkpoint, save what was opened and open that again; run both."""
    import transformers

    torch.set_num_threads(job["threads"])
    auto = getattr(transformers, job["auto"])
    differences = []
    for folder in (job["folder"], job["again"]):
        model = auto.from_pretrained(folder, trust_remote_code=True, **job["options"]).to(job["device"]).eval()
        if type(model).__name__ != job["class"] or not type(model).__module__.startswith("transformers_modules"):
            return {"error": f"{job['auto']} opens it as {type(model).__module__}.{type(model).__name__}"}
        if folder == job["folder"]:
            model.save_pretrained(job["again"])
        for parameter in model.parameters():  # mapped from a file it may lie unaligned, which moves the last bit
            parameter.data = parameter.data.clone()
        given = {name: x.to(job["device"]) if isinstance(x, Tensor) else x for name, x in job["inputs"].items()}
        differences.append(difference(job["outputs"], outputs_of(model, given)))
    return {"differences": differences}


def main() -> None:
    """Read the job, write the answer."""
    sys.meta_path.insert(0, Blocker())
    job, written = (Path(path) for path in sys.argv[1:])
    try:
        found = answer(torch.load(job, weights_only=True))
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    written.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
