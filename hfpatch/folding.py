"""Folded norms on the user's model: folds fixed norms after their repair, and checks that a fold is exact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from .checkpoint.patched_config import give_patched_config
from .core.bare import has_weights
from .core.transaction import Transaction
from .errors import VerificationError
from .measure.randomness import keep_random_state
from .measure.snapshot import Snapshot, Verdict
from .outcome import snapshot_of
from .plan import Plan
from .runtime.errors import UnsupportedError, describe_error
from .runtime.record import KEY
from .schemes.fixed import Folded, WithoutNorms
from .schemes.request import Record
from .schemes.verdicts import Outcome
from .sites.sites import Sites
from .swap.planners import PlannerResult


def require_weights(plan: Plan, model: PreTrainedModel) -> None:
    """Refuse to fold the norms of a model without weights, which a fold multiplies.

    Raises:
        UnsupportedError: it is on the meta device.
    """
    for scheme in plan.schemes:
        if isinstance(scheme, Folded | WithoutNorms) and not has_weights(model):
            raise UnsupportedError(
                f"norm={str(scheme)!r} multiplies weights, and this model has none yet (meta device). Load it."
            )


def check_folded(plan: Plan, before: Snapshot, model: PreTrainedModel) -> Verdict | None:
    """Return the verdict on the folded norms of a plan; None where it folds none, or nothing can be measured.

    Args:
        plan: of which what keeps the function was carried out.
        before: the model before it.
        model: after it.

    Raises:
        VerificationError: the outputs differ by more than rounding.
        UnsupportedError: the model ran before and no longer does.
    """
    found = [one for one in plan.planned if isinstance(one.part.scheme, Folded | WithoutNorms) and not one.losses]
    if not found or before.forward is None:
        return None
    after = before.outputs_after(model)
    if isinstance(after, Exception):
        reason = describe_error(after).rstrip(".")
        raise UnsupportedError(
            f"{plan.model_name} doesn't run with folded norms: {reason}. The model was left unchanged."
        ) from after
    verdict = before.within_rounding(model, max(one.max_error for one in before.deviations(after)))
    if not verdict.holds:
        fixed = any(isinstance(one.part.scheme, WithoutNorms) for one in found)
        otherwise = " Use norm='fixed' to leave them unfolded." if fixed else ""
        raise VerificationError(
            f"{plan.model_name}: folding its norms isn't exact on this model: {verdict.figures}. The model was left "
            f"unchanged.{otherwise}",
            verdict.figures,
        )
    return verdict


def fold_fixed_norms(
    plan: Plan, model: PreTrainedModel, transaction: Transaction, inputs: Mapping[str, Any] | None
) -> None:
    """Fold the fixed norms that a plan put in, where its schemes say so, and check that on the model.

    Args:
        plan: that was carried out, repair included.
        model: after it.
        transaction: logs the changes.
        inputs: keyword arguments of one forward; None generates them.

    Raises:
        VerificationError, UnsupportedError: as in `check_folded`.
    """
    found = [one for one in plan.planned if isinstance(one.part.scheme, WithoutNorms)]
    if not found:
        return
    from .swap.folded import plan_fold_of_fixed  # other schemes need none of it

    names = [[change.row.module for change in one.changes if change.changes] for one in found]
    with keep_random_state(), torch.inference_mode(False):
        sites = Sites(model, inputs)
        alone = set(plan.kinds) == {"norm"}
        folded = [
            plan_fold_of_fixed(sites, one.part, own, one.readers if alone else None)
            for one, own in zip(found, names, strict=True)
        ]
        folding, verdict = Plan.of(model, Record.of(model.config), folded), None
        if not folding.empty:
            before = snapshot_of(model, folding, inputs)
            for phase in folding.phases:
                phase.apply(model, transaction)
            give_patched_config(model, folding.record, transaction, [])
            verdict = check_folded(folding, before, model)
    _record_folded(model, folded, "" if verdict is None else verdict.elsewhere)


def _record_folded(model: PreTrainedModel, folded: Sequence[PlannerResult], elsewhere: str) -> None:
    """Add what came of folding to the outcomes in the model's record, whose newest requests these are.

    Args:
        model: after it.
        folded: with the fixed norms that couldn't be folded.
        elsewhere: as in `Outcome`.
    """
    record, outcomes = Record.of(model.config), []
    for found, part in zip(folded, record.newest("norm", len(folded)), strict=True):
        reasons = [str(change.row.reason) for change in found.changes if not change.changes]
        outcome = replace(part.outcome or Outcome(""), elsewhere=elsewhere)
        if reasons:
            text = f"{len(reasons)} fixed norms, not folded ({'; '.join(dict.fromkeys(reasons))})"
            outcome = replace(outcome, kept="; ".join(filter(None, (outcome.kept, text))))
        outcomes.append(outcome)
    setattr(model.config, KEY, record.with_outcomes({"norm": outcomes}).to_json())
