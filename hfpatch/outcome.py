"""Outcomes: what each request of a patch came to, measured on the model and kept in its record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .errors import VerificationError
from .exact.check import Reference, Verdict
from .measure.inputs import example_inputs
from .measure.outputs import FACTOR, Deviation, deviations, last_bit, noise_floor, not_a_number, outputs_of
from .measure.quiet_forward import fitting, quiet
from .repairs.reference import reference_copy
from .runtime.errors import UnsupportedError, described
from .runtime.record import KEY
from .schemes.request import EXACT, Outcome, Record

if TYPE_CHECKING:
    from .plan import Plan


_UNMEASURED = " as planned, not measured"


class Measurement:
    """Measures how far a patch moves a model's outputs: made before the patch, asked after it.

    Forwards run on copies that share the weights: some models change their own settings in a forward.

    Args:
        plan: of the patch.
        model: as it is before.
        inputs: keyword arguments of one forward; None generates them.
        reference: of the check of the plan's exact conversion, whose inputs and outputs serve here too.
        repairs: whether a repair follows, which measures what isn't exact.
    """

    def __init__(self, plan: Plan, model: PreTrainedModel, inputs: Any, reference: Reference | None, repairs: bool):
        self.plan, self.why_not = plan, ""
        self.lossy = [kind for kind in plan.by_kind if plan.losses(kind)]
        self.needed = not repairs if self.lossy else reference is None or len(plan.by_kind) > 1
        if any(parameter.is_meta for parameter in model.parameters()):
            self.why_not = "weights aren't in memory"
        elif reference is not None:
            self.inputs, self.before = reference.inputs, reference.original.outputs
        elif self.needed:
            try:
                self.inputs = fitting(model, example_inputs(model) if inputs is None else inputs)
                self.before = self._outputs(model)
            except Exception as error:  # whatever a forward on generated inputs may raise
                self.why_not = described(error)
            else:
                broken = not_a_number(self.before)
                self.why_not = "" if broken is None else f"its {broken} was NaN throughout before the patch"

    def outcomes(self, model: PreTrainedModel, verdict: Verdict | None) -> dict[str, str]:
        """By kind, what the patch came to; `verdict` is that of the exact conversion's check."""
        measured, outcomes = self._measured(model) if self.needed else "approximate", {}
        for kind, changes in self.plan.by_kind.items():
            lost = "; ".join(self.plan.losses(kind))
            if kind in self.lossy:
                found = measured
            elif kind == "norm" and verdict is not None:
                found = verdict.outcome
            else:
                found = f"{EXACT}{_UNMEASURED} apart from {', '.join(self.lossy)}" if self.lossy else measured
            reasons = [change.row.reason for change in changes if not change.changes and change.row.reason]
            kept = f"{len(reasons)} of {len(changes)} modules ({'; '.join(dict.fromkeys(reasons))})" if reasons else ""
            outcomes[kind] = str(Outcome(found, lost, kept))
        return outcomes

    def _measured(self, model: PreTrainedModel) -> str:
        """What the whole patch came to, in the words of an outcome.

        Raises:
            UnsupportedError: the model ran before, and no longer does.
        """
        if not self.why_not:
            try:
                found = deviations(self.before, self._outputs(model))
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # whatever a forward may raise
                self.why_not = described(error)
                if not self.plan.lengths:  # for a new length the inputs may be too long
                    raise UnsupportedError(
                        f"{type(model).__name__} doesn't run after this patch: {self.why_not.rstrip('.')}. The model "
                        "was left unchanged."
                    ) from error
            else:
                return self._compared(model, found)
        return f"{'approximate' if self.lossy else EXACT}{_UNMEASURED}: {self.why_not}"

    def _compared(self, model: PreTrainedModel, found: list[Deviation]) -> str:
        error, least = max(one.max_error for one in found), last_bit(model)
        rms = max(one.rms_error for one in found)
        # A difference of 0 doesn't count: on these inputs what changed may not have run.
        if self.lossy and not 0 < rms <= FACTOR * torch.finfo(torch.float32).eps:
            return f"approximate: outputs differ by {rms:.2g}"
        floor = least if error <= FACTOR * least else noise_floor(reference_copy(model), self.inputs)
        verdict = Verdict(error, FACTOR * max(floor, least))
        if self.lossy:
            found_so = f"{EXACT} on the inputs measured" if verdict.holds else "approximate"
            return f"{found_so}: outputs differ by {rms:.2g}"
        return verdict.outcome

    def _outputs(self, model: PreTrainedModel) -> dict[str, Tensor]:
        copied = reference_copy(model)
        with quiet(copied):
            return outputs_of(copied, self.inputs)


def write_outcomes(model: PreTrainedModel, outcomes: Mapping[str, str], init: str) -> None:
    """Put outcomes, by kind, into a patched model's record.

    Raises:
        VerificationError: with init="exact", one isn't exact, or could be measured and wasn't.
    """
    has_weights = not any(parameter.is_meta for parameter in model.parameters())
    for line in outcomes.values():
        outcome = Outcome.of(line)
        unmeasured = has_weights and outcome.found.startswith(f"{EXACT}{_UNMEASURED}")
        if init == "exact" and (unmeasured or outcome.lost or outcome.verdict != EXACT):
            advice = " Pass example_inputs={...}, the keyword arguments of one forward." if unmeasured else ""
            raise VerificationError(f"{type(model).__name__}: {line}.{advice} The model was left unchanged.", line)
    setattr(model.config, KEY, Record.of(model.config).with_outcomes(outcomes).to_json())
