"""Carrying a plan out as one transaction, and taking it back."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .attention import host_class
from .checkpoint import patched_model_class, registered_config_class
from .edits import Edits
from .errors import NotPreservedWarning, NotReversibleError, OptionError
from .norms import AffineNorm, Norm
from .plan import Plan, plan_patch, require_bare
from .positions import Position
from .record import KEY

M = TypeVar("M", bound=PreTrainedModel)
WAY_BACK = "_hfpatch_way_back"


def patch_model(
    model: M,
    norm: str | Norm | None = None,
    pos: str | Position | None = None,
    only: str | Iterable[str] | None = None,
    keep: str | Iterable[str] | None = None,
    *,
    init: str = "auto",
    optimizer: Any = None,
    reversible: bool = False,
) -> M:
    """Swap a model's norms and positions, in place and as one transaction; `plan_patch` shows beforehand what changes.

    Gains, shifts, eps, dtype, device, hooks and train/eval mode are kept; so is the random stream. The same request
    twice changes nothing; another one composes with the first. The result saves, loads and pushes like any model, and
    opens again through the Auto classes wherever hfpatch is imported.

    Args:
        model, norm, pos, only, keep, init: as in `plan_patch`.
        optimizer: an optimizer made before the patch; removed Parameters leave it (with their state), new ones join the
            group of their module's other Parameters.
        reversible: keep what was replaced in memory, for `unpatch_model`.

    Returns:
        The same model.

    Warns:
        NotPreservedWarning: names what the patch didn't preserve.

    Raises:
        PatchError: one of its children, from the plan, before anything changes. Should something fail later, every
            change is taken back before the error is passed on.
    """
    plan = plan_patch(model, norm, pos, only, keep, init)
    way_back = model.__dict__.get(WAY_BACK)
    if reversible and way_back is None and getattr(model.config, KEY, None):
        raise NotReversibleError(
            "an earlier patch of this model kept no way back, so reversible=True can't restore it."
        )
    if optimizer is not None:
        _check_optimizer(optimizer, model)
    if not plan.changes:
        return model
    edits, optimizer_edits = Edits(), Edits()
    try:
        with torch.random.fork_rng(devices=[]):
            _carry_out(model, plan, edits)
        if optimizer is not None:
            _swap_parameters(model, optimizer, optimizer_edits)
    except BaseException:
        optimizer_edits.undo()
        edits.undo()
        raise
    model.__dict__.pop(WAY_BACK, None)
    if reversible:
        model.__dict__[WAY_BACK] = way_back.then(edits) if way_back is not None else edits
    if plan.losses() and init != "reset":
        warnings.warn(_not_preserved(plan), NotPreservedWarning, stacklevel=2)
    return model


def unpatch_model(model: M, *, optimizer: Any = None) -> M:
    """Take back all patches of a model that was patched with `reversible=True`: classes, modules, Parameters, config.

    Without training in between the model is bit for bit what it was. Parameters that the patch kept hold what training
    made of them; those that it removed come back with their old values, on the model's present device and dtype.

    Args:
        model: a patched model.
        optimizer: as in `patch_model`.

    Raises:
        NotReversibleError: the model isn't patched, or kept no way back.
        WrappedModelError: it is wrapped; unwrap it first.
    """
    require_bare(model)
    edits = model.__dict__.get(WAY_BACK)
    if edits is None:
        if not getattr(model.config, KEY, None):
            raise NotReversibleError(f"{type(model).__name__} isn't patched.")
        raise NotReversibleError(
            f"{type(model).__name__} kept no way back: it was loaded patched, or patched without reversible=True. "
            "Load the original checkpoint instead."
        )
    device, dtype = model.device, model.dtype
    returning = edits.removed_tensors()
    edits.undo()
    model.__dict__.pop(WAY_BACK)
    for tensor in returning:
        wanted = (
            dtype if tensor.is_floating_point() and tensor.dtype != dtype and model.dtype == dtype else tensor.dtype
        )
        if tensor.device != device or tensor.dtype != wanted:
            tensor.data = tensor.data.to(device, wanted)
    if optimizer is not None:
        _swap_parameters(model, optimizer, Edits())
    return model


def _carry_out(model: PreTrainedModel, plan: Plan, edits: Edits) -> None:
    known = {id(parameter) for parameter in model.parameters()}
    for change in plan.changes:
        if change.apply:
            change.apply(edits)
    _give_own_config(model, plan, edits)
    edits.set_class(model, patched_model_class(host_class(type(model))))
    for module in model.modules():
        if isinstance(module, AffineNorm):  # a later init_weights() must not start them afresh
            module._is_hf_initialized = True  # type: ignore[assignment]
            for parameter in module.parameters(recurse=False):
                if id(parameter) not in known:
                    parameter._is_hf_initialized = True  # type: ignore[attr-defined]


def _give_own_config(model: PreTrainedModel, plan: Plan, edits: Edits) -> None:
    """A patched copy of the config, for every module that holds it or a part of it: other models may share the old."""
    copies: dict[int, Any] = {}
    config = copy.deepcopy(model.config, copies)
    object.__setattr__(config, "__class__", registered_config_class(host_class(type(config))))
    setattr(config, KEY, plan.record.to_json())
    for module in model.modules():
        for name, value in list(module.__dict__.items()):
            if isinstance(value, PreTrainedConfig) and id(value) in copies:
                edits.set_attribute(module, name, copies[id(value)])


def _check_optimizer(optimizer: Any, model: nn.Module) -> None:
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "state"):
        raise OptionError(f"optimizer must be a torch optimizer, not {type(optimizer).__name__}.")
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(parameter) in held for parameter in model.parameters()):
        raise OptionError("optimizer holds none of this model's parameters, so there is nothing in it to swap.")


def _swap_parameters(model: nn.Module, optimizer: Any, edits: Edits) -> None:
    """Make the optimizer hold the model's present Parameters, newcomers beside their module's other ones."""
    present = {id(parameter) for parameter in model.parameters()}
    home = {id(parameter): i for i, group in enumerate(optimizer.param_groups) for parameter in group["params"]}
    joining: dict[int, list[nn.Parameter]] = {}
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        group = next((home[id(p)] for p in own if id(p) in home), None)
        for parameter in own if group is not None else ():
            if id(parameter) not in home:
                joining.setdefault(group, []).append(parameter)  # type: ignore[arg-type]
                home[id(parameter)] = group  # type: ignore[assignment]
    for i, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in present:
                edits.drop_key(optimizer.state, parameter)
        staying = [parameter for parameter in group["params"] if id(parameter) in present]
        edits.set_list(group["params"], staying + joining.get(i, []))


def _not_preserved(plan: Plan) -> str:
    return (
        f"{plan.model_name} now computes another function; not preserved: {'; '.join(plan.losses())}. "
        "Fine-tune it before use (recipes/finetune.py measures loss and recovery); plan_patch lists the modules."
    )
