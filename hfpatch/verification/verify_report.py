"""Report of `verify`: a printed table, and JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ..core.plan_table import group_rows
from ..core.results import SavedResult, Table
from ..errors import OptionError
from ..schemes.request import KINDS, Record

STATES = {  # and how the table counts them
    "converted": "converted",
    "runtime": "with a runtime operation added",
    "kept": "kept",
    "weights": "with other weights",
}


@dataclass
class ModuleRow:
    """One module in both models.

    Attributes:
        module: its name.
        reference, model: what it is in each model.
        state: "converted" (another module, or none), "runtime" (the same module, which does something more in every
            forward), "kept" (a norm or position that stayed), "weights" (the same, with other Parameters).
        reason: why it was kept, or a note.
        runtime: what the module does in every forward that it didn't do before.
        change: rms of the difference of its Parameters, relative to the reference's; infinite if they don't match.
    """

    module: str
    reference: str
    model: str
    state: str
    reason: str | None = None
    runtime: str | None = None
    change: float = 0.0


@dataclass
class OutputRow:
    """One output of one run, compared with the reference in float64.

    Attributes:
        output: its name ("logits", "last_hidden_state", ...).
        role, dtype: which model ran ("reference" or "model"), in which dtype.
        max_error, rms_error: max|y - t| / rms(t) and rms(y - t) / rms(t).
        nonfinite: how many values are NaN or infinite where the truth isn't; if any, both errors are infinite.
        top1: share of tokens (or examples) whose likeliest class is the truth's; logits only, like the next two.
        kl: mean KL(truth || output) in nats per token (or example).
        perplexity: perplexity of the run itself, if the inputs give targets.
        cosine_mean, cosine_min: between vectors over the channels, per token (or example); not for logits.
        pooled_mean, pooled_min: the same between mean-pooled sequences.
    """

    output: str
    role: str
    dtype: str
    max_error: float
    rms_error: float
    nonfinite: int = 0
    top1: float | None = None
    kl: float | None = None
    perplexity: float | None = None
    cosine_mean: float | None = None
    cosine_min: float | None = None
    pooled_mean: float | None = None
    pooled_min: float | None = None


@dataclass
class LayerRow:
    """The residual stream after one layer (0: the first layer's input) of one run, compared with the reference.

    Attributes:
        stream: name of the output that holds it ("hidden_states", "encoder_hidden_states", ...).
        layer: index in it.
        role, dtype: as in OutputRow.
        error: rms of the difference relative to the truth's rms.
        centred: the same error after the mean over channels is subtracted from both: an exact change to RMSNorm moves
            this mean and nothing else.
    """

    stream: str
    layer: int
    role: str
    dtype: str
    error: float
    centred: float


@dataclass(repr=False)
class Report(SavedResult):
    """Result of `verify`; `str(report)` is the table.

    Attributes:
        model, reference: what was compared.
        inputs: the inputs, in words.
        examples, tokens: numbers of inputs and tokens; tokens is 0 if inputs aren't token ids. Padding doesn't count.
        modules, outputs, layers: the measurements.
        notes: what a reader of the numbers must know.
    """

    model: str
    reference: str
    inputs: str
    examples: int = 0
    tokens: int = 0
    modules: list[ModuleRow] = field(default_factory=list)
    outputs: list[OutputRow] = field(default_factory=list)
    layers: list[LayerRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def require_of(self, title: str) -> None:
        """Refuse a report of another model, by class and patch schemes.

        Args:
            title: the title of the expected model, as `title_of` writes it.

        Raises:
            OptionError: the report is of another model.
        """
        if self.model != title:
            raise OptionError(
                f"the report is of {self.model:.200}, and this model is {title}. Measure this one by verify, and give "
                "the report of that."
            )

    def parts(self) -> Iterable[Sequence[str | Table]]:
        size = f"{self.examples} examples" + (f", {self.tokens:,} tokens" if self.tokens else "")
        head = [f"{self.model} against {self.reference}. Inputs: {self.inputs} ({size})."]
        head += [
            f"NOT FINITE: {row.output} of the {row.role} in {row.dtype} has {row.nonfinite:,} NaN or infinite values."
            for row in self.outputs
            if row.nonfinite
        ]
        yield head
        yield self._modules_table()
        yield from ([table] for table in self.output_tables().values())
        for stream in dict.fromkeys(row.stream for row in self.layers):
            yield _layer_table([row for row in self.layers if row.stream == stream])
        if self.notes:
            yield [f"Note: {note}" for note in self.notes]

    def figures(self) -> dict[str, float]:
        """Return the model's figures in float32 under the names of the register of real models."""
        rows = {(row.role, row.dtype): row for row in self.outputs if row.output == self.outputs[0].output}
        row, truth = rows["model", "float32"], rows["reference", "float64"]
        found = {"KL mean": row.kl, "perplexity": row.perplexity, "perplexity of the original": truth.perplexity}
        found |= {"cosine mean": row.pooled_mean, "cosine lowest": row.pooled_min}
        return {name: value for name, value in found.items() if value is not None}

    def output_tables(self) -> dict[str, Table]:
        """Return the tables of the outputs by their names."""
        names = dict.fromkeys(row.output for row in self.outputs)
        return {name: _output_table([row for row in self.outputs if row.output == name]) for name in names}

    def _modules_table(self) -> list[str | Table]:
        if not self.modules:
            return ["No module differs."]
        lines = [("module", "reference", "model", "state", "note"), *module_lines(self.modules)]
        states = Counter(row.state for row in self.modules)
        counts = [f"{states[state]} {words}" for state, words in STATES.items() if states[state]]
        return [Table(lines), f"{', '.join(counts)}."]


def title_of(class_name: str, record: Record) -> str:
    """Return a model's title in reports: its class and its patch's schemes, with options."""
    schemes = [f"{kind}={part.as_requested.scheme}" for kind in KINDS for part in getattr(record, kind)]
    return class_name + (f" ({', '.join(schemes)})" if schemes else "")


def module_lines(rows: list[ModuleRow]) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield rows as cells: names, reference's module, model's, state, note; equal layers share a line."""
    for members, names in group_rows(rows, _in_one_line):
        row, count = members[0], len(members)
        change = max(one.change for one in members)
        changed = f"weights differ by {change:.1%}" if 0 < change < math.inf else None
        note = "; ".join(filter(None, (row.runtime, row.reason, changed)))
        now = "(same)" if row.model == row.reference and row.state != "converted" else row.model
        yield names + (f"  x{count}" if count > 1 else ""), row.reference, now, row.state, note


def _in_one_line(row: ModuleRow) -> tuple[object, ...]:
    return row.reference, row.model, row.state, row.reason, row.runtime, row.change == 0.0


def _error(value: float) -> str:
    return "0" if value == 0 else f"{value:.2g}" if 0.01 <= value < 1000 else f"{value:.1e}"


def _number(value: float) -> str:
    return f"{value:.4g}" if value < 1e5 else f"{value:.2e}"


def _share(value: float) -> str:
    return f"{math.floor(value * 1e4) / 100:.2f} %"  # never 100 % where it isn't


def _cosine(value: float) -> str:
    return "1" if value > 1 - 1e-12 else f"1 - {1 - value:.0e}" if value > 0.9999 else f"{value:.4f}"


_COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "max error": ("max_error", _error),
    "rms error": ("rms_error", _error),
    "top-1": ("top1", _share),
    "KL (nats)": ("kl", _error),
    "perplexity": ("perplexity", _number),
    "cosine": ("cosine_mean", _cosine),
    "its min": ("cosine_min", _cosine),
    "pooled cosine": ("pooled_mean", _cosine),
    "min pooled": ("pooled_min", _cosine),
}


def _output_table(rows: list[OutputRow]) -> Table:
    """One output's rows: two columns of words, then numbers."""
    shown = {
        heading: ["" if (value := getattr(row, name)) is None else spelled(value) for row in rows]
        for heading, (name, spelled) in _COLUMNS.items()
        if any(getattr(row, name) is not None for row in rows)
    }
    lines = [(rows[0].output, "dtype", *shown)]
    for row, *cells in zip(rows, *shown.values(), strict=True):
        if (row.role, row.dtype) == ("reference", "float64"):
            cells[:2] = "truth", "truth"
        lines.append((row.role, row.dtype, *cells))
    return Table(lines, "<<" + ">" * len(shown))


def _layer_table(rows: list[LayerRow]) -> list[str | Table]:
    runs = list(dict.fromkeys((row.role, row.dtype) for row in rows))
    found = {(row.layer, row.role, row.dtype): row for row in rows}
    lines = [(rows[0].stream, *(f"{role} {dtype}" for role, dtype in runs))]
    for layer in sorted({row.layer for row in rows}):
        cells = [found[layer, *run] for run in runs]
        lines.append((str(layer), *(f"{_error(c.error)} ({_error(c.centred)})" for c in cells)))
    head = "rms error layer by layer (in brackets without the mean over channels):"
    return [head, Table(lines, "<" + ">" * len(runs))]
