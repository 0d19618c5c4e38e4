"""`patch_model`, `unpatch_model` and `repair_report`: a plan is applied in one transaction, or rolled back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from .checkpoint.patched_classes import patched_model_class
from .checkpoint.patched_config import carry_over_config, give_patched_config
from .core.bare import has_weights, require_bare, require_unquantized
from .core.holders import unwrap_holders
from .core.transaction import UNDO_STATE, Transaction, UndoState
from .errors import NotPreservedWarning, NotReversibleError, OptionError, VerificationError
from .measure.batches import tokenizer_of
from .measure.copies import copy_of
from .measure.randomness import exclusive, keep_random_state
from .measure.snapshot import Snapshot, Verdict
from .outcome import check_folded, fold_repaired, measure_outcomes, snapshot_of, write_outcomes
from .plan import Plan, make_plan
from .repairs.calibration import Calibration, calibration_for, require_data
from .repairs.repair import repair
from .repairs.repair_report import RepairReport
from .runtime.lens import LENS, host_class
from .runtime.patch_errors import UnsupportedError
from .runtime.record import KEY, REPAIR
from .schemes.request import MLPChoice, NormChoice, PlacementChoice, PositionChoice, Record, Request
from .schemes.verdicts import EXACT, Outcome, Outcomes

M = TypeVar("M", bound=Any)  # a PreTrainedModel, or a holder of one
_WAITS_FOR_WEIGHTS = (
    "{} has no weights yet (meta device), so nothing could be centred or checked. Load weights that were saved by a "
    "model patched in the same way; with the original's it would compute another function."
)


@unwrap_holders
@exclusive
def patch_model(
    model: M,
    norm: NormChoice | None = None,
    pos: PositionChoice | None = None,
    *,
    mlp: MLPChoice | None = None,
    placement: PlacementChoice | None = None,
    only: str | Iterable[str] | None = None,
    keep: str | Iterable[str] | None = None,
    init: str = "auto",
    example_inputs: Mapping[str, Any] | None = None,
    calibration: Iterable[Any] | Callable[[Any], Any] | str | PathLike[str] | None = None,
    tokenizer: Any = None,
    fit: str = "qk",
    reversible: bool = False,
    compile: bool = False,
) -> M:
    """Swap a model's norms, positions and MLPs, in place and as one transaction; `plan_patch` shows what would change.

    Gains, shifts, eps, dtype, device, hooks, train/eval mode and the random number generators' state are kept. The same
    request twice changes nothing; a different request is applied on top. The result saves, loads and pushes like any
    model, and opens again through the Auto classes wherever hfpatch is imported. Build the optimizer after the patch:
    an older optimizer doesn't hold new Parameters.

    Norm swaps that should keep the function are checked on the model itself before anything else changes. Its outputs
    may differ from the original's, and the means of its norms' inputs from zero, by at most ten times as much as noise
    in the last bit of the output of every module with Parameters makes. If they differ more, the exact swap is undone
    and the norms are swapped without centring; the outcome, and the warning, give the error. With init="exact" it is
    raised. The same request again doesn't repeat the exact swap. On the meta device nothing can be checked, and a
    warning says so.

    Args:
        model, norm, pos, mlp, placement, only, keep, init, example_inputs: as in `plan_patch`.
        calibration: data for a repair, which fits whatever isn't exact back to the original, branch after branch,
            without labels or training (see `repair`). Texts with `tokenizer` (a list of strings, a datasets.Dataset, a
            path of a text file), inputs in any form that `read_batches` takes (a tokenised Dataset, what a tokenizer
            returns, a DataLoader), or "self": 256 sequences that a language model generates; for another number or
            length, `functools.partial(sample_batches, sequences=64)`. The first 256 texts or single rows are read, and
            128 tokens of a text; for more pass `read_batches(...)`. None: no repair. Results: `repair_report(model)`.
        tokenizer: a tokenizer, or a processor that has a tokenizer. It reads the texts in `calibration`. If `pos` sets
            `max_positions`, its `model_max_length` is set to the same number. Default: the tokenizer of a
            SentenceTransformer, whose `max_seq_length` follows.
        fit: what a repair of positions fits to the original's attention maps: "qk", weights and biases of queries and
            keys, or "bias", their biases alone.
        reversible: keep the replaced parts in memory, for `unpatch_model`. A later patch without it discards them.
        compile: call `compile_model` on the result.

    Returns:
        The same model; `outcomes(model)` says what was measured: exact, approximate, or repaired, and by how much.

    Warns:
        NotPreservedWarning: names what the patch didn't preserve, unless `init` is "reset" or a repair sufficed
            (`help(hfpatch.errors.NotPreservedWarning)` says when a repair suffices).

    Raises:
        PatchError: a subclass of it, from the plan, before anything changes. If something fails later, every change of
            the model is rolled back before the error is passed on (`compile=` comes after, and leaves the patch).
        UnsupportedError: also if the model ran before the patch and doesn't run after it, or its outputs aren't finite,
            or it lacks the repair that the scheme needs (`fixed`, `none`); the patch is rolled back.
        VerificationError: a fold isn't exact on the model; with init="exact", the swap isn't, or can't be measured.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16))
        >>> from hfpatch import patch_model
        >>> patch_model(model, norm="rms", pos="rope:theta=500000").transformer.ln_f
        RMSNorm(16, eps=1e-05)
    """
    schemes = {"norm": norm, "pos": pos, "mlp": mlp, "placement": placement}
    others = {"example_inputs": example_inputs, "calibration": calibration, "tokenizer": tokenizer, "fit": fit}
    request = Request.of(schemes, only, keep, init, **others, reversible=reversible, compile=compile)
    tokenizer_lengths = _tokenizer_lengths(request)
    plan = make_plan(model, request)
    undo_state = _undo_state_for(model) if request.reversible else None
    _require_patchable(plan, model, request)
    data = None if calibration is None else calibration_for(model, calibration, tokenizer)
    if request.budget is not None and data is not None:
        from .repairs.prices import norms_beyond  # other requests don't need this import

        plan = make_plan(model, request.keeping(norms_beyond(request.budget, model, plan, data)))
    parameters, new_lengths = list(model.parameters()), plan.lengths_in(model.config)
    transaction = Transaction.on(model) if undo_state is None else undo_state.transaction
    with transaction.all_or_nothing():
        if plan.planned:
            _keep_on_model(model, UNDO_STATE, undo_state, transaction)  # first in the log, so that it is undone last
            plan, report = _carry_out(plan, request, model, transaction, data)
        for target, name, length in tokenizer_lengths:
            transaction.set_attribute(target, name, length)
        if plan.planned:
            _warn(plan, model, report, init)  # an error, if the user's filter makes warnings errors
            _keep_as_initialised(model, parameters)
            _keep_on_model(model, REPAIR, report, transaction)  # None removes an earlier patch's report
            if undo_state is not None:
                undo_state.lengths.update(new_lengths)
    if compile:
        from .compile import compile_model

        compile_model(model)
    return model


def _require_patchable(plan: Plan, model: PreTrainedModel, request: Request) -> None:
    """Refuse a request that can be planned but not carried out.

    Raises:
        UnsupportedError: a fold multiplies weights, and the model has none yet; or it has no blocks to compile.
        OptionError: calibration, for a model that is patched already; or none, and a scheme needs it.
    """
    if (scheme := next((one for one in plan.schemes if one.folds), None)) and not has_weights(model):
        raise UnsupportedError(
            f"norm={str(scheme)!r} multiplies weights, and this model has no weights yet (meta device). Load them."
        )
    if request.compile:
        from .compile import require_blocks

        require_blocks(model)
    if request.calibration is not None and not plan.planned:
        raise OptionError(
            f"{plan.model_name} is patched in this way already, and calibration= fits only what a patch changes. Use "
            "repair(model, original, batches), with the original model."
        )
    if request.calibration is None and request.init != "reset":
        require_data(model, plan.schemes, plan.generates)


def _carry_out(
    plan: Plan, request: Request, model: PreTrainedModel, transaction: Transaction, calibration: Calibration | None
) -> tuple[Plan, RepairReport | None]:
    """Carry out a plan: what is exact, checked before anything else; then the rest, measured and repaired.

    Returns:
        The plan that was carried out, without its exact conversion if the check failed, and the repair's report.
    """
    init, inputs = request.init, request.example_inputs
    before = snapshot_of(model, plan, inputs)
    with keep_random_state(), torch.inference_mode(False):
        plan, verdict = _convert_exactly(plan, model, before, init, transaction)
        original = _original_of(model, plan, calibration)
        plan.phases.norms.apply(model, transaction)
        if plan.conversion is not None:
            plan.conversion.compensate(model, before.inputs, transaction)
        plan.phases.others.apply(model, transaction)
        # what follows runs the model as a checkpoint of it will be opened; a lens on the model itself has its own class
        give_patched_config(model, plan.record, transaction, plan.lengths)
        transaction.set_class(model, patched_model_class(host_class(type(model)), LENS in vars(model)))
        repairs = calibration is not None and original is not None and bool(plan.losses())
        finite = init != "reset" and not repairs
        measured = measure_outcomes(plan, before, model, original, verdict, inputs, finite)
        write_outcomes(model, plan.record, measured, init)
        report = repair(model, original, calibration, transaction, request.fit) if repairs else None
        fold_repaired(plan, model, transaction, inputs)
        return plan, report


def _convert_exactly(
    plan: Plan, model: PreTrainedModel, before: Snapshot, init: str, transaction: Transaction
) -> tuple[Plan, Verdict | None]:
    """Carry out the first phase of a plan, which should keep the function, and check that on the model.

    Returns:
        The plan and the check's verdict. If the check failed, a plan without the conversion, whose first phase was
        carried out. If there is nothing to check, no verdict.

    Raises:
        VerificationError: the check failed, and init="exact".
    """
    start = len(transaction)
    plan.phases.exact.apply(model, transaction)
    if plan.conversion is None or not before.checks:
        folds = any(found.part.scheme.folds and not found.losses for found in plan.planned)
        return plan, check_folded(before, model) if folds else None
    verdict = before.verdict(model)
    if verdict.holds:
        return plan, verdict
    measured = f"the exact conversion failed its check on this model: {verdict}"
    if init == "exact":
        advice = "The model was left unchanged. Use init='copy' to swap the norms approximately."
        raise VerificationError(f"{plan.model_name}: {measured}. {advice}", measured)
    transaction.undo(start)
    return _convert_exactly(plan.inexact(model, measured), model, before, init, transaction)


def _original_of(model: PreTrainedModel, plan: Plan, calibration: Any) -> PreTrainedModel | None:
    """A copy that goes on computing what the model computes now, for the check of positions and the repair.

    It is made after the exact conversion, which kept the function: so a repair, which fits norms of another class than
    the copy's, leaves alone what was converted exactly. It may share the weights, since a transaction gives what it
    changes new memory. None if nothing needs the copy, or the model has no weights.
    """
    needed = "pos" in plan.kinds or calibration is not None
    return copy_of(model, share=True) if needed and has_weights(model) else None


@unwrap_holders
def outcomes(model: nn.Module) -> Outcomes:
    """Return the measured result of each request of a patched model: a dict of lines, which is printed as a table.

    The results are measured right after the patch or its repair, against the model as it was before, and saved with the
    model; later training doesn't change them. A request is recorded as it was carried out: with init='copy' if an exact
    swap of norms was tried, and nothing could be centred or its check failed.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16))
        >>> from hfpatch import outcomes, patch_model
        >>> outcomes(patch_model(model, norm="rms"))
        {"norm='rms'": 'exact: outputs differ by ..., rounding explains ...'}
    """
    return Outcomes(Record.of(model.config).outcomes())


@unwrap_holders
def repair_report(model: nn.Module) -> RepairReport | None:
    """Return the report of the latest repair; None if no repair has run since the latest patch.

    The report is saved with the model, in `hfpatch_weights.json`. A checkpoint opened without this file has none.

    Raises:
        CheckpointError: the model was opened from a checkpoint whose report is malformed, or of a later version.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> config = GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=64, bos_token_id=0, eos_token_id=1)
        >>> model = GPT2LMHeadModel(config)
        >>> from hfpatch import patch_model, repair_report, sample_batches
        >>> few = sample_batches(model, sequences=8, length=16)
        >>> print(repair_report(patch_model(model, norm="dyt", calibration=few)).summary())
        Repair on 8 sequences...: KL divergence ... -> ... on 2 held-out sequences...
    """
    from .checkpoint.file_digests import report_of  # a patch needs no files

    return report_of(model)


@unwrap_holders
@exclusive
def unpatch_model(model: M) -> M:
    """Roll back all patches of a model that was patched with `reversible=True`: classes, modules, Parameters, config.

    Without training in between, the model is bit for bit what it was. Parameters that the patch removed or overwrote
    (an exact conversion overwrites) get their old values back, on the model's present device and dtype: their training
    is lost. All other Parameters keep their trained values.

    Raises:
        NotReversibleError: the model isn't patched, or was patched without `reversible=True`; or a module whose values
            the patch changed was replaced since.
        WrappedModelError: the model is wrapped; unwrap it first.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16))
        >>> from hfpatch import patch_model, unpatch_model
        >>> model = patch_model(model, norm="rms", reversible=True)
        >>> unpatch_model(model).transformer.ln_f
        LayerNorm((16,), eps=1e-05, ...)
    """
    require_bare(model)
    require_unquantized(model)
    undo_state: UndoState | None = vars(model).get(UNDO_STATE)
    if undo_state is None:
        if not getattr(model.config, KEY, None):
            raise NotReversibleError(f"{type(model).__name__} isn't patched, so there is nothing to undo.")
        raise NotReversibleError(
            f"{type(model).__name__} can't be unpatched: it was loaded from a patched checkpoint, or patched without "
            "reversible=True. Load the original checkpoint instead."
        )
    if (left := undo_state.transaction.find_detached(model)) is not None:
        raise NotReversibleError(
            f"{type(model).__name__}: a {left._get_name()} whose values the patch changed was replaced since (as "
            "resize_token_embeddings does), so its old values can't come back. Load the original checkpoint instead."
        )
    present_ids = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    patched_config, device, dtype = model.config, model.device, model.dtype
    undo_state.transaction.undo()
    vars(model).pop(REPAIR, None)
    carry_over_config(model, patched_config, undo_state.lengths)
    on_meta = device.type == "meta"  # single values can't be sent there, only the model as a whole
    for tensor in (*model.parameters(), *model.buffers()):  # restored ones move to the model's present device and dtype
        if id(tensor) not in present_ids:
            converted = dtype != undo_state.dtype and tensor.is_floating_point()
            tensor.data = tensor.data.to(None if on_meta else device, dtype if converted else None)
    return model.to(device) if on_meta else model


def _undo_state_for(model: PreTrainedModel) -> UndoState:
    """The undo log of a model's reversible patches so far, which the next patch continues.

    Raises:
        NotReversibleError: an earlier patch wasn't reversible.
    """
    undo_state: UndoState | None = vars(model).get(UNDO_STATE)
    if undo_state is None and getattr(model.config, KEY, None):
        raise NotReversibleError(
            "reversible=True: an earlier patch of this model was made without it, so unpatch_model couldn't restore "
            "the original. Leave it out, or start from the original checkpoint."
        )
    return undo_state or UndoState(Transaction(), model.dtype, {})


def _tokenizer_lengths(request: Request) -> list[tuple[Any, str, int]]:
    """Settings (target, attribute, value) that cut texts at the length that `pos` sets: a tokenizer's, a holder's.

    Raises:
        OptionError: `tokenizer` has no tokenizer with a `model_max_length`, or isn't needed: `pos` sets no
            max_positions, and nothing calibrates. A holder's module may be both.
    """
    if (processor := request.tokenizer) is None:
        return []
    tokenizer, of_holder = tokenizer_of(processor), isinstance(processor, nn.Module)
    targets = [(tokenizer, "model_max_length")] if hasattr(tokenizer, "model_max_length") else []
    if not targets and not of_holder:
        raise OptionError(f"tokenizer= takes a tokenizer or a processor that has one, not {type(processor).__name__}.")
    if of_holder and "max_seq_length" in vars(processor):
        targets.append((processor, "max_seq_length"))
    if request.length is not None:
        return [(*target, request.length) for target in targets]
    if request.calibration is None and not of_holder:
        raise OptionError(
            "tokenizer= reads the texts of calibration=, and is given the length that pos= sets "
            "(pos='rope:max_positions=8192', for example). This request has neither."
        )
    return []


def _keep_as_initialised(model: nn.Module, old: Iterable[nn.Parameter]) -> None:
    """Mark what a patch added, so that a later `init_weights()` doesn't initialise it again."""
    old_ids = set(map(id, old))
    for module in model.modules():
        is_new = any(id(parameter) not in old_ids for parameter in module.parameters(recurse=False))
        if is_new or hasattr(module, "replacing"):
            for value in (*module.modules(), *module.parameters()):
                vars(value)["_is_hf_initialized"] = True


def _keep_on_model(model: nn.Module, name: str, value: Any, transaction: Transaction) -> None:
    """Store a patch's result or log as the model's attribute; None removes an earlier patch's."""
    if value is not None:
        transaction.set_attribute(model, name, value)
    else:
        transaction.drop_key(vars(model), name)


def _warn(plan: Plan, model: PreTrainedModel, report: RepairReport | None, init: str) -> None:
    """Warn of what a patch didn't preserve."""
    caller = 5  # this function, patch_model and its decorators are between
    newest = Record.of(model.config).outcomes(plan.kinds)
    changed = {request: outcome for request, outcome in newest.items() if outcome.verdict != EXACT}
    if changed and init != "reset" and not (report and report.suffices):
        warnings.warn(_not_preserved(plan, changed, report), NotPreservedWarning, stacklevel=caller)
    if plan.conversion is not None and plan.conversion.waits_for_weights(model):
        warnings.warn(_WAITS_FOR_WEIGHTS.format(plan.model_name), NotPreservedWarning, stacklevel=caller)


def _not_preserved(plan: Plan, changed: Mapping[str, Outcome], report: RepairReport | None) -> str:
    """Text of the warning: what the patch didn't preserve, and how to get a repair or more about the one that ran."""
    own = "'self' (sequences that it writes), " if plan.generates else ""
    advice = (
        f"calibration= (--calibration) repairs it without training: {own}texts with tokenizer=, or inputs without "
        "labels. plan_patch(...) lists the modules."
    )
    if report is not None:
        advice = f"{report.notes} repair_report(model) lists the repair's steps and what couldn't be fitted.".lstrip()
    what = ". ".join(f"{request} is {outcome}" for request, outcome in changed.items())
    return f"{plan.model_name}: the patched model computes another function. {what}. {advice}"
