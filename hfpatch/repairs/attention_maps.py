"""Fits an attention's queries and keys to the original's attention maps after a change of positions.

Constant vectors b_q, b_k under a rotation give b_q' R(m - n) b_k, a profile over distances: biases alone can draw the
average map that a table of positions drew; weights fit the rest. The fit minimises KL(original map || present map),
averaged over heads and over queries that aren't padding, by Adam on the module's own forward, whatever its layout.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from accelerate.utils import recursively_apply  # type: ignore[import-untyped]
from torch import Tensor, nn
from transformers import Cache
from transformers.pytorch_utils import Conv1D

from ..measure.copies import copy_of
from ..measure.quiet_forward import CallArguments, first_tensor, use_attention
from ..sites.linear_maps import is_linear_map
from .repair_report import FittedValues

STEPS, LOOKS = 200, 8  # looks: how often held-out queries judge the values
RATE = 2.0  # of Adam, divided by the width of what is projected
_LITTLE, _PATIENCE = 0.005, 2  # a fit stops after so many looks without an error lower by this share
_LEAST = 1e-9  # least probability of which a logarithm is taken
_SUMS_TO_ONE = 1e-2


@dataclass
class Example:
    """One batch of inputs of an attention.

    Attributes:
        call: how the module is called.
        target: the original's maps (B, H, T, S).
        fitted, held_out: queries (B, T) that the fit reads, and queries that judge it.
        information: the target's sum of p log p over the last axis.
    """

    call: CallArguments
    target: Tensor
    fitted: Tensor
    held_out: Tensor
    information: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.target = self.target.float()
        self.information = torch.xlogy(self.target, self.target).sum(-1)

    def divergence(self, module: nn.Module, rows: Tensor) -> Tensor:
        """Return the mean KL(target || the module's map) over heads and the chosen queries (B, T)."""
        present = map_of(module, self.call)
        assert present is not None
        logarithm = present.float().clamp_min(_LEAST).log()
        divergence = self.information - (self.target * logarithm).sum(-1)  # (B, H, T)
        return divergence.transpose(1, 2)[rows].mean()


def map_of(module: nn.Module, call: CallArguments) -> Tensor | None:
    """Return the attention map (B, H, T, S) that a module returns after its output; None if it returns none."""
    return map_in(module(*call.args, **call.kwargs))


def map_in(returned: Any) -> Tensor | None:
    """Return the attention map in a module's result, after its output; None if there is none."""
    for item in returned[1:] if isinstance(returned, tuple | list) else ():
        if isinstance(item, Tensor) and item.dim() == 4 and item.is_floating_point() and item.numel():
            sums = item.detach().float().sum(-1)
            if (sums.median() - 1).abs() <= _SUMS_TO_ONE:
                return item
    return None


def repeatable(call: CallArguments) -> CallArguments:
    """Return a call for many runs, in float32: without caches, since every run would add its keys and values to them.

    float64's minimum, used in masks, becomes float32's.
    """
    limits = torch.finfo(torch.float32)

    def fit(value: Any) -> Any:
        return value.float().clamp(limits.min, limits.max) if value.is_floating_point() else value

    args, kwargs = recursively_apply(fit, tuple(call))
    without = {name: None if isinstance(value, Cache) else value for name, value in kwargs.items()}
    return CallArguments(tuple(None if isinstance(value, Cache) else value for value in args), without)


def fit_maps(module: nn.Module, examples: list[Example], fit: str, own: set[str]) -> FittedValues | None:
    """Fit an attention's queries and keys to the original's maps; the module itself isn't changed.

    Args:
        module: the attention; a copy in float32 is what runs.
        examples: batches to fit, in turn.
        fit: "qk" for weights and biases, "bias" for biases alone.
        own: names of Parameters that no other module shares.

    Returns:
        The values with the lowest mean KL divergence on held-out queries; None if no such Parameter moves the maps.
    """
    work = copy_of(module, dtype=torch.float32)
    with use_attention("eager", work):
        fitted = [example for example in examples if example.fitted.any()]
        chosen = _moving(work, fitted[0], [name for name in own if fit == "qk" or name.split(".")[-1] == "bias"])
        return _descend(work, examples, chosen, f"KL divergence; {fit}") if chosen else None


def _moving(work: nn.Module, example: Example, names: list[str]) -> dict[str, nn.Parameter]:
    """Return the named Parameters that affect the attention maps; only they require gradients afterwards."""
    parameters = {name: p for name, p in work.named_parameters() if name in names and p.is_floating_point()}
    for parameter in parameters.values():
        parameter.requires_grad_()
    with torch.enable_grad():
        loss = example.divergence(work, example.fitted)
    gradients: Sequence[Tensor | None] = [None] * len(parameters)
    if loss.requires_grad:
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    moving = {name: p for (name, p), g in zip(parameters.items(), gradients, strict=True) if g is not None and g.any()}
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in moving)
    _leave_out_maps(work, example, moving)
    return moving


def _leave_out_maps(work: nn.Module, example: Example, moving: Collection[str]) -> None:
    """Let linear maps behind the attention map (values, output) give zeros, which takes no time, if the map stays."""
    own = {name.rpartition(".")[0] for name in moving}
    idle = [module for name, module in work.named_modules() if name not in own and is_linear_map(module)]
    with torch.no_grad():
        before = map_of(work, example.call)
        for module in idle:
            vars(module)["forward"] = partial(
                _zeros, width=module.nf if isinstance(module, Conv1D) else module.out_features
            )
        after = map_of(work, example.call)
    if before is None or after is None or not torch.equal(before, after):
        for module in idle:
            del vars(module)["forward"]


def _zeros(x: Tensor, width: int) -> Tensor:
    return x.new_zeros(()).expand(*x.shape[:-1], width)


def _descend(work: nn.Module, examples: list[Example], chosen: dict[str, nn.Parameter], note: str) -> FittedValues:
    """Adam on the chosen Parameters, one batch a step; returns the best values on held-out queries."""
    lowest = held_out_divergence(work, examples)
    fitted = [example for example in examples if example.fitted.any()]
    best = {name: p.detach().clone() for name, p in chosen.items()}
    width = first_tensor(examples[0].call).shape[-1]
    optimizer = torch.optim.Adam(chosen.values(), lr=RATE / width, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    idle = 0
    for step in range(STEPS):
        example = fitted[step % len(fitted)]
        with torch.enable_grad():
            loss = example.divergence(work, example.fitted)
        if loss.isfinite():
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
        if (step + 1) * LOOKS // STEPS > step * LOOKS // STEPS:
            error = held_out_divergence(work, examples)
            idle = 0 if error < (1 - _LITTLE) * lowest else idle + 1
            if error < lowest:
                lowest, best = error, {name: p.detach().clone() for name, p in chosen.items()}
            if idle == _PATIENCE:
                break
    return FittedValues(best, note)


def held_out_divergence(work: nn.Module, examples: list[Example]) -> float:
    """Return the mean divergence over all held-out queries."""
    total, rows = 0.0, 0
    with torch.no_grad():
        for example in examples:
            count = int(example.held_out.sum())
            if count:
                total += float(example.divergence(work, example.held_out)) * count
                rows += count
    return total / max(rows, 1)
