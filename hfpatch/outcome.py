"""Measures the outcome of each request of a patch, and stores it in the model's record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .core.bare import has_weights
from .core.transaction import Transaction
from .errors import OptionError, VerificationError
from .measure.media import missing_media
from .measure.outputs import FACTOR
from .measure.snapshot import Snapshot, Verdict
from .plan import Plan
from .planners.full_length import makers_of_short_inputs, require_runs_in_full, require_same_frequencies
from .runtime.patch_errors import UnsupportedError, describe_error
from .runtime.record import KEY
from .schemes.request import Record
from .schemes.verdicts import APPROXIMATE, EXACT, NOT_MEASURED, Metric, Outcome


def snapshot_of(model: PreTrainedModel, plan: Plan, inputs: Mapping[str, Any] | None) -> Snapshot:
    """Return what a model computes before a patch, on inputs that fit it before and after.

    Args:
        model: the model before the patch.
        plan: the patch's plan.
        inputs: keyword arguments of one forward; None generates them.

    Raises:
        OptionError: an exact conversion of norms couldn't be checked: the model doesn't run on the inputs, or its
            outputs are NaN.
        MemoryError, torch.OutOfMemoryError: there is too little memory to run the model.
    """
    norms = None if plan.conversion is None else plan.conversion.to_check(model)
    before = Snapshot(model, _makers(model, plan, inputs), norms)
    if norms is None or before.forward is not None:
        return before
    where = f"{type(model).__name__}: the inputs ({', '.join(before.inputs)}) that the exact conversion is checked on"
    way_out = (
        "example_inputs={...}, the keyword arguments of one forward, or init='copy' for a swap without this check."
    )
    if before.error is not None:
        raise OptionError(f"{where} make its forward fail ({before.why_not}). Pass {way_out}") from before.error
    raise OptionError(
        f"{where}: {before.why_not}: a weight is NaN, or its dtype overflows. Mend that, or pass {way_out}"
    )


def _makers(model: PreTrainedModel, plan: Plan, inputs: Mapping[str, Any] | None) -> list[Callable[[], Any]]:
    """Functions that make inputs for a model before and after a patch: the user's, or short inputs."""
    lengths = [found.part.scheme.max_positions for found in plan.planned if found.kind == "pos"]
    length = min((length for length in lengths if length is not None), default=None)
    return makers_of_short_inputs(model, length) if inputs is None else [lambda: inputs]


def check_folded(before: Snapshot, model: PreTrainedModel, way_out: str = "") -> Verdict | None:
    """Return the verdict on folded norms; None if nothing can be measured.

    Args:
        before: the model before the phase that folds its norms.
        model: the model after it.
        way_out: advice for a fold that isn't exact.

    Raises:
        VerificationError: the outputs differ by more than rounding.
        UnsupportedError: the model ran before and no longer does.
    """
    if before.forward is None:
        return None
    after, name = before.outputs_after(model), type(model).__name__
    if isinstance(after, Exception):
        reason = describe_error(after).rstrip(".")
        raise UnsupportedError(
            f"{name} doesn't run with folded norms: {reason}. The model was left unchanged."
        ) from after
    verdict = before.within_rounding(model, max(one.max_error for one in before.deviations(after)))
    if not verdict.holds:
        raise VerificationError(
            f"{name}: folding its norms isn't exact on this model: {verdict.figures}. The model was left "
            f"unchanged.{way_out}",
            verdict.figures,
        )
    return verdict


def fold_repaired(
    plan: Plan, model: PreTrainedModel, transaction: Transaction, inputs: Mapping[str, Any] | None
) -> None:
    """Carry out the last phase of a plan, which folds the norms that a repair fitted, and check it on the model.

    Raises:
        VerificationError, UnsupportedError: as in `check_folded`.
    """
    folds = plan.phases.folds
    if not folds.edits:
        return
    before = Snapshot(model, _makers(model, plan, inputs), {})
    folds.apply(model, transaction)
    verdict = check_folded(before, model, " Use norm='fixed' to leave them unfolded.")
    if verdict is None or not verdict.elsewhere:
        return
    record, norms = Record.of(model.config), [found for found in plan.planned if found.kind == "norm"]
    outcomes = [part.outcome or Outcome("") for part in record.newest("norm", len(norms))]
    for i, found in enumerate(norms):
        outcomes[i] = replace(outcomes[i], elsewhere=verdict.elsewhere) if found.folds else outcomes[i]
    setattr(model.config, KEY, record.with_outcomes({"norm": outcomes}).to_json())


def measure_outcomes(
    plan: Plan,
    before: Snapshot,
    model: PreTrainedModel,
    original: PreTrainedModel | None,
    verdict: Verdict | None,
    given: Mapping[str, Any] | None,
    require_finite: bool,
) -> dict[str, list[Outcome]]:
    """Return the measured outcomes of a patch's schemes, by kind.

    If positions change, the patched model also runs at the length and the image size in its new config. A model that
    ran before and doesn't run there is refused.

    Args:
        plan: the patch's plan.
        before: the model before the patch.
        model: the model after it.
        original: a copy that computes what the model computed before; None if the weights aren't in memory.
        verdict: the verdict of the check of the exact conversion of norms; None if there was no check.
        given: the user's inputs of one forward, if there are any.
        require_finite: whether outputs have to be finite now; not if a repair or training follows.

    Raises:
        UnsupportedError: the model ran before and no longer does, or its outputs were finite and aren't.
    """
    # An exact conversion has its own check; all else is measured as a whole, what keeps the function included
    lossy = list(dict.fromkeys(found.kind for found in plan.planned if found.losses))
    checked = Outcome(EXACT, basis=_basis(model, before.inputs))
    if verdict is not None:
        checked = replace(checked, measured=verdict.figures, metric=Metric.DIFFERENCE, copied=verdict.error)
        checked = replace(checked, elsewhere=verdict.elsewhere)
    judged = [verdict is not None and found.kind == "norm" and not found.losses for found in plan.planned]
    if not all(judged):
        after = before.outputs_after(model) if before.forward is not None else None
        if require_finite and isinstance(after, dict) and before.forward is not None:
            _require_finite(before.forward.outputs, after, model)
        runs = False
        if original is not None and "pos" in plan.kinds:
            changes = [change for one in plan.planned if one.kind == "pos" for change in one.changes]
            require_same_frequencies(model, [change.row.module for change in changes if change.replaces])
            runs = require_runs_in_full(model, original, plan.lengths, given)
        whole = _of_whole(before, model, after, bool(lossy), runs)
        apart = Outcome(EXACT, basis=f"{NOT_MEASURED} apart from {', '.join(lossy)}")
    outcomes: dict[str, list[Outcome]] = {}
    for found, is_checked in zip(plan.planned, judged, strict=True):
        own = [row for row in found.rows if row.kind != "stream" or row.becomes is None]  # not what is centred
        reasons = [row.reason for row in own if row.becomes is None and row.reason]
        kept = [f"{len(reasons)} of {len(own)} modules ({'; '.join(dict.fromkeys(reasons))})"] if reasons else []
        if unfolded := [str(change.row.reason) for change in found.folds if not change.replaces]:
            kept.append(f"{len(unfolded)} fixed norms, not folded ({'; '.join(dict.fromkeys(unfolded))})")
        outcome = checked if is_checked else apart if lossy and not found.losses else whole
        outcomes.setdefault(found.kind, []).append(replace(outcome, lost="; ".join(found.losses), kept="; ".join(kept)))
    return outcomes


def _require_finite(before: Mapping[str, Tensor], after: Mapping[str, Tensor], model: PreTrainedModel) -> None:
    """Refuse outputs that were finite and aren't any more.

    Raises:
        UnsupportedError: the message names the first of them.
    """
    finite = (name for name, value in after.items() if name not in before or bool(before[name].isfinite().all()))
    if (broken := next((name for name in finite if not bool(after[name].isfinite().all())), None)) is not None:
        raise UnsupportedError(
            f"{type(model).__name__}: after this patch its {broken} is NaN or infinite, and wasn't before. The model "
            "was left unchanged. Pass calibration= for a repair, keep= for norms that stay, or use a wider dtype."
        )


def _of_whole(
    before: Snapshot, model: PreTrainedModel, after: dict[str, Tensor] | Exception | None, lossy: bool, runs: bool
) -> Outcome:
    """Return the outcome of the whole patch.

    Args:
        before: the model before the patch.
        model: the model after it.
        after: the outputs afterwards on the inputs from before, or why there are none.
        lossy: whether anything isn't preserved.
        runs: whether it runs at the length and image size that its config says now.

    Raises:
        UnsupportedError: the model ran before, and no longer does.
    """
    if isinstance(after, dict):
        return _compare(before, model, after, lossy)
    if after is not None and not runs:
        reason = describe_error(after).rstrip(".")
        raise UnsupportedError(
            f"{type(model).__name__} doesn't run after this patch: {reason}. The model was left unchanged."
        ) from after
    if after is not None:
        return Outcome(
            APPROXIMATE, f"it runs at its new size, and not on the inputs of before ({describe_error(after)})"
        )
    if runs and lossy:
        return Outcome(APPROXIMATE, f"it runs after the patch, and on these inputs not before ({before.why_not})")
    return Outcome(APPROXIMATE if lossy else EXACT, before.why_not, basis=NOT_MEASURED)


def _compare(before: Snapshot, model: PreTrainedModel, after: dict[str, Tensor], lossy: bool) -> Outcome:
    found, basis = before.deviations(after), _basis(model, before.inputs)
    error, rms = max(one.max_error for one in found), max(one.rms_error for one in found)
    # A difference of 0 doesn't count: on these inputs what changed may not have run.
    differ = partial(Outcome, metric=Metric.DIFFERENCE, copied=rms or None)
    measured = f"outputs differ by {rms:.2g}"
    if lossy and not 0 < rms <= FACTOR * torch.finfo(torch.float32).eps:
        return differ(APPROXIMATE, measured, basis)
    verdict = before.within_rounding(model, error)
    if not verdict.holds:
        return differ(APPROXIMATE, measured if lossy else f"planned as exact, but {verdict.figures}", basis)
    differ = partial(differ, EXACT, elsewhere=verdict.elsewhere)
    if lossy:
        return differ(measured, basis or "on the inputs measured")
    return differ(verdict.figures, basis, copied=error)


def _basis(model: PreTrainedModel, inputs: Mapping[str, Any]) -> str:
    """Note of a comparison whose inputs leave out images or sounds that the model reads; "" if they leave out none."""
    missing = " and ".join(missing_media(model, inputs))
    return f"on inputs without {missing}" if missing else ""


def write_outcomes(model: PreTrainedModel, record: Record, outcomes: dict[str, list[Outcome]], init: str) -> None:
    """Store outcomes of a patch's schemes, by kind, with a patched model's record.

    Raises:
        VerificationError: init is "exact", and an outcome isn't exact, or could be measured and wasn't.
    """
    measurable = has_weights(model)
    for outcome in (one for of_kind in outcomes.values() for one in of_kind):
        unmeasured = measurable and outcome.verdict == EXACT and not outcome.metric
        if init == "exact" and (unmeasured or outcome.lost or outcome.verdict != EXACT):
            advice = " Pass example_inputs={...}, the keyword arguments of one forward." if unmeasured else ""
            text = f"{type(model).__name__}: {outcome}.{advice} The model was left unchanged."
            raise VerificationError(text, str(outcome))
    setattr(model.config, KEY, record.with_outcomes(outcomes).to_json())
