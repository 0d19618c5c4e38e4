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
from .measure.outputs import FACTOR, Deviation, deviations, last_bit, noise_floor, outputs_of
from .measure.quiet_forward import fitting, quiet
from .repairs.reference import reference_copy
from .runtime.errors import UnsupportedError, described
from .runtime.record import KEY
from .schemes.request import EXACT, LOST, Record

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

    def outcomes(self, model: PreTrainedModel, verdict: Verdict | None) -> dict[str, str]:
        """By kind, what the patch came to; `verdict` is that of the exact conversion's check."""
        measured, found = self._measured(model) if self.needed else "", {}
        for kind, changes in self.plan.by_kind.items():
            if kind in self.lossy:
                found[kind] = f"approximate{measured}{LOST}{'; '.join(self.plan.losses(kind))}"
            elif kind == "norm" and verdict is not None:
                found[kind] = verdict.outcome
            else:
                apart = f"{EXACT}{_UNMEASURED} apart from {', '.join(self.lossy)}"
                found[kind] = apart if self.lossy else measured
            kept = [change.row.reason for change in changes if not change.changes and change.row.reason]
            if kept:
                found[kind] += f"; kept: {len(kept)} of {len(changes)} modules ({'; '.join(dict.fromkeys(kept))})"
        return found

    def _measured(self, model: PreTrainedModel) -> str:
        """The measured part of an outcome, with its first word where the whole patch should be exact.

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
        return f"{'' if self.lossy else EXACT}{_UNMEASURED}: {self.why_not}"

    def _compared(self, model: PreTrainedModel, found: list[Deviation]) -> str:
        if self.lossy:
            return f": outputs differ by {max(one.rms_error for one in found):.2g}"
        error, least = max(one.max_error for one in found), last_bit(model)
        floor = least if error <= FACTOR * least else noise_floor(reference_copy(model), self.inputs)
        return Verdict(error, FACTOR * max(floor, least)).outcome

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
    for outcome in outcomes.values():
        unmeasured = has_weights and outcome.startswith(f"{EXACT}{_UNMEASURED}")
        if init == "exact" and (unmeasured or not outcome.startswith(EXACT)):
            advice = " Pass example_inputs={...}, the keyword arguments of one forward." if unmeasured else ""
            raise VerificationError(
                f"{type(model).__name__}: {outcome}.{advice} The model was left unchanged.", outcome
            )
    setattr(model.config, KEY, Record.of(model.config).with_outcomes(outcomes).to_json())
