"""What a report of a problem should say of its surroundings: versions, devices, plug-ins; no names, paths or tokens."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, entry_points, version

import torch

from .registry import MLPS, NORMS, POSITIONS
from .results import Table

_PACKAGES = (
    *("torch", "transformers", "accelerate", "huggingface_hub", "safetensors", "tokenizers"),
    *("peft", "trl", "datasets", "sentence-transformers", "numpy"),
)


def environment() -> str:
    """The surroundings as a table in plain text, to be pasted into an issue."""
    return str(Table([("what", "found"), *_rows()]))


def _rows() -> Iterator[tuple[str, str]]:
    yield "hfpatch", sys.modules["hfpatch"].__version__
    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    for package in _PACKAGES:
        yield package, _version(package)
    yield "platform", f"{platform.system()} {platform.release()}, {platform.machine()}"
    yield "CPU", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads of torch"
    yield from _devices()
    yield from _plugins()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _devices() -> Iterator[tuple[str, str]]:
    for i in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(i)
        yield f"GPU {i}", f"{device.name}, {device.total_memory / 2**30:.0f} GiB, CUDA or ROCm of torch"
    if not torch.cuda.is_available():
        yield "GPU", "MPS" if torch.backends.mps.is_available() else "none that torch can use"


def _plugins() -> Iterator[tuple[str, str]]:
    """Schemes of other packages, each imported once: the first error that is said of a plug-in is why it fails."""
    found = False
    for registry in (NORMS, POSITIONS, MLPS):
        for point in entry_points(group=f"hfpatch.{registry.kind}s"):
            package = point.dist.metadata["Name"] if point.dist else "an unknown package"
            try:
                point.load()
                state = "imports"
            except Exception as error:  # whatever another package raises; its message may hold paths
                state = f"fails: {type(error).__name__}"
            yield f"{registry.kind} {point.name}", f"{package} {_version(package)}, {state}"
            found = True
    if not found:
        yield "plug-ins", "none"
