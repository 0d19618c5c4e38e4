"""Twins: small random float64 models of a model's class, on which its properties are measured fast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from ..runtime.edits import pattern_of
from ..runtime.patch_errors import CheckpointError, UnsupportedError
from .copies import copy_of
from .float64_forward import host_errors, outputs_in_float64
from .inputs import example_inputs as make_example_inputs
from .quiet_forward import cast, default_device
from .randomness import randomise, seed_deterministically

_SPREAD = 2.0  # of a matrix, times the root of its smaller side: products keep their input's scale or increase it


def twin(
    model: nn.Module, example_inputs: Mapping[str, Any] | None = None, seed: int = 0
) -> tuple[nn.Module, dict[str, Any]]:
    """Return a small random float64 model of the same class on the CPU, and inputs for its forward.

    Candidates are the config with few narrow layers, the config with few layers, and a copy of the model. The first is
    taken that runs and has the same modules and Parameters, tied in the same way (names with `*` for every number).

    Args:
        model: isn't changed; may be on any device, and on "meta" if a small candidate will do.
        example_inputs: keyword arguments of one forward, if they can't be generated. They fit the model's own widths,
            so narrow layers aren't tried.
        seed: seed of weights and inputs; all global generators are left as they were.

    Raises:
        UnsupportedError: no candidate runs, or none is built like the model.
    """
    structure, failures = _structure(model), []
    for what, size in _candidates(model, example_inputs is None):
        try:
            with seed_deterministically(seed), default_device(torch.device("cpu")), torch.no_grad():
                with host_errors():
                    small = copy_of(model, size=size, dtype=torch.float64, device="cpu")
                _draw(small, seed)
                found = make_example_inputs(small, seed) if example_inputs is None else dict(example_inputs)
                inputs = cast(found, torch.device("cpu"), torch.float64)
                reason = _difference(structure, _structure(small))
                if reason is None:
                    outputs = outputs_in_float64(small, inputs)
                    odd = next((name for name, value in outputs.items() if value.isnan().any()), None)
                    reason = "it returns no tensors" if not outputs else odd and f"its {odd} isn't a number"
        except (UnsupportedError, CheckpointError) as error:
            reason = str(error)  # classes may not support the small config; the record may name layers that are missing
        if reason is None:
            return small, inputs
        failures.append(f"{what}: {reason}")
    raise UnsupportedError(
        f"no small model like this {type(model).__name__} could be made and run ({'; '.join(failures)}). "
        "Pass example_inputs={...}, the keyword arguments of one forward, with the model's weights loaded."
    )


def _candidates(model: nn.Module, narrow: bool) -> Iterator[tuple[str, Any]]:
    """Sizes of copies to try, with words for each."""
    if isinstance(getattr(model, "config", None), PreTrainedConfig):
        if narrow:
            yield "made small", "small"
        yield "with few layers", "shallow"
    if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        yield "itself", "same"


def _structure(model: nn.Module) -> dict[str, set[Any]]:
    """Structure of a model regardless of its sizes: patterns of module names with classes, and tied Parameters."""
    shared: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), []).append(pattern_of(name))
    classes = {(pattern_of(name), f"{type(m).__module__}.{type(m).__qualname__}") for name, m in model.named_modules()}
    return {
        "modules": {name for name, _ in classes},
        "classes": classes,
        "parameters": {name for names in shared.values() for name in names},
        "tied parameters": {frozenset(names) for names in shared.values() if len(names) > 1},
    }


def _difference(structure: dict[str, set[Any]], other: dict[str, set[Any]]) -> str | None:
    """The difference of two structures, for a message; None if they are the same."""
    for what, parts in structure.items():
        if odd := sorted(map(str, parts ^ other[what])):
            return f"its {what} differ, as in {odd[0]}"
    return None


def _draw(model: nn.Module, seed: int) -> None:
    """Weights of a wide spread, whose means over any axis aren't zero."""
    generator = torch.Generator().manual_seed(seed)
    randomise(model, generator)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.numel() == 1 and parameter.is_floating_point() and float(parameter) == 0.0:
                parameter.fill_(0.5)  # a gate that starts closed would hide its branch
            if parameter.dim() > 1 and parameter.numel() > 1 and parameter.is_floating_point():
                spread = float(parameter.std())
                least = _SPREAD / min(parameter.shape[-2:]) ** 0.5
                if 0 < spread < least and not isinstance(module, nn.modules.conv._ConvNd):
                    parameter.mul_(least / spread)
                kind = type(module)
                is_layer = kind.__module__.startswith("torch.nn.modules") or kind.__name__ == "Conv1D"
                if isinstance(module, nn.Embedding) or not is_layer:
                    parameter.add_(0.3 * float(parameter.std()))
