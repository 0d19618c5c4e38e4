"""Outcomes: what each request of a patch came to, measured on the model and kept in its record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from .errors import VerificationError
from .exact.check import Reference, Verdict
from .measure.copies import copy_of
from .measure.inputs import example_inputs
from .measure.outputs import FACTOR, Deviation, deviations, last_bit, noise_floor, not_a_number
from .measure.quiet_forward import fitting
from .measure.shrink import TOKENS
from .runtime.errors import UnsupportedError, described
from .runtime.record import KEY
from .schemes.request import EXACT, Outcome, Record
from .swap.full_length import full_length
from .swap.native_rope import require_same_frequencies
from .swap.trial import OUT_OF_MEMORY, Outputs, equal, require_moved, require_runs_in_full, run

if TYPE_CHECKING:
    from .plan import Plan


_UNMEASURED = " as planned, not measured"


class Measurement:
    """Measures how far a patch moves a model's outputs: made before the patch, asked after it.

    Where positions change, the patched model also runs at the length and the image size that its config then says. What
    ran before and doesn't run there is refused, and so is a change of positions that moves no output.

    Forwards run on copies that share the weights: some models change their own settings in a forward.

    Args:
        plan: of the patch.
        model: as it is before.
        inputs: keyword arguments of one forward; None generates them.
        reference: of the check of the plan's exact conversion, whose inputs and outputs serve here too.
        repairs: whether a repair follows, which measures what isn't exact.

    Raises:
        MemoryError, torch.OutOfMemoryError: there is too little memory to run the model as it is.
    """

    def __init__(self, plan: Plan, model: PreTrainedModel, inputs: Any, reference: Reference | None, repairs: bool):
        self.plan, self.why_not, self.given = plan, "", inputs
        self.lossy = [kind for kind in plan.by_kind if plan.losses(kind)]
        self.needed = not repairs if self.lossy else reference is None or len(plan.by_kind) > 1
        has_weights = not any(parameter.is_meta for parameter in model.parameters())
        self.original: PreTrainedModel | None = None
        if not has_weights:
            self.why_not = "weights aren't in memory"
        elif reference is not None:
            self.inputs, self.before = reference.inputs, reference.original.outputs
        elif self.needed:
            try:
                self.inputs = fitting(model, self._short_inputs(model) if inputs is None else inputs)
                self.before = self._outputs(model)
            except OUT_OF_MEMORY:
                raise
            except Exception as error:  # whatever a forward on generated inputs may raise
                self.why_not = described(error)
            else:
                broken = not_a_number(self.before)
                self.why_not = "" if broken is None else f"its {broken} was NaN throughout before the patch"

    def keep_original(self, model: PreTrainedModel) -> None:
        """Keep a copy to compare positions with, once exact conversions are done: it would keep their old weights."""
        has_weights = not any(parameter.is_meta for parameter in model.parameters())
        self.original = copy_of(model, share=True) if has_weights and "pos" in self.plan.by_kind else None

    def _short_inputs(self, model: PreTrainedModel) -> dict[str, Any]:
        """Return inputs that are short enough for the model before and after the patch."""
        if "pos" not in self.plan.by_kind:
            return example_inputs(model)
        new = self.plan.record.pos[-1].scheme.max_positions
        lengths = [length for length in (full_length(model), new) if length is not None and length < TOKENS]
        return example_inputs(model, tokens=min(lengths, default=None))

    def outcomes(self, model: PreTrainedModel, verdict: Verdict | None) -> dict[str, str]:
        """By kind, what the patch came to; `verdict` is that of the exact conversion's check.

        Raises:
            UnsupportedError: the model ran before and no longer does, or a change of positions moved no output.
        """
        after = self._after(model) if self.needed and not self.why_not else None
        runs = self.original is not None and self._positions_run(model, after)
        measured, outcomes = self._measured(model, after, runs) if self.needed else "approximate", {}
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

    def _positions_run(self, model: PreTrainedModel, after: Outputs | Exception | None) -> bool:
        """Whether a model with other positions runs at its full length and image size; False if nothing tells."""
        changes, scheme = self.plan.by_kind["pos"], self.plan.record.pos[-1].scheme
        require_same_frequencies(model, [change.row.module for change in changes if change.changes])
        moved = isinstance(after, dict) and not equal(self.before, after)
        if "pos" in self.lossy and scheme.any_length and not moved and not self._sets_length_alone():
            require_moved(model, self.original, changes, f"pos={str(scheme)!r}")
        return require_runs_in_full(model, self.original, self.plan.lengths, self.given)

    def _sets_length_alone(self) -> bool:
        """Whether the request is the present scheme with another length, which only the config says."""
        *earlier, newest = (part.scheme for part in self.plan.record.pos)
        lengths = {"max_positions": newest.max_positions, "original_max_positions": newest.original_max_positions}
        return bool(earlier) and replace(earlier[-1], **lengths) == newest

    def _measured(self, model: PreTrainedModel, after: Outputs | Exception | None, runs: bool) -> str:
        """What the whole patch came to, in the words of an outcome.

        Args:
            model: after the patch.
            after: its outputs on the inputs of before, or why there are none.
            runs: whether it runs at the length and image size that its config says now.

        Raises:
            UnsupportedError: the model ran before, and no longer does.
        """
        if isinstance(after, dict):
            return self._compared(model, deviations(self.before, after))
        if after is not None and not runs:
            reason = described(after).rstrip(".")
            raise UnsupportedError(
                f"{type(model).__name__} doesn't run after this patch: {reason}. The model was left unchanged."
            ) from after
        if after is not None:
            return f"approximate: it runs at its new size, and not on the inputs of before ({described(after)})"
        if runs and self.lossy:
            return f"approximate: it runs after the patch, and on these inputs not before ({self.why_not})"
        return f"{'approximate' if self.lossy else EXACT}{_UNMEASURED}: {self.why_not}"

    def _compared(self, model: PreTrainedModel, found: list[Deviation]) -> str:
        error, least = max(one.max_error for one in found), last_bit(model)
        rms = max(one.rms_error for one in found)
        # A difference of 0 doesn't count: on these inputs what changed may not have run.
        if self.lossy and not 0 < rms <= FACTOR * torch.finfo(torch.float32).eps:
            return f"approximate: outputs differ by {rms:.2g}"
        floor = least if error <= FACTOR * least else noise_floor(copy_of(model, share=True), self.inputs)
        verdict = Verdict(error, FACTOR * max(floor, least))
        if self.lossy:
            found_so = f"{EXACT} on the inputs measured" if verdict.holds else "approximate"
            return f"{found_so}: outputs differ by {rms:.2g}"
        return verdict.outcome

    def _after(self, model: PreTrainedModel) -> Outputs | Exception:
        """The patched model's outputs, or the error of its forward."""
        try:
            return self._outputs(model)
        except OUT_OF_MEMORY:
            raise
        except Exception as error:  # whatever a forward may raise
            return error

    def _outputs(self, model: PreTrainedModel) -> Outputs:
        return run(model, self.inputs)


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
