"""An outcome as data: what the measurement of a request gave, and how much of the original is left."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

from ..core.results import Result, Table
from ..runtime.declared_types import declared_types, is_of_type


class Metric(StrEnum):
    """Measure of an outcome's distance, as the table of outcomes and config.json name it."""

    DIFFERENCE = "difference"
    KL = "KL divergence"
    SQUARED_ERROR = "relative squared error of the outputs"


EXACT, APPROXIMATE, REPAIRED = VERDICTS = ("exact", "approximate", "repaired")
NOT_MEASURED = "as planned, not measured"  # basis of an outcome
_LONGEST_OUTCOME = 4_000  # characters
ENOUGH = 0.99  # share of the original's quality from which on a patched model needs no training
HEADINGS = ("request", "outcome", "copied", "repaired", "kept", "training required?", "metric")
COLUMNS = (  # explains a table of outcomes
    f"copied, repaired: distance from the model before the patch. kept: 1 - {Metric.DIFFERENCE}^2, exp(-KL), or 1 - "
    f"squared error. training required?: no from {ENOUGH:.0%} on."
)
MEASUREMENT_NOTE = (  # explains the measurements, too
    f"{COLUMNS} {Metric.DIFFERENCE}: the root mean square of the outputs' difference (where exact, the largest "
    "difference), divided by that of the outputs, on a few random inputs (or example_inputs=). Repairs: KL divergence "
    "in nats a token, or the outputs' squared error relative to their mean square, on held-out sequences."
)


@dataclass(frozen=True)
class Outcome:
    """The measured result of one request; `str(outcome)` is the line that users see.

    Attributes:
        verdict: "exact", "approximate" or "repaired".
        measured: what was measured, or why nothing was: "outputs differ by 2e-07, rounding explains 1e-05".
        basis: what the verdict rests on, if it isn't a comparison with the original on all kinds of inputs: "as
            planned, not measured", "on inputs without images".
        lost: what isn't preserved.
        kept: which modules stayed as they were, and why.
        elsewhere: outputs of models inside that are another function nevertheless, for classes that open these models
            alone: "LlamaModel's last_hidden_state".
        by_repair: whether a repair led to this outcome, even if the repair was undone.
        metric: what `copied` and `repaired` are (`Metric`); "" if nothing was measured.
        copied, repaired: distance from the model before the patch: before a repair, and after a repair that was kept.
        samples: held-out sequences behind these distances; 0 for random inputs.
    """

    verdict: str
    measured: str = ""
    basis: str = ""
    lost: str = ""
    kept: str = ""
    elsewhere: str = ""
    by_repair: bool = False
    metric: str = ""
    copied: float | None = None
    repaired: float | None = None
    samples: int = 0

    def __str__(self) -> str:
        parts = [("; not preserved: ", self.lost), ("; kept: ", self.kept)]
        return self.result + "".join(start + text for start, text in parts if text)

    @property
    def result(self) -> str:
        """The verdict and what was measured: "exact: outputs differ by 2e-07"."""
        verdict = f"{self.verdict} {self.basis}" if self.basis else self.verdict
        verdict += f" but for {self.elsewhere}" if self.elsewhere else ""
        return f"{verdict}: {self.measured}" if self.measured else verdict

    @property
    def share(self) -> float | None:
        """The share of the original that is left, at least 0; None if it wasn't measured."""
        if self.verdict == EXACT:
            return 1.0
        distance = self.copied if self.repaired is None else self.repaired
        if distance is None:
            return None
        if self.metric == Metric.KL:
            return math.exp(-max(distance, 0.0))
        return max(0.0, 1 - (distance**2 if self.metric == Metric.DIFFERENCE else distance))

    def cells(self) -> tuple[str, ...]:
        """Return the outcome's row of a table, under HEADINGS without the request."""
        share = self.share
        kept, needed = ("-", "-") if share is None else (f"{share:.1%}", "no" if round(share, 3) >= ENOUGH else "yes")
        distances = ("-" if value is None else f"{value:.3g}" for value in (self.copied, self.repaired))
        metric = f"{self.metric}, {self.samples} held-out" if self.samples else self.metric
        return (self.verdict or "not recorded", *distances, kept, needed, metric or "-")

    def to_json(self) -> dict[str, Any]:
        """Return the fields that aren't at their defaults."""
        return {one.name: value for one in fields(self) if (value := getattr(self, one.name)) != one.default}

    @classmethod
    def from_json(cls, stored: Any) -> Outcome:
        """Return the outcome that `to_json` wrote.

        Raises:
            ValueError: it isn't an outcome, or a text in it isn't a line of bounded length.
        """
        types = declared_types(cls)
        if not isinstance(stored, dict) or not stored.keys() <= types.keys() or stored.get("verdict") not in VERDICTS:
            raise ValueError(f"its outcome isn't one of {', '.join(VERDICTS)} with {', '.join(types)}")
        for name, value in stored.items():
            is_line = not isinstance(value, str) or (value.isprintable() and len(value) <= _LONGEST_OUTCOME)
            in_range = not isinstance(value, int | float) or 0 <= value < math.inf
            if not (is_of_type(value, types[name]) and is_line and in_range):
                raise ValueError(f"its outcome's {name} can't be {value!r:.40}")
        return cls(**stored)

    def printable(self) -> Outcome:
        """Return the outcome as a checkpoint holds it: printable lines of a bounded length, and finite numbers."""

        def fit(value: Any) -> Any:
            if isinstance(value, str):
                return "".join(filter(str.isprintable, value))[:_LONGEST_OUTCOME]
            return None if isinstance(value, float) and not math.isfinite(value) else value

        return replace(self, **{one.name: fit(getattr(self, one.name)) for one in fields(self)})


def outcome_table(outcomes: Mapping[str, Outcome]) -> Table:
    """Return outcomes by request as a table; MEASUREMENT_NOTE explains its columns."""
    return Table([HEADINGS, *((request, *one.cells()) for request, one in outcomes.items())], "<<>>>><")


class Outcomes(dict[str, str], Result):
    """Outcomes by request: a dict of lines, printed as a table with what isn't preserved.

    Attributes:
        found: the same as `Outcome`s.
    """

    def __init__(self, found: Mapping[str, Outcome]) -> None:
        super().__init__((request, str(one)) for request, one in found.items())
        self.found = dict(found)

    __repr__ = dict.__repr__

    def parts(self) -> Iterable[Sequence[str | Table]]:
        if not self.found:
            yield ("Nothing is patched.",)
            return
        yield outcome_table(self.found), COLUMNS
        yield [f"{request}: {line}" for request, line in self.items()]
