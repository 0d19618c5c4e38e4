"""Report of a repair: its steps, and the distance from the original before and after."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import ClassVar

from torch import Tensor

from ..core.results import SavedResult, Table
from ..schemes.verdicts import APPROXIMATE, REPAIRED, Metric, Outcome

# What a repair may leave without a warning (see NotPreservedWarning): a distance, a share of the distance before
_MOST_LEFT, _MOST_LEFT_OTHERWISE, _MOST_SHARE_LEFT = {str(Metric.KL): 0.1}, 0.01, 0.5
_NOTHING_LEFT = 1e-6  # a distance that never gets a warning
_LEGEND = (
    "before, after: squared distance to the original, measured on held-out sequences before and after the values were "
    "written, as a share of the original's variance; of maps the KL divergence."
)
_PRICES = "price: distance of the outputs if this norm alone is replaced."
_FRESH = "fresh: sequences that nobody calibrated on. They undo a repair only if outputs aren't finite there."
_UNDONE = "undone, since it didn't help by more than noise"
_BROKE = "undone, since it made outputs NaN or infinite"
_SHORT = 4  # calibration shorter than the model's positions divided by this gets a note


class Fresh(StrEnum):
    """Kinds of sequences that nobody calibrated on."""

    LONGER = "longer sequences"
    OWN = "sequences that it writes"
    RANDOM = "random tokens"


def is_short(longest: int, positions: int) -> bool:
    """Return whether sequences of at most `longest` tokens are much shorter than a model's number of positions."""
    return 0 < longest * _SHORT <= positions


@dataclass
class Step:
    """Step of a repair: a module and what was fitted.

    Attributes:
        module: its name, or the name of the first of several maps that read the same tensor.
        kind: "norm", "maps", "readers" or "projection".
        before, after: mean squared distance to the original on held-out sequences, as a share of the target's variance
            (a norm's output, the readers' outputs, the stream); for attention maps the KL divergence in nats, over
            queries and heads. Both are measured on the model, `after` once the values are written to it in its dtype.
            None if nothing could be fitted.
        kept: whether it helped; otherwise it was undone. The whole repair may have been undone later (see
            `RepairReport.kept`).
        note: what was found, or the reason why nothing was fitted.
    """

    module: str
    kind: str
    before: float | None = None
    after: float | None = None
    kept: bool = False
    note: str = ""


@dataclass
class Judgement:
    """Distance from the original on fresh sequences of one kind, which nobody calibrated on.

    Attributes:
        kind: kind of sequences (`Fresh`).
        sequences, length: how many sequences, and the most tokens of a sequence.
        before, after: mean distance over their tokens, before and after the repair; infinite if an output isn't finite.
        worst_before, worst_after: the largest distance of a token.
        broken_before, broken_after: sequences with outputs that aren't finite.
    """

    kind: str
    sequences: int
    length: int
    before: float
    after: float
    worst_before: float
    worst_after: float
    broken_before: int
    broken_after: int

    def __str__(self) -> str:
        where = f"at {self.length} tokens" if self.kind == Fresh.LONGER else f"on {self.kind}"
        return f"{self.before:.3g} -> {self.after:.3g} {where}"


@dataclass
class FittedValues:
    """Values fitted to a module's Parameters, before they are written and judged.

    Attributes:
        values: by the Parameters' names in the module.
        note: what the fit found.
    """

    values: dict[str, Tensor]
    note: str = ""


@dataclass(repr=False)
class RepairReport(SavedResult):
    """Report of a repair; `str(report)` is a table.

    Attributes:
        sequences, held_out: how many there were, and how many of them were held out to judge. No held-out sequence
            nearly equals a fitted sequence.
        distinct: how many of the sequences differ.
        tokens: how many tokens (or other positions) were fitted; each stands in one of the sequences.
        longest, positions: tokens of the longest sequence, and positions of the original; 0 if there is no such number.
        measure: what `before` and `after` are.
        before, after: mean distance of the model's outputs from the original's on the held-out sequences; infinite if
            an output isn't finite. These sequences also chose penalties and steps: judge on others what is published.
        worst_before, worst_after: the largest distance of a held-out token.
        fresh: the same distances on sequences that nobody calibrated on. They decide whether the repair suffices, and
            undo it only if outputs aren't finite there. The longer ones are held-out sequences, joined.
        advice: what in the model limits the repair, and what to do about it if the repair doesn't suffice.
        kept: whether the whole repair helped on the held-out sequences by more than noise, with finite outputs on all
            sequences that judged it; otherwise the whole repair was undone.
        steps: in forward order.
        prices: by norm, the distance of the outputs if it alone is replaced; measured for keep="auto:...".
    """

    sequences: int = 0
    held_out: int = 0
    measure: str = ""
    before: float = math.nan
    after: float = math.nan
    kept: bool = False
    steps: list[Step] = field(default_factory=list)
    distinct: int = 0
    tokens: int = 0
    longest: int = 0
    positions: int = 0
    worst_before: float = math.nan
    worst_after: float = math.nan
    fresh: list[Judgement] = field(default_factory=list)
    advice: str = ""
    prices: dict[str, float] = field(default_factory=dict)

    version: ClassVar[int] = 2
    gone: ClassVar[frozenset[str]] = frozenset({"longer", "longer_before", "longer_after"})  # `fresh` has them

    @property
    def recovered(self) -> float:
        """The share of the distance that the repair took away; 0 if it was undone."""
        return 1 - self.after / self.before if self.kept else 0.0

    @property
    def suffices(self) -> bool:
        """Whether the distance left to the original is small enough for no warning (see NotPreservedWarning)."""
        judged: list[RepairReport | Judgement] = [self, *(one for one in self.fresh if one.kind == Fresh.LONGER)]
        enough = all(
            (one.after if self.kept else one.before)
            <= max(_NOTHING_LEFT, min(self._most, _MOST_SHARE_LEFT * one.before))
            for one in judged
        )
        return enough and not (self.kept and self.farther)

    @property
    def little_left(self) -> bool:
        """Whether the patched model, as it is now, is near the original, with the repair or without it."""
        return (self.after if self.kept else self.before) <= self._most

    @property
    def _most(self) -> float:
        return _MOST_LEFT.get(self.measure, _MOST_LEFT_OTHERWISE)

    @property
    def farther(self) -> list[Judgement]:
        """The kinds of fresh sequences on which the repair led away from the original."""
        return [one for one in self.fresh if not one.after <= max(one.before, self._most)]

    def broken(self, after: bool) -> list[str]:
        """Return where outputs aren't finite, before or after the repair, in words."""
        found = [(f"{self.held_out} held-out sequences", not math.isfinite(self.after if after else self.before))]
        for one in self.fresh:
            count = one.broken_after if after else one.broken_before
            found.append((f"{count} of {one.sequences} {one.kind} of {one.length} tokens", bool(count)))
        return [where for where, is_broken in found if is_broken]

    def outcome(self) -> Outcome:
        """Return the outcome of what was repaired, as the patch record has it."""
        measured = partial(Outcome, by_repair=True, metric=self.measure, copied=self.before, samples=self.held_out)
        if self.kept:
            return measured(REPAIRED, self._figures, repaired=self.after)
        return measured(APPROXIMATE, f"a repair was {self._undone} ({self._figures})")

    @property
    def _undone(self) -> str:
        return _BROKE if self.broken(after=True) and not self.broken(after=False) else _UNDONE

    @property
    def _figures(self) -> str:
        on = f"on {self.held_out} held-out sequence{'s' * (self.held_out != 1)}"
        worst = f" (worst token {self.worst_before:.3g} -> {self.worst_after:.3g})" * (not math.isnan(self.worst_after))
        shown = [f", and {one}" for one in self.fresh if one.kind == Fresh.LONGER or one in self.farther]
        return f"{self.measure} {self.before:.3g} -> {self.after:.3g} {on}{worst}{''.join(shown)}"

    def parts(self) -> Iterable[Sequence[str | Table]]:
        lines: list[tuple[str, ...]] = [("module", "fitted", "before", "after", "note")]
        for step in self.steps:
            numbers = tuple("-" if value is None else f"{value:.2e}" for value in (step.before, step.after))
            undone = "" if step.kept or step.after is None else "undone: it didn't help. "
            lines.append((step.module, step.kind, *numbers, undone + step.note))
        if self.prices:
            replaced = {step.module for step in self.steps if step.kind == "norm"}
            cheapest = sorted(self.prices.items(), key=lambda one: one[1])
            listed = [(name, f"{price:.2g}", "" if name in replaced else "kept") for name, price in cheapest]
            yield Table([("norm", "price", ""), *listed], "<><"), _PRICES
        yield Table(lines), _LEGEND, *((self._table_of_fresh(), _FRESH) if self.fresh else ()), self.summary()

    def _table_of_fresh(self) -> Table:
        lines: list[tuple[str, ...]] = [
            ("fresh", "sequences", "tokens", "before", "after", "worst before", "worst after", "not finite")
        ]
        for one in self.fresh:
            numbers = (f"{value:.3g}" for value in (one.before, one.after, one.worst_before, one.worst_after))
            broken = f"{one.broken_before} -> {one.broken_after}"
            lines.append((one.kind, str(one.sequences), str(one.length), *numbers, broken))
        return Table(lines, "<>>>>>>>")

    def summary(self) -> str:
        """Return the report in one line."""
        distinct = f"{self.distinct} distinct, " if 0 < self.distinct < self.sequences else ""
        amount = f" ({distinct}{self.tokens:,} tokens fitted)" if self.tokens else ""
        result = f"{self._figures}; {'kept' if self.kept else self._undone}."
        return f"Repair on {self.sequences} sequences{amount}: {result} {self.notes}".rstrip()

    @property
    def notes(self) -> str:
        """How to get a better repair, or to know more about this repair; "" if there is nothing to say."""
        few = "One held-out sequence is no judgement: calibrate on more." if self.held_out == 1 else ""
        advice = "" if self.suffices else self.advice
        return " ".join(part for part in (few, self.length_note, advice) if part)

    @property
    def length_note(self) -> str:
        """A sentence about calibration that is much shorter than the model's positions; "" if it isn't."""
        if not is_short(self.longest, self.positions):
            return ""
        return (
            f"The sequences have at most {self.longest} tokens and the model {self.positions:,} positions: calibrate "
            "on sequences as long as those that it is used for."
        )
