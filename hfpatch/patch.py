"""`patch_model`, `unpatch_model` and `repair_report`: a plan is carried out in one transaction, or rolled back."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from .checkpoint.classes import patched_model_class
from .checkpoint.patched_config import carry_over_config, give_patched_config
from .checkpoint.repair_file import report_of
from .compile import compile_model, require_blocks
from .core.bare import require_bare, require_unquantized
from .core.holders import takes_holders
from .core.optimizer import check_optimizer, swap_parameters
from .core.transaction import UNDO_RECORD, Transaction, UndoRecord, changes_alone
from .errors import NotPreservedWarning, NotReversibleError, OptionError, VerificationError
from .measure.randomness import keep_random_state
from .measure.text_batches import tokenizer_of
from .outcome import Measurement, write_outcomes
from .plan import Plan, checked_request, make_plan
from .repairs.attention_maps import FITS, require_fit
from .repairs.calibration import read_calibration, tried
from .repairs.reference import reference_copy
from .repairs.repair import repair
from .repairs.report import RepairReport
from .repairs.sample import sample_batches
from .runtime.gated import GatedLinear
from .runtime.lens import LENS, host_class
from .runtime.norms import AffineNorm
from .runtime.record import KEY, REPAIR
from .schemes.mlps import MLP
from .schemes.norms import Norm
from .schemes.placements import Placement
from .schemes.positions import Position
from .schemes.request import EXACT, Record

M = TypeVar("M", bound=Any)  # a PreTrainedModel, or a holder of one
_WAITS_FOR_WEIGHTS = (
    "{} has no weights yet (meta device), so nothing could be centred or checked. Load weights that were saved by a "
    "model patched in the same way; with the original's it would compute another function."
)


@takes_holders
@changes_alone
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
    calibration: Iterable[Any] | str | PathLike[str] | None = None,
    placement: str | Placement | None = None,
    tokenizer: Any = None,
    fit: str = "qk",
    compile: bool = False,
) -> M:
    """Swap a model's norms, positions and MLPs, in place and as one transaction; `plan_patch` shows what would change.

    Gains, shifts, eps, dtype, device, hooks, train/eval mode and the random number generators' state are kept. The same
    request twice changes nothing; a different one is applied on top. The result saves, loads and pushes like any model,
    and opens again through the Auto classes wherever hfpatch is imported.

    Norm swaps that should keep the function are checked on the model itself before anything else changes. Its outputs
    and the means of its norms' inputs may differ from the original's by at most ten times the difference that noise in
    the last bit of every module's output makes. If they differ more, all is rolled back and the norms are swapped
    without centring, with a warning that gives the error; with init="exact" that error is raised. On the meta device
    nothing can be checked, and a warning says so.

    Args:
        model, norm, pos, only, keep, mlp, placement, init, example_inputs: as in `plan_patch`.
        optimizer: an existing optimizer; removed Parameters leave it (with their state), new ones join the group of
            what they replace.
        reversible: keep what was replaced in memory, for `unpatch_model`.
        calibration: data for a repair: whatever isn't exact is fitted back to the original, branch after branch,
            without labels or training, as `repair` does. Texts with `tokenizer` (a list of strings, a datasets.Dataset,
            a path of a text file), inputs in any form that `read_batches` takes (a tokenised Dataset, what a tokenizer
            returns, a DataLoader), or "self": sequences that a language model generates. Of texts and single rows the
            first 256 are read, and 128 tokens of a text; for more pass `read_batches(...)`. None: no repair.
            `repair_report(model)` returns its results.
        tokenizer: a tokenizer, or a processor that has one. It reads the texts in `calibration`, and where `pos` sets
            `max_positions`, that becomes its `model_max_length`. Default: a SentenceTransformer's own, whose
            `max_seq_length` follows.
        fit: what a repair of positions fits to the original's attention maps: "qk", weights and biases of queries and
            keys, or "bias", their biases alone.
        compile: call `compile_model` on the result.

    Returns:
        The same model; `outcomes(model)` says what was measured: exact, approximate, or repaired, and by how much.

    Warns:
        NotPreservedWarning: names what the patch didn't preserve, unless `init` is "reset" or a repair sufficed
            (`help(hfpatch.errors.NotPreservedWarning)` says when one does).

    Raises:
        PatchError: one of its children, from the plan, before anything changes; also where another thread is patching
            the same model. Should something fail later, every change is rolled back before the error is passed on.
        UnsupportedError: also where the model ran before and doesn't run after the patch, which is rolled back.
        VerificationError: with init="exact", what should be exact isn't, measured on the model, or can't be measured.
    """
    schemes = {"norm": norm, "pos": pos, "mlp": mlp, "placement": placement}
    plan = make_plan(model, checked_request(schemes, only, keep, init), example_inputs)
    undo_record: UndoRecord | None = vars(model).get(UNDO_RECORD)
    if reversible and undo_record is None and getattr(model.config, KEY, None):
        raise NotReversibleError(
            "reversible=True: an earlier patch of this model was made without it, so unpatch_model couldn't restore "
            "the original. Leave it out, or start from the original checkpoint."
        )
    require_fit(fit)
    if fit != FITS[0] and calibration is None:
        raise OptionError(f"fit={fit!r} says what a repair fits, and calibration= asks for one: pass both, or neither.")
    if compile:
        require_blocks(model)
    if optimizer is not None:
        check_optimizer(optimizer, model)
    new_lengths = _new_lengths(tokenizer, pos, calibration)
    batches = _checked_calibration(model, calibration, tokenizer, plan, init)
    before, dtype, lengths = list(model.parameters()), model.dtype, plan.lengths_in(model.config)
    edits, optimizer_edits, report = Transaction.on(model, keep=reversible), Transaction(), None
    with edits.all_or_nothing(), optimizer_edits.all_or_nothing():
        if plan.changes:
            try:
                report = _carry_out(plan, model, edits, batches, fit, init, example_inputs)
            except VerificationError as error:
                if init == "exact":
                    raise
                edits.undo()
                plan = make_plan(model, checked_request(schemes, only, keep, init), example_inputs, error.measured)
                batches = batches or _checked_calibration(model, calibration, tokenizer, plan, init)
                report = _carry_out(plan, model, edits, batches, fit, init, example_inputs)
        for target, name, length in new_lengths:
            edits.set_attribute(target, name, length)
        if plan.changes:
            if optimizer is not None:
                swap_parameters(model, optimizer, before, edits.replacements(), optimizer_edits)
            _warn(plan, model, report, init)  # an error, where the user's filter makes it one
            _keep_as_initialised(model, before)
            undo_record = (undo_record or UndoRecord(Transaction(), dtype, {})).then(edits, lengths)
            _keep_on_model(model, edits, undo_record if reversible else None, report)
    return compile_model(model) if compile else model


@takes_holders
def outcomes(model: nn.Module) -> dict[str, str]:
    """What each request of a patched model came to: {"norm='rms'": "exact: outputs differ by 2.7e-07, ..."}.

    Measured right after the patch or its repair, against the model as it was before, and saved with the model; what
    training does afterwards isn't in it. A request is recorded as it was carried out: with init='copy' where an exact
    swap of norms was tried and nothing could be centred.
    """
    return Record.of(model.config).outcomes()


@takes_holders
def repair_report(model: nn.Module) -> RepairReport | None:
    """Report of the latest repair, step by step, or None: there was none, or none since the latest patch.

    It is saved with the model, in `hfpatch_repair.json`.

    Raises:
        CheckpointError: the model was opened from a checkpoint whose file is missing, damaged or another's.
    """
    return report_of(model)


@takes_holders
@changes_alone
def unpatch_model(model: M, *, optimizer: Any = None) -> M:
    """Roll back all patches of a model that was patched with `reversible=True`: classes, modules, Parameters, config.

    Without training in between the model is bit for bit what it was. Parameters that the patch removed, or wrote other
    values to (an exact conversion does), come back with their old values, on the model's present device and dtype: what
    training made of them is lost. The others keep what training made of them.

    Args:
        model: a patched model.
        optimizer: as in `patch_model`.

    Raises:
        NotReversibleError: the model isn't patched, or wasn't with `reversible=True`.
        WrappedModelError: it is wrapped; unwrap it first.
    """
    require_bare(model)
    require_unquantized(model)
    undo_record: UndoRecord | None = vars(model).get(UNDO_RECORD)
    if undo_record is None:
        if not getattr(model.config, KEY, None):
            raise NotReversibleError(f"{type(model).__name__} isn't patched, so there is nothing to undo.")
        raise NotReversibleError(
            f"{type(model).__name__} can't be unpatched: it was loaded from a patched checkpoint, or patched without "
            "reversible=True. Load the original checkpoint instead."
        )
    if optimizer is not None:
        check_optimizer(optimizer, model)
    _require_undoable(model, undo_record.edits)
    before = list(model.parameters())
    present_ids = {id(tensor) for tensor in (*before, *model.buffers())}
    replaced = [(new, old) for old, new in undo_record.edits.replacements()]
    patched_config, device, dtype = model.config, model.device, model.dtype
    undo_record.edits.undo()
    for name in (UNDO_RECORD, REPAIR):
        vars(model).pop(name, None)
    carry_over_config(model, patched_config, undo_record.lengths)
    for tensor in (*model.parameters(), *model.buffers()):  # restored ones move to the model's present device and dtype
        if id(tensor) not in present_ids:
            converted = dtype != undo_record.dtype and tensor.is_floating_point()
            tensor.data = tensor.data.to(device, dtype if converted else None)
    if optimizer is not None:
        swap_parameters(model, optimizer, before, replaced, Transaction())
    return model


def _require_undoable(model: PreTrainedModel, edits: Transaction) -> None:
    """Refuse what `unpatch_model` couldn't make whole, before anything changes.

    Raises:
        NotReversibleError: a module that the patch wrote to was replaced since, or the model was moved to meta.
    """
    if strays := edits.strays(model):
        raise NotReversibleError(
            f"{type(model).__name__}: a {strays[0]._get_name()} whose values the patch changed was replaced since (as "
            "resize_token_embeddings does), so its old values can't come back. Load the original checkpoint instead."
        )
    removed = [
        parameter
        for one in edits.replaced()
        for parameter in ([one] if isinstance(one, nn.Parameter) else one.parameters(recurse=False))
    ]
    if model.device.type == "meta" and not all(parameter.is_meta for parameter in removed):
        raise NotReversibleError(
            f"{type(model).__name__} is on meta: its values are gone. Load the original checkpoint instead."
        )


def _new_lengths(processor: Any, pos: str | Position | None, calibration: Any) -> list[tuple[Any, str, int]]:
    """(target, attribute, value) for what cuts texts at a length, where `pos` sets one: a tokenizer, a holder's module.

    Raises:
        OptionError: `processor` has no tokenizer with a `model_max_length`, or isn't needed: `pos` sets no
            max_positions, and nothing calibrates. A holder's module may be both.
    """
    if processor is None:
        return []
    tokenizer, of_holder = tokenizer_of(processor), isinstance(processor, nn.Module)
    targets = [(tokenizer, "model_max_length")] if hasattr(tokenizer, "model_max_length") else []
    if not targets and not of_holder:
        raise OptionError(f"tokenizer= takes a tokenizer or a processor that has one, not {type(processor).__name__}.")
    if of_holder and "max_seq_length" in vars(processor):
        targets.append((processor, "max_seq_length"))
    scheme = Position.resolve(pos)
    if scheme is not None and scheme.max_positions is not None:
        return [(*target, scheme.max_positions) for target in targets]
    if calibration is None and not of_holder:
        raise OptionError(
            "tokenizer= reads the texts of calibration=, and is given the length that pos= sets "
            "(pos='rope:max_positions=8192', for example). This request has neither."
        )
    return []


def _checked_calibration(
    model: PreTrainedModel, calibration: Any, tokenizer: Any, plan: Plan, init: str
) -> Iterable[Any] | None:
    """Calibration batches, validated before anything changes; None if there is nothing to repair.

    "self" is sampled here, from the model as it still is.

    Raises:
        OptionError: no batches, or ones that the model can't run; a model without weights, or one that can't generate;
            init="reset", whose starting values a fit would overwrite; a model that is patched this way already.
    """
    if calibration is None:
        return None
    if not plan.changes:
        raise OptionError(
            f"{plan.model_name} is patched in this way already, and calibration= fits only what a patch changes. Use "
            "repair(model, original, batches), with the original model."
        )
    if init == "reset":
        raise OptionError(
            "init='reset' reinitialises parameters, and calibration= fits them to the original model: choose one."
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise OptionError("calibration needs weights, and this model has none yet (meta device). Load it first.")
    if isinstance(calibration, str) and calibration == "self":
        return sample_batches(model) if plan.losses() else None
    return tried(read_calibration(calibration, model, tokenizer), model)


def _carry_out(
    plan: Plan,
    model: PreTrainedModel,
    edits: Transaction,
    calibration: Iterable[Any] | None,
    fit: str,
    init: str,
    inputs: Mapping[str, Any] | None,
) -> RepairReport | None:
    """Carry out a plan phase by phase, measure it and repair it."""
    exact, norms, others = plan.phases
    conversion, repairs = plan.conversion, calibration is not None and bool(plan.losses())
    reference = conversion.measure() if conversion is not None else None
    measurement = Measurement(plan, model, inputs, reference, repairs)
    verdict = None
    with keep_random_state(), torch.inference_mode(False):
        exact.apply(model, edits)
        if conversion is not None and reference is not None:
            verdict = conversion.verify(reference)
        measurement.keep_original(model)
        original = reference_copy(model) if repairs else None
        norms.apply(model, edits)
        if conversion is not None:
            conversion.compensate(edits)
        others.apply(model, edits)
        give_patched_config(model, plan.record, edits, plan.lengths)
        edits.set_class(model, patched_model_class(host_class(type(model)), LENS in vars(model)))
        write_outcomes(model, measurement.outcomes(model, verdict), init)
        if calibration is None or original is None:
            return None
        return repair(model, original, calibration, edits, fit)


def _keep_as_initialised(model: nn.Module, before: Iterable[nn.Parameter]) -> None:
    """Mark what a patch added, so that a later `init_weights()` doesn't initialise it again."""
    old_ids = set(map(id, before))
    for module in model.modules():
        is_new = any(id(parameter) not in old_ids for parameter in module.parameters(recurse=False))
        if is_new or isinstance(module, AffineNorm | GatedLinear):
            for value in (*module.modules(), *module.parameters()):
                vars(value)["_is_hf_initialized"] = True


def _keep_on_model(
    model: nn.Module, edits: Transaction, undo_record: UndoRecord | None, report: RepairReport | None
) -> None:
    """Store the undo log of all patches, and the latest's repair report, on the model; None removes them."""
    for name, value in ((UNDO_RECORD, undo_record), (REPAIR, report)):
        if value is not None:
            edits.set_attribute(model, name, value)
        else:
            edits.drop_key(vars(model), name)


def _warn(plan: Plan, model: PreTrainedModel, report: RepairReport | None, init: str) -> None:
    """Warn of what a patch didn't preserve."""
    caller = 5  # this function, patch_model and its decorators are between
    newest = Record.of(model.config).outcomes(plan.by_kind)
    changed = {request: outcome for request, outcome in newest.items() if not outcome.startswith(EXACT)}
    if changed and init != "reset" and not (report and report.suffices):
        warnings.warn(_not_preserved(plan, changed, report), NotPreservedWarning, stacklevel=caller)
    if plan.conversion is not None and plan.conversion.waits_for_weights:
        warnings.warn(_WAITS_FOR_WEIGHTS.format(plan.model_name), NotPreservedWarning, stacklevel=caller)


def _not_preserved(plan: Plan, changed: Mapping[str, str], report: RepairReport | None) -> str:
    """Text of the warning: what the patch didn't preserve, and how to get a repair or more about the one that ran."""
    advice = (
        "calibration=texts with tokenizer= (or inputs without labels; --calibration FILE), or calibration='self' for a "
        "model that generates, repairs it without training. plan_patch(...) lists the modules."
    )
    if report is not None:
        advice = "repair_report(model) lists the repair's steps and what couldn't be fitted."
    what = ". ".join(f"{request} is {outcome}" for request, outcome in changed.items())
    return f"{plan.model_name}: the patched model computes another function. {what}. {advice}"
