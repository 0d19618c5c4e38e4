"""Remote export: a checkpoint that opens with `trust_remote_code=True` if hfpatch isn't installed.

The files of hfpatch/runtime lie beside the weights, byte for byte, and a modeling file that names the model's classes:
the code that hfpatch itself runs and tests. The edits are in config.json.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device  # type: ignore[import-untyped]
from torch import nn
from transformers import PreTrainedModel

from ..checkpoint.remote_code import classes_by_auto_class
from ..core.bare import has_weights, require_bare, require_unquantized
from ..core.staging import temporary_files
from ..errors import VerificationError
from ..measure.inputs import example_inputs as random_inputs
from ..measure.outputs import Outputs, max_error, without_padding
from ..measure.quiet_forward import cast_for_model, device_of, inference_state
from ..runtime.patch_errors import UnsupportedError
from . import fresh_process

_TIMEOUT = 1800  # seconds for the other process


def write_remote(
    model: PreTrainedModel,
    folder: Path,
    verify: bool = True,
    example_inputs: Mapping[str, Any] | None = None,
    **save_options: Any,
) -> None:
    """Save a patched model so that it opens without hfpatch, by `from_pretrained(folder, trust_remote_code=True)`.

    The folder gets what `save_pretrained` writes, the runtime's files, `modeling_hfpatch.py` and, in config.json, an
    `auto_map` of the classes of every head of the family. A process without hfpatch and without
    `trust_remote_code=True` refuses the checkpoint. If hfpatch is imported, it opens the checkpoint itself, whatever
    `trust_remote_code` is, and runs nothing of the file.

    Args:
        model: a patched model, not wrapped, with its weights. It isn't changed.
        folder: an empty folder.
        verify, example_inputs, save_options: as in `export_model`.

    Raises:
        UnsupportedError: the model isn't patched, or a file of torch and transformers alone can't build it.
        VerificationError: the checkpoint doesn't open, or not as the same function.
    """
    require_bare(model)
    require_unquantized(model)
    if not has_weights(model):
        raise UnsupportedError(f"{type(model).__name__} has no weights yet (meta device). Load it first.")
    auto = next(iter(classes_by_auto_class(model)))
    model.save_pretrained(folder, remote_code=True, **save_options)
    if verify:
        verify_remote(model, folder, auto, example_inputs)


def verify_remote(
    model: PreTrainedModel, folder: Path, auto: str, example_inputs: Mapping[str, Any] | None = None
) -> None:
    """Open a checkpoint in a process that can't import hfpatch, and compare it with the model.

    Raises:
        VerificationError: the checkpoint doesn't open, or gives other outputs.
    """
    kind = type(model).__name__
    inputs = cast_for_model(model, random_inputs(model) if example_inputs is None else example_inputs)
    with inference_state(model):
        torch.manual_seed(0)
        returned = _call_with_aligned_weights(model)(**inputs)
    outputs = without_padding(Outputs.of(returned).floats, model, inputs)
    answer = run_job(model, folder, {"auto": auto, "class": kind, "inputs": send_to_device(inputs, "cpu")})
    if "error" in answer:
        why = answer["error"].strip().rstrip(".")
        raise VerificationError(f"{kind}: the export doesn't open in another process: {why}. It was deleted.", why)
    if error := max_error(outputs, answer["outputs"]):
        raise VerificationError(
            f"{kind}: opened in another process, the export's outputs differ by {error:.3g} of their size. It was "
            "deleted.",
            f"{error:.3g}",
        )


def run_job(model: Any, folder: Path, job: Mapping[str, Any]) -> dict[str, Any]:
    """Run `fresh_process.py` in a subprocess on a folder and return its answer."""
    chosen = getattr(model.config, "_attn_implementation", None)
    attention = {} if chosen in (None, "sdpa") else {"attn_implementation": chosen}  # sdpa is the default
    how = {
        "device": str(device_of(model)),
        "options": {"dtype": model.dtype, **attention},
        "threads": torch.get_num_threads(),
    }
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        with temporary_files(scratch):
            torch.save({**job, **how, "folder": str(folder.resolve())}, scratch / "job.pt")
        answer = scratch / "answer.pt"
        script = Path(fresh_process.__file__).resolve()
        command = [sys.executable, "-P", str(script), str(scratch / "job.pt"), str(answer)]
        options: dict[str, Any] = {"env": env | {"HF_MODULES_CACHE": f"{name}/modules"}, "cwd": name}
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT, **options)
        except subprocess.TimeoutExpired:
            return {"error": f"it took more than {_TIMEOUT} seconds"}
        if answer.exists():
            return torch.load(answer, weights_only=True)
    return {"error": (done.stderr.strip().splitlines() or [f"the process ended with {done.returncode}"])[-1]}


def _call_with_aligned_weights(model: nn.Module) -> Any:
    """The model, called with aligned copies of weights that lie unaligned in memory, which moves the last bit."""
    moved = {name: p.detach().clone() for name, p in model.named_parameters() if p.data_ptr() % 64}
    if not moved:
        return model
    return lambda **inputs: torch.func.functional_call(model, moved, kwargs=inputs)
