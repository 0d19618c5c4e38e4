"""Carrying a plan out as one transaction, and taking it back."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .checkpoint.classes import patched_model_class, registered_config_class
from .compile import compile_model, require_blocks
from .core.bare import require_bare
from .core.optimizer import check_optimizer, swap_parameters
from .core.transaction import Transaction
from .errors import NotPreservedWarning, NotReversibleError, OptionError, VerificationError
from .plan import Plan, checked_request, make_plan, plan_patch
from .repairs.attention_maps import require_fit
from .repairs.block_replay import tried_batches
from .repairs.repair import repair, shadow
from .repairs.report import RepairReport
from .repairs.sample import sample_batches
from .runtime.gated import GatedLinear
from .runtime.lens import LENS, host_class
from .runtime.norms import AffineNorm
from .runtime.record import KEY
from .runtime.rotary import ORIGINAL
from .schemes.mlps import MLP
from .schemes.norms import Norm
from .schemes.placements import Placement
from .schemes.positions import Position
from .swap.config_lengths import takes_any_length
from .swap.image_tables import IMAGE_SIZE

M = TypeVar("M", bound=PreTrainedModel)
WAY_BACK = "_hfpatch_way_back"
REPAIR = "_hfpatch_repair"
_WAITS_FOR_WEIGHTS = (
    "{} has no weights yet (meta device), so nothing could be centred or checked. Load those of a model that was "
    "patched in the same way; the original's would give another function."
)


@dataclass
class WayBack:
    """What a reversible patch keeps on the model: the log, the dtype that the model had, lengths put in its config."""

    edits: Transaction
    dtype: torch.dtype
    lengths: dict[str, int]

    def then(self, later: Transaction, lengths: dict[str, int]) -> WayBack:
        """The same with a later patch's log after it."""
        return WayBack(self.edits.then(later), self.dtype, {**self.lengths, **lengths})


def patch_model(
    model: M,
    norm: str | Norm | None = None,
    pos: str | Position | None = None,
    only: str | Iterable[str] | None = None,
    keep: str | Iterable[str] | None = None,
    *,
    mlp: str | MLP | None = None,
    init: str = "auto",
    optimizer: Any = None,
    reversible: bool = False,
    example_inputs: Mapping[str, Any] | None = None,
    calibration: Iterable[Any] | str | None = None,
    placement: str | Placement | None = None,
    tokenizer: Any = None,
    fit: str = "qk",
    compile: bool = False,
) -> M:
    """Swap a model's norms, positions and MLPs, in place and as one transaction; `plan_patch` shows what would change.

    Gains, shifts, eps, dtype, device, hooks and train/eval mode are kept; so is the random stream. The same request
    twice changes nothing; another one composes with the first. The result saves, loads and pushes like any model, and
    opens again through the Auto classes wherever hfpatch is imported.

    Where norms are to be the same function, that is checked on the model itself before the rest is done: its outputs,
    and the means at its norms, may move by no more than ten times what noise in the last bit of every module's output
    moves the original's. If they do, all is taken back and the norms are swapped plainly, with a warning that gives the
    error; with init="exact" that error is raised. On the meta device nothing can be checked, which a warning says.

    Args:
        model, norm, pos, only, keep, mlp, placement, init, example_inputs: as in `plan_patch`.
        optimizer: an optimizer made before the patch; removed Parameters leave it (with their state), new ones join the
            group of what they replace.
        reversible: keep what was replaced in memory, for `unpatch_model`.
        calibration: what isn't exact is fitted back to the original, branch after branch, without labels or training
            (repairs/repair.py says how): on batches of inputs (dictionaries, or tensors of the main input; any number
            of them), or on "self", sequences that a language model draws from itself. None repairs nothing.
            `repair_report(model)` tells what came of it.
        tokenizer: a tokenizer or processor whose `model_max_length` becomes the position scheme's `max_positions`.
        fit: what a repair of positions fits to the original's attention maps: "qk", weights and biases of queries and
            keys, or "bias", their biases alone.
        compile: hand the result to `compile_model`, whose docstring says what that means.

    Returns:
        The same model.

    Warns:
        NotPreservedWarning: names what the patch didn't preserve, where it wasn't repaired.

    Raises:
        PatchError: one of its children, from the plan, before anything changes. Should something fail later, every
            change is taken back before the error is passed on.
        VerificationError: norms that should be exact aren't, with init="exact".
    """
    asked: dict[str, Any] = {"norm": norm, "pos": pos, "mlp": mlp, "placement": placement}
    plan = plan_patch(model, **asked, only=only, keep=keep, init=init, example_inputs=example_inputs)
    way_back: WayBack | None = model.__dict__.get(WAY_BACK)
    if reversible and way_back is None and getattr(model.config, KEY, None):
        raise NotReversibleError(
            "an earlier patch of this model kept no way back, so reversible=True can't restore it."
        )
    require_fit(fit)
    if compile:
        require_blocks(model)
    if optimizer is not None:
        check_optimizer(optimizer, model)
    told, lengths = _told(tokenizer, pos), plan.lengths_in(model.config)
    if not plan.changes:
        if calibration is not None:
            raise OptionError(
                f"{plan.model_name} is patched this way already, and calibration= fits only what a patch changes. Use "
                "repair(model, original, batches), with the original model."
            )
        tell_length(*told, Transaction())
        return compile_model(model) if compile else model
    dtype = model.dtype
    batches = _checked_calibration(model, calibration, plan, init)
    try:
        edits, report = _transact(model, plan, optimizer, batches, fit)
    except VerificationError as error:
        if init == "exact":
            raise
        plan = make_plan(model, checked_request(asked, only, keep, init), inexact=error.measured)
        batches = batches or _checked_calibration(model, calibration, plan, init)
        edits, report = _transact(model, plan, optimizer, batches, fit)
    tell_length(*told, edits)
    for name, value in ((WAY_BACK, None), (REPAIR, report)):
        model.__dict__.pop(name, None)
        if value is not None:
            model.__dict__[name] = value
    if reversible:
        model.__dict__[WAY_BACK] = WayBack(edits, dtype, lengths) if way_back is None else way_back.then(edits, lengths)
    if plan.losses() and init != "reset" and not (report and report.kept):
        warnings.warn(_not_preserved(plan), NotPreservedWarning, stacklevel=2)
    if plan.conversion is not None and plan.conversion.waits_for_weights:
        warnings.warn(_WAITS_FOR_WEIGHTS.format(plan.model_name), NotPreservedWarning, stacklevel=2)
    return compile_model(model) if compile else model


def repair_report(model: nn.Module) -> RepairReport | None:
    """What the repair of the latest patch did, step by step; None where nothing was or had to be repaired."""
    return model.__dict__.get(REPAIR)


def unpatch_model(model: M, *, optimizer: Any = None) -> M:
    """Take back all patches of a model that was patched with `reversible=True`: classes, modules, Parameters, config.

    Without training in between the model is bit for bit what it was. Parameters that the patch removed, or wrote other
    values to (an exact conversion does), come back with their old values, on the model's present device and dtype: what
    training made of them is lost. The others keep what training made of them.

    Args:
        model: a patched model.
        optimizer: as in `patch_model`.

    Raises:
        NotReversibleError: the model isn't patched, or kept no way back.
        WrappedModelError: it is wrapped; unwrap it first.
    """
    require_bare(model)
    way_back: WayBack | None = model.__dict__.get(WAY_BACK)
    if way_back is None:
        if not getattr(model.config, KEY, None):
            raise NotReversibleError(f"{type(model).__name__} isn't patched.")
        raise NotReversibleError(
            f"{type(model).__name__} kept no way back: it was loaded patched, or patched without reversible=True. "
            "Load the original checkpoint instead."
        )
    if optimizer is not None:
        check_optimizer(optimizer, model)
    before = list(model.parameters())
    pairs = [(new, old) for old, new in way_back.edits.replacements()]
    patched_config, device, dtype = model.config, model.device, model.dtype
    way_back.edits.undo()
    model.__dict__.pop(WAY_BACK)
    model.__dict__.pop(REPAIR, None)
    _carry_over_config(model, patched_config, way_back.lengths)
    _follow(model, before, device, dtype if dtype != way_back.dtype else None)
    if optimizer is not None:
        swap_parameters(model, optimizer, before, pairs, Transaction())
    return model


def _told(tokenizer: Any, pos: str | Position | None) -> tuple[Any, int]:
    """The tokenizer (that of a processor) and the length that it is to be told.

    Raises:
        OptionError: there is no such length, or no such tokenizer.
    """
    if tokenizer is None:
        return None, 0
    scheme = Position.resolve(pos)
    if scheme is None or scheme.max_positions is None:
        raise OptionError(
            "tokenizer= is told the new length, so pos= must say it: pos='rope:max_positions=8192', for example."
        )
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    if not hasattr(inner, "model_max_length"):
        raise OptionError(f"tokenizer= takes a tokenizer or a processor that has one, not {type(tokenizer).__name__}.")
    return inner, scheme.max_positions


def tell_length(tokenizer: Any, length: int, edits: Transaction) -> None:
    """Let a tokenizer cut and warn at another length; None is told nothing."""
    if tokenizer is not None:
        edits.set_attribute(tokenizer, "model_max_length", length)


def _checked_calibration(
    model: PreTrainedModel, calibration: Iterable[Any] | str | None, plan: Plan, init: str
) -> Iterable[Any] | None:
    """Batches, before anything changes; those that a model draws from itself are drawn here, where they are needed.

    Raises:
        OptionError: no batches, or none of this model; a model without weights, or one that can't draw any; fresh
            parameters, which a fit would undo.
    """
    if calibration is None:
        return None
    if init == "reset":
        raise OptionError(
            "init='reset' starts parameters afresh, and calibration fits them to the original: choose one."
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise OptionError("calibration needs weights, and this model has none yet (meta device). Load it first.")
    if isinstance(calibration, str) and calibration == "self":
        return sample_batches(model) if plan.losses() else None
    return tried_batches(calibration, model)


def _transact(
    model: PreTrainedModel, plan: Plan, optimizer: Any, calibration: Iterable[Any] | None, fit: str
) -> tuple[Transaction, RepairReport | None]:
    """Carry the plan out, or leave everything as it was."""
    edits, optimizer_edits = Transaction(), Transaction()
    before = list(model.parameters())
    exact, norms, others = plan.phases
    measured = plan.conversion.measure() if plan.conversion is not None else None
    report = original = None
    try:
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
            exact.apply(model, edits)
            if plan.conversion is not None and measured is not None:
                plan.conversion.verify(measured)
            if calibration is not None and plan.losses():
                original = shadow(model, writes=bool(plan.conversion and plan.conversion.moved_shifts()))
            norms.apply(model, edits)
            if plan.conversion is not None:
                plan.conversion.compensate(edits)
            others.apply(model, edits)
            give_own_config(model, plan, edits)
            edits.set_class(model, patched_model_class(host_class(type(model)), LENS in vars(model)))
            if calibration is not None and original is not None:
                report = repair(model, original, calibration, edits, fit)
        if optimizer is not None:
            swap_parameters(model, optimizer, before, edits.replacements(), optimizer_edits)
    except BaseException:
        optimizer_edits.undo()
        edits.undo()
        raise
    old = {id(parameter) for parameter in before}
    for module in model.modules():  # a later init_weights() must not start them afresh
        fresh = any(id(parameter) not in old for parameter in module.parameters(recurse=False))
        if fresh or isinstance(module, AffineNorm | GatedLinear):
            for value in (*module.modules(), *module.parameters()):
                vars(value)["_is_hf_initialized"] = True
    return edits, report


def give_own_config(model: PreTrainedModel, plan: Plan, edits: Transaction) -> None:
    """A patched copy of the config, for every module that holds it or a part of it: other models may share the old."""
    copies: dict[int, Any] = {}
    config = copy.deepcopy(model.config, copies)
    object.__setattr__(config, "__class__", registered_config_class(host_class(type(config))))
    record = plan.record
    unlimited = bool(record.pos) and record.pos[-1].scheme.max_positions is None and takes_any_length(model)  # type: ignore[attr-defined]
    setattr(config, KEY, replace(record, any_length=unlimited).to_json())
    _set_lengths(model, plan, copies, edits)
    for module in model.modules():
        for name, value in list(module.__dict__.items()):
            if isinstance(value, PreTrainedConfig) and id(value) in copies:
                edits.set_attribute(module, name, copies[id(value)])


def _set_lengths(model: PreTrainedModel, plan: Plan, copies: dict[int, Any], edits: Transaction) -> None:
    """The new length in the patched copies of configs, and in a generation config that ended at the old one."""
    plan.derived.apply(model, edits)
    generation = getattr(model, "generation_config", None)
    for original, attribute, value in plan.lengths:
        config = copies[id(original)]
        old = getattr(config, attribute)
        setattr(config, attribute, value)
        of_text = isinstance(value, int) and attribute not in (IMAGE_SIZE, ORIGINAL)
        if of_text and generation is not None and getattr(generation, "max_length", None) == old:
            generation = copy.deepcopy(generation)
            generation.max_length = value
            edits.set_attribute(model, "generation_config", generation)


def _carry_over_config(model: nn.Module, patched: PreTrainedConfig, lengths: dict[str, int]) -> None:
    """Settings that were changed on the patched config since the patch (a resized vocabulary, labels, ...).

    Not the lengths that the patch itself put there. They go into a copy of the original config, which other models may
    share.
    """
    original: Any = model.config
    changed = {
        name: value
        for name, value in vars(patched).items()
        if name != KEY
        and not isinstance(value, PreTrainedConfig)
        and vars(original).get(name, KEY) != value
        and lengths.get(name, KEY) != value
    }
    config = original
    if changed:
        config = copy.copy(original)
        vars(config).update(changed)
    for module in model.modules():
        for name, value in vars(module).items():
            if value is patched or value is original:
                vars(module)[name] = config


def _follow(model: nn.Module, before: list[nn.Parameter], device: torch.device, dtype: torch.dtype | None) -> None:
    """Move what came back to where the model has gone since the patch, and to its new dtype if it got one."""
    known = {id(parameter) for parameter in before}
    for parameter in model.parameters():
        if id(parameter) not in known:
            parameter.data = parameter.data.to(device, dtype if parameter.is_floating_point() else None)


def _not_preserved(plan: Plan) -> str:
    return (
        f"{plan.model_name} now computes another function; not preserved: {'; '.join(plan.losses())}. "
        "calibration=batches (inputs without labels), or calibration='self' for a model that generates, repairs it "
        "without training; plan_patch lists the modules."
    )
