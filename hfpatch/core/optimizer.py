"""Updates an existing optimizer after a patch: removed Parameters leave it, new ones join."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import OptionError
from .transaction import Transaction

Replaced = nn.Module | nn.Parameter | None


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Refuse what isn't an optimizer of this model.

    Raises:
        OptionError: it has no parameter groups, or none with a Parameter of the model; or its state is of all of them
            together, as LBFGS's is.
    """
    inner = getattr(optimizer, "optimizer", optimizer)  # of accelerate's wrapper
    if isinstance(inner, torch.optim.LBFGS):
        raise OptionError(
            f"optimizer: the state of {type(inner).__name__} is of all Parameters together, so none can be exchanged. "
            "Leave optimizer= out, and make a new one after the change."
        )
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "state"):
        raise OptionError(f"optimizer must be a torch optimizer, not {type(optimizer).__name__}.")
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(parameter) in held for parameter in model.parameters()):
        raise OptionError("optimizer holds none of this model's parameters, so there is nothing in it to swap.")


def swap_parameters(
    model: nn.Module,
    optimizer: Any,
    before: list[nn.Parameter],
    replaced: list[tuple[Replaced, Replaced]],
    edits: Transaction,
) -> None:
    """Take the Parameters that left the model out of the optimizer (with their state) and let the new ones in.

    A new Parameter joins the group of what it replaced, else of its module's other Parameters, else the first group
    that trains this model; a frozen one doesn't join. Parameters of other models stay.

    Args:
        model: after the change.
        optimizer: anything with `param_groups` and `state`.
        before: the model's Parameters before the change.
        replaced: pairs (old, new) of the modules and Parameters that were exchanged.
        edits: the log that can take the swap back.
    """
    present = {id(parameter): name for name, parameter in model.named_parameters()}
    old = set(map(id, before))
    groups = {id(parameter): i for i, group in enumerate(optimizer.param_groups) for parameter in group["params"]}
    default = next(groups[key] for key in (*map(id, before), *present) if key in groups)
    neighbours: dict[int, list[nn.Parameter]] = {}
    for gone, new in sorted(replaced, key=lambda pair: isinstance(pair[1], nn.Module)):  # Parameters tell more
        for parameter in _parameters(new):
            neighbours.setdefault(id(parameter), []).extend(_parameters(gone) + _parameters(new))
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        for parameter in own:
            neighbours.setdefault(id(parameter), own)
    joining: dict[int, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if id(parameter) not in old and id(parameter) not in groups and parameter.requires_grad:
            group = next((groups[id(p)] for p in neighbours[id(parameter)] if id(p) in groups), default)
            joining.setdefault(group, []).append(parameter)
    for i, group in enumerate(optimizer.param_groups):
        names = group.get("param_names", [None] * len(group["params"]))
        kept = []
        for parameter, name in zip(group["params"], names, strict=True):
            if id(parameter) in old and id(parameter) not in present:
                edits.drop_key(optimizer.state, parameter)
            else:
                kept.append((parameter, present.get(id(parameter), name)))
        kept += [(parameter, present[id(parameter)]) for parameter in joining.get(i, [])]
        edits.set_list(group["params"], [parameter for parameter, _ in kept])
        if "param_names" in group:
            edits.set_list(group["param_names"], [name for _, name in kept])


def _parameters(value: Replaced) -> list[nn.Parameter]:
    if isinstance(value, nn.Module):
        return list(value.parameters())
    return [] if value is None else [value]
