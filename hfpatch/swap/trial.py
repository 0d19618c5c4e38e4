"""Tries a model whose positions were changed: it runs at its full length and image size, and its outputs moved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core.plan_table import Change
from ..measure.copies import copy_of
from ..measure.inputs import example_inputs, inputs_of_every_part
from ..measure.snapshot import attempt
from ..runtime.classes import is_unlimited
from ..runtime.errors import UnsupportedError, described
from .config_diff import Setting
from .full_length import fitted, full_inputs, last_positions


def require_runs_in_full(model: Any, original: Any, settings: list[Setting], given: Mapping[str, Any] | None) -> bool:
    """Refuse a model that doesn't run at its full length and image size (`full_length.py` says how long that is).

    Args:
        model: after a patch.
        original: a copy from before, the control: inputs that are made in the same way for its own length run in it.
        settings: what changed in the config: (config as it was, attribute, new value).
        given: the user's inputs for the original, if there are any.

    Returns:
        Whether it ran; False if no inputs could be made that the original takes either.

    Raises:
        UnsupportedError: it doesn't run.
    """
    for make in (inputs_of_every_part, example_inputs):  # text alone, if images can't be made for the original either
        full = attempt(model, lambda make=make: full_inputs(model, make)[0])  # type: ignore[misc]
        if not isinstance(full, Exception):
            break
        if not isinstance(attempt(original, lambda make=make: full_inputs(original, make)[0]), Exception):  # type: ignore[misc]
            raise _refusal(model, settings, full) from full
    if isinstance(full, Exception):
        if given is None:
            return False
        full = attempt(model, lambda: fitted(given, model, settings))
        return not isinstance(full, Exception)
    last = attempt(model, lambda: _positions(model, 0))
    if isinstance(last, Exception) and not isinstance(attempt(model, lambda: _positions(model, 1)), Exception):
        raise _refusal(model, settings, last) from last
    return True


def _positions(model: Any, which: int) -> dict[str, Any] | None:
    both = last_positions(model)
    return None if both is None else both[which]


def _refusal(model: Any, settings: list[Setting], error: Exception) -> UnsupportedError:
    changed = ", ".join(f"{name}={value}" for _, name, value in settings if not isinstance(value, dict))
    usual = "on longer inputs than before" if is_unlimited(model) else "at its full length"
    return UnsupportedError(
        f"{type(model).__name__} doesn't run {f'with {changed}' if changed else usual} after this patch: "
        f"{described(error).rstrip('.')}. The model was left unchanged."
    )


def require_moved(model: Any, original: Any, changes: Iterable[Change], what: str) -> None:
    """Refuse a change of positions after which all outputs are, bit for bit, those of before.

    A few tokens say nothing: some rules change positions beyond the original length alone. Nor do forwards that don't
    reach what was changed: shaking its outputs has to move those of the model.

    Args:
        model: after a patch.
        original: a copy from before.
        changes: of positions, lossy ones.
        what: the request, for the message.

    Raises:
        UnsupportedError: nothing moved.
    """
    try:
        (inputs, whole), last = full_inputs(model), last_positions(model)
    except UnsupportedError:
        return
    probes = [inputs] if last is None else [inputs, last[0]]
    if not whole and last is None:
        return
    names = {change.row.module for change in changes if change.changes and change.row.loss}
    reached = False
    for probe in probes:
        before, after = (attempt(one, partial(dict, probe)) for one in (original, model))
        if isinstance(before, Exception) or isinstance(after, Exception) or not equal(before, after):
            return
        other = attempt(_shaken(copy_of(model, share=True), names), partial(dict, probe))
        reached = reached or (not isinstance(other, Exception) and not equal(after, other))
    if reached:
        raise UnsupportedError(
            f"{type(model).__name__}: {what} would change nothing: with it all outputs are what they were, to the bit, "
            "at the model's full length. The model was left unchanged."
        )


def equal(outputs: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    """Return whether the outputs of two forwards are the same, to the bit."""
    same = outputs.keys() == others.keys()
    return same and all(torch.equal(value, others[name]) for name, value in outputs.items())


def _shaken(model: Any, names: set[str]) -> Any:
    """Return a model, the same one, in which the outputs of some modules are off by up to a tenth."""

    def shake(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple | list):
            return type(output)(shake(module, args, one) for one in output)
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        return output * (1 + 0.1 * torch.rand_like(output))

    for name, module in model.named_modules():
        if name in names or name in {one.rpartition(".")[0] for one in names}:  # a type of its layers, or its table
            shake.__module__ = "torch"  # `quiet` leaves out a user's hooks
            module.register_forward_hook(shake)
    return model
