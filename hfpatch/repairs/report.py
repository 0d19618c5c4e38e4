"""Report of a repair: its steps and what the whole came to."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from ..core.plan_table import table


@dataclass
class Step:
    """What was fitted at one place.

    Attributes:
        module: its name, or that of the first of several maps that read the same tensor.
        kind: "norm", "maps", "readers" or "projection".
        before, after: mean squared distance to the original on held-out sequences, as a share of the variance of what
            is to be matched (a norm's output, a reader's input, the stream); of attention maps their KL divergence in
            nats, over queries and heads. None where nothing could be fitted.
        kept: whether it helped; otherwise it was undone.
        note: what was found, or the reason why nothing was fitted.
    """

    module: str
    kind: str
    before: float | None = None
    after: float | None = None
    kept: bool = False
    note: str = ""


@dataclass
class FittedValues:
    """Values that were fitted to a module's Parameters, and their errors on held-out data.

    Attributes:
        before, after: errors of the present and of the fitted values.
        values: by the Parameters' names in the module.
        note: on what was found.
    """

    before: float
    after: float
    values: dict[str, Tensor]
    note: str = ""


@dataclass
class RepairReport:
    """What a repair did; `str(report)` is a table.

    Attributes:
        sequences, held_out: how many there were, and how many of them judged.
        measure: what `before` and `after` are.
        before, after: distance of the model's outputs from the original's on the held-out sequences.
        kept: whether the whole helped there; otherwise all of it was undone.
        steps: in forward order.
    """

    sequences: int = 0
    held_out: int = 0
    measure: str = ""
    before: float = math.nan
    after: float = math.nan
    kept: bool = False
    steps: list[Step] = field(default_factory=list)

    @property
    def recovered(self) -> float:
        """The share of the distance that the repair took away; 0 where it was undone."""
        return 1 - self.after / self.before if self.kept else 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def save(self, path: str | Path) -> None:
        """Write the report as JSON."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    def __str__(self) -> str:
        lines: list[tuple[str, ...]] = [("module", "fitted", "before", "after", "note")]
        for step in self.steps:
            numbers = tuple("-" if value is None else f"{value:.2e}" for value in (step.before, step.after))
            undone = "" if step.kept or step.after is None else "undone: it didn't help. "
            lines.append((step.module, step.kind, *numbers, undone + step.note))
        return f"{table(lines)}\n{self.summary()}"

    def summary(self) -> str:
        """The whole in one line."""
        result = "kept" if self.kept else "undone, since it didn't help"
        return (
            f"Repair on {self.sequences} sequences: {self.measure} {self.before:.3g} -> {self.after:.3g} on "
            f"{self.held_out} held-out sequences; {result}."
        )
